/* adam8_avx2.c — the update of adam8_scalar.c, a group of 128 parameters an iteration.
 *
 * Compiled and entered as adam_avx2.c is. A group's moments lie on the stack between the step and the bytes
 * that they become; what is left after the last whole group goes through the definition.
 *
 * Unpacking and packing work within 128-bit halves. So 16 elements are a pair whose half h has elements 8 h to
 * 8 h + 3 in a, the next four in b: what unpacking 16 words in a row gives, and packing takes.
 */
#if defined(__x86_64__)
#include "adam8_kernel.h"
#include "adam_avx2.h"

#define WIDTH (2 * LANES)                        /* of a pair */
#define PAIRS (MT_STATES_GROUP / WIDTH)
#define NEXT  4                                  /* from an element in a to the one in b */

typedef struct bits16 { __m256i a, b; } bits16;
typedef struct hash8  { __m256i first, second; } hash8;

/* Of a's 8 elements, or with NEXT more of b's, in the pair that begins with the group's element j. */
INLINE __m256i hashed(hash8 k, int j)
{
    __m256i x = _mm256_add_epi32(k.first, _mm256_set1_epi32((int)((uint32_t)j * MT__HASH_STEP)));

    x = _mm256_xor_si256(_mm256_xor_si256(x, _mm256_srli_epi32(x, 15)), k.second);
    return _mm256_mullo_epi32(x, _mm256_set1_epi32((int)MT__HASH_MIX));
}

INLINE hash8 hash_of(const uint32_t *seed, int64_t first)
{
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11);
    __m256i steps = _mm256_mullo_epi32(lanes, _mm256_set1_epi32((int)MT__HASH_STEP));
    __m256i at = _mm256_set1_epi32((int)MT__HASH_FIRST(seed, first));

    return (hash8){ .first  = _mm256_add_epi32(at, steps),
                    .second = _mm256_set1_epi32((int)seed[1]) };
}

/* ---- pairs ---- */

INLINE __m256i load_words(const void *x) { return _mm256_loadu_si256((const __m256i *)x); }
INLINE void store_words(void *to, __m256i x) { _mm256_storeu_si256((__m256i *)to, x); }

INLINE bits16 unpacked(__m256i low, __m256i high)
{
    return (bits16){ _mm256_unpacklo_epi16(low, high), _mm256_unpackhi_epi16(low, high) };
}

INLINE __m256i upper_words(bits16 x)
{
    return _mm256_packus_epi32(_mm256_srli_epi32(x.a, 16), _mm256_srli_epi32(x.b, 16));
}

INLINE __m256i lower_words(bits16 x)
{
    const __m256i low = _mm256_set1_epi32(0xffff);
    return _mm256_packus_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
}

INLINE pair float_of(bits16 x) { return (pair){ _mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b) }; }

/* From 16 values in a row, and to them. */
INLINE pair pair_of(__m256 first, __m256 second)
{
    return (pair){ _mm256_permute2f128_ps(first, second, 0x20), _mm256_permute2f128_ps(first, second, 0x31) };
}

INLINE pair in_a_row(pair x) { return pair_of(x.a, x.b); }

INLINE pair load_grads(const mt__adam_span *s, mt_dtype g, int64_t i)
{
    if (g == MT_BF16)
        return float_of(unpacked(_mm256_setzero_si256(), load_words((const uint16_t *)s->grad + i)));
    return pair_of(load_grad(s, g, i), load_grad(s, g, i + LANES));
}

/* ---- weights ---- */

/* hi is what the whole was rounded to: one too large where lo is negative. */
INLINE pair joined(__m256i hi, __m256i lo)
{
    return float_of(unpacked(lo, _mm256_add_epi16(hi, _mm256_srai_epi16(lo, 15))));
}

INLINE pair load_kept(const mt__adam_span *s, int keep, int64_t i)
{
    if (keep == MT__KEEP_F32 || keep == MT__KEEP_F16)
        return pair_of(load_weight(s, (mt_dtype)keep, i), load_weight(s, (mt_dtype)keep, i + LANES));

    __m256i hi = load_words((const uint16_t *)s->hi + i);
    if (keep == MT__KEEP_SR)
        return float_of(unpacked(_mm256_setzero_si256(), hi));
    if (keep == MT__KEEP_BF16)
        return joined(hi, load_words(s->lo + i));
    return joined(hi, _mm256_slli_epi16(_mm256_cvtepi8_epi16(load8(s->codes.lo + i)), 8));
}

