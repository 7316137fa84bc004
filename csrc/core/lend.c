/* lend.c — GRAD planes of units whose gradients pass: memory for the time between a hand-over and
 * the end of the update that uses it.
 *
 * A unit has no such memory of its own. What a hand-over takes is one of a few buffers of about
 * its size, and the end of the update gives it back; until then the buffer is the unit's GRAD
 * plane, and nobody else needs to know. Where all are lent, the thread that hands over waits for
 * the update that will give back the one that was lent first: so it is ahead of the updates by as
 * many units as there are buffers.
 *
 * Buffers are registered host memory, or for settled units the device's. A settled unit's update
 * ends in the ledger when it is put in its queue: whoever writes into the buffer next waits for
 * that queue (SPENT, resident.h).
 */
#include "store_impl.h"

#include <stdlib.h>

#define LEAST_BYTES ((size_t)1 << 20)       /* buffers below this serve units of any smaller size */

static size_t at_least(size_t bytes)
{
    return bytes > LEAST_BYTES ? bytes : LEAST_BYTES;
}

/* Under map_mu. The unit's; -1: it has none. */
static int held_by(const mt_store *s, int unit)
{
    for (int k = 0; k < s->n_lent; k++)
        if (s->lent[k].unit == unit)
            return k;
    return -1;
}

static int side_of(const mt__unit *u)
{
    return atomic_load(&u->home)->device >> MT_PLANE_GRAD & 1 ? MT__DEVICE : MT__HOST;
}

static mt__plane *plane_of(mt__unit *u)
{
    return &u->plane[side_of(u)][MT_PLANE_GRAD];
}

/* Under map_mu, at each door: what is lent is one unit's GRAD plane, whose gradients pass. */
static void assert_lent(const mt_store *s)
{
    if (!MT_IS_CHECKED)
        return;
    MT_ASSERT(mt_holds(&s->map_mu));
    for (int k = 0; k < s->n_lent; k++) {
        const struct mt__lent *b = &s->lent[k];
        mt__unit              *u = mt__unit_at(s, b->unit);

        MT_ASSERT(b->number <= s->lendings && (u != NULL || b->unit == -1));
        if (u == NULL)
            continue;
        MT_ASSERT(b->number > 0 && atomic_load(&u->passing) && held_by(s, b->unit) == k);
        MT_ASSERT(plane_of(u)->at != NULL && plane_of(u)->arena.base == b->arena.base);
    }
}

/* Under map_mu, which is let go of while the memory is made. Hand-overs come one at a time, so
 * nobody makes another. */
static mt_status make(mt_store *s, int side, size_t bytes, int *k)
{
    const char     *what = "gradients that pass";
    struct mt__lent made = { .unit = -1 };
    mt_status       st;

    MT_DO(MT_GROW(s->lent, s->lent_room, s->n_lent + 1, what));
    mt_unlock(&s->map_mu);
    st = side == MT__DEVICE ? mt_arena_device(&made.arena, 0, at_least(bytes), s->dev, what)
                            : mt_arena_open(&made.arena, at_least(bytes), s->pool, s->dev, what,
                                            mt_store_bytes(s, MT_PLANE_COUNT));
    mt_lock(&s->map_mu);
    if (st != MT_OK)
        return st;
    atomic_fetch_add(side == MT__DEVICE ? &s->on_device : &s->mapped[MT_PLANE_GRAD],
                     made.arena.bytes);
    *k = s->n_lent;
    s->lent[s->n_lent++] = made;
    return MT_OK;
}

/* Lends a buffer, if one is free or may be made. The offsets are the caller's until then; bound to
 * the buffer they are the unit's addresses. *holder: who has the one to wait for, by *number; -1:
 * it is done, or it failed. */
static mt_status try_to_lend(mt_store *s, mt__unit *u, size_t *offset, size_t bytes, int *holder,
                             uint64_t *number)
{
    mt__plane *pl = plane_of(u);
    int        k = -1, side = side_of(u), n = 0;     /* n: of that size, on that side */

    *holder = -1;
    MT_HOLD(&pl->making);
    MT_HOLD(&s->map_mu);
    assert_lent(s);
    /* A free one, else the one that was lent first. A buffer is at most twice as large as needed:
     * the embedding's does not serve a layer. */
    for (int i = 0; i < s->n_lent; i++) {
        const struct mt__lent *b = &s->lent[i];

        if (b->arena.on_device != (side == MT__DEVICE) || b->arena.bytes < bytes ||
            b->arena.bytes / 2 > at_least(bytes))
            continue;
        n++;
        if (k < 0 || (s->lent[k].unit >= 0 && (b->unit < 0 || b->number < s->lent[k].number)))
            k = i;
    }
    if ((k < 0 || s->lent[k].unit >= 0) && n < s->most_lent)
        MT_DO(make(s, side, bytes, &k));
    *holder = s->lent[k].unit;
    *number = s->lent[k].number;
    if (*holder < 0) {
        pl->arena.base = s->lent[k].arena.base;      /* bytes 0: not the plane's to give back */
        for (int i = 0; i < u->shape.n; i++)
            offset[i] = offset[i] != MT__ABSENT ? (uintptr_t)pl->arena.base + offset[i] : 0;
        pl->at = offset;
        s->lent[k].unit = u->number;
        s->lent[k].number = ++s->lendings;
    }
    assert_lent(s);
    return MT_OK;
}

