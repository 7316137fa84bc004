/* shards.c — copiers fill blocks share by share, writers write them; memory goes round: idle,
 * a block's, a writer's job, idle.
 *
 * Two kinds of thread, since a disk wants several requests under way, and a step whose updates wait
 * for their units' bytes wants to go on: with spare blocks the copiers run ahead of the disk by as
 * many as there are.
 */
#include "shards.h"

#include "../core/arena.h"
#include "../core/forks.h"
#include "../core/worker.h"
#include "sum.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef struct shard_file {
    int      fd;                     /* -1: not open */
    uint64_t left;                   /* of our blocks those not yet written. mu */
} shard_file;

typedef struct buffer {
    mt_job         job;              /* when it is full */
    char          *mem;
    size_t         block;            /* whose it is */
    struct buffer *next;
} buffer;

/* A block of a shard, to be written by this process. */
typedef struct stretch {
    int     shard;                   /* these three: constant */
    size_t  number;                  /* in the shard */
    size_t  first;                   /* extent that has its first byte */
    size_t  uncopied;                /* shares. mu */
    buffer *in;                      /* NULL: none of it was taken yet, or all was copied. mu */
} stretch;

/* Constant but for taken. */
typedef struct share {
    size_t block;
    int    source;                   /* a unit; n_units: nobody */
    int    first;                    /* of its block: nobody's bytes there come with it */
    int    taken;                    /* mu */
} share;

enum { FRESH, BEGINNING, BEGUN, ENDED };

typedef struct source {              /* a unit; behind the last one, nobody */
    size_t next, end;                /* its shares, less those before next, which are taken. mu but
                                      * for end, as below */
    size_t left;                     /* of them that nobody copied yet */
    int    at;
} source;

struct mt_shards {
    const mt_shard *shards;          /* these eleven: constant, but for what the blocks' and shares'
                                      * own fields say */
    int             n;
    mt_shards_how   how;
    shard_file     *files;           /* [n] */
    stretch        *blocks;          /* [n_blocks] */
    share          *shares;          /* [n_shares] by source, each's in the order of blocks */
    size_t          n_blocks, n_shares, n_buffers;
    buffer         *buffers;         /* [n_buffers] */
    mt_arena        memory;

    mt_mutex        mu;
    pthread_cond_t  changed;
    source         *sources;         /* [how.n_units + 1] */
    buffer         *idle;            /* mu, as all below */
    int             next;            /* sources before it have no share that is not taken */
    size_t          taken;           /* shares */
    size_t          open;            /* blocks that have memory and are not full */
    size_t          moving;          /* shares that are being copied, and blocks that are full or
                                      * being written */
    size_t          brought;         /* bytes of units between begin and end */
    size_t          written;         /* blocks */
    uint64_t        bytes;           /* written */
    int             stop;
    mt_status       st;
    char            text[512];
    mt_worker       copiers, writers;
    mt_job         *copies;          /* [how.n_copiers] one a thread, until all is copied */
};

/* ---- one block of one file: no lock ------------------------------------------------------- */

static const mt_file_calls *calls_of(const mt_file_calls *given)
{
    return given != NULL ? given : &mt_file_system;
}

static size_t block_bytes(const mt_shard *s, size_t number)
{
    uint64_t left = s->bytes - (uint64_t)number * MT_BLOCK_BYTES;

    return left < MT_BLOCK_BYTES ? (size_t)left : MT_BLOCK_BYTES;
}

/* `bytes` of a turned tensor, from the file's byte `from` of it on: element by element,
 * the first and last in part. */
static void copy_turned(const mt_extent *e, uint64_t from, size_t bytes, char *mem, int to_extent)
{
    const mt_turn *t = e->turn;
    size_t         index[MT_TURN_DIMS], left = (size_t)(from / t->item),
                   skip = (size_t)(from % t->item);
    char          *at = e->mem;

    for (int d = t->dims; d-- > 0; left /= t->shape[d]) {
        index[d] = left % t->shape[d];
        at += index[d] * t->stride[d];
    }
    while (bytes > 0) {
        size_t n = t->item - skip < bytes ? t->item - skip : bytes;

        memcpy(to_extent ? at + skip : mem, to_extent ? mem : at + skip, n);
        mem += n;
        bytes -= n;
        skip = 0;
        for (int d = t->dims; d-- > 0;) {
            at += t->stride[d];
            if (++index[d] < t->shape[d])
                break;
            at -= t->shape[d] * t->stride[d];
            index[d] = 0;
        }
    }
}

