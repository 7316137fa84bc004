/* test_disk.c — states in a file give the same numbers as states in memory, whatever is read when. */
#include "check.h"
#include "../../csrc/core/clock.h"
#include "../../csrc/core/disk.h"
#include "../../csrc/io/file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <time.h>

#define UNITS   3
#define PARAMS  4
#define BUFFER  MT_DISK_LEAST
#define UPDATE_BYTES 1000u               /* of any update, for the timeline */

/* In pieces of 64 KiB: parts of several parameters in one, and one parameter in several. */
static const int64_t numels[UNITS][PARAMS] = { { 5000, 1, 0, 30001 }, { 20000, 777, 4096, 8192 }, { 3, 2, 40000, 1 } };

/* ---- transfers that dawdle, or fail -------------------------------------------------------- */

static struct {
    atomic_int dawdle_us;        /* at most, before each */
    atomic_int reads, writes;    /* so far */
    atomic_int fail_read, fail_write;        /* the n-th from now on fails; 0: none */
    atomic_int stalled;                      /* reads wait until it is 0 */
} disk;

static int struck(atomic_int *n)
{
    return atomic_load(n) > 0 && atomic_fetch_sub(n, 1) == 1;
}

static void dawdle(uint64_t seed)
{
    int             most = atomic_load(&disk.dawdle_us);
    uint64_t        z = (seed + 1) * 0x9e3779b97f4a7c15u;
    struct timespec t = { 0, most > 0 ? (long)((z >> 33) % (uint64_t)most) * 1000 : 0 };

    if (most > 0)
        nanosleep(&t, NULL);
}

static ssize_t slow_read(int fd, void *p, size_t bytes, off_t at)
{
    dawdle((uint64_t)atomic_fetch_add(&disk.reads, 1));
    while (atomic_load(&disk.stalled))
        nanosleep(&(struct timespec){ 0, 1000000 }, NULL);
    if (struck(&disk.fail_read)) {
        errno = EIO;
        return -1;
    }
    return pread(fd, p, bytes, at);
}

static ssize_t slow_write(int fd, const void *p, size_t bytes, off_t at)
{
    dawdle(3 * (uint64_t)atomic_fetch_add(&disk.writes, 1));
    if (struck(&disk.fail_write)) {
        errno = EIO;
        return -1;
    }
    return pwrite(fd, p, bytes, at);
}

static int through_the_cache(int fd, int on)
{
    (void)fd;
    (void)on;
    return EINVAL;
}

static const mt_file_calls calls = { slow_read, slow_write, posix_fallocate, through_the_cache };

/* ---- a store with its states in a file, and the same numbers in plain memory --------------- */

typedef struct world {
    char      dir[64];
    mt_dev   *dev;
    mt_store *store;
    mt_pool  *pool;
    mt_file  *file;
    mt_disk  *disk;
    float    *hi[UNITS][PARAMS], *m[UNITS][PARAMS], *v[UNITS][PARAMS];       /* what is right */
    int       step;
} world;

static float *plane(world *w, int u, int p, mt_plane plane)
{
    void *at;

    REQUIRE(mt_store_at(w->store, u, p, plane, &at) == MT_OK);
    return at;
}

static void make_units(world *w)
{
    static const char *const names[UNITS] = { "first", "second", "third" };

    for (int u = 0; u < UNITS; u++) {
        mt_param_desc d[PARAMS];
        int           unit;

        for (int p = 0; p < PARAMS; p++) {
            d[p] = (mt_param_desc){ MT_F32, numels[u][p], 1 };
            w->hi[u][p] = calloc((size_t)numels[u][p] + 1, sizeof(float));
            w->m[u][p] = calloc((size_t)numels[u][p] + 1, sizeof(float));
            w->v[u][p] = calloc((size_t)numels[u][p] + 1, sizeof(float));
        }
        REQUIRE(mt_store_add(w->store, names[u], d, PARAMS, &unit) == MT_OK);
    }
}

