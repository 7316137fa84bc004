/* disk.c — pieces go round: read into a free buffer, updated there, written from there,
 * and the buffer is free again.
 *
 * Whoever frees a buffer puts the next read, which takes no time: so nobody waits for a free one
 * but updates. One lock, which nobody holds while anything moves. Two things are somebody's for
 * longer: a unit, whose layout is made or whose host planes are written, and then the bounce
 * buffer, for one section of a piece. So who reads one unit waits for no more than a piece of
 * another; of those who wait a save comes last.
 */
#include "disk_impl.h"

#include "clock.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HI     (1u << MT_PLANE_HI)

typedef struct job {
    mt_job      node;
    mt_update_job j;                       /* params: our copy */
    float       clip;
} job;

/* ---- layout ----------------------------------------------------------------------------- */

/* Planes at home in the file in which the parameter has something; real: of those, where it has its
 * place in the unit's arena, which is so for good once that is made. */
static mt_status planes_of(const mt_disk *d, int u, int param, int real, unsigned *out)
{
    const mt_param_desc *desc = mt_store_desc(d->store, u, param);
    unsigned             ours = mt_store_home(d->store, u, NULL)->away, planes = 0;
    mt_status            st = MT_OK;

    for (int p = 0; p < MT_PLANE_COUNT && desc->numel > 0; p++) {
        int in = mt_store_trainable(d->store, u, param) || p == MT_PLANE_HI;

        if (!(ours >> p & 1) || mt_store_plane_bytes(d->store, u, param, (mt_plane)p, 1) == 0)
            continue;
        if (real)
            MT_TRY(mt_store_in_arena(d->store, u, param, (mt_plane)p, &in));
        planes |= in ? 1u << p : 0;
    }
    *out = planes;
fail:
    return st;
}

static void layout_free(mt__layout *l)
{
    if (l == NULL)
        return;
    for (int i = 0; i < l->n_pieces; i++)
        for (int k = 0; k < MT__SECTIONS; k++)
            free(l->pieces[i].section[k].sums);
    mt_pieces_free(l->cut);
    free(l->pieces);
    free(l->planes);
    free(l);
}

/* Two sections, each a request with sums of its own. */
static mt_status open_piece(const mt_disk *d, int u, const mt__layout *l, int number)
{
    const mt_piece   *whole = &l->cut->piece[number];
    const mt_stretch *first = &l->cut->part[whole->first];
    mt__piece        *c = &l->pieces[number];

    *c = (mt__piece){ .first = whole->first, .n = whole->n, .hi_bytes = whole->hi_bytes };
    c->hi_at = mt_store_offset(d->store, u, first->param)
             + mt_store_plane_bytes(d->store, u, first->param, MT_PLANE_HI, first->from);
    c->section[MT__WEIGHTS].bytes = c->section[MT__STATES].from = whole->weights;
    c->section[MT__STATES].bytes = whole->bytes - whole->weights;
    for (int k = 0; k < MT__SECTIONS; k++) {
        mt__section *n = &c->section[k];

        if ((n->sums = calloc(mt_block_count(n->bytes) + 1, sizeof *n->sums)) == NULL)
            return MT_FAIL(MT_ENOMEM, "unit %s: no memory for the sums of a piece",
                           mt_store_name(d->store, u));
    }
    return MT_OK;
}

static size_t piece_bytes(const mt__piece *c)
{
    return c->section[MT__WEIGHTS].bytes + c->section[MT__STATES].bytes;
}

/* real: with the planes as they are made; else as they would be now. */
static mt_status cut(const mt_disk *d, int u, int real, mt__layout **out)
{
    int         n = mt_store_params(d->store, u);
    mt__layout *l = calloc(1, sizeof *l);
    mt_status   st = MT_OK;

    if (l == NULL || (l->planes = calloc((size_t)n + 1, sizeof *l->planes)) == NULL) {
        st = MT_FAIL(MT_ENOMEM, "unit %s: no memory to describe its %d parameters",
                     mt_store_name(d->store, u), n);
        goto fail;
    }
    for (int i = 0; i < n; i++)
        MT_TRY(planes_of(d, u, i, real, &l->planes[i]));
    MT_TRY(mt_pieces_cut(d->store, u, &(mt_cut){ l->planes, d->bytes, MT_BLOCK_ALIGN, MT_DISK_GRAIN,
                                                 0 }, &l->cut));
    if ((l->pieces = calloc((size_t)l->cut->n + 1, sizeof *l->pieces)) == NULL) {
        st = MT_FAIL(MT_ENOMEM, "unit %s: no memory to describe %d pieces",
                     mt_store_name(d->store, u), l->cut->n);
        goto fail;
    }
    l->n_pieces = l->cut->n;
    for (int i = 0; i < l->n_pieces; i++)
        MT_TRY(open_piece(d, u, l, i));
    *out = l;
    return MT_OK;
fail:
    layout_free(l);
    return st;
}

