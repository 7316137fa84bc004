/* ledger.c — what is under way on each unit, and who must wait for it.
 *
 * One mutex, one condition. Everything counted here is a unit's whole update or hand-over, a few
 * hundred a step, so a broadcast that wakes a thread for another unit's sake costs nothing. */
#include "ledger.h"

#include "store_impl.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* Under mu, at each door. What was ended more often than begun is a fault (end), not a count. */
static void assert_counts(const mt_store *s, const mt__unit *u)
{
    const mt__ledger  *l = &s->ledger;
    const struct mt__account *a = &u->account;

    MT_ASSERT(mt_holds(&l->mu));
    MT_ASSERT(a->version > 0 && a->updates >= 0 && a->grads >= 0 && a->fetches >= 0);
    MT_ASSERT(a->saves == 0 || a->saves == 1);
    MT_ASSERT((l->fault == MT_OK) == (l->text[0] == '\0'));
    MT_ASSERT(l->wanted >= 0 && l->wanted <= mt_store_units(s));
}

/* ---- the fault -------------------------------------------------------------------------- */

/* told: the other ranks are to know. */
static void set_fault(mt_store *s, mt_status st, const char *text, int told)
{
    mt__ledger *l = &s->ledger;

    MT_HOLD(&l->mu);
    if (l->fault == MT_OK) {
        snprintf(l->text, sizeof l->text, "%s", text);
        l->fault = st;
        pthread_cond_broadcast(&l->changed);
        if (told)
            mt_share_fail(s->share, l->text);
    }
}

void mt_ledger_fault(mt_store *s, mt_status st, const char *text)
{
    if (st != MT_OK)
        set_fault(s, st, text != NULL ? text : mt_status_text(st), s->share != NULL);
}

void mt__ledger_fault_of(mt_store *s, const char *text)
{
    set_fault(s, MT_EPEER, text, 0);
}

mt_status mt_ledger_check(mt_store *s)
{
    mt_status st = (mt_status)atomic_load(&s->ledger.fault);

    return st == MT_OK ? MT_OK : mt_fail_again(st, s->ledger.text);
}

/* The functions that announce and finish return nothing; a wrong number given to one would be a
 * wait that never ends, or ends too soon. It becomes the store's fault instead. */
static mt__unit *unit_or_fault(mt_store *s, int unit)
{
    mt__unit *u = mt__unit_at(s, unit);
    char      text[80];

    if (u == NULL) {
        snprintf(text, sizeof text, "ledger: there is no unit %d; the store has %d",
                 unit, mt_store_units(s));
        mt_ledger_fault(s, MT_EINVAL, text);
    }
    return u;
}

/* ---- announce and finish ---------------------------------------------------------------- */

uint64_t mt_ledger_version(mt_store *s, int unit)
{
    return atomic_load(&mt__unit_or_none(s, unit)->account.version);
}

uint64_t mt_ledger_writes(mt_store *s, int unit)
{
    return atomic_load(&mt__unit_or_none(s, unit)->account.writes);
}

/* Nobody waits for a version or for a count to grow, so there is no one to wake. */
static void begin(mt_store *s, mt__unit *u, int updates, int grads, int written)
{
    struct mt__account *a;

    if (u == NULL)
        return;
    a = &u->account;
    mt_lock(&s->ledger.mu);
    a->version += (uint64_t)(updates + written);
    a->writes += (uint64_t)written;
    a->updates += updates;
    a->grads += grads;
    a->begun[MT_COUNT_STEPPED] += (uint64_t)updates;
    a->begun[MT_COUNT_UPDATED] += (uint64_t)updates;
    a->begun[MT_COUNT_LANDED] += (uint64_t)grads;
    assert_counts(s, u);
    mt_unlock(&s->ledger.mu);
    mt_watch_moved(&s->watch);
}

void mt__version_grows(mt_store *s, int unit)
{
    begin(s, mt__unit_at(s, unit), 0, 0, 1);
}

void mt_ledger_touch(mt_store *s, int unit)
{
    if (unit_or_fault(s, unit) == NULL)
        return;
    mt__version_grows(s, unit);
    s->ledger.touched(s, unit);
}

void mt_ledger_update_begin(mt_store *s, int unit)
{
    begin(s, unit_or_fault(s, unit), 1, 0, 0);
}

void mt_ledger_grads_begin(mt_store *s, int unit)
{
    begin(s, unit_or_fault(s, unit), 0, 1, 0);
}

/* Under mu, in a share. Of what was begun all but `left` has ended here. After a fault nobody is
 * told so: it is not known what those did. */
