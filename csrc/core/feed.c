/* feed.c — weights from the file to slots: read into a buffer, copied from there,
 * and the buffer is free again.
 *
 * All under the disk's mu, but for waits on the device: those are the mover's,
 * which alone puts copies.
 */
#include "disk_impl.h"

#include <stdlib.h>
#include <string.h>

#define LEAST    2                  /* buffers: one is read while another is copied */
#define MOST     64                 /* what keeps sixteen threads of the file at work, and more */
#define EXPECTED 8                  /* units */

#define IS(x)    (1u << MT__##x)

struct mt_feed {
    mt_disk *disk;
    mt_dev  *dev;
    mt__ring ring;
    mt_arena memory;
    int      unit, piece;               /* to be copied next; unit -1: nothing is fetched now. mu */
    int      begun;                     /* and its fetch is in the ledger. mu */
    int      expected[EXPECTED], n_expected;            /* units. mu */
};

/* ---- reading ahead: under mu ------------------------------------------------------------ */

static int expected(const mt_feed *f, int unit)
{
    for (int i = 0; i < f->n_expected; i++)
        if (f->expected[i] == unit)
            return 1;
    return 0;
}

/* A buffer for a piece of the unit: an empty one, or one whose weights nobody expects any more.
 * What the unit that is fetched now needs comes before what others will. */
static mt__buffer *find_room(const mt_feed *f, int unit)
{
    mt__buffer *k = mt__ring_find(&f->ring, IS(FREE), -1, -1);

    for (int i = 0; i < f->ring.n && k == NULL; i++) {
        mt__buffer *b = &f->ring.buffers[i];

        if (b->at == MT__READY && b->unit != f->unit && (unit == f->unit || !expected(f, b->unit)))
            k = b;
    }
    return k;
}

/* The unit's pieces from one on, as far as there is room. 0: what comes behind them has to wait. A
 * piece that is still being written stops it (WRITTEN), and so does a unit that is written from
 * outside (PUSHED); the end of either calls again. */
static int read_unit(mt_feed *f, int unit, int from)
{
    mt_disk          *d = f->disk;
    const mt__layout *l = unit < d->n_units ? d->units[unit].lay : NULL;

    for (int i = from; l != NULL && i < l->n_pieces; i++) {
        mt__buffer *room = mt__ring_find(&f->ring, IS(READING), unit, i);

        if (l->pieces[i].hi_bytes == 0 || (room != NULL && !room->dropped) ||
            mt__ring_find(&f->ring, IS(READY), unit, i) != NULL)
            continue;
        if (room != NULL || d->units[unit].held || (unit + 1 == d->away && d->sent.write) ||
            mt__ring_find(&d->ring, IS(WRITING), unit, i) != NULL ||
            (room = find_room(f, unit)) == NULL)
            return 0;
        if (room->at == MT__READY)
            mt__buffer_to(room, MT__FREE);
        mt__ring_put(room, unit, i, 0);
    }
    return 1;
}

/* FED: of a unit whose update is announced nothing is read ahead. Once its fetch has begun, the
 * update waits for that. */
static int may_read(const mt_feed *f, int unit)
{
    return (unit == f->unit && f->begun) || !mt_ledger_updates_due(f->disk->store, unit);
}

/* At each door, whose end looks what may be read next. */
static void assert_state(const mt_feed *f)
{
    const mt_disk *d = f->disk;

    if (!MT_IS_CHECKED)
        return;
    mt__ring_assert(&f->ring);
    MT_ASSERT(f->n_expected >= 0 && f->n_expected <= EXPECTED);
    MT_ASSERT(f->unit < 0 || (f->unit < d->n_units && f->piece <= d->units[f->unit].lay->n_pieces));
    for (int i = 0; i < f->ring.n; i++)
        MT_ASSERT(f->ring.buffers[i].at != MT__TAKEN || f->unit == f->ring.buffers[i].unit);
}

void mt__feed_ahead(mt_feed *f)
{
    mt_disk *d = f->disk;
    int      go = !d->failed;

    assert_state(f);

    if (go && f->unit >= 0)
        go = may_read(f, f->unit) && read_unit(f, f->unit, f->piece);
    for (int i = 0; go && i < f->n_expected; i++)
        if (f->expected[i] != f->unit)
            go = may_read(f, f->expected[i]) && read_unit(f, f->expected[i], 0);
}

