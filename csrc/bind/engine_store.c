/* engine_store.c — Engine's methods on the store: where bytes are, and who may touch them now. */
#include "bind.h"
#include <stdlib.h>

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

static PyObject *share_new(PyObject *module, PyObject *Py_UNUSED(unused))
{
    int       fd;
    mt_status st = mt_share_make(&fd);

    if (st != MT_OK)
        return mt_raise(mt_error_of(module), st);
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
    int       unit, param, on;
    mt_status st = MT_OK;

    MT_ENGINE(e, "O&O&p:set_trainable", mt_as_unit, &unit, mt_as_param, &param, &on);
    if (on)                              /* updates may keep it current on the host from now on */
        MT_WAITING(e, st, mt_mirror_read(e->cx.store, unit, param));
    if (st == MT_OK)
        st = mt_store_set_trainable(e->cx.store, unit, param, on);
    return mt_engine_done(e, st);
}

PyObject *mt_engine_hi_bytes(PyObject *self, PyObject *args)
{
    int unit;

    MT_ENGINE(e, "O&:hi_bytes", mt_as_unit, &unit);
    return PyLong_FromSize_t(mt_store_hi_bytes(e->cx.store, unit));
}

PyObject *mt_engine_offset(PyObject *self, PyObject *args)
{
    int unit, param;

    MT_ENGINE(e, "O&O&:offset", mt_as_unit, &unit, mt_as_param, &param);
    return PyLong_FromSize_t(mt_store_offset(e->cx.store, unit, param));
}

PyObject *mt_engine_portions(PyObject *self, PyObject *args)
{
    int        unit;
    size_t    *at;
    PyObject  *out;

    MT_ENGINE(e, "O&:portions", mt_as_unit, &unit);
    if ((at = calloc((size_t)e->ranks + 1, sizeof *at)) == NULL)
        return PyErr_NoMemory();
    for (int k = 0; k < e->ranks; k++)
        (void)mt_portion_bytes(e->cx.store, unit, k, e->ranks, &at[k], &at[k + 1]);
    out = mt_tuple_of(at, e->ranks + 1);
    free(at);
    return out;
}

PyObject *mt_engine_owned(PyObject *self, PyObject *args)
{
    int        unit, param, rank = -1;       /* this one */
    int64_t    from, n;
    mt_portion p;
    mt_status  st;

    MT_ENGINE(e, "O&O&|i:owned", mt_as_unit, &unit, mt_as_param, &param, &rank);
    rank = rank < 0 ? e->rank : rank;
    if ((st = mt_portion_of(e->cx.store, unit, rank, e->ranks, &p)) != MT_OK)
        return mt_raise(e->error, st);
    n = mt_portion_part(&p, param, mt_store_desc(e->cx.store, unit, param)->numel, &from);
    return Py_BuildValue("(LL)", (long long)from, (long long)n);
}

PyObject *mt_engine_plane(PyObject *self, PyObject *args, PyObject *kw)
{
    static char *names[] = { "unit", "param", "plane", "shared", NULL };
    int          unit, param, plane, shared = 0;
    void        *p;
    mt_status    st;

    MT_KEYWORDS(e, names, "O&O&O&|p:plane", mt_as_unit, &unit, mt_as_param, &param, mt_as_plane,
                &plane, &shared);
    /* The first call maps, touches and registers the plane: gigabytes, so not under the GIL. */
    MT_UNLOCKED(e, st, (shared ? mt_store_at : mt_store_view)(e->cx.store, unit, param,
                                                              (mt_plane)plane, &p));
    if (st != MT_OK)
        return mt_raise(e->error, st);
    return mt_view_new(e->memory, p,
                       mt_store_plane_bytes(e->cx.store, unit, param, (mt_plane)plane,
                                            mt_store_desc(e->cx.store, unit, param)->numel));
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
    if (planes & 1u << MT_PLANE_HI)          /* all of it, of which what is here was written */
        MT_DO(mt_mirror_read(e->cx.store, unit, param));
    MT_DO(mt_store_spread(e->cx.store, unit, param, planes));
    return mt_mirror_push(e->cx.store, unit, param, planes & ~later);
}

