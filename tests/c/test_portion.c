/* test_portion.c — the executable form of core/portion.h: one process plays every owner of random
 * units. What they make together, of sums, norms, updates, moves and files, has the bits of a unit
 * that has one owner, and nobody has touched, or has memory for, what is another's.
 *
 * A table is such a play: a side that owns all, and one for each of several owners. All are given
 * the same weights and the same gradients.
 */
#include "check.h"
#include "dev_fault.h"
#include "toy.h"

#include "../../csrc/core/arena.h"
#include "../../csrc/core/disk.h"
#include "../../csrc/core/portion.h"
#include "../../csrc/core/resident.h"
#include "../../csrc/core/through.h"
#include "../../csrc/io/file.h"
#include "../../csrc/io/shards.h"
#include "../../csrc/ops/sumsq.h"
#include "../../csrc/optim/adam.h"

#define PARAMS 7
#define OWNERS 7                 /* at most */
#define BIG    (UNDER_TSAN ? 30000 : 90000)      /* elements */
#define CHUNKS (BIG / MT_SUMSQ_CHUNK + 1)
#define HI     (1u << MT_PLANE_HI)

static const int numbers[] = { 1, 2, 3, 4, 7 };

#define STRETCHES 64             /* a guest's, at most */

enum { RAM, THROUGH, VRAM, GUEST, DISK };

typedef struct table table;

typedef struct side {
    table        *t;
    int           owner, owners, home;
    mt_context    cx;
    mt_sumsq     *sums;
    mt_resident  *r;
    void         *stay[STRETCHES];               /* a guest's states on the device */
    int           n_stay;
    mt_through   *through;
    mt_file      *file;                          /* the disk's; NULL: none */
    mt_disk      *disk;
    mt_offload   *o;
    mt_updater   *u;
    mt_queue     *run;
    void         *slot;
    int64_t       from[PARAMS], n[PARAMS];       /* what is its own */
    int           params[PARAMS], n_params;      /* that are trained */
} side;

struct table {
    uint64_t      seed;
    int           owners, micros, step;
    mt_param_desc d[PARAMS];
    mt_states     states;
    void         *weight[PARAMS], *grad[PARAMS];
    double        chunks[PARAMS][CHUNKS];        /* as the owners made them */
    char          dir[64];
    side          whole, each[OWNERS];
};

/* ---- one side ----------------------------------------------------------------------------- */

static size_t bytes_of(const side *s, int param, mt_plane p, int64_t n)
{
    return mt_store_plane_bytes(s->cx.store, 0, param, p, n);
}

static int is_there(const side *s, mt_plane p)
{
    return s->home == VRAM || (s->home == GUEST && !(MT_STATE_PLANES >> p & 1));
}

/* Of the parameter's first element, where the unit lives. */
static char *base_of(const side *s, int param, mt_plane p)
{
    void *at = NULL;

    REQUIRE_OK((is_there(s, p) ? mt_resident_at(s->r, 0, param, p, &at)
                             : mt_store_at(s->cx.store, 0, param, p, &at)));
    return at;
}

/* The gradient that updates take. */
static mt_plane grads_of(const side *s, int param)
{
    return s->t->micros > 1 && s->t->d[param].dtype != MT_F32 ? MT_PLANE_ACC : MT_PLANE_GRAD;
}

static mt_status open_file(side *s)
{
    TRY(mt_file_open(s->t->dir, 0, 1, NULL, &s->file));
    TRY(mt_disk_open(&s->cx, mt_file_blocks(s->file), NULL, 2, MT_DISK_LEAST, &s->disk));
    TRY(mt_disk_add(s->disk, 0, 0));
    return mt_file_reserve(s->file, mt_disk_need(s->disk));
}

static void open_unit(side *s)
{
    int unit = store_add(s->cx.store, "unit", s->t->d, PARAMS);
    REQUIRE_OK(mt_store_set_states(s->cx.store, unit, s->t->states));
    if (s->owners > 1)
        REQUIRE_OK(mt_store_own(s->cx.store, unit, s->owner, s->owners));
    for (int i = 0; i < PARAMS; i++) {
        s->n[i] = mt_store_owned(s->cx.store, unit, i, &s->from[i]);
        memcpy(base_of(s, i, MT_PLANE_HI), s->t->weight[i],
               bytes_of(s, i, MT_PLANE_HI, s->t->d[i].numel));
        if (s->t->d[i].trainable)
            s->params[s->n_params++] = i;
    }
}

