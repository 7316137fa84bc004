/* peers.c — in a share: a thread that looks what the other ranks say, and whether they live.
 *
 * It sleeps on the share's word. What a rank says may end a wait here, so who waits in the ledger
 * looks again. A rank that failed is a fault here; so is one that has ended while something of it
 * is awaited. */
#include "store_impl.h"

#include "clock.h"
#include "forks.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define LOOK_MS 100              /* from one look at who lives to the next */

/* The rank, with its process. */
static int name(const mt_store *s, int rank, char *out, size_t cap)
{
    int far = mt_share_speaker(s->share, rank) != rank;

    return snprintf(out, cap, "rank %d (process %" PRId64 "%s)", rank,
                    mt_share_process(s->share, rank), far ? " of another machine" : "");
}

static void look_for_failure(mt_store *s, int rank)
{
    const char *why = mt_share_failure(s->share, rank);
    char        who[80], text[1024];

    if (why == NULL)
        return;
    name(s, rank, who, sizeof who);
    snprintf(text, sizeof text, "%s: %s", who, why);
    mt__ledger_fault_of(s, text);
}

/* When a rank was found dead, for all. Noted before the fault by which who finds it ends too, so
 * that one is found dead later. */
static void note_end(mt_store *s, int rank)
{
    if (mt_share_presence(s->share, rank) == MT_RANK_DIED && mt_share_lost_ns(s->share, rank) == 0)
        mt_share_gone(s->share, rank);
}

/* The rank whose process was the first to be gone without a word; -1: none is. */
static int first_dead(const mt_store *s)
{
    int first = -1;

    for (int rank = 0; rank < mt_share_ranks(s->share); rank++)
        if (mt_share_presence(s->share, rank) == MT_RANK_DIED &&
            (first < 0 ||
             mt_share_lost_ns(s->share, rank) < mt_share_lost_ns(s->share, first)))
            first = rank;
    return first;
}

/* Who ended is not always to blame: a rank closes its engine, and its process ends, where it has
 * found another one dead. */
static void blame(const mt_store *s, int rank, char *out, size_t cap)
{
    int    first = first_dead(s);
    int    left = mt_share_presence(s->share, rank) == MT_RANK_LEFT;
    size_t n = (size_t)name(s, first >= 0 ? first : rank, out, cap);

    if (first >= 0 && first != rank)
        snprintf(out + n, cap - n, left ? " ended, and rank %d closed its engine" :
                                          " ended, and after it rank %d", rank);
    else
        snprintf(out + n, cap - n, left ? " closed its engine" : " ended");
}

static void look_for_end(mt_store *s, int rank)
{
    mt_presence presence = mt_share_presence(s->share, rank);
    int         gone = rank;
    char        awaited[512], who[160], text[1024];

    if (presence != MT_RANK_HERE)
        look_for_failure(s, rank);           /* it may have told why, since we looked last */
    else                                     /* nothing more is heard of it, where that one ended */
        presence = mt_share_presence(s->share, gone = mt_share_speaker(s->share, rank));
    if (presence == MT_RANK_HERE || !mt__ledger_awaits(s, rank, awaited, sizeof awaited))
        return;
    note_end(s, gone);
    blame(s, gone, who, sizeof who);
    snprintf(text, sizeof text, "%s while others waited for %s", who, awaited);
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

mt_status mt__peers_open(mt_store *s)
{
    int error = pthread_create(&s->peers.thread, NULL, watch_peers, s);

    if (error != 0)
        return MT_FAIL(MT_ENOMEM, "store: no thread to look after other ranks: %s",
                       strerror(error));
    s->peers.forks = mt_forks();
    s->peers.runs = 1;
    return MT_OK;
}

void mt_store_leave(mt_store *s)
{
    mt_store_serve_end(s);
    if (s == NULL || s->share == NULL || !s->peers.runs || s->peers.forks != mt_forks())
        return;
    s->peers.runs = 0;
    atomic_store(&s->peers.stop, 1);
    mt_share_leave(s->share);                /* wakes our thread too */
    (void)pthread_join(s->peers.thread, NULL);
}
