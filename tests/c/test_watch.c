/* test_watch.c — queues that stall on purpose: the watchdog says which, for whose sake, on what,
 * and since when; and what goes on, however slowly, is left alone. */
#include "toy.h"
#include "../../csrc/core/stream.h"
#include "../../csrc/core/swap.h"
#include "../../csrc/core/home.h"

CLOSES(mt_swap, mt_swap_close(*x))
CLOSES(mt_through, mt_through_close(*x))

#define LIMIT_S 0.1

static void shut(toy *t, mt_queue *q, gate *g)
{
    atomic_store(&g->open, 0);
    REQUIRE_OK(t->dev->ops->call(q, wait_for_gate, g));
}

/* Units in memory, and a compute queue of its own. */
static void scene_open(toy *t, int n_units)
{
    toy_open_on(t, cpu_open(), n_units, 1, MT_F32);
    mt_ledger_watchdog(t->store, LIMIT_S);
}

#define SCENE(t, ...) CLOSED_BY(toy_close) toy t; scene_open(&t, __VA_ARGS__)

static const int first_param[1] = { 0 };

static const char *list_of(mt_watch *w)
{
    static char list[1280];

    mt_watch_tell(w, list, sizeof list);
    return list;
}

/* ---- the list --------------------------------------------------------------------------- */

TEST(posts_are_told_longest_first_until_they_are_over)
{
    mt_watch w;
    mt_post  a, b, c;
    char     little[20];

    mt_watch_open(&w, NULL);
    CHECK_STR(list_of(&w), "");
    mt_watch_i_am("d2h");
    mt_watch_begin(&w, &a, NULL, "layers.3", "the event LANDED");
    mt_watch_i_am("the caller");
    sleep_ms(5);
    mt_watch_begin(&w, &b, "disk", "layers.1", "a piece");
    mt_watch_begin(&w, &c, NULL, NULL, "all");
    CHECK_HAS(list_of(&w), "d2h, unit layers.3 waits for the event LANDED, since ");
    CHECK_HAS(list_of(&w), "; disk, unit layers.1 waits for a piece, since ");
    CHECK_HAS(list_of(&w), "the caller waits for all, since ");
    CHECK_EQ(strncmp(list_of(&w), "d2h", 3), 0);
    mt_watch_tell(&w, little, sizeof little);
    CHECK_STR(little, "d2h, unit layers.3 ");
    mt_watch_end(&w, &b, MT_OK);
    CHECK(strstr(list_of(&w), "disk") == NULL);
    mt_watch_end(&w, &a, MT_OK);
    mt_watch_end(&w, &c, MT_OK);
    CHECK_STR(list_of(&w), "");
    mt_watch_close(&w);
}

/* A wait of the tests' own: over at a given look. */
typedef struct waited {
    mt_watch        w;
    mt_mutex       mu;
    pthread_cond_t  c;
    int             looks, enough, moves;    /* moves: each look is one */
} waited;

static void waited_open(waited *a, double limit_s, int enough)
{
    *a = (waited){ .enough = enough };
    mt_watch_open(&a->w, NULL);
    mt_watch_limit(&a->w, limit_s);
    mt_mutex_open(&a->mu, MT_RANK_TEST);
    CHECK_OK(mt_watch_cond(&a->c));
}

static void waited_close(waited *a)
{
    pthread_cond_destroy(&a->c);
    mt_mutex_close(&a->mu);
    mt_watch_close(&a->w);
}

#define WAITED(w, ...) CLOSED_BY(waited_close) waited w; waited_open(&w, __VA_ARGS__)

static int look(waited *a)
{
    if (a->moves)
        mt_watch_moved(&a->w);
    return ++a->looks >= a->enough;
}

static mt_status wait_for_looks(waited *a)
{
    return MT_UNTIL(&a->w, &a->c, &a->mu, look(a), "layers.0", "its gradients");
}

TEST(a_wait_is_stuck_when_nothing_moved_for_the_limit)
{
    WAITED(a, 0.02, 4);
    a.moves = 1;
    CHECK_OK(wait_for_looks(&a));                        /* three times the limit */
    a.moves = 0;
    a.enough = 1000;
    CHECK_FAILS(wait_for_looks(&a), MT_ESTUCK,
                "layers.0: its gradients has not come in 0.02 s, and nothing else has moved");
    CHECK_SAYS("the caller, unit layers.0 waits for its gradients, since ");
}