static void side_open(side *s, table *t, int owner, int owners)
{
    mt_offload_kernels k = { mt_sumsq_put, mt_accumulate, mt_accumulate_put, NULL,
                             NULL };

    *s = (side){ .t = t, .owner = owner, .owners = owners };
    REQUIRE_OK(mt_dev_cpu_open(&s->cx.dev));
    REQUIRE_OK(mt_pool_open(2, &s->cx.pool));
    REQUIRE_OK(mt_store_open(&s->cx, &s->cx.store));
    open_unit(s);
    REQUIRE_OK(mt_sumsq_open(s->cx.dev, &s->sums));
    k.ctx = s->sums;
    REQUIRE_OK(s->cx.dev->ops->queue_open(s->cx.dev, "run", &s->run));
    REQUIRE_OK(s->cx.dev->ops->mem_alloc(s->cx.dev, mt_store_hi_bytes(s->cx.store, 0) + 512,
                                      &s->slot));
    REQUIRE_OK(mt_resident_open(&s->cx, &s->r));
    REQUIRE_OK(mt_through_open(&s->cx, 2, 65536, &s->through));
    REQUIRE_OK(mt_offload_open(&s->cx, 2, k, &s->o));
    REQUIRE_OK(mt_update_open(&s->cx, s->o, &s->u));
}

static void side_close(side *s)
{
    mt_update_close(s->u);
    mt_offload_close(s->o);
    mt_through_close(s->through);
    mt_resident_close(s->r);
    for (int i = 0; i < s->n_stay; i++)
        s->cx.dev->ops->mem_free(s->cx.dev, s->stay[i]);
    mt_sumsq_close(s->sums);
    mt_disk_close(s->disk);
    mt_file_close(s->file);
    s->cx.dev->ops->mem_free(s->cx.dev, s->slot);
    s->cx.dev->ops->queue_close(s->run);
    mt_store_close(s->cx.store);
    mt_pool_close(s->cx.pool);
    s->cx.dev->ops->close(s->cx.dev);
}

/* To ram from wherever it is, and on. */
static void go(side *s, int home)
{
    if (s->home == GUEST)
        CHECK_OK(mt_arrive_dismiss(s->r, 0));
    if (s->home == VRAM || s->home == GUEST)
        CHECK_OK(mt_resident_unsettle(s->r, 0, 1));
    if (s->home == THROUGH)
        CHECK_OK(mt_store_move(s->cx.store, 0, &mt_home_ram, NULL));
    if (home == VRAM || home == GUEST) {
        CHECK_OK(mt_resident_settle(s->r, 0, s->slot));
        if (home == GUEST)
            CHECK_OK(mt_arrive_invite(s->r, 0));
        CHECK_OK(mt_home_vram.take(s->r, 0, s->run));
    }
    if (home == THROUGH)
        CHECK_OK(mt_store_move(s->cx.store, 0, &mt_home_through, s->through));
    if (home == DISK && s->home != DISK)
        REQUIRE_OK(open_file(s));
    s->home = home;
}

/* ---- gradients, and their sums ------------------------------------------------------------- */

static void put_gradients(side *s, mt_grad_mode mode)
{
    mt_grad_item item[PARAMS];
    uint64_t     ticket;

    for (int k = 0; k < s->n_params; k++) {
        int   i = s->params[k];
        char *all = s->t->grad[i];

        item[k] = (mt_grad_item){ .param = i, .mode = mode };
        if (s->n[i] > 0)
            item[k].src = all + bytes_of(s, i, MT_PLANE_GRAD, s->from[i]);
    }
    CHECK_OK(mt_offload_put(s->o, 0, item, s->n_params, s->run, &ticket));
    CHECK_OK(mt_offload_drain(s->o));
}

/* What an owner tells the others: made with the copies, and what its planes have says the same. */
static void tell_chunks(side *s)
{
    for (int k = 0; k < s->n_params && s->owners > 1; k++) {
        int           i = s->params[k];
        mt_plane      p = grads_of(s, i);
        double       *into = &s->t->chunks[i][s->from[i] / MT_SUMSQ_CHUNK], again[CHUNKS];
        int64_t       n;
        const double *mine = mt_offload_chunks(s->o, 0, i, &n);

        CHECK_EQ(mine != NULL, s->n[i] > 0);
        CHECK_EQ(mt_offload_has(s->o, 0, i, MT_GRAD_CHUNKED), mine != NULL);
        CHECK_EQ(n, mine != NULL ? MT_SUMSQ_CHUNKS(s->n[i]) : 0);
        if (mine == NULL)
            continue;
        mt_sumsq_chunks(s->cx.pool, p == MT_PLANE_ACC ? MT_F32 : s->t->d[i].dtype,
                        base_of(s, i, p) + bytes_of(s, i, p, s->from[i]), s->n[i], again);
        CHECK(memcmp(again, mine, (size_t)n * sizeof *again) == 0);
        memcpy(into, mine, (size_t)n * sizeof *mine);
    }
}

