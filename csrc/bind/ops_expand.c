/* ops_expand.c — torch.ops.megatrain: weights made of their codes, and codes of weights.
 * See ops/expand.h, ops/nf4.h. */
#include "ops_check.h"
#include "../ops/expand.h"
#include "../ops/nf4.h"
#ifdef MT_WITH_CUDA
#include "../ops/expand_cuda.h"
#endif

enum { CODES, SCALES, WIDE, MAP, OFFSET, FORMAT, GROUP, OUT };

static const struct { const char *name; int codes, scales; } formats[] = {
#define ROW(name, codes, scales) { #name, codes, scales },
    MT_EXPAND_FORMATS(ROW)
#undef ROW
};

/* A tensor of n elements, in any shape. */
static mt_status has(const mt_op_call *c, const char *name, const mt_op_tensor *t, int64_t n)
{
    if (t->n == n)
        return MT_OK;
    return MT_FAIL(MT_EINVAL, "%s: %s has %lld elements, not %lld", c->name, name, (long long)t->n,
                   (long long)n);
}

static mt_status four_args(const mt_op_call *c, const mt_op_arg *a, int64_t n, mt_expand *x)
{
    int64_t group = a[GROUP].i, blocks;

    if (group < 2 || (group & (group - 1)) != 0)
        return MT_FAIL(MT_EINVAL, "%s: blocks of %lld elements: use a power of two", c->name,
                       (long long)group);
    while ((int64_t)1 << x->group_bits < group)
        x->group_bits++;
    blocks = (n + group - 1) / group;
    MT_DO(has(c, "codes", &a[CODES].t, (n + 1) / 2));
    MT_DO(has(c, "scales", &a[SCALES].t, blocks));
    if (a[WIDE].t.handle == NULL)
        return MT_OK;
    MT_DO(mt_op_type(c, "scales", &a[SCALES].t, MT_U8));
    for (int i = WIDE; i <= OFFSET; i++)
        MT_DO(mt_op_type(c, "what scales are made of", &a[i].t, MT_F32));
    MT_DO(has(c, "wide", &a[WIDE].t, (blocks + MT_EXPAND_WIDE - 1) / MT_EXPAND_WIDE));
    MT_DO(has(c, "map", &a[MAP].t, 256));
    MT_DO(has(c, "offset", &a[OFFSET].t, 1));
    x->wide = a[WIDE].t.data;
    x->map = a[MAP].t.data;
    x->offset = a[OFFSET].t.data;
    return MT_OK;
}

static mt_status fp8_args(const mt_op_call *c, const mt_op_arg *a, mt_expand *x)
{
    const mt_op_tensor *codes = &a[CODES].t, *scales = &a[SCALES].t;
    int                 d = codes->dim;

    if (d < 2 || scales->dim != d || codes->size[d - 2] * codes->size[d - 1] == 0)
        return MT_FAIL(MT_EINVAL, "%s: codes [.., N, K] and scales [.., n, k]", c->name);
    for (int i = 0; i < d - 2; i++)
        if (codes->size[i] != scales->size[i])
            return MT_FAIL(MT_EINVAL, "%s: codes and scales of different experts", c->name);
    for (int i = d - 2; i < d; i++)
        if (scales->size[i] == 0 || codes->size[i] % scales->size[i] != 0)
            return MT_FAIL(MT_EINVAL, "%s: %lld codes in %lld blocks", c->name,
                           (long long)codes->size[i], (long long)scales->size[i]);
    x->cols = codes->size[d - 1];
    x->rows = codes->n / x->cols;
    x->block_rows = codes->size[d - 2] / scales->size[d - 2];
    x->blocks = scales->size[d - 1];
    x->block_cols = x->cols / x->blocks;
    return MT_OK;
}

static mt_status mxfp4_args(const mt_op_call *c, const mt_op_arg *a, mt_expand *x)
{
    const mt_op_tensor *codes = &a[CODES].t;

    if (codes->dim != 4 || codes->size[3] != MT_MXFP4_GROUP / 2)
        return MT_FAIL(MT_EINVAL, "%s: codes must be [E, N, G, %d]", c->name, MT_MXFP4_GROUP / 2);
    x->experts = codes->size[0];
    x->cols = codes->size[1];
    x->rows = codes->size[2] * MT_MXFP4_GROUP;
    return has(c, "scales", &a[SCALES].t, codes->n / codes->size[3]);
}

