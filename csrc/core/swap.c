/* swap.c — bundles and bays in lists, two queues that fill and empty bays, and a thread that
 * waits for both on behalf of the file.
 *
 * A bay of the tier HOST is free as soon as nobody knows its bundle any more; copies from and to it
 * may still be in their queues. So nothing waits on the host: the next bundle's copies stand behind
 * them, by the order of `out` and by EMPTIED. Only a bay that is given up for a larger one has to
 * be waited for.
 *
 * Bays of the tier FILE go round: filled by the device and written, or read and emptied by the
 * device. Our thread waits for the device, in the order in which the copies were put; what may
 * begin then is begun by it. Whoever sets a bay free puts the next read, which takes no time.
 *
 * Work is put in queues by who has the turn, and waits in run by who calls, all without mu: a full
 * queue takes its time, and the file's threads want mu. A bundle that somebody is in a call of has
 * `users`, and so keeps what it has.
 */
#include "swap.h"

#include "arena.h"
#include "place.h"
#include "worker.h"

#include <stdio.h>
#include <stdlib.h>

#define ALIGN       ((size_t)512)        /* of a part in its bay */
#define SLICE_BYTES ((size_t)32 << 20)   /* of a copy: under a millisecond of the bus */

#define LEFT    "copies of what it keeps (the event LEFT)"
#define BACK    "copies of what it keeps (the event BACK)"
#define WRITTEN "what it keeps to be written (WRITTEN)"
#define READ    "what it keeps to be read (READ)"

/* Who still needs a bundle: mt_swap_left, and mt_swap_drop. */
enum { SOURCES = 1, TENSORS = 2 };

/* swap.h says what they mean. */
typedef enum { NEW, FILLING, WRITING, STORED, READING, UNREAD, LOST, STAGES } stage;

static const unsigned next_stages[STAGES] = {
    [NEW] = 1 << FILLING,
    [FILLING] = 1 << WRITING | 1 << LOST,
    [WRITING] = 1 << STORED | 1 << LOST,
    [STORED] = 1 << READING,
    [READING] = 1 << STORED | 1 << UNREAD,
    [UNREAD] = 1 << STORED,
};

typedef struct owed {                    /* a wait for copies that our thread owes a bay. mu */
    mt_job        node;
    int           n;                     /* so many copies are not over */
    struct bay   *bay;
} owed;

typedef struct bay {
    mt_arena       arena;                /* mu, as what follows but the events */
    mt_event      *filled;               /* recorded on out behind the copies out */
    mt_event      *landed;               /* recorded on back behind the copies back */
    mt_post        filling, landing;     /* of the two queues, until those are done. The turn's */
    struct bundle *holds;                /* whose bytes it has, or will; NULL: nobody's */
    owed           fills, lands;         /* of the tier FILE */
    struct bay    *next;
} bay;

typedef struct bundle {                  /* mu, but for what is constant */
    mt_swap     *w;                      /* these four: constant */
    int          unit;
    uint64_t     number;                 /* later ones have greater ones */
    mt_swap_tier tier;
    size_t       whole;                  /* constant: bytes in its bay, and in the file */
    int          needed, users;          /* needed: by whom, see above. It goes when it is not, has
                                          * no users, and is not FILLING, WRITING or READING */
    bay         *bay;                    /* that has its bytes; NULL: the file alone has them */
    struct bundle *older, *newer;

    mt_place     place;                  /* these, to `post`, of the tier FILE */
    stage        at;
    int          wanted;                 /* brought, and copies back not put yet: the bay stays */
    int          told;                   /* LOST: mt_swap_out has said so */
    mt_status    st;                     /* UNREAD, LOST: why its request failed */
    char         text[400];
    mt_request   r;                      /* under way when WRITING or READING */
    uint64_t    *sums, begun_ns;         /* begun_ns: when the request was put */
    mt_post      post;                   /* the request, for the watchdog */

    int          n;                      /* these two: constant */
    size_t       bytes[];                /* [n] of each part */
} bundle;

struct mt_swap {
    const mt_context *cx;
    mt_dev         *dev;
    mt_store       *store;
    mt_queue       *out, *back;          /* the turn's */
    mt_event       *made, *room;         /* recorded on run, and waited for at once. The turn's */
    mt_post         making;              /* tells the watchdog of `made`. The turn's */
    mt_mutex        mu;
    pthread_cond_t  turned;              /* of mt_watch_cond: the turn is free */
    int             busy;                /* somebody has the turn. mu, as what follows */
    bay            *bays[2];             /* by tier. Of the tier FILE none goes before close */
    bundle         *newest;
    uint64_t        bundles;             /* so many were made */
    mt_swap_stats   stats;