static double sum_of_all(void *arg, mt_pool *pool, int k, double *chunks, int *use)
{
    const side *s = arg;
    int         i = s->params[k];

    *use = s->owners > 1;
    return mt_sumsq_fold(s->t->chunks[i], MT_SUMSQ_CHUNKS(s->t->d[i].numel));
}

/* ---- updates ------------------------------------------------------------------------------ */

/* Elements [from, from + n); planes at `at`, or where the unit lives. */
static mt_adam_tensor tensor_of(const side *s, int param, int64_t from, int64_t n,
                                void *const *given)
{
    const mt_param_desc *d = &s->t->d[param];
    mt_plane             g = grads_of(s, param);
    int                  small = s->t->states != MT_STATES_FP32;
    int                  lo8 = mt_states_low_bytes(s->t->states) == 1;
    void                *at[MT_PLANE_COUNT] = { NULL };

    for (int p = 0; p < MT_PLANE_COUNT; p++)
        if (given != NULL && given[p] != NULL)
            at[p] = given[p];
        else if ((p == (int)g || p == MT_PLANE_HI || (MT_STATE_PLANES >> p & 1)) &&
                 bytes_of(s, param, (mt_plane)p, 1) > 0)
            at[p] = base_of(s, param, (mt_plane)p) + bytes_of(s, param, (mt_plane)p, from);
    return (mt_adam_tensor){
        .dtype = d->dtype, .n = n, .hi = at[MT_PLANE_HI], .lo = lo8 ? NULL : at[MT_PLANE_LO],
        .master = at[MT_PLANE_MASTER], .m = small ? NULL : at[MT_PLANE_M],
        .v = small ? NULL : at[MT_PLANE_V], .grad = at[g],
        .grad_dtype = g == MT_PLANE_ACC ? MT_F32 : d->dtype,
        .hyper = { 0.01, 0.9, 0.95, 1e-8, 0.1, s->t->step, 0 }, .states = s->t->states,
        .codes = { at[MT_PLANE_M], at[MT_PLANE_V], at[MT_PLANE_SCALE],
                   lo8 ? at[MT_PLANE_LO] : NULL },
        .key = (uint64_t)param * 77 + 5, .first = from,
    };
}

static int tensors_of(const side *s, mt_adam_tensor *t)
{
    int n = 0;

    for (int k = 0; k < s->n_params; k++)
        if (s->n[s->params[k]] > 0)
            t[n++] = tensor_of(s, s->params[k], s->from[s->params[k]], s->n[s->params[k]], NULL);
    return n;
}

static mt_status run(void *arg, mt_pool *pool, float clip)
{
    mt_adam_tensor t[PARAMS];

    return mt_adam_step(pool, t, tensors_of(arg, t), clip, mt_isa_best());
}

static mt_status compute(void *arg, mt_queue *q, const mt_part *parts, int n, float clip)
{
    mt_adam_tensor t[STRETCHES];

    REQUIRE(n <= STRETCHES);
    for (int i = 0; i < n; i++)
        t[i] = tensor_of(arg, parts[i].param, parts[i].from, parts[i].n, parts[i].at);
    return mt_adam_put(q, t, n, clip);
}

static mt_status put(void *arg, mt_queue *q, float clip)
{
    const side    *s = arg;
    const mt_part *parts;
    mt_adam_tensor t[STRETCHES];
    int            n, guest;

    TRY(mt_resident_parts(s->r, 0, &parts, &n, &guest));
    if (guest)
        return compute(arg, q, parts, n, clip);
    return mt_adam_put(q, t, tensors_of(arg, t), clip);
}

/* A guest's states come; once the memory is there, the same is used again. */
static void lift(side *s)
{
    const size_t most = 1 << 20;
    size_t      *bytes;
    int          n, taken;

    REQUIRE(mt_arrive_sizes(s->r, 0, most, &bytes, &n) == MT_OK && n <= STRETCHES);
    for (; s->n_stay < n; s->n_stay++)
        REQUIRE_OK(s->cx.dev->ops->mem_alloc(s->cx.dev, bytes[s->n_stay], &s->stay[s->n_stay]));
    free(bytes);
    CHECK_OK(mt_arrive_lift(s->r, 0, most, s->stay, n, s->run, &taken));
}

static mt_status gradient(void *arg, int param, const void **at, mt_plane *plane)
{
    *plane = grads_of(arg, param);
    *at = base_of(arg, param, *plane);
    return MT_OK;
}

