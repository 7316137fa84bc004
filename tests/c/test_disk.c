/* test_disk.c — states and weights in a file give the same numbers as in memory,
 * whatever is read when. */
#include "check.h"
#include "drop.h"
#include "slow_disk.h"
#include "toy.h"
#include "../../csrc/core/disk.h"
#include "../../csrc/io/file.h"

CLOSES(mt_timeline, mt_timeline_close(*x))

#define UNITS   3
#define PARAMS  4
#define BUFFER  MT_DISK_LEAST

/* In pieces of 64 KiB: parts of several parameters in one, and one parameter in several. */
static const int64_t numels[UNITS][PARAMS] = {
    { 5000, 1, 0, 30001 }, { 20000, 777, 4096, 8192 }, { 3, 2, 40000, 1 }
};

/* ---- a store with its states in a file, and the same numbers in plain memory --------------- */

typedef struct world {
    char      dir[64];
    mt_context cx;
    mt_dev   *dev;
    mt_store *store;
    mt_pool  *pool;
    mt_file  *file;
    mt_disk  *disk;
    mt_queue *h2d;
    float    *hi[UNITS][PARAMS], *m[UNITS][PARAMS], *v[UNITS][PARAMS];       /* what is right */
    int       step;
} world;

static float *plane(world *w, int u, int p, mt_plane plane)
{
    return store_at(w->store, u, p, plane);
}

static void make_units(world *w)
{
    static const char *const names[UNITS] = { "first", "second", "third" };

    for (int u = 0; u < UNITS; u++) {
        mt_param_desc d[PARAMS];

        for (int p = 0; p < PARAMS; p++) {
            d[p] = (mt_param_desc){ MT_F32, numels[u][p], 1 };
            w->hi[u][p] = calloc((size_t)numels[u][p] + 1, sizeof(float));
            w->m[u][p] = calloc((size_t)numels[u][p] + 1, sizeof(float));
            w->v[u][p] = calloc((size_t)numels[u][p] + 1, sizeof(float));
        }
        (void)store_add(w->store, names[u], d, PARAMS);
    }
}

/* delay_us: of the device's copies, at most. */
static void open_device(world *w, int delay_us)
{
    w->dev = delayed_open(7, delay_us);
    w->cx = (mt_context){ .dev = w->dev };
    REQUIRE_OK(mt_store_open(&w->cx, &w->store));
    w->cx.store = w->store;
    REQUIRE_OK(w->dev->ops->queue_open(w->dev, "h2d", &w->h2d));
}

static void open_disk(world *w, int n_buffers, int weights)
{
    REQUIRE_OK(mt_file_open(w->dir, 0, 3, &calls, &w->file));
    REQUIRE_OK(mt_disk_open(&w->cx, mt_file_blocks(w->file), n_buffers > 2 ? w->pool : NULL,
                         n_buffers, BUFFER, &w->disk));
    for (int u = 0; u < UNITS; u++)
        REQUIRE_OK(mt_disk_add(w->disk, u, weights));
    REQUIRE_OK(mt_file_reserve(w->file, mt_disk_stats_get(w->disk).need_bytes));
}

static void open_store(world *w, int delay_us, int dawdle_us)
{
    *w = (world){ .dir = "/tmp/mt_test_disk.XXXXXX" };
    REQUIRE(mkdtemp(w->dir) != NULL);
    disk_reset(dawdle_us);
    REQUIRE_OK(mt_pool_open(1, &w->pool));
    open_device(w, delay_us);
    make_units(w);
}

static void open_world(world *w, int n_buffers, int dawdle_us)
{
    open_store(w, 0, dawdle_us);
    open_disk(w, n_buffers, 0);
}

static void close_world(world *w)
{
    w->dev->ops->queue_close(w->h2d);
    mt_feed_close(w->cx.feed);
    mt_disk_close(w->disk);
    mt_file_close(w->file);
    mt_store_close(w->store);
    mt_pool_close(w->pool);
    w->dev->ops->close(w->dev);
    for (int u = 0; u < UNITS; u++)
        for (int p = 0; p < PARAMS; p++) {
            free(w->hi[u][p]);
            free(w->m[u][p]);
            free(w->v[u][p]);
        }
    CHECK_EQ(rmdir(w->dir), 0);
}

#define WORLD(w, ...) CLOSED_BY(close_world) world w; open_world(&w, __VA_ARGS__)

/* One element, the same operations on both sides. */
#define UPDATE(hi, m, v, i, step) \
    ((m) += (float)((step) + (int)((i) % 5)), (v) += 2 * (m), (hi) += (v) - (float)((i) % 3))

/* What a thread of its own does to a unit. */
typedef struct deed {
    world     *w;
    int        unit, push;
    char      *slot;
    atomic_int over, stop;
    mt_status  st;
} deed;

typedef struct errand {
    world     *w;
    const int *params;
    int        n, unit;
    int        calls, fail;      /* fail: the call that does; 0: none */
    int        over, step;
} errand;

static void errand_over(void *arg)
{
    ((errand *)arg)->over++;
}

