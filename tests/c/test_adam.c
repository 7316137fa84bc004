/* test_adam.c — the executable form of optim/adam.h: the same bits by every instruction set and
 * in every queue, for all types and states; with fp32 states the right numbers. What a byte of a
 * moment means is test_adam8.c's.
 */
#include "dev_fault.h"
#include "opened.h"
#include "tensors.h"
#include <xmmintrin.h>

#define EACH  (UNDER_TSAN ? 4 : 1)       /* of them: its threads are the same for all */

/* ---- the same bits ---- */

static void for_vector_isas(int64_t n, int steps, mt_pool *pool)
{
    mt_isa isas[MT_ISA_COUNT];
    int    n_isas = vector_isas(isas);

    if (n_isas == 0)
        SKIP("this processor has neither AVX2 nor AVX-512");
    for (int k = 0; k < KINDS; k += EACH)
        for (int i = 0; i < n_isas; i++)
            check_same_bits(kinds[k], n, steps, pool, isas[i]);
}

TEST(every_isa_gives_the_same_bits)
{
    static const int64_t lengths[] = { 1, 7, 127, 128, 129, 255, 256 };

    for (int i = 0; i < COUNT(lengths); i++)
        for_vector_isas(lengths[i], 40, NULL);
    for_vector_isas(333, 200, NULL);
    for_vector_isas(40000, 4, NULL);
}

TEST(every_isa_gives_the_same_bits_for_every_tail)
{
    for (int64_t n = 1; n <= 70 && !check_skipped; n++) {
        skew = (int)(n % 3);
        for_vector_isas(n, 3, NULL);
    }
    skew = 0;
}

/* Some more elements than a chunk has. */
TEST(every_isa_gives_the_same_bits_in_several_threads)
{
    OPENED(mt_pool, pool, mt_pool_open(3, &pool));
    skew = 1;
    for_vector_isas((1 << 18) + 3, 2, pool);
    skew = 0;
}

enum { ODD_N = ODD * ODD * ODD };

/* Special values in every plane, in an order that puts each beside each in time; codes and scales
 * in groups of many kinds. */
static void odd_values(const mt_adam_tensor *t)
{
    for (int i = 0; i < t->n; i++) {
        int g = i / MT_STATES_GROUP;

        set_weight(t, i, odd[i % ODD]);
        if (t->states == MT_STATES_FP32) {
            set_grad(t, i, odd[i / ODD % ODD]);
            t->m[i] = odd[i / ODD / ODD];
            t->v[i] = fabsf(odd[(i + i / ODD) % ODD]);
        } else {
            set_grad(t, i, odd[(i / ODD + g) % (g % ODD + 1)]);
            t->codes.m[i] = (int8_t)(random_bits() % 255 - 127);
            t->codes.v[i] = (uint8_t)random_bits();
            t->codes.scale[2 * g] = ldexpf(1.1f, (int)(random_bits() % 200) - 140);
            t->codes.scale[2 * g + 1] = ldexpf(1.3f, (int)(random_bits() % 140) - 80);
        }
        if (t->dtype == MT_F16 && i % 7 == 0)            /* somebody wrote hi */
            set(t->hi, MT_F16, i, odd[(i + 3) % ODD]);
    }
}

static mt_adam_tensor odd_tensor(kind k, int grows)
{
    mt_adam_tensor t = tensor_new(k, ODD_N);

    odd_values(&t);
    if (grows) {             /* every weight by a thousandth: the largest saturate */
        t.hyper.lr = 1;
        t.hyper.weight_decay = -0.001;
    }
    return t;
}

TEST(every_isa_gives_the_same_bits_for_special_values)
{
    mt_isa isas[MT_ISA_COUNT];
    int    n_isas = vector_isas(isas);

    random_state = 3;
    for (int k = 0; k < 2 * KINDS; k += EACH) {
        TENSOR start = odd_tensor(kinds[k / 2], k % 2);
        TENSOR want = tensor_twin(&start);

        step_by(&want, NULL, 0.75f, MT_ISA_SCALAR);
        for (int i = 0; i < n_isas; i++) {
            TENSOR got = tensor_twin(&start);

            step_by(&got, NULL, 0.75f, isas[i]);
            check_same(&want, &got, mt_isa_name(isas[i]));
        }
    }
}

