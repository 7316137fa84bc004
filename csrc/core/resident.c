/* resident.c — one queue for all that is done to the planes of settled units.
 *
 * A unit's weights are in its slot, and host memory mirrors them (mirror.h). What the host has
 * ahead of the slot is fetched by the next take, await or update; what is torn, a write that did
 * not wait for the copy it changed, is refused: a fetch would undo the update.
 *
 * The next await of a unit gives the memory of stale copies back: in a loop of one thread that is
 * behind whatever read them, a backward in which the update began included.
 *
 * The ferry: an all-gather of updated weights between ranks that have them on their devices. Each
 * rank has the whole weights of a settled unit in a slot, and updates its own portion there. The
 * others copy that portion from slot to slot, where slots are within each other's reach (NVLink, or
 * peer access over PCIe): 2 (N - 1) / N bytes of a parameter. It also goes down to the share, where
 * every process reads weights whatever the unit's home: 2 / N bytes. Ranks whose slots are out of
 * reach fetch it up from there. Weights that are aloft (mirror.c) do not go down: frozen ones, that
 * are the same in all slots, and trained ones where slots are within reach of all on one machine;
 * of these other slots have news until they are raised. Only what was updated moves. Other
 * machines' portions come into the slot of who speaks for their rank (relay.h), and go down to the
 * share from there. No rank waits at a collective.
 *
 * Units are raised in the order in which their updates were put, ahead of their windows; an await
 * that comes before does it itself. They are lowered in chunks, two in the queue at a time: a
 * device has one engine for copies to the host, and a value that somebody reads waits behind all of
 * them.
 */
#include "resident_impl.h"

#include <stdlib.h>
#include <string.h>

#define HI    (1u << MT_PLANE_HI)
#define IS(x) (1u << MT_MIRROR_##x)

#define DONE "its updates and copies on the device (the event STEPPED)"
#define DOWN "its weights' way to the share (the event LOWERED)"
#define UP   "the other ranks' weights (the event RAISED)"

#define CHUNK ((size_t)32 << 20)         /* bytes that go down at a time: under a millisecond */

/* Under mu, at each door: a guest has its events, and parts as long as it stays. */
void mt__assert_settled(const mt_resident *r, const mt__settled *h)
{
    MT_ASSERT(mt_holds(&r->mu));
    MT_ASSERT(r->units[h->unit] == h && h->mem != NULL && h->done != NULL && h->used != NULL);
    MT_ASSERT(mt_store_home(r->store, h->unit, NULL)->later == HI);
    MT_ASSERT(!mt_arrive_invited(r, h->unit) || (h->last != NULL && h->vacant != NULL));
    MT_ASSERT(h->parts != NULL || h->n == 0);
    MT_ASSERT((r->scratch == NULL) == (r->scratch_bytes == 0));
}

/* Under mu. Behind what was put in q for the unit. */
mt_status mt__record(const mt_resident *r, const mt__settled *h, mt_queue *q, mt_event *e,
                     mt_post *post, const char *queue, const char *awaits)
{
    MT_DO(r->dev->ops->record(q, e));
    mt_watch_put(mt_store_watch(r->store), post, queue, mt_store_name(r->store, h->unit), awaits,
                 e);
    return MT_OK;
}

/* ---- the ferry -------------------------------------------------------------------------- */

/* The parameter's weights go from slot to slot, and are not kept on the host. */
static int is_aloft(const mt_resident *r, const mt__settled *h, int i)
{
    return h->slots != NULL && mt_mirror_aloft(r->store, h->unit, i);
}

/* Under mu. Into the slot, from plane HI or another slot at src: of bytes [from, to) those of
 * parameters of which the host is ahead, or (news) other slots are; *bytes grows by as many. The
 * others' are in the slot, and perhaps not in host memory (mirror.c). */
static mt_status copy_ahead(const mt_resident *r, const mt__settled *h, mt_queue *q, int news,
                            const char *src, size_t from, size_t to, uint64_t *bytes)
{
    int    n = mt_store_params(r->store, h->unit);
    size_t begin = from, end;

    for (int i = 0; i <= n; i++) {                       /* what lies side by side goes at once */
        if (i < n && (news ? h->news[i] : mt_mirror_any(r->store, h->unit, i, HI,
                                                        IS(AHEAD) | IS(STORING))))
            continue;
        end = i < n && mt_store_offset(r->store, h->unit, i) < to
            ? mt_store_offset(r->store, h->unit, i) : to;
        if (begin < end) {
            MT_DO(r->dev->ops->copy(q, (char *)h->mem + begin, src + begin, end - begin));
            *bytes += end - begin;
        }
        end = i + 1 < n ? mt_store_offset(r->store, h->unit, i + 1) : to;
        begin = end > from ? end : from;
    }
    return MT_OK;
}

