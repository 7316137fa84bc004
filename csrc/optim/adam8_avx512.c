/* adam8_avx512.c — the update of adam8_scalar.c, MT__GROUPS groups of 128 parameters at once.
 *
 * Compiled and entered as adam_avx512.c is. Groups' moments lie on the stack between the step and
 * the bytes that they become: what a group's sizes wait for, a chain of twenty operations with a
 * division and a root, is waited for once, and costs as much for all as for one. What is left after
 * the last whole group goes through the definition.
 *
 * 32 elements are a pair: those of even number in a, the others in b. Words in a row are then the
 * halves of 32 bits: taken apart by a shift and a mask,
 * put together by one shuffle that writes every second word.
 */
#if defined(__x86_64__)
#include "adam8_kernel.h"
#include "adam_avx512.h"

#define WIDTH  (2 * LANES)                       /* of a pair */
#define PAIRS  (MT_STATES_GROUP / WIDTH)
#define SIGN   ((int)0x80000000u)

/* The float whose last bit is MT__CODE_UNIT, and its bits. */
#define UNITS_ONTO      0x1p-40f
#define UNITS_ONTO_BITS 0x2b800000u

typedef struct pair   { __m512  a, b; } pair;
typedef struct bits32 { __m512i a, b; } bits32;
typedef struct hash16 { __m512i first, second; } hash16;

/* Of the 32 elements that begin with the group's j: 16 bits each, in a row. */
INLINE __m512i hashed(hash16 k, int j)
{
    __m512i x = _mm512_add_epi32(k.first, _mm512_set1_epi32((int)((uint32_t)j * MT__HASH_STEP)));

    x = _mm512_ternarylogic_epi32(x, _mm512_srli_epi32(x, 15), k.second, 0x96);      /* all xor */
    return _mm512_mullo_epi32(x, _mm512_set1_epi32((int)MT__HASH_MIX));
}

INLINE hash16 hash_of(const uint32_t *seed, int64_t first)
{
    const __m512i lanes = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28,
                                            30);
    __m512i steps = _mm512_mullo_epi32(lanes, _mm512_set1_epi32((int)MT__HASH_STEP));
    __m512i at = _mm512_set1_epi32((int)MT__HASH_FIRST(seed, first));

    return (hash16){ .first  = _mm512_add_epi32(at, steps),
                     .second = _mm512_set1_epi32((int)seed[1]) };
}

/* ---- pairs ---- */

INLINE pair float_of(bits32 x)
{
    return (pair){ _mm512_castsi512_ps(x.a), _mm512_castsi512_ps(x.b) };
}

/* The lower words of two vectors, those of `lower` below those of `upper`; and their upper ones.
 * Half of the words stay where they are. */
INLINE __m512i low_words(__m512i lower, __m512i upper)
{
    const __m512i up = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12,
                                                            13, 12, 13));
    return _mm512_mask_shuffle_epi8(lower, 0xccccccccccccccccu, upper, up);
}

INLINE __m512i top_words(__m512i lower, __m512i upper)
{
    const __m512i down = _mm512_broadcast_i32x4(_mm_setr_epi8(2, 3, 2, 3, 6, 7, 6, 7, 10, 11, 10,
                                                              11, 14, 15, 14, 15));
    return _mm512_mask_shuffle_epi8(upper, 0x3333333333333333u, lower, down);
}

/* 32 words in a row as the upper ones of a pair: with nothing below them, with others. */
INLINE bits32 upper(__m512i words)
{
    return (bits32){ _mm512_slli_epi32(words, 16),
                     _mm512_and_si512(words, _mm512_set1_epi32((int)0xffff0000u)) };
}

INLINE bits32 above(__m512i top, __m512i low)
{
    return (bits32){ low_words(low, top), top_words(low, top) };
}

/* From and to 32 values in a row. */
INLINE pair pair_of(__m512 first, __m512 second)
{
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28,
                                           30);
    const __m512i odd  = _mm512_add_epi32(even, _mm512_set1_epi32(1));

    return (pair){ _mm512_permutex2var_ps(first, even, second),
                   _mm512_permutex2var_ps(first, odd, second) };
}

