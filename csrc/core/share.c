/* share.c — a memfd: its head, its ranges, and what ranks say there. */
#include "share.h"

#include "checked.h"
#include "clock.h"
#include "forks.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SHARE_BYTES ((uint64_t)1 << 44)      /* addresses in the file: 16 TiB */
#define HUGE_BYTES  ((size_t)2 << 20)

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8u
#endif

/* A rank's; written by its speaker alone, but for gone_ns. */
typedef struct slot {
    _Atomic int64_t  pid;                    /* 0: it has not come */
    _Atomic uint64_t said[MT_COUNTS], about[MT_COUNTS];
    atomic_int       parted, left, failed;
    _Atomic uint64_t gone_ns;                /* when it was found gone; 0: it was not */
    char             why[1024];              /* written before `failed` */
} slot;

/* At the share's first byte. */
typedef struct head {
    _Atomic uint32_t ranks;                  /* 0: nobody has come; by the first, once */
    _Atomic uint32_t word;
    slot             slots[MT_RANKS_MOST];
    /* [rank][who asked]: requests of his that the rank has done */
    _Atomic uint64_t served[MT_RANKS_MOST][MT_RANKS_MOST];
} head;

struct mt_share {
    int      fd, rank, ranks;
    int      came;                           /* the slot is ours */
    head    *head;
    int     *speakers;                       /* [ranks]; NULL: all are on this machine */
    mt_notes *notes;                         /* NULL likewise */
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
    h->came = 1;
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
    if ((st = MT_MAKE(h, 1, "shared memory")) != MT_OK)
        return st;
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
        if (h->came)
            mt_share_leave(h);
        mt_forks_shared(h->head);
        munmap(h->head, round_up(sizeof(head), page_bytes()));
    }
    if (h->fd >= 0)
        mt_forks_close(h->fd);
    mt_notes_close(h->notes);
    free(h->speakers);
    free(h);
}

mt_status mt_share_apart(mt_share *h, const int *speakers)
{
    mt_status st;

    MT_ASSERT(h->speakers == NULL);
    for (int rank = 0; rank < h->ranks; rank++) {
        int speaker = rank == h->rank ? rank : speakers[rank];

        if (speaker < 0 || speaker >= h->ranks || speakers[speaker] != speaker)
            return MT_FAIL(MT_EINVAL, "rank %d cannot have the speaker %d, who is not of this "
                           "machine", rank, speakers[rank]);
    }
    MT_TRY(MT_MAKE(h->speakers, h->ranks, "shared memory"));
    memcpy(h->speakers, speakers, (size_t)h->ranks * sizeof *speakers);
    MT_TRY(mt_notes_open(&h->notes));
    mt_notes_put(h->notes, (mt_note){ .kind = MT_NOTE_CAME, .n = (uint64_t)getpid() });
fail:
    return st;
}

int mt_share_is_apart(const mt_share *h)
{
    return h->speakers != NULL;
}

int mt_share_speaker(const mt_share *h, int rank)
{
    return h->speakers != NULL ? h->speakers[rank] : rank;
}