    mt_blocks      *file;                /* NULL: there is none */
    mt_worker       worker;              /* does what is owed. news: a bay came free, too, or a
                                          * request ended */
    int             n_bays, made_bays;   /* so many are there at most, and now */
    mt_places       places;
    uint64_t        cursor;              /* a bundle's number; 0: nothing is read ahead */
    int             requests;            /* so many are under way */
    uint64_t        recorded_ns;         /* the lane's records reach up to here */
};

static mt_watch *watch_of(const mt_swap *w)
{
    return mt_store_watch(w->store);
}

/* ---- states: under mu ------------------------------------------------------------------- */

static void become(bundle *k, stage to)
{
    MT_ASSERT(mt_holds(&k->w->mu));
    MT_ASSERT(next_stages[k->at] >> to & 1);
    k->at = to;
}

/* FILLING, WRITING and READING end by themselves. */
static int is_under_way(const bundle *k)
{
    return k->at == FILLING || k->at == WRITING || k->at == READING;
}

static int is_dropped(const bundle *k)
{
    return k->needed == 0 && k->users == 0;
}

/* At each door: bytes, bays and requests are counted once. */
static void assert_state(const mt_swap *w)
{
    size_t bytes[2] = { 0 }, used = 0;
    int    made = 0, requests = 0;

    if (!MT_IS_CHECKED)
        return;
    MT_ASSERT(mt_holds(&w->mu));
    for (int tier = 0; tier < 2; tier++)
        for (const bay *b = w->bays[tier]; b != NULL; b = b->next) {
            MT_ASSERT(b->holds == NULL || b->holds->bay == b);
            MT_ASSERT(b->fills.n == 0 ||
                      (b->fills.n == 1 && b->holds != NULL && b->holds->at == FILLING));
            MT_ASSERT(b->lands.n >= 0 && b->lands.n <= 2 &&
                      (b->lands.n > 0 || !b->lands.node.listed));
            bytes[tier] += b->arena.bytes;
            used += tier == MT_SWAP_HOST && b->holds != NULL ? b->arena.bytes : 0;
            made += tier == MT_SWAP_FILE;
        }
    for (const bundle *k = w->newest; k != NULL; k = k->older) {
        int needs = k->tier == MT_SWAP_HOST || k->at == FILLING || k->at == READING ||
                    (k->at == WRITING && !mt_skips(w->cx, MT_EDGE_WRITTEN));

        MT_ASSERT(k->w == w && (k->bay == NULL || k->bay->holds == k) && k->number <= w->bundles);
        MT_ASSERT(k->bay != NULL || !needs || k->needed == 0);
        MT_ASSERT(k->st == MT_OK || k->at == UNREAD || k->at == LOST);
        MT_ASSERT(!is_dropped(k) || is_under_way(k));
        MT_ASSERT(k->older == NULL || (k->older->newer == k && k->older->number < k->number));
        requests += k->at == WRITING || k->at == READING;
    }
    MT_ASSERT(made == w->made_bays && made <= w->n_bays && requests == w->requests);
    MT_ASSERT(bytes[MT_SWAP_HOST] == w->stats.host_bytes && used == w->stats.used_bytes);
    MT_ASSERT(bytes[MT_SWAP_FILE] == w->stats.spill.host_bytes);
}

/* ---- bays ------------------------------------------------------------------------------- */

static void bay_close(mt_swap *w, bay *b)
{
    if (b == NULL)
        return;
    mt_watch_take(watch_of(w), &b->filling);
    mt_watch_take(watch_of(w), &b->landing);
    w->dev->ops->event_close(b->filled);
    w->dev->ops->event_close(b->landed);
    mt_arena_close(&b->arena);
    free(b);
}

/* These, and what follows: under mu. */
static void part(bay *b)
{
    MT_ASSERT(b->fills.n == 0);
    if (b->holds != NULL) {
        b->holds->bay = NULL;
        if (b->holds->tier == MT_SWAP_HOST)
            b->holds->w->stats.used_bytes -= b->arena.bytes;
    }
    b->holds = NULL;
}