static mt_status pieces(void *arg, mt_pool *pool, const mt_part *parts, int n, float clip)
{
    mt_status st = MT_OK;

    for (int i = 0; i < n && st == MT_OK; i++) {
        mt_adam_tensor t = tensor_of(arg, parts[i].param, parts[i].from, parts[i].n, parts[i].at);

        st = mt_adam_step(pool, &t, 1, clip, mt_isa_best());
    }
    return st;
}

static double step(side *s)
{
    mt_update_job job = { .unit = 0, .n_params = s->n_params, .params = s->params,
                          .sumsq = sum_of_all, .run = run, .put = put, .gradient = gradient,
                          .compute = compute, .pieces = pieces, .arg = s };
    uint64_t      ticket;
    double        norm = 0;
    int           skipped, left;

    if (s->home == GUEST)
        lift(s);
    CHECK_OK(mt_update_submit(s->u, &job, 1, 1.0, s->run, &ticket));
    CHECK_OK(mt_update_norm(s->u, ticket, &norm, &skipped));
    CHECK_OK(mt_ledger_wait_updates(s->cx.store, 0));
    CHECK_OK(mt_update_drain(s->u));
    if (s->home == GUEST)
        CHECK_OK(mt_arrive_leave(s->r, 0, 1, &left));
    return norm;
}

/* ---- all sides ---------------------------------------------------------------------------- */

/* Some parameters are large, most are not, some have nothing, one in eight is frozen. */
static void make_unit(table *t, uint64_t seed)
{
    static const mt_dtype types[] = { MT_BF16, MT_BF16, MT_F32, MT_F16 };
    static const int64_t  most[] = { BIG, 20000, 300, 1 };

    for (int i = 0; i < PARAMS; i++) {
        mt_param_desc *d = &t->d[i];

        *d = (mt_param_desc){ types[random_below(&seed, 4)],
                              random_below(&seed, most[random_below(&seed, 4)]),
                              random_below(&seed, 8) > 0 };
        if (i == (int)(t->seed % PARAMS))
            *d = (mt_param_desc){ MT_BF16, BIG - 1, 1 };
        if (i == (int)((t->seed + 3) % PARAMS))
            *d = (mt_param_desc){ MT_F32, BIG - 9000, t->seed % 2 == 0 };
        t->weight[i] = calloc((size_t)d->numel + 1, 4);
        t->grad[i] = calloc((size_t)d->numel + 1, 4);
        REQUIRE(t->weight[i] != NULL && t->grad[i] != NULL);
        fill_random(d->dtype, t->weight[i], d->numel, toy_random(&seed));
    }
}

static void table_open(table *t, uint64_t seed, int owners, mt_states states, int micros)
{
    *t = (table){ .seed = seed, .owners = owners, .micros = micros, .states = states,
                  .dir = "/tmp/mt_test_portion.XXXXXX" };
    REQUIRE(mkdtemp(t->dir) != NULL);
    make_unit(t, seed);
    side_open(&t->whole, t, 0, 1);
    for (int k = 0; k < owners; k++)
        side_open(&t->each[k], t, k, owners);
}

static void free_unit(table *t)
{
    for (int i = 0; i < PARAMS; i++) {
        free(t->weight[i]);
        free(t->grad[i]);
    }
}

static void table_close(table *t)
{
    side_close(&t->whole);
    for (int k = 0; k < t->owners; k++)
        side_close(&t->each[k]);
    free_unit(t);
    CHECK_EQ(rmdir(t->dir), 0);
}

#define TABLE(t, ...) CLOSED_BY(table_close) table t; table_open(&t, __VA_ARGS__)

static void table_step(table *t)
{
    t->step++;
    for (int m = 0; m < t->micros; m++) {
        uint64_t seed = t->seed * 1000 + (uint64_t)(t->step * 10 + m);

        for (int i = 0; i < PARAMS; i++)
            fill_random(t->d[i].dtype, t->grad[i], t->d[i].numel, toy_random(&seed));
        put_gradients(&t->whole, m > 0 ? MT_GRAD_ADD : MT_GRAD_SET);
        for (int k = 0; k < t->owners; k++)
            put_gradients(&t->each[k], m > 0 ? MT_GRAD_ADD : MT_GRAD_SET);
    }
    for (int k = 0; k < t->owners; k++)
        tell_chunks(&t->each[k]);
    double norm = step(&t->whole);
    CHECK(isfinite(norm) && norm > 1);
    for (int k = 0; k < t->owners; k++) {
        double got = step(&t->each[k]);

        CHECK(memcmp(&got, &norm, sizeof norm) == 0);
    }
}

