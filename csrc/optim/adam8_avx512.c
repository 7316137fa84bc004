/* adam8_avx512.c — the update of adam8_scalar.c, a group of 128 parameters an iteration.
 *
 * Compiled and entered as adam_avx512.c is. A group's moments stay in registers between the step and the
 * bytes that they become; what is left after the last whole group goes through the definition.
 *
 * Unpacking and packing work within 128-bit quarters. So 32 elements are a pair whose quarter q has elements
 * 8 q to 8 q + 3 in a, the next four in b: what unpacking 32 words in a row gives, and packing takes.
 */
#if defined(__x86_64__)
#include "adam8_kernel.h"
#include "adam_avx512.h"

#define WIDTH  (2 * LANES)                       /* of a pair */
#define PAIRS  (MT_STATES_GROUP / WIDTH)
#define NEXT   4                                 /* from an element in a to the one in b */
#define SIGN   ((int)0x80000000u)

typedef struct pair   { __m512  a, b; } pair;
typedef struct bits32 { __m512i a, b; } bits32;
typedef struct hash16 { __m512i first, second; } hash16;

/* Of a's 16 elements, or with NEXT more of b's, in the pair that begins with the group's element j. */
INLINE __m512i hashed(hash16 k, int j)
{
    __m512i x = _mm512_add_epi32(k.first, _mm512_set1_epi32((int)((uint32_t)j * MT__HASH_STEP)));

    x = _mm512_ternarylogic_epi32(x, _mm512_srli_epi32(x, 15), k.second, 0x96);      /* all xor */
    return _mm512_mullo_epi32(x, _mm512_set1_epi32((int)MT__HASH_MIX));
}

INLINE hash16 hash_of(const uint32_t *seed, int64_t first)
{
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    __m512i steps = _mm512_mullo_epi32(lanes, _mm512_set1_epi32((int)MT__HASH_STEP));
    __m512i at = _mm512_set1_epi32((int)MT__HASH_FIRST(seed, first));

    return (hash16){ .first  = _mm512_add_epi32(at, steps),
                     .second = _mm512_set1_epi32((int)seed[1]) };
}

/* ---- pairs ---- */

INLINE bits32 unpacked(__m512i low, __m512i high)
{
    return (bits32){ _mm512_unpacklo_epi16(low, high), _mm512_unpackhi_epi16(low, high) };
}

INLINE __m512i upper_words(bits32 x)
{
    return _mm512_packus_epi32(_mm512_srli_epi32(x.a, 16), _mm512_srli_epi32(x.b, 16));
}

INLINE __m512i lower_words(bits32 x)
{
    const __m512i low = _mm512_set1_epi32(0xffff);
    return _mm512_packus_epi32(_mm512_and_si512(x.a, low), _mm512_and_si512(x.b, low));
}

INLINE pair float_of(bits32 x) { return (pair){ _mm512_castsi512_ps(x.a), _mm512_castsi512_ps(x.b) }; }

/* From and to 32 values in a row. */
INLINE pair pair_of(__m512 first, __m512 second)
{
    return (pair){ _mm512_shuffle_f32x4(first, second, 0x88), _mm512_shuffle_f32x4(first, second, 0xdd) };
}

INLINE __m512 first_of(pair x)
{
    const __m512i from = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    return _mm512_permutex2var_ps(x.a, from, x.b);
}

INLINE __m512 second_of(pair x)
{
    const __m512i from = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    return _mm512_permutex2var_ps(x.a, from, x.b);
}

INLINE pair load_grads(const mt__adam_span *s, mt_dtype g, int64_t i)
{
    if (g == MT_BF16)
        return float_of(unpacked(_mm512_setzero_si512(), _mm512_loadu_si512((const uint16_t *)s->grad + i)));
    return pair_of(load_grad(s, g, i, ALL), load_grad(s, g, i + LANES, ALL));
}

/* ---- weights ---- */

/* hi is what the whole was rounded to: one too large where lo is negative. */
INLINE pair joined(__m512i hi, __m512i lo)
{
    return float_of(unpacked(lo, _mm512_add_epi16(hi, _mm512_srai_epi16(lo, 15))));
}

