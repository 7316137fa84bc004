/* test_stream.c — what acquire promises: the unit's current weights, whatever the order, whoever
 * holds a slot, and whenever an update comes. */
#include "../../csrc/core/stream.h"
#include "dev_fault.h"
#include "toy.h"

#define UNITS 5

/* A toy, its slots, and hooks that hold what the test says. */
typedef struct rig {
    toy          t;
    mt_stream   *s;
    mt_slot_desc slots[4];
    int          n_slots;
    int          held[4];    /* by slot */
    void        *old[64];    /* memory that renew took out of use; freed at the end */
    int          n_old;
} rig;

static int rig_held(void *ctx, int slot)
{
    return ((rig *)ctx)->held[slot];
}

static mt_status rig_renew(void *ctx, int slot, void **mem)
{
    rig  *r = ctx;
    void *fresh = NULL;

    REQUIRE(r->n_old < 64);
    REQUIRE_OK(r->t.dev->ops->mem_alloc(r->t.dev, r->slots[slot].bytes, &fresh));
    r->old[r->n_old++] = r->slots[slot].mem;
    r->slots[slot].mem = *mem = fresh;
    r->held[slot] = 0;
    return MT_OK;
}

static void rig_slots(rig *r, int n_slots)
{
    r->n_slots = n_slots;
    for (int i = 0; i < n_slots; i++) {
        r->slots[i].bytes = mt_store_hi_bytes(r->t.store, r->t.n_units - 1);
        REQUIRE_OK(r->t.dev->ops->mem_alloc(r->t.dev, r->slots[i].bytes, &r->slots[i].mem));
    }
}

static mt_slot_hooks rig_hooks(rig *r)
{
    return (mt_slot_hooks){ rig_held, rig_renew, r };
}

static void rig_open(rig *r, int n_slots, uint64_t seed, int max_us)
{
    memset(r, 0, sizeof *r);
    toy_open(&r->t, UNITS, seed, max_us);
    rig_slots(r, n_slots);
    REQUIRE_OK(mt_stream_open(&r->t.cx, r->slots, n_slots, rig_hooks(r), &r->s));
}

static void rig_close(rig *r)
{
    mt_stream_close(r->s);
    (void)r->t.dev->ops->sync(r->t.run);
    for (int i = 0; i < r->n_slots; i++)
        r->t.dev->ops->mem_free(r->t.dev, r->slots[i].mem);
    for (int i = 0; i < r->n_old; i++)
        r->t.dev->ops->mem_free(r->t.dev, r->old[i]);
    toy_close(&r->t);
}

#define RIG(r, ...) CLOSED_BY(rig_close) rig r; rig_open(&r, __VA_ARGS__)

static int matches(const rig *r, int unit, const void *mem)
{
    for (int p = 0; p < TOY_PARAMS; p++)
        if (memcmp((const char *)mem + mt_store_offset(r->t.store, unit, p),
                   toy_at(&r->t, unit, p, MT_PLANE_HI),
                   (size_t)toy_numel(unit, p) * sizeof(float)) != 0)
            return 0;
    return 1;
}

/* A window: the unit's memory, after run has waited for it and the host for run. */
static void *window(rig *r, int unit, int *slot)
{
    void *mem = NULL;
    int   k = -1;

    CHECK_OK(mt_stream_acquire(r->s, unit, r->t.run, &k, &mem));
    CHECK_OK(mt_stream_await(r->s, k, r->t.run));
    CHECK_OK(r->t.dev->ops->sync(r->t.run));
    if (slot != NULL)
        *slot = k;
    return mem;
}

static void visit(rig *r, int unit)
{
    void *mem = window(r, unit, NULL);

    CHECK(mem != NULL && matches(r, unit, mem));
}

static void forward(rig *r)
{
    CHECK_OK(mt_stream_begin(r->s));
    for (int u = 0; u < UNITS; u++)
        visit(r, u);
}

static void backward(rig *r)
{
    for (int u = UNITS - 1; u >= 0; u--)
        visit(r, u);
}

