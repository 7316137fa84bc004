/* timeline.c — a ring of entries, each with two stamps of its own.
 *
 * A span has an entry from its beginning on, so that ending one cannot find the ring full. An entry
 * is FREE, then OPEN: a span's; then OVER: a record, some of whose stamps no queue may have come by
 * yet; then READ by one who looks whether they have, and FREE again. Who looks holds no lock: that
 * is a call of the device for each, and the queues' threads begin spans meanwhile.
 */
#include "timeline.h"

#include "lock.h"

#include <stdatomic.h>
#include <stdlib.h>

#define KEPT   MT_TIMELINE_KEPT
#define DEEP   16                /* windows within windows */
#define PASSED 16                /* entries in use that who looks for one passes over, at most */

enum { FREE, OPEN, OVER, READ };

typedef struct entry {
    atomic_int state;
    mt_record  r;                /* its owner's: who made it OPEN or READ */
    int        stamps;           /* so many are in the queue: of them the times come */
    mt_stamp  *stamp[2];         /* made when they are first needed; they stay */
} entry;

struct mt_timeline {
    mt_dev         *dev;
    atomic_int      on;          /* written under mu; a look without it decides nothing else */

    mt_mutex        mu;
    entry          *ring;        /* [KEPT] made when it is first on. mu */
    int64_t         next;        /* where the next entry is looked for: behind the latest. mu */
    atomic_int      used;        /* entries that are not FREE; it grows under mu */
    atomic_ullong   lost;

    mt_span         stack[DEEP]; /* computing thread */
    int             fresh[DEEP]; /* the unit that run waited for in it last; -1: none. Same
                                  * thread */
    int             depth;       /* computing thread; may exceed DEEP */

    mt_mutex        reading;
};

#define TEXT(name, text, what) text,
MT_NAMES(mt_lane_name, mt_lane, MT_LANE_MAP(TEXT))
MT_NAMES(mt_work_name, mt_work, MT_WORK_MAP(TEXT))

/* ---- open, on and close ----------------------------------------------------------------- */

mt_status mt_timeline_open(mt_dev *dev, mt_timeline **out)
{
    mt_timeline *t;

    MT_DO(MT_MAKE(t, 1, "timeline"));
    t->dev = dev;
    mt_mutex_open(&t->mu, MT_RANK_LEAF);
    mt_mutex_open(&t->reading, MT_RANK_TIMELINE_READING);
    *out = t;
    return MT_OK;
}

mt_status mt_timeline_on(mt_timeline *t, int on)
{
    MT_HOLD(&t->mu);
    if (on && t->ring == NULL)
        MT_DO(MT_MAKE(t->ring, KEPT, "timeline"));
    atomic_store(&t->on, on);
    return MT_OK;
}

void mt_timeline_close(mt_timeline *t)
{
    if (t == NULL)
        return;
    for (int64_t i = 0; t->ring != NULL && i < 2 * KEPT; i++)
        if (t->ring[i / 2].stamp[i % 2] != NULL)
            t->dev->ops->stamp_close(t->dev, t->ring[i / 2].stamp[i % 2]);
    mt_mutex_close(&t->reading);
    mt_mutex_close(&t->mu);
    free(t->ring);
    free(t);
}

/* ---- entries ---------------------------------------------------------------------------- */

static void set_free(mt_timeline *t, entry *e)
{
    atomic_fetch_sub(&t->used, 1);
    atomic_store(&e->state, FREE);
}

/* A record whose times are known: nobody else has it then. Its stamps are in no queue. */
static int take_known(const mt_timeline *t, entry *e)
{
    int over = OVER, known = 1;

    if (atomic_load(&e->state) != OVER || !atomic_compare_exchange_strong(&e->state, &over, READ))
        return 0;
    for (int i = 0; i < e->stamps && known; i++)
        if (t->dev->ops->stamp_read(t->dev, e->stamp[i], i == 0 ? &e->r.begin_ns : &e->r.end_ns,
                                    &known) != MT_OK)
            known = 0;
    if (known && e->stamps == 1)
        e->r.end_ns = e->r.begin_ns;
    if (!known)
        atomic_store(&e->state, OVER);
    return known;
}

