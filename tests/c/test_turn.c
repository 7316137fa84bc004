/* test_turn.c — the executable form of core/turn.h: ranks that come to the same window have one
 * verdict of it, whoever is late, elsewhere or gone; and what a stream fetches of a unit when each
 * rank fetches its portion. Ranks are threads of one process.
 */
#include "numbers.h"
#include "opened.h"

#include "../../csrc/core/portion.h"
#include "../../csrc/core/stream.h"
#include "../../csrc/core/turn.h"

#define RANKS 4                  /* at most */
#define NEVER 60000
#define SHORT 60                 /* milliseconds */

static const mt_param_desc shapes[] = { { MT_BF16, 70001, 1 }, { MT_F32, 40000, 0 } };
static const int speak_for_two[RANKS] = { 0, 1, 0, 1 };  /* 2 and 3 are on another machine */

typedef struct peer {
    mt_context cx;
    int        rank, n;          /* n: for the test */
    pthread_t  thread;
    uint64_t   seed;
    int       *said;
} peer;

static void table_open(peer *p, int ranks, int ms, const int *speakers)
{
    int fd = -1;

    REQUIRE_OK(mt_share_make(&fd));
    for (int r = 0; r < ranks; r++) {
        mt_context *cx = &p[r].cx;

        p[r] = (peer){ .rank = r, .seed = (uint64_t)(r + 1) * 77 };
        REQUIRE_OK(mt_dev_cpu_open(&cx->dev));
        REQUIRE(mt_share_open(fd, r, speakers != NULL ? RANKS : ranks, &cx->share) == MT_OK);
        if (speakers != NULL)
            REQUIRE_OK(mt_share_apart(cx->share, speakers));
        REQUIRE_OK(mt_store_open(cx, &cx->store));
        REQUIRE_OK(mt_turns_open(cx, ms, &cx->turns));
        REQUIRE_OK(mt_store_add(cx->store, "layers.0", shapes, 2, &(int){ 0 }));
    }
    close(fd);
}

static void peer_close(peer *p)
{
    mt_turns_close(p->cx.turns);
    mt_store_leave(p->cx.store);
    mt_store_close(p->cx.store);
    mt_share_close(p->cx.share);
    p->cx.dev->ops->close(p->cx.dev);
}

typedef struct table {
    peer p[RANKS];
    int  ranks;
} table;

static void table_close(table *t)
{
    for (int r = 0; r < t->ranks; r++)
        peer_close(&t->p[r]);
}

#define TABLE(p, n, ...) CLOSED_BY(table_close) table p##_table = { .ranks = n }; \
    peer *p = p##_table.p; table_open(p, n, __VA_ARGS__)

static void all(peer *p, int ranks, void *(*script)(void *))
{
    run_together(script, p, sizeof *p, ranks);
}

static int take(peer *p, int unit, uint64_t about)
{
    int in_step = -1;

    mt_turns_next(p->cx.turns, unit);
    CHECK_OK(mt_turns_take(p->cx.turns, about, 0, &in_step));
    return in_step;
}

static double seconds_since(uint64_t ns)
{
    return (double)(mt_now_ns() - ns) * 1e-9;
}

/* ---- verdicts ----------------------------------------------------------------------------- */

static void *walk_alike(void *arg)
{
    peer *p = arg;

    for (int unit = 0; unit < 200; unit++)
        CHECK_EQ(take(p, unit, 7 + (uint64_t)unit), 1);
    return NULL;
}

TEST(ranks_that_go_one_way_are_in_step)
{
    for (int ranks = 1; ranks <= RANKS; ranks++) {
        peer p[RANKS];

        table_open(p, ranks, NEVER, NULL);
        all(p, ranks, walk_alike);
        for (int r = 0; r < ranks; r++) {
            CHECK_EQ(mt_turns_stats_get(p[r].cx.turns).in_step, 200);
            CHECK_EQ(mt_turns_stats_get(p[r].cx.turns).rank, -1);
            peer_close(&p[r]);
        }
    }
}

TEST(ranks_of_another_machine_are_no_mates)
{
    TABLE(p, 2, NEVER, speak_for_two);
    CHECK_EQ(mt_turns_mates(p[1].cx.turns), 2);
    CHECK_EQ(mt_turns_place(p[1].cx.turns), 1);
    all(p, 2, walk_alike);
}

