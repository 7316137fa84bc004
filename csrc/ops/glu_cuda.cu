// glu_cuda.cu — glu.h on CUDA: each byte is read once and written once.
#include "glu_cuda.h"
#include "gate.cuh"
#include "kernel.cuh"

namespace {

using mt::activation;
using mt::factor;
using mt::narrow;
using mt::pack;
using mt::Value;
using mt::widen;

/* ---- elements, by packs of W ---- */

template <typename T, int W> __device__ inline pack<T, W> load(const void *x, int64_t i)
{
    return *reinterpret_cast<const pack<T, W> *>(static_cast<const T *>(x) + i);
}

template <typename T, int W> __device__ inline void store(void *x, int64_t i, const pack<T, W> &p)
{
    *reinterpret_cast<pack<T, W> *>(static_cast<T *>(x) + i) = p;
}

template <typename T, int W, int Act>
__device__ inline void forward_pack(const mt_glu &g, int64_t row, int64_t i)
{
    pack<T, W> gate = load<T, W>(g.gate, row * g.gate_stride + i);
    pack<T, W> up = load<T, W>(g.up, row * g.up_stride + i), h;

#pragma unroll
    for (int e = 0; e < W; e++) {
        Value v = activation<sizeof(T) == 2, Act>(widen(gate.x[e]));
        h.x[e] = narrow<T>(widen(narrow<T>(v.a)) * factor<Act>(widen(up.x[e])));
    }
    store(g.h, row * g.n + i, h);
}

template <typename T, int W, int Act>
__device__ inline void backward_pack(const mt_glu &g, int64_t row, int64_t i)
{
    pack<T, W> gate = load<T, W>(g.gate, row * g.gate_stride + i);
    pack<T, W> up = load<T, W>(g.up, row * g.up_stride + i);
    pack<T, W> dh = load<T, W>(g.dh, row * g.n + i), h;

#pragma unroll
    for (int e = 0; e < W; e++) {
        const Value v = activation<sizeof(T) == 2, Act>(widen(gate.x[e]));
        const mt::Gradients d = mt::gradients<Act>(widen(dh.x[e]), v, widen(narrow<T>(v.a)),
                                                   widen(up.x[e]));

        gate.x[e] = narrow<T>(d.dgate);
        up.x[e] = narrow<T>(d.dup);
        h.x[e] = narrow<T>(d.h);
    }
    store(g.dgate, row * g.dgate_stride + i, gate);
    store(g.dup, row * g.dup_stride + i, up);
    if (g.h != nullptr)
        store(g.h, row * g.n + i, h);
}

// h = round(a(gate)) * u(up); or the gradients of glu.h, and h again: [T,I].
// Threads: x along the row, a pack each; y and the grid's y along T, in strides.
// Bytes: forward 3 T I sizeof(T); backward 6 (5 without h), with outputs over inputs or beside
// them. Limit: HBM, 4.0 to 4.3 TB/s on an H200; about 45 instructions an element,
// a third of what fits in that time.
template <typename T, int W, int Act, bool Backward>
__global__ void __launch_bounds__(128) glu_kernel(const mt_glu g)
{
    const int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * W;
    const int64_t rows_apart = (int64_t)gridDim.y * blockDim.y;

    if (i >= g.n)
        return;
    for (int64_t row = (int64_t)blockIdx.y * blockDim.y + threadIdx.y; row < g.rows;
         row += rows_apart)
        if constexpr (Backward)
            backward_pack<T, W, Act>(g, row, i);
        else
            forward_pack<T, W, Act>(g, row, i);
}

/* ---- launches ---- */

// Threads along a row: a power of two, so that narrow rows share a block.
inline unsigned threads_along(int64_t packs, unsigned most)
{
    unsigned x = 1;

    while (x < most && x < packs)
        x *= 2;
    return x;
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

template <typename T, int W, int Act, bool Backward>
void launch(cudaStream_t stream, const mt_glu &g)
{
    constexpr unsigned THREADS = 128;
    constexpr int64_t  BLOCKS = 1 << 16, GRID_Y = 65535;     // enough blocks; the grid's limit
    unsigned x = threads_along(g.n / W, THREADS), y = THREADS / x;
    int64_t  along = ceil_div(g.n, (int64_t)x * W);
    int64_t  down = least(ceil_div(g.rows, y), least(GRID_Y, BLOCKS / least(along, BLOCKS)));

    glu_kernel<T, W, Act, Backward>
        <<<dim3((unsigned)along, (unsigned)down), dim3(x, y), 0, stream>>>(g);
}

template <typename T, int W, bool Backward> void launch_act(cudaStream_t stream, const mt_glu &g)
{
    switch (g.act) {
    case MT_SILU:      launch<T, W, MT_SILU, Backward>(stream, g);      break;
    case MT_GELU_TANH: launch<T, W, MT_GELU_TANH, Backward>(stream, g); break;
    case MT_GELU:      launch<T, W, MT_GELU, Backward>(stream, g);      break;
    default:           launch<T, W, MT_CLAMPED, Backward>(stream, g);   break;
    }
}

// Whether packs of w elements lie at 16 bytes in every row of every matrix that is there.
bool packs_fit(const mt_glu &g, int w)
{
    const void *const all[] = { g.dh, g.gate, g.up, g.dgate, g.dup, g.h };

    for (const void *p : all)
        if (!mt::aligned16(p))               // NULL is
            return false;
    return g.n % w == 0 && g.gate_stride % w == 0 && g.up_stride % w == 0
        && g.dgate_stride % w == 0 && g.dup_stride % w == 0;
}

template <typename T, bool Backward> void launch_width(cudaStream_t stream, const mt_glu &g)
{
    constexpr int W = 16 / sizeof(T);

    if (packs_fit(g, W))
        launch_act<T, W, Backward>(stream, g);
    else
        launch_act<T, 1, Backward>(stream, g);
}

template <bool Backward> const char *run(uintptr_t handle, const mt_glu &g)
{
    cudaStream_t stream = reinterpret_cast<cudaStream_t>(handle);
    mt::Current  current(stream);

    if (!current.ok)
        return mt::NO_CONTEXT;
    if (g.rows > 0 && g.n > 0)
        switch (g.dtype) {
        case MT_F32:  launch_width<float, Backward>(stream, g);         break;
        case MT_BF16: launch_width<__nv_bfloat16, Backward>(stream, g); break;
        default:      launch_width<__half, Backward>(stream, g);        break;
        }
    return mt::launch_error();
}

/* ---- the sum over tokens ---- */

constexpr int ALONG = 32, LANES = MT_SUM_LANES;

__device__ inline void put(mt_dtype dt, void *out, int64_t i, float x)
{
    if (dt == MT_F32)
        static_cast<float *>(out)[i] = x;
    else if (dt == MT_BF16)
        static_cast<__nv_bfloat16 *>(out)[i] = narrow<__nv_bfloat16>(x);
    else
        static_cast<__half *>(out)[i] = narrow<__half>(x);
}

// Rule 1 of glu.h:  out[s][i] = fold over lanes l of  sum_r x[s*segment + l + 8r][i],  r in order.
//   x [rows, n] in, out [segments, n] of out_dt. Block: 32 packs along the row, 8 lanes down.
// Bytes: rows * n * sizeof(T) read, once. Limit: HBM. Rule 2 is the same kernel over the sums as
// one segment: a 256th of the bytes, a few us of latency.
template <typename T, int W>
__device__ inline void sum_segment(const T *x, int64_t stride, int64_t rows, int64_t n,
                                   int64_t segment, int64_t s, float (&lanes)[LANES][ALONG * W],
                                   mt_dtype out_dt, void *out)
{
    const int64_t i = ((int64_t)blockIdx.x * ALONG + threadIdx.x) * W;
    const int64_t begin = s * segment;
    const int64_t end = begin + segment < rows ? begin + segment : rows;
    float sum[W] = {};

    if (i < n)
#pragma unroll 8
        for (int64_t row = begin + threadIdx.y; row < end; row += LANES) {
            pack<T, W> p = load<T, W>(x, row * stride + i);
            for (int e = 0; e < W; e++)
                sum[e] += widen(p.x[e]);
        }
    for (int e = 0; e < W; e++)
        lanes[threadIdx.y][threadIdx.x * W + e] = sum[e];
    for (int half = LANES / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.y < half)
            for (int e = threadIdx.x; e < ALONG * W; e += ALONG)
                lanes[threadIdx.y][e] += lanes[threadIdx.y + half][e];
    }
    __syncthreads();
    for (int e = threadIdx.y * ALONG + threadIdx.x; e < ALONG * W; e += ALONG * LANES)
        if ((int64_t)blockIdx.x * ALONG * W + e < n)
            put(out_dt, out, s * n + (int64_t)blockIdx.x * ALONG * W + e, lanes[0][e]);
}

// The grid's y goes along the segments in strides: it ends at 65535, which is 16.8 M rows.
template <typename T, int W>
__global__ void __launch_bounds__(ALONG * LANES)
sum_rows(const T *x, int64_t stride, int64_t rows, int64_t n, int64_t segment, int64_t segments,
         mt_dtype out_dt, void *out)
{
    __shared__ float lanes[LANES][ALONG * W];

    for (int64_t s = blockIdx.y; s < segments; s += gridDim.y) {
        sum_segment<T, W>(x, stride, rows, n, segment, s, lanes, out_dt, out);
        __syncthreads();                                         // lanes are read to the end
    }
}

template <typename T, int W>
void sum_of(cudaStream_t stream, const mt_columns &c, int64_t segment, mt_dtype out_dt, void *out)
{
    int64_t segments = c.rows > 0 ? ceil_div(c.rows, segment) : 1;       // of no rows: zeros
    dim3    grid((unsigned)ceil_div(c.n, ALONG * W), (unsigned)least(segments, 65535));

    sum_rows<T, W><<<grid, dim3(ALONG, LANES), 0, stream>>>(
        static_cast<const T *>(c.x), c.stride, c.rows, c.n, segment, segments, out_dt, out);
}

template <typename T>
void sum_width(cudaStream_t stream, const mt_columns &c, int64_t segment, mt_dtype out_dt,
               void *out)
{
    constexpr int W = 16 / sizeof(T);

    if (mt::aligned16(c.x) && c.n % W == 0 && c.stride % W == 0)
        sum_of<T, W>(stream, c, segment, out_dt, out);
    else
        sum_of<T, 1>(stream, c, segment, out_dt, out);
}

void sum_type(cudaStream_t stream, const mt_columns &c, int64_t segment, mt_dtype out_dt, void *out)
{
    switch (c.dtype) {
    case MT_F32:  sum_width<float>(stream, c, segment, out_dt, out);         break;
    case MT_BF16: sum_width<__nv_bfloat16>(stream, c, segment, out_dt, out); break;
    default:      sum_width<__half>(stream, c, segment, out_dt, out);        break;
    }
}

} // namespace

extern "C" const char *mt__glu_forward_cuda(uintptr_t handle, const mt_glu *g)
{
    return run<false>(handle, *g);
}

extern "C" const char *mt__glu_backward_cuda(uintptr_t handle, const mt_glu *g)
{
    return run<true>(handle, *g);
}

extern "C" const char *mt__column_sum_cuda(uintptr_t handle, const mt_columns *c, float *sums)
{
    cudaStream_t stream = reinterpret_cast<cudaStream_t>(handle);
    mt::Current  current(stream);
    int64_t      segments = ceil_div(c->rows, MT_SUM_ROWS);
    mt_columns   second = { MT_F32, c->out_dtype, segments, c->n, c->n, sums, c->out };

    if (!current.ok)
        return mt::NO_CONTEXT;
    if (c->n == 0)
        return nullptr;
    if (segments <= 1) {
        sum_type(stream, *c, MT_SUM_ROWS, c->out_dtype, c->out);
        return mt::launch_error();
    }
    sum_type(stream, *c, MT_SUM_ROWS, MT_F32, sums);
    sum_type(stream, second, segments, c->out_dtype, c->out);
    return mt::launch_error();
}
