/* feed.c — a ring whose buffers the mover empties: it alone puts copies, and waits for the
 * device. All is under the rings' lock, but for those waits.
 */
#include "feed.h"

#include <stdlib.h>

#define LEAST    2                  /* buffers: one is read while another is copied */
#define MOST     64                 /* what keeps sixteen threads of the file at work, and more */
#define EXPECTED 8                  /* units */

#define IS(x)    (1u << MT_BUFFER_##x)

struct mt_feed {
    mt_context  *cx;                    /* these six: constant */
    mt_disk     *disk;
    mt_rings    *all;
    mt_mutex    *mu;                    /* theirs: the lock */
    mt_ring     *ring;
    mt_event    *copied[MOST];          /* of each buffer: recorded on h2d behind the copy */
    int          unit, piece;           /* to be copied next; unit -1: nothing is fetched now. The
                                         * lock, as all below */
    int          begun;                 /* and its fetch is in the ledger */
    int          expected[EXPECTED], n_expected;        /* units */
};

/* ---- reading ahead: under the lock -------------------------------------------------------- */

static int expected(const mt_feed *f, int unit)
{
    for (int i = 0; i < f->n_expected; i++)
        if (f->expected[i] == unit)
            return 1;
    return 0;
}

/* A buffer for a piece of the unit: an empty one, or one whose weights nobody expects any more.
 * What the unit that is fetched now needs comes before what others will. */
static mt_buffer *find_room(const mt_feed *f, int unit)
{
    mt_buffer *k = mt_ring_find(f->ring, IS(FREE), -1, -1);

    for (int i = 0; k == NULL && i < f->ring->n; i++) {
        mt_buffer *b = f->ring->buffers[i];
        int        has = mt_buffer_unit(b);

        if (b->at == MT_BUFFER_READY && has != f->unit &&
            (unit == f->unit || !expected(f, has)))
            k = b;
    }
    return k;
}

/* The unit's pieces from one on, as far as there is room. 0: what comes behind them has to wait. A
 * piece that is still being written stops it (WRITTEN), and so does a unit that is written from
 * outside (PUSHED); the end of either calls again. */
static int read_unit(mt_feed *f, int unit, int from)
{
    int              held;
    const mt_layout *l = mt__disk_layout(f->disk, unit, &held);

    for (int i = from; l != NULL && i < l->n; i++) {
        mt_buffer *room;

        if (l->cut->piece[i].hi_bytes == 0 ||
            mt_ring_find(f->ring, IS(READING) | IS(READY), unit, i) != NULL)
            continue;
        if (mt_ring_find(f->ring, IS(DROPPED), unit, i) != NULL || held ||
            mt_rings_meets(f->all, unit, i, 0) || (room = find_room(f, unit)) == NULL)
            return 0;
        if (room->at == MT_BUFFER_READY)
            mt_buffer_to(room, MT_BUFFER_FREE);
        mt_ring_put(room, l, i, 1u << MT_SECTION_WEIGHTS, 0, MT_BUFFER_READY);
    }
    return 1;
}

/* FED: of a unit whose update is announced nothing is read ahead. Once its fetch has begun, the
 * update waits for that. */
static int may_read(const mt_feed *f, int unit)
{
    return (unit == f->unit && f->begun) || !mt_ledger_updates_due(f->cx->store, unit);
}

static void ahead(void *arg)
{
    mt_feed *f = arg;
    int      go = 1;

    MT_ASSERT(f->n_expected >= 0 && f->n_expected <= EXPECTED);
    if (f->unit >= 0)
        go = may_read(f, f->unit) && read_unit(f, f->unit, f->piece);
    for (int i = 0; go && i < f->n_expected; i++)
        if (f->expected[i] != f->unit)
            go = may_read(f, f->expected[i]) && read_unit(f, f->expected[i], 0);
}

/* Buffers whose copies are over (COPIED) are read into again. */
static mt_status reclaim(mt_feed *f)
{
    for (int i = 0; i < f->ring->n; i++) {
        mt_buffer *k = f->ring->buffers[i];
        int        done = 0;

        if (k->at == MT_BUFFER_COPYING)
            MT_DO(f->cx->dev->ops->query(f->copied[i], &done));
        if (done)
            mt_buffer_to(k, MT_BUFFER_FREE);
    }
    mt_rings_ahead(f->all);
    return MT_OK;
}

void mt_feed_expect(mt_feed *f, const int *units, int n)
{
    MT_HOLD(f->mu);
    f->n_expected = 0;
    for (int i = 0; i < n && f->n_expected < EXPECTED; i++)
        if (mt_store_home(f->cx->store, units[i], NULL)->fed)
            f->expected[f->n_expected++] = units[i];
    (void)reclaim(f);                    /* a device that fails fails the mover's calls too */
}

/* ---- a fetch: the mover ------------------------------------------------------------------- */

/* The next piece is in a buffer (*out), which is the mover's then; or none is free, and one is being
 * copied (*copying) that is to be waited for; or something failed. */
