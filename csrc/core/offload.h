/* offload.h — brings gradients to host memory, measured and summed on the way.
 *
 *     mt_offload_put(o, unit, items, n, run, &ticket);   // at the hand-over; returns at once
 *     mt_offload_passed(o);                              // sources up to this ticket may be freed
 *     mt_ledger_wait_grads(store, unit);                 // host: they are whole
 *
 * For each item the D2H queue first takes the sum of squares on the device (fixed order: see
 * ops/sumsq.h), then copies: SET straight into the GRAD plane; ADD into a registered staging
 * buffer, from which the collector, a thread of ours, adds to what the plane holds. 16-bit
 * gradients are summed in fp32 in the ACC plane; the GRAD plane gets the rounded sum. A settled
 * unit's gradients stay on the device (resident.h): the D2H queue does all of this there, and SET
 * copies nothing where src is the GRAD plane itself.
 *
 * Edges:
 *   GRAD    d2h waits for compute up to the hand-over          recorded on run
 *   LANDED  run waits for the copy of the hand-over `depth` tickets ago, so that gradients of at
 *           most `depth` units are alive on the device; their memory, back in torch's allocator, is
 *           reused in run's order, behind that wait. mt_offload_land puts the wait for the last
 *           ones too, where compute goes on to something else
 *   put waits on the host until no update of the unit is under way, which reads the GRAD plane (of
 *   a settled unit SPENT of resident.h does); and for a buffer, where gradients pass (store.h).
 *
 * Threads: put: one at a time. The rest: any.
 */
#ifndef MT_OFFLOAD_H
#define MT_OFFLOAD_H

#include "store.h"
#include "stream.h"

typedef enum mt_grad_mode { MT_GRAD_SET, MT_GRAD_ADD } mt_grad_mode;

typedef struct mt_grad_item {
    int          param;
    const void  *src;        /* device, dense, of the parameter's dtype, all elements that are this
                              * process's (mt_store_owned); until passed */
    mt_grad_mode mode;
    /* ADD: 1 when the GRAD plane on the host was changed by the user since: its value counts, not
     * ACC's or the device's. First ADD after a SET starts ACC from the GRAD plane in any case. */
    int          reread;
} mt_grad_item;

/* Put "sum of squares of src[0..n) into *out" in q. out: host memory that q can write. chunks: such
 * memory for the sum of every MT_PORTION_GRAIN elements, or NULL. */
typedef mt_status (*mt_sumsq_fn)(void *ctx, mt_queue *q, mt_dtype dt, const void *src, int64_t n,
                                 double *out, double *chunks);
/* Host, on the pool: acc (fp32; NULL: the sum lives in grad, which is fp32 or fp64) and grad get
 * the sum of themselves and add, which is of grad's type; `from_grad`: start from grad's value
 * instead of acc's. *sumsq, chunks: of what the optimizer will use: the new acc where there is one,
 * else the new grad. */
typedef void (*mt_accumulate_fn)(mt_pool *pool, mt_dtype dt, float *acc, void *grad,
                                 const void *add, int64_t n, int from_grad, double *sumsq,
                                 double *chunks);
/* The same put in q, on the device's memory; *sumsq, chunks: host memory that q can write. */
typedef mt_status (*mt_accumulate_put_fn)(void *ctx, mt_queue *q, mt_dtype dt, float *acc,
                                          void *grad, const void *add, int64_t n, int from_grad,
                                          double *sumsq, double *chunks);

typedef struct mt_offload_kernels {
    mt_sumsq_fn          sumsq;
    mt_accumulate_fn     accumulate;
    mt_accumulate_put_fn accumulate_put;
    void                *ctx;                /* handed to sumsq and accumulate_put */
    /* The sum of squares of which these are the chunks' sums. Where processes share units. */
    double             (*fold)(const double *chunks, int64_t n);
} mt_offload_kernels;

typedef struct mt_offload mt_offload;

/* Gradients of at most `depth` units are on the device, of units whose gradients pass no more than
 * have a buffer (mt_store_lend_most). */
mt_status mt_offload_open (const mt_context *cx, int depth, mt_offload_kernels k, mt_offload **out);
void      mt_offload_close(mt_offload *o);

/* A parameter at most once in items. Not at the same time as a submit that has the unit. */
mt_status mt_offload_put(mt_offload *o, int unit, const mt_grad_item *items, int n,
                         mt_queue *run, uint64_t *ticket);
/* Highest ticket whose sources run can no longer overwrite too early: LANDED was put in run, or
 * the collector has seen the copies end. */
uint64_t  mt_offload_passed(mt_offload *o);
/* run waits for the copies of everything put so far (LANDED): the last gradients of a backward need
 * not stay alive until the next one. Copies that have ended are not waited for. Called as put is,
 * and not at the same time. */
mt_status mt_offload_land  (mt_offload *o, mt_queue *run);
mt_status mt_offload_drain (mt_offload *o);              /* host: everything put so far is over */

/* Sum of squares of a parameter's gradient, where one was counted (MT_GRAD_COUNTED, below); in a
 * share there are those of chunks alone. Call after mt_ledger_wait_grads. */
double    mt_offload_sumsq(mt_offload *o, int unit, int param);
/* Of a parameter's gradient, as of now: is its sum of squares made, or on its way? Are those of the
 * chunks that are this one's, in a share? Has the ACC plane, or will it
 * have, the gradient, of which the GRAD plane is the rounded copy? Asked before the next forget,
 * which an update that was submitted before does not heed: the updater notes it at submit, since
 * zero_grad() follows step() before the gradients are there. Forget leaves the values for the
 * update under way, and the next put of the unit waits for that update. */
typedef enum mt_grad_known {
    MT_GRAD_COUNTED = 1, MT_GRAD_CHUNKED = 2, MT_GRAD_SUMMED = 4
} mt_grad_known;
int       mt_offload_has   (mt_offload *o, int unit, int param, mt_grad_known what);
/* Sums of the chunks that are this one's, [*n]; NULL: there are none. They stay as they are until
 * the next put of the unit. */
const double *mt_offload_chunks(mt_offload *o, int unit, int param, int64_t *n);
/* Of all owners' chunks. */
double    mt_offload_fold(const mt_offload *o, const double *chunks, int64_t n);
void      mt_offload_forget(mt_offload *o, int unit);     /* zero_grad: the next put is a first */

uint64_t  mt_offload_d2h_bytes(mt_offload *o);

#endif
