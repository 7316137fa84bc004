/* glu.c — gated activations and the sum over tokens on the host: see glu.h. */
#include "glu.h"
#include "element.h"
#include <math.h>

#define SQRT1_2     0.707106781f       /* 1 / sqrt(2) */
#define DENSITY     0.398942280f       /* 1 / sqrt(2 pi) */
#define TANH_LINEAR 1.595769122f       /* 2 sqrt(2/pi) */
#define TANH_CUBE   0.071354816f       /* that times 0.044715 */

typedef struct gate_value {
    float a, slope;              /* a(x), a'(x) */
} gate_value;

/* ---- activations ---- */

/* x s(v), and its slope for v' = dv/dx. s and 1-s come from e = exp(-|v|) <= 1, so neither cancels. */
static gate_value swish(float x, float v, float dv)
{
    float e = expf(-fabsf(v)), r = 1.0f / (1.0f + e);
    float s = v >= 0 ? r : e * r, q = v >= 0 ? e * r : r;

    return (gate_value){ x * s, s + x * (s * q) * dv };
}

static gate_value gelu_tanh(float x)
{
    /* Above 100, s(v)(1-s(v)) is 0 long since; the bound keeps 0 * infinity away. */
    float square = fminf(x * x, 1e4f);

    return swish(x, x * (TANH_LINEAR + TANH_CUBE * square), TANH_LINEAR + 3 * TANH_CUBE * square);
}

static gate_value gelu(float x)
{
    float below = 0.5f * erfcf(-x * SQRT1_2);

    return (gate_value){ x * below, below + x * (DENSITY * expf(-0.5f * x * x)) };
}

static gate_value clamped(float x)
{
    float inside = x > MT_CLAMP ? MT_CLAMP : x;
    gate_value g = swish(inside, MT_CLAMP_SLOPE * inside, MT_CLAMP_SLOPE);

    if (x > MT_CLAMP)
        g.slope = 0;
    return g;
}

static gate_value activation(int act, float x)
{
    switch (act) {
    case MT_SILU:      return swish(x, x, 1);
    case MT_GELU_TANH: return gelu_tanh(x);
    case MT_GELU:      return gelu(x);
    default:           return clamped(x);
    }
}

/* u(up). */
static float factor(int act, float up)
{
    if (act != MT_CLAMPED)
        return up;
    return (up > MT_CLAMP ? MT_CLAMP : up < -MT_CLAMP ? -MT_CLAMP : up) + 1.0f;
}

/* ---- rows ---- */

static void forward_row(void *ctx, int64_t row)
{
    const mt_glu *g = ctx;

    for (int64_t i = 0; i < g->n; i++) {
        float a = activation(g->act, mt__get(g->dtype, g->gate, row * g->gate_stride + i)).a;
        float u = factor(g->act, mt__get(g->dtype, g->up, row * g->up_stride + i));

        mt__put(g->dtype, g->h, row * g->n + i, mt__rounded(g->dtype, a) * u);
    }
}

static void backward_row(void *ctx, int64_t row)
{
    const mt_glu *g = ctx;

    for (int64_t i = 0; i < g->n; i++) {
        float dh = mt__get(g->dtype, g->dh, row * g->n + i);
        float up = mt__get(g->dtype, g->up, row * g->up_stride + i);
        float u = factor(g->act, up);
        gate_value v = activation(g->act, mt__get(g->dtype, g->gate, row * g->gate_stride + i));
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
static void sum_segment(const mt_columns *c, int64_t segment, int64_t first, int64_t width, lanes lane)
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
