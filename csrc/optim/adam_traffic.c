/* adam_traffic.c — the limit beside the update's rate: the same reads and writes, next to no
 * arithmetic. Written as plain loops for the compiler to vectorise, so that it shares no weakness
 * of the kernels; chunks, pool and prefetch distance are theirs.
 */
#include "adam8_kernel.h"

#define INLINE static inline __attribute__((always_inline))

/* 32 elements, each plane read and, but for the gradient, written. */
INLINE void touch_f32(float *plane, const void *grad, mt_dtype g, int64_t i)
{
    for (int64_t j = i; j < i + 32; j++)
        plane[j] += g == MT_F32 ? ((const float *)grad)[j] : (float)((const int16_t *)grad)[j];
}

INLINE void touch_16(uint16_t *plane, const void *grad, mt_dtype g, int64_t i)
{
    for (int64_t j = i; j < i + 32; j++)
        plane[j] = (uint16_t)(plane[j] + (g == MT_F32 ? (uint16_t)((const uint32_t *)grad)[j]
                                                      : ((const uint16_t *)grad)[j]));
}

INLINE void traffic(const mt__adam_span *where, mt_dtype w, mt_dtype g)
{
    const mt__adam_span s = *where;

    for (int64_t i = 0; i + 32 <= s.n; i += 32) {
#if defined(__x86_64__)
        mt__adam_prefetch(&s, w, g, i + MT__ADAM_AHEAD);
#endif
        touch_f32(s.m, s.grad, g, i);
        touch_f32(s.v, s.grad, g, i);
        if (w == MT_F32)
            touch_f32(s.hi, s.grad, g, i);
        else
            touch_16(s.hi, s.grad, g, i);
        if (w == MT_BF16)
            touch_16((uint16_t *)s.lo, s.grad, g, i);
        if (w == MT_F16)
            touch_f32(s.master, s.grad, g, i);
    }
}

/* A byte a parameter, of as many gradients. */
INLINE void touch_8(uint8_t *plane, const void *grad, mt_dtype g, int64_t i)
{
    for (int64_t j = i; j < i + 32; j++)
        plane[j] = (uint8_t)(plane[j] + (g == MT_F32 ? (uint8_t)((const uint32_t *)grad)[j]
                                                     : (uint8_t)((const uint16_t *)grad)[j]));
}

INLINE void touch_kept(const mt__adam_span *s, int keep, mt_dtype g, int64_t i)
{
    if (keep == MT__KEEP_F32)
        touch_f32(s->hi, s->grad, g, i);
    else
        touch_16(s->hi, s->grad, g, i);
    if (keep == MT__KEEP_BF16)
        touch_16((uint16_t *)s->lo, s->grad, g, i);
    if (keep == MT__KEEP_LO8)
        touch_8((uint8_t *)s->codes.lo, s->grad, g, i);
    if (keep == MT__KEEP_F16)
        touch_f32(s->master, s->grad, g, i);
}

INLINE void traffic8(const mt__adam_span *where, int keep, mt_dtype g)
{
    const mt__adam_span s = *where;

    for (int64_t i = 0; i + MT_STATES_GROUP <= s.n; i += MT_STATES_GROUP) {
        float *scale = s.codes.scale + i / MT_STATES_GROUP * 2;

#if defined(__x86_64__)
        mt__adam8_prefetch(&s, keep, g, i + MT__ADAM8_AHEAD);
#endif
        scale[0] += 1;
        scale[1] += 1;
        for (int64_t j = i; j < i + MT_STATES_GROUP; j += 32) {
            touch_8((uint8_t *)s.codes.m, s.grad, g, j);
            touch_8(s.codes.v, s.grad, g, j);
            touch_kept(&s, keep, g, j);
        }
    }
}

#define TRAFFIC(isa, target, w, g)                                                      \
    target static void isa##_##w##_##g(const mt__adam_span *s, const mt__adam_coef *c)  \
    {                                                                                   \
        (void)c;                                                                        \
        traffic(s, MT_##w, MT_##g);                                                     \
    }
#define TRAFFIC8(isa, target, w, g)                                                      \
    target static void isa##8_##w##_##g(const mt__adam_span *s, const mt__adam_coef *c)  \
    {                                                                                    \
        (void)c;                                                                         \
        traffic8(s, MT__KEEP_##w, MT_##g);                                               \
    }
#define WITH_AVX2   __attribute__((target("avx2")))
#define WITH_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define TRAFFIC_SCALAR(w, g)  TRAFFIC(scalar, , w, g)
#define TRAFFIC_AVX2(w, g)    TRAFFIC(avx2, WITH_AVX2, w, g)
#define TRAFFIC_AVX512(w, g)  TRAFFIC(avx512, WITH_AVX512, w, g)
#define TRAFFIC8_SCALAR(w, g) TRAFFIC8(scalar, , w, g)
#define TRAFFIC8_AVX2(w, g)   TRAFFIC8(avx2, WITH_AVX2, w, g)
#define TRAFFIC8_AVX512(w, g) TRAFFIC8(avx512, WITH_AVX512, w, g)
#define ENTRY_SCALAR(w, g)  scalar_##w##_##g,
#define ENTRY_AVX2(w, g)    avx2_##w##_##g,
#define ENTRY_AVX512(w, g)  avx512_##w##_##g,
#define ENTRY8_SCALAR(w, g) scalar8_##w##_##g,
#define ENTRY8_AVX2(w, g)   avx28_##w##_##g,
#define ENTRY8_AVX512(w, g) avx5128_##w##_##g,

MT__ADAM_KIND_MAP(TRAFFIC_SCALAR)
MT__ADAM8_KIND_MAP(TRAFFIC8_SCALAR)
#if defined(__x86_64__)
MT__ADAM_KIND_MAP(TRAFFIC_AVX2)
MT__ADAM_KIND_MAP(TRAFFIC_AVX512)
MT__ADAM8_KIND_MAP(TRAFFIC8_AVX2)
MT__ADAM8_KIND_MAP(TRAFFIC8_AVX512)
#endif

static const mt__adam_fn kernels[MT_ISA_COUNT][MT__ADAM_KINDS] = {
    [MT_ISA_SCALAR] = { MT__ADAM_KIND_MAP(ENTRY_SCALAR) },
#if defined(__x86_64__)
    [MT_ISA_AVX2]   = { MT__ADAM_KIND_MAP(ENTRY_AVX2) },
    [MT_ISA_AVX512] = { MT__ADAM_KIND_MAP(ENTRY_AVX512) },
#endif
};

static const mt__adam_fn kernels8[MT_ISA_COUNT][MT__ADAM8_KINDS] = {
    [MT_ISA_SCALAR] = { MT__ADAM8_KIND_MAP(ENTRY8_SCALAR) },
#if defined(__x86_64__)
    [MT_ISA_AVX2]   = { MT__ADAM8_KIND_MAP(ENTRY8_AVX2) },
    [MT_ISA_AVX512] = { MT__ADAM8_KIND_MAP(ENTRY8_AVX512) },
#endif
};

mt_status mt_adam_traffic(mt_pool *pool, const mt_adam_tensor *t, int n_tensors, mt_isa isa)
{
    mt_status        st = mt__isa_check(isa);
    mt__adam_kernels all;

    if (st != MT_OK)
        return st;
    all = (mt__adam_kernels){ kernels[isa], kernels8[isa] };
    return mt__adam_run(pool, t, n_tensors, 1.0f, &all);
}
