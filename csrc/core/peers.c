/* peers.c — watches the other ranks; ends this rank's waits when one of them has died. A store
 * is opened, moved and closed here too. In a share it has two threads that sleep on its word:
 *
 *     mt-peers    looks what the other ranks say, and whether they live. What a rank says may end a
 *                 wait here, so who waits in the ledger looks again. A rank that failed is a fault
 *                 here; so is one that has ended while something of it is awaited
 *     mt-serves   copies to host memory what other ranks read (mirror.c). From when units have
 *                 planes elsewhere; where ranks are on several machines from the beginning
 */
#include "store_impl.h"

#include "forks.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LOOK_MS 100              /* from one look at who lives to the next */

/* ---- who looks after other ranks ---------------------------------------------------------- */

/* The rank, with its process. */
static int name(const mt_store *s, int rank, char *out, size_t cap)
{
    int far = mt_share_speaker(s->share, rank) != rank;

    return snprintf(out, cap, "rank %d (process %" PRIu64 "%s)", rank,
                    mt_share_said(s->share, MT_COUNT_CAME, rank), far ? " of another machine" : "");
}

static void look_for_failure(mt_store *s, int rank)
{
    size_t cap;
    char   who[80], text[1024];

    if (!mt_share_said(s->share, MT_COUNT_FAILED, rank))
        return;
    name(s, rank, who, sizeof who);
    snprintf(text, sizeof text, "%s: %s", who, mt_share_why(s->share, rank, &cap));
    mt__ledger_fault_of(s, text);
}

/* When a rank was found dead, for all. Noted before the fault by which who finds it ends too, so
 * that one is found dead later. */
static void note_end(mt_store *s, int rank)
{
    if (mt_share_presence(s->share, rank) == MT_RANK_DIED && mt_share_lost_ns(s->share, rank) == 0)
        mt_share_gone(s->share, rank);
}

static void look_for_end(mt_store *s, int rank)
{
    const mt_share *h = s->share;
    mt_presence     presence = mt_share_presence(h, rank);
    int             gone = rank, first = -1, left;
    char            awaited[512], who[80], also[80] = "", text[1024];

    if (presence != MT_RANK_HERE)
        look_for_failure(s, rank);           /* it may have told why, since we looked last */
    else                                     /* nothing more is heard of it, where that one ended */
        presence = mt_share_presence(h, gone = mt_share_speaker(h, rank));
    if (presence == MT_RANK_HERE || !mt__ledger_awaits(s, rank, awaited, sizeof awaited))
        return;
    note_end(s, gone);
    /* Who ended is not always to blame: a rank closes its engine, and its process ends, where it
     * has found another one dead. The first that was gone without a word is named too. */
    for (int r = 0; r < mt_share_ranks(h); r++)
        if (mt_share_presence(h, r) == MT_RANK_DIED &&
            (first < 0 || mt_share_lost_ns(h, r) < mt_share_lost_ns(h, first)))
            first = r;
    left = mt_share_presence(h, gone) == MT_RANK_LEFT;
    if (first >= 0 && first != gone)
        snprintf(also, sizeof also, left ? ", and rank %d closed its engine"
                                         : ", and after it rank %d", gone);
    name(s, first >= 0 ? first : gone, who, sizeof who);
    snprintf(text, sizeof text, "%s %s%s while others waited for %s", who,
             left && (first < 0 || first == gone) ? "closed its engine" : "ended", also, awaited);
    mt__ledger_fault_of(s, text);
}

/* Told to all: the other one may wait where nobody comes. */
static void look_for_order(mt_store *s, int rank)
{
    char text[1024];

    if (mt__ledger_crossed(s, rank, text, sizeof text))
        mt_ledger_fault(s, MT_EPEER, text);
}

static void for_others(mt_store *s, void (*look)(mt_store *s, int rank))
{
    for (int rank = 0; rank < mt_share_ranks(s->share); rank++)
        if (rank != mt_share_rank(s->share))
            look(s, rank);
}

