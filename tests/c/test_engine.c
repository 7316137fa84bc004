/* test_engine.c — stream, residents, offload and updater together train a toy, and the bits are
 * those of a plain loop over the same functions, whatever the delays and whichever units are
 * settled. Each edge, left out, is seen to matter.
 *
 * The toy: x of D floats goes through units of two fp32 parameters each; backward gives both a
 * gradient; the update is p -= lr * clip * g. Forward and backward run in the run queue, gradient
 * memory is reused as torch's allocator would: as soon as the offload says "passed".
 */
#include "dev_fault.h"
#include "drop.h"
#include "toy.h"
#include "../../csrc/core/home.h"
#include "../../csrc/io/file.h"

#define UNITS    5
#define SLOTS    3
#define STEPS    3
#define D        96
#define VISITS   (4 * UNITS)     /* windows of one forward, at most */
#define MAX_N    64              /* elements of the largest parameter */
#define SOURCES  64
#define LR       0.05f

/* ---- the arithmetic: one definition for the engine and for the plain loop --------------- */

static void forward_unit(float *x, float *saved, const float *w0, int64_t n0, const float *w1,
                         int64_t n1)
{
    memcpy(saved, x, D * sizeof *x);
    for (int i = 0; i < D; i++)
        x[i] = 0.5f * x[i] + 0.01f * w0[i % n0] + 0.02f * w1[i % n1] * x[i];
}

static void backward_unit(float *gx, const float *saved, int64_t n0, const float *w1, int64_t n1,
                          float *g0, float *g1)
{
    memset(g0, 0, (size_t)n0 * sizeof *g0);
    memset(g1, 0, (size_t)n1 * sizeof *g1);
    for (int i = 0; i < D; i++) {
        g0[i % n0] += 0.01f * gx[i];
        g1[i % n1] += 0.02f * gx[i] * saved[i];
        gx[i] = gx[i] * (0.5f + 0.02f * w1[i % n1]);
    }
}

static void start_forward(float *x, int step)
{
    for (int i = 0; i < D; i++)
        x[i] = (float)(i % 7) + 0.125f * (float)step;
}

static void start_backward(float *gx, const float *x)
{
    for (int i = 0; i < D; i++)
        gx[i] = x[i] - 1.0f;
}

static void update_param(float *p, const float *g, int64_t n, float clip)
{
    for (int64_t i = 0; i < n; i++)
        p[i] -= LR * (clip * g[i]);
}

/* ---- what a step does: made from a seed, the same for both ------------------------------ */

typedef struct step_plan {
    int micro;                   /* micro-batches */
    int backward;                /* 0: evaluation */
    int order[VISITS], n;        /* units in forward; backward is the reverse */
} step_plan;

/* odd: every other step leaves the usual order: units twice, left out, or no backward. */
static step_plan plan_step(uint64_t *random, int odd)
{
    step_plan s = { .micro = 1, .backward = 1 };

    if (odd)
        s.micro = 1 + (int)(toy_random(random) % 2);
    odd = odd && toy_random(random) % 2;
    for (int u = 0; u < UNITS; u++) {
        int times = odd ? (int)(toy_random(random) % 3) : 1;
        for (int i = 0; i < times; i++)
            s.order[s.n++] = odd && toy_random(random) % 8 == 0 ? 0 : u;
    }
    s.order[s.n++] = 0;          /* a tied head */
    if (odd && toy_random(random) % 4 == 0)
        s.backward = 0;
    return s;
}

typedef struct config {
    uint64_t seed;
    int      max_us;             /* 0: run is the calling thread */
    int      odd;
    double   max_norm;
    unsigned settled, through, filed;    /* bit u: unit u lives on the device, goes through it, or
                                          * is on disk */
    int      look;               /* 1: another forward between the last backward and step() */
    int      traced;
    int      unlocked;           /* host memory cannot be locked, but for so many pages less one */
    mt_debug debug;
} config;

typedef struct outcome {
    float  w[UNITS][TOY_PARAMS][MAX_N];
    float  x[STEPS][D];          /* the last micro-batch's output */
    float  seen[STEPS][D];       /* the look's */
    double norm[STEPS];
} outcome;

/* ---- the plain loop --------------------------------------------------------------------- */

typedef struct plain {
    outcome o;
    float   g[UNITS][TOY_PARAMS][MAX_N];
    int     has[UNITS];
    float   x[D], gx[D], saved[VISITS][D];
} plain;

static void plain_backward(plain *l, const step_plan *s)
{
    float g[TOY_PARAMS][MAX_N];

    for (int i = s->n - 1; i >= 0; i--) {
        int u = s->order[i];

        backward_unit(l->gx, l->saved[i], toy_numel(u, 0), l->o.w[u][1], toy_numel(u, 1),
                      g[0], g[1]);
        for (int p = 0; p < TOY_PARAMS; p++)
            for (int64_t j = 0; j < toy_numel(u, p); j++)
                l->g[u][p][j] = l->has[u] ? l->g[u][p][j] + g[p][j] : g[p][j];
        l->has[u] = 1;
    }
}

static void plain_update(plain *l, int step, double max_norm)
{
    double total = 0, ratio;
    float  clip = 1.0f;

    for (int u = 0; u < UNITS; u++)
        for (int p = 0; p < TOY_PARAMS && l->has[u]; p++)
            total += toy_sum(MT_F32, l->g[u][p], toy_numel(u, p));
    l->o.norm[step] = sqrt(total);
    ratio = max_norm / (sqrt(total) + 1e-6);
    if (max_norm > 0 && ratio < 1.0)
        clip = (float)ratio;
    for (int u = 0; u < UNITS; u++)
        for (int p = 0; p < TOY_PARAMS && l->has[u]; p++)
            update_param(l->o.w[u][p], l->g[u][p], toy_numel(u, p), clip);
    memset(l->has, 0, sizeof l->has);
}