/* Under mu. So of the others' portions, or of this rank's own and those that came for it from other
 * machines, of which only what is updated comes again. */
static mt_status copy_portions(const mt_resident *r, const mt__settled *h, mt_queue *q, int own,
                               int news, uint64_t *bytes)
{
    int    ranks = mt_share_ranks(r->cx->share);
    size_t from, to;
    void  *hi, *slot;

    MT_DO(mt_store_hi(r->store, h->unit, &hi));
    for (int rank = 0; rank < ranks; rank++) {
        slot = h->slots != NULL ? h->slots[rank] : NULL;
        if (own != (h->slots != NULL ? slot == NULL : rank == mt_share_rank(r->cx->share)))
            continue;
        MT_DO(mt_portion_bytes(r->store, h->unit, rank, ranks, &from, &to));
        MT_DO(copy_ahead(r, h, q, news, slot != NULL ? slot : hi, from, to, bytes));
    }
    return MT_OK;
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
    st = mt_watch_sync(mt_store_watch(r->store), h->done, mt_store_name(r->store, h->unit),
                       "its update on the device (the event STEPPED)");
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
    void             *hi;
    mt_span           span;
    mt_status         st;

    mt_unlock(&r->mu);
    MT_TRY(mt_ledger_check(r->store));
    MT_TRY(mt_store_hi(r->store, h->unit, &hi));
    MT_TRY(mt_portion_bytes(r->store, h->unit, mt_share_rank(r->cx->share),
                            mt_share_ranks(r->cx->share), &from, &to));
    /* MOVED: the weights are the update's. */
    MT_TRY(mt_edge(r->cx, MT_EDGE_MOVED, f->down, h->done));
    mt_timeline_begin(r->cx->timeline, &span, MT_LANE_THROUGH, MT_WORK_OFFLOAD, h->unit, f->down);
    for (int k = 0, i = 0; k < u->j.n_params; k++) {         /* of the others nothing is new */
        const mt_param_desc *d = mt_store_desc(r->store, h->unit, u->j.params[k]);
        size_t at = mt_store_offset(r->store, h->unit, u->j.params[k]);
        size_t end = at + (size_t)d->numel * mt_dtype_bytes(d->dtype);

        if (is_aloft(r, h, u->j.params[k]))
            continue;
        for (at = at < from ? from : at, end = end > to ? to : end; at < end; at += n, bytes += n) {
            n = end - at < CHUNK ? end - at : CHUNK;
            MT_TRY(v->copy(f->down, (char *)hi + at, (char *)h->mem + at, n));
            MT_TRY(v->record(f->down, f->chunks[i % 2]));
            if (i++ > 0)
                MT_TRY(v->sync_event(f->chunks[i % 2]));
        }
    }
    mt_timeline_end(r->cx->timeline, &span, bytes, f->down);
    MT_TRY(mt__record(r, h, f->down, h->lowered, &h->lowering, "weights down", DOWN));
    if (!mt_skips(r->cx, MT_EDGE_LOWERED))
        st = mt_watch_sync(mt_store_watch(r->store), h->lowered, mt_store_name(r->store, h->unit),
                           DOWN);
fail:
    mt_update_over(r->store, u, st);
    mt_lock(&r->mu);
    r->stats.d2h_bytes += bytes;
    h->trip = NULL;
    if (h->slots == NULL)
        submit_rise(r, h);
    return st;
}

static mt_status raise_unit(void *arg, mt_job *node);

/* All that was begun has ended. */
static void ferry_stop(mt_resident *r)
{
    struct mt__ferry *f = &r->ferry;

    atomic_store(&f->stopped, 1);            /* updates end; what was not raised is left */
    mt_worker_stop(&f->steps, 0);
    mt_worker_stop(&f->ends, 0);
    mt_worker_stop(&f->raises, 0);
}

static void ferry_close(mt_resident *r)
{
    struct mt__ferry *f = &r->ferry;

    ferry_stop(r);
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

/* Where it is not. */
static mt_status ferry_open(mt_resident *r)
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
    ferry_close(r);
    return st;
}

/* As mt_resident_reach; names NULL: what was reached is left. */
static mt_status reach(mt_resident *r, mt__settled *h, const mt_mem_name *names)
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
    for (int rank = 0; rank < ranks; rank++)     /* another machine's: in its speaker's */
        h->slots[rank] = h->slots[mt_share_speaker(r->cx->share, rank)];
    return MT_OK;
fail:
    (void)reach(r, h, NULL);
    return st;
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

/* ---- open and close --------------------------------------------------------------------- */

MT_CLOSER(mt_resident_close, mt_resident)

