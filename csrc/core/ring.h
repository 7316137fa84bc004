/* ring.h — buffers that pieces of a file go through, and the one lock of all who use them.
 *
 * Nouns, in the order they appear below:
 *   rings    all those of one file: each can ask what the others do with a piece
 *   ring     buffers of a kind: that of updates, that of fetches, that of the host's copies
 *   ahead    a ring's function that puts reads nobody waits for yet. Every end of a request calls
 *            that of every ring, under the lock: a buffer, or a piece, may have come free
 *   buffer   host memory for a piece, on its way
 *   FREE -> READING -> READY -> TAKEN -> WRITING -> FREE      of updates
 *   READY -> TAKEN -> COPYING -> FREE                         of fetches: to a slot
 *   FREE -> TAKEN -> READING -> TAKEN -> WRITING -> TAKEN     of copies
 *   TAKEN -> READY -> TAKEN                                   of copies: what it has is kept
 *            TAKEN and READY may go FREE. READING -> DROPPED -> FREE: nobody wants it any more
 *
 *     mt_rings_open(cx, file, &all);
 *     mt_ring_open(all, &(mt_ring_how){ .name = "...", .reads = "...", .writes = "..." }, &r);
 *     mt_ring_add(r, bytes, NULL);                        // a buffer
 *     mt_lock(&all->mu);
 *     b = mt_ring_find(r, 1u << MT_BUFFER_FREE, -1, -1);
 *     mt_ring_put(b, layout, piece, MT_ALL_SECTIONS, 0, MT_BUFFER_READY);
 *     mt_unlock(&all->mu);
 *     MT_RINGS_UNTIL(all, b->at == MT_BUFFER_READY, unit, "a piece");
 *
 * Order:   nobody reads of a piece what another writes, nor writes what another reads: who puts a
 *          request asks mt_rings_meets before, or has seen to it.
 * Threads: any; requests end on threads of the file's.
 * Errors:  a request that failed is the ledger's fault (layout.h). No ring reads ahead then.
 */
#ifndef MT_RING_H
#define MT_RING_H

#include "arena.h"
#include "layout.h"
#include "timeline.h"

typedef enum mt_buffer_state {
    MT_BUFFER_FREE, MT_BUFFER_READING, MT_BUFFER_DROPPED, MT_BUFFER_READY, MT_BUFFER_TAKEN,
    MT_BUFFER_WRITING, MT_BUFFER_COPYING, MT_BUFFER_STATES
} mt_buffer_state;

#define MT_ALL_SECTIONS (1u << MT_SECTION_WEIGHTS | 1u << MT_SECTION_STATES)

/* Those who have a ring read these three; ring.c alone writes them. */

typedef struct mt_rings_stats {
    uint64_t read_bytes, written_bytes;  /* since open, as requests ended */
    size_t   buffer_bytes;               /* host memory of all buffers */
} mt_rings_stats;

typedef struct mt_rings {
    mt_store       *store;               /* these three: constant */
    mt_timeline    *timeline;
    mt_blocks      *file;
    mt_mutex        mu;                  /* the lock */
    pthread_cond_t  changed;             /* requests of a buffer are over, or a buffer is free */
    struct mt_ring *first;               /* mu, as all below. The latest */
    int             failed;
    uint64_t        recorded_ns;         /* the lane's records reach up to here */
    mt_rings_stats  stats;
} mt_rings;

typedef struct mt_ring_how {
    const char *name;                    /* of its memory, for messages */
    const char *reads, *writes;          /* what is waited for meanwhile, for the watchdog */
    void      (*ahead)(void *arg);       /* NULL: nothing is read ahead */
    void       *arg;
} mt_ring_how;

typedef struct mt_ring {
    mt_rings          *all;              /* these two: constant, but for `ahead` */
    mt_ring_how        how;
    struct mt_buffer **buffers;          /* [n] the lock, as all below */
    int                n;
    int64_t            room;
    uint64_t           turns;
    struct mt_ring    *next;
} mt_ring;

typedef struct mt_buffer {
    mt_ring         *ring;               /* these three: constant */
    int              number;             /* among the ring's */
    mt_arena         memory;
    mt_buffer_state  at, then;           /* then: when its requests are over. The lock, as below */
    const mt_layout *lay;                /* what it has, or will; NULL: nothing */
    int              piece;
    unsigned         sections;           /* of it, a bit each */
    mt_request       r[MT_SECTIONS];     /* under way when READING, DROPPED or WRITING */
    int              left;               /* of these */
    mt_post          post;               /* of them */
    uint64_t         turn;               /* reads of a ring are counted */
    uint64_t         begun_ns;
} mt_buffer;

/* ---- without the lock --------------------------------------------------------------------- */

mt_status mt_rings_open  (const mt_context *cx, mt_blocks *file, mt_rings **out);
void      mt_rings_close (mt_rings *all);                /* after every ring; NULL is fine */
/* As MT_UNTIL, under the lock. */
#define MT_RINGS_UNTIL(all, over, unit, awaits)                                                    \
    MT_UNTIL(mt_store_watch((all)->store), &(all)->changed, &(all)->mu, over,                      \
             mt_store_name((all)->store, unit), awaits)

mt_status mt_ring_open (mt_rings *all, const mt_ring_how *how, mt_ring **out);
void      mt_ring_close(mt_ring *r);                     /* waits for requests; NULL is fine */
/* One buffer more; registered with dev, unless that is NULL. */
mt_status mt_ring_add  (mt_ring *r, size_t bytes, mt_dev *dev);

/* ---- under the lock ----------------------------------------------------------------------- */

void mt_rings_ahead (mt_rings *all);     /* what was looked at may be otherwise now */
int  mt_rings_meets (const mt_rings *all, int unit, int piece, int write);

/* One in one of the states, 1u << state each, with that piece; -1: any. */
mt_buffer *mt_ring_find (const mt_ring *r, unsigned states, int unit, int piece);
/* What was read of a unit (-1: of any), or is being read, is not used. before: only what was put
 * before that one; NULL: all. */
void       mt_ring_drop (mt_ring *r, int unit, const mt_buffer *before);
/* All rings but this one: what they read of the unit is not used; are they at it? */
void       mt_ring_drop_others(mt_ring *r, int unit);
int        mt_ring_others_read(const mt_ring *r, int unit);

/* Of its layout's piece these sections, of which one at least has bytes; it is `then` when that is
 * over. */
void mt_ring_put (mt_buffer *b, const mt_layout *l, int piece, unsigned sections, int write,
                  mt_buffer_state then);
int  mt_buffer_may(mt_buffer_state from, mt_buffer_state to);
void mt_buffer_to(mt_buffer *b, mt_buffer_state to);     /* one that may follow: an assertion */
/* Whoever has it wants it no more: FREE, now or when its request is over. */
void mt_buffer_leave(mt_buffer *b);

int  mt_buffer_unit(const mt_buffer *b);                 /* whose piece it has; -1: it has none */
/* Just these. */
int  mt_buffer_has (const mt_buffer *b, const mt_layout *l, int piece, unsigned sections);

#endif
