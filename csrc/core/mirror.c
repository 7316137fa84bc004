/* mirror.c — the table of mirror.h, a door for each unit, whose memory may go, and what others
 * have of a unit. */
#include "mirror.h"

#include "store_impl.h"

#include <stdlib.h>

#define HI     (1u << MT_PLANE_HI)
#define IS(x)  (1u << MT_MIRROR_##x)
#define GRADIENTS (1u << MT_PLANE_GRAD | 1u << MT_PLANE_ACC)
#define STUCK  (IS(LOADING) | IS(AHEAD) | IS(STORING) | IS(TORN))     /* copies that must stay */

/* ---- the table ---------------------------------------------------------------------------- */

#define TO(x) MT_MIRROR_##x
#define ROW(state, a, b, c, d, e, f, g, h, i) \
    [TO(state)] = { TO(a), TO(b), TO(c), TO(d), TO(e), TO(f), TO(g), TO(h), TO(i) },
static const unsigned char table[MT_MIRROR_STATE_COUNT][MT_MIRROR_EVENT_COUNT] = {
    MT_MIRROR_TABLE(ROW)
};
#undef ROW

/* ---- copies: under mirror_mu -------------------------------------------------------------- */

/* param -1: all of the unit's. */
#define FOR_COPIES(u, param, planes, p, i)                                                        \
    for (int p = 0; p < MT_PLANE_COUNT; p++)                                                      \
        for (int i = (param) < 0 ? 0 : (param);                                                   \
             ((planes) >> p & 1) && i < ((param) < 0 ? (u)->shape.n : (param) + 1); i++)

static unsigned char *copy_at(const mt__unit *u, int p, int param)
{
    return &u->mirror.copies[p * u->shape.n + param];
}

static const mt_home *home_of(const mt__unit *u)
{
    return atomic_load(&u->home);
}

/* Planes whose true values the home keeps. */
static unsigned planes_of(const mt__unit *u)
{
    return u->mirror.copies != NULL ? home_of(u)->away : 0;
}

static void tell(mt__unit *u, int param, unsigned planes, mt_mirror_event e)
{
    mt__mirror *m = &u->mirror;

    planes &= planes_of(u);
    FOR_COPIES(u, param, planes, p, i) {
        unsigned char *c = copy_at(u, p, i), next = table[*c][e];
        const mt_param_desc *d = &u->shape.desc[i];

        MT_ASSERT(next != MT_MIRROR_NEVER);
        if (next == MT_MIRROR_FRESH && p == MT_PLANE_HI && mt__aloft(u, i))
            next = MT_MIRROR_STALE;      /* what the host has of it is on the board */
        /* A plane that has nothing for a parameter's type stays EMPTY. */
        if (next != MT_MIRROR_NEVER && next != *c &&
            (*c != MT_MIRROR_EMPTY || mt_plane_bytes((mt_plane)p, d->dtype,
                                          (mt_states)atomic_load(&u->states), d->numel) > 0))
            *c = next;
    }
    if (e == MT_MIRROR_CHANGED)
        m->claimed &= ~planes;
    if (planes != 0 && (e == MT_MIRROR_SET || e == MT_MIRROR_TOUCHED)) {
        m->pages |= planes;
        m->claimed |= e == MT_MIRROR_TOUCHED ? planes : planes & home_of(u)->later;
    }
}

/* Of these planes, those of which some copy is in one of the states. */
static unsigned which(const mt__unit *u, int param, unsigned planes, unsigned states)
{
    unsigned found = 0;

    planes &= planes_of(u);
    FOR_COPIES(u, param, planes, p, i)
        found |= (states >> *copy_at(u, p, i) & 1) << p;
    return found;
}

/* Planes whose memory may be given back. */
static unsigned pages_of(const mt__unit *u)
{
    const mt_home *h;

    if (u->mirror.copies == NULL)
        return 0;
    h = home_of(u);
    return u->mirror.pages & ~h->stays & ~(u->shared ? h->later : 0);
}

void mt_mirror_tell(mt_store *s, int unit, int param, unsigned planes, mt_mirror_event e)
{
    MT_WITH(&s->mirror_mu) tell(mt__unit_at(s, unit), param, planes, e);
}

void mt_mirror_change(mt_store *s, int unit, const int *params, int n, unsigned planes)
{
    MT_HOLD(&s->mirror_mu);
    for (int i = 0; i < n; i++)
        tell(mt__unit_at(s, unit), params[i], planes, MT_MIRROR_CHANGED);
}

