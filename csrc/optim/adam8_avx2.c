/* adam8_avx2.c — the update of adam8_scalar.c, MT__GROUPS groups of 128 parameters an iteration.
 *
 * Compiled and entered as adam_avx2.c is. Groups' moments lie on the stack between the step and the
 * bytes that they become, as in adam8_avx512.c; what is left after the last whole group goes
 * through the definition.
 *
 * Unpacking and packing work within 128-bit halves. So 16 elements are a pair whose half h has
 * elements 8 h to 8 h + 3 in a, the next four in b: what unpacking 16 words in a row gives,
 * and packing takes.
 */
#if defined(__x86_64__)
#include "adam8_kernel.h"
#include "adam_avx2.h"

#define WIDTH (2 * LANES)                        /* of a pair */
#define PAIRS (MT_STATES_GROUP / WIDTH)

/* The float whose last bit is MT__CODE_UNIT, and its upper 16 bits. */
#define UNITS_ONTO       0x1p-40f
#define UNITS_ONTO_UPPER 0x2b80

typedef struct bits16 { __m256i a, b; } bits16;
typedef struct hash8  { __m256i first, second; } hash8;

/* Of the 16 elements that begin with the group's j: 16 bits each, in a row. */
INLINE __m256i hashed(hash8 k, int j)
{
    __m256i x = _mm256_add_epi32(k.first, _mm256_set1_epi32((int)((uint32_t)j * MT__HASH_STEP)));

    x = _mm256_xor_si256(_mm256_xor_si256(x, _mm256_srli_epi32(x, 15)), k.second);
    return _mm256_mullo_epi32(x, _mm256_set1_epi32((int)MT__HASH_MIX));
}

INLINE hash8 hash_of(const uint32_t *seed, int64_t first)
{
    const __m256i lanes = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
    __m256i steps = _mm256_mullo_epi32(lanes, _mm256_set1_epi32((int)MT__HASH_STEP));
    __m256i at = _mm256_set1_epi32((int)MT__HASH_FIRST(seed, first));

    return (hash8){ .first  = _mm256_add_epi32(at, steps),
                    .second = _mm256_set1_epi32((int)seed[1]) };
}

/* ---- pairs ---- */

INLINE __m256i load_words(const void *x) { return _mm256_loadu_si256((const __m256i *)x); }
INLINE void store_words(void *to, __m256i x) { _mm256_storeu_si256((__m256i *)to, x); }

INLINE bits16 unpacked(__m256i low, __m256i high)
{
    return (bits16){ _mm256_unpacklo_epi16(low, high), _mm256_unpackhi_epi16(low, high) };
}

INLINE __m256i upper_words(bits16 x)
{
    return _mm256_packus_epi32(_mm256_srli_epi32(x.a, 16), _mm256_srli_epi32(x.b, 16));
}

typedef struct halves { __m256i top, low; } halves;

INLINE halves halves_of(bits16 x)
{
    const __m256i low_first = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    __m256i a = _mm256_shuffle_epi8(x.a, low_first), b = _mm256_shuffle_epi8(x.b, low_first);

    return (halves){ .top = _mm256_unpackhi_epi64(a, b), .low = _mm256_unpacklo_epi64(a, b) };
}

INLINE pair float_of(bits16 x)
{
    return (pair){ _mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b) };
}

/* From 16 values in a row, and to them. */
INLINE pair pair_of(__m256 first, __m256 second)
{
    return (pair){ _mm256_permute2f128_ps(first, second, 0x20),
                   _mm256_permute2f128_ps(first, second, 0x31) };
}

INLINE pair in_a_row(pair x) { return pair_of(x.a, x.b); }

INLINE pair load_grads(const mt__adam_span *s, mt_dtype g, int64_t i)
{
    if (g == MT_BF16)
        return float_of(unpacked(_mm256_setzero_si256(),
                                 load_words((const uint16_t *)s->grad + i)));
    return pair_of(load_grad(s, g, i), load_grad(s, g, i + LANES));
}

/* ---- weights ---- */

/* hi is what the whole was rounded to: one too large where lo is negative. */
INLINE pair joined(__m256i hi, __m256i lo)
{
    return float_of(unpacked(lo, _mm256_add_epi16(hi, _mm256_srai_epi16(lo, 15))));
}

INLINE pair load_kept(const mt__adam_span *s, int keep, int64_t i)
{
    if (keep == MT__KEEP_F32 || keep == MT__KEEP_F16)
        return pair_of(load_weight(s, (mt_dtype)keep, i),
                       load_weight(s, (mt_dtype)keep, i + LANES));

    __m256i hi = load_words((const uint16_t *)s->hi + i);
    if (keep == MT__KEEP_SR)
        return float_of(unpacked(_mm256_setzero_si256(), hi));
    if (keep == MT__KEEP_BF16)
        return joined(hi, load_words(s->lo + i));
    return joined(hi, _mm256_slli_epi16(_mm256_cvtepi8_epi16(load8(s->codes.lo + i)), 8));
}

