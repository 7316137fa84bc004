/* share.h — memory that the processes of one machine have in common, and what they tell each
 * other there.
 *
 * Nouns, in the order they appear below:
 *   rank      0 to ranks - 1: one of these processes
 *   share     a file in memory that all of them map. It has no name, and is sparse: a page costs
 *             memory from its first write on. It ends with the last process that has it, however
 *             that ends
 *   range     of the share: it lies at the same place for every rank, since all take the same
 *             ranges in the same order
 *   counter   a number that only grows, and a second one that says what it is about
 *   board     counters of every rank: one board of the ranks themselves, and one of each unit,
 *             which has sums of chunks of its gradients too
 *   word      changes with everything that any rank says; a thread may sleep until it does
 *   speaker   of a rank: the process of this machine that writes the rank's counters. A rank of
 *             this machine speaks for itself; for one of another machine speaks who hears from it
 *             (relay.h)
 *   note      what this rank said, for who tells other machines of it; in the order in which it
 *             was said
 *
 *     mt_share_make(&fd);                             // one process; the others are given fd
 *     mt_share_open(fd, 1, 4, &h);                    // each
 *     mt_store_open(&(mt_context){ ..., .share = h }, &s);     // has its planes there
 *     mt_board_say(mt_share_board(h), MT_COUNT_CLEAR, 7, about);   // this rank has come to 7
 *     while (mt_board_behind(b, MT_COUNT_CLEAR, 7) < 4) ...        // until all have
 *
 * What is always true:
 *   (1) A rank's speaker alone writes its counters, and none of them falls
 *   (2) What a rank wrote before it raised a counter is seen by whoever has read that counter:
 *       both are sequentially consistent
 *   (3) A counter's second number is written before the first. Whoever reads the first and then
 *       the second has that one's, or a later one's
 *   (4) A rank that has left says nothing more
 *   (5) A unit's board is there before its ranges, so that ranks whose units differ see it before
 *       one's plane lies in another's
 *
 * Ranges begin at pages. Those of 4 MiB and more begin where huge pages do, and arenas there ask
 * for such pages (MADV_COLLAPSE: Linux 6.1, whatever the settings but "deny"). Older kernels give
 * them where /sys/kernel/mm/transparent_hugepage/shmem_enabled says "advise"; else, with pages of
 * 4 KiB, an update by AdamW takes 1.3 times the processor time (one core of an EPYC, bf16, fp32
 * states).
 *
 * Processes share no lock. Each keeps one on a byte of the file, which the kernel drops when the
 * process ends, so that others see it.
 *
 * Threads: ranges, boards' making: one at a time. The rest: any. A child of fork() has none of it.
 */
#ifndef MT_SHARE_H
#define MT_SHARE_H

#include "status.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define MT_RANKS_MOST 256

typedef struct mt_share mt_share;

/* *fd: of a new, empty share; the caller closes it when all have opened theirs. */
mt_status mt_share_make (int *fd);
/* fd is any descriptor of the share, and may be closed afterwards. MT_EINVAL: another rank was
 * opened with another number of ranks. MT_ESTATE: that rank is here, or has been. */
mt_status mt_share_open (int fd, int rank, int ranks, mt_share **out);
/* Some ranks are on other machines: speakers [ranks] has every rank's. What this rank says is noted
 * from here on. Before units. MT_EINVAL: a speaker, or this rank, does not speak for itself. */
mt_status mt_share_apart(mt_share *h, const int *speakers);
void      mt_share_close(mt_share *h);                   /* behind all that is mapped */
int       mt_share_rank (const mt_share *h);
int       mt_share_ranks(const mt_share *h);
int       mt_share_is_apart(const mt_share *h);          /* some are on other machines */
int       mt_share_speaker (const mt_share *h, int rank);

/* ---- ranges ------------------------------------------------------------------------------- */

typedef struct mt_range {
    mt_share *share;
    uint64_t  at;            /* of its first byte in the share */
    size_t    bytes;
} mt_range;

/* The next bytes that nobody has. */
mt_status mt_share_take(mt_share *h, size_t bytes, mt_range *out);
/* Maps it at base, where whole pages for it are reserved. own: what this process writes there is
 * seen by it alone; pages that it has not written show what is in the share. 0, or errno. */
int       mt_share_map (const mt_range *r, void *base, int own);
/* So many bytes of it, from there on, are zeros, and their pages are given back. */
void      mt_share_punch(const mt_range *r, size_t from, size_t bytes);
/* Memory in a range of its own. what: for the message. */
mt_status mt_share_room  (mt_share *h, size_t bytes, const char *what, void **out);
void      mt_share_unroom(void *room, size_t bytes);     /* NULL is fine */

/* ---- counters ----------------------------------------------------------------------------- */

/* Of a unit and a rank: name, what it counts, what is awaited of a rank that is behind */
#define MT_UNIT_COUNT_MAP(X)                                                                 \
    X(LANDED,   "hand-overs of gradients that ended",              "its gradients")          \
    X(UPDATED,  "updates that ended",                              "its update")             \
    X(STEPPED,  "updates that are over on its device, or ended",   "its update")             \
    X(SAVING,   "saves that it has begun",                         "its save")               \
    X(COPIED,   "of these, those that have copied their part",     "its part of a save")     \
    X(SUMMED,   "times that the sums of its chunks were put on the board", "its sums")
