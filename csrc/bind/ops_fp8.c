/* ops_fp8.c — torch.ops.megatrain: codes of 8 bits, and their products. See ops/fp8.h, gemm.h. */
#include "ops_check.h"
#include "ops.h"
#include "../ops/fp8.h"
#include "../ops/fp8_glu.h"
#ifdef MT_WITH_CUDA
#include "../ops/fp8_cuda.h"
#endif

/* ---- fp8_cast ---- */

enum { X_, BY_ROWS, ROW_SCALE, BY_COLUMNS, COLUMN_SCALE };

static mt_status by_columns(const mt_op_call *c, const mt_op_arg *codes, const mt_op_arg *scale,
                            mt_fp8 *f)
{
    MT_DO(mt_op_type(c, "codes_t", &codes->t, MT_F8E4M3));
    MT_DO(mt_op_matrix(c, "codes_t", &codes->t, f->cols, -1));
    MT_DO(mt_op_type(c, "scale_t", &scale->t, MT_F32));
    MT_DO(mt_op_vector(c, "scale_t", &scale->t, f->cols));
    f->wide = codes->t.size[1];
    if (f->wide < f->rows || f->wide % 4 != 0)
        return MT_FAIL(MT_EINVAL, "%s: codes_t has %lld columns for %lld rows of x: as many, in "
                       "fours", c->name, (long long)f->wide, (long long)f->rows);
    f->by_columns = codes->t.data;
    f->column_scale = scale->t.data;
    return MT_OK;
}

static mt_status cast_args(const mt_op_call *c, const mt_op_arg *a, mt_fp8 *f)
{
    const mt_op_tensor *x = &a[X_].t, *rows = &a[BY_ROWS].t, *columns = &a[BY_COLUMNS].t;

    *f = (mt_fp8){ 0 };
    MT_DO(mt_op_float(c, "x", x));
    MT_DO(mt_op_matrix(c, "x", x, -1, -1));
    if ((rows->handle != NULL && a[ROW_SCALE].t.handle == NULL) ||
        (columns->handle == NULL) != (a[COLUMN_SCALE].t.handle == NULL))
        return MT_FAIL(MT_EINVAL, "%s: codes and their scales go together", c->name);
    *f = (mt_fp8){ .dtype = (mt_dtype)x->dtype, .rows = x->size[0], .cols = x->size[1],
                   .stride = x->stride[0], .x = x->data };
    if (rows->handle != NULL) {
        MT_DO(mt_op_type(c, "codes", rows, MT_F8E4M3));
        MT_DO(mt_op_matrix(c, "codes", rows, f->rows, f->cols));
    }
    if (a[ROW_SCALE].t.handle != NULL) {
        MT_DO(mt_op_type(c, "scale", &a[ROW_SCALE].t, MT_F32));
        MT_DO(mt_op_vector(c, "scale", &a[ROW_SCALE].t, f->rows));
    }
    if (columns->handle != NULL)
        MT_DO(by_columns(c, &a[BY_COLUMNS], &a[COLUMN_SCALE], f));
    f->by_rows = rows->data;
    f->row_scale = a[ROW_SCALE].t.data;
    return MT_OK;
}

MT_OP_CPU(fp8_cast, mt_fp8, f, cast_args, f.rows * f.cols, mt_fp8_cast)

#ifdef MT_WITH_CUDA
MT_OP_CUDA(fp8_cast, mt_fp8, cast_args, mt__fp8_cast_cuda)
#endif

/* ---- fp8_shift, fp8_recast_ ---- */

enum { X_SCALE, DY_SCALE, SHIFT };
enum { R_X, R_SHIFT, R_SIGN, R_CODES, R_SCALE };

static mt_status shift_args(const mt_op_call *c, const mt_op_arg *a)
{
    int64_t rows = a[X_SCALE].t.size[0];

    MT_DO(mt_op_type(c, "x_scale", &a[X_SCALE].t, MT_F32));
    MT_DO(mt_op_vector(c, "x_scale", &a[X_SCALE].t, rows));
    MT_DO(mt_op_type(c, "dy_scale", &a[DY_SCALE].t, MT_F32));
    MT_DO(mt_op_vector(c, "dy_scale", &a[DY_SCALE].t, rows));
    MT_DO(mt_op_type(c, "shift", &a[SHIFT].t, MT_I8));
    return mt_op_vector(c, "shift", &a[SHIFT].t, rows + 1);
}

