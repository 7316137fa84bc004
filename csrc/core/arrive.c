/* arrive.c — one queue for the copies of guests' states, up and down.
 *
 * While a stay lasts both sides have the states: an update changes the device's, and copies of
 * what it changed follow it down; a write on the host goes up at once.
 * So a stay may go on over several steps.
 */
#include "arrive.h"

#include <stdlib.h>

/* Under mu; the events' pointers are invite's. */
typedef struct guest {
    mt_event       *last;        /* recorded on the queue behind the unit's last copy */
    mt_event       *vacant;      /* recorded on run by lift */
    mt_part *parts;       /* [n] of the stay; NULL: there is none */
    int             n;
    uint64_t        bytes;       /* that came up for the latest stay */
    mt_post         post;        /* of `last` */
} guest;

#define TURNS  48
#define COPIED "copies of its states (the event STORED)"

struct mt_arrive {
    mt_context     *cx;
    mt_dev         *dev;
    mt_store       *store;
    guest         **guests;      /* [n_guests] by unit, NULL: none. Written by invite */
    int64_t         n_guests;

    mt_mutex        mu;          /* held around puts too: one thread at a time */
    mt_queue       *queue;
    uint64_t        turn;        /* stats.d2h_bytes at which others come in between. mu */
    mt_event       *drained;     /* recorded on the queue by who waits for all of it. mu */
    mt_arrive_stats stats;       /* mu */
};

/* Under mu, at each door: of a settled unit, and with parts as long as it stays. */
static void assert_guest(const mt_arrive *a, const guest *g, int unit)
{
    MT_ASSERT(mt_holds(&a->mu));
    MT_ASSERT(a->guests[unit] == g && g->last != NULL && g->vacant != NULL);
    MT_ASSERT(mt_store_home(a->store, unit, NULL) == &mt_home_arrive);
    MT_ASSERT(g->parts != NULL || g->n == 0);
}

/* ---- open, invite, close ---------------------------------------------------------------- */

MT_CLOSER(mt_arrive_close, mt_arrive)

mt_status mt_arrive_open(mt_context *cx, mt_arrive **out)
{
    mt_arrive *a MT_CLOSED(mt_arrive_close) = NULL;

    MT_DO(MT_MAKE(a, 1, "arrive"));
    *a = (mt_arrive){ .cx = cx, .dev = cx->dev, .store = cx->store };
    mt_mutex_open(&a->mu, MT_RANK_ARRIVE);
    MT_DO(a->dev->ops->event_open(a->dev, &a->drained));
    MT_DO(a->dev->ops->queue_open(a->dev, "guests", &a->queue));
    *out = cx->arrive = MT_KEEP(a);
    return MT_OK;
}

static void guest_close(const mt_arrive *a, guest *g)
{
    if (g == NULL)
        return;
    mt_watch_take(mt_store_watch(a->store), &g->post);
    a->dev->ops->event_close(g->last);
    a->dev->ops->event_close(g->vacant);
    free(g->parts);
    free(g);
}

void mt_arrive_close(mt_arrive *a)
{
    if (a == NULL)
        return;
    if (a->cx->arrive == a)
        a->cx->arrive = NULL;
    a->dev->ops->queue_close(a->queue);
    for (int u = 0; u < a->n_guests; u++)
        guest_close(a, a->guests[u]);
    a->dev->ops->event_close(a->drained);
    mt_mutex_close(&a->mu);
    free(a->guests);
    free(a);
}

int mt_arrive_invited(const mt_arrive *a, int unit)
{
    return unit >= 0 && unit < a->n_guests && a->guests[unit] != NULL;
}

mt_status mt_arrive_invite(mt_arrive *a, int unit)
{
    void     *of;
    guest    *g = NULL;
    mt_status st;

    if (unit < 0 || unit >= mt_store_units(a->store))
        return MT_FAIL(MT_EINVAL, "arrive: there is no unit %d; the store has %d", unit,
                       mt_store_units(a->store));
    if (mt_arrive_invited(a, unit))
        return MT_OK;
    MT_TRY(MT_GROW(a->guests, a->n_guests, mt_store_units(a->store), "arrive"));
    MT_TRY(MT_MAKE(g, 1, "arrive"));
    MT_TRY(a->dev->ops->event_open(a->dev, &g->last));
    MT_TRY(a->dev->ops->event_open(a->dev, &g->vacant));
    (void)mt_store_home(a->store, unit, &of);
    a->guests[unit] = g;                     /* before another rank may ask for its states */
    if ((st = mt_store_move(a->store, unit, &mt_home_arrive, of)) == MT_OK)
        return MT_OK;
    a->guests[unit] = NULL;

fail:
    guest_close(a, g);
    return st;
}

