/* view.c — units whose planes lie in a share: their ranges, and what user code sees of them. */
#include "store_impl.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* ---- a unit's ranges ---------------------------------------------------------------------- */

static int64_t chunks_of(int64_t numel)
{
    return numel / MT_PORTION_GRAIN + (numel % MT_PORTION_GRAIN != 0);
}

/* FNV-1a: Fowler, Noll & Vo 1991. */
static uint64_t mix(uint64_t hash, const void *data, size_t bytes)
{
    const unsigned char *at = data;

    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ at[i]) * 0x100000001b3u;
    return hash;
}

/* Of all that says where something of the unit lies. */
static uint64_t layout_of(const mt__unit *u, int unit)
{
    uint64_t hash = mix(mix(0xcbf29ce484222325u, &unit, sizeof unit), u->name, strlen(u->name));

    for (int i = 0; i < u->n_params; i++) {
        int64_t what[2] = { u->desc[i].dtype, u->desc[i].numel };

        hash = mix(hash, what, sizeof what);
    }
    return hash;
}

static mt_status count_chunks(mt__unit *u, size_t *n)
{
    mt_status st = MT_MAKE(u->chunk, u->n_params, u->name);

    *n = 0;
    for (int i = 0; st == MT_OK && i < u->n_params; i++) {
        const mt_param_desc *d = &u->desc[i];

        u->chunk[i] = *n;
        if (mt_plane_bytes(MT_PLANE_GRAD, d->dtype, MT_STATES_FP32, 1) > 0)
            *n += (size_t)chunks_of(d->numel);
    }
    return st;
}

/* The board first: on it ranks see that their units differ, before one's lies in another's. */
mt_status mt__share_unit(mt_store *s, mt__unit *u, int unit)
{
    size_t    chunks, bytes, *offset;
    mt_status st;

    MT_TRY(count_chunks(u, &chunks));
    MT_TRY(mt_board_open(s->share, u->name, unit, layout_of(u, unit), chunks, &u->board));
    for (int p = 0; p < MT_PLANE_COUNT; p++) {
        MT_TRY(mt__lay_out(u, MT__HOST, (mt_plane)p, &offset, &bytes));
        free(offset);
        MT_TRY(mt_share_take(s->share, bytes, &u->range[p]));
    }
fail:
    return st;
}

/* ---- views -------------------------------------------------------------------------------- */

/* Nothing to do when it is there. */
static mt_status view_make(mt_store *s, const mt__unit *u, mt__plane *pl, mt_plane p)
{
    mt_arena  made;
    mt_status st = MT_OK;

    mt_lock(&pl->making);
    if (pl->view.base == NULL)
        st = mt_arena_range(&made, &u->range[p], 1, u->name, mt_store_bytes(s, MT_PLANE_COUNT));
    if (pl->view.base == NULL && st == MT_OK) {
        mt_lock(&s->map_mu);
        pl->view = made;
        mt_unlock(&s->map_mu);
    }
    mt_unlock(&pl->making);
    return st;
}

/* The place that belongs to this address of the plane; NULL: nobody has asked for one. */
static void *view_of(mt_store *s, const mt__plane *pl, const void *at)
{
    void *place = NULL;

    mt_lock(&s->map_mu);
    if (pl->view.base != NULL)
        place = (char *)pl->view.base + ((const char *)at - (const char *)pl->arena.base);
    mt_unlock(&s->map_mu);
    return place;
}

mt_status mt_store_view(mt_store *s, int unit, int param, mt_plane p, void **out)
{
    mt__plane *pl;
    mt__unit  *u;
    void      *at;
    mt_status  st;

    MT_TRY(mt_store_at(s, unit, param, p, &at));
    if (s->share == NULL) {
        *out = at;
        return MT_OK;
    }
    u = mt__unit_at(s, unit);
    pl = &u->plane[MT__HOST][p];
    MT_TRY(view_make(s, u, pl, p));
    *out = view_of(s, pl, at);
fail:
    return st;
}

