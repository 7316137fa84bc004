/* ferry.c — two queues, a thread that ends updates when they are down, and one that raises. */
#include "ferry.h"

#include "portion.h"
#include "worker.h"

#include <stdlib.h>

#define DOWN "its weights' way to the share (the event LOWERED)"
#define UP   "the other ranks' weights (the event RAISED)"

/* Of a unit. The pointers are board's; the rest under mu. */
typedef struct berth {
    mt_event *lowered, *raised;
    mt_post   lowering, raising;         /* tell the watchdog of them */
} berth;

typedef struct trip {
    mt_job        node;                  /* in `ends`, then in `raises` */
    mt_update_job j;
    mt_status     st;                    /* of putting it */
} trip;

struct mt_ferry {
    mt_context *cx;
    mt_dev     *dev;
    mt_store   *store;
    mt_mutex   *mu;
    mt_queue   *down, *up;               /* mu */
    berth     **berths;                  /* [n_berths] by unit */
    int64_t     n_berths;
    mt_worker   ends, raises;            /* trips. mu */
    void      (*raise)(void *arg, int unit);
    void       *arg;
    atomic_int  stopped;
};

/* ---- our threads -------------------------------------------------------------------------- */

static mt_status wait_lowered(mt_ferry *f, const trip *t)
{
    mt_watch *watch = mt_store_watch(f->store);
    mt_post   post;
    mt_status st;

    if (mt_skips(f->cx, MT_EDGE_LOWERED))
        return MT_OK;
    mt_watch_begin(watch, &post, NULL, mt_store_name(f->store, t->j.unit), DOWN);
    st = f->dev->ops->sync_event(f->berths[t->j.unit]->lowered);
    mt_watch_end(watch, &post, st);
    return st;
}

static mt_status end_update(void *arg, mt_job *node)
{
    mt_ferry *f = arg;
    trip     *t = (trip *)(void *)node;
    mt_status st;

    mt_unlock(f->mu);
    st = t->st != MT_OK ? t->st : wait_lowered(f, t);
    mt_job_over(f->store, &t->j, st);
    mt_lock(f->mu);
    if (st != MT_OK || f->raises.stop)
        free(t);
    else
        (void)mt_worker_submit(&f->raises, &t->node);
    return st;
}

static mt_status raise_unit(void *arg, mt_job *node)
{
    mt_ferry *f = arg;
    trip     *t = (trip *)(void *)node;

    mt_unlock(f->mu);
    if (!atomic_load(&f->stopped))
        f->raise(f->arg, t->j.unit);
    free(t);
    mt_lock(f->mu);
    return MT_OK;
}

/* ---- open and close ------------------------------------------------------------------------ */

mt_status mt_ferry_open(mt_context *cx, mt_mutex *mu, void (*raise)(void *arg, int unit),
                        void *arg, mt_ferry **out)
{
    mt_ferry *f;
    mt_status st;

    MT_TRY(MT_MAKE(f, 1, "ferry"));
    *f = (mt_ferry){ .cx = cx, .dev = cx->dev, .store = cx->store, .mu = mu, .raise = raise,
                     .arg = arg };
    MT_TRY(f->dev->ops->queue_open(f->dev, "weights down", &f->down));
    MT_TRY(f->dev->ops->queue_open(f->dev, "weights up", &f->up));
    MT_TRY(mt_worker_open(&f->raises, mu, 1, "mt-raises", "weights up", raise_unit, f));
    MT_TRY(mt_worker_open(&f->ends, mu, 1, "mt-lowers", "weights down", end_update, f));
    *out = f;
    return MT_OK;

fail:
    mt_ferry_close(f);
    return st;
}

void mt_ferry_stop(mt_ferry *f)
{
    if (f == NULL)
        return;
    atomic_store(&f->stopped, 1);
    mt_worker_stop(&f->ends, 0);
    mt_worker_stop(&f->raises, 0);
}

static void berth_close(const mt_ferry *f, berth *b)
{
    if (b == NULL)
        return;
    mt_watch_take(mt_store_watch(f->store), &b->lowering);
    mt_watch_take(mt_store_watch(f->store), &b->raising);
    f->dev->ops->event_close(b->lowered);
    f->dev->ops->event_close(b->raised);
    free(b);
}

void mt_ferry_close(mt_ferry *f)
{
    if (f == NULL)
        return;
    mt_ferry_stop(f);
    mt_worker_close(&f->ends);
    mt_worker_close(&f->raises);
    f->dev->ops->queue_close(f->down);
    f->dev->ops->queue_close(f->up);
    for (int u = 0; u < f->n_berths; u++)
        berth_close(f, f->berths[u]);
    free(f->berths);
    free(f);
}

mt_status mt_ferry_drain(mt_ferry *f)
{
    mt_watch *watch = mt_store_watch(f->store);
    mt_status st;

    MT_TRY(mt_worker_wait(&f->ends, watch, MT_WORKER_ALL, NULL, "weights on their way down"));
    MT_TRY(mt_worker_wait(&f->raises, watch, MT_WORKER_ALL, NULL, "weights on their way up"));
    MT_TRY(f->dev->ops->sync(f->down));
    st = f->dev->ops->sync(f->up);
fail:
    return st;
}