/* Whether some of these upper words are as large as MT__SR_MOST's, or not finite. */
INLINE int rarely_held(__m256i top)
{
    const __m256i below = _mm256_set1_epi16((short)(MT__SR_MOST >> 16) - 1);
    __m256i size = _mm256_and_si256(top, _mm256_set1_epi16(0x7fff));

    return _mm256_movemask_epi8(_mm256_cmpgt_epi16(size, below)) != 0;
}

INLINE int rarely_spread(bits16 p)
{
    const __m256i sizes = _mm256_set1_epi32(0x7fffffff), below = _mm256_set1_epi32(MT__SR_MOST - 1);
    __m256i most = _mm256_max_epi32(_mm256_and_si256(p.a, sizes), _mm256_and_si256(p.b, sizes));

    return _mm256_movemask_epi8(_mm256_cmpgt_epi32(most, below)) != 0;
}

/* bits of a weight that split_holds, plus what rounds it stochastically when it is cut. */
INLINE __m256i spread(__m256i p, __m256i add)
{
    __m256i bits = split_holds(_mm256_castsi256_ps(p));
    __m256i size = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    __m256i some = _mm256_cmpgt_epi32(_mm256_set1_epi32(MT__SR_MOST), size);

    return _mm256_add_epi32(bits, _mm256_and_si256(add, some));
}

/* What rounds a pair, of which `shift` leaves so many bits as are cut off, and the sum of both. */
INLINE bits16 rounding(__m256i random, int shift)
{
    return unpacked(_mm256_srli_epi16(random, shift), _mm256_setzero_si256());
}

INLINE bits16 sum_of(bits16 p, bits16 add)
{
    return (bits16){ _mm256_add_epi32(p.a, add.a), _mm256_add_epi32(p.b, add.b) };
}

INLINE bits16 spread_pair(bits16 p, bits16 add)
{
    return (bits16){ spread(p.a, add.a), spread(p.b, add.b) };
}

/* Whether spread_pair may be anything but sum_of, whose upper words are `top`. No NaN carries into
 * its sign there but one from a gradient in fp32: others have no bits so low. */
INLINE int rarely_sum(bits16 p, __m256i top, mt_dtype g)
{
    return g == MT_F32 ? rarely_spread(p) : rarely_held(top);
}

/* The upper words to nearest, ties away, as mt__split_store. */
INLINE void store_hi(const mt__adam_span *s, int64_t i, halves x)
{
    store_words((uint16_t *)s->hi + i, _mm256_add_epi16(x.top, _mm256_srli_epi16(x.low, 15)));
}

INLINE void store_halves(const mt__adam_span *s, int64_t i, pair p)
{
    halves x = halves_of((bits16){ _mm256_castps_si256(p.a), _mm256_castps_si256(p.b) });

    if (__builtin_expect(rarely_held(x.top), 0))
        x = halves_of((bits16){ split_holds(p.a), split_holds(p.b) });
    store_hi(s, i, x);
    store_words(s->lo + i, x.low);
}

/* The upper bytes of 16 words. */
INLINE void store_upper(void *to, __m256i words)
{
    __m256i x = _mm256_srli_epi16(words, 8);
    x = _mm256_permute4x64_epi64(_mm256_packus_epi16(x, x), 0xd8);
    _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(x));
}

INLINE void store_kept(const mt__adam_span *s, int keep, mt_dtype g, int64_t i, pair p,
                       __m256i random)
{
    bits16 bits = { _mm256_castps_si256(p.a), _mm256_castps_si256(p.b) };

    if (keep == MT__KEEP_SR) {
        bits16  add = rounding(random, 0);
        __m256i top = upper_words(sum_of(bits, add));

        if (__builtin_expect(rarely_sum(bits, top, g), 0))
            top = upper_words(spread_pair(bits, add));
        store_words((uint16_t *)s->hi + i, top);
    } else if (keep == MT__KEEP_LO8) {
        bits16 add = rounding(random, 8);
        halves x = halves_of(sum_of(bits, add));

        if (__builtin_expect(rarely_sum(bits, x.top, g), 0))
            x = halves_of(spread_pair(bits, add));
        store_hi(s, i, x);
        store_upper(s->codes.lo + i, x.low);
    } else if (keep == MT__KEEP_BF16) {
        store_halves(s, i, p);
    } else {
        store_weight(s, (mt_dtype)keep, i, in_a_row(p));
    }
}

/* ---- a group ---- */

/* New moments, what they are rounded by, and the largest in each of 8 lanes. */
typedef struct group {
    pair    m[PAIRS], r[PAIRS];
    __m256i random[PAIRS];
    __m256  most_m, most_r;
} group;