int mt_mirror_aloft(mt_store *s, int unit, int param)
{
    return mt__aloft(mt__unit_at(s, unit), param);
}

int mt_mirror_any(mt_store *s, int unit, int param, unsigned planes, unsigned states)
{
    MT_HOLD(&s->mirror_mu);
    return which(mt__unit_at(s, unit), param, planes, states) != 0;
}

/* The home that keeps planes of the unit; NULL: none does. */
static const mt_home *keeper(mt_store *s, int unit)
{
    const mt__unit *u = mt__unit_at(s, unit);

    return u != NULL && MT_LOCKED(&s->mirror_mu, u->mirror.copies != NULL) ? home_of(u) : NULL;
}

const mt_home *mt__home_kept(mt_store *s, int unit, void **of)
{
    return keeper(s, unit) != NULL ? mt_store_home(s, unit, of) : NULL;
}

/* Of these planes, those that a home keeps, or has around an update. */
static unsigned kept(mt_store *s, int unit, unsigned planes)
{
    const mt_home *h = keeper(s, unit);

    return h != NULL ? planes & (h->away | h->visit) : 0;
}

/* ---- homes -------------------------------------------------------------------------------- */

static void close_copies(mt_store *s, mt__unit *u)
{
    MT_HOLD(&s->mirror_mu);
    MT_ASSERT(!u->mirror.busy);
    free(u->mirror.copies);
    u->mirror = (mt__mirror){ 0 };
    for (int i = 0; i < u->shape.n; i++)
        atomic_store(&u->aloft[i], 0);
}

void mt_mirror_close(mt_store *s, int unit)
{
    MT_WITH(&s->serving) close_copies(s, mt__unit_at(s, unit));
}

/* From one home that mirrors planes to another, which has none of them before they are noted: what
 * the host has of those that come to it is ahead. */
mt_status mt__mirror_move(mt_store *s, int unit, const mt_home *to, void *of)
{
    mt__unit      *u = mt__unit_at(s, unit);
    unsigned       were = planes_of(u), newer;
    unsigned char *copies = u->mirror.copies;

    if (to->away == 0) {
        close_copies(s, u);
        mt__home_set(s, unit, to, of);
        return MT_OK;
    }
    MT_WITH(&s->mirror_mu) newer = which(u, -1, ~to->away, ~(IS(EMPTY) | IS(FRESH) | IS(AHEAD)));
    if (newer != 0)
        return MT_FAIL(MT_ESTATE, "unit %s: its home has newer values than the host, and it cannot "
                       "become one that %s", u->name, to->lives);
    if (copies == NULL)
        MT_DO(MT_MAKE(copies, (int64_t)u->shape.n * MT_PLANE_COUNT, u->name));
    mt__home_set(s, unit, to, of);
    mt_lock(&s->mirror_mu);
    u->mirror.copies = copies;
    u->mirror.pages &= to->away;
    tell(u, -1, to->later & ~were, MT_MIRROR_SET);
    mt_unlock(&s->mirror_mu);
    FOR_COPIES(u, -1, to->away & ~were, p, i)
        if (mt_store_made(s, unit, i, (mt_plane)p, 0))
            mt_mirror_tell(s, unit, i, 1u << p, MT_MIRROR_SET);
    return MT_OK;
}

/* Behind the door. lost: what becomes of copies where that fails. */
static mt_status store(mt_store *s, int unit, int param, unsigned planes, mt_mirror_event lost)
{
    const mt__unit *u = mt__unit_or_none(s, unit);
    mt_status       st;

    mt_mirror_tell(s, unit, param, planes, MT_MIRROR_STORE);
    st = home_of(u)->store(u->home_of, unit, param, planes);
    mt_mirror_tell(s, unit, param, planes, st == MT_OK ? MT_MIRROR_STORED : lost);
    return st;
}

mt_status mt_mirror_store(mt_store *s, int unit)
{
    const mt__unit *u = mt__unit_at(s, unit);
    unsigned        ahead;
    mt_status       st = MT_OK;

    MT_DO(mt_mirror_enter(s, unit));
    for (int i = 0; i < u->shape.n && st == MT_OK; i++) {
        MT_WITH(&s->mirror_mu) ahead = which(u, i, ~home_of(u)->later, IS(AHEAD));
        if (ahead != 0)
            st = store(s, unit, i, ahead, MT_MIRROR_SET);
    }
    mt_mirror_leave(s, unit);
    return st;
}