static void join(bay *b, bundle *k)
{
    part(b);
    b->holds = k;
    k->bay = b;
    if (k->tier == MT_SWAP_HOST)
        k->w->stats.used_bytes += b->arena.bytes;
}

/* Other memory for a bay that may go. Lets go of mu meanwhile: memory is slow to come, and the
 * file's threads go on. The bay and its events stay: somebody may be about to wait for them. */
static mt_status enlarge(mt_swap *w, bay *b, size_t *all, size_t bytes)
{
    mt_arena  arena = b->arena;
    mt_status st;

    part(b);
    b->arena = (mt_arena){ 0 };
    *all -= arena.bytes;
    mt_unlock(&w->mu);
    mt_arena_close(&arena);
    st = mt_arena_open(&arena, bytes, w->cx->pool, w->dev, "activations on the host",
                       w->stats.host_bytes + w->stats.spill.host_bytes);
    mt_lock(&w->mu);
    b->arena = arena;
    *all += arena.bytes;
    return st;
}

/* One without memory, which enlarge makes. */
static mt_status one_more(mt_swap *w, mt_swap_tier tier, bay **out)
{
    bay      *b;
    mt_status st;

    MT_DO(MT_MAKE(b, 1, "swap"));
    b->fills.bay = b->lands.bay = b;
    MT_TRY(w->dev->ops->event_open(w->dev, &b->filled));
    MT_TRY(w->dev->ops->event_open(w->dev, &b->landed));
    b->next = w->bays[tier];
    *out = w->bays[tier] = b;
    return MT_OK;
fail:
    bay_close(w, b);
    return st;
}

/* A bay of the tier HOST for a bundle, under mu, by who has the turn: the smallest free one that
 * holds it. Where none does, the largest of them is enlarged; its copies must be over before its
 * memory goes. */
static mt_status host_bay(mt_swap *w, bundle *k)
{
    bay      *largest = NULL, *b = NULL;
    mt_status st;

    for (bay *i = w->bays[MT_SWAP_HOST]; i != NULL; i = i->next) {
        size_t bytes = i->arena.bytes;

        if (i->holds != NULL || (k->whole == 0 && bytes > 0))
            continue;                    /* nothing at all is held by bays without memory */
        if (bytes >= k->whole && (b == NULL || bytes < b->arena.bytes))
            b = i;
        if (largest == NULL || bytes > largest->arena.bytes)
            largest = i;
    }
    if (b == NULL && (b = largest) == NULL)
        MT_DO(one_more(w, MT_SWAP_HOST, &b));
    if (b->arena.base == NULL || b->arena.bytes < k->whole) {
        mt_unlock(&w->mu);
        if ((st = mt_watch_event(watch_of(w), b->filled, b->filling.unit, LEFT)) == MT_OK)
            st = mt_watch_event(watch_of(w), b->landed, b->landing.unit, BACK);
        mt_lock(&w->mu);
        MT_DO(st);
        MT_DO(enlarge(w, b, &w->stats.host_bytes, k->whole));
    }
    join(b, k);
    return MT_OK;
}

/* ---- bundles: under mu -------------------------------------------------------------------- */

static mt_status find(const mt_swap *w, uint64_t number, bundle **out)
{
    bundle *k = w->newest;

    while (k != NULL && (k->number != number || k->needed == 0))
        k = k->older;
    if (k == NULL)
        return MT_FAIL(MT_ESTATE, "swap: bundle %llu is not there; it was dropped",
                       (unsigned long long)number);
    *out = k;
    return MT_OK;
}

static void read_ahead(mt_swap *w);

static void forget(mt_swap *w, bundle *k)
{
    if (k->bay != NULL)
        part(k->bay);
    mt_places_give(&w->places, &k->place);
    *(k->newer != NULL ? &k->newer->older : &w->newest) = k->older;
    if (k->older != NULL)
        k->older->newer = k->newer;
    free(k->sums);
    free(k);
}

/* A caller needs it no more, or is in no call of it any more. */
static void no_longer(mt_swap *w, bundle *k, int needed, int users)
{
    int in_file = k->tier == MT_SWAP_FILE && w->file != NULL;    /* else there is no worker */

    k->needed &= ~needed;
    k->users -= users;
    if (!is_dropped(k))
        return;
    if (mt_skips(w->cx, MT_EDGE_GONE))
        mt_places_give(&w->places, &k->place);
    if (!is_under_way(k))
        forget(w, k);
    if (in_file) {
        read_ahead(w);
        pthread_cond_broadcast(&w->worker.news);
    }
}

