/* view.c — units whose planes lie in a share: their ranges, and what user code sees of them. */
#include "store_impl.h"

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
    if ((u->chunk = calloc((size_t)u->n_params + 1, sizeof *u->chunk)) == NULL)
        return MT_FAIL(MT_ENOMEM, "unit %s: no memory for %d numbers", u->name, u->n_params);
    *n = 0;
    for (int i = 0; i < u->n_params; i++) {
        const mt_param_desc *d = &u->desc[i];

        u->chunk[i] = *n;
        if (mt_plane_bytes(MT_PLANE_GRAD, d->dtype, MT_STATES_FP32, 1) > 0)
            *n += (size_t)chunks_of(d->numel);
    }
    return MT_OK;
}

/* The board first: on it ranks see that their units differ, before one's lies in another's. */
mt_status mt__share_unit(mt_store *s, mt__unit *u, int unit)
{
    size_t    chunks, bytes, *offset;
    mt_status st;

    MT_TRY(count_chunks(u, &chunks));
    MT_TRY(mt_board_open(s->share, u->name, layout_of(u, unit), chunks, &u->board));
    for (int p = 0; p < MT_PLANE_COUNT; p++) {
        MT_TRY(mt__lay_out(u, (mt_plane)p, &offset, &bytes));
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
