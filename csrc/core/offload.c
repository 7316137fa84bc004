/* offload.c — the putting thread fills the D2H queue, the collector sees what has landed.
 *
 * Order of what happens to one unit's GRAD plane:
 *   SET after SET   both are copies in d2h, which keeps their order
 *   ADD after SET   the collector adds behind an event recorded behind both copies
 *   ADD after ADD   the collector takes tickets in order
 *   SET after ADD   the copy would overtake the collector: the putting thread waits for it
 * A settled unit's is written by d2h alone, whose order is enough.
 */
#include "offload.h"

#include "arena.h"
#include "portion.h"
#include "worker.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define AHEAD      64        /* tickets that may wait for the collector; then put waits */
#define STAGINGS   2         /* one fills while the collector reads the other */

/* One item of a ticket with its addresses. */
typedef struct parcel {
    mt_grad_item item;
    mt_dtype     dt;
    int64_t      n;          /* elements of the parameter that are this process's; addresses are of
                              * the first one */
    size_t       bytes;
    int          settled;    /* the unit is settled: grad and acc are on the device, and nothing is
                              * staged */
    void        *grad;       /* GRAD plane */
    float       *acc;        /* ADD: ACC plane; NULL: the sum lives in grad */
    size_t       staged_at;  /* ADD: where in the ticket's staging buffer the copy lands */
    const void  *changed;    /* ADD: what the user made of the gradient, where that is not in the
                              * plane: of a settled unit, in a share; NULL: nobody did */
    double      *sum;        /* where the gradient's sum of squares goes */
    double      *chunks;     /* where its chunks' sums go; NULL: nobody asks for them */
    int          from_grad;  /* ADD: start from grad's value */
} parcel;

/* Written by the putting thread while it is none of the AHEAD that the collector may look at. */
typedef struct ticket {
    mt_job    node;
    mt_event *handed;        /* recorded on run at the hand-over */
    mt_post   making;        /* tells the watchdog of `handed`. Putting thread */
    mt_event *landed;        /* recorded on d2h behind the last copy */
    int       unit;
    parcel    *parcels;
    int      *params;        /* [n] of the parcels */
    int       n;
    int64_t   parcels_room, params_room;
    uint64_t  passes;        /* run waits for copies of this ticket, `depth` before; 0: of none */
    int       adds;          /* parcels for the collector */
    char     *staged;        /* host: the staging buffer, where there are some */
} ticket;

typedef struct staging {     /* putting thread only, but for the bytes in it */
    mt_arena mem;
    uint64_t user;           /* the ticket that used it last; it is free once that is over */
} staging;

/* What is known of a unit's gradients. */
typedef struct tally {
    mt_arena       mem;      /* sum's, and chunks' */
    double        *sum;      /* [n_params] registered; d2h writes (SET), the collector (ADD) */
    double       **chunks;   /* [n_params] of what is ours; NULL: the unit has one owner, or
                              * nothing is ours. As sum */
    unsigned char *flags;    /* [n_params] mt_grad_known. Under mu */
    int            adds;     /* tickets with an ADD that are not over. Under mu */
} tally;

struct mt_offload {
    const mt_context  *cx;
    mt_dev            *dev;
    mt_store          *store;
    mt_offload_kernels kernels;
    uint64_t           depth;
    mt_queue          *d2h;          /* putting thread */
    ticket            *ring;         /* [n_ring]; ticket t is at t % n_ring */
    uint64_t           n_ring;
    staging            staging[STAGINGS];
    unsigned           next_staging; /* putting thread */

    mt_worker          collector;    /* ticket n is its job n */
    mt_mutex           mu;
    tally            **tally;        /* by unit; the table moves, under mu; a tally stays */
    int64_t            n_tally;
    uint64_t           landed;       /* the latest ticket whose copies the collector saw end; it
                                      * stays at a failure. mu */
    uint64_t           waited_for;   /* the latest ticket that run waits for; putting thread, mu */
    uint64_t           d2h_bytes;    /* mu */
};

/* ---- the collector ---------------------------------------------------------------------- */

static ticket *ticket_at(mt_offload *o, uint64_t t)
{
    return &o->ring[t % o->n_ring];
}