/* Whether some of these upper words, with no carry yet, are as large as MT__SR_MOST's, or not finite. */
INLINE int rarely_held(__m256i top)
{
    const __m256i below = _mm256_set1_epi16((short)(MT__SR_MOST >> 16) - 1);
    __m256i size = _mm256_and_si256(top, _mm256_set1_epi16(0x7fff));

    return _mm256_movemask_epi8(_mm256_cmpgt_epi16(size, below)) != 0;
}

/* bits of a weight that split_holds, plus what rounds it stochastically when it is cut. */
INLINE __m256i spread(__m256i p, __m256i add)
{
    __m256i bits = split_holds(_mm256_castsi256_ps(p));
    __m256i size = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    __m256i some = _mm256_cmpgt_epi32(_mm256_set1_epi32(MT__SR_MOST), size);

    return _mm256_add_epi32(bits, _mm256_and_si256(add, some));
}

/* shift: what it leaves of a hash lies below all that is kept. */
INLINE bits16 spread_pair(bits16 p, hash8 k, int j, int shift)
{
    __m256i a = _mm256_srli_epi32(hashed(k, j), shift), b = _mm256_srli_epi32(hashed(k, j + NEXT), shift);

    if (__builtin_expect(rarely_held(upper_words(p)), 0))
        return (bits16){ spread(p.a, a), spread(p.b, b) };
    return (bits16){ _mm256_add_epi32(p.a, a), _mm256_add_epi32(p.b, b) };
}

/* The upper words to nearest, ties away, as mt__split_store. */
INLINE void store_hi(const mt__adam_span *s, int64_t i, __m256i top, __m256i lo)
{
    store_words((uint16_t *)s->hi + i, _mm256_add_epi16(top, _mm256_srli_epi16(lo, 15)));
}

INLINE void store_halves(const mt__adam_span *s, int64_t i, pair p)
{
    bits16  bits = { _mm256_castps_si256(p.a), _mm256_castps_si256(p.b) };
    __m256i top = upper_words(bits), lo = lower_words(bits);

    if (__builtin_expect(rarely_held(top), 0)) {
        bits = (bits16){ split_holds(p.a), split_holds(p.b) };
        top = upper_words(bits);
        lo = lower_words(bits);
    }
    store_hi(s, i, top, lo);
    store_words(s->lo + i, lo);
}

/* The upper bytes of 16 words. */
INLINE void store_upper(void *to, __m256i words)
{
    __m256i x = _mm256_srli_epi16(words, 8);
    x = _mm256_permute4x64_epi64(_mm256_packus_epi16(x, x), 0xd8);
    _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(x));
}

INLINE void store_kept(const mt__adam_span *s, int keep, int64_t i, pair p, hash8 k, int j)
{
    bits16 bits = { _mm256_castps_si256(p.a), _mm256_castps_si256(p.b) };

    if (keep == MT__KEEP_SR) {
        store_words((uint16_t *)s->hi + i, upper_words(spread_pair(bits, k, j, 16)));
    } else if (keep == MT__KEEP_LO8) {
        bits = spread_pair(bits, k, j, 24);
        __m256i lo = lower_words(bits);
        store_hi(s, i, upper_words(bits), lo);
        store_upper(s->codes.lo + i, lo);
    } else if (keep == MT__KEEP_BF16) {
        store_halves(s, i, p);
    } else {
        store_weight(s, (mt_dtype)keep, i, in_a_row(p));
    }
}

/* ---- a group ---- */

/* New moments. */
typedef struct group {
    pair m[PAIRS], r[PAIRS];
} group;

INLINE pair times(__m256 scale, bits16 squares)
{
    return (pair){ _mm256_mul_ps(scale, _mm256_cvtepi32_ps(squares.a)),
                   _mm256_mul_ps(scale, _mm256_cvtepi32_ps(squares.b)) };
}