/* What an extent and [at, at + bytes) have in common, one way or the other. */
static void copy_extent(const mt_extent *e, uint64_t at, size_t bytes, char *mem, int to_extent)
{
    uint64_t from = e->at > at ? e->at : at;
    uint64_t to = e->at + e->bytes < at + bytes ? e->at + e->bytes : at + bytes;

    if (from >= to)
        return;
    if (e->turn != NULL)
        copy_turned(e, from - e->at, (size_t)(to - from), mem + (from - at), to_extent);
    else if (to_extent)
        memcpy((char *)e->mem + (from - e->at), mem + (from - at), to - from);
    else
        memcpy(mem + (from - at), (char *)e->mem + (from - e->at), to - from);
}

/* ---- copiers ------------------------------------------------------------------------------ */

static void fail(mt_shards *w, mt_status st)
{
    MT_HOLD(&w->mu);
    if (w->st == MT_OK) {
        w->st = st;
        snprintf(w->text, sizeof w->text, "%s", mt_last_error());
    }
    w->stop = 1;
    pthread_cond_broadcast(&w->changed);
}

static size_t brings(const mt_shards *w, int unit)
{
    return w->how.brings != NULL && unit < w->how.n_units ? w->how.brings[unit] : 0;
}

#define NONE SIZE_MAX

/* Under mu. The source's next share that can be copied now: it is begun, or may be, and the block
 * has memory, or there is some. */
static size_t next_of(mt_shards *w, int unit)
{
    source *o = &w->sources[unit];

    while (o->next < o->end && w->shares[o->next].taken)
        o->next++;
    /* One unit at a time takes memory; small ones together, since each is a wait of its own. */
    if (o->at == FRESH && w->brought > 0 && brings(w, unit) > 0 &&
        w->brought + brings(w, unit) > MT_BLOCK_BYTES)
        return NONE;
    for (size_t i = o->next; i < o->end; i++)
        if (!w->shares[i].taken && (w->idle != NULL || w->blocks[w->shares[i].block].in != NULL))
            return i;
    return NONE;
}

/* Under mu. Of units that are begun, the first's. */
static size_t next_of_begun(mt_shards *w)
{
    size_t found = NONE;

    while (w->next < w->how.n_units && w->sources[w->next].next == w->sources[w->next].end)
        w->next++;
    for (int unit = w->next; unit <= w->how.n_units && found == NONE; unit++)
        if (w->sources[unit].at != FRESH)
            found = next_of(w, unit);
    return found;
}

/* Under mu. The wanted unit's next share; where that has to wait for another's end, what brings it
 * about. Else the next of all. NONE: somebody has to get on first. */
static size_t choose(mt_shards *w)
{
    int    wanted = w->how.wanted != NULL ? w->how.wanted(w->how.arg) : -1;
    size_t found = NONE;

    /* Out of turn it leaves blocks that wait for its neighbours:
     * only while there is memory for them. */
    if (wanted >= w->how.n_units ||
        (wanted >= 0 && w->sources[wanted].at == FRESH && 2 * w->open > w->n_buffers))
        wanted = -1;
    if (wanted >= 0)
        found = next_of(w, wanted);
    if (found == NONE)
        found = next_of_begun(w);
    if (found == NONE && (wanted < 0 || w->sources[wanted].next == w->sources[wanted].end))
        found = next_of(w, w->next);
    /* Nothing moves, and all memory is that of blocks whose next units may not begin: one does. */
    for (size_t i = 0; i < w->n_shares && w->moving == 0 && found == NONE; i++)
        if (!w->shares[i].taken && w->blocks[w->shares[i].block].in != NULL)
            found = i;
    return found;
}

/* Under mu. Its block has memory from now on.
 * Returns 1 where the unit is for the caller to begin. */
