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
    mt_queue *queue;
    mt_status st;

    for (int i = 0; i < e->n_adopted; i++)
        if (e->adopted[i].handle == handle)
            return e->adopted[i].queue;
    if ((st = MT_GROW(e->adopted, e->adopted_room, e->n_adopted + 1, "engine")) != MT_OK ||
        (st = e->cx.dev->ops->queue_adopt(e->cx.dev, handle, &queue)) != MT_OK) {
        mt_raise(e->error, st);
        return NULL;
    }
    e->adopted[e->n_adopted++] = (mt_adopted){ .handle = handle, .queue = queue };
    return queue;
}

static _Thread_local mt_engine *parsed;      /* whose method's arguments this thread reads */
static _Thread_local int        parsed_unit; /* the latest of these */

int mt_as_unit(PyObject *o, void *unit)
{
    return mt_arg_int(o, unit) == 0 && mt_engine_unit(parsed, parsed_unit = *(int *)unit) == 0;
}

int mt_as_param(PyObject *o, void *param)
{
    return mt_arg_int(o, param) == 0 && mt_engine_param(parsed, parsed_unit, *(int *)param) == 0;
}

int mt_as_plane(PyObject *o, void *plane)
{
    int *p = plane;

    if (mt_arg_int(o, p) < 0)
        return 0;
    if (*p < 0 || *p >= MT_PLANE_COUNT)
        PyErr_Format(parsed->error, "plane %d: PLANES has 0 to %d", *p, MT_PLANE_COUNT - 1);
    return *p >= 0 && *p < MT_PLANE_COUNT;
}

int mt_as_queue(PyObject *o, void *queue)
{
    mt_queue **q = queue;
    uintptr_t  handle;

    return mt_arg_addr(o, &handle) == 0 && (*q = mt_engine_queue(parsed, handle)) != NULL;
}

static int parse(PyObject *args, PyObject *kw, char **names, const char *format, va_list list)
{
    return names == NULL ? PyArg_VaParse(args, format, list)
                         : PyArg_VaParseTupleAndKeywords(args, kw, format, names, list);
}

#define PARSE(self, args, kw, names, format)                     \
    mt_engine *e = mt_engine_usable(self), *before = parsed;     \
    va_list    list;                                             \
    int        ok;                                               \
                                                                 \
    if (e == NULL)                                               \
        return NULL;                                             \
    parsed = e;                                                  \
    va_start(list, format);                                      \
    ok = parse(args, kw, names, format, list);                   \
    va_end(list);                                                \
    parsed = before;                                             \
    return ok ? e : NULL

mt_engine *mt_engine_args(PyObject *self, PyObject *args, const char *format, ...)
{
    PARSE(self, args, NULL, NULL, format);
}

mt_engine *mt_engine_keys(PyObject *self, PyObject *args, PyObject *kw, char **names,
                          const char *format, ...)
{
    PARSE(self, args, kw, names, format);
}

PyObject *mt_tuple_of(const size_t *sizes, int n)
{
    PyObject *out = PyTuple_New(n);

    for (int i = 0; out != NULL && i < n; i++) {
        PyObject *size = PyLong_FromSize_t(sizes[i]);

        if (size == NULL || PyTuple_SetItem(out, i, size) < 0)
            Py_CLEAR(out);
    }
    return out;
}

PyObject *mt_engine_done(mt_engine *e, mt_status st)
{
    return st == MT_OK && !PyErr_Occurred() ? Py_NewRef(Py_None) : mt_raise(e->error, st);
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
    if (w->share < 0 && (e->ranks > 1 || w->speakers != NULL))
        return MT_FAIL(MT_EINVAL, "an Engine that shares nothing has neither ranks nor speakers");
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

static int rank_from(void *Py_UNUSED(unused), PyObject *o, void *rank)
{
    return mt_arg_int(o, rank);
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
    if (speakers != NULL && PyTuple_Size(speakers) > 0) {
        if (PyTuple_Size(speakers) != ranks) {
            PyErr_Format(e->error, "an engine of %d ranks has so many speakers", ranks);
            return -1;
        }
        if ((w.speakers = mt_arg_list(speakers, sizeof *w.speakers, rank_from, NULL)) == NULL)
            return -1;
    }
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
    e->adopted_room = e->n_adopted = 0;
    return MT_OK;
}

PyObject *mt_engine_close(PyObject *self, PyObject *Py_UNUSED(unused))
{
    mt_engine *e = (mt_engine *)self;
    mt_status  st;

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

#define DOC(name, sig, doc) #name "($self" sig ")\n--\n\n" doc
#define CALLED(name) ((PyCFunction)(void (*)(void))mt_engine_##name)
#define METHOD(name, sig, doc)  { #name, CALLED(name), METH_VARARGS, DOC(name, sig, doc) },
#define NOARGS(name, sig, doc)  { #name, CALLED(name), METH_NOARGS, DOC(name, sig, doc) },
#define ONE(name, sig, doc)     { #name, CALLED(name), METH_O, DOC(name, sig, doc) },
#define FAST(name, sig, doc)    { #name, CALLED(name), METH_FASTCALL, DOC(name, sig, doc) },
#define KEYWORD(name, sig, doc) \
    { #name, CALLED(name), METH_VARARGS | METH_KEYWORDS, DOC(name, sig, doc) },

static PyMethodDef methods[] = {
#include "methods.h"
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
