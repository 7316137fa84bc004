/* test_shards.c — files written from memory block by block: what is in them, who is told when, what goes wrong. */
#include "check.h"
#include "../../csrc/io/shards.h"
#include "../../csrc/io/sum.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>

#define BLOCK MT_BLOCK_BYTES
#define UNITS 3

static char          here[128], path[2][160];
static char         *plane[UNITS];            /* of each unit */
static const size_t  bytes_of[UNITS] = { BLOCK + 1000, 2 * BLOCK, 70000 };
static char          header[40];
static uint64_t      sums[2][8];
static mt_extent     extents[2][4];
static mt_shard      shards[2];

/* File 0: a header, units 0 and 1; file 1: unit 2 and, again, unit 0's first bytes. */
static void setup(void)
{
    const char *tmp = getenv("TMPDIR");

    snprintf(here, sizeof here, "%s/mt_test_shards.XXXXXX", tmp != NULL ? tmp : "/tmp");
    REQUIRE(mkdtemp(here) != NULL);
    for (int i = 0; i < 2; i++)
        snprintf(path[i], sizeof path[i], "%s/%d", here, i);
    memset(header, 'h', sizeof header);
    for (int u = 0; u < UNITS; u++) {
        REQUIRE((plane[u] = malloc(bytes_of[u])) != NULL);
        for (size_t i = 0; i < bytes_of[u]; i++)
            plane[u][i] = (char)(i * 7 + i / 4096 + (size_t)u);
    }
    extents[0][0] = (mt_extent){ 0, header, sizeof header, -1 };
    extents[0][1] = (mt_extent){ sizeof header, plane[0], bytes_of[0], 0 };
    extents[0][2] = (mt_extent){ sizeof header + bytes_of[0], plane[1], bytes_of[1], 1 };
    extents[1][0] = (mt_extent){ 0, plane[2], bytes_of[2], 2 };
    extents[1][1] = (mt_extent){ bytes_of[2], plane[0], 5000, 0 };
    shards[0] = (mt_shard){ path[0], sizeof header + bytes_of[0] + bytes_of[1], extents[0], 3, sums[0] };
    shards[1] = (mt_shard){ path[1], bytes_of[2] + 5000, extents[1], 2, sums[1] };
}

static void teardown(void)
{
    for (int i = 0; i < 2; i++)
        unlink(path[i]);
    CHECK_EQ(rmdir(here), 0);
    for (int u = 0; u < UNITS; u++)
        free(plane[u]);
}

/* ---- what a save is told ------------------------------------------------------------------- */

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static int             begun[UNITS], ended[UNITS], order[UNITS], n_ended;     /* mu */
static int             wish = -1;

static mt_status begin(void *arg, int unit)
{
    pthread_mutex_lock(&mu);
    begun[unit]++;
    pthread_mutex_unlock(&mu);
    return arg != NULL && unit == *(int *)arg ? MT_FAIL(MT_ESTATE, "unit %d cannot be brought", unit) : MT_OK;
}

/* From here on the unit's memory may change: what is written must be what it was. */
static void end(void *arg, int unit)
{
    (void)arg;
    pthread_mutex_lock(&mu);
    ended[unit]++;
    order[n_ended++ % UNITS] = unit;
    pthread_mutex_unlock(&mu);
    memset(plane[unit], 'x', bytes_of[unit]);
}

static int wanted(void *arg)
{
    (void)arg;
    return wish;
}

static mt_shards_how how(void)
{
    memset(begun, 0, sizeof begun);
    memset(ended, 0, sizeof ended);
    n_ended = 0;
    wish = -1;
    return (mt_shards_how){ .n_copiers = 2, .n_writers = 2, .n_units = UNITS, .begin = begin, .end = end,
                            .wanted = wanted };
}

static mt_status run(mt_shards_how h)
{
    mt_shards *w = NULL;
    uint64_t   bytes = 0;
    int        over = 0;
    mt_status  st = mt_shards_write(shards, 2, h, &w);

    while (st == MT_OK && !over)
        st = mt_shards_wait(w, 0.01, &bytes, &over);
    if (st == MT_OK)
        CHECK_EQ(bytes, shards[0].bytes + shards[1].bytes);
    mt_shards_close(w);
    return st;
}

static void check_all_ended_once(void)
{
    for (int u = 0; u < UNITS; u++)
        CHECK_EQ(ended[u], 1);
}

/* ---- tests --------------------------------------------------------------------------------- */

