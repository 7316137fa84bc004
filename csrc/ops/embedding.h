/* embedding.h — the gradient of a table of rows: what each row's tokens add up to.
 * The host's side is the definition.
 *
 *   out[v] = sum of dy[t] over the tokens t with id v, in fp32, rounded once; 0 where there is none
 *   dy [tokens,n] in, rows dense, `stride` elements apart    out [rows,n] out, dense, written whole
 *   ids [tokens] in, ascending; order [tokens] in: the token each comes from, ascending where ids
 *   are equal (both as a stable sort leaves them). An id outside [0, rows) adds to nothing,
 *   nor does `padding`.
 *
 * Order of a row's sum: its tokens, in order, in chunks of 256; a chunk is added up from 0; the
 * chunks' sums are added up in order, from 0. So a row's bits depend on its own tokens alone, and a
 * row that 30,000 tokens share (padding, the begin-of-text token) is no single thread's work. Only
 * additions: CUDA gives the same bits.
 */
#ifndef MT_EMBEDDING_H
#define MT_EMBEDDING_H

#include "../core/dtype.h"
#include "../core/pool.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MT_EMBEDDING_CHUNK 256

typedef struct mt_embedding {
    mt_dtype       dtype;        /* of dy and out: F32, BF16 or F16 */
    int64_t        tokens, n, rows, stride, padding;     /* padding: -1 for none */
    const void    *dy;
    const int64_t *ids, *order;
    void          *out;
} mt_embedding;

void mt_embedding_backward(mt_pool *pool, const mt_embedding *e);      /* pool may be NULL */

#ifdef __cplusplus
}
#endif
#endif
