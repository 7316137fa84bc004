// rope_cuda.cu — rotary position embedding of q and k, v copied along, in one launch.
//
// A thread takes an item, 2 * W neighbouring or opposite numbers of a head (W: 16 bytes of them; 1
// where sizes, strides or addresses are odd), loads its angles once and goes through every L-th
// head of its token with it. Items whose numbers are not turned (behind R, and all of v) are
// copied; in place there is nothing to do.
#include "rope_cuda.h"
#include "kernel.cuh"

namespace {

using namespace mt;

constexpr int AT_ONCE = 4;           // heads whose loads are under way together
constexpr int THREADS = 256;         // of a block, at most

struct Args {
    mt_rope_part part[MT_ROPE_PARTS];
    const void  *cos, *sin;
    int64_t      cos_at[2], sin_at[2];
    unsigned     seq, tokens;
    int          dim, rot, items, heads;        // heads: of all parts
    bool         copied[MT_ROPE_PARTS];         // out is not x: what is not turned has to be copied
};

// W numbers of T as fp32.
template <typename T, int W> __device__ inline void read(float (&to)[W], const void *p, int64_t at)
{
    const T *from = static_cast<const T *>(p) + at;

    if constexpr (W == 1) {
        to[0] = widen(*from);
    } else {
        constexpr int N = vec<T>::N;
#pragma unroll
        for (int v = 0; v < W / N; v++) {
            const vec<T> x = load_vec(from + v * N);
            for (int i = 0; i < N; i++)
                to[v * N + i] = element(x, i);
        }
    }
}

// What a thread holds of a head, twice: 16 bytes, or one number.
template <typename T, int W> struct Group {
    vec<T> v;
    __device__ float at(int i) const          { return element(v, i); }
    __device__ void  set(const float (&x)[W]) { v = rounded<T>(x); }
};
template <typename T> struct Group<T, 1> {
    T v;
    __device__ float at(int) const            { return widen(v); }
    __device__ void  set(const float (&x)[1]) { v = narrow<T>(x[0]); }
};

// cos and sin at the two groups of an item.
template <int W> struct Angles { float ca[W], cb[W], sa[W], sb[W]; };

// The formulas of rope.h; products and sums are rounded one by one (--fmad=false).
template <bool Inverse>
__device__ inline void turn(float &a, float &b, float cp, float cq, float sp, float sq)
{
    const float x = a, y = b;

    a = Inverse ? x * cp + y * sq : x * cp - y * sp;
    b = Inverse ? y * cq - x * sp : y * cq + x * sq;
}

template <bool Inverse, bool Interleaved, typename T, int W>
__device__ inline void turn_groups(Group<T, W> &p, Group<T, W> &q, const Angles<W> &g)
{
    float a[W], b[W];

#pragma unroll
    for (int i = 0; i < W; i++) {
        a[i] = p.at(i);
        b[i] = q.at(i);
    }
    if constexpr (Interleaved && W > 1) {
#pragma unroll
        for (int i = 0; i < W; i += 2) {
            turn<Inverse>(a[i], a[i + 1], g.ca[i], g.ca[i + 1], g.sa[i], g.sa[i + 1]);
            turn<Inverse>(b[i], b[i + 1], g.cb[i], g.cb[i + 1], g.sb[i], g.sb[i + 1]);
        }
    } else {                         // opposite numbers; or one pair, whichever way it lies
#pragma unroll
        for (int i = 0; i < W; i++)
            turn<Inverse>(a[i], b[i], g.ca[i], g.cb[i], g.sa[i], g.sb[i]);
    }
    p.set(a);
    q.set(b);
}

__device__ inline int64_t offset(const int64_t (&at)[3], unsigned batch, unsigned token, int head)
{
    return batch * at[0] + token * at[1] + head * at[2];
}

// One item: two groups of a head, side by side, or half of R apart. An odd head ends with one
// group.
struct Item {
    int  first, second;
    bool both, turns;
};

// Up to AT_ONCE heads of a token, from `base` on and `apart` from one another: all loads, then all
// stores.
template <typename T, int W, bool Inverse, bool Interleaved>
__device__ inline void some_heads(const Args &a, const Item &it, const Angles<W> &g, unsigned batch,
                                  unsigned token, int base, int apart)
{
    using P = Group<T, W>;
    P  p[AT_ONCE], q[AT_ONCE];
    T *to[AT_ONCE];                  // nullptr: nothing to do
    const int turned_heads = it.turns ? (int)(a.part[MT_ROPE_Q].heads + a.part[MT_ROPE_K].heads)
                                      : 0;

#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
        const bool turned = base + n * apart < turned_heads;
        int        head = base + n * apart, k = 0;

        to[n] = nullptr;
        if (head >= a.heads)
            break;
        while (head >= a.part[k].heads)
            head -= (int)a.part[k++].heads;
        if (!turned && !a.copied[k])
            continue;
        const T *from = static_cast<const T *>(a.part[k].x) + offset(a.part[k].x_at, batch, token,
                                                                     head);
        to[n] = static_cast<T *>(a.part[k].out) + offset(a.part[k].out_at, batch, token, head);
        p[n]  = *reinterpret_cast<const P *>(from + it.first);
        q[n]  = *reinterpret_cast<const P *>(from + (it.both ? it.second : it.first));
    }
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
        if (base + n * apart >= a.heads)
            break;
        if (to[n] == nullptr)
            continue;
        if (base + n * apart < turned_heads)
            turn_groups<Inverse, Interleaved>(p[n], q[n], g);
        *reinterpret_cast<P *>(to[n] + it.first) = p[n];
        if (it.both)
            *reinterpret_cast<P *>(to[n] + it.second) = q[n];
    }
}

