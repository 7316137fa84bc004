/* test_forks.c — what a child of fork() has of our memory and our files: nothing. */
#include "check.h"
#include "../../csrc/core/arena.h"
#include "../../csrc/core/forks.h"

/* Exit status of a child that does this; minus the signal that ended it. */
static int child(int (*work)(void *arg), void *arg)
{
    int   status = 0;
    pid_t pid = fork();

    if (pid == 0) {
        alarm(20);
        _exit(work(arg));
    }
    REQUIRE(pid > 0 && waitpid(pid, &status, 0) == pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static int reads(void *arg)
{
    (void)signal(SIGSEGV, SIG_DFL);
    return *(volatile char *)((mt_arena *)arg)->base;
}

/* 0: no mapping of the child's comes to lie where the arena was. */
static int maps(void *arg)
{
    const mt_arena *a = arg;
    uintptr_t       from = (uintptr_t)a->base;

    for (int i = 0; i < 200; i++) {
        void *p = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

        if (p == MAP_FAILED || ((uintptr_t)p < from + a->bytes && (uintptr_t)p + (1 << 20) > from))
            return 1;
    }
    return 0;
}

TEST(arenas_are_not_in_a_child_and_their_addresses_are_taken)
{
    mt_arena committed, reserved;

    REQUIRE_OK(mt_arena_open(&committed, 64 << 20, NULL, NULL, "committed", 0));
    REQUIRE_OK(mt_arena_reserve(&reserved, 64 << 20, NULL, 0, "reserved", 0));
    *(char *)committed.base = 7;
    CHECK_EQ(child(reads, &committed), -SIGSEGV);
    CHECK_EQ(child(reads, &reserved), -SIGSEGV);
    if (!UNDER_TSAN)                /* whose own mappings a child of several threads may not make */
        CHECK_EQ(child(maps, &committed), 0);
    CHECK_EQ(*(char *)committed.base, 7);
    mt_arena_close(&committed);
    mt_arena_close(&reserved);
}

/* The descriptor's number is another's by then: closing it again must not close that. */
static int has_none(void *arg)
{
    int fd = *(int *)arg, other;

    if (fcntl(fd, F_GETFD) != -1)
        return 1;
    other = open("/dev/null", O_RDONLY);
    mt_forks_close(fd);
    return other != fd || fcntl(other, F_GETFD) == -1 ? 2 : 0;
}

TEST(a_parents_file_is_not_in_a_child_nor_closed_there_again)
{
    int fd = mt_forks_open("/dev/null", O_RDONLY | O_CLOEXEC, 0);

    REQUIRE(fd >= 0);
    CHECK_EQ(child(has_none, &fd), 0);
    CHECK(fcntl(fd, F_GETFD) != -1);
    mt_forks_close(fd);
}

static void *makes_arenas(void *stop)
{
    while (!atomic_load((atomic_int *)stop)) {
        mt_arena a;
        int      fd = mt_forks_open("/dev/null", O_RDONLY | O_CLOEXEC, 0);

        REQUIRE_OK(mt_arena_open(&a, 1 << 16, NULL, NULL, "one of many", 0));
        mt_arena_close(&a);
        mt_forks_close(fd);
    }
    return NULL;
}

static int makes_its_own(void *arg)
{
    mt_arena a;
    int      fd = mt_forks_open("/dev/null", O_RDONLY | O_CLOEXEC, 0);

    if (fd < 0 || mt_arena_open(&a, 1 << 16, NULL, NULL, "the child's own", 0) != MT_OK)
        return 1;
    *(char *)a.base = 1;
    mt_arena_close(&a);
    mt_forks_close(fd);
    return 0;
}

TEST(a_fork_at_any_moment_leaves_both_lists_whole)
{
    atomic_int stop = 0;

    pthread_t thread = thread_start(makes_arenas, &stop);
    for (int i = 0; i < 100; i++)
        CHECK_EQ(child(makes_its_own, NULL), 0);
    atomic_store(&stop, 1);
    thread_join(thread);
}
