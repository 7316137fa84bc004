/* embedding_cuda.h — private to csrc/ops: embedding.h on a CUDA stream.
 * All memory is the device's. */
#ifndef MT_EMBEDDING_CUDA_H
#define MT_EMBEDDING_CUDA_H

#include "embedding.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Launched on the stream whose handle it is (cudaStream_t); tokens < 2^31. begins: [rows + 1],
 * chunks: [mt__embedding_chunks(e)], scratch. Yields NULL, or what went wrong. */
const char *mt__embedding_backward_cuda(uintptr_t handle, const mt_embedding *e, int32_t *begins,
                                        float *chunks);

/* fp32 numbers that the chunks' sums of rows of several chunks take:
 * two for each 256 tokens begun, times n. */
static inline int64_t mt__embedding_chunks(const mt_embedding *e)
{
    return 2 * ((e->tokens + MT_EMBEDDING_CHUNK - 1) / MT_EMBEDDING_CHUNK) * e->n;
}

#ifdef __cplusplus
}
#endif
#endif
