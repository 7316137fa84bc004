/* test_timeline.c — records of what queues did: whole, in order, bounded, and free when off. */
#include "../../csrc/core/timeline.h"
#include "dev_fault.h"
#include "opened.h"

#define ALL (2 * MT_TIMELINE_KEPT)

/* A device whose calls are counted, two queues and a timeline. */
typedef struct rig {
    mt_dev      *cpu, *d;
    mt_queue    *a, *b;
    mt_timeline *t;
    mt_record   *got;        /* [ALL] */
    gate         gate;
} rig;

static void rig_open(rig *r, int n, fault_mode mode)
{
    *r = (rig){ 0 };
    REQUIRE_OK(mt_dev_cpu_open(&r->cpu));
    REQUIRE((r->got = calloc(ALL, sizeof *r->got)) != NULL);
    r->d = fault_dev(r->cpu, n, mode);
    REQUIRE_OK(r->d->ops->queue_open(r->d, "a", &r->a));
    REQUIRE_OK(r->d->ops->queue_open(r->d, "b", &r->b));
    REQUIRE_OK(mt_timeline_open(r->d, &r->t));
}

static void rig_close(rig *r)
{
    r->d->ops->queue_close(r->a);
    r->d->ops->queue_close(r->b);
    mt_timeline_close(r->t);
    CHECK_EQ(fault_live(r->d), 0);
    r->d->ops->close(r->d);
    r->cpu->ops->close(r->cpu);
    free(r->got);
}

#define RIG(r, ...) CLOSED_BY(rig_close) rig r; rig_open(&r, __VA_ARGS__)
#define ON(r)       RIG(r, 0, FAULT_ONCE); CHECK_OK(mt_timeline_on(r.t, 1))

static void one(rig *r, mt_queue *q, mt_lane lane, int unit)
{
    mt_span span;

    mt_timeline_begin(r->t, &span, lane, MT_WORK_FETCH, unit, q);
    mt_timeline_end(r->t, &span, (uint64_t)unit * 10, q);
}

/* ---- off -------------------------------------------------------------------------------- */

TEST(off_makes_no_call_and_keeps_nothing)
{
    mt_span span;

    RIG(r, 0, FAULT_ONCE);
    int calls = fault_calls(r.d);
    for (int i = 0; i < 100; i++)
        one(&r, r.a, MT_LANE_H2D, i);
    mt_timeline_enter(r.t, MT_WORK_FORWARD, 0, r.a);
    mt_timeline_leave(r.t, r.a);
    mt_timeline_step(r.t, 9, r.a);
    mt_timeline_begin(NULL, &span, MT_LANE_H2D, MT_WORK_FETCH, 0, r.a);
    mt_timeline_end(NULL, &span, 0, r.a);
    CHECK_EQ(fault_calls(r.d), calls);
    CHECK_EQ(mt_timeline_read(r.t, r.got, ALL), 0);
    CHECK_EQ(mt_timeline_lost(r.t), 0);
}

TEST(turned_off_it_still_gives_what_it_has)
{
    ON(r);
    one(&r, r.a, MT_LANE_H2D, 3);
    CHECK_OK(mt_timeline_on(r.t, 0));
    one(&r, r.a, MT_LANE_H2D, 4);
    CHECK_OK(r.d->ops->sync(r.a));
    CHECK_EQ(mt_timeline_read(r.t, r.got, ALL), 1);
    CHECK_EQ(r.got[0].unit, 3);
}

/* ---- records ---------------------------------------------------------------------------- */

TEST(a_record_has_its_queues_times)
{
    mt_span  span;

    ON(r);
    uint64_t before = mt_now_ns();
    mt_timeline_begin(r.t, &span, MT_LANE_HOST, MT_WORK_UPDATE, 7, NULL);
    sleep_ms(2);
    mt_timeline_end(r.t, &span, 123, NULL);
    uint64_t after = mt_now_ns();
    one(&r, r.a, MT_LANE_H2D, 2);
    CHECK_OK(r.d->ops->sync(r.a));
    REQUIRE(mt_timeline_read(r.t, r.got, ALL) == 2);
    CHECK_EQ(r.got[0].lane, MT_LANE_HOST);
    CHECK_EQ(r.got[0].work, MT_WORK_UPDATE);
    CHECK_EQ(r.got[0].unit, 7);
    CHECK_EQ(r.got[0].bytes, 123);
    CHECK(before <= r.got[0].begin_ns && r.got[0].end_ns <= after);
    CHECK(r.got[0].end_ns - r.got[0].begin_ns >= 2000000);
    CHECK_EQ(r.got[1].bytes, 20);
    CHECK(after <= r.got[1].begin_ns && r.got[1].begin_ns <= r.got[1].end_ns);
}

