/* test_home.c — the executable form of core/home.h: which homes a unit may go to from which, and
 * what of its memory follows. Homes of a test's own are test_mirror.c's.
 */
#include "opened.h"
#include "dev_fault.h"
#include "../../csrc/core/mirror.h"

#define N    1000
#define HOMES 6

static const mt_home *const homes[HOMES] = {
    &mt_home_ram, &mt_home_vram, &mt_home_arrive, &mt_home_through, &mt_home_disk,
    &mt_home_disk_weights,
};

static mt_dev   *dev;
static mt_store *store;
static mt_context cx;

static int add(void)
{
    mt_param_desc d[2] = { { MT_F32, N, 1 }, { MT_BF16, N, 1 } };

    return store_add(store, "layers.0", d, 2);
}

static void setup(void)
{
    REQUIRE_OK(mt_dev_cpu_open(&dev));
    cx = (mt_context){ .dev = dev };
    REQUIRE_OK(mt_store_open(&cx, &store));
    cx.store = store;
}

static void teardown(void)
{
    mt_store_close(store);
    dev->ops->close(dev);
}

#define HOME_TEST(name) TEST_BETWEEN(name, setup(), teardown())

static char *at(int unit, mt_plane p)
{
    return store_at(store, unit, 0, p);
}

/* By way of where it comes from. */
static int at_home(const mt_home *h)
{
    int unit = add();

    if (h->from != NULL && h->from->from != NULL)
        REQUIRE_OK(mt_store_move(store, unit, h->from, NULL));
    REQUIRE_OK(mt_store_move(store, unit, h, NULL));
    return unit;
}

HOME_TEST(a_unit_comes_to_a_home_from_one_other_and_goes_back)
{
    static const char *const may[HOMES] = {      /* from, to: in the order above */
        "++-+++", "+++---", "-++---", "+--+--", "+---+-", "+----+",
    };

    for (int from = 0; from < HOMES; from++)
        for (int to = 0; to < HOMES; to++) {
            int unit = at_home(homes[from]), ok = may[from][to] == '+';

            CHECK_EQ(mt_store_move(store, unit, homes[to], NULL), ok ? MT_OK : MT_ESTATE);
            CHECK(mt_store_home(store, unit, NULL) == homes[ok ? to : from]);
            if (ok)
                continue;
            CHECK_SAYS("unit layers.0 ");
            CHECK_SAYS(homes[from]->lives);
            CHECK_SAYS(homes[to]->lives);
        }
    CHECK_EQ(mt_store_move(store, 999, &mt_home_vram, NULL), MT_EINVAL);
    CHECK(mt_store_home(store, 999, NULL) == &mt_home_ram);
}

/* Planes whose memory a copy engine looks at are registered, those that are away reserved. */
HOME_TEST(memory_on_the_host_is_as_the_home_says)
{
    for (int h = 0; h < HOMES; h++) {
        int unit = at_home(homes[h]);

        for (mt_plane p = 0; p < MT_PLANE_COUNT; p++) {
            unsigned away = homes[h]->away & ~homes[h]->later;
            void    *on_device;

            if (mt_plane_bytes(p, MT_F32, MT_STATES_FP32, N) == 0)
                continue;
            (void)at(unit, p);
            CHECK_EQ(mt_store_reserved(store, unit, p) > 0, away >> p & 1);
            CHECK_EQ(mt_store_device_at(store, unit, 0, p, &on_device),
                     homes[h]->device >> p & 1 ? MT_OK : MT_EINVAL);
        }
    }
}

HOME_TEST(gradients_that_pass_do_not_move)
{
    int there = at_home(&mt_home_vram), here = add();

    CHECK_OK(mt_store_set_passing(store, there));
    CHECK_OK(mt_store_set_passing(store, here));
    CHECK_FAILS(mt_store_move(store, there, &mt_home_ram, NULL), MT_ESTATE, "its gradients pass");
    CHECK_OK(mt_store_move(store, there, &mt_home_arrive, NULL));
    CHECK_EQ(mt_store_move(store, here, &mt_home_vram, NULL), MT_ESTATE);
    CHECK_OK(mt_store_move(store, here, &mt_home_through, NULL));
}

HOME_TEST(states_go_to_a_file_before_there_are_any)
{
    int unit = add();
    (void)at(unit, MT_PLANE_V);
    CHECK_FAILS(mt_store_move(store, unit, &mt_home_disk, NULL), MT_ESTATE, "plane V");
    unit = add();
    (void)at(unit, MT_PLANE_HI);
    CHECK_OK(mt_store_move(store, unit, &mt_home_disk_weights, NULL));
    CHECK(mt_mirror_any(store, unit, 0, 1u << MT_PLANE_HI, 1u << MT_MIRROR_AHEAD));
}

/* Whatever the move asks the device for: the unit is where it was, and may be asked again. */
TEST(a_move_that_fails_changes_nothing)
{
    for (int n = 1, failed = 1; failed; n++) {
        CPU(cpu);
        dev = fault_dev(cpu, 0, FAULT_ONCE);
        REQUIRE_OK(mt_store_open(&(mt_context){ .dev = dev }, &store));
        int unit = add();
        at(unit, MT_PLANE_HI)[5] = 3;
        at(unit, MT_PLANE_M)[5] = 4;
        fault_next(dev, n);
        mt_status st = mt_store_move(store, unit, &mt_home_through, NULL);
        failed = st != MT_OK;
        fault_next(dev, 0);
        CHECK(mt_store_home(store, unit, NULL) == (failed ? &mt_home_ram : &mt_home_through));
        CHECK_OK(mt_store_move(store, unit, &mt_home_through, NULL));
        CHECK(at(unit, MT_PLANE_HI)[5] == 3 && at(unit, MT_PLANE_M)[5] == 4);
        teardown();
    }
}
