/* sumsq_kernel.h — private to csrc/ops: one chunk of the sum, for each instruction set. */
#ifndef MT_SUMSQ_KERNEL_H
#define MT_SUMSQ_KERNEL_H

#include "sumsq.h"

typedef struct mt__sumsq_kernel {
    const char *name;
    int       (*runs)(void);
    /* Sum of squares of x[0..n), n <= MT_SUMSQ_CHUNK: rule 1 of sumsq.h. */
    double    (*square)(mt_dtype dt, const void *x, int64_t n);
    /* mt_accumulate's arithmetic on n <= MT_SUMSQ_CHUNK elements;
     * yields the new values' sum of squares. */
    double    (*accumulate)(mt_dtype dt, float *acc, void *grad, const void *add, int64_t n,
                            int from_grad);
} mt__sumsq_kernel;

/* Best first; the last runs everywhere and is the definition. */
#if defined(__x86_64__)
#define MT__SUMSQ_KERNELS 3
#else
#define MT__SUMSQ_KERNELS 1
#endif
extern const mt__sumsq_kernel mt__sumsq_kernels[MT__SUMSQ_KERNELS];

#endif