static void open_world(world *w, int n_buffers, int dawdle_us)
{
    *w = (world){ .dir = "/tmp/mt_test_disk.XXXXXX" };
    REQUIRE(mkdtemp(w->dir) != NULL);
    atomic_store(&disk.dawdle_us, dawdle_us);
    atomic_store(&disk.fail_read, 0);
    atomic_store(&disk.fail_write, 0);
    REQUIRE(mt_dev_cpu_open(&w->dev) == MT_OK);
    REQUIRE(mt_pool_open(1, &w->pool) == MT_OK);
    REQUIRE(mt_store_open(w->dev, NULL, &w->store) == MT_OK);
    make_units(w);
    REQUIRE(mt_file_open(w->dir, 0, 3, &calls, &w->file) == MT_OK);
    REQUIRE(mt_disk_open(w->store, mt_file_blocks(w->file), n_buffers > 2 ? w->pool : NULL, n_buffers, BUFFER,
                         &w->disk) == MT_OK);
    for (int u = 0; u < UNITS; u++)
        REQUIRE(mt_disk_add(w->disk, u) == MT_OK);
    REQUIRE(mt_file_reserve(w->file, mt_disk_need(w->disk)) == MT_OK);
}

static void close_world(world *w)
{
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

/* One element, the same operations on both sides. */
#define UPDATE(hi, m, v, i, step) \
    ((m) += (float)((step) + (int)((i) % 5)), (v) += 2 * (m), (hi) += (v) - (float)((i) % 3))

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

    (void)pool;
    CHECK(clip == 0.5f);
    if (++e->calls == e->fail)
        return MT_FAIL(MT_EINVAL, "the errand failed");
    for (int i = 0; i < n; i++) {
        const mt_part *k = &parts[i];
        float *hi = plane(e->w, e->unit, k->param, MT_PLANE_HI);
        float *m = k->at[MT_PLANE_M], *v = k->at[MT_PLANE_V];
        int    ours = 0;

        for (int p = 0; p < e->n; p++)
            ours |= e->params[p] == k->param;
        CHECK_EQ(k->from % MT_DISK_GRAIN, 0);
        m = m != NULL ? m : plane(e->w, e->unit, k->param, MT_PLANE_M) + k->from;
        v = v != NULL ? v : plane(e->w, e->unit, k->param, MT_PLANE_V) + k->from;
        for (int64_t x = 0; ours && x < k->n; x++)
            UPDATE(hi[k->from + x], m[x], v[x], k->from + x, e->step);
    }
    return MT_OK;
}

/* Announced and put; what is right is updated too, unless it is to fail. */
static mt_status put(world *w, errand *e)
{
    mt_disk_job j = { .unit = e->unit, .params = e->params, .n_params = e->n, .bytes = UPDATE_BYTES,
                      .compute = update_parts, .free = errand_over, .arg = e };

    for (int k = 0; k < e->n && e->fail == 0 && e->unit < UNITS; k++) {
        int p = e->params[k];

        for (int64_t i = 0; i < numels[e->unit][p]; i++)
            UPDATE(w->hi[e->unit][p][i], w->m[e->unit][p][i], w->v[e->unit][p][i], i, e->step);
    }
    mt_ledger_update_begin(w->store, e->unit);
    return mt_disk_put(w->disk, &j, 0.5f);
}

static mt_status over(world *w, errand *e)
{
    mt_status st = mt_ledger_wait_updates(w->store, e->unit);

    (void)mt_disk_wait(w->disk);
    CHECK_EQ(e->over, 1);
    return st;
}

static mt_status update(world *w, int u, const int *params, int n, int fail)
{
    errand    e = { .w = w, .params = params, .n = n, .unit = u, .fail = fail, .step = w->step };
    mt_status st = put(w, &e), ended = over(w, &e);

    return st != MT_OK ? st : ended;
}

static const int all[PARAMS] = { 0, 1, 2, 3 };

