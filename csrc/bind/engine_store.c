/* engine_store.c — Engine's methods on the store: where bytes are, and who may touch them now. */
#include "bind.h"
#include <stdlib.h>

/* ---- arguments, and what comes back ---- */

/* NULL with an exception. */
static PyObject *none(const mt_engine *e, mt_status st)
{
    return st == MT_OK ? Py_NewRef(Py_None) : mt_raise(e->error, st);
}

/* A tuple, or NULL with an exception. */
static PyObject *sizes(const size_t *bytes, int n)
{
    PyObject *out = PyTuple_New(n);

    for (int i = 0; out != NULL && i < n; i++) {
        PyObject *size = PyLong_FromSize_t(bytes[i]);

        if (size == NULL || PyTuple_SetItem(out, i, size) < 0)
            Py_CLEAR(out);
    }
    return out;
}

static mt_engine *unit_arg(PyObject *self, PyObject *args, const char *format, int *unit)
{
    mt_engine *e = mt_engine_usable(self);

    if (e == NULL || !PyArg_ParseTuple(args, format, unit) || mt_engine_unit(e, *unit) < 0)
        return NULL;
    return e;
}

static int plane_ok(mt_engine *e, int plane)
{
    if (plane >= 0 && plane < MT_PLANE_COUNT)
        return 0;
    PyErr_Format(e->error, "plane %d: PLANES has 0 to %d", plane, MT_PLANE_COUNT - 1);
    return -1;
}

/* Parameters of a new unit from three parallel tuples: malloc'd [size of dtypes], or NULL with an
 * exception. */
static mt_param_desc *descs(mt_engine *e, PyObject *dtypes, PyObject *numels, PyObject *trainable)
{
    Py_ssize_t     count = PyTuple_Size(dtypes);
    mt_param_desc *d;

    if (PyTuple_Size(numels) != count || PyTuple_Size(trainable) != count || count > INT_MAX) {
        PyErr_Format(e->error, "add_unit: %zd dtypes, %zd numels, %zd trainable; one of each per "
                     "parameter", count, PyTuple_Size(numels), PyTuple_Size(trainable));
        return NULL;
    }
    if ((d = calloc((size_t)count + 1, sizeof *d)) == NULL)
        return (mt_param_desc *)(void *)PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++) {
        int       dtype, on = PyObject_IsTrue(PyTuple_GetItem(trainable, i));
        long long numel;

        if (on < 0 || mt_arg_int(PyTuple_GetItem(dtypes, i), &dtype) < 0)
            goto fail;
        if ((numel = PyLong_AsLongLong(PyTuple_GetItem(numels, i))) == -1 && PyErr_Occurred())
            goto fail;
        if (dtype < 0 || dtype >= MT_DTYPE_COUNT || numel < 0) {
            PyErr_Format(e->error, "parameter %zd: dtype %d, %lld elements; DTYPES has 0 to %d, "
                         "and a count is not negative", i, dtype, numel, MT_DTYPE_COUNT - 1);
            goto fail;
        }
        d[i] = (mt_param_desc){ .dtype = (mt_dtype)dtype, .numel = numel, .trainable = on };
    }
    return d;

fail:
    free(d);
    return NULL;
}

/* ---- share ---- */

static PyObject *share_new(PyObject *module, PyObject *unused)
{
    int       fd;
    mt_status st = mt_share_make(&fd);

    (void)unused;
    if (st != MT_OK)
        return mt_raise(((mt_state *)PyModule_GetState(module))->error, st);
    return PyLong_FromLong(fd);
}

PyMethodDef mt_share_methods[] = {
    { "share", share_new, METH_NOARGS,
      "share($module)\n--\n\n"
      "The descriptor of new memory that processes can share: os.close() it when all have opened "
      "theirs." },
    { NULL, NULL, 0, NULL },
};

/* ---- store ---- */

