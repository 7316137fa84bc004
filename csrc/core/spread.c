/* spread.c — in a share: what user code sees of a plane, and what every rank writes there in
 * place. */
#include "store_impl.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

/* ---- views -------------------------------------------------------------------------------- */

/* The place that belongs to this address of the plane; NULL: nobody has asked for one. */
static void *view_of(mt_store *s, const mt__plane *pl, const void *at)
{
    MT_HOLD(&s->map_mu);
    return pl->view.base == NULL ? NULL
           : (char *)pl->view.base + ((const char *)at - (const char *)pl->arena.base);
}

mt_status mt_store_view(mt_store *s, int unit, int param, mt_plane p, void **out)
{
    mt_arena   made = { 0 };
    mt__plane *pl;
    mt__unit  *u;
    void      *at;

    MT_DO(mt_store_at(s, unit, param, p, &at));
    if (s->share == NULL) {
        *out = at;
        return MT_OK;
    }
    u = mt__unit_at(s, unit);
    pl = &u->plane[MT__HOST][p];
    MT_HOLD(&pl->making);
    if (pl->view.base == NULL) {
        MT_DO(mt_arena_reserve(&made, u->range[p].bytes, &u->range[p], 1, u->name,
                               mt_store_bytes(s, MT_PLANE_COUNT)));
        MT_WITH(&s->map_mu) pl->view = made;
    }
    *out = view_of(s, pl, at);
    return MT_OK;
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
    bytes = mt_store_plane_bytes(s, unit, param, p, u->shape.desc[param].numel);
    (void)madvise(place, mt_round_up(bytes, u->align), MADV_DONTNEED);
}

/* ---- spreads ------------------------------------------------------------------------------ */

/* All ranks have come to n. A rank may have to read for minutes before it writes, so one that is
 * late is told of, once, before it is a fault; one that goes elsewhere is found by order (peers.c).
 */
static mt_status meet(mt_store *s, int unit, int param, mt_count what, uint64_t n)
{
    double    limit = (double)atomic_load(&s->watch.limit_ns) / 1e9, waited = 0;
    double    until[2] = { limit / 2 < MT_SPREAD_S ? limit / 2 : MT_SPREAD_S, limit };
    int       rank;
    char      text[400];
    mt_status st;

    for (int i = 0; i < 2; waited = until[i++]) {
        MT_DO(mt_ledger_meet(s, what, n, until[i] - waited));
        rank = mt_board_behind(mt_share_board(s->share), (int)what, n);
        if (rank == mt_share_ranks(s->share))
            return MT_OK;
        snprintf(text, sizeof text, "unit %s, parameter %d: rank %d (process %" PRIu64 ") has not "
                 "come in %g s; what one rank writes in place all ranks have to",
                 mt_store_name(s, unit), param, rank,
                 mt_share_said(s->share, MT_COUNT_CAME, rank), until[i]);
        if (i == 0 && s->watch.say != NULL)
            s->watch.say(text);
    }
    st = MT_FAIL(MT_EPEER, "%s", text);
    mt_ledger_fault(s, st, mt_last_error());
    return st;
}

/* This rank's portion is everybody's. Of weights so are those of the ranks for which this one
 * speaks: all of them have written the same. */
static mt_status spread_own(mt_store *s, int unit, int param, unsigned planes, uint64_t n)
{
    int          me = mt_share_rank(s->share), ranks = mt_share_ranks(s->share);
    mt_watch_ask asks;
    mt_status    st;

    for (int p = 0; p < MT_PLANE_COUNT; p++)
        for (int rank = 0; (planes >> p & 1) && rank < ranks; rank++) {
            mt_portion  part;
            int64_t     from, some;
            size_t      skip;
            const char *place;
            void       *at;

            if (rank != me && !(p == MT_PLANE_HI && mt_share_speaker(s->share, rank) == me))
                continue;
            MT_DO(mt_portion_of(s, unit, rank, ranks, &part));
            some = mt_portion_part(&part, param, mt_store_desc(s, unit, param)->numel, &from);
            skip = mt_store_plane_bytes(s, unit, param, (mt_plane)p, from);
            MT_DO(mt_store_at(s, unit, param, (mt_plane)p, &at));
            place = view_of(s, &mt__unit_at(s, unit)->plane[MT__HOST][p], at);
            if (place != NULL)           /* somebody has looked at it here */
                memcpy((char *)at + skip, place + skip,
                       mt_store_plane_bytes(s, unit, param, (mt_plane)p, some));
        }
    if (mt_share_is_apart(s->share))
        mt__mirror_lacks(s, unit, planes);       /* before anybody can bring them again */
    mt_ledger_say(s, MT_COUNT_SPREAD, n, 0);
    asks = mt_watch_asks(NULL);          /* nobody is asked: this is not to be done again */
    st = meet(s, unit, param, MT_COUNT_SPREAD, n);
    (void)mt_watch_asks(asks);
    return st;
}

mt_status mt_store_spread(mt_store *s, int unit, int param, unsigned planes)
{
    const mt_board *b;
    mt__unit       *u;
    /* For the other ranks; ledger.c knows where the unit is in it. */
    uint64_t        mine = (uint64_t)unit << 40 | (uint64_t)param << 16 | planes;
    uint64_t        n, other;
    int             me, rank;
    mt_status       st;

    MT_DO(mt__find(s, unit, param, &u));
    if (s->share == NULL)
        return MT_OK;
    b = mt_share_board(s->share);
    me = mt_share_rank(s->share);
    n = mt_board_said(b, MT_COUNT_SPREAD, me) + 1;
    /* Every rank has written, and all the same. Who was interrupted comes here again. */
    if (mt_board_said(b, MT_COUNT_WRITTEN, me) < n)
        mt_ledger_say(s, MT_COUNT_WRITTEN, n, mine);
    MT_DO(meet(s, unit, param, MT_COUNT_WRITTEN, n));
    rank = mt_board_differs(b, MT_COUNT_WRITTEN, mine);
    if (rank < mt_share_ranks(s->share)) {
        other = mt_board_about(b, MT_COUNT_WRITTEN, rank);
        st = MT_FAIL(MT_EPEER, "rank %d wrote unit %s, parameter %d, where rank %d wrote unit %s, "
                     "parameter %d; what one rank writes in place all ranks have to, in one order",
                     rank, mt_store_name(s, (int)(other >> 40)), (int)(other >> 16 & 0xffffff), me,
                     mt_store_name(s, unit), param);
        mt_ledger_fault(s, st, mt_last_error());
        return st;
    }
    MT_DO(spread_own(s, unit, param, planes, n));
    for (int p = 0; p < MT_PLANE_COUNT; p++)
        if (planes >> p & 1)
            mt_store_view_drop(s, unit, param, (mt_plane)p);
    /* Weights of a file are pushed there next, this parameter's alone. */
    if ((planes & 1u << MT_PLANE_HI) && !mt_store_home(s, unit, NULL)->fed)
        mt_ledger_touch(s, unit);
    return MT_OK;
}
