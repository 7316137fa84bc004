/* test_offload.c — gradients come home whole, summed, measured, and in order. */
#include "dev_fault.h"
#include "toy.h"

#define UNITS 3
#define DEPTH 2

typedef struct rig {
    toy         t;
    mt_offload *o;
    void       *src[TOY_PARAMS];     /* device; as large as the largest parameter */
} rig;

static void rig_open_on(rig *r, mt_dev *dev, mt_dtype dt, int own_run)
{
    memset(r, 0, sizeof *r);
    toy_open_on(&r->t, dev, UNITS, own_run, dt);
    for (int p = 0; p < TOY_PARAMS; p++)
        REQUIRE_OK(dev->ops->mem_alloc(dev, 4096, &r->src[p]));
}

static void rig_open_with(rig *r, mt_dtype dt, uint64_t seed, int max_us, mt_offload_kernels k)
{
    rig_open_on(r, delayed_open(seed, max_us), dt, max_us > 0);
    REQUIRE_OK(mt_offload_open(&r->t.cx, DEPTH, k, &r->o));
}

static void rig_open(rig *r, mt_dtype dt, uint64_t seed, int max_us)
{
    rig_open_with(r, dt, seed, max_us, toy_kernels);
}

static void rig_close(rig *r)
{
    mt_offload_close(r->o);
    (void)r->t.dev->ops->sync(r->t.run);
    for (int p = 0; p < TOY_PARAMS; p++)
        r->t.dev->ops->mem_free(r->t.dev, r->src[p]);
    toy_close(&r->t);
}

#define RIG_WITH(r, ...) CLOSED_BY(rig_close) rig r; rig_open_with(&r, __VA_ARGS__)

#define RIG(r, ...) CLOSED_BY(rig_close) rig r; rig_open(&r, __VA_ARGS__)

static void fill(rig *r, mt_dtype dt, float value)
{
    for (int p = 0; p < TOY_PARAMS; p++)
        for (int64_t i = 0; i < 128; i++)
            set(r->src[p], dt, i, value);
}

static mt_status try_put(rig *r, int unit, mt_grad_mode mode, int reread, uint64_t *ticket)
{
    mt_grad_item items[TOY_PARAMS];

    for (int p = 0; p < TOY_PARAMS; p++)
        items[p] = (mt_grad_item){ p, r->src[p], mode, reread };
    return mt_offload_put(r->o, unit, items, TOY_PARAMS, r->t.run, ticket);
}

static uint64_t put(rig *r, int unit, mt_grad_mode mode, int reread)
{
    uint64_t ticket = 0;

    CHECK_OK(try_put(r, unit, mode, reread, &ticket));
    return ticket;
}

/* fill, put, and wait, so that src is free again. */
static void put_value(rig *r, mt_dtype dt, int unit, mt_grad_mode mode, float value)
{
    fill(r, dt, value);
    (void)put(r, unit, mode, 0);
    CHECK_OK(mt_offload_drain(r->o));
}

/* Every element of the unit's gradient is `value`. */
static int grad_is(const rig *r, mt_dtype dt, int unit, float value)
{
    for (int p = 0; p < TOY_PARAMS; p++)
        for (int64_t i = 0; i < toy_numel(unit, p); i++)
            if (get(toy_at(&r->t, unit, p, MT_PLANE_GRAD), dt, i) != value)
                return 0;
    return 1;
}

static int sum_is(const rig *r, int unit, float value)
{
    int all = 1;

    for (int p = 0; p < TOY_PARAMS; p++) {
        double sum = (double)toy_numel(unit, p) * (double)value * (double)value;

        all &= mt_offload_has(r->o, unit, p, MT_GRAD_COUNTED) &&
               mt_offload_sumsq(r->o, unit, p) == sum;
    }
    return all;
}

/* ---- coming home ------------------------------------------------------------------------ */

TEST(gradients_come_home_with_their_sums_of_squares)
{
    RIG(r, MT_F32, 1, 200);
    for (int u = 0; u < UNITS; u++) {
        fill(&r, MT_F32, (float)(u + 1));
        CHECK_EQ(put(&r, u, MT_GRAD_SET, 0), u + 1);
        CHECK_OK(mt_ledger_wait_grads(r.t.store, u));
        CHECK(grad_is(&r, MT_F32, u, (float)(u + 1)));
        CHECK(sum_is(&r, u, (float)(u + 1)));
    }
    CHECK_EQ(mt_offload_d2h_bytes(r.o), 4 * (2 * (24 + 32 + 40) + 3 * 5));
}

