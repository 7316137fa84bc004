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

/* Into scratch: d, and behind it what is given back, h. */
static const uint16_t *made(mt_pool *pool, const mt_fp8_glu *f, uint16_t *d)
{
    mt_glu g = f->glu;

    g.dgate = d;
    g.dup = d + g.n;
    g.dgate_stride = g.dup_stride = 2 * g.n;
    g.h = d + 2 * g.rows * g.n;
    mt_glu_backward(pool, &g);
    return g.h;
}

void mt_fp8_glu_backward(mt_pool *pool, const mt_fp8_glu *f, void *scratch)
{
    const uint16_t *h = made(pool, f, scratch);

    cast(pool, f->d, scratch, 2 * f->glu.n);
    cast(pool, f->h, h, f->glu.n);
}

void mt_fp8_glu_recast(mt_pool *pool, const mt_fp8_glu *f, void *scratch)
{
    const uint16_t *h;
    mt_fp8          to = f->d.by_columns != NULL ? f->d : f->h;

    if (to.shift[to.rows] == 0)
        return;
    h = made(pool, f, scratch);
    to.x = f->d.by_columns != NULL ? scratch : h;
    to.stride = to.cols;
    mt_fp8_recast(pool, &to);
}
