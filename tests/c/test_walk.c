/* test_walk.c — steps whose times are known by hand, and what holds for any step. */
#include "check.h"

#include "../../csrc/walk/walk.h"

#define MOST 12              /* windows, and units */
#define REST 0.5

/* A step of windows that each bind a unit of their own, of 1 byte; copies take 1 s. */
typedef struct toy {
    mt_walk walk;
    double  forward_s[MOST], backward_s[MOST], forward_host_s[MOST], backward_host_s[MOST];
    double  update_s[MOST], add_s[MOST], disk_s[MOST], through_s[MOST], read_s[MOST];
    int64_t away[MOST], spilled[MOST], updated_on[MOST], weights[MOST], gradients[MOST];
    int64_t visiting[MOST], begin[MOST + 1], none[MOST + 1], item[MOST];
    int64_t lent[MOST], slots[MOST], lowered[MOST], raised[MOST];
    double  exchange_s[MOST], network_s[MOST], lost_s[MOST], spread_s[MOST];
    double  gather_s[MOST], held_s[MOST];
} toy;

/* Every window takes forward_s and backward_s, and hands its gradients over where `trained`. */
static void toy_make(toy *t, int64_t n, double forward_s, double backward_s, int trained,
                     int64_t slots)
{
    mt_walk_list own = { t->begin, t->item }, nothing = { t->none, t->item };

    *t = (toy){ .walk = { .n_windows = n, .n_units = n, .n_slots = slots, .micro = 1, .shown = 1,
                          .depth = 2, .stagings = 2, .bays = 2, .ahead = 5, .stay = 7, .h2d = 1,
                          .d2h = 1, .both = 1, .busy = 1, .stretch = 1, .write = 1, .read = 1,
                          .parts = 1, .rest_s = REST } };
    for (int64_t i = 0; i < n; i++) {
        t->forward_s[i] = forward_s;
        t->backward_s[i] = backward_s;
        t->updated_on[i] = MT_LANE_HOST;
        t->weights[i] = t->gradients[i] = t->slots[i] = 1;
        t->item[i] = i;
        t->begin[i + 1] = i + 1;
    }
    t->walk.units = t->walk.again = own;
    t->walk.leaving = trained ? own : nothing;
#define POINT(name) t->walk.name = t->name
    POINT(forward_s), POINT(backward_s), POINT(forward_host_s), POINT(backward_host_s);
    POINT(update_s), POINT(add_s), POINT(disk_s), POINT(through_s), POINT(read_s), POINT(away);
    POINT(spilled), POINT(updated_on), POINT(weights), POINT(gradients), POINT(visiting);
    POINT(lent), POINT(slots), POINT(lowered), POINT(raised);
    POINT(exchange_s), POINT(network_s), POINT(lost_s), POINT(spread_s);
    POINT(gather_s), POINT(held_s);
#undef POINT
}

#define MADE(t, ...) toy t; toy_make(&t, __VA_ARGS__)

static mt_walked walked(const toy *t, mt_walk_events *events)
{
    mt_schedule *sch = NULL;
    mt_walked    found = { 0 };
    int          under = 0;

    CHECK_OK(mt_walk_schedule(&t->walk, &sch));
    REQUIRE(sch != NULL);
    CHECK_OK(mt_walk_run(&t->walk, sch->steps, sch->n, INFINITY, events, &found, &under));
    CHECK(under);
    mt_schedule_free(sch);
    return found;
}

