/* test_store.c — store.h without the ledger: offsets, planes, addresses, and what fails how. */
#include "opened.h"
#include "dev_fault.h"
#include "drop.h"

#include "../../csrc/core/arena.h"
#include "../../csrc/core/store.h"

static mt_dev   *cpu;
static mt_pool  *pool;
static mt_store *store;

static void setup(void)
{
    REQUIRE_OK(mt_dev_cpu_open(&cpu));
    REQUIRE_OK(mt_pool_open(2, &pool));
    REQUIRE_OK(mt_store_open(&(mt_context){ .dev = cpu, .pool = pool }, &store));
}

static void teardown(void)
{
    mt_store_close(store);
    mt_pool_close(pool);
    cpu->ops->close(cpu);
    store = NULL;
}

#define STORE_TEST(name) TEST_BETWEEN(name, setup(), teardown())

static int add(const char *name, const mt_param_desc *p, int n)
{
    return store_add(store, name, p, n);
}

static char *at(int unit, int param, mt_plane plane)
{
    return store_at(store, unit, param, plane);
}

/* bf16 trainable, fp32 frozen, nothing, int64, fp16 trainable, fp64 trainable */
static const mt_param_desc mixed[] = {
    { MT_BF16, 300, 1 }, { MT_F32, 10, 0 }, { MT_F32, 0, 1 },
    { MT_I64, 3, 0 },    { MT_F16, 256, 1 }, { MT_F64, 1, 1 },
};
enum { BF, FROZEN, EMPTY, INT, HALF, DOUBLE, MIXED };

STORE_TEST(parameters_start_at_multiples_of_512)
{
    const size_t want[MIXED] = { 0, 1024, 1536, 1536, 2048, 2560 };

    int u = add("mixed", mixed, MIXED);
    for (int i = 0; i < MIXED; i++) {
        CHECK_EQ(mt_store_offset(store, u, i), want[i]);
        CHECK_EQ(at(u, i, MT_PLANE_HI) - at(u, 0, MT_PLANE_HI), want[i]);
    }
    CHECK_EQ(mt_store_hi_bytes(store, u), 3072);
    CHECK_EQ((uintptr_t)at(u, 0, MT_PLANE_HI) % 512, 0);
}

STORE_TEST(frozen_parameters_take_no_room_beyond_hi)
{
    int u = add("mixed", mixed, MIXED);
    CHECK_EQ(at(u, HALF, MT_PLANE_GRAD) - at(u, BF, MT_PLANE_GRAD), 1024);   /* 600 bytes, 0 */
    CHECK_EQ(at(u, DOUBLE, MT_PLANE_GRAD) - at(u, HALF, MT_PLANE_GRAD), 512);
    CHECK_EQ(at(u, HALF, MT_PLANE_M) - at(u, BF, MT_PLANE_M), 1536);         /* 1200 bytes */
    CHECK_EQ(at(u, HALF, MT_PLANE_ACC) - at(u, BF, MT_PLANE_ACC), 1536);
    CHECK(at(u, BF, MT_PLANE_M) != at(u, BF, MT_PLANE_V));
}

