/* test_resident.c — the executable form of core/resident.h: a unit that lives on the device has
 * the bits of one that does not, in every plane, with the real kernels. Guests, units that go
 * through, and what the user writes meanwhile: test_peers.c, of one rank and of several.
 *
 * A run is UNITS units of all types trained by AdamW on random gradients; what a step reads of the
 * weights is noted by compute in the run queue. Two runs that differ in which units are settled,
 * and in delays, must have noted and left behind the same.
 */
#include "numbers.h"
#include "opened.h"
#include "dev_fault.h"
#include "../../csrc/core/home.h"
#include "../../csrc/core/update.h"
#include "../../csrc/ops/sumsq.h"
#include "../../csrc/optim/adam.h"

#define UNITS  4
#define PARAMS 3
#define STEPS  12
#define MICROS 3
#define MAX_N  700               /* elements of the largest parameter */
#define PLANES 6                 /* all but ACC */
#define ALL    ((1u << UNITS) - 1)

static const mt_dtype types[UNITS] = { MT_BF16, MT_F32, MT_F16, MT_BF16 };
static const mt_plane planes[PLANES] = { MT_PLANE_HI, MT_PLANE_GRAD, MT_PLANE_LO, MT_PLANE_MASTER,
                                         MT_PLANE_M, MT_PLANE_V };

static int64_t numel(int u, int p) { return p == 2 ? 1 : 150 * (u + 1) + 41 * p; }

static float random_float(uint64_t *state)
{
    return ldexpf((float)(int32_t)(uint32_t)toy_random(state), -31 - (int)(toy_random(state) % 8));
}

/* ---- the model -------------------------------------------------------------------------- */

typedef struct config {
    uint64_t seed;
    unsigned settled;            /* bit u: unit u is */
    int      micros, max_us;
    int      in_backward;        /* 1: each unit is updated behind its hand-over; micros are 1. 2:
                                  * and that update is in its queue before the next hand-over */
    int      passing;            /* 1: and its gradients are kept nowhere */
    int      slow;               /* 1: an update on the device begins late */
    int      in_place;           /* 1: gradients are made in the GRAD plane where that is on the
                                  * device */
    int      take;               /* 1: settled units' weights move at once; else they are copied by
                                  * the first await */
    double   max_norm;           /* 0: units are judged one by one */
    mt_debug debug;
} config;

typedef struct outcome {
    unsigned char plane[UNITS][PARAMS][PLANES][MAX_N * 4];
    unsigned char seen[STEPS][MICROS][UNITS][PARAMS][MAX_N * 4];  /* weights as compute found
                                                                   * them */
    double        norm[STEPS];
    int           skipped[STEPS];
} outcome;

typedef struct model {
    mt_context   cx;
    const config *c;
    mt_dev       *dev;
    mt_pool      *pool;
    mt_store     *store;
    mt_queue     *run;
    mt_sumsq     *sums;
    mt_resident  *r;
    mt_stream    *s;
    mt_offload   *o;
    mt_updater   *u;
    mt_slot_desc  slots[2 + UNITS];
    void         *source[MICROS][UNITS][PARAMS];  /* device memory for gradients, a step's */
    uint64_t      random;                         /* of first weights */
    outcome      *out;
} model;

static outcome nobodys;          /* of a test that does not compare */

static void add_units(model *m)
{
    for (int u = 0; u < UNITS; u++) {
        mt_param_desc d[PARAMS];
        char          name[24];

        for (int p = 0; p < PARAMS; p++)
            d[p] = (mt_param_desc){ types[u], numel(u, p), 1 };
        snprintf(name, sizeof name, "layers.%d", u);
        (void)store_add(m->store, name, d, PARAMS);
        for (int p = 0; p < PARAMS; p++) {
            void *hi = store_at(m->store, u, p, MT_PLANE_HI);
            for (int64_t i = 0; i < numel(u, p); i++)
                set(hi, types[u], i, random_float(&m->random));
        }
    }
}

/* A settled unit has the slot behind the ring that is of its number. */
static void open_stream(model *m, unsigned settled)
{
    mt_slot_hooks none = { 0 };

    REQUIRE_OK(mt_stream_open(&m->cx, m->slots, 2 + UNITS, none, &m->s));
    for (int u = 0; u < UNITS; u++)
        if (settled >> u & 1)
            CHECK_OK(mt_stream_settle(m->s, u, 2 + u));
}