#define CHECK_NEAR(got, want)                                                                 \
    do {                                                                                      \
        double got_ = (got), want_ = (want);                                                  \
        if (!check_said(fabs(got_ - want_) <= 1e-9 * (1 + fabs(want_))))                      \
            CHECK_PRINT_("%s is %.9g, expected %.9g", #got, got_, want_);                     \
    } while (0)

/* ---- several GPUs, by hand: those of one are in golden plans (tests/test_plan.py) ---- */

static void exchanging(toy *t, int64_t n, double exchange_s, double network_s)
{
    for (int64_t i = 0; i < n; i++) {
        t->exchange_s[i] = exchange_s;
        t->network_s[i] = network_s;
    }
}

/* Gradients take 1 s each behind backwards of 0.25 s; a copy hides the next exchange. */
TEST(gradients_go_home_behind_their_exchange)
{
    MADE(t, 4, 1, 0.25, 1, 4);
    exchanging(&t, 4, 0.5, 0);
    mt_walked found = walked(&t, NULL);
    CHECK_NEAR(found.seconds, 1 + 4 + 0.25 + 0.5 + 4 + REST);
    CHECK_NEAR(found.busy[MT_WALK_EXCHANGE], 2);
    exchanging(&t, 4, 0.5, 2);              /* and between machines: what a step then waits for */
    found = walked(&t, NULL);
    CHECK_NEAR(found.seconds, 1 + 4 + 0.25 + 0.5 + 4 * 2 + 1 + REST);
    CHECK_NEAR(found.busy[MT_WALK_NETWORK], 8);
    CHECK(found.idle[MT_WALK_NETWORK] > found.idle[MT_LANE_D2H]);
}

/* What is computed behind a hand-over takes longer; behind the last nothing is. */
TEST(an_exchange_holds_up_what_is_computed_beside_it)
{
    MADE(t, 3, 2, 3, 1, 2);
    exchanging(&t, 3, 0.25, 0);
    mt_walked found = walked(&t, NULL);
    CHECK_NEAR(found.seconds, 1 + 3 * 2 + 3 * 3 + 0.25 + 1 + REST);
    t.lost_s[0] = t.lost_s[1] = t.lost_s[2] = 0.5;
    found = walked(&t, NULL);
    CHECK_NEAR(found.seconds, 1 + 3 * 2 + 3 * 3 + 2 * 0.5 + 0.25 + 1 + REST);
    CHECK_NEAR(found.busy[MT_LANE_COMPUTE], 16);
}

/* Without links of their own GPUs exchange over those to the host: copies home come in between. */
TEST(an_exchange_may_take_the_link)
{
    MADE(t, 4, 1, 0.25, 1, 4);
    exchanging(&t, 4, 1, 0);
    t.walk.on_link = 1;
    mt_walked found = walked(&t, NULL);
    CHECK_NEAR(found.seconds, 1 + 4 + 0.25 + 4 * (1 + 1) + REST);
}

/* A copy brings half; behind it the halves are exchanged, beside the next copy. */
TEST(parts_of_weights_are_gathered_behind_their_copies)
{
    MADE(t, 3, 0.25, 0.25, 0, 3);
    t.walk.parts = 2;
    t.gather_s[0] = t.gather_s[1] = t.gather_s[2] = 0.5;
    mt_walked found = walked(&t, NULL);
    CHECK_NEAR(found.forward_s, 0.5 + 3 * 0.5 + 0.25);
    CHECK_NEAR(found.busy[MT_LANE_H2D], 1.5);
    CHECK_NEAR(found.busy[MT_WALK_EXCHANGE], 1.5);
    t.gather_s[0] = t.gather_s[1] = t.gather_s[2] = 0.75;      /* now these are the longer ones */
    found = walked(&t, NULL);
    CHECK_NEAR(found.forward_s, 0.5 + 3 * 0.75 + 0.25);
    CHECK(found.idle[MT_WALK_EXCHANGE] > found.idle[MT_LANE_H2D]);
    t.walk.on_link = 1;                     /* and take the link's time from copies */
    found = walked(&t, NULL);
    CHECK_NEAR(found.forward_s, 3 * (0.5 + 0.75) + 0.25);
    t.walk.on_link = 0;
    t.held_s[0] = 1;                        /* the first kernels behind it take longer */
    found = walked(&t, NULL);
    CHECK_NEAR(found.busy[MT_LANE_COMPUTE], 6 * 0.25 + 1);
}

/* A unit's copy waits until the other machines' parts of its new weights are here. */
TEST(new_weights_come_from_other_machines)
{
    MADE(t, 2, 1, 1, 1, 2);
    t.update_s[0] = t.update_s[1] = 1;
    t.spread_s[0] = t.spread_s[1] = 3;
    mt_walked found = walked(&t, NULL);
    CHECK_NEAR(found.forward_s, 1 + 3 + 3 + 1 + 1);
    CHECK_NEAR(found.busy[MT_WALK_NETWORK], 6);
    CHECK(found.idle[MT_WALK_NETWORK] > 0);
}

/* Two units at home on the devices, each of which has updated a part: down to the host, and up from
 * there; or, meanwhile, from device to device. */
static void at_home(toy *t)
{
    toy_make(t, 2, 1, 2, 0, 0);
    for (int i = 0; i < 2; i++) {
        t->updated_on[i] = MT_LANE_DEVICE;
        t->update_s[i] = 0.25;
        t->lowered[i] = t->raised[i] = 1;
    }
}

TEST(new_weights_come_by_way_of_the_host)
{
    toy t;

    at_home(&t);
    mt_walked found = walked(&t, NULL);
    CHECK_NEAR(found.forward_s, 0.25 + 1 + 1 + 1 + 1);
    CHECK_NEAR(found.busy[MT_LANE_THROUGH], 3.25);
}

TEST(new_weights_come_from_other_devices)
{
    toy t;

    at_home(&t);
    t.walk.peers = 4;
    mt_walked found = walked(&t, NULL);
    CHECK_NEAR(found.forward_s, 0.5 + 1 + 1);
    CHECK_NEAR(found.busy[MT_WALK_EXCHANGE], 0.5);
    CHECK_NEAR(found.busy[MT_LANE_THROUGH], 2.25);
    t.lost_s[1] = 0.5;
    CHECK_NEAR(walked(&t, NULL).forward_s, 0.5 + 1 + 1 + 0.25);
}

/* F0 is over at 1.5, new weights are down at 2.25, or later. */
TEST(what_leaves_shares_a_queue_with_new_weights)
{
    toy t;

    at_home(&t);
    t.walk.peers = 4;
    t.away[0] = 1;
    CHECK_NEAR(walked(&t, NULL).busy[MT_LANE_OUT], 1.75);
}

/* The host's unit is updated first; the device's is down a second later, and goes behind it. */
TEST(new_weights_go_to_other_machines_in_the_order_in_which_they_are_there)
{
    MADE(t, 2, 1, 2, 0, 1);
    t.updated_on[0] = MT_LANE_DEVICE;
    t.lowered[0] = t.raised[0] = 1;
    t.update_s[0] = t.update_s[1] = 0.25;
    t.spread_s[0] = t.spread_s[1] = 3;
    CHECK_NEAR(walked(&t, NULL).forward_s, 0.25 + 3 + 3 + 1 + 1 + 1);
}

/* All GPUs of a machine have one host: a step takes as long as its memory has to move. */
TEST(the_hosts_memory_bounds_a_step)
{
    MADE(t, 3, 2, 3, 1, 2);
    t.walk.memory = 0.25, t.walk.memory_s = 5;
    mt_walked found = walked(&t, NULL);               /* 4 copies of weights, 3 of gradients */
    CHECK_NEAR(found.seconds, 5 + (4 + 3) / 0.25 + REST);
    CHECK_NEAR(found.busy[MT_WALK_MEMORY], 33);
    CHECK_NEAR(found.idle[MT_WALK_MEMORY], 33 - (1 + 6 + 9 + 1));
}

/* ---- any step ---- */

static double part(unsigned *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    return (*seed >> 8) / (double)(1u << 24);
}

static int64_t below(unsigned *seed, int64_t n)
{
    return (int64_t)(part(seed) * (double)n);
}

/* Units anywhere; some bundles on the host, some in a file. */
static void toy_draw(toy *t, unsigned *seed)
{
    static const int64_t lanes[] = { MT_LANE_HOST, MT_LANE_DEVICE, MT_LANE_DISK, MT_LANE_THROUGH };
    int64_t              n = 2 + below(seed, MOST - 2);

    toy_make(t, n, 0, 0, 1, 2 + below(seed, n - 1));
    for (int64_t i = 0; i < n; i++) {
        t->forward_s[i] = part(seed);
        t->backward_s[i] = 2 * part(seed);
        t->update_s[i] = part(seed);
        t->add_s[i] = part(seed) / 4;
        t->updated_on[i] = lanes[below(seed, 4)];
        t->disk_s[i] = part(seed);
        t->through_s[i] = part(seed);
        t->away[i] = below(seed, 3);
        t->spilled[i] = below(seed, 2);
        t->visiting[i] = t->updated_on[i] == MT_LANE_DEVICE ? below(seed, 2) : 0;
        t->read_s[i] = t->updated_on[i] == MT_LANE_DISK ? (double)below(seed, 2) * part(seed) : 0;
    }
    t->walk.micro = t->walk.shown = 1 + below(seed, 3);
    t->walk.busy = 0.5 + part(seed) / 2;
    t->walk.n_lent = t->walk.micro == 1 ? below(seed, 3) : 0;
    t->lent[0] = t->lent[1] = 1;
}

/* Of so many steps, drawn from a seed. */
#define DRAWN 400
#define DRAWN_TEST(name, first, n)                                                            \
    static void name##_holds(toy *t, unsigned *seed);                                         \
    TEST(name)                                                                                \
    {                                                                                         \
        unsigned seed = first;                                                                \
        toy      t;                                                                           \
                                                                                              \
        for (int i = 0; i < (n); i++) {                                                       \
            toy_draw(&t, &seed);                                                              \
            name##_holds(&t, &seed);                                                          \
        }                                                                                     \
    }                                                                                         \
    static void name##_holds(toy *t, unsigned *seed)

DRAWN_TEST(a_step_takes_no_less_than_any_row_works, 1, DRAWN)
{
    mt_walked found = walked(t, NULL);
    for (int row = 0; row < MT_LANE_COUNT; row++)
        if (row != MT_LANE_DISK_UPDATE)         /* four threads of them, beside the drive */
            CHECK(found.busy[row] <= found.seconds + 1e-9);
    CHECK(found.busy[MT_LANE_H2D] + found.busy[MT_LANE_BACK] <= found.seconds + 1e-9);
}

/* What compute does not work, it waits. */
DRAWN_TEST(work_and_waits_fill_a_step, 2, DRAWN)
{
    if (t->walk.n_lent > 0)                      /* there a bound may be what a step takes */
        return;
    for (int64_t u = 0; u < t->walk.n_units; u++)
        t->read_s[u] = 0;
    mt_walked found = walked(t, NULL);
    double all = REST + found.busy[MT_LANE_COMPUTE] + found.busy[MT_LANE_DEVICE];
    for (int row = 0; row < MT_WALK_ROWS; row++)
        all += found.idle[row];
    CHECK_NEAR(all, found.seconds);
}

/* No work may be longer and the step shorter. Where Python starts from, and what updates leave to
 * the next step, are found by trying: not there. */
DRAWN_TEST(longer_work_never_shortens_a_step, 3, DRAWN)
{
    double *of[] = { t->forward_s, t->backward_s, t->update_s, t->add_s, t->disk_s, t->through_s };

    t->walk.n_lent = 0;
    memset(t->spilled, 0, sizeof t->spilled);
    double before = walked(t, NULL).seconds;
    of[below(seed, 6)][below(seed, t->walk.n_units)] += part(seed);
    CHECK(walked(t, NULL).seconds >= before - 1e-9);
}

DRAWN_TEST(faster_copies_never_lengthen_a_step, 4, DRAWN)
{
    t->walk.n_lent = 0;
    memset(t->spilled, 0, sizeof t->spilled);
    double before = walked(t, NULL).seconds;
    t->walk.h2d *= 1 + part(seed);
    t->walk.both *= 1 + part(seed);
    CHECK(walked(t, NULL).seconds <= before + 1e-9);
}

DRAWN_TEST(the_same_numbers_give_the_same_bits, 5, DRAWN / 4)
{
    mt_walked a = walked(t, NULL), b = walked(t, NULL);

    CHECK(memcmp(&a, &b, sizeof a) == 0);
}

DRAWN_TEST(a_step_that_takes_as_long_is_not_told, 6, DRAWN / 4)
{
    mt_walked    found, again = { .seconds = -1 };
    mt_schedule *sch = NULL;
    int          under = 1;

    found = walked(t, NULL);
    CHECK_OK(mt_walk_schedule(&t->walk, &sch));
    REQUIRE(sch != NULL);
    CHECK_OK(mt_walk_run(&t->walk, sch->steps, sch->n, found.seconds, NULL, &again, &under));
    CHECK_EQ(under, 0);
    CHECK(again.seconds == -1);
    CHECK_OK(mt_walk_run(&t->walk, sch->steps, sch->n, nextafter(found.seconds, INFINITY), NULL,
                         &again, &under));
    CHECK_EQ(under, 1);
    CHECK(again.seconds == found.seconds);
    mt_schedule_free(sch);
}

/* Events of a queue stand one behind the other, and are its work. */
DRAWN_TEST(events_are_what_queues_do_in_order, 7, DRAWN / 4)
{
    static const int queues[] = { MT_LANE_COMPUTE, MT_LANE_H2D, MT_LANE_D2H, MT_LANE_SUM,
                                  MT_LANE_OUT, MT_LANE_SPILL };
    static mt_walk_event room[4096];
    mt_walk_events e = { room, 0, 4096 };

    /* a fetch's event lasts as long as the drive needs */
    memset(t->read_s, 0, sizeof t->read_s);
    mt_walked found = walked(t, &e);
    CHECK(e.n > 0 && e.n <= e.cap);
    for (size_t q = 0; q < sizeof queues / sizeof *queues; q++) {
        double end = -INFINITY, work = 0;

        for (int64_t k = 0; k < e.n; k++) {
            if (room[k].row != queues[q])
                continue;
            CHECK(room[k].begin >= end);
            end = room[k].end;
            work += room[k].end - room[k].begin;
        }
        CHECK_NEAR(work, found.busy[queues[q]]);
    }
}

/* ---- the door ---- */

static void refused(const toy *t, const char *why)
{
    mt_schedule *sch = NULL;

    CHECK_FAILS(mt_walk_schedule(&t->walk, &sch), MT_EINVAL, why);
    CHECK(sch == NULL);
}

TEST(numbers_that_contradict_each_other_are_refused)
{
    MADE(t, 3, 1, 1, 1, 2);
    t.item[1] = 3;
    refused(&t, "unit 3 of 3");
    toy_make(&t, 3, 1, 1, 1, 2);
    t.begin[1] = 2, t.begin[2] = 1;
    refused(&t, "end before they begin");
    toy_make(&t, 3, 1, 1, 1, 2);
    t.updated_on[2] = MT_LANE_SUM;
    refused(&t, "unit 2 is updated on lane");
    toy_make(&t, 3, 1, 1, 1, 2);
    t.walk.micro = 9, t.walk.shown = 2;
    refused(&t, "2 of 9 micro-batches");
    toy_make(&t, 3, 1, 1, 1, 2);
    t.walk.depth = 0;
    refused(&t, "depth 0");
    toy_make(&t, 3, 1, 1, 1, 2);
    t.walk.n_lent = 2, t.lent[0] = 1, t.lent[1] = 2;
    refused(&t, "larger than the one before");
    t.gradients[1] = 5, t.lent[1] = 1;
    refused(&t, "fit no buffer");
    toy_make(&t, 3, 1, 1, 1, 2);
    t.weights[1] = 2;
    refused(&t, "fit none of the 2 slots");
}

TEST(another_steps_schedule_is_refused)
{
    mt_schedule *sch = NULL;
    mt_walked    found;
    int          under;

    MADE(t, 3, 1, 1, 1, 2);
    CHECK_OK(mt_walk_schedule(&t.walk, &sch));
    REQUIRE(sch != NULL);
    t.item[0] = 1;
    CHECK_EQ(mt_walk_run(&t.walk, sch->steps, sch->n, INFINITY, NULL, &found, &under), MT_EINVAL);
    CHECK_SAYS("window 0 uses unit 1");
    t.item[0] = 0;
    CHECK_EQ(mt_walk_run(&t.walk, sch->steps, 2, INFINITY, NULL, &found, &under), MT_EINVAL);
    sch->steps[0].unit = 3;
    CHECK_EQ(mt_walk_run(&t.walk, sch->steps, sch->n, INFINITY, NULL, &found, &under), MT_EINVAL);
    CHECK_SAYS("unit 3 of 3");
    mt_schedule_free(sch);
}
