/* mirror.c — the table of mirror.h, a door for each unit, and whose memory may go. */
#include "store_impl.h"

#include <stdlib.h>

#define HI     (1u << MT_PLANE_HI)
#define IS(x)  (1u << MT_MIRROR_##x)
#define BUSY    1u               /* these two: see "portions of other machines" */
#define CLAIMED 2u
#define STUCK  (IS(LOADING) | IS(AHEAD) | IS(STORING) | IS(TORN))     /* copies that must stay */

/* ---- the table ---------------------------------------------------------------------------- */

#define TO(x) MT_MIRROR_##x
#define ROW(state, a, b, c, d, e, f, g, h, i) \
    { TO(a), TO(b), TO(c), TO(d), TO(e), TO(f), TO(g), TO(h), TO(i) },
static const unsigned char table[MT_MIRROR_STATE_COUNT][MT_MIRROR_EVENT_COUNT] = {
    MT_MIRROR_TABLE(ROW)
};
#undef ROW

mt_mirror_state mt_mirror_next(mt_mirror_state from, mt_mirror_event e)
{
    return (mt_mirror_state)table[from][e];
}

const char *mt_mirror_name(mt_mirror_state state)
{
#define NAME(name) #name,
    static const char *const names[] = { MT_MIRROR_STATES(NAME) "NEVER" };
#undef NAME
    return names[state];
}

/* ---- copies: under mirror_mu -------------------------------------------------------------- */

/* param -1: all of the unit's. */
#define FOR_COPIES(u, param, planes, p, i)                                                        \
    for (int p = 0; p < MT_PLANE_COUNT; p++)                                                      \
        for (int i = (param) < 0 ? 0 : (param);                                                   \
             ((planes) >> p & 1) && i < ((param) < 0 ? (u)->n_params : (param) + 1); i++)

static unsigned char *copy_at(const mt__unit *u, int p, int param)
{
    return &u->mirror.copies[p * u->n_params + param];
}

/* A plane that has nothing for a parameter's type stays EMPTY. */
static int has_bytes(const mt__unit *u, int p, int param)
{
    const mt_param_desc *d = &u->desc[param];

    return mt_plane_bytes((mt_plane)p, d->dtype, (mt_states)atomic_load(&u->states), d->numel) > 0;
}

static void tell_one(mt__unit *u, int p, int param, mt_mirror_event e)
{
    unsigned char *c = copy_at(u, p, param);
    unsigned char  next = table[*c][e];

    MT_ASSERT(next != MT_MIRROR_NEVER);
    if (next != MT_MIRROR_NEVER && next != *c && (*c != MT_MIRROR_EMPTY || has_bytes(u, p, param)))
        *c = next;
}

static void tell(mt__unit *u, int param, unsigned planes, mt_mirror_event e)
{
    if (e == MT_MIRROR_CHANGED || e == MT_MIRROR_EVICTED) {
        u->mirror.whole &= ~planes;
        u->mirror.changes++;
    }
    planes &= u->mirror.planes;
    FOR_COPIES(u, param, planes, p, i)
        tell_one(u, p, i, e);
    if (e == MT_MIRROR_CHANGED)
        u->mirror.claimed &= ~planes;
    if (planes != 0 && (e == MT_MIRROR_SET || e == MT_MIRROR_TOUCHED)) {
        u->mirror.pages |= planes;
        u->mirror.claimed |= e == MT_MIRROR_TOUCHED ? planes : planes & u->mirror.home->later;
    }
}

/* Of these planes, those of which some copy is in one of the states. */
static unsigned which(const mt__unit *u, int param, unsigned planes, unsigned states)
{
    unsigned found = 0;

    planes &= u->mirror.planes;
    FOR_COPIES(u, param, planes, p, i)
        found |= (states >> *copy_at(u, p, i) & 1) << p;
    return found;
}

/* Of which memory may be given back. */
static unsigned pages_of(const mt__unit *u)
{
    const mt_home *h = u->mirror.home;

    return h != NULL ? u->mirror.pages & ~h->stays & ~(u->shared ? h->later : 0) : 0;
}

static unsigned old_planes(const mt__unit *u)
{
    return which(u, -1, pages_of(u), IS(STALE));
}