/* Of all units; none waits for another. */
static void step(world *w, int backwards)
{
    errand e[UNITS];

    w->step++;
    for (int i = 0; i < UNITS; i++) {
        e[i] = (errand){ .w = w, .params = all, .n = PARAMS, .unit = backwards ? UNITS - 1 - i : i, .step = w->step };
        CHECK_OK(put(w, &e[i]));
    }
    for (int i = 0; i < UNITS; i++)
        CHECK_OK(over(w, &e[i]));
}

static void compare(const float *got, const float *want, int64_t n, const char *what, int u, int p)
{
    for (int64_t i = 0; i < n; i++)
        if (got[i] != want[i]) {
            CHECK_PRINT_("%s of unit %d, parameter %d, element %lld: %g, expected %g", what, u, p, (long long)i,
                         (double)got[i], (double)want[i]);
            CHECK(got[i] == want[i]);
            return;
        }
}

/* The unit that was updated last comes first: it is still being written. */
static void check(world *w)
{
    for (int u = UNITS - 1; u >= 0; u--) {
        CHECK_OK(mt_disk_bring(w->disk, u, MT_STATE_PLANES));
        for (int p = 0; p < PARAMS; p++) {
            compare(plane(w, u, p, MT_PLANE_HI), w->hi[u][p], numels[u][p], "weight", u, p);
            compare(plane(w, u, p, MT_PLANE_M), w->m[u][p], numels[u][p], "M", u, p);
            compare(plane(w, u, p, MT_PLANE_V), w->v[u][p], numels[u][p], "V", u, p);
        }
    }
}

/* ---- tests ------------------------------------------------------------------------------- */

static void updates_are_those_of_states_in_memory(void)
{
    static const int some[2] = { 3, 0 };

    for (int n_buffers = 1; n_buffers <= 12; n_buffers = n_buffers * 2 + 1)
        for (int dawdle_us = 0; dawdle_us <= 800; dawdle_us += 800) {
            world w;

            open_world(&w, n_buffers, dawdle_us);
            for (int i = 0; i < 3; i++)
                step(&w, 0);
            step(&w, 1);                                 /* in another order than was read ahead for */
            step(&w, 1);
            CHECK_OK(update(&w, 1, some, 2, 0));         /* some parameters; a unit twice, others not at all */
            CHECK_OK(update(&w, 1, &some[0], 1, 0));
            check(&w);
            step(&w, 0);
            check(&w);
            CHECK(mt_disk_stats_get(w.disk).busy_ns > 0);
            close_world(&w);
        }
}

/* Nothing is under way any more, and so nothing begins. */
static void read_as_far_as_it_goes(world *w)
{
    struct timespec nap = { 0, 1000000 };
    mt_disk_stats   before, now = mt_disk_stats_get(w->disk);
    int             quiet = 0;

    while (quiet < 3) {
        before = now;
        nanosleep(&nap, NULL);
        now = mt_disk_stats_get(w->disk);
        quiet = now.read_bytes == before.read_bytes && now.written_bytes == before.written_bytes ? quiet + 1 : 0;
    }
}

static void pieces_are_read_ahead_before_anybody_asks(void)
{
    struct timespec nap = { 0, 1000000 };
    uint64_t        once, twice;
    world           w;

    open_world(&w, 4, 0);
    once = mt_disk_need(w.disk);         /* the first step's pieces were never written, and are not read */
    twice = 2 * once;
    step(&w, 0);
    step(&w, 0);
    for (int i = 0; i < 20000 && (mt_disk_stats_get(w.disk).read_bytes < once + 2 * BUFFER ||
                                  mt_disk_stats_get(w.disk).written_bytes < twice); i++)
        nanosleep(&nap, NULL);
    CHECK(mt_disk_stats_get(w.disk).read_bytes >= once + 2 * BUFFER);
    CHECK(mt_disk_stats_get(w.disk).read_bytes <= once + 4 * BUFFER);
    CHECK_EQ(mt_disk_stats_get(w.disk).written_bytes, twice);
    CHECK_EQ(mt_disk_stats_get(w.disk).buffer_bytes, 5 * BUFFER);
    step(&w, 0);
    check(&w);
    close_world(&w);
}

/* An update of later parameters alone, when its unit's first pieces are in all buffers, and what it wants is what
 * would be read next. */