mt_status mt_resident_open(mt_context *cx, mt_resident **out)
{
    mt_resident *r MT_CLOSED(mt_resident_close) = NULL;

    MT_DO(MT_MAKE(r, 1, "resident"));
    *r = (mt_resident){ .cx = cx, .dev = cx->dev, .store = cx->store };
    mt_mutex_open(&r->mu, MT_RANK_RESIDENT);
    MT_DO(r->dev->ops->event_open(r->dev, &r->drained));
    MT_DO(r->dev->ops->queue_open(r->dev, "resident", &r->queue));
    *out = cx->residents = MT_KEEP(r);
    return MT_OK;
}

static void settled_close(mt_resident *r, mt__settled *h)
{
    mt_watch *watch = mt_store_watch(r->store);

    if (h == NULL)
        return;
    mt__arrive_close(r, h);
    (void)reach(r, h, NULL);
    mt_watch_take(watch, &h->post);
    mt_watch_take(watch, &h->using);
    mt_watch_take(watch, &h->lowering);
    mt_watch_take(watch, &h->raising);
    r->dev->ops->event_close(h->done);
    r->dev->ops->event_close(h->used);
    r->dev->ops->event_close(h->lowered);
    r->dev->ops->event_close(h->raised);
    free(h->news);
    free(h);
}

void mt_resident_close(mt_resident *r)
{
    if (r == NULL)
        return;
    if (r->cx->residents == r)
        r->cx->residents = NULL;
    ferry_stop(r);                       /* first: a raise waits for what the relay hears */
    mt_store_serve_end(r->store);
    ferry_close(r);
    r->dev->ops->queue_close(r->queue);
    r->dev->ops->queue_close(r->guests);
    for (int u = 0; u < r->n_units; u++)
        if (r->units[u] != NULL) {
            mt_mirror_close(r->store, u);
            settled_close(r, r->units[u]);
        }
    r->dev->ops->event_close(r->drained);
    r->dev->ops->event_close(r->all_left);
    r->dev->ops->mem_free(r->dev, r->scratch);
    mt_store_device_close(r->store);
    mt_mutex_close(&r->mu);
    free(r->units);
    free(r);
}

/* Of the unit: planes that are on the device around its update alone. */
static unsigned visiting(const mt_resident *r, int unit)
{
    return mt_store_home(r->store, unit, NULL)->visit;
}

/* ---- settling --------------------------------------------------------------------------- */

mt_status mt_resident_settle(mt_resident *r, int unit, void *mem)
{
    mt__settled *h = NULL;
    mt_status    st;

    if (unit < 0 || unit >= mt_store_units(r->store) || mem == NULL)
        return MT_FAIL(MT_EINVAL, "resident: unit %d in memory at %p; the store has %d units",
                       unit, mem, mt_store_units(r->store));
    if (mt_resident_mem(r, unit) != NULL)
        return MT_FAIL(MT_ESTATE, "unit %s is settled already", mt_store_name(r->store, unit));
    MT_TRY(MT_LOCKED(&r->mu, MT_GROW(r->units, r->n_units, mt_store_units(r->store), "resident")));
    MT_TRY(MT_MAKE(h, 1, "resident"));
    h->unit = unit;
    h->mem = mem;
    h->writes = UINT64_MAX;                  /* it has none */
    MT_TRY(r->dev->ops->event_open(r->dev, &h->done));
    MT_TRY(r->dev->ops->event_open(r->dev, &h->used));
    if (r->cx->share != NULL) {
        MT_TRY(ferry_open(r));
        MT_TRY(r->dev->ops->event_open(r->dev, &h->lowered));
        MT_TRY(r->dev->ops->event_open(r->dev, &h->raised));
        MT_TRY(MT_MAKE(h->news, mt_store_params(r->store, unit), "resident"));
    }
    MT_WITH(&r->mu) r->units[unit] = h;      /* before another rank may ask for its planes */
    if ((st = mt_store_move(r->store, unit, &mt_home_vram, r)) == MT_OK)
        return MT_OK;
    MT_WITH(&r->mu) r->units[unit] = NULL;

fail:
    settled_close(r, h);
    return st;
}

mt_status mt__settled_find(const mt_resident *r, int unit, mt__settled **out)
{
    if (unit < 0 || unit >= r->n_units || r->units[unit] == NULL)
        return MT_FAIL(MT_EINVAL, "unit %d (%s) is not settled", unit,
                       mt_store_name(r->store, unit));
    *out = r->units[unit];
    return MT_OK;
}

mt_status mt_resident_reach(mt_resident *r, int unit, const mt_mem_name *names)
{
    mt__settled *h;

    MT_DO(mt__settled_find(r, unit, &h));
    MT_DO(mt_resident_raised(r));            /* nothing is copied from what is left */
    return reach(r, h, names);
}

