/* ops_attention.c — torch.ops.megatrain: gradients of attention, on CUDA. See
 * csrc/ops/attention_cudnn.h. */
#include "ops_check.h"
#include <stdbool.h>
#ifdef MT_WITH_CUDA
#include "../ops/attention_cudnn.h"
#endif

/* The arguments, in the order of the schema below; tensors as MT_ATT_ names them, one lower. */
enum { Q, K, V, OUT, DOUT, DQ, DK, DV, LSE, BIAS, SCALE, CAUSAL };

static mt_status cpu_attention_backward(const mt_op_call *c, const mt_op_arg *a,
                                        StableIValue *result)
{
    (void)a;
    (void)result;
    return MT_FAIL(MT_ENOTSUP, "%s: of tensors on CUDA alone", c->name);
}

#ifdef MT_WITH_CUDA
static const char *const names[] = { "q", "k", "v", "out", "dout", "dq", "dk", "dv", "lse",
                                     "bias" };

/* [rows, heads, tokens, last] of this type, the last dimension dense. A bias may have one row or
 * head for all. */
static mt_status tensor_of(const mt_op_call *c, const mt_op_tensor *t, int which, int dt,
                           const int64_t size[4], mt_attention_key *key)
{
    if (t->dim != 4)
        return MT_FAIL(MT_EINVAL, "%s: %s has %d dimensions, not 4", c->name, names[which], t->dim);
    for (int d = 0; d < 4; d++) {
        if (t->size[d] != size[d] && !(which == BIAS && d < 2 && t->size[d] == 1))
            return MT_FAIL(MT_EINVAL, "%s: dimension %d of %s is %lld, not %lld", c->name, d,
                           names[which], (long long)t->size[d], (long long)size[d]);
        key->stride[which + 1][d] = t->stride[d];
    }
    MT_DO(mt_op_type(c, names[which], t, dt));
    if (t->stride[3] != 1 || (uintptr_t)t->data % 16 != 0)
        return MT_FAIL(MT_EINVAL,
                       "%s: %s must be dense in its last dimension, and begin at 16 bytes", c->name,
                       names[which]);
    return MT_OK;
}

static mt_status sizes_of(const mt_op_call *c, const mt_op_arg *a, mt_attention_key *key)
{
    const mt_op_tensor *q = &a[Q].t, *k = &a[K].t, *bias = &a[BIAS].t;

    if (q->dim != 4 || k->dim != 4 || (q->dtype != MT_BF16 && q->dtype != MT_F16))
        return MT_FAIL(MT_EINVAL, "%s: q and k must be [rows, heads, tokens, dim] of 16 bits",
                       c->name);
    if (q->n == 0 || k->n == 0 || q->size[1] % k->size[1] != 0)
        return MT_FAIL(MT_EINVAL,
                       "%s: %lld heads of queries for %lld of keys, %lld and %lld elements",
                       c->name, (long long)q->size[1], (long long)k->size[1], (long long)q->n,
                       (long long)k->n);
    *key = (mt_attention_key){ .device = c->device_index, .half = q->dtype == MT_F16,
                               .causal = a[CAUSAL].i != 0, .rows = q->size[0],
                               .hq = q->size[1], .hk = k->size[1], .queries = q->size[2],
                               .keys = k->size[2], .dim = q->size[3] };
    if (bias->handle != NULL && bias->dim == 4) {
        key->bias_rows = bias->size[0];
        key->bias_heads = bias->size[1];
    }
    return MT_OK;
}

static mt_status key_of(const mt_op_call *c, const mt_op_arg *a, mt_attention_key *key)
{
    MT_DO(sizes_of(c, a, key));
    for (int i = Q; i <= BIAS; i++) {
        const bool    of_keys = i == K || i == V || i == DK || i == DV;
        const int64_t size[4] = { key->rows, of_keys ? key->hk : key->hq,
                                  of_keys ? key->keys : key->queries,
                                  i == LSE ? 1 : i == BIAS ? key->keys : key->dim };

        if (a[i].t.handle != NULL)
            MT_DO(tensor_of(c, &a[i].t, i, i == LSE ? MT_F32 : a[Q].t.dtype, size, key));
    }
    return MT_OK;
}

static mt_status cuda_attention_backward(const mt_op_call *c, const mt_op_arg *a,
                                         StableIValue *result)
{
    const mt_attention_choice *how;
    AtenTensorHandle workspace MT_CLOSED(mt_op_free) = NULL;
    mt_attention_key key;
    void            *bytes, *data[MT_ATT_TENSORS] = { NULL };
    int64_t          n;

    (void)result;
    MT_DO(key_of(c, a, &key));
    MT_DO(mt__attention_cudnn_choose(&key, &how));
    for (int i = Q; i <= BIAS; i++)
        data[i + 1] = a[i].t.handle != NULL ? a[i].t.data : NULL;
    /* Freed before it is used: torch gives the memory to later work of this stream only. */
    n = (int64_t)mt__attention_cudnn_workspace(how);
    MT_DO(mt_op_new(&a[Q].t, MT_U8, n, &workspace, &bytes));
    return mt__attention_cudnn_run(how, data, (float)a[SCALE].f, bytes, c->stream);
}
#endif

#define OPS(X)                                                                                     \
    X(attention_backward, "SSSSSVVVSsfi",                                                          \
      "attention_backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor dout, Tensor(a!) dq, "  \
      "Tensor(b!) dk, Tensor(c!) dv, Tensor lse, Tensor? bias, float scale, bool causal) -> ()")
MT_OP_TABLE(attention, OPS)
