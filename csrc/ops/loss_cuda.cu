// loss_cuda.cu — loss.h on CUDA: a block for each row,
// which is read once for the sums and written once.
#include "loss_cuda.h"
#include "kernel.cuh"
#include <cfloat>

namespace {

using mt::element;
using mt::narrow;
using mt::vec;
using mt::WARP;
using mt::widen;

constexpr int MOST_THREADS = 1024, LEAST_THREADS = 64;
constexpr int BATCH = 4;              // loads in flight in each thread
// 16-byte vectors that a thread should have, if the row is long enough
constexpr int EACH = 2 * BATCH;
constexpr int SPARE_BYTES = 1024;     // of shared memory, for what is not the row

// exp. 16-bit rows: by the special function unit, off by 2^-22 + |x| 2^-23 of itself,
// 0 below 2^-126.
template <typename T> __device__ inline float exp_(float x)
{
    if constexpr (sizeof(T) == 4) {
        return expf(x);
    } else {
        float y, z = x * 1.44269504f;

        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(z));
        return y;
    }
}

// A row in memory: `head` elements before the first 16-byte boundary, `vectors` of 16 bytes,
// `edges` - head behind.
template <typename T> struct Row {
    T      *x;
    vec<T> *vector;
    int     n, head, vectors, edges;

    __device__ Row(const mt_cross_entropy &c, int64_t row)
    {
        x = static_cast<T *>(c.logits) + row * c.stride;
        n = (int)c.n;
        head = (int)(-reinterpret_cast<uintptr_t>(x) % 16 / sizeof(T));
        head = head < n ? head : n;
        vectors = (n - head) / vec<T>::N;
        edges = n - vectors * vec<T>::N;
        vector = reinterpret_cast<vec<T> *>(x + head);
    }
    __device__ T *edge(int i) const { return x + (i < head ? i : n - edges + i); }
};

// What a thread, then a warp, then the block knows of a row.
struct Sums {
    float max = -FLT_MAX, exps = 0, values = 0;      // m, s = sum exp(l - m), sum l
};

// Two parts as one. Symmetric to the bit, so that all threads of an exchange hold the same.
template <typename T> __device__ inline Sums joined(const Sums &a, const Sums &b)
{
    Sums r;

    r.max = fmaxf(a.max, b.max);
    r.exps = a.exps * exp_<T>(a.max - r.max) + b.exps * exp_<T>(b.max - r.max);
    r.values = a.values + b.values;
    return r;
}

template <bool Cap> __device__ inline float capped(float x, float softcap)
{
    return Cap ? softcap * tanhf(x / softcap) : x;
}

template <typename T, bool Cap>
__device__ inline void add_vector(Sums &r, const vec<T> &v, float softcap)
{
    constexpr int N = vec<T>::N;
    float l[N], max = r.max;

#pragma unroll
    for (int e = 0; e < N; e++) {
        l[e] = capped<Cap>(element(v, e), softcap);
        max = fmaxf(max, l[e]);
    }
    r.exps *= exp_<T>(r.max - max);
    r.max = max;
    float exps[N];
#pragma unroll
    for (int e = 0; e < N; e++)
        exps[e] = exp_<T>(l[e] - max);
#pragma unroll
    for (int half = N / 2; half > 0; half /= 2)
        for (int e = 0; e < half; e++) {
            exps[e] += exps[e + half];
            l[e] += l[e + half];
        }
    r.exps += exps[0];
    r.values += l[0];
}

template <typename T> __device__ inline Sums warp_joined(Sums r)
{
    for (int apart = WARP / 2; apart > 0; apart /= 2) {
        Sums other;

        other.max = __shfl_xor_sync(~0u, r.max, apart);
        other.exps = __shfl_xor_sync(~0u, r.exps, apart);
        other.values = __shfl_xor_sync(~0u, r.values, apart);
        r = joined<T>(r, other);
    }
    return r;
}

// The block's sums, in every thread. Each warp joins all warps' sums, in one order.
template <typename T> __device__ inline Sums block_joined(Sums r)
{
    __shared__ float shared[3][MOST_THREADS / WARP];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;

    r = warp_joined<T>(r);
    if (lane == 0) {
        shared[0][warp] = r.max;
        shared[1][warp] = r.exps;
        shared[2][warp] = r.values;
    }
    __syncthreads();
    r = Sums();
    if (lane < warps) {
        r.max = shared[0][lane];
        r.exps = shared[1][lane];
        r.values = shared[2][lane];
    }
    return warp_joined<T>(r);
}

