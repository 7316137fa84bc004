/* ferry.c — two queues, and three threads: one that sees updates end on the device, one that
 * copies them down and ends them, and one that raises. resident_impl.h says what for. */
#include "resident_impl.h"

#include "portion.h"

#include <stdlib.h>
#include <string.h>

#define DOWN "its weights' way to the share (the event LOWERED)"
#define UP   "the other ranks' weights (the event RAISED)"

#define CHUNK ((size_t)32 << 20)         /* bytes: under a millisecond of the bus */

/* ---- copies ------------------------------------------------------------------------------- */

/* Bytes [from, to) of plane HI that are the rank's. */
static mt_status portion_of(const mt_resident *r, int unit, int rank, size_t *from, size_t *to)
{
    mt_portion p;

    MT_DO(mt_portion_of(r->store, unit, rank, mt_share_ranks(r->cx->share), &p));
    *from = mt_portion_byte(r->store, unit, p.begin);
    *to = mt_portion_byte(r->store, unit, p.end);
    return MT_OK;
}

/* Bytes [from, to), between the share and the slot. */
static mt_status copy(const mt_resident *r, const mt__settled *h, mt_queue *q, int up, size_t from,
                      size_t to)
{
    void     *hi;
    mt_status st = mt_store_hi(r->store, h->unit, &hi);
    char     *host = (char *)hi + from, *there = (char *)h->mem + from;

    if (st != MT_OK || from == to)
        return st;
    return r->dev->ops->copy(q, up ? there : host, up ? host : there, to - from);
}

/* ---- our threads -------------------------------------------------------------------------- */

static mt_status wait_for(mt_resident *r, int unit, mt_event *e, const char *awaits)
{
    return mt_watch_sync(mt_store_watch(r->store), e, mt_store_name(r->store, unit), awaits);
}

/* Under mu. One rise brings all that came before it. */
static void submit_rise(mt_resident *r, mt__settled *h)
{
    if (!h->rise.listed)
        (void)mt_worker_submit(&r->ferry.raises, &h->rise);
}

/* The others may copy of the slot. */
static mt_status see_step(void *arg, mt_job *node)
{
    mt_resident *r = arg;
    mt__settled *h = r->units[((mt_update *)(void *)node)->j.unit];
    mt_status    st;

    mt_unlock(&r->mu);
    st = wait_for(r, h->unit, h->done, "its update on the device (the event STEPPED)");
    if (st == MT_OK)
        mt_ledger_update_stepped(r->store, h->unit);
    else
        mt_ledger_fault(r->store, st, mt_last_error());
    mt_lock(&r->mu);
    submit_rise(r, h);
    (void)mt_worker_submit(&r->ferry.ends, node);
    return st;
}

/* Lowered chunk by chunk, and ended. */
static mt_status end_update(void *arg, mt_job *node)
{
    mt_resident      *r = arg;
    struct mt__ferry *f = &r->ferry;
    const mt_dev_ops *v = r->dev->ops;
    mt_update        *u = (mt_update *)(void *)node;
    mt__settled      *h = r->units[u->j.unit];
    size_t            from, to, n, bytes = 0;
    mt_span           span;
    mt_status         st;

    mt_unlock(&r->mu);
    MT_TRY(mt_ledger_check(r->store));
    MT_TRY(portion_of(r, h->unit, mt_share_rank(r->cx->share), &from, &to));
    /* MOVED: the weights are the update's. */
    MT_TRY(mt_edge(r->cx, MT_EDGE_MOVED, f->down, h->done));
    mt_timeline_begin(r->cx->timeline, &span, MT_LANE_THROUGH, MT_WORK_OFFLOAD, h->unit, f->down);
    for (size_t at = from, i = 0; at < to; at += n, i++) {
        n = to - at < CHUNK ? to - at : CHUNK;
        MT_TRY(copy(r, h, f->down, 0, at, at + n));
        MT_TRY(v->record(f->down, f->chunks[i % 2]));
        if (i > 0)
            MT_TRY(v->sync_event(f->chunks[(i - 1) % 2]));
    }
    mt_timeline_end(r->cx->timeline, &span, bytes = to - from, f->down);
    MT_TRY(mt__record(r, h, f->down, h->lowered, &h->lowering, "weights down", DOWN));
    if (!mt_skips(r->cx, MT_EDGE_LOWERED))
        st = wait_for(r, h->unit, h->lowered, DOWN);
fail:
    mt_update_over(r->store, u, st);
    mt_lock(&r->mu);
    r->stats.d2h_bytes += bytes;
    h->trip = NULL;
    if (h->slots == NULL)
        submit_rise(r, h);
    return st;
}