static void step(rig *r)
{
    forward(r);
    backward(r);
}

/* The host writes a unit, as load_state_dict does: after copies out of it, and then says so. */
static void rewrite(rig *r, int unit, float value)
{
    CHECK_OK(mt_ledger_wait_fetch(r->t.store, unit));
    for (int64_t i = 0; i < toy_numel(unit, 0); i++)
        toy_at(&r->t, unit, 0, MT_PLANE_HI)[i] = value;
    mt_ledger_touch(r->t.store, unit);
}

/* ---- opening ---------------------------------------------------------------------------- */

TEST(stream_open_refuses_no_slots_and_empty_ones)
{
    mt_stream   *s = NULL;
    mt_slot_desc none = { NULL, 512 };

    TOY(t, 1, 0, 0);
    CHECK_EQ(mt_stream_open(&t.cx, &none, 0, (mt_slot_hooks){ 0 }, &s), MT_EINVAL);
    CHECK_EQ(mt_stream_open(&t.cx, &none, 1, (mt_slot_hooks){ 0 }, &s), MT_EINVAL);
    CHECK(s == NULL);
    mt_stream_close(NULL);
}

TEST(acquire_refuses_a_unit_that_fits_no_slot)
{
    rig   r = { 0 };
    int   k = -1;
    void *mem = NULL;

    toy_open(&r.t, UNITS, 0, 0);
    rig_slots(&r, 2);
    r.slots[0].bytes = r.slots[1].bytes = 512;
    REQUIRE_OK(mt_stream_open(&r.t.cx, r.slots, 2, rig_hooks(&r), &r.s));
    CHECK_FAILS(mt_stream_acquire(r.s, 0, r.t.run, &k, &mem), MT_EINVAL, "layers.0: 1024 bytes");
    CHECK_SAYS("512 bytes");
    CHECK_EQ(mt_stream_acquire(r.s, UNITS, r.t.run, &k, &mem), MT_EINVAL);
    CHECK(mem == NULL && k == -1);
    CHECK_EQ(mt_stream_await(r.s, 2, r.t.run), MT_EINVAL);
    rig_close(&r);
}

/* ---- on the schedule -------------------------------------------------------------------- */

TEST(a_recorded_step_demands_nothing_again)
{
    RIG(r, 3, 0, 0);
    step(&r);
    mt_stream_stats first = mt_stream_stats_get(r.s);
    CHECK(first.demand_fetches >= UNITS);
    CHECK_EQ(first.rebuilds, 0);
    CHECK(mt_stream_schedule(r.s) == NULL);
    for (int k = 0; k < 3; k++) {
        for (int u = 0; u < UNITS; u++)
            mt_ledger_touch(r.t.store, u);
        step(&r);
    }
    mt_stream_stats after = mt_stream_stats_get(r.s);
    CHECK_EQ(after.demand_fetches, first.demand_fetches);
    CHECK_EQ(after.rebuilds, 1);
    CHECK(after.fetches > first.fetches);
}

TEST(forwards_alone_run_without_demands_in_the_steady_state)
{
    RIG(r, 2, 0, 0);
    for (int step = 0; step < 2; step++)
        forward(&r);
    int64_t demanded = mt_stream_stats_get(r.s).demand_fetches;
    for (int step = 0; step < 4; step++)
        forward(&r);                        /* nothing is touched: slots keep what they have */
    CHECK_EQ(mt_stream_stats_get(r.s).demand_fetches, demanded);
}

TEST(a_forward_without_backward_builds_nothing_anew)
{
    RIG(r, 3, 0, 0);
    for (int k = 0; k < 4; k++) {
        step(&r);
        forward(&r);
    }
    forward(&r);
    CHECK_EQ(mt_stream_stats_get(r.s).rebuilds, 1);
}

