/* swap.c — blocks in a list, and two queues that fill and empty them.
 *
 * A block is free as soon as nobody knows its bundle any more; copies from and to it may still be in
 * their queues. So nothing waits on the host: the next bundle's copies stand behind them, by the order
 * of `out` and by EMPTIED. Only a block that is given up for a larger one has to be waited for. */
#include "swap.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define ALIGN       ((size_t)512)        /* of a part in its block */
#define PIECE_BYTES ((size_t)32 << 20)   /* of a copy: under a millisecond of the bus */

enum { SOURCES = 1, TENSORS = 2 };       /* who still needs a bundle: mt_swap_left, mt_swap_drop */

typedef struct block {                   /* all under mu */
    mt_arena  arena;
    mt_event *filled;                    /* recorded on out behind the copies out */
    mt_event *landed;                   /* recorded on back behind the copies back */
    uint64_t  bundle;                    /* 0: free */
    mt_post   filling, landing;          /* of the two queues, until those are done */
    int       needed, unit;
    size_t   *bytes;                     /* [n] of its parts */
    int       n;
    struct block *next;
} block;

struct mt_swap {
    mt_dev         *dev;
    mt_pool        *pool;
    mt_queue       *out, *back;          /* whoever holds mu puts */
    mt_event       *made, *room;         /* recorded on run, and waited for at once */
    mt_timeline    *timeline;
    mt_store       *store;               /* NULL: nobody watches */
    pthread_mutex_t mu;
    block          *blocks;              /* mu, as what follows */
    uint64_t        bundles;             /* made so far */
    mt_swap_stats   stats;
    mt_debug        debug;
};

/* ---- blocks ----------------------------------------------------------------------------- */

