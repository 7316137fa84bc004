/* watch.c — a list of waits under one lock, and the time at which anything last moved. */
#include "watch.h"

#include <stdio.h>
#include <string.h>

#define LIMIT_S      600.0
#define LIMIT_MAX_S  1e9                     /* thirty years, and far from any overflow */
#define SLICE_NS     1000000000u             /* of a wait: a new limit counts after so long */
#define NAP_LEAST_NS 20000u
#define NAP_MOST_NS  1000000u
#define LATE_LEAST_NS 50000000u              /* a sleep that ends so much later than it should: we
                                              * were stopped */
#define LATE_MOST_NS  10000000000u
#define TOLD         8                       /* posts of a list */
#define ASK_NS       100000000u              /* from one question to the next: what a user hardly
                                              * notices */
#define SPARED       6                       /* limits that compute may take, for one */

static _Thread_local const char *i_am = "the caller";

void mt_watch_i_am(const char *queue)
{
    i_am = queue;
}

static _Thread_local mt_watch_ask asks;

mt_watch_ask mt_watch_asks(mt_watch_ask ask)
{
    mt_watch_ask before = asks;

    asks = ask;
    return before;
}

mt_status mt_watch_asked(uint64_t *asked_ns)
{
    uint64_t now = mt_now_ns(), before = *asked_ns;

    if (asks == NULL || (before > 0 && now - before < ASK_NS))
        return MT_OK;
    *asked_ns = now;
    return before > 0 && asks() ? MT_FAIL(MT_EINTR, "interrupted while waiting") : MT_OK;
}

void mt_watch_open(mt_watch *w, void (*say)(const char *text))
{
    *w = (mt_watch){ .say = say };
    mt_mutex_open(&w->asking, MT_RANK_WATCH_ASKING);
    mt_mutex_open(&w->mu, MT_RANK_LEAF);
    mt_watch_limit(w, LIMIT_S);
    mt_watch_moved(w);
}

void mt_watch_close(mt_watch *w)
{
    mt_mutex_close(&w->mu);
    mt_mutex_close(&w->asking);
}

void mt_watch_limit(mt_watch *w, double seconds)
{
    double limit = seconds >= 0 && seconds < LIMIT_MAX_S ? seconds : LIMIT_MAX_S;

    atomic_store_explicit(&w->limit_ns, (uint_least64_t)(limit * 1e9), memory_order_relaxed);
}

void mt_watch_moved(mt_watch *w)
{
    atomic_store_explicit(&w->moved_ns, mt_now_ns(), memory_order_relaxed);
    atomic_store_explicit(&w->spared, 0, memory_order_relaxed);
}

/* ---- posts ------------------------------------------------------------------------------ */

const char mt_compute[] = "compute";

void mt_watch_put(mt_watch *w, mt_post *p, const char *queue, const char *unit, const char *awaits,
                  mt_event *e)
{
    MT_HOLD(&w->mu);
    if (p->since_ns == 0) {
        p->before = NULL;
        p->next = w->first;
        if (w->first != NULL)
            w->first->before = p;
        w->first = p;
    }
    p->queue = queue != NULL ? queue : i_am;
    p->unit = unit;
    p->awaits = awaits;
    p->event = e;
    p->since_ns = mt_now_ns();
}

static void take(mt_watch *w, mt_post *p)
{
    MT_HOLD(&w->mu);
    if (p->since_ns != 0) {
        if (p->next != NULL)
            p->next->before = p->before;
        *(p->before != NULL ? &p->before->next : &w->first) = p->next;
        p->since_ns = 0;
    }
}

void mt_watch_take(mt_watch *w, mt_post *p)
{
    MT_WITH(&w->asking) take(w, p);
}

void mt_watch_begin(mt_watch *w, mt_post *p, const char *queue, const char *unit,
                    const char *awaits)
{
    *p = (mt_post){ 0 };
    mt_watch_put(w, p, queue, unit, awaits, NULL);
}

void mt_watch_end(mt_watch *w, mt_post *p, mt_status st)
{
    take(w, p);
    if (st != MT_ESTUCK)
        mt_watch_moved(w);
}

/* ---- the list --------------------------------------------------------------------------- */

/* A post as it was: it may be gone by now, but not its event, as long as `asking` is held. */
typedef struct seen {
    const mt_post *at;
    uint64_t       since_ns;
    mt_event      *event;
    int            computes;
    char           text[256];
} seen;