/* Under mu, at each door: tickets are put, copied and over in order, and units know of theirs. */
static void assert_state(mt_offload *o)
{
    uint64_t put = o->collector.submitted, ended = o->collector.ended;
    int      adds = 0;

    if (!MT_IS_CHECKED)
        return;
    MT_ASSERT(mt_holds(&o->mu));
    MT_ASSERT(o->landed <= ended && ended <= put && put - ended <= AHEAD && o->waited_for <= put);
    for (uint64_t t = ended + 1; t <= put; t++)
        adds += ticket_at(o, t)->adds > 0;
    for (int u = 0; u < o->n_tally; u++) {
        MT_ASSERT(o->tally[u] == NULL || o->tally[u]->adds >= 0);
        adds -= o->tally[u] != NULL ? o->tally[u]->adds : 0;
    }
    MT_ASSERT(adds == 0);
}

/* Through host memory, where the collector adds it to what counts. */
static int is_staged(const parcel *p)
{
    return p->item.mode == MT_GRAD_ADD && !p->settled;
}

static mt_status collect(void *arg, mt_job *node)
{
    mt_offload *o = arg;
    ticket     *t = (ticket *)(void *)node;
    uint64_t    added = 0;
    mt_span     span = { 0 };
    mt_status   st;

    assert_state(o);
    mt_unlock(&o->mu);
    st = mt_watch_sync(mt_store_watch(o->store), t->landed, mt_store_name(o->store, t->unit),
                       "its gradients' copies (the event LANDED)");
    if (st != MT_OK)
        mt_ledger_fault(o->store, st, mt_last_error());
    if (st == MT_OK && t->adds > 0)
        mt_timeline_begin(o->cx->timeline, &span, MT_LANE_SUM, MT_WORK_ADD, t->unit, NULL);
    for (int i = 0; i < t->n && st == MT_OK; i++) {
        const parcel *p = &t->parcels[i];

        if (!is_staged(p) || p->n == 0)
            continue;
        if (p->changed != NULL)
            memcpy(p->grad, p->changed, p->bytes);
        o->kernels.accumulate(o->cx->pool, p->dt, p->acc, p->grad, t->staged + p->staged_at,
                              p->n, p->from_grad, p->sum, p->chunks);
        added += p->bytes;
    }
    mt_timeline_end(o->cx->timeline, &span, added, NULL);
    for (int i = 0; i < t->n; i++)       /* users see what has come, not what they made of others */
        mt_store_view_drop(o->store, t->unit, t->params[i], MT_PLANE_GRAD);
    mt_ledger_grads_end(o->store, t->unit);
    mt_lock(&o->mu);
    o->tally[t->unit]->adds -= t->adds > 0;
    if (st == MT_OK && o->landed == o->collector.ended)
        o->landed++;
    return st;
}

#define HOME "gradients to be in host memory"

/* The putting thread, which launches windows too: where it does wait that is recorded. The
 * collector never stops short of the latest ticket, so this ends when the device answers, or is
 * stuck. */
static mt_status wait_room(mt_offload *o, uint64_t t)
{
    mt_span   span;
    mt_status st;

    if (MT_LOCKED(&o->mu, o->collector.ended) >= t)
        return MT_OK;
    mt_timeline_begin(o->cx->timeline, &span, MT_LANE_HAND, MT_WORK_WAIT, -1, NULL);
    st = mt_worker_wait(&o->collector, mt_store_watch(o->store), t, NULL, HOME);
    mt_timeline_end(o->cx->timeline, &span, 0, NULL);
    return st;
}

/* ---- host memory that the device writes ------------------------------------------------- */

static mt_status pages_open(mt_offload *o, size_t bytes, const char *what, mt_arena *out)
{
    return mt_arena_open(out, bytes, NULL, o->dev, what, mt_store_bytes(o->store, MT_PLANE_COUNT));
}

static void tally_close(tally *y)
{
    if (y == NULL)
        return;
    mt_arena_close(&y->mem);
    free(y->chunks);
    free(y->flags);
    free(y);
}

MT_CLOSER(tally_close, tally)

/* Putting thread, which alone changes the table; others read it under mu. Chunks are noted of what
 * is ours of a unit whose norm is made with other ranks; they lie behind the sums. */
