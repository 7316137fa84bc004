/* engine_adam.c — Engine.adam: what one step asks for, copied out of Python, run behind its back.
 *
 * Threads: parsing is under the GIL; job_sumsq, job_run and job_put run on the updater's thread,
 * job_free on any, job_gradient, job_compute and job_free on that of updates that go through the
 * device, job_pieces on that of updates from disk; they know nothing of Python. A job owns copies
 * of everything but the gradient memory that the caller named, which the caller keeps until the
 * unit's update is over.
 * Of a unit that has several owners a job updates, and measures, this one's portion: its tensors
 * are the elements that are its own, of each parameter that has some.
 */
#include "bind.h"
#include "../optim/adam.h"
#include <stdlib.h>
#include <string.h>

typedef struct adam_param {
    int           param;
    mt_adam_hyper hyper;
    const void   *grad;      /* NULL: the store's planes */
    mt_dtype      grad_dtype;/* of grad */
    int           changed;   /* by the user since it landed: the sum made then does not count */
    uint64_t      key;       /* see mt_adam_tensor */
    int           acc;       /* grad NULL: the fp32 sum of micro-batches is the gradient */
} adam_param;

typedef struct adam_job {
    mt_store   *store;
    mt_resident *residents;  /* NULL: the unit is not settled */
    int         unit;
    int         alone;       /* no other process owns a portion of it */
    int         n;
    int        *params;      /* [n], for the updater */
    adam_param *p;           /* [n] */
} adam_job;

/* ---- on the updater's thread ---- */

/* Where the update finds a plane: on the device when the unit is settled. */
static mt_status plane_of(const adam_job *j, int param, mt_plane plane, void **out)
{
    return j->residents != NULL ? mt_resident_at(j->residents, j->unit, param, plane, out)
                                : mt_store_at(j->store, j->unit, param, plane, out);
}

/* The gradient is in host memory whatever the unit: the caller's,
 * or GRAD's copy that he changed. */
static int on_host(const adam_param *p)
{
    return p->grad != NULL || p->changed;
}

/* The whole gradient as memory: the caller's, else the fp32 sum of micro-batches, else GRAD. */
static mt_status gradient(const adam_job *j, const adam_param *p, const void **grad,
                          mt_dtype *dtype)
{
    void *plane;

    if (p->grad != NULL) {
        *grad = p->grad;
        *dtype = p->grad_dtype;
        return MT_OK;
    }
    if (p->changed)
        MT_DO(mt_store_view(j->store, j->unit, p->param, MT_PLANE_GRAD, &plane));
    else
        MT_DO(plane_of(j, p->param, p->acc ? MT_PLANE_ACC : MT_PLANE_GRAD, &plane));
    *grad = plane;
    *dtype = p->acc ? MT_F32 : mt_store_desc(j->store, j->unit, p->param)->dtype;
    return MT_OK;
}

static int64_t own(const adam_job *j, const adam_param *p, int64_t *from)
{
    return mt_store_owned(j->store, j->unit, p->param, from);
}

/* The gradient from the first element on that is its own. */
static mt_status own_gradient(const adam_job *j, const adam_param *p, const void **grad,
                              mt_dtype *dtype)
{
    int64_t from;

    MT_DO(gradient(j, p, grad, dtype));
    (void)own(j, p, &from);
    *grad = (const char *)*grad + (size_t)from * mt_dtype_bytes(*dtype);
    return MT_OK;
}

/* mt_update_job.sumsq. Memory the caller named was never offloaded, so it is always summed. When
 * the planes cannot be had, run says so: the sum here is then 0. */
static double job_sumsq(void *arg, mt_pool *pool, int i, double *chunks, int *use)
{
    const adam_job   *j = arg;
    const adam_param *p = &j->p[i];
    const void       *grad;
    mt_dtype          dtype;
    int64_t           from, n = own(j, p, &from);

    *use = on_host(p) && (chunks != NULL || j->alone);
    if (!*use || own_gradient(j, p, &grad, &dtype) != MT_OK)
        return 0.0;
    if (chunks == NULL)
        return mt_sumsq_host(pool, dtype, grad, n);
    mt_sumsq_chunks(pool, dtype, grad, n, chunks);
    return 0.0;
}