/* ---- the door ----------------------------------------------------------------------------- */

mt_status mt_mirror_enter(mt_store *s, int unit)
{
    mt__mirror *m = &mt__unit_at(s, unit)->mirror;

    return MT_UNTIL(&s->watch, &s->mirror_changed, &s->mirror_mu, m->busy ? 0 : (m->busy = 1),
                    mt_store_name(s, unit), "who is at its host planes");
}

void mt_mirror_leave(mt_store *s, int unit)
{
    MT_HOLD(&s->mirror_mu);
    mt__unit_at(s, unit)->mirror.busy = 0;
    pthread_cond_broadcast(&s->mirror_changed);
}

/* ---- other ranks' portions ------------------------------------------------------------------
 *
 * Of each plane a word on the unit's board says which of its values the other ranks' portions in
 * host memory are. It is changed by compare-and-exchange alone, but by whom it says BUSY:
 *
 *     0              not all of them are there. CLAIMED alone: so it is with weights, and what is
 *                    there of them stays
 *     stamp          they are those after so many changes of the plane; a save brought them, and
 *                    they are given back when it has read
 *     stamp|CLAIMED  the same; they stay until the plane changes, or an evict
 *     stamp|BUSY     one thread of one rank brings them, or gives them back; the others wait
 */
#define BUSY    UINT64_C(1)
#define CLAIMED UINT64_C(2)
#define STAMP   UINT64_C(4)              /* a stamp is a multiple of it */

_Static_assert(MT_PLANE_COUNT <= MT_BOARD_PLANES, "a word for each plane");

void mt__mirror_lacks(mt_store *s, int unit, unsigned planes)
{
    for (int p = 0; p < MT_PLANE_COUNT; p++)
        if (planes >> p & 1)
            atomic_store(mt_board_plane(&mt__unit_at(s, unit)->board, p), 0);
}

void mt_mirror_drop(mt_store *s, int unit, unsigned planes)
{
    mt__unit *u = mt__unit_at(s, unit);

    mt_lock(&s->mirror_mu);
    MT_ASSERT(u->mirror.busy);                                                            /* (3) */
    planes &= pages_of(u);
    planes &= ~which(u, -1, planes, STUCK);                                               /* (4) */
    MT_ASSERT(!u->shared || u->mirror.all_evict || !(planes & u->mirror.claimed & HI));   /* (1) */
    tell(u, -1, planes, MT_MIRROR_EVICTED);
    u->mirror.pages &= ~planes;
    u->mirror.claimed &= ~planes;
    mt_unlock(&s->mirror_mu);
    for (int p = 0; p < MT_PLANE_COUNT; p++)
        if (planes >> p & 1) {
            uint64_t is = u->shared ? atomic_load(mt_board_plane(&u->board, p)) : BUSY;

            if (!(is & BUSY))            /* this rank's portion is gone, so not all is here */
                (void)atomic_compare_exchange_strong(mt_board_plane(&u->board, p), &is, 0);
            mt_store_decommit(s, unit, (mt_plane)p);
        }
}

/* ---- what other ranks have ------------------------------------------------------------------
 *
 * This rank asks: a request is a number that grows, a unit and planes of it. A thread of every
 * other rank sees it, copies its portion to host memory, and says that it has (SERVED; peers.c).
 * That one takes nothing of Python's, and waits for nothing that is announced: who asks has waited
 * for that, as any reader does, and all ranks announce the same. So one rank may ask while the
 * others are anywhere, a collective included, and several may at once; each has one request at a
 * time. A rank that ended, or closed its engine, before it has served is a fault of who asks. */

#define ASKED_UNIT   32                      /* bits of a request's second number */
#define ASKED_CLAIMS (UINT64_C(1) << 31)

void mt__asked(uint64_t about, int *unit, unsigned *planes, int *claims)
{
    *unit = (int)(about >> ASKED_UNIT);
    *planes = (unsigned)(about & (ASKED_CLAIMS - 1));
    *claims = (about & ASKED_CLAIMS) != 0;
}

