/* test_numa.c — arena.h's nodes on made-up topologies, and what the kernel answers. */
#include "check.h"

#include "../../csrc/core/arena.h"
#include <linux/mempolicy.h>
#include <sys/syscall.h>

static char box[32];                 /* a made-up sysfs, while there is one */

static void put(const char *name, const char *text)
{
    char  path[512];
    FILE *f;

    (void)snprintf(path, sizeof path, "%s/%s", box, name);
    for (char *slash = path + strlen(box) + 1; (slash = strchr(slash, '/')) != NULL; slash++) {
        *slash = '\0';
        (void)mkdir(path, 0700);
        *slash = '/';
    }
    REQUIRE((f = fopen(path, "we")) != NULL);
    (void)fputs(text, f);
    (void)fclose(f);
}

/* NULL: there is no such file. */
static mt_nodes nodes_of(const char *online, const char *cpu, const char *memory,
                         const char *allowed)
{
    static const char *const names[] = { "devices/system/node/online",
                                         "devices/system/node/has_cpu",
                                         "devices/system/node/has_memory", "status" };
    const char *texts[] = { online, cpu, memory, allowed };
    char        path[512];
    mt_nodes    nodes;

    (void)snprintf(box, sizeof box, "/tmp/mt_test_numa_XXXXXX");
    REQUIRE(mkdtemp(box) != NULL);
    for (int i = 0; i < 4; i++) {
        (void)snprintf(path, sizeof path, "%s/%s", box, names[i]);
        if (texts[i] != NULL)
            put(names[i], texts[i]);
    }
    mt__nodes_read(box, path, &nodes);           /* status is the last */
    (void)snprintf(path, sizeof path, "rm -r %s", box);
    CHECK_EQ(system(path), 0);
    return nodes;
}

TEST(nodes_with_processors_and_memory_count)
{
    mt_nodes two = nodes_of("0-1\n", "0-1\n", "0-1\n", "Name:\tx\nMems_allowed_list:\t0-1\n");
    /* a GH200's HBM is 1 to 8 */
    mt_nodes gpu = nodes_of("0-8\n", "0\n", "0-8\n", "Mems_allowed_list:\t0-8\n");
    mt_nodes some = nodes_of("0-3,64,70-71\n", "0-3,64,70\n", "1-3,64,70-71\n",
                             "Mems_allowed_list:\t2-80\n");

    CHECK_EQ(two.n, 2);
    CHECK_EQ(two.bits[0], 3);
    CHECK_EQ(gpu.n, 1);
    CHECK_EQ(gpu.bits[0], 1);
    CHECK_EQ(some.n, 4);
    CHECK_EQ(some.bits[0], 0xc);
    CHECK_EQ(some.bits[1], 1ul << 0 | 1ul << 6);
}

TEST(a_machine_that_says_nothing_has_one_node)
{
    CHECK_EQ(nodes_of(NULL, NULL, NULL, NULL).n, 1);
    CHECK_EQ(nodes_of("0\n", NULL, NULL, NULL).n, 1);
    CHECK_EQ(nodes_of("0-1\n", "0\n", "1\n", NULL).n, 1);        /* none has both */
    CHECK(mt_nodes_here()->n >= 1);
}

static int policy_at(void *p)
{
    int mode = -1;

    CHECK_EQ(syscall(SYS_get_mempolicy, &mode, NULL, 0ul, p, (unsigned long)MPOL_F_ADDR), 0);
    return mode;
}

TEST(the_kernel_takes_what_it_is_asked)
{
    size_t   bytes = (size_t)sysconf(_SC_PAGESIZE) * 4;
    char    *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mt_nodes nowhere = nodes_of("900\n", "900\n", "900\n", NULL);

    REQUIRE(p != MAP_FAILED);
    int error = mt__numa_place(mt_nodes_here(), p, bytes);
    if (error == ENOSYS || error == EPERM) {
        munmap(p, bytes);
        SKIP("this kernel has no NUMA policies for us: %s", strerror(error));
    }
    CHECK_EQ(error, 0);
    CHECK_EQ(policy_at(p + bytes / 2), MPOL_INTERLEAVE);
    memset(p, 1, bytes);
    CHECK_EQ(mt__numa_place(&nowhere, p, bytes), EINVAL);
    CHECK_EQ(mt__numa_place(NULL, p + bytes / 2, bytes / 2), 0);
    CHECK_EQ(policy_at(p), MPOL_INTERLEAVE);
    CHECK_EQ(policy_at(p + bytes / 2), MPOL_LOCAL);
    munmap(p, bytes);
}

TEST(one_node_is_left_alone)
{
    mt_arena a = { 0 };

    REQUIRE_OK(mt_arena_open(&a, (size_t)sysconf(_SC_PAGESIZE), NULL, NULL, "test", 0));
    if (mt_nodes_here()->n == 1)
        CHECK_EQ(policy_at(a.base), MPOL_DEFAULT);
    mt_arena_close(&a);
}
