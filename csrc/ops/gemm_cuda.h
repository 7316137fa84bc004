/* gemm_cuda.h — private to csrc/ops and its binding: gemm.h's product by cublasLt,
 * on a CUDA stream.
 *
 *   choice   what cublasLt is to run for a key: made at its first use, kept for the process
 *
 *     const mt_gemm_choice *how;
 *     MT_TRY(mt__gemm_cuda_choose(&key, &g, &how));
 *     MT_TRY(mt__gemm_cuda_run(how, &g, alpha, beta, scratch, stream));
 *
 * Of codes a choice may be of bare sums: then g is mt_gemm_sums(), alpha 1 and beta 0, and
 * mt__fp8_finish_cuda() makes c of it (fp8_cuda.h).
 *
 * A choice is a function of the key, the device and the library, never of time, free memory or what
 * else runs: cublasLt's first candidate that can run. So two processes choose alike. Split K is
 * allowed only with fp32 partial sums added in a fixed order: the same operands give the same bits.
 *
 * Threads: any; the list of choices is under one mutex, held also while one is made, so that a key
 *          has one choice. A choice is never changed or freed.
 * Errors:  MT_ENOTSUP without the library or an algorithm, MT_EDEVICE with cublasLt's own words.
 */
#ifndef MT_GEMM_CUDA_H
#define MT_GEMM_CUDA_H

#include "gemm.h"

#define MT_GEMM_WORKSPACE ((size_t)32 << 20)     /* bytes a candidate may ask for */

typedef struct mt_gemm_choice mt_gemm_choice;

/* Made at a key's first use. The device that the key names is current. */
mt_status mt__gemm_cuda_choose(const mt_gemm_key *key, const mt_gemm *g,
                               const mt_gemm_choice **out);
size_t    mt__gemm_cuda_workspace(const mt_gemm_choice *how);           /* bytes; 0: none */
int       mt__gemm_cuda_bare(const mt_gemm_choice *how);
/* Puts it on the stream, whose device is current.
 * workspace: not used by others before it is over. */
mt_status mt__gemm_cuda_run(const mt_gemm_choice *how, const mt_gemm *g, float alpha, float beta,
                            void *workspace, uintptr_t stream);

#endif
