/* test_portion.c — the executable form of core/portion.h: every element of random units has one
 * owner. That owners have the bits of one, and memory for their own alone, is in test_peers.c.
 */
#include "check.h"
#include "dev_fault.h"
#include "toy.h"

#include "../../csrc/core/arena.h"
#include "../../csrc/core/portion.h"
#include "../../csrc/core/resident.h"

#define PARAMS 7
#define BIG    90000             /* elements */

/* Some parameters are large, most are not, some have nothing, one in eight is frozen. */
static void make_shapes(mt_param_desc *d, uint64_t seed)
{
    static const mt_dtype types[] = { MT_BF16, MT_BF16, MT_F32, MT_F16 };
    static const int64_t  most[] = { BIG, 20000, 300, 1 };
    const uint64_t        first = seed;

    for (int i = 0; i < PARAMS; i++)
        d[i] = (mt_param_desc){ types[random_below(&seed, 4)],
                                random_below(&seed, most[random_below(&seed, 4)]),
                                random_below(&seed, 8) > 0 };
    d[first % PARAMS] = (mt_param_desc){ MT_BF16, BIG - 1, 1 };
    d[(first + 3) % PARAMS] = (mt_param_desc){ MT_F32, BIG - 9000, first % 2 == 0 };
}

/* As the header prints it. */
TEST(a_cut_is_as_is_printed)
{
    const mt_param_desc  d[3] = { { MT_BF16, 30000, 1 }, { MT_F32, 64, 1 }, { MT_BF16, 7000, 1 } };
    static const int64_t want[3][3][2] = { { { 0, 8192 }, { 0, 0 }, { 0, 0 } },
                                           { { 8192, 16384 }, { 0, 0 }, { 0, 0 } },
                                           { { 24576, 5424 }, { 0, 64 }, { 0, 7000 } } };

    TOY(t, 0, 1, 0);
    int unit = store_add(t.store, "three", d, 3);
    for (int k = 0; k < 3; k++) {
        mt_portion p;

        CHECK_OK(mt_portion_of(t.store, unit, k, 3, &p));
        for (int i = 0; i < 3; i++) {
            int64_t from;

            CHECK_EQ(mt_portion_part(&p, i, d[i].numel, &from), want[k][i][1]);
            CHECK_EQ(from, want[k][i][0]);
        }
    }
}

/* Bytes of plane HI between what would be even and what is: less than a grain's, and what lies
 * between two parameters. */
static void check_cut(const toy *t, int unit, const mt_param_desc *d, int n, int owners)
{
    int64_t next[PARAMS] = { 0 };
    size_t  all = mt_store_hi_bytes(t->store, unit);

    for (int k = 0; k < owners; k++) {
        mt_portion p;
        size_t     bytes = 0;
        int64_t    from;

        CHECK_OK(mt_portion_of(t->store, unit, k, owners, &p));
        for (int i = 0; i < n; i++) {
            int64_t some = mt_portion_part(&p, i, d[i].numel, &from);

            CHECK(some >= 0);
            if (some == 0)
                continue;
            CHECK_EQ(from, next[i]);
            CHECK_EQ(from % MT_PORTION_GRAIN, 0);
            next[i] += some;
            bytes += (size_t)some * mt_dtype_bytes(d[i].dtype);
        }
        CHECK(bytes <= all / (size_t)owners + MT_PORTION_GRAIN * 4 + 512);
        CHECK(bytes + MT_PORTION_GRAIN * 4 + 512 * (PARAMS + 1) >= all / (size_t)owners);
    }
    for (int i = 0; i < n; i++)
        CHECK_EQ(next[i], d[i].numel);
}

TEST(every_element_has_one_owner_and_all_have_as_much)
{
    for (uint64_t seed = 1; seed <= 100; seed++) {
        mt_param_desc d[PARAMS];

        make_shapes(d, seed);
        TOY(t, 0, 1, 0);
        int unit = store_add(t.store, "unit", d, PARAMS);
        for (int n = 1; n <= 40; n += 1 + n / 8)
            check_cut(&t, unit, d, PARAMS, n);
    }
}