/* Holds what the waiting thread needs to go on, for longer than the limit:
 * as if the process had been stopped. */
static void *hold_up(void *arg)
{
    waited *a = arg;
    int     waits = 0;

    while (!waits) {
        mt_lock(&a->mu);
        waits = a->looks > 0;
        if (waits)
            sleep_ms(250);
        mt_unlock(&a->mu);
    }
    return NULL;
}

/* A device of which only events are known: asked for the second time it says
 * nothing for longer than the limit. */
static int asked;

static mt_status query_slowly(mt_event *e, int *done)
{
    if (++asked == 2)
        sleep_ms(250);
    *done = asked >= 6;
    return MT_OK;
}

TEST(a_process_that_was_stopped_is_not_stuck)
{
    const mt_dev_ops ops = { .query = query_slowly };
    mt_dev           dev = { &ops };
    mt_event         e = { &dev };

    WAITED(a, 0.1, 4);
    pthread_t thread = thread_start(hold_up, &a);
    CHECK_OK(wait_for_looks(&a));
    thread_join(thread);
    asked = 0;
    CHECK_OK(mt_watch_event(&a.w, &e, "layers.0", "an event"));
}

static waited *watched;
static int     free_when_asked;

static mt_status query_locks(mt_event *e, int *done)
{
    free_when_asked = pthread_mutex_trylock(&watched->mu.mu) == 0;
    if (free_when_asked)
        pthread_mutex_unlock(&watched->mu.mu);
    if (free_when_asked && (free_when_asked = pthread_mutex_trylock(&watched->w.mu.mu) == 0))
        pthread_mutex_unlock(&watched->w.mu.mu);
    *done = 0;
    return MT_OK;
}

/* A driver that takes its time over a question holds up nobody but who asks. */
TEST(no_lock_is_held_while_the_device_is_asked)
{
    const mt_dev_ops ops = { .query = query_locks };
    mt_dev           dev = { &ops };
    mt_event         e = { &dev };
    mt_post          p = { 0 };

    WAITED(a, 0.02, 1000);
    watched = &a;
    mt_watch_put(&a.w, &p, "h2d", "layers.1", "copies", &e);
    CHECK_EQ(wait_for_looks(&a), MT_ESTUCK);
    CHECK_SAYS("Longest first: h2d, unit layers.1 waits for copies, since ");
    CHECK_EQ(free_when_asked, 1);
    mt_watch_take(&a.w, &p);
}

/* ---- compute ---------------------------------------------------------------------------- */

/* An event that is done when the test says so, on a device that answers as long as it says so. */
static atomic_int computed, answers, warned;
static char       warning[1280];

static mt_status query_compute(mt_event *e, int *done)
{
    *done = atomic_load(&computed);
    return atomic_load(&answers) ? MT_OK : MT_FAIL(MT_EDEVICE, "the device is gone");
}

static void hear(const char *text)
{
    snprintf(warning, sizeof warning, "%s", text);
    atomic_fetch_add(&warned, 1);
}

typedef struct computing {
    waited   a;
    mt_dev   dev;
    mt_event e;
    mt_post  post;
} computing;

static const mt_dev_ops compute_ops = { .query = query_compute };

/* A wait that never ends, of the limit of 0.02 s, while layers.3 computes. */
static void computing_open(computing *c)
{
    atomic_store(&computed, 0);
    atomic_store(&answers, 1);
    atomic_store(&warned, 0);
    *c = (computing){ .dev = { &compute_ops } };
    c->e = (mt_event){ &c->dev };
    waited_open(&c->a, 0.02, 100000);
    c->a.w.say = hear;
    mt_watch_put(&c->a.w, &c->post, mt_compute, "layers.3", "its kernels", &c->e);
}

static void computing_close(computing *c)
{
    mt_watch_take(&c->a.w, &c->post);
    waited_close(&c->a);
}

#define COMPUTING(c) CLOSED_BY(computing_close) computing c; computing_open(&c)

