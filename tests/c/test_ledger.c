/* test_ledger.c — the ledger of store.h: who waits for whom, and what ends a wait. */
#include "opened.h"
#include "dev_fault.h"

#include "../../csrc/core/store.h"

static mt_dev   *dev;
static mt_store *store;

/* Units "layers.0" and "layers.1", one parameter each. fail_at: the n-th device call fails. */
static mt_dev *real;
static void setup(int fail_at)
{
    const mt_param_desc d = { MT_F32, 1024, 1 };

    REQUIRE_OK(mt_dev_cpu_open(&real));
    dev = fault_dev(real, fail_at, FAULT_ONCE);
    REQUIRE_OK(mt_store_open(&(mt_context){ .dev = dev }, &store));
    (void)store_add(store, "layers.0", &d, 1);
    (void)store_add(store, "layers.1", &d, 1);
}

static void teardown(void)
{
    mt_store_close(store);
    CHECK_EQ(fault_live(dev), 0);
    dev->ops->close(dev);
    real->ops->close(real);
}

#define LEDGER_TEST(name) TEST_BETWEEN(name, setup(0), teardown())

/* A thread that waits, and says what it got. */
typedef mt_status wait_fn(mt_store *, int);
typedef struct waiter {
    pthread_t  thread;
    wait_fn   *wait;
    int        unit;
    atomic_int over;
    mt_status  st;           /* read after join */
    char       text[512];
} waiter;

static void *waiter_main(void *arg)
{
    waiter *w = arg;

    w->st = w->wait(store, w->unit);
    snprintf(w->text, sizeof w->text, "%s", mt_last_error());
    atomic_store(&w->over, 1);
    return NULL;
}

static void waiter_start(waiter *w, wait_fn *wait, int unit)
{
    *w = (waiter){ .wait = wait, .unit = unit };
    w->thread = thread_start(waiter_main, w);
}

static mt_status fetch_begin(mt_store *s, int unit)
{
    uint64_t version = 0;
    mt_status st = mt_ledger_fetch_begin(s, unit, &version);

    if (st == MT_OK)
        CHECK_EQ(version, mt_ledger_version(s, unit));
    return st;
}

LEDGER_TEST(version_grows_with_announced_updates_and_writes)
{
    uint64_t v = mt_ledger_version(store, 0);
    CHECK(v > 0);                                   /* 0 can mean "nothing" */
    mt_ledger_update_begin(store, 0);
    CHECK_EQ(mt_ledger_version(store, 0), v + 1);
    mt_ledger_update_end(store, 0);
    CHECK_EQ(mt_ledger_version(store, 0), v + 1);
    mt_ledger_touch(store, 0);
    CHECK_EQ(mt_ledger_version(store, 0), v + 2);
    mt_ledger_grads_begin(store, 0);
    mt_ledger_grads_end(store, 0);
    CHECK_EQ(mt_ledger_version(store, 0), v + 2);
    CHECK_EQ(mt_ledger_version(store, 1), v);
    CHECK_EQ(mt_ledger_version(store, 9), 0);
}

LEDGER_TEST(nothing_announced_is_nothing_to_wait_for)
{
    CHECK_OK(mt_ledger_wait_updates(store, 0));
    CHECK_OK(mt_ledger_wait_grads(store, 1));
    CHECK_OK(mt_ledger_wait_fetch(store, 1));
    CHECK_OK(mt_ledger_check(store));
    CHECK_EQ(mt_ledger_wait_updates(store, 2), MT_EINVAL);
    CHECK_EQ(mt_ledger_wait_fetch(store, -1), MT_EINVAL);
}

LEDGER_TEST(wait_lasts_until_every_update_of_the_unit_ended)
{
    waiter w;

    mt_ledger_update_begin(store, 0);
    mt_ledger_update_begin(store, 0);
    mt_ledger_update_begin(store, 1);
    waiter_start(&w, mt_ledger_wait_updates, 0);
    sleep_ms(20);
    mt_ledger_update_end(store, 0);
    sleep_ms(20);
    CHECK_EQ(atomic_load(&w.over), 0);
    mt_ledger_update_end(store, 0);
    thread_join(w.thread);
    CHECK_EQ(w.st, MT_OK);                          /* unit 1's is still under way */
    CHECK_OK(mt_ledger_wait_grads(store, 1));       /* and is no hand-over */
    mt_ledger_update_end(store, 1);
}

LEDGER_TEST(gradients_are_waited_for_apart_from_updates)
{
    waiter w;

    mt_ledger_grads_begin(store, 1);
    CHECK_OK(mt_ledger_wait_updates(store, 1));
    waiter_start(&w, mt_ledger_wait_grads, 1);
    sleep_ms(20);
    CHECK_EQ(atomic_load(&w.over), 0);
    mt_ledger_grads_end(store, 1);
    thread_join(w.thread);
    CHECK_EQ(w.st, MT_OK);
}

LEDGER_TEST(watchdog_can_be_set_while_someone_waits)
{
    waiter w;

    mt_ledger_grads_begin(store, 0);
    waiter_start(&w, mt_ledger_wait_grads, 0);      /* 600 s, else */
    sleep_ms(20);
    mt_ledger_watchdog(store, 0.01);
    thread_join(w.thread);
    CHECK_EQ(w.st, MT_ESTUCK);
}

