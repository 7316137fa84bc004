/* ops_glu.c — torch.ops.megatrain: gated activations, and the sum over tokens.
 * See csrc/ops/glu.h. */
#include "ops_check.h"
#include "../ops/glu.h"
#ifdef MT_WITH_CUDA
#include "../ops/glu_cuda.h"
#endif

/* ---- gated activations ---- */

static mt_status same_matrix(const mt_op_call *c, const char *name, const mt_op_tensor *t,
                             const mt_op_tensor *gate, int written)
{
    MT_DO(mt_op_type(c, name, t, gate->dtype));
    return (written ? mt_op_written : mt_op_matrix)(c, name, t, gate->size[0], gate->size[1]);
}

/* gate, up and act, which forward and backward share. */
static mt_status inputs(const mt_op_call *c, const mt_op_tensor *gate, const mt_op_tensor *up,
                        int64_t act, mt_glu *g)
{
    MT_DO(mt_op_float(c, "gate", gate));
    MT_DO(mt_op_matrix(c, "gate", gate, -1, -1));
    MT_DO(same_matrix(c, "up", up, gate, 0));
    if (act < 0 || act >= MT_ACTS)
        return MT_FAIL(MT_EINVAL, "%s: act is %lld; 0 to %d are known", c->name, (long long)act,
                       MT_ACTS - 1);
    g->dtype = (mt_dtype)gate->dtype;
    g->act = (int)act;
    g->rows = gate->size[0];
    g->n = gate->size[1];
    g->gate = gate->data;
    g->gate_stride = gate->stride[0];
    g->up = up->data;
    g->up_stride = up->stride[0];
    return MT_OK;
}

static mt_status forward_args(const mt_op_call *c, const mt_op_arg *a, mt_glu *g)
{
    *g = (mt_glu){ 0 };
    MT_DO(inputs(c, &a[0].t, &a[1].t, a[2].i, g));
    MT_DO(same_matrix(c, "h", &a[3].t, &a[0].t, 1));
    g->h = a[3].t.data;
    return MT_OK;
}

/* An output may be an input, element for element;
 * memory that is shifted against it would be read late. */
static mt_status in_place(const mt_op_call *c, const char *name, const mt_op_tensor *out,
                          const mt_op_tensor *in)
{
    if (out->n > 0 && out->data == in->data && out->size[0] > 1 && out->stride[0] != in->stride[0])
        return MT_FAIL(MT_EINVAL,
                       "%s: %s begins where an input does, but its rows are %lld elements "
                       "apart, not %lld", c->name, name, (long long)out->stride[0],
                       (long long)in->stride[0]);
    return MT_OK;
}

static mt_status backward_args(const mt_op_call *c, const mt_op_arg *a, mt_glu *g)
{
    static const char *const names[] = { "dgate", "dup", "h" };
    const mt_op_tensor *dh = &a[0].t, *gate = &a[1].t, *up = &a[2].t;

    *g = (mt_glu){ 0 };
    MT_DO(inputs(c, gate, up, a[3].i, g));
    MT_DO(same_matrix(c, "dh", dh, gate, 0));
    for (int i = 0; i < 3; i++) {
        const mt_op_tensor *out = &a[4 + i].t;

        if (out->handle == NULL)
            continue;
        MT_DO(same_matrix(c, names[i], out, gate, 1));
        MT_DO(in_place(c, names[i], out, gate));
        MT_DO(in_place(c, names[i], out, up));
        MT_DO(in_place(c, names[i], out, dh));
    }
    g->dh = dh->data;
    g->dgate = a[4].t.data;
    g->dgate_stride = a[4].t.stride[0];
    g->dup = a[5].t.data;
    g->dup_stride = a[5].t.stride[0];
    g->h = a[6].t.data;
    return MT_OK;
}

MT_OP_CPU(glu, mt_glu, g, forward_args, g.rows * g.n, mt_glu_forward)
MT_OP_CPU(glu_backward, mt_glu, g, backward_args, g.rows * g.n, mt_glu_backward)

#ifdef MT_WITH_CUDA
MT_OP_CUDA(glu, mt_glu, forward_args, mt__glu_forward_cuda)
MT_OP_CUDA(glu_backward, mt_glu, backward_args, mt__glu_backward_cuda)
#endif

/* ---- the sum over tokens ---- */

static mt_status column_args(const mt_op_call *c, const mt_op_arg *a, mt_columns *s)
{
    const mt_op_tensor *x = &a[0].t, *out = &a[1].t;

    MT_DO(mt_op_float(c, "x", x));
    MT_DO(mt_op_matrix(c, "x", x, -1, -1));
    MT_DO(mt_op_float(c, "out", out));
    MT_DO(mt_op_vector(c, "out", out, x->size[1]));
    *s = (mt_columns){ (mt_dtype)x->dtype, (mt_dtype)out->dtype, x->size[0], x->size[1],
                       x->stride[0], x->data, out->data };
    return MT_OK;
}

MT_OP_CPU(column_sum, mt_columns, s, column_args, s.rows * s.n, mt_column_sum)

#ifdef MT_WITH_CUDA
static mt_status cuda_column_sum(const mt_op_call *c, const mt_op_arg *a, StableIValue *result)
{
    AtenTensorHandle scratch MT_CLOSED(mt_op_free) = NULL;
    void            *sums = NULL;
    mt_columns       s;
    int64_t          segments;

    (void)result;
    MT_DO(column_args(c, a, &s));
    segments = (s.rows + MT_SUM_ROWS - 1) / MT_SUM_ROWS;
    if (segments > 1)
        MT_DO(mt_op_new(&a[0].t, MT_F32, segments * s.n, &scratch, &sums));
    return mt_op_launched(c, mt__column_sum_cuda(c->stream, &s, sums));
}
#endif

#define OPS(X)                                                                      \
    X(glu, "SSiW", "glu(Tensor gate, Tensor up, int act, Tensor(a!) h) -> ()")      \
    X(glu_backward, "TSSiVVw",                                                      \
      "glu_backward(Tensor dh, Tensor gate, Tensor up, int act, Tensor(a!) dgate, " \
      "Tensor(b!) dup, Tensor(c!)? h) -> ()")                                       \
    X(column_sum, "SW", "column_sum(Tensor x, Tensor(a!) out) -> ()")
MT_OP_TABLE(glu, OPS)
