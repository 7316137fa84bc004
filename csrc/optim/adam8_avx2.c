/* adam8_avx2.c — the update of adam8_scalar.c, a group of 128 parameters an iteration.
 *
 * Compiled and entered as adam_avx2.c is. A group's moments lie on the stack between the step and the bytes
 * that they become; what is left after the last whole group goes through the definition.
 */
#if defined(__x86_64__)
#include "adam8_kernel.h"
#include "adam_avx2.h"

#define VECTORS (MT_STATES_GROUP / LANES)

typedef struct hash8 { __m256i first, second; } hash8;

/* Of the 8 elements from the group's element j on. */
INLINE __m256i hashed(hash8 k, int j)
{
    __m256i x = _mm256_add_epi32(k.first, _mm256_set1_epi32((int)((uint32_t)j * MT__HASH_STEP)));

    x = _mm256_xor_si256(_mm256_xor_si256(x, _mm256_srli_epi32(x, 15)), k.second);
    return _mm256_mullo_epi32(x, _mm256_set1_epi32((int)MT__HASH_MIX));
}

INLINE hash8 hash_of(const uint32_t *seed, int64_t first)
{
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i steps = _mm256_mullo_epi32(lanes, _mm256_set1_epi32((int)MT__HASH_STEP));
    __m256i at = _mm256_set1_epi32((int)MT__HASH_FIRST(seed, first));

    return (hash8){ .first  = _mm256_add_epi32(at, steps),
                    .second = _mm256_set1_epi32((int)seed[1]) };
}

/* ---- bytes ---- */

/* Bytes of 16 elements, sign-extended or not. */
INLINE __m256i load_signed(const int8_t *x)
{
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)x));
}

INLINE __m256i load_unsigned(const uint8_t *x)
{
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)x));
}

/* The lowest byte of 16 dwords; packs work within 128-bit halves. */
INLINE void store_bytes(void *to, __m256i a, __m256i b)
{
    const __m256i byte = _mm256_set1_epi32(0xff);
    __m256i words = _mm256_packus_epi32(_mm256_and_si256(a, byte), _mm256_and_si256(b, byte));
    __m256i bytes = _mm256_packus_epi16(_mm256_permute4x64_epi64(words, 0xd8), _mm256_setzero_si256());

    _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(bytes, 0xd8)));
}

/* ---- weights with fewer bits ---- */

/* bits of a weight that split_holds, plus what rounds it stochastically when it is cut. */
INLINE __m256i spread(__m256 p, __m256i add)
{
    __m256i bits = split_holds(p);
    __m256i size = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    __m256i some = _mm256_cmpgt_epi32(_mm256_set1_epi32(MT__SR_MOST), size);

    return _mm256_add_epi32(bits, _mm256_and_si256(add, some));
}

INLINE __m256 load_kept(const mt__adam_span *s, int keep, int64_t i)
{
    if (keep == MT__KEEP_SR)
        return _mm256_castsi256_ps(widen_bf16((const uint16_t *)s->hi + i));
    if (keep == MT__KEEP_LO8)
        return _mm256_castsi256_ps(_mm256_add_epi32(widen_bf16((const uint16_t *)s->hi + i),
                                                    _mm256_slli_epi32(load_signed(s->codes.lo + i), 8)));
    return load_weight(s, (mt_dtype)keep, i);
}

INLINE void store_lo8(const mt__adam_span *s, int64_t i, __m256i a, __m256i b)
{
    const __m256i half = _mm256_set1_epi32(0x8000), kept = _mm256_set1_epi32((int)0xffffff00u);

    store_low((uint16_t *)s->hi + i,
              _mm256_srli_epi32(_mm256_add_epi32(_mm256_and_si256(a, kept), half), 16),
              _mm256_srli_epi32(_mm256_add_epi32(_mm256_and_si256(b, kept), half), 16));
    store_bytes(s->codes.lo + i, _mm256_srli_epi32(a, 8), _mm256_srli_epi32(b, 8));
}

INLINE void store_kept(const mt__adam_span *s, int keep, int64_t i, pair p, hash8 k, int j)
{
    int shift = keep == MT__KEEP_SR ? 16 : 24;

    if (keep != MT__KEEP_SR && keep != MT__KEEP_LO8) {
        store_weight(s, (mt_dtype)keep, i, p);
        return;
    }
    __m256i a = spread(p.a, _mm256_srli_epi32(hashed(k, j), shift));
    __m256i b = spread(p.b, _mm256_srli_epi32(hashed(k, j + LANES), shift));
    if (keep == MT__KEEP_LO8)
        store_lo8(s, i, a, b);
    else
        store_low((uint16_t *)s->hi + i, _mm256_srli_epi32(a, 16), _mm256_srli_epi32(b, 16));
}

/* ---- a group ---- */

/* New moments. */
typedef struct group {
    __m256 m[VECTORS], r[VECTORS];
} group;

INLINE __m256 size_of(__m256 x)
{
    return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)));
}

INLINE __m256 moment_of(__m256 scale, const int8_t *c)
{
    __m256 x = _mm256_cvtepi32_ps(load_signed(c));
    return _mm256_mul_ps(scale, _mm256_mul_ps(x, size_of(x)));
}

INLINE __m256 root_of(__m256 scale, const uint8_t *k)
{
    __m256 x = _mm256_cvtepi32_ps(load_unsigned(k));
    return _mm256_mul_ps(scale, _mm256_mul_ps(x, x));
}

