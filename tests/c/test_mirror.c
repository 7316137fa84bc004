/* test_mirror.c — the executable form of core/mirror.h: which state follows which event, who
 * loads what and when, and whose memory is given back. The home here is an array; those that there
 * are, and the bits of training with them, are test_engine.c's and test_peers.c's.
 */
#include "opened.h"
#include "../../csrc/core/mirror.h"

#define PARAMS 3
#define N      1024
#define HI     (1u << MT_PLANE_HI)
#define GRAD   (1u << MT_PLANE_GRAD)
#define M      (1u << MT_PLANE_M)
#define V      (1u << MT_PLANE_V)
#define ALL    (HI | GRAD | M | V)
#define IS(x)  (1u << MT_MIRROR_##x)

/* ---- the table ---------------------------------------------------------------------------- */

TEST(the_table_is_the_one_that_is_agreed)
{
    static const char want[] =
        "EMPTY: STALE EMPTY EMPTY AHEAD AHEAD EMPTY EMPTY EMPTY EMPTY\n"
        "STALE: STALE LOADING STALE AHEAD TORN STALE STALE STALE STALE\n"
        "LOADING: STALE NEVER FRESH TORN TORN LOADING LOADING STALE NEVER\n"
        "FRESH: STALE FRESH FRESH AHEAD AHEAD FRESH FRESH FRESH STALE\n"
        "AHEAD: TORN AHEAD AHEAD AHEAD AHEAD STORING AHEAD AHEAD NEVER\n"
        "STORING: STALE STORING STORING AHEAD AHEAD NEVER FRESH STALE NEVER\n"
        "TORN: TORN TORN TORN AHEAD TORN TORN TORN TORN NEVER\n";
#define ROW(state, a, b, c, d, e, f, g, h, i) \
    #state ": " #a " " #b " " #c " " #d " " #e " " #f " " #g " " #h " " #i "\n"
    CHECK_STR(MT_MIRROR_TABLE(ROW), want);
#undef ROW
}

/* ---- a home that is an array --------------------------------------------------------------- */

static struct {
    mt_dev   *dev;
    mt_store *s;
    int       unit;
    float     values[MT_PLANE_COUNT][PARAMS];     /* of a plane's elements, all the same */
    int       loads, stores, waits;
    int       fail_load, fail_store;              /* the next does */
    gate     *hold;                               /* loads stand before it. NULL: none */
    atomic_int begun;                             /* loads */
} home;

static float *host(mt_plane p, int param)
{
    return store_at(home.s, home.unit, param, p);
}

static mt_status home_wait(void *arg, int unit, unsigned planes)
{
    CHECK(arg == &home && unit == home.unit && planes != 0);
    home.waits++;
    return MT_OK;
}

static mt_status home_load(void *arg, int unit, unsigned planes)
{
    CHECK(arg == &home && unit == home.unit);
    atomic_fetch_add(&home.begun, 1);
    if (home.hold != NULL)
        wait_for_gate(home.hold);
    if (home.fail_load) {
        home.fail_load = 0;
        return MT_FAIL(MT_EDISK, "the home does not answer");
    }
    for (int p = 0; p < MT_PLANE_COUNT; p++)
        for (int i = 0; i < PARAMS; i++)
            if ((planes >> p & 1) &&
                mt_mirror_any(home.s, unit, i, 1u << p, IS(LOADING) | IS(STALE))) {
                home.loads++;
                for (int k = 0; k < N; k++)
                    host((mt_plane)p, i)[k] = home.values[p][i];
            }
    return MT_OK;
}

static mt_status home_store(void *arg, int unit, int param, unsigned planes)
{
    CHECK(arg == &home && unit == home.unit);
    home.stores++;
    if (home.fail_store) {
        home.fail_store = 0;
        return MT_FAIL(MT_EDISK, "the home takes nothing");
    }
    for (int p = 0; p < MT_PLANE_COUNT; p++)
        for (int i = param < 0 ? 0 : param; i < (param < 0 ? PARAMS : param + 1); i++)
            if (planes >> p & 1)
                home.values[p][i] = host((mt_plane)p, i)[N - 1];
    return MT_OK;
}