static int is_loaded(mt_feed *f, mt_buffer **out, mt_buffer **copying, mt_status *st)
{
    if (f->all->failed || (*st = reclaim(f)) != MT_OK)
        return 1;
    if ((*out = mt_ring_find(f->ring, IS(READY), f->unit, f->piece)) != NULL) {
        mt_buffer_to(*out, MT_BUFFER_TAKEN);
        f->piece++;
        return 1;
    }
    if (mt_ring_find(f->ring, IS(READING) | IS(DROPPED), f->unit, f->piece) == NULL &&
        find_room(f, f->unit) == NULL)
        *copying = mt_ring_find(f->ring, IS(COPYING), -1, -1);
    return *copying != NULL;
}

static mt_status take_load(mt_feed *f, mt_buffer **out)
{
    mt_buffer *found = NULL, *copying;
    mt_status  looked = MT_OK;

    while (found == NULL) {
        copying = NULL;
        MT_DO(MT_RINGS_UNTIL(f->all, is_loaded(f, &found, &copying, &looked), f->unit,
                             "its weights from disk (READ)"));
        MT_DO(looked);
        if (copying != NULL) {
            MT_DO(mt_watch_event(mt_store_watch(f->cx->store), f->copied[copying->number],
                                 mt_store_name(f->cx->store, f->unit),
                                 "a copy of weights out of a buffer (COPIED)"));
            MT_HOLD(f->mu);              /* somebody may have seen the same, and read into it */
            if (copying->at == MT_BUFFER_COPYING)
                mt_buffer_to(copying, MT_BUFFER_FREE);
        } else if (found == NULL)
            MT_DO(mt_ledger_check(f->cx->store));        /* the disk failed */
    }
    *out = found;
    return MT_OK;
}

static mt_status put_copy(mt_feed *f, const mt_layout *l, int piece, mt_buffer *k, char *mem,
                          mt_queue *h2d)
{
    const mt_dev_ops *ops = f->cx->dev->ops;
    size_t            bytes = l->cut->piece[piece].hi_bytes;
    mt_span           span;
    mt_status         st;

    mt_timeline_begin(f->cx->timeline, &span, MT_LANE_H2D, MT_WORK_FETCH, l->unit, h2d);
    MT_TRY(ops->copy(h2d, mem + l->pieces[piece].hi_at, k->memory.base, bytes));
    mt_timeline_end(f->cx->timeline, &span, bytes, h2d);
    MT_TRY(ops->record(h2d, f->copied[k->number]));
fail:
    mt_lock(f->mu);
    mt_buffer_to(k, MT_BUFFER_COPYING);  /* from here on its event is that of this copy */
    mt_unlock(f->mu);
    return st;
}

/* unit -1: none. */
static const mt_layout *aim(mt_feed *f, int unit, int begun)
{
    const mt_layout *l;
    int              held;

    MT_HOLD(f->mu);
    l = mt__disk_layout(f->disk, unit, &held);
    f->unit = l != NULL ? unit : -1;
    f->piece = 0;
    f->begun = begun;
    mt_rings_ahead(f->all);
    return l;
}

void mt_feed_next(mt_feed *f, int unit)
{
    (void)aim(f, unit, 0);
}

mt_status mt_feed_copy(mt_feed *f, int unit, void *mem, mt_queue *h2d)
{
    const mt_layout *l = aim(f, unit, 1);
    mt_buffer       *k;
    mt_status        st = MT_OK;

    if (l == NULL)
        return MT_FAIL(MT_ESTATE,
                       "unit %s: its weights were never written to disk; push them first",
                       mt_store_name(f->cx->store, unit));
    for (int i = 0; i < l->n && st == MT_OK; i++)
        if ((st = take_load(f, &k)) == MT_OK)
            st = put_copy(f, l, i, k, mem, h2d);
    (void)aim(f, -1, 0);
    return st;
}

/* ---- open and close ----------------------------------------------------------------------- */

mt_status mt_feed_open(mt_context *cx, size_t bytes, mt_feed **out)
{
    mt_feed    *f;
    mt_ring_how how = { .name = "buffers of weights on disk", .ahead = ahead,
                        .reads = "weights to be read for a fetch" };
    size_t      each, n;
    mt_status   st;

    MT_TRY(MT_MAKE(f, 1, "disk"));
    *f = (mt_feed){ .cx = cx, .disk = cx->disk, .all = mt__disk_rings(cx->disk), .unit = -1 };
    f->mu = &f->all->mu;
    how.arg = f;
    each = mt__disk_feeds(f->disk, 1);
    n = bytes / each;
    MT_TRY(mt_ring_open(f->all, &how, &f->ring));
    n = n < LEAST ? LEAST : n > MOST ? MOST : n;
    for (size_t i = 0; i < n; i++) {
        MT_TRY(cx->dev->ops->event_open(cx->dev, &f->copied[i]));
        MT_TRY(mt_ring_add(f->ring, each, cx->dev));
    }
    *out = cx->feed = f;
    return MT_OK;

fail:
    mt_feed_close(f);
    return st;
}

/* Reads that are under way end first; the queue's copies are over, since the mover's queue was
 * closed. */
void mt_feed_close(mt_feed *f)
{
    if (f == NULL)
        return;
    if (f->cx->feed == f)
        f->cx->feed = NULL;
    mt_ring_close(f->ring);
    (void)mt__disk_feeds(f->disk, 0);
    for (int i = 0; i < MOST; i++)
        if (f->copied[i] != NULL)
            f->cx->dev->ops->event_close(f->copied[i]);
    free(f);
}