static void open_slots(model *m)
{
    for (int k = 0; k < 2 + UNITS; k++) {
        m->slots[k].bytes = mt_store_hi_bytes(m->store, 1);         /* fp32: the largest there is */
        for (int u = 0; u < UNITS; u++)
            if (mt_store_hi_bytes(m->store, u) > m->slots[k].bytes)
                m->slots[k].bytes = mt_store_hi_bytes(m->store, u);
        REQUIRE_OK(m->dev->ops->mem_alloc(m->dev, m->slots[k].bytes, &m->slots[k].mem));
    }
    open_stream(m, m->c->settled);
    for (int u = 0; u < UNITS && m->c->take; u++)
        if (m->c->settled >> u & 1)
            CHECK_OK(mt_home_vram.take(m->r, u, m->run));
    for (int u = 0; u < UNITS && m->c->passing; u++)
        CHECK_OK(mt_store_set_passing(m->store, u));
}

static void model_open(model *m, const config *c, outcome *out)
{
    mt_offload_kernels k = { mt_sumsq_put, mt_accumulate, mt_accumulate_put, NULL,
                             NULL };

    memset(m, 0, sizeof *m);
    memset(out, 0, sizeof *out);
    m->c = c;
    m->out = out;
    m->random = c->seed;
    m->dev = delayed_open(c->seed, c->max_us);
    REQUIRE_OK(mt_pool_open(2, &m->pool));
    m->cx = (mt_context){ .dev = m->dev, .pool = m->pool };
    REQUIRE_OK(mt_store_open(&m->cx, &m->store));
    m->cx.store = m->store;
    REQUIRE_OK(m->dev->ops->queue_open(m->dev, "run", &m->run));
    add_units(m);
    REQUIRE_OK(mt_sumsq_open(m->dev, &m->sums));
    k.ctx = m->sums;
    REQUIRE_OK(mt_resident_open(&m->cx, &m->r));
    REQUIRE_OK(mt_offload_open(&m->cx, 2, k, &m->o));
    REQUIRE_OK(mt_update_open(&m->cx, m->o, &m->u));
    open_slots(m);
    debug_set(&m->cx, c->debug);
    for (int k3 = 0; k3 < MICROS * UNITS * PARAMS; k3++)
        REQUIRE((m->source[k3 / (UNITS * PARAMS)][k3 / PARAMS % UNITS][k3 % PARAMS]
                 = calloc(MAX_N, 4)) != NULL);
}

static void model_close(model *m)
{
    mt_update_close(m->u);
    mt_offload_close(m->o);
    mt_stream_close(m->s);
    mt_resident_close(m->r);
    mt_sumsq_close(m->sums);
    m->dev->ops->queue_close(m->run);
    for (int k = 0; k < 2 + UNITS; k++)
        m->dev->ops->mem_free(m->dev, m->slots[k].mem);
    for (int k = 0; k < MICROS * UNITS * PARAMS; k++)
        free(m->source[k / (UNITS * PARAMS)][k / PARAMS % UNITS][k % PARAMS]);
    mt_store_close(m->store);
    m->dev->ops->close(m->dev);
    mt_pool_close(m->pool);
}

/* What most tests take: all units settled, one micro-batch, a norm. */
#define MODEL(m, ...) \
    CLOSED_BY(model_close) model m; model_open(&m, &(config){ __VA_ARGS__ }, &nobodys)
#define SETTLED(m) MODEL(m, .seed = 1, .settled = ALL, .micros = 1, .max_norm = 1)

/* ---- compute: in the run queue ---------------------------------------------------------- */

typedef struct work {
    const unsigned char *weights;        /* in a slot */
    unsigned char       *seen;
    size_t               bytes;
    void                *grad;           /* [n] dt, made from seed */
    mt_dtype             dt;
    int64_t              n;
    uint64_t             seed;
    int                  infinite;
} work;

static void do_work(void *arg)
{
    FREED work *w = arg;

    memcpy(w->seen, w->weights, w->bytes);
    for (int64_t i = 0; i < w->n; i++)
        set(w->grad, w->dt, i, random_float(&w->seed));
    if (w->infinite)
        set(w->grad, w->dt, w->n / 2, INFINITY);
}

