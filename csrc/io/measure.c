/* measure.c — a disk's rates: as many requests under way as there are buffers,
 * each put again when it ends. */
#include "file.h"

#include "../core/arena.h"
#include "../core/lock.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct run {
    mt_blocks      *blocks;
    mt_mutex        mu;
    pthread_cond_t  over;
    uint64_t        n;           /* in the file */
    uint64_t        next, end;   /* requests put, of so many. mu */
    int             under_way;   /* mu */
    int             mode;        /* 0 writes, 1 reads, 2 in turn */
    mt_status       st;          /* of the first that failed. mu */
    char            text[320];
} run;

/* Under mu. In turn: reads begin at the file's start, writes half a file on. */
static void put_next(run *t, mt_request *r)
{
    uint64_t number = t->next++;

    r->write = t->mode == 2 ? (int)(number % 2) : t->mode == 0;
    if (t->mode == 2)
        number = (number / 2 + (r->write ? t->n / 2 : 0)) % t->n;
    r->at = number % t->n * r->bytes;
    t->under_way++;
    t->blocks->ops->put(t->blocks, r);
}

/* On a thread of the file's. */
static void request_over(mt_request *r)
{
    run *t = r->arg;

    MT_HOLD(&t->mu);
    t->under_way--;
    if (r->st != MT_OK && t->st == MT_OK) {
        t->st = r->st;
        memcpy(t->text, r->text, sizeof t->text);
    }
    if (t->st == MT_OK && t->next < t->end)
        put_next(t, r);
    pthread_cond_signal(&t->over);
}

/* bytes/s of one way over the whole file. */
static mt_status timed(run *t, mt_request *r, int depth, int mode, double *rate)
{
    uint64_t begun = mt_now_ns();

    mt_lock(&t->mu);
    t->mode = mode;
    t->next = 0;
    t->end = t->n;
    for (int i = 0; i < depth && t->next < t->end; i++)
        put_next(t, &r[i]);
    while (t->under_way > 0)
        mt_cond_wait(&t->over, &t->mu);
    mt_unlock(&t->mu);
    if (t->st != MT_OK)
        return mt_fail_again(t->st, t->text);
    *rate = (double)(t->end * r->bytes) / ((double)(mt_now_ns() - begun) * 1e-9);
    return MT_OK;
}

/* Memory as the engine's buffers have it: its pages are there, and huge.
 * A direct transfer looks at each. */
static mt_status make_requests(run *t, int depth, size_t each, mt_arena *memory, mt_request *r)
{
    MT_DO(mt_arena_open(memory, (size_t)depth * each, NULL, NULL,
                        "requests to measure a disk with", 0));
    for (int i = 0; i < depth; i++) {
        r[i] = (mt_request){ .mem = (char *)memory->base + (size_t)i * each, .bytes = each,
                             .done = request_over, .arg = t };
        memset(r[i].mem, i + 1, each);
    }
    return MT_OK;
}

mt_status mt_disk_measure(const char *dir, uint64_t bytes, size_t each, int depth, int n_threads,
                          mt_disk_rates *out)
{
    run           t = { .mu = MT_MUTEX(MT_RANK_MEASURE), .over = PTHREAD_COND_INITIALIZER };
    mt_request   *r = calloc((size_t)(depth > 0 ? depth : 1), sizeof *r);
    mt_arena      memory = { 0 };
    mt_file      *f = NULL;
    mt_disk_rates found;
    mt_status     st;

    if (depth < 1 || each == 0 || each % MT_BLOCK_ALIGN != 0 || bytes < each || r == NULL ||
        (size_t)depth > SIZE_MAX / each) {
        free(r);
        return MT_FAIL(MT_EINVAL, "nvme: %llu bytes in requests of %zu, %d under way; each is a "
                       "multiple of %zu",
                       (unsigned long long)bytes, each, depth, MT_BLOCK_ALIGN);
    }
    MT_TRY(make_requests(&t, depth, each, &memory, r));
    MT_TRY(mt_file_open(dir, 0, n_threads, NULL, &f));
    MT_TRY(mt_file_reserve(f, bytes));
    t.blocks = mt_file_blocks(f);
    t.n = bytes / each;
    MT_TRY(timed(&t, r, depth, 0, &found.fresh));
    MT_TRY(timed(&t, r, depth, 0, &found.write));
    MT_TRY(timed(&t, r, depth, 1, &found.read));
    MT_TRY(timed(&t, r, depth, 2, &found.both));
    found.direct = mt_file_stats_get(f).direct;
    *out = found;
fail:
    mt_file_close(f);
    mt_arena_close(&memory);
    free(r);
    return st;
}
