/* arrive.c — guests' states: one queue for their copies, up and down.
 *
 * While a stay lasts both sides have the states: an update changes the device's, and copies of
 * what it changed follow it down; a write on the host goes up at once.
 * So a stay may go on over several steps.
 */
#include "resident_impl.h"

#include <stdlib.h>

#define TURNS  48
#define COPIED "copies of its states (the event STORED)"

int mt_arrive_invited(const mt_resident *r, int unit)
{
    return mt_store_home(r->store, unit, NULL) == &mt_home_arrive;
}

static mt_status find(const mt_resident *r, int unit, mt__settled **out)
{
    if (!mt_arrive_invited(r, unit))
        return MT_FAIL(MT_EINVAL, "unit %d (%s): its states do not come to the device and leave; "
                       "invite it first", unit, mt_store_name(r->store, unit));
    return mt__settled_find(r, unit, out);
}

/* ---- invite and dismiss ----------------------------------------------------------------- */

static void end_stay(mt__settled *h)
{
    free(h->parts);
    h->parts = NULL;
    h->n = 0;
}

void mt__arrive_close(const mt_resident *r, mt__settled *h)
{
    mt_watch_take(mt_store_watch(r->store), &h->copying);
    r->dev->ops->event_close(h->last);
    r->dev->ops->event_close(h->vacant);
    h->last = h->vacant = NULL;
    end_stay(h);
}

mt_status mt_arrive_invite(mt_resident *r, int unit)
{
    mt__settled *h;
    mt_status    st;

    if (mt_arrive_invited(r, unit))
        return MT_OK;
    MT_DO(mt__settled_find(r, unit, &h));
    if (r->all_left == NULL)
        MT_DO(r->dev->ops->event_open(r->dev, &r->all_left));
    if (r->guests == NULL)
        MT_DO(r->dev->ops->queue_open(r->dev, "guests", &r->guests));
    /* Before another rank may ask for its states. */
    MT_TRY(r->dev->ops->event_open(r->dev, &h->last));
    MT_TRY(r->dev->ops->event_open(r->dev, &h->vacant));
    MT_TRY(mt_store_move(r->store, unit, &mt_home_arrive, r));
    return MT_OK;
fail:
    mt__arrive_close(r, h);
    return st;
}

mt_status mt_arrive_dismiss(mt_resident *r, int unit)
{
    mt__settled *h;

    MT_DO(find(r, unit, &h));
    if (h->parts != NULL)
        return MT_FAIL(MT_ESTATE, "unit %s: its states are on the device; they must leave before",
                       mt_store_name(r->store, unit));
    MT_DO(mt_store_move(r->store, unit, &mt_home_vram, r));
    mt__arrive_close(r, h);
    return MT_OK;
}

/* ---- cutting ---------------------------------------------------------------------------- */

/* A piece for each part, so that none is larger than what torch's allocator finds room for. */
static mt_status cut(const mt_resident *r, int unit, size_t most, mt_pieces **out)
{
    int       n = mt_store_params(r->store, unit);
    unsigned *planes MT_FREED = NULL;

    MT_DO(MT_MAKE(planes, n, mt_store_name(r->store, unit)));
    for (int i = 0; i < n; i++)
        planes[i] = mt_store_trainable(r->store, unit, i) ? MT_STATE_PLANES : 0;
    most = most < MT_ARRIVE_LEAST ? MT_ARRIVE_LEAST : most;
    return mt_pieces_cut(r->store, unit, &(mt_cut){ planes, most, MT_PART_ALIGN, MT_STATES_GROUP, 1,
                                                    MT_PART_ALIGN }, out);
}

mt_status mt_arrive_sizes(mt_resident *r, int unit, size_t most, size_t **bytes, int *n)
{
    mt_pieces   *pieces MT_CLOSED(mt_pieces_free) = NULL;
    size_t      *found;
    mt__settled *h;

    MT_DO(find(r, unit, &h));
    MT_DO(cut(r, unit, most, &pieces));
    MT_DO(MT_MAKE(found, pieces->n, mt_store_name(r->store, unit)));
    for (int i = 0; i < pieces->n; i++)
        found[i] = pieces->piece[i].bytes;
    *n = pieces->n;
    *bytes = found;
    return MT_OK;
}

