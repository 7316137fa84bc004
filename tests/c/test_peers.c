/* test_peers.c — the executable form of core/share.h: processes that have one store's planes in
 * common. Most ranks here are threads of one process, each with a device, a store and workers of
 * its own on one share; where one has to die, or be stopped, it is a process.
 */
#include "check.h"
#include "toy.h"

#include "../../csrc/core/relay.h"
#include "../../csrc/core/resident_impl.h"
#include "../../csrc/core/store_impl.h"
#include "../../csrc/ops/sumsq.h"
#include "../../csrc/optim/adam.h"

#include <dlfcn.h>
#include <sys/stat.h>

CLOSES(mt_resident, mt_resident_close(*x))

#define RANKS  4                 /* at most */
#define PARAMS 5

/* Two that are cut, one of less than a grain, one that cannot be trained, and one of none. */
static const mt_param_desc shapes[PARAMS] = {
    { MT_BF16, 70001, 1 }, { MT_F32, 40000, 1 }, { MT_F16, 63, 1 }, { MT_I64, 5, 0 },
    { MT_F32, 0, 1 }
};

/* A rank: a store on a share, and what works on it. */
typedef struct peer {
    mt_context cx;
    int        rank, ranks, unit;
    mt_status  st;               /* what came of its script, and what it was told */
    char       why[512];
    pthread_t  thread;
} peer;

static void peer_open_with(peer *p, int fd, int rank, int ranks, mt_context with)
{
    *p = (peer){ .cx = with, .rank = rank, .ranks = ranks };
    REQUIRE_OK(mt_dev_cpu_open(&p->cx.dev));
    REQUIRE_OK(mt_share_open(fd, rank, ranks, &p->cx.share));
    REQUIRE_OK(mt_store_open(&p->cx, &p->cx.store));
}

static void peer_open(peer *p, int fd, int rank, int ranks)
{
    peer_open_with(p, fd, rank, ranks, (mt_context){ 0 });
    REQUIRE_OK(mt_store_add(p->cx.store, "layers.0", shapes, PARAMS, &p->unit));
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

    REQUIRE_OK(mt_share_make(&fd));
    return fd;
}

/* Ranks of one share, all with one unit. */
typedef struct table {
    peer p[RANKS];
    int  ranks, fd;
} table;

static peer *table_open(table *t, int ranks, const mt_param_desc *d, int n)
{
    *t = (table){ .ranks = ranks, .fd = share_new() };
    for (int r = 0; r < ranks; r++) {
        peer_open_with(&t->p[r], t->fd, r, ranks, (mt_context){ 0 });
        REQUIRE_OK(mt_store_add(t->p[r].cx.store, "layers.0", d, n, &t->p[r].unit));
    }
    return t->p;
}

static void table_close(table *t)
{
    for (int r = 0; r < t->ranks; r++)
        peer_close(&t->p[r]);
    close(t->fd);
}

#define TABLE_OF(p, n, d, n_d) \
    CLOSED_BY(table_close) table p##_table; peer *p = table_open(&p##_table, n, d, n_d)
#define TABLE(p, n) TABLE_OF(p, n, shapes, PARAMS)

static char *at(const peer *p, int param, mt_plane plane)
{
    return store_at(p->cx.store, p->unit, param, plane);
}

static char *view(const peer *p, int param, mt_plane plane)
{
    void *found = NULL;

    REQUIRE_OK(mt_store_view(p->cx.store, p->unit, param, plane, &found));
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

TEST(a_plane_is_one_memory_for_all)
{
    for (int ranks = 1; ranks <= RANKS; ranks++) {
        TABLE(p, ranks);
        for (int i = 0; i < PARAMS; i++)
            for (int q = 0; q < MT_PLANE_COUNT; q++)
                if (bytes_of(&p[0], i, (mt_plane)q) > 0 &&
                    (q == MT_PLANE_HI || shapes[i].trainable))
                    check_bytes(p, ranks, i, (mt_plane)q);
        for (int i = 0; i + 1 < PARAMS; i++)             /* the last one wrote nobody else's */
            CHECK_EQ(at(&p[0], i, MT_PLANE_HI)[0], 1 + 4 * i + ranks - 1);
    }
}

/* Ranks that ask for planes in other orders, with other parameters trained and other states at
 * that moment, find the same places. */
TEST(what_is_trained_moves_nothing)
{
    TABLE(p, 2);
    CHECK_OK(mt_store_set_trainable(p[1].cx.store, 0, 0, 0));
    at(&p[1], 1, MT_PLANE_M);
    CHECK_OK(mt_store_set_trainable(p[1].cx.store, 0, 0, 1));
    CHECK_OK(mt_store_set_states(p[0].cx.store, 0, MT_STATES_8BIT));
    for (int i = 0; i < 2; i++) {
        at(&p[0], i, MT_PLANE_M)[3] = (char)(7 + i);
        CHECK_EQ(at(&p[1], i, MT_PLANE_M)[3], 7 + i);
    }
}

TEST(a_parameter_that_is_not_trained_has_no_states)
{
    void *found;

    TABLE(p, 2);
    at(&p[0], 1, MT_PLANE_M);
    CHECK_EQ(mt_store_made(p[0].cx.store, 0, 0, MT_PLANE_M, 0), 0);
    CHECK_OK(mt_store_set_trainable(p[0].cx.store, 0, 0, 0));
    CHECK_EQ(mt_store_at(p[0].cx.store, 0, 0, MT_PLANE_M, &found), MT_EINVAL);
}

static size_t pages_of(int fd)
{
    struct stat is;

    REQUIRE(fstat(fd, &is) == 0);
    return (size_t)is.st_blocks * 512;
}

/* Of states each rank makes the pages of its own portion: together they have them once. */
TEST(each_commits_its_own_portion)
{
    enum { N = 3, ELEMENTS = 3 << 20 };
    TABLE_OF(p, N, (&(mt_param_desc){ MT_F32, ELEMENTS, 1 }), 1);
    int    fd = p_table.fd;
    size_t before = pages_of(fd);

    for (int r = 0; r < N; r++) {
        at(&p[r], 0, MT_PLANE_M);
        CHECK_EQ(mt_store_bytes(p[r].cx.store, MT_PLANE_M), ELEMENTS / N * sizeof(float));
        CHECK_EQ(pages_of(fd) - before, ELEMENTS / N * sizeof(float) * (size_t)(r + 1));
    }
    at(&p[0], 0, MT_PLANE_M)[4 * ELEMENTS / 2] = 1;
    mt_store_decommit(p[0].cx.store, 0, MT_PLANE_M);     /* ram has no copies: nothing goes */
    CHECK_EQ(pages_of(fd) - before, ELEMENTS * sizeof(float));
}

/* An arena in a range gives back what is kept there, less pages that have something else too. */
TEST(what_is_given_back_is_its_own)
{
    size_t    page = (size_t)sysconf(_SC_PAGESIZE);
    int       fd = share_new();
    mt_share *h[2];
    mt_range  range[2];
    mt_arena  a[2] = { { 0 } };

    for (int r = 0; r < 2; r++) {
        REQUIRE_OK(mt_share_open(fd, r, 2, &h[r]));
        REQUIRE_OK(mt_share_take(h[r], 8 * page, &range[r]));
        REQUIRE_OK(mt_arena_reserve(&a[r], range[r].bytes, &range[r], 0, "test", 0));
    }
    size_t before = pages_of(fd);
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

/* Of the mapping that an address is in, as the kernel counts. */
static size_t huge_bytes_at(const void *x)
{
    FILE         *f = fopen("/proc/self/smaps", "r");
    char          line[512];
    unsigned long from, to, kib = 0;
    int           in = 0;

    REQUIRE(f != NULL);
    while (fgets(line, sizeof line, f) != NULL) {
        if (sscanf(line, "%lx-%lx", &from, &to) == 2)
            in = from <= (uintptr_t)x && (uintptr_t)x < to;
        if (in && sscanf(line, "ShmemPmdMapped: %lu kB", &kib) == 1)
            break;
    }
    fclose(f);
    return (size_t)kib << 10;
}

/* Whatever the machine's settings; not on kernels that cannot be asked. */
TEST(large_parts_have_huge_pages)
{
    enum { HUGE = 2 << 20, BIG = 9 * HUGE };
    const mt_param_desc d[2] = { { MT_F32, BIG / 4 + 100, 1 }, { MT_F32, BIG / 4, 1 } };

    TABLE_OF(p, 1, d, 2);
    char *hi = at(p, 0, MT_PLANE_HI), *m = at(p, 1, MT_PLANE_M);
    if (huge_bytes_at(hi) == 0)
        SKIP("this kernel makes no huge pages of shared memory when asked");
    CHECK(huge_bytes_at(hi) > BIG && huge_bytes_at(hi) <= 2 * BIG);  /* memory may be in pieces */
    CHECK(huge_bytes_at(m) > BIG / 2 && huge_bytes_at(m) <= BIG - HUGE); /* begins between two */
}

/* Huge pages are made where another process looks already, and has written some for itself. */
TEST(a_view_outlives_the_making_of_huge_pages)
{
    enum { BIG = 16 << 20 };
    TABLE_OF(p, 2, (&(mt_param_desc){ MT_F32, BIG / 4, 1 }), 1);
    char *seen = view(&p[0], 0, MT_PLANE_M) + BIG / 2;   /* what is rank 1's */

    CHECK_EQ(seen[0] + seen[5 << 20], 0);
    seen[0] = 7;
    char *theirs = at(&p[1], 0, MT_PLANE_M) + BIG / 2;
    theirs[0] = theirs[4096 * 9] = theirs[5 << 20] = 8;
    CHECK_EQ(seen[0], 7);
    CHECK_EQ(seen[4096 * 9], 8);
    CHECK_EQ(seen[5 << 20], 8);
    mt_store_view_drop(p[0].cx.store, 0, 0, MT_PLANE_M);
    CHECK_EQ(seen[0], 8);
}

/* ---- views -------------------------------------------------------------------------------- */

TEST(a_view_is_private_until_it_is_dropped)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char  *hi, *mine, *other;

    TABLE(p, 2);
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
}

/* Parameters begin at pages, so that one's is dropped alone. */
TEST(a_drop_is_of_one_parameter)
{
    TABLE(p, 1);
    for (int i = 0; i < 3; i++)
        memset(view(p, i, MT_PLANE_GRAD), 5, bytes_of(p, i, MT_PLANE_GRAD));
    mt_store_view_drop(p->cx.store, 0, 1, MT_PLANE_GRAD);
    for (int i = 0; i < 3; i++) {
        size_t n = bytes_of(p, i, MT_PLANE_GRAD);

        CHECK_EQ(view(p, i, MT_PLANE_GRAD)[0], i == 1 ? 0 : 5);
        CHECK_EQ(view(p, i, MT_PLANE_GRAD)[n - 1], i == 1 ? 0 : 5);
    }
    mt_store_view_drop(p->cx.store, 0, 2, MT_PLANE_M);   /* nobody asked for one: nothing to do */
}

TEST(alone_a_view_is_the_plane)
{
    void *at_view;

    TOY(t, 1, 0, 0);
    CHECK_OK(mt_store_view(t.store, 0, 1, MT_PLANE_HI, &at_view));
    CHECK(at_view == toy_at(&t, 0, 1, MT_PLANE_HI));
    mt_store_view_drop(t.store, 0, 1, MT_PLANE_HI);
    CHECK(((float *)at_view)[0] == toy_value(0, 1, 0));
}

/* ---- what is refused ---------------------------------------------------------------------- */

TEST(other_ranks_are_refused)
{
    int       fd = share_new(), plain = open("/dev/null", O_RDWR);
    mt_share *h, *other;

    REQUIRE_OK(mt_share_open(fd, 1, 3, &h));
    CHECK_FAILS(mt_share_open(fd, 0, 2, &other), MT_EINVAL, "rank 0 counts 2 ranks, others 3");
    CHECK_FAILS(mt_share_open(fd, 1, 3, &other), MT_ESTATE, "rank 1 is process");
    CHECK_EQ(mt_share_open(fd, 3, 3, &other), MT_EINVAL);
    CHECK_EQ(mt_share_open(fd, 0, MT_RANKS_MOST + 1, &other), MT_EINVAL);
    CHECK_EQ(mt_share_open(plain, 0, 3, &other), MT_EINVAL);
    CHECK_EQ(mt_share_open(-1, 0, 3, &other), MT_EINVAL);
    mt_share_close(h);
    CHECK_EQ(mt_share_open(fd, 1, 3, &h), MT_ESTATE);    /* its counters are where they were */
    close(fd);
    close(plain);
}

TEST(speakers_of_another_machine_are_refused)
{
    int       fd = share_new();
    mt_share *h;

    REQUIRE_OK(mt_share_open(fd, 1, 3, &h));
    CHECK_EQ(mt_share_apart(h, (int[]){ 0, 0, 0 }), MT_EINVAL);      /* rank 1 is of this one */
    CHECK_EQ(mt_share_apart(h, (int[]){ 2, 1, 1 }), MT_EINVAL);
    CHECK_SAYS("rank 0 cannot have the speaker 2");
    CHECK_EQ(mt_share_apart(h, (int[]){ 1, 1, 3 }), MT_EINVAL);
    CHECK(!mt_share_is_apart(h));
    CHECK_OK(mt_share_apart(h, (int[]){ 1, 1, 1 }));
    mt_share_close(h);
    close(fd);
}

/* Where would its bytes go? */
TEST(parcels_of_a_rank_that_is_not_spoken_for_are_refused)
{
    peer      p = { .rank = 1, .ranks = 4 };
    mt_parcel text = { .kind = MT_PARCEL_NOTE, .unit = -1, .what = MT_COUNT_FAILED, .bytes = 8 };
    void     *mem = NULL;
    int       fd = share_new();

    REQUIRE_OK(mt_dev_cpu_open(&p.cx.dev));
    REQUIRE_OK(mt_share_open(fd, p.rank, p.ranks, &p.cx.share));
    REQUIRE_OK(mt_share_apart(p.cx.share, (int[]){ 0, 1, 0, 1 }));
    REQUIRE_OK(mt_store_open(&p.cx, &p.cx.store));
    for (int rank = -1; rank <= p.ranks; rank++)
        if (rank != 3) {
            CHECK_EQ(mt_relay_place(p.cx.store, rank, &text, &mem), MT_EINVAL);
            CHECK_EQ(mt_relay_come(p.cx.store, rank, &text), MT_EINVAL);
        }
    CHECK(mem == NULL);
    CHECK_OK(mt_relay_place(p.cx.store, 3, &text, &mem));
    CHECK(mem != NULL);
    peer_close(&p);
    close(fd);
}

TEST(another_unit_is_refused_by_name)
{
    static const char *const names[] = { "layers.1", "layers.0", "layers.0" };

    for (int what = 0; what < 3; what++) {
        mt_param_desc d[PARAMS];
        peer          p[3];
        int           unit, fd = share_new();

        memcpy(d, shapes, sizeof d);
        d[1].numel += what == 1;
        d[1].dtype = what == 2 ? MT_BF16 : MT_F32;
        peer_open(&p[0], fd, 0, 3);
        peer_open_with(&p[1], fd, 1, 3, (mt_context){ 0 });
        peer_open(&p[2], fd, 2, 3);
        CHECK_EQ(mt_store_add(p[1].cx.store, names[what], d, PARAMS, &unit), MT_EINVAL);
        CHECK_SAYS(names[what]);
        CHECK_SAYS(": rank 0 (process ");
        CHECK_SAYS("other parameters, than rank 1");
        CHECK_EQ(mt_store_units(p[1].cx.store), 0);
        for (int r = 0; r < 3; r++)
            peer_close(&p[r]);
        close(fd);
    }
}

static atomic_int written;

static void *write_from_outside(void *arg)
{
    const peer *p = arg;

    CHECK_OK(mt_ledger_wait_fetch(p->cx.store, p->unit));
    atomic_store(&written, 1);
    return NULL;
}

/* Ranks copy each other's portions. */
TEST(who_writes_waits_until_every_rank_has_copied)
{
    TABLE(p, 2);
    for (int save = 0; save < 2; save++) {
        for (int r = 0; r < 2; r++)
            CHECK_OK(mt_ledger_save_begin(p[r].cx.store, p[r].unit));
        mt_ledger_save_end(p[0].cx.store, p[0].unit);
        CHECK_OK(mt_ledger_wait_updates(p[0].cx.store, p[0].unit));      /* who reads does not */
        atomic_store(&written, 0);
        pthread_t thread = thread_start(write_from_outside, &p[0]);
        sleep_ms(20);
        CHECK_EQ(atomic_load(&written), 0);
        mt_ledger_save_end(p[1].cx.store, p[1].unit);
        thread_join(thread);
        CHECK_EQ(atomic_load(&written), 1);
    }
    CHECK_OK(mt_ledger_save_begin(p[1].cx.store, p[1].unit));    /* rank 0 could not */
    mt_ledger_save_end(p[1].cx.store, p[1].unit);
    for (int r = 0; r < 2; r++)
        CHECK_OK(mt_ledger_wait_fetch(p[r].cx.store, p[r].unit));
}

TEST(gradients_do_not_pass_in_a_share)
{
    TABLE(p, 1);
    CHECK_EQ(mt_store_set_passing(p->cx.store, 0), MT_ENOTSUP);
    CHECK_OK(mt_store_move(p->cx.store, 0, &mt_home_through, p));
    CHECK_OK(mt_store_move(p->cx.store, 0, &mt_home_ram, NULL));
}

static int threads_left = -1;            /* that can still be had; -1: any number */

int pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*start)(void *), void *arg)
{
    int (*made)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) = NULL;

    *(void **)&made = dlsym(RTLD_NEXT, "pthread_create");
    return threads_left >= 0 && threads_left-- == 0 ? (threads_left = -1, EAGAIN)
                                                    : made(thread, attr, start, arg);
}

