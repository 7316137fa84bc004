/* adam8_kernel.h — private to csrc/optim: what the kernels for moments of 8 bits share. */
#ifndef MT_ADAM8_KERNEL_H
#define MT_ADAM8_KERNEL_H

#include "adam8_code.h"
#include "adam_kernel.h"
#include <math.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define MT__ADAM8_AHEAD 1024    /* elements prefetched ahead: as many bytes as MT__ADAM_AHEAD's */

/* What a group's elements are multiplied by below the root, and the least that y may be: least * x
 * + floor, x, y and floor in units. */
typedef struct mt__code_size {
    float by_m, by_r, least, floor;
} mt__code_size;

/* bound: mt__adam_coef.code_bound. Writes both scales. Where the largest |m| is above what a scale
 * says, all of the group's are that much smaller. */
static inline mt__code_size mt__code_size_of(float most_m, float most_r, float bound, float *scale)
{
    float m = most_m < MT__M_FINITE ? most_m < MT__M_LEAST ? 0.0f : most_m : MT__M_FINITE;
    float r = most_r < MT__R_LARGEST ? most_r < MT__R_LEAST ? 0.0f : most_r : MT__R_LARGEST;
    float says = m < MT__M_LARGEST ? m : MT__M_LARGEST;
    float by_r = r > 0 ? MT__K_SQUARE / r : 0.0f, f = sqrtf(bound * says * (by_r * MT__K_INVERSE));

    f = f < MT__LEAST_MOST ? f : MT__LEAST_MOST;
    scale[0] = says * MT__C_INVERSE;
    scale[1] = r * MT__K_INVERSE;
    return (mt__code_size){
        .by_m  = m > 0 ? MT__C_BELOW / m : 0.0f,
        .by_r  = by_r,
        .least = f,
        .floor = r > 0 ? (f + 1.0f) * MT__CODE_UNIT : 0.0f,
    };
}

/* D of a code's magnitude. */
static inline float mt__square(float code)
{
    return mt__float(mt__bits(code * MT__CODE_UNIT) << 1);
}

/* Its inverse, in units: q not negative. */
static inline float mt__root(float q)
{
    return mt__float(mt__bits(q) >> 1);
}

#if defined(__AVX2__)
#define MT__GROUPS 4    /* whose sizes are made at once: after their steps, before their bytes */
#define MT__BOTH(m, r) _mm256_setr_ps(m, r, m, r, m, r, m, r)

/* by is { by_m, by_r } of each group, f and floor are in the first place of each. */
MT__INLINE void mt__code_sizes_store(mt__code_size *to, __m256 by, __m256 f, __m256 floor)
{
    __m256d x = _mm256_castps_pd(by),
            y = _mm256_castps_pd(_mm256_blend_ps(f, _mm256_moveldup_ps(floor), 0xaa));
    __m256d even = _mm256_unpacklo_pd(x, y), odd = _mm256_unpackhi_pd(x, y);

    _mm256_storeu_pd((double *)to, _mm256_permute2f128_pd(even, odd, 0x20));
    _mm256_storeu_pd((double *)(to + 2), _mm256_permute2f128_pd(even, odd, 0x31));
}

/* mt__code_size_of, of MT__GROUPS groups, of which n have scales to write:
 * most is { m, r } of each, none a NaN. */
MT__INLINE void mt__code_sizes_set(mt__code_size *to, __m256 most, float bound, float *scale, int n)
{
    const __m256 above = MT__BOTH(MT__M_FINITE, MT__R_LARGEST),
                 inverse = MT__BOTH(MT__C_INVERSE, MT__K_INVERSE);
    __m256 some = _mm256_cmp_ps(most, MT__BOTH(MT__M_LEAST, MT__R_LEAST), _CMP_GE_OQ);
    __m256 x = _mm256_and_ps(some, _mm256_min_ps(most, above));
    __m256 says = _mm256_min_ps(x, MT__BOTH(MT__M_LARGEST, MT__R_LARGEST));
    __m256 by = _mm256_and_ps(some, _mm256_div_ps(MT__BOTH(MT__C_BELOW, MT__K_SQUARE), x));
    __m256 r = _mm256_movehdup_ps(_mm256_mul_ps(by, inverse));
    __m256 f = _mm256_sqrt_ps(_mm256_mul_ps(_mm256_mul_ps(_mm256_set1_ps(bound), says), r));
    float  scales[2 * MT__GROUPS];

    f = _mm256_min_ps(f, _mm256_set1_ps(MT__LEAST_MOST));       /* of a NaN and another, that */
    __m256 floor = _mm256_mul_ps(_mm256_add_ps(f, _mm256_set1_ps(1)),
                                 _mm256_set1_ps(MT__CODE_UNIT));
    mt__code_sizes_store(to, by, f, _mm256_and_ps(floor, _mm256_movehdup_ps(some)));
    _mm256_storeu_ps(scales, _mm256_mul_ps(says, inverse));
    for (int g = 0; g < n; g++)
        memcpy(scale + 2 * g, scales + 2 * g, 2 * sizeof *scale);
}
#endif

#if defined(__x86_64__)
/* Asks for a group's elements of a plane. */
MT__INLINE void mt__prefetch_group(const void *plane, size_t elem, int64_t i)
{
    uintptr_t at = (uintptr_t)plane + (uintptr_t)i * elem;

    for (size_t line = 0; line < MT_STATES_GROUP * elem; line += 64)
        _mm_prefetch((const char *)(at + line), _MM_HINT_T0);
}

MT__INLINE void mt__adam8_prefetch(const mt__adam_span *s, int keep, mt_dtype g, int64_t i)
{
    mt__prefetch_group(s->hi, keep == MT__KEEP_F32 ? 4 : 2, i);
    mt__prefetch_group(s->codes.m, 1, i);
    mt__prefetch_group(s->codes.v, 1, i);
    mt__prefetch_group(s->grad, g == MT_F32 ? 4 : 2, i);
    _mm_prefetch((const char *)((uintptr_t)s->codes.scale + (uintptr_t)i / MT_STATES_GROUP * 8),
                 _MM_HINT_T0);
    if (keep == MT__KEEP_BF16)
        mt__prefetch_group(s->lo, 2, i);
    if (keep == MT__KEEP_LO8)
        mt__prefetch_group(s->codes.lo, 1, i);
    if (keep == MT__KEEP_F16)
        mt__prefetch_group(s->master, 4, i);
}
#endif

#endif