static void what_was_read_ahead_may_be_passed_over(void)
{
    static const int last[1] = { 3 };

    for (int n_buffers = 1; n_buffers < 4; n_buffers++)
        for (int u = 0; u < UNITS; u++) {
            world w;

            open_world(&w, n_buffers, 0);
            step(&w, 0);
            for (int i = 0; i < 2; i++) {
                CHECK_OK(update(&w, (u + UNITS - 1) % UNITS, all, PARAMS, 0));   /* reads ahead of u */
                read_as_far_as_it_goes(&w);
                CHECK_OK(update(&w, u, last, 1, 0));
            }
            check(&w);
            close_world(&w);
        }
}

static void copies_take_memory_only_from_a_read_to_the_next_update(void)
{
    world  w;
    size_t weights;

    open_world(&w, 2, 0);
    step(&w, 0);
    weights = mt_store_bytes(w.store, MT_PLANE_COUNT);
    CHECK_EQ(mt_store_bytes(w.store, MT_PLANE_M), 0);
    CHECK_OK(mt_disk_bring(w.disk, 0, 1u << MT_PLANE_M | 1u << MT_PLANE_HI));
    CHECK(mt_store_bytes(w.store, MT_PLANE_M) > 0);
    CHECK_EQ(mt_store_bytes(w.store, MT_PLANE_V), 0);
    compare(plane(&w, 0, 3, MT_PLANE_M), w.m[0][3], numels[0][3], "M", 0, 3);
    step(&w, 0);
    CHECK_EQ(mt_store_bytes(w.store, MT_PLANE_COUNT), weights);
    check(&w);
    close_world(&w);
}

/* The piece that is read first was given to the disk last. */
static void a_reader_waits_for_the_write_of_what_it_reads(void)
{
    world w;

    open_world(&w, 3, 5000);
    step(&w, 0);
    for (int i = 0; i < 8; i++) {
        CHECK_OK(update(&w, 0, &all[1], 1, 0));
        CHECK_OK(mt_disk_bring(w.disk, 0, 1u << MT_PLANE_V));
        compare(plane(&w, 0, 1, MT_PLANE_V), w.v[0][1], 1, "V", 0, 1);
    }
    close_world(&w);
}

/* Reads ahead that are slow are still under way when the piece is written: by a push, and by an update in
 * another order than was read ahead for. */
static void nothing_is_written_while_it_is_read_for_nobody(void)
{
    world w;

    open_world(&w, 6, 3000);
    step(&w, 0);
    for (int i = 0; i < 12; i++) {
        step(&w, i % 2);
        for (int p = PARAMS - 1; p >= 0; p--) {
            for (int64_t k = 0; k < numels[0][p]; k++)
                plane(&w, 0, p, MT_PLANE_V)[k] = w.v[0][p][k] = (float)(i + k % 5);
            CHECK_OK(mt_disk_push(w.disk, 0, p, 1u << MT_PLANE_V));
        }
    }
    check(&w);
    CHECK_OK(mt_ledger_check(w.store));
    close_world(&w);
}

/* One parameter's plane changes; what was read ahead of it is not used, and its neighbours stay. */
static void what_is_pushed_is_what_the_next_update_reads(void)
{
    world w;

    for (int n_buffers = 1; n_buffers < 12; n_buffers += 5) {
        open_world(&w, n_buffers, 300);
        CHECK_OK(mt_disk_push(w.disk, 2, 2, 1u << MT_PLANE_M));  /* before the first update: zeros */
        step(&w, 0);
        step(&w, 0);
        for (int u = 0; u < UNITS; u++)
            for (int p = 0; p < PARAMS; p += 3) {
                for (int64_t i = 0; i < numels[u][p]; i++)
                    plane(&w, u, p, MT_PLANE_V)[i] = w.v[u][p][i] = (float)(i % 11);
                CHECK_OK(mt_disk_push(w.disk, u, p, 1u << MT_PLANE_V));
            }
        step(&w, 0);
        check(&w);
        CHECK_EQ(mt_disk_push(w.disk, 0, PARAMS, 1u << MT_PLANE_V), MT_EINVAL);
        CHECK_HAS(mt_last_error(), "first");
        close_world(&w);
    }
}

