/* dnn.h — what we use of cuDNN's backend API, written by hand.
 *
 * The library is torch's: found at run time in the process that has imported it, so the build needs
 * neither its headers nor its import library. tests/torch/cudnn_check.cc includes NVIDIA's header
 * before this one and proves every prototype and number by static_assert.
 *
 * Source: NVIDIA, cuDNN documentation, "Graph library", backend API, version 9.
 */
#ifndef MT_DNN_H
#define MT_DNN_H

#include <stddef.h>
#include <stdint.h>

/* ours, NVIDIA's without CUDNN_, value */
#define MT_DNN_NUMBERS(X)                                                                  \
    X(SUCCESS, STATUS_SUCCESS, 0)                                                          \
    X(FLOAT, DATA_FLOAT, 0) X(HALF, DATA_HALF, 2) X(INT32, DATA_INT32, 4)                  \
    X(BFLOAT16, DATA_BFLOAT16, 9) X(BOOLEAN, DATA_BOOLEAN, 11)                             \
    X(T_HANDLE, TYPE_HANDLE, 0) X(T_DATA, TYPE_DATA_TYPE, 1) X(T_BOOLEAN, TYPE_BOOLEAN, 2) \
    X(T_INT64, TYPE_INT64, 3) X(T_FLOAT, TYPE_FLOAT, 4) X(T_POINTER, TYPE_VOID_PTR, 6)     \
    X(T_HEUR, TYPE_HEUR_MODE, 8) X(T_MODE, TYPE_POINTWISE_MODE, 14)                        \
    X(T_DESC, TYPE_BACKEND_DESCRIPTOR, 15) X(T_REDUCE, TYPE_REDUCTION_OPERATOR_TYPE, 18)   \
    X(TENSOR, BACKEND_TENSOR_DESCRIPTOR, 17)                                               \
    X(TENSOR_ALIGNMENT, ATTR_TENSOR_BYTE_ALIGNMENT, 900)                                   \
    X(TENSOR_TYPE, ATTR_TENSOR_DATA_TYPE, 901) X(TENSOR_SIZE, ATTR_TENSOR_DIMENSIONS, 902) \
    X(TENSOR_STRIDE, ATTR_TENSOR_STRIDES, 903) X(TENSOR_ID, ATTR_TENSOR_UNIQUE_ID, 906)    \
    X(TENSOR_VIRTUAL, ATTR_TENSOR_IS_VIRTUAL, 907)                                         \
    X(TENSOR_NUMBER, ATTR_TENSOR_IS_BY_VALUE, 908)                                         \
    X(POINTWISE, BACKEND_POINTWISE_DESCRIPTOR, 0)                                          \
    X(POINTWISE_MODE, ATTR_POINTWISE_MODE, 0)                                              \
    X(POINTWISE_TYPE, ATTR_POINTWISE_MATH_PREC, 1)                                         \
    X(POINTWISE_AXIS, ATTR_POINTWISE_AXIS, 9)                                              \
    X(OP_POINTWISE, BACKEND_OPERATION_POINTWISE_DESCRIPTOR, 13)                            \
    X(OP_POINTWISE_DESC, ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, 750)                      \
    X(OP_POINTWISE_X, ATTR_OPERATION_POINTWISE_XDESC, 751)                                 \
    X(OP_POINTWISE_B, ATTR_OPERATION_POINTWISE_BDESC, 752)                                 \
    X(OP_POINTWISE_Y, ATTR_OPERATION_POINTWISE_YDESC, 753)                                 \
    X(OP_POINTWISE_ALPHA1, ATTR_OPERATION_POINTWISE_ALPHA1, 754)                           \
    X(OP_POINTWISE_ALPHA2, ATTR_OPERATION_POINTWISE_ALPHA2, 755)                           \
    X(OP_POINTWISE_T, ATTR_OPERATION_POINTWISE_TDESC, 758)                                 \
    X(ADD, POINTWISE_ADD, 0) X(MUL, POINTWISE_MUL, 1) X(SUB, POINTWISE_SUB, 9)             \
    X(EXP, POINTWISE_EXP, 13) X(CMP_GE, POINTWISE_CMP_GE, 303)                             \
    X(INDEX, POINTWISE_GEN_INDEX, 501) X(SELECT, POINTWISE_BINARY_SELECT, 601)             \
    X(MATMUL, BACKEND_MATMUL_DESCRIPTOR, 18) X(MATMUL_TYPE, ATTR_MATMUL_COMP_TYPE, 1500)   \
    X(OP_MATMUL, BACKEND_OPERATION_MATMUL_DESCRIPTOR, 19)                                  \
    X(OP_MATMUL_A, ATTR_OPERATION_MATMUL_ADESC, 1520)                                      \
    X(OP_MATMUL_B, ATTR_OPERATION_MATMUL_BDESC, 1521)                                      \
    X(OP_MATMUL_C, ATTR_OPERATION_MATMUL_CDESC, 1522)                                      \
    X(OP_MATMUL_DESC, ATTR_OPERATION_MATMUL_DESC, 1523)                                    \
    X(REDUCTION, BACKEND_REDUCTION_DESCRIPTOR, 21) X(SUM, REDUCE_TENSOR_ADD, 0)            \
    X(REDUCTION_MODE, ATTR_REDUCTION_OPERATOR, 1600)                                       \
    X(REDUCTION_TYPE, ATTR_REDUCTION_COMP_TYPE, 1601)                                      \
    X(OP_REDUCTION, BACKEND_OPERATION_REDUCTION_DESCRIPTOR, 22)                            \
    X(OP_REDUCTION_X, ATTR_OPERATION_REDUCTION_XDESC, 1610)                                \
    X(OP_REDUCTION_Y, ATTR_OPERATION_REDUCTION_YDESC, 1611)                                \
    X(OP_REDUCTION_DESC, ATTR_OPERATION_REDUCTION_DESC, 1612)                              \
    X(OP_RESHAPE, BACKEND_OPERATION_RESHAPE_DESCRIPTOR, 31)                                \
    X(OP_RESHAPE_X, ATTR_OPERATION_RESHAPE_XDESC, 2200)                                    \
    X(OP_RESHAPE_Y, ATTR_OPERATION_RESHAPE_YDESC, 2201)                                    \
    X(GRAPH, BACKEND_OPERATIONGRAPH_DESCRIPTOR, 15)                                        \
    X(GRAPH_HANDLE, ATTR_OPERATIONGRAPH_HANDLE, 800)                                       \
    X(GRAPH_OPS, ATTR_OPERATIONGRAPH_OPS, 801)                                             \
    X(HEUR, BACKEND_ENGINEHEUR_DESCRIPTOR, 4) X(HEUR_MODE_A, HEUR_MODE_A, 3)               \
    X(HEUR_MODE, ATTR_ENGINEHEUR_MODE, 200)                                                \
    X(HEUR_GRAPH, ATTR_ENGINEHEUR_OPERATION_GRAPH, 201)                                    \
    X(HEUR_RESULTS, ATTR_ENGINEHEUR_RESULTS, 202)                                          \
    X(CONFIG, BACKEND_ENGINECFG_DESCRIPTOR, 3)                                             \
    X(PLAN, BACKEND_EXECUTION_PLAN_DESCRIPTOR, 5)                                          \
    X(PLAN_HANDLE, ATTR_EXECUTION_PLAN_HANDLE, 400)                                        \
    X(PLAN_CONFIG, ATTR_EXECUTION_PLAN_ENGINE_CONFIG, 401)                                 \
    X(PLAN_WORKSPACE, ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, 402)                             \
    X(PACK, BACKEND_VARIANT_PACK_DESCRIPTOR, 16)                                           \
    X(PACK_IDS, ATTR_VARIANT_PACK_UNIQUE_IDS, 1000)                                        \
    X(PACK_POINTERS, ATTR_VARIANT_PACK_DATA_POINTERS, 1001)                                \
    X(PACK_WORKSPACE, ATTR_VARIANT_PACK_WORKSPACE, 1003)