/* Whichever thread cannot be had (a container's limit): the unit is where it was, or there. */
TEST(a_unit_moves_whole_or_not_at_all)
{
    char mem[1 << 20];

    for (int n = 0, failed = 1; failed; n++) {
        TABLE(p, 1);
        OPENED(mt_resident, r, mt_resident_open(&p->cx, &r));
        threads_left = n;
        failed = mt_resident_settle(r, 0, mem) != MT_OK;
        threads_left = -1;
        CHECK(n < 20 && (n > 0 || failed));
        CHECK(mt_store_home(p->cx.store, 0, NULL) == (failed ? &mt_home_ram : &mt_home_vram));
        if (failed)
            CHECK_OK(mt_mirror_bring(p->cx.store, 0, 1u << MT_PLANE_HI));
    }
}

/* ---- a run: some steps of a model of three units ------------------------------------------- */

#define UNITS 3
#define LOOK_ALL 2
#define STEPS 3
#define FROZEN 3                 /* a parameter that is not trained */
#define MOST  20001              /* elements of a parameter, at most */
#define KEPT  (1u << MT_PLANE_HI | MT_STATE_PLANES)

/* What is done, by one process or by several. */
typedef struct plan {
    int       ranks, micros;     /* 0: two, and one */
    int       dawdle_us;
    int       mates;             /* ranks of a machine; 0: there is one machine */
    uint64_t  seed;              /* of gradients */
    int       through;           /* every second unit goes through the device */
    unsigned  settled, guests;   /* units that live on the devices, 1u << unit each; and those of
                                  * them whose states come and leave */
    int       look;              /* gradients are read before each step: by one rank, in turn;
                                  * LOOK_ALL: by all at once */
    int       writes;            /* weights are written from outside: 1, just before the second
                                  * update; 2, before the second step fetches them; 3, as 1, of
                                  * a parameter that is not trained */
    int       twice;             /* each step updates two times with the same gradients */
    int       apart;             /* slots are out of each other's reach */
    int       leaves;            /* before the second step all units come back to host memory */
    int       turned;            /* rank r has its jobs in an order of its own */
    mt_states states;
    int       unclipped;         /* each unit is judged by its own gradients */
    int       bad;               /* 1: unit 1 has an infinite gradient in the second step */
    int       full;              /* all is trained */
} plan;

static int full;                 /* as the plan of the test that runs */

static plan whole(plan p)
{
    p.ranks = p.ranks > 0 ? p.ranks : 2;
    p.micros = p.micros > 0 ? p.micros : 1;
    return p;
}

#define PLAN(...) whole((plan){ __VA_ARGS__ })

/* What one process makes of it: after each step, the first being what there was before. */
typedef struct outcome {
    char  *hi[STEPS + 1][UNITS];
    char  *kept[UNITS][PARAMS][MT_PLANE_COUNT];  /* at the end */
    double norm[STEPS];
    int    skipped[STEPS];
} outcome;

typedef struct runner {
    const plan *plan;
    outcome    *want;            /* of one process; it fills it if it is that */
    mt_context  cx;
    int         fd, rank, step, fills;
    mt_sumsq   *sums;
    mt_through *through;
    mt_resident *res;            /* these two: with settled units */
    char       *mem[UNITS];      /* their slots; slot[] has what compute read there */
    int         left;            /* they are settled no more */
    mt_offload *o;
    mt_updater *u;
    mt_queue   *run, *h2d;
    char       *slot[UNITS];
    struct runner *all;          /* of several machines: every rank's */
    void      (*script)(struct runner *r);
    mt_relay   *relay;
    pthread_t   thread, tells;
} runner;

typedef struct unit_job {
    runner *r;
    int     unit, params[PARAMS], n;
} unit_job;

static mt_param_desc shape_of(int unit, int param)
{
    mt_param_desc d = shapes[param];

    if (full && param == FROZEN)
        d = (mt_param_desc){ MT_F32, 0, 1 };
    d.numel = d.numel > MOST ? MOST : d.numel;
    d.numel += d.numel > 100 ? 777 * unit : 0;
    return d;
}

static char *place(const runner *r, int unit, int param, mt_plane p, int64_t from)
{
    void *found = store_at(r->cx.store, unit, param, p);
    return (char *)found + mt_store_plane_bytes(r->cx.store, unit, param, p, from);
}

static int is_settled(const runner *r, int unit)
{
    return !r->left && (r->plan->settled >> unit & 1);
}

static void settle_all(runner *r)
{
    const plan *p = r->plan;

    REQUIRE_OK(mt_resident_open(&r->cx, &r->res));
    for (int u = 0; u < UNITS; u++) {
        if (!is_settled(r, u))
            continue;
        REQUIRE((r->mem[u] = calloc(1, mt_store_hi_bytes(r->cx.store, u))) != NULL);
        REQUIRE_OK(mt_resident_settle(r->res, u, r->mem[u]));
        if (p->guests >> u & 1)
            REQUIRE_OK(mt_arrive_invite(r->res, u));
    }
}

/* New weights come from slot to slot. ThreadSanitizer does not see what orders ranks: each maps the
 * share at addresses of its own. */
static void reach_all(runner *r, const plan *p)
{
    for (int u = 0; u < UNITS && !p->apart && !UNDER_TSAN; u++) {
        mt_mem_name names[RANKS];

        for (int k = 0; k < p->ranks && is_settled(r, u); k++)
            REQUIRE_OK(r[k].cx.dev->ops->mem_name(r[k].cx.dev, r[k].mem[u], &names[k]));
        for (int k = 0; k < p->ranks && is_settled(r, u); k++)
            CHECK_OK(mt_resident_reach(r[k].res, u, names));
    }
}

/* All ranks have come here. */
static void meet(runner *r)
{
    CHECK_OK(mt_store_spread(r->cx.store, 0, 0, 0));
}

/* One has filled the share. */
static void take_all(runner *r)
{
    void *of;

    meet(r);
    for (int u = 0; u < UNITS; u++)
        if (is_settled(r, u))
            CHECK_OK(mt_store_home(r->cx.store, u, &of)->take(of, u, r->run));
}

/* Rank k of a machine has to do with rank k of each other. */
static void spread_out(runner *r, const plan *p)
{
    int speakers[RANKS], first = r->rank / p->mates * p->mates;

    for (int k = 0; k < p->ranks; k++)
        speakers[k] = first + k % p->mates;
    REQUIRE_OK(mt_share_apart(r->cx.share, speakers));
}

static void runner_open(runner *r, const plan *p, outcome *want, int fd, int rank)
{
    mt_offload_kernels k = { mt_sumsq_put, mt_accumulate, mt_accumulate_put, NULL, mt_sumsq_fold };

    *r = (runner){ .plan = p, .want = want, .fd = fd, .rank = rank, .fills = fd < 0 };
    REQUIRE_OK(mt_dev_cpu_open(&r->cx.dev));
    if (p->dawdle_us > 0)
        REQUIRE_OK(mt_dev_delay_open(r->cx.dev, (uint64_t)rank + 1, p->dawdle_us, &r->cx.dev));
    REQUIRE_OK(mt_pool_open(2, &r->cx.pool));
    if (fd >= 0)
        REQUIRE_OK(mt_share_open(fd, rank, p->ranks, &r->cx.share));
    if (fd >= 0 && p->mates > 0)
        spread_out(r, p);
    REQUIRE_OK(mt_store_open(&r->cx, &r->cx.store));
    for (int u = 0; u < UNITS; u++) {
        mt_param_desc d[PARAMS];
        char          name[32];

        for (int i = 0; i < PARAMS; i++)
            d[i] = shape_of(u, i);
        snprintf(name, sizeof name, "layers.%d", u);
        (void)store_add(r->cx.store, name, d, PARAMS);
        REQUIRE_OK(mt_store_set_states(r->cx.store, u, p->states));
        for (int i = 0; i < PARAMS && rank % (p->mates > 0 ? p->mates : RANKS) == 0; i++)
            /* one fills it for all of its machine */
            fill_random(d[i].dtype, place(r, u, i, MT_PLANE_HI, 0), d[i].numel,
                 (uint64_t)(100 * u + i));
        r->slot[u] = calloc(1, mt_store_hi_bytes(r->cx.store, u));
        REQUIRE(r->slot[u] != NULL);
    }
    REQUIRE_OK(mt_sumsq_open(r->cx.dev, &r->sums));
    k.ctx = r->sums;
    REQUIRE_OK(r->cx.dev->ops->queue_open(r->cx.dev, "run", &r->run));
    REQUIRE_OK(r->cx.dev->ops->queue_open(r->cx.dev, "h2d", &r->h2d));
    if (p->settled)
        settle_all(r);
    REQUIRE_OK(mt_offload_open(&r->cx, 2, k, &r->o));
    REQUIRE_OK(mt_update_open(&r->cx, r->o, &r->u));
    REQUIRE_OK(mt_through_open(&r->cx, 2, 65536, &r->through));
    for (int u = 0; u < UNITS && p->through; u += 2)
        CHECK_OK(mt_store_move(r->cx.store, u, &mt_home_through, r->through));
    mt_ledger_watchdog(r->cx.store, 60);
}

static void runner_close(runner *r)
{
    if (r->cx.dev == NULL)
        return;
    mt_update_close(r->u);
    mt_offload_close(r->o);
    mt_resident_close(r->res);
    mt_through_close(r->through);
    mt_sumsq_close(r->sums);
    r->cx.dev->ops->queue_close(r->run);
    r->cx.dev->ops->queue_close(r->h2d);
    for (int u = 0; u < UNITS; u++)
        free(r->slot[u]);
    for (int u = 0; u < UNITS; u++)
        free(r->mem[u]);
    mt_store_close(r->cx.store);
    mt_share_close(r->cx.share);
    mt_pool_close(r->cx.pool);
    r->cx.dev->ops->close(r->cx.dev);
}

/* ---- what a rank does ---------------------------------------------------------------------- */

