/* fp8.h — a matrix as codes of 8 bits with a scale for each row, and its transpose with a scale
 * for each column. The host's side is the definition.
 *
 * Letters: x [R,C], rows dense. Codes are E4M3 without infinities (F8E4M3, torch's float8_e4m3fn):
 * 4 bits of exponent, 3 of fraction; 448 is the largest, 2^-9 the smallest.
 *
 *   by rows      scale[r] = 2^e, e the least integer with max|x[r,:]| <= 448 * 2^e, at least -126
 *                codes[r,c] = code(x[r,c] * 2^-e)
 *   by columns   the same of x', in memory of its own: codes [C, wide], where behind column R-1
 *                there are zeros, since products want sums over multiples of 16
 *   code(v)      the nearest, ties to even; nothing is above 448 by then. -0 stays. NaN: 0x7f
 *
 * Scales are powers of two. So scaling rounds nothing, and what a code is off by depends neither on
 * who else is in its line nor on how the matrix lies, but for what comes to lie below 2^-6 (of the
 * line's largest: 2^-15): an element's code by rows and its code by columns have the same value.
 * A line of zeros has the scale 2^-126. A line with a NaN or an infinity has the scale NaN, and all
 * its codes are NaN's; so is whatever a product makes of it.
 *
 * Source: Micikevicius et al. 2022, "FP8 formats for deep learning".
 *
 * Threads: no state here; a pool's run is a pool's (pool.h). Each line is one chunk's alone.
 */
#ifndef MT_FP8_H
#define MT_FP8_H

#include "../core/dtype.h"
#include "../core/pool.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MT_FP8_MOST 448.0f
#define MT_FP8_NAN  0x7fu

typedef struct mt_fp8 {
    mt_dtype    dtype;                     /* of x: F32, BF16 or F16 */
    int64_t     rows, cols, stride;
    const void *x;
    uint8_t    *by_rows, *by_columns;      /* [R,C] dense, [C,wide] dense; NULL: not wanted */
    float      *row_scale, *column_scale;  /* [R], [C] */
    int64_t     wide;                      /* R or more */
} mt_fp8;

void mt_fp8_cast(mt_pool *pool, const mt_fp8 *f);      /* pool may be NULL */

#ifdef __CUDACC__
#define MT_FP8_INLINE __host__ __device__ static inline
#else
#define MT_FP8_INLINE static inline
#endif

/* |most|'s scale, given as the bits of fp32; what multiplies x is 1 / scale, also exact. */
MT_FP8_INLINE uint32_t mt_fp8_scale_bits(uint32_t most)
{
    int32_t e;

    if (most >= 0x7f800000u)
        return 0x7fc00000u;
    e = (int32_t)(most >> 23) - 8 + ((most & 0x7fffffu) > 0x600000u);     /* 448 is 1.75 * 2^8 */
    return (uint32_t)(e > 1 ? e : 1) << 23;
}

MT_FP8_INLINE uint32_t mt_fp8_inverse_bits(uint32_t scale)
{
    return scale >= 0x7f800000u ? scale : (254u << 23) - scale;
}

uint8_t mt_fp8_code(float v);
float   mt_fp8_value(uint8_t code);

#ifdef __cplusplus
}
#endif
#endif
