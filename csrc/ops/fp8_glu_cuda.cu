// fp8_glu_cuda.cu — fp8_glu.h on CUDA. Forward: a row a block, which waits in shared memory for
// its scale. Backward: a pass for the largest magnitudes and one for codes, both of which make the
// gradients from dh, gate and up: reading those again is what reading the gradients would be, and
// so these are never written.
#include "fp8_glu.h"
#include "fp8.cuh"
#include "gate.cuh"

namespace {

using namespace mt;
using bf16 = __nv_bfloat16;

constexpr int W = 8, THREADS = CODE_THREADS, WARPS = CODE_WARPS;

using Pack = Elements<bf16, W>;

/* ---- packs ---- */

__device__ inline unsigned two(float low, float high)
{
    const __nv_bfloat162 x = __floats2bfloat162_rn(low, high);

    return (unsigned)__bfloat16_as_ushort(x.x) | (unsigned)__bfloat16_as_ushort(x.y) << 16;
}

__device__ inline float low(unsigned word)  { return __uint_as_float(word << 16); }
__device__ inline float high(unsigned word) { return __uint_as_float(word & 0xffff0000u); }

// Of a GELU an exp below 2^-126 is not a gate's below -87 alone.
template <int Act> constexpr int FAST = Act == MT_SILU ? FLUSHED : QUICK;

template <int Act> __device__ inline Pack gated(const Pack &gate, const Pack &up)
{
    Pack h;

#pragma unroll
    for (int w = 0; w < Pack::WORDS; w++) {
        const unsigned a = two(activation<FAST<Act>, Act>(low(gate.u[w])).a,
                               activation<FAST<Act>, Act>(high(gate.u[w])).a);

        h.u[w] = two(low(a) * factor<Act>(low(up.u[w])), high(a) * factor<Act>(high(up.u[w])));
    }
    return h;
}

enum { DGATE, DUP, H, MADE };        // what backward makes of dh, gate and up

__device__ inline void load(const mt_glu &g, int64_t row, int64_t col, Pack (&x)[MADE])
{
    x[0].load(static_cast<const bf16 *>(g.dh) + row * g.n + col);
    x[1].load(static_cast<const bf16 *>(g.gate) + row * g.gate_stride + col);
    x[2].load(static_cast<const bf16 *>(g.up) + row * g.up_stride + col);
}

// dh, gate and up become what is made of them.
template <int Act> __device__ inline void make(Pack (&x)[MADE])
{
#pragma unroll
    for (int w = 0; w < Pack::WORDS; w++) {
        const unsigned dh = x[0].u[w], gate = x[1].u[w], up = x[2].u[w];
        const Value v = activation<FAST<Act>, Act>(low(gate));
        const Value y = activation<FAST<Act>, Act>(high(gate));
        const unsigned a = two(v.a, y.a);
        const Gradients p = gradients<Act>(low(dh), v, low(a), low(up));
        const Gradients q = gradients<Act>(high(dh), y, high(a), high(up));

        x[DGATE].u[w] = two(p.dgate, q.dgate);
        x[DUP].u[w] = two(p.dup, q.dup);
        x[H].u[w] = two(p.h, q.h);
    }
}

/* ---- forward ---- */

// h [T,I] by rows. A row that is too long to wait (shared 0) is made again.
// Bytes: 4 T I in, T I out. Limit: HBM; 0.87 of a copy's rate on an H200 (T 32768, I 18944).
template <int Act>
__global__ void __launch_bounds__(THREADS) rows_kernel(const mt_fp8_glu f, int shared)
{
    extern __shared__ uint4 memory[];
    Pack *waits = reinterpret_cast<Pack *>(memory), gate, up, h;
    const int64_t row = blockIdx.x, n = f.glu.n;
    const bf16 *gates = static_cast<const bf16 *>(f.glu.gate) + row * f.glu.gate_stride;
    const bf16 *ups = static_cast<const bf16 *>(f.glu.up) + row * f.glu.up_stride;
    unsigned most = 0;

#pragma unroll 2
    for (int64_t i = threadIdx.x * W; i < n; i += THREADS * W) {
        gate.load(gates + i);
        up.load(ups + i);
        h = gated<Act>(gate, up);
        if (shared)
            waits[i / W] = h;                     // read again by this thread alone
        most = larger<bf16>(most, h.most());
    }
    most = block_most<bf16>(most);

    const unsigned scale = mt_fp8_scale_bits(wide_bits<bf16>(most));
    const float inverse = __uint_as_float(mt_fp8_inverse_bits(scale));

    if (threadIdx.x == 0)
        f.h.row_scale[row] = __uint_as_float(scale);
    for (int64_t i = threadIdx.x * W; i < n; i += THREADS * W) {
        if (shared) {
            h = waits[i / W];
        } else {
            gate.load(gates + i);
            up.load(ups + i);
            h = gated<Act>(gate, up);
        }
        store_codes<bf16, W>(f.h.by_rows + row * n + i, h, inverse);
    }
}

/* ---- backward ---- */

__device__ inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

__device__ inline float *column_scales(const mt_fp8_glu &f, int made)
{
    return made == H ? f.h.column_scale : f.d.column_scale + made * f.glu.n;
}

__device__ inline uint8_t *columns_of(const mt_fp8_glu &f, int made)
{
    return made == H ? f.h.by_columns : f.d.by_columns + made * f.glu.n * f.d.wide;
}

// Scales, zeros before, get the bits of the largest magnitudes, of which no order changes anything.
// Bytes: 6 T I in. Limit: HBM.
template <int Act>
__global__ void __launch_bounds__(THREADS) most_kernel(const mt_fp8_glu f)
{
    constexpr int WORDS = Pack::WORDS;
    __shared__ unsigned found[WARPS][MADE * WORDS][WARP];
    const int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP;
    const int64_t n = f.glu.n, col = ((int64_t)blockIdx.x * WARP + lane) * W;
    const int64_t first = (int64_t)blockIdx.y * TALL;
    unsigned most[MADE][WORDS] = {};

#pragma unroll 2
    for (int64_t row = first + warp; row < first + TALL && row < f.glu.rows; row += WARPS) {
        Pack made[MADE];

        for (int m = 0; m < MADE; m++)
            made[m].zero();
        if (col < n) {
            load(f.glu, row, col, made);
            make<Act>(made);
        }
        for (int m = 0; m < MADE; m++)
            for (int w = 0; w < WORDS; w++)
                most[m][w] = larger<bf16>(most[m][w], magnitude<bf16>(made[m].u[w]));

        const unsigned both = larger<bf16>(made[DGATE].most(), made[DUP].most());
        const unsigned of_row = warp_most(folded<bf16>(both));

        if (lane == 0)
            atomicMax(reinterpret_cast<unsigned *>(f.d.row_scale) + row, wide_bits<bf16>(of_row));

        const unsigned of_h = warp_most(folded<bf16>(made[H].most()));

        if (lane == 0)
            atomicMax(reinterpret_cast<unsigned *>(f.h.row_scale) + row, wide_bits<bf16>(of_h));
    }
    for (int m = 0; m < MADE; m++)
        for (int w = 0; w < WORDS; w++)
            found[warp][m * WORDS + w][lane] = most[m][w];
    __syncthreads();
    for (int at = (int)threadIdx.x; at < MADE * WORDS * WARP; at += THREADS) {
        const int word = at / WARP, whose = at % WARP;
        const int64_t to = ((int64_t)blockIdx.x * WARP + whose) * W + word % WORDS * 2;
        unsigned m = 0;

        for (int i = 0; i < WARPS; i++)
            m = larger<bf16>(m, found[i][word][whose]);
        if (to < n) {                                 // n is a multiple of what a word has
            unsigned *scales = reinterpret_cast<unsigned *>(column_scales(f, word / WORDS)) + to;

            atomicMax(scales, wide_bits<bf16>(m & 0xffffu));
            atomicMax(scales + 1, wide_bits<bf16>(m >> 16));
        }
    }
}

// What scales of a tile's rows and columns are to be multiplied by.
struct Inverses {
    float rows[TILE_ROWS], columns[MADE][TILE_COLS];