/* All but the states: those of a guest have no address for good. */
static mt_status bare_of(const adam_job *j, const adam_param *p, mt_adam_tensor *t)
{
    const mt_param_desc *d = mt_store_desc(j->store, j->unit, p->param);
    int64_t   from, n = own(j, p, &from);
    void     *hi;

    MT_DO(plane_of(j, p->param, MT_PLANE_HI, &hi));
    *t = (mt_adam_tensor){ .dtype = d->dtype, .n = n, .first = from, .hyper = p->hyper,
                           .hi = (char *)hi + (size_t)from * mt_dtype_bytes(d->dtype),
                           .key = p->key, .states = mt_store_states(j->store, j->unit) };
    return own_gradient(j, p, &t->grad, &t->grad_dtype);
}

/* A parameter has something in this plane, and it is of its states. */
static int has_state(const adam_job *j, int param, int plane)
{
    return (MT_STATE_PLANES >> plane & 1) &&
           mt_store_plane_bytes(j->store, j->unit, param, (mt_plane)plane, 1) > 0;
}

/* at: of every plane, from the tensor's first element on; NULL where there is nothing. */
static void give_states(mt_adam_tensor *t, void *const *at)
{
    int small = t->states != MT_STATES_FP32, lo8 = mt_states_low_bytes(t->states) == 1;

    t->master = at[MT_PLANE_MASTER];
    t->lo = lo8 ? NULL : at[MT_PLANE_LO];
    t->m = small ? NULL : at[MT_PLANE_M];
    t->v = small ? NULL : at[MT_PLANE_V];
    if (small)
        t->codes = (mt_adam_codes){ .m = at[MT_PLANE_M], .v = at[MT_PLANE_V],
                                    .scale = at[MT_PLANE_SCALE],
                                    .lo = lo8 ? at[MT_PLANE_LO] : NULL };
}

static mt_status tensor_of(const adam_job *j, const adam_param *p, mt_adam_tensor *t)
{
    void *at[MT_PLANE_COUNT] = { NULL };

    MT_DO(bare_of(j, p, t));
    for (int k = 0; k < MT_PLANE_COUNT; k++)
        if (has_state(j, p->param, k)) {
            MT_DO(plane_of(j, p->param, (mt_plane)k, &at[k]));
            at[k] = (char *)at[k] + mt_store_plane_bytes(j->store, j->unit, p->param, (mt_plane)k,
                                                         t->first);
        }
    give_states(t, at);
    return MT_OK;
}

/* malloc'd [j->n]; of which none of its elements is this one's, n is 0. */
static mt_status list_of(const adam_job *j, mt_adam_tensor **out,
                         mt_status (*each)(const adam_job *, const adam_param *, mt_adam_tensor *))
{
    mt_adam_tensor *t MT_FREED = NULL;

    MT_DO(MT_MAKE(t, j->n, mt_store_name(j->store, j->unit)));
    for (int i = 0; i < j->n; i++)
        MT_DO(each(j, &j->p[i], &t[i]));
    *out = MT_KEEP(t);
    return MT_OK;
}

static mt_status job_run(void *arg, mt_pool *pool, float clip)
{
    const adam_job *j = arg;
    mt_adam_tensor *t MT_FREED = NULL;

    MT_DO(list_of(j, &t, tensor_of));
    return mt_adam_step(pool, t, j->n, clip, mt_isa_best());
}

static size_t lifted_bytes(const mt_adam_tensor *t)
{
    return mt_round_up((size_t)t->n * mt_dtype_bytes(t->grad_dtype), 512);
}

/* Gradients in host memory go up, in the queue and before the update that reads them. */
static mt_status lift(const adam_job *j, mt_queue *q, mt_adam_tensor *t)
{
    size_t need = 0;
    void  *mem;

    for (int i = 0; i < j->n; i++)
        need += on_host(&j->p[i]) ? lifted_bytes(&t[i]) : 0;
    if (need == 0)
        return MT_OK;
    MT_DO(mt_resident_scratch(j->residents, need, &mem));
    for (int i = 0; i < j->n; i++)
        if (on_host(&j->p[i])) {
            MT_DO(q->dev->ops->copy(q, mem, t[i].grad,
                                    (size_t)t[i].n * mt_dtype_bytes(t[i].grad_dtype)));
            t[i].grad = mem;
            mem = (char *)mem + lifted_bytes(&t[i]);
        }
    return MT_OK;
}

