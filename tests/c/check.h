/* check.h — a test program: functions that are tests, and ways to say what is expected.
 *
 *     TEST(event_never_recorded_is_done) { CHECK_EQ(done, 1); }
 *
 * `./test_dev` runs all, `./test_dev name ...` those named. Last line: "test_dev: 9 passed, ...".
 * With CHECK_TIMES in the environment each test's seconds are told.
 * Exit status 0, 1 after a failure, 77 when nothing ran but skips.
 * A failed CHECK is counted and the test goes on; a failed REQUIRE ends the program, for what
 * the rest would crash on. SKIP ends the test. A test that hangs is ended: one that has slept
 * through CHECK_SECONDS, or computed for as long. On a machine that others keep busy,
 * a test at work may take longer.
 *
 * Included once in a program, whose main it has.
 * Threads: CHECK may be used on any thread, SKIP on the test's own.
 */
#ifndef MT_CHECK_H
#define MT_CHECK_H

#include "../../csrc/core/status.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef CHECK_SECONDS
#define CHECK_SECONDS 120
#endif

typedef struct check_test {
    const char        *name;
    void             (*run)(void);
    struct check_test *next;
} check_test;

static check_test *check_tests, **check_last = &check_tests;     /* in the order of the file */

#define TEST(test)                                                                            \
    static void test(void);                                                                   \
    __attribute__((constructor)) static void test##_is_a_test(void)                           \
    {                                                                                         \
        static check_test entry = { #test, test, NULL };                                      \
        *check_last = &entry;                                                                 \
        check_last = &entry.next;                                                             \
    }                                                                                         \
    static void test(void)

/* A test between the two calls, however it ends. */
#define TEST_BETWEEN(test, before, after)                                                     \
    static void test##_inside(void);                                                          \
    TEST(test) { before; test##_inside(); after; }                                            \
    static void test##_inside(void)

/* The variable is closed where its block ends, however that comes. */
#define CLOSED_BY(close) __attribute__((cleanup(close)))

static inline void check_free(void *x)
{
    free(*(void **)x);
}

#define FREED CLOSED_BY(check_free)

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

/* Under ThreadSanitizer arithmetic takes a hundred times as long: tests of it take less there. */
#if defined(__SANITIZE_THREAD__)
#define UNDER_TSAN 1
#else
#define UNDER_TSAN 0
#endif

static atomic_int check_failures;       /* in the test that runs, any thread */
static int        check_skipped;        /* 1: the test that runs gave up; its own thread */
static const char *check_name;          /* of the test that runs; its own thread */
static double      check_began;         /* processor seconds, when that test began; set while no
                                         * alarm is due */
static double      check_looked;        /* the same, at the last alarm, on whichever thread that
                                         * came to */

static inline int check_said(int ok)
{
    if (!ok)
        atomic_fetch_add(&check_failures, 1);
    return ok;
}

#define CHECK_PRINT_(...) (fprintf(stderr, "  %s:%d: ", __FILE__, __LINE__),                  \
                           fprintf(stderr, __VA_ARGS__), fputc('\n', stderr))

#define CHECK(cond)                                                                           \
    do { if (!check_said(!!(cond))) CHECK_PRINT_("expected %s", #cond); } while (0)

/* Integers, enums and sizes; both sides are shown. */
#define CHECK_EQ(got, want)                                                                   \
    do {                                                                                      \
        long long got_ = (long long)(got), want_ = (long long)(want);                         \
        if (!check_said(got_ == want_))                                                       \
            CHECK_PRINT_("%s is %lld, expected %s = %lld", #got, got_, #want, want_);         \
    } while (0)

/* A call that must succeed; its message is shown when it does not. */
#define CHECK_OK(call)                                                                        \
    do {                                                                                      \
        mt_status st_ = (call);                                                               \
        if (!check_said(st_ == MT_OK))                                                        \
            CHECK_PRINT_("%s: %s: %s", #call, mt_status_text(st_), mt_last_error());          \
    } while (0)

#define CHECK_STR(got, want)                                                                  \
    do {                                                                                      \
        const char *got_ = (got), *want_ = (want);                                            \
        if (!check_said(strcmp(got_, want_) == 0))                                            \
            CHECK_PRINT_("%s is \"%s\", expected \"%s\"", #got, got_, want_);                 \
    } while (0)

/* A call that fails with that status and a message that has that part. */
#define CHECK_FAILS(call, status, part)                                                       \
    do { CHECK_EQ(call, status); CHECK_HAS(mt_last_error(), part); } while (0)

/* `text` contains `part`: for messages, which must name values. */
#define CHECK_HAS(text, part)                                                                 \
    do {                                                                                      \
        const char *text_ = (text), *part_ = (part);                                          \
        if (!check_said(strstr(text_, part_) != NULL))                                        \
            CHECK_PRINT_("%s is \"%s\", expected \"%s\" in it", #text, text_, part_);         \
    } while (0)

/* The latest failure's message has that part. */
#define CHECK_SAYS(part) CHECK_HAS(mt_last_error(), part)

#define REQUIRE(cond)                                                                         \
    do { if (!check_said(!!(cond))) { CHECK_PRINT_("needed: %s (last error: %s)", #cond,      \
                                                   mt_last_error()); exit(1); } } while (0)

#define REQUIRE_OK(call) REQUIRE((call) == MT_OK)

/* What `open` puts into x is closed where the block ends, behind what was opened after it. */
#define CLOSES(type, close) static inline void type##_done(type **x) { if (*x != NULL) close; }
#define OPENED(type, x, open) CLOSED_BY(type##_done) type *x = NULL; REQUIRE_OK(open)

/* In a function that has nothing to give back: its caller is told of the first failure. */
#define TRY(call) do { mt_status st_ = (call); if (st_ != MT_OK) return st_; } while (0)

#define SKIP(...) do { CHECK_PRINT_("skipped: " __VA_ARGS__); check_skipped = 1; return; } while (0)

/* An edge left out is a race, as it should be. */
#define RACE do { if (UNDER_TSAN) SKIP("a race on purpose"); } while (0)

static inline int check_wanted(const char *name, int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], name) == 0)
            return 1;
    return argc < 2;
}

/* ---- waiting, and threads ---- */

static inline void sleep_ms(long ms)
{
    nanosleep(&(struct timespec){ ms / 1000, ms % 1000 * 1000000L }, NULL);
}

#define UNTIL(cond) while (!(cond)) (void)usleep(200)

/* Stands in a queue until the test opens it: for mt_dev_ops.call. It may be opened before. */
typedef struct gate {
    atomic_int open;
} gate;

static inline void wait_for_gate(void *arg)
{
    UNTIL(atomic_load(&((gate *)arg)->open));
}

static inline double seconds_of(clockid_t clock)
{
    struct timespec t;

    (void)clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline double seconds_now(void)      { return seconds_of(CLOCK_MONOTONIC); }
static inline double seconds_computed(void) { return seconds_of(CLOCK_PROCESS_CPUTIME_ID); }

/* Where a scratch file in the directory, which has no name, can be opened; NULL: this process has
 * none there. */
static inline const char *scratch_of(const char *dir)
{
    static char path[64];
    char        name[512];

    for (int fd = 3; fd < 64; fd++) {
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        ssize_t n = readlink(path, name, sizeof name - 1);
        if (n > (ssize_t)strlen(dir) && strncmp(name, dir, strlen(dir)) == 0)
            return path;
    }
    return NULL;
}

static inline pthread_t thread_start(void *(*run)(void *), void *arg)
{
    pthread_t thread;

    REQUIRE(pthread_create(&thread, NULL, run, arg) == 0);
    return thread;
}

static inline void thread_join(pthread_t thread)
{
    REQUIRE(pthread_join(thread, NULL) == 0);
}

/* Each of n elements of an array is the argument of a thread of its own. */
static inline void run_together(void *(*run)(void *), void *array, size_t each, int n)
{
    pthread_t thread[16];

    REQUIRE(n <= COUNT(thread));
    for (int i = 0; i < n; i++)
        thread[i] = thread_start(run, (char *)array + (size_t)i * each);
    for (int i = 0; i < n; i++)
        thread_join(thread[i]);
}

/* ---- the program ---- */

/* SIGALRM. Of the time since the last alarm a test at work has had a hundredth,
 * however busy the machine. */
static inline void check_hung(int signal_number)
{
    static const char said[] = "HUNG ";
    double            now = seconds_computed();

    (void)signal_number;
    if (now - check_looked > CHECK_SECONDS / 100.0 && now - check_began < CHECK_SECONDS) {
        check_looked = now;
        (void)alarm(CHECK_SECONDS);
        return;
    }
    (void)!write(2, said, sizeof said - 1);
    (void)!write(2, check_name, strlen(check_name));
    (void)!write(2, "\n", 1);
    _exit(1);
}

static inline void check_run(const check_test *t, int counts[3])
{
    double began = seconds_now();
    int    failed;

    atomic_store(&check_failures, 0);
    check_skipped = 0;
    check_name = t->name;
    (void)alarm(0);
    check_began = check_looked = seconds_computed();
    (void)alarm(CHECK_SECONDS);
    t->run();
    failed = atomic_load(&check_failures) != 0;
    if (failed)
        fprintf(stderr, "FAILED %s\n", t->name);
    if (getenv("CHECK_TIMES") != NULL)
        fprintf(stderr, "  %-60s %.2f s, computing %.2f s\n", t->name, seconds_now() - began,
                seconds_computed() - check_began);
    counts[failed ? 1 : check_skipped ? 2 : 0]++;
}

int main(int argc, char **argv)
{
    int         counts[3] = { 0 };       /* passed, failed, skipped */
    const char *slash = strrchr(argv[0], '/');

    (void)signal(SIGALRM, check_hung);
    for (const check_test *t = check_tests; t != NULL; t = t->next)
        if (check_wanted(t->name, argc, argv))
            check_run(t, counts);
    if (counts[0] + counts[1] + counts[2] == 0) {
        fprintf(stderr, "no such test; there are:\n");
        for (const check_test *t = check_tests; t != NULL; t = t->next)
            fprintf(stderr, "  %s\n", t->name);
        return 1;
    }
    printf("%s: %d passed, %d failed, %d skipped\n", slash != NULL ? slash + 1 : argv[0],
           counts[0], counts[1], counts[2]);
    return counts[1] != 0 ? 1 : counts[0] == 0 ? 77 : 0;
}

#endif