    // Behind the last row or column those of the last.
    __device__ void load(const mt_fp8_glu &f, int64_t row0, int64_t col0)
    {
        const int i = (int)threadIdx.x, m = i / TILE_COLS, c = i % TILE_COLS;

        if (i < TILE_ROWS)
            rows[i] = inverse_of(f.d.row_scale[least(row0 + i, f.glu.rows - 1)]);
        if (m < MADE)
            columns[m][c] = inverse_of(column_scales(f, m)[least(col0 + c, f.glu.n - 1)]);
    }
};

static_assert(THREADS >= TILE_ROWS && THREADS >= MADE * TILE_COLS, "one thread for each inverse");

// A thread has four rows of W columns of each matrix; see fp8_cuda.cu's. All that it reads of them
// it asks for at once, so without a condition: behind the last row or column the last ones again,
// whose codes nobody writes.
// Bytes: 6 T I in, 5 T I out. Limit: HBM; with the pass before 0.86 of a copy's rate, of 17 T I.
template <int Act>
__global__ void __launch_bounds__(THREADS, 2) tile_kernel(const mt_fp8_glu f)
{
    constexpr int ACROSS = TILE_COLS / W;
    __shared__ unsigned columns[MADE][TILE_COLS][TILE_WORDS + 1];
    __shared__ Inverses inverse;
    const int64_t row0 = (int64_t)blockIdx.y * TILE_ROWS, col0 = (int64_t)blockIdx.x * TILE_COLS;
    const int across = (int)threadIdx.x % ACROSS * W, group = (int)threadIdx.x / ACROSS;
    const int64_t n = f.glu.n, row = row0 + group * 4, col = col0 + across;
    const int rows = f.glu.rows - row < 4 ? (int)(f.glu.rows - row) : 4;      // 0 and less: none
    Pack x[4][MADE];

    static_assert(ACROSS * TILE_WORDS == THREADS, "a thread for each pack of four rows");
#pragma unroll
    for (int i = 0; i < 4; i++)
        load(f.glu, least(row + i, f.glu.rows - 1), least(col, n - W), x[i]);
    inverse.load(f, row0, col0);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++)
        make<Act>(x[i]);
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (i < rows && col < n) {
            uint8_t *to = f.d.by_rows + (row + i) * 2 * n + col;

            store_codes<bf16, W>(to, x[i][DGATE], inverse.rows[group * 4 + i]);
            store_codes<bf16, W>(to + n, x[i][DUP], inverse.rows[group * 4 + i]);
        }
#pragma unroll
    for (int m = 0; m < MADE; m++)
#pragma unroll
        for (int c = 0; c < W; c++) {
            const float by = inverse.columns[m][across + c];

            columns[m][across + c][group] =
                there(rows) & (two_codes(x[0][m].at(c) * by, x[1][m].at(c) * by) |
                               two_codes(x[2][m].at(c) * by, x[3][m].at(c) * by) << 16);
        }
    __syncthreads();

