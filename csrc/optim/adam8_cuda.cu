// adam8_cuda.cu — the update of adam8_scalar.c on CUDA, to its bits.
//
// Every operation rounds to nearest and is never fused, as in adam_cuda.cu. A warp has a group: 32
// lanes with 4 neighbours each are its 128 elements.
#include "adam8_cuda.h"
#include "adam8_code.h"
#include "adam_weight.cuh"

namespace {

constexpr int WARPS = 8;
constexpr int GROUP = 32 * EACH;
constexpr int CHUNK = WARPS * GROUP;

using Tensor = mt__adam8_cuda_tensor;
using Coef = mt__adam_coef;

/* ---- how a weight is kept ---- */

// bits of a weight that can be held, plus what rounds it stochastically when it is cut.
__device__ inline unsigned spread(float p, unsigned add)
{
    unsigned bits = __float_as_uint(p), sign = bits & 0x80000000u, size = bits ^ sign;

    size = size > 0x7f800000u ? 0x7fc00000u : size - 0x7f7f8000u < 0x8000u ? 0x7f7f7fffu : size;
    sign = size > 0x7f800000u ? 0u : sign;
    return sign | (size < MT__SR_MOST ? size + add : size);
}

// Those of the fp32 kernel; the hash is not looked at.
template <typename T> struct Kept : Weight<T> {
    using Hi = T;
    using Low = typename Weight<T>::Low;
    static constexpr bool rounds = false;
    static __device__ void split(float p, unsigned, T *hi, Low *low)
    {
        Weight<T>::split(p, hi, low);
    }
};

struct Lo8 {
    using Hi = bf16;
    using Low = signed char;
    static constexpr bool has_low = true, rounds = true;
    static __device__ float join(bf16 hi, signed char lo)
    {
        return __uint_as_float(((unsigned)hi.bits << 16) + ((unsigned)(int)lo << 8));
    }
    static __device__ void split(float p, unsigned hash, bf16 *hi, signed char *lo)
    {
        unsigned bits = spread(p, hash >> 8);

        hi->bits = (unsigned short)(((bits & 0xffffff00u) + 0x8000u) >> 16);
        *lo = (signed char)(unsigned char)(bits >> 8);
    }
};

struct Sr {
    using Hi = bf16;
    using Low = signed char;                  // there is none: neither read nor written
    static constexpr bool has_low = false, rounds = true;
    static __device__ float join(bf16 hi, signed char) { return wide(hi); }
    static __device__ void  split(float p, unsigned hash, bf16 *hi, signed char *)
    {
        hi->bits = (unsigned short)(spread(p, hash) >> 16);
    }
};

/* ---- a group ---- */

// The 16 bits of element e of the lane's, whose first has the number `at`, an even one.
__device__ inline unsigned hashed(const unsigned *seed, int64_t at, int e)
{
    const unsigned x = MT__HASH_FIRST(seed, at + e / 2 * 2),
                   h = (x ^ x >> 15 ^ seed[1]) * MT__HASH_MIX;

    return e % 2 == 0 ? h & MT__RANDOM : h >> 16;
}

// The largest of a warp; none is negative, so their bits are in their order.
__device__ inline float largest(float x)
{
    return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(x)));
}

// As mt__square, of a code with a sign, and mt__root.
__device__ inline float square(float code)
{
    return copysignf(__uint_as_float(__float_as_uint(__fmul_rn(fabsf(code), MT__CODE_UNIT)) << 1),
                     code);
}

__device__ inline unsigned root(float q) { return __float_as_uint(q) >> 1; }

// A code: MT__CODE_TOP where sum is negative or not a number of codes.
__device__ inline int code_of(float sum)
{
    return MT__CODE_TOP - (sum > 0.0f && sum < 0x1p31f ? __float2int_rz(sum) : 0);
}

// The formula of adam.h on one element: m, and r, the root of v.
__device__ inline void step(float *p, float *m, float *r, float g, const Coef &c)
{
    float v = __fmul_rn(*r, *r);

    g = __fmul_rn(g, c.g_scale);
    *m = __fmaf_rn(c.one_minus_b1, __fsub_rn(g, *m), *m);
    *r = __fsqrt_rn(__fmaf_rn(c.one_minus_b2, __fmaf_rn(g, g, -v), v));
    float u = __fdiv_rn(*m, __fmaf_rn(*r, c.rsqrt_bc2, c.eps));

    *p = __fsub_rn(*p, __fmaf_rn(c.lr_wd, *p, __fmul_rn(c.lr_bc1, u)));
}