static const mt_home at_once = {
    .lives = "is here", .from = &mt_home_ram, .away = ALL, .stays = GRAD, .load = home_load,
    .store = home_store,
};
static const mt_home visiting = {
    .lives = "is a guest", .from = &at_once, .away = HI | GRAD, .stays = GRAD, .visit = M | V,
    .wait = home_wait, .load = home_load, .store = home_store,
};
static const mt_home lazily = {
    .lives = "is there", .from = &mt_home_ram, .away = ALL, .stays = GRAD, .later = HI,
    .load = home_load, .store = home_store,
};

static void open_home(const mt_home *table)
{
    mt_param_desc d[PARAMS] = { { MT_F32, N, 1 }, { MT_F32, N, 1 }, { MT_F32, N, 1 } };

    memset(&home, 0, sizeof home);
    REQUIRE_OK(mt_dev_cpu_open(&home.dev));
    REQUIRE_OK(mt_store_open(&(mt_context){ .dev = home.dev }, &home.s));
    REQUIRE_OK(mt_store_add(home.s, "layers.0", d, PARAMS, &home.unit));
    REQUIRE_OK(mt_store_move(home.s, home.unit, table, &home));
}

static void close_home(int *opened)
{
    mt_mirror_close(home.s, home.unit);
    mt_mirror_close(home.s, home.unit);
    mt_store_close(home.s);
    home.dev->ops->close(home.dev);
}

#define HOME(table) CLOSED_BY(close_home) int opened = (open_home(table), 1); (void)opened

/* As an update does: the home has other values. */
static void change(unsigned planes, float value)
{
    for (int p = 0; p < MT_PLANE_COUNT; p++)
        for (int i = 0; i < PARAMS && (planes >> p & 1); i++)
            home.values[p][i] = value + (float)i;
    mt_mirror_tell(home.s, home.unit, -1, planes, MT_MIRROR_CHANGED);
}

static void fill(mt_plane p, int param, float value)
{
    for (int k = 0; k < N; k++)
        host(p, param)[k] = value;
}

static int any(int param, unsigned planes, unsigned states)
{
    return mt_mirror_any(home.s, home.unit, param, planes, states);
}

static size_t reserved(mt_plane p)
{
    return mt_store_reserved(home.s, home.unit, p);
}

/* ---- readers ------------------------------------------------------------------------------ */

TEST(what_is_stale_is_loaded_once_and_alone)
{
    HOME(&at_once);
    CHECK_OK(mt_mirror_bring(home.s, home.unit, ALL));           /* both are zero */
    CHECK_EQ(home.loads, 0);
    mt_mirror_tell(home.s, home.unit, 1, M, MT_MIRROR_CHANGED);
    home.values[MT_PLANE_M][1] = 4;
    CHECK_OK(mt_mirror_bring(home.s, home.unit, HI | V));
    CHECK_EQ(home.loads, 0);
    CHECK_OK(mt_mirror_bring(home.s, home.unit, M));
    CHECK_EQ(home.loads, 1);
    CHECK(host(MT_PLANE_M, 1)[N - 1] == 4);
    CHECK_OK(mt_mirror_bring(home.s, home.unit, ALL));
    CHECK_EQ(home.loads, 1);
    CHECK(any(1, M, IS(FRESH)) && any(0, M, IS(EMPTY)));
}