/* ---- requests: under mu ----------------------------------------------------------------- */

/* On a thread of the file's. */
static void request_over(mt_request *r)
{
    bundle  *k = r->arg;
    mt_swap *w = k->w;

    MT_HOLD(&w->mu);
    mt_watch_end(watch_of(w), &k->post, r->st);
    mt_timeline_over(w->cx->timeline, MT_LANE_SPILL, r->write ? MT_WORK_WRITE : MT_WORK_READ,
                     k->unit, k->begun_ns, r->moved, &w->recorded_ns);
    *(r->write ? &w->stats.spill.written_bytes : &w->stats.spill.read_bytes) += r->moved;
    become(k, r->st == MT_OK ? STORED : r->write ? LOST : UNREAD);
    if ((k->st = r->st) != MT_OK)
        snprintf(k->text, sizeof k->text,
                 "unit %s: what its window keeps could not be %s the file: %s",
                 mt_store_name(w->store, k->unit), r->write ? "written to" : "read from", r->text);
    if (is_dropped(k))
        forget(w, k);
    read_ahead(w);
    w->requests--;
    pthread_cond_broadcast(&w->worker.news);
}

static void put(mt_swap *w, bundle *k, int write)
{
    k->r = (mt_request){ .write = write, .at = k->place.at, .mem = k->bay->arena.base,
                         .bytes = k->whole, .sums = k->sums, .done = request_over, .arg = k };
    k->begun_ns = mt_now_ns();
    w->requests++;
    mt_watch_begin(watch_of(w), &k->post, "swap disk", mt_store_name(w->store, k->unit),
                   write ? WRITTEN : READ);
    w->file->ops->put(w->file, &k->r);
}

static void read_into(mt_swap *w, bundle *k, bay *b)
{
    join(b, k);
    become(k, READING);
    put(w, k, 0);
}

/* Nothing moves in a bay of the file's, and what it has is nobody's, or in the file, or told to be
 * lost. */
static int may_go(const mt_swap *w, const bay *b)
{
    const bundle *k = b->holds;

    if (b->fills.n > 0 || (b->lands.n > 0 && !mt_skips(w->cx, MT_EDGE_DRAINED)))
        return 0;
    if (k == NULL)
        return 1;
    return !k->wanted && (k->at == STORED || k->at == UNREAD || k->at == LOST ||
                          (k->at == WRITING && mt_skips(w->cx, MT_EDGE_WRITTEN)));
}

/* Into bays that are free for what is needed then: not into one whose bundle is needed sooner. */
static void read_ahead(mt_swap *w)
{
    /* Broken: a wait for the device failed, so a bay that looks idle may not be. */
    if (w->cursor == 0 || w->worker.stop || w->worker.failed != MT_OK)
        return;
    for (bundle *k = w->newest; k != NULL; k = k->older) {
        bay *b = w->bays[MT_SWAP_FILE];

        if (k->number >= w->cursor || k->bay != NULL || k->at != STORED)
            continue;
        while (b != NULL && !(may_go(w, b) && b->arena.bytes >= k->whole &&
                              (b->holds == NULL || b->holds->number >= w->cursor ||
                               b->holds->number < k->number)))
            b = b->next;
        if (b == NULL)
            return;
        read_into(w, k, b);
    }
}

/* ---- our thread ------------------------------------------------------------------------- */

/* FULL and DRAINED. Without mu: the device takes its time. The bay stays: its wait is owed. */
static mt_status wait_for_device(void *arg, mt_job *node)
{
    mt_swap  *w = arg;
    owed     *o = (owed *)(void *)node;
    bay      *b = o->bay;
    bundle   *k = b->holds;
    int       fills = o == &b->fills;
    mt_status st = MT_OK;

    mt_unlock(&w->mu);
    if (!mt_skips(w->cx, fills ? MT_EDGE_FULL : MT_EDGE_DRAINED))
        st = w->dev->ops->sync_event(fills ? b->filled : b->landed);
    mt_lock(&w->mu);
    o->n--;
    if (fills && (is_dropped(k) || w->worker.stop || st != MT_OK || w->worker.failed != MT_OK)) {
        become(k, LOST);
        if (is_dropped(k))
            forget(w, k);
    } else if (fills) {
        become(k, WRITING);
        put(w, k, 1);
    }
    if (st == MT_OK)
        read_ahead(w);
    return st;
}

