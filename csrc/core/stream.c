/* stream.c — the acquiring thread decides, the mover puts copies in the H2D queue.
 *
 * What a slot is said to hold, and when that is true
 * --------------------------------------------------
 * A slot names a unit from the moment a copy is asked for, long before the bytes are there. Its
 * `version` is a promise: the copy brings exactly this version. Three moments:
 *
 *   asked for   version = the unit's version now. While the request waits in line, the mover
 *               has read nothing yet and will bring what is newest, so a later look may raise
 *               the promise to the version of that moment.
 *   taken       the mover lets updates finish and reads the version. An update announced
 *               meanwhile may or may not be in the copy, so now the promise counts only if the
 *               unit's version has not moved since it was made.
 *   issued      the mover writes the version that the copy brings.
 *
 * The mover never calls a copy newer than it is: the ledger gives it the version at a moment when
 * no update was under way, and counts the copy as under way from that moment, so that the next
 * update raises the version at once and writes only behind the copy. Such a copy is whole but
 * behind, and acquire fetches anew.
 *
 * A request still in line when its slot is asked to hold something else is taken out of the line,
 * so at most one per slot waits and the line needs no bound of its own. One that the mover has
 * taken is carried out; the H2D queue's order puts the newer copy behind it.
 */
#include "stream.h"

#include "turn.h"
#include "worker.h"

#include <stdlib.h>
#include <string.h>

#define ALL_COME_MS  (30 * 60 * 1000)
#define POISON_BYTES ((size_t)1 << 20)

typedef struct slot {
    mt_job    node;      /* a request for this slot. mu */
    size_t    bytes;     /* of mem. Written by open */
    int       settled;   /* its unit never changes: no copy of ours goes there. Written by settle */
    mt_event *ready;     /* recorded on h2d by the mover, behind the copy */
    mt_event *freed;     /* recorded on run by the acquiring thread, when a copy is asked for */
    mt_post   using;     /* tells the watchdog of `freed`. Acquiring thread */
    uint64_t  last_use;  /* tick of the latest acquire or fetch. Acquiring thread */

    /* Written by the acquiring thread under mu; it may read them without. */
    void     *mem;
    int       unit;          /* -1: none */
    uint64_t  asked;         /* number of the latest request for this slot; 0: never */
    /* Under mu. */
    uint64_t  version;       /* see above; both threads write it */
    int       part;          /* the copy brings this rank's portion alone. Acquiring thread */
    int       lacks;         /* and the others' were not gathered. Acquiring thread */
    uint64_t  issued;        /* number of the latest request whose copy is in h2d; mover */
} slot;

typedef struct request {
    int      slot, unit, part;
    void    *mem;
    uint64_t number;
} request;

typedef struct cut {
    int           unit;
    mt_cut_range *ranges;
    int           n;
    size_t        bytes;     /* of a slot */
} cut;

struct mt_stream {
    const mt_context *cx;
    mt_dev       *dev;
    mt_store     *store;
    mt_slot_hooks hooks;
    mt_queue     *h2d;       /* the mover's alone */
    char         *poison;    /* POISON_BYTES of 0xFF; NULL before it is asked for. The mover's */
    slot         *slots;
    int           n_slots, n_settled;
    cut          *cuts;      /* written before the first acquire */
    int           n_cuts, first_cut;  /* the latter's number: the store's count of units */
    int64_t       cuts_room;

    /* Acquiring thread. */
    mt__course    course;
    uint64_t      tick, requests;
    int           last_unit;    /* of the latest acquire since begin; -1: none */
    int           portions;     /* what is fetched is this rank's portion alone */
    int           takes_turn;   /* what was acquired last is to be agreed on with the mates */
    int           computing;    /* of the latest window whose kernels are in run; -1: none yet */

    mt_mutex        mu;
    mt_worker       mover;            /* its jobs are slots. news: issued grew, or it failed */
    mt_stream_stats stats;            /* mu */
};

/* ---- numbers: of units, and of cuts ------------------------------------------------------ */

/* NULL: it is a unit's. */
static const cut *cut_of(const mt_stream *s, int number)
{
    return s->n_cuts > 0 && number >= s->first_cut ? &s->cuts[number - s->first_cut] : NULL;
}

