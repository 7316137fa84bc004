/* adam_avx512.c — the update of adam_scalar.c, 32 parameters an iteration.
 *
 * Compiled with -mavx512f -mavx512bw -mavx512dq -mavx512vl -ffp-contract=off; entered
 * only where mt_isa_runs(MT_ISA_AVX512). Bound by memory: separate planes, ordinary stores and a
 * prefetch MT__ADAM_AHEAD elements ahead (docs/numerics.md has the order, benchmarks the rates).
 * Loads and stores take a mask, so that the tail is the same code; with all lanes on, the
 * compiler drops the mask.
 */
#if defined(__x86_64__)
#include "adam_avx512.h"

/* "Not less than" is true for NaN, which is kept. */
INLINE __m512 flush(__m512 x, __m512 size, float smallest)
{
    __mmask16 keep = _mm512_cmp_ps_mask(size, _mm512_set1_ps(smallest), _CMP_NLT_UQ);
    return _mm512_maskz_mov_ps(keep, x);
}

INLINE void elements(const mt__adam_span *s, const coef16 *c, mt_dtype w, mt_dtype gt, int64_t i,
                     __mmask16 on)
{
    __m512 p = load_weight(s, w, i, on);
    __m512 m = _mm512_maskz_loadu_ps(on, s->m + i);
    __m512 v = _mm512_maskz_loadu_ps(on, s->v + i);
    __m512 g = _mm512_mul_ps(load_grad(s, gt, i, on), c->g_scale);

    m = _mm512_fmadd_ps(c->one_minus_b1, _mm512_sub_ps(g, m), m);
    v = _mm512_fmadd_ps(c->one_minus_b2, _mm512_fmsub_ps(g, g, v), v);
    __m512 u = _mm512_div_ps(m, _mm512_fmadd_ps(_mm512_sqrt_ps(v), c->rsqrt_bc2, c->eps));
    p = _mm512_sub_ps(p, _mm512_fmadd_ps(c->lr_wd, p, _mm512_mul_ps(c->lr_bc1, u)));

    _mm512_mask_storeu_ps(s->m + i, on, flush(m, _mm512_abs_ps(m), MT__M_SMALLEST));
    _mm512_mask_storeu_ps(s->v + i, on, flush(v, v, MT__V_SMALLEST));
    store_weight(s, w, i, on, p);
}

/* The first `left` lanes, at most all. */
INLINE __mmask16 lanes_on(int64_t left)
{
    return (__mmask16)(left < LANES ? (1u << left) - 1u : 0xffffu);
}

INLINE void step(const mt__adam_span *where, const mt__adam_coef *c, mt_dtype w, mt_dtype g)
{
    const mt__adam_span s = *where;     /* ours: no store can change it, so it stays in registers */
    const coef16        k = coef_set(c);
    int64_t             i = 0;

    for (; i + 2 * LANES <= s.n; i += 2 * LANES) {
        mt__adam_prefetch(&s, w, g, i + MT__ADAM_AHEAD);
        elements(&s, &k, w, g, i, ALL);
        elements(&s, &k, w, g, i + LANES, ALL);
    }
    for (; i < s.n; i += LANES)
        elements(&s, &k, w, g, i, lanes_on(s.n - i));
}

#define STEP(w, g)                                                              \
    static void step_##w##_##g(const mt__adam_span *s, const mt__adam_coef *c)  \
    {                                                                           \
        step(s, c, MT_##w, MT_##g);                                             \
    }
MT__ADAM_KIND_MAP(STEP)

#define ENTRY(w, g) step_##w##_##g,
const mt__adam_fn mt__adam_avx512[MT__ADAM_KINDS] = { MT__ADAM_KIND_MAP(ENTRY) };

#else
typedef int mt__no_avx512;      /* a file must declare something */
#endif