/* ---- copies: under mu ------------------------------------------------------------------- */

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
static mt_status let_others(mt_resident *r)
{
    uint64_t all = 0;

    if (r->down < r->turn)
        return MT_OK;
    for (int u = 0; u < r->n_units; u++)
        all += r->units[u] != NULL && mt_arrive_invited(r, u) ? r->units[u]->bytes : 0;
    r->turn = r->down + all / TURNS;
    return r->dev->ops->call(r->guests, nothing, NULL);
}

/* params NULL: all. What was put is waited for by whoever waits for `last`,
 * also after a failure. */
static mt_status put_copies(mt_resident *r, mt__settled *h, const int *params, int n,
                            unsigned planes, int up, uint64_t *bytes)
{
    uint64_t  up_bytes = 0, *copied = up ? &up_bytes : &r->down, before = *copied;
    mt_span   span;
    mt_status st = MT_OK, end;

    mt_timeline_begin(r->cx->timeline, &span, MT_LANE_THROUGH, up ? MT_WORK_FETCH : MT_WORK_OFFLOAD,
                      h->unit, r->guests);
    for (int i = 0; i < h->n && st == MT_OK; i++) {
        int asked = params == NULL;

        for (int k = 0; k < n && !asked; k++)
            asked = params[k] == h->parts[i].param;
        if (!asked)
            continue;
        st = mt_part_copy(r->store, h->unit, &h->parts[i], planes, r->guests, up, copied);
        if (st == MT_OK && !up)
            st = let_others(r);
    }
    *bytes = *copied - before;
    *(up ? &r->stats.h2d_bytes : &r->stats.d2h_bytes) += *bytes;
    mt_timeline_end(r->cx->timeline, &span, *bytes, r->guests);
    end = mt__record(r, h, r->guests, h->last, &h->copying, "guests", COPIED);
    return st != MT_OK ? st : end;
}

/* ---- a stay ----------------------------------------------------------------------------- */

/* Under mu. The parts are the unit's from here on. */
static mt_status put_lift(mt_resident *r, mt__settled *h, mt_part *parts, int n, mt_queue *run)
{
    mt_status st;

    h->parts = parts;
    h->n = n;
    /* VACANT: whoever had this memory before computed with it in run. */
    MT_TRY(r->dev->ops->record(run, h->vacant));
    MT_TRY(mt_edge(r->cx, MT_EDGE_VACANT, r->guests, h->vacant));
    MT_TRY(put_copies(r, h, NULL, 0, MT_STATE_PLANES, 1, &h->bytes));
    if (r->cx->debug.sync)
        MT_TRY(r->dev->ops->sync_event(h->last));
    return MT_OK;

fail:
    /* Some copies may be under way, into memory that stays the caller's. */
    (void)r->dev->ops->sync(r->guests);
    end_stay(h);
    return st;
}

mt_status mt_arrive_lift(mt_resident *r, int unit, size_t most, void *const *mem, int n,
                         mt_queue *run, int *taken)
{
    mt_pieces   *pieces MT_CLOSED(mt_pieces_free) = NULL;
    mt_part     *parts MT_FREED = NULL;
    unsigned     planes = 0;
    mt__settled *h;

    MT_DO(find(r, unit, &h));
    /* UPDATED: an update still to be put would change the states while they are copied. */
    MT_DO(mt_ledger_wait_updates(r->store, unit));
    if (MT_LOCKED(&r->mu, h->parts != NULL)) {
        *taken = 0;
        return MT_OK;
    }
    MT_DO(cut(r, unit, most, &pieces));
    if (pieces->n != n)
        return MT_FAIL(MT_EINVAL, "unit %s: %d pieces of device memory for its states; they take "
                       "%d", mt_store_name(r->store, unit), n, pieces->n);
    MT_DO(MT_MAKE(parts, n, mt_store_name(r->store, unit)));
    for (int i = 0; i < n; i++) {
        mt_pieces_at(pieces, i, mem[i], &parts[i]);
        for (int p = 0; p < MT_PLANE_COUNT; p++)
            planes |= (unsigned)(parts[i].at[p] != NULL) << p;
    }
    for (int p = 0; p < MT_PLANE_COUNT; p++)         /* pages by the gigabyte: made without mu */
        if (planes >> p & 1)
            MT_DO(mt_store_commit(r->store, unit, (mt_plane)p));
    MT_HOLD(&r->mu);
    MT_ASSERT(h->parts == NULL);
    MT_DO(put_lift(r, h, MT_KEEP(parts), n, run));
    mt__assert_settled(r, h);
    *taken = 1;
    return MT_OK;
}