/* A stretch of a tensor, as a tensor of its own. */
static mt_adam_tensor part_of(const mt_adam_tensor *t, int64_t from, int64_t n)
{
    mt_adam_tensor part = *t;
    piece          p[PIECES];

    pieces_of(&part, p);
    part.n = n;
    part.first = t->first + from;
    for (int i = 0; i < PIECES; i++) {
        int64_t at = p[i].at == (void **)&part.codes.scale ? from / MT_STATES_GROUP : from;

        if (*p[i].at != NULL)
            *p[i].at = (char *)*p[i].at + (size_t)at * p[i].each;
    }
    return part;
}

TEST(neither_threads_nor_cuts_change_a_bit)
{
    OPENED(mt_pool, pool, mt_pool_open(3, &pool));
    for (int k = 0; k < KINDS; k += EACH) {
        random_state = 7;
        TENSOR want = tensor_new(kinds[k], 270001);

        fill_grad(&want);
        want.first = (int64_t)3 << 40;      /* of a large parameter, whose upper half counts too */
        TENSOR got = tensor_twin(&want);
        mt_adam_tensor parts[] = { part_of(&got, 0, 1280), part_of(&got, 1280, 128),
                                   part_of(&got, 1408, 270001 - 1408) };
        step_by(&want, NULL, 0.75f, mt_isa_best());
        CHECK_OK(mt_adam_step(pool, parts, 3, 0.75f, mt_isa_best()));
        check_same(&want, &got, "parts");
    }
}

/* Imported libraries switch denormals off (-ffast-math); the bits must not follow. */
TEST(the_callers_fp_mode_does_not_change_a_bit)
{
    random_state = 8;
    TENSOR want = tensor_new(kinds[0], 40);
    for (int64_t i = 0; i < want.n; i++) {
        set_weight(&want, i, float_of((uint32_t)(i + 1) * 1000));           /* denormal */
        set_grad(&want, i, float_of((uint32_t)(i + 1) * 2000));
    }
    TENSOR got = tensor_twin(&want);
    unsigned was = _mm_getcsr();

    step_by(&want, NULL, 1.0f, mt_isa_best());
    _mm_setcsr(was | 0x8040);                                               /* FTZ, DAZ */
    step_by(&got, NULL, 1.0f, mt_isa_best());
    CHECK_EQ(_mm_getcsr() & 0x8040, 0x8040);
    _mm_setcsr(was);
    CHECK_EQ(differences(&want, &got), 0);
    CHECK(weight(&want, 39) != 0);
}

/* ---- the right numbers ---- */

/* One element, step by step as adam.h writes it. */
TEST(first_step_is_the_formula_of_the_header)
{
    TENSOR s = tensor_new(kinds[0], 1);
    float  g = 0.3f * 0.7f, m, v, u, p = 1.25f;

    set_weight(&s, 0, p);
    set_grad(&s, 0, 0.3f);
    step_by(&s, NULL, 0.7f, MT_ISA_SCALAR);
    m = fmaf((float)(1 - 0.9), g, 0.0f);
    v = fmaf((float)(1 - 0.999), fmaf(g, g, -0.0f), 0.0f);
    u = m / fmaf(sqrtf(v), (float)(1 / sqrt(1 - 0.999)), 1e-8f);
    p = p - fmaf((float)(1e-3 * 0.1), p, (float)(1e-3 / (1 - 0.9)) * u);
    CHECK_EQ(bits_of(s.m[0]), bits_of(m));
    CHECK_EQ(bits_of(s.v[0]), bits_of(v));
    CHECK_EQ(bits_of(weight(&s, 0)), bits_of(p));
}

/* ---- odd values ---- */

TEST(a_gradient_not_finite_stays_in_its_element)
{
    static const float bad[] = { NAN, INFINITY, -INFINITY };

    for (int k = 0; k < KINDS; k++)
        for (int b = 0; b < COUNT(bad); b++) {
            random_state = 13;
            TENSOR hurt = tensor_new(kinds[k], 300);

            fill_grad(&hurt);
            TENSOR well = tensor_twin(&hurt);
            set_grad(&hurt, 70, bad[b]);
            step_by(&hurt, NULL, 1.0f, mt_isa_best());
            step_by(&well, NULL, 1.0f, mt_isa_best());
            CHECK(isnan(weight(&hurt, 70)));
            for (int i = 0; i < 300; i++)
                CHECK(i == 70 || isfinite(weight(&hurt, i)));
            for (int g = 0; g < 6 && k >= FULL; g++)
                CHECK(isfinite(hurt.codes.scale[g]));
            if (k >= FULL)
                continue;
            CHECK_EQ(differences(&hurt, &well), 1);
            CHECK(!isfinite(hurt.m[70]) && !isfinite(hurt.v[70]));
            if (hurt.dtype == MT_BF16)
                CHECK(((uint16_t *)hurt.hi)[70] == 0x7fc0 && hurt.lo[70] == 0);
        }
}