PyObject *mt_engine_add_unit(PyObject *self, PyObject *args, PyObject *kw)
{
    static char   *names[] = { "name", "dtypes", "numels", "trainable", NULL };
    mt_engine     *e = mt_engine_usable(self);
    const char    *name;
    PyObject      *dtypes, *numels, *trainable, *d = NULL, *m = NULL, *t = NULL, *out = NULL;
    mt_param_desc *params = NULL;
    mt_status      st;
    int            unit;

    if (e == NULL || !PyArg_ParseTupleAndKeywords(args, kw, "sOOO:add_unit", names, &name, &dtypes,
                                                  &numels, &trainable))
        return NULL;
    if ((d = PySequence_Tuple(dtypes)) == NULL || (m = PySequence_Tuple(numels)) == NULL ||
        (t = PySequence_Tuple(trainable)) == NULL)
        goto done;
    if ((params = descs(e, d, m, t)) == NULL)
        goto done;
    st = mt_store_add(e->cx.store, name, params, (int)PyTuple_Size(d), &unit);
    if (st == MT_OK && e->ranks > 1 && e->cx.share == NULL)  /* in a share the store knows */
        st = mt_store_own(e->cx.store, unit, e->rank, e->ranks);
    out = st == MT_OK ? PyLong_FromLong(unit) : mt_raise(e->error, st);

done:
    free(params);
    Py_XDECREF(d);
    Py_XDECREF(m);
    Py_XDECREF(t);
    return out;
}

PyObject *mt_engine_set_trainable(PyObject *self, PyObject *args)
{
    mt_engine *e = mt_engine_usable(self);
    int        unit, param, on;

    if (e == NULL || !PyArg_ParseTuple(args, "iip:set_trainable", &unit, &param, &on))
        return NULL;
    if (mt_engine_param(e, unit, param) < 0)
        return NULL;
    return none(e, mt_store_set_trainable(e->cx.store, unit, param, on));
}

PyObject *mt_engine_hi_bytes(PyObject *self, PyObject *args)
{
    int        unit;
    mt_engine *e = unit_arg(self, args, "i:hi_bytes", &unit);

    return e == NULL ? NULL : PyLong_FromSize_t(mt_store_hi_bytes(e->cx.store, unit));
}

PyObject *mt_engine_offset(PyObject *self, PyObject *args)
{
    mt_engine *e = mt_engine_usable(self);
    int        unit, param;

    if (e == NULL || !PyArg_ParseTuple(args, "ii:offset", &unit, &param))
        return NULL;
    if (mt_engine_param(e, unit, param) < 0)
        return NULL;
    return PyLong_FromSize_t(mt_store_offset(e->cx.store, unit, param));
}

PyObject *mt_engine_portions(PyObject *self, PyObject *args)
{
    int        unit;
    mt_engine *e = unit_arg(self, args, "i:portions", &unit);
    size_t    *at = e == NULL ? NULL : calloc((size_t)e->ranks + 1, sizeof *at);
    mt_portion p;
    PyObject  *out;

    if (at == NULL)
        return e == NULL ? NULL : PyErr_NoMemory();
    for (int k = 0; k < e->ranks; k++) {
        (void)mt_portion_of(e->cx.store, unit, k, e->ranks, &p);
        at[k] = mt_portion_byte(e->cx.store, unit, p.begin);
        at[k + 1] = mt_portion_byte(e->cx.store, unit, p.end);
    }
    out = sizes(at, e->ranks + 1);
    free(at);
    return out;
}

PyObject *mt_engine_owned(PyObject *self, PyObject *args)
{
    mt_engine *e = mt_engine_usable(self);
    int        unit, param, rank = -1;       /* this one */
    int64_t    from, n;
    mt_portion p;
    mt_status  st;

    if (e == NULL || !PyArg_ParseTuple(args, "ii|i:owned", &unit, &param, &rank) ||
        mt_engine_param(e, unit, param) < 0)
        return NULL;
    rank = rank < 0 ? e->rank : rank;
    if ((st = mt_portion_of(e->cx.store, unit, rank, e->ranks, &p)) != MT_OK)
        return mt_raise(e->error, st);
    n = mt_portion_part(&p, param, mt_store_desc(e->cx.store, unit, param)->numel, &from);
    return Py_BuildValue("(LL)", (long long)from, (long long)n);
}

