/* adam.c — checks what is asked, cuts it into chunks, and has the chosen kernel run over them. */
#include "adam_kernel.h"
#include "adam8_code.h"
#include "../ops/fpenv.h"
#ifdef MT_WITH_CUDA
#include "adam_cuda.h"
#include "adam8_cuda.h"
#endif
#include <math.h>
#include <stdlib.h>

static const char *const isa_names[MT_ISA_COUNT] = { "scalar", "avx2", "avx512" };

const char *mt_isa_name(mt_isa isa)
{
    return (unsigned)isa < MT_ISA_COUNT ? isa_names[isa] : "?";
}

int mt_isa_runs(mt_isa isa)
{
    if (isa == MT_ISA_SCALAR)
        return 1;
#if defined(__x86_64__)
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")
            && __builtin_cpu_supports("f16c");

    if (isa == MT_ISA_AVX2)
        return avx2;
    if (isa == MT_ISA_AVX512)
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
            && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    return 0;
}

mt_isa mt_isa_best(void)
{
    return mt_isa_runs(MT_ISA_AVX512) ? MT_ISA_AVX512
         : mt_isa_runs(MT_ISA_AVX2)   ? MT_ISA_AVX2 : MT_ISA_SCALAR;
}

mt_status mt__isa_check(mt_isa isa)
{
    if ((unsigned)isa >= MT_ISA_COUNT)
        return MT_FAIL(MT_EINVAL, "adam: isa %d is none of 0 to %d", (int)isa, MT_ISA_COUNT - 1);
    if (!mt_isa_runs(isa))
        return MT_FAIL(MT_ENOTSUP, "adam: this processor does not run %s; its best is %s",
                       mt_isa_name(isa), mt_isa_name(mt_isa_best()));
    return MT_OK;
}

static const mt__adam_kernels *kernels_of(mt_isa isa)
{
    static const mt__adam_kernels of[MT_ISA_COUNT] = {
        [MT_ISA_SCALAR] = { mt__adam_scalar, mt__adam8_scalar },
#if defined(__x86_64__)
        [MT_ISA_AVX2]   = { mt__adam_avx2,   mt__adam8_avx2 },
        [MT_ISA_AVX512] = { mt__adam_avx512, mt__adam8_avx512 },
#endif
    };
    return &of[isa];
}

/* ---- checks ---- */

static int kind_of(mt_dtype weight, mt_dtype grad)
{
#define KIND(w, g) if (weight == MT_##w && grad == MT_##g) return MT__ADAM_##w##_##g;
    MT__ADAM_KIND_MAP(KIND)
#undef KIND
    return -1;
}

/* How the weight is kept, of which only the kinds of moments of 8 bits have all. */
static int kind8_of(const mt_adam_tensor *t)
{
    int keep = t->dtype != MT_BF16 || t->states == MT_STATES_8BIT ? (int)t->dtype
             : t->states == MT_STATES_8BIT_LO8 ? MT__KEEP_LO8 : MT__KEEP_SR;

#define KIND8(w, g) if (keep == MT__KEEP_##w && t->grad_dtype == MT_##g) return MT__ADAM8_##w##_##g;
    MT__ADAM8_KIND_MAP(KIND8)
#undef KIND8
    return -1;
}

static const char *missing_states(const mt_adam_tensor *t)
{
    const mt_adam_codes *c = &t->codes;
    int      small = t->states != MT_STATES_FP32;
    unsigned low = t->dtype == MT_BF16 ? mt_states_low_bytes(t->states) : 0;

    return t->lo == NULL && low == 2                ? "lo"
         : c->lo == NULL && low == 1                ? "lo (8 bits)"
         : t->master == NULL && t->dtype == MT_F16  ? "master"
         : (small ? (void *)c->m : t->m) == NULL    ? "m"
         : (small ? (void *)c->v : t->v) == NULL    ? "v"
         : small && c->scale == NULL                ? "scale" : NULL;
}

static const char *missing_plane(const mt_adam_tensor *t)
{
    return t->n == 0       ? NULL
         : t->hi == NULL   ? "hi"
         : t->grad == NULL ? "grad"
         : missing_states(t);
}