TEST(sumsq_counts_from_put_to_forget)
{
    RIG(r, MT_F32, 3, 200);
    CHECK_EQ(mt_offload_has(r.o, 2, 0, MT_GRAD_COUNTED), 0);
    fill(&r, MT_F32, 3.0f);
    (void)put(&r, 2, MT_GRAD_SET, 0);
    CHECK_EQ(mt_offload_has(r.o, 2, 0, MT_GRAD_COUNTED), 1);     /* on its way */
    CHECK_EQ(mt_offload_has(r.o, 2, TOY_PARAMS, MT_GRAD_COUNTED), 0);
    CHECK_OK(mt_offload_drain(r.o));
    CHECK(sum_is(&r, 2, 3.0f));
    mt_offload_forget(r.o, 2);
    CHECK_EQ(mt_offload_has(r.o, 2, 0, MT_GRAD_COUNTED), 0);
    mt_offload_forget(r.o, UNITS);                  /* nothing known: nothing to forget */
}

/* ---- micro-batches ---------------------------------------------------------------------- */

TEST(an_add_before_any_set_adds_to_the_plane)
{
    RIG(r, MT_BF16, 0, 0);
    put_value(&r, MT_BF16, 1, MT_GRAD_ADD, 3.0f);   /* planes start as zeros */
    CHECK(grad_is(&r, MT_BF16, 1, 3.0f));
}

/* Slow sums: a SET that did not wait for them would be added to. */
static void slow_accumulate(mt_pool *pool, mt_dtype dt, float *acc, void *grad,
                            const void *add, int64_t n, int from_grad, double *sumsq,
                            double *chunks)
{
    sleep_ms(1);
    toy_accumulate(pool, dt, acc, grad, add, n, from_grad, sumsq, chunks);
}

TEST(hand_overs_of_one_unit_keep_their_order)
{
    mt_offload_kernels slow = { .sumsq = toy_sumsq, .accumulate = slow_accumulate };

    RIG_WITH(r, MT_F32, 0, 0, slow);
    fill(&r, MT_F32, 1.0f);
    (void)put(&r, 0, MT_GRAD_SET, 0);
    (void)put(&r, 0, MT_GRAD_ADD, 0);
    (void)put(&r, 0, MT_GRAD_ADD, 0);
    (void)put(&r, 0, MT_GRAD_SET, 0);
    (void)put(&r, 0, MT_GRAD_SET, 0);
    (void)put(&r, 0, MT_GRAD_ADD, 0);
    CHECK_OK(mt_offload_drain(r.o));
    CHECK(grad_is(&r, MT_F32, 0, 2.0f));
    CHECK(sum_is(&r, 0, 2.0f));
}

/* Waits of the thread that hands over, of no unit. */
static int waits_in(mt_timeline *line)
{
    static mt_record got[2048];
    int64_t          n = mt_timeline_read(line, got, 2048);
    int              waits = 0;

    for (int64_t i = 0; i < n; i++)
        waits += got[i].lane == MT_LANE_HAND && got[i].work == MT_WORK_WAIT && got[i].unit == -1;
    return waits;
}

/* More tickets than the collector's line and the two staging buffers hold, of all sizes;
 * a trace has the waits. */
TEST(many_hand_overs_in_flight_all_count)
{
    mt_timeline *line;

    RIG(r, MT_F32, 7, 20);
    REQUIRE_OK(mt_timeline_open(r.t.dev, &line));
    mt_offload_close(r.o);
    r.t.cx.timeline = line;
    REQUIRE_OK(mt_offload_open(&r.t.cx, DEPTH, toy_kernels, &r.o));
    CHECK_OK(mt_timeline_on(line, 1));
    fill(&r, MT_F32, 1.0f);
    (void)put(&r, 0, MT_GRAD_SET, 0);
    CHECK_EQ(waits_in(line), 0);
    for (int i = 0; i < 100; i++)
        for (int u = 0; u < UNITS; u++)
            (void)put(&r, u, i == 0 ? MT_GRAD_SET : MT_GRAD_ADD, 0);
    CHECK_OK(mt_offload_drain(r.o));
    CHECK(waits_in(line) > 0);
    for (int u = 0; u < UNITS; u++)
        CHECK(grad_is(&r, MT_F32, u, 100.0f));
    mt_offload_close(r.o);
    mt_timeline_close(line);             /* its stamps were in d2h */
    r.o = NULL;
}