/* Squares of codes fit 16 bits, and are as exact there as in fp32. */
INLINE pair moments_of(__m256 scale, const int8_t *c)
{
    __m256i x = _mm256_cvtepi8_epi16(load8(c));

    x = _mm256_mullo_epi16(x, _mm256_abs_epi16(x));
    return times(scale, unpacked(x, _mm256_srai_epi16(x, 15)));
}

INLINE pair roots_of(__m256 scale, const uint8_t *k)
{
    __m256i x = _mm256_cvtepu8_epi16(load8(k));
    return times(scale, unpacked(_mm256_mullo_epi16(x, x), _mm256_setzero_si256()));
}

/* The step of 8 elements: from their moments, old, to new ones. */
INLINE __m256 updated(const coef8 *c, __m256 p, __m256 g, __m256 *moment, __m256 *root)
{
    __m256 m = *moment, v = _mm256_mul_ps(*root, *root), r;

    g = _mm256_mul_ps(g, c->g_scale);
    m = _mm256_fmadd_ps(c->one_minus_b1, _mm256_sub_ps(g, m), m);
    v = _mm256_fmadd_ps(c->one_minus_b2, _mm256_fmsub_ps(g, g, v), v);
    r = _mm256_sqrt_ps(v);
    __m256 u = _mm256_div_ps(m, _mm256_fmadd_ps(r, c->rsqrt_bc2, c->eps));

    *moment = m;
    *root = r;
    return _mm256_sub_ps(p, _mm256_fmadd_ps(c->lr_wd, p, _mm256_mul_ps(c->lr_bc1, u)));
}

/* 16 elements; their new moments go into m and r. */
INLINE void elements(const mt__adam_span *s, const coef8 *c, int keep, mt_dtype gt, int64_t i, __m256 cs,
                     __m256 ks, pair *m, pair *r, hash8 of_weight, int j)
{
    pair p = load_kept(s, keep, i), g = load_grads(s, gt, i);

    *m = moments_of(cs, s->codes.m + i);
    *r = roots_of(ks, s->codes.v + i);
    p.a = updated(c, p.a, g.a, &m->a, &r->a);
    p.b = updated(c, p.b, g.b, &m->b, &r->b);
    store_kept(s, keep, i, p, of_weight, j);
}

INLINE float largest(__m256 x)
{
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));

    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

/* As mt__root_near. */
INLINE __m256 root_near(__m256 q)
{
    const __m256i half = _mm256_srli_epi32(_mm256_castps_si256(q), 1);
    const __m256 w = _mm256_castsi256_ps(_mm256_sub_epi32(_mm256_set1_epi32((int)MT__ROOT_GUESS), half));
    const __m256 s = _mm256_mul_ps(q, w), e = _mm256_mul_ps(s, w);
    __m256 p = _mm256_fmadd_ps(_mm256_set1_ps(MT__ROOT_D), e, _mm256_set1_ps(MT__ROOT_C));

    p = _mm256_fmadd_ps(p, e, _mm256_set1_ps(MT__ROOT_B));
    return _mm256_mul_ps(s, _mm256_fmadd_ps(p, e, _mm256_set1_ps(MT__ROOT_A)));
}

/* Bits of hashes in the bits of a float. */
INLINE __m256 random_of(__m256i h, uint32_t which, uint32_t onto)
{
    __m256i bits = _mm256_and_si256(h, _mm256_set1_epi32((int)which));
    return _mm256_castsi256_ps(_mm256_or_si256(bits, _mm256_set1_epi32((int)onto)));
}

/* What 8 elements become, in dwords: m's byte above MT__C_OFFSET, v's MT__K_OFFSET more. Of two operands with a
 * NaN, max and min give the second. */
