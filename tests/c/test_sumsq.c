/* test_sumsq.c — the executable form of ops/sumsq.h. */
#include "numbers.h"
#include "opened.h"
#include "dev_fault.h"
#include "../../csrc/ops/sumsq_kernel.h"

CLOSES(mt_sumsq, mt_sumsq_close(*x))

static const mt_dtype types[] = { MT_F32, MT_BF16, MT_F16, MT_F64 };
#define TYPES 4

static double wide(const void *x, mt_dtype dt, int64_t i)
{
    return dt == MT_F64 ? ((const double *)x)[i] : (double)get(x, dt, i);
}

static void set_wide(void *x, mt_dtype dt, int64_t i, double d)
{
    if (dt == MT_F64)
        ((double *)x)[i] = d;
    else
        set(x, dt, i, (float)d);
}

/* Magnitudes over 12 powers of two, so that the order of addition shows in the last bits. */
static void *random_array(mt_dtype dt, int64_t n)
{
    void *x = malloc((size_t)n * mt_dtype_bytes(dt) + 1);

    REQUIRE(x != NULL);
    for (int64_t i = 0; i < n; i++)
        set_wide(x, dt, i, ldexp((double)(int32_t)random_bits(), (int)(random_bits() % 12) - 38));
    return x;
}

static uint64_t wide_bits(double d) { uint64_t u; memcpy(&u, &d, sizeof u); return u; }

#define CHECK_BITS(got, want) CHECK_EQ(wide_bits(got), wide_bits(want))

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
            volatile double square = wide(x, dt, i) * wide(x, dt, i);
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

TEST(host_sum_is_the_definition)
{
    OPENED(mt_pool, pool, mt_pool_open(3, &pool));
    for (int t = 0; t < TYPES; t++)
        for (int i = 0; i < LENGTHS; i++) {
            random_state = (uint64_t)i;
            FREED void *x = random_array(types[t], lengths[i]);
            uint64_t want = wide_bits(by_the_book(types[t], x, lengths[i]));
            CHECK_EQ(wide_bits(mt_sumsq_host(NULL, types[t], x, lengths[i])), want);
            CHECK_EQ(wide_bits(mt_sumsq_host(pool, types[t], x, lengths[i])), want);
        }
}

/* More than 256 chunks: rule 2 wraps around its lanes. */
TEST(long_sum_is_the_definition)
{
    int64_t n = 8192 * 300 + 5;

    random_state = 3;
    FREED void *x = random_array(MT_BF16, n);
    OPENED(mt_pool, pool, mt_pool_open(4, &pool));
    CHECK_BITS(mt_sumsq_host(pool, MT_BF16, x, n), by_the_book(MT_BF16, x, n));
}

TEST(every_isa_sums_a_chunk_alike)
{
    for (int t = 0; t < TYPES; t++)
        for (int64_t n = 1; n <= 8192; n += n < 300 ? 1 : 1973) {
            FREED void *x = random_array(types[t], n);
            double want = chunk_by_the_book(types[t], x, 0, n);
            for (int k = 0; k < MT__SUMSQ_KERNELS; k++)
                if (mt__sumsq_kernels[k].runs())
                    CHECK_BITS(mt__sumsq_kernels[k].square(types[t], x, n), want);
        }
}

static int is_half(mt_dtype dt) { return dt == MT_BF16 || dt == MT_F16; }

/* Some elements become numbers that are not ordinary, or sums that are not, or do not round so. */
static void make_special(mt_dtype dt, void *x, int64_t n)
{
    static const double special[] = {
        INFINITY, -INFINITY, NAN, 0.0, -0.0, 0x1p-149, -0x1.8p-133, 0x1p-25, 0x1.8p-24, -0x1p-24,
        65504.0, 16.0, -65520.0, 0x1.fffffep127, 1.0 + 0x1p-8, 1.0 + 0x3p-8, 1.0 + 0x1p-11,
    };

    for (int64_t i = 0; i < n; i++)
        if (random_bits() % 2 == 0)
            set_wide(x, dt, i, special[random_bits() % (sizeof special / sizeof special[0])]);
}

