/* share.c — a memfd: its head, its ranges, and what ranks say there. */
#include "share.h"

#include "forks.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define SHARE_BYTES ((uint64_t)1 << 44)      /* addresses in the file: 16 TiB */
#define HUGE_BYTES  ((size_t)2 << 20)

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8u
#endif

/* A rank's; written by it alone. */
typedef struct slot {
    _Atomic int64_t  pid;                    /* 0: it has not come */
    _Atomic uint64_t count[MT_COUNTS];
} slot;

/* At the share's first byte. */
typedef struct head {
    _Atomic uint32_t ranks;                  /* 0: nobody has come; by the first, once */
    slot             slots[MT_RANKS_MOST];
} head;

struct mt_share {
    int      fd, rank, ranks;
    head    *head;
    uint64_t next;                           /* the first byte that nobody has */
};

static size_t page_bytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

static uint64_t round_up(uint64_t n, uint64_t to)
{
    return (n + to - 1) / to * to;
}

/* ---- open and close ----------------------------------------------------------------------- */

mt_status mt_share_make(int *fd)
{
    int made = memfd_create("megatrain", MFD_CLOEXEC | MFD_NOEXEC_SEAL);

    if (made < 0 && errno == EINVAL)                     /* a kernel that has no such seal */
        made = memfd_create("megatrain", MFD_CLOEXEC);
    if (made < 0)
        return MT_FAIL(MT_ENOMEM, "shared memory: memfd_create: %s", strerror(errno));
    if (ftruncate(made, (off_t)SHARE_BYTES) != 0) {
        int error = errno;

        (void)close(made);
        return MT_FAIL(MT_ENOMEM, "shared memory: no file of %" PRIu64 " bytes, none of which is "
                       "used yet: %s; raise the limit on the size of files (ulimit -f)",
                       SHARE_BYTES, strerror(error));
    }
    *fd = made;
    return MT_OK;
}

/* A description of its own, whose lock is its own. */
static mt_status open_file(mt_share *h, int fd)
{
    char        path[64];
    struct stat is;

    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if ((h->fd = mt_forks_open(path, O_RDWR | O_CLOEXEC, 0)) < 0)
        return MT_FAIL(MT_EINVAL, "shared memory: descriptor %d: %s", fd, strerror(errno));
    if (fstat(h->fd, &is) != 0 || (uint64_t)is.st_size != SHARE_BYTES)
        return MT_FAIL(MT_EINVAL, "shared memory: descriptor %d is of another file", fd);
    return MT_OK;
}

/* The byte of the file whose lock says that the rank lives. */
static struct flock byte_of(int rank)
{
    return (struct flock){ .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1 };
}

static mt_status take_slot(mt_share *h)
{
    struct flock lock = byte_of(h->rank);
    uint32_t     ranks = 0;
    slot        *mine = &h->head->slots[h->rank];
    int          busy;

    if (!atomic_compare_exchange_strong(&h->head->ranks, &ranks, (uint32_t)h->ranks) &&
        ranks != (uint32_t)h->ranks)
        return MT_FAIL(MT_EINVAL, "shared memory: rank %d counts %d ranks, others %u", h->rank,
                       h->ranks, ranks);
    busy = fcntl(h->fd, F_OFD_SETLK, &lock) != 0;
    if (busy && errno != EAGAIN && errno != EACCES)
        return MT_FAIL(MT_ENOTSUP, "shared memory: no lock of a file in memory: %s",
                       strerror(errno));
    if (busy || atomic_load(&mine->pid) != 0)
        return MT_FAIL(MT_ESTATE, "shared memory: rank %d is process %" PRId64 " already, or was",
                       h->rank, atomic_load(&mine->pid));
    atomic_store(&mine->pid, (int64_t)getpid());
    return MT_OK;
}

mt_status mt_share_open(int fd, int rank, int ranks, mt_share **out)
{
    size_t    bytes = round_up(sizeof(head), page_bytes());
    mt_share *h;
    void     *map;
    mt_status st;

    if (rank < 0 || rank >= ranks || ranks > MT_RANKS_MOST)
        return MT_FAIL(MT_EINVAL, "shared memory: there is no rank %d of %d; there may be 1 to %d, "
                       "counted from 0", rank, ranks, MT_RANKS_MOST);
    if ((h = calloc(1, sizeof *h)) == NULL)
        return MT_FAIL(MT_ENOMEM, "shared memory: calloc(%zu)", sizeof *h);
    *h = (mt_share){ .fd = -1, .rank = rank, .ranks = ranks, .next = bytes };
    MT_TRY(open_file(h, fd));
    map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, h->fd, 0);
    if (map == MAP_FAILED) {
        st = MT_FAIL(MT_ENOMEM, "shared memory: %zu bytes: %s", bytes, strerror(errno));
        goto fail;
    }
    mt_forks_private(map, bytes);
    h->head = map;
    MT_TRY(take_slot(h));
    *out = h;
    return MT_OK;

