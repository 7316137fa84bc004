/* test_spill.c — the executable form of core/swap.h, with a file: a toy's forwards and
 * backwards, whose windows keep two tensors in a file. */
#include "dev_fault.h"
#include "keeping.h"
#include "slow_disk.h"
#include "../../csrc/core/place.h"

#define WINDOWS 7
#define BAYS    3
#define KEEPS   (5 * 4096)               /* bytes of a bundle: 16,000 and 28 in whole pages */

/* ---- a scene ----------------------------------------------------------------------------- */

static void scene_file(scene *s, uint64_t limit, unsigned skip)
{
    snprintf(s->dir, sizeof s->dir, "/tmp/mt_test_spill.XXXXXX");
    REQUIRE(mkdtemp(s->dir) != NULL);
    REQUIRE_OK(mt_file_open(s->dir, limit, 3, &calls, &s->file));
    REQUIRE_OK(mt_swap_open(&s->t.cx, &s->w));
    debug_set(&s->t.cx, (mt_debug){ .skip = skip });
    REQUIRE_OK(mt_swap_disk(s->w, mt_file_blocks(s->file), BAYS));
}

/* max_us: that the device sleeps before each copy; disk_us: the file before each transfer. */
static void scene_open(scene *s, uint64_t seed, int max_us, int disk_us, unsigned skip)
{
    memset(s, 0, sizeof *s);
    disk_reset(disk_us);
    toy_open(&s->t, WINDOWS, seed, max_us);
    scene_file(s, 0, skip);
}

static mt_spill_stats stats(scene *s)
{
    return mt_swap_stats_get(s->w).spill;
}

static mt_status leave(scene *s, int step, int w, uint64_t *bundle)
{
    mt_swap_part p[PARTS];
    mt_status    st;

    run(s, &s->source[w % 2], value_of(step, w), 0);
    st = mt_swap_out(s->w, w, parts(&s->source[w % 2], p), PARTS, MT_SWAP_FILE, s->t.run, bundle);
    if (st == MT_OK)
        CHECK_OK(mt_swap_left(s->w, *bundle, s->t.run));
    return st;
}

static mt_status come(scene *s, int w, uint64_t bundle)
{
    mt_swap_part p[PARTS];

    return mt_swap_back(s->w, bundle, parts(&s->landing[w % 2], p), PARTS, s->t.run);
}

/* Sums find much of what a wait left out does to the file: told, or wrong. */
static void expect(scene *s, mt_status st)
{
    if (st != MT_OK)
        atomic_fetch_add(&s->wrong, 1);
}

static void look(scene *s, int step, int w, uint64_t bundle)
{
    CHECK_OK(mt_swap_await(s->w, bundle, s->t.run));
    run(s, &s->landing[w % 2], value_of(step, w), 1);
}

static void forward(scene *s, int step, uint64_t *bundle)
{
    for (int w = 0; w < WINDOWS; w++)
        CHECK_OK(leave(s, step, w, &bundle[w]));
}

/* One after the other: the last BAYS bundles are in memory still, and in the file. */
static void forward_in_order(scene *s, int step, uint64_t *bundle)
{
    debug_set(&s->t.cx, (mt_debug){ .sync = 1 });
    forward(s, step, bundle);
    debug_set(&s->t.cx, (mt_debug){ 0 });
}

/* One window ahead. */
static void backward(scene *s, int step, uint64_t *bundle)
{
    expect(s, come(s, WINDOWS - 1, bundle[WINDOWS - 1]));
    for (int w = WINDOWS - 1; w >= 0; w--) {
        CHECK_OK(mt_swap_await(s->w, bundle[w], s->t.run));
        if (w > 0)
            expect(s, come(s, w - 1, bundle[w - 1]));
        run(s, &s->landing[w % 2], value_of(step, w), 1);
        mt_swap_drop(s->w, bundle[w]);
    }
}

static long train(uint64_t seed, int max_us, int disk_us, unsigned skip, int steps)
{
    uint64_t bundle[WINDOWS];

    scene s;
    scene_open(&s, seed, max_us, disk_us, skip);
    for (int step = 0; step < steps; step++) {
        forward(&s, step, bundle);
        backward(&s, step, bundle);
    }
    return scene_end(&s);
}