int mt_stream_owner(const mt_stream *s, int number)
{
    const cut *c = cut_of(s, number);

    return c != NULL ? c->unit : number;
}

int mt_stream_numbers(const mt_stream *s)
{
    return s->n_cuts > 0 ? s->first_cut + s->n_cuts : mt_store_units(s->store);
}

/* What a slot must hold. */
static size_t bytes_of(const mt_stream *s, int number)
{
    const cut *c = cut_of(s, number);

    return c != NULL ? c->bytes : mt_store_hi_bytes(s->store, number);
}

mt_status mt_stream_bounds(const mt_stream *s, int number, size_t *bounds)
{
    int    mates = mt_turns_mates(s->cx->turns);
    size_t bytes = bytes_of(s, number);

    for (int k = 0; k < mates; k++)
        if (cut_of(s, number) == NULL)
            MT_DO(mt_portion_bytes(s->store, number, k, mates, &bounds[k], &bounds[k + 1]));
        else                             /* equal shares or nearly, at multiples of 512 bytes */
            bounds[k] = bytes / 512 * (size_t)k / (size_t)mates * 512;
    if (cut_of(s, number) != NULL)
        bounds[mates] = bytes;
    return MT_OK;
}

/* Bytes [from, to) of a slot that a request brings. */
static mt_status brought_by(const mt_stream *s, int number, int part, size_t *from, size_t *to)
{
    size_t bounds[MT_RANKS_MOST + 1];
    int    me;

    *from = 0;
    *to = bytes_of(s, number);
    if (!part)
        return MT_OK;
    MT_DO(mt_stream_bounds(s, number, bounds));
    me = mt_turns_place(s->cx->turns);
    *from = bounds[me];
    *to = bounds[me + 1];
    return MT_OK;
}

static size_t moved_by(const mt_stream *s, int number, int part)
{
    size_t from, to;

    return brought_by(s, number, part, &from, &to) == MT_OK ? to - from : 0;
}

static const char *name_of(const mt_stream *s, int number)
{
    return mt_store_name(s->store, mt_stream_owner(s, number));
}

static uint64_t version_of(const mt_stream *s, int number)
{
    return mt_ledger_version(s->store, mt_stream_owner(s, number));
}

/* Under mu, at each door: where slots and their requests stand. */
static void assert_state(const mt_stream *s)
{
    int with_mover = 0, settled = 0;

    if (!MT_IS_CHECKED)
        return;
    MT_ASSERT(mt_holds(&s->mu));
    for (int k = 0; k < s->n_slots; k++) {
        const slot *sl = &s->slots[k];
        int         asked = sl->unit >= 0 && sl->issued < sl->asked;

        MT_ASSERT(sl->issued <= sl->asked && sl->asked <= s->requests);
        MT_ASSERT(!sl->node.listed || (asked && !sl->settled));
        MT_ASSERT(!sl->settled || sl->unit >= 0);
        MT_ASSERT(sl->unit < 0 || bytes_of(s, sl->unit) <= sl->bytes);
        with_mover += asked && !sl->node.listed;
        settled += sl->settled;
    }
    MT_ASSERT(settled == s->n_settled);
    MT_ASSERT(with_mover <= 1 || s->mover.failed != MT_OK);
}

/* ---- the mover -------------------------------------------------------------------------- */

#define TOLD 8                   /* units in line that the feed is told of */

static int on_disk(const mt_stream *s, int unit)
{
    return s->cx->feed != NULL && mt_store_home(s->store, mt_stream_owner(s, unit), NULL)->fed;
}

/* Under mu. What stands in line will be fetched in this order. */
static void tell_feed(mt_stream *s)
{
    int units[TOLD], n = 0;

    if (s->cx->feed == NULL)
        return;
    for (const mt_job *j = s->mover.first; j != NULL && n < TOLD; j = j->next)
        units[n++] = mt_stream_owner(s, ((const slot *)(const void *)j)->unit);
    mt_feed_expect(s->cx->feed, units, n);
}

