/* rope.h — rotary position embedding: pairs of numbers of each head,
 * turned by their token's angles.
 *
 * Letters: B batch, S sequence, h heads, D numbers in a head, of which the first R are turned.
 * A pair is (i, i + R/2), i < R/2; interleaved: (2i, 2i + 1).
 * With (a, b) a pair at (p, q) of a head:
 *
 *   out[p] = a * cos[p] - b * sin[p]          inverse:  a * cos[p] + b * sin[q]
 *   out[q] = b * cos[q] + a * sin[q]                    b * cos[q] - a * sin[p]
 *
 * Each product and sum is rounded to fp32, the result once more to dt: every device gives the same
 * bits. inverse is the transposed matrix, which backward needs. Numbers R to D-1 are copied.
 *
 * Aliasing: out may be x, element for element.
 * Source: Su et al. 2021, eq. 34.
 */
#ifndef MT_ROPE_H
#define MT_ROPE_H

#include "../core/dtype.h"
#include "../core/pool.h"

/* A tensor [B, S, heads, D] and where it goes: strides of batch, token and head, in elements. */
typedef struct mt_rope_part {
    const void *x;
    void       *out;
    int64_t     heads;               /* 0: no such part */
    int64_t     x_at[3], out_at[3];
} mt_rope_part;

enum { MT_ROPE_Q, MT_ROPE_K, MT_ROPE_V, MT_ROPE_PARTS };      /* V is copied only */

typedef struct mt_rope {
    mt_dtype     dt, angle_dt;       /* of cos and sin: dt or F32 */
    int          interleaved, inverse;
    int64_t      batch, seq, dim, rot;      /* batch * seq < 2^31; rot even, <= dim */
    const void  *cos, *sin;          /* [1 or B, S, R] */
    int64_t      cos_at[2], sin_at[2];      /* strides of batch (0: the same for all) and token */
    mt_rope_part part[MT_ROPE_PARTS];
} mt_rope;

void mt_rope_host(mt_pool *pool, const mt_rope *r);            /* pool may be NULL */

#endif