static int is_zero(const char *x, size_t n)
{
    while (n > 0 && *x == 0)
        x++, n--;
    return n == 0;
}

/* The owner's own has the bits of the whole's; of the rest, weights are as they were and other
 * planes were never written. */
static void check_plane(const side *s, int i, mt_plane p)
{
    const side *w = &s->t->whole;
    int64_t     to = s->from[i] + s->n[i], numel = s->t->d[i].numel;
    char       *got = base_of(s, i, p), *want = base_of(w, i, p), *old = s->t->weight[i];
    size_t      a = bytes_of(s, i, p, s->from[i]), own = bytes_of(s, i, p, s->n[i]);
    size_t      z = bytes_of(s, i, p, to), all = bytes_of(s, i, p, numel);

    CHECK(memcmp(got + a, want + a, own) == 0);
    z = s->n[i] > 0 ? z : a;             /* nothing: all of it is the rest */
    if (p == MT_PLANE_HI) {
        CHECK(memcmp(got, old, a) == 0 && memcmp(got + z, old + z, all - z) == 0);
    } else {
        CHECK(is_zero(got, a) && is_zero(got + z, all - z));
    }
}

static void check_all(table *t, unsigned but)
{
    for (int k = 0; k < t->owners; k++)
        for (int i = 0; i < PARAMS; i++)
            for (int p = 0; p < MT_PLANE_COUNT; p++)
                if (!(but >> p & 1) && (p == MT_PLANE_HI || t->d[i].trainable) &&
                    (p != MT_PLANE_ACC || t->micros > 1) &&
                    bytes_of(&t->whole, i, (mt_plane)p, 1) > 0)
                    check_plane(&t->each[k], i, (mt_plane)p);
}

static void check_own_weights(table *t)
{
    for (int k = 0; k < t->owners; k++)
        for (int i = 0; i < PARAMS; i++) {
            const side *s = &t->each[k];
            size_t      a = bytes_of(s, i, MT_PLANE_HI, s->from[i]);

            CHECK(memcmp(base_of(s, i, MT_PLANE_HI) + a, base_of(&t->whole, i, MT_PLANE_HI) + a,
                         bytes_of(s, i, MT_PLANE_HI, s->n[i])) == 0);
        }
}

static void bring_all(table *t, unsigned planes)
{
    CHECK_OK(mt_mirror_bring(t->whole.cx.store, 0, planes));
    for (int k = 0; k < t->owners; k++)
        CHECK_OK(mt_mirror_bring(t->each[k].cx.store, 0, planes));
}

/* Parameters that were frozen when planes were made have arenas of their own from now on. */
static void thaw(side *s)
{
    for (int i = s->n_params = 0; i < PARAMS; i++) {
        CHECK_OK(mt_store_set_trainable(s->cx.store, 0, i, 1));
        s->params[s->n_params++] = i;
    }
}

static void thaw_all(table *t)
{
    thaw(&t->whole);
    for (int k = 0; k < t->owners; k++)
        thaw(&t->each[k]);
    for (int i = 0; i < PARAMS; i++)
        t->d[i].trainable = 1;
}

static void go_all(table *t, int home)
{
    go(&t->whole, home);
    for (int k = 0; k < t->owners; k++)
        go(&t->each[k], home);
}

/* ---- tests -------------------------------------------------------------------------------- */

/* As the header prints it. */
TEST(a_cut_is_as_is_printed)
{
    const mt_param_desc  d[3] = { { MT_BF16, 30000, 1 }, { MT_F32, 64, 1 }, { MT_BF16, 7000, 1 } };
    static const int64_t want[3][3][2] = { { { 0, 8192 }, { 0, 0 }, { 0, 0 } },
                                           { { 8192, 16384 }, { 0, 0 }, { 0, 0 } },
                                           { { 24576, 5424 }, { 0, 64 }, { 0, 7000 } } };

    TOY(t, 0, 1, 0);
    int unit = store_add(t.store, "three", d, 3);
    for (int k = 0; k < 3; k++) {
        mt_portion p;

        CHECK_OK(mt_portion_of(t.store, unit, k, 3, &p));
        for (int i = 0; i < 3; i++) {
            int64_t from;

            CHECK_EQ(mt_portion_part(&p, i, d[i].numel, &from), want[k][i][1]);
            CHECK_EQ(from, want[k][i][0]);
        }
    }
}

/* Bytes of plane HI between what would be even and what is: less than a grain's, and what lies
 * between two parameters. */
