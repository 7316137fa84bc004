/* relay.c — notes become parcels on one machine, and are said on another. */
#include "relay.h"

#include "store_impl.h"

#include <stdlib.h>

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
    unsigned char *in_slots;             /* [n_units] its weights of the last STEPPED went so */
    int64_t   n_units;
};

mt_status mt_relay_open(mt_store *s, mt_relay **out)
{
    mt_relay *r;

    if (s->share == NULL || !mt_share_is_apart(s->share))
        return MT_FAIL(MT_ESTATE, "relay: all ranks are on this machine");
    MT_DO(MT_MAKE(r, 1, "relay"));
    r->s = s;
    *out = r;
    return MT_OK;
}

void mt_relay_close(mt_relay *r)
{
    if (r == NULL)
        return;
    free(r->items);
    free(r->in_slots);
    free(r);
}

/* Under serving: the unit stays where it is. NULL: its weights go by way of host memory. own: of
 * this rank. */
static void *slot_of(mt_store *s, int unit, int own)
{
    void          *of;
    const mt_home *h = atomic_load(&s->serves.stop) ? NULL : mt__home_kept(s, unit, &of);

    return h != NULL && h->slot != NULL ? h->slot(of, unit, own) : NULL;
}

/* Its param says whether they went into the slot. */
static int is_of_weights(const mt_parcel *p)
{
    return p->kind == MT_PARCEL_NOTE && p->unit >= 0 &&
           (p->what == MT_COUNT_STEPPED || p->what == MT_COUNT_UPDATED);
}

/* ---- what goes ---------------------------------------------------------------------------- */

static mt_status add(mt_relay *r, mt_parcel p, void *base)
{
    if (p.bytes == 0)
        return MT_OK;
    MT_DO(MT_GROW(r->items, r->room, r->n + 1, "relay"));
    r->items[r->n++] = (item){ p, (char *)base + p.at };
    return MT_OK;
}

/* This rank's portion of the weights of parameters that are updated; those that lie side by side go
 * together. */
static mt_status add_updated(mt_relay *r, int unit, uint64_t count)
{
    const mt__unit *u = mt__unit_at(r->s, unit);
    size_t          begin = mt_shape_byte(&u->shape, u->own.begin);
    size_t          end = mt_shape_byte(&u->shape, u->own.end);
    void           *hi, *slot;

    MT_DO(MT_GROW(r->in_slots, r->n_units, mt_store_units(r->s), "relay"));
    MT_WITH(&r->s->serving) slot = slot_of(r->s, unit, 1);
    r->in_slots[unit] = slot != NULL;
    MT_DO(mt_store_hi(r->s, unit, &hi));
    for (int i = 0, first = 0; i <= u->shape.n; i++) {
        size_t from, to;

        /* What was never updated has no moments. */
        if (i < u->shape.n && (mt_store_made(r->s, unit, i, MT_PLANE_M, 0) ||
                               mt_store_made(r->s, unit, i, MT_PLANE_M, 1)))
            continue;
        from = first < i ? u->shape.offset[first] : 0;
        to = first == i ? 0 : i < u->shape.n ? u->shape.offset[i] : u->shape.bytes;
        from = from < begin ? begin : from;
        to = to > end ? end : to;
        first = i + 1;
        if (from < to)
            MT_DO(add(r, (mt_parcel){ .kind = slot != NULL ? MT_PARCEL_SLOT : MT_PARCEL_WEIGHTS,
                                      .unit = unit, .n = count, .at = from, .bytes = to - from },
                      slot != NULL ? slot : hi));
    }
    return MT_OK;
}

/* This rank's portions of what was asked for, where it has them. */
static mt_status add_asked(mt_relay *r, uint64_t about)
{
    int      unit, claims;
    unsigned planes;

    mt__asked(about, &unit, &planes, &claims);
    for (int p = 0; p < MT_PLANE_COUNT; p++)
        for (int i = 0; (planes >> p & 1) && i < mt_store_params(r->s, unit); i++) {
            int64_t from, n = mt_store_owned(r->s, unit, i, &from);
            void   *at;

            if (n == 0 || !mt_store_made(r->s, unit, i, (mt_plane)p, 0))
                continue;
            MT_DO(mt_store_at(r->s, unit, i, (mt_plane)p, &at));
            MT_DO(add(r, (mt_parcel){ .kind = MT_PARCEL_PLANE, .unit = unit, .param = i, .what = p,
                                      .at = mt_store_plane_bytes(r->s, unit, i, (mt_plane)p, from),
                                      .bytes = mt_store_plane_bytes(r->s, unit, i, (mt_plane)p, n)
                                    }, at));
        }
    return MT_OK;
}

mt_status mt_relay_next(mt_relay *r, int ms, mt_parcel *out, void **mem, int *to, int *some)
{
    mt_share       *h = r->s->share;
    const mt_note  *note = &r->note;
    const mt__unit *u;
    size_t          cap, from, n;

    if (!r->busy) {
        MT_DO(mt_share_note(h, ms, &r->note, some));
        if (!*some)
            return MT_OK;
        /* What has to be there before the note is said. */
        r->n = r->next = 0;
        if (note->unit >= 0 && note->count == MT_COUNT_STEPPED)
            MT_DO(add_updated(r, note->unit, note->n));
        if (note->unit >= 0 && note->count == MT_COUNT_SUMMED) {
            u = mt__unit_at(r->s, note->unit);
            mt__chunks_of(u, &u->own, &from, &n);
            MT_DO(add(r, (mt_parcel){ .kind = MT_PARCEL_CHUNKS, .unit = note->unit,
                                      .at = from * sizeof(double), .bytes = n * sizeof(double) },
                      u->board.chunks));
        }
        if (note->count >= MT_COUNT_SERVED)
            MT_DO(add_asked(r, note->about));
        r->busy = 1;
    }
    *some = 1;
    *to = r->note.count >= MT_COUNT_SERVED ? r->note.count - MT_COUNT_SERVED : -1;
    if (r->next < r->n) {
        *out = r->items[r->next].p;
        *mem = r->items[r->next++].mem;
        return MT_OK;
    }
    *out = (mt_parcel){ .kind = MT_PARCEL_NOTE, .unit = r->note.unit, .what = r->note.count,
                        .n = r->note.n, .about = r->note.about };
    if (is_of_weights(out))
        out->param = note->unit < r->n_units && r->in_slots[note->unit];
    if (r->note.count == MT_COUNT_FAILED) {
        *mem = mt_share_why(h, mt_share_rank(h), &cap);
        out->bytes = cap;
    }
    r->busy = 0;
    return MT_OK;
}