/* Of the second unit; new values, which the next update reads. */
static uint64_t bytes_read_by_push(world *w, int param)
{
    uint64_t before = mt_disk_stats_get(w->disk).read_bytes;

    for (int64_t i = 0; i < numels[1][param]; i++)
        plane(w, 1, param, MT_PLANE_V)[i] = w->v[1][param][i] = (float)(i % 9);
    CHECK_OK(mt_disk_push(w->disk, 1, param, 1u << MT_PLANE_V));
    return mt_disk_stats_get(w->disk).read_bytes - before;
}

/* Parameters are pushed one by one; what is in the piece that came last need not come again, until it changes. */
static void a_piece_that_several_pushes_change_is_read_once(void)
{
    world w;

    open_world(&w, 1, 0);
    step(&w, 0);
    read_as_far_as_it_goes(&w);                          /* of the first unit, which stays */
    for (int i = 0; i < 3; i++) {
        CHECK(bytes_read_by_push(&w, 1) > 0);
        CHECK_EQ(bytes_read_by_push(&w, 1), 0);
        step(&w, 0);
        read_as_far_as_it_goes(&w);
    }
    check(&w);
    close_world(&w);
}

static void parameters_that_come_later_keep_their_states_in_memory(void)
{
    mt_param_desc d[2] = { { MT_F32, 9000, 0 }, { MT_F32, 500, 1 } };
    static const int both[2] = { 0, 1 };
    world         w;
    int           unit;

    open_world(&w, 2, 0);
    REQUIRE(mt_store_add(w.store, "lora", d, 2, &unit) == MT_OK);
    CHECK_OK(mt_disk_add(w.disk, unit));
    CHECK_OK(mt_disk_add(w.disk, unit));                 /* once is enough */
    for (int i = 0; i < 3; i++) {
        errand e = { .w = &w, .params = both + (i == 0), .n = 1 + (i > 0), .unit = unit, .step = i + 1 };

        if (i == 1)
            CHECK_OK(mt_store_set_trainable(w.store, unit, 0, 1));
        CHECK_OK(put(&w, &e));
        CHECK_OK(over(&w, &e));
        CHECK_EQ(e.calls, 1 + (i > 0));
    }
    CHECK(plane(&w, unit, 0, MT_PLANE_M)[8999] == 5 + 2 * (float)(8999 % 5));        /* of steps 2 and 3 */
    CHECK_EQ(mt_store_bytes(w.store, MT_PLANE_M), 9000 * 4 + (4096 - 9000 * 4 % 4096) % 4096);
    CHECK_OK(mt_disk_bring(w.disk, unit, MT_STATE_PLANES));
    CHECK(plane(&w, unit, 0, MT_PLANE_M)[8999] == 5 + 2 * (float)(8999 % 5));
    CHECK(plane(&w, unit, 1, MT_PLANE_M)[1] == 6 + 3);
    close_world(&w);
}

/* Whichever transfer fails: it is the ledger's fault, with its name, and nobody waits for ever. */
static void a_transfer_that_fails_is_a_fault_that_names_what_was_lost(void)
{
    for (int write = 0; write < 2; write++)
        for (int n = 1; n < 12; n += 3) {
            world     w;
            mt_status st = MT_OK;

            open_world(&w, 3, 0);
            step(&w, 0);
            atomic_store(write ? &disk.fail_write : &disk.fail_read, n);
            for (int i = 0; i < 4 && st == MT_OK; i++) {
                w.step++;
                for (int u = 0; u < UNITS && st == MT_OK; u++)
                    st = update(&w, u, all, PARAMS, 0);
            }
            CHECK_EQ(st, MT_EDISK);
            CHECK_HAS(mt_last_error(), "unit ");
            CHECK_HAS(mt_last_error(), "plane ");
            CHECK_HAS(mt_last_error(), "of parameter ");
            CHECK_HAS(mt_last_error(), write ? ".states: writing" : ".states: reading");
            CHECK_EQ(mt_disk_bring(w.disk, 0, MT_STATE_PLANES), MT_EDISK);
            close_world(&w);
        }
}

