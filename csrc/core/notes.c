/* notes.c — a list, and a condition. */
#include "notes.h"

#include "clock.h"
#include "lock.h"
#include "watch.h"

#include <stdlib.h>

typedef struct link {
    struct link *next;
    mt_note      note;
} link;

struct mt_notes {
    mt_mutex       mu;
    pthread_cond_t come;                 /* monotonic clock */
    link          *first, **last;        /* mu */
    int            lost;                 /* there was no memory for one. mu */
};

mt_status mt_notes_open(mt_notes **out)
{
    mt_notes *q;
    mt_status st = MT_MAKE(q, 1, "notes");

    if (st != MT_OK)
        return st;
    if ((st = mt_watch_cond(&q->come)) != MT_OK) {
        free(q);
        return st;
    }
    mt_mutex_open(&q->mu, MT_RANK_NOTES);
    q->last = &q->first;
    *out = q;
    return MT_OK;
}

void mt_notes_close(mt_notes *q)
{
    if (q == NULL)
        return;
    for (link *l = q->first, *next; l != NULL; l = next) {
        next = l->next;
        free(l);
    }
    pthread_cond_destroy(&q->come);
    mt_mutex_close(&q->mu);
    free(q);
}

void mt_notes_put(mt_notes *q, mt_note note)
{
    link *l;

    if (q == NULL)
        return;
    l = calloc(1, sizeof *l);
    if (l != NULL)
        l->note = note;
    mt_lock(&q->mu);
    if (l != NULL) {
        *q->last = l;
        q->last = &l->next;
    }
    q->lost |= l == NULL;
    pthread_cond_broadcast(&q->come);
    mt_unlock(&q->mu);
}

mt_status mt_notes_take(mt_notes *q, int ms, mt_note *out, int *some)
{
    uint64_t        end = mt_now_ns() + (uint64_t)ms * 1000000u;
    struct timespec until = { (time_t)(end / 1000000000u), (long)(end % 1000000000u) };
    link           *l;
    int             lost;

    mt_lock(&q->mu);
    while (q->first == NULL && !q->lost && mt_cond_timedwait(&q->come, &q->mu, &until) == 0)
        ;
    l = q->first;
    lost = q->lost;
    if (l != NULL && (q->first = l->next) == NULL)
        q->last = &q->first;
    mt_unlock(&q->mu);
    *some = l != NULL;
    if (l != NULL)
        *out = l->note;
    free(l);
    return lost ? MT_FAIL(MT_ENOMEM, "notes: no memory for one") : MT_OK;
}
