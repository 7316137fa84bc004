/* test_swap.c — the executable form of core/swap.h: a toy's forwards and backwards,
 * whose windows keep two tensors. */
#include "dev_fault.h"
#include "keeping.h"

#define WINDOWS 5

static void scene_open(scene *s, uint64_t seed, int max_us, unsigned skip)
{
    memset(s, 0, sizeof *s);
    toy_open(&s->t, 1, seed, max_us);
    REQUIRE_OK(mt_swap_open(&s->t.cx, &s->w));
    debug_set(&s->t.cx, (mt_debug){ .skip = skip });
}

static void forward(scene *s, int step, uint64_t *bundle)
{
    mt_swap_part p[PARTS];

    for (int w = 0; w < WINDOWS; w++) {
        run(s, &s->source[w % 2], value_of(step, w), 0);
        CHECK_OK(mt_swap_out(s->w, 0, parts(&s->source[w % 2], p), PARTS, MT_SWAP_HOST, s->t.run,
                             &bundle[w]));
        if (w > 0)                  /* the next window is made where the one before this one lies */
            CHECK_OK(mt_swap_left(s->w, bundle[w - 1], s->t.run));
    }
}

/* One window ahead. */
static void backward(scene *s, int step, uint64_t *bundle)
{
    mt_swap_part p[PARTS];
    int          last = WINDOWS - 1;

    CHECK_OK(mt_swap_back(s->w, bundle[last], parts(&s->landing[last % 2], p), PARTS, s->t.run));
    CHECK_OK(mt_swap_left(s->w, bundle[last], s->t.run));
    for (int w = last; w >= 0; w--) {
        CHECK_OK(mt_swap_await(s->w, bundle[w], s->t.run));
        if (w > 0)
            CHECK_OK(mt_swap_back(s->w, bundle[w - 1], parts(&s->landing[(w - 1) % 2], p), PARTS,
                                  s->t.run));
        run(s, &s->landing[w % 2], value_of(step, w), 1);
        mt_swap_drop(s->w, bundle[w]);
    }
}

static long train(uint64_t seed, int max_us, unsigned skip, int steps)
{
    uint64_t bundle[WINDOWS];

    scene s;
    scene_open(&s, seed, max_us, skip);
    s.slow = skip == MT_EDGE_ROOM;
    for (int step = 0; step < steps; step++) {
        forward(&s, step, bundle);
        backward(&s, step, bundle);
        CHECK_EQ(mt_swap_stats_get(s.w).used_bytes, 0);
    }
    CHECK_EQ(mt_swap_stats_get(s.w).out_bytes, mt_swap_stats_get(s.w).back_bytes);
    return scene_end(&s);
}

TEST(tensors_come_back_as_they_left)
{
    CHECK_EQ(train(1, 0, 0, 3), 0);
    for (uint64_t seed = 1; seed <= 6; seed++)
        CHECK_EQ(train(seed, 150, 0, 3), 0);
}

static void expect_wrong(unsigned edge)
{
    long wrong = 0;

    RACE;
    for (uint64_t seed = 1; wrong == 0 && seed <= 20; seed++)
        wrong += train(seed, 300, edge, 2);
    CHECK(wrong > 0);
}

TEST(without_computed_something_else_is_kept)  { expect_wrong(MT_EDGE_COMPUTED); }
TEST(without_left_what_follows_is_kept)        { expect_wrong(MT_EDGE_LEFT); }
TEST(without_room_what_is_used_is_overwritten) { expect_wrong(MT_EDGE_ROOM); }
TEST(without_back_compute_is_too_early)        { expect_wrong(MT_EDGE_BACK); }

/* Its sources not given up, nothing else says when the bay is full. */
TEST(without_kept_the_bay_is_read_too_early)
{
    RACE;
    for (int skip = 0; skip < 2; skip++) {
        mt_swap_part p[PARTS];
        uint64_t     bundle;
        long         wrong = 0;

        for (uint64_t seed = 1; seed <= 12; seed++) {
            scene s;
            scene_open(&s, seed, 300, skip ? MT_EDGE_KEPT : 0);
            run(&s, &s.source[0], value_of(3, 3), 0);
            CHECK_OK(mt_swap_out(s.w, 0, parts(&s.source[0], p), PARTS, MT_SWAP_HOST, s.t.run,
                                 &bundle));
            CHECK_OK(mt_swap_back(s.w, bundle, parts(&s.landing[0], p), PARTS, s.t.run));
            CHECK_OK(mt_swap_await(s.w, bundle, s.t.run));
            run(&s, &s.landing[0], value_of(3, 3), 1);
            wrong += scene_end(&s);
        }
        CHECK_EQ(wrong > 0, skip);
    }
}