/* The other ranks' portions of these planes are in host memory when it returns. */
static mt_status ask(mt_store *s, int unit, unsigned planes, int claims)
{
    mt__ledger     *l = &s->ledger;
    const mt_board *b = mt_share_board(s->share);
    int             me = mt_share_rank(s->share), served = MT_COUNT_SERVED + me;
    uint64_t        n, about = (uint64_t)(unsigned)unit << ASKED_UNIT | (claims ? ASKED_CLAIMS : 0);
    mt_status       st;

    MT_DO(MT__LEDGER_UNTIL(s, l->asking ? 0 : (l->asking = 1), mt_store_name(s, unit),
                           "this rank's request before"));
    n = mt_share_said(s->share, MT_COUNT_ASKED, me) + 1;
    MT_WITH(&l->mu) l->asked = n;
    mt_ledger_say(s, (mt_count)served, n, 0);            /* it has its own */
    mt_ledger_say(s, MT_COUNT_ASKED, n, about | planes);
    st = MT__LEDGER_UNTIL(s, mt_board_behind(b, served, n) == mt_share_ranks(s->share),
                          mt_store_name(s, unit), "what other ranks have of it");
    MT_HOLD(&l->mu);
    l->asked = 0;
    l->asking = 0;
    pthread_cond_broadcast(&l->changed);
    return st;
}

static mt_status wait_for(mt_store *s, int unit, unsigned planes, int updates)
{
    if (planes & ~(1u << MT_PLANE_GRAD))
        MT_DO(updates ? mt_ledger_wait_updates(s, unit) : mt_ledger_check(s));
    if (planes & 1u << MT_PLANE_GRAD)
        MT_DO(mt_ledger_wait_grads(s, unit));
    return MT_OK;
}

/* Planes that this thread waits for, or is busy with. */
typedef struct others {
    mt_store       *s;
    const mt__unit *u;
    uint64_t        want[MT_PLANE_COUNT];    /* words, which CLAIMED may be added to */
    unsigned        planes, mine;
    int             waits;                   /* it is counted in the ledger's `bringing` */
} others;

/* What a plane's word is when all of it is there as it is now. Hand-overs change gradients, and
 * updates all else. What waits for a save to copy it has not changed yet. */
static uint64_t stamp(mt_store *s, const mt__unit *u, int p)
{
    const struct mt__account *c = &u->account;

    MT_HOLD(&s->ledger.mu);
    return STAMP * (1 + (GRADIENTS >> p & 1 ? c->begun[MT_COUNT_LANDED] - (uint64_t)c->grads
                                            : c->begun[MT_COUNT_UPDATED] - (uint64_t)c->updates));
}

/* Under ledger.mu. Those that nobody has brought are ours to bring, or, if there are none, all are
 * here. Other ranks are awaited by who finds one busy alone: one that has left is no fault else. */
static int are_here_or_ours(others *a)
{
    int wait = 0;

    for (int p = 0; p < MT_PLANE_COUNT; p++) {
        _Atomic uint64_t *word = mt_board_plane(&a->u->board, p);
        uint64_t          is = atomic_load(word);

        if (!(a->planes >> p & 1) || is == a->want[p] || is == (a->want[p] | CLAIMED))
            continue;
        if (p == MT_PLANE_HI && mt__aloft(a->u, -1))     /* what somebody claims may not change */
            a->want[p] |= is & CLAIMED;
        if (is & BUSY || !atomic_compare_exchange_strong(word, &is, a->want[p] | BUSY))
            wait = 1;
        else
            a->mine |= 1u << p;
    }
    wait &= a->mine == 0;
    a->s->ledger.bringing += wait - a->waits;
    a->waits = wait;
    return !wait;
}

static mt_status await_others(others *a)
{
    mt_status st;

    a->mine = 0;
    st = MT__LEDGER_UNTIL(a->s, are_here_or_ours(a), a->u->name, "what another rank brings of it");
    MT_HOLD(&a->s->ledger.mu);
    a->s->ledger.bringing -= a->waits;       /* a fault, or a signal, ended the wait */
    a->waits = 0;
    return st;
}

/* Those that are ours are here, or not. Claims to weights stay: of these some may be here. */
static void set_words(const others *a, int here)
{
    for (int p = 0; p < MT_PLANE_COUNT; p++)
        if (a->mine >> p & 1)
            atomic_store(mt_board_plane(&a->u->board, p),
                         here ? a->want[p] : p == MT_PLANE_HI ? a->want[p] & CLAIMED : 0);
    mt_share_stir(a->s->share);
}

