/* adam_avx512.h — private to csrc/optim: gradients and weights of 16 elements. A file that
 * includes it is compiled as adam_avx512.c is.
 */
#ifndef MT_ADAM_AVX512_H
#define MT_ADAM_AVX512_H

#include "adam_kernel.h"
#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))
#define LANES 16
#define ALL   ((__mmask16)0xffff)
#define TO_NEAREST (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)

typedef struct coef16 {
    __m512 g_scale, one_minus_b1, one_minus_b2, rsqrt_bc2, eps, lr_wd, lr_bc1;
} coef16;

INLINE coef16 coef_set(const mt__adam_coef *c)
{
    return (coef16){
        .g_scale      = _mm512_set1_ps(c->g_scale),
        .one_minus_b1 = _mm512_set1_ps(c->one_minus_b1),
        .one_minus_b2 = _mm512_set1_ps(c->one_minus_b2),
        .rsqrt_bc2    = _mm512_set1_ps(c->rsqrt_bc2),
        .eps          = _mm512_set1_ps(c->eps),
        .lr_wd        = _mm512_set1_ps(c->lr_wd),
        .lr_bc1       = _mm512_set1_ps(c->lr_bc1),
    };
}

INLINE __m512 load_half(const void *x, mt_dtype dt, __mmask16 on)
{
    __m256i raw = _mm256_maskz_loadu_epi16(on, x);

    if (dt == MT_F16)
        return _mm512_cvtph_ps(raw);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}

INLINE __m512 load_grad(const mt__adam_span *s, mt_dtype g, int64_t i, __mmask16 on)
{
    if (g == MT_F32)
        return _mm512_maskz_loadu_ps(on, (const float *)s->grad + i);
    return load_half((const uint16_t *)s->grad + i, g, on);
}

INLINE __m512 load_weight(const mt__adam_span *s, mt_dtype w, int64_t i, __mmask16 on)
{
    if (w == MT_F32)
        return _mm512_maskz_loadu_ps(on, (const float *)s->hi + i);

    __m256i hi = _mm256_maskz_loadu_epi16(on, (const uint16_t *)s->hi + i);
    if (w == MT_BF16) {
        __m512i top = _mm512_slli_epi32(_mm512_cvtepu16_epi32(hi), 16);
        __m512i low = _mm512_cvtepi16_epi32(_mm256_maskz_loadu_epi16(on, s->lo + i));
        return _mm512_castsi512_ps(_mm512_add_epi32(top, low));
    }
    __m512    p    = _mm512_maskz_loadu_ps(on, s->master + i);
    __mmask16 kept = _mm256_cmpeq_epi16_mask(hi, _mm512_cvtps_ph(p, TO_NEAREST));
    return _mm512_mask_mov_ps(_mm512_cvtph_ps(hi), kept, p);
}

/* What a split weight can hold: nearly always all that is there. */
INLINE __m512i split_holds(__m512i bits)
{
    const __m512i inf  = _mm512_set1_epi32(0x7f800000), edge = _mm512_set1_epi32(0x7f7f8000);
    __m512i   size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    __mmask16 rare = _mm512_cmpge_epu32_mask(size, edge);

    if (__builtin_expect(rare == 0, 1))
        return bits;
    __mmask16 nan  = _mm512_cmpgt_epu32_mask(size, inf),
              too_big = _mm512_mask_cmplt_epu32_mask(rare, size, inf);
    __m512i   sign = _mm512_xor_si512(bits, size);

    bits = _mm512_mask_or_epi32(bits, too_big, sign, _mm512_set1_epi32(0x7f7f7fff));
    return _mm512_mask_mov_epi32(bits, nan, _mm512_set1_epi32(0x7fc00000));
}

INLINE void store_split(const mt__adam_span *s, int64_t i, __mmask16 on, __m512i p)
{
    __m512i bits = split_holds(p);
    __m512i top = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)), 16);
    _mm256_mask_storeu_epi16((uint16_t *)s->hi + i, on, _mm512_cvtepi32_epi16(top));
    _mm256_mask_storeu_epi16(s->lo + i, on, _mm512_cvtepi32_epi16(bits));
}

INLINE void store_weight(const mt__adam_span *s, mt_dtype w, int64_t i, __mmask16 on, __m512 p)
{
    if (w == MT_F32) {
        _mm512_mask_storeu_ps((float *)s->hi + i, on, p);
    } else if (w == MT_BF16) {
        store_split(s, i, on, _mm512_castps_si512(p));
    } else {
        _mm512_mask_storeu_ps(s->master + i, on, p);
        _mm256_mask_storeu_epi16((uint16_t *)s->hi + i, on, _mm512_cvtps_ph(p, TO_NEAREST));
    }
}

#endif