/* Two of the same nanosecond are told apart by where they stand in the list. */
static int is_later(const mt_post *p, uint64_t since_ns, const mt_post *at)
{
    return p->since_ns > since_ns || (p->since_ns == since_ns && p > at);
}

/* Under asking. The one that waits longest of those behind *s, which begins as zeros;
 * 0: no more. */
static int next_longest(mt_watch *w, seen *s)
{
    const mt_post *found = NULL;

    MT_HOLD(&w->mu);
    for (const mt_post *p = w->first; p != NULL; p = p->next)
        if (is_later(p, s->since_ns, s->at) && (found == NULL || is_later(found, p->since_ns, p)))
            found = p;
    if (found != NULL) {
        s->at = found;
        s->since_ns = found->since_ns;
        s->event = found->event;
        s->computes = found->queue == mt_compute;
        snprintf(s->text, sizeof s->text, "%s%s%s waits for %s", found->queue,
                 found->unit != NULL ? ", unit " : "", found->unit != NULL ? found->unit : "",
                 found->awaits);
    }
    return found != NULL;
}

/* Has compute anything left to do, on a device that answers? */
static int computes(mt_watch *w)
{
    seen s = { 0 };
    int  done = 1;

    MT_HOLD(&w->asking);
    while (done && next_longest(w, &s))
        if (s.computes && s.event->dev->ops->query(s.event, &done) != MT_OK)
            done = 1;
    return !done;
}

/* Of compute's posts the first alone: the others only wait their turn. */
void mt_watch_tell(mt_watch *w, char *out, size_t cap)
{
    uint64_t now = mt_now_ns();
    seen     s = { 0 };
    size_t   n = 0;
    int      told = 0, computing = 0;

    out[0] = 0;
    MT_HOLD(&w->asking);
    while (told < TOLD && n < cap && next_longest(w, &s)) {
        int done = 0;                    /* a device that does not answer is not done */

        if (s.event != NULL && s.event->dev->ops->query(s.event, &done) != MT_OK)
            done = 0;
        if ((s.computes && computing) || done)
            continue;
        computing |= s.computes;
        n += (size_t)snprintf(out + n, cap - n, "%s%s, since %.2f s", told++ > 0 ? "; " : "",
                              s.text, (double)(now > s.since_ns ? now - s.since_ns : 0) / 1e9);
    }
}

/* ---- waits ------------------------------------------------------------------------------ */

static uint64_t limit_of(mt_watch *w)
{
    return atomic_load_explicit(&w->limit_ns, memory_order_relaxed);
}

/* Nanoseconds until p's wait is stuck, if nothing moves; 0: it is. */
static uint64_t left_of(mt_watch *w, const mt_post *p)
{
    uint64_t moved = atomic_load_explicit(&w->moved_ns, memory_order_relaxed), now = mt_now_ns(),
             limit = limit_of(w);
    uint64_t from = moved > p->since_ns ? moved : p->since_ns, gone = now > from ? now - from : 0;

    return gone < limit ? limit - gone : 0;
}

/* Whoever is stopped, with the machine or by a signal,
 * sees time go by in which nothing could move. */
static void woken(mt_watch *w, uint64_t due_ns)
{
    uint64_t now = mt_now_ns(), late = limit_of(w) / 10;

    late = late < LATE_LEAST_NS ? LATE_LEAST_NS : late > LATE_MOST_NS ? LATE_MOST_NS : late;
    if (now > due_ns && now - due_ns > late)
        mt_watch_moved(w);
}

static double limits_s(mt_watch *w, int n)
{
    return (double)limit_of(w) * n / 1e9;
}

/* A window may take longer than the limit, and nothing tells it from one that hangs:
 * so its limit is another. */
static int is_spared(mt_watch *w, const mt_post *p)
{
    int  spared = 0, goes_on = 1;
    char list[768], text[1280];

    if (!computes(w))
        return 0;
    MT_WITH(&w->mu)
        if (left_of(w, p) == 0) {        /* else another wait was here first */
            spared = atomic_load_explicit(&w->spared, memory_order_relaxed) + 1;
            if ((goes_on = spared < SPARED)) {
                mt_watch_moved(w);
                atomic_store_explicit(&w->spared, spared, memory_order_relaxed);
            }
        }
    if (spared == 1 && w->say != NULL) {
        mt_watch_tell(w, list, sizeof list);
        snprintf(text, sizeof text,
                 "nothing has moved in %g s, and compute has work: one window that takes so long, "
                 "a kernel that never ends, or a copy that compute waits for. What waits ends with "
                 "an error after %g s. Longest first: %s",
                 limits_s(w, 1), limits_s(w, SPARED), list);
        w->say(text);
    }
    return goes_on;
}

