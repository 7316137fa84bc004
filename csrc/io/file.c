/* file.c — requests are a worker's jobs, which a thread takes one block of.
 *
 * So blocks of one request run side by side, and those of the next begin before all of it is over.
 * The last block to end calls done.
 */
#include "file.h"

#include "../core/forks.h"
#include "sum.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

struct mt_file {
    mt_blocks       base;
    mt_file_calls   calls;       /* these six: constant */
    char            dir[PATH_MAX - 64], path[PATH_MAX];      /* path: for messages */
    int             fd;          /* -1: not open */
    int             direct;
    unsigned        forks;       /* mt_forks() of the process whose file it is */
    uint64_t        limit;

    mt_mutex        growing;     /* held while the disk looks for room, which may take seconds */
    uint64_t        taken;       /* bytes. growing */
    mt_mutex        mu;
    mt_worker       worker;      /* of requests with blocks that nobody began */
    uint64_t        reserved;    /* bytes. mu, and changed under growing alone */
    uint64_t        read_bytes, written_bytes;   /* mu */
};

/* ---- the system's calls ----------------------------------------------------------------- */

static int set_direct(int fd, int on)
{
    int flags = fcntl(fd, F_GETFL);

    if (flags < 0)
        return errno;
    return fcntl(fd, F_SETFL, on ? flags | O_DIRECT : flags & ~O_DIRECT) == 0 ? 0 : errno;
}

int mt_file_allocate(const mt_file_calls *calls, int fd, uint64_t at, uint64_t bytes)
{
    int why;

    do
        why = calls->allocate(fd, (off_t)at, (off_t)bytes);
    while (why == EINTR);                /* a signal, of which a long call sees many */
    return why;
}

const mt_file_calls mt_file_system = { pread, pwrite, posix_fallocate, set_direct };

/* ---- a block ---------------------------------------------------------------------------- */

/* `done` of them were moved; n: what the last call said. */
static mt_status said(const char *path, int write, size_t bytes, uint64_t at, size_t done,
                      ssize_t n)
{
    const char *doing = write ? "writing" : "reading";

    if (n >= 0 && write)
        return MT_FAIL(MT_EDISK, "%s: %s %zu bytes at offset %" PRIu64 ": the file system took "
                       "only %zu of them", path, doing, bytes, at, done + (size_t)n);
    return MT_FAIL(MT_EDISK, "%s: %s %zu bytes at offset %" PRIu64 ": %s", path, doing, bytes, at,
                   n < 0 ? strerror(errno) : "the file ends before them");
}

static ssize_t move_once(const mt_file_calls *c, int fd, int write, char *mem, size_t bytes,
                         uint64_t at)
{
    ssize_t n;

    do
        n = write ? c->write(fd, mem, bytes, (off_t)at) : c->read(fd, mem, bytes, (off_t)at);
    while (n < 0 && errno == EINTR);
    return n;
}

/* A file system may say that it takes direct transfers, and refuse the first. */
static ssize_t move_some(const mt_file_calls *c, int fd, int write, char *mem, size_t bytes,
                         uint64_t at)
{
    ssize_t n = move_once(c, fd, write, mem, bytes, at);

    if (n < 0 && errno == EINVAL && c->direct(fd, 0) == 0)
        n = move_once(c, fd, write, mem, bytes, at);
    return n;
}

/* A call may move less than it was asked to; a direct one goes on only from a multiple of the
 * alignment. */