TEST(tensors_come_back_as_they_left)
{
    CHECK_EQ(train(1, 0, 0, 0, 3), 0);
    for (uint64_t seed = 1; seed <= 6; seed++)
        CHECK_EQ(train(seed, seed % 2 ? 200 : 20, 200, 0, 3), 0);
}

TEST(a_few_bays_carry_any_number_of_bundles)
{
    uint64_t bundle[WINDOWS];

    SCENE(s, 3, 50, 50, 0);
    for (int step = 0; step < 3; step++) {
        forward(&s, step, bundle);
        CHECK_EQ(stats(&s).used_bytes, WINDOWS * KEEPS);
        backward(&s, step, bundle);
        CHECK_EQ(stats(&s).host_bytes, BAYS * KEEPS);
        CHECK_EQ(mt_swap_stats_get(s.w).host_bytes, BAYS * KEEPS);
    }
    CHECK_EQ(mt_swap_stats_get(s.w).used_bytes, 0);
    CHECK_EQ(stats(&s).used_bytes, 0);
    /* A place that is still written is another's only later:
     * the file may be longer by what was under way. */
    CHECK(stats(&s).file_bytes >= WINDOWS * KEEPS &&
          stats(&s).file_bytes <= (WINDOWS + BAYS) * KEEPS);
    CHECK(stats(&s).written_bytes >= 3 * (WINDOWS - BAYS) * KEEPS);
}

/* ---- edges ------------------------------------------------------------------------------ */

static void expect_wrong(unsigned edge, int max_us, int disk_us)
{
    long wrong = 0;

    RACE;
    for (uint64_t seed = 1; wrong == 0 && seed <= 20; seed++)
        wrong += train(seed, max_us, disk_us, edge, 2);
    CHECK(wrong > 0);
}

TEST(without_full_what_is_written_is_not_there_yet) { expect_wrong(MT_EDGE_FULL, 300, 20); }
TEST(without_written_a_bay_is_filled_while_written) { expect_wrong(MT_EDGE_WRITTEN, 20, 2000); }
TEST(without_read_it_comes_back_too_early)          { expect_wrong(MT_EDGE_READ, 20, 2000); }
TEST(without_drained_a_bay_is_read_into_too_early)  { expect_wrong(MT_EDGE_DRAINED, 300, 20); }

static void until_written(scene *s, uint64_t bytes)
{
    for (int i = 0; i < 5000 && stats(s).written_bytes < bytes; i++)
        usleep(200);
    CHECK(stats(s).written_bytes >= bytes);
}

/* Before the copies back of the first time are over; written: behind its write, or before it. */
static void comes_back_twice(int written)
{
    uint64_t bundle;
    gate     g = { 0 };

    SCENE(s, 4, 1, 0, 0);                    /* run is a queue of its own */
    if (!written)
        CHECK_OK(s.t.dev->ops->call(s.t.run, wait_for_gate, &g));
    CHECK_OK(leave(&s, 0, 0, &bundle));
    if (written) {
        until_written(&s, KEEPS);
        CHECK_OK(s.t.dev->ops->call(s.t.run, wait_for_gate, &g));
    }
    CHECK_OK(come(&s, 0, bundle));
    CHECK_OK(come(&s, 1, bundle));
    CHECK_OK(come(&s, 0, bundle));
    atomic_store(&g.open, 1);
    CHECK_OK(mt_swap_await(s.w, bundle, s.t.run));
    for (int i = 0; i < 2; i++)
        run(&s, &s.landing[i], value_of(0, 0), 1);
    mt_swap_drop(s.w, bundle);
}

TEST(a_bundle_may_come_back_again_while_it_does)
{
    comes_back_twice(0);
    comes_back_twice(1);
}

typedef struct comer {
    scene    *s;
    int       w;
    uint64_t  bundle;
    mt_status st;
} comer;

static void *come_alone(void *arg)
{
    comer *c = arg;

    c->st = come(c->s, c->w, c->bundle);
    return NULL;
}

static int is_told(scene *s, const char *what)
{
    char list[1024] = "";

    for (int i = 0; i < 5000 && strstr(list, what) == NULL; i++, usleep(200))
        mt_watch_tell(mt_store_watch(s->t.store), list, sizeof list);
    return strstr(list, what) != NULL;
}

/* One thread waits for the drive to bring a bundle, a second for its turn; meanwhile all that needs
 * no drive goes on, and a bundle that is dropped on its way is there until it has come. */