static int take(mt_shards *w, share *p)
{
    stretch *b = &w->blocks[p->block];
    source  *o = &w->sources[p->source];
    int      begins = o->at == FRESH;

    p->taken = 1;
    w->taken++;
    w->moving++;
    if (b->in == NULL) {
        b->in = w->idle;
        w->idle = b->in->next;
        b->in->block = p->block;
        w->open++;
    }
    if (begins) {
        o->at = BEGINNING;
        w->brought += brings(w, p->source);
    }
    return begins;
}

/* NULL: there is nothing to do any more. */
static share *take_share(mt_shards *w, int *begins)
{
    size_t i = NONE;
    share *p = NULL;

    MT_HOLD(&w->mu);
    while (!w->stop && w->taken < w->n_shares && (i = choose(w)) == NONE)
        mt_cond_wait(&w->changed, &w->mu);
    if (!w->stop && w->taken < w->n_shares) {
        p = &w->shares[i];
        *begins = take(w, p);
    }
    return p;
}

/* The thread that took its first share begins a unit, the others wait for that. */
static mt_status begin_unit(mt_shards *w, int unit, int begins)
{
    source   *o = &w->sources[unit];
    mt_status st = MT_OK;

    if (begins && unit < w->how.n_units && w->how.begin != NULL)
        st = w->how.begin(w->how.arg, unit);
    MT_HOLD(&w->mu);
    if (begins) {
        o->at = BEGUN;
        pthread_cond_broadcast(&w->changed);
    }
    while (o->at == BEGINNING)
        mt_cond_wait(&w->changed, &w->mu);
    return st;
}

/* Behind the copy of its last share. */
static void end_unit(mt_shards *w, int unit)
{
    int last;

    mt_lock(&w->mu);
    last = --w->sources[unit].left == 0;
    if (last)
        w->sources[unit].at = ENDED;
    mt_unlock(&w->mu);
    if (!last || unit == w->how.n_units)
        return;
    if (w->how.end != NULL)
        w->how.end(w->how.arg, unit);
    mt_lock(&w->mu);
    w->brought -= brings(w, unit);
    pthread_cond_broadcast(&w->changed);
    mt_unlock(&w->mu);
}

/* When no thread copies: units without a byte in any file, or (not absent) those that never got
 * their last share. */
static void end_units(mt_shards *w, int absent)
{
    for (int unit = 0; unit < w->how.n_units; unit++)
        if (absent ? w->sources[unit].left == 0 : w->sources[unit].at != ENDED) {
            w->sources[unit].at = ENDED;
            if (w->how.end != NULL)
                w->how.end(w->how.arg, unit);
        }
}

static void copy_share(mt_shards *w, const share *p, char *mem)
{
    const stretch  *b = &w->blocks[p->block];
    const mt_shard *s = &w->shards[b->shard];
    size_t          bytes = block_bytes(s, b->number);
    uint64_t        at = (uint64_t)b->number * MT_BLOCK_BYTES;

    for (size_t i = b->first; i < s->n_extents && s->extents[i].at < at + bytes; i++)
        if (s->extents[i].unit == p->source || (s->extents[i].unit < 0 && p->first))
            copy_extent(&s->extents[i], at, bytes, mem, 0);
    if (p->first)
        memset(mem + bytes, 0, mt_file_pages(bytes) - bytes);
}

static void do_share(mt_shards *w, const share *p, int begins)
{
    stretch        *b = &w->blocks[p->block];
    const mt_shard *s = &w->shards[b->shard];
    buffer         *m = b->in;           /* until its last share is copied, so ours */
    mt_status       st = begin_unit(w, p->source, begins);
    int             full;

    if (st == MT_OK)
        copy_share(w, p, m->mem);
    else
        fail(w, st);                     /* so nothing of it is written */
    end_unit(w, p->source);
    mt_lock(&w->mu);
    if ((full = --b->uncopied == 0)) {
        b->in = NULL;
        w->open--;
    }
    mt_unlock(&w->mu);
    if (full)
        s->sums[b->number] = mt_block_sum(m->mem, block_bytes(s, b->number));
    mt_lock(&w->mu);
    if (full && !w->stop)
        (void)mt_worker_submit(&w->writers, &m->job);
    else
        w->moving--;
    pthread_cond_broadcast(&w->changed);
    mt_unlock(&w->mu);
}

