/* adam_scalar.h — private to csrc/optim: one element's gradient and weight in a span,
 * for the definitions. */
#ifndef MT_ADAM_SCALAR_H
#define MT_ADAM_SCALAR_H

#include "adam_kernel.h"

static inline float load_grad(const mt__adam_span *s, mt_dtype g, int64_t i)
{
    if (g == MT_F32)
        return ((const float *)s->grad)[i];
    if (g == MT_BF16)
        return mt_bf16_to_f32(((const uint16_t *)s->grad)[i]);
    return mt_f16_to_f32(((const uint16_t *)s->grad)[i]);
}

static inline float load_weight(const mt__adam_span *s, mt_dtype w, int64_t i)
{
    if (w == MT_F32)
        return ((const float *)s->hi)[i];

    uint16_t hi = ((const uint16_t *)s->hi)[i];
    if (w == MT_BF16)
        return mt__split_value(hi, s->lo[i]);
    return hi == mt_f32_to_f16(s->master[i]) ? s->master[i] : mt_f16_to_f32(hi);
}

static inline void store_weight(const mt__adam_span *s, mt_dtype w, int64_t i, float p)
{
    if (w == MT_F32) {
        ((float *)s->hi)[i] = p;
    } else if (w == MT_BF16) {
        mt__split_store(p, (uint16_t *)s->hi + i, s->lo + i);
    } else {
        s->master[i] = p;
        ((uint16_t *)s->hi)[i] = mt_f32_to_f16(p);
    }
}

#endif