/* Evaluation, training, evaluation: two schedules, of which the long one serves both. */
TEST(evaluation_before_training_costs_one_schedule_more)
{
    RIG(r, 3, 0, 0);
    forward(&r);
    step(&r);
    forward(&r);                            /* a trace of its own: a second schedule */
    CHECK_EQ(mt_stream_stats_get(r.s).rebuilds, 2);
    forward(&r);
    int64_t demanded = mt_stream_stats_get(r.s).demand_fetches;
    backward(&r);
    CHECK(mt_stream_stats_get(r.s).demand_fetches <= demanded + 1);
    forward(&r);
    CHECK_EQ(mt_stream_stats_get(r.s).rebuilds, 2);
}

/* The other way round is in force, the forward's own schedule is found first, and the long one
 * when backward begins. */
TEST(a_kept_schedule_is_taken_up_in_mid_step)
{
    RIG(r, 3, 0, 0);
    forward(&r);
    step(&r);
    CHECK_OK(mt_stream_begin(r.s));
    for (int u = UNITS - 1; u >= 0; u--)
        visit(&r, u);
    forward(&r);
    CHECK_EQ(mt_stream_stats_get(r.s).rebuilds, 3);
    int64_t demanded = mt_stream_stats_get(r.s).demand_fetches;
    backward(&r);
    CHECK(mt_stream_stats_get(r.s).demand_fetches <= demanded + 1);
}

TEST(consecutive_acquires_of_a_unit_are_one_compute)
{
    const mt_schedule *s;
    int                computes = 0;

    RIG(r, 2, 0, 0);
    CHECK_OK(mt_stream_begin(r.s));
    visit(&r, 0);
    visit(&r, 0);
    visit(&r, 1);
    visit(&r, 1);
    CHECK_OK(mt_stream_begin(r.s));
    REQUIRE((s = mt_stream_schedule(r.s)) != NULL);
    for (int64_t i = 0; i < s->n; i++)
        computes += s->steps[i].kind == MT_COMPUTE;
    CHECK_EQ(computes, 2);
}

TEST(kick_asks_for_the_start_of_the_next_step)
{
    RIG(r, 3, 0, 0);
    step(&r);
    step(&r);
    for (int u = 0; u < UNITS; u++)
        rewrite(&r, u, 7.0f);
    mt_stream_stats before = mt_stream_stats_get(r.s);
    CHECK_OK(mt_stream_kick(r.s, r.t.run));
    mt_stream_stats kicked = mt_stream_stats_get(r.s);
    CHECK(kicked.fetches > before.fetches);
    CHECK_OK(mt_stream_kick(r.s, r.t.run));
    CHECK_EQ(mt_stream_stats_get(r.s).fetches, kicked.fetches);
    CHECK_OK(mt_stream_begin(r.s));
    visit(&r, 0);
    CHECK_EQ(mt_stream_stats_get(r.s).demand_fetches, before.demand_fetches);
}

TEST(kick_in_the_middle_of_a_step_takes_no_slot_away)
{
    RIG(r, 3, 0, 0);
    step(&r);
    forward(&r);
    int64_t fetches = mt_stream_stats_get(r.s).fetches;
    CHECK_OK(mt_stream_kick(r.s, r.t.run));
    CHECK_EQ(mt_stream_stats_get(r.s).fetches, fetches);
}

TEST(sync_fetches_nothing_ahead)
{
    RIG(r, 3, 5, 100);
    debug_set(&r.t.cx, (mt_debug){ .sync = 1, .poison = 1 });
    for (int k = 0; k < 2; k++) {
        step(&r);
        CHECK_OK(mt_stream_kick(r.s, r.t.run));
    }
    mt_stream_stats s = mt_stream_stats_get(r.s);
    CHECK_EQ(s.fetches, s.demand_fetches);
}

/* ---- off the schedule ------------------------------------------------------------------- */

