/* shards.c — copiers fill blocks, writers write them; a block goes round: free, being copied, full, free.
 *
 * Two kinds of thread, since a disk wants several requests under way and a unit's owner wants to go on: with
 * spare blocks the copiers run ahead of the disk by as many as there are.
 */
#include "shards.h"

#include "../core/arena.h"
#include "../core/forks.h"
#include "sum.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef struct shard_file {
    int      fd;                     /* -1: not open */
    uint64_t left;                   /* blocks not yet written. mu */
} shard_file;

/* A block of a shard. Constant but for taken. */
typedef struct stretch {
    int    shard;
    size_t number;                   /* in the shard */
    size_t first;                    /* extent that has its first byte */
    int    taken;                    /* mu */
} stretch;

typedef struct buffer {
    char          *mem;
    size_t         block;            /* that is in it */
    struct buffer *next;
} buffer;

enum { FRESH, BEGINNING, BEGUN, ENDED };

typedef struct owner {               /* a unit. mu */
    size_t left;                     /* blocks with bytes of it that nobody copied yet */
    int    at;
} owner;

struct mt_shards {
    const mt_shard *shards;          /* these eight: constant */
    int             n;
    mt_shards_how   how;
    shard_file     *files;           /* [n] */
    stretch        *blocks;          /* [n_blocks] */
    size_t          n_blocks;
    buffer         *buffers;
    mt_arena        memory;

    pthread_mutex_t mu;
    pthread_cond_t  changed;
    owner          *owners;          /* [how.n_units] */
    buffer         *idle, *full, **last_full;    /* mu, as all below */
    size_t          next;            /* blocks before it are taken */
    size_t          next_wanted;     /* those before it are taken, or not the wanted unit's */
    int             wanted;          /* that the above is for */
    size_t          taken, written;  /* blocks */
    uint64_t        bytes;           /* written */
    int             stop;
    mt_status       st;
    char            text[512];
    pthread_t      *threads;
    int             n_threads, n_over;   /* that run; that have ended */
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

static size_t whole_pages(size_t bytes)
{
    return (bytes + MT_BLOCK_ALIGN - 1) / MT_BLOCK_ALIGN * MT_BLOCK_ALIGN;
}

/* `done` of them were moved; n: what the last call said. */
static mt_status said(const char *path, int write, size_t bytes, uint64_t at, size_t done, ssize_t n)
{
    const char *doing = write ? "writing" : "reading";

    if (n >= 0 && write)
        return MT_FAIL(MT_EDISK, "%s: %s %zu bytes at offset %" PRIu64 ": the file system took only %zu of them", path,
                       doing, bytes, at, done + (size_t)n);
    return MT_FAIL(MT_EDISK, "%s: %s %zu bytes at offset %" PRIu64 ": %s", path, doing, bytes, at,
                   n < 0 ? strerror(errno) : "the file ends before them");
}

static ssize_t move_once(const mt_file_calls *c, int fd, int write, char *mem, size_t bytes, uint64_t at)
{
    ssize_t n;

    do
        n = write ? c->write(fd, mem, bytes, (off_t)at) : c->read(fd, mem, bytes, (off_t)at);
    while (n < 0 && errno == EINTR);
    return n;
}

/* A file system may say that it takes direct transfers, and refuse the first. */
static ssize_t move_some(const mt_file_calls *c, int fd, int write, char *mem, size_t bytes, uint64_t at)
{
    ssize_t n = move_once(c, fd, write, mem, bytes, at);

    if (n < 0 && errno == EINVAL && c->direct(fd, 0) == 0)
        n = move_once(c, fd, write, mem, bytes, at);
    return n;
}

/* Whole pages, so that direct transfers will do: of a file that is written, what is beyond its end is cut off
 * later; one that is read need not have more than the bytes. */
static mt_status move_pages(const mt_file_calls *c, int fd, const char *path, int write, char *mem, size_t bytes,
                            uint64_t at)
{
    size_t pages = whole_pages(bytes), needed = write ? pages : bytes, done = 0;

    while (done < needed) {
        ssize_t n = move_some(c, fd, write, mem + done, pages - done, at + done);

        if (n > 0 && (size_t)n < needed - done && (size_t)n >= MT_BLOCK_ALIGN)
            n = n / (ssize_t)MT_BLOCK_ALIGN * (ssize_t)MT_BLOCK_ALIGN;
        else if (n <= 0 || (size_t)n < needed - done)
            return said(path, write, bytes, at, done, n);
        done += (size_t)n;
    }
    return MT_OK;
}

/* Between a block's memory and the extents that lie in it, from `first` on. */
static void copy_extents(const mt_shard *s, size_t first, uint64_t at, size_t bytes, char *mem, int to_extents)
{
    for (size_t i = first; i < s->n_extents && s->extents[i].at < at + bytes; i++) {
        const mt_extent *e = &s->extents[i];
        uint64_t         from = e->at > at ? e->at : at;
        uint64_t         to = e->at + e->bytes < at + bytes ? e->at + e->bytes : at + bytes;

        if (from >= to)
            continue;
        if (to_extents)
            memcpy((char *)e->mem + (from - e->at), mem + (from - at), to - from);
        else
            memcpy(mem + (from - at), (char *)e->mem + (from - e->at), to - from);
    }
}

/* ---- units: begun before their first block, ended behind their last ------------------------- */

/* The next unit that has bytes in the block, behind *i; -1: no more. */
static int next_owner(const mt_shards *w, const stretch *b, size_t *i)
{
    const mt_shard *s = &w->shards[b->shard];
    uint64_t        end = (uint64_t)b->number * MT_BLOCK_BYTES + block_bytes(s, b->number);

    for (; *i < s->n_extents && s->extents[*i].at < end; ++*i) {
        int unit = s->extents[*i].unit;

        if (unit >= 0 && (*i == b->first || s->extents[*i - 1].unit != unit)) {
            ++*i;
            return unit;
        }
    }
    return -1;
}

static int has_owner(const mt_shards *w, const stretch *b, int unit)
{
    int found;

    for (size_t i = b->first; (found = next_owner(w, b, &i)) >= 0;)
        if (found == unit)
            return 1;
    return 0;
}

/* The first thread to come begins it, the others wait for that. */
static mt_status begin_unit(mt_shards *w, int unit)
{
    owner    *o = &w->owners[unit];
    mt_status st = MT_OK;

    pthread_mutex_lock(&w->mu);
    while (o->at == BEGINNING)
        pthread_cond_wait(&w->changed, &w->mu);
    if (o->at != FRESH) {
        pthread_mutex_unlock(&w->mu);
        return MT_OK;
    }
    o->at = BEGINNING;
    pthread_mutex_unlock(&w->mu);
    if (w->how.begin != NULL)
        st = w->how.begin(w->how.arg, unit);
    pthread_mutex_lock(&w->mu);
    o->at = BEGUN;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->mu);
    return st;
}

