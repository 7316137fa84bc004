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
 * A weight gradient sums over rows (tokens), where one that is far larger than the rest takes their
 * bits in every column, and may count for nothing itself: of x the first token's massive
 * activation, of dy zeros. So rows of its operands are balanced, by powers of two, before codes by
 * columns are made: row r of x is multiplied by 2^-shift[r], and row r of dy by 2^shift[r].
 *
 *   gap(r)    the exponent of row r's scale, less the largest that more than a quarter of the rows
 *             have or exceed; rows of zeros, and with a NaN or an infinity, do not count there
 *   shift[r]  0 where neither gap is above 8, or a row is not finite; else ceil((gx - gd) / 2); gx
 *             where dy's row is zeros, and -gd where x's is; at most 100 in magnitude
 *
 * Then both rows are (gx + gd) / 2 above the rest, of which codes lose nothing up to 2^11: with
 * gd = 0 that is a token of x 2^22 times as large.
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
    float      *row_scale, *column_scale;  /* [R], wanted alone too; [C] */
    int64_t     wide;                      /* R or more */
    const int8_t *shift;                   /* [R+1], see mt_fp8_shift; NULL: zeros */
    int         sign;                      /* by columns, row r is times 2^(sign shift[r]) */
} mt_fp8;

void mt_fp8_cast(mt_pool *pool, const mt_fp8 *f);      /* pool may be NULL */

/* shift [R+1] from scales of rows [R]; the last says whether any of the others is not 0. */
void mt_fp8_shift(const float *x_scale, const float *dy_scale, int64_t rows, int8_t *shift);

/* Codes by columns with f's shift, in the place of those without; where all are 0 these stay. */
void mt_fp8_recast(mt_pool *pool, const mt_fp8 *f);

#define MT_FP8_GAP   8        /* up to here rows are not balanced */
#define MT_FP8_SHIFT 100      /* the most */

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

/* Of a scale: its exponent with fp32's bias; 1: of a row of zeros; 255: of one not finite. */
MT_FP8_INLINE int mt_fp8_exponent(float scale)
{
    union { float f; uint32_t u; } bits = { scale };

    return (int)(bits.u >> 23 & 255u);
}

/* The largest exponent that more than a quarter of rows have or exceed; count: rows by exponent. */
MT_FP8_INLINE int mt_fp8_typical(const unsigned *count)
{
    int64_t n = 0, met = 0;
    int     e;

    for (e = 2; e < 255; e++)
        n += count[e];
    for (e = 254; e > 2; e--)
        if ((met += count[e]) * 4 > n)
            break;
    return e;
}

/* Of one row, from the exponents of both and what is typical of each. */
MT_FP8_INLINE int mt_fp8_shift_of(int x, int dy, int typical_x, int typical_dy)
{
    int gx = x - typical_x, gd = dy - typical_dy, sum = gx - gd;
    int shift = (sum + (sum > 0)) / 2;                    /* ceil: C's division goes towards 0 */

    if (x == 255 || dy == 255 || (gx <= MT_FP8_GAP && gd <= MT_FP8_GAP))
        return 0;
    if (x == 1 || dy == 1)
        shift = dy == 1 ? gx : -gd;
    return shift > MT_FP8_SHIFT ? MT_FP8_SHIFT : shift < -MT_FP8_SHIFT ? -MT_FP8_SHIFT : shift;
}

/* What row r is multiplied by. */
MT_FP8_INLINE float mt_fp8_factor(const int8_t *shift, int sign, int64_t r)
{
    union { uint32_t u; float f; } bits = { 127u << 23 };

    if (shift != NULL)
        bits.u = (uint32_t)(127 + sign * shift[r]) << 23;
    return bits.f;
}

uint8_t mt_fp8_code(float v);
float   mt_fp8_value(uint8_t code);

#ifdef __cplusplus
}
#endif
#endif
