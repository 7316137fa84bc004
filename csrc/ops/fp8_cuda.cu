// fp8_cuda.cu — fp8.h on CUDA, to the definition's bits: codes by rows in one pass where only
// those are wanted; else a pass for the largest magnitudes and one for codes.
#include "fp8_cuda.h"
#include "kernel.cuh"
#include <cuda_fp8.h>

namespace {

using mt::vec;
using mt::WARP;

constexpr int THREADS = 256, WARPS = THREADS / WARP;

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

template <typename T, int W> struct Elements {
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

/* ---- codes by rows alone ---- */

// A row a block, which waits in shared memory while its largest magnitude is looked for. A row that
// is too long for that (shared 0) is read again.
// Bytes: 2 in and 1 out an element of 16 bits. Limit: HBM.
template <typename T, int W>
__global__ void __launch_bounds__(THREADS) rows_kernel(const mt_fp8 f, int shared)
{
    extern __shared__ uint4 memory[];
    Elements<T, W> *waits = reinterpret_cast<Elements<T, W> *>(memory), x;
    __shared__ unsigned found[WARPS];
    const T *row = static_cast<const T *>(f.x) + (int64_t)blockIdx.x * f.stride;
    const int packs = (int)(f.cols / W), warp = (int)threadIdx.x / WARP;
    unsigned most = 0;

    for (int i = (int)threadIdx.x; i < packs; i += THREADS) {
        x.load(row + (int64_t)i * W);
        if (shared)
            waits[i] = x;                         // read again by this thread alone
        most = larger<T>(most, x.most());
    }
    most = warp_most(folded<T>(most));
    if (threadIdx.x % WARP == 0)
        found[warp] = most;
    __syncthreads();
    for (int i = 0; i < WARPS; i++)
        most = max(most, found[i]);

    const unsigned scale = mt_fp8_scale_bits(wide_bits<T>(most));
    const float inverse = __uint_as_float(mt_fp8_inverse_bits(scale));

    if (threadIdx.x == 0)
        f.row_scale[blockIdx.x] = __uint_as_float(scale);
    for (int i = (int)threadIdx.x; i < packs; i += THREADS) {
        if (shared)
            x = waits[i];
        else
            x.load(row + (int64_t)i * W);
        store_codes<T, W>(f.by_rows + (int64_t)blockIdx.x * f.cols + (int64_t)i * W, x, inverse);
    }
}

/* ---- largest magnitudes of rows and columns ---- */

constexpr int TALL = 256;       // rows of a block; columns: one pack for each thread of a warp

// row_scale and column_scale, zeros before, get the bits of the largest magnitudes: the largest of
// integers is the same in every order, so these atomics leave nothing to chance.
// Bytes: 2 in an element of 16 bits. Limit: HBM.
template <typename T, int W>
__global__ void __launch_bounds__(THREADS) most_kernel(const mt_fp8 f)
{
    constexpr int WORDS = Elements<T, W>::WORDS, EACH = W / WORDS;
    __shared__ unsigned found[WARPS][WORDS][WARP];
    const int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP;
    const int64_t col = ((int64_t)blockIdx.x * WARP + lane) * W, first = (int64_t)blockIdx.y * TALL;
    const T *from = static_cast<const T *>(f.x) + col;
    unsigned most[WORDS] = { 0 };

#pragma unroll 4
    for (int i = warp; i < TALL; i += WARPS) {
        Elements<T, W> x;

        x.zero();
        if (col < f.cols && first + i < f.rows)
            x.load(from + (first + i) * f.stride);
        for (int w = 0; w < WORDS; w++)
            most[w] = larger<T>(most[w], magnitude<T>(x.u[w]));
        if (f.by_rows != nullptr && first + i < f.rows) {
            const unsigned row = warp_most(folded<T>(x.most()));

            if (lane == 0)
                atomicMax(reinterpret_cast<unsigned *>(f.row_scale) + first + i, wide_bits<T>(row));
        }
    }
    if (f.by_columns == nullptr)
        return;
    for (int w = 0; w < WORDS; w++)
        found[warp][w][lane] = most[w];
    __syncthreads();
    for (int at = (int)threadIdx.x; at < WORDS * WARP; at += THREADS) {
        const int word = at / WARP, whose = at % WARP;
        const int64_t to = ((int64_t)blockIdx.x * WARP + whose) * W + word * EACH;
        unsigned m = 0;

        for (int i = 0; i < WARPS; i++)
            m = larger<T>(m, found[i][word][whose]);
        for (int e = 0; e < EACH && to + e < f.cols; e++)
            atomicMax(reinterpret_cast<unsigned *>(f.column_scale) + to + e,
                      wide_bits<T>(EACH == 2 ? (e ? m >> 16 : m & 0xffffu) : m));
    }
}

// In place: a largest magnitude's bits become its scale.
__global__ void scales_kernel(float *of_rows, int64_t rows, float *of_columns, int64_t columns)
{
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    float *at = i < rows ? of_rows + i : i < rows + columns ? of_columns + (i - rows) : nullptr;

    if (at != nullptr)
        *at = __uint_as_float(mt_fp8_scale_bits(__float_as_uint(*at)));
}

/* ---- codes by columns, and by rows beside them ---- */

constexpr int TILE_ROWS = 128, TILE_COLS = 64;

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

// A thread has four rows of W columns: of each column four codes are one word, which goes through
// shared memory to where the column lies.
// Bytes: 2 in, 1 or 2 out an element of 16 bits. Limit: HBM.
template <typename T, int W>
__global__ void __launch_bounds__(THREADS) tile_kernel(const mt_fp8 f)
{
    constexpr int ACROSS = TILE_COLS / W, GROUPS = TILE_ROWS / 4;
    __shared__ unsigned columns[TILE_COLS][GROUPS + 1];
    const int64_t row0 = (int64_t)blockIdx.y * TILE_ROWS, col0 = (int64_t)blockIdx.x * TILE_COLS;

    for (int job = (int)threadIdx.x; job < ACROSS * GROUPS; job += THREADS) {
        const int across = job % ACROSS * W, group = job / ACROSS;
        const int64_t row = row0 + group * 4, col = col0 + across;
        Elements<T, W> x[4];

        if (col >= f.cols || row >= f.rows) {                  // behind the last row zeros
            for (int c = 0; c < W; c++)
                columns[across + c][group] = 0;
            continue;
        }
        for (int i = 0; i < 4; i++)
            if (row + i < f.rows)
                x[i].load(static_cast<const T *>(f.x) + (row + i) * f.stride + col);
            else
                x[i].zero();
        if (f.by_rows != nullptr)
            for (int i = 0; i < 4; i++)
                if (row + i < f.rows)
                    store_codes<T, W>(f.by_rows + (row + i) * f.cols + col, x[i],
                                      inverse_of(f.row_scale[row + i]));
        float inverse[W];

        load_inverses<W>(inverse, f.column_scale + col);
        const unsigned there = f.rows - row >= 4 ? 0xffffffffu
                                                 : (1u << 8 * (unsigned)(f.rows - row)) - 1;
        for (int c = 0; c < W; c++)
            columns[across + c][group] =
                there & (two_codes(x[0].at(c) * inverse[c], x[1].at(c) * inverse[c]) |
                         two_codes(x[2].at(c) * inverse[c], x[3].at(c) * inverse[c]) << 16);
    }
    __syncthreads();

    const int lane = (int)threadIdx.x % WARP;
    const int64_t row = row0 + lane * 4;

    static_assert(GROUPS == WARP, "a column of a tile is a word for each thread of a warp");
    for (int c = (int)threadIdx.x / WARP; c < TILE_COLS && col0 + c < f.cols; c += WARPS)
        if (row < f.wide)
            *reinterpret_cast<unsigned *>(f.by_columns + (col0 + c) * f.wide + row) =
                columns[c][lane];
}

/* ---- what is left of a product ---- */

// Bytes: 4 to 6 an element of 16 bits. Limit: HBM. Only where cublasLt scales no rows.
template <typename T>
__global__ void finish_kernel(const mt_gemm g, const T *sums, float alpha)
{
    const int64_t n = g.c.cols, i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;

    if (i >= g.c.rows * n)
        return;
    const int64_t row = i / n, col = i % n;
    float x = alpha * (mt::widen(sums[i]) * g.a_scale[row] * g.b_scale[col]);

    if (g.bias != nullptr)
        x += mt::widen(static_cast<const T *>(g.bias)[col]);
    if (g.base != nullptr)
        x += mt::widen(static_cast<const T *>(g.base)[row * g.base_ld + col]);
    static_cast<T *>(g.c.data)[row * g.c.ld + col] = mt::narrow<T>(x);
}

/* ---- launches ---- */

inline unsigned blocks(int64_t n, int64_t each) { return (unsigned)((n + each - 1) / each); }

template <typename T, int W> const char *launch(cudaStream_t stream, const mt_fp8 &f)
{
    constexpr int64_t SHARED = 48 << 10;

    if (f.by_columns == nullptr) {
        const int64_t bytes = f.cols / W * (int64_t)sizeof(Elements<T, W>);
        const int shared = bytes <= SHARED;

        rows_kernel<T, W><<<(unsigned)f.rows, THREADS, shared ? bytes : 0, stream>>>(f, shared);
        return mt::launch_error();
    }
    const int64_t rows = f.by_rows == nullptr ? 0 : f.rows;
    const dim3    grid(blocks(f.cols, WARP * W), blocks(f.rows, TALL));

    if (rows > 0)
        (void)cudaMemsetAsync(f.row_scale, 0, (size_t)rows * sizeof(float), stream);
    (void)cudaMemsetAsync(f.column_scale, 0, (size_t)f.cols * sizeof(float), stream);
    most_kernel<T, W><<<grid, THREADS, 0, stream>>>(f);
    scales_kernel<<<blocks(rows + f.cols, THREADS), THREADS, 0, stream>>>(f.row_scale, rows,
                                                                          f.column_scale, f.cols);
    tile_kernel<T, W><<<dim3(blocks(f.cols, TILE_COLS), blocks(f.wide, TILE_ROWS)), THREADS, 0,
                        stream>>>(f);
    return mt::launch_error();
}

template <typename T> const char *launch_width(cudaStream_t stream, const mt_fp8 &f)
{
    constexpr int W = 16 / sizeof(T);
    const bool packs = mt::aligned16(f.x) && mt::aligned16(f.by_rows) && f.cols % W == 0 &&
                       mt::aligned16(f.column_scale) && f.stride % W == 0;

    return packs ? launch<T, W>(stream, f) : launch<T, 1>(stream, f);
}

} // namespace

extern "C" const char *mt__fp8_cast_cuda(uintptr_t handle, const mt_fp8 *f)
{
    cudaStream_t stream = reinterpret_cast<cudaStream_t>(handle);
    mt::Current  current(stream);

    if (!current.ok)
        return mt::NO_CONTEXT;
    if (f->rows == 0 || f->cols == 0)
        return nullptr;
    switch (f->dtype) {
    case MT_F32:  return launch_width<float>(stream, *f);
    case MT_BF16: return launch_width<__nv_bfloat16>(stream, *f);
    default:      return launch_width<__half>(stream, *f);
    }
}

extern "C" const char *mt__fp8_finish_cuda(uintptr_t handle, const mt_gemm *g, const void *sums,
                                           float alpha)
{
    cudaStream_t   stream = reinterpret_cast<cudaStream_t>(handle);
    const unsigned n = blocks(g->c.rows * g->c.cols, THREADS);
    mt::Current    current(stream);

    if (!current.ok)
        return mt::NO_CONTEXT;
    if (g->c_type == MT_F32)
        finish_kernel<<<n, THREADS, 0, stream>>>(*g, static_cast<const float *>(sums), alpha);
    else
        finish_kernel<<<n, THREADS, 0, stream>>>(
            *g, static_cast<const __nv_bfloat16 *>(sums), alpha);
    return mt::launch_error();
}
