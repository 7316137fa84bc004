/* test_speculate.c — updates that begin before their step and are kept or taken back: the bits are those of
 * the same steps without, whatever the norm, the delays, and who looks or writes in between.
 *
 * Units of two parameters are trained by AdamW on gradients from a script; a guess is put behind every
 * hand-over, right or wrong.
 */
#include "../../csrc/optim/adam.h"
#include "gate.h"
#include "toy.h"

#include <pthread.h>
#include <unistd.h>

#define UNITS 3
#define STEPS 20
#define MAX_N 64

typedef struct rig {
    toy         t;
    mt_offload *o;
    mt_updater *u;
    mt_dtype    dtype;
    int         guesses;                     /* 0: the same steps without */
    float       src[UNITS][TOY_PARAMS][MAX_N];     /* device memory, of dtype */
    double      norm;
} rig;

static void rig_open(rig *r, mt_dtype dtype, uint64_t seed, int max_us, int guesses)
{
    mt_dev *dev = NULL;

    memset(r, 0, sizeof *r);
    r->dtype = dtype;
    r->guesses = guesses;
    REQUIRE(mt_dev_cpu_open(&dev) == MT_OK);
    if (max_us > 0)
        REQUIRE(mt_dev_delay_open(dev, seed, max_us, &dev) == MT_OK);
    toy_open_on(&r->t, dev, UNITS, max_us > 0, dtype);
    for (int u = 0; u < UNITS; u++)
        for (int p = 0; p < TOY_PARAMS; p++) {
            void *hi = toy_at(&r->t, u, p, MT_PLANE_HI);

            for (int64_t i = 0; i < toy_numel(u, p); i++)
                if (dtype == MT_BF16)
                    ((uint16_t *)hi)[i] = mt_f32_to_bf16(toy_value(u, p, i));
        }
    REQUIRE(mt_offload_open(dev, r->t.store, r->t.pool, 2, toy_kernels, &r->o) == MT_OK);
    REQUIRE(mt_update_open(r->t.store, r->o, r->t.pool, &r->u) == MT_OK);
}

static void rig_stop(rig *r)
{
    mt_update_close(r->u);
    mt_offload_close(r->o);
    r->u = NULL;
    r->o = NULL;
}

static void rig_close(rig *r)
{
    rig_stop(r);
    toy_close(&r->t);
}

/* ---- AdamW of one unit, as a job and as a guess ----------------------------------------- */

typedef struct order {
    rig          *r;
    int           unit, acc, changed;
    mt_adam_hyper hyper;
} order;

static const int both_params[TOY_PARAMS] = { 0, 1 };
static atomic_int calls_left;                /* the call with number 0 fails; negative: none does */
static atomic_int orders_alive;

static order *order_new(rig *r, int unit, int64_t step, double lr)
{
    order *a = malloc(sizeof *a);

    REQUIRE(a != NULL);
    *a = (order){ .r = r, .unit = unit, .acc = mt_offload_has_acc(r->o, unit, 0),
                  .hyper = { .lr = lr, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-6, .weight_decay = 0.1,
                             .step = step } };
    atomic_fetch_add(&orders_alive, 1);
    return a;
}

static void order_free(void *arg)
{
    atomic_fetch_sub(&orders_alive, 1);
    free(arg);
}

static void tensors_of(const order *a, int spare, mt_adam_tensor *t)
{
    const toy *y = &a->r->t;
    mt_dtype   dt = a->r->dtype;

    for (int p = 0; p < TOY_PARAMS; p++) {
        t[p] = (mt_adam_tensor){
            .dtype = dt, .n = toy_numel(a->unit, p), .hi = toy_at(y, a->unit, p, MT_PLANE_HI),
            .m = toy_at(y, a->unit, p, MT_PLANE_M), .v = toy_at(y, a->unit, p, MT_PLANE_V),
            .grad = toy_at(y, a->unit, p, a->acc ? MT_PLANE_ACC : MT_PLANE_GRAD),
            .grad_dtype = a->acc ? MT_F32 : dt, .hyper = a->hyper };
        if (dt == MT_BF16)
            t[p].lo = (int16_t *)(void *)toy_at(y, a->unit, p, MT_PLANE_LO);
        if (spare)
            t[p].spare = mt_adam_spare_at(dt, MT_STATES_FP32, toy_at(y, a->unit, p, MT_PLANE_UNDO), t[p].n);
    }
}