TEST(who_needs_no_drive_waits_for_none)
{
    uint64_t  bundle[WINDOWS];
    comer     c[2];
    pthread_t thread[2];

    SCENE(s, 1, 0, 0, 0);
    forward_in_order(&s, 0, bundle);
    atomic_store(&disk.stalled, 1);
    c[0] = (comer){ &s, 0, bundle[0], MT_EINVAL };
    c[1] = (comer){ &s, 1, bundle[1], MT_EINVAL };
    thread[0] = thread_start(come_alone, &c[0]);
    UNTIL(atomic_load(&disk.reads) != 0);
    thread[1] = thread_start(come_alone, &c[1]);
    CHECK(is_told(&s, "waits for what others keep, on its way out or back"));
    CHECK_OK(mt_swap_await(s.w, bundle[5], s.t.run));
    CHECK_EQ(stats(&s).read_bytes, 0);
    mt_swap_drop(s.w, bundle[4]);
    mt_swap_drop(s.w, bundle[0]);
    CHECK_EQ(atomic_load(&disk.stalled), 1);        /* the drive has not come yet */
    atomic_store(&disk.stalled, 0);
    for (int i = 0; i < 2; i++)
        thread_join(thread[i]);
    CHECK_OK(c[0].st);
    CHECK_OK(c[1].st);
    CHECK_EQ(mt_swap_await(s.w, bundle[0], s.t.run), MT_ESTATE);
    look(&s, 0, 1, bundle[1]);
}

/* Its first write is under way when a bundle is dropped; the next one's is over before. */
static long dropped_while_it_is_written(unsigned skip)
{
    uint64_t bundle[WINDOWS];

    scene s;
    scene_open(&s, 1, 0, 0, skip);
    atomic_store(&disk.first_stalled, 1);
    CHECK_OK(leave(&s, 0, 0, &bundle[0]));
    UNTIL(atomic_load(&disk.writes) != 0);
    mt_swap_drop(s.w, bundle[0]);
    CHECK_OK(leave(&s, 0, 1, &bundle[1]));
    until_written(&s, KEEPS);
    atomic_store(&disk.first_stalled, 0);
    for (int w = 2; w < 2 + BAYS; w++)                       /* the second one's bay is taken */
        CHECK_OK(leave(&s, 0, w, &bundle[w]));
    until_written(&s, (2 + BAYS) * KEEPS);
    expect(&s, come(&s, 1, bundle[1]));
    look(&s, 0, 1, bundle[1]);
    return scene_end(&s);
}

TEST(without_gone_a_place_is_written_by_two)
{
    CHECK_EQ(dropped_while_it_is_written(0), 0);
    RACE;
    CHECK(dropped_while_it_is_written(MT_EDGE_GONE) > 0);
}

/* ---- reading ahead ---------------------------------------------------------------------- */

/* Each bay that is emptied makes room for one more bundle, the latest first. */
TEST(what_comes_next_is_read_before_it_is_asked_for)
{
    uint64_t bundle[WINDOWS];

    SCENE(s, 1, 0, 0, 0);
    forward_in_order(&s, 0, bundle);
    CHECK_EQ(atomic_load(&disk.reads), 0);
    for (int w = WINDOWS - 1; w >= BAYS; w--) {
        int soon = WINDOWS - w;

        CHECK_OK(come(&s, w, bundle[w]));
        look(&s, 0, w, bundle[w]);
        mt_swap_drop(s.w, bundle[w]);
        for (int i = 0; i < 5000 && atomic_load(&disk.reads) < soon; i++)
            usleep(200);
        CHECK_EQ(atomic_load(&disk.reads), soon);
        CHECK_EQ(atomic_load(&disk.read_at[soon - 1]), (w - BAYS) * KEEPS);
    }
}

TEST(graphs_may_cross_and_be_gone_through_twice)
{
    uint64_t a[WINDOWS], b[WINDOWS];

    for (uint64_t seed = 1; seed <= 3; seed++) {
        SCENE(s, seed, 60, 60, 0);
        forward(&s, 0, a);
        forward(&s, 1, b);
        for (int time = 0; time < 2; time++)
            for (int w = WINDOWS - 1; w >= 0; w--) {
                CHECK_OK(come(&s, w, a[w]));
                look(&s, 0, w, a[w]);
            }
        for (int w = 0; w < WINDOWS; w++) {             /* not the way that was expected either */
            mt_swap_drop(s.w, a[w]);
            CHECK_OK(come(&s, w, b[w]));
            look(&s, 1, w, b[w]);
        }
        CHECK_EQ(stats(&s).host_bytes, BAYS * KEEPS);
    }
}

