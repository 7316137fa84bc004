/* cublaslt.h — what we use of cublasLt, written by hand.
 *
 * The library is torch's: found at run time in the process that has imported it, so the build needs
 * neither its header nor its import library. The names below are the same in versions 12 and 13.
 * tests/torch/cublaslt_check.cc includes NVIDIA's header before this one and proves every
 * prototype, structure and number by static_assert.
 *
 * Source: NVIDIA, cuBLAS documentation, "cuBLASLt API".
 */
#ifndef MT_CUBLASLT_H
#define MT_CUBLASLT_H

#include <stddef.h>
#include <stdint.h>

typedef enum mt_lt_number {
    MT_LT_SUCCESS = 0,

    MT_LT_R_32F = 0, MT_LT_R_16F = 2, MT_LT_R_16BF = 14, MT_LT_R_8F_E4M3 = 28, /* cudaDataType_t */
    MT_LT_COMPUTE_32F = 68, MT_LT_COMPUTE_32F_FAST_TF32 = 77,       /* cublasComputeType_t */
    MT_LT_OP_N = 0, MT_LT_OP_T = 1,                                 /* cublasOperation_t, int32 */

    MT_LT_DESC_TRANSA = 3, MT_LT_DESC_TRANSB = 4,                   /* int32 */
    MT_LT_DESC_EPILOGUE = 7, MT_LT_DESC_BIAS_POINTER = 8,           /* uint32, address */
    MT_LT_DESC_A_SCALE_POINTER = 17, MT_LT_DESC_B_SCALE_POINTER = 18,
    MT_LT_DESC_FAST_ACCUM = 25,                                     /* int8 */
    MT_LT_DESC_A_SCALE_MODE = 31, MT_LT_DESC_B_SCALE_MODE = 32,     /* int32; since 12.8 */

    MT_LT_EPILOGUE_BIAS = 4,             /* of the output's type, one for each of its rows */
    MT_LT_SCALE_OUTER_VEC_32F = 3,       /* a scale for each row of op(A), column of op(B): 12.9 */

    MT_LT_PREF_MAX_WORKSPACE_BYTES = 1,                             /* uint64 */
    MT_LT_PREF_REDUCTION_SCHEME_MASK = 3,                           /* uint32 */
    MT_LT_PREF_MIN_ALIGNMENT_A_BYTES = 5, MT_LT_PREF_MIN_ALIGNMENT_B_BYTES = 6,    /* uint32 */
    MT_LT_PREF_MIN_ALIGNMENT_C_BYTES = 7, MT_LT_PREF_MIN_ALIGNMENT_D_BYTES = 8,

    /* Split K with partial sums in the workspace, in fp32, added in a step of its own: a fixed
     * order. The other two add in the output's type, one of them in place. */
    MT_LT_REDUCTION_COMPUTE_TYPE = 2
} mt_lt_number;

typedef struct mt_lt_our_algo { uint64_t data[8]; } mt_lt_our_algo;
typedef struct mt_lt_our_found {
    mt_lt_our_algo algo;
    size_t         workspaceSize;      /* bytes */
    int            state;              /* success: the other members mean something */
    float          wavesCount;
    int            reserved[4];
} mt_lt_our_found;

#ifdef CUBLASAPI             /* NVIDIA's header, in the check only */
typedef cublasStatus_t                   mt_lt_status;
typedef cudaDataType_t                   mt_lt_type;
typedef cublasComputeType_t              mt_lt_compute;
typedef cublasLtMatmulDescAttributes_t   mt_lt_desc_attribute;
typedef cublasLtMatmulPreferenceAttributes_t mt_lt_pref_attribute;
typedef cublasLtHandle_t                 mt_lt_handle;
typedef cublasLtMatmulDesc_t             mt_lt_desc;
typedef cublasLtMatrixLayout_t           mt_lt_layout;
typedef cublasLtMatmulPreference_t       mt_lt_pref;
typedef cublasLtMatmulAlgo_t             mt_lt_algo;
typedef cublasLtMatmulHeuristicResult_t  mt_lt_found;
#else
typedef int mt_lt_status, mt_lt_type, mt_lt_compute, mt_lt_desc_attribute, mt_lt_pref_attribute;
typedef struct mt_lt_context    *mt_lt_handle;
typedef struct mt_lt_desc_of    *mt_lt_desc;
typedef struct mt_lt_layout_of  *mt_lt_layout;
typedef struct mt_lt_pref_of    *mt_lt_pref;
typedef mt_lt_our_algo           mt_lt_algo;
typedef mt_lt_our_found          mt_lt_found;
#endif

/* returns, name, arguments */
#define MT_LT_MAP(X)                                                                        \
    X(const char *, cublasLtGetStatusString, (mt_lt_status))                                \
    X(mt_lt_status, cublasLtCreate, (mt_lt_handle *))                                       \
    X(mt_lt_status, cublasLtMatmulDescCreate, (mt_lt_desc *, mt_lt_compute, mt_lt_type))    \
    X(mt_lt_status, cublasLtMatmulDescSetAttribute,                                         \
      (mt_lt_desc, mt_lt_desc_attribute, const void *, size_t))                             \
    X(mt_lt_status, cublasLtMatmulDescDestroy, (mt_lt_desc))                                \
    X(mt_lt_status, cublasLtMatrixLayoutCreate,                                             \
      (mt_lt_layout *, mt_lt_type, uint64_t, uint64_t, int64_t))                            \
    X(mt_lt_status, cublasLtMatrixLayoutDestroy, (mt_lt_layout))                            \
    X(mt_lt_status, cublasLtMatmulPreferenceCreate, (mt_lt_pref *))                         \
    X(mt_lt_status, cublasLtMatmulPreferenceSetAttribute,                                   \
      (mt_lt_pref, mt_lt_pref_attribute, const void *, size_t))                             \
    X(mt_lt_status, cublasLtMatmulPreferenceDestroy, (mt_lt_pref))                          \
    X(mt_lt_status, cublasLtMatmulAlgoGetHeuristic,                                         \
      (mt_lt_handle, mt_lt_desc, mt_lt_layout, mt_lt_layout, mt_lt_layout, mt_lt_layout,    \
       mt_lt_pref, int, mt_lt_found *, int *))                                              \
    X(mt_lt_status, cublasLtMatmul,                                                         \
      (mt_lt_handle, mt_lt_desc, const void *, const void *, mt_lt_layout, const void *,    \
       mt_lt_layout, const void *, const void *, mt_lt_layout, void *, mt_lt_layout,        \
       const mt_lt_algo *, void *, size_t, struct CUstream_st *))

#define MT_LT_MEMBER(ret, name, args) ret (*name) args;
typedef struct mt_lt {
    MT_LT_MAP(MT_LT_MEMBER)
} mt_lt;
#undef MT_LT_MEMBER

#endif