TEST(any_order_is_right)
{
    for (uint64_t seed = 0; seed < 12; seed++) {
        uint64_t random = seed;

        RIG(r, 1 + (int)(seed % 4), seed, seed % 2 ? 50 : 0);
        debug_set(&r.t.cx, (mt_debug){ .poison = 1 });
        for (int step = 0; step < 6; step++) {
            CHECK_OK(mt_stream_begin(r.s));
            for (int i = 0; i < 2 * UNITS; i++) {
                int usual = i < UNITS ? i : 2 * UNITS - 1 - i;
                int odd = (int)(toy_random(&random) % UNITS);
                int unit = toy_random(&random) % 4 == 0 ? odd : usual;

                if (toy_random(&random) % 16 == 0)
                    rewrite(&r, odd, (float)i);
                visit(&r, unit);
            }
            CHECK_OK(mt_stream_kick(r.s, r.t.run));
        }
    }
}

TEST(a_unit_left_out_does_not_stop_the_prefetch)
{
    RIG(r, 3, 0, 0);
    step(&r);
    step(&r);
    for (int u = 0; u < UNITS; u++)
        mt_ledger_touch(r.t.store, u);
    int64_t demanded = mt_stream_stats_get(r.s).demand_fetches;
    CHECK_OK(mt_stream_begin(r.s));
    for (int u = 0; u < UNITS; u++)
        if (u != 1)
            visit(&r, u);
    CHECK_EQ(mt_stream_stats_get(r.s).demand_fetches, demanded);
}

TEST(a_written_unit_is_fetched_again)
{
    RIG(r, 4, 0, 0);
    forward(&r);
    rewrite(&r, 2, 42.0f);
    visit(&r, 2);
    rewrite(&r, 2, 43.0f);
    visit(&r, 2);                           /* also when it was the latest window */
}

TEST(find_names_slot_unit_and_offset)
{
    int    k = -1, unit = -1;
    size_t offset = 0;

    RIG(r, 2, 0, 0);
    char *mem = window(&r, 3, &k);
    CHECK_EQ(mt_stream_find(r.s, mem + 100, &unit, &offset), k);
    CHECK_EQ(unit, 3);
    CHECK_EQ(offset, 100);
    CHECK_EQ(mt_stream_find(r.s, mem + r.slots[k].bytes, &unit, &offset) == k, 0);
    CHECK_EQ(mt_stream_find(r.s, &r, &unit, &offset), -1);
}

/* ---- cuts: parts of units --------------------------------------------------------------- */

/* Of unit u: its last bytes first, then its first ones. */
#define CUT_BYTES 64

static void rig_cut(rig *r, int *number)
{
    for (int u = 0; u < UNITS; u++) {
        size_t       bytes = mt_store_hi_bytes(r->t.store, u);
        mt_cut_range two[2] = { { bytes - CUT_BYTES, 0, CUT_BYTES }, { 0, 512, CUT_BYTES } };

        CHECK_OK(mt_stream_cut(r->s, u, two, 2, &number[u]));
        CHECK_EQ(number[u], UNITS + u);
        CHECK_EQ(mt_stream_owner(r->s, number[u]), u);
        CHECK_EQ(mt_stream_owner(r->s, u), u);
    }
    CHECK_EQ(mt_stream_numbers(r->s), 2 * UNITS);
}

static void visit_cut(rig *r, int number)
{
    int         u = mt_stream_owner(r->s, number);
    char       *mem = window(r, number, NULL);
    const char *hi = (const char *)toy_at(&r->t, u, 0, MT_PLANE_HI);

    REQUIRE(mem != NULL);
    CHECK(memcmp(mem, hi + mt_store_hi_bytes(r->t.store, u) - CUT_BYTES, CUT_BYTES) == 0);
    CHECK(memcmp(mem + 512, hi, CUT_BYTES) == 0);
}

TEST(a_cut_brings_its_bytes_of_the_units_current_weights)
{
    int number[UNITS];

    RIG(r, 2, 0, 0);
    rig_cut(&r, number);
    for (int step = 0; step < 3; step++) {
        CHECK_OK(mt_stream_begin(r.s));
        for (int u = 0; u < UNITS; u++) {
            visit(&r, u);
            visit_cut(&r, number[u]);
        }
        for (int u = UNITS - 1; u >= 0; u--) {
            visit_cut(&r, number[u]);
            visit(&r, u);
        }
        if (step == 1)
            CHECK(mt_stream_stats_get(r.s).demand_fetches > 0);
        for (int u = 0; u < UNITS; u++)
            rewrite(&r, u, (float)step);
    }
}

