/* test_dev.c — dev.h, executable: what every device must do, asked of each.
 *
 * Devices: cpu; delayed (cpu behind random naps); counted (cpu behind a fault device that fails
 * nothing); cuda, skipped where there is none.
 *
 * A "gate" is a host function that holds a queue until the test opens it. CUDA may run all host
 * functions on one thread, so there is never more than one gate shut.
 */
#include "opened.h"
#include "dev_fault.h"

enum { INTS = 16384, BYTES = INTS * (int)sizeof(int) };

/* Two queues, two events, host memory the device knows, device memory. */
typedef struct rig {
    mt_dev   *d;
    mt_queue *a, *b;
    mt_event *e, *f;
    int      *host;              /* [INTS], host[i] = i */
    int      *mem;               /* [INTS], device */
    sem_t     gate;
} rig;

static void rig_open(rig *r, mt_dev *d)
{
    void *mem = NULL;

    *r = (rig){ .d = d };
    REQUIRE((r->host = aligned_alloc(4096, BYTES)) != NULL);
    for (int i = 0; i < INTS; i++)
        r->host[i] = i;
    REQUIRE_OK(d->ops->host_register(d, r->host, BYTES));
    REQUIRE_OK(d->ops->mem_alloc(d, BYTES, &mem));
    r->mem = mem;
    REQUIRE_OK(d->ops->queue_open(d, "a", &r->a));
    REQUIRE_OK(d->ops->queue_open(d, "b", &r->b));
    REQUIRE_OK(d->ops->event_open(d, &r->e));
    REQUIRE_OK(d->ops->event_open(d, &r->f));
}

static void rig_close(rig *r)
{
    const mt_dev_ops *o = r->d->ops;

    o->queue_close(r->a);
    o->queue_close(r->b);
    o->event_close(r->e);
    o->event_close(r->f);
    o->mem_free(r->d, r->mem);
    o->host_unregister(r->d, r->host);
    free(r->host);
}

#define RIG(r, ...) CLOSED_BY(rig_close) rig r; rig_open(&r, __VA_ARGS__)

static void hold(void *closed)
{
    while (sem_wait(closed) != 0)
        continue;
}

static void shut(rig *r, mt_queue *q)
{
    REQUIRE(sem_init(&r->gate, 0, 0) == 0);
    CHECK_OK(r->d->ops->call(q, hold, &r->gate));
}

static void copy_int(rig *r, mt_queue *q, int *dst, const int *src)
{
    CHECK_OK(r->d->ops->copy(q, dst, src, sizeof *dst));
}

static int query(rig *r, mt_event *e)
{
    int done = -1;

    CHECK_OK(r->d->ops->query(e, &done));
    return done;
}

/* ---- which device ----------------------------------------------------------------------- */

static void on_cpu(void (*test)(mt_dev *d))
{
    CPU(d);
    CHECK_STR(d->ops->name, "cpu");
    test(d);
}

static void on_delayed(void (*test)(mt_dev *d))
{
    OPENED(mt_dev, d, mt_dev_delay_open(cpu_open(), 1, 200, &d));
    CHECK_STR(d->ops->name, "cpu");
    test(d);
}

static void on_counted(void (*test)(mt_dev *d))
{
    CPU(cpu);
    mt_dev *d = fault_dev(cpu, 0, FAULT_ONCE);
    test(d);
    CHECK_EQ(fault_live(d), 0);
    d->ops->close(d);
}

static void on_cuda(void (*test)(mt_dev *d))
{
    static int said;
    mt_dev    *d = NULL;

    if (mt_dev_cuda_open(0, &d) != MT_OK) {
        if (!said++)
            CHECK_PRINT_("skipped: %s", mt_last_error());
        check_skipped = 1;
        return;
    }
    CHECK_STR(d->ops->name, "cuda");
    test(d);
    d->ops->close(d);
}

