/* ledger.c — what is under way on each unit, and who must wait for it.
 *
 * One mutex, one condition. Everything counted here is a unit's whole update or hand-over, a few
 * hundred a step, so a broadcast that wakes a thread for another unit's sake costs nothing. */
#include "store_impl.h"

#include "clock.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

mt_status mt__ledger_open(mt__ledger *l)
{
    mt_status st = mt_watch_cond(&l->changed);

    if (st == MT_OK)
        mt_mutex_open(&l->mu, MT_RANK_LEDGER);
    return st;
}

void mt__ledger_close(mt__ledger *l)
{
    pthread_cond_destroy(&l->changed);
    mt_mutex_close(&l->mu);
}

/* Under mu, at each door. What was ended more often than begun is a fault (end), not a count. */
static void assert_counts(const mt_store *s, const mt__unit *u)
{
    const mt__ledger *l = &s->ledger;

    MT_ASSERT(mt_holds(&l->mu));
    MT_ASSERT(u->version > 0 && u->updates >= 0 && u->grads >= 0 && u->fetches >= 0);
    MT_ASSERT(u->saves == 0 || u->saves == 1);
    MT_ASSERT((l->fault == MT_OK) == (l->text[0] == '\0'));
    MT_ASSERT(l->wanted >= 0 && l->wanted <= mt_store_units(s));
}

/* ---- the fault -------------------------------------------------------------------------- */