static mt_status may_fail(const char *what)
{
    return atomic_fetch_sub(&calls_left, 1) == 0 ? MT_FAIL(MT_EDEVICE, "%s failed", what) : MT_OK;
}

static mt_status order_run(void *arg, mt_pool *pool, float clip)
{
    mt_adam_tensor t[TOY_PARAMS];
    mt_status      st;

    MT_TRY(may_fail("run"));
    tensors_of(arg, 0, t);
    return mt_adam_step(pool, t, TOY_PARAMS, clip, mt_isa_best());
fail:
    return st;
}

static mt_status guess_run(void *arg, mt_pool *pool)
{
    mt_adam_tensor t[TOY_PARAMS];
    mt_status      st;

    MT_TRY(may_fail("guess"));
    tensors_of(arg, 1, t);
    return mt_adam_step(pool, t, TOY_PARAMS, 1.0f, mt_isa_best());
fail:
    return st;
}

static mt_status guess_keep(void *arg, mt_pool *pool)
{
    mt_adam_tensor t[TOY_PARAMS];
    mt_status      st;

    MT_TRY(may_fail("keep"));
    tensors_of(arg, 1, t);
    mt_adam_keep(pool, t, TOY_PARAMS);
fail:
    return st;
}

static mt_status guess_undo(void *arg, mt_pool *pool)
{
    mt_adam_tensor t[TOY_PARAMS];
    mt_status      st;

    MT_TRY(may_fail("undo"));
    tensors_of(arg, 1, t);
    mt_adam_undo(pool, t, TOY_PARAMS);
fail:
    return st;
}

static int guess_same(const void *guessed, const void *asked)
{
    const order *g = guessed, *j = asked;

    return g->acc == j->acc && !j->changed && g->hyper.lr == j->hyper.lr && g->hyper.step == j->hyper.step;
}

static double changed_sumsq(void *arg, mt_pool *pool, int i, int *use)
{
    const order *a = arg;

    (void)pool;
    *use = a->changed;
    return *use ? toy_sum(a->r->dtype, toy_at(&a->r->t, a->unit, i, MT_PLANE_GRAD), toy_numel(a->unit, i))
                : 0.0;
}

static mt_status speculate(rig *r, int unit, int64_t step, double lr)
{
    mt_guess g = { .unit = unit, .n_params = TOY_PARAMS, .params = both_params, .run = guess_run,
                   .keep = guess_keep, .undo = guess_undo, .same = guess_same, .free = order_free };

    if (!r->guesses)
        return MT_OK;
    g.arg = order_new(r, unit, step, lr);
    return mt_update_speculate(r->u, &g);
}

/* changed: units whose gradient the user wrote, a bit each. */
static mt_status submit(rig *r, int64_t step, double lr, double max_norm, unsigned changed, uint64_t *ticket)
{
    mt_update_job jobs[UNITS];

    for (int u = 0; u < UNITS; u++) {
        order *a = order_new(r, u, step, lr);

        a->changed = changed >> u & 1;
        a->acc = a->acc && !a->changed;
        jobs[u] = (mt_update_job){ .unit = u, .n_params = TOY_PARAMS, .params = both_params,
                                   .sumsq = changed_sumsq, .run = order_run, .free = order_free, .arg = a };
    }
    return mt_update_submit(r->u, jobs, UNITS, max_norm, r->t.run, ticket);
}

/* ---- the script ------------------------------------------------------------------------- */

static float element(uint64_t *random, float scale)
{
    return scale * ((float)(int)(toy_random(random) % 2001) - 1000.0f) / 1000.0f;
}

