/* gemm.c — see gemm.h. */
#include "gemm.h"
#include "element.h"
#include "fp8.h"
#include <string.h>

/* ---- what is asked for ---- */

/* One order fits when its inner stride is 1 and its lines do not overlap; a line of one element has
 * no inner stride, a single line no outer one. */
static int fits(int64_t inner, int64_t inner_stride, int64_t outer, int64_t outer_stride,
                int64_t *ld)
{
    if (inner > 1 && inner_stride != 1)
        return 0;
    if (outer > 1 && outer_stride < inner)
        return 0;
    *ld = outer > 1 ? outer_stride : inner > 1 ? inner : 1;
    return 1;
}

mt_status mt_gemm_matrix_of(const char *what, const int64_t *size, const int64_t *stride,
                            mt_gemm_matrix *out)
{
    int64_t ld = 0;
    int     by_columns = 0;

    if (!fits(size[1], stride[1], size[0], stride[0], &ld)) {
        by_columns = 1;
        if (!fits(size[0], stride[0], size[1], stride[1], &ld))
            return MT_FAIL(MT_EINVAL,
                           "%s [%lld, %lld] has strides (%lld, %lld): neither its rows nor "
                           "its columns are dense; pass x.contiguous()", what, (long long)size[0],
                           (long long)size[1], (long long)stride[0], (long long)stride[1]);
    }
    out->rows = size[0];
    out->cols = size[1];
    out->ld = ld;
    out->by_columns = by_columns;
    return MT_OK;
}

size_t mt_gemm_bytes(const mt_gemm_matrix *m, mt_dtype dt)
{
    int64_t lines = m->by_columns ? m->cols : m->rows, each = m->by_columns ? m->rows : m->cols;

    return (size_t)((lines - 1) * m->ld + each) * mt_dtype_bytes(dt);
}

/* ---- in a BLAS's words ---- */

static struct mt_gemm_seen seen(const mt_gemm_matrix *m)
{
    struct mt_gemm_seen s = { .data = m->data, .rows = m->cols, .cols = m->rows, .ld = m->ld };

    if (m->by_columns) {
        s.rows = m->rows;
        s.cols = m->cols;
        s.transposed = 1;
    }
    return s;
}

mt_gemm_blas mt_gemm_to_blas(const mt_gemm *g)
{
    return (mt_gemm_blas){ .left = seen(&g->b), .right = seen(&g->a), .out = seen(&g->c) };
}

static int64_t alignment(const void *p)
{
    uintptr_t bits = (uintptr_t)p | 16;

    return (int64_t)(bits & (~bits + 1));        /* the lowest bit that is set */
}

mt_gemm_key mt_gemm_key_of(const mt_gemm *g, int device, float beta)
{
    return (mt_gemm_key){
        .device = device, .ab = g->ab, .c_type = g->c_type, .tf32 = g->tf32,
        .accumulates = g->ab == MT_F8E4M3 ? g->base != NULL : beta != 0.0f,
        .fast = g->fast, .biased = g->bias != NULL,
        .m = g->c.rows, .n = g->c.cols, .k = g->a.cols,
        .ld = { g->c.ld, g->a.ld, g->b.ld, g->base_ld },
        .by_columns = { g->a.by_columns, g->b.by_columns },
        .align = { alignment(g->c.data), alignment(g->a.data), alignment(g->b.data),
                   alignment(g->base) },
    };
}

mt_gemm mt_gemm_sums(const mt_gemm *g, void *sums)
{
    mt_gemm bare = *g;

    bare.c.data = sums;
    bare.c.ld = g->c.cols;
    bare.bias = bare.base = NULL;
    bare.a_scale = bare.b_scale = NULL;
    return bare;
}

/* ---- the definition ---- */

#define TILE  64     /* rows and columns of c that a chunk makes */
#define DEPTH 256    /* of K, packed at a time: 64 KiB of a and as much of b */
#define ROWS  4      /* a register block: its 4 x 8 sums stay in registers */
#define COLS  8

typedef struct job {
    const mt_gemm *g;
    float          alpha, beta;
    int64_t        tiles_across;
} job;

static float value(mt_dtype dt, const void *x, int64_t i)
{
    return dt == MT_F8E4M3 ? mt_fp8_value(((const uint8_t *)x)[i]) : mt__get(dt, x, i);
}

