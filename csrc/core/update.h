/* update.h — updates, in forward order, behind the back of the thread that called step().
 *
 *     mt_update_submit(u, jobs, n, max_norm, run, &ticket);   // returns at once
 *     mt_update_norm(u, ticket, &norm);                  // waits only for the gradients
 *     mt_ledger_wait_updates(store, unit);               // waits for one unit
 *
 * The updater, a thread of ours, takes one submit at a time:
 *   1. with a max_norm it waits until every unit's gradients are whole, adds their sums of squares
 *      in the order given (fp64), and clips by min(1, max_norm / (norm + 1e-6)), as torch does;
 *   2. for each job in order it waits for the unit's gradients and for copies still reading its
 *      weights, runs it on the pool, and ends its announcement in the ledger. Units that live
 *      elsewhere are handed to their home (home.h), which ends them. With a max_norm those come
 *      first, by turns. A submit is over when all but those on disk are.
 * In a share every rank submits the same units, perhaps in other orders, and updates its own
 * portions. Before a unit is touched all ranks have
 *   MEASURED  put the sums of their chunks on the boards, from which each makes all sums, and told
 *             what they ask (MT_ALIKE_MAP): a difference is a fault that names it. Then all take
 *             the norm as rank 0 has added it (NORMED), so that all clip, or skip, alike
 *   CLEAR     ended what reads weights of any of the submit's units as they are
 * A norm that is not finite skips the whole submit. Without max_norm each unit is judged by its own
 * gradients, and skipped alone.
 *
 * Threads: submit: one at a time. The rest: any.
 */
#ifndef MT_UPDATE_H
#define MT_UPDATE_H

#include "home.h"
#include "offload.h"

typedef struct mt_updater mt_updater;

mt_status mt_update_open (const mt_context *cx, mt_offload *grads, mt_updater **out);
void      mt_update_close(mt_updater *u);                      /* finishes what was submitted */

/* Waits until a submit need not wait for the steps before it. */
mt_status mt_update_turn  (mt_updater *u);
/* Jobs are copied, params arrays too; args are owned by the updater from here on, also on failure.
 * max_norm <= 0: no clipping, no norm. Announces every unit in the ledger before it returns.
 * run: what computes; all that may read a settled unit's weights as they are is in it by now.
 * MT_ESTATE for a job that lacks what its unit's home takes. */
mt_status mt_update_submit(mt_updater *u, const mt_update_job *jobs, int n, double max_norm,
                           mt_queue *run, uint64_t *ticket);
/* Global norm of a submit (before clipping); waits until it is known. Without max_norm: waits for
 * the submit's end. *skipped: units not updated because of non-finite gradients. */
mt_status mt_update_norm (mt_updater *u, uint64_t ticket, double *norm, int *skipped);
mt_status mt_update_drain(mt_updater *u);                      /* on all ranks */

uint64_t  mt_update_busy_ns(mt_updater *u);                    /* time in run since open */

#endif
