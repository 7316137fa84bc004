/* ops_embedding.c — torch.ops.megatrain.embedding_backward. See csrc/ops/embedding.h. */
#include "ops_check.h"
#include "../ops/embedding.h"
#ifdef MT_WITH_CUDA
#include "../ops/embedding_cuda.h"
#endif

static mt_status args_of(const mt_op_call *c, const mt_op_arg *a, mt_embedding *e)
{
    const mt_op_tensor *dy = &a[0].t, *ids = &a[1].t, *order = &a[2].t, *out = &a[4].t;

    MT_DO(mt_op_float(c, "dy", dy));
    MT_DO(mt_op_matrix(c, "dy", dy, -1, -1));
    MT_DO(mt_op_type(c, "ids", ids, MT_I64));
    MT_DO(mt_op_vector(c, "ids", ids, dy->size[0]));
    MT_DO(mt_op_type(c, "order", order, MT_I64));
    MT_DO(mt_op_vector(c, "order", order, dy->size[0]));
    MT_DO(mt_op_type(c, "out", out, dy->dtype));
    MT_DO(mt_op_matrix(c, "out", out, -1, dy->size[1]));
    if (dy->size[0] > INT32_MAX || out->size[0] >= INT32_MAX)
        return MT_FAIL(MT_EINVAL, "%s: %lld tokens and %lld rows; 2^31 - 1 is the most", c->name,
                       (long long)dy->size[0], (long long)out->size[0]);
    *e = (mt_embedding){
        .dtype = (mt_dtype)dy->dtype, .tokens = dy->size[0], .n = dy->size[1], .rows = out->size[0],
        .stride = dy->stride[0], .padding = a[3].i, .dy = dy->data, .ids = ids->data,
        .order = order->data, .out = out->data,
    };
    return MT_OK;
}

/* ids ascend, so the ends tell. On CUDA nobody looks: the forward's gather has. */
static mt_status ids_in_table(const mt_op_call *c, const mt_embedding *e)
{
    int64_t bad = e->tokens == 0 ? 0 : e->ids[0] < 0 ? e->ids[0] : e->ids[e->tokens - 1];

    if (e->tokens == 0 || (bad >= 0 && bad < e->rows))
        return MT_OK;
    return MT_FAIL(MT_EINVAL, "%s: id %lld is outside of the table's %lld rows", c->name,
                   (long long)bad, (long long)e->rows);
}

static mt_status cpu_embedding_backward(const mt_op_call *c, const mt_op_arg *a,
                                        StableIValue *result)
{
    mt_pool     *pool MT_CLOSED(mt_pool_close) = NULL;
    mt_embedding e;

    (void)result;
    MT_DO(args_of(c, a, &e));
    MT_DO(ids_in_table(c, &e));
    MT_DO(mt_op_pool((e.tokens + e.rows) * e.n, &pool));
    mt_embedding_backward(pool, &e);
    return MT_OK;
}

#ifdef MT_WITH_CUDA
static mt_status cuda_embedding_backward(const mt_op_call *c, const mt_op_arg *a,
                                         StableIValue *result)
{
    AtenTensorHandle rows MT_CLOSED(mt_op_free) = NULL, sums MT_CLOSED(mt_op_free) = NULL;
    void            *begins, *chunks;
    mt_embedding     e;

    (void)result;
    MT_DO(args_of(c, a, &e));
    MT_DO(mt_op_new(&a[0].t, MT_I32, e.rows + 1, &rows, &begins));
    MT_DO(mt_op_new(&a[0].t, MT_F32, mt__embedding_chunks(&e), &sums, &chunks));
    return mt_op_launched(c, mt__embedding_backward_cuda(c->stream, &e, begins, chunks));
}
#endif

#define OPS(X)                                                                                     \
    X(embedding_backward, "STTiW",                                                                 \
      "embedding_backward(Tensor dy, Tensor ids, Tensor order, int padding_idx, Tensor(a!) out) "  \
      "-> ()")
MT_OP_TABLE(embedding, OPS)