/* What a part has no room for is in the host's plane, at the part's first element. */
static mt_status fill_in(const adam_job *j, mt_part *part)
{
    size_t bytes;

    for (int p = 0; p < MT_PLANE_COUNT; p++)
        if (has_state(j, part->param, p) && part->at[p] == NULL)
            MT_DO(mt_part_host(j->store, j->unit, part, (mt_plane)p, &part->at[p], &bytes));
    return MT_OK;
}

/* The stretch of a tensor that is in a part; weights and gradients where the tensor says, unless
 * the part has them too. Both know their first element in the parameter. */
static mt_adam_tensor stretch(const mt_adam_tensor *t, const mt_part *part)
{
    const void    *grad = part->at[MT_PLANE_ACC] != NULL ? part->at[MT_PLANE_ACC]
                                                         : part->at[MT_PLANE_GRAD];
    size_t         skip = (size_t)(part->from - t->first);
    mt_adam_tensor s = *t;

    s.n = part->n;
    s.hi = part->at[MT_PLANE_HI] != NULL ? part->at[MT_PLANE_HI]
         : (char *)t->hi + skip * mt_dtype_bytes(t->dtype);
    s.grad = grad != NULL ? grad
           : (const char *)t->grad + skip * mt_dtype_bytes(t->grad_dtype);
    s.first = part->from;
    give_states(&s, part->at);
    return s;
}

/* Which of the job's parameters that is; -1: it is not to be updated. */
static int asked(const adam_job *j, int param)
{
    for (int i = 0; i < j->n; i++)
        if (j->params[i] == param)
            return i;
    return -1;
}

/* Tensors cut as the parts are, of parameters that are to be updated; malloc'd. whole: [j->n] of
 * them uncut; NULL: as bare_of has them. */
static mt_status stretches_of(const adam_job *j, const mt_adam_tensor *whole, const mt_part *parts,
                              int n_parts, mt_adam_tensor **out, int *n)
{
    mt_adam_tensor *s MT_FREED = NULL, t;

    MT_DO(MT_MAKE(s, n_parts, mt_store_name(j->store, j->unit)));
    *n = 0;
    for (int i = 0; i < n_parts; i++) {
        mt_part part = parts[i];
        int     k = asked(j, part.param);

        if (k < 0)
            continue;
        if (whole == NULL)
            MT_DO(bare_of(j, &j->p[k], &t));
        MT_DO(fill_in(j, &part));
        s[(*n)++] = stretch(whole != NULL ? &whole[k] : &t, &part);
    }
    *out = MT_KEEP(s);
    return MT_OK;
}

/* A guest's states, all that are to be updated, are in parts. */
static int are_all(const adam_job *j, const mt_adam_tensor *t, const mt_adam_tensor *s, int n)
{
    int64_t met = 0, due = 0;

    for (int i = 0; i < j->n; i++)
        due += t[i].n;
    for (int i = 0; i < n; i++)
        met += s[i].n;
    return met == due;
}

static mt_status put_guest(const adam_job *j, mt_queue *q, float clip, const mt_part *parts,
                           int n_parts)
{
    mt_adam_tensor *t MT_FREED = NULL, *s MT_FREED = NULL;
    int             n;

    MT_DO(list_of(j, &t, bare_of));
    MT_DO(lift(j, q, t));
    MT_DO(stretches_of(j, t, parts, n_parts, &s, &n));
    if (!are_all(j, t, s, n))
        MT_DO(MT_FAIL(MT_ESTATE, "unit %d (%s): some of its states are not on the device; lift "
                      "them anew when other parameters are to be trained", j->unit,
                      mt_store_name(j->store, j->unit)));
    return mt_adam_put(q, s, n, clip);
}