TEST(planes_hold_what_the_type_needs)
{
    static const struct { mt_dtype dt; mt_states st; size_t bytes[MT_PLANE_COUNT]; } want[] = {
        /* of 256 elements:             HI GRAD LO MASTER M V SCALE ACC */
        { MT_F32,  MT_STATES_FP32,     { 4, 4,  0, 0,     4, 4, 0,  0 } },
        { MT_BF16, MT_STATES_FP32,     { 2, 2,  2, 0,     4, 4, 0,  4 } },
        { MT_F16,  MT_STATES_FP32,     { 2, 2,  0, 4,     4, 4, 0,  4 } },
        { MT_F64,  MT_STATES_FP32,     { 8, 8,  0, 0,     0, 0, 0,  0 } },
        { MT_I64,  MT_STATES_FP32,     { 8, 0,  0, 0,     0, 0, 0,  0 } },
        { MT_BOOL, MT_STATES_FP32,     { 1, 0,  0, 0,     0, 0, 0,  0 } },
        { MT_F32,  MT_STATES_8BIT,     { 4, 4,  0, 0,     1, 1, 16, 0 } },
        { MT_BF16, MT_STATES_8BIT,     { 2, 2,  2, 0,     1, 1, 16, 4 } },
        { MT_BF16, MT_STATES_8BIT_LO8, { 2, 2,  1, 0,     1, 1, 16, 4 } },
        { MT_BF16, MT_STATES_8BIT_SR,  { 2, 2,  0, 0,     1, 1, 16, 4 } },
        { MT_F16,  MT_STATES_8BIT_SR,  { 2, 2,  0, 4,     1, 1, 16, 4 } },
        { MT_F64,  MT_STATES_8BIT,     { 8, 8,  0, 0,     0, 0, 0,  0 } },
    };

    for (size_t i = 0; i < sizeof want / sizeof *want; i++)
        for (int p = 0; p < MT_PLANE_COUNT; p++) {
            size_t bytes = (p == MT_PLANE_SCALE ? 1 : 256) * want[i].bytes[p];

            CHECK_EQ(mt_plane_bytes((mt_plane)p, want[i].dt, want[i].st, 256), bytes);
        }
    CHECK_EQ(mt_plane_bytes(MT_PLANE_COUNT, MT_F32, MT_STATES_FP32, 1), 0);
    CHECK_EQ(mt_plane_bytes(MT_PLANE_SCALE, MT_F32, MT_STATES_8BIT, 129), 16);
    CHECK_STR(mt_plane_name(MT_PLANE_MASTER), "MASTER");
    CHECK_STR(mt_plane_name(MT_PLANE_COUNT), "?");
}

STORE_TEST(states_are_laid_out_as_they_are_kept)
{
    int u, other;

    u = add("mixed", mixed, MIXED);
    other = add("other", mixed, MIXED);
    CHECK_OK(mt_store_set_states(store, u, MT_STATES_8BIT_LO8));
    CHECK_EQ(mt_store_states(store, u), MT_STATES_8BIT_LO8);
    CHECK_EQ(mt_store_states(store, other), MT_STATES_FP32);
    CHECK_EQ(at(u, HALF, MT_PLANE_M) - at(u, BF, MT_PLANE_M), 512);     /* 300 bytes */
    CHECK_EQ(at(u, HALF, MT_PLANE_SCALE) - at(u, BF, MT_PLANE_SCALE), 512);
    CHECK_EQ(mt_store_plane_bytes(store, u, BF, MT_PLANE_LO, 300), 300);
    CHECK_EQ(mt_store_plane_bytes(store, other, BF, MT_PLANE_LO, 300), 600);
    CHECK_EQ(mt_store_plane_bytes(store, u, 99, MT_PLANE_LO, 300), 0);
    CHECK_OK(mt_store_set_states(store, u, MT_STATES_8BIT_LO8));        /* as they are: no change */
    CHECK_EQ(mt_store_set_states(store, u, MT_STATES_FP32), MT_ESTATE);
    CHECK_SAYS("unit mixed has 8bit-lo8 states already (plane M)");
    CHECK_EQ(mt_store_set_states(store, 7, MT_STATES_FP32), MT_EINVAL);
    CHECK_EQ(mt_store_set_states(store, u, MT_STATES_COUNT), MT_EINVAL);
}

