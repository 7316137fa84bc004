/* ops_gemm.c — torch.ops.megatrain.gemm_: c = alpha * a @ b + beta * c, see ops/gemm.h. */
#include "ops.h"
#ifdef MT_WITH_CUDA
#include "ops_check.h"
#include "../ops/fp8_cuda.h"
#include "../ops/gemm_cuda.h"
#endif

enum { C, A, B, ALPHA, BETA, TF32 };

static mt_status matrix_of(const char *what, const mt_op_tensor *t, mt_gemm_matrix *out)
{
    if (t->dim != 2)
        return MT_FAIL(MT_EINVAL, "gemm_: %s has %d dimensions, not 2", what, t->dim);
    out->data = t->data;
    return mt_gemm_matrix_of(what, t->size, t->stride, out);
}

static mt_status check_types(const mt_op_arg *a)
{
    int ab = a[A].t.dtype, c = a[C].t.dtype;

    if (ab != MT_F32 && ab != MT_BF16 && ab != MT_F16)
        return MT_FAIL(MT_EINVAL, "gemm_: a must be float32, bfloat16 or float16");
    if (a[B].t.dtype != ab)
        return MT_FAIL(MT_EINVAL, "gemm_: b must have a's dtype (%s)", mt_dtype_name((mt_dtype)ab));
    if (c != ab && c != MT_F32)
        return MT_FAIL(MT_EINVAL, "gemm_: c must be float32 or have a's dtype (%s)",
                       mt_dtype_name((mt_dtype)ab));
    return MT_OK;
}

static mt_status check_shapes(const mt_gemm *g)
{
    if (g->a.cols != g->b.rows || g->c.rows != g->a.rows || g->c.cols != g->b.cols)
        return MT_FAIL(MT_EINVAL, "gemm_: c [%lld, %lld] is not a [%lld, %lld] @ b [%lld, %lld]",
                       (long long)g->c.rows, (long long)g->c.cols, (long long)g->a.rows,
                       (long long)g->a.cols, (long long)g->b.rows, (long long)g->b.cols);
    if (g->c.by_columns)
        return MT_FAIL(MT_EINVAL,
                       "gemm_: c's rows must be dense, its row stride is free; write its "
                       "transpose: gemm_(c.t(), b.t(), a.t())");
    /* cublasLt has no empty sums. */
    if (g->a.cols == 0)
        return MT_FAIL(MT_EINVAL, "gemm_: a has no columns; scale c by beta instead");
    return MT_OK;
}

static mt_status gemm_of(const mt_op_arg *a, mt_gemm *g)
{
    MT_DO(check_types(a));
    MT_DO(matrix_of("c", &a[C].t, &g->c));
    MT_DO(matrix_of("a", &a[A].t, &g->a));
    MT_DO(matrix_of("b", &a[B].t, &g->b));
    g->ab = (mt_dtype)a[A].t.dtype;
    g->c_type = (mt_dtype)a[C].t.dtype;
    g->tf32 = a[TF32].i != 0 && g->ab == MT_F32;
    return check_shapes(g);
}

mt_status mt_op_product_cpu(const mt_gemm *g, float alpha, float beta)
{
    mt_pool  *pool MT_CLOSED(mt_pool_close) = NULL;

    /* A product and sum takes an eighth of what an element of other ops does. */
    MT_DO(mt_op_pool(g->c.rows * g->c.cols / 8 * g->a.cols, &pool));
    mt_gemm_host(pool, g, alpha, beta);
    return MT_OK;
}

static mt_status cpu_gemm_(const mt_op_call *c, const mt_op_arg *a, StableIValue *result)
{
    mt_gemm g = { 0 };

    (void)c;
    (void)result;
    MT_DO(gemm_of(a, &g));
    return mt_op_product_cpu(&g, (float)a[ALPHA].f, (float)a[BETA].f);
}

#ifdef MT_WITH_CUDA
/* The sums by themselves, then what is made of them. */
static mt_status run_bare(const mt_op_call *c, const mt_op_arg *like, const mt_gemm_choice *how,
                           const mt_gemm *g, float alpha, void *workspace)
{
    AtenTensorHandle memory MT_CLOSED(mt_op_free) = NULL;
    void            *sums = NULL;
    mt_gemm          bare;

    MT_DO(mt_op_new(&like->t, MT_U8, like->t.n * (int64_t)mt_dtype_bytes(g->c_type), &memory,
                    &sums));
    bare = mt_gemm_sums(g, sums);
    MT_DO(mt__gemm_cuda_run(how, &bare, 1.0f, 0.0f, workspace, c->stream));
    return mt_op_launched(c, mt__fp8_finish_cuda(c->stream, g, sums, alpha));
}

mt_status mt_op_product_cuda(const mt_op_call *c, const mt_op_arg *like, const mt_gemm *g,
                             float alpha, float beta)
{
    const mt_gemm_choice *how;
    AtenTensorHandle workspace MT_CLOSED(mt_op_free) = NULL;
    void            *bytes = NULL;
    mt_gemm_key      key = mt_gemm_key_of(g, c->device_index, beta);

    if (like->t.n == 0)
        return MT_OK;
    MT_DO(mt__gemm_cuda_choose(&key, g, &how));
    if (mt__gemm_cuda_workspace(how) > 0)
        MT_DO(mt_op_new(&like->t, MT_U8, (int64_t)mt__gemm_cuda_workspace(how), &workspace,
                        &bytes));
    /* Freed before it is used: torch gives the memory to later work of this stream only. */
    return mt__gemm_cuda_bare(how) ? run_bare(c, like, how, g, alpha, bytes)
                                   : mt__gemm_cuda_run(how, g, alpha, beta, bytes, c->stream);
}

static mt_status cuda_gemm_(const mt_op_call *c, const mt_op_arg *a, StableIValue *result)
{
    mt_gemm g = { 0 };

    (void)result;
    MT_DO(gemm_of(a, &g));
    return mt_op_product_cuda(c, &a[C], &g, (float)a[ALPHA].f, (float)a[BETA].f);
}
#endif

#define OPS(X)                                                                            \
    X(gemm_, "VSSffi",                                                                    \
      "gemm_(Tensor(a!) c, Tensor a, Tensor b, float alpha, float beta, bool tf32) -> ()")
MT_OP_TABLE(gemm, OPS)
