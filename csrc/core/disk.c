/* disk.c — pieces go round: read into a free buffer, updated there, written from there, and the
 * buffer is free again.
 *
 * Whoever frees a buffer puts the next read, which takes no time: so nobody waits for a free one
 * but updates.
 */
#include "disk.h"

#include "clock.h"

#include <stdlib.h>
#include <string.h>

#define HI     (1u << MT_PLANE_HI)
#define IS(x)  (1u << MT_BUFFER_##x)
#define IN_USE (~IS(FREE))

typedef struct disk_unit {
    int        on;                       /* it is ours */
    mt_layout *lay;                      /* NULL before its planes are first used. The lock, as
                                          * these */
    int        next;                     /* the unit that followed it last, or was added behind
                                          * it */
    int        held;                     /* it is being written from outside */
} disk_unit;

struct mt_disk {
    mt_context  *cx;                     /* these nine: constant */
    mt_store    *store;
    mt_blocks   *file;
    mt_pool     *pool;
    mt_rings    *all;
    mt_mutex    *mu;                     /* theirs: the lock, and the worker's too */
    mt_ring     *ring;                   /* of updates */
    mt_ring     *copies;                 /* of who reads or writes the host's */
    size_t       bytes;                  /* of a buffer */
    uint64_t     need;                   /* written by add, as the next */
    disk_unit   *units;                  /* [n_units] of the store's, as far as added */
    int64_t      n_units;
    int          last_added, first_added;        /* -1: none */

    size_t       most_weights;           /* bytes in a piece. The lock, as all below */
    int          fed;                    /* and fetches have buffers of so many */
    int          next_unit, next_piece;  /* to be read; next_unit -1: nobody knows */
    int          before;                 /* the unit updated last; -1: none */
    uint64_t     wait_ns, busy_ns;
    mt_worker    worker;                 /* updates */
};

/* ---- layouts ------------------------------------------------------------------------------ */

/* Under the lock. Buffers of fetches were made for the largest weights of a piece that there were.
 */
static mt_status note_weights(mt_disk *d, const mt_layout *l)
{
    if (l->most_weights > d->most_weights && d->fed)
        return MT_FAIL(MT_ESTATE, "unit %s: %zu bytes of weights in a piece, and fetches have "
                       "buffers of %zu; what is trained, and how its states are kept, may change "
                       "when its weights are on disk",
                       mt_store_name(d->store, l->unit), l->most_weights, d->most_weights);
    if (l->most_weights > d->most_weights)
        d->most_weights = l->most_weights;
    return MT_OK;
}

/* Behind the door of the unit, which is ours. */
static mt_status lay_out(mt_disk *d, int u, mt_layout **out)
{
    mt_layout *l = NULL;
    mt_status  st;

    if ((*out = d->units[u].lay) != NULL)
        return MT_OK;
    MT_TRY(mt_layout_make(d->store, u, d->bytes, 1, &l));
    MT_TRY(mt_layout_take(l, d->file));
    mt_lock(d->mu);
    if ((st = note_weights(d, l)) == MT_OK)
        *out = d->units[u].lay = l;
    mt_unlock(d->mu);
    if (st == MT_OK)
        return MT_OK;
fail:
    mt_layout_free(l);
    return st;
}

mt_rings *mt__disk_rings(mt_disk *d)
{
    return d->all;
}

size_t mt__disk_feeds(mt_disk *d, int on)
{
    MT_HOLD(d->mu);
    d->fed = on;
    return d->most_weights > 0 ? d->most_weights : MT_BLOCK_ALIGN;
}

const mt_layout *mt__disk_layout(const mt_disk *d, int unit, int *held)
{
    if (unit < 0 || unit >= d->n_units)
        return NULL;
    *held = d->units[unit].held;
    return d->units[unit].lay;
}

/* ---- reading ahead: under the lock --------------------------------------------------------- */

/* The first piece from one on that has states, or how many pieces there are. What has none is
 * rarely updated, and then read when it is asked for. */
static int with_states(const mt_layout *l, int from)
{
    while (from < l->n && l->pieces[from].section[MT_SECTION_STATES].bytes == 0)
        from++;
    return from;
}

