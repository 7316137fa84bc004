/* engine_run.c — Engine's methods on a running step: weights in, gradients out. The hot path. */
#include "bind.h"
#include <stdlib.h>
#include <string.h>

/* ---- hooks: the core asks, Python answers ----
 * Called by mt_stream_acquire and mt_stream_kick on the thread that holds the GIL. A hook that
 * raises makes the call fail; mt_raise then keeps the hook's own exception. */

static int hook_held(void *ctx, int slot)
{
    mt_engine *e = ctx;
    PyObject  *answer;
    int        held;

    if (PyErr_Occurred())                /* asked again after a hook raised: Python is not called */
        return 1;
    answer = e->held == NULL ? NULL : PyObject_CallFunction(e->held, "i", slot);
    held = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    return held != 0;                    /* raised: "held", so that renew is asked, which fails */
}

static mt_status hook_renew(void *ctx, int slot, void **mem)
{
    mt_engine *e = ctx;
    PyObject  *answer;
    uintptr_t  address;
    int        bad;

    if (PyErr_Occurred())
        return MT_FAIL(MT_ESTATE, "slot %d: the hook held() raised", slot);
    answer = e->renew == NULL ? NULL : PyObject_CallFunction(e->renew, "i", slot);
    bad = answer == NULL || mt_arg_addr(answer, &address) < 0;
    Py_XDECREF(answer);
    if (bad)
        return MT_FAIL(MT_EDEVMEM, "slot %d: the hook renew() gave no memory", slot);
    if (address == 0)
        return MT_FAIL(MT_EDEVMEM, "slot %d: the hook renew() gave address 0", slot);
    *mem = (void *)address;
    return MT_OK;
}

/* ---- stream ---- */

/* 0, or -1 with an exception. */
static int streams(mt_engine *e)
{
    if (e->stream != NULL)
        return 0;
    PyErr_SetString(e->error, "no slots yet; call open_slots() before the first forward");
    return -1;
}

/* As MT_ENGINE, of an engine that has slots. */
#define STREAMING(e, ...)         \
    MT_ENGINE(e, __VA_ARGS__);    \
    if (streams(e) < 0)           \
        return NULL

static mt_engine *streaming(PyObject *self)
{
    mt_engine *e = mt_engine_usable(self);

    return e != NULL && streams(e) == 0 ? e : NULL;
}

static int slot_from(void *Py_UNUSED(unused), PyObject *pair, void *out)
{
    unsigned long long address;
    Py_ssize_t         bytes;

    if (mt_arg_tuple(pair) < 0 ||
        !PyArg_ParseTuple(pair, "Kn;a slot is (address, bytes)", &address, &bytes))
        return -1;
    *(mt_slot_desc *)out = (mt_slot_desc){ (void *)(uintptr_t)address, (size_t)bytes };
    return 0;
}

static int hooks_take(mt_engine *e, PyObject *hooks)
{
    PyObject *held = PyObject_GetAttrString(hooks, "held");
    PyObject *renew = held == NULL ? NULL : PyObject_GetAttrString(hooks, "renew");

    if (renew == NULL) {
        Py_XDECREF(held);
        return -1;
    }
    e->held = held;
    e->renew = renew;
    return 0;
}

PyObject *mt_engine_open_slots(PyObject *self, PyObject *args)
{
    PyObject     *sequence, *object, *slots;
    mt_engine    *e = mt_engine_args(self, args, "OO:open_slots", &sequence, &object);
    mt_slot_hooks hooks = { .held = hook_held, .renew = hook_renew, .ctx = e };
    mt_slot_desc *d;
    mt_status     st;
    int           n;

    if (e == NULL)
        return NULL;
    if (e->stream != NULL) {
        PyErr_SetString(e->error,
                        "slots are open already; close_slots() comes before others are opened");
        return NULL;
    }
    if ((slots = PySequence_Tuple(sequence)) == NULL)
        return NULL;
    d = mt_arg_list(slots, sizeof *d, slot_from, NULL);
    n = (int)PyTuple_Size(slots);
    Py_DECREF(slots);
    if (d == NULL)
        return NULL;
    if (hooks_take(e, object) < 0) {
        free(d);
        return NULL;
    }
    st = mt_stream_open(&e->cx, d, n, hooks, &e->stream);
    free(d);
    if (st == MT_OK)
        Py_RETURN_NONE;
    Py_CLEAR(e->held);
    Py_CLEAR(e->renew);
    return mt_raise(e->error, st);
}

