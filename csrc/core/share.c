/* share.c — a memfd: its head, its ranges, and what ranks say there. */
#include "share.h"

#include "forks.h"
#include "lock.h"
#include "watch.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/futex.h>
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

/* At the share's first byte. The ranks' board lies behind it. */
typedef struct head {
    _Atomic uint32_t ranks;                  /* 0: nobody has come; by the first, once */
    _Atomic uint32_t word;
    _Atomic uint64_t gone_ns[MT_RANKS_MOST]; /* when a rank was found gone; 0: it was not */
    char             why[MT_RANKS_MOST][1024];       /* by the rank's speaker, before FAILED */
} head;

typedef struct noted {
    struct noted *next;
    mt_note      note;
} noted;

struct mt_share {
    int            fd, rank, ranks;
    int            came;                     /* the rank is ours */
    head          *head;
    size_t         head_bytes;
    mt_board       board;                    /* the ranks' own */
    int           *speakers;                 /* [ranks]; NULL: all are on this machine */
    uint64_t       next;                     /* the first byte that nobody has */
    mt_mutex       notes_mu;
    pthread_cond_t noted;                    /* monotonic clock */
    noted         *first, **last;            /* notes. notes_mu */
    int            lost;                     /* there was no memory for one. notes_mu */
};

static size_t whole_pages(uint64_t bytes)
{
    return mt_round_up(bytes, (size_t)sysconf(_SC_PAGESIZE));
}

/* ---- ranges ------------------------------------------------------------------------------- */

mt_status mt_share_take(mt_share *h, size_t bytes, mt_range *out)
{
    uint64_t at = bytes >= 2 * HUGE_BYTES ? mt_round_up(h->next, HUGE_BYTES) : whole_pages(h->next);

    if (at > SHARE_BYTES || bytes > SHARE_BYTES - at)
        return MT_FAIL(MT_ENOMEM, "shared memory: %zu bytes behind %" PRIu64 ": a model may have "
                       "%" PRIu64, bytes, at, SHARE_BYTES);
    *out = (mt_range){ .share = h, .at = at, .bytes = bytes };
    h->next = whole_pages(at + bytes);
    return MT_OK;
}

int mt_share_map(const mt_range *r, void *base, int own)
{
    int flags = (own ? MAP_PRIVATE : MAP_SHARED) | MAP_NORESERVE | MAP_FIXED;

    return mmap(base, whole_pages(r->bytes), PROT_READ | PROT_WRITE, flags, r->share->fd,
                (off_t)r->at) == MAP_FAILED ? errno : 0;
}

void mt_share_punch(const mt_range *r, size_t from, size_t bytes)
{
    if (bytes > 0)
        (void)fallocate(r->share->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                        (off_t)(r->at + from), (off_t)bytes);
}

