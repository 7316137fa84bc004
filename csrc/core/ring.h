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
 *     mt_lock(mt_rings_mu(all));
 *     b = mt_ring_find(r, 1u << MT_BUFFER_FREE, -1, -1);
 *     mt_ring_put(b, layout, piece, MT_ALL_SECTIONS, 0, MT_BUFFER_READY);
 *     mt_unlock(mt_rings_mu(all));
 *     mt_rings_until(all, is_ready, arg, unit, "a piece");
 *
 * Order:   nobody reads of a piece what another writes, nor writes what another reads: who puts a
 *          request asks mt_rings_meets before, or has seen to it.
 * Threads: any; requests end on threads of the file's.
 * Errors:  a request that failed is the ledger's fault (layout.h). No ring reads ahead then.
 */
#ifndef MT_RING_H
#define MT_RING_H

#include "layout.h"
#include "timeline.h"

typedef struct mt_rings  mt_rings;
typedef struct mt_ring   mt_ring;
typedef struct mt_buffer mt_buffer;

typedef enum mt_buffer_state {
    MT_BUFFER_FREE, MT_BUFFER_READING, MT_BUFFER_DROPPED, MT_BUFFER_READY, MT_BUFFER_TAKEN,
    MT_BUFFER_WRITING, MT_BUFFER_COPYING, MT_BUFFER_STATES
} mt_buffer_state;

#define MT_ALL_SECTIONS (1u << MT_SECTION_WEIGHTS | 1u << MT_SECTION_STATES)

/* ---- without the lock --------------------------------------------------------------------- */

mt_status mt_rings_open  (const mt_context *cx, mt_blocks *file, mt_rings **out);
void      mt_rings_close (mt_rings *all);                /* after every ring; NULL is fine */
mt_mutex *mt_rings_mu    (mt_rings *all);                /* the lock */
/* As mt_watch_until, for a unit: `over` is called under the lock. */
mt_status mt_rings_until (mt_rings *all, int (*over)(void *arg), void *arg, int unit,
                          const char *awaits);

typedef struct mt_ring_how {
    const char *name;                    /* of its memory, for messages */
    const char *reads, *writes;          /* what is waited for meanwhile, for the watchdog */
    void      (*ahead)(void *arg);       /* NULL: nothing is read ahead */
    void       *arg;
} mt_ring_how;

mt_status mt_ring_open (mt_rings *all, const mt_ring_how *how, mt_ring **out);
void      mt_ring_close(mt_ring *r);                     /* waits for requests; NULL is fine */
/* One buffer more; registered with dev, unless that is NULL. */
mt_status mt_ring_add  (mt_ring *r, size_t bytes, mt_dev *dev);

/* ---- under the lock ----------------------------------------------------------------------- */

void mt_rings_ahead (mt_rings *all);     /* what was looked at may be otherwise now */
int  mt_rings_meets (const mt_rings *all, int unit, int piece, int write);
int  mt_rings_failed(const mt_rings *all);

typedef struct mt_rings_stats {
    uint64_t read_bytes, written_bytes;  /* since open, as requests ended */
    size_t   buffer_bytes;               /* host memory of all buffers */
} mt_rings_stats;
mt_rings_stats mt_rings_count(const mt_rings *all);

/* One in one of the states, 1u << state each, with that piece; -1: any. */
mt_buffer *mt_ring_find (const mt_ring *r, unsigned states, int unit, int piece);
mt_buffer *mt_ring_nth  (const mt_ring *r, int i);       /* NULL: there are no more */
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

mt_buffer_state mt_buffer_is    (const mt_buffer *b);
int             mt_buffer_unit  (const mt_buffer *b);    /* whose piece it has; -1: it has none */
int             mt_buffer_has   (const mt_buffer *b, const mt_layout *l, int piece,
                                 unsigned sections);     /* just these */
int             mt_buffer_number(const mt_buffer *b);    /* mt_ring_nth's i */
void           *mt_buffer_mem   (const mt_buffer *b);    /* constant, as its number */

#endif