/* hi: NULL where the weights are on disk. */
static mt_status put_copy(mt_stream *s, const request *r, const void *hi)
{
    const mt_dev_ops *v = s->dev->ops;
    slot             *k = &s->slots[r->slot];
    const cut        *c = cut_of(s, r->unit);
    mt_cut_range      whole = { 0, 0, bytes_of(s, r->unit) };
    int               poisons = s->cx->debug.poison;
    size_t            from, to;
    mt_span           span;

    /* FREED: compute on what the slot held was put in run before `freed` was recorded there. */
    MT_DO(mt_edge(s->cx, MT_EDGE_FREED, s->h2d, k->freed));
    if (poisons && s->poison == NULL) {
        MT_DO(MT_MAKE(s->poison, (int64_t)POISON_BYTES, "stream"));
        memset(s->poison, 0xFF, POISON_BYTES);
    }
    /* Behind FREED and before the copy, so that whoever reads too early reads NaN. */
    for (size_t at = 0; poisons && at < whole.bytes; at += POISON_BYTES)
        MT_DO(v->copy(s->h2d, (char *)r->mem + at, s->poison,
                      whole.bytes - at < POISON_BYTES ? whole.bytes - at : POISON_BYTES));
    if (hi == NULL) {
        MT_DO(mt_feed_copy(s->cx->feed, r->unit, r->mem, s->h2d));
        return v->record(s->h2d, k->ready);
    }
    MT_DO(brought_by(s, r->unit, r->part, &from, &to));
    mt_timeline_begin(s->cx->timeline, &span, MT_LANE_H2D, MT_WORK_FETCH,
                      mt_stream_owner(s, r->unit), s->h2d);
    for (int i = 0; i < (c != NULL ? c->n : 1); i++) {
        const mt_cut_range *one = c != NULL ? &c->ranges[i] : &whole;
        size_t              first = one->to > from ? one->to : from;     /* of it in [from, to) */
        size_t              end = one->to + one->bytes < to ? one->to + one->bytes : to;

        if (end > first)
            MT_DO(v->copy(s->h2d, (char *)r->mem + first,
                          (const char *)hi + one->from + (first - one->to), end - first));
    }
    mt_timeline_end(s->cx->timeline, &span, to - from, s->h2d);
    return v->record(s->h2d, k->ready);
}

/* Between begin and fetching nothing waits for updates: an updater may be waiting for us. Reads of
 * the disk, and copies put before, end without it. */
static mt_status deliver(mt_stream *s, const request *r, uint64_t *version)
{
    int       unit = mt_stream_owner(s, r->unit);
    void     *hi = NULL;
    mt_status st, end;

    if (!on_disk(s, r->unit))
        MT_TRY(mt_store_hi(s->store, unit, &hi));
    else if (unit != r->unit)
        return MT_FAIL(MT_ESTATE, "unit %s: its weights are on disk, and a part of them is to be "
                       "fetched", mt_store_name(s->store, unit));
    /* UPDATED: the copy reads HI, which an update announced before now still has to write. */
    *version = version_of(s, r->unit);
    if (!mt_skips(s->cx, MT_EDGE_UPDATED))
        MT_TRY(mt_ledger_fetch_begin(s->store, unit, version));
    if ((st = put_copy(s, r, hi)) != MT_OK)
        mt_ledger_fault(s->store, st, mt_last_error());   /* before the updater may go on */
    end = mt_ledger_fetching(s->store, unit, s->h2d);
    return st != MT_OK ? st : end;
fail:
    if (s->cx->feed != NULL)
        mt_feed_next(s->cx->feed, -1);       /* nothing is read for what is not fetched */
    return st;
}

/* The slot is told what to bring, at the moment when its turn has come. */
static mt_status carry_out(void *arg, mt_job *node)
{
    mt_stream *s = arg;
    slot      *k = (slot *)(void *)node;
    request    r = { (int)(k - s->slots), k->unit, k->part, k->mem, k->asked };
    uint64_t   version = 0;
    mt_status  st;

    assert_state(s);
    if (on_disk(s, r.unit))
        mt_feed_next(s->cx->feed, r.unit);
    tell_feed(s);
    mt_unlock(&s->mu);
    if ((st = deliver(s, &r, &version)) != MT_OK)
        mt_ledger_fault(s->store, st, mt_last_error());
    mt_lock(&s->mu);
    if (st == MT_OK)
        k->issued = r.number;
    if (st == MT_OK && k->asked == r.number)
        k->version = version;
    return st;
}

/* ---- open and close --------------------------------------------------------------------- */

MT_CLOSER(mt_stream_close, mt_stream)