PyObject *mt_engine_plane(PyObject *self, PyObject *args, PyObject *kw)
{
    static char *names[] = { "unit", "param", "plane", "shared", NULL };
    mt_engine   *e = mt_engine_usable(self);
    int          unit, param, plane, shared = 0;
    void        *p;
    mt_status    st;
    const mt_param_desc *desc;

    if (e == NULL || !PyArg_ParseTupleAndKeywords(args, kw, "iii|p:plane", names, &unit, &param,
                                                  &plane, &shared))
        return NULL;
    if (mt_engine_param(e, unit, param) < 0 || plane_ok(e, plane) < 0)
        return NULL;
    /* The first call maps, touches and registers the plane: gigabytes, so not under the GIL. */
    MT_UNLOCKED(e, st, (shared ? mt_store_at : mt_store_view)(e->cx.store, unit, param,
                                                              (mt_plane)plane, &p));
    if (st != MT_OK)
        return mt_raise(e->error, st);
    desc = mt_store_desc(e->cx.store, unit, param);
    return mt_view_new(e->memory, p, mt_store_plane_bytes(e->cx.store, unit, param,
                                                          (mt_plane)plane, desc->numel));
}

/* Nothing on this rank is at the planes when the others are met. What is at home elsewhere goes
 * there, each rank's portion; weights on a device when next used. */
static mt_status spread(mt_engine *e, int unit, int param, unsigned planes)
{
    unsigned later = mt_store_home(e->cx.store, unit, NULL)->fed ? 0 : 1u << MT_PLANE_HI;

    MT_DO(mt_ledger_wait_updates(e->cx.store, unit));
    if (planes & 1u << MT_PLANE_GRAD)
        MT_DO(mt_ledger_wait_grads(e->cx.store, unit));
    MT_DO(mt_resident_raised(e->cx.residents));
    MT_DO(mt_ledger_wait_fetch(e->cx.store, unit));
    MT_DO(mt_store_spread(e->cx.store, unit, param, planes));
    return mt_mirror_push(e->cx.store, unit, param, planes & ~later);
}

PyObject *mt_engine_spread(PyObject *self, PyObject *args)
{
    mt_engine *e = mt_engine_usable(self);
    int        unit, param;
    unsigned   planes;
    mt_status  st;

    if (e == NULL || !PyArg_ParseTuple(args, "iiI:spread", &unit, &param, &planes) ||
        mt_engine_param(e, unit, param) < 0)
        return NULL;
    if (planes >> MT_PLANE_COUNT != 0) {
        PyErr_Format(e->error, "spread: planes %u: PLANES has 0 to %d, a bit each", planes,
                     MT_PLANE_COUNT - 1);
        return NULL;
    }
    MT_WAITING(e, st, spread(e, unit, param, planes));
    return none(e, st);
}

PyObject *mt_engine_fail(PyObject *self, PyObject *args)
{
    mt_engine  *e = mt_engine_usable(self);
    const char *text;

    if (e == NULL || !PyArg_ParseTuple(args, "s:fail", &text))
        return NULL;
    mt_ledger_fault(e->cx.store, MT_ESTATE, text);
    Py_RETURN_NONE;
}

PyObject *mt_engine_stay(PyObject *self, PyObject *args)
{
    mt_engine *e = mt_engine_usable(self);
    double     seconds;
    mt_status  st;

    if (e == NULL || !PyArg_ParseTuple(args, "d:stay", &seconds))
        return NULL;
    MT_UNLOCKED(e, st, (mt_store_stay(e->cx.store, seconds), MT_OK));
    return none(e, st);
}