static mt_status job_put(void *arg, mt_queue *q, float clip)
{
    const adam_job *j = arg;
    const mt_part  *parts;
    mt_adam_tensor *t MT_FREED = NULL;
    int             n_parts;

    if (mt_arrive_invited(j->residents, j->unit)) {
        MT_DO(mt_arrive_parts(j->residents, j->unit, &parts, &n_parts));
        return put_guest(j, q, clip, parts, n_parts);
    }
    MT_DO(list_of(j, &t, tensor_of));
    MT_DO(lift(j, q, t));
    return mt_adam_put(q, t, j->n, clip);
}

static mt_status job_pieces(void *arg, mt_pool *pool, const mt_part *parts, int n_parts, float clip)
{
    mt_adam_tensor *s MT_FREED = NULL;
    int             n;

    MT_DO(stretches_of(arg, NULL, parts, n_parts, &s, &n));
    return mt_adam_step(pool, s, n, clip, mt_isa_best());
}

/* Its bytes are those of a plane: a gradient has its weight's type, or is an fp32 sum. */
static mt_status job_gradient(void *arg, int param, const void **at, mt_plane *plane)
{
    const adam_job *j = arg;
    mt_dtype        dtype;

    MT_DO(gradient(j, &j->p[asked(j, param)], at, &dtype));
    *plane = dtype == mt_store_desc(j->store, j->unit, param)->dtype ? MT_PLANE_GRAD
                                                                     : MT_PLANE_ACC;
    return MT_OK;
}

static mt_status job_compute(void *arg, mt_queue *q, const mt_part *parts, int n_parts, float clip)
{
    mt_adam_tensor *s MT_FREED = NULL;
    int             n;

    MT_DO(stretches_of(arg, NULL, parts, n_parts, &s, &n));
    return mt_adam_put(q, s, n, clip);
}

static uint64_t number(uint64_t hash, double value)
{
    uint64_t bits;

    memcpy(&bits, &value, sizeof bits);
    return mt_alike_mix(hash, bits);
}

/* Is the gradient another one here than what all ranks have? Who only looked at it, or keeps it,
 * has that; what a process writes it alone sees (mt_store_view). */
static int is_written(const adam_job *j, const adam_param *p)
{
    const mt_param_desc *d = mt_store_desc(j->store, j->unit, p->param);
    const void          *seen = p->grad;
    void                *view, *plane;

    if (!on_host(p))
        return 0;
    if ((seen != NULL && p->grad_dtype != d->dtype) ||
        !mt_store_made(j->store, j->unit, p->param, MT_PLANE_GRAD, 0) ||
        mt_store_view(j->store, j->unit, p->param, MT_PLANE_GRAD, &view) != MT_OK ||
        mt_store_at(j->store, j->unit, p->param, MT_PLANE_GRAD, &plane) != MT_OK)
        return 1;
    return memcmp(seen != NULL ? seen : view, plane,
                  (size_t)d->numel * mt_dtype_bytes(d->dtype)) != 0;
}

static void job_alike(const void *arg, uint64_t hash[MT_ALIKES])
{
    const adam_job *j = arg;

    hash[MT_ALIKE_STATES] += mt_alike_mix((uint64_t)j->unit + 1,
                                          (uint64_t)mt_store_states(j->store, j->unit));
    for (int i = 0; i < j->n; i++) {
        const adam_param    *p = &j->p[i];
        const mt_adam_hyper *h = &p->hyper;
        uint64_t             which = mt_alike_mix((uint64_t)j->unit + 1, (uint64_t)p->param);

        hash[MT_ALIKE_GRADS] += mt_alike_mix(which, (uint64_t)is_written(j, p));
        hash[MT_ALIKE_LR] += number(which, h->lr);
        hash[MT_ALIKE_BETAS] += number(number(which, h->beta1), h->beta2);
        hash[MT_ALIKE_EPS] += number(which, h->eps);
        hash[MT_ALIKE_DECAY] += number(which, h->weight_decay);
        hash[MT_ALIKE_STEP] += mt_alike_mix(which, (uint64_t)h->step);
        hash[MT_ALIKE_MAXIMIZE] += mt_alike_mix(which, (uint64_t)h->maximize);
    }
}