TEST(what_is_dropped_is_not_written)
{
    uint64_t bundle[WINDOWS];

    SCENE(s, 1, 0, 0, 0);
    atomic_store(&disk.first_stalled, 1);
    CHECK_OK(leave(&s, 0, 0, &bundle[0]));
    UNTIL(atomic_load(&disk.writes) != 0);
    mt_swap_drop(s.w, bundle[0]);                            /* too late for this one */
    CHECK_EQ(stats(&s).used_bytes, KEEPS);
    atomic_store(&disk.first_stalled, 0);
    until_written(&s, KEEPS);
    UNTIL(stats(&s).used_bytes <= 0);
    for (int step = 0; step < 20; step++) {
        CHECK_OK(leave(&s, step, 0, &bundle[0]));
        mt_swap_drop(s.w, bundle[0]);
    }
}

static uint64_t out(scene *s, void *mem, size_t bytes)
{
    mt_swap_part p = { mem, bytes };
    uint64_t     bundle = 0;

    CHECK_OK(mt_swap_out(s->w, 0, &p, 1, MT_SWAP_FILE, s->t.run, &bundle));
    CHECK_OK(mt_swap_left(s->w, bundle, s->t.run));
    return bundle;
}

TEST(bundles_differ_in_size_and_are_padded)
{
    static char   mem[6][70000];
    static size_t bytes[6] = { 7, 70000, 513, 4096, 50001, 8193 };
    uint64_t      bundle[6];

    SCENE(s, 1, 60, 60, 0);
    for (int step = 0; step < 3; step++) {
        for (int i = 0; i < 6; i++) {
            memset(mem[i], 'a' + i + step, bytes[i]);
            bundle[i] = out(&s, mem[i], bytes[i]);
        }
        CHECK_OK(s.t.dev->ops->sync(s.t.run));
        CHECK_EQ(stats(&s).used_bytes, 4096 + 73728 + 4096 + 4096 + 53248 + 12288);
        memset(mem, 0, sizeof mem);
        for (int i = 5; i >= 0; i--) {
            mt_swap_part p = { mem[i], bytes[i] };

            CHECK_OK(mt_swap_back(s.w, bundle[i], &p, 1, s.t.run));
            CHECK_OK(mt_swap_await(s.w, bundle[i], s.t.run));
            CHECK_OK(s.t.dev->ops->sync(s.t.run));
            CHECK(mem[i][0] == 'a' + i + step && mem[i][bytes[i] - 1] == 'a' + i + step);
            mt_swap_drop(s.w, bundle[i]);
        }
        CHECK(stats(&s).host_bytes <= BAYS * 73728);
        while (stats(&s).used_bytes > 0)             /* some are written still (GONE) */
            sleep_ms(1);
    }
}

/* ---- the file is no good ---------------------------------------------------------------- */

TEST(without_a_file_a_bundle_is_refused)
{
    static scene s;
    mt_swap_part p = { s.source, 64 };
    uint64_t     bundle = 7;

    toy_open(&s.t, 1, 1, 0);
    REQUIRE_OK(mt_swap_open(&s.t.cx, &s.w));
    CHECK_EQ(mt_swap_out(s.w, 0, &p, 1, MT_SWAP_FILE, s.t.run, &bundle), MT_ESTATE);
    CHECK_SAYS("name a directory");
    CHECK_EQ(bundle, 7);
    scene_close(&s);
}

/* With a default stack that is nowhere to be had no thread begins. */
TEST(a_file_that_got_no_thread_may_be_tried_again)
{
    pthread_attr_t before, vast;
    uint64_t       bundle;

    SCENE(s, 1, 0, 0, 0);
    mt_swap_close(s.w);
    REQUIRE_OK(mt_swap_open(&s.t.cx, &s.w));
    REQUIRE(pthread_getattr_default_np(&before) == 0 && pthread_getattr_default_np(&vast) == 0);
    REQUIRE(pthread_attr_setstacksize(&vast, (size_t)1 << 48) == 0);
    REQUIRE(pthread_setattr_default_np(&vast) == 0);
    CHECK_FAILS(mt_swap_disk(s.w, mt_file_blocks(s.file), BAYS), MT_ENOMEM, "ask for fewer");
    REQUIRE(pthread_setattr_default_np(&before) == 0);
    CHECK_EQ(leave(&s, 0, 0, &bundle), MT_ESTATE);
    REQUIRE_OK(mt_swap_disk(s.w, mt_file_blocks(s.file), BAYS));
    CHECK_OK(leave(&s, 0, 0, &bundle));
    CHECK_OK(come(&s, 0, bundle));
    look(&s, 0, 0, bundle);
}