/* Where compute puts the gradient: memory of its own, or the plane itself. */
static void *grad_memory(model *m, int micro, int u, int p)
{
    void *at;

    if (!m->c->in_place || micro > 0 || !(mt_store_home(m->store, u, NULL)->device != 0))
        return m->source[micro][u][p];
    REQUIRE_OK(mt_resident_at(m->r, u, p, MT_PLANE_GRAD, &at));
    return at;
}

static void window(model *m, int step, int micro, int u)
{
    mt_grad_item items[PARAMS];
    uint64_t     ticket;
    void        *mem = NULL;
    int          slot = -1;

    CHECK_OK(mt_stream_acquire(m->s, u, m->run, &slot, &mem));
    REQUIRE(mem != NULL);
    CHECK_OK(mt_stream_await(m->s, slot, m->run));
    for (int p = 0; p < PARAMS; p++) {
        work *w = malloc(sizeof *w);

        REQUIRE(w != NULL);
        *w = (work){ .weights = (unsigned char *)mem + mt_store_offset(m->store, u, p),
                     .seen = m->out->seen[step][micro][u][p],
                     .bytes = (size_t)numel(u, p) * mt_dtype_bytes(types[u]),
                     .grad = grad_memory(m, micro, u, p), .dt = types[u], .n = numel(u, p),
                     .seed = m->c->seed + (uint64_t)(((step * MICROS + micro) * UNITS + u) *
                                                     PARAMS + p),
                     .infinite = step % 7 == 5 && u == 1 && p == 1 && micro == 0 };
        items[p] = (mt_grad_item){ p, w->grad, micro > 0 ? MT_GRAD_ADD : MT_GRAD_SET, 0 };
        REQUIRE_OK(m->dev->ops->call(m->run, do_work, w));
    }
    CHECK_OK(mt_offload_put(m->o, u, items, PARAMS, m->run, &ticket));
}

/* ---- updates: on the updater's thread --------------------------------------------------- */

typedef struct adam {
    model *m;
    int    unit, step, settled;
    int    acc[PARAMS];
} adam;

static void *plane_of(const adam *a, int p, mt_plane plane)
{
    void *at = NULL;

    if (mt_plane_bytes(plane, types[a->unit], MT_STATES_FP32, 1) == 0)
        return NULL;
    if (a->settled)
        REQUIRE_OK(mt_resident_at(a->m->r, a->unit, p, plane, &at));
    else
        at = store_at(a->m->store, a->unit, p, plane);
    return at;
}

static void tensors(const adam *a, mt_adam_tensor *t)
{
    for (int p = 0; p < PARAMS; p++)
        t[p] = (mt_adam_tensor){
            .dtype = types[a->unit], .n = numel(a->unit, p), .hi = plane_of(a, p, MT_PLANE_HI),
            .lo = plane_of(a, p, MT_PLANE_LO), .master = plane_of(a, p, MT_PLANE_MASTER),
            .m = plane_of(a, p, MT_PLANE_M), .v = plane_of(a, p, MT_PLANE_V),
            .grad = plane_of(a, p, a->acc[p] ? MT_PLANE_ACC : MT_PLANE_GRAD),
            .grad_dtype = a->acc[p] ? MT_F32 : types[a->unit],
            .hyper = { .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1,
                       .step = a->step + 1 },
        };
}

static mt_status adam_run(void *arg, mt_pool *pool, float clip)
{
    mt_adam_tensor t[PARAMS];

    tensors(arg, t);
    return mt_adam_step(pool, t, PARAMS, clip, mt_isa_best());
}

static void nap_of_an_update(void *arg)
{
    sleep_ms(3);
}

static mt_status adam_put(void *arg, mt_queue *q, float clip)
{
    const adam    *a = arg;
    mt_adam_tensor t[PARAMS];

    if (a->m->c->slow)
        TRY(q->dev->ops->call(q, nap_of_an_update, NULL));
    tensors(a, t);
    return mt_adam_put(q, t, PARAMS, clip);
}

static const int all_params[PARAMS] = { 0, 1, 2 };

