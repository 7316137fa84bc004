/* test_lend.c — GRAD planes that are lent: who gets which memory, who waits for it, and who is
 * refused. That training with them gives the same bits is tests/test_grads.py's.
 */
#include "dev_fault.h"
#include "toy.h"

#include <pthread.h>
#include <time.h>

#define UNITS 8

/* Fp32 units of so many elements, all of whose gradients pass. */
static mt_status shop_open(mt_dev *dev, const int64_t *numel, int n, mt_store **s)
{
    int       unit;
    mt_status st;

    MT_TRY(mt_store_open(&(mt_context){ .dev = dev }, s));
    for (int u = 0; u < n; u++) {
        mt_param_desc d[2] = { { MT_F32, numel[u], 1 }, { MT_F32, 10, 0 } };
        char          name[24];

        snprintf(name, sizeof name, "layers.%d", u);
        MT_TRY(mt_store_add(*s, name, d, 2, &unit));
        MT_TRY(mt_store_set_passing(*s, u));
    }
fail:
    return st;
}

static void *grad_of(mt_store *s, int unit)
{
    void *at = NULL;

    CHECK_OK(mt_store_at(s, unit, 0, MT_PLANE_GRAD, &at));
    return at;
}

static void update(mt_store *s, int unit)
{
    mt_ledger_update_begin(s, unit);
    mt_ledger_update_end(s, unit);
}

static void a_unit_has_gradients_from_hand_over_to_update(void)
{
    const int64_t numel[2] = { 1000, 400 };
    mt_store     *s = NULL;
    mt_dev       *dev;
    void         *at, *first;

    REQUIRE(mt_dev_cpu_open(&dev) == MT_OK);
    REQUIRE(shop_open(dev, numel, 2, &s) == MT_OK);
    CHECK_EQ(mt_store_at(s, 0, 0, MT_PLANE_GRAD, &at), MT_ESTATE);
    CHECK_HAS(mt_last_error(), "layers.0");
    CHECK_EQ(mt_store_bytes(s, MT_PLANE_GRAD), 0);
    CHECK_OK(mt_store_lend(s, 0, NULL));
    first = grad_of(s, 0);
    memset(first, 1, 4000);
    CHECK_EQ(mt_store_at(s, 0, 1, MT_PLANE_GRAD, &at), MT_EINVAL);  /* frozen */
    CHECK_OK(mt_store_lend(s, 0, NULL));                                  /* handed over again */
    CHECK(grad_of(s, 0) == first);
    CHECK_OK(mt_store_at(s, 0, 0, MT_PLANE_M, &at));
    update(s, 0);
    CHECK_EQ(mt_store_at(s, 0, 0, MT_PLANE_GRAD, &at), MT_ESTATE);
    CHECK_OK(mt_store_lend(s, 1, NULL));
    CHECK(grad_of(s, 1) == first);                                  /* free again, and of a size */
    CHECK_EQ(mt_store_bytes(s, MT_PLANE_GRAD), 1 << 20);
    mt_store_close(s);
    dev->ops->close(dev);
}

