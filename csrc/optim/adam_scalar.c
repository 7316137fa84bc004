/* adam_scalar.c — the definition of the update that every other kernel must match to the bit.
 *
 * Compiled with -ffp-contract=off: an FMA is where fmaf stands. Without FMA hardware fmaf is done
 * in software: right, and some 30 times slower.
 */
#include "adam_scalar.h"
#include <math.h>

static inline void element(const mt__adam_span *s, const mt__adam_coef *c, mt_dtype w, mt_dtype gt,
                           int64_t i)
{
    float p = load_weight(s, w, i);
    float g = load_grad(s, gt, i) * c->g_scale;
    float m = fmaf(c->one_minus_b1, g - s->m[i], s->m[i]);
    float v = fmaf(c->one_minus_b2, fmaf(g, g, -s->v[i]), s->v[i]);
    float u = m / fmaf(sqrtf(v), c->rsqrt_bc2, c->eps);

    p = p - fmaf(c->lr_wd, p, c->lr_bc1 * u);

    /* The update above used m and v as they are; NaN compares false and stays. */
    s->m[i] = fabsf(m) < MT__M_SMALLEST ? 0.0f : m;
    s->v[i] = v < MT__V_SMALLEST ? 0.0f : v;
    store_weight(s, w, i, p);
}

#define STEP(w, g)                                                              \
    static void step_##w##_##g(const mt__adam_span *s, const mt__adam_coef *c)  \
    {                                                                           \
        for (int64_t i = 0; i < s->n; i++)                                      \
            element(s, c, MT_##w, MT_##g, i);                                   \
    }
MT__ADAM_KIND_MAP(STEP)

#define ENTRY(w, g) step_##w##_##g,
const mt__adam_fn mt__adam_scalar[MT__ADAM_KINDS] = { MT__ADAM_KIND_MAP(ENTRY) };

void mt_split_join(const uint16_t *hi, const int16_t *lo, float *p, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        p[i] = mt__split_value(hi[i], lo[i]);
}

void mt_split_set(const float *p, uint16_t *hi, int16_t *lo, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        mt__split_store(p[i], hi + i, lo + i);
}
