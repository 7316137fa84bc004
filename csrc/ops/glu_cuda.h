/* glu_cuda.h — private to csrc/ops: glu.h on a CUDA stream. All memory is the device's. */
#ifndef MT_GLU_CUDA_H
#define MT_GLU_CUDA_H

#include "glu.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Launched on the stream whose handle it is (cudaStream_t). They yield NULL, or what went wrong. */
const char *mt__glu_forward_cuda (uintptr_t handle, const mt_glu *g);
const char *mt__glu_backward_cuda(uintptr_t handle, const mt_glu *g);

/* sums: [segments, n] fp32 for the segments' sums; not looked at when there is one segment. */
const char *mt__column_sum_cuda(uintptr_t handle, const mt_columns *c, float *sums);

#ifdef __cplusplus
}
#endif
#endif