TEST(a_unit_without_a_home_elsewhere_has_nothing_to_do)
{
    HOME(&at_once);
    CHECK_OK(mt_store_move(home.s, home.unit, &mt_home_ram, NULL));
    CHECK_OK(mt_mirror_bring(home.s, home.unit, ~0u));
    CHECK_OK(mt_mirror_push(home.s, home.unit, 0, ~0u));
    CHECK_OK(mt_mirror_release(home.s, home.unit));
    CHECK_OK(mt_mirror_evict(home.s, home.unit));
    mt_mirror_forget(home.s, home.unit);
    CHECK_OK(mt_mirror_bring(home.s, 77, ~0u));
    CHECK_EQ(home.loads + home.stores, 0);
}

typedef struct reader {
    pthread_t thread;
    mt_status st;
    float     found;
} reader;

static void *reads(void *arg)
{
    reader *r = arg;

    r->st = mt_mirror_bring(home.s, home.unit, M);
    r->found = host(MT_PLANE_M, 0)[0];
    return NULL;
}

static void wait_begun(int n)
{
    UNTIL(atomic_load(&home.begun) >= n);
}

static int somebody_waits_at_the_door(void)
{
    char list[1024];

    mt_watch_tell(mt_store_watch(home.s), list, sizeof list);
    return strstr(list, "who is at its host planes") != NULL;
}

/* The second waits at the door, and finds what the first has brought. */
TEST(two_readers_are_one_load)
{
    gate   g = { 0 };
    reader r[2] = { 0 };

    HOME(&at_once);
    change(M, 5);
    home.hold = &g;
    for (int i = 0; i < 2; i++) {
        r[i].thread = thread_start(reads, &r[i]);
        wait_begun(1);
    }
    UNTIL(somebody_waits_at_the_door());
    CHECK(any(0, M, IS(LOADING)));
    mt_mirror_forget(home.s, home.unit);         /* somebody is behind the door */
    atomic_store(&g.open, 1);
    for (int i = 0; i < 2; i++) {
        thread_join(r[i].thread);
        CHECK_OK(r[i].st);
        CHECK(r[i].found == 5);
    }
    CHECK_EQ(home.loads, PARAMS);
    CHECK(!somebody_waits_at_the_door());
}

/* An update that is put while they come: who asks next loads again. */
TEST(what_changes_during_a_load_is_stale)
{
    gate   g = { 0 };
    reader r = { 0 };

    HOME(&at_once);
    change(M, 5);
    home.hold = &g;
    r.thread = thread_start(reads, &r);
    wait_begun(1);
    change(M, 6);
    atomic_store(&g.open, 1);
    thread_join(r.thread);
    CHECK_OK(r.st);
    CHECK(r.found == 6);
    CHECK(any(0, M, IS(STALE)));
    CHECK_OK(mt_mirror_bring(home.s, home.unit, M));
    CHECK_EQ(home.loads, 2 * PARAMS);
}

TEST(a_load_that_fails_may_be_tried_again)
{
    HOME(&at_once);
    change(M, 5);
    home.fail_load = 1;
    CHECK_EQ(mt_mirror_bring(home.s, home.unit, M), MT_EDISK);
    CHECK(any(0, M, IS(STALE)));
    CHECK_OK(mt_mirror_release(home.s, home.unit));              /* it claimed nothing */
    CHECK_EQ(mt_store_bytes(home.s, MT_PLANE_M), 0);
    CHECK_OK(mt_mirror_bring(home.s, home.unit, M));
    CHECK(host(MT_PLANE_M, 2)[0] == 7);
}

/* ---- claims and memory -------------------------------------------------------------------- */

/* States and weights alike: else who read them would find zeros. */
TEST(what_was_brought_outlives_a_save)
{
    HOME(&at_once);
    change(ALL, 5);
    CHECK_OK(mt_mirror_bring(home.s, home.unit, HI | M));
    CHECK_OK(mt_mirror_peek(home.s, home.unit, ALL));
    CHECK_EQ(reserved(MT_PLANE_V), 0);
    CHECK_OK(mt_mirror_release(home.s, home.unit));
    CHECK(host(MT_PLANE_HI, 0)[0] == 5 && host(MT_PLANE_M, 1)[0] == 6);
    CHECK(reserved(MT_PLANE_V) > 0);
    CHECK(host(MT_PLANE_V, 0)[0] == 0);
}