/* Six limits of 0.02 s. A machine that stops us meanwhile gives six more, and is told of again. */
static int told_in_one_wait(void)
{
    computing c;
    uint64_t  begun = mt_now_ns();

    computing_open(&c);
    CHECK_EQ(wait_for_looks(&c.a), MT_ESTUCK);
    CHECK(mt_now_ns() - begun >= 120000000u);
    CHECK_SAYS("layers.0: its gradients has not come in 0.12 s");
    CHECK_SAYS("Longest first: compute, unit layers.3 waits for its kernels, since ");
    CHECK_HAS(warning, "nothing has moved in 0.02 s, and compute has work");
    CHECK_HAS(warning, "ends with an error after 0.12 s. Longest first: compute, unit layers.3 "
              "waits for its kernels");
    CHECK_HAS(warning, "; the caller, unit layers.0 waits for its gradients, since ");
    computing_close(&c);
    return atomic_load(&warned);
}

TEST(a_window_may_take_longer_than_the_limit_and_is_told_of_once)
{
    int told = 0;

    for (int tries = 0; tries < 5 && told != 1; tries++)
        told = told_in_one_wait();
    CHECK_EQ(told, 1);
}

/* Moves once, after four limits: six more are there from then on. */
static int look_and_move_late(void *arg)
{
    computing *c = arg;
    uint64_t   now = mt_now_ns(), gone = now - c->post.since_ns;

    if (gone > 80000000u && c->a.moves == 0) {
        c->a.moves = 1;
        mt_watch_moved(&c->a.w);
    }
    return gone > 160000000u;
}

TEST(compute_that_goes_on_slowly_is_waited_for)
{
    COMPUTING(c);
    CHECK_OK(MT_UNTIL(&c.a.w, &c.a.c, &c.a.mu, look_and_move_late(&c), "layers.0",
                      "its gradients"));
    CHECK(atomic_load(&warned) >= 1);
}

TEST(compute_that_is_done_excuses_nobody)
{
    COMPUTING(c);
    atomic_store(&computed, 1);
    CHECK_FAILS(wait_for_looks(&c.a), MT_ESTUCK, "has not come in 0.02 s");
    CHECK(strstr(mt_last_error(), "compute") == NULL);
    CHECK_EQ(atomic_load(&warned), 0);
}

TEST(a_device_that_is_gone_is_not_given_more_time)
{
    COMPUTING(c);
    atomic_store(&answers, 0);
    CHECK_FAILS(wait_for_looks(&c.a), MT_ESTUCK, "has not come in 0.02 s");
    CHECK_SAYS("compute, unit layers.3 waits for its kernels");
    CHECK_EQ(atomic_load(&warned), 0);
}

/* The event that a queue comes by first is where compute is; those behind it wait their turn. */
TEST(of_compute_the_first_alone_is_told)
{
    mt_post next = { 0 }, copy = { 0 };

    COMPUTING(c);
    mt_watch_put(&c.a.w, &copy, "h2d", "layers.5", "copies", &c.e);
    mt_watch_put(&c.a.w, &next, mt_compute, "layers.4", "its kernels", &c.e);
    CHECK_HAS(list_of(&c.a.w), "compute, unit layers.3 waits for its kernels, since ");
    CHECK_HAS(list_of(&c.a.w), "; h2d, unit layers.5 waits for copies");
    CHECK(strstr(list_of(&c.a.w), "layers.4") == NULL);
    mt_watch_take(&c.a.w, &c.post);
    CHECK_HAS(list_of(&c.a.w), "compute, unit layers.4 waits for its kernels");
    mt_watch_take(&c.a.w, &next);
    mt_watch_take(&c.a.w, &copy);
}

/* ---- queues ----------------------------------------------------------------------------- */