INLINE pair load_kept(const mt__adam_span *s, int keep, int64_t i)
{
    if (keep == MT__KEEP_F32 || keep == MT__KEEP_F16)
        return pair_of(load_weight(s, (mt_dtype)keep, i, ALL), load_weight(s, (mt_dtype)keep, i + LANES, ALL));

    __m512i hi = _mm512_loadu_si512((const uint16_t *)s->hi + i);
    if (keep == MT__KEEP_SR)
        return float_of(unpacked(_mm512_setzero_si512(), hi));
    if (keep == MT__KEEP_BF16)
        return joined(hi, _mm512_loadu_si512(s->lo + i));
    __m512i lo = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)(s->codes.lo + i)));
    return joined(hi, _mm512_slli_epi16(lo, 8));
}

/* Whether some of these upper words, with no carry yet, are as large as MT__SR_MOST's, or not finite. */
INLINE int rarely_held(__m512i top)
{
    __m512i size = _mm512_add_epi16(top, top);          /* without signs */

    return _mm512_cmpge_epu16_mask(size, _mm512_set1_epi16((short)(MT__SR_MOST >> 15 & 0xffff))) != 0;
}

/* bits of a weight that split_holds, plus what rounds it stochastically when it is cut. */
INLINE __m512i spread(__m512i p, __m512i add)
{
    __m512i   bits = split_holds(p);
    __m512i   size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    __mmask16 some = _mm512_cmplt_epu32_mask(size, _mm512_set1_epi32(MT__SR_MOST));

    return _mm512_mask_add_epi32(bits, some, bits, add);
}

/* shift: what it leaves of a hash lies below all that is kept. */
INLINE bits32 spread_pair(bits32 p, hash16 k, int j, unsigned shift)
{
    __m512i a = _mm512_srli_epi32(hashed(k, j), shift), b = _mm512_srli_epi32(hashed(k, j + NEXT), shift);

    if (__builtin_expect(rarely_held(upper_words(p)), 0))
        return (bits32){ spread(p.a, a), spread(p.b, b) };
    return (bits32){ _mm512_add_epi32(p.a, a), _mm512_add_epi32(p.b, b) };
}

/* The upper words to nearest, ties away, as mt__split_store. */
INLINE void store_hi(const mt__adam_span *s, int64_t i, __m512i top, __m512i lo)
{
    _mm512_storeu_si512((uint16_t *)s->hi + i, _mm512_add_epi16(top, _mm512_srli_epi16(lo, 15)));
}

INLINE void store_halves(const mt__adam_span *s, int64_t i, bits32 p)
{
    __m512i top = upper_words(p), lo = lower_words(p);

    if (__builtin_expect(rarely_held(top), 0)) {
        p = (bits32){ split_holds(p.a), split_holds(p.b) };
        top = upper_words(p);
        lo = lower_words(p);
    }
    store_hi(s, i, top, lo);
    _mm512_storeu_si512(s->lo + i, lo);
}

INLINE void store_kept(const mt__adam_span *s, int keep, int64_t i, pair p, hash16 k, int j)
{
    bits32 bits = { _mm512_castps_si512(p.a), _mm512_castps_si512(p.b) };

    if (keep == MT__KEEP_SR) {
        _mm512_storeu_si512((uint16_t *)s->hi + i, upper_words(spread_pair(bits, k, j, 16)));
    } else if (keep == MT__KEEP_LO8) {
        bits = spread_pair(bits, k, j, 24);
        __m512i lo = lower_words(bits);
        store_hi(s, i, upper_words(bits), lo);
        _mm256_storeu_si256((void *)(s->codes.lo + i), _mm512_cvtepi16_epi8(_mm512_srli_epi16(lo, 8)));
    } else if (keep == MT__KEEP_BF16) {
        store_halves(s, i, bits);
    } else {
        store_weight(s, (mt_dtype)keep, i, ALL, first_of(p));
        store_weight(s, (mt_dtype)keep, i + LANES, ALL, second_of(p));
    }
}

/* ---- a group ---- */

/* New moments. */
typedef struct group {
    pair m[PAIRS], r[PAIRS];
} group;

INLINE pair times(__m512 scale, bits32 squares)
{
    return (pair){ _mm512_mul_ps(scale, _mm512_cvtepi32_ps(squares.a)),
                   _mm512_mul_ps(scale, _mm512_cvtepi32_ps(squares.b)) };
}

/* Squares of codes fit 16 bits, and are as exact there as in fp32. */
INLINE pair moments_of(__m512 scale, const int8_t *c)
{
    __m512i x = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)c));

    x = _mm512_mullo_epi16(x, _mm512_abs_epi16(x));
    return times(scale, unpacked(x, _mm512_srai_epi16(x, 15)));
}

