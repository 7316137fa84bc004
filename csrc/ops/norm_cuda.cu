// norm_cuda.cu — the norms of norm.h: each byte of a row is read once, kept in registers in
// between.
//
// A row belongs to a group of G threads: up to 32 of a warp for short rows, or a whole block. The
// group loads it in vectors of 16 bytes, Each to a thread; thread t has vectors t, t+G, ... Rows
// that do not fit (no 16-byte vectors, more than 4096 of them, or in backward column sums of more
// than MAX_SMEM) take the plain kernels below, which read rows again.
//
// Order of sums in a row: a thread's numbers as they lie, then threads of a warp by exchange (16,
// 8, ... apart), then warps in order. In a column: each block over its rows in order, then its
// groups in order, then blocks as fold_blocks says. Numbers of threads and blocks follow from rows,
// n, dt and alignment alone, so a sum has the same bits on every GPU.
#include "norm_cuda.h"
#include "fp8.cuh"

namespace {

using namespace mt;

constexpr int BLOCK  = 256;          // threads, where several rows share a block
constexpr int WARPS  = 32;           // of the largest block
// Multiprocessors of an H200. A constant, not a question to the device: it decides the order of
// sums.
constexpr int SMS    = 132;
constexpr int MAX_SMEM = 96 * 1024;  // of a block; the smallest limit of all GPUs is 99 KiB

struct Rows {
    unsigned n1, n2;
    int64_t  s0, s1, s2;
};

__device__ inline int64_t begin(const Rows &w, unsigned row)
{
    if (row < w.n2)                  // one outer dimension, nearly always
        return row * w.s2;
    unsigned rest = row / w.n2;
    return rest / w.n1 * w.s0 + rest % w.n1 * w.s1 + (row - rest * w.n2) * w.s2;
}

Rows rows_of(const mt_rows &w)
{
    return { (unsigned)w.size[1], (unsigned)w.size[2], w.stride[0], w.stride[1], w.stride[2] };
}

// What every kernel gets.
template <typename T> struct Norm {
    unsigned rows;
    int      n, group;               // group: threads of a row
    bool     round_first;
    float    plus, eps;
    const T *weight, *bias;
};

template <typename T> struct Ahead : Norm<T> {
    Rows     x_rows;
    const T *x, *add;
    T       *y, *s;
    float   *mean, *rstd;
    uint8_t *codes;                  // [R,n], instead of y; a scale for each row
    float   *scale;
};

template <typename T> struct Back : Norm<T> {
    Rows         dy_rows, s_rows, dx_rows;
    const T     *dy, *s, *add;
    const float *mean, *rstd;
    T           *dx, *y;
    float       *partial;            // [1 or 2][blocks][n]: dweight's, dbias's
};

template <typename T> constexpr int W = vec<T>::N;

/* ---- sums over a row ---- */

// Each of v[K] summed over the group's threads, the same on all of them. sums: K * WARPS floats
// that nobody reads or writes until every thread of the block has passed the next call.
template <int K> __device__ inline void row_sum(float (&v)[K], int group, float *sums)
{
    for (int apart = (group < WARP ? group : WARP) / 2; apart > 0; apart /= 2)
        for (int k = 0; k < K; k++)
            v[k] += __shfl_xor_sync(~0u, v[k], apart);
    if (group <= WARP)
        return;
    if (threadIdx.x % WARP == 0)
        for (int k = 0; k < K; k++)
            sums[k * WARPS + threadIdx.x / WARP] = v[k];
    __syncthreads();
    for (int k = 0; k < K; k++) {
        v[k] = sums[k * WARPS];
        for (int w = 1; w < group / WARP; w++)
            v[k] += sums[k * WARPS + w];
    }
}

// The largest magnitude's pattern among the group's, given to each. found: WARPS patterns.
template <typename T> __device__ inline unsigned row_most(unsigned most, int group, unsigned *found)
{
    most = folded<T>(most);
    for (int apart = (group < WARP ? group : WARP) / 2; apart > 0; apart /= 2)
        most = max(most, __shfl_xor_sync(~0u, most, apart));
    if (group <= WARP)
        return most;
    if (threadIdx.x % WARP == 0)
        found[threadIdx.x / WARP] = most;
    __syncthreads();
    for (int w = 0; w < group / WARP; w++)
        most = max(most, found[w]);
    return most;
}

/* ---- one element ---- */

// w: what was read of weight.
template <typename T> __device__ inline float weight_of(const Norm<T> &f, float w)
{
    return f.weight != nullptr ? w + f.plus : 1.0f;
}
template <typename T> __device__ inline float plain_at(const T *p, int i)
{
    return p != nullptr ? widen(p[i]) : 0.0f;
}

// y from hat, not rounded yet; b: 0 without a bias.
template <typename T> __device__ inline float y_of(const Norm<T> &f, float hat, float w, float b)
{
    return (f.round_first ? widen(narrow<T>(hat)) : hat) * w + b;
}

/* ---- forward ---- */

// y of a row, of which the group's threads have s[], as codes; zeros where there is nothing.
template <typename T, int Each>
__device__ inline void store_coded(const Ahead<T> &a, const vec<T> (&s)[Each], bool live,
                                   unsigned row, int lane)
{
    __shared__ unsigned found[WARPS];
    unsigned most = 0;

#pragma unroll
    for (int j = 0; j < Each; j++)
        for (int i = 0; i < 4; i++)
            most = larger<T>(most, magnitude<T>(s[j].u[i]));
    most = row_most<T>(most, a.group, found);

    const unsigned scale = mt_fp8_scale_bits(wide_bits<T>(most));
    const float inverse = __uint_as_float(mt_fp8_inverse_bits(scale));

    if (live && lane == 0)
        a.scale[row] = __uint_as_float(scale);
#pragma unroll
    for (int j = 0; j < Each; j++) {
        const int v = j * a.group + lane;
        Elements<T, W<T>> x;

        for (int i = 0; i < 4; i++)
            x.u[i] = s[j].u[i];
        if (live && v < a.n / W<T>)
            store_codes<T, W<T>>(a.codes + (int64_t)row * a.n + v * W<T>, x, inverse);
    }
}

// s = x + add; y = hat(s) * (weight + plus) + bias; rstd; mean if Centred.      [R,n]
// Bytes: read x and add, written y and s: 2 or 4 times R * n * sizeof(T). Limit: HBM; of a copy's
// rate (4.23 TB/s on an H200, R 32768, n 3584, bf16) 98 % with add, 78 % without.
// Blocks of one row: several on a multiprocessor hide each other's waits.
// Coded: y becomes codes (fp8.h) while it is in registers, half of the bytes, and is not written.
template <typename T, int Each, bool Centred, bool Coded = false>
__global__ void __launch_bounds__(Each <= 2 ? 256 : 1024) forward(const Ahead<T> a)
{
    __shared__ float sums[2][WARPS];
    const int      lane = threadIdx.x % a.group, n_vec = a.n / W<T>;
    const unsigned row  = blockIdx.x * (blockDim.x / a.group) + threadIdx.x / a.group;
    const bool     live = row < a.rows;      // the others keep exchanging: zeros
    const T       *x    = live ? a.x + begin(a.x_rows, row) : nullptr;
    const int64_t  at   = (int64_t)row * a.n;
    vec<T>         s[Each], more[Each];
    float          sum[1] = {}, mean = 0;

#pragma unroll
    for (int j = 0; j < Each; j++) {
        const int v = j * a.group + lane;
        s[j] = more[j] = {};
        if (live && v < n_vec) {
            s[j] = load_vec(x + v * W<T>);
            if (a.add != nullptr)
                more[j] = load_vec(a.add + at + v * W<T>);
        }
    }
#pragma unroll
    for (int j = 0; j < Each; j++) {
        const int v = j * a.group + lane;
        if (a.add != nullptr && live && v < n_vec) {
            float sum_of[W<T>];
            for (int e = 0; e < W<T>; e++)
                sum_of[e] = element(s[j], e) + element(more[j], e);
            s[j] = rounded<T>(sum_of);
            store_vec(a.s + at + v * W<T>, s[j]);
        }
    }

    if constexpr (Centred) {
#pragma unroll
        for (int j = 0; j < Each; j++)
            for (int e = 0; e < W<T>; e++)
                sum[0] += element(s[j], e);
        row_sum(sum, a.group, sums[0]);
        mean = sum[0] / (float)a.n;
        sum[0] = 0;
    }
#pragma unroll
    for (int j = 0; j < Each; j++) {
        const bool mine = !Centred || j * a.group + lane < n_vec;    // zeros are not centred
        for (int e = 0; e < W<T> && mine; e++) {
            const float d = element(s[j], e) - mean;
            sum[0] = fmaf(d, d, sum[0]);
        }
    }
    row_sum(sum, a.group, sums[1]);
    const float rstd = __frsqrt_rn(sum[0] / (float)a.n + a.eps);

    if (live && lane == 0) {
        a.rstd[row] = rstd;
        if (Centred)
            a.mean[row] = mean;
    }
#pragma unroll
    for (int j = 0; j < Each; j++) {
        const int v = j * a.group + lane;
        if (!live || v >= n_vec)
            break;
        vec<T> w = {}, b = {};
        float  y[W<T>];
        if (a.weight != nullptr)
            w = load_vec(a.weight + v * W<T>);
        if (a.bias != nullptr)
            b = load_vec(a.bias + v * W<T>);
        for (int e = 0; e < W<T>; e++)
            y[e] = y_of(a, (element(s[j], e) - mean) * rstd, weight_of(a, element(w, e)),
                        element(b, e));
        if constexpr (Coded)
            s[j] = rounded<T>(y);
        else
            store_vec(a.y + at + v * W<T>, rounded<T>(y));
    }
    if constexpr (Coded)
        store_coded<T, Each>(a, s, live, row, lane);
}

// The same for any n, strides and alignment: a block a row, which is read two or three times, the
// later ones from the caches as far as they reach.
template <typename T, bool Centred>
__global__ void __launch_bounds__(512) forward_plain(const Ahead<T> a)
{
    __shared__ float sums[2][WARPS];
    const unsigned row = blockIdx.x;
    const int64_t  at  = (int64_t)row * a.n;
    const T       *s   = a.x + begin(a.x_rows, row);
    float          sum[1] = {}, mean = 0;

    if (a.add != nullptr) {
        for (int i = threadIdx.x; i < a.n; i += blockDim.x)
            a.s[at + i] = narrow<T>(widen(s[i]) + widen(a.add[at + i]));
        s = a.s + at;                // each thread reads what it wrote itself
    }
    if constexpr (Centred) {
        for (int i = threadIdx.x; i < a.n; i += blockDim.x)
            sum[0] += widen(s[i]);
        row_sum(sum, a.group, sums[0]);
        mean = sum[0] / (float)a.n;
        sum[0] = 0;
    }
    for (int i = threadIdx.x; i < a.n; i += blockDim.x) {
        const float d = widen(s[i]) - mean;
        sum[0] = fmaf(d, d, sum[0]);
    }
    row_sum(sum, a.group, sums[1]);
    const float rstd = __frsqrt_rn(sum[0] / (float)a.n + a.eps);

    if (threadIdx.x == 0) {
        a.rstd[row] = rstd;
        if (Centred)
            a.mean[row] = mean;
    }
    for (int i = threadIdx.x; i < a.n; i += blockDim.x) {
        const float hat = (widen(s[i]) - mean) * rstd, w = weight_of(a, plain_at(a.weight, i));
        a.y[at + i] = narrow<T>(y_of(a, hat, w, plain_at(a.bias, i)));
    }
}

/* ---- backward ---- */

// dx from an element's g and hat.
template <bool Centred>
__device__ inline float dx_of(float g, float hat, float rstd, float mean_gh, float mean_g)
{
    return rstd * (fmaf(-mean_gh, hat, g) - (Centred ? mean_g : 0.0f));
}

// A thread's sums of its columns, in shared memory so that long rows do not run out of registers: 4
// at a time, threads side by side, which is free of bank conflicts. Nobody else touches them before
// the rows are over.
template <typename T, int Each> struct Columns {
    static constexpr int QUADS = Each * W<T> / 4;
    float4 *mine;                    // [QUADS][blockDim]

    __device__ float4 *quad(int j, int e) const { return mine + (j * W<T> + e) / 4 * blockDim.x; }
    __device__ void clear() const
    {
        for (int q = 0; q < QUADS; q++)
            mine[q * blockDim.x] = make_float4(0, 0, 0, 0);
    }
    // x[4] * y[4] to columns e to e+3 of vector j.
    __device__ void add(int j, int e, const float *x, const float *y) const
    {
        float4 c = *quad(j, e);
        c.x = fmaf(x[0], y[0], c.x);
        c.y = fmaf(x[1], y[1], c.y);
        c.z = fmaf(x[2], y[2], c.z);
        c.w = fmaf(x[3], y[3], c.w);
        *quad(j, e) = c;
    }
    // Behind a barrier: groups of the block added in order, then to partial[blockIdx][n].
    __device__ void hand_over(float4 *all, int group, int n, float *partial) const
    {
        for (int i = threadIdx.x; i < QUADS * group; i += blockDim.x) {
            const int q = i / group, lane = i % group, j = q / (W<T> / 4);
            const int column = (j * group + lane) * W<T> + q % (W<T> / 4) * 4;
            float4    c = all[q * blockDim.x + lane];

            for (int g = group + lane; g < (int)blockDim.x; g += group) {
                const float4 d = all[q * blockDim.x + g];
                c.x += d.x, c.y += d.y, c.z += d.z, c.w += d.w;
            }
            if (column < n)
                *reinterpret_cast<float4 *>(partial + (int64_t)blockIdx.x * n + column) = c;
        }
    }
};

// Registers: Each = 1 has 5 blocks on a multiprocessor, so that short rows have enough bytes under
// way.
constexpr int most_threads(int each) { return each <= 2 ? 256 : 1024; }
constexpr int least_blocks(int each) { return each == 1 ? 5 : each == 2 ? 4 : 1; }

// What a thread holds of one row, and of what is the same for all rows where registers reach
// (KEEP).
template <typename T, int Each, bool Centred> struct Held {
    static constexpr bool KEEP = Each <= 2;
    static constexpr int  K = Centred ? 2 : 1;

    vec<T>  dy[Each], s[Each], add[KEEP ? Each : 1], w[KEEP ? Each : 1];
    float   rstd, mean;
    int64_t at;             // of the row in dense tensors
    int     lane, n_vec;    // vectors lane, lane + group, ... of n_vec; 0 of them: not in the row

    __device__ int  vector(const Back<T> &a, int j) const { return j * a.group + lane; }
    __device__ bool mine(const Back<T> &a, int j) const { return vector(a, j) < n_vec; }

    __device__ void read_weights(const Back<T> &a)
    {
#pragma unroll
        for (int j = 0; j < (KEEP ? Each : 0); j++) {
            w[j] = {};
            if (a.weight != nullptr && vector(a, j) < a.n / W<T>)
                w[j] = load_vec(a.weight + vector(a, j) * W<T>);
        }
    }
    __device__ vec<T> weights(const Back<T> &a, int j) const
    {
        if constexpr (KEEP)
            return w[j];
        else
            return a.weight != nullptr ? load_vec(a.weight + vector(a, j) * W<T>) : vec<T>{};
    }
    // All loads before the first use.
    __device__ void read(const Back<T> &a, unsigned row)
    {
        const bool live = row < a.rows;      // the others keep exchanging: zeros
        n_vec = live ? a.n / W<T> : 0;
        at    = (int64_t)row * a.n;
        rstd = live ? a.rstd[row] : 0;
        mean = Centred && live ? a.mean[row] : 0;
        const T *from_dy = a.dy + (live ? begin(a.dy_rows, row) : 0);
        const T *from_s  = a.s + (live ? begin(a.s_rows, row) : 0);
#pragma unroll
        for (int j = 0; j < Each; j++) {
            dy[j] = s[j] = {};
            if (mine(a, j)) {
                dy[j] = load_vec(from_dy + vector(a, j) * W<T>);
                s[j]  = load_vec(from_s + vector(a, j) * W<T>);
            }
            if constexpr (KEEP) {
                add[j] = {};
                if (mine(a, j) && a.add != nullptr)
                    add[j] = load_vec(a.add + at + vector(a, j) * W<T>);
            }
        }
    }
    __device__ float hat(int j, int e) const { return (element(s[j], e) - mean) * rstd; }

    // sum: of g * hat, and of g. Adds to the columns on the way.
    __device__ void add_up(const Back<T> &a, const Columns<T, Each> &dw, const Columns<T, Each> &db,
                           float (&sum)[K]) const
    {
#pragma unroll
        for (int j = 0; j < Each; j++) {
            if (!mine(a, j))
                break;
            const vec<T> wj = weights(a, j);
            for (int e = 0; e < W<T>; e += 4) {
                float d[4], h[4], one[4] = { 1, 1, 1, 1 };
                for (int i = 0; i < 4; i++) {
                    d[i] = element(dy[j], e + i);
                    h[i] = hat(j, e + i);
                    const float g = d[i] * weight_of(a, element(wj, e + i));
                    sum[0] = fmaf(g, h[i], sum[0]);
                    if (Centred)
                        sum[K - 1] += g;
                }
                dw.add(j, e, d, h);
                if (Centred)
                    db.add(j, e, d, one);
            }
        }
    }
    __device__ void write(const Back<T> &a, unsigned row, float mean_gh, float mean_g) const
    {
        T *to = a.dx + (n_vec > 0 ? begin(a.dx_rows, row) : 0);
#pragma unroll
        for (int j = 0; j < Each; j++) {
            if (!mine(a, j))
                break;
            const int    v = vector(a, j);
            const vec<T> wj = weights(a, j);
            vec<T>       b = {}, more = {};
            float        dx[W<T>], y[W<T>];
            if constexpr (KEEP)
                more = add[j];
            else if (a.add != nullptr)
                more = load_vec(a.add + at + v * W<T>);
            if (a.bias != nullptr)
                b = load_vec(a.bias + v * W<T>);
            for (int e = 0; e < W<T>; e++) {
                const float h = hat(j, e), we = weight_of(a, element(wj, e)),
                            g = element(dy[j], e) * we;
                dx[e] = dx_of<Centred>(g, h, rstd, mean_gh, mean_g) + element(more, e);
                y[e]  = y_of(a, h, we, element(b, e));
            }
            store_vec(to + v * W<T>, rounded<T>(dx));
            if (a.y != nullptr)
                store_vec(a.y + at + v * W<T>, rounded<T>(y));
        }
    }
};

// dx, y again if wanted, and this block's part of dweight and dbias.               [R,n]
// Rows blockIdx * groups + group, then on by all groups of the grid.
// Bytes: read dy, s and add, written dx and y: 3 to 5 times R * n * sizeof(T); partial sums
// besides, some 9 MB written and read again. Limit: HBM; of a copy's rate (4.23 TB/s on an
// H200, R 32768, n 3584, bf16) 89 % with add and y, 77 % without; centred 61 %.
template <typename T, int Each, bool Centred>
__global__ void __launch_bounds__(most_threads(Each), least_blocks(Each)) backward(const Back<T> a)
{
    extern __shared__ float4 shared[];
    __shared__ float sums[2][2 * WARPS];
    using Cols = Columns<T, Each>;
    const unsigned groups = blockDim.x / a.group, group = threadIdx.x / a.group;
    const Cols     dw = { shared + threadIdx.x }, db = { dw.mine + Cols::QUADS * blockDim.x };
    Held<T, Each, Centred> held;
    int                    turn = 0;

    dw.clear();
    if (Centred)
        db.clear();
    held.lane = threadIdx.x % a.group;
    held.read_weights(a);
    for (unsigned base = blockIdx.x * groups; base < a.rows;
         base += gridDim.x * groups, turn ^= 1) {
        float sum[held.K] = {};

        held.read(a, base + group);
        held.add_up(a, dw, db, sum);
        row_sum(sum, a.group, sums[turn]);
        held.write(a, base + group, sum[0] / (float)a.n, sum[held.K - 1] / (float)a.n);
    }
    __syncthreads();
    dw.hand_over(shared, a.group, a.n, a.partial);
    if (Centred)
        db.hand_over(shared + Cols::QUADS * blockDim.x, a.group, a.n,
                     a.partial + (int64_t)gridDim.x * a.n);
}

// The same for any n, strides and alignment. Column sums live in the block's own part of `partial`,
// where each thread reads what it wrote itself.
template <typename T, bool Centred>
__global__ void __launch_bounds__(512) backward_plain(const Back<T> a)
{
    __shared__ float sums[2][2 * WARPS];
    constexpr int K = Centred ? 2 : 1;
    float *dw = a.partial + (int64_t)blockIdx.x * a.n, *db = dw + (int64_t)gridDim.x * a.n;
    int    turn = 0;

    for (unsigned row = blockIdx.x; row < a.rows; row += gridDim.x, turn ^= 1) {
        const T      *dy = a.dy + begin(a.dy_rows, row), *s = a.s + begin(a.s_rows, row);
        T            *dx = a.dx + begin(a.dx_rows, row);
        const float   rstd = a.rstd[row], mean = Centred ? a.mean[row] : 0;
        const bool    first = row == blockIdx.x;
        const int64_t at = (int64_t)row * a.n;
        float         sum[K] = {};

        for (int i = threadIdx.x; i < a.n; i += blockDim.x) {
            const float d = widen(dy[i]), hat = (widen(s[i]) - mean) * rstd;
            const float g = d * weight_of(a, plain_at(a.weight, i));
            sum[0] = fmaf(g, hat, sum[0]);
            dw[i]  = fmaf(d, hat, first ? 0.0f : dw[i]);
            if (Centred) {
                sum[K - 1] += g;
                db[i] = d + (first ? 0.0f : db[i]);
            }
        }
        row_sum(sum, a.group, sums[turn]);
        const float mean_gh = sum[0] / (float)a.n, mean_g = sum[K - 1] / (float)a.n;
        for (int i = threadIdx.x; i < a.n; i += blockDim.x) {
            const float hat = (widen(s[i]) - mean) * rstd;
            const float w = weight_of(a, plain_at(a.weight, i));
            const float d = dx_of<Centred>(widen(dy[i]) * w, hat, rstd, mean_gh, mean_g);
            dx[i] = narrow<T>(a.add != nullptr ? d + widen(a.add[at + i]) : d);
            if (a.y != nullptr)
                a.y[at + i] = narrow<T>(y_of(a, hat, w, plain_at(a.bias, i)));
        }
    }
}

// out[c] = sum over blocks b of partial[b][c]: thread row y of 32 adds b = y, y+32, ..., then the
// 32 are
// folded (16, 8, ... 1).                                   partial [blocks,n] fp32, out [n]
// Bytes: 4 * blocks * n read, mostly still in L2; a few microseconds.
template <typename T>
__global__ void __launch_bounds__(1024) fold_blocks(const float *partial, int blocks, int n, T *out)
{
    __shared__ float sums[32][33];   // 33: rows begin in different banks
    const int column = blockIdx.x * 32 + threadIdx.x, y = threadIdx.y;
    float     sum = 0;

    if (column < n)
#pragma unroll 8
        for (int b = y; b < blocks; b += 32)
            sum += partial[(int64_t)b * n + column];
    sums[y][threadIdx.x] = sum;
    for (int half = 16; half > 0; half /= 2) {
        __syncthreads();
        if (y < half)
            sums[y][threadIdx.x] += sums[y + half][threadIdx.x];
    }
    if (y == 0 && column < n)
        out[column] = narrow<T>(sums[0][threadIdx.x]);
}

/* ---- the host's side ---- */

// How rows are spread over threads.
struct Shape {
    int each;                        // vectors of a thread; 0: the plain kernels
    int group, threads;              // threads of a row, of a block
    unsigned groups() const { return (unsigned)(threads / group); }
};

int ceil_warp(int n) { return (n + WARP - 1) / WARP * WARP; }

Shape plain_shape(int64_t n)
{
    const int threads = ceil_warp((int)(n < 512 ? n : 512));
    return { 0, threads, threads };
}

// Vectors of a row -> shape. Short rows share a warp or a block of warps; longer ones get a block
// each, of at most 256 threads as long as 4 vectors to a thread do.
Shape vector_shape(int n_vec)
{
    int group = 1;

    while (group < n_vec && group < WARP)
        group *= 2;
    if (n_vec <= WARP)
        return { 1, group, BLOCK };
    if (n_vec <= 4 * WARP)
        return { n_vec <= 2 * WARP ? 2 : 4, WARP, BLOCK };
    const int each = n_vec <= 512 ? 2 : 4, threads = ceil_warp((n_vec + each - 1) / each);
    return { each, threads, threads };
}

bool rows_fit(const mt_rows &w, const void *p, int width)
{
    bool fit = aligned16(p);

    for (int d = 0; d < MT_ROWS_DIMS; d++)
        fit = fit && (w.size[d] == 1 || w.stride[d] % width == 0);
    return fit;
}

int width_of(const mt_norm *f) { return f->dt == MT_F32 ? 4 : 8; }

bool dense_fit(const mt_norm *f, int width)
{
    return f->n % width == 0 && f->n / width <= 4096 && aligned16(f->weight) && aligned16(f->bias);
}

Shape forward_shape(const mt_norm *f, const mt_norm_ahead *a)
{
    const int  width = width_of(f);
    const bool fit = dense_fit(f, width) && rows_fit(a->x_rows, a->x, width) && aligned16(a->add)
                  && aligned16(a->y) && aligned16(a->s);
    return fit ? vector_shape((int)(f->n / width)) : plain_shape(f->n);
}

size_t columns_bytes(const mt_norm *f, const Shape &shape)
{
    return (size_t)(f->centred ? 2 : 1) * shape.each * shape.threads * 4 * width_of(f);
}

Shape backward_shape(const mt_norm *f, const mt_norm_back *b)
{
    const int   width = width_of(f);
    const bool  fit = dense_fit(f, width) && rows_fit(b->dy_rows, b->dy, width)
                   && rows_fit(b->s_rows, b->s, width) && rows_fit(b->dx_rows, b->dx, width)
                   && aligned16(b->add) && aligned16(b->y) && aligned16(b->partial);
    const Shape shape = vector_shape((int)(fit ? f->n / width : 1));

    return fit && columns_bytes(f, shape) <= MAX_SMEM ? shape : plain_shape(f->n);
}

// As many blocks as an H200 has room for at once, so that none waits for another to end; fewer
// where a group would have less than 4 rows.
unsigned backward_blocks(const mt_norm *f, const Shape &shape)
{
    const int64_t full = shape.each == 1 ? 5 : 1024 / shape.threads;
    const int64_t room = shape.each == 0 ? full : 208 * 1024 / (int64_t)columns_bytes(f, shape);
    const int64_t on_sm = full < room ? full : room, most = SMS * (on_sm > 1 ? on_sm : 1);
    const int64_t rows = 4 * (int64_t)shape.groups(), wanted = (f->rows + rows - 1) / rows;

    return (unsigned)(wanted < most ? wanted : most);
}

template <typename T> Norm<T> norm_of(const mt_norm *f, const Shape &shape)
{
    return { (unsigned)f->rows, (int)f->n, shape.group, f->round_first != 0, f->plus, f->eps,
             static_cast<const T *>(f->weight), static_cast<const T *>(f->bias) };
}

template <typename T, bool Centred>
void run_forward(cudaStream_t stream, const Shape &shape, const Ahead<T> &a)
{
    const unsigned blocks = (a.rows + shape.groups() - 1) / shape.groups();

    switch (shape.each) {
    case 1:  forward<T, 1, Centred><<<blocks, shape.threads, 0, stream>>>(a); break;
    case 2:  forward<T, 2, Centred><<<blocks, shape.threads, 0, stream>>>(a); break;
    case 4:  forward<T, 4, Centred><<<blocks, shape.threads, 0, stream>>>(a); break;
    default: forward_plain<T, Centred><<<a.rows, shape.threads, 0, stream>>>(a); break;
    }
}

template <typename T>
void forward_of_type(cudaStream_t stream, const mt_norm *f, const mt_norm_ahead *p)
{
    const Shape shape = forward_shape(f, p);
    Ahead<T>    a = { norm_of<T>(f, shape), rows_of(p->x_rows), static_cast<const T *>(p->x),
                      static_cast<const T *>(p->add), static_cast<T *>(p->y),
                      static_cast<T *>(p->s), p->mean, p->rstd, nullptr, nullptr };

    if (f->rows == 0)
        return;
    if (f->centred)
        run_forward<T, true>(stream, shape, a);
    else
        run_forward<T, false>(stream, shape, a);
}

// Norms whose y becomes codes: RMS norms of bf16 that the kernels of vectors take, as
// mt__norm_takes_codes_cuda has asked.
void run_coded(cudaStream_t stream, const mt_norm *f, const mt_norm_ahead *p, uint8_t *codes,
               float *scale)
{
    using T = __nv_bfloat16;
    const Shape    shape = forward_shape(f, p);
    const unsigned blocks = ((unsigned)f->rows + shape.groups() - 1) / shape.groups();
    Ahead<T>       a = { norm_of<T>(f, shape), rows_of(p->x_rows), static_cast<const T *>(p->x),
                         nullptr, nullptr, nullptr, nullptr, p->rstd, codes, scale };

    if (f->rows == 0)
        return;
    switch (shape.each) {
    case 1:  forward<T, 1, false, true><<<blocks, shape.threads, 0, stream>>>(a); break;
    case 2:  forward<T, 2, false, true><<<blocks, shape.threads, 0, stream>>>(a); break;
    default: forward<T, 4, false, true><<<blocks, shape.threads, 0, stream>>>(a); break;
    }
}

// Above 48 KiB a kernel's shared memory has to be asked for, once in each context; asking again is
// cheap.
template <typename T, int Each, bool Centred>
void run_held(cudaStream_t stream, unsigned blocks, int threads, size_t bytes, const Back<T> &a)
{
    if (bytes > 48 * 1024)
        (void)cudaFuncSetAttribute(backward<T, Each, Centred>,
                                   cudaFuncAttributeMaxDynamicSharedMemorySize, MAX_SMEM);
    backward<T, Each, Centred><<<blocks, threads, bytes, stream>>>(a);
}

template <typename T, bool Centred>
void run_backward(cudaStream_t stream, unsigned blocks, const Shape &shape, size_t bytes,
                  const Back<T> &a)
{
    switch (shape.each) {
    case 1:  run_held<T, 1, Centred>(stream, blocks, shape.threads, bytes, a); break;
    case 2:  run_held<T, 2, Centred>(stream, blocks, shape.threads, bytes, a); break;
    case 4:  run_held<T, 4, Centred>(stream, blocks, shape.threads, bytes, a); break;
    default: backward_plain<T, Centred><<<blocks, shape.threads, 0, stream>>>(a); break;
    }
}

template <typename T>
void backward_of_type(cudaStream_t stream, const mt_norm *f, const mt_norm_back *p)
{
    const Shape    shape  = backward_shape(f, p);
    const unsigned blocks = backward_blocks(f, shape), columns = (unsigned)((f->n + 31) / 32);
    const size_t   bytes  = shape.each > 0 ? columns_bytes(f, shape) : 0;
    const dim3     square(32, 32);
    Back<T>        a = { norm_of<T>(f, shape), rows_of(p->dy_rows), rows_of(p->s_rows),
                         rows_of(p->dx_rows), static_cast<const T *>(p->dy),
                         static_cast<const T *>(p->s), static_cast<const T *>(p->add), p->mean,
                         p->rstd, static_cast<T *>(p->dx), static_cast<T *>(p->y), p->partial };

    if (blocks > 0 && f->centred)
        run_backward<T, true>(stream, blocks, shape, bytes, a);
    else if (blocks > 0)
        run_backward<T, false>(stream, blocks, shape, bytes, a);
    if (p->dweight != nullptr)
        fold_blocks<<<columns, square, 0, stream>>>(p->partial, (int)blocks, a.n,
                                                    static_cast<T *>(p->dweight));
    if (p->dbias != nullptr)
        fold_blocks<<<columns, square, 0, stream>>>(p->partial + (int64_t)blocks * a.n, (int)blocks,
                                                    a.n, static_cast<T *>(p->dbias));
}

} // namespace