/* told: the other ranks are to know. */
static void set_fault(mt_store *s, mt_status st, const char *text, int told)
{
    mt__ledger *l = &s->ledger;

    mt_lock(&l->mu);
    if (l->fault == MT_OK) {
        snprintf(l->text, sizeof l->text, "%s", text);
        l->fault = st;
        pthread_cond_broadcast(&l->changed);
        if (told)
            mt_share_fail(s->share, l->text);
    }
    mt_unlock(&l->mu);
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

/* Under mu or after it: once set, fault and text never change. */
static mt_status fault_again(const mt__ledger *l)
{
    return mt_fail_again(l->fault, l->text);
}

mt_status mt_ledger_check(mt_store *s)
{
    mt_status st;

    mt_lock(&s->ledger.mu);
    st = s->ledger.fault;
    mt_unlock(&s->ledger.mu);
    return st == MT_OK ? MT_OK : fault_again(&s->ledger);
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
    const mt__unit *u = mt__unit_at(s, unit);
    uint64_t        version = 0;

    if (u != NULL) {
        mt_lock(&s->ledger.mu);
        version = u->version;
        mt_unlock(&s->ledger.mu);
    }
    return version;
}

uint64_t mt_ledger_writes(mt_store *s, int unit)
{
    const mt__unit *u = mt__unit_at(s, unit);
    uint64_t        writes = 0;

    if (u != NULL) {
        mt_lock(&s->ledger.mu);
        writes = u->writes;
        mt_unlock(&s->ledger.mu);
    }
    return writes;
}

/* Nobody waits for a version or for a count to grow, so there is no one to wake. */
static void begin(mt_store *s, mt__unit *u, int updates, int grads, int written)
{
    mt_lock(&s->ledger.mu);
    u->version += (uint64_t)(updates + written);
    u->writes += (uint64_t)written;
    u->updates += updates;
    u->grads += grads;
    u->begun[MT_COUNT_STEPPED] += (uint64_t)updates;
    u->begun[MT_COUNT_UPDATED] += (uint64_t)updates;
    u->begun[MT_COUNT_LANDED] += (uint64_t)grads;
    assert_counts(s, u);
    mt_unlock(&s->ledger.mu);
    mt_watch_moved(&s->watch);
}

/* One off a unit's count; what is 0 was ended twice, which is a fault. what NULL: it is none. */
static void end(mt_store *s, const mt__unit *u, int64_t *count, const char *what)
{
    char text[256];
    int  twice;

    mt_lock(&s->ledger.mu);
    if (!(twice = *count == 0)) {
        *count -= 1;
        pthread_cond_broadcast(&s->ledger.changed);
        mt_watch_moved(&s->watch);
    }
    mt_unlock(&s->ledger.mu);
    if (twice && what != NULL) {
        snprintf(text, sizeof text, "unit %s: %s ended that was not announced", u->name, what);
        mt_ledger_fault(s, MT_ESTATE, text);
    }
}

/* All of these that were begun and are not counted any more have ended here; of those that are,
 * `more` are as good as ended. After a fault nobody is told so: it is not known what they did. */
static void tell(mt_store *s, const mt__unit *u, mt_unit_count what, const int64_t *count,
                 uint64_t more)
{
    uint64_t ended;

    if (!u->shared)
        return;
    mt_lock(&s->ledger.mu);
    ended = u->begun[what] - (uint64_t)*count + more;
    if (s->ledger.fault == MT_OK && ended > mt_board_said(&u->board, what, mt_share_rank(s->share)))
        mt_board_say(&u->board, what, ended);
    mt_unlock(&s->ledger.mu);
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
    mt__mirror_touched(s, unit);
}

void mt_ledger_update_begin(mt_store *s, int unit)
{
    mt__unit *u = unit_or_fault(s, unit);
    if (u != NULL)
        begin(s, u, 1, 0, 0);
}

void mt_ledger_grads_begin(mt_store *s, int unit)
{
    mt__unit *u = unit_or_fault(s, unit);
    if (u != NULL)
        begin(s, u, 0, 1, 0);
}

void mt_ledger_update_end(mt_store *s, int unit)
{
    mt__unit *u = unit_or_fault(s, unit);
    if (u == NULL)
        return;
    if (atomic_load(&u->passing))
        mt__take_back(s, unit);         /* before who waits for this hands over again */
    end(s, u, &u->updates, "an update");
    tell(s, u, MT_COUNT_STEPPED, &u->updates, 0);
    tell(s, u, MT_COUNT_UPDATED, &u->updates, 0);
}

void mt_ledger_update_stepped(mt_store *s, int unit)
{
    mt__unit *u = unit_or_fault(s, unit);

    if (u == NULL)
        return;
    tell(s, u, MT_COUNT_STEPPED, &u->updates, 1);
    mt__ledger_stirred(s);
}

void mt_ledger_grads_end(mt_store *s, int unit)
{
    mt__unit *u = unit_or_fault(s, unit);
    if (u == NULL)
        return;
    end(s, u, &u->grads, "a hand-over of gradients");
    tell(s, u, MT_COUNT_LANDED, &u->grads, 0);
}

/* ---- waits ------------------------------------------------------------------------------ */

void mt_ledger_watchdog(mt_store *s, double seconds)
{
    mt_watch_limit(&s->watch, seconds);
    mt_lock(&s->ledger.mu);
    pthread_cond_broadcast(&s->ledger.changed);     /* those who wait look at it */
    mt_unlock(&s->ledger.mu);
}

mt_watch *mt_store_watch(mt_store *s)
{
    return &s->watch;
}

/* Under mu. In a share: every rank has ended as many as were begun here. */
static int all_have(const mt__unit *u, mt_unit_count what)
{
    return !u->shared ||
           mt_board_behind(&u->board, what, u->begun[what]) == mt_share_ranks(u->board.range.share);
}

static int is_updated(const mt__unit *u)
{
    return u->updates == 0 && all_have(u, MT_COUNT_UPDATED);
}

/* What hears of other machines' updates has their weights only when these have ended. */
static int is_stepped(const mt__unit *u)
{
    return !u->shared || mt_share_is_apart(u->board.range.share) ? is_updated(u)
                                                                 : all_have(u, MT_COUNT_STEPPED);
}

static int has_landed(const mt__unit *u)
{
    return u->grads == 0 && all_have(u, MT_COUNT_LANDED);
}

static int is_put(const mt__unit *u)
{
    return u->fetches == 0;
}

/* Under mu. In a share: what is known to have begun on this rank. */
static uint64_t begun_on(const mt__unit *u, mt_unit_count what, int rank)
{
    return what != MT_COUNT_COPIED ? u->begun[what]
                                   : mt_board_said(&u->board, MT_COUNT_SAVING, rank);
}

/* Ranks copy each other's portions. One that failed to begin a save is not waited for. */
static int is_saved(const mt__unit *u)
{
    int rank = 0, ranks = u->shared ? mt_share_ranks(u->board.range.share) : 0;

    while (rank < ranks && mt_board_said(&u->board, MT_COUNT_COPIED, rank) ==
                           begun_on(u, MT_COUNT_COPIED, rank))
        rank++;
    return u->saves == 0 && rank == ranks;
}

typedef struct awaited {
    const mt__ledger *l;
    const mt__unit   *u;
    int             (*over)(const mt__unit *u);
    mt_status         fault;
} awaited;

static int is_over_or_fault(void *arg)
{
    awaited *a = arg;

    a->fault = a->l->fault;
    return a->fault != MT_OK || a->over(a->u);
}

#define WORDS(name, what, awaited) awaited,
static const char *const words[MT_COUNTS] = { MT_COUNT_MAP(WORDS) };
static const char *const unit_words[MT_UNIT_COUNTS] = { MT_UNIT_COUNT_MAP(WORDS) };
#undef WORDS

/* What of the unit is begun and not ended by the rank, in words; 0: nothing. */
static int awaits_of_unit(const mt__unit *u, int rank, char *out, size_t cap)
{
    for (int k = 0; k < MT_UNIT_COUNTS; k++)
        if (mt_board_said(&u->board, (mt_unit_count)k, rank) <
            begun_on(u, (mt_unit_count)k, rank)) {
            snprintf(out, cap, "%s of unit %s", unit_words[k], u->name);
            return 1;
        }
    return 0;
}

/* Says which ranks' work of the unit is not over, behind what the watchdog said. */
static mt_status stuck_for(mt_store *s, const mt__unit *u)
{
    char   said[1024], due[512];
    size_t n = (size_t)snprintf(said, sizeof said, "%s", mt_last_error());

    for (int rank = 0; rank < mt_share_ranks(s->share) && n < sizeof said; rank++)
        if (awaits_of_unit(u, rank, due, sizeof due))
            n += (size_t)snprintf(said + n, sizeof said - n, "; rank %d (process %" PRId64 ") has "
                                  "still %s to end", rank, mt_share_process(s->share, rank),
                                  due);
    return mt_fail_again(MT_ESTUCK, said);
}

/* Until it is over, a fault, or the watchdog. */
static mt_status wait_until(mt_store *s, const mt__unit *u, int (*over)(const mt__unit *u),
                            const char *awaits)
{
    mt__ledger *l = &s->ledger;
    awaited     a = { .l = l, .u = u, .over = over };
    mt_status   st = mt_watch_until(&s->watch, &l->changed, &l->mu, is_over_or_fault, &a, u->name,
                                    awaits);

    if (a.fault != MT_OK)
        return fault_again(l);
    return st == MT_ESTUCK && u->shared ? stuck_for(s, u) : st;
}

static mt_status no_unit(const mt_store *s, int unit)
{
    return MT_FAIL(MT_EINVAL, "there is no unit %d; the store has %d", unit, mt_store_units(s));
}

static _Thread_local int i_save;

mt_status mt_ledger_wait_updates(mt_store *s, int unit)
{
    const mt__unit *u = mt__unit_at(s, unit);

    if (u == NULL)
        return no_unit(s, unit);
    if (i_save && mt_ledger_saving(s, unit))
        return mt_ledger_check(s);
    return wait_until(s, u, is_updated, "its update");
}

mt_status mt_ledger_wait_stepped(mt_store *s, int unit)
{
    const mt__unit *u = mt__unit_at(s, unit);

    return u == NULL ? no_unit(s, unit) : wait_until(s, u, is_stepped, "its update on all devices");
}

mt_status mt_ledger_wait_grads(mt_store *s, int unit)
{
    const mt__unit *u = mt__unit_at(s, unit);
    if (u == NULL)
        return no_unit(s, unit);
    return wait_until(s, u, has_landed, "the hand-over of its gradients");
}

int mt_ledger_updates_due(mt_store *s, int unit)
{
    const mt__unit *u = mt__unit_at(s, unit);
    int             due = 0;

    if (u != NULL) {
        mt_lock(&s->ledger.mu);
        due = !is_updated(u);
        mt_unlock(&s->ledger.mu);
    }
    return due;
}

/* ---- ranks ------------------------------------------------------------------------------ */

void mt__ledger_stirred(mt_store *s)
{
    mt_lock(&s->ledger.mu);
    pthread_cond_broadcast(&s->ledger.changed);
    mt_unlock(&s->ledger.mu);
    mt_watch_moved(&s->watch);
}

/* The first rank of those that have to, which has not come to n; ranks: all have. */
static int behind(const mt_share *h, mt_count what, uint64_t n)
{
    if (what == MT_COUNT_NORMED)
        return mt_share_said(h, what, 0) >= n ? mt_share_ranks(h) : 0;
    return mt_share_behind(h, what, n);
}

int mt__ledger_awaits(mt_store *s, int rank, char *out, size_t cap)
{
    int found = 0;

    mt_lock(&s->ledger.mu);
    if (s->ledger.asked > 0 &&
        mt_share_served(s->share, rank, mt_share_rank(s->share)) < s->ledger.asked) {
        snprintf(out, cap, "its part of what is read");
        found = 1;
    }
    if (s->ledger.apart > 0 && mt_share_speaker(s->share, rank) == rank) {
        snprintf(out, cap, "what it reads of other machines");
        found = 1;
    }
    for (int k = 0; k < MT_COUNTS && !found; k++)
        if (mt_share_said(s->share, (mt_count)k, rank) < s->ledger.meets[k] &&
            (k != MT_COUNT_NORMED || rank == 0)) {
            snprintf(out, cap, "%s", words[k]);
            found = 1;
        }
    for (int u = 0; u < mt_store_units(s) && !found; u++)
        found = awaits_of_unit(mt__unit_at(s, u), rank, out, cap);
    mt_unlock(&s->ledger.mu);
    return found;
}

void mt_ledger_meeting(mt_store *s, const char *what)
{
    mt__ledger *l = &s->ledger;
    int         me = mt_share_rank(s->share);

    mt_lock(&l->mu);
    snprintf(l->meeting, sizeof l->meeting, "%s", what != NULL ? what : "");
    if (what != NULL && l->fault == MT_OK)
        mt_share_say(s->share, MT_COUNT_MET, mt_share_said(s->share, MT_COUNT_MET, me) + 1, 0);
    mt_unlock(&l->mu);
}

/* What the rank did as its nth of these, in words. */
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

    mt_lock(&s->ledger.mu);
    for (int k = 0; k < n * n && !found; k++) {
        mt_count a = ordered[k / n], b = ordered[k % n];
        uint64_t own_b = mt_share_said(h, b, me), own_a = mt_share_said(h, a, me);
        uint64_t its_a = mt_share_said(h, a, rank), its_b = mt_share_said(h, b, rank);

        if (a == MT_COUNT_MET || its_a <= own_a || its_b >= own_b)
            continue;
        tell_done(s, a, its_a, rank, its, sizeof its);
        tell_done(s, b, own_b, me, own, sizeof own);
        snprintf(out, cap, "rank %d (process %" PRId64 ") %s, which rank %d has not, and rank %d "
                 "%s, where rank %d has not come: all processes make steps, run backwards, write "
                 "in place, and call mt.stream, mt.save and mt.load, in one order", rank,
                 mt_share_process(h, rank), its, me, me, own, rank);
        found = 1;
    }
    mt_unlock(&s->ledger.mu);
    return found;
}

