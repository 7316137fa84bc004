/* spill.c — bays go round: filled by the device and written, or read and emptied by the device.
 *
 * Our thread waits for the device, in the order in which the copies were put; what may begin then
 * is begun by it. Whoever sets a bay free puts the next read, which takes no time. Nothing that
 * the device has to do is put here, and nothing is called under mu that waits for the device: a
 * queue that is full waits for us.
 */
#include "spill.h"

#include "clock.h"
#include "place.h"
#include "worker.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct owed {                    /* a wait for copies that our thread owes a bay. mu */
    mt_job        node;
    int           n;                     /* so many copies are not over; changed by `count` alone */
    struct bay   *bay;
} owed;

typedef struct bay {
    mt_bay        b;                     /* its events: constant */
    mt_spilled   *holds;                 /* whose bytes it has, or will; NULL: nobody's. mu, as
                                          * what follows */
    owed          filled, landed;        /* waits for copies out that fill it, and back from it */
    struct bay   *next;
} bay;

/* spill.h says what they mean. */
enum { NONE, FILLED, LANDED, BOTH };
typedef enum { NEW, FILLING, WRITING, STORED, READING, UNREAD, LOST, STAGES } stage;

static const unsigned next_stages[STAGES] = {
    [NEW] = 1 << FILLING,
    [FILLING] = 1 << WRITING | 1 << LOST,
    [WRITING] = 1 << STORED | 1 << LOST,
    [STORED] = 1 << READING,
    [READING] = 1 << STORED | 1 << UNREAD,
    [UNREAD] = 1 << STORED,
};
static const unsigned next_waits[] = {
    [NONE] = 1 << FILLED | 1 << LANDED,
    [FILLED] = 1 << NONE | 1 << BOTH,
    [LANDED] = 1 << NONE | 1 << LANDED,
    [BOTH] = 1 << LANDED | 1 << BOTH,
};

struct mt_spilled {                      /* mu, but for what is constant */
    mt_spill   *spill;                   /* these four: constant */
    int         unit;
    uint64_t    number;
    size_t      bytes;                   /* a multiple of MT_BLOCK_ALIGN */
    bay        *bay;                     /* that has its bytes; NULL: the file alone has it */
    mt_place   *place;
    stage       at;
    int         wanted;                  /* brought, and copies back not put yet: the bay stays */
    int         dropped;                 /* goes once it is not FILLING, WRITING or READING */
    int         told;                    /* LOST: mt_spill_new has said so */
    mt_status   st;                      /* UNREAD, LOST: why its request failed */
    char        text[400];
    mt_request  r;                       /* under way when WRITING or READING */
    uint64_t   *sums;
    uint64_t    begun_ns;                /* when the request was put */
    mt_post     post;                    /* the request, for the watchdog */
    mt_spilled *older, *newer;
};

struct mt_spill {
    const mt_context *cx;
    mt_dev         *dev;
    mt_store       *store;
    mt_blocks      *file;
    int             n_bays;              /* so many bays are made at most */
    mt_mutex        mu;
    mt_worker       worker;              /* does what is owed. news: a bay came free, too, or a
                                          * request ended */
    bay            *bays;                /* mu, as all below. None goes before close */
    int             made;                /* so many bays are there */
    mt_spilled     *newest;
    mt_places       places;
    uint64_t        cursor;              /* a bundle's number; 0: nothing is read ahead */
    int             requests;            /* so many are under way */
    uint64_t        recorded_ns;         /* the lane's records reach up to here */
    mt_spill_stats  stats;
};

static mt_watch *watch_of(const mt_spill *s)
{
    return mt_store_watch(s->store);
}

/* ---- bays ------------------------------------------------------------------------------- */

mt_status mt_bay_open(mt_bay *b, size_t bytes, mt_dev *dev, mt_pool *pool, size_t mapped)
{
    mt_status st;

    *b = (mt_bay){ 0 };
    MT_TRY(dev->ops->event_open(dev, &b->filled));
    MT_TRY(dev->ops->event_open(dev, &b->landed));
    MT_TRY(mt_arena_open(&b->arena, bytes, pool, dev, MT_BAY, mapped));
    return MT_OK;

fail:
    mt_bay_close(b, dev, NULL);
    return st;
}

