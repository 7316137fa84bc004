/* norm_cuda.h — private to csrc/ops and its binding: the norms of norm.h on a CUDA stream.
 *
 * handle is a cudaStream_t; all pointers are device memory. Yields NULL, or what went wrong. */
#ifndef MT_NORM_CUDA_H
#define MT_NORM_CUDA_H

#include "norm.h"

#ifdef __cplusplus
extern "C" {
#endif

const char *mt__norm_forward_cuda (uintptr_t handle, const mt_norm *norm, const mt_norm_ahead *a);
const char *mt__norm_backward_cuda(uintptr_t handle, const mt_norm *norm, const mt_norm_back *b);
/* The same with codes of y (fp8.h) in its place, [R,n] and a scale for each row, to the bits of a
 * cast of y. Whether there is a kernel: of RMS norms of bf16 without add, whose rows are whole
 * vectors. */
int         mt__norm_takes_codes_cuda(const mt_norm *norm, const mt_norm_ahead *a);
const char *mt__norm_codes_cuda(uintptr_t handle, const mt_norm *norm, const mt_norm_ahead *a,
                                uint8_t *codes, float *scale);
/* Scratch for b: as mt_norm_partials, for these kernels. Depends on sizes,
 * strides and alignment. */
int64_t     mt__norm_partials_cuda(const mt_norm *norm, const mt_norm_back *b);

#ifdef __cplusplus
}
#endif
#endif