static mt_status copy_all(void *arg, mt_job *job)
{
    mt_shards   *w = arg;
    const share *p;
    int          begins;

    (void)job;
    mt_unlock(&w->mu);
    while ((p = take_share(w, &begins)) != NULL)
        do_share(w, p, begins);
    mt_lock(&w->mu);
    return MT_OK;
}

/* ---- writers ------------------------------------------------------------------------------ */

/* For others, before the file's sync: a drive may take its time for that. */
static void give_back(mt_shards *w, buffer *m)
{
    MT_HOLD(&w->mu);
    m->next = w->idle;
    w->idle = m;
    w->moving--;
    pthread_cond_broadcast(&w->changed);
}

/* Behind the file's last block. Nothing shows how far a sync has come: it is patient. */
static mt_status sync_file(mt_shards *w, int i)
{
    const mt_shard *s = &w->shards[i];
    int             fd = w->files[i].fd;
    mt_post         post = { .patient = 1 };
    mt_status       st = MT_OK;

    if (w->how.watch != NULL)
        mt_watch_put(w->how.watch, &post, "save", NULL, s->path, NULL);
    if (ftruncate(fd, (off_t)s->bytes) != 0)
        st = MT_FAIL(MT_EDISK, "%s: setting its size, %" PRIu64 " bytes: %s", s->path, s->bytes,
                     strerror(errno));
    else if (fsync(fd) != 0)
        st = MT_FAIL(MT_EDISK, "%s: syncing it: %s", s->path, strerror(errno));
    if (w->how.watch != NULL)
        mt_watch_end(w->how.watch, &post, st);
    if (st == MT_OK) {
        mt_forks_close(fd);
        w->files[i].fd = -1;
    }
    return st;
}

/* A block that is written has moved: so does a save, however long it takes. */
static mt_status write_full(mt_shards *w, buffer *m, int stopped)
{
    const stretch  *b = &w->blocks[m->block];
    const mt_shard *s = &w->shards[b->shard];
    size_t          bytes = block_bytes(s, b->number);
    int             last = 0;
    mt_post         post;
    mt_status       st;

    if (stopped) {
        give_back(w, m);
        return MT_OK;
    }
    if (w->how.watch != NULL)
        mt_watch_begin(w->how.watch, &post, "save", NULL, s->path);
    st = mt_file_move(calls_of(w->how.calls), w->files[b->shard].fd, s->path, 1, m->mem, bytes,
                      (uint64_t)b->number * MT_BLOCK_BYTES);
    if (st == MT_OK) {
        mt_lock(&w->mu);
        last = --w->files[b->shard].left == 0;
        w->bytes += bytes;
        mt_unlock(&w->mu);
    }
    if (w->how.watch != NULL)
        mt_watch_end(w->how.watch, &post, st);
    give_back(w, m);
    return st == MT_OK && last ? sync_file(w, b->shard) : st;
}

static mt_status write_next(void *arg, mt_job *job)
{
    mt_shards *w = arg;
    int        stopped = w->stop;
    mt_status  st;

    mt_unlock(&w->mu);
    if ((st = write_full(w, (buffer *)(void *)job, stopped)) != MT_OK)
        fail(w, st);
    mt_lock(&w->mu);
    w->written += st == MT_OK && !stopped;       /* behind its file's sync, so all is synced */
    pthread_cond_broadcast(&w->changed);
    return MT_OK;
}

/* ---- open --------------------------------------------------------------------------------- */

/* Room is asked for before anything is written, where the file system can say. */
static mt_status make_file(mt_shards *w, int i)
{
    const mt_shard *s = &w->shards[i];
    int             makes = w->how.part == 0 ? O_CREAT | O_EXCL : 0, why = 0;
    int             fd = mt_forks_open(s->path, O_RDWR | makes | O_CLOEXEC | O_NOFOLLOW, 0666);

    if (fd < 0)
        return MT_FAIL(MT_EDISK, "%s: %s it: %s", s->path, makes ? "making" : "opening",
                       strerror(errno));
    w->files[i].fd = fd;
    if (makes)
        why = mt_file_allocate(calls_of(w->how.calls), fd, 0, s->bytes);
    if (why != 0 && why != EOPNOTSUPP && why != ENOSYS && why != EINVAL)
        return MT_FAIL(MT_EDISK, "%s: %" PRIu64 " bytes are needed: %s", s->path, s->bytes,
                       strerror(why));
    (void)calls_of(w->how.calls)->direct(fd, 1);
    return MT_OK;
}