/* Under mu. The feed's buffers were made for the largest weights of a piece that there were. */
static mt_status note_weights(mt_disk *d, int u, const mt__layout *l)
{
    for (int i = 0; i < l->n_pieces; i++) {
        size_t bytes = l->pieces[i].section[MT__WEIGHTS].bytes;

        if (bytes > d->most_weights && d->feed != NULL)
            return MT_FAIL(MT_ESTATE, "unit %s: %zu bytes of weights in a piece, and fetches have "
                           "buffers of %zu; what is trained, and how its states are kept, may "
                           "change when its weights are on disk",
                           mt_store_name(d->store, u), bytes, d->most_weights);
        d->most_weights = bytes > d->most_weights ? bytes : d->most_weights;
    }
    return MT_OK;
}

/* The unit is ours. */
static mt_status lay_out(mt_disk *d, int u, mt__layout **out)
{
    mt__layout *l = NULL;
    mt_status st;

    if (d->units[u].lay == NULL) {
        MT_TRY(cut(d, u, 1, &l));
        for (int i = 0; i < l->n_pieces; i++)
            MT_TRY(d->file->ops->take(d->file, piece_bytes(&l->pieces[i]), &l->pieces[i].at));
        mt_lock(&d->mu);
        if ((st = note_weights(d, u, l)) == MT_OK)
            d->units[u].lay = l;
        mt_unlock(&d->mu);
        if (st != MT_OK)
            goto fail;
    }
    *out = d->units[u].lay;
    return MT_OK;
fail:
    layout_free(l);
    return st;
}

/* ---- requests --------------------------------------------------------------------------- */

/* Whose byte is at this offset of the piece. */
static const mt_stretch *found_at(const mt__layout *l, const mt__piece *c, size_t offset,
                                 mt_plane *plane)
{
    const mt_stretch *found = NULL;
    size_t       best = 0;

    for (int i = c->first; i < c->first + c->n; i++)
        for (int p = 0; p < MT_PLANE_COUNT; p++) {
            const mt_stretch *k = &l->cut->part[i];

            if (k->offset[p] == MT_PART_ABSENT || k->offset[p] > offset || k->offset[p] < best)
                continue;
            best = k->offset[p];
            found = k;
            *plane = (mt_plane)p;
        }
    return found;
}

/* What lies in the block that begins there, for a message: the first and the last.
 * A block is of one section. */
static void whose(const mt_disk *d, int u, int number, uint64_t at, char *out, size_t cap)
{
    const mt__layout *l = d->units[u].lay;
    const mt__piece *c = &l->pieces[number];
    size_t        offset = (size_t)(at - c->at);
    size_t        of = offset < c->section[MT__STATES].from ? c->section[MT__STATES].from
                                                            : piece_bytes(c);
    size_t        end = of - offset < MT_BLOCK_BYTES ? of : offset + MT_BLOCK_BYTES;
    mt_plane      from = MT_PLANE_HI, to = MT_PLANE_HI;
    const mt_stretch *first = found_at(l, c, offset, &from), *last = found_at(l, c, end - 1, &to);

    if (first == last && from == to)
        snprintf(out, cap, "unit %s, plane %s of parameter %d", mt_store_name(d->store, u),
                 mt_plane_name(from), first->param);
    else
        snprintf(out, cap, "unit %s, from plane %s of parameter %d to plane %s of parameter %d",
                 mt_store_name(d->store, u), mt_plane_name(from), first->param, mt_plane_name(to),
                 last->param);
}

void mt__disk_tell(mt_disk *d, int u, int number, const mt_request *r)
{
    char lost[320];

    if (r->st == MT_OK)
        return;
    whose(d, u, number, r->bad_at, lost, sizeof lost);
    (void)MT_FAIL(r->st, "%s: %s; the run cannot go on: make the model again, stream it, and load "
                  "the last checkpoint",
                  lost, r->text);
    mt_ledger_fault(d->store, r->st, mt_last_error());
}

/* Records of the lane follow each other: a request's begins where the one before ended, at the
 * earliest. A section that was never written is not read. */
static void record(mt_disk *d, int u, const mt_request *r, uint64_t begun_ns)
{
    mt_span span;

    if (r->moved == 0)
        return;
    mt_timeline_begin(d->timeline, &span, MT_LANE_DISK, r->write ? MT_WORK_WRITE : MT_WORK_READ, u,
                      NULL);
    span.r.begin_ns = begun_ns > d->recorded_ns ? begun_ns : d->recorded_ns;
    mt_timeline_end(d->timeline, &span, r->moved, NULL);
    d->recorded_ns = mt_now_ns();
}

void mt__disk_note(mt_disk *d, int u, const mt_request *r, uint64_t begun_ns)
{
    d->failed |= r->st != MT_OK;
    *(r->write ? &d->stats.written_bytes : &d->stats.read_bytes) += r->moved;
    record(d, u, r, begun_ns);
}

mt_request mt__disk_request(const mt_disk *d, int u, int number, int section, int write, char *mem)
{
    const mt__piece   *c = &d->units[u].lay->pieces[number];
    const mt__section *n = &c->section[section];

    return (mt_request){ .write = write, .at = c->at + n->from, .mem = mem, .bytes = n->bytes,
                         .sums = n->sums };
}

