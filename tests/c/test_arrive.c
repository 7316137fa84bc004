/* test_arrive.c — guests, of core/resident.h: what a stay takes, what it copies, and that
 * each edge matters. That training with guests gives the same bits is test_peers.c's.
 */
#include "dev_fault.h"
#include "toy.h"
#include "../../csrc/core/resident_impl.h"

/* bf16 and fp32 of several pieces, fp16, fp64, and one that is frozen; the unit is settled. */
#define PARAMS 5
static const mt_param_desc mixed[PARAMS] = {
    { MT_BF16, 3000, 1 }, { MT_F32, 1001, 1 }, { MT_F16, 640, 1 }, { MT_F64, 50, 1 },
    { MT_BF16, 900, 0 },
};

#define ROOMS 256

/* One unit and its stay. */
typedef struct hotel {
    mt_context cx;
    mt_dev    *dev;
    mt_store  *store;
    mt_resident *r;
    void      *slot, *next;      /* of the unit, and of one that is settled behind it */
    mt_queue  *run, *other;
    void      *mem[ROOMS];
    size_t     bytes[ROOMS];
    int        n;
} hotel;

static mt_status take_rooms(hotel *h)
{
    size_t   *bytes;
    mt_status st;

    MT_TRY(mt_arrive_sizes(h->r, 0, MT_ARRIVE_LEAST, &bytes, &h->n));
    REQUIRE(h->n <= ROOMS);
    memcpy(h->bytes, bytes, (size_t)h->n * sizeof *bytes);
    free(bytes);
    for (int i = 0; i < h->n && st == MT_OK; i++)
        st = h->dev->ops->mem_alloc(h->dev, h->bytes[i], &h->mem[i]);
fail:
    return st;
}

static mt_status hotel_open(hotel *h, mt_dev *dev, const mt_param_desc *d, int n)
{
    int unit;

    *h = (hotel){ .dev = dev };
    h->cx.dev = dev;
    TRY(mt_store_open(&h->cx, &h->store));
    h->cx.store = h->store;
    TRY(mt_store_add(h->store, "embedding", d, n, &unit));
    TRY(dev->ops->queue_open(dev, "run", &h->run));
    TRY(dev->ops->queue_open(dev, "other", &h->other));
    TRY(mt_resident_open(&h->cx, &h->r));
    TRY(dev->ops->mem_alloc(dev, mt_store_hi_bytes(h->store, 0), &h->slot));
    TRY(mt_resident_settle(h->r, 0, h->slot));
    TRY(mt_arrive_invite(h->r, 0));
    return take_rooms(h);
}

static void hotel_close(hotel *h)
{
    mt_resident_close(h->r);
    h->dev->ops->mem_free(h->dev, h->slot);
    if (h->next != NULL)
        h->dev->ops->mem_free(h->dev, h->next);
    if (h->run != NULL)
        h->dev->ops->queue_close(h->run);
    if (h->other != NULL)
        h->dev->ops->queue_close(h->other);
    for (int i = 0; i < h->n; i++)
        h->dev->ops->mem_free(h->dev, h->mem[i]);
    mt_store_close(h->store);
}

static void on_cpu(hotel *h, unsigned skip)
{
    REQUIRE_OK(hotel_open(h, cpu_open(), &(mt_param_desc){ MT_F32, 100, 1 }, 1));
    debug_set(&h->cx, (mt_debug){ .skip = skip });
}

static void off_cpu(hotel *h)
{
    mt_dev *dev = h->dev;

    hotel_close(h);
    dev->ops->close(dev);
}

#define HOTEL(h, ...) CLOSED_BY(off_cpu) hotel h; on_cpu(&h, __VA_ARGS__)

static mt_status lift(hotel *h)
{
    int       taken = 0;
    mt_status st = mt_arrive_lift(h->r, 0, MT_ARRIVE_LEAST, h->mem, h->n, h->run, &taken);

    CHECK_EQ(taken, st == MT_OK);
    return st;
}

static float *moment(hotel *h)
{
    return store_at(h->store, 0, 0, MT_PLANE_M);
}