static mt_status tally_of(mt_offload *o, int unit, tally **out)
{
    int         n = mt_store_params(o->store, unit);
    const char *name = mt_store_name(o->store, unit);
    size_t      chunks = 0;
    int64_t     from;
    double     *at;
    tally      *y MT_CLOSED(tally_close) = NULL;

    if (unit >= o->n_tally)
        MT_DO(MT_LOCKED(&o->mu, MT_GROW(o->tally, o->n_tally, mt_store_units(o->store),
                                        "offload")));
    if ((*out = o->tally[unit]) != NULL)
        return MT_OK;
    for (int i = 0; i < n && o->cx->share != NULL; i++)
        chunks += (size_t)mt_grains(mt_store_owned(o->store, unit, i, &from));
    MT_DO(MT_MAKE(y, 1, name));
    MT_DO(MT_MAKE(y->flags, n, name));
    MT_DO(MT_MAKE(y->chunks, n, name));
    MT_DO(pages_open(o, ((size_t)n + 1 + chunks) * sizeof *y->sum, "sums of squares", &y->mem));
    y->sum = y->mem.base;
    at = y->sum + n + 1;
    for (int i = 0; i < n && chunks > 0; i++) {
        size_t own = (size_t)mt_grains(mt_store_owned(o->store, unit, i, &from));

        y->chunks[i] = own > 0 ? at : NULL;
        at += own;
    }
    *out = MT_LOCKED(&o->mu, o->tally[unit] = MT_KEEP(y));
    return MT_OK;
}

/* ---- open and close --------------------------------------------------------------------- */

MT_CLOSER(mt_offload_close, mt_offload)

mt_status mt_offload_open(const mt_context *cx, int depth, mt_offload_kernels k, mt_offload **out)
{
    mt_offload *o MT_CLOSED(mt_offload_close) = NULL;

    if (depth < 1 || depth > 1024)
        return MT_FAIL(MT_EINVAL, "offload: depth %d; 1 to 1024 units may have gradients on the "
                       "device", depth);
    if (cx->share != NULL && k.fold == NULL)
        return MT_FAIL(MT_EINVAL, "offload: where processes share units, mt_offload_open() is to "
                       "be given a fold");
    MT_DO(MT_MAKE(o, 1, "offload"));
    *o = (mt_offload){ .cx = cx, .dev = cx->dev, .store = cx->store, .kernels = k,
                       .depth = (uint64_t)depth, .n_ring = (uint64_t)depth + AHEAD };
    mt_mutex_open(&o->mu, MT_RANK_OFFLOAD);
    MT_DO(mt_worker_open(&o->collector, &o->mu, 1, "mt-collector", "d2h", collect, o));
    MT_DO(MT_MAKE(o->ring, (int64_t)o->n_ring, "offload"));
    for (uint64_t i = 0; i < o->n_ring; i++) {
        MT_DO(o->dev->ops->event_open(o->dev, &o->ring[i].handed));
        MT_DO(o->dev->ops->event_open(o->dev, &o->ring[i].landed));
    }
    MT_DO(o->dev->ops->queue_open(o->dev, "d2h", &o->d2h));
    *out = MT_KEEP(o);
    return MT_OK;
}

void mt_offload_close(mt_offload *o)
{
    if (o == NULL)
        return;
    mt_worker_close(&o->collector);
    o->dev->ops->queue_close(o->d2h);
    for (uint64_t i = 0; o->ring != NULL && i < o->n_ring; i++) {
        mt_watch_take(mt_store_watch(o->store), &o->ring[i].making);
        o->dev->ops->event_close(o->ring[i].handed);
        o->dev->ops->event_close(o->ring[i].landed);
        free(o->ring[i].parcels);
        free(o->ring[i].params);
    }
    for (int i = 0; i < STAGINGS; i++)
        mt_arena_close(&o->staging[i].mem);
    for (int i = 0; i < o->n_tally; i++)
        tally_close(o->tally[i]);
    mt_mutex_close(&o->mu);
    free(o->tally);
    free(o->ring);
    free(o);
}

/* ---- put: first everything that can be refused, then the queue -------------------------- */

/* Where a plane has the first element that is ours of a parameter: where the unit's gradients are,
 * or (host) as users see it in host memory. */
