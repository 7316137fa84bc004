/* glu.c — gated activations and the sum over tokens on the host: see glu.h. */
#include "glu.h"
#include "element.h"
#include "gate.h"

/* ---- rows ---- */

static void forward_row(void *ctx, int64_t row)
{
    const mt_glu *g = ctx;

    for (int64_t i = 0; i < g->n; i++) {
        float a = mt__activation(g->act, mt__get(g->dtype, g->gate, row * g->gate_stride + i)).a;
        float u = mt__factor(g->act, mt__get(g->dtype, g->up, row * g->up_stride + i));

        mt__put(g->dtype, g->h, row * g->n + i, mt__rounded(g->dtype, a) * u);
    }
}

static void backward_row(void *ctx, int64_t row)
{
    const mt_glu *g = ctx;

    for (int64_t i = 0; i < g->n; i++) {
        float dh = mt__get(g->dtype, g->dh, row * g->n + i);
        float up = mt__get(g->dtype, g->up, row * g->up_stride + i);
        float u = mt__factor(g->act, up);
        mt__gate v = mt__activation(g->act, mt__get(g->dtype, g->gate, row * g->gate_stride + i));
        int   cut = g->act == MT_CLAMPED && fabsf(up) > MT_CLAMP;

        mt__put(g->dtype, g->dgate, row * g->dgate_stride + i, dh * u * v.slope);
        mt__put(g->dtype, g->dup, row * g->dup_stride + i, cut ? 0 : dh * v.a);
        if (g->h != NULL)
            mt__put(g->dtype, g->h, row * g->n + i, mt__rounded(g->dtype, v.a) * u);
    }
}

void mt_glu_forward(mt_pool *pool, const mt_glu *g)
{
    mt_glu copy = *g;

    mt_pool_run(pool, forward_row, &copy, g->rows);
}

void mt_glu_backward(mt_pool *pool, const mt_glu *g)
{
    mt_glu copy = *g;

    mt_pool_run(pool, backward_row, &copy, g->rows);
}

/* ---- the sum over tokens ---- */

#define COLUMNS 64               /* of one chunk of work */

typedef float lanes[MT_SUM_LANES][COLUMNS];

static void fold(lanes lane, int64_t width)
{
    for (int half = MT_SUM_LANES / 2; half > 0; half /= 2)
        for (int l = 0; l < half; l++)
            for (int64_t i = 0; i < width; i++)
                lane[l][i] += lane[l + half][i];
}

/* Rule 1 for columns first .. first+width; the sums are in lane[0]. */
static void sum_segment(const mt_columns *c, int64_t segment, int64_t first, int64_t width,
                        lanes lane)
{
    int64_t begin = segment * MT_SUM_ROWS;
    int64_t end = begin + MT_SUM_ROWS < c->rows ? begin + MT_SUM_ROWS : c->rows;

    for (int l = 0; l < MT_SUM_LANES; l++)
        for (int64_t i = 0; i < width; i++)
            lane[l][i] = 0;
    for (int64_t row = begin; row < end; row++)
        for (int64_t i = 0; i < width; i++)
            lane[(row - begin) % MT_SUM_LANES][i] +=
                mt__get(c->dtype, c->x, row * c->stride + first + i);
    fold(lane, width);
}

static void sum_columns(void *ctx, int64_t chunk)
{
    const mt_columns *c = ctx;
    int64_t first = chunk * COLUMNS, width = c->n - first < COLUMNS ? c->n - first : COLUMNS;
    int64_t segments = (c->rows + MT_SUM_ROWS - 1) / MT_SUM_ROWS;
    lanes   part, total = { { 0 } };

    for (int64_t s = 0; s < segments; s++) {
        sum_segment(c, s, first, width, part);
        for (int64_t i = 0; i < width; i++)
            total[s % MT_SUM_LANES][i] += part[0][i];
    }
    /* With one segment the fold adds zeros: no bit changes. */
    fold(total, width);
    for (int64_t i = 0; i < width; i++)
        mt__put(c->out_dtype, c->out, first + i, total[0][i]);
}

void mt_column_sum(mt_pool *pool, const mt_columns *c)
{
    mt_columns copy = *c;

    mt_pool_run(pool, sum_columns, &copy, (c->n + COLUMNS - 1) / COLUMNS);
}
