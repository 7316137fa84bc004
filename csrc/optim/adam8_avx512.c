/* adam8_avx512.c — the update of adam8_scalar.c, a group of 128 parameters an iteration.
 *
 * Compiled and entered as adam_avx512.c is. A group's moments stay in registers between the step and the
 * bytes that they become; what is left after the last whole group goes through the definition.
 */
#if defined(__x86_64__)
#include "adam8_kernel.h"
#include "adam_avx512.h"

#define VECTORS (MT_STATES_GROUP / LANES)

typedef struct hash16 { __m512i first, second; } hash16;

/* Of the 16 elements from the group's element j on. */
INLINE __m512i hashed(hash16 k, int j)
{
    __m512i x = _mm512_add_epi32(k.first, _mm512_set1_epi32((int)((uint32_t)j * MT__HASH_STEP)));

    x = _mm512_ternarylogic_epi32(x, _mm512_srli_epi32(x, 15), k.second, 0x96);      /* all xor */
    return _mm512_mullo_epi32(x, _mm512_set1_epi32((int)MT__HASH_MIX));
}

INLINE hash16 hash_of(const uint32_t *seed, int64_t first)
{
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i steps = _mm512_mullo_epi32(lanes, _mm512_set1_epi32((int)MT__HASH_STEP));
    __m512i at = _mm512_set1_epi32((int)MT__HASH_FIRST(seed, first));

    return (hash16){ .first  = _mm512_add_epi32(at, steps),
                     .second = _mm512_set1_epi32((int)seed[1]) };
}

/* ---- weights with fewer bits ---- */

/* bits of a weight that split_holds, plus what rounds it stochastically when it is cut. */
INLINE __m512i spread(__m512 p, __m512i add)
{
    __m512i   bits = split_holds(_mm512_castps_si512(p));
    __m512i   size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    __mmask16 some = _mm512_cmplt_epu32_mask(size, _mm512_set1_epi32(MT__SR_MOST));

    return _mm512_mask_add_epi32(bits, some, bits, add);
}

INLINE __m512 load_kept(const mt__adam_span *s, int keep, int64_t i)
{
    if (keep != MT__KEEP_LO8)
        return keep == MT__KEEP_SR ? load_half((const uint16_t *)s->hi + i, MT_BF16, ALL)
                                   : load_weight(s, (mt_dtype)keep, i, ALL);
    __m512i hi = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)((const uint16_t *)s->hi + i)));
    __m512i lo = _mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(s->codes.lo + i)));
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(hi, 16), _mm512_slli_epi32(lo, 8)));
}

INLINE void store_kept(const mt__adam_span *s, int keep, int64_t i, __m512 p, hash16 k, int j)
{
    uint16_t *hi = (uint16_t *)s->hi + i;

    if (keep == MT__KEEP_SR) {
        __m512i bits = spread(p, _mm512_srli_epi32(hashed(k, j), 16));
        _mm256_storeu_si256((void *)hi, _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
    } else if (keep == MT__KEEP_LO8) {
        __m512i bits = spread(p, _mm512_srli_epi32(hashed(k, j), 24));
        __m512i kept = _mm512_and_si512(bits, _mm512_set1_epi32((int)0xffffff00u));
        __m512i top = _mm512_srli_epi32(_mm512_add_epi32(kept, _mm512_set1_epi32(0x8000)), 16);
        _mm256_storeu_si256((void *)hi, _mm512_cvtepi32_epi16(top));
        _mm_storeu_si128((void *)(s->codes.lo + i), _mm512_cvtepi32_epi8(_mm512_srli_epi32(bits, 8)));
    } else {
        store_weight(s, (mt_dtype)keep, i, ALL, p);
    }
}

/* ---- a group ---- */

/* New moments. */
typedef struct group {
    __m512 m[VECTORS], r[VECTORS];
} group;

INLINE __m512 moment_of(__m512 scale, const int8_t *c)
{
    __m512 x = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)c)));
    return _mm512_mul_ps(scale, _mm512_mul_ps(x, _mm512_abs_ps(x)));
}

INLINE __m512 root_of(__m512 scale, const uint8_t *k)
{
    __m512 x = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)k)));
    return _mm512_mul_ps(scale, _mm512_mul_ps(x, x));
}

