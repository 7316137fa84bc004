/* swap.c — bundles and bays in lists, and two queues that fill and empty bays.
 *
 * A bay of ours is free as soon as nobody knows its bundle any more; copies from and to it may
 * still be in their queues. So nothing waits on the host: the next bundle's copies stand behind
 * them, by the order of `out` and by EMPTIED. Only a bay that is given up for a larger one has to
 * be waited for. */
#include "swap.h"

#include <stdlib.h>
#include <string.h>

#define ALIGN       ((size_t)512)        /* of a part in its bay */
#define SLICE_BYTES ((size_t)32 << 20)   /* of a copy: under a millisecond of the bus */

/* Who still needs a bundle: mt_swap_left, mt_swap_drop, and a mt_swap_back that is under way. */
enum { SOURCES = 1, TENSORS = 2, COMING = 4 };

typedef struct bay {                     /* of bundles that stay in host memory. All under mu */
    mt_bay      b;
    int         taken;                   /* a bundle has it */
    struct bay *next;
} bay;

typedef struct bundle {                  /* all under mu */
    uint64_t    number;
    int         needed, unit;            /* needed: by whom, see above */
    bay        *bay;                     /* tier HOST: its own; else NULL */
    mt_spilled *spilled;                 /* tier FILE; else NULL */
    struct bundle *next;
    int         n;
    size_t      bytes[];                 /* [n] of each part */
} bundle;

struct mt_swap {
    const mt_context *cx;
    mt_dev         *dev;
    mt_queue       *out, *back;          /* work is put in them under mu */
    mt_event       *made, *room;         /* recorded on run, and waited for at once */
    mt_post         making;              /* tells the watchdog of `made`. mu */
    mt_store       *store;
    mt_spill       *spill;               /* NULL: there is no file */
    mt_mutex        mu;
    pthread_cond_t  turned;              /* of mt_watch_cond: the turn is free */
    int             busy;                /* somebody has the turn. mu, as what follows */
    bay            *bays;
    bundle         *there;               /* all bundles, the latest first */
    uint64_t        bundles;             /* so many were made */
    mt_swap_stats   stats;
};

static mt_watch *watch_of(const mt_swap *w)
{
    return mt_store_watch(w->store);
}

/* Under mu, at each door: a taken bay is one bundle's, and bytes are counted once. */
static void assert_state(const mt_swap *w)
{
    size_t host = 0, used = 0;
    int    taken = 0;

    if (!MT_IS_CHECKED)
        return;
    MT_ASSERT(mt_holds(&w->mu));
    for (const bay *b = w->bays; b != NULL; b = b->next) {
        host += b->b.arena.bytes;
        used += b->taken ? b->b.arena.bytes : 0;
        taken += b->taken;
    }
    for (const bundle *b = w->there; b != NULL; b = b->next) {
        MT_ASSERT((b->bay == NULL) != (b->spilled == NULL) && b->needed != 0);
        MT_ASSERT(b->bay == NULL || b->bay->taken);
        MT_ASSERT(b->number <= w->bundles && (b->next == NULL || b->next->number < b->number));
        taken -= b->bay != NULL;
    }
    MT_ASSERT(taken == 0 && host == w->stats.host_bytes && used == w->stats.used_bytes);
}

/* ---- bays ----------------------------------------------------------------------------- */

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

static void bay_close(mt_swap *w, bay *b)
{
    w->stats.host_bytes -= b->b.arena.bytes;
    mt_bay_close(&b->b, w->dev, watch_of(w));
    free(b);
}

/* The smallest free bay that holds `bytes`; else *largest is the largest free one, NULL if none
 * is. Nothing at all is held by bays of their own. */
static bay *fitting(mt_swap *w, size_t bytes, bay **largest)
{
    bay *best = NULL;

    *largest = NULL;
    for (bay *b = w->bays; b != NULL; b = b->next) {
        if (b->taken || (b->b.arena.bytes == 0) != (bytes == 0))
            continue;
        if (b->b.arena.bytes >= bytes && (best == NULL || b->b.arena.bytes < best->b.arena.bytes))
            best = b;
        if (*largest == NULL || b->b.arena.bytes > (*largest)->b.arena.bytes)
            *largest = b;
    }
    return best;
}

#define LEFT "copies of what it keeps (the event LEFT)"
#define BACK "copies of what it keeps (the event BACK)"

/* Where no free bay holds so many bytes, the largest of them gives way to a new one; its copies
 * must be over before its memory goes. */