INLINE pair roots_of(__m512 scale, const uint8_t *k)
{
    __m512i x = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)k));
    return times(scale, unpacked(_mm512_mullo_epi16(x, x), _mm512_setzero_si512()));
}

/* The step of 16 elements: from their moments, old, to new ones. */
INLINE __m512 updated(const coef16 *c, __m512 p, __m512 g, __m512 *moment, __m512 *root)
{
    __m512 m = *moment, v = _mm512_mul_ps(*root, *root), r;

    g = _mm512_mul_ps(g, c->g_scale);
    m = _mm512_fmadd_ps(c->one_minus_b1, _mm512_sub_ps(g, m), m);
    v = _mm512_fmadd_ps(c->one_minus_b2, _mm512_fmsub_ps(g, g, v), v);
    r = _mm512_sqrt_ps(v);
    __m512 u = _mm512_div_ps(m, _mm512_fmadd_ps(r, c->rsqrt_bc2, c->eps));

    *moment = m;
    *root = r;
    return _mm512_sub_ps(p, _mm512_fmadd_ps(c->lr_wd, p, _mm512_mul_ps(c->lr_bc1, u)));
}

/* 32 elements; their new moments go into m and r. */
INLINE void elements(const mt__adam_span *s, const coef16 *c, int keep, mt_dtype gt, int64_t i, __m512 cs,
                     __m512 ks, pair *m, pair *r, hash16 of_weight, int j)
{
    pair p = load_kept(s, keep, i), g = load_grads(s, gt, i);

    *m = moments_of(cs, s->codes.m + i);
    *r = roots_of(ks, s->codes.v + i);
    p.a = updated(c, p.a, g.a, &m->a, &r->a);
    p.b = updated(c, p.b, g.b, &m->b, &r->b);
    store_kept(s, keep, i, p, of_weight, j);
}

/* As mt__root_near. */
INLINE __m512 root_near(__m512 q)
{
    const __m512i half = _mm512_srli_epi32(_mm512_castps_si512(q), 1);
    const __m512  w = _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_set1_epi32((int)MT__ROOT_GUESS), half));
    const __m512  s = _mm512_mul_ps(q, w), e = _mm512_mul_ps(s, w);
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(MT__ROOT_D), e, _mm512_set1_ps(MT__ROOT_C));

    p = _mm512_fmadd_ps(p, e, _mm512_set1_ps(MT__ROOT_B));
    return _mm512_mul_ps(s, _mm512_fmadd_ps(p, e, _mm512_set1_ps(MT__ROOT_A)));
}

/* onto, and those bits of x that `which` has. */
INLINE __m512 with_bits(__m512i onto, __m512i x, int which)
{
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(onto, x, _mm512_set1_epi32(which), 0xf8));
}

INLINE __m512 with_random(int onto, __m512i h, int which)
{
    return with_bits(_mm512_set1_epi32(onto), h, which);
}

enum { SMALLER = 0xa, LARGER = 0xb };            /* of two magnitudes; of a NaN and another, that */

/* What 16 elements become: m's bytes above MT__C_OFFSET, v's MT__K_OFFSET more. Of two operands with a NaN, max
 * and min give the second. */
INLINE void codes_of(__m512 m, __m512 r, const mt__code_size *size, __m512i h, __m512i *out_m, __m512i *out_v)
{
    __m512 q = _mm512_mul_ps(m, _mm512_set1_ps(size->by_m));
    __m512 a = root_near(_mm512_range_ps(q, _mm512_set1_ps(MT__C_BELOW), SMALLER));
    __m512 b = _mm512_sqrt_ps(_mm512_mul_ps(r, _mm512_set1_ps(size->by_r)));

    b = _mm512_max_ps(b, _mm512_fmadd_ps(a, _mm512_set1_ps(size->least), _mm512_set1_ps(size->floor)));
    b = _mm512_min_ps(b, _mm512_set1_ps(MT__K_MOST));
    a = with_bits(_mm512_castps_si512(a), _mm512_castps_si512(m), SIGN);
    *out_m = _mm512_cvttps_epi32(_mm512_add_ps(a, with_random(MT__C_ONTO, h, MT__C_RANDOM)));
    *out_v = _mm512_cvttps_epi32(_mm512_add_ps(b, with_random(MT__K_ONTO, h, MT__K_RANDOM)));
}