INLINE __m512 first_of(pair x)
{
    const __m512i from = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    return _mm512_permutex2var_ps(x.a, from, x.b);
}

INLINE __m512 second_of(pair x)
{
    const __m512i from = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15,
                                           31);
    return _mm512_permutex2var_ps(x.a, from, x.b);
}

INLINE pair load_grads(const mt__adam_span *s, mt_dtype g, int64_t i)
{
    if (g == MT_BF16)
        return float_of(upper(_mm512_loadu_si512((const uint16_t *)s->grad + i)));
    return pair_of(load_grad(s, g, i, ALL), load_grad(s, g, i + LANES, ALL));
}

/* ---- weights ---- */

/* hi is what the whole was rounded to: one too large where lo is negative. */
INLINE pair joined(__m512i hi, __m512i lo)
{
    return float_of(above(_mm512_add_epi16(hi, _mm512_srai_epi16(lo, 15)), lo));
}

INLINE pair load_kept(const mt__adam_span *s, int keep, int64_t i)
{
    if (keep == MT__KEEP_F32 || keep == MT__KEEP_F16)
        return pair_of(load_weight(s, (mt_dtype)keep, i, ALL),
                       load_weight(s, (mt_dtype)keep, i + LANES, ALL));

    __m512i hi = _mm512_loadu_si512((const uint16_t *)s->hi + i);
    if (keep == MT__KEEP_SR)
        return float_of(upper(hi));
    if (keep == MT__KEEP_BF16)
        return joined(hi, _mm512_loadu_si512(s->lo + i));
    __m512i lo = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)(s->codes.lo + i)));
    return joined(hi, _mm512_slli_epi16(lo, 8));
}

/* Whether some of these upper words are as large as MT__SR_MOST's, or not finite. */
INLINE int rarely_held(__m512i top)
{
    __m512i size = _mm512_add_epi16(top, top);          /* without signs */

    return _mm512_cmpge_epu16_mask(size, _mm512_set1_epi16((short)(MT__SR_MOST >> 15 & 0xffff)))
           != 0;
}

INLINE int rarely_spread(bits32 p)
{
    __m512i size = _mm512_max_epu32(_mm512_add_epi32(p.a, p.a), _mm512_add_epi32(p.b, p.b));

    return _mm512_cmpge_epu32_mask(size, _mm512_set1_epi32((int)(MT__SR_MOST << 1))) != 0;
}

/* bits of a weight that split_holds, plus what rounds it stochastically when it is cut. */
INLINE __m512i spread(__m512i p, __m512i add)
{
    __m512i   bits = split_holds(p);
    __m512i   size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    __mmask16 some = _mm512_cmplt_epu32_mask(size, _mm512_set1_epi32(MT__SR_MOST));

    return _mm512_mask_add_epi32(bits, some, bits, add);
}

/* What rounds a pair, of which `shift` leaves so many bits as are cut off, and the sum of both. */
INLINE bits32 rounding(__m512i random, int shift)
{
    __m512i x = shift == 0 ? random : _mm512_srli_epi16(random, shift);

    return (bits32){ .a = _mm512_and_si512(x, _mm512_set1_epi32(0xffff)),
                     .b = _mm512_srli_epi32(random, 16 + (unsigned)shift) };
}

INLINE bits32 sum_of(bits32 p, bits32 add)
{
    return (bits32){ _mm512_add_epi32(p.a, add.a), _mm512_add_epi32(p.b, add.b) };
}

INLINE bits32 spread_pair(bits32 p, bits32 add)
{
    return (bits32){ spread(p.a, add.a), spread(p.b, add.b) };
}

/* Whether spread_pair may be anything but sum_of, whose upper words are `top`. No NaN carries into
 * its sign there but one from a gradient in fp32: others have no bits so low. */
INLINE int rarely_sum(bits32 p, __m512i top, mt_dtype g)
{
    return g == MT_F32 ? rarely_spread(p) : rarely_held(top);
}

typedef struct halves { __m512i top, low; } halves;

INLINE __m512i top_of(bits32 x) { return top_words(x.a, x.b); }

