/* sumsq.c — the sum of squares on the host, the micro-batch sums, and the door to the device's.
 *
 * One body, written for the compiler to vectorise (-O3 -ffp-contract=off), is compiled for three
 * instruction sets. The 256 lanes are independent, so vectors of any width keep the stated order.
 */
#include "sumsq_kernel.h"
#include "fpenv.h"
#include "../core/portion.h"
#ifdef MT_WITH_CUDA
#include "accumulate_cuda.h"
#include "sumsq_cuda.h"
#endif
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define LANES  MT_SUMSQ_LANES

_Static_assert(MT_SUMSQ_CHUNK == MT_PORTION_GRAIN, "owners' portions end where chunks do");

/* ---- one chunk: rule 1 ---- */

/* fp16 rows, which no compiler vectorises by itself. n <= LANES. */
typedef struct f16_rows {
    void (*widen) (float *to, const uint16_t *from, int64_t n);
    void (*narrow)(uint16_t *to, const float *from, int64_t n);
} f16_rows;

INLINE double fold(double *lane)
{
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int l = 0; l < half; l++)
            lane[l] += lane[l + half];
    return lane[0];
}

INLINE void square_f32(double *lane, const float *x, int64_t n)
{
    for (int64_t l = 0; l < n; l++)
        lane[l] += (double)x[l] * (double)x[l];
}

INLINE void square_f64(double *lane, const double *x, int64_t n)
{
    for (int64_t l = 0; l < n; l++)
        lane[l] += x[l] * x[l];
}

INLINE void widen(const f16_rows *h, mt_dtype dt, float *to, const uint16_t *from, int64_t n)
{
    if (dt == MT_F16)
        h->widen(to, from, n);
    else
        for (int64_t l = 0; l < n; l++)
            to[l] = mt_bf16_to_f32(from[l]);
}

INLINE void narrow(const f16_rows *h, mt_dtype dt, uint16_t *to, const float *from, int64_t n)
{
    if (dt == MT_F16)
        h->narrow(to, from, n);
    else
        for (int64_t l = 0; l < n; l++)
            to[l] = mt_f32_to_bf16(from[l]);
}

INLINE int64_t row_length(int64_t n, int64_t i) { return n - i < LANES ? n - i : LANES; }

INLINE double square_chunk(const f16_rows *h, mt_dtype dt, const void *x, int64_t n)
{
    double lane[LANES] = {0};

    for (int64_t i = 0; i < n; i += LANES) {
        int64_t row = row_length(n, i);
        float   wide[LANES];

        if (dt == MT_F32) {
            square_f32(lane, (const float *)x + i, row);
        } else if (dt == MT_F64) {
            square_f64(lane, (const double *)x + i, row);
        } else {
            widen(h, dt, wide, (const uint16_t *)x + i, row);
            square_f32(lane, wide, row);
        }
    }
    return fold(lane);
}

INLINE void add_f32(float *to, const float *add, int64_t n)
{
    for (int64_t l = 0; l < n; l++)
        to[l] += add[l];
}

INLINE void add_16(const f16_rows *h, mt_dtype dt, float *acc, uint16_t *grad, const void *add,
                   int64_t n, int from_grad)
{
    float wide[LANES];

    if (from_grad)
        widen(h, dt, acc, grad, n);
    widen(h, dt, wide, add, n);
    add_f32(acc, wide, n);
    narrow(h, dt, grad, acc, n);
}

INLINE double accumulate_chunk(const f16_rows *h, mt_dtype dt, float *acc, void *grad,
                               const void *add, int64_t n, int from_grad)
{
    size_t each = dt == MT_F64 ? 8 : dt == MT_F32 ? 4 : 2;
    double lane[LANES] = {0};

    for (int64_t i = 0; i < n; i += LANES) {
        int64_t     row  = row_length(n, i);
        const void *from = (const char *)add + (size_t)i * each;

        if (dt == MT_F32) {
            float *to = (float *)grad + i;
            add_f32(to, from, row);
            square_f32(lane, to, row);
        } else if (dt == MT_F64) {
            double *to = (double *)grad + i;
            for (int64_t l = 0; l < row; l++)
                to[l] += ((const double *)from)[l];
            square_f64(lane, to, row);
        } else {
            add_16(h, dt, acc + i, (uint16_t *)grad + i, from, row, from_grad);
            square_f32(lane, acc + i, row);
        }
    }
    return fold(lane);
}