/* Bits, where it is a number: no NaN's are promised. */
static int64_t differing(mt_dtype dt, const void *a, const void *b, int64_t n)
{
    int64_t differ = 0;

    for (int64_t i = 0; i < n; i++)
        differ += !(isnan(wide(a, dt, i)) && isnan(wide(b, dt, i)))
               && wide_bits(wide(a, dt, i)) != wide_bits(wide(b, dt, i));
    return differ;
}

/* sumsq.h's formulas, element by element. */
static void accumulate_by_the_book(mt_dtype dt, float *acc, void *grad, const void *add,
                                   int64_t n, int from_grad)
{
    for (int64_t i = 0; i < n; i++)
        if (is_half(dt)) {
            acc[i] = (from_grad ? (float)wide(grad, dt, i) : acc[i]) + (float)wide(add, dt, i);
            set_wide(grad, dt, i, (double)acc[i]);
        } else if (dt == MT_F32) {
            ((float *)grad)[i] += ((const float *)add)[i];
        } else {
            ((double *)grad)[i] += ((const double *)add)[i];
        }
}

typedef struct sums { void *grad, *add; float *acc; int64_t n; mt_dtype dt; } sums;

static sums sums_of(mt_dtype dt, int64_t n, int special)
{
    sums s = { random_array(dt, n), random_array(dt, n), random_array(MT_F32, n), n, dt };

    if (special) {
        make_special(dt, s.grad, n);
        make_special(dt, s.add, n);
        make_special(MT_F32, s.acc, n);
    }
    return s;
}

static void *copied(const void *x, size_t bytes)
{
    void *to = malloc(bytes + 1);

    REQUIRE(to != NULL);
    memcpy(to, x, bytes);
    return to;
}

/* As sums_of made it, for another to add up. */
static sums copy_of(const sums *s)
{
    return (sums){ copied(s->grad, (size_t)s->n * mt_dtype_bytes(s->dt)),
                   copied(s->add, (size_t)s->n * mt_dtype_bytes(s->dt)),
                   copied(s->acc, (size_t)s->n * 4), s->n, s->dt };
}

static void free_sums(sums *s) { free(s->grad); free(s->add); free(s->acc); }

#define SUMS CLOSED_BY(free_sums) sums

static double sumsq_of(const sums *s)
{
    return is_half(s->dt) ? by_the_book(MT_F32, s->acc, s->n)
                              : by_the_book(s->dt, s->grad, s->n);
}

static void check_same(const sums *got, const sums *want, double sum)
{
    CHECK_EQ(differing(want->dt, got->grad, want->grad, want->n), 0);
    if (is_half(want->dt))
        CHECK_EQ(differing(MT_F32, got->acc, want->acc, want->n), 0);
    CHECK((isnan(sum) && isnan(sumsq_of(want))) || wide_bits(sum) == wide_bits(sumsq_of(want)));
}

/* k: of mt__sumsq_kernels. n <= 8192. */
static void check_kernel(int k, const sums *given, const sums *want, int from_grad)
{
    const mt__sumsq_kernel *kernel = &mt__sumsq_kernels[k];
    SUMS s = copy_of(given);

    if (kernel->runs())
        check_same(&s, want, kernel->accumulate(s.dt, is_half(s.dt) ? s.acc : NULL, s.grad,
                                                s.add, s.n, from_grad));
}

TEST(every_isa_accumulates_by_the_book)
{
    for (int t = 0; t < TYPES * 4; t++)
        for (int64_t n = 1; n <= 600; n += n < 20 ? 1 : 83) {
            int special = t & 1, from_grad = t >> 1 & 1;
            SUMS given = sums_of(types[t / 4], n, special), want = copy_of(&given);

            accumulate_by_the_book(want.dt, want.acc, want.grad, want.add, n, from_grad);
            for (int k = 0; k < MT__SUMSQ_KERNELS; k++)
                check_kernel(k, &given, &want, from_grad);
        }
}

