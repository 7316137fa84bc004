/* ops_check.h — what rooms ask of their arguments, in words that name op, argument,
 * value and limit. */
#ifndef MT_OPS_CHECK_H
#define MT_OPS_CHECK_H

#include "ops.h"

/* fp32, bf16 or fp16. */
static inline mt_status mt_op_float(const mt_op_call *c, const char *name, const mt_op_tensor *t)
{
    if (t->dtype == MT_F32 || t->dtype == MT_BF16 || t->dtype == MT_F16)
        return MT_OK;
    return MT_FAIL(MT_EINVAL, "%s: %s must be float32, bfloat16 or float16", c->name, name);
}

static inline mt_status mt_op_type(const mt_op_call *c, const char *name, const mt_op_tensor *t,
                                   int dt)
{
    if (t->dtype == dt)
        return MT_OK;
    return MT_FAIL(MT_EINVAL, "%s: %s is %s, not %s", c->name, name,
                   mt_dtype_name((mt_dtype)t->dtype), mt_dtype_name((mt_dtype)dt));
}

/* What a launch said; NULL: nothing went wrong. */
static inline mt_status mt_op_launched(const mt_op_call *c, const char *error)
{
    if (error == NULL)
        return MT_OK;
    return MT_FAIL(MT_EDEVICE, "%s on cuda:%d: %s", c->name, c->device_index, error);
}

/* The CPU's kernel of an op: read(c, a, &g) makes g, a `type` of zeros, of its arguments, and
 * run(pool, &g) does its work, which is n elements'. */
#define MT_OP_CPU(op, type, g, read, n, run)                                                       \
    static mt_status cpu_##op(const mt_op_call *c, const mt_op_arg *a, StableIValue *result)       \
    {                                                                                              \
        type     g = { 0 };                                                                        \
        mt_pool *pool MT_CLOSED(mt_pool_close) = NULL;                                             \
                                                                                                   \
        (void)result;                                                                              \
        MT_DO(read(c, a, &g));                                                                     \
        MT_DO(mt_op_pool(n, &pool));                                                               \
        run(pool, &g);                                                                             \
        return MT_OK;                                                                              \
    }
/* And CUDA's, whose run(stream, &g) launches it. */
#define MT_OP_CUDA(op, type, read, run)                                                            \
    static mt_status cuda_##op(const mt_op_call *c, const mt_op_arg *a, StableIValue *result)      \
    {                                                                                              \
        type g = { 0 };                                                                            \
                                                                                                   \
        (void)result;                                                                              \
        MT_DO(read(c, a, &g));                                                                     \
        return mt_op_launched(c, run(c->stream, &g));                                              \
    }

/* [n]. */
static inline mt_status mt_op_vector(const mt_op_call *c, const char *name, const mt_op_tensor *t,
                                     int64_t n)
{
    if (t->dim == 1 && t->size[0] == n)
        return MT_OK;
    return MT_FAIL(MT_EINVAL, "%s: %s must be [%lld]; it has %d dimensions and %lld elements",
                   c->name, name, (long long)n, t->dim, (long long)t->n);
}

/* [rows, n] whose rows are dense; n or rows -1: any. */
static inline mt_status mt_op_matrix(const mt_op_call *c, const char *name, const mt_op_tensor *t,
                                     int64_t rows, int64_t n)
{
    if (t->dim != 2)
        return MT_FAIL(MT_EINVAL, "%s: %s has %d dimensions, not 2", c->name, name, t->dim);
    if ((rows >= 0 && t->size[0] != rows) || (n >= 0 && t->size[1] != n))
        return MT_FAIL(MT_EINVAL, "%s: %s is [%lld, %lld], not [%lld, %lld]", c->name, name,
                       (long long)t->size[0], (long long)t->size[1],
                       (long long)(rows < 0 ? t->size[0] : rows),
                       (long long)(n < 0 ? t->size[1] : n));
    if (t->size[1] > 1 && t->stride[1] != 1)
        return MT_FAIL(MT_EINVAL, "%s: %s has a stride of %lld in its last dimension, not 1",
                       c->name, name, (long long)t->stride[1]);
    return MT_OK;
}

/* A matrix that is written: rows may not overlap. */
static inline mt_status mt_op_written(const mt_op_call *c, const char *name, const mt_op_tensor *t,
                                      int64_t rows, int64_t n)
{
    mt_status st = mt_op_matrix(c, name, t, rows, n);

    if (st == MT_OK && t->size[0] > 1 && t->stride[0] < t->size[1])
        st = MT_FAIL(MT_EINVAL, "%s: rows of %s are %lld elements apart and %lld long: they "
                     "overlap",
                     c->name, name, (long long)t->stride[0], (long long)t->size[1]);
    return st;
}

#endif