void *mt_resident_mem(const mt_resident *r, int unit)
{
    return unit >= 0 && unit < r->n_units && r->units[unit] != NULL ? r->units[unit]->mem : NULL;
}

mt_status mt_resident_at(mt_resident *r, int unit, int param, mt_plane p, void **out)
{
    mt__settled *h;

    MT_DO(mt__settled_find(r, unit, &h));
    if (visiting(r, unit) >> p & 1)
        return MT_FAIL(MT_ESTATE, "unit %s: its plane %s is on the device around its updates alone",
                       mt_store_name(r->store, unit), mt_plane_name(p));
    if (p != MT_PLANE_HI || mt_store_desc(r->store, unit, param) == NULL)
        return mt_store_device_at(r->store, unit, param, p, out);
    *out = (char *)h->mem + mt_store_offset(r->store, unit, param);
    return MT_OK;
}

static mt_status record_done(mt_resident *r, mt__settled *h)
{
    return mt__record(r, h, r->queue, h->done, &h->post, "device update", DONE);
}

static mt_status wait_drained(mt_resident *r)
{
    return mt_watch_event(mt_store_watch(r->store), r->drained, NULL,
                          "all that residents were given");
}

/* On the host. */
static mt_status wait_done(mt_resident *r, const mt__settled *h)
{
    return mt_watch_event(mt_store_watch(r->store), h->done, mt_store_name(r->store, h->unit),
                          DONE);
}

/* ---- weights up ------------------------------------------------------------------------- */

/* Has the host weights that the slot has not? */
static int is_ahead(const mt_resident *r, int unit)
{
    return mt_mirror_any(r->store, unit, -1, HI, IS(AHEAD) | IS(TORN));
}

/* Under mu. What other ranks have updated comes up: of weights that are aloft (news), or of those
 * that the host is ahead of. */
static mt_status put_raise(mt_resident *r, mt__settled *h, int news)
{
    mt_queue *q = r->ferry.up;
    uint64_t  bytes = 0;
    mt_span   span;

    mt_timeline_begin(r->cx->timeline, &span, h->slots != NULL ? MT_LANE_GATHER : MT_LANE_THROUGH,
                      MT_WORK_FETCH, h->unit, q);
    MT_DO(copy_portions(r, h, q, 0, news, &bytes));
    mt_timeline_end(r->cx->timeline, &span, bytes, q);
    r->stats.h2d_bytes += bytes;
    if (news) {
        memset(h->news, 0, (size_t)mt_store_params(r->store, h->unit));
        h->has_news = 0;
    }
    return mt__record(r, h, q, h->raised, &h->raising, "weights up", UP);
}

/* Under mu. Nothing to do when somebody was here before. In a share all that is ahead is copied
 * where some was written from outside, else what other ranks have updated. run NULL: the queue has
 * waited for it. *q: the queue that the copy was put in, which reads the share. */
static mt_status put_fetch(mt_resident *r, mt__settled *h, mt_queue *run, mt_queue **q)
{
    int       unit = h->unit;
    uint64_t  writes = mt_ledger_writes(r->store, unit);
    uint64_t  bytes = 0;
    void     *hi;
    mt_span   span;
    mt_status st;

    *q = h->has_news ? r->ferry.up : r->queue;
    if (h->has_news)
        MT_DO(put_raise(r, h, 1));
    if (!is_ahead(r, unit))
        return MT_OK;
    /* In a share what is not on the host is as it is here. */
    if (mt_mirror_any(r->store, unit, -1, HI,
                      IS(TORN) | (r->ferry.open ? 0 : IS(STALE) | IS(LOADING))))
        return MT_FAIL(MT_ESTATE, "unit %s: its weights were written on the host where they were "
                       "older than the device's; they must be brought before",
                       mt_store_name(r->store, unit));
    /* All that is AHEAD is STORING when it is put, so a write from then on is AHEAD again. */
    mt_mirror_tell(r->store, unit, -1, HI, MT_MIRROR_STORE);
    if (r->ferry.open && h->writes == writes) {
        *q = r->ferry.up;
        MT_TRY(put_raise(r, h, 0));
    } else {
        *q = r->queue;
        if (r->ferry.open)                   /* what it raised is older */
            MT_TRY(mt_edge(r->cx, MT_EDGE_RAISED, r->queue, h->raised));
        MT_TRY(mt_store_hi(r->store, unit, &hi));
        /* FREED: compute on the weights that are overwritten was put in run before. */
        if (run != NULL && !mt_skips(r->cx, MT_EDGE_FREED)) {
            MT_TRY(r->dev->ops->record(run, h->used));
            mt_watch_put(mt_store_watch(r->store), &h->using, mt_compute,
                         mt_store_name(r->store, unit),
                         "kernels that read its weights (the event FREED)", h->used);
            MT_TRY(r->dev->ops->wait(r->queue, h->used));
        }
        mt_timeline_begin(r->cx->timeline, &span, MT_LANE_DEVICE, MT_WORK_FETCH, unit, r->queue);
        MT_TRY(copy_ahead(r, h, r->queue, 0, hi, 0, mt_store_hi_bytes(r->store, unit), &bytes));
        mt_timeline_end(r->cx->timeline, &span, bytes, r->queue);
        MT_TRY(record_done(r, h));
        r->stats.fetches++;
        r->stats.h2d_bytes += bytes;
        h->writes = writes;
    }
fail:
    mt_mirror_tell(r->store, unit, -1, HI, st == MT_OK ? MT_MIRROR_STORED : MT_MIRROR_SET);
    return st;
}

