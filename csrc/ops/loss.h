/* loss.h — cross entropy of rows of logits, and their gradient in place.
 * The host's side is the definition.
 *
 * Letters: R rows, V vocabulary (n), y a row's label, a smoothing.
 *
 *   l    = softcap * tanh(x / softcap), or x where softcap is 0
 *   m    = max l;  s = sum exp(l - m);  lse = m + log s
 *   loss = (log s + (m - l[y])) + a * (l[y] - mean l) + z_loss * lse^2
 *   dx   = scale * (exp(l - m) / s * (1 + 2 z_loss lse) - a/V - (1 - a) [at y])
 *          * (1 - tanh(x / softcap)^2)
 *
 *   logits in/out [R,V] rows dense, `stride` elements apart;
 *   dx is written over x where scale is given
 *   labels in [R]      scale in, one fp32 number where the logits are, or NULL
 *   loss   out [R] fp32     lse out [R] fp32
 * A row whose label is `ignore`: loss, lse and dx are 0, its logits are not read. All arithmetic is
 * fp32. Order: the host adds V numbers in 256 lanes, lane l those at l, l+256, ..., then folds the
 * lanes by halves; CUDA in as many lanes as a block has threads, each with a maximum of its own. So
 * their last bits differ. A label outside [0, V): the door refuses it on the host; on CUDA loss,
 * lse and dx are NaN. Source: Szegedy et al. 2016, section 7 (smoothing); de Brebisson & Vincent
 * 2016 (z-loss); Gemma 2 (soft cap).
 */
#ifndef MT_LOSS_H
#define MT_LOSS_H

#include "../core/dtype.h"
#include "../core/pool.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_cross_entropy {
    mt_dtype       dtype;        /* of the logits: F32, BF16 or F16 */
    int64_t        rows, n, stride, ignore;
    void          *logits;
    const int64_t *labels;
    const float   *scale;
    float         *loss, *lse;
    float          softcap, smoothing, z_loss;
} mt_cross_entropy;

void mt_cross_entropy_rows(mt_pool *pool, const mt_cross_entropy *c);  /* pool may be NULL */

#ifdef __cplusplus
}
#endif
#endif