static mt_status find(const mt_arrive *a, int unit, guest **out)
{
    if (!mt_arrive_invited(a, unit))
        return MT_FAIL(MT_EINVAL, "unit %d (%s): its states do not come to the device and leave",
                       unit, mt_store_name(a->store, unit));
    *out = a->guests[unit];
    return MT_OK;
}

mt_status mt_arrive_dismiss(mt_arrive *a, int unit)
{
    void  *of;
    guest *g;

    MT_DO(find(a, unit, &g));
    if (g->parts != NULL)
        return MT_FAIL(MT_ESTATE, "unit %s: its states are on the device; they must leave before",
                       mt_store_name(a->store, unit));
    (void)mt_store_home(a->store, unit, &of);
    MT_DO(mt_store_move(a->store, unit, &mt_home_vram, of));
    a->guests[unit] = NULL;
    guest_close(a, g);
    return MT_OK;
}

/* ---- cutting ---------------------------------------------------------------------------- */

/* A piece for each part, so that none is larger than what torch's allocator finds room for. */
static mt_status cut(const mt_arrive *a, int unit, size_t most, mt_pieces **out)
{
    int       n = mt_store_params(a->store, unit);
    unsigned *planes MT_FREED = NULL;

    MT_DO(MT_MAKE(planes, n, mt_store_name(a->store, unit)));
    for (int i = 0; i < n; i++)
        planes[i] = mt_store_trainable(a->store, unit, i) ? MT_STATE_PLANES : 0;
    return mt_pieces_cut(a->store, unit, &(mt_cut){
        planes, most < MT_ARRIVE_LEAST ? MT_ARRIVE_LEAST : most, MT_PART_ALIGN, MT_STATES_GROUP, 1,
        MT_PART_ALIGN,
    }, out);
}

mt_status mt_arrive_sizes(mt_arrive *a, int unit, size_t most, size_t **bytes, int *n)
{
    mt_pieces *pieces MT_CLOSED(mt_pieces_free) = NULL;
    size_t    *found;
    guest     *g;

    MT_DO(find(a, unit, &g));
    MT_DO(cut(a, unit, most, &pieces));
    MT_DO(MT_MAKE(found, pieces->n, mt_store_name(a->store, unit)));
    for (int i = 0; i < pieces->n; i++)
        found[i] = pieces->piece[i].bytes;
    *n = pieces->n;
    *bytes = found;
    return MT_OK;
}

/* ---- copies: under mu ------------------------------------------------------------------- */

static int among(int param, const int *params, int n)
{
    for (int i = 0; i < n; i++)
        if (params[i] == param)
            return 1;
    return 0;
}

static void nothing(void *arg)
{
    (void)arg;
}

/* On the way down the queue waits for the host for a moment, every few pieces. A copy engine serves
 * one stream until that has to wait, and a few bytes that compute reads back meanwhile (a model's
 * look at its mask, loss.item()) would wait for all that is put here: 97 ms behind 5 GB on an H200,
 * with a wait behind each piece 2.4 ms. A wait for another stream does not do, and what goes up
 * keeps nobody waiting. Of a stream's functions of the host CUDA keeps 56, and holds its caller up
 * at the next: so there are no more of them than TURNS in all that may be put at once. */
static mt_status let_others(mt_arrive *a)
{
    uint64_t all = 0;

    if (a->stats.d2h_bytes < a->turn)
        return MT_OK;
    for (int u = 0; u < a->n_guests; u++)
        all += a->guests[u] != NULL ? a->guests[u]->bytes : 0;
    a->turn = a->stats.d2h_bytes + all / TURNS;
    return a->dev->ops->call(a->queue, nothing, NULL);
}

/* params NULL: all. What was put is waited for by whoever waits for `last`,
 * also after a failure. */