static mt_status begin_units(mt_shards *w, const stretch *b)
{
    int       unit;
    mt_status st = MT_OK;

    for (size_t i = b->first; st == MT_OK && (unit = next_owner(w, b, &i)) >= 0;)
        st = begin_unit(w, unit);
    return st;
}

static void end_units(mt_shards *w, const stretch *b)
{
    int unit;

    for (size_t i = b->first; (unit = next_owner(w, b, &i)) >= 0;) {
        int last;

        pthread_mutex_lock(&w->mu);
        last = --w->owners[unit].left == 0 && w->owners[unit].at != ENDED;
        w->owners[unit].at = last ? ENDED : w->owners[unit].at;
        pthread_mutex_unlock(&w->mu);
        if (last && w->how.end != NULL)
            w->how.end(w->how.arg, unit);
    }
}

/* When no thread copies any more: those that never got their last block. */
static void end_all(mt_shards *w)
{
    for (int unit = 0; unit < w->how.n_units; unit++)
        if (w->owners[unit].at != ENDED) {
            w->owners[unit].at = ENDED;
            if (w->how.end != NULL)
                w->how.end(w->how.arg, unit);
        }
}

/* ---- copiers ------------------------------------------------------------------------------ */

static void fail(mt_shards *w, mt_status st)
{
    pthread_mutex_lock(&w->mu);
    if (w->st == MT_OK) {
        w->st = st;
        snprintf(w->text, sizeof w->text, "%s", mt_last_error());
    }
    w->stop = 1;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->mu);
}