static void job_free(void *arg)
{
    adam_job *j = arg;

    if (j == NULL)
        return;
    free(j->params);
    free(j->p);
    free(j);
}

/* ---- under the GIL ---- */

/* mt_adam_step's own checks, on no elements: a bad number is refused here, not on a worker where
 * it would end the run. */
static int hyper_ok(mt_engine *e, int unit, const adam_param *p)
{
    const mt_param_desc *d = mt_store_desc(e->cx.store, unit, p->param);
    float          none = 0;
    mt_adam_tensor t = { .dtype = d->dtype, .hi = &none, .master = &none,
                         .lo = (int16_t *)(void *)&none, .m = &none, .v = &none, .grad = &none,
                         .hyper = p->hyper,
                         .grad_dtype = p->grad == NULL ? d->dtype : p->grad_dtype };
    mt_status st = mt_adam_step(NULL, &t, 1, 1.0f, MT_ISA_SCALAR);

    if (st == MT_OK)
        return 0;
    PyErr_Format(e->error, "unit %d (%s), parameter %d (%s): %s", unit,
                 mt_store_name(e->cx.store, unit), p->param, mt_dtype_name(d->dtype),
                 mt_last_error());
    return -1;
}

static int param_of(mt_engine *e, int unit, PyObject *tuple, adam_param *out)
{
    adam_param p = { 0 };
    long long  step;
    unsigned long long address, key = 0;
    int        grad_dtype;

    if (mt_arg_tuple(tuple) < 0 ||
        !PyArg_ParseTuple(tuple, "idddddLpKip|K;an entry is (param, lr, beta1, beta2, eps, "
                          "weight_decay, step, maximize, grad_address, grad_dtype, changed, key)",
                          &p.param, &p.hyper.lr, &p.hyper.beta1, &p.hyper.beta2, &p.hyper.eps,
                          &p.hyper.weight_decay, &step, &p.hyper.maximize, &address, &grad_dtype,
                          &p.changed, &key))
        return -1;
    if (mt_engine_param(e, unit, p.param) < 0)
        return -1;
    p.hyper.step = step;
    p.key = key;
    p.grad = (const void *)(uintptr_t)address;
    p.grad_dtype = (mt_dtype)grad_dtype;
    /* Asked now: a zero_grad() may come before the update runs. A user's change is in the GRAD
     * plane, the rounded copy, and makes the sum stale. */
    p.acc = address == 0 && !p.changed && mt_offload_has(e->offload, unit, p.param, MT_GRAD_SUMMED);
    if (hyper_ok(e, unit, &p) < 0)
        return -1;
    *out = p;
    return 0;
}

/* entries: a tuple of parameter tuples. */
static adam_job *job_of(mt_engine *e, int unit, PyObject *entries)
{
    int       n = (int)PyTuple_Size(entries);
    adam_job *j = calloc(1, sizeof *j);

    if (j == NULL || (j->params = calloc((size_t)n + 1, sizeof *j->params)) == NULL ||
        (j->p = calloc((size_t)n + 1, sizeof *j->p)) == NULL) {
        job_free(j);
        return (adam_job *)(void *)PyErr_NoMemory();
    }
    j->store = e->cx.store;
    j->residents = mt_store_home(e->cx.store, unit, NULL)->at != NULL ? e->cx.residents : NULL;
    j->unit = unit;
    j->alone = e->cx.share == NULL;
    j->n = n;
    for (int i = 0; i < j->n; i++) {
        if (param_of(e, unit, PyTuple_GetItem(entries, i), &j->p[i]) < 0) {
            job_free(j);
            return NULL;
        }
        j->params[i] = j->p[i].param;
    }
    return j;
}

static uint64_t moved(const adam_job *j)
{
    uint64_t bytes = 0;

    for (int i = 0; i < j->n; i++) {
        const mt_param_desc *d = mt_store_desc(j->store, j->unit, j->p[i].param);
        mt_dtype             grad = j->p[i].acc ? MT_F32 : d->dtype;
        int64_t              from, n = own(j, &j->p[i], &from);

        if (j->p[i].grad != NULL)
            grad = j->p[i].grad_dtype;
        bytes += mt_adam_moves(d->dtype, mt_store_states(j->store, j->unit), grad, n);
    }
    return bytes;
}