TEST(a_claim_ends_when_its_values_do)
{
    HOME(&at_once);
    change(HI, 5);
    CHECK_OK(mt_mirror_bring(home.s, home.unit, HI));
    mt_mirror_forget(home.s, home.unit);         /* they are current */
    CHECK(host(MT_PLANE_HI, 0)[0] == 5);
    change(HI, 6);
    CHECK(host(MT_PLANE_HI, 0)[0] == 5);         /* a graph may have them */
    CHECK(mt_mirror_is_old(home.s, home.unit));
    CHECK_OK(mt_mirror_peek(home.s, home.unit, HI));             /* a save, and nobody's any more */
    CHECK_OK(mt_mirror_release(home.s, home.unit));
    CHECK(reserved(MT_PLANE_HI) > 0);
    CHECK_OK(mt_mirror_bring(home.s, home.unit, HI));
    change(HI, 7);
    CHECK_OK(mt_mirror_bring(home.s, home.unit, HI));            /* a new one */
    CHECK(!mt_mirror_is_old(home.s, home.unit));
    mt_mirror_forget(home.s, home.unit);
    CHECK_OK(mt_mirror_release(home.s, home.unit));
    CHECK(host(MT_PLANE_HI, 0)[0] == 7);
}

TEST(what_is_stale_is_forgotten_but_not_while_a_save_has_the_unit)
{
    HOME(&at_once);
    change(ALL, 5);
    CHECK_OK(mt_mirror_bring(home.s, home.unit, ALL));
    mt_mirror_tell(home.s, home.unit, 1, HI | M | GRAD, MT_MIRROR_CHANGED);
    CHECK_OK(mt_ledger_save_begin(home.s, home.unit));
    mt_mirror_forget(home.s, home.unit);
    CHECK_EQ(reserved(MT_PLANE_HI) + reserved(MT_PLANE_M), 0);
    mt_ledger_save_end(home.s, home.unit);
    mt_mirror_forget(home.s, home.unit);
    CHECK(reserved(MT_PLANE_HI) > 0 && reserved(MT_PLANE_M) > 0);
    CHECK_EQ(reserved(MT_PLANE_V) + reserved(MT_PLANE_GRAD), 0);
    CHECK(host(MT_PLANE_GRAD, 0)[0] == 5);       /* somebody may have a tensor over them */
    CHECK(any(0, HI, IS(STALE)));                /* its pages were its neighbour's */
    CHECK_OK(mt_mirror_bring(home.s, home.unit, HI));
    CHECK(host(MT_PLANE_HI, 0)[0] == 5);
}

static void *evicts(void *arg)
{
    *(mt_status *)arg = mt_mirror_evict(home.s, home.unit);
    return NULL;
}

/* The save's copiers read what it peeked. */
TEST(memory_that_a_save_reads_is_not_evicted)
{
    mt_status st = MT_EINVAL;

    HOME(&at_once);
    change(M, 5);
    CHECK_OK(mt_ledger_save_begin(home.s, home.unit));
    mt_ledger_update_begin(home.s, home.unit);   /* it waits for the save, which does not for it */
    CHECK_OK(mt_mirror_peek(home.s, home.unit, M));
    mt_ledger_update_end(home.s, home.unit);
    pthread_t thread = thread_start(evicts, &st);
    UNTIL(mt_ledger_wanted(home.s) == home.unit);
    sleep_ms(5);
    CHECK(host(MT_PLANE_M, 0)[0] == 5);
    mt_ledger_save_end(home.s, home.unit);
    thread_join(thread);
    CHECK_OK(st);
    CHECK(reserved(MT_PLANE_M) > 0);
}

/* ---- writers ------------------------------------------------------------------------------ */

