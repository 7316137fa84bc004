/* methods.h — Engine's methods, once: with METHOD and its like as declarations they are bind.h's,
 * as entries engine.c's table. Name, signature, docstring.
 *
 *     METHOD   takes a tuple of arguments
 *     NOARGS   none
 *     ONE      one
 *     FAST     an array of them: of methods that are called for every window
 *     KEYWORD  a tuple and a dict
 */
NOARGS(close, "",
       "Stop the engine's threads. Arrays stay valid. Idempotent.")

KEYWORD(add_unit, ", name, dtypes, numels, trainable", "The new unit's number.")
METHOD(set_trainable, ", unit, param, on, /", "")
METHOD(hi_bytes, ", unit, /", "Bytes of the unit's weights: what a slot must hold.")
METHOD(offset, ", unit, param, /", "Byte offset in the unit's weights and in a slot.")
METHOD(portions, ", unit, /",
       "Where each owner's portion of the unit's weights begins, in bytes, and where the "
       "last ends.")
METHOD(owned, ", unit, param, rank=-1, /",
       "(first, number) of the parameter's elements that this rank owns, or another.")
KEYWORD(plane, ", unit, param, plane, shared=False",
        "uint8 array over the parameter's bytes in a plane: for user code, or (shared) as "
        "all have them.")
NOARGS(gone, "",
       "[(rank, process, its process ended)] of other ranks that have closed their engine, "
       "or whose process ended.")
NOARGS(relay, "",
       "For relay_next() and its like: what this rank tells other machines, and what it "
       "hears.")
METHOD(fail, ", text, /",
       "The engine is of no use any more, and of other ranks theirs neither; all that waits "
       "ends.")
METHOD(stay, ", seconds, /",
       "Return when no other rank will read what is on its device, or none has for so long.")
METHOD(spread, ", unit, param, planes, /",
       "What every rank wrote where plane() shows a parameter is what all have; bits 1 << "
       "plane.")
METHOD(reserved_bytes, ", unit, plane, /", "Host bytes that it takes to bring a plane there.")
KEYWORD(host_bytes, ", plane=-1", "Host bytes mapped: of one plane, or of all.")

NOARGS(unlocked, "", "(host bytes that could not be locked, why the first of them could not)")
METHOD(lock_limit, ", bytes, /", "Tests only: no more host memory is locked from now on.")

METHOD(version, ", unit, /", "")
METHOD(touch, ", unit, /", "The unit's weights were written from outside.")
METHOD(updated, ", unit, /", "Wait for the unit's updates; nothing is brought to the host.")
METHOD(wait_updates, ", unit, param=-1, /",
       "The unit's weights, or the parameter's, may be read on the host.")
METHOD(wait_grads, ", unit, /", "The unit's gradients may be read on the host.")
KEYWORD(save_begin, ", files, units, spare, copiers, writers, part=0, parts=1",
        "Write files of the store's planes as they are now; updates wait for their unit's to "
        "be copied.")
METHOD(save_wait, ", seconds, /",
       "(bytes written, whether all is over); waits so long at most.")
NOARGS(save_end, ", /", "The sums of each file; what is not over is given up.")
METHOD(take, ", unit, stream, /",
       "Weights written on the host are fetched, and memory of what is at home elsewhere is "
       "given back.")
METHOD(wait_saved, ", unit, /", "The unit's planes may be written: no save has them to copy.")
METHOD(wait_fetch, ", unit, param=-1, /",
       "The unit's weights, or the parameter's, may be written on the host.")
METHOD(set_states, ", unit, states, /",
       "How the unit's states are kept from now on: a number of STATES. Before there are any.")
METHOD(pass_gradients, ", unit, /",
       "The unit's gradients are kept nowhere: they are there from offload() to the end of "
       "the next update.")
METHOD(lend_most, ", n, /", "Buffers of a size for such gradients: 1 to 3.")
METHOD(through, ", unit, on, /",
       "The unit's updates pass through the device from now on, or no more.")
METHOD(invite, ", unit, /",
       "A settled unit's states are on the device around its updates alone, from now on.")
METHOD(dismiss, ", unit, /", "A settled unit's states come and leave no more.")
METHOD(lift_sizes, ", unit, /", "Bytes of each piece of memory that lift() takes.")
METHOD(lift, ", unit, addresses, stream, /",
       "The unit's states come to the device; False when they are there, and nothing was "
       "taken.")
METHOD(leave, ", unit, wait, /", "Whether the memory that lift() took is the caller's again.")
KEYWORD(disk, ", path, units, weights=(), limit=0, buffers=8, buffer_bytes=33554432, "
        "threads=16",
        "The states of these units are in a scratch file in the directory, from now on; "
        "weights: further units, whose\n"
        "weights are there too; push() them next.")
NOARGS(disk_file, "",
       "(path, bytes, transfers go past the page cache); None: there is no file.")
METHOD(bring, ", unit, planes, /",
       "Host planes of a unit become current and may be written; bits 1 << plane, or -1.")
METHOD(push, ", unit, param, planes, /",
       "A settled unit's host planes were written: the device's take their values.")