/* Other machines' portions of a parameter in a plane. */
static void punch(mt_store *s, int unit, int param, mt_plane p)
{
    const mt__unit *u = mt__unit_at(s, unit);
    void           *at;
    mt_portion      part;
    int64_t         from, n;

    if (!mt_store_made(s, unit, param, p, 0) || mt_store_at(s, unit, param, p, &at) != MT_OK)
        return;
    for (int rank = 0; rank < mt_share_ranks(s->share); rank++)
        if (mt_share_speaker(s->share, rank) != rank &&
            mt_portion_of(s, unit, rank, mt_share_ranks(s->share), &part) == MT_OK) {
            n = mt_portion_part(&part, param, u->shape.desc[param].numel, &from);
            mt_share_punch(&u->range[p], (size_t)((char *)at -
                                                  (char *)u->plane[MT__HOST][p].arena.base) +
                           mt_store_plane_bytes(s, unit, param, p, from),
                           mt_store_plane_bytes(s, unit, param, p, n));
        }
}

/* Weights that are aloft are given back by whoever is the first. */
int mt_mirror_release_apart(mt_store *s, int unit)
{
    const mt__unit *u = mt__unit_at(s, unit);
    int             first = 0, all = 1;      /* first: of the ranks of this machine */
    unsigned        planes;

    if (u == NULL || s->share == NULL)
        return 1;
    while (mt_share_speaker(s->share, first) != first)
        first++;
    planes = mt_share_is_apart(s->share) && first == mt_share_rank(s->share) ? ~0u : 0;
    planes |= mt__aloft(u, -1) ? HI : 0;
    for (int p = 0; p < MT_PLANE_COUNT; p++) {
        _Atomic uint64_t *word = mt_board_plane(&u->board, p);
        others            a = { .s = s, .u = u, .mine = 1u << p };
        uint64_t          is = a.want[p] = atomic_load(word);    /* perhaps of before an update */
        int               saved;

        if (!(planes >> p & 1) || is == 0 || (is & (BUSY | CLAIMED)) ||
            !atomic_compare_exchange_strong(word, &is, is | BUSY))
            continue;
        saved = mt_ledger_all_saved(s, unit);    /* who begins a save now waits for us */
        for (int i = 0; saved && i < u->shape.n; i++)
            if (p != MT_PLANE_HI)
                punch(s, unit, i, (mt_plane)p);
            else if (mt__aloft(u, i))
                mt_share_punch(&u->range[p], u->shape.offset[i], mt__weight_room(u, i));
        set_words(&a, !saved);
        all &= saved;
    }
    return all;
}

/* ---- readers ------------------------------------------------------------------------------ */

/* Behind the door. Memory first: pages by the gigabyte take their time, so they are made under no
 * lock. */
static mt_status load(mt_store *s, int unit, unsigned planes, int claims)
{
    mt__unit *u = mt__unit_at(s, unit);
    unsigned  torn, loading;
    mt_status st = MT_OK;

    mt_lock(&s->mirror_mu);
    if (!(torn = which(u, -1, planes, IS(TORN))))
        tell(u, -1, planes, MT_MIRROR_LOAD);
    loading = which(u, -1, planes, IS(LOADING));
    u->mirror.pages |= loading;
    mt_unlock(&s->mirror_mu);
    if (torn)
        return MT_FAIL(MT_ESTATE, "unit %s: its values were written on the host where they were "
                       "older than elsewhere; they must be brought before", u->name);
    for (int p = 0; p < MT_PLANE_COUNT && st == MT_OK; p++)
        if (loading >> p & 1)
            st = mt_store_commit(s, unit, (mt_plane)p);
    if (loading != 0 && st == MT_OK)
        st = home_of(u)->load(u->home_of, unit, loading);
    mt_lock(&s->mirror_mu);
    tell(u, -1, planes, st == MT_OK ? MT_MIRROR_LOADED : MT_MIRROR_FAILED);
    u->mirror.claimed |= st == MT_OK && claims ? planes & planes_of(u) : 0;
    mt_unlock(&s->mirror_mu);
    return st;
}

/* This rank's portion of planes of which a device, or a file, has the truth. Nothing is awaited
 * that is announced. */
