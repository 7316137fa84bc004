/* test_pool.c — pool.h: every chunk once, one loop at a time among several callers. */
#include "opened.h"
#include <sched.h>
#include <sys/syscall.h>

enum { CHUNKS = 1000 };

/* Chunks are plain ints: two threads on one chunk, or a result read too early, is a race that
 * TSan reports. */
static void mark(void *arg, int64_t chunk)
{
    ((int *)arg)[chunk]++;
}

static void check_marks(mt_pool *p, int64_t n)
{
    FREED int *marks = calloc(CHUNKS + 1, sizeof *marks);
    int  wrong = 0;

    REQUIRE(marks != NULL);
    mt_pool_run(p, mark, marks, n);
    for (int64_t i = 0; i <= CHUNKS; i++)
        wrong += marks[i] != (i < n);
    CHECK_EQ(wrong, 0);
}

TEST(every_chunk_runs_exactly_once)
{
    static const int64_t counts[] = { 0, 1, 2, 3, 17, CHUNKS };

    for (int threads = 1; threads <= 5; threads += 2) {
        OPENED(mt_pool, p, mt_pool_open(threads, &p));
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
            check_marks(p, counts[i]);
    }
}

TEST(no_pool_is_this_thread)
{
    check_marks(NULL, CHUNKS);
    mt_pool_close(NULL);
}

TEST(pool_of_no_threads_is_refused)
{
    mt_pool *p = NULL;

    CHECK_FAILS(mt_pool_open(0, &p), MT_EINVAL, "0 threads");
    CHECK(p == NULL);
}

/* Short loops one after another: a worker late for one must not touch the next. */
TEST(many_short_loops_lose_nothing)
{
    OPENED(mt_pool, p, mt_pool_open(4, &p));
    for (int i = 0; i < 300; i++)
        check_marks(p, 2 + i % 7);
}

static struct { uint64_t before[3], slice_ns, others[3]; } shares[4];     /* sched_attr */

/* Each chunk waits for all others, so it returns only when four threads are in the loop. */
static void meet(void *arg, int64_t chunk)
{
    (void)syscall(SYS_sched_getattr, 0, &shares[chunk], (unsigned)sizeof *shares, 0u);
    (void)pthread_barrier_wait(arg);
}

TEST(all_threads_take_part)
{
    pthread_barrier_t all;

    OPENED(mt_pool, p, mt_pool_open(4, &p));
    REQUIRE(pthread_barrier_init(&all, NULL, 4) == 0);
    mt_pool_run(p, meet, &all, 4);
    mt_pool_run(p, meet, &all, 4);
    for (int i = 0, longer = 0; i < 4; i++) {        /* all but the caller; 0: an older Linux */
        longer += shares[i].slice_ns == 50000000 && shares[i].before[2] == shares[0].before[2];
        CHECK(i < 3 || shares[0].slice_ns == 0 || longer == 3);
    }
    (void)pthread_barrier_destroy(&all);
}

enum { CALLS = 20, SHARE = CHUNKS / 5 };

typedef struct caller {
    mt_pool    *pool;
    int         id;              /* 0 or 1 */
    atomic_int *running;         /* [2] chunks of each caller that run now; shared */
    atomic_int  mixed;           /* chunks of ours that met one of the other's */
    int         marks[SHARE];
} caller;

static void mark_mine(void *arg, int64_t chunk)
{
    caller *c = arg;

    atomic_fetch_add(&c->running[c->id], 1);
    if (atomic_load(&c->running[1 - c->id]) != 0)
        atomic_fetch_add(&c->mixed, 1);
    c->marks[chunk]++;
    if (chunk % 64 == 0)
        usleep(10);
    atomic_fetch_sub(&c->running[c->id], 1);
}

static void *call_often(void *arg)
{
    caller *c = arg;

    for (int i = 0; i < CALLS; i++)
        mt_pool_run(c->pool, mark_mine, c, SHARE);
    return NULL;
}

TEST(callers_in_two_threads_take_turns)
{
    static caller     callers[2];
    static atomic_int running[2];
    pthread_t         threads[2];
    int               wrong = 0;

    OPENED(mt_pool, p, mt_pool_open(3, &p));
    for (int i = 0; i < 2; i++) {
        callers[i] = (caller){ .pool = p, .id = i, .running = running };
        threads[i] = thread_start(call_often, &callers[i]);
    }
    for (int i = 0; i < 2; i++)
        thread_join(threads[i]);
    for (int i = 0; i < 2; i++) {
        for (int k = 0; k < SHARE; k++)
            wrong += callers[i].marks[k] != CALLS;
        CHECK_EQ(atomic_load(&callers[i].mixed), 0);
    }
    CHECK_EQ(wrong, 0);
}

TEST(idle_pool_costs_nothing)
{
    OPENED(mt_pool, p, mt_pool_open(3, &p));
    check_marks(p, CHUNKS);
    usleep(5000);
    double before = seconds_computed();
    usleep(50000);
    CHECK(seconds_computed() - before < 0.01);   /* of 0.1 that two spinning workers take */
}