static void *watch_peers(void *arg)
{
    mt_store *s = arg;
    uint32_t  seen = mt_share_word(s->share) - 1, word;
    uint64_t  looked_ns = 0;

    (void)pthread_setname_np(pthread_self(), "mt-peers");
    while (!atomic_load(&s->peers.stop)) {
        if ((word = mt_share_word(s->share)) != seen) {
            for_others(s, look_for_failure);
            for_others(s, look_for_order);
            mt__ledger_stirred(s);
        }
        if (mt_now_ns() - looked_ns >= LOOK_MS * UINT64_C(1000000)) {
            for_others(s, note_end);
            for_others(s, look_for_end);
            looked_ns = mt_now_ns();
        }
        seen = word;
        mt_share_sleep(s->share, word, LOOK_MS);
    }
    return NULL;
}

/* ---- who serves them ---------------------------------------------------------------------- */

/* The number first (share.h, (3)): what it is about may be the next request's by now, and is done
 * again then. */
static void serve(mt_store *s, int rank)
{
    const mt_board *b = mt_share_board(s->share);
    uint64_t        n = mt_board_said(b, MT_COUNT_ASKED, rank), about;
    int             gone = 0;
    mt_status       st;

    if (n <= mt_board_said(b, MT_COUNT_SERVED + rank, mt_share_rank(s->share)) ||
        mt_ledger_check(s) != MT_OK)
        return;
    about = mt_board_about(b, MT_COUNT_ASKED, rank);
    atomic_fetch_add(&s->served, 1);
    MT_WITH(&s->serving) st = mt__mirror_serve(s, about, &gone);
    if (st != MT_OK)
        mt_ledger_fault(s, st, mt_last_error());
    else if (!gone)
        mt_board_say(b, MT_COUNT_SERVED + rank, n, about);
}

static void *serve_all(void *arg)
{
    mt_store *s = arg;
    uint32_t  seen = mt_share_word(s->share) - 1, word;

    (void)pthread_setname_np(pthread_self(), "mt-serves");
    mt_watch_i_am("what other ranks read");
    while (!atomic_load(&s->serves.stop)) {
        if ((word = mt_share_word(s->share)) != seen)
            for_others(s, serve);
        seen = word;
        mt_share_sleep(s->share, word, LOOK_MS);
    }
    return NULL;
}

/* ---- threads ------------------------------------------------------------------------------ */

/* Nothing to do when it runs. */
static mt_status begin(mt__thread *t, void *(*run)(void *), mt_store *s)
{
    int error = t->runs ? 0 : pthread_create(&t->thread, NULL, run, s);

    if (error != 0)
        return MT_FAIL(MT_ENOMEM, "store: no thread for other ranks: %s", strerror(error));
    t->forks = t->runs ? t->forks : mt_forks();
    t->runs = 1;
    return MT_OK;
}

/* A child of fork() has not the thread. */
static int is_running(const mt__thread *t)
{
    return t->runs && t->forks == mt_forks();
}

static void end(mt__thread *t)
{
    (void)pthread_join(t->thread, NULL);
    t->runs = 0;
}

static mt_status begin_serving(mt_store *s)
{
    MT_HOLD(&s->serving);
    return begin(&s->serves, serve_all, s);
}

void mt_store_serve_end(mt_store *s)
{
    if (s == NULL || !is_running(&s->serves))
        return;
    MT_WITH(&s->serving) atomic_store(&s->serves.stop, 1);   /* the relay knows no home any more */
    end(&s->serves);
}

void mt_store_leave(mt_store *s)
{
    mt_store_serve_end(s);
    if (s == NULL || !is_running(&s->peers))
        return;
    atomic_store(&s->peers.stop, 1);
    mt_share_once(s->share, MT_COUNT_LEFT);  /* wakes our thread too */
    end(&s->peers);
}

