/* engine.c — the type Engine: its life, its method table, and the checks at its door. */
#include "bind.h"
#include <stdlib.h>
#include <string.h>

#define FORKED "this process was forked from the one that streams the model, whose memory and " \
               "threads are not here; use the model there, or give this process what it needs " \
               "of it before the fork (a clone of a tensor, a file of mt.save), or start it by " \
               "\"spawn\""

/* ---- checks ---- */

mt_engine *mt_engine_usable(PyObject *self)
{
    mt_engine *e = (mt_engine *)self;

    if (e->memory != NULL && !mt_memory_is_ours(e->memory)) {
        PyErr_SetString(e->error, FORKED);
        return NULL;
    }
    if (e->closed || e->updater == NULL) {
        PyErr_SetString(e->error, "the engine is closed; stream the model again");
        return NULL;
    }
    return e;
}

int mt_engine_unit(mt_engine *e, int unit)
{
    if (unit >= 0 && unit < mt_store_units(e->cx.store))
        return 0;
    PyErr_Format(e->error, "unit %d: the store has units 0 to %d", unit,
                 mt_store_units(e->cx.store) - 1);
    return -1;
}

int mt_engine_param(mt_engine *e, int unit, int param)
{
    if (mt_engine_unit(e, unit) < 0)
        return -1;
    if (param >= 0 && param < mt_store_params(e->cx.store, unit))
        return 0;
    PyErr_Format(e->error, "unit %d (%s), parameter %d: it has parameters 0 to %d", unit,
                 mt_store_name(e->cx.store, unit), param, mt_store_params(e->cx.store, unit) - 1);
    return -1;
}

