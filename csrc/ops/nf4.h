/* nf4.h — weights made NF4 codes, to bitsandbytes' bits. What the codes stand for is in expand.h.
 *
 * Of each block of `group` neighbours w: scale = max |w|; v = w * (1 / scale), held to [-1, 1], in
 * fp32; the code says how many of the 15 halves between neighbours of MT_NF4_NUMBERS (expand.h) lie
 * below v. In a last block that is not whole v is w / scale. A scale below 1e-38 is taken for that.
 * Codes lie two in a byte, the first in the high bits; a last one alone has the code of 0 beside
 * it. A NaN has code 15 and makes its scale NaN.
 *
 * Source: quantize_4bit of bitsandbytes 0.50's "default" backend (Dettmers et al. 2023, "QLoRA").
 *
 * Threads: no state here; each chunk of blocks is one thread's.
 */
#ifndef MT_NF4_H
#define MT_NF4_H

#include "../core/dtype.h"
#include "../core/pool.h"

#define MT_NF4_GROUP_MOST 4096

/* w: n elements of the type, F32, BF16 or F16, dense. codes: (n + 1) / 2 bytes. scales: one for
 * each block. group: an even number, at most MT_NF4_GROUP_MOST. */
void mt_nf4_codes(mt_pool *pool, mt_dtype dtype, const void *w, int64_t n, int group,
                  uint8_t *codes, float *scales);

#endif