/* The ledger is told as by the stream's mover: host writers wait until the copy is over. */
static mt_status fetch(mt_resident *r, mt__settled *h, mt_queue *run)
{
    uint64_t  version;
    mt_queue *q;
    mt_status st, end;

    MT_DO(mt_ledger_fetch_begin(r->store, h->unit, &version));
    mt_lock(&r->mu);
    mt__assert_settled(r, h);
    if ((st = put_fetch(r, h, run, &q)) != MT_OK)
        mt_ledger_fault(r->store, st, mt_last_error());
    end = mt_ledger_fetching(r->store, h->unit, q);
    mt_unlock(&r->mu);
    return st != MT_OK ? st : end;
}

/* Asks for what other ranks have updated. What was written from outside is left to await, which
 * knows what computes. */
static mt_status catch_up(mt_resident *r, mt__settled *h)
{
    mt_queue *q = r->ferry.up;
    uint64_t  version;
    mt_status st = MT_OK, end;

    MT_DO(mt_ledger_fetch_begin(r->store, h->unit, &version));
    MT_HOLD(&r->mu);
    if (h->writes == mt_ledger_writes(r->store, h->unit))
        st = put_fetch(r, h, NULL, &q);
    else if (h->has_news)
        st = put_raise(r, h, 1);
    end = mt_ledger_fetching(r->store, h->unit, q);
    st = st != MT_OK ? st : end;
    if (st != MT_OK)
        mt_ledger_fault(r->store, st, mt_last_error());
    return st;
}

/* Its thread. */
static mt_status raise_unit(void *arg, mt_job *node)
{
    mt_resident *r = arg;

    mt_unlock(&r->mu);
    if (!atomic_load(&r->ferry.stopped))
        (void)catch_up(r, (mt__settled *)(void *)node);
    mt_lock(&r->mu);
    return MT_OK;
}

mt_status mt_resident_await(mt_resident *r, int unit, mt_queue *run)
{
    mt__settled *h;

    MT_DO(mt__settled_find(r, unit, &h));
    /* UPDATED: `done` is not recorded before the update is put. */
    if (!mt_skips(r->cx, MT_EDGE_UPDATED))
        MT_DO(mt_ledger_wait_stepped(r->store, unit));
    /* FETCHED: a fetch of what was written there before the update may be in the queue still. While
     * a save has the unit, which brings what is newer, nothing is forgotten: the next await is soon
     * enough. */
    if (mt_mirror_is_old(r->store, unit) && !mt_ledger_saving(r->store, unit)) {
        if (!mt_skips(r->cx, MT_EDGE_FETCHED))
            MT_DO(mt_ledger_wait_fetch(r->store, unit));
        mt_mirror_forget(r->store, unit);
    }
    if (is_ahead(r, unit) || (r->ferry.open && MT_LOCKED(&r->mu, h->has_news)))
        MT_DO(fetch(r, h, run));
    if (r->cx->debug.sync)
        MT_DO(wait_done(r, h));
    /* STEPPED: the update, or the fetch, is in the queue; run goes on when it is over. */
    MT_DO(mt_edge(r->cx, MT_EDGE_STEPPED, run, h->done));
    return !r->ferry.open ? MT_OK
           : MT_LOCKED(&r->mu, mt_edge(r->cx, MT_EDGE_RAISED, run, h->raised));
}

/* Under mu. One parameter's plane, up or down: what is this process's of it. */
static mt_status put_copy(mt_resident *r, int unit, int param, mt_plane p, int up)
{
    mt_part own = { .param = param };

    own.n = mt_store_owned(r->store, unit, param, &own.from);
    if (p == MT_PLANE_HI && !up) {       /* those that are aloft: each rank has all of them */
        own.n = mt_store_desc(r->store, unit, param)->numel;
        own.from = 0;
    }
    if (mt_store_plane_bytes(r->store, unit, param, p, own.n) == 0)
        return MT_OK;
    MT_DO(mt_resident_at(r, unit, param, p, &own.at[p]));
    own.at[p] = (char *)own.at[p] + mt_store_plane_bytes(r->store, unit, param, p, own.from);
    return mt_part_copy(r->store, unit, &own, 1u << p, r->queue, up,
                        up ? &r->stats.h2d_bytes : &r->stats.d2h_bytes);
}