void mt_mirror_tell(mt_store *s, int unit, int param, unsigned planes, mt_mirror_event e)
{
    mt__unit *u = mt__unit_at(s, unit);

    mt_lock(&s->mirror_mu);
    tell(u, param, planes, e);
    mt_unlock(&s->mirror_mu);
}

void mt_mirror_change(mt_store *s, int unit, const int *params, int n, unsigned planes)
{
    mt_lock(&s->mirror_mu);
    for (int i = 0; i < n; i++)
        tell(mt__unit_at(s, unit), params[i], planes, MT_MIRROR_CHANGED);
    mt_unlock(&s->mirror_mu);
}

int mt_mirror_any(mt_store *s, int unit, int param, unsigned planes, unsigned states)
{
    const mt__unit *u = mt__unit_at(s, unit);
    int             any;

    mt_lock(&s->mirror_mu);
    any = which(u, param, planes, states) != 0;
    mt_unlock(&s->mirror_mu);
    return any;
}

void mt__mirror_touched(mt_store *s, int unit)
{
    mt_mirror_tell(s, unit, -1, HI, MT_MIRROR_TOUCHED);
}

void mt__mirror_lacks(mt_store *s, int unit, unsigned planes)
{
    mt__unit *u = mt__unit_at(s, unit);

    mt_lock(&s->mirror_mu);
    u->mirror.whole &= ~planes;
    u->mirror.changes++;
    mt_unlock(&s->mirror_mu);
    for (int p = 0; p < MT_PLANE_COUNT; p++)
        if (planes >> p & 1)
            atomic_store(mt_board_plane(&u->board, p), 0);
}

/* ---- homes -------------------------------------------------------------------------------- */

/* What the host has of these planes, the home has not. */
static void note_ahead(mt_store *s, int unit, unsigned planes)
{
    const mt__unit *u = mt__unit_at(s, unit);

    FOR_COPIES(u, -1, planes, p, i)
        if (mt_store_made(s, unit, i, (mt_plane)p, 0))
            mt_mirror_tell(s, unit, i, 1u << p, MT_MIRROR_SET);
}

static mt_status open_copies(mt_store *s, mt__unit *u, const mt_home *home, void *of)
{
    unsigned char *copies;
    mt_status      st;

    MT_TRY(MT_MAKE(copies, (int64_t)u->n_params * MT_PLANE_COUNT, u->name));
    mt_lock(&s->mirror_mu);
    u->mirror = (mt__mirror){ .home = home, .of = of, .copies = copies };
    mt_unlock(&s->mirror_mu);
fail:
    return st;
}

static void close_copies(mt_store *s, mt__unit *u)
{
    mt_lock(&s->mirror_mu);
    MT_ASSERT(!u->mirror.busy);
    free(u->mirror.copies);
    u->mirror = (mt__mirror){ 0 };
    mt_unlock(&s->mirror_mu);
}

void mt_mirror_close(mt_store *s, int unit)
{
    mt_lock(&s->asks.serving);
    close_copies(s, mt__unit_at(s, unit));
    mt_unlock(&s->asks.serving);
}

/* From one home that mirrors planes to another, which has none of them before they are noted. */
mt_status mt__mirror_move(mt_store *s, int unit, const mt_home *to, void *of)
{
    mt__unit  *u = mt__unit_at(s, unit);
    mt__mirror was = u->mirror;
    unsigned   newer;
    mt_status  st;

    if (to->away == 0) {
        close_copies(s, u);
        return MT_OK;
    }
    if (was.home == NULL)
        MT_TRY(open_copies(s, u, to, of));
    mt_lock(&s->mirror_mu);
    newer = which(u, -1, ~to->away, ~(IS(EMPTY) | IS(FRESH) | IS(AHEAD)));
    if (newer == 0) {
        u->mirror.home = to;
        u->mirror.planes = to->away;
        u->mirror.visit = to->visit;
        u->mirror.pages &= to->away;
        tell(u, -1, to->later & ~was.planes, MT_MIRROR_SET);
    }
    mt_unlock(&s->mirror_mu);
    if (newer != 0)
        return MT_FAIL(MT_ESTATE, "unit %s: its home has newer values than the host, and it cannot "
                       "become one that %s", u->name, to->lives);
    note_ahead(s, unit, to->away & ~was.planes);
    return MT_OK;
fail:
    return st;
}