TEST(a_file_that_may_not_grow_is_told_with_its_bytes)
{
    static scene s;
    uint64_t     bundle[WINDOWS], more = 0;

    disk_reset(0);
    toy_open(&s.t, WINDOWS, 1, 0);
    scene_file(&s, 2 * KEEPS, 0);
    CHECK_OK(leave(&s, 0, 0, &bundle[0]));
    CHECK_OK(leave(&s, 0, 1, &bundle[1]));
    CHECK_FAILS(leave(&s, 0, 2, &more), MT_EDISK, "61440 bytes are needed");
    CHECK_EQ(more, 0);
    mt_swap_drop(s.w, bundle[0]);
    until_written(&s, KEEPS);
    UNTIL(stats(&s).used_bytes <= KEEPS);
    CHECK_OK(leave(&s, 0, 2, &bundle[2]));                   /* in the dropped one's place */
    scene_close(&s);
}

TEST(a_write_that_fails_is_told_and_harms_nobody_else)
{
    uint64_t  bundle[WINDOWS], lost;
    mt_status st;

    SCENE(s, 1, 0, 0, 0);
    atomic_store(&disk.fail_write, 1);
    CHECK_OK(leave(&s, 0, 2, &lost));
    for (st = MT_OK; st == MT_OK; usleep(200))  /* told once to who comes when that is known, */
        if ((st = leave(&s, 0, 3, &bundle[3])) == MT_OK)
            mt_swap_drop(s.w, bundle[3]);
    CHECK_FAILS(st, MT_EDISK,
                "unit layers.2: what its window keeps could not be written to the file: ");
    CHECK_SAYS(s.dir);
    CHECK_SAYS(strerror(ENOSPC));
    CHECK_EQ(come(&s, 2, lost), MT_EDISK);                   /* and always to who wants it back */
    CHECK_FAILS(come(&s, 2, lost), MT_EDISK, "unit layers.2");
    mt_swap_drop(s.w, lost);
    for (int step = 1; step < 3; step++) {
        forward(&s, step, bundle);
        backward(&s, step, bundle);
    }
}

TEST(a_read_that_fails_is_told_and_may_be_tried_again)
{
    uint64_t bundle[WINDOWS];

    for (int n = 1; n <= 2; n++) {                  /* the one asked for; one that is read ahead */
        int w = n == 1 ? 0 : 3;

        SCENE(s, 1, 0, 0, 0);
        forward_in_order(&s, 0, bundle);
        atomic_store(&disk.fail_at, w * KEEPS);
        for (int last = WINDOWS - 1; n == 2 && last > w; last--) {
            CHECK_OK(come(&s, last, bundle[last]));
            look(&s, 0, last, bundle[last]);
        }
        CHECK_EQ(come(&s, w, bundle[w]), MT_EDISK);
        CHECK_SAYS(n == 1 ? "unit layers.0: " : "unit layers.3: ");
        CHECK_SAYS("could not be read from the file: ");
        CHECK_SAYS(strerror(EIO));
        CHECK_OK(come(&s, w, bundle[w]));
        look(&s, 0, w, bundle[w]);
    }
}

/* ---- failing device calls --------------------------------------------------------------- */

static mt_status errand(scene *s, mt_queue *q)
{
    mt_swap_part p = { s->source, 0 };
    uint64_t     bundle[4];

    for (int i = 0; i < 4; i++) {                       /* the last two are given larger bays */
        p.bytes = i < 2 ? 64 : 8192;
        TRY(mt_swap_out(s->w, 0, &p, 1, MT_SWAP_FILE, q, &bundle[i]));
        TRY(mt_swap_left(s->w, bundle[i], q));
    }
    for (int i = 3; i >= 0; i--) {
        p.bytes = i < 2 ? 64 : 8192;
        TRY(mt_swap_back(s->w, bundle[i], &p, 1, q));
        TRY(mt_swap_await(s->w, bundle[i], q));
        mt_swap_drop(s->w, bundle[i]);
    }
    return MT_OK;
}