static int range_from(void *Py_UNUSED(unused), PyObject *item, void *out)
{
    Py_ssize_t from, to, bytes;

    if (!PyTuple_Check(item)) {
        PyErr_SetString(PyExc_TypeError, "cut: (from, to, bytes) of each range");
        return -1;
    }
    if (!PyArg_ParseTuple(item, "nnn:cut", &from, &to, &bytes))
        return -1;
    *(mt_cut_range *)out = (mt_cut_range){ (size_t)from, (size_t)to, (size_t)bytes };
    return 0;
}

PyObject *mt_engine_cut(PyObject *self, PyObject *args)
{
    PyObject     *sequence, *tuple;
    mt_cut_range *ranges;
    int           unit, n, number;
    mt_engine    *e = mt_engine_args(self, args, "O&O:cut", mt_as_unit, &unit, &sequence);
    mt_status     st;

    if (e == NULL || streams(e) < 0 || (tuple = PySequence_Tuple(sequence)) == NULL)
        return NULL;
    n = (int)PyTuple_Size(tuple);
    ranges = mt_arg_list(tuple, sizeof *ranges, range_from, NULL);
    Py_DECREF(tuple);
    if (ranges == NULL)
        return NULL;
    st = mt_stream_cut(e->stream, unit, ranges, n, &number);
    free(ranges);
    return st == MT_OK ? PyLong_FromLong(number) : mt_raise(e->error, st);
}

PyObject *mt_engine_settle(PyObject *self, PyObject *args)
{
    int        unit, slot;

    STREAMING(e, "O&i:settle", mt_as_unit, &unit, &slot);
    return mt_engine_done(e, mt_stream_settle(e->stream, unit, slot));
}

PyObject *mt_engine_slot_name(PyObject *self, PyObject *args)
{
    int         unit, named;
    mt_mem_name name;
    void       *mem;

    STREAMING(e, "O&:slot_name", mt_as_unit, &unit);
    mem = mt_resident_mem(e->cx.residents, unit);
    named = mem != NULL && e->cx.dev->ops->mem_name(e->cx.dev, mem, &name) == MT_OK;
    return PyBytes_FromStringAndSize((const char *)&name, named ? (Py_ssize_t)sizeof name : 0);
}

PyObject *mt_engine_reach(PyObject *self, PyObject *args)
{
    mt_mem_name *names = NULL;
    const char  *given;
    Py_ssize_t   n;
    int          unit, all;
    mt_status    st;

    STREAMING(e, "O&y#:reach", mt_as_unit, &unit, &given, &n);
    if ((all = n == (Py_ssize_t)sizeof *names * e->ranks)) {
        if ((names = malloc((size_t)n)) == NULL)
            return PyErr_NoMemory();
        memcpy(names, given, (size_t)n);
    }
    MT_UNLOCKED(e, st, mt_resident_reach(e->cx.residents, unit, names));
    free(names);
    if (st != MT_OK && st != MT_ENOTSUP)
        return mt_raise(e->error, st);
    return PyBool_FromLong(all && st == MT_OK);
}

PyObject *mt_engine_unsettle(PyObject *self, PyObject *args)
{
    int        unit, grads;
    mt_status  st;

    MT_ENGINE(e, "O&p:unsettle", mt_as_unit, &unit, &grads);
    if (e->stream != NULL)
        return PyErr_Format(e->error,
                            "close_slots() comes before unsettle(): the unit's slot is in use");
    MT_UNLOCKED(e, st, mt_resident_unsettle(e->cx.residents, unit, grads));
    return mt_engine_done(e, st);
}

PyObject *mt_engine_settled(PyObject *self, PyObject *args)
{
    int        unit;

    MT_ENGINE(e, "O&:settled", mt_as_unit, &unit);
    return PyBool_FromLong(mt_store_home(e->cx.store, unit, NULL)->device != 0);
}

static void add_stats(mt_stream_stats *to, mt_stream_stats more)
{
    to->fetches += more.fetches;
    to->demand_fetches += more.demand_fetches;
    to->rebuilds += more.rebuilds;
    to->gathers += more.gathers;
    to->h2d_bytes += more.h2d_bytes;
    to->await_ns += more.await_ns;
}