static int turns_taken;

static void *walk_one_unit(void *arg)
{
    for (int n = 0; n < turns_taken; n++)
        CHECK_EQ(take(arg, 0, 7), 1);
    return NULL;
}

/* A rank that was stopped between two windows, and comes when the others are a unit ahead. */
TEST(who_is_one_unit_behind_learns_the_verdict)
{
    static const int many[] = { 0, 1, 31, 63, 64, 200 };

    for (size_t k = 0; k < sizeof many / sizeof *many; k++) {
        TABLE(p, 2, SHORT, NULL);
        turns_taken = many[k];
        all(p, 2, walk_one_unit);
        CHECK_EQ(take(&p[0], 0, 7), 0);
        CHECK_EQ(take(&p[0], 1, 7), 0);
        CHECK_EQ(take(&p[1], 0, 7), 0);
    }
}

static void *walk_apart(void *arg)
{
    peer *p = arg;

    CHECK_EQ(take(p, 0, 5), 1);
    CHECK_EQ(take(p, 1 + p->rank, 5 + (uint64_t)p->rank), 0);
    return NULL;
}

TEST(of_two_windows_neither_is_gathered)
{
    TABLE(p, 2, NEVER, NULL);
    all(p, 2, walk_apart);
    mt_turns_stats n = mt_turns_stats_get(p[0].cx.turns);
    CHECK_EQ(n.astray, 1);
    if (n.rank >= 0) {                   /* unless the other one said so first */
        CHECK_EQ(n.rank, 1);
        CHECK_EQ(n.own, 5);
        CHECK_EQ(n.other, 6);
    }
}

/* A part of a unit that one rank leaves out costs that part alone. */
static void *walk_parts(void *arg)
{
    peer *p = arg;

    for (int unit = 0; unit < 50; unit++)
        for (int part = 0; part < 4; part++)
            if (p->rank == 0 || part != 2)
                CHECK_EQ(take(p, unit, 1 + (uint64_t)part), part < 2);
    mt_turns_away(p->cx.turns, 1);
    return NULL;
}

TEST(ranks_are_in_step_again_at_the_next_unit)
{
    TABLE(p, 2, NEVER, NULL);
    all(p, 2, walk_parts);
}

TEST(a_rank_that_does_not_come_is_waited_for_once)
{
    TABLE(p, 2, SHORT, NULL);
    uint64_t begun = mt_now_ns();
    CHECK_EQ(take(&p[0], 0, 5), 0);
    CHECK(seconds_since(begun) > 1e-3 * SHORT);
    CHECK_EQ(mt_turns_stats_get(p[0].cx.turns).other, 0);
    begun = mt_now_ns();
    for (int unit = 1; unit < 50; unit++)
        CHECK_EQ(take(&p[0], unit, 5), 0);
    CHECK(seconds_since(begun) < 1e-3 * SHORT * 40);
    for (int unit = 0; unit < 50; unit++)            /* it finds all verdicts */
        CHECK_EQ(take(&p[1], unit, 5), 0);
    all(p, 2, walk_alike);                           /* and is waited for again */
}

TEST(a_rank_at_a_meeting_is_not_waited_for)
{
    uint64_t begun = mt_now_ns();

    TABLE(p, 2, NEVER, NULL);
    mt_turns_away(p[1].cx.turns, 1);
    CHECK_EQ(take(&p[0], 0, 5), 0);
    CHECK(seconds_since(begun) < 10);
}

static void *comes_back(void *arg)
{
    peer *p = arg;

    usleep(50000);
    mt_turns_met(p->cx.turns);
    mt_turns_away(p->cx.turns, 0);
    CHECK_EQ(take(p, 3, 5), 1);
    return NULL;
}

TEST(behind_a_meeting_all_are_in_step_and_waited_for)
{
    TABLE(p, 2, NEVER, NULL);
    mt_turns_away(p[1].cx.turns, 1);
    for (int unit = 0; unit < 3; unit++)
        CHECK_EQ(take(&p[0], unit, 5), 0);
    p[1].thread = thread_start(comes_back, &p[1]);
    mt_turns_met(p[0].cx.turns);         /* it has heard of the end first */
    CHECK_EQ(take(&p[0], 3, 5), 1);
    thread_join(p[1].thread);
}