static mt_status update_parts(void *arg, mt_pool *pool, const mt_part *parts, int n, float clip)
{
    errand *e = arg;

    CHECK(clip == 0.5f);
    if (++e->calls == e->fail)
        return MT_FAIL(MT_EINVAL, "the errand failed");
    for (int i = 0; i < n; i++) {
        const mt_part *k = &parts[i];
        float *hi = k->at[MT_PLANE_HI], *m = k->at[MT_PLANE_M], *v = k->at[MT_PLANE_V];
        int    ours = 0;

        for (int p = 0; p < e->n; p++)
            ours |= e->params[p] == k->param;
        CHECK_EQ(k->from % MT_DISK_GRAIN, 0);
        if (!ours)
            continue;
        hi = hi != NULL ? hi : plane(e->w, e->unit, k->param, MT_PLANE_HI) + k->from;
        m = m != NULL ? m : plane(e->w, e->unit, k->param, MT_PLANE_M) + k->from;
        v = v != NULL ? v : plane(e->w, e->unit, k->param, MT_PLANE_V) + k->from;
        for (int64_t x = 0; x < k->n; x++)
            UPDATE(hi[x], m[x], v[x], k->from + x, e->step);
    }
    return MT_OK;
}

/* Announced and put; what is right is updated too, unless it is to fail. */
static mt_status put(world *w, errand *e)
{
    mt_update_job j = { .unit = e->unit, .params = e->params, .n_params = e->n,
                        .pieces = update_parts, .free = errand_over,
                        .arg = e };

    for (int k = 0; k < e->n && e->fail == 0 && e->unit < UNITS; k++) {
        int p = e->params[k];

        for (int64_t i = 0; i < numels[e->unit][p]; i++)
            UPDATE(w->hi[e->unit][p][i], w->m[e->unit][p][i], w->v[e->unit][p][i], i, e->step);
    }
    mt_ledger_update_begin(w->store, e->unit);
    return mt_home_disk.update(w->disk, update_of(&j, 0.5f));
}

static mt_status over(world *w, errand *e)
{
    mt_status st = mt_ledger_wait_updates(w->store, e->unit);

    (void)mt_home_disk.drain(w->disk);
    CHECK_EQ(e->over, 1);
    return st;
}

static mt_status update(world *w, int u, const int *params, int n, int fail)
{
    errand    e = { .w = w, .params = params, .n = n, .unit = u, .fail = fail, .step = w->step };
    mt_status st = put(w, &e), ended = over(w, &e);

    return st != MT_OK ? st : ended;
}

/* One by one of a unit that is none of the three. */
static void run_errand(world *w, const int *params, int n, int unit, int number)
{
    errand e = { .w = w, .params = params, .n = n, .unit = unit, .step = number };

    CHECK_OK(put(w, &e));
    CHECK_OK(over(w, &e));
}

static const int all[PARAMS] = { 0, 1, 2, 3 };

/* Of all units; none waits for another. meanwhile: what is done before they are waited for. */
static void step_and(world *w, int backwards, void (*meanwhile)(world *w))
{
    errand e[UNITS];

    w->step++;
    for (int i = 0; i < UNITS; i++) {
        e[i] = (errand){ .w = w, .params = all, .n = PARAMS, .unit = backwards ? UNITS - 1 - i : i,
                         .step = w->step };
        CHECK_OK(put(w, &e[i]));
    }
    if (meanwhile != NULL)
        meanwhile(w);
    for (int i = 0; i < UNITS; i++)
        CHECK_OK(over(w, &e[i]));
}

static void step(world *w, int backwards)
{
    step_and(w, backwards, NULL);
}

static void compare(const float *got, const float *want, int64_t n, const char *what, int u, int p)
{
    for (int64_t i = 0; i < n; i++)
        if (got[i] != want[i]) {
            CHECK_PRINT_("%s of unit %d, parameter %d, element %lld: %g, expected %g", what, u, p,
                         (long long)i, (double)got[i], (double)want[i]);
            CHECK(got[i] == want[i]);
            return;
        }
}

/* The unit that was updated last comes first: it is still being written. */
static void check(world *w)
{
    for (int u = UNITS - 1; u >= 0; u--) {
        CHECK_OK(mt_mirror_bring(w->store, u, MT_STATE_PLANES | 1u << MT_PLANE_HI));
        for (int p = 0; p < PARAMS; p++) {
            compare(plane(w, u, p, MT_PLANE_HI), w->hi[u][p], numels[u][p], "weight", u, p);
            compare(plane(w, u, p, MT_PLANE_M), w->m[u][p], numels[u][p], "M", u, p);
            compare(plane(w, u, p, MT_PLANE_V), w->v[u][p], numels[u][p], "V", u, p);
        }
    }
}

/* ---- tests ------------------------------------------------------------------------------- */

TEST(updates_are_those_of_states_in_memory)
{
    static const int some[2] = { 3, 0 };

    for (int n_buffers = 1; n_buffers <= 12; n_buffers = n_buffers * 2 + 1)
        for (int dawdle_us = 0; dawdle_us <= 800; dawdle_us += 800) {
            WORLD(w, n_buffers, dawdle_us);
            for (int i = 0; i < 3; i++)
                step(&w, 0);
            /* in another order than was read ahead for */
            step(&w, 1);
            step(&w, 1);
            /* some parameters; a unit twice, others not at all */
            CHECK_OK(update(&w, 1, some, 2, 0));
            CHECK_OK(update(&w, 1, &some[0], 1, 0));
            check(&w);
            step(&w, 0);
            check(&w);
            CHECK(mt_disk_stats_get(w.disk).busy_ns > 0);
        }
}