static void tell(mt_store *s, const mt__unit *u, mt_count what, int64_t left)
{
    uint64_t ended = u->account.begun[what] - (uint64_t)left;

    if (u->shared && s->ledger.fault == MT_OK &&
        ended > mt_board_said(&u->board, (int)what, mt_share_rank(s->share)))
        mt_board_say(&u->board, (int)what, ended, 0);
}

/* One off a unit's count; what is 0 was ended twice, which is a fault. */
static void end(mt_store *s, const mt__unit *u, _Atomic int64_t *count, mt_count what,
                const char *called)
{
    char text[256];
    int  twice;

    mt_lock(&s->ledger.mu);
    if (!(twice = *count == 0)) {
        *count -= 1;
        pthread_cond_broadcast(&s->ledger.changed);
        mt_watch_moved(&s->watch);
        if (what == MT_COUNT_UPDATED)
            tell(s, u, MT_COUNT_STEPPED, *count);
        tell(s, u, what, *count);
    }
    mt_unlock(&s->ledger.mu);
    if (twice) {
        snprintf(text, sizeof text, "unit %s: %s ended that was not announced", u->name, called);
        mt_ledger_fault(s, MT_ESTATE, text);
    }
}

void mt_ledger_update_end(mt_store *s, int unit)
{
    mt__unit *u = unit_or_fault(s, unit);

    if (u == NULL)
        return;
    s->ledger.update_over(s, unit);     /* before who waits for this hands over again */
    end(s, u, &u->account.updates, MT_COUNT_UPDATED, "an update");
}

void mt_ledger_update_stepped(mt_store *s, int unit)
{
    mt__unit *u = unit_or_fault(s, unit);

    if (u == NULL)
        return;
    MT_WITH(&s->ledger.mu)                   /* it is as good as ended */
        tell(s, u, MT_COUNT_STEPPED, u->account.updates - 1);
    mt__ledger_stirred(s);
}

void mt_ledger_grads_end(mt_store *s, int unit)
{
    mt__unit *u = unit_or_fault(s, unit);

    if (u != NULL)
        end(s, u, &u->account.grads, MT_COUNT_LANDED, "a hand-over of gradients");
}

/* ---- waits ------------------------------------------------------------------------------ */

void mt_ledger_watchdog(mt_store *s, double seconds)
{
    mt_watch_limit(&s->watch, seconds);
    MT_HOLD(&s->ledger.mu);
    pthread_cond_broadcast(&s->ledger.changed);     /* those who wait look at it */
}

/* Those that follow are under mu. In a share: every rank has ended as many as were begun here. */
static int all_have(const mt__unit *u, mt_count what)
{
    return !u->shared || mt_board_behind(&u->board, (int)what, u->account.begun[what]) ==
                         mt_share_ranks(u->board.share);
}

static int is_updated(const mt__unit *u)
{
    return u->account.updates == 0 && all_have(u, MT_COUNT_UPDATED);
}

static int is_stepped(const mt__unit *u)
{
    return u->shared ? all_have(u, MT_COUNT_STEPPED) : is_updated(u);
}

/* In a share: what is known to have begun on this rank. */
static uint64_t begun_on(const mt__unit *u, int what, int rank)
{
    return what != MT_COUNT_COPIED ? u->account.begun[what]
                                   : mt_board_said(&u->board, MT_COUNT_SAVING, rank);
}

/* Ranks copy each other's portions. One that failed to begin a save is not waited for. */
static int is_saved(const mt__unit *u)
{
    int rank = 0, ranks = u->shared ? mt_share_ranks(u->board.share) : 0;

    while (rank < ranks && mt_board_said(&u->board, MT_COUNT_COPIED, rank) ==
                           begun_on(u, MT_COUNT_COPIED, rank))
        rank++;
    return u->account.saves == 0 && rank == ranks;
}

#define WORDS(name, what, awaited) awaited,
static const char *const words[MT_COUNTS] = { MT_UNIT_COUNT_MAP(WORDS) MT_RANK_COUNT_MAP(WORDS) };
#undef WORDS

/* What of the unit is begun and not ended by the rank, in words; 0: nothing. */
static int awaits_of_unit(const mt__unit *u, int rank, char *out, size_t cap)
{
    for (int k = 0; k < MT_UNIT_COUNTS; k++)
        if (mt_board_said(&u->board, k, rank) < begun_on(u, k, rank)) {
            snprintf(out, cap, "%s of unit %s", words[k], u->name);
            return 1;
        }
    return 0;
}