TEST(tiny_moments_are_stored_as_zero)
{
    for (int isa = 0; isa < MT_ISA_COUNT; isa++) {
        if (!mt_isa_runs((mt_isa)isa))
            continue;
        TENSOR s = tensor_new(kinds[0], 16);           /* one whole vector of either kind */
        s.hyper.beta1 = s.hyper.beta2 = 0.5;          /* a gradient of 0 halves both, exactly */
        s.m[0] = 0x1p-99f;           s.v[0] = 0x1p-119f;              /* just stay */
        s.m[1] = -0x1p-99f;          s.v[1] = 0x1.fffffep-120f;       /* m stays, v goes */
        s.m[2] = 0x1.fffffep-100f;   s.v[2] = 0x1p-118f;              /* m goes, v stays */
        s.m[3] = -0x1.fffffep-100f;  s.v[3] = -1.0f;                  /* a negative v is no v */
        step_by(&s, NULL, 1.0f, (mt_isa)isa);
        CHECK(s.m[0] == 0x1p-100f && s.v[0] == 0x1p-120f);
        CHECK(s.m[1] == -0x1p-100f && bits_of(s.v[1]) == 0);
        CHECK(bits_of(s.m[2]) == 0 && s.v[2] == 0x1p-119f);
        CHECK(bits_of(s.m[3]) == 0 && bits_of(s.v[3]) == 0);
    }
}

/* eps = 0 and a gradient whose square is flushed: the step itself uses v as it came out. */
TEST(flushing_does_not_divide_by_zero)
{
    TENSOR s = tensor_new(kinds[0], 1);

    s.hyper.eps = 0;
    set_grad(&s, 0, 0x1p-60f);
    step_by(&s, NULL, 1.0f, mt_isa_best());
    CHECK_EQ(bits_of(s.v[0]), 0);
    CHECK(isfinite(weight(&s, 0)));
}

TEST(f16_starts_from_hi_where_somebody_wrote_it)
{
    for (int isa = 0; isa < MT_ISA_COUNT; isa++) {
        if (!mt_isa_runs((mt_isa)isa))
            continue;
        random_state = 14;
        TENSOR s = tensor_new(kinds[4], 40);
        s.hyper.lr = 0;                                 /* p stays what it starts from */
        float kept = s.master[3];
        set(s.hi, MT_F16, 17, 0.125f);
        set(s.hi, MT_F16, 39, -2.0f);
        step_by(&s, NULL, 1.0f, (mt_isa)isa);
        CHECK_EQ(bits_of(s.master[3]), bits_of(kept));
        CHECK(s.master[17] == 0.125f && s.master[39] == -2.0f);
        CHECK(get(s.hi, MT_F16, 17) == 0.125f);
    }
}

/* ---- the split ---- */

static uint32_t split_and_join(uint32_t bits, uint16_t *hi, int16_t *lo)
{
    float p = float_of(bits), back;

    mt_split_set(&p, hi, lo, 1);
    mt_split_join(hi, lo, &back, 1);
    return bits_of(back);
}

/* Every 2^32 was run once by hand (docs/numerics.md); here one in 4099, a prime. */
TEST(split_gives_back_every_weight)
{
    uint16_t hi;
    int16_t  lo;
    int64_t  bad = 0;

    for (uint64_t u = 0; u < 1ull << 32; u += 4099) {
        uint32_t bits = (uint32_t)u, size = bits & 0x7fffffff;
        uint32_t want = size > 0x7f800000                        ? 0x7fc00000
                      : size >= 0x7f7f8000 && size < 0x7f800000  ? (bits & 0x80000000) | 0x7f7f7fff
                                                                 : bits;
        bad += split_and_join(bits, &hi, &lo) != want;
    }
    CHECK_EQ(bad, 0);
}

TEST(split_rounds_hi_to_nearest_with_ties_away)
{
    static const struct { uint32_t bits; uint16_t hi; int lo; } cases[] = {
        { 0x3f800000, 0x3f80, 0 },       { 0x3f807fff, 0x3f80, 0x7fff },
        { 0x3f808000, 0x3f81, -0x8000 }, { 0x3f818000, 0x3f82, -0x8000 },   /* even or odd: away */
        { 0xbf808000, 0xbf81, -0x8000 }, { 0xbf80ffff, 0xbf81, -1 },
        { 0x00008000, 0x0001, -0x8000 }, { 0x80007fff, 0x8000, 0x7fff },
    };

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        uint16_t hi;
        int16_t  lo;
        CHECK_EQ(split_and_join(cases[i].bits, &hi, &lo), cases[i].bits);
        CHECK_EQ(hi, cases[i].hi);
        CHECK_EQ(lo, cases[i].lo);
    }
}