static void step_on(mt_disk *d)
{
    const disk_unit *u = &d->units[d->next_unit];
    const mt_layout *l = u->lay;

    d->next_piece = with_states(l, d->next_piece + 1);
    if (d->next_piece < l->n)
        return;
    d->next_unit = u->next;
    l = d->units[d->next_unit].lay;
    d->next_piece = l != NULL ? with_states(l, 0) : 0;
    /* One that was never updated has nothing that could be read. */
    if (l == NULL || d->next_piece == l->n)
        d->next_unit = -1;
}

/* As far as there are free buffers. A piece that is still in one, not yet updated or not yet
 * written, stops it, or it would be updated in one and written from the other; and so does one that
 * is read for nobody any more. The end of that calls again. */
static void ahead(void *arg)
{
    mt_disk   *d = arg;
    mt_buffer *b;

    MT_ASSERT(d->next_unit < d->n_units && d->before < d->n_units);
    while (d->next_unit >= 0 && !d->units[d->next_unit].held &&
           mt_ring_find(d->ring, IN_USE, d->next_unit, d->next_piece) == NULL &&
           !mt_rings_meets(d->all, d->next_unit, d->next_piece, 0) &&
           (b = mt_ring_find(d->ring, IS(FREE), -1, -1)) != NULL) {
        mt_ring_put(b, d->units[d->next_unit].lay, d->next_piece, MT_ALL_SECTIONS, 0,
                    MT_BUFFER_READY);
        step_on(d);
    }
}

/* ---- an update: our thread ---------------------------------------------------------------- */

/* Is the piece in a buffer, which is ours then (*out)? Or has the disk failed? */
static int is_taken(mt_disk *d, int unit, int piece, mt_buffer **out)
{
    if (d->all->failed)
        return 1;
    if ((*out = mt_ring_find(d->ring, IS(READY), unit, piece)) != NULL) {
        mt_ring_drop(d->ring, -1, *out);                 /* read before it: passed over */
        mt_buffer_to(*out, MT_BUFFER_TAKEN);
        return 1;
    }
    /* Nobody reads it: another was thought to be next, or all buffers have pieces that this one
     * came instead of. Either way what was read ahead gives way, or none would ever be free. */
    if (mt_ring_find(d->ring, IN_USE, unit, piece) == NULL) {
        mt_ring_drop(d->ring, -1, NULL);
        d->next_unit = unit;
        d->next_piece = piece;
    }
    mt_rings_ahead(d->all);
    return 0;
}

/* Waits until the piece is in a buffer, which is then ours. */
static mt_status take_piece(mt_disk *d, int u, int number, mt_buffer **out)
{
    uint64_t   begun = mt_now_ns();
    mt_buffer *b = NULL;
    mt_span    span;
    mt_status  st;

    mt_timeline_begin(d->cx->timeline, &span, MT_LANE_DISK_UPDATE, MT_WORK_WAIT, u, NULL);
    st = MT_RINGS_UNTIL(d->all, is_taken(d, u, number, &b), u, "a piece to update (READ)");
    mt_timeline_end(d->cx->timeline, &span, 0, NULL);
    MT_WITH(d->mu) d->wait_ns += mt_now_ns() - begun;
    if (b == NULL)
        return st != MT_OK ? st : mt_ledger_check(d->store);
    *out = b;
    return MT_OK;
}

static mt_status compute(mt_disk *d, const mt_update *b, const mt_part *parts, int n,
                         uint64_t bytes)
{
    mt_watch *watch = mt_store_watch(d->store);
    uint64_t  begun = mt_now_ns();
    mt_span   span;
    mt_post   post;
    mt_status st;

    mt_timeline_begin(d->cx->timeline, &span, MT_LANE_DISK_UPDATE, MT_WORK_UPDATE, b->j.unit, NULL);
    mt_watch_begin(watch, &post, NULL, mt_store_name(d->store, b->j.unit),
                   "the pool, which computes its update");
    st = b->j.pieces(b->j.arg, d->pool, parts, n, b->clip);
    mt_watch_end(watch, &post, st);
    mt_timeline_end(d->cx->timeline, &span, bytes, NULL);
    MT_WITH(d->mu) d->busy_ns += mt_now_ns() - begun;
    return st;
}

/* -1: none. */
static int last_wanted(const mt_layout *l, const mt_update_job *j)
{
    int i = l->n - 1;

    while (i >= 0 && !mt_layout_has(l, i, j->params, j->n_params))
        i--;
    return i;
}