static mt_status format_args(const mt_op_call *c, const mt_op_arg *a, mt_expand *x)
{
    const mt_op_tensor *out = &a[OUT].t;

    switch (x->format) {
    case MT_EXPAND_INT8:
        MT_DO(mt_op_matrix(c, "codes", &a[CODES].t, -1, -1));
        x->rows = a[CODES].t.size[0];
        x->cols = a[CODES].t.size[1];
        return has(c, "scales", &a[SCALES].t, x->rows);
    case MT_EXPAND_FP8:
        return fp8_args(c, a, x);
    case MT_EXPAND_MXFP4:
        return mxfp4_args(c, a, x);
    default:
        x->rows = out->dim > 0 ? out->size[0] : 1;
        x->cols = x->rows > 0 ? out->n / x->rows : 0;
        return four_args(c, a, out->n, x);
    }
    return MT_OK;
}

/* wide, map and offset: all of them, or none; of what each format takes. */
static mt_status scales_args(const mt_op_call *c, const mt_op_arg *a, mt_expand_format format)
{
    int n = (a[WIDE].t.handle != NULL) + (a[MAP].t.handle != NULL) + (a[OFFSET].t.handle != NULL);

    if (n != 0 && n != 3)
        return MT_FAIL(MT_EINVAL, "%s: wide, map and offset go together", c->name);
    if (n == 0)
        return mt_op_type(c, "scales", &a[SCALES].t, formats[format].scales);
    if (format != MT_EXPAND_NF4 && format != MT_EXPAND_FP4)
        return MT_FAIL(MT_EINVAL, "%s: scales of %s are no codes: leave wide, map and offset out",
                       c->name, formats[format].name);
    return MT_OK;
}

static mt_status expand_args(const mt_op_call *c, const mt_op_arg *a, mt_expand *x)
{
    int64_t format = a[FORMAT].i;

    *x = (mt_expand){ .dtype = (mt_dtype)a[OUT].t.dtype, .out = a[OUT].t.data, .experts = 1,
                      .codes = a[CODES].t.data, .scales = a[SCALES].t.data };
    if (format < 0 || format >= MT_EXPAND_COUNT)
        return MT_FAIL(MT_EINVAL, "%s: there is no format %lld", c->name, (long long)format);
    x->format = (mt_expand_format)format;
    MT_DO(mt_op_float(c, "out", &a[OUT].t));
    MT_DO(mt_op_type(c, "codes", &a[CODES].t, formats[format].codes));
    MT_DO(scales_args(c, a, x->format));
    MT_DO(format_args(c, a, x));
    return has(c, "out", &a[OUT].t, x->experts * x->rows * x->cols);
}

MT_OP_CPU(expand_codes, mt_expand, x, expand_args, a[OUT].t.n, mt_expand_codes)

#ifdef MT_WITH_CUDA
MT_OP_CUDA(expand_codes, mt_expand, expand_args, mt__expand_cuda)
#endif

/* ---- codes of weights ---- */

enum { NF4_W, NF4_GROUP, NF4_CODES, NF4_SCALES };

static mt_status cpu_nf4_codes(const mt_op_call *c, const mt_op_arg *a, StableIValue *result)
{
    const mt_op_tensor *w = &a[NF4_W].t;
    int64_t             group = a[NF4_GROUP].i;
    mt_pool            *pool MT_CLOSED(mt_pool_close) = NULL;

    (void)result;
    if (group < 2 || group % 2 != 0 || group > MT_NF4_GROUP_MOST)
        return MT_FAIL(MT_EINVAL, "%s: blocks of %lld elements: an even number of them, up to %d",
                       c->name, (long long)group, MT_NF4_GROUP_MOST);
    MT_DO(mt_op_float(c, "w", w));
    MT_DO(mt_op_type(c, "codes", &a[NF4_CODES].t, MT_U8));
    MT_DO(mt_op_type(c, "scales", &a[NF4_SCALES].t, MT_F32));
    MT_DO(has(c, "codes", &a[NF4_CODES].t, (w->n + 1) / 2));
    MT_DO(has(c, "scales", &a[NF4_SCALES].t, (w->n + group - 1) / group));
    MT_DO(mt_op_pool(w->n, &pool));
    mt_nf4_codes(pool, (mt_dtype)w->dtype, w->data, w->n, (int)group, a[NF4_CODES].t.data,
                 a[NF4_SCALES].t.data);
    return MT_OK;
}

#ifdef MT_WITH_CUDA
static mt_status cuda_nf4_codes(const mt_op_call *c, const mt_op_arg *a, StableIValue *result)
{
    (void)a;
    (void)result;
    return MT_FAIL(MT_EINVAL, "%s: codes are made on the CPU, where weights are read", c->name);
}
#endif

#define OPS(X)                                                                                  \
    X(expand_codes, "TTtttiiW",                                                                 \
      "expand_codes(Tensor codes, Tensor scales, Tensor? wide, Tensor? map, Tensor? offset, "   \
      "int format, int group, Tensor(a!) out) -> ()")                                           \
    X(nf4_codes, "TiWW",                                                                        \
      "nf4_codes(Tensor w, int group, Tensor(a!) codes, Tensor(b!) scales) -> ()")
MT_OP_TABLE(expand, OPS)