void mt_store_view_drop(mt_store *s, int unit, int param, mt_plane p)
{
    mt__unit *u = mt__unit_at(s, unit);
    size_t    bytes;
    void     *at, *place;

    if (s->share == NULL || u == NULL || !mt_store_made(s, unit, param, p, 0) ||
        mt_store_at(s, unit, param, p, &at) != MT_OK ||
        (place = view_of(s, &u->plane[MT__HOST][p], at)) == NULL)
        return;
    bytes = mt_store_plane_bytes(s, unit, param, p, u->desc[param].numel);
    (void)madvise(place, (bytes + u->align - 1) / u->align * u->align, MADV_DONTNEED);
}

/* ---- sums --------------------------------------------------------------------------------- */

double *mt_store_sums(const mt_store *s, int unit, int param, int own, int64_t *n)
{
    const mt__unit *u = mt__unit_at(s, unit);
    int64_t         from = 0, elements;

    *n = 0;
    if (u == NULL || !u->shared || param < 0 || param >= u->n_params)
        return NULL;
    elements = own ? mt_store_owned(s, unit, param, &from) : u->desc[param].numel;
    if (mt_plane_bytes(MT_PLANE_GRAD, u->desc[param].dtype, MT_STATES_FP32, elements) == 0)
        return NULL;
    *n = chunks_of(elements);
    return u->board.chunks + u->chunk[param] + from / MT_PORTION_GRAIN;
}

void mt_store_summed(mt_store *s, int unit)
{
    mt_notes_put(mt_share_notes(s->share), (mt_note){ .kind = MT_NOTE_SUMS, .unit = unit });
}

/* The first chunk of what is behind the bound. */
static size_t chunk_at(const mt__unit *u, mt_bound b)
{
    if (b.param == u->n_params)
        return u->board.n_chunks;
    if (mt_plane_bytes(MT_PLANE_GRAD, u->desc[b.param].dtype, MT_STATES_FP32, 1) == 0)
        return u->chunk[b.param];
    return u->chunk[b.param] + (size_t)(b.from / MT_PORTION_GRAIN);
}

void mt__chunks_of(const mt__unit *u, const mt_portion *p, size_t *from, size_t *n)
{
    *from = chunk_at(u, p->begin);
    *n = chunk_at(u, p->end) - *from;
}

/* ---- spreads ------------------------------------------------------------------------------ */

typedef struct spread {
    int      unit, param;
    unsigned planes;
} spread;

/* As a number for the other ranks. */
static uint64_t about(const spread *w)
{
    return (uint64_t)(unsigned)w->unit << 40 | (uint64_t)(unsigned)w->param << 16 | w->planes;
}

static mt_status fault(mt_store *s, mt_status st)
{
    mt_ledger_fault(s, st, mt_last_error());
    return st;
}

/* A rank may have to read for minutes before it writes; one that goes elsewhere is found by order
 * (peers.c). */
static mt_status late(mt_store *s, const spread *w, int rank, double seconds, int over)
{
    char text[400];

    snprintf(text, sizeof text, "unit %s, parameter %d: rank %d (process %" PRId64 ") has not come "
             "in %g s; what one rank writes in place all ranks have to", mt_store_name(s, w->unit),
             w->param, rank, mt_share_process(s->share, rank), seconds);
    if (over)
        return fault(s, MT_FAIL(MT_EPEER, "%s", text));
    if (s->watch.say != NULL)
        s->watch.say(text);
    return MT_OK;
}

static mt_status another(mt_store *s, const spread *w, int rank)
{
    uint64_t other = mt_share_about(s->share, MT_COUNT_WRITTEN, rank);

    return fault(s, MT_FAIL(MT_EPEER, "rank %d wrote unit %s, parameter %d, where rank %d wrote "
                            "unit %s, parameter %d; what one rank writes in place all ranks have "
                            "to, in one order", rank, mt_store_name(s, (int)(other >> 40)),
                            (int)(other >> 16 & 0xffffff), mt_share_rank(s->share),
                            mt_store_name(s, w->unit), w->param));
}

/* All ranks have come to n. */
static mt_status meet(mt_store *s, const spread *w, mt_count what, uint64_t n)
{
    double    limit = (double)atomic_load(&s->watch.limit_ns) / 1e9;
    double    waited = 0, seconds = limit / 2 < MT_SPREAD_S ? limit / 2 : MT_SPREAD_S;
    int       over = 0, behind = 1, rank;
    mt_status st = MT_OK;

    while (st == MT_OK && behind && !over) {
        MT_TRY(mt_ledger_meet(s, what, n, seconds, &behind));
        waited += seconds;
        over = waited >= limit;
        seconds = limit - waited;
        if (behind && (rank = mt_share_behind(s->share, what, n)) < mt_share_ranks(s->share))
            st = late(s, w, rank, waited, over);
    }
fail:
    return st;
}