/* Behind what is owed already, also where this is. What fills a bay is owed before what empties it;
 * without DRAINED a bay may be filled anew while it is emptied. */
static void owe(mt_swap *w, owed *o)
{
    MT_ASSERT(o != &o->bay->fills || o->bay->lands.n == 0 || mt_skips(w->cx, MT_EDGE_DRAINED));
    o->n += !o->node.listed;
    mt_worker_withdraw(&w->worker, &o->node);
    (void)mt_worker_submit(&w->worker, &o->node);
}

/* ---- a bay of the file's: under mu, whose turn it is -------------------------------------- */

/* Of those that may go: nobody's, then what is needed latest. The smallest number is, as long as
 * all is to come in reverse; from the cursor on all has come. */
static bay *choose(const mt_swap *w, size_t bytes)
{
    bay     *best = NULL;
    uint64_t least = UINT64_MAX;

    for (bay *b = w->bays[MT_SWAP_FILE]; b != NULL; b = b->next) {
        uint64_t number = b->holds == NULL ? 0 : 1 + b->holds->number;

        if (w->cursor > 0 && number > w->cursor)
            number = 1;
        if (may_go(w, b) && b->arena.bytes >= bytes && number < least) {
            best = b;
            least = number;
        }
    }
    return best;
}

/* Lets go of mu meanwhile, and a moment longer: nobody else has the turn. */
#define WAIT_UNTIL(w, k, over, what)                                                               \
    __extension__({                                                                                \
        uint64_t  from_ = mt_now_ns();                                                             \
        mt_status waited_ = MT_OK;                                                                 \
        if (!(over)) {                                                                             \
            mt_unlock(&(w)->mu);                                                                   \
            waited_ = MT_UNTIL(watch_of(w), &(w)->worker.news, &(w)->mu, over,                     \
                               mt_store_name((w)->store, (k)->unit), what);                        \
            mt_lock(&(w)->mu);                                                                     \
            (w)->stats.spill.wait_ns += mt_now_ns() - from_;                                       \
        }                                                                                          \
        waited_;                                                                                   \
    })
#define IS_WRITTEN(k) ((k)->at != FILLING && (k)->at != WRITING)

/* One that may go and is large enough; or one more; or one that is enlarged. It waits for one. */
static mt_status file_bay(mt_swap *w, bundle *k, bay **out)
{
    bay *b;

    for (;;) {
        MT_DO(mt_worker_failure(&w->worker));
        b = choose(w, k->whole);
        if (w->made_bays < w->n_bays && (b == NULL || b->holds != NULL)) {
            MT_DO(one_more(w, MT_SWAP_FILE, &b));
            w->made_bays++;
        } else if (b == NULL)
            b = choose(w, 0);
        if (b != NULL)
            break;
        MT_DO(WAIT_UNTIL(w, k, w->worker.failed != MT_OK || choose(w, 0) != NULL,
                         "host memory for what it keeps (WRITTEN)"));
    }
    if (b->arena.bytes < k->whole)
        MT_DO(enlarge(w, b, &w->stats.spill.host_bytes, k->whole));
    *out = b;
    return MT_OK;
}

/* A bay, and a place in the file. A write that was lost is told first: of a bundle that is still
 * there, once. */
static mt_status prepare_file(mt_swap *w, bundle *k)
{
    bay      *b;
    uint64_t  lack, at;
    mt_status st;

    if (w->file == NULL)
        return MT_FAIL(MT_ESTATE, "swap: what windows keep is to go to a file, and there is none; "
                       "name a directory");
    MT_HOLD(&w->mu);
    w->cursor = 0;
    for (bundle *lost = w->newest; lost != NULL; lost = lost->older)
        if (lost->at == LOST && lost->st != MT_OK && !lost->told && !is_dropped(lost)) {
            lost->told = 1;
            return mt_fail_again(lost->st, lost->text);
        }
    MT_DO(MT_MAKE(k->sums, (int64_t)mt_block_count(k->whole), "swap"));
    MT_DO(file_bay(w, k, &b));
    join(b, k);
    /* Nobody else takes places meanwhile: who makes bundles has the turn. */
    while ((lack = mt_places_take(&w->places, &k->place, k->whole)) > 0) {
        mt_unlock(&w->mu);
        st = w->file->ops->take(w->file, (size_t)lack, &at);     /* what it gives follows on */
        mt_lock(&w->mu);
        MT_DO(st);
        w->places.bytes += lack;
    }
    return MT_OK;
}

