// adam_weight.cuh — private to csrc/optim: types of weights and gradients,
// and how a weight is kept, in CUDA.
#ifndef MT_ADAM_WEIGHT_CUH
#define MT_ADAM_WEIGHT_CUH

#include "../ops/kernel.cuh"

namespace {

constexpr int EACH = 4;                       // neighbours that a thread takes: 16 bytes of fp32

struct bf16 { unsigned short bits; };
struct f16  { unsigned short bits; };

template <typename T> struct alignas(sizeof(T) * EACH) four { T x[EACH]; };

__device__ inline float wide(float x) { return x; }
__device__ inline float wide(bf16 x)  { return __uint_as_float((unsigned)x.bits << 16); }
__device__ inline float wide(f16 x)   { return __half2float(__ushort_as_half(x.bits)); }

// To nearest, ties to even; NaN as core/dtype.c writes it.
__device__ inline f16 to_f16(float x)
{
    unsigned bits = __float_as_uint(x);

    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return { (unsigned short)((bits >> 16 & 0x8000u) | 0x7e00u) };
    return { __half_as_ushort(__float2half_rn(x)) };
}

// How p is kept: see adam.h. Low is the type of what stands beside hi.
template <typename W> struct Weight;

template <> struct Weight<float> {
    using Low = float;                        // there is none: neither read nor written
    static constexpr bool has_low = false;
    static __device__ float join(float hi, float) { return hi; }
    static __device__ void  split(float p, float *hi, float *) { *hi = p; }
};

template <> struct Weight<bf16> {
    using Low = short;
    static constexpr bool has_low = true;
    static __device__ float join(bf16 hi, short lo)
    {
        return __uint_as_float(((unsigned)hi.bits << 16) + (unsigned)(int)lo);
    }
    static __device__ void split(float p, bf16 *hi, short *lo)
    {
        unsigned bits = __float_as_uint(p), sign = bits & 0x80000000u, size = bits ^ sign;

        bits = size > 0x7f800000u ? 0x7fc00000u
             : sign | (size - 0x7f7f8000u < 0x8000u ? 0x7f7f7fffu : size);
        hi->bits = (unsigned short)((bits + 0x8000u) >> 16);
        *lo = (short)(unsigned short)bits;
    }
};

template <> struct Weight<f16> {
    using Low = float;
    static constexpr bool has_low = true;
    static __device__ float join(f16 hi, float master)
    {
        return hi.bits == to_f16(master).bits ? master : wide(hi);
    }
    static __device__ void split(float p, f16 *hi, float *master)
    {
        *hi = to_f16(p);
        *master = p;
    }
};

// 16 bytes suit every plane; torch may hand out tensors that begin anywhere.
template <typename Tensor> __device__ inline bool aligned(const Tensor &t)
{
    uintptr_t all = reinterpret_cast<uintptr_t>(t.hi) | reinterpret_cast<uintptr_t>(t.low)
                  | reinterpret_cast<uintptr_t>(t.m) | reinterpret_cast<uintptr_t>(t.v)
                  | reinterpret_cast<uintptr_t>(t.grad);
    return all % 16 == 0;
}

/* ---- a launch: a table of tensors, and blocks that take a chunk of one at a time ---- */

template <typename Tensor, int MOST> struct Table {
    Tensor  t[MOST];
    int64_t first[MOST + 1];                // number of each one's first chunk, then of all chunks
    int     n;
};

// The last tensor whose first chunk is not after c; the same for all threads of a block.
template <typename T> __device__ inline int tensor_of(const T &table, int64_t c)
{
    int low = 0, high = table.n - 1;

    while (low < high) {
        int middle = (low + high + 1) / 2;

        if (table.first[middle] <= c)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

// The table of a launch; the number of all chunks.
template <typename Tensor, int MOST>
inline int64_t fill(Table<Tensor, MOST> &table, const Tensor *t, int n_tensors, int64_t chunk)
{
    int64_t chunks = 0;

    for (int i = 0; i < n_tensors; i++) {
        if (t[i].n <= 0)
            continue;
        table.t[table.n] = t[i];
        table.first[table.n++] = chunks;
        chunks += (t[i].n - 1) / chunk + 1;
    }
    table.first[table.n] = chunks;
    return chunks;
}

// NULL, or what went wrong. chunk: elements of one tensor that a block takes at a time.
template <int MOST, typename Tensor>
inline const char *launch(void (*kernel)(Table<Tensor, MOST>), uintptr_t handle, const Tensor *t,
                          int n_tensors, int threads, int64_t chunk)
{
    static_assert(sizeof(Table<Tensor, MOST>) <= 4096, "what a launch takes as its arguments");
    const int64_t       most = 1 << 20;       // blocks; what is beyond, they take in turn
    cudaStream_t        stream = reinterpret_cast<cudaStream_t>(handle);
    mt::Current         current(stream);
    Table<Tensor, MOST> table = {};

    if (!current.ok)
        return mt::NO_CONTEXT;
    const int64_t chunks = fill(table, t, n_tensors, chunk);
    if (chunks == 0)
        return nullptr;
    kernel<<<(unsigned)(chunks < most ? chunks : most), threads, 0, stream>>>(table);
    return mt::launch_error();
}

} // namespace

#endif