static mt_status bring_own(mt_store *s, int unit, unsigned planes, int claims)
{
    mt__unit      *u = mt__unit_at(s, unit);
    const mt_home *h = home_of(u);
    int            here;
    mt_status      st;

    if (planes & h->visit && h->wait != NULL)
        MT_DO(h->wait(u->home_of, unit, planes & h->visit));
    MT_WITH(&s->mirror_mu) {
        /* Nobody is behind the door who could take away what is here, and all of it is. */
        here = !u->mirror.busy && which(u, -1, planes, IS(STALE) | IS(TORN)) == 0;
        if (here && claims)
            u->mirror.claimed |= planes & planes_of(u);
    }
    if (here)
        return MT_OK;
    MT_DO(mt_mirror_enter(s, unit));
    st = load(s, unit, planes, claims);
    mt_mirror_leave(s, unit);
    return st;
}

mt_status mt__mirror_serve(mt_store *s, uint64_t about, int *gone)
{
    unsigned planes;
    int      unit, claims;

    mt__asked(about, &unit, &planes, &claims);
    *gone = keeper(s, unit) == NULL && mt_store_home(s, unit, NULL)->away != 0;
    planes = kept(s, unit, planes);
    return planes != 0 ? bring_own(s, unit, planes, claims) : MT_OK;
}

/* ---- weights that are aloft ------------------------------------------------------------------
 *
 * In a share each device has all weights of a unit that lives there. Those that nobody trains are
 * the same on all; where all are trained, they come from slot to slot, if slots are within reach.
 * When all ranks evict the unit, host memory of these is given back: they are aloft until the unit
 * moves, and STALE. Who reads one copies all of the unit's to the share, from its own slot, and
 * says on the board, in the word of plane HI, that they are there, as they were after so many
 * updates. A save's go when all have read; others' stay until the next evict, and so they may be
 * written. */

/* Weights that are aloft count as written only where a reader has brought them for good: what a
 * save brought may be gone before it is fetched. Trained ones, where none were newer. */
void mt__mirror_touched(mt_store *s, int unit)
{
    mt__unit *u = mt__unit_at(s, unit);
    uint64_t  is = u->shared ? atomic_load(mt_board_plane(&u->board, MT_PLANE_HI)) : 0;
    uint64_t  now = stamp(s, u, MT_PLANE_HI) | CLAIMED;

    MT_HOLD(&s->mirror_mu);
    for (int i = 0; i < u->shape.n; i++)
        if (!mt__aloft(u, i) || (is != now && mt_store_trainable(s, unit, i)))
            tell(u, i, HI, MT_MIRROR_TOUCHED);
        else if ((is & (BUSY | CLAIMED)) == CLAIMED)
            tell(u, i, HI, MT_MIRROR_SET);
}

/* param: the one that is read; -1: any. It is a fetch, announced before others wait for what this
 * thread brings: then nothing is waited for that they might have to announce before it is over. */
static mt_status lower(mt_store *s, int unit, int param, int claims)
{
    mt__unit *u = mt__unit_at(s, unit);
    others    a = { .s = s, .u = u, .planes = HI };
    uint64_t  version;
    mt_status st;

    if (!mt__aloft(u, param))
        return MT_OK;
    MT_DO(mt_ledger_fetch_begin(s, unit, &version));
    /* In the slots, until this is over: an older stamp would take a newer one's place. */
    a.want[MT_PLANE_HI] = STAMP * (1 + mt_board_said(&u->board, MT_COUNT_STEPPED,
                                                     mt_share_rank(s->share)));
    a.want[MT_PLANE_HI] |= claims ? CLAIMED : 0;
    if ((st = await_others(&a)) == MT_OK && a.mine != 0) {
        if ((st = mt_mirror_enter(s, unit)) == MT_OK) {
            st = home_of(u)->load(u->home_of, unit, HI);
            mt_mirror_leave(s, unit);
        }
        set_words(&a, st == MT_OK);
    }
    (void)mt_ledger_fetching(s, unit, NULL);
    return st;
}

/* all: the other ranks' portions too, without the door, since they may be asking for the same. On
 * one machine they may have newer values of what is at home elsewhere, but for what is stored
 * later. On several each machine has the portions of its own ranks alone, but of weights, which are
 * whole everywhere. */