static mt_status home_take(void *arg, int unit, mt_queue *run)
{
    mt_resident *r = arg;
    mt__settled *h;

    MT_DO(mt__settled_find(r, unit, &h));
    MT_DO(mt_ledger_wait_saved(r->store, unit));
    MT_DO(mt_mirror_store(r->store, unit));
    MT_DO(fetch(r, h, run));
    /* FETCHED: the copy reads what is then given back. */
    if (!mt_skips(r->cx, MT_EDGE_FETCHED))
        MT_DO(wait_done(r, h));
    MT_DO(mt_resident_raised(r));            /* its copies read what evict unlocks */
    return mt_mirror_evict(r->store, unit);
}

/* ---- gradients and updates -------------------------------------------------------------- */

static mt_status home_come(void *arg, int unit, const int *params, int n, mt_queue *d2h)
{
    mt_resident *r = arg;
    int          passes = mt_store_passes(r->store, unit);
    mt_event    *taken;
    mt__settled *h;

    MT_DO(mt__settled_find(r, unit, &h));
    mt_lock(&r->mu);
    mt__assert_settled(r, h);
    if (!passes)                         /* else there is no host copy */
        mt_mirror_change(r->store, unit, params, n, 1u << MT_PLANE_GRAD);
    taken = passes && r->updated != NULL ? r->updated : h->done;
    mt_unlock(&r->mu);
    /* SPENT: the update before reads what d2h is about to write. Lent memory was lent before to a
     * unit whose update is in the queue by now. */
    MT_DO(mt_edge(r->cx, MT_EDGE_SPENT, d2h, taken));
    return MT_OK;
}

/* Under mu. A guest's states are copied up before, and down behind. */
static mt_status put_update(mt_resident *r, mt__settled *h, const mt_update_job *u, float clip)
{
    const unsigned    kept = 1u << MT_PLANE_GRAD | 1u << MT_PLANE_ACC, away = visiting(r, u->unit);
    uint64_t          writes = mt_ledger_writes(r->store, u->unit);
    mt_queue         *q = r->queue;
    mt_span           span;

    /* ASKED: the weights are overwritten in place. */
    MT_DO(mt_edge(r->cx, MT_EDGE_ASKED, r->queue, u->asked));
    /* What the update reads of the weights is in the slot: all that the host has ahead; in a share
     * what was written there of its own portion, and what no other slot here would give it. */
    if (r->ferry.open ? h->writes != writes : is_ahead(r, u->unit)) {
        MT_DO(r->ferry.open ? copy_portions(r, h, q, 1, 0, &r->stats.h2d_bytes)
                            : put_fetch(r, h, NULL, &q));
        h->writes = writes;
        MT_DO(mt_ledger_fetching(r->store, u->unit, q));
        for (int i = 0; r->ferry.open && i < mt_store_params(r->store, u->unit); i++)
            if (is_aloft(r, h, i) && mt_mirror_any(r->store, u->unit, i, HI, IS(AHEAD))) {
                mt_mirror_tell(r->store, u->unit, i, HI, MT_MIRROR_STORE);
                mt_mirror_tell(r->store, u->unit, i, HI, MT_MIRROR_STORED);
                h->has_news = h->news[i] = 1;        /* the other ranks have the rest */
            }
    }
    if (away)
        MT_DO(mt__arrive_before(r, h, r->queue));
    mt_timeline_begin(r->cx->timeline, &span, MT_LANE_DEVICE, MT_WORK_UPDATE, u->unit, r->queue);
    MT_DO(u->put(u->arg, r->queue, clip));
    mt_timeline_end(r->cx->timeline, &span, u->bytes, r->queue);
    MT_DO(record_done(r, h));
    r->updated = h->done;
    mt_mirror_change(r->store, u->unit, u->params, u->n_params, ~kept & ~(r->ferry.open ? HI : 0));
    for (int k = 0, i; r->ferry.open && k < u->n_params; k++) {
        i = u->params[k];
        if (!is_aloft(r, h, i)) {                    /* the share will have the rest */
            mt_mirror_tell(r->store, u->unit, i, HI, MT_MIRROR_SET);
            continue;
        }
        mt_mirror_tell(r->store, u->unit, i, HI, MT_MIRROR_CHANGED);
        h->has_news = h->news[i] = 1;
    }
    if (away)
        MT_DO(mt__arrive_behind(r, h, u->params, u->n_params));
    return MT_OK;
}