INLINE halves halves_of(bits32 x)
{
    return (halves){ .top = top_words(x.a, x.b), .low = low_words(x.a, x.b) };
}

/* The upper words to nearest, ties away, as mt__split_store. */
INLINE void store_hi(const mt__adam_span *s, int64_t i, halves x)
{
    _mm512_storeu_si512((uint16_t *)s->hi + i,
                        _mm512_add_epi16(x.top, _mm512_srli_epi16(x.low, 15)));
}

INLINE void store_halves(const mt__adam_span *s, int64_t i, bits32 p)
{
    halves x = halves_of(p);

    if (__builtin_expect(rarely_held(x.top), 0))
        x = halves_of((bits32){ split_holds(p.a), split_holds(p.b) });
    store_hi(s, i, x);
    _mm512_storeu_si512(s->lo + i, x.low);
}

INLINE void store_kept(const mt__adam_span *s, int keep, mt_dtype g, int64_t i, pair p,
                       __m512i random)
{
    bits32 bits = { _mm512_castps_si512(p.a), _mm512_castps_si512(p.b) };

    if (keep == MT__KEEP_SR) {
        bits32  add = rounding(random, 0);
        __m512i top = top_of(sum_of(bits, add));

        if (__builtin_expect(rarely_sum(bits, top, g), 0))
            top = top_of(spread_pair(bits, add));
        _mm512_storeu_si512((uint16_t *)s->hi + i, top);
    } else if (keep == MT__KEEP_LO8) {
        bits32 add = rounding(random, 8);
        halves x = halves_of(sum_of(bits, add));

        if (__builtin_expect(rarely_sum(bits, x.top, g), 0))
            x = halves_of(spread_pair(bits, add));
        store_hi(s, i, x);
        _mm256_storeu_si256((void *)(s->codes.lo + i),
                            _mm512_cvtepi16_epi8(_mm512_srli_epi16(x.low, 8)));
    } else if (keep == MT__KEEP_BF16) {
        store_halves(s, i, bits);
    } else {
        store_weight(s, (mt_dtype)keep, i, ALL, first_of(p));
        store_weight(s, (mt_dtype)keep, i + LANES, ALL, second_of(p));
    }
}

/* ---- a group ---- */

/* New moments, what they are rounded by, and the largest in each of 16 lanes. */
typedef struct group {
    pair    m[PAIRS], r[PAIRS];
    __m512i random[PAIRS];
    __m512  most_m, most_r;
} group;

/* magnitude, with the sign of x. */
INLINE __m512 with_sign(__m512 magnitude, __m512 x)
{
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(
        _mm512_castps_si512(magnitude), _mm512_castps_si512(x), _mm512_set1_epi32(SIGN), 0xd8));
}

INLINE __m512 square(__m512 code)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(code), 1));
}

/* Bytes as floats, in units, less what `zero` is in units: an even one as the last bits of a float,
 * less it, an odd one as the eight bits before, of a float so much smaller. `flip` is
 * exclusive-or'ed to each. */
INLINE pair codes_from(const void *bytes, uint32_t flip, float zero)
{
    const __m512i even = _mm512_set1_epi32((int)(UNITS_ONTO_BITS | flip));
    const __m512i odd  = _mm512_set1_epi32((int)((UNITS_ONTO_BITS - (8u << 23)) | flip << 8));
    __m512i two = _mm512_cvtepu16_epi32(_mm256_loadu_si256(bytes));
    /* two & mask ^ onto */
    __m512i a = _mm512_ternarylogic_epi32(two, _mm512_set1_epi32(0xff), even, 0x6a);
    __m512i b = _mm512_ternarylogic_epi32(two, _mm512_set1_epi32(0xff00), odd, 0x6a);

    return (pair){ _mm512_sub_ps(_mm512_castsi512_ps(a), _mm512_set1_ps(UNITS_ONTO + zero)),
                   _mm512_sub_ps(_mm512_castsi512_ps(b), _mm512_set1_ps(UNITS_ONTO / 256 + zero)) };
}