/* What the home asks around an update, which made has done. */
static mt_status parts_of(hotel *h, const mt_part **parts, int *n)
{
    return MT_LOCKED(&h->r->mu, mt_arrive_parts(h->r, 0, parts, n));
}

static mt_status before(hotel *h, mt_queue *q)
{
    return MT_LOCKED(&h->r->mu, mt__arrive_before(h->r, h->r->units[0], q));
}

static mt_status behind_of(hotel *h, int unit, mt_queue *made, const int *params, int n)
{
    MT_HOLD(&h->r->mu);
    TRY(h->dev->ops->record(made, h->r->units[unit]->done));
    return mt__arrive_behind(h->r, h->r->units[unit], params, n);
}

static mt_status behind(hotel *h, mt_queue *made, const int *params, int n)
{
    return behind_of(h, 0, made, params, n);
}

/* A second unit, as large as the first. */
static void settle_next(hotel *h)
{
    int unit = store_add(h->store, "head", mt_store_desc(h->store, 0, 0), 1);

    REQUIRE_OK(h->dev->ops->mem_alloc(h->dev, mt_store_hi_bytes(h->store, unit), &h->next));
    REQUIRE_OK(mt_resident_settle(h->r, unit, h->next));
}

static mt_status current(hotel *h)
{
    TRY(mt_ledger_wait_updates(h->store, 0));
    return mt__arrive_copied(h->r, 0);
}

/* The first element of the first moment, where it is during the stay. */
static float *up(hotel *h)
{
    const mt_part *parts;
    int            n;

    REQUIRE(parts_of(h, &parts, &n) == MT_OK && n > 0);
    return parts[0].at[MT_PLANE_M];
}

/* ---- what a stay takes ------------------------------------------------------------------ */

TEST(every_state_of_what_is_trained_is_in_one_part)
{
    static unsigned char seen[PARAMS][3000];
    const mt_part *parts;
    hotel    h;
    void    *at;
    int      n;

    REQUIRE_OK(hotel_open(&h, cpu_open(), mixed, PARAMS));
    CHECK_FAILS(parts_of(&h, &parts, &n), MT_ESTATE, "lifted before its update");
    CHECK_FAILS(mt_resident_at(h.r, 0, 0, MT_PLANE_M, &at), MT_ESTATE, "around its updates");
    CHECK_OK(lift(&h));
    CHECK_OK(parts_of(&h, &parts, &n));
    CHECK_EQ(n, h.n);
    for (int i = 0; i < n; i++) {
        const mt_part *p = &parts[i];
        size_t                most = 0;

        CHECK_EQ(p->from % 128, 0);
        for (int64_t k = 0; k < p->n; k++)
            seen[p->param][p->from + k]++;
        for (int k = 0; k < MT_PLANE_COUNT; k++) {
            size_t bytes = mt_plane_bytes((mt_plane)k, mixed[p->param].dtype, MT_STATES_FP32, p->n);

            CHECK_EQ(p->at[k] != NULL, (MT_STATE_PLANES >> k & 1) && bytes > 0);
            if (p->at[k] == NULL)
                continue;
            CHECK_EQ((uintptr_t)p->at[k] % 512, (uintptr_t)h.mem[i] % 512);
            CHECK((char *)p->at[k] >= (char *)h.mem[i]);
            CHECK((char *)p->at[k] + bytes <= (char *)h.mem[i] + h.bytes[i]);
            most = h.bytes[i];
        }
        CHECK(most <= MT_ARRIVE_LEAST);
    }
    for (int i = 0; i < PARAMS; i++)
        for (int64_t k = 0; k < mixed[i].numel; k++)
            CHECK_EQ(seen[i][k], i < 3);
    off_cpu(&h);
}

