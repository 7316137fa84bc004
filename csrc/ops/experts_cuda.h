/* experts_cuda.h — private to csrc/ops: experts.h on a CUDA stream. All memory is the device's */
#ifndef MT_EXPERTS_CUDA_H
#define MT_EXPERTS_CUDA_H

#include "experts.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Launched on the stream whose handle it is (cudaStream_t). They yield NULL, or what went wrong. */
const char *mt__sum_rows_cuda      (uintptr_t handle, const mt_row_sums *s);
const char *mt__gates_forward_cuda (uintptr_t handle, const mt_gates *g);
const char *mt__gates_backward_cuda(uintptr_t handle, const mt_gates *g);

#ifdef __cplusplus
}
#endif

#endif
