// experts_cuda.cu — experts.h on CUDA: each byte is read once and written once.
#include "experts_cuda.h"
#include "gate.cuh"
#include "kernel.cuh"

namespace {

using mt::activation;
using mt::factor;
using mt::narrow;
using mt::pack;
using mt::Value;
using mt::widen;
using mt::WARP;

constexpr int THREADS = 128;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

template <typename T, int W> __device__ inline pack<T, W> load(const void *x, int64_t i)
{
    return *reinterpret_cast<const pack<T, W> *>(static_cast<const T *>(x) + i);
}

template <typename T, int W> __device__ inline void store(void *x, int64_t i, const pack<T, W> &p)
{
    *reinterpret_cast<pack<T, W> *>(static_cast<T *>(x) + i) = p;
}

/* ---- sums of rows ---- */

// out[t] = base[t] + factor * sum_j weights[t,j] x[place[t k + j]]:  [T,n],
// j in order, as the host does.
// Threads: x along the row, a pack each; y and the grid's y along T, in strides. A token's rows are
// asked for four at a time before the first is added.
// Bytes: T (k + 1, 2 with base) n sizeof(T); x's rows may be read k times each, from L2 for the
// most part. Limit: HBM, 4.0 to 4.3 TB/s on an H200.
template <typename T, int W>
__global__ void __launch_bounds__(THREADS) sum_kernel(const mt_row_sums s)
{
    constexpr int AHEAD = 4;
    const int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * W;
    const int64_t tokens_apart = (int64_t)gridDim.y * blockDim.y;

    if (i >= s.n)
        return;
    for (int64_t t = (int64_t)blockIdx.y * blockDim.y + threadIdx.y; t < s.tokens;
         t += tokens_apart) {
        float sum[W];

        for (int e = 0; e < W; e++)
            sum[e] = -0.0f;                  // a sum of one is that one, -0 too
        for (int64_t j = 0; j < s.k; j += AHEAD) {
            pack<T, W> x[AHEAD];
            float      weight[AHEAD];

#pragma unroll
            for (int a = 0; a < AHEAD; a++)
                if (j + a < s.k) {
                    x[a] = load<T, W>(s.x, s.place[t * s.k + j + a] * s.n + i);
                    weight[a] = s.weights != nullptr ? s.weights[t * s.k + j + a] : 1.0f;
                }
#pragma unroll
            for (int a = 0; a < AHEAD; a++)
                if (j + a < s.k)
                    for (int e = 0; e < W; e++)
                        sum[e] += weight[a] * widen(x[a].x[e]);
        }
        pack<T, W> out;
        if (s.base != nullptr)
            out = load<T, W>(s.base, t * s.n + i);
        for (int e = 0; e < W; e++) {
            float y = sum[e] * s.factor;
            out.x[e] = narrow<T>(s.base != nullptr ? y + widen(out.x[e]) : y);
        }
        store(s.out, t * s.n + i, out);
    }
}

// Threads along a row: a power of two, so that narrow rows share a block.
inline unsigned threads_along(int64_t packs)
{
    unsigned x = 1;

    while (x < THREADS && x < packs)
        x *= 2;
    return x;
}

template <typename T, int W> void sum_of(cudaStream_t stream, const mt_row_sums &s)
{
    constexpr int64_t BLOCKS = 1 << 16, GRID_Y = 65535;      // enough blocks; the grid's limit
    unsigned x = threads_along(ceil_div(s.n, W)), y = THREADS / x;
    int64_t  along = ceil_div(s.n, (int64_t)x * W);
    int64_t  down = least(ceil_div(s.tokens, y), least(GRID_Y, BLOCKS / least(along, BLOCKS)));

    sum_kernel<T, W><<<dim3((unsigned)along, (unsigned)down), dim3(x, y), 0, stream>>>(s);
}

template <typename T> void sum_width(cudaStream_t stream, const mt_row_sums &s)
{
    constexpr int W = 16 / sizeof(T);

    if (s.n % W == 0 && mt::aligned16(s.x) && mt::aligned16(s.base) && mt::aligned16(s.out))
        sum_of<T, W>(stream, s);
    else
        sum_of<T, 1>(stream, s);
}

/* ---- gates ---- */

// How g and u lie in a row. EITHER: as the call says, one place at a time.
enum Layout { EITHER, HALVES, PAIRS };

// A thread has P places of a row at a time, side by side. Of pairs, gradients go by four at a
// time, so that neighbours' 16 bytes lie beside each other (a GPT-OSS layer of 32k tokens takes
// 1.4 ms so, and 7.0 where they are apart), and what is next is asked for before the first is
// computed.
template <Layout L, bool Backward>
constexpr int AHEAD_OF = L == PAIRS && Backward ? 2 : 1;
// Of a multiprocessor, at least: else gradients have so many registers that there are four.
constexpr int BLOCKS = 8;

template <int P> struct Pairs { float g[P], u[P]; };

// P places of gu, or of a bias, as they lie in memory.
template <typename T, int P, Layout L> struct Raw {
    pack<T, L == PAIRS ? 2 * P : P> a, b;        // b: of halves, the second

    __device__ inline void take(const mt_gates &g, const void *x, int64_t first, int64_t i)
    {
        const bool together = L == PAIRS || (L == EITHER && g.interleaved);

        a = load<T, sizeof(a) / sizeof(T)>(x, first + (together ? 2 * i : i));
        if constexpr (L != PAIRS)
            b = load<T, P>(x, first + (together ? 2 * i + 1 : i + g.n));
    }

    __device__ inline void put(const mt_gates &g, int64_t first, int64_t i) const
    {
        const bool together = L == PAIRS || (L == EITHER && g.interleaved);

        store(g.dgu, first + (together ? 2 * i : i), a);
        if constexpr (L != PAIRS)
            store(g.dgu, first + (together ? 2 * i + 1 : i + g.n), b);
    }

    template <bool Add> __device__ inline void widen_to(Pairs<P> &p) const
    {
#pragma unroll
        for (int e = 0; e < P; e++) {
            float gate = widen(L == PAIRS ? a.x[2 * e % (L == PAIRS ? 2 * P : P)] : a.x[e]);
            float up = widen(L == PAIRS ? a.x[(2 * e + 1) % (L == PAIRS ? 2 * P : P)] : b.x[e]);

            p.g[e] = Add ? p.g[e] + gate : gate;
            p.u[e] = Add ? p.u[e] + up : up;
        }
    }

    __device__ inline void narrow_from(const Pairs<P> &p)
    {
#pragma unroll
        for (int e = 0; e < P; e++) {
            a.x[L == PAIRS ? 2 * e : e] = narrow<T>(p.g[e]);
            (L == PAIRS ? a.x[L == PAIRS ? 2 * e + 1 : 0] : b.x[e]) = narrow<T>(p.u[e]);
        }
    }
};

// What a thread has asked for: gu, its bias and, for gradients, dact.
template <typename T, int P, Layout L, bool Backward> struct Asked {
    Raw<T, P, L> gu, bias;
    pack<T, P>   dact;

    __device__ inline void take(const mt_gates &g, int64_t row, int64_t i, int64_t expert)
    {
        gu.take(g, g.gu, row * 2 * g.n, i);
        if (g.bias != nullptr)
            bias.take(g, g.bias, expert * 2 * g.n, i);
        if constexpr (Backward)
            dact = load<T, P>(g.dact, row * g.n + i);
    }

    __device__ inline Pairs<P> pairs(const mt_gates &g) const
    {
        Pairs<P> p;

        gu.template widen_to<false>(p);
        if (g.bias != nullptr)
            bias.template widen_to<true>(p);
        return p;
    }
};

template <typename T, int Act> __device__ inline float product(float a, float u)
{
    return widen(narrow<T>(widen(narrow<T>(a)) * factor<Act>(u)));
}

// h of P places is written.
template <typename T, int P, Layout L, int Act>
__device__ inline void forward_places(const mt_gates &g, int64_t row, int64_t i,
                                      const Asked<T, P, L, false> &asked)
{
    Pairs<P>   p = asked.pairs(g);
    pack<T, P> h;

#pragma unroll
    for (int e = 0; e < P; e++)
        h.x[e] = narrow<T>(product<T, Act>(activation<sizeof(T) == 2, Act>(p.g[e]).a, p.u[e]));
    store(g.h, row * g.n + i, h);
}

// Gradients and h of P places are written; yields their part of the sum of dact * h.
template <typename T, int P, Layout L, int Act>
__device__ inline float backward_places(const mt_gates &g, int64_t row, int64_t i, float weight,
                                        Asked<T, P, L, true> &asked)
{
    Pairs<P>   p = asked.pairs(g);
    pack<T, P> d = asked.dact;
    float      dot = 0;

#pragma unroll
    for (int e = 0; e < P; e++) {
        Value v = activation<sizeof(T) == 2, Act>(p.g[e]);
        float dh = widen(d.x[e]), up = p.u[e], h = product<T, Act>(v.a, up);
        bool  cut = Act == MT_CLAMPED && fabsf(up) > MT_CLAMP;

        dot += dh * h;
        p.g[e] = weight * dh * factor<Act>(up) * v.slope;
        p.u[e] = cut ? 0.0f : weight * dh * v.a;
        d.x[e] = narrow<T>(weight * h);
    }
    asked.gu.narrow_from(p);
    asked.gu.put(g, row * 2 * g.n, i);
    store(g.h, row * g.n + i, d);
    return dot;
}

// The sum over a block's threads, in thread 0: halves of a warp are folded, then warps in order.
__device__ inline float block_sum(float x)
{
    __shared__ float warps[THREADS / WARP];

    for (int half = WARP / 2; half > 0; half /= 2)
        x += __shfl_down_sync(0xffffffffu, x, half);
    __syncthreads();                         // the last row's sums have been read
    if (threadIdx.x % WARP == 0)
        warps[threadIdx.x / WARP] = x;
    __syncthreads();
    for (int w = 1; threadIdx.x == 0 && w < THREADS / WARP; w++)
        x += warps[w];
    return x;
}

// A block for each row, in strides. forward: h = round(a(g)) * u(u) of gu [R, 2 n], h [R, n].
// Backward: dgu, h and dweights of experts.h; a block adds up its row's dact * h.
// Bytes: 3 R n sizeof(T), backward 6, outputs over inputs or beside them; an expert's bias once for
// each of its rows, from L2. Limit: HBM; 4.0 TB/s on an H200, 3.3 and 3.5 of pairs with a bias.
template <typename T, int P, Layout L, int Act, bool Backward>
__global__ void __launch_bounds__(THREADS, BLOCKS) gates_kernel(const mt_gates g)
{
    constexpr int AHEAD = AHEAD_OF<L, Backward>;

    for (int64_t row = blockIdx.x; row < g.rows; row += gridDim.x) {
        const int64_t expert = g.bias != nullptr ? g.expert[row] : 0;
        const bool    weighs = Backward && g.weights != nullptr;      // the same for all threads
        const int64_t choice = weighs && g.order != nullptr ? g.order[row] : row;
        const float   weight = weighs ? g.weights[choice] : 1.0f;
        float         dot = 0;

        for (int64_t i = (int64_t)threadIdx.x * P; i < g.n; i += (int64_t)THREADS * P * AHEAD) {
            Asked<T, P, L, Backward> asked[AHEAD];

#pragma unroll
            for (int a = 0; a < AHEAD; a++)
                if (i + a * THREADS * P < g.n)
                    asked[a].take(g, row, i + a * THREADS * P, expert);
#pragma unroll
            for (int a = 0; a < AHEAD; a++)
                if (i + a * THREADS * P < g.n) {
                    if constexpr (Backward)
                        dot += backward_places<T, P, L, Act>(g, row, i + a * THREADS * P, weight,
                                                             asked[a]);
                    else
                        forward_places<T, P, L, Act>(g, row, i + a * THREADS * P, asked[a]);
                }
        }
        if (weighs) {
            dot = block_sum(dot);
            if (threadIdx.x == 0)
                g.dweights[choice] = dot;
        }
    }
}

template <typename T, int P, Layout L, int Act, bool Backward>
void launch(cudaStream_t stream, const mt_gates &g)
{
    constexpr int64_t BLOCKS = 1 << 17;

    unsigned blocks = (unsigned)least(g.rows, BLOCKS);

    gates_kernel<T, P, L, Act, Backward><<<blocks, THREADS, 0, stream>>>(g);
}

template <typename T, int P, Layout L, bool Backward>
void launch_act(cudaStream_t stream, const mt_gates &g)
{
    switch (g.act) {
    case MT_SILU:      launch<T, P, L, MT_SILU, Backward>(stream, g);      break;
    case MT_GELU_TANH: launch<T, P, L, MT_GELU_TANH, Backward>(stream, g); break;
    case MT_GELU:      launch<T, P, L, MT_GELU, Backward>(stream, g);      break;
    default:           launch<T, P, L, MT_CLAMPED, Backward>(stream, g);   break;
    }
}

// Pairs are of models that clamp (GPT-OSS): others' have no kernel of their own.
template <typename T, bool Backward> void launch_width(cudaStream_t stream, const mt_gates &g)
{
    constexpr int W = 16 / sizeof(T);
    const void *const all[] = { g.gu, g.bias, g.h, g.dact, g.dgu };
    bool fits = g.n % W == 0 && (!g.interleaved || g.act == MT_CLAMPED);

    for (const void *p : all)                // 32: two packs of pairs. NULL is, too
        fits = fits && reinterpret_cast<uintptr_t>(p) % (g.interleaved ? 32 : 16) == 0;
    if (!fits)
        launch_act<T, 1, EITHER, Backward>(stream, g);
    else if (g.interleaved)
        launch<T, Backward ? W / 2 : W, PAIRS, MT_CLAMPED, Backward>(stream, g);
    else
        launch_act<T, W, HALVES, Backward>(stream, g);
}

template <bool Backward> const char *run(uintptr_t handle, const mt_gates &g)
{
    cudaStream_t stream = reinterpret_cast<cudaStream_t>(handle);
    mt::Current  current(stream);

    if (!current.ok)
        return mt::NO_CONTEXT;
    if (g.rows > 0)                          // rows of no numbers have sums too
        switch (g.dtype) {
        case MT_F32:  launch_width<float, Backward>(stream, g);         break;
        case MT_BF16: launch_width<__nv_bfloat16, Backward>(stream, g); break;
        default:      launch_width<__half, Backward>(stream, g);        break;
        }
    return mt::launch_error();
}

} // namespace

extern "C" const char *mt__sum_rows_cuda(uintptr_t handle, const mt_row_sums *s)
{
    cudaStream_t stream = reinterpret_cast<cudaStream_t>(handle);
    mt::Current  current(stream);

    if (!current.ok)
        return mt::NO_CONTEXT;
    if (s->tokens > 0 && s->n > 0)
        switch (s->dtype) {
        case MT_F32:  sum_width<float>(stream, *s);         break;
        case MT_BF16: sum_width<__nv_bfloat16>(stream, *s); break;
        default:      sum_width<__half>(stream, *s);        break;
        }
    return mt::launch_error();
}

extern "C" const char *mt__gates_forward_cuda(uintptr_t handle, const mt_gates *g)
{
    return run<false>(handle, *g);
}

extern "C" const char *mt__gates_backward_cuda(uintptr_t handle, const mt_gates *g)
{
    return run<true>(handle, *g);
}
