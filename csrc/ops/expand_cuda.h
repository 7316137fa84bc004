/* expand_cuda.h — private to csrc/ops and its bindings: expand.h on a CUDA stream, to the same
 * bits. All memory is the device's. */
#ifndef MT_EXPAND_CUDA_H
#define MT_EXPAND_CUDA_H

#include "expand.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Launched on the stream whose handle it is (cudaStream_t). Yields NULL, or what went wrong. */
const char *mt__expand_cuda(uintptr_t handle, const mt_expand *x);

#ifdef __cplusplus
}
#endif
#endif
