/* rope_cuda.h — private to csrc/ops and its binding: rope.h on a CUDA stream, to the host's bits.
 *
 * handle is a cudaStream_t; all pointers are device memory; there is a number at least.
 * Yields NULL, or what went wrong. */
#ifndef MT_ROPE_CUDA_H
#define MT_ROPE_CUDA_H

#include "rope.h"

#ifdef __cplusplus
extern "C" {
#endif

const char *mt__rope_cuda(uintptr_t handle, const mt_rope *r);

#ifdef __cplusplus
}
#endif
#endif
