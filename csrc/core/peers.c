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

static void look_for_failure(mt_store *s, int rank)
{
    const char *why = mt_share_failure(s->share, rank);
    char        text[1024];

    if (why == NULL)
        return;
    snprintf(text, sizeof text, "rank %d (process %" PRId64 "): %s", rank,
             mt_share_process(s->share, rank), why);
    mt__ledger_fault_of(s, text);
}

static void look_for_end(mt_store *s, int rank)
{
    mt_presence presence = mt_share_presence(s->share, rank);
    char        awaited[512], text[1024];

    if (presence != MT_RANK_HERE)
        look_for_failure(s, rank);           /* it may have told why, since we looked last */
    if (presence == MT_RANK_HERE || !mt__ledger_awaits(s, rank, awaited, sizeof awaited))
        return;
    snprintf(text, sizeof text, "rank %d (process %" PRId64 ") %s while others waited for %s",
             rank, mt_share_process(s->share, rank),
             presence == MT_RANK_DIED ? "ended" : "closed its engine", awaited);
    mt__ledger_fault_of(s, text);
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
            mt__ledger_stirred(s);
        }
        if (mt_now_ns() - looked_ns >= LOOK_MS * UINT64_C(1000000)) {
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
