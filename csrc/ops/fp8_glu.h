/* fp8_glu.h — gated activations of which only codes are written: glu.h's results, rounded to
 * bf16, as fp8.h makes codes of them. The host's side is the definition, by those two.
 *
 * Letters: T tokens (rows), I intermediate.
 *
 *   forward    h by rows [T,I], of gate and up
 *   backward   d = dgate | dup by rows [T,2I] and by columns [2I,wide], and h by columns [I,wide],
 *              of dh, gate and up; of h scales of rows too, without codes
 *   recast     d or h by columns anew, with a shift of rows (fp8.h); where that is 0 nothing
 *
 * What a product of codes reads, so that 16 bits of it need not be written and read again.
 *
 * Threads: no state here; a pool's run is a pool's (pool.h).
 */
#ifndef MT_FP8_GLU_H
#define MT_FP8_GLU_H

#include "fp8.h"
#include "glu.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_fp8_glu {
    mt_glu glu;      /* BF16; its outputs are not looked at */
    mt_fp8 h, d;     /* their x is not looked at. forward: h by rows alone. recast: one of them */
} mt_fp8_glu;

/* scratch, bf16: [T,I] in forward, [T,3I] in the others. pool may be NULL. */
void mt_fp8_glu_forward (mt_pool *pool, const mt_fp8_glu *f, void *scratch);
void mt_fp8_glu_backward(mt_pool *pool, const mt_fp8_glu *f, void *scratch);
void mt_fp8_glu_recast  (mt_pool *pool, const mt_fp8_glu *f, void *scratch);

/* The same on the CUDA stream whose handle it is (cudaStream_t), to the bits of glu.h and fp8.h
 * there, where SiLU's gate is not below -87: its activation is 0 then. n is a multiple of 16;
 * rows of dh, gate and up begin at multiples of 16 bytes. They yield NULL, or what went wrong. */
const char *mt__fp8_glu_forward_cuda (uintptr_t handle, const mt_fp8_glu *f);
const char *mt__fp8_glu_backward_cuda(uintptr_t handle, const mt_fp8_glu *f);
const char *mt__fp8_glu_recast_cuda  (uintptr_t handle, const mt_fp8_glu *f);

#ifdef __cplusplus
}
#endif
#endif
