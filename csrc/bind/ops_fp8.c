/* ops_fp8.c — torch.ops.megatrain: codes of 8 bits, and their products. See ops/fp8.h, gemm.h. */
#include "ops_check.h"
#include "ops_gemm.h"
#include "../ops/fp8.h"
#ifdef MT_WITH_CUDA
#include "../ops/fp8_cuda.h"
#endif

/* ---- fp8_cast ---- */

enum { X_, BY_ROWS, ROW_SCALE, BY_COLUMNS, COLUMN_SCALE };

static mt_status cast_args(const mt_op_call *c, const mt_op_arg *a, mt_fp8 *f)
{
    const mt_op_tensor *x = &a[X_].t, *rows = &a[BY_ROWS].t, *columns = &a[BY_COLUMNS].t;
    mt_status st;

    *f = (mt_fp8){ 0 };
    MT_TRY(mt_op_float(c, "x", x));
    MT_TRY(mt_op_matrix(c, "x", x, -1, -1));
    if ((rows->handle == NULL) != (a[ROW_SCALE].t.handle == NULL) ||
        (columns->handle == NULL) != (a[COLUMN_SCALE].t.handle == NULL))
        return MT_FAIL(MT_EINVAL, "%s: codes and their scales go together", c->name);
    *f = (mt_fp8){ .dtype = (mt_dtype)x->dtype, .rows = x->size[0], .cols = x->size[1],
                   .stride = x->stride[0], .x = x->data };
    if (rows->handle != NULL) {
        MT_TRY(mt_op_type(c, "codes", rows, MT_F8E4M3));
        MT_TRY(mt_op_matrix(c, "codes", rows, f->rows, f->cols));
        MT_TRY(mt_op_type(c, "scale", &a[ROW_SCALE].t, MT_F32));
        MT_TRY(mt_op_vector(c, "scale", &a[ROW_SCALE].t, f->rows));
    }
    if (columns->handle != NULL) {
        MT_TRY(mt_op_type(c, "codes_t", columns, MT_F8E4M3));
        MT_TRY(mt_op_matrix(c, "codes_t", columns, f->cols, -1));
        MT_TRY(mt_op_type(c, "scale_t", &a[COLUMN_SCALE].t, MT_F32));
        MT_TRY(mt_op_vector(c, "scale_t", &a[COLUMN_SCALE].t, f->cols));
        f->wide = columns->size[1];
        if (f->wide < f->rows || f->wide % 4 != 0)
            return MT_FAIL(MT_EINVAL, "%s: codes_t has %lld columns for %lld rows of x: as many, in"
                           " fours", c->name, (long long)f->wide, (long long)f->rows);
    }
    f->by_rows = rows->data;
    f->row_scale = a[ROW_SCALE].t.data;
    f->by_columns = columns->data;
    f->column_scale = a[COLUMN_SCALE].t.data;
fail:
    return st;
}

static mt_status cpu_fp8_cast(const mt_op_call *c, const mt_op_arg *a, StableIValue *result)
{
    mt_pool  *pool = NULL;
    mt_fp8    f;
    mt_status st;

    (void)result;
    MT_TRY(cast_args(c, a, &f));
    MT_TRY(mt_op_pool(f.rows * f.cols, &pool));
    mt_fp8_cast(pool, &f);
fail:
    mt_pool_close(pool);
    return st;
}

#ifdef MT_WITH_CUDA
static mt_status cuda_fp8_cast(const mt_op_call *c, const mt_op_arg *a, StableIValue *result)
{
    mt_fp8    f;
    mt_status st;

    (void)result;
    MT_TRY(cast_args(c, a, &f));
    st = mt_op_launched(c, mt__fp8_cast_cuda(c->stream, &f));
fail:
    return st;
}
#endif

/* ---- fp8_gemm_ ---- */

enum { C_, A_, A_SCALE, B_, B_SCALE, BIAS, BASE, ALPHA, FAST };

static mt_status codes_of(const mt_op_call *c, const char *name, const mt_op_arg *codes,
                          const char *scale_name, const mt_op_arg *scale, mt_gemm_matrix *m)
{
    mt_status st;

    MT_TRY(mt_op_type(c, name, &codes->t, MT_F8E4M3));
    MT_TRY(mt_op_matrix(c, name, &codes->t, -1, -1));
    MT_TRY(mt_op_type(c, scale_name, &scale->t, MT_F32));
    MT_TRY(mt_op_vector(c, scale_name, &scale->t, codes->t.size[0]));
    m->data = codes->t.data;
    st = mt_gemm_matrix_of(name, codes->t.size, codes->t.stride, m);
fail:
    return st;
}