/* Updates of `n` units from `first` on. */
static uint64_t submit_some(model *m, int step, int first, int n)
{
    mt_update_job jobs[UNITS];
    uint64_t      ticket = 0;

    for (int u = first; u < first + n; u++) {
        adam *a = malloc(sizeof *a);

        REQUIRE(a != NULL);
        *a = (adam){ .m = m, .unit = u, .step = step,
                     .settled = mt_store_home(m->store, u, NULL)->device != 0 };
        for (int p = 0; p < PARAMS; p++)
            a->acc[p] = mt_offload_has(m->o, u, p, MT_GRAD_SUMMED);
        jobs[u - first] = (mt_update_job){ .unit = u, .n_params = PARAMS, .params = all_params,
                                   .run = adam_run, .put = adam_put, .free = free, .arg = a };
    }
    CHECK_OK(mt_update_submit(m->u, jobs, n, m->c->max_norm, m->run, &ticket));
    return ticket;
}

static uint64_t submit(model *m, int step)
{
    return submit_some(m, step, 0, UNITS);
}

static void note_norm(model *m, int step, uint64_t ticket)
{
    double norm;
    int    skipped;

    CHECK_OK(mt_update_norm(m->u, ticket, &norm, &skipped));
    m->out->norm[step] += norm;
    m->out->skipped[step] += skipped;
}

static void *host(model *m, int u, int p, mt_plane plane)
{
    return store_at(m->store, u, p, plane);
}

/* ---- a run ------------------------------------------------------------------------------ */

static void collect(model *m)
{
    CHECK_OK(m->dev->ops->sync(m->run));
    CHECK_OK(mt_offload_drain(m->o));
    CHECK_OK(mt_update_drain(m->u));
    for (int u = 0; u < UNITS; u++) {
        CHECK_OK(mt_mirror_bring(m->store, u, ~0u));
        for (int p = 0; p < PARAMS; p++)
            for (int k = 0; k < PLANES; k++) {
                size_t elem = mt_plane_bytes(planes[k], types[u], MT_STATES_FP32, 1);

                if (elem > 0 && !(m->c->in_backward && planes[k] == MT_PLANE_GRAD))
                    memcpy(m->out->plane[u][p][k], host(m, u, p, planes[k]),
                           (size_t)numel(u, p) * elem);
            }
    }
}

static void train(const config *c, outcome *out)
{
    static model m;
    uint64_t     ticket[UNITS];

    model_open(&m, c, out);
    for (int step = 0; step < STEPS; step++) {
        for (int micro = 0; micro < c->micros; micro++) {
            CHECK_OK(mt_stream_begin(m.s));
            for (int u = 0; u < UNITS; u++) {
                window(&m, step, micro, u);
                if (c->in_backward)
                    ticket[u] = submit_some(&m, step, u, 1);
                if (c->in_backward == 2)
                    CHECK_OK(mt_ledger_wait_updates(m.store, u));
            }
        }
        if (!c->in_backward)
            ticket[0] = submit(&m, step);
        for (int u = 0; u < UNITS; u++)
            mt_offload_forget(m.o, u);
        CHECK_OK(mt_stream_kick(m.s, m.run));
        for (int u = 0; u < (c->in_backward ? UNITS : 1); u++)
            note_norm(&m, step, ticket[u]);
    }
    collect(&m);
    model_close(&m);
}

/* NaN norms compare by bits. */
static int same(const outcome *a, const outcome *b)
{
    return memcmp(a, b, sizeof *a) == 0;
}

static int equals_host(const config *c)
{
    static outcome want, got;
    config         plain = *c;

    plain.settled = 0;
    plain.passing = plain.max_us = 0;
    plain.debug = (mt_debug){ 0 };
    train(&plain, &want);
    train(c, &got);
    return same(&want, &got);
}

/* ---- equal bits ------------------------------------------------------------------------- */

/* One and more micro-batches; judged one by one, together and without a limit. */
static void check_all_norms(config c)
{
    for (c.micros = 1; c.micros <= MICROS; c.micros += 2)
        for (int norm = 0; norm < 3; norm += UNDER_TSAN ? 2 : 1) {
            c.seed = (uint64_t)(c.micros * 100 + norm * 10) + c.settled;
            c.max_norm = norm == 0 ? 0 : norm == 1 ? 0.5 : (double)INFINITY;
            CHECK(equals_host(&c));
        }
}

TEST(settled_units_have_the_bits_of_host_units)
{
    check_all_norms((config){ .settled = ALL, .in_place = 1, .take = 1 });
    check_all_norms((config){ .settled = 5, .take = 1 });
    check_all_norms((config){ .settled = 10, .in_place = 1 });
}

