/* test_peers.c — the executable form of core/share.h: processes that have one store's planes in
 * common. Most ranks here are threads of one process, each with a device, a store and workers of
 * its own on one share; where one has to die, or be stopped, it is a process.
 */
#include "check.h"
#include "toy.h"

#include "../../csrc/core/arena.h"
#include "../../csrc/core/portion.h"
#include "../../csrc/core/through.h"
#include "../../csrc/ops/sumsq.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

#define RANKS  4                 /* at most */
#define PARAMS 5

static const int numbers[] = { 1, 2, 3, 4 };

/* Two that are cut, one of less than a grain, one that cannot be trained, and one of none. */
static const mt_param_desc shapes[PARAMS] = {
    { MT_BF16, 70001, 1 }, { MT_F32, 40000, 1 }, { MT_F16, 63, 1 }, { MT_I64, 5, 0 },
    { MT_F32, 0, 1 }
};

/* A rank: a store on a share, and what works on it. */
typedef struct peer {
    mt_context cx;
    int        rank, ranks, unit;
} peer;

static void peer_open_with(peer *p, int fd, int rank, int ranks, mt_context with)
{
    *p = (peer){ .cx = with, .rank = rank, .ranks = ranks };
    REQUIRE(mt_dev_cpu_open(&p->cx.dev) == MT_OK);
    REQUIRE(mt_share_open(fd, rank, ranks, &p->cx.share) == MT_OK);
    REQUIRE(mt_store_open(&p->cx, &p->cx.store) == MT_OK);
}

static void peer_open(peer *p, int fd, int rank, int ranks)
{
    peer_open_with(p, fd, rank, ranks, (mt_context){ 0 });
    REQUIRE(mt_store_add(p->cx.store, "layers.0", shapes, PARAMS, &p->unit) == MT_OK);
}

static void peer_close(peer *p)
{
    mt_store_close(p->cx.store);
    mt_share_close(p->cx.share);
    p->cx.dev->ops->close(p->cx.dev);
}

static int share_new(void)
{
    int fd = -1;

    REQUIRE(mt_share_make(&fd) == MT_OK);
    return fd;
}

/* Ranks of one share, all with the one unit. */
static void table_open(peer *p, int ranks)
{
    int fd = share_new();

    for (int r = 0; r < ranks; r++)
        peer_open(&p[r], fd, r, ranks);
    close(fd);
}

static void table_close(peer *p, int ranks)
{
    for (int r = 0; r < ranks; r++)
        peer_close(&p[r]);
}

static char *at(const peer *p, int param, mt_plane plane)
{
    void *found = NULL;

    REQUIRE(mt_store_at(p->cx.store, p->unit, param, plane, &found) == MT_OK);
    return found;
}

static char *view(const peer *p, int param, mt_plane plane)
{
    void *found = NULL;

    REQUIRE(mt_store_view(p->cx.store, p->unit, param, plane, &found) == MT_OK);
    return found;
}

static size_t bytes_of(const peer *p, int param, mt_plane plane)
{
    return mt_store_plane_bytes(p->cx.store, p->unit, param, plane, shapes[param].numel);
}

/* ---- memory ------------------------------------------------------------------------------- */

/* Every byte that a rank writes of a parameter is where the others read it, and nowhere else. */
static void check_bytes(peer *p, int ranks, int param, mt_plane plane)
{
    size_t n = bytes_of(&p[0], param, plane);

    for (int r = 0; r < ranks; r++) {
        char mark = (char)(1 + 16 * (int)plane + 4 * param + r);

        memset(at(&p[r], param, plane), mark, n);
        for (int o = 0; o < ranks; o++)
            for (size_t i = 0; i < n; i += 61)
                if (at(&p[o], param, plane)[i] != mark) {
                    CHECK_EQ(at(&p[o], param, plane)[i], mark);
                    return;
                }
    }
}