mt_notes *mt_share_notes(const mt_share *h)
{
    return h->notes;
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

void mt_share_punch(const mt_range *r, size_t from, size_t bytes)
{
    if (bytes > 0)
        (void)fallocate(r->share->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                        (off_t)(r->at + from), (off_t)bytes);
}

/* ---- counters ----------------------------------------------------------------------------- */

/* Others' threads sleep on the word: of all that this rank has said so far they see at least this
 * change. */
static void wake(mt_share *h)
{
    atomic_fetch_add(&h->head->word, 1);
    (void)syscall(SYS_futex, &h->head->word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

uint32_t mt_share_word(const mt_share *h)
{
    return atomic_load(&h->head->word);
}

void mt_share_stir(mt_share *h)
{
    wake(h);
}

void mt_share_sleep(const mt_share *h, uint32_t word, int ms)
{
    struct timespec t = { ms / 1000, (long)(ms % 1000) * 1000000 };

    (void)syscall(SYS_futex, &h->head->word, FUTEX_WAIT, word, &t, NULL, 0);
}

/* Of a rank that this one speaks for. */
static void say(mt_share *h, int rank, mt_count what, uint64_t n, uint64_t about)
{
    slot *its = &h->head->slots[rank];

    MT_ASSERT(mt_share_speaker(h, rank) == h->rank && n > atomic_load(&its->said[what]));
    atomic_store(&its->about[what], about);
    atomic_store(&its->said[what], n);
    wake(h);
}

void mt_share_say(mt_share *h, mt_count what, uint64_t n, uint64_t about)
{
    mt_notes_put(h->notes, (mt_note){ .kind = MT_NOTE_SAID, .what = (int)what, .n = n,
                                      .about = about });
    say(h, h->rank, what, n, about);
}

uint64_t mt_share_said(const mt_share *h, mt_count what, int rank)
{
    return atomic_load(&h->head->slots[rank].said[what]);
}

uint64_t mt_share_about(const mt_share *h, mt_count what, int rank)
{
    return atomic_load(&h->head->slots[rank].about[what]);
}

static void serve(mt_share *h, int rank, int asker, uint64_t n)
{
    atomic_store(&h->head->served[rank][asker], n);
    wake(h);
}

void mt_share_serve(mt_share *h, int asker, uint64_t n, uint64_t about)
{
    if (mt_share_speaker(h, asker) != asker)
        mt_notes_put(h->notes, (mt_note){ .kind = MT_NOTE_SERVED, .what = asker, .n = n,
                                          .about = about });
    serve(h, h->rank, asker, n);
}

uint64_t mt_share_served(const mt_share *h, int rank, int asker)
{
    return atomic_load(&h->head->served[rank][asker]);
}

int mt_share_behind(const mt_share *h, mt_count what, uint64_t n)
{
    int rank = 0;

    while (rank < h->ranks && mt_share_said(h, what, rank) >= n)
        rank++;
    return rank;
}

/* ---- boards ------------------------------------------------------------------------------- */

/* A board begins with every rank's layout; then come its counters, and a word for each plane; then
 * the sums of chunks. */
static size_t words_of(const mt_share *h)
{
    return (size_t)h->ranks * (1 + MT_UNIT_COUNTS) + MT_BOARD_PLANES;
}

static _Atomic uint64_t *layout_of(const mt_board *b, int rank)
{
    return (_Atomic uint64_t *)b->base + rank;
}

static _Atomic uint64_t *count_of(const mt_board *b, mt_unit_count what, int rank)
{
    return layout_of(b, b->range.share->ranks * (1 + (int)what) + rank);
}

/* Each says its own before it looks at the others': of two that differ one sees it at least. */
static mt_status compare(const mt_share *h, const mt_board *b, const char *name, uint64_t layout)
{
    atomic_store(layout_of(b, h->rank), layout);
    for (int i = 0; i < h->ranks; i++) {
        uint64_t other = atomic_load(layout_of(b, i));

        if (other != 0 && other != layout)
            return MT_FAIL(MT_EINVAL, "unit %s: rank %d (process %" PRId64 ") has another unit "
                           "there, or one with other parameters, than rank %d", name, i,
                           mt_share_process(h, i), h->rank);
    }
    return MT_OK;
}

/* NULL, with errno. */
static void *map_board(const mt_range *r)
{
    size_t bytes = round_up(r->bytes, page_bytes());
    void  *map = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int    error;

    if (map == MAP_FAILED)
        return NULL;
    if ((error = mt_share_map(r, map, 0)) != 0) {
        munmap(map, bytes);
        errno = error;
        return NULL;
    }
    mt_forks_private(map, bytes);
    return map;
}

mt_status mt_board_open(mt_share *h, const char *name, int unit, uint64_t layout, size_t n_chunks,
                        mt_board *out)
{
    mt_board  made = { .unit = unit, .n_chunks = n_chunks };
    size_t    bytes = (words_of(h) + n_chunks) * sizeof(uint64_t);
    mt_status st;

    MT_TRY(mt_share_take(h, bytes, &made.range));
    if ((made.base = map_board(&made.range)) == NULL)
        return MT_FAIL(MT_ENOMEM, "unit %s: %zu bytes of shared memory: %s", name, bytes,
                       strerror(errno));
    made.chunks = (double *)made.base + words_of(h);
    MT_TRY(compare(h, &made, name, layout | 1));         /* 0: it has said nothing */
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

void mt_board_hear(const mt_board *b, int rank, mt_unit_count what, uint64_t n)
{
    _Atomic uint64_t *count = count_of(b, what, rank);

    MT_ASSERT(mt_share_speaker(b->range.share, rank) == b->range.share->rank);
    MT_ASSERT(n > atomic_load(count));
    atomic_store(count, n);
    wake(b->range.share);
}

void mt_board_say(const mt_board *b, mt_unit_count what, uint64_t n)
{
    mt_share *h = b->range.share;

    mt_notes_put(h->notes, (mt_note){ .kind = MT_NOTE_DONE, .unit = b->unit, .what = (int)what,
                                      .n = n });
    mt_board_hear(b, h->rank, what, n);
}

_Atomic uint64_t *mt_board_plane(const mt_board *b, int plane)
{
    return layout_of(b, b->range.share->ranks * (1 + MT_UNIT_COUNTS) + plane);
}

uint64_t mt_board_said(const mt_board *b, mt_unit_count what, int rank)
{
    return atomic_load(count_of(b, what, rank));
}

int mt_board_behind(const mt_board *b, mt_unit_count what, uint64_t n)
{
    int rank = 0, ranks = b->range.share->ranks;

    while (rank < ranks && mt_board_said(b, what, rank) >= n)
        rank++;
    return rank;
}

/* ---- who is there ------------------------------------------------------------------------- */

int64_t mt_share_process(const mt_share *h, int rank)
{
    return atomic_load(&h->head->slots[rank].pid);
}

/* What holds the lock is a description of the file, which ends with its process. */
static int is_locked(const mt_share *h, int rank)
{
    struct flock lock = byte_of(rank);

    return rank == h->rank || fcntl(h->fd, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

mt_presence mt_share_presence(const mt_share *h, int rank)
{
    const slot *other = &h->head->slots[rank];

    if (atomic_load(&other->left))
        return MT_RANK_LEFT;
    if (atomic_load(&other->gone_ns) != 0)
        return MT_RANK_DIED;
    return atomic_load(&other->pid) == 0 || mt_share_speaker(h, rank) != rank ||
           is_locked(h, rank) ? MT_RANK_HERE : MT_RANK_DIED;
}

uint64_t mt_share_lost_ns(const mt_share *h, int rank)
{
    return atomic_load(&h->head->slots[rank].gone_ns);
}

void mt_share_leave(mt_share *h)
{
    if (!atomic_exchange(&h->head->slots[h->rank].left, 1))
        mt_notes_put(h->notes, (mt_note){ .kind = MT_NOTE_LEFT });
    wake(h);
}

void mt_share_part(mt_share *h)
{
    atomic_store(&h->head->slots[h->rank].parted, 1);
    mt_notes_put(h->notes, (mt_note){ .kind = MT_NOTE_PARTED });
    wake(h);
}

int mt_share_parted(const mt_share *h, int rank)
{
    return atomic_load(&h->head->slots[rank].parted) ||
           mt_share_presence(h, rank) != MT_RANK_HERE;
}

void mt_share_fail(mt_share *h, const char *text)
{
    slot *mine = &h->head->slots[h->rank];

    if (atomic_load(&mine->failed))
        return;
    snprintf(mine->why, sizeof mine->why, "%s", text);
    atomic_store(&mine->failed, 1);
    mt_notes_put(h->notes, (mt_note){ .kind = MT_NOTE_FAILED });
    wake(h);
}

const char *mt_share_failure(const mt_share *h, int rank)
{
    const slot *other = &h->head->slots[rank];

    return atomic_load(&other->failed) ? other->why : NULL;
}

/* ---- ranks of other machines -------------------------------------------------------------- */

void mt_share_hear(mt_share *h, int rank, mt_note note)
{
    slot *its = &h->head->slots[rank];

    switch (note.kind) {
    case MT_NOTE_CAME:
        atomic_store(&its->pid, (int64_t)note.n);
        break;
    case MT_NOTE_SAID:
        say(h, rank, (mt_count)note.what, note.n, note.about);
        break;
    case MT_NOTE_SERVED:
        serve(h, rank, note.what, note.n);
        break;
    case MT_NOTE_FAILED:
        atomic_store(&its->failed, 1);
        break;
    case MT_NOTE_PARTED:
        atomic_store(&its->parted, 1);
        break;
    case MT_NOTE_LEFT:
        atomic_store(&its->left, 1);
        break;
    case MT_NOTE_DONE:
    case MT_NOTE_SUMS:
    case MT_NOTES:
        break;
    }
    wake(h);
}

void mt_share_gone(mt_share *h, int rank)
{
    uint64_t none = 0;

    (void)atomic_compare_exchange_strong(&h->head->slots[rank].gone_ns, &none, mt_now_ns());
    wake(h);
}

char *mt_share_why(mt_share *h, int rank, size_t *cap)
{
    *cap = sizeof h->head->slots[rank].why;
    return h->head->slots[rank].why;
}