/* Under no lock of the caller's. MT_OK: p's wait goes on. */
static mt_status judge(mt_watch *w, const mt_post *p)
{
    char list[768];
    int  patient = 0;

    if (left_of(w, p) > 0)
        return MT_OK;
    MT_WITH(&w->mu)                      /* something patient is in the list: nothing is stuck */
        for (const mt_post *q = w->first; q != NULL && !patient; q = q->next)
            patient = q->patient;
    if (patient)
        mt_watch_moved(w);
    if (patient || is_spared(w, p))
        return MT_OK;
    mt_watch_tell(w, list, sizeof list);
    return MT_FAIL(MT_ESTUCK,
                   "%s%s%s has not come in %g s, and nothing else has moved. Longest first: %s",
                   p->unit != NULL ? p->unit : "", p->unit != NULL ? ": " : "", p->awaits,
                   limits_s(w, 1 + atomic_load_explicit(&w->spared, memory_order_relaxed)), list);
}

mt_status mt_watch_cond(pthread_cond_t *c)
{
    pthread_condattr_t attr;
    int                err = pthread_condattr_init(&attr);

    if (err == 0) {
        /* Monotonic, so that setting the machine's clock neither ends nor prolongs a wait. */
        err = pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
        err = err != 0 ? err : pthread_cond_init(c, &attr);
        pthread_condattr_destroy(&attr);
    }
    return err == 0 ? MT_OK : MT_FAIL(MT_ENOMEM, "no condition variable: %s", strerror(err));
}

/* Looked at anew where the lock was let go of, before it is slept on again; and once more where it
 * is stuck. Not by who is interrupted: to look may be to take. */
int mt__wait_on(mt__wait *wait)
{
    mt_watch       *w = wait->w;
    uint64_t        until, left, most = asks != NULL ? ASK_NS : SLICE_NS;
    struct timespec t;

    if (wait->st != MT_OK)
        return 0;
    if (wait->post.since_ns == 0)
        mt_watch_begin(w, &wait->post, NULL, wait->unit, wait->awaits);
    else if (!wait->judged && (asks != NULL || left_of(w, &wait->post) == 0)) {
        mt_unlock(wait->mu);
        if ((wait->st = mt_watch_asked(&wait->asked_ns)) == MT_OK)
            wait->st = judge(w, &wait->post);
        mt_lock(wait->mu);
        wait->judged = 1;
        return wait->st != MT_EINTR;
    }
    wait->judged = 0;
    left = left_of(w, &wait->post);
    until = mt_now_ns() + (left < most ? left : most);
    t = (struct timespec){ (time_t)(until / 1000000000u), (long)(until % 1000000000u) };
    (void)mt_cond_timedwait(wait->c, wait->mu, &t);
    woken(w, until);
    return 1;
}

mt_status mt__wait_end(mt__wait *wait)
{
    mt_status st = wait->done ? MT_OK : wait->st;

    mt_unlock(wait->mu);
    if (wait->post.since_ns != 0)
        mt_watch_end(wait->w, &wait->post, st);
    return st;
}

mt_status mt_watch_sync(mt_watch *w, mt_event *e, const char *unit, const char *awaits)
{
    mt_post   post;
    mt_status st;

    mt_watch_begin(w, &post, NULL, unit, awaits);
    st = e->dev->ops->sync_event(e);
    mt_watch_end(w, &post, st);
    return st;
}

mt_status mt_watch_event(mt_watch *w, mt_event *e, const char *unit, const char *awaits)
{
    mt_post   post;
    uint64_t  asked_ns = 0;
    int       done = 0;
    mt_status st = e->dev->ops->query(e, &done);

    if (st != MT_OK || done)
        return st;
    mt_watch_begin(w, &post, NULL, unit, awaits);
    while (st == MT_OK && !done) {
        uint64_t        now = mt_now_ns(), nap = (now - post.since_ns) / 8;
        struct timespec t = { 0, (long)(nap < NAP_LEAST_NS ? NAP_LEAST_NS
                                        : nap < NAP_MOST_NS ? nap : NAP_MOST_NS) };

        nanosleep(&t, NULL);
        st = e->dev->ops->query(e, &done);
        woken(w, now + (uint64_t)t.tv_nsec);
        if (st == MT_OK && !done)
            st = mt_watch_asked(&asked_ns);
        if (st == MT_OK && !done)
            st = judge(w, &post);
    }
    mt_watch_end(w, &post, st);
    return st;
}