/* ---- reading ahead: under mu ------------------------------------------------------------- */

/* At each door, whose end looks what may be read next: no piece is in two buffers, or it would be
 * updated in one and written from the other. */
static void assert_state(const mt_disk *d)
{
    const mt__ring *r = &d->ring;

    if (!MT_IS_CHECKED)
        return;
    mt__ring_assert(r);
    for (int i = 0; i < r->n; i++)
        for (int k = 0; k < i && r->buffers[i].at != MT__FREE; k++)
            MT_ASSERT(r->buffers[k].at == MT__FREE || r->buffers[k].unit != r->buffers[i].unit ||
                      r->buffers[k].piece != r->buffers[i].piece);
    MT_ASSERT(d->away == 0 || d->away == d->sent.unit + 1);
    MT_ASSERT(d->next_unit < d->n_units && d->before < d->n_units && d->bounced_unit < d->n_units);
    for (const mt__guest *g = d->guests; g != NULL; g = g->next)
        MT_ASSERT(g->d == d && (g->next == NULL || g->next->number < g->number));
}

/* The buffer that has the piece, or will; or that is still reading it for nobody: what it reads
 * must not be written meanwhile, so it is read again when that is over. */
static mt__buffer *find_piece(const mt_disk *d, int u, int number)
{
    return mt__ring_find(&d->ring, ~(1u << MT__FREE), u, number);
}

/* The first piece from one on that has states, or how many pieces there are. What has none is
 * rarely updated, and then read when it is asked for. */
static int with_states(const mt__layout *l, int from)
{
    while (from < l->n_pieces && l->pieces[from].section[MT__STATES].bytes == 0)
        from++;
    return from;
}

static void step_on(mt_disk *d)
{
    const mt__disk_unit *u = &d->units[d->next_unit];
    const mt__layout    *l = u->lay;

    d->next_piece = with_states(l, d->next_piece + 1);
    if (d->next_piece < l->n_pieces)
        return;
    d->next_unit = u->next;
    l = d->next_unit >= 0 ? d->units[d->next_unit].lay : NULL;
    d->next_piece = l != NULL ? with_states(l, 0) : 0;
    /* One that was never updated has nothing that could be read. */
    if (l == NULL || d->next_piece == l->n_pieces)
        d->next_unit = -1;
}

/* As far as there are free buffers. A piece that is still in one, not yet updated or not yet
 * written, stops it: the end of that write calls again. */
void mt__disk_ahead(mt_disk *d)
{
    mt__buffer *b;

    assert_state(d);

    if (d->feed != NULL)
        mt__feed_ahead(d->feed);

    while (!d->failed && d->next_unit >= 0 && !d->units[d->next_unit].held &&
           d->next_unit + 1 != d->away && find_piece(d, d->next_unit, d->next_piece) == NULL &&
           (b = mt__ring_find(&d->ring, 1u << MT__FREE, -1, -1)) != NULL) {
        b->turn = ++d->turns;
        mt__ring_put(b, d->next_unit, d->next_piece, 0);
        step_on(d);
    }
}

/* The next to be read is not what was thought. */
static void aim(mt_disk *d, int u, int number)
{
    mt__ring_drop(&d->ring, -1, UINT64_MAX);
    d->next_unit = u;
    d->next_piece = number;
}

/* ---- an update: our thread ---------------------------------------------------------------- */

typedef struct wanted_piece {
    mt_disk *d;
    int      unit, number;
    mt__buffer *b;               /* has it, and is ours; NULL: not yet, or the disk failed */
} wanted_piece;

static int is_taken(void *arg)
{
    wanted_piece *a = arg;
    mt_disk      *d = a->d;
    mt__buffer   *b = find_piece(d, a->unit, a->number);

    if (d->failed)
        return 1;
    if (b != NULL && b->at == MT__READY) {
        mt__ring_drop(&d->ring, -1, b->turn);            /* read before it: passed over */
        mt__buffer_to(b, MT__TAKEN);
        a->b = b;
        return 1;
    }
    /* Nobody reads it: another was thought to be next, or all buffers have pieces that this one
     * came instead of. Either way what was read ahead gives way,
     * or no buffer would ever be free. */
    if (b == NULL)
        aim(d, a->unit, a->number);
    mt__disk_ahead(d);
    return 0;
}

/* Waits until the piece is in a buffer, which is then ours. */
static mt_status take_piece(mt_disk *d, int u, int number, mt__buffer **out)
{
    uint64_t     begun = mt_now_ns();
    wanted_piece a = { .d = d, .unit = u, .number = number };
    mt_span      span;
    mt_status    st;

    mt_timeline_begin(d->timeline, &span, MT_LANE_DISK_UPDATE, MT_WORK_WAIT, u, NULL);
    st = mt_watch_until(mt_store_watch(d->store), &d->changed, &d->mu, is_taken, &a,
                        mt_store_name(d->store, u), "a piece to update (READ)");
    mt_timeline_end(d->timeline, &span, 0, NULL);
    mt_lock(&d->mu);
    d->stats.wait_ns += mt_now_ns() - begun;
    mt_unlock(&d->mu);
    if (a.b == NULL)
        return st != MT_OK ? st : mt_ledger_check(d->store);
    *out = a.b;
    return MT_OK;
}

