/* forks.c — two lists, and what fork() calls before and behind itself. */
#include "forks.h"

#include "lock.h"
#include "status.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct range {
    void  *base;
    size_t bytes;
} range;

static atomic_uint     forks;
static mt_mutex        files_mu = MT_MUTEX(MT_RANK_FORKS_FILES);
static mt_mutex        memory_mu = MT_MUTEX(MT_RANK_LEAF);
static range          *ranges;               /* [n_ranges] of room_ranges. memory_mu */
static int64_t         n_ranges, room_ranges;
static int            *files;                /* [n_files] of room_files. files_mu */
static int64_t         n_files, room_files;

/* ---- around a fork ---------------------------------------------------------------------- */

/* No list is being changed while the child's copy of it is made. */
static void before(void)
{
    mt_lock(&files_mu);
    mt_lock(&memory_mu);
}

static void in_parent(void)
{
    mt_unlock(&memory_mu);
    mt_unlock(&files_mu);
}

/* Calls alone that a signal handler may make. What our addresses pointed to is not there:
 * they stay taken. */
static void in_child(void)
{
    atomic_fetch_add(&forks, 1);
    for (int64_t i = 0; i < n_ranges; i++)
        (void)mmap(ranges[i].base, ranges[i].bytes, PROT_NONE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    for (int64_t i = 0; i < n_files; i++)
        (void)close(files[i]);
    n_ranges = n_files = 0;
    in_parent();
}

static void __attribute__((constructor)) watch_forks(void)
{
    (void)pthread_atfork(before, in_parent, in_child);
}

unsigned mt_forks(void)
{
    return atomic_load(&forks);
}

/* ---- memory ----------------------------------------------------------------------------- */

void mt_forks_private(void *base, size_t bytes)
{
    if (madvise(base, bytes, MADV_DONTFORK) != 0)
        return;
    MT_HOLD(&memory_mu);
    /* else they are free in a child */
    if (MT_GROW(ranges, room_ranges, n_ranges + 1, "forks") == MT_OK)
        ranges[n_ranges++] = (range){ base, bytes };
}

void mt_forks_shared(void *base)
{
    MT_HOLD(&memory_mu);
    for (int64_t i = n_ranges; i-- > 0;)
        if (ranges[i].base == base) {
            ranges[i] = ranges[--n_ranges];
            break;
        }
}

/* ---- files ------------------------------------------------------------------------------ */

int mt_forks_open(const char *path, int flags, mode_t mode)
{
    int fd = -1, error = ENOMEM;

    MT_WITH(&files_mu)
        if (MT_GROW(files, room_files, n_files + 1, "forks") == MT_OK) {
            if ((fd = open(path, flags, mode)) >= 0)
                files[n_files++] = fd;
            error = errno;
        }
    errno = error;
    return fd;
}

void mt_forks_close(int fd)
{
    MT_HOLD(&files_mu);
    for (int64_t i = 0; i < n_files; i++)
        if (files[i] == fd) {
            files[i] = files[--n_files];
            (void)close(fd);
            break;
        }
}