/* Its bytes are in its bay when it returns, and that stays until copies back are put. */
static mt_status bring(mt_swap *w, bundle *k)
{
    bay      *b;
    mt_status st;

    w->cursor = k->number;
    k->wanted = 1;              /* from now on: the end of its read looks for bays that may go */
    /* Its bytes are to be in its bay, or on their way there. read_ahead leaves it alone: the cursor
     * is on it. */
    MT_TRY(mt_worker_failure(&w->worker));
    if (k->bay == NULL)                  /* where WRITTEN is left out: it has one request */
        MT_TRY(WAIT_UNTIL(w, k, IS_WRITTEN(k), WRITTEN));
    if (k->bay == NULL && k->st == MT_OK) {      /* else it is told next, or what it has is lost */
        MT_TRY(file_bay(w, k, &b));
        read_into(w, k, b);
    }
    if (!mt_skips(w->cx, MT_EDGE_READ))
        MT_TRY(WAIT_UNTIL(w, k, k->at != READING, READ));
    /* A bay whose read failed has nothing; a place that was written may be read again. */
    st = k->st != MT_OK ? mt_fail_again(k->st, k->text) : MT_OK;
    if (st != MT_OK && k->bay != NULL)
        part(k->bay);
    if (k->at == UNREAD) {
        become(k, STORED);
        k->st = MT_OK;
    }
    k->told = 1;
    MT_TRY(st);
    read_ahead(w);
    return MT_OK;

fail:
    k->wanted = 0;
    pthread_cond_broadcast(&w->worker.news);
    return st;
}

/* ---- copies: who has the turn, without mu ------------------------------------------------- */

static mt_status copy_slices(mt_queue *q, char *dst, const char *src, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += SLICE_BYTES)
        MT_DO(q->dev->ops->copy(q, dst + at, src + at,
                                bytes - at < SLICE_BYTES ? bytes - at : SLICE_BYTES));
    return MT_OK;
}

/* q waits for what run was given so far. */
static mt_status behind(mt_swap *w, mt_queue *q, mt_event *e, mt_queue *run, unsigned edge)
{
    MT_DO(w->dev->ops->record(run, e));
    return mt_edge(w->cx, edge, q, e);
}

/* All wanted parts between device memory and the bay, and the event behind them. */
static mt_status copy_all(mt_swap *w, const bundle *k, const mt_swap_part *parts, int leaving)
{
    bay      *b = k->bay;
    mt_queue *q = leaving ? w->out : w->back;
    char     *host = b->arena.base;
    uint64_t  copied = 0;
    mt_span   span = { 0 };
    mt_status st;

    mt_timeline_begin(w->cx->timeline, &span, leaving ? MT_LANE_OUT : MT_LANE_BACK, MT_WORK_SWAP,
                      k->unit, q);
    for (int i = 0; i < k->n; i++) {
        char *mem = parts[i].mem;

        if (mem != NULL)
            MT_TRY(leaving ? copy_slices(q, host, mem, parts[i].bytes)
                           : copy_slices(q, mem, host, parts[i].bytes));
        copied += mem != NULL ? parts[i].bytes : 0;
        host += mt_round_up(parts[i].bytes, ALIGN);
    }
    mt_timeline_end(w->cx->timeline, &span, copied, q);
    MT_TRY(w->dev->ops->record(q, leaving ? b->filled : b->landed));
    mt_watch_put(watch_of(w), leaving ? &b->filling : &b->landing,
                 leaving ? "swap out" : "swap back", mt_store_name(w->store, k->unit),
                 leaving ? LEFT : BACK, leaving ? b->filled : b->landed);
    MT_WITH(&w->mu) *(leaving ? &w->stats.out_bytes : &w->stats.back_bytes) += copied;
    return w->cx->debug.sync ? w->dev->ops->sync(q) : MT_OK;

fail:
    mt_timeline_end(w->cx->timeline, &span, copied, q);
    (void)w->dev->ops->sync(q);     /* slices may be under way, and the caller frees its memory */
    return st;
}

/* ---- the turn --------------------------------------------------------------------------- */

static mt_status take_turn(mt_swap *w)
{
    return MT_UNTIL(watch_of(w), &w->turned, &w->mu, w->busy ? 0 : (w->busy = 1), NULL,
                    "what others keep, on its way out or back");
}