/* The buffer goes to the disk; or nowhere, and is free. */
static void give_piece(mt_disk *d, mt__buffer *b, int write)
{
    mt_lock(&d->mu);
    if (write)
        mt__ring_put(b, b->unit, b->piece, 1);
    else
        mt__buffer_to(b, MT__FREE);
    mt__disk_ahead(d);
    mt_unlock(&d->mu);
}

static int wanted(const mt_update_job *j, int param)
{
    for (int i = 0; i < j->n_params; i++)
        if (j->params[i] == param)
            return 1;
    return 0;
}

static int piece_wanted(const mt__layout *l, const mt__piece *c, const mt_update_job *j)
{
    for (int i = c->first; i < c->first + c->n; i++)
        if (wanted(j, l->cut->part[i].param))
            return 1;
    return 0;
}

static mt_status compute(mt_disk *d, const job *b, const mt_part *parts, int n, uint64_t bytes)
{
    mt_watch *watch = mt_store_watch(d->store);
    uint64_t  begun = mt_now_ns();
    mt_span   span;
    mt_post   post;
    mt_status st;

    mt_timeline_begin(d->timeline, &span, MT_LANE_DISK_UPDATE, MT_WORK_UPDATE, b->j.unit, NULL);
    mt_watch_begin(watch, &post, NULL, mt_store_name(d->store, b->j.unit),
                   "the pool, which computes its update");
    st = b->j.pieces(b->j.arg, d->pool, parts, n, b->clip);
    mt_watch_end(watch, &post, st);
    mt_timeline_end(d->timeline, &span, bytes, NULL);
    mt_lock(&d->mu);
    d->stats.busy_ns += mt_now_ns() - begun;
    mt_unlock(&d->mu);
    return st;
}

/* -1: none. */
static int last_wanted(const mt__layout *l, const mt_update_job *j)
{
    int i = l->n_pieces - 1;

    while (i >= 0 && !piece_wanted(l, &l->pieces[i], j))
        i--;
    return i;
}

static mt_status update_pieces(mt_disk *d, const mt__layout *l, const job *b, mt_part *parts)
{
    int       last = last_wanted(l, &b->j);
    mt_status st = MT_OK;

    for (int i = 0; i <= last && st == MT_OK; i++) {
        const mt__piece *c = &l->pieces[i];
        mt__buffer *f = NULL;

        if (!piece_wanted(l, c, &b->j))
            continue;
        MT_TRY(take_piece(d, b->j.unit, i, &f));
        mt_pieces_at(l->cut, i, f->mem, parts);
        /* The record of the last piece has the unit's bytes. */
        st = compute(d, b, parts, c->n, i == last ? b->j.bytes : 0);
        give_piece(d, f, st == MT_OK);
    }
fail:
    return st;
}

/* Parameters that came after the unit's layout was made have all states in memory. Where there is
 * nothing else the first one's record has the unit's bytes. */
static mt_status update_late(mt_disk *d, const mt__layout *l, const job *b)
{
    uint64_t  bytes = last_wanted(l, &b->j) < 0 ? b->j.bytes : 0;
    mt_status st = MT_OK;

    for (int i = 0; i < b->j.n_params && st == MT_OK; i++) {
        int     p = b->j.params[i];
        mt_part whole = { .param = p, .n = mt_store_desc(d->store, b->j.unit, p)->numel };

        if (l->planes[p] != 0)
            continue;
        st = compute(d, b, &whole, 1, bytes);
        bytes = 0;
    }
    return st;
}

/* ---- the bounce buffer -------------------------------------------------------------------- */

/* A save that somebody waits for, to have the unit, is in a hurry too. */
static int lets_go_first(const mt__guest *g)
{
    return g->patient && !mt_mirror_awaited(g->d->store, g->unit);
}

static int is_before(const mt__guest *a, const mt__guest *b)
{
    return lets_go_first(a) != lets_go_first(b) ? lets_go_first(b) : a->number < b->number;
}

static int has_bounce(void *arg)
{
    mt__guest *g = arg;

    if (g->d->taken)
        return 0;
    for (const mt__guest *o = g->d->guests; o != NULL; o = o->next)
        if (o != g && is_before(o, g))
            return 0;
    return g->d->taken = 1;
}

static mt_status take_bounce(mt_disk *d, int u)
{
    mt__guest   g = { .d = d, .unit = u, .patient = mt_ledger_do_i_save() };
    mt__guest **at = &d->guests;
    mt_status   st;

    mt_lock(&d->mu);
    g.number = d->n_guests++;
    g.next = d->guests;
    d->guests = &g;
    mt_unlock(&d->mu);
    st = mt_watch_until(mt_store_watch(d->store), &d->changed, &d->mu, has_bounce, &g,
                        mt_store_name(d->store, u),
                        "its turn at pieces that the host reads or writes");
    mt_lock(&d->mu);
    while (*at != &g)
        at = &(*at)->next;
    *at = g.next;
    pthread_cond_broadcast(&d->changed);             /* who was behind it may be first now */
    mt_unlock(&d->mu);
    return st;
}

