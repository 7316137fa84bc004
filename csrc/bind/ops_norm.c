/* ops_norm.c — torch.ops.megatrain: RMS and layer normalisation. See csrc/ops/norm.h. */
#include "ops_check.h"
#include "../ops/fp8.h"
#include "../ops/norm.h"
#ifdef MT_WITH_CUDA
#include "../ops/fp8_cuda.h"
#include "../ops/norm_cuda.h"
#endif
#include <string.h>

/* How a weight is applied: megatrain_torch/ops.py has the same numbers. */
enum { ROUND_FIRST, ONE_PLUS, ROUND_LAST, STYLES };

/* ---- checks ---- */

/* Outer dimensions that follow one another in memory count as one. */
static mt_status rows_of(const mt_op_call *c, const char *name, const mt_op_tensor *t, mt_rows *out)
{
    mt_rows w = { { 1, 1, 1 }, { 0, 0, 0 } };
    int     at = MT_ROWS_DIMS;       /* the last one filled */

    if (t->dim < 1)
        return MT_FAIL(MT_EINVAL, "%s: %s must have 1 to %d dimensions", c->name, name, MT_OP_DIMS);
    if (t->size[t->dim - 1] > 1 && t->stride[t->dim - 1] != 1)
        return MT_FAIL(MT_EINVAL, "%s: %s has a stride of %lld in its last dimension, not 1",
                       c->name, name, (long long)t->stride[t->dim - 1]);
    for (int d = t->dim - 2; d >= 0; d--) {
        if (t->size[d] == 1)
            continue;
        if (at < MT_ROWS_DIMS && t->stride[d] == w.stride[at] * w.size[at]) {
            w.size[at] *= t->size[d];
            continue;
        }
        if (at-- == 0)
            return MT_FAIL(MT_EINVAL,
                           "%s: rows of %s need more than %d strides; pass %s.contiguous()",
                           c->name, name, MT_ROWS_DIMS, name);
        w.size[at] = t->size[d];
        w.stride[at] = t->stride[d];
    }
    *out = w;
    return MT_OK;
}

static mt_status same_shape(const mt_op_call *c, const char *name, const mt_op_tensor *t,
                            const mt_op_tensor *like)
{
    int same = t->dim == like->dim;

    for (int d = 0; same && d < t->dim; d++)
        same = t->size[d] == like->size[d];
    if (!same)
        return MT_FAIL(MT_EINVAL,
                       "%s: %s has %d dimensions and %lld elements; it must have the shape of "
                       "the first argument: %d and %lld", c->name, name, t->dim, (long long)t->n,
                       like->dim, (long long)like->n);
    return mt_op_type(c, name, t, like->dtype);
}

static mt_status same_if_given(const mt_op_call *c, const char *name, const mt_op_tensor *t,
                               const mt_op_tensor *like)
{
    return t->handle != NULL ? same_shape(c, name, t, like) : MT_OK;
}

/* A number for each row. */
static mt_status of_rows(const mt_op_call *c, const char *name, const mt_op_tensor *t,
                         const mt_norm *f)
{
    if (t->n != f->rows)
        return MT_FAIL(MT_EINVAL, "%s: %s has %lld elements for %lld rows", c->name, name,
                       (long long)t->n, (long long)f->rows);
    return mt_op_type(c, name, t, MT_F32);
}

/* A number for each column. */
static mt_status of_columns(const mt_op_call *c, const char *name, const mt_op_tensor *t,
                            const mt_norm *f)
{
    if (t->handle == NULL)
        return MT_OK;
    if (t->dim != 1 || t->size[0] != f->n)
        return mt_op_vector(c, name, t, f->n);
    return mt_op_type(c, name, t, (int)f->dt);
}

/* rows, n, dt from the first argument; weight and bias. */
static mt_status norm_of(const mt_op_call *c, const char *name, const mt_op_tensor *x,
                         const mt_op_tensor *weight, const mt_op_tensor *bias, mt_norm *f)
{
    MT_DO(mt_op_float(c, name, x));
    if (x->dim < 1 || x->size[x->dim - 1] < 1 || x->size[x->dim - 1] > INT32_MAX)
        return MT_FAIL(MT_EINVAL,
                       "%s: %s must have 1 to %d dimensions, the last of 1 to 2^31 - 1 numbers",
                       c->name, name, MT_OP_DIMS);
    f->dt = (mt_dtype)x->dtype;
    f->n = x->size[x->dim - 1];
    f->rows = x->n / f->n;
    if (f->rows > INT32_MAX)
        return MT_FAIL(MT_EINVAL, "%s: %s has %lld rows; 2^31 - 1 are the most", c->name, name,
                       (long long)f->rows);
    MT_DO(of_columns(c, "weight", weight, f));
    f->weight = weight->data;
    if (bias != NULL) {
        MT_DO(of_columns(c, "bias", bias, f));
        f->bias = bias->data;
    }
    return MT_OK;
}