static void plain_forward(plain *l, const step_plan *s, int step)
{
    start_forward(l->x, step);
    for (int i = 0; i < s->n; i++) {
        int u = s->order[i];
        forward_unit(l->x, l->saved[i], l->o.w[u][0], toy_numel(u, 0), l->o.w[u][1],
                     toy_numel(u, 1));
    }
}

static void run_plain(const config *c, outcome *out)
{
    static plain l;
    uint64_t     random = c->seed;

    memset(&l, 0, sizeof l);
    for (int u = 0; u < UNITS; u++)
        for (int p = 0; p < TOY_PARAMS; p++)
            for (int64_t i = 0; i < toy_numel(u, p); i++)
                l.o.w[u][p][i] = toy_value(u, p, i);
    for (int step = 0; step < STEPS; step++) {
        step_plan s = plan_step(&random, c->odd);

        for (int m = 0; m < s.micro; m++) {
            plain_forward(&l, &s, step);
            memcpy(l.o.x[step], l.x, sizeof l.x);
            start_backward(l.gx, l.x);
            if (s.backward)
                plain_backward(&l, &s);
        }
        if (c->look) {
            plain_forward(&l, &s, step);
            memcpy(l.o.seen[step], l.x, sizeof l.x);
        }
        if (s.backward)
            plain_update(&l, step, c->max_norm);
    }
    *out = l.o;
}

/* ---- the engine ------------------------------------------------------------------------- */

typedef struct source {          /* device memory for one unit's gradients */
    float   *g[TOY_PARAMS];
    uint64_t ticket;             /* free again once this has passed */
} source;

typedef struct engine {
    toy          t;
    mt_resident *r;
    mt_stream   *s;
    mt_offload  *o;
    mt_updater  *u;
    mt_through  *h;
    mt_file     *file;           /* these three: NULL where no unit is on disk */
    mt_disk     *d;
    char         dir[32];
    unsigned     settled, through, filed;
    int          stopped;
    mt_slot_desc slots[SLOTS + UNITS];          /* the ring, then the settled units' */
    int          n_slots;
    source       source[SOURCES];
    int          n_sources;
    int          has[UNITS];
    uint64_t     naps;           /* random; the updater's thread */
    mt_timeline *timeline;
    float        x[D], gx[D], saved[VISITS][D];     /* device memory: run's */
    outcome      out;            /* x: run's */
} engine;

static void engine_slots(engine *e)
{
    e->n_slots = SLOTS + __builtin_popcount(e->settled);
    for (int i = 0; i < e->n_slots; i++) {
        e->slots[i].bytes = mt_store_hi_bytes(e->t.store, UNITS - 1);
        REQUIRE_OK(e->t.dev->ops->mem_alloc(e->t.dev, e->slots[i].bytes, &e->slots[i].mem));
    }
}

static mt_status engine_settle(engine *e)
{
    int       slot = SLOTS;
    mt_status st = MT_OK;

    for (int u = 0; u < UNITS; u++)
        if (e->settled >> u & 1)
            MT_TRY(mt_stream_settle(e->s, u, slot++));
        else if (e->through >> u & 1)
            MT_TRY(mt_store_move(e->t.store, u, &mt_home_through, e->h));
fail:
    return st;
}

/* States and weights of these units; the toy had filled planes of theirs in memory. */
static void engine_file(engine *e)
{
    strcpy(e->dir, "/tmp/mt_test_engine.XXXXXX");
    REQUIRE(mkdtemp(e->dir) != NULL);
    REQUIRE_OK(mt_file_open(e->dir, 0, 3, NULL, &e->file));
    REQUIRE_OK(mt_disk_open(&e->t.cx, mt_file_blocks(e->file), NULL, 3, MT_DISK_LEAST, &e->d));
    for (int u = 0; u < UNITS; u++)
        if (e->filed >> u & 1) {
            drop_plane(e->t.store, u, MT_PLANE_HI);
            REQUIRE_OK(mt_disk_add(e->d, u, 1));
        }
    REQUIRE_OK(mt_feed_open(e->t.cx.disk, 3 * MT_BLOCK_ALIGN));
    for (int u = 0; u < UNITS; u++) {
        for (int p = 0; p < TOY_PARAMS && (e->filed >> u & 1); p++)
            for (int64_t i = 0; i < toy_numel(u, p); i++)
                toy_at(&e->t, u, p, MT_PLANE_HI)[i] = toy_value(u, p, i);
        CHECK_OK(mt_mirror_push(e->t.store, u, -1, 1u << MT_PLANE_HI));
        CHECK_OK(mt_mirror_release(e->t.store, u));
    }
}

static mt_status engine_threads(engine *e)
{
    mt_slot_hooks none = { 0 };

    TRY(mt_timeline_open(e->t.dev, &e->timeline));
    e->t.cx.timeline = e->timeline;
    TRY(mt_resident_open(&e->t.cx, &e->r));
    TRY(mt_stream_open(&e->t.cx, e->slots, e->n_slots, none, &e->s));
    TRY(mt_through_open(&e->t.cx, 2, MT_THROUGH_LEAST, &e->h));
    TRY(engine_settle(e));
    TRY(mt_offload_open(&e->t.cx, 1, toy_kernels, &e->o));
    TRY(mt_update_open(&e->t.cx, e->o, &e->u));
    return MT_OK;
}

static void unlocked_open(toy *t, const config *c)
{
    mt_dev *dev = delayed_open(c->seed, c->max_us);

    REQUIRE_OK(mt_dev_stage_open(dev, &dev));
    mt_dev_stage_limit(dev, 4096 * (size_t)(c->unlocked - 1), 0);
    toy_open_on(t, dev, UNITS, c->max_us > 0, MT_F32);
}

static void engine_open(engine *e, const config *c)
{
    memset(e, 0, sizeof *e);
    if (c->unlocked)
        unlocked_open(&e->t, c);
    else
        toy_open(&e->t, UNITS, c->seed, c->max_us);
    e->naps = c->seed;
    e->settled = c->settled;
    e->through = c->through;
    e->filed = c->filed;
    engine_slots(e);
    REQUIRE_OK(engine_threads(e));
    if (e->filed != 0)
        engine_file(e);
    CHECK_OK(mt_timeline_on(e->timeline, c->traced));
    debug_set(&e->t.cx, c->debug);
}