static mt__mirror look(mt_store *s, int unit)
{
    const mt__unit *u = mt__unit_at(s, unit);
    mt__mirror      m = { 0 };

    if (u != NULL) {
        mt_lock(&s->mirror_mu);
        m = u->mirror;
        mt_unlock(&s->mirror_mu);
    }
    return m;
}

/* Behind the door. lost: what becomes of copies where that fails. */
static mt_status store(mt_store *s, int unit, int param, unsigned planes, mt_mirror_event lost)
{
    const mt__mirror m = look(s, unit);
    mt_status        st;

    mt_mirror_tell(s, unit, param, planes, MT_MIRROR_STORE);
    st = m.home->store(m.of, unit, param, planes);
    mt_mirror_tell(s, unit, param, planes, st == MT_OK ? MT_MIRROR_STORED : lost);
    return st;
}

mt_status mt_mirror_store(mt_store *s, int unit)
{
    const mt__unit *u = mt__unit_at(s, unit);
    mt_status       st;

    MT_TRY(mt_mirror_enter(s, unit));
    for (int i = 0; i < u->n_params && st == MT_OK; i++) {
        unsigned ahead;

        mt_lock(&s->mirror_mu);
        ahead = which(u, i, ~u->mirror.home->later, IS(AHEAD));
        mt_unlock(&s->mirror_mu);
        if (ahead != 0)
            st = store(s, unit, i, ahead, MT_MIRROR_SET);
    }
    mt_mirror_leave(s, unit);
fail:
    return st;
}

static int is_apart(const mt_store *s, int unit)
{
    const mt__unit *u = mt__unit_at(s, unit);

    return u != NULL && u->shared && mt_share_is_apart(s->share);
}

/* This rank's portion is gone, so not all is here. */
static void forget_word(const mt__unit *u, int p)
{
    uint64_t is = atomic_load(mt_board_plane(&u->board, p));

    if (!(is & BUSY))
        (void)atomic_compare_exchange_strong(mt_board_plane(&u->board, p), &is, 0);
}

/* ---- the door ----------------------------------------------------------------------------- */

static int is_ours(void *arg)
{
    mt__mirror *m = arg;

    if (m->busy)
        return 0;
    return m->busy = 1;
}

mt_status mt_mirror_enter(mt_store *s, int unit)
{
    return mt_watch_until(&s->watch, &s->mirror_changed, &s->mirror_mu, is_ours,
                          &mt__unit_at(s, unit)->mirror, mt_store_name(s, unit),
                          "who is at its host planes");
}

void mt_mirror_leave(mt_store *s, int unit)
{
    mt_lock(&s->mirror_mu);
    mt__unit_at(s, unit)->mirror.busy = 0;
    pthread_cond_broadcast(&s->mirror_changed);
    mt_unlock(&s->mirror_mu);
}

void mt_mirror_drop(mt_store *s, int unit, unsigned planes)
{
    mt__unit *u = mt__unit_at(s, unit);

    mt_lock(&s->mirror_mu);
    MT_ASSERT(u->mirror.busy);
    planes &= pages_of(u);
    planes &= ~which(u, -1, planes, STUCK);
    MT_ASSERT(!u->shared || u->mirror.all_evict || !(planes & u->mirror.claimed & HI));   /* (1) */
    tell(u, -1, planes, MT_MIRROR_EVICTED);
    u->mirror.pages &= ~planes;
    u->mirror.claimed &= ~planes;
    mt_unlock(&s->mirror_mu);
    for (int p = 0; p < MT_PLANE_COUNT; p++)
        if (planes >> p & 1) {
            if (is_apart(s, unit))
                forget_word(u, p);
            mt_store_decommit(s, unit, (mt_plane)p);
        }
}

/* ---- readers ------------------------------------------------------------------------------ */

static mt_status wait_for(mt_store *s, int unit, unsigned planes)
{
    mt_status st = MT_OK;

    if (planes & ~(1u << MT_PLANE_GRAD))
        MT_TRY(mt_ledger_wait_updates(s, unit));
    if (planes & 1u << MT_PLANE_GRAD)
        MT_TRY(mt_ledger_wait_grads(s, unit));
fail:
    return st;
}