/* k: the bundle that was in hand; NULL: none. */
static void give_turn(mt_swap *w, bundle *k)
{
    MT_HOLD(&w->mu);
    if (k != NULL)
        no_longer(w, k, 0, 1);
    assert_state(w);
    w->busy = 0;
    pthread_cond_broadcast(&w->turned);
}

/* ---- the door --------------------------------------------------------------------------- */

/* A file has nothing to do with nothing. */
static mt_status bundle_new(mt_swap *w, int unit, const mt_swap_part *parts, int n,
                            mt_swap_tier tier, bundle **out)
{
    bundle *k = calloc(1, sizeof *k + (size_t)n * sizeof *k->bytes);

    if (k == NULL)
        return MT_FAIL(MT_ENOMEM, "swap: no memory to note %d tensors", n);
    *k = (bundle){ .w = w, .unit = unit, .n = n, .users = 1 };
    for (int i = 0; i < n; i++) {
        k->bytes[i] = parts[i].bytes;
        k->whole += mt_round_up(parts[i].bytes, ALIGN);
    }
    k->tier = k->whole > 0 ? tier : MT_SWAP_HOST;
    if (k->tier == MT_SWAP_FILE)
        k->whole = mt_round_up(k->whole, MT_BLOCK_ALIGN);
    MT_HOLD(&w->mu);
    k->number = ++w->bundles;
    k->older = w->newest;
    if (w->newest != NULL)
        w->newest->newer = k;
    *out = w->newest = k;
    return MT_OK;
}

mt_status mt_swap_out(mt_swap *w, int unit, const mt_swap_part *parts, int n, mt_swap_tier tier,
                      mt_queue *run, uint64_t *number)
{
    bundle   *k = NULL;
    mt_status st;

    MT_DO(take_turn(w));
    MT_TRY(bundle_new(w, unit, parts, n, tier, &k));
    MT_TRY(k->tier == MT_SWAP_FILE ? prepare_file(w, k) : MT_LOCKED(&w->mu, host_bay(w, k)));
    MT_TRY(behind(w, w->out, w->made, run, MT_EDGE_COMPUTED));
    mt_watch_put(watch_of(w), &w->making, mt_compute, mt_store_name(w->store, unit),
                 "its kernels (the event COMPUTED)", w->made);
    if (k->tier == MT_SWAP_HOST)         /* for another's copies our thread has waited: DRAINED */
        MT_TRY(mt_edge(w->cx, MT_EDGE_EMPTIED, w->out, k->bay->landed));
    MT_TRY(copy_all(w, k, parts, 1));
    mt_lock(&w->mu);
    if (k->tier == MT_SWAP_FILE) {       /* behind what fills it, it may be written; with overlap */
        become(k, FILLING);              /* off it is when this returns */
        owe(w, &k->bay->fills);
        if (w->cx->debug.sync)
            st = WAIT_UNTIL(w, k, IS_WRITTEN(k), WRITTEN);
    }
    if (st == MT_OK) {
        k->needed = SOURCES | TENSORS;
        *number = k->number;
    }
    mt_unlock(&w->mu);
fail:
    give_turn(w, k);
    return st;
}

