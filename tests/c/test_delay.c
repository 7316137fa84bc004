/* test_delay.c — dev_delay.c's promise: same seed, same naps; how long they are is seen here. */
#include "check.h"

/* The device's own source, with its sleep replaced by a note. Naps of one queue run one after the
 * other, and the test reads the notes after sync. */
enum { NAPS = 64 };
static long noted_us[NAPS];
static int  n_noted;

static int note_nap(const struct timespec *t, struct timespec *left)
{
    if (n_noted < NAPS)
        noted_us[n_noted] = (long)t->tv_sec * 1000000 + t->tv_nsec / 1000;
    n_noted++;
    return 0;
}
#define nanosleep note_nap
#include "../../csrc/dev/dev_delay.c"

static mt_dev *delayed(uint64_t seed, int max_us)
{
    mt_dev *cpu = NULL, *d = NULL;

    REQUIRE_OK(mt_dev_cpu_open(&cpu));
    REQUIRE_OK(mt_dev_delay_open(cpu, seed, max_us, &d));
    return d;
}

static void nothing(void *arg)
{
}

/* The naps of queue number `queue` for n operations, copies and calls in turn. */
static void naps_of(uint64_t seed, int max_us, int queue, int n, long *us)
{
    mt_dev   *d = delayed(seed, max_us);
    mt_queue *q = NULL;
    int       from = 1, to = 0;

    for (int i = 0; i <= queue; i++) {
        d->ops->queue_close(q);
        REQUIRE_OK(d->ops->queue_open(d, "q", &q));
    }
    n_noted = 0;
    for (int i = 0; i < n; i++)
        CHECK_OK(i % 2 ? d->ops->call(q, nothing, NULL) : d->ops->copy(q, &to, &from, sizeof to));
    CHECK_OK(d->ops->sync(q));
    CHECK_EQ(n_noted, n);
    memcpy(us, noted_us, (size_t)n * sizeof *us);
    d->ops->queue_close(q);
    d->ops->close(d);
}

TEST(same_seed_same_naps)
{
    long a[NAPS], b[NAPS];

    naps_of(7, 1000, 1, NAPS, a);
    naps_of(7, 1000, 1, NAPS, b);
    CHECK(memcmp(a, b, sizeof a) == 0);
}

TEST(queues_and_seeds_have_naps_of_their_own)
{
    long a[NAPS], b[NAPS], c[NAPS], e[NAPS];

    naps_of(7, 1000, 0, NAPS, a);
    naps_of(7, 1000, 1, NAPS, b);
    naps_of(8, 1000, 0, NAPS, c);
    naps_of(6, 1000, 2, NAPS, e);
    CHECK(memcmp(a, b, sizeof a) != 0);
    CHECK(memcmp(a, c, sizeof a) != 0);
    CHECK(memcmp(b, c, sizeof a) != 0);
    CHECK(memcmp(b, e, sizeof a) != 0);
}

TEST(naps_fill_the_range_and_stay_in_it)
{
    long us[NAPS], least = 1000000, most = 0;

    naps_of(3, 2500000, 0, NAPS, us);
    for (int i = 0; i < NAPS; i++) {
        least = us[i] < least ? us[i] : least;
        most = us[i] > most ? us[i] : most;
    }
    CHECK(least < 250000);
    CHECK(most > 2250000 && most <= 2500000);
    naps_of(3, 0, 0, NAPS, us);
    for (int i = 0; i < NAPS; i++)
        CHECK_EQ(us[i], 0);
}

TEST(adopted_queues_are_not_delayed)
{
    mt_dev   *d = delayed(1, 1000);
    mt_queue *q = NULL;

    REQUIRE_OK(d->ops->queue_adopt(d, 0, &q));
    n_noted = 0;
    CHECK_OK(d->ops->call(q, nothing, NULL));
    CHECK_EQ(n_noted, 0);
    d->ops->queue_close(q);
    d->ops->close(d);
}

TEST(negative_naps_are_refused)
{
    mt_dev *cpu = NULL, *d = NULL;

    REQUIRE_OK(mt_dev_cpu_open(&cpu));
    CHECK_FAILS(mt_dev_delay_open(cpu, 1, -5, &d), MT_EINVAL, "-5");
    CHECK(d == NULL);
    cpu->ops->close(cpu);            /* a refused device is still the caller's */
}