mt_status mt_file_move(const mt_file_calls *c, int fd, const char *path, int write, char *mem,
                       size_t bytes, uint64_t at)
{
    size_t pages = mt_file_pages(bytes), needed = write ? pages : bytes, done = 0;

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

/* *moved: bytes that crossed. */
static mt_status move_block(mt_file *f, mt_request *r, size_t k, size_t *moved)
{
    size_t    from = k * MT_BLOCK_BYTES;
    size_t    bytes = r->bytes - from < MT_BLOCK_BYTES ? r->bytes - from : MT_BLOCK_BYTES;
    char     *mem = (char *)r->mem + from;
    uint64_t  sum;

    if (!r->write && r->sums != NULL && r->sums[k] == 0) {
        memset(mem, 0, bytes);
        return MT_OK;
    }
    if (r->write && r->sums != NULL)
        r->sums[k] = mt_block_sum(mem, bytes);
    MT_DO(mt_file_move(&f->calls, f->fd, f->path, r->write, mem, bytes, r->at + from));
    MT_WITH(&f->mu) *(r->write ? &f->written_bytes : &f->read_bytes) += bytes;
    *moved = bytes;
    if (!r->write && r->sums != NULL && (sum = mt_block_sum(mem, bytes)) != r->sums[k])
        return MT_FAIL(MT_EDISK, "%s: the %zu bytes at offset %" PRIu64 " are not those that were "
                       "written (sum %016" PRIx64 ", written %016" PRIx64 ")", f->path, bytes,
                       r->at + from, sum, r->sums[k]);
    return MT_OK;
}

/* ---- requests --------------------------------------------------------------------------- */

/* The request's next block. Others take those behind it meanwhile. */
static mt_status take_block(void *arg, mt_job *job)
{
    mt_file    *f = arg;
    mt_request *r = (mt_request *)(void *)job;
    size_t      k = r->begun++, moved = 0;
    mt_status   st;

    if (r->begun < mt_block_count(r->bytes))
        mt_worker_again(&f->worker, job);
    mt_unlock(&f->mu);
    st = move_block(f, r, k, &moved);
    mt_lock(&f->mu);
    if (st != MT_OK && r->st == MT_OK) {
        r->st = st;
        r->bad_at = r->at + k * MT_BLOCK_BYTES;
        snprintf(r->text, sizeof r->text, "%s", mt_last_error());
    }
    r->moved += moved;
    if (--r->left == 0) {                /* without our lock, since done may put others */
        mt_unlock(&f->mu);
        r->done(r);
        mt_lock(&f->mu);
    }
    return MT_OK;
}

static void put(mt_blocks *b, mt_request *r)
{
    mt_file *f = (mt_file *)(void *)b;

    r->st = MT_OK;
    r->moved = 0;
    r->begun = 0;
    r->left = mt_block_count(r->bytes);
    MT_WITH(&f->mu) (void)mt_worker_submit(&f->worker, &r->job);
}

/* ---- room ------------------------------------------------------------------------------- */

static mt_status no_room(const mt_file *f, uint64_t bytes, int why)
{
    struct statvfs about = { 0 };

    (void)statvfs(f->dir, &about);
    return MT_FAIL(MT_EDISK, "%s: %" PRIu64 " bytes more are needed beside the %" PRIu64
                   " it has: %s; %" PRIu64 " are free in %s: free some, or name another path",
                   f->path, bytes, f->reserved, strerror(why),
                   (uint64_t)about.f_bavail * about.f_frsize, f->dir);
}

/* Under growing, or before threads. The file comes to have so many bytes,
 * and the disk has promised them. */
static mt_status grow(mt_file *f, uint64_t bytes)
{
    int why;

    if (bytes <= f->reserved)
        return MT_OK;
    if (f->limit > 0 && bytes > f->limit)
        return MT_FAIL(MT_EDISK, "nvme: %" PRIu64 " bytes are needed in %s, and the limit is "
                       "%" PRIu64, bytes, f->dir,
                       f->limit);
    if ((why = mt_file_allocate(&f->calls, f->fd, f->reserved, bytes - f->reserved)) != 0)
        return no_room(f, bytes - f->reserved, why);
    MT_HOLD(&f->mu);
    f->reserved = bytes;
    return MT_OK;
}

mt_status mt_file_reserve(mt_file *f, uint64_t bytes)
{
    return MT_LOCKED(&f->growing, grow(f, bytes));
}

static mt_status take(mt_blocks *b, size_t bytes, uint64_t *at)
{
    mt_file  *f = (mt_file *)(void *)b;
    size_t    whole = mt_file_pages(bytes);
    mt_status st;

    MT_HOLD(&f->growing);
    if ((st = grow(f, f->taken + whole)) == MT_OK) {
        *at = f->taken;
        f->taken += whole;
    }
    return st;
}

static const char *name_of(const mt_blocks *b)
{
    return ((const mt_file *)(const void *)b)->path;
}

static const mt_blocks_ops file_ops = { take, put, name_of };

mt_blocks *mt_file_blocks(mt_file *f)
{
    return &f->base;
}

/* ---- open and close --------------------------------------------------------------------- */

/* It has no name from here on: so its room is free again when the process ends, in whatever way. */
static mt_status make_file(mt_file *f)
{
    static atomic_uint made;

    do {                                 /* in a shared directory others may have our process id */
        snprintf(f->path, sizeof f->path, "%s/megatrain-%ld-%u", f->dir, (long)getpid(),
                 atomic_fetch_add(&made, 1));
        f->fd = mt_forks_open(f->path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    } while (f->fd < 0 && errno == EEXIST);
    if (f->fd < 0 || unlink(f->path) != 0)
        return MT_FAIL(MT_EDISK, "nvme: cannot make %s: %s; name a directory that may be written",
                       f->path, strerror(errno));
    return MT_OK;
}

/* O_DIRECT may be refused when it is asked for, or not before the first transfer. */
static mt_status try_direct(mt_file *f)
{
    char     *page = NULL;
    mt_status st = MT_OK;

    if (f->calls.direct(f->fd, 1) != 0)
        return MT_OK;
    MT_DO(grow(f, MT_BLOCK_ALIGN));
    if (posix_memalign((void **)&page, MT_BLOCK_ALIGN, MT_BLOCK_ALIGN) != 0)
        return MT_FAIL(MT_ENOMEM, "nvme: no memory for a block of %zu bytes", MT_BLOCK_ALIGN);
    f->direct = f->calls.read(f->fd, page, MT_BLOCK_ALIGN, 0) == (ssize_t)MT_BLOCK_ALIGN;
    if (!f->direct && f->calls.direct(f->fd, 0) != 0)
        st = MT_FAIL(MT_EDISK, "%s: takes direct transfers, and does none", f->path);
    free(page);
    return st;
}

mt_status mt_file_open(const char *dir, uint64_t limit, int n_threads, const mt_file_calls *calls,
                       mt_file **out)
{
    mt_file *f MT_CLOSED(mt_file_close) = NULL;

    if (dir == NULL || dir[0] == 0 || n_threads < 1)
        return MT_FAIL(MT_EINVAL, "nvme: a directory and a thread are the least; \"%s\", %d",
                       dir != NULL ? dir : "", n_threads);
    if (strlen(dir) >= sizeof f->dir)
        return MT_FAIL(MT_EINVAL, "nvme: a path of %zu characters; %zu are the most", strlen(dir),
                       sizeof f->dir - 1);
    MT_DO(MT_MAKE(f, 1, "nvme"));
    f->base.ops = &file_ops;
    f->calls = calls != NULL ? *calls : mt_file_system;
    snprintf(f->dir, sizeof f->dir, "%s", dir);
    f->fd = -1;
    f->forks = mt_forks();
    f->limit = limit;
    mt_mutex_open(&f->growing, MT_RANK_GROWING);
    mt_mutex_open(&f->mu, MT_RANK_FILE);
    MT_DO(make_file(f));
    MT_DO(try_direct(f));
    MT_DO(mt_worker_open(&f->worker, &f->mu, n_threads, "mt-disk", "disk", take_block, f));
    *out = MT_KEEP(f);
    return MT_OK;
}

void mt_file_close(mt_file *f)
{
    if (f == NULL || f->forks != mt_forks())
        return;
    mt_worker_close(&f->worker);
    if (f->fd >= 0)
        mt_forks_close(f->fd);
    mt_mutex_close(&f->mu);
    mt_mutex_close(&f->growing);
    free(f);
}

mt_file_stats mt_file_stats_get(mt_file *f)
{
    MT_HOLD(&f->mu);
    return (mt_file_stats){ f->read_bytes, f->written_bytes, f->reserved, f->direct };
}
