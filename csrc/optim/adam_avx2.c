/* adam_avx2.c — the update of adam_scalar.c, 32 parameters an iteration.
 *
 * Compiled with -mavx2 -mfma -mf16c -ffp-contract=off; entered only where
 * mt_isa_runs(MT_ISA_AVX2). AVX2 has no masks worth the name: what is left of a span after the
 * last 16 elements goes through the scalar definition.
 */
#if defined(__x86_64__)
#include "adam_kernel.h"
#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))
#define LANES 8
#define TO_NEAREST (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)

typedef struct coef8 {
    __m256 g_scale, one_minus_b1, one_minus_b2, rsqrt_bc2, eps, lr_wd, lr_bc1;
} coef8;

/* 16 values: packing to 16 bits takes two registers of fp32. */
typedef struct pair { __m256 a, b; } pair;

INLINE coef8 coef_set(const mt__adam_coef *c)
{
    return (coef8){
        .g_scale      = _mm256_set1_ps(c->g_scale),
        .one_minus_b1 = _mm256_set1_ps(c->one_minus_b1),
        .one_minus_b2 = _mm256_set1_ps(c->one_minus_b2),
        .rsqrt_bc2    = _mm256_set1_ps(c->rsqrt_bc2),
        .eps          = _mm256_set1_ps(c->eps),
        .lr_wd        = _mm256_set1_ps(c->lr_wd),
        .lr_bc1       = _mm256_set1_ps(c->lr_bc1),
    };
}

INLINE __m128i load8(const void *x) { return _mm_loadu_si128((const __m128i *)x); }

INLINE __m256i widen_bf16(const uint16_t *x)
{
    return _mm256_slli_epi32(_mm256_cvtepu16_epi32(load8(x)), 16);
}

INLINE __m256 load_grad(const mt__adam_span *s, mt_dtype g, int64_t i)
{
    if (g == MT_F32)
        return _mm256_loadu_ps((const float *)s->grad + i);
    if (g == MT_F16)
        return _mm256_cvtph_ps(load8((const uint16_t *)s->grad + i));
    return _mm256_castsi256_ps(widen_bf16((const uint16_t *)s->grad + i));
}

INLINE __m256 load_weight(const mt__adam_span *s, mt_dtype w, int64_t i)
{
    if (w == MT_F32)
        return _mm256_loadu_ps((const float *)s->hi + i);
    if (w == MT_BF16) {
        __m256i low = _mm256_cvtepi16_epi32(load8(s->lo + i));
        return _mm256_castsi256_ps(_mm256_add_epi32(widen_bf16((const uint16_t *)s->hi + i), low));
    }
    __m128i hi   = load8((const uint16_t *)s->hi + i);
    __m256  p    = _mm256_loadu_ps(s->master + i);
    __m128i kept = _mm_cmpeq_epi16(hi, _mm256_cvtps_ph(p, TO_NEAREST));
    return _mm256_blendv_ps(_mm256_cvtph_ps(hi), p, _mm256_castsi256_ps(_mm256_cvtepi16_epi32(kept)));
}

INLINE __m256i split_holds(__m256 p)
{
    __m256i bits    = _mm256_castps_si256(p);
    __m256i size    = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    __m256i sign    = _mm256_xor_si256(bits, size);
    __m256i finite  = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x7f800000), size);
    __m256i too_big = _mm256_and_si256(_mm256_cmpgt_epi32(size, _mm256_set1_epi32(0x7f7f7fff)), finite);
    __m256i nan     = _mm256_cmpgt_epi32(size, _mm256_set1_epi32(0x7f800000));

    size = _mm256_blendv_epi8(size, _mm256_set1_epi32(0x7f7f7fff), too_big);
    return _mm256_blendv_epi8(_mm256_or_si256(sign, size), _mm256_set1_epi32(0x7fc00000), nan);
}

/* 16 dwords, each below 2^16, to 16 words; packus works within 128-bit halves. */
INLINE void store_low(void *to, __m256i a, __m256i b)
{
    __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
    _mm256_storeu_si256((__m256i *)to, words);
}