TEST(cuts_are_fetched_ahead_and_count_their_own_bytes)
{
    int      number[UNITS];
    uint64_t demanded, bytes;

    RIG(r, 2, 0, 0);
    rig_cut(&r, number);
    for (int step = 0; step < 3; step++) {
        demanded = (uint64_t)mt_stream_stats_get(r.s).demand_fetches;
        bytes = mt_stream_stats_get(r.s).h2d_bytes;
        CHECK_OK(mt_stream_begin(r.s));
        for (int u = 0; u < UNITS; u++)
            visit_cut(&r, number[u]);
    }
    CHECK((uint64_t)mt_stream_stats_get(r.s).demand_fetches <= demanded + 1);
    CHECK_EQ(mt_stream_stats_get(r.s).h2d_bytes - bytes, UNITS * (512 + CUT_BYTES));
}

TEST(cuts_beyond_a_plane_are_refused)
{
    int number = -1;

    RIG(r, 2, 0, 0);
    size_t bytes = mt_store_hi_bytes(r.t.store, 0);
    mt_cut_range range = (mt_cut_range){ bytes, 0, 1 };
    CHECK_EQ(mt_stream_cut(r.s, 0, &range, 1, &number), MT_EINVAL);
    range = (mt_cut_range){ 0, 0, 0 };
    CHECK_EQ(mt_stream_cut(r.s, 0, &range, 1, &number), MT_EINVAL);
    range = (mt_cut_range){ 0, SIZE_MAX, 2 };
    CHECK_EQ(mt_stream_cut(r.s, 0, &range, 1, &number), MT_EINVAL);
    CHECK_EQ(number, -1);
    range = (mt_cut_range){ 0, bytes * 2, 4 };
    CHECK_OK(mt_stream_cut(r.s, UNITS - 1, &range, 1, &number));
    CHECK_EQ(mt_stream_acquire(r.s, number, r.t.run, &number, NULL), MT_EINVAL);
}

TEST(units_are_cut_before_the_first_fetch_and_none_is_added_behind)
{
    int           number, unit;
    mt_cut_range  range = { 0, 0, 4 };
    mt_param_desc d = { MT_F32, 8, 1 };

    RIG(r, 2, 0, 0);
    CHECK_OK(mt_stream_cut(r.s, 0, &range, 1, &number));
    CHECK_OK(mt_stream_begin(r.s));
    visit(&r, 1);
    CHECK_FAILS(mt_stream_cut(r.s, 1, &range, 1, &number), MT_ESTATE, "weights are being fetched");
    unit = store_add(r.t.store, "late", &d, 1);
    CHECK_EQ(unit, number);                              /* whose bytes would it be given? */
    CHECK_FAILS(mt_stream_begin(r.s), MT_ESTATE, "1 units were added since unit layers.0 was cut");
}

/* ---- held slots ------------------------------------------------------------------------- */

TEST(a_held_slot_keeps_its_bytes_and_gets_other_memory)
{
    int   k = -1;

    RIG(r, 1, 0, 0);
    void *mem = window(&r, 0, &k), *first = r.slots[k].mem;
    r.held[k] = 1;
    visit(&r, 1);
    visit(&r, 2);
    CHECK(r.slots[k].mem != first);
    CHECK(matches(&r, 0, mem));             /* a saved weight is what it was */
    CHECK_EQ(r.n_old, 1);
}

TEST(demand_spares_a_held_slot)
{
    int k = -1;

    RIG(r, 3, 0, 0);
    (void)window(&r, 0, &k);
    r.held[k] = 1;
    for (int round = 0; round < 3; round++)
        for (int u = 1; u < UNITS; u++)
            visit(&r, u);
    CHECK_EQ(r.n_old, 0);
}