/* ---- for each instruction set ---- */

static void widen_f16(float *to, const uint16_t *from, int64_t n)
{
    for (int64_t l = 0; l < n; l++)
        to[l] = mt_f16_to_f32(from[l]);
}

static void narrow_f16(uint16_t *to, const float *from, int64_t n)
{
    for (int64_t l = 0; l < n; l++)
        to[l] = mt_f32_to_f16(from[l]);
}

/* The tests of types are here, outside the loops, so that each one's loop is compiled alone. */
#define KERNEL(isa, target, widen_rows, narrow_rows)                                            \
    target static double square_##isa(mt_dtype dt, const void *x, int64_t n)                    \
    {                                                                                           \
        static const f16_rows h = { widen_rows, narrow_rows };                                  \
        return dt == MT_F32  ? square_chunk(&h, MT_F32, x, n)                                   \
             : dt == MT_BF16 ? square_chunk(&h, MT_BF16, x, n)                                  \
             : dt == MT_F16  ? square_chunk(&h, MT_F16, x, n)                                   \
                             : square_chunk(&h, MT_F64, x, n);                                  \
    }                                                                                           \
    target static double accumulate_##isa(mt_dtype dt, float *acc, void *grad, const void *add, \
                                          int64_t n, int from_grad)                             \
    {                                                                                           \
        static const f16_rows h = { widen_rows, narrow_rows };                                  \
        if (dt == MT_F32)                                                                       \
            return accumulate_chunk(&h, MT_F32, acc, grad, add, n, from_grad);                  \
        if (dt == MT_F64)                                                                       \
            return accumulate_chunk(&h, MT_F64, acc, grad, add, n, from_grad);                  \
        return dt == MT_BF16 ? accumulate_chunk(&h, MT_BF16, acc, grad, add, n, from_grad)      \
                             : accumulate_chunk(&h, MT_F16, acc, grad, add, n, from_grad);      \
    }

KERNEL(scalar, , widen_f16, narrow_f16)
static int runs_scalar(void) { return 1; }

#if defined(__x86_64__)
#define TARGET_AVX2   __attribute__((target("avx2,f16c")))
#define TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c")))

TARGET_AVX2 static void widen_f16_simd(float *to, const uint16_t *from, int64_t n)
{
    int64_t l = 0;

    for (; l + 8 <= n; l += 8)
        _mm256_storeu_ps(to + l, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + l))));
    widen_f16(to + l, from + l, n - l);
}