/* ---- what comes --------------------------------------------------------------------------- */

static mt_status refuse(int rank, const mt_parcel *p)
{
    return MT_FAIL(MT_EINVAL, "relay: rank %d sent parcel %d (counter %d) of unit %d that cannot "
                   "be", rank, (int)p->kind, (int)p->what, (int)p->unit);
}

/* Does this rank speak here for that one of another machine? */
static int is_spoken_for(const mt_store *s, int rank)
{
    int me = mt_share_rank(s->share);

    return rank >= 0 && rank < mt_share_ranks(s->share) && rank != me &&
           mt_share_speaker(s->share, rank) == me;
}

mt_status mt_relay_place(mt_store *s, int rank, const mt_parcel *p, void **mem)
{
    const mt__unit *u = mt__unit_at(s, p->unit);
    void           *base = NULL;             /* where it lies, of so many bytes */
    size_t          bytes = 0;

    if (!is_spoken_for(s, rank))
        return refuse(rank, p);
    if (p->bytes == 0)
        return MT_OK;
    if (p->kind == MT_PARCEL_NOTE && p->unit < 0 && p->what == MT_COUNT_FAILED) {
        base = mt_share_why(s->share, rank, &bytes);
    } else if (u == NULL || !u->shared) {
        return refuse(rank, p);
    } else if (p->kind == MT_PARCEL_CHUNKS) {
        base = u->board.chunks;
        bytes = u->board.n_chunks * sizeof(double);
    } else if (p->kind == MT_PARCEL_WEIGHTS) {
        MT_DO(mt_store_hi(s, p->unit, &base));
        bytes = u->shape.bytes;
    } else if (p->kind == MT_PARCEL_SLOT) {
        MT_WITH(&s->serving) base = slot_of(s, p->unit, 0);
        if (base == NULL)                    /* the engine is closed, and yet who sent waits */
            MT_DO(mt_store_hi(s, p->unit, &base));
        bytes = u->shape.bytes;
    } else if (p->kind == MT_PARCEL_PLANE && p->what >= 0 && p->what < MT_PLANE_COUNT) {
        MT_DO(mt_store_at(s, p->unit, p->param, (mt_plane)p->what, &base));
        bytes = mt_store_plane_bytes(s, p->unit, p->param, (mt_plane)p->what,
                                     u->shape.desc[p->param].numel);
    }
    if (p->at > bytes || p->bytes > bytes - p->at)
        return refuse(rank, p);
    *mem = (char *)base + p->at;
    return MT_OK;
}

mt_status mt_relay_ready(mt_store *s, int rank, const mt_parcel *p, int *is)
{
    const mt__unit *u = mt__unit_at(s, p->unit);

    if (!is_spoken_for(s, rank) || (p->kind == MT_PARCEL_SLOT && (u == NULL || !u->shared)))
        return refuse(rank, p);
    *is = p->kind != MT_PARCEL_SLOT || atomic_load(&s->ledger.fault) != MT_OK ||
          mt_board_said(&u->board, MT_COUNT_STEPPED, mt_share_rank(s->share)) >= p->n;
    return MT_OK;
}

/* Weights came into the slot: there they are, and, of an update that ended, in host memory. *are =
 * 0: the engine was closed before. */
static mt_status land(mt_store *s, int rank, const mt_parcel *p, int *are)
{
    int             unit = p->unit;
    const mt__unit *u = mt__unit_at(s, unit);
    const mt_home  *h;
    mt_portion      part;
    void           *of;

    MT_HOLD(&s->serving);
    *are = slot_of(s, unit, 0) != NULL;
    if (!*are || p->what != MT_COUNT_UPDATED)
        return MT_OK;
    h = mt__home_kept(s, unit, &of);
    MT_DO(mt_portion_of(s, unit, rank, mt_share_ranks(s->share), &part));
    return h->lower(of, unit, mt_shape_byte(&u->shape, part.begin),
                    mt_shape_byte(&u->shape, part.end));
}

mt_status mt_relay_come(mt_store *s, int rank, const mt_parcel *p)
{
    const mt__unit *u = mt__unit_at(s, p->unit);
    const mt_board *b = p->unit < 0 ? mt_share_board(s->share) : u != NULL ? &u->board : NULL;
    mt_note         note = { .unit = p->unit, .count = p->what, .n = p->n, .about = p->about };
    int             are = 1;

    if (!is_spoken_for(s, rank))
        return refuse(rank, p);
    if (p->kind != MT_PARCEL_NOTE)
        return MT_OK;
    if (b != NULL && is_of_weights(p) && p->param)
        MT_DO(land(s, rank, p, &are));
    if (!are)                            /* who waits for it finds that this rank has left */
        return MT_OK;
    return b != NULL && mt_board_hear(b, rank, note) ? MT_OK : refuse(rank, p);
}