static void a_plane_is_one_memory_for_all(void)
{
    for (size_t k = 0; k < sizeof numbers / sizeof *numbers; k++) {
        peer p[RANKS];

        table_open(p, numbers[k]);
        for (int i = 0; i < PARAMS; i++)
            for (int q = 0; q < MT_PLANE_COUNT; q++)
                if (bytes_of(&p[0], i, (mt_plane)q) > 0 &&
                    (q == MT_PLANE_HI || shapes[i].trainable))
                    check_bytes(p, numbers[k], i, (mt_plane)q);
        for (int i = 0; i + 1 < PARAMS; i++)             /* the last one wrote nobody else's */
            CHECK_EQ(at(&p[0], i, MT_PLANE_HI)[0], 1 + 4 * i + numbers[k] - 1);
        table_close(p, numbers[k]);
    }
}

/* Ranks that ask for planes in other orders, with other parameters trained and other states at
 * that moment, find the same places. */
static void what_is_trained_moves_nothing(void)
{
    peer p[2];

    table_open(p, 2);
    CHECK_OK(mt_store_set_trainable(p[1].cx.store, 0, 0, 0));
    at(&p[1], 1, MT_PLANE_M);
    CHECK_OK(mt_store_set_trainable(p[1].cx.store, 0, 0, 1));
    CHECK_OK(mt_store_set_states(p[0].cx.store, 0, MT_STATES_8BIT));
    for (int i = 0; i < 2; i++) {
        at(&p[0], i, MT_PLANE_M)[3] = (char)(7 + i);
        CHECK_EQ(at(&p[1], i, MT_PLANE_M)[3], 7 + i);
    }
    table_close(p, 2);
}

static void a_parameter_that_is_not_trained_has_no_states(void)
{
    peer  p[2];
    void *found;

    table_open(p, 2);
    at(&p[0], 1, MT_PLANE_M);
    CHECK_EQ(mt_store_made(p[0].cx.store, 0, 0, MT_PLANE_M, 0), 0);
    CHECK_OK(mt_store_set_trainable(p[0].cx.store, 0, 0, 0));
    CHECK_EQ(mt_store_at(p[0].cx.store, 0, 0, MT_PLANE_M, &found), MT_EINVAL);
    table_close(p, 2);
}

static size_t pages_of(int fd)
{
    struct stat is;

    REQUIRE(fstat(fd, &is) == 0);
    return (size_t)is.st_blocks * 512;
}

/* Of states each rank makes the pages of its own portion: together they have them once. */
static void each_commits_its_own_portion(void)
{
    enum { N = 3, ELEMENTS = 3 << 20 };
    mt_param_desc d = { MT_F32, ELEMENTS, 1 };
    int           fd = share_new(), unit;
    peer          p[N];
    size_t        before;

    for (int r = 0; r < N; r++) {
        peer_open_with(&p[r], fd, r, N, (mt_context){ 0 });
        REQUIRE(mt_store_add(p[r].cx.store, "big", &d, 1, &unit) == MT_OK);
        p[r].unit = unit;
    }
    before = pages_of(fd);
    for (int r = 0; r < N; r++) {
        at(&p[r], 0, MT_PLANE_M);
        CHECK_EQ(mt_store_bytes(p[r].cx.store, MT_PLANE_M), ELEMENTS / N * sizeof(float));
        CHECK_EQ(pages_of(fd) - before, ELEMENTS / N * sizeof(float) * (size_t)(r + 1));
    }
    at(&p[0], 0, MT_PLANE_M)[4 * ELEMENTS / 2] = 1;
    mt_store_decommit(p[0].cx.store, unit, MT_PLANE_M);  /* ram has no copies: nothing goes */
    CHECK_EQ(pages_of(fd) - before, ELEMENTS * sizeof(float));
    table_close(p, N);
    close(fd);
}

