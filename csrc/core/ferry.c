/* ferry.c — two queues, and three threads: one that sees updates end on the device, one that
 * copies them down and ends them, and one that raises. */
#include "ferry.h"

#include "portion.h"
#include "worker.h"

#include <stdlib.h>

#define DOWN "its weights' way to the share (the event LOWERED)"
#define UP   "the other ranks' weights (the event RAISED)"

#define CHUNK ((size_t)32 << 20)         /* bytes: under a millisecond of the bus */

/* Of a unit. The pointers are board's and reach's; the rest under mu. */
typedef struct berth {
    mt_job       rise;                   /* in `raises`, once or not */
    int          unit;
    mt_event    *lowered, *raised;
    mt_post      lowering;               /* of `ends`'s thread: tells the watchdog */
    mt_post      raising;
    mt_mem_name *names;                  /* [ranks] of slots. These two NULL: out of reach */
    void       **slots;                  /* [ranks] where they are here; NULL: its own */
    mt_update   *trip;                   /* in `steps`, where slots are within reach, then `ends`;
                                          * NULL: none was lowered that has not ended */
    void        *mem;                    /* of the trip: slot, and the event behind the update */
    mt_event    *made;
} berth;

struct mt_ferry {
    mt_context *cx;
    mt_dev     *dev;
    mt_store   *store;
    mt_mutex   *mu;
    mt_queue   *down, *up;               /* down: `ends`'s thread; up: mu */
    mt_event   *chunks[2];               /* recorded on down, in turns */
    _Atomic uint64_t lowered;            /* bytes */
    berth     **berths;                  /* [n_berths] by unit */
    int64_t     n_berths;
    mt_worker   steps, ends, raises;     /* mu */
    void      (*raise)(void *arg, int unit);
    void       *arg;
    atomic_int  stopped;
};

/* ---- copies ------------------------------------------------------------------------------- */