TEST(what_is_pushed_is_the_homes_and_its_neighbours_are_still_stale)
{
    HOME(&at_once);
    change(M | HI, 5);
    fill(MT_PLANE_M, 1, 9);
    uint64_t version = mt_ledger_version(home.s, home.unit);
    CHECK_OK(mt_mirror_push(home.s, home.unit, 1, M));
    CHECK_EQ(mt_ledger_version(home.s, home.unit), version);
    CHECK(home.values[MT_PLANE_M][1] == 9);
    CHECK(any(1, M, IS(FRESH)) && any(0, M, IS(STALE)));
    CHECK_OK(mt_mirror_bring(home.s, home.unit, M));
    CHECK_EQ(home.loads, PARAMS - 1);
    CHECK(host(MT_PLANE_M, 1)[0] == 9 && host(MT_PLANE_M, 0)[0] == 5);
    for (int i = 0; i < PARAMS; i++)
        fill(MT_PLANE_HI, i, 3);
    CHECK_OK(mt_mirror_push(home.s, home.unit, -1, HI));
    CHECK_EQ(mt_ledger_version(home.s, home.unit), version + 1);
    CHECK(home.values[MT_PLANE_HI][2] == 3);
    CHECK_OK(mt_mirror_release(home.s, home.unit));              /* no claim, its memory goes */
    CHECK(host(MT_PLANE_HI, 0)[0] == 0);
    CHECK_FAILS(mt_mirror_push(home.s, home.unit, PARAMS, M), MT_EINVAL, "layers.0");
}

TEST(a_push_that_fails_leaves_the_homes_values)
{
    HOME(&at_once);
    change(M, 5);
    CHECK_OK(mt_mirror_bring(home.s, home.unit, M));
    fill(MT_PLANE_M, 1, 9);
    home.fail_store = 1;
    CHECK_EQ(mt_mirror_push(home.s, home.unit, 1, M), MT_EDISK);
    CHECK_OK(mt_mirror_bring(home.s, home.unit, M));
    CHECK(host(MT_PLANE_M, 1)[0] == 6);
}

/* A home that opens over what the host has, and takes weights by itself. */
TEST(what_the_host_had_is_ahead_until_it_is_taken)
{
    HOME(&mt_home_ram);
    fill(MT_PLANE_M, 1, 8);
    fill(MT_PLANE_HI, 0, 2);
    REQUIRE_OK(mt_store_move(home.s, home.unit, &lazily, &home));
    CHECK(any(0, HI, IS(AHEAD)) && any(1, M, IS(AHEAD)) && !any(-1, V, IS(AHEAD)));
    CHECK_OK(mt_mirror_bring(home.s, home.unit, ALL));
    CHECK_OK(mt_mirror_evict(home.s, home.unit));
    CHECK(host(MT_PLANE_M, 1)[0] == 8 && host(MT_PLANE_HI, 0)[0] == 2);
    home.fail_store = 1;
    CHECK_EQ(mt_mirror_store(home.s, home.unit), MT_EDISK);
    CHECK(any(1, M, IS(AHEAD)));
    CHECK_OK(mt_mirror_store(home.s, home.unit));
    CHECK(home.values[MT_PLANE_M][1] == 8 && any(1, M, IS(FRESH)));
    CHECK(any(0, HI, IS(AHEAD)) && home.values[MT_PLANE_HI][0] == 0);
    mt_mirror_tell(home.s, home.unit, -1, HI, MT_MIRROR_STORE);
    CHECK_OK(mt_mirror_evict(home.s, home.unit));                /* it is on its way */
    CHECK(host(MT_PLANE_HI, 0)[0] == 2);
    mt_mirror_tell(home.s, home.unit, -1, HI, MT_MIRROR_STORED);
    CHECK_OK(mt_mirror_release(home.s, home.unit));              /* who wrote it has a claim */
    CHECK(host(MT_PLANE_HI, 0)[0] == 2 && host(MT_PLANE_M, 1)[0] == 0);
    CHECK_OK(mt_mirror_evict(home.s, home.unit));
    CHECK(host(MT_PLANE_HI, 0)[0] == 0);
}

