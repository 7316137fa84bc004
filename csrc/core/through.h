/* through.h — updates of units that live on the host, made on the device: states up, states down.
 *
 * The host's cores and their memory have one rate, the bus and the device another, and both can
 * work at once. A unit that goes *through* has its planes copied up in pieces, updated by a kernel,
 * and copied back, while the updater and the pool are at other units.
 *
 * Nouns, in the order they appear below:
 *   piece    of a unit: parts of its weights, gradients and states, as a buffer holds (pieces.h)
 *   buffer   device memory with a queue of its own, which copies up, computes and copies down in
 *            turn; there are a few, so that one goes up while another comes down
 *
 *     mt_through_open(&cx, 3, bytes, &t);
 *     mt_home_through.update(t, &job, clip);              // the updater: returns at once
 *     mt_ledger_wait_updates(store, job.unit);            // its planes are as after the update
 *
 * Order: a buffer's queue is the only order there is; parts of one update do not depend on each
 *        other. The thread of ours waits in the ledger for copies that read the unit's weights
 *        before the first piece comes down, and ends the unit's update when the last one is down.
 *
 * Threads: update, stepped of the home: the updater. The job's functions run on our thread.
 */
#ifndef MT_THROUGH_H
#define MT_THROUGH_H

#include "home.h"
#include "timeline.h"

#define MT_THROUGH_LEAST 8192            /* bytes of a buffer */

typedef struct mt_through mt_through;

/* n_buffers of so many bytes; their memory is made with the first job. */
mt_status mt_through_open (mt_context *cx, int n_buffers, size_t bytes, mt_through **out);
void      mt_through_close(mt_through *t);               /* finishes what was put */

typedef struct mt_through_stats {
    uint64_t h2d_bytes, d2h_bytes;       /* since open */
    size_t   device_bytes;               /* of the buffers, now */
} mt_through_stats;
mt_through_stats mt_through_stats_get(mt_through *t);

#endif