/* magnitude, with the sign of x. */
INLINE __m256 with_sign(__m256 magnitude_of, __m256 x)
{
    const __m256 sign = _mm256_castsi256_ps(_mm256_set1_epi32((int)0x80000000u));
    return _mm256_or_ps(magnitude_of, _mm256_and_ps(x, sign));
}

INLINE __m256 square(__m256 code)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(code), 1));
}

/* Words as floats, in units, less what `zero` is in units: the float whose last bits they are,
 * less it. */
INLINE pair codes_from(__m256i words, float zero)
{
    const __m256 onto = _mm256_set1_ps(UNITS_ONTO + zero);
    pair         x = float_of(unpacked(words, _mm256_set1_epi16(UNITS_ONTO_UPPER)));

    return (pair){ _mm256_sub_ps(x.a, onto), _mm256_sub_ps(x.b, onto) };
}

INLINE pair moments_of(__m256 scale, const int8_t *c)
{
    __m256i words = _mm256_cvtepi8_epi16(load8(c));
    pair    x = codes_from(_mm256_add_epi16(words, _mm256_set1_epi16(128)), 128 * MT__CODE_UNIT);

    return (pair){ _mm256_mul_ps(with_sign(scale, x.a), square(x.a)),
                   _mm256_mul_ps(with_sign(scale, x.b), square(x.b)) };
}

INLINE pair roots_of(__m256 scale, const uint8_t *k)
{
    pair x = codes_from(_mm256_cvtepu8_epi16(load8(k)), 0);

    return (pair){ _mm256_mul_ps(scale, square(x.a)), _mm256_mul_ps(scale, square(x.b)) };
}

/* The step of 8 elements: from their moments, old, to new ones. */
INLINE __m256 updated(const coef8 *c, __m256 p, __m256 g, __m256 *moment, __m256 *root)
{
    __m256 m = *moment, v = _mm256_mul_ps(*root, *root), r;

    g = _mm256_mul_ps(g, c->g_scale);
    m = _mm256_fmadd_ps(c->one_minus_b1, _mm256_sub_ps(g, m), m);
    v = _mm256_fmadd_ps(c->one_minus_b2, _mm256_fmsub_ps(g, g, v), v);
    r = _mm256_sqrt_ps(v);
    __m256 u = _mm256_div_ps(m, _mm256_fmadd_ps(r, c->rsqrt_bc2, c->eps));

    *moment = m;
    *root = r;
    return _mm256_sub_ps(p, _mm256_fmadd_ps(c->lr_wd, p, _mm256_mul_ps(c->lr_bc1, u)));
}

/* 16 elements; their new moments go into m and r. */
INLINE void elements(const mt__adam_span *s, const coef8 *c, int keep, mt_dtype gt, int64_t i,
                     __m256 cs, __m256 ks, pair *m, pair *r, __m256i random)
{
    pair p = load_kept(s, keep, i), g = load_grads(s, gt, i);

    *m = moments_of(cs, s->codes.m + i);
    *r = roots_of(ks, s->codes.v + i);
    p.a = updated(c, p.a, g.a, &m->a, &r->a);
    p.b = updated(c, p.b, g.b, &m->b, &r->b);
    store_kept(s, keep, gt, i, p, random);
}

INLINE __m256i root(__m256 q) { return _mm256_srli_epi32(_mm256_castps_si256(q), 1); }

/* How far 8 elements' codes are below MT__CODE_TOP; negative where they are above,
 * or not finite. */
INLINE void codes_of(__m256 m, __m256 r, const mt__code_size *size, __m256 onto, __m256i *out_m,
                     __m256i *out_v)
{
    const __m256 units = _mm256_set1_ps(MT__CODE_UNITS);
    __m256  x = _mm256_castsi256_ps(root(_mm256_mul_ps(magnitude(m), _mm256_set1_ps(size->by_m))));
    __m256i y = root(_mm256_mul_ps(r, _mm256_set1_ps(size->by_r)));
    __m256  least = _mm256_fmadd_ps(x, _mm256_set1_ps(size->least), _mm256_set1_ps(size->floor));

    y = _mm256_max_epu32(y, _mm256_castps_si256(least));
    *out_m = _mm256_cvttps_epi32(_mm256_fnmadd_ps(x, with_sign(units, m), onto));
    *out_v = _mm256_cvttps_epi32(_mm256_fnmadd_ps(_mm256_castsi256_ps(y), units, onto));
}

/* Half of m's lanes, m and r in turns; and half of these, of two groups. */
INLINE __m256 in_turns(const group *x)
{
    return _mm256_max_ps(_mm256_unpacklo_ps(x->most_m, x->most_r),
                         _mm256_unpackhi_ps(x->most_m, x->most_r));
}