static mt_status plane_at(mt_offload *o, int unit, int param, mt_plane plane, int host, void **out)
{
    void          *of, *at;
    const mt_home *h = mt_store_home(o->store, unit, &of);
    int64_t        from;

    if (host)
        MT_DO(mt_store_view(o->store, unit, param, plane, &at));
    else if (h->at != NULL)
        MT_DO(h->at(of, unit, param, plane, &at));
    else
        MT_DO(mt_store_at(o->store, unit, param, plane, &at));
    (void)mt_store_owned(o->store, unit, param, &from);
    *out = (char *)at + mt_store_plane_bytes(o->store, unit, param, plane, from);
    return MT_OK;
}

static mt_status parcel_make(mt_offload *o, int unit, const mt_grad_item *it, tally *y, parcel *p)
{
    const mt_param_desc *d = mt_store_desc(o->store, unit, it->param);
    const char          *name = mt_store_name(o->store, unit);
    int64_t              from, n = mt_store_owned(o->store, unit, it->param, &from);
    void                *at;

    if (d == NULL)
        return MT_FAIL(MT_EINVAL, "unit %s has no parameter %d; it has %d", name, it->param,
                       mt_store_params(o->store, unit));
    if (it->src == NULL && n > 0)
        return MT_FAIL(MT_EINVAL, "unit %s: the gradient of parameter %d is at no address", name,
                       it->param);
    if (it->mode != MT_GRAD_SET && mt_store_passes(o->store, unit))
        return MT_FAIL(MT_ESTATE, "unit %s: its gradients pass, so none is there to add to", name);
    *p = (parcel){ .item = *it, .dt = d->dtype, .n = n, .sum = &y->sum[it->param],
                   .bytes = (size_t)n * mt_dtype_bytes(d->dtype), .chunks = y->chunks[it->param],
                   .settled = mt_store_home(o->store, unit, NULL)->at != NULL };
    MT_DO(plane_at(o, unit, it->param, MT_PLANE_GRAD, 0, &p->grad));
    if (it->mode == MT_GRAD_SET)
        return MT_OK;
    if (mt_plane_bytes(MT_PLANE_ACC, p->dt, MT_STATES_FP32, 1) > 0) {
        MT_DO(plane_at(o, unit, it->param, MT_PLANE_ACC, 0, &at));
        p->acc = at;
    }
    if (it->mode == MT_GRAD_ADD && it->reread) {
        MT_DO(plane_at(o, unit, it->param, MT_PLANE_GRAD, 1, &at));
        p->changed = at != p->grad ? at : NULL;
    }
    p->from_grad = it->reread || !(MT_LOCKED(&o->mu, y->flags[it->param]) & MT_GRAD_SUMMED);
    return MT_OK;
}

/* Fills a ticket that the collector has left. staging: NULL when nothing is added. */
static mt_status prepare(mt_offload *o, ticket *t, int unit, const mt_grad_item *items, int n,
                         tally *y, staging **g)
{
    size_t need = 0;

    MT_DO(MT_GROW(t->parcels, t->parcels_room, n, "offload"));
    MT_DO(MT_GROW(t->params, t->params_room, n, "offload"));
    t->unit = unit;
    t->n = n;
    t->adds = 0;
    for (int i = 0; i < n; i++) {
        MT_DO(parcel_make(o, unit, &items[i], y, &t->parcels[i]));
        t->params[i] = items[i].param;
        if (is_staged(&t->parcels[i])) {
            t->adds++;
            t->parcels[i].staged_at = need;
            need += mt_round_up(t->parcels[i].bytes, 512);
        }
    }
    *g = NULL;
    if (need > 0) {                      /* a staging buffer that the collector is done with */
        *g = &o->staging[o->next_staging % STAGINGS];
        MT_DO(wait_room(o, (*g)->user));
        if ((*g)->mem.bytes < need) {
            mt_arena_close(&(*g)->mem);
            MT_DO(pages_open(o, need, "micro-batch gradients on their way", &(*g)->mem));
        }
        t->staged = (*g)->mem.base;
    }
    return MT_OK;
}

