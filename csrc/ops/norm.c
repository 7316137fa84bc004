/* norm.c — the norms of norm.h as they are to be read; the CUDA kernels are compared with this.
 *
 * Everything that takes dt is inlined below a switch over it, so that each type has its own loops.
 */
#include "norm.h"
#include "fpenv.h"
#include "element.h"
#include <math.h>

#define INLINE static inline __attribute__((always_inline))
#define LANES 128                    /* the fewer numbers to a lane, the fewer roundings */
#define BLOCK 32                     /* rows a thread takes at once; columns are added by block */

INLINE int64_t row_begin(const mt_rows *w, int64_t row)
{
    int64_t i2 = row % w->size[2], rest = row / w->size[2];

    return rest / w->size[1] * w->stride[0] + rest % w->size[1] * w->stride[1] + i2 * w->stride[2];
}

INLINE const void *row_at(mt_dtype dt, const void *p, int64_t begin)
{
    return (const char *)p + begin * (int64_t)(dt == MT_F32 ? 4 : 2);
}

INLINE void *row_to(mt_dtype dt, void *p, int64_t begin)
{
    return (char *)p + begin * (int64_t)(dt == MT_F32 ? 4 : 2);
}

INLINE float fold(float *lane)
{
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int l = 0; l < half; l++)
            lane[l] += lane[l + half];
    return lane[0];
}

INLINE float weight_at(mt_dtype dt, const mt_norm *f, int64_t i)
{
    return f->weight != NULL ? mt__get(dt, f->weight, i) + f->plus : 1.0f;
}

INLINE void write_y(mt_dtype dt, const mt_norm *f, void *y, int64_t i, float hat)
{
    float h = (f->round_first ? mt__rounded(dt, hat) : hat) * weight_at(dt, f, i);

    mt__put(dt, y, i, f->bias != NULL ? h + mt__get(dt, f->bias, i) : h);
}

/* ---- forward ---- */

INLINE float row_mean(mt_dtype dt, const void *s, int64_t n)
{
    float lane[LANES] = {0};

    for (int64_t i = 0; i < n; i++)
        lane[i % LANES] += mt__get(dt, s, i);
    return fold(lane) / (float)n;
}

INLINE float row_rstd(mt_dtype dt, const void *s, int64_t n, float mean, float eps)
{
    float lane[LANES] = {0};

    for (int64_t i = 0; i < n; i++) {
        float d = mt__get(dt, s, i) - mean;
        lane[i % LANES] += d * d;
    }
    return 1.0f / sqrtf(fold(lane) / (float)n + eps);
}

INLINE void forward_row(mt_dtype dt, const mt_norm *f, const mt_norm_ahead *a, int64_t row)
{
    const void *s = row_at(dt, a->x, row_begin(&a->x_rows, row));
    void       *y = row_to(dt, a->y, row * f->n);
    float       mean = 0, rstd;

    if (a->add != NULL) {
        const void *add = row_at(dt, a->add, row * f->n);
        void       *sum = row_to(dt, a->s, row * f->n);

        for (int64_t i = 0; i < f->n; i++)
            mt__put(dt, sum, i, mt__get(dt, s, i) + mt__get(dt, add, i));
        s = sum;
    }
    if (f->centred)
        a->mean[row] = mean = row_mean(dt, s, f->n);
    a->rstd[row] = rstd = row_rstd(dt, s, f->n, mean, f->eps);
    for (int64_t i = 0; i < f->n; i++)
        write_y(dt, f, y, i, (mt__get(dt, s, i) - mean) * rstd);
}

/* ---- backward ---- */

