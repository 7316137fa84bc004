/* ops_experts.c — torch.ops.megatrain: rows of a mixture of experts. See csrc/ops/experts.h. */
#include "ops_check.h"
#include "../ops/experts.h"
#include "../ops/glu.h"
#ifdef MT_WITH_CUDA
#include "../ops/experts_cuda.h"
#endif

/* [n] numbers of rows below `rows`; on CUDA nobody looks at their values. */
static mt_status rows_below(const mt_op_call *c, const char *name, const mt_op_tensor *t, int64_t n,
                            int64_t rows)
{
    const int64_t *row = t->data;

    MT_DO(mt_op_type(c, name, t, MT_I64));
    MT_DO(mt_op_vector(c, name, t, n));
    for (int64_t i = 0; c->device_index < 0 && i < n; i++)
        if (row[i] < 0 || row[i] >= rows)
            return MT_FAIL(MT_EINVAL, "%s: %s[%lld] is %lld; there are %lld rows", c->name, name,
                           (long long)i, (long long)row[i], (long long)rows);
    return MT_OK;
}

/* ---- sums of rows ---- */

static mt_status sum_args(const mt_op_call *c, const mt_op_arg *a, mt_row_sums *s)
{
    const mt_op_tensor *x = &a[0].t, *place = &a[1].t, *weights = &a[2].t, *base = &a[3].t;
    const mt_op_tensor *out = &a[5].t;
    int64_t   tokens;

    MT_DO(mt_op_float(c, "x", x));
    MT_DO(mt_op_matrix(c, "x", x, -1, -1));
    MT_DO(mt_op_type(c, "out", out, x->dtype));
    MT_DO(mt_op_matrix(c, "out", out, -1, x->size[1]));
    tokens = out->size[0];
    if (tokens == 0 ? place->n != 0 : place->n % tokens != 0)
        return MT_FAIL(MT_EINVAL, "%s: %lld places for %lld rows of out: not as many for each",
                       c->name, (long long)place->n, (long long)tokens);
    MT_DO(rows_below(c, "place", place, place->n, x->size[0]));
    if (weights->handle != NULL) {
        MT_DO(mt_op_type(c, "weights", weights, MT_F32));
        MT_DO(mt_op_vector(c, "weights", weights, place->n));
    }
    if (base->handle != NULL) {
        MT_DO(mt_op_type(c, "base", base, x->dtype));
        MT_DO(mt_op_matrix(c, "base", base, tokens, x->size[1]));
    }
    *s = (mt_row_sums){
        .dtype = (mt_dtype)x->dtype, .tokens = tokens, .k = tokens > 0 ? place->n / tokens : 0,
        .n = x->size[1], .x = x->data, .place = place->data, .weights = weights->data,
        .base = base->data, .factor = (float)a[4].f, .out = out->data,
    };
    return MT_OK;
}

MT_OP_CPU(sum_rows, mt_row_sums, s, sum_args, s.tokens * s.k * s.n, mt_sum_rows)

/* ---- gates ---- */

static mt_status expert_args(const mt_op_call *c, const mt_op_tensor *bias,
                             const mt_op_tensor *expert, mt_gates *g)
{
    const int32_t *e = expert->data;

    if ((bias->handle == NULL) != (expert->handle == NULL))
        return MT_FAIL(MT_EINVAL, "%s: bias and expert go together", c->name);
    if (bias->handle == NULL)
        return MT_OK;
    MT_DO(mt_op_type(c, "bias", bias, (int)g->dtype));
    MT_DO(mt_op_matrix(c, "bias", bias, -1, 2 * g->n));
    MT_DO(mt_op_type(c, "expert", expert, MT_I32));
    MT_DO(mt_op_vector(c, "expert", expert, g->rows));
    for (int64_t r = 0; c->device_index < 0 && r < g->rows; r++)
        if (e[r] < 0 || e[r] >= bias->size[0])
            return MT_FAIL(MT_EINVAL, "%s: expert[%lld] is %d; bias has %lld rows", c->name,
                           (long long)r, (int)e[r], (long long)bias->size[0]);
    g->bias = bias->data;
    g->expert = e;
    return MT_OK;
}

