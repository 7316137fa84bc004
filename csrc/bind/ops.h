/* ops.h — what a room of torch ops writes, and what torch_ops.c does with it.
 *
 * Nouns, in the order they appear below:
 *   argument   a tensor as plain memory with sizes and strides, or a number
 *   call       which op, and on CUDA the stream that torch computes on
 *   kernel     takes arguments; one for each device
 *   table      name, arguments, schema: one line per op;
 *              MT_OP_TABLE makes the rest of a room's file
 *
 *     static mt_status cpu_scale_(const mt_op_call *c, const mt_op_arg *a, StableIValue *result);
 *     static mt_status cuda_scale_(...);
 *     #define OPS(X) X(scale_, "Wf", "scale_(Tensor(a!) x, float by) -> ()")
 *     MT_OP_TABLE(scale, OPS)                   // and mt_ops_scale in the list of torch_ops.c
 *
 * An argument string has a letter each:
 *   T tensor, read        W tensor, written        f float (C double)
 *   t tensor or None      w tensor or None         i int64, bool
 *   S s V v   as T t W w, with any strides; the others are dense and row-major
 * Ops write into memory they are given: whoever calls them makes it (megatrain_torch/ops.py).
 * Shapes for tracing (fake kernels) are Python's too.
 *
 * Threads: kernels run on whichever thread calls the op, without the GIL.
 * Errors:  a kernel returns mt_status; the box lets go of the arguments and raises RuntimeError
 *          with the core's message, a C++ exception through the room's frames: csrc/bind/ops_*.c
 *          and torch_ops.c are compiled with -fexceptions.
 */
#ifndef MT_OPS_H
#define MT_OPS_H

#include "torch_shim.h"
#include "../core/dtype.h"
#include "../core/pool.h"
#include "../core/status.h"
#include "../ops/gemm.h"

#define MT_OP_DIMS 6
#define MT_OP_ARGS 24

typedef struct mt_op_tensor {
    AtenTensorHandle handle;     /* owned by the box; NULL: None */
    void            *data;       /* for T, t, S, s: not to be written */
    int64_t          n;          /* elements */
    int              dtype;      /* mt_dtype; -1: one we have no name for */
    int32_t          device_type, device_index;
    int              dim;
    int64_t          size[MT_OP_DIMS], stride[MT_OP_DIMS];     /* in elements */
} mt_op_tensor;

typedef union mt_op_arg {
    mt_op_tensor t;
    double       f;
    int64_t      i;
} mt_op_arg;

typedef struct mt_op {
    const char *name, *args, *schema;
} mt_op;

typedef struct mt_op_call {
    const char *name;
    int32_t     device_index;    /* CUDA ordinal; -1 on CPU */
    uintptr_t   stream;          /* cudaStream_t, current on that device; 0 on CPU */
} mt_op_call;

typedef mt_status (*mt_op_kernel)(const mt_op_call *c, const mt_op_arg *a, StableIValue *result);

/* CPU: a pool for work on n elements, as many threads as torch uses; NULL for little work.
 * Close it. */
mt_status mt_op_pool(int64_t n, mt_pool **out);
/* A new tensor of dt [n] beside x, or a scalar when n < 0; freed by mt_op_free, or a result. CUDA
 * memory freed at once is handed out again in the stream's order,
 * so scratch need not outlive the call. */
mt_status mt_op_new (const mt_op_tensor *x, mt_dtype dt, int64_t n, AtenTensorHandle *out,
                     void **data);
void      mt_op_free(AtenTensorHandle t);        /* NULL is fine */
static inline void mt_op_free_at(AtenTensorHandle *t) { mt_op_free(*t); }

/* Unpacks, runs the kernel, raises. */
void mt_op_box(const mt_op *o, mt_op_kernel kernel, StableIValue *stack, uint64_t n_args,
               uint64_t n_returns, int cuda);

typedef struct mt_op_row {
    const mt_op *op;             /* NULL ends a table */
    mt_boxed_fn  cpu, cuda;      /* cuda NULL in a build without CUDA */
} mt_op_row;

#define MT_OP_DEFINE_(op_, args_, schema_) \
    static const mt_op op_##op_ = { #op_, args_, schema_ };
#define MT_OP_CPU_BOX_(op_, args_, schema_) \
    static void box_cpu_##op_(StableIValue *s, uint64_t n_args, uint64_t n_returns) \
    { mt_op_box(&op_##op_, cpu_##op_, s, n_args, n_returns, 0); }
#define MT_OP_CUDA_BOX_(op_, args_, schema_) \
    static void box_cuda_##op_(StableIValue *s, uint64_t n_args, uint64_t n_returns) \
    { mt_op_box(&op_##op_, cuda_##op_, s, n_args, n_returns, 1); }
#define MT_OP_CPU_ROW_(op_, args_, schema_)  { &op_##op_, box_cpu_##op_, NULL },
#define MT_OP_BOTH_ROW_(op_, args_, schema_) { &op_##op_, box_cpu_##op_, box_cuda_##op_ },

#ifdef MT_WITH_CUDA
#define MT_OP_TABLE(room, OPS) OPS(MT_OP_DEFINE_) OPS(MT_OP_CPU_BOX_) OPS(MT_OP_CUDA_BOX_) \
    const mt_op_row mt_ops_##room[] = { OPS(MT_OP_BOTH_ROW_) { NULL, NULL, NULL } };
#else
#define MT_OP_TABLE(room, OPS) OPS(MT_OP_DEFINE_) OPS(MT_OP_CPU_BOX_) \
    const mt_op_row mt_ops_##room[] = { OPS(MT_OP_CPU_ROW_) { NULL, NULL, NULL } };
#endif

/* The rooms, in the order they are registered. A new one adds its line here. */
#define MT_OP_ROOMS(X) \
    X(optim) X(gemm) X(fp8) X(expand) X(norm) X(glu) X(rope) X(embedding) X(loss) X(experts) \
    X(attention)
#define MT_OP_EXTERN_(room) extern const mt_op_row mt_ops_##room[];
MT_OP_ROOMS(MT_OP_EXTERN_)
#undef MT_OP_EXTERN_

/* ops_gemm.c, for ops_fp8.c too: a product whose arguments are checked, on the device of the call.
 * c = alpha * a @ b + beta * c, or + bias and base where there are codes. */
mt_status mt_op_product_cpu(const mt_gemm *g, float alpha, float beta);
/* like: c's argument. beta: of codes 1 where there is a base, else 0. */
mt_status mt_op_product_cuda(const mt_op_call *c, const mt_op_arg *like, const mt_gemm *g,
                             float alpha, float beta);

#endif