/* What queue a has not done yet neither comes early nor holds up what queue b has done. */
TEST(work_under_way_comes_later)
{
    ON(r);
    CHECK_OK(r.d->ops->call(r.a, wait_for_gate, &r.gate));
    one(&r, r.a, MT_LANE_H2D, 1);
    one(&r, r.b, MT_LANE_D2H, 2);
    CHECK_OK(r.d->ops->sync(r.b));
    REQUIRE(mt_timeline_read(r.t, r.got, ALL) == 1);
    CHECK_EQ(r.got[0].unit, 2);
    atomic_store(&r.gate.open, 1);
    CHECK_OK(r.d->ops->sync(r.a));
    REQUIRE(mt_timeline_read(r.t, r.got, ALL) == 1);
    CHECK_EQ(r.got[0].unit, 1);
    CHECK_EQ(mt_timeline_read(r.t, r.got, ALL), 0);
}

TEST(reading_a_few_leaves_the_rest)
{
    ON(r);
    for (int i = 0; i < 10; i++)
        one(&r, r.a, MT_LANE_H2D, i);
    CHECK_OK(r.d->ops->sync(r.a));
    for (int i = 0; i < 10; i += 2) {
        REQUIRE(mt_timeline_read(r.t, r.got, 2) == 2);
        CHECK_EQ(r.got[0].unit, i);
        CHECK_EQ(r.got[1].unit, i + 1);
        CHECK(r.got[0].end_ns <= r.got[1].begin_ns);
    }
}

TEST(the_latest_are_kept_and_the_others_counted)
{
    enum { MORE = 100 };

    ON(r);
    for (int i = 0; i < MT_TIMELINE_KEPT + MORE; i++)
        one(&r, NULL, MT_LANE_HOST, i);
    CHECK_EQ(mt_timeline_lost(r.t), MORE);
    REQUIRE(mt_timeline_read(r.t, r.got, ALL) == MT_TIMELINE_KEPT);
    CHECK_EQ(r.got[0].unit, MORE);
    CHECK_EQ(r.got[MT_TIMELINE_KEPT - 1].unit, MT_TIMELINE_KEPT + MORE - 1);
}

/* A stamp that a held queue still owes is not used for another record: its time would be wrong. */
TEST(a_full_timeline_waits_for_no_queue)
{
    const mt_record *held = NULL;

    ON(r);
    CHECK_OK(r.d->ops->call(r.a, wait_for_gate, &r.gate));
    one(&r, r.a, MT_LANE_H2D, 5);
    for (int i = 1; i < MT_TIMELINE_KEPT + 3; i++)
        one(&r, NULL, MT_LANE_HOST, i);
    CHECK_EQ(mt_timeline_lost(r.t), 3);
    atomic_store(&r.gate.open, 1);
    CHECK_OK(r.d->ops->sync(r.a));
    REQUIRE(mt_timeline_read(r.t, r.got, ALL) == MT_TIMELINE_KEPT);
    for (int i = 0; i < MT_TIMELINE_KEPT; i++)
        if (r.got[i].lane == MT_LANE_H2D)
            held = &r.got[i];
    REQUIRE(held != NULL);
    CHECK_EQ(held->unit, 5);
    for (int i = 0; i < MT_TIMELINE_KEPT; i++)           /* the gate opened last */
        CHECK(&r.got[i] == held || r.got[i].begin_ns < held->begin_ns);
}

/* Stamps are used again: as many as were ever in use at once, not as many as records. */
TEST(stamps_are_used_again)
{
    ON(r);
    for (int i = 0; i < 50; i++) {
        one(&r, r.a, MT_LANE_H2D, i);
        CHECK_OK(r.d->ops->sync(r.a));
        CHECK_EQ(mt_timeline_read(r.t, r.got, ALL), 1);
    }
    CHECK_EQ(fault_live(r.d), 4);        /* two queues, two stamps */
}

/* ---- the stack -------------------------------------------------------------------------- */

static void expect(const mt_record *r, mt_work work, int unit)
{
    CHECK_EQ(r->lane, MT_LANE_COMPUTE);
    CHECK_STR(mt_work_name(r->work), mt_work_name(work));
    CHECK_EQ(r->unit, unit);
}

/* Waiting for weights is no work; the same weights again are there already. */
TEST(a_wait_for_weights_is_in_no_record)
{
    mt_event *there;

    ON(r);
    CHECK_OK(r.d->ops->event_open(r.d, &there));
    CHECK_EQ(mt_timeline_wait(r.t, 3, r.a), 0);          /* nothing is open */
    mt_timeline_enter(r.t, MT_WORK_FORWARD, 3, r.a);
    REQUIRE(mt_timeline_wait(r.t, 3, r.a) == 1);
    CHECK_OK(r.d->ops->record(r.a, there));
    CHECK_OK(r.d->ops->call(r.a, wait_for_gate, &r.gate));
    mt_timeline_waited(r.t, r.a);
    CHECK_EQ(mt_timeline_wait(r.t, 3, r.a), 0);
    mt_timeline_leave(r.t, r.a);
    CHECK_OK(r.d->ops->sync_event(there));               /* the queue stands at the gate */
    sleep_ms(3);
    atomic_store(&r.gate.open, 1);
    CHECK_OK(r.d->ops->sync(r.a));
    REQUIRE(mt_timeline_read(r.t, r.got, ALL) == 2);
    expect(&r.got[0], MT_WORK_FORWARD, 3);
    expect(&r.got[1], MT_WORK_FORWARD, 3);
    CHECK(r.got[1].begin_ns - r.got[0].end_ns >= 2000000);
    r.d->ops->event_close(there);
}

