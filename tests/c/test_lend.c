/* test_lend.c — GRAD planes that are lent: who gets which memory, who waits for it, and who is
 * refused. That training with them gives the same bits is tests/test_grads.py's.
 */
#include "dev_fault.h"
#include "toy.h"

CLOSES(mt_store, mt_store_close(*x))

#define UNITS 8

/* Fp32 units of so many elements, all of whose gradients pass. */
static mt_status shop_open(mt_dev *dev, const int64_t *numel, int n, mt_store **s)
{
    int unit;

    TRY(mt_store_open(&(mt_context){ .dev = dev }, s));
    for (int u = 0; u < n; u++) {
        mt_param_desc d[2] = { { MT_F32, numel[u], 1 }, { MT_F32, 10, 0 } };
        char          name[24];

        snprintf(name, sizeof name, "layers.%d", u);
        TRY(mt_store_add(*s, name, d, 2, &unit));
        TRY(mt_store_set_passing(*s, u));
    }
    return MT_OK;
}

#define SHOP(s, ...) const int64_t s##_numel[] = { __VA_ARGS__ }; CPU(s##_dev); \
    OPENED(mt_store, s, shop_open(s##_dev, s##_numel, COUNT(s##_numel), &s))

static void *grad_of(mt_store *s, int unit)
{
    return store_at(s, unit, 0, MT_PLANE_GRAD);
}

static void update(mt_store *s, int unit)
{
    mt_ledger_update_begin(s, unit);
    mt_ledger_update_end(s, unit);
}

TEST(a_unit_has_gradients_from_hand_over_to_update)
{
    void *at, *first;

    SHOP(s, 1000, 400);
    CHECK_FAILS(mt_store_at(s, 0, 0, MT_PLANE_GRAD, &at), MT_ESTATE, "layers.0");
    CHECK_EQ(mt_store_bytes(s, MT_PLANE_GRAD), 0);
    CHECK_OK(mt_store_lend(s, 0, NULL));
    first = grad_of(s, 0);
    memset(first, 1, 4000);
    CHECK_EQ(mt_store_at(s, 0, 1, MT_PLANE_GRAD, &at), MT_EINVAL);  /* frozen */
    CHECK_OK(mt_store_lend(s, 0, NULL));                                  /* handed over again */
    CHECK(grad_of(s, 0) == first);
    at = store_at(s, 0, 0, MT_PLANE_M);
    update(s, 0);
    CHECK_EQ(mt_store_at(s, 0, 0, MT_PLANE_GRAD, &at), MT_ESTATE);
    CHECK_OK(mt_store_lend(s, 1, NULL));
    CHECK(grad_of(s, 1) == first);                                  /* free again, and of a size */
    CHECK_EQ(mt_store_bytes(s, MT_PLANE_GRAD), 1 << 20);
}

/* Of units that live there, and of those alone. */
TEST(settled_units_have_theirs_on_the_device)
{
    mt_param_desc d = { MT_F32, 100, 1 };
    void         *at, *first;

    SHOP(s, 100);
    for (int u = 1; u < 3; u++) {
        (void)store_add(s, "settled", &d, 1);
        CHECK_OK(mt_store_move(s, u, &mt_home_vram, NULL));
        CHECK_OK(mt_store_set_passing(s, u));
    }
    CHECK_EQ(mt_store_device_at(s, 1, 0, MT_PLANE_GRAD, &at), MT_ESTATE);
    CHECK_OK(mt_store_lend(s, 1, NULL));
    CHECK_OK(mt_store_device_at(s, 1, 0, MT_PLANE_GRAD, &first));
    CHECK_EQ(mt_store_at(s, 1, 0, MT_PLANE_GRAD, &at), MT_ESTATE);        /* and no copy of it */
    CHECK_EQ(mt_store_device_bytes(s), 1 << 20);
    CHECK_EQ(mt_store_bytes(s, MT_PLANE_GRAD), 0);
    update(s, 1);
    CHECK_EQ(mt_store_device_at(s, 1, 0, MT_PLANE_GRAD, &at), MT_ESTATE);
    CHECK_OK(mt_store_lend(s, 0, NULL));
    CHECK(grad_of(s, 0) != first);
    CHECK_OK(mt_store_lend(s, 2, NULL));
    CHECK_OK(mt_store_device_at(s, 2, 0, MT_PLANE_GRAD, &at));
    CHECK(at == first);
    CHECK_EQ(mt_store_device_bytes(s), 1 << 20);
    CHECK_EQ(mt_store_bytes(s, MT_PLANE_GRAD), 1 << 20);
    mt_store_device_close(s);
    CHECK_EQ(mt_store_device_bytes(s), 0);
}

/* Three of a size; one of another size is another's. */
TEST(there_are_three_buffers_of_a_size)
{
    const int64_t mi = 1 << 20, numel[UNITS] = { mi, mi, mi, mi, 3 * mi, 100, 50, mi };
    void         *at[UNITS];

    CPU(dev);
    OPENED(mt_store, s, shop_open(dev, numel, UNITS, &s));
    for (int u = 0; u < UNITS; u++) {
        if (u == 3)
            continue;
        if (u == 7)
            update(s, 1);
        CHECK_OK(mt_store_lend(s, u, NULL));
        at[u] = grad_of(s, u);
        for (int v = 0; v < u; v++)
            CHECK((u == 7 && v == 1) == (v != 3 && at[u] == at[v]));
    }
    CHECK_EQ(mt_store_bytes(s, MT_PLANE_GRAD), (3 * 4 + 12 + 2 * 1) << 20);
}

typedef struct turn {
    mt_store    *s;
    mt_timeline *line;
    int        unit;
    mt_status  st;
    char       text[200];
    atomic_int begun, over;
} turn;

static void *lend_main(void *arg)
{
    turn *t = arg;

    atomic_store(&t->begun, 1);
    t->st = mt_store_lend(t->s, t->unit, t->line);
    snprintf(t->text, sizeof t->text, "%s", t->st == MT_OK ? "" : mt_last_error());
    atomic_store(&t->over, 1);
    return NULL;
}

/* The one that was lent first is waited for, though others come back before.
 * A trace has that wait, and no other. */
TEST(where_all_are_lent_the_first_is_waited_for)
{
    mt_timeline *line;
    mt_record    got[4];

    SHOP(s, 10, 10, 10, 10);
    REQUIRE_OK(mt_timeline_open(s_dev, &line));
    turn t = { .s = s, .line = line, .unit = 3 };
    CHECK_OK(mt_timeline_on(line, 1));
    for (int u = 0; u < 3; u++) {
        CHECK_OK(mt_store_lend(s, u, NULL));
        mt_ledger_update_begin(s, u);
    }
    void *first = grad_of(s, 0);
    pthread_t thread = thread_start(lend_main, &t);
    UNTIL(atomic_load(&t.begun));                /* on a busy machine it takes its time */
    sleep_ms(50);
    CHECK_EQ(atomic_load(&t.over), 0);
    mt_ledger_update_end(s, 0);
    thread_join(thread);
    CHECK_EQ(t.st, MT_OK);
    CHECK(grad_of(s, 3) == first);
    REQUIRE(mt_timeline_read(line, got, 4) == 1);
    CHECK_EQ(got[0].lane, MT_LANE_HAND);
    CHECK_EQ(got[0].work, MT_WORK_WAIT);
    CHECK_EQ(got[0].unit, 0);
    mt_timeline_close(line);
    for (int u = 1; u < 3; u++)
        mt_ledger_update_end(s, u);
}

TEST(fewer_are_made_when_that_is_said_before)
{
    SHOP(s, 10, 10, 10);
    CHECK_EQ(mt_store_lend_most(s, 0), MT_EINVAL);
    CHECK_EQ(mt_store_lend_most(s, 4), MT_EINVAL);
    CHECK_OK(mt_store_lend_most(s, 1));
    CHECK_OK(mt_store_lend(s, 0, NULL));
    size_t one = mt_store_bytes(s, MT_PLANE_GRAD);
    CHECK_FAILS(mt_store_lend(s, 1, NULL), MT_ESTATE, "layers.0");
    for (int u = 1; u < 3; u++) {
        update(s, u - 1);
        CHECK_OK(mt_store_lend(s, u, NULL));
    }
    CHECK_EQ(mt_store_bytes(s, MT_PLANE_GRAD), one);
    CHECK_EQ(mt_store_lend_most(s, 2), MT_EINVAL);                        /* something was lent */
}

TEST(gradients_that_nobody_used_are_named)
{
    SHOP(s, 10, 10, 10, 10);
    for (int u = 0; u < 3; u++)
        CHECK_OK(mt_store_lend(s, u, NULL));
    CHECK_FAILS(mt_store_lend(s, 3, NULL), MT_ESTATE, "layers.0");
    CHECK_SAYS("no update has used them");
    update(s, 0);
    CHECK_OK(mt_store_lend(s, 3, NULL));
}

TEST(a_failing_update_elsewhere_ends_the_wait)
{
    SHOP(s, 10, 10, 10, 10);
    turn t = { .s = s, .unit = 3 };
    for (int u = 0; u < 3; u++)
        CHECK_OK(mt_store_lend(s, u, NULL));
    mt_ledger_update_begin(s, 0);
    pthread_t thread = thread_start(lend_main, &t);
    sleep_ms(2);
    mt_ledger_fault(s, MT_EDEVICE, "the device is gone");
    thread_join(thread);
    CHECK_EQ(t.st, MT_EDEVICE);
    CHECK_HAS(t.text, "the device is gone");
}

/* What is trained when they are handed over has room. */
TEST(parameters_trained_since_have_gradients_too)
{
    SHOP(s, 10);
    CHECK_OK(mt_store_lend(s, 0, NULL));
    CHECK_OK(mt_store_set_trainable(s, 0, 1, 1));
    /* in memory of its own, until the update */
    void *at = store_at(s, 0, 1, MT_PLANE_GRAD);
    CHECK(mt_store_bytes(s, MT_PLANE_GRAD) > 1 << 20);
    update(s, 0);
    CHECK_EQ(mt_store_bytes(s, MT_PLANE_GRAD), 1 << 20);
    CHECK_OK(mt_store_lend(s, 0, NULL));
    at = store_at(s, 0, 1, MT_PLANE_GRAD);
    CHECK_EQ((char *)at - (char *)grad_of(s, 0), 512);
}

TEST(what_cannot_pass_is_refused)
{
    mt_param_desc d = { MT_F32, 10, 1 };

    SHOP(s, 10);
    CHECK_EQ(mt_store_move(s, 0, &mt_home_vram, NULL), MT_ESTATE);
    CHECK_EQ(mt_store_set_passing(s, 1), MT_EINVAL);
    (void)store_add(s, "kept", &d, 1);
    CHECK_FAILS(mt_store_lend(s, 1, NULL), MT_EINVAL, "kept");
    void *at = store_at(s, 1, 0, MT_PLANE_GRAD);
    CHECK_EQ(mt_store_set_passing(s, 1), MT_ESTATE);
    (void)store_add(s, "settled", &d, 1);
    CHECK_OK(mt_store_move(s, 2, &mt_home_vram, NULL));
    CHECK_OK(mt_store_device_at(s, 2, 0, MT_PLANE_GRAD, &at));
    CHECK_EQ(mt_store_set_passing(s, 2), MT_ESTATE);
    CHECK_EQ(mt_store_passes(s, 0), 1);
    CHECK_EQ(mt_store_passes(s, 1), 0);
}

/* The hand-over is put where the plane is lent; nothing is there to add to. */
TEST(gradients_come_home_into_what_is_lent)
{
    mt_offload_kernels k = { .sumsq = toy_sumsq, .accumulate = toy_accumulate };
    float              grad[40] = { 1, 2, 3 };
    mt_grad_item       item = { 0, grad, MT_GRAD_SET, 0 };
    uint64_t           ticket;

    TOY(t, 2, 1, 0);
    CHECK_OK(mt_store_set_passing(t.store, 0));
    OPENED(mt_offload, o, mt_offload_open(&t.cx, 2, k, &o));
    CHECK_OK(mt_offload_put(o, 0, &item, 1, t.run, &ticket));
    CHECK_OK(mt_ledger_wait_grads(t.store, 0));
    CHECK(((float *)grad_of(t.store, 0))[1] == 2);
    CHECK(mt_offload_sumsq(o, 0, 0) == 14 && mt_offload_has(o, 0, 0, MT_GRAD_COUNTED));
    item.mode = MT_GRAD_ADD;
    CHECK_EQ(mt_offload_put(o, 0, &item, 1, t.run, &ticket), MT_ESTATE);
    CHECK_SAYS("none is there to add to");
}

TEST(every_failing_device_call_frees_everything)
{
    const int64_t numel[2] = { 1 << 20, 10 };

    EACH_FAULT(d, 1, FAULT_ONCE) {
        mt_store *s = NULL;
        mt_status st = shop_open(d, numel, 2, &s);

        for (int u = 0; u < 2 && st == MT_OK; u++)
            st = mt_store_lend(s, u, NULL);
        CHECK_EQ(st, fault_fired(d) ? MT_EDEVICE : MT_OK);
        mt_store_close(s);
    }
}
