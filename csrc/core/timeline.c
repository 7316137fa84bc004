/* timeline.c — a ring of records that are over, some of whose stamps no queue has come by yet.
 *
 * An entry of the ring is promised when a span begins, with both stamps, so that ending one cannot
 * find the ring full. The reader takes the ring's records out before it looks at their stamps:
 * looking is a call of the device for each, and the queues' threads want the lock meanwhile.
 */
#include "timeline.h"

#include "clock.h"
#include "lock.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define KEPT   MT_TIMELINE_KEPT
#define STAMPS (4 * KEPT)        /* two for each record in the ring and with the reader */
#define DEEP   16                /* windows within windows */

typedef struct entry {
    mt_record r;
    mt_stamp *begin, *end;       /* NULL: the time is in r. A point has no end */
} entry;

typedef struct room {
    entry     ring[KEPT];        /* oldest at first */
    entry     late[KEPT];        /* taken from the ring and not handed out. reading */
    mt_stamp *made[STAMPS];      /* every stamp there is */
    mt_stamp *idle[STAMPS];      /* of which these are in no queue */
} room;

struct mt_timeline {
    mt_dev         *dev;
    atomic_int      on;          /* written under mu; a look without it decides nothing else */

    mt_mutex        mu;
    room           *room;        /* made when it is first on. mu, but for `late` */
    int64_t         first, n;    /* of the ring. mu */
    int64_t         promised;    /* spans that have begun. mu */
    int64_t         n_made, n_idle;      /* mu */
    uint64_t        lost;        /* mu */

    mt_span         stack[DEEP]; /* computing thread */
    int             fresh[DEEP]; /* the unit that run waited for in it last; -1: none. Same
                                  * thread */
    int             depth;       /* computing thread; may exceed DEEP */

    mt_mutex        reading;
    int64_t         n_late;      /* reading */
};

#define MT_LANE_TEXT(name, text, what) text,
#define MT_WORK_TEXT(name, text, what) text,

const char *mt_lane_name(mt_lane lane)
{
    static const char *const names[] = { MT_LANE_MAP(MT_LANE_TEXT) };
    return (unsigned)lane < MT_LANE_COUNT ? names[lane] : "?";
}

const char *mt_work_name(mt_work work)
{
    static const char *const names[] = { MT_WORK_MAP(MT_WORK_TEXT) };
    return (unsigned)work < MT_WORK_COUNT ? names[work] : "?";
}

/* ---- open, on and close ----------------------------------------------------------------- */

mt_status mt_timeline_open(mt_dev *dev, mt_timeline **out)
{
    mt_timeline *t;

    MT_DO(MT_MAKE(t, 1, "timeline"));
    t->dev = dev;
    atomic_init(&t->on, 0);
    mt_mutex_open(&t->mu, MT_RANK_LEAF);
    mt_mutex_open(&t->reading, MT_RANK_TIMELINE_READING);
    *out = t;
    return MT_OK;
}

mt_status mt_timeline_on(mt_timeline *t, int on)
{
    mt_status st = MT_OK;

    mt_lock(&t->reading);
    mt_lock(&t->mu);
    if (on && t->room == NULL)
        st = MT_MAKE(t->room, 1, "timeline");
    if (st == MT_OK)
        atomic_store(&t->on, on);
    mt_unlock(&t->mu);
    mt_unlock(&t->reading);
    return st;
}

void mt_timeline_close(mt_timeline *t)
{
    if (t == NULL)
        return;
    for (int64_t i = 0; i < t->n_made; i++)
        t->dev->ops->stamp_close(t->dev, t->room->made[i]);
    mt_mutex_close(&t->reading);
    mt_mutex_close(&t->mu);
    free(t->room);
    free(t);
}

/* ---- stamps ----------------------------------------------------------------------------- */

/* Under mu. 0: there are none left, or the device makes no more. */
static int stamp_take(mt_timeline *t, mt_stamp **s)
{
    if (t->n_idle > 0) {
        *s = t->room->idle[--t->n_idle];
        return 1;
    }
    if (t->n_made == STAMPS || t->dev->ops->stamp_open(t->dev, s) != MT_OK)
        return 0;
    t->room->made[t->n_made++] = *s;
    return 1;
}

