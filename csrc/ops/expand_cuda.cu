// expand_cuda.cu — expand.h on CUDA, to the definition's bits: products and sums are rounded one
// by one, as they are written there.
#include "expand_cuda.h"
#include "kernel.cuh"
#include <cuda_fp8.h>

namespace {

using mt::vec;

constexpr int THREADS = 256;
constexpr int EACH = 4;              // packs of a thread, so many loads are under way at a time

__constant__ const float NF4[16] = MT_NF4_NUMBERS;
__constant__ const float FP4[16] = MT_FP4_NUMBERS;
__constant__ const float E2M1[16] = MT_E2M1_NUMBERS;

// W elements at p: 16 bytes where W is more than 1.
template <typename T, int W> __device__ inline void store(T *p, const float (&x)[W])
{
    if constexpr (W == 1)
        *p = mt::narrow<T>(x[0]);
    else
        mt::store_vec(p, mt::rounded<T>(x));
}

// So many bytes of codes as one load.
template <int BYTES> struct word;
template <> struct word<1> { using type = unsigned char; };
template <> struct word<2> { using type = unsigned short; };
template <> struct word<4> { using type = unsigned; };
template <> struct word<8> { using type = unsigned long long; };

/* ---- codes that lie as their weights do: NF4, FP4, INT8, FP8 ---- */

// What a thread knows of one format: the number of a pack's element j, and the scale of pack p,
// whose elements have one. Packs are counted in 32 bits: a division of 64 takes as long as a store.
struct Four {
    static constexpr int HALVES = 1;         // bytes of two codes
    const float *table, *map;                // in shared memory
    const mt_expand &x;

    __device__ Four(const mt_expand &of, float *memory) : table(memory), map(memory + 16), x(of)
    {
        const float *numbers = x.format == MT_EXPAND_NF4 ? NF4 : FP4;

        if (threadIdx.x < 16)
            memory[threadIdx.x] = numbers[threadIdx.x];
        if (x.map != nullptr)
            for (int i = (int)threadIdx.x; i < 256; i += THREADS)
                memory[16 + i] = x.map[i];
        __syncthreads();
    }
    template <int W> __device__ float scale(unsigned p) const
    {
        const int64_t block = (int64_t)p * W >> x.group_bits;

        if (x.wide == nullptr)
            return static_cast<const float *>(x.scales)[block];
        return __fadd_rn(__fmul_rn(map[static_cast<const uint8_t *>(x.scales)[block]],
                                   x.wide[block / MT_EXPAND_WIDE]), *x.offset);
    }
    // bits: a pack's bytes, the first lowest. first: whether the pack's first element is a byte's.
    __device__ float number(unsigned long long bits, int j, bool first) const
    {
        const int at = first ? j : j + 1;

        return table[bits >> (at / 2 * 8 + (at % 2 ? 0 : 4)) & 15u];
    }
};

struct Int8 {
    static constexpr int HALVES = 2;
    const mt_expand &x;

    __device__ Int8(const mt_expand &of, float *) : x(of) {}
    template <int W> __device__ float scale(unsigned p) const
    {
        const unsigned r = p / (unsigned)(x.cols / W);

        return __fmul_rn(static_cast<const float *>(x.scales)[r], 1.0f / 127.0f);
    }
    __device__ float number(unsigned long long bits, int j, bool) const
    {
        return (float)(signed char)(bits >> 8 * j & 0xffu);
    }
};

struct Fp8 {
    static constexpr int HALVES = 2;
    const mt_expand &x;

    __device__ Fp8(const mt_expand &of, float *) : x(of) {}
    template <int W> __device__ float scale(unsigned p) const
    {
        const unsigned across = (unsigned)(x.cols / W), r = p / across, c = (p - r * across) * W;

        return static_cast<const float *>(x.scales)[r / (unsigned)x.block_rows * x.blocks +
                                                    c / (unsigned)x.block_cols];
    }
    __device__ float number(unsigned long long bits, int j, bool) const
    {
        const __half_raw h = __nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)(bits >> 8 * j & 0xffu),
                                                     __NV_E4M3);

        return __half2float(__half(h));
    }
};

// W elements in a row a pack, EACH packs a thread, those of a block side by side.
// Bytes: 2 out an element of 16 bits, 1/2 (NF4, FP4) or 1 in, and the scales. Limit: HBM.
template <typename Format, typename T, int W>
__global__ void __launch_bounds__(THREADS) expand_kernel(const mt_expand x)
{
    constexpr int BYTES = W == 1 ? 1 : W * Format::HALVES / 2;
    using Word = typename word<BYTES>::type;

    __shared__ float memory[16 + 256];
    const Format  format(x, memory);
    const unsigned packs = (unsigned)(x.rows * x.cols / W);
    const unsigned begin = blockIdx.x * THREADS * EACH + threadIdx.x;
    const uint8_t *codes = static_cast<const uint8_t *>(x.codes);
    Word  bits[EACH];
    float scale[EACH];

#pragma unroll
    for (int n = 0; n < EACH; n++) {
        const unsigned p = begin + n * THREADS;

        if (p < packs) {
            bits[n] = *reinterpret_cast<const Word *>(codes + (int64_t)p * W * Format::HALVES / 2);
            scale[n] = format.template scale<W>(p);
        }
    }
#pragma unroll
    for (int n = 0; n < EACH; n++) {
        const unsigned p = begin + n * THREADS;
        float found[W];

        if (p >= packs)
            return;
        for (int j = 0; j < W; j++)
            found[j] = __fmul_rn(format.number(bits[n], j, W > 1 || p % 2 == 0), scale[n]);
        store<T, W>(static_cast<T *>(x.out) + (int64_t)p * W, found);
    }
}