static void files_hold_what_memory_held_before_it_was_let_go(void)
{
    char *before[UNITS], *back = malloc(3 * BLOCK + 70000);

    setup();
    for (int u = 0; u < UNITS; u++) {
        before[u] = malloc(bytes_of[u]);
        memcpy(before[u], plane[u], bytes_of[u]);
    }
    CHECK_OK(run(how()));
    check_all_ended_once();
    CHECK_EQ(begun[1], 1);
    for (int u = 0; u < UNITS; u++) {
        mt_extent one = { .at = u == 2 ? 0 : u == 0 ? sizeof header : sizeof header + bytes_of[0], .mem = back,
                          .bytes = bytes_of[u], .unit = -1 };
        mt_shard  s = shards[u == 2];

        s.extents = &one;
        s.n_extents = 1;
        CHECK_OK(mt_shards_read(&s, 3, NULL));
        CHECK(memcmp(back, before[u], bytes_of[u]) == 0);
        free(before[u]);
    }
    free(back);
    teardown();
}

static void wanted_unit_is_let_go_first(void)
{
    mt_shards_how h = how();

    setup();
    h.n_copiers = h.n_writers = 1;
    wish = 2;
    CHECK_OK(run(h));
    CHECK_EQ(order[0], 2);
    teardown();
}

static ssize_t no_space(int fd, const void *p, size_t bytes, off_t at)
{
    if (at == 0)
        return pwrite(fd, p, bytes, at);
    errno = ENOSPC;
    return -1;
}

static int none_left(int fd, off_t at, off_t bytes)
{
    (void)fd;
    (void)at;
    (void)bytes;
    return ENOSPC;
}

static void full_disk_is_told_and_lets_all_units_go(void)
{
    mt_file_calls late = mt_file_system, early = mt_file_system;
    mt_shards_how h;

    late.write = no_space;
    early.allocate = none_left;
    setup();
    h = how();
    h.calls = &late;
    CHECK_EQ(run(h), MT_EDISK);
    CHECK(strstr(mt_last_error(), "No space left") != NULL);
    check_all_ended_once();
    unlink(path[0]);
    unlink(path[1]);
    h = how();
    h.calls = &early;
    CHECK_EQ(run(h), MT_EDISK);
    check_all_ended_once();
    teardown();
}

static void failures_before_and_between_let_all_units_go(void)
{
    int           bad = 1;
    mt_shards    *w = NULL;
    mt_shards_how h;

    setup();
    h = how();
    h.arg = &bad;
    CHECK_EQ(run(h), MT_ESTATE);
    check_all_ended_once();
    CHECK_EQ(run(how()), MT_EDISK);                    /* the files are there */
    CHECK(strstr(mt_last_error(), path[0]) != NULL);
    check_all_ended_once();
    unlink(path[0]);
    unlink(path[1]);
    CHECK_OK(mt_shards_write(shards, 2, how(), &w));
    mt_shards_close(w);                                /* at once */
    check_all_ended_once();
    teardown();
}

/* Even a direct transfer that a file system refuses when it comes. */
static ssize_t refuse_direct(int fd, const void *p, size_t bytes, off_t at)
{
    if (fcntl(fd, F_GETFL) & O_DIRECT) {
        errno = EINVAL;
        return -1;
    }
    return pwrite(fd, p, bytes > 8192 ? 8192 + 100 : bytes, at);       /* and short ones */
}

static void writes_that_are_refused_or_short_go_on(void)
{
    mt_file_calls c = mt_file_system;
    mt_shards_how h = how();

    c.write = refuse_direct;
    setup();
    h.calls = &c;
    CHECK_OK(run(h));
    shards[0].n_extents = 0;
    CHECK_OK(mt_shards_read(&shards[0], 2, NULL));
    teardown();
}

static ssize_t take_a_little(int fd, const void *p, size_t bytes, off_t at)
{
    return pwrite(fd, p, bytes > 100 ? 100 : bytes, at);
}

/* Direct transfers go on from a multiple of the alignment only: less than that is no progress. */
static void a_file_system_that_takes_less_than_a_page_is_told(void)
{
    mt_file_calls c = mt_file_system;
    mt_shards_how h = how();

    c.write = take_a_little;
    setup();
    h.calls = &c;
    CHECK_EQ(run(h), MT_EDISK);
    CHECK_HAS(mt_last_error(), "the file system took only 100 of them");
    CHECK(strstr(mt_last_error(), "file ends") == NULL);
    teardown();
}

