/* test_lock.c — locks out of turn are noticed, and by their names. */
#include "check.h"
#include "../../csrc/core/lock.h"

static char told[2048];         /* what the child of the latest `noticed` said */

/* 1: a child that does this is aborted; `told` has what it said. 0: it ended well. */
static int noticed(void (*work)(int n), int n)
{
    int    ends[2], status = 0;
    size_t got = 0;
    pid_t  pid;

    REQUIRE(pipe(ends) == 0 && (pid = fork()) >= 0);
    if (pid == 0) {
        (void)signal(SIGABRT, SIG_DFL);
        (void)dup2(ends[1], 2);
        work(n);
        _exit(0);
    }
    close(ends[1]);
    for (ssize_t some = 1; some > 0; got += some > 0 ? (size_t)some : 0)
        some = read(ends[0], told + got, sizeof told - 1 - got);
    told[got] = 0;
    close(ends[0]);
    REQUIRE(waitpid(pid, &status, 0) == pid);
    CHECK(WIFSIGNALED(status) ? WTERMSIG(status) == SIGABRT : WEXITSTATUS(status) == 0);
    return WIFSIGNALED(status);
}

static void take_all_in_order(int some)
{
    for (int k = 1; k <= some; k++) {
        mt_mutex m[3];

        for (int i = 0; i < 3; i++)
            mt_mutex_open(&m[i], (mt_rank)((i * (MT_RANK_COUNT - 2)) / 2 + 1));
        for (int i = 0; i < 3; i++)
            mt_lock(&m[i]);
        for (int i = 0; i < 3; i++)             /* given back in any order */
            mt_unlock(&m[(i + k) % 3]);
        for (int i = 0; i < 3; i++)
            mt_mutex_close(&m[i]);
    }
}

TEST(locks_in_turn_are_fine)
{
    CHECK_EQ(noticed(take_all_in_order, 6), 0);
    CHECK_STR(told, "");
}

/* The lock of rank n under the one behind it. */
static void take_two_the_wrong_way(int n)
{
    mt_mutex first, second;

    mt_mutex_open(&first, (mt_rank)n);
    mt_mutex_open(&second, (mt_rank)(n + 1));
    mt_lock(&second);
    mt_lock(&first);
}

TEST(any_two_out_of_turn_are_noticed_and_named)
{
    for (int n = MT_RANK_NONE + 1; n < MT_RANK_COUNT - 1; n++) {
        char want[512];

        snprintf(want, sizeof want, "broken: %s is taken under %s, which comes behind it",
                 mt_rank_name((mt_rank)n), mt_rank_name((mt_rank)(n + 1)));
        CHECK_EQ(noticed(take_two_the_wrong_way, n), 1);
        CHECK_HAS(told, want);
        CHECK_HAS(told, "test_lock.c:");
    }
    CHECK_HAS(mt_rank_name(MT_RANK_SWAP), "SWAP (bundles");
}

static void take_two_of_a_rank(int n)
{
    mt_mutex a, b;

    mt_mutex_open(&a, (mt_rank)n);
    mt_mutex_open(&b, (mt_rank)n);
    mt_lock(&a);
    mt_lock(&b);
}

TEST(two_locks_of_a_rank_are_noticed)
{
    CHECK_EQ(noticed(take_two_of_a_rank, MT_RANK_MAKING), 1);
    CHECK_HAS(told, "MAKING (");
}

/* What is held in between does not hide what was taken before. */
static void take_again(int between)
{
    mt_mutex a = MT_MUTEX(MT_RANK_MAKING), b = MT_MUTEX(MT_RANK_MAP);

    mt_lock(&a);
    if (between)
        mt_lock(&b);
    mt_lock(&a);
}

TEST(a_lock_taken_twice_is_noticed)
{
    for (int between = 0; between < 2; between++) {
        CHECK_EQ(noticed(take_again, between), 1);
        CHECK_HAS(told, "is taken by the thread that holds it");
    }
}

static void give_or_take_badly(int how)
{
    mt_mutex a = MT_MUTEX(MT_RANK_MAP), none = { .rank = MT_RANK_NONE };

    if (how == 0)
        mt_unlock(&a);
    else
        mt_lock(&none);
}

TEST(what_is_not_held_or_was_never_opened_is_noticed)
{
    CHECK_EQ(noticed(give_or_take_badly, 0), 1);
    CHECK_HAS(told, "MAP (");
    CHECK_HAS(told, "does not hold it");
    CHECK_EQ(noticed(give_or_take_badly, 1), 1);
    CHECK_HAS(told, "never opened");
}

static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

/* 0: with nothing else. 1: with another that was taken before. 2: with one taken since. 3: without
 * the lock. 4: after it what is held is known still. */
static void wait_some(int how)
{
    mt_mutex        before = MT_MUTEX(MT_RANK_SWAP), m = MT_MUTEX(MT_RANK_OFFLOAD);
    mt_mutex        since = MT_MUTEX(MT_RANK_MAP);
    struct timespec past = { 1, 0 };

    if (how == 1)
        mt_lock(&before);
    if (how != 3)
        mt_lock(&m);
    if (how == 2)
        mt_lock(&since);
    if (mt_cond_timedwait(&changed, &m, &past) != ETIMEDOUT)
        _exit(1);
    if (how == 4)
        mt_lock(&before);
    mt_unlock(&m);
    if (how == 1)
        mt_unlock(&before);
}

TEST(waits_give_back_the_last_lock_alone)
{
    CHECK_EQ(noticed(wait_some, 0), 0);
    CHECK_EQ(noticed(wait_some, 1), 0);
    CHECK_EQ(noticed(wait_some, 2), 1);
    CHECK_HAS(told, "OFFLOAD (");
    CHECK_HAS(told, "which was taken since");
    CHECK_EQ(noticed(wait_some, 3), 1);
    CHECK_HAS(told, "does not hold it");
    CHECK_EQ(noticed(wait_some, 4), 1);
    CHECK_HAS(told, "SWAP (");
}

static mt_mutex of_one = MT_MUTEX(MT_RANK_MAP), of_other = MT_MUTEX(MT_RANK_SWAP);

static void *take_other(void *arg)
{
    mt_lock(&of_other);
    mt_unlock(&of_other);
    return arg;
}

TEST(what_another_thread_holds_does_not_count)
{
    mt_lock(&of_one);
    pthread_t thread = thread_start(take_other, NULL);
    thread_join(thread);
    mt_unlock(&of_one);
}