TEST(a_stay_goes_on_until_it_is_ended)
{
    int taken = 1, left = 0;

    HOTEL(h, 0);
    moment(&h)[0] = 1;
    CHECK_OK(lift(&h));
    CHECK_OK(mt__arrive_drain(h.r));
    CHECK(*up(&h) == 1);
    *up(&h) = 2;
    CHECK_OK(mt_arrive_lift(h.r, 0, MT_ARRIVE_LEAST, h.mem, h.n, h.run, &taken));
    CHECK_EQ(taken, 0);
    CHECK_OK(mt__arrive_drain(h.r));
    CHECK(*up(&h) == 2);
    moment(&h)[0] = 3;
    CHECK_OK(mt__arrive_push(h.r, 0, 0, 1u << MT_PLANE_M));
    CHECK(*up(&h) == 3);
    CHECK_OK(mt_arrive_leave(h.r, 0, 0, &left));
    CHECK_EQ(left, 1);
    CHECK_OK(mt__arrive_push(h.r, 0, 0, 1u << MT_PLANE_M));      /* they are on the host */
    CHECK_EQ(mt_resident_stats_get(h.r).h2d_bytes, 3 * 400);
    CHECK_OK(mt_arrive_leave(h.r, 0, 1, &left));
    CHECK_EQ(left, 1);
}

/* Only what the update changed comes down. */
TEST(parameters_without_an_update_stay_up)
{
    mt_param_desc d[2] = { { MT_F32, 100, 1 }, { MT_F32, 100, 1 } };
    int           params[1] = { 1 };
    hotel         h;

    REQUIRE_OK(hotel_open(&h, cpu_open(), d, 2));
    CHECK_OK(lift(&h));
    CHECK_OK(behind(&h, h.other, params, 1));
    CHECK_OK(current(&h));
    CHECK_EQ(mt_resident_stats_get(h.r).d2h_bytes, 2 * 400);
    off_cpu(&h);
}

/* ---- edges: what one who comes too early finds ------------------------------------------ */

typedef struct slow {
    float *at, value;
} slow;

static void write_late(void *arg)
{
    sleep_ms(20);
    *((slow *)arg)->at = ((slow *)arg)->value;
}

static void read_now(void *arg)
{
    ((slow *)arg)->value = *((slow *)arg)->at;
}

/* Compute in run is slow to write memory that was lent since: what the states are then. */
static float given_while_written(unsigned skip)
{
    HOTEL(h, skip);
    moment(&h)[0] = 1;
    slow w = (slow){ h.mem[0], 9 };
    CHECK_OK(h.dev->ops->call(h.run, write_late, &w));
    CHECK_OK(lift(&h));
    CHECK_OK(mt__arrive_drain(h.r));
    CHECK_OK(h.dev->ops->sync(h.run));
    return *up(&h);
}

/* Copies up are slow, since they wait for run: what the update finds. */
static float read_while_lifted(unsigned skip)
{
    float idle;

    HOTEL(h, skip);
    moment(&h)[0] = 1;
    slow w = { &idle, 9 };
    CHECK_OK(h.dev->ops->call(h.run, write_late, &w));
    CHECK_OK(lift(&h));
    slow r = { up(&h), 0 };
    CHECK_OK(before(&h, h.other));
    CHECK_OK(h.dev->ops->call(h.other, read_now, &r));
    CHECK_OK(h.dev->ops->sync(h.other));
    return r.value;
}

/* The update is slow: what a reader on the host finds. left: what leave says meanwhile. */
static float stored_while_updated(unsigned skip, int *left)
{
    HOTEL(h, skip);
    moment(&h)[0] = 1;
    CHECK_OK(lift(&h));
    CHECK_OK(mt__arrive_drain(h.r));
    slow w = (slow){ up(&h), 9 };
    CHECK_OK(h.dev->ops->call(h.other, write_late, &w));
    CHECK_OK(behind(&h, h.other, (int[1]){ 0 }, 1));
    CHECK_OK(current(&h));
    float found = moment(&h)[0];
    CHECK_OK(h.dev->ops->sync(h.other));
    CHECK_OK(h.dev->ops->call(h.other, write_late, &w));
    CHECK_OK(behind(&h, h.other, (int[1]){ 0 }, 1));
    CHECK_OK(mt_arrive_leave(h.r, 0, 0, left));
    CHECK_OK(h.dev->ops->sync(h.other));
    CHECK_OK(mt__arrive_drain(h.r));
    return found;
}