TEST(split_saturates_and_has_one_nan)
{
    uint16_t hi;
    int16_t  lo;

    CHECK_EQ(split_and_join(0x7f7f7fff, &hi, &lo), 0x7f7f7fff);     /* the largest that fits */
    CHECK_EQ(split_and_join(0x7f7f8000, &hi, &lo), 0x7f7f7fff);
    CHECK_EQ(split_and_join(0xff7fffff, &hi, &lo), 0xff7f7fff);
    CHECK_EQ(split_and_join(0x7f800000, &hi, &lo), 0x7f800000);
    CHECK_EQ(split_and_join(0xff800000, &hi, &lo), 0xff800000);
    CHECK_EQ(split_and_join(0xffffffff, &hi, &lo), 0x7fc00000);     /* unsplit: hi would read -0 */
    CHECK_EQ(hi, 0x7fc0);
    CHECK_EQ(lo, 0);
}

/* ---- mistakes ---- */

TEST(step_refuses_planes_and_types_that_do_not_fit)
{
    TENSOR s = tensor_new(kinds[1], 4);
    TENSOR codes = tensor_new(kinds[9], 300);
    mt_adam_tensor bad;

    bad = s; bad.lo = NULL;                  check_refused(&bad, "no lo plane");
    bad = s; bad.grad_dtype = MT_F16;        check_refused(&bad, "BF16 weights with a gradient");
    bad = s; bad.n = -1;                     check_refused(&bad, "-1 elements");
    bad = codes; bad.codes.scale = NULL;     check_refused(&bad, "no scale plane");
    bad = codes; bad.codes.m = NULL;         check_refused(&bad, "no m plane");
    bad = codes; bad.codes.lo = NULL;        check_refused(&bad, "no lo (8 bits) plane");
    bad = codes; bad.first = 64;             check_refused(&bad, "begins at element 64");
    bad = codes; bad.states = MT_STATES_COUNT;       check_refused(&bad, "states 4");
    bad = codes; bad.states = MT_STATES_FP32;        check_refused(&bad, "no lo plane");
    CHECK_EQ(mt_adam_step(NULL, &s, 1, NAN, MT_ISA_SCALAR), MT_EINVAL);
    CHECK_EQ(mt_adam_step(NULL, &s, 1, 1.0f, MT_ISA_COUNT), MT_EINVAL);
}

/* One bad tensor among good ones: nothing has happened. */
TEST(step_checks_everything_before_it_writes)
{
    TENSOR a = tensor_new(kinds[0], 8);
    fill_grad(&a);
    TENSOR twin = tensor_twin(&a);
    mt_adam_tensor both[2] = { a, a };

    both[1].hyper.step = 0;
    CHECK_FAILS(mt_adam_step(NULL, both, 2, 1.0f, mt_isa_best()), MT_EINVAL, "tensor 1");
    check_same(&twin, &a, "refused");
}

TEST(an_isa_that_does_not_run_is_refused_by_name)
{
    TENSOR s = tensor_new(kinds[0], 4);

    for (int isa = 0; isa < MT_ISA_COUNT; isa++) {
        mt_status st = mt_adam_step(NULL, &s, 1, 1.0f, (mt_isa)isa);
        CHECK_EQ(st, mt_isa_runs((mt_isa)isa) ? MT_OK : MT_ENOTSUP);
        if (st == MT_ENOTSUP)
            CHECK_SAYS(mt_isa_name((mt_isa)isa));
    }
    CHECK(mt_isa_runs(mt_isa_best()));
}

TEST(traffic_touches_every_plane_to_the_end)
{
    for (int k = 0; k < KINDS; k++) {
        random_state = 15;
        TENSOR t = tensor_new(kinds[k], 2 * MT_STATES_GROUP);
        piece  a[PIECES], b[PIECES];

        for (int64_t i = 0; i < t.n; i++)
            set_grad(&t, i, 1.3f);
        TENSOR was = tensor_twin(&t);
        CHECK_OK(mt_adam_traffic(NULL, &t, 1, mt_isa_best()));
        pieces_of(&t, a);
        pieces_of(&was, b);
        for (int i = 0; i < PIECES - 1; i++) {
            size_t half = a[i].bytes / 2;

            CHECK(half == 0 ||
                  memcmp((char *)*a[i].at + half, (char *)*b[i].at + half, half) != 0);
        }
        CHECK(k >= FULL || differences(&t, &was) == t.n);
    }
}

