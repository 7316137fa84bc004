/* test_adam.c — the executable form of optim/adam.h. */
#include "check.h"
#include "dev_fault.h"
#include "../../csrc/optim/adam.h"
#include <xmmintrin.h>

/* ---- data ---- */

static uint64_t random_state;

static uint32_t random_bits(void)           /* splitmix64, upper half */
{
    uint64_t z = (random_state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (uint32_t)((z ^ (z >> 31)) >> 32);
}

static float random_in(float low, float high)
{
    return low + (high - low) * (float)(random_bits() >> 8) * 0x1p-24f;
}

/* Either sign, magnitudes over 16 powers of two: what gradients of one layer look like. */
static float random_grad(void)
{
    float size = ldexpf(random_in(1.0f, 2.0f), (int)(random_bits() % 16) - 20);
    return random_bits() & 1 ? size : -size;
}

static uint32_t bits_of(float f) { uint32_t u; memcpy(&u, &f, sizeof u); return u; }
static float float_of(uint32_t u) { float f; memcpy(&f, &u, sizeof f); return f; }

/* Planes of one tensor, each an allocation of its exact size so that ASan sees an element too
 * many; `skew` elements at the front are left out, so that vectors lie across their boundaries. */
typedef struct planes {
    mt_adam_tensor t;
    int            skew;
} planes;

typedef struct kind { mt_dtype w, g; } kind;
static const kind kinds[] = {
    { MT_F32, MT_F32 }, { MT_BF16, MT_BF16 }, { MT_BF16, MT_F32 }, { MT_F16, MT_F16 },
    { MT_F16, MT_F32 },
};
#define KINDS ((int)(sizeof kinds / sizeof kinds[0]))

static void *plane_new(mt_dtype dt, int64_t n, int skew)
{
    size_t each = mt_dtype_bytes(dt);
    char  *raw  = calloc((size_t)(n + skew), each);

    REQUIRE(raw != NULL);
    return raw + (size_t)skew * each;
}

static void plane_free(const void *p, mt_dtype dt, int skew)
{
    if (p != NULL)
        free((char *)(uintptr_t)p - (size_t)skew * mt_dtype_bytes(dt));
}

static float get(const void *x, mt_dtype dt, int64_t i)
{
    return dt == MT_F32  ? ((const float *)x)[i]
         : dt == MT_BF16 ? mt_bf16_to_f32(((const uint16_t *)x)[i])
                         : mt_f16_to_f32(((const uint16_t *)x)[i]);
}

static void set(const void *x, mt_dtype dt, int64_t i, float f)
{
    void *to = (void *)(uintptr_t)x;

    if (dt == MT_F32)
        ((float *)to)[i] = f;
    else
        ((uint16_t *)to)[i] = dt == MT_BF16 ? mt_f32_to_bf16(f) : mt_f32_to_f16(f);
}

static float weight(const planes *s, int64_t i)
{
    float p;

    if (s->t.dtype == MT_F32)
        return ((float *)s->t.hi)[i];
    if (s->t.dtype == MT_F16)
        return s->t.master[i];
    mt_split_join((uint16_t *)s->t.hi + i, s->t.lo + i, &p, 1);
    return p;
}

static void set_weight(const planes *s, int64_t i, float p)
{
    if (s->t.dtype == MT_BF16) {
        mt_split_set(&p, (uint16_t *)s->t.hi + i, s->t.lo + i, 1);
        return;
    }
    set(s->t.hi, s->t.dtype, i, p);
    if (s->t.dtype == MT_F16)
        s->t.master[i] = p;
}

static planes planes_new(kind k, int64_t n, int skew)
{
    planes s = { .skew = skew };

    s.t = (mt_adam_tensor){
        .dtype = k.w, .grad_dtype = k.g, .n = n,
        .hi = plane_new(k.w, n, skew), .grad = plane_new(k.g, n, skew),
        .m = plane_new(MT_F32, n, skew), .v = plane_new(MT_F32, n, skew),
        .lo = k.w == MT_BF16 ? plane_new(MT_I16, n, skew) : NULL,
        .master = k.w == MT_F16 ? plane_new(MT_F32, n, skew) : NULL,
        .hyper = { .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1,
                   .step = 1 },
    };
    for (int64_t i = 0; i < n; i++)
        set_weight(&s, i, random_in(-0.05f, 0.05f));
    return s;
}

static void planes_free(planes *s)
{
    plane_free(s->t.hi, s->t.dtype, s->skew);
    plane_free(s->t.grad, s->t.grad_dtype, s->skew);
    plane_free(s->t.m, MT_F32, s->skew);
    plane_free(s->t.v, MT_F32, s->skew);
    plane_free(s->t.lo, MT_I16, s->skew);
    plane_free(s->t.master, MT_F32, s->skew);
}

static void planes_copy(planes *to, const planes *from)
{
    size_t n = (size_t)from->t.n, w = mt_dtype_bytes(from->t.dtype);

    memcpy(to->t.hi, from->t.hi, n * w);
    memcpy(to->t.m, from->t.m, n * 4);
    memcpy(to->t.v, from->t.v, n * 4);
    memcpy((void *)(uintptr_t)to->t.grad, from->t.grad, n * mt_dtype_bytes(from->t.grad_dtype));
    if (from->t.lo != NULL)
        memcpy(to->t.lo, from->t.lo, n * 2);
    if (from->t.master != NULL)
        memcpy(to->t.master, from->t.master, n * 4);
    to->t.hyper = from->t.hyper;
}

static planes planes_twin(const planes *s)
{
    planes twin = planes_new((kind){ s->t.dtype, s->t.grad_dtype }, s->t.n, s->skew);

    planes_copy(&twin, s);
    return twin;
}

static void fill_grad(planes *s)
{
    for (int64_t i = 0; i < s->t.n; i++)
        set(s->t.grad, s->t.grad_dtype, i, random_grad());
}

static void step(const planes *s, mt_pool *pool, float clip, mt_isa isa)
{
    CHECK_OK(mt_adam_step(pool, &s->t, 1, clip, isa));
}

/* NaN equals NaN; the sign and payload of one are not promised. */
static int same_value(float a, float b) { return bits_of(a) == bits_of(b) || (a != a && b != b); }

static int64_t differences(const planes *a, const planes *b)
{
    int64_t bad = 0;

    for (int64_t i = 0; i < a->t.n; i++)
        bad += !same_value(a->t.m[i], b->t.m[i]) || !same_value(a->t.v[i], b->t.v[i])
            || !same_value(weight(a, i), weight(b, i))
            || !same_value(get(a->t.hi, a->t.dtype, i), get(b->t.hi, b->t.dtype, i))
            || (a->t.lo != NULL && a->t.lo[i] != b->t.lo[i]);
    return bad;
}

static int vector_isas(mt_isa *isas)
{
    int n = 0;

    for (int isa = MT_ISA_SCALAR + 1; isa < MT_ISA_COUNT; isa++)
        if (mt_isa_runs((mt_isa)isa))
            isas[n++] = (mt_isa)isa;
    return n;
}

/* ---- the same bits ---- */

static void check_same_bits(kind k, int64_t n, int skew, int steps, mt_isa isa)
{
    random_state = (uint64_t)n * 31 + k.w;
    planes want = planes_new(k, n, skew), got = planes_twin(&want);
    mt_pool *pool = NULL;

    if (n > 1000)
        REQUIRE_OK(mt_pool_open(3, &pool));
    for (int i = 1; i <= steps; i++) {
        fill_grad(&want);
        memcpy((void *)(uintptr_t)got.t.grad, want.t.grad, (size_t)n * mt_dtype_bytes(k.g));
        want.t.hyper.step = got.t.hyper.step = i;
        step(&want, NULL, 0.75f, MT_ISA_SCALAR);
        step(&got, pool, 0.75f, isa);
    }
    if (differences(&want, &got) != 0) {
        fprintf(stderr, "  %s, %s weights, %s gradient, n %lld:\n", mt_isa_name(isa),
                mt_dtype_name(k.w), mt_dtype_name(k.g), (long long)n);
        CHECK_EQ(differences(&want, &got), 0);
    }
    mt_pool_close(pool);
    planes_free(&want);
    planes_free(&got);
}

static void for_vector_isas(int64_t n, int skew, int steps)
{
    mt_isa isas[MT_ISA_COUNT];
    int    n_isas = vector_isas(isas);

    if (n_isas == 0)
        SKIP("this processor has neither AVX2 nor AVX-512");
    for (int k = 0; k < KINDS; k++)
        for (int i = 0; i < n_isas; i++)
            check_same_bits(kinds[k], n, skew, steps, isas[i]);
}

TEST(every_isa_gives_the_same_bits_for_200_steps) { for_vector_isas(333, 0, 200); }

TEST(every_isa_gives_the_same_bits_for_every_tail)
{
    for (int64_t n = 1; n <= 70 && !check_skipped; n++)
        for_vector_isas(n, (int)(n % 3), 3);
}

TEST(every_isa_gives_the_same_bits_for_a_million_elements)
{
    for_vector_isas(UNDER_TSAN ? (1 << 18) + 3 : (1 << 20) + 3, 1, 2);     /* more than a chunk */
}

/* Special values in every plane, in an order that puts each beside each in time. */
TEST(every_isa_gives_the_same_bits_for_special_values)
{
    static const float odd[] = {
        0.0f, -0.0f, 1.0f, -1.0f, INFINITY, -INFINITY, NAN, 0x1p-149f, -0x1p-130f, 0x1p-120f,
        0x1p-121f, -0x1p-100f, 0x1p-101f, 3.4e38f, -3.4028235e38f, 1e19f, 65504.0f, -65520.0f,
        1e-7f,
    };
    enum { ODD = sizeof odd / sizeof odd[0], N = ODD * ODD * ODD };
    mt_isa isas[MT_ISA_COUNT];
    int    n_isas = vector_isas(isas);

    for (int k = 0; k < 2 * KINDS; k++) {
        planes start = planes_new(kinds[k / 2], N, 0), want = planes_twin(&start),
               got = planes_twin(&start);
        if (k % 2 == 1) {           /* every weight grows by a thousandth: the largest saturate */
            start.t.hyper.lr = 1;
            start.t.hyper.weight_decay = -0.001;
        }
        for (int i = 0; i < N; i++) {
            set_weight(&start, i, odd[i % ODD]);
            set(start.t.grad, start.t.grad_dtype, i, odd[i / ODD % ODD]);
            start.t.m[i] = odd[i / ODD / ODD];
            start.t.v[i] = fabsf(odd[(i + i / ODD) % ODD]);
        }
        planes_copy(&want, &start);
        step(&want, NULL, 1.0f, MT_ISA_SCALAR);
        for (int i = 0; i < n_isas; i++) {
            planes_copy(&got, &start);
            step(&got, NULL, 1.0f, isas[i]);
            CHECK_EQ(differences(&want, &got), 0);
        }
        planes_free(&start);
        planes_free(&want);
        planes_free(&got);
    }
}

TEST(number_of_threads_does_not_change_a_bit)
{
    enum { TENSORS = 5 };
    static const int64_t n[TENSORS] = { 600001, 3, 0, 262144, 262145 };
    mt_adam_tensor one[TENSORS], four[TENSORS];
    planes   a[TENSORS], b[TENSORS];
    mt_pool *pool;

    random_state = 7;
    REQUIRE_OK(mt_pool_open(4, &pool));
    for (int i = 0; i < TENSORS; i++) {
        a[i] = planes_new(kinds[i], n[i], 0);
        fill_grad(&a[i]);
        b[i] = planes_twin(&a[i]);
        one[i] = a[i].t;
        four[i] = b[i].t;
    }
    CHECK_OK(mt_adam_step(NULL, one, TENSORS, 0.5f, mt_isa_best()));
    CHECK_OK(mt_adam_step(pool, four, TENSORS, 0.5f, mt_isa_best()));
    for (int i = 0; i < TENSORS; i++) {
        CHECK_EQ(differences(&a[i], &b[i]), 0);
        CHECK(n[i] == 0 || a[i].t.m[n[i] - 1] != 0);         /* the last element was reached */
        planes_free(&a[i]);
        planes_free(&b[i]);
    }
    mt_pool_close(pool);
}

/* Imported libraries switch denormals off (-ffast-math); the bits must not follow. */
TEST(the_callers_fp_mode_does_not_change_a_bit)
{
    random_state = 8;
    planes want = planes_new(kinds[0], 40, 0);
    for (int64_t i = 0; i < want.t.n; i++) {
        set_weight(&want, i, float_of((uint32_t)(i + 1) * 1000));           /* denormal */
        set(want.t.grad, MT_F32, i, float_of((uint32_t)(i + 1) * 2000));
    }
    planes   got = planes_twin(&want);
    unsigned was = _mm_getcsr();

    step(&want, NULL, 1.0f, mt_isa_best());
    _mm_setcsr(was | 0x8040);                                               /* FTZ, DAZ */
    step(&got, NULL, 1.0f, mt_isa_best());
    CHECK_EQ(_mm_getcsr() & 0x8040, 0x8040);
    _mm_setcsr(was);
    CHECK_EQ(differences(&want, &got), 0);
    CHECK(weight(&want, 39) != 0);
    planes_free(&want);
    planes_free(&got);
}

/* ---- the right numbers ---- */

static double ulps(double got, double want)
{
    int e;
    (void)frexp(want, &e);
    return fabs(got - want) / ldexp(1.0, e - 24);
}

typedef struct worst { double p, m, v; } worst;

/* 200 steps beside the textbook form in double precision. Weights stay away from zero (200 steps
 * of 1e-5 cannot move 0.01 there), so that an ulp of p means something; an error of m is counted
 * in ulps of the largest gradient its element has seen, as m may cancel to nothing. */
static worst against_double(kind k, mt_isa isa)
{
    enum { N = 512 };
    static double p[N], m[N], v[N], largest[N];
    worst  w = {0};

    random_state = 11;
    planes s = planes_new(k, N, 0);
    mt_adam_hyper *h = &s.t.hyper;
    h->lr = 1e-5;
    for (int i = 0; i < N; i++) {
        set_weight(&s, i, (i & 1 ? -1.0f : 1.0f) * random_in(0.01f, 0.04f));
        p[i] = (double)weight(&s, i);
        m[i] = v[i] = largest[i] = 0;
    }
    for (h->step = 1; h->step <= 200; h->step++) {
        fill_grad(&s);
        step(&s, NULL, 0.5f, isa);
        for (int i = 0; i < N; i++) {
            double g = (double)get(s.t.grad, k.g, i) * 0.5, t = (double)h->step;
            m[i] = h->beta1 * m[i] + (1 - h->beta1) * g;
            v[i] = h->beta2 * v[i] + (1 - h->beta2) * g * g;
            p[i] -= h->lr * h->weight_decay * p[i];
            p[i] -= h->lr * (m[i] / (1 - pow(h->beta1, t))) /
                    (sqrt(v[i] / (1 - pow(h->beta2, t))) + h->eps);
            largest[i] = fmax(largest[i], fabs(g));
        }
    }
    for (int i = 0; i < N; i++) {
        w.p = fmax(w.p, ulps((double)weight(&s, i), p[i]));
        w.v = fmax(w.v, ulps((double)s.t.v[i], v[i]));
        w.m = fmax(w.m, ulps(largest[i] + ((double)s.t.m[i] - m[i]), largest[i]));
    }
    planes_free(&s);
    return w;
}

/* Tolerances: measured worst cases (docs/numerics.md), with room for other data. p gathers the
 * rounding of 200 subtractions; v that of 200 recursions, each at most an ulp, most cancelling. */
TEST(two_hundred_steps_stay_within_stated_ulps_of_double)
{
    for (int k = 0; k < KINDS; k++) {
        worst w = against_double(kinds[k], mt_isa_best());
        if (getenv("MT_PRINT") != NULL)
            printf("%s/%s: p %.1f m %.2f v %.1f ulp\n", mt_dtype_name(kinds[k].w),
                   mt_dtype_name(kinds[k].g), w.p, w.m, w.v);
        CHECK(w.p <= 30);
        CHECK(w.m <= 2);
        CHECK(w.v <= 20);
    }
}

/* One element, step by step as adam.h writes it. */
TEST(first_step_is_the_formula_of_the_header)
{
    planes s = planes_new(kinds[0], 1, 0);
    float  g = 0.3f * 0.7f, m, v, u, p = 1.25f;

    set_weight(&s, 0, p);
    set(s.t.grad, MT_F32, 0, 0.3f);
    step(&s, NULL, 0.7f, MT_ISA_SCALAR);
    m = fmaf((float)(1 - 0.9), g, 0.0f);
    v = fmaf((float)(1 - 0.999), fmaf(g, g, -0.0f), 0.0f);
    u = m / fmaf(sqrtf(v), (float)(1 / sqrt(1 - 0.999)), 1e-8f);
    p = p - fmaf((float)(1e-3 * 0.1), p, (float)(1e-3 / (1 - 0.9)) * u);
    CHECK_EQ(bits_of(s.t.m[0]), bits_of(m));
    CHECK_EQ(bits_of(s.t.v[0]), bits_of(v));
    CHECK_EQ(bits_of(weight(&s, 0)), bits_of(p));
    planes_free(&s);
}

TEST(maximize_equals_a_negated_gradient)
{
    for (int k = 0; k < KINDS; k++) {
        random_state = 12;
        planes up = planes_new(kinds[k], 100, 0);
        fill_grad(&up);
        planes down = planes_twin(&up);
        for (int64_t i = 0; i < up.t.n; i++)
            set(down.t.grad, kinds[k].g, i, -get(up.t.grad, kinds[k].g, i));
        up.t.hyper.maximize = 1;
        step(&up, NULL, 0.3f, mt_isa_best());
        step(&down, NULL, 0.3f, mt_isa_best());
        CHECK_EQ(differences(&up, &down), 0);
        planes_free(&up);
        planes_free(&down);
    }
}

/* ---- odd values ---- */

TEST(a_gradient_not_finite_stays_in_its_element)
{
    static const float bad[] = { NAN, INFINITY, -INFINITY };

    for (int k = 0; k < KINDS; k++)
        for (int b = 0; b < 3; b++) {
            random_state = 13;
            planes hurt = planes_new(kinds[k], 75, 0);
            fill_grad(&hurt);
            planes well = planes_twin(&hurt);
            set(hurt.t.grad, kinds[k].g, 70, bad[b]);
            step(&hurt, NULL, 1.0f, mt_isa_best());
            step(&well, NULL, 1.0f, mt_isa_best());
            CHECK_EQ(differences(&hurt, &well), 1);
            CHECK(isnan(weight(&hurt, 70)));
            CHECK(!isfinite(hurt.t.m[70]) && !isfinite(hurt.t.v[70]));
            if (kinds[k].w == MT_BF16) {
                CHECK_EQ(((uint16_t *)hurt.t.hi)[70], 0x7fc0);
                CHECK_EQ(hurt.t.lo[70], 0);
            }
            planes_free(&hurt);
            planes_free(&well);
        }
}

TEST(tiny_moments_are_stored_as_zero)
{
    for (int isa = 0; isa < MT_ISA_COUNT; isa++) {
        if (!mt_isa_runs((mt_isa)isa))
            continue;
        planes s = planes_new(kinds[0], 16, 0);           /* one whole vector of either kind */
        s.t.hyper.beta1 = s.t.hyper.beta2 = 0.5;          /* a gradient of 0 halves both, exactly */
        s.t.m[0] = 0x1p-99f;           s.t.v[0] = 0x1p-119f;              /* just stay */
        s.t.m[1] = -0x1p-99f;          s.t.v[1] = 0x1.fffffep-120f;       /* m stays, v goes */
        s.t.m[2] = 0x1.fffffep-100f;   s.t.v[2] = 0x1p-118f;              /* m goes, v stays */
        s.t.m[3] = -0x1.fffffep-100f;  s.t.v[3] = -1.0f;                  /* a negative v is no v */
        step(&s, NULL, 1.0f, (mt_isa)isa);
        CHECK(s.t.m[0] == 0x1p-100f && s.t.v[0] == 0x1p-120f);
        CHECK(s.t.m[1] == -0x1p-100f && bits_of(s.t.v[1]) == 0);
        CHECK(bits_of(s.t.m[2]) == 0 && s.t.v[2] == 0x1p-119f);
        CHECK(bits_of(s.t.m[3]) == 0 && bits_of(s.t.v[3]) == 0);
        planes_free(&s);
    }
}

/* eps = 0 and a gradient whose square is flushed: the step itself uses v as it came out. */
TEST(flushing_does_not_divide_by_zero)
{
    planes s = planes_new(kinds[0], 1, 0);

    s.t.hyper.eps = 0;
    set(s.t.grad, MT_F32, 0, 0x1p-60f);
    step(&s, NULL, 1.0f, mt_isa_best());
    CHECK_EQ(bits_of(s.t.v[0]), 0);
    CHECK(isfinite(weight(&s, 0)));
    planes_free(&s);
}

TEST(f16_starts_from_hi_where_somebody_wrote_it)
{
    for (int isa = 0; isa < MT_ISA_COUNT; isa++) {
        if (!mt_isa_runs((mt_isa)isa))
            continue;
        random_state = 14;
        planes s = planes_new(kinds[4], 40, 0);
        s.t.hyper.lr = 0;                                 /* p stays what it starts from */
        float kept = s.t.master[3];
        set(s.t.hi, MT_F16, 17, 0.125f);
        set(s.t.hi, MT_F16, 39, -2.0f);
        step(&s, NULL, 1.0f, (mt_isa)isa);
        CHECK_EQ(bits_of(s.t.master[3]), bits_of(kept));
        CHECK(s.t.master[17] == 0.125f && s.t.master[39] == -2.0f);
        CHECK(get(s.t.hi, MT_F16, 17) == 0.125f);
        planes_free(&s);
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

static void check_refused(planes *s, const char *part)
{
    uint32_t before = bits_of(weight(s, 0));

    CHECK_FAILS(mt_adam_step(NULL, &s->t, 1, 1.0f, MT_ISA_SCALAR), MT_EINVAL, part);
    CHECK_EQ(bits_of(weight(s, 0)), before);
}

TEST(step_refuses_hyper_parameters_out_of_range)
{
#define REFUSED(member, value, part)                        \
    do {                                                    \
        planes s = planes_new(kinds[0], 4, 0);              \
        s.t.hyper.member = (value);                         \
        check_refused(&s, (part));                          \
        planes_free(&s);                                    \
    } while (0)
    REFUSED(step, 0, "step 0");
    REFUSED(beta1, 1.0, "betas 1, 0.999");
    REFUSED(beta2, -0.5, "betas 0.9, -0.5");
    REFUSED(beta2, NAN, "betas");
    REFUSED(eps, -1e-8, "eps -1e-08");
    REFUSED(lr, NAN, "lr nan");
    REFUSED(weight_decay, INFINITY, "weight_decay inf");
#undef REFUSED
}

TEST(step_refuses_planes_and_types_that_do_not_fit)
{
    planes s = planes_new(kinds[1], 4, 0);
    mt_adam_tensor good = s.t;

    s.t.lo = NULL;
    CHECK_FAILS(mt_adam_step(NULL, &s.t, 1, 1.0f, MT_ISA_SCALAR), MT_EINVAL, "no lo plane");
    s.t = good;
    s.t.grad_dtype = MT_F16;
    check_refused(&s, "BF16 weights with a gradient in F16");
    s.t = good;
    s.t.n = -1;
    check_refused(&s, "-1 elements");
    s.t = good;
    CHECK_EQ(mt_adam_step(NULL, &s.t, 1, NAN, MT_ISA_SCALAR), MT_EINVAL);
    CHECK_EQ(mt_adam_step(NULL, &s.t, 1, 1.0f, MT_ISA_COUNT), MT_EINVAL);
    planes_free(&s);
}

/* One bad tensor among good ones: nothing has happened. */
TEST(step_checks_everything_before_it_writes)
{
    planes a = planes_new(kinds[0], 8, 0), b = planes_new(kinds[0], 8, 0);
    fill_grad(&a);
    planes twin = planes_twin(&a);
    mt_adam_tensor both[2] = { a.t, b.t };

    both[1].hyper.step = 0;
    CHECK_FAILS(mt_adam_step(NULL, both, 2, 1.0f, mt_isa_best()), MT_EINVAL, "tensor 1");
    CHECK_EQ(differences(&a, &twin), 0);
    planes_free(&a);
    planes_free(&b);
    planes_free(&twin);
}

TEST(an_isa_that_does_not_run_is_refused_by_name)
{
    planes s = planes_new(kinds[0], 4, 0);

    for (int isa = 0; isa < MT_ISA_COUNT; isa++) {
        mt_status st = mt_adam_step(NULL, &s.t, 1, 1.0f, (mt_isa)isa);
        CHECK_EQ(st, mt_isa_runs((mt_isa)isa) ? MT_OK : MT_ENOTSUP);
        if (st == MT_ENOTSUP)
            CHECK_HAS(mt_last_error(), mt_isa_name((mt_isa)isa));
    }
    CHECK(mt_isa_runs(mt_isa_best()));
    planes_free(&s);
}

TEST(traffic_touches_every_plane_to_the_end)
{
    for (int k = 0; k < KINDS; k++) {
        random_state = 15;
        planes s = planes_new(kinds[k], 64, 0);
        for (int64_t i = 0; i < 64; i++)
            set(s.t.grad, kinds[k].g, i, 1.3f);
        planes was = planes_twin(&s);
        CHECK_OK(mt_adam_traffic(NULL, &s.t, 1, mt_isa_best()));
        CHECK_EQ(differences(&s, &was), 64);
        CHECK(s.t.m[63] != 0 && s.t.v[63] != 0);
        CHECK(get(s.t.hi, kinds[k].w, 63) != get(was.t.hi, kinds[k].w, 63));
        CHECK(s.t.lo == NULL || s.t.lo[63] != was.t.lo[63]);
        CHECK(s.t.master == NULL || s.t.master[63] != was.t.master[63]);
        planes_free(&s);
        planes_free(&was);
    }
}

/* ---- in a queue ---- */

typedef struct device {
    mt_dev   *dev;
    mt_queue *q;
} device;

static int device_open(device *d, int cuda)
{
    if ((cuda ? mt_dev_cuda_open(0, &d->dev) : mt_dev_cpu_open(&d->dev)) != MT_OK)
        return 0;
    REQUIRE_OK(d->dev->ops->queue_open(d->dev, "adam", &d->q));
    return 1;
}

static void device_close(device *d)
{
    d->dev->ops->queue_close(d->q);
    d->dev->ops->close(d->dev);
}

/* A plane's bytes in device memory, `skew` elements behind where it begins; copies are in d->q. */
static void *lift(device *d, const void *plane, size_t elem, int64_t n, int skew)
{
    void *there;

    if (plane == NULL)
        return NULL;
    REQUIRE_OK(d->dev->ops->mem_alloc(d->dev, (size_t)(n + skew) * elem + 1, &there));
    there = (char *)there + (size_t)skew * elem;
    CHECK_OK(d->dev->ops->copy(d->q, there, plane, (size_t)n * elem));
    return there;
}

/* The planes of s on the device. */
static mt_adam_tensor lift_all(device *d, const planes *s, int skew)
{
    mt_adam_tensor t = s->t;
    int64_t        n = t.n;

    t.hi = lift(d, t.hi, mt_dtype_bytes(t.dtype), n, skew);
    t.lo = lift(d, t.lo, 2, n, skew);
    t.master = lift(d, t.master, 4, n, skew);
    t.m = lift(d, t.m, 4, n, skew);
    t.v = lift(d, t.v, 4, n, skew);
    t.grad = lift(d, t.grad, mt_dtype_bytes(t.grad_dtype), n, skew);
    return t;
}

static void fetch(device *d, void *to, const void *there, size_t elem, int64_t n, int skew)
{
    if (there == NULL)
        return;
    if (to != NULL)
        CHECK_OK(d->dev->ops->copy(d->q, to, there, (size_t)n * elem));
    CHECK_OK(d->dev->ops->sync(d->q));
    d->dev->ops->mem_free(d->dev, (char *)(uintptr_t)there - (size_t)skew * elem);
}

/* Back into s, and the device's planes are gone. */
static void lower_all(device *d, const planes *s, const mt_adam_tensor *t, int skew)
{
    fetch(d, s->t.hi, t->hi, mt_dtype_bytes(t->dtype), t->n, skew);
    fetch(d, s->t.lo, t->lo, 2, t->n, skew);
    fetch(d, s->t.master, t->master, 4, t->n, skew);
    fetch(d, s->t.m, t->m, 4, t->n, skew);
    fetch(d, s->t.v, t->v, 4, t->n, skew);
    fetch(d, NULL, t->grad, mt_dtype_bytes(t->grad_dtype), t->n, skew);
}

static void check_put(device *d, kind k, int64_t n, int skew, int steps)
{
    random_state = (uint64_t)n * 31 + k.w;
    planes         want = planes_new(k, n, 0), got = planes_twin(&want);
    mt_adam_tensor t = lift_all(d, &got, skew);

    for (int i = 1; i <= steps; i++) {
        CHECK_OK(d->dev->ops->sync(d->q));               /* the copy before has read want's grad */
        fill_grad(&want);
        want.t.hyper.step = t.hyper.step = i;
        CHECK_OK(d->dev->ops->copy(d->q, (void *)(uintptr_t)t.grad, want.t.grad,
                                   (size_t)n * mt_dtype_bytes(k.g)));
        CHECK_OK(mt_adam_put(d->q, &t, 1, 0.75f));
        step(&want, NULL, 0.75f, mt_isa_best());
    }
    lower_all(d, &got, &t, skew);
    if (differences(&want, &got) != 0)
        fprintf(stderr, "  %s weights, %s gradient, n %lld, skew %d:\n", mt_dtype_name(k.w),
                mt_dtype_name(k.g), (long long)n, skew);
    CHECK_EQ(differences(&want, &got), 0);
    planes_free(&want);
    planes_free(&got);
}

/* Lengths around what a thread, a round and a block take; addresses that no vector fits. */
static void check_puts(int cuda)
{
    static const int64_t lengths[] = { 1, 3, 4, 1023, 1024, 2047, 2048, 2049, 4100, 10001 };
    device d;

    if (!device_open(&d, cuda))
        SKIP("%s", mt_last_error());
    for (int k = 0; k < KINDS; k++) {
        for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++)
            for (int skew = 0; skew < 2; skew++)
                check_put(&d, kinds[k], lengths[i], skew, 3);
        check_put(&d, kinds[k], 2500, 0, 200);
        check_put(&d, kinds[k], UNDER_TSAN ? (1 << 16) + 3 : (1 << 20) + 3, 0, cuda ? 200 : 2);
    }
    device_close(&d);
}

TEST(cpu_queue_gives_the_same_bits)  { check_puts(0); }
TEST(cuda_queue_gives_the_same_bits) { check_puts(1); }

/* Special values in every plane, as above, and weights that saturate. */
static void check_put_odd(device *d, kind k, int grow)
{
    static const float odd[] = {
        0.0f, -0.0f, 1.0f, -1.0f, INFINITY, -INFINITY, NAN, 0x1p-149f, -0x1p-130f, 0x1p-120f,
        0x1p-121f, -0x1p-100f, 0x1p-101f, 3.4e38f, -3.4028235e38f, 1e19f, 65504.0f, -65520.0f,
        1e-7f, 0x1.7p-15f,
    };
    enum { ODD = sizeof odd / sizeof odd[0], N = ODD * ODD * ODD };
    planes         want = planes_new(k, N, 0), got;

    if (grow) {
        want.t.hyper.lr = 1;
        want.t.hyper.weight_decay = -0.001;
    }
    for (int i = 0; i < N; i++) {
        set_weight(&want, i, odd[i % ODD]);
        set(want.t.grad, k.g, i, odd[i / ODD % ODD]);
        want.t.m[i] = odd[i / ODD / ODD];
        want.t.v[i] = fabsf(odd[(i + i / ODD) % ODD]);
        if (k.w == MT_F16 && i % 7 == 0)         /* somebody wrote hi */
            set(want.t.hi, MT_F16, i, odd[(i + 3) % ODD]);
    }
    got = planes_twin(&want);
    mt_adam_tensor t = lift_all(d, &got, 0);
    CHECK_OK(mt_adam_put(d->q, &t, 1, 1.0f));
    lower_all(d, &got, &t, 0);
    step(&want, NULL, 1.0f, MT_ISA_SCALAR);
    CHECK_EQ(differences(&want, &got), 0);
    planes_free(&want);
    planes_free(&got);
}

TEST(cuda_queue_gives_the_same_bits_for_special_values)
{
    device d;

    if (!device_open(&d, 1))
        SKIP("%s", mt_last_error());
    for (int k = 0; k < 2 * KINDS; k++)
        check_put_odd(&d, kinds[k / 2], k % 2);
    device_close(&d);
}

/* More tensors than a launch takes, of all kinds, none and one element among them. */
static void check_many(int cuda)
{
    enum { MANY = 130 };
    static planes         want[MANY], got[MANY];
    static mt_adam_tensor t[MANY];
    device d;

    if (!device_open(&d, cuda))
        SKIP("%s", mt_last_error());
    random_state = 21;
    for (int i = 0; i < MANY; i++) {
        want[i] = planes_new(kinds[i % KINDS],
                             i % 9 == 0 ? 0 : i % 9 == 1 ? 1 : random_bits() % 9000, 0);
        want[i].t.hyper.lr = 1e-4 * (i + 1);
        want[i].t.hyper.step = 1 + i % 3;
        want[i].t.hyper.maximize = i % 2;
        fill_grad(&want[i]);
        got[i] = planes_twin(&want[i]);
        t[i] = lift_all(&d, &got[i], 0);
    }
    CHECK_OK(mt_adam_put(d.q, t, MANY, 0.5f));
    CHECK_OK(mt_adam_put(d.q, NULL, 0, 0.5f));
    for (int i = 0; i < MANY; i++) {
        lower_all(&d, &got[i], &t[i], 0);
        step(&want[i], NULL, 0.5f, mt_isa_best());
        CHECK_EQ(differences(&want[i], &got[i]), 0);
        planes_free(&want[i]);
        planes_free(&got[i]);
    }
    device_close(&d);
}

TEST(cpu_queue_takes_many_tensors)  { check_many(0); }
TEST(cuda_queue_takes_many_tensors) { check_many(1); }

TEST(put_checks_everything_before_it_puts)
{
    planes s = planes_new(kinds[1], 8, 0), bad = planes_twin(&s), was;
    mt_adam_tensor t[2] = { s.t, bad.t };
    device d;

    REQUIRE(device_open(&d, 0));
    fill_grad(&s);
    was = planes_twin(&s);
    t[1].lo = NULL;
    CHECK_FAILS(mt_adam_put(d.q, t, 2, 1.0f), MT_EINVAL, "tensor 1");
    CHECK_HAS(mt_last_error(), "lo");
    CHECK_EQ(mt_adam_put(d.q, t, 1, INFINITY), MT_EINVAL);
    CHECK_EQ(mt_adam_put_cuda(0, t, 2, 1.0f) == MT_OK, 0);
    CHECK_OK(d.dev->ops->sync(d.q));
    CHECK_EQ(differences(&s, &was), 0);
    device_close(&d);
    planes_free(&s);
    planes_free(&bad);
    planes_free(&was);
}

/* Under ASan: the order for the queue's thread is freed when the queue does not take it. */
TEST(put_passes_a_device_error_on)
{
    planes    s = planes_new(kinds[0], 8, 0), was = planes_twin(&s);
    mt_dev   *cpu, *dev;
    mt_queue *q;

    REQUIRE_OK(mt_dev_cpu_open(&cpu));
    dev = fault_dev(cpu, 2, FAULT_STAYS);                 /* the call after queue_open */
    REQUIRE_OK(dev->ops->queue_open(dev, "adam", &q));
    CHECK_EQ(mt_adam_put(q, &s.t, 1, 1.0f), MT_EDEVICE);
    CHECK_EQ(differences(&s, &was), 0);
    dev->ops->queue_close(q);
    dev->ops->close(dev);
    cpu->ops->close(cpu);
    planes_free(&s);
    planes_free(&was);
}