static void fetch(runner *r, int unit)
{
    uint64_t version;
    void    *hi = NULL;

    if (is_settled(r, unit)) {           /* compute reads them in the slot */
        CHECK_OK(mt_resident_await(r->res, unit, r->run));
        CHECK_OK(r->cx.dev->ops->copy(r->run, r->slot[unit], r->mem[unit],
                                      mt_store_hi_bytes(r->cx.store, unit)));
        return;
    }
    CHECK_OK(mt_ledger_fetch_begin(r->cx.store, unit, &version));
    CHECK_OK(mt_store_hi(r->cx.store, unit, &hi));
    CHECK_OK(r->cx.dev->ops->copy(r->h2d, r->slot[unit], hi, mt_store_hi_bytes(r->cx.store, unit)));
    CHECK_OK(mt_ledger_fetching(r->cx.store, unit, r->h2d));
}

/* Weights where a parameter has some: between them is nothing. */
static int has_weights(const runner *r, int unit, const char *x, const char *y)
{
    size_t offset[2] = { 0, 0 };

    for (int i = 0; i < PARAMS; i++) {
        size_t n = mt_store_plane_bytes(r->cx.store, unit, i, MT_PLANE_HI, shape_of(unit, i).numel);

        offset[0] = mt_store_offset(r->cx.store, unit, i);
        if (memcmp(x + offset[0], y + offset[1], n) != 0)
            return 0;
        offset[1] += (n + 511) / 512 * 512;      /* the outcome is one's that is alone */
    }
    return 1;
}

/* What was fetched is what the step began with, whoever has updated it, and who updates it now. */
static void check_fetched(runner *r)
{
    CHECK_OK(r->cx.dev->ops->sync(r->h2d));
    CHECK_OK(r->cx.dev->ops->sync(r->run));
    for (int u = 0; u < UNITS; u++)
        if (r->want != NULL && r->fd >= 0 &&
            !has_weights(r, u, r->slot[u], r->want->hi[r->step][u]))
            CHECK_EQ(u, -1 - r->step);
}

static void hand_over(runner *r, int unit, int micro)
{
    mt_grad_item item[PARAMS];
    char        *grad[PARAMS] = { NULL };
    uint64_t     ticket;
    int          n = 0;

    for (int i = 0; i < PARAMS; i++) {
        mt_param_desc d = shape_of(unit, i);
        int64_t       from, own = mt_store_owned(r->cx.store, unit, i, &from);

        if (!d.trainable || !mt_store_trainable(r->cx.store, unit, i))
            continue;
        grad[i] = calloc((size_t)d.numel + 1, 4);
        REQUIRE(grad[i] != NULL);
        fill_random(d.dtype, grad[i], d.numel,
             r->plan->seed * 99991 + (uint64_t)(((r->step * 9 + micro) * 9 + unit) * 9 + i));
        if (r->plan->bad && unit == 1 && r->step == 1 && i == 0)
            ((uint16_t *)grad[i])[d.numel - 1] = 0x7f80;
        item[n++] = (mt_grad_item){ .param = i, .mode = micro > 0 ? MT_GRAD_ADD : MT_GRAD_SET,
                                    .src = own > 0 ? grad[i] + (size_t)from *
                                                     mt_dtype_bytes(d.dtype) : NULL };
    }
    CHECK_OK(mt_offload_put(r->o, unit, item, n, r->run, &ticket));
    CHECK_OK(mt_offload_drain(r->o));
    for (int i = 0; i < PARAMS; i++)
        free(grad[i]);
}

static mt_plane grads_of(const runner *r, mt_dtype dt)
{
    return r->plan->micros > 1 && dt != MT_F32 ? MT_PLANE_ACC : MT_PLANE_GRAD;
}

/* Where the update finds it. */
static char *place_of(const runner *r, int unit, int param, mt_plane p, int64_t from)
{
    void *found = NULL;

    if (!is_settled(r, unit))
        return place(r, unit, param, p, from);
    REQUIRE_OK(mt_resident_at(r->res, unit, param, p, &found));
    return (char *)found + mt_store_plane_bytes(r->cx.store, unit, param, p, from);
}

/* Elements [from, from + n); planes at `given`, or where they are. */
static mt_adam_tensor tensor_of(const unit_job *j, int param, int64_t from, int64_t n,
                                void *const *given)
{
    const runner *r = j->r;
    mt_param_desc d = shape_of(j->unit, param);
    mt_states     states = r->plan->states;
    mt_plane      g = grads_of(r, d.dtype);
    int           small = states != MT_STATES_FP32, lo8 = mt_states_low_bytes(states) == 1;
    void         *at[MT_PLANE_COUNT] = { NULL };

    for (int p = 0; p < MT_PLANE_COUNT; p++)
        if (given != NULL && given[p] != NULL)
            at[p] = given[p];
        else if (mt_store_plane_bytes(r->cx.store, j->unit, param, (mt_plane)p, 1) > 0 &&
                 (given == NULL || !is_settled(r, j->unit) || !(MT_STATE_PLANES >> p & 1)))
            at[p] = place_of(r, j->unit, param, (mt_plane)p, from);
    return (mt_adam_tensor){
        .dtype = d.dtype, .n = n, .hi = at[MT_PLANE_HI], .lo = lo8 ? NULL : at[MT_PLANE_LO],
        .master = at[MT_PLANE_MASTER], .m = small ? NULL : at[MT_PLANE_M],
        .v = small ? NULL : at[MT_PLANE_V], .grad = at[g],
        .grad_dtype = g == MT_PLANE_ACC ? MT_F32 : d.dtype,
        .hyper = { 0.01, 0.9, 0.95, 1e-8, 0.1, r->step + 1, 0 }, .states = states,
        .codes = { at[MT_PLANE_M], at[MT_PLANE_V], at[MT_PLANE_SCALE],
                   lo8 ? at[MT_PLANE_LO] : NULL },
        .key = (uint64_t)param * 77 + 5, .first = from,
    };
}

static int tensors_of(const unit_job *j, mt_adam_tensor *t)
{
    int n = 0;

    for (int k = 0; k < j->n; k++) {
        int64_t from, own = mt_store_owned(j->r->cx.store, j->unit, j->params[k], &from);

        if (own > 0)
            t[n++] = tensor_of(j, j->params[k], from, own, NULL);
    }
    return n;
}

static mt_status update(void *arg, mt_pool *pool, float clip)
{
    mt_adam_tensor t[PARAMS];
    int            n = tensors_of(arg, t);

    return mt_adam_step(pool, t, n, clip, mt_isa_best());
}

static mt_status gradient(void *arg, int param, const void **found, mt_plane *plane)
{
    const unit_job *j = arg;

    *plane = grads_of(j->r, shapes[param].dtype);
    *found = place(j->r, j->unit, param, *plane, 0);
    return MT_OK;
}

static mt_status compute(void *arg, mt_queue *q, const mt_part *parts, int n, float clip)
{
    mt_adam_tensor t[64];

    REQUIRE(n <= 64);
    for (int i = 0; i < n; i++)
        t[i] = tensor_of(arg, parts[i].param, parts[i].from, parts[i].n, parts[i].at);
    return mt_adam_put(q, t, n, clip);
}

static mt_status put(void *arg, mt_queue *q, float clip)
{
    const unit_job *j = arg;
    mt_adam_tensor  t[PARAMS];
    const mt_part  *parts;
    int             n;

    if (mt_arrive_invited(j->r->res, j->unit)) {
        MT_DO(mt_arrive_parts(j->r->res, j->unit, &parts, &n));
        return compute(arg, q, parts, n, clip);
    }
    return mt_adam_put(q, t, tensors_of(j, t), clip);
}

/* Memory of a stay is what torch's allocator would give. */
static void lift(runner *r, int unit, void **mem, int *n)
{
    FREED size_t *bytes = NULL;
    int     taken = 0;

    CHECK_OK(mt_arrive_sizes(r->res, unit, 65536, &bytes, n));
    for (int i = 0; i < *n && i < 64; i++)
        REQUIRE((mem[i] = aligned_alloc(512, bytes[i])) != NULL);
    CHECK_OK(mt_arrive_lift(r->res, unit, 65536, mem, *n, r->run, &taken));
    CHECK_EQ(taken, 1);
}

static void leave(runner *r, int unit, void **mem, int n)
{
    int left = 0;

    CHECK_OK(mt_arrive_leave(r->res, unit, 1, &left));
    CHECK_EQ(left, 1);
    for (int i = 0; i < n; i++)
        free(mem[i]);
}

/* By all ranks in their views, as user code does. */
static void write_from_outside_alike(runner *r, int param)
{
    void *there = NULL;

    CHECK_OK(mt_ledger_wait_updates(r->cx.store, 0));
    if (r->res != NULL)
        CHECK_OK(mt_resident_raised(r->res));
    CHECK_OK(mt_ledger_wait_fetch(r->cx.store, 0));
    CHECK_OK(mt_mirror_read(r->cx.store, 0, param));
    REQUIRE_OK(mt_store_view(r->cx.store, 0, param, MT_PLANE_HI, &there));
    fill_random(shapes[param].dtype, there, shape_of(0, param).numel, 4711);
    CHECK_OK(mt_store_spread(r->cx.store, 0, param, 1u << MT_PLANE_HI));
    if (r->fills)
        mt_ledger_touch(r->cx.store, 0);
}

/* All of a gradient is there for who reads it, on whichever rank. */
static void look_at_gradients(runner *r)
{
    for (int u = 0; u < UNITS; u++) {
        CHECK_OK(mt_ledger_wait_grads(r->cx.store, u));
        CHECK_OK(mt_mirror_bring(r->cx.store, u, 1u << MT_PLANE_GRAD));
        /* The others may have asked for the next step, which waits for this one. */
        CHECK_OK(mt_mirror_bring(r->cx.store, u, MT_STATE_PLANES));
        for (int i = 0; i < PARAMS; i++) {
            mt_param_desc d = shape_of(u, i);
            size_t        n = (size_t)d.numel * mt_dtype_bytes(d.dtype);
            FREED char *want = calloc(n + 1, 1);

            if (d.trainable && n > 0 && r->plan->micros == 1) {
                fill_random(d.dtype, want, d.numel,
                     r->plan->seed * 99991 + (uint64_t)((r->step * 81 + u) * 9 + i));
                CHECK_EQ(memcmp(place(r, u, i, MT_PLANE_GRAD, 0), want, n), 0);
            }
        }
    }
}

static uint64_t submit(runner *r, unit_job *j)
{
    uint64_t      ticket = 0;
    mt_update_job jobs[UNITS];

    for (int k = 0; k < UNITS; k++) {
        int u = r->plan->turned ? (k + r->rank) % UNITS : k;

        j[u] = (unit_job){ .r = r, .unit = u };
        for (int i = 0; i < PARAMS; i++)
            if (shapes[i].trainable && mt_store_trainable(r->cx.store, u, i))
                j[u].params[j[u].n++] = i;
        jobs[k] = (mt_update_job){ .unit = u, .n_params = j[u].n, .params = j[u].params,
                                   .run = update, .gradient = gradient, .compute = compute,
                                   .put = put, .arg = &j[u] };
    }
    CHECK_OK(mt_update_submit(r->u, jobs, UNITS, r->plan->unclipped ? 0 : 0.5, r->run, &ticket));
    return ticket;
}

static uint64_t submit_all(runner *r, unit_job *j)
{
    for (int u = 0; u < UNITS; u++)
        hand_over(r, u, 0);
    return submit(r, j);
}

/* One process notes what came; others compare. */
static void note_step(runner *r, double norm, int skipped)
{
    if (r->want != NULL && r->fills) {
        r->want->norm[r->step] = norm;
        r->want->skipped[r->step] = skipped;
    } else if (r->want != NULL) {
        CHECK(memcmp(&norm, &r->want->norm[r->step], sizeof norm) == 0 ||
              (r->plan->turned && r->plan->unclipped) || isnan(norm));
        CHECK_EQ(skipped, r->want->skipped[r->step]);
    }
}

static void note_weights(runner *r, int step)
{
    for (int u = 0; r->fills && u < UNITS; u++) {
        size_t bytes = mt_store_hi_bytes(r->cx.store, u);
        void  *hi;

        CHECK_OK(mt_ledger_wait_updates(r->cx.store, u));
        CHECK_OK(mt_store_hi(r->cx.store, u, &hi));
        REQUIRE((r->want->hi[step][u] = malloc(bytes)) != NULL);
        memcpy(r->want->hi[step][u], hi, bytes);
    }
}

static void note_end(runner *r, int unit, int param, mt_plane p)
{
    size_t n = mt_store_plane_bytes(r->cx.store, unit, param, p, shape_of(unit, param).numel);
    char **want = &r->want->kept[unit][param][p];

    if (n == 0)
        return;
    if (r->fills) {
        REQUIRE((*want = malloc(n)) != NULL);
        memcpy(*want, place(r, unit, param, p, 0), n);
    } else if (memcmp(place(r, unit, param, p, 0), *want, n) != 0) {
        CHECK_STR(mt_plane_name(p), "as one process has it");
    }
}

static void write_and_note(runner *r)
{
    void *hi;

    write_from_outside_alike(r, 0);
    REQUIRE_OK(mt_store_hi(r->cx.store, 0, &hi));
    if (r->fills)
        memcpy(r->want->hi[1][0], hi, mt_store_hi_bytes(r->cx.store, 0));
}