/* run waits for the copies one way, LEFT or BACK, unless they are over. */
static mt_status waits(mt_swap *w, uint64_t number, mt_queue *run, unsigned edge)
{
    int       leaves = edge == MT_EDGE_LEFT;
    mt_event *e = NULL;
    bundle   *k;
    mt_status st;

    MT_WITH(&w->mu) {
        assert_state(w);
        MT_DO(find(w, number, &k));
        k->users++;
        if (k->bay != NULL)
            e = leaves ? k->bay->filled : k->bay->landed;
    }
    st = e != NULL ? mt_edge(w->cx, edge, run, e) : MT_OK;
    MT_WITH(&w->mu) no_longer(w, k, leaves && st == MT_OK ? SOURCES : 0, 1);
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

mt_status mt_swap_back(mt_swap *w, uint64_t number, const mt_swap_part *landing, int n,
                       mt_queue *run)
{
    bundle   *k = NULL;
    mt_status st;

    MT_DO(take_turn(w));
    MT_WITH(&w->mu) {
        assert_state(w);
        if ((st = find(w, number, &k)) == MT_OK)
            k->users++;                  /* whoever drops it meanwhile leaves it to us */
    }
    MT_TRY(st);
    if (n != k->n)
        MT_TRY(MT_FAIL(MT_EINVAL, "swap: %d tensors are to come back of %d", n, k->n));
    for (int i = 0; i < n; i++)
        if (landing[i].bytes != k->bytes[i])
            MT_TRY(MT_FAIL(MT_EINVAL, "swap: tensor %d left with %zu bytes and is to come back "
                           "with %zu", i, k->bytes[i], landing[i].bytes));
    MT_TRY(behind(w, w->back, w->room, run, MT_EDGE_ROOM));
    if (k->tier == MT_SWAP_FILE)
        MT_TRY(MT_LOCKED(&w->mu, bring(w, k)));
    if ((st = mt_edge(w->cx, MT_EDGE_KEPT, w->back, k->bay->filled)) == MT_OK)
        st = copy_all(w, k, landing, 0);
    MT_WITH(&w->mu)
        if (k->tier == MT_SWAP_FILE) {   /* the bay is another's when the copies are over */
            k->wanted = 0;
            owe(w, &k->bay->lands);
        }
fail:
    give_turn(w, k);
    return st;
}

void mt_swap_drop(mt_swap *w, uint64_t number)
{
    bundle *k;

    MT_HOLD(&w->mu);
    if (find(w, number, &k) == MT_OK)
        no_longer(w, k, TENSORS, 0);
    assert_state(w);
}

/* ---- open and close --------------------------------------------------------------------- */

MT_CLOSER(mt_swap_close, mt_swap)

mt_status mt_swap_open(const mt_context *cx, mt_swap **out)
{
    mt_dev   *dev = cx->dev;
    mt_swap  *w MT_CLOSED(mt_swap_close) = NULL;

    MT_DO(MT_MAKE(w, 1, "swap"));
    *w = (mt_swap){ .cx = cx, .dev = dev, .store = cx->store };
    mt_mutex_open(&w->mu, MT_RANK_SWAP);
    MT_DO(mt_watch_cond(&w->turned));
    MT_DO(dev->ops->queue_open(dev, "swap-out", &w->out));
    MT_DO(dev->ops->queue_open(dev, "swap-back", &w->back));
    MT_DO(dev->ops->event_open(dev, &w->made));
    MT_DO(dev->ops->event_open(dev, &w->room));
    *out = MT_KEEP(w);
    return MT_OK;
}

mt_status mt_swap_disk(mt_swap *w, mt_blocks *file, int n_bays)
{
    if (w->file != NULL)
        return MT_FAIL(MT_ESTATE, "swap: it has a file already");
    if (n_bays < 2)
        return MT_FAIL(MT_EINVAL, "spill: %d bays; 2 are the least: one moves to the device, one "
                       "to the file", n_bays);
    MT_DO(mt_worker_open(&w->worker, &w->mu, 1, "mt-spill", "swap disk", wait_for_device, w));
    w->n_bays = n_bays;
    w->file = file;
    return MT_OK;
}

/* What is owed is waited for, while the queues that record events are; nothing new is read. */
void mt_swap_close(mt_swap *w)
{
    if (w == NULL)
        return;
    mt_worker_stop(&w->worker, 0);
    MT_WITH(&w->mu) {
        while (w->requests > 0)
            mt_cond_wait(&w->worker.news, &w->mu);
        assert_state(w);
    }
    w->dev->ops->queue_close(w->out);
    w->dev->ops->queue_close(w->back);
    MT_WITH(&w->mu)
        while (w->newest != NULL)
            forget(w, w->newest);
    for (int tier = 0; tier < 2; tier++)
        for (bay *b = w->bays[tier], *next; b != NULL; b = next) {
            next = b->next;
            bay_close(w, b);
        }
    mt_worker_close(&w->worker);
    mt_watch_take(watch_of(w), &w->making);
    w->dev->ops->event_close(w->made);
    w->dev->ops->event_close(w->room);
    pthread_cond_destroy(&w->turned);
    mt_mutex_close(&w->mu);
    free(w);
}

mt_swap_stats mt_swap_stats_get(mt_swap *w)
{
    mt_swap_stats stats;

    MT_HOLD(&w->mu);
    stats = w->stats;
    stats.host_bytes += stats.spill.host_bytes;
    stats.spill.file_bytes = w->places.bytes;
    stats.spill.used_bytes = w->places.used_bytes;
    return stats;
}
