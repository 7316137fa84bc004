/* swap.h — activation offload: tensors in host memory between a forward and its backward.
 *
 *   part     dense device memory of one tensor
 *   bundle   the parts that a window keeps; they leave together and come back together
 *   bay      registered host memory for one bundle, used again by a later one
 *   tier     of a bundle: HOST, it waits in a bay of its own; FILE (spill.h), it has a bay on its
 *            way there and back
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
 * A bundle takes the smallest free bay that holds it; where all free ones are too small, the
 * largest of them gives way to one that is large enough. So steps that are alike make no bay.
 *
 * Edges; spill.h has those of the file (each can be left out: debug.h):
 *   COMPUTED out waits for compute up to mt_swap_out: the tensors are made     recorded on run
 *   LEFT    run waits for the copies out, in mt_swap_left: the sources' memory, in torch's
 *           allocator again, is reused in run's order, behind that wait               on out
 *   ROOM    back waits for compute up to mt_swap_back, which may still use what lay in the landing
 *           memory before                                                             on run
 *   KEPT    back waits for the copies out that fill the bay                           on out
 *   BACK    run waits for the copies back, in mt_swap_await                           on back
 *   EMPTIED out waits for the copies back that empty the bay it is about to fill. Where one stream
 *           does it all COMPUTED says so already, since run awaited them              on back
 * LEFT and BACK of a bundle whose bay was given away meanwhile are no waits: the spill made them.
 *
 * A bundle that is on its way back is awaited before it is dropped, since its landing memory is
 * about to be freed. Coming back twice is fine, until it is dropped.
 *
 * Threads: any; out and back take turns, since both may wait for a drive. The others wait for none.
 * Errors:  spill.h says which call tells of the file's.
 */
#ifndef MT_SWAP_H
#define MT_SWAP_H

#include "arena.h"
#include "spill.h"
#include "store.h"
#include "timeline.h"

typedef struct mt_swap_part {
    void  *mem;              /* device memory. Of a landing: NULL, this part is not wanted back */
    size_t bytes;
} mt_swap_part;

typedef struct mt_swap_stats {
    uint64_t out_bytes, back_bytes;          /* copied since open */
    size_t   host_bytes;                     /* of all bays, the spill's too */
    size_t   used_bytes;                     /* of those in which a bundle of the tier HOST waits */
    mt_spill_stats spill;
} mt_swap_stats;

typedef enum mt_swap_tier { MT_SWAP_HOST, MT_SWAP_FILE } mt_swap_tier;

typedef struct mt_swap mt_swap;

mt_status mt_swap_open (const mt_context *cx, mt_swap **out);
void      mt_swap_close(mt_swap *w);         /* waits for both queues */

/* Bundles may go to this file, by way of so many bays, from now on. Once; the file is closed
 * after w. */
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