/* Nothing is under way any more, and so nothing begins. */
static void read_as_far_as_it_goes(world *w)
{
    mt_disk_stats before, now = mt_disk_stats_get(w->disk);
    int           quiet = 0;

    while (quiet < 3) {
        before = now;
        sleep_ms(1);
        now = mt_disk_stats_get(w->disk);
        quiet = now.read_bytes == before.read_bytes && now.written_bytes == before.written_bytes
                    ? quiet + 1 : 0;
    }
}

TEST(pieces_are_read_ahead_before_anybody_asks)
{
    WORLD(w, 4, 0);
    /* the first step's pieces were never written, and are not read */
    uint64_t once = mt_disk_stats_get(w.disk).need_bytes, twice = 2 * once;

    step(&w, 0);
    step(&w, 0);
    for (int i = 0; i < 20000 && (mt_disk_stats_get(w.disk).read_bytes < once + 2 * BUFFER ||
                                  mt_disk_stats_get(w.disk).written_bytes < twice); i++)
        sleep_ms(1);
    CHECK(mt_disk_stats_get(w.disk).read_bytes >= once + 2 * BUFFER);
    CHECK(mt_disk_stats_get(w.disk).read_bytes <= once + 4 * BUFFER);
    CHECK_EQ(mt_disk_stats_get(w.disk).written_bytes, twice);
    CHECK_EQ(mt_disk_stats_get(w.disk).buffer_bytes, 5 * BUFFER);
    step(&w, 0);
    check(&w);
}

/* An update of later parameters alone, when its unit's first pieces are in all buffers, and what it
 * wants is what would be read next. */
TEST(what_was_read_ahead_may_be_passed_over)
{
    static const int last[1] = { 3 };

    for (int n_buffers = 1; n_buffers < 4; n_buffers++)
        for (int u = 0; u < UNITS; u++) {
            WORLD(w, n_buffers, 0);
            step(&w, 0);
            for (int i = 0; i < 2; i++) {
                /* reads ahead of u */
                CHECK_OK(update(&w, (u + UNITS - 1) % UNITS, all, PARAMS, 0));
                read_as_far_as_it_goes(&w);
                CHECK_OK(update(&w, u, last, 1, 0));
            }
            check(&w);
        }
}

/* The piece that is read first was given to the disk last. */
TEST(a_reader_waits_for_the_write_of_what_it_reads)
{
    WORLD(w, 3, 5000);
    step(&w, 0);
    for (int i = 0; i < 8; i++) {
        CHECK_OK(update(&w, 0, &all[1], 1, 0));
        CHECK_OK(mt_mirror_bring(w.store, 0, 1u << MT_PLANE_V));
        compare(plane(&w, 0, 1, MT_PLANE_V), w.v[0][1], 1, "V", 0, 1);
    }
}

/* As in a share another rank reads what is in this one's file, while that closes its engine. */
static void *serve_all_states(void *arg)
{
    world *w = arg;
    int    gone;

    mt_lock(&w->store->serving);
    CHECK_OK(mt__mirror_serve(w->store, MT_STATE_PLANES, &gone));        /* of unit 0 */
    mt_unlock(&w->store->serving);
    CHECK(!gone);
    return NULL;
}

TEST(close_waits_for_who_is_served)
{
    for (int i = 0; i < 5; i++) {
        WORLD(w, 1, 0);
        step(&w, 0);
        read_as_far_as_it_goes(&w);      /* of what comes next: it counts as a read, too */
        atomic_store(&disk.dawdle_us, 5000);
        int reads = atomic_load(&disk.reads);
        pthread_t thread = thread_start(serve_all_states, &w);
        UNTIL(atomic_load(&disk.reads) != reads);
        mt_disk_close(w.disk);
        thread_join(thread);
        w.disk = NULL;
    }
}

/* Reads ahead that are slow are still under way when the piece is written: by a push, and by an
 * update in another order than was read ahead for. */
TEST(nothing_is_written_while_it_is_read_for_nobody)
{
    WORLD(w, 6, 3000);
    step(&w, 0);
    for (int i = 0; i < 12; i++) {
        step(&w, i % 2);
        for (int p = PARAMS - 1; p >= 0; p--) {
            for (int64_t k = 0; k < numels[0][p]; k++)
                plane(&w, 0, p, MT_PLANE_V)[k] = w.v[0][p][k] = (float)(i + k % 5);
            CHECK_OK(mt_mirror_push(w.store, 0, p, 1u << MT_PLANE_V));
        }
    }
    check(&w);
    CHECK_OK(mt_ledger_check(w.store));
}

