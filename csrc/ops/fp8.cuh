// fp8.cuh — codes on CUDA: largest magnitudes, scales, and packs of elements that become codes.
//
// For .cu files only; fp8.h is the definition.
#ifndef MT_FP8_CUH
#define MT_FP8_CUH

#include "fp8.h"
#include "kernel.cuh"
#include <cuda_fp8.h>

namespace mt {

constexpr int CODE_THREADS = 256, CODE_WARPS = CODE_THREADS / WARP;

/* ---- magnitudes: their bits have their order, so a largest one is a largest integer ---- */

// A word has two patterns of 16 bits, or one of 32.
template <typename T> __device__ inline unsigned magnitude(unsigned word)
{
    return word & (sizeof(T) == 2 ? 0x7fff7fffu : 0x7fffffffu);
}

template <typename T> __device__ inline unsigned larger(unsigned a, unsigned b)
{
    return sizeof(T) == 2 ? __vmaxu2(a, b) : max(a, b);
}

// The larger pattern of a word.
template <typename T> __device__ inline unsigned folded(unsigned word)
{
    return sizeof(T) == 2 ? max(word & 0xffffu, word >> 16) : word;
}

// A pattern's number as fp32, of which only a magnitude's bits are taken.
template <typename T> __device__ inline unsigned wide_bits(unsigned pattern)
{
    if constexpr (std::is_same_v<T, __half>)
        return __float_as_uint(__half2float(__ushort_as_half((unsigned short)pattern)));
    else
        return sizeof(T) == 2 ? pattern << 16 : pattern;
}

__device__ inline unsigned warp_most(unsigned x)
{
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(0xffffffffu, x);
#else
    for (int apart = WARP / 2; apart > 0; apart /= 2)
        x = max(x, __shfl_xor_sync(0xffffffffu, x, apart));
    return x;
#endif
}

__device__ inline float inverse_of(float scale)
{
    return __uint_as_float(mt_fp8_inverse_bits(__float_as_uint(scale)));
}

/* ---- W elements in a row: 16 bytes, or one where rows do not lie so ---- */

template <typename T, int W> struct alignas(W == 1 ? 4 : 16) Elements {
    static constexpr int WORDS = W == 1 ? 1 : 4;
    unsigned u[WORDS];

    __device__ void load(const T *p)
    {
        if constexpr (W > 1) {
            const uint4 x = *reinterpret_cast<const uint4 *>(p);
            u[0] = x.x, u[1] = x.y, u[2] = x.z, u[3] = x.w;
        } else if constexpr (sizeof(T) == 2) {
            u[0] = *reinterpret_cast<const unsigned short *>(p);
        } else {
            u[0] = *reinterpret_cast<const unsigned *>(p);
        }
    }
    __device__ void zero()
    {
        for (int i = 0; i < WORDS; i++)
            u[i] = 0;
    }
    __device__ float at(int i) const
    {
        if constexpr (sizeof(T) == 4)
            return __uint_as_float(u[i]);
        const unsigned pattern = i % 2 ? u[i / 2] >> 16 : u[i / 2] & 0xffffu;
        if constexpr (std::is_same_v<T, __half>)
            return __half2float(__ushort_as_half((unsigned short)pattern));
        return __uint_as_float(pattern << 16);
    }
    __device__ unsigned most() const
    {
        unsigned m = 0;

        for (int i = 0; i < WORDS; i++)
            m = larger<T>(m, magnitude<T>(u[i]));
        return m;
    }
};

__device__ inline unsigned two_codes(float low, float high)
{
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

// W codes, in as many bytes.
template <typename T, int W>
__device__ inline void store_codes(uint8_t *to, const Elements<T, W> &x, float inverse)
{
    if constexpr (W == 1) {
        *to = (uint8_t)two_codes(x.at(0) * inverse, 0.0f);
    } else {
        unsigned code[W / 4];

        for (int i = 0; i < W; i += 4)
            code[i / 4] = two_codes(x.at(i) * inverse, x.at(i + 1) * inverse) |
                          two_codes(x.at(i + 2) * inverse, x.at(i + 3) * inverse) << 16;
        if constexpr (W == 8)
            *reinterpret_cast<uint2 *>(to) = make_uint2(code[0], code[1]);
        else
            *reinterpret_cast<unsigned *>(to) = code[0];
    }
}

// Of W scales, which lie at 16 bytes where W is more than one.
template <int W> __device__ inline void load_inverses(float (&to)[W], const float *scales)
{
    if constexpr (W == 1)
        to[0] = inverse_of(*scales);
    else
        for (int c = 0; c < W; c += 4) {
            const float4 s = *reinterpret_cast<const float4 *>(scales + c);

            to[c] = inverse_of(s.x), to[c + 1] = inverse_of(s.y);
            to[c + 2] = inverse_of(s.z), to[c + 3] = inverse_of(s.w);
        }
}

/* ---- blocks ---- */

// The largest of all threads' patterns, given to each.
template <typename T> __device__ inline unsigned block_most(unsigned most)
{
    __shared__ unsigned found[CODE_WARPS];

    most = warp_most(folded<T>(most));
    if (threadIdx.x % WARP == 0)
        found[threadIdx.x / WARP] = most;
    __syncthreads();
    for (int i = 0; i < CODE_WARPS; i++)
        most = max(most, found[i]);
    return most;
}

// Four of a column's codes are a word, of which those behind the last row are zeros.
__device__ inline unsigned there(int64_t rows_left)
{
    return rows_left >= 4 ? 0xffffffffu
         : rows_left <= 0 ? 0u : (1u << 8 * (unsigned)rows_left) - 1;
}

constexpr int TALL = 256;       // rows of a block that looks for magnitudes; columns: a pack a lane
constexpr int TILE_ROWS = 128, TILE_COLS = 64, TILE_WORDS = TILE_ROWS / 4;
// Bytes of a row that may wait in shared memory: 48 KiB without what kernels have there besides.
constexpr int64_t WAITS = (48 << 10) - 256;

static_assert(TILE_WORDS == WARP, "a column of a tile is a word for each thread of a warp");

// In place: a largest magnitude's bits become its scale.
static __global__ void scales_kernel(float *of_rows, int64_t rows, float *of_columns,
                                     int64_t columns)
{
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    float *at = i < rows ? of_rows + i : i < rows + columns ? of_columns + (i - rows) : nullptr;

    if (at != nullptr)
        *at = __uint_as_float(mt_fp8_scale_bits(__float_as_uint(*at)));
}

// Codes by columns with a shift of rows, by a block for each TILE_COLS of them, which goes through
// all rows twice: some layers have such rows, and most do not; there this ends where it begins.
// source.get(row, col, pack) makes W elements.
// Bytes: 4 in, 1 out an element of 16 bits. Limit: the rate of as many blocks as there are.
template <typename T, int W, typename Source>
__device__ inline void recast(const Source &source, const mt_fp8 &f)
{
    constexpr int ACROSS = TILE_COLS / W;
    __shared__ unsigned most[TILE_COLS], columns[TILE_COLS][TILE_WORDS + 1];
    const int     thread = (int)threadIdx.x, own = thread % ACROSS * W;
    const int64_t col0 = (int64_t)blockIdx.x * TILE_COLS;
    unsigned      found[W] = {};

    if (f.shift[f.rows] == 0)
        return;
    if (thread < TILE_COLS)
        most[thread] = 0;
    __syncthreads();
    for (int64_t row = thread / ACROSS; row < f.rows && col0 + own < f.cols;
         row += CODE_THREADS / ACROSS) {
        const float     factor = mt_fp8_factor(f.shift, f.sign, row);
        Elements<T, W>  x;

        source.get(row, col0 + own, x);
        for (int c = 0; c < W; c++)
            found[c] = max(found[c], __float_as_uint(x.at(c) * factor) & 0x7fffffffu);
    }
    for (int c = 0; c < W; c++)
        atomicMax(&most[own + c], found[c]);
    __syncthreads();
    if (thread < TILE_COLS) {
        const unsigned scale = mt_fp8_scale_bits(most[thread]);

        if (col0 + thread < f.cols)
            f.column_scale[col0 + thread] = __uint_as_float(scale);
        most[thread] = mt_fp8_inverse_bits(scale);
    }
    __syncthreads();
    for (int64_t row0 = 0; row0 < f.wide; row0 += TILE_ROWS) {
        for (int job = thread; job < ACROSS * TILE_WORDS; job += CODE_THREADS) {
            const int      across = job % ACROSS * W, group = job / ACROSS;
            const int64_t  row = row0 + group * 4;
            Elements<T, W> x[4];
            float          factor[4];

            for (int i = 0; i < 4; i++) {
                const bool is = row + i < f.rows && col0 + across < f.cols;

                factor[i] = is ? mt_fp8_factor(f.shift, f.sign, row + i) : 0.0f;
                if (is)
                    source.get(row + i, col0 + across, x[i]);
                else
                    x[i].zero();
            }
            for (int c = 0; c < W; c++) {
                const float by = __uint_as_float(most[across + c]);

                columns[across + c][group] = there(f.rows - row) &
                    (two_codes(x[0].at(c) * factor[0] * by, x[1].at(c) * factor[1] * by) |
                     two_codes(x[2].at(c) * factor[2] * by, x[3].at(c) * factor[3] * by) << 16);
            }
        }
        __syncthreads();

        const int64_t to = row0 + thread % WARP * 4;

        for (int c = thread / WARP; c < TILE_COLS && col0 + c < f.cols; c += CODE_WARPS)
            if (to < f.wide)
                *reinterpret_cast<unsigned *>(f.by_columns + (col0 + c) * f.wide + to) =
                    columns[c][thread % WARP];
        __syncthreads();
    }
}

inline unsigned blocks(int64_t n, int64_t each) { return (unsigned)((n + each - 1) / each); }

} // namespace mt

#endif