#define DEVICE_TEST(test)                                                                     \
    static void test(mt_dev *d);                                                              \
    TEST(test##_on_cpu)     { on_cpu(test); }                                                 \
    TEST(test##_on_delayed) { on_delayed(test); }                                             \
    TEST(test##_on_counted) { on_counted(test); }                                             \
    TEST(test##_on_cuda)    { on_cuda(test); }                                                \
    static void test(mt_dev *d)

/* ---- memory ----------------------------------------------------------------------------- */

DEVICE_TEST(memory_is_aligned_and_refused_with_a_reason)
{
    const mt_dev_ops *o = d->ops;
    void             *p[3] = { NULL, NULL, NULL };

    for (int i = 0; i < 3; i++) {
        REQUIRE_OK(o->mem_alloc(d, (size_t)i * 700 + 1, &p[i]));
        CHECK_EQ((uintptr_t)p[i] % 512, 0);
    }
    for (int i = 0; i < 3; i++)
        o->mem_free(d, p[i]);
    CHECK_EQ(o->mem_alloc(d, 0, &p[0]), MT_EINVAL);
    CHECK_FAILS(o->mem_alloc(d, SIZE_MAX - 100, &p[1]), MT_EDEVMEM, "18446744073709551515");
    CHECK_EQ(o->host_register(d, NULL, 4096), MT_EINVAL);
    CHECK_EQ(o->host_register(d, d, 0), MT_EINVAL);
    REQUIRE_OK(o->mem_alloc(d, 64, &p[2]));        /* a refusal is not sticky */
    o->mem_free(d, p[2]);
}

/* Of every size, behind somebody who left something there. */
DEVICE_TEST(memory_is_zero)
{
    const mt_dev_ops *o = d->ops;
    static char       host[100003], sevens[100003];
    void             *p;

    memset(sevens, 7, sizeof sevens);
    OPENED(mt_queue, q, o->queue_open(d, "q", &q));
    for (size_t bytes = 1; bytes <= sizeof host; bytes = bytes * 9 + 1)
        for (int i = 0; i < 3; i++) {
            int64_t set = 0;

            REQUIRE_OK(o->mem_alloc(d, bytes, &p));
            CHECK_OK(o->copy(q, host, p, bytes));
            CHECK_OK(o->copy(q, p, sevens, bytes));
            CHECK_OK(o->sync(q));
            for (size_t k = 0; k < bytes; k++)
                set += host[k] != 0;
            CHECK_EQ(set, 0);
            o->mem_free(d, p);
        }
}

DEVICE_TEST(close_and_free_accept_null)
{
    d->ops->queue_close(NULL);
    d->ops->event_close(NULL);
    d->ops->mem_free(d, NULL);
    d->ops->host_unregister(d, NULL);
}

/* ---- queues ----------------------------------------------------------------------------- */

DEVICE_TEST(copy_carries_bytes_there_and_back)
{
    static const size_t sizes[] = { 0, 1, 511, 4096, BYTES / 2 };

    RIG(r, d);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        int *back = r.host + INTS / 2;

        memset(back, 0xee, BYTES / 2);
        CHECK_OK(d->ops->copy(r.a, r.mem, r.host, sizes[i]));
        CHECK_OK(d->ops->copy(r.a, back, r.mem, sizes[i]));
        CHECK_OK(d->ops->sync(r.a));
        CHECK(memcmp(back, r.host, sizes[i]) == 0);
        CHECK(sizes[i] == BYTES / 2 || ((unsigned char *)back)[sizes[i]] == 0xee);
    }
}

typedef struct tally {
    int next, wrong;             /* the queue's thread, then the host after sync */
} tally;

typedef struct ticket {
    tally *tally;
    int    number;
} ticket;

static void hand_in(void *arg)
{
    ticket *t = arg;

    t->tally->wrong += t->tally->next++ != t->number;
}

/* A lap puts more than a queue of the CPU has room for at first, and far less than makes a CUDA
 * stream block the thread that puts. */
enum { LAPS = 6, LAP = 25 };

DEVICE_TEST(operations_of_a_queue_run_in_order)
{
    tally  count = { 0, 0 };
    ticket tickets[LAPS * LAP];

    RIG(r, d);
    for (int lap = 0; lap < LAPS; lap++) {
        shut(&r, r.a);
        for (int i = lap * LAP; i < lap * LAP + LAP; i++) {
            tickets[i] = (ticket){ &count, i };
            CHECK_OK(d->ops->call(r.a, hand_in, &tickets[i]));
            copy_int(&r, r.a, &r.mem[i + 1], i == 0 ? &r.host[7] : &r.mem[i]);
        }
        (void)sem_post(&r.gate);
        CHECK_OK(d->ops->sync(r.a));
    }
    copy_int(&r, r.a, &r.host[0], &r.mem[LAPS * LAP]);
    CHECK_OK(d->ops->sync(r.a));
    CHECK_EQ(count.next, LAPS * LAP);
    CHECK_EQ(count.wrong, 0);
    CHECK_EQ(r.host[0], 7);
}

DEVICE_TEST(put_returns_before_it_runs)
{
    RIG(r, d);
    shut(&r, r.a);
    copy_int(&r, r.a, r.mem, &r.host[5]);
    copy_int(&r, r.a, &r.host[0], r.mem);
    CHECK_OK(d->ops->record(r.a, r.e));
    CHECK_EQ(query(&r, r.e), 0);
    (void)sem_post(&r.gate);
    CHECK_OK(d->ops->sync(r.a));
    CHECK_EQ(query(&r, r.e), 1);
    CHECK_EQ(r.host[0], 5);
}

DEVICE_TEST(queues_run_side_by_side)
{
    RIG(r, d);
    shut(&r, r.a);
    copy_int(&r, r.b, r.mem, &r.host[9]);
    copy_int(&r, r.b, &r.host[0], r.mem);
    CHECK_OK(d->ops->sync(r.b));             /* returns although a is held */
    CHECK_EQ(r.host[0], 9);
    (void)sem_post(&r.gate);
}

static void count_up(void *counter)
{
    usleep(2000);
    ++*(int *)counter;
}

/* The host runs ahead of a queue by a step's worth of records and waits without being held up. */
DEVICE_TEST(a_held_queue_takes_a_thousand_records)
{
    RIG(r, d);
    shut(&r, r.a);
    for (int i = 0; i < 1000; i++) {
        CHECK_OK(d->ops->record(r.a, r.e));
        CHECK_OK(d->ops->wait(r.b, r.e));
    }
    (void)sem_post(&r.gate);
    CHECK_OK(d->ops->sync(r.b));
}

DEVICE_TEST(close_drains)
{
    mt_queue *q;
    int       n = 0;

    REQUIRE_OK(d->ops->queue_open(d, "drained", &q));
    for (int i = 0; i < 5; i++)
        CHECK_OK(d->ops->call(q, count_up, &n));
    d->ops->queue_close(q);
    CHECK_EQ(n, 5);
}

/* ---- events ----------------------------------------------------------------------------- */

DEVICE_TEST(event_never_recorded_is_done)
{
    RIG(r, d);
    CHECK_EQ(query(&r, r.e), 1);
    CHECK_OK(d->ops->sync_event(r.e));
    CHECK_OK(d->ops->wait(r.a, r.e));
    CHECK_OK(d->ops->sync(r.a));
}

DEVICE_TEST(wait_orders_two_queues)
{
    RIG(r, d);
    shut(&r, r.a);
    copy_int(&r, r.a, r.mem, &r.host[3]);
    CHECK_OK(d->ops->record(r.a, r.e));
    CHECK_OK(d->ops->wait(r.b, r.e));
    copy_int(&r, r.b, &r.host[0], r.mem);
    CHECK_OK(d->ops->record(r.b, r.f));
    usleep(20000);                     /* time for a queue that does not wait to be seen */
    CHECK_EQ(query(&r, r.f), 0);
    (void)sem_post(&r.gate);
    CHECK_OK(d->ops->sync(r.b));
    CHECK_EQ(r.host[0], 3);
}

DEVICE_TEST(event_wait_ignores_later_record)
{
    RIG(r, d);
    CHECK_OK(d->ops->record(r.a, r.e));
    CHECK_OK(d->ops->wait(r.b, r.e));
    shut(&r, r.a);
    CHECK_OK(d->ops->record(r.a, r.e));
    CHECK_OK(d->ops->sync(r.b));             /* returns: it waits for the first record only */
    CHECK_EQ(query(&r, r.e), 0);
    (void)sem_post(&r.gate);
    CHECK_OK(d->ops->sync_event(r.e));
    CHECK_EQ(query(&r, r.e), 1);
}

/* The later record, in a queue with nothing to do, is over long before the earlier. */
DEVICE_TEST(event_wait_ignores_later_record_in_a_faster_queue)
{
    RIG(r, d);
    OPENED(mt_queue, fast, d->ops->queue_open(d, "fast", &fast));
    shut(&r, r.a);
    copy_int(&r, r.a, r.mem, &r.host[4]);
    CHECK_OK(d->ops->record(r.a, r.e));
    CHECK_OK(d->ops->wait(r.b, r.e));
    copy_int(&r, r.b, &r.host[0], r.mem);
    CHECK_OK(d->ops->record(r.b, r.f));
    CHECK_OK(d->ops->record(fast, r.e));
    CHECK_OK(d->ops->sync_event(r.e));       /* the latest record is what the host waits for */
    usleep(20000);
    CHECK_EQ(query(&r, r.f), 0);
    (void)sem_post(&r.gate);
    CHECK_OK(d->ops->sync(r.b));
    CHECK_EQ(r.host[0], 4);
}

DEVICE_TEST(sync_event_waits_no_further_than_its_record)
{
    RIG(r, d);
    copy_int(&r, r.a, r.mem, &r.host[6]);
    copy_int(&r, r.a, &r.host[0], r.mem);
    CHECK_OK(d->ops->record(r.a, r.e));
    shut(&r, r.a);
    CHECK_OK(d->ops->sync_event(r.e));
    CHECK_EQ(r.host[0], 6);
    (void)sem_post(&r.gate);
}

typedef struct late {
    rig       *r;
    atomic_int opened;
} late;

/* On a thread of its own: records e again in b, where nothing is before it, and opens a. */
static void *open_late(void *arg)
{
    late *l = arg;

    usleep(10000);
    CHECK_OK(l->r->d->ops->record(l->r->b, l->r->e));
    usleep(20000);
    atomic_store(&l->opened, 1);
    (void)sem_post(&l->r->gate);
    return NULL;
}

DEVICE_TEST(host_wait_ignores_later_record_in_a_faster_queue)
{
    RIG(r, d);
    late l = { .r = &r };
    shut(&r, r.a);
    CHECK_OK(d->ops->record(r.a, r.e));
    pthread_t thread = thread_start(open_late, &l);
    CHECK_OK(d->ops->sync_event(r.e));
    CHECK_EQ(atomic_load(&l.opened), 1);
    thread_join(thread);
}

DEVICE_TEST(event_may_be_closed_while_a_queue_waits_for_it)
{
    RIG(r, d);
    shut(&r, r.a);
    copy_int(&r, r.a, r.mem, &r.host[8]);
    CHECK_OK(d->ops->record(r.a, r.e));
    CHECK_OK(d->ops->wait(r.b, r.e));
    copy_int(&r, r.b, &r.host[0], r.mem);
    d->ops->event_close(r.e);
    r.e = NULL;
    (void)sem_post(&r.gate);
    CHECK_OK(d->ops->sync(r.b));
    CHECK_EQ(r.host[0], 8);
}

DEVICE_TEST(event_of_a_closed_queue_is_done)
{
    mt_queue *q;
    int       n = 0;

    RIG(r, d);
    REQUIRE_OK(d->ops->queue_open(d, "short", &q));
    CHECK_OK(d->ops->call(q, count_up, &n));
    CHECK_OK(d->ops->record(q, r.e));
    d->ops->queue_close(q);
    CHECK_EQ(query(&r, r.e), 1);
    CHECK_OK(d->ops->sync_event(r.e));
    CHECK_OK(d->ops->wait(r.a, r.e));
    CHECK_OK(d->ops->sync(r.a));
}

/* ---- adopted queues --------------------------------------------------------------------- */

DEVICE_TEST(adopted_queue_copies_calls_and_outlives_its_wrapper)
{
    int n = 0;

    RIG(r, d);
    for (int lap = 1; lap <= 2; lap++) {
        OPENED(mt_queue, q, d->ops->queue_adopt(d, 0, &q));
        CHECK_EQ(d->ops->handle(q), 0);
        copy_int(&r, q, r.mem, &r.host[lap]);
        copy_int(&r, q, &r.host[0], r.mem);
        CHECK_OK(d->ops->call(q, count_up, &n));
        CHECK_OK(d->ops->record(q, r.e));
        CHECK_OK(d->ops->sync_event(r.e));
        CHECK_EQ(r.host[0], lap);
        CHECK_EQ(n, lap);
        CHECK_OK(d->ops->sync(q));
    }
}

DEVICE_TEST(adopted_queue_waits_and_is_waited_for)
{
    RIG(r, d);
    OPENED(mt_queue, q, d->ops->queue_adopt(d, 0, &q));
    for (int i = 1; i < 100; i++) {
        copy_int(&r, r.a, &r.mem[i], &r.host[i]);
        CHECK_OK(d->ops->record(r.a, r.e));
        CHECK_OK(d->ops->wait(q, r.e));
        copy_int(&r, q, &r.mem[1000 + i], &r.mem[i]);
        CHECK_OK(d->ops->record(q, r.f));
        CHECK_OK(d->ops->wait(r.b, r.f));
        copy_int(&r, r.b, &r.host[1000 + i], &r.mem[1000 + i]);
    }
    CHECK_OK(d->ops->sync(r.b));
    for (int i = 1; i < 100; i++)
        CHECK_EQ(r.host[1000 + i], i);
}

/* What a queue's handle names is the queue itself. On CPU every handle is 0, so there is nothing
 * to ask. */
DEVICE_TEST(adopted_handle_is_the_same_queue)
{
    RIG(r, d);
    if (d->ops->handle(r.a) != 0) {
        OPENED(mt_queue, same, d->ops->queue_adopt(d, d->ops->handle(r.a), &same));
        shut(&r, r.a);
        CHECK_OK(d->ops->record(same, r.e));
        usleep(20000);
        CHECK_EQ(query(&r, r.e), 0);
        (void)sem_post(&r.gate);
        CHECK_OK(d->ops->sync_event(r.e));
    }
}

/* ---- together --------------------------------------------------------------------------- */

/* The scheduler's pattern: two slots, filled by one queue and emptied by another, each putting
 * from a thread of its own. A missing edge in either direction loses values. */
enum { ROUNDS = 200, SLOTS = 2 };

typedef struct relay {
    rig       *r;
    mt_event  *ready[SLOTS], *freed[SLOTS];
    sem_t      filled, emptied;      /* how far the putting threads are; not the queues */
} relay;

static void *empty_slots(void *arg)
{
    relay            *y = arg;
    const mt_dev_ops *o = y->r->d->ops;

    for (int i = 0; i < ROUNDS; i++) {
        hold(&y->filled);
        CHECK_OK(o->wait(y->r->b, y->ready[i % SLOTS]));
        copy_int(y->r, y->r->b, &y->r->host[8000 + i], &y->r->mem[i % SLOTS]);
        CHECK_OK(o->record(y->r->b, y->freed[i % SLOTS]));
        (void)sem_post(&y->emptied);
    }
    return NULL;
}

static void fill_slots(relay *y)
{
    const mt_dev_ops *o = y->r->d->ops;

    for (int i = 0; i < ROUNDS; i++) {
        if (i >= SLOTS)
            hold(&y->emptied);
        CHECK_OK(o->wait(y->r->a, y->freed[i % SLOTS]));
        copy_int(y->r, y->r->a, &y->r->mem[i % SLOTS], &y->r->host[i]);
        CHECK_OK(o->record(y->r->a, y->ready[i % SLOTS]));
        (void)sem_post(&y->filled);
    }
}

DEVICE_TEST(two_threads_hand_slots_back_and_forth)
{
    int lost = 0;

    RIG(r, d);
    relay y = { .r = &r };
    REQUIRE(sem_init(&y.filled, 0, 0) == 0 && sem_init(&y.emptied, 0, 0) == 0);
    for (int i = 0; i < SLOTS; i++) {
        REQUIRE_OK(d->ops->event_open(d, &y.ready[i]));
        REQUIRE_OK(d->ops->event_open(d, &y.freed[i]));
    }
    pthread_t thread = thread_start(empty_slots, &y);
    fill_slots(&y);
    thread_join(thread);
    CHECK_OK(d->ops->sync(r.b));
    for (int i = 0; i < ROUNDS; i++)
        lost += r.host[8000 + i] != i;
    CHECK_EQ(lost, 0);
    for (int i = 0; i < SLOTS; i++) {
        d->ops->event_close(y.ready[i]);
        d->ops->event_close(y.freed[i]);
    }
}

/* ---- stamps ----------------------------------------------------------------------------- */

static int read_stamp(mt_dev *d, mt_stamp *s, uint64_t *ns)
{
    int done = -1;

    CHECK_OK(d->ops->stamp_read(d, s, ns, &done));
    return done;
}

/* A stamp is not known while its queue is held, and then says when the queue was let go: between
 * the host's looks at the clock before and after, give or take what the two clocks differ by. */
DEVICE_TEST(stamp_is_the_time_at_which_its_queue_comes_by)
{
    enum { APART_NS = 1000000 };
    mt_stamp       *s = NULL;
    uint64_t        ns = 0, before, after;

    RIG(r, d);
    REQUIRE_OK(d->ops->stamp_open(d, &s));
    CHECK_EQ(read_stamp(d, s, &ns), 0);              /* never asked */
    for (int again = 0; again < 2; again++) {
        shut(&r, r.a);
        CHECK_OK(d->ops->stamp(r.a, s));
        sleep_ms(5);
        CHECK_EQ(read_stamp(d, s, &ns), 0);
        before = mt_now_ns();
        (void)sem_post(&r.gate);
        CHECK_OK(d->ops->sync(r.a));
        after = mt_now_ns();
        CHECK_EQ(read_stamp(d, s, &ns), 1);
        CHECK(ns + APART_NS >= before && ns <= after + APART_NS);
        (void)sem_destroy(&r.gate);
    }
    d->ops->stamp_close(d, s);
    d->ops->stamp_close(d, NULL);
}

DEVICE_TEST(stamps_of_a_queue_are_in_its_order)
{
    enum { STAMPS = 40 };
    mt_stamp *s[STAMPS];
    uint64_t  ns[STAMPS];

    RIG(r, d);
    for (int i = 0; i < STAMPS; i++) {
        REQUIRE_OK(d->ops->stamp_open(d, &s[i]));
        CHECK_OK(d->ops->stamp(r.a, s[i]));
        CHECK_OK(d->ops->copy(r.a, r.mem, r.host, BYTES));
    }
    CHECK_OK(d->ops->sync(r.a));
    for (int i = 0; i < STAMPS; i++) {
        REQUIRE(read_stamp(d, s[i], &ns[i]) == 1);
        CHECK(i == 0 || ns[i] >= ns[i - 1]);
        d->ops->stamp_close(d, s[i]);
    }
    CHECK(ns[STAMPS - 1] > ns[0]);
}

TEST(cpu_adopts_the_calling_thread_and_nothing_else)
{
    mt_queue *none = NULL;
    int       from = 1, to = 0;

    CPU(d);
    CHECK_FAILS(d->ops->queue_adopt(d, 0x7f00, &none), MT_EINVAL, "0x7f00");
    CHECK(none == NULL);
    OPENED(mt_queue, q, d->ops->queue_adopt(d, 0, &q));
    CHECK_OK(d->ops->copy(q, &to, &from, sizeof to));
    CHECK_EQ(to, 1);                         /* now, not later */
}

TEST(cpu_adopted_wait_blocks_the_caller)
{
    CPU(d);
    RIG(r, d);
    late l = { .r = &r };
    OPENED(mt_queue, q, d->ops->queue_adopt(d, 0, &q));
    shut(&r, r.a);
    CHECK_OK(d->ops->record(r.a, r.e));
    pthread_t thread = thread_start(open_late, &l);
    CHECK_OK(d->ops->wait(q, r.e));
    CHECK_EQ(atomic_load(&l.opened), 1);
    thread_join(thread);
}

/* ---- the fault device ------------------------------------------------------------------- */

static mt_status use_everything(mt_dev *d)
{
    const mt_dev_ops *o = d->ops;
    void             *mem = NULL;
    mt_queue         *q = NULL;
    mt_event         *e = NULL;
    int               host = 1, done;
    mt_status         st;

    MT_TRY(o->mem_alloc(d, 64, &mem));
    MT_TRY(o->queue_open(d, "q", &q));
    MT_TRY(o->event_open(d, &e));
    MT_TRY(o->copy(q, mem, &host, sizeof host));
    MT_TRY(o->record(q, e));
    MT_TRY(o->wait(q, e));
    MT_TRY(o->query(e, &done));
    MT_TRY(o->sync_event(e));
    MT_TRY(o->sync(q));
fail:
    o->queue_close(q);
    o->event_close(e);
    o->mem_free(d, mem);
    return st;
}

TEST(nth_call_fails_and_nothing_stays_open)
{
    enum { CALLS = 9 };              /* in use_everything */

    CPU(cpu);
    for (int n = 1; n <= CALLS + 1; n++) {
        mt_dev *d = fault_dev(cpu, n, FAULT_ONCE);

        CHECK_EQ(use_everything(d), n <= CALLS ? MT_EDEVICE : MT_OK);
        CHECK_EQ(fault_fired(d), n <= CALLS);
        CHECK_EQ(fault_calls(d), n <= CALLS ? n : CALLS);
        CHECK_EQ(fault_live(d), 0);
        if (n <= CALLS)
            CHECK_EQ(use_everything(d), MT_OK);      /* one failure, then all is well */
        d->ops->close(d);
    }
    CHECK_SAYS("injected: call 9 (sync)");
}

/* ---- cuda only -------------------------------------------------------------------------- */

/* Without CUDA in the build, without a driver, or without that device: a status and a reason. */
TEST(cuda_that_is_not_there_is_refused_with_a_reason)
{
    mt_dev *d = NULL;

    CHECK_EQ(mt_dev_cuda_open(1000, &d), mt_dev_cuda_built() ? MT_EDEVICE : MT_ENOTSUP);
    CHECK_SAYS("cuda:1000");
    CHECK(d == NULL);
}
