/* adam_kernel.h — private to csrc/optim: what adam.c hands to a kernel,
 * and which kernels there are.
 *
 *   coef    a tensor's hyper-parameters, ready for use in every element
 *   span    a stretch of one tensor: where each plane's first element is
 *   kind    weight type and gradient type: one function each, in each instruction set
 *   run     checks tensors, cuts them into spans and shares these out over the pool
 */
#ifndef MT_ADAM_KERNEL_H
#define MT_ADAM_KERNEL_H

#include "adam.h"
#include "adam_coef.h"
#include <string.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#define MT__ADAM_CHUNK    (256 * 1024)   /* elements; multiple of every kernel's stride */
#define MT__ADAM_AHEAD    512            /* elements prefetched ahead */

typedef struct mt__adam_span {
    void       *hi;
    int16_t    *lo;
    float      *master;
    float      *m, *v;
    const void *grad;
    int64_t     n;
    mt_adam_codes codes;
    int64_t     first;                   /* number of its first element in the parameter */
} mt__adam_span;

typedef void (*mt__adam_fn)(const mt__adam_span *s, const mt__adam_coef *c);

/* The kernels of an instruction set, by the moments' type; or the benchmark's. */
typedef struct mt__adam_kernels {
    const mt__adam_fn *fp32;             /* [MT__ADAM_KINDS] */
    const mt__adam_fn *codes;            /* [MT__ADAM8_KINDS] */
} mt__adam_kernels;

extern const mt__adam_fn mt__adam_scalar[MT__ADAM_KINDS], mt__adam8_scalar[MT__ADAM8_KINDS];
#if defined(__x86_64__)
extern const mt__adam_fn mt__adam_avx2  [MT__ADAM_KINDS], mt__adam8_avx2  [MT__ADAM8_KINDS];
extern const mt__adam_fn mt__adam_avx512[MT__ADAM_KINDS], mt__adam8_avx512[MT__ADAM8_KINDS];
#endif

mt_status mt__adam_run(mt_pool *pool, const mt_adam_tensor *t, int n_tensors, float clip,
                       const mt__adam_kernels *kernels);

/* MT_ENOTSUP when this processor does not run isa, MT_EINVAL when there is no such isa. */
mt_status mt__isa_check(mt_isa isa);

/* The span that begins i elements further on and is n long; i is a multiple of 128 where moments
 * have 8 bits. w, g: types of weight and gradient. */
static inline mt__adam_span mt__adam_part(const mt__adam_span *s, mt_dtype w, mt_dtype g,
                                          int64_t i, int64_t n)
{
    size_t w_bytes = w == MT_F32 ? 4 : 2, g_bytes = g == MT_F32 ? 4 : 2;
    const mt_adam_codes *c = &s->codes;

    return (mt__adam_span){
        .hi     = (char *)s->hi + (size_t)i * w_bytes,
        .lo     = s->lo     ? s->lo + i     : NULL,
        .master = s->master ? s->master + i : NULL,
        .m      = s->m ? s->m + i : NULL,
        .v      = s->v ? s->v + i : NULL,
        .grad   = (const char *)s->grad + (size_t)i * g_bytes,
        .n      = n,
        .first  = s->first + i,
        .codes  = {
            .m     = c->m ? c->m + i : NULL,
            .v     = c->v ? c->v + i : NULL,
            .scale = c->scale ? c->scale + i / MT_STATES_GROUP * 2 : NULL,
            .lo    = c->lo ? c->lo + i : NULL,
        },
    };
}

static inline uint32_t mt__bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

static inline float mt__float(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

/* What a split weight can hold: NaN in one form, and no finite value that rounds to infinity. */
static inline uint32_t mt__split_holds(uint32_t bits)
{
    uint32_t sign = bits & 0x80000000u, size = bits ^ sign;
    uint32_t kept = size - 0x7f7f8000u < 0x8000u ? 0x7f7f7fffu : size;

    return size > 0x7f800000u ? 0x7fc00000u : sign | kept;
}

static inline float mt__split_value(uint16_t hi, int16_t lo)
{
    return mt__float(((uint32_t)hi << 16) + (uint32_t)(int32_t)lo);
}

static inline void mt__split_store(float p, uint16_t *hi, int16_t *lo)
{
    uint32_t bits = mt__split_holds(mt__bits(p));

    /* Adding half a unit of hi rounds the magnitude to nearest, ties away; what was carried into
     * hi is then missing from the low half, which is what reading it as signed says. */
    *hi = (uint16_t)((bits + 0x8000u) >> 16);
    *lo = (int16_t)(uint16_t)bits;
}

#if defined(__x86_64__)
/* always_inline: gcc takes a function of prefetches alone for one without effect,
 * and drops the call. */
#define MT__INLINE static inline __attribute__((always_inline))

/* Asks for 32 elements of a plane: one cache line of 16-bit values, two of fp32. */
MT__INLINE void mt__prefetch(const void *plane, mt_dtype dt, int64_t i)
{
    uintptr_t at = (uintptr_t)plane + (uintptr_t)i * (dt == MT_F32 ? 4 : 2);

    _mm_prefetch((const char *)at, _MM_HINT_T0);
    if (dt == MT_F32)
        _mm_prefetch((const char *)(at + 64), _MM_HINT_T0);
}

MT__INLINE void mt__adam_prefetch(const mt__adam_span *s, mt_dtype w, mt_dtype g, int64_t i)
{
    mt__prefetch(s->hi, w, i);
    mt__prefetch(s->m, MT_F32, i);
    mt__prefetch(s->v, MT_F32, i);
    mt__prefetch(s->grad, g, i);
    if (w == MT_BF16)
        mt__prefetch(s->lo, w, i);
    if (w == MT_F16)
        mt__prefetch(s->master, MT_F32, i);
}
#endif

#endif