TEST(demand_takes_the_slot_not_used_for_longest)
{
    RIG(r, 3, 0, 0);
    visit(&r, 0);
    visit(&r, 1);
    visit(&r, 2);
    visit(&r, 0);
    visit(&r, 3);                           /* takes 1's */
    int64_t fetches = mt_stream_stats_get(r.s).fetches;
    visit(&r, 0);
    visit(&r, 2);
    CHECK_EQ(mt_stream_stats_get(r.s).fetches, fetches);
}

TEST(prefetch_never_takes_the_slot_just_given_out)
{
    RIG(r, 2, 3, 100);
    debug_set(&r.t.cx, (mt_debug){ .poison = 1 });
    for (int step = 0; step < 3; step++) {
        CHECK_OK(mt_stream_begin(r.s));
        for (int i = 0; i < 2 * UNITS; i++) {
            int   k = -1, unit = i < UNITS ? i : 2 * UNITS - 1 - i, now = -1;
            void *mem = NULL;
            size_t offset;

            CHECK_OK(mt_stream_acquire(r.s, unit, r.t.run, &k, &mem));
            CHECK_EQ(mt_stream_find(r.s, mem, &now, &offset), k);
            CHECK_EQ(now, unit);
            CHECK_OK(mt_stream_await(r.s, k, r.t.run));
            CHECK_OK(r.t.dev->ops->sync(r.t.run));
            CHECK(matches(&r, unit, mem));
        }
    }
}

/* ---- updates and faults ----------------------------------------------------------------- */

/* An updater, as far as the ledger sees: waits for copies, naps, writes, ends. */
typedef struct writer {
    rig  *r;
    int   unit;
    float value;
} writer;

static void *writer_main(void *arg)
{
    writer *w = arg;

    CHECK_OK(mt_ledger_wait_fetch(w->r->t.store, w->unit));
    for (int64_t i = 0; i < toy_numel(w->unit, 0); i++) {
        toy_at(&w->r->t, w->unit, 0, MT_PLANE_HI)[i] = w->value;
        if (i == 4)
            sleep_ms(2);
    }
    mt_ledger_update_end(w->r->t.store, w->unit);
    return NULL;
}

/* The schedule foresees a backward, asks for its units, and an update comes instead. */
TEST(a_copy_that_an_update_overtook_is_fetched_again)
{
    for (uint64_t seed = 0; seed < 8; seed++) {
        pthread_t thread[UNITS];
        writer    w[UNITS];

        RIG(r, 2, seed, 300);
        step(&r);
        forward(&r);
        for (int u = 0; u < UNITS; u++) {
            w[u] = (writer){ &r, u, (float)(100 + u) };
            mt_ledger_update_begin(r.t.store, u);
            thread[u] = thread_start(writer_main, &w[u]);
        }
        CHECK_OK(mt_stream_begin(r.s));
        for (int u = 0; u < UNITS; u++) {
            const float *mem = window(&r, u, NULL);
            CHECK(mem != NULL && mem[0] == w[u].value && mem[toy_numel(u, 0) - 1] == w[u].value);
        }
        for (int u = 0; u < UNITS; u++)
            thread_join(thread[u]);
    }
}

static void *update_main(void *arg)
{
    writer *w = arg;

    CHECK_OK(mt_ledger_wait_fetch(w->r->t.store, w->unit));
    w->value = 1.0f;
    mt_ledger_update_end(w->r->t.store, w->unit);
    return NULL;
}

