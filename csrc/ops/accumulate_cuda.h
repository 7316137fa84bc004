/* accumulate_cuda.h — private to csrc/ops: micro-batch sums on a CUDA stream. */
#ifndef MT_ACCUMULATE_CUDA_H
#define MT_ACCUMULATE_CUDA_H

#include "../core/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

/* mt_accumulate of sumsq.h, launched on the stream whose handle it is (cudaStream_t); same bits.
 * acc, grad, add: device, [n]; acc NULL for F32 and F64. sums, out: as for mt__sumsq_cuda. Yields
 * NULL, or what went wrong. */
const char *mt__accumulate_cuda(uintptr_t handle, mt_dtype dt, float *acc, void *grad,
                                const void *add, int64_t n, int from_grad, double *sums,
                                double *out);

#ifdef __cplusplus
}
#endif
#endif
