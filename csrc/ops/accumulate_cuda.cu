// accumulate_cuda.cu — mt_accumulate of sumsq.h: the sum of micro-batches and its squares,
// in one pass.
#include "accumulate_cuda.h"
#include "sumsq_lanes.cuh"

namespace {

__device__ inline float narrow(bf16 x)   { return __uint_as_float((unsigned)x.bits << 16); }
__device__ inline float narrow(__half x) { return __half2float(x); }

// To nearest, ties to even; NaN as core/dtype.h writes it.
__device__ inline void round_to(bf16 *to, float x)
{
    unsigned bits = __float_as_uint(x);
    bool     nan  = (bits & 0x7fffffffu) > 0x7f800000u;

    to->bits = nan ? 0x7fc0 : (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

__device__ inline void round_to(__half *to, float x)
{
    unsigned bits = __float_as_uint(x);
    bool     nan  = (bits & 0x7fffffffu) > 0x7f800000u;

    *to = nan ? __ushort_as_half((unsigned short)(bits >> 16 & 0x8000u | 0x7e00u))
              : __float2half_rn(x);
}

__device__ inline float  sum_of(float a, float b)   { return __fadd_rn(a, b); }
__device__ inline double sum_of(double a, double b) { return __dadd_rn(a, b); }

// Elements i to i+7, those below n.
template <bool Whole, typename T>
__device__ inline void store(T *x, int64_t i, int64_t n, const pack<T> &p)
{
    if constexpr (Whole) {
        *reinterpret_cast<pack<T> *>(x + i) = p;
    } else {
        for (int e = 0; e < EACH; e++)
            if (i + e < n)
                x[i + e] = p.x[e];
    }
}

template <typename T>
__device__ inline void add_squares(double *lane, const pack<T> &p)
{
    for (int e = 0; e < EACH; e++)
        lane[e] = __dadd_rn(lane[e], __dmul_rn(wide(p.x[e]), wide(p.x[e])));
}

// fp32 and fp64: grad += add.
template <bool Whole, typename T>
__device__ inline void add_row(double *lane, float *, T *grad, const T *add, int64_t i, int64_t n,
                               bool)
{
    pack<T> g = load<Whole>(grad, i, n), x = load<Whole>(add, i, n);

    for (int e = 0; e < EACH; e++)
        g.x[e] = sum_of(g.x[e], x.x[e]);
    store<Whole>(grad, i, n, g);
    add_squares(lane, g);
}

// 16-bit types: acc = (from_grad ? grad : acc) + add, grad = acc rounded.
template <bool Whole, typename T>
__device__ inline void add_row_16(double *lane, float *acc, T *grad, const T *add, int64_t i,
                                  int64_t n, bool from_grad)
{
    pack<float> a = {};
    pack<T>     g = {};
    pack<T>     x = load<Whole>(add, i, n);

    if (from_grad) {
        g = load<Whole>(grad, i, n);
        for (int e = 0; e < EACH; e++)
            a.x[e] = narrow(g.x[e]);
    } else {
        a = load<Whole>(acc, i, n);
    }
    for (int e = 0; e < EACH; e++) {
        a.x[e] = __fadd_rn(a.x[e], narrow(x.x[e]));
        round_to(&g.x[e], a.x[e]);
    }
    store<Whole>(acc, i, n, a);
    store<Whole>(grad, i, n, g);
    add_squares(lane, a);
}

template <bool Whole, typename T>
__device__ inline void add_rows(double *lane, float *acc, T *grad, const T *add, int64_t i,
                                int64_t n, bool from_grad)
{
#pragma unroll 4
    for (int row = 0; row < CHUNK / LANES; row++)
        if constexpr (sizeof(T) == 2)
            add_row_16<Whole>(lane, acc, grad, add, i + row * LANES, n, from_grad);
        else
            add_row<Whole>(lane, acc, grad, add, i + row * LANES, n, from_grad);
}

// The formulas above over chunks of 8192, and rule 1 of sumsq.h over what the optimizer will use:
// acc for 16-bit types, else grad.
//   acc [n] fp32 in/out, grad [n] T in/out, add [n] T in, sums [ceil(n/8192)] fp64 out.
// Chunks, lanes and threads as in sumsq_cuda.cu. Bytes an element: 16-bit types 12 (from_grad: 10);
// F32 12, F64 24. Expected: 4.0 to 4.3 TB/s of an H200's HBM, some
// 340 G elements/s for bf16.
template <typename T>
__global__ void __launch_bounds__(THREADS) add_chunks(float *__restrict__ acc, T *__restrict__ grad,
                                                      const T *__restrict__ add, int64_t n,
                                                      bool from_grad, double *__restrict__ sums)
{
    const bool    aligned = (reinterpret_cast<uintptr_t>(acc) | reinterpret_cast<uintptr_t>(grad)
                             | reinterpret_cast<uintptr_t>(add)) % 16 == 0;
    const int     thread  = threadIdx.x % WARP;
    const int64_t warps   = (int64_t)gridDim.x * (THREADS / WARP);
    int64_t       c       = (int64_t)blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;

    for (; c * CHUNK < n; c += warps) {
        double  lane[EACH] = {};
        int64_t i = c * CHUNK + thread * EACH;

        if (aligned && (c + 1) * CHUNK <= n)
            add_rows<true>(lane, acc, grad, add, i, n, from_grad);
        else
            add_rows<false>(lane, acc, grad, add, i, n, from_grad);
        double sum = fold(lane);
        if (thread == 0)
            sums[c] = sum;
    }
}

struct Order {
    cudaStream_t stream;
    float       *acc;
    void        *grad;
    const void  *add;
    int64_t      n;
    bool         from_grad;
    double      *sums, *out;
};

template <typename T>
void launch(const Order &o)
{
    const int64_t n_chunks = (o.n + CHUNK - 1) / CHUNK, blocks = blocks_for(n_chunks);

    if (n_chunks > 0)
        add_chunks<<<(unsigned)blocks, THREADS, 0, o.stream>>>(
            o.acc, static_cast<T *>(o.grad), static_cast<const T *>(o.add), o.n, o.from_grad,
            o.sums);
    sum_sums<<<1, LANES, 0, o.stream>>>(o.sums, n_chunks, o.out);
}

} // namespace

extern "C" const char *mt__accumulate_cuda(uintptr_t handle, mt_dtype dt, float *acc, void *grad,
                                           const void *add, int64_t n, int from_grad, double *sums,
                                           double *out)
{
    const Order order = { reinterpret_cast<cudaStream_t>(handle), acc, grad, add, n, from_grad != 0,
                          sums, out };
    mt::Current current(order.stream);

    if (!current.ok)
        return mt::NO_CONTEXT;
    switch (dt) {
    case MT_F32:  launch<float>(order); break;
    case MT_BF16: launch<bf16>(order); break;
    case MT_F16:  launch<__half>(order); break;
    default:      launch<double>(order); break;
    }
    return mt::launch_error();
}