TEST(a_step_moves_as_many_bytes_as_it_says)
{
    CHECK_EQ(mt_adam_moves(MT_BF16, MT_STATES_FP32, MT_BF16, 1000), 26000);
    CHECK_EQ(mt_adam_moves(MT_F32, MT_STATES_FP32, MT_F32, 10), 280);
    CHECK_EQ(mt_adam_moves(MT_BF16, MT_STATES_8BIT, MT_BF16, 1280), 1280 * 14 + 160);
    CHECK_EQ(mt_adam_moves(MT_BF16, MT_STATES_8BIT_LO8, MT_F32, 1280), 1280 * 14 + 160);
    CHECK_EQ(mt_adam_moves(MT_BF16, MT_STATES_8BIT_SR, MT_BF16, 1280), 1280 * 10 + 160);
    CHECK_EQ(mt_adam_moves(MT_F16, MT_STATES_8BIT, MT_F16, 1), 2 * 8 + 2 + 16);
}

/* ---- in a queue ---- */

#define DEVICE(q, cuda) CLOSED_BY(mt_dev_done) mt_dev *dev = (cuda) ? cuda_open(0) : cpu_open(); \
    if (dev == NULL) SKIP("%s", mt_last_error()); \
    OPENED(mt_queue, q, dev->ops->queue_open(dev, "adam", &q))

/* t's planes on the device, each `off` elements behind where a vector would like it, but for the
 * scales. */
static mt_adam_tensor lift_all(mt_queue *q, const mt_adam_tensor *t, size_t off)
{
    mt_adam_tensor from = *t, there = *t;
    piece          a[PIECES], b[PIECES];
    void          *mem;

    pieces_of(&from, a);
    pieces_of(&there, b);
    for (int i = 0; i < PIECES; i++)
        if (*a[i].at != NULL) {
            REQUIRE_OK(q->dev->ops->mem_alloc(q->dev, a[i].bytes + 16, &mem));
            *b[i].at = (char *)mem + (a[i].each == 8 ? 0 : off * a[i].each);
            CHECK_OK(q->dev->ops->copy(q, *b[i].at, *a[i].at, a[i].bytes));
        }
    return there;
}

/* Back into t, and the device's planes are gone. */
static void lower_all(mt_queue *q, mt_adam_tensor *t, mt_adam_tensor *there, size_t off)
{
    piece a[PIECES], b[PIECES];

    pieces_of(t, a);
    pieces_of(there, b);
    for (int i = 0; i < PIECES; i++)
        if (*a[i].at != NULL) {
            CHECK_OK(q->dev->ops->copy(q, *a[i].at, *b[i].at, a[i].bytes));
            CHECK_OK(q->dev->ops->sync(q));
            q->dev->ops->mem_free(q->dev, (char *)*b[i].at -
                                          (a[i].each == 8 ? 0 : off * a[i].each));
        }
}

static void check_put(mt_queue *q, kind k, int64_t n, size_t off, int steps)
{
    random_state = (uint64_t)n * 31 + k.w;
    TENSOR want = tensor_new(k, n);
    want.first = k.states == MT_STATES_FP32 ? 0 : 1280;
    TENSOR got = tensor_twin(&want);
    mt_adam_tensor there = lift_all(q, &got, off);

    for (int i = 1; i <= steps; i++) {
        CHECK_OK(q->dev->ops->sync(q));               /* the copy before has read want's grad */
        fill_grad(&want);
        want.hyper.step = there.hyper.step = i;
        CHECK_OK(q->dev->ops->copy(q, (void *)(uintptr_t)there.grad, want.grad,
                                   (size_t)n * mt_dtype_bytes(k.g)));
        CHECK_OK(mt_adam_put(q, &there, 1, 0.75f));
        step_by(&want, NULL, 0.75f, mt_isa_best());
    }
    CHECK_OK(q->dev->ops->sync(q));
    lower_all(q, &got, &there, off);
    check_same(&want, &got, q->dev->ops->name);
}