mt_status mt_store_lend(mt_store *s, int unit, mt_timeline *t)
{
    mt__unit *u = mt__unit_at(s, unit);
    size_t   *offset MT_FREED = NULL, bytes;
    uint64_t  number = 0;
    int       holder, held;
    mt_span   span;
    mt_status st;

    if (!mt_store_passes(s, unit))
        return MT_FAIL(MT_EINVAL, "unit %d (%s) has a GRAD plane of its own", unit,
                       mt_store_name(s, unit));
    MT_WITH(&s->map_mu) held = held_by(s, unit);
    if (held >= 0)                               /* handed over again, and no update has used it */
        return MT_OK;
    MT_DO(mt__lay_out(u, MT__HOST, MT_PLANE_GRAD, &offset, &bytes));
    for (;;) {
        MT_DO(try_to_lend(s, u, offset, bytes, &holder, &number));
        if (holder < 0) {
            (void)MT_KEEP(offset);       /* the plane has it */
            return MT_OK;
        }
        /* This thread launches windows: what it waits for, compute waits for. */
        mt_timeline_begin(t, &span, MT_LANE_HAND, MT_WORK_WAIT, holder, NULL);
        st = mt_ledger_wait_updates(s, holder);
        mt_timeline_end(t, &span, 0, NULL);
        MT_DO(st);
        MT_HOLD(&s->map_mu);
        held = held_by(s, holder);
        if (held >= 0 && s->lent[held].number == number)
            return MT_FAIL(MT_ESTATE, "unit %s: its gradients came, and no update has used them; "
                           "where they are kept nowhere, each hand-over is followed by its update",
                           mt_store_name(s, holder));
    }
}

/* Before the end of an update is told: who waits for that hands over again. */
void mt__take_back(mt_store *s, int unit)
{
    mt__unit *u = mt__unit_at(s, unit);
    int       k;

    if (!atomic_load(&u->passing))
        return;
    MT_HOLD(&plane_of(u)->making);
    MT_HOLD(&s->map_mu);
    if ((k = held_by(s, unit)) >= 0) {
        mt__unbind(s, u);
        s->lent[k].unit = -1;
    }
    assert_lent(s);
}

void mt_store_device_close(mt_store *s)
{
    MT_HOLD(&s->map_mu);
    for (int i = 0; i < mt_store_units(s); i++)
        mt__device_close(s, mt__unit_at(s, i));
    for (int k = 0; k < s->n_lent; k++)
        if (s->lent[k].arena.on_device) {
            atomic_fetch_sub(&s->on_device, s->lent[k].arena.bytes);
            mt_arena_close(&s->lent[k].arena);
        }
}

void mt__lent_close(mt_store *s)
{
    for (int k = 0; k < s->n_lent; k++)
        mt_arena_close(&s->lent[k].arena);
    free(s->lent);
}

mt_status mt_store_lend_most(mt_store *s, int n)
{
    if (n < 1 || n > MT_STORE_LENT || s->n_lent > 0)
        return MT_FAIL(MT_EINVAL, "store: %d buffers of a size for gradients; 1 to %d, before any "
                       "is lent", n, MT_STORE_LENT);
    s->most_lent = n;
    return MT_OK;
}

int mt_store_lends(const mt_store *s)
{
    return s->most_lent;
}

int mt_store_passes(const mt_store *s, int unit)
{
    const mt__unit *u = mt__unit_at(s, unit);
    return u != NULL && atomic_load(&u->passing);
}

mt_status mt_store_set_passing(mt_store *s, int unit)
{
    mt__unit *u = mt__unit_at(s, unit);

    if (u == NULL)
        return mt__no_unit(s, unit);
    if (u->shared)
        return MT_FAIL(MT_ENOTSUP, "unit %s: processes share its memory; gradients that pass are "
                       "not built for that yet", u->name);
    MT_HOLD(&s->map_mu);
    if (plane_of(u)->at != NULL)
        return MT_FAIL(MT_ESTATE, "unit %s has a GRAD plane already; its gradients cannot pass",
                       u->name);
    atomic_store(&u->passing, 1);
    return MT_OK;
}
