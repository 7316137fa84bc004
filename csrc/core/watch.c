/* watch.c — a list of waits under one lock, and the time at which anything last moved. */
#include "watch.h"

#include "clock.h"

#include <stdio.h>
#include <string.h>

#define LIMIT_S      600.0
#define LIMIT_MAX_S  1e9                     /* thirty years, and far from any overflow */
#define SLICE_NS     1000000000u             /* of a wait: a new limit counts after so long */
#define NAP_LEAST_NS 20000u
#define NAP_MOST_NS  1000000u
#define TOLD         8                       /* posts of a list */

static _Thread_local const char *i_am = "the caller";

void mt_watch_i_am(const char *queue)
{
    i_am = queue;
}

void mt_watch_open(mt_watch *w)
{
    pthread_mutex_init(&w->mu, NULL);
    w->first = NULL;
    mt_watch_limit(w, LIMIT_S);
    mt_watch_moved(w);
}

void mt_watch_close(mt_watch *w)
{
    pthread_mutex_destroy(&w->mu);
}

void mt_watch_limit(mt_watch *w, double seconds)
{
    double limit = seconds >= 0 && seconds < LIMIT_MAX_S ? seconds : LIMIT_MAX_S;

    atomic_store_explicit(&w->limit_ns, (uint_least64_t)(limit * 1e9), memory_order_relaxed);
}

void mt_watch_moved(mt_watch *w)
{
    atomic_store_explicit(&w->moved_ns, mt_now_ns(), memory_order_relaxed);
}

/* ---- posts ------------------------------------------------------------------------------ */

/* Under mu. */
static void link_post(mt_watch *w, mt_post *p)
{
    p->before = NULL;
    p->next = w->first;
    if (w->first != NULL)
        w->first->before = p;
    w->first = p;
}

/* Under mu. */
static void unlink_post(mt_watch *w, mt_post *p)
{
    if (p->next != NULL)
        p->next->before = p->before;
    *(p->before != NULL ? &p->before->next : &w->first) = p->next;
    p->since_ns = 0;
}

void mt_watch_put(mt_watch *w, mt_post *p, const char *queue, const char *unit, const char *awaits, mt_event *e)
{
    pthread_mutex_lock(&w->mu);
    if (p->since_ns == 0)
        link_post(w, p);
    p->queue = queue != NULL ? queue : i_am;
    p->unit = unit;
    p->awaits = awaits;
    p->event = e;
    p->since_ns = mt_now_ns();
    pthread_mutex_unlock(&w->mu);
}

void mt_watch_take(mt_watch *w, mt_post *p)
{
    if (w == NULL || p == NULL)
        return;
    pthread_mutex_lock(&w->mu);
    if (p->since_ns != 0)
        unlink_post(w, p);
    pthread_mutex_unlock(&w->mu);
}

void mt_watch_begin(mt_watch *w, mt_post *p, const char *queue, const char *unit, const char *awaits)
{
    p->since_ns = 0;
    mt_watch_put(w, p, queue, unit, awaits, NULL);
}

void mt_watch_end(mt_watch *w, mt_post *p, mt_status st)
{
    mt_watch_take(w, p);
    if (st != MT_ESTUCK)
        mt_watch_moved(w);
}

/* ---- the list --------------------------------------------------------------------------- */

/* Under mu. A device that does not answer is not done. */
static int is_over(const mt_post *p)
{
    int done = 0;

    return p->event != NULL && p->event->dev->ops->query(p->event, &done) == MT_OK && done;
}

/* Under mu. The one that waits longest of those behind `from_ns`; two of the same nanosecond are told apart by
 * their places. */
static const mt_post *next_longest(const mt_watch *w, const mt_post *after)
{
    const mt_post *found = NULL;

    for (const mt_post *p = w->first; p != NULL; p = p->next) {
        int later = after == NULL || p->since_ns > after->since_ns || (p->since_ns == after->since_ns && p > after);

        if (later && (found == NULL || p->since_ns < found->since_ns ||
                      (p->since_ns == found->since_ns && p < found)))
            found = p;
    }
    return found;
}

