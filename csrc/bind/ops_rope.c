/* ops_rope.c — torch.ops.megatrain: rotary position embedding. See csrc/ops/rope.h. */
#include "ops_check.h"
#include "../ops/rope.h"
#ifdef MT_WITH_CUDA
#include "../ops/rope_cuda.h"
#endif
#include <string.h>

/* The arguments, in the order of the schema below. */
enum { Q, K, COS, SIN, OUT_Q, OUT_K, V, OUT_V, INTERLEAVED, INVERSE };

static mt_status last_dense(const mt_op_call *c, const char *name, const mt_op_tensor *t)
{
    int d = t->dim - 1;

    if (t->size[d] > 1 && t->stride[d] != 1)
        return MT_FAIL(MT_EINVAL, "%s: %s has a stride of %lld in its last dimension, not 1",
                       c->name, name, (long long)t->stride[d]);
    return MT_OK;
}

/* A stride that is never taken says nothing: 0. */
static int64_t step(const mt_op_tensor *t, int d) { return t->size[d] > 1 ? t->stride[d] : 0; }

/* [B, S, heads, D] of q's type. heads -1: any. */
static mt_status heads_of(const mt_op_call *c, const char *name, const mt_op_tensor *t,
                          const mt_rope *r, int64_t heads, int64_t at[3])
{
    if (t->dim != 4 || t->size[0] != r->batch || t->size[1] != r->seq || t->size[3] != r->dim ||
        (heads >= 0 && t->size[2] != heads))
        return MT_FAIL(MT_EINVAL,
                       "%s: %s has %d dimensions and %lld elements; [%lld, %lld, %s, %lld] is "
                       "needed", c->name, name, t->dim, (long long)t->n, (long long)r->batch,
                       (long long)r->seq, heads < 0 ? "any" : "its input's heads",
                       (long long)r->dim);
    MT_DO(mt_op_type(c, name, t, (int)r->dt));
    MT_DO(last_dense(c, name, t));
    for (int d = 0; d < 3; d++)
        at[d] = step(t, d);
    return MT_OK;
}

/* out may be x, number for number; shifted against each other,
 * one would be written before it is read. */
static mt_status part_of(const mt_op_call *c, const char *const names[2], const mt_op_tensor *x,
                         const mt_op_tensor *out, const mt_rope *r, int64_t heads, mt_rope_part *p)
{
    MT_DO(heads_of(c, names[0], x, r, heads, p->x_at));
    MT_DO(heads_of(c, names[1], out, r, x->size[2], p->out_at));
    for (int d = 0; d < 3; d++)
        if (out->size[d] > 1 && out->stride[d] == 0)
            return MT_FAIL(MT_EINVAL,
                           "%s: %s has a stride of 0 in dimension %d: numbers would be written "
                           "twice", c->name, names[1], d);
    if (x->data == out->data && memcmp(p->x_at, p->out_at, sizeof p->x_at) != 0)
        return MT_FAIL(MT_EINVAL, "%s: %s begins where %s does, but has other strides", c->name,
                       names[1], names[0]);
    p->x = x->data;
    p->out = out->data;
    p->heads = x->size[2];
    return MT_OK;
}

/* [1 or B, S, R] */
static mt_status angles_of(const mt_op_call *c, const char *name, const mt_op_tensor *t,
                           const mt_rope *r, int64_t at[2])
{
    if (t->dim != 3 || (t->size[0] != 1 && t->size[0] != r->batch) || t->size[1] != r->seq ||
        t->size[2] != r->rot)
        return MT_FAIL(MT_EINVAL,
                       "%s: %s has %d dimensions and %lld elements; [1 or %lld, %lld, %lld] is "
                       "needed", c->name, name, t->dim, (long long)t->n, (long long)r->batch,
                       (long long)r->seq, (long long)r->rot);
    MT_DO(mt_op_type(c, name, t, (int)r->angle_dt));
    MT_DO(last_dense(c, name, t));
    at[0] = step(t, 0);
    at[1] = step(t, 1);
    return MT_OK;
}