typedef struct meeting {
    mt__ledger     *l;
    const mt_share *share;
    mt_count        what;
    uint64_t        n;
    uint64_t        until_ns;        /* 0: no end */
    mt_status       fault;
    int             late;
} meeting;

static int have_come_or_fault(void *arg)
{
    meeting *m = arg;
    int      come = behind(m->share, m->what, m->n) == mt_share_ranks(m->share);

    m->fault = m->l->fault;
    m->late = !come && m->until_ns != 0 && mt_now_ns() >= m->until_ns;
    m->l->meets[m->what] = come || m->fault != MT_OK || m->late ? 0 : m->n;
    return m->l->meets[m->what] == 0;
}

void mt_ledger_say(mt_store *s, mt_count what, uint64_t n, uint64_t about)
{
    mt_lock(&s->ledger.mu);
    if (s->ledger.fault == MT_OK)
        mt_share_say(s->share, what, n, about);
    mt_unlock(&s->ledger.mu);
}

mt_status mt_ledger_meet(mt_store *s, mt_count what, uint64_t n, double seconds, int *late)
{
    mt__ledger *l = &s->ledger;
    meeting     m = { .l = l, .share = s->share, .what = what, .n = n };
    char        awaits[96];
    int         rank = behind(s->share, what, n);
    mt_status   st;

    snprintf(awaits, sizeof awaits, "rank %d, that is %s", rank, words[what]);
    if (seconds > 0)
        m.until_ns = mt_now_ns() + (uint64_t)(seconds * 1e9);
    st = mt_watch_until(&s->watch, &l->changed, &l->mu, have_come_or_fault, &m, NULL, awaits);
    mt_lock(&l->mu);
    l->meets[what] = 0;                      /* one that was stuck, or interrupted, left it */
    mt_unlock(&l->mu);
    if (m.fault != MT_OK)
        return fault_again(l);
    if (late != NULL)
        *late = m.late;
    return st;
}

