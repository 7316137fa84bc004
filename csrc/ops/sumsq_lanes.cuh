// sumsq_lanes.cuh — private to csrc/ops: the order of sumsq.h on CUDA,
// for what ends in a sum of squares.
#ifndef MT_SUMSQ_LANES_CUH
#define MT_SUMSQ_LANES_CUH

#include "kernel.cuh"

namespace {

using mt::WARP;
constexpr int CHUNK = 8192, LANES = 256;      // as in sumsq.h
constexpr int EACH = LANES / WARP;            // a thread owns 8 neighbouring lanes
constexpr int THREADS = 256;                  // 8 chunks a block

struct bf16 { unsigned short bits; };

__device__ inline double wide(float x)  { return x; }
__device__ inline double wide(double x) { return x; }
__device__ inline double wide(__half x) { return __half2float(x); }
__device__ inline double wide(bf16 x)   { return __uint_as_float((unsigned)x.bits << 16); }

// A warp takes a chunk. Blocks for so many chunks; what a grid cannot hold, its warps take in turn.
inline int64_t blocks_for(int64_t n_chunks)
{
    const int64_t per_block = THREADS / WARP, most = 1 << 16;
    const int64_t blocks = (n_chunks + per_block - 1) / per_block;

    return blocks < most ? blocks : most;
}

template <typename T> struct alignas(16) pack { T x[EACH]; };

// Elements i to i+7. Whole: 16-byte loads. Else one by one up to n, and zero behind it: adding 0
// to a square changes no bit.
template <bool Whole, typename T>
__device__ inline pack<T> load(const T *x, int64_t i, int64_t n)
{
    if constexpr (Whole)
        return *reinterpret_cast<const pack<T> *>(x + i);

    pack<T> p = {};
    for (int e = 0; e < EACH; e++)
        if (i + e < n)
            p.x[e] = x[i + e];
    return p;
}

// lane[l] += lane[l+128], 64, ... 8 by exchange between threads, then 4, 2, 1 within each.
// Only thread 0's result counts.
__device__ inline double fold(double *lane)
{
    for (int apart = WARP / 2; apart > 0; apart /= 2)
        for (int e = 0; e < EACH; e++)
            lane[e] += __shfl_down_sync(~0u, lane[e], apart);
    for (int half = EACH / 2; half > 0; half /= 2)
        for (int e = 0; e < half; e++)
            lane[e] += lane[e + half];
    return lane[0];
}

// Rule 2: the same over the chunk sums, by one block; *out may be host memory.
// Bytes: 8 * n_chunks read, a thousandth of the gradient: bound by latency, some 10 us.
__global__ void __launch_bounds__(LANES) sum_sums(const double *sums, int64_t n_chunks, double *out)
{
    __shared__ double lane[LANES];
    const int l   = threadIdx.x;
    double    sum = 0;

#pragma unroll 8
    for (int64_t c = l; c < n_chunks; c += LANES)
        sum += sums[c];
    lane[l] = sum;
    for (int half = LANES / 2; half > 0; half /= 2) {
        __syncthreads();
        if (l < half)
            lane[l] += lane[l + half];
    }
    if (l == 0)
        *out = lane[0];
}

} // namespace

#endif