/* What the mover still brings until it ends is not counted: nobody asked for it yet. */
static mt_status end_stream(mt_stream *s, mt_stream_stats *last)
{
    *last = mt_stream_stats_get(s);
    mt_stream_close(s);
    return MT_OK;
}

PyObject *mt_engine_close_slots(PyObject *self, PyObject *Py_UNUSED(unused))
{
    mt_stream_stats last;
    mt_stream      *s;
    mt_status       st;

    MT_USABLE(e);
    if (e->stream == NULL)               /* opening them failed */
        Py_RETURN_NONE;
    if (e->busy > 0) {
        PyErr_Format(e->error, "slots: %d calls of other threads are still waiting in the engine",
                     e->busy);
        return NULL;
    }
    s = e->stream;
    e->stream = NULL;                    /* nobody comes in while it ends */
    MT_UNLOCKED(e, st, end_stream(s, &last));
    (void)st;
    add_stats(&e->before, last);
    Py_CLEAR(e->held);
    Py_CLEAR(e->renew);
    Py_RETURN_NONE;
}

PyObject *mt_engine_begin(PyObject *self, PyObject *args)
{
    int        portions = 0;

    STREAMING(e, "|p:begin", &portions);
    mt_stream_portions(e->stream, portions);
    return mt_engine_done(e, mt_stream_begin(e->stream));
}

/* Waits for the mates without the GIL; what follows may ask the hooks. */
static mt_status take_turn(mt_engine *e, int slot, mt_queue *run, int *gathers)
{
    mt_status st;

    MT_WAITING(e, st, mt_stream_turn(e->stream, slot, gathers));
    if (st != MT_OK || *gathers)
        return st;
    e->busy++;
    st = mt_stream_whole(e->stream, slot, run);
    e->busy--;
    return st;
}

static mt_status await(mt_engine *e, int slot, int unit, mt_queue *run)
{
    int       waits = mt_timeline_wait(e->cx.timeline, unit, run);
    mt_status st;

    MT_WAITING(e, st, mt_stream_await(e->stream, slot, run));
    if (waits)
        mt_timeline_waited(e->cx.timeline, run);
    return st;
}

/* Under the GIL up to the decision (it may ask the hooks); the wait for the mover is without. */
PyObject *mt_engine_acquire(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    mt_engine *e = streaming(self);
    mt_queue  *run;
    uintptr_t  handle;
    mt_status  st;
    int        unit, slot, gathers = 0;
    void      *mem;

    if (e == NULL)
        return NULL;
    if (n != 2) {
        PyErr_Format(PyExc_TypeError, "acquire(unit, stream) takes 2 arguments, %zd given", n);
        return NULL;
    }
    if (mt_arg_int(args[0], &unit) < 0 || mt_arg_addr(args[1], &handle) < 0)
        return NULL;
    if (mt_engine_unit(e, mt_stream_owner(e->stream, unit)) < 0 ||
        (run = mt_engine_queue(e, handle)) == NULL)
        return NULL;
    e->busy++;                           /* a hook that calls close() is refused */
    st = mt_stream_acquire(e->stream, unit, run, &slot, &mem);
    e->busy--;
    if (st == MT_OK && !PyErr_Occurred() && mt_stream_takes_turn(e->stream))
        st = take_turn(e, slot, run, &gathers);
    if (st == MT_OK && !PyErr_Occurred() && !gathers)
        st = await(e, slot, mt_stream_owner(e->stream, unit), run);
    if (st != MT_OK || PyErr_Occurred())
        return mt_raise(e->error, st);
    return PyLong_FromLong(gathers ? ~slot : slot);
}

PyObject *mt_engine_ready(PyObject *self, PyObject *args)
{
    int        slot;
    mt_queue  *queue;
    mt_status  st;

    STREAMING(e, "iO&:ready", &slot, mt_as_queue, &queue);
    MT_WAITING(e, st, mt_stream_await(e->stream, slot, queue));
    return mt_engine_done(e, st);
}

PyObject *mt_engine_gathered(PyObject *self, PyObject *args)
{
    int        number, slot;
    mt_queue  *beside, *run;
    mt_status  st;

    STREAMING(e, "iiO&O&:gathered", &number, &slot, mt_as_queue, &beside, mt_as_queue, &run);
    if ((st = mt_stream_gathered(e->stream, slot, beside)) == MT_OK)
        st = await(e, slot, mt_stream_owner(e->stream, number), run);
    return mt_engine_done(e, st);
}