    const int lane = (int)threadIdx.x % WARP;
    const int64_t to = row0 + lane * 4;

    if (to >= f.d.wide)
        return;
    for (int m = 0; m < MADE; m++)
        for (int c = (int)threadIdx.x / WARP; c < TILE_COLS && col0 + c < n; c += WARPS)
            *reinterpret_cast<unsigned *>(columns_of(f, m) + (col0 + c) * f.d.wide + to) =
                columns[m][c][lane];
}

/* ---- rows that are balanced ---- */

// Of d (dgate | dup) or h.
template <int Act> struct Products {
    const mt_glu &g;
    int           first;                        // DGATE or H

    __device__ void get(int64_t row, int64_t col, Pack &to) const
    {
        const int which = first + (int)(col / g.n);            // n is a multiple of W
        Pack      x[MADE];

        load(g, row, col % g.n, x);
        make<Act>(x);
#pragma unroll
        for (int w = 0; w < Pack::WORDS; w++)
            to.u[w] = which == H ? x[H].u[w] : which == DUP ? x[DUP].u[w] : x[DGATE].u[w];
    }
};

template <int Act> __global__ void __launch_bounds__(THREADS) recast_kernel(const mt_fp8_glu f)
{
    const bool of_d = f.d.by_columns != nullptr;

    recast<bf16, W>(Products<Act>{ f.glu, of_d ? DGATE : H }, of_d ? f.d : f.h);
}