STORE_TEST(parameter_trainable_later_gets_its_own_place)
{
    int u = add("mixed", mixed, MIXED);
    char *early = at(u, BF, MT_PLANE_GRAD);
    CHECK_OK(mt_store_set_trainable(store, u, FROZEN, 1));
    CHECK_EQ(mt_store_desc(store, u, FROZEN)->trainable, 1);
    char *late = at(u, FROZEN, MT_PLANE_GRAD);
    CHECK(late != NULL && (late < early || late >= early + 2048));
    CHECK(at(u, FROZEN, MT_PLANE_GRAD) == late);
    CHECK(at(u, BF, MT_PLANE_GRAD) == early);
    CHECK_EQ(mt_store_bytes(store, MT_PLANE_GRAD), 2 * sysconf(_SC_PAGESIZE));
    drop_plane(store, u, MT_PLANE_GRAD);
    CHECK_EQ(mt_store_bytes(store, MT_PLANE_GRAD), 0);
    CHECK_EQ(at(u, FROZEN, MT_PLANE_GRAD) - at(u, BF, MT_PLANE_GRAD), 1024);  /* now beside it */
}

STORE_TEST(frozen_parameter_keeps_the_place_it_had)
{
    int u = add("mixed", mixed, MIXED);
    char *m = at(u, BF, MT_PLANE_M);
    m[5] = 7;
    CHECK_OK(mt_store_set_trainable(store, u, BF, 0));
    CHECK(at(u, BF, MT_PLANE_M) == m);
    CHECK_EQ(m[5], 7);
}

STORE_TEST(planes_are_mapped_when_first_asked_for_and_zero)
{
    const mt_param_desc big = { MT_F32, 3 << 20, 1 };      /* 12 MiB: huge pages, several chunks */
    int64_t             n = 0;

    int u = add("big", &big, 1);
    CHECK_EQ(mt_store_bytes(store, MT_PLANE_COUNT), 0);
    const char *v = at(u, 0, MT_PLANE_V);
    CHECK_EQ(mt_store_bytes(store, MT_PLANE_V), 12 << 20);
    CHECK_EQ(mt_store_bytes(store, MT_PLANE_COUNT), 12 << 20);
    CHECK_EQ((uintptr_t)v % (2 << 20), 0);
    for (int64_t i = 0; i < 12 << 20; i++)
        n += v[i] != 0;
    CHECK_EQ(n, 0);
    drop_plane(store, u, MT_PLANE_V);
    CHECK_EQ(mt_store_bytes(store, MT_PLANE_COUNT), 0);
    const char *again = at(u, 0, MT_PLANE_V);
    CHECK_EQ(again[0], 0);
}

static long pages_mapped(void)
{
    FILE *f = fopen("/proc/self/statm", "r");
    long  pages = 0;

    REQUIRE(f != NULL && fscanf(f, "%ld", &pages) == 1);
    fclose(f);
    return pages;
}

/* Sanitizers do not watch mmap; the kernel does. */
TEST(arena_gives_its_memory_back_closed_or_refused)
{
    enum { BYTES = 32 << 20 };
    mt_arena a = {0};

    CPU(real);
    mt_dev *d = fault_dev(real, 1, FAULT_ONCE);
    long before = pages_mapped();
    CHECK_EQ(mt_arena_open(&a, BYTES, NULL, d, "test", 0), MT_EDEVICE);
    CHECK(a.base == NULL);
    CHECK_OK(mt_arena_open(&a, BYTES, NULL, d, "test", 0));
    CHECK_EQ(fault_live(d), 1);
    mt_arena_close(&a);
    CHECK_EQ(fault_live(d), 0);
    CHECK(pages_mapped() - before < BYTES / sysconf(_SC_PAGESIZE));
    d->ops->close(d);
}

static long in_memory(const mt_arena *a, unsigned char *in)
{
    long page = sysconf(_SC_PAGESIZE), n = 0;

    REQUIRE(mincore(a->base, a->bytes, in) == 0);
    for (size_t i = 0; i < a->bytes / (size_t)page; i++)
        n += in[i] & 1;
    return n;
}