/* Each comparison is written so that NaN fails it. */
static mt_status check_hyper(int i, const mt_adam_hyper *h)
{
    if (h->step < 1)
        return MT_FAIL(MT_EINVAL, "adam: tensor %d: step %lld; the first is 1", i,
                       (long long)h->step);
    if (!(h->beta1 >= 0 && h->beta1 < 1 && h->beta2 >= 0 && h->beta2 < 1))
        return MT_FAIL(MT_EINVAL, "adam: tensor %d: betas %g, %g are not both in [0, 1)",
                       i, h->beta1, h->beta2);
    if (!(h->eps >= 0 && isfinite(h->eps)))
        return MT_FAIL(MT_EINVAL, "adam: tensor %d: eps %g is not 0 or more", i, h->eps);
    if (!isfinite(h->lr) || !isfinite(h->weight_decay))
        return MT_FAIL(MT_EINVAL, "adam: tensor %d: lr %g, weight_decay %g are not both finite",
                       i, h->lr, h->weight_decay);
    return MT_OK;
}

static mt_status check_tensor(int i, const mt_adam_tensor *t)
{
    if (kind_of(t->dtype, t->grad_dtype) < 0)
        return MT_FAIL(MT_EINVAL, "adam: tensor %d: %s weights with a gradient in %s; weights are "
                       "F32, BF16 or F16, gradients F32 or as the weights",
                       i, mt_dtype_name(t->dtype), mt_dtype_name(t->grad_dtype));
    if (t->n < 0)
        return MT_FAIL(MT_EINVAL, "adam: tensor %d: %lld elements", i, (long long)t->n);
    if ((unsigned)t->states >= MT_STATES_COUNT)
        return MT_FAIL(MT_EINVAL, "adam: tensor %d: states %d; there are 0 to %d", i,
                       (int)t->states, MT_STATES_COUNT - 1);
    if (t->states != MT_STATES_FP32 && (t->first < 0 || t->first % MT_STATES_GROUP != 0))
        return MT_FAIL(MT_EINVAL,
                       "adam: tensor %d begins at element %lld of its parameter; with %s states "
                       "that must be a multiple of %d", i, (long long)t->first,
                       mt_states_name(t->states), MT_STATES_GROUP);
    if (missing_plane(t) != NULL)
        return MT_FAIL(MT_EINVAL, "adam: tensor %d (%s): no %s plane", i,
                       mt_dtype_name(t->dtype), missing_plane(t));
    return check_hyper(i, &t->hyper);
}

/* ---- work ---- */