TEST(a_rank_that_left_is_not_waited_for)
{
    peer p[2];

    table_open(p, 2, NEVER, NULL);
    peer_close(&p[1]);
    CHECK_EQ(take(&p[0], 0, 5), 0);
    peer_close(&p[0]);
}

TEST(a_fault_ends_the_wait)
{
    int in_step = -1;

    TABLE(p, 2, NEVER, NULL);
    mt_ledger_fault(p[1].cx.store, MT_EDEVICE, "the other one's disk is full");
    mt_turns_next(p[0].cx.turns, 0);
    CHECK(mt_turns_take(p[0].cx.turns, 5, 0, &in_step) != MT_OK);
    CHECK_SAYS("the other one's disk is full");
}

/* Ranks go random ways, with random naps around the time for which they wait: whatever becomes of a
 * turn, all who took it have heard the same, and only what all took is in step. */
#define TURNS 300

static void *wander(void *arg)
{
    peer *p = arg;

    for (int i = 0; i < TURNS; i++) {
        uint64_t about = 1 + (toy_random(&p->seed) % 8 == 0);

        if (toy_random(&p->seed) % 16 == 0)
            usleep((useconds_t)(toy_random(&p->seed) % 9000));
        if (toy_random(&p->seed) % 32 == 0) {
            mt_turns_next(p->cx.turns, i);           /* it leaves one out */
            continue;
        }
        p->said[i] = 1 + take(p, i, about) + 2 * (int)about;
    }
    return NULL;
}

TEST(whatever_happens_there_is_one_verdict)
{
    static int said[RANKS][TURNS];
    int        in_step = 0;

    memset(said, 0, sizeof said);
    TABLE(p, 3, 4, NULL);
    for (int r = 0; r < 3; r++)
        p[r].said = said[r];
    all(p, 3, wander);
    for (int i = 0; i < TURNS; i++) {
        int alike = said[0][i] == said[1][i] && said[1][i] == said[2][i] && said[0][i] > 0;

        for (int r = 0; r < 3; r++)
            if (said[r][i] > 0 && (said[r][i] - 1) % 2 == 1)
                in_step += alike;
            else
                continue;
        for (int r = 0; r < 3; r++)
            CHECK(alike || said[r][i] == 0 || (said[r][i] - 1) % 2 == 0);
    }
    CHECK(in_step > 0);
}

/* ---- a stream that fetches portions ------------------------------------------------------- */

typedef struct rig {
    mt_dev      *dev;
    mt_stream   *s;
    mt_queue    *run;
    mt_slot_desc slots[2];
    size_t       bytes;
} rig;

static void rig_open(rig *g, peer *p)
{
    void *hi;

    *g = (rig){ .dev = p->cx.dev, .bytes = mt_store_hi_bytes(p->cx.store, 0) };
    REQUIRE_OK(mt_store_hi(p->cx.store, 0, &hi));
    memset(hi, 0x5A, g->bytes);
    for (int k = 0; k < 2; k++) {
        g->slots[k].bytes = g->bytes;
        REQUIRE_OK(g->dev->ops->mem_alloc(g->dev, g->bytes, &g->slots[k].mem));
        memset(g->slots[k].mem, 0, g->bytes);
    }
    REQUIRE_OK(g->dev->ops->queue_adopt(g->dev, 0, &g->run));
    REQUIRE_OK(mt_stream_open(&p->cx, g->slots, 2, (mt_slot_hooks){ 0 }, &g->s));
}

static void rig_close(rig *g)
{
    mt_stream_close(g->s);
    g->dev->ops->queue_close(g->run);
    for (int k = 0; k < 2; k++)
        g->dev->ops->mem_free(g->dev, g->slots[k].mem);
}

#define RIG(g, ...) CLOSED_BY(rig_close) rig g; rig_open(&g, __VA_ARGS__)