static mt_status take(mt_swap *w, size_t bytes, bay **out)
{
    bay      *largest, *b = fitting(w, bytes, &largest), **at = &w->bays;
    mt_status st;

    if (b == NULL && largest != NULL) {
        MT_DO(mt_watch_event(watch_of(w), largest->b.filled, largest->b.filling.unit, LEFT));
        MT_DO(mt_watch_event(watch_of(w), largest->b.landed, largest->b.landing.unit, BACK));
        while (*at != largest)
            at = &(*at)->next;
        *at = largest->next;
        bay_close(w, largest);
    }
    if (b == NULL) {
        MT_DO(MT_MAKE(b, 1, "swap"));
        st = mt_bay_open(&b->b, bytes, w->dev, w->cx->pool, w->stats.host_bytes);
        if (st != MT_OK) {
            free(b);
            return st;
        }
        w->stats.host_bytes += b->b.arena.bytes;
        b->next = w->bays;
        w->bays = b;
    }
    b->taken = 1;
    w->stats.used_bytes += b->b.arena.bytes;
    *out = b;
    return MT_OK;
}

/* ---- bundles ---------------------------------------------------------------------------- */

static mt_status find(mt_swap *w, uint64_t number, bundle **out)
{
    bundle *b = w->there;

    while (b != NULL && b->number != number)
        b = b->next;
    if (b == NULL)
        return MT_FAIL(MT_ESTATE, "swap: bundle %llu is not there; it was dropped",
                       (unsigned long long)number);
    *out = b;
    return MT_OK;
}

/* NULL: its bytes are in the file alone, so no copy of it is under way. */
static mt_bay *bay_of(mt_swap *w, const bundle *b)
{
    return b->bay != NULL ? &b->bay->b : mt_spill_bay(w->spill, b->spilled);
}

/* With a bay that nothing but copies in `out` and `back` uses. */
static mt_status bundle_new(mt_swap *w, int unit, const mt_swap_part *parts, int n,
                            mt_swap_tier tier, bundle **out)
{
    bundle   *b = calloc(1, sizeof *b + (size_t)n * sizeof *b->bytes);
    mt_status st = MT_OK;

    if (b == NULL)
        return MT_FAIL(MT_ENOMEM, "swap: no memory to note %d tensors", n);
    b->number = w->bundles + 1;
    b->unit = unit;
    b->n = n;
    for (int i = 0; i < n; i++)
        b->bytes[i] = parts[i].bytes;
    /* a file has nothing to do with nothing */
    if (tier == MT_SWAP_HOST || bytes_of(parts, n) == 0)
        st = take(w, bytes_of(parts, n), &b->bay);
    else if (w->spill != NULL) {
        mt_unlock(&w->mu);               /* for a drive, and memory */
        st = mt_spill_new(w->spill, unit, b->number, bytes_of(parts, n), &b->spilled);
        mt_lock(&w->mu);
    } else
        st = MT_FAIL(MT_ESTATE, "swap: what windows keep is to go to a file, and there is none; "
                     "name a directory");
    if (st != MT_OK)
        free(b);
    else
        *out = b;
    return st;
}

static void bundle_close(mt_swap *w, bundle *b)
{
    if (b->bay != NULL) {
        b->bay->taken = 0;
        w->stats.used_bytes -= b->bay->b.arena.bytes;
    } else
        mt_spill_drop(w->spill, b->spilled);
    free(b);
}

static void no_longer(mt_swap *w, bundle *b, int who)
{
    bundle **at = &w->there;

    if ((b->needed &= ~who) != 0)
        return;
    while (*at != b)
        at = &(*at)->next;
    *at = b->next;
    bundle_close(w, b);
}

/* ---- copies ----------------------------------------------------------------------------- */

static mt_status copy_slices(mt_queue *q, char *dst, const char *src, size_t bytes)
{
    mt_status st = MT_OK;

    for (size_t at = 0; at < bytes && st == MT_OK; at += SLICE_BYTES)
        st = q->dev->ops->copy(q, dst + at, src + at,
                               bytes - at < SLICE_BYTES ? bytes - at : SLICE_BYTES);
    return st;
}

static mt_status wait_for(mt_swap *w, mt_queue *q, mt_event *e, unsigned edge)
{
    return mt_skips(w->cx, edge) ? MT_OK : w->dev->ops->wait(q, e);
}

/* q waits for what run was given so far. */
static mt_status behind(mt_swap *w, mt_queue *q, mt_event *e, mt_queue *run, unsigned edge)
{
    mt_status st = w->dev->ops->record(run, e);

    return st == MT_OK ? wait_for(w, q, e, edge) : st;
}

