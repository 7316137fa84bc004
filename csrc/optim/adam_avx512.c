/* adam_avx512.c — the update of adam_scalar.c, 32 parameters an iteration.
 *
 * Compiled with -mavx512f -mavx512bw -mavx512dq -mavx512vl -ffp-contract=off; entered
 * only where mt_isa_runs(MT_ISA_AVX512). Bound by memory: separate planes, ordinary stores and a
 * prefetch MT__ADAM_AHEAD elements ahead (docs/numerics.md has the order, benchmarks the rates).
 * Loads and stores take a mask, so that the tail is the same code; with all lanes on, the
 * compiler drops the mask.
 */
#if defined(__x86_64__)
#include "adam_kernel.h"
#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))
#define LANES 16
#define ALL   ((__mmask16)0xffff)
#define TO_NEAREST (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)

typedef struct coef16 {
    __m512 g_scale, one_minus_b1, one_minus_b2, rsqrt_bc2, eps, lr_wd, lr_bc1;
} coef16;

INLINE coef16 coef_set(const mt__adam_coef *c)
{
    return (coef16){
        .g_scale      = _mm512_set1_ps(c->g_scale),
        .one_minus_b1 = _mm512_set1_ps(c->one_minus_b1),
        .one_minus_b2 = _mm512_set1_ps(c->one_minus_b2),
        .rsqrt_bc2    = _mm512_set1_ps(c->rsqrt_bc2),
        .eps          = _mm512_set1_ps(c->eps),
        .lr_wd        = _mm512_set1_ps(c->lr_wd),
        .lr_bc1       = _mm512_set1_ps(c->lr_bc1),
    };
}

INLINE __m512 load_half(const void *x, mt_dtype dt, __mmask16 on)
{
    __m256i raw = _mm256_maskz_loadu_epi16(on, x);

    if (dt == MT_F16)
        return _mm512_cvtph_ps(raw);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}

INLINE __m512 load_grad(const mt__adam_span *s, mt_dtype g, int64_t i, __mmask16 on)
{
    if (g == MT_F32)
        return _mm512_maskz_loadu_ps(on, (const float *)s->grad + i);
    return load_half((const uint16_t *)s->grad + i, g, on);
}

INLINE __m512 load_weight(const mt__adam_span *s, mt_dtype w, int64_t i, __mmask16 on)
{
    if (w == MT_F32)
        return _mm512_maskz_loadu_ps(on, (const float *)s->hi + i);

    __m256i hi = _mm256_maskz_loadu_epi16(on, (const uint16_t *)s->hi + i);
    if (w == MT_BF16) {
        __m512i top = _mm512_slli_epi32(_mm512_cvtepu16_epi32(hi), 16);
        __m512i low = _mm512_cvtepi16_epi32(_mm256_maskz_loadu_epi16(on, s->lo + i));
        return _mm512_castsi512_ps(_mm512_add_epi32(top, low));
    }
    __m512    p    = _mm512_maskz_loadu_ps(on, s->master + i);
    __mmask16 kept = _mm256_cmpeq_epi16_mask(hi, _mm512_cvtps_ph(p, TO_NEAREST));
    return _mm512_mask_mov_ps(_mm512_cvtph_ps(hi), kept, p);
}

INLINE void store_split(const mt__adam_span *s, int64_t i, __mmask16 on, __m512i bits)
{
    const __m512i inf  = _mm512_set1_epi32(0x7f800000), edge = _mm512_set1_epi32(0x7f7f8000);
    __m512i   size     = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    __mmask16 too_big  = _mm512_cmplt_epu32_mask(_mm512_sub_epi32(size, edge),
                                                 _mm512_set1_epi32(0x8000));
    __mmask16 nan      = _mm512_cmpgt_epu32_mask(size, inf);
    __m512i   sign     = _mm512_xor_si512(bits, size);

    bits = _mm512_mask_or_epi32(bits, too_big, sign, _mm512_set1_epi32(0x7f7f7fff));
    bits = _mm512_mask_mov_epi32(bits, nan, _mm512_set1_epi32(0x7fc00000));

    __m512i top = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)), 16);
    _mm256_mask_storeu_epi16((uint16_t *)s->hi + i, on, _mm512_cvtepi32_epi16(top));
    _mm256_mask_storeu_epi16(s->lo + i, on, _mm512_cvtepi32_epi16(bits));
}

INLINE void store_weight(const mt__adam_span *s, mt_dtype w, int64_t i, __mmask16 on, __m512 p)
{
    if (w == MT_F32) {
        _mm512_mask_storeu_ps((float *)s->hi + i, on, p);
    } else if (w == MT_BF16) {
        store_split(s, i, on, _mm512_castps_si512(p));
    } else {
        _mm512_mask_storeu_ps(s->master + i, on, p);
        _mm256_mask_storeu_epi16((uint16_t *)s->hi + i, on, _mm512_cvtps_ph(p, TO_NEAREST));
    }
}

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