/* Nobody is behind the door who could take away what is here, and all of it is. */
static int is_here(mt_store *s, int unit, unsigned planes, int claims)
{
    mt__unit *u = mt__unit_at(s, unit);
    int       here;

    mt_lock(&s->mirror_mu);
    here = !u->mirror.busy && which(u, -1, planes, IS(STALE) | IS(TORN)) == 0;
    if (here && claims)
        u->mirror.claimed |= planes & u->mirror.planes;
    mt_unlock(&s->mirror_mu);
    return here;
}

/* Memory first: pages by the gigabyte take their time, so they are made under no lock. */
static mt_status fill(mt_store *s, int unit, unsigned planes)
{
    const mt__mirror m = look(s, unit);
    mt_status        st = MT_OK;

    for (int p = 0; p < MT_PLANE_COUNT; p++)
        if (planes >> p & 1)
            MT_TRY(mt_store_commit(s, unit, (mt_plane)p));
    if (planes != 0)
        st = m.home->load(m.of, unit, planes);
fail:
    return st;
}

/* Behind the door. */
static mt_status load(mt_store *s, int unit, unsigned planes, int claims)
{
    mt__unit *u = mt__unit_at(s, unit);
    unsigned  torn, loading;
    mt_status st;

    mt_lock(&s->mirror_mu);
    if (!(torn = which(u, -1, planes, IS(TORN))))
        tell(u, -1, planes, MT_MIRROR_LOAD);
    loading = which(u, -1, planes, IS(LOADING));
    u->mirror.pages |= loading;
    mt_unlock(&s->mirror_mu);
    if (torn)
        return MT_FAIL(MT_ESTATE, "unit %s: its values were written on the host where they were "
                       "older than elsewhere; they must be brought before", u->name);
    st = fill(s, unit, loading);
    mt_lock(&s->mirror_mu);
    tell(u, -1, planes, st == MT_OK ? MT_MIRROR_LOADED : MT_MIRROR_FAILED);
    u->mirror.claimed |= st == MT_OK && claims ? planes & u->mirror.planes : 0;
    mt_unlock(&s->mirror_mu);
    return st;
}

/* This rank's portion. */
static mt_status bring_own(mt_store *s, int unit, unsigned planes, int claims)
{
    const mt__mirror m = look(s, unit);
    mt_status        st;

    if (planes & m.visit && m.home->wait != NULL)
        MT_TRY(m.home->wait(m.of, unit, planes & m.visit));
    if (is_here(s, unit, planes, claims))
        return MT_OK;
    MT_TRY(mt_mirror_enter(s, unit));
    st = load(s, unit, planes, claims);
    mt_mirror_leave(s, unit);
fail:
    return st;
}

/* In a share: of these, what other ranks may have newer than host memory. */
static unsigned lacking(mt_store *s, int unit, unsigned planes, uint64_t *changes)
{
    const mt__unit *u = mt__unit_at(s, unit);
    unsigned        lack = 0;

    mt_lock(&s->mirror_mu);
    *changes = u->mirror.changes;
    if (u->shared && u->mirror.home != NULL)
        lack = (which(u, -1, planes, ~IS(EMPTY)) | (planes & u->mirror.visit)) &
               ~u->mirror.home->later & ~u->mirror.whole;
    mt_unlock(&s->mirror_mu);
    return lack;
}

/* Without the door: they may be asking for the same. */
static mt_status bring_others(mt_store *s, int unit, unsigned planes, int claims)
{
    mt__unit *u = mt__unit_at(s, unit);
    uint64_t  changes;
    unsigned  lack = lacking(s, unit, planes, &changes);
    mt_status st;

    if (lack == 0)
        return MT_OK;
    MT_TRY(mt__ask(s, unit, lack, claims));
    mt_lock(&s->mirror_mu);
    if (claims && u->mirror.changes == changes)      /* else they may give it back when they like */
        u->mirror.whole |= lack;
    mt_unlock(&s->mirror_mu);
fail:
    return st;
}