TEST(delays_change_no_bits)
{
    for (unsigned seed = 0; seed < 16; seed += UNDER_TSAN ? 5 : 1)
        CHECK(equals_host(&(config){
            .seed = seed, .micros = 1 + (int)(seed % 3), .max_us = seed % 2 ? 30 : 0,
            .max_norm = seed % 3 ? 0.5 : 0, .take = seed % 8 != 0,
            .settled = seed % 4 ? ALL : 9, .in_place = seed % 4 == 0 }));
}

TEST(overlap_off_changes_no_bits)
{
    CHECK(equals_host(&(config){ .seed = 3, .micros = 2, .max_us = 20, .max_norm = 0.5,
                                 .settled = ALL, .debug = { .sync = 1 } }));
}

static config passing(uint64_t seed, unsigned skip)
{
    return (config){ .seed = seed, .micros = 1, .max_us = seed % 3 ? 40 : 0, .take = 1,
                     .passing = 1, .in_backward = 1 + (int)(seed % 2),
                     .settled = seed % 4 == 1 ? 13 : ALL, .debug = { .skip = skip } };
}

TEST(gradients_of_settled_units_that_pass_change_no_bits)
{
    for (uint64_t seed = 0; seed < 12; seed += UNDER_TSAN ? 3 : 1) {
        config c = passing(seed, 0);

        c.slow = seed == 3;
        c.debug.sync = seed == 9;
        CHECK(equals_host(&c));
    }
}

/* Memory that is lent again while an update reads it. Under TSan it is a race, as it should be. */
TEST(without_taken_they_do)
{
    config c = passing(3, MT_EDGE_SPENT);

    c.slow = 1;
    CHECK(UNDER_TSAN || !equals_host(&c));
}

/* ---- edges ------------------------------------------------------------------------------ */

typedef struct slow_read {
    const float *weight;
    float        seen;
} slow_read;

static void read_late(void *arg)
{
    slow_read *r = arg;

    sleep_ms(20);
    r->seen = *r->weight;
}

/* Compute that is slow to read a weight, which the user replaces meanwhile: what it read. */
static float read_while_written(unsigned skip)
{
    const unsigned hi = 1u << MT_PLANE_HI;
    slow_read      r = { 0 };
    void          *mem;
    int            slot;

    MODEL(m, .seed = 1, .settled = ALL, .micros = 1, .debug = { .skip = skip });
    *(float *)host(&m, 1, 0, MT_PLANE_HI) = 5;
    CHECK_OK(mt_stream_acquire(m.s, 1, m.run, &slot, &mem));
    CHECK_OK(mt_stream_await(m.s, slot, m.run));
    r.weight = mem;
    CHECK_OK(m.dev->ops->call(m.run, read_late, &r));
    CHECK_OK(mt_mirror_bring(m.store, 1, hi));
    CHECK_OK(mt_ledger_wait_fetch(m.store, 1));
    *(float *)host(&m, 1, 0, MT_PLANE_HI) = 6;
    mt_ledger_touch(m.store, 1);
    CHECK_OK(mt_stream_acquire(m.s, 1, m.run, &slot, &mem));
    CHECK_OK(mt_stream_await(m.s, slot, m.run));
    CHECK_OK(m.dev->ops->sync(m.run));
    CHECK(*r.weight == 6);
    return r.seen;
}

TEST(weights_are_fetched_over_behind_those_who_read_them)
{
    CHECK(read_while_written(0) == 5);
    CHECK(UNDER_TSAN || read_while_written(MT_EDGE_FREED) == 6);   /* left out, it is a race */
}

/* ---- what crosses, and what costs memory ------------------------------------------------ */

static void step_once(model *m, int step)
{
    CHECK_OK(mt_stream_begin(m->s));
    for (int u = 0; u < UNITS; u++)
        window(m, step, 0, u);
    (void)submit(m, step);
    for (int u = 0; u < UNITS; u++)
        mt_offload_forget(m->o, u);
}

TEST(nothing_crosses_but_the_first_weights)
{
    size_t weights = 0;

    SETTLED(m);
    for (int step = 0; step < 5; step++)
        step_once(&m, step);
    CHECK_OK(mt_update_drain(m.u));
    for (int u = 0; u < UNITS; u++)
        weights += mt_store_hi_bytes(m.store, u);
    CHECK_EQ(mt_resident_stats_get(m.r).fetches, UNITS);
    CHECK_EQ(mt_resident_stats_get(m.r).h2d_bytes, weights);
    CHECK_EQ(mt_resident_stats_get(m.r).d2h_bytes, 0);
    CHECK_EQ(mt_stream_stats_get(m.s).fetches, 0);
    CHECK_EQ(mt_offload_d2h_bytes(m.o), 0);
    CHECK(mt_stream_schedule(m.s) == NULL);
}