/* Lengths around what a lane, a warp, a round and a block take; addresses that no vector fits. */
static void check_puts(int cuda)
{
    static const int64_t lengths[] = { 1, 3, 4, 127, 128, 129, 1023, 1024, 2047, 2048, 2049, 4100,
                                       10001 };

    DEVICE(q, cuda);
    for (int k = 0; k < KINDS; k++) {
        for (int i = 0; i < COUNT(lengths); i++)
            for (size_t off = 0; off < 2; off++)
                check_put(q, kinds[k], lengths[i], off, 3);
        check_put(q, kinds[k], 2500, 0, k < FULL || cuda ? 200 : 2);
        check_put(q, kinds[k], (1 << (cuda ? 20 : k < FULL ? 16 : 13)) + 3, 0,
                  cuda ? k < FULL ? 200 : 100 : 2);
    }
}

TEST(cpu_queue_gives_the_same_bits)  { check_puts(0); }
TEST(cuda_queue_gives_the_same_bits) { check_puts(1); }

TEST(cuda_queue_gives_the_same_bits_for_special_values)
{
    DEVICE(q, 1);
    random_state = 3;
    for (int k = 0; k < 2 * KINDS; k++) {
        TENSOR want = odd_tensor(kinds[k / 2], k % 2);
        TENSOR got = tensor_twin(&want);
        mt_adam_tensor there = lift_all(q, &got, 0);

        CHECK_OK(mt_adam_put(q, &there, 1, 0.75f));
        lower_all(q, &got, &there, 0);
        step_by(&want, NULL, 0.75f, MT_ISA_SCALAR);
        check_same(&want, &got, "cuda");
    }
}

/* More tensors than a launch takes, of all kinds beside each other, none and one element among
 * them. */
static void check_many(int cuda)
{
    enum { MANY = 150 };
    static mt_adam_tensor want[MANY], got[MANY], there[MANY];

    DEVICE(q, cuda);
    random_state = 21;
    for (int i = 0; i < MANY; i++) {
        want[i] = tensor_new(kinds[i * 7 % KINDS],
                             i % 9 == 0 ? 0 : i % 9 == 1 ? 1 : random_bits() % 9000);
        want[i].key = (uint64_t)i;
        want[i].hyper.lr = 1e-4 * (i + 1);
        want[i].hyper.step = 1 + i % 3;
        want[i].hyper.maximize = i % 2;
        fill_grad(&want[i]);
        got[i] = tensor_twin(&want[i]);
        there[i] = lift_all(q, &got[i], 0);
    }
    CHECK_OK(mt_adam_put(q, there, MANY, 0.75f));
    CHECK_OK(mt_adam_put(q, NULL, 0, 0.75f));
    CHECK_OK(dev->ops->sync(q));
    for (int i = 0; i < MANY; i++) {
        lower_all(q, &got[i], &there[i], 0);
        step_by(&want[i], NULL, 0.75f, mt_isa_best());
        check_same(&want[i], &got[i], "many");
        tensor_free(&want[i]);
        tensor_free(&got[i]);
    }
}

TEST(cpu_queue_takes_many_tensors)  { check_many(0); }
TEST(cuda_queue_takes_many_tensors) { check_many(1); }

TEST(put_checks_everything_before_it_puts)
{
    TENSOR s = tensor_new(kinds[1], 8);
    fill_grad(&s);
    TENSOR was = tensor_twin(&s);
    mt_adam_tensor t[2] = { s, s };

    DEVICE(q, 0);
    t[1].lo = NULL;
    CHECK_FAILS(mt_adam_put(q, t, 2, 1.0f), MT_EINVAL, "tensor 1");
    CHECK_SAYS("lo");
    CHECK_EQ(mt_adam_put(q, t, 1, INFINITY), MT_EINVAL);
    CHECK_EQ(mt_adam_put_cuda(0, t, 2, 1.0f) == MT_OK, 0);
    CHECK_OK(dev->ops->sync(q));
    CHECK_EQ(differences(&s, &was), 0);
}

/* Under ASan: the order for the queue's thread is freed when the queue does not take it. */
TEST(put_passes_a_device_error_on)
{
    TENSOR s = tensor_new(kinds[0], 8);
    TENSOR was = tensor_twin(&s);

    CPU(cpu);
    CLOSED_BY(mt_dev_done) mt_dev *dev = fault_dev(cpu, 2, FAULT_STAYS);  /* behind queue_open */
    OPENED(mt_queue, q, dev->ops->queue_open(dev, "adam", &q));
    CHECK_EQ(mt_adam_put(q, &s, 1, 1.0f), MT_EDEVICE);
    CHECK_EQ(differences(&s, &was), 0);
}
