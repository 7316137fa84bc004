/* worker.c — a list under one lock, and the loop that takes from it. */
#include "worker.h"

#include "forks.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- our threads: under mu -------------------------------------------------------------- */

static void *worker_main(void *arg)
{
    mt_worker *w = arg;
    mt_job    *job;
    mt_status  st;

    (void)pthread_setname_np(pthread_self(), w->name);
    mt_watch_i_am(w->lane);
    MT_HOLD(w->mu);
    for (;;) {
        while (w->first == NULL && !w->stop)
            mt_cond_wait(&w->more, w->mu);
        if ((job = w->first) == NULL)        /* it stops, and nothing is left */
            break;
        if ((w->first = job->next) == NULL)
            w->last = &w->first;
        job->listed = 0;
        st = w->run(w->arg, job);
        if (st != MT_OK && w->failed == MT_OK) {
            w->failed = st;
            snprintf(w->why, sizeof w->why, "%s", mt_last_error());
        }
        if (++w->ended == w->submitted || w->n_threads == 1)
            pthread_cond_broadcast(&w->news);
    }
    return NULL;
}

/* ---- open and close --------------------------------------------------------------------- */

mt_status mt_worker_open(mt_worker *w, mt_mutex *mu, int n_threads, const char *name,
                         const char *lane, mt_worker_fn run, void *arg)
{
    int       error = 0;
    mt_status st;

    *w = (mt_worker){ .mu = mu, .last = &w->first, .run = run, .arg = arg, .name = name,
                      .lane = lane, .forks = mt_forks() };
    MT_DO(mt_watch_cond(&w->news));
    pthread_cond_init(&w->more, NULL);
    w->opened = 1;
    if ((st = MT_MAKE(w->threads, n_threads, name)) == MT_OK)
        while (w->n_threads < n_threads &&
               (error = pthread_create(&w->threads[w->n_threads], NULL, worker_main, w)) == 0)
            w->n_threads++;
    if (error != 0)
        st = MT_FAIL(MT_ENOMEM, "%s: thread %d of %d: %s; ask for fewer threads", name,
                     w->n_threads + 1, n_threads, strerror(error));
    if (st != MT_OK)
        mt_worker_close(w);
    return st;
}

static int is_elsewhere(const mt_worker *w)
{
    return w->forks != mt_forks();
}

void mt_worker_stop(mt_worker *w, int drop)
{
    if (!w->opened || is_elsewhere(w))
        return;
    mt_lock(w->mu);
    w->stop = 1;
    while (drop && w->first != NULL)
        mt_worker_withdraw(w, w->first);
    pthread_cond_broadcast(&w->more);
    mt_unlock(w->mu);
    for (; w->n_threads > 0; w->n_threads--)
        (void)pthread_join(w->threads[w->n_threads - 1], NULL);
}

void mt_worker_close(mt_worker *w)
{
    if (!w->opened || is_elsewhere(w))
        return;
    mt_worker_stop(w, 0);
    pthread_cond_destroy(&w->more);
    pthread_cond_destroy(&w->news);
    free(w->threads);
    w->opened = 0;
}

/* ---- jobs ------------------------------------------------------------------------------- */

uint64_t mt_worker_submit(mt_worker *w, mt_job *job)
{
    MT_ASSERT(mt_holds(w->mu) && !job->listed && !w->stop);
    *job = (mt_job){ .listed = 1 };
    *w->last = job;
    w->last = &job->next;
    pthread_cond_broadcast(&w->more);
    return ++w->submitted;
}

/* Who sleeps was woken by its submit, and the list has not been empty since. */
void mt_worker_again(mt_worker *w, mt_job *job)
{
    MT_ASSERT(mt_holds(w->mu) && !job->listed);
    *job = (mt_job){ .next = w->first, .listed = 1 };
    if (w->first == NULL)
        w->last = &job->next;
    w->first = job;
    w->submitted++;
}

void mt_worker_withdraw(mt_worker *w, mt_job *job)
{
    mt_job **at = &w->first;

    MT_ASSERT(mt_holds(w->mu));
    if (!job->listed)
        return;
    while (*at != job)
        at = &(*at)->next;
    if ((*at = job->next) == NULL)
        w->last = at;
    job->listed = 0;
    w->submitted--;
}

mt_status mt_worker_wait(mt_worker *w, mt_watch *watch, uint64_t number, const char *unit,
                         const char *awaits)
{
    if (is_elsewhere(w))
        return MT_FAIL(MT_ESTATE, "%s: its thread is in the process that this one was forked from",
                       w->name);
    if (number == MT_WORKER_ALL)
        number = MT_LOCKED(w->mu, w->submitted);
    MT_DO(MT_UNTIL(watch, &w->news, w->mu, w->ended >= number, unit, awaits));
    return MT_LOCKED(w->mu, mt_worker_failure(w));
}

mt_status mt_worker_failure(const mt_worker *w)
{
    MT_ASSERT(mt_holds(w->mu));
    return w->failed != MT_OK ? mt_fail_again(w->failed, w->why) : MT_OK;
}