void mt__feed_drop(mt_feed *f, int unit)
{
    mt__ring_drop(&f->ring, unit, UINT64_MAX);
}

int mt__feed_reads(const mt_feed *f, int unit)
{
    return mt__ring_find(&f->ring, IS(READING), unit, -1) != NULL;
}

/* Buffers whose copies are over (COPIED) are read into again. */
static mt_status reclaim(mt_feed *f)
{
    mt_status st = MT_OK;

    for (int i = 0; i < f->ring.n; i++) {
        mt__buffer *k = &f->ring.buffers[i];
        int         done = 0;

        if (k->at == MT__COPYING)
            MT_TRY(f->dev->ops->query(k->copied, &done));
        if (done)
            mt__buffer_to(k, MT__FREE);
    }
    mt__feed_ahead(f);
fail:
    return st;
}

void mt_feed_expect(mt_feed *f, const int *units, int n)
{
    mt_disk *d = f->disk;

    mt_lock(&d->mu);
    f->n_expected = 0;
    for (int i = 0; i < n && f->n_expected < EXPECTED; i++)
        if (mt_store_home(d->store, units[i], NULL)->fed)
            f->expected[f->n_expected++] = units[i];
    (void)reclaim(f);                    /* a device that fails fails the mover's calls too */
    mt_unlock(&d->mu);
}

/* ---- a fetch: the mover ------------------------------------------------------------------ */

typedef struct awaited {
    mt_feed    *f;
    mt__buffer *k;               /* has the piece, and is the mover's; NULL: not yet */
    mt__buffer *copying;         /* to be waited for first, since none is free; NULL: none */
    mt_status   st;
} awaited;

/* Under mu. */
static int is_loaded(void *arg)
{
    awaited *a = arg;
    mt_feed *f = a->f;

    if (f->disk->failed || (a->st = reclaim(f)) != MT_OK)
        return 1;
    if ((a->k = mt__ring_find(&f->ring, IS(READY), f->unit, f->piece)) != NULL) {
        mt__buffer_to(a->k, MT__TAKEN);
        f->piece++;
        return 1;
    }
    if (mt__ring_find(&f->ring, IS(READING), f->unit, f->piece) == NULL &&
        find_room(f, f->unit) == NULL)
        a->copying = mt__ring_find(&f->ring, IS(COPYING), -1, -1);
    return a->copying != NULL;
}

/* COPIED. Somebody else may have seen the same meanwhile, and read into k again. */
static mt_status wait_copied(mt_feed *f, mt__buffer *k)
{
    mt_disk  *d = f->disk;
    mt_status st = mt_watch_event(mt_store_watch(d->store), k->copied,
                                  mt_store_name(d->store, f->unit),
                                  "a copy of weights out of a buffer (COPIED)");

    mt_lock(&d->mu);
    if (st == MT_OK && k->at == MT__COPYING)
        mt__buffer_to(k, MT__FREE);
    mt_unlock(&d->mu);
    return st;
}

/* Until the next piece is in a buffer, which is then the mover's. */
static mt_status take_load(mt_feed *f, mt__buffer **out)
{
    mt_disk  *d = f->disk;
    awaited   a = { .f = f };
    mt_status st;

    while (a.k == NULL) {
        a.copying = NULL;
        st = mt_watch_until(mt_store_watch(d->store), &d->changed, &d->mu, is_loaded, &a,
                            mt_store_name(d->store, f->unit), "its weights from disk (READ)");
        if (st == MT_OK && a.st != MT_OK)
            st = a.st;
        if (st == MT_OK && a.copying != NULL)
            st = wait_copied(f, a.copying);
        else if (st == MT_OK && a.k == NULL)
            st = mt_ledger_check(d->store);          /* the disk failed */
        if (st != MT_OK)
            return st;
    }
    *out = a.k;
    return MT_OK;
}

static mt_status put_copy(mt_feed *f, mt__buffer *k, char *mem, mt_queue *h2d)
{
    mt_disk         *d = f->disk;
    const mt__piece *c = &d->units[k->unit].lay->pieces[k->piece];
    mt_span          span;
    mt_status        st;

    mt_timeline_begin(d->timeline, &span, MT_LANE_H2D, MT_WORK_FETCH, k->unit, h2d);
    MT_TRY(f->dev->ops->copy(h2d, mem + c->hi_at, k->mem, c->hi_bytes));
    mt_timeline_end(d->timeline, &span, c->hi_bytes, h2d);
    MT_TRY(f->dev->ops->record(h2d, k->copied));
fail:
    mt_lock(&d->mu);
    mt__buffer_to(k, MT__COPYING);       /* from here on its event is that of this copy */
    mt_unlock(&d->mu);
    return st;
}