/* Weights on their way to the device: a host writer waits for them. */
TEST(a_stalled_h2d_is_named)
{
    uint64_t version;
    gate     g;

    SCENE(t, 2);
    OPENED(mt_queue, h2d, t.dev->ops->queue_open(t.dev, "h2d", &h2d));
    CHECK_OK(mt_ledger_fetch_begin(t.store, 1, &version));
    shut(&t, h2d, &g);
    CHECK_OK(mt_ledger_fetching(t.store, 1, h2d));
    CHECK_EQ(mt_ledger_wait_fetch(t.store, 1), MT_ESTUCK);
    CHECK_SAYS("Longest first: h2d, unit layers.1 waits for copies of its weights "
              "(the event FETCHED)");
    CHECK_SAYS("; the caller, unit layers.1 waits for copies of its weights (the event FETCHED)");
    CHECK_OK(mt_ledger_check(t.store));                  /* no fault: it may have been slow only */
    atomic_store(&g.open, 1);
    CHECK_OK(mt_ledger_wait_fetch(t.store, 1));
}

/* What compute had before its gradients is not over for long: edge GRAD holds d2h, the collector
 * and the updater wait for it, and the caller for them. */
static void run_nothing(void *arg) { (void)arg; }

static mt_status update_nothing(void *arg, mt_pool *pool, float clip)
{
    if (arg != NULL)
        wait_for_gate(arg);
    return MT_OK;
}

TEST(a_stalled_compute_is_named)
{
    static const char updater[] = "waits for the hand-over of its gradients";
    static float    grads[64];
    mt_grad_item    item = { 0, grads, MT_GRAD_SET, 0 };
    mt_update_job   job = { .unit = 0, .n_params = 1, .params = first_param, .run = update_nothing,
                            .free = run_nothing };
    uint64_t        ticket;
    double          norm;
    int             skipped;
    gate            g;

    SCENE(t, 2);
    OPENED(mt_offload, o, mt_offload_open(&t.cx, 2, toy_kernels, &o));
    OPENED(mt_updater, u, mt_update_open(&t.cx, o, &u));
    mt_ledger_watchdog(t.store, 0.03);
    mt_store_watch(t.store)->say = hear;
    atomic_store(&warned, 0);
    shut(&t, t.run, &g);
    CHECK_OK(mt_offload_put(o, 0, &item, 1, t.run, &ticket));
    CHECK_OK(mt_offload_put(o, 1, &item, 1, t.run, &ticket));
    CHECK_OK(mt_update_submit(u, &job, 1, 1.0, t.run, &ticket));
    CHECK_FAILS(mt_update_norm(u, ticket, &norm, &skipped), MT_ESTUCK, "has not come in 0.18 s");
    CHECK_SAYS("compute, unit layers.0 waits for its gradients' kernels (the event GRAD), since ");
    CHECK(atomic_load(&warned) >= 1);
    CHECK_HAS(warning, "compute, unit layers.0 waits for its gradients' kernels (the event GRAD)");
    CHECK_SAYS("d2h, unit layers.0 waits for its gradients' copies (the event LANDED), since ");
    /* The updater's wait may find itself stuck just before the caller's:
     * it was there when compute was warned of. */
    CHECK(strstr(mt_last_error(), updater) != NULL || strstr(warning, updater) != NULL);
    atomic_store(&g.open, 1);
    (void)mt_update_drain(u);                            /* the updater's own wait was a fault */
}

/* On the D2H queue, in front of the copies. */
static mt_status gate_sumsq(void *ctx, mt_queue *q, mt_dtype dt, const void *src, int64_t n,
                            double *sum, double *chunks)
{
    return q->dev->ops->call(q, wait_for_gate, ctx);
}

/* Compute has done its part: nobody is given more time. */
TEST(a_stalled_d2h_is_named)
{
    static float       grads[64];
    gate               g = { 0 };
    mt_grad_item       item = { 0, grads, MT_GRAD_SET, 0 };
    mt_offload_kernels kernels = { .ctx = &g, .sumsq = gate_sumsq };
    uint64_t           ticket;

    SCENE(t, 2);
    OPENED(mt_offload, o, mt_offload_open(&t.cx, 2, kernels, &o));
    CHECK_OK(mt_offload_put(o, 0, &item, 1, t.run, &ticket));
    CHECK_FAILS(mt_ledger_wait_grads(t.store, 0), MT_ESTUCK, "has not come in 0.1 s");
    CHECK_SAYS("d2h, unit layers.0 waits for its gradients' copies (the event LANDED)");
    CHECK(strstr(mt_last_error(), "compute") == NULL);
    atomic_store(&g.open, 1);
    CHECK_OK(mt_ledger_wait_grads(t.store, 0));
}