TARGET_AVX2 static void narrow_f16_simd(uint16_t *to, const float *from, int64_t n)
{
    int64_t l = 0;

    for (; l + 8 <= n; l += 8)
        _mm_storeu_si128((__m128i *)(to + l), _mm256_cvtps_ph(_mm256_loadu_ps(from + l),
                         _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    narrow_f16(to + l, from + l, n - l);
}

KERNEL(avx2, TARGET_AVX2, widen_f16_simd, narrow_f16_simd)
KERNEL(avx512, TARGET_AVX512, widen_f16_simd, narrow_f16_simd)

static int runs_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
}
static int runs_avx512(void)
{
    return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

const mt__sumsq_kernel mt__sumsq_kernels[MT__SUMSQ_KERNELS] = {
#if defined(__x86_64__)
    { "avx512", runs_avx512, square_avx512, accumulate_avx512 },
    { "avx2",   runs_avx2,   square_avx2,   accumulate_avx2 },
#endif
    { "scalar", runs_scalar, square_scalar, accumulate_scalar },
};

/* ---- all chunks: rule 2 ---- */

#define CHUNKS_AT_ONCE 32           /* what a thread of the pool takes: 256 Ki elements */

/* Written before the pool starts; a chunk's sum by the thread that took it. */
typedef struct job {
    const mt__sumsq_kernel *kernel;
    mt_dtype    dt;                 /* of grad and x */
    int64_t     n, n_chunks;
    const void *x;                  /* square: the input. accumulate: what is added */
    float      *acc;
    void       *grad;               /* NULL: square */
    int         from_grad;
    double     *sums;               /* [n_chunks] */
} job;

static double run_chunk(const job *j, int64_t c)
{
    int64_t     from = c * MT_SUMSQ_CHUNK;
    int64_t     n    = j->n - from < MT_SUMSQ_CHUNK ? j->n - from : MT_SUMSQ_CHUNK;
    const void *x    = (const char *)j->x + (size_t)from * mt_dtype_bytes(j->dt);
    unsigned    was  = mt__fp_begin();
    double      sum;

    if (j->grad == NULL)
        sum = j->kernel->square(j->dt, x, n);
    else
        sum = j->kernel->accumulate(j->dt, j->acc != NULL ? j->acc + from : NULL,
                                    (char *)j->grad + (size_t)from * mt_dtype_bytes(j->dt),
                                    x, n, j->from_grad);
    mt__fp_end(was);
    return sum;
}

static void run_chunks(void *arg, int64_t part)
{
    const job *j  = arg;
    int64_t    to = (part + 1) * CHUNKS_AT_ONCE < j->n_chunks ? (part + 1) * CHUNKS_AT_ONCE
                                                              : j->n_chunks;

    for (int64_t c = part * CHUNKS_AT_ONCE; c < to; c++)
        j->sums[c] = run_chunk(j, c);
}

static void prepare(job *j)
{
    j->kernel = mt__sumsq_kernels;
    while (!j->kernel->runs())
        j->kernel++;
    j->n_chunks = MT_SUMSQ_CHUNKS(j->n);
}

static void fill(job *j, mt_pool *pool)
{
    mt_pool_run(pool, run_chunks, j, (j->n_chunks + CHUNKS_AT_ONCE - 1) / CHUNKS_AT_ONCE);
}

/* Without a pool, or memory for the chunk sums, this thread does it all: the order is the same. */
static double run(job *j, mt_pool *pool)
{
    double lane[LANES] = {0}, *made = NULL;

    prepare(j);
    if (j->sums == NULL && pool != NULL && j->n_chunks > CHUNKS_AT_ONCE)
        j->sums = made = malloc((size_t)j->n_chunks * sizeof *j->sums);
    if (j->sums != NULL)
        fill(j, j->n_chunks > CHUNKS_AT_ONCE ? pool : NULL);

    for (int64_t c = 0; c < j->n_chunks; c++)
        lane[c % LANES] += j->sums != NULL ? j->sums[c] : run_chunk(j, c);
    free(made);
    return fold(lane);
}

double mt_sumsq_host(mt_pool *pool, mt_dtype dt, const void *x, int64_t n)
{
    return run(&(job){ .dt = dt, .n = n, .x = x }, pool);
}

void mt_sumsq_chunks(mt_pool *pool, mt_dtype dt, const void *x, int64_t n, double *sums)
{
    (void)run(&(job){ .dt = dt, .n = n, .x = x, .sums = sums }, pool);
}

double mt_sumsq_fold(const double *sums, int64_t n_chunks)
{
    double lane[LANES] = {0};

    for (int64_t c = 0; c < n_chunks; c++)
        lane[c % LANES] += sums[c];
    return fold(lane);
}

void mt_accumulate(mt_pool *pool, mt_dtype dt, float *acc, void *grad, const void *add,
                   int64_t n, int from_grad, double *sumsq, double *chunks)
{
    *sumsq = run(&(job){ .dt = dt, .n = n, .x = add, .acc = acc, .grad = grad,
                         .from_grad = from_grad, .sums = chunks }, pool);
}

/* ---- in a queue ---- */

struct mt_sumsq {
    mt_dev *dev;
    int     cuda;
    double *sums;                   /* CUDA: device memory for [room] chunk sums */
    int64_t room;
};

/* What is asked for. CPU queue: made by put, freed by the queue's thread. */
typedef struct order {
    mt_dtype    dt;                 /* of grad and x */
    const void *x;                  /* the input; accumulate: what is added */
    int64_t     n;
    double     *out, *chunks;       /* chunks: NULL, they are not asked for */
    float      *acc;
    void       *grad;               /* NULL: the sum of squares of x alone */
    int         from_grad;
} order;

static void run_order(void *arg)
{
    order *o = arg;

    *o->out = run(&(job){ .dt = o->dt, .n = o->n, .x = o->x, .acc = o->acc,
                          .grad = o->grad, .from_grad = o->from_grad, .sums = o->chunks }, NULL);
    free(o);
}

static mt_status put_cpu(mt_queue *q, order what)
{
    order    *o = malloc(sizeof *o);
    mt_status st;

    if (o == NULL)
        return MT_FAIL(MT_ENOMEM, "sumsq: malloc(%zu)", sizeof *o);
    *o = what;
    if ((st = q->dev->ops->call(q, run_order, o)) != MT_OK)
        free(o);
    return st;
}

#ifdef MT_WITH_CUDA
#define FIRST_ROOM 65536            /* chunk sums: 512 KiB, for tensors of up to 2^29 elements */

/* Kernels put before may still write the old sums, so the host waits for them first. That happens
 * once, if ever. */
static mt_status make_room(mt_sumsq *s, mt_queue *q, int64_t n_chunks)
{
    int64_t room = n_chunks > 2 * s->room ? n_chunks : 2 * s->room;
    void   *sums;

    if (n_chunks <= s->room)
        return MT_OK;
    MT_DO(s->dev->ops->sync(q));
    MT_DO(s->dev->ops->mem_alloc(s->dev, (size_t)room * sizeof(double), &sums));
    s->dev->ops->mem_free(s->dev, s->sums);
    s->sums = sums;
    s->room = room;
    return MT_OK;
}

static mt_status put_cuda(mt_sumsq *s, mt_queue *q, order o)
{
    mt_status   st = make_room(s, q, o.n / MT_SUMSQ_CHUNK + 1);
    const char *error;

    if (st != MT_OK)
        return st;
    if (o.grad == NULL)
        error = mt__sumsq_cuda(q->dev->ops->handle(q), o.dt, o.x, o.n, s->sums, o.out);
    else
        error = mt__accumulate_cuda(q->dev->ops->handle(q), o.dt, o.acc, o.grad, o.x, o.n,
                                    o.from_grad, s->sums, o.out);
    if (error != NULL)
        return MT_FAIL(MT_EDEVICE, "sumsq of %lld elements: %s", (long long)o.n, error);
    return o.chunks == NULL || o.n == 0 ? MT_OK
         : s->dev->ops->copy(q, o.chunks, s->sums, (size_t)MT_SUMSQ_CHUNKS(o.n) * sizeof *o.chunks);
}
#endif

mt_status mt_sumsq_open(mt_dev *dev, mt_sumsq **out)
{
    mt_sumsq *s = calloc(1, sizeof *s);

    if (s == NULL)
        return MT_FAIL(MT_ENOMEM, "sumsq: calloc(%zu)", sizeof *s);
    s->dev  = dev;
    s->cuda = strcmp(dev->ops->name, "cuda") == 0;
#ifdef MT_WITH_CUDA
    if (s->cuda) {
        void     *sums;
        mt_status st = dev->ops->mem_alloc(dev, FIRST_ROOM * sizeof(double), &sums);
        if (st != MT_OK) {
            free(s);
            return st;
        }
        s->sums = sums;
        s->room = FIRST_ROOM;
    }
#endif
    *out = s;
    return MT_OK;
}

void mt_sumsq_close(mt_sumsq *s)
{
    if (s == NULL)
        return;
    s->dev->ops->mem_free(s->dev, s->sums);
    free(s);
}

static mt_status put(mt_sumsq *s, mt_queue *q, order o)
{
    if (o.n < 0 || (o.dt != MT_F32 && o.dt != MT_BF16 && o.dt != MT_F16 && o.dt != MT_F64))
        return MT_FAIL(MT_EINVAL, "sumsq: %lld elements of %s; types are F32, BF16, F16, F64",
                       (long long)o.n, mt_dtype_name(o.dt));
#ifdef MT_WITH_CUDA
    if (s->cuda)
        return put_cuda(s, q, o);
#endif
    (void)s;
    return put_cpu(q, o);
}

mt_status mt_sumsq_put(void *s, mt_queue *q, mt_dtype dt, const void *x, int64_t n, double *out,
                       double *chunks)
{
    return put(s, q, (order){ .dt = dt, .x = x, .n = n, .out = out, .chunks = chunks });
}

mt_status mt_accumulate_put(void *s, mt_queue *q, mt_dtype dt, float *acc, void *grad,
                            const void *add, int64_t n, int from_grad, double *out,
                            double *chunks)
{
    int half = dt == MT_BF16 || dt == MT_F16;

    if (grad == NULL || add == NULL || add == grad || add == acc || (acc == NULL && half))
        return MT_FAIL(MT_EINVAL,
                       "accumulate: %s gradient at %p, sum at %p, to be added %p: a gradient and "
                       "another to add, and a sum for 16-bit types", mt_dtype_name(dt), grad,
                       (void *)acc, add);
    return put(s, q, (order){ .dt = dt, .x = add, .n = n, .out = out,
                              .chunks = chunks, .acc = acc, .grad = grad, .from_grad = from_grad });
}
