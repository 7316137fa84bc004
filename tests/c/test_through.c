/* test_through.c — the executable form of core/through.c, with a computation that shows what
 * passed by. */
#include "dev_fault.h"
#include "toy.h"
#include "../../csrc/core/home.h"

#define MOST 80                  /* parameters */
#define BIG  40000               /* elements of the largest */

/* Adds 1 to all that goes up. */
typedef struct errand {
    mt_store       *s;
    int             unit, n, params[MOST];
    float          *own[MOST];   /* gradients that are in no plane; NULL: they are */
    atomic_int      lists, computes, frees, most_parts;
    atomic_int      wrong;       /* elements of gradients that came up from somewhere else */
    mt_status       fail;        /* gradient says so */
    struct timespec nap;         /* before a computation, in the queue */
} errand;

static int64_t length_of(int i)
{
    static const int64_t lengths[] = { 0, 1, 3, 255, 256, 257, 1000, 1365, BIG };

    return lengths[i % 9 < 8 || i == 8 ? i % 9 : 1];
}

static void *plane_at(const errand *e, int i, mt_plane p)
{
    return store_at(e->s, e->unit, i, p);
}

static mt_status errand_gradient(void *arg, int param, const void **at, mt_plane *plane)
{
    errand *e = arg;

    atomic_fetch_add(&e->lists, param == 0);
    if (e->fail != MT_OK)
        return MT_FAIL(e->fail, "the errand failed");
    if (e->own[param] == NULL) {
        void     *grad = NULL;
        mt_status st = mt_store_at(e->s, e->unit, param, MT_PLANE_GRAD, &grad);

        *at = grad;
        *plane = MT_PLANE_GRAD;
        return st;
    }
    *at = e->own[param];
    *plane = MT_PLANE_ACC;
    return MT_OK;
}

typedef struct sum {
    errand *e;
    int     n;
    mt_part parts[64];
} sum;

/* Of the caller's own gradients no two elements near each other have the same: a shifted copy is
 * seen. Those in planes are zeros. */
static float grad_at(int param, int64_t i)
{
    return param % 2 ? (float)((param * 131 + i) % 60000) : 0.0f;
}

static int wrong_grads(mt_plane p, const mt_part *part)
{
    int wrong = 0;

    for (int64_t j = 0; j < part->n; j++) {
        float is = p == MT_PLANE_ACC ? ((const float *)part->at[p])[j]
                                     : (float)((const uint16_t *)part->at[p])[j];

        wrong += is != grad_at(part->param, part->from + j);
    }
    return wrong;
}

/* Bytes of an element, or of a group of them. */
static void add_to(mt_plane p, void *at, int64_t n)
{
    for (int64_t j = 0; j < n; j++)
        if (p == MT_PLANE_SCALE)
            ((uint64_t *)at)[j / MT_STATES_GROUP]++;
        else if (p == MT_PLANE_M || p == MT_PLANE_V)
            ((uint8_t *)at)[j]++;
        else if (p == MT_PLANE_ACC)
            ((uint32_t *)at)[j]++;
        else
            ((uint16_t *)at)[j]++;
}

static void add_one(void *arg)
{
    FREED sum *s = arg;

    nanosleep(&s->e->nap, NULL);
    for (int i = 0; i < s->n; i++)
        for (int p = 0; p < MT_PLANE_COUNT; p++)
            if (s->parts[i].at[p] != NULL) {
                if (p == MT_PLANE_GRAD || p == MT_PLANE_ACC)
                    atomic_fetch_add(&s->e->wrong, wrong_grads((mt_plane)p, &s->parts[i]));
                add_to((mt_plane)p, s->parts[i].at[p], s->parts[i].n);
            }
}

static mt_status errand_compute(void *arg, mt_queue *q, const mt_part *parts, int n, float clip)
{
    errand   *e = arg;
    sum      *s = malloc(sizeof *s);
    mt_status st;

    REQUIRE(s != NULL && n <= 64);
    CHECK(clip == 0.5f);
    atomic_fetch_add(&e->computes, 1);
    if (n > atomic_load(&e->most_parts))
        atomic_store(&e->most_parts, n);
    s->e = e;
    s->n = n;
    memcpy(s->parts, parts, (size_t)n * sizeof *parts);
    for (int i = 0; i < n; i++)
        for (int p = 0; p < MT_PLANE_COUNT; p++)
            CHECK_EQ((uintptr_t)parts[i].at[p] % MT_PART_ALIGN, 0);
    if ((st = q->dev->ops->call(q, add_one, s)) != MT_OK)
        free(s);
    return st;
}

static void errand_free(void *arg)
{
    atomic_fetch_add(&((errand *)arg)->frees, 1);
}

/* A unit of n parameters of all lengths around what a buffer holds, with scales that groups share.
 * Every second gradient is an fp32 sum of the caller's own. */