mt_status mt_stream_open(const mt_context *cx, const mt_slot_desc *slots, int n_slots,
                         mt_slot_hooks hooks, mt_stream **out)
{
    mt_stream *s MT_CLOSED(mt_stream_close) = NULL;

    if (n_slots < 1)
        return MT_FAIL(MT_EINVAL, "stream: %d slots; one is the least, two overlap", n_slots);
    for (int i = 0; i < n_slots; i++)
        if (slots[i].mem == NULL || slots[i].bytes == 0)
            return MT_FAIL(MT_EINVAL, "stream: slot %d of %d has no memory", i, n_slots);
    MT_DO(MT_MAKE(s, 1, "stream"));
    *s = (mt_stream){ .cx = cx, .dev = cx->dev, .store = cx->store, .hooks = hooks,
                      .last_unit = -1, .computing = -1 };
    mt_mutex_open(&s->mu, MT_RANK_STREAM);
    MT_DO(MT_MAKE(s->slots, n_slots, "stream"));
    s->n_slots = n_slots;
    for (int i = 0; i < n_slots; i++) {
        s->slots[i] = (slot){ .bytes = slots[i].bytes, .mem = slots[i].mem, .unit = -1 };
        MT_DO(s->dev->ops->event_open(s->dev, &s->slots[i].ready));
        MT_DO(s->dev->ops->event_open(s->dev, &s->slots[i].freed));
    }
    MT_DO(s->dev->ops->queue_open(s->dev, "h2d", &s->h2d));
    MT_DO(mt_worker_open(&s->mover, &s->mu, 1, "mt-mover", "h2d", carry_out, s));
    *out = MT_KEEP(s);
    return MT_OK;
}

void mt_stream_close(mt_stream *s)
{
    if (s == NULL)
        return;
    mt_worker_stop(&s->mover, 1);
    mt_worker_close(&s->mover);
    s->dev->ops->queue_close(s->h2d);
    for (int i = 0; i < s->n_slots; i++) {
        s->dev->ops->event_close(s->slots[i].ready);
        mt_watch_take(mt_store_watch(s->store), &s->slots[i].using);
        s->dev->ops->event_close(s->slots[i].freed);
    }
    mt__course_close(&s->course);
    mt_mutex_close(&s->mu);
    for (int i = 0; i < s->n_cuts; i++)
        free(s->cuts[i].ranges);
    free(s->cuts);
    free(s->slots);
    free(s->poison);
    free(s);
}

mt_status mt_stream_settle(mt_stream *s, int unit, int k)
{
    mt_resident *r = s->cx->residents;
    size_t    bytes = mt_store_hi_bytes(s->store, unit);

    if (k < 0 || k >= s->n_slots || s->slots[k].bytes < bytes)
        return MT_FAIL(MT_EINVAL, "unit %s: %zu bytes do not fit slot %d of %d with its %zu",
                       mt_store_name(s->store, unit), bytes, k, s->n_slots,
                       k >= 0 && k < s->n_slots ? s->slots[k].bytes : 0);
    if (s->slots[k].unit >= 0)
        return MT_FAIL(MT_ESTATE, "unit %s: slot %d has held unit %s; settle units before the "
                       "first forward", mt_store_name(s->store, unit), k,
                       mt_store_name(s->store, s->slots[k].unit));
    if (mt_resident_mem(r, unit) == NULL)
        MT_DO(mt_resident_settle(r, unit, s->slots[k].mem));
    else if (mt_resident_mem(r, unit) != s->slots[k].mem)
        return MT_FAIL(MT_EINVAL, "unit %s: slot %d is not the memory that it has",
                       mt_store_name(s->store, unit), k);
    MT_HOLD(&s->mu);
    s->slots[k].unit = unit;
    s->slots[k].settled = 1;
    s->n_settled++;
    assert_state(s);
    return MT_OK;
}

/* A unit that was added since would have a cut's number. */
static mt_status check_numbers(const mt_stream *s)
{
    if (s->n_cuts > 0 && s->first_cut != mt_store_units(s->store))
        return MT_FAIL(MT_ESTATE, "stream: %d units were added since unit %s was cut",
                       mt_store_units(s->store) - s->first_cut,
                       mt_store_name(s->store, s->cuts[0].unit));
    return MT_OK;
}