PyObject *mt_engine_bounds(PyObject *self, PyObject *args)
{
    int        number;
    size_t     bounds[MT_RANKS_MOST + 1];
    mt_status  st;

    STREAMING(e, "i:bounds", &number);
    if (e->cx.turns == NULL || number < 0 || number >= mt_stream_numbers(e->stream))
        return PyErr_Format(e->error, "number %d has no portions in this process", number);
    if ((st = mt_stream_bounds(e->stream, number, bounds)) != MT_OK)
        return mt_raise(e->error, st);
    return mt_tuple_of(bounds, mt_turns_mates(e->cx.turns) + 1);
}

/* NULL: it is alone; or it is closed, or about to be by another thread, and the process may still
 * have to wait for others. Under the GIL, as closed is set. */
static mt_engine *meeting(PyObject *self)
{
    mt_engine *e = (mt_engine *)self;

    return e->closed || e->memory == NULL || !mt_memory_is_ours(e->memory) || e->cx.turns == NULL
         ? NULL : e;
}

PyObject *mt_engine_meeting(PyObject *self, PyObject *args)
{
    mt_engine  *e = meeting(self);
    const char *what;

    if (!PyArg_ParseTuple(args, "z:meeting", &what))
        return NULL;
    if (e != NULL)
        mt_ledger_meeting(e->cx.store, what);
    Py_RETURN_NONE;
}

PyObject *mt_engine_away(PyObject *self, PyObject *args)
{
    mt_engine *e = meeting(self);
    int        away;

    if (!PyArg_ParseTuple(args, "p:away", &away))
        return NULL;
    if (e != NULL)
        mt_turns_away(e->cx.turns, away);
    Py_RETURN_NONE;
}

PyObject *mt_engine_met(PyObject *self, PyObject *Py_UNUSED(unused))
{
    mt_engine *e = meeting(self);

    if (e != NULL)
        mt_turns_met(e->cx.turns);
    Py_RETURN_NONE;
}

/* What a turn was about is a number that is one more, and whether there was something to gather. */
PyObject *mt_engine_astray(PyObject *self, PyObject *Py_UNUSED(unused))
{
    mt_engine     *e = streaming(self);
    mt_turns_stats n = { .rank = -1 };

    if (e == NULL)
        return NULL;
    if (e->cx.turns != NULL)
        n = mt_turns_stats_get(e->cx.turns);
    if (n.rank < 0)
        Py_RETURN_NONE;
    return Py_BuildValue("(Liii)", (long long)n.astray, n.rank, (int)(n.own >> 1) - 1,
                         (int)(n.other >> 1) - 1);
}

PyObject *mt_engine_kick(PyObject *self, PyObject *args)
{
    mt_queue  *run;
    mt_status  st;

    STREAMING(e, "O&:kick", mt_as_queue, &run);
    e->busy++;
    st = mt_stream_kick(e->stream, run);
    e->busy--;
    return mt_engine_done(e, st);
}

PyObject *mt_engine_find(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    mt_engine *e = streaming(self);
    uintptr_t  address;
    int        slot, unit = -1;
    size_t     offset = 0;

    if (e == NULL)
        return NULL;
    if (n != 1)
        return PyErr_Format(PyExc_TypeError, "find(address) takes 1 argument, %zd given", n);
    if (mt_arg_addr(args[0], &address) < 0)
        return NULL;
    slot = mt_stream_find(e->stream, (const void *)address, &unit, &offset);
    return Py_BuildValue("(iin)", slot, unit, (Py_ssize_t)offset);
}

/* The listing with the units' names; malloc'd or NULL. */
static char *schedule_text(mt_engine *e, const mt_schedule *s)
{
    int          n = mt_stream_numbers(e->stream);
    const char **names = calloc((size_t)n + 1, sizeof *names);
    size_t       bytes;
    char        *text = NULL;

    if (names == NULL)
        return NULL;
    for (int i = 0; i < n; i++)
        names[i] = mt_store_name(e->cx.store, mt_stream_owner(e->stream, i));
    bytes = mt_schedule_print(s, names, NULL, 0) + 1;
    if ((text = malloc(bytes)) != NULL)
        mt_schedule_print(s, names, text, bytes);
    free(names);
    return text;
}