/* Hands over the gradient of a unit; bad: one element is infinite. */
static mt_status give(rig *r, int unit, uint64_t *random, float scale, int add, int bad)
{
    mt_grad_item items[TOY_PARAMS];
    uint64_t     ticket;
    mt_status    st;

    MT_TRY(mt_ledger_wait_grads(r->t.store, unit));      /* src is free again */
    for (int p = 0; p < TOY_PARAMS; p++) {
        for (int64_t i = 0; i < toy_numel(unit, p); i++) {
            float x = bad && p == 1 && i == 3 ? (float)INFINITY : element(random, scale);

            if (r->dtype == MT_F32)
                r->src[unit][p][i] = x;
            else
                ((uint16_t *)(void *)r->src[unit][p])[i] = mt_f32_to_bf16(x);
        }
        items[p] = (mt_grad_item){ .param = p, .src = r->src[unit][p],
                                   .mode = add ? MT_GRAD_ADD : MT_GRAD_SET };
    }
    MT_TRY(mt_update_undo(r->u, unit));
    MT_TRY(mt_offload_put(r->o, unit, items, TOY_PARAMS, r->t.run, &ticket));
fail:
    return st;
}

/* What may happen between a backward and its step. Whoever wants states, or writes, undoes first. */
enum { NOTHING, LOOK, WRITE_WEIGHTS, CHANGE_GRAD, CHANGE_LR, N_EVENTS };

static unsigned happen(rig *r, int event, int unit, double *lr)
{
    void *at;

    if (event == CHANGE_LR)
        *lr *= 0.5;
    if (event == NOTHING || event == CHANGE_LR)
        return 0;
    /* A failure of these is the ledger's, which the submit that follows says. */
    (void)mt_update_undo(r->u, unit);
    (void)mt_ledger_wait_grads(r->t.store, unit);
    (void)mt_ledger_wait_updates(r->t.store, unit);
    if (event == WRITE_WEIGHTS) {
        at = toy_at(&r->t, unit, 0, MT_PLANE_HI);
        ((uint16_t *)at)[1] ^= 1;
        mt_ledger_touch(r->t.store, unit);
    }
    if (event == CHANGE_GRAD) {
        at = toy_at(&r->t, unit, 1, MT_PLANE_GRAD);
        ((uint16_t *)at)[1] ^= 8;
    }
    return event == CHANGE_GRAD ? 1u << unit : 0;
}

/* One step of the script, which is a function of the random numbers alone. */
static mt_status train_step(rig *r, int64_t step, uint64_t *random, double *lr)
{
    int       micro = toy_random(random) % 4 == 0 ? 2 : 1;
    float     scale = toy_random(random) % 3 == 0 ? 4.0f : 0.01f;        /* above and below the limit */
    int       bad = toy_random(random) % 8 == 0 ? (int)(toy_random(random) % UNITS) : -1;
    double    now = *lr;
    unsigned  changed;
    uint64_t  ticket;
    int       skipped;
    mt_status st;

    for (int m = 0; m < micro; m++)
        for (int u = UNITS - 1; u >= 0; u--) {
            MT_TRY(give(r, u, random, scale, m > 0, u == bad));
            MT_TRY(speculate(r, u, step, now));
        }
    if (toy_random(random) % 2)
        usleep((unsigned)(toy_random(random) % 300));       /* guesses are made, or not */
    changed = happen(r, (int)(toy_random(random) % N_EVENTS), (int)(toy_random(random) % UNITS), lr);
    MT_TRY(submit(r, step, *lr, step % 5 == 4 ? 1e30 : 1.0, changed, &ticket));
    MT_TRY(mt_update_norm(r->u, ticket, &r->norm, &skipped));
    for (int u = 0; u < UNITS; u++)
        mt_offload_forget(r->o, u);
fail:
    return st;
}

static mt_status train(rig *r, uint64_t seed, int steps)
{
    double    lr = 0.05;
    mt_status st;

    for (int64_t step = 1; step <= steps; step++)
        MT_TRY(train_step(r, step, &seed, &lr));
    MT_TRY(mt_update_drain(r->u));
fail:
    return st;
}

static const mt_plane compared[] = { MT_PLANE_HI, MT_PLANE_M, MT_PLANE_V, MT_PLANE_LO };

static size_t plane_bytes(const rig *r, int unit, int param, mt_plane plane)
{
    return (size_t)toy_numel(unit, param) * mt_plane_bytes(plane, r->dtype, MT_STATES_FP32, 1);
}

