/* spill.h — bundles (swap.h) that wait in a file; a few bays of host memory carry them.
 *
 *   spilled  one bundle's bytes: in a bay, in the file, or in both
 *   bay      registered host memory for one bundle. There are a few, all as large as the largest
 *            bundle before long. One is filled, those before it are written; or one is emptied, and
 *            those after it are read
 *   place    a stretch of the file for one bundle, in whole pages; free when that is dropped
 *   stage    of a spilled, and what may come next. A drop ends any; FILLING, WRITING and READING
 *            are over first
 *              NEW      copies into its bay are put                       FILLING
 *              FILLING  our thread waits until they are over              WRITING, LOST
 *              WRITING  its bay is being written                          STORED, LOST
 *              STORED   the file has it; its bay may be given away        READING
 *              READING  its bay is being read into                        STORED, UNREAD
 *              UNREAD   that failed: its bay has nothing                  STORED, once told
 *              LOST     nobody has it: the write failed, or was not put
 *   waits    of a bay: what our thread waits for before it may be given away
 *              NONE                                        FILLED, LANDED
 *              FILLED   the copies out that fill it        NONE, BOTH
 *              LANDED   the copies back from it            NONE, LANDED again for later ones
 *              BOTH     its bundle came back at once       LANDED, BOTH
 *   cursor   the bundle that was asked for last. Those made before it are read next, the latest
 *            first, as far as there are bays: a backward is its forward in reverse. None while
 *            bundles leave
 *
 *     mt_spill_new    (s, unit, number, bytes, &k);       // waits for a bay
 *     ... copies from the device into mt_spill_bay(s, k), its event `filled` behind them
 *     mt_spill_filled (s, k);     // it is written when they are over; returns at once
 *     ...
 *     mt_spill_bring  (s, k);     // waits until its bytes are in a bay
 *     ... copies out of mt_spill_bay(s, k) to the device, its event `landed` behind them
 *     mt_spill_landing(s, k);     // the bay is another's when they are over; returns at once
 *     mt_spill_drop   (s, k);
 *
 * Edges between queues, the file's threads and the caller (each can be left out: debug.h):
 *   FULL     our thread waits for `filled` before it has a bay written
 *   WRITTEN  the caller waits until what a bay has is written before that is given away
 *   READ     the caller waits for the read into a bay before copies back from it are put
 *   DRAINED  our thread waits for `landed` before a bay is filled or read into anew
 *   GONE     a place is another's when no request on it is under way, also where its bundle was
 *            dropped before
 * No read of a place comes before its write is over: until then the bay has the bytes (WRITTEN).
 *
 * Threads: new, filled, bring: one at a time, under no lock. landing, drop, bay: any. A bundle is
 *          dropped while nobody is in a call of it.
 * Errors:  a write that failed is told by the next mt_spill_new, where its bundle is not dropped by
 *          then, and by its own mt_spill_bring, a read by that: MT_EDISK with unit, path, offset
 *          and what the system said. Nothing else is harmed: a bundle that could not be read may be
 *          asked for again.
 */
#ifndef MT_SPILL_H
#define MT_SPILL_H

#include "arena.h"
#include "blocks.h"
#include "store.h"
#include "timeline.h"

/* ---- bays, swap.c's too: registered host memory for one bundle, and an event for each way. Who
 * holds swap's lock records the events, and looks for them to be waited for. */

#define MT_BAY "activations on the host"     /* its memory, in messages */

typedef struct mt_bay {
    mt_arena  arena;
    mt_event *filled;                    /* recorded on out behind the copies out */
    mt_event *landed;                    /* recorded on back behind the copies back */
    mt_post   filling, landing;          /* of the two queues, until those are done */
} mt_bay;

/* mapped: as mt_arena_open's. b is zero before, and again after a failure. */
mt_status mt_bay_open (mt_bay *b, size_t bytes, mt_dev *dev, mt_pool *pool, size_t mapped);
/* watch NULL: nobody's posts. Closed or zero: nothing to do. */
void      mt_bay_close(mt_bay *b, mt_dev *dev, mt_watch *watch);

/* ---- */

typedef struct mt_spill   mt_spill;
typedef struct mt_spilled mt_spilled;

typedef struct mt_spill_stats {
    uint64_t read_bytes, written_bytes;      /* since open, as requests ended */
    uint64_t wait_ns;                        /* callers waited for a bay, or for a read */
    size_t   host_bytes;                     /* of the bays */
    uint64_t file_bytes, used_bytes;         /* of all places; of those that are taken */
} mt_spill_stats;

/* file: nobody else takes room in it; it is closed after us. */
mt_status mt_spill_open (const mt_context *cx, mt_blocks *file, int n_bays, mt_spill **out);
/* Nothing moves any more: our thread is over, and all requests.
 * While the queues that record events still are. */
void      mt_spill_stop (mt_spill *s);
void      mt_spill_close(mt_spill *s);  /* behind stop. What is there is dropped; NULL is fine */

/* number: later bundles have greater ones. */
mt_status      mt_spill_new    (mt_spill *s, int unit, uint64_t number, size_t bytes,
                                mt_spilled **out);
mt_status      mt_spill_filled (mt_spill *s, mt_spilled *k);
mt_status      mt_spill_bring  (mt_spill *s, mt_spilled *k);
/* Also where the copies could not be put: then none is under way. */
void           mt_spill_landing(mt_spill *s, mt_spilled *k);
void           mt_spill_drop   (mt_spill *s, mt_spilled *k);
/* Its bytes' bay, and that bay's events; NULL: it was given away,
 * so the copies out and back are over. */
mt_bay        *mt_spill_bay    (mt_spill *s, const mt_spilled *k);

mt_spill_stats mt_spill_stats_get(mt_spill *s);

#endif