static int update_of(mt_engine *e, PyObject *item, mt_update_job *out)
{
    PyObject *sequence, *entries;
    adam_job *j;
    int       unit;

    if (mt_arg_tuple(item) < 0 ||
        !PyArg_ParseTuple(item, "iO;a unit is (unit, entries)", &unit, &sequence) ||
        mt_engine_unit(e, unit) < 0 || (entries = PySequence_Tuple(sequence)) == NULL)
        return -1;
    j = job_of(e, unit, entries);
    Py_DECREF(entries);
    if (j == NULL)
        return -1;
    *out = (mt_update_job){ .unit = unit, .n_params = j->n, .params = j->params, .sumsq = job_sumsq,
                            .run = job_run, .put = job_put, .gradient = job_gradient,
                            .compute = job_compute, .pieces = job_pieces, .alike = job_alike,
                            .bytes = moved(j),
                            .free = job_free, .arg = j };
    return 0;
}

/* malloc'd [size of tuple], or NULL with an exception. */
static mt_update_job *updates_of(mt_engine *e, PyObject *tuple)
{
    Py_ssize_t     n = PyTuple_Size(tuple);
    mt_update_job *jobs = calloc((size_t)n + 1, sizeof *jobs);

    if (jobs == NULL)
        return (mt_update_job *)(void *)PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n; i++)
        if (update_of(e, PyTuple_GetItem(tuple, i), &jobs[i]) < 0) {
            while (i-- > 0)
                job_free(jobs[i].arg);
            free(jobs);
            return NULL;
        }
    return jobs;
}

/* Returns at once, but for the debug mode in which it waits for the update. */
static mt_status submit_alone(mt_engine *e, const mt_update_job *jobs, int n, double max_norm,
                              mt_queue *run, uint64_t *ticket)
{
    MT_HOLD(&e->door);
    return mt_update_submit(e->updater, jobs, n, max_norm, run, ticket);
}

PyObject *mt_engine_adam(PyObject *self, PyObject *args, PyObject *kw)
{
    static char   *names[] = { "units", "max_norm", "stream", NULL };
    mt_engine     *e = mt_engine_usable(self);
    PyObject      *sequence, *units;
    mt_update_job *jobs;
    mt_queue      *run;
    double         max_norm;
    unsigned long long handle;
    uint64_t       ticket;
    mt_status      st = MT_OK;
    int            n;

    if (e == NULL || !PyArg_ParseTupleAndKeywords(args, kw, "OdK:adam", names, &sequence, &max_norm,
                                                  &handle))
        return NULL;
    if ((run = mt_engine_queue(e, (uintptr_t)handle)) == NULL ||
        (units = PySequence_Tuple(sequence)) == NULL)
        return NULL;
    n = (int)PyTuple_Size(units);
    jobs = updates_of(e, units);
    Py_DECREF(units);
    if (jobs == NULL)
        return NULL;
    MT_WAITING(e, st, mt_update_turn(e->updater));
    if (st != MT_OK) {
        for (int i = 0; i < n; i++)
            job_free(jobs[i].arg);
        free(jobs);
        return mt_raise(e->error, st);
    }
    /* From here on the updater owns the args, whatever comes back. */
    MT_UNLOCKED(e, st, submit_alone(e, jobs, n, max_norm, run, &ticket));
    free(jobs);
    return st == MT_OK ? PyLong_FromUnsignedLongLong(ticket) : mt_raise(e->error, st);
}

PyObject *mt_engine_norm(PyObject *self, PyObject *args)
{
    unsigned long long ticket;
    double             norm;
    int                skipped;
    mt_status          st;

    MT_ENGINE(e, "K:norm", &ticket);
    MT_WAITING(e, st, mt_update_norm(e->updater, ticket, &norm, &skipped));
    return st == MT_OK ? Py_BuildValue("(di)", norm, skipped) : mt_raise(e->error, st);
}