void mt_store_stay(mt_store *s, double seconds)
{
    uint64_t since = mt_now_ns();
    int      served = 0, rank = 0;

    if (!is_running(&s->serves))
        return;
    mt_share_once(s->share, MT_COUNT_PARTED);
    while ((double)(mt_now_ns() - since) < seconds * 1e9) {
        uint32_t word = mt_share_word(s->share);

        while (rank < mt_share_ranks(s->share) &&
               (rank == mt_share_rank(s->share) || mt_share_said(s->share, MT_COUNT_PARTED, rank) ||
                mt_share_presence(s->share, rank) != MT_RANK_HERE))
            rank++;                      /* who has parted, or left, asks no more */
        if (rank == mt_share_ranks(s->share))
            break;
        if (served != atomic_load(&s->served)) {
            served = atomic_load(&s->served);
            since = mt_now_ns();
        }
        mt_share_sleep(s->share, word, LOOK_MS);
    }
}

/* ---- the store ---------------------------------------------------------------------------- */

MT_CLOSER(mt_store_close, mt_store)

mt_status mt_store_open(const mt_context *cx, mt_store **out)
{
    mt_store *s MT_CLOSED(mt_store_close) = NULL;

    if (cx->dev == NULL)
        return MT_FAIL(MT_EINVAL, "a store needs a device; open one with mt_dev_cpu_open()");
    MT_DO(MT_MAKE(s, 1, "store"));
    *s = (mt_store){ .dev = cx->dev, .pool = cx->pool, .share = cx->share,
                     .most_lent = MT_STORE_LENT, .ledger.update_over = mt__take_back,
                     .ledger.touched = mt__mirror_touched };
    mt_mutex_open(&s->serving, MT_RANK_SERVING);
    mt_mutex_open(&s->map_mu, MT_RANK_MAP);
    mt_mutex_open(&s->fetched_mu, MT_RANK_FETCHED);
    mt_mutex_open(&s->mirror_mu, MT_RANK_MIRROR);
    mt_mutex_open(&s->ledger.mu, MT_RANK_LEDGER);
    mt_watch_open(&s->watch, cx->warn);
    MT_DO(mt_watch_cond(&s->ledger.changed));
    MT_DO(mt_watch_cond(&s->mirror_changed));
    if (s->share != NULL)
        MT_DO(begin(&s->peers, watch_peers, s));
    if (s->share != NULL && mt_share_is_apart(s->share))
        MT_DO(begin_serving(s));            /* each has planes that others read */
    *out = MT_KEEP(s);
    return MT_OK;
}

/* The caller has closed whoever worked on the store: stream, offload and updater come first. */
void mt_store_close(mt_store *s)
{
    if (s == NULL)
        return;
    mt_store_leave(s);
    for (int i = mt_store_units(s) - 1; i >= 0; i--)
        mt__unit_close(s, mt__unit_at(s, i));
    for (int i = 0; i < MT__SEGS; i++)
        free(s->seg[i]);
    mt__lent_close(s);
    mt_watch_close(&s->watch);
    mt_mutex_close(&s->serving);
    mt_mutex_close(&s->map_mu);
    mt_mutex_close(&s->fetched_mu);
    mt_mutex_close(&s->mirror_mu);
    mt_mutex_close(&s->ledger.mu);
    pthread_cond_destroy(&s->ledger.changed);
    pthread_cond_destroy(&s->mirror_changed);
    free(s);
}

mt_status mt_store_move(mt_store *s, int unit, const mt_home *to, void *of)
{
    if (mt__unit_at(s, unit) == NULL)
        return mt__no_unit(s, unit);
    if (mt_store_home(s, unit, NULL) == to)
        return MT_OK;
    if (s->share != NULL && to->away != 0)
        MT_DO(begin_serving(s));             /* what may fail, before anything moves */
    MT_HOLD(&s->serving);                    /* nobody is served of it meanwhile */
    MT_DO(mt__home_ready(s, unit, to));
    return mt__mirror_move(s, unit, to, of);
}