/* Streams of torch are few and live as long as the process: each is wrapped once. */
mt_queue *mt_engine_queue(mt_engine *e, uintptr_t handle)
{
    mt_adopted *grown;
    mt_queue   *queue;
    mt_status   st;

    for (int i = 0; i < e->n_adopted; i++)
        if (e->adopted[i].handle == handle)
            return e->adopted[i].queue;
    grown = realloc(e->adopted, (size_t)(e->n_adopted + 1) * sizeof *grown);
    if (grown == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    e->adopted = grown;
    if ((st = e->cx.dev->ops->queue_adopt(e->cx.dev, handle, &queue)) != MT_OK) {
        mt_raise(e->error, st);
        return NULL;
    }
    e->adopted[e->n_adopted++] = (mt_adopted){ .handle = handle, .queue = queue };
    return queue;
}

/* ---- memory ---- */

mt_memory *mt_memory_new(void)
{
    mt_memory *h = calloc(1, sizeof *h);

    if (h != NULL) {
        h->holders = 1;
        h->forks = mt_forks();
    }
    return h;
}

int mt_memory_is_ours(const mt_memory *h)
{
    return h->forks == mt_forks();
}

void mt_memory_let_go(mt_memory *h)
{
    if (h == NULL || --h->holders > 0 || !mt_memory_is_ours(h))
        return;
    /* Nobody else knows it any more. Unmapping gigabytes takes seconds: not under the GIL. */
    Py_BEGIN_ALLOW_THREADS
    mt_store_close(h->store);            /* unregisters its arenas with the device */
    mt_share_close(h->share);
    if (h->dev != NULL)
        h->dev->ops->close(h->dev);
    mt_pool_close(h->pool);
    free(h);
    Py_END_ALLOW_THREADS
}

/* ---- life ---- */

static mt_status open_device(const char *device, int index, int delay_us, uint64_t seed,
                             mt_dev **out)
{
    mt_dev   *dev = NULL;
    mt_status st;

    if (strcmp(device, "cpu") == 0)
        MT_TRY(mt_dev_cpu_open(&dev));
    else if (strcmp(device, "cuda") == 0)
        MT_TRY(mt_dev_cuda_open(index, &dev));
    else
        return MT_FAIL(MT_EINVAL, "unknown device \"%s\"; there are \"cpu\" and \"cuda\"", device);
    if (delay_us > 0)
        MT_TRY(mt_dev_delay_open(dev, seed, delay_us, &dev));
    MT_TRY(mt_dev_stage_open(dev, &dev));
    *out = dev;
    return MT_OK;

fail:
    if (dev != NULL)
        dev->ops->close(dev);
    return st;
}

typedef struct engine_wish {
    const char *device;
    int         index, threads, delay_us;
    uint64_t    seed;
    int         share;                   /* a descriptor; -1: the process is alone */
    int        *speakers;                /* [ranks] of a share; NULL: all are on this machine */
} engine_wish;

/* In the order of the header; what was opened before a failure is closed by dealloc. */
static mt_status engine_open(mt_engine *e, const engine_wish *w)
{
    mt_offload_kernels kernels = { .sumsq = mt_sumsq_put, .accumulate = mt_accumulate,
                                   .accumulate_put = mt_accumulate_put,
                                   .fold = mt_sumsq_fold };
    mt_memory         *h = e->memory;
    mt_resident       *r;

    if (e->rank < 0 || e->rank >= e->ranks || e->ranks > MT_OWNERS_MOST)
        return MT_FAIL(MT_EINVAL, "an engine cannot be rank %d of %d; there may be 1 to %d, "
                       "counted from 0", e->rank, e->ranks, MT_OWNERS_MOST);
    MT_DO(mt_pool_open(w->threads, &h->pool));
    MT_DO(open_device(w->device, w->index, w->delay_us, w->seed, &h->dev));
    if (w->share < 0 && w->speakers != NULL)
        return MT_FAIL(MT_EINVAL, "an Engine that shares nothing has no speakers");
    if (w->share >= 0)
        MT_DO(mt_share_open(w->share, e->rank, e->ranks, &h->share));
    if (w->speakers != NULL)
        MT_DO(mt_share_apart(h->share, w->speakers));
    e->cx = (mt_context){ .dev = h->dev, .pool = h->pool, .share = h->share, .warn = mt_warn };
    MT_DO(mt_store_open(&e->cx, &h->store));
    e->cx.store = h->store;
    if (h->share != NULL)
        MT_DO(mt_turns_open(&e->cx, MT_TURN_MS, &e->cx.turns));
    MT_DO(mt_sumsq_open(h->dev, &e->sums));
    kernels.ctx = e->sums;
    MT_DO(mt_timeline_open(h->dev, &e->cx.timeline));
    MT_DO(mt_resident_open(&e->cx, &r));
    MT_DO(mt_offload_open(&e->cx, GRAD_DEPTH, kernels, &e->offload));
    MT_DO(mt_update_open(&e->cx, e->offload, &e->updater));
    return mt_swap_open(&e->cx, &e->swap);
}

static PyObject *engine_new(PyTypeObject *type, PyObject *args, PyObject *kw)
{
    allocfunc  alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    mt_state  *state = PyType_GetModuleState(type);
    mt_engine *e;

    (void)args;
    (void)kw;
    if (state == NULL || (e = (mt_engine *)alloc(type, 0)) == NULL)
        return NULL;
    e->error = Py_NewRef(state->error);
    mt_mutex_open(&e->door, MT_RANK_DOOR);
    return (PyObject *)e;
}

/* [ranks], of ranks; malloc'd, or NULL with an exception. */
static int *speakers_from(PyObject *error, PyObject *tuple, int ranks)
{
    int *found;

    if (PyTuple_Size(tuple) != ranks)
        return (int *)(void *)PyErr_Format(error, "an engine of %d ranks has so many speakers",
                                           ranks);
    if ((found = calloc((size_t)ranks + 1, sizeof *found)) == NULL)
        return (int *)(void *)PyErr_NoMemory();
    for (int rank = 0; rank < ranks; rank++) {
        if (mt_arg_int(PyTuple_GetItem(tuple, rank), &found[rank]) == 0)
            continue;
        free(found);
        return NULL;
    }
    return found;
}

static int engine_init(PyObject *self, PyObject *args, PyObject *kw)
{
    static char *names[] = { "device", "index", "threads", "delay_us", "seed", "share", "rank",
                             "ranks", "speakers", NULL };
    mt_engine   *e = (mt_engine *)self;
    engine_wish  w = { .threads = 1, .share = -1 };
    int          rank = 0, ranks = 1;
    PyObject    *speakers = NULL;
    unsigned long long seed = 0;
    mt_status    st;

    if (!PyArg_ParseTupleAndKeywords(args, kw, "s|iiiKiiiO!:Engine", names, &w.device, &w.index,
                                     &w.threads, &w.delay_us, &seed, &w.share, &rank, &ranks,
                                     &PyTuple_Type, &speakers))
        return -1;
    w.seed = seed;
    if (e->memory != NULL) {
        PyErr_SetString(e->error, "an Engine is opened once; make a new one");
        return -1;
    }
    if ((e->memory = mt_memory_new()) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    e->rank = rank;
    e->ranks = ranks;
    if (speakers != NULL && PyTuple_Size(speakers) > 0 &&
        (w.speakers = speakers_from(e->error, speakers, ranks)) == NULL)
        return -1;
    MT_UNLOCKED(e, st, engine_open(e, &w));
    free(w.speakers);
    if (st != MT_OK)
        mt_raise(e->error, st);
    return st == MT_OK ? 0 : -1;
}

/* Seconds for which an engine that closes waits for other ranks that do nothing. */
#define CLOSE_SECONDS 20

/* A step that only this rank asked for never ends: it failed, and others wait for it elsewhere, or
 * the other way round. */
static void wait_no_longer(mt_store *s)
{
    if (atomic_load(&mt_store_watch(s)->limit_ns) > CLOSE_SECONDS * UINT64_C(1000000000))
        mt_ledger_watchdog(s, CLOSE_SECONDS);
}

/* Stops every thread that works on the store: updates finish first (the mover may be waiting for
 * one), then gradients land, then the last weights land. The store stays: arrays show it. */
static mt_status engine_stop(mt_engine *e)
{
    if (e->file != NULL)
        /* at once: what follows may take its time, and the process may end in it */
        mt_file_unname(e->file);
    if (e->swap_file != NULL)
        mt_file_unname(e->swap_file);
    if (e->cx.share != NULL && e->cx.store != NULL)
        wait_no_longer(e->cx.store);
    mt_saving_close(e);                  /* first: updates may be waiting for it */
    mt_update_close(e->updater);
    mt_offload_close(e->offload);
    mt_stream_close(e->stream);
    mt_feed_close(e->cx.feed);           /* nobody fetches any more */
    mt_disk_close(e->cx.disk);           /* what the updater handed on is finished too */
    mt_file_close(e->file);
    mt_pool_close(e->disk_pool);
    mt_resident_close(e->cx.residents);
    mt_arrive_close(e->cx.arrive);
    mt_through_close(e->cx.through);
    mt_swap_close(e->swap);
    mt_file_close(e->swap_file);
    mt_turns_close(e->cx.turns);
    mt_store_leave(e->cx.store);         /* nothing of ours is under way that others await */
    for (int i = 0; i < e->n_adopted; i++)
        e->cx.dev->ops->queue_close(e->adopted[i].queue);
    mt_sumsq_close(e->sums);
    mt_timeline_close(e->cx.timeline);   /* its stamps were in the queues closed above */
    free(e->adopted);
    e->cx.turns = NULL;
    e->cx.timeline = NULL;               /* others forget themselves there when they close */
    e->updater = NULL;
    e->offload = NULL;
    e->stream = NULL;
    e->sums = NULL;
    e->file = NULL;
    e->disk_pool = NULL;
    e->swap = NULL;
    e->swap_file = NULL;
    e->adopted = NULL;
    e->n_adopted = 0;
    return MT_OK;
}

static PyObject *engine_close(PyObject *self, PyObject *unused)
{
    mt_engine *e = (mt_engine *)self;
    mt_status  st;

    (void)unused;
    if (e->closed || e->memory == NULL || !mt_memory_is_ours(e->memory))
        Py_RETURN_NONE;
    if (e->busy > 0) {
        PyErr_Format(e->error, "engine: %d calls of other threads are still waiting in it; "
                     "close it when they are back", e->busy);
        return NULL;
    }
    e->closed = 1;
    MT_UNLOCKED(e, st, engine_stop(e));
    (void)st;
    Py_CLEAR(e->held);
    Py_CLEAR(e->renew);
    Py_RETURN_NONE;
}

static int engine_traverse(PyObject *self, visitproc visit, void *arg)
{
    mt_engine *e = (mt_engine *)self;

    Py_VISIT(Py_TYPE(self));
    Py_VISIT(e->held);
    Py_VISIT(e->renew);
    return 0;
}

static int engine_clear(PyObject *self)
{
    mt_engine *e = (mt_engine *)self;

    Py_CLEAR(e->held);
    Py_CLEAR(e->renew);
    return 0;
}

/* Nobody can call in any more: no argument tuple, no method holds it. Views may live on. */
static void engine_dealloc(PyObject *self)
{
    mt_engine    *e = (mt_engine *)self;
    PyTypeObject *type = Py_TYPE(self);
    freefunc      release = (freefunc)PyType_GetSlot(type, Py_tp_free);

    int           ours = e->memory == NULL || mt_memory_is_ours(e->memory);

    PyObject_GC_UnTrack(self);
    e->closed = 1;
    if (ours) {
        Py_BEGIN_ALLOW_THREADS
        engine_stop(e);
        Py_END_ALLOW_THREADS
    }
    mt_memory_let_go(e->memory);
    if (ours)
        mt_mutex_close(&e->door);
    engine_clear(self);
    Py_CLEAR(e->error);
    release(self);
    Py_DECREF((PyObject *)type);
}

/* ---- tables ---- */

#define KEYWORDS(fn) ((PyCFunction)(void (*)(void))(fn))

static PyMethodDef methods[] = {
    { "close", engine_close, METH_NOARGS,
      "close($self)\n--\n\nStop the engine's threads. Arrays stay valid. Idempotent." },

    { "add_unit", KEYWORDS(mt_engine_add_unit), METH_VARARGS | METH_KEYWORDS,
      "add_unit($self, name, dtypes, numels, trainable)\n--\n\nThe new unit's number." },
    { "set_trainable", mt_engine_set_trainable, METH_VARARGS,
      "set_trainable($self, unit, param, on, /)\n--\n\n" },
    { "hi_bytes", mt_engine_hi_bytes, METH_VARARGS,
      "hi_bytes($self, unit, /)\n--\n\nBytes of the unit's weights: what a slot must hold." },
    { "offset", mt_engine_offset, METH_VARARGS,
      "offset($self, unit, param, /)\n--\n\nByte offset in the unit's weights and in a slot." },
    { "portions", mt_engine_portions, METH_VARARGS,
      "portions($self, unit, /)\n--\n\n"
      "Where each owner's portion of the unit's weights begins, in bytes, and where the last "
      "ends." },
    { "owned", mt_engine_owned, METH_VARARGS,
      "owned($self, unit, param, rank=-1, /)\n--\n\n"
      "(first, number) of the parameter's elements that this rank owns, or another." },
    { "plane", KEYWORDS(mt_engine_plane), METH_VARARGS | METH_KEYWORDS,
      "plane($self, unit, param, plane, shared=False)\n--\n\n"
      "uint8 array over the parameter's bytes in a plane: for user code, or (shared) as all have "
      "them." },
    { "gone", mt_engine_gone, METH_NOARGS,
      "gone($self)\n--\n\n"
      "[(rank, process, its process ended)] of other ranks that have closed their engine, or whose "
      "process ended." },
    { "relay", mt_engine_relay, METH_NOARGS,
      "relay($self)\n--\n\n"
      "For relay_next() and its like: what this rank tells other machines, and what it hears." },
    { "fail", mt_engine_fail, METH_VARARGS,
      "fail($self, text, /)\n--\n\n"
      "The engine is of no use any more, and of other ranks theirs neither; all that waits ends." },
    { "stay", mt_engine_stay, METH_VARARGS,
      "stay($self, seconds, /)\n--\n\n"
      "Return when no other rank will read what is on its device, or none has for so long." },
    { "spread", mt_engine_spread, METH_VARARGS,
      "spread($self, unit, param, planes, /)\n--\n\n"
      "What every rank wrote where plane() shows a parameter is what all have; bits 1 << plane." },
    { "reserved_bytes", mt_engine_reserved_bytes, METH_VARARGS,
      "reserved_bytes($self, unit, plane, /)\n--\n\n"
      "Host bytes that it takes to bring a plane there." },
    { "host_bytes", KEYWORDS(mt_engine_host_bytes), METH_VARARGS | METH_KEYWORDS,
      "host_bytes($self, plane=-1)\n--\n\nHost bytes mapped: of one plane, or of all." },

    { "unlocked", mt_engine_unlocked, METH_NOARGS,
      "unlocked($self)\n--\n\n"
      "(host bytes that could not be locked, why the first of them could not)" },
    { "lock_limit", mt_engine_lock_limit, METH_VARARGS,
      "lock_limit($self, bytes, /)\n--\n\nTests only: no more host memory is locked from now on." },

    { "version", mt_engine_version, METH_VARARGS, "version($self, unit, /)\n--\n\n" },
    { "touch", mt_engine_touch, METH_VARARGS,
      "touch($self, unit, /)\n--\n\nThe unit's weights were written from outside." },
    { "updated", mt_engine_updated, METH_VARARGS,
      "updated($self, unit, /)\n--\n\n"
      "Wait for the unit's updates; nothing is brought to the host." },
    { "wait_updates", mt_engine_wait_updates, METH_VARARGS,
      "wait_updates($self, unit, /)\n--\n\nThe unit's weights may be read on the host." },
    { "wait_grads", mt_engine_wait_grads, METH_VARARGS,
      "wait_grads($self, unit, /)\n--\n\nThe unit's gradients may be read on the host." },
    { "save_begin", KEYWORDS(mt_engine_save_begin), METH_VARARGS | METH_KEYWORDS,
      "save_begin($self, files, units, spare, copiers, writers, part=0, parts=1)\n--\n\n"
      "Write files of the store's planes as they are now; updates wait for their unit's to be "
      "copied." },
    { "save_wait", mt_engine_save_wait, METH_VARARGS,
      "save_wait($self, seconds, /)\n--\n\n"
      "(bytes written, whether all is over); waits so long at most." },
    { "save_end", mt_engine_save_end, METH_NOARGS,
      "save_end($self, /)\n--\n\nThe sums of each file; what is not over is given up." },
    { "take", mt_engine_take, METH_VARARGS,
      "take($self, unit, stream, /)\n--\n\n"
      "Weights written on the host are fetched, and memory of what is at home elsewhere is given "
      "back." },
    { "wait_saved", mt_engine_wait_saved, METH_VARARGS,
      "wait_saved($self, unit, /)\n--\n\n"
      "The unit's planes may be written: no save has them to copy." },
    { "wait_fetch", mt_engine_wait_fetch, METH_VARARGS,
      "wait_fetch($self, unit, /)\n--\n\nThe unit's weights may be written on the host." },
    { "set_states", mt_engine_set_states, METH_VARARGS,
      "set_states($self, unit, states, /)\n--\n\n"
      "How the unit's states are kept from now on: a number of STATES. Before there are any." },
    { "pass_gradients", mt_engine_pass_gradients, METH_VARARGS,
      "pass_gradients($self, unit, /)\n--\n\n"
      "The unit's gradients are kept nowhere: they are there from offload() to the end of the next "
      "update." },
    { "lend_most", mt_engine_lend_most, METH_VARARGS,
      "lend_most($self, n, /)\n--\n\nBuffers of a size for such gradients: 1 to 3." },
    { "through", mt_engine_through, METH_VARARGS,
      "through($self, unit, on, /)\n--\n\n"
      "The unit's updates pass through the device from now on, or no more." },
    { "invite", mt_engine_invite, METH_VARARGS,
      "invite($self, unit, /)\n--\n\n"
      "A settled unit's states are on the device around its updates alone, from now on." },
    { "dismiss", mt_engine_dismiss, METH_VARARGS,
      "dismiss($self, unit, /)\n--\n\nA settled unit's states come and leave no more." },
    { "lift_sizes", mt_engine_lift_sizes, METH_VARARGS,
      "lift_sizes($self, unit, /)\n--\n\nBytes of each piece of memory that lift() takes." },
    { "lift", mt_engine_lift, METH_VARARGS,
      "lift($self, unit, addresses, stream, /)\n--\n\n"
      "The unit's states come to the device; False when they are there, and nothing was taken." },
    { "leave", mt_engine_leave, METH_VARARGS,
      "leave($self, unit, wait, /)\n--\n\n"
      "Whether the memory that lift() took is the caller's again." },
    { "disk", KEYWORDS(mt_engine_disk), METH_VARARGS | METH_KEYWORDS,
      "disk($self, path, units, weights=(), limit=0, buffers=8, buffer_bytes=33554432, "
      "threads=16)\n--\n\n"
      "The states of these units are in a scratch file in the directory, from now on; weights: "
      "further units, whose\n"
      "weights are there too; push() them next." },
    { "disk_file", mt_engine_disk_file, METH_NOARGS,
      "disk_file($self)\n--\n\n"
      "(path, bytes, transfers go past the page cache); None: there is no file." },
    { "disk_unname", mt_engine_disk_unname, METH_NOARGS,
      "disk_unname($self)\n--\n\nFiles lose their names, and go with the process or the engine." },
    { "bring", mt_engine_bring, METH_VARARGS,
      "bring($self, unit, planes, /)\n--\n\n"
      "Host planes of a unit become current and may be written; bits 1 << plane, or -1." },
    { "push", mt_engine_push, METH_VARARGS,
      "push($self, unit, param, planes, /)\n--\n\n"
      "A settled unit's host planes were written: the device's take their values." },
    { "device_plane", mt_engine_device_plane, METH_VARARGS,
      "device_plane($self, unit, param, plane, /)\n--\n\n"
      "Address on the device of a settled unit's parameter." },
    { "device_bytes", mt_engine_device_bytes, METH_NOARGS,
      "device_bytes($self)\n--\n\n"
      "Device memory of settled units' planes, their slots not counted, and of updates on their "
      "way." },
    { "check", mt_engine_check, METH_NOARGS,
      "check($self)\n--\n\nRaise the failure of a worker, if there was one." },
    { "watchdog", mt_engine_watchdog, METH_VARARGS,
      "watchdog($self, seconds, /)\n--\n\n"
      "A wait during which nothing moves for so long raises, naming all waits: queue, unit, what "
      "for, since when.\n"
      "While the device computes it warns, and raises after six times as long." },

    { "open_slots", mt_engine_open_slots, METH_VARARGS,
      "open_slots($self, slots, hooks, /)\n--\n\nslots: (address, bytes) of device memory." },
    { "cut", mt_engine_cut, METH_VARARGS,
      "cut($self, unit, ranges, /)\n--\n\n"
      "Number, as of a unit, of bytes of its weights that are fetched by themselves: ranges, "
      "(from, to, bytes), of its plane and of a slot." },
    { "settle", mt_engine_settle, METH_VARARGS,
      "settle($self, unit, slot, /)\n--\n\n"
      "The unit lives on the device from now on, its weights in that slot." },
    { "slot_name", mt_engine_slot_name, METH_VARARGS,
      "slot_name($self, unit, /)\n--\n\n"
      "Of a settled unit's slot, for reach of other processes; empty: out of their reach." },
    { "reach", mt_engine_reach, METH_VARARGS,
      "reach($self, unit, names, /)\n--\n\n"
      "Updated weights come from slots of these names, one after the other by rank, and not by "
      "way of the share; whether they are within reach." },
    { "settled", mt_engine_settled, METH_VARARGS,
      "settled($self, unit, /)\n--\n\nWhether the unit lives on the device." },
    { "unsettle", mt_engine_unsettle, METH_VARARGS,
      "unsettle($self, unit, grads, /)\n--\n\n"
      "The unit lives on the host again; between close_slots() and open_slots()." },
    { "close_slots", mt_engine_close_slots, METH_NOARGS,
      "close_slots($self, /)\n--\n\nNo weights are in slots any more; others may be opened." },
    { "begin", mt_engine_begin, METH_VARARGS,
      "begin($self, portions=False, /)\n--\n\n"
      "A root forward starts. portions: of what is fetched from now on each rank of this machine "
      "fetches its own, and the others' are gathered." },
    { "acquire", KEYWORDS(mt_engine_acquire), METH_FASTCALL,
      "acquire($self, unit, stream, /)\n--\n\n"
      "The slot the unit is in; stream waits for the copy. ~slot: its portions are to be gathered "
      "by all ranks of this machine; then stream has not waited." },
    { "ready", mt_engine_ready, METH_VARARGS,
      "ready($self, slot, stream, /)\n--\n\nstream waits for the copy into the slot." },
    { "gathered", mt_engine_gathered, METH_VARARGS,
      "gathered($self, number, slot, beside, stream, /)\n--\n\n"
      "The collective was put in the stream `beside`; stream waits for it." },
    { "bounds", mt_engine_bounds, METH_VARARGS,
      "bounds($self, number, /)\n--\n\n"
      "Bytes of a slot at which the portions of the machine's ranks begin, and the last ends; of a "
      "unit, or a cut." },
    { "meeting", mt_engine_meeting, METH_VARARGS,
      "meeting($self, what, /)\n--\n\n"
      "This rank comes to a collective of all, and does this there; None: it is over." },
    { "away", mt_engine_away, METH_VARARGS,
      "away($self, away, /)\n--\n\nOther ranks do not wait for this one to open a window." },
    { "met", mt_engine_met, METH_NOARGS,
      "met($self)\n--\n\nAll ranks have come to a collective." },
    { "astray", mt_engine_astray, METH_NOARGS,
      "astray($self)\n--\n\n"
      "(times, rank, own number, its number or -1) of the last window that not all ranks opened, "
      "or None." },
    { "kick", mt_engine_kick, METH_VARARGS,
      "kick($self, stream, /)\n--\n\nHand over the first fetches of the next forward." },
    { "find", KEYWORDS(mt_engine_find), METH_FASTCALL,
      "find($self, address, /)\n--\n\n(slot, unit, byte offset); slot -1 when no slot holds it." },
    { "schedule", mt_engine_schedule, METH_NOARGS,
      "schedule($self)\n--\n\nThe schedule as text; \"\" before the first." },
    { "stats", mt_engine_stats, METH_NOARGS, "stats($self)\n--\n\nCounters since open." },

    { "offload", KEYWORDS(mt_engine_put), METH_FASTCALL,
      "offload($self, unit, items, stream, /)\n--\n\nGradients leave; returns the ticket." },
    { "land", mt_engine_land, METH_O,
      "land($self, stream, /)\n--\n\n"
      "The stream waits for all gradients on their way; passed() then has them." },
    { "passed", mt_engine_passed, METH_NOARGS,
      "passed($self)\n--\n\nSources of tickets up to this one may be freed." },
    { "drain", mt_engine_drain, METH_NOARGS,
      "drain($self)\n--\n\nWait for all gradients, all updates, and weights that others updated." },
    { "forget", mt_engine_forget, METH_VARARGS,
      "forget($self, unit, /)\n--\n\nzero_grad: the unit's next hand-over is a first one." },

    { "swap_out", mt_engine_swap_out, METH_VARARGS,
      "swap_out($self, unit, parts, stream, to_file=False, /)\n--\n\n"
      "Tensors leave for host memory; returns the bundle. parts: (address, bytes)." },
    { "swap_left", mt_engine_swap_left, METH_VARARGS,
      "swap_left($self, bundle, stream, /)\n--\n\nThe sources may be freed, in stream's order." },
    { "swap_back", mt_engine_swap_back, METH_VARARGS,
      "swap_back($self, bundle, parts, stream, /)\n--\n\n"
      "They begin to come back; address 0: this one is not wanted." },
    { "swap_await", mt_engine_swap_await, METH_VARARGS,
      "swap_await($self, bundle, stream, /)\n--\n\nstream waits until they are there." },
    { "swap_drop", mt_engine_swap_drop, METH_VARARGS,
      "swap_drop($self, bundle, /)\n--\n\nThe host memory is free. Also for one that is gone." },
    { "swap_disk", KEYWORDS(mt_engine_swap_disk), METH_VARARGS | METH_KEYWORDS,
      "swap_disk($self, path, bytes=0, limit=0, bays=4, threads=16)\n--\n\n"
      "Bundles may go to a file in the directory, by way of so many bays. Room for `bytes` is "
      "reserved." },
    { "swap_file", mt_engine_swap_file, METH_NOARGS,
      "swap_file($self)\n--\n\n"
      "(path, bytes, bytes of bundles that are there now); None: there is no file." },
    { "swap_bytes", mt_engine_swap_bytes, METH_NOARGS,
      "swap_bytes($self)\n--\n\n(mapped, in use): host memory for activations." },

    { "trace", mt_engine_trace, METH_VARARGS,
      "trace($self, on, /)\n--\n\nRecord what each queue does from now on, or no more." },
    { "timeline", mt_engine_timeline, METH_NOARGS,
      "timeline($self)\n--\n\nRecords that are over since the call before." },
    { "span", mt_engine_span, METH_VARARGS,
      "span($self, lane, work, unit, stream, /)\n--\n\n"
      "Work of a unit begins on the lane, where the stream is now; for span_end. None: no trace." },
    { "span_end", mt_engine_span_end, METH_VARARGS,
      "span_end($self, span, nbytes, stream, /)\n--\n\nIt ends where the stream is now, once." },
    { "step_mark", mt_engine_step_mark, METH_VARARGS,
      "step_mark($self, number, stream, /)\n--\n\nA step starts at this point of the stream." },
    { "compute_begin", KEYWORDS(mt_engine_compute_begin), METH_FASTCALL,
      "compute_begin($self, unit, work, stream, /)\n--\n\n"
      "What the stream is given from now on is this work; what was open is interrupted." },
    { "compute_end", KEYWORDS(mt_engine_compute_end), METH_FASTCALL,
      "compute_end($self, stream, /)\n--\n\nThe work is over; what it interrupted goes on." },

    { "debug", KEYWORDS(mt_engine_debug), METH_VARARGS | METH_KEYWORDS,
      "debug($self, skip=0, poison=False, sync=False)\n--\n\nTests only." },

    { "adam", KEYWORDS(mt_engine_adam), METH_VARARGS | METH_KEYWORDS,
      "adam($self, units, max_norm, stream)\n--\n\n"
      "Submit one AdamW step; returns its ticket at once." },
    { "norm", mt_engine_norm, METH_VARARGS,
      "norm($self, ticket, /)\n--\n\n(global norm before clipping, units skipped); waits." },
    { NULL, NULL, 0, NULL },
};

PyObject *mt_engine_type_new(PyObject *module)
{
    static PyType_Slot slots[] = {
        { Py_tp_doc, "Engine(device, index=0, threads=1, delay_us=0, seed=0, share=-1, rank=0, "
                     "ranks=1, speakers=())\n--\n\n"
                     "One streamed model: device, pool, store, stream, offload and updater." },
        { Py_tp_new, engine_new },
        { Py_tp_init, engine_init },
        { Py_tp_dealloc, engine_dealloc },
        { Py_tp_traverse, engine_traverse },
        { Py_tp_clear, engine_clear },
        { Py_tp_methods, methods },
        { 0, NULL },
    };
    static PyType_Spec spec = {
        .name = "megatrain_torch._core.Engine",
        .basicsize = sizeof(mt_engine),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
        .slots = slots,
    };
    return PyType_FromModuleAndSpec(module, &spec, NULL);
}