static int equal(const rig *a, const rig *b)
{
    for (int u = 0; u < UNITS; u++)
        for (int p = 0; p < TOY_PARAMS; p++)
            for (size_t k = 0; k < sizeof compared / sizeof *compared; k++) {
                size_t bytes = plane_bytes(a, u, p, compared[k]);

                if (bytes > 0 && memcmp(toy_at(&a->t, u, p, compared[k]), toy_at(&b->t, u, p, compared[k]),
                                        bytes) != 0) {
                    fprintf(stderr, "  unit %d, parameter %d, plane %s\n", u, p, mt_plane_name(compared[k]));
                    return 0;
                }
            }
    return 1;
}

/* ---- tests ------------------------------------------------------------------------------ */

static void compare(mt_dtype dtype, uint64_t seed, int max_us, mt_speculation_stats *sum)
{
    static rig           plain, early;
    mt_speculation_stats s;

    rig_open(&plain, dtype, seed, 0, 0);
    rig_open(&early, dtype, seed, max_us, 1);
    CHECK_OK(train(&plain, seed, STEPS));
    CHECK_OK(train(&early, seed, STEPS));
    CHECK(equal(&plain, &early));
    CHECK(plain.norm == early.norm || (isnan(plain.norm) && isnan(early.norm)));
    s = mt_update_guesses(early.u);
    sum->speculated += s.speculated;
    sum->committed += s.committed;
    sum->undone += s.undone;
    rig_close(&early);
    rig_close(&plain);
    CHECK_EQ(orders_alive, 0);
}

static void guesses_change_no_bit_whatever_happens_in_between(void)
{
    mt_speculation_stats s = { 0 };

    atomic_store(&calls_left, -1);
    for (uint64_t seed = 1; seed <= 12; seed++)
        compare(seed % 2 ? MT_BF16 : MT_F32, seed, seed % 3 == 0 ? 200 : 0, &s);
    CHECK(s.committed > 20);
    CHECK(s.undone > 20);
    CHECK(s.speculated >= s.committed + s.undone);
}

/* A thread that takes back whatever it finds, at any moment. */
typedef struct nuisance {
    rig       *r;
    atomic_int stop;
} nuisance;

static void *disturb(void *arg)
{
    nuisance *n = arg;

    for (int u = 0; !atomic_load(&n->stop); u = (u + 1) % UNITS) {
        CHECK_OK(mt_update_undo(n->r->u, u));
        usleep(20);
    }
    return NULL;
}

static void another_thread_may_undo_at_any_moment(void)
{
    static rig plain, early;
    nuisance   n = { .r = &early };
    pthread_t  thread;

    atomic_store(&calls_left, -1);
    rig_open(&plain, MT_BF16, 7, 0, 0);
    rig_open(&early, MT_BF16, 7, 100, 1);
    REQUIRE(pthread_create(&thread, NULL, disturb, &n) == 0);
    CHECK_OK(train(&plain, 7, STEPS));
    CHECK_OK(train(&early, 7, STEPS));
    atomic_store(&n.stop, 1);
    pthread_join(thread, NULL);
    CHECK(equal(&plain, &early));
    rig_close(&early);
    rig_close(&plain);
}

/* A rig after two steps and a backward, with each unit's guess made. */
static void guessed(rig *r, int64_t *step)
{
    uint64_t random = 5;

    atomic_store(&calls_left, -1);
    rig_open(r, MT_BF16, 3, 0, 1);
    mt_update_debug(r->u, (mt_debug){ .sync = 1 });
    *step = 1;
    for (int u = 0; u < UNITS; u++)
        CHECK_OK(give(r, u, &random, 0.01f, 0, 0));
    for (int u = 0; u < UNITS; u++)
        CHECK_OK(speculate(r, u, *step, 0.05));
    CHECK_EQ(mt_update_guesses(r->u).speculated, UNITS);
}