/* Under mu. Not one that may still be in a queue, which would write the next record's time: that
 * one is only closed in the end. */
static void stamp_give(mt_timeline *t, mt_stamp *s)
{
    if (s != NULL)
        t->room->idle[t->n_idle++] = s;
}

static int stamp_put(const mt_timeline *t, mt_stamp *s, mt_queue *q, uint64_t *ns)
{
    if (s != NULL)
        return t->dev->ops->stamp(q, s) == MT_OK;
    *ns = mt_now_ns();
    return 1;
}

static int stamp_known(const mt_timeline *t, mt_stamp *s, uint64_t *ns)
{
    int done = 0;

    return s == NULL || (t->dev->ops->stamp_read(t->dev, s, ns, &done) == MT_OK && done);
}

/* Both times of e are in e->r. Its stamps are in no queue then. */
static int entry_known(const mt_timeline *t, entry *e)
{
    if (!stamp_known(t, e->begin, &e->r.begin_ns) || !stamp_known(t, e->end, &e->r.end_ns))
        return 0;
    if (e->r.work == MT_WORK_STEP)
        e->r.end_ns = e->r.begin_ns;
    return 1;
}

/* ---- recording -------------------------------------------------------------------------- */

/* Under mu. The oldest record is lost, unless its stamps are still in a queue. */
static int give_way(mt_timeline *t)
{
    entry *e = &t->room->ring[t->first];

    if (t->n == 0 || !entry_known(t, e))
        return 0;
    stamp_give(t, e->begin);
    stamp_give(t, e->end);
    t->first = (t->first + 1) % KEPT;
    t->n--;
    t->lost++;
    return 1;
}

/* Under mu. An entry of the ring and n stamps. */
static int promise(mt_timeline *t, mt_span *s, int n)
{
    if (t->n + t->promised >= KEPT && !give_way(t))
        return 0;
    if (n > 0 && !stamp_take(t, &s->begin))
        return 0;
    if (n > 1 && !stamp_take(t, &s->end)) {
        stamp_give(t, s->begin);
        return 0;
    }
    t->promised++;
    return 1;
}

/* Under mu. Ends the promise, kept or not. */
static void redeem(mt_timeline *t, const mt_span *s, int kept)
{
    t->promised--;
    if (kept)
        t->room->ring[(t->first + t->n++) % KEPT] = (entry){ s->r, s->begin, s->end };
    else
        t->lost++;
}

static void begin(mt_timeline *t, mt_span *s, int stamps, mt_queue *q)
{
    int promised;

    mt_lock(&t->mu);
    promised = promise(t, s, stamps);
    t->lost += !promised;
    mt_unlock(&t->mu);
    if (!promised)
        return;
    s->open = stamp_put(t, s->begin, q, &s->r.begin_ns);
    if (!s->open) {
        MT_WITH(&t->mu) redeem(t, s, 0);
    }
}

void mt_timeline_begin(mt_timeline *t, mt_span *s, mt_lane lane, mt_work work, int unit,
                       mt_queue *q)
{
    s->open = 0;
    if (t == NULL || !atomic_load_explicit(&t->on, memory_order_relaxed))
        return;
    *s = (mt_span){ .r = { .lane = lane, .work = work, .unit = unit } };
    begin(t, s, q != NULL ? 2 : 0, q);
}

void mt_timeline_end(mt_timeline *t, mt_span *s, uint64_t bytes, mt_queue *q)
{
    int kept;

    if (!s->open)
        return;
    s->open = 0;
    s->r.bytes = bytes;
    kept = stamp_put(t, s->end, q, &s->r.end_ns);
    MT_WITH(&t->mu) redeem(t, s, kept);
}