INLINE pair moments_of(__m512 scale, const int8_t *c)
{
    pair x = codes_from(c, 128, 128 * MT__CODE_UNIT);

    return (pair){ _mm512_mul_ps(with_sign(scale, x.a), square(x.a)),
                   _mm512_mul_ps(with_sign(scale, x.b), square(x.b)) };
}

INLINE pair roots_of(__m512 scale, const uint8_t *k)
{
    pair x = codes_from(k, 0, 0);

    return (pair){ _mm512_mul_ps(scale, square(x.a)), _mm512_mul_ps(scale, square(x.b)) };
}

/* The step of 16 elements: from their moments, old, to new ones. */
INLINE __m512 updated(const coef16 *c, __m512 p, __m512 g, __m512 *moment, __m512 *root)
{
    __m512 m = *moment, v = _mm512_mul_ps(*root, *root), r;

    g = _mm512_mul_ps(g, c->g_scale);
    m = _mm512_fmadd_ps(c->one_minus_b1, _mm512_sub_ps(g, m), m);
    v = _mm512_fmadd_ps(c->one_minus_b2, _mm512_fmsub_ps(g, g, v), v);
    r = _mm512_sqrt_ps(v);
    __m512 u = _mm512_div_ps(m, _mm512_fmadd_ps(r, c->rsqrt_bc2, c->eps));

    *moment = m;
    *root = r;
    return _mm512_sub_ps(p, _mm512_fmadd_ps(c->lr_wd, p, _mm512_mul_ps(c->lr_bc1, u)));
}

/* 32 elements; their new moments go into m and r. */
INLINE void elements(const mt__adam_span *s, const coef16 *c, int keep, mt_dtype gt, int64_t i,
                     __m512 cs, __m512 ks, pair *m, pair *r, __m512i random)
{
    pair p = load_kept(s, keep, i), g = load_grads(s, gt, i);

    *m = moments_of(cs, s->codes.m + i);
    *r = roots_of(ks, s->codes.v + i);
    p.a = updated(c, p.a, g.a, &m->a, &r->a);
    p.b = updated(c, p.b, g.b, &m->b, &r->b);
    store_kept(s, keep, gt, i, p, random);
}

enum { LARGER = 0xb };                           /* of two magnitudes; of a NaN and another, that */

INLINE __m512i root(__m512 q) { return _mm512_srli_epi32(_mm512_castps_si512(q), 1); }

/* How far 16 elements' codes are below MT__CODE_TOP; negative where they are above,
 * or not finite. */
INLINE void codes_of(__m512 m, __m512 r, const mt__code_size *size, __m512 onto, __m512i *out_m,
                     __m512i *out_v)
{
    const __m512 units = _mm512_set1_ps(MT__CODE_UNITS);
    __m512  x = _mm512_castsi512_ps(root(_mm512_mul_ps(_mm512_abs_ps(m),
                                                       _mm512_set1_ps(size->by_m))));
    __m512i y = root(_mm512_mul_ps(r, _mm512_set1_ps(size->by_r)));
    __m512  least = _mm512_fmadd_ps(x, _mm512_set1_ps(size->least), _mm512_set1_ps(size->floor));

    y = _mm512_max_epu32(y, _mm512_castps_si512(least));
    *out_m = _mm512_cvttps_epi32(_mm512_fnmadd_ps(x, with_sign(units, m), onto));
    *out_v = _mm512_cvttps_epi32(_mm512_fnmadd_ps(_mm512_castsi512_ps(y), units, onto));
}

/* The larger of two quarters each: a's halves, then b's; and a's two neighbours, then b's. */
INLINE __m512 halved(__m512 a, __m512 b)
{
    return _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
}

INLINE __m512 paired(__m512 a, __m512 b)
{
    return _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

/* The largest m and r of each group, in a row. Quarters of a, then b: m and r of one group,
 * m and r of the next. */
INLINE __m256 largest(const group *x)
{
    const __m512i each = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 0, 0, 0, 0, 0, 0, 0, 0);
    __m512 a = paired(halved(x[0].most_m, x[0].most_r), halved(x[1].most_m, x[1].most_r));
    __m512 b = paired(halved(x[2].most_m, x[2].most_r), halved(x[3].most_m, x[3].most_r));

    a = _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    a = _mm512_max_ps(a, _mm512_permute_ps(a, 0x4e));
    return _mm512_castps512_ps256(_mm512_permutexvar_ps(each, a));
}

