/* test_sumsq.c — the executable form of ops/sumsq.h. */
#include "check.h"
#include "dev_fault.h"
#include "../../csrc/ops/sumsq_kernel.h"

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

TEST(host_sum_is_the_definition)
{
    mt_pool *pool;

    REQUIRE_OK(mt_pool_open(3, &pool));
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
TEST(long_sum_is_the_definition)
{
    int64_t  n = 8192 * 300 + 5;
    mt_pool *pool;

    random_state = 3;
    void *x = random_array(MT_BF16, n);
    REQUIRE_OK(mt_pool_open(4, &pool));
    CHECK_EQ(bits_of(mt_sumsq_host(pool, MT_BF16, x, n)), bits_of(by_the_book(MT_BF16, x, n)));
    mt_pool_close(pool);
    free(x);
}

TEST(every_isa_sums_a_chunk_alike)
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

/* Of a gradient, and of what is added to it. */
static const mt_dtype kinds[] = { MT_F32, MT_BF16, MT_F16, MT_F64 };
#define KINDS 4

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
            set(x, dt, i, special[random_bits() % (sizeof special / sizeof special[0])]);
}

/* Bits, where it is a number: no NaN's are promised. */
static int64_t differing(mt_dtype dt, const void *a, const void *b, int64_t n)
{
    int64_t differ = 0;

    for (int64_t i = 0; i < n; i++)
        differ += !(isnan(get(a, dt, i)) && isnan(get(b, dt, i)))
               && bits_of(get(a, dt, i)) != bits_of(get(b, dt, i));
    return differ;
}

/* sumsq.h's formulas, element by element. */
static void accumulate_by_the_book(mt_dtype dt, float *acc, void *grad, const void *add,
                                   int64_t n, int from_grad)
{
    for (int64_t i = 0; i < n; i++)
        if (is_half(dt)) {
            acc[i] = (from_grad ? (float)get(grad, dt, i) : acc[i]) + (float)get(add, dt, i);
            set(grad, dt, i, (double)acc[i]);
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
    CHECK((isnan(sum) && isnan(sumsq_of(want))) || bits_of(sum) == bits_of(sumsq_of(want)));
}

/* k: of mt__sumsq_kernels. n <= 8192. */
static void check_kernel(int k, const sums *given, const sums *want, int from_grad)
{
    const mt__sumsq_kernel *kernel = &mt__sumsq_kernels[k];
    sums                    s = copy_of(given);

    if (kernel->runs())
        check_same(&s, want, kernel->accumulate(s.dt, is_half(s.dt) ? s.acc : NULL, s.grad,
                                                s.add, s.n, from_grad));
    free_sums(&s);
}

TEST(every_isa_accumulates_by_the_book)
{
    for (int t = 0; t < KINDS * 4; t++)
        for (int64_t n = 1; n <= 600; n += n < 20 ? 1 : 83) {
            int  special = t & 1, from_grad = t >> 1 & 1;
            sums given = sums_of(kinds[t / 4], n, special), want = copy_of(&given);

            accumulate_by_the_book(want.dt, want.acc, want.grad, want.add, n, from_grad);
            for (int k = 0; k < MT__SUMSQ_KERNELS; k++)
                check_kernel(k, &given, &want, from_grad);
            free_sums(&given);
            free_sums(&want);
        }
}

/* Chunks and tails, by hand and by a pool. */
TEST(all_chunks_are_accumulated_by_the_book)
{
    static const int64_t n[] = { 0, 8191, 8192, 8193, 8192 * 40 + 257 };
    mt_pool *pool;

    REQUIRE_OK(mt_pool_open(3, &pool));
    for (int t = 0; t < KINDS * 5; t++) {
        sums   given = sums_of(kinds[t / 5], n[t % 5], 0), want = copy_of(&given);
        double sum = 5, *chunks = calloc((size_t)MT_SUMSQ_CHUNKS(n[t % 5]) + 1, sizeof *chunks);

        REQUIRE(chunks != NULL);
        accumulate_by_the_book(want.dt, want.acc, want.grad, want.add, want.n, 0);
        mt_accumulate(t % 2 ? pool : NULL, given.dt, given.acc, given.grad, given.add,
                      given.n, 0, &sum, chunks);
        check_same(&given, &want, sum);
        CHECK_EQ(bits_of(mt_sumsq_fold(chunks, MT_SUMSQ_CHUNKS(n[t % 5]))), bits_of(sum));
        free_sums(&given);
        free_sums(&want);
        free(chunks);
    }
    mt_pool_close(pool);
}

TEST(not_finite_shows_in_the_sum)
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
TEST(denormals_count)
{
    float x[2] = { 0x1p-149f, -0x1p-149f };

    CHECK(mt_sumsq_host(NULL, MT_F32, x, 2) == 0x1p-297);
}

/* ---- micro-batches ---- */

TEST(sixteen_bit_gradients_are_summed_in_fp32)
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
        mt_accumulate(NULL, both[t], acc, grad, add, N, 1, &sum, NULL); /* acc is grad's */
        CHECK_EQ(memcmp(acc, want, N * sizeof *acc), 0);
        CHECK_EQ(bits_of(sum), bits_of(by_the_book(MT_F32, want, N)));
        for (int i = 0; i < N; i++)
            want[i] += (float)get(add, both[t], i);
        mt_accumulate(NULL, both[t], acc, grad, add, N, 0, &sum, NULL); /* and goes on */
        CHECK_EQ(memcmp(acc, want, N * sizeof *acc), 0);
        CHECK_EQ(bits_of(sum), bits_of(by_the_book(MT_F32, want, N)));
        for (int i = 0; i < N; i++)
            CHECK_EQ(grad[i], both[t] == MT_BF16 ? mt_f32_to_bf16(acc[i]) : mt_f32_to_f16(acc[i]));
        free(grad); free(add); free(acc); free(want);
    }
}

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

