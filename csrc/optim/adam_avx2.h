/* adam_avx2.h — private to csrc/optim: 8 elements' gradients, 16 weights in a span. A file that
 * includes it is compiled as adam_avx2.c is.
 */
#ifndef MT_ADAM_AVX2_H
#define MT_ADAM_AVX2_H

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

INLINE __m256 magnitude(__m256 x)
{
    return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)));
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
    return _mm256_blendv_ps(_mm256_cvtph_ps(hi), p,
                            _mm256_castsi256_ps(_mm256_cvtepi16_epi32(kept)));
}

INLINE __m256i split_holds(__m256 p)
{
    __m256i bits    = _mm256_castps_si256(p);
    __m256i size    = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    __m256i sign    = _mm256_xor_si256(bits, size);
    __m256i finite  = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x7f800000), size);
    __m256i too_big = _mm256_and_si256(_mm256_cmpgt_epi32(size, _mm256_set1_epi32(0x7f7f7fff)),
                                       finite);
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

#endif