static void check_cut(const toy *t, int unit, const mt_param_desc *d, int n, int owners)
{
    int64_t next[PARAMS] = { 0 };
    size_t  all = mt_store_hi_bytes(t->store, unit);

    for (int k = 0; k < owners; k++) {
        mt_portion p;
        size_t     bytes = 0;
        int64_t    from;

        CHECK_OK(mt_portion_of(t->store, unit, k, owners, &p));
        for (int i = 0; i < n; i++) {
            int64_t some = mt_portion_part(&p, i, d[i].numel, &from);

            CHECK(some >= 0);
            if (some == 0)
                continue;
            CHECK_EQ(from, next[i]);
            CHECK_EQ(from % MT_PORTION_GRAIN, 0);
            next[i] += some;
            bytes += (size_t)some * mt_dtype_bytes(d[i].dtype);
        }
        CHECK(bytes <= all / (size_t)owners + MT_PORTION_GRAIN * 4 + 512);
        CHECK(bytes + MT_PORTION_GRAIN * 4 + 512 * (PARAMS + 1) >= all / (size_t)owners);
    }
    for (int i = 0; i < n; i++)
        CHECK_EQ(next[i], d[i].numel);
}

TEST(every_element_has_one_owner_and_all_have_as_much)
{
    for (uint64_t seed = 1; seed <= 100; seed++) {
        table t = { .seed = seed };
        toy   y;

        make_unit(&t, seed);
        toy_open(&y, 0, 1, 0);
        int unit = store_add(y.store, "unit", t.d, PARAMS);
        for (int n = 1; n <= 40; n += 1 + n / 8)
            check_cut(&y, unit, t.d, PARAMS, n);
        toy_close(&y);
        free_unit(&t);
    }
}

TEST(what_nobody_can_own_is_refused)
{
    mt_portion p;

    TOY(t, 1, 1, 0);
    CHECK_EQ(mt_portion_of(t.store, 1, 0, 1, &p), MT_EINVAL);
    CHECK_EQ(mt_portion_of(t.store, 0, 2, 2, &p), MT_EINVAL);
    CHECK_SAYS("unit layers.0: there is no owner 2 of 2");
    CHECK_EQ(mt_portion_of(t.store, 0, -1, 2, &p), MT_EINVAL);
    CHECK_EQ(mt_portion_of(t.store, 0, 0, MT_OWNERS_MOST + 1, &p), MT_EINVAL);
    (void)toy_at(&t, 0, 0, MT_PLANE_M);
    CHECK_FAILS(mt_store_own(t.store, 0, 0, 2), MT_ESTATE, "has its plane M already");
}

/* In host memory, through the device, on it, and back: all that an update and a move touch. */
TEST(owners_together_have_the_bits_of_one)
{
    for (int k = 0; k < (UNDER_TSAN ? 3 : 5); k++)
        for (int st = 0; st < MT_STATES_COUNT; st++) {
            TABLE(t, (uint64_t)(10 * k + st + 1), numbers[k], (mt_states)st,
                       1 + (k + st) % 3);
            table_step(&t);
            check_all(&t, 0);
            go_all(&t, THROUGH);
            table_step(&t);
            check_all(&t, 0);
            go_all(&t, VRAM);
            table_step(&t);
            go_all(&t, RAM);
            check_all(&t, HI);           /* of which the host gave back what another has */
            check_own_weights(&t);
            go_all(&t, GUEST);
            table_step(&t);
            go_all(&t, RAM);
            check_all(&t, HI);
            thaw_all(&t);
            table_step(&t);
            check_all(&t, HI);
            check_own_weights(&t);
        }
}

TEST(states_in_files_are_the_owners_own)
{
    for (int st = 0; st < MT_STATES_COUNT; st++) {
        uint64_t need = 0;

        TABLE(t, (uint64_t)(100 + st), 3, (mt_states)st, 1);
        go_all(&t, DISK);
        for (int k = 0; k < 3; k++)
            need += mt_disk_need(t.each[k].disk);
        CHECK(need <= mt_disk_need(t.whole.disk) + 3 * PARAMS * MT_PLANE_COUNT * 4096);
        for (int i = 0; i < 3; i++)
            table_step(&t);
        bring_all(&t, MT_STATE_PLANES);
        check_all(&t, 0);
    }
}

/* Planes of all owners, whose ends share pages, take what those of one take. on_device: all of
 * them. */