extern "C" int64_t mt__norm_partials_cuda(const mt_norm *norm, const mt_norm_back *b)
{
    const unsigned blocks = backward_blocks(norm, backward_shape(norm, b));

    return (norm->centred ? 2 : 1) * norm->n * (int64_t)(blocks > 0 ? blocks : 1);
}

extern "C" const char *mt__norm_forward_cuda(uintptr_t handle, const mt_norm *norm,
                                             const mt_norm_ahead *a)
{
    cudaStream_t stream = reinterpret_cast<cudaStream_t>(handle);
    Current      current(stream);

    if (!current.ok)
        return NO_CONTEXT;
    switch (norm->dt) {
    case MT_F32:  forward_of_type<float>(stream, norm, a);         break;
    case MT_BF16: forward_of_type<__nv_bfloat16>(stream, norm, a); break;
    default:      forward_of_type<__half>(stream, norm, a);        break;
    }
    return launch_error();
}

extern "C" int mt__norm_takes_codes_cuda(const mt_norm *norm, const mt_norm_ahead *a)
{
    return norm->dt == MT_BF16 && !norm->centred && a->add == nullptr &&
           forward_shape(norm, a).each > 0;
}

extern "C" const char *mt__norm_codes_cuda(uintptr_t handle, const mt_norm *norm,
                                           const mt_norm_ahead *a, uint8_t *codes, float *scale)
{
    cudaStream_t stream = reinterpret_cast<cudaStream_t>(handle);
    Current      current(stream);

    if (!current.ok)
        return NO_CONTEXT;
    run_coded(stream, norm, a, codes, scale);
    return launch_error();
}

extern "C" const char *mt__norm_backward_cuda(uintptr_t handle, const mt_norm *norm,
                                              const mt_norm_back *b)
{
    cudaStream_t stream = reinterpret_cast<cudaStream_t>(handle);
    Current      current(stream);

    if (!current.ok)
        return NO_CONTEXT;
    switch (norm->dt) {
    case MT_F32:  backward_of_type<float>(stream, norm, b);         break;
    case MT_BF16: backward_of_type<__nv_bfloat16>(stream, norm, b); break;
    default:      backward_of_type<__half>(stream, norm, b);        break;
    }
    return launch_error();
}