/* Under mu. The wanted unit's next block, else the next of all. There is one. */
static size_t choose(mt_shards *w, int wanted)
{
    size_t i = w->n_blocks;

    if (wanted != w->wanted) {
        w->wanted = wanted;
        w->next_wanted = 0;
    }
    if (wanted >= 0)
        for (i = w->next_wanted; i < w->n_blocks; i++)
            if (!w->blocks[i].taken && has_owner(w, &w->blocks[i], wanted))
                break;
    w->next_wanted = i;
    if (i == w->n_blocks) {
        while (w->blocks[w->next].taken)
            w->next++;
        i = w->next;
    }
    w->blocks[i].taken = 1;
    w->taken++;
    return i;
}

/* A free buffer, for the block that it says; NULL: there is nothing to do any more. */
static buffer *take_block(mt_shards *w)
{
    buffer *m;
    int     wanted = -1;

    pthread_mutex_lock(&w->mu);
    while (!w->stop && w->taken < w->n_blocks && w->idle == NULL)
        pthread_cond_wait(&w->changed, &w->mu);
    if (w->stop || w->taken == w->n_blocks) {
        pthread_mutex_unlock(&w->mu);
        return NULL;
    }
    m = w->idle;
    w->idle = m->next;
    if (w->how.wanted != NULL)
        wanted = w->how.wanted(w->how.arg);          /* takes the ledger's lock inside of ours, never the other way */
    m->block = choose(w, wanted);
    pthread_mutex_unlock(&w->mu);
    return m;
}

static mt_status copy_block(mt_shards *w, const buffer *m)
{
    const stretch  *b = &w->blocks[m->block];
    const mt_shard *s = &w->shards[b->shard];
    size_t          bytes = block_bytes(s, b->number);
    mt_status       st = begin_units(w, b);

    if (st == MT_OK) {
        copy_extents(s, b->first, (uint64_t)b->number * MT_BLOCK_BYTES, bytes, m->mem, 0);
        memset(m->mem + bytes, 0, whole_pages(bytes) - bytes);
    }
    end_units(w, b);
    if (st == MT_OK)
        s->sums[b->number] = mt_block_sum(m->mem, bytes);
    return st;
}

static void thread_over(mt_shards *w)
{
    pthread_mutex_lock(&w->mu);
    w->n_over++;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->mu);
}

static void *copier_main(void *arg)
{
    mt_shards *w = arg;
    buffer    *m;

    pthread_setname_np(pthread_self(), "mt-save-copy");
    while ((m = take_block(w)) != NULL) {
        mt_status st = copy_block(w, m);

        if (st != MT_OK)
            fail(w, st);
        pthread_mutex_lock(&w->mu);
        m->next = NULL;
        *w->last_full = m;
        w->last_full = &m->next;
        pthread_cond_broadcast(&w->changed);
        pthread_mutex_unlock(&w->mu);
    }
    thread_over(w);
    return NULL;
}

/* ---- writers ------------------------------------------------------------------------------ */

/* NULL: all is written, or nothing more is to be. */
static buffer *take_full(mt_shards *w)
{
    buffer *m = NULL;

    pthread_mutex_lock(&w->mu);
    while (!w->stop && w->full == NULL && w->written < w->n_blocks)
        pthread_cond_wait(&w->changed, &w->mu);
    if (!w->stop && (m = w->full) != NULL && (w->full = m->next) == NULL)
        w->last_full = &w->full;
    pthread_mutex_unlock(&w->mu);
    return m;
}

/* Behind its last block. */
static mt_status finish_file(mt_shards *w, int i)
{
    const mt_shard *s = &w->shards[i];

    if (ftruncate(w->files[i].fd, (off_t)s->bytes) != 0)
        return MT_FAIL(MT_EDISK, "%s: setting its size, %" PRIu64 " bytes: %s", s->path, s->bytes, strerror(errno));
    if (fsync(w->files[i].fd) != 0)
        return MT_FAIL(MT_EDISK, "%s: syncing it: %s", s->path, strerror(errno));
    mt_forks_close(w->files[i].fd);
    w->files[i].fd = -1;
    return MT_OK;
}