static mt_status put_all(mt_offload *o, ticket *t, mt_queue *run)
{
    const mt_dev_ops         *v = o->dev->ops;
    const mt_offload_kernels *kernels = &o->kernels;
    void                     *of;
    const mt_home            *home = mt_store_home(o->store, t->unit, &of);
    uint64_t                  bytes = 0;
    mt_span                   span;

    /* GRAD: the sources are written by what run was given up to now. */
    MT_DO(v->record(run, t->handed));
    mt_watch_put(mt_store_watch(o->store), &t->making, mt_compute,
                 mt_store_name(o->store, t->unit), "its gradients' kernels (the event GRAD)",
                 t->handed);
    MT_DO(mt_edge(o->cx, MT_EDGE_GRAD, o->d2h, t->handed));
    if (home->come != NULL)
        MT_DO(home->come(of, t->unit, t->params, t->n, o->d2h));
    mt_timeline_begin(o->cx->timeline, &span, MT_LANE_D2H, MT_WORK_OFFLOAD, t->unit, o->d2h);
    for (int i = 0; i < t->n; i++) {
        const parcel *p = &t->parcels[i];
        const void   *src = p->item.src;

        if (p->n == 0)
            continue;
        bytes += p->settled ? 0 : p->bytes;
        if (is_staged(p)) {
            MT_DO(v->copy(o->d2h, t->staged + p->staged_at, src, p->bytes));
        } else if (p->item.mode == MT_GRAD_ADD) {    /* settled: the sum and its squares, there */
            if (p->changed != NULL)
                MT_DO(v->copy(o->d2h, p->grad, p->changed, p->bytes));
            MT_DO(kernels->accumulate_put(kernels->ctx, o->d2h, p->dt, p->acc, p->grad, src, p->n,
                                          p->from_grad, p->sum, p->chunks));
        } else {
            MT_DO(kernels->sumsq(kernels->ctx, o->d2h, p->dt, src, p->n, p->sum, p->chunks));
            if (src != p->grad)
                MT_DO(v->copy(o->d2h, p->grad, src, p->bytes));
        }
    }
    mt_timeline_end(o->cx->timeline, &span, bytes, o->d2h);
    MT_DO(v->record(o->d2h, t->landed));
    /* LANDED: what run is given from now on may reuse the sources of `depth` tickets ago. */
    if (t->passes > 0 && !mt_skips(o->cx, MT_EDGE_LANDED))
        MT_DO(v->wait(run, ticket_at(o, t->passes)->landed));
    return MT_OK;
}

/* Under mu. sent: the copies are on their way; else some were begun and nothing is known. */
static void note(mt_offload *o, const ticket *t, tally *y, int sent)
{
    for (int i = 0; i < t->n; i++) {
        const parcel *p = &t->parcels[i];

        y->flags[p->item.param] = (unsigned char)(!sent ? 0 :
            (o->cx->share == NULL ? MT_GRAD_COUNTED : 0) |
            (p->chunks != NULL ? MT_GRAD_CHUNKED : 0) | (p->acc != NULL ? MT_GRAD_SUMMED : 0));
        o->d2h_bytes += sent && !p->settled ? p->bytes : 0;      /* what leaves the device */
    }
}

mt_status mt_offload_put(mt_offload *o, int unit, const mt_grad_item *items, int n,
                         mt_queue *run, uint64_t *number)
{
    uint64_t     next = o->collector.submitted + 1, depth = o->depth;
    ticket      *t = ticket_at(o, next);
    tally       *y;
    staging     *g = NULL;
    int          sets = 0;
    char         text[1024];
    mt_watch_ask ask;
    mt_status    st;

    if (unit < 0 || unit >= mt_store_units(o->store) || n < 0)
        return MT_FAIL(MT_EINVAL, "offload: %d gradients of unit %d; the store has %d units",
                       n, unit, mt_store_units(o->store));
    MT_DO(tally_of(o, unit, &y));
    /* Waits of the host, before anything is changed. An update reads the plane that the copies will
     * overwrite. */
    MT_DO(mt_ledger_wait_stepped(o->store, unit));
    for (int i = 0; i < n; i++)
        sets += items[i].mode != MT_GRAD_ADD;
    if (sets > 0 && MT_LOCKED(&o->mu, y->adds) > 0)
        MT_DO(mt_ledger_wait_grads(o->store, unit));
    if (next > AHEAD)
        MT_DO(wait_room(o, next - AHEAD));
    if (mt_store_passes(o->store, unit)) {
        MT_DO(mt_store_lend(o->store, unit, o->cx->timeline));
        /* No more units have gradients that pass on the device than have a buffer for them. */
        if ((uint64_t)mt_store_lends(o->store) < depth)
            depth = (uint64_t)mt_store_lends(o->store);
    }
    MT_DO(prepare(o, t, unit, items, n, y, &g));

    mt_ledger_grads_begin(o->store, unit);
    t->passes = next > depth ? next - depth : 0;
    if ((st = put_all(o, t, run)) != MT_OK) {
        /* A queue that refused an operation may still carry out those before it; the caller may
         * free the sources when we return. */
        snprintf(text, sizeof text, "%s", mt_last_error());
        (void)o->dev->ops->sync(o->d2h);
        MT_WITH(&o->mu) {
            note(o, t, y, 0);
            assert_state(o);
        }
        mt_ledger_grads_end(o->store, unit);
        return mt_fail_again(st, text);
    }
    if (g != NULL) {
        g->user = next;
        o->next_staging++;
    }
    mt_lock(&o->mu);
    note(o, t, y, 1);
    y->adds += t->adds > 0;
    (void)mt_worker_submit(&o->collector, &t->node);
    if (t->passes > o->waited_for)
        o->waited_for = t->passes;
    assert_state(o);
    mt_unlock(&o->mu);
    *number = next;
    if (!o->cx->debug.sync)
        return MT_OK;
    ask = mt_watch_asks(NULL);   /* what was put is not to be put again: no signal ends it */
    st = mt_offload_drain(o);
    (void)mt_watch_asks(ask);
    return st;
}

