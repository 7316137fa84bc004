/* norm.h — RMS and layer normalisation of rows, forward and backward, with the residual fused in.
 *
 * Letters: R rows, n numbers in a row. dt: F32, BF16 or F16; arithmetic is fp32.
 *
 *   s    = x + add, rounded to dt; x itself without add
 *   mean = sum(s) / n (layer norm), 0 (RMS norm)
 *   rstd = 1 / sqrt(sum((s - mean)^2) / n + eps)
 *   hat  = (s - mean) * rstd, rounded to dt if round_first
 *   y    = hat * (weight + plus) + bias, rounded to dt
 *
 * Backward, with g = dy * (weight + plus) and hat not rounded:
 *
 *   dx      = rstd * (g - mean(g) - hat * mean(g * hat)) + add, rounded to dt;
 *             RMS norm has no mean(g)
 *   dweight = sum over rows of dy * hat,  dbias = sum over rows of dy: in fp32, rounded to dt
 *   y       again, as forward gave it
 *
 * Order of sums, here: 128 lanes of a row, lane l adds numbers l, l+128, ... and the lanes are
 * folded (64, 32, ... 1); columns are added over the rows of a block in order, then over blocks in
 * order. The CUDA kernels have another order, as fixed (norm_cuda.cu).
 *
 * Aliasing: dx may be dy (the same rows); y, s and else dx may not overlap an input.
 * Source: Zhang & Sennrich 2019, eq. 4; Ba et al. 2016, eq. 4.
 */
#ifndef MT_NORM_H
#define MT_NORM_H

#include "../core/dtype.h"
#include "../core/pool.h"

/* Where the rows of a strided tensor [.., n] begin: row ((i0 * size[1]) + i1) * size[2] + i2 is
 * i0 * stride[0] + i1 * stride[1] + i2 * stride[2] elements behind the first. */
#define MT_ROWS_DIMS 3
typedef struct mt_rows {
    int64_t size[MT_ROWS_DIMS], stride[MT_ROWS_DIMS];
} mt_rows;

typedef struct mt_norm {
    mt_dtype    dt;
    int         centred;             /* 1: layer norm, 0: RMS norm */
    int         round_first;
    float       plus, eps;
    int64_t     rows, n;             /* rows < 2^31 */
    const void *weight, *bias;       /* [n] dt; NULL: ones, zeros */
} mt_norm;

typedef struct mt_norm_ahead {
    const void *x;                   /* rows as x_rows says */
    mt_rows     x_rows;
    const void *add;                 /* [R,n] dt; NULL: none */
    void       *y;                   /* [R,n] dt */
    void       *s;                   /* [R,n] dt; with add only */
    float      *mean;                /* [R]; layer norm only */
    float      *rstd;                /* [R] */
} mt_norm_ahead;

typedef struct mt_norm_back {
    const void  *dy, *s;
    mt_rows      dy_rows, s_rows, dx_rows;
    const void  *add;                /* [R,n] dt; NULL: none */
    const float *mean, *rstd;        /* [R]; mean: layer norm only */
    void        *dx;
    void        *dweight, *dbias;    /* [n] dt; NULL: not wanted */
    void        *y;                  /* [R,n] dt; NULL: not wanted */
    float       *partial;            /* scratch: mt_norm_partials() of them */
} mt_norm_back;

/* Host. pool may be NULL. */
void    mt_norm_forward (mt_pool *pool, const mt_norm *norm, const mt_norm_ahead *a);
void    mt_norm_backward(mt_pool *pool, const mt_norm *norm, const mt_norm_back *b);
int64_t mt_norm_partials(const mt_norm *norm);       /* at least 1 */

#endif