static void one_step(runner *r)
{
    unit_job jobs[UNITS], again[UNITS];
    uint64_t ticket;
    double   norm = 0;
    int      skipped = 0, n[UNITS] = { 0 };
    void    *stay[UNITS][64];

    if (r->plan->writes == 2 && r->step == 1)
        write_and_note(r);
    for (int m = 0; m < r->plan->micros; m++) {
        for (int u = 0; u < UNITS; u++)
            fetch(r, u);
        check_fetched(r);
        for (int u = UNITS - 1; u >= 0; u--)
            hand_over(r, u, m);
    }
    for (int u = 0; u < UNITS; u++)
        fetch(r, u);                     /* these copies end when others could update already */
    if ((r->plan->writes & 1) && r->step == 1)
        write_from_outside_alike(r, r->plan->writes == 1 ? 0 : FROZEN);
    if (r->plan->look == LOOK_ALL || (r->plan->look && r->rank == (r->step + 1) % r->plan->ranks))
        look_at_gradients(r);
    for (int u = 0; u < UNITS; u++)
        if (is_settled(r, u) && (r->plan->guests >> u & 1))
            lift(r, u, stay[u], &n[u]);
    ticket = submit(r, jobs);
    if (r->plan->twice)
        ticket = submit(r, again);
    for (int u = 0; u < UNITS; u++)
        mt_offload_forget(r->o, u);
    check_fetched(r);
    CHECK_OK(mt_update_norm(r->u, ticket, &norm, &skipped));
    note_step(r, norm, skipped);
    CHECK_OK(mt_update_drain(r->u));     /* jobs are ours */
    for (int u = 0; u < UNITS; u++)
        if (is_settled(r, u) && (r->plan->guests >> u & 1))
            leave(r, u, stay[u], n[u]);
}

/* One waits for all, whose portions it reads from then on. */
static void unsettle_all(runner *r)
{
    meet(r);
    for (int u = 0; u < UNITS; u++)
        if (is_settled(r, u)) {
            if (r->plan->guests >> u & 1)
                CHECK_OK(mt_arrive_dismiss(r->res, u));
            CHECK_OK(mt_resident_unsettle(r->res, u, 1));
        }
    r->left = 1;
    meet(r);
}

static void go(runner *r)
{
    if (r->fills)
        note_weights(r, 0);
    if (r->plan->settled)
        take_all(r);
    for (r->step = 0; r->step < STEPS; r->step++) {
        if (r->plan->leaves && r->step == 1)
            unsettle_all(r);
        one_step(r);
        note_weights(r, r->step + 1);
    }
    for (int u = 0; r->want != NULL && u < UNITS; u++) {
        CHECK_OK(mt_ledger_wait_updates(r->cx.store, u));
        CHECK_OK(mt_mirror_bring(r->cx.store, u, KEPT));
        for (int i = 0; i < PARAMS; i++)
            for (int p = 0; p < MT_PLANE_COUNT; p++)
                if ((KEPT >> p & 1) && (shapes[i].trainable || p == MT_PLANE_HI))
                    note_end(r, u, i, (mt_plane)p);
    }
}

static void run_alone(const plan *p, outcome *out)
{
    plan   alone = *p;
    runner r;

    memset(out, 0, sizeof *out);
    alone.dawdle_us = alone.turned = alone.through = alone.look = alone.leaves = 0;
    alone.settled = alone.guests = 0;
    runner_open(&r, &alone, out, -1, 0);
    go(&r);
    runner_close(&r);
}

static void outcome_free(outcome *out)
{
    for (int u = 0; u < UNITS; u++) {
        for (int t = 0; t <= STEPS; t++)
            free(out->hi[t][u]);
        for (int i = 0; i < PARAMS; i++)
            for (int p = 0; p < MT_PLANE_COUNT; p++)
                free(out->kept[u][i][p]);
    }
}

/* As a network does, unseen by a sanitizer: what is on its way may be written by the next update
 * (relay.h), and what comes may be there already, and be read. */
#if defined(__GNUC__)
__attribute__((no_sanitize("thread")))
#endif
static void send(volatile char *to, const volatile char *from, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        to[i] = from[i];
}

/* A parcel on its way to who speaks for the rank there. */
static void carry(const runner *from, const runner *to, const mt_parcel *p, const void *mem)
{
    void *place = NULL;
    int   is = 0;

    CHECK_OK(mt_relay_place(to->cx.store, from->rank, p, &place));
    while (place != NULL && !is) {
        CHECK_OK(mt_relay_ready(to->cx.store, from->rank, p, &is));
        if (!is)
            usleep(100);
    }
    /* Its own update is over: so is what computed on the weights that are overwritten. */
    if (p->kind == MT_PARCEL_SLOT)
        CHECK(mt_board_said(&mt__unit_at(to->cx.store, p->unit)->board, MT_COUNT_STEPPED,
                            to->rank) >= p->n);
    if (place != NULL)
        send(place, mem, (size_t)p->bytes);
    CHECK_OK(mt_relay_come(to->cx.store, from->rank, p));
}

/* What the rank says goes to other machines, until it has left. */
static void *tell_machines(void *arg)
{
    runner   *r = arg;
    uint64_t  seed = (uint64_t)r->rank + 7;
    int       mates = r->plan->mates, mine = r->rank / mates, over = 0;
    mt_parcel p;
    void     *mem = NULL;

    while (!over) {
        int to, some;

        CHECK_OK(mt_relay_next(r->relay, 100, &p, &mem, &to, &some));
        if (!some)
            continue;
        if (r->plan->dawdle_us > 0)
            usleep((useconds_t)(toy_random(&seed) % (uint64_t)r->plan->dawdle_us));
        for (int k = r->rank % mates; k < r->plan->ranks; k += mates)
            if (k / mates != mine && (to < 0 || to / mates == k / mates))
                carry(r, &r->all[k], &p, mem);
        over = p.kind == MT_PARCEL_NOTE && p.unit < 0 && p.what == MT_COUNT_LEFT;
    }
    return NULL;
}

static void machines_begin(runner *r, const plan *p)
{
    for (int k = 0; p->mates > 0 && k < p->ranks; k++) {
        r[k].all = r;
        REQUIRE_OK(mt_relay_open(r[k].cx.store, &r[k].relay));
        r[k].tells = thread_start(tell_machines, &r[k]);
    }
}

static void machines_end(runner *r, const plan *p)
{
    for (int k = 0; p->mates > 0 && k < p->ranks; k++)
        mt_store_leave(r[k].cx.store);
    for (int k = 0; p->mates > 0 && k < p->ranks; k++) {
        thread_join(r[k].tells);
        mt_relay_close(r[k].relay);
    }
}

/* Every rank of the plan, those of a machine on a share of its own. */
typedef struct crew {
    runner r[RANKS];
    plan   p;
    int    fd[RANKS];
} crew;

static void crew_open(crew *c, plan p, outcome *want)
{
    int mates = p.mates > 0 ? p.mates : p.ranks;

    c->p = p;
    for (int k = 0; k < p.ranks; k++) {
        c->fd[k] = k % mates == 0 ? share_new() : c->fd[k - k % mates];
        runner_open(&c->r[k], &c->p, want, c->fd[k], k);
    }
}

static void crew_close(crew *c)
{
    int mates = c->p.mates > 0 ? c->p.mates : c->p.ranks;

    for (int k = 0; k < c->p.ranks; k++)
        runner_close(&c->r[k]);
    for (int k = 0; k < c->p.ranks; k += mates)
        close(c->fd[k]);
}

#define CREW(c, p, want) CLOSED_BY(crew_close) crew c; crew_open(&c, p, want)

/* Others read what is on this one's device until all are through. */
static void *play(void *arg)
{
    runner *r = arg;

    r->script(r);
    meet(r);
    return NULL;
}

static void crew_play(crew *c, void (*script)(runner *r))
{
    for (int k = 0; k < c->p.ranks; k++)
        c->r[k].script = script;
    run_together(play, c->r, sizeof *c->r, c->p.ranks);
}

static void run_threads(plan p, void (*script)(runner *r))
{
    CLOSED_BY(outcome_free) outcome want;

    full = p.full;
    run_alone(&p, &want);
    CREW(c, p, &want);
    machines_begin(c.r, &p);
    reach_all(c.r, &p);
    crew_play(&c, script);
    machines_end(c.r, &p);
    full = 0;
}

#define RUN(...) run_threads(PLAN(__VA_ARGS__), go)

TEST(together_they_have_the_bits_of_one)
{
    for (int ranks = 1; ranks <= RANKS; ranks++)
        for (int k = 0; k < 4; k += UNDER_TSAN ? 3 : 1)
            RUN(.ranks = ranks, .micros = 1 + k / 2,
                .states = k % 2 ? MT_STATES_8BIT_LO8 : MT_STATES_FP32);
}

/* Two of two ranks, and four of one: each way in each way of a rank's. */
TEST(several_machines_have_the_bits_of_one)
{
    for (int k = 0; k < 5; k++)
        for (int mates = 1; mates <= 2; mates++)
            RUN(.ranks = 4, .mates = mates, .micros = 1 + k % 2,
                .states = k % 2 ? MT_STATES_8BIT_LO8 : MT_STATES_FP32,
                .dawdle_us = UNDER_TSAN ? 300 : k % 2 ? 0 : 1000,
                .settled = (unsigned[]){ 0, 0, 7, 5, 6 }[k],
                .guests = (unsigned[]){ 0, 0, 0, 4, 2 }[k], .look = k % 2 ? 1 : LOOK_ALL,
                .writes = k % 3, .turned = k == 0, .unclipped = k == 0, .twice = k == 4,
                .leaves = k >= 3);
}

/* Sums of three, in three orders. */
TEST(no_order_of_jobs_changes_a_bit)
{
    for (uint64_t seed = 0; seed < (UNDER_TSAN ? 2 : 6); seed++)
        RUN(.ranks = 3, .turned = 1, .seed = seed);
    RUN(.ranks = 3, .turned = 1, .unclipped = 1);
}

TEST(nobody_reads_half_an_update)
{
    for (int ranks = 2; ranks <= RANKS; ranks++)
        RUN(.ranks = ranks, .micros = 2, .dawdle_us = UNDER_TSAN ? 500 : 3000);
}

TEST(units_may_go_through_the_device)
{
    RUN(.ranks = 3, .through = 1, .states = MT_STATES_8BIT_LO8);
    RUN(.ranks = 3, .through = 1, .micros = 2, .dawdle_us = UNDER_TSAN ? 0 : 300);
}

TEST(units_may_live_on_the_devices)
{
    for (int ranks = 1; ranks <= RANKS; ranks++)
        for (int mixed = 0; mixed < 2; mixed++)
            RUN(.ranks = ranks, .settled = mixed ? 5 : 7, .guests = mixed ? 4 : 0,
                .micros = 1 + mixed, .turned = ranks == 3, .look = mixed ? 1 : LOOK_ALL,
                .writes = 2 - mixed, .twice = ranks == 2, .apart = ranks == 1,
                .states = mixed ? MT_STATES_8BIT_LO8 : MT_STATES_FP32,
                .dawdle_us = ranks == 2 ? UNDER_TSAN ? 300 : 1000 : 0);
}

TEST(guests_of_several_come_and_leave)
{
    const int us = UNDER_TSAN ? 300 : 800;

    RUN(.ranks = 3, .settled = 7, .guests = 7, .look = 1, .writes = 1, .dawdle_us = us);
    RUN(.ranks = 3, .settled = 7, .guests = 7, .look = 1, .writes = 1, .dawdle_us = us,
        .unclipped = 1, .turned = 1, .micros = 2);
}

TEST(units_of_several_come_back_to_host_memory)
{
    RUN(.leaves = 1, .settled = 7);
    RUN(.leaves = 1, .ranks = 3, .settled = 5, .guests = 4, .micros = 2);
}

/* Weights in a slot are older than those that were written, and what is not trained is not sent. */
TEST(machines_have_what_was_written_before_an_update)
{
    for (int k = 0; k < 8; k++)
        RUN(.ranks = 4, .mates = 1 + k % 2, .settled = 7, .writes = k / 2 % 2 ? 3 : 1,
            .bad = k / 4);
}

static uint64_t said_of(const runner *r, mt_count what, int rank)
{
    return mt_board_said(&mt__unit_at(r->cx.store, 0)->board, (int)what, rank);
}

/* Who sends would wait without end; who waits here must not read what did not come. */
TEST(weights_that_come_when_the_engine_is_closed_are_not_told_of)
{
    mt_parcel bytes = { .kind = MT_PARCEL_SLOT, .n = 1, .bytes = 8 };
    mt_parcel note = { .kind = MT_PARCEL_NOTE, .what = MT_COUNT_STEPPED, .n = 1, .param = 1 };
    void     *place = NULL, *hi = NULL;

    CREW(c, PLAN(.ranks = 2, .mates = 1, .settled = 1), NULL);
    runner *r = c.r;
    reach_all(c.r, &c.p);
    CHECK_OK(mt_relay_place(r->cx.store, 1, &bytes, &place));
    CHECK(UNDER_TSAN || place == r->mem[0]);
    mt_resident_close(r->res);
    r->res = NULL;
    CHECK_OK(mt_relay_place(r->cx.store, 1, &bytes, &place));
    CHECK_OK(mt_store_hi(r->cx.store, 0, &hi));
    CHECK(place == hi);
    CHECK_OK(mt_relay_come(r->cx.store, 1, &note));
    CHECK_EQ(said_of(r, MT_COUNT_STEPPED, 1), 0);
    note.param = 0;                      /* they came to host memory */
    CHECK_OK(mt_relay_come(r->cx.store, 1, &note));
    CHECK_EQ(said_of(r, MT_COUNT_STEPPED, 1), 1);
}

static void *hear_late(void *arg)
{
    const runner *r = arg;
    mt_parcel     note = { .kind = MT_PARCEL_NOTE, .what = MT_COUNT_STEPPED, .n = 1, .param = 1 };

    sleep_ms(50);
    CHECK_OK(mt_relay_come(r->cx.store, 1, &note));
    return NULL;
}