/* One stream reads what came back, and drops it; another, which never waited for that, gives the
 * bay its next bundle. */
static long filled_from_another_stream(uint64_t seed, unsigned skip)
{
    mt_swap_part p[PARTS];
    mt_queue    *other;
    uint64_t     bundle;

    scene s;
    scene_open(&s, seed, 300, skip);
    REQUIRE_OK(s.t.dev->ops->queue_open(s.t.dev, "other", &other));
    run(&s, &s.source[0], value_of(3, 3), 0);
    CHECK_OK(mt_swap_out(s.w, 0, parts(&s.source[0], p), PARTS, MT_SWAP_HOST, s.t.run, &bundle));
    CHECK_OK(mt_swap_left(s.w, bundle, s.t.run));
    CHECK_OK(mt_swap_back(s.w, bundle, parts(&s.landing[0], p), PARTS, s.t.run));
    CHECK_OK(mt_swap_await(s.w, bundle, s.t.run));
    mt_swap_drop(s.w, bundle);
    run(&s, &s.landing[0], value_of(3, 3), 1);
    CHECK_OK(mt_swap_out(s.w, 0, parts(&s.source[1], p), PARTS, MT_SWAP_HOST, other, &bundle));
    CHECK_EQ(mt_swap_stats_get(s.w).host_bytes, 5 * 4096);       /* the same bay */
    CHECK_OK(mt_swap_left(s.w, bundle, other));
    s.t.dev->ops->queue_close(other);
    return scene_end(&s);
}

TEST(without_emptied_a_bay_is_filled_while_it_is_read)
{
    long wrong = 0;

    for (uint64_t seed = 1; seed <= 12; seed++)
        CHECK_EQ(filled_from_another_stream(seed, 0), 0);
    RACE;
    for (uint64_t seed = 1; wrong == 0 && seed <= 20; seed++)
        wrong += filled_from_another_stream(seed, MT_EDGE_EMPTIED);
    CHECK(wrong > 0);
}

/* ---- bays ----------------------------------------------------------------------------- */

static uint64_t out(scene *s, void *mem, size_t bytes)
{
    mt_swap_part p = { mem, bytes };
    uint64_t     bundle = 0;

    CHECK_OK(mt_swap_out(s->w, 0, &p, 1, MT_SWAP_HOST, s->t.run, &bundle));
    return bundle;
}

static void gone(scene *s, uint64_t bundle)
{
    CHECK_OK(mt_swap_left(s->w, bundle, s->t.run));
    mt_swap_drop(s->w, bundle);
}

TEST(steps_that_are_alike_make_no_bays)
{
    uint64_t bundle[WINDOWS];
    size_t   first = 0;

    SCENE(s, 1, 0, 0);
    for (int step = 0; step < 4; step++) {
        forward(&s, step, bundle);
        CHECK_EQ(mt_swap_stats_get(s.w).used_bytes, mt_swap_stats_get(s.w).host_bytes);
        backward(&s, step, bundle);
        first = step == 0 ? mt_swap_stats_get(s.w).host_bytes : first;
        CHECK_EQ(mt_swap_stats_get(s.w).host_bytes, first);
    }
    CHECK_EQ(first, WINDOWS * 5 * 4096);   /* 16,000 and 28 bytes in whole pages; no power of two */
}

TEST(bays_are_taken_by_size_and_grow)
{
    static char mem[40000];

    SCENE(s, 1, 0, 0);
    uint64_t a = out(&s, mem, 4096), b = out(&s, mem, 32768);
    gone(&s, a);
    gone(&s, b);
    a = out(&s, mem, 4000);                 /* the small one, though the large one is free */
    CHECK_EQ(mt_swap_stats_get(s.w).used_bytes, 4096);
    b = out(&s, mem, 36864);                /* the large one is too small: another in its place */
    CHECK_EQ(mt_swap_stats_get(s.w).host_bytes, 4096 + 36864);
    gone(&s, b);
    gone(&s, a);
    CHECK_EQ(mt_swap_stats_get(s.w).used_bytes, 0);
}

TEST(a_bay_stays_until_its_sources_have_left_too)
{
    static char mem[4096];

    SCENE(s, 1, 100, 0);
    uint64_t a = out(&s, mem, sizeof mem);
    CHECK_OK(mt_swap_await(s.w, a, s.t.run));        /* who waits for it is not its sources */
    mt_swap_drop(s.w, a);
    CHECK_EQ(mt_swap_stats_get(s.w).used_bytes, sizeof mem);
    CHECK_OK(mt_swap_left(s.w, a, s.t.run));
    CHECK_EQ(mt_swap_stats_get(s.w).used_bytes, 0);
    CHECK_EQ(mt_swap_left(s.w, a, s.t.run), MT_ESTATE);
    CHECK_FAILS(mt_swap_await(s.w, a, s.t.run), MT_ESTATE, "dropped");
    mt_swap_drop(s.w, a);
}