TEST(host_planes_that_nobody_reads_cost_nothing)
{
    SETTLED(m);
    (void)host(&m, 0, 0, MT_PLANE_M);                       /* an address, as optimizer state */
    CHECK_EQ(mt_store_device_bytes(m.store), 0);
    step_once(&m, 0);
    CHECK_OK(mt_update_drain(m.u));
    CHECK(mt_store_device_bytes(m.store) > 0);
    CHECK_EQ(mt_store_bytes(m.store, MT_PLANE_COUNT), mt_store_bytes(m.store, MT_PLANE_HI));
    CHECK_OK(mt_mirror_bring(m.store, 0, 1u << MT_PLANE_M));
    CHECK(mt_store_bytes(m.store, MT_PLANE_M) > 0);
    CHECK_EQ(mt_store_bytes(m.store, MT_PLANE_V), 0);
    CHECK(((float *)host(&m, 0, 0, MT_PLANE_M))[0] != 0);
}

static const unsigned hi_plane = 1u << MT_PLANE_HI;

static size_t hi_bytes(model *m)
{
    return mt_store_bytes(m->store, MT_PLANE_HI);
}

/* Their memory is the kernel's again: from the addresses zeros are read. */
TEST(weights_that_were_taken_have_no_host_memory)
{
    MODEL(m, .seed = 1, .settled = 7, .micros = 1, .max_norm = 1);
    size_t before = hi_bytes(&m);
    for (int u = 0; u < 3; u++) {
        size_t all = hi_bytes(&m);

        CHECK(*(uint16_t *)host(&m, u, 0, MT_PLANE_HI) != 0);
        CHECK_OK(mt_home_vram.take(m.r, u, m.run));
        CHECK(hi_bytes(&m) < all);
        CHECK_EQ(*(uint16_t *)host(&m, u, 0, MT_PLANE_HI), 0);
        CHECK(mt_store_reserved(m.store, u, MT_PLANE_HI) >= mt_store_hi_bytes(m.store, u));
    }
    CHECK_EQ(mt_home_vram.take(m.r, 3, m.run), MT_EINVAL);
    CHECK_EQ(mt_store_reserved(m.store, 3, MT_PLANE_HI), 0);
    for (int step = 0; step < 3; step++)
        step_once(&m, step);
    CHECK_OK(mt_update_drain(m.u));
    CHECK_EQ(mt_resident_stats_get(m.r).fetches, 3);
    for (int u = 0; u < 3; u++)
        CHECK_OK(mt_mirror_bring(m.store, u, hi_plane));
    CHECK_EQ(hi_bytes(&m), before);
}

/* Its states are on the host from then on, and the device's would be older. */
TEST(a_unit_whose_states_are_on_the_device_is_no_guest)
{
    SETTLED(m);
    step_once(&m, 0);
    CHECK_OK(mt_update_drain(m.u));
    CHECK_FAILS(mt_arrive_invite(m.r, 1), MT_ESTATE, "layers.1");
    CHECK(!mt_arrive_invited(m.r, 1));
}

/* A write, and at once its memory's end: what the device has. */
static float taken_after_a_write(unsigned skip)
{
    slow_read r = { 0 };
    float    *w;
    void     *mem;
    int       slot;

    MODEL(m, .seed = 1, .settled = ALL, .micros = 1, .take = 1, .debug = { .skip = skip });
    w = host(&m, 1, 0, MT_PLANE_HI);
    CHECK_OK(mt_mirror_bring(m.store, 1, hi_plane));
    CHECK_OK(mt_ledger_wait_fetch(m.store, 1));
    *w = 6;
    mt_ledger_touch(m.store, 1);
    CHECK_OK(mt_stream_acquire(m.s, 1, m.run, &slot, &mem));
    r.weight = mem;
    CHECK_OK(m.dev->ops->call(m.run, read_late, &r));       /* the fetch waits for this: FREED */
    CHECK_OK(mt_home_vram.take(m.r, 1, m.run));
    sleep_ms(40);
    CHECK_OK(m.dev->ops->sync(m.run));
    CHECK_OK(mt_home_vram.drain(m.r));
    return *(float *)mem;
}