// First reading. The first `cached` vectors stay in shared memory for the second;
// a thread meets its own again.
template <typename T, bool Cap>
__device__ inline Sums read_row(const mt_cross_entropy &c, const Row<T> &row, vec<T> *cache,
                                int cached)
{
    const int threads = blockDim.x;
    Sums r;

    for (int first = threadIdx.x; first < row.vectors; first += BATCH * threads) {
        vec<T> v[BATCH];

#pragma unroll
        for (int b = 0; b < BATCH; b++)
            if (first + b * threads < row.vectors)
                v[b] = row.vector[first + b * threads];
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const int i = first + b * threads;

            if (i < cached)
                cache[i] = v[b];
            if (i < row.vectors)
                add_vector<T, Cap>(r, v[b], c.softcap);
        }
    }
    if (threadIdx.x < row.edges) {
        Sums one;

        one.max = fmaxf(one.max, capped<Cap>(widen(*row.edge(threadIdx.x)), c.softcap));
        one.values = capped<Cap>(widen(*row.edge(threadIdx.x)), c.softcap);
        one.exps = exp_<T>(one.values - one.max);
        r = joined<T>(r, one);
    }
    return block_joined<T>(r);
}

// dx of loss.h but for the label's own term; k = scale (1 + 2 z lse) / s, every = scale a / V.
struct Gradient { float max, k, every, softcap; };

template <typename T, bool Cap> __device__ inline float gradient(const Gradient &g, float x)
{
    const float t = Cap ? tanhf(x / g.softcap) : 0.0f;

    return (exp_<T>((Cap ? g.softcap * t : x) - g.max) * g.k - g.every) * (1.0f - t * t);
}

// Second reading, from the row's end: what was read last is likely to be in L2 still;
// then from shared memory.
template <typename T, bool Cap>
__device__ inline void write_row(const Gradient &g, const Row<T> &row, const vec<T> *cache,
                                 int cached)
{
    const int threads = blockDim.x, rounds = (row.vectors + threads - 1) / threads;

    for (int last = rounds - 1; last >= 0; last -= BATCH) {
        vec<T> v[BATCH];

#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const int i = (last - b) * threads + (int)threadIdx.x;

            if (last >= b && i < row.vectors)
                v[b] = i < cached ? cache[i] : row.vector[i];
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const int i = (last - b) * threads + (int)threadIdx.x;
            float     out[vec<T>::N];

            if (last < b || i >= row.vectors)
                continue;
#pragma unroll
            for (int e = 0; e < vec<T>::N; e++)
                out[e] = gradient<T, Cap>(g, element(v[b], e));
            row.vector[i] = mt::rounded<T>(out);
        }
    }
    if (threadIdx.x < row.edges)
        *row.edge(threadIdx.x) = narrow<T>(gradient<T, Cap>(g, widen(*row.edge(threadIdx.x))));
}

// A row without a label to learn from: loss, lse and the gradient are one value, 0 or NaN.
template <typename T>
__device__ inline void fill_row(const mt_cross_entropy &c, const Row<T> &row, float value)
{
    vec<T> v;

#pragma unroll
    for (int i = 0; i < 4; i++)
        v.u[i] = value == 0.0f ? 0u : ~0u;            // all ones: a NaN of every type
    if (threadIdx.x == 0)
        c.loss[blockIdx.x] = c.lse[blockIdx.x] = value;
    if (c.scale == nullptr)
        return;
    for (int i = threadIdx.x; i < row.vectors; i += blockDim.x)
        row.vector[i] = v;
    if (threadIdx.x < row.edges)
        *row.edge(threadIdx.x) = narrow<T>(value);
}

