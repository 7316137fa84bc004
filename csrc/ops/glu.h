/* glu.h — gated activations, forward and backward, and the sum over tokens.
 * The host's side is the definition.
 *
 * Letters: T tokens (rows), I intermediate (n). Matrices are [T,I], rows dense,
 * `_stride` elements apart.
 *
 *   h     = round(a(gate)) * u(up)    rounded once more; the inner rounding is transformers' own
 *   dgate = dh * u(up) * a'(gate)
 *   dup   = dh * a(gate) * u'(up)     a not rounded here
 *
 * With s(v) = 1 / (1 + exp(-v)), made from exp(-|v|) so that neither end overflows:
 *   SILU       a = x s(x)
 *   GELU_TANH  a = x s(2 sqrt(2/pi) (x + 0.044715 x^3)),
 *              which is x/2 (1 + tanh(...)) without its cancellation
 *   GELU       a = x/2 erfc(-x / sqrt 2)
 *   CLAMPED    a = x s(1.702 x), x = min(gate, 7); u = clamp(up, -7, 7) + 1: GPT-OSS. NaN stays.
 * u(up) = up and u' = 1 but for CLAMPED; slopes at a clamp's border are those of its inside, as
 * torch's. All in fp32. Source: Shazeer 2020, eq. 5 and 6; Hendrycks & Gimpel 2016;
 * transformers' GptOssExperts.
 */
#ifndef MT_GLU_H
#define MT_GLU_H

#include "../core/dtype.h"
#include "../core/pool.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MT_SILU, MT_GELU_TANH, MT_GELU, MT_CLAMPED, MT_ACTS };

#define MT_CLAMP       7.0f
#define MT_CLAMP_SLOPE 1.702f

/* F32, BF16 or F16 throughout. Forward reads gate and up and writes h; backward reads dh too, and h
 * may be NULL. dh and h are dense. An output may be an input of the same place (dgate over gate, h
 * over dh): each element is read before it is written. No other overlap. */
typedef struct mt_glu {
    mt_dtype    dtype;
    int         act;
    int64_t     rows, n;
    const void *dh, *gate, *up;
    void       *dgate, *dup, *h;
    int64_t     gate_stride, up_stride, dgate_stride, dup_stride;
} mt_glu;

void mt_glu_forward (mt_pool *pool, const mt_glu *g);     /* pool may be NULL */
void mt_glu_backward(mt_pool *pool, const mt_glu *g);

/* out[n] = sum over rows of x[T,n], in fp32 in one order, rounded to out_dt once:
 *   1. segments of 256 rows; in a segment, lane l of 8 adds rows l, l+8, ... in order, from 0;
 *      the lanes are folded: lane[l] += lane[l+4], then 2, 1.
 *   2. the segments' sums are added by the same rule, as one segment of any length.
 * With one segment step 2 is left out. Only additions: CUDA gives the same bits. */
#define MT_SUM_ROWS  256
#define MT_SUM_LANES 8

typedef struct mt_columns {
    mt_dtype    dtype, out_dtype;
    int64_t     rows, n, stride;
    const void *x;
    void       *out;
} mt_columns;

void mt_column_sum(mt_pool *pool, const mt_columns *c);

#ifdef __cplusplus
}
#endif
#endif