static void errand_fill(errand *e, mt_store *s, int n)
{
    mt_param_desc d[MOST];

    *e = (errand){ .s = s, .n = n };
    for (int i = 0; i < n; i++) {
        d[i] = (mt_param_desc){ MT_BF16, length_of(i), 1 };
        e->params[i] = i;
        if (i % 2)
            REQUIRE((e->own[i] = calloc((size_t)length_of(i) + 1, sizeof(float))) != NULL);
    }
    REQUIRE_OK(mt_store_add(s, "errand", d, n, &e->unit));
    REQUIRE_OK(mt_store_set_states(s, e->unit, MT_STATES_8BIT));
    for (int i = 1; i < n; i += 2)
        for (int64_t j = 0; j < length_of(i); j++)
            e->own[i][j] = grad_at(i, j);
}

/* Every element was there `times` times; gradients, which stay up, never. */
static void errand_check(const errand *e, int times)
{
    int64_t wrong = 0;

    for (int i = 0; i < e->n; i++) {
        const uint16_t *hi = plane_at(e, i, MT_PLANE_HI), *lo = plane_at(e, i, MT_PLANE_LO);
        const uint8_t  *m = plane_at(e, i, MT_PLANE_M), *v = plane_at(e, i, MT_PLANE_V);
        const uint64_t *scale = plane_at(e, i, MT_PLANE_SCALE);
        const uint16_t *grad = plane_at(e, i, MT_PLANE_GRAD);

        for (int64_t j = 0, n = length_of(i); j < n; j++) {
            int64_t in = n - j < MT_STATES_GROUP ? n - j : MT_STATES_GROUP;

            wrong += hi[j] != times || lo[j] != times || m[j] != times || v[j] != times;
            wrong += j % MT_STATES_GROUP == 0 &&
                     scale[j / MT_STATES_GROUP] != (uint64_t)times * (uint64_t)in;
            wrong += (e->own[i] != NULL ? e->own[i][j] : (float)grad[j]) != grad_at(i, j);
        }
    }
    CHECK_EQ(wrong, 0);
    CHECK_EQ(atomic_load(&e->wrong), 0);
}

static void errand_empty(errand *e)
{
    for (int i = 0; i < e->n; i++)
        free(e->own[i]);
}

/* Announced and put. */
static void put(mt_through *h, errand *e)
{
    mt_update_job j = { .unit = e->unit, .params = e->params, .n_params = e->n,
                        .gradient = errand_gradient, .compute = errand_compute,
                        .free = errand_free, .arg = e };

    mt_ledger_update_begin(e->s, e->unit);
    CHECK_OK(mt_home_through.update(h, update_of(&j, 0.5f)));
}

TEST(every_element_passes_once)
{
    errand e;
    toy    t;

    for (int buffers = 1; buffers <= 4; buffers++)
        for (int max_us = 0; max_us <= 30; max_us += 30)
            for (size_t bytes = MT_THROUGH_LEAST; bytes <= 1 << 20; bytes *= 8) {
                mt_through *h = NULL;

                toy_open(&t, 1, (uint64_t)buffers, max_us);
                errand_fill(&e, t.store, MOST);
                REQUIRE_OK(mt_through_open(&t.cx, buffers, bytes, &h));
                for (int times = 1; times <= 2; times++) {
                    put(h, &e);
                    CHECK_OK(mt_ledger_wait_updates(t.store, e.unit));
                    errand_check(&e, times);
                }
                CHECK_OK(mt_home_through.stepped(h));
                CHECK(e.most_parts <= 32);
                CHECK(bytes < 1 << 18 || e.most_parts == 32);
                CHECK_EQ(e.frees, 2);
                CHECK_EQ(mt_through_stats_get(h).device_bytes, (size_t)buffers * bytes);
                mt_through_close(h);
                errand_empty(&e);
                toy_close(&t);
            }
}

TEST(close_finishes_what_was_put)
{
    errand      e[3];
    mt_through *h = NULL;

    TOY(t, 3, 1, 50);
    REQUIRE_OK(mt_through_open(&t.cx, 2, 20000, &h));
    for (int u = 0; u < 3; u++) {
        errand_fill(&e[u], t.store, MOST);
        put(h, &e[u]);
    }
    mt_through_close(h);
    for (int u = 0; u < 3; u++) {
        errand_check(&e[u], 1);
        CHECK_EQ(e[u].frees, 1);
        errand_empty(&e[u]);
    }
    mt_through_close(NULL);
}

/* What comes down overwrites the weights that a fetch may still be reading. */
TEST(a_unit_waits_for_copies_of_its_weights)
{
    errand      e;
    mt_through *h = NULL;
    uint64_t    version;

    TOY(t, 1, 1, 0);
    errand_fill(&e, t.store, MOST);
    REQUIRE_OK(mt_through_open(&t.cx, 2, 20000, &h));
    CHECK_OK(mt_ledger_fetch_begin(t.store, e.unit, &version));       /* a mover about to copy */
    put(h, &e);
    sleep_ms(5);
    int begun = atomic_load(&e.lists);
    CHECK_EQ(begun, 0);
    CHECK_OK(mt_ledger_fetching(t.store, e.unit, t.run));
    CHECK_OK(mt_home_through.stepped(h));
    errand_check(&e, 1);
    mt_through_close(h);
    errand_empty(&e);
}