static void check_memory(const table *t, int on_device)
{
    const size_t spare = 2 * OWNERS * (size_t)sysconf(_SC_PAGESIZE);
    size_t       there = 0;

    for (int p = MT_PLANE_GRAD; p < MT_PLANE_COUNT; p++) {
        size_t whole = mt_store_bytes(t->whole.cx.store, (mt_plane)p), sum = 0;

        for (int k = 0; k < t->owners; k++)
            sum += mt_store_bytes(t->each[k].cx.store, (mt_plane)p);
        CHECK(sum <= whole + spare && sum + spare >= whole);
    }
    for (int k = 0; k < t->owners; k++)
        there += mt_store_device_bytes(t->each[k].cx.store);
    CHECK(there <= mt_store_device_bytes(t->whole.cx.store));
    CHECK(there + 512 * PARAMS * MT_PLANE_COUNT >= mt_store_device_bytes(t->whole.cx.store));
    CHECK_EQ(there > 0, on_device);
}

TEST(memory_is_the_owners_own)
{
    TABLE(t, 3, 4, MT_STATES_8BIT, 1);
    for (int home = RAM; home <= VRAM; home++) {
        go_all(&t, home);
        table_step(&t);
        check_memory(&t, home == VRAM);
    }
    go_all(&t, RAM);
    thaw_all(&t);
    table_step(&t);
    check_memory(&t, 0);
}

static void  *registered;                        /* by the device below */
static size_t registered_bytes;

static mt_status note_register(mt_dev *d, void *at, size_t bytes)
{
    registered = at;
    registered_bytes = bytes;
    return MT_OK;
}

static void note_unregister(mt_dev *d, void *at)
{
    CHECK(at == registered);
    registered = NULL;
}

static size_t pages_in(const mt_arena *a, size_t from, size_t bytes)
{
    size_t        page = (size_t)sysconf(_SC_PAGESIZE), n = 0;
    unsigned char in[256];

    REQUIRE(bytes / page <= 256 && mincore((char *)a->base + from, bytes, in) == 0);
    for (size_t i = 0; i < bytes / page; i++)
        n += in[i] & 1;
    return n;
}

TEST(of_an_arena_what_is_kept_is_committed_and_registered)
{
    const mt_dev_ops ops = { .host_register = note_register, .host_unregister = note_unregister };
    mt_dev           dev = { &ops };
    const size_t     page = (size_t)sysconf(_SC_PAGESIZE);
    mt_arena         a = { 0 };
    int              told;       /* the system says what is in memory */

    REQUIRE_OK(mt_arena_reserve(&a, 64 * page, "test", 0));
    told = pages_in(&a, 0, 64 * page) == 0;
    CHECK_EQ(a.kept, 64 * page);
    mt_arena_keep(&a, 9 * page + 5, 3 * page);
    for (int i = 0; i < 2; i++) {
        CHECK_OK(mt_arena_commit(&a, NULL, &dev));
        CHECK(registered == (char *)a.base + 9 * page);
        CHECK_EQ(registered_bytes, 4 * page);
        CHECK_EQ(pages_in(&a, 9 * page, 4 * page), 4);
        if (told)
            CHECK_EQ(pages_in(&a, 0, 64 * page), 4);
        mt_arena_decommit(&a);
        CHECK(registered == NULL);
    }
    mt_arena_keep(&a, 0, 0);
    CHECK_OK(mt_arena_commit(&a, NULL, &dev));
    CHECK(registered == NULL);
    mt_arena_close(&a);
}

/* Memory of all kinds is made, moved and given back. */
static mt_status use(mt_context *cx, mt_queue *run, void *slot)
{
    const mt_param_desc d = { MT_BF16, 50000, 1 };
    int                 unit;
    void               *at;

    TRY(mt_store_add(cx->store, "unit", &d, 1, &unit));
    TRY(mt_store_own(cx->store, unit, 1, 3));
    for (int p = 0; p < MT_PLANE_COUNT; p++)
        if (mt_store_plane_bytes(cx->store, unit, 0, (mt_plane)p, 1) > 0)
            TRY(mt_store_at(cx->store, unit, 0, (mt_plane)p, &at));
    TRY(mt_resident_settle(cx->residents, unit, slot));
    TRY(mt_home_vram.take(cx->residents, unit, run));
    return mt_resident_unsettle(cx->residents, unit, 1);
}

