/* adam8_kernel.h — private to csrc/optim: what the kernels for moments of 8 bits share. */
#ifndef MT_ADAM8_KERNEL_H
#define MT_ADAM8_KERNEL_H

#include "adam8_code.h"
#include "adam_kernel.h"
#include <math.h>

#define MT__ADAM8_AHEAD 1024             /* elements prefetched ahead: as many bytes as MT__ADAM_AHEAD's */

/* What a group's elements are multiplied by below the root, and the least that y may be: least * x + floor, x, y
 * and floor in units. */
typedef struct mt__code_size {
    float by_m, by_r, least, floor;
} mt__code_size;

/* bound: mt__adam_coef.code_bound. Writes both scales. Where the largest |m| is above what a scale says, all of the
 * group's are that much smaller. */
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

#if defined(__x86_64__)
/* mt__code_size_of, of both at once: most is { m, r }, neither a NaN. */
MT__INLINE void mt__code_size_set(mt__code_size *to, __m128 most, float bound, float *scale)
{
    const __m128 one = _mm_set_ss(1), above = _mm_setr_ps(MT__M_FINITE, MT__R_LARGEST, 0, 0);
    const __m128 largest = _mm_setr_ps(MT__M_LARGEST, MT__R_LARGEST, 0, 0);
    const __m128 squares = _mm_setr_ps(MT__C_BELOW, MT__K_SQUARE, 0, 0);
    const __m128 inverse = _mm_setr_ps(MT__C_INVERSE, MT__K_INVERSE, 0, 0);
    __m128 some = _mm_cmpge_ps(most, _mm_setr_ps(MT__M_LEAST, MT__R_LEAST, 1, 1));
    __m128 x = _mm_and_ps(some, _mm_min_ps(most, above)), says = _mm_min_ps(x, largest);
    __m128 by = _mm_and_ps(some, _mm_div_ps(squares, x)), r = _mm_mul_ps(by, inverse);
    __m128 f = _mm_sqrt_ss(_mm_mul_ss(_mm_mul_ss(_mm_set_ss(bound), says), _mm_shuffle_ps(r, r, 0x55)));

    f = _mm_min_ss(f, _mm_set_ss(MT__LEAST_MOST));              /* of a NaN and another, that */
    __m128 floor = _mm_mul_ss(_mm_add_ss(f, one), _mm_set_ss(MT__CODE_UNIT));
    floor = _mm_and_ps(floor, _mm_shuffle_ps(some, some, 0x55));
    _mm_storel_pi((__m64 *)scale, _mm_mul_ps(says, inverse));
    _mm_storeu_ps((float *)to, _mm_movelh_ps(by, _mm_unpacklo_ps(f, floor)));
}

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