/* Between opening and storing a parameter is written; its neighbour's memory goes, and its too. */
TEST(what_is_pushed_before_the_rest_is_taken_is_not_lost)
{
    HOME(&mt_home_ram);
    fill(MT_PLANE_M, 0, 8);
    REQUIRE_OK(mt_store_move(home.s, home.unit, &at_once, &home));
    fill(MT_PLANE_M, 1, 9);
    CHECK_OK(mt_mirror_push(home.s, home.unit, 1, M));
    CHECK_OK(mt_mirror_store(home.s, home.unit));
    CHECK_OK(mt_mirror_evict(home.s, home.unit));
    CHECK_OK(mt_mirror_bring(home.s, home.unit, M));
    CHECK(host(MT_PLANE_M, 0)[0] == 8 && host(MT_PLANE_M, 1)[0] == 9);
}

/* Weights, of which nobody knows which were written. */
TEST(weights_that_are_touched_are_the_hosts)
{
    HOME(&lazily);
    uint64_t version = mt_ledger_version(home.s, home.unit);
    mt_mirror_tell(home.s, home.unit, -1, HI, MT_MIRROR_STORE);
    mt_mirror_tell(home.s, home.unit, -1, HI, MT_MIRROR_STORED);
    CHECK(any(-1, HI, IS(FRESH)) && !any(-1, HI, IS(AHEAD)));
    mt_ledger_touch(home.s, home.unit);
    CHECK(any(2, HI, IS(AHEAD)) && !any(-1, HI, IS(FRESH)));
    CHECK_OK(mt_mirror_push(home.s, home.unit, 0, HI));          /* the home takes it later */
    CHECK_EQ(home.stores, 0);
    CHECK_EQ(mt_ledger_version(home.s, home.unit), version + 2);
}

TEST(what_is_torn_is_refused)
{
    HOME(&lazily);
    mt_mirror_tell(home.s, home.unit, -1, HI, MT_MIRROR_STORE);
    mt_mirror_tell(home.s, home.unit, -1, HI, MT_MIRROR_STORED);
    change(HI, 5);
    mt_ledger_touch(home.s, home.unit);          /* nobody brought them before */
    CHECK_FAILS(mt_mirror_bring(home.s, home.unit, HI), MT_ESTATE, "layers.0");
    CHECK(any(1, HI, IS(TORN)));
    CHECK_OK(mt_mirror_evict(home.s, home.unit));
    CHECK(any(1, HI, IS(TORN)));
    CHECK_OK(mt_mirror_bring(home.s, home.unit, M));     /* the door is open, others are well */
}

/* ---- planes at home on the host ------------------------------------------------------------ */

TEST(planes_may_be_excepted_and_come_back)
{
    HOME(&at_once);
    fill(MT_PLANE_M, 0, 3);
    CHECK_OK(mt_store_move(home.s, home.unit, &visiting, &home));
    change(M, 5);                                /* of which the mirror hears nothing */
    CHECK_OK(mt_mirror_bring(home.s, home.unit, M));
    CHECK_EQ(home.waits, 1);
    CHECK_EQ(home.loads, 0);
    CHECK_OK(mt_mirror_push(home.s, home.unit, 0, M));
    CHECK_EQ(home.stores, 1);
    CHECK_OK(mt_mirror_evict(home.s, home.unit));
    CHECK(host(MT_PLANE_M, 0)[0] == 3);
    CHECK_OK(mt_store_move(home.s, home.unit, &at_once, &home));
    CHECK(any(0, M, IS(AHEAD)) && !any(-1, V, IS(AHEAD)));
    CHECK_OK(mt_mirror_store(home.s, home.unit));
    change(M, 6);
    CHECK_FAILS(mt_store_move(home.s, home.unit, &visiting, &home), MT_ESTATE, "layers.0");
}