/* All wanted parts between device memory and the bay, and the event behind them. */
static mt_status copy_all(mt_swap *w, const bundle *b, mt_bay *m, const mt_swap_part *parts,
                          int leaving, uint64_t *count)
{
    mt_queue *q = leaving ? w->out : w->back;
    char     *host = m->arena.base;
    uint64_t  copied = 0;
    mt_span   span = { 0 };
    mt_status st = MT_OK;

    mt_timeline_begin(w->cx->timeline, &span, leaving ? MT_LANE_OUT : MT_LANE_BACK, MT_WORK_SWAP,
                      b->unit, q);
    for (int i = 0; i < b->n; i++) {
        char *mem = parts[i].mem;

        if (mem != NULL)
            MT_TRY(leaving ? copy_slices(q, host, mem, parts[i].bytes)
                           : copy_slices(q, mem, host, parts[i].bytes));
        copied += mem != NULL ? parts[i].bytes : 0;
        host += aligned(parts[i].bytes);
    }
    mt_timeline_end(w->cx->timeline, &span, copied, q);
    MT_TRY(w->dev->ops->record(q, leaving ? m->filled : m->landed));
    mt_watch_put(watch_of(w), leaving ? &m->filling : &m->landing,
                 leaving ? "swap out" : "swap back", mt_store_name(w->store, b->unit),
                 leaving ? LEFT : BACK, leaving ? m->filled : m->landed);
    *count += copied;
    if (mt_syncs(w->cx))
        st = w->dev->ops->sync(q);
    return st;

fail:
    mt_timeline_end(w->cx->timeline, &span, copied, q);
    (void)w->dev->ops->sync(q);     /* slices may be under way, and the caller frees its memory */
    return st;
}

/* ---- the turn --------------------------------------------------------------------------- */

static int is_ours(void *arg)
{
    mt_swap *w = arg;

    return w->busy ? 0 : (w->busy = 1);
}

/* Returns under mu, which whoever has the turn lets go of to wait for a drive. */
static mt_status begin_turn(mt_swap *w)
{
    MT_DO(mt_watch_until(watch_of(w), &w->turned, &w->mu, is_ours, w, NULL,
                         "what others keep, on its way out or back"));
    mt_lock(&w->mu);
    assert_state(w);
    return MT_OK;
}

static void end_turn(mt_swap *w)
{
    assert_state(w);
    w->busy = 0;
    pthread_cond_broadcast(&w->turned);
    mt_unlock(&w->mu);
}

/* ---- the door --------------------------------------------------------------------------- */

/* Behind what fills it: it may be written. */
static mt_status fill(mt_swap *w, bundle *b, const mt_swap_part *parts, mt_queue *run)
{
    mt_bay   *m = bay_of(w, b);
    mt_status st = MT_OK;

    MT_DO(behind(w, w->out, w->made, run, MT_EDGE_COMPUTED));
    mt_watch_compute(watch_of(w), &w->making, mt_store_name(w->store, b->unit),
                     "its kernels (the event COMPUTED)", w->made);
    if (b->bay != NULL)                  /* of another's the spill has waited: DRAINED */
        MT_DO(wait_for(w, w->out, m->landed, MT_EDGE_EMPTIED));
    MT_DO(copy_all(w, b, m, parts, 1, &w->stats.out_bytes));
    if (b->spilled != NULL) {            /* with overlap off it waits for the drive */
        mt_unlock(&w->mu);
        st = mt_spill_filled(w->spill, b->spilled);
        mt_lock(&w->mu);
    }
    return st;
}

mt_status mt_swap_out(mt_swap *w, int unit, const mt_swap_part *parts, int n, mt_swap_tier tier,
                      mt_queue *run, uint64_t *number)
{
    bundle   *b = NULL;
    mt_status st;

    MT_DO(begin_turn(w));
    MT_TRY(bundle_new(w, unit, parts, n, tier, &b));
    MT_TRY(fill(w, b, parts, run));
    b->needed = SOURCES | TENSORS;
    b->next = w->there;
    w->there = b;
    *number = b->number;
    w->bundles = b->number;
    end_turn(w);
    return MT_OK;

fail:
    if (b != NULL)
        bundle_close(w, b);
    end_turn(w);
    return st;
}

/* run waits for the copies one way, LEFT or BACK, unless they are over. */
static mt_status waits(mt_swap *w, uint64_t number, mt_queue *run, unsigned edge)
{
    int       leaves = edge == MT_EDGE_LEFT;
    mt_bay   *m;
    bundle   *b;
    mt_status st;

    mt_lock(&w->mu);
    assert_state(w);
    MT_TRY(find(w, number, &b));
    if ((m = bay_of(w, b)) != NULL)
        MT_TRY(wait_for(w, run, leaves ? m->filled : m->landed, edge));
    no_longer(w, b, leaves ? SOURCES : 0);
fail:
    mt_unlock(&w->mu);
    return st;
}