/* The raise of other ranks' weights that has begun waits for them. */
TEST(who_closes_hears_what_it_waits_for)
{
    CREW(c, PLAN(.ranks = 2, .mates = 1, .settled = 1), NULL);
    runner *r = c.r;
    if (UNDER_TSAN)
        SKIP("nothing comes into slots");
    reach_all(c.r, &c.p);
    mt_ledger_update_begin(r->cx.store, 0);
    mt_ledger_update_end(r->cx.store, 0);
    MT_WITH(&r->res->mu) mt_worker_submit(&r->res->ferry.raises, &r->res->units[0]->rise);
    sleep_ms(20);
    mt_ledger_watchdog(r->cx.store, 5);
    pthread_t thread = thread_start(hear_late, r);
    mt_resident_close(r->res);
    r->res = NULL;
    thread_join(thread);
    CHECK_EQ(said_of(r, MT_COUNT_STEPPED, 1), 1);
    CHECK_OK(mt_ledger_check(r->cx.store));
}

/* It will make no update: who sends is heard to the end. */
TEST(nobody_waits_for_an_update_behind_a_fault)
{
    mt_parcel bytes = { .kind = MT_PARCEL_SLOT, .n = 1, .bytes = 8 };
    int       is = 1;

    CREW(c, PLAN(.ranks = 2, .mates = 1, .settled = 1), NULL);
    CHECK_OK(mt_relay_ready(c.r->cx.store, 1, &bytes, &is));
    CHECK_EQ(is, 0);
    mt_ledger_fault(c.r->cx.store, MT_EDEVICE, "a test's");
    CHECK_OK(mt_relay_ready(c.r->cx.store, 1, &bytes, &is));
    CHECK_EQ(is, 1);
}

/* The value that is not finite is in the portion of one rank. */
TEST(what_one_skips_all_skip)
{
    for (int k = 0; k < 4; k++)
        RUN(.ranks = 3, .bad = 1, .unclipped = k % 2, .settled = k / 2 ? 7 : 0);
}

static void run_all(plan p, void (*script)(runner *r))
{
    CREW(c, p, NULL);
    reach_all(c.r, &c.p);
    crew_play(&c, script);
}

/* ---- frozen weights of devices ------------------------------------------------------------- */

/* The share's memory. */
static int64_t blocks(const runner *r)
{
    struct stat is;

    REQUIRE(fstat(r->fd, &is) == 0);
    return (int64_t)is.st_blocks * 512;
}

/* Bytes of a parameter that nobody trains, of every unit, in whole pages. */
static int64_t frozen_room(const runner *r)
{
    int64_t sum = 0;

    for (int u = 0; u < UNITS; u++)
        sum += (int64_t)mt_round_up((size_t)shape_of(u, FROZEN).numel * 8,
                                    mt_store_align(r->cx.store, u));
    return sum;
}

/* Are they there, on the host or where a fetch has put them, as they were at first? */
static int is_first(const void *there, int unit)
{
    mt_param_desc d = shape_of(unit, FROZEN);
    char          want[64];

    REQUIRE((size_t)d.numel * 8 <= sizeof want);
    fill_random(d.dtype, want, d.numel, (uint64_t)(100 * unit + FROZEN));
    return memcmp(there, want, (size_t)d.numel * 8) == 0;
}

static int is_right(const runner *r, int unit)
{
    return is_first(place(r, unit, FROZEN, MT_PLANE_HI, 0), unit);
}

/* Of the first unit, from where compute reads them. */
static char *fetched(runner *r)
{
    fetch(r, 0);
    CHECK_OK(r->cx.dev->ops->sync(r->run));
    return r->slot[0] + mt_store_offset(r->cx.store, 0, FROZEN);
}

/* They are on the host before all devices have them, and then while somebody reads. */
static void read_frozen(runner *r)
{
    const unsigned hi = 1u << MT_PLANE_HI;
    int64_t        before, there, all = 0;

    for (int u = 0; u < UNITS; u++)
        all += (int64_t)mt_store_hi_bytes(r->cx.store, u);
    meet(r);
    before = blocks(r);
    meet(r);
    take_all(r);
    meet(r);
    CHECK_EQ(before - blocks(r), frozen_room(r));
    CHECK_EQ(all - (int64_t)mt_store_bytes(r->cx.store, MT_PLANE_HI), frozen_room(r));
    one_step(r);                             /* the ferry brings none of them */
    one_step(r);
    meet(r);
    there = blocks(r);
    meet(r);
    CHECK_OK(mt_mirror_read(r->cx.store, 0, 0));             /* one that is trained */
    meet(r);
    CHECK_EQ(blocks(r), there);
    for (int u = 0; u < UNITS; u++) {
        CHECK(mt_store_reserved(r->cx.store, u, MT_PLANE_HI) > 0);
        CHECK_OK(mt_ledger_save_begin(r->cx.store, u));
    }
    meet(r);
    for (int k = 0; k < UNITS; k++) {        /* a save's, which all read at once */
        int u = (k + r->rank) % UNITS;

        CHECK_OK(mt_mirror_peek(r->cx.store, u, hi));
        CHECK(is_right(r, u));
    }
    if (r->rank == 0)                        /* and one that stays. Looks make pages: none before */
        CHECK_OK(mt_mirror_bring(r->cx.store, 1, hi));
    meet(r);
    for (int u = 0; u < UNITS; u++) {
        mt_ledger_save_end(r->cx.store, u);
        CHECK_OK(mt_ledger_wait_saved(r->cx.store, u));
        CHECK_EQ(mt_mirror_release_apart(r->cx.store, u), 1);
        CHECK_OK(mt_mirror_release(r->cx.store, u));
    }
    meet(r);
    CHECK_EQ((blocks(r) - there) * UNITS, frozen_room(r));
    CHECK_EQ(all - (int64_t)mt_store_bytes(r->cx.store, MT_PLANE_HI),
             frozen_room(r) / UNITS * (UNITS - 1));
    CHECK(is_right(r, 1));
    meet(r);
    if (r->rank == 1)                        /* whoever it is, all have them */
        CHECK_OK(mt_mirror_read(r->cx.store, 2, FROZEN));
    meet(r);
    CHECK(is_right(r, 2));
    meet(r);
    take_all(r);                             /* nobody reads any more */
    meet(r);
    CHECK_EQ(blocks(r), there);
    unsettle_all(r);
    for (int u = 0; u < UNITS; u++)
        CHECK(is_right(r, u));
    CHECK_EQ(blocks(r) >= there + frozen_room(r), 1);
}

TEST(frozen_weights_of_devices_take_no_memory_on_the_host)
{
    run_all(PLAN(.ranks = 3, .settled = 7), read_frozen);
    run_all(PLAN(.ranks = 2, .settled = 7, .dawdle_us = UNDER_TSAN ? 100 : 500), read_frozen);
}

/* Each rank has a save read the unit's weights, and what that brought goes. */
static void save_one(runner *r, int unit)
{
    CHECK_OK(mt_ledger_wait_updates(r->cx.store, unit));
    CHECK_OK(mt_ledger_save_begin(r->cx.store, unit));
    CHECK_OK(mt_mirror_peek(r->cx.store, unit, 1u << MT_PLANE_HI));
    mt_ledger_save_end(r->cx.store, unit);
    CHECK_OK(mt_ledger_wait_saved(r->cx.store, unit));
    (void)mt_mirror_release_apart(r->cx.store, unit);    /* the first one does */
}

/* The unit's weights on the host are those that one process had after so many steps. */
static void check_weights(runner *r, int unit, int step)
{
    void *hi = NULL;

    REQUIRE_OK(mt_store_hi(r->cx.store, unit, &hi));
    if (r->want != NULL && !has_weights(r, unit, hi, r->want->hi[step][unit]))
        CHECK_EQ(unit, -1 - step);
}

/* All units come back to the host, with the weights of one process after so many steps. */
static void end_with(runner *r, int step)
{
    unsettle_all(r);
    for (int u = 0; u < UNITS; u++)
        check_weights(r, u, step);
}

/* It is trained from now on, and read by who did not know it. */
static void thaw(runner *r)
{
    take_all(r);
    one_step(r);
    meet(r);
    for (int u = 0; u < UNITS; u++) {
        CHECK_OK(mt_mirror_read(r->cx.store, u, FROZEN));
        CHECK(is_right(r, u));
    }
    one_step(r);
    meet(r);
    for (int u = 0; u < UNITS; u++) {        /* nor does a save take them, behind another update */
        save_one(r, u);
        meet(r);
        CHECK(is_right(r, u));
    }
    write_from_outside_alike(r, FROZEN);
    meet(r);
    CHECK_EQ(memcmp(fetched(r), place(r, 0, FROZEN, MT_PLANE_HI, 0),
                    (size_t)shape_of(0, FROZEN).numel * 8), 0);
    CHECK(!is_right(r, 0));
}

TEST(frozen_weights_that_are_read_and_written_stay)
{
    run_all(PLAN(.ranks = 3, .settled = 7), thaw);
}

/* ---- trained weights that go from device to device ----------------------------------------- */

/* Of all units, on this rank. */
static void begin_saves(runner *r)
{
    for (int u = 0; u < UNITS; u++) {
        CHECK_OK(mt_ledger_wait_updates(r->cx.store, u));
        CHECK_OK(mt_ledger_save_begin(r->cx.store, u));
    }
}

/* All ranks' save of all units, each in an order of its own; next: a step is submitted meanwhile,
 * which waits for it. */
static void save_weights(runner *r, int steps, unit_job *next)
{
    begin_saves(r);
    if (next != NULL)
        (void)submit_all(r, next);
    for (int k = 0; k < UNITS; k++) {
        int u = (k + r->rank) % UNITS;

        CHECK_OK(mt_mirror_peek(r->cx.store, u, 1u << MT_PLANE_HI));
        check_weights(r, u, steps);
    }
    for (int u = 0; u < UNITS; u++)
        mt_ledger_save_end(r->cx.store, u);
    for (int u = 0; u < UNITS; u++) {
        CHECK_OK(mt_ledger_wait_saved(r->cx.store, u));
        (void)mt_mirror_release_apart(r->cx.store, u);   /* the first one does */
        CHECK_OK(mt_mirror_release(r->cx.store, u));
    }
    CHECK_OK(mt_update_drain(r->u));
}

/* The share has none of them but while somebody reads. */
static void read_trained(runner *r)
{
    unit_job next[UNITS];
    int64_t  there, room = 0;

    for (int u = 0; u < UNITS; u++)
        room += (int64_t)mt_store_hi_bytes(r->cx.store, u);
    meet(r);
    there = blocks(r);
    meet(r);
    take_all(r);
    meet(r);
    CHECK_EQ(there - blocks(r), UNDER_TSAN ? 0 : room);
    CHECK_EQ(mt_store_bytes(r->cx.store, MT_PLANE_HI), UNDER_TSAN ? (size_t)room : 0);
    one_step(r);
    meet(r);
    there = blocks(r);
    meet(r);
    save_weights(r, 1, NULL);
    meet(r);
    CHECK_EQ(blocks(r), there);
    r->step = 1;
    one_step(r);
    save_weights(r, 2, NULL);
    meet(r);
    CHECK_EQ(blocks(r), there);
    meet(r);
    if (r->rank == 1)                        /* it stays */
        CHECK_OK(mt_mirror_read(r->cx.store, 1, 0));
    meet(r);
    check_weights(r, 1, 2);
    CHECK_EQ(blocks(r) > there, !UNDER_TSAN);
    r->step = 2;
    save_weights(r, 2, next);
    CHECK_OK(mt_mirror_bring(r->cx.store, r->rank % UNITS, 1u << MT_PLANE_HI));
    check_weights(r, r->rank % UNITS, 3);
    save_weights(r, 3, NULL);
    take_all(r);                             /* nobody reads any more */
    meet(r);
    CHECK_EQ(blocks(r), there);
    for (int u = 0; u < UNITS; u++)
        fetch(r, u);
    r->step = 3;
    check_fetched(r);
    end_with(r, 3);
}

TEST(trained_weights_of_devices_take_no_memory_on_the_host)
{
    for (int k = 0; k < 6; k++)
        run_threads(PLAN(.ranks = 2 + k % 3, .settled = 7, .full = 1,
                         .dawdle_us = k < 3 ? 0 : UNDER_TSAN ? 100 : 1000), read_trained);
}

TEST(trained_weights_that_come_from_devices_have_the_bits_of_one)
{
    for (int k = 0; k < (UNDER_TSAN ? 4 : 24); k++)
        RUN(.ranks = 2 + k % 3, .full = 1, .settled = k % 4 == 3 ? 5 : 7,
            .guests = k % 4 == 1 ? 5 : 0, .micros = 1 + k % 2, .writes = k / 2 % 3,
            .look = k % 5 == 0 ? LOOK_ALL : k % 5 == 1, .twice = k % 7 == 0, .leaves = k % 6 == 5,
            .turned = k % 3 == 0, .bad = k == 4 || k == 12, .unclipped = k % 3 == 0,
            .states = k % 2 ? MT_STATES_8BIT_LO8 : MT_STATES_FP32,
            .dawdle_us = k % 4 == 0 ? 0 : UNDER_TSAN ? 100 : 700);
}

/* Each parameter as one process has it: where it is read on the host, and where compute reads. */
static void check_unit(runner *r, int unit, int step)
{
    size_t at = 0;

    for (int i = 0; i < PARAMS; i++) {
        size_t n = mt_store_plane_bytes(r->cx.store, unit, i, MT_PLANE_HI,
                                        shape_of(unit, i).numel);

        CHECK_OK(mt_mirror_read(r->cx.store, unit, i));
        if (memcmp(place(r, unit, i, MT_PLANE_HI, 0), r->want->hi[step][unit] + at, n) != 0)
            CHECK_EQ(i, -100 - step);
        at += (n + 511) / 512 * 512;
    }
    fetch(r, unit);
    CHECK_OK(r->cx.dev->ops->sync(r->run));
    if (!has_weights(r, unit, r->slot[unit], r->want->hi[step][unit]))
        CHECK_EQ(unit, -1000 - step);
}

/* Each rank begins at another unit. */
static void check_units(runner *r, int step)
{
    for (int u = 0; u < UNITS; u++)
        check_unit(r, (u + r->rank) % UNITS, step);
}

