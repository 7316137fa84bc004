// embedding_cuda.cu — embedding.h on CUDA, to its bits. Three kernels: where each row's tokens
// begin; the chunks of rows that have several; every row of the table, once.
#include "embedding_cuda.h"
#include "kernel.cuh"

namespace {

using mt::narrow;
using mt::pack;
using mt::widen;

constexpr int CHUNK = MT_EMBEDDING_CHUNK, THREADS = 128;

inline __host__ __device__ int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// begins[v] = the first index of ids [tokens] that is not below v; v = 0 .. rows.
// Bytes: 4 (rows + 1) written; ids are read from L2, 17 times each at the most. Some 10 us.
__global__ void __launch_bounds__(THREADS)
find_rows(const int64_t *ids, int64_t tokens, int64_t rows, int32_t *begins)
{
    const int64_t v = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    int64_t low = 0, high = tokens;

    if (v > rows)
        return;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;

        if (ids[middle] < v)
            low = middle + 1;
        else
            high = middle;
    }
    begins[v] = (int32_t)low;
}

// Where a chunk's sum stands. Chunks that begin a row are 257 ids apart or more if their rows
// have several chunks, and so are all others: each kind has one at most in 256 neighbouring ids.
__device__ inline int64_t slot_of(int64_t at, bool begins_row, int64_t tokens)
{
    return at / CHUNK + (begins_row ? 0 : ceil_div(tokens, CHUNK));
}

// sum[e] = dy[order[begin]][i+e] + ... + dy[order[end-1]][i+e], in order.
template <typename T, int W>
__device__ inline void add_tokens(const mt_embedding &e, int64_t begin, int64_t end, int64_t i,
                                  float *sum)
{
    const T *dy = static_cast<const T *>(e.dy);

#pragma unroll 4
    for (int64_t at = begin; at < end; at++) {
        pack<T, W> p = *reinterpret_cast<const pack<T, W> *>(dy + e.order[at] * e.stride + i);
        for (int k = 0; k < W; k++)
            sum[k] += widen(p.x[k]);
    }
}

// The chunk that begins at `at`, for this thread's W columns.
template <typename T, int W>
__device__ inline void sum_chunk(const mt_embedding &e, const int32_t *begins, int64_t at,
                                 int64_t i, float *chunks)
{
    const int64_t id = e.ids[at], last = begins[id + 1];
    const int64_t slot = slot_of(at, at == begins[id], e.tokens);
    pack<float, W> sum = {};

    add_tokens<T, W>(e, at, at + CHUNK < last ? at + CHUNK : last, i, sum.x);
    *reinterpret_cast<pack<float, W> *>(chunks + slot * e.n + i) = sum;
}

// chunks[slot] = the chunk's sum, for rows of several chunks.
// Blocks: x over 256 neighbouring ids, where two chunks begin at the most; y over the columns.
// Bytes: the rows' dy, once; limit: HBM. Where no row has 257 tokens, the blocks end at once.
template <typename T, int W>
__global__ void __launch_bounds__(THREADS)
sum_chunks(const mt_embedding e, const int32_t *begins, float *chunks)
{
    __shared__ int32_t found[2];          // indices; -1: none of this kind
    const int64_t i = ((int64_t)blockIdx.y * THREADS + threadIdx.x) * W;

    if (threadIdx.x < 2)
        found[threadIdx.x] = -1;
    __syncthreads();
    for (int64_t at = (int64_t)blockIdx.x * CHUNK + threadIdx.x;
         at < (int64_t)blockIdx.x * CHUNK + CHUNK && at < e.tokens; at += THREADS) {
        const int64_t id = e.ids[at];

        if (id < 0 || id >= e.rows || id == e.padding || begins[id + 1] - begins[id] <= CHUNK)
            continue;
        if ((at - begins[id]) % CHUNK == 0)
            found[at != begins[id]] = (int32_t)at;
    }
    __syncthreads();
    if (i >= e.n)
        return;
    for (int kind = 0; kind < 2; kind++)
        if (found[kind] >= 0)
            sum_chunk<T, W>(e, begins, found[kind], i, chunks);
}

// The W columns of row v: its tokens, or the chunks' sums where there are several.
template <typename T, int W>
__device__ inline pack<T, W> row_of(const mt_embedding &e, int64_t begin, int64_t end, int64_t i,
                                    const float *chunks)
{
    float      sum[W] = {};
    pack<T, W> out;

    if (end - begin <= CHUNK) {
        add_tokens<T, W>(e, begin, end, i, sum);
    } else {
#pragma unroll 4
        for (int64_t at = begin; at < end; at += CHUNK) {
            const int64_t slot = slot_of(at, at == begin, e.tokens);
            pack<float, W> p = *reinterpret_cast<const pack<float, W> *>(chunks + slot * e.n + i);
            for (int k = 0; k < W; k++)
                sum[k] += p.x[k];
        }
    }
    for (int k = 0; k < W; k++)
        out.x[k] = narrow<T>(sum[k]);
    return out;
}

// out[v] of embedding.h: a block for each row of the table, zeros where it has no token.
// Bytes: rows * n * sizeof(T) written, tokens * n * sizeof(T) read. Limit: HBM,
//        4.0 to 4.3 TB/s on an H200.
template <typename T, int W>
__global__ void __launch_bounds__(THREADS)
write_rows(const mt_embedding e, const int32_t *begins, const float *chunks)
{
    const int64_t v = blockIdx.x, begin = begins[v], end = v == e.padding ? begin : begins[v + 1];
    T *out = static_cast<T *>(e.out) + v * e.n;

    for (int64_t i = threadIdx.x * W; i < e.n; i += THREADS * W)
        *reinterpret_cast<pack<T, W> *>(out + i) = row_of<T, W>(e, begin, end, i, chunks);
}

template <typename T, int W>
void launch(cudaStream_t stream, const mt_embedding &e, const int32_t *begins, float *chunks)
{
    dim3 grid((unsigned)ceil_div(e.tokens, CHUNK), (unsigned)ceil_div(e.n, THREADS * W));

    if (e.tokens > CHUNK)
        sum_chunks<T, W><<<grid, THREADS, 0, stream>>>(e, begins, chunks);
    write_rows<T, W><<<(unsigned)e.rows, THREADS, 0, stream>>>(e, begins, chunks);
}

template <typename T>
void launch_width(cudaStream_t stream, const mt_embedding &e, const int32_t *begins, float *chunks)
{
    constexpr int W = 16 / sizeof(T);

    if (mt::aligned16(e.dy) && mt::aligned16(e.out) && e.n % W == 0 && e.stride % W == 0)
        launch<T, W>(stream, e, begins, chunks);
    else
        launch<T, 1>(stream, e, begins, chunks);
}

} // namespace

extern "C" const char *mt__embedding_backward_cuda(uintptr_t handle, const mt_embedding *e,
                                                   int32_t *begins, float *chunks)
{
    cudaStream_t stream = reinterpret_cast<cudaStream_t>(handle);
    mt::Current  current(stream);

    if (!current.ok)
        return mt::NO_CONTEXT;
    if (e->rows == 0 || e->n == 0)
        return nullptr;
    find_rows<<<(unsigned)ceil_div(e->rows + 1, THREADS), THREADS, 0, stream>>>(
        e->ids, e->tokens, e->rows, begins);
    switch (e->dtype) {
    case MT_F32:  launch_width<float>(stream, *e, begins, chunks);         break;
    case MT_BF16: launch_width<__nv_bfloat16>(stream, *e, begins, chunks); break;
    default:      launch_width<__half>(stream, *e, begins, chunks);        break;
    }
    return mt::launch_error();
}