static mt_status style_of(const mt_op_call *c, int64_t style, mt_norm *f)
{
    if (style < 0 || style >= STYLES)
        return MT_FAIL(MT_EINVAL, "%s: style is %lld; 0 to %d are known", c->name, (long long)style,
                       STYLES - 1);
    f->round_first = style == ROUND_FIRST;
    f->plus = style == ONE_PLUS ? 1.0f : 0.0f;
    return MT_OK;
}

static mt_status eps_of(const mt_op_call *c, double eps, mt_norm *f)
{
    f->eps = (float)eps;
    return eps >= 0 ? MT_OK : MT_FAIL(MT_EINVAL, "%s: eps is %g; 0 is the least", c->name, eps);
}

static mt_status ahead_of(const mt_op_call *c, const mt_norm *f, const mt_op_tensor *x,
                          const mt_op_tensor *add, const mt_op_tensor *y, const mt_op_tensor *s,
                          const mt_op_tensor *rstd, mt_norm_ahead *p)
{
    MT_DO(rows_of(c, "x", x, &p->x_rows));
    MT_DO(same_if_given(c, "add", add, x));
    MT_DO(same_shape(c, "y", y, x));
    MT_DO(same_if_given(c, "s", s, x));
    if ((add->handle != NULL) != (s->handle != NULL))
        return MT_FAIL(MT_EINVAL, "%s: s goes with add, and only with that", c->name);
    MT_DO(of_rows(c, "rstd", rstd, f));
    p->x = x->data;
    p->add = add->data;
    p->y = y->data;
    p->s = s->data;
    p->rstd = rstd->data;
    return MT_OK;
}

/* dx may be dy, row for row; shifted rows would be overwritten before they are read. */
static mt_status in_place(const mt_op_call *c, const mt_op_tensor *dx, const mt_op_tensor *dy,
                          const mt_norm_back *p)
{
    if (dx->data == dy->data && dx->n > 0 &&
        memcmp(&p->dx_rows, &p->dy_rows, sizeof p->dx_rows) != 0)
        return MT_FAIL(MT_EINVAL, "%s: dx begins where dy does, but has other strides", c->name);
    return MT_OK;
}

static mt_status back_of(const mt_op_call *c, const mt_norm *f, const mt_op_tensor *dy,
                         const mt_op_tensor *s, const mt_op_tensor *rstd, const mt_op_tensor *add,
                         const mt_op_tensor *dx, const mt_op_tensor *y, mt_norm_back *p)
{
    MT_DO(rows_of(c, "dy", dy, &p->dy_rows));
    MT_DO(same_shape(c, "s", s, dy));
    MT_DO(rows_of(c, "s", s, &p->s_rows));
    MT_DO(of_rows(c, "rstd", rstd, f));
    MT_DO(same_if_given(c, "add", add, dy));
    MT_DO(same_shape(c, "dx", dx, dy));
    MT_DO(rows_of(c, "dx", dx, &p->dx_rows));
    MT_DO(in_place(c, dx, dy, p));
    MT_DO(same_if_given(c, "y", y, dy));
    p->dy = dy->data;
    p->s = s->data;
    p->rstd = rstd->data;
    p->add = add->data;
    p->dx = dx->data;
    p->y = y->data;
    return MT_OK;
}

/* ---- arguments, in the order of the schemas below ---- */

static mt_status rms_ahead(const mt_op_call *c, const mt_op_arg *a, mt_norm *f, mt_norm_ahead *p)
{
    MT_DO(norm_of(c, "x", &a[0].t, &a[1].t, NULL, f));
    MT_DO(eps_of(c, a[6].f, f));
    MT_DO(style_of(c, a[7].i, f));
    return ahead_of(c, f, &a[0].t, &a[2].t, &a[3].t, &a[4].t, &a[5].t, p);
}

static mt_status rms_back(const mt_op_call *c, const mt_op_arg *a, mt_norm *f, mt_norm_back *p)
{
    MT_DO(norm_of(c, "dy", &a[0].t, &a[2].t, NULL, f));
    MT_DO(style_of(c, a[8].i, f));
    MT_DO(back_of(c, f, &a[0].t, &a[1].t, &a[3].t, &a[4].t, &a[5].t, &a[7].t, p));
    MT_DO(of_columns(c, "dweight", &a[6].t, f));
    p->dweight = a[6].t.data;
    return MT_OK;
}