TEST(reserved_arena_is_no_memory_until_it_is_committed)
{
    enum { BYTES = 40 << 20 };
    mt_arena a = {0};
    long     all = BYTES / sysconf(_SC_PAGESIZE);
    FREED unsigned char *in = malloc((size_t)all + 1);

    CPU(real);
    mt_dev *d = fault_dev(real, 1, FAULT_ONCE);
    REQUIRE(in != NULL && mt_pool_open(2, &pool) == MT_OK);
    CHECK_OK(mt_arena_reserve(&a, BYTES, NULL, 0, "test", 0));
    CHECK_EQ(in_memory(&a, in), 0);
    ((char *)a.base)[0] = 7;                    /* what somebody wrote stays */
    ((char *)a.base)[BYTES - 1] = 8;
    CHECK(in_memory(&a, in) < all);
    CHECK_EQ(mt_arena_commit(&a, pool, d), MT_EDEVICE);
    CHECK_EQ(a.reserved, 1);
    CHECK_OK(mt_arena_commit(&a, pool, d));
    CHECK_OK(mt_arena_commit(&a, pool, d));       /* nothing to do */
    CHECK_EQ(in_memory(&a, in), all);
    CHECK_EQ(fault_live(d), 1);
    CHECK_EQ(((char *)a.base)[0], 7);
    CHECK_EQ(((char *)a.base)[4096], 0);
    CHECK_EQ(((char *)a.base)[BYTES - 1], 8);
    mt_arena_close(&a);
    CHECK_EQ(fault_live(d), 0);
    mt_pool_close(pool);
    d->ops->close(d);
}

static char *device_at(int unit, int param, mt_plane plane)
{
    void *p = NULL;
    CHECK_OK(mt_store_device_at(store, unit, param, plane, &p));
    return p;
}

/* Here the device's memory can be looked at. */
STORE_TEST(settled_unit_has_its_planes_on_the_device)
{
    char *m, *grad, *late, *host;
    void *p;

    int u = add("mixed", mixed, MIXED);
    (void)at(u, BF, MT_PLANE_HI);
    CHECK_FAILS(mt_store_device_at(store, u, BF, MT_PLANE_M, &p), MT_EINVAL, "mixed");
    CHECK_EQ((mt_store_home(store, u, NULL)->device != 0), 0);
    CHECK_OK(mt_store_move(store, u, &mt_home_vram, NULL));
    CHECK_EQ((mt_store_home(store, u, NULL)->device != 0), 1);
    CHECK_EQ(mt_store_device_bytes(store), 0);
    grad = device_at(u, BF, MT_PLANE_GRAD);
    CHECK_EQ(device_at(u, HALF, MT_PLANE_GRAD) - grad, 1024);   /* offsets are those of the host */
    m = device_at(u, BF, MT_PLANE_M);
    CHECK_EQ(m[0] | m[1199], 0);
    CHECK_EQ(mt_store_device_bytes(store), 1024 + 512 + 512 + 1536 + 1024);
    CHECK_EQ(mt_store_device_at(store, u, BF, MT_PLANE_HI, &p), MT_EINVAL);
    CHECK_EQ(mt_store_device_at(store, u, FROZEN, MT_PLANE_M, &p), MT_EINVAL);
    CHECK_OK(mt_store_set_trainable(store, u, FROZEN, 1));
    late = device_at(u, FROZEN, MT_PLANE_M);
    CHECK(late < m || late >= m + 2560);
    CHECK(device_at(u, BF, MT_PLANE_M) == m);

    CHECK_EQ(mt_store_bytes(store, MT_PLANE_M), 0);
    host = at(u, BF, MT_PLANE_M);
    host[3] = 9;
    (void)at(u, FROZEN, MT_PLANE_M);
    CHECK_EQ(mt_store_bytes(store, MT_PLANE_M), 0);
    CHECK_OK(mt_store_commit(store, u, MT_PLANE_M));
    CHECK_EQ(mt_store_bytes(store, MT_PLANE_M), 4096);
    CHECK(at(u, BF, MT_PLANE_M) == host);
    CHECK_EQ(host[3], 9);
    CHECK_OK(mt_store_commit(store, u, MT_PLANE_V));              /* makes it too */
    CHECK_EQ(mt_store_bytes(store, MT_PLANE_V), 4096);
    drop_plane(store, u, MT_PLANE_M);
    CHECK_EQ(mt_store_bytes(store, MT_PLANE_M), 0);
    CHECK_EQ(mt_store_device_bytes(store), 2048);
    mt_store_device_close(store);
    CHECK_EQ(mt_store_device_bytes(store), 0);
    CHECK_EQ(mt_store_commit(store, u + 1, MT_PLANE_M), MT_EINVAL);
    CHECK_EQ(mt_store_move(store, u + 1, &mt_home_vram, NULL), MT_EINVAL);
}

