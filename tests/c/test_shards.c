/* test_shards.c — files written from memory block by block: what is in them, who is told when,
 * what goes wrong. */
#include "check.h"
#include "../../csrc/io/shards.h"
#include "../../csrc/io/sum.h"

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
    extents[0][0] = (mt_extent){ 0, header, sizeof header, -1, NULL };
    extents[0][1] = (mt_extent){ sizeof header, plane[0], bytes_of[0], 0, NULL };
    extents[0][2] = (mt_extent){ sizeof header + bytes_of[0], plane[1], bytes_of[1], 1, NULL };
    extents[1][0] = (mt_extent){ 0, plane[2], bytes_of[2], 2, NULL };
    extents[1][1] = (mt_extent){ bytes_of[2], plane[0], 5000, 0, NULL };
    shards[0] = (mt_shard){ path[0], sizeof header + bytes_of[0] + bytes_of[1], extents[0], 3,
                            sums[0] };
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

#define SHARDS_TEST(name) TEST_BETWEEN(name, setup(), teardown())

/* ---- what a save is told ------------------------------------------------------------------- */

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static int             begun[UNITS], ended[UNITS], order[UNITS], n_ended;     /* mu */
static int             wish = -1;

static mt_status begin(void *arg, int unit)
{
    pthread_mutex_lock(&mu);
    begun[unit]++;
    pthread_mutex_unlock(&mu);
    return arg != NULL && unit == *(int *)arg
               ? MT_FAIL(MT_ESTATE, "unit %d cannot be brought", unit) : MT_OK;
}

/* From here on the unit's memory may change: what is written must be what it was. */
static void end(void *arg, int unit)
{
    pthread_mutex_lock(&mu);
    ended[unit]++;
    order[n_ended++ % UNITS] = unit;
    pthread_mutex_unlock(&mu);
    memset(plane[unit], 'x', bytes_of[unit]);
}

static int wanted(void *arg)
{
    return wish;
}

static mt_shards_how how(void)
{
    memset(begun, 0, sizeof begun);
    memset(ended, 0, sizeof ended);
    n_ended = 0;
    wish = -1;
    return (mt_shards_how){ .n_copiers = 2, .n_writers = 2, .n_units = UNITS, .begin = begin,
                            .end = end, .wanted = wanted };
}

/* Bytes that were written, when all is. */
static uint64_t finished(mt_shards *w)
{
    uint64_t bytes = 0;

    for (int over = 0; !over;)
        CHECK_OK(mt_shards_wait(w, 0.01, &bytes, &over));
    mt_shards_close(w);
    return bytes;
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

SHARDS_TEST(files_hold_what_memory_held_before_it_was_let_go)
{
    char *before[UNITS], *back = malloc(3 * BLOCK + 70000);

    for (int u = 0; u < UNITS; u++) {
        before[u] = malloc(bytes_of[u]);
        memcpy(before[u], plane[u], bytes_of[u]);
    }
    CHECK_OK(run(how()));
    check_all_ended_once();
    CHECK_EQ(begun[1], 1);
    for (int u = 0; u < UNITS; u++) {
        mt_extent one = { .at = u == 2 ? 0 : u == 0 ? sizeof header : sizeof header + bytes_of[0],
                          .mem = back, .bytes = bytes_of[u], .unit = -1 };
        mt_shard  s = shards[u == 2];

        s.extents = &one;
        s.n_extents = 1;
        CHECK_OK(mt_shards_read(&s, 3, NULL));
        CHECK(memcmp(back, before[u], bytes_of[u]) == 0);
        free(before[u]);
    }
    free(back);
}

enum { PARTS = 7 };                                 /* more than there are blocks */

typedef struct together {
    uint64_t   sums[2][8];
    mt_shard   files[2];
    mt_shards *w;
} together;

static void write_part(together *p, int part, int parts)
{
    mt_shards_how h = { .n_copiers = 1, .n_writers = 2, .n_units = UNITS, .part = part,
                        .parts = parts };

    memset(p, 0, sizeof *p);
    for (int i = 0; i < 2; i++) {
        p->files[i] = shards[i];
        p->files[i].sums = p->sums[i];
    }
    CHECK_OK(mt_shards_write(p->files, 2, h, &p->w));
}

/* Bytes that it wrote. Its sums are not another's. */
static uint64_t finish_part(together *p, uint64_t sum[2][8])
{
    uint64_t bytes = finished(p->w);
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < 8; k++) {
            CHECK(sum[i][k] == 0 || p->sums[i][k] == 0);
            sum[i][k] |= p->sums[i][k];
        }
    return bytes;
}