static void a_changed_byte_names_its_unit_and_plane(void)
{
    world          w;
    DIR           *d;
    struct dirent *e;
    char           path[400] = "", bad = 0x7f;
    int            fd;

    open_world(&w, 1, 0);
    step(&w, 0);
    step(&w, 0);
    d = opendir(w.dir);
    while ((e = readdir(d)) != NULL)
        if (strstr(e->d_name, ".states") != NULL)
            snprintf(path, sizeof path, "%s/%.200s", w.dir, e->d_name);
    closedir(d);
    CHECK_OK(mt_disk_bring(w.disk, 2, 1u << MT_PLANE_M));                   /* all is written */
    fd = open(path, O_RDWR);
    REQUIRE(fd >= 0);
    CHECK_EQ(pwrite(fd, &bad, 1, (off_t)mt_disk_need(w.disk) - 5000), 1);
    close(fd);
    CHECK_EQ(mt_disk_bring(w.disk, 2, 1u << MT_PLANE_V), MT_EDISK);
    /* The piece is one block: anything in it may be what changed. */
    CHECK_HAS(mt_last_error(), "unit third, from plane M of parameter 2 to plane V of parameter 3");
    CHECK_HAS(mt_last_error(), path);
    CHECK_HAS(mt_last_error(), "offset");
    close_world(&w);
}

/* Its fault ends every wait, and jobs behind it are only ended. */
static void a_computation_that_fails_is_a_fault(void)
{
    errand behind = { .params = all, .n = PARAMS, .unit = 1 };
    world  w;

    open_world(&w, 2, 0);
    step(&w, 0);
    behind.w = &w;
    CHECK_EQ(update(&w, 2, all, PARAMS, 1), MT_EINVAL);  /* its first piece */
    CHECK_HAS(mt_last_error(), "the errand failed");
    CHECK_OK(put(&w, &behind));
    CHECK_EQ(over(&w, &behind), MT_EINVAL);
    CHECK_EQ(behind.calls, 0);
    close_world(&w);
}

/* Updates go on while nobody waits for them; close finishes them. */
static void close_finishes_what_was_put_and_weights_wait_for_their_copies(void)
{
    errand          e[UNITS];
    world           w;
    mt_queue       *q;
    uint64_t        version;
    struct timespec nap = { 0, 5000000 };

    open_world(&w, 3, 300);
    REQUIRE(w.dev->ops->queue_adopt(w.dev, 0, &q) == MT_OK);
    CHECK_OK(mt_ledger_fetch_begin(w.store, 0, &version));       /* a mover about to copy the first unit */
    for (int u = 0; u < UNITS; u++) {
        mt_disk_job j = { .unit = u, .params = all, .n_params = PARAMS, .compute = update_parts,
                          .free = errand_over, .arg = &e[u] };

        e[u] = (errand){ .w = &w, .params = all, .n = PARAMS, .unit = u };
        mt_ledger_update_begin(w.store, u);
        CHECK_OK(mt_disk_put(w.disk, &j, 0.5f));
    }
    nanosleep(&nap, NULL);
    CHECK_EQ(mt_disk_stats_get(w.disk).busy_ns, 0);
    CHECK_OK(mt_ledger_fetching(w.store, 0, q));
    mt_disk_close(w.disk);
    w.disk = NULL;
    for (int u = 0; u < UNITS; u++) {
        CHECK(e[u].over == 1 && e[u].calls > 1);
        CHECK_OK(mt_ledger_wait_updates(w.store, u));
    }
    w.dev->ops->queue_close(q);
    close_world(&w);
}