/* splitmix64 (Steele, Lea & Flood 2014): each bit of z decides about each of the result. */
static uint64_t mixed(uint64_t z)
{
    z += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* In fp64, each coefficient rounded to fp32 once. */
static mt__adam_coef coef_of(const mt_adam_tensor *t, float clip)
{
    const mt_adam_hyper *h = &t->hyper;
    double   bc1 = 1.0 - pow(h->beta1, (double)h->step);
    double   bc2 = 1.0 - pow(h->beta2, (double)h->step);
    double   codes = MT__SQUARE_SAG * (double)MT__K_SQUARE / (double)MT__C_SQUARE;
    uint64_t seed = mixed(mixed(t->key) ^ (uint64_t)h->step);

    return (mt__adam_coef){
        .g_scale      = h->maximize ? -clip : clip,
        .one_minus_b1 = (float)(1.0 - h->beta1),
        .one_minus_b2 = (float)(1.0 - h->beta2),
        .rsqrt_bc2    = (float)(1.0 / sqrt(bc2)),
        .eps          = (float)h->eps,
        .lr_wd        = (float)(h->lr * h->weight_decay),
        .lr_bc1       = (float)(h->lr / bc1),
        .code_bound   = (float)(codes * sqrt(bc2) / (MT__UPDATE_MOST * bc1)),
        .seed         = { (uint32_t)seed, (uint32_t)(seed >> 32) },
    };
}

typedef struct task {
    const mt_adam_tensor *t;
    mt__adam_fn           fn;
    mt__adam_coef         coef;
    int64_t               first;      /* number of its first chunk */
} task;

/* Written before the pool starts, only read by the chunks. */
typedef struct plan {
    task   *tasks;
    int     n_tasks;
    int64_t n_chunks;
} plan;

static mt__adam_fn kernel_of(const mt__adam_kernels *kernels, const mt_adam_tensor *t)
{
    return t->states == MT_STATES_FP32 ? kernels->fp32[kind_of(t->dtype, t->grad_dtype)]
                                       : kernels->codes[kind8_of(t)];
}

static void plan_fill(plan *p, const mt_adam_tensor *t, int n, float clip,
                      const mt__adam_kernels *kernels)
{
    for (int i = 0; i < n; i++) {
        if (t[i].n == 0)
            continue;
        p->tasks[p->n_tasks++] = (task){
            .t = &t[i], .fn = kernel_of(kernels, &t[i]), .coef = coef_of(&t[i], clip),
            .first = p->n_chunks,
        };
        p->n_chunks += (t[i].n - 1) / MT__ADAM_CHUNK + 1;
    }
}

/* The last task whose first chunk is not after c. */
static const task *task_of(const plan *p, int64_t c)
{
    int low = 0, high = p->n_tasks - 1;

    while (low < high) {
        int middle = low + (high - low + 1) / 2;
        if (p->tasks[middle].first <= c)
            low = middle;
        else
            high = middle - 1;
    }
    return &p->tasks[low];
}

/* Any thread of the pool; chunks touch disjoint elements. */
static void run_chunk(void *arg, int64_t c)
{
    const task           *k = task_of(arg, c);
    const mt_adam_tensor *t = k->t;
    int64_t  from = (c - k->first) * MT__ADAM_CHUNK;
    int64_t  n    = t->n - from < MT__ADAM_CHUNK ? t->n - from : MT__ADAM_CHUNK;
    unsigned was  = mt__fp_begin();

    mt__adam_span all  = { t->hi, t->lo, t->master, t->m, t->v, t->grad, t->n, t->codes, t->first };
    mt__adam_span part = mt__adam_part(&all, t->dtype, t->grad_dtype, from, n);
    k->fn(&part, &k->coef);
    mt__fp_end(was);
}

static mt_status check_all(const mt_adam_tensor *t, int n_tensors, float clip)
{
    mt_status st = MT_OK;

    if (n_tensors < 0 || !isfinite(clip))
        return MT_FAIL(MT_EINVAL, "adam: %d tensors, clip %g", n_tensors, (double)clip);
    for (int i = 0; i < n_tensors && st == MT_OK; i++)
        st = check_tensor(i, &t[i]);
    return st;
}

/* Checks, and leaves tasks NULL when there is nothing to do. The caller frees them. */
static mt_status plan_make(plan *p, const mt_adam_tensor *t, int n_tensors, float clip,
                           const mt__adam_kernels *kernels)
{
    mt_status st = check_all(t, n_tensors, clip);

    *p = (plan){ 0 };
    if (st != MT_OK || n_tensors == 0)
        return st;
    if ((p->tasks = calloc((size_t)n_tensors, sizeof *p->tasks)) == NULL)
        return MT_FAIL(MT_ENOMEM, "adam: a plan of %d tensors", n_tensors);
    plan_fill(p, t, n_tensors, clip, kernels);
    return MT_OK;
}

static void plan_run(plan *p, mt_pool *pool)
{
    if (pool != NULL)
        mt_pool_run(pool, run_chunk, p, p->n_chunks);
    else
        for (int64_t c = 0; c < p->n_chunks; c++)
            run_chunk(p, c);
}

mt_status mt__adam_run(mt_pool *pool, const mt_adam_tensor *t, int n_tensors, float clip,
                       const mt__adam_kernels *kernels)
{
    plan      p;
    mt_status st = plan_make(&p, t, n_tensors, clip, kernels);

    if (st == MT_OK)
        plan_run(&p, pool);
    free(p.tasks);
    return st;
}

mt_status mt_adam_step(mt_pool *pool, const mt_adam_tensor *t, int n_tensors, float clip,
                       mt_isa isa)
{
    mt_status st = mt__isa_check(isa);

    return st != MT_OK ? st : mt__adam_run(pool, t, n_tensors, clip, kernels_of(isa));
}

/* ---- in a queue ---- */

/* CPU queue: made by put, freed by the queue's thread. */
typedef struct order {
    plan           p;                 /* of t */
    mt_adam_tensor t[];
} order;

static void order_free(order *o)
{
    free(o->p.tasks);
    free(o);
}

static void run_order(void *arg)
{
    order *o = arg;

    plan_run(&o->p, NULL);
    order_free(o);
}

static mt_status put_cpu(mt_queue *q, const mt_adam_tensor *t, int n_tensors, float clip)
{
    size_t    bytes = n_tensors > 0 ? (size_t)n_tensors * sizeof *t : 0;
    order    *o = malloc(sizeof *o + bytes);
    mt_status st;

    if (o == NULL)
        return MT_FAIL(MT_ENOMEM, "adam: an order for %d tensors", n_tensors);
    if (bytes > 0)
        memcpy(o->t, t, bytes);
    MT_TRY(plan_make(&o->p, o->t, n_tensors, clip, kernels_of(mt_isa_best())));
    MT_TRY(q->dev->ops->call(q, run_order, o));
    return MT_OK;

fail:
    order_free(o);
    return st;
}

#ifdef MT_WITH_CUDA
static void *low_of(const mt_adam_tensor *t)
{
    return t->dtype != MT_BF16 ? (void *)t->master
         : t->states == MT_STATES_8BIT_LO8 ? (void *)t->codes.lo : (void *)t->lo;
}

/* One launch for tensors from *at on, as long as their moments are of one size;
 * *at is then behind them. */
static const char *put_some(uintptr_t stream, const mt_adam_tensor *t, int n_tensors, float clip,
                            int *at)
{
    mt__adam_cuda_tensor some[MT__ADAM_CUDA_MOST];
    int                  n = 0;

    for (; *at < n_tensors && n < MT__ADAM_CUDA_MOST && t[*at].states == MT_STATES_FP32; ++*at) {
        const mt_adam_tensor *k = &t[*at];

        some[n++] = (mt__adam_cuda_tensor){
            .hi = k->hi, .low = low_of(k),
            .m = k->m, .v = k->v, .grad = k->grad, .n = k->n,
            .kind = kind_of(k->dtype, k->grad_dtype), .coef = coef_of(k, clip),
        };
    }
    return mt__adam_cuda(stream, some, n);
}

static const char *put_some8(uintptr_t stream, const mt_adam_tensor *t, int n_tensors, float clip,
                             int *at)
{
    mt__adam8_cuda_tensor some[MT__ADAM8_CUDA_MOST];
    int                   n = 0;

    for (; *at < n_tensors && n < MT__ADAM8_CUDA_MOST && t[*at].states != MT_STATES_FP32; ++*at) {
        const mt_adam_tensor *k = &t[*at];

        some[n++] = (mt__adam8_cuda_tensor){
            .hi = k->hi, .low = low_of(k),
            .m = k->codes.m, .v = k->codes.v, .scale = k->codes.scale, .grad = k->grad, .n = k->n,
            .first = k->first, .kind = kind8_of(k), .coef = coef_of(k, clip),
        };
    }
    return mt__adam8_cuda(stream, some, n);
}

mt_status mt_adam_put_cuda(uintptr_t stream, const mt_adam_tensor *t, int n_tensors, float clip)
{
    const char *error = NULL;
    mt_status   st = check_all(t, n_tensors, clip);

    if (st != MT_OK)
        return st;
    for (int at = 0; at < n_tensors && error == NULL;)
        error = t[at].states == MT_STATES_FP32 ? put_some(stream, t, n_tensors, clip, &at)
                                               : put_some8(stream, t, n_tensors, clip, &at);
    return error == NULL ? MT_OK : MT_FAIL(MT_EDEVICE, "adam of %d tensors: %s", n_tensors, error);
}
#else
mt_status mt_adam_put_cuda(uintptr_t stream, const mt_adam_tensor *t, int n_tensors, float clip)
{
    (void)t;
    (void)clip;
    return MT_FAIL(MT_ENOTSUP, "adam of %d tensors on stream %#lx: this build has no CUDA",
                   n_tensors, (unsigned long)stream);
}
#endif

mt_status mt_adam_put(mt_queue *q, const mt_adam_tensor *t, int n_tensors, float clip)
{
    if (strcmp(q->dev->ops->name, "cuda") == 0)
        return mt_adam_put_cuda(q->dev->ops->handle(q), t, n_tensors, clip);
    return put_cpu(q, t, n_tensors, clip);
}
