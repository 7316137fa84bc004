/* test_sumsq.c — the executable form of ops/sumsq.h. */
#include "check.h"
#include "dev_fault.h"
#include "../../csrc/ops/sumsq_kernel.h"
#include <math.h>

static const mt_dtype types[] = { MT_F32, MT_BF16, MT_F16, MT_F64 };
#define TYPES 4

static uint64_t random_state;

static uint32_t random_bits(void)           /* splitmix64, upper half */
{
    uint64_t z = (random_state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (uint32_t)((z ^ (z >> 31)) >> 32);
}

static double get(const void *x, mt_dtype dt, int64_t i)
{
    return dt == MT_F32  ? (double)((const float *)x)[i]
         : dt == MT_BF16 ? (double)mt_bf16_to_f32(((const uint16_t *)x)[i])
         : dt == MT_F16  ? (double)mt_f16_to_f32(((const uint16_t *)x)[i])
                         : ((const double *)x)[i];
}

static void set(void *x, mt_dtype dt, int64_t i, double d)
{
    if (dt == MT_F64)
        ((double *)x)[i] = d;
    else if (dt == MT_F32)
        ((float *)x)[i] = (float)d;
    else
        ((uint16_t *)x)[i] = dt == MT_BF16 ? mt_f32_to_bf16((float)d) : mt_f32_to_f16((float)d);
}

/* Magnitudes over 12 powers of two, so that the order of addition shows in the last bits. */
static void *random_array(mt_dtype dt, int64_t n)
{
    void *x = malloc((size_t)n * mt_dtype_bytes(dt) + 1);

    REQUIRE(x != NULL);
    for (int64_t i = 0; i < n; i++)
        set(x, dt, i, ldexp((double)(int32_t)random_bits(), (int)(random_bits() % 12) - 38));
    return x;
}

static uint64_t bits_of(double d) { uint64_t u; memcpy(&u, &d, sizeof u); return u; }

/* ---- the definition, word by word from the header ---- */

static double fold_by_the_book(double *lane)
{
    for (int half = 128; half >= 1; half /= 2)
        for (int l = 0; l < half; l++)
            lane[l] += lane[l + half];
    return lane[0];
}

static double chunk_by_the_book(mt_dtype dt, const void *x, int64_t from, int64_t to)
{
    double lane[256] = {0};

    for (int l = 0; l < 256; l++)
        for (int64_t i = from + l; i < to; i += 256) {
            /* rounded before it is added */
            volatile double square = get(x, dt, i) * get(x, dt, i);
            lane[l] += square;
        }
    return fold_by_the_book(lane);
}

static double by_the_book(mt_dtype dt, const void *x, int64_t n)
{
    double lane[256] = {0};

    for (int64_t c = 0; c * 8192 < n; c++)
        lane[c % 256] += chunk_by_the_book(dt, x, c * 8192,
                                           n < (c + 1) * 8192 ? n : (c + 1) * 8192);
    return fold_by_the_book(lane);
}

/* ---- sums ---- */

static const int64_t lengths[] = { 0, 1, 7, 255, 256, 257, 511, 8191, 8192, 8193, 100003, 300001 };
#define LENGTHS ((int)(sizeof lengths / sizeof lengths[0]))

static void host_sum_is_the_definition(void)
{
    mt_pool *pool;

    REQUIRE(mt_pool_open(3, &pool) == MT_OK);
    for (int t = 0; t < TYPES; t++)
        for (int i = 0; i < LENGTHS; i++) {
            random_state = (uint64_t)i;
            void    *x    = random_array(types[t], lengths[i]);
            uint64_t want = bits_of(by_the_book(types[t], x, lengths[i]));
            CHECK_EQ(bits_of(mt_sumsq_host(NULL, types[t], x, lengths[i])), want);
            CHECK_EQ(bits_of(mt_sumsq_host(pool, types[t], x, lengths[i])), want);
            free(x);
        }
    mt_pool_close(pool);
}

/* More than 256 chunks: rule 2 wraps around its lanes. */
static void long_sum_is_the_definition(void)
{
    int64_t  n = 8192 * 300 + 5;
    mt_pool *pool;

    random_state = 3;
    void *x = random_array(MT_BF16, n);
    REQUIRE(mt_pool_open(4, &pool) == MT_OK);
    CHECK_EQ(bits_of(mt_sumsq_host(pool, MT_BF16, x, n)), bits_of(by_the_book(MT_BF16, x, n)));
    mt_pool_close(pool);
    free(x);
}

static void every_isa_sums_a_chunk_alike(void)
{
    for (int t = 0; t < TYPES; t++)
        for (int64_t n = 1; n <= 8192; n += n < 300 ? 1 : 1973) {
            void  *x    = random_array(types[t], n);
            double want = chunk_by_the_book(types[t], x, 0, n);
            for (int k = 0; k < MT__SUMSQ_KERNELS; k++)
                if (mt__sumsq_kernels[k].runs())
                    CHECK_EQ(bits_of(mt__sumsq_kernels[k].square(types[t], x, n)), bits_of(want));
            free(x);
        }
}

static void every_isa_accumulates_alike(void)
{
    for (int t = 0; t < TYPES; t++)
        for (int64_t n = 1; n <= 600; n += n < 20 ? 1 : 83)
            for (int from_grad = 0; from_grad < 2; from_grad++) {
                size_t bytes = (size_t)n * mt_dtype_bytes(types[t]);
                void  *grad0 = random_array(types[t], n), *add = random_array(types[t], n);
                float *acc0  = random_array(MT_F32, n);
                void  *grad  = malloc(bytes), *want = malloc(bytes);
                float *acc   = malloc((size_t)n * 4), *want_acc = malloc((size_t)n * 4);
                double sum   = 0;

                REQUIRE(grad != NULL && want != NULL && acc != NULL && want_acc != NULL);
                for (int k = MT__SUMSQ_KERNELS - 1; k >= 0; k--) {      /* the definition first */
                    if (!mt__sumsq_kernels[k].runs())
                        continue;
                    memcpy(grad, grad0, bytes);
                    memcpy(acc, acc0, (size_t)n * 4);
                    double s = mt__sumsq_kernels[k].accumulate(types[t], acc, grad, add, n,
                                                               from_grad);
                    if (k == MT__SUMSQ_KERNELS - 1) {
                        sum = s;
                        memcpy(want, grad, bytes);
                        memcpy(want_acc, acc, (size_t)n * 4);
                    }
                    CHECK_EQ(bits_of(s), bits_of(sum));
                    CHECK_EQ(memcmp(grad, want, bytes), 0);
                    CHECK_EQ(memcmp(acc, want_acc, (size_t)n * 4), 0);
                }
                free(grad0); free(add); free(acc0);
                free(grad); free(want); free(acc); free(want_acc);
            }
}

static void not_finite_shows_in_the_sum(void)
{
    for (int t = 0; t < TYPES; t++) {
        void *x = random_array(types[t], 20000);
        set(x, types[t], 19999, INFINITY);
        CHECK(isinf(mt_sumsq_host(NULL, types[t], x, 20000)));
        set(x, types[t], 3, NAN);
        CHECK(isnan(mt_sumsq_host(NULL, types[t], x, 20000)));
        free(x);
    }
}

/* The square of the smallest fp32 number, 2^-298, is an ordinary fp64. */
static void denormals_count(void)
{
    float x[2] = { 0x1p-149f, -0x1p-149f };

    CHECK(mt_sumsq_host(NULL, MT_F32, x, 2) == 0x1p-297);
}

/* ---- micro-batches ---- */

static void sixteen_bit_gradients_are_summed_in_fp32(void)
{
    enum { N = 9000 };
    static const mt_dtype both[] = { MT_BF16, MT_F16 };

    for (int t = 0; t < 2; t++) {
        uint16_t *grad = random_array(both[t], N), *add = random_array(both[t], N);
        float    *acc = malloc(N * sizeof *acc), *want = malloc(N * sizeof *want);
        double    sum;

        REQUIRE(acc != NULL && want != NULL);
        for (int i = 0; i < N; i++)
            want[i] = (float)get(grad, both[t], i) + (float)get(add, both[t], i);
        mt_accumulate(NULL, both[t], acc, grad, add, N, 1, &sum, NULL);     /* acc is grad's */
        CHECK_EQ(memcmp(acc, want, N * sizeof *acc), 0);
        CHECK_EQ(bits_of(sum), bits_of(by_the_book(MT_F32, want, N)));
        for (int i = 0; i < N; i++)
            want[i] += (float)get(add, both[t], i);
        mt_accumulate(NULL, both[t], acc, grad, add, N, 0, &sum, NULL);     /* and goes on */
        CHECK_EQ(memcmp(acc, want, N * sizeof *acc), 0);
        CHECK_EQ(bits_of(sum), bits_of(by_the_book(MT_F32, want, N)));
        for (int i = 0; i < N; i++)
            CHECK_EQ(grad[i], both[t] == MT_BF16 ? mt_f32_to_bf16(acc[i]) : mt_f32_to_f16(acc[i]));
        free(grad); free(add); free(acc); free(want);
    }
}

/* 1 + 2^-8 lies half way between two bf16 numbers, 1 + 3 * 2^-8 too. */
static void rounded_sums_go_to_even(void)
{
    uint16_t grad[2] = { mt_f32_to_bf16(1.0f), mt_f32_to_bf16(1.0f + 0x1p-7f) };
    uint16_t add[2]  = { mt_f32_to_bf16(0x1p-8f), mt_f32_to_bf16(0x1p-8f) };
    float    acc[2];
    double   sum;

    mt_accumulate(NULL, MT_BF16, acc, grad, add, 2, 1, &sum, NULL);
    CHECK_EQ(grad[0], mt_f32_to_bf16(1.0f));
    CHECK_EQ(grad[1], mt_f32_to_bf16(1.0f + 0x1p-6f));
    CHECK(acc[0] == 1.0f + 0x1p-8f);
}

static void wide_gradients_are_summed_in_place(void)
{
    enum { N = 8195 };
    static const mt_dtype both[] = { MT_F32, MT_F64 };

    for (int t = 0; t < 2; t++) {
        void  *grad = random_array(both[t], N), *add = random_array(both[t], N);
        double first = get(grad, both[t], 0), last = get(grad, both[t], N - 1), sum;

        mt_accumulate(NULL, both[t], NULL, grad, add, N, 0, &sum, NULL);
        if (both[t] == MT_F32) {
            CHECK(((float *)grad)[0] == (float)first + ((float *)add)[0]);
            CHECK(((float *)grad)[N - 1] == (float)last + ((float *)add)[N - 1]);
        } else {
            CHECK(((double *)grad)[0] == first + ((double *)add)[0]);
            CHECK(((double *)grad)[N - 1] == last + ((double *)add)[N - 1]);
        }
        CHECK_EQ(bits_of(sum), bits_of(by_the_book(both[t], grad, N)));
        free(grad); free(add);
    }
}

static void number_of_threads_changes_no_bit_of_a_sum(void)
{
    int64_t   n = 8192 * 70 + 1;
    uint16_t *grad = random_array(MT_BF16, n), *add = random_array(MT_BF16, n);
    uint16_t *grad1 = malloc((size_t)n * 2);
    float    *acc = calloc((size_t)n, 4), *acc1 = calloc((size_t)n, 4);
    double    sum, sum1;
    mt_pool  *pool;

    REQUIRE(grad1 != NULL && acc != NULL && acc1 != NULL && mt_pool_open(4, &pool) == MT_OK);
    memcpy(grad1, grad, (size_t)n * 2);
    mt_accumulate(pool, MT_BF16, acc, grad, add, n, 1, &sum, NULL);
    mt_accumulate(NULL, MT_BF16, acc1, grad1, add, n, 1, &sum1, NULL);
    CHECK_EQ(bits_of(sum), bits_of(sum1));
    CHECK_EQ(memcmp(acc, acc1, (size_t)n * 4), 0);
    CHECK_EQ(memcmp(grad, grad1, (size_t)n * 2), 0);
    mt_pool_close(pool);
    free(grad); free(add); free(grad1); free(acc); free(acc1);
}

/* ---- in a queue ---- */

/* Every type and length through a device's queue, twice as many puts as need to be waited for. */
static void check_queue(mt_dev *dev)
{
    mt_sumsq *s;
    mt_queue *q;
    void     *x[TYPES * LENGTHS], *there[TYPES * LENGTHS];
    double   *out = calloc(TYPES * LENGTHS, sizeof *out);
    size_t    out_bytes = TYPES * LENGTHS * sizeof *out;

    REQUIRE(out != NULL);
    REQUIRE(dev->ops->host_register(dev, out, out_bytes) == MT_OK);
    REQUIRE(dev->ops->queue_open(dev, "sums", &q) == MT_OK);
    REQUIRE(mt_sumsq_open(dev, &s) == MT_OK);
    for (int k = 0; k < TYPES * LENGTHS; k++) {
        int64_t n     = lengths[k % LENGTHS];
        size_t  bytes = (size_t)n * mt_dtype_bytes(types[k / LENGTHS]);

        x[k] = random_array(types[k / LENGTHS], n);
        out[k] = -1;
        REQUIRE(dev->ops->mem_alloc(dev, bytes + 8, &there[k]) == MT_OK);
        if (bytes > 0)
            CHECK_OK(dev->ops->copy(q, there[k], x[k], bytes));
        CHECK_OK(mt_sumsq_put(s, q, types[k / LENGTHS], there[k], n, &out[k], NULL));
    }
    CHECK_OK(dev->ops->sync(q));
    for (int k = 0; k < TYPES * LENGTHS; k++) {
        CHECK_EQ(bits_of(out[k]),
                 bits_of(by_the_book(types[k / LENGTHS], x[k], lengths[k % LENGTHS])));
        dev->ops->mem_free(dev, there[k]);
        free(x[k]);
    }
    mt_sumsq_close(s);
    dev->ops->queue_close(q);
    dev->ops->host_unregister(dev, out);
    free(out);
}

static void cpu_queue_gives_the_definition(void)
{
    mt_dev *dev;

    REQUIRE(mt_dev_cpu_open(&dev) == MT_OK);
    check_queue(dev);
    dev->ops->close(dev);
}

static void cuda_queue_gives_the_definition(void)
{
    mt_dev *dev;

    if (mt_dev_cuda_open(0, &dev) != MT_OK)
        SKIP("%s", mt_last_error());
    check_queue(dev);
    dev->ops->close(dev);
}

/* A parameter that begins at an odd address, and one of more chunks than there is room for at
 * first: paths that the other tests do not take. */
static void cuda_takes_odd_addresses_and_many_chunks(void)
{
    enum { N = 50001 };
    const int64_t many = 8192ll * 65536 + 9;
    mt_dev   *dev;
    mt_queue *q;
    mt_sumsq *s;
    void     *there;
    double   *out = calloc(512, sizeof *out);

    REQUIRE(out != NULL);
    if (mt_dev_cuda_open(0, &dev) != MT_OK) {
        free(out);
        SKIP("%s", mt_last_error());
    }
    uint16_t *x = random_array(MT_BF16, N), *large = malloc((size_t)many * 2);
    REQUIRE(large != NULL && dev->ops->host_register(dev, out, 4096) == MT_OK);
    REQUIRE(dev->ops->queue_open(dev, "sums", &q) == MT_OK && mt_sumsq_open(dev, &s) == MT_OK);
    REQUIRE(dev->ops->mem_alloc(dev, (size_t)many * 2, &there) == MT_OK);
    CHECK_OK(dev->ops->copy(q, there, x, N * 2));
    CHECK_OK(mt_sumsq_put(s, q, MT_BF16, (uint16_t *)there + 1, N - 1, &out[0], NULL));
    for (int64_t i = 0; i < many; i++)
        large[i] = x[i % N];
    CHECK_OK(dev->ops->sync(q));
    CHECK_OK(dev->ops->copy(q, there, large, (size_t)many * 2));
    CHECK_OK(mt_sumsq_put(s, q, MT_BF16, there, many, &out[1], NULL));
    CHECK_OK(dev->ops->sync(q));
    CHECK_EQ(bits_of(out[0]), bits_of(by_the_book(MT_BF16, x + 1, N - 1)));
    CHECK_EQ(bits_of(out[1]), bits_of(mt_sumsq_host(NULL, MT_BF16, large, many)));
    mt_sumsq_close(s);
    dev->ops->queue_close(q);
    dev->ops->mem_free(dev, there);
    dev->ops->host_unregister(dev, out);
    dev->ops->close(dev);
    free(out); free(x); free(large);
}

/* Two micro-batches through a device's queue against the host: the first from grad, the second from
 * acc, at addresses that vectors fit (skew 0) or not. */
static void check_sums(mt_dev *dev, mt_dtype dt, int64_t n, int skew)
{
    size_t    each = mt_dtype_bytes(dt), bytes = (size_t)n * each, acc_bytes = (size_t)n * 4;
    void     *grad = random_array(dt, n), *add = random_array(dt, n), *grad_there, *add_there,
             *acc_there;
    float    *acc = calloc((size_t)n + 1, 4), *acc_got = calloc((size_t)n + 1, 4);
    void     *grad_got = calloc((size_t)n + 1, each);
    double   *out = calloc(512, sizeof *out), sum;
    mt_sumsq *s;
    mt_queue *q;

    REQUIRE(acc != NULL && acc_got != NULL && grad_got != NULL && out != NULL);
    REQUIRE(dev->ops->host_register(dev, out, 4096) == MT_OK);
    REQUIRE(dev->ops->queue_open(dev, "sums", &q) == MT_OK && mt_sumsq_open(dev, &s) == MT_OK);
    REQUIRE(dev->ops->mem_alloc(dev, bytes + 64, &grad_there) == MT_OK);
    REQUIRE(dev->ops->mem_alloc(dev, bytes + 64, &add_there) == MT_OK);
    REQUIRE(dev->ops->mem_alloc(dev, acc_bytes + 64, &acc_there) == MT_OK);
    void  *g = (char *)grad_there + (size_t)skew * each,
          *x = (char *)add_there + (size_t)skew * each;
    float *a = (float *)acc_there + skew;

    CHECK_OK(dev->ops->copy(q, g, grad, bytes));
    CHECK_OK(dev->ops->copy(q, x, add, bytes));
    CHECK_OK(dev->ops->sync(q));                /* grad is added to below */
    for (int k = 0; k < 2; k++) {
        CHECK_OK(mt_accumulate_put(s, q, dt, each == 2 ? a : NULL, g, x, n, k == 0, &out[k], NULL));
        mt_accumulate(NULL, dt, acc, grad, add, n, k == 0, &sum, NULL);
        CHECK_OK(dev->ops->sync(q));
        CHECK_EQ(bits_of(out[k]), bits_of(sum));
    }
    CHECK_OK(dev->ops->copy(q, grad_got, g, bytes));
    CHECK_OK(dev->ops->copy(q, acc_got, a, acc_bytes));
    CHECK_OK(dev->ops->sync(q));
    CHECK_EQ(memcmp(grad_got, grad, bytes), 0);
    if (each == 2)
        CHECK_EQ(memcmp(acc_got, acc, acc_bytes), 0);
    mt_sumsq_close(s);
    dev->ops->queue_close(q);
    dev->ops->mem_free(dev, grad_there);
    dev->ops->mem_free(dev, add_there);
    dev->ops->mem_free(dev, acc_there);
    dev->ops->host_unregister(dev, out);
    free(grad); free(add); free(acc); free(acc_got); free(grad_got); free(out);
}

static void check_all_sums(mt_dev *dev)
{
    static const int64_t n[] = { 1, 7, 8, 255, 257, 8191, 8192, 8193, 70001 };

    for (int t = 0; t < TYPES; t++)
        for (int i = 0; i < 9; i++)
            for (int skew = 0; skew < 2; skew++)
                check_sums(dev, types[t], n[i], skew);
}

static void cpu_queue_accumulates_as_the_host_does(void)
{
    mt_dev *dev;

    REQUIRE(mt_dev_cpu_open(&dev) == MT_OK);
    check_all_sums(dev);
    dev->ops->close(dev);
}

static void cuda_queue_accumulates_as_the_host_does(void)
{
    mt_dev *dev;

    if (mt_dev_cuda_open(0, &dev) != MT_OK)
        SKIP("%s", mt_last_error());
    check_all_sums(dev);
    for (int t = 0; t < TYPES; t++)
        check_sums(dev, types[t], (1 << 22) + 5, 0);
    dev->ops->close(dev);
}

static void accumulate_put_refuses_what_it_cannot_add(void)
{
    mt_dev   *dev;
    mt_queue *q;
    mt_sumsq *s;
    uint16_t  grad = 0, add = 0;
    float     acc = 0;
    double    out = 5;

    REQUIRE(mt_dev_cpu_open(&dev) == MT_OK && mt_sumsq_open(dev, &s) == MT_OK);
    REQUIRE(dev->ops->queue_adopt(dev, 0, &q) == MT_OK);
    CHECK_EQ(mt_accumulate_put(s, q, MT_BF16, NULL, &grad, &add, 1, 1, &out, NULL), MT_EINVAL);
    CHECK_HAS(mt_last_error(), "BF16");
    CHECK_EQ(mt_accumulate_put(s, q, MT_BF16, &acc, &grad, &grad, 1, 1, &out, NULL), MT_EINVAL);
    CHECK_EQ(mt_accumulate_put(s, q, MT_BF16, &acc, NULL, &add, 1, 1, &out, NULL), MT_EINVAL);
    CHECK_EQ(mt_accumulate_put(s, q, MT_I16, &acc, &grad, &add, 1, 1, &out, NULL), MT_EINVAL);
    CHECK(out == 5);
    dev->ops->queue_close(q);
    mt_sumsq_close(s);
    dev->ops->close(dev);
}

static void put_refuses_types_without_squares(void)
{
    mt_dev   *dev;
    mt_queue *q;
    mt_sumsq *s;
    double    out = 5;

    REQUIRE(mt_dev_cpu_open(&dev) == MT_OK && mt_sumsq_open(dev, &s) == MT_OK);
    REQUIRE(dev->ops->queue_adopt(dev, 0, &q) == MT_OK);
    CHECK_EQ(mt_sumsq_put(s, q, MT_I32, &out, 1, &out, NULL), MT_EINVAL);
    CHECK_HAS(mt_last_error(), "I32");
    CHECK_EQ(mt_sumsq_put(s, q, MT_F32, &out, -1, &out, NULL), MT_EINVAL);
    CHECK(out == 5);
    dev->ops->queue_close(q);
    mt_sumsq_close(s);
    mt_sumsq_close(NULL);
    dev->ops->close(dev);
}

/* Under ASan: the order for the queue's thread is freed when the queue does not take it. */
static void put_passes_a_device_error_on(void)
{
    mt_dev   *cpu, *dev;
    mt_queue *q;
    mt_sumsq *s;
    double    out = 5;
    float     x = 1;

    REQUIRE(mt_dev_cpu_open(&cpu) == MT_OK);
    dev = fault_dev(cpu, 2, FAULT_STAYS);                 /* the call after queue_open */
    REQUIRE(dev->ops->queue_open(dev, "sums", &q) == MT_OK && mt_sumsq_open(dev, &s) == MT_OK);
    CHECK_EQ(mt_sumsq_put(s, q, MT_F32, &x, 1, &out, NULL), MT_EDEVICE);
    CHECK(out == 5);
    mt_sumsq_close(s);
    dev->ops->queue_close(q);
    CHECK_EQ(fault_live(dev), 0);
    dev->ops->close(dev);
    cpu->ops->close(cpu);
}

#define TESTS(X)                                    \
    X(host_sum_is_the_definition)                   \
    X(long_sum_is_the_definition)                   \
    X(every_isa_sums_a_chunk_alike)                 \
    X(every_isa_accumulates_alike)                  \
    X(not_finite_shows_in_the_sum)                  \
    X(denormals_count)                              \
    X(sixteen_bit_gradients_are_summed_in_fp32)     \
    X(rounded_sums_go_to_even)                      \
    X(wide_gradients_are_summed_in_place)           \
    X(number_of_threads_changes_no_bit_of_a_sum)    \
    X(cpu_queue_gives_the_definition)               \
    X(cuda_queue_gives_the_definition)              \
    X(cuda_takes_odd_addresses_and_many_chunks)     \
    X(cpu_queue_accumulates_as_the_host_does)       \
    X(cuda_queue_accumulates_as_the_host_does)      \
    X(accumulate_put_refuses_what_it_cannot_add)    \
    X(put_refuses_types_without_squares)            \
    X(put_passes_a_device_error_on)
CHECK_MAIN(TESTS)