static mt_status update_pieces(mt_disk *d, const mt_layout *l, const mt_update *b, mt_part *parts)
{
    int       last = last_wanted(l, &b->j);
    mt_status st = MT_OK;

    for (int i = 0; i <= last && st == MT_OK; i++) {
        mt_buffer *f = NULL;

        if (!mt_layout_has(l, i, b->j.params, b->j.n_params))
            continue;
        MT_DO(take_piece(d, b->j.unit, i, &f));
        mt_pieces_at(l->cut, i, f->memory.base, parts);
        /* The record of the last piece has the unit's bytes. */
        st = compute(d, b, parts, l->cut->piece[i].n, i == last ? b->j.bytes : 0);
        mt_lock(d->mu);                  /* the buffer goes to the disk; or nowhere, and is free */
        if (st == MT_OK)
            mt_ring_put(f, l, i, MT_ALL_SECTIONS, 1, MT_BUFFER_FREE);
        else
            mt_buffer_to(f, MT_BUFFER_FREE);
        mt_rings_ahead(d->all);
        mt_unlock(d->mu);
    }
    return st;
}

/* Parameters that came after the unit's layout was made have all states in memory. Where there is
 * nothing else the first one's record has the unit's bytes. */
static mt_status update_late(mt_disk *d, const mt_layout *l, const mt_update *b)
{
    uint64_t  bytes = last_wanted(l, &b->j) < 0 ? b->j.bytes : 0;
    mt_status st = MT_OK;

    for (int i = 0; i < b->j.n_params && st == MT_OK; i++) {
        int     p = b->j.params[i];
        mt_part own = { .param = p };

        own.n = mt_store_owned(d->store, b->j.unit, p, &own.from);
        if (l->planes[p] != 0 || own.n == 0)
            continue;
        st = compute(d, b, &own, 1, bytes);
        bytes = 0;
    }
    return st;
}

/* Behind the door. Its layout, its place in the order, and then FED. */
static mt_status begin_update(mt_disk *d, const mt_update_job *j, mt_layout **l)
{
    const unsigned ahead_of_us = 1u << MT_MIRROR_AHEAD | 1u << MT_MIRROR_TORN;

    MT_DO(lay_out(d, j->unit, l));
    if (mt_mirror_any(d->store, j->unit, -1, ~0u, ahead_of_us))
        return MT_FAIL(MT_ESTATE, "unit %s: its weights were written on the host, and the file "
                       "does not have them; push them first", mt_store_name(d->store, j->unit));
    /* Its copies are stale from here on. Memory of states is given back. Weights that were brought
     * may be in somebody's graph, which wants them as they were: see mt_mirror_forget. */
    for (int i = 0; i < j->n_params; i++)
        mt_mirror_tell(d->store, j->unit, j->params[i], (*l)->planes[j->params[i]],
                       MT_MIRROR_CHANGED);
    mt_mirror_drop(d->store, j->unit, MT_STATE_PLANES);
    mt_lock(d->mu);
    if (d->before >= 0)
        d->units[d->before].next = j->unit;
    d->before = j->unit;
    mt_ring_drop_others(d->ring, j->unit);
    mt_unlock(d->mu);
    return MT_RINGS_UNTIL(d->all, !mt_ring_others_read(d->ring, j->unit), j->unit,
                          "reads of its weights ahead of a fetch (FED)");
}

static mt_status update(mt_disk *d, const mt_update *b)
{
    mt_part   *parts;
    mt_layout *l;
    mt_status  st;

    MT_DO(mt_ledger_check(d->store));
    /* WEIGHTS: they are overwritten. */
    MT_DO(mt_ledger_wait_fetch(d->store, b->j.unit));
    MT_DO(mt_mirror_enter(d->store, b->j.unit));
    st = begin_update(d, &b->j, &l);
    mt_mirror_leave(d->store, b->j.unit);
    MT_DO(st);
    MT_DO(MT_MAKE(parts, l->cut->most, mt_store_name(d->store, b->j.unit)));
    if ((st = update_pieces(d, l, b, parts)) == MT_OK)
        st = update_late(d, l, b);
    free(parts);
    return st;
}