/* Under mu. NULL: those that come next are all in use. The oldest record gives way, unless its
 * stamps are still in a queue. */
static entry *find_entry(mt_timeline *t)
{
    if (atomic_load(&t->used) == 0)
        t->next = 0;                     /* the same few stamps do for those who read in time */
    for (int i = 0; i < PASSED; i++) {
        entry *e = &t->ring[t->next++ % KEPT];

        if (atomic_load(&e->state) == FREE)
            return e;
        if (take_known(t, e)) {
            atomic_fetch_add(&t->lost, 1);
            set_free(t, e);
            return e;
        }
    }
    return NULL;
}

/* ---- recording -------------------------------------------------------------------------- */

/* The time at one end of the record; with stamps it is that at which q comes by. 0: it cannot be
 * had. */
static int mark(const mt_timeline *t, entry *e, int end, mt_queue *q, uint64_t *ns)
{
    if (end >= e->stamps) {
        *ns = mt_now_ns();
        return 1;
    }
    return (e->stamp[end] != NULL || t->dev->ops->stamp_open(t->dev, &e->stamp[end]) == MT_OK) &&
           t->dev->ops->stamp(q, e->stamp[end]) == MT_OK;
}

/* A record that cannot be made is lost. Where a stamp of it is in a queue, which would write the
 * next record's time, its entry stays as it is. */
static void lose(mt_timeline *t, entry *e, int is_put)
{
    atomic_fetch_add(&t->lost, 1);
    if (!is_put)
        set_free(t, e);
}

static void begin(mt_timeline *t, mt_span *s, int stamps, mt_queue *q)
{
    entry *e;

    MT_WITH(&t->mu)
        if ((e = find_entry(t)) != NULL) {
            atomic_fetch_add(&t->used, 1);
            atomic_store(&e->state, OPEN);
        }
    if (e == NULL) {
        atomic_fetch_add(&t->lost, 1);
        return;
    }
    e->stamps = stamps;
    s->at = (int)(e - t->ring);
    s->open = mark(t, e, 0, q, &s->r.begin_ns);
    if (!s->open)
        lose(t, e, 0);
}

/* Of one that is open. */
static void over(mt_timeline *t, const mt_span *s)
{
    entry *e = &t->ring[s->at];

    e->r = s->r;
    atomic_store(&e->state, OVER);
}

void mt_timeline_begin(mt_timeline *t, mt_span *s, mt_lane lane, mt_work work, int unit,
                       mt_queue *q)
{
    *s = (mt_span){ .r = { .lane = lane, .work = work, .unit = unit } };
    if (t != NULL && atomic_load_explicit(&t->on, memory_order_relaxed))
        begin(t, s, q != NULL ? 2 : 0, q);
}

void mt_timeline_end(mt_timeline *t, mt_span *s, uint64_t bytes, mt_queue *q)
{
    if (!s->open)
        return;
    s->open = 0;
    s->r.bytes = bytes;
    if (mark(t, &t->ring[s->at], 1, q, &s->r.end_ns))
        over(t, s);
    else
        lose(t, &t->ring[s->at], t->ring[s->at].stamps > 0);
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
    if (top(t) != NULL)
        mt_timeline_begin(t, top(t), MT_LANE_COMPUTE, r.work, r.unit, run);
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
    if (point.open)
        over(t, &point);
}

/* ---- reading ---------------------------------------------------------------------------- */

int64_t mt_timeline_read(mt_timeline *t, mt_record *out, int64_t cap)
{
    int64_t n = 0, first = MT_LOCKED(&t->mu, t->next);
    entry  *ring = MT_LOCKED(&t->mu, t->ring);           /* another thread may make it just now */

    MT_HOLD(&t->reading);
    for (int64_t i = 0; ring != NULL && i < KEPT && n < cap; i++) {      /* the oldest at first */
        entry *e = &ring[(first + i) % KEPT];

        if (take_known(t, e)) {
            out[n++] = e->r;
            set_free(t, e);
        }
    }
    return n;
}

uint64_t mt_timeline_lost(mt_timeline *t)
{
    return atomic_load(&t->lost);
}