mt_status mt_ferry_board(mt_ferry *f, int unit)
{
    berth    *b = NULL;
    mt_status st;

    MT_TRY(MT_GROW(f->berths, f->n_berths, mt_store_units(f->store), "ferry"));
    MT_TRY(MT_MAKE(b, 1, "ferry"));
    MT_TRY(f->dev->ops->event_open(f->dev, &b->lowered));
    MT_TRY(f->dev->ops->event_open(f->dev, &b->raised));
    f->berths[unit] = b;
    return MT_OK;

fail:
    berth_close(f, b);
    return st;
}

void mt_ferry_land(mt_ferry *f, int unit)
{
    berth_close(f, f->berths[unit]);
    f->berths[unit] = NULL;
}

/* ---- copies: under mu ---------------------------------------------------------------------- */

/* Bytes [from, to) of plane HI that are this rank's. */
static mt_status own(const mt_ferry *f, int unit, size_t *from, size_t *to)
{
    mt_portion p;
    mt_status  st;

    MT_TRY(mt_portion_of(f->store, unit, mt_share_rank(f->cx->share),
                         mt_share_ranks(f->cx->share), &p));
    *from = mt_portion_byte(f->store, unit, p.begin);
    *to = mt_portion_byte(f->store, unit, p.end);
fail:
    return st;
}

/* Bytes [from, to), between the share and the slot. */
static mt_status copy(const mt_ferry *f, int unit, void *mem, mt_queue *q, int up, size_t from,
                      size_t to, uint64_t *bytes)
{
    void     *hi;
    mt_status st = mt_store_hi(f->store, unit, &hi);
    char     *host = (char *)hi + from, *there = (char *)mem + from;

    if (st != MT_OK || from == to)
        return st;
    *bytes += to - from;
    return f->dev->ops->copy(q, up ? there : host, up ? host : there, to - from);
}

static mt_status put_lower(mt_ferry *f, int unit, void *mem, mt_event *made, uint64_t *bytes)
{
    const mt_dev_ops *v = f->dev->ops;
    berth            *b = f->berths[unit];
    size_t            from, to;
    mt_span           span;
    uint64_t          before = *bytes;
    mt_status         st;

    MT_TRY(own(f, unit, &from, &to));
    /* MOVED: the weights are the update's. */
    if (!mt_skips(f->cx, MT_EDGE_MOVED))
        MT_TRY(v->wait(f->down, made));
    mt_timeline_begin(f->cx->timeline, &span, MT_LANE_THROUGH, MT_WORK_OFFLOAD, unit, f->down);
    MT_TRY(copy(f, unit, mem, f->down, 0, from, to, bytes));
    mt_timeline_end(f->cx->timeline, &span, *bytes - before, f->down);
    MT_TRY(v->record(f->down, b->lowered));
    mt_watch_put(mt_store_watch(f->store), &b->lowering, "weights down",
                 mt_store_name(f->store, unit), DOWN, b->lowered);
fail:
    return st;
}

mt_status mt_ferry_lower(mt_ferry *f, int unit, void *mem, mt_event *made,
                         const mt_update_job *j, uint64_t *bytes)
{
    trip     *t;
    mt_status st = MT_MAKE(t, 1, mt_store_name(f->store, unit));

    MT_ASSERT(mt_holds(f->mu));
    if (st != MT_OK) {
        mt_job_over(f->store, j, st);
        return st;
    }
    t->j = *j;
    t->st = st = put_lower(f, unit, mem, made, bytes);
    if (st != MT_OK)
        mt_ledger_fault(f->store, st, mt_last_error());
    (void)mt_worker_submit(&f->ends, &t->node);
    return st;
}

mt_status mt_ferry_raise(mt_ferry *f, int unit, void *mem, uint64_t *bytes)
{
    berth    *b = f->berths[unit];
    size_t    from, to;
    mt_span   span;
    uint64_t  before = *bytes;
    mt_status st;

    MT_ASSERT(mt_holds(f->mu));
    MT_TRY(own(f, unit, &from, &to));
    mt_timeline_begin(f->cx->timeline, &span, MT_LANE_THROUGH, MT_WORK_FETCH, unit, f->up);
    MT_TRY(copy(f, unit, mem, f->up, 1, 0, from, bytes));
    MT_TRY(copy(f, unit, mem, f->up, 1, to, mt_store_hi_bytes(f->store, unit), bytes));
    mt_timeline_end(f->cx->timeline, &span, *bytes - before, f->up);
    MT_TRY(f->dev->ops->record(f->up, b->raised));
    mt_watch_put(mt_store_watch(f->store), &b->raising, "weights up",
                 mt_store_name(f->store, unit), UP, b->raised);
fail:
    return st;
}

mt_status mt_ferry_return(mt_ferry *f, int unit, void *mem, mt_queue *q, uint64_t *bytes)
{
    size_t    from, to;
    mt_status st = own(f, unit, &from, &to);

    return st == MT_OK ? copy(f, unit, mem, q, 1, from, to, bytes) : st;
}

mt_status mt_ferry_before(mt_ferry *f, int unit, mt_queue *q)
{
    return mt_skips(f->cx, MT_EDGE_LOWERED) ? MT_OK
                                            : f->dev->ops->wait(q, f->berths[unit]->lowered);
}

mt_status mt_ferry_await(mt_ferry *f, int unit, mt_queue *run)
{
    return mt_skips(f->cx, MT_EDGE_RAISED) ? MT_OK
                                           : f->dev->ops->wait(run, f->berths[unit]->raised);
}

mt_queue *mt_ferry_up(mt_ferry *f)
{
    return f->up;
}