// q, k, v: [B, S, h, D], any strides but the last; angles [1 or B, S, R]. Block: x items of a head,
// y heads at once, z tokens. Bytes: q, k, v read and written once; angles are 1 / heads of that,
// and found in L1 by all heads of a token but the first. Limit: HBM; of a copy's rate
// (4.23 TB/s on an H200, 7B width, 32768 tokens) 85 % in place, 79 % with v into another buffer.
template <typename T, typename A, int W, bool Inverse, bool Interleaved>
__global__ void __launch_bounds__(THREADS) rope(const __grid_constant__ Args a)
{
    const unsigned row = blockIdx.x * blockDim.z + threadIdx.z;
    const unsigned batch = row / a.seq, token = row - batch * a.seq;

    for (int item = threadIdx.x; row < a.tokens && item < a.items; item += blockDim.x) {
        const bool turns = item < a.rot / (2 * W), opposite = turns && !Interleaved;
        const int  first = opposite ? item * W : item * 2 * W;
        const int  second = first + (opposite ? a.rot / 2 : W);
        const Item it = { first, second, second < a.dim, turns };
        Angles<W>  g = {};

        if (turns) {
            const int64_t cos = batch * a.cos_at[0] + token * a.cos_at[1];
            const int64_t sin = batch * a.sin_at[0] + token * a.sin_at[1];
            read<A>(g.ca, a.cos, cos + first);
            read<A>(g.cb, a.cos, cos + second);
            read<A>(g.sa, a.sin, sin + first);
            read<A>(g.sb, a.sin, sin + second);
        }
        for (int base = threadIdx.y; base < a.heads; base += blockDim.y * AT_ONCE)
            some_heads<T, W, Inverse, Interleaved>(a, it, g, batch, token, base, blockDim.y);
    }
}

/* ---- the host's side ---- */

bool steps_fit(const int64_t *at, int n, int width)
{
    bool fit = true;

    for (int i = 0; i < n; i++)
        fit = fit && at[i] % width == 0;
    return fit;
}

// Whether every group lies at a multiple of 16 bytes; angles of fp32 are read in 16 bytes too, W
// numbers at a time.
bool vectors_fit(const mt_rope *r, int width)
{
    bool fit = r->dim % (2 * width) == 0 && r->rot % (2 * width) == 0
            && aligned16(r->cos) && aligned16(r->sin)
            && steps_fit(r->cos_at, 2, width) && steps_fit(r->sin_at, 2, width);

    for (const mt_rope_part &p : r->part)
        fit = fit && (p.heads == 0 || (aligned16(p.x) && aligned16(p.out)
                                       && steps_fit(p.x_at, 3, width)
                                       && steps_fit(p.out_at, 3, width)));
    return fit;
}

template <typename T, typename A, int W>
void launch(cudaStream_t stream, const mt_rope *r, const Args &a)
{
    const int  x = a.items < THREADS ? a.items : THREADS, share = (a.heads + AT_ONCE - 1) / AT_ONCE;
    const int  y = share < THREADS / x ? share : THREADS / x, z = THREADS / (x * y);
    // 64: CUDA's limit for z
    const dim3 block((unsigned)x, (unsigned)y, (unsigned)(z < 64 ? z : 64));
    const unsigned blocks = (a.tokens + block.z - 1) / block.z;

    if (r->interleaved && r->inverse)
        rope<T, A, W, true, true><<<blocks, block, 0, stream>>>(a);
    else if (r->interleaved)
        rope<T, A, W, false, true><<<blocks, block, 0, stream>>>(a);
    else if (r->inverse)
        rope<T, A, W, true, false><<<blocks, block, 0, stream>>>(a);
    else
        rope<T, A, W, false, false><<<blocks, block, 0, stream>>>(a);
}

Args args_of(const mt_rope *r, int width)
{
    Args a = {};

    for (int n = 0; n < MT_ROPE_PARTS; n++) {
        a.part[n] = r->part[n];
        a.heads += (int)r->part[n].heads;
        a.copied[n] = r->part[n].x != r->part[n].out;
    }
    a.cos = r->cos;
    a.sin = r->sin;
    for (int i = 0; i < 2; i++) {
        a.cos_at[i] = r->cos_at[i];
        a.sin_at[i] = r->sin_at[i];
    }
    a.seq = (unsigned)r->seq;
    a.tokens = (unsigned)(r->batch * r->seq);
    a.dim = (int)r->dim;
    a.rot = (int)r->rot;
    a.items = (a.dim + 2 * width - 1) / (2 * width);
    return a;
}

template <typename T, typename A> void rope_of_types(cudaStream_t stream, const mt_rope *r)
{
    constexpr int W = vec<T>::N;

    if (vectors_fit(r, W))
        launch<T, A, W>(stream, r, args_of(r, W));
    else
        launch<T, A, 1>(stream, r, args_of(r, 1));
}

template <typename T> void rope_of_type(cudaStream_t stream, const mt_rope *r)
{
    if (r->angle_dt == MT_F32)
        rope_of_types<T, float>(stream, r);
    else
        rope_of_types<T, T>(stream, r);
}

} // namespace

extern "C" const char *mt__rope_cuda(uintptr_t handle, const mt_rope *r)
{
    cudaStream_t stream = reinterpret_cast<cudaStream_t>(handle);
    Current      current(stream);

    if (!current.ok)
        return NO_CONTEXT;
    switch (r->dt) {
    case MT_F32:  rope_of_type<float>(stream, r);         break;
    case MT_BF16: rope_of_type<__nv_bfloat16>(stream, r); break;
    default:      rope_of_type<__half>(stream, r);        break;
    }
    return launch_error();
}
