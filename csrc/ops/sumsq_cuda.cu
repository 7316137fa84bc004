// sumsq_cuda.cu — the sum of squares of sumsq.h, in its order, to its bits.
#include "sumsq_cuda.h"
#include "sumsq_lanes.cuh"

namespace {

// This thread's lanes over the 32 rows of the chunk that begins at x[i].
// __dmul_rn, __dadd_rn: never fused, which matters for fp64 inputs only (other squares are exact).
template <bool Whole, typename T>
__device__ inline void add_rows(double *lane, const T *x, int64_t i, int64_t n)
{
#pragma unroll 8
    for (int row = 0; row < CHUNK / LANES; row++) {
        pack<T> p = load<Whole>(x, i + row * LANES, n);
        for (int e = 0; e < EACH; e++)
            lane[e] = __dadd_rn(lane[e], __dmul_rn(wide(p.x[e]), wide(p.x[e])));
    }
}

// Rule 1:  sums[c] = fold over lanes l of  sum_r x[c*8192 + r*256 + l]^2,  r in order.
//   x [n] in, sums [ceil(n/8192)] out.
// A warp takes a chunk; thread t owns lanes 8t to 8t+7, so that a row of 256 is read in 16-byte
// pieces and no lane's order changes. Bytes: n * sizeof(T) read. Limit: HBM.
template <typename T>
__global__ void __launch_bounds__(THREADS) sum_chunks(const T *x, int64_t n, double *sums)
{
    const bool    aligned = reinterpret_cast<uintptr_t>(x) % 16 == 0;
    const int     thread  = threadIdx.x % WARP;
    const int64_t warps   = (int64_t)gridDim.x * (THREADS / WARP);
    int64_t       c       = (int64_t)blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;

    for (; c * CHUNK < n; c += warps) {
        double  lane[EACH] = {};
        int64_t i = c * CHUNK + thread * EACH;

        if (aligned && (c + 1) * CHUNK <= n)
            add_rows<true>(lane, x, i, n);
        else
            add_rows<false>(lane, x, i, n);
        double sum = fold(lane);
        if (thread == 0)
            sums[c] = sum;
    }
}

template <typename T>
void launch(cudaStream_t stream, const void *x, int64_t n, double *sums, double *out)
{
    const int64_t n_chunks = (n + CHUNK - 1) / CHUNK;

    if (n_chunks > 0)
        sum_chunks<<<(unsigned)blocks_for(n_chunks), THREADS, 0, stream>>>(
            static_cast<const T *>(x), n, sums);
    sum_sums<<<1, LANES, 0, stream>>>(sums, n_chunks, out);
}

} // namespace

extern "C" const char *mt__sumsq_cuda(uintptr_t handle, mt_dtype dt, const void *x, int64_t n,
                                      double *sums, double *out)
{
    cudaStream_t stream = reinterpret_cast<cudaStream_t>(handle);
    mt::Current  current(stream);

    if (!current.ok)
        return mt::NO_CONTEXT;
    switch (dt) {
    case MT_F32:  launch<float>(stream, x, n, sums, out);  break;
    case MT_BF16: launch<bf16>(stream, x, n, sums, out);   break;
    case MT_F16:  launch<__half>(stream, x, n, sums, out); break;
    default:      launch<double>(stream, x, n, sums, out); break;
    }
    return mt::launch_error();
}