/* A drive that answers no more: the request is named, and ends the updates that wait for it. */
static void a_stalled_drive_is_named(void)
{
    errand    e = { .params = all, .n = PARAMS, .unit = 0, .fail = 99 };
    world     w;
    mt_status st;

    open_world(&w, 1, 0);
    step(&w, 0);
    CHECK_OK(mt_disk_bring(w.disk, 2, MT_STATE_PLANES));         /* all is written */
    mt_ledger_watchdog(w.store, 0.1);
    atomic_store(&disk.stalled, 1);
    e.w = &w;
    CHECK_OK(put(&w, &e));
    CHECK_EQ(mt_ledger_wait_updates(w.store, 0), MT_ESTUCK);
    CHECK_HAS(mt_last_error(), "disk, unit first waits for a piece to be read (READ), since ");
    atomic_store(&disk.stalled, 0);
    st = mt_disk_wait(w.disk);                                   /* a fault, if the updates' own wait ended too */
    CHECK(st == MT_OK || st == MT_ESTUCK);
    CHECK_EQ(e.over, 1);
    close_world(&w);
}

/* Who reads on the host is told so too, and may ask again: what came late is not taken for what it asks for then. */
static void a_stalled_read_for_the_host_is_named(void)
{
    world w;

    open_world(&w, 1, 0);
    step(&w, 0);
    CHECK_OK(mt_disk_bring(w.disk, 2, MT_STATE_PLANES));         /* all is written */
    mt_ledger_watchdog(w.store, 0.1);
    atomic_store(&disk.stalled, 1);
    CHECK_EQ(mt_disk_bring(w.disk, 1, MT_STATE_PLANES), MT_ESTUCK);
    CHECK_HAS(mt_last_error(), "disk, unit second waits for a piece to be read for the host (WRITTEN), since ");
    CHECK_HAS(mt_last_error(), "; the caller, unit second waits for a piece");
    CHECK_EQ(mt_disk_bring(w.disk, 0, MT_STATE_PLANES), MT_ESTUCK);
    atomic_store(&disk.stalled, 0);
    check(&w);
    CHECK_OK(mt_ledger_check(w.store));
    close_world(&w);
}

/* A push that failed half-way has changed the bounce buffer, and not the file. */
static void what_was_not_pushed_is_not_read(void)
{
    world w;

    open_world(&w, 1, 0);
    step(&w, 0);
    CHECK_OK(mt_disk_bring(w.disk, 2, MT_STATE_PLANES));
    plane(&w, 2, 0, MT_PLANE_M)[0] = 77;
    mt_store_drop(w.store, 2, MT_PLANE_V);
    REQUIRE(mt_store_set_trainable(w.store, 2, 0, 0) == MT_OK);
    CHECK_EQ(mt_disk_push(w.disk, 2, 0, 1u << MT_PLANE_M | 1u << MT_PLANE_V), MT_EINVAL);
    REQUIRE(mt_store_set_trainable(w.store, 2, 0, 1) == MT_OK);
    CHECK_OK(mt_disk_chill(w.disk, 2));
    check(&w);
    close_world(&w);
}

/* Each update has its unit's bytes in the timeline once, whichever of its pieces is wanted. */
static void an_updates_bytes_are_recorded_whatever_it_leaves_out(void)
{
    static const int some[3][2] = { { 0, 1 }, { 2, 1 }, { 0, 3 } };
    mt_timeline     *t;
    mt_record        r[64];
    uint64_t         bytes = 0;
    world            w;

    open_world(&w, 3, 0);
    REQUIRE(mt_timeline_open(w.dev, &t) == MT_OK);
    CHECK_OK(mt_timeline_on(t, 1));
    mt_disk_timeline(w.disk, t);
    for (int i = 0; i < 3; i++)
        CHECK_OK(update(&w, 2, some[i], 1 + i / 2, 0));
    for (int64_t n = mt_timeline_read(t, r, 64); n > 0; n--)
        bytes += r[n - 1].lane == MT_LANE_DISK_UPDATE ? r[n - 1].bytes : 0;
    CHECK_EQ(bytes, 3 * UPDATE_BYTES);
    check(&w);
    mt_disk_close(w.disk);
    w.disk = NULL;
    mt_timeline_close(t);
    close_world(&w);
}