static mt_status layer_ahead(const mt_op_call *c, const mt_op_arg *a, mt_norm *f, mt_norm_ahead *p)
{
    f->centred = 1;
    MT_DO(norm_of(c, "x", &a[0].t, &a[1].t, &a[2].t, f));
    MT_DO(eps_of(c, a[8].f, f));
    MT_DO(ahead_of(c, f, &a[0].t, &a[3].t, &a[4].t, &a[5].t, &a[7].t, p));
    MT_DO(of_rows(c, "mean", &a[6].t, f));
    p->mean = a[6].t.data;
    return MT_OK;
}

static mt_status layer_back(const mt_op_call *c, const mt_op_arg *a, mt_norm *f, mt_norm_back *p)
{
    f->centred = 1;
    MT_DO(norm_of(c, "dy", &a[0].t, &a[2].t, &a[3].t, f));
    MT_DO(back_of(c, f, &a[0].t, &a[1].t, &a[5].t, &a[6].t, &a[7].t, &a[10].t, p));
    MT_DO(of_rows(c, "mean", &a[4].t, f));
    MT_DO(of_columns(c, "dweight", &a[8].t, f));
    MT_DO(of_columns(c, "dbias", &a[9].t, f));
    p->mean = a[4].t.data;
    p->dweight = a[8].t.data;
    p->dbias = a[9].t.data;
    return MT_OK;
}

/* ---- kernels ---- */

typedef mt_status (*read_ahead)(const mt_op_call *c, const mt_op_arg *a, mt_norm *f,
                                mt_norm_ahead *p);
typedef mt_status (*read_back) (const mt_op_call *c, const mt_op_arg *a, mt_norm *f,
                                mt_norm_back *p);

static mt_status cpu_ahead(const mt_op_call *c, const mt_op_arg *a, read_ahead read)
{
    mt_norm       f = { 0 };
    mt_norm_ahead p = { 0 };
    mt_pool      *pool MT_CLOSED(mt_pool_close) = NULL;

    MT_DO(read(c, a, &f, &p));
    MT_DO(mt_op_pool(f.rows * f.n, &pool));
    mt_norm_forward(pool, &f, &p);
    return MT_OK;
}

static mt_status cpu_back(const mt_op_call *c, const mt_op_arg *a, read_back read)
{
    AtenTensorHandle scratch MT_CLOSED(mt_op_free) = NULL;
    mt_norm          f = { 0 };
    mt_norm_back     p = { 0 };
    mt_pool         *pool MT_CLOSED(mt_pool_close) = NULL;
    void            *partial;

    MT_DO(read(c, a, &f, &p));
    MT_DO(mt_op_new(&a[0].t, MT_F32, mt_norm_partials(&f), &scratch, &partial));
    p.partial = partial;
    MT_DO(mt_op_pool(f.rows * f.n, &pool));
    mt_norm_backward(pool, &f, &p);
    return MT_OK;
}

#define KERNEL(device, op, way, read)                                                              \
    static mt_status device##_##op(const mt_op_call *c, const mt_op_arg *a, StableIValue *result)  \
    {                                                                                              \
        (void)result;                                                                              \
        return device##_##way(c, a, read);                                                         \
    }
#define KERNELS(device)                                                                            \
    KERNEL(device, rms_norm, ahead, rms_ahead)                                                     \
    KERNEL(device, rms_norm_backward, back, rms_back)                                              \
    KERNEL(device, layer_norm, ahead, layer_ahead)                                                 \
    KERNEL(device, layer_norm_backward, back, layer_back)
KERNELS(cpu)

#ifdef MT_WITH_CUDA
static mt_status cuda_ahead(const mt_op_call *c, const mt_op_arg *a, read_ahead read)
{
    mt_norm       f = { 0 };
    mt_norm_ahead p = { 0 };

    MT_DO(read(c, a, &f, &p));
    return mt_op_launched(c, mt__norm_forward_cuda(c->stream, &f, &p));
}

static mt_status cuda_back(const mt_op_call *c, const mt_op_arg *a, read_back read)
{
    AtenTensorHandle scratch MT_CLOSED(mt_op_free) = NULL;
    mt_norm          f = { 0 };
    mt_norm_back     p = { 0 };
    void            *partial;

    MT_DO(read(c, a, &f, &p));
    MT_DO(mt_op_new(&a[0].t, MT_F32, mt__norm_partials_cuda(&f, &p), &scratch, &partial));
    p.partial = partial;
    return mt_op_launched(c, mt__norm_backward_cuda(c->stream, &f, &p));
}

KERNELS(cuda)
#endif

/* ---- fp8_rms_norm: codes of y, which is not written ---- */

enum { X_, WEIGHT, CODES, SCALE, RSTD, EPS, STYLE };