/* Sets do not wait for the collector, so the line fills up. A lap of it per unit. */
TEST(a_full_line_makes_put_wait)
{
    const int lap = 64 + DEPTH;

    RIG(r, MT_F32, 7, 40);
    fill(&r, MT_F32, 1.0f);
    for (int i = 0; i < UNITS * lap; i++)
        (void)put(&r, i / lap, MT_GRAD_SET, 0);
    CHECK_OK(mt_offload_drain(r.o));
    CHECK_EQ(mt_offload_passed(r.o), UNITS * lap);
}

/* ---- edges with the host ---------------------------------------------------------------- */

/* With delays of up to 2000 us: a source has seldom passed by itself when put returns. */
static void pass_at(uint64_t depth)
{
    uint64_t ticket = 0;

    RIG(r, MT_F32, 5, 2000);
    mt_offload_close(r.o);
    REQUIRE_OK(mt_offload_open(&r.t.cx, (int)depth, toy_kernels, &r.o));
    CHECK_EQ(mt_offload_passed(r.o), 0);
    fill(&r, MT_F32, 1.0f);
    for (int i = 0; i < 6; i++) {
        ticket = put(&r, i % UNITS, MT_GRAD_SET, 0);
        CHECK_EQ(ticket, i + 1);
        CHECK(mt_offload_passed(r.o) + depth >= ticket);
    }
    CHECK_OK(mt_offload_drain(r.o));
    CHECK_EQ(mt_offload_passed(r.o), ticket);
}

TEST(sources_pass_depth_tickets_later_or_when_home)
{
    pass_at(1);
    pass_at(DEPTH);
}

/* Of units whose gradients pass no more have some on the device than have a buffer. */
TEST(sources_that_pass_go_as_soon_as_buffers_say)
{
    uint64_t ticket;

    RIG(r, MT_F32, 5, 2000);
    CHECK_OK(mt_store_lend_most(r.t.store, 1));
    fill(&r, MT_F32, 1.0f);
    for (int u = 0; u < UNITS; u++)
        CHECK_OK(mt_store_set_passing(r.t.store, u));
    for (int u = 0; u < UNITS; u++) {
        ticket = put(&r, u, MT_GRAD_SET, 0);
        CHECK(mt_offload_passed(r.o) + 1 >= ticket);
        mt_ledger_update_begin(r.t.store, u);       /* its buffer is the next one's */
        mt_ledger_update_end(r.t.store, u);
    }
    CHECK_OK(mt_offload_drain(r.o));
}

/* 1: gradients of ones came home whole, though run overwrites their memory right behind land. */
static int whole_behind_land(uint64_t seed, unsigned skip)
{
    char zeros[4096] = { 0 };

    RIG(r, MT_F32, seed, 300);
    debug_set(&r.t.cx, (mt_debug){ .skip = skip });
    CHECK_OK(mt_offload_land(r.o, r.t.run));        /* nothing was put */
    fill(&r, MT_F32, 1.0f);
    (void)put(&r, 0, MT_GRAD_SET, 0);
    CHECK_OK(mt_offload_land(r.o, r.t.run));
    CHECK_EQ(mt_offload_passed(r.o), 1);
    for (int p = 0; p < TOY_PARAMS; p++)
        CHECK_OK(r.t.dev->ops->copy(r.t.run, r.src[p], zeros, sizeof zeros));
    CHECK_OK(r.t.dev->ops->sync(r.t.run));
    CHECK_OK(mt_offload_drain(r.o));
    int whole = grad_is(&r, MT_F32, 0, 1.0f);
    CHECK_EQ(put(&r, 1, MT_GRAD_SET, 0), 2);
    CHECK(mt_offload_passed(r.o) >= 1);             /* never less than before */
    return whole;
}

