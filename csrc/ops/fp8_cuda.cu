// fp8_cuda.cu — fp8.h on CUDA, to the definition's bits: codes by rows in one pass where only
// those are wanted; else a pass for the largest magnitudes and one for codes.
#include "fp8_cuda.h"
#include "fp8.cuh"

namespace {

using namespace mt;

constexpr int THREADS = CODE_THREADS, WARPS = CODE_WARPS;

/* ---- codes by rows alone ---- */

// A row a block, which waits in shared memory while its largest magnitude is looked for. A row that
// is too long for that (shared 0) is read again.
// Bytes: 2 in and 1 out an element of 16 bits. Limit: HBM.
template <typename T, int W>
__global__ void __launch_bounds__(THREADS) rows_kernel(const mt_fp8 f, int shared)
{
    extern __shared__ uint4 memory[];
    Elements<T, W> *waits = reinterpret_cast<Elements<T, W> *>(memory), x;
    const T *row = static_cast<const T *>(f.x) + (int64_t)blockIdx.x * f.stride;
    const int packs = (int)(f.cols / W);
    unsigned most = 0;

    for (int i = (int)threadIdx.x; i < packs; i += THREADS) {
        x.load(row + (int64_t)i * W);
        if (shared)
            waits[i] = x;                         // read again by this thread alone
        most = larger<T>(most, x.most());
    }
    most = block_most<T>(most);

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
        if (f.row_scale != nullptr && first + i < f.rows) {
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

/* ---- codes by columns, and by rows beside them ---- */

// A thread has four rows of W columns: of each column four codes are one word, which goes through
// shared memory to where the column lies.
// Bytes: 2 in, 1 or 2 out an element of 16 bits. Limit: HBM.
template <typename T, int W>
__global__ void __launch_bounds__(THREADS, 5) tile_kernel(const mt_fp8 f)
{
    constexpr int ACROSS = TILE_COLS / W, GROUPS = TILE_WORDS;
    __shared__ unsigned columns[TILE_COLS][GROUPS + 1];
    const int64_t row0 = (int64_t)blockIdx.y * TILE_ROWS, col0 = (int64_t)blockIdx.x * TILE_COLS;

    for (int job = (int)threadIdx.x; job < ACROSS * GROUPS; job += THREADS) {
        const int across = job % ACROSS * W, group = job / ACROSS;
        const int64_t row = row0 + group * 4, col = col0 + across;
        Elements<T, W> x[4];
        float scale[4];                          // asked for beside x: not one after the other

        if (col >= f.cols || row >= f.rows) {                  // behind the last row zeros
            for (int c = 0; c < W; c++)
                columns[across + c][group] = 0;
            continue;
        }
        for (int i = 0; i < 4; i++) {
            scale[i] = f.by_rows != nullptr && row + i < f.rows ? f.row_scale[row + i] : 0.0f;
            if (row + i < f.rows)
                x[i].load(static_cast<const T *>(f.x) + (row + i) * f.stride + col);
            else
                x[i].zero();
        }
        if (f.by_rows != nullptr)
            for (int i = 0; i < 4; i++)
                if (row + i < f.rows)
                    store_codes<T, W>(f.by_rows + (row + i) * f.cols + col, x[i],
                                      inverse_of(scale[i]));
        float inverse[W];

        load_inverses<W>(inverse, f.column_scale + col);
        const unsigned mask = there(f.rows - row);
        for (int c = 0; c < W; c++)
            columns[across + c][group] =
                mask & (two_codes(x[0].at(c) * inverse[c], x[1].at(c) * inverse[c]) |
                        two_codes(x[2].at(c) * inverse[c], x[3].at(c) * inverse[c]) << 16);
    }
    __syncthreads();

    const int lane = (int)threadIdx.x % WARP;
    const int64_t row = row0 + lane * 4;

    for (int c = (int)threadIdx.x / WARP; c < TILE_COLS && col0 + c < f.cols; c += WARPS)
        if (row < f.wide)
            *reinterpret_cast<unsigned *>(f.by_columns + (col0 + c) * f.wide + row) =
                columns[c][lane];
}

/* ---- rows that are balanced ---- */

template <typename T, int W> struct Matrix {
    const mt_fp8 &f;

    __device__ void get(int64_t row, int64_t col, Elements<T, W> &x) const
    {
        x.load(static_cast<const T *>(f.x) + row * f.stride + col);
    }
};

template <typename T, int W>
__global__ void __launch_bounds__(THREADS) recast_kernel(const mt_fp8 f)
{
    recast<T, W>(Matrix<T, W>{ f }, f);
}

// One block: counts of exponents are integers, whose sums have no order.
__global__ void __launch_bounds__(1024) shift_kernel(const float *x, const float *dy, int64_t rows,
                                                     int8_t *shift)
{
    __shared__ unsigned count[2][256];
    __shared__ int typical[2];
    const int thread = (int)threadIdx.x;
    int any = 0;

    if (thread < 512)
        count[thread / 256][thread % 256] = 0;
    __syncthreads();
    for (int64_t r = thread; r < rows; r += 1024) {
        atomicAdd(&count[0][mt_fp8_exponent(x[r])], 1u);
        atomicAdd(&count[1][mt_fp8_exponent(dy[r])], 1u);
    }
    __syncthreads();
    if (thread < 2)
        typical[thread] = mt_fp8_typical(count[thread]);
    __syncthreads();
    for (int64_t r = thread; r < rows; r += 1024) {
        const int s = mt_fp8_shift_of(mt_fp8_exponent(x[r]), mt_fp8_exponent(dy[r]), typical[0],
                                      typical[1]);

        shift[r] = (int8_t)s;
        any |= s != 0;
    }
    any = __syncthreads_or(any);
    if (thread == 0)
        shift[rows] = (int8_t)(any != 0);
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

template <typename T, int W> const char *launch(cudaStream_t stream, const mt_fp8 &f)
{
    if (f.shift != nullptr) {
        recast_kernel<T, W><<<blocks(f.cols, TILE_COLS), THREADS, 0, stream>>>(f);
        return mt::launch_error();
    }
    if (f.by_columns == nullptr && f.by_rows != nullptr) {
        const int64_t bytes = f.cols / W * (int64_t)sizeof(Elements<T, W>);
        const int shared = bytes <= WAITS;

        rows_kernel<T, W><<<(unsigned)f.rows, THREADS, shared ? bytes : 0, stream>>>(f, shared);
        return mt::launch_error();
    }
    const int64_t rows = f.row_scale == nullptr ? 0 : f.rows;
    const int64_t columns = f.by_columns == nullptr ? 0 : f.cols;
    const dim3    grid(blocks(f.cols, WARP * W), blocks(f.rows, TALL));

    if (rows > 0)
        (void)cudaMemsetAsync(f.row_scale, 0, (size_t)rows * sizeof(float), stream);
    if (columns > 0)
        (void)cudaMemsetAsync(f.column_scale, 0, (size_t)columns * sizeof(float), stream);
    most_kernel<T, W><<<grid, THREADS, 0, stream>>>(f);
    scales_kernel<<<blocks(rows + columns, THREADS), THREADS, 0, stream>>>(f.row_scale, rows,
                                                                           f.column_scale, columns);
    if (columns > 0)
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

static const char *run(uintptr_t handle, const mt_fp8 *f)
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

extern "C" const char *mt__fp8_cast_cuda(uintptr_t handle, const mt_fp8 *f)
{
    mt_fp8 plain = *f;

    plain.shift = nullptr;
    return run(handle, &plain);
}

extern "C" const char *mt__fp8_recast_cuda(uintptr_t handle, const mt_fp8 *f)
{
    return run(handle, f);
}

extern "C" const char *mt__fp8_shift_cuda(uintptr_t handle, const float *x_scale,
                                          const float *dy_scale, int64_t rows, int8_t *shift)
{
    cudaStream_t stream = reinterpret_cast<cudaStream_t>(handle);
    mt::Current  current(stream);

    if (!current.ok)
        return mt::NO_CONTEXT;
    shift_kernel<<<1, 1024, 0, stream>>>(x_scale, dy_scale, rows, shift);
    return mt::launch_error();
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