static void states_move_and_weights_do_not(void)
{
    static rig r;
    int64_t    step;
    float      nothing[MAX_N] = { 0 };

    guessed(&r, &step);
    for (int u = 0; u < UNITS; u++) {
        CHECK_EQ(mt_ledger_version(r.t.store, u), 1);
        CHECK_EQ(((uint16_t *)(void *)toy_at(&r.t, u, 0, MT_PLANE_HI))[5],
                 mt_f32_to_bf16(toy_value(u, 0, 5)));
        CHECK(memcmp(toy_at(&r.t, u, 0, MT_PLANE_M), nothing, plane_bytes(&r, u, 0, MT_PLANE_M)) != 0);
        CHECK_OK(mt_update_undo(r.u, u));
        CHECK(memcmp(toy_at(&r.t, u, 0, MT_PLANE_M), nothing, plane_bytes(&r, u, 0, MT_PLANE_M)) == 0);
        CHECK(memcmp(toy_at(&r.t, u, 0, MT_PLANE_LO), nothing, plane_bytes(&r, u, 0, MT_PLANE_LO)) == 0);
    }
    CHECK_EQ(mt_update_guesses(r.u).undone, UNITS);
    rig_close(&r);
}

static void close_takes_back_what_no_step_took(void)
{
    static rig r;
    int64_t    step;
    float      nothing[MAX_N] = { 0 };

    guessed(&r, &step);
    rig_stop(&r);
    for (int u = 0; u < UNITS; u++)
        CHECK(memcmp(toy_at(&r.t, u, 1, MT_PLANE_V), nothing, plane_bytes(&r, u, 1, MT_PLANE_V)) == 0);
    CHECK_EQ(orders_alive, 0);
    toy_close(&r.t);
}

/* Who writes weights without a word before is found by the ledger. */
static void guess_on_weights_written_since_is_not_kept(void)
{
    static rig           r;
    int64_t              step;
    uint64_t             ticket;
    mt_speculation_stats s;

    guessed(&r, &step);
    mt_ledger_touch(r.t.store, 1);
    CHECK_OK(submit(&r, step, 0.05, 1e30, 0, &ticket));
    s = mt_update_guesses(r.u);
    CHECK_EQ(s.committed, UNITS - 1);
    CHECK_EQ(s.undone, 1);
    rig_close(&r);
}

static void guess_of_another_step_is_not_kept(void)
{
    static rig r;
    int64_t    step;
    uint64_t   ticket;

    guessed(&r, &step);
    CHECK_OK(submit(&r, step + 1, 0.05, 1e30, 0, &ticket));
    CHECK_EQ(mt_update_guesses(r.u).undone, UNITS);
    rig_close(&r);
}

static void guess_that_could_not_be_kept_is_not_counted_as_kept(void)
{
    static rig r;
    int64_t    step;
    uint64_t   ticket;

    guessed(&r, &step);
    atomic_store(&calls_left, 0);
    CHECK_EQ(submit(&r, step, 0.05, 1e30, 0, &ticket), MT_EDEVICE);
    CHECK_HAS(mt_last_error(), "keep failed");
    CHECK_EQ(mt_update_guesses(r.u).committed, 0);
    CHECK_EQ(mt_update_guesses(r.u).undone, 0);
    rig_close(&r);
}

/* ---- guesses while a step waits ---- */

static void await_speculated(rig *r, int64_t n)
{
    for (int i = 0; i < 20000 && mt_update_guesses(r->u).speculated < n; i++)
        usleep(100);
    CHECK_EQ(mt_update_guesses(r->u).speculated, n);
}

/* Gradients come home one unit at a time, all after the step has been asked for. */
static void guesses_go_on_while_a_step_waits_for_gradients(void)
{
    static rig           r, plain;
    gate                 gates[UNITS] = { 0 };
    uint64_t             ticket, random = 5;
    mt_speculation_stats s;

    atomic_store(&calls_left, -1);
    rig_open(&r, MT_BF16, 3, 1, 1);
    rig_open(&plain, MT_BF16, 3, 0, 0);
    for (int u = UNITS - 1; u >= 0; u--) {
        REQUIRE(r.t.dev->ops->call(r.t.run, wait_for_gate, &gates[u]) == MT_OK);
        CHECK_OK(give(&r, u, &random, 0.01f, 0, 0));
        CHECK_OK(speculate(&r, u, 1, 0.05));
    }
    CHECK_OK(submit(&r, 1, 0.05, 1e30, 0, &ticket));
    for (int u = UNITS - 1; u > 0; u--) {
        atomic_store(&gates[u].open, 1);
        await_speculated(&r, UNITS - u);
    }
    atomic_store(&gates[0].open, 1);         /* with the last gradient the norm is known: no guess */
    CHECK_OK(mt_update_drain(r.u));
    s = mt_update_guesses(r.u);
    CHECK_EQ(s.speculated, UNITS - 1);
    CHECK_EQ(s.committed, UNITS - 1);
    random = 5;
    for (int u = UNITS - 1; u >= 0; u--)
        CHECK_OK(give(&plain, u, &random, 0.01f, 0, 0));
    CHECK_OK(submit(&plain, 1, 0.05, 1e30, 0, &ticket));
    CHECK_OK(mt_update_drain(plain.u));
    CHECK(equal(&plain, &r));
    rig_close(&plain);
    rig_close(&r);
}