TEST(a_device_may_fail_at_any_call)
{
    static char slot[1 << 17];
    int         over = 0;

    for (int n = 1; !over; n++) {
        mt_resident *r = NULL;
        mt_dev      *cpu = NULL, *d;
        mt_context   cx = { 0 };
        mt_queue    *run;

        REQUIRE_OK(mt_dev_cpu_open(&cpu));
        cx.dev = d = fault_dev(cpu, 0, FAULT_ONCE);
        REQUIRE_OK(mt_store_open(&cx, &cx.store));
        REQUIRE_OK(mt_resident_open(&cx, &r));
        REQUIRE_OK(d->ops->queue_open(d, "run", &run));
        fault_next(d, n);
        mt_status st = use(&cx, run, slot);
        over = fault_fired(d) == 0;
        CHECK_EQ(st, over ? MT_OK : MT_EDEVICE);
        mt_resident_close(r);
        mt_store_close(cx.store);
        d->ops->queue_close(run);
        CHECK_EQ(fault_live(d), 0);
        d->ops->close(d);
        cpu->ops->close(cpu);
        CHECK(n < 200);
        over |= n >= 200;
    }
}

/* An owner's own squares are not the parameter's: without the others' there is no norm. */
TEST(a_sum_of_a_part_does_not_count)
{
    uint64_t ticket;

    TABLE(t, 5, 2, MT_STATES_FP32, 2);
    for (int m = 0; m < 2; m++)
        for (int k = 0; k < 2; k++) {
            side         *s = &t.each[k];
            mt_update_job job = { .n_params = s->n_params, .params = s->params, .run = run,
                                  .arg = s };
            double        norm;
            int           skipped;

            put_gradients(s, m > 0 ? MT_GRAD_ADD : MT_GRAD_SET);
            for (int i = 0; i < PARAMS; i++)
                CHECK_EQ(mt_offload_has(s->o, 0, i, MT_GRAD_COUNTED), 0);
            if (m == 0)
                continue;
            CHECK_OK(mt_update_submit(s->u, &job, 1, 1.0, s->run, &ticket));
            CHECK_EQ(mt_update_norm(s->u, ticket, &norm, &skipped), MT_ESTATE);
            CHECK_SAYS("came without its sum of squares");
        }
}

/* ---- files -------------------------------------------------------------------------------- */

typedef struct leaf {
    char      path[96];
    mt_extent extents[OWNERS * PARAMS];
    uint64_t  sums[64];
    size_t    n, bytes;
} leaf;

/* Parameters behind each other, each in stretches of its owners. */
static void write_plane(const side *sides, int n_sides, mt_plane p, leaf *f)
{
    mt_shards_how how = { .spare_bytes = 1 << 20, .n_copiers = 1, .n_writers = 1 };
    mt_shards    *w = NULL;
    uint64_t      bytes;
    int           over = 0;

    for (int i = 0; i < PARAMS; i++)
        for (int k = 0; k < n_sides; k++) {
            size_t own = sides[k].t->d[i].trainable ? bytes_of(&sides[k], i, p, sides[k].n[i]) : 0;

            if (own == 0)
                continue;
            f->extents[f->n++] = (mt_extent){ f->bytes, base_of(&sides[k], i, p) +
                                              bytes_of(&sides[k], i, p, sides[k].from[i]), own,
                                              -1, NULL };
            f->bytes += own;
        }
    mt_shard file = (mt_shard){ f->path, f->bytes, f->extents, f->n, f->sums };
    REQUIRE(mt_block_count(f->bytes) <= 64);
    REQUIRE_OK(mt_shards_write(&file, 1, how, &w));
    while (!over)
        REQUIRE_OK(mt_shards_wait(w, 0.5, &bytes, &over));
    mt_shards_close(w);
}

static void read_file(const leaf *f, char *into)
{
    FILE *in = fopen(f->path, "rb");

    REQUIRE(in != NULL && fread(into, 1, f->bytes, in) == f->bytes);
    fclose(in);
    unlink(f->path);
}

TEST(owners_write_the_file_that_one_writes)
{
    static const mt_plane planes[] = { MT_PLANE_HI, MT_PLANE_M, MT_PLANE_SCALE, MT_PLANE_MASTER };

    TABLE(t, 4, 7, MT_STATES_8BIT_SR, 1);
    table_step(&t);
    for (int i = 0; i < 4; i++) {
        leaf  one = { .n = 0 }, many = { .n = 0 };
        char *a, *b;

        snprintf(one.path, sizeof one.path, "%s/one", t.dir);
        snprintf(many.path, sizeof many.path, "%s/many", t.dir);
        write_plane(&t.whole, 1, planes[i], &one);
        write_plane(t.each, t.owners, planes[i], &many);
        REQUIRE(one.bytes == many.bytes && one.n <= many.n);
        REQUIRE((a = malloc(one.bytes + 1)) != NULL && (b = malloc(one.bytes + 1)) != NULL);
        read_file(&one, a);
        read_file(&many, b);
        CHECK(memcmp(a, b, one.bytes) == 0);
        CHECK(memcmp(one.sums, many.sums, sizeof one.sums) == 0);
        free(a);
        free(b);
    }
}
