/* expand.h — frozen weights that are codes with scales, made the weights that they stand for.
 * The host's side is the definition, and gives its package's bits; CUDA's gives the same.
 *
 * Letters: out [R,C] dense in the type T, of fp32, bf16 and fp16; i = r C + c. Each element is made
 * in fp32 and rounded once, to nearest, ties to even.
 *
 *   format  codes                     scales                      element
 *   NF4     u8, two a byte, the       [blocks] fp32, of 2^b       NF4[code] * scale
 *   FP4       first in the high bits    elements of i each        FP4[code] * scale
 *   INT8    [R,C]                     [R] fp32                    code * (scale * (1/127))
 *   FP8     [E,N,K] E4M3, R = E N     [E,n,k] fp32, of blocks of  code * scale
 *                                       N/n rows, K/k columns
 *   MXFP4   [E,N,G,16] u8, two a      [E,N,G] u8                  E2M1[code] * 2^(scale - 127)
 *             byte, the first in the                              at r = e 32 G + k, c = n: each
 *             low bits, k along G,16                              expert's matrix is transposed
 *
 * Of NF4 and FP4 scales may be codes themselves (double quantisation): [blocks] u8, and
 *   scale[b] = map[code[b]] * wide[b / 256] + offset, the product and the sum each rounded.
 * INT8's scale times 1/127 is rounded too. 2^128, of MXFP4's 255, is an infinity.
 *
 * Sources: bitsandbytes 0.50 (Dettmers et al. 2023, "QLoRA"; 2022, "LLM.int8()"), transformers'
 * Fp8Dequantize and convert_moe_packed_tensors (OCP Microscaling Formats 1.0).
 *
 * Threads: no state here; a pool's run is a pool's (pool.h). Each row is one chunk's alone.
 */
#ifndef MT_EXPAND_H
#define MT_EXPAND_H

#include "../core/dtype.h"
#include "../core/pool.h"

#ifdef __cplusplus
extern "C" {
#endif

/* name, type of the codes, of the scales: megatrain_torch/ops.py has the names in this order */
#define MT_EXPAND_FORMATS(X)     \
    X(NF4,   MT_U8,     MT_F32)  \
    X(FP4,   MT_U8,     MT_F32)  \
    X(INT8,  MT_I8,     MT_F32)  \
    X(FP8,   MT_F8E4M3, MT_F32)  \
    X(MXFP4, MT_U8,     MT_U8)

typedef enum mt_expand_format {
#define MT_EXPAND_NAME_(name, codes, scales) MT_EXPAND_##name,
    MT_EXPAND_FORMATS(MT_EXPAND_NAME_)
#undef MT_EXPAND_NAME_
    MT_EXPAND_COUNT
} mt_expand_format;

#define MT_EXPAND_WIDE 256           /* scales of NF4 and FP4 that share one of theirs */
#define MT_MXFP4_GROUP 32            /* elements of MXFP4 that share a scale */

typedef struct mt_expand {
    mt_expand_format format;
    mt_dtype         dtype;          /* of out: F32, BF16 or F16 */
    void            *out;
    int64_t          rows, cols;     /* of out; of MXFP4: of one expert's, [32 G, N] */
    int64_t          experts;        /* of MXFP4; else 1 */
    const void      *codes, *scales;
    int              group_bits;     /* NF4, FP4: a block has 2^group_bits elements */
    /* NF4, FP4, where scales are codes; else NULL */
    const float     *wide, *map, *offset;
    /* FP8: rows and columns of a block; blocks beside each other */
    int64_t          block_rows, block_cols, blocks;
} mt_expand;

/* The 16 numbers of NF4, FP4 and MXFP4 (E2M1), by code. */
#define MT_NF4_NUMBERS                                                             \
    { -1.0f, -0x1.647362p-1f, -0x1.0cd66p-1f, -0x1.94654p-2f, -0x1.23449ap-2f,     \
      -0x1.7a6a7ep-3f, -0x1.74f0e2p-4f, 0.0f, 0x1.45f5fep-4f, 0x1.4995c6p-3f,      \
      0x1.f809bap-3f, 0x1.5a0674p-2f, 0x1.c3497p-2f, 0x1.200f56p-1f,               \
      0x1.722766p-1f, 1.0f }
#define MT_FP4_NUMBERS                                                             \
    { 0.0f, 0x1.555556p-8f, 0x1.555556p-1f, 1.0f, 0x1.555556p-2f, 0.5f,            \
      0x1.555556p-3f, 0.25f, 0.0f, -0x1.555556p-8f, -0x1.555556p-1f, -1.0f,        \
      -0x1.555556p-2f, -0.5f, -0x1.555556p-3f, -0.25f }
#define MT_E2M1_NUMBERS                                                            \
    { 0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f,  \
      -2.0f, -3.0f, -4.0f, -6.0f }

void mt_expand_codes(mt_pool *pool, const mt_expand *x);      /* pool may be NULL */

#ifdef __CUDACC__
#define MT_EXPAND_INLINE __host__ __device__ static inline
#else
#define MT_EXPAND_INLINE static inline
#endif

/* The bits of 2^(code - 127) in fp32. */
MT_EXPAND_INLINE uint32_t mt_expand_power_bits(uint32_t code)
{
    return code == 0 ? 0x400000u : code << 23;
}

#ifdef __cplusplus
}
#endif
#endif