mt_status mt_share_room(mt_share *h, size_t bytes, const char *what, void **out)
{
    mt_range r;
    void    *map;

    MT_DO(mt_share_take(h, bytes, &r));
    map = mmap(NULL, whole_pages(bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, h->fd,
               (off_t)r.at);
    if (map == MAP_FAILED)
        return MT_FAIL(MT_ENOMEM, "%s: %zu bytes of shared memory: %s", what, bytes,
                       strerror(errno));
    mt_forks_private(map, whole_pages(bytes));
    *out = map;
    return MT_OK;
}

void mt_share_unroom(void *room, size_t bytes)
{
    if (room == NULL)
        return;
    mt_forks_shared(room);
    munmap(room, whole_pages(bytes));
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

/* The byte of the file whose lock says that the rank lives. */
static struct flock byte_of(int rank)
{
    return (struct flock){ .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1 };
}

MT_CLOSER(mt_share_close, mt_share)

mt_status mt_share_open(int fd, int rank, int ranks, mt_share **out)
{
    size_t    counters = (size_t)(MT_COUNTS - 1 - MT_UNIT_COUNTS + ranks) * (size_t)ranks;
    mt_share *h MT_CLOSED(mt_share_close) = NULL;
    char         path[64];
    struct stat  is;
    struct flock lock = byte_of(rank);
    uint32_t     first = 0;              /* so many ranks, says who came first */
    int          busy;
    void        *map;

    if (rank < 0 || rank >= ranks || ranks > MT_RANKS_MOST)
        return MT_FAIL(MT_EINVAL, "shared memory: there is no rank %d of %d; there may be 1 to %d, "
                       "counted from 0", rank, ranks, MT_RANKS_MOST);
    MT_DO(MT_MAKE(h, 1, "shared memory"));
    *h = (mt_share){ .fd = -1, .rank = rank, .ranks = ranks,
                     .head_bytes = sizeof(head) + counters * 2 * sizeof(uint64_t) };
    /* A description of its own, whose lock is its own. */
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if ((h->fd = mt_forks_open(path, O_RDWR | O_CLOEXEC, 0)) < 0)
        return MT_FAIL(MT_EINVAL, "shared memory: descriptor %d: %s", fd, strerror(errno));
    if (fstat(h->fd, &is) != 0 || (uint64_t)is.st_size != SHARE_BYTES)
        return MT_FAIL(MT_EINVAL, "shared memory: descriptor %d is of another file", fd);
    MT_DO(mt_share_room(h, h->head_bytes, "ranks", &map));
    h->head = map;
    h->board = (mt_board){ .share = h, .unit = -1, .words = (_Atomic uint64_t *)(h->head + 1) };
    if (!atomic_compare_exchange_strong(&h->head->ranks, &first, (uint32_t)ranks) &&
        first != (uint32_t)ranks)
        return MT_FAIL(MT_EINVAL, "shared memory: rank %d counts %d ranks, others %u", rank, ranks,
                       first);
    busy = fcntl(h->fd, F_OFD_SETLK, &lock) != 0;
    if (busy && errno != EAGAIN && errno != EACCES)
        return MT_FAIL(MT_ENOTSUP, "shared memory: no lock of a file in memory: %s",
                       strerror(errno));
    if (busy || mt_share_said(h, MT_COUNT_CAME, rank) != 0)
        return MT_FAIL(MT_ESTATE, "shared memory: rank %d is process %" PRIu64 " already, or was",
                       rank, mt_share_said(h, MT_COUNT_CAME, rank));
    mt_board_say(&h->board, MT_COUNT_CAME, (uint64_t)getpid(), 0);
    h->came = 1;
    *out = MT_KEEP(h);
    return MT_OK;
}

void mt_share_close(mt_share *h)
{
    if (h == NULL)
        return;
    if (h->came)
        mt_share_once(h, MT_COUNT_LEFT);
    mt_share_unroom(h->head, h->head_bytes);
    if (h->fd >= 0)
        mt_forks_close(h->fd);
    if (h->speakers != NULL) {
        for (noted *l = h->first, *next; l != NULL; l = next) {
            next = l->next;
            free(l);
        }
        pthread_cond_destroy(&h->noted);
        mt_mutex_close(&h->notes_mu);
    }
    free(h->speakers);
    free(h);
}

int mt_share_is_apart(const mt_share *h)
{
    return h->speakers != NULL;
}

int mt_share_speaker(const mt_share *h, int rank)
{
    return h->speakers != NULL ? h->speakers[rank] : rank;
}

int mt_share_rank(const mt_share *h)
{
    return h->rank;
}

int mt_share_ranks(const mt_share *h)
{
    return h->ranks;
}

/* ---- boards ------------------------------------------------------------------------------- */

/* Others' threads sleep on the word: of all that this rank has said so far they see at least this
 * change. */
void mt_share_stir(mt_share *h)
{
    atomic_fetch_add(&h->head->word, 1);
    (void)syscall(SYS_futex, &h->head->word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

uint32_t mt_share_word(const mt_share *h)
{
    return atomic_load(&h->head->word);
}

void mt_share_sleep(const mt_share *h, uint32_t word, int ms)
{
    struct timespec t = { ms / 1000, (long)(ms % 1000) * 1000000 };

    (void)syscall(SYS_futex, &h->head->word, FUTEX_WAIT, word, &t, NULL, 0);
}

const mt_board *mt_share_board(const mt_share *h)
{
    return &h->board;
}

static int has_counter(const mt_board *b, int count)
{
    return b->unit >= 0 ? count >= 0 && count < MT_UNIT_COUNTS
                        : count >= MT_UNIT_COUNTS && count < MT_COUNT_SERVED + b->share->ranks;
}

/* [count][rank] two words each: the counter, and what it is about. */
static _Atomic uint64_t *counter(const mt_board *b, int count, int rank)
{
    int row = b->unit >= 0 ? count : count - MT_UNIT_COUNTS;

    MT_ASSERT(has_counter(b, count) && rank >= 0 && rank < b->share->ranks);
    return b->words + 2 * ((size_t)row * (size_t)b->share->ranks + (size_t)rank);
}

uint64_t mt_board_said(const mt_board *b, int count, int rank)
{
    return atomic_load(counter(b, count, rank));
}

uint64_t mt_board_about(const mt_board *b, int count, int rank)
{
    return atomic_load(counter(b, count, rank) + 1);
}

int mt_board_behind(const mt_board *b, int count, uint64_t n)
{
    int rank = 0;

    while (rank < b->share->ranks && mt_board_said(b, count, rank) >= n)
        rank++;
    return rank;
}

int mt_board_differs(const mt_board *b, int count, uint64_t about)
{
    int rank = 0;

    while (rank < b->share->ranks && mt_board_about(b, count, rank) == about)
        rank++;
    return rank;
}

/* Of a rank that this one speaks for. */
static void say(const mt_board *b, int rank, int count, uint64_t n, uint64_t about)
{
    _Atomic uint64_t *to = counter(b, count, rank);

    MT_ASSERT(mt_share_speaker(b->share, rank) == b->share->rank);       /* (1) */
    MT_ASSERT(n > atomic_load(to) || count == MT_COUNT_TURN);
    MT_ASSERT(!mt_share_said(b->share, MT_COUNT_LEFT, rank));            /* (4) */
    atomic_store(to + 1, about);             /* (3) */
    atomic_store(to, n);
    mt_share_stir(b->share);
}

/* For other machines. What is served goes to the asker's alone. */
static void put_note(mt_share *h, mt_note note)
{
    int   asker = note.count - MT_COUNT_SERVED;
    noted *l;

    if (h->speakers == NULL || note.count == MT_COUNT_TURN || note.count == MT_COUNT_AWAY ||
        (asker >= 0 && h->speakers[asker] == asker))
        return;
    if ((l = calloc(1, sizeof *l)) != NULL)
        l->note = note;
    MT_HOLD(&h->notes_mu);
    if (l != NULL) {
        *h->last = l;
        h->last = &l->next;
    }
    h->lost |= l == NULL;
    pthread_cond_broadcast(&h->noted);
}

void mt_board_say(const mt_board *b, int count, uint64_t n, uint64_t about)
{
    put_note(b->share, (mt_note){ b->unit, count, n, about });
    say(b, b->share->rank, count, n, about);
}

/* Behind a unit's counters: a word for each plane, each rank's layout, the sums of chunks. */
_Atomic uint64_t *mt_board_plane(const mt_board *b, int plane)
{
    return b->words + 2 * MT_UNIT_COUNTS * b->share->ranks + plane;
}

static size_t board_bytes(const mt_board *b)
{
    return ((size_t)b->share->ranks * (2 * MT_UNIT_COUNTS + 1) + MT_BOARD_PLANES + b->n_chunks) *
           sizeof(uint64_t);
}

mt_status mt_board_open(mt_share *h, const char *name, int unit, uint64_t layout, size_t n_chunks,
                        mt_board *out)
{
    mt_board          made = { .share = h, .unit = unit, .n_chunks = n_chunks };
    _Atomic uint64_t *layouts;
    void             *room;

    MT_DO(mt_share_room(h, board_bytes(&made), name, &room));
    made.words = room;
    layouts = mt_board_plane(&made, MT_BOARD_PLANES);
    made.chunks = (double *)room + (layouts - made.words) + h->ranks;
    layout |= 1;                             /* 0: a rank has not come here yet */
    /* Each says its own before it looks at the others': of two that differ one sees it at least. */
    atomic_store(&layouts[h->rank], layout);
    for (int i = 0; i < h->ranks; i++) {
        uint64_t other = atomic_load(&layouts[i]);

        if (other == 0 || other == layout)
            continue;
        mt_board_close(&made);
        return MT_FAIL(MT_EINVAL, "unit %s: rank %d (process %" PRIu64 ") has another unit there, "
                       "or one with other parameters, than rank %d", name, i,
                       mt_share_said(h, MT_COUNT_CAME, i), h->rank);
    }
    *out = made;
    return MT_OK;
}

void mt_board_close(mt_board *b)
{
    if (b->words != NULL)
        mt_share_unroom((void *)b->words, board_bytes(b));
    memset(b, 0, sizeof *b);
}

/* ---- who is there ------------------------------------------------------------------------- */

/* What holds a rank's lock is a description of the file, which ends with its process. */
mt_presence mt_share_presence(const mt_share *h, int rank)
{
    struct flock lock = byte_of(rank);

    if (mt_share_said(h, MT_COUNT_LEFT, rank))
        return MT_RANK_LEFT;
    if (mt_share_lost_ns(h, rank) != 0)
        return MT_RANK_DIED;
    return mt_share_said(h, MT_COUNT_CAME, rank) == 0 || mt_share_speaker(h, rank) != rank ||
           rank == h->rank || fcntl(h->fd, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK
           ? MT_RANK_HERE : MT_RANK_DIED;
}

uint64_t mt_share_lost_ns(const mt_share *h, int rank)
{
    return atomic_load(&h->head->gone_ns[rank]);
}

void mt_share_gone(mt_share *h, int rank)
{
    uint64_t none = 0;

    (void)atomic_compare_exchange_strong(&h->head->gone_ns[rank], &none, mt_now_ns());
    mt_share_stir(h);
}

void mt_share_once(mt_share *h, mt_count count)
{
    if (!mt_share_said(h, count, h->rank) && !mt_share_said(h, MT_COUNT_LEFT, h->rank))
        mt_board_say(&h->board, (int)count, 1, 0);
}

void mt_share_fail(mt_share *h, const char *text)
{
    if (!mt_share_said(h, MT_COUNT_FAILED, h->rank))
        snprintf(h->head->why[h->rank], sizeof h->head->why[0], "%s", text);
    mt_share_once(h, MT_COUNT_FAILED);
}

char *mt_share_why(mt_share *h, int rank, size_t *cap)
{
    *cap = sizeof h->head->why[rank];
    return h->head->why[rank];
}

/* ---- ranks of other machines -------------------------------------------------------------- */

mt_status mt_share_apart(mt_share *h, const int *speakers)
{
    int *kept;

    MT_ASSERT(h->speakers == NULL);
    for (int rank = 0; rank < h->ranks; rank++) {
        int speaker = rank == h->rank ? rank : speakers[rank];

        if (speaker < 0 || speaker >= h->ranks || speakers[speaker] != speaker)
            return MT_FAIL(MT_EINVAL, "rank %d cannot have the speaker %d, who is not of this "
                           "machine", rank, speakers[rank]);
    }
    MT_DO(mt_watch_cond(&h->noted));
    MT_DO(MT_MAKE(kept, h->ranks, "shared memory"));
    memcpy(kept, speakers, (size_t)h->ranks * sizeof *speakers);
    mt_mutex_open(&h->notes_mu, MT_RANK_LEAF);
    h->last = &h->first;
    h->speakers = kept;
    put_note(h, (mt_note){ -1, MT_COUNT_CAME, (uint64_t)getpid(), 0 });
    return MT_OK;
}

mt_status mt_share_note(mt_share *h, int ms, mt_note *out, int *some)
{
    uint64_t        end = mt_now_ns() + (uint64_t)ms * 1000000u;
    struct timespec until = { (time_t)(end / 1000000000u), (long)(end % 1000000000u) };
    noted          *l;

    if (h->speakers == NULL)
        return MT_FAIL(MT_ESTATE, "relay: all ranks are on this machine");
    MT_HOLD(&h->notes_mu);
    while (h->first == NULL && !h->lost && mt_cond_timedwait(&h->noted, &h->notes_mu, &until) == 0)
        ;
    if ((l = h->first) != NULL && (h->first = l->next) == NULL)
        h->last = &h->first;
    *some = l != NULL;
    if (l != NULL)
        *out = l->note;
    free(l);
    return h->lost ? MT_FAIL(MT_ENOMEM, "relay: no memory for what was said") : MT_OK;
}

int mt_board_hear(const mt_board *b, int rank, mt_note note)
{
    if (!has_counter(b, note.count))
        return 0;
    say(b, rank, note.count, note.n, note.about);
    return 1;
}