/* Bytes [from, to) of plane HI that are the rank's. */
static mt_status portion_of(const mt_ferry *f, int unit, int rank, size_t *from, size_t *to)
{
    mt_portion p;

    MT_DO(mt_portion_of(f->store, unit, rank, mt_share_ranks(f->cx->share), &p));
    *from = mt_portion_byte(f->store, unit, p.begin);
    *to = mt_portion_byte(f->store, unit, p.end);
    return MT_OK;
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

/* ---- our threads -------------------------------------------------------------------------- */

static mt_status wait_for(mt_ferry *f, int unit, mt_event *e, const char *awaits)
{
    return mt_watch_sync(mt_store_watch(f->store), e, mt_store_name(f->store, unit), awaits);
}

/* Under mu. One rise brings all that came before it. */
static void submit_rise(mt_ferry *f, berth *b)
{
    if (!b->rise.listed)
        (void)mt_worker_submit(&f->raises, &b->rise);
}

/* The others may copy of the slot. */
static mt_status see_step(void *arg, mt_job *node)
{
    mt_ferry *f = arg;
    int       unit = ((mt_update *)(void *)node)->j.unit;
    berth    *b = f->berths[unit];
    mt_status st;

    mt_unlock(f->mu);
    st = wait_for(f, unit, b->made, "its update on the device (the event STEPPED)");
    if (st == MT_OK)
        mt_ledger_update_stepped(f->store, unit);
    else
        mt_ledger_fault(f->store, st, mt_last_error());
    mt_lock(f->mu);
    submit_rise(f, b);
    (void)mt_worker_submit(&f->ends, node);
    return st;
}

/* Chunk by chunk. */
static mt_status lower(mt_ferry *f, berth *b)
{
    const mt_dev_ops *v = f->dev->ops;
    mt_span           span;
    uint64_t          bytes = 0;
    size_t            from, to, n;

    MT_DO(portion_of(f, b->unit, mt_share_rank(f->cx->share), &from, &to));
    /* MOVED: the weights are the update's. */
    MT_DO(mt_edge(f->cx, MT_EDGE_MOVED, f->down, b->made));
    mt_timeline_begin(f->cx->timeline, &span, MT_LANE_THROUGH, MT_WORK_OFFLOAD, b->unit, f->down);
    for (size_t at = from, i = 0; at < to; at += n, i++) {
        n = to - at < CHUNK ? to - at : CHUNK;
        MT_DO(copy(f, b->unit, b->mem, f->down, 0, at, at + n, &bytes));
        MT_DO(v->record(f->down, f->chunks[i % 2]));
        if (i > 0)
            MT_DO(v->sync_event(f->chunks[(i - 1) % 2]));
    }
    mt_timeline_end(f->cx->timeline, &span, bytes, f->down);
    atomic_fetch_add(&f->lowered, bytes);
    MT_DO(v->record(f->down, b->lowered));
    mt_watch_put(mt_store_watch(f->store), &b->lowering, "weights down",
                 mt_store_name(f->store, b->unit), DOWN, b->lowered);
    return mt_skips(f->cx, MT_EDGE_LOWERED) ? MT_OK : wait_for(f, b->unit, b->lowered, DOWN);
}

static mt_status end_update(void *arg, mt_job *node)
{
    mt_ferry  *f = arg;
    mt_update *u = (mt_update *)(void *)node;
    berth     *b = f->berths[u->j.unit];
    mt_status  st;

    mt_unlock(f->mu);
    if ((st = mt_ledger_check(f->store)) == MT_OK)
        st = lower(f, b);
    mt_update_over(f->store, u, st);
    mt_lock(f->mu);
    b->trip = NULL;
    if (b->slots == NULL)
        submit_rise(f, b);
    return st;
}

static mt_status raise_unit(void *arg, mt_job *node)
{
    mt_ferry *f = arg;

    mt_unlock(f->mu);
    if (!atomic_load(&f->stopped))
        f->raise(f->arg, ((berth *)(void *)node)->unit);
    mt_lock(f->mu);
    return MT_OK;
}

/* ---- open and close ------------------------------------------------------------------------ */

MT_CLOSER(mt_ferry_close, mt_ferry)

mt_status mt_ferry_open(mt_context *cx, mt_mutex *mu, void (*raise)(void *arg, int unit),
                        void *arg, mt_ferry **out)
{
    mt_ferry *f MT_CLOSED(mt_ferry_close) = NULL;

    MT_DO(MT_MAKE(f, 1, "ferry"));
    *f = (mt_ferry){ .cx = cx, .dev = cx->dev, .store = cx->store, .mu = mu, .raise = raise,
                     .arg = arg };
    MT_DO(f->dev->ops->queue_open(f->dev, "weights down", &f->down));
    MT_DO(f->dev->ops->queue_open(f->dev, "weights up", &f->up));
    MT_DO(f->dev->ops->event_open(f->dev, &f->chunks[0]));
    MT_DO(f->dev->ops->event_open(f->dev, &f->chunks[1]));
    MT_DO(mt_worker_open(&f->raises, mu, 1, "mt-raises", "weights up", raise_unit, f));
    MT_DO(mt_worker_open(&f->ends, mu, 1, "mt-lowers", "weights down", end_update, f));
    MT_DO(mt_worker_open(&f->steps, mu, 1, "mt-steps", "device update", see_step, f));
    *out = MT_KEEP(f);
    return MT_OK;
}

static void leave(const mt_ferry *f, berth *b)
{
    for (int rank = 0; b->slots != NULL && rank < mt_share_ranks(f->cx->share); rank++)
        if (b->slots[rank] != NULL)
            f->dev->ops->mem_leave(f->dev, &b->names[rank], b->slots[rank]);
    free(b->slots);
    free(b->names);
    b->slots = NULL;
    b->names = NULL;
}

static void berth_close(const mt_ferry *f, berth *b)
{
    if (b == NULL)
        return;
    leave(f, b);
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
    atomic_store(&f->stopped, 1);            /* updates end; what was not raised is left */
    mt_worker_close(&f->steps);
    mt_worker_close(&f->ends);
    mt_worker_close(&f->raises);
    f->dev->ops->queue_close(f->down);
    f->dev->ops->queue_close(f->up);
    f->dev->ops->event_close(f->chunks[0]);
    f->dev->ops->event_close(f->chunks[1]);
    for (int u = 0; u < f->n_berths; u++)
        berth_close(f, f->berths[u]);
    free(f->berths);
    free(f);
}

mt_status mt_ferry_drain(mt_ferry *f)
{
    mt_watch *watch = mt_store_watch(f->store);

    MT_DO(mt_worker_wait(&f->steps, watch, MT_WORKER_ALL, NULL, "updates on the device"));
    MT_DO(mt_worker_wait(&f->ends, watch, MT_WORKER_ALL, NULL, "weights on their way down"));
    MT_DO(mt_worker_wait(&f->raises, watch, MT_WORKER_ALL, NULL, "weights on their way up"));
    MT_DO(f->dev->ops->sync(f->down));
    return f->dev->ops->sync(f->up);
}

mt_status mt_ferry_board(mt_ferry *f, int unit)
{
    berth    *b = NULL;
    mt_status st;

    MT_TRY(MT_GROW(f->berths, f->n_berths, mt_store_units(f->store), "ferry"));
    MT_TRY(MT_MAKE(b, 1, "ferry"));
    b->unit = unit;
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
    if (f == NULL)
        return;
    berth_close(f, f->berths[unit]);
    f->berths[unit] = NULL;
}

mt_status mt_ferry_reach(mt_ferry *f, int unit, const mt_mem_name *names)
{
    int       ranks = mt_share_ranks(f->cx->share);
    berth    *b = f->berths[unit];
    mt_status st = MT_OK;

    leave(f, b);
    if (names == NULL)
        return MT_OK;
    MT_TRY(MT_MAKE(b->names, ranks, "ferry"));
    MT_TRY(MT_MAKE(b->slots, ranks, "ferry"));
    for (int rank = 0; rank < ranks; rank++) {
        b->names[rank] = names[rank];
        if (rank != mt_share_rank(f->cx->share))
            MT_TRY(f->dev->ops->mem_reach(f->dev, &names[rank], &b->slots[rank]));
    }
    return MT_OK;
fail:
    leave(f, b);
    return st;
}

mt_status mt_ferry_idle(mt_ferry *f, int unit)
{
    const berth *b = f->berths[unit];

    return MT_UNTIL(mt_store_watch(f->store), &f->ends.news, f->mu, b->trip == NULL,
                    mt_store_name(f->store, unit), DOWN);
}

/* ---- copies: under mu ---------------------------------------------------------------------- */

void mt_ferry_lower(mt_ferry *f, void *mem, mt_event *made, mt_update *u)
{
    berth *b = f->berths[u->j.unit];

    MT_ASSERT(mt_holds(f->mu) && b->trip == NULL);
    b->trip = u;
    b->mem = mem;
    b->made = made;
    (void)mt_worker_submit(b->slots != NULL ? &f->steps : &f->ends, &u->node);
}

mt_status mt_ferry_raise(mt_ferry *f, int unit, void *mem, uint64_t *bytes)
{
    berth   *b = f->berths[unit];
    mt_span  span;
    uint64_t before = *bytes;
    size_t   from, to;

    MT_ASSERT(mt_holds(f->mu));
    mt_timeline_begin(f->cx->timeline, &span, b->slots != NULL ? MT_LANE_GATHER : MT_LANE_THROUGH,
                      MT_WORK_FETCH, unit, f->up);
    for (int rank = 0; rank < mt_share_ranks(f->cx->share); rank++) {
        if (rank == mt_share_rank(f->cx->share))
            continue;
        MT_DO(portion_of(f, unit, rank, &from, &to));
        if (b->slots == NULL)
            MT_DO(copy(f, unit, mem, f->up, 1, from, to, bytes));
        else if (to > from)
            MT_DO(f->dev->ops->copy(f->up, (char *)mem + from, (char *)b->slots[rank] + from,
                                    to - from));
        *bytes += b->slots != NULL ? to - from : 0;
    }
    mt_timeline_end(f->cx->timeline, &span, *bytes - before, f->up);
    MT_DO(f->dev->ops->record(f->up, b->raised));
    mt_watch_put(mt_store_watch(f->store), &b->raising, "weights up",
                 mt_store_name(f->store, unit), UP, b->raised);
    return MT_OK;
}

mt_status mt_ferry_return(mt_ferry *f, int unit, void *mem, mt_queue *q, uint64_t *bytes)
{
    size_t from, to;

    MT_DO(portion_of(f, unit, mt_share_rank(f->cx->share), &from, &to));
    return copy(f, unit, mem, q, 1, from, to, bytes);
}

mt_status mt_ferry_await(mt_ferry *f, int unit, mt_queue *run)
{
    return mt_edge(f->cx, MT_EDGE_RAISED, run, f->berths[unit]->raised);
}

mt_queue *mt_ferry_up(mt_ferry *f)
{
    return f->up;
}

uint64_t mt_ferry_lowered(const mt_ferry *f)
{
    return atomic_load(&f->lowered);
}