/* Of a number: it takes a turn. */
static int fetched(rig *g, int number, void **mem, int *slot)
{
    CHECK_OK(mt_stream_acquire(g->s, number, g->run, slot, mem));
    return mt_stream_takes_turn(g->s);
}

static void check_filled(const char *mem, size_t bytes, size_t from, size_t to)
{
    for (size_t i = 0; i < bytes; i += 97)
        if ((mem[i] != 0) != (i >= from && i < to)) {
            CHECK_EQ(i, -1);
            return;
        }
}

/* Bytes [from, to) of the slot came, and of the first n no others. */
static void check_comes(rig *g, int slot, const void *mem, size_t n, size_t from, size_t to)
{
    CHECK_OK(mt_stream_await(g->s, slot, g->run));
    CHECK_OK(g->dev->ops->sync(g->run));
    check_filled(mem, n, from, to);
}

TEST(a_portion_is_fetched_and_then_the_rest)
{
    size_t bounds[3];
    void  *mem = NULL;
    int    slot = -1, gathers = -1;

    TABLE(p, 2, SHORT, NULL);
    RIG(g, &p[1]);
    CHECK_OK(mt_stream_bounds(g.s, 0, bounds));
    CHECK(bounds[0] == 0 && bounds[1] > 0 && bounds[1] < g.bytes && bounds[2] == g.bytes);
    mt_stream_portions(g.s, 1);
    CHECK_OK(mt_stream_begin(g.s));
    CHECK(fetched(&g, 0, &mem, &slot));
    CHECK_OK(mt_stream_turn(g.s, slot, &gathers));
    CHECK_EQ(gathers, 0);                            /* nobody else came */
    check_comes(&g, slot, mem, g.bytes, bounds[1], bounds[2]);
    CHECK_OK(mt_stream_whole(g.s, slot, g.run));
    check_comes(&g, slot, mem, g.bytes, 0, g.bytes);
    CHECK_EQ(mt_stream_stats_get(g.s).h2d_bytes, g.bytes + bounds[2] - bounds[1]);
}

TEST(a_pass_of_one_rank_finds_no_portion)
{
    void *mem = NULL;
    int   slot = -1;

    TABLE(p, 2, SHORT, NULL);
    RIG(g, &p[0]);
    mt_stream_portions(g.s, 1);
    CHECK_OK(mt_stream_begin(g.s));
    CHECK(fetched(&g, 0, &mem, &slot));
    CHECK_OK(mt_stream_await(g.s, slot, g.run));
    mt_stream_portions(g.s, 0);                      /* an evaluation */
    CHECK_OK(mt_stream_begin(g.s));
    CHECK(!fetched(&g, 0, &mem, &slot));
    check_comes(&g, slot, mem, g.bytes, 0, g.bytes);
    mt_stream_portions(g.s, 1);                      /* which it may leave in the slot */
    CHECK_OK(mt_stream_begin(g.s));
    CHECK(fetched(&g, 0, &mem, &slot));
    CHECK_EQ(mt_stream_stats_get(g.s).fetches, 2);
}

TEST(of_a_cut_too)
{
    mt_cut_range ranges[2] = { { 1024, 0, 4096 }, { 65536, 4096, 2048 } };
    size_t       bounds[3];
    void        *mem = NULL;
    int          slot = -1, number = -1;

    TABLE(p, 2, SHORT, NULL);
    RIG(g, &p[0]);
    CHECK_OK(mt_stream_cut(g.s, 0, ranges, 2, &number));
    CHECK_OK(mt_stream_bounds(g.s, number, bounds));
    CHECK(bounds[1] == 3072 && bounds[2] == 6144);
    mt_stream_portions(g.s, 1);
    CHECK_OK(mt_stream_begin(g.s));
    CHECK(fetched(&g, number, &mem, &slot));
    check_comes(&g, slot, mem, 6144, bounds[0], bounds[1]);
}

TEST(alone_a_process_fetches_all)
{
    void *mem = NULL;
    int   slot = -1;

    TABLE(p, 1, SHORT, NULL);
    RIG(g, &p[0]);
    mt_stream_portions(g.s, 1);
    CHECK_OK(mt_stream_begin(g.s));
    CHECK(!fetched(&g, 0, &mem, &slot));
}
