/* embedding.c — the gradient of a table on the host: see embedding.h. */
#include "embedding.h"
#include "element.h"

#define ROWS    64               /* of the table, in one chunk of work */
#define COLUMNS 256              /* summed at a time */

/* The first index of ids that is not below v. */
static int64_t first_of(const mt_embedding *e, int64_t v)
{
    int64_t low = 0, high = e->tokens;

    while (low < high) {
        int64_t middle = low + (high - low) / 2;

        if (e->ids[middle] < v)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void add_chunk(const mt_embedding *e, int64_t begin, int64_t end, int64_t first,
                      int64_t width, float *sum)
{
    for (int64_t i = 0; i < width; i++)
        sum[i] = 0;
    for (int64_t at = begin; at < end; at++)
        for (int64_t i = 0; i < width; i++)
            sum[i] += mt__get(e->dtype, e->dy, e->order[at] * e->stride + first + i);
}

/* Columns first .. first+width of row v, whose tokens are at indices begin .. end. */
static void sum_row(const mt_embedding *e, int64_t v, int64_t begin, int64_t end, int64_t first,
                    int64_t width)
{
    float sum[COLUMNS] = { 0 }, chunk[COLUMNS];

    for (int64_t at = begin; at < end; at += MT_EMBEDDING_CHUNK) {
        int64_t stop = at + MT_EMBEDDING_CHUNK < end ? at + MT_EMBEDDING_CHUNK : end;

        add_chunk(e, at, stop, first, width, chunk);
        for (int64_t i = 0; i < width; i++)
            sum[i] += chunk[i];
    }
    for (int64_t i = 0; i < width; i++)
        mt__put(e->dtype, e->out, v * e->n + first + i, sum[i]);
}

static void some_rows(void *ctx, int64_t chunk)
{
    const mt_embedding *e = ctx;
    int64_t last = chunk * ROWS + ROWS < e->rows ? chunk * ROWS + ROWS : e->rows;

    for (int64_t v = chunk * ROWS; v < last; v++) {
        int64_t begin = first_of(e, v), end = v == e->padding ? begin : first_of(e, v + 1);

        for (int64_t first = 0; first < e->n; first += COLUMNS)
            sum_row(e, v, begin, end, first, e->n - first < COLUMNS ? e->n - first : COLUMNS);
    }
}

void mt_embedding_backward(mt_pool *pool, const mt_embedding *e)
{
    mt_embedding copy = *e;

    mt_pool_run(pool, some_rows, &copy, (e->rows + ROWS - 1) / ROWS);
}