static mt_status carry_out(void *arg, mt_job *node)
{
    mt_disk   *d = arg;
    mt_update *b = (mt_update *)(void *)node;
    mt_status  st;

    mt_unlock(d->mu);
    st = update(d, b);
    mt_update_over(d->store, b, st);
    mt_lock(d->mu);
    return st;
}

/* ---- the home: updates -------------------------------------------------------------------- */

static int home_fits(const mt_update_job *j)
{
    return j->pieces != NULL;
}

static mt_status home_update(void *arg, mt_update *u)
{
    mt_disk *d = arg;

    (void)MT_LOCKED(d->mu, mt_worker_submit(&d->worker, &u->node));
    return MT_OK;
}

static mt_status home_drain(void *arg)
{
    mt_disk  *d = arg;
    mt_status st = mt_worker_wait(&d->worker, mt_store_watch(d->store), MT_WORKER_ALL, NULL,
                                  "updates from disk");

    return st == MT_OK ? mt_ledger_check(d->store) : st;
}

/* ---- copies on the host: who is behind the unit's door --------------------------------------
 * One section after the other, in a buffer that is ours until the last. It waits for requests for
 * the same piece, and for nobody's else. What a buffer has at the end stays there, since parameters
 * that are pushed one after the other often share a piece; an update of the unit drops it. */

typedef struct visit {
    mt_disk         *d;
    const mt_layout *l;
    mt_part         *parts;              /* [most in a piece] */
    mt_buffer       *k;                  /* ours; NULL: none yet */
    int              piece, section;
} visit;

/* The buffer that the last one left of this unit; or one that is free; or another's, which goes
 * then; or a new one. */
static mt_status take_buffer(visit *v)
{
    const mt_ring *r = v->d->copies;

    while (v->k == NULL) {
        mt_lock(v->d->mu);
        if ((v->k = mt_ring_find(r, IS(READY), v->l->unit, -1)) == NULL &&
            (v->k = mt_ring_find(r, IS(FREE), -1, -1)) == NULL)
            v->k = mt_ring_find(r, IS(READY), -1, -1);
        if (v->k != NULL)
            mt_buffer_to(v->k, MT_BUFFER_TAKEN);
        mt_unlock(v->d->mu);
        if (v->k == NULL)
            MT_DO(mt_ring_add(v->d->copies, v->d->bytes, NULL));
    }
    return MT_OK;
}

/* No update of the unit is under way, but its writes may be: a read waits for those of the piece,
 * a write for reads too, also for those that nobody wants any more. */
static int is_put(visit *v, int write)
{
    if (mt_rings_meets(v->d->all, v->l->unit, v->piece, write))
        return 0;
    mt_ring_put(v->k, v->l, v->piece, 1u << v->section, write, MT_BUFFER_TAKEN);
    return 1;
}

static mt_status move(visit *v, int write)
{
    MT_DO(MT_RINGS_UNTIL(v->d->all, is_put(v, write), v->l->unit, "requests for the same piece"));
    MT_DO(MT_RINGS_UNTIL(v->d->all, v->k->at == MT_BUFFER_TAKEN, v->l->unit,
                         "a piece, for who reads or writes it here"));
    return mt_ledger_check(v->d->store);
}

static int is_loading(const visit *v, int param, unsigned planes)
{
    return mt_mirror_any(v->d->store, v->l->unit, param, planes, 1u << MT_MIRROR_LOADING);
}

/* Between the buffer, which has the section, and host planes. param -1: of all parameters. */
static mt_status copy(visit *v, int param, unsigned planes, int write)
{
    mt_pieces_at(v->l->cut, v->piece, v->k->memory.base, v->parts);
    for (int i = 0; i < v->l->cut->piece[v->piece].n; i++)
        for (int p = 0; p < MT_PLANE_COUNT; p++) {
            const mt_part *k = &v->parts[i];
            void          *host;
            size_t         bytes;

            if (!(planes >> p & 1) || k->at[p] == NULL || (param >= 0 && k->param != param) ||
                (!write && !is_loading(v, k->param, 1u << p)))
                continue;
            MT_DO(mt_part_host(v->d->store, v->l->unit, k, (mt_plane)p, &host, &bytes));
            memcpy(write ? k->at[p] : host, write ? host : k->at[p], bytes);
        }
    return MT_OK;
}