/* A unit that was all trained has a parameter that is not any more; then units move. */
static void freeze_some(runner *r)
{
    take_all(r);
    one_step(r);
    meet(r);
    for (int u = 0; u < UNITS; u++)
        CHECK_OK(mt_store_set_trainable(r->cx.store, u, 1, 0));
    take_all(r);
    check_units(r, 1);
    end_with(r, 1);
}

TEST(weights_beside_which_some_are_frozen_later_are_not_lost)
{
    run_threads(PLAN(.ranks = 3, .settled = 7, .full = 1), freeze_some);
}

/* A parameter that was frozen when its unit was taken is trained. */
static void thaw_taken(runner *r)
{
    for (int u = 0; u < UNITS; u++)
        CHECK_OK(mt_store_set_trainable(r->cx.store, u, 1, 0));
    take_all(r);
    for (int u = 0; u < UNITS; u++) {
        CHECK_OK(mt_mirror_read(r->cx.store, u, 1));
        CHECK_OK(mt_store_set_trainable(r->cx.store, u, 1, 1));
    }
}

/* Some of those that were frozen are trained; then units move. */
static void thaw_some(runner *r)
{
    thaw_taken(r);
    one_step(r);
    meet(r);
    take_all(r);
    check_units(r, 1);
    meet(r);
    r->step = 1;
    one_step(r);
    check_units(r, 2);
    save_weights(r, 2, NULL);
    end_with(r, 2);
}

TEST(weights_beside_which_some_are_trained_later_are_not_lost)
{
    for (int k = 0; k < 2; k++)
        run_threads(PLAN(.ranks = 3, .settled = 7, .apart = k), thaw_some);
}

/* It is written before an update has brought it down. */
static void thaw_and_write(runner *r)
{
    thaw_taken(r);
    take_all(r);
    write_from_outside_alike(r, 1);
    fetch(r, 0);
    CHECK_OK(r->cx.dev->ops->sync(r->run));
    CHECK_EQ(memcmp(r->slot[0] + mt_store_offset(r->cx.store, 0, 1), place(r, 0, 1, MT_PLANE_HI, 0),
                    (size_t)shape_of(0, 1).numel * 4), 0);
    meet(r);
    one_step(r);
}

TEST(weights_that_are_trained_later_may_be_written)
{
    for (int k = 0; k < 2; k++)
        run_all(PLAN(.ranks = 3, .settled = 7, .apart = k), thaw_and_write);
}

/* A rise that comes late, when a save is on and the next step is announced. */
static void rise_late(runner *r)
{
    unit_job next[UNITS];
    uint64_t version;
    double   norm;
    int      skipped;

    take_all(r);
    one_step(r);
    meet(r);
    begin_saves(r);
    meet(r);
    r->step = 1;
    CHECK_OK(mt_update_norm(r->u, submit_all(r, next), &norm, &skipped));
    sleep_ms(100);                           /* all are CLEAR, and wait for the saves */
    CHECK_OK(mt_ledger_fetch_begin(r->cx.store, 0, &version));
    for (int u = 0; u < UNITS; u++)
        mt_ledger_save_end(r->cx.store, u);
    sleep_ms(100);
    /* Nothing of it has been put before what that brings. */
    CHECK_EQ(said_of(r, MT_COUNT_STEPPED, r->rank), 1);
    CHECK_OK(mt_ledger_fetching(r->cx.store, 0, r->res->ferry.up));
    CHECK_OK(mt_update_drain(r->u));
    check_units(r, 2);
}

TEST(an_update_waits_for_a_rise_that_a_save_let_in)
{
    run_threads(PLAN(.ranks = 2, .settled = 7, .full = 1), rise_late);
}

/* A reader on another thread; a step is announced when it is on its way. */
static void *read_hi(void *arg)
{
    runner *r = arg;

    CHECK_OK(mt_mirror_read(r->cx.store, 0, 0));
    return NULL;
}

static void read_and_step(runner *r)
{
    unit_job  next[UNITS];
    pthread_t thread = 0;

    take_all(r);
    one_step(r);
    mt_ledger_watchdog(r->cx.store, 5);
    r->step = 1;
    for (int u = 0; u < UNITS; u++)
        hand_over(r, u, 0);
    meet(r);
    if (r->rank == 0) {
        CHECK_OK(mt_mirror_enter(r->cx.store, 0));
        thread = thread_start(read_hi, r);
        sleep_ms(50);
        (void)submit(r, next);
        mt_mirror_leave(r->cx.store, 0);
        thread_join(thread);
    } else {
        sleep_ms(150);
        CHECK_OK(mt_mirror_read(r->cx.store, 0, 0));     /* before it makes that step */
        check_weights(r, 0, 1);
        (void)submit(r, next);
    }
    CHECK_OK(mt_update_drain(r->u));
    check_units(r, 2);
}

TEST(who_reads_on_a_thread_holds_up_nobody_who_has_not_stepped)
{
    run_threads(PLAN(.ranks = 2, .settled = 7, .full = 1), read_and_step);
}

static int interrupts(void)
{
    return 1;
}

static void *read_in_vain(void *arg)
{
    runner *r = arg;

    (void)mt_watch_asks(interrupts);
    CHECK_EQ(mt_mirror_read(r->cx.store, 0, FROZEN), MT_EINTR);
    return NULL;
}

/* What one rank claims, another one, which is interrupted, was to bring again behind a step. */
static void claim_and_interrupt(runner *r)
{
    take_all(r);
    if (r->rank == 0)
        CHECK_OK(mt_mirror_read(r->cx.store, 0, FROZEN));
    one_step(r);
    meet(r);
    if (r->rank == 1) {
        CHECK_OK(mt_mirror_enter(r->cx.store, 0));
        thread_join(thread_start(read_in_vain, r));
        mt_mirror_leave(r->cx.store, 0);
    }
    meet(r);
    save_one(r, 0);
    meet(r);
    CHECK(is_right(r, 0));
}

TEST(claims_outlive_a_reader_that_is_interrupted)
{
    run_all(PLAN(.ranks = 2, .settled = 7), claim_and_interrupt);
}

/* A thread that reads, and has raises made that find something to do, or nothing. */
typedef struct bother {
    runner    *r;
    atomic_int stop;
    uint64_t   seed;
    pthread_t  thread;
} bother;

static void *bother_on(void *arg)
{
    bother *b = arg;

    while (!atomic_load(&b->stop)) {
        int          u = (int)(toy_random(&b->seed) % UNITS);
        mt__settled *h = b->r->res->units[u];

        if (toy_random(&b->seed) % 3 == 0)
            CHECK_OK(mt_mirror_read(b->r->cx.store, u, (int)(toy_random(&b->seed) % PARAMS)));
        MT_WITH(&b->r->res->mu)
            if (h != NULL && !h->rise.listed)
                (void)mt_worker_submit(&b->r->res->ferry.raises, &h->rise);
        usleep((useconds_t)(toy_random(&b->seed) % 700));
    }
    return NULL;
}

/* Units are taken again, some with another parameter trained; nobody reads. */
static void take_others(bother *b, int flips)
{
    mt_store *s = b->r->cx.store;

    atomic_store(&b->stop, 1);
    thread_join(b->thread);
    for (int u = 0; u < UNITS && flips; u++) {
        int on = !mt_store_trainable(s, u, 1);

        if (on)
            CHECK_OK(mt_mirror_read(s, u, 1));
        CHECK_OK(mt_store_set_trainable(s, u, 1, on));
    }
    take_all(b->r);
    meet(b->r);
    atomic_store(&b->stop, 0);
    b->thread = thread_start(bother_on, b);
}

/* What compute reads is what is read on the host. */
static void check_alike(runner *r, int fetches)
{
    for (int u = 0; u < UNITS; u++) {
        void *hi = NULL;

        if (fetches)
            fetch(r, u);
        CHECK_OK(r->cx.dev->ops->sync(r->run));
        CHECK_OK(mt_mirror_bring(r->cx.store, u, 1u << MT_PLANE_HI));
        REQUIRE_OK(mt_store_hi(r->cx.store, u, &hi));
        for (int i = 0; i < PARAMS; i++) {
            size_t at = mt_store_offset(r->cx.store, u, i);

            CHECK_EQ(memcmp(r->slot[u] + at, (char *)hi + at, mt_store_plane_bytes(
                r->cx.store, u, i, MT_PLANE_HI, shape_of(u, i).numel)), 0);
        }
    }
}

static void in_any_order(runner *r)
{
    uint64_t seed = r->plan->seed, own = seed * 77 + (uint64_t)r->rank + 1;
    bother   b = { .r = r, .seed = own };
    unit_job next[UNITS];

    take_all(r);
    b.thread = thread_start(bother_on, &b);
    for (int k = 0; k < 40; k++) {
        int op = (int)(toy_random(&seed) % 7), some = (int)(toy_random(&seed) % 3);

        usleep((useconds_t)(toy_random(&own) % 1000));
        r->step = k % STEPS;
        if (op <= 1)
            one_step(r);
        else if (op <= 3)
            save_weights(r, 0, op == 3 ? next : NULL);
        else if (op == 4)
            write_from_outside_alike(r, full || some < 2 ? some % 2 : FROZEN);
        else if (op == 5)
            take_others(&b, r->plan->seed % 3 == 0 && some > 0);
        if (op != 3 || some > 0)
            check_alike(r, 1);
        meet(r);
    }
    atomic_store(&b.stop, 1);
    thread_join(b.thread);
    check_alike(r, 1);
    unsettle_all(r);
    check_alike(r, 0);
}

TEST(weights_of_devices_are_alike_in_any_order_of_all_that_is_done)
{
    for (uint64_t k = 1; k < 5; k++) {
        full = (int)(k % 2);
        run_all(PLAN(.ranks = 2 + (int)(k % 3), .settled = 7, .seed = k, .apart = k == 4,
                     .dawdle_us = (int[]){ 0, 100, 1000 }[k % 3]), in_any_order);
    }
    full = 0;
}

/* Of what a save brought memory goes when others are written already: it is not fetched. */
static void write_behind_a_save(runner *r)
{
    take_all(r);
    CHECK_OK(mt_ledger_save_begin(r->cx.store, 0));
    CHECK_OK(mt_mirror_peek(r->cx.store, 0, 1u << MT_PLANE_HI));
    mt_ledger_save_end(r->cx.store, 0);
    CHECK_OK(mt_ledger_wait_saved(r->cx.store, 0));
    write_from_outside_alike(r, 0);
    CHECK_EQ(mt_mirror_release_apart(r->cx.store, 0), 1);
    CHECK_OK(mt_mirror_release(r->cx.store, 0));
    meet(r);
    CHECK(is_first(fetched(r), 0));
}

TEST(frozen_weights_that_a_save_brought_are_not_fetched)
{
    run_all(PLAN(.ranks = 2, .settled = 7), write_behind_a_save);
}

/* A rank that reads, beside others that save, and step on. */
static char *read_all(runner *r, int unit, int peeks)
{
    size_t n = 0, at = 0;
    char  *found;

    for (int i = 0; i < PARAMS; i++)
        n += mt_store_plane_bytes(r->cx.store, unit, i, MT_PLANE_M, shape_of(unit, i).numel);
    REQUIRE((found = malloc(n)) != NULL);
    CHECK_OK((peeks ? mt_mirror_peek : mt_mirror_bring)(r->cx.store, unit, MT_STATE_PLANES));
    for (int i = 0; i < PARAMS; i++) {
        size_t bytes = mt_store_plane_bytes(r->cx.store, unit, i, MT_PLANE_M,
                                            shape_of(unit, i).numel);

        if (bytes > 0)
            memcpy(found + at, place(r, unit, i, MT_PLANE_M, 0), bytes);
        at += bytes;
    }
    r->fills = (int)n;
    return found;
}

/* All let go of a save's copies, but of what somebody reads, on whichever rank. */
static void read_beside_a_save(runner *r)
{
    char   *read = NULL;
    size_t  n = mt_store_plane_bytes(r->cx.store, 0, 0, MT_PLANE_M, shape_of(0, 0).numel);

    take_all(r);
    one_step(r);
    meet(r);
    CHECK_OK(mt_ledger_save_begin(r->cx.store, 0));
    free(read_all(r, 0, 1));
    meet(r);
    if (r->rank == 0)
        read = read_all(r, 0, 0);
    meet(r);
    mt_ledger_save_end(r->cx.store, 0);
    CHECK_OK(mt_ledger_wait_saved(r->cx.store, 0));
    CHECK_OK(mt_mirror_release(r->cx.store, 0));
    meet(r);
    if (r->rank == 0)
        CHECK_EQ(memcmp(place(r, 0, 0, MT_PLANE_M, 0), read, n), 0);
    free(read);
}

TEST(who_reads_beside_a_save_keeps_what_it_has)
{
    run_all(PLAN(.ranks = 3, .settled = 7), read_beside_a_save);
}

/* What each rank copies of a save has all ranks' portions, as of before the step that waits for it;
 * and goes behind it. */
static void save_beside_a_step(runner *r)
{
    unit_job jobs[UNITS];
    char    *before[UNITS], *copied;

    take_all(r);
    one_step(r);
    for (int u = 0; u < UNITS; u++)
        before[u] = read_all(r, u, 0);
    meet(r);
    for (int u = 0; u < UNITS; u++)
        CHECK_OK(mt_mirror_evict(r->cx.store, u));
    CHECK_EQ(mt_store_bytes(r->cx.store, MT_PLANE_M), 0);
    meet(r);
    begin_saves(r);
    meet(r);
    r->step = 1;
    (void)submit_all(r, jobs);
    for (int u = UNITS - 1; u >= 0; u--) {
        copied = read_all(r, u, 1);
        CHECK_EQ(memcmp(copied, before[u], (size_t)r->fills), 0);
        free(copied);
        CHECK(mt_store_bytes(r->cx.store, MT_PLANE_M) > 0);
        mt_ledger_save_end(r->cx.store, u);
        CHECK_OK(mt_ledger_wait_saved(r->cx.store, u));
        CHECK_OK(mt_mirror_release(r->cx.store, u));
    }
    meet(r);
    CHECK_EQ(mt_store_bytes(r->cx.store, MT_PLANE_M), 0);
    meet(r);                             /* nobody reads before */
    CHECK_OK(mt_update_drain(r->u));
    for (int u = 0; u < UNITS; u++) {
        copied = read_all(r, u, 0);
        CHECK(memcmp(copied, before[u], (size_t)r->fills) != 0);
        free(copied);
        free(before[u]);
    }
}