LEDGER_TEST(fault_ends_every_wait_with_its_message)
{
    char   text[] = "queue d2h: copy failed [dev.c:1]";
    waiter w[4];

    for (int i = 0; i < 2; i++) {
        mt_ledger_update_begin(store, i);
        mt_ledger_grads_begin(store, i);
    }
    waiter_start(&w[0], mt_ledger_wait_updates, 0);
    waiter_start(&w[1], mt_ledger_wait_updates, 1);
    waiter_start(&w[2], mt_ledger_wait_grads, 1);
    waiter_start(&w[3], fetch_begin, 0);
    sleep_ms(20);
    mt_ledger_fault(store, MT_EDEVICE, text);
    memset(text, 'x', sizeof text - 1);             /* it was copied */
    for (int i = 0; i < 4; i++) {
        thread_join(w[i].thread);
        CHECK_EQ(w[i].st, MT_EDEVICE);
        CHECK_STR(w[i].text, "queue d2h: copy failed [dev.c:1]");
    }
}

LEDGER_TEST(first_fault_stays)
{
    mt_ledger_fault(store, MT_OK, "no fault");
    CHECK_OK(mt_ledger_check(store));
    mt_ledger_fault(store, MT_ENOMEM, "first");
    mt_ledger_fault(store, MT_EDEVICE, "second");
    CHECK_EQ(mt_ledger_check(store), MT_ENOMEM);
    CHECK_STR(mt_last_error(), "first");
    CHECK_EQ(mt_ledger_wait_updates(store, 0), MT_ENOMEM);      /* also with nothing to wait for */
    CHECK_EQ(mt_ledger_wait_grads(store, 0), MT_ENOMEM);
    CHECK_EQ(mt_ledger_wait_fetch(store, 0), MT_ENOMEM);
}

LEDGER_TEST(ending_what_was_not_announced_is_a_fault)
{
    mt_ledger_update_begin(store, 0);
    mt_ledger_update_end(store, 0);
    mt_ledger_update_end(store, 0);
    CHECK_EQ(mt_ledger_check(store), MT_ESTATE);
    CHECK_SAYS("unit layers.0: an update ended that was not announced");
}

LEDGER_TEST(announcing_for_a_unit_that_is_not_there_is_a_fault)
{
    mt_ledger_grads_begin(store, 2);
    CHECK_FAILS(mt_ledger_check(store), MT_EINVAL, "no unit 2");
}

/* ---- fetched ----------------------------------------------------------------------------- */

LEDGER_TEST(host_writer_waits_for_the_copies_put_before)
{
    gate   g = { 0 };
    waiter w;

    OPENED(mt_queue, h2d, dev->ops->queue_open(dev, "h2d", &h2d));
    CHECK_OK(dev->ops->call(h2d, wait_for_gate, &g));
    CHECK_OK(mt_ledger_fetching(store, 0, h2d));
    waiter_start(&w, mt_ledger_wait_fetch, 0);
    CHECK_OK(mt_ledger_wait_fetch(store, 1));       /* nothing of its own is on the way */
    sleep_ms(20);
    CHECK_EQ(atomic_load(&w.over), 0);
    atomic_store(&g.open, 1);
    thread_join(w.thread);
    CHECK_EQ(w.st, MT_OK);
}

LEDGER_TEST(fetch_begins_when_no_update_is_under_way)
{
    waiter w;

    OPENED(mt_queue, h2d, dev->ops->queue_open(dev, "h2d", &h2d));
    mt_ledger_update_begin(store, 1);
    CHECK_OK(fetch_begin(store, 0));
    waiter_start(&w, fetch_begin, 1);
    sleep_ms(20);
    CHECK_EQ(atomic_load(&w.over), 0);
    mt_ledger_update_end(store, 1);
    thread_join(w.thread);
    CHECK_EQ(w.st, MT_OK);
    CHECK_OK(mt_ledger_fetching(store, 0, h2d));
    CHECK_OK(mt_ledger_fetching(store, 1, h2d));
}

LEDGER_TEST(save_holds_writers_and_updates_back_and_nobody_else)
{
    waiter host, update;

    mt_ledger_update_begin(store, 1);
    /* what is saved would be half an update */
    CHECK_EQ(mt_ledger_save_begin(store, 1), MT_ESTATE);
    CHECK_OK(mt_ledger_save_begin(store, 0));
    CHECK_EQ(mt_ledger_save_begin(store, 0), MT_ESTATE);
    CHECK_EQ(mt_ledger_wanted(store), -1);
    waiter_start(&host, mt_ledger_wait_fetch, 0);
    waiter_start(&update, mt_ledger_wait_saved, 0);
    CHECK_OK(mt_ledger_wait_updates(store, 0));                /* readers go on */
    CHECK_OK(mt_ledger_wait_saved(store, 1));
    sleep_ms(20);
    CHECK_EQ(mt_ledger_wanted(store), 0);
    CHECK_EQ(atomic_load(&host.over) + atomic_load(&update.over), 0);
    mt_ledger_update_begin(store, 0);
    mt_ledger_save_end(store, 0);
    thread_join(host.thread);
    thread_join(update.thread);
    CHECK_EQ(host.st, MT_OK);
    CHECK_EQ(update.st, MT_OK);
    CHECK_EQ(mt_ledger_wanted(store), -1);
}

