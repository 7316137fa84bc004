/* expand.c — see expand.h. */
#include "expand.h"
#include "element.h"
#include "fp8.h"

#define CHUNK 4096           /* elements of NF4 and FP4 that one thread takes, an even number */

static const float nf4[16] = MT_NF4_NUMBERS, fp4[16] = MT_FP4_NUMBERS, e2m1[16] = MT_E2M1_NUMBERS;

/* ---- NF4, FP4 ---- */

static float block_scale(const mt_expand *x, int64_t block)
{
    float product;

    if (x->wide == NULL)
        return ((const float *)x->scales)[block];
    product = x->map[((const uint8_t *)x->scales)[block]] * x->wide[block / MT_EXPAND_WIDE];
    return product + *x->offset;
}

static void expand_four(void *arg, int64_t chunk)
{
    const mt_expand *x = arg;
    const uint8_t   *codes = x->codes;
    const float     *table = x->format == MT_EXPAND_NF4 ? nf4 : fp4;
    int64_t          i = chunk * CHUNK, n = x->rows * x->cols, end = n - i < CHUNK ? n : i + CHUNK;

    while (i < end) {
        int64_t block = i >> x->group_bits, last = (block + 1) << x->group_bits;
        float   scale = block_scale(x, block);

        for (; i < end && i < last; i++)
            mt__put(x->dtype, x->out, i,
                    table[i % 2 ? codes[i / 2] & 15 : codes[i / 2] >> 4] * scale);
    }
}

/* ---- INT8, FP8 ---- */

static void expand_int8(void *arg, int64_t r)
{
    const mt_expand *x = arg;
    const int8_t    *codes = (const int8_t *)x->codes + r * x->cols;
    float            scale = ((const float *)x->scales)[r] * (1.0f / 127.0f);

    for (int64_t c = 0; c < x->cols; c++)
        mt__put(x->dtype, x->out, r * x->cols + c, (float)codes[c] * scale);
}

/* Rows of all experts are one below the other, and so are their blocks of rows. */
static void expand_fp8(void *arg, int64_t r)
{
    const mt_expand *x = arg;
    const uint8_t   *codes = (const uint8_t *)x->codes + r * x->cols;
    const float     *scales = (const float *)x->scales + r / x->block_rows * x->blocks;

    for (int64_t c = 0; c < x->cols; c++)
        mt__put(x->dtype, x->out, r * x->cols + c,
                mt_fp8_value(codes[c]) * scales[c / x->block_cols]);
}

/* ---- MXFP4 ---- */

static float power(uint8_t code)
{
    union { uint32_t u; float f; } x = { .u = mt_expand_power_bits(code) };

    return x.f;
}

static void expand_mxfp4(void *arg, int64_t row)
{
    const mt_expand *x = arg;
    int64_t          e = row / x->rows, k = row % x->rows, groups = x->rows / MT_MXFP4_GROUP;
    const uint8_t   *codes = (const uint8_t *)x->codes + e * x->cols * x->rows / 2;
    const uint8_t   *scales = (const uint8_t *)x->scales + e * x->cols * groups;

    for (int64_t n = 0; n < x->cols; n++) {
        uint8_t both = codes[(n * x->rows + k) / 2];

        mt__put(x->dtype, x->out, row * x->cols + n, e2m1[k % 2 ? both >> 4 : both & 15] *
                power(scales[n * groups + k / MT_MXFP4_GROUP]));
    }
}

void mt_expand_codes(mt_pool *pool, const mt_expand *x)
{
    mt_expand copy = *x;

    switch (x->format) {
    case MT_EXPAND_INT8:
        mt_pool_run(pool, expand_int8, &copy, x->rows);
        break;
    case MT_EXPAND_FP8:
        mt_pool_run(pool, expand_fp8, &copy, x->rows);
        break;
    case MT_EXPAND_MXFP4:
        mt_pool_run(pool, expand_mxfp4, &copy, x->experts * x->rows);
        break;
    default:
        mt_pool_run(pool, expand_four, &copy, (x->rows * x->cols + CHUNK - 1) / CHUNK);
    }
}