void mt_timeline_over(mt_timeline *t, mt_lane lane, mt_work work, int unit, uint64_t begun_ns,
                      uint64_t bytes, uint64_t *reached_ns)
{
    mt_span span;

    if (bytes == 0)
        return;
    mt_timeline_begin(t, &span, lane, work, unit, NULL);
    span.r.begin_ns = begun_ns > *reached_ns ? begun_ns : *reached_ns;
    mt_timeline_end(t, &span, bytes, NULL);
    *reached_ns = mt_now_ns();
}

/* ---- the computing thread's stack ------------------------------------------------------- */

/* NULL: none is open, or they are deeper than DEEP. An interrupted window is as many records as it
 * has pieces. */
static mt_span *top(mt_timeline *t)
{
    return t->depth > 0 && t->depth <= DEEP ? &t->stack[t->depth - 1] : NULL;
}

static void piece_end(mt_timeline *t, mt_queue *run)
{
    if (top(t) != NULL)
        mt_timeline_end(t, top(t), 0, run);
}

/* Also where the timeline lost the piece before: r says what it is of. */
static void piece_begin(mt_timeline *t, mt_record r, mt_queue *run)
{
    if (top(t) == NULL)
        return;
    mt_timeline_begin(t, top(t), MT_LANE_COMPUTE, r.work, r.unit, run);
    top(t)->r.work = r.work;
    top(t)->r.unit = r.unit;
}

void mt_timeline_enter(mt_timeline *t, mt_work work, int unit, mt_queue *run)
{
    if (!atomic_load_explicit(&t->on, memory_order_relaxed))
        return;
    piece_end(t, run);
    if (t->depth++ < DEEP)
        t->fresh[t->depth - 1] = -1;
    piece_begin(t, (mt_record){ .work = work, .unit = unit }, run);
}

void mt_timeline_leave(mt_timeline *t, mt_queue *run)
{
    if (t->depth == 0)
        return;
    piece_end(t, run);
    t->depth--;
    mt_timeline_waited(t, run);
}

int mt_timeline_wait(mt_timeline *t, int unit, mt_queue *run)
{
    if (top(t) == NULL || t->fresh[t->depth - 1] == unit)
        return 0;
    t->fresh[t->depth - 1] = unit;
    piece_end(t, run);
    return 1;
}

void mt_timeline_waited(mt_timeline *t, mt_queue *run)
{
    if (top(t) != NULL)
        piece_begin(t, top(t)->r, run);
}

void mt_timeline_step(mt_timeline *t, int number, mt_queue *run)
{
    mt_span point = { .r = { .lane = MT_LANE_COMPUTE, .work = MT_WORK_STEP, .unit = number } };

    piece_end(t, run);
    t->depth = 0;
    if (!atomic_load_explicit(&t->on, memory_order_relaxed))
        return;
    begin(t, &point, 1, run);
    if (point.open) {
        MT_WITH(&t->mu) redeem(t, &point, 1);
    }
}

/* ---- reading ---------------------------------------------------------------------------- */

int64_t mt_timeline_read(mt_timeline *t, mt_record *out, int64_t cap)
{
    int64_t n = 0, kept = 0;

    mt_lock(&t->reading);
    mt_lock(&t->mu);         /* what has ended since goes behind what the queues owed before */
    while (t->n > 0 && t->n_late < KEPT) {
        t->room->late[t->n_late++] = t->room->ring[t->first];
        t->first = (t->first + 1) % KEPT;
        t->n--;
    }
    mt_unlock(&t->mu);
    for (int64_t i = 0; i < t->n_late; i++) {
        entry e = t->room->late[i];

        if (n == cap || !entry_known(t, &e)) {
            t->room->late[kept++] = t->room->late[i];
            continue;
        }
        out[n++] = e.r;
        mt_lock(&t->mu);
        stamp_give(t, e.begin);
        stamp_give(t, e.end);
        mt_unlock(&t->mu);
    }
    t->n_late = kept;
    mt_unlock(&t->reading);
    return n;
}

uint64_t mt_timeline_lost(mt_timeline *t)
{
    return MT_LOCKED(&t->mu, t->lost);
}
