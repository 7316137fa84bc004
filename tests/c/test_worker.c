/* test_worker.c — worker.h: jobs in turn, the first failure, both ways to stop, and a child. */
#include "check.h"

#include "../../csrc/core/worker.h"

enum { JOBS = 20 };

/* A job notes its number; those below zero fail, and the gate's waits until it is open. */
typedef struct task {
    mt_job job;
    int    number;
    int    more;                         /* so many times again */
    gate  *behind;
} task;

typedef struct room {
    mt_mutex  mu;
    mt_worker w;
    mt_watch  watch;
    int       ran[2 * JOBS], n_ran;      /* mu */
    char      name[16];
    task     *again;                     /* submitted once more by the job that runs next */
} room;

static mt_status perform(void *arg, mt_job *job)
{
    room *r = arg;
    task *k = (task *)(void *)job;

    r->ran[r->n_ran++] = k->number;
    if (k->more > 0) {
        k->more--;
        mt_worker_again(&r->w, job);
    }
    if (k->behind != NULL) {
        mt_unlock(&r->mu);
        wait_for_gate(k->behind);
        mt_lock(&r->mu);
    }
    (void)pthread_getname_np(pthread_self(), r->name, sizeof r->name);
    if (r->again != NULL) {
        (void)mt_worker_submit(&r->w, &r->again->job);
        r->again = NULL;
    }
    return k->number < 0 ? MT_FAIL(MT_EDISK, "job %d failed", k->number) : MT_OK;
}

static void room_open(room *r, int n_threads)
{
    *r = (room){ 0 };
    mt_mutex_open(&r->mu, MT_RANK_TEST);
    mt_watch_open(&r->watch, NULL);
    REQUIRE_OK(mt_worker_open(&r->w, &r->mu, n_threads, "mt-tested", "lane", perform, r));
}

static void room_close(room *r)
{
    mt_worker_close(&r->w);
    mt_watch_close(&r->watch);
    mt_mutex_close(&r->mu);
}

#define ROOM(r, ...) CLOSED_BY(room_close) room r; room_open(&r, __VA_ARGS__)

static uint64_t submit(room *r, task *k)
{
    return MT_LOCKED(&r->mu, mt_worker_submit(&r->w, &k->job));
}

static void submit_all(room *r, task *k, int n)
{
    for (int i = 0; i < n; i++) {
        k[i] = (task){ .number = i + 1 };
        CHECK_EQ(submit(r, &k[i]), i + 1);
    }
}

static mt_status wait_for(room *r, uint64_t number)
{
    return mt_worker_wait(&r->w, &r->watch, number, "layers.0", "a job");
}

TEST(jobs_run_in_turn_by_a_thread_with_the_name)
{
    task k[JOBS];

    ROOM(r, 1);
    submit_all(&r, k, JOBS);
    CHECK_OK(wait_for(&r, 3));
    CHECK_OK(wait_for(&r, MT_WORKER_ALL));
    CHECK_EQ(r.n_ran, JOBS);
    for (int i = 0; i < JOBS; i++)
        CHECK_EQ(r.ran[i], i + 1);
    CHECK_STR(r.name, "mt-tested");
}

TEST(a_wait_is_for_as_many_as_it_says)
{
    gate first = { 0 }, shut = { 0 };
    task k[3] = { { .number = 1, .behind = &first }, { .number = 2, .behind = &shut },
                  { .number = 3 } };

    ROOM(r, 1);
    mt_watch_limit(&r.watch, 0.05);
    for (int i = 0; i < 3; i++)
        (void)submit(&r, &k[i]);
    CHECK_FAILS(wait_for(&r, 1), MT_ESTUCK, "unit layers.0 waits for a job");
    atomic_store(&first.open, 1);
    mt_watch_limit(&r.watch, 600);
    CHECK_OK(wait_for(&r, 1));
    mt_watch_limit(&r.watch, 0.05);
    CHECK_EQ(wait_for(&r, MT_WORKER_ALL), MT_ESTUCK);
    atomic_store(&shut.open, 1);
    mt_watch_limit(&r.watch, 600);
    CHECK_OK(wait_for(&r, MT_WORKER_ALL));
}

TEST(first_failure_is_told_to_who_waits_and_others_run)
{
    task k[4] = { { .number = 1 }, { .number = -2 }, { .number = -3 }, { .number = 4 } };

    ROOM(r, 1);
    CHECK_EQ(submit(&r, &k[0]), 1);
    CHECK_OK(wait_for(&r, 1));
    for (int i = 1; i < 4; i++)
        (void)submit(&r, &k[i]);
    CHECK_FAILS(wait_for(&r, MT_WORKER_ALL), MT_EDISK, "job -2 failed");
    CHECK_EQ(r.n_ran, 4);
    CHECK_EQ(wait_for(&r, 1), MT_EDISK);             /* it stays */
    CHECK_SAYS("job -2 failed");
}

TEST(stop_runs_what_is_in_the_list)
{
    task k[JOBS];

    ROOM(r, 1);
    submit_all(&r, k, JOBS);
    mt_worker_stop(&r.w, 0);
    mt_worker_stop(&r.w, 0);
    CHECK_EQ(r.n_ran, JOBS);
}

static void *stop_dropping(void *arg)
{
    mt_worker_stop(arg, 1);
    return NULL;
}