/* Of a rank: the same. Of requests there is a counter for each rank that may ask: SERVED + asker */
#define MT_RANK_COUNT_MAP(X)                                                                 \
    X(CAME,     "its process's number, once it is there",          "it")                     \
    X(SUBMITTED, "submits that it was asked for",                  "its step")               \
    X(MET,      "meetings that it has come to (mt_ledger_meeting)", "its meeting")           \
    X(MEASURED, "submits whose gradients' sums are on the boards", "its part of the norm")   \
    X(NORMED,   "submits whose norm it told; rank 0's alone",      "the norm")               \
    X(CLEAR,    "submits whose units it reads no more",            "its leave to update")    \
    X(WRITTEN,  "spreads that it has come to",                     "its part of a spread")   \
    X(SPREAD,   "spreads of which its portion is in the share",    "its part of a spread")   \
    X(EVICTED,  "two for each evict: it reads no more; its pages are gone", "its evict")     \
    X(ASKED,    "requests for what others have of a unit",         "a request")              \
    X(TURN,     "the window that it opens (turn.h); its machine's alone", "its window")      \
    X(AWAY,     "times that it went to a meeting, or came back; its machine's alone", "it")  \
    X(FAILED,   "1: what ended its work is written",               "its failure")            \
    X(PARTED,   "1: it asks nothing from now on",                  "its end")                \
    X(LEFT,     "1: it says nothing from now on",                  "its end")                \
    X(SERVED,   "requests of rank 0 that it has done; then those of rank 1, and so on", "it")
#define MT_COUNT_ENUM(name, what, awaited) MT_COUNT_##name,
typedef enum mt_count {
    MT_UNIT_COUNT_MAP(MT_COUNT_ENUM) MT_UNIT_COUNTS, MT__COUNT_BEFORE = MT_UNIT_COUNTS - 1,
    MT_RANK_COUNT_MAP(MT_COUNT_ENUM) MT_COUNTS
} mt_count;
#undef MT_COUNT_ENUM

typedef struct mt_board {
    mt_share         *share;
    _Atomic uint64_t *words; /* NULL: there is none */
    double           *chunks;        /* [n_chunks] sums of squares of every parameter's that can be
                                      * trained, in the order of the line; of each its owner writes
                                      * it */
    size_t            n_chunks;
    int               unit;          /* -1: the board of the ranks themselves */
} mt_board;

const mt_board *mt_share_board(const mt_share *h);       /* the ranks' own */
/* layout: of what the unit has, and the same for every rank: MT_EINVAL, with the name of one that
 * has another. */
mt_status mt_board_open (mt_share *h, const char *name, int unit, uint64_t layout,
                         size_t n_chunks, mt_board *out);
void      mt_board_close(mt_board *b);
/* This rank has come to n. about: a number for the others, which stays until the next. */
void      mt_board_say   (const mt_board *b, int count, uint64_t n, uint64_t about);
uint64_t  mt_board_said  (const mt_board *b, int count, int rank);
uint64_t  mt_board_about (const mt_board *b, int count, int rank);
/* The first rank that has not come to n; ranks: all have. */
int       mt_board_behind(const mt_board *b, int count, uint64_t n);
/* The first rank whose second number is another one than `about`; ranks: none. */
int       mt_board_differs(const mt_board *b, int count, uint64_t about);
/* Of a plane, what ranks of this machine keep there about other machines' portions of it. */
#define MT_BOARD_PLANES 16
_Atomic uint64_t *mt_board_plane(const mt_board *b, int plane);

static inline uint64_t mt_share_said(const mt_share *h, mt_count what, int rank)
{
    return mt_board_said(mt_share_board(h), (int)what, rank);
}

static inline uint64_t mt_share_about(const mt_share *h, mt_count what, int rank)
{
    return mt_board_about(mt_share_board(h), (int)what, rank);
}

/* ---- who is there ------------------------------------------------------------------------- */

/* A rank that has not come yet is HERE. */
typedef enum mt_presence { MT_RANK_HERE, MT_RANK_LEFT, MT_RANK_DIED } mt_presence;

mt_presence mt_share_presence(const mt_share *h, int rank);
/* When a rank was found gone (lock.h): one of another machine by its speaker, one of this machine
 * by any; 0: it was not. */
uint64_t    mt_share_lost_ns (const mt_share *h, int rank);
/* Nothing more will be heard of it, without its having left. */
void        mt_share_gone    (mt_share *h, int rank);
/* This rank says 1 of FAILED, of PARTED (it asks nothing from now on, and leaves when nobody asks
 * it) or of LEFT. Once: a second call, or one behind LEFT, does nothing. */
void        mt_share_once    (mt_share *h, mt_count count);
/* What ended this rank's work; the first stays. */
void        mt_share_fail    (mt_share *h, const char *text);
/* Where a rank's text is put before FAILED is said. */
char       *mt_share_why     (mt_share *h, int rank, size_t *cap);

uint32_t    mt_share_word (const mt_share *h);
void        mt_share_stir (mt_share *h);                 /* it changes */
/* Until the word is another, or ms have gone by. */
void        mt_share_sleep(const mt_share *h, uint32_t word, int ms);

/* ---- ranks of other machines -------------------------------------------------------------- */

typedef struct mt_note {
    int      unit, count;    /* which board's, which counter; SERVED + asker is one too */
    uint64_t n, about;
} mt_note;

/* The next; *some = 0: nothing was said within ms. MT_ENOMEM: there was no memory for one.
 * MT_ESTATE: all ranks are on this machine. */
mt_status mt_share_note(mt_share *h, int ms, mt_note *out, int *some);
/* Its speaker's: the rank said that. 0: no board has such a counter. */
int       mt_board_hear(const mt_board *b, int rank, mt_note note);

#endif