/* Chunks and tails, by hand and by a pool. */
TEST(all_chunks_are_accumulated_by_the_book)
{
    static const int64_t n[] = { 0, 8191, 8192, 8193, 8192 * 40 + 257 };

    OPENED(mt_pool, pool, mt_pool_open(3, &pool));
    for (int t = 0; t < TYPES * 5; t++) {
        SUMS   given = sums_of(types[t / 5], n[t % 5], 0), want = copy_of(&given);
        double sum = 5, *chunks = calloc((size_t)MT_SUMSQ_CHUNKS(n[t % 5]) + 1, sizeof *chunks);

        REQUIRE(chunks != NULL);
        accumulate_by_the_book(want.dt, want.acc, want.grad, want.add, want.n, t % 3 == 0);
        mt_accumulate(t % 2 ? pool : NULL, given.dt, given.acc, given.grad, given.add,
                      given.n, t % 3 == 0, &sum, chunks);
        check_same(&given, &want, sum);
        CHECK_BITS(mt_sumsq_fold(chunks, MT_SUMSQ_CHUNKS(n[t % 5])), sum);
        free(chunks);
    }
}

TEST(not_finite_shows_in_the_sum)
{
    for (int t = 0; t < TYPES; t++) {
        FREED void *x = random_array(types[t], 20000);
        set_wide(x, types[t], 19999, INFINITY);
        CHECK(isinf(mt_sumsq_host(NULL, types[t], x, 20000)));
        set_wide(x, types[t], 3, NAN);
        CHECK(isnan(mt_sumsq_host(NULL, types[t], x, 20000)));
    }
}

/* The square of the smallest fp32 number, 2^-298, is an ordinary fp64. */
TEST(denormals_count)
{
    float x[2] = { 0x1p-149f, -0x1p-149f };

    CHECK(mt_sumsq_host(NULL, MT_F32, x, 2) == 0x1p-297);
}

/* ---- micro-batches ---- */

/* 1 + 2^-8 lies half way between two bf16 numbers, 1 + 3 * 2^-8 too. */
TEST(rounded_sums_go_to_even)
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

/* ---- in a queue ---- */

/* Every type and length through a device's queue, twice as many puts as need to be waited for. */
static void check_queue(mt_dev *dev)
{
    void  *x[TYPES * LENGTHS], *there[TYPES * LENGTHS];
    FREED double *out = calloc(TYPES * LENGTHS, sizeof *out);
    size_t out_bytes = TYPES * LENGTHS * sizeof *out;

    REQUIRE(out != NULL);
    REQUIRE_OK(dev->ops->host_register(dev, out, out_bytes));
    OPENED(mt_queue, q, dev->ops->queue_open(dev, "sums", &q));
    OPENED(mt_sumsq, s, mt_sumsq_open(dev, &s));
    for (int k = 0; k < TYPES * LENGTHS; k++) {
        int64_t n     = lengths[k % LENGTHS];
        size_t  bytes = (size_t)n * mt_dtype_bytes(types[k / LENGTHS]);

        x[k] = random_array(types[k / LENGTHS], n);
        out[k] = -1;
        REQUIRE_OK(dev->ops->mem_alloc(dev, bytes + 8, &there[k]));
        if (bytes > 0)
            CHECK_OK(dev->ops->copy(q, there[k], x[k], bytes));
        CHECK_OK(mt_sumsq_put(s, q, types[k / LENGTHS], there[k], n, &out[k], NULL));
    }
    CHECK_OK(dev->ops->sync(q));
    for (int k = 0; k < TYPES * LENGTHS; k++) {
        CHECK_BITS(out[k], by_the_book(types[k / LENGTHS], x[k], lengths[k % LENGTHS]));
        dev->ops->mem_free(dev, there[k]);
        free(x[k]);
    }
    dev->ops->host_unregister(dev, out);
}

TEST(cpu_queue_gives_the_definition)
{
    CPU(dev);
    check_queue(dev);
}