/* The moment between the mover's look at the version and its copy. */
TEST(an_update_waits_for_a_copy_announced_before_it)
{
    uint64_t version = 0;

    RIG(r, 1, 0, 0);
    writer w = { &r, 1, 0.0f };
    CHECK_OK(mt_ledger_fetch_begin(r.t.store, 1, &version));
    CHECK_EQ(version, mt_ledger_version(r.t.store, 1));
    mt_ledger_update_begin(r.t.store, 1);
    pthread_t thread = thread_start(update_main, &w);
    sleep_ms(5);
    /* TSan, and any luck, says whether the update wrote before we were done. */
    CHECK(w.value == 0.0f);
    CHECK_OK(mt_ledger_fetching(r.t.store, 1, r.t.run));
    thread_join(thread);
    CHECK(w.value == 1.0f);
    CHECK(mt_ledger_version(r.t.store, 1) > version);
    CHECK_EQ(mt_ledger_fetch_begin(r.t.store, UNITS, &version), MT_EINVAL);
}

/* A device whose copies do what the test says first, on the mover's thread: between its look at
 * the version and the copy. */
static struct spy {
    mt_dev_ops        ops;
    const mt_dev_ops *under;
    rig              *r;
    void            (*once)(struct spy *spy);    /* before the next copy; then NULL */
    mt_status         st;                        /* of that copy, if not OK */
    pthread_t         waiter;
    mt_status         waited;
} spy;

static mt_status spy_copy(mt_queue *q, void *dst, const void *src, size_t bytes)
{
    void    (*once)(struct spy *) = spy.once;
    mt_status st = spy.st;

    spy.once = NULL;
    spy.st = MT_OK;
    if (once != NULL)
        once(&spy);
    return st != MT_OK ? MT_FAIL(st, "the spy's copy failed") : spy.under->copy(q, dst, src, bytes);
}

static void spy_on(rig *r, void (*once)(struct spy *), mt_status st)
{
    spy = (struct spy){ .ops = *r->t.dev->ops, .under = r->t.dev->ops, .r = r,
                         .once = once, .st = st };
    spy.ops.copy = spy_copy;
    r->t.dev->ops = &spy.ops;
}

static void spy_announces(struct spy *w)
{
    mt_ledger_update_begin(w->r->t.store, 0);
}

TEST(a_copy_older_than_an_update_is_known_as_such)
{
    RIG(r, 2, 0, 0);
    writer w = { &r, 0, 77.0f };
    spy_on(&r, spy_announces, MT_OK);
    visit(&r, 0);
    (void)writer_main(&w);
    visit(&r, 0);
}

static void *spy_waits(void *arg)
{
    struct spy *w = arg;

    w->waited = mt_ledger_wait_fetch(w->r->t.store, 0);
    return NULL;
}

static void spy_starts_a_waiter(struct spy *w)
{
    w->waiter = thread_start(spy_waits, w);
    sleep_ms(5);
}

TEST(a_writer_hears_of_a_failed_copy_and_does_not_write)
{
    int   k = -1;
    void *mem = NULL;

    RIG(r, 2, 0, 0);
    spy_on(&r, spy_starts_a_waiter, MT_EDEVICE);
    CHECK_OK(mt_stream_acquire(r.s, 0, r.t.run, &k, &mem));
    CHECK_FAILS(mt_stream_await(r.s, k, r.t.run), MT_EDEVICE, "the spy's copy failed");
    thread_join(spy.waiter);
    CHECK_EQ(spy.waited, MT_EDEVICE);
}

TEST(a_workers_fault_ends_await_and_acquire)
{
    int   k = -1;
    void *mem = NULL;

    RIG(r, 2, 0, 0);
    mt_ledger_update_begin(r.t.store, 0);
    CHECK_OK(mt_stream_acquire(r.s, 0, r.t.run, &k, &mem));
    mt_ledger_fault(r.t.store, MT_EDEVICE, "the updater met its end");
    CHECK_FAILS(mt_stream_await(r.s, k, r.t.run), MT_EDEVICE, "met its end");
    CHECK_EQ(mt_stream_acquire(r.s, 1, r.t.run, &k, &mem), MT_EDEVICE);
}