/* The list is empty before the job that runs has ended. */
TEST(stop_may_drop_what_is_in_the_list)
{
    gate shut = { 0 };
    task k[2] = { { .number = 1, .behind = &shut }, { .number = 2 } };

    ROOM(r, 1);
    (void)submit(&r, &k[0]);
    (void)submit(&r, &k[1]);
    UNTIL(MT_LOCKED(&r.mu, r.n_ran) > 0);
    pthread_t stopper = thread_start(stop_dropping, &r.w);
    UNTIL(!MT_LOCKED(&r.mu, k[1].job.listed));
    atomic_store(&shut.open, 1);
    thread_join(stopper);
    CHECK_EQ(r.n_ran, 1);
    CHECK_EQ(r.w.submitted, 1);
}

TEST(withdrawn_job_does_not_run_and_may_come_again)
{
    gate shut = { 0 };
    task k[4] = { { .number = 1, .behind = &shut }, { .number = 2 }, { .number = 3 },
                  { .number = 4 } };

    ROOM(r, 1);
    for (int i = 0; i < 4; i++)
        (void)submit(&r, &k[i]);
    mt_lock(&r.mu);
    mt_worker_withdraw(&r.w, &k[3].job);             /* the last, so the list's end moves */
    mt_worker_withdraw(&r.w, &k[1].job);
    mt_worker_withdraw(&r.w, &k[1].job);
    (void)mt_worker_submit(&r.w, &k[1].job);
    mt_unlock(&r.mu);
    atomic_store(&shut.open, 1);
    CHECK_OK(wait_for(&r, MT_WORKER_ALL));
    CHECK_EQ(r.n_ran, 3);
    CHECK_EQ(r.ran[1], 3);
    CHECK_EQ(r.ran[2], 2);
}

TEST(job_may_be_submitted_by_its_own_run)
{
    task k = { .number = 7 };

    ROOM(r, 1);
    r.again = &k;
    (void)submit(&r, &k);
    CHECK_OK(wait_for(&r, 2));
    CHECK_EQ(r.n_ran, 2);
}

/* Also when the worker stops; and where the list was empty others are behind it. */
TEST(job_that_runs_again_comes_before_all_others)
{
    static const int ran[] = { 1, 1, 2, 2, 2, 3 };
    gate        shut = { 0 };
    task        k[3] = { { .number = 1, .more = 1, .behind = &shut }, { .number = 2, .more = 2 },
                         { .number = 3 } };

    ROOM(r, 1);
    (void)submit(&r, &k[0]);
    (void)submit(&r, &k[1]);
    (void)submit(&r, &k[2]);
    atomic_store(&shut.open, 1);
    mt_worker_stop(&r.w, 0);
    CHECK_EQ(r.n_ran, 6);
    for (int i = 0; i < 6; i++)
        CHECK_EQ(r.ran[i], ran[i]);
    CHECK_EQ(r.w.ended, r.w.submitted);
}

/* Each waits at the gate, so none ends before all have begun. */
TEST(several_threads_share_a_list)
{
    gate shut = { 0 };
    task k[4];

    ROOM(r, 4);
    for (int i = 0; i < 4; i++) {
        k[i] = (task){ .number = i + 1, .behind = &shut };
        (void)submit(&r, &k[i]);
    }
    UNTIL(MT_LOCKED(&r.mu, r.n_ran) == 4);
    atomic_store(&shut.open, 1);
    CHECK_OK(wait_for(&r, MT_WORKER_ALL));
    CHECK_EQ(r.n_ran, 4);
}

static mt_status wait_on_the_lane(void *arg, mt_job *job)
{
    room   *r = arg;
    mt_post post;

    mt_unlock(&r->mu);
    mt_watch_begin(&r->watch, &post, NULL, NULL, "a gate");
    wait_for_gate(((task *)(void *)job)->behind);
    mt_watch_end(&r->watch, &post, MT_OK);
    mt_lock(&r->mu);
    return MT_OK;
}

TEST(waits_of_its_thread_have_its_lane)
{
    static room r;
    gate        shut = { 0 };
    task        k = { .behind = &shut };
    char        list[256] = "";

    mt_mutex_open(&r.mu, MT_RANK_TEST);
    mt_watch_open(&r.watch, NULL);
    REQUIRE_OK(mt_worker_open(&r.w, &r.mu, 1, "mt-tested", "lane", wait_on_the_lane, &r));
    (void)submit(&r, &k);
    for (int i = 0; i < 5000 && list[0] == 0; i++) {
        sleep_ms(1);
        mt_watch_tell(&r.watch, list, sizeof list);
    }
    CHECK_HAS(list, "lane waits for a gate");
    atomic_store(&shut.open, 1);
    room_close(&r);
}

/* What the child finds is its exit status, bits. */
static int look_in_child(room *r)
{
    int good = wait_for(r, 1) == MT_ESTATE;

    good |= (strstr(mt_last_error(), "forked") != NULL) << 1;
    mt_worker_stop(&r->w, 0);
    mt_worker_close(&r->w);
    return good;
}

TEST(child_is_refused_and_stops_nothing)
{
    task  k = { .number = 1 };
    int   status = 0;
    pid_t child;

    if (UNDER_TSAN)
        SKIP("it ends children of a process with threads");
    ROOM(r, 1);
    mt_lock(&r.mu);                      /* for good, in the child */
    if ((child = fork()) == 0)
        _exit(look_in_child(&r));
    mt_unlock(&r.mu);
    REQUIRE(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), 3);
    (void)submit(&r, &k);
    CHECK_OK(wait_for(&r, 1));
}

TEST(worker_that_was_never_opened_is_closed)
{
    mt_worker w = { 0 };

    mt_worker_stop(&w, 0);
    mt_worker_close(&w);
    CHECK_EQ(w.opened, 0);
}