/* A backward that raised leaves its window open; the next step's windows are not inside it. */
TEST(a_step_closes_what_failures_left_open)
{
    ON(r);
    for (int deep = 0; deep < 40; deep++)                /* deeper than it counts */
        mt_timeline_enter(r.t, MT_WORK_BACKWARD, 1, r.a);
    mt_timeline_step(r.t, 9, r.a);
    CHECK_OK(r.d->ops->sync(r.a));
    (void)mt_timeline_read(r.t, r.got, ALL);
    mt_timeline_enter(r.t, MT_WORK_FORWARD, 2, r.a);
    mt_timeline_leave(r.t, r.a);
    CHECK_OK(r.d->ops->sync(r.a));
    REQUIRE(mt_timeline_read(r.t, r.got, ALL) == 1);
    expect(&r.got[0], MT_WORK_FORWARD, 2);
}

/* ---- failures and threads --------------------------------------------------------------- */

static void use(rig *r)
{
    mt_timeline_step(r->t, 0, r->a);
    mt_timeline_enter(r->t, MT_WORK_FORWARD, 0, r->a);
    one(r, r->b, MT_LANE_H2D, 1);
    mt_timeline_leave(r->t, r->a);
    one(r, NULL, MT_LANE_HOST, 2);
}

/* A stamp that cannot be made, put or read loses its record, and nothing else happens. */
TEST(a_stamp_that_fails_loses_its_record_alone)
{
    enum { OPENED = 2 };                 /* the queues, first */
    int64_t n = 0;

    for (int call = OPENED + 1; call < OPENED + 40; call++) {
        for (int mode = 0; mode < 2; mode++) {
            RIG(r, call, mode ? FAULT_STAYS : FAULT_ONCE);
            CHECK_OK(mt_timeline_on(r.t, 1));
            use(&r);
            n = mt_timeline_read(r.t, r.got, ALL);
            CHECK(n <= 4);
            CHECK(n + (int64_t)mt_timeline_lost(r.t) <= 4);
            if (mode == 1 && call == OPENED + 1)
                CHECK_EQ(n, 1);          /* the host's own */
        }
    }
}

typedef struct worker {
    rig      *r;
    mt_queue *q;
    mt_lane   lane;
    int       n;
} worker;

static void *record_many(void *arg)
{
    worker *w = arg;

    for (int i = 0; i < w->n; i++)
        one(w->r, w->q, w->lane, i);
    return NULL;
}

TEST(threads_record_side_by_side)
{
    enum { EACH = 2000 };
    worker    w[3];
    pthread_t thread[3];
    int64_t   n = 0;
    static int seen[MT_LANE_COUNT][EACH];

    ON(r);
    w[0] = (worker){ &r, r.a, MT_LANE_H2D, EACH };
    w[1] = (worker){ &r, r.b, MT_LANE_D2H, EACH };
    w[2] = (worker){ &r, NULL, MT_LANE_HOST, EACH };
    for (int i = 0; i < 3; i++)
        thread[i] = thread_start(record_many, &w[i]);
    while (n < 3 * EACH) {               /* reading meanwhile */
        int64_t m = mt_timeline_read(r.t, r.got, ALL);

        for (int64_t i = 0; i < m; i++)
            CHECK_EQ(seen[r.got[i].lane][r.got[i].unit]++, 0);
        n += m;
    }
    for (int i = 0; i < 3; i++)
        thread_join(thread[i]);
    CHECK_EQ(mt_timeline_lost(r.t), 0);
}

static void *turn_on(void *arg)
{
    rig *r = arg;

    sleep_ms(2);
    CHECK_OK(mt_timeline_on(r->t, 1));
    one(r, NULL, MT_LANE_HOST, 4);
    return NULL;
}

TEST(it_is_read_while_it_is_first_turned_on)
{
    RIG(r, 0, FAULT_ONCE);
    pthread_t thread = thread_start(turn_on, &r);
    while (mt_timeline_read(r.t, r.got, ALL) == 0)
        continue;
    thread_join(thread);
    CHECK_EQ(r.got[0].unit, 4);
}

/* Requests of a disk are under way together, and the lane does one thing at a time: a record begins
 * where the one before ended. */
TEST(records_of_what_is_over_follow_each_other)
{
    uint64_t reached = 0, begun = mt_now_ns();

    ON(r);
    for (int unit = 0; unit < 3; unit++)         /* the second moved nothing, and is none */
        mt_timeline_over(r.t, MT_LANE_DISK, MT_WORK_READ, unit, begun,
                         unit == 1 ? 0 : 100 + (uint64_t)unit, &reached);
    CHECK_EQ(mt_timeline_read(r.t, r.got, ALL), 2);
    CHECK(r.got[0].unit == 0 && r.got[0].bytes == 100 && r.got[0].begin_ns == begun);
    CHECK(r.got[1].unit == 2 && r.got[1].bytes == 102 && r.got[1].begin_ns >= r.got[0].end_ns);
    CHECK(r.got[1].end_ns <= reached);
}