/* Those of all shards that are this process's. */
static mt_status list_blocks(mt_shards *w)
{
    const mt_shards_how *how = &w->how;
    size_t               n = 0, number = 0;

    for (int i = 0; i < w->n; i++)
        n += mt_block_count((size_t)w->shards[i].bytes);
    MT_DO(MT_MAKE(w->blocks, (int64_t)n, "save"));
    MT_DO(MT_MAKE(w->sources, how->n_units + 1, "save"));
    MT_DO(MT_MAKE(w->files, w->n, "save"));              /* the last: from here on all are -1 */
    for (int i = 0; i < w->n; i++) {
        const mt_shard *s = &w->shards[i];
        size_t          extent = 0;

        w->files[i].fd = -1;
        for (size_t k = 0; k < mt_block_count((size_t)s->bytes); k++, number++) {
            while (extent + 1 < s->n_extents &&
                   s->extents[extent + 1].at <= (uint64_t)k * MT_BLOCK_BYTES)
                extent++;
            if (how->parts != 0 && number % (size_t)how->parts != (size_t)how->part)
                continue;
            w->blocks[w->n_blocks++] = (stretch){ .shard = i, .number = k, .first = extent };
            w->files[i].left++;
        }
    }
    return MT_OK;
}

/* A block's source has a share in it. Noted, where there is a list; else counted. */
static void note_share(mt_shards *w, size_t block, int unit)
{
    source *o = &w->sources[unit];

    if (w->shares == NULL)
        o->left++;
    else
        w->shares[o->end++] = (share){ .block = block, .source = unit,
                                       .first = w->blocks[block].uncopied++ == 0 };
    w->n_shares += w->shares == NULL;
}

/* Each source of each block once, however many extents it has there.
 * seen: [n_units] the last block, counted from 1. */
static void note_shares(mt_shards *w, size_t *seen)
{
    for (size_t k = 0; k < w->n_blocks; k++) {
        const mt_shard *s = &w->shards[w->blocks[k].shard];
        uint64_t        at = (uint64_t)w->blocks[k].number * MT_BLOCK_BYTES;
        int             units = 0;

        for (size_t i = w->blocks[k].first;
             i < s->n_extents && s->extents[i].at < at + MT_BLOCK_BYTES; i++) {
            int unit = s->extents[i].unit;

            if (unit >= 0 && s->extents[i].at + s->extents[i].bytes > at && seen[unit] != k + 1) {
                seen[unit] = k + 1;
                units++;
                note_share(w, k, unit);
            }
        }
        if (units == 0)
            note_share(w, k, w->how.n_units);
    }
}

/* Counted first, then put in the order of their sources. */
static mt_status list_shares(mt_shards *w)
{
    size_t    units = (size_t)w->how.n_units, at = 0, *seen;
    share    *list;
    mt_status st;

    MT_DO(MT_MAKE(seen, (int64_t)(2 * units), "save"));
    note_shares(w, seen);
    if ((st = MT_MAKE(list, (int64_t)w->n_shares, "save")) == MT_OK) {
        for (size_t u = 0; u <= units; at += w->sources[u++].left)
            w->sources[u].next = w->sources[u].end = at;
        w->shares = list;
        note_shares(w, seen + units);
    }
    free(seen);
    return st;
}

static mt_status make_buffers(mt_shards *w)
{
    size_t n = w->how.spare_bytes / MT_BLOCK_BYTES,
           least = (size_t)(w->how.n_copiers + w->how.n_writers);

    n = n < least ? least : n;
    n = n > w->n_blocks ? w->n_blocks : n;
    w->n_buffers = n;
    MT_DO(MT_MAKE(w->buffers, (int64_t)n, "save"));
    MT_DO(mt_arena_reserve(&w->memory, n * MT_BLOCK_BYTES, NULL, 0, "spare memory of a save", 0));
    /* the first is taken first, and those that are never needed stay reserved */
    for (size_t i = n; i-- > 0;) {
        w->buffers[i] = (buffer){ .mem = (char *)w->memory.base + i * MT_BLOCK_BYTES,
                                  .next = w->idle };
        w->idle = &w->buffers[i];
    }
    return MT_OK;
}