static mt_status raise_unit(void *arg, mt_job *node)
{
    mt_resident *r = arg;

    mt_unlock(&r->mu);
    if (!atomic_load(&r->ferry.stopped))
        mt__raise(r, (mt__settled *)(void *)node);
    mt_lock(&r->mu);
    return MT_OK;
}

/* ---- open and close ------------------------------------------------------------------------ */

mt_status mt__ferry_open(mt_resident *r)
{
    struct mt__ferry *f = &r->ferry;
    mt_status         st;

    if (f->open)
        return MT_OK;
    MT_TRY(r->dev->ops->queue_open(r->dev, "weights down", &f->down));
    MT_TRY(r->dev->ops->queue_open(r->dev, "weights up", &f->up));
    MT_TRY(r->dev->ops->queue_open(r->dev, "other machines' weights down", &f->landing));
    MT_TRY(r->dev->ops->event_open(r->dev, &f->chunks[0]));
    MT_TRY(r->dev->ops->event_open(r->dev, &f->chunks[1]));
    MT_TRY(mt_worker_open(&f->raises, &r->mu, 1, "mt-raises", "weights up", raise_unit, r));
    MT_TRY(mt_worker_open(&f->ends, &r->mu, 1, "mt-lowers", "weights down", end_update, r));
    MT_TRY(mt_worker_open(&f->steps, &r->mu, 1, "mt-steps", "device update", see_step, r));
    f->open = 1;
    return MT_OK;
fail:
    mt__ferry_close(r);
    return st;
}

void mt__ferry_stop(mt_resident *r)
{
    struct mt__ferry *f = &r->ferry;

    atomic_store(&f->stopped, 1);            /* updates end; what was not raised is left */
    mt_worker_stop(&f->steps, 0);
    mt_worker_stop(&f->ends, 0);
    mt_worker_stop(&f->raises, 0);
}

void mt__ferry_close(mt_resident *r)
{
    struct mt__ferry *f = &r->ferry;

    mt__ferry_stop(r);
    mt_worker_close(&f->steps);
    mt_worker_close(&f->ends);
    mt_worker_close(&f->raises);
    r->dev->ops->queue_close(f->down);
    r->dev->ops->queue_close(f->up);
    r->dev->ops->queue_close(f->landing);
    r->dev->ops->event_close(f->chunks[0]);
    r->dev->ops->event_close(f->chunks[1]);
    memset(f, 0, sizeof *f);
}

mt_status mt_resident_raised(mt_resident *r)
{
    mt_watch         *watch = mt_store_watch(r->store);
    struct mt__ferry *f = &r->ferry;

    if (!f->open)
        return MT_OK;
    MT_DO(mt_worker_wait(&f->steps, watch, MT_WORKER_ALL, NULL, "updates on the device"));
    MT_DO(mt_worker_wait(&f->ends, watch, MT_WORKER_ALL, NULL, "weights on their way down"));
    MT_DO(mt_worker_wait(&f->raises, watch, MT_WORKER_ALL, NULL, "weights on their way up"));
    MT_DO(r->dev->ops->sync(f->down));
    return r->dev->ops->sync(f->up);
}

mt_status mt__ferry_reach(mt_resident *r, mt__settled *h, const mt_mem_name *names)
{
    int       ranks = r->cx->share != NULL ? mt_share_ranks(r->cx->share) : 0;
    mt_status st = MT_OK;

    for (int rank = 0; h->slots != NULL && rank < ranks; rank++)
        if (h->slots[rank] != NULL && mt_share_speaker(r->cx->share, rank) == rank)
            r->dev->ops->mem_leave(r->dev, &h->names[rank], h->slots[rank]);
    free(h->slots);
    free(h->names);
    h->slots = NULL;
    h->names = NULL;
    if (names == NULL)
        return MT_OK;
    MT_TRY(MT_MAKE(h->names, ranks, "ferry"));
    MT_TRY(MT_MAKE(h->slots, ranks, "ferry"));
    for (int rank = 0; rank < ranks; rank++) {
        h->names[rank] = names[rank];
        if (rank != mt_share_rank(r->cx->share) && mt_share_speaker(r->cx->share, rank) == rank)
            MT_TRY(r->dev->ops->mem_reach(r->dev, &names[rank], &h->slots[rank]));
    }
    for (int rank = 0; rank < ranks; rank++)             /* another machine's are in its speaker's */
        h->slots[rank] = h->slots[mt_share_speaker(r->cx->share, rank)];
    return MT_OK;
fail:
    (void)mt__ferry_reach(r, h, NULL);
    return st;
}

