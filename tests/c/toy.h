/* toy.h — what the tests of stream, offload and engine share: a device that may dawdle, a store
 * of small fp32 units, and the two gradient kernels in their simplest form.
 *
 * Threads: as the functions it wraps. Everything that must succeed is REQUIREd.
 */
#ifndef MT_TOY_H
#define MT_TOY_H

#include "../../csrc/core/update.h"
#include "numbers.h"
#include "opened.h"

#define TOY_PARAMS 2

CLOSES(mt_offload, mt_offload_close(*x))
CLOSES(mt_updater, mt_update_close(*x))

typedef struct toy {
    mt_dev   *dev;
    mt_pool  *pool;
    mt_store *store;
    mt_context cx;
    mt_queue *run;           /* adopted 0, or a queue of its own when the toy dawdles */
    int       n_units;
} toy;

/* Elements of parameter p of unit u: all units differ. */
static inline int64_t toy_numel(int u, int p)
{
    return 24 + 8 * u + 5 * p;
}

/* What parameter p of unit u holds at the start. */
static inline float toy_value(int u, int p, int64_t i)
{
    return (float)(u + 1) + 0.25f * (float)p + (float)i / 128.0f;
}

static inline float *toy_at(const toy *t, int u, int p, mt_plane plane)
{
    return store_at(t->store, u, p, plane);
}

static inline void toy_add_units(toy *t, int n_units, mt_dtype dt)
{
    for (int u = 0; u < n_units; u++) {
        mt_param_desc d[TOY_PARAMS];
        char          name[32];

        for (int p = 0; p < TOY_PARAMS; p++)
            d[p] = (mt_param_desc){ dt, toy_numel(u, p), 1 };
        snprintf(name, sizeof name, "layers.%d", u);
        int unit = store_add(t->store, name, d, TOY_PARAMS);
        REQUIRE(unit == u);
        for (int p = 0; p < TOY_PARAMS && dt == MT_F32; p++)
            for (int64_t i = 0; i < toy_numel(u, p); i++)
                toy_at(t, u, p, MT_PLANE_HI)[i] = toy_value(u, p, i);
    }
    t->n_units = n_units;
}

/* Takes dev over. max_us 0: no delays, and run is the calling thread. */
static inline void toy_open_on(toy *t, mt_dev *dev, int n_units, int own_run, mt_dtype dt)
{
    *t = (toy){ .dev = dev };
    REQUIRE_OK(mt_pool_open(2, &t->pool));
    t->cx = (mt_context){ .dev = dev, .pool = t->pool };
    REQUIRE_OK(mt_store_open(&t->cx, &t->store));
    t->cx.store = t->store;
    if (own_run)
        REQUIRE_OK(dev->ops->queue_open(dev, "run", &t->run));
    else
        REQUIRE_OK(dev->ops->queue_adopt(dev, 0, &t->run));
    toy_add_units(t, n_units, dt);
}

static inline void toy_open(toy *t, int n_units, uint64_t seed, int max_us)
{
    toy_open_on(t, delayed_open(seed, max_us), n_units, max_us > 0, MT_F32);
}

static inline void toy_close(toy *t)
{
    t->dev->ops->queue_close(t->run);
    mt_store_close(t->store);
    mt_pool_close(t->pool);
    t->dev->ops->close(t->dev);
}

#define TOY(t, ...) CLOSED_BY(toy_close) toy t; toy_open(&t, __VA_ARGS__)

/* ---- gradient kernels: one thread, elements in order ------------------------------------ */

static inline double toy_sum(mt_dtype dt, const void *x, int64_t n)
{
    double sum = 0;

    for (int64_t i = 0; i < n; i++)
        sum += (double)get(x, dt, i) * (double)get(x, dt, i);
    return sum;
}

typedef struct toy_sumsq_arg {
    mt_dtype    dt;
    const void *x;
    int64_t     n;
    double     *out;
} toy_sumsq_arg;

static inline void toy_sumsq_now(void *arg)
{
    FREED toy_sumsq_arg *a = arg;

    *a->out = toy_sum(a->dt, a->x, a->n);
}

static inline mt_status toy_sumsq(void *ctx, mt_queue *q, mt_dtype dt, const void *src, int64_t n,
                                  double *out, double *chunks)
{
    toy_sumsq_arg *a = malloc(sizeof *a);
    mt_status      st;

    REQUIRE(a != NULL);
    *a = (toy_sumsq_arg){ dt, src, n, out };
    if ((st = q->dev->ops->call(q, toy_sumsq_now, a)) != MT_OK)
        free(a);
    return st;
}

static inline void toy_accumulate(mt_pool *pool, mt_dtype dt, float *acc, void *grad,
                                  const void *add, int64_t n, int from_grad, double *sumsq,
                                  double *chunks)
{
    for (int64_t i = 0; i < n; i++) {
        float old = from_grad || acc == NULL ? get(grad, dt, i) : acc[i];
        float sum = old + get(add, dt, i);

        if (acc != NULL)
            acc[i] = sum;
        set(grad, dt, i, sum);
    }
    *sumsq = toy_sum(dt, grad, n);
}

typedef struct toy_sum_arg {
    mt_dtype    dt;
    float      *acc;
    void       *grad;
    const void *add;
    int64_t     n;
    int         from_grad;
    double     *out;
} toy_sum_arg;

static inline void toy_sum_now(void *arg)
{
    FREED toy_sum_arg *a = arg;

    toy_accumulate(NULL, a->dt, a->acc, a->grad, a->add, a->n, a->from_grad, a->out, NULL);
}

static inline mt_status toy_accumulate_put(void *ctx, mt_queue *q, mt_dtype dt, float *acc,
                                           void *grad, const void *add, int64_t n, int from_grad,
                                           double *out, double *chunks)
{
    toy_sum_arg *a = malloc(sizeof *a);
    mt_status    st;

    REQUIRE(a != NULL);
    *a = (toy_sum_arg){ dt, acc, grad, add, n, from_grad, out };
    if ((st = q->dev->ops->call(q, toy_sum_now, a)) != MT_OK)
        free(a);
    return st;
}

static const mt_offload_kernels toy_kernels = { toy_sumsq, toy_accumulate, toy_accumulate_put,
                                                NULL, NULL };

/* A job as the updater hands it to a home, which ends it. */
static inline mt_update *update_of(const mt_update_job *j, float clip)
{
    size_t     bytes = (size_t)j->n_params * sizeof *j->params;
    mt_update *u = calloc(1, sizeof *u + bytes);

    if (u == NULL)
        abort();
    if (bytes > 0)
        memcpy(u->params, j->params, bytes);
    u->j = *j;
    u->j.params = u->params;
    u->clip = clip;
    return u;
}

#endif