/* Lines (rows of a, columns of b) first..first+TILE of k..k+depth, as fp32 in strips of `wide`
 * lines: element (line, d) at strip*wide*depth + d*wide + line%wide. Lines behind the last are
 * zeros, whose products nobody stores. */
static void pack(float *out, const mt_gemm_matrix *m, mt_dtype dt, int lines_are_rows, int wide,
                 int64_t first, int64_t k, int64_t depth)
{
    int64_t lines = lines_are_rows ? m->rows : m->cols;
    int64_t per_line = lines_are_rows != m->by_columns ? m->ld : 1;
    int64_t per_k    = lines_are_rows != m->by_columns ? 1 : m->ld;

    for (int64_t l = 0; l < TILE; l++) {
        float  *to = out + l / wide * wide * depth + l % wide;
        int64_t from = (first + l) * per_line + k * per_k;

        for (int64_t d = 0; d < depth; d++)
            to[d * wide] = first + l < lines ? value(dt, m->data, from + d * per_k) : 0.0f;
    }
}

/* sum[i][j] += a[i,d] * b[d,j], d ascending: the sums go on where the depth before stopped. */
static void multiply(float *restrict sum, const float *restrict a, const float *restrict b,
                     int64_t depth)
{
    float s[ROWS][COLS];

    for (int i = 0; i < ROWS; i++)
        memcpy(s[i], sum + i * TILE, sizeof s[i]);
    for (int64_t d = 0; d < depth; d++)
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < COLS; j++)
                s[i][j] += a[d * ROWS + i] * b[d * COLS + j];
    for (int i = 0; i < ROWS; i++)
        memcpy(sum + i * TILE, s[i], sizeof s[i]);
}

/* What an element is when its codes are summed. */
static float of_codes(const mt_gemm *g, float alpha, float sum, int64_t i, int64_t j)
{
    float x = alpha * (sum * g->a_scale[i] * g->b_scale[j]);

    if (g->bias != NULL)
        x += mt__get(g->c_type, g->bias, j);
    if (g->base != NULL)
        x += mt__get(g->c_type, g->base, i * g->base_ld + j);
    return x;
}

static void finish(const job *t, const float *sum, int64_t row, int64_t col)
{
    const mt_gemm_matrix *c = &t->g->c;
    int64_t rows = c->rows - row < TILE ? c->rows - row : TILE;
    int64_t cols = c->cols - col < TILE ? c->cols - col : TILE;

    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++) {
            int64_t at = (row + i) * c->ld + col + j;
            float   x;

            if (t->g->ab == MT_F8E4M3) {
                x = of_codes(t->g, t->alpha, sum[i * TILE + j], row + i, col + j);
                mt__put(t->g->c_type, c->data, at, x);
                continue;
            }
            x = t->alpha * sum[i * TILE + j];
            if (t->beta != 0.0f)
                x += t->beta * mt__get(t->g->c_type, c->data, at);
            mt__put(t->g->c_type, c->data, at, x);
        }
}

/* Any thread of the pool: one tile of c. */
static void make_tile(void *arg, int64_t chunk)
{
    const job     *t = arg;
    const mt_gemm *g = t->g;
    int64_t row = chunk / t->tiles_across * TILE, col = chunk % t->tiles_across * TILE;
    float   sum[TILE * TILE] = { 0 }, a[TILE * DEPTH], b[TILE * DEPTH];

    for (int64_t k = 0; k < g->a.cols; k += DEPTH) {
        int64_t depth = g->a.cols - k < DEPTH ? g->a.cols - k : DEPTH;

        pack(a, &g->a, g->ab, 1, ROWS, row, k, depth);
        pack(b, &g->b, g->ab, 0, COLS, col, k, depth);
        for (int64_t i = 0; i < TILE; i += ROWS)
            for (int64_t j = 0; j < TILE; j += COLS)
                multiply(sum + i * TILE + j, a + i * depth, b + j * depth, depth);
    }
    finish(t, sum, row, col);
}

void mt_gemm_host(mt_pool *pool, const mt_gemm *g, float alpha, float beta)
{
    int64_t down = (g->c.rows + TILE - 1) / TILE, across = (g->c.cols + TILE - 1) / TILE;
    job     t = { .g = g, .alpha = alpha, .beta = beta, .tiles_across = across };

    mt_pool_run(pool, make_tile, &t, down * across);
}