static void engine_stop(engine *e)
{
    if (e->stopped)
        return;
    e->stopped = 1;
    mt_update_close(e->u);
    mt_through_close(e->h);
    mt_offload_close(e->o);
    mt_stream_close(e->s);
    mt_feed_close(e->t.cx.feed);
    mt_disk_close(e->d);
    mt_file_close(e->file);
    if (e->filed != 0)
        CHECK_EQ(rmdir(e->dir), 0);
    mt_resident_close(e->r);
    (void)e->t.dev->ops->sync(e->t.run);
    mt_timeline_close(e->timeline);
}

static void engine_close(engine *e)
{
    engine_stop(e);
    for (int i = 0; i < e->n_slots; i++)
        e->t.dev->ops->mem_free(e->t.dev, e->slots[i].mem);
    for (int i = 0; i < e->n_sources; i++)
        for (int p = 0; p < TOY_PARAMS; p++)
            free(e->source[i].g[p]);
    toy_close(&e->t);
}

#define ENGINE(e, ...) \
    CLOSED_BY(engine_close) engine e; engine_open(&e, &(config){ __VA_ARGS__ })

/* ---- work in the run queue -------------------------------------------------------------- */

typedef enum work_kind { START, FORWARD, TURN, LOOK, BACKWARD } work_kind;

typedef struct work {
    engine   *e;
    work_kind kind;
    int       step, visit, unit;
    float    *w[TOY_PARAMS];     /* in a slot */
    float    *g[TOY_PARAMS];
} work;

static void do_work(void *arg)
{
    FREED work *w = arg;
    engine *e = w->e;
    int64_t n0 = toy_numel(w->unit, 0), n1 = toy_numel(w->unit, 1);

    switch (w->kind) {
    case START:
        start_forward(e->x, w->step);
        break;
    case FORWARD:
        forward_unit(e->x, e->saved[w->visit], w->w[0], n0, w->w[1], n1);
        break;
    case TURN:
        memcpy(e->out.x[w->step], e->x, sizeof e->x);
        start_backward(e->gx, e->x);
        break;
    case LOOK:
        memcpy(e->out.seen[w->step], e->x, sizeof e->x);
        break;
    case BACKWARD:
        backward_unit(e->gx, e->saved[w->visit], n0, w->w[1], n1, w->g[0], w->g[1]);
        break;
    }
}

static void compute(engine *e, work w)
{
    work *copy = malloc(sizeof *copy);

    REQUIRE(copy != NULL);
    *copy = w;
    copy->e = e;
    REQUIRE_OK(e->t.dev->ops->call(e->t.run, do_work, copy));
}

static void window(engine *e, work w)
{
    void *mem = NULL;
    int   k = -1;

    CHECK_OK(mt_stream_acquire(e->s, w.unit, e->t.run, &k, &mem));
    CHECK_OK(mt_stream_await(e->s, k, e->t.run));
    for (int p = 0; p < TOY_PARAMS && mem != NULL; p++)
        w.w[p] = (float *)(void *)((char *)mem + mt_store_offset(e->t.store, w.unit, p));
    mt_timeline_enter(e->timeline, w.kind == FORWARD ? MT_WORK_FORWARD : MT_WORK_BACKWARD, w.unit,
                      e->t.run);
    if (mem != NULL)
        compute(e, w);
    mt_timeline_leave(e->timeline, e->t.run);
}

/* Memory whose last gradient has passed, or more of it: what torch's allocator does. */
static source *take_source(engine *e)
{
    uint64_t passed = mt_offload_passed(e->o);
    source  *s = NULL;

    for (int i = 0; i < e->n_sources && s == NULL; i++)
        if (e->source[i].ticket <= passed)
            s = &e->source[i];
    if (s == NULL) {
        REQUIRE(e->n_sources < SOURCES);
        s = &e->source[e->n_sources++];
        for (int p = 0; p < TOY_PARAMS; p++)
            REQUIRE((s->g[p] = calloc(MAX_N, sizeof *s->g[p])) != NULL);
    }
    return s;
}

static void hand_over(engine *e, int unit, source *s)
{
    mt_grad_item items[TOY_PARAMS];

    for (int p = 0; p < TOY_PARAMS; p++)
        items[p] = (mt_grad_item){ p, s->g[p], e->has[unit] ? MT_GRAD_ADD : MT_GRAD_SET, 0 };
    e->has[unit] = 1;
    CHECK_OK(mt_offload_put(e->o, unit, items, TOY_PARAMS, e->t.run, &s->ticket));
}

static void forward(engine *e, const step_plan *s, int step)
{
    CHECK_OK(mt_stream_begin(e->s));
    mt_timeline_step(e->timeline, step, e->t.run);
    compute(e, (work){ .kind = START, .step = step });
    for (int i = 0; i < s->n; i++)
        window(e, (work){ .kind = FORWARD, .visit = i, .unit = s->order[i] });
}

static void micro_batch(engine *e, const step_plan *s, int step)
{
    forward(e, s, step);
    compute(e, (work){ .kind = TURN, .step = step });
    for (int i = s->n - 1; i >= 0 && s->backward; i--) {
        source *src = take_source(e);

        window(e, (work){ .kind = BACKWARD, .visit = i, .unit = s->order[i],
                          .g = { src->g[0], src->g[1] } });
        hand_over(e, s->order[i], src);
    }
}

/* ---- the update: on the updater's thread ------------------------------------------------ */

typedef struct update_arg {
    engine *e;
    int     unit;
} update_arg;

static mt_status run_update(void *arg, mt_pool *pool, float clip)
{
    update_arg     *a = arg;
    struct timespec nap = { 0, (long)(toy_random(&a->e->naps) % 200) * 1000 };

    if (a->e->naps % 2)
        nanosleep(&nap, NULL);
    for (int p = 0; p < TOY_PARAMS; p++)
        update_param(toy_at(&a->e->t, a->unit, p, MT_PLANE_HI),
                     toy_at(&a->e->t, a->unit, p, MT_PLANE_GRAD), toy_numel(a->unit, p), clip);
    return MT_OK;
}

