/* adam8_cuda.h — private to csrc/optim: the update with moments of 8 bits on a CUDA stream. */
#ifndef MT_ADAM8_CUDA_H
#define MT_ADAM8_CUDA_H

#include "adam_coef.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MT__ADAM8_CUDA_MOST 30      /* tensors a launch takes: its table fits 4 KiB of arguments */

typedef struct mt__adam8_cuda_tensor {
    void         *hi;
    void         *low;                   /* BF16: lo, int16. LO8: lo, int8. F16: master, fp32 */
    void         *m, *v;                 /* int8, uint8 */
    float        *scale;
    const void   *grad;
    int64_t       n, first;
    int           kind;                  /* MT__ADAM8_BF16_F32 ... */
    mt__adam_coef coef;
} mt__adam8_cuda_tensor;

/* As mt__adam_cuda. */
const char *mt__adam8_cuda(uintptr_t handle, const mt__adam8_cuda_tensor *t, int n_tensors);

#ifdef __cplusplus
}
#endif
#endif