static void unit_without_finite_gradients_is_left_alone(void)
{
    static rig r;
    uint64_t   random = 9;

    atomic_store(&calls_left, -1);
    rig_open(&r, MT_F32, 3, 0, 1);
    mt_update_debug(r.u, (mt_debug){ .sync = 1 });
    CHECK_OK(give(&r, 0, &random, 1.0f, 0, 1));
    CHECK_OK(speculate(&r, 0, 1, 0.05));
    CHECK_EQ(mt_update_guesses(r.u).speculated, 0);
    CHECK_EQ(orders_alive, 0);
    rig_close(&r);
}

static void guess_of_nowhere_is_refused_and_freed(void)
{
    static rig r;
    mt_guess   g = { .unit = UNITS, .free = order_free };

    atomic_store(&calls_left, -1);
    rig_open(&r, MT_BF16, 3, 0, 1);
    g.arg = order_new(&r, 0, 1, 0.05);
    CHECK_EQ(mt_update_speculate(r.u, &g), MT_EINVAL);
    CHECK_HAS(mt_last_error(), "the store has 3 units");
    g.arg = order_new(&r, 0, 1, 0.05);
    g.unit = 1;
    CHECK_OK(mt_store_settle(r.t.store, 1));
    CHECK_EQ(mt_update_speculate(r.u, &g), MT_ESTATE);
    CHECK_HAS(mt_last_error(), "layers.1 is updated on the device");
    CHECK_EQ(orders_alive, 0);
    rig_close(&r);
}

/* Each call of an update, a guess, its keeping and its undoing fails in turn. */
static void failure_of_any_call_reaches_the_user(void)
{
    static rig r;
    int        failed = 1;

    for (int n = 0; failed && n < 1000; n += 1 + n / 8) {
        rig_open(&r, MT_BF16, 11, 0, 1);
        atomic_store(&calls_left, n);
        failed = train(&r, 11, 8) != MT_OK;
        if (failed)
            CHECK_HAS(mt_last_error(), "failed");
        CHECK(failed || atomic_load(&calls_left) >= 0);
        rig_close(&r);
        CHECK_EQ(orders_alive, 0);
    }
    CHECK(!failed);
}

/* ---- the step itself -------------------------------------------------------------------- */

static void fill(void *at, mt_dtype dt, int64_t n, uint64_t *random)
{
    for (int64_t i = 0; i < n; i++)
        if (dt == MT_F32)
            ((float *)at)[i] = element(random, 1.0f);
        else if (dt == MT_BF16)
            ((uint16_t *)at)[i] = mt_f32_to_bf16(element(random, 1.0f));
        else
            ((uint16_t *)at)[i] = (uint16_t)(0x3800 + toy_random(random) % 512);
}

/* One allocation: hi, low half or master, m, v. */
static mt_adam_tensor tensor_over(char *mem, mt_dtype dt, int64_t n, const void *grad)
{
    size_t         four = (size_t)n * 4;
    mt_adam_tensor t = { .dtype = dt, .n = n, .hi = mem, .m = (float *)(void *)(mem + 2 * four),
                         .v = (float *)(void *)(mem + 3 * four), .grad = grad, .grad_dtype = dt,
                         .hyper = { 0.05, 0.9, 0.99, 1e-6, 0.1, 3, 0 } };

    if (dt == MT_BF16)
        t.lo = (int16_t *)(void *)(mem + four);
    if (dt == MT_F16)
        t.master = (float *)(void *)(mem + four);
    return t;
}