/* ---- launches ---- */

template <int Act> void launch_forward(cudaStream_t stream, const mt_fp8_glu &f)
{
    const int64_t bytes = f.glu.n * (int64_t)sizeof(bf16);
    const int shared = bytes <= WAITS;

    rows_kernel<Act><<<(unsigned)f.glu.rows, THREADS, shared ? bytes : 0, stream>>>(f, shared);
}

template <int Act> void launch_backward(cudaStream_t stream, const mt_fp8_glu &f)
{
    const int64_t rows = f.glu.rows, n = f.glu.n;

    (void)cudaMemsetAsync(f.d.row_scale, 0, (size_t)rows * sizeof(float), stream);
    (void)cudaMemsetAsync(f.d.column_scale, 0, (size_t)(2 * n) * sizeof(float), stream);
    (void)cudaMemsetAsync(f.h.row_scale, 0, (size_t)rows * sizeof(float), stream);
    (void)cudaMemsetAsync(f.h.column_scale, 0, (size_t)n * sizeof(float), stream);
    most_kernel<Act><<<dim3(blocks(n, WARP * W), blocks(rows, TALL)), THREADS, 0, stream>>>(f);
    scales_kernel<<<blocks(rows + 2 * n, THREADS), THREADS, 0, stream>>>(f.d.row_scale, rows,
                                                                         f.d.column_scale, 2 * n);
    scales_kernel<<<blocks(rows + n, THREADS), THREADS, 0, stream>>>(f.h.row_scale, rows,
                                                                     f.h.column_scale, n);
    tile_kernel<Act><<<dim3(blocks(n, TILE_COLS), blocks(f.d.wide, TILE_ROWS)), THREADS, 0,
                       stream>>>(f);
}

template <int Act> void launch_recast(cudaStream_t stream, const mt_fp8_glu &f)
{
    const int64_t cols = f.d.by_columns != nullptr ? f.d.cols : f.h.cols;

    recast_kernel<Act><<<blocks(cols, TILE_COLS), THREADS, 0, stream>>>(f);
}

enum Kind { FORWARD, BACKWARD, RECAST };

template <Kind K, int Act> void launch(cudaStream_t stream, const mt_fp8_glu &f)
{
    if constexpr (K == FORWARD)
        launch_forward<Act>(stream, f);
    else if constexpr (K == BACKWARD)
        launch_backward<Act>(stream, f);
    else
        launch_recast<Act>(stream, f);
}

template <Kind K> const char *run(uintptr_t handle, const mt_fp8_glu &f)
{
    cudaStream_t stream = reinterpret_cast<cudaStream_t>(handle);
    Current      current(stream);

    if (!current.ok)
        return NO_CONTEXT;
    if (f.glu.rows == 0 || f.glu.n == 0)
        return nullptr;
    switch (f.glu.act) {
    case MT_SILU:      launch<K, MT_SILU>(stream, f);      break;
    case MT_GELU_TANH: launch<K, MT_GELU_TANH>(stream, f); break;
    case MT_GELU:      launch<K, MT_GELU>(stream, f);      break;
    default:           launch<K, MT_CLAMPED>(stream, f);   break;
    }
    return launch_error();
}

} // namespace

extern "C" const char *mt__fp8_glu_forward_cuda(uintptr_t handle, const mt_fp8_glu *f)
{
    return run<FORWARD>(handle, *f);
}

extern "C" const char *mt__fp8_glu_backward_cuda(uintptr_t handle, const mt_fp8_glu *f)
{
    return run<BACKWARD>(handle, *f);
}

extern "C" const char *mt__fp8_glu_recast_cuda(uintptr_t handle, const mt_fp8_glu *f)
{
    return run<RECAST>(handle, *f);
}