/* In a share the watchdog's words are followed by which ranks' work of the unit is not over. */
static mt_status waited(mt_store *s, const mt__unit *u, mt_status st)
{
    char   said[1024], due[512];
    size_t n;

    if (st != MT_ESTUCK || !u->shared)
        return st;
    n = (size_t)snprintf(said, sizeof said, "%s", mt_last_error());
    for (int rank = 0; rank < mt_share_ranks(s->share) && n < sizeof said; rank++)
        if (awaits_of_unit(u, rank, due, sizeof due))
            n += (size_t)snprintf(said + n, sizeof said - n, "; rank %d (process %" PRIu64 ") has "
                                  "still %s to end", rank,
                                  mt_share_said(s->share, MT_COUNT_CAME, rank), due);
    return mt_fail_again(MT_ESTUCK, said);
}

/* Until `over` holds of the unit, which it calls u. */
#define WAIT_UNTIL(s, unit, u, over, awaits)                                                       \
    __extension__({                                                                                \
        const mt__unit *u = mt__unit_at(s, unit);                                                  \
        u == NULL ? mt__no_unit(s, unit)                                                           \
                  : waited(s, u, MT__LEDGER_UNTIL(s, over, u->name, awaits));                      \
    })

mt_status mt_ledger_wait_updates(mt_store *s, int unit)
{
    return WAIT_UNTIL(s, unit, u, is_updated(u), "its update");
}

mt_status mt_ledger_wait_stepped(mt_store *s, int unit)
{
    return WAIT_UNTIL(s, unit, u, is_stepped(u), "its update on all devices");
}

mt_status mt_ledger_wait_grads(mt_store *s, int unit)
{
    return WAIT_UNTIL(s, unit, u, u->account.grads == 0 && all_have(u, MT_COUNT_LANDED),
                      "the hand-over of its gradients");
}

int mt_ledger_updates_due(mt_store *s, int unit)
{
    const mt__unit *u = mt__unit_at(s, unit);

    return u != NULL && !MT_LOCKED(&s->ledger.mu, is_updated(u));
}

/* ---- ranks ------------------------------------------------------------------------------ */

void mt__ledger_stirred(mt_store *s)
{
    MT_WITH(&s->ledger.mu) pthread_cond_broadcast(&s->ledger.changed);
    mt_watch_moved(&s->watch);
}

int mt__ledger_awaits(mt_store *s, int rank, char *out, size_t cap)
{
    const mt__ledger *l = &s->ledger;
    const mt_share   *h = s->share;
    const char       *found = NULL;
    int               of_unit = 0;

    mt_lock(&s->ledger.mu);
    for (int k = MT_COUNTS - 1; k >= MT_UNIT_COUNTS; k--)
        if (mt_share_said(h, (mt_count)k, rank) < l->meets[k] &&
            (k != MT_COUNT_NORMED || rank == 0))
            found = words[k];
    /* Who brings planes for this machine's ranks is one of them, and waits for any. */
    if ((l->bringing > 0 && mt_share_speaker(h, rank) == rank) ||
        (l->asked > 0 && mt_board_said(mt_share_board(h), MT_COUNT_SERVED + mt_share_rank(h),
                                       rank) < l->asked))
        found = "its part of what is read";
    if (found != NULL)
        snprintf(out, cap, "%s", found);
    for (int u = 0; u < mt_store_units(s) && found == NULL && !of_unit; u++)
        of_unit = awaits_of_unit(mt__unit_at(s, u), rank, out, cap);
    mt_unlock(&s->ledger.mu);
    return found != NULL || of_unit;
}

void mt_ledger_say(mt_store *s, mt_count what, uint64_t n, uint64_t about)
{
    MT_HOLD(&s->ledger.mu);
    if (s->ledger.fault == MT_OK)
        mt_board_say(mt_share_board(s->share), (int)what, n, about);
}

void mt_ledger_meeting(mt_store *s, const char *what)
{
    mt__ledger *l = &s->ledger;

    MT_HOLD(&l->mu);
    snprintf(l->meeting, sizeof l->meeting, "%s", what != NULL ? what : "");
    if (what != NULL && l->fault == MT_OK)
        mt_board_say(mt_share_board(s->share), MT_COUNT_MET,
                     mt_share_said(s->share, MT_COUNT_MET, mt_share_rank(s->share)) + 1, 0);
}

