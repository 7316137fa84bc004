/* ops_loss.c — torch.ops.megatrain.cross_entropy_. See csrc/ops/loss.h. */
#include "ops_check.h"
#include "../ops/loss.h"
#ifdef MT_WITH_CUDA
#include "../ops/loss_cuda.h"
#endif

static mt_status numbers_of(const mt_op_call *c, const mt_op_arg *a, mt_cross_entropy *e)
{
    double softcap = a[6].f, smoothing = a[7].f;

    if (!(softcap >= 0))
        return MT_FAIL(MT_EINVAL, "%s: softcap is %g; 0 is none, below is no cap", c->name,
                       softcap);
    if (!(smoothing >= 0 && smoothing <= 1))
        return MT_FAIL(MT_EINVAL, "%s: label_smoothing is %g; it goes from 0 to 1", c->name,
                       smoothing);
    e->ignore = a[5].i;
    e->softcap = (float)softcap;
    e->smoothing = (float)smoothing;
    e->z_loss = (float)a[8].f;
    return MT_OK;
}

static mt_status args_of(const mt_op_call *c, const mt_op_arg *a, mt_cross_entropy *e)
{
    const mt_op_tensor *x = &a[0].t, *labels = &a[1].t, *scale = &a[2].t;

    MT_DO(mt_op_float(c, "logits", x));
    MT_DO(mt_op_written(c, "logits", x, -1, -1));
    if (x->size[1] > INT32_MAX - 1024)       /* CUDA counts a row's elements in 32 bits */
        return MT_FAIL(MT_EINVAL, "%s: logits have %lld columns; %d is the most", c->name,
                       (long long)x->size[1], INT32_MAX - 1024);
    MT_DO(mt_op_type(c, "labels", labels, MT_I64));
    MT_DO(mt_op_vector(c, "labels", labels, x->size[0]));
    for (int i = 3; i < 5; i++) {
        MT_DO(mt_op_type(c, i == 3 ? "loss" : "lse", &a[i].t, MT_F32));
        MT_DO(mt_op_vector(c, i == 3 ? "loss" : "lse", &a[i].t, x->size[0]));
    }
    *e = (mt_cross_entropy){
        .dtype = (mt_dtype)x->dtype, .rows = x->size[0], .n = x->size[1], .stride = x->stride[0],
        .logits = x->data, .labels = labels->data, .loss = a[3].t.data, .lse = a[4].t.data,
    };
    if (scale->handle != NULL) {
        MT_DO(mt_op_type(c, "scale", scale, MT_F32));
        if (scale->n != 1)
            return MT_FAIL(MT_EINVAL, "%s: scale has %lld elements, not 1", c->name,
                           (long long)scale->n);
        e->scale = scale->data;
    }
    return numbers_of(c, a, e);
}

/* Before any row is written. On CUDA nobody looks: the host would have to wait. */
static mt_status labels_in_vocabulary(const mt_op_call *c, const mt_cross_entropy *e)
{
    for (int64_t row = 0; row < e->rows; row++)
        if (e->labels[row] != e->ignore && (e->labels[row] < 0 || e->labels[row] >= e->n))
            return MT_FAIL(MT_EINVAL,
                           "%s: the label of row %lld is %lld; it must be below %lld, or "
                           "ignore_index (%lld)", c->name, (long long)row,
                           (long long)e->labels[row], (long long)e->n, (long long)e->ignore);
    return MT_OK;
}

static mt_status cpu_cross_entropy_(const mt_op_call *c, const mt_op_arg *a, StableIValue *result)
{
    mt_pool         *pool MT_CLOSED(mt_pool_close) = NULL;
    mt_cross_entropy e;

    (void)result;
    MT_DO(args_of(c, a, &e));
    MT_DO(labels_in_vocabulary(c, &e));
    MT_DO(mt_op_pool(e.rows * e.n, &pool));
    mt_cross_entropy_rows(pool, &e);
    return MT_OK;
}

#ifdef MT_WITH_CUDA
MT_OP_CUDA(cross_entropy_, mt_cross_entropy, args_of, mt__cross_entropy_cuda)
#endif

#define OPS(X)                                                                                     \
    X(cross_entropy_, "VTtWWifff",                                                                 \
      "cross_entropy_(Tensor(a!) logits, Tensor labels, Tensor? scale, Tensor(b!) loss, "          \
      "Tensor(c!) lse, int ignore_index, float softcap, float label_smoothing, float z_loss) -> ()")
MT_OP_TABLE(loss, OPS)