/* Ranks that have closed their engine, or whose process is gone. */
PyObject *mt_engine_gone(PyObject *self, PyObject *unused)
{
    mt_engine *e = mt_engine_usable(self);
    PyObject  *found = e != NULL ? PyList_New(0) : NULL;

    (void)unused;
    for (int r = 0; found != NULL && e->cx.share != NULL && r < e->ranks; r++) {
        mt_presence presence = r == e->rank ? MT_RANK_HERE : mt_share_presence(e->cx.share, r);
        PyObject   *one;

        if (presence == MT_RANK_HERE)
            continue;
        one = Py_BuildValue("(iLO)", r, (long long)mt_share_said(e->cx.share, MT_COUNT_CAME, r),
                            presence == MT_RANK_DIED ? Py_True : Py_False);
        if (one == NULL || PyList_Append(found, one) < 0)
            Py_CLEAR(found);
        Py_XDECREF(one);
    }
    return found;
}

PyObject *mt_engine_host_bytes(PyObject *self, PyObject *args, PyObject *kw)
{
    static char *names[] = { "plane", NULL };
    mt_engine   *e = mt_engine_usable(self);
    int          plane = -1;
    size_t       bytes;

    if (e == NULL || !PyArg_ParseTupleAndKeywords(args, kw, "|i:host_bytes", names, &plane))
        return NULL;
    if (plane == -1)
        plane = MT_PLANE_COUNT;
    else if (plane_ok(e, plane) < 0)
        return NULL;
    bytes = mt_store_bytes(e->cx.store, (mt_plane)plane);
    if (plane == MT_PLANE_COUNT && e->cx.disk != NULL)
        bytes += mt_disk_stats_get(e->cx.disk).buffer_bytes;
    return PyLong_FromSize_t(bytes);
}

PyObject *mt_engine_reserved_bytes(PyObject *self, PyObject *args)
{
    mt_engine *e = mt_engine_usable(self);
    int        unit, plane;

    if (e == NULL || !PyArg_ParseTuple(args, "ii:reserved_bytes", &unit, &plane))
        return NULL;
    if (mt_engine_unit(e, unit) < 0 || plane_ok(e, plane) < 0)
        return NULL;
    return PyLong_FromSize_t(mt_store_reserved(e->cx.store, unit, (mt_plane)plane));
}

/* ---- memory that is not locked ---- */

/* what kernels write into, sums of squares, is a page a unit */
#define LOCKED_BYTES ((size_t)4096)

PyObject *mt_engine_unlocked(PyObject *self, PyObject *unused)
{
    mt_engine *e = mt_engine_usable(self);
    char       why[512];
    size_t     bytes;

    (void)unused;
    if (e == NULL)
        return NULL;
    bytes = mt_dev_stage_noted(e->cx.dev, why, sizeof why);
    return Py_BuildValue("(ns)", (Py_ssize_t)bytes, why);
}

PyObject *mt_engine_lock_limit(PyObject *self, PyObject *args)
{
    mt_engine *e = mt_engine_usable(self);
    Py_ssize_t bytes;

    if (e == NULL || !PyArg_ParseTuple(args, "n:lock_limit", &bytes))
        return NULL;
    mt_dev_stage_limit(e->cx.dev, bytes > 0 ? (size_t)bytes : 0, LOCKED_BYTES);
    Py_RETURN_NONE;
}

/* ---- ledger ---- */

PyObject *mt_engine_version(PyObject *self, PyObject *args)
{
    int        unit;
    mt_engine *e = unit_arg(self, args, "i:version", &unit);

    return e == NULL ? NULL : PyLong_FromUnsignedLongLong(mt_ledger_version(e->cx.store, unit));
}

PyObject *mt_engine_touch(PyObject *self, PyObject *args)
{
    int        unit;
    mt_engine *e = unit_arg(self, args, "i:touch", &unit);

    if (e == NULL)
        return NULL;
    mt_ledger_touch(e->cx.store, unit);
    Py_RETURN_NONE;
}

typedef mt_status wait_fn(mt_store *s, int unit);

/* Until host memory of these planes is the unit's: its copy, too, when the unit is settled or has
 * them on disk. */
static mt_status wait_and_bring(mt_store *s, int unit, wait_fn *wait, unsigned planes)
{
    MT_DO(wait(s, unit));
    return planes != 0 ? mt_mirror_bring(s, unit, planes) : MT_OK;
}