/* The same on the device: what the queue's thread needs. */
typedef struct put_arg {
    float  *p[TOY_PARAMS], *g[TOY_PARAMS];
    int64_t n[TOY_PARAMS];
    float   clip;
} put_arg;

static void update_now(void *arg)
{
    FREED put_arg *a = arg;

    for (int p = 0; p < TOY_PARAMS; p++)
        update_param(a->p[p], a->g[p], a->n[p], a->clip);
}

static mt_status put_update(void *arg, mt_queue *q, float clip)
{
    const update_arg *a = arg;
    put_arg          *put = calloc(1, sizeof *put);
    void             *at;
    mt_status         st;

    REQUIRE(put != NULL);
    put->clip = clip;
    for (int p = 0; p < TOY_PARAMS; p++) {
        put->n[p] = toy_numel(a->unit, p);
        MT_TRY(mt_resident_at(a->e->r, a->unit, p, MT_PLANE_HI, &at));
        put->p[p] = at;
        MT_TRY(mt_resident_at(a->e->r, a->unit, p, MT_PLANE_GRAD, &at));
        put->g[p] = at;
    }
    MT_TRY(q->dev->ops->call(q, update_now, put));
    return MT_OK;
fail:
    free(put);
    return st;
}

/* And of a unit that goes through: a part of each parameter at a time, at most. */
static mt_status gradient_of(void *arg, int param, const void **at, mt_plane *plane)
{
    const update_arg *a = arg;

    *at = toy_at(&a->e->t, a->unit, param, MT_PLANE_GRAD);
    *plane = MT_PLANE_GRAD;
    return MT_OK;
}

static mt_status compute_update(void *arg, mt_queue *q, const mt_part *parts, int n,
                                float clip)
{
    put_arg  *put = calloc(1, sizeof *put);
    mt_status st;

    REQUIRE(put != NULL && n <= TOY_PARAMS);
    put->clip = clip;
    for (int i = 0; i < n; i++) {
        put->p[i] = parts[i].at[MT_PLANE_HI];
        put->g[i] = parts[i].at[MT_PLANE_GRAD];
        put->n[i] = parts[i].n;
    }
    if ((st = q->dev->ops->call(q, update_now, put)) != MT_OK)
        free(put);
    return st;
}

/* And of one on disk. */
static mt_status update_pieces(void *arg, mt_pool *pool, const mt_part *parts, int n, float clip)
{
    const update_arg *a = arg;

    for (int i = 0; i < n; i++)
        update_param((float *)parts[i].at[MT_PLANE_HI],
                     toy_at(&a->e->t, a->unit, parts[i].param, MT_PLANE_GRAD) + parts[i].from,
                     parts[i].n, clip);
    return MT_OK;
}

/* As an update whose gradient is on the host. */
static mt_status put_nothing(void *arg, mt_queue *q, float clip)
{
    const update_arg *a = arg;
    void             *mem;

    TRY(mt_resident_scratch(a->e->r, sizeof a->e->x, &mem));
    return q->dev->ops->copy(q, mem, a->e->x, sizeof a->e->x);
}

static mt_status run_nothing(void *arg, mt_pool *pool, float clip)
{
    return MT_OK;
}

static const int all_params[TOY_PARAMS] = { 0, 1 };

static uint64_t submit(engine *e, double max_norm)
{
    mt_update_job jobs[UNITS];
    uint64_t      ticket = 0;
    int           n = 0;

    for (int u = 0; u < UNITS; u++) {
        update_arg *a;

        if (!e->has[u])
            continue;
        REQUIRE((a = malloc(sizeof *a)) != NULL);
        *a = (update_arg){ e, u };
        jobs[n++] = (mt_update_job){ .unit = u, .n_params = TOY_PARAMS, .params = all_params,
                                     .run = run_update, .put = put_update, .gradient = gradient_of,
                                     .compute = compute_update, .pieces = update_pieces,
                                     .bytes = 1000, .free = free, .arg = a };
    }
    CHECK_OK(mt_update_submit(e->u, jobs, n, max_norm, e->t.run, &ticket));
    for (int u = 0; u < UNITS; u++)             /* zero_grad() at once, as users do */
        mt_offload_forget(e->o, u);
    memset(e->has, 0, sizeof e->has);
    CHECK_OK(mt_stream_kick(e->s, e->t.run));
    return ticket;
}

static void read_back(engine *e)
{
    for (int u = 0; u < UNITS; u++) {
        CHECK_OK(mt_ledger_wait_updates(e->t.store, u));
        CHECK_OK(mt_mirror_bring(e->t.store, u, 1u << MT_PLANE_HI));
        for (int p = 0; p < TOY_PARAMS; p++)
            memcpy(e->out.w[u][p], toy_at(&e->t, u, p, MT_PLANE_HI),
                   (size_t)toy_numel(u, p) * sizeof(float));
    }
}

static void train(engine *e, const config *c, uint64_t *ticket)
{
    uint64_t random = c->seed;

    for (int step = 0; step < STEPS; step++) {
        step_plan s = plan_step(&random, c->odd);

        for (int m = 0; m < s.micro; m++)
            micro_batch(e, &s, step);
        if (c->look) {
            forward(e, &s, step);
            compute(e, (work){ .kind = LOOK, .step = step });
        }
        if (s.backward)
            ticket[step] = submit(e, c->max_norm);
        if (step % 2 && e->filed != 0)      /* what is read here is forgotten by a later window */
            CHECK_OK(mt_mirror_bring(e->t.store, __builtin_ctz(e->filed), 1u << MT_PLANE_HI));
    }
    CHECK_OK(e->t.dev->ops->sync(e->t.run));
    read_back(e);
}