static void give_bounce(mt_disk *d)
{
    mt_lock(&d->mu);
    d->taken = 0;
    pthread_cond_broadcast(&d->changed);
    mt_unlock(&d->mu);
}

/* Under mu. unit -1: what it has, nobody knows. */
static void note_bounced(mt_disk *d, int u, int number, int section)
{
    d->bounced_unit = u;
    d->bounced_piece = number;
    d->bounced_section = section;
}

typedef struct reader {
    mt_disk *d;
    int      unit;
} reader;

static int has_read(void *arg)
{
    const reader *r = arg;

    return r->d->feed == NULL || !mt__feed_reads(r->d->feed, r->unit);
}

/* FED: no read for a fetch to come is under way when the update writes.
 * None begins: the update is announced. */
static mt_status end_reads(mt_disk *d, int u)
{
    reader r = { .d = d, .unit = u };

    return mt_watch_until(mt_store_watch(d->store), &d->changed, &d->mu, has_read, &r,
                          mt_store_name(d->store, u),
                          "reads of its weights ahead of a fetch (FED)");
}

/* Behind the door: its copies are stale from here on. Memory of states is given back. Weights that
 * were brought may be in somebody's graph, which wants them as they were: see mt_mirror_forget. */
static mt_status end_copies(mt_disk *d, const mt_update_job *j, const mt__layout *l)
{
    const unsigned ahead = 1u << MT_MIRROR_AHEAD | 1u << MT_MIRROR_TORN;

    if (mt_mirror_any(d->store, j->unit, -1, ~0u, ahead))
        return MT_FAIL(MT_ESTATE, "unit %s: its weights were written on the host, and the file "
                       "does not have them; push them first", mt_store_name(d->store, j->unit));
    for (int i = 0; i < j->n_params; i++)
        mt_mirror_tell(d->store, j->unit, j->params[i], l->planes[j->params[i]], MT_MIRROR_CHANGED);
    mt_mirror_drop(d->store, j->unit, MT_STATE_PLANES);
    return MT_OK;
}

/* Behind the door. Its layout, and its place in the order. */
static mt_status begin_update(mt_disk *d, const mt_update_job *j, mt__layout **l)
{
    int       u = j->unit;
    mt_status st;

    MT_TRY(lay_out(d, u, l));
    MT_TRY(end_copies(d, j, *l));
    mt_lock(&d->mu);
    if (d->bounced_unit == u)
        d->bounced_unit = -1;
    if (d->before >= 0)
        d->units[d->before].next = u;
    d->before = u;
    if (d->feed != NULL)
        mt__feed_drop(d->feed, u);
    mt_unlock(&d->mu);
    st = end_reads(d, u);
fail:
    return st;
}

/* The unit, or MT_EINVAL. */
static mt_status find(const mt_disk *d, int u)
{
    if (u >= 0 && u < d->n_units && d->units[u].on)
        return MT_OK;
    return MT_FAIL(MT_EINVAL, "unit %s (%d) has no states on disk", mt_store_name(d->store, u), u);
}

static mt_status update(mt_disk *d, const job *b)
{
    mt_part  *parts = NULL;
    mt__layout *l;
    mt_status st;

    MT_TRY(mt_ledger_check(d->store));
    /* WEIGHTS: they are overwritten. */
    MT_TRY(mt_ledger_wait_fetch(d->store, b->j.unit));
    MT_TRY(mt_mirror_enter(d->store, b->j.unit));
    st = begin_update(d, &b->j, &l);
    mt_mirror_leave(d->store, b->j.unit);
    if (st != MT_OK)
        goto fail;
    if ((parts = calloc((size_t)l->cut->most + 1, sizeof *parts)) == NULL) {
        st = MT_FAIL(MT_ENOMEM, "unit %s: no memory to list %d parts",
                     mt_store_name(d->store, b->j.unit), l->cut->most);
        goto fail;
    }
    MT_TRY(update_pieces(d, l, b, parts));
    MT_TRY(update_late(d, l, b));
fail:
    free(parts);
    return st;
}

/* In the ledger first, with its failure: the next fetch of the unit must fail, not read. */
static void end_job(mt_disk *d, const mt_update_job *j, mt_status st)
{
    if (st != MT_OK)
        mt_ledger_fault(d->store, st, mt_last_error());
    mt_ledger_update_end(d->store, j->unit);
    if (j->free != NULL)
        j->free(j->arg);
}

static void job_free(job *b)
{
    free((void *)(uintptr_t)b->j.params);
    free(b);
}

static mt_status carry_out(void *arg, mt_job *node)
{
    mt_disk  *d = arg;
    job      *b = (job *)(void *)node;
    mt_status st;

    mt_unlock(&d->mu);
    st = update(d, b);
    end_job(d, &b->j, st);
    job_free(b);
    mt_lock(&d->mu);
    return st;
}

/* ---- the updater's side ------------------------------------------------------------------- */