// The planes of one tensor, typed. A few registers, made anew by each chunk.
template <typename K, typename G> struct Planes {
    using Hi = typename K::Hi;
    using Low = typename K::Low;

    __device__ explicit Planes(const Tensor &t)
        : hi(static_cast<Hi *>(t.hi)), low(static_cast<Low *>(t.low)),
          m(static_cast<signed char *>(t.m)), v(static_cast<unsigned char *>(t.v)), scale(t.scale),
          grad(static_cast<const G *>(t.grad)) {}

    Hi            *hi;
    Low           *low;
    signed char   *m;
    unsigned char *v;
    float         *scale;
    const G       *grad;
};

// n of EACH neighbours; in one piece where there are all and addresses suit.
template <typename T> __device__ inline void take(four<T> *to, const T *from, int n, bool whole)
{
    if (whole)
        *to = *reinterpret_cast<const four<T> *>(from);
    else
#pragma unroll                                // so that what is loaded stays in registers
        for (int e = 0; e < EACH; e++)
            if (e < n)
                to->x[e] = from[e];
}

template <typename T> __device__ inline void put(T *to, const four<T> &from, int n, bool whole)
{
    if (whole)
        *reinterpret_cast<four<T> *>(to) = from;
    else
#pragma unroll
        for (int e = 0; e < EACH; e++)
            if (e < n)
                to[e] = from.x[e];
}

// A lane's part of a group. What is beyond the end of the tensor is zero, and stays so.
template <typename K, typename G> struct Lane {
    using Hi = typename K::Hi;
    using Low = typename K::Low;

    __device__ void load(const Planes<K, G> &s, int64_t i, int64_t n, bool suits)
    {
        count = (int)(n - i < EACH ? n - i < 0 ? 0 : n - i : EACH);
        whole = suits && count == EACH;
        take(&hi, s.hi + i, count, whole);
        if constexpr (K::has_low)
            take(&low, s.low + i, count, whole);
        take(&mc, s.m + i, count, whole);
        take(&vc, s.v + i, count, whole);
        take(&grad, s.grad + i, count, whole);
        scale = reinterpret_cast<const float2 *>(s.scale)[i / GROUP];
    }

    // at: the number of the lane's first element in the parameter.
    __device__ void update(const Coef &c, int64_t at)
    {
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            float    p = K::join(hi.x[e], low.x[e]);
            unsigned hash = 0;

            m[e] = __fmul_rn(scale.x, square((float)mc.x[e]));
            r[e] = __fmul_rn(scale.y, square((float)vc.x[e]));
            step(&p, &m[e], &r[e], wide(grad.x[e]), c);
            if constexpr (K::rounds)
                hash = hashed(c.seed, at, e);
            K::split(p, hash, &hi.x[e], &low.x[e]);
        }
    }

    // All lanes of the warp together. fmaxf of a NaN is the other.
    __device__ void encode(const Coef &c, int64_t at)
    {
        float most_m = largest(fmaxf(fmaxf(fabsf(m[0]), fabsf(m[1])),
                                     fmaxf(fabsf(m[2]), fmaxf(fabsf(m[3]), 0.0f))));
        float most_r = largest(fmaxf(fmaxf(r[0], r[1]), fmaxf(r[2], fmaxf(r[3], 0.0f))));

        most_m = most_m < MT__M_FINITE ? most_m < MT__M_LEAST ? 0.0f : most_m : MT__M_FINITE;
        most_r = most_r < MT__R_LARGEST ? most_r < MT__R_LEAST ? 0.0f : most_r : MT__R_LARGEST;
        const float says = most_m < MT__M_LARGEST ? most_m : MT__M_LARGEST;
        const float by_m = most_m > 0 ? __fdiv_rn(MT__C_BELOW, most_m) : 0.0f;
        const float by_r = most_r > 0 ? __fdiv_rn(MT__K_SQUARE, most_r) : 0.0f;
        const float ratio = __fmul_rn(__fmul_rn(c.code_bound, says),
                                      __fmul_rn(by_r, MT__K_INVERSE));
        const float f = fminf(__fsqrt_rn(ratio), MT__LEAST_MOST);
        const float floor = most_r > 0 ? __fmul_rn(__fadd_rn(f, 1.0f), MT__CODE_UNIT) : 0.0f;

        scale = make_float2(__fmul_rn(says, MT__C_INVERSE), __fmul_rn(most_r, MT__K_INVERSE));
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const float    onto = __uint_as_float(MT__RANDOM_ONTO | hashed(c.seed, at, e));
            const float    x = __uint_as_float(root(__fmul_rn(fabsf(m[e]), by_m)));
            const float    least = __fmaf_rn(x, f, floor);
            const unsigned y = max(root(__fmul_rn(r[e], by_r)), __float_as_uint(least));
            const int      signed_code = code_of(__fmaf_rn(-x, copysignf(MT__CODE_UNITS, m[e]),
                                                           onto));

            mc.x[e] = (signed char)max(-128, min(signed_code, 127));
            vc.x[e] = (unsigned char)code_of(__fmaf_rn(-__uint_as_float(y), MT__CODE_UNITS, onto));
        }
    }

    __device__ void store(const Planes<K, G> &s, int64_t i) const
    {
        put(s.hi + i, hi, count, whole);
        if constexpr (K::has_low)
            put(s.low + i, low, count, whole);
        put(s.m + i, mc, count, whole);
        put(s.v + i, vc, count, whole);
        if (i % GROUP == 0)
            reinterpret_cast<float2 *>(s.scale)[i / GROUP] = scale;
    }

    four<Hi>            hi = {};
    four<Low>           low = {};
    four<signed char>   mc = {};
    four<unsigned char> vc = {};
    four<G>             grad = {};
    float2              scale;                // of m, of v
    float               m[EACH], r[EACH];     // new
    int                 count;
    bool                whole;
};

