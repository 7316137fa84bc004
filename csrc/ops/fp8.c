/* fp8.c — see fp8.h. */
#include "fp8.h"
#include "element.h"
#include <string.h>

#define COLUMNS 64           /* of a chunk by columns: what a row has of them is a line of cache */

typedef union bits { float f; uint32_t u; } bits;

/* ---- one number ---- */

uint8_t mt_fp8_code(float v)
{
    bits     x = { .f = v };
    uint32_t sign = x.u >> 24 & 0x80u, a = x.u & 0x7fffffffu;

    if (a > 0x7f800000u)
        return MT_FP8_NAN;
    if (a >= 0x43e00000u)                               /* 448 */
        return (uint8_t)(sign | 0x7eu);
    if (a < 0x3c800000u) {                              /* 2^-6: steps of 2^-9, fp32's at 2^14 */
        bits sum = { .u = a };

        sum.f += 16384.0f;
        return (uint8_t)(sign | (sum.u - 0x46800000u));
    }
    a += 0x7ffffu + (a >> 20 & 1u);
    return (uint8_t)(sign | ((a >> 20) - (120u << 3)));
}

float mt_fp8_value(uint8_t code)
{
    uint32_t exponent = code >> 3 & 15u, fraction = code & 7u;
    bits     x = { .u = (exponent + 120u) << 23 | fraction << 20 };

    if ((code & 0x7fu) == MT_FP8_NAN)
        x.u = 0x7fc00000u;
    else if (exponent == 0)
        x.f = (float)fraction * 0x1p-9f;
    x.u |= (uint32_t)(code & 0x80u) << 24;
    return x.f;
}

/* ---- by rows ---- */

static uint32_t larger(uint32_t most, float x)          /* bits of magnitudes order as those do */
{
    bits b = { .f = x };

    b.u &= 0x7fffffffu;
    return b.u > most ? b.u : most;
}

static void cast_row(void *arg, int64_t r)
{
    const mt_fp8 *f = arg;
    uint32_t      most = 0;
    bits          scale, inverse;

    for (int64_t c = 0; c < f->cols; c++)
        most = larger(most, mt__get(f->dtype, f->x, r * f->stride + c));
    scale.u = mt_fp8_scale_bits(most);
    inverse.u = mt_fp8_inverse_bits(scale.u);
    for (int64_t c = 0; c < f->cols && f->by_rows != NULL; c++)
        f->by_rows[r * f->cols + c] =
            mt_fp8_code(mt__get(f->dtype, f->x, r * f->stride + c) * inverse.f);
    f->row_scale[r] = scale.f;
}

/* ---- rows that are balanced ---- */

void mt_fp8_shift(const float *x_scale, const float *dy_scale, int64_t rows, int8_t *shift)
{
    unsigned x[256] = { 0 }, dy[256] = { 0 };
    int      typical_x, typical_dy, any = 0;

    for (int64_t r = 0; r < rows; r++) {
        x[mt_fp8_exponent(x_scale[r])]++;
        dy[mt_fp8_exponent(dy_scale[r])]++;
    }
    typical_x = mt_fp8_typical(x);
    typical_dy = mt_fp8_typical(dy);
    for (int64_t r = 0; r < rows; r++) {
        shift[r] = (int8_t)mt_fp8_shift_of(mt_fp8_exponent(x_scale[r]),
                                           mt_fp8_exponent(dy_scale[r]), typical_x, typical_dy);
        any |= shift[r] != 0;
    }
    shift[rows] = (int8_t)any;
}

/* ---- by columns ---- */

static float balanced(const mt_fp8 *f, int64_t r, int64_t c)
{
    return mt__get(f->dtype, f->x, r * f->stride + c) * mt_fp8_factor(f->shift, f->sign, r);
}

static void cast_columns(void *arg, int64_t chunk)
{
    const mt_fp8 *f = arg;
    int64_t       first = chunk * COLUMNS;
    int64_t       n = f->cols - first < COLUMNS ? f->cols - first : COLUMNS;
    uint32_t      most[COLUMNS] = { 0 };
    bits          scale, inverse[COLUMNS];

    for (int64_t r = 0; r < f->rows; r++)
        for (int64_t c = 0; c < n; c++)
            most[c] = larger(most[c], balanced(f, r, first + c));
    for (int64_t c = 0; c < n; c++) {
        scale.u = mt_fp8_scale_bits(most[c]);
        inverse[c].u = mt_fp8_inverse_bits(scale.u);
        f->column_scale[first + c] = scale.f;
        memset(f->by_columns + (first + c) * f->wide + f->rows, 0, (size_t)(f->wide - f->rows));
    }
    for (int64_t r = 0; r < f->rows; r++)
        for (int64_t c = 0; c < n; c++)
            f->by_columns[(first + c) * f->wide + r] =
                mt_fp8_code(balanced(f, r, first + c) * inverse[c].f);
}

void mt_fp8_cast(mt_pool *pool, const mt_fp8 *f)
{
    mt_fp8 copy = *f;

    if (f->row_scale != NULL)
        mt_pool_run(pool, cast_row, &copy, f->rows);
    if (f->by_columns != NULL)
        mt_pool_run(pool, cast_columns, &copy, (f->cols + COLUMNS - 1) / COLUMNS);
}

void mt_fp8_recast(mt_pool *pool, const mt_fp8 *f)
{
    mt_fp8 copy = *f;

    copy.by_rows = NULL;
    copy.row_scale = NULL;
    if (f->shift[f->rows] != 0)
        mt_fp8_cast(pool, &copy);
}