static void run_engine(const config *c, outcome *out)
{
    uint64_t ticket[STEPS] = { 0 };
    int      skipped;

    CLOSED_BY(engine_close) engine e;
    engine_open(&e, c);
    train(&e, c, ticket);
    for (int step = 0; step < STEPS; step++)
        if (ticket[step] > 0 && !c->debug.skip)
            CHECK_OK(mt_update_norm(e.u, ticket[step], &e.out.norm[step], &skipped));
    *out = e.out;
}

/* ---- equal bits ------------------------------------------------------------------------- */

static int same(const config *c)
{
    static outcome want, got;

    run_plain(c, &want);
    run_engine(c, &got);
    return memcmp(want.w, got.w, sizeof want.w) == 0 && memcmp(want.x, got.x, sizeof want.x) == 0 &&
           memcmp(want.seen, got.seen, sizeof want.seen) == 0 &&
           (c->debug.skip || memcmp(want.norm, got.norm, sizeof want.norm) == 0);
}

#define ALL_UNITS ((1u << UNITS) - 1)

/* Runs of all seeds below n are those of the plain loop; s is the seed. */
#define SAME_TEST(name, n, ...)                                                           \
    TEST(name)                                                                            \
    {                                                                                     \
        for (unsigned s = 0; s < (n); s += UNDER_TSAN && (n) > 50 ? 3 : 1)                \
            CHECK(same(&(config){ .seed = s, .max_norm = s % 3 ? 0.5 : 0, __VA_ARGS__ })); \
    }

SAME_TEST(overlap_off_equals_the_plain_loop, 8,
          .max_us = 50, .odd = s % 2, .debug = { .sync = 1, .poison = 1 })
SAME_TEST(overlap_on_the_calling_thread_equals_the_plain_loop, 20,
          .odd = s % 2, .debug = { .poison = 1 })
SAME_TEST(overlap_with_random_delays_equals_the_plain_loop, 60,
          .max_us = s % 4 ? 40 : 200, .debug = { .poison = s % 2 })
SAME_TEST(odd_orders_with_random_delays_equal_the_plain_loop, 60,
          .max_us = s % 4 ? 40 : 200, .odd = 1, .debug = { .poison = s % 2 })
SAME_TEST(settled_units_equal_the_plain_loop_without_overlap, 8,
          .max_us = 50, .odd = s % 2, .look = 1, .settled = s < 2 ? ALL_UNITS : s * 5,
          .debug = { .sync = 1, .poison = 1 })
SAME_TEST(settled_units_on_the_calling_thread_equal_the_plain_loop, 20,
          .odd = s % 2, .settled = s * 7 & ALL_UNITS, .look = s % 2)
SAME_TEST(settled_units_with_random_delays_equal_the_plain_loop, 60,
          .max_us = s % 4 ? 40 : 200, .odd = s % 2, .look = s % 5 == 0,
          .settled = s % 7 ? s * 11 & ALL_UNITS : ALL_UNITS, .debug = { .poison = s % 2 })
SAME_TEST(units_that_go_through_equal_the_plain_loop, 40,
          .max_us = s % 3 ? 60 : 0, .odd = s % 2, .through = s * 13 & ALL_UNITS,
          .settled = s % 4 ? 0 : 2, .traced = s % 5 == 0,
          .debug = { .poison = s % 2, .sync = s % 7 == 6 })
SAME_TEST(units_on_disk_equal_the_plain_loop, 14,
          .max_us = s % 3 ? 60 : 0, .odd = s % 2, .settled = s % 4 ? 0 : 2, .look = s % 5 == 1,
          .filed = s % 2 ? ALL_UNITS & ~2u : 0x15, .traced = s % 5 == 0,
          .debug = { .poison = s % 2, .sync = s % 7 == 6 })
SAME_TEST(memory_that_is_not_locked_changes_no_bits, 12,
          .max_us = s % 3 ? 40 : 0, .odd = s % 2, .unlocked = s % 2 ? 1 : 1 + (int)s,
          .settled = s % 2 ? 5 : 0, .through = s % 5 ? 0 : 10, .debug = { .poison = 1 })
SAME_TEST(recording_changes_no_bits, 20,
          .max_us = s % 3 ? 40 : 0, .odd = s % 2, .traced = 1, .debug = { .poison = 1 })

/* ---- edges ------------------------------------------------------------------------------ */

/* Wrong bytes within a few dozen runs; if not, the tests above prove nothing about this edge. */
static void edge_matters(unsigned edge, unsigned settled)
{
    int wrong = 0;

    RACE;
    for (uint64_t seed = 0; seed < 60 && !wrong; seed++)
        wrong = !same(&(config){ .seed = seed, .max_us = 400, .odd = seed % 2, .max_norm = 0.5,
                                 .settled = settled, .look = settled != 0,
                                 .debug = { .skip = edge, .poison = 1 } });
    CHECK(wrong);
}

