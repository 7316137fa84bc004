/* asks.c — in a share: what one rank reads of a unit whose planes are at home elsewhere, the
 * others copy to host memory, each its own portion.
 *
 * A request is a number that grows, a unit and planes of it. A thread of every other rank sees it,
 * copies, and says that it has (mt_share_serve); it takes nothing of Python's, and waits for
 * nothing that is announced: who asks has waited for that, as any reader does, and all ranks
 * announce the same. So one rank may ask while the others are anywhere, a collective included, and
 * several may at once; each has one request at a time. A rank that ended, or closed its engine,
 * before it has served is a fault of who asks (peers.c).
 */
#include "store_impl.h"

#include "clock.h"
#include "forks.h"

#include <inttypes.h>
#include <string.h>

#define LOOK_MS 100

/* As a number for the other ranks. */
#define UNIT_AT   32
#define CLAIMS    (UINT64_C(1) << 31)

/* ---- who asks ----------------------------------------------------------------------------- */

typedef struct asker {
    mt_store  *s;
    uint64_t   n;                    /* the request; 0: it waits for its turn */
    mt_status  fault;
} asker;

/* Under ledger.mu. */
static int has_turn(void *arg)
{
    asker *a = arg;

    a->fault = a->s->ledger.fault;
    if (a->fault != MT_OK || a->s->ledger.asking)
        return a->fault != MT_OK;
    return a->s->ledger.asking = 1;
}

/* Under ledger.mu. All others have served. */
static int is_served(void *arg)
{
    asker          *a = arg;
    const mt_share *h = a->s->share;
    int             rank = 0, me = mt_share_rank(h);

    while (rank < mt_share_ranks(h) && (rank == me || mt_share_served(h, rank, me) >= a->n))
        rank++;
    a->fault = a->s->ledger.fault;
    return rank == mt_share_ranks(h) || a->fault != MT_OK;
}

static mt_status wait_until(asker *a, int (*over)(void *), int unit, const char *awaits)
{
    mt_store *s = a->s;
    mt_status st = mt_watch_until(&s->watch, &s->ledger.changed, &s->ledger.mu, over, a,
                                  mt_store_name(s, unit), awaits);

    return a->fault != MT_OK ? mt_ledger_check(s) : st;
}

static void set_asked(mt_store *s, uint64_t n, int asking)
{
    mt_lock(&s->ledger.mu);
    s->ledger.asked = n;
    s->ledger.asking = asking;
    pthread_cond_broadcast(&s->ledger.changed);
    mt_unlock(&s->ledger.mu);
}

mt_status mt__ask(mt_store *s, int unit, unsigned planes, int claims)
{
    asker     a = { .s = s };
    uint64_t  about = (uint64_t)(unsigned)unit << UNIT_AT | (claims ? CLAIMS : 0) | planes;
    mt_status st;

    MT_TRY(wait_until(&a, has_turn, unit, "this rank's request before"));
    a.n = mt_share_said(s->share, MT_COUNT_ASKED, mt_share_rank(s->share)) + 1;
    set_asked(s, a.n, 1);
    mt_ledger_say(s, MT_COUNT_ASKED, a.n, about);
    st = wait_until(&a, is_served, unit, "what other ranks have of it");
    set_asked(s, 0, 0);
fail:
    return st;
}

/* ---- who serves --------------------------------------------------------------------------- */

/* The number first: what it is about may be the next request's by now, and is done again then. */
static void serve(mt_store *s, int rank)
{
    uint64_t  n = mt_share_said(s->share, MT_COUNT_ASKED, rank), about;
    int       gone = 0;
    mt_status st;

    if (n <= mt_share_served(s->share, mt_share_rank(s->share), rank) ||
        mt_ledger_check(s) != MT_OK)
        return;
    about = mt_share_about(s->share, MT_COUNT_ASKED, rank);
    atomic_fetch_add(&s->asks.served, 1);
    mt_lock(&s->asks.serving);
    st = mt__mirror_serve(s, (int)(about >> UNIT_AT), (unsigned)(about & (CLAIMS - 1)),
                          (about & CLAIMS) != 0, &gone);
    mt_unlock(&s->asks.serving);
    if (st != MT_OK)
        mt_ledger_fault(s, st, mt_last_error());
    else if (!gone)
        mt_share_serve(s->share, rank, n, about);
}

static void *serve_all(void *arg)
{
    mt_store *s = arg;
    uint32_t  seen = mt_share_word(s->share) - 1, word;

    (void)pthread_setname_np(pthread_self(), "mt-serves");
    mt_watch_i_am("what other ranks read");
    while (!atomic_load(&s->asks.stop)) {
        word = mt_share_word(s->share);
        for (int rank = 0; word != seen && rank < mt_share_ranks(s->share); rank++)
            if (rank != mt_share_rank(s->share))
                serve(s, rank);
        seen = word;
        mt_share_sleep(s->share, word, LOOK_MS);
    }
    return NULL;
}

/* Under serving. */
mt_status mt__asks_open(mt_store *s)
{
    int error;

    if (s->asks.runs)
        return MT_OK;
    if ((error = pthread_create(&s->asks.thread, NULL, serve_all, s)) != 0)
        return MT_FAIL(MT_ENOMEM, "store: no thread to serve other ranks: %s", strerror(error));
    s->asks.forks = mt_forks();
    s->asks.runs = 1;
    return MT_OK;
}

static int some_may_ask(const mt_store *s)
{
    for (int rank = 0; rank < mt_share_ranks(s->share); rank++)
        if (rank != mt_share_rank(s->share) && !mt_share_parted(s->share, rank))
            return 1;
    return 0;
}

void mt_store_stay(mt_store *s, double seconds)
{
    uint64_t since = mt_now_ns();
    int      served = 0;

    if (s->share == NULL || !s->asks.runs || s->asks.forks != mt_forks())
        return;
    mt_share_part(s->share);
    while (some_may_ask(s) && (double)(mt_now_ns() - since) < seconds * 1e9) {
        uint32_t word = mt_share_word(s->share);

        if (served != atomic_load(&s->asks.served)) {
            served = atomic_load(&s->asks.served);
            since = mt_now_ns();
        }
        mt_share_sleep(s->share, word, LOOK_MS);
    }
}

void mt_store_serve_end(mt_store *s)
{
    if (s == NULL || s->share == NULL || !s->asks.runs || s->asks.forks != mt_forks())
        return;
    s->asks.runs = 0;
    atomic_store(&s->asks.stop, 1);
    (void)pthread_join(s->asks.thread, NULL);
}