static mt_status copy_unit(mt_feed *f, const mt__layout *l, char *mem, mt_queue *h2d)
{
    mt_status st = MT_OK;

    for (int i = 0; i < l->n_pieces; i++) {
        mt__buffer *k;

        MT_TRY(take_load(f, &k));
        MT_TRY(put_copy(f, k, mem, h2d));
    }
fail:
    return st;
}

/* unit -1: none. */
static const mt__layout *aim(mt_feed *f, int unit, int begun)
{
    mt_disk          *d = f->disk;
    const mt__layout *l;

    mt_lock(&d->mu);
    l = unit >= 0 && unit < d->n_units ? d->units[unit].lay : NULL;
    f->unit = l != NULL ? unit : -1;
    f->piece = 0;
    f->begun = begun;
    mt__feed_ahead(f);
    mt_unlock(&d->mu);
    return l;
}

void mt_feed_next(mt_feed *f, int unit)
{
    (void)aim(f, unit, 0);
}

mt_status mt_feed_copy(mt_feed *f, int unit, void *mem, mt_queue *h2d)
{
    const mt__layout *l = aim(f, unit, 1);
    mt_status         st;

    if (l == NULL)
        return MT_FAIL(MT_ESTATE,
                       "unit %s: its weights were never written to disk; push them first",
                       mt_store_name(f->disk->store, unit));
    st = copy_unit(f, l, mem, h2d);
    (void)aim(f, -1, 0);
    return st;
}

/* ---- open and close --------------------------------------------------------------------- */

mt_status mt_feed_open(mt_context *cx, size_t bytes, mt_feed **out)
{
    mt_disk  *d = cx->disk;
    size_t    each = d->most_weights > 0 ? d->most_weights : MT_BLOCK_ALIGN;
    int       n = (int)(bytes / each);
    mt_feed  *f = calloc(1, sizeof *f);
    mt_status st;

    if (f == NULL)
        return MT_FAIL(MT_ENOMEM, "disk: calloc(%zu)", sizeof *f);
    n = n < LEAST ? LEAST : n > MOST ? MOST : n;
    *f = (mt_feed){ .disk = d, .dev = cx->dev, .unit = -1 };
    MT_TRY(mt_arena_open(&f->memory, (size_t)n * each, NULL, cx->dev, "buffers of weights on disk",
                         mt_store_bytes(d->store, MT_PLANE_COUNT)));
    MT_TRY(mt__ring_open(&f->ring, d, n, f->memory.base, each, 1u << MT__WEIGHTS,
                         "weights to be read for a fetch"));
    for (int i = 0; i < n; i++)
        MT_TRY(f->dev->ops->event_open(f->dev, &f->ring.buffers[i].copied));
    mt_lock(&d->mu);
    d->stats.buffer_bytes += f->memory.bytes;
    d->feed = f;
    mt_unlock(&d->mu);
    *out = cx->feed = f;
    return MT_OK;

fail:
    mt_feed_close(f);
    return st;
}

/* Reads that are under way end first; the queue's copies are over,
 * since the mover's queue was closed. */
void mt_feed_close(mt_feed *f)
{
    mt_disk *d;

    if (f == NULL)
        return;
    d = f->disk;
    if (d->cx->feed == f)
        d->cx->feed = NULL;
    mt_lock(&d->mu);
    f->unit = -1;                        /* nothing more is read */
    f->n_expected = 0;
    while (mt__ring_find(&f->ring, IS(READING), -1, -1) != NULL)
        mt_cond_wait(&d->changed, &d->mu);
    if (d->feed == f) {
        d->feed = NULL;
        d->stats.buffer_bytes -= f->memory.bytes;
    }
    mt_unlock(&d->mu);
    for (int i = 0; i < f->ring.n; i++)
        f->dev->ops->event_close(f->ring.buffers[i].copied);
    mt_arena_close(&f->memory);
    free(f->ring.buffers);
    free(f);
}