STORE_TEST(units_and_parameters_without_bytes_are_fine)
{
    const mt_param_desc none = { MT_BF16, 0, 1 };
    void               *hi = NULL;

    int u = add("no parameters", NULL, 0), v = add("no elements", &none, 1);
    CHECK_EQ(mt_store_hi_bytes(store, u), 0);
    CHECK_OK(mt_store_hi(store, u, &hi));
    CHECK(hi != NULL);
    CHECK(at(v, 0, MT_PLANE_HI) != NULL);
    CHECK(at(v, 0, MT_PLANE_ACC) != NULL);
    CHECK_EQ(mt_store_bytes(store, MT_PLANE_COUNT), 0);
}

STORE_TEST(add_refuses_what_cannot_be)
{
    const mt_param_desc negative = { MT_F32, -1, 0 }, alien = { MT_DTYPE_COUNT, 1, 0 };
    const mt_param_desc whole = { MT_I32, 8, 1 }, vast = { MT_F64, INT64_MAX, 0 };
    const mt_param_desc sum[4] = { { MT_F32, INT64_MAX / 4, 0 }, { MT_F32, INT64_MAX / 4, 0 },
                                   { MT_F32, INT64_MAX / 4, 0 }, { MT_F32, INT64_MAX / 4, 0 } };
    int unit = 99;

    CHECK_EQ(mt_store_add(store, "u", &negative, 1, &unit), MT_EINVAL);
    CHECK_SAYS("parameter 0 has -1 elements");
    CHECK_EQ(mt_store_add(store, "u", &alien, 1, &unit), MT_EINVAL);
    CHECK_EQ(mt_store_add(store, "u", &whole, 1, &unit), MT_EINVAL);
    CHECK_SAYS("I32, which cannot be trained");
    CHECK_FAILS(mt_store_add(store, "u", &vast, 1, &unit), MT_EINVAL, "address space");
    CHECK_EQ(mt_store_add(store, "u", sum, 4, &unit), MT_EINVAL);
    CHECK_EQ(mt_store_add(store, NULL, sum, 1, &unit), MT_EINVAL);
    CHECK_EQ(unit, 99);
    CHECK_EQ(mt_store_units(store), 0);
}

STORE_TEST(too_much_memory_names_what_is_wanted_and_what_is_mapped)
{
    const mt_param_desc d[] = { { MT_BF16, 1024, 1 } };
    const mt_param_desc vast[] = { { MT_F32, (int64_t)1 << 46, 0 } };
    void               *p = &p;
    long                page = sysconf(_SC_PAGESIZE);
    char                mapped[64];

    snprintf(mapped, sizeof mapped, "with %ld (0.0 MiB) mapped already", page);
    int u = add("layers.0", d, 1), v = add("layers.1", vast, 1);
    (void)at(u, 0, MT_PLANE_HI);
    CHECK_EQ(mt_store_at(store, v, 0, MT_PLANE_HI, &p), MT_ENOMEM);
    CHECK_SAYS("unit layers.1, plane HI: 281474976710656 bytes");
    CHECK_SAYS(mapped);
    CHECK(p == &p);
    CHECK_EQ(mt_store_bytes(store, MT_PLANE_HI), page);
    CHECK(at(u, 0, MT_PLANE_GRAD) != NULL);
}