template <typename Format, typename T, int W>
const char *launch(cudaStream_t stream, const mt_expand &x)
{
    const int64_t each = (int64_t)THREADS * EACH * W;
    const int64_t blocks = (x.rows * x.cols + each - 1) / each;

    if (x.rows * x.cols / W >= (int64_t)1 << 31)
        return "a weight of more than 2^31 packs of elements";
    expand_kernel<Format, T, W><<<(unsigned)blocks, THREADS, 0, stream>>>(x);
    return mt::launch_error();
}

// Packs: no scale ends within one, and both sides begin where a pack may.
template <typename Format, typename T>
const char *launch_flat(cudaStream_t stream, const mt_expand &x, int64_t run)
{
    constexpr int W = 16 / sizeof(T);
    const bool packs = run % W == 0 && x.rows * x.cols % W == 0 && mt::aligned16(x.out) &&
                       reinterpret_cast<uintptr_t>(x.codes) % 8 == 0;

    return packs ? launch<Format, T, W>(stream, x) : launch<Format, T, 1>(stream, x);
}

/* ---- MXFP4: transposed by way of shared memory ---- */

constexpr int TILE = 64;             // of n
constexpr int DEEP = 128;            // of k: a group for each of THREADS / TILE
static_assert(DEEP / MT_MXFP4_GROUP * TILE == THREADS, "a thread has a group");

// Bytes: 1/2 in and 2 out an element of 16 bits. Limit: HBM.
template <typename T, int W>
__global__ void __launch_bounds__(THREADS) turn_kernel(const mt_expand x)
{
    constexpr int APART = TILE + 16 / sizeof(T);
    __shared__ alignas(16) T tile[DEEP][APART];
    __shared__ float table[16];
    const int64_t groups = x.rows / MT_MXFP4_GROUP, e = blockIdx.z;
    const int64_t k0 = (int64_t)blockIdx.x * DEEP, n0 = (int64_t)blockIdx.y * TILE;
    const uint8_t *codes = static_cast<const uint8_t *>(x.codes) + e * x.cols * x.rows / 2;
    const uint8_t *scales = static_cast<const uint8_t *>(x.scales) + e * x.cols * groups;
    T *out = static_cast<T *>(x.out) + e * x.rows * x.cols;
    // A thread has a group of one n: neighbours' numbers lie beside each other in the tile.
    const int     column = (int)threadIdx.x % TILE, part = (int)threadIdx.x / TILE;
    const int64_t n = n0 + column, k = k0 + part * MT_MXFP4_GROUP;

    if (threadIdx.x < 16)
        table[threadIdx.x] = E2M1[threadIdx.x];
    __syncthreads();
    if (n < x.cols && k < x.rows) {
        const uint4 all = *reinterpret_cast<const uint4 *>(codes + (n * x.rows + k) / 2);
        const float by = __uint_as_float(
            mt_expand_power_bits(scales[n * groups + k / MT_MXFP4_GROUP]));
        const unsigned eight[4] = { all.x, all.y, all.z, all.w };

#pragma unroll
        for (int j = 0; j < MT_MXFP4_GROUP; j++) {
            const unsigned code = eight[j / 8] >> 4 * (j % 8) & 15u;

            tile[part * MT_MXFP4_GROUP + j][column] = mt::narrow<T>(__fmul_rn(table[code], by));
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = (int)threadIdx.x; i < DEEP * TILE / W; i += THREADS) {
        const int row = i / (TILE / W), at = i % (TILE / W) * W;

        if (k0 + row < x.rows && n0 + at < x.cols) {
            T *to = out + (k0 + row) * x.cols + n0 + at;

            if constexpr (W == 1)
                *to = tile[row][at];
            else
                mt::store_vec(to, mt::load_vec(&tile[row][at]));
        }
    }
}

template <typename T> const char *launch_turn(cudaStream_t stream, const mt_expand &x)
{
    constexpr int W = 16 / sizeof(T);
    const dim3 grid((unsigned)((x.rows + DEEP - 1) / DEEP), (unsigned)((x.cols + TILE - 1) / TILE),
                    (unsigned)x.experts);

    if (!mt::aligned16(x.codes))
        return "codes of MXFP4 that begin at no multiple of 16 bytes";
    if (x.cols % W == 0 && mt::aligned16(x.out))
        turn_kernel<T, W><<<grid, THREADS, 0, stream>>>(x);
    else
        turn_kernel<T, 1><<<grid, THREADS, 0, stream>>>(x);
    return mt::launch_error();
}

template <typename T> const char *launch_format(cudaStream_t stream, const mt_expand &x)
{
    switch (x.format) {
    case MT_EXPAND_INT8:  return launch_flat<Int8, T>(stream, x, x.cols);
    case MT_EXPAND_FP8:   return launch_flat<Fp8, T>(stream, x, x.block_cols);
    case MT_EXPAND_MXFP4: return launch_turn<T>(stream, x);
    default:              return launch_flat<Four, T>(stream, x, (int64_t)1 << x.group_bits);
    }
}

} // namespace

extern "C" const char *mt__expand_cuda(uintptr_t handle, const mt_expand *x)
{
    cudaStream_t stream = reinterpret_cast<cudaStream_t>(handle);
    mt::Current  current(stream);

    if (!current.ok)
        return mt::NO_CONTEXT;
    if (x->rows == 0 || x->cols == 0 || x->experts == 0)
        return nullptr;
    switch (x->dtype) {
    case MT_F32:  return launch_format<float>(stream, *x);
    case MT_BF16: return launch_format<__nv_bfloat16>(stream, *x);
    default:      return launch_format<__half>(stream, *x);
    }
}