static mt_status cpu_fp8_shift(const mt_op_call *c, const mt_op_arg *a, StableIValue *result)
{
    (void)result;
    MT_DO(shift_args(c, a));
    mt_fp8_shift(a[X_SCALE].t.data, a[DY_SCALE].t.data, a[X_SCALE].t.size[0], a[SHIFT].t.data);
    return MT_OK;
}

static mt_status shifted(const mt_op_call *c, const mt_op_arg *shift, int64_t sign, mt_fp8 *f)
{
    MT_DO(mt_op_type(c, "shift", &shift->t, MT_I8));
    MT_DO(mt_op_vector(c, "shift", &shift->t, f->rows + 1));
    f->shift = shift->t.data;
    f->sign = sign < 0 ? -1 : 1;
    return MT_OK;
}

static mt_status recast_args(const mt_op_call *c, const mt_op_arg *a, mt_fp8 *f)
{
    const mt_op_tensor *x = &a[R_X].t;

    *f = (mt_fp8){ 0 };
    MT_DO(mt_op_float(c, "x", x));
    MT_DO(mt_op_matrix(c, "x", x, -1, -1));
    *f = (mt_fp8){ .dtype = (mt_dtype)x->dtype, .rows = x->size[0], .cols = x->size[1],
                   .stride = x->stride[0], .x = x->data };
    MT_DO(shifted(c, &a[R_SHIFT], a[R_SIGN].i, f));
    return by_columns(c, &a[R_CODES], &a[R_SCALE], f);
}

MT_OP_CPU(fp8_recast_, mt_fp8, f, recast_args, f.rows * f.cols, mt_fp8_recast)

#ifdef MT_WITH_CUDA
static mt_status cuda_fp8_shift(const mt_op_call *c, const mt_op_arg *a, StableIValue *result)
{
    (void)result;
    MT_DO(shift_args(c, a));
    return mt_op_launched(c, mt__fp8_shift_cuda(c->stream, a[X_SCALE].t.data, a[DY_SCALE].t.data,
                                                a[X_SCALE].t.size[0], a[SHIFT].t.data));
}

MT_OP_CUDA(fp8_recast_, mt_fp8, recast_args, mt__fp8_recast_cuda)
#endif

/* ---- fp8_gemm_ ---- */

enum { C_, A_, A_SCALE, B_, B_SCALE, BIAS, BASE, ALPHA, FAST };

static mt_status codes_of(const mt_op_call *c, const char *name, const mt_op_arg *codes,
                          const char *scale_name, const mt_op_arg *scale, mt_gemm_matrix *m)
{
    MT_DO(mt_op_type(c, name, &codes->t, MT_F8E4M3));
    MT_DO(mt_op_matrix(c, name, &codes->t, -1, -1));
    MT_DO(mt_op_type(c, scale_name, &scale->t, MT_F32));
    MT_DO(mt_op_vector(c, scale_name, &scale->t, codes->t.size[0]));
    m->data = codes->t.data;
    return mt_gemm_matrix_of(name, codes->t.size, codes->t.stride, m);
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

    if (bias->handle != NULL) {
        MT_DO(mt_op_type(c, "bias", bias, g->c_type));
        MT_DO(mt_op_vector(c, "bias", bias, g->c.cols));
        g->bias = bias->data;
    }
    if (base->handle != NULL) {
        MT_DO(mt_op_type(c, "base", base, g->c_type));
        MT_DO(mt_op_matrix(c, "base", base, g->c.rows, g->c.cols));
        g->base = base->data;
        g->base_ld = base->size[0] > 1 ? base->stride[0] : g->c.cols;
    }
    return MT_OK;
}

