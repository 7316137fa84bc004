/* fp8_glu.c — see fp8_glu.h. */
#include "fp8_glu.h"

static void cast(mt_pool *pool, mt_fp8 to, const void *x, int64_t stride)
{
    to.x = x;
    to.stride = stride;
    mt_fp8_cast(pool, &to);
}

void mt_fp8_glu_forward(mt_pool *pool, const mt_fp8_glu *f, void *scratch)
{
    mt_glu g = f->glu;

    g.h = scratch;
    mt_glu_forward(pool, &g);
    cast(pool, f->h, scratch, g.n);
}

void mt_fp8_glu_backward(mt_pool *pool, const mt_fp8_glu *f, void *scratch)
{
    mt_glu    g = f->glu;
    uint16_t *d = scratch;

    g.dgate = d;
    g.dup = d + g.n;
    g.dgate_stride = g.dup_stride = 2 * g.n;
    g.h = d + 2 * g.rows * g.n;
    mt_glu_backward(pool, &g);
    cast(pool, f->d, d, 2 * g.n);
    cast(pool, f->h, g.h, g.n);
}