static mt_status job_copy(const mt_disk *d, const mt_update_job *j, float clip, job **out)
{
    job       *b = calloc(1, sizeof *b);
    int       *params = calloc((size_t)j->n_params + 1, sizeof *params);
    mt_status  st = find(d, j->unit);

    if (st == MT_OK && (b == NULL || params == NULL))
        st = MT_FAIL(MT_ENOMEM, "unit %s: no memory for its update from disk",
                     mt_store_name(d->store, j->unit));
    if (st != MT_OK) {
        free(params);
        free(b);
        return st;
    }
    for (int i = 0; i < j->n_params; i++)
        params[i] = j->params[i];
    *b = (job){ .j = *j, .clip = clip };
    b->j.params = params;
    *out = b;
    return MT_OK;
}

mt_status mt_disk_put(mt_disk *d, const mt_update_job *j, float clip)
{
    job      *b;
    mt_status st = job_copy(d, j, clip, &b);

    if (st != MT_OK) {
        end_job(d, j, st);
        return st;
    }
    mt_lock(&d->mu);
    (void)mt_worker_submit(&d->worker, &b->node);
    mt_unlock(&d->mu);
    return MT_OK;
}

mt_status mt_disk_wait(mt_disk *d)
{
    mt_status st = mt_worker_wait(&d->worker, mt_store_watch(d->store), MT_WORKER_ALL, NULL,
                                  "updates from disk");

    return st == MT_OK ? mt_ledger_check(d->store) : st;
}

/* ---- copies on the host: behind the unit's door ------------------------------------------- */

/* On a thread of the file's. */
static void errand_over(mt_request *r)
{
    const mt__way e = *(const mt__way *)r->arg;
    mt_disk      *d = e.d;

    mt__disk_tell(d, e.unit, e.number, r);
    mt_lock(&d->mu);
    mt_watch_end(mt_store_watch(d->store), &d->post, r->st);
    *(r->write ? &d->stats.written_bytes : &d->stats.read_bytes) += r->moved;
    d->away = 0;
    mt__disk_ahead(d);
    pthread_cond_broadcast(&d->changed);
    mt_unlock(&d->mu);
}

/* A read waits for writes of the piece, a write for reads too:
 * also for those that nobody wants any more. */
static int in_the_way(const mt_disk *d, int u, int number, int write)
{
    unsigned states = 1u << MT__WRITING | (write ? 1u << MT__READING : 0);

    return mt__ring_find(&d->ring, states, u, number) != NULL ||
           (write && d->feed != NULL && mt__feed_reads(d->feed, u));
}

static int is_sent(void *arg)
{
    const mt__way *e = arg;
    mt_disk       *d = e->d;
    size_t         from = d->units[e->unit].lay->pieces[e->number].section[e->section].from;

    /* One that the watchdog did not wait for still has the buffer. */
    if (d->away != 0 || in_the_way(d, e->unit, e->number, e->write))
        return 0;
    d->sent = *e;
    d->away = e->unit + 1;
    d->errand = mt__disk_request(d, e->unit, e->number, e->section, e->write, d->bounce + from);
    d->errand.done = errand_over;
    d->errand.arg = &d->sent;
    mt_watch_begin(mt_store_watch(d->store), &d->post, "disk", mt_store_name(d->store, e->unit),
                   e->write ? "a piece to be written (PUSHED)"
                            : "a piece to be read for the host (WRITTEN)");
    d->file->ops->put(d->file, &d->errand);
    return 1;
}

static int is_back(void *arg)
{
    return ((const mt__way *)arg)->d->away == 0;
}

/* A piece's section to or from its place in the bounce buffer, which is ours. No update of the unit
 * is under way, but its writes may be. Parameters that are pushed one after the other often share a
 * piece, which is then read once. */
static mt_status move(mt_disk *d, int u, int number, int section, int write)
{
    const mt__section *n = &d->units[u].lay->pieces[number].section[section];
    mt__way     e = { d, u, number, section, write };
    mt_watch   *watch = mt_store_watch(d->store);
    const char *name = mt_store_name(d->store, u);
    int         there;
    mt_status   st;

    mt_lock(&d->mu);
    there = n->bytes == 0 || (!write && d->bounced_unit == u && d->bounced_piece == number &&
                              d->bounced_section == section);
    if (!there)
        note_bounced(d, -1, 0, 0);
    mt_unlock(&d->mu);
    if (there)
        return mt_ledger_check(d->store);
    MT_TRY(mt_watch_until(watch, &d->changed, &d->mu, is_sent, &e, name,
                          "requests for the same piece"));
    MT_TRY(mt_watch_until(watch, &d->changed, &d->mu, is_back, &e, name,
                          "a piece, for who reads or writes it here"));
    MT_TRY(mt_ledger_check(d->store));
    mt_lock(&d->mu);
    note_bounced(d, u, number, section);
    mt_unlock(&d->mu);
fail:
    return st;
}

static int is_loading(const mt_disk *d, int u, const mt_stretch *k, unsigned planes)
{
    return mt_mirror_any(d->store, u, k->param, planes, 1u << MT_MIRROR_LOADING);
}

/* Between the bounce buffer, which is ours and has the piece, and host planes;
 * param -1: of all parameters. */
