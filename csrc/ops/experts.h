/* experts.h — rows of a mixture of experts: to their experts and back, and the experts' gates.
 *
 * Letters: T tokens, k experts of each, R = T k rows, sorted by expert; H hidden, I (n) an expert's
 * intermediate size, E experts. Dense and row-major throughout. dt: F32, BF16 or F16;
 * arithmetic is fp32.
 *
 * Sums of rows:
 *
 *   out[t] = base[t] + factor * sum over j of weights[t,j] * x[place[t k + j]]
 *
 * j in order from 0, products rounded to fp32 before they are added, one rounding to dt at the end:
 * the same bits on CUDA. With k = 1 and neither weights nor base it is a gather.
 *
 * Gates. g and u of row r lie side by side in gu [R, 2 I], halves or interleaved (g0 u0 g1 u1 ...),
 * with bias[expert[r]] added where there is one; a, u(), their slopes and CLAMPED as in glu.h:
 *
 *   h          = round(a(g)) * u(u)                                   rounded
 *   dweight[c] = sum over i of dact[r,i] * h[r,i]     c = order[r]    fp32
 *   dg, du     = glu's gradients for dh = weights[c] * dact[r]
 *   h          = weights[c] * h                                       rounded again
 *
 * dact is the gradient for a weight of 1, so that what an expert gives is never made again: its
 * product with the gradient of its weighted sum is that of dact with h. Order of the sum, here:
 * lane l of 8 adds numbers l, l+8, ... and the lanes are folded (4, 2, 1); CUDA has another, as
 * fixed.
 *
 * order is a permutation: each dweights[c] has one row that writes it, and that makes it a fixed
 * sum. Whoever sorts rows has one at hand; it is not checked here that no number comes twice.
 */
#ifndef MT_EXPERTS_H
#define MT_EXPERTS_H

#include "../core/dtype.h"
#include "../core/pool.h"

#ifdef __cplusplus
extern "C" {
#endif

/* x: any number of rows [.., n]. */
typedef struct mt_row_sums {
    mt_dtype       dtype;
    int64_t        tokens, k, n;
    const void    *x;
    const int64_t *place;            /* [T k] rows of x */
    const float   *weights;          /* [T k]; NULL: ones */
    const void    *base;             /* [T,n]; NULL: none. May be out. */
    float          factor;
    void          *out;              /* [T,n] */
} mt_row_sums;

/* dgu may be gu, h may be dact: each number is read before its place is written. */
typedef struct mt_gates {
    mt_dtype       dtype;
    int            act, interleaved;
    int64_t        rows, n;
    const void    *gu;               /* [R, 2 n] */
    const void    *bias;             /* [E, 2 n]; NULL: none */
    const int32_t *expert;           /* [R]; with bias only */
    void          *h;                /* [R,n] */
    /* backward only */
    const void    *dact;             /* [R,n] */
    const float   *weights;          /* [R]; NULL: ones, and no dweights */
    const int64_t *order;            /* [R] a permutation; NULL: r itself */
    void          *dgu;              /* [R, 2 n] */
    float         *dweights;         /* [R] */
} mt_gates;

/* Host. pool may be NULL. */
void mt_sum_rows      (mt_pool *pool, const mt_row_sums *s);
void mt_gates_forward (mt_pool *pool, const mt_gates *g);
void mt_gates_backward(mt_pool *pool, const mt_gates *g);

#ifdef __cplusplus
}
#endif

#endif
