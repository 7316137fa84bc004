/* fp8_cuda.h — private to csrc/ops and its bindings: fp8.h on a CUDA stream, to the same bits,
 * and what is left of a product of codes where cublasLt scales no rows. All memory is the
 * device's. */
#ifndef MT_FP8_CUDA_H
#define MT_FP8_CUDA_H

#include "fp8.h"
#include "gemm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Launched on the stream whose handle it is (cudaStream_t). They yield NULL, or what went wrong. */
const char *mt__fp8_cast_cuda  (uintptr_t handle, const mt_fp8 *f);
const char *mt__fp8_recast_cuda(uintptr_t handle, const mt_fp8 *f);
const char *mt__fp8_shift_cuda (uintptr_t handle, const float *x_scale, const float *dy_scale,
                                int64_t rows, int8_t *shift);

/* c from sums [M,N] dense, of c's type: gemm.h's formula. sums may be c's own memory. */
const char *mt__fp8_finish_cuda(uintptr_t handle, const mt_gemm *g, const void *sums, float alpha);

#ifdef __cplusplus
}
#endif
#endif