/* ---- saves ------------------------------------------------------------------------------ */

/* All that was announced is over, so the planes are those of one step; what is announced from here
 * on finds the announcement. */
mt_status mt_ledger_save_begin(mt_store *s, int unit)
{
    mt__unit *u = mt__unit_at(s, unit);
    int       idle;
    mt_status fault;

    if (u == NULL)
        return no_unit(s, unit);
    mt_lock(&s->ledger.mu);
    fault = s->ledger.fault;
    idle = is_updated(u) && u->saves == 0;
    if (fault == MT_OK && idle) {
        u->saves++;
        u->begun[MT_COUNT_COPIED]++;
        if (u->shared)
            mt_board_say(&u->board, MT_COUNT_SAVING, u->begun[MT_COUNT_COPIED]);
    }
    assert_counts(s, u);
    mt_unlock(&s->ledger.mu);
    if (fault != MT_OK)
        return fault_again(&s->ledger);
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
    mt_lock(&s->ledger.mu);
    if (s->ledger.wanted == unit + 1)
        s->ledger.wanted = 0;
    mt_unlock(&s->ledger.mu);
    end(s, u, &u->saves, "a save");
    tell(s, u, MT_COUNT_COPIED, &u->saves, 0);
}

int mt_ledger_all_saved(mt_store *s, int unit)
{
    const mt__unit *u = mt__unit_at(s, unit);
    int             saved = 0;

    if (u != NULL) {
        mt_lock(&s->ledger.mu);
        saved = is_saved(u);
        mt_unlock(&s->ledger.mu);
    }
    return saved;
}