/* One parameter's plane changes; what was read ahead of it is not used, and its neighbours stay. */
TEST(what_is_pushed_is_what_the_next_update_reads)
{
    for (int n_buffers = 1; n_buffers < 12; n_buffers += 5) {
        WORLD(w, n_buffers, 300);
        /* before the first update: zeros */
        CHECK_OK(mt_mirror_push(w.store, 2, 2, 1u << MT_PLANE_M));
        step(&w, 0);
        step(&w, 0);
        for (int u = 0; u < UNITS; u++)
            for (int p = 0; p < PARAMS; p += 3) {
                for (int64_t i = 0; i < numels[u][p]; i++)
                    plane(&w, u, p, MT_PLANE_V)[i] = w.v[u][p][i] = (float)(i % 11);
                CHECK_OK(mt_mirror_push(w.store, u, p, 1u << MT_PLANE_V));
            }
        step(&w, 0);
        check(&w);
        CHECK_FAILS(mt_mirror_push(w.store, 0, PARAMS, 1u << MT_PLANE_V), MT_EINVAL, "first");
    }
}

/* Of the second unit; new values, which the next update reads. */
static uint64_t bytes_read_by_push(world *w, int param)
{
    uint64_t before = mt_disk_stats_get(w->disk).read_bytes;

    for (int64_t i = 0; i < numels[1][param]; i++)
        plane(w, 1, param, MT_PLANE_V)[i] = w->v[1][param][i] = (float)(i % 9);
    CHECK_OK(mt_mirror_push(w->store, 1, param, 1u << MT_PLANE_V));
    return mt_disk_stats_get(w->disk).read_bytes - before;
}

/* Parameters are pushed one by one; what is in the piece that came last need not come again,
 * until it changes. */
TEST(a_piece_that_several_pushes_change_is_read_once)
{
    WORLD(w, 1, 0);
    step(&w, 0);
    read_as_far_as_it_goes(&w);                          /* of the first unit, which stays */
    for (int i = 0; i < 3; i++) {
        CHECK(bytes_read_by_push(&w, 1) > 0);
        CHECK_EQ(bytes_read_by_push(&w, 1), 0);
        step(&w, 0);
        read_as_far_as_it_goes(&w);
    }
    check(&w);
}

/* Whichever transfer fails: it is the ledger's fault, with its name, and nobody waits for ever. */
TEST(a_transfer_that_fails_is_a_fault_that_names_what_was_lost)
{
    for (int write = 0; write < 2; write++)
        for (int n = 1; n < 12; n += 3) {
            mt_status st = MT_OK;

            WORLD(w, 3, 0);
            step(&w, 0);
            atomic_store(write ? &disk.fail_write : &disk.fail_read, n);
            for (int i = 0; i < 4 && st == MT_OK; i++) {
                w.step++;
                for (int u = 0; u < UNITS && st == MT_OK; u++)
                    st = update(&w, u, all, PARAMS, 0);
            }
            CHECK_FAILS(st, MT_EDISK, "unit ");
            CHECK_SAYS("plane ");
            CHECK_SAYS("of parameter ");
            CHECK_SAYS(write ? ": writing" : ": reading");
            CHECK_EQ(mt_mirror_bring(w.store, 0, MT_STATE_PLANES), MT_EDISK);
        }
}

TEST(a_changed_byte_names_its_unit_and_plane)
{
    char bad = 0x7f;

    WORLD(w, 1, 0);
    step(&w, 0);
    step(&w, 0);
    CHECK_OK(mt_mirror_bring(w.store, 2, 1u << MT_PLANE_M));                   /* all is written */
    int fd = open(scratch_of(w.dir), O_RDWR);
    REQUIRE(fd >= 0);
    CHECK_EQ(pwrite(fd, &bad, 1, (off_t)mt_disk_stats_get(w.disk).need_bytes - 5000), 1);
    close(fd);
    CHECK_EQ(mt_mirror_bring(w.store, 2, 1u << MT_PLANE_V), MT_EDISK);
    /* The piece is one block: anything in it may be what changed. */
    CHECK_SAYS("unit third, from plane M of parameter 2 to plane V of parameter 3");
    CHECK_SAYS(w.dir);
    CHECK_SAYS("offset");
}

/* Its fault ends every wait, and jobs behind it are only ended. */
TEST(a_computation_that_fails_is_a_fault)
{
    errand behind = { .params = all, .n = PARAMS, .unit = 1 };

    WORLD(w, 2, 0);
    step(&w, 0);
    behind.w = &w;
    CHECK_EQ(update(&w, 2, all, PARAMS, 1), MT_EINVAL);  /* its first piece */
    CHECK_SAYS("the errand failed");
    CHECK_OK(put(&w, &behind));
    CHECK_EQ(over(&w, &behind), MT_EINVAL);
    CHECK_EQ(behind.calls, 0);
}

/* Updates go on while nobody waits for them; close finishes them. */
TEST(close_finishes_what_was_put_and_weights_wait_for_their_copies)
{
    errand   e[UNITS];
    uint64_t version;

    WORLD(w, 3, 300);
    OPENED(mt_queue, q, w.dev->ops->queue_adopt(w.dev, 0, &q));
    /* a mover about to copy the first unit */
    CHECK_OK(mt_ledger_fetch_begin(w.store, 0, &version));
    for (int u = 0; u < UNITS; u++) {
        e[u] = (errand){ .w = &w, .params = all, .n = PARAMS, .unit = u };
        CHECK_OK(put(&w, &e[u]));
    }
    sleep_ms(5);
    CHECK_EQ(mt_disk_stats_get(w.disk).busy_ns, 0);
    CHECK_OK(mt_ledger_fetching(w.store, 0, q));
    mt_disk_close(w.disk);
    w.disk = NULL;
    for (int u = 0; u < UNITS; u++) {
        CHECK(e[u].over == 1 && e[u].calls > 1);
        CHECK_OK(mt_ledger_wait_updates(w.store, u));
    }
}