void mt_bay_close(mt_bay *b, mt_dev *dev, mt_watch *watch)
{
    if (watch != NULL) {
        mt_watch_take(watch, &b->filling);
        mt_watch_take(watch, &b->landing);
    }
    dev->ops->event_close(b->filled);
    dev->ops->event_close(b->landed);
    mt_arena_close(&b->arena);
    *b = (mt_bay){ 0 };
}

/* ---- states: under mu ------------------------------------------------------------------- */

static void become(mt_spilled *k, stage to)
{
    MT_ASSERT(mt_holds(&k->spill->mu));
    MT_ASSERT(next_stages[k->at] >> to & 1);
    k->at = to;
}

static unsigned waits_of(const bay *b)
{
    return (b->filled.n > 0 ? FILLED : NONE) | (b->landed.n > 0 ? LANDED : NONE);
}

/* One more wait, or one less. Without DRAINED a bay may be filled anew while it is emptied. */
static void count(const mt_spill *s, owed *o, int more)
{
    unsigned before = waits_of(o->bay);

    MT_ASSERT(mt_holds(&s->mu));
    o->n += more;
    MT_ASSERT(next_waits[before] >> waits_of(o->bay) & 1 || mt_skips(s->cx, MT_EDGE_DRAINED));
}

/* FILLING, WRITING and READING end by themselves. */
static int is_under_way(const mt_spilled *k)
{
    return k->at == FILLING || k->at == WRITING || k->at == READING;
}

static void assert_spilled(const mt_spill *s, const mt_spilled *k)
{
    int needs = k->at == FILLING || k->at == READING ||
                (k->at == WRITING && !mt_skips(s->cx, MT_EDGE_WRITTEN));

    MT_ASSERT(k->spill == s && (k->bay == NULL || k->bay->holds == k));
    MT_ASSERT(k->bay != NULL || !needs);
    MT_ASSERT(k->st == MT_OK || k->at == UNREAD || k->at == LOST);
    MT_ASSERT(!k->dropped || is_under_way(k));
    MT_ASSERT(k->older == NULL || (k->older->newer == k && k->older->number < k->number));
}

static void assert_bay(const bay *b)
{
    MT_ASSERT(b->holds == NULL || b->holds->bay == b);
    MT_ASSERT(b->filled.n == 0 || (b->filled.n == 1 && b->holds != NULL &&
                                   b->holds->at == FILLING));
    MT_ASSERT(b->landed.n >= 0 && b->landed.n <= 2 && (b->landed.n > 0 || !b->landed.node.listed));
    MT_ASSERT(b->filled.bay == b && b->landed.bay == b);
}

/* At each door. */
static void assert_state(const mt_spill *s)
{
    int    made = 0, requests = 0;
    size_t bytes = 0;

    if (!MT_IS_CHECKED)
        return;
    MT_ASSERT(mt_holds(&s->mu));
    for (const bay *b = s->bays; b != NULL; b = b->next, made++) {
        assert_bay(b);
        bytes += b->b.arena.bytes;
    }
    for (const mt_spilled *k = s->newest; k != NULL; k = k->older) {
        assert_spilled(s, k);
        requests += k->at == WRITING || k->at == READING;
    }
    MT_ASSERT(made == s->made && made <= s->n_bays);
    MT_ASSERT(requests == s->requests && bytes == s->stats.host_bytes);
}

/* ---- whose bays are: under mu --------------------------------------------------------- */

/* Nothing moves in it, and what it has is nobody's, or in the file, or told to be lost. */
static int may_go(const mt_spill *s, const bay *b)
{
    const mt_spilled *k = b->holds;

    if (b->filled.n > 0 || (b->landed.n > 0 && !mt_skips(s->cx, MT_EDGE_DRAINED)))
        return 0;
    if (k == NULL)
        return 1;
    return !k->wanted && (k->at == STORED || k->at == UNREAD || k->at == LOST ||
                          (k->at == WRITING && mt_skips(s->cx, MT_EDGE_WRITTEN)));
}