static mt_status copy_places(mt_disk *d, int u, int number, int param, unsigned planes, int to_host)
{
    const mt__layout *l = d->units[u].lay;
    const mt__piece *c = &l->pieces[number];
    mt_status     st = MT_OK;

    for (int i = c->first; i < c->first + c->n; i++)
        for (int p = 0; p < MT_PLANE_COUNT; p++) {
            const mt_stretch *k = &l->cut->part[i];
            char        *mem = d->bounce + k->offset[p];
            void        *host;

            if (!(planes >> p & 1) || k->offset[p] == MT_PART_ABSENT ||
                (param >= 0 && k->param != param) ||
                (to_host && !is_loading(d, u, k, 1u << p)))
                continue;
            MT_TRY(mt_store_at(d->store, u, k->param, (mt_plane)p, &host));
            host = (char *)host + mt_store_plane_bytes(d->store, u, k->param, (mt_plane)p, k->from);
            memcpy(to_host ? host : mem, to_host ? mem : host,
                   mt_store_plane_bytes(d->store, u, k->param, (mt_plane)p, k->n));
        }
fail:
    return st;
}

/* PUSHED. */
static void hold(mt_disk *d, int u, int on)
{
    mt_lock(&d->mu);
    d->units[u].held = on;
    if (on)
        mt__ring_drop(&d->ring, u, UINT64_MAX);
    if (on && d->feed != NULL)
        mt__feed_drop(d->feed, u);
    mt__disk_ahead(d);
    mt_unlock(&d->mu);
}

/* The bounce buffer is ours. What else is in the section stays; where all of it is written,
 * it is not read first. */
static mt_status push_section(mt_disk *d, int u, int number, int k, int param, unsigned planes)
{
    mt_status st = MT_OK;

    if (k != MT__WEIGHTS || param >= 0)
        MT_TRY(move(d, u, number, k, 0));
    mt_lock(&d->mu);
    note_bounced(d, -1, 0, 0);           /* until it is written, the file has something else */
    mt_unlock(&d->mu);
    MT_TRY(copy_places(d, u, number, param, planes, 0));
    MT_TRY(move(d, u, number, k, 1));
fail:
    return st;
}

/* Has the section something of the parameter, or of what is loading? */
static int concerns(const mt_disk *d, int u, const mt__piece *c, int param, unsigned planes,
                    int write)
{
    for (int i = c->first; i < c->first + c->n; i++) {
        const mt_stretch *k = &d->units[u].lay->cut->part[i];

        if (write ? param < 0 || k->param == param : is_loading(d, u, k, planes))
            return 1;
    }
    return 0;
}

static mt_status visit(mt_disk *d, int u, int number, int k, int param, unsigned planes, int write)
{
    const mt__piece *c = &d->units[u].lay->pieces[number];
    mt_status        st;

    planes &= k == MT__WEIGHTS ? HI : ~HI;
    if (planes == 0 || c->section[k].bytes == 0 || !concerns(d, u, c, param, planes, write))
        return MT_OK;
    MT_TRY(take_bounce(d, u));
    if (write)
        st = push_section(d, u, number, k, param, planes);
    else if ((st = move(d, u, number, k, 0)) == MT_OK)
        st = copy_places(d, u, number, -1, planes, 1);
    give_bounce(d);
fail:
    return st;
}

static mt_status visit_all(mt_disk *d, int u, int param, unsigned planes, int write)
{
    mt__layout *l;
    mt_status   st;

    MT_TRY(lay_out(d, u, &l));
    planes &= param < 0 ? planes : l->planes[param];
    for (int i = 0; i < l->n_pieces && planes != 0; i++)
        for (int k = 0; k < MT__SECTIONS; k++)
            MT_TRY(visit(d, u, i, k, param, planes, write));
fail:
    return st;
}

static mt_status home_load(void *arg, int u, unsigned planes)
{
    return visit_all(arg, u, -1, planes, 0);
}

static mt_status home_store(void *arg, int u, int param, unsigned planes)
{
    mt_status st;

    hold(arg, u, 1);
    st = visit_all(arg, u, param, planes, 1);
    hold(arg, u, 0);
    return st;
}

static int home_fits(const mt_update_job *j)
{
    return j->pieces != NULL;
}

static mt_status home_update(void *arg, const mt_update_job *j, float clip)
{
    return mt_disk_put(arg, j, clip);
}

static mt_status home_drain(void *arg)
{
    return mt_disk_wait(arg);
}

#define IS_ON_DISK                                                                                \
    .from = &mt_home_ram, .fresh = MT_STATE_PLANES, .load = home_load, .store = home_store,       \
    .fits = home_fits, .update = home_update, .ends = 1, .turn = 1, .drain = home_drain

const mt_home mt_home_disk = {
    .lives = "has its states on disk", .away = MT_STATE_PLANES,
    .registered = HI | 1u << MT_PLANE_GRAD, IS_ON_DISK,
};

const mt_home mt_home_disk_weights = {
    .lives = "has its weights and states on disk", .away = MT_STATE_PLANES | HI, .fed = 1,
    .registered = 1u << MT_PLANE_GRAD, IS_ON_DISK,
};

