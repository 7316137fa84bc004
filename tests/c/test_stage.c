/* test_stage.c — dev_stage.c: host memory that cannot be locked is copied all the same,
 * in order. */
#include "opened.h"
#include "dev_fault.h"

#define BUFFER_BYTES ((size_t)8192)      /* the device's own source, with small buffers */
#include "../../csrc/dev/dev_stage.c"

#define PAGE_BYTES ((size_t)4096)

#define REGION (5 * BUFFER_BYTES)
enum { OURS = 2 };                      /* what the device itself locks: cushion and buffers */

static mt_dev *behind, *faulty, *stage;

/* Behind the stage: a device that locks `locks` regions of ours; below 0 all. */
static void open_behind(int n, fault_mode mode, int locks, int max_us)
{
    behind = delayed_open(5, max_us);
    faulty = fault_dev(behind, n, mode);
    fault_locks(faulty, locks);
    REQUIRE_OK(mt_dev_stage_open(faulty, &stage));
}

static void close_all(int *opened)
{
    stage->ops->close(stage);
    behind->ops->close(behind);
}

#define BEHIND(...) CLOSED_BY(close_all) int opened = (open_behind(__VA_ARGS__), 1); (void)opened

/* So much of ours is locked, and the rest noted, whatever its size. */
#define STAGE(locks, max_us) BEHIND(0, FAULT_ONCE, locks, max_us); \
    mt_dev_stage_limit(stage, SIZE_MAX, 0)

static size_t noted(void)
{
    char why[512];
    return mt_dev_stage_noted(stage, why, sizeof why);
}

/* A region of pages that hold i * step. */
static unsigned char *region_of(size_t bytes, unsigned step, mt_status want)
{
    unsigned char *p = aligned_alloc(PAGE_BYTES,
                                     (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES);

    REQUIRE(p != NULL);
    for (size_t i = 0; i < bytes; i++)
        p[i] = (unsigned char)(i * step >> 3);
    CHECK_EQ(stage->ops->host_register(stage, p, bytes), want);
    return p;
}

static void region_free(unsigned char *p)
{
    stage->ops->host_unregister(stage, p);
    free(p);
}

static mt_queue *queue(void)
{
    mt_queue *q = NULL;

    REQUIRE_OK(stage->ops->queue_open(stage, "q", &q));
    return q;
}

static void *device(size_t bytes)
{
    void *p = NULL;

    REQUIRE_OK(stage->ops->mem_alloc(stage, bytes, &p));
    return p;
}

static void region_drop(unsigned char **p) { region_free(*p); }
static void mem_drop(void **p)             { stage->ops->mem_free(stage, *p); }

#define NOTED(p, ...) CLOSED_BY(region_drop) unsigned char *p = region_of(__VA_ARGS__)
#define MEM(p, n)     CLOSED_BY(mem_drop) void *p = device(n)
#define QUEUE(q)      CLOSED_BY(mt_queue_done) mt_queue *q = queue()

TEST(copies_of_any_size_are_whole)
{
    const size_t   sizes[] = { 0, 1, BUFFER_BYTES - 1, BUFFER_BYTES, BUFFER_BYTES + 1, REGION };
    unsigned char *from, *to, *there;

    STAGE(OURS, 0);
    mt_queue *q = queue();
    there = device(REGION);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        from = region_of(REGION, 7, MT_OK);
        to = region_of(REGION, 11, MT_OK);
        CHECK_EQ(noted(), 2 * REGION);
        CHECK_OK(stage->ops->copy(q, there, from, sizes[i]));
        CHECK_OK(stage->ops->copy(q, to, there, sizes[i]));
        CHECK_OK(stage->ops->sync(q));
        CHECK_EQ(memcmp(from, to, sizes[i]), 0);
        for (size_t k = sizes[i]; k < REGION; k++)
            CHECK_EQ(to[k], (unsigned char)(k * 11 >> 3));
        region_free(from);
        region_free(to);
        CHECK_EQ(noted(), 0);
    }
    stage->ops->mem_free(stage, there);
    stage->ops->queue_close(q);
    CHECK_EQ(fault_live(faulty), OURS);
}