/* An arena in a range gives back what is kept there, less pages that have something else too. */
static void what_is_given_back_is_its_own(void)
{
    size_t    page = (size_t)sysconf(_SC_PAGESIZE);
    int       fd = share_new();
    mt_share *h[2];
    mt_range  range[2];
    mt_arena  a[2] = { { 0 } };
    size_t    before;

    for (int r = 0; r < 2; r++) {
        REQUIRE(mt_share_open(fd, r, 2, &h[r]) == MT_OK);
        REQUIRE(mt_share_take(h[r], 8 * page, &range[r]) == MT_OK);
        REQUIRE(mt_arena_range(&a[r], &range[r], 0, "test", 0) == MT_OK);
    }
    before = pages_of(fd);
    mt_arena_keep(&a[0], 0, 3 * page + 512);                 /* page 3 has something of both */
    mt_arena_keep(&a[1], 3 * page + 512, 4 * page);          /* page 7 something of one, in part */
    CHECK_OK(mt_arena_commit(&a[0], NULL, NULL));
    CHECK_EQ(pages_of(fd) - before, 4 * page);
    CHECK_OK(mt_arena_commit(&a[1], NULL, NULL));
    CHECK_EQ(pages_of(fd) - before, 8 * page);
    ((char *)a[0].base)[3 * page + 511] = 1;
    ((char *)a[0].base)[3 * page - 1] = 1;
    mt_arena_decommit(&a[1]);
    CHECK_EQ(pages_of(fd) - before, 5 * page);
    CHECK_EQ(((char *)a[1].base)[3 * page + 511], 1);
    CHECK_EQ(((char *)a[1].base)[3 * page - 1], 1);
    for (int r = 0; r < 2; r++) {
        mt_arena_close(&a[r]);
        mt_share_close(h[r]);
    }
    close(fd);
}

static void all_memory_goes_with_the_last(void)
{
    peer p[2];
    int  fd = share_new();

    for (int r = 0; r < 2; r++)
        peer_open(&p[r], fd, r, 2);
    at(&p[0], 0, MT_PLANE_HI);
    CHECK(pages_of(fd) > 140000);
    table_close(p, 2);
    close(fd);                                           /* nothing has its name */
}

/* ---- views -------------------------------------------------------------------------------- */

static void a_view_is_private_until_it_is_dropped(void)
{
    peer   p[2];
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char  *hi, *mine, *other;

    table_open(p, 2);
    hi = at(&p[0], 0, MT_PLANE_HI);
    mine = view(&p[0], 0, MT_PLANE_HI);
    other = view(&p[1], 0, MT_PLANE_HI);
    CHECK(mine != hi && mine == view(&p[0], 0, MT_PLANE_HI));
    hi[0] = hi[page] = 1;
    CHECK_EQ(mine[0], 1);                                /* read: the plane's */
    mine[0] = 2;
    CHECK_EQ(hi[0], 1);                                  /* written: its own */
    CHECK_EQ(other[0], 1);
    hi[0] = hi[page] = 3;
    CHECK_EQ(mine[0], 2);
    CHECK_EQ(mine[page], 3);                             /* what it has not written follows */
    CHECK_EQ(other[0], 3);
    mt_store_view_drop(p[0].cx.store, 0, 0, MT_PLANE_HI);
    CHECK_EQ(mine[0], 3);
    table_close(p, 2);
}

/* Parameters begin at pages, so that one's is dropped alone. */
static void a_drop_is_of_one_parameter(void)
{
    peer p;
    int  fd = share_new();

    peer_open(&p, fd, 0, 1);
    for (int i = 0; i < 3; i++)
        memset(view(&p, i, MT_PLANE_GRAD), 5, bytes_of(&p, i, MT_PLANE_GRAD));
    mt_store_view_drop(p.cx.store, 0, 1, MT_PLANE_GRAD);
    for (int i = 0; i < 3; i++) {
        size_t n = bytes_of(&p, i, MT_PLANE_GRAD);

        CHECK_EQ(view(&p, i, MT_PLANE_GRAD)[0], i == 1 ? 0 : 5);
        CHECK_EQ(view(&p, i, MT_PLANE_GRAD)[n - 1], i == 1 ? 0 : 5);
    }
    mt_store_view_drop(p.cx.store, 0, 2, MT_PLANE_M);    /* nobody asked for one: nothing to do */
    peer_close(&p);
    close(fd);
}

static void alone_a_view_is_the_plane(void)
{
    toy   t;
    void *at_view;

    toy_open(&t, 1, 0, 0);
    CHECK_OK(mt_store_view(t.store, 0, 1, MT_PLANE_HI, &at_view));
    CHECK(at_view == toy_at(&t, 0, 1, MT_PLANE_HI));
    mt_store_view_drop(t.store, 0, 1, MT_PLANE_HI);
    CHECK(((float *)at_view)[0] == toy_value(0, 1, 0));
    toy_close(&t);
}

/* ---- what is refused ---------------------------------------------------------------------- */

