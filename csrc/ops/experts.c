/* experts.c — rows of a mixture of experts on the host: see experts.h. */
#include "experts.h"
#include "element.h"
#include "gate.h"

static void sum_row(void *ctx, int64_t t)
{
    const mt_row_sums *s = ctx;

    for (int64_t i = 0; i < s->n; i++) {
        float sum = -0.0f;               /* a sum of one is that one, -0 too */

        for (int64_t c = t * s->k; c < (t + 1) * s->k; c++) {
            float x = mt__get(s->dtype, s->x, s->place[c] * s->n + i);

            sum += s->weights != NULL ? s->weights[c] * x : x;
        }
        sum *= s->factor;
        if (s->base != NULL)
            sum += mt__get(s->dtype, s->base, t * s->n + i);
        mt__put(s->dtype, s->out, t * s->n + i, sum);
    }
}

void mt_sum_rows(mt_pool *pool, const mt_row_sums *s)
{
    mt_row_sums copy = *s;

    mt_pool_run(pool, sum_row, &copy, s->tokens);
}

/* ---- gates ---- */

typedef struct pair {
    int64_t gate, up;                /* columns of gu */
    float   g, u;                    /* with their bias */
} pair;

static pair pair_of(const mt_gates *g, int64_t row, int64_t i)
{
    int64_t at = g->interleaved ? 2 * i : i, beside = g->interleaved ? at + 1 : at + g->n;
    pair    p = { row * 2 * g->n + at, row * 2 * g->n + beside, 0, 0 };

    p.g = mt__get(g->dtype, g->gu, p.gate);
    p.u = mt__get(g->dtype, g->gu, p.up);
    if (g->bias != NULL) {
        int64_t first = (int64_t)g->expert[row] * 2 * g->n;

        p.g += mt__get(g->dtype, g->bias, first + at);
        p.u += mt__get(g->dtype, g->bias, first + beside);
    }
    return p;
}

static float product(const mt_gates *g, float a, float u)
{
    return mt__rounded(g->dtype, mt__rounded(g->dtype, a) * mt__factor(g->act, u));
}

static void forward_row(void *ctx, int64_t row)
{
    const mt_gates *g = ctx;

    for (int64_t i = 0; i < g->n; i++) {
        pair p = pair_of(g, row, i);

        mt__put(g->dtype, g->h, row * g->n + i, product(g, mt__activation(g->act, p.g).a, p.u));
    }
}

#define LANES 8

static void backward_row(void *ctx, int64_t row)
{
    const mt_gates *g = ctx;
    int64_t choice = g->order != NULL ? g->order[row] : row;
    float   weight = g->weights != NULL ? g->weights[choice] : 1.0f, lane[LANES] = { 0 };

    for (int64_t i = 0; i < g->n; i++) {
        pair     p = pair_of(g, row, i);
        mt__gate v = mt__activation(g->act, p.g);
        float    d = mt__get(g->dtype, g->dact, row * g->n + i), h = product(g, v.a, p.u);
        int      cut = g->act == MT_CLAMPED && fabsf(p.u) > MT_CLAMP;

        lane[i % LANES] += d * h;
        mt__put(g->dtype, g->dgu, p.gate, weight * d * mt__factor(g->act, p.u) * v.slope);
        mt__put(g->dtype, g->dgu, p.up, cut ? 0 : weight * d * v.a);
        mt__put(g->dtype, g->h, row * g->n + i, weight * h);
    }
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int l = 0; l < half; l++)
            lane[l] += lane[l + half];
    if (g->weights != NULL)
        g->dweights[choice] = lane[0];
}

void mt_gates_forward(mt_pool *pool, const mt_gates *g)
{
    mt_gates copy = *g;

    mt_pool_run(pool, forward_row, &copy, g->rows);
}

void mt_gates_backward(mt_pool *pool, const mt_gates *g)
{
    mt_gates copy = *g;

    mt_pool_run(pool, backward_row, &copy, g->rows);
}