static mt_status put_copies(mt_arrive *a, guest *g, int unit, const int *params, int n,
                            unsigned planes, int up)
{
    uint64_t *copied = up ? &a->stats.h2d_bytes : &a->stats.d2h_bytes, before = *copied;
    mt_span   span;
    mt_status st = MT_OK, end;

    mt_timeline_begin(a->cx->timeline, &span, MT_LANE_THROUGH, up ? MT_WORK_FETCH : MT_WORK_OFFLOAD,
                      unit, a->queue);
    for (int i = 0; i < g->n && st == MT_OK; i++) {
        if (params != NULL && !among(g->parts[i].param, params, n))
            continue;
        st = mt_part_copy(a->store, unit, &g->parts[i], planes, a->queue, up, copied);
        if (st == MT_OK && !up)
            st = let_others(a);
    }
    mt_timeline_end(a->cx->timeline, &span, *copied - before, a->queue);
    if ((end = a->dev->ops->record(a->queue, g->last)) == MT_OK)
        mt_watch_put(mt_store_watch(a->store), &g->post, "guests", mt_store_name(a->store, unit),
                     COPIED, g->last);
    return st != MT_OK ? st : end;
}

/* ---- a stay ----------------------------------------------------------------------------- */

/* Memory for the host's planes, made without mu: pages by the gigabyte take their time. */
static mt_status commit(mt_arrive *a, int unit, const mt_part *parts, int n)
{
    for (int p = 0; p < MT_PLANE_COUNT; p++)
        for (int i = 0; i < n; i++)
            if (parts[i].at[p] != NULL) {
                MT_DO(mt_store_commit(a->store, unit, (mt_plane)p));
                break;
            }
    return MT_OK;
}

/* Under mu. The parts are g's from here on. */
static mt_status put_lift(mt_arrive *a, guest *g, int unit, mt_part *parts, int n,
                          mt_queue *run)
{
    uint64_t  before;
    mt_status st;

    g->parts = parts;
    g->n = n;
    /* VACANT: whoever had this memory before computed with it in run. */
    MT_TRY(a->dev->ops->record(run, g->vacant));
    MT_TRY(mt_edge(a->cx, MT_EDGE_VACANT, a->queue, g->vacant));
    before = a->stats.h2d_bytes;
    MT_TRY(put_copies(a, g, unit, NULL, 0, MT_STATE_PLANES, 1));
    g->bytes = a->stats.h2d_bytes - before;
    if (mt_syncs(a->cx))
        MT_TRY(a->dev->ops->sync_event(g->last));
    return MT_OK;

fail:
    /* Some copies may be under way, into memory that stays the caller's. */
    (void)a->dev->ops->sync(a->queue);
    free(g->parts);
    g->parts = NULL;
    g->n = 0;
    return st;
}

/* malloc'd, with addresses; MT_EINVAL unless mem has as many pieces as it takes. */
static mt_status parts_of(const mt_arrive *a, int unit, size_t most, void *const *mem, int n,
                          mt_part **out)
{
    mt_pieces *pieces MT_CLOSED(mt_pieces_free) = NULL;
    mt_part   *parts;

    MT_DO(cut(a, unit, most, &pieces));
    if (pieces->n != n)
        MT_DO(MT_FAIL(MT_EINVAL, "unit %s: %d pieces of device memory for its states; they take "
                      "%d", mt_store_name(a->store, unit), n, pieces->n));
    MT_DO(MT_MAKE(parts, n, mt_store_name(a->store, unit)));
    for (int i = 0; i < n; i++)
        mt_pieces_at(pieces, i, mem[i], &parts[i]);
    *out = parts;
    return MT_OK;
}

mt_status mt_arrive_lift(mt_arrive *a, int unit, size_t most, void *const *mem, int n,
                         mt_queue *run, int *taken)
{
    mt_part *parts MT_FREED = NULL;
    guest   *g;

    MT_DO(find(a, unit, &g));
    /* UPDATED: an update still to be put would change the states while they are copied. */
    MT_DO(mt_ledger_wait_updates(a->store, unit));
    if (MT_LOCKED(&a->mu, g->parts != NULL)) {
        *taken = 0;
        return MT_OK;
    }
    MT_DO(parts_of(a, unit, most, mem, n, &parts));
    MT_DO(commit(a, unit, parts, n));
    MT_HOLD(&a->mu);
    MT_ASSERT(g->parts == NULL);
    MT_DO(put_lift(a, g, unit, MT_KEEP(parts), n, run));
    assert_guest(a, g, unit);
    *taken = 1;
    return MT_OK;
}