TEST(every_edge_is_kept)
{
    int left;

    CHECK(given_while_written(0) == 1);
    CHECK(read_while_lifted(0) == 1);
    CHECK(stored_while_updated(0, &left) == 9);
    CHECK_EQ(left, 0);
}

TEST(without_it_each_is_seen_to_matter)
{
    int left;

    RACE;
    CHECK(given_while_written(MT_EDGE_VACANT) == 9);
    CHECK(read_while_lifted(MT_EDGE_LIFTED) == 0);
    CHECK(stored_while_updated(MT_EDGE_MADE, &left) == 1);
    CHECK(stored_while_updated(MT_EDGE_STORED, &left) == 1);
    CHECK_EQ(left, 1);
}

static void *lift_main(void *arg)
{
    CHECK_OK(lift(arg));
    return NULL;
}

/* UPDATED: what is announced and not put yet would change the states on their way. */
TEST(a_stay_neither_begins_nor_ends_while_an_update_is_announced)
{
    int left;

    HOTEL(h, 0);
    mt_ledger_update_begin(h.store, 0);
    pthread_t thread = thread_start(lift_main, &h);
    sleep_ms(5);
    CHECK_EQ(mt_resident_stats_get(h.r).h2d_bytes, 0);
    mt_ledger_update_end(h.store, 0);
    thread_join(thread);
    CHECK_OK(mt__arrive_drain(h.r));
    mt_ledger_update_begin(h.store, 0);
    CHECK_OK(mt_arrive_leave(h.r, 0, 0, &left));
    CHECK_EQ(left, 0);
    mt_ledger_update_end(h.store, 0);
    CHECK_OK(mt_arrive_leave(h.r, 0, 0, &left));
    CHECK_EQ(left, 1);
}

/* ---- waits of the host ------------------------------------------------------------------ */

#define STUCK(call)                                                                         \
    CHECK_FAILS(call, MT_ESTUCK,                                                            \
                "guests, unit embedding waits for copies of its states (the event STORED)")

/* The host waits for copies that never come: told which, in the watchdog's time. */
TEST(stalled_guests_are_named)
{
    gate g = { 0 };
    char list[200];

    HOTEL(h, 0);
    mt_ledger_watchdog(h.store, 0.05);
    moment(&h)[0] = 1;
    REQUIRE_OK(h.dev->ops->call(h.run, wait_for_gate, &g));       /* VACANT holds guests */
    CHECK_OK(lift(&h));
    STUCK(current(&h));
    STUCK(mt__arrive_drain(h.r));
    STUCK(mt__arrive_push(h.r, 0, 0, 1u << MT_PLANE_M));
    atomic_store(&g.open, 1);
    CHECK_OK(mt__arrive_drain(h.r));
    CHECK_OK(current(&h));
    mt_watch_tell(mt_store_watch(h.store), list, sizeof list);
    CHECK_STR(list, "");
}

/* ---- others on the bus ------------------------------------------------------------------ */

static mt_status (*call_really)(mt_queue *q, void (*fn)(void *arg), void *arg);
static atomic_int calls;

static mt_status call_counted(mt_queue *q, void (*fn)(void *arg), void *arg)
{
    atomic_fetch_add(&calls, 1);
    return call_really(q, fn, arg);
}

static mt_status (*event_open_really)(mt_dev *d, mt_event **out);
static atomic_int stop;

static mt_status event_open_slowly(mt_dev *d, mt_event **out)
{
    sleep_ms(2);
    return event_open_really(d, out);
}

static void *store_often(void *arg)
{
    while (!atomic_load(&stop))
        CHECK_OK(behind(arg, ((hotel *)arg)->other, (int[1]){ 0 }, 1));
    return NULL;
}