/* A slot that compute still reads is to be overwritten. */
TEST(what_holds_a_slot_is_named)
{
    mt_slot_desc slot = { .bytes = 4096 };
    mt_stream   *s;
    void        *mem;
    int          k;
    gate         g;

    SCENE(t, 2);
    REQUIRE_OK(t.dev->ops->mem_alloc(t.dev, slot.bytes, &slot.mem));
    REQUIRE_OK(mt_stream_open(&t.cx, &slot, 1, (mt_slot_hooks){ 0 }, &s));
    CHECK_OK(mt_stream_begin(s));
    CHECK_OK(mt_stream_acquire(s, 0, t.run, &k, &mem));
    CHECK_OK(mt_stream_await(s, k, t.run));
    shut(&t, t.run, &g);
    CHECK_OK(mt_stream_acquire(s, 1, t.run, &k, &mem));
    CHECK_OK(mt_stream_await(s, k, t.run));
    const char *list = list_of(mt_store_watch(t.store));
    CHECK_HAS(list, "compute, unit layers.0 waits for its kernels (the event FREED), since ");
    CHECK_HAS(list, "h2d, unit layers.1 waits for copies of its weights (the event FETCHED)");
    atomic_store(&g.open, 1);
    CHECK_OK(t.dev->ops->sync(t.run));
    mt_stream_close(s);
    t.dev->ops->mem_free(t.dev, slot.mem);
}

TEST(a_stalled_update_is_named)
{
    mt_update_job   job = { .unit = 1, .params = first_param, .run = update_nothing,
                            .free = run_nothing };
    uint64_t        ticket;
    gate            g = { 0 };

    SCENE(t, 2);
    job.arg = &g;
    OPENED(mt_offload, o, mt_offload_open(&t.cx, 2, toy_kernels, &o));
    OPENED(mt_updater, u, mt_update_open(&t.cx, o, &u));
    CHECK_OK(mt_update_submit(u, &job, 1, 0, t.run, &ticket));
    CHECK_FAILS(mt_ledger_wait_updates(t.store, 1), MT_ESTUCK,
                "layers.1: its update has not come in 0.1 s, and nothing else has moved");
    CHECK_SAYS("host update, unit layers.1 waits for the pool, which computes its update, since ");
    CHECK_EQ(mt_update_drain(u), MT_ESTUCK);
    CHECK_SAYS("the steps that were asked for has not come in 0.1 s");
    job.arg = NULL;
    job.unit = 0;
    for (int i = 1; i < 64; i++)                    /* as many as may wait */
        CHECK_OK(mt_update_submit(u, &job, 1, 0, t.run, &ticket));
    CHECK_EQ(mt_update_submit(u, &job, 1, 0, t.run, &ticket), MT_ESTUCK);
    CHECK_SAYS("a step before this one has not come");
    CHECK_EQ(mt_ledger_version(t.store, 0), 64);    /* nothing was announced for the one too many */
    atomic_store(&g.open, 1);
    CHECK_OK(mt_update_drain(u));
    CHECK_OK(mt_ledger_wait_updates(t.store, 1));
}

/* Nobody on the host waits for activations: their queues are in the list all the same,
 * until they are through. */
TEST(a_stalled_swap_is_in_the_list)
{
    char         mem[4096];
    mt_swap_part p = { mem, sizeof mem };
    uint64_t     bundle;
    gate         g;

    SCENE(t, 2);
    OPENED(mt_swap, w, mt_swap_open(&t.cx, &w));
    shut(&t, t.run, &g);
    CHECK_OK(mt_swap_out(w, 1, &p, 1, MT_SWAP_HOST, t.run, &bundle));
    CHECK_OK(mt_swap_left(w, bundle, t.run));
    CHECK_OK(mt_swap_back(w, bundle, &p, 1, t.run));
    const char *list = list_of(mt_store_watch(t.store));
    CHECK_HAS(list, "swap out, unit layers.1 waits for copies of what it keeps (the event LEFT)");
    CHECK_HAS(list, "swap back, unit layers.1 waits for copies of what it keeps (the event BACK)");
    CHECK_HAS(list, "compute, unit layers.1 waits for its kernels (the event COMPUTED), since ");
    atomic_store(&g.open, 1);
    CHECK_OK(mt_swap_await(w, bundle, t.run));
    CHECK_OK(t.dev->ops->sync(t.run));
    CHECK_STR(list_of(mt_store_watch(t.store)), "");
    mt_swap_drop(w, bundle);
}