static void a_unit_has_one_home(void)
{
    mt_param_desc d[1] = { { MT_BF16, 100, 1 } };
    world         w;
    void         *p;
    int           unit;

    open_world(&w, 1, 0);
    REQUIRE(mt_store_add(w.store, "settled", d, 1, &unit) == MT_OK);
    CHECK_OK(mt_store_settle(w.store, unit));
    CHECK_EQ(mt_disk_add(w.disk, unit), MT_ESTATE);
    REQUIRE(mt_store_add(w.store, "through", d, 1, &unit) == MT_OK);
    CHECK_OK(mt_store_set_through(w.store, unit, 1));
    CHECK_EQ(mt_disk_add(w.disk, unit), MT_ESTATE);
    REQUIRE(mt_store_add(w.store, "used", d, 1, &unit) == MT_OK);
    CHECK_OK(mt_store_at(w.store, unit, 0, MT_PLANE_LO, &p));
    CHECK_EQ(mt_disk_add(w.disk, unit), MT_ESTATE);
    CHECK_HAS(mt_last_error(), "plane LO");
    CHECK_EQ(mt_store_settle(w.store, 0), MT_ESTATE);
    CHECK_EQ(mt_store_set_through(w.store, 0, 1), MT_ESTATE);
    CHECK_EQ(mt_store_on_disk(w.store, 0), 1);
    CHECK_EQ(mt_store_on_disk(w.store, unit), 0);
    CHECK_OK(mt_disk_bring(w.disk, unit, MT_STATE_PLANES));      /* nothing to do */
    CHECK_EQ(mt_disk_add(w.disk, 77), MT_EINVAL);
    CHECK_EQ(update(&w, unit, all, 0, 0), MT_EINVAL);            /* and it is a fault, like any failed update */
    close_world(&w);
}

static void open_refuses_buffers_that_hold_nothing(void)
{
    world    w;
    mt_disk *d = NULL;

    open_world(&w, 1, 0);
    CHECK_EQ(mt_disk_open(w.store, mt_file_blocks(w.file), NULL, 0, BUFFER, &d), MT_EINVAL);
    CHECK_EQ(mt_disk_open(w.store, mt_file_blocks(w.file), NULL, 1, BUFFER - 4096, &d), MT_EINVAL);
    CHECK_EQ(mt_disk_open(w.store, mt_file_blocks(w.file), NULL, 1, BUFFER + 1, &d), MT_EINVAL);
    CHECK_EQ(mt_disk_open(w.store, mt_file_blocks(w.file), NULL, 1 << 20, (size_t)1 << 50, &d), MT_EINVAL);
    mt_disk_close(NULL);
    close_world(&w);
}

#define TESTS(X)                                                    \
    X(updates_are_those_of_states_in_memory)                        \
    X(pieces_are_read_ahead_before_anybody_asks)                    \
    X(what_was_read_ahead_may_be_passed_over)                       \
    X(copies_take_memory_only_from_a_read_to_the_next_update)       \
    X(a_reader_waits_for_the_write_of_what_it_reads)                \
    X(nothing_is_written_while_it_is_read_for_nobody)               \
    X(what_is_pushed_is_what_the_next_update_reads)                 \
    X(a_piece_that_several_pushes_change_is_read_once)              \
    X(parameters_that_come_later_keep_their_states_in_memory)       \
    X(a_transfer_that_fails_is_a_fault_that_names_what_was_lost)    \
    X(a_changed_byte_names_its_unit_and_plane)                      \
    X(a_computation_that_fails_is_a_fault)                          \
    X(close_finishes_what_was_put_and_weights_wait_for_their_copies) \
    X(a_stalled_read_for_the_host_is_named)                         \
    X(what_was_not_pushed_is_not_read)                              \
    X(a_stalled_drive_is_named)                                     \
    X(an_updates_bytes_are_recorded_whatever_it_leaves_out)         \
    X(a_unit_has_one_home)                                          \
    X(open_refuses_buffers_that_hold_nothing)
CHECK_MAIN(TESTS)