/* A drive that answers no more: the request is named, and ends the updates that wait for it. */
TEST(a_stalled_drive_is_named)
{
    errand e = { .params = all, .n = PARAMS, .unit = 0, .fail = 99 };

    WORLD(w, 1, 0);
    step(&w, 0);
    CHECK_OK(mt_mirror_bring(w.store, 2, MT_STATE_PLANES));         /* all is written */
    mt_ledger_watchdog(w.store, 0.1);
    atomic_store(&disk.stalled, 1);
    e.w = &w;
    CHECK_OK(put(&w, &e));
    CHECK_EQ(mt_ledger_wait_updates(w.store, 0), MT_ESTUCK);
    CHECK_SAYS("disk, unit first waits for a piece to be read (READ), since ");
    atomic_store(&disk.stalled, 0);
    mt_status st = mt_home_disk.drain(w.disk);  /* a fault, if the updates' own wait ended too */
    CHECK(st == MT_OK || st == MT_ESTUCK);
    CHECK_EQ(e.over, 1);
}

/* Who reads on the host is told so too, and may ask again:
 * what came late is not taken for what it asks for then. */
TEST(a_stalled_read_for_the_host_is_named)
{
    WORLD(w, 1, 0);
    step(&w, 0);
    CHECK_OK(mt_mirror_bring(w.store, 2, MT_STATE_PLANES));         /* all is written */
    mt_ledger_watchdog(w.store, 0.1);
    atomic_store(&disk.stalled, 1);
    CHECK_FAILS(mt_mirror_bring(w.store, 1, MT_STATE_PLANES), MT_ESTUCK,
                "disk, unit second waits for a piece to be read for the host (WRITTEN), since ");
    CHECK_SAYS("; the caller, unit second waits for a piece");
    CHECK_EQ(mt_mirror_bring(w.store, 0, MT_STATE_PLANES), MT_ESTUCK);
    atomic_store(&disk.stalled, 0);
    check(&w);
    CHECK_OK(mt_ledger_check(w.store));
}

/* A push that failed half-way has changed the bounce buffer, and not the file. */
TEST(what_was_not_pushed_is_not_read)
{
    WORLD(w, 1, 0);
    step(&w, 0);
    CHECK_OK(mt_mirror_bring(w.store, 2, MT_STATE_PLANES));
    plane(&w, 2, 0, MT_PLANE_M)[0] = 77;
    drop_plane(w.store, 2, MT_PLANE_V);
    REQUIRE_OK(mt_store_set_trainable(w.store, 2, 0, 0));
    CHECK_EQ(mt_mirror_push(w.store, 2, 0, 1u << MT_PLANE_M | 1u << MT_PLANE_V), MT_EINVAL);
    REQUIRE_OK(mt_store_set_trainable(w.store, 2, 0, 1));
    CHECK_OK(mt_mirror_evict(w.store, 2));
    check(&w);
}

TEST(open_refuses_buffers_that_hold_nothing)
{
    mt_disk *d = NULL;

    WORLD(w, 1, 0);
    CHECK_EQ(mt_disk_open(&w.cx, mt_file_blocks(w.file), NULL, 0, BUFFER, &d), MT_EINVAL);
    CHECK_EQ(mt_disk_open(&w.cx, mt_file_blocks(w.file), NULL, 1, BUFFER - 4096, &d), MT_EINVAL);
    CHECK_EQ(mt_disk_open(&w.cx, mt_file_blocks(w.file), NULL, 1, BUFFER + 1, &d), MT_EINVAL);
    CHECK_EQ(mt_disk_open(&w.cx, mt_file_blocks(w.file), NULL, 1 << 20, (size_t)1 << 50, &d),
             MT_ENOMEM);
    mt_disk_close(NULL);
}

/* ---- weights on disk --------------------------------------------------------------------- */

static float value(int u, int p, int64_t i)
{
    return (float)(u + 1) + 0.25f * (float)p + (float)(i % 999) / 8.0f;
}

/* Weights are in the file, and no host memory has any. The feed has few buffers,
 * each of a piece's weights. */
static void open_fed(world *w, int n_buffers, int dawdle_us, int delay_us)
{
    open_store(w, delay_us, 0);
    open_disk(w, n_buffers, 1);
    REQUIRE_OK(mt_feed_open(w->cx.disk, (size_t)n_buffers * 30000));
    for (int u = 0; u < UNITS; u++) {
        for (int p = 0; p < PARAMS; p++)
            for (int64_t i = 0; i < numels[u][p]; i++)
                plane(w, u, p, MT_PLANE_HI)[i] = w->hi[u][p][i] = value(u, p, i);
        CHECK_OK(mt_mirror_push(w->store, u, -1, 1u << MT_PLANE_HI));
        CHECK_OK(mt_mirror_release(w->store, u));
    }
    CHECK_EQ(mt_store_bytes(w->store, MT_PLANE_HI), 0);
    atomic_store(&disk.dawdle_us, dawdle_us);
}