mt_status mt_swap_left(mt_swap *w, uint64_t number, mt_queue *run)
{
    return waits(w, number, run, MT_EDGE_LEFT);
}

mt_status mt_swap_await(mt_swap *w, uint64_t number, mt_queue *run)
{
    return waits(w, number, run, MT_EDGE_BACK);
}

static mt_status empty(mt_swap *w, bundle *b, const mt_swap_part *landing)
{
    mt_bay   *m = bay_of(w, b);
    mt_status st = wait_for(w, w->back, m->filled, MT_EDGE_KEPT);

    return st == MT_OK ? copy_all(w, b, m, landing, 0, &w->stats.back_bytes) : st;
}

static mt_status come_back(mt_swap *w, bundle *b, const mt_swap_part *landing, int n, mt_queue *run)
{
    mt_status st;

    if (n != b->n)
        return MT_FAIL(MT_EINVAL, "swap: %d tensors are to come back of %d", n, b->n);
    for (int i = 0; i < n; i++)
        if (landing[i].bytes != b->bytes[i])
            return MT_FAIL(MT_EINVAL,
                           "swap: tensor %d left with %zu bytes and is to come back with %zu", i,
                           b->bytes[i], landing[i].bytes);
    MT_DO(behind(w, w->back, w->room, run, MT_EDGE_ROOM));
    if (b->spilled == NULL)
        return empty(w, b, landing);
    mt_unlock(&w->mu);
    st = mt_spill_bring(w->spill, b->spilled);
    mt_lock(&w->mu);
    MT_DO(st);
    st = empty(w, b, landing);
    mt_spill_landing(w->spill, b->spilled);
    return st;
}

mt_status mt_swap_back(mt_swap *w, uint64_t number, const mt_swap_part *landing, int n,
                       mt_queue *run)
{
    bundle   *b;
    mt_status st;

    MT_DO(begin_turn(w));
    if ((st = find(w, number, &b)) == MT_OK) {
        b->needed |= COMING;             /* whoever drops it meanwhile leaves it to us */
        st = come_back(w, b, landing, n, run);
        no_longer(w, b, COMING);
    }
    end_turn(w);
    return st;
}

void mt_swap_drop(mt_swap *w, uint64_t number)
{
    bundle *b;

    mt_lock(&w->mu);
    if (find(w, number, &b) == MT_OK)
        no_longer(w, b, TENSORS);
    assert_state(w);
    mt_unlock(&w->mu);
}

/* ---- open and close --------------------------------------------------------------------- */

mt_status mt_swap_open(const mt_context *cx, mt_swap **out)
{
    mt_dev   *dev = cx->dev;
    mt_swap  *w;
    mt_status st;

    MT_TRY(MT_MAKE(w, 1, "swap"));
    *w = (mt_swap){ .cx = cx, .dev = dev, .store = cx->store };
    mt_mutex_open(&w->mu, MT_RANK_SWAP);
    MT_TRY(mt_watch_cond(&w->turned));
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
    mt_spill_stop(w->spill);             /* it waits for what is in the queues */
    w->dev->ops->queue_close(w->out);
    w->dev->ops->queue_close(w->back);
    for (bundle *b = w->there, *next; b != NULL; b = next) {
        next = b->next;
        bundle_close(w, b);
    }
    mt_spill_close(w->spill);
    for (bay *b = w->bays, *next; b != NULL; b = next) {
        next = b->next;
        bay_close(w, b);
    }
    mt_watch_take(watch_of(w), &w->making);
    w->dev->ops->event_close(w->made);
    w->dev->ops->event_close(w->room);
    pthread_cond_destroy(&w->turned);
    mt_mutex_close(&w->mu);
    free(w);
}

mt_status mt_swap_disk(mt_swap *w, mt_blocks *file, int n_bays)
{
    if (w->spill != NULL)
        return MT_FAIL(MT_ESTATE, "swap: it has a file already");
    return mt_spill_open(w->cx, file, n_bays, &w->spill);
}

mt_swap_stats mt_swap_stats_get(mt_swap *w)
{
    mt_swap_stats stats;

    mt_lock(&w->mu);
    stats = w->stats;
    if (w->spill != NULL)
        stats.spill = mt_spill_stats_get(w->spill);
    stats.host_bytes += stats.spill.host_bytes;
    mt_unlock(&w->mu);
    return stats;
}