mt_status mt_stream_cut(mt_stream *s, int unit, const mt_cut_range *ranges, int n, int *number)
{
    size_t bytes = mt_store_hi_bytes(s->store, unit);
    cut    c = { .unit = unit, .n = n };

    MT_DO(check_numbers(s));
    if (s->requests > 0)
        return MT_FAIL(MT_ESTATE, "unit %s: it cannot be cut: weights are being fetched",
                       mt_store_name(s->store, unit));
    for (int i = 0; i < n; i++)
        if (ranges[i].bytes == 0 || ranges[i].from > bytes ||
            ranges[i].bytes > bytes - ranges[i].from || ranges[i].to > SIZE_MAX - ranges[i].bytes)
            return MT_FAIL(MT_EINVAL, "unit %s: a cut from byte %zu, %zu bytes, of %zu that it has",
                           mt_store_name(s->store, unit), ranges[i].from, ranges[i].bytes, bytes);
    MT_DO(MT_GROW(s->cuts, s->cuts_room, s->n_cuts + 1, "stream"));
    MT_DO(MT_MAKE(c.ranges, n, "stream"));
    for (int i = 0; i < n; i++) {
        size_t end = ranges[i].to + ranges[i].bytes;

        c.ranges[i] = ranges[i];
        c.bytes = end > c.bytes ? end : c.bytes;
    }
    s->first_cut = mt_store_units(s->store);
    s->cuts[s->n_cuts] = c;
    *number = s->first_cut + s->n_cuts++;
    return MT_OK;
}

/* ---- asking for copies: the acquiring thread -------------------------------------------- */

/* Its weights are in files of all mates: there is no other way to it than together. */
static int needs_mates(const mt_stream *s, int unit)
{
    return s->cx->turns != NULL && mt_turns_mates(s->cx->turns) > 1 && on_disk(s, unit);
}

static int comes_in_part(const mt_stream *s, int unit)
{
    return s->portions || needs_mates(s, unit);
}

/* Under mu. Does slot k bring the unit's weights as they are at version `now`? A portion of them is
 * enough where the others' are gathered. */
static int brings(mt_stream *s, int k, int unit, uint64_t now)
{
    slot *sl = &s->slots[k];

    if (sl->unit != unit)
        return 0;
    if (sl->version != now && sl->node.listed)
        sl->version = now;
    if (sl->lacks && !comes_in_part(s, unit) && sl->node.listed) {
        /* What was to bring a portion is to bring all. */
        s->stats.h2d_bytes += moved_by(s, unit, 0) - moved_by(s, unit, 1);
        sl->part = sl->lacks = 0;
    }
    return sl->version == now && (!sl->lacks || comes_in_part(s, unit));
}

/* The slot that holds the unit's current weights or will, `first` if that does; -1: none. */
static int holding(mt_stream *s, int unit, int first)
{
    uint64_t now = version_of(s, unit);
    int      found = -1;

    MT_HOLD(&s->mu);
    assert_state(s);
    if (first >= 0 && brings(s, first, unit, now))
        found = first;
    for (int k = 0; k < s->n_slots && found < 0; k++)
        if (brings(s, k, unit, now))
            found = k;
    return found;
}

static int held(const mt_stream *s, int k)
{
    return s->hooks.held != NULL && s->hooks.held(s->hooks.ctx, k);
}

/* Under mu. Slot k's request, if the mover has not begun it, leaves the line: k holds nothing. */
static void withdraw(mt_stream *s, slot *k)
{
    if (!k->node.listed)
        return;
    mt_worker_withdraw(&s->mover, &k->node);
    s->stats.fetches--;
    s->stats.h2d_bytes -= moved_by(s, k->unit, k->part);
    k->unit = -1;
}

/* Asks the mover to bring `unit`, or this rank's portion of it, into slot k. The hooks are called
 * without mu: they may run Python, and that may call us. */