static size_t aligned(size_t bytes)
{
    return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

static size_t bytes_of(const mt_swap_part *parts, int n)
{
    size_t total = 0;

    for (int i = 0; i < n; i++)
        total += aligned(parts[i].bytes);
    return total;
}

static block *find(mt_swap *w, uint64_t bundle)
{
    block *b = bundle > 0 ? w->blocks : NULL;

    while (b != NULL && b->bundle != bundle)
        b = b->next;
    return b;
}

static void block_close(mt_swap *w, block *b)
{
    w->stats.host_bytes -= b->arena.bytes;
    if (w->store != NULL) {
        mt_watch_take(mt_store_watch(w->store), &b->filling);
        mt_watch_take(mt_store_watch(w->store), &b->landing);
    }
    w->dev->ops->event_close(b->filled);
    w->dev->ops->event_close(b->landed);
    mt_arena_close(&b->arena);
    free(b->bytes);
    free(b);
}

static mt_status block_open(mt_swap *w, size_t bytes, block **out)
{
    block    *b = calloc(1, sizeof *b);
    mt_status st;

    if (b == NULL)
        return MT_FAIL(MT_ENOMEM, "swap: calloc(%zu)", sizeof *b);
    MT_TRY(w->dev->ops->event_open(w->dev, &b->filled));
    MT_TRY(w->dev->ops->event_open(w->dev, &b->landed));
    MT_TRY(mt_arena_open(&b->arena, bytes, w->pool, w->dev, "activations on the host",
                         w->stats.host_bytes));
    w->stats.host_bytes += b->arena.bytes;
    b->next = w->blocks;
    w->blocks = b;
    *out = b;
    return MT_OK;

fail:
    block_close(w, b);
    return st;
}

/* The smallest free block that holds `bytes`; else *largest is the largest free one, NULL if none is. */
static block *fitting(mt_swap *w, size_t bytes, block **largest)
{
    block *best = NULL;

    *largest = NULL;
    for (block *b = w->blocks; b != NULL; b = b->next) {
        if (b->bundle != 0)
            continue;
        if (b->arena.bytes >= bytes && (best == NULL || b->arena.bytes < best->arena.bytes))
            best = b;
        if (*largest == NULL || b->arena.bytes > (*largest)->arena.bytes)
            *largest = b;
    }
    return best;
}

/* Its copies must be over before its memory goes. */
static mt_status give_up(mt_swap *w, block *b)
{
    block   **at = &w->blocks;
    mt_status st;

    MT_TRY(w->dev->ops->sync_event(b->filled));
    MT_TRY(w->dev->ops->sync_event(b->landed));
    while (*at != b)
        at = &(*at)->next;
    *at = b->next;
    block_close(w, b);
fail:
    return st;
}

static mt_status take(mt_swap *w, size_t bytes, int n, block **out)
{
    block    *largest, *b = fitting(w, bytes, &largest);
    size_t   *grown;
    mt_status st;

    if (b == NULL && largest != NULL)
        MT_TRY(give_up(w, largest));
    if (b == NULL)
        MT_TRY(block_open(w, bytes, &b));
    if (n > b->n) {
        if ((grown = realloc(b->bytes, (size_t)n * sizeof *grown)) == NULL)
            return MT_FAIL(MT_ENOMEM, "swap: no memory to note %d tensors", n);
        b->bytes = grown;
    }
    b->n = n;
    *out = b;
    return MT_OK;
fail:
    return st;
}

static void no_longer(mt_swap *w, block *b, int who)
{
    if (b == NULL)
        return;
    b->needed &= ~who;
    if (b->needed == 0) {
        b->bundle = 0;
        w->stats.used_bytes -= b->arena.bytes;
    }
}

/* ---- copies ----------------------------------------------------------------------------- */

static mt_status copy_pieces(mt_queue *q, char *dst, const char *src, size_t bytes)
{
    mt_status st = MT_OK;

    for (size_t at = 0; at < bytes && st == MT_OK; at += PIECE_BYTES)
        st = q->dev->ops->copy(q, dst + at, src + at,
                               bytes - at < PIECE_BYTES ? bytes - at : PIECE_BYTES);
    return st;
}

static mt_status wait_for(mt_swap *w, mt_queue *q, mt_event *e, unsigned edge)
{
    return w->debug.skip & edge ? MT_OK : w->dev->ops->wait(q, e);
}

/* q waits for what run was given so far. */
static mt_status behind(mt_swap *w, mt_queue *q, mt_event *e, mt_queue *run, unsigned edge)
{
    mt_status st = w->dev->ops->record(run, e);

    return st == MT_OK ? wait_for(w, q, e, edge) : st;
}

/* All wanted parts between device memory and the block, and the event behind them. */
static mt_status copy_all(mt_swap *w, block *b, const mt_swap_part *parts, int leaving, uint64_t *count)
{
    mt_queue *q = leaving ? w->out : w->back;
    char     *host = b->arena.base;
    uint64_t  copied = 0;
    mt_span   span = { 0 };
    mt_status st = MT_OK;

    mt_timeline_begin(w->timeline, &span, leaving ? MT_LANE_OUT : MT_LANE_BACK, MT_WORK_SWAP, b->unit, q);
    for (int i = 0; i < b->n; i++) {
        char *mem = parts[i].mem;

        if (mem != NULL)
            MT_TRY(leaving ? copy_pieces(q, host, mem, parts[i].bytes)
                           : copy_pieces(q, mem, host, parts[i].bytes));
        copied += mem != NULL ? parts[i].bytes : 0;
        host += aligned(parts[i].bytes);
    }
    mt_timeline_end(w->timeline, &span, copied, q);
    MT_TRY(w->dev->ops->record(q, leaving ? b->filled : b->landed));
    if (w->store != NULL)
        mt_watch_put(mt_store_watch(w->store), leaving ? &b->filling : &b->landing,
                     leaving ? "swap out" : "swap back", mt_store_name(w->store, b->unit),
                     leaving ? "copies of what it keeps (the event LEFT)" : "copies of what it keeps (the event BACK)",
                     leaving ? b->filled : b->landed);
    *count += copied;
    if (w->debug.sync)
        st = w->dev->ops->sync(q);
    return st;

fail:
    mt_timeline_end(w->timeline, &span, copied, q);
    (void)w->dev->ops->sync(q);          /* pieces may be under way, and the caller frees its memory */
    return st;
}

/* ---- the door --------------------------------------------------------------------------- */

mt_status mt_swap_out(mt_swap *w, int unit, const mt_swap_part *parts, int n, mt_queue *run,
                      uint64_t *bundle)
{
    block    *b;
    mt_status st;

    pthread_mutex_lock(&w->mu);
    MT_TRY(take(w, bytes_of(parts, n), n, &b));
    for (int i = 0; i < n; i++)
        b->bytes[i] = parts[i].bytes;
    b->unit = unit;
    MT_TRY(behind(w, w->out, w->made, run, MT_EDGE_COMPUTED));
    MT_TRY(wait_for(w, w->out, b->landed, MT_EDGE_EMPTIED));
    MT_TRY(copy_all(w, b, parts, 1, &w->stats.out_bytes));
    b->bundle = ++w->bundles;
    b->needed = SOURCES | TENSORS;
    w->stats.used_bytes += b->arena.bytes;
    *bundle = b->bundle;
fail:
    pthread_mutex_unlock(&w->mu);
    return st;
}

static mt_status unknown(uint64_t bundle)
{
    return MT_FAIL(MT_ESTATE, "swap: bundle %llu is not there; it was dropped",
                   (unsigned long long)bundle);
}

mt_status mt_swap_left(mt_swap *w, uint64_t bundle, mt_queue *run)
{
    block    *b;
    mt_status st;

    pthread_mutex_lock(&w->mu);
    b = find(w, bundle);
    st = b == NULL ? unknown(bundle) : wait_for(w, run, b->filled, MT_EDGE_LEFT);
    if (st == MT_OK)
        no_longer(w, b, SOURCES);
    pthread_mutex_unlock(&w->mu);
    return st;
}

static mt_status fits(const block *b, const mt_swap_part *landing, int n)
{
    if (n != b->n)
        return MT_FAIL(MT_EINVAL, "swap: %d tensors are to come back of %d", n, b->n);
    for (int i = 0; i < n; i++)
        if (landing[i].bytes != b->bytes[i])
            return MT_FAIL(MT_EINVAL, "swap: tensor %d left with %zu bytes and is to come back with %zu",
                           i, b->bytes[i], landing[i].bytes);
    return MT_OK;
}

mt_status mt_swap_back(mt_swap *w, uint64_t bundle, const mt_swap_part *landing, int n, mt_queue *run)
{
    block    *b;
    mt_status st;

    pthread_mutex_lock(&w->mu);
    if ((b = find(w, bundle)) == NULL)
        MT_TRY(unknown(bundle));
    MT_TRY(fits(b, landing, n));
    MT_TRY(behind(w, w->back, w->room, run, MT_EDGE_ROOM));
    MT_TRY(wait_for(w, w->back, b->filled, MT_EDGE_KEPT));
    MT_TRY(copy_all(w, b, landing, 0, &w->stats.back_bytes));
fail:
    pthread_mutex_unlock(&w->mu);
    return st;
}

mt_status mt_swap_await(mt_swap *w, uint64_t bundle, mt_queue *run)
{
    block    *b;
    mt_status st;

    pthread_mutex_lock(&w->mu);
    b = find(w, bundle);
    st = b == NULL ? unknown(bundle) : wait_for(w, run, b->landed, MT_EDGE_BACK);
    pthread_mutex_unlock(&w->mu);
    return st;
}

void mt_swap_drop(mt_swap *w, uint64_t bundle)
{
    pthread_mutex_lock(&w->mu);
    no_longer(w, find(w, bundle), TENSORS);
    pthread_mutex_unlock(&w->mu);
}

/* ---- open and close --------------------------------------------------------------------- */

mt_status mt_swap_open(mt_dev *dev, mt_pool *pool, mt_swap **out)
{
    mt_swap  *w = calloc(1, sizeof *w);
    mt_status st;

    if (w == NULL)
        return MT_FAIL(MT_ENOMEM, "swap: calloc(%zu)", sizeof *w);
    w->dev = dev;
    w->pool = pool;
    pthread_mutex_init(&w->mu, NULL);
    MT_TRY(dev->ops->queue_open(dev, "swap-out", &w->out));
    MT_TRY(dev->ops->queue_open(dev, "swap-back", &w->back));
    MT_TRY(dev->ops->event_open(dev, &w->made));
    MT_TRY(dev->ops->event_open(dev, &w->room));
    *out = w;
    return MT_OK;

fail:
    mt_swap_close(w);
    return st;
}

void mt_swap_close(mt_swap *w)
{
    if (w == NULL)
        return;
    if (w->out != NULL)
        w->dev->ops->queue_close(w->out);
    if (w->back != NULL)
        w->dev->ops->queue_close(w->back);
    for (block *b = w->blocks, *next; b != NULL; b = next) {
        next = b->next;
        block_close(w, b);
    }
    w->dev->ops->event_close(w->made);
    w->dev->ops->event_close(w->room);
    pthread_mutex_destroy(&w->mu);
    free(w);
}

void mt_swap_timeline(mt_swap *w, mt_timeline *t)
{
    w->timeline = t;
}

void mt_swap_store(mt_swap *w, mt_store *s)
{
    w->store = s;
}

void mt_swap_debug(mt_swap *w, mt_debug d)
{
    pthread_mutex_lock(&w->mu);
    w->debug = d;
    pthread_mutex_unlock(&w->mu);
}

mt_swap_stats mt_swap_stats_get(mt_swap *w)
{
    mt_swap_stats stats;

    pthread_mutex_lock(&w->mu);
    stats = w->stats;
    pthread_mutex_unlock(&w->mu);
    return stats;
}