PyObject *mt_engine_schedule(PyObject *self, PyObject *Py_UNUSED(unused))
{
    mt_engine         *e = streaming(self);
    const mt_schedule *s;
    PyObject          *out;
    char              *text;

    if (e == NULL)
        return NULL;
    if ((s = mt_stream_schedule(e->stream)) == NULL)
        return PyUnicode_FromString("");
    if ((text = schedule_text(e, s)) == NULL)
        return PyErr_NoMemory();
    out = PyUnicode_FromString(text);
    free(text);
    return out;
}

/* Of all parts; those that are not there count nothing. */
typedef struct engine_stats {
    mt_stream_stats      s;
    mt_resident_stats    r;
    mt_through_stats     t;
    mt_disk_stats        d;
    mt_swap_stats        w;
    uint64_t             d2h_bytes, update_ns, lost;
} engine_stats;

static mt_status look(mt_engine *e, engine_stats *out)
{
    out->r = mt_resident_stats_get(e->cx.residents);
    if (e->cx.through != NULL)
        out->t = mt_through_stats_get(e->cx.through);
    if (e->cx.disk != NULL)
        out->d = mt_disk_stats_get(e->cx.disk);
    out->w = mt_swap_stats_get(e->swap);
    out->d2h_bytes = mt_offload_d2h_bytes(e->offload) + out->r.d2h_bytes + out->t.d2h_bytes;
    out->update_ns = mt_update_busy_ns(e->updater);
    out->lost = mt_timeline_lost(e->cx.timeline);
    return MT_OK;
}

PyObject *mt_engine_stats(PyObject *self, PyObject *Py_UNUSED(unused))
{
    engine_stats n = { 0 };
    mt_status    st;

    MT_USABLE(e);
    if (e->stream != NULL)
        n.s = mt_stream_stats_get(e->stream);       /* what it decides, it decides under the GIL */
    add_stats(&n.s, e->before);
    /* Some counts are under locks that are held while a drive, or the device, is waited for. */
    MT_UNLOCKED(e, st, look(e, &n));
    (void)st;
    return Py_BuildValue("{sLsLsLsLsKsKsKsKsKsKsKsKsKsKsKsKsKsK}",
                         "fetches", (long long)(n.s.fetches + n.r.fetches),
                         "demand_fetches", (long long)(n.s.demand_fetches + n.r.fetches),
                         "rebuilds", (long long)n.s.rebuilds,
                         "gathers", (long long)n.s.gathers,
                         "h2d_bytes", (unsigned long long)(n.s.h2d_bytes + n.r.h2d_bytes
                                                           + n.t.h2d_bytes),
                         "await_ns", (unsigned long long)n.s.await_ns,
                         "d2h_bytes", (unsigned long long)n.d2h_bytes,
                         "update_ns", (unsigned long long)n.update_ns,
                         "records_lost", (unsigned long long)n.lost,
                         "disk_read_bytes", (unsigned long long)n.d.read_bytes,
                         "disk_written_bytes", (unsigned long long)n.d.written_bytes,
                         "disk_update_ns", (unsigned long long)n.d.busy_ns,
                         "disk_wait_ns", (unsigned long long)n.d.wait_ns,
                         "out_bytes", (unsigned long long)n.w.out_bytes,
                         "back_bytes", (unsigned long long)n.w.back_bytes,
                         "spill_written_bytes", (unsigned long long)n.w.spill.written_bytes,
                         "spill_read_bytes", (unsigned long long)n.w.spill.read_bytes,
                         "spill_wait_ns", (unsigned long long)n.w.spill.wait_ns);
}

/* ---- offload ---- */

typedef struct grads_of {
    mt_engine *e;
    int        unit;
} grads_of;

static int item_from(void *arg, PyObject *tuple, void *out)
{
    mt_engine         *e = ((const grads_of *)arg)->e;
    int                unit = ((const grads_of *)arg)->unit;
    unsigned long long address;
    int                param, mode, reread;
    int64_t            from;

    if (mt_arg_tuple(tuple) < 0 ||
        !PyArg_ParseTuple(tuple, "iKip;an item is (param, address, mode, reread)", &param,
                          &address, &mode, &reread))
        return -1;
    if (mt_engine_param(e, unit, param) < 0)
        return -1;
    if (mode < MT_GRAD_SET || mode > MT_GRAD_ADD ||
        (address == 0 && mt_store_owned(e->cx.store, unit, param, &from) > 0)) {
        PyErr_Format(e->error, "unit %d (%s), parameter %d: mode %d, address %llu; mode is 0 "
                     "(set) or 1 (add), and the address is not 0", unit,
                     mt_store_name(e->cx.store, unit), param, mode, address);
        return -1;
    }
    *(mt_grad_item *)out = (mt_grad_item){ param, (const void *)(uintptr_t)address,
                                           (mt_grad_mode)mode, reread };
    return 0;
}