/* The step of 8 elements; their new moments go into x, the new weights to the caller. */
INLINE __m256 elements(const mt__adam_span *s, const coef8 *c, int keep, mt_dtype gt, int64_t i, __m256 cs,
                       __m256 ks, group *x, int j)
{
    __m256 p = load_kept(s, keep, i);
    __m256 g = _mm256_mul_ps(load_grad(s, gt, i), c->g_scale);
    __m256 m = moment_of(cs, s->codes.m + i), r = root_of(ks, s->codes.v + i), v = _mm256_mul_ps(r, r);

    m = _mm256_fmadd_ps(c->one_minus_b1, _mm256_sub_ps(g, m), m);
    v = _mm256_fmadd_ps(c->one_minus_b2, _mm256_fmsub_ps(g, g, v), v);
    r = _mm256_sqrt_ps(v);
    __m256 u = _mm256_div_ps(m, _mm256_fmadd_ps(r, c->rsqrt_bc2, c->eps));

    x->m[j] = m;
    x->r[j] = r;
    return _mm256_sub_ps(p, _mm256_fmadd_ps(c->lr_wd, p, _mm256_mul_ps(c->lr_bc1, u)));
}

INLINE float largest(__m256 x)
{
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));

    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

/* What 8 elements become: m's bytes and v's, each in a dword. Of two operands with a NaN, max and min
 * give the second. */
INLINE void codes_of(__m256 m, __m256 r, const mt__code_size *size, __m256i h, __m256i *out_m, __m256i *out_v)
{
    const __m256i random = _mm256_and_si256(h, _mm256_set1_epi32(MT__K_RANDOM));
    __m256 a = _mm256_sqrt_ps(_mm256_mul_ps(size_of(m), _mm256_set1_ps(size->by_m)));
    __m256 b = _mm256_sqrt_ps(_mm256_mul_ps(r, _mm256_set1_ps(size->by_r)));

    a = _mm256_min_ps(a, _mm256_set1_ps(MT__C_UNITS));
    b = _mm256_max_ps(b, _mm256_fmadd_ps(a, _mm256_set1_ps(size->least), _mm256_set1_ps(size->floor)));
    b = _mm256_min_ps(b, _mm256_set1_ps(MT__K_UNITS));
    __m256i c = _mm256_srli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(a), _mm256_srli_epi32(h, 8)), 24);
    *out_m = _mm256_sign_epi32(c, _mm256_or_si256(_mm256_castps_si256(m), _mm256_set1_epi32(1)));
    *out_v = _mm256_srli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(b), random), 23);
}

INLINE void encode(const group *x, int8_t *m, uint8_t *v, float *scale, float bound, hash8 k)
{
    __m256 most_m = _mm256_setzero_ps(), most_r = most_m;

    for (int j = 0; j < VECTORS; j++) {
        most_m = _mm256_max_ps(size_of(x->m[j]), most_m);
        most_r = _mm256_max_ps(x->r[j], most_r);
    }
    const mt__code_size size = mt__code_size_of(largest(most_m), largest(most_r), bound, scale);

    for (int j = 0; j < VECTORS; j += 2) {
        __m256i m_a, m_b, v_a, v_b;

        codes_of(x->m[j], x->r[j], &size, hashed(k, j * LANES), &m_a, &v_a);
        codes_of(x->m[j + 1], x->r[j + 1], &size, hashed(k, (j + 1) * LANES), &m_b, &v_b);
        store_bytes(m + j * LANES, m_a, m_b);
        store_bytes(v + j * LANES, v_a, v_b);
    }
}

INLINE void step_group(const mt__adam_span *s, const mt__adam_coef *c, const coef8 *k, int keep, mt_dtype gt,
                       int64_t i)
{
    float *scale = s->codes.scale + i / MT_STATES_GROUP * 2;
    __m256 cs = _mm256_set1_ps(scale[0]), ks = _mm256_set1_ps(scale[1]);
    hash8  of_weight = hash_of(c->seed_weight, s->first + i);
    group  x;

    for (int j = 0; j < VECTORS; j += 2) {
        int64_t at = i + j * LANES;
        pair    p = { .a = elements(s, k, keep, gt, at, cs, ks, &x, j),
                      .b = elements(s, k, keep, gt, at + LANES, cs, ks, &x, j + 1) };

        store_kept(s, keep, at, p, of_weight, j * LANES);
    }
    encode(&x, s->codes.m + i, s->codes.v + i, scale, c->code_bound, hash_of(c->seed_moment, s->first + i));
}

INLINE void step(const mt__adam_span *where, const mt__adam_coef *c, int keep, mt_dtype g, mt__adam_fn rest)
{
    const mt__adam_span s = *where;     /* ours: no store can change it, so it stays in registers */
    const coef8         k = coef_set(c);
    mt_dtype            w = keep < MT__KEEP_LO8 ? (mt_dtype)keep : MT_BF16;
    int64_t             i = 0;

    for (; i + MT_STATES_GROUP <= s.n; i += MT_STATES_GROUP) {
        mt__adam8_prefetch(&s, keep, g, i + MT__ADAM8_AHEAD);
        step_group(&s, c, &k, keep, g, i);
    }
    mt__adam_span tail = mt__adam_part(&s, w, g, i, s.n - i);
    rest(&tail, c);
}

#define STEP(w, g)                                                              \
    static void step_##w##_##g(const mt__adam_span *s, const mt__adam_coef *c)  \
    {                                                                           \
        step(s, c, MT__KEEP_##w, MT_##g, mt__adam8_scalar[MT__ADAM8_##w##_##g]);\
    }
MT__ADAM8_KIND_MAP(STEP)

#define ENTRY(w, g) step_##w##_##g,
const mt__adam_fn mt__adam8_avx2[MT__ADAM8_KINDS] = { MT__ADAM8_KIND_MAP(ENTRY) };

#else
typedef int mt__no_adam8_avx2;          /* a file must declare something */
#endif