PyObject *mt_engine_spread(PyObject *self, PyObject *args)
{
    int       unit, param;
    unsigned  planes;
    mt_status st;

    MT_ENGINE(e, "O&O&I:spread", mt_as_unit, &unit, mt_as_param, &param, &planes);
    if (planes >> MT_PLANE_COUNT != 0)
        return PyErr_Format(e->error, "spread: planes %u: PLANES has 0 to %d, a bit each", planes,
                            MT_PLANE_COUNT - 1);
    MT_WAITING(e, st, spread(e, unit, param, planes));
    return mt_engine_done(e, st);
}

PyObject *mt_engine_fail(PyObject *self, PyObject *args)
{
    const char *text;

    MT_ENGINE(e, "s:fail", &text);
    mt_ledger_fault(e->cx.store, MT_ESTATE, text);
    Py_RETURN_NONE;
}

PyObject *mt_engine_stay(PyObject *self, PyObject *args)
{
    double    seconds;
    mt_status st;

    MT_ENGINE(e, "d:stay", &seconds);
    MT_UNLOCKED(e, st, (mt_store_stay(e->cx.store, seconds), MT_OK));
    return mt_engine_done(e, st);
}

/* Ranks that have closed their engine, or whose process is gone. */
PyObject *mt_engine_gone(PyObject *self, PyObject *Py_UNUSED(unused))
{
    PyObject *found;

    MT_USABLE(e);
    found = PyList_New(0);
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
    int          plane = -1;
    size_t       bytes;

    MT_KEYWORDS(e, names, "|i:host_bytes", &plane);
    if (plane < -1 || plane >= MT_PLANE_COUNT)
        return PyErr_Format(e->error, "plane %d: PLANES has 0 to %d", plane, MT_PLANE_COUNT - 1);
    bytes = mt_store_bytes(e->cx.store, plane == -1 ? MT_PLANE_COUNT : (mt_plane)plane);
    if (plane == -1 && e->cx.disk != NULL)
        bytes += mt_disk_stats_get(e->cx.disk).buffer_bytes;
    return PyLong_FromSize_t(bytes);
}

PyObject *mt_engine_reserved_bytes(PyObject *self, PyObject *args)
{
    int unit, plane;

    MT_ENGINE(e, "O&O&:reserved_bytes", mt_as_unit, &unit, mt_as_plane, &plane);
    return PyLong_FromSize_t(mt_store_reserved(e->cx.store, unit, (mt_plane)plane));
}

/* ---- memory that is not locked ---- */

/* what kernels write into, sums of squares, is a page a unit */
#define LOCKED_BYTES ((size_t)4096)

PyObject *mt_engine_unlocked(PyObject *self, PyObject *Py_UNUSED(unused))
{
    char   why[512];
    size_t bytes;

    MT_USABLE(e);
    bytes = mt_dev_stage_noted(e->cx.dev, why, sizeof why);
    return Py_BuildValue("(ns)", (Py_ssize_t)bytes, why);
}

PyObject *mt_engine_lock_limit(PyObject *self, PyObject *args)
{
    Py_ssize_t bytes;

    MT_ENGINE(e, "n:lock_limit", &bytes);
    mt_dev_stage_limit(e->cx.dev, bytes > 0 ? (size_t)bytes : 0, LOCKED_BYTES);
    Py_RETURN_NONE;
}

/* ---- ledger ---- */

PyObject *mt_engine_version(PyObject *self, PyObject *args)
{
    int unit;

    MT_ENGINE(e, "O&:version", mt_as_unit, &unit);
    return PyLong_FromUnsignedLongLong(mt_ledger_version(e->cx.store, unit));
}

PyObject *mt_engine_touch(PyObject *self, PyObject *args)
{
    int unit;

    MT_ENGINE(e, "O&:touch", mt_as_unit, &unit);
    mt_ledger_touch(e->cx.store, unit);
    Py_RETURN_NONE;
}

/* Until host memory of these planes is the unit's: its copy, too, when the unit is settled or has
 * them on disk. */
