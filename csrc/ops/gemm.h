/* gemm.h — c = alpha * a @ b + beta * c, or of codes: what is asked for, what a BLAS calls it,
 * and the definition.
 *
 * Letters: c [M,N], a [M,K], b [K,N].
 * Nouns, in the order they appear below:
 *   matrix   memory with an order: by rows (element (i,j) at i*ld + j) or by columns (i + j*ld)
 *   gemm     the three matrices and their types; c is by rows
 *   blas     the same product in a BLAS's words, where every matrix is by columns
 *   key      what a choice of algorithm depends on
 *
 * Types: a and b alike, F32, BF16 or F16; c that type too, or F32. Or a and b are F8E4M3, codes
 *        with scales (fp8.h), and c is F32 or BF16: then
 *            c = alpha * (a_scale[i] * b_scale[j]) * a @ b + bias[j] + base
 *
 *     mt_gemm g = { .ab = MT_BF16, .c_type = MT_F32 };
 *     MT_TRY(mt_gemm_matrix_of("a", sizes, strides, &g.a));   // and b, c; pointers besides
 *     mt_gemm_host(pool, &g, 1.0f, 1.0f);
 *
 * Threads: no state here; a pool's run is a pool's (pool.h).
 * Errors:  mt_gemm_matrix_of alone can fail; shapes and types are the caller's to check (bind).
 */
#ifndef MT_GEMM_H
#define MT_GEMM_H

#include "../core/dtype.h"
#include "../core/pool.h"
#include "../core/status.h"

typedef struct mt_gemm_matrix {
    void   *data;                /* of a and b: only read */
    int64_t rows, cols;
    int64_t ld;                  /* elements from one row (column) to the next */
    int     by_columns;
} mt_gemm_matrix;

typedef struct mt_gemm {
    mt_dtype       ab, c_type;
    mt_gemm_matrix c, a, b;
    int            tf32;         /* F32 operands may be rounded to 10 bits of fraction; CUDA only */

    /* Of codes only. */
    const float   *a_scale, *b_scale;    /* [M], [N] */
    const void    *bias;                 /* [N], c's type; NULL: none */
    const void    *base;                 /* [M,N], c's type, by rows; c itself; NULL: none */
    int64_t        base_ld;
    int            fast;                 /* sums in the tensor cores' own 14 bits; CUDA only */
} mt_gemm;

/* Reads sizes and strides (elements) as torch has them; data is left alone. Both orders fit a
 * matrix of one row or column: then by rows. MT_EINVAL, naming `what` and the strides,
 * when neither fits. */
mt_status mt_gemm_matrix_of(const char *what, const int64_t *size, const int64_t *stride,
                            mt_gemm_matrix *out);

/* From the first element to behind the last, gaps between the lines included. Neither size is 0. */
size_t mt_gemm_bytes(const mt_gemm_matrix *m, mt_dtype dt);

/* A BLAS sees memory by columns, so a matrix by rows is its transpose there. What it computes is
 *     out = op(left) @ op(right),   out [N,M] = c',  op(left) [N,K] = b',  op(right) [K,M] = a'
 * with op the transpose where `transposed` is set. rows, cols and ld are those of the memory. */
typedef struct mt_gemm_blas {
    struct mt_gemm_seen {
        void   *data;
        int64_t rows, cols, ld;
        int     transposed;
    } left, right, out;
} mt_gemm_blas;

mt_gemm_blas mt_gemm_to_blas(const mt_gemm *g);

/* Two calls with one key get one algorithm, so the same bits. Addresses count as far as 16 bytes,
 * the widest load: where beyond that a tensor lies changes nothing.
 * No padding: compared by memcmp. */
typedef struct mt_gemm_key {
    int64_t device, ab, c_type, tf32, accumulates, fast, biased;
    int64_t m, n, k, ld[4], by_columns[2], align[4];    /* of c, a, b, base; order of a, b */
} mt_gemm_key;

mt_gemm_key mt_gemm_key_of(const mt_gemm *g, int device, float beta);

/* The sums of a product of codes alone, without scales: to memory [M,N] of c's type, dense. */
mt_gemm mt_gemm_sums(const mt_gemm *g, void *sums);

/* The definition, in fp32:
 *     sum = 0;  for k ascending: sum += a[i,k] * b[k,j]      (product and sum rounded, no FMA)
 *     c[i,j] = round(alpha * sum + beta * c[i,j])            beta = 0: c is not read
 * of codes, where beta means nothing (scales are powers of two, so these products are exact):
 *     c[i,j] = round((alpha * (sum * a_scale[i] * b_scale[j]) + bias[j]) + base[i,j])
 * c shares no memory with a or b. Each element is one chunk's alone, so threads change no bit. */
void mt_gemm_host(mt_pool *pool, const mt_gemm *g, float alpha, float beta);

#endif
