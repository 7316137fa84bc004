/* relay.c — notes become parcels on one machine, and are said on another. */
#include "relay.h"

#include "store_impl.h"

#include <stdlib.h>
#include <string.h>

/* As asks.c has it in a request. */
#define UNIT_AT 32
#define PLANES  ((UINT64_C(1) << 31) - 1)

typedef struct item {
    mt_parcel p;
    void     *mem;
} item;

struct mt_relay {
    mt_store *s;
    mt_note   note;
    item     *items;                     /* [n] that come before the note */
    int64_t   n, room, next;
    int       busy;                      /* the note has not gone yet */
};

mt_status mt_relay_open(mt_store *s, mt_relay **out)
{
    mt_relay *r;
    mt_status st;

    if (s->share == NULL || mt_share_notes(s->share) == NULL)
        return MT_FAIL(MT_ESTATE, "relay: all ranks are on this machine");
    if ((st = MT_MAKE(r, 1, "relay")) != MT_OK)
        return st;
    r->s = s;
    *out = r;
    return MT_OK;
}

void mt_relay_close(mt_relay *r)
{
    if (r == NULL)
        return;
    free(r->items);
    free(r);
}

/* ---- what goes ---------------------------------------------------------------------------- */

static mt_status add(mt_relay *r, mt_parcel p, void *mem)
{
    mt_status st = MT_OK;

    if (p.bytes == 0)
        return MT_OK;
    if (r->n == r->room)
        st = MT_GROW(r->items, r->room, 2 * r->room + 8, "relay");
    if (st == MT_OK)
        r->items[r->n++] = (item){ p, mem };
    return st;
}

/* Bytes [from, to) of HI, as far as they are this rank's. */
static mt_status add_weights(mt_relay *r, int unit, size_t from, size_t to)
{
    const mt__unit *u = mt__unit_at(r->s, unit);
    size_t          begin = mt_portion_byte(r->s, unit, u->own.begin);
    size_t          end = mt_portion_byte(r->s, unit, u->own.end);
    void           *hi;
    mt_status       st;

    from = from < begin ? begin : from;
    to = to > end ? end : to;
    if (from >= to)
        return MT_OK;
    MT_TRY(mt_store_hi(r->s, unit, &hi));
    st = add(r, (mt_parcel){ .kind = MT_PARCEL_WEIGHTS, .unit = unit, .at = from,
                             .bytes = to - from }, (char *)hi + from);
fail:
    return st;
}

/* What was never updated has no moments. */
static int is_updated(mt_store *s, int unit, int param)
{
    return mt_store_made(s, unit, param, MT_PLANE_M, 0) ||
           mt_store_made(s, unit, param, MT_PLANE_M, 1);
}

/* Of parameters that are updated, side by side. */
static mt_status add_updated(mt_relay *r, int unit)
{
    int       n = mt_store_params(r->s, unit), first = 0;
    mt_status st = MT_OK;

    for (int i = 0; i <= n; i++) {
        if (i < n && is_updated(r->s, unit, i))
            continue;
        if (first < i)
            MT_TRY(add_weights(r, unit, mt_store_offset(r->s, unit, first),
                               i < n ? mt_store_offset(r->s, unit, i)
                                     : mt_store_hi_bytes(r->s, unit)));
        first = i + 1;
    }
fail:
    return st;
}

static mt_status add_chunks(mt_relay *r, int unit)
{
    const mt__unit *u = mt__unit_at(r->s, unit);
    size_t          from, n;

    mt__chunks_of(u, &u->own, &from, &n);
    return add(r, (mt_parcel){ .kind = MT_PARCEL_CHUNKS, .unit = unit, .at = from * sizeof(double),
                               .bytes = n * sizeof(double) }, u->board.chunks + from);
}

/* This rank's portion of a parameter in a plane, where it has one. */
static mt_status add_part(mt_relay *r, int unit, int param, mt_plane p)
{
    int64_t   from, n = mt_store_owned(r->s, unit, param, &from);
    size_t    skip = mt_store_plane_bytes(r->s, unit, param, p, from);
    void     *at;
    mt_status st;

    if (n == 0 || !mt_store_made(r->s, unit, param, p, 0))
        return MT_OK;
    MT_TRY(mt_store_at(r->s, unit, param, p, &at));
    st = add(r, (mt_parcel){ .kind = MT_PARCEL_PLANE, .unit = unit, .param = param, .what = p,
                             .at = skip,
                             .bytes = mt_store_plane_bytes(r->s, unit, param, p, n) },
             (char *)at + skip);
fail:
    return st;
}

static mt_status add_asked(mt_relay *r, uint64_t about)
{
    int       unit = (int)(about >> UNIT_AT);
    mt_status st = MT_OK;

    for (int p = 0; p < MT_PLANE_COUNT; p++)
        for (int i = 0; ((about & PLANES) >> p & 1) && i < mt_store_params(r->s, unit); i++)
            MT_TRY(add_part(r, unit, i, (mt_plane)p));
fail:
    return st;
}