/* Up, down into another region, up again from there: each must find what the one before brought,
 * and the event behind them must be behind the last piece. Two queues, each with naps,
 * wait for each other. */
TEST(copies_keep_the_order_of_their_queues)
{
    STAGE(OURS, 100);
    NOTED(a, REGION, 3, MT_OK);
    NOTED(b, REGION, 0, MT_OK);
    NOTED(c, REGION, 0, MT_OK);
    QUEUE(one);
    QUEUE(two);
    MEM(there, REGION);
    MEM(other, REGION);
    OPENED(mt_event, up, stage->ops->event_open(stage, &up));
    OPENED(mt_event, down, stage->ops->event_open(stage, &down));
    for (int i = 0; i < 20; i++) {
        memset(a, i, REGION);
        CHECK_OK(stage->ops->copy(one, there, a, REGION));
        CHECK_OK(stage->ops->record(one, up));
        CHECK_OK(stage->ops->wait(two, up));
        CHECK_OK(stage->ops->copy(two, b, there, REGION));
        CHECK_OK(stage->ops->copy(two, other, b, REGION));
        CHECK_OK(stage->ops->copy(two, c, other, REGION));
        CHECK_OK(stage->ops->record(two, down));
        CHECK_OK(stage->ops->sync_event(down));
        CHECK_EQ(memcmp(a, c, REGION), 0);
    }
}

TEST(what_is_locked_is_copied_at_once)
{
    STAGE(OURS + 1, 0);
    NOTED(from, REGION, 3, MT_OK);
    CHECK_EQ(noted(), 0);
    region_free(region_of(REGION, 3, MT_OK));
    QUEUE(q);
    MEM(there, REGION);
    int before = fault_calls(faulty);
    CHECK_OK(stage->ops->copy(q, there, from, REGION));
    CHECK_EQ(fault_calls(faulty) - before, 1);
    CHECK_OK(stage->ops->sync(q));
}

/* The n-th registration and all after it fail: never worse than what could not be locked. */
TEST(whichever_registration_fails_first)
{
    for (int n = 0; n <= OURS + 4; n++) {
        unsigned char *p[3];

        BEHIND(0, FAULT_ONCE, n, 0);
        for (int i = 0; i < 3; i++)
            p[i] = region_of(SMALL_BYTES + BUFFER_BYTES, 1, n < OURS ? MT_ENOMEM : MT_OK);
        CHECK_EQ(noted(), n < OURS || n >= OURS + 3
                              ? 0 : (size_t)(OURS + 3 - n) * (SMALL_BYTES + BUFFER_BYTES));
        for (int i = 0; i < 3; i++)
            region_free(p[i]);
        CHECK_EQ(fault_live(faulty), n < OURS ? 0 : OURS);
    }
}

TEST(why_is_what_the_device_said_first)
{
    char why[512];

    BEHIND(0, FAULT_ONCE, OURS, 0);
    NOTED(p, SMALL_BYTES + PAGE_BYTES, 1, MT_OK);
    CHECK_EQ(mt_dev_stage_noted(stage, why, sizeof why), SMALL_BYTES + PAGE_BYTES);
    CHECK_HAS(why, "69632 bytes cannot be locked");
}

/* What kernels write into is locked in the cushion's place, or refused. */
TEST(small_regions_are_never_only_noted)
{
    BEHIND(0, FAULT_ONCE, OURS, 0);
    NOTED(large, SMALL_BYTES + PAGE_BYTES, 1, MT_OK);
    unsigned char *small = aligned_alloc(PAGE_BYTES, PAGE_BYTES);
    CHECK_EQ(stage->ops->host_register(stage, small, PAGE_BYTES), MT_ENOMEM);
    CHECK_EQ(fault_live(faulty), OURS - 1);                 /* the cushion was given up for it */
    fault_locks(faulty, 1);
    CHECK_OK(stage->ops->host_register(stage, small, PAGE_BYTES));
    CHECK_EQ(noted(), SMALL_BYTES + PAGE_BYTES);
    region_free(small);
}

