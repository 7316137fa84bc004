/* worker.h — a thread of ours and its list of jobs: the one life of all that runs behind a
 * caller's back.
 *
 * Nouns, in the order they appear below:
 *   job      what is asked for: a node in a struct of the room's own. It is in no list any more
 *            when it is run, so `run` may free it, or let it be submitted again
 *   worker   a list of jobs and a thread that runs them in turn (a pool has several)
 *   mu       the room's lock: of the list, and of what jobs and callers share besides
 *   news     broadcast under mu when a job has ended, of several threads' when all have; the room
 *            broadcasts it too, where something else has come that is waited for
 *   failure  the first status but MT_OK that a job returned, and its message. It stays, and jobs
 *            behind it are run all the same: each is told to somebody
 *
 *     static mt_status copy_one(void *arg, mt_job *job);           // under mu: lets go of it
 *
 *     mt_worker_open(&r->worker, &r->mu, 1, "mt-copier", "h2d", copy_one, r);
 *     number = MT_LOCKED(&r->mu, mt_worker_submit(&r->worker, &mine->job));
 *     ...
 *     mt_worker_wait(&r->worker, watch, number, NULL, "a copy");   // or MT_WORKER_ALL
 *     mt_worker_close(&r->worker);
 *
 * Threads: submit, withdraw, failure: any, under mu; wait: any, without it. open, stop, close: one,
 *          before and after the others. What a job uses is opened before the first is submitted.
 * Forks:   a child has no thread of ours. There a wait is refused, and stop and close do nothing:
 *          the lock may be held for good.
 */
#ifndef MT_WORKER_H
#define MT_WORKER_H

#include "watch.h"

typedef struct mt_job {
    struct mt_job *next;             /* these two: mu */
    int            listed;           /* submitted, and not begun yet */
} mt_job;

/* Called under mu, which it lets go of while it works; returns under it. */
typedef mt_status (*mt_worker_fn)(void *arg, mt_job *job);

typedef struct mt_worker {
    mt_mutex       *mu;              /* constant: it outlives the worker */
    pthread_cond_t  news;            /* of mt_watch_cond */
    pthread_cond_t  more;            /* our threads wait: a job, or stop */
    mt_job         *first, **last;   /* in the order of submits. mu, as the next six */
    uint64_t        submitted, ended;
    mt_status       failed;
    char            why[1024];       /* the failure's message; "" before */
    int             stop;

    mt_worker_fn    run;             /* constant, as all below */
    void           *arg;
    const char     *name, *lane;
    unsigned        forks;           /* mt_forks() of the process that has the threads */
    int             opened, n_threads;
    pthread_t      *threads;         /* [n_threads] that run */
} mt_worker;

#define MT_WORKER_ALL UINT64_MAX     /* that were submitted when the wait begins */

/* After a failure *w is closed, and may be opened again. name: of its threads, 15 characters; lane:
 * whose waits theirs are (watch.h). Both are literals. */
mt_status mt_worker_open (mt_worker *w, mt_mutex *mu, int n_threads, const char *name,
                          const char *lane, mt_worker_fn run, void *arg);
/* Runs what is in the list, or, with drop, none of it; returns when our threads are over. News and
 * counts stay. Stopped, or never opened: nothing to do. */
void      mt_worker_stop (mt_worker *w, int drop);
void      mt_worker_close(mt_worker *w);             /* stops it first, without drop */

/* The job is the worker's until it runs. Yields its number, from 1: one thread ends them in that
 * order. */
uint64_t  mt_worker_submit  (mt_worker *w, mt_job *job);
/* From `run` alone: the job is run once more, before all others; also by a worker that stops. */
void      mt_worker_again   (mt_worker *w, mt_job *job);
/* One that has not begun is not run, and counts as never submitted. */
void      mt_worker_withdraw(mt_worker *w, mt_job *job);
/* Until so many jobs have ended; yields the failure then. unit, awaits: as MT_UNTIL's. */
mt_status mt_worker_wait    (mt_worker *w, mt_watch *watch, uint64_t number, const char *unit,
                             const char *awaits);
mt_status mt_worker_failure (const mt_worker *w);    /* as this thread's error */

#endif