#define FED(w, ...) CLOSED_BY(close_world) world w; open_fed(&w, __VA_ARGS__)

/* As the mover does it: into a slot, with what comes next known. */
static mt_status fetch(world *w, int u, char *slot)
{
    int       next[2] = { (u + 1) % UNITS, (u + 2) % UNITS };
    uint64_t  version;
    mt_status st, end;

    mt_feed_next(w->cx.feed, u);
    mt_feed_expect(w->cx.feed, next, 2);
    if ((st = mt_ledger_fetch_begin(w->store, u, &version)) != MT_OK)
        return st;
    st = mt_feed_copy(w->cx.feed, u, slot, w->h2d);
    end = mt_ledger_fetching(w->store, u, w->h2d);
    return st != MT_OK ? st : end;
}

static char *slot_of(world *w, int u)
{
    size_t bytes = mt_store_hi_bytes(w->store, u);
    char  *slot = malloc(bytes);

    REQUIRE(slot != NULL);
    memset(slot, 0xff, bytes);
    return slot;
}

/* Slots are filled one after the other, and looked at when the last copy is over. */
static void fetch_from(world *w, int first, int n)
{
    char *slot[UNITS];

    for (int i = 0; i < n; i++) {
        slot[i] = slot_of(w, first + i);
        CHECK_OK(fetch(w, first + i, slot[i]));
    }
    CHECK_OK(w->dev->ops->sync(w->h2d));
    for (int i = 0, u = first; i < n; i++, u++) {
        for (int p = 0; p < PARAMS; p++)
            compare((float *)(void *)(slot[i] + mt_store_offset(w->store, u, p)), w->hi[u][p],
                    numels[u][p], "fetched weight", u, p);
        free(slot[i]);
    }
}

static void fetch_all(world *w)
{
    fetch_from(w, 0, UNITS);
}

/* Fetches while updates of other units are under way, and their writes. */
static void step_and_fetch(world *w, int backwards)
{
    step_and(w, backwards, fetch_all);
}

TEST(fetches_bring_what_updates_have_written)
{
    for (int n_buffers = 1; n_buffers <= 9; n_buffers += UNDER_TSAN ? 8 : 4)
        for (int us = 0; us <= 800; us += 800) {
            FED(w, n_buffers, us, us);
            fetch_all(&w);
            for (int i = 0; i < 4; i++)
                step_and_fetch(&w, i == 2);
            fetch_all(&w);
            CHECK_EQ(mt_store_bytes(w.store, MT_PLANE_HI), 0);
            check(&w);
            step_and_fetch(&w, 0);
            check(&w);
            CHECK_OK(mt_ledger_check(w.store));
        }
}

static void *release(void *arg)
{
    sleep_ms(20);
    atomic_store(&disk.holding, 0);
    return NULL;
}

/* The next read, or write, takes 20 ms: what should wait for it has time to come too early. */
static pthread_t hold_next(atomic_int *which)
{
    atomic_store(&disk.holding, 1);
    atomic_store(which, 1);
    return thread_start(release, NULL);
}

/* FED: else its sum would be compared with that of what was written meanwhile. */
TEST(an_update_waits_for_reads_of_its_weights_ahead)
{
    static const int first = 0;

    FED(w, 4, 0, 0);
    for (int i = 0; i < 3; i++) {
        step_and_fetch(&w, 0);
        mt_feed_expect(w.cx.feed, &first, 0);
        fetch_all(&w);                   /* the last one's piece in every buffer */
        read_as_far_as_it_goes(&w);      /* of the first unit's states, too */
        pthread_t thread = hold_next(&disk.hold_read);
        mt_feed_expect(w.cx.feed, &first, 1);
        CHECK_OK(update(&w, 0, all, PARAMS, 0));
        read_as_far_as_it_goes(&w);
        thread_join(thread);
        fetch_all(&w);
        CHECK_OK(mt_ledger_check(w.store));
    }
}

static void *fetch_first(void *arg)
{
    deed *f = arg;

    f->st = fetch(f->w, 0, f->slot);
    return NULL;
}

/* The update waits for the fetch that began before it, so that must not wait for the update. */
TEST(a_fetch_that_began_reads_on_when_an_update_is_announced)
{
    FED(w, 2, 0, 0);
    mt_ledger_watchdog(w.store, 5);
    deed     f = (deed){ .w = &w, .slot = slot_of(&w, 0) };
    atomic_store(&disk.stalled, 1);
    pthread_t thread = thread_start(fetch_first, &f);
    sleep_ms(20);
    errand e = (errand){ .w = &w, .params = all, .n = PARAMS, .unit = 0, .step = 1 };
    CHECK_OK(put(&w, &e));
    atomic_store(&disk.stalled, 0);
    CHECK_OK(over(&w, &e));
    thread_join(thread);
    CHECK_OK(f.st);
    CHECK_OK(mt_ledger_check(w.store));
    free(f.slot);
}

/* WRITTEN: the unit's update is over, and its first piece is still on its way to the disk. */
TEST(a_fetch_waits_for_the_write_of_what_it_reads)
{
    FED(w, 9, 0, 0);
    step_and_fetch(&w, 0);
    read_as_far_as_it_goes(&w);
    pthread_t thread = hold_next(&disk.hold_write);
    CHECK_OK(update(&w, 0, all, PARAMS, 0));
    fetch_all(&w);
    thread_join(thread);
    CHECK_OK(mt_ledger_check(w.store));
}

