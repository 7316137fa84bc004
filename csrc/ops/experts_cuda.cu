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
        float sum[W] = {};

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

// g and u of W places of a row, with their bias.
template <int W> struct Pairs { float g[W], u[W]; };

// Adds (or sets) what lies at `first` of x: halves of n, or pairs.
template <typename T, int W, bool Add>
__device__ inline void take(Pairs<W> &to, const mt_gates &g, const void *x, int64_t first,
                            int64_t i)
{
    const int64_t at = g.interleaved ? 2 * i : i, beside = g.interleaved ? at + W : at + g.n;
    pack<T, W> a = load<T, W>(x, first + at), b = load<T, W>(x, first + beside);

#pragma unroll
    for (int e = 0; e < W; e++) {
        float even = widen(2 * e < W ? a.x[2 * e % W] : b.x[2 * e % W]);
        float odd = widen(2 * e + 1 < W ? a.x[(2 * e + 1) % W] : b.x[(2 * e + 1) % W]);
        float gate = g.interleaved ? even : widen(a.x[e]), up = g.interleaved ? odd : widen(b.x[e]);

        to.g[e] = Add ? to.g[e] + gate : gate;
        to.u[e] = Add ? to.u[e] + up : up;
    }
}

template <typename T, int W>
__device__ inline Pairs<W> pairs_of(const mt_gates &g, int64_t row, int64_t i)
{
    Pairs<W> p;

    take<T, W, false>(p, g, g.gu, row * 2 * g.n, i);
    if (g.bias != nullptr)
        take<T, W, true>(p, g, g.bias, g.expert[row] * 2 * g.n, i);
    return p;
}

template <typename T, int W>
__device__ inline void put_pairs(const mt_gates &g, int64_t row, int64_t i, const Pairs<W> &p)
{
    const int64_t at = g.interleaved ? 2 * i : i, beside = g.interleaved ? at + W : at + g.n;
    pack<T, W> a, b;

#pragma unroll
    for (int e = 0; e < W; e++) {       // what goes to place e of the first pack, and of the second
        float first = e % 2 == 0 ? p.g[e / 2] : p.u[e / 2];
        float second = (e + W) % 2 == 0 ? p.g[(e + W) / 2] : p.u[(e + W) / 2];

        a.x[e] = narrow<T>(g.interleaved ? first : p.g[e]);
        b.x[e] = narrow<T>(g.interleaved ? second : p.u[e]);
    }
    store(g.dgu, row * 2 * g.n + at, a);
    store(g.dgu, row * 2 * g.n + beside, b);
}

template <typename T, int Act> __device__ inline float product(float a, float u)
{
    return widen(narrow<T>(widen(narrow<T>(a)) * factor<Act>(u)));
}

// h = round(a(g)) * u(u):  gu [R, 2 n] in, h [R, n] out.
// A block for each row, in strides; threads along it, a pack each.
// Bytes: 3 R n sizeof(T), and the bias of an expert once for each of its rows, from L2. Limit: HBM.
template <typename T, int W, int Act>
__global__ void __launch_bounds__(THREADS) forward_kernel(const mt_gates g)
{
    for (int64_t row = blockIdx.x; row < g.rows; row += gridDim.x)
        for (int64_t i = (int64_t)threadIdx.x * W; i < g.n; i += (int64_t)blockDim.x * W) {
            Pairs<W>   p = pairs_of<T, W>(g, row, i);
            pack<T, W> h;

#pragma unroll
            for (int e = 0; e < W; e++)
                h.x[e] = narrow<T>(
                    product<T, Act>(activation<sizeof(T) == 2, Act>(p.g[e]).a, p.u[e]));
            store(g.h, row * g.n + i, h);
        }
}

// One pack of a row: gradients and h are written; yields its part of the sum of dact * h.
template <typename T, int W, int Act>
__device__ inline float backward_pack(const mt_gates &g, int64_t row, int64_t i, float weight)
{
    Pairs<W>   p = pairs_of<T, W>(g, row, i);
    pack<T, W> d = load<T, W>(g.dact, row * g.n + i);
    float      dot = 0;

#pragma unroll
    for (int e = 0; e < W; e++) {
        Value v = activation<sizeof(T) == 2, Act>(p.g[e]);
        float dh = widen(d.x[e]), up = p.u[e], h = product<T, Act>(v.a, up);
        bool  cut = Act == MT_CLAMPED && fabsf(up) > MT_CLAMP;

        dot += dh * h;
        p.g[e] = weight * dh * factor<Act>(up) * v.slope;
        p.u[e] = cut ? 0.0f : weight * dh * v.a;
        d.x[e] = narrow<T>(weight * h);
    }
    put_pairs<T, W>(g, row, i, p);
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

// dgu, h and dweights of experts.h. As forward_kernel; a block adds up its row's dact * h.
// Bytes: 6 R n sizeof(T), outputs over inputs or beside them. Limit: HBM; beside glu_backward's
// instructions there is one sum for each row.
template <typename T, int W, int Act>
__global__ void __launch_bounds__(THREADS) backward_kernel(const mt_gates g)
{
    for (int64_t row = blockIdx.x; row < g.rows; row += gridDim.x) {
        const int64_t choice = g.order != nullptr ? g.order[row] : row;
        const float   weight = g.weights != nullptr ? g.weights[choice] : 1.0f;
        float         dot = 0;

        for (int64_t i = (int64_t)threadIdx.x * W; i < g.n; i += (int64_t)blockDim.x * W)
            dot += backward_pack<T, W, Act>(g, row, i, weight);
        if (g.weights != nullptr) {          // the same for all threads of the grid
            dot = block_sum(dot);
            if (threadIdx.x == 0)
                g.dweights[choice] = dot;
        }
    }
}

template <typename T, int W, int Act, bool Backward>
void launch(cudaStream_t stream, const mt_gates &g)
{
    constexpr int64_t BLOCKS = 1 << 17;
    unsigned blocks = (unsigned)least(g.rows, BLOCKS);

    if constexpr (Backward)
        backward_kernel<T, W, Act><<<blocks, THREADS, 0, stream>>>(g);
    else
        forward_kernel<T, W, Act><<<blocks, THREADS, 0, stream>>>(g);
}

template <typename T, int W, bool Backward> void launch_act(cudaStream_t stream, const mt_gates &g)
{
    switch (g.act) {
    case MT_SILU:      launch<T, W, MT_SILU, Backward>(stream, g);      break;
    case MT_GELU_TANH: launch<T, W, MT_GELU_TANH, Backward>(stream, g); break;
    case MT_GELU:      launch<T, W, MT_GELU, Backward>(stream, g);      break;
    default:           launch<T, W, MT_CLAMPED, Backward>(stream, g);   break;
    }
}

template <typename T, bool Backward> void launch_width(cudaStream_t stream, const mt_gates &g)
{
    constexpr int W = 16 / sizeof(T);
    const void *const all[] = { g.gu, g.bias, g.h, g.dact, g.dgu };
    bool fits = g.n % W == 0;

    for (const void *p : all)
        fits = fits && mt::aligned16(p);     // NULL is
    if (fits)
        launch_act<T, W, Backward>(stream, g);
    else
        launch_act<T, 1, Backward>(stream, g);
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