static PyObject *wait_for(PyObject *self, PyObject *args, const char *format, wait_fn *wait,
                          unsigned planes)
{
    int        unit;
    mt_engine *e = unit_arg(self, args, format, &unit);
    mt_status  st;

    if (e == NULL)
        return NULL;
    MT_WAITING(e, st, wait_and_bring(e->cx.store, unit, wait, planes));
    return none(e, st);
}

PyObject *mt_engine_wait_updates(PyObject *self, PyObject *args)
{
    return wait_for(self, args, "i:wait_updates", mt_ledger_wait_updates, 1u << MT_PLANE_HI);
}

PyObject *mt_engine_updated(PyObject *self, PyObject *args)
{
    return wait_for(self, args, "i:updated", mt_ledger_wait_updates, 0);
}

PyObject *mt_engine_wait_grads(PyObject *self, PyObject *args)
{
    return wait_for(self, args, "i:wait_grads", mt_ledger_wait_grads, 1u << MT_PLANE_GRAD);
}

PyObject *mt_engine_wait_fetch(PyObject *self, PyObject *args)
{
    return wait_for(self, args, "i:wait_fetch", mt_ledger_wait_fetch, 1u << MT_PLANE_HI);
}

/* ---- gradients that pass ---- */

PyObject *mt_engine_pass_gradients(PyObject *self, PyObject *args)
{
    int        unit;
    mt_engine *e = unit_arg(self, args, "i:pass_gradients", &unit);

    if (e == NULL)
        return NULL;
    return none(e, mt_store_set_passing(e->cx.store, unit));
}

PyObject *mt_engine_lend_most(PyObject *self, PyObject *args)
{
    mt_engine *e = mt_engine_usable(self);
    int        n;

    if (e == NULL || !PyArg_ParseTuple(args, "i:lend_most", &n))
        return NULL;
    return none(e, mt_store_lend_most(e->cx.store, n));
}

/* ---- units that go through the device ---- */

/* What a unit on its way takes on the device: one piece goes up while another comes down. */
#define THROUGH_BUFFERS 3
#define THROUGH_BYTES   ((size_t)64 << 20)

PyObject *mt_engine_set_states(PyObject *self, PyObject *args)
{
    mt_engine *e = mt_engine_usable(self);
    int        unit, states;

    if (e == NULL || !PyArg_ParseTuple(args, "ii:set_states", &unit, &states) ||
        mt_engine_unit(e, unit) < 0)
        return NULL;
    return none(e, mt_store_set_states(e->cx.store, unit, (mt_states)states));
}

/* Off: nothing to do for a unit in host memory. */
static mt_status set_through(mt_engine *e, int unit, int on)
{
    const mt_home *h = mt_store_home(e->cx.store, unit, NULL);

    if (!on && h != &mt_home_through && h != &mt_home_ram)
        return MT_FAIL(MT_ESTATE, "unit %s %s", mt_store_name(e->cx.store, unit), h->lives);
    return mt_store_move(e->cx.store, unit, on ? &mt_home_through : &mt_home_ram,
                         on ? e->cx.through : NULL);
}

PyObject *mt_engine_through(PyObject *self, PyObject *args)
{
    mt_engine  *e = mt_engine_usable(self);
    mt_through *made;
    int         unit, on;
    mt_status   st;

    if (e == NULL || !PyArg_ParseTuple(args, "ip:through", &unit, &on) ||
        mt_engine_unit(e, unit) < 0)
        return NULL;
    if (on && e->cx.through == NULL &&
        (st = mt_through_open(&e->cx, THROUGH_BUFFERS, THROUGH_BYTES, &made)) != MT_OK)
        return mt_raise(e->error, st);
    /* Planes that are there are registered: gigabytes, so not under the GIL. */
    MT_UNLOCKED(e, st, set_through(e, unit, on));
    return none(e, st);
}

/* ---- states that come and leave ---- */

/* Of one piece: small enough to be cut out of memory that activations have left. With what its
 * owner takes to align it, a size that torch's allocator need not round up. */
#define PIECE_BYTES (((size_t)128 << 20) - 512)

