/* layout.c — pieces are cut, given places in the file, and found again by their offsets. */
#include "layout.h"

#include "mirror.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- made ------------------------------------------------------------------------------- */

mt_status mt_layout_make(mt_store *s, int unit, size_t bytes, int made, mt_layout **out)
{
    int         params = mt_store_params(s, unit);
    const char *name = mt_store_name(s, unit);
    mt_layout  *l MT_CLOSED(mt_layout_free) = NULL;
    mt_layout_piece *c;

    MT_DO(MT_MAKE(l, 1, name));
    *l = (mt_layout){ .store = s, .unit = unit };
    MT_DO(MT_MAKE(l->planes, params, name));
    for (int i = 0; i < params; i++)
        for (int p = 0; p < MT_PLANE_COUNT && mt_store_desc(s, unit, i)->numel > 0; p++) {
            int in = mt_store_trainable(s, unit, i) || p == MT_PLANE_HI;

            if (!(mt_store_home(s, unit, NULL)->away >> p & 1) ||
                mt_store_plane_bytes(s, unit, i, (mt_plane)p, 1) == 0)
                continue;
            if (made)
                MT_DO(mt_store_in_arena(s, unit, i, (mt_plane)p, &in));
            l->planes[i] |= in ? 1u << p : 0;
        }
    MT_DO(mt_pieces_cut(s, unit, &(mt_cut){ l->planes, bytes, MT_BLOCK_ALIGN, MT_LAYOUT_GRAIN, 0,
                                           mt_store_align(s, unit) }, &l->cut));
    MT_DO(MT_MAKE(l->pieces, l->cut->n, name));
    for (l->n = l->cut->n, c = l->pieces; c < l->pieces + l->n; c++) {
        const mt_piece   *whole = &l->cut->piece[c - l->pieces];
        const mt_stretch *first = &l->cut->part[whole->first];

        c->hi_at = mt_store_offset(s, unit, first->param) +
                   mt_store_plane_bytes(s, unit, first->param, MT_PLANE_HI, first->from);
        c->section[MT_SECTION_WEIGHTS].bytes = c->section[MT_SECTION_STATES].from = whole->weights;
        c->section[MT_SECTION_STATES].bytes = whole->bytes - whole->weights;
        l->bytes += whole->bytes;
        l->most_weights = whole->weights > l->most_weights ? whole->weights : l->most_weights;
        for (int k = 0; k < MT_SECTIONS; k++)
            MT_DO(MT_MAKE(c->section[k].sums, (int64_t)mt_block_count(c->section[k].bytes), name));
    }
    *out = MT_KEEP(l);
    return MT_OK;
}

void mt_layout_free(mt_layout *l)
{
    if (l == NULL)
        return;
    for (int i = 0; l->pieces != NULL && i < l->cut->n; i++)
        for (int k = 0; k < MT_SECTIONS; k++)
            free(l->pieces[i].section[k].sums);
    mt_pieces_free(l->cut);
    free(l->pieces);
    free(l->planes);
    free(l);
}

mt_status mt_layout_take(mt_layout *l, mt_blocks *file)
{
    mt_status st = MT_OK;

    for (int i = 0; i < l->n && st == MT_OK; i++)
        st = file->ops->take(file, l->cut->piece[i].bytes, &l->pieces[i].at);
    return st;
}

/* ---- used ------------------------------------------------------------------------------- */

int mt_layout_has(const mt_layout *l, int piece, const int *params, int n)
{
    const mt_piece *c = &l->cut->piece[piece];

    for (int i = c->first; i < c->first + c->n; i++)
        for (int k = 0; k < n; k++)
            if (l->cut->part[i].param == params[k])
                return 1;
    return 0;
}

mt_request mt_layout_request(const mt_layout *l, int piece, int section, int write, void *mem)
{
    const mt_layout_piece *c = &l->pieces[piece];
    const mt_section      *n = &c->section[section];

    return (mt_request){ .write = write, .at = c->at + n->from, .mem = (char *)mem + n->from,
                         .bytes = n->bytes, .sums = n->sums };
}

/* Whose byte is at this offset of the piece. */
static const mt_stretch *found_at(const mt_layout *l, int piece, size_t offset, mt_plane *plane)
{
    const mt_piece   *c = &l->cut->piece[piece];
    const mt_stretch *found = NULL;
    size_t            best = 0;

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

void mt_layout_tell(const mt_layout *l, int piece, const mt_request *r)
{
    const mt_section *states = &l->pieces[piece].section[MT_SECTION_STATES];
    size_t            offset = (size_t)(r->bad_at - l->pieces[piece].at), end = states->from;
    mt_plane          from = MT_PLANE_HI, to = MT_PLANE_HI;
    const mt_stretch *first, *last;
    char              until[80] = "";

    if (r->st == MT_OK)
        return;
    /* What lies in the block that begins there: the first and the last; it is of one section. */
    end += offset >= states->from ? states->bytes : 0;
    first = found_at(l, piece, offset, &from);
    last = found_at(l, piece, (end - offset < MT_BLOCK_BYTES ? end : offset + MT_BLOCK_BYTES) - 1,
                    &to);
    if (first != last || from != to)
        snprintf(until, sizeof until, " to plane %s of parameter %d", mt_plane_name(to),
                 last->param);
    (void)MT_FAIL(r->st, "unit %s, %splane %s of parameter %d%s: %s; the run cannot go on: make "
                  "the model again, stream it, and load the last checkpoint",
                  mt_store_name(l->store, l->unit), until[0] != '\0' ? "from " : "",
                  mt_plane_name(from), first->param, until, r->text);
    mt_ledger_fault(l->store, r->st, mt_last_error());
}