TEST(other_failures_stay_failures)
{
    for (int n = 1; n <= OURS + 1; n++) {
        BEHIND(n, FAULT_ONCE, -1, 0);
        unsigned char *p = region_of(SMALL_BYTES + PAGE_BYTES, 1, MT_EDEVICE);
        CHECK_EQ(noted(), 0);
        free(p);
    }
}

/* A copy that fails on its way leaves nothing behind. */
TEST(a_copy_fails_at_each_of_its_calls)
{
    for (int n = 1, over = 0; !over; n++) {
        STAGE(OURS, 0);
        NOTED(p, REGION, 1, MT_OK);
        QUEUE(q);
        MEM(there, REGION);
        fault_next(faulty, n);
        mt_status st = stage->ops->copy(q, there, p, REGION);
        over = fault_fired(faulty) == 0;
        fault_next(faulty, 0);
        CHECK_EQ(st, over ? MT_OK : MT_EDEVICE);
        CHECK_OK(stage->ops->sync(q));
    }
}

/* More queues than buffers: those without one copy as the device behind does. Buffers come back. */
TEST(queues_without_a_buffer_copy_too)
{
    mt_queue *q[BUFFERS + 2];

    STAGE(OURS, 0);
    NOTED(from, REGION, 5, MT_OK);
    NOTED(to, REGION, 0, MT_OK);
    MEM(there, REGION);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < BUFFERS + 2; i++) {
            q[i] = queue();
            memset(from, i, REGION);
            CHECK_OK(stage->ops->copy(q[i], there, from, REGION));
            CHECK_OK(stage->ops->copy(q[i], to, there, REGION));
            CHECK_OK(stage->ops->sync(q[i]));
            CHECK_EQ(memcmp(from, to, REGION), 0);
            CHECK_EQ(as_queue(q[i])->buffer != NULL, i < BUFFERS);
        }
        for (int i = 0; i < BUFFERS + 2; i++)
            stage->ops->queue_close(q[i]);
    }
}

/* A device whose next registration takes until it is let go on, or five seconds. */
static atomic_int begun, let_go, late;

static mt_status slow_register(mt_dev *d, void *p, size_t bytes)
{
    atomic_store(&begun, 1);
    for (int i = 0; i < 5000 && !atomic_load(&let_go); i++)
        sleep_ms(1);
    atomic_store(&late, !atomic_load(&let_go));
    return MT_OK;
}

static void *registers(void *p)
{
    CHECK_OK(stage->ops->host_register(stage, p, REGION));
    return NULL;
}

TEST(while_memory_is_locked_others_copy_and_look)
{
    FREED unsigned char *second = aligned_alloc(PAGE_BYTES, REGION);
    pthread_t      thread;

    STAGE(OURS, 0);
    NOTED(first, REGION, 3, MT_OK);                     /* noted: its copies take a buffer */
    MEM(there, REGION);
    QUEUE(q);
    const mt_dev_ops *ops = faulty->ops;
    mt_dev_ops slow = *ops;
    slow.host_register = slow_register;
    faulty->ops = &slow;
    REQUIRE(second != NULL && pthread_create(&thread, NULL, registers, second) == 0);
    UNTIL(atomic_load(&begun));
    CHECK_EQ(noted(), REGION);
    CHECK_OK(stage->ops->copy(q, there, first, REGION));
    CHECK_OK(stage->ops->sync(q));
    CHECK_EQ(memcmp(there, first, REGION), 0);
    atomic_store(&let_go, 1);
    thread_join(thread);
    CHECK_EQ(atomic_load(&late), 0);
    faulty->ops = ops;
}