/* *last: of its file. */
static mt_status write_block(mt_shards *w, const buffer *m, int *last)
{
    const stretch  *b = &w->blocks[m->block];
    const mt_shard *s = &w->shards[b->shard];
    size_t          bytes = block_bytes(s, b->number);
    mt_status       st;

    *last = 0;
    MT_TRY(move_pages(calls_of(w->how.calls), w->files[b->shard].fd, s->path, 1, m->mem, bytes,
                      (uint64_t)b->number * MT_BLOCK_BYTES));
    pthread_mutex_lock(&w->mu);
    *last = --w->files[b->shard].left == 0;
    w->bytes += bytes;
    pthread_mutex_unlock(&w->mu);
fail:
    return st;
}

/* For others, before the file's sync: a drive may take its time for that. */
static void give_back(mt_shards *w, buffer *m)
{
    pthread_mutex_lock(&w->mu);
    m->next = w->idle;
    w->idle = m;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->mu);
}

/* Nothing shows how far a sync has come: it is patient. */
static mt_status sync_file(mt_shards *w, int i)
{
    mt_post   post = { .patient = 1 };
    mt_status st;

    if (w->how.watch != NULL)
        mt_watch_put(w->how.watch, &post, "save", NULL, w->shards[i].path, NULL);
    st = finish_file(w, i);
    if (w->how.watch != NULL)
        mt_watch_end(w->how.watch, &post, st);
    return st;
}

static void *writer_main(void *arg)
{
    mt_shards *w = arg;
    buffer    *m;

    pthread_setname_np(pthread_self(), "mt-save-write");
    while ((m = take_full(w)) != NULL) {
        int       last, file = w->blocks[m->block].shard;
        mt_post   post;
        mt_status st;

        /* A block that is written has moved: so does a save, however long it takes. */
        if (w->how.watch != NULL)
            mt_watch_begin(w->how.watch, &post, "save", NULL, w->shards[file].path);
        st = write_block(w, m, &last);
        if (w->how.watch != NULL)
            mt_watch_end(w->how.watch, &post, st);
        give_back(w, m);
        if (st == MT_OK && last)
            st = sync_file(w, file);
        if (st != MT_OK)
            fail(w, st);
        pthread_mutex_lock(&w->mu);
        w->written += st == MT_OK;       /* behind its file's sync: all written is all synced */
        pthread_cond_broadcast(&w->changed);
        pthread_mutex_unlock(&w->mu);
    }
    thread_over(w);
    return NULL;
}

/* ---- open --------------------------------------------------------------------------------- */

/* Room is asked for before anything is written, where the file system can say. */
static mt_status make_file(mt_shards *w, int i)
{
    const mt_file_calls *c = calls_of(w->how.calls);
    const mt_shard      *s = &w->shards[i];
    int                  fd = mt_forks_open(s->path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW,
                                               0666), why;

    if (fd < 0)
        return MT_FAIL(MT_EDISK, "%s: making it: %s", s->path, strerror(errno));
    w->files[i].fd = fd;
    w->files[i].left = mt_block_count((size_t)s->bytes);
    if ((why = mt_file_allocate(c, fd, 0, s->bytes)) != 0 && why != EOPNOTSUPP && why != ENOSYS && why != EINVAL)
        return MT_FAIL(MT_EDISK, "%s: %" PRIu64 " bytes are needed: %s", s->path, s->bytes, strerror(why));
    (void)c->direct(fd, 1);
    return MT_OK;
}

static mt_status list_blocks(mt_shards *w)
{
    size_t n = 0;

    for (int i = 0; i < w->n; i++)
        n += mt_block_count((size_t)w->shards[i].bytes);
    if ((w->blocks = calloc(n + 1, sizeof *w->blocks)) == NULL ||
        (w->owners = calloc((size_t)w->how.n_units + 1, sizeof *w->owners)) == NULL ||
        (w->files = calloc((size_t)w->n + 1, sizeof *w->files)) == NULL)
        return MT_FAIL(MT_ENOMEM, "save: no memory to list %zu blocks", n);
    for (int i = 0; i < w->n; i++) {
        const mt_shard *s = &w->shards[i];
        size_t          extent = 0;

        w->files[i].fd = -1;
        for (size_t k = 0; k < mt_block_count((size_t)s->bytes); k++) {
            stretch *b = &w->blocks[w->n_blocks++];
            int      unit;

            while (extent + 1 < s->n_extents && s->extents[extent + 1].at <= (uint64_t)k * MT_BLOCK_BYTES)
                extent++;
            *b = (stretch){ .shard = i, .number = k, .first = extent };
            for (size_t e = extent; (unit = next_owner(w, b, &e)) >= 0;)
                w->owners[unit].left++;
        }
    }
    return MT_OK;
}

