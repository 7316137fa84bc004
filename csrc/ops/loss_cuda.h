/* loss_cuda.h — private to csrc/ops: loss.h on a CUDA stream. All memory is the device's. */
#ifndef MT_LOSS_CUDA_H
#define MT_LOSS_CUDA_H

#include "loss.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Launched on the stream whose handle it is (cudaStream_t). Yields NULL, or what went wrong. */
const char *mt__cross_entropy_cuda(uintptr_t handle, const mt_cross_entropy *c);

#ifdef __cplusplus
}
#endif
#endif