static atomic_int stalled;

static ssize_t stall(int fd, const void *p, size_t bytes, off_t at)
{
    while (atomic_load(&stalled))
        usleep(1000);
    return pwrite(fd, p, bytes, at);
}

/* A drive that does not answer: its file is in the list, until it does. */
static void a_stalled_write_is_listed_by_its_file(void)
{
    mt_file_calls c = mt_file_system;
    mt_shards_how h = how();
    mt_shards    *w = NULL;
    mt_watch      watch;
    uint64_t      bytes;
    char          text[400] = "", part[200];
    int           over = 0;
    mt_status     st = MT_OK;

    mt_watch_open(&watch);
    setup();
    c.write = stall;
    h.calls = &c;
    h.watch = &watch;
    atomic_store(&stalled, 1);
    CHECK_OK(mt_shards_write(shards, 2, h, &w));
    for (int i = 0; i < 5000 && text[0] == 0; i++) {
        usleep(1000);
        mt_watch_tell(&watch, text, sizeof text);
    }
    snprintf(part, sizeof part, "save waits for %s, since ", path[0]);
    CHECK_HAS(text, part);
    atomic_store(&stalled, 0);
    while (st == MT_OK && !over)
        st = mt_shards_wait(w, 0.01, &bytes, &over);
    CHECK_OK(st);
    mt_shards_close(w);
    mt_watch_tell(&watch, text, sizeof text);
    CHECK_STR(text, "");
    mt_watch_close(&watch);
    teardown();
}

static void other_bytes_and_other_sizes_are_told(void)
{
    int fd;

    setup();
    CHECK_OK(run(how()));
    shards[0].n_extents = 0;
    CHECK_OK(mt_shards_read(&shards[0], 2, NULL));
    REQUIRE((fd = open(path[0], O_RDWR)) >= 0);
    CHECK_EQ(pwrite(fd, "!", 1, (off_t)BLOCK + 17), 1);
    CHECK_EQ(mt_shards_read(&shards[0], 2, NULL), MT_EDISK);
    CHECK(strstr(mt_last_error(), "offset 4194304 are not those that were written") != NULL);
    CHECK_EQ(ftruncate(fd, 5000), 0);
    CHECK_EQ(mt_shards_read(&shards[0], 2, NULL), MT_EDISK);
    CHECK(strstr(mt_last_error(), "has 5000 bytes") != NULL);
    close(fd);
    teardown();
}

static int signals = 3;

static int interrupted_allocate(int fd, off_t at, off_t bytes)
{
    return signals-- > 0 ? EINTR : posix_fallocate(fd, at, bytes);
}

static ssize_t slow_read(int fd, void *p, size_t bytes, off_t at)
{
    nanosleep(&(struct timespec){ 0, 60000000 }, NULL);
    return pread(fd, p, bytes, at);
}

static int yes(void)
{
    return 1;
}

static void signals_do_not_end_a_save_and_end_a_load(void)
{
    mt_file_calls calls = mt_file_system;
    mt_shards_how how = { .n_copiers = 1, .n_writers = 1, .n_units = UNITS };
    mt_shards    *w = NULL;
    uint64_t      bytes;
    int           over = 0;

    setup();
    calls.allocate = interrupted_allocate;
    calls.read = slow_read;
    how.calls = &calls;
    CHECK_OK(mt_shards_write(shards, 2, how, &w));
    CHECK(signals < 0);
    while (!over)
        CHECK_OK(mt_shards_wait(w, 0.1, &bytes, &over));
    mt_shards_close(w);
    (void)mt_watch_asks(yes);
    CHECK_EQ(mt_shards_read(&shards[0], 1, &calls), MT_EINTR);
    (void)mt_watch_asks(NULL);
    CHECK_OK(mt_shards_read(&shards[0], 1, &calls));
    teardown();
}

#define TESTS(X)                                            \
    X(files_hold_what_memory_held_before_it_was_let_go)     \
    X(wanted_unit_is_let_go_first)                          \
    X(full_disk_is_told_and_lets_all_units_go)              \
    X(failures_before_and_between_let_all_units_go)         \
    X(writes_that_are_refused_or_short_go_on)               \
    X(a_file_system_that_takes_less_than_a_page_is_told)    \
    X(a_stalled_write_is_listed_by_its_file)                \
    X(other_bytes_and_other_sizes_are_told) \
    X(signals_do_not_end_a_save_and_end_a_load)

CHECK_MAIN(TESTS)
