/* stream.h — runs a schedule: weights into slots, ahead of the thread that computes.
 *
 * The computing thread calls mt_stream_acquire when a window opens. The step's COMPUTE is found in
 * the schedule, the FETCHes that follow it are handed to the mover, a thread of ours, and the
 * slot's memory is returned. The mover puts copies in the H2D queue as what they depend on is met:
 * it waits for updates still under way, the computing thread does not.
 *
 *     mt_stream_begin(s);                               // a root forward starts
 *     mt_stream_acquire(s, unit, run, &slot, &mem);     // may hand over FETCHes; never blocks
 *     mt_stream_await(s, slot, run);                    // host: until the copy is in its queue;
 *                                                       // run: until the copy is over
 *     ... torch ops on mem ...
 *
 * Edges between queues (each can be left out, to see the tests fail: context.h):
 *   READY   run waits for the H2D copy into its slot           recorded on h2d behind the copy
 *   FREED   h2d waits for compute that used the slot's memory  recorded on run when the FETCH that
 *           overwrites it is decided: all use so far was launched by then, and nobody holds it
 *   UPDATED the mover waits in the ledger, on the host, for updates announced before the copy
 *
 * Weights on disk are read by a feed (disk.h), which is told what stands in line, and copied from
 * its buffers; READY stands behind the last piece's copy. A slot may be given to one unit for good
 * (mt_stream_settle): such units are no part of traces and schedules, see resident.h.
 *
 * A cut is bytes of a unit's weights that are fetched by themselves, as some experts of a mixture
 * are. Cuts have numbers as units have, from the store's number of units on, and may stand wherever
 * a unit is acquired, found or named by a schedule. Versions and updates are the unit's.
 *
 * An order other than the recorded one is never wrong: a unit that no slot holds is fetched on
 * demand into the least recently used slot, and the trace is recorded again.
 *
 * In a share the ranks of a machine may each fetch their own portion of what they open, and gather
 * the others' from each other's slots, if all of them open it (turn.h). The caller launches that
 * all-gather, in a queue of its own:
 *
 *     mt_stream_portions(s, 1);                         // passes that begin from now on
 *     mt_stream_acquire(s, unit, run, &slot, &mem);
 *     if (mt_stream_takes_turn(s))
 *         mt_stream_turn(s, slot, &gathers);            // waits for the mates
 *     if (gathers) {
 *         mt_stream_await(s, slot, beside);             // a queue of the caller's
 *         ... the all-gather, in beside ...
 *         mt_stream_gathered(s, slot, beside);          // READY is recorded again, behind it
 *     } else {
 *         mt_stream_whole(s, slot, run);                // unless the slot has all, it is fetched
 *     }
 *     mt_stream_await(s, slot, run);
 *
 * Weights in files are gathered in every pass, whatever was told to mt_stream_portions: each rank's
 * file has its portion alone. There mates are waited for much longer.
 *
 * Threads: begin, acquire, turn, whole, kick: one thread at a time (under Python's lock, but for
 *          turn). await: any thread.
 */
#ifndef MT_STREAM_H
#define MT_STREAM_H

#include "disk.h"
#include "resident.h"
#include "schedule.h"

typedef struct mt_slot_desc {
    void  *mem;              /* device memory, owned by the caller, aligned to 512 */
    size_t bytes;
} mt_slot_desc;

/* The stream asks on the acquiring thread, before a slot is fetched over. held: someone still has a
 * tensor in it (saved by a custom Function, an output that aliases a weight). Then renew must give
 * fresh memory of the same size; the old belongs to its holder. Memory from renew may have been
 * read a moment ago by kernels still running, so the fetch also waits for what run was given so
 * far. */
typedef struct mt_slot_hooks {
    int       (*held) (void *ctx, int slot);
    mt_status (*renew)(void *ctx, int slot, void **mem);
    void      *ctx;
} mt_slot_hooks;

typedef struct mt_stream mt_stream;