static mt_status gemm_args(const mt_op_call *c, const mt_op_arg *a, mt_gemm *g)
{
    MT_DO(codes_of(c, "a", &a[A_], "a_scale", &a[A_SCALE], &g->a));
    MT_DO(codes_of(c, "b", &a[B_], "b_scale", &a[B_SCALE], &g->b));
    if (g->a.cols != g->b.cols || g->a.cols == 0)
        return MT_FAIL(MT_EINVAL, "%s: rows of a have %lld codes and rows of b %lld: as many, and "
                       "some", c->name, (long long)g->a.cols, (long long)g->b.cols);
    if (a[C_].t.dtype != MT_F32 && a[C_].t.dtype != MT_BF16)
        return MT_FAIL(MT_EINVAL, "%s: c must be float32 or bfloat16", c->name);
    MT_DO(mt_op_written(c, "c", &a[C_].t, g->a.rows, g->b.rows));
    g->c.data = a[C_].t.data;
    MT_DO(mt_gemm_matrix_of("c", a[C_].t.size, a[C_].t.stride, &g->c));
    g->ab = MT_F8E4M3;
    g->c_type = (mt_dtype)a[C_].t.dtype;
    g->a_scale = a[A_SCALE].t.data;
    g->b_scale = a[B_SCALE].t.data;
    g->fast = a[FAST].i != 0;
    turn(&g->b);
    return added(c, a, g);
}

static mt_status cpu_fp8_gemm_(const mt_op_call *c, const mt_op_arg *a, StableIValue *result)
{
    mt_gemm g = { 0 };

    (void)result;
    MT_DO(gemm_args(c, a, &g));
    return mt_op_product_cpu(&g, (float)a[ALPHA].f, 0.0f);
}

#ifdef MT_WITH_CUDA
static mt_status cuda_fp8_gemm_(const mt_op_call *c, const mt_op_arg *a, StableIValue *result)
{
    mt_gemm g = { 0 };

    (void)result;
    MT_DO(gemm_args(c, a, &g));
    return mt_op_product_cuda(c, &a[C_], &g, (float)a[ALPHA].f, g.base != NULL ? 1.0f : 0.0f);
}
#endif

/* ---- fp8_glu, fp8_glu_backward, fp8_glu_recast_ ---- */

enum { GATE, UP, ACT, H_CODES, H_SCALE };
enum { B_DH, B_GATE, B_UP, B_ACT, D_CODES, D_SCALE, D_CODES_T, D_SCALE_T, H_CODES_T, H_SCALE_T,
       H_ROWS };
enum { G_SHIFT = B_ACT + 1, G_SIGN, G_CODES, G_SCALE };

/* CUDA takes 16 bytes at a time; the CPU refuses what CUDA would. */
static mt_status in_sixteens(const mt_op_call *c, const char *name, const mt_op_tensor *t,
                             int64_t rows, int64_t n)
{
    MT_DO(mt_op_type(c, name, t, MT_BF16));
    MT_DO(mt_op_matrix(c, name, t, rows, n));
    if (t->size[1] % 16 != 0 || t->stride[0] % 8 != 0 || (uintptr_t)t->data % 16 != 0)
        return MT_FAIL(MT_EINVAL, "%s: %s has %lld columns, rows %lld elements apart: columns in "
                       "sixteens, each row at a multiple of 16 bytes", c->name, name,
                       (long long)t->size[1], (long long)t->stride[0]);
    return MT_OK;
}

static mt_status glu_args(const mt_op_call *c, const mt_op_tensor *gate, const mt_op_tensor *up,
                          int64_t act, mt_glu *g)
{
    MT_DO(in_sixteens(c, "gate", gate, -1, -1));
    MT_DO(in_sixteens(c, "up", up, gate->size[0], gate->size[1]));
    if (act < 0 || act >= MT_ACTS)
        return MT_FAIL(MT_EINVAL, "%s: act is %lld; 0 to %d are known", c->name, (long long)act,
                       MT_ACTS - 1);
    *g = (mt_glu){ .dtype = MT_BF16, .act = (int)act, .rows = gate->size[0], .n = gate->size[1],
                   .gate = gate->data, .up = up->data, .gate_stride = gate->stride[0],
                   .up_stride = up->stride[0] };
    return MT_OK;
}