static mt_status make_buffers(mt_shards *w)
{
    size_t    n = w->how.spare_bytes / MT_BLOCK_BYTES, least = (size_t)(w->how.n_copiers + w->how.n_writers);
    mt_status st;

    n = n < least ? least : n;
    n = n > w->n_blocks ? w->n_blocks : n;
    if ((w->buffers = calloc(n + 1, sizeof *w->buffers)) == NULL)
        return MT_FAIL(MT_ENOMEM, "save: no memory to describe %zu buffers", n);
    MT_TRY(mt_arena_cold(&w->memory, n * MT_BLOCK_BYTES, "spare memory of a save", 0));
    for (size_t i = n; i-- > 0;) {       /* the first is taken first, and those that are never needed stay cold */
        w->buffers[i] = (buffer){ .mem = (char *)w->memory.base + i * MT_BLOCK_BYTES, .next = w->idle };
        w->idle = &w->buffers[i];
    }
fail:
    return st;
}

static mt_status start(mt_shards *w)
{
    int all = w->how.n_copiers + w->how.n_writers;

    if ((w->threads = calloc((size_t)all, sizeof *w->threads)) == NULL)
        return MT_FAIL(MT_ENOMEM, "save: no memory for %d threads", all);
    for (; w->n_threads < all; w->n_threads++)
        if (pthread_create(&w->threads[w->n_threads], NULL,
                           w->n_threads < w->how.n_writers ? writer_main : copier_main, w) != 0)
            return MT_FAIL(MT_ENOMEM, "save: no thread; %d of %d run", w->n_threads, all);
    return MT_OK;
}

/* Units without a byte in any file end at once. */
static void end_absent(mt_shards *w)
{
    for (int unit = 0; unit < w->how.n_units; unit++)
        if (w->owners[unit].left == 0) {
            w->owners[unit].at = ENDED;
            if (w->how.end != NULL)
                w->how.end(w->how.arg, unit);
        }
}

static mt_status shards_new(const mt_shard *shards, int n, mt_shards_how how, mt_shards **out)
{
    mt_shards *w = calloc(1, sizeof *w);

    if (w == NULL)
        return MT_FAIL(MT_ENOMEM, "save: calloc(%zu)", sizeof *w);
    w->shards = shards;
    w->n = n;
    w->how = how;
    w->last_full = &w->full;
    w->wanted = -1;
    pthread_mutex_init(&w->mu, NULL);
    *out = w;
    return mt_watch_cond(&w->changed);
}

mt_status mt_shards_write(const mt_shard *shards, int n, mt_shards_how how, mt_shards **out)
{
    mt_shards *w = NULL;
    mt_status  st;

    MT_TRY(shards_new(shards, n, how, &w));
    MT_TRY(list_blocks(w));
    for (int i = 0; i < n; i++)
        MT_TRY(make_file(w, i));
    MT_TRY(make_buffers(w));
    end_absent(w);
    MT_TRY(start(w));
    *out = w;
    return MT_OK;

fail:
    if (w == NULL || w->owners == NULL)
        for (int unit = 0; unit < how.n_units && how.end != NULL; unit++)
            how.end(how.arg, unit);
    mt_shards_close(w);
    return st;
}

/* ---- wait and close ----------------------------------------------------------------------- */

static struct timespec from_now(double seconds)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_sec += (time_t)seconds;
    t.tv_nsec += (long)((seconds - (double)(time_t)seconds) * 1e9);
    if (t.tv_nsec >= 1000000000L) {
        t.tv_nsec -= 1000000000L;
        t.tv_sec++;
    }
    return t;
}

mt_status mt_shards_wait(mt_shards *w, double seconds, uint64_t *bytes, int *over)
{
    struct timespec until = from_now(seconds);
    mt_status       st;

    pthread_mutex_lock(&w->mu);
    while (w->n_over < w->n_threads && pthread_cond_timedwait(&w->changed, &w->mu, &until) != ETIMEDOUT)
        ;
    *bytes = w->bytes;
    *over = w->n_over == w->n_threads && w->st == MT_OK;
    st = w->n_over == w->n_threads ? w->st : MT_OK;
    pthread_mutex_unlock(&w->mu);
    return st == MT_OK ? MT_OK : mt_fail_again(st, w->text);
}