mt_status mt_shards_write(const mt_shard *shards, int n, mt_shards_how how, mt_shards **out)
{
    mt_shards *w = NULL;
    mt_status  st;

    MT_TRY(MT_MAKE(w, 1, "save"));
    w->shards = shards;
    w->n = n;
    w->how = how;
    mt_mutex_open(&w->mu, MT_RANK_SHARDS);
    MT_TRY(mt_watch_cond(&w->changed));
    MT_TRY(list_blocks(w));
    MT_TRY(list_shares(w));
    for (int i = 0; i < n; i++)
        MT_TRY(make_file(w, i));
    MT_TRY(make_buffers(w));
    end_units(w, 1);
    MT_TRY(MT_MAKE(w->copies, how.n_copiers, "save"));
    MT_TRY(mt_worker_open(&w->writers, &w->mu, how.n_writers, "mt-save-write", "save", write_next,
                          w));
    MT_TRY(mt_worker_open(&w->copiers, &w->mu, how.n_copiers, "mt-save-copy", "save", copy_all, w));
    mt_lock(&w->mu);
    for (int i = how.n_copiers; i-- > 0;)
        (void)mt_worker_submit(&w->copiers, &w->copies[i]);
    mt_unlock(&w->mu);
    *out = w;
    return MT_OK;

fail:
    if (w == NULL || w->sources == NULL)
        for (int unit = 0; unit < how.n_units && how.end != NULL; unit++)
            how.end(how.arg, unit);
    mt_shards_close(w);
    return st;
}

/* ---- wait and close ----------------------------------------------------------------------- */

mt_status mt_shards_wait(mt_shards *w, double seconds, uint64_t *bytes, int *over)
{
    uint64_t        end = mt_now_ns() + (uint64_t)(seconds * 1e9);
    struct timespec until = { (time_t)(end / 1000000000u), (long)(end % 1000000000u) };
    mt_status       st;

    mt_lock(&w->mu);
    while (w->written < w->n_blocks && (w->st == MT_OK || w->moving > 0) &&
           mt_cond_timedwait(&w->changed, &w->mu, &until) != ETIMEDOUT)
        ;
    *bytes = w->bytes;
    *over = w->written == w->n_blocks;
    st = w->moving == 0 ? w->st : MT_OK;
    mt_unlock(&w->mu);
    return st == MT_OK ? MT_OK : mt_fail_again(st, w->text);
}

void mt_shards_close(mt_shards *w)
{
    if (w == NULL)
        return;
    mt_lock(&w->mu);
    w->stop = 1;
    pthread_cond_broadcast(&w->changed);
    mt_unlock(&w->mu);
    mt_worker_close(&w->copiers);
    mt_worker_close(&w->writers);
    if (w->sources != NULL)
        end_units(w, 0);
    for (int i = 0; i < w->n && w->files != NULL; i++)
        if (w->files[i].fd >= 0)
            mt_forks_close(w->files[i].fd);
    mt_arena_close(&w->memory);
    pthread_cond_destroy(&w->changed);
    mt_mutex_close(&w->mu);
    free(w->copies);
    free(w->buffers);
    free(w->files);
    free(w->sources);
    free(w->shares);
    free(w->blocks);
    free(w);
}

/* ---- reading ------------------------------------------------------------------------------ */

typedef struct reading {
    const mt_shard      *shard;      /* these three: constant */
    const mt_file_calls *calls;
    int                  fd;
    mt_mutex             mu;
    mt_worker            worker;     /* of all but the thread that asked */
    mt_job              *jobs;       /* [its threads] */
    size_t               next;       /* block. mu, as all below */
    mt_status            st;
    char                 text[512];
} reading;

/* The first extent that has a byte at `at` or behind it. */
static size_t extent_at(const mt_shard *s, uint64_t at)
{
    size_t from = 0, to = s->n_extents;

    while (from < to) {
        size_t middle = from + (to - from) / 2;

        if (s->extents[middle].at + s->extents[middle].bytes <= at)
            from = middle + 1;
        else
            to = middle;
    }
    return from;
}