TEST(land_keeps_sources_until_they_are_home)
{
    int torn = 0;

    for (uint64_t seed = 1; seed <= 10; seed++)
        CHECK(whole_behind_land(seed, 0));
    for (uint64_t seed = 1; seed <= 50 && !torn && !UNDER_TSAN; seed++)
        torn = !whole_behind_land(seed, MT_EDGE_LANDED);
    CHECK(torn || UNDER_TSAN);                      /* the wait is what keeps them */
}

TEST(sync_returns_when_all_is_home)
{
    RIG(r, MT_F32, 9, 500);
    debug_set(&r.t.cx, (mt_debug){ .sync = 1 });
    fill(&r, MT_F32, 6.0f);
    CHECK_EQ(mt_offload_passed(r.o), 0);
    CHECK_EQ(put(&r, 0, MT_GRAD_SET, 0), 1);
    CHECK_EQ(mt_offload_passed(r.o), 1);
    CHECK(grad_is(&r, MT_F32, 0, 6.0f));
}

/* ---- refusals and failures -------------------------------------------------------------- */

TEST(refusals_name_the_unit_and_change_nothing)
{
    mt_offload        *o = NULL;
    mt_offload_kernels no_sum = { .sumsq = toy_sumsq };
    uint64_t           ticket = 99;
    mt_grad_item       item = { .param = TOY_PARAMS, .mode = MT_GRAD_SET };

    RIG_WITH(r, MT_F32, 0, 0, no_sum);
    CHECK_EQ(mt_offload_open(&r.t.cx, 0, no_sum, &o), MT_EINVAL);
    CHECK(o == NULL);
    CHECK_EQ(mt_offload_put(r.o, UNITS, NULL, 0, r.t.run, &ticket), MT_EINVAL);
    CHECK_EQ(mt_offload_put(r.o, 1, &item, 1, r.t.run, &ticket), MT_EINVAL);
    CHECK_SAYS("layers.1 has no parameter 2");
    item.param = 0;
    CHECK_EQ(mt_offload_put(r.o, 1, &item, 1, r.t.run, &ticket), MT_EINVAL);
    item.src = r.src[0];
    CHECK_OK(mt_store_set_trainable(r.t.store, 2, 0, 0));
    CHECK_EQ(mt_offload_put(r.o, 2, &item, 1, r.t.run, &ticket), MT_EINVAL);
    CHECK_EQ(ticket, 99);
    CHECK_OK(mt_ledger_wait_grads(r.t.store, 1));
    CHECK_OK(mt_offload_put(r.o, 1, &item, 1, r.t.run, &ticket));
    CHECK_EQ(ticket, 1);
    mt_offload_close(NULL);
}

static mt_status life(rig *r)
{
    uint64_t ticket;

    TRY(mt_offload_open(&r->t.cx, DEPTH, toy_kernels, &r->o));
    for (int i = 0; i < 3; i++)
        for (int u = 0; u < UNITS; u++)
            TRY(try_put(r, u, i == 0 ? MT_GRAD_SET : MT_GRAD_ADD, 0, &ticket));
    TRY(mt_offload_drain(r->o));
    return MT_OK;
}

static void nth_failure_frees_everything(fault_mode mode)
{
    int fired = 1;

    CPU(cpu);
    for (int n = 1; fired > 0; n++) {
        rig     r;
        mt_dev *dev = fault_dev(cpu, 0, mode);

        rig_open_on(&r, dev, MT_BF16, 0);
        int live = fault_live(dev);
        fault_next(dev, n);
        fill(&r, MT_BF16, 1.0f);
        mt_status st = life(&r);
        mt_offload_close(r.o);
        r.o = NULL;
        fired = fault_fired(dev);
        CHECK(st == MT_OK || st == MT_EDEVICE);
        CHECK(fired > 0 || (st == MT_OK && grad_is(&r, MT_BF16, 1, 3.0f)));
        if (st == MT_EDEVICE)
            CHECK_SAYS("injected");
        /* GRAD planes, one registered region per unit, stay with the store. */
        CHECK(fault_live(dev) >= live && fault_live(dev) <= live + UNITS);
        rig_close(&r);
    }
}

TEST(every_failing_device_call_frees_everything)
{
    nth_failure_frees_everything(FAULT_ONCE);
    nth_failure_frees_everything(FAULT_STAYS);
}