TEST(cuda_queue_gives_the_definition)
{
    CUDA(dev, 0);
    check_queue(dev);
}

/* A parameter that begins at an odd address, and one of more chunks than there is room for at
 * first: paths that the other tests do not take. */
TEST(cuda_takes_odd_addresses_and_many_chunks)
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
    REQUIRE_OK(dev->ops->mem_alloc(dev, (size_t)many * 2, &there));
    CHECK_OK(dev->ops->copy(q, there, x, N * 2));
    CHECK_OK(mt_sumsq_put(s, q, MT_BF16, (uint16_t *)there + 1, N - 1, &out[0], NULL));
    for (int64_t i = 0; i < many; i++)
        large[i] = x[i % N];
    CHECK_OK(dev->ops->sync(q));
    CHECK_OK(dev->ops->copy(q, there, large, (size_t)many * 2));
    CHECK_OK(mt_sumsq_put(s, q, MT_BF16, there, many, &out[1], NULL));
    CHECK_OK(dev->ops->sync(q));
    CHECK_BITS(out[0], by_the_book(MT_BF16, x + 1, N - 1));
    CHECK_BITS(out[1], mt_sumsq_host(NULL, MT_BF16, large, many));
    mt_sumsq_close(s);
    dev->ops->queue_close(q);
    dev->ops->mem_free(dev, there);
    dev->ops->host_unregister(dev, out);
    dev->ops->close(dev);
    free(out); free(x); free(large);
}

/* Device memory with these bytes in it, `skew` bytes behind an address that vectors fit. */
static void *sent(mt_dev *dev, mt_queue *q, const void *x, size_t bytes, size_t skew, void **base)
{
    REQUIRE_OK(dev->ops->mem_alloc(dev, bytes + 64, base));
    if (bytes > 0)
        CHECK_OK(dev->ops->copy(q, (char *)*base + skew, x, bytes));
    return (char *)*base + skew;
}

/* Two micro-batches through a device's queue against the host: the first from grad, the second from
 * acc, at addresses that vectors fit (skew 0) or not. */
static void check_sums(mt_dev *dev, mt_dtype dt, int64_t n, int skew, int special)
{
    size_t    each = mt_dtype_bytes(dt), chunks = (size_t)MT_SUMSQ_CHUNKS(n);
    sums      s = sums_of(dt, n, special), got = copy_of(&s);
    void     *base[3];
    double   *out = calloc(512 + chunks, sizeof *out), sum;
    mt_sumsq *ctx;
    mt_queue *q;

    REQUIRE(out != NULL);
    REQUIRE_OK(dev->ops->host_register(dev, out, (512 + chunks) * sizeof *out));
    REQUIRE(dev->ops->queue_open(dev, "sums", &q) == MT_OK && mt_sumsq_open(dev, &ctx) == MT_OK);
    void *g = sent(dev, q, s.grad, (size_t)n * each, (size_t)skew * each, &base[0]),
         *a = sent(dev, q, s.acc, (size_t)n * 4, (size_t)skew * 4, &base[1]),
         *x = sent(dev, q, s.add, (size_t)n * mt_dtype_bytes(dt),
                   (size_t)skew * mt_dtype_bytes(dt), &base[2]);

    CHECK_OK(dev->ops->sync(q));                /* grad is added to below */
    for (int k = 0; k < 2; k++) {
        CHECK_OK(mt_accumulate_put(ctx, q, dt, is_half(dt) ? a : NULL, g, x, n,
                                   k == 0, &out[k], out + 512));
        mt_accumulate(NULL, dt, s.acc, s.grad, s.add, n, k == 0, &sum, NULL);
        CHECK_OK(dev->ops->copy(q, got.grad, g, (size_t)n * each));
        CHECK_OK(dev->ops->copy(q, got.acc, a, (size_t)n * 4));
        CHECK_OK(dev->ops->sync(q));
        check_same(&got, &s, out[k]);
        CHECK(isnan(sum) ? isnan(out[k]) : wide_bits(out[k]) == wide_bits(sum));
        CHECK(isnan(sum) || wide_bits(mt_sumsq_fold(out + 512, (int64_t)chunks)) == wide_bits(sum));
    }
    mt_sumsq_close(ctx);
    dev->ops->queue_close(q);
    for (int i = 0; i < 3; i++)
        dev->ops->mem_free(dev, base[i]);
    dev->ops->host_unregister(dev, out);
    free_sums(&s);
    free_sums(&got);
    free(out);
}

