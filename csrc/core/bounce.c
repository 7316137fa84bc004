/* bounce.c — one section after the other, in a buffer that is ours until the last. */
#include "bounce.h"

#include <stdlib.h>
#include <string.h>

#define HI    (1u << MT_PLANE_HI)
#define IS(x) (1u << MT_BUFFER_##x)

struct mt_bounce {                       /* all constant */
    mt_store *store;
    mt_rings *all;
    mt_mutex *mu;                        /* theirs */
    mt_ring  *ring;
    size_t    bytes;
};

typedef struct visit {
    mt_bounce       *b;
    const mt_layout *l;
    mt_part         *parts;              /* [most in a piece] */
    mt_buffer       *k;                  /* ours; NULL: none yet */
    int              piece, section;
    int              write;              /* the request that is put next */
} visit;

/* ---- a buffer ----------------------------------------------------------------------------- */

/* What the last one left of this unit; or one that is free; or another's, which goes then. */
static int find_buffer(visit *v)
{
    const mt_ring *r = v->b->ring;

    mt_lock(v->b->mu);
    if ((v->k = mt_ring_find(r, IS(READY), v->l->unit, -1)) == NULL &&
        (v->k = mt_ring_find(r, IS(FREE), -1, -1)) == NULL)
        v->k = mt_ring_find(r, IS(READY), -1, -1);
    if (v->k != NULL)
        mt_buffer_to(v->k, MT_BUFFER_TAKEN);
    mt_unlock(v->b->mu);
    return v->k != NULL;
}

static mt_status take_buffer(visit *v)
{
    mt_status st = MT_OK;

    while (v->k == NULL && !find_buffer(v) && st == MT_OK)
        st = mt_ring_add(v->b->ring, v->b->bytes, NULL);
    return st;
}

/* Where something failed it has what the file has not, or is still under way. */
static void give_buffer(visit *v, mt_status st)
{
    if (v->k == NULL)
        return;
    mt_lock(v->b->mu);
    if (st == MT_OK)
        mt_buffer_to(v->k, MT_BUFFER_READY);
    else
        mt_buffer_leave(v->k);
    mt_unlock(v->b->mu);
}

/* ---- requests ----------------------------------------------------------------------------- */

/* No update of the unit is under way, but its writes may be: a read waits for those of the piece,
 * a write for reads too, also for those that nobody wants any more. */
static int is_put(void *arg)
{
    visit *v = arg;

    if (mt_rings_meets(v->b->all, v->l->unit, v->piece, v->write))
        return 0;
    mt_ring_put(v->k, v->l, v->piece, 1u << v->section, v->write, MT_BUFFER_TAKEN);
    return 1;
}

static int is_over(void *arg)
{
    return ((const visit *)arg)->k->at == MT_BUFFER_TAKEN;
}

static mt_status move(visit *v, int write)
{
    v->write = write;
    MT_DO(mt_rings_until(v->b->all, is_put, v, v->l->unit, "requests for the same piece"));
    MT_DO(mt_rings_until(v->b->all, is_over, v, v->l->unit,
                         "a piece, for who reads or writes it here"));
    return mt_ledger_check(v->b->store);
}

/* ---- one section -------------------------------------------------------------------------- */

static int is_loading(const visit *v, int param, unsigned planes)
{
    return mt_mirror_any(v->b->store, v->l->unit, param, planes, 1u << MT_MIRROR_LOADING);
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
            MT_DO(mt_part_host(v->b->store, v->l->unit, k, (mt_plane)p, &host, &bytes));
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

static mt_status do_all(mt_bounce *b, const mt_layout *l, int param, unsigned planes, int write)
{
    visit     v = { .b = b, .l = l };
    mt_status st = MT_OK;

    MT_DO(MT_MAKE(v.parts, l->cut->most, mt_store_name(b->store, l->unit)));
    planes &= param < 0 ? planes : l->planes[param];
    for (; v.piece < l->n && planes != 0 && st == MT_OK; v.piece++)
        for (v.section = 0; v.section < MT_SECTIONS && st == MT_OK; v.section++)
            st = do_section(&v, param, planes, write);
    give_buffer(&v, st);
    free(v.parts);
    return st;
}

mt_status mt_bounce_load(mt_bounce *b, const mt_layout *l, unsigned planes)
{
    return do_all(b, l, -1, planes, 0);
}

mt_status mt_bounce_store(mt_bounce *b, const mt_layout *l, int param, unsigned planes)
{
    mt_lock(b->mu);
    mt_ring_drop_others(b->ring, l->unit);
    mt_unlock(b->mu);
    return do_all(b, l, param, planes, 1);
}

/* ---- open and close ----------------------------------------------------------------------- */

mt_status mt_bounce_open(const mt_context *cx, mt_rings *all, size_t bytes, mt_bounce **out)
{
    static const mt_ring_how how = {
        .name = "buffers of the disk", .reads = "a piece to be read for the host (WRITTEN)",
        .writes = "a piece to be written (PUSHED)",
    };
    mt_bounce *b;
    mt_status  st;

    MT_TRY(MT_MAKE(b, 1, "disk"));
    *b = (mt_bounce){ .store = cx->store, .all = all, .mu = &all->mu, .bytes = bytes };
    MT_TRY(mt_ring_open(all, &how, &b->ring));
    MT_TRY(mt_ring_add(b->ring, bytes, NULL));
    *out = b;
    return MT_OK;
fail:
    mt_bounce_close(b);
    return st;
}

void mt_bounce_close(mt_bounce *b)
{
    if (b == NULL)
        return;
    mt_ring_close(b->ring);
    free(b);
}