/* Every rank has written, and all the same. Who was interrupted comes here again. */
static mt_status meet_writers(mt_store *s, const spread *w, uint64_t n)
{
    mt_status st;

    if (mt_share_said(s->share, MT_COUNT_WRITTEN, mt_share_rank(s->share)) < n)
        mt_ledger_say(s, MT_COUNT_WRITTEN, n, about(w));
    MT_TRY(meet(s, w, MT_COUNT_WRITTEN, n));
    for (int rank = 0; rank < mt_share_ranks(s->share); rank++)
        if (mt_share_about(s->share, MT_COUNT_WRITTEN, rank) != about(w))
            return another(s, w, rank);
fail:
    return st;
}

/* A rank's portion of a plane, if anybody has looked at it here. */
static mt_status copy_portion(mt_store *s, const spread *w, mt_plane p, int rank)
{
    mt__plane  *pl = &mt__unit_at(s, w->unit)->plane[MT__HOST][p];
    mt_portion  part;
    int64_t     from, n;
    size_t      skip;
    const char *place;
    void       *at;
    mt_status   st;

    MT_TRY(mt_portion_of(s, w->unit, rank, mt_share_ranks(s->share), &part));
    n = mt_portion_part(&part, w->param, mt_store_desc(s, w->unit, w->param)->numel, &from);
    skip = mt_store_plane_bytes(s, w->unit, w->param, p, from);
    MT_TRY(mt_store_at(s, w->unit, w->param, p, &at));
    place = view_of(s, pl, at);
    if (place != NULL)
        memcpy((char *)at + skip, place + skip,
               mt_store_plane_bytes(s, w->unit, w->param, p, n));
fail:
    return st;
}

/* Of weights those of the ranks for which this one speaks, too: all of them have written the same.
 */
static mt_status copy_own(mt_store *s, const spread *w, mt_plane p)
{
    int       me = mt_share_rank(s->share);
    mt_status st = MT_OK;

    for (int rank = 0; rank < mt_share_ranks(s->share); rank++)
        if (rank == me || (p == MT_PLANE_HI && mt_share_speaker(s->share, rank) == me))
            MT_TRY(copy_portion(s, w, p, rank));
fail:
    return st;
}

static mt_status spread_own(mt_store *s, const spread *w, uint64_t n)
{
    mt_watch_ask ask;
    mt_status    st;

    for (int p = 0; p < MT_PLANE_COUNT; p++)
        if (w->planes >> p & 1)
            MT_TRY(copy_own(s, w, (mt_plane)p));
    if (mt_share_is_apart(s->share))
        mt__mirror_lacks(s, w->unit, w->planes);         /* before anybody can bring them again */
    mt_ledger_say(s, MT_COUNT_SPREAD, n, 0);
    ask = mt_watch_asks(NULL);           /* nobody is asked: this is not to be done again */
    st = meet(s, w, MT_COUNT_SPREAD, n);
    (void)mt_watch_asks(ask);
fail:
    return st;
}

mt_status mt_store_spread(mt_store *s, int unit, int param, unsigned planes)
{
    spread    w = { unit, param, planes };
    mt__unit *u;
    uint64_t  n;
    mt_status st;

    MT_TRY(mt__find(s, unit, param, &u));
    if (s->share == NULL)
        return MT_OK;
    n = mt_share_said(s->share, MT_COUNT_SPREAD, mt_share_rank(s->share)) + 1;
    MT_TRY(meet_writers(s, &w, n));
    MT_TRY(spread_own(s, &w, n));
    for (int p = 0; p < MT_PLANE_COUNT; p++)
        if (planes >> p & 1)
            mt_store_view_drop(s, unit, param, (mt_plane)p);
    /* Weights of a file are pushed there next, this parameter's alone. */
    if ((planes & 1u << MT_PLANE_HI) && !mt_store_home(s, unit, NULL)->fed)
        mt_ledger_touch(s, unit);
fail:
    return st;
}
