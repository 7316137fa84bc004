/* adam_avx2.c — the update of adam_scalar.c, 32 parameters an iteration.
 *
 * Compiled with -mavx2 -mfma -mf16c -ffp-contract=off; entered only where
 * mt_isa_runs(MT_ISA_AVX2). AVX2 has no masks worth the name: what is left of a span after the
 * last 16 elements goes through the scalar definition.
 */
#if defined(__x86_64__)
#include "adam_avx2.h"

/* "Not less than" is true for NaN, which is kept. */
INLINE __m256 flush(__m256 x, __m256 size, float smallest)
{
    return _mm256_and_ps(x, _mm256_cmp_ps(size, _mm256_set1_ps(smallest), _CMP_NLT_UQ));
}

/* Updates both moments; returns the new weights, which the caller stores. */
INLINE __m256 elements(const mt__adam_span *s, const coef8 *c, mt_dtype w, mt_dtype gt, int64_t i)
{
    __m256 p = load_weight(s, w, i);
    __m256 m = _mm256_loadu_ps(s->m + i);
    __m256 v = _mm256_loadu_ps(s->v + i);
    __m256 g = _mm256_mul_ps(load_grad(s, gt, i), c->g_scale);

    m = _mm256_fmadd_ps(c->one_minus_b1, _mm256_sub_ps(g, m), m);
    v = _mm256_fmadd_ps(c->one_minus_b2, _mm256_fmsub_ps(g, g, v), v);
    __m256 u = _mm256_div_ps(m, _mm256_fmadd_ps(_mm256_sqrt_ps(v), c->rsqrt_bc2, c->eps));

    _mm256_storeu_ps(s->m + i, flush(m, magnitude(m), MT__M_SMALLEST));
    _mm256_storeu_ps(s->v + i, flush(v, v, MT__V_SMALLEST));
    return _mm256_sub_ps(p, _mm256_fmadd_ps(c->lr_wd, p, _mm256_mul_ps(c->lr_bc1, u)));
}

INLINE void sixteen(const mt__adam_span *s, const coef8 *c, mt_dtype w, mt_dtype g, int64_t i)
{
    pair p = { .a = elements(s, c, w, g, i), .b = elements(s, c, w, g, i + LANES) };
    store_weight(s, w, i, p);
}

INLINE void step(const mt__adam_span *where, const mt__adam_coef *c, mt_dtype w, mt_dtype g,
                 mt__adam_fn rest)
{
    const mt__adam_span s = *where;     /* ours: no store can change it, so it stays in registers */
    const coef8         k = coef_set(c);
    int64_t             i = 0;

    for (; i + 32 <= s.n; i += 32) {
        mt__adam_prefetch(&s, w, g, i + MT__ADAM_AHEAD);
        sixteen(&s, &k, w, g, i);
        sixteen(&s, &k, w, g, i + 16);
    }
    if (i + 16 <= s.n) {
        sixteen(&s, &k, w, g, i);
        i += 16;
    }
    mt__adam_span tail = mt__adam_part(&s, w, g, i, s.n - i);
    rest(&tail, c);
}

#define STEP(w, g)                                                              \
    static void step_##w##_##g(const mt__adam_span *s, const mt__adam_coef *c)  \
    {                                                                           \
        step(s, c, MT_##w, MT_##g, mt__adam_scalar[MT__ADAM_##w##_##g]);        \
    }
MT__ADAM_KIND_MAP(STEP)

#define ENTRY(w, g) step_##w##_##g,
const mt__adam_fn mt__adam_avx2[MT__ADAM_KINDS] = { MT__ADAM_KIND_MAP(ENTRY) };

#else
typedef int mt__no_avx2;        /* a file must declare something */
#endif