PyObject *mt_engine_invite(PyObject *self, PyObject *args)
{
    int        unit;
    mt_engine *e = unit_arg(self, args, "i:invite", &unit);
    mt_arrive *made;
    mt_status  st = MT_OK;

    if (e == NULL)
        return NULL;
    if (e->cx.arrive == NULL)
        st = mt_arrive_open(&e->cx, &made);
    return none(e, st == MT_OK ? mt_arrive_invite(e->cx.arrive, unit) : st);
}

PyObject *mt_engine_dismiss(PyObject *self, PyObject *args)
{
    int        unit;
    mt_engine *e = unit_arg(self, args, "i:dismiss", &unit);
    mt_status  st = MT_OK;

    if (e == NULL)
        return NULL;
    if (e->cx.arrive != NULL && mt_arrive_invited(e->cx.arrive, unit))
        st = mt_arrive_dismiss(e->cx.arrive, unit);
    return none(e, st);
}

/* NULL with an exception: the unit is no guest. */
static mt_engine *guest_of(mt_engine *e, int unit)
{
    if (mt_engine_unit(e, unit) < 0)
        return NULL;
    if (e->cx.arrive != NULL && mt_arrive_invited(e->cx.arrive, unit))
        return e;
    PyErr_Format(e->error, "unit %d (%s): its states do not come and leave; invite() it first",
                 unit, mt_store_name(e->cx.store, unit));
    return NULL;
}

PyObject *mt_engine_lift_sizes(PyObject *self, PyObject *args)
{
    int        unit, n;
    mt_engine *e = unit_arg(self, args, "i:lift_sizes", &unit);
    size_t    *bytes;
    PyObject  *out;
    mt_status  st;

    if (e == NULL || guest_of(e, unit) == NULL)
        return NULL;
    if ((st = mt_arrive_sizes(e->cx.arrive, unit, PIECE_BYTES, &bytes, &n)) != MT_OK)
        return mt_raise(e->error, st);
    out = sizes(bytes, n);
    free(bytes);
    return out;
}

/* malloc'd [size of the tuple], or NULL with an exception. */
static void **addresses_of(PyObject *tuple)
{
    Py_ssize_t n = PyTuple_Size(tuple);
    void     **mem = calloc((size_t)n + 1, sizeof *mem);
    uintptr_t  address;

    if (mem == NULL)
        return (void **)(void *)PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n; i++) {
        if (mt_arg_addr(PyTuple_GetItem(tuple, i), &address) < 0) {
            free(mem);
            return NULL;
        }
        mem[i] = (void *)address;
    }
    return mem;
}

PyObject *mt_engine_lift(PyObject *self, PyObject *args)
{
    mt_engine *e = mt_engine_usable(self);
    PyObject  *sequence, *tuple;
    unsigned long long handle;
    mt_queue  *run;
    void     **mem;
    int        unit, n, taken = 0;
    mt_status  st;

    if (e == NULL || !PyArg_ParseTuple(args, "iOK:lift", &unit, &sequence, &handle) ||
        guest_of(e, unit) == NULL)
        return NULL;
    if ((run = mt_engine_queue(e, (uintptr_t)handle)) == NULL ||
        (tuple = PySequence_Tuple(sequence)) == NULL)
        return NULL;
    n = (int)PyTuple_Size(tuple);
    mem = addresses_of(tuple);
    Py_DECREF(tuple);
    if (mem == NULL)
        return NULL;
    /* Host planes are made with the first stay: gigabytes, so not under the GIL. */
    MT_UNLOCKED(e, st, mt_arrive_lift(e->cx.arrive, unit, PIECE_BYTES, mem, n, run, &taken));
    free(mem);
    return st == MT_OK ? PyBool_FromLong(taken) : mt_raise(e->error, st);
}