/* Opens, runs two steps, closes; the first failure ends it. run comes from the device behind. */
static mt_status life(rig *r)
{
    int   k;
    void *mem;

    TRY(mt_stream_open(&r->t.cx, r->slots, r->n_slots, rig_hooks(r), &r->s));
    debug_set(&r->t.cx, (mt_debug){ .poison = 1 });
    for (int i = 0; i < 3 * UNITS; i++) {
        if (i % UNITS == 0)
            TRY(mt_stream_begin(r->s));
        TRY(mt_stream_acquire(r->s, i % UNITS, r->t.run, &k, &mem));
        TRY(mt_stream_await(r->s, k, r->t.run));
    }
    return MT_OK;
}

static void nth_failure_frees_everything(fault_mode mode)
{
    int fired = 1;

    CPU(cpu);
    for (int n = 1; fired > 0; n++) {
        rig     r = { 0 };
        mt_dev *dev = fault_dev(cpu, 0, mode);

        toy_open_on(&r.t, dev, UNITS, 0, MT_F32);
        rig_slots(&r, 2);
        int live = fault_live(dev);
        fault_next(dev, n);
        mt_status st = life(&r);
        mt_stream_close(r.s);
        r.s = NULL;
        fired = fault_fired(dev);
        CHECK(st == MT_OK || st == MT_EDEVICE);
        CHECK(fired > 0 || st == MT_OK);
        /* An event per unit fetched stays with the ledger, as long as the store. */
        CHECK(fault_live(dev) >= live && fault_live(dev) <= live + UNITS);
        rig_close(&r);
    }
}

TEST(every_failing_device_call_frees_everything)
{
    nth_failure_frees_everything(FAULT_ONCE);
    nth_failure_frees_everything(FAULT_STAYS);
}

/* ---- the course, without bytes ---------------------------------------------------------- */

TEST(a_unit_stays_elsewhere_only_if_nothing_is_fetched_over_it)
{
    static const size_t unit_bytes[3] = { 1, 1, 1 }, slot_bytes[2] = { 1, 1 };
    mt__course          c = { 0 };
    int64_t             from, step;

    for (int u = 0; u < 3; u++)
        CHECK_OK(mt__course_compute(&c, u, &from, &step));
    CHECK_OK(mt__course_begin(&c, unit_bytes, 3, slot_bytes, 2));
    /* fetch 0 -> 0, fetch 1 -> 1, compute 0, fetch 2 -> 0, compute 1, compute 2 */
    REQUIRE(mt__course_schedule(&c)->steps[3].kind == MT_FETCH);
    CHECK_EQ(mt__course_keeps(&c, 0, 1), 0);
    CHECK_EQ(mt__course_keeps(&c, 1, 0), 0);
    CHECK_EQ(mt__course_keeps(&c, 3, 1), 1);
    CHECK_EQ(mt__course_wants(&c, 0, 2), 1);
    CHECK_EQ(mt__course_wants(&c, 0, 4), 0);         /* 0 is done, and 2 is fetched over it */
    CHECK_EQ(mt__course_wants(&c, 2, 2), 0);         /* no FETCH */
    mt__course_close(&c);
}

TEST(a_fifth_order_replaces_the_oldest)
{
    static const size_t unit_bytes[6] = { 1, 1, 1, 1, 1, 1 }, slot_bytes[2] = { 1, 1 };
    mt__course          c = { 0 };
    int64_t             from, step;

    for (int round = 0; round < 2; round++)
        for (int first = 0; first < 5; first++) {
            for (int i = 0; i < 3; i++)
                CHECK_OK(mt__course_compute(&c, (first + i) % 6, &from, &step));
            CHECK_OK(mt__course_begin(&c, unit_bytes, 6, slot_bytes, 2));
        }
    CHECK_EQ(c.rebuilds, 10);               /* five in turn never find themselves among four */
    for (int i = 0; i < 3; i++)
        CHECK_OK(mt__course_compute(&c, (3 + i) % 6, &from, &step));
    CHECK_OK(mt__course_begin(&c, unit_bytes, 6, slot_bytes, 2));
    CHECK_EQ(c.rebuilds, 10);
    mt__course_close(&c);
}
