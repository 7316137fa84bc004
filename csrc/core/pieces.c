/* pieces.c — parameters in order, each cut where the piece that is being filled is full. */
#include "pieces.h"

#include <stdlib.h>

#define HI (1u << MT_PLANE_HI)

typedef struct cutting {
    const mt_store *s;
    int             unit;
    const mt_cut   *how;
    mt_pieces      *p;
    int64_t         room, room_parts;    /* of p's two arrays */
    size_t          rest;                /* bytes of the last piece's planes but HI */
    unsigned        kinds;               /* planes of its first part */
} cutting;

/* Of n elements, each plane in whole `align`. */
static size_t bytes_of(const cutting *c, int param, unsigned planes, int64_t n, size_t align)
{
    size_t bytes = 0;

    for (int p = 0; p < MT_PLANE_COUNT; p++)
        if (planes >> p & 1)
            bytes += mt_round_up(mt_store_plane_bytes(c->s, c->unit, param, (mt_plane)p, n), align);
    return bytes;
}

static mt_piece *last_of(const cutting *c)
{
    return &c->p->piece[c->p->n - 1];
}

/* Weights where they lie; the others from where they begin, which the whole piece tells. */
static mt_status add_part(cutting *c, int param, unsigned planes, int64_t from, int64_t n)
{
    mt_piece   *piece = last_of(c);
    mt_stretch *k;

    MT_DO(MT_GROW(c->p->part, c->room_parts, c->p->n_parts + 1, mt_store_name(c->s, c->unit)));
    c->kinds = piece->n == 0 ? planes : c->kinds;
    k = &c->p->part[c->p->n_parts++];
    *k = (mt_stretch){ .param = param, .from = from, .n = n };
    for (int p = 0; p < MT_PLANE_COUNT; p++) {
        size_t bytes = mt_store_plane_bytes(c->s, c->unit, param, (mt_plane)p, n);

        k->offset[p] = MT_PART_ABSENT;
        if (!(planes >> p & 1) || bytes == 0)
            continue;
        k->offset[p] = p == MT_PLANE_HI ? mt_round_up(piece->hi_bytes, c->how->spacing) : c->rest;
        if (p == MT_PLANE_HI)
            piece->hi_bytes = k->offset[p] + bytes;
        else
            c->rest += mt_round_up(bytes, MT_PART_ALIGN);
    }
    if (++piece->n > c->p->most)
        c->p->most = piece->n;
    return MT_OK;
}

static void finish_piece(cutting *c)
{
    mt_piece *piece = last_of(c);

    piece->weights = mt_round_up(piece->hi_bytes, c->how->align);
    piece->bytes = piece->weights + mt_round_up(c->rest, c->how->align);
    for (int i = piece->first; i < piece->first + piece->n; i++)
        for (int p = 0; p < MT_PLANE_COUNT; p++)
            if (p != MT_PLANE_HI && c->p->part[i].offset[p] != MT_PART_ABSENT)
                c->p->part[i].offset[p] += piece->weights;
}

static mt_status next_piece(cutting *c)
{
    if (c->p->n > 0)
        finish_piece(c);
    MT_DO(MT_GROW(c->p->piece, c->room, c->p->n + 1, mt_store_name(c->s, c->unit)));
    c->p->piece[c->p->n++] = (mt_piece){ .first = c->p->n_parts };
    c->rest = 0;
    return MT_OK;
}

static mt_status cut_param(cutting *c, int param, unsigned planes)
{
    const mt_cut *how = c->how;
    int64_t       from, n, end = mt_store_owned(c->s, c->unit, param, &from);

    for (end += from; from < end; from += n) {
        const mt_piece *piece = c->p->n > 0 ? last_of(c) : NULL;
        size_t          used, most;

        if (piece == NULL || (how->most > 0 && piece->n == how->most) ||
            (piece->n > 0 && ((planes & ~HI) != 0) != ((c->kinds & ~HI) != 0)))
            MT_DO(next_piece(c));
        piece = last_of(c);
        /* Weights, and the rest, in whole `align` each may take more than together. */
        most = how->budget - ((planes & HI) != 0 || piece->hi_bytes > 0 ? how->align - MT_PART_ALIGN
                                                                        : 0);
        used = mt_round_up(piece->hi_bytes, c->how->spacing) + c->rest;
        most = most > used ? most - used : 0;
        n = end - from;                  /* all of them, or as many whole grains as fit */
        if (bytes_of(c, param, planes, n, MT_PART_ALIGN) > most) {
            n = (int64_t)(most / bytes_of(c, param, planes, how->grain, 1)) * how->grain;
            while (n > 0 && bytes_of(c, param, planes, n, MT_PART_ALIGN) > most)
                n -= how->grain;
        }
        if (n > 0)
            MT_DO(add_part(c, param, planes, from, n));
        else if (last_of(c)->n > 0)
            MT_DO(next_piece(c));
        else
            return MT_FAIL(MT_EINVAL, "unit %s: %zu bytes hold no %lld elements of parameter %d",
                           mt_store_name(c->s, c->unit), how->budget, (long long)how->grain, param);
    }
    return MT_OK;
}

mt_status mt_pieces_cut(const mt_store *s, int unit, const mt_cut *how, mt_pieces **out)
{
    mt_pieces *made MT_CLOSED(mt_pieces_free) = NULL;
    cutting    c = { .s = s, .unit = unit, .how = how };

    MT_DO(MT_MAKE(made, 1, mt_store_name(s, unit)));
    c.p = made;
    for (int i = 0; i < mt_store_params(s, unit); i++)
        if (bytes_of(&c, i, how->planes[i], 1, 1) > 0)
            MT_DO(cut_param(&c, i, how->planes[i]));
    if (made->n > 0)
        finish_piece(&c);
    *out = MT_KEEP(made);
    return MT_OK;
}

void mt_pieces_free(mt_pieces *p)
{
    if (p == NULL)
        return;
    free(p->piece);
    free(p->part);
    free(p);
}

void mt_pieces_at(const mt_pieces *p, int number, void *mem, mt_part *parts)
{
    const mt_piece *piece = &p->piece[number];

    for (int i = 0; i < piece->n; i++) {
        const mt_stretch *k = &p->part[piece->first + i];

        parts[i] = (mt_part){ .param = k->param, .from = k->from, .n = k->n };
        for (int q = 0; q < MT_PLANE_COUNT; q++)
            if (k->offset[q] != MT_PART_ABSENT)
                parts[i].at[q] = (char *)mem + k->offset[q];
    }
}

mt_status mt_part_host(mt_store *s, int unit, const mt_part *part, mt_plane p, void **at,
                       size_t *bytes)
{
    void *whole;

    MT_DO(mt_store_at(s, unit, part->param, p, &whole));
    *at = (char *)whole + mt_store_plane_bytes(s, unit, part->param, p, part->from);
    *bytes = mt_store_plane_bytes(s, unit, part->param, p, part->n);
    return MT_OK;
}

mt_status mt_part_copy(mt_store *s, int unit, const mt_part *part, unsigned planes, mt_queue *q,
                       int up, uint64_t *copied)
{
    for (int p = 0; p < MT_PLANE_COUNT; p++) {
        void  *host;
        size_t bytes;

        if (part->at[p] == NULL || !(planes >> p & 1))
            continue;
        MT_DO(mt_part_host(s, unit, part, (mt_plane)p, &host, &bytes));
        MT_DO(q->dev->ops->copy(q, up ? part->at[p] : host, up ? host : part->at[p], bytes));
        *copied += bytes;
    }
    return MT_OK;
}