/* gu, bias, expert, act, interleaved from a[0] on; g->rows and g->n. */
static mt_status gate_args(const mt_op_call *c, const mt_op_arg *a, mt_gates *g)
{
    const mt_op_tensor *gu = &a[0].t;

    *g = (mt_gates){ 0 };
    MT_DO(mt_op_float(c, "gu", gu));
    MT_DO(mt_op_matrix(c, "gu", gu, -1, -1));
    if (gu->size[1] % 2 != 0)
        return MT_FAIL(MT_EINVAL, "%s: gu has %lld columns, which are no pairs", c->name,
                       (long long)gu->size[1]);
    if (a[3].i < 0 || a[3].i >= MT_ACTS)
        return MT_FAIL(MT_EINVAL, "%s: act is %lld; 0 to %d are known", c->name, (long long)a[3].i,
                       MT_ACTS - 1);
    g->dtype = (mt_dtype)gu->dtype;
    g->rows = gu->size[0];
    g->n = gu->size[1] / 2;
    g->gu = gu->data;
    g->act = (int)a[3].i;
    g->interleaved = a[4].i != 0;
    return expert_args(c, &a[1].t, &a[2].t, g);
}

static mt_status like_rows(const mt_op_call *c, const char *name, const mt_op_tensor *t,
                           const mt_gates *g, int64_t n)
{
    MT_DO(mt_op_type(c, name, t, (int)g->dtype));
    return mt_op_matrix(c, name, t, g->rows, n);
}

static mt_status forward_args(const mt_op_call *c, const mt_op_arg *a, mt_gates *g)
{
    MT_DO(gate_args(c, a, g));
    MT_DO(like_rows(c, "h", &a[5].t, g, g->n));
    g->h = a[5].t.data;
    return MT_OK;
}

static mt_status weight_args(const mt_op_call *c, const mt_op_tensor *weights,
                             const mt_op_tensor *order, const mt_op_tensor *dweights, mt_gates *g)
{
    if ((weights->handle == NULL) != (dweights->handle == NULL))
        return MT_FAIL(MT_EINVAL, "%s: weights and dweights go together", c->name);
    if (weights->handle != NULL) {
        MT_DO(mt_op_type(c, "weights", weights, MT_F32));
        MT_DO(mt_op_vector(c, "weights", weights, g->rows));
        MT_DO(mt_op_type(c, "dweights", dweights, MT_F32));
        MT_DO(mt_op_vector(c, "dweights", dweights, g->rows));
    }
    /* a permutation (experts.h); what can be out of memory is looked at */
    if (order->handle != NULL)
        MT_DO(rows_below(c, "order", order, g->rows, g->rows));
    g->weights = weights->data;
    g->dweights = dweights->data;
    g->order = order->data;
    return MT_OK;
}

/* dact, then as forward, then weights, order, dgu, h, dweights. */
static mt_status backward_args(const mt_op_call *c, const mt_op_arg *a, mt_gates *g)
{
    MT_DO(gate_args(c, a + 1, g));
    MT_DO(like_rows(c, "dact", &a[0].t, g, g->n));
    MT_DO(like_rows(c, "dgu", &a[8].t, g, 2 * g->n));
    MT_DO(like_rows(c, "h", &a[9].t, g, g->n));
    MT_DO(weight_args(c, &a[6].t, &a[7].t, &a[10].t, g));
    g->dact = a[0].t.data;
    g->dgu = a[8].t.data;
    g->h = a[9].t.data;
    return MT_OK;
}

MT_OP_CPU(expert_glu, mt_gates, g, forward_args, g.rows * g.n, mt_gates_forward)
MT_OP_CPU(expert_glu_backward, mt_gates, g, backward_args, g.rows * g.n, mt_gates_backward)

#ifdef MT_WITH_CUDA
MT_OP_CUDA(sum_rows, mt_row_sums, sum_args, mt__sum_rows_cuda)
MT_OP_CUDA(expert_glu, mt_gates, forward_args, mt__gates_forward_cuda)
MT_OP_CUDA(expert_glu_backward, mt_gates, backward_args, mt__gates_backward_cuda)
#endif

#define OPS(X)                                                                              \
    X(sum_rows, "TTttfW",                                                                   \
      "sum_rows(Tensor x, Tensor place, Tensor? weights, Tensor? base, float factor, "      \
      "Tensor(a!) out) -> ()")                                                              \
    X(expert_glu, "TttiiW",                                                                 \
      "expert_glu(Tensor gu, Tensor? bias, Tensor? expert, int act, bool interleaved, "     \
      "Tensor(a!) h) -> ()")                                                                \
    X(expert_glu_backward, "TTttiittWWw",                                                   \
      "expert_glu_backward(Tensor dact, Tensor gu, Tensor? bias, Tensor? expert, int act, " \
      "bool interleaved, Tensor? weights, Tensor? order, Tensor(a!) dgu, Tensor(b!) h, "    \
      "Tensor(c!)? dweights) -> ()")
MT_OP_TABLE(experts, OPS)