fail:
    mt_share_close(h);
    return st;
}

void mt_share_close(mt_share *h)
{
    if (h == NULL)
        return;
    if (h->head != NULL) {
        mt_forks_shared(h->head);
        munmap(h->head, round_up(sizeof(head), page_bytes()));
    }
    if (h->fd >= 0)
        mt_forks_close(h->fd);
    free(h);
}

int mt_share_rank(const mt_share *h)
{
    return h->rank;
}

int mt_share_ranks(const mt_share *h)
{
    return h->ranks;
}

/* ---- ranges ------------------------------------------------------------------------------- */

mt_status mt_share_take(mt_share *h, size_t bytes, mt_range *out)
{
    size_t   page = page_bytes();
    uint64_t at = round_up(h->next, bytes >= 2 * HUGE_BYTES ? HUGE_BYTES : page);

    if (at > SHARE_BYTES || bytes > SHARE_BYTES - at)
        return MT_FAIL(MT_ENOMEM, "shared memory: %zu bytes behind %" PRIu64 ": a model may have "
                       "%" PRIu64, bytes, at, SHARE_BYTES);
    *out = (mt_range){ .share = h, .at = at, .bytes = bytes };
    h->next = round_up(at + bytes, page);
    return MT_OK;
}

int mt_share_map(const mt_range *r, void *base, int own)
{
    size_t bytes = round_up(r->bytes, page_bytes());
    int    flags = (own ? MAP_PRIVATE : MAP_SHARED) | MAP_NORESERVE | MAP_FIXED;

    return mmap(base, bytes, PROT_READ | PROT_WRITE, flags, r->share->fd, (off_t)r->at) ==
           MAP_FAILED ? errno : 0;
}

/* ---- boards ------------------------------------------------------------------------------- */

/* A board begins with every rank's layout; then come its counters; then the sums of chunks. */
static _Atomic uint64_t *layouts_of(const mt_board *b)
{
    return b->base;
}

static size_t words_of(const mt_share *h)
{
    return (size_t)h->ranks * (1 + MT_UNIT_COUNTS);
}

/* Each says its own before it looks at the others': of two that differ one sees it at least. */
static mt_status compare(const mt_share *h, const mt_board *b, const char *unit, uint64_t layout)
{
    _Atomic uint64_t *said = layouts_of(b);

    atomic_store(&said[h->rank], layout);
    for (int i = 0; i < h->ranks; i++) {
        uint64_t other = atomic_load(&said[i]);

        if (other != 0 && other != layout)
            return MT_FAIL(MT_EINVAL, "unit %s: rank %d (process %" PRId64 ") has another unit "
                           "there, or one with other parameters, than rank %d", unit, i,
                           atomic_load(&h->head->slots[i].pid), h->rank);
    }
    return MT_OK;
}

mt_status mt_board_open(mt_share *h, const char *unit, uint64_t layout, size_t n_chunks,
                        mt_board *out)
{
    mt_board  made = { 0 };
    size_t    bytes = (words_of(h) + n_chunks) * sizeof(uint64_t);
    void     *map;
    int       error = ENOMEM;
    mt_status st;

    MT_TRY(mt_share_take(h, bytes, &made.range));
    bytes = round_up(bytes, page_bytes());
    map = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map != MAP_FAILED && (error = mt_share_map(&made.range, map, 0)) != 0)
        munmap(map, bytes);
    if (error != 0)
        return MT_FAIL(MT_ENOMEM, "unit %s: %zu bytes of shared memory: %s", unit, bytes,
                       strerror(error));
    mt_forks_private(map, bytes);
    made.base = map;
    made.chunks = (double *)map + words_of(h);
    MT_TRY(compare(h, &made, unit, layout | 1));         /* 0: it has said nothing */
    *out = made;
    return MT_OK;

fail:
    mt_board_close(&made);
    return st;
}

void mt_board_close(mt_board *b)
{
    if (b->base != NULL) {
        mt_forks_shared(b->base);
        munmap(b->base, round_up(b->range.bytes, page_bytes()));
    }
    memset(b, 0, sizeof *b);
}