/* A bay that is given up for a larger one: who asks waits for its copies,
 * and then it is in no list. */
TEST(a_bay_whose_copies_stall_is_not_given_up)
{
    char         mem[8192];
    mt_swap_part small = { mem, 4096 }, large = { mem, sizeof mem };
    uint64_t     bundle;
    gate         g;

    SCENE(t, 2);
    mt_ledger_watchdog(t.store, 0.03);       /* six times, for compute's sake */
    OPENED(mt_swap, w, mt_swap_open(&t.cx, &w));
    shut(&t, t.run, &g);
    CHECK_OK(mt_swap_out(w, 1, &small, 1, MT_SWAP_HOST, t.run, &bundle));
    CHECK_OK(mt_swap_left(w, bundle, t.run));
    CHECK_OK(mt_swap_back(w, bundle, &small, 1, t.run));
    mt_swap_drop(w, bundle);
    CHECK_FAILS(mt_swap_out(w, 0, &large, 1, MT_SWAP_HOST, t.run, &bundle), MT_ESTUCK,
                "swap out, unit layers.1 waits for copies of what it keeps (the event LEFT)");
    CHECK_SAYS("; the caller, unit layers.1 waits for copies of what it keeps (the event LEFT)");
    atomic_store(&g.open, 1);
    CHECK_OK(t.dev->ops->sync(t.run));
    shut(&t, t.run, &g);
    atomic_store(&g.open, 1);
    CHECK_OK(mt_swap_out(w, 0, &large, 1, MT_SWAP_HOST, t.run, &bundle));
    CHECK_OK(mt_swap_left(w, bundle, t.run));
    CHECK_OK(t.dev->ops->sync(t.run));
    CHECK_STR(list_of(mt_store_watch(t.store)), "");
    mt_swap_drop(w, bundle);
}

static mt_status put_gate(void *arg, mt_queue *q, float clip)
{
    return q->dev->ops->call(q, wait_for_gate, arg);
}

TEST(a_stalled_device_update_is_named)
{
    gate               g = { 0 };
    mt_update_job u = { .unit = 1, .params = first_param, .n_params = 1, .put = put_gate,
                             .arg = &g };
    mt_resident       *r;
    void              *mem;

    SCENE(t, 2);
    REQUIRE_OK(mt_resident_open(&t.cx, &r));
    REQUIRE_OK(t.dev->ops->mem_alloc(t.dev, mt_store_hi_bytes(t.store, 1), &mem));
    REQUIRE_OK(t.dev->ops->event_open(t.dev, &u.asked));
    CHECK_OK(mt_resident_settle(r, 1, mem));
    mt_ledger_update_begin(t.store, 1);
    CHECK_OK(mt_home_vram.update(r, update_of(&u, 1.0f)));
    CHECK_FAILS(mt_home_vram.drain(r), MT_ESTUCK, "device update, unit layers.1 waits for ");
    CHECK_SAYS("; the caller waits for all that residents were given, since ");
    atomic_store(&g.open, 1);
    CHECK_OK(mt_home_vram.drain(r));
    mt_resident_close(r);
    t.dev->ops->event_close(u.asked);
    t.dev->ops->mem_free(t.dev, mem);
}

static mt_status gradient_of_one(void *arg, int param, const void **at, mt_plane *plane)
{
    static float grads[64];

    *at = grads;
    *plane = MT_PLANE_GRAD;
    return MT_OK;
}

static mt_status gate_through(void *arg, mt_queue *q, const mt_part *parts, int n,
                              float clip)
{
    return put_gate(arg, q, clip);
}