void mt_watch_tell(mt_watch *w, char *out, size_t cap)
{
    uint64_t now = mt_now_ns();
    size_t   n = 0;
    int      told = 0;

    out[0] = 0;
    pthread_mutex_lock(&w->mu);
    for (const mt_post *p = next_longest(w, NULL); p != NULL && told < TOLD && n < cap; p = next_longest(w, p)) {
        if (is_over(p))
            continue;
        n += (size_t)snprintf(out + n, cap - n, "%s%s%s%s waits for %s, since %.2f s", told++ > 0 ? "; " : "",
                              p->queue, p->unit != NULL ? ", unit " : "", p->unit != NULL ? p->unit : "", p->awaits,
                              (double)(now > p->since_ns ? now - p->since_ns : 0) / 1e9);
    }
    pthread_mutex_unlock(&w->mu);
}

/* ---- waits ------------------------------------------------------------------------------ */

/* Nanoseconds until p's wait is stuck, if nothing moves; 0: it is. */
static uint64_t left_of(mt_watch *w, const mt_post *p)
{
    uint64_t moved = atomic_load_explicit(&w->moved_ns, memory_order_relaxed), now = mt_now_ns();
    uint64_t limit = atomic_load_explicit(&w->limit_ns, memory_order_relaxed);
    uint64_t from = moved > p->since_ns ? moved : p->since_ns, gone = now > from ? now - from : 0;

    return gone < limit ? limit - gone : 0;
}

mt_status mt_watch_look(mt_watch *w, const mt_post *p)
{
    double limit_s = (double)atomic_load_explicit(&w->limit_ns, memory_order_relaxed) / 1e9;
    char   list[768];

    if (left_of(w, p) > 0)
        return MT_OK;
    mt_watch_tell(w, list, sizeof list);
    return MT_FAIL(MT_ESTUCK, "%s%s%s has not come in %g s, and nothing else has moved. Longest first: %s",
                   p->unit != NULL ? p->unit : "", p->unit != NULL ? ": " : "", p->awaits, limit_s, list);
}

int mt_watch_cond(pthread_cond_t *c)
{
    pthread_condattr_t attr;
    int                err = pthread_condattr_init(&attr);

    if (err != 0)
        return err;
    /* Monotonic, so that setting the machine's clock neither ends nor prolongs a wait. */
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    err = pthread_cond_init(c, &attr);
    pthread_condattr_destroy(&attr);
    return err;
}

mt_status mt_watch_wait(mt_watch *w, const mt_post *p, pthread_cond_t *c, pthread_mutex_t *mu)
{
    uint64_t        left = left_of(w, p), until = mt_now_ns() + (left < SLICE_NS ? left : SLICE_NS);
    struct timespec t = { (time_t)(until / 1000000000u), (long)(until % 1000000000u) };

    if (left == 0)
        return mt_watch_look(w, p);
    (void)pthread_cond_timedwait(c, mu, &t);
    return MT_OK;
}

mt_status mt_watch_event(mt_watch *w, mt_event *e, const char *unit, const char *awaits)
{
    mt_post   post;
    int       done = 0;
    mt_status st = e->dev->ops->query(e, &done);

    if (st != MT_OK || done)
        return st;
    mt_watch_begin(w, &post, NULL, unit, awaits);
    while (st == MT_OK && !done) {
        uint64_t        nap = (mt_now_ns() - post.since_ns) / 8;
        struct timespec t = { 0, (long)(nap < NAP_LEAST_NS ? NAP_LEAST_NS : nap < NAP_MOST_NS ? nap : NAP_MOST_NS) };

        nanosleep(&t, NULL);
        if ((st = e->dev->ops->query(e, &done)) == MT_OK && !done)
            st = mt_watch_look(w, &post);
    }
    mt_watch_end(w, &post, st);
    return st;
}