// Loss, lse and, with scale, the gradient in place: loss.h, a block for each row.
// Bytes: R V sizeof(T) read; with scale as much written, and what of a row is neither in shared
// memory (227 KiB on an H200: 116,000 16-bit numbers) nor in L2 read again. Limit: HBM, 4.0 to 4.3
// TB/s; without a cap, 2 exponentials and 16 instructions an element, 60 % of what fits in that
// time. A cap adds two tanh: then arithmetic binds.
template <typename T, bool Cap>
__global__ void __launch_bounds__(MOST_THREADS) cross_entropy(const mt_cross_entropy c, int cached)
{
    extern __shared__ vec<uint16_t> memory[];
    vec<T>       *cache = reinterpret_cast<vec<T> *>(memory);
    const Row<T>  row(c, blockIdx.x);
    const int64_t label = c.labels[blockIdx.x];

    if (label == c.ignore || label < 0 || label >= c.n) {
        fill_row<T>(c, row, label == c.ignore ? 0.0f : __int_as_float(0x7fffffff));
        return;
    }
    /* Read before the threads meet in read_row; written over only behind that. */
    const float x = widen(row.x[label]), picked = capped<Cap>(x, c.softcap);
    const Sums  r = read_row<T, Cap>(c, row, cache, cached);
    const float logs = logf(r.exps), lse = r.max + logs;
    /* Not 0 * (picked - mean): the mean is -infinity where a logit is. */
    const float smooth = c.smoothing > 0 ? c.smoothing * (picked - r.values / (float)c.n) : 0.0f;

    if (threadIdx.x == 0) {
        c.lse[blockIdx.x] = lse;
        c.loss[blockIdx.x] = (logs + (r.max - picked)) + smooth + c.z_loss * lse * lse;
    }
    if (c.scale == nullptr)
        return;
    const float    scale = *c.scale;
    const Gradient g = { r.max, scale * (1.0f + 2.0f * c.z_loss * lse) / r.exps,
                         scale * c.smoothing / (float)c.n, c.softcap };
    write_row<T, Cap>(g, row, cache, cached);
    /* The label's own term is added by one thread,
     * behind whoever wrote the rest of that element. */
    __syncthreads();
    if (threadIdx.x == 0) {
        const float t = Cap ? tanhf(x / c.softcap) : 0.0f;

        row.x[label] = narrow<T>((exp_<T>(picked - r.max) * g.k - g.every
                                  - scale * (1.0f - c.smoothing))
                                 * (1.0f - t * t));
    }
}

/* ---- launch ---- */

inline unsigned threads_for(int64_t vectors)
{
    unsigned threads = LEAST_THREADS;

    while (threads < MOST_THREADS && threads * EACH < vectors)
        threads *= 2;
    return threads;
}

// Lets a kernel have as much shared memory as there is for a row. Always the same much: launches of
// other threads may be under way.
template <typename Kernel> cudaError_t open_memory(Kernel kernel, int *bytes)
{
    int         device;
    cudaError_t error = cudaGetDevice(&device);

    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    *bytes -= SPARE_BYTES;
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, *bytes);
    return error;
}

template <typename T, bool Cap> cudaError_t launch(cudaStream_t stream, const mt_cross_entropy &c)
{
    const int64_t vectors = c.n / vec<T>::N;
    int           cached = 0;                 // a row that is read once is not kept

    if (c.scale != nullptr) {
        int         bytes = 0;
        cudaError_t error = open_memory(cross_entropy<T, Cap>, &bytes);

        if (error != cudaSuccess)
            return error;
        cached = bytes / (int)sizeof(vec<T>);
        cached = cached < vectors ? cached : (int)vectors;
    }
    cross_entropy<T, Cap>
        <<<(unsigned)c.rows, threads_for(vectors), cached * sizeof(vec<T>), stream>>>(c, cached);
    return cudaGetLastError();
}

template <typename T> cudaError_t launch_type(cudaStream_t stream, const mt_cross_entropy &c)
{
    return c.softcap > 0 ? launch<T, true>(stream, c) : launch<T, false>(stream, c);
}

} // namespace

extern "C" const char *mt__cross_entropy_cuda(uintptr_t handle, const mt_cross_entropy *c)
{
    cudaStream_t stream = reinterpret_cast<cudaStream_t>(handle);
    mt::Current  current(stream);
    cudaError_t  error;

    if (!current.ok)
        return mt::NO_CONTEXT;
    if (c->rows == 0)
        return nullptr;
    switch (c->dtype) {
    case MT_F32:  error = launch_type<float>(stream, *c);         break;
    case MT_BF16: error = launch_type<__nv_bfloat16>(stream, *c); break;
    default:      error = launch_type<__half>(stream, *c);        break;
    }
    (void)cudaGetLastError();
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