INLINE void store_split(const mt__adam_span *s, int64_t i, pair p)
{
    const __m256i half = _mm256_set1_epi32(0x8000), low = _mm256_set1_epi32(0xffff);
    __m256i a = split_holds(p.a), b = split_holds(p.b);

    store_low((uint16_t *)s->hi + i, _mm256_srli_epi32(_mm256_add_epi32(a, half), 16),
                                     _mm256_srli_epi32(_mm256_add_epi32(b, half), 16));
    store_low(s->lo + i, _mm256_and_si256(a, low), _mm256_and_si256(b, low));
}

INLINE void store_f16(const mt__adam_span *s, int64_t i, __m256 p)
{
    _mm256_storeu_ps(s->master + i, p);
    _mm_storeu_si128((__m128i *)((uint16_t *)s->hi + i), _mm256_cvtps_ph(p, TO_NEAREST));
}

INLINE void store_weight(const mt__adam_span *s, mt_dtype w, int64_t i, pair p)
{
    if (w == MT_F32) {
        _mm256_storeu_ps((float *)s->hi + i, p.a);
        _mm256_storeu_ps((float *)s->hi + i + LANES, p.b);
    } else if (w == MT_BF16) {
        store_split(s, i, p);
    } else {
        store_f16(s, i, p.a);
        store_f16(s, i + LANES, p.b);
    }
}

/* "Not less than" is true for NaN, which is kept. */
INLINE __m256 flush(__m256 x, __m256 size, float smallest)
{
    return _mm256_and_ps(x, _mm256_cmp_ps(size, _mm256_set1_ps(smallest), _CMP_NLT_UQ));
}

/* Updates both moments; returns the new weights, which the caller stores. */
INLINE __m256 elements(const mt__adam_span *s, const coef8 *c, mt_dtype w, mt_dtype gt, int64_t i)
{
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    __m256 p = load_weight(s, w, i);
    __m256 m = _mm256_loadu_ps(s->m + i);
    __m256 v = _mm256_loadu_ps(s->v + i);
    __m256 g = _mm256_mul_ps(load_grad(s, gt, i), c->g_scale);

    m = _mm256_fmadd_ps(c->one_minus_b1, _mm256_sub_ps(g, m), m);
    v = _mm256_fmadd_ps(c->one_minus_b2, _mm256_fmsub_ps(g, g, v), v);
    __m256 u = _mm256_div_ps(m, _mm256_fmadd_ps(_mm256_sqrt_ps(v), c->rsqrt_bc2, c->eps));

    _mm256_storeu_ps(s->m + i, flush(m, _mm256_and_ps(m, magnitude), MT__M_SMALLEST));
    _mm256_storeu_ps(s->v + i, flush(v, v, MT__V_SMALLEST));
    return _mm256_sub_ps(p, _mm256_fmadd_ps(c->lr_wd, p, _mm256_mul_ps(c->lr_bc1, u)));
}

INLINE void sixteen(const mt__adam_span *s, const coef8 *c, mt_dtype w, mt_dtype g, int64_t i)
{
    pair p = { .a = elements(s, c, w, g, i), .b = elements(s, c, w, g, i + LANES) };
    store_weight(s, w, i, p);
}

INLINE void step(const mt__adam_span *where, const mt__adam_coef *c, mt_dtype w, mt_dtype g,
                 mt__adam_fn rest)
{
    const mt__adam_span s = *where;     /* ours: no store can change it, so it stays in registers */
    const coef8         k = coef_set(c);
    int64_t             i = 0;

    for (; i + 32 <= s.n; i += 32) {
        mt__adam_prefetch(&s, w, g, i + MT__ADAM_AHEAD);
        sixteen(&s, &k, w, g, i);
        sixteen(&s, &k, w, g, i + 16);
    }
    if (i + 16 <= s.n) {
        sixteen(&s, &k, w, g, i);
        i += 16;
    }
    mt__adam_span tail = mt__adam_part(&s, w, g, i, s.n - i);
    rest(&tail, c);
}

#define STEP(w, g)                                                              \
    static void step_##w##_##g(const mt__adam_span *s, const mt__adam_coef *c)  \
    {                                                                           \
        step(s, c, MT_##w, MT_##g, mt__adam_scalar[MT__ADAM_##w##_##g]);        \
    }
MT__ADAM_KIND_MAP(STEP)

#define ENTRY(w, g) step_##w##_##g,
const mt__adam_fn mt__adam_avx2[MT__ADAM_KINDS] = { MT__ADAM_KIND_MAP(ENTRY) };

#else
typedef int mt__no_avx2;        /* a file must declare something */
#endif
