/* swap.h — activation offload: tensors in host memory, or in a file, between a forward and its
 * backward.
 *
 *   part     dense device memory of one tensor
 *   bundle   the parts that a window keeps; they leave together and come back together
 *   tier     of a bundle: HOST, it waits in a bay of its own; FILE, a few bays carry it there and
 *            back
 *   bay      registered host memory for one bundle. Of the tier HOST it is used again by a later
 *            bundle: the smallest free one that holds it, and where all free ones are too small,
 *            the largest of them gives way to one that is large enough. Of the tier FILE there are
 *            a few, all as large as the largest bundle before long: one is filled, those before it
 *            are written; or one is emptied, and those after it are read. So steps that are alike
 *            make no bay
 *   place    a stretch of the file for one bundle, in whole pages; free when that is dropped
 *   stage    of a bundle of the tier FILE, and what may come next. A drop ends any; FILLING,
 *            WRITING and READING are over first
 *              NEW      copies into its bay are put                       FILLING
 *              FILLING  our thread waits until they are over              WRITING, LOST
 *              WRITING  its bay is being written                          STORED, LOST
 *              STORED   the file has it; its bay may be given away        READING
 *              READING  its bay is being read into                        STORED, UNREAD
 *              UNREAD   that failed: its bay has nothing                  STORED, once told
 *              LOST     nobody has it: the write failed, or was not put
 *   waits    of such a bay: our thread waits for the copies out that fill it, and for those back
 *            from it, before it may be given away
 *   cursor   the bundle in the file that was asked for last. Those made before it are read next,
 *            the latest first, as far as there are bays: a backward is its forward in reverse. None
 *            while bundles leave
 *
 *     mt_swap_out  (w, unit, parts, n, MT_SWAP_HOST, run, &bundle);     // behind the forward
 *     mt_swap_left (w, bundle, run);                   // the sources may be freed, in run's order
 *     ...
 *     mt_swap_back (w, bundle, landing, n, run);       // ahead of the backward
 *     mt_swap_await(w, bundle, run);                   // run goes on when they are there
 *     mt_swap_drop (w, bundle);                        // the bay is free for the next one
 *
 * Out and back return at once, but for the tier FILE: there out waits where all bays are on their
 * way to the file, and back until the bundle was read. Two queues of its own, one each way, and
 * copies in slices: so weights and gradients never stand behind gigabytes.
 *
 * Edges between queues (each can be left out: context.h):
 *   COMPUTED out waits for compute up to mt_swap_out: the tensors are made     recorded on run
 *   LEFT    run waits for the copies out, in mt_swap_left: the sources' memory, in torch's
 *           allocator again, is reused in run's order, behind that wait               on out
 *   ROOM    back waits for compute up to mt_swap_back, which may still use what lay in the landing
 *           memory before                                                             on run
 *   KEPT    back waits for the copies out that fill the bay                           on out
 *   BACK    run waits for the copies back, in mt_swap_await                           on back
 *   EMPTIED out waits for the copies back that empty the bay it is about to fill. Where one stream
 *           does it all COMPUTED says so already, since run awaited them              on back
 * and between queues, the file's threads and the caller:
 *   FULL     our thread waits for the copies out before it has a bay written
 *   WRITTEN  the caller waits until what a bay has is written before that is given away
 *   READ     the caller waits for the read into a bay before copies back from it are put
 *   DRAINED  our thread waits for the copies back before a bay is filled or read into anew
 *   GONE     a place is another's when no request on it is under way, also where its bundle was
 *            dropped before
 * No read of a place comes before its write is over: until then the bay has the bytes (WRITTEN).
 * LEFT and BACK of a bundle whose bay was given away meanwhile are no waits: WRITTEN and DRAINED
 * were.
 *
 * A bundle that is on its way back is awaited before it is dropped, since its landing memory is
 * about to be freed. Coming back twice is fine, until it is dropped.
 *
 * Threads: any; out and back take turns, since both may wait for a drive. The others wait for none.
 * Errors:  a write that failed is told by the next mt_swap_out to the file, where its bundle is not
 *          dropped by then, and by its own mt_swap_back, a read by that: MT_EDISK with unit, path,
 *          offset and what the system said. Nothing else is harmed: a bundle that could not be read
 *          may be asked for again.
 */
#ifndef MT_SWAP_H
#define MT_SWAP_H

#include "blocks.h"
#include "store.h"

typedef struct mt_swap_part {
    void  *mem;              /* device memory. Of a landing: NULL, this part is not wanted back */
    size_t bytes;
} mt_swap_part;

typedef struct mt_spill_stats {              /* of the tier FILE */
    uint64_t read_bytes, written_bytes;      /* since open, as requests ended */
    uint64_t wait_ns;                        /* callers waited for a bay, or for a read */
    size_t   host_bytes;                     /* of the bays */
    uint64_t file_bytes, used_bytes;         /* of all places; of those that are taken */
} mt_spill_stats;

typedef struct mt_swap_stats {
    uint64_t out_bytes, back_bytes;          /* copied since open */
    size_t   host_bytes;                     /* of all bays, the file's too */
    size_t   used_bytes;                     /* of those in which a bundle of the tier HOST waits */
    mt_spill_stats spill;
} mt_swap_stats;

typedef enum mt_swap_tier { MT_SWAP_HOST, MT_SWAP_FILE } mt_swap_tier;

typedef struct mt_swap mt_swap;

mt_status mt_swap_open (const mt_context *cx, mt_swap **out);
void      mt_swap_close(mt_swap *w);         /* waits for both queues, and all requests */

/* Bundles may go to this file, by way of so many bays, from now on. Once; nobody else takes room in
 * the file, and it is closed after w. */
mt_status mt_swap_disk(mt_swap *w, mt_blocks *file, int n_bays);

/* unit: for the timeline. Sources stay until mt_swap_left. MT_ENOMEM names the bytes.
 * MT_ESTATE: there is no file. */
mt_status mt_swap_out  (mt_swap *w, int unit, const mt_swap_part *parts, int n, mt_swap_tier tier,
                        mt_queue *run, uint64_t *bundle);
mt_status mt_swap_left (mt_swap *w, uint64_t bundle, mt_queue *run);
/* landing: as many parts as left, of the same bytes. */
mt_status mt_swap_back (mt_swap *w, uint64_t bundle, const mt_swap_part *landing, int n,
                        mt_queue *run);
mt_status mt_swap_await(mt_swap *w, uint64_t bundle, mt_queue *run);
/* The bay is free once mt_swap_left was called too.
 * Nothing to do for a bundle that is not there. */
void      mt_swap_drop (mt_swap *w, uint64_t bundle);

mt_swap_stats mt_swap_stats_get(mt_swap *w);

#endif