mt_status mt_offload_land(mt_offload *o, mt_queue *run)
{
    /* The D2H queue is first in, first out: the last ticket's copies end last. */
    if (o->collector.submitted > 0 && !mt_skips(o->cx, MT_EDGE_LANDED))
        MT_DO(run->dev->ops->wait(run, ticket_at(o, o->collector.submitted)->landed));
    MT_HOLD(&o->mu);
    o->waited_for = o->collector.submitted;
    assert_state(o);
    return MT_OK;
}

/* ---- asking ----------------------------------------------------------------------------- */

uint64_t mt_offload_passed(mt_offload *o)
{
    return MT_LOCKED(&o->mu, (assert_state(o), o->landed > o->waited_for ? o->landed
                                                                         : o->waited_for));
}

mt_status mt_offload_drain(mt_offload *o)
{
    uint64_t put = MT_LOCKED(&o->mu, o->collector.submitted);

    /* The ledger first: its waits name the unit. */
    for (int u = 0; u < mt_store_units(o->store); u++)
        MT_DO(mt_ledger_wait_grads(o->store, u));
    MT_DO(mt_worker_wait(&o->collector, mt_store_watch(o->store), put, NULL, HOME));
    return mt_ledger_check(o->store);
}

/* Under mu. NULL: nothing was ever put for it. */
static tally *known(const mt_offload *o, int unit, int param)
{
    return unit >= 0 && unit < o->n_tally && param >= 0 &&
           param < mt_store_params(o->store, unit) ? o->tally[unit] : NULL;
}

int mt_offload_has(mt_offload *o, int unit, int param, mt_grad_known what)
{
    tally *y;

    MT_HOLD(&o->mu);
    y = known(o, unit, param);
    return y != NULL && (y->flags[param] & what) != 0;
}

const double *mt_offload_chunks(mt_offload *o, int unit, int param, int64_t *n)
{
    const double *chunks = NULL;
    int64_t       from;
    tally        *y;

    MT_WITH(&o->mu)
        if ((y = known(o, unit, param)) != NULL)
            chunks = y->chunks[param];
    *n = chunks != NULL ? mt_grains(mt_store_owned(o->store, unit, param, &from)) : 0;
    return chunks;
}

double mt_offload_fold(const mt_offload *o, const double *chunks, int64_t n)
{
    return o->kernels.fold(chunks, n);
}

/* The value was written by d2h or the collector before they ended the hand-over in the ledger,
 * which the caller has waited for; a forget since has cleared the flag and left the value. */
double mt_offload_sumsq(mt_offload *o, int unit, int param)
{
    tally *y;

    MT_HOLD(&o->mu);
    y = known(o, unit, param);
    return y != NULL ? y->sum[param] : 0;
}

void mt_offload_forget(mt_offload *o, int unit)
{
    tally *y;

    MT_HOLD(&o->mu);
    if ((y = known(o, unit, 0)) != NULL)
        memset(y->flags, 0, (size_t)mt_store_params(o->store, unit));
}

uint64_t mt_offload_d2h_bytes(mt_offload *o)
{
    return MT_LOCKED(&o->mu, o->d2h_bytes);
}