STORE_TEST(many_units_keep_their_addresses_and_names)
{
    enum { MANY = 1000 };
    char        name[24];

    (void)add("unit 0", mixed, MIXED);
    const char *first = mt_store_name(store, 0);
    for (int i = 1; i < MANY; i++) {
        snprintf(name, sizeof name, "unit %d", i);
        CHECK_EQ(add(name, mixed, 2), i);
    }
    CHECK_EQ(mt_store_units(store), MANY);
    CHECK(mt_store_name(store, 0) == first);
    CHECK_STR(mt_store_name(store, 999), "unit 999");
}

/* ---- failing calls ----------------------------------------------------------------------- */

/* Every call of the device a store makes, failing in turn. After a failure all is as before and
 * the same call works. */
TEST(every_failing_device_call_leaves_the_store_whole)
{
    REQUIRE_OK(mt_pool_open(1, &pool));
    EACH_FAULT(d, 1, FAULT_ONCE) {
        const mt_plane planes[] = { MT_PLANE_HI, MT_PLANE_GRAD, MT_PLANE_GRAD, MT_PLANE_M };
        const int      params[] = { BF, HALF, FROZEN, BF };

        REQUIRE_OK(mt_store_open(&(mt_context){ .dev = d, .pool = pool }, &store));
        int u = store_add(store, "mixed", mixed, MIXED);
        for (int i = 0; i < 4; i++) {
            size_t    before = mt_store_bytes(store, MT_PLANE_COUNT);
            int       live = fault_live(d);
            void     *p = NULL;
            mt_status st = mt_store_at(store, u, params[i], planes[i], &p);

            if (st != MT_OK) {
                CHECK_FAILS(st, MT_EDEVICE, "injected");
                CHECK(p == NULL);
                CHECK_EQ(mt_store_bytes(store, MT_PLANE_COUNT), before);
                CHECK_EQ(fault_live(d), live);
                p = store_at(store, u, params[i], planes[i]);
            }
            CHECK(p != NULL);
            if (i == 1)
                CHECK_OK(mt_store_set_trainable(store, u, FROZEN, 1));
        }
        CHECK_EQ(fault_live(d), 3);              /* HI, GRAD, and the late one's GRAD; M is not */
        drop_plane(store, u, MT_PLANE_GRAD);
        CHECK_EQ(fault_live(d), 1);
        mt_store_close(store);
        CHECK(fault_fired(d) == 0 || n <= 3);
    }
    mt_pool_close(pool);
}

/* ---- threads ----------------------------------------------------------------------------- */

enum { RACERS = 4, RACE_UNITS = 6 };
static char *seen[RACERS][RACE_UNITS][2];

static void *racer(void *arg)
{
    int me = (int)(intptr_t)arg;

    for (int i = 0; i < RACE_UNITS; i++) {
        int unit = (i + me) % RACE_UNITS;
        seen[me][unit][0] = at(unit, 0, MT_PLANE_GRAD);
        seen[me][unit][1] = at(unit, 1, MT_PLANE_GRAD);
        CHECK(mt_store_bytes(store, MT_PLANE_GRAD) > 0);
        CHECK(mt_store_name(store, mt_store_units(store) - 1)[0] == 'r');
    }
    return NULL;
}

STORE_TEST(threads_that_race_for_a_plane_get_the_same_one)
{
    const mt_param_desc d[] = { { MT_BF16, 100, 1 }, { MT_F32, 100, 1 } };
    pthread_t           t[RACERS];

    for (int i = 0; i < RACE_UNITS; i++)
        (void)add("r", d, 2);
    for (int i = 0; i < RACERS; i++)
        t[i] = thread_start(racer, (void *)(intptr_t)i);
    for (int i = 0; i < 600; i++)                       /* more units all the while */
        (void)add("r", d, 2);
    for (int i = 0; i < RACERS; i++)
        thread_join(t[i]);
    for (int i = 1; i < RACERS; i++)
        CHECK(memcmp(seen[0], seen[i], sizeof seen[0]) == 0);
}