static void other_ranks_are_refused(void)
{
    int       fd = share_new(), plain = open("/dev/null", O_RDWR);
    mt_share *h, *other;

    REQUIRE(mt_share_open(fd, 1, 3, &h) == MT_OK);
    CHECK_EQ(mt_share_open(fd, 0, 2, &other), MT_EINVAL);
    CHECK_HAS(mt_last_error(), "rank 0 counts 2 ranks, others 3");
    CHECK_EQ(mt_share_open(fd, 1, 3, &other), MT_ESTATE);
    CHECK_HAS(mt_last_error(), "rank 1 is process");
    CHECK_EQ(mt_share_open(fd, 3, 3, &other), MT_EINVAL);
    CHECK_EQ(mt_share_open(fd, 0, MT_RANKS_MOST + 1, &other), MT_EINVAL);
    CHECK_EQ(mt_share_open(plain, 0, 3, &other), MT_EINVAL);
    CHECK_EQ(mt_share_open(-1, 0, 3, &other), MT_EINVAL);
    mt_share_close(h);
    CHECK_EQ(mt_share_open(fd, 1, 3, &h), MT_ESTATE);    /* its counters are where they were */
    close(fd);
    close(plain);
}

static void another_unit_is_refused_by_name(void)
{
    mt_param_desc d[PARAMS];
    peer          p[3];
    int           fd = share_new(), unit;

    memcpy(d, shapes, sizeof d);
    peer_open(&p[0], fd, 0, 3);
    peer_open_with(&p[1], fd, 1, 3, (mt_context){ 0 });
    peer_open(&p[2], fd, 2, 3);
    CHECK_EQ(mt_store_add(p[1].cx.store, "layers.1", shapes, PARAMS, &unit), MT_EINVAL);
    CHECK_HAS(mt_last_error(), "unit layers.1: rank 0 (process ");
    CHECK_HAS(mt_last_error(), "other parameters, than rank 1");
    CHECK_EQ(mt_store_units(p[1].cx.store), 0);
    table_close(p, 3);
    close(fd);
    for (int what = 0; what < 2; what++) {
        fd = share_new();
        d[1].numel = shapes[1].numel + (what == 0);
        d[1].dtype = what == 1 ? MT_BF16 : MT_F32;
        peer_open(&p[0], fd, 0, 2);
        peer_open_with(&p[1], fd, 1, 2, (mt_context){ 0 });
        CHECK_EQ(mt_store_add(p[1].cx.store, "layers.0", d, PARAMS, &unit), MT_EINVAL);
        table_close(p, 2);
        close(fd);
    }
}

static void homes_that_keep_planes_are_refused(void)
{
    peer p;
    int  fd = share_new();

    peer_open(&p, fd, 0, 1);
    CHECK_EQ(mt_store_move(p.cx.store, 0, &mt_home_vram, &p), MT_ENOTSUP);
    CHECK_HAS(mt_last_error(), "unit layers.0: processes share its memory");
    CHECK_EQ(mt_store_move(p.cx.store, 0, &mt_home_disk, &p), MT_ENOTSUP);
    CHECK_EQ(mt_store_set_passing(p.cx.store, 0), MT_ENOTSUP);
    CHECK_EQ(mt_store_own(p.cx.store, 0, 0, 2), MT_ESTATE);
    CHECK_OK(mt_store_move(p.cx.store, 0, &mt_home_through, &p));
    CHECK_OK(mt_store_move(p.cx.store, 0, &mt_home_ram, NULL));
    peer_close(&p);
    close(fd);
}

#define TESTS(X)                                     \
    X(a_plane_is_one_memory_for_all)                 \
    X(what_is_trained_moves_nothing)                 \
    X(a_parameter_that_is_not_trained_has_no_states) \
    X(each_commits_its_own_portion)                  \
    X(what_is_given_back_is_its_own)                 \
    X(all_memory_goes_with_the_last)                 \
    X(a_view_is_private_until_it_is_dropped)         \
    X(a_drop_is_of_one_parameter)                    \
    X(alone_a_view_is_the_plane)                     \
    X(other_ranks_are_refused)                       \
    X(another_unit_is_refused_by_name)               \
    X(homes_that_keep_planes_are_refused)
CHECK_MAIN(TESTS)
