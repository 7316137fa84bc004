/* adam8_scalar.c — the definition of the update with moments of 8 bits, which every other kernel
 * must match to the bit. adam8_code.h says what is computed; compiled as adam_scalar.c is.
 */
#include "adam8_kernel.h"
#include "adam_scalar.h"

/* ---- weights with fewer bits ---- */

/* bits of a weight that split_holds, plus what rounds it stochastically when it is cut. */
static inline uint32_t spread(float p, uint32_t add)
{
    uint32_t bits = mt__split_holds(mt__bits(p));

    return (bits & 0x7fffffffu) < MT__SR_MOST ? bits + add : bits;
}

static inline float lo8_value(uint16_t hi, int8_t lo)
{
    return mt__float(((uint32_t)hi << 16) + ((uint32_t)(int32_t)lo << 8));
}

/* hi to nearest, ties away, as mt__split_store does; what is below 8 bits of lo is cut off. */
static inline void lo8_store(uint32_t bits, uint16_t *hi, int8_t *lo)
{
    *hi = (uint16_t)(((bits & 0xffffff00u) + 0x8000u) >> 16);
    *lo = (int8_t)(uint8_t)(bits >> 8);
}

static inline float load_kept(const mt__adam_span *s, int keep, int64_t i)
{
    if (keep == MT__KEEP_LO8)
        return lo8_value(((const uint16_t *)s->hi)[i], s->codes.lo[i]);
    if (keep == MT__KEEP_SR)
        return mt_bf16_to_f32(((const uint16_t *)s->hi)[i]);
    return load_weight(s, (mt_dtype)keep, i);
}

static inline void store_kept(const mt__adam_span *s, int keep, int64_t i, float p, uint32_t hash)
{
    uint16_t *hi = (uint16_t *)s->hi + i;

    if (keep == MT__KEEP_LO8)
        lo8_store(spread(p, hash >> 8), hi, s->codes.lo + i);
    else if (keep == MT__KEEP_SR)
        *hi = (uint16_t)(spread(p, hash) >> 16);
    else
        store_weight(s, (mt_dtype)keep, i, p);
}

/* ---- a group ---- */

/* The 16 bits of a group's element j; first: the group's MT__HASH_FIRST. */
static inline uint32_t hashed(uint32_t first, int j, uint32_t second)
{
    uint32_t x = first + (uint32_t)(j & ~1) * MT__HASH_STEP,
             h = (x ^ x >> 15 ^ second) * MT__HASH_MIX;

    return j % 2 == 0 ? h & MT__RANDOM : h >> 16;
}

static inline float moment_of(float scale, int8_t c)
{
    float x = (float)c;
    return copysignf(scale, x) * mt__square(fabsf(x));
}

static inline float root_of(float scale, uint8_t k)
{
    return scale * mt__square((float)k);
}

/* New moments of a group, or of what is left. */
typedef struct group {
    float m[MT_STATES_GROUP], r[MT_STATES_GROUP];
    int   n;
} group;

static mt__code_size size_of(const group *x, float bound, float *scale)
{
    float most_m = 0, most_r = 0;

    for (int j = 0; j < x->n; j++) {                     /* NaN compares false */
        most_m = fabsf(x->m[j]) > most_m ? fabsf(x->m[j]) : most_m;
        most_r = x->r[j] > most_r ? x->r[j] : most_r;
    }
    return mt__code_size_of(most_m, most_r, bound, scale);
}

/* Codes below MT__CODE_TOP, whole; none where sum is negative or not a number of codes. */
static inline int below_top(float sum)
{
    return sum > 0 && sum < 0x1p31f ? (int)sum : 0;
}

/* random: the element's 16 bits. A y that is NaN is larger than any other. */
static inline void encode(float m, float r, const mt__code_size *size, uint32_t random,
                          int8_t *to_m, uint8_t *to_v)
{
    float    x = mt__root(fabsf(m) * size->by_m), y = mt__root(r * size->by_r);
    float    onto = mt__float(MT__RANDOM_ONTO | random), least = fmaf(x, size->least, size->floor);
    uint32_t most = mt__bits(least) > mt__bits(y) ? mt__bits(least) : mt__bits(y);
    int      c = MT__CODE_TOP - below_top(fmaf(-x, copysignf(MT__CODE_UNITS, m), onto));

    *to_m = (int8_t)(c > 127 ? 127 : c < -128 ? -128 : c);
    *to_v = (uint8_t)(MT__CODE_TOP - below_top(fmaf(-mt__float(most), MT__CODE_UNITS, onto)));
}