/* b's rows are columns of what a is multiplied with. */
static void turn(mt_gemm_matrix *b)
{
    int64_t rows = b->rows;

    b->rows = b->cols;
    b->cols = rows;
    b->by_columns = 1;
}

static mt_status added(const mt_op_call *c, const mt_op_arg *a, mt_gemm *g)
{
    const mt_op_tensor *bias = &a[BIAS].t, *base = &a[BASE].t;
    mt_status st = MT_OK;

    if (bias->handle != NULL) {
        MT_TRY(mt_op_type(c, "bias", bias, g->c_type));
        MT_TRY(mt_op_vector(c, "bias", bias, g->c.cols));
        g->bias = bias->data;
    }
    if (base->handle != NULL) {
        MT_TRY(mt_op_type(c, "base", base, g->c_type));
        MT_TRY(mt_op_matrix(c, "base", base, g->c.rows, g->c.cols));
        g->base = base->data;
        g->base_ld = base->size[0] > 1 ? base->stride[0] : g->c.cols;
    }
fail:
    return st;
}

static mt_status gemm_args(const mt_op_call *c, const mt_op_arg *a, mt_gemm *g)
{
    mt_status st;

    MT_TRY(codes_of(c, "a", &a[A_], "a_scale", &a[A_SCALE], &g->a));
    MT_TRY(codes_of(c, "b", &a[B_], "b_scale", &a[B_SCALE], &g->b));
    if (g->a.cols != g->b.cols || g->a.cols == 0)
        return MT_FAIL(MT_EINVAL, "%s: rows of a have %lld codes and rows of b %lld: as many, and "
                       "some", c->name, (long long)g->a.cols, (long long)g->b.cols);
    if (a[C_].t.dtype != MT_F32 && a[C_].t.dtype != MT_BF16)
        return MT_FAIL(MT_EINVAL, "%s: c must be float32 or bfloat16", c->name);
    MT_TRY(mt_op_written(c, "c", &a[C_].t, g->a.rows, g->b.rows));
    g->c.data = a[C_].t.data;
    MT_TRY(mt_gemm_matrix_of("c", a[C_].t.size, a[C_].t.stride, &g->c));
    g->ab = MT_F8E4M3;
    g->c_type = (mt_dtype)a[C_].t.dtype;
    g->a_scale = a[A_SCALE].t.data;
    g->b_scale = a[B_SCALE].t.data;
    g->fast = a[FAST].i != 0;
    turn(&g->b);
    st = added(c, a, g);
fail:
    return st;
}

static mt_status cpu_fp8_gemm_(const mt_op_call *c, const mt_op_arg *a, StableIValue *result)
{
    mt_gemm   g = { 0 };
    mt_status st;

    (void)result;
    MT_TRY(gemm_args(c, a, &g));
    st = mt_op_product_cpu(&g, (float)a[ALPHA].f, 0.0f);
fail:
    return st;
}

#ifdef MT_WITH_CUDA
static mt_status cuda_fp8_gemm_(const mt_op_call *c, const mt_op_arg *a, StableIValue *result)
{
    mt_gemm   g = { 0 };
    mt_status st;

    (void)result;
    MT_TRY(gemm_args(c, a, &g));
    st = mt_op_product_cuda(c, &a[C_], &g, (float)a[ALPHA].f, g.base != NULL ? 1.0f : 0.0f);
fail:
    return st;
}
#endif

#define OPS(X)                                                                                  \
    X(fp8_cast, "Swwww",                                                                        \
      "fp8_cast(Tensor x, Tensor(a!)? codes, Tensor(b!)? scale, Tensor(c!)? codes_t, "          \
      "Tensor(d!)? scale_t) -> ()")                                                             \
    X(fp8_gemm_, "VSTSTtsfi",                                                                   \
      "fp8_gemm_(Tensor(a!) c, Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, "            \
      "Tensor? bias, Tensor? base, float alpha, bool fast) -> ()")
MT_OP_TABLE(fp8, OPS)