TEST(a_stalled_piece_is_named)
{
    gate           g = { 0 };
    mt_update_job job = { .unit = 1, .params = first_param, .n_params = 1,
                          .gradient = gradient_of_one, .compute = gate_through, .arg = &g };

    SCENE(t, 2);
    OPENED(mt_through, th, mt_through_open(&t.cx, 2, MT_THROUGH_LEAST, &th));
    mt_ledger_update_begin(t.store, 1);
    CHECK_OK(mt_home_through.update(th, update_of(&job, 1.0f)));
    CHECK_EQ(mt_home_through.stepped(th), MT_ESTUCK);
    CHECK_SAYS("through, unit layers.1 waits for its pieces to come down, since ");
    atomic_store(&g.open, 1);
    CHECK_OK(mt_home_through.stepped(th));
}

/* ---- who asks --------------------------------------------------------------------------- */

static atomic_int questions, answer;

static int somebody(void)
{
    atomic_fetch_add(&questions, 1);
    return atomic_load(&answer);
}

static int takes_it(void *arg)
{
    int *took = arg;

    return atomic_load(&questions) < 2 ? 0 : (*took = 1);
}

/* Who is told to go does not look once more: it might take what it then leaves behind. */
TEST(a_thread_that_asks_ends_its_waits_and_no_others)
{
    gate            g;
    mt_mutex       mu = MT_MUTEX(MT_RANK_TEST);
    pthread_cond_t  c;
    uint64_t        last = 0;
    int             took = 0;

    SCENE(t, 1);
    mt_ledger_watchdog(t.store, 30);
    CHECK_OK(mt_watch_cond(&c));
    OPENED(mt_queue, q, t.dev->ops->queue_open(t.dev, "shut", &q));
    OPENED(mt_event, e, t.dev->ops->event_open(t.dev, &e));
    shut(&t, q, &g);
    CHECK_OK(t.dev->ops->record(q, e));
    CHECK(mt_watch_asks(somebody) == NULL);
    atomic_store(&answer, 1);
    CHECK_EQ(MT_UNTIL(mt_store_watch(t.store), &c, &mu, takes_it(&took), NULL, "nothing"),
             MT_EINTR);
    CHECK_EQ(took, 0);
    CHECK_EQ(mt_watch_event(mt_store_watch(t.store), e, "layers.0", "an event"), MT_EINTR);
    CHECK_EQ(atomic_load(&questions), 2);
    atomic_store(&answer, 0);
    CHECK_OK(MT_UNTIL(mt_store_watch(t.store), &c, &mu, takes_it(&took), NULL, "nothing"));
    CHECK_EQ(took, 1);
    CHECK(mt_watch_asks(NULL) == somebody);
    CHECK_OK(mt_watch_asked(&last));
    atomic_store(&g.open, 1);
    CHECK_OK(mt_watch_event(mt_store_watch(t.store), e, "layers.0", "an event"));
    pthread_cond_destroy(&c);
}

/* ---- what goes on ----------------------------------------------------------------------- */

typedef struct slow_save {
    mt_store *store;
    int       blocks;
} slow_save;

/* As copiers of a save do it: the unit is let go when its last block is copied. */
static void *save_slowly(void *arg)
{
    slow_save *s = arg;

    for (int i = 0; i < s->blocks; i++) {
        sleep_ms(50);
        mt_watch_moved(mt_store_watch(s->store));
    }
    mt_ledger_save_end(s->store, 0);
    return NULL;
}

/* Longer than the watchdog waits, in steps that are much shorter. Then one that does nothing. */
TEST(a_long_save_that_goes_on_is_waited_for)
{
    slow_save s = { .blocks = 10 };

    SCENE(t, 2);
    s.store = t.store;
    mt_ledger_watchdog(t.store, 0.3);
    CHECK_OK(mt_ledger_save_begin(t.store, 0));
    pthread_t thread = thread_start(save_slowly, &s);
    CHECK_OK(mt_ledger_wait_saved(t.store, 0));
    thread_join(thread);
    CHECK_OK(mt_ledger_save_begin(t.store, 0));
    CHECK_FAILS(mt_ledger_wait_saved(t.store, 0), MT_ESTUCK,
                "its save (SAVED) has not come in 0.3 s, and nothing else has moved");
    CHECK_SAYS("the caller, unit layers.0 waits for its save (SAVED)");
    mt_ledger_save_end(t.store, 0);
}