/* One element of the step; its new moments go into x. */
static inline void element(const mt__adam_span *s, const mt__adam_coef *c, int keep, mt_dtype gt,
                           group *x, int j, uint32_t first)
{
    float p = load_kept(s, keep, j);
    float g = load_grad(s, gt, j) * c->g_scale;
    float m = moment_of(s->codes.scale[0], s->codes.m[j]);
    float r = root_of(s->codes.scale[1], s->codes.v[j]), v = r * r;

    m = fmaf(c->one_minus_b1, g - m, m);
    v = fmaf(c->one_minus_b2, fmaf(g, g, -v), v);
    r = sqrtf(v);
    float u = m / fmaf(r, c->rsqrt_bc2, c->eps);

    p = p - fmaf(c->lr_wd, p, c->lr_bc1 * u);
    x->m[j] = m;
    x->r[j] = r;
    store_kept(s, keep, j, p, hashed(first, j, c->seed[1]));
}

/* A group, or what is left of the last one. */
static inline void step_group(const mt__adam_span *s, const mt__adam_coef *c, int keep, mt_dtype gt)
{
    const mt_adam_codes *to = &s->codes;
    uint32_t             first = MT__HASH_FIRST(c->seed, s->first);
    group                x = { .n = (int)s->n };
    mt__code_size        size;

    for (int j = 0; j < x.n; j++)
        element(s, c, keep, gt, &x, j, first);
    size = size_of(&x, c->code_bound, to->scale);
    for (int j = 0; j < x.n; j++)
        encode(x.m[j], x.r[j], &size, hashed(first, j, c->seed[1]), to->m + j, to->v + j);
}

static inline int64_t at_most_a_group(int64_t n)
{
    return n < MT_STATES_GROUP ? n : MT_STATES_GROUP;
}

static inline void step(const mt__adam_span *s, const mt__adam_coef *c, int keep, mt_dtype gt)
{
    mt_dtype w = keep < MT__KEEP_LO8 ? (mt_dtype)keep : MT_BF16;

    for (int64_t i = 0; i < s->n; i += MT_STATES_GROUP) {
        mt__adam_span part = mt__adam_part(s, w, gt, i, at_most_a_group(s->n - i));
        step_group(&part, c, keep, gt);
    }
}

#define STEP(w, g)                                                              \
    static void step_##w##_##g(const mt__adam_span *s, const mt__adam_coef *c)  \
    {                                                                           \
        step(s, c, MT__KEEP_##w, MT_##g);                                       \
    }
MT__ADAM8_KIND_MAP(STEP)

#define ENTRY(w, g) step_##w##_##g,
const mt__adam_fn mt__adam8_scalar[MT__ADAM8_KINDS] = { MT__ADAM8_KIND_MAP(ENTRY) };

/* ---- fp32 <-> codes, and weights ---- */

void mt_codes_get(const mt_adam_codes *c, float *m, float *v, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        const float *scale = c->scale + i / MT_STATES_GROUP * 2;
        float        r = root_of(scale[1], c->v[i]);

        m[i] = moment_of(scale[0], c->m[i]);
        v[i] = r * r;
    }
}

/* Half a code in the hash's bits: to nearest. The bound is that of moments that only ever saw one
 * gradient, with betas up to 0.9 and 0.999; no true moments are above it. */
void mt_codes_set(const float *m, const float *v, const mt_adam_codes *c, int64_t n)
{
    const uint32_t half = 0x8000u;
    const float    bound = (float)MT__SQUARE_SAG * MT__K_SQUARE / MT__C_SQUARE / 8;

    for (int64_t i = 0; i < n; i += MT_STATES_GROUP) {
        group x = { .n = (int)at_most_a_group(n - i) };

        for (int j = 0; j < x.n; j++) {
            x.m[j] = m[i + j];
            x.r[j] = sqrtf(v[i + j]);
        }
        mt__code_size size = size_of(&x, bound, c->scale + i / MT_STATES_GROUP * 2);
        for (int j = 0; j < x.n; j++)
            encode(x.m[j], x.r[j], &size, half, c->m + i + j, c->v + i + j);
    }
}

void mt_split8_join(const uint16_t *hi, const int8_t *lo, float *p, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        p[i] = lo8_value(hi[i], lo[i]);
}

void mt_split8_set(const float *p, uint16_t *hi, int8_t *lo, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        lo8_store(spread(p[i], 0x80), hi + i, lo + i);
}