TEST(a_unit_may_be_settled_while_others_states_come_down)
{
    mt_dev_ops ops;

    HOTEL(h, 0);
    CHECK_OK(lift(&h));
    ops = *h.dev->ops;
    event_open_really = ops.event_open;
    ops.event_open = event_open_slowly;
    h.dev->ops = &ops;
    atomic_store(&stop, 0);
    pthread_t thread = thread_start(store_often, &h);
    settle_next(&h);
    atomic_store(&stop, 1);
    thread_join(thread);
    CHECK(mt_resident_mem(h.r, 1) == h.next);
}

/* On the way down alone, and as often as CUDA takes it; who is no guest any more does not count. */
TEST(the_host_comes_between_pieces)
{
    hotel     h;
    int       left, taken;
    mt_dev   *dev = cpu_open();

    mt_dev_ops ops = *dev->ops;
    call_really = ops.call;
    ops.call = call_counted;
    dev->ops = &ops;
    atomic_store(&calls, 0);
    REQUIRE_OK(hotel_open(&h, dev, &(mt_param_desc){ MT_F32, 200000, 1 }, 1));
    CHECK_OK(lift(&h));
    CHECK(h.n > 150);
    CHECK_EQ(atomic_load(&calls), 0);
    CHECK_OK(behind(&h, h.run, (int[1]){ 0 }, 1));
    CHECK_OK(mt__arrive_drain(h.r));
    CHECK(atomic_load(&calls) > 30 && atomic_load(&calls) < 56);
    CHECK_OK(mt_arrive_leave(h.r, 0, 1, &left));
    CHECK_OK(mt_arrive_dismiss(h.r, 0));
    settle_next(&h);
    CHECK_OK(mt_arrive_invite(h.r, 1));
    CHECK_OK(mt_arrive_lift(h.r, 1, MT_ARRIVE_LEAST, h.mem, h.n, h.run, &taken));
    atomic_store(&calls, 0);
    CHECK_OK(behind_of(&h, 1, h.run, (int[1]){ 0 }, 1));
    CHECK_OK(mt__arrive_drain(h.r));
    CHECK(atomic_load(&calls) > 30 && atomic_load(&calls) < 56);
    off_cpu(&h);
}

TEST(what_makes_no_sense_is_refused)
{
    mt_param_desc d = { MT_F32, 10, 1 };
    int           n, taken;
    size_t       *bytes;

    HOTEL(h, 0);
    (void)store_add(h.store, "layers.0", &d, 1);
    CHECK_FAILS(mt_arrive_invite(h.r, 1), MT_EINVAL, "layers.0");
    CHECK_EQ(mt_arrive_invite(h.r, 2), MT_EINVAL);
    CHECK_EQ(mt_arrive_sizes(h.r, 1, 1 << 20, &bytes, &n), MT_EINVAL);
    CHECK_EQ(mt__arrive_copied(h.r, 1), MT_EINVAL);
    CHECK_EQ(mt_arrive_lift(h.r, 0, MT_ARRIVE_LEAST, h.mem, 0, h.run, &taken), MT_EINVAL);
    CHECK_SAYS("they take 1");
    CHECK_OK(mt_arrive_invite(h.r, 0));                     /* it is one */
    CHECK_OK(lift(&h));
}

/* A stay, an update and its end, with the n-th call failing. */
static mt_status sojourn(hotel *h)
{
    int       left;
    mt_status st;

    MT_TRY(lift(h));
    MT_TRY(before(h, h->other));
    MT_TRY(behind(h, h->other, (int[2]){ 0, 2 }, 2));
    MT_TRY(mt__arrive_push(h->r, 0, 1, ~0u));
    MT_TRY(mt_arrive_leave(h->r, 0, 1, &left));
    CHECK_EQ(left, 1);
fail:
    return st;
}

TEST(every_failing_device_call_frees_everything)
{
    EACH_FAULT(d, 1, n % 2 ? FAULT_ONCE : FAULT_STAYS) {
        hotel     h;
        mt_status st = hotel_open(&h, d, mixed, PARAMS);

        if (st == MT_OK)
            st = sojourn(&h);
        CHECK_EQ(st, fault_fired(d) ? MT_EDEVICE : MT_OK);
        hotel_close(&h);
    }
}