mt_status mt_arrive_leave(mt_arrive *a, int unit, int wait, int *left)
{
    int    idle;
    guest *g;

    MT_DO(find(a, unit, &g));
    if (wait)
        MT_DO(mt_arrive_wait(a, unit));
    idle = !mt_ledger_updates_due(a->store, unit);
    /* STORED: who has the pieces next would write what is still copied. */
    if (idle && !mt_skips(a->cx, MT_EDGE_STORED))
        MT_DO(a->dev->ops->query(g->last, &idle));
    if (idle) {
        mt_lock(&a->mu);
        assert_guest(a, g, unit);
        free(g->parts);
        g->parts = NULL;
        g->n = 0;
        mt_unlock(&a->mu);
    }
    *left = idle;
    return MT_OK;
}

/* ---- what residents ask ----------------------------------------------------------------- */

mt_status mt_arrive_parts(mt_arrive *a, int unit, const mt_part **parts, int *n)
{
    guest *g;

    MT_DO(find(a, unit, &g));
    mt_lock(&a->mu);
    assert_guest(a, g, unit);
    *parts = g->parts;
    *n = g->n;
    mt_unlock(&a->mu);
    if (*parts == NULL)
        return MT_FAIL(MT_ESTATE, "unit %s: its states are on the host; they are lifted before its "
                       "update", mt_store_name(a->store, unit));
    return MT_OK;
}

mt_status mt_arrive_before(mt_arrive *a, int unit, mt_queue *q)
{
    const mt_part *parts;
    int            n;

    MT_DO(mt_arrive_parts(a, unit, &parts, &n));
    /* LIFTED: also behind copies down of the update before, which this one would overtake. */
    return mt_edge(a->cx, MT_EDGE_LIFTED, q, a->guests[unit]->last);
}

mt_status mt_arrive_behind(mt_arrive *a, int unit, const int *params, int n, mt_event *made)
{
    guest    *g;
    mt_status st = MT_OK;

    MT_DO(find(a, unit, &g));
    MT_HOLD(&a->mu);
    assert_guest(a, g, unit);
    MT_ASSERT(g->parts != NULL);
    if (!mt_skips(a->cx, MT_EDGE_MADE))         /* MADE: the update is in its queue, not over */
        st = a->dev->ops->wait(a->queue, made);
    if (st == MT_OK)
        st = put_copies(a, g, unit, params, n, MT_STATE_PLANES, 0);
    if (st == MT_OK && mt_syncs(a->cx))
        st = a->dev->ops->sync_event(g->last);
    return st;
}

mt_status mt_arrive_wait(mt_arrive *a, int unit)
{
    MT_DO(mt_ledger_wait_updates(a->store, unit));
    return mt_arrive_copied(a, unit);
}

mt_status mt_arrive_copied(mt_arrive *a, int unit)
{
    guest *g;

    MT_DO(find(a, unit, &g));
    return mt_skips(a->cx, MT_EDGE_STORED) ? MT_OK
           : mt_watch_event(mt_store_watch(a->store), g->last, mt_store_name(a->store, unit),
                            COPIED);
}

mt_status mt_arrive_push(mt_arrive *a, int unit, int param, unsigned planes)
{
    guest *g;

    MT_DO(find(a, unit, &g));
    MT_WITH(&a->mu) {
        assert_guest(a, g, unit);
        if (g->parts != NULL)
            MT_DO(put_copies(a, g, unit, param < 0 ? NULL : &param, 1, planes, 1));
    }
    return mt_watch_event(mt_store_watch(a->store), g->last, mt_store_name(a->store, unit), COPIED);
}

mt_status mt_arrive_drain(mt_arrive *a)
{
    MT_DO(MT_LOCKED(&a->mu, a->dev->ops->record(a->queue, a->drained)));
    return mt_watch_event(mt_store_watch(a->store), a->drained, NULL,
                          "all copies of guests' states");
}

/* ---- looking in ------------------------------------------------------------------------- */

mt_arrive_stats mt_arrive_stats_get(mt_arrive *a)
{
    return MT_LOCKED(&a->mu, a->stats);
}