int mt_ledger_saving(mt_store *s, int unit)
{
    const mt__unit *u = mt__unit_at(s, unit);
    int             saving = 0;

    if (u != NULL) {
        mt_lock(&s->ledger.mu);
        saving = u->saves > 0;
        mt_unlock(&s->ledger.mu);
    }
    return saving;
}

int mt_ledger_wanted(mt_store *s)
{
    int wanted;

    mt_lock(&s->ledger.mu);
    wanted = s->ledger.wanted - 1;
    mt_unlock(&s->ledger.mu);
    return wanted;
}

mt_status mt_ledger_wait_saved(mt_store *s, int unit)
{
    const mt__unit *u = mt__unit_at(s, unit);

    if (u == NULL)
        return no_unit(s, unit);
    mt_lock(&s->ledger.mu);
    if (u->saves > 0)
        s->ledger.wanted = unit + 1;
    mt_unlock(&s->ledger.mu);
    return wait_until(s, u, is_saved, "its save (SAVED)");
}

void mt_ledger_i_save(int on)
{
    i_save = on;
}

/* ---- copies out of HI ------------------------------------------------------------------- */

/* The mover, before the copy. An update announced after this finds the announcement, and its
 * updater waits in mt_ledger_wait_fetch until the copy is in h2d. */
