/* pool.c — the pool: chunks by an atomic counter, a job for each worker, callers in turn.
 *
 * Jobs that no thread has begun when the caller's own part ends are withdrawn, so a short loop does
 * not wait for every worker to wake.
 */
#include "pool.h"

#include "worker.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

struct mt_pool {
    int             n_threads;   /* the caller counted; constant */
    mt_mutex        turn;        /* held by the caller whose loop it is */
    mt_mutex        mu;
    mt_worker       worker;      /* of n_threads - 1 */
    mt_job         *jobs;        /* [n_threads] one for each, to take part. mu */

    /* Written by the caller while no job is submitted, read by those that run. */
    mt_chunk_fn     fn;
    void           *arg;
    int64_t         n_chunks;
    /* Next chunk to take; any thread in the loop. `mu` orders the loop's data before and after,
     * so the counter itself need not. */
    _Atomic int64_t next;
};

static void take_chunks(mt_pool *p)
{
    int64_t i;

    while ((i = atomic_fetch_add_explicit(&p->next, 1, memory_order_relaxed)) < p->n_chunks)
        p->fn(p->arg, i);
}

static mt_status take_part(void *arg, mt_job *job)
{
    static _Thread_local struct {            /* sched_attr of sched_setattr(2) */
        uint32_t size, policy, flags[2], nice, priority;
        uint64_t slice_ns, deadline_ns, period_ns;
    } a;
    mt_pool *p = arg;

    (void)job;
    /* 50 ms: Linux (6.12 or newer) lets a thread that wakes preempt one with a longer slice. Else
     * threads that launch kernels wait milliseconds for the pool, and the device for them. */
    if (a.size == 0 && syscall(SYS_sched_getattr, 0, &a, (unsigned)sizeof a, 0u) == 0 &&
        a.policy == 0) {
        a.slice_ns = 50000000;
        (void)syscall(SYS_sched_setattr, 0, &a, 0u);
    }
    mt_unlock(&p->mu);
    take_chunks(p);
    mt_lock(&p->mu);
    return MT_OK;
}

mt_status mt_pool_open(int n_threads, mt_pool **out)
{
    mt_pool  *p MT_CLOSED(mt_pool_close) = NULL;

    if (n_threads < 1)
        return MT_FAIL(MT_EINVAL, "pool: %d threads; at least 1, the caller's, is needed",
                       n_threads);
    MT_DO(MT_MAKE(p, 1, "pool"));
    p->n_threads = n_threads;
    mt_mutex_open(&p->turn, MT_RANK_POOL_TURN);
    mt_mutex_open(&p->mu, MT_RANK_POOL);
    MT_DO(MT_MAKE(p->jobs, n_threads, "pool"));
    MT_DO(mt_worker_open(&p->worker, &p->mu, n_threads - 1, "mt-pool", "pool", take_part, p));
    *out = MT_KEEP(p);
    return MT_OK;
}

void mt_pool_close(mt_pool *p)
{
    if (p == NULL)
        return;
    mt_worker_close(&p->worker);
    mt_mutex_close(&p->mu);
    mt_mutex_close(&p->turn);
    free(p->jobs);
    free(p);
}

void mt_pool_run(mt_pool *p, mt_chunk_fn fn, void *arg, int64_t n_chunks)
{
    if (p == NULL || p->n_threads == 1 || n_chunks <= 1) {
        for (int64_t i = 0; i < n_chunks; i++)
            fn(arg, i);
        return;
    }
    MT_HOLD(&p->turn);
    p->fn = fn;
    p->arg = arg;
    p->n_chunks = n_chunks;
    atomic_store_explicit(&p->next, 0, memory_order_relaxed);
    MT_WITH(&p->mu)
        for (int i = 0; i < p->n_threads - 1; i++)
            (void)mt_worker_submit(&p->worker, &p->jobs[i]);
    take_chunks(p);
    MT_HOLD(&p->mu);         /* by which what the others' chunks wrote is visible afterwards */
    while (p->worker.first != NULL)
        mt_worker_withdraw(&p->worker, p->worker.first);
    while (p->worker.ended < p->worker.submitted)
        mt_cond_wait(&p->worker.news, &p->mu);
}