static mt_status read_block(const reading *r, size_t k, char *mem)
{
    const mt_shard *s = r->shard;
    uint64_t        at = (uint64_t)k * MT_BLOCK_BYTES;
    size_t          bytes = block_bytes(s, k), first = extent_at(s, at);

    if (s->n_extents > 0 && (first == s->n_extents || s->extents[first].at >= at + bytes))
        return MT_OK;                    /* nobody asks for anything in it */
    MT_DO(mt_file_move(r->calls, r->fd, s->path, 0, mem, bytes, at));
    if (s->sums != NULL && mt_block_sum(mem, bytes) != s->sums[k])
        return MT_FAIL(MT_EDISK, "%s: the %zu bytes at offset %" PRIu64 " are not those that were "
                       "written", s->path,
                       bytes, at);
    for (size_t i = first; i < s->n_extents && s->extents[i].at < at + bytes; i++)
        copy_extent(&s->extents[i], at, bytes, mem, 1);
    return MT_OK;
}

/* 0: no more, or something failed. */
static int next_block(reading *r, mt_status st, size_t *k)
{
    int some;

    MT_HOLD(&r->mu);
    if (st != MT_OK && r->st == MT_OK) {
        r->st = st;
        snprintf(r->text, sizeof r->text, "%s", mt_last_error());
    }
    if ((some = r->st == MT_OK && r->next < mt_block_count((size_t)r->shard->bytes)))
        *k = r->next++;
    return some;
}

static void read_blocks(reading *r)
{
    void     *mem;
    size_t    k = 0;
    uint64_t  asked_ns = 0;
    mt_status st = MT_OK;

    if (posix_memalign(&mem, MT_BLOCK_ALIGN, MT_BLOCK_BYTES) != 0) {
        mem = NULL;
        st = MT_FAIL(MT_ENOMEM, "load: no memory for a block of %zu bytes", MT_BLOCK_BYTES);
    }
    while (next_block(r, st, &k)) {
        st = read_block(r, k, mem);
        if (st == MT_OK)
            st = mt_watch_asked(&asked_ns);
    }
    free(mem);
}

static mt_status help_reading(void *arg, mt_job *job)
{
    reading *r = arg;

    (void)job;
    mt_unlock(&r->mu);
    read_blocks(r);
    mt_lock(&r->mu);
    return MT_OK;
}

/* Threads that could not be started are only missed. */
static void call_helpers(reading *r, int n)
{
    if (n < 1 || (r->jobs = calloc((size_t)n, sizeof *r->jobs)) == NULL ||
        mt_worker_open(&r->worker, &r->mu, n, "mt-load", "load", help_reading, r) != MT_OK)
        return;
    MT_HOLD(&r->mu);
    while (n-- > 0)
        (void)mt_worker_submit(&r->worker, &r->jobs[n]);
}

static mt_status open_for_reading(const mt_shard *s, const mt_file_calls *c, int *out)
{
    struct stat about;
    int         fd = mt_forks_open(s->path, O_RDONLY | O_CLOEXEC, 0);

    if (fd < 0)
        return MT_FAIL(MT_EDISK, "%s: opening it: %s", s->path, strerror(errno));
    if (fstat(fd, &about) != 0 || (uint64_t)about.st_size != s->bytes) {
        mt_forks_close(fd);
        return MT_FAIL(MT_EDISK, "%s has %lld bytes, and %" PRIu64 " were written", s->path,
                       (long long)about.st_size, s->bytes);
    }
    (void)c->direct(fd, 1);
    *out = fd;
    return MT_OK;
}

mt_status mt_shards_read(const mt_shard *shard, int n_threads, const mt_file_calls *calls)
{
    reading   r = { .shard = shard, .calls = calls_of(calls) };
    mt_status st = open_for_reading(shard, r.calls, &r.fd);

    if (st != MT_OK)
        return st;
    mt_mutex_open(&r.mu, MT_RANK_READING);
    call_helpers(&r, n_threads - 1);
    read_blocks(&r);
    mt_worker_close(&r.worker);
    mt_mutex_close(&r.mu);
    mt_forks_close(r.fd);
    free(r.jobs);
    return r.st == MT_OK ? MT_OK : mt_fail_again(r.st, r.text);
}