/* Under mu. What the rank did as its nth of these, in words. */
static void tell_done(mt_store *s, mt_count what, uint64_t n, int rank, char *out, size_t cap)
{
    uint64_t    about = mt_share_about(s->share, what, rank);
    const char *unit = mt_store_name(s, (int)(what == MT_COUNT_WRITTEN ? about >> 40 : about));

    if (what == MT_COUNT_SUBMITTED)
        snprintf(out, cap, "has made step %" PRIu64, n);
    else if (what == MT_COUNT_MET)
        snprintf(out, cap, "%s", s->ledger.meeting[0] != '\0' ? s->ledger.meeting : "has met all");
    else
        snprintf(out, cap, "%s unit %s", what == MT_COUNT_WRITTEN ? "has written in place to" :
                                         "gives back memory of", unit);
}

/* Each of two ranks did something of which the other had done another thing first. In this order
 * of reads nothing that is done meanwhile looks so. Who is in the meeting tells what it does there.
 */
int mt__ledger_crossed(mt_store *s, int rank, char *out, size_t cap)
{
    static const mt_count ordered[] = { MT_COUNT_MET, MT_COUNT_SUBMITTED, MT_COUNT_WRITTEN,
                                        MT_COUNT_EVICTED };
    const mt_share *h = s->share;
    int             n = (int)(sizeof ordered / sizeof *ordered), me = mt_share_rank(h), found = 0;
    char            its[120], own[200];

    MT_HOLD(&s->ledger.mu);
    for (int k = 0; k < n * n && !found; k++) {
        mt_count a = ordered[k / n], b = ordered[k % n];
        uint64_t own_b = mt_share_said(h, b, me), own_a = mt_share_said(h, a, me);
        uint64_t its_a = mt_share_said(h, a, rank), its_b = mt_share_said(h, b, rank);

        if (a == MT_COUNT_MET || its_a <= own_a || its_b >= own_b)
            continue;
        tell_done(s, a, its_a, rank, its, sizeof its);
        tell_done(s, b, own_b, me, own, sizeof own);
        snprintf(out, cap, "rank %d (process %" PRIu64 ") %s, which rank %d has not, and rank %d "
                 "%s, where rank %d has not come: all processes make steps, run backwards, write "
                 "in place, and call mt.stream, mt.save and mt.load, in one order", rank,
                 mt_share_said(h, MT_COUNT_CAME, rank), its, me, me, own, rank);
        found = 1;
    }
    return found;
}

/* The first rank of those that have to come to n, and has not; ranks: all have. */
static int is_behind(mt_store *s, mt_count what, uint64_t n)
{
    if (what == MT_COUNT_NORMED)             /* rank 0's alone */
        return mt_share_said(s->share, what, 0) >= n ? mt_share_ranks(s->share) : 0;
    return mt_board_behind(mt_share_board(s->share), (int)what, n);
}

mt_status mt_ledger_meet(mt_store *s, mt_count what, uint64_t n, double seconds)
{
    uint64_t  until_ns = seconds > 0 ? mt_now_ns() + (uint64_t)(seconds * 1e9) : UINT64_MAX;
    char      awaits[96];
    mt_status st;

    snprintf(awaits, sizeof awaits, "rank %d, that is %s", is_behind(s, what, n), words[what]);
    MT_WITH(&s->ledger.mu) s->ledger.meets[what] = n;    /* peers.c sees who is waited for */
    st = MT__LEDGER_UNTIL(s, is_behind(s, what, n) == mt_share_ranks(s->share) ||
                             mt_now_ns() >= until_ns, NULL, awaits);
    MT_WITH(&s->ledger.mu) s->ledger.meets[what] = 0;
    return st;
}

/* ---- saves ------------------------------------------------------------------------------ */

/* All that was announced is over, so the planes are those of one step; what is announced from here
 * on finds the announcement. */
mt_status mt_ledger_save_begin(mt_store *s, int unit)
{
    mt__unit    *u = mt__unit_at(s, unit);
    struct mt__account *a;
    int          idle;

    if (u == NULL)
        return mt__no_unit(s, unit);
    a = &u->account;
    mt_lock(&s->ledger.mu);
    idle = is_updated(u) && a->saves == 0;
    if (s->ledger.fault == MT_OK && idle) {
        a->saves++;
        a->begun[MT_COUNT_COPIED]++;
        if (u->shared)
            mt_board_say(&u->board, MT_COUNT_SAVING, a->begun[MT_COUNT_COPIED], 0);
    }
    assert_counts(s, u);
    mt_unlock(&s->ledger.mu);
    MT_DO(mt_ledger_check(s));
    if (!idle)
        return MT_FAIL(MT_ESTATE,
                       "unit %s: an update or another save of it is under way; drain first",
                       u->name);
    return MT_OK;
}