/* Put, and (wait) over; *lowered: the ferry ends it. */
static mt_status update(mt_resident *r, mt_update *u, int *lowered)
{
    int       wait, unit = u->j.unit;        /* what the ferry has may be over at once */
    mt__settled *h;
    mt_status st;

    /* Behind CLEAR a fetch may begin as long as a save has the unit: it must not take what is new
     * here for what it brings. */
    MT_DO(mt_ledger_wait_fetch(r->store, unit));
    MT_DO(mt__settled_find(r, unit, &h));
    if (r->ferry.open)
        MT_DO(MT_UNTIL(mt_store_watch(r->store), &r->ferry.ends.news, &r->mu, h->trip == NULL,
                       mt_store_name(r->store, unit), DOWN));
    mt_lock(&r->mu);
    mt__assert_settled(r, h);
    r->lifted = 0;
    st = mt_mirror_any(r->store, unit, -1, ~HI, IS(AHEAD) | IS(TORN))
       ? MT_FAIL(MT_ESTATE, "unit %s was settled, and its planes were not taken",
                 mt_store_name(r->store, unit))
       : put_update(r, h, &u->j, u->clip);
    wait = r->lifted || r->cx->debug.sync;
    if (st == MT_OK && r->ferry.open) {
        *lowered = 1;
        MT_ASSERT(h->trip == NULL);
        h->trip = u;
        (void)mt_worker_submit(h->slots != NULL ? &r->ferry.steps : &r->ferry.ends, &u->node);
    }
    mt_unlock(&r->mu);
    return st == MT_OK && wait ? wait_done(r, h) : st;
}

static mt_status home_update(void *arg, mt_update *u)
{
    mt_resident *r = arg;
    int          lowered = 0;
    mt_status    st = update(r, u, &lowered);

    if (!lowered)
        mt_update_over(r->store, u, st);
    return st;
}

/* Under mu, inside put. The update before may still read what it lifted. */
mt_status mt_resident_scratch(mt_resident *r, size_t bytes, void **out)
{
    void *mem;

    MT_ASSERT(mt_holds(&r->mu));
    if (r->scratch_bytes < bytes) {
        MT_DO(r->dev->ops->record(r->queue, r->drained));
        MT_DO(wait_drained(r));
        MT_DO(r->dev->ops->mem_alloc(r->dev, bytes, &mem));
        r->dev->ops->mem_free(r->dev, r->scratch);
        r->scratch = mem;
        r->scratch_bytes = bytes;
    }
    r->lifted = 1;
    *out = r->scratch;
    return MT_OK;
}

/* ---- host planes: mirror.c asks ----------------------------------------------------------- */

/* Guests' states. */
static mt_status home_wait(void *arg, int unit, unsigned planes)
{
    (void)planes;
    return mt__arrive_copied(arg, unit);
}

/* param -1: all. Down comes also what an update that was put meanwhile made stale again: else
 * nothing came at all. The door is kept as long as copies are on their way, so no signal ends the
 * wait. */
static mt_status copy(mt_resident *r, int unit, int param, unsigned planes, int up)
{
    mt_watch_ask ask = mt_watch_asks(NULL);
    mt_status    st = MT_OK;

    mt_lock(&r->mu);
    mt__assert_settled(r, r->units[unit]);
    for (int p = 0; p < MT_PLANE_COUNT; p++)
        for (int i = 0; i < mt_store_params(r->store, unit) && (planes >> p & 1); i++)
            if (st == MT_OK &&
                (up ? param < 0 || i == param
                    : mt_mirror_any(r->store, unit, i, 1u << p, IS(LOADING) | IS(STALE))))
                st = put_copy(r, unit, i, (mt_plane)p, up);
    if (st == MT_OK)
        st = record_done(r, r->units[unit]);
    mt_unlock(&r->mu);
    if (st == MT_OK)
        st = wait_done(r, r->units[unit]);
    (void)mt_watch_asks(ask);
    return st;
}

static mt_status home_load(void *arg, int unit, unsigned planes)
{
    mt_resident *r = arg;
    mt__settled *h = r->units[unit];

    if ((planes & HI) && r->ferry.open) {    /* who wants weights that are aloft has announced it */
        MT_HOLD(&r->mu);
        if (h->has_news)
            MT_DO(put_raise(r, h, 1));
        /* RAISED: the other ranks' portions are in the slot. */
        MT_DO(mt_edge(r->cx, MT_EDGE_RAISED, r->queue, h->raised));
    }
    return copy(r, unit, -1, planes, 0);
}

static mt_status home_store(void *arg, int unit, int param, unsigned planes)
{
    mt_resident   *r = arg;
    const unsigned guests = planes & visiting(r, unit);

    if (guests != 0)
        MT_DO(mt__arrive_push(r, unit, param, guests));
    return copy(r, unit, param, planes & ~guests, 1);
}