static void part(bay *b)
{
    MT_ASSERT(b->filled.n == 0);
    if (b->holds != NULL)
        b->holds->bay = NULL;
    b->holds = NULL;
}

static void join(bay *b, mt_spilled *k)
{
    part(b);
    b->holds = k;
    k->bay = b;
}

static void forget(mt_spill *s, mt_spilled *k)
{
    MT_ASSERT(!is_under_way(k));
    if (k->bay != NULL)
        part(k->bay);
    mt_places_give(&s->places, k->place);
    *(k->newer != NULL ? &k->newer->older : &s->newest) = k->older;
    if (k->older != NULL)
        k->older->newer = k->newer;
    free(k->sums);
    free(k);
}

/* ---- requests: under mu ----------------------------------------------------------------- */

static void read_ahead(mt_spill *s);

/* On a thread of the file's. */
static void request_over(mt_request *r)
{
    mt_spilled *k = r->arg;
    mt_spill   *s = k->spill;

    mt_lock(&s->mu);
    mt_watch_end(watch_of(s), &k->post, r->st);
    mt_timeline_over(s->cx->timeline, MT_LANE_SPILL, r->write ? MT_WORK_WRITE : MT_WORK_READ,
                     k->unit, k->begun_ns, r->moved, &s->recorded_ns);
    *(r->write ? &s->stats.written_bytes : &s->stats.read_bytes) += r->moved;
    become(k, r->st == MT_OK ? STORED : r->write ? LOST : UNREAD);
    if ((k->st = r->st) != MT_OK)
        snprintf(k->text, sizeof k->text,
                 "unit %s: what its window keeps could not be %s the file: %s",
                 mt_store_name(s->store, k->unit), r->write ? "written to" : "read from", r->text);
    if (k->dropped)
        forget(s, k);
    read_ahead(s);
    s->requests--;
    pthread_cond_broadcast(&s->worker.news);
    mt_unlock(&s->mu);
}

static void put(mt_spill *s, mt_spilled *k, int write)
{
    k->r = (mt_request){ .write = write, .at = k->place->at, .mem = k->bay->b.arena.base,
                         .bytes = k->bytes, .sums = k->sums, .done = request_over, .arg = k };
    k->begun_ns = mt_now_ns();
    s->requests++;
    mt_watch_begin(watch_of(s), &k->post, "swap disk", mt_store_name(s->store, k->unit),
                   write ? "what it keeps to be written (WRITTEN)"
                         : "what it keeps to be read (READ)");
    s->file->ops->put(s->file, &k->r);
}

static void read_into(mt_spill *s, mt_spilled *k, bay *b)
{
    join(b, k);
    become(k, READING);
    put(s, k, 0);
}

/* Free for what is needed at that number: not one whose bundle is needed sooner. */
static bay *spare(const mt_spill *s, uint64_t number, size_t bytes)
{
    for (bay *b = s->bays; b != NULL; b = b->next)
        if (may_go(s, b) && b->b.arena.bytes >= bytes &&
            (b->holds == NULL || b->holds->number >= s->cursor || b->holds->number < number))
            return b;
    return NULL;
}

static void read_ahead(mt_spill *s)
{
    bay *b;

    /* Broken: a wait for the device failed, so a bay that looks idle may not be. */
    if (s->cursor == 0 || s->worker.stop || s->worker.failed != MT_OK)
        return;
    for (mt_spilled *k = s->newest; k != NULL; k = k->older) {
        if (k->number >= s->cursor || k->bay != NULL || k->at != STORED)
            continue;
        if ((b = spare(s, k->number, k->bytes)) == NULL)
            return;
        read_into(s, k, b);
    }
}

/* ---- our thread ------------------------------------------------------------------------- */