SHARDS_TEST(processes_write_the_same_files_together)
{
    static together p[PARTS];
    uint64_t        want[2][8], bytes;

    for (int parts = 1; parts <= PARTS; parts++) {
        uint64_t sum[2][8] = { { 0 } };

        bytes = 0;
        for (int k = 0; k < parts; k++)
            write_part(&p[k], k, parts);
        for (int k = parts; k-- > 0;)
            bytes += finish_part(&p[k], sum);
        CHECK_EQ(bytes, shards[0].bytes + shards[1].bytes);
        if (parts == 1)
            memcpy(want, sum, sizeof want);
        CHECK(memcmp(sum, want, sizeof want) == 0);
        for (int i = 0; i < 2; i++) {
            mt_shard s = shards[i];

            s.sums = sum[i];
            s.n_extents = 0;
            CHECK_OK(mt_shards_read(&s, 2, NULL));       /* of that size, and these sums */
            unlink(path[i]);
        }
    }
    write_part(&p[0], 0, 2);
    mt_shards_close(p[0].w);
    unlink(path[1]);
    CHECK_EQ(mt_shards_write(shards, 2, (mt_shards_how){ .n_copiers = 1, .n_writers = 1,
                                                         .n_units = UNITS, .part = 1, .parts = 2 },
                             &p[1].w), MT_EDISK);
    CHECK_SAYS(path[1]);     /* nobody made it */
}

SHARDS_TEST(wanted_unit_is_let_go_first)
{
    mt_shards_how h = how();

    h.n_copiers = h.n_writers = 1;
    wish = 2;
    CHECK_OK(run(h));
    CHECK_EQ(order[0], 2);
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
    return ENOSPC;
}

SHARDS_TEST(full_disk_is_told_and_lets_all_units_go)
{
    mt_file_calls late = mt_file_system, early = mt_file_system;

    late.write = no_space;
    early.allocate = none_left;
    mt_shards_how h = how();
    h.calls = &late;
    CHECK_FAILS(run(h), MT_EDISK, "No space left");
    check_all_ended_once();
    unlink(path[0]);
    unlink(path[1]);
    h = how();
    h.calls = &early;
    CHECK_EQ(run(h), MT_EDISK);
    check_all_ended_once();
}