/* What has to be there before the note is said. */
static mt_status unpack(mt_relay *r)
{
    const mt_note *note = &r->note;

    r->n = r->next = 0;
    if (note->kind == MT_NOTE_DONE && note->what == MT_COUNT_UPDATED)
        return add_updated(r, note->unit);
    if (note->kind == MT_NOTE_SUMS)
        return add_chunks(r, note->unit);
    return note->kind == MT_NOTE_SERVED ? add_asked(r, note->about) : MT_OK;
}

static void note_out(mt_relay *r, mt_parcel *out, void **mem)
{
    const mt_note *note = &r->note;
    size_t         cap;

    *out = (mt_parcel){ .kind = MT_PARCEL_NOTE, .note = (int32_t)note->kind, .unit = note->unit,
                        .what = note->what, .n = note->n, .about = note->about };
    if (note->kind == MT_NOTE_FAILED) {
        *mem = mt_share_why(r->s->share, mt_share_rank(r->s->share), &cap);
        out->bytes = cap;
    }
}

mt_status mt_relay_next(mt_relay *r, int ms, mt_parcel *out, void **mem, int *to, int *some)
{
    mt_status st = MT_OK;

    if (!r->busy) {
        MT_TRY(mt_notes_take(mt_share_notes(r->s->share), ms, &r->note, some));
        if (!*some)
            return MT_OK;
        MT_TRY(unpack(r));
        r->busy = 1;
    }
    *some = 1;
    *to = r->note.kind == MT_NOTE_SERVED ? r->note.what : -1;
    if (r->next < r->n) {
        *out = r->items[r->next].p;
        *mem = r->items[r->next++].mem;
        return MT_OK;
    }
    note_out(r, out, mem);
    r->busy = 0;
fail:
    return st;
}

/* ---- what comes --------------------------------------------------------------------------- */

static mt_status refuse(int rank, const mt_parcel *p)
{
    return MT_FAIL(MT_EINVAL, "relay: rank %d sent parcel %d (note %d) of unit %d that cannot be",
                   rank, (int)p->kind, (int)p->note, (int)p->unit);
}

/* Does this rank speak here for that one of another machine? */
static int is_spoken_for(const mt_store *s, int rank)
{
    int me = mt_share_rank(s->share);

    return rank >= 0 && rank < mt_share_ranks(s->share) && rank != me &&
           mt_share_speaker(s->share, rank) == me;
}

/* Where it lies: base, of so many bytes. */
static mt_status find(mt_store *s, const mt_parcel *p, char **base, size_t *bytes)
{
    const mt__unit *u = mt__unit_at(s, p->unit);
    void           *at = NULL;
    mt_status       st = MT_OK;

    *bytes = 0;
    if (u == NULL || !u->shared)
        return MT_OK;
    if (p->kind == MT_PARCEL_CHUNKS) {
        at = u->board.chunks;
        *bytes = u->board.n_chunks * sizeof(double);
    } else if (p->kind == MT_PARCEL_WEIGHTS) {
        st = mt_store_hi(s, p->unit, &at);
        *bytes = u->hi_bytes;
    } else if (p->kind == MT_PARCEL_PLANE && p->what >= 0 && p->what < MT_PLANE_COUNT) {
        if ((st = mt_store_at(s, p->unit, p->param, (mt_plane)p->what, &at)) == MT_OK)
            *bytes = mt_store_plane_bytes(s, p->unit, p->param, (mt_plane)p->what,
                                          u->desc[p->param].numel);
    }
    *base = at;
    return st;
}

mt_status mt_relay_place(mt_store *s, int rank, const mt_parcel *p, void **mem)
{
    char     *base = NULL;
    size_t    bytes = 0;
    mt_status st = MT_OK;

    if (!is_spoken_for(s, rank))
        return refuse(rank, p);
    if (p->bytes == 0)
        return MT_OK;
    if (p->kind == MT_PARCEL_NOTE && p->note == MT_NOTE_FAILED)
        base = mt_share_why(s->share, rank, &bytes);
    else
        MT_TRY(find(s, p, &base, &bytes));
    if (p->at > bytes || p->bytes > bytes - p->at)
        return refuse(rank, p);
    *mem = base + p->at;
fail:
    return st;
}

static mt_status hear(mt_store *s, int rank, const mt_parcel *p)
{
    const mt__unit *u = mt__unit_at(s, p->unit);
    mt_note         note = { .kind = (mt_note_kind)p->note, .unit = p->unit, .what = p->what,
                             .n = p->n, .about = p->about };

    if (p->note == MT_NOTE_DONE) {
        if (u == NULL || !u->shared || p->what < 0 || p->what >= MT_UNIT_COUNTS)
            return refuse(rank, p);
        mt_board_hear(&u->board, rank, (mt_unit_count)p->what, p->n);
        return MT_OK;
    }
    if (p->note < 0 || p->note >= MT_NOTES ||
        (p->note == MT_NOTE_SAID && (p->what < 0 || p->what >= MT_COUNTS)) ||
        (p->note == MT_NOTE_SERVED && (p->what < 0 || p->what >= mt_share_ranks(s->share))))
        return refuse(rank, p);
    mt_share_hear(s->share, rank, note);
    return MT_OK;
}

mt_status mt_relay_come(mt_store *s, int rank, const mt_parcel *p)
{
    if (!is_spoken_for(s, rank))
        return refuse(rank, p);
    return p->kind == MT_PARCEL_NOTE ? hear(s, rank, p) : MT_OK;
}