static mt_status wait_and_bring(mt_store *s, int unit, int param,
                                mt_status (*wait)(mt_store *s, int unit), unsigned planes)
{
    MT_DO(wait(s, unit));
    if (planes == 1u << MT_PLANE_HI)
        return mt_mirror_read(s, unit, param);
    return planes != 0 ? mt_mirror_bring(s, unit, planes) : MT_OK;
}

#define WAIT_FOR(name, param_too, wait, planes)                                      \
    PyObject *mt_engine_##name(PyObject *self, PyObject *args)                       \
    {                                                                                \
        int       unit, param = -1;                                                  \
        mt_status st;                                                                \
                                                                                     \
        MT_ENGINE(e, "O&" param_too ":" #name, mt_as_unit, &unit, &param);           \
        if (param != -1 && mt_engine_param(e, unit, param) < 0)                      \
            return NULL;                                                             \
        MT_WAITING(e, st, wait_and_bring(e->cx.store, unit, param, wait, planes));   \
        return mt_engine_done(e, st);                                                \
    }
WAIT_FOR(wait_updates, "|i", mt_ledger_wait_updates, 1u << MT_PLANE_HI)
WAIT_FOR(updated, "", mt_ledger_wait_updates, 0)
WAIT_FOR(wait_grads, "", mt_ledger_wait_grads, 1u << MT_PLANE_GRAD)
WAIT_FOR(wait_fetch, "|i", mt_ledger_wait_fetch, 1u << MT_PLANE_HI)

/* ---- gradients that pass ---- */

PyObject *mt_engine_pass_gradients(PyObject *self, PyObject *args)
{
    int unit;

    MT_ENGINE(e, "O&:pass_gradients", mt_as_unit, &unit);
    return mt_engine_done(e, mt_store_set_passing(e->cx.store, unit));
}

PyObject *mt_engine_lend_most(PyObject *self, PyObject *args)
{
    int n;

    MT_ENGINE(e, "i:lend_most", &n);
    return mt_engine_done(e, mt_store_lend_most(e->cx.store, n));
}

/* ---- units that go through the device ---- */

/* What a unit on its way takes on the device: one piece goes up while another comes down. */
#define THROUGH_BUFFERS 3
#define THROUGH_BYTES   ((size_t)64 << 20)

PyObject *mt_engine_set_states(PyObject *self, PyObject *args)
{
    int unit, states;

    MT_ENGINE(e, "O&i:set_states", mt_as_unit, &unit, &states);
    return mt_engine_done(e, mt_store_set_states(e->cx.store, unit, (mt_states)states));
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
    mt_through *made;
    int         unit, on;
    mt_status   st;

    MT_ENGINE(e, "O&p:through", mt_as_unit, &unit, &on);
    if (on && e->cx.through == NULL &&
        (st = mt_through_open(&e->cx, THROUGH_BUFFERS, THROUGH_BYTES, &made)) != MT_OK)
        return mt_raise(e->error, st);
    /* Planes that are there are registered: gigabytes, so not under the GIL. */
    MT_UNLOCKED(e, st, set_through(e, unit, on));
    return mt_engine_done(e, st);
}

/* ---- states that come and leave ---- */

/* Of one piece: small enough to be cut out of memory that activations have left. With what its
 * owner takes to align it, a size that torch's allocator need not round up. */
#define PIECE_BYTES (((size_t)128 << 20) - 512)

PyObject *mt_engine_invite(PyObject *self, PyObject *args)
{
    int unit;

    MT_ENGINE(e, "O&:invite", mt_as_unit, &unit);
    return mt_engine_done(e, mt_arrive_invite(e->cx.residents, unit));
}

PyObject *mt_engine_dismiss(PyObject *self, PyObject *args)
{
    int unit;

    MT_ENGINE(e, "O&:dismiss", mt_as_unit, &unit);
    return mt_engine_done(e, mt_arrive_invited(e->cx.residents, unit)
                             ? mt_arrive_dismiss(e->cx.residents, unit) : MT_OK);
}

PyObject *mt_engine_lift_sizes(PyObject *self, PyObject *args)
{
    int       unit, n;
    size_t   *bytes;
    PyObject *out;
    mt_status st;

    MT_ENGINE(e, "O&:lift_sizes", mt_as_unit, &unit);
    if ((st = mt_arrive_sizes(e->cx.residents, unit, PIECE_BYTES, &bytes, &n)) != MT_OK)
        return mt_raise(e->error, st);
    out = mt_tuple_of(bytes, n);
    free(bytes);
    return out;
}

static int address_from(void *Py_UNUSED(unused), PyObject *o, void *out)
{
    return mt_arg_addr(o, out);
}

PyObject *mt_engine_lift(PyObject *self, PyObject *args)
{
    PyObject *sequence, *tuple;
    mt_queue *run;
    void    **mem;
    int       unit, n, taken = 0;
    mt_status st;

    MT_ENGINE(e, "O&OO&:lift", mt_as_unit, &unit, &sequence, mt_as_queue, &run);
    if ((tuple = PySequence_Tuple(sequence)) == NULL)
        return NULL;
    n = (int)PyTuple_Size(tuple);
    mem = mt_arg_list(tuple, sizeof *mem, address_from, NULL);
    Py_DECREF(tuple);
    if (mem == NULL)
        return NULL;
    /* Host planes are made with the first stay: gigabytes, so not under the GIL. */
    MT_UNLOCKED(e, st, mt_arrive_lift(e->cx.residents, unit, PIECE_BYTES, mem, n, run, &taken));
    free(mem);
    return st == MT_OK ? PyBool_FromLong(taken) : mt_raise(e->error, st);
}

PyObject *mt_engine_leave(PyObject *self, PyObject *args)
{
    int       unit, wait, left = 0;
    mt_status st;

    MT_ENGINE(e, "O&p:leave", mt_as_unit, &unit, &wait);
    MT_UNLOCKED(e, st, mt_arrive_leave(e->cx.residents, unit, wait, &left));
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
    int       unit, planes;
    mt_status st;

    MT_ENGINE(e, "O&i:bring", mt_as_unit, &unit, &planes);
    if (planes_ok(e, planes) < 0)
        return NULL;
    MT_WAITING(e, st, mt_mirror_bring(e->cx.store, unit, (unsigned)planes));
    return mt_engine_done(e, st);
}

PyObject *mt_engine_push(PyObject *self, PyObject *args)
{
    int       unit, param, planes;
    mt_status st;

    MT_ENGINE(e, "O&ii:push", mt_as_unit, &unit, &param, &planes);
    if ((param != -1 && mt_engine_param(e, unit, param) < 0) || planes_ok(e, planes) < 0)
        return NULL;
    if (param == -1 && mt_store_home(e->cx.store, unit, NULL)->at != NULL)
        return PyErr_Format(e->error, "unit %d (%s) is not on disk: push its parameters one by one",
                            unit, mt_store_name(e->cx.store, unit));
    MT_UNLOCKED(e, st, mt_mirror_push(e->cx.store, unit, param, (unsigned)planes));
    return mt_engine_done(e, st);
}

PyObject *mt_engine_device_bytes(PyObject *self, PyObject *Py_UNUSED(unused))
{
    size_t bytes;

    MT_USABLE(e);
    bytes = mt_store_device_bytes(e->cx.store);
    if (e->cx.through != NULL)
        bytes += mt_through_stats_get(e->cx.through).device_bytes;
    return PyLong_FromSize_t(bytes);
}

PyObject *mt_engine_check(PyObject *self, PyObject *Py_UNUSED(unused))
{
    MT_USABLE(e);
    return mt_engine_done(e, mt_ledger_check(e->cx.store));
}

PyObject *mt_engine_watchdog(PyObject *self, PyObject *args)
{
    double seconds;

    MT_ENGINE(e, "d:watchdog", &seconds);
    if (!(seconds > 0))
        return PyErr_Format(e->error, "watchdog: seconds must be greater than 0");
    mt_ledger_watchdog(e->cx.store, seconds);
    Py_RETURN_NONE;
}