/* Sizes and types, from q and cos. */
static mt_status sizes_of(const mt_op_call *c, const mt_op_tensor *q, const mt_op_tensor *cos,
                          mt_rope *r)
{
    MT_DO(mt_op_float(c, "q", q));
    if (q->dim != 4 || cos->dim != 3)
        return MT_FAIL(MT_EINVAL, "%s: q has %d dimensions and cos %d, not 4 and 3", c->name,
                       q->dim, cos->dim);
    if (cos->dtype != q->dtype && cos->dtype != MT_F32)
        return MT_FAIL(MT_EINVAL, "%s: cos is %s, neither q's type (%s) nor F32", c->name,
                       mt_dtype_name((mt_dtype)cos->dtype), mt_dtype_name((mt_dtype)q->dtype));
    r->dt = (mt_dtype)q->dtype;
    r->angle_dt = (mt_dtype)cos->dtype;
    r->batch = q->size[0];
    r->seq = q->size[1];
    r->dim = q->size[3];
    r->rot = cos->size[2];
    if (r->rot % 2 != 0 || r->rot > r->dim)
        return MT_FAIL(MT_EINVAL,
                       "%s: cos has %lld numbers for heads of %lld; an even number up to that "
                       "can be turned", c->name, (long long)r->rot, (long long)r->dim);
    if (r->dim > INT32_MAX || (r->seq > 0 && r->batch > INT32_MAX / r->seq))
        return MT_FAIL(MT_EINVAL,
                       "%s: %lld x %lld tokens with heads of %lld; 2^31 - 1 are the most", c->name,
                       (long long)r->batch, (long long)r->seq, (long long)r->dim);
    return MT_OK;
}

static mt_status rope_of(const mt_op_call *c, const mt_op_arg *a, mt_rope *r)
{
    static const char *const names[][2] = { { "q", "out_q" }, { "k", "out_k" }, { "v", "out_v" } };

    MT_DO(sizes_of(c, &a[Q].t, &a[COS].t, r));
    MT_DO(angles_of(c, "cos", &a[COS].t, r, r->cos_at));
    MT_DO(angles_of(c, "sin", &a[SIN].t, r, r->sin_at));
    MT_DO(part_of(c, names[0], &a[Q].t, &a[OUT_Q].t, r, -1, &r->part[MT_ROPE_Q]));
    MT_DO(part_of(c, names[1], &a[K].t, &a[OUT_K].t, r, -1, &r->part[MT_ROPE_K]));
    if ((a[V].t.handle != NULL) != (a[OUT_V].t.handle != NULL))
        return MT_FAIL(MT_EINVAL, "%s: out_v goes with v, and only with that", c->name);
    if (a[V].t.handle != NULL)
        MT_DO(part_of(c, names[2], &a[V].t, &a[OUT_V].t, r, a[K].t.size[2], &r->part[MT_ROPE_V]));
    if (a[V].t.data == a[OUT_V].t.data)
        r->part[MT_ROPE_V].heads = 0;            /* it stands where it should */
    r->cos = a[COS].t.data;
    r->sin = a[SIN].t.data;
    r->interleaved = a[INTERLEAVED].i != 0;
    r->inverse = a[INVERSE].i != 0;
    return MT_OK;
}

static int64_t numbers(const mt_rope *r)
{
    return r->batch * r->seq * r->dim *
           (r->part[MT_ROPE_Q].heads + r->part[MT_ROPE_K].heads + r->part[MT_ROPE_V].heads);
}

MT_OP_CPU(rope, mt_rope, r, rope_of, numbers(&r), mt_rope_host)

#ifdef MT_WITH_CUDA
static mt_status cuda_rope(const mt_op_call *c, const mt_op_arg *a, StableIValue *result)
{
    mt_rope r = { 0 };

    (void)result;
    MT_DO(rope_of(c, a, &r));
    if (numbers(&r) == 0)
        return MT_OK;
    return mt_op_launched(c, mt__rope_cuda(c->stream, &r));
}
#endif

#define OPS(X)                                                                                 \
    X(rope, "SSSSVVsvii",                                                                      \
      "rope(Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor(a!) out_q, Tensor(b!) out_k, "  \
      "Tensor? v, Tensor(c!)? out_v, bool interleaved, bool inverse) -> ()")
MT_OP_TABLE(rope, OPS)