/* Who is refused does not end it, so nothing may be counted: a later waiter would wait for ever. */
LEDGER_TEST(a_save_that_is_refused_is_not_announced)
{
    mt_ledger_fault(store, MT_EDISK, "the disk is gone");
    CHECK_EQ(mt_ledger_save_begin(store, 0), MT_EDISK);
    CHECK_STR(mt_last_error(), "the disk is gone");
    CHECK_EQ(mt_ledger_saving(store, 0), 0);
}

/* Between the mover's look at the updates and its copy there is a gap. An update announced in it
 * must find the fetch, or it would write what the copy is about to read. */
LEDGER_TEST(writer_waits_for_a_copy_announced_but_not_yet_put)
{
    waiter w;

    OPENED(mt_queue, h2d, dev->ops->queue_open(dev, "h2d", &h2d));
    CHECK_OK(fetch_begin(store, 0));
    mt_ledger_update_begin(store, 0);
    waiter_start(&w, mt_ledger_wait_fetch, 0);
    sleep_ms(20);
    CHECK_EQ(atomic_load(&w.over), 0);
    CHECK_OK(mt_ledger_fetching(store, 0, h2d));
    thread_join(w.thread);
    CHECK_EQ(w.st, MT_OK);
    mt_ledger_update_end(store, 0);
}

LEDGER_TEST(fetching_a_unit_that_is_not_there_is_refused)
{
    OPENED(mt_queue, h2d, dev->ops->queue_open(dev, "h2d", &h2d));
    CHECK_EQ(mt_ledger_fetching(store, 2, h2d), MT_EINVAL);
}

/* Calls of the device: 1 queue_open, 2 event_open, 3 record, 4 sync_event. */
static void check_failing_call(int n)
{
    mt_queue *h2d = NULL;
    mt_status st;

    setup(n);
    REQUIRE_OK(dev->ops->queue_open(dev, "h2d", &h2d));
    if ((st = mt_ledger_fetching(store, 0, h2d)) == MT_OK) {
        CHECK_EQ(n, 4);
        st = mt_ledger_wait_fetch(store, 0);
    }
    CHECK_EQ(st, MT_EDEVICE);
    CHECK_EQ(fault_fired(dev), 1);
    CHECK_SAYS("injected");
    CHECK_OK(mt_ledger_fetching(store, 0, h2d));                /* the next time works */
    CHECK_OK(mt_ledger_wait_fetch(store, 0));
    dev->ops->queue_close(h2d);
    teardown();
}

TEST(every_failing_device_call_is_reported_and_leaks_nothing)
{
    for (int n = 2; n <= 4; n++)
        check_failing_call(n);
}

/* ---- all at once, for TSan ---------------------------------------------------------------- */

enum { ROUNDS = 300 };
static int     weights[2];           /* written by the updater, read by the copy and the host */
static int     copied[2];

/* Slow, so that the queue lags behind: nothing but the ledger keeps the updater from writing. */
static void copy_weights(void *arg)
{
    int unit = *(const int *)arg;

    usleep(200);
    copied[unit] = weights[unit];
}

/* Ends what the main thread announced, in order; waits for copies before it writes. */
static atomic_int announced;
static void *updater_main(void *arg)
{
    for (int i = 0; i < ROUNDS; i++) {
        int unit = i % 2;
        while (atomic_load(&announced) <= i)
            sched_yield();
        CHECK_OK(mt_ledger_wait_fetch(store, unit));
        weights[unit]++;
        mt_ledger_update_end(store, unit);
    }
    return NULL;
}

/* The mover's part and a reader's part on this thread. Without either wait TSan sees a race: of the
 * updater with the queue that copies, or with this thread that reads. */
LEDGER_TEST(readers_movers_and_updater_never_meet)
{
    static int units[2] = { 0, 1 };
    int        sum = 0;

    atomic_store(&announced, 0);
    weights[0] = weights[1] = 0;
    OPENED(mt_queue, h2d, dev->ops->queue_open(dev, "h2d", &h2d));
    pthread_t updater = thread_start(updater_main, NULL);
    for (int i = 0; i < ROUNDS; i++) {
        int unit = i % 2;
        mt_ledger_update_begin(store, unit);
        atomic_fetch_add(&announced, 1);
        CHECK_OK(fetch_begin(store, unit));
        sum += weights[unit];
        CHECK_OK(dev->ops->call(h2d, copy_weights, &units[unit]));
        CHECK_OK(mt_ledger_fetching(store, unit, h2d));
    }
    thread_join(updater);
    CHECK_OK(dev->ops->sync(h2d));
    CHECK_EQ(copied[0] + copied[1], ROUNDS);
    CHECK_EQ(sum, 2 * (ROUNDS / 2) * (ROUNDS / 2 + 1) / 2);
}