/* Of units that live there, and of those alone. */
static void settled_units_have_theirs_on_the_device(void)
{
    const int64_t numel[1] = { 100 };
    mt_param_desc d = { MT_F32, 100, 1 };
    mt_store     *s = NULL;
    mt_dev       *dev;
    void         *at, *first;
    int           unit;

    REQUIRE(mt_dev_cpu_open(&dev) == MT_OK);
    REQUIRE(shop_open(dev, numel, 1, &s) == MT_OK);
    for (int u = 1; u < 3; u++) {
        REQUIRE(mt_store_add(s, "settled", &d, 1, &unit) == MT_OK);
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
    mt_store_close(s);
    dev->ops->close(dev);
}

/* Three of a size; one of another size is another's. */
static void there_are_three_buffers_of_a_size(void)
{
    const int64_t mi = 1 << 20, numel[UNITS] = { mi, mi, mi, mi, 3 * mi, 100, 50, mi };
    mt_store     *s = NULL;
    mt_dev       *dev;
    void         *at[UNITS];

    REQUIRE(mt_dev_cpu_open(&dev) == MT_OK);
    REQUIRE(shop_open(dev, numel, UNITS, &s) == MT_OK);
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
    mt_store_close(s);
    dev->ops->close(dev);
}

typedef struct turn {
    mt_store    *s;
    mt_timeline *line;
    int        unit;
    mt_status  st;
    char       text[200];
    atomic_int over;
} turn;

static void *lend_main(void *arg)
{
    turn *t = arg;

    t->st = mt_store_lend(t->s, t->unit, t->line);
    snprintf(t->text, sizeof t->text, "%s", t->st == MT_OK ? "" : mt_last_error());
    atomic_store(&t->over, 1);
    return NULL;
}

/* The one that was lent first is waited for, though others come back before.
 * A trace has that wait, and no other. */
static void where_all_are_lent_the_first_is_waited_for(void)
{
    const int64_t   numel[4] = { 10, 10, 10, 10 };
    struct timespec nap = { 0, 5000000 };
    turn            t = { .unit = 3 };
    pthread_t       thread;
    mt_timeline    *line;
    mt_record       got[4];
    mt_dev         *dev;
    void           *first;
    int             over;

    REQUIRE(mt_dev_cpu_open(&dev) == MT_OK);
    REQUIRE(shop_open(dev, numel, 4, &t.s) == MT_OK);
    REQUIRE(mt_timeline_open(dev, &line) == MT_OK);
    t.line = line;
    CHECK_OK(mt_timeline_on(line, 1));
    for (int u = 0; u < 3; u++) {
        CHECK_OK(mt_store_lend(t.s, u, NULL));
        mt_ledger_update_begin(t.s, u);
    }
    first = grad_of(t.s, 0);
    REQUIRE(pthread_create(&thread, NULL, lend_main, &t) == 0);
    nanosleep(&nap, NULL);
    over = atomic_load(&t.over);
    CHECK_EQ(over, 0);
    mt_ledger_update_end(t.s, 0);
    pthread_join(thread, NULL);
    CHECK_EQ(t.st, MT_OK);
    CHECK(grad_of(t.s, 3) == first);
    REQUIRE(mt_timeline_read(line, got, 4) == 1);
    CHECK_EQ(got[0].lane, MT_LANE_HAND);
    CHECK_EQ(got[0].work, MT_WORK_WAIT);
    CHECK_EQ(got[0].unit, 0);
    mt_timeline_close(line);
    for (int u = 1; u < 3; u++)
        mt_ledger_update_end(t.s, u);
    mt_store_close(t.s);
    dev->ops->close(dev);
}

static void fewer_are_made_when_that_is_said_before(void)
{
    const int64_t numel[3] = { 10, 10, 10 };
    mt_store     *s = NULL;
    mt_dev       *dev;
    size_t        one;

    REQUIRE(mt_dev_cpu_open(&dev) == MT_OK);
    REQUIRE(shop_open(dev, numel, 3, &s) == MT_OK);
    CHECK_EQ(mt_store_lend_most(s, 0), MT_EINVAL);
    CHECK_EQ(mt_store_lend_most(s, 4), MT_EINVAL);
    CHECK_OK(mt_store_lend_most(s, 1));
    CHECK_OK(mt_store_lend(s, 0, NULL));
    one = mt_store_bytes(s, MT_PLANE_GRAD);
    CHECK_EQ(mt_store_lend(s, 1, NULL), MT_ESTATE);
    CHECK_HAS(mt_last_error(), "layers.0");
    for (int u = 1; u < 3; u++) {
        update(s, u - 1);
        CHECK_OK(mt_store_lend(s, u, NULL));
    }
    CHECK_EQ(mt_store_bytes(s, MT_PLANE_GRAD), one);
    CHECK_EQ(mt_store_lend_most(s, 2), MT_EINVAL);                        /* something was lent */
    mt_store_close(s);
    dev->ops->close(dev);
}

static void gradients_that_nobody_used_are_named(void)
{
    const int64_t numel[4] = { 10, 10, 10, 10 };
    mt_store     *s = NULL;
    mt_dev       *dev;

    REQUIRE(mt_dev_cpu_open(&dev) == MT_OK);
    REQUIRE(shop_open(dev, numel, 4, &s) == MT_OK);
    for (int u = 0; u < 3; u++)
        CHECK_OK(mt_store_lend(s, u, NULL));
    CHECK_EQ(mt_store_lend(s, 3, NULL), MT_ESTATE);
    CHECK_HAS(mt_last_error(), "layers.0");
    CHECK_HAS(mt_last_error(), "no update has used them");
    update(s, 0);
    CHECK_OK(mt_store_lend(s, 3, NULL));
    mt_store_close(s);
    dev->ops->close(dev);
}

static void a_failing_update_elsewhere_ends_the_wait(void)
{
    const int64_t   numel[4] = { 10, 10, 10, 10 };
    struct timespec nap = { 0, 2000000 };
    turn            t = { .unit = 3 };
    pthread_t       thread;
    mt_dev         *dev;

    REQUIRE(mt_dev_cpu_open(&dev) == MT_OK);
    REQUIRE(shop_open(dev, numel, 4, &t.s) == MT_OK);
    for (int u = 0; u < 3; u++)
        CHECK_OK(mt_store_lend(t.s, u, NULL));
    mt_ledger_update_begin(t.s, 0);
    REQUIRE(pthread_create(&thread, NULL, lend_main, &t) == 0);
    nanosleep(&nap, NULL);
    mt_ledger_fault(t.s, MT_EDEVICE, "the device is gone");
    pthread_join(thread, NULL);
    CHECK_EQ(t.st, MT_EDEVICE);
    CHECK_HAS(t.text, "the device is gone");
    mt_store_close(t.s);
    dev->ops->close(dev);
}

/* What is trained when they are handed over has room. */
static void parameters_trained_since_have_gradients_too(void)
{
    const int64_t numel[1] = { 10 };
    mt_store     *s = NULL;
    mt_dev       *dev;
    void         *at;

    REQUIRE(mt_dev_cpu_open(&dev) == MT_OK);
    REQUIRE(shop_open(dev, numel, 1, &s) == MT_OK);
    CHECK_OK(mt_store_lend(s, 0, NULL));
    CHECK_OK(mt_store_set_trainable(s, 0, 1, 1));
    /* in memory of its own, until the update */
    CHECK_OK(mt_store_at(s, 0, 1, MT_PLANE_GRAD, &at));
    CHECK(mt_store_bytes(s, MT_PLANE_GRAD) > 1 << 20);
    update(s, 0);
    CHECK_EQ(mt_store_bytes(s, MT_PLANE_GRAD), 1 << 20);
    CHECK_OK(mt_store_lend(s, 0, NULL));
    CHECK_OK(mt_store_at(s, 0, 1, MT_PLANE_GRAD, &at));
    CHECK_EQ((char *)at - (char *)grad_of(s, 0), 512);
    mt_store_close(s);
    dev->ops->close(dev);
}

static void what_cannot_pass_is_refused(void)
{
    const int64_t numel[1] = { 10 };
    mt_param_desc d = { MT_F32, 10, 1 };
    mt_store     *s = NULL;
    mt_dev       *dev;
    void         *at;
    int           unit;

    REQUIRE(mt_dev_cpu_open(&dev) == MT_OK);
    REQUIRE(shop_open(dev, numel, 1, &s) == MT_OK);
    CHECK_EQ(mt_store_move(s, 0, &mt_home_vram, NULL), MT_ESTATE);
    CHECK_EQ(mt_store_set_passing(s, 1), MT_EINVAL);
    REQUIRE(mt_store_add(s, "kept", &d, 1, &unit) == MT_OK);
    CHECK_EQ(mt_store_lend(s, 1, NULL), MT_EINVAL);
    CHECK_HAS(mt_last_error(), "kept");
    CHECK_OK(mt_store_at(s, 1, 0, MT_PLANE_GRAD, &at));
    CHECK_EQ(mt_store_set_passing(s, 1), MT_ESTATE);
    REQUIRE(mt_store_add(s, "settled", &d, 1, &unit) == MT_OK);
    CHECK_OK(mt_store_move(s, 2, &mt_home_vram, NULL));
    CHECK_OK(mt_store_device_at(s, 2, 0, MT_PLANE_GRAD, &at));
    CHECK_EQ(mt_store_set_passing(s, 2), MT_ESTATE);
    CHECK_EQ(mt_store_passes(s, 0), 1);
    CHECK_EQ(mt_store_passes(s, 1), 0);
    mt_store_close(s);
    dev->ops->close(dev);
}

/* The hand-over is put where the plane is lent; nothing is there to add to. */
static void gradients_come_home_into_what_is_lent(void)
{
    toy                t;
    mt_offload        *o = NULL;
    mt_offload_kernels k = { .sumsq = toy_sumsq, .accumulate = toy_accumulate };
    float              grad[40] = { 1, 2, 3 };
    mt_grad_item       item = { 0, grad, MT_GRAD_SET, 0 };
    uint64_t           ticket;
    int                valid;

    toy_open(&t, 2, 1, 0);
    CHECK_OK(mt_store_set_passing(t.store, 0));
    REQUIRE(mt_offload_open(&t.cx, 2, k, &o) == MT_OK);
    CHECK_OK(mt_offload_put(o, 0, &item, 1, t.run, &ticket));
    CHECK_OK(mt_ledger_wait_grads(t.store, 0));
    CHECK(((float *)grad_of(t.store, 0))[1] == 2);
    CHECK(mt_offload_sumsq(o, 0, 0, &valid) == 14 && valid);
    item.mode = MT_GRAD_ADD;
    CHECK_EQ(mt_offload_put(o, 0, &item, 1, t.run, &ticket), MT_ESTATE);
    CHECK_HAS(mt_last_error(), "none is there to add to");
    mt_offload_close(o);
    toy_close(&t);
}

static void every_failing_device_call_frees_everything(void)
{
    const int64_t numel[2] = { 1 << 20, 10 };
    int           fired = 1;
    mt_dev       *cpu;

    REQUIRE(mt_dev_cpu_open(&cpu) == MT_OK);
    for (int n = 1; fired > 0; n++) {
        mt_dev   *d = fault_dev(cpu, n, FAULT_ONCE);
        mt_store *s = NULL;
        mt_status st = shop_open(d, numel, 2, &s);

        for (int u = 0; u < 2 && st == MT_OK; u++)
            st = mt_store_lend(s, u, NULL);
        fired = fault_fired(d);
        CHECK_EQ(st, fired ? MT_EDEVICE : MT_OK);
        mt_store_close(s);
        CHECK_EQ(fault_live(d), 0);
        d->ops->close(d);
    }
    cpu->ops->close(cpu);
}

#define TESTS(X)                                            \
    X(a_unit_has_gradients_from_hand_over_to_update)        \
    X(settled_units_have_theirs_on_the_device)              \
    X(there_are_three_buffers_of_a_size)                    \
    X(where_all_are_lent_the_first_is_waited_for)           \
    X(fewer_are_made_when_that_is_said_before)              \
    X(gradients_that_nobody_used_are_named)                 \
    X(a_failing_update_elsewhere_ends_the_wait)             \
    X(parameters_trained_since_have_gradients_too)          \
    X(what_cannot_pass_is_refused)                          \
    X(gradients_come_home_into_what_is_lent)                \
    X(every_failing_device_call_frees_everything)
CHECK_MAIN(TESTS)