TEST(a_save_has_what_all_devices_have)
{
    run_all(PLAN(.ranks = 3, .settled = 7, .dawdle_us = UNDER_TSAN ? 100 : 500),
            save_beside_a_step);
}

/* A rank that reads a unit while the others are through with it; what they brought again, and read
 * at once, does not go with what was evicted. */
static void evict_beside_a_reader(runner *r)
{
    char   *read = NULL, *again;

    take_all(r);
    one_step(r);
    meet(r);
    read = read_all(r, 0, 0);
    for (int round = 0; round < 20; round++) {
        meet(r);
        if (r->rank == round % 3)
            usleep(3000);
        again = read_all(r, 0, 0);
        CHECK_EQ(memcmp(again, read, (size_t)r->fills), 0);
        free(again);
        CHECK_OK(mt_mirror_evict(r->cx.store, 0));
        again = read_all(r, 0, 0);
        CHECK_EQ(memcmp(again, read, (size_t)r->fills), 0);
        free(again);
    }
    free(read);
}

TEST(nobody_evicts_what_another_reads)
{
    run_all(PLAN(.ranks = 3, .settled = 7), evict_beside_a_reader);
}

/* As the states are kept, and as parameters are trained, whatever the share has room for. */
static void count_bytes(runner *r)
{
    size_t  own = 0, planes = 0;

    take_all(r);
    one_step(r);
    for (int u = 0; u < UNITS; u++)
        for (int i = 0; i < PARAMS; i++)
            for (int p = MT_PLANE_HI + 1; p < MT_PLANE_COUNT; p++) {
                int64_t from, n = mt_store_owned(r->cx.store, u, i, &from);

                if (!shapes[i].trainable)
                    continue;
                own += mt_store_plane_bytes(r->cx.store, u, i, (mt_plane)p, n);
                planes++;
            }
    CHECK(mt_store_device_bytes(r->cx.store) >= own);
    CHECK(mt_store_device_bytes(r->cx.store) <= own + planes * MT_PART_ALIGN);
    CHECK_EQ(mt_store_bytes(r->cx.store, MT_PLANE_M), 0);
}

TEST(a_device_has_its_portion_alone)
{
    run_all(PLAN(.ranks = 3, .settled = 7), count_bytes);
    run_all(PLAN(.ranks = 3, .settled = 7, .states = MT_STATES_8BIT_LO8), count_bytes);
}

/* The first has closed its engine. What it has brought before may be read again and again. */
TEST(who_left_cannot_be_asked)
{
    const uint64_t looks_ns = 600000000;     /* some of peers.c's, at who lives */
    uint64_t       begun;

    CREW(c, PLAN(.settled = 7), NULL);
    mt_store *s = c.r[1].cx.store;
    crew_play(&c, go);
    CHECK_OK(mt_mirror_bring(s, 0, 1u << MT_PLANE_M));
    runner_close(&c.r[0]);
    CHECK_OK(mt_mirror_bring(s, 0, 1u << MT_PLANE_HI));      /* the share has it */
    for (begun = mt_now_ns(); mt_now_ns() < begun + looks_ns;)
        if (mt_mirror_bring(s, 0, 1u << MT_PLANE_M) != MT_OK)
            break;
    CHECK_OK(mt_ledger_check(s));
    CHECK_FAILS(mt_mirror_bring(s, 0, 1u << MT_PLANE_V), MT_EPEER, "rank 0 (process ");
    CHECK_SAYS(") closed its engine while others waited for its part of what is");
    c.r[0] = (runner){ .plan = NULL };
}

/* Copies of all units are under way when the step is asked for, and end one by one. */
static void step_beside_a_save(runner *r)
{
    unit_job jobs[UNITS];

    begin_saves(r);
    (void)submit_all(r, jobs);
    for (int u = 0; u < UNITS; u++) {
        CHECK(mt_ledger_updates_due(r->cx.store, u));
        mt_ledger_save_end(r->cx.store, u);
        CHECK_OK(mt_ledger_wait_updates(r->cx.store, u));
    }
    CHECK_OK(mt_update_drain(r->u));
}

TEST(an_update_waits_for_copies_of_its_own_unit)
{
    run_all(PLAN(.ranks = 2), step_beside_a_save);
}

/* ---- spreads ------------------------------------------------------------------------------ */

static void spread_one(peer *w, int param, unsigned planes)
{
    w->st = mt_store_spread(w->cx.store, w->unit, param, planes);
    snprintf(w->why, sizeof w->why, "%s", w->st == MT_OK ? "" : mt_last_error());
}

/* p.add_(1) of every parameter, then each is spread: pages of one are not those of the next. */
static void *add_one_in_place(void *arg)
{
    peer *w = arg;

    usleep((useconds_t)(w->rank * 3000));      /* who is late reads what there was before, too */
    for (int i = 0; i < 3; i++) {
        char *mine = view(w, i, MT_PLANE_HI), *end = mine + bytes_of(w, i, MT_PLANE_HI);

        while (mine < end)
            ++*mine++;
    }
    for (int i = 0; i < 3; i++) {
        spread_one(w, i, 1u << MT_PLANE_HI | 1u << MT_PLANE_M);
        CHECK_EQ(w->st, MT_OK);
    }
    return NULL;
}

static int how_many_are(const char *x, size_t n, int value)
{
    int count = 0;

    for (size_t i = 0; i < n; i++)
        count += x[i] == value;
    return count;
}

TEST(what_all_write_in_place_is_written_once)
{
    for (int ranks = 1; ranks <= RANKS; ranks++) {
        TABLE(w, ranks);
        for (int round = 1; round <= 3; round++) {
            uint64_t version = mt_ledger_version(w[0].cx.store, 0);

            run_together(add_one_in_place, w, sizeof *w, ranks);
            CHECK_EQ(mt_ledger_version(w[0].cx.store, 0), version + 3);
            for (int r = 0; r < ranks; r++)
                for (int i = 0; i < 3; i++) {
                    size_t n = bytes_of(&w[r], i, MT_PLANE_HI);

                    CHECK_EQ(how_many_are(at(&w[r], i, MT_PLANE_HI), n, round), n);
                    CHECK_EQ(how_many_are(view(&w[r], i, MT_PLANE_HI), n, round), n);
                }
        }
    }
}

static void *spread_what_others_do_not(void *arg)
{
    peer *w = arg;

    spread_one(w, w->rank == 1 ? 2 : 1, 1u << MT_PLANE_HI);
    return NULL;
}

TEST(who_spreads_something_else_is_named)
{
    TABLE(w, 2);
    run_together(spread_what_others_do_not, w, sizeof *w, 2);
    for (int r = 0; r < 2; r++) {
        CHECK_EQ(w[r].st, MT_EPEER);
        CHECK_HAS(w[r].why, "unit layers.0, parameter 2");
        CHECK_HAS(w[r].why, "unit layers.0, parameter 1");
    }
    CHECK_EQ(mt_ledger_check(w[0].cx.store), MT_EPEER);
}

TEST(who_does_not_come_is_named)
{
    TABLE(w, 3);
    mt_ledger_watchdog(w[0].cx.store, 0.3);
    spread_one(&w[0], 1, 1u << MT_PLANE_HI);
    CHECK_EQ(w[0].st, MT_EPEER);
    CHECK_HAS(w[0].why, "unit layers.0, parameter 1: rank 1 (process ");
    CHECK_HAS(w[0].why, "has not come in 0.3 s");
    spread_one(&w[1], 1, 1u << MT_PLANE_HI);             /* later: it is told */
    CHECK_EQ(w[1].st, MT_EPEER);
    CHECK_HAS(w[1].why, "rank 0 (process ");
    CHECK_EQ(mt_store_spread(w[2].cx.store, 0, 77, 1), MT_EINVAL);
}

static atomic_int warned;

static void note_warning(const char *text)
{
    if (strstr(text, "unit layers.0, parameter 1: rank 1 (process ") != NULL &&
        strstr(text, "has not come in 0.75 s") != NULL)
        atomic_fetch_add(&warned, 1);
}

/* Half the watchdog's time, or 30 s: then it is told, and goes on. */
TEST(who_comes_late_is_told_of)
{
    TABLE(w, 2);
    atomic_store(&warned, 0);
    for (int r = 0; r < 2; r++) {
        mt_store_watch(w[r].cx.store)->say = note_warning;
        mt_ledger_watchdog(w[r].cx.store, r == 0 ? 1.5 : 60);
    }
    pthread_t thread = thread_start(spread_what_others_do_not, &w[0]);
    for (int i = 0; i < 1400 && atomic_load(&warned) == 0; i++)
        usleep(1000);
    spread_one(&w[1], 1, 1u << MT_PLANE_HI);
    thread_join(thread);
    CHECK_EQ(w[0].st, MT_OK);
    CHECK_EQ(w[1].st, MT_OK);
    CHECK_EQ(atomic_load(&warned), 1);
}

TEST(alone_nothing_is_spread)
{
    TOY(t, 1, 0, 0);
    uint64_t version = mt_ledger_version(t.store, 0);
    CHECK_OK(mt_store_spread(t.store, 0, 1, 1u << MT_PLANE_HI));
    CHECK_EQ(mt_ledger_version(t.store, 0), version);
}

/* ---- faults ------------------------------------------------------------------------------- */

static void begin_updates(peer *p, int ranks)
{
    for (int r = 0; r < ranks; r++)
        mt_ledger_update_begin(p[r].cx.store, 0);
}

TEST(a_reader_waits_for_every_rank)
{
    uint64_t version;

    TABLE(p, 3);
    for (int r = 0; r < 3; r++) {
        mt_ledger_watchdog(p[r].cx.store, 0.2);
        mt_ledger_grads_begin(p[r].cx.store, 0);
    }
    begin_updates(p, 3);
    for (int r = 0; r < 2; r++) {
        mt_ledger_update_end(p[r].cx.store, 0);
        mt_ledger_grads_end(p[r].cx.store, 0);
    }
    for (int r = 0; r < 3; r++) {
        CHECK_FAILS(mt_ledger_wait_updates(p[r].cx.store, 0), MT_ESTUCK, "; rank 2 (process ");
        CHECK(strstr(mt_last_error(), "; rank 1") == NULL);
        CHECK_EQ(mt_ledger_wait_grads(p[r].cx.store, 0), MT_ESTUCK);
        CHECK_EQ(mt_ledger_updates_due(p[r].cx.store, 0), 1);
        CHECK_EQ(mt_ledger_save_begin(p[r].cx.store, 0), MT_ESTATE);
    }
    mt_ledger_update_end(p[2].cx.store, 0);
    mt_ledger_grads_end(p[2].cx.store, 0);
    for (int r = 0; r < 3; r++) {
        CHECK_OK(mt_ledger_wait_grads(p[r].cx.store, 0));
        CHECK_OK(mt_ledger_fetch_begin(p[r].cx.store, 0, &version));
        CHECK_EQ(mt_ledger_updates_due(p[r].cx.store, 0), 0);
    }
}

/* Waits for the unit's update as a thread of its own, so that what ends it comes from elsewhere. */
static void *wait_for_update(void *arg)
{
    peer *w = arg;

    w->st = mt_ledger_wait_updates(w->cx.store, 0);
    snprintf(w->why, sizeof w->why, "%s", w->st == MT_OK ? "" : mt_last_error());
    return NULL;
}

static void check_told(peer *w, const char *what)
{
    thread_join(w->thread);
    CHECK_EQ(w->st, MT_EPEER);
    CHECK_HAS(w->why, what);
}

TEST(a_fault_of_one_is_everybodys)
{
    TABLE(w, 3);
    for (int r = 0; r < 3; r++)
        mt_ledger_update_begin(w[r].cx.store, 0);
    for (int r = 0; r < 2; r++)
        w[r].thread = thread_start(wait_for_update, &w[r]);
    mt_ledger_fault(w[2].cx.store, MT_EDISK, "the disk is full");
    for (int r = 0; r < 2; r++) {
        check_told(&w[r], "rank 2 (process ");
        CHECK_HAS(w[r].why, "): the disk is full");
        CHECK(strstr(w[r].why, "rank 0") == NULL && strstr(w[r].why, "rank 1") == NULL);
    }
    CHECK_EQ(mt_ledger_check(w[2].cx.store), MT_EDISK);
}

static mt_status fault_within_seconds(mt_store *s)
{
    for (int i = 0; i < 5000 && mt_ledger_check(s) == MT_OK; i++)
        usleep(1000);
    return mt_ledger_check(s);
}

/* Each waits where the other does not come, or would. */
TEST(who_does_things_in_another_order_is_named)
{
    TABLE(w, 3);
    mt_ledger_meeting(w[0].cx.store, "exchanges gradients");
    usleep(150000);
    CHECK_OK(mt_ledger_check(w[0].cx.store));          /* the others may come yet */
    mt_ledger_say(w[2].cx.store, MT_COUNT_SUBMITTED, 1, 0);
    for (int r = 0; r < 3; r++) {
        CHECK_FAILS(fault_within_seconds(w[r].cx.store), MT_EPEER, "rank 2 (process ");
        CHECK_SAYS("has made step 1, which rank 0 has not, and rank 0 exchanges "
                                   "gradients, where rank 2 has not come");
    }
}