/* Of a device whose first registration takes until it is let go on, or five seconds. */
static struct {
    pthread_mutex_t mu;
    pthread_cond_t  changed;
    int             begun, let_go, late;
} slow_one = { PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, 0 };

static mt_status slow_register(mt_dev *d, void *p, size_t bytes)
{
    struct timespec until;

    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 5;
    pthread_mutex_lock(&slow_one.mu);
    int first = !slow_one.begun;
    slow_one.begun = 1;
    pthread_cond_broadcast(&slow_one.changed);
    while (first && !slow_one.let_go && !slow_one.late)
        slow_one.late = pthread_cond_timedwait(&slow_one.changed, &slow_one.mu, &until) != 0;
    pthread_mutex_unlock(&slow_one.mu);
    return MT_OK;
}

static void *asks_for_gradients(void *arg)
{
    (void)at((int)(intptr_t)arg, 0, MT_PLANE_GRAD);
    return NULL;
}

STORE_TEST(who_asks_for_another_plane_does_not_wait_for_one_in_the_making)
{
    const mt_param_desc d = { MT_BF16, 100, 1 };
    int                 one, other, in = 0;

    one = add("one", &d, 1);
    other = add("other", &d, 1);
    char *hi = at(one, 0, MT_PLANE_HI);
    const mt_dev_ops *ops = cpu->ops;
    mt_dev_ops slow = *ops;
    slow.host_register = slow_register;
    cpu->ops = &slow;
    pthread_t thread = thread_start(asks_for_gradients, (void *)(intptr_t)one);
    pthread_mutex_lock(&slow_one.mu);
    while (!slow_one.begun)
        pthread_cond_wait(&slow_one.changed, &slow_one.mu);
    pthread_mutex_unlock(&slow_one.mu);
    CHECK(at(one, 0, MT_PLANE_HI) == hi);
    (void)at(other, 0, MT_PLANE_GRAD);
    CHECK_OK(mt_store_commit(store, one, MT_PLANE_M));
    CHECK_OK(mt_store_in_arena(store, other, 0, MT_PLANE_V, &in));
    mt_store_decommit(store, other, MT_PLANE_V);
    CHECK_EQ(mt_store_reserved(store, one, MT_PLANE_GRAD), 0);
    CHECK_OK(mt_store_set_trainable(store, other, 0, 0));
    pthread_mutex_lock(&slow_one.mu);
    CHECK(!slow_one.late);
    slow_one.let_go = 1;
    pthread_cond_broadcast(&slow_one.changed);
    pthread_mutex_unlock(&slow_one.mu);
    thread_join(thread);
    cpu->ops = ops;
}

static void *asks_who_is_trained(void *arg)
{
    int *n = arg;

    for (int i = 0; i < 3000; i++) {
        *n += mt_store_trainable(store, 0, 0);
        if (i % 100 == 0)
            (void)at(i / 100 + 1, 0, MT_PLANE_M);        /* lays out a unit */
    }
    return NULL;
}

/* For TSan, above all. */
STORE_TEST(what_is_trained_may_change_while_others_ask)
{
    const mt_param_desc d = { MT_BF16, 100, 1 };
    int                 n = 0;

    for (int i = 0; i <= 30; i++)
        (void)add("r", &d, 1);
    pthread_t thread = thread_start(asks_who_is_trained, &n);
    for (int i = 0; i < 3000; i++)
        CHECK_OK(mt_store_set_trainable(store, 0, 0, i % 2));
    thread_join(thread);
    CHECK(n >= 0 && n <= 3000);
}