static void check_all_sums(mt_dev *dev)
{
    static const int64_t n[] = { 1, 7, 8, 255, 257, 8191, 8192, 8193, 70001 };

    for (int t = 0; t < TYPES; t++)
        for (int i = 0; i < 9; i++)
            for (int k = 0; k < 4; k++)
                check_sums(dev, types[t], n[i], k & 1, k >> 1);
}

TEST(cpu_queue_accumulates_as_the_host_does)
{
    CPU(dev);
    check_all_sums(dev);
}

TEST(cuda_queue_accumulates_as_the_host_does)
{
    CUDA(dev, 0);
    check_all_sums(dev);
    for (int t = 0; t < TYPES; t++)
        check_sums(dev, types[t], (1 << 22) + 5, 0, 0);
}

static mt_status try_add(mt_sumsq *s, mt_queue *q, mt_dtype dt, float *acc, void *grad,
                         const void *add)
{
    double    out = 5;
    mt_status st = mt_accumulate_put(s, q, dt, acc, grad, add, 1, 1, &out, NULL);

    CHECK(out == 5);
    return st;
}

TEST(accumulate_put_refuses_what_it_cannot_add)
{
    uint16_t grad = 0, add = 0;
    float    acc = 0;

    CPU(dev);
    OPENED(mt_sumsq, s, mt_sumsq_open(dev, &s));
    OPENED(mt_queue, q, dev->ops->queue_adopt(dev, 0, &q));
    CHECK_FAILS(try_add(s, q, MT_BF16, NULL, &grad, &add), MT_EINVAL, "BF16");
    CHECK_EQ(try_add(s, q, MT_BF16, &acc, &grad, &grad), MT_EINVAL);
    CHECK_EQ(try_add(s, q, MT_BF16, &acc, &grad, &acc), MT_EINVAL);
    CHECK_EQ(try_add(s, q, MT_BF16, &acc, NULL, &add), MT_EINVAL);
    CHECK_EQ(try_add(s, q, MT_I16, &acc, &grad, &add), MT_EINVAL);
}

TEST(put_refuses_types_without_squares)
{
    double out = 5;

    CPU(dev);
    OPENED(mt_sumsq, s, mt_sumsq_open(dev, &s));
    OPENED(mt_queue, q, dev->ops->queue_adopt(dev, 0, &q));
    CHECK_FAILS(mt_sumsq_put(s, q, MT_I32, &out, 1, &out, NULL), MT_EINVAL, "I32");
    CHECK_EQ(mt_sumsq_put(s, q, MT_F32, &out, -1, &out, NULL), MT_EINVAL);
    CHECK(out == 5);
    mt_sumsq_close(NULL);
}

/* Under ASan: the order for the queue's thread is freed when the queue does not take it. */
TEST(put_passes_a_device_error_on)
{
    mt_queue *q;
    mt_sumsq *s;
    double    out = 5;
    float     x = 1;

    CPU(cpu);
    mt_dev *dev = fault_dev(cpu, 2, FAULT_STAYS);                 /* the call after queue_open */
    REQUIRE(dev->ops->queue_open(dev, "sums", &q) == MT_OK && mt_sumsq_open(dev, &s) == MT_OK);
    CHECK_EQ(mt_sumsq_put(s, q, MT_F32, &x, 1, &out, NULL), MT_EDEVICE);
    CHECK(out == 5);
    mt_sumsq_close(s);
    dev->ops->queue_close(q);
    CHECK_EQ(fault_live(dev), 0);
    dev->ops->close(dev);
}