INLINE __m256 halved(__m256 a, __m256 b)
{
    return _mm256_max_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

/* The largest m and r of each group, in a row. */
INLINE __m256 largest(const group *x)
{
    __m256d a = _mm256_castps_pd(halved(in_turns(&x[0]), in_turns(&x[1])));
    __m256d b = _mm256_castps_pd(halved(in_turns(&x[2]), in_turns(&x[3])));
    __m256  y = _mm256_max_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)),
                              _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));

    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(y), 0xd8));
}

/* The words of two pairs as bytes in a row. */
INLINE void store_bytes(void *to, __m256i bytes)
{
    store_words(to, _mm256_permute4x64_epi64(bytes, 0xd8));
}

INLINE void encode(const group *x, const mt__code_size *size, int8_t *m, uint8_t *v)
{
    const __m256i top = _mm256_set1_epi16(MT__CODE_TOP), all = _mm256_set1_epi32(-1);

#pragma GCC unroll 4
    for (int j = 0; j < PAIRS; j += 2) {
        __m256i words_m[2], words_v[2];

#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            pair   onto = float_of(unpacked(x->random[j + h],
                                            _mm256_set1_epi16(MT__RANDOM_ONTO >> 16)));
            bits16 c, d;

            codes_of(x->m[j + h].a, x->r[j + h].a, size, onto.a, &c.a, &d.a);
            codes_of(x->m[j + h].b, x->r[j + h].b, size, onto.b, &c.b, &d.b);
            words_m[h] = _mm256_sub_epi16(top, _mm256_packus_epi32(c.a, c.b));
            words_v[h] = _mm256_packus_epi32(d.a, d.b);
        }
        store_bytes(m + j * WIDTH, _mm256_packs_epi16(words_m[0], words_m[1]));
        store_bytes(v + j * WIDTH,
                    _mm256_xor_si256(_mm256_packus_epi16(words_v[0], words_v[1]), all));
    }
}

INLINE void step_group(const mt__adam_span *s, const mt__adam_coef *c, const coef8 *k, int keep,
                       mt_dtype gt, int64_t i, group *x)
{
    const float *scale = s->codes.scale + i / MT_STATES_GROUP * 2;
    __m256 cs = _mm256_set1_ps(scale[0]), ks = _mm256_set1_ps(scale[1]);
    __m256 most_m = _mm256_setzero_ps(), most_r = most_m;
    hash8 hash = hash_of(c->seed, s->first + i);

#pragma GCC unroll 8
    for (int j = 0; j < PAIRS; j++) {
        pair m, r;

        x->random[j] = hashed(hash, j * WIDTH);
        elements(s, k, keep, gt, i + j * WIDTH, cs, ks, &m, &r, x->random[j]);
        most_m = _mm256_max_ps(magnitude(m.b), _mm256_max_ps(magnitude(m.a), most_m));
        most_r = _mm256_max_ps(r.b, _mm256_max_ps(r.a, most_r));
        x->m[j] = m;
        x->r[j] = r;
    }
    x->most_m = most_m;
    x->most_r = most_r;
}

/* n groups, at most MT__GROUPS. Sizes of groups that are not there are those of zeros. */
INLINE void step_groups(const mt__adam_span *s, const mt__adam_coef *c, const coef8 *k, int keep,
                        mt_dtype g, int64_t i, int n, group *x)
{
    mt__code_size size[MT__GROUPS];

    for (int j = 0; j < n; j++) {
        int64_t at = i + j * MT_STATES_GROUP;

        mt__adam8_prefetch(s, keep, g, at + MT__ADAM8_AHEAD);
        step_group(s, c, k, keep, g, at, &x[j]);
    }
    for (int j = n; j < MT__GROUPS; j++)
        x[j].most_m = x[j].most_r = _mm256_setzero_ps();
    mt__code_sizes_set(size, largest(x), c->code_bound, s->codes.scale + i / MT_STATES_GROUP * 2,
                       n);
    for (int j = 0; j < n; j++)
        encode(&x[j], &size[j], s->codes.m + i + j * MT_STATES_GROUP,
               s->codes.v + i + j * MT_STATES_GROUP);
}

INLINE void step(const mt__adam_span *where, const mt__adam_coef *c, int keep, mt_dtype g,
                 mt__adam_fn rest)
{
    const mt__adam_span s = *where;     /* ours: no store can change it, so it stays in registers */
    const coef8        k = coef_set(c);
    mt_dtype            w = keep < MT__KEEP_LO8 ? (mt_dtype)keep : MT_BF16;
    int64_t             i = 0, groups = s.n / MT_STATES_GROUP;
    group               x[MT__GROUPS];

    for (int n; groups > 0; groups -= n, i += n * MT_STATES_GROUP) {
        n = groups < MT__GROUPS ? (int)groups : MT__GROUPS;
        step_groups(&s, c, &k, keep, g, i, n, x);
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