PyObject *mt_engine_leave(PyObject *self, PyObject *args)
{
    mt_engine *e = mt_engine_usable(self);
    int        unit, wait, left = 0;
    mt_status  st;

    if (e == NULL || !PyArg_ParseTuple(args, "ip:leave", &unit, &wait) || guest_of(e, unit) == NULL)
        return NULL;
    MT_UNLOCKED(e, st, mt_arrive_leave(e->cx.arrive, unit, wait, &left));
    return st == MT_OK ? PyBool_FromLong(left) : mt_raise(e->error, st);
}

/* ---- settled units ---- */

/* planes: bits 1 << plane; -1 is all. */
static int planes_ok(mt_engine *e, int planes)
{
    if (planes == -1 || (planes >= 0 && planes < 1 << MT_PLANE_COUNT))
        return 0;
    PyErr_Format(e->error, "planes %d: a bit 1 << plane for each of PLANES, or -1", planes);
    return -1;
}

PyObject *mt_engine_bring(PyObject *self, PyObject *args)
{
    mt_engine *e = mt_engine_usable(self);
    int        unit, planes;
    mt_status  st;

    if (e == NULL || !PyArg_ParseTuple(args, "ii:bring", &unit, &planes))
        return NULL;
    if (mt_engine_unit(e, unit) < 0 || planes_ok(e, planes) < 0)
        return NULL;
    MT_WAITING(e, st, mt_mirror_bring(e->cx.store, unit, (unsigned)planes));
    return none(e, st);
}

PyObject *mt_engine_push(PyObject *self, PyObject *args)
{
    mt_engine *e = mt_engine_usable(self);
    int        unit, param, planes;
    mt_status  st;

    if (e == NULL || !PyArg_ParseTuple(args, "iii:push", &unit, &param, &planes))
        return NULL;
    if ((param == -1 ? mt_engine_unit(e, unit) : mt_engine_param(e, unit, param)) < 0 ||
        planes_ok(e, planes) < 0)
        return NULL;
    if (param == -1 && mt_store_home(e->cx.store, unit, NULL)->at != NULL) {
        PyErr_Format(e->error, "unit %d (%s) is not on disk: push its parameters one by one", unit,
                     mt_store_name(e->cx.store, unit));
        return NULL;
    }
    MT_UNLOCKED(e, st, mt_mirror_push(e->cx.store, unit, param, (unsigned)planes));
    return none(e, st);
}

PyObject *mt_engine_device_plane(PyObject *self, PyObject *args)
{
    mt_engine *e = mt_engine_usable(self);
    int        unit, param, plane;
    void      *p;
    mt_status  st;

    if (e == NULL || !PyArg_ParseTuple(args, "iii:device_plane", &unit, &param, &plane))
        return NULL;
    if (mt_engine_param(e, unit, param) < 0 || plane_ok(e, plane) < 0)
        return NULL;
    MT_UNLOCKED(e, st, mt_resident_at(e->cx.residents, unit, param, (mt_plane)plane, &p));
    return st == MT_OK ? PyLong_FromVoidPtr(p) : mt_raise(e->error, st);
}

PyObject *mt_engine_device_bytes(PyObject *self, PyObject *unused)
{
    mt_engine *e = mt_engine_usable(self);
    size_t     bytes;

    (void)unused;
    if (e == NULL)
        return NULL;
    bytes = mt_store_device_bytes(e->cx.store);
    if (e->cx.through != NULL)
        bytes += mt_through_stats_get(e->cx.through).device_bytes;
    return PyLong_FromSize_t(bytes);
}

PyObject *mt_engine_check(PyObject *self, PyObject *unused)
{
    mt_engine *e = mt_engine_usable(self);

    (void)unused;
    if (e == NULL)
        return NULL;
    return none(e, mt_ledger_check(e->cx.store));
}

PyObject *mt_engine_watchdog(PyObject *self, PyObject *args)
{
    mt_engine *e = mt_engine_usable(self);
    double     seconds;

    if (e == NULL || !PyArg_ParseTuple(args, "d:watchdog", &seconds))
        return NULL;
    if (!(seconds > 0)) {
        PyErr_SetString(e->error, "watchdog: seconds must be greater than 0");
        return NULL;
    }
    mt_ledger_watchdog(e->cx.store, seconds);
    Py_RETURN_NONE;
}