/* Has the piece something of the parameter, or of what is loading? */
static int concerns(const visit *v, int param, unsigned planes, int write)
{
    const mt_piece *c = &v->l->cut->piece[v->piece];

    if (write)
        return param < 0 || mt_layout_has(v->l, v->piece, &param, 1);
    for (int i = c->first; i < c->first + c->n; i++)
        if (is_loading(v, v->l->cut->part[i].param, planes))
            return 1;
    return 0;
}

/* What else is in a section that is written stays; where all of it is, it is not read first. */
static mt_status do_section(visit *v, int param, unsigned planes, int write)
{
    int all = write && param < 0 && v->section == MT_SECTION_WEIGHTS;

    planes &= v->section == MT_SECTION_WEIGHTS ? HI : ~HI;
    if (planes == 0 || v->l->pieces[v->piece].section[v->section].bytes == 0 ||
        !concerns(v, param, planes, write))
        return MT_OK;
    MT_DO(take_buffer(v));
    if (!all && !mt_buffer_has(v->k, v->l, v->piece, 1u << v->section))
        MT_DO(move(v, 0));
    MT_DO(copy(v, param, planes, write));
    if (write)
        MT_DO(move(v, 1));
    return MT_OK;
}

/* param -1: all of the unit's. */
static mt_status visit_all(mt_disk *d, const mt_layout *l, int param, unsigned planes, int write)
{
    visit     v = { .d = d, .l = l };
    mt_status st = MT_OK;

    MT_DO(MT_MAKE(v.parts, l->cut->most, mt_store_name(d->store, l->unit)));
    planes &= param < 0 ? planes : l->planes[param];
    for (; v.piece < l->n && planes != 0 && st == MT_OK; v.piece++)
        for (v.section = 0; v.section < MT_SECTIONS && st == MT_OK; v.section++)
            st = do_section(&v, param, planes, write);
    if (v.k != NULL) {
        mt_lock(d->mu);
        if (st == MT_OK)
            mt_buffer_to(v.k, MT_BUFFER_READY);
        else                             /* it has what the file has not, or is still under way */
            mt_buffer_leave(v.k);
        mt_unlock(d->mu);
    }
    free(v.parts);
    return st;
}

static mt_status home_load(void *arg, int u, unsigned planes)
{
    mt_disk   *d = arg;
    mt_layout *l;

    MT_DO(lay_out(d, u, &l));
    return visit_all(d, l, -1, planes, 0);
}

/* PUSHED: nobody reads ahead of the unit while it is held. */
static mt_status home_store(void *arg, int u, int param, unsigned planes)
{
    mt_disk   *d = arg;
    mt_layout *l;
    mt_status  st;

    (void)MT_LOCKED(d->mu, d->units[u].held = 1);
    if ((st = lay_out(d, u, &l)) == MT_OK) {
        MT_WITH(d->mu) mt_ring_drop_others(d->copies, u);
        st = visit_all(d, l, param, planes, 1);
    }
    MT_HOLD(d->mu);
    d->units[u].held = 0;
    mt_rings_ahead(d->all);
    return st;
}

#define IS_ON_DISK                                                                                \
    .from = &mt_home_ram, .load = home_load, .store = home_store, .fits = home_fits,              \
    .update = home_update, .turn = 1, .drain = home_drain

const mt_home mt_home_disk = {
    .lives = "has its states on disk", .away = MT_STATE_PLANES, .fresh = MT_STATE_PLANES,
    .registered = HI | 1u << MT_PLANE_GRAD, IS_ON_DISK,
};

const mt_home mt_home_disk_weights = {
    .lives = "has its weights and states on disk", .away = MT_STATE_PLANES | HI, .fed = 1,
    .fresh = MT_STATE_PLANES, .registered = 1u << MT_PLANE_GRAD, IS_ON_DISK,
};

/* ---- open and close ------------------------------------------------------------------------ */