static mt_status bring(mt_store *s, int unit, int param, unsigned planes, int claims, int all)
{
    others             a = { .s = s, .u = mt__unit_at(s, unit) };
    unsigned           own = kept(s, unit, planes);
    mt_status          st;

    if ((own & HI) && mt__aloft(a.u, -1)) {
        MT_DO(wait_for(s, unit, HI, claims));
        MT_DO(lower(s, unit, param, claims));
        planes &= ~HI;
        own &= ~HI;
    }
    if (own != 0) {
        MT_DO(wait_for(s, unit, own, claims));
        MT_DO(bring_own(s, unit, own, claims));
    }
    if (!all || s->share == NULL || a.u == NULL)
        return MT_OK;
    mt_lock(&s->mirror_mu);
    a.planes = which(a.u, -1, planes, ~IS(EMPTY));
    if (a.u->mirror.copies != NULL)
        a.planes |= planes & home_of(a.u)->visit;
    if (mt_share_is_apart(s->share))
        a.planes = (a.planes | (planes & ~planes_of(a.u))) & ~HI;
    a.planes &= ~home_of(a.u)->later;
    mt_unlock(&s->mirror_mu);
    if (a.planes == 0)
        return MT_OK;
    MT_DO(wait_for(s, unit, a.planes, claims));
    for (int p = 0; p < MT_PLANE_COUNT; p++)
        a.want[p] = stamp(s, a.u, p) | (claims ? CLAIMED : 0);
    for (;;) {
        if ((st = await_others(&a)) != MT_OK || a.mine == 0)
            return st;
        st = ask(s, unit, a.mine, claims);
        set_words(&a, st == MT_OK);
        MT_DO(st);
    }
}

mt_status mt_mirror_bring_own(mt_store *s, int unit, unsigned planes)
{
    return bring(s, unit, -1, planes, 1, 0);
}

mt_status mt_mirror_bring(mt_store *s, int unit, unsigned planes)
{
    return bring(s, unit, -1, planes, 1, 1);
}

mt_status mt_mirror_read(mt_store *s, int unit, int param)
{
    return bring(s, unit, param, HI, 1, 1);
}

mt_status mt_mirror_peek(mt_store *s, int unit, unsigned planes)
{
    return bring(s, unit, -1, planes, 0, 1);
}

/* ---- writers ------------------------------------------------------------------------------ */

mt_status mt_mirror_push(mt_store *s, int unit, int param, unsigned planes)
{
    unsigned  now;
    mt_status st = MT_OK;

    if ((planes = kept(s, unit, planes)) == 0)
        return MT_OK;
    if (param != -1 && mt_store_desc(s, unit, param) == NULL)
        return MT_FAIL(MT_EINVAL, "unit %s has no parameter %d; it has %d", mt_store_name(s, unit),
                       param, mt_store_params(s, unit));
    now = planes & ~home_of(mt__unit_at(s, unit))->later;
    MT_DO(wait_for(s, unit, planes, 1));
    MT_DO(mt_mirror_enter(s, unit));
    mt_mirror_tell(s, unit, param, planes, MT_MIRROR_SET);
    if (now != 0)
        st = store(s, unit, param, now, MT_MIRROR_FAILED);
    mt_mirror_leave(s, unit);
    if (st == MT_OK && (planes & HI))
        mt__version_grows(s, unit);
    return st;
}

/* ---- memory ------------------------------------------------------------------------------- */

static mt_status drop(mt_store *s, int unit, int claimed)
{
    unsigned planes;

    if (keeper(s, unit) == NULL)
        return MT_OK;
    MT_DO(mt_mirror_enter(s, unit));
    MT_WITH(&s->mirror_mu) planes = claimed ? ~0u : ~mt__unit_at(s, unit)->mirror.claimed;
    mt_mirror_drop(s, unit, planes);
    mt_mirror_leave(s, unit);
    return MT_OK;
}

mt_status mt_mirror_release(mt_store *s, int unit)
{
    return drop(s, unit, 0);
}

/* Weights of the unit that may be aloft, [n], and what tells them from others. Its frozen ones, or
 * else its trained ones: who reads adapters brings no base. Those that were, within reach: whatever
 * is trained by now, the host has not what updates made of them. */
static uint64_t rising(mt_store *s, const mt__unit *u, unsigned char *rises)
{
    const mt_home *h = home_of(u);
    int            reached = h->slot != NULL && h->slot(u->home_of, u->number, 0) != NULL;
    int            trained = reached;
    uint64_t       all = 0;

    for (int i = 0; i < u->shape.n; i++)
        trained &= mt_store_trainable(s, u->number, i);
    MT_HOLD(&s->mirror_mu);
    for (int i = 0; i < u->shape.n; i++) {
        rises[i] = which(u, i, h->later & HI, IS(FRESH) | IS(STALE)) != 0 &&
                   !mt_share_is_apart(s->share) &&
                   (trained == mt_store_trainable(s, u->number, i) ||
                    (reached && mt__aloft(u, i)));
        all = rises[i] ? mt_alike_mix(all, (uint64_t)i + 1) : all;
    }
    return all >> 32;
}

