/* sumsq_cuda.h — private to csrc/ops: the sum of squares on a CUDA stream. */
#ifndef MT_SUMSQ_CUDA_H
#define MT_SUMSQ_CUDA_H

#include "../core/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Launches on the stream whose handle it is (cudaStream_t). x: device, [n] dt. sums: device, one
 * fp64 for each chunk begun. out: device memory, or host memory registered with the device; written
 * by a kernel, so read it after an event recorded behind this call. Yields NULL, or what went
 * wrong. */
const char *mt__sumsq_cuda(uintptr_t handle, mt_dtype dt, const void *x, int64_t n,
                           double *sums, double *out);

#ifdef __cplusplus
}
#endif
#endif