mt_status mt_ledger_fetch_begin(mt_store *s, int unit, uint64_t *version)
{
    mt__unit *u = mt__unit_at(s, unit);
    int       begun = 0, settled;
    mt_status st;

    if (u == NULL)
        return no_unit(s, unit);
    settled = atomic_load(&u->home)->later != 0;        /* it is fetched from other devices */
    while (!begun) {
        MT_TRY((settled ? mt_ledger_wait_stepped : mt_ledger_wait_updates)(s, unit));
        mt_lock(&s->ledger.mu);
        /* else another was announced meanwhile */
        if ((begun = settled ? is_stepped(u) : is_updated(u))) {
            u->fetches++;
            *version = u->version;
        }
        assert_counts(s, u);
        mt_unlock(&s->ledger.mu);
    }
    return MT_OK;
fail:
    return st;
}

/* The mover, right behind the copy it put in h2d. */
mt_status mt_ledger_fetching(mt_store *s, int unit, mt_queue *h2d)
{
    const mt_dev_ops *ops = s->dev->ops;
    mt__unit         *u = mt__unit_at(s, unit);
    mt_status         st = MT_OK;

    if (u == NULL)
        return no_unit(s, unit);
    mt_lock(&s->fetched_mu);
    if (u->fetched == NULL)
        st = ops->event_open(s->dev, &u->fetched);
    if (st == MT_OK)
        st = ops->record(h2d, u->fetched);
    if (st == MT_OK)
        mt_watch_put(&s->watch, &u->copying, atomic_load(&u->home)->later ? "device update" : "h2d",
                     u->name, "copies of its weights (the event FETCHED)", u->fetched);
    mt_unlock(&s->fetched_mu);
    end(s, u, &u->fetches, NULL);
    return st;
}

/* The event, once made, stays. The host asks until it is done, and so waits for records that are
 * made meanwhile too. The lock covers the pointer only:
 * a host writer that waits here never holds up the mover. */
mt_status mt_ledger_wait_fetched(mt_store *s, int unit)
{
    mt__unit *u = mt__unit_at(s, unit);
    mt_event *fetched;
    mt_status st;

    if (u == NULL)
        return no_unit(s, unit);
    MT_TRY(wait_until(s, u, is_put, "its fetch to be put"));
    mt_lock(&s->fetched_mu);
    fetched = u->fetched;
    mt_unlock(&s->fetched_mu);
    if (fetched != NULL)
        MT_TRY(mt_watch_event(&s->watch, fetched, u->name,
                              "copies of its weights (the event FETCHED)"));
    return mt_ledger_check(s);
fail:
    return st;
}

mt_status mt_ledger_wait_fetch(mt_store *s, int unit)
{
    mt_status st = mt_ledger_wait_saved(s, unit);

    return st == MT_OK ? mt_ledger_wait_fetched(s, unit) : st;
}