/* dw, db: this block's sums over its rows so far, [n]. */
INLINE void backward_row(mt_dtype dt, const mt_norm *f, const mt_norm_back *b, int64_t row,
                             float *dw, float *db)
{
    const void *dy = row_at(dt, b->dy, row_begin(&b->dy_rows, row));
    const void *s  = row_at(dt, b->s, row_begin(&b->s_rows, row));
    void       *dx = row_to(dt, b->dx, row_begin(&b->dx_rows, row));
    float       mean = f->centred ? b->mean[row] : 0, rstd = b->rstd[row];
    float       along[LANES] = {0}, total[LANES] = {0}, mean_g, mean_gh;

    for (int64_t i = 0; i < f->n; i++) {
        float d = mt__get(dt, dy, i), hat = (mt__get(dt, s, i) - mean) * rstd;
        float g = d * weight_at(dt, f, i);

        along[i % LANES] += g * hat;
        total[i % LANES] += g;
        dw[i] += d * hat;
        db[i] += d;
    }
    mean_gh = fold(along) / (float)f->n;
    mean_g  = f->centred ? fold(total) / (float)f->n : 0;
    for (int64_t i = 0, at = row * f->n; i < f->n; i++, at++) {
        float hat = (mt__get(dt, s, i) - mean) * rstd;
        float g   = mt__get(dt, dy, i) * weight_at(dt, f, i);
        float d   = rstd * (g - mean_g - hat * mean_gh);

        mt__put(dt, dx, i, b->add != NULL ? d + mt__get(dt, b->add, at) : d);
        if (b->y != NULL)
            write_y(dt, f, row_to(dt, b->y, row * f->n), i, hat);
    }
}

/* ---- a block of rows, by whichever thread takes it ---- */

typedef struct job {
    const mt_norm       *norm;
    const mt_norm_ahead *ahead;      /* NULL: backward */
    const mt_norm_back  *back;
} job;

INLINE void block_rows(mt_dtype dt, const job *j, int64_t from, int64_t to, float *dw)
{
    for (int64_t row = from; row < to; row++)
        if (j->ahead != NULL)
            forward_row(dt, j->norm, j->ahead, row);
        else
            backward_row(dt, j->norm, j->back, row, dw, dw + j->norm->n);
}

static __attribute__((noinline)) void block_of_type(const job *j, int64_t from, int64_t to,
                                                    float *dw)
{
    switch (j->norm->dt) {
    case MT_F32:  block_rows(MT_F32, j, from, to, dw);  break;
    case MT_BF16: block_rows(MT_BF16, j, from, to, dw); break;
    default:      block_rows(MT_F16, j, from, to, dw);  break;
    }
}

static void run_block(void *arg, int64_t block)
{
    const job *j = arg;
    int64_t    from = block * BLOCK, n = j->norm->n;
    int64_t    to = from + BLOCK < j->norm->rows ? from + BLOCK : j->norm->rows;
    float     *dw = j->back != NULL ? j->back->partial + block * 2 * n : NULL;
    unsigned   was = mt__fp_begin();

    for (int64_t i = 0; dw != NULL && i < 2 * n; i++)
        dw[i] = 0;
    block_of_type(j, from, to, dw);
    mt__fp_end(was);
}

static int64_t block_count(const mt_norm *f) { return (f->rows + BLOCK - 1) / BLOCK; }

int64_t mt_norm_partials(const mt_norm *f)
{
    return 2 * f->n * (f->rows > 0 ? block_count(f) : 1);
}

void mt_norm_forward(mt_pool *pool, const mt_norm *norm, const mt_norm_ahead *a)
{
    mt_pool_run(pool, run_block, &(job){ .norm = norm, .ahead = a }, block_count(norm));
}

/* Column sums over all blocks, in order: dweight lies first in a block's partial sums,
 * dbias behind. */
static void add_blocks(const mt_norm *f, const float *partial, void *out)
{
    for (int64_t i = 0; i < f->n; i++) {
        float sum = 0;

        for (int64_t block = 0; block < block_count(f); block++)
            sum += partial[block * 2 * f->n + i];
        mt__put(f->dt, out, i, sum);
    }
}

void mt_norm_backward(mt_pool *pool, const mt_norm *norm, const mt_norm_back *b)
{
    unsigned was = mt__fp_begin();

    mt_pool_run(pool, run_block, &(job){ .norm = norm, .back = b }, block_count(norm));
    if (b->dweight != NULL)
        add_blocks(norm, b->partial, b->dweight);
    if (b->dbias != NULL)
        add_blocks(norm, b->partial + norm->n, b->dbias);
    mt__fp_end(was);
}
