/* disk.h — units whose states are in a file: read ahead of their update, written back behind it.
 * Their weights may be there too.
 *
 * Gradients stay in memory. Masters and moments do not: an update reads and writes them once, in
 * order, and nobody else looks at them. Weights stay too, unless memory is too short even for them:
 * then each fetch reads them.
 *
 *   on disk  of a unit: its state planes (MT_STATE_PLANES), and perhaps HI, are in the file, piece
 *            by piece (pieces.h), with a sum for each block. Host memory mirrors them (mirror.h)
 *   piece    what one buffer of the ring holds of a unit. One is updated, those before are written,
 *            those after are read, as far ahead as there are buffers; also while nothing is
 *            updated, so that a step's first pieces are there
 *   order    units follow each other as they did last time
 *   feed     reads weights that are on disk for fetches: two of a unit's pieces, or more, are read
 *            while others are copied to its slot, and then those of the units that will be asked
 *            for next
 *   ring     buffers of a kind: that of updates, that of fetches, which are locked, that of the
 *            host's copies
 *   buffer   host memory for a piece, on its way
 *   FREE -> READING -> READY -> TAKEN -> WRITING -> FREE      of updates
 *   READY -> TAKEN -> COPYING -> FREE                         of fetches: to a slot
 *   FREE -> TAKEN -> READING -> TAKEN -> WRITING -> TAKEN     of copies
 *   TAKEN -> READY -> TAKEN                                   of copies: what it has is kept
 *            TAKEN and READY may go FREE. READING -> DROPPED -> FREE: nobody wants it any more
 *
 *     mt_disk_open(cx, file, pool, 8, bytes, &d);
 *     mt_disk_add(d, unit, 0);                  // before its states are asked for
 *     mt_home_disk.update(d, update);           // the updater: returns at once
 *     mt_ledger_wait_updates(store, unit);      // its weights are new
 *     mt_mirror_bring(store, unit, 1u << MT_PLANE_M);  // host: the copies are as in the file
 *
 *     mt_feed_open(d, bytes);
 *     mt_feed_next(d, unit);
 *     mt_feed_expect(d, units, n);              // any thread: what will be fetched then, in order
 *     mt_feed_copy(d, unit, mem, h2d);          // the mover: copies of all its weights are put
 *
 * A thread of ours makes updates in the order they were put, beside the updater: a drive is slow,
 * and is to move from the first moment on. An update ends in the ledger when the unit's weights are
 * new; its states may still be on their way.
 *
 * Order:
 *   READ     our thread waits until a piece is in its buffer
 *   WRITTEN  a piece is read again when its last write is over; loads wait for it too
 *   READ OUT and written when its last read is over, also a read that nobody wants any more
 *   PUSHED   what was read ahead of a unit is dropped before its planes are written from outside,
 *            and none of it is read until they are; a fetch waits meanwhile
 *   WEIGHTS  our thread waits in the ledger for fetches of the unit's weights, before its first
 *            piece
 *   FED      it drops what others read of the unit for fetches to come, and waits until no such
 *            read is under way. None begins while an update of the unit is announced
 *   COPIED   the mover waits until a copy out of a buffer is over before that is read into again;
 *            whoever tells of units to come looks whether it is
 *   Nobody reads of a piece what another writes, nor writes what another reads, whatever the ring.
 *   Fetches and readers of weights wait for the unit's update as ever, and where weights are in the
 *   file for the writes of the pieces they read (WRITTEN).
 *
 * Loads and stores of one unit's copies wait for no other unit's. Copies of states are evicted when
 * an update begins.
 *
 * Threads: open, add, close, the feed's too: one, before and after the others. update: the
 *          updater's. The job's functions run on our thread; requests end on threads of the file's.
 *          expect: any. next, copy: the mover.
 * Errors:  a request that failed is the ledger's fault, with unit, plane and parameter, path and
 *          offset.
 */
#ifndef MT_DISK_H
#define MT_DISK_H

#include "blocks.h"
#include "mirror.h"

#define MT_DISK_LEAST ((size_t)64 << 10) /* bytes of a buffer, which are a multiple of
                                          * MT_BLOCK_ALIGN */

#define MT_DISK_GRAIN 4096               /* elements: a part begins at a multiple of so many */

typedef struct mt_disk mt_disk;

/* pool: for the updates alone, so that none waits for another unit's turn;
 * NULL: our thread makes them. */
mt_status mt_disk_open (mt_context *cx, mt_blocks *file, mt_pool *pool, int n_buffers,
                        size_t bytes, mt_disk **out);
/* finishes what was put, and all requests; before the file is closed */
void      mt_disk_close(mt_disk *d);

/* weights: those too; they are zero until the first push. MT_ESTATE as mt_store_move.
 * Parameters that become trainable after the unit's first update, or push, keep their states in
 * memory. In a share each rank's file has its own portion: a fetch brings that into the slot,
 * and the others' are gathered there (stream.h); of several machines weights are not there. */
mt_status mt_disk_add (mt_disk *d, int unit, int weights);

typedef struct mt_disk_stats {
    uint64_t need_bytes;                 /* of the file that the units added will take */
    uint64_t read_bytes, written_bytes;  /* since open, as requests ended */
    uint64_t wait_ns, busy_ns;           /* updates waited for reads; were computed */
    size_t   buffer_bytes;               /* host memory of the buffers, the feed's too */
} mt_disk_stats;
mt_disk_stats mt_disk_stats_get(mt_disk *d);

/* ---- the feed ----------------------------------------------------------------------------- */

/* Once, when all units were added; its buffers, of so many bytes together, hold the largest piece's
 * weights each, and are registered. No piece comes to have more from then on. */
mt_status mt_feed_open (mt_disk *d, size_t bytes);
/* When no copy is put any more, and before the disk is closed. NULL, or one without a feed, is
 * fine. */
void      mt_feed_close(mt_disk *d);
/* This one is to be fetched as soon as its updates are over. -1: none. */
void      mt_feed_next  (mt_disk *d, int unit);
/* And then these, one after the other; as many are kept as make sense. */
void      mt_feed_expect(mt_disk *d, const int *units, int n);
/* Puts copies of all the unit's weights into mem, as they lie in plane HI, in h2d; returns when the
 * last is put, so when the last was read. Between mt_ledger_fetch_begin and mt_ledger_fetching. */
mt_status mt_feed_copy (mt_disk *d, int unit, void *mem, mt_queue *h2d);

#endif