/* ---- portions of other machines -------------------------------------------------------------
 *
 * A plane's word on the board says of which of its values they are here: a stamp, which grows with
 * each change, times 4. BUSY: who brings them, or gives them back, is the only one that does. With
 * CLAIMED they stay until the plane changes; without, the save that brought them gives them back */

_Static_assert(MT_PLANE_COUNT <= MT_BOARD_PLANES, "a word for each plane");

/* Updates change states, and hand-overs all else. What waits for a save to copy it has not changed
 * yet. */
static uint64_t stamp_of(mt_store *s, const mt__unit *u, int p)
{
    int      states = MT_STATE_PLANES >> p & 1;
    uint64_t stamp;

    mt_lock(&s->ledger.mu);
    stamp = states ? u->begun[MT_COUNT_UPDATED] - (uint64_t)u->updates
                   : u->begun[MT_COUNT_LANDED] - (uint64_t)u->grads;
    mt_unlock(&s->ledger.mu);
    return 4 * (stamp + 1);
}

/* Of these, which have portions elsewhere: not weights, nor what is stored later. */
static unsigned others_have(mt_store *s, int unit, unsigned planes)
{
    const mt__unit *u = mt__unit_at(s, unit);
    unsigned        away, some;

    mt_lock(&s->mirror_mu);
    away = u->mirror.planes | HI;
    some = (planes & ~away) | (which(u, -1, planes, ~IS(EMPTY)) & ~HI);
    some &= u->mirror.home != NULL ? ~u->mirror.home->later : ~0u;
    mt_unlock(&s->mirror_mu);
    return some;
}

typedef struct apart {
    mt_store       *s;
    const mt__unit *u;
    uint64_t        want[MT_PLANE_COUNT];    /* words, which CLAIMED may be added to */
    unsigned        planes, mine;
    mt_status       fault;
} apart;

/* Under ledger.mu. Those that nobody has brought are ours to bring, or, if there are none, all are
 * here. */
static int are_here_or_ours(void *arg)
{
    apart *a = arg;
    int    wait = 0;

    a->fault = a->s->ledger.fault;
    for (int p = 0; p < MT_PLANE_COUNT && a->fault == MT_OK; p++) {
        _Atomic uint64_t *word = mt_board_plane(&a->u->board, p);
        uint64_t          is = atomic_load(word);

        if (!(a->planes >> p & 1) || is == a->want[p] || is == (a->want[p] | CLAIMED))
            continue;
        if (is & BUSY || !atomic_compare_exchange_strong(word, &is, a->want[p] | BUSY))
            wait = 1;
        else
            a->mine |= 1u << p;
    }
    return a->fault != MT_OK || a->mine != 0 || !wait;
}

static mt_status take_turn(apart *a)
{
    mt__ledger *l = &a->s->ledger;
    mt_status   st;

    a->mine = 0;
    mt_lock(&l->mu);
    l->apart++;
    mt_unlock(&l->mu);
    st = mt_watch_until(&a->s->watch, &l->changed, &l->mu, are_here_or_ours, a, a->u->name,
                        "what another rank brings of it");
    mt_lock(&l->mu);
    l->apart--;
    mt_unlock(&l->mu);
    return a->fault != MT_OK ? mt_ledger_check(a->s) : st;
}

/* Those that are ours are here, or not. */
static void set_words(const apart *a, int here)
{
    for (int p = 0; p < MT_PLANE_COUNT; p++)
        if (a->mine >> p & 1)
            atomic_store(mt_board_plane(&a->u->board, p), here ? a->want[p] : 0);
    mt_share_stir(a->s->share);
}

static mt_status bring_apart(mt_store *s, int unit, unsigned planes, int claims)
{
    apart     a = { .s = s, .u = mt__unit_at(s, unit), .planes = others_have(s, unit, planes) };
    mt_status st = MT_OK;

    if (a.planes == 0)
        return MT_OK;
    MT_TRY(wait_for(s, unit, a.planes));
    for (int p = 0; p < MT_PLANE_COUNT; p++)
        a.want[p] = stamp_of(s, a.u, p) | (claims ? CLAIMED : 0);
    do {
        MT_TRY(take_turn(&a));
        if (a.mine == 0)
            break;
        st = mt__ask(s, unit, a.mine, claims);
        set_words(&a, st == MT_OK);
    } while (st == MT_OK);
fail:
    return st;
}