/* ---- open and close --------------------------------------------------------------------- */

mt_status mt_disk_open(mt_context *cx, mt_blocks *file, mt_pool *pool, int n_buffers, size_t bytes,
                       mt_disk **out)
{
    mt_disk  *d;
    size_t    all;
    mt_status st;

    if (n_buffers < 1 || bytes < MT_DISK_LEAST || bytes % MT_BLOCK_ALIGN != 0)
        return MT_FAIL(MT_EINVAL,
                       "disk: %d buffers of %zu bytes; one of %zu is the least, in steps of %zu",
                       n_buffers, bytes, MT_DISK_LEAST, MT_BLOCK_ALIGN);
    if ((st = mt_mul_size((size_t)n_buffers + 1, bytes, "buffers of the disk", &all)) != MT_OK)
        return st;
    if ((d = calloc(1, sizeof *d)) == NULL)
        return MT_FAIL(MT_ENOMEM, "disk: calloc(%zu)", sizeof *d);
    *d = (mt_disk){ .cx = cx, .store = cx->store, .timeline = cx->timeline, .file = file,
                    .pool = pool, .bytes = bytes };
    d->next_unit = d->before = d->first_added = d->last_added = d->bounced_unit = -1;
    mt_mutex_open(&d->mu, MT_RANK_DISK);
    MT_TRY(mt_watch_cond(&d->changed));
    MT_TRY(mt_arena_open(&d->memory, all, NULL, NULL, "buffers of the disk",
                         mt_store_bytes(d->store, MT_PLANE_COUNT)));
    MT_TRY(mt__ring_open(&d->ring, d, n_buffers, d->memory.base, bytes,
                         1u << MT__WEIGHTS | 1u << MT__STATES, "a piece to be read (READ)"));
    d->bounce = (char *)d->memory.base + (size_t)n_buffers * bytes;
    d->stats.buffer_bytes = d->memory.bytes;
    MT_TRY(mt_worker_open(&d->worker, &d->mu, 1, "mt-disk-update", "disk update", carry_out, d));
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
    mt_lock(&d->mu);
    d->next_unit = -1;                   /* nothing more is read */
    while (mt__ring_find(&d->ring, 1u << MT__READING | 1u << MT__WRITING, -1, -1) || d->away != 0)
        mt_cond_wait(&d->changed, &d->mu);
    mt_unlock(&d->mu);
    for (int i = 0; i < d->n_units; i++) {
        if (d->units[i].on)
            mt_mirror_close(d->store, i);
        layout_free(d->units[i].lay);
    }
    pthread_cond_destroy(&d->changed);
    mt_mutex_close(&d->mu);
    mt_arena_close(&d->memory);
    free(d->ring.buffers);
    free(d->units);
    free(d);
}

static mt_status room_for(mt_disk *d, int u)
{
    mt__disk_unit *grown;

    if (u < d->n_units)
        return MT_OK;
    if ((grown = realloc(d->units, (size_t)(u + 1) * sizeof *grown)) == NULL)
        return MT_FAIL(MT_ENOMEM, "disk: no memory to describe %d units", u + 1);
    for (int i = d->n_units; i <= u; i++)
        grown[i] = (mt__disk_unit){ .next = -1 };
    d->units = grown;
    d->n_units = u + 1;
    return MT_OK;
}

/* What its planes would take, as they would be now. */
static mt_status count(mt_disk *d, int u)
{
    mt__layout *l = NULL;
    mt_status   st = cut(d, u, 0, &l);

    if (st != MT_OK)
        return st;
    mt_lock(&d->mu);
    st = note_weights(d, u, l);
    mt_unlock(&d->mu);
    for (int i = 0; i < l->n_pieces && st == MT_OK; i++)
        d->need += piece_bytes(&l->pieces[i]);
    layout_free(l);
    return st;
}

mt_status mt_disk_add(mt_disk *d, int u, int weights)
{
    mt_status st;

    if (u < 0 || u >= mt_store_units(d->store))
        return MT_FAIL(MT_EINVAL, "there is no unit %d; the store has %d", u,
                       mt_store_units(d->store));
    MT_TRY(room_for(d, u));
    if (d->units[u].on)
        return MT_OK;
    MT_TRY(mt_store_move(d->store, u, weights ? &mt_home_disk_weights : &mt_home_disk, d));
    if ((st = count(d, u)) != MT_OK) {
        (void)mt_store_move(d->store, u, &mt_home_ram, NULL);
        return st;
    }
    d->units[u].on = 1;
    if (d->last_added >= 0)              /* until the first step says better */
        d->units[d->last_added].next = u;
    d->first_added = d->first_added < 0 ? u : d->first_added;
    d->units[u].next = d->first_added;
    d->last_added = u;
fail:
    return st;
}

uint64_t mt_disk_need(mt_disk *d)
{
    return d->need;
}

mt_disk_stats mt_disk_stats_get(mt_disk *d)
{
    mt_disk_stats stats;

    mt_lock(&d->mu);
    stats = d->stats;
    mt_unlock(&d->mu);
    return stats;
}
