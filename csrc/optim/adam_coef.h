/* adam_coef.h — private to csrc/optim: what every kernel of the update is given,
 * in C and in CUDA. */
#ifndef MT_ADAM_COEF_H
#define MT_ADAM_COEF_H

#include <stdint.h>

#define MT__M_SMALLEST 0x1p-100f         /* below: stored as zero */
#define MT__V_SMALLEST 0x1p-120f

/* A tensor's hyper-parameters, ready for use in every element. */
typedef struct mt__adam_coef {
    float g_scale;                       /* clip; -clip to maximize: -g * clip has the same bits */
    float one_minus_b1, one_minus_b2;
    float rsqrt_bc2, eps;
    float lr_wd, lr_bc1;
    float code_bound;                    /* see adam8_code.h, as the next */
    uint32_t seed[2];
} mt__adam_coef;

/* weight type, gradient type */
#define MT__ADAM_KIND_MAP(X) X(F32, F32) X(BF16, BF16) X(BF16, F32) X(F16, F16) X(F16, F32)

#define MT__ADAM_KIND_ENUM(w, g) MT__ADAM_##w##_##g,
enum { MT__ADAM_KIND_MAP(MT__ADAM_KIND_ENUM) MT__ADAM_KINDS };
#undef MT__ADAM_KIND_ENUM

/* The same with moments of 8 bits: how the weight is kept, gradient type. */
#define MT__ADAM8_KIND_MAP(X) \
    X(F32, F32) X(BF16, BF16) X(BF16, F32) X(LO8, BF16) X(LO8, F32) X(SR, BF16) X(SR, F32) \
    X(F16, F16) X(F16, F32)

#define MT__ADAM8_KIND_ENUM(w, g) MT__ADAM8_##w##_##g,
enum { MT__ADAM8_KIND_MAP(MT__ADAM8_KIND_ENUM) MT__ADAM8_KINDS };

/* How a weight is kept; the first three are mt_dtype's. */
enum { MT__KEEP_F32, MT__KEEP_BF16, MT__KEEP_F16, MT__KEEP_LO8, MT__KEEP_SR };
#undef MT__ADAM8_KIND_ENUM

#endif
