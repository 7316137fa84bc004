/* sumsq.h — sum of squares of a gradient, in one stated order,
 * so that every device gives the same bits.
 *
 *   s = sum_i x[i]^2, in fp64. The square of an fp32, bf16 or fp16 number is exact in fp64.
 *   1. chunks of 8192 elements; in a chunk, lane l of 256 adds elements l, l+256, ... in order;
 *      the 256 lanes are folded: lane[l] += lane[l+128], then 64, 32, ... 1.
 *   2. the chunk sums are added by the same rule (256 lanes, strided, folded), as one array of any
 *      length.
 * fp64 inputs are squared in fp64 (rounded once).
 * Who has a part of x that begins and ends at chunks makes the sums of these chunks; all of x's,
 * added by rule 2, are s, whoever made which.
 */
#ifndef MT_SUMSQ_H
#define MT_SUMSQ_H

#include "../core/dev.h"
#include "../core/pool.h"

#define MT_SUMSQ_CHUNK 8192
#define MT_SUMSQ_LANES 256

/* Host: pool may be NULL (this thread alone). 0 for n == 0. dt: F32, BF16, F16, F64. */
double mt_sumsq_host(mt_pool *pool, mt_dtype dt, const void *x, int64_t n);

/* The same in two halves. chunks: sums[c] is chunk c's, of MT_SUMSQ_CHUNKS(n). */
#define MT_SUMSQ_CHUNKS(n) ((n) / MT_SUMSQ_CHUNK + ((n) % MT_SUMSQ_CHUNK != 0))
void   mt_sumsq_chunks(mt_pool *pool, mt_dtype dt, const void *x, int64_t n, double *sums);
double mt_sumsq_fold  (const double *sums, int64_t n_chunks);

/* In a queue: *out gets the sum, and chunks those of chunks unless it is NULL (host memory,
 * registered on CUDA). One of these is handed to
 * mt_offload_open; ctx comes from the matching _open and holds the chunk sums' memory, which
 * calls in one queue share: one mt_sumsq per queue. Close after the queue is drained.
 * Errors: MT_EINVAL (dtype, n < 0), MT_ENOMEM, MT_EDEVMEM, MT_EDEVICE. */
typedef struct mt_sumsq mt_sumsq;
mt_status mt_sumsq_open (mt_dev *dev, mt_sumsq **out);    /* CPU or CUDA, by dev->ops->name */
void      mt_sumsq_close(mt_sumsq *s);                    /* NULL is fine */
mt_status mt_sumsq_put  (void *s, mt_queue *q, mt_dtype dt, const void *x, int64_t n, double *out,
                         double *chunks);

/* Micro-batch sums, on the host (see core/offload.h); pool may be NULL. dt: grad's type, and add's.
 *   F32, F64    grad = grad + add; acc is not looked at
 *   BF16, F16   acc = (from_grad ? fp32(grad) : acc) + fp32(add), grad = acc to nearest, ties to
 *               even; acc must be given
 * *sumsq, chunks: of what the optimizer will use, as above: acc for 16-bit types, else grad. */
void mt_accumulate(mt_pool *pool, mt_dtype dt, float *acc, void *grad, const void *add,
                   int64_t n, int from_grad, double *sumsq, double *chunks);

/* The same in a queue, on the device's memory, to the same bits; s and out as for mt_sumsq_put. */
mt_status mt_accumulate_put(void *s, mt_queue *q, mt_dtype dt, float *acc, void *grad,
                            const void *add, int64_t n, int from_grad, double *out,
                            double *chunks);

#endif