mt_status mt_stream_open(const mt_context *cx, const mt_slot_desc *slots, int n_slots,
                         mt_slot_hooks hooks, mt_stream **out);
void      mt_stream_close(mt_stream *s);       /* waits for the mover and the H2D queue */

/* Slot `slot` is the unit's as long as the stream lives. Called before the first acquire. A unit
 * that was settled in another stream's time has its memory already: the slot's must be that.
 * MT_EINVAL when the slot is too small or other memory, MT_ESTATE when it is in use, and as
 * mt_resident_settle. */
mt_status mt_stream_settle(mt_stream *s, int unit, int slot);

/* Bytes [from, from + bytes) of a unit's HI plane, at `to` in a slot. */
typedef struct mt_cut_range { size_t from, to, bytes; } mt_cut_range;

/* *number: of a new cut of the unit, which takes as many bytes of a slot as its ranges reach to.
 * MT_EINVAL when a range is empty or beyond the plane, MT_ESTATE behind the first fetch, and, here
 * and in mt_stream_begin, when the store has other units than at the first cut. A unit that has its
 * weights on disk is not fetched in cuts: MT_ESTATE when one of it is. */
mt_status mt_stream_cut(mt_stream *s, int unit, const mt_cut_range *ranges, int n, int *number);
/* The unit that a number stands for; the number itself where it is no cut's. */
int       mt_stream_owner(const mt_stream *s, int number);
/* How many numbers there are, of units and cuts. */
int       mt_stream_numbers(const mt_stream *s);

/* In a share: what is fetched from the next begin on is this rank's portion alone. 0: all of it, as
 * at first; a slot that has a portion is fetched over then. */
void      mt_stream_portions(mt_stream *s, int on);
/* bounds[mates + 1]: bytes of a slot at which the portions of a number begin, and the last ends. Of
 * a unit they are portion.h's; those of a cut begin at multiples of 512. */
mt_status mt_stream_bounds(const mt_stream *s, int number, size_t *bounds);

/* A root forward starts: the cursor returns to the start. When the order just ended differs from
 * the schedule's, a schedule is built from it. */
mt_status mt_stream_begin(mt_stream *s);

/* The unit's slot, and its memory. On the schedule: hands over the FETCHes up to the next
 * COMPUTE. */
mt_status mt_stream_acquire(mt_stream *s, int unit, mt_queue *run, int *slot, void **mem);
mt_status mt_stream_await  (mt_stream *s, int slot, mt_queue *run);
/* What was just acquired has to be agreed on with the mates before it is awaited. */
int       mt_stream_takes_turn(const mt_stream *s);
/* *gathers: all mates have their portions of it in a slot, or will, and launch the collective. */
mt_status mt_stream_turn (mt_stream *s, int slot, int *gathers);
/* It was put in `beside`: behind it the slot holds all. */
mt_status mt_stream_gathered(mt_stream *s, int slot, mt_queue *beside);
/* Where the slot has a portion alone, all of it is fetched, on demand. MT_EPEER, with who was
 * where: its weights are in files, a portion in each rank's. */
mt_status mt_stream_whole(mt_stream *s, int slot, mt_queue *run);
/* Updates were announced: hand over the schedule's first FETCHes, so that the next forward finds
 * them under way. run: the queue that computed. */
mt_status mt_stream_kick(mt_stream *s, mt_queue *run);

/* Which slot's memory contains p, which unit is in it now and at which byte offset; -1 if none. */
int mt_stream_find(mt_stream *s, const void *p, int *unit, size_t *offset);

typedef struct mt_stream_stats {
    int64_t  fetches, demand_fetches, rebuilds;   /* since open; demand_fetches: of units that
                                                   * no slot held when a window opened */
    int64_t  gathers;
    uint64_t h2d_bytes;
    uint64_t await_ns;                            /* host time spent in await */
} mt_stream_stats;
mt_stream_stats    mt_stream_stats_get(mt_stream *s);
const mt_schedule *mt_stream_schedule(const mt_stream *s);   /* NULL before the first is built */

#endif