static mt_status home_at(void *arg, int unit, int param, mt_plane p, void **out)
{
    return mt_resident_at(arg, unit, param, p, out);
}

static void *home_slot(void *arg, int unit, int own)
{
    mt_resident *r = arg;
    mt__settled *h;

    if (mt__settled_find(r, unit, &h) != MT_OK)
        return NULL;
    MT_HOLD(&r->mu);
    return h->slots == NULL || (own && h->writes != mt_ledger_writes(r->store, unit)) ? NULL
                                                                                      : h->mem;
}

static mt_status home_lower(void *arg, int unit, size_t from, size_t to)
{
    mt_resident *r = arg;
    mt__settled *h;
    mt_queue    *q = r->ferry.landing;
    mt_span      span;
    size_t       n;
    void        *hi;
    int          is_new;
    mt_status    st;

    MT_DO(mt__settled_find(r, unit, &h));
    MT_DO(mt_store_hi(r->store, unit, &hi));
    mt_lock(&r->mu);
    is_new = h->writes == mt_ledger_writes(r->store, unit);  /* else the update was skipped */
    /* MOVED: a fetch of what was written may still fill the slot. */
    st = is_new ? mt_edge(r->cx, MT_EDGE_MOVED, q, h->done) : MT_OK;
    mt_unlock(&r->mu);
    if (st != MT_OK || !is_new)
        return st;
    mt_timeline_begin(r->cx->timeline, &span, MT_LANE_THROUGH, MT_WORK_OFFLOAD, unit, q);
    for (size_t at = from; at < to; at += n) {
        n = to - at < CHUNK ? to - at : CHUNK;
        MT_DO(r->dev->ops->copy(q, (char *)hi + at, (char *)h->mem + at, n));
        MT_DO(r->dev->ops->sync(q));
    }
    mt_timeline_end(r->cx->timeline, &span, to - from, q);
    MT_WITH(&r->mu) r->stats.d2h_bytes += to - from;
    return MT_OK;
}

static mt_status home_drain(void *arg)
{
    mt_resident *r = arg;

    MT_DO(MT_LOCKED(&r->mu, r->dev->ops->record(r->queue, r->drained)));
    MT_DO(wait_drained(r));
    return mt__arrive_drain(r);
}

#define GRAD (1u << MT_PLANE_GRAD)

#define LIVES_ON_THE_DEVICE                                                                       \
    .stays = GRAD, .later = HI, .wait = home_wait, .load = home_load, .store = home_store,        \
    .take = home_take, .slot = home_slot, .lower = home_lower, .at = home_at, .come = home_come,  \
    .by = MT_BY_PUT,                                                                              \
    .update = home_update, .drain = home_drain

const mt_home mt_home_vram = {
    .lives = "lives on the device", .from = &mt_home_ram, .away = ~0u, .device = ~HI,
    .registered = GRAD, LIVES_ON_THE_DEVICE,
};

const mt_home mt_home_arrive = {
    .lives = "lives on the device, where its states come and leave", .from = &mt_home_vram,
    .away = ~MT_STATE_PLANES, .visit = MT_STATE_PLANES, .device = ~(HI | MT_STATE_PLANES),
    .registered = GRAD | MT_STATE_PLANES, LIVES_ON_THE_DEVICE,
};

mt_status mt_resident_unsettle(mt_resident *r, int unit, int grads)
{
    mt__settled *h;

    MT_DO(mt__settled_find(r, unit, &h));
    if (visiting(r, unit) != 0)
        return MT_FAIL(MT_ESTATE, "unit %s is invited: its states come and leave",
                       mt_store_name(r->store, unit));
    MT_DO(mt_ledger_wait_saved(r->store, unit));
    /* Sums of micro-batches have no copy on the host until now. */
    for (int i = 0; i < mt_store_params(r->store, unit); i++)
        if (mt_store_made(r->store, unit, i, MT_PLANE_ACC, 1))
            mt_mirror_tell(r->store, unit, i, 1u << MT_PLANE_ACC, MT_MIRROR_CHANGED);
    MT_DO(mt_mirror_bring_own(r->store, unit, grads ? ~0u : ~GRAD));
    MT_DO(mt_resident_raised(r));
    MT_DO(mt_ledger_wait_fetch(r->store, unit));
    MT_DO(wait_done(r, h));
    MT_DO(mt_store_move(r->store, unit, &mt_home_ram, NULL));
    mt_lock(&r->mu);
    if (r->updated == h->done)
        r->updated = NULL;
    r->units[unit] = NULL;
    mt_unlock(&r->mu);
    settled_close(r, h);
    return MT_OK;
}

/* ---- looking in ------------------------------------------------------------------------- */

mt_resident_stats mt_resident_stats_get(mt_resident *r)
{
    return MT_LOCKED(&r->mu, r->stats);
}
