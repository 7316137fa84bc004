/* loss.c — cross entropy on the host: see loss.h. */
#include "loss.h"
#include "element.h"
#include <float.h>
#include <math.h>
#include <string.h>

#define LANES 256

typedef struct row_sums {
    float max, exps, mean;       /* m, s, mean l */
} row_sums;

/* tanh(x / softcap); 0 without a cap, where the slope 1 - tanh^2 is then 1. */
static float bend(const mt_cross_entropy *c, float x)
{
    return c->softcap > 0 ? tanhf(x / c->softcap) : 0;
}

static float logit(const mt_cross_entropy *c, int64_t at)
{
    float x = mt__get(c->dtype, c->logits, at);

    return c->softcap > 0 ? c->softcap * bend(c, x) : x;
}

static float fold(float *lane)
{
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int l = 0; l < half; l++)
            lane[l] += lane[l + half];
    return lane[0];
}

static row_sums sums_of(const mt_cross_entropy *c, int64_t begin)
{
    float    exps[LANES] = { 0 }, values[LANES] = { 0 };
    row_sums r = { .max = -FLT_MAX };

    for (int64_t i = 0; i < c->n; i++)
        r.max = fmaxf(r.max, logit(c, begin + i));
    for (int64_t i = 0; i < c->n; i++) {
        float l = logit(c, begin + i);

        exps[i % LANES] += expf(l - r.max);
        values[i % LANES] += l;
    }
    r.exps = fold(exps);
    r.mean = fold(values) / (float)c->n;
    return r;
}

static void write_gradient(const mt_cross_entropy *c, int64_t begin, int64_t label,
                           const row_sums *r, float lse)
{
    float scale = *c->scale;
    float k = scale * (1 + 2 * c->z_loss * lse) / r->exps,
          every = scale * c->smoothing / (float)c->n;

    for (int64_t i = 0; i < c->n; i++) {
        float t = bend(c, mt__get(c->dtype, c->logits, begin + i));
        float g = expf(logit(c, begin + i) - r->max) * k - every;

        if (i == label)
            g -= scale * (1 - c->smoothing);
        mt__put(c->dtype, c->logits, begin + i, g * (1 - t * t));
    }
}

static void some_row(void *ctx, int64_t row)
{
    const mt_cross_entropy *c = ctx;
    int64_t  label = c->labels[row], begin = row * c->stride;
    row_sums r;
    float    logs, lse, picked, smooth;

    if (label == c->ignore) {
        c->loss[row] = c->lse[row] = 0;
        if (c->scale != NULL)
            memset((char *)c->logits + (size_t)begin * mt_dtype_bytes(c->dtype), 0,
                   (size_t)c->n * mt_dtype_bytes(c->dtype));
        return;
    }
    r = sums_of(c, begin);
    logs = logf(r.exps);
    lse = r.max + logs;
    picked = logit(c, begin + label);
    c->lse[row] = lse;
    /* Not 0 * (picked - mean): the mean is -infinity where a logit is. */
    smooth = c->smoothing > 0 ? c->smoothing * (picked - r.mean) : 0;
    c->loss[row] = (logs + (r.max - picked)) + smooth + c->z_loss * lse * lse;
    if (c->scale != NULL)
        write_gradient(c, begin, label, &r, lse);
}

void mt_cross_entropy_rows(mt_pool *pool, const mt_cross_entropy *c)
{
    mt_cross_entropy copy = *c;

    mt_pool_run(pool, some_row, &copy, c->rows);
}