/* FULL and DRAINED. Without mu: the device takes its time. The bay stays: its wait is owed. */
static mt_status wait_for_device(void *arg, mt_job *node)
{
    mt_spill   *s = arg;
    owed       *o = (owed *)(void *)node;
    bay        *b = o->bay;
    mt_spilled *k = b->holds;
    int         fills = o == &b->filled;
    mt_status   st = MT_OK;

    mt_unlock(&s->mu);
    if (!mt_skips(s->cx, fills ? MT_EDGE_FULL : MT_EDGE_DRAINED))
        st = s->dev->ops->sync_event(fills ? b->b.filled : b->b.landed);
    mt_lock(&s->mu);
    count(s, o, -1);
    if (fills && (k->dropped || s->worker.stop || st != MT_OK || s->worker.failed != MT_OK)) {
        become(k, LOST);
        if (k->dropped)
            forget(s, k);
    } else if (fills) {
        become(k, WRITING);
        put(s, k, 1);
    }
    if (st == MT_OK)
        read_ahead(s);
    return st;
}

/* Behind what is owed already, also where this is. */
static void owe(mt_spill *s, owed *o)
{
    count(s, o, !o->node.listed);
    mt_worker_withdraw(&s->worker, &o->node);
    (void)mt_worker_submit(&s->worker, &o->node);
}

/* ---- a bay for somebody: under mu, whose turn it is ------------------------------------- */

/* Of those that may go: nobody's, then what is needed latest. The smallest number is, as long as
 * all is to come in reverse; from the cursor on all has come. */
static bay *choose(const mt_spill *s, size_t bytes)
{
    bay     *best = NULL;
    uint64_t least = UINT64_MAX;

    for (bay *b = s->bays; b != NULL; b = b->next) {
        uint64_t number = b->holds == NULL ? 0 : 1 + b->holds->number;

        if (s->cursor > 0 && number > s->cursor)
            number = 1;
        if (may_go(s, b) && b->b.arena.bytes >= bytes && number < least) {
            best = b;
            least = number;
        }
    }
    return best;
}

/* Other memory for a bay that may go. Lets go of mu meanwhile: memory is slow to come, and the
 * file's threads go on. The bay and its events stay: somebody may be about to wait for them. */
static mt_status enlarge(mt_spill *s, bay *b, size_t bytes)
{
    mt_arena  arena = b->b.arena;
    size_t    mapped = s->stats.host_bytes - arena.bytes;
    mt_status st;

    part(b);
    b->b.arena = (mt_arena){ 0 };
    s->stats.host_bytes = mapped;
    mt_unlock(&s->mu);
    mt_arena_close(&arena);
    st = mt_arena_open(&arena, bytes, s->cx->pool, s->dev, MT_BAY, mapped);
    mt_lock(&s->mu);
    b->b.arena = arena;
    s->stats.host_bytes += arena.bytes;
    return st;
}

/* *out NULL: not now. */
static mt_status try_bay(mt_spill *s, size_t bytes, bay **out)
{
    bay      *b = choose(s, bytes);
    mt_status st;

    if (s->made < s->n_bays && (b == NULL || b->holds != NULL)) {    /* one more, without memory */
        MT_DO(MT_MAKE(b, 1, "spill"));
        if ((st = mt_bay_open(&b->b, 0, s->dev, NULL, 0)) != MT_OK) {
            free(b);
            return st;
        }
        b->filled.bay = b->landed.bay = b;
        b->next = s->bays;
        s->bays = b;
        s->made++;
    } else if (b == NULL)
        b = choose(s, 0);
    if (b != NULL && b->b.arena.bytes < bytes)
        MT_DO(enlarge(s, b, bytes));
    *out = b;
    return MT_OK;
}

/* Of a bundle, for wait_until. */
static int may_have_bay(void *arg)
{
    const mt_spill *s = ((const mt_spilled *)arg)->spill;

    return s->worker.failed != MT_OK || s->made < s->n_bays || choose(s, 0) != NULL;
}

static int is_written(void *arg)
{
    const mt_spilled *k = arg;

    return k->at != FILLING && k->at != WRITING;
}

static int is_read(void *arg)
{
    return ((const mt_spilled *)arg)->at != READING;
}