/* Codes [rows,n] and a scale for each of their rows. */
static mt_status made(const mt_op_call *c, const mt_op_arg *codes, const mt_op_arg *scale,
                      int64_t rows, int64_t n)
{
    MT_DO(mt_op_type(c, "codes", &codes->t, MT_F8E4M3));
    MT_DO(mt_op_matrix(c, "codes", &codes->t, rows, n));
    MT_DO(mt_op_type(c, "scale", &scale->t, MT_F32));
    return mt_op_vector(c, "scale", &scale->t, rows);
}

static mt_status forward_args(const mt_op_call *c, const mt_op_arg *a, mt_fp8_glu *f)
{
    *f = (mt_fp8_glu){ 0 };
    MT_DO(glu_args(c, &a[GATE].t, &a[UP].t, a[ACT].i, &f->glu));
    MT_DO(made(c, &a[H_CODES], &a[H_SCALE], f->glu.rows, f->glu.n));
    f->h = (mt_fp8){ .dtype = MT_BF16, .rows = f->glu.rows, .cols = f->glu.n,
                     .by_rows = a[H_CODES].t.data, .row_scale = a[H_SCALE].t.data };
    return MT_OK;
}

static mt_status read_backward(const mt_op_call *c, const mt_op_arg *a, mt_glu *g)
{
    MT_DO(glu_args(c, &a[B_GATE].t, &a[B_UP].t, a[B_ACT].i, g));
    MT_DO(in_sixteens(c, "dh", &a[B_DH].t, g->rows, g->n));
    g->dh = a[B_DH].t.data;
    return MT_OK;
}

/* Codes of d where they have 2 n rows, else of h. */
static mt_status glu_recast_args(const mt_op_call *c, const mt_op_arg *a, mt_fp8_glu *f)
{
    mt_fp8 *to;

    *f = (mt_fp8_glu){ 0 };
    MT_DO(read_backward(c, a, &f->glu));
    to = a[G_CODES].t.size[0] == 2 * f->glu.n ? &f->d : &f->h;
    *to = (mt_fp8){ .dtype = MT_BF16, .rows = f->glu.rows,
                    .cols = to == &f->d ? 2 * f->glu.n : f->glu.n };
    MT_DO(shifted(c, &a[G_SHIFT], a[G_SIGN].i, to));
    return by_columns(c, &a[G_CODES], &a[G_SCALE], to);
}

static mt_status backward_args(const mt_op_call *c, const mt_op_arg *a, mt_fp8_glu *f)
{
    mt_glu *g = &f->glu;
    int64_t wide;

    *f = (mt_fp8_glu){ 0 };
    MT_DO(read_backward(c, a, g));
    wide = (g->rows + 15) / 16 * 16;
    MT_DO(made(c, &a[D_CODES], &a[D_SCALE], g->rows, 2 * g->n));
    MT_DO(made(c, &a[D_CODES_T], &a[D_SCALE_T], 2 * g->n, wide));
    MT_DO(made(c, &a[H_CODES_T], &a[H_SCALE_T], g->n, wide));
    MT_DO(mt_op_type(c, "h_rows", &a[H_ROWS].t, MT_F32));
    MT_DO(mt_op_vector(c, "h_rows", &a[H_ROWS].t, g->rows));
    f->d = (mt_fp8){ .dtype = MT_BF16, .rows = g->rows, .cols = 2 * g->n, .wide = wide,
                     .by_rows = a[D_CODES].t.data, .row_scale = a[D_SCALE].t.data,
                     .by_columns = a[D_CODES_T].t.data, .column_scale = a[D_SCALE_T].t.data };
    f->h = (mt_fp8){ .dtype = MT_BF16, .rows = g->rows, .cols = g->n, .wide = wide,
                     .row_scale = a[H_ROWS].t.data,
                     .by_columns = a[H_CODES_T].t.data, .column_scale = a[H_SCALE_T].t.data };
    return MT_OK;
}