TEST(a_bundle_comes_back_twice_and_in_part)
{
    mt_swap_part p[PARTS];
    uint64_t     bundle;

    SCENE(s, 7, 100, 0);
    run(&s, &s.source[0], 5, 0);
    CHECK_OK(mt_swap_out(s.w, 0, parts(&s.source[0], p), PARTS, MT_SWAP_HOST, s.t.run, &bundle));
    CHECK_OK(mt_swap_left(s.w, bundle, s.t.run));
    for (int time = 0; time < 2; time++) {
        parts(&s.landing[time], p);
        p[0].mem = time == 0 ? p[0].mem : NULL;
        CHECK_OK(mt_swap_back(s.w, bundle, p, PARTS, s.t.run));
        CHECK_OK(mt_swap_await(s.w, bundle, s.t.run));
    }
    run(&s, &s.landing[0], 5, 1);
    CHECK_OK(s.t.dev->ops->sync(s.t.run));
    CHECK(s.landing[1].at[0][0] == 0 && s.landing[1].at[1][0] == 6);
    CHECK_EQ(mt_swap_stats_get(s.w).back_bytes, 2 * 28 + 4 * LONGEST);
    p[1].bytes--;
    CHECK_EQ(mt_swap_back(s.w, bundle, p, PARTS, s.t.run), MT_EINVAL);
    CHECK_SAYS("tensor 1 left with 28 bytes");
    CHECK_EQ(mt_swap_back(s.w, bundle, p, 1, s.t.run), MT_EINVAL);
}

TEST(a_large_tensor_goes_in_pieces)
{
    size_t bytes = ((size_t)32 << 20) + 100;
    FREED char *mem = malloc(bytes);
    mt_swap_part p = { mem, bytes };

    REQUIRE(mem != NULL);
    SCENE(s, 1, 0, 0);
    memset(mem, 3, bytes);
    uint64_t bundle = out(&s, mem, bytes);
    CHECK_OK(mt_swap_left(s.w, bundle, s.t.run));
    memset(mem, 0, bytes);
    CHECK_OK(mt_swap_back(s.w, bundle, &p, 1, s.t.run));
    CHECK_OK(mt_swap_await(s.w, bundle, s.t.run));
    CHECK(mem[0] == 3 && mem[(32 << 20) - 1] == 3 && mem[32 << 20] == 3 && mem[bytes - 1] == 3);
}

TEST(what_does_not_fit_the_host_is_refused_with_its_bytes)
{
    char         mem[8];
    mt_swap_part p = { mem, (size_t)1 << 60 };
    uint64_t     bundle = 7;

    SCENE(s, 1, 0, 0);
    CHECK_EQ(mt_swap_out(s.w, 0, &p, 1, MT_SWAP_HOST, s.t.run, &bundle), MT_ENOMEM);
    CHECK_SAYS("activations on the host: 1152921504606846976 bytes");
    CHECK_EQ(bundle, 7);
    gone(&s, out(&s, mem, sizeof mem));
}

/* ---- failures --------------------------------------------------------------------------- */

static mt_status errand(const mt_context *cx, mt_queue *q, float *mem)
{
    mt_swap_part p = { mem, 64 };
    mt_swap     *w = NULL;
    uint64_t     bundle;
    mt_status    st;

    MT_TRY(mt_swap_open(cx, &w));
    for (size_t bytes = 64; bytes <= 8192; bytes *= 128) {  /* the second is given a new bay */
        p.bytes = bytes;
        MT_TRY(mt_swap_out(w, 0, &p, 1, MT_SWAP_HOST, q, &bundle));
        MT_TRY(mt_swap_left(w, bundle, q));
        MT_TRY(mt_swap_back(w, bundle, &p, 1, q));
        MT_TRY(mt_swap_await(w, bundle, q));
        mt_swap_drop(w, bundle);
    }
fail:
    mt_swap_close(w);
    return st;
}

TEST(every_failing_device_call_frees_everything)
{
    static float mem[2048];

    EACH_FAULT(d, 2, n % 2 ? FAULT_ONCE : FAULT_STAYS) {   /* the first adopts run */
        mt_context cx = { .dev = d };
        mt_queue  *q = NULL;

        REQUIRE_OK(mt_store_open(&cx, &cx.store));
        REQUIRE_OK(d->ops->queue_adopt(d, 0, &q));
        mt_status st = errand(&cx, q, mem);
        CHECK_EQ(st, fault_fired(d) ? MT_EDEVICE : MT_OK);
        d->ops->queue_close(q);
        mt_store_close(cx.store);
    }
}