TEST(what_nobody_can_own_is_refused)
{
    mt_portion p;

    TOY(t, 1, 1, 0);
    CHECK_EQ(mt_portion_of(t.store, 1, 0, 1, &p), MT_EINVAL);
    CHECK_EQ(mt_portion_of(t.store, 0, 2, 2, &p), MT_EINVAL);
    CHECK_SAYS("unit layers.0: there is no owner 2 of 2");
    CHECK_EQ(mt_portion_of(t.store, 0, -1, 2, &p), MT_EINVAL);
    CHECK_EQ(mt_portion_of(t.store, 0, 0, MT_OWNERS_MOST + 1, &p), MT_EINVAL);
}

static void  *registered;                        /* by the device below */
static size_t registered_bytes;

static mt_status note_register(mt_dev *d, void *at, size_t bytes)
{
    registered = at;
    registered_bytes = bytes;
    return MT_OK;
}

static void note_unregister(mt_dev *d, void *at)
{
    CHECK(at == registered);
    registered = NULL;
}

static size_t pages_in(const mt_arena *a, size_t from, size_t bytes)
{
    size_t        page = (size_t)sysconf(_SC_PAGESIZE), n = 0;
    unsigned char in[256];

    REQUIRE(bytes / page <= 256 && mincore((char *)a->base + from, bytes, in) == 0);
    for (size_t i = 0; i < bytes / page; i++)
        n += in[i] & 1;
    return n;
}

TEST(of_an_arena_what_is_kept_is_committed_and_registered)
{
    const mt_dev_ops ops = { .host_register = note_register, .host_unregister = note_unregister };
    mt_dev           dev = { &ops };
    const size_t     page = (size_t)sysconf(_SC_PAGESIZE);
    mt_arena         a = { 0 };

    REQUIRE_OK(mt_arena_reserve(&a, 64 * page, NULL, 0, "test", 0));
    int told = pages_in(&a, 0, 64 * page) == 0;  /* the system says what is in memory */
    CHECK_EQ(a.kept, 64 * page);
    mt_arena_keep(&a, 9 * page + 5, 3 * page);
    for (int i = 0; i < 2; i++) {
        CHECK_OK(mt_arena_commit(&a, NULL, &dev));
        CHECK(registered == (char *)a.base + 9 * page);
        CHECK_EQ(registered_bytes, 4 * page);
        CHECK_EQ(pages_in(&a, 9 * page, 4 * page), 4);
        if (told)
            CHECK_EQ(pages_in(&a, 0, 64 * page), 4);
        mt_arena_decommit(&a);
        CHECK(registered == NULL);
    }
    mt_arena_keep(&a, 0, 0);
    CHECK_OK(mt_arena_commit(&a, NULL, &dev));
    CHECK(registered == NULL);
    mt_arena_close(&a);
}

/* Memory of all kinds is made, moved and given back. */
static mt_status use(mt_context *cx, mt_queue *run, void *slot)
{
    const mt_param_desc d = { MT_BF16, 50000, 1 };
    int                 unit;
    void               *at;

    TRY(mt_store_add(cx->store, "unit", &d, 1, &unit));
    for (int p = 0; p < MT_PLANE_COUNT; p++)
        if (mt_store_plane_bytes(cx->store, unit, 0, (mt_plane)p, 1) > 0)
            TRY(mt_store_at(cx->store, unit, 0, (mt_plane)p, &at));
    TRY(mt_resident_settle(cx->residents, unit, slot));
    TRY(mt_home_vram.take(cx->residents, unit, run));
    return mt_resident_unsettle(cx->residents, unit, 1);
}

TEST(a_device_may_fail_at_any_call)
{
    static char slot[1 << 17];

    EACH_FAULT(d, 1, FAULT_ONCE) {
        mt_resident *r = NULL;
        mt_context   cx = { .dev = d };
        mt_queue    *run;

        fault_next(d, 0);
        REQUIRE_OK(mt_store_open(&cx, &cx.store));
        REQUIRE_OK(mt_resident_open(&cx, &r));
        REQUIRE_OK(d->ops->queue_open(d, "run", &run));
        fault_next(d, n);
        mt_status st = use(&cx, run, slot);
        CHECK_EQ(st, fault_fired(d) ? MT_EDEVICE : MT_OK);
        mt_resident_close(r);
        mt_store_close(cx.store);
        d->ops->queue_close(run);
        REQUIRE(n < 200);
    }
}
