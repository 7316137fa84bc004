/* element.h — private to csrc/ops: CPU kernels read and write fp32,
 * bf16 or fp16 one element at a time. */
#ifndef MT_ELEMENT_H
#define MT_ELEMENT_H

#include "../core/dtype.h"

static inline float mt__get(mt_dtype dt, const void *x, int64_t i)
{
    return dt == MT_F32  ? ((const float *)x)[i]
         : dt == MT_BF16 ? mt_bf16_to_f32(((const uint16_t *)x)[i])
                         : mt_f16_to_f32(((const uint16_t *)x)[i]);
}

/* Rounded to nearest, ties to even. */
static inline void mt__put(mt_dtype dt, void *x, int64_t i, float value)
{
    if (dt == MT_F32)
        ((float *)x)[i] = value;
    else
        ((uint16_t *)x)[i] = dt == MT_BF16 ? mt_f32_to_bf16(value) : mt_f32_to_f16(value);
}

/* The value that mt__put would leave. */
static inline float mt__rounded(mt_dtype dt, float value)
{
    return dt == MT_F32  ? value
         : dt == MT_BF16 ? mt_bf16_to_f32(mt_f32_to_bf16(value))
                         : mt_f16_to_f32(mt_f32_to_f16(value));
}

#endif