mt_status mt__ferry_idle(mt_resident *r, const mt__settled *h)
{
    return MT_UNTIL(mt_store_watch(r->store), &r->ferry.ends.news, &r->mu, h->trip == NULL,
                    mt_store_name(r->store, h->unit), DOWN);
}

/* ---- copies: under mu ---------------------------------------------------------------------- */

void mt__ferry_lower(mt_resident *r, mt__settled *h, mt_update *u)
{
    MT_ASSERT(mt_holds(&r->mu) && h->trip == NULL);
    h->trip = u;
    (void)mt_worker_submit(h->slots != NULL ? &r->ferry.steps : &r->ferry.ends, &u->node);
}

mt_status mt__ferry_raise(mt_resident *r, mt__settled *h)
{
    mt_queue *q = r->ferry.up;
    mt_span   span;
    uint64_t  bytes = 0;
    size_t    from, to;

    MT_ASSERT(mt_holds(&r->mu));
    mt_timeline_begin(r->cx->timeline, &span, h->slots != NULL ? MT_LANE_GATHER : MT_LANE_THROUGH,
                      MT_WORK_FETCH, h->unit, q);
    for (int rank = 0; rank < mt_share_ranks(r->cx->share); rank++) {
        /* What this rank updates, and what came from other machines for it, is there. */
        if (rank == mt_share_rank(r->cx->share) || (h->slots != NULL && h->slots[rank] == NULL))
            continue;
        MT_DO(portion_of(r, h->unit, rank, &from, &to));
        if (h->slots == NULL)
            MT_DO(copy(r, h, q, 1, from, to));
        else if (to > from)
            MT_DO(r->dev->ops->copy(q, (char *)h->mem + from, (char *)h->slots[rank] + from,
                                    to - from));
        bytes += to - from;
    }
    mt_timeline_end(r->cx->timeline, &span, bytes, q);
    r->stats.h2d_bytes += bytes;
    return mt__record(r, h, q, h->raised, &h->raising, "weights up", UP);
}

mt_status mt__ferry_land(mt_resident *r, int unit, size_t from, size_t to)
{
    mt__settled *h;
    mt_queue    *q = r->ferry.landing;
    mt_span      span;
    size_t       n;
    int          is_new;
    mt_status    st;

    MT_DO(mt__settled_find(r, unit, &h));
    mt_lock(&r->mu);
    is_new = h->writes == mt_ledger_writes(r->store, unit);  /* else the update was skipped */
    st = is_new ? r->dev->ops->wait(q, h->done) : MT_OK;     /* a fetch of what was written */
    mt_unlock(&r->mu);
    if (st != MT_OK || !is_new)
        return st;
    mt_timeline_begin(r->cx->timeline, &span, MT_LANE_THROUGH, MT_WORK_OFFLOAD, unit, q);
    for (size_t at = from; at < to; at += n) {
        n = to - at < CHUNK ? to - at : CHUNK;
        MT_DO(copy(r, h, q, 0, at, at + n));
        MT_DO(r->dev->ops->sync(q));
    }
    mt_timeline_end(r->cx->timeline, &span, to - from, q);
    MT_WITH(&r->mu) r->stats.d2h_bytes += to - from;
    return MT_OK;
}

mt_status mt__ferry_back(mt_resident *r, const mt__settled *h, mt_queue *q)
{
    int    me = mt_share_rank(r->cx->share);
    size_t from, to;

    for (int rank = 0; rank < mt_share_ranks(r->cx->share); rank++) {
        if (rank != me && (h->slots == NULL || mt_share_speaker(r->cx->share, rank) != me))
            continue;
        MT_DO(portion_of(r, h->unit, rank, &from, &to));
        MT_DO(copy(r, h, q, 1, from, to));
        r->stats.h2d_bytes += to - from;
    }
    return MT_OK;
}