static mt_status coded_args(const mt_op_call *c, const mt_op_arg *a, mt_norm *f, mt_norm_ahead *p,
                            mt_fp8 *codes)
{
    MT_DO(norm_of(c, "x", &a[X_].t, &a[WEIGHT].t, NULL, f));
    MT_DO(mt_op_type(c, "x", &a[X_].t, MT_BF16));
    MT_DO(mt_op_matrix(c, "x", &a[X_].t, -1, -1));
    MT_DO(eps_of(c, a[EPS].f, f));
    MT_DO(style_of(c, a[STYLE].i, f));
    MT_DO(rows_of(c, "x", &a[X_].t, &p->x_rows));
    MT_DO(of_rows(c, "rstd", &a[RSTD].t, f));
    MT_DO(mt_op_type(c, "codes", &a[CODES].t, MT_F8E4M3));
    MT_DO(mt_op_matrix(c, "codes", &a[CODES].t, f->rows, f->n));
    MT_DO(of_rows(c, "scale", &a[SCALE].t, f));
    p->x = a[X_].t.data;
    p->rstd = a[RSTD].t.data;
    *codes = (mt_fp8){ .dtype = MT_BF16, .rows = f->rows, .cols = f->n, .stride = f->n,
                       .by_rows = a[CODES].t.data, .row_scale = a[SCALE].t.data };
    return MT_OK;
}

static mt_status cpu_fp8_rms_norm(const mt_op_call *c, const mt_op_arg *a, StableIValue *result)
{
    AtenTensorHandle scratch MT_CLOSED(mt_op_free) = NULL;
    mt_norm          f = { 0 };
    mt_norm_ahead    p = { 0 };
    mt_fp8           codes;
    mt_pool         *pool MT_CLOSED(mt_pool_close) = NULL;

    (void)result;
    MT_DO(coded_args(c, a, &f, &p, &codes));
    MT_DO(mt_op_new(&a[X_].t, MT_BF16, f.rows * f.n, &scratch, &p.y));
    MT_DO(mt_op_pool(f.rows * f.n, &pool));
    mt_norm_forward(pool, &f, &p);
    codes.x = p.y;
    mt_fp8_cast(pool, &codes);
    return MT_OK;
}

#ifdef MT_WITH_CUDA
/* In one kernel, or where there is none for such rows in two. */
static mt_status cuda_fp8_rms_norm(const mt_op_call *c, const mt_op_arg *a, StableIValue *result)
{
    AtenTensorHandle scratch MT_CLOSED(mt_op_free) = NULL;
    mt_norm          f = { 0 };
    mt_norm_ahead    p = { 0 };
    mt_fp8           codes;

    (void)result;
    MT_DO(coded_args(c, a, &f, &p, &codes));
    if (mt__norm_takes_codes_cuda(&f, &p)) {
        return mt_op_launched(c, mt__norm_codes_cuda(c->stream, &f, &p, codes.by_rows,
                                                     codes.row_scale));
    }
    MT_DO(mt_op_new(&a[X_].t, MT_BF16, f.rows * f.n, &scratch, &p.y));
    MT_DO(mt_op_launched(c, mt__norm_forward_cuda(c->stream, &f, &p)));
    codes.x = p.y;
    return mt_op_launched(c, mt__fp8_cast_cuda(c->stream, &codes));
}
#endif

#define OPS(X)                                                                                     \
    X(rms_norm, "STtWwWfi",                                                                        \
      "rms_norm(Tensor x, Tensor weight, Tensor? add, Tensor(a!) y, Tensor(b!)? s, "               \
      "Tensor(c!) rstd, float eps, int style) -> ()")                                              \
    X(rms_norm_backward, "SSTTtVWwi",                                                              \
      "rms_norm_backward(Tensor dy, Tensor s, Tensor weight, Tensor rstd, Tensor? add, "           \
      "Tensor(a!) dx, Tensor(b!) dweight, Tensor(c!)? y, int style) -> ()")                        \
    X(fp8_rms_norm, "STWWWfi",                                                                     \
      "fp8_rms_norm(Tensor x, Tensor weight, Tensor(a!) codes, Tensor(b!) scale, "                 \
      "Tensor(c!) rstd, float eps, int style) -> ()")                                              \
    X(layer_norm, "StttWwWWf",                                                                     \
      "layer_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor? add, Tensor(a!) y, "             \
      "Tensor(b!)? s, Tensor(c!) mean, Tensor(d!) rstd, float eps) -> ()")                         \
    X(layer_norm_backward, "SSttTTtVwww",                                                          \
      "layer_norm_backward(Tensor dy, Tensor s, Tensor? weight, Tensor? bias, Tensor mean, "       \
      "Tensor rstd, Tensor? add, Tensor(a!) dx, Tensor(b!)? dweight, Tensor(c!)? dbias, "          \
      "Tensor(d!)? y) -> ()")
MT_OP_TABLE(norm, OPS)