/* The step of 16 elements; their new moments go into x. */
INLINE void elements(const mt__adam_span *s, const coef16 *c, int keep, mt_dtype gt, int64_t i, __m512 cs,
                     __m512 ks, group *x, int j, hash16 of_weight)
{
    __m512 p = load_kept(s, keep, i);
    __m512 g = _mm512_mul_ps(load_grad(s, gt, i, ALL), c->g_scale);
    __m512 m = moment_of(cs, s->codes.m + i), r = root_of(ks, s->codes.v + i), v = _mm512_mul_ps(r, r);

    m = _mm512_fmadd_ps(c->one_minus_b1, _mm512_sub_ps(g, m), m);
    v = _mm512_fmadd_ps(c->one_minus_b2, _mm512_fmsub_ps(g, g, v), v);
    r = _mm512_sqrt_ps(v);
    __m512 u = _mm512_div_ps(m, _mm512_fmadd_ps(r, c->rsqrt_bc2, c->eps));

    p = _mm512_sub_ps(p, _mm512_fmadd_ps(c->lr_wd, p, _mm512_mul_ps(c->lr_bc1, u)));
    x->m[j] = m;
    x->r[j] = r;
    store_kept(s, keep, i, p, of_weight, j * LANES);
}

/* Of two operands with a NaN, max and min give the second. */
INLINE void encode(const group *x, int8_t *m, uint8_t *v, float *scale, float bound, hash16 k)
{
    __m512 most_m = _mm512_setzero_ps(), most_r = most_m;

#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; j++) {
        most_m = _mm512_max_ps(_mm512_abs_ps(x->m[j]), most_m);
        most_r = _mm512_max_ps(x->r[j], most_r);
    }
    const mt__code_size size = mt__code_size_of(_mm512_reduce_max_ps(most_m), _mm512_reduce_max_ps(most_r),
                                                bound, scale);
    const __m512 by_m = _mm512_set1_ps(size.by_m), by_r = _mm512_set1_ps(size.by_r);
    const __m512 least = _mm512_set1_ps(size.least), floor = _mm512_set1_ps(size.floor);

#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; j++) {
        __m512i h = hashed(k, j * LANES);
        __m512  a = _mm512_sqrt_ps(_mm512_mul_ps(_mm512_abs_ps(x->m[j]), by_m));
        __m512  b = _mm512_sqrt_ps(_mm512_mul_ps(x->r[j], by_r));

        a = _mm512_min_ps(a, _mm512_set1_ps(MT__C_UNITS));
        b = _mm512_min_ps(_mm512_max_ps(b, _mm512_fmadd_ps(a, least, floor)), _mm512_set1_ps(MT__K_UNITS));
        __m512i c = _mm512_add_epi32(_mm512_cvtps_epi32(a), _mm512_srli_epi32(h, 8));
        __m512i d = _mm512_add_epi32(_mm512_cvtps_epi32(b),
                                     _mm512_and_si512(h, _mm512_set1_epi32(MT__K_RANDOM)));

        c = _mm512_srli_epi32(c, 24);
        c = _mm512_mask_sub_epi32(c, _mm512_movepi32_mask(_mm512_castps_si512(x->m[j])),
                                  _mm512_setzero_si512(), c);
        _mm_storeu_si128((void *)(m + j * LANES), _mm512_cvtepi32_epi8(c));
        _mm_storeu_si128((void *)(v + j * LANES), _mm512_cvtepi32_epi8(_mm512_srli_epi32(d, 23)));
    }
}

INLINE void step_group(const mt__adam_span *s, const mt__adam_coef *c, const coef16 *k, int keep, mt_dtype gt,
                       int64_t i)
{
    float *scale = s->codes.scale + i / MT_STATES_GROUP * 2;
    __m512 cs = _mm512_set1_ps(scale[0]), ks = _mm512_set1_ps(scale[1]);
    hash16 of_weight = hash_of(c->seed_weight, s->first + i);
    group  x;

#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; j++)
        elements(s, k, keep, gt, i + j * LANES, cs, ks, &x, j, of_weight);
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