#define MT_DNN_ENUM(ours, theirs, value) MT_DNN_##ours = value,
typedef enum mt_dnn_number { MT_DNN_NUMBERS(MT_DNN_ENUM) MT_DNN_END } mt_dnn_number;
#undef MT_DNN_ENUM

#ifdef CUDNN_VERSION         /* NVIDIA's header, in the check only */
typedef cudnnStatus_t                mt_dnn_status;
typedef cudnnHandle_t                mt_dnn_handle;
typedef cudaStream_t                 mt_dnn_stream;
typedef cudnnBackendDescriptor_t     mt_dnn_desc;
typedef cudnnBackendDescriptorType_t mt_dnn_kind;
typedef cudnnBackendAttributeName_t  mt_dnn_name;
typedef cudnnBackendAttributeType_t  mt_dnn_type;
#else
typedef int mt_dnn_status, mt_dnn_kind, mt_dnn_name, mt_dnn_type;
typedef struct mt_dnn_context *mt_dnn_handle;
typedef struct mt_dnn_queue   *mt_dnn_stream;
typedef void                  *mt_dnn_desc;
#endif

/* returns, name, arguments */
#define MT_DNN_MAP(X)                                                                          \
    X(const char *, cudnnGetErrorString, (mt_dnn_status))                                      \
    X(mt_dnn_status, cudnnCreate, (mt_dnn_handle *))                                           \
    X(mt_dnn_status, cudnnSetStream, (mt_dnn_handle, mt_dnn_stream))                           \
    X(mt_dnn_status, cudnnBackendCreateDescriptor, (mt_dnn_kind, mt_dnn_desc *))               \
    X(mt_dnn_status, cudnnBackendDestroyDescriptor, (mt_dnn_desc))                             \
    X(mt_dnn_status, cudnnBackendFinalize, (mt_dnn_desc))                                      \
    X(mt_dnn_status, cudnnBackendSetAttribute,                                                 \
      (mt_dnn_desc, mt_dnn_name, mt_dnn_type, int64_t, const void *))                          \
    X(mt_dnn_status, cudnnBackendGetAttribute,                                                 \
      (mt_dnn_desc, mt_dnn_name, mt_dnn_type, int64_t, int64_t *, void *))                     \
    X(mt_dnn_status, cudnnBackendExecute, (mt_dnn_handle, mt_dnn_desc, mt_dnn_desc))

typedef struct mt_dnn {
#define MT_DNN_FIELD(ret, name, args) ret (*name) args;
    MT_DNN_MAP(MT_DNN_FIELD)
#undef MT_DNN_FIELD
} mt_dnn;

#endif