/* Other machines' portions of a parameter in a plane. */
static void punch(mt_store *s, int unit, int param, mt_plane p)
{
    const mt__unit *u = mt__unit_at(s, unit);
    void           *first, *at;
    mt_portion      part;
    int64_t         from, n;

    if (!mt_store_made(s, unit, param, p, 0) || mt_store_at(s, unit, param, p, &at) != MT_OK)
        return;
    first = u->plane[MT__HOST][p].arena.base;
    for (int rank = 0; rank < mt_share_ranks(s->share); rank++)
        if (mt_share_speaker(s->share, rank) != rank &&
            mt_portion_of(s, unit, rank, mt_share_ranks(s->share), &part) == MT_OK) {
            n = mt_portion_part(&part, param, u->desc[param].numel, &from);
            mt_share_punch(&u->range[p], (size_t)((char *)at - (char *)first) +
                           mt_store_plane_bytes(s, unit, param, p, from),
                           mt_store_plane_bytes(s, unit, param, p, n));
        }
}

static int is_first_here(const mt_share *h)
{
    int rank = 0;

    while (mt_share_speaker(h, rank) != rank)
        rank++;
    return rank == mt_share_rank(h);
}

int mt_mirror_release_apart(mt_store *s, int unit)
{
    const mt__unit *u = mt__unit_at(s, unit);
    int             all = 1;

    for (int p = 0; p < MT_PLANE_COUNT && is_apart(s, unit) && is_first_here(s->share); p++) {
        _Atomic uint64_t *word = mt_board_plane(&u->board, p);
        apart             a = { .s = s, .u = u, .mine = 1u << p };
        uint64_t          is = a.want[p] = atomic_load(word);    /* perhaps of before an update */
        int               saved;

        if (is == 0 || (is & (BUSY | CLAIMED)) ||
            !atomic_compare_exchange_strong(word, &is, is | BUSY))
            continue;
        saved = mt_ledger_all_saved(s, unit);    /* who begins a save now waits for us */
        for (int i = 0; saved && i < u->n_params; i++)
            punch(s, unit, i, (mt_plane)p);
        set_words(&a, !saved);
        all &= saved;
    }
    return all;
}

/* ---- readers, of all ---------------------------------------------------------------------- */

/* planes: out, those of which a device has the truth. */
static mt_status bring_own_ready(mt_store *s, int unit, unsigned *planes, int claims)
{
    const mt__mirror m = look(s, unit);
    mt_status        st;

    *planes &= m.planes | m.visit;
    if (*planes == 0)
        return MT_OK;
    MT_TRY(wait_for(s, unit, *planes));
    st = bring_own(s, unit, *planes, claims);
fail:
    return st;
}

static mt_status bring(mt_store *s, int unit, unsigned planes, int claims)
{
    unsigned  own = planes;
    mt_status st;

    MT_TRY(bring_own_ready(s, unit, &own, claims));
    if (is_apart(s, unit))
        st = bring_apart(s, unit, planes, claims);
    else if (own != 0)
        st = bring_others(s, unit, own, claims);
fail:
    return st;
}

mt_status mt__mirror_serve(mt_store *s, int unit, unsigned planes, int claims, int *gone)
{
    const mt__mirror m = look(s, unit);

    *gone = m.home == NULL && mt_store_home(s, unit, NULL)->away != 0;
    planes &= m.planes | m.visit;
    return planes != 0 ? bring_own(s, unit, planes, claims) : MT_OK;
}

mt_status mt_mirror_bring_own(mt_store *s, int unit, unsigned planes)
{
    return bring_own_ready(s, unit, &planes, 1);
}

mt_status mt_mirror_bring(mt_store *s, int unit, unsigned planes)
{
    return bring(s, unit, planes, 1);
}

mt_status mt_mirror_peek(mt_store *s, int unit, unsigned planes)
{
    return bring(s, unit, planes, 0);
}

/* ---- writers ------------------------------------------------------------------------------ */