/* 64 elements' words as bytes in a row. */
INLINE void store_bytes(void *to, __m512i bytes)
{
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi64(order, bytes));
}

INLINE bits32 onto_of(__m512i random)
{
    return above(_mm512_set1_epi16(MT__RANDOM_ONTO >> 16), random);
}

INLINE void encode(const group *x, const mt__code_size *size, int8_t *m, uint8_t *v)
{
    const __m512i top = _mm512_set1_epi16(MT__CODE_TOP), all = _mm512_set1_epi32(-1);
    __m512i words_m[2], words_v[2];

#pragma GCC unroll 4
    for (int j = 0; j < PAIRS; j++) {
        pair   onto = float_of(onto_of(x->random[j]));
        bits32 c, d;

        codes_of(x->m[j].a, x->r[j].a, size, onto.a, &c.a, &d.a);
        codes_of(x->m[j].b, x->r[j].b, size, onto.b, &c.b, &d.b);
        /* A word has all of what comes of finite moments: x is at most 127 sqrt(2), y 255 sqrt(2)
         * or 2 x + 3. Others root to 2^63 and more, and become 0x80000000: its lower word is the 0
         * that they stand for. */
        words_m[j % 2] = _mm512_sub_epi16(top, low_words(c.a, c.b));
        words_v[j % 2] = low_words(d.a, d.b);
        if (j % 2 == 0)
            continue;
        store_bytes(m + (j - 1) * WIDTH, _mm512_packs_epi16(words_m[0], words_m[1]));
        store_bytes(v + (j - 1) * WIDTH,
                    _mm512_xor_si512(_mm512_packus_epi16(words_v[0], words_v[1]), all));
    }
}

INLINE void step_group(const mt__adam_span *s, const mt__adam_coef *c, const coef16 *k, int keep,
                       mt_dtype gt, int64_t i, group *x)
{
    const float *scale = s->codes.scale + i / MT_STATES_GROUP * 2;
    __m512 cs = _mm512_set1_ps(scale[0]), ks = _mm512_set1_ps(scale[1]);
    __m512 most_m = _mm512_setzero_ps(), most_r = most_m;
    hash16 hash = hash_of(c->seed, s->first + i);

#pragma GCC unroll 4
    for (int j = 0; j < PAIRS; j++) {
        pair m, r;

        x->random[j] = hashed(hash, j * WIDTH);
        elements(s, k, keep, gt, i + j * WIDTH, cs, ks, &m, &r, x->random[j]);
        most_m = _mm512_range_ps(_mm512_range_ps(most_m, m.a, LARGER), m.b, LARGER);
        most_r = _mm512_max_ps(r.b, _mm512_max_ps(r.a, most_r));
        x->m[j] = m;
        x->r[j] = r;
    }
    x->most_m = most_m;
    x->most_r = most_r;
}

/* n groups, at most MT__GROUPS. Sizes of groups that are not there are those of zeros. */
INLINE void step_groups(const mt__adam_span *s, const mt__adam_coef *c, const coef16 *k, int keep,
                        mt_dtype g, int64_t i, int n, group *x)
{
    mt__code_size size[MT__GROUPS];

    for (int j = 0; j < n; j++) {
        int64_t at = i + j * MT_STATES_GROUP;

        mt__adam8_prefetch(s, keep, g, at + MT__ADAM8_AHEAD);
        step_group(s, c, k, keep, g, at, &x[j]);
    }
    for (int j = n; j < MT__GROUPS; j++)
        x[j].most_m = x[j].most_r = _mm512_setzero_ps();
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
    const coef16        k = coef_set(c);
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
const mt__adam_fn mt__adam8_avx512[MT__ADAM8_KINDS] = { MT__ADAM8_KIND_MAP(ENTRY) };

#else
typedef int mt__no_adam8_avx512;        /* a file must declare something */
#endif