static mt_status fetch(mt_stream *s, int k, int unit, int part, mt_queue *run)
{
    slot    *sl = &s->slots[k];
    size_t   bytes = moved_by(s, unit, part);
    uint64_t now = version_of(s, unit);
    void    *mem;

    if (held(s, k)) {            /* it gets other memory, and forgets what the old one held */
        if (s->hooks.renew == NULL)
            return MT_FAIL(MT_ESTATE, "stream: slot %d is held and there is no hook to renew it",
                           k);
        MT_DO(s->hooks.renew(s->hooks.ctx, k, &mem));
        MT_HOLD(&s->mu);
        withdraw(s, sl);
        sl->mem = mem;
        sl->unit = -1;
        assert_state(s);
    }
    MT_DO(s->dev->ops->record(run, sl->freed));
    mt_watch_put(mt_store_watch(s->store), &sl->using, mt_compute, name_of(s, s->computing),
                 "its kernels (the event FREED)", sl->freed);
    sl->last_use = ++s->tick;
    MT_HOLD(&s->mu);
    withdraw(s, sl);
    sl->unit = unit;
    sl->part = sl->lacks = part;
    sl->version = now;
    sl->asked = ++s->requests;
    (void)mt_worker_submit(&s->mover, &sl->node);
    s->stats.fetches++;
    s->stats.h2d_bytes += bytes;
    tell_feed(s);
    assert_state(s);
    return MT_OK;
}

/* Of the slots that the unit fits: one with an old copy of it, else, among the smallest of them,
 * the one not used for longest that nobody holds, else the one not used for longest. */
static int give_way(const mt_stream *s, int unit)
{
    size_t bytes = bytes_of(s, unit), least = SIZE_MAX;
    int    best = -1, best_held = 1;

    for (int k = 0; k < s->n_slots; k++) {
        if (s->slots[k].unit == unit)
            return k;
        if (!s->slots[k].settled && s->slots[k].bytes >= bytes && s->slots[k].bytes < least)
            least = s->slots[k].bytes;
    }
    for (int k = 0; k < s->n_slots; k++) {
        if (s->slots[k].settled || s->slots[k].bytes != least)
            continue;
        int k_held = held(s, k);
        if (best < 0 || k_held < best_held ||
            (k_held == best_held && s->slots[k].last_use < s->slots[best].last_use)) {
            best = k;
            best_held = k_held;
        }
    }
    return best;
}

static mt_status fetch_on_demand(mt_stream *s, int k, int unit, int part, mt_queue *run)
{
    MT_DO(fetch(s, k, unit, part, run));
    MT_HOLD(&s->mu);
    s->stats.demand_fetches++;
    return MT_OK;
}

/* ---- following the schedule: the acquiring thread --------------------------------------- */

/* Carries out FETCH i, unless the unit is there already: in that slot, or in another that stays
 * as it is until the unit is used. */
static mt_status hand_over(mt_stream *s, int64_t i, mt_queue *run)
{
    const mt_step *step = &mt__course_schedule(&s->course)->steps[i];
    int            k = holding(s, step->unit, step->slot);

    return k == step->slot || (k >= 0 && mt__course_keeps(&s->course, i, k)) ? MT_OK
           : fetch(s, step->slot, step->unit, comes_in_part(s, step->unit), run);
}

mt_status mt_stream_begin(mt_stream *s)
{
    int     n_units = mt_stream_numbers(s);
    size_t *unit_bytes MT_FREED = NULL, *slot_bytes MT_FREED = NULL;

    MT_DO(check_numbers(s));
    MT_DO(MT_MAKE(unit_bytes, n_units, "stream"));
    MT_DO(MT_MAKE(slot_bytes, s->n_slots, "stream"));
    for (int u = 0; u < n_units; u++)
        unit_bytes[u] = bytes_of(s, u);
    for (int k = 0; k < s->n_slots; k++)     /* a settled one fits no other unit */
        slot_bytes[k] = s->slots[k].settled ? SIZE_MAX : s->slots[k].bytes;
    s->last_unit = -1;
    return mt__course_begin(&s->course, unit_bytes, n_units, slot_bytes, s->n_slots);
}

static mt_status check_fits(const mt_stream *s, int unit)
{
    size_t bytes, most = 0;
    int    some = 0;

    if (unit < 0 || unit >= mt_stream_numbers(s))
        return MT_FAIL(MT_EINVAL, "stream: there is no unit %d; the store has %d",
                       unit, mt_store_units(s->store));
    bytes = bytes_of(s, unit);
    for (int k = 0; k < s->n_slots; k++)
        if (!s->slots[k].settled) {
            most = s->slots[k].bytes > most ? s->slots[k].bytes : most;
            some = 1;
        }
    if (!some || bytes > most)
        return MT_FAIL(MT_EINVAL, "unit %s: %zu bytes do not fit the largest slot, %zu bytes; "
                       "make it larger", name_of(s, unit), bytes, most);
    return MT_OK;
}