typedef mt_status (*read_args)(const mt_op_call *c, const mt_op_arg *a, mt_fp8_glu *f);

static mt_status on_cpu(const mt_op_call *c, const mt_op_arg *a, read_args read, int64_t matrices,
                        void (*run)(mt_pool *, const mt_fp8_glu *, void *))
{
    AtenTensorHandle memory MT_CLOSED(mt_op_free) = NULL;
    void            *scratch = NULL;
    mt_pool         *pool MT_CLOSED(mt_pool_close) = NULL;
    mt_fp8_glu       f;

    MT_DO(read(c, a, &f));
    MT_DO(mt_op_new(&a[0].t, MT_BF16, matrices * f.glu.rows * f.glu.n, &memory, &scratch));
    MT_DO(mt_op_pool(f.glu.rows * f.glu.n, &pool));
    run(pool, &f, scratch);
    return MT_OK;
}

static mt_status cpu_fp8_glu(const mt_op_call *c, const mt_op_arg *a, StableIValue *result)
{
    (void)result;
    return on_cpu(c, a, forward_args, 1, mt_fp8_glu_forward);
}

static mt_status cpu_fp8_glu_backward(const mt_op_call *c, const mt_op_arg *a,
                                      StableIValue *result)
{
    (void)result;
    return on_cpu(c, a, backward_args, 3, mt_fp8_glu_backward);
}

static mt_status cpu_fp8_glu_recast_(const mt_op_call *c, const mt_op_arg *a, StableIValue *result)
{
    (void)result;
    return on_cpu(c, a, glu_recast_args, 3, mt_fp8_glu_recast);
}

#ifdef MT_WITH_CUDA
MT_OP_CUDA(fp8_glu, mt_fp8_glu, forward_args, mt__fp8_glu_forward_cuda)
MT_OP_CUDA(fp8_glu_backward, mt_fp8_glu, backward_args, mt__fp8_glu_backward_cuda)
MT_OP_CUDA(fp8_glu_recast_, mt_fp8_glu, glu_recast_args, mt__fp8_glu_recast_cuda)
#endif

#define OPS(X)                                                                                  \
    X(fp8_cast, "Swwww",                                                                        \
      "fp8_cast(Tensor x, Tensor(a!)? codes, Tensor(b!)? scale, Tensor(c!)? codes_t, "          \
      "Tensor(d!)? scale_t) -> ()")                                                             \
    X(fp8_shift, "SSW", "fp8_shift(Tensor x_scale, Tensor dy_scale, Tensor(a!) shift) -> ()")     \
    X(fp8_recast_, "SSiWW",                                                                     \
      "fp8_recast_(Tensor x, Tensor shift, int sign, Tensor(a!) codes_t, Tensor(b!) scale_t) "  \
      "-> ()")                                                                                  \
    X(fp8_glu_recast_, "TSSiSiWW",                                                              \
      "fp8_glu_recast_(Tensor dh, Tensor gate, Tensor up, int act, Tensor shift, int sign, "    \
      "Tensor(a!) codes_t, Tensor(b!) scale_t) -> ()")                                          \
    X(fp8_gemm_, "VSTSTtsfi",                                                                   \
      "fp8_gemm_(Tensor(a!) c, Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, "            \
      "Tensor? bias, Tensor? base, float alpha, bool fast) -> ()")                              \
    X(fp8_glu, "SSiWW",                                                                         \
      "fp8_glu(Tensor gate, Tensor up, int act, Tensor(a!) codes, Tensor(b!) scale) -> ()")     \
    X(fp8_glu_backward, "TSSiWWWWWWW",                                                          \
      "fp8_glu_backward(Tensor dh, Tensor gate, Tensor up, int act, Tensor(a!) codes, "         \
      "Tensor(b!) scale, Tensor(c!) codes_t, Tensor(d!) scale_t, Tensor(e!) h_t, "              \
      "Tensor(f!) h_scale_t, Tensor(g!) h_rows) -> ()")
MT_OP_TABLE(fp8, OPS)
