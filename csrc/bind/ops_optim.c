/* ops_optim.c — torch.ops.megatrain: sums of squares and AdamW, with the bits of the core. */
#include "ops_check.h"
#include "../ops/sumsq.h"
#include "../optim/adam.h"
#ifdef MT_WITH_CUDA
#include "../ops/sumsq_cuda.h"
#endif

static mt_status sumsq_dtype(const mt_op_tensor *x)
{
    if (x->dtype >= MT_F32 && x->dtype <= MT_F64)
        return MT_OK;
    return MT_FAIL(MT_EINVAL, "sumsq: x must be float32, bfloat16, float16 or float64");
}

/* x [n] any shape -> fp64 scalar, in the order of ops/sumsq.h. */
static mt_status cpu_sumsq(const mt_op_call *c, const mt_op_arg *a, StableIValue *result)
{
    const mt_op_tensor *x = &a[0].t;
    AtenTensorHandle out;
    mt_pool         *pool MT_CLOSED(mt_pool_close) = NULL;
    void            *sum;

    (void)c;
    MT_DO(sumsq_dtype(x));
    MT_DO(mt_op_pool(x->n, &pool));
    MT_DO(mt_op_new(x, MT_F64, -1, &out, &sum));
    *(double *)sum = mt_sumsq_host(pool, (mt_dtype)x->dtype, x->data, x->n);
    *result = (StableIValue)(uintptr_t)out;
    return MT_OK;
}

#ifdef MT_WITH_CUDA
static mt_status cuda_sumsq(const mt_op_call *c, const mt_op_arg *a, StableIValue *result)
{
    const mt_op_tensor *x = &a[0].t;
    AtenTensorHandle out MT_CLOSED(mt_op_free) = NULL, scratch MT_CLOSED(mt_op_free) = NULL;
    void            *sum, *sums;

    MT_DO(sumsq_dtype(x));
    MT_DO(mt_op_new(x, MT_F64, -1, &out, &sum));
    MT_DO(mt_op_new(x, MT_F64, x->n / MT_SUMSQ_CHUNK + 1, &scratch, &sums));
    MT_DO(mt_op_launched(c, mt__sumsq_cuda(c->stream, (mt_dtype)x->dtype, x->data, x->n, sums,
                                           sum)));
    *result = (StableIValue)(uintptr_t)out;
    out = NULL;
    return MT_OK;
}
#endif

/* Planes must agree before memory is touched; checks of numbers are mt_adam_step's. */
static mt_status adamw_planes(const mt_op_arg *a)
{
    static const char *const names[] = { "hi", "lo", "m", "v", "grad" };
    const mt_op_tensor *hi = &a[0].t;
    int wanted[] = { hi->dtype, MT_I16, MT_F32, MT_F32, -1 };

    if (hi->dtype != MT_F32 && hi->dtype != MT_BF16)
        return MT_FAIL(MT_EINVAL, "adamw_: hi must be float32 or bfloat16; float16 needs a master: "
                       "use megatrain_torch.AdamW");
    if ((hi->dtype == MT_BF16) != (a[1].t.handle != NULL))
        return MT_FAIL(MT_EINVAL, "adamw_: lo goes with a bfloat16 hi, and only with that");
    for (int i = 1; i < 5; i++) {
        const mt_op_tensor *t = &a[i].t;

        if (t->handle == NULL)
            continue;
        if (t->n != hi->n)
            return MT_FAIL(MT_EINVAL, "adamw_: %s has %lld elements, hi has %lld", names[i],
                           (long long)t->n, (long long)hi->n);
        if (wanted[i] >= 0 ? t->dtype != wanted[i] : t->dtype != hi->dtype && t->dtype != MT_F32)
            return MT_FAIL(MT_EINVAL, "adamw_: %s has the wrong dtype (lo int16, m and v float32, "
                           "grad float32 or hi's)", names[i]);
    }
    return MT_OK;
}

static mt_adam_tensor adamw_tensor(const mt_op_arg *a)
{
    return (mt_adam_tensor){
        .dtype = (mt_dtype)a[0].t.dtype, .n = a[0].t.n, .hi = a[0].t.data, .lo = a[1].t.data,
        .m = a[2].t.data, .v = a[3].t.data, .grad = a[4].t.data,
        .grad_dtype = (mt_dtype)a[4].t.dtype,
        .hyper = { .lr = a[5].f, .beta1 = a[6].f, .beta2 = a[7].f, .eps = a[8].f,
                   .weight_decay = a[9].f, .step = a[10].i },
    };
}

static mt_status cpu_adamw_(const mt_op_call *c, const mt_op_arg *a, StableIValue *result)
{
    mt_pool       *pool MT_CLOSED(mt_pool_close) = NULL;
    mt_adam_tensor t = adamw_tensor(a);

    (void)c;
    (void)result;
    MT_DO(adamw_planes(a));
    if (t.n == 0)
        return MT_OK;
    MT_DO(mt_op_pool(t.n, &pool));
    return mt_adam_step(pool, &t, 1, (float)a[11].f, mt_isa_best());
}

#ifdef MT_WITH_CUDA
static mt_status cuda_adamw_(const mt_op_call *c, const mt_op_arg *a, StableIValue *result)
{
    mt_adam_tensor t = adamw_tensor(a);

    (void)result;
    MT_DO(adamw_planes(a));
    if (t.n > 0)
        MT_DO(mt_adam_put_cuda(c->stream, &t, 1, (float)a[11].f));
    return MT_OK;
}
#endif

#define OPS(X)                                                                                \
    X(sumsq, "T", "sumsq(Tensor x) -> Tensor")                                                \
    X(adamw_, "WwWWTfffffif",                                                                 \
      "adamw_(Tensor(a!) hi, Tensor(b!)? lo, Tensor(c!) m, Tensor(d!) v, Tensor grad, "       \
      "float lr, float beta1, float beta2, float eps, float weight_decay, int step, "         \
      "float clip) -> ()")
MT_OP_TABLE(optim, OPS)