/* Without the GIL two autograd threads could meet here; the door lets one in at a time. */
static mt_status put_alone(mt_engine *e, int unit, const mt_grad_item *items, int n, mt_queue *run,
                           uint64_t *ticket)
{
    MT_HOLD(&e->door);
    return mt_offload_put(e->offload, unit, items, n, run, ticket);
}

static PyObject *put_items(mt_engine *e, int unit, PyObject *tuple, uintptr_t handle)
{
    mt_queue     *run = mt_engine_queue(e, handle);
    grads_of      of = { e, unit };
    mt_grad_item *items = run == NULL ? NULL : mt_arg_list(tuple, sizeof *items, item_from, &of);
    int           n = (int)PyTuple_Size(tuple);
    uint64_t      ticket;
    mt_status     st;

    if (items == NULL)
        return NULL;
    MT_WAITING(e, st, put_alone(e, unit, items, n, run, &ticket));
    free(items);
    return st == MT_OK ? PyLong_FromUnsignedLongLong(ticket) : mt_raise(e->error, st);
}

PyObject *mt_engine_offload(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    uintptr_t  handle;
    int        unit;
    PyObject  *tuple, *out;

    MT_USABLE(e);
    if (n != 3) {
        PyErr_Format(PyExc_TypeError, "offload(unit, items, stream) takes 3 arguments, %zd given",
                     n);
        return NULL;
    }
    if (mt_arg_int(args[0], &unit) < 0 || mt_arg_addr(args[2], &handle) < 0)
        return NULL;
    if (mt_engine_unit(e, unit) < 0 || (tuple = PySequence_Tuple(args[1])) == NULL)
        return NULL;
    out = put_items(e, unit, tuple, handle);
    Py_DECREF(tuple);
    return out;
}

static mt_status land_alone(mt_engine *e, mt_queue *run)
{
    MT_HOLD(&e->door);
    return mt_offload_land(e->offload, run);
}

PyObject *mt_engine_land(PyObject *self, PyObject *stream)
{
    mt_engine *e = mt_engine_usable(self);
    uintptr_t  handle;
    mt_queue  *run;
    mt_status  st;

    if (e == NULL || mt_arg_addr(stream, &handle) < 0 || (run = mt_engine_queue(e, handle)) == NULL)
        return NULL;
    MT_UNLOCKED(e, st, land_alone(e, run));
    return mt_engine_done(e, st);
}

PyObject *mt_engine_passed(PyObject *self, PyObject *Py_UNUSED(unused))
{
    MT_USABLE(e);
    return PyLong_FromUnsignedLongLong(mt_offload_passed(e->offload));
}

static mt_status drain_all(mt_engine *e)
{
    MT_DO(mt_offload_drain(e->offload));
    MT_DO(mt_update_drain(e->updater));
    return mt_resident_raised(e->cx.residents);
}

PyObject *mt_engine_drain(PyObject *self, PyObject *Py_UNUSED(unused))
{
    mt_status  st;

    MT_USABLE(e);
    MT_WAITING(e, st, drain_all(e));
    return mt_engine_done(e, st);
}

PyObject *mt_engine_forget(PyObject *self, PyObject *args)
{
    int        unit;

    MT_ENGINE(e, "O&:forget", mt_as_unit, &unit);
    mt_offload_forget(e->offload, unit);
    Py_RETURN_NONE;
}

/* ---- debug ---- */

PyObject *mt_engine_debug(PyObject *self, PyObject *args, PyObject *kw)
{
    static char *names[] = { "skip", "poison", "sync", NULL };
    unsigned     skip = 0;
    int          poison = 0, sync = 0;

    MT_KEYWORDS(e, names, "|Ipp:debug", &skip, &poison, &sync);
    e->cx.debug.skip = skip;
    e->cx.debug.poison = poison;
    e->cx.debug.sync = sync;
    Py_RETURN_NONE;
}