mt_status mt_mirror_push(mt_store *s, int unit, int param, unsigned planes)
{
    const mt__mirror m = look(s, unit);
    unsigned         now;
    mt_status        st = MT_OK;

    planes &= m.planes | m.visit;
    if (planes == 0)
        return MT_OK;
    if (param != -1 && mt_store_desc(s, unit, param) == NULL)
        return MT_FAIL(MT_EINVAL, "unit %s has no parameter %d; it has %d", mt_store_name(s, unit),
                       param, mt_store_params(s, unit));
    now = planes & ~m.home->later;
    MT_TRY(wait_for(s, unit, planes));
    MT_TRY(mt_mirror_enter(s, unit));
    mt_mirror_tell(s, unit, param, planes, MT_MIRROR_SET);
    if (now != 0)
        st = store(s, unit, param, now, MT_MIRROR_FAILED);
    mt_mirror_leave(s, unit);
    if (st == MT_OK && (planes & HI))
        mt__version_grows(s, unit);
fail:
    return st;
}

/* ---- memory ------------------------------------------------------------------------------- */

static mt_status drop(mt_store *s, int unit, int claimed)
{
    mt_status st;

    if (look(s, unit).home == NULL)
        return MT_OK;
    MT_TRY(mt_mirror_enter(s, unit));
    mt_mirror_drop(s, unit, claimed ? ~0u : ~look(s, unit).claimed);
    mt_mirror_leave(s, unit);
fail:
    return st;
}

mt_status mt_mirror_release(mt_store *s, int unit)
{
    return drop(s, unit, 0);
}

/* In a share: all ranks have come to the evict's first, or second, place. */
static mt_status meet_evict(mt_store *s, int unit, int first)
{
    int       me = mt_share_rank(s->share), other = 0;
    uint64_t  n = mt_share_said(s->share, MT_COUNT_EVICTED, me) + 1;
    mt_status st;

    mt_ledger_say(s, MT_COUNT_EVICTED, n, (uint64_t)(unsigned)unit);
    MT_TRY(mt_ledger_meet(s, MT_COUNT_EVICTED, n, 0, NULL));
    while (first && other < mt_share_ranks(s->share) &&
           mt_share_about(s->share, MT_COUNT_EVICTED, other) == (uint64_t)(unsigned)unit)
        other++;
    if (first && other < mt_share_ranks(s->share)) {
        st = MT_FAIL(MT_EPEER, "rank %d gives back memory of unit %d, and rank %d of unit %s",
                     other, (int)mt_share_about(s->share, MT_COUNT_EVICTED, other), me,
                     mt_store_name(s, unit));
        mt_ledger_fault(s, st, mt_last_error());
    }
fail:
    return st;
}

/* (1) and (2) of mirror.h. Nobody is asked while ranks meet: this is not to be done again. */
static mt_status evict_with_all(mt_store *s, int unit)
{
    mt__unit    *u = mt__unit_at(s, unit);
    mt_watch_ask ask = mt_watch_asks(NULL);
    mt_status    st, met;

    if ((st = meet_evict(s, unit, 1)) == MT_OK) {
        u->mirror.all_evict = 1;
        st = drop(s, unit, 1);
        u->mirror.all_evict = 0;
        met = meet_evict(s, unit, 0);
        st = st != MT_OK ? st : met;
    }
    (void)mt_watch_asks(ask);
    return st;
}

mt_status mt_mirror_evict(mt_store *s, int unit)
{
    mt_status st = mt_ledger_wait_saved(s, unit);

    if (st != MT_OK || look(s, unit).home == NULL)
        return st;
    return s->share != NULL ? evict_with_all(s, unit) : drop(s, unit, 1);
}

int mt_mirror_is_old(mt_store *s, int unit)
{
    int old;

    mt_lock(&s->mirror_mu);
    old = old_planes(mt__unit_at(s, unit)) != 0;
    mt_unlock(&s->mirror_mu);
    return old;
}

void mt_mirror_forget(mt_store *s, int unit)
{
    mt__unit *u = mt__unit_at(s, unit);
    unsigned  old;

    mt_lock(&s->mirror_mu);
    old = u->mirror.busy ? 0 : old_planes(u);
    if (old != 0 && mt_ledger_saving(s, unit))
        old = 0;
    u->mirror.busy |= old != 0;
    mt_unlock(&s->mirror_mu);
    if (old == 0)
        return;
    mt_mirror_drop(s, unit, old);
    mt_mirror_leave(s, unit);
}