TEST(every_failing_device_call_frees_everything)
{
    static scene s;

    EACH_FAULT(d, 1, n % 2 ? FAULT_ONCE : FAULT_STAYS) {
        fault_next(d, 0);
        memset(&s, 0, sizeof s);
        disk_reset(0);
        toy_open_on(&s.t, d, 1, 0, MT_F32);
        scene_file(&s, 0, 0);
        fault_next(d, n);
        mt_status st = errand(&s, s.t.run);
        mt_swap_close(s.w);
        /* a wait behind a write may fail when all is over */
        CHECK(st == MT_OK || (st == MT_EDEVICE && fault_fired(d)));
        mt_file_close(s.file);
        rmdir(s.dir);
        fault_next(d, 0);
        s.t.dev->ops->queue_close(s.t.run);
        mt_store_close(s.t.store);
        mt_pool_close(s.t.pool);
    }
}

/* ---- places ----------------------------------------------------------------------------- */

/* Of a file that has room for ten pages. 0: it has no more. */
static int take(mt_places *l, mt_place *p, uint64_t pages)
{
    uint64_t lack = mt_places_take(l, p, pages * 4096);

    if (l->bytes + lack > 10 * 4096)
        return 0;
    l->bytes += lack;
    return lack == 0 || mt_places_take(l, p, pages * 4096) == 0;
}

TEST(places_are_cut_and_joined)
{
    mt_places l = { 0 };
    mt_place  a, b, c, d;

    REQUIRE(take(&l, &a, 3) && take(&l, &b, 1) && take(&l, &c, 2));
    CHECK_EQ(c.at, 4 * 4096);
    mt_places_give(&l, &a);
    mt_places_give(&l, &c);
    CHECK(take(&l, &c, 2));                             /* the smallest that holds it */
    CHECK_EQ(c.at, 4 * 4096);
    CHECK(take(&l, &a, 1) && take(&l, &d, 2));
    CHECK(a.at == 0 && d.at == 4096);                   /* of three, one and two */
    CHECK_EQ(l.used_bytes, 6 * 4096);
    mt_places_give(&l, &a);
    mt_places_give(&l, &b);
    mt_places_give(&l, &d);                             /* with both neighbours */
    CHECK(take(&l, &a, 4) && a.at == 0 && l.bytes == 6 * 4096);
    mt_places_give(&l, &c);
    mt_places_give(&l, &c);                             /* it is nowhere */
    CHECK(!take(&l, &d, 7));                            /* 2 are free at the end, 4 may be added */
    CHECK(take(&l, &b, 6));
    CHECK(b.at == 4 * 4096 && l.bytes == 10 * 4096 && l.used_bytes == 10 * 4096);
}

/* Empty tensors, and no tensor at all: the file has nothing to write,
 * and memory is not what holds them. */
TEST(bundles_of_no_bytes_come_and_go)
{
    mt_swap_part none[2] = { { NULL, 0 }, { NULL, 0 } };
    uint64_t     a, b;

    SCENE(s, 1, 0, 0, 0);
    size_t used = mt_swap_stats_get(s.w).used_bytes;
    for (int i = 0; i < 3; i++) {
        CHECK_OK(mt_swap_out(s.w, 0, none, 2, MT_SWAP_FILE, s.t.run, &a));
        CHECK_OK(mt_swap_out(s.w, 1, none, 0, MT_SWAP_FILE, s.t.run, &b));
        CHECK_OK(mt_swap_left(s.w, a, s.t.run));
        CHECK_OK(mt_swap_left(s.w, b, s.t.run));
        CHECK_OK(mt_swap_back(s.w, b, none, 0, s.t.run));
        CHECK_OK(mt_swap_back(s.w, a, none, 2, s.t.run));
        CHECK_OK(mt_swap_await(s.w, a, s.t.run));
        mt_swap_drop(s.w, a);
        mt_swap_drop(s.w, b);
    }
    CHECK_EQ(mt_swap_stats_get(s.w).used_bytes, used);
    CHECK_EQ(stats(&s).written_bytes, 0);
}