/* A window of its own: the cursor moves, copies are asked for, *k is where the unit will be. */
static mt_status open_window(mt_stream *s, int unit, mt_queue *run, int *k)
{
    const mt_schedule *sch;
    int64_t            from, step;
    int                planned;

    MT_DO(mt__course_compute(&s->course, unit, &from, &step));
    sch = mt__course_schedule(&s->course);
    planned = step >= 0 ? sch->steps[step].slot : -1;
    /* The FETCHes in [from, step) that are of use from here on. On the schedule these are the ones
     * that the previous window's slot held up; off it, what the slots should hold by now. A slot
     * that has the unit of this step, which the schedule may not know, stays as it is. */
    for (int64_t i = from; i < step && !s->cx->debug.sync; i++)
        if (mt__course_wants(&s->course, i, step) &&
            sch->steps[i].slot != holding(s, unit, planned))
            MT_DO(hand_over(s, i, run));
    if ((*k = holding(s, unit, planned)) < 0) {
        *k = give_way(s, unit);
        MT_DO(fetch_on_demand(s, *k, unit, comes_in_part(s, unit), run));
    }
    s->slots[*k].last_use = ++s->tick;
    s->last_unit = unit;
    /* The FETCHes up to the next COMPUTE. Slot k was just given out: nobody has a tensor in it yet,
     * so `held` does not protect it, and its compute is not in run. What comes from there on waits
     * for the next acquire. */
    for (; step >= 0 && !s->cx->debug.sync && s->course.at < sch->n; s->course.at++) {
        const mt_step *next = &sch->steps[s->course.at];

        if (next->kind == MT_COMPUTE || next->slot == *k)
            break;
        MT_DO(hand_over(s, s->course.at, run));
    }
    return MT_OK;
}

mt_status mt_stream_acquire(mt_stream *s, int unit, mt_queue *run, int *slot_out, void **mem)
{
    int k = -1;                          /* the slot that is the unit's for good; -1: none */

    MT_DO(mt_ledger_check(s->store));
    s->takes_turn = 0;
    for (int i = 0; i < s->n_slots && s->n_settled > 0 && k < 0; i++)
        k = s->slots[i].settled && s->slots[i].unit == unit ? i : -1;
    if (k < 0) {
        MT_DO(check_fits(s, unit));
        if (unit != s->last_unit || (k = holding(s, unit, -1)) < 0) {
            MT_DO(open_window(s, unit, run, &k));
            s->takes_turn = comes_in_part(s, unit);
        }
        s->takes_turn |= s->slots[k].lacks;      /* what interrupted its turn came to nothing */
    }
    s->computing = unit;
    *slot_out = k;
    *mem = s->slots[k].mem;
    return MT_OK;
}

/* ---- with the other ranks of the machine ------------------------------------------------- */

void mt_stream_portions(mt_stream *s, int on)
{
    MT_HOLD(&s->mu);                     /* holding() looks at it under mu */
    s->portions = on && s->cx->turns != NULL && mt_turns_mates(s->cx->turns) > 1;
}

int mt_stream_takes_turn(const mt_stream *s)
{
    return s->takes_turn;
}

mt_status mt_stream_turn(mt_stream *s, int k, int *gathers)
{
    const slot *sl = &s->slots[k];
    int         in_step, needs = needs_mates(s, sl->unit);
    /* A mate whose slot has all of it gathers nothing, and so does nobody. */
    uint64_t    about = ((uint64_t)(unsigned)sl->unit + 1) << 1 | (uint64_t)(sl->lacks || needs);

    mt_turns_next(s->cx->turns, mt_stream_owner(s, sl->unit));
    MT_DO(mt_turns_take(s->cx->turns, about, needs ? ALL_COME_MS : 0, &in_step));
    *gathers = in_step && (sl->lacks || needs);
    return MT_OK;
}

/* READY stands behind the collective from now on; the mover has nothing for this slot before the
 * next fetch of it, which is asked for by this thread. */