void mt_shards_close(mt_shards *w)
{
    if (w == NULL)
        return;
    pthread_mutex_lock(&w->mu);
    w->stop = 1;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->mu);
    for (int i = 0; i < w->n_threads; i++)
        pthread_join(w->threads[i], NULL);
    if (w->owners != NULL)
        end_all(w);
    for (int i = 0; i < w->n && w->files != NULL; i++)
        if (w->files[i].fd >= 0)
            mt_forks_close(w->files[i].fd);
    mt_arena_close(&w->memory);
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->mu);
    free(w->threads);
    free(w->buffers);
    free(w->files);
    free(w->owners);
    free(w->blocks);
    free(w);
}

/* ---- reading ------------------------------------------------------------------------------ */

typedef struct reading {
    const mt_shard      *shard;      /* these three: constant */
    const mt_file_calls *calls;
    int                  fd;
    pthread_mutex_t      mu;
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
    mt_status       st;

    if (s->n_extents > 0 && (first == s->n_extents || s->extents[first].at >= at + bytes))
        return MT_OK;                    /* nobody asks for anything in it */
    MT_TRY(move_pages(r->calls, r->fd, s->path, 0, mem, bytes, at));
    if (s->sums != NULL && mt_block_sum(mem, bytes) != s->sums[k])
        return MT_FAIL(MT_EDISK, "%s: the %zu bytes at offset %" PRIu64 " are not those that were written", s->path,
                       bytes, at);
    copy_extents(s, first, at, bytes, mem, 1);
fail:
    return st;
}

/* 0: no more, or something failed. */
static int next_block(reading *r, mt_status st, size_t *k)
{
    int some;

    pthread_mutex_lock(&r->mu);
    if (st != MT_OK && r->st == MT_OK) {
        r->st = st;
        snprintf(r->text, sizeof r->text, "%s", mt_last_error());
    }
    if ((some = r->st == MT_OK && r->next < mt_block_count((size_t)r->shard->bytes)))
        *k = r->next++;
    pthread_mutex_unlock(&r->mu);
    return some;
}

static void *reader_main(void *arg)
{
    reading  *r = arg;
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
    return NULL;
}

static mt_status open_for_reading(const mt_shard *s, const mt_file_calls *c, int *out)
{
    struct stat about;
    int         fd = mt_forks_open(s->path, O_RDONLY | O_CLOEXEC, 0);

    if (fd < 0)
        return MT_FAIL(MT_EDISK, "%s: opening it: %s", s->path, strerror(errno));
    if (fstat(fd, &about) != 0 || (uint64_t)about.st_size != s->bytes) {
        mt_forks_close(fd);
        return MT_FAIL(MT_EDISK, "%s has %lld bytes, and %" PRIu64 " were written", s->path, (long long)about.st_size,
                       s->bytes);
    }
    (void)c->direct(fd, 1);
    *out = fd;
    return MT_OK;
}

/* The calling thread reads too, so one that could not be started is only missed. */
mt_status mt_shards_read(const mt_shard *shard, int n_threads, const mt_file_calls *calls)
{
    reading    r = { .shard = shard, .calls = calls_of(calls) };
    pthread_t *threads = calloc((size_t)(n_threads > 1 ? n_threads : 1), sizeof *threads);
    int        running = 0;
    mt_status  st;

    if (threads == NULL)
        return MT_FAIL(MT_ENOMEM, "load: no memory for %d threads", n_threads);
    MT_TRY(open_for_reading(shard, r.calls, &r.fd));
    pthread_mutex_init(&r.mu, NULL);
    while (running < n_threads - 1 && pthread_create(&threads[running], NULL, reader_main, &r) == 0)
        running++;
    (void)reader_main(&r);
    while (running > 0)
        pthread_join(threads[--running], NULL);
    pthread_mutex_destroy(&r.mu);
    mt_forks_close(r.fd);
    st = r.st == MT_OK ? MT_OK : mt_fail_again(r.st, r.text);
fail:
    free(threads);
    return st;
}
