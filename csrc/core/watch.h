/* watch.h — who waits for what, and since when: for the day on which nothing moves any more.
 *
 * Nouns, in the order they appear below:
 *   watch    of a store, and of all that works on it. Has a limit, in seconds
 *   post     a wait: which queue, which unit, for what, since when. A thread's, while it waits; or
 *            that of a device's queue, until its event is done
 *   moved    when anything was last begun, ended or copied
 *   stuck    somebody waits, and for the limit nothing has moved. A wait that finds itself stuck
 *            ends with MT_ESTUCK and the list of all posts,
 *            longest first: the first is where it began
 *   patient  of a post: what it waits for may take any time, and shows nothing (a drive's sync).
 *            While there is one nothing is stuck
 *   asks     of a thread: a function that its waits call now and then. Where that says so a wait
 *            ends with MT_EINTR: the signal of a user is not seen by who only waits
 *   compute  a device queue whose work may take longer than any copy, and shows nothing either.
 *            While it has some, the limit is told of, once,
 *            and what waits is stuck after six times as long
 *
 *     mt_watch_i_am("d2h");                                // a thread of ours, once
 *
 *     mt_watch_begin(w, &post, NULL, "layers.0", "...");   // around a wait that nobody can end
 *     st = dev->ops->sync_event(e);
 *     mt_watch_end(w, &post, st);
 *
 *     st = MT_UNTIL(w, &changed, &mu, issued >= n, "layers.0", "...");  // the watchdog can end it
 *
 *     mt_watch_put(w, &post, "h2d", "layers.0", "...", e);         // a queue has work, e behind it
 *     mt_watch_put(w, &post, mt_compute, "layers.0", "...", e);    // and the one that computes
 *
 * Threads: any. A post is one thread's at a time. The device is asked under `asking`, never under
 *          mu: who makes a list holds it, and who closes an event that is in one.
 */
#ifndef MT_WATCH_H
#define MT_WATCH_H

#include "dev.h"
#include "lock.h"

#include <stdatomic.h>

typedef struct mt_post {
    const char     *queue, *unit, *awaits;   /* outlive the post; unit NULL: it is of none */
    mt_event       *event;                   /* a device queue's post is listed until this event is
                                              * done. NULL: a thread waits */
    int             patient;                 /* what it waits for may take any time, and shows
                                              * nothing. Written by who has the post */
    uint64_t        since_ns;                /* 0: not in the list */
    struct mt_post *next, *before;
} mt_post;

typedef struct mt_watch {
    mt_mutex             asking;             /* who holds it knows that no event in the list is
                                              * closed meanwhile */
    mt_mutex             mu;
    mt_post             *first;              /* of the list. mu */
    atomic_uint_least64_t moved_ns, limit_ns;
    atomic_int            spared;            /* so many limits have gone by since anything moved,
                                              * and compute had work */
    void                (*say)(const char *text);    /* see mt_watch_open */
} mt_watch;

/* Any thread that waits tells `say` of what is no error yet; its caller may hold locks. NULL:
 * nobody is told. */
void mt_watch_open (mt_watch *w, void (*say)(const char *text));
void mt_watch_close(mt_watch *w);            /* after all posts */
void mt_watch_limit(mt_watch *w, double seconds);
void mt_watch_moved(mt_watch *w);

/* The name of this thread in the list, a literal. Until it has one it is "the caller". */
void mt_watch_i_am(const char *queue);

/* Waits of this thread call `ask` from now on; NULL: nobody, as at first. Yields who was asked
 * before. It is called under locks of the wait's caller, but under none of the wait's own. */
typedef int (*mt_watch_ask)(void);
mt_watch_ask mt_watch_asks(mt_watch_ask ask);
/* Calls it where *asked_ns, 0 at first, is long ago. MT_EINTR: it said so. */
mt_status mt_watch_asked(uint64_t *asked_ns);

/* queue NULL: this thread's. A wait that ended has moved, unless it was stuck. */
void mt_watch_begin(mt_watch *w, mt_post *p, const char *queue, const char *unit,
                    const char *awaits);
void mt_watch_end  (mt_watch *w, mt_post *p, mt_status st);

/* Monotonic, as MT_UNTIL needs it. On failure *c may be destroyed if its bytes were 0. */
mt_status mt_watch_cond(pthread_cond_t *c);
/* Waits until the expression `over` holds. It is looked at under the lock, at least once, and may
 * note what the caller wants to know of that moment. The caller does not hold the lock; who may
 * have changed what it looks at broadcasts cond, which is of mt_watch_cond. MT_ESTUCK or MT_EINTR,
 * unless it is over. The wait is in the list from the first time that it is not. */
#define MT_UNTIL(watch, cond, lock, over, unit_, awaits_)                                          \
    __extension__({                                                                                \
        mt__wait wait_ = { .w = (watch), .c = (cond), .mu = (lock), .unit = (unit_),               \
                           .awaits = (awaits_) };                                                  \
        mt_lock(wait_.mu);                                                                         \
        while (!(wait_.done = (over) ? 1 : 0) && mt__wait_on(&wait_))                              \
            ;                                                                                      \
        mt__wait_end(&wait_);                                                                      \
    })
typedef struct mt__wait {
    mt_watch       *w;
    pthread_cond_t *c;
    mt_mutex       *mu;
    const char     *unit, *awaits;
    mt_post         post;
    uint64_t        asked_ns;
    int             done, judged;
    mt_status       st;
} mt__wait;
int       mt__wait_on (mt__wait *wait);      /* under the lock; 0: it ends */
mt_status mt__wait_end(mt__wait *wait);      /* gives the lock back */

/* The host waits for an event's record, which was made; nobody can end that. */
mt_status mt_watch_sync (mt_watch *w, mt_event *e, const char *unit, const char *awaits);
/* The host waits for an event, and for a record that is made meanwhile. In steps of up to a
 * millisecond: not where every wait is one for the step's end. */
mt_status mt_watch_event(mt_watch *w, mt_event *e, const char *unit, const char *awaits);

/* A post that is in the list already is the new unit's from now on. queue mt_compute: the one that
 * computes. One thread at a time, in the order in which events were recorded there: of all such
 * posts a list has the first. */
extern const char mt_compute[];
void mt_watch_put (mt_watch *w, mt_post *p, const char *queue, const char *unit, const char *awaits,
                   mt_event *e);
/* Before the post's event is closed; a post that is not in the list is fine. */
void mt_watch_take(mt_watch *w, mt_post *p);

/* The list as text, cut where `cap` ends. */
void mt_watch_tell(mt_watch *w, char *out, size_t cap);

#endif