void mt_ledger_save_end(mt_store *s, int unit)
{
    mt__unit *u = unit_or_fault(s, unit);

    if (u == NULL)
        return;
    MT_WITH(&s->ledger.mu)
        if (s->ledger.wanted == unit + 1)
            s->ledger.wanted = 0;
    end(s, u, &u->account.saves, MT_COUNT_COPIED, "a save");
}

int mt_ledger_all_saved(mt_store *s, int unit)
{
    const mt__unit *u = mt__unit_at(s, unit);

    return u != NULL && MT_LOCKED(&s->ledger.mu, is_saved(u));
}

int mt_ledger_saving(mt_store *s, int unit)
{
    return atomic_load(&mt__unit_or_none(s, unit)->account.saves) > 0;
}

int mt_ledger_wanted(mt_store *s)
{
    return atomic_load(&s->ledger.wanted) - 1;
}

mt_status mt_ledger_wait_saved(mt_store *s, int unit)
{
    MT_WITH(&s->ledger.mu)
        if (mt_ledger_saving(s, unit))
            s->ledger.wanted = unit + 1;
    return WAIT_UNTIL(s, unit, u, is_saved(u), "its save (SAVED)");
}

/* ---- copies out of HI ------------------------------------------------------------------- */

/* Of a settled unit: no device writes it before this fetch is over. An update that is announced
 * while this rank saves the unit waits for that. Of another one's save it may be heard too late,
 * when that is over (relay.h). */
static int is_still(const mt__unit *u)
{
    return is_stepped(u) || (u->shared && u->account.saves > 0);
}

/* The mover, before the copy. An update announced after this finds the announcement, and its
 * updater waits in mt_ledger_wait_fetch until the copy is in h2d. */
mt_status mt_ledger_fetch_begin(mt_store *s, int unit, uint64_t *version)
{
    mt__unit *u = mt__unit_at(s, unit);
    int       begun = 0, settled = u != NULL && atomic_load(&u->home)->later != 0;

    while (!begun) {                     /* a settled unit is fetched from other devices */
        MT_DO(settled ? WAIT_UNTIL(s, unit, v, is_still(v), "its update on all devices")
                      : mt_ledger_wait_updates(s, unit));
        mt_lock(&s->ledger.mu);
        /* else another was announced meanwhile */
        if ((begun = settled ? is_still(u) : is_updated(u))) {
            u->account.fetches++;
            *version = u->account.version;
        }
        assert_counts(s, u);
        mt_unlock(&s->ledger.mu);
    }
    return MT_OK;
}

/* The mover, right behind the copy it put in h2d; NULL: it is over. */
mt_status mt_ledger_fetching(mt_store *s, int unit, mt_queue *h2d)
{
    const mt_dev_ops *ops = s->dev->ops;
    mt__unit         *u = mt__unit_at(s, unit);
    struct mt__account *a;
    mt_status         st = MT_OK;

    if (u == NULL)
        return mt__no_unit(s, unit);
    a = &u->account;
    mt_lock(&s->fetched_mu);
    if (h2d != NULL && a->fetched == NULL)
        st = ops->event_open(s->dev, &a->fetched);
    if (h2d != NULL && st == MT_OK)
        st = ops->record(h2d, a->fetched);
    if (h2d != NULL && st == MT_OK)
        mt_watch_put(&s->watch, &a->copying, atomic_load(&u->home)->later ? "device update" : "h2d",
                     u->name, "copies of its weights (the event FETCHED)", a->fetched);
    mt_unlock(&s->fetched_mu);
    MT_HOLD(&s->ledger.mu);
    if (a->fetches > 0) {                /* it may not have been announced */
        a->fetches--;
        pthread_cond_broadcast(&s->ledger.changed);
        mt_watch_moved(&s->watch);
    }
    return st;
}

/* The event, once made, stays. The host asks until it is done, and so waits for records that are
 * made meanwhile too. The lock covers the pointer only: a host writer that waits here never holds
 * up the mover. */
mt_status mt_ledger_wait_fetched(mt_store *s, int unit)
{
    mt_event *fetched;

    MT_DO(WAIT_UNTIL(s, unit, u, u->account.fetches == 0, "its fetch to be put"));
    fetched = MT_LOCKED(&s->fetched_mu, mt__unit_at(s, unit)->account.fetched);
    if (fetched != NULL)
        MT_DO(mt_watch_event(&s->watch, fetched, mt_store_name(s, unit),
                             "copies of its weights (the event FETCHED)"));
    return mt_ledger_check(s);
}

mt_status mt_ledger_wait_fetch(mt_store *s, int unit)
{
    MT_DO(mt_ledger_wait_saved(s, unit));
    return mt_ledger_wait_fetched(s, unit);
}