mt_status mt_disk_open(mt_context *cx, mt_blocks *file, mt_pool *pool, int n_buffers, size_t bytes,
                       mt_disk **out)
{
    mt_disk    *d = NULL;
    mt_ring_how how = { .name = "buffers of the disk", .reads = "a piece to be read (READ)",
                        .writes = "a piece to be written", .ahead = ahead };
    mt_ring_how copies = { .name = "buffers of the disk",
                           .reads = "a piece to be read for the host (WRITTEN)",
                           .writes = "a piece to be written (PUSHED)" };
    size_t      all;
    mt_status   st;

    if (n_buffers < 1 || bytes < MT_DISK_LEAST || bytes % MT_BLOCK_ALIGN != 0)
        return MT_FAIL(MT_EINVAL,
                       "disk: %d buffers of %zu bytes; one of %zu is the least, in steps of %zu",
                       n_buffers, bytes, MT_DISK_LEAST, MT_BLOCK_ALIGN);
    MT_TRY(mt_mul_size((size_t)n_buffers + 1, bytes, "buffers of the disk", &all));
    MT_TRY(MT_MAKE(d, 1, "disk"));
    *d = (mt_disk){ .cx = cx, .store = cx->store, .file = file, .pool = pool, .bytes = bytes,
                    .next_unit = -1, .before = -1, .first_added = -1, .last_added = -1 };
    how.arg = d;
    MT_TRY(mt_rings_open(cx, file, &d->all));
    d->mu = &d->all->mu;
    MT_TRY(mt_ring_open(d->all, &how, &d->ring));
    for (int i = 0; i < n_buffers; i++)
        MT_TRY(mt_ring_add(d->ring, bytes, NULL));
    MT_TRY(mt_ring_open(d->all, &copies, &d->copies));
    MT_TRY(mt_ring_add(d->copies, bytes, NULL));
    MT_TRY(mt_worker_open(&d->worker, d->mu, 1, "mt-disk-update", "disk update", carry_out, d));
    *out = cx->disk = d;
    return MT_OK;

fail:
    mt_disk_close(d);
    return st;
}

void mt_disk_close(mt_disk *d)
{
    if (d == NULL)
        return;
    if (d->cx->disk == d)
        d->cx->disk = NULL;
    mt_worker_close(&d->worker);
    for (int i = 0; i < d->n_units; i++)
        if (d->units[i].on)
            mt_mirror_close(d->store, i);        /* another rank may be served out of `copies` */
    mt_ring_close(d->copies);
    mt_ring_close(d->ring);
    for (int i = 0; i < d->n_units; i++)
        mt_layout_free(d->units[i].lay);
    mt_rings_close(d->all);
    free(d->units);
    free(d);
}

mt_status mt_disk_add(mt_disk *d, int u, int weights)
{
    mt_layout *l = NULL;
    mt_status  st;

    if (u < 0 || u >= mt_store_units(d->store))
        return MT_FAIL(MT_EINVAL, "there is no unit %d; the store has %d", u,
                       mt_store_units(d->store));
    if (weights && d->cx->share != NULL && mt_share_is_apart(d->cx->share))
        return MT_FAIL(MT_ENOTSUP, "unit %s: weights of several machines are not on disk",
                       mt_store_name(d->store, u));
    MT_DO(MT_GROW(d->units, d->n_units, u + 1, "disk"));
    if (d->units[u].on)
        return MT_OK;
    MT_DO(mt_store_move(d->store, u, weights ? &mt_home_disk_weights : &mt_home_disk, d));
    /* What its planes would take, as they would be now. */
    if ((st = mt_layout_make(d->store, u, d->bytes, 0, &l)) == MT_OK &&
        (st = MT_LOCKED(d->mu, note_weights(d, l))) == MT_OK)
        d->need += l->bytes;
    mt_layout_free(l);
    if (st != MT_OK) {
        (void)mt_store_move(d->store, u, &mt_home_ram, NULL);
        return st;
    }
    d->units[u].on = 1;
    if (d->last_added >= 0)              /* until the first step says better */
        d->units[d->last_added].next = u;
    d->first_added = d->first_added < 0 ? u : d->first_added;
    d->units[u].next = d->first_added;
    d->last_added = u;
    return st;
}

uint64_t mt_disk_need(mt_disk *d)
{
    return d->need;
}

mt_disk_stats mt_disk_stats_get(mt_disk *d)
{
    const mt_rings_stats *r = &d->all->stats;
    mt_disk_stats         stats;

    MT_HOLD(d->mu);
    stats = (mt_disk_stats){ r->read_bytes, r->written_bytes, d->wait_ns, d->busy_ns,
                             r->buffer_bytes };
    return stats;
}