TEST(memory_is_given_back_behind_the_fetch_from_it)
{
    CHECK(taken_after_a_write(0) == 6);
    CHECK(UNDER_TSAN || taken_after_a_write(MT_EDGE_FETCHED) == 0);   /* left out, it is a race */
}

/* ---- refusals --------------------------------------------------------------------------- */

TEST(weights_written_over_an_older_copy_are_refused)
{
    void *mem;
    int   slot;

    SETTLED(m);
    step_once(&m, 0);
    CHECK_OK(mt_update_drain(m.u));
    mt_ledger_touch(m.store, 2);                            /* nobody brought the weights before */
    CHECK_OK(mt_stream_acquire(m.s, 2, m.run, &slot, &mem));
    CHECK_FAILS(mt_stream_await(m.s, slot, m.run), MT_ESTATE, "layers.2");
    CHECK_EQ(mt_ledger_check(m.store), MT_ESTATE);
}

TEST(settling_refuses_what_is_in_use)
{
    void *mem;
    int   slot, unit;

    MODEL(m, .seed = 1, .settled = 1, .micros = 1, .max_norm = 1);
    CHECK_EQ(mt_stream_settle(m.s, 0, 3), MT_EINVAL);              /* it has other memory */
    CHECK_EQ(mt_stream_settle(m.s, 1, 2), MT_ESTATE);              /* unit 0's slot */
    CHECK_SAYS("layers.0");
    CHECK_EQ(mt_stream_settle(m.s, 1, 2 + UNITS), MT_EINVAL);
    CHECK_EQ(mt_stream_settle(m.s, UNITS, 3), MT_EINVAL);
    CHECK_EQ(mt_resident_unsettle(m.r, 1, 1), MT_EINVAL);
    CHECK_OK(mt_stream_acquire(m.s, 2, m.run, &slot, &mem));
    CHECK_EQ(mt_stream_settle(m.s, 3, slot), MT_ESTATE);           /* somebody's by now */
    unit = store_add(m.store, "large", &(mt_param_desc){ MT_F32, 100000, 1 }, 1);
    CHECK_FAILS(mt_stream_settle(m.s, unit, 4), MT_EINVAL, "large");
    CHECK_EQ(mt_resident_at(m.r, 1, 0, MT_PLANE_M, &mem), MT_EINVAL);
    CHECK_EQ(mt_store_device_at(m.store, 1, 0, MT_PLANE_M, &mem), MT_EINVAL);
    CHECK_EQ(mt_resident_at(m.r, 0, PARAMS, MT_PLANE_HI, &mem), MT_EINVAL);
    CHECK_EQ(mt_mirror_push(m.store, 0, PARAMS, ~0u), MT_EINVAL);
    CHECK_OK(mt_mirror_bring(m.store, 1, ~0u));                 /* a host unit: nothing to do */
    CHECK_OK(mt_mirror_push(m.store, 1, 0, ~0u));
    mt_resident_close(NULL);
}

/* Slots that are a unit's for good are no part of the ring. */
TEST(nobody_else_gets_a_settled_slot)
{
    void  *mem, *of_0;
    int    slot, unit;
    size_t offset;

    MODEL(m, .seed = 1, .settled = 7, .micros = 1, .max_norm = 1);
    CHECK_OK(mt_stream_acquire(m.s, 0, m.run, &slot, &of_0));
    CHECK_EQ(slot, 2);
    CHECK_EQ(mt_stream_find(m.s, (char *)of_0 + 512, &unit, &offset), 2);
    CHECK_EQ(unit, 0);
    CHECK_EQ(offset, 512);
    for (int round = 0; round < 3; round++) {
        CHECK_OK(mt_stream_begin(m.s));
        for (int u = 0; u < UNITS; u++) {
            CHECK_OK(mt_stream_acquire(m.s, u, m.run, &slot, &mem));
            CHECK_OK(mt_stream_await(m.s, slot, m.run));
            CHECK(u < 3 ? slot == 2 + u : slot < 2 || slot == 5);
        }
    }
    CHECK_EQ(mt_stream_stats_get(m.s).demand_fetches, 1);
}
