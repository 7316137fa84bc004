/* share.h — memory that the processes of one machine have in common, and what they tell each
 * other there.
 *
 * Nouns, in the order they appear below:
 *   rank      0 to ranks - 1: one of these processes
 *   share     a file in memory that all of them map. It has no name, and is sparse: a page costs
 *             memory from its first write on. It ends with the last process that has it, however
 *             that ends
 *   range     of the share: what lies there is at the same place for every rank, since all take the
 *             same ranges in the same order
 *   counter   a number that only grows; written by its rank alone, read by all. What a rank wrote
 *             before it raised one is seen by who has seen that
 *   slot      what a rank has in the share: process, counters, fault
 *   board     of a unit: counters of every rank, and sums of chunks of its gradients
 *   word      changes with everything that any rank says; a thread may sleep until it does
 *   speaker   of a rank: the process of this machine that writes the rank's slot, and its part of
 *             the board. A rank of this machine speaks for itself; for one of another machine does
 *             who hears from it (relay.h)
 *
 *     mt_share_make(&fd);                             // one process; the others are given fd
 *     mt_share_open(fd, 1, 4, &h);                    // each
 *     mt_store_open(&(mt_context){ ..., .share = h }, &s);     // has its planes there
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
 * Threads: ranges, boards: one at a time. The rest: any. A child of fork() has none of it.
 */
#ifndef MT_SHARE_H
#define MT_SHARE_H

#include "notes.h"

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
mt_notes *mt_share_notes   (const mt_share *h);          /* NULL: all are on this machine */

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

/* ---- counters ----------------------------------------------------------------------------- */

/* Of a rank: name, what it counts, what is awaited of a rank that is behind */
#define MT_COUNT_MAP(X)                                                                      \
    X(SUBMITTED, "submits that it was asked for",                "its step")                 \
    X(MET,      "meetings that it has come to (mt_ledger_meeting)", "its meeting")           \
    X(MEASURED, "submits whose gradients' sums are on the boards", "its part of the norm")   \
    X(NORMED,   "submits whose norm it told; rank 0's alone",      "the norm")               \
    X(CLEAR,    "submits whose units it reads no more",            "its leave to update")    \
    X(WRITTEN,  "spreads that it has come to",                     "its part of a spread")   \
    X(SPREAD,   "spreads of which its portion is in the share",    "its part of a spread")       \
    X(EVICTED,  "two for each evict: it reads no more; its pages are gone", "its evict")       \
    X(ASKED,    "requests for what others have of a unit",         "a request")
/* Of a unit and a rank: the same */
#define MT_UNIT_COUNT_MAP(X)                                                                 \
    X(LANDED,   "hand-overs of gradients that ended",              "its gradients")          \
    X(UPDATED,  "updates that ended",                              "its update")            \
    X(STEPPED,  "updates that are over on its device, or ended",   "its update")            \
    X(SAVING,   "saves that it has begun",                         "its save")              \
    X(COPIED,   "of these, those that have copied their part",     "its part of a save")
#define MT_COUNT_ENUM(name, what, awaited) MT_COUNT_##name,
typedef enum mt_count { MT_COUNT_MAP(MT_COUNT_ENUM) MT_COUNTS } mt_count;
typedef enum mt_unit_count { MT_UNIT_COUNT_MAP(MT_COUNT_ENUM) MT_UNIT_COUNTS } mt_unit_count;
#undef MT_COUNT_ENUM

/* This rank has come to n. about: a number for the others, which stays until the next. */
void     mt_share_say  (mt_share *h, mt_count what, uint64_t n, uint64_t about);
uint64_t mt_share_said (const mt_share *h, mt_count what, int rank);
uint64_t mt_share_about(const mt_share *h, mt_count what, int rank);
/* The first rank that has not come to n; ranks: all have. */
int      mt_share_behind(const mt_share *h, mt_count what, uint64_t n);

/* This rank has done what another asked for up to its nth request, which was about that. */
void     mt_share_serve (mt_share *h, int asker, uint64_t n, uint64_t about);
uint64_t mt_share_served(const mt_share *h, int rank, int asker);

typedef struct mt_board {
    mt_range  range;
    void     *base;          /* NULL: there is none */
    double   *chunks;        /* [n_chunks] sums of squares of every parameter's that can be trained,
                              * in the order of the line; of each its owner writes it */
    size_t    n_chunks;
    int       unit;
} mt_board;

/* A board in a range of its own. layout: of what the unit has, and the same for every rank:
 * MT_EINVAL, with the name of one that has another. */
mt_status mt_board_open (mt_share *h, const char *name, int unit, uint64_t layout,
                         size_t n_chunks, mt_board *out);
void      mt_board_close(mt_board *b);
void      mt_board_say   (const mt_board *b, mt_unit_count what, uint64_t n);
uint64_t  mt_board_said  (const mt_board *b, mt_unit_count what, int rank);
int       mt_board_behind(const mt_board *b, mt_unit_count what, uint64_t n);
/* Of a plane, what ranks of this machine keep there about other machines' portions of it. */
#define MT_BOARD_PLANES 16
_Atomic uint64_t *mt_board_plane(const mt_board *b, int plane);

/* ---- who is there ------------------------------------------------------------------------- */

/* A rank that has not come yet is HERE. */
typedef enum mt_presence { MT_RANK_HERE, MT_RANK_LEFT, MT_RANK_DIED } mt_presence;

int64_t     mt_share_process (const mt_share *h, int rank);              /* 0: it has not come */
mt_presence mt_share_presence(const mt_share *h, int rank);
/* When a rank was found gone (clock.h): one of another machine by its speaker, one of this machine
 * by any; 0: it was not. */
uint64_t    mt_share_lost_ns (const mt_share *h, int rank);
void        mt_share_leave   (mt_share *h);              /* this rank says nothing from now on */
/* This rank asks nothing from now on, and leaves when nobody asks it. */
void        mt_share_part    (mt_share *h);
int         mt_share_parted  (const mt_share *h, int rank);              /* so has this, or left */
/* What ended this rank's work; the first stays. */
void        mt_share_fail    (mt_share *h, const char *text);
const char *mt_share_failure (const mt_share *h, int rank);              /* NULL: nothing did */

/* For a rank of another machine its speaker. hear: it said that. gone: nothing more will be heard
 * of it, without its having left. why: where what ended its work is put before that is heard. */
void        mt_share_hear(mt_share *h, int rank, mt_note note);
void        mt_board_hear(const mt_board *b, int rank, mt_unit_count what, uint64_t n);
void        mt_share_gone(mt_share *h, int rank);
char       *mt_share_why (mt_share *h, int rank, size_t *cap);

uint32_t    mt_share_word (const mt_share *h);
void        mt_share_stir (mt_share *h);                 /* it changes */
/* Until the word is another, or ms have gone by. */
void        mt_share_sleep(const mt_share *h, uint32_t word, int ms);

#endif