mt_status mt_stream_gathered(mt_stream *s, int k, mt_queue *beside)
{
    MT_DO(s->dev->ops->record(beside, s->slots[k].ready));
    MT_HOLD(&s->mu);
    s->slots[k].lacks = 0;
    s->stats.gathers++;
    return MT_OK;
}

mt_status mt_stream_whole(mt_stream *s, int k, mt_queue *run)
{
    mt_turns_stats n;
    int            other;

    if (!s->slots[k].lacks)
        return MT_OK;
    if (needs_mates(s, s->slots[k].unit)) {
        n = mt_turns_stats_get(s->cx->turns);
        other = (int)(n.other >> 1) - 1;
        return MT_FAIL(MT_EPEER, "unit %s: each rank's file has a portion of its weights, so all "
                       "have to come to it together, in an evaluation too; and rank %d %s%s; "
                       "homes=\"disk\" keeps weights in memory", name_of(s, s->slots[k].unit),
                       n.rank, other < 0 ? "does not" : "is at unit ",
                       other < 0 ? "" : name_of(s, other));
    }
    return fetch_on_demand(s, k, s->slots[k].unit, 0, run);
}

mt_status mt_stream_kick(mt_stream *s, mt_queue *run)
{
    const mt_schedule *sch = mt__course_schedule(&s->course);

    MT_DO(mt_ledger_check(s->store));
    /* An update in mid-backward is no end of the step: its slots are still needed. */
    if (s->cx->debug.sync || !mt__course_over(&s->course))
        return MT_OK;
    for (int64_t i = 0; i < sch->n && sch->steps[i].kind != MT_COMPUTE; i++)
        if (sch->steps[i].kind == MT_FETCH)
            MT_DO(hand_over(s, i, run));
    return MT_OK;
}

/* ---- waiting ---------------------------------------------------------------------------- */

mt_status mt_stream_await(mt_stream *s, int k, mt_queue *run)
{
    uint64_t    begun = mt_now_ns();
    const slot *sl;
    int         failed = 0;
    mt_status   st;

    if (k < 0 || k >= s->n_slots)
        return MT_FAIL(MT_EINVAL, "stream: there is no slot %d of %d", k, s->n_slots);
    sl = &s->slots[k];
    if (sl->settled) {
        MT_DO(mt_resident_await(s->cx->residents, sl->unit, run));
    } else {
        if (on_disk(s, sl->unit))
            mt_mirror_forget(s->store, mt_stream_owner(s, sl->unit));
        /* The host waits for the mover, so that `ready` has been recorded for this copy when run is
         * told to wait for it. A wait of the mover's that the watchdog ends is a fault, and ends
         * this one. */
        st = MT_UNTIL(mt_store_watch(s->store), &s->mover.news, &s->mu,
                      (failed = s->mover.failed != MT_OK) || sl->issued >= sl->asked,
                      name_of(s, sl->unit), "its fetch to be put");
        MT_DO(failed ? mt_ledger_check(s->store) : st);
        if (s->cx->debug.sync)
            MT_DO(s->dev->ops->sync_event(sl->ready));
        /* READY: the copy is in h2d; run goes on when it is over. */
        MT_DO(mt_edge(s->cx, MT_EDGE_READY, run, sl->ready));
    }
    MT_WITH(&s->mu) s->stats.await_ns += mt_now_ns() - begun;
    return MT_OK;
}

/* ---- looking in ------------------------------------------------------------------------- */

int mt_stream_find(mt_stream *s, const void *p, int *unit, size_t *offset)
{
    uintptr_t at = (uintptr_t)p;
    int       found = -1;

    MT_HOLD(&s->mu);
    for (int k = 0; k < s->n_slots && found < 0; k++) {
        uintptr_t mem = (uintptr_t)s->slots[k].mem;

        if (at >= mem && at - mem < s->slots[k].bytes) {
            found = k;
            *unit = s->slots[k].unit;
            *offset = at - mem;
        }
    }
    return found;
}

mt_stream_stats mt_stream_stats_get(mt_stream *s)
{
    mt_stream_stats stats = MT_LOCKED(&s->mu, s->stats);

    stats.rebuilds = s->course.rebuilds;
    return stats;
}

const mt_schedule *mt_stream_schedule(const mt_stream *s)
{
    return mt__course_schedule(&s->course);
}