NOARGS(device_bytes, "",
       "Device memory of settled units' planes, their slots not counted, and of updates on "
       "their way.")
NOARGS(check, "", "Raise the failure of a worker, if there was one.")
METHOD(watchdog, ", seconds, /",
       "A wait during which nothing moves for so long raises, naming all waits: queue, unit, "
       "what for, since when.\n"
       "While the device computes it warns, and raises after six times as long.")

METHOD(open_slots, ", slots, hooks, /", "slots: (address, bytes) of device memory.")
METHOD(cut, ", unit, ranges, /",
       "Number, as of a unit, of bytes of its weights that are fetched by themselves: "
       "ranges, (from, to, bytes), of its plane and of a slot.")
METHOD(settle, ", unit, slot, /",
       "The unit lives on the device from now on, its weights in that slot.")
METHOD(slot_name, ", unit, /",
       "Of a settled unit's slot, for reach of other processes; empty: out of their reach.")
METHOD(reach, ", unit, names, /",
       "Updated weights come from slots of these names, one after the other by rank, and not "
       "by way of the share; whether they are within reach.")
METHOD(settled, ", unit, /", "Whether the unit lives on the device.")
METHOD(unsettle, ", unit, grads, /",
       "The unit lives on the host again; between close_slots() and open_slots().")
NOARGS(close_slots, ", /", "No weights are in slots any more; others may be opened.")
METHOD(begin, ", portions=False, /",
       "A root forward starts. portions: of what is fetched from now on each rank of this "
       "machine fetches its own, and the others' are gathered.")
FAST(acquire, ", unit, stream, /",
     "The slot the unit is in; stream waits for the copy. ~slot: its portions are to be "
     "gathered by all ranks of this machine; then stream has not waited.")
METHOD(ready, ", slot, stream, /", "stream waits for the copy into the slot.")
METHOD(gathered, ", number, slot, beside, stream, /",
       "The collective was put in the stream `beside`; stream waits for it.")
METHOD(bounds, ", number, /",
       "Bytes of a slot at which the portions of the machine's ranks begin, and the last "
       "ends; of a unit, or a cut.")
METHOD(meeting, ", what, /",
       "This rank comes to a collective of all, and does this there; None: it is over.")
METHOD(away, ", away, /", "Other ranks do not wait for this one to open a window.")
NOARGS(met, "", "All ranks have come to a collective.")
NOARGS(astray, "",
       "(times, rank, own number, its number or -1) of the last window that not all ranks "
       "opened, or None.")
METHOD(kick, ", stream, /", "Hand over the first fetches of the next forward.")
FAST(find, ", address, /", "(slot, unit, byte offset); slot -1 when no slot holds it.")
NOARGS(schedule, "", "The schedule as text; \"\" before the first.")
NOARGS(stats, "", "Counters since open.")

FAST(offload, ", unit, items, stream, /",
     "Gradients leave; returns the ticket.")
ONE(land, ", stream, /",
    "The stream waits for all gradients on their way; passed() then has them.")
NOARGS(passed, "", "Sources of tickets up to this one may be freed.")
NOARGS(drain, "", "Wait for all gradients, all updates, and weights that others updated.")
METHOD(forget, ", unit, /", "zero_grad: the unit's next hand-over is a first one.")

METHOD(swap_out, ", unit, parts, stream, to_file=False, /",
       "Tensors leave for host memory; returns the bundle. parts: (address, bytes).")
METHOD(swap_left, ", bundle, stream, /", "The sources may be freed, in stream's order.")
METHOD(swap_back, ", bundle, parts, stream, /",
       "They begin to come back; address 0: this one is not wanted.")
METHOD(swap_await, ", bundle, stream, /", "stream waits until they are there.")
METHOD(swap_drop, ", bundle, /", "The host memory is free. Also for one that is gone.")
KEYWORD(swap_disk, ", path, bytes=0, limit=0, bays=4, threads=16",
        "Bundles may go to a file in the directory, by way of so many bays. Room for `bytes` "
        "is reserved.")
NOARGS(swap_file, "",
       "(path, bytes, bytes of bundles that are there now); None: there is no file.")
NOARGS(swap_bytes, "", "(mapped, in use): host memory for activations.")

METHOD(trace, ", on, /", "Record what each queue does from now on, or no more.")
NOARGS(timeline, "", "Records that are over since the call before.")
METHOD(span, ", lane, work, unit, stream, /",
       "Work of a unit begins on the lane, where the stream is now; for span_end. None: no "
       "trace.")
METHOD(span_end, ", span, nbytes, stream, /", "It ends where the stream is now, once.")
METHOD(step_mark, ", number, stream, /", "A step starts at this point of the stream.")
FAST(compute_begin, ", unit, work, stream, /",
     "What the stream is given from now on is this work; what was open is interrupted.")
FAST(compute_end, ", stream, /", "The work is over; what it interrupted goes on.")

KEYWORD(debug, ", skip=0, poison=False, sync=False", "Tests only.")

KEYWORD(adam, ", units, max_norm, stream",
        "Submit one AdamW step; returns its ticket at once.")
METHOD(norm, ", ticket, /", "(global norm before clipping, units skipped); waits.")