#define EDGE_TEST(name, edge, settled) \
    TEST(without_##name##_bytes_are_wrong) { edge_matters(edge, settled); }
EDGE_TEST(ready, MT_EDGE_READY, 0)
EDGE_TEST(freed, MT_EDGE_FREED, 0)
EDGE_TEST(grad, MT_EDGE_GRAD, 0)
EDGE_TEST(landed, MT_EDGE_LANDED, 0)
EDGE_TEST(updated, MT_EDGE_UPDATED, 0)
EDGE_TEST(settled_updated, MT_EDGE_UPDATED, ALL_UNITS)
EDGE_TEST(settled_grad, MT_EDGE_GRAD, ALL_UNITS)
EDGE_TEST(settled_landed, MT_EDGE_LANDED, ALL_UNITS)
EDGE_TEST(stepped, MT_EDGE_STEPPED, ALL_UNITS)
EDGE_TEST(asked, MT_EDGE_ASKED, ALL_UNITS)

/* Two steps of a settled unit with no forward between them, so that nothing else orders the second
 * gradient behind the first update: p0 - LR * 1 - LR * 2? */
static int two_steps_in_a_row(uint64_t seed, unsigned skip)
{
    const float value[2] = { 1, 2 };
    uint64_t    ticket;
    int         right = 1;

    ENGINE(e, .seed = seed, .max_us = 400, .settled = 1, .debug = { .skip = skip });
    for (int k = 0; k < 2; k++) {
        source *src = take_source(&e);

        for (int p = 0; p < TOY_PARAMS; p++)
            for (int i = 0; i < MAX_N; i++)
                src->g[p][i] = value[k];
        src->ticket = UINT64_MAX;               /* not to be handed out again */
        hand_over(&e, 0, &(source){ .g = { src->g[0], src->g[1] } });
        ticket = submit(&e, 0);
    }
    CHECK(ticket == 2);
    read_back(&e);
    for (int p = 0; p < TOY_PARAMS; p++)
        for (int64_t i = 0; i < toy_numel(0, p); i++) {
            float w = toy_value(0, p, i);

            update_param(&w, &value[0], 1, 1.0f);
            update_param(&w, &value[1], 1, 1.0f);
            right &= e.out.w[0][p][i] == w;
        }
    return right;
}

TEST(a_gradient_waits_for_the_update_that_reads_the_one_before)
{
    for (uint64_t seed = 0; seed < 30; seed++)
        CHECK(two_steps_in_a_row(seed, 0));
}

TEST(without_taken_bytes_are_wrong)
{
    int right = 1;

    RACE;
    for (uint64_t seed = 0; seed < 60 && right; seed++)
        right = two_steps_in_a_row(seed, MT_EDGE_SPENT);
    CHECK(!right);
}

/* ---- the updater ------------------------------------------------------------------------ */

/* One unit each; run counts, and notes the order and the clip factor. */
typedef struct probe {
    atomic_int runs;
    int        frees;
    float      clip;
    int        fail;             /* run says MT_EDEVICE */
    int        has_own;          /* the job's own sum of squares for parameter 0 counts */
    double     own_sum;
    int        nap_us;
} probe;

static mt_status probe_run(void *arg, mt_pool *pool, float clip)
{
    probe *p = arg;

    usleep((useconds_t)p->nap_us);
    p->runs++;
    p->clip = clip;
    return p->fail ? MT_FAIL(MT_EDEVICE, "the probe failed") : MT_OK;
}

static double probe_sumsq(void *arg, mt_pool *pool, int i, double *chunks, int *use)
{
    const probe *p = arg;

    *use = i == 0 && p->has_own;
    return p->own_sum;
}

static void probe_free(void *arg)
{
    ((probe *)arg)->frees++;
}

static const float ones[UNITS] = { 1, 1, 1, 1, 1 };

/* Puts gradients whose every element is value[u]. The host writes them, which is not in run's
 * order, so it waits until the memory is free. */
static void put_values(engine *e, const float *value)
{
    for (int u = 0; u < UNITS; u++) {
        CHECK_OK(mt_offload_drain(e->o));
        source *s = take_source(e);
        for (int p = 0; p < TOY_PARAMS; p++)
            for (int i = 0; i < MAX_N; i++)
                s->g[p][i] = value[u];
        hand_over(e, u, s);
    }
}

static mt_status submit_probes(engine *e, probe *probes, double max_norm, uint64_t *ticket)
{
    mt_update_job jobs[UNITS];

    for (int u = 0; u < UNITS; u++)
        jobs[u] = (mt_update_job){ .unit = u, .n_params = TOY_PARAMS, .params = all_params,
                                   .sumsq = probe_sumsq, .run = probe_run, .free = probe_free,
                                   .arg = &probes[u] };
    memset(e->has, 0, sizeof e->has);
    return mt_update_submit(e->u, jobs, UNITS, max_norm, e->t.run, ticket);
}

/* A step of probes over these gradients. NULL: none. */
static mt_status probed(engine *e, probe *probes, const float *value, double max_norm, double *norm)
{
    uint64_t ticket = 0;

    if (value != NULL)
        put_values(e, value);
    CHECK_OK(submit_probes(e, probes, max_norm, &ticket));
    for (int u = 0; u < UNITS && value != NULL; u++)
        mt_offload_forget(e->o, u);
    mt_status st = mt_update_norm(e->u, ticket, norm, &(int){0});
    CHECK_EQ(mt_update_drain(e->u), st);
    return st;
}

/* Each probe's job was ended once, and run where it is to be. */
static void check_probes(const probe *probes, unsigned ran)
{
    for (int u = 0; u < UNITS; u++) {
        CHECK_EQ(probes[u].runs, ran >> u & 1);
        CHECK_EQ(probes[u].frees, 1);
    }
}

TEST(a_sum_of_the_jobs_own_counts_instead)
{
    const float value[UNITS] = { 0 };
    probe       probes[UNITS] = { [2] = { .has_own = 1, .own_sum = 9.0 } };
    double      norm = 0;

    ENGINE(e, .seed = 1);
    CHECK_OK(probed(&e, probes, value, 100.0, &norm));
    CHECK(norm == 3.0 && probes[2].clip == 1.0f);
}

TEST(clipping_without_a_sum_is_a_fault_that_says_so)
{
    probe  probes[UNITS] = { 0 };
    double norm;

    ENGINE(e, .seed = 1);
    CHECK_FAILS(probed(&e, probes, NULL, 1.0, &norm), MT_ESTATE, "layers.0");
    check_probes(probes, 0);
}

TEST(a_failing_job_ends_all_and_is_told_to_everyone)
{
    probe    probes[UNITS] = { [1] = { .fail = 1 } };
    uint64_t ticket = 0;
    void    *mem;
    int      k;

    ENGINE(e, .seed = 1);
    put_values(&e, ones);
    CHECK_OK(submit_probes(&e, probes, 1.0, &ticket));
    CHECK_FAILS(mt_update_drain(e.u), MT_EDEVICE, "the probe failed");
    CHECK_EQ(mt_stream_acquire(e.s, 0, e.t.run, &k, &mem), MT_EDEVICE);
    CHECK_EQ(mt_offload_drain(e.o), MT_EDEVICE);
    check_probes(probes, 3);
    /* The args are the updater's even when it refuses. */
    CHECK_EQ(submit_probes(&e, probes, 1.0, &ticket), MT_EDEVICE);
    for (int u = 0; u < UNITS; u++)
        CHECK_EQ(probes[u].frees, 2);
}

TEST(an_update_waits_for_copies_of_the_weights)
{
    probe    probes[UNITS] = { 0 };
    uint64_t ticket = 0, version = 0;

    ENGINE(e, .seed = 1);
    put_values(&e, ones);
    CHECK_OK(mt_ledger_fetch_begin(e.t.store, 1, &version));     /* a mover about to copy */
    CHECK_OK(submit_probes(&e, probes, 1.0, &ticket));
    CHECK_OK(mt_ledger_wait_updates(e.t.store, 0));
    sleep_ms(5);
    CHECK_EQ(atomic_load(&probes[1].runs), 0);
    CHECK_OK(mt_ledger_fetching(e.t.store, 1, e.t.run));
    CHECK_OK(mt_update_drain(e.u));
    CHECK_EQ(probes[1].runs, 1);
}

/* Host jobs wait until the settled unit's update, last in the list, has been put. */
typedef struct relay {
    atomic_int put, late;
} relay;

static mt_status relay_put(void *arg, mt_queue *q, float clip)
{
    atomic_store(&((relay *)arg)->put, 1);
    return MT_OK;
}

static mt_status relay_run(void *arg, mt_pool *pool, float clip)
{
    relay *r = arg;

    for (int ms = 0; ms < 2000 && !atomic_load(&r->put); ms++)
        sleep_ms(1);
    if (!atomic_load(&r->put))
        atomic_store(&r->late, 1);
    return MT_OK;
}

static mt_status relay_gradient(void *arg, int param, const void **at, mt_plane *plane)
{
    static float grads[TOY_PARAMS * 128];

    atomic_store(&((relay *)arg)->put, 1);
    *at = grads;
    *plane = MT_PLANE_GRAD;
    return MT_OK;
}

static void the_device_does_not_wait_for_the_host(unsigned settled, unsigned through)
{
    mt_update_job jobs[UNITS];
    relay         r = { 0 };
    uint64_t      ticket;

    ENGINE(e, .seed = 1, .settled = settled, .through = through);
    put_values(&e, ones);
    for (int u = 0; u < UNITS; u++)
        jobs[u] = (mt_update_job){ .unit = u, .n_params = TOY_PARAMS, .params = all_params,
                                   .run = relay_run, .put = relay_put, .gradient = relay_gradient,
                                   .compute = compute_update, .arg = &r };
    CHECK_OK(mt_update_submit(e.u, jobs, UNITS, 1.0, e.t.run, &ticket));
    CHECK_OK(mt_update_drain(e.u));
    CHECK_EQ(atomic_load(&r.late), 0);
}

TEST(units_on_the_device_or_through_it_do_not_wait_for_the_hosts)
{
    the_device_does_not_wait_for_the_host(1u << (UNITS - 1), 0);
    the_device_does_not_wait_for_the_host(0, 1u << (UNITS - 1));
}

/* What comes down overwrites the weights that a fetch may still be reading. */
TEST(a_unit_that_goes_through_waits_for_copies_of_its_weights)
{
    relay         r = { 0 };
    mt_update_job job = { .unit = 1, .n_params = TOY_PARAMS, .params = all_params,
                          .gradient = relay_gradient, .compute = compute_update, .arg = &r };
    uint64_t      ticket, version;

    ENGINE(e, .seed = 1, .through = 2);
    put_values(&e, ones);
    CHECK_OK(mt_ledger_fetch_begin(e.t.store, 1, &version));     /* a mover about to copy */
    CHECK_OK(mt_update_submit(e.u, &job, 1, 1.0, e.t.run, &ticket));
    sleep_ms(20);
    CHECK_EQ(atomic_load(&r.put), 0);
    CHECK_OK(mt_ledger_fetching(e.t.store, 1, e.t.run));
    CHECK_OK(mt_update_drain(e.u));
    CHECK_EQ(atomic_load(&r.put), 1);
}

static mt_status gradient_fails(void *arg, int param, const void **at, mt_plane *plane)
{
    return MT_FAIL(MT_EDEVICE, "no gradient");
}

TEST(a_failing_job_of_a_unit_that_goes_through_ends_those_behind_it)
{
    mt_update_job jobs[2];
    relay         r = { 0 };
    uint64_t      ticket;

    ENGINE(e, .seed = 1, .through = 3);
    put_values(&e, ones);
    for (int u = 0; u < 2; u++)
        jobs[u] = (mt_update_job){ .unit = u, .n_params = TOY_PARAMS, .params = all_params,
                                   .gradient = u == 0 ? gradient_fails : relay_gradient,
                                   .compute = compute_update, .arg = &r };
    CHECK_OK(mt_update_submit(e.u, jobs, 2, 1.0, e.t.run, &ticket));
    CHECK_FAILS(mt_update_drain(e.u), MT_EDEVICE, "no gradient");
    CHECK_EQ(atomic_load(&r.put), 0);
}

TEST(buffers_that_hold_nothing_are_refused)
{
    mt_through *h = NULL;

    ENGINE(e, .seed = 1);
    CHECK_EQ(mt_through_open(&e.t.cx, 0, 1 << 20, &h), MT_EINVAL);
    CHECK_FAILS(mt_through_open(&e.t.cx, 2, MT_THROUGH_LEAST - 1, &h), MT_EINVAL, "8191");
}

TEST(a_unit_off_the_host_needs_a_job_that_can)
{
    mt_update_job job = { .unit = 0, .run = run_nothing };
    uint64_t      ticket = 7;

    ENGINE(e, .seed = 1, .settled = 1, .through = 2);
    CHECK_FAILS(mt_update_submit(e.u, &job, 1, 1.0, e.t.run, &ticket), MT_ESTATE, "layers.0");
    job.unit = 1;
    CHECK_FAILS(mt_update_submit(e.u, &job, 1, 1.0, e.t.run, &ticket), MT_ESTATE, "layers.1");
    CHECK_OK(mt_update_drain(e.u));
}

TEST(close_finishes_what_was_submitted)
{
    probe    probes[UNITS] = { 0 };
    uint64_t ticket = 0;

    ENGINE(e, .seed = 4, .max_us = 500);
    put_values(&e, ones);
    for (int i = 0; i < 3; i++)
        CHECK_OK(submit_probes(&e, probes, 1.0, &ticket));
    mt_update_close(e.u);
    e.u = NULL;
    for (int u = 0; u < UNITS; u++)
        CHECK_EQ(probes[u].runs, 3);
    mt_update_close(NULL);
}

TEST(results_of_the_last_submits_are_kept)
{
    probe    probes[UNITS] = { { .nap_us = 1000 } };     /* submit has to wait for its turn */
    uint64_t ticket = 0;
    double   norm = 0;
    int      skipped = -1;

    ENGINE(e, .seed = 4);
    put_values(&e, ones);
    CHECK_EQ(mt_update_norm(e.u, 1, &norm, &skipped), MT_EINVAL);
    CHECK_EQ(mt_update_norm(e.u, 0, &norm, &skipped), MT_EINVAL);
    for (int i = 0; i < 200; i++)
        CHECK_OK(submit_probes(&e, probes, 1.0, &ticket));
    CHECK_EQ(ticket, 200);
    CHECK_OK(mt_update_norm(e.u, 200 - 64, &norm, &skipped));
    CHECK(norm > 0);
    CHECK_FAILS(mt_update_norm(e.u, 20, &norm, &skipped), MT_EINVAL, "submit 20");
}

/* A refused submit frees its args and announces nothing. */
TEST(submit_refuses_a_unit_that_is_not_there)
{
    probe         p = { 0 };
    mt_update_job job = { .unit = UNITS, .run = probe_run, .free = probe_free, .arg = &p };
    uint64_t      ticket = 7;

    ENGINE(e, .seed = 4);
    CHECK_EQ(mt_update_submit(e.u, &job, 1, 0, e.t.run, &ticket), MT_EINVAL);
    CHECK_EQ(p.frees, 1);
    CHECK_EQ(ticket, 7);
    CHECK_OK(mt_update_drain(e.u));
}

/* ---- failures --------------------------------------------------------------------------- */

/* A step by hand: every call may fail. x serves as every gradient: it outlives the queues. */
static mt_status try_step(engine *e, int mode)
{
    mt_update_job jobs[UNITS];
    uint64_t      ticket;
    double        norm;
    int           k, skipped;
    void         *mem;

    TRY(mt_stream_begin(e->s));
    for (int u = 0; u < UNITS; u++) {
        update_arg  *a;
        mt_grad_item item = { 1, e->x, mode ? MT_GRAD_ADD : MT_GRAD_SET, 0 };

        TRY(mt_stream_acquire(e->s, u, e->t.run, &k, &mem));
        TRY(mt_stream_await(e->s, k, e->t.run));
        TRY(mt_offload_put(e->o, u, &item, 1, e->t.run, &ticket));
        REQUIRE((a = malloc(sizeof *a)) != NULL);
        *a = (update_arg){ e, u };
        jobs[u] = (mt_update_job){ .unit = u, .n_params = 1, .params = all_params + 1,
                                   .run = run_nothing, .put = put_nothing, .gradient = gradient_of,
                                   .compute = compute_update, .free = free, .arg = a };
        TRY(mt_update_submit(e->u, &jobs[u], 1, mode ? 1.0 : 0, e->t.run, &ticket));
    }
    TRY(mt_stream_kick(e->s, e->t.run));
    TRY(mt_update_norm(e->u, ticket, &norm, &skipped));
    TRY(mt_update_drain(e->u));
    for (int u = 0; u < UNITS; u++) {
        TRY(mt_mirror_bring(e->t.store, u, ~0u));
        TRY(mt_mirror_push(e->t.store, u, 0, 1u << MT_PLANE_M | 1u << MT_PLANE_HI));
    }
    return mt_offload_drain(e->o);
}

/* Opens store and slots on `dev`; their calls are the same each time. */
static void open_below(engine *e, mt_dev *dev, unsigned settled)
{
    memset(e, 0, sizeof *e);
    e->settled = settled;
    e->through = settled << 1;
    toy_open_on(&e->t, dev, UNITS, 0, MT_F32);
    engine_slots(e);
}

static void nth_failure_ends_all_and_frees_everything(fault_mode mode, int traced, unsigned settled)
{
    static engine e;
    int           fired = 1;

    CPU(cpu);
    for (int n = 1; fired > 0; n += UNDER_TSAN ? 3 : 1) {
        open_below(&e, fault_dev(cpu, 0, mode), settled);
        int live = fault_live(e.t.dev);
        fault_next(e.t.dev, n);
        mt_status st = engine_threads(&e);
        if (st == MT_OK)
            CHECK_OK(mt_timeline_on(e.timeline, traced));
        for (int step = 0; step < 2 && st == MT_OK; step++)
            st = try_step(&e, step);
        engine_stop(&e);
        fired = fault_fired(e.t.dev);
        CHECK(st == MT_OK || st == MT_EDEVICE);
        CHECK(fired > 0 || st == MT_OK);
        /* The store keeps a registered GRAD plane and an event per unit, and of units that go
         * through two planes of states. */
        CHECK(fault_live(e.t.dev) >= live && fault_live(e.t.dev) <= live + 4 * UNITS);
        engine_close(&e);
    }
}

TEST(every_failing_device_call_ends_all_and_frees_everything)
{
    nth_failure_ends_all_and_frees_everything(FAULT_ONCE, 1, 0x15);
    if (UNDER_TSAN)             /* the threads of the rest are the same: fewer homes, no trace */
        return;
    /* Any two of the three arguments together: the fourth pair is above. */
    nth_failure_ends_all_and_frees_everything(FAULT_STAYS, 0, 0x15);
    nth_failure_ends_all_and_frees_everything(FAULT_ONCE, 0, 0);
    nth_failure_ends_all_and_frees_everything(FAULT_STAYS, 1, 0);
}