/* Lets go of mu meanwhile, and a moment longer: nobody else has the turn. */
static mt_status wait_until(mt_spill *s, mt_spilled *k, int (*over)(void *arg), const char *what)
{
    uint64_t  from = mt_now_ns();
    mt_status st;

    if (over(k))
        return MT_OK;
    mt_unlock(&s->mu);
    st = mt_watch_until(watch_of(s), &s->worker.news, &s->mu, over, k,
                        mt_store_name(s->store, k->unit), what);
    mt_lock(&s->mu);
    s->stats.wait_ns += mt_now_ns() - from;
    return st;
}

static mt_status get_bay(mt_spill *s, mt_spilled *k, bay **out)
{
    bay *b = NULL;

    do {
        MT_DO(mt_worker_failure(&s->worker));
        MT_DO(try_bay(s, k->bytes, &b));
        if (b == NULL)
            MT_DO(wait_until(s, k, may_have_bay, "host memory for what it keeps (WRITTEN)"));
    } while (b == NULL);
    *out = b;
    return MT_OK;
}

/* ---- the door --------------------------------------------------------------------------- */

static mt_status make(mt_spill *s, int unit, uint64_t number, size_t bytes, mt_spilled **out)
{
    mt_spilled *k;
    size_t      whole = (bytes + MT_BLOCK_ALIGN - 1) / MT_BLOCK_ALIGN * MT_BLOCK_ALIGN;
    mt_status   st;

    MT_TRY(MT_MAKE(k, 1, "spill"));
    MT_TRY(MT_MAKE(k->sums, (int64_t)mt_block_count(whole), "spill"));
    k->spill = s;
    k->unit = unit;
    k->number = number;
    k->bytes = whole;
    k->older = s->newest;
    if (s->newest != NULL)
        s->newest->newer = k;
    s->newest = k;
    *out = k;
    return MT_OK;
fail:
    free(k);
    return st;
}

mt_status mt_spill_new(mt_spill *s, int unit, uint64_t number, size_t bytes, mt_spilled **out)
{
    mt_spilled *k = NULL;
    bay        *b;
    uint64_t    lack, at;
    mt_status   st;

    mt_lock(&s->mu);
    assert_state(s);
    s->cursor = 0;
    for (mt_spilled *lost = s->newest; lost != NULL; lost = lost->older)
        if (lost->at == LOST && lost->st != MT_OK && !lost->told && !lost->dropped) {
            lost->told = 1;              /* of a bundle that is still there, once */
            MT_TRY(mt_fail_again(lost->st, lost->text));
        }
    MT_TRY(make(s, unit, number, bytes, &k));
    MT_TRY(get_bay(s, k, &b));
    join(b, k);
    /* Nobody else takes places meanwhile: who makes bundles has the turn. */
    while ((lack = mt_places_lack(&s->places, k->bytes)) > 0) {
        mt_unlock(&s->mu);
        st = s->file->ops->take(s->file, (size_t)lack, &at);
        mt_lock(&s->mu);
        MT_TRY(st);
        MT_TRY(mt_places_add(&s->places, lack));
    }
    k->place = mt_places_take(&s->places, k->bytes);
    *out = k;
    mt_unlock(&s->mu);
    return MT_OK;

fail:
    if (k != NULL)
        forget(s, k);
    mt_unlock(&s->mu);
    return st;
}

mt_status mt_spill_filled(mt_spill *s, mt_spilled *k)
{
    mt_status st = MT_OK;

    mt_lock(&s->mu);
    assert_state(s);
    become(k, FILLING);
    owe(s, &k->bay->filled);
    if (mt_syncs(s->cx))
        st = wait_until(s, k, is_written, "what it keeps to be written (WRITTEN)");
    mt_unlock(&s->mu);
    return st;
}

