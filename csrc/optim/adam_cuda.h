/* adam_cuda.h — private to csrc/optim: the update on a CUDA stream. */
#ifndef MT_ADAM_CUDA_H
#define MT_ADAM_CUDA_H

#include "adam_coef.h"
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MT__ADAM_CUDA_MOST 36       /* tensors a launch takes: its table fits 4 KiB of arguments */

typedef struct mt__adam_cuda_tensor {
    void         *hi;
    void         *low;                  /* BF16: lo, int16. F16: master, fp32. F32: not looked at */
    float        *m, *v;
    const void   *grad;
    int64_t       n;
    int           kind;                 /* MT__ADAM_BF16_F32 ... */
    mt__adam_coef coef;
} mt__adam_cuda_tensor;

/* One step of n_tensors <= MT__ADAM_CUDA_MOST tensors in device memory, in one launch on the stream
 * whose handle it is (cudaStream_t). t is copied. Yields NULL, or what went wrong. */
const char *mt__adam_cuda(uintptr_t handle, const mt__adam_cuda_tensor *t, int n_tensors);

#ifdef __cplusplus
}
#endif
#endif