static void *do_all_in_order(void *arg)
{
    peer  *w = arg;
    unsigned seed = 77u + (unsigned)w->rank;

    for (uint64_t n = 1; n <= 300; n++) {
        mt_ledger_say(w->cx.store, MT_COUNT_SUBMITTED, n, 0);
        mt_ledger_meeting(w->cx.store, "meets");
        mt_ledger_meeting(w->cx.store, NULL);
        mt_ledger_say(w->cx.store, MT_COUNT_EVICTED, n, 0);
        mt_ledger_say(w->cx.store, MT_COUNT_WRITTEN, n, 0);
        if (rand_r(&seed) % 8 == 0)
            usleep((useconds_t)(rand_r(&seed) % 1000));
    }
    return NULL;
}

TEST(one_order_is_no_fault_however_far_apart)
{
    TABLE(w, RANKS);
    run_together(do_all_in_order, w, sizeof *w, RANKS);
    usleep(150000);
    for (int r = 0; r < RANKS; r++)
        CHECK_OK(mt_ledger_check(w[r].cx.store));
}

/* It is not known what it has written. */
TEST(an_update_that_failed_is_not_over)
{
    TABLE(p, 2);
    begin_updates(p, 2);
    mt_ledger_fault(p[0].cx.store, MT_EDEVICE, "broken");
    mt_ledger_update_end(p[0].cx.store, 0);
    mt_ledger_update_end(p[1].cx.store, 0);
    CHECK_EQ(mt_ledger_wait_updates(p[1].cx.store, 0), MT_EPEER);
}

TEST(who_leaves_early_is_named)
{
    TABLE(w, 2);
    mt_ledger_update_begin(w[0].cx.store, 0);
    mt_ledger_update_end(w[0].cx.store, 0);
    w[0].thread = thread_start(wait_for_update, &w[0]);
    mt_store_leave(w[1].cx.store);
    check_told(&w[0], "closed its engine while others waited for its update of unit layers.0");
}

TEST(who_leaves_when_all_is_done_is_missed_by_nobody)
{
    TABLE(p, 2);
    begin_updates(p, 2);
    for (int r = 0; r < 2; r++)
        mt_ledger_update_end(p[r].cx.store, 0);
    CHECK_OK(mt_ledger_wait_updates(p[0].cx.store, 0));
    mt_store_leave(p[1].cx.store);
    mt_store_leave(p[1].cx.store);
    usleep(250000);
    CHECK_OK(mt_ledger_check(p[0].cx.store));
    mt_ledger_grads_begin(p[0].cx.store, 0);             /* but from now on it is */
    mt_ledger_grads_end(p[0].cx.store, 0);
    CHECK_EQ(mt_ledger_wait_grads(p[0].cx.store, 0), MT_EPEER);
    CHECK_SAYS("while others waited for its gradients of unit layers.0");
}

/* A step whose jobs are not what the other ranks' are. */
typedef struct odd {
    runner   *r;
    double    max_norm;
    int       n_jobs, forgets;       /* forgets: nobody has measured its gradients */
    mt_status (*update)(void *arg, mt_pool *pool, float clip);
    void     (*alike)(const void *arg, uint64_t hash[MT_ALIKES]);
    mt_status st;
    char      why[512];
} odd;

static void *odd_step(void *arg)
{
    odd          *o = arg;
    unit_job      j[UNITS];
    mt_update_job jobs[UNITS];
    uint64_t      ticket = 0;

    for (int u = 0; u < UNITS; u++) {
        hand_over(o->r, u, 0);
        j[u] = (unit_job){ .r = o->r, .unit = u, .params = { 0, 1, 2, 4 }, .n = 4 };
        jobs[u] = (mt_update_job){ .unit = u, .n_params = 4, .params = j[u].params,
                                   .run = o->update, .arg = &j[u], .alike = o->alike };
    }
    for (int u = 0; u < UNITS && o->forgets; u++) {      /* not before the other is in its step */
        while (mt_share_said(o->r->cx.share, MT_COUNT_SUBMITTED, 1 - o->r->rank) == 0)
            usleep(1000);
        mt_offload_forget(o->r->o, u);
    }
    CHECK_OK(mt_update_submit(o->r->u, jobs, o->n_jobs, o->max_norm, o->r->run, &ticket));
    o->st = mt_update_drain(o->r->u);
    snprintf(o->why, sizeof o->why, "%s", o->st == MT_OK ? "" : mt_last_error());
    return NULL;
}

static void run_odd(odd *o)
{
    CREW(c, PLAN(.ranks = 2), NULL);
    for (int k = 0; k < 2; k++)
        o[k].r = &c.r[k];
    run_together(odd_step, o, sizeof *o, 2);
}

static void asks_of_rank(const void *arg, uint64_t hash[MT_ALIKES])
{
    const unit_job *j = arg;

    hash[MT_ALIKE_EPS] += mt_alike_mix(1, (uint64_t)j->r->rank);
    hash[MT_ALIKE_LR] += mt_alike_mix(1, (uint64_t)j->unit);
}

TEST(ranks_that_update_other_things_are_told)
{
    static const char *const names[] = { "differ: parameters with a gradient;",
                                         "differ: max_grad_norm;", "differ: eps;" };

    for (int what = 0; what < 3; what++) {
        odd o[2] = { { .max_norm = 1, .n_jobs = UNITS, .update = update },
                     { .max_norm = what == 1 ? 0.5 : 1, .n_jobs = UNITS - (what == 0),
                       .update = update } };

        o[0].alike = o[1].alike = what == 2 ? asks_of_rank : NULL;
        run_odd(o);
        for (int k = 0; k < 2; k++) {
            CHECK_EQ(o[k].st, MT_EPEER);
            CHECK_HAS(o[k].why, "update: step 1 is another one on rank ");
            CHECK_HAS(o[k].why, names[what]);
        }
    }
}

TEST(a_gradient_that_nobody_measured_ends_all_steps)
{
    odd o[2] = { { .max_norm = 1, .n_jobs = UNITS, .update = update },
                 { .max_norm = 1, .n_jobs = UNITS, .update = update, .forgets = 1 } };

    run_odd(o);
    CHECK_EQ(o[1].st, MT_ESTATE);
    CHECK_HAS(o[1].why, "unit layers.0: a gradient came without its sum of squares");
    CHECK_EQ(o[0].st, MT_EPEER);
    CHECK_HAS(o[0].why, "rank 1 (process ");
    CHECK_HAS(o[0].why, "came without its sum of squares");
}

/* An update that fails in one rank's pool. */
static mt_status update_fails(void *arg, mt_pool *pool, float clip)
{
    return MT_FAIL(MT_ENOMEM, "no memory for it");
}

TEST(an_update_that_fails_ends_all_steps)
{
    odd o[2] = { { .max_norm = 1, .n_jobs = UNITS, .update = update },
                 { .max_norm = 1, .n_jobs = UNITS, .update = update_fails } };

    run_odd(o);
    CHECK_EQ(o[0].st, MT_EPEER);
    CHECK_HAS(o[0].why, "rank 1 (process ");
    CHECK_HAS(o[0].why, "no memory for it");
    CHECK_EQ(o[1].st, MT_ENOMEM);
}

/* ---- processes ---------------------------------------------------------------------------- */

/* A child plays a rank of the plan, and says by its exit how many checks failed. */
static pid_t start(const plan *p, outcome *want, int fd, int rank, void (*script)(runner *r))
{
    pid_t child = fork();

    REQUIRE(child >= 0);
    if (child == 0) {
        runner r;

        atomic_store(&check_failures, 0);
        runner_open(&r, p, want, fd, rank);
        CHECK_OK(mt_store_spread(r.cx.store, 0, 0, 0));      /* rank 0 has filled it */
        script(&r);
        runner_close(&r);
        _exit(atomic_load(&check_failures) > 0);
    }
    return child;
}

static int exit_of(pid_t child)
{
    int status = 0;

    REQUIRE(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

/* All ranks of the plan as processes; rank `dies` is killed, if any is. */
static void run_processes(plan p, outcome *want, void (*script)(runner *r), int dies)
{
    pid_t child[RANKS];
    int   fd = share_new();

    for (int r = 0; r < p.ranks; r++)
        child[r] = start(&p, want, fd, r, script);
    for (int r = 0; r < p.ranks; r++)
        CHECK_EQ(exit_of(child[r]), r == dies ? 1000 + SIGKILL : 0);
    close(fd);
}

TEST(processes_have_the_bits_of_one)
{
    for (int ranks = 1; ranks <= RANKS; ranks++) {
        plan p = PLAN(.ranks = ranks, .micros = 2, .dawdle_us = 200);
        CLOSED_BY(outcome_free) outcome want;

        run_alone(&p, &want);
        run_processes(p, &want, go, -1);
    }
}

/* With a child that outlives it, as a loader of data has: what that holds is not the rank's. */
static void die(void)
{
    if (fork() == 0) {
        for (int fd = 0; fd < 3; fd++)
            close(fd);                   /* nobody waits for it at the other end of a pipe */
        (void)sleep(20);
        _exit(0);
    }
    (void)raise(SIGKILL);
}

/* Rank 2 is killed before its second step; the others are told in theirs. */
static void steps_until_one_dies(runner *r)
{
    uint64_t ticket;
    double   norm, began;
    int      skipped;

    one_step(r);
    for (int u = 0; u < UNITS; u++)
        CHECK_OK(mt_ledger_wait_updates(r->cx.store, u));
    r->step = 1;
    if (r->rank == 2)
        die();
    for (int u = 0; u < UNITS; u++)
        mt_ledger_grads_begin(r->cx.store, u);
    for (int u = 0; u < UNITS; u++)
        mt_ledger_grads_end(r->cx.store, u);
    began = seconds_now();
    CHECK_FAILS(mt_ledger_wait_grads(r->cx.store, 1), MT_EPEER, "rank 2 (process ");
    CHECK_SAYS(") ended while others waited for its gradients of unit layers.0");
    CHECK(seconds_now() - began < 15);       /* while the child still sleeps */
    CHECK_EQ(mt_update_submit(r->u, NULL, 0, 1.0, r->run, &ticket), MT_EPEER);
    CHECK_EQ(mt_update_norm(r->u, 1, &norm, &skipped), MT_EPEER);
}

TEST(who_dies_is_named)
{
    run_processes(PLAN(.ranks = 3), NULL, steps_until_one_dies, 2);
}

/* Rank 1 answers nothing, and is killed while it is asked. */
static void ask_who_dies(runner *r)
{
    take_all(r);
    one_step(r);
    for (int u = 0; u < UNITS; u++)
        CHECK_OK(mt_ledger_wait_updates(r->cx.store, u));
    meet(r);
    if (r->rank == 1)
        (void)raise(SIGSTOP);
    usleep(200000);                      /* before, it might answer yet */
    double began = seconds_now();
    CHECK_FAILS(mt_mirror_bring(r->cx.store, 1, 1u << MT_PLANE_M), MT_EPEER, "rank 1 (process ");
    CHECK_SAYS(") ended while others waited for its part of what is read");
    CHECK(seconds_now() - began < 15);
}

TEST(who_dies_while_it_is_asked_is_named)
{
    plan  p = PLAN(.ranks = 3, .settled = 7);
    pid_t child[3];
    int   fd = share_new(), status;

    for (int r = 0; r < 3; r++)
        child[r] = start(&p, NULL, fd, r, ask_who_dies);
    REQUIRE(waitpid(child[1], &status, WUNTRACED) == child[1]);
    CHECK(WIFSTOPPED(status));
    usleep(300000);
    (void)kill(child[1], SIGKILL);
    for (int r = 0; r < 3; r++)
        CHECK_EQ(exit_of(child[r]), r == 1 ? 1000 + SIGKILL : 0);
    close(fd);
}

static atomic_int *stepping;             /* of all processes: rank 1 takes its steps */

/* At any moment of a step: the others end, and by themselves. */
static void steps_for_ever(runner *r)
{
    if (r->rank == 1) {
        (void)alarm(60);
        atomic_store(stepping, 1);
    }
    if (r->plan->settled)
        take_all(r);
    while (mt_ledger_check(r->cx.store) == MT_OK) {
        one_step(r);
        r->step++;
    }
    /* Who has seen it, and is gone, is named after it. */
    CHECK_SAYS("rank 1 (process ");
    CHECK_SAYS(") ended");
    _exit(strncmp(mt_last_error(), "rank 1 (process ", 16) == 0 ? 0 : 2);
}

TEST(a_death_at_any_moment_ends_all)
{
    stepping = mmap(NULL, sizeof *stepping, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
                    0);
    REQUIRE(stepping != MAP_FAILED);
    for (int k = 0; k < (UNDER_TSAN ? 2 : 6); k++) {
        plan   p = PLAN(.ranks = 3, .dawdle_us = 300, .settled = k % 2 ? 7 : 0, .look = 1);
        pid_t child[3];
        int   fd = share_new(), quiet = dup(2), null = open("/dev/null", O_WRONLY);

        atomic_store(stepping, 0);
        (void)dup2(null, 2);                             /* checks of a step that is ended fail */
        for (int r = 0; r < 3; r++)
            child[r] = start(&p, NULL, fd, r, steps_for_ever);
        (void)dup2(quiet, 2);
        close(quiet);
        close(null);
        close(fd);
        for (int ms = 0; !atomic_load(stepping) && ms < 30000; ms++)
            usleep(1000);                                /* one that has not come is not missed */
        usleep((useconds_t)(50000 + k * 7919));
        (void)kill(child[1], SIGKILL);
        double began = seconds_now();
        CHECK_EQ(exit_of(child[0]), 0);
        CHECK_EQ(exit_of(child[2]), 0);
        CHECK_EQ(exit_of(child[1]), 1000 + SIGKILL);
        CHECK(seconds_now() - began < (UNDER_TSAN ? 30 : 10));
    }
    (void)munmap(stepping, sizeof *stepping);
}