SHARDS_TEST(failures_before_and_between_let_all_units_go)
{
    int        bad = 1;
    mt_shards *w = NULL;

    mt_shards_how h = how();
    h.arg = &bad;
    CHECK_EQ(run(h), MT_ESTATE);
    check_all_ended_once();
    CHECK_EQ(run(how()), MT_EDISK);                    /* the files are there */
    CHECK_SAYS(path[0]);
    check_all_ended_once();
    unlink(path[0]);
    unlink(path[1]);
    CHECK_OK(mt_shards_write(shards, 2, how(), &w));
    mt_shards_close(w);                                /* at once */
    check_all_ended_once();
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

SHARDS_TEST(writes_that_are_refused_or_short_go_on)
{
    mt_file_calls c = mt_file_system;
    mt_shards_how h = how();

    c.write = refuse_direct;
    h.calls = &c;
    CHECK_OK(run(h));
    shards[0].n_extents = 0;
    CHECK_OK(mt_shards_read(&shards[0], 2, NULL));
}

static ssize_t take_a_little(int fd, const void *p, size_t bytes, off_t at)
{
    return pwrite(fd, p, bytes > 100 ? 100 : bytes, at);
}

/* Direct transfers go on from a multiple of the alignment only: less than that is no progress. */
SHARDS_TEST(a_file_system_that_takes_less_than_a_page_is_told)
{
    mt_file_calls c = mt_file_system;
    mt_shards_how h = how();

    c.write = take_a_little;
    h.calls = &c;
    CHECK_FAILS(run(h), MT_EDISK, "the file system took only 100 of them");
    CHECK(strstr(mt_last_error(), "file ends") == NULL);
}

static atomic_int stalled;

static ssize_t stall(int fd, const void *p, size_t bytes, off_t at)
{
    UNTIL(!atomic_load(&stalled));
    return pwrite(fd, p, bytes, at);
}

/* A drive that does not answer: its file is in the list, until it does. */
SHARDS_TEST(a_stalled_write_is_listed_by_its_file)
{
    mt_file_calls c = mt_file_system;
    mt_shards_how h = how();
    mt_shards    *w = NULL;
    mt_watch      watch;
    uint64_t      bytes;
    char          text[400] = "", part[200];
    int           over = 0;
    mt_status     st = MT_OK;

    mt_watch_open(&watch, NULL);
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
}

SHARDS_TEST(other_bytes_and_other_sizes_are_told)
{
    int fd;

    CHECK_OK(run(how()));
    shards[0].n_extents = 0;
    CHECK_OK(mt_shards_read(&shards[0], 2, NULL));
    REQUIRE((fd = open(path[0], O_RDWR)) >= 0);
    CHECK_EQ(pwrite(fd, "!", 1, (off_t)BLOCK + 17), 1);
    CHECK_EQ(mt_shards_read(&shards[0], 2, NULL), MT_EDISK);
    CHECK_SAYS("offset 4194304 are not those that were written");
    CHECK_EQ(ftruncate(fd, 5000), 0);
    CHECK_FAILS(mt_shards_read(&shards[0], 2, NULL), MT_EDISK, "has 5000 bytes");
    close(fd);
}

/* A tensor [A, B, 1, C] that lies in memory as [A, C, B]: in pieces of a file,
 * from any byte to any other. */
SHARDS_TEST(turned_tensors_are_row_major_in_files)
{
    enum { A = 300000, B = 3, C = 2 };
    FREED uint32_t *memory = malloc(A * B * C * 4), *right = malloc(A * B * C * 4),
                   *back = malloc(A * B * C * 4);
    mt_turn   turn = { .dims = 4, .item = 4, .shape = { A, B, 1, C },
                       .stride = { B * C * 4, 4, 77, B * 4 } };
    mt_extent turned[2] = { { 0, header, 17, -1, NULL }, { 17, memory, A * B * C * 4, 0, &turn } };
    mt_shard  file = { .extents = turned, .n_extents = 2, .bytes = 17 + A * B * C * 4,
                       .sums = sums[0] };
    mt_shards_how h = how();
    mt_shards *w = NULL;

    file.path = path[0];
    for (uint32_t a = 0, n = 0; a < A; a++)
        for (uint32_t b = 0; b < B; b++)
            for (uint32_t c = 0; c < C; c++, n++)
                right[n] = memory[a * B * C + c * B + b] = n * 2654435761u;
    h.end = NULL;
    CHECK_OK(mt_shards_write(&file, 1, h, &w));
    (void)finished(w);
    turned[1].mem = back;
    CHECK_OK(mt_shards_read(&file, 2, NULL));
    CHECK(memcmp(back, memory, A * B * C * 4) == 0);
    turned[1].turn = NULL;
    CHECK_OK(mt_shards_read(&file, 2, NULL));
    CHECK(memcmp(back, right, A * B * C * 4) == 0);
}

/* ---- many units: who is begun beside whom --------------------------------------------------- */

#define MANY 8
#define PLANES 2

static char      *mem[MANY];    /* of unit u: its bytes in file 0, then those in file 1 */
static size_t     part[MANY][PLANES], taking[MANY];
static size_t     there, most;  /* mu. Bytes of units between begin and end; the most there were */
static int        open_now, most_open, firsts[MANY], n_firsts;

static mt_status begin_many(void *arg, int unit)
{
    pthread_mutex_lock(&mu);
    there += taking[unit];
    open_now += taking[unit] > 0;
    most = there > most ? there : most;
    most_open = open_now > most_open ? open_now : most_open;
    firsts[n_firsts++ % MANY] = unit;
    pthread_mutex_unlock(&mu);
    usleep(200);
    return MT_OK;
}

static void end_many(void *arg, int unit)
{
    memset(mem[unit], 'x', part[unit][0] + part[unit][1]);
    pthread_mutex_lock(&mu);
    there -= taking[unit];
    open_now -= taking[unit] > 0;
    pthread_mutex_unlock(&mu);
}

static int wanted_at_random(void *arg)
{
    unsigned *state = arg;

    *state = *state * 1103515245u + 12345u;              /* under the lock of the shards */
    return (int)(*state >> 16) % (2 * MANY) - MANY;
}

/* Units of `bytes` in file 0, three times that in file 1. shuffle: they lie in another order in
 * each, and in pieces. */
static void setup_many(size_t bytes, int shuffle, mt_shard *files, mt_extent *list)
{
    const char *tmp = getenv("TMPDIR");
    size_t      n = 0;

    snprintf(here, sizeof here, "%s/mt_test_shards.XXXXXX", tmp != NULL ? tmp : "/tmp");
    REQUIRE(mkdtemp(here) != NULL);
    for (int u = 0; u < MANY; u++) {
        part[u][0] = bytes + (size_t)u * 100;
        part[u][1] = 3 * part[u][0];
        taking[u] = u % 5 == 4 ? 0 : part[u][0] + part[u][1];          /* some are there */
        REQUIRE((mem[u] = malloc(part[u][0] + part[u][1])) != NULL);
        for (size_t i = 0; i < part[u][0] + part[u][1]; i++)
            mem[u][i] = (char)(i * 13 + i / 5000 + (size_t)u * 3);
    }
    for (int f = 0; f < PLANES; f++) {
        uint64_t at = 0;

        snprintf(path[f], sizeof path[f], "%s/%d", here, f);
        files[f] = (mt_shard){ .path = path[f], .extents = list + n, .sums = NULL };
        for (int half = 0; half < 2; half++)
            for (int k = 0; k < MANY; k++) {
                int    u = shuffle ? (k * 7 + f * 11) % MANY : k;
                size_t some = shuffle ? part[u][f] / 2 : half == 0 ? part[u][f] : 0;
                size_t from = half == 1 ? some : 0;

                if (half == 1)
                    some = part[u][f] - (shuffle ? some : part[u][f]);
                if (some == 0)
                    continue;
                list[n++] = (mt_extent){ at, mem[u] + (f == 0 ? 0 : part[u][0]) + from, some, u,
                                         NULL };
                at += some;
                files[f].n_extents++;
            }
        files[f].bytes = at;
        REQUIRE((files[f].sums = calloc(mt_block_count((size_t)at),
                                        sizeof *files[f].sums)) != NULL);
    }
    there = most = 0;
    open_now = most_open = n_firsts = 0;
}

static void write_many(size_t bytes, int shuffle, mt_shards_how h)
{
    mt_shard  files[PLANES];
    mt_extent list[2 * PLANES * MANY];
    char     *right[PLANES], *back;
    mt_shards *w = NULL;
    uint64_t  written = 0;
    int       over = 0;

    setup_many(bytes, shuffle, files, list);
    for (int f = 0; f < PLANES; f++) {
        REQUIRE((right[f] = malloc(files[f].bytes)) != NULL);
        for (size_t i = 0; i < files[f].n_extents; i++)
            memcpy(right[f] + files[f].extents[i].at, files[f].extents[i].mem,
                   files[f].extents[i].bytes);
    }
    h.brings = taking;
    h.n_units = MANY;
    h.begin = begin_many;
    h.end = end_many;
    mt_status st = mt_shards_write(files, PLANES, h, &w);
    for (int i = 0; i < 3000 && st == MT_OK && !over; i++)
        st = mt_shards_wait(w, 0.01, &written, &over);
    CHECK_OK(st);
    CHECK(over);
    mt_shards_close(w);
    CHECK_EQ(there, 0);
    for (int f = 0; f < PLANES; f++) {
        mt_extent all = { .at = 0, .bytes = files[f].bytes, .unit = -1 };
        mt_shard  s = files[f];

        REQUIRE((back = all.mem = malloc(files[f].bytes)) != NULL);
        s.extents = &all;
        s.n_extents = 1;
        CHECK_OK(mt_shards_read(&s, 2, NULL));
        CHECK(memcmp(back, right[f], files[f].bytes) == 0);
        free(back);
        free(right[f]);
        free(files[f].sums);
        unlink(path[f]);
    }
    CHECK_EQ(rmdir(here), 0);
    for (int u = 0; u < MANY; u++)
        free(mem[u]);
}

/* Whatever the blocks are that they share. */
TEST(one_unit_at_a_time_takes_memory)
{
    static const size_t sizes[] = { 300000, BLOCK / 4, BLOCK + 12345 };

    for (int i = 0; i < (UNDER_TSAN ? 1 : 3); i++)
        for (int copiers = i < 2 ? 1 : 4; copiers <= 4; copiers += 3) {
            size_t largest = 4 * (sizes[i] + (MANY - 1) * 100);

            write_many(sizes[i], 0, (mt_shards_how){ .n_copiers = copiers, .n_writers = 2 });
            CHECK(most <= (largest > BLOCK ? largest : BLOCK));
            CHECK(largest < BLOCK / 2 || most_open == 1);
            for (int u = 1; u < MANY && copiers == 1; u++)
                CHECK(firsts[u] > firsts[u - 1]);
        }
}

TEST(small_units_are_begun_together)
{
    for (int i = 0; i < 100 && (i == 0 || most_open < 2); i++)       /* copiers may run in turn */
        write_many(20000, 0, (mt_shards_how){ .n_copiers = 4, .n_writers = 2 });
    CHECK(most <= BLOCK);
    CHECK(most_open > 1);
}

/* With memory for few blocks, most of which wait for units that come much later,
 * or are wanted out of turn. */
TEST(any_order_comes_to_an_end)
{
    for (int shuffle = 0; shuffle < 2; shuffle++)
        for (unsigned seed = 0; seed < (UNDER_TSAN ? 2 : 3); seed++) {
            unsigned state = seed;

            write_many(seed % 2 ? 300000 : BLOCK / 4, shuffle, (mt_shards_how){
                .n_copiers = 1 + (int)seed % 3, .n_writers = shuffle ? 1 : 8,
                .wanted = wanted_at_random, .arg = &state });
            CHECK(shuffle || most <= (seed % 2 ? BLOCK : 4 * (BLOCK / 4 + MANY * 100)));
        }
}

static int signals = 3;

static int interrupted_allocate(int fd, off_t at, off_t bytes)
{
    return signals-- > 0 ? EINTR : posix_fallocate(fd, at, bytes);
}

static ssize_t slow_read(int fd, void *p, size_t bytes, off_t at)
{
    sleep_ms(60);
    return pread(fd, p, bytes, at);
}

static int yes(void)
{
    return 1;
}

SHARDS_TEST(signals_do_not_end_a_save_and_end_a_load)
{
    mt_file_calls calls = mt_file_system;
    mt_shards_how how = { .n_copiers = 1, .n_writers = 1, .n_units = UNITS };
    mt_shards    *w = NULL;

    calls.allocate = interrupted_allocate;
    calls.read = slow_read;
    how.calls = &calls;
    CHECK_OK(mt_shards_write(shards, 2, how, &w));
    CHECK(signals < 0);
    (void)finished(w);
    (void)mt_watch_asks(yes);
    CHECK_EQ(mt_shards_read(&shards[0], 1, &calls), MT_EINTR);
    (void)mt_watch_asks(NULL);
    CHECK_OK(mt_shards_read(&shards[0], 1, &calls));
}