mt_status mt_arrive_leave(mt_resident *r, int unit, int wait, int *left)
{
    int          idle;
    mt__settled *h;

    MT_DO(find(r, unit, &h));
    if (wait) {
        MT_DO(mt_ledger_wait_updates(r->store, unit));
        MT_DO(mt__arrive_copied(r, unit));
    }
    idle = !mt_ledger_updates_due(r->store, unit);
    /* STORED: who has the pieces next would write what is still copied. */
    if (idle && !mt_skips(r->cx, MT_EDGE_STORED))
        MT_DO(r->dev->ops->query(h->last, &idle));
    if (idle)
        MT_WITH(&r->mu) {
            mt__assert_settled(r, h);
            end_stay(h);
        }
    *left = idle;
    return MT_OK;
}

/* ---- what resident.c asks --------------------------------------------------------------- */

mt_status mt_arrive_parts(const mt_resident *r, int unit, const mt_part **parts, int *n)
{
    mt__settled *h;

    MT_DO(find(r, unit, &h));
    mt__assert_settled(r, h);
    if (h->parts == NULL)
        return MT_FAIL(MT_ESTATE, "unit %s: its states are on the host; they are lifted before its "
                       "update", mt_store_name(r->store, unit));
    *parts = h->parts;
    *n = h->n;
    return MT_OK;
}

mt_status mt__arrive_before(mt_resident *r, mt__settled *h, mt_queue *q)
{
    const mt_part *parts;
    int            n;

    MT_DO(mt_arrive_parts(r, h->unit, &parts, &n));
    /* LIFTED: also behind copies down of the update before, which this one would overtake. */
    return mt_edge(r->cx, MT_EDGE_LIFTED, q, h->last);
}

mt_status mt__arrive_behind(mt_resident *r, mt__settled *h, const int *params, int n)
{
    uint64_t bytes;

    mt__assert_settled(r, h);
    MT_ASSERT(h->parts != NULL);
    /* MADE: the update is in its queue, not over. */
    MT_DO(mt_edge(r->cx, MT_EDGE_MADE, r->guests, h->done));
    MT_DO(put_copies(r, h, params, n, MT_STATE_PLANES, 0, &bytes));
    return r->cx->debug.sync ? r->dev->ops->sync_event(h->last) : MT_OK;
}

mt_status mt__arrive_copied(const mt_resident *r, int unit)
{
    mt__settled *h;

    MT_DO(find(r, unit, &h));
    return mt_skips(r->cx, MT_EDGE_STORED) ? MT_OK
           : mt_watch_event(mt_store_watch(r->store), h->last, mt_store_name(r->store, unit),
                            COPIED);
}

mt_status mt__arrive_push(mt_resident *r, int unit, int param, unsigned planes)
{
    mt__settled *h;
    uint64_t     bytes;

    MT_DO(find(r, unit, &h));
    MT_WITH(&r->mu) {
        mt__assert_settled(r, h);
        if (h->parts != NULL)
            MT_DO(put_copies(r, h, param < 0 ? NULL : &param, 1, planes, 1, &bytes));
    }
    return mt_watch_event(mt_store_watch(r->store), h->last, mt_store_name(r->store, unit), COPIED);
}

mt_status mt__arrive_drain(mt_resident *r)
{
    if (r->guests == NULL)
        return MT_OK;
    MT_DO(MT_LOCKED(&r->mu, r->dev->ops->record(r->guests, r->all_left)));
    return mt_watch_event(mt_store_watch(r->store), r->all_left, NULL,
                          "all copies of guests' states");
}
