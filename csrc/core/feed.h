/* feed.h — weights that are on disk (disk.h), read for fetches: into buffers that are locked, and
 * from there copied to slots.
 *
 * Two of a unit's pieces, or more, are read while others are copied to its slot, and then those of
 * the units that will be asked for next.
 *
 *     mt_feed_open(cx, bytes, &f);
 *     mt_feed_next(f, unit);
 *     mt_feed_expect(f, units, n);              // any thread: what will be fetched then, in order
 *     mt_feed_copy(f, unit, mem, h2d);          // the mover: copies of all its weights are put
 *
 * Order: disk.h's FED, WRITTEN and PUSHED, and
 *   COPIED   the mover waits until a copy out of a buffer is over before that is read into again;
 *            whoever tells of units to come looks whether it is
 *
 * Threads: open, close: one. expect: any. next, copy: the mover.
 * Errors:  a read that failed is the ledger's fault.
 */
#ifndef MT_FEED_H
#define MT_FEED_H

#include "disk.h"

typedef struct mt_feed mt_feed;

/* Once, when all units were added to the context's disk; its buffers hold the largest piece's
 * weights each, and are registered. */
mt_status mt_feed_open (mt_context *cx, size_t bytes, mt_feed **out);
/* when no copy is put any more, and before the disk is closed */
void      mt_feed_close(mt_feed *f);
/* This one is to be fetched as soon as its updates are over. -1: none. */
void      mt_feed_next  (mt_feed *f, int unit);
/* And then these, one after the other; as many are kept as make sense. */
void      mt_feed_expect(mt_feed *f, const int *units, int n);
/* Puts copies of all the unit's weights into mem, as they lie in plane HI, in h2d; returns when the
 * last is put, so when the last was read. Between mt_ledger_fetch_begin and mt_ledger_fetching. */
mt_status mt_feed_copy (mt_feed *f, int unit, void *mem, mt_queue *h2d);

#endif