TEST(a_failing_job_is_a_fault_and_ends_those_behind_it)
{
    errand      e, after;
    mt_through *h = NULL;

    TOY(t, 2, 1, 0);
    errand_fill(&e, t.store, MOST);
    errand_fill(&after, t.store, MOST);
    e.fail = MT_EDEVICE;
    REQUIRE_OK(mt_through_open(&t.cx, 2, 20000, &h));
    for (int u = 0; u < 2; u++) {
        put(h, u == 0 ? &e : &after);
    }
    CHECK_FAILS(mt_home_through.stepped(h), MT_EDEVICE, "the errand failed");
    CHECK_EQ(after.lists, 0);
    CHECK_EQ(e.frees + after.frees, 2);
    errand_check(&after, 0);
    mt_through_close(h);
    errand_empty(&e);
    errand_empty(&after);
}

TEST(every_failing_device_call_frees_everything)
{
    static errand e;

    EACH_FAULT(d, 1, n % 2 ? FAULT_ONCE : FAULT_STAYS) {
        mt_context  cx = { .dev = d };
        mt_store   *s = NULL;
        mt_through *h = NULL;
        void       *p;

        REQUIRE_OK(mt_store_open(&cx, &s));
        cx.store = s;
        errand_fill(&e, s, 12);
        mt_status st = mt_store_at(s, 0, 0, MT_PLANE_M, &p);
        if (st == MT_OK)
            st = mt_store_move(s, 0, &mt_home_through, NULL);
        if (st == MT_OK)
            st = mt_through_open(&cx, 2, 20000, &h);
        if (st == MT_OK) {
            put(h, &e);
            st = mt_home_through.stepped(h);
            CHECK_EQ(e.frees, 1);
        }
        CHECK_EQ(st, fault_fired(d) ? MT_EDEVICE : MT_OK);
        if (st == MT_OK)
            errand_check(&e, 1);
        mt_through_close(h);
        mt_store_close(s);
        errand_empty(&e);
    }
}

/* Planes that are there, those that come, and none any more. */
TEST(going_through_registers_all_planes)
{
    mt_param_desc d[2] = { { MT_BF16, 100, 1 }, { MT_BF16, 100, 0 } };
    mt_store     *s = NULL;
    mt_dev       *cpu, *f;

    REQUIRE_OK(mt_dev_cpu_open(&cpu));
    f = fault_dev(cpu, 0, FAULT_ONCE);
    REQUIRE_OK(mt_store_open(&(mt_context){ .dev = f }, &s));
    (void)store_add(s, "layers.0", d, 2);
    (void)store_at(s, 0, 0, MT_PLANE_M);
    CHECK_OK(mt_store_set_trainable(s, 0, 1, 1));
    (void)store_at(s, 0, 1, MT_PLANE_M);         /* late: an arena of its own */
    CHECK_EQ(fault_live(f), 0);
    CHECK(mt_store_home(s, 0, NULL) == &mt_home_ram);
    CHECK_OK(mt_store_move(s, 0, &mt_home_through, NULL));
    CHECK(mt_store_home(s, 0, NULL) == &mt_home_through);
    CHECK_EQ(fault_live(f), 2);
    (void)store_at(s, 0, 0, MT_PLANE_LO);
    CHECK_EQ(fault_live(f), 3);
    CHECK_OK(mt_store_move(s, 0, &mt_home_through, NULL));
    CHECK_EQ(fault_live(f), 3);
    CHECK_EQ(mt_store_move(s, 0, &mt_home_vram, NULL), MT_ESTATE);
    CHECK_OK(mt_store_move(s, 0, &mt_home_ram, NULL));
    CHECK(mt_store_home(s, 0, NULL) == &mt_home_ram);
    (void)store_at(s, 0, 0, MT_PLANE_V);
    CHECK_EQ(fault_live(f), 3);
    CHECK_EQ(mt_store_move(s, 1, &mt_home_through, NULL), MT_EINVAL);
    (void)store_add(s, "layers.1", d, 2);
    CHECK_OK(mt_store_move(s, 1, &mt_home_through, NULL));
    CHECK_FAILS(mt_store_move(s, 1, &mt_home_vram, NULL), MT_ESTATE, "layers.1");
    CHECK_OK(mt_store_move(s, 1, &mt_home_ram, NULL));
    CHECK_OK(mt_store_move(s, 1, &mt_home_vram, NULL));
    CHECK_EQ(mt_store_move(s, 1, &mt_home_through, NULL), MT_ESTATE);
    mt_store_close(s);
    CHECK_EQ(fault_live(f), 0);
    f->ops->close(f);
    cpu->ops->close(cpu);
}

TEST(open_refuses_buffers_that_hold_nothing)
{
    mt_through *h = NULL;

    TOY(t, 1, 1, 0);
    CHECK_EQ(mt_through_open(&t.cx, 0, 1 << 20, &h), MT_EINVAL);
    CHECK_FAILS(mt_through_open(&t.cx, 2, MT_THROUGH_LEAST - 1, &h), MT_EINVAL, "8191");
}