/* PUSHED: what was read ahead is not used, and what is being read is waited for. */
TEST(a_push_meets_no_read_ahead_of_its_weights)
{
    static const int second = 1;

    FED(w, 4, 0, 0);
    fetch_all(&w);
    for (int held = 0; held < 2; held++) {
        CHECK_OK(mt_mirror_bring(w.store, 1, 1u << MT_PLANE_HI));
        read_as_far_as_it_goes(&w);
        plane(&w, 1, 0, MT_PLANE_HI)[3] = w.hi[1][0][3] = (float)(17 + held);
        pthread_t thread = hold_next(held ? &disk.hold_read : &disk.hold_write);
        mt_feed_expect(w.cx.feed, &second, 1);
        if (!held)
            read_as_far_as_it_goes(&w);
        CHECK_OK(mt_mirror_push(w.store, 1, 0, 1u << MT_PLANE_HI));
        thread_join(thread);
        fetch_from(&w, 1, 1);
        CHECK_OK(mt_ledger_check(w.store));
    }
}

TEST(weights_are_read_ahead_before_anybody_fetches_them)
{
    static const int units[2] = { 1, 2 };

    FED(w, 9, 0, 0);
    uint64_t read = mt_disk_stats_get(w.disk).read_bytes;
    mt_feed_expect(w.cx.feed, units, 2);
    read_as_far_as_it_goes(&w);
    CHECK(mt_disk_stats_get(w.disk).read_bytes > read + mt_store_hi_bytes(w.store, 1));
    read = mt_disk_stats_get(w.disk).read_bytes;
    mt_feed_expect(w.cx.feed, units, 0);
    fetch_all(&w);               /* those are given up for what is fetched first */
    CHECK(mt_disk_stats_get(w.disk).read_bytes > read);
    CHECK(mt_disk_stats_get(w.disk).buffer_bytes > 10 * BUFFER);
}

static void *keep_fetching(void *arg)
{
    deed *m = arg;
    FREED char *slot = slot_of(m->w, m->unit);

    while (!atomic_load(&m->stop))
        CHECK_OK(fetch(m->w, m->unit, slot));
    CHECK_OK(m->w->dev->ops->sync(m->w->h2d));
    return NULL;
}

/* PUSHED: fetches of the unit go on meanwhile. What they bring is old or new;
 * none reads what is being written. */
TEST(weights_are_written_from_outside_while_they_are_fetched)
{
    FED(w, 3, 300, 0);
    deed m = { .w = &w, .unit = 1 };
    step_and_fetch(&w, 0);
    pthread_t thread = thread_start(keep_fetching, &m);
    for (int i = 0; i < 8; i++)
        for (int p = 0; p < PARAMS; p++) {
            CHECK_OK(mt_mirror_bring(w.store, 1, 1u << MT_PLANE_HI));
            for (int64_t k = 0; k < numels[1][p]; k++)
                plane(&w, 1, p, MT_PLANE_HI)[k] = w.hi[1][p][k] = value(i, p, k);
            CHECK_OK(mt_mirror_push(w.store, 1, p, 1u << MT_PLANE_HI));
        }
    atomic_store(&m.stop, 1);
    thread_join(thread);
    fetch_all(&w);
    step_and_fetch(&w, 0);
    check(&w);
    CHECK_OK(mt_ledger_check(w.store));
}

/* LoRA: large weights that are not trained, small ones between them that are. */
TEST(what_is_not_trained_is_read_by_fetches_alone)
{
    mt_param_desc    d[3] = { { MT_F32, 30000, 0 }, { MT_F32, 500, 1 }, { MT_F32, 30000, 0 } };
    static const int second = 1;

    FED(w, 2, 0, 0);
    mt_feed_close(w.cx.feed);
    int unit = store_add(w.store, "lora", d, 3);
    CHECK_OK(mt_disk_add(w.disk, unit, 1));
    REQUIRE_OK(mt_feed_open(w.cx.disk, 0));
    CHECK_OK(mt_mirror_push(w.store, unit, -1, 1u << MT_PLANE_HI));
    mt_disk_stats before = mt_disk_stats_get(w.disk);
    run_errand(&w, &second, 1, unit, 1);
    /* Waits for what is written of it. */
    CHECK_OK(mt_mirror_bring(w.store, unit, 1u << MT_PLANE_M));
    mt_disk_stats now = mt_disk_stats_get(w.disk);
    /* 500 weights, 1,000 moments */
    CHECK_EQ(now.written_bytes - before.written_bytes, 2 * MT_BLOCK_ALIGN);
    for (int step = 2; step <= 3; step++)
        run_errand(&w, &second, 1, unit, step);
    read_as_far_as_it_goes(&w);          /* ahead too, for a fourth */
    /* What was read ahead when M was brought may have been read again,
     * but nothing of what is frozen was. */
    CHECK(mt_disk_stats_get(w.disk).read_bytes - now.read_bytes < 30000 * sizeof(float));
}

/* Buffers of the feed were made for pieces of weights with their states:
 * one without would not fit. */