INLINE void codes_of(__m256 m, __m256 r, const mt__code_size *size, __m256i h, __m256i *out_m, __m256i *out_v)
{
    const __m256 sign = _mm256_andnot_ps(_mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)), m);
    __m256 q = _mm256_min_ps(_mm256_mul_ps(magnitude(m), _mm256_set1_ps(size->by_m)), _mm256_set1_ps(MT__C_BELOW));
    __m256 a = root_near(q), b = _mm256_sqrt_ps(_mm256_mul_ps(r, _mm256_set1_ps(size->by_r)));

    b = _mm256_max_ps(b, _mm256_fmadd_ps(a, _mm256_set1_ps(size->least), _mm256_set1_ps(size->floor)));
    b = _mm256_min_ps(b, _mm256_set1_ps(MT__K_MOST));
    a = _mm256_add_ps(_mm256_or_ps(a, sign), random_of(h, MT__C_RANDOM, MT__C_ONTO));
    b = _mm256_add_ps(b, random_of(h, MT__K_RANDOM, MT__K_ONTO));
    *out_m = _mm256_cvttps_epi32(a);
    *out_v = _mm256_cvttps_epi32(b);
}

INLINE mt__code_size size_of(const group *x, float bound, float *scale)
{
    __m256 most_m = _mm256_setzero_ps(), most_r = most_m;

    for (int j = 0; j < PAIRS; j++) {
        most_m = _mm256_max_ps(magnitude(x->m[j].b), _mm256_max_ps(magnitude(x->m[j].a), most_m));
        most_r = _mm256_max_ps(x->r[j].b, _mm256_max_ps(x->r[j].a, most_r));
    }
    return mt__code_size_of(largest(most_m), largest(most_r), bound, scale);
}

/* The words of two pairs as bytes in a row. */
INLINE void store_bytes(void *to, __m256i bytes)
{
    store_words(to, _mm256_permute4x64_epi64(bytes, 0xd8));
}

INLINE void encode(const group *x, int8_t *m, uint8_t *v, float *scale, float bound, hash8 k)
{
    const mt__code_size size = size_of(x, bound, scale);
    const __m256i one = _mm256_set1_epi16(MT__K_OFFSET), sign = _mm256_set1_epi8(-128);

    for (int j = 0; j < PAIRS; j += 2) {
        __m256i words_m[2], words_v[2];

        for (int h = 0; h < 2; h++) {
            bits16 c, d;
            int    at = (j + h) * WIDTH;

            codes_of(x->m[j + h].a, x->r[j + h].a, &size, hashed(k, at), &c.a, &d.a);
            codes_of(x->m[j + h].b, x->r[j + h].b, &size, hashed(k, at + NEXT), &c.b, &d.b);
            words_m[h] = _mm256_packus_epi32(c.a, c.b);
            words_v[h] = _mm256_sub_epi16(_mm256_packus_epi32(d.a, d.b), one);
        }
        store_bytes(m + j * WIDTH, _mm256_xor_si256(_mm256_packus_epi16(words_m[0], words_m[1]), sign));
        store_bytes(v + j * WIDTH, _mm256_packus_epi16(words_v[0], words_v[1]));
    }
}

INLINE void step_group(const mt__adam_span *s, const mt__adam_coef *c, const coef8 *k, int keep, mt_dtype gt,
                       int64_t i)
{
    float *scale = s->codes.scale + i / MT_STATES_GROUP * 2;
    __m256 cs = _mm256_set1_ps(scale[0]), ks = _mm256_set1_ps(scale[1]);
    hash8  of_weight = hash_of(c->seed_weight, s->first + i);
    group  x;

    for (int j = 0; j < PAIRS; j++)
        elements(s, k, keep, gt, i + j * WIDTH, cs, ks, &x.m[j], &x.r[j], of_weight, j * WIDTH);
    encode(&x, s->codes.m + i, s->codes.v + i, scale, c->code_bound, hash_of(c->seed_moment, s->first + i));
}

INLINE void step(const mt__adam_span *where, const mt__adam_coef *c, int keep, mt_dtype g, mt__adam_fn rest)
{
    const mt__adam_span s = *where;     /* ours: no store can change it, so it stays in registers */
    const coef8         k = coef_set(c);
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
const mt__adam_fn mt__adam8_avx2[MT__ADAM8_KINDS] = { MT__ADAM8_KIND_MAP(ENTRY) };

#else
typedef int mt__no_adam8_avx2;          /* a file must declare something */
#endif