TEST(wide_gradients_are_summed_in_place)
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

TEST(number_of_threads_changes_no_bit_of_a_sum)
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
    REQUIRE_OK(dev->ops->host_register(dev, out, out_bytes));
    REQUIRE_OK(dev->ops->queue_open(dev, "sums", &q));
    REQUIRE_OK(mt_sumsq_open(dev, &s));
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

TEST(cpu_queue_gives_the_definition)
{
    mt_dev *dev;

    REQUIRE_OK(mt_dev_cpu_open(&dev));
    check_queue(dev);
    dev->ops->close(dev);
}

TEST(cuda_queue_gives_the_definition)
{
    mt_dev *dev;

    if (mt_dev_cuda_open(0, &dev) != MT_OK)
        SKIP("%s", mt_last_error());
    check_queue(dev);
    dev->ops->close(dev);
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
    CHECK_EQ(bits_of(out[0]), bits_of(by_the_book(MT_BF16, x + 1, N - 1)));
    CHECK_EQ(bits_of(out[1]), bits_of(mt_sumsq_host(NULL, MT_BF16, large, many)));
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
        CHECK(isnan(sum) ? isnan(out[k]) : bits_of(out[k]) == bits_of(sum));
        CHECK(isnan(sum) || bits_of(mt_sumsq_fold(out + 512, (int64_t)chunks)) == bits_of(sum));
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

    for (int t = 0; t < KINDS; t++)
        for (int i = 0; i < 9; i++)
            for (int k = 0; k < 4; k++)
                check_sums(dev, kinds[t], n[i], k & 1, k >> 1);
}

TEST(cpu_queue_accumulates_as_the_host_does)
{
    mt_dev *dev;

    REQUIRE_OK(mt_dev_cpu_open(&dev));
    check_all_sums(dev);
    dev->ops->close(dev);
}

TEST(cuda_queue_accumulates_as_the_host_does)
{
    mt_dev *dev;

    if (mt_dev_cuda_open(0, &dev) != MT_OK)
        SKIP("%s", mt_last_error());
    check_all_sums(dev);
    for (int t = 0; t < KINDS; t++)
        check_sums(dev, kinds[t], (1 << 22) + 5, 0, 0);
    dev->ops->close(dev);
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
    mt_dev   *dev;
    mt_queue *q;
    mt_sumsq *s;
    uint16_t  grad = 0, add = 0;
    float     acc = 0;

    REQUIRE(mt_dev_cpu_open(&dev) == MT_OK && mt_sumsq_open(dev, &s) == MT_OK);
    REQUIRE_OK(dev->ops->queue_adopt(dev, 0, &q));
    CHECK_FAILS(try_add(s, q, MT_BF16, NULL, &grad, &add), MT_EINVAL, "BF16");
    CHECK_EQ(try_add(s, q, MT_BF16, &acc, &grad, &grad), MT_EINVAL);
    CHECK_EQ(try_add(s, q, MT_BF16, &acc, &grad, &acc), MT_EINVAL);
    CHECK_EQ(try_add(s, q, MT_BF16, &acc, NULL, &add), MT_EINVAL);
    CHECK_EQ(try_add(s, q, MT_I16, &acc, &grad, &add), MT_EINVAL);
    dev->ops->queue_close(q);
    mt_sumsq_close(s);
    dev->ops->close(dev);
}

TEST(put_refuses_types_without_squares)
{
    mt_dev   *dev;
    mt_queue *q;
    mt_sumsq *s;
    double    out = 5;

    REQUIRE(mt_dev_cpu_open(&dev) == MT_OK && mt_sumsq_open(dev, &s) == MT_OK);
    REQUIRE_OK(dev->ops->queue_adopt(dev, 0, &q));
    CHECK_FAILS(mt_sumsq_put(s, q, MT_I32, &out, 1, &out, NULL), MT_EINVAL, "I32");
    CHECK_EQ(mt_sumsq_put(s, q, MT_F32, &out, -1, &out, NULL), MT_EINVAL);
    CHECK(out == 5);
    dev->ops->queue_close(q);
    mt_sumsq_close(s);
    mt_sumsq_close(NULL);
    dev->ops->close(dev);
}

/* Under ASan: the order for the queue's thread is freed when the queue does not take it. */
TEST(put_passes_a_device_error_on)
{
    mt_dev   *cpu, *dev;
    mt_queue *q;
    mt_sumsq *s;
    double    out = 5;
    float     x = 1;

    REQUIRE_OK(mt_dev_cpu_open(&cpu));
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