TEST(what_is_trained_is_settled_when_weights_go_to_disk)
{
    mt_param_desc d = { MT_F32, 40000, 1 };

    WORLD(w, 2, 0);
    int unit = store_add(w.store, "late", &d, 1);
    CHECK_OK(mt_disk_add(w.disk, unit, 1));
    REQUIRE_OK(mt_feed_open(w.cx.disk, 0));
    CHECK_OK(mt_store_set_trainable(w.store, unit, 0, 0));
    CHECK_FAILS(mt_mirror_push(w.store, unit, -1, 1u << MT_PLANE_HI), MT_ESTATE, "unit late");
    CHECK_SAYS("fetches have buffers of");
}

TEST(a_fetch_that_fails_is_a_fault_that_names_its_weights)
{
    world w;

    open_fed(&w, 3, 0, 0);
    char *slot = slot_of(&w, 1);
    atomic_store(&disk.fail_read, 1);
    CHECK_FAILS(fetch(&w, 1, slot), MT_EDISK, "plane HI of parameter ");
    CHECK_SAYS("reading");
    CHECK_EQ(mt_ledger_check(w.store), MT_EDISK);
    close_world(&w);
    free(slot);

    open_world(&w, 1, 0);
    REQUIRE_OK(mt_feed_open(w.cx.disk, 0));
    CHECK_FAILS(mt_feed_copy(w.cx.feed, 0, NULL, w.h2d), MT_ESTATE, "unit first");
    close_world(&w);
}

/* Not pushed yet, or told and not pushed: the update would be one of older weights. */
TEST(weights_that_the_file_does_not_have_are_kept_and_not_updated)
{
    const unsigned hi = 1u << MT_PLANE_HI;

    FED(w, 3, 0, 0);
    CHECK_OK(mt_mirror_bring(w.store, 1, hi));
    CHECK_OK(mt_ledger_wait_fetch(w.store, 1));
    plane(&w, 1, 0, MT_PLANE_HI)[3] = 17;
    mt_ledger_touch(w.store, 1);
    CHECK_OK(mt_mirror_evict(w.store, 1));
    CHECK(plane(&w, 1, 0, MT_PLANE_HI)[3] == 17);
    CHECK_FAILS(update(&w, 1, all, PARAMS, 99), MT_ESTATE, "unit second");
    CHECK_SAYS("push them first");
}

/* LoRA: what an update leaves as it is, is not read again, and its values are not overwritten. */
TEST(an_update_makes_stale_what_it_changes)
{
    static const int last[1] = { 3 };

    FED(w, 3, 0, 0);
    step(&w, 0);
    CHECK_OK(mt_mirror_bring(w.store, 1, 1u << MT_PLANE_HI));
    read_as_far_as_it_goes(&w);
    CHECK_OK(update(&w, 1, last, 1, 0));
    read_as_far_as_it_goes(&w);
    uint64_t read = mt_disk_stats_get(w.disk).read_bytes;
    CHECK_OK(mt_mirror_bring(w.store, 1, 1u << MT_PLANE_HI));
    CHECK(mt_disk_stats_get(w.disk).read_bytes - read < mt_store_hi_bytes(w.store, 1));
    check(&w);
}

static void *visits_first(void *arg)
{
    deed *v = arg;

    v->st = v->push ? mt_mirror_push(v->w->store, 0, 3, 1u << MT_PLANE_V)
                    : mt_mirror_bring(v->w->store, 0, MT_STATE_PLANES);
    atomic_store(&v->over, 1);
    return NULL;
}

/* The first unit's visitor stands still in the middle of a piece. Others come and go; the watchdog
 * ends them if they wait. */
TEST(who_is_at_a_unit_waits_for_nobody_at_another)
{
    for (int push = 0; push < 2; push++) {
        atomic_int *held = push ? &disk.hold_write : &disk.hold_read;
        int         rounds = 0;

        WORLD(w, 1, 0);
        deed v = { .w = &w, .push = push };
        step(&w, 0);
        step(&w, 0);
        read_as_far_as_it_goes(&w);
        if (push)
            CHECK_OK(mt_mirror_bring(w.store, 0, 1u << MT_PLANE_V));
        mt_ledger_watchdog(w.store, 5);
        atomic_store(&disk.holding, 1);
        atomic_store(held, 1);
        pthread_t thread = thread_start(visits_first, &v);
        UNTIL(atomic_load(held) <= 0);
        for (int i = 0; i < 6; i++) {
            int u = 1 + i % 2;

            rounds += mt_mirror_bring(w.store, u, MT_STATE_PLANES) == MT_OK &&
                      mt_mirror_push(w.store, u, 3, 1u << MT_PLANE_M) == MT_OK &&
                      mt_mirror_release(w.store, u) == MT_OK &&
                      update(&w, u, all, PARAMS, 0) == MT_OK;
        }
        CHECK_EQ(rounds, 6);
        CHECK_EQ(atomic_load(&v.over), 0);
        atomic_store(&disk.holding, 0);
        thread_join(thread);
        CHECK_OK(v.st);
        CHECK_EQ(mt_disk_stats_get(w.disk).buffer_bytes, 3 * BUFFER);    /* of two visitors */
        check(&w);
    }
}