static void step_and_end(mt_dtype dt, int64_t n, mt_isa isa)
{
    size_t   bytes = 16 * (size_t)n;
    char    *before = malloc(bytes), *plain = malloc(bytes), *early = malloc(bytes);
    void    *grad = malloc(4 * (size_t)n);
    void    *spare = malloc((size_t)n * mt_plane_bytes(MT_PLANE_UNDO, dt, MT_STATES_FP32, 1));
    uint64_t random = (uint64_t)n;
    mt_adam_tensor a, b;

    REQUIRE(before && plain && early && grad && spare);
    memset(before, 0, bytes);
    fill(before, dt, n, &random);
    fill(grad, dt, n, &random);
    fill(before + 8 * n, MT_F32, n, &random);
    memcpy(plain, before, bytes);
    memcpy(early, before, bytes);
    a = tensor_over(plain, dt, n, grad);
    b = tensor_over(early, dt, n, grad);
    b.spare = mt_adam_spare_at(dt, MT_STATES_FP32, spare, n);
    CHECK_OK(mt_adam_step(NULL, &a, 1, 1.0f, isa));
    CHECK_OK(mt_adam_step(NULL, &b, 1, 1.0f, isa));
    CHECK(memcmp(early, before, (size_t)n * mt_dtype_bytes(dt)) == 0);
    CHECK(memcmp(early + 8 * n, before + 8 * n, 8 * (size_t)n) != 0);
    mt_adam_undo(NULL, &b, 1);
    CHECK(memcmp(early, before, bytes) == 0);
    CHECK_OK(mt_adam_step(NULL, &b, 1, 1.0f, isa));
    mt_adam_keep(NULL, &b, 1);
    CHECK(memcmp(early, plain, bytes) == 0);
    free(before);
    free(plain);
    free(early);
    free(grad);
    free(spare);
}

static void step_with_a_spare_is_kept_or_undone_to_the_bit(void)
{
    const mt_dtype types[] = { MT_F32, MT_BF16, MT_F16 };
    const int64_t  sizes[] = { 1, 37, 16 * 1024 + 1, 256 * 1024 + 5 };

    for (int isa = 0; isa < MT_ISA_COUNT; isa++)
        for (int k = 0; k < 12 && mt_isa_runs((mt_isa)isa); k++)
            step_and_end(types[k % 3], sizes[k / 3], (mt_isa)isa);
}

static void spare_without_room_for_a_plane_is_refused(void)
{
    float          x = 0;
    int16_t        lo = 0;
    mt_adam_tensor t = { .dtype = MT_BF16, .n = 1, .hi = &x, .lo = &lo, .m = &x, .v = &x, .grad = &x,
                         .grad_dtype = MT_BF16, .hyper = { 0.05, 0.9, 0.99, 1e-6, 0.1, 3, 0 },
                         .spare = { .hi = &x, .m = &x, .v = &x } };

    CHECK_EQ(mt_adam_step(NULL, &t, 1, 1.0f, MT_ISA_SCALAR), MT_EINVAL);
    CHECK_HAS(mt_last_error(), "its spare has no lo");
}

#define TESTS(X)                                                                              \
    X(step_with_a_spare_is_kept_or_undone_to_the_bit)                                         \
    X(spare_without_room_for_a_plane_is_refused)                                              \
    X(states_move_and_weights_do_not)                                                         \
    X(close_takes_back_what_no_step_took)                                                     \
    X(guess_on_weights_written_since_is_not_kept)                                             \
    X(guess_that_could_not_be_kept_is_not_counted_as_kept)                                    \
    X(guess_of_another_step_is_not_kept)                                                      \
    X(guesses_go_on_while_a_step_waits_for_gradients)                                         \
    X(unit_without_finite_gradients_is_left_alone)                                            \
    X(guess_of_nowhere_is_refused_and_freed)                                                  \
    X(guesses_change_no_bit_whatever_happens_in_between)                                      \
    X(another_thread_may_undo_at_any_moment)                                                  \
    X(failure_of_any_call_reaches_the_user)
CHECK_MAIN(TESTS)
