// cublaslt_check.cc — proves csrc/ops/cublaslt.h against NVIDIA's header.
//
//   g++ -std=c++20 -fsyntax-only -I <cuda>/include -I <cublas>/include
//       tests/torch/cublaslt_check.cc
//
// A prototype, structure or number that differs breaks this file and not a user's stack.
#include <cublasLt.h>

#include "../../csrc/ops/cublaslt.h"

#include <cstddef>
#include <type_traits>

#define SAME(ret, name, args) \
    static_assert(std::is_same_v<ret(*) args, decltype(&::name)>, #name " differs from NVIDIA's");
MT_LT_MAP(SAME)

#define EQUAL(ours, theirs) static_assert(int(ours) == int(theirs), #theirs " differs");
EQUAL(MT_LT_SUCCESS, CUBLAS_STATUS_SUCCESS)
EQUAL(MT_LT_R_32F, CUDA_R_32F)
EQUAL(MT_LT_R_16F, CUDA_R_16F)
EQUAL(MT_LT_R_16BF, CUDA_R_16BF)
EQUAL(MT_LT_COMPUTE_32F, CUBLAS_COMPUTE_32F)
EQUAL(MT_LT_COMPUTE_32F_FAST_TF32, CUBLAS_COMPUTE_32F_FAST_TF32)
EQUAL(MT_LT_OP_N, CUBLAS_OP_N)
EQUAL(MT_LT_OP_T, CUBLAS_OP_T)
EQUAL(MT_LT_DESC_TRANSA, CUBLASLT_MATMUL_DESC_TRANSA)
EQUAL(MT_LT_DESC_TRANSB, CUBLASLT_MATMUL_DESC_TRANSB)
EQUAL(MT_LT_R_8F_E4M3, CUDA_R_8F_E4M3)
EQUAL(MT_LT_DESC_EPILOGUE, CUBLASLT_MATMUL_DESC_EPILOGUE)
EQUAL(MT_LT_DESC_BIAS_POINTER, CUBLASLT_MATMUL_DESC_BIAS_POINTER)
EQUAL(MT_LT_DESC_A_SCALE_POINTER, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER)
EQUAL(MT_LT_DESC_B_SCALE_POINTER, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER)
EQUAL(MT_LT_DESC_FAST_ACCUM, CUBLASLT_MATMUL_DESC_FAST_ACCUM)
EQUAL(MT_LT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_BIAS)
#if CUBLAS_VERSION >= 120900         // what older ones do not have is asked for, and refused
EQUAL(MT_LT_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_DESC_A_SCALE_MODE)
EQUAL(MT_LT_DESC_B_SCALE_MODE, CUBLASLT_MATMUL_DESC_B_SCALE_MODE)
EQUAL(MT_LT_SCALE_OUTER_VEC_32F, CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F)
#endif
EQUAL(MT_LT_PREF_MAX_WORKSPACE_BYTES, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES)
EQUAL(MT_LT_PREF_REDUCTION_SCHEME_MASK, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK)
EQUAL(MT_LT_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES)
EQUAL(MT_LT_PREF_MIN_ALIGNMENT_B_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES)
EQUAL(MT_LT_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES)
EQUAL(MT_LT_PREF_MIN_ALIGNMENT_D_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES)
EQUAL(MT_LT_REDUCTION_COMPUTE_TYPE, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)

// The structures, which the program itself lays out.
using Ours = mt_lt_our_found;
using Theirs = cublasLtMatmulHeuristicResult_t;
static_assert(sizeof(mt_lt_our_algo) == sizeof(cublasLtMatmulAlgo_t));
static_assert(sizeof(Ours) == sizeof(Theirs));
static_assert(offsetof(Ours, algo) == offsetof(Theirs, algo));
static_assert(offsetof(Ours, workspaceSize) == offsetof(Theirs, workspaceSize));
static_assert(offsetof(Ours, state) == offsetof(Theirs, state));
static_assert(offsetof(Ours, wavesCount) == offsetof(Theirs, wavesCount));
static_assert(sizeof(cublasStatus_t) == sizeof(int) && sizeof(cudaDataType_t) == sizeof(int));