mt_status mt_spill_bring(mt_spill *s, mt_spilled *k)
{
    bay      *b;
    mt_status st;

    mt_lock(&s->mu);
    assert_state(s);
    MT_ASSERT(k->at != NEW && !k->dropped);
    s->cursor = k->number;
    k->wanted = 1;              /* from now on: the end of its read looks for bays that may go */
    /* Its bytes are to be in its bay, or on their way there. read_ahead leaves it alone: the cursor
     * is on it. */
    MT_TRY(mt_worker_failure(&s->worker));
    if (k->bay == NULL)                  /* where WRITTEN is left out: it has one request */
        MT_TRY(wait_until(s, k, is_written, "what it keeps to be written (WRITTEN)"));
    if (k->bay == NULL && k->st == MT_OK) {      /* else it is told next, or what it has is lost */
        MT_TRY(get_bay(s, k, &b));
        read_into(s, k, b);
    }
    if (!mt_skips(s->cx, MT_EDGE_READ))
        MT_TRY(wait_until(s, k, is_read, "what it keeps to be read (READ)"));
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
    read_ahead(s);
    mt_unlock(&s->mu);
    return MT_OK;

fail:
    k->wanted = 0;
    pthread_cond_broadcast(&s->worker.news);
    mt_unlock(&s->mu);
    return st;
}

void mt_spill_landing(mt_spill *s, mt_spilled *k)
{
    mt_lock(&s->mu);
    assert_state(s);
    MT_ASSERT(k->wanted && k->bay != NULL);
    k->wanted = 0;
    owe(s, &k->bay->landed);
    mt_unlock(&s->mu);
}

void mt_spill_drop(mt_spill *s, mt_spilled *k)
{
    mt_lock(&s->mu);
    assert_state(s);
    k->dropped = 1;
    if (mt_skips(s->cx, MT_EDGE_GONE)) {
        mt_places_give(&s->places, k->place);
        k->place = NULL;
    }
    if (!is_under_way(k))
        forget(s, k);
    read_ahead(s);
    pthread_cond_broadcast(&s->worker.news);
    mt_unlock(&s->mu);
}

mt_bay *mt_spill_bay(mt_spill *s, const mt_spilled *k)
{
    return MT_LOCKED(&s->mu, k->bay != NULL ? &k->bay->b : NULL);
}

/* ---- open and close --------------------------------------------------------------------- */

mt_status mt_spill_open(const mt_context *cx, mt_blocks *file, int n_bays, mt_spill **out)
{
    mt_spill *s = NULL;
    mt_status st;

    if (n_bays < 2)
        return MT_FAIL(MT_EINVAL, "spill: %d bays; 2 are the least: one moves to the device, one "
                       "to the file",
                       n_bays);
    MT_TRY(MT_MAKE(s, 1, "spill"));
    *s = (mt_spill){ .cx = cx, .dev = cx->dev, .store = cx->store, .file = file, .n_bays = n_bays };
    mt_mutex_open(&s->mu, MT_RANK_SPILL);
    MT_TRY(mt_worker_open(&s->worker, &s->mu, 1, "mt-spill", "swap disk", wait_for_device, s));
    *out = s;
    return MT_OK;

fail:
    mt_spill_close(s);
    return st;
}

/* What is owed is waited for; nothing new is read. */
void mt_spill_stop(mt_spill *s)
{
    if (s == NULL)
        return;
    mt_worker_stop(&s->worker, 0);
    mt_lock(&s->mu);
    while (s->requests > 0)
        mt_cond_wait(&s->worker.news, &s->mu);
    assert_state(s);
    mt_unlock(&s->mu);
}

void mt_spill_close(mt_spill *s)
{
    if (s == NULL)
        return;
    mt_spill_stop(s);
    mt_lock(&s->mu);
    while (s->newest != NULL)
        forget(s, s->newest);
    mt_unlock(&s->mu);
    for (bay *b = s->bays, *next; b != NULL; b = next) {
        next = b->next;
        mt_bay_close(&b->b, s->dev, watch_of(s));
        free(b);
    }
    mt_places_close(&s->places);
    mt_worker_close(&s->worker);
    mt_mutex_close(&s->mu);
    free(s);
}

mt_spill_stats mt_spill_stats_get(mt_spill *s)
{
    mt_spill_stats stats;

    mt_lock(&s->mu);
    stats = s->stats;
    stats.file_bytes = s->places.bytes;
    stats.used_bytes = s->places.used_bytes;
    mt_unlock(&s->mu);
    return stats;
}