/* All ranks are at the unit's evict. What is aloft no more was read for good before it was trained,
 * and updates went down since. */
static void rise(mt_store *s, mt__unit *u, const unsigned char *rises)
{
    MT_WITH(&s->mirror_mu)
        for (int i = 0; i < u->shape.n; i++) {
            int falls = atomic_load(&u->aloft[i]) && !rises[i];

            atomic_store(&u->aloft[i], rises[i]);
            if (rises[i])
                tell(u, i, HI, MT_MIRROR_EVICTED);
            else if (falls) {
                tell(u, i, HI, MT_MIRROR_LOAD);
                tell(u, i, HI, MT_MIRROR_LOADED);
            }
        }
    (void)mt__thin(s, u, 0);                 /* what is not registered is copied more slowly */
    atomic_store(mt_board_plane(&u->board, MT_PLANE_HI), 0);
}

/* In a share: all ranks have come to the evict's first, or second, place. about: the unit, and
 * 1 << 32 times which of its weights may be aloft; *alike: on all ranks the same. NULL: the second,
 * behind which a rank may have come to the next evict. */
static mt_status meet_evict(mt_store *s, uint64_t about, int *alike)
{
    const mt_board *b = mt_share_board(s->share);
    int             me = mt_share_rank(s->share), unit = (int)(uint32_t)about, rank, other;
    uint64_t        n = mt_board_said(b, MT_COUNT_EVICTED, me) + 1;
    mt_status       st;

    mt_ledger_say(s, MT_COUNT_EVICTED, n, about);
    st = mt_ledger_meet(s, MT_COUNT_EVICTED, n, 0);
    if (st != MT_OK || alike == NULL)
        return st;
    rank = mt_board_differs(b, MT_COUNT_EVICTED, about);
    *alike = rank == mt_share_ranks(s->share) && about >> 32 != 0;
    if (rank == mt_share_ranks(s->share) ||
        (other = (int)(uint32_t)mt_board_about(b, MT_COUNT_EVICTED, rank)) == unit)
        return MT_OK;
    st = MT_FAIL(MT_EPEER, "rank %d gives back memory of unit %d, and rank %d of unit %s", rank,
                 other, me, mt_store_name(s, unit));
    mt_ledger_fault(s, st, mt_last_error());
    return st;
}

mt_status mt_mirror_evict(mt_store *s, int unit)
{
    mt__unit      *u = mt__unit_at(s, unit);
    unsigned char *rises MT_FREED = NULL;
    uint64_t       about;
    mt_watch_ask   asks;
    int            alike;
    mt_status      st, met;

    MT_DO(mt_ledger_wait_saved(s, unit));
    if (keeper(s, unit) == NULL)
        return MT_OK;
    if (s->share == NULL)
        return drop(s, unit, 1);
    MT_DO(MT_MAKE(rises, u->shape.n, u->name));
    about = rising(s, u, rises) << 32 | (uint32_t)unit;
    /* (1) and (2) of mirror.h. Nobody is asked while ranks meet: this is not to be done again. */
    asks = mt_watch_asks(NULL);
    if ((st = meet_evict(s, about, &alike)) == MT_OK) {
        u->mirror.all_evict = 1;
        st = drop(s, unit, 1);
        u->mirror.all_evict = 0;
        if (alike)
            rise(s, u, rises);
        met = meet_evict(s, about, NULL);
        st = st != MT_OK ? st : met;
    }
    (void)mt_watch_asks(asks);
    return st;
}

int mt_mirror_is_old(mt_store *s, int unit)
{
    const mt__unit *u = mt__unit_at(s, unit);

    MT_HOLD(&s->mirror_mu);
    return which(u, -1, pages_of(u), IS(STALE)) != 0;
}

void mt_mirror_forget(mt_store *s, int unit)
{
    mt__unit *u = mt__unit_at(s, unit);
    unsigned  old;

    mt_lock(&s->mirror_mu);
    old = u->mirror.busy || mt_ledger_saving(s, unit) ? 0 : which(u, -1, pages_of(u), IS(STALE));
    u->mirror.busy |= old != 0;
    mt_unlock(&s->mirror_mu);
    if (old == 0)
        return;
    mt_mirror_drop(s, unit, old);
    mt_mirror_leave(s, unit);
}