// Elements [from, from + CHUNK) of a tensor, those that there are.
template <typename K, typename G>
__device__ inline void chunk(const Tensor &t, int64_t from)
{
    const Planes<K, G> s(t);
    const int64_t      group = from + (int64_t)(threadIdx.x / 32) * GROUP;    // the warp's
    const int64_t      i = group + (int64_t)(threadIdx.x % 32) * EACH;
    Lane<K, G>         lane;

    if (group >= t.n)                                     // the whole warp
        return;
    lane.load(s, i, t.n, aligned(t));
    lane.update(t.coef, t.first + i);
    lane.encode(t.coef, t.first + i);
    lane.store(s, i);
}

// One step of AdamW, the formula of adam8_code.h, on every element of up to 30 tensors [n] of any
// kinds. A block takes a chunk of 1024 elements of one tensor, a warp a group of it; many warps
// hide what each waits for. Bytes an element with a 16-bit gradient: BF16 r8.06 w6.06, LO8 1 less
// each way, SR 2; F32 r10.06 w6.06. Expected: 14.1 bytes at 4.0 to 4.3 TB/s of an H200's HBM are
// 280 to 300 G bf16 parameters/s; a square root and a division of 8 to 20 instructions each may
// hold it below.
__global__ void __launch_bounds__(WARPS * 32, 4)
update8(const __grid_constant__ Table<Tensor, MT__ADAM8_CUDA_MOST> table)
{
    for (int64_t c = blockIdx.x; c < table.first[table.n]; c += gridDim.x) {
        const int     i = tensor_of(table, c);
        const Tensor &t = table.t[i];
        const int64_t from = (c - table.first[i]) * CHUNK;

        switch (t.kind) {
        case MT__ADAM8_F32_F32:   chunk<Kept<float>, float>(t, from); break;
        case MT__ADAM8_BF16_BF16: chunk<Kept<bf16>, bf16>(t, from);   break;
        case MT__ADAM8_BF16_F32:  chunk<Kept<bf16>, float>(t, from);  break;
        case MT__ADAM8_LO8_BF16:  chunk<Lo8, bf16>(t, from);          break;
        case MT__ADAM8_LO8_F32:   chunk<Lo8, float>(t, from);         break;
        case MT__ADAM8_SR_BF16:   chunk<Sr, bf16>(t, from);           break;
        case MT__ADAM8_SR_F32:    chunk<Sr, float>(t, from);          break;
        case MT__ADAM8_F16_F16:   chunk<Kept<f16>, f16>(t, from);     break;
        case MT__ADAM8_F16_F32:   chunk<Kept<f16>, float>(t, from);   break;
        }
    }
}

} // namespace

extern "C" const char *mt__adam8_cuda(uintptr_t handle, const mt__adam8_cuda_tensor *t,
                                      int n_tensors)
{
    return launch<MT__ADAM8_CUDA_MOST>(update8, handle, t, n_tensors, WARPS * 32, CHUNK);
}