INLINE mt__code_size size_of(const group *x, float bound, float *scale)
{
    __m512 most_m = _mm512_setzero_ps(), most_r = most_m;

#pragma GCC unroll 4
    for (int j = 0; j < PAIRS; j++) {
        most_m = _mm512_range_ps(_mm512_range_ps(most_m, x->m[j].a, LARGER), x->m[j].b, LARGER);
        most_r = _mm512_max_ps(x->r[j].b, _mm512_max_ps(x->r[j].a, most_r));
    }
    return mt__code_size_of(_mm512_reduce_max_ps(most_m), _mm512_reduce_max_ps(most_r), bound, scale);
}

/* 64 elements' words as bytes in a row. */
INLINE void store_bytes(void *to, __m512i bytes)
{
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi64(order, bytes));
}

INLINE void encode(const group *x, int8_t *m, uint8_t *v, float *scale, float bound, hash16 k)
{
    const mt__code_size size = size_of(x, bound, scale);
    const __m512i one = _mm512_set1_epi16(MT__K_OFFSET), sign = _mm512_set1_epi8(-128);
    __m512i words_m[2], words_v[2];

#pragma GCC unroll 4
    for (int j = 0; j < PAIRS; j++) {
        bits32 c, d;

        codes_of(x->m[j].a, x->r[j].a, &size, hashed(k, j * WIDTH), &c.a, &d.a);
        codes_of(x->m[j].b, x->r[j].b, &size, hashed(k, j * WIDTH + NEXT), &c.b, &d.b);
        words_m[j % 2] = _mm512_packus_epi32(c.a, c.b);
        words_v[j % 2] = _mm512_sub_epi16(_mm512_packus_epi32(d.a, d.b), one);
        if (j % 2 == 0)
            continue;
        store_bytes(m + (j - 1) * WIDTH,
                    _mm512_xor_si512(_mm512_packus_epi16(words_m[0], words_m[1]), sign));   /* less 128 */
        store_bytes(v + (j - 1) * WIDTH, _mm512_packus_epi16(words_v[0], words_v[1]));
    }
}

INLINE void step_group(const mt__adam_span *s, const mt__adam_coef *c, const coef16 *k, int keep, mt_dtype gt,
                       int64_t i)
{
    float *scale = s->codes.scale + i / MT_STATES_GROUP * 2;
    __m512 cs = _mm512_set1_ps(scale[0]), ks = _mm512_set1_ps(scale[1]);
    hash16 of_weight = hash_of(c->seed_weight, s->first + i);
    group  x;

#pragma GCC unroll 4
    for (int j = 0; j < PAIRS; j++)
        elements(s, k, keep, gt, i + j * WIDTH, cs, ks, &x.m[j], &x.r[j], of_weight, j * WIDTH);
    encode(&x, s->codes.m + i, s->codes.v + i, scale, c->code_bound, hash_of(c->seed_moment, s->first + i));
}

INLINE void step(const mt__adam_span *where, const mt__adam_coef *c, int keep, mt_dtype g, mt__adam_fn rest)
{
    const mt__adam_span s = *where;     /* ours: no store can change it, so it stays in registers */
    const coef16        k = coef_set(c);
    mt_dtype            w = keep < MT__KEEP_LO8 ? (mt_dtype)keep : MT_BF16;
    int64_t             i = 0;

    for (; i + MT_STATES_GROUP <= s.n; i += MT_STATES_GROUP) {
        mt__adam8_prefetch(&s, keep, g, i + MT__ADAM8_AHEAD);
        step_group(&s, c, &k, keep, g, i);
    }
    mt__adam_span tail = mt__adam_part(&s, w, g, i, s.n - i);
    rest(&tail, c);
}

#define STEP(w, g)                                                              \
    static void step_##w##_##g(const mt__adam_span *s, const mt__adam_coef *c)  \
    {                                                                           \
        step(s, c, MT__KEEP_##w, MT_##g, mt__adam8_scalar[MT__ADAM8_##w##_##g]);\
    }
MT__ADAM8_KIND_MAP(STEP)

#define ENTRY(w, g) step_##w##_##g,
const mt__adam_fn mt__adam8_avx512[MT__ADAM8_KINDS] = { MT__ADAM8_KIND_MAP(ENTRY) };

#else
typedef int mt__no_adam8_avx512;        /* a file must declare something */
#endif
