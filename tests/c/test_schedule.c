/* test_schedule.c — schedules as text, and the rules of schedule.h on random traces. */
#include "check.h"
#include "numbers.h"

#include "../../csrc/core/schedule.h"

CLOSES(mt_schedule, mt_schedule_free(*x))

#define SMALL 128
#define LARGE 300

/* Four layers between an embedding and a head that need a larger slot. */
enum { EMBED, L0, L1, L2, L3, HEAD, UNITS };
static const size_t      unit_bytes[UNITS] = { LARGE, 100, 100, SMALL, 100, 280 };
static const char *const names[UNITS] = { "embed",    "layers.0", "layers.1",
                                          "layers.2", "layers.3", "head" };
static const char *const numbered[] = { "unit 0", "unit 1" };

/* Forward; then backward, in which the embedding needs no weights to make its gradient. */
static int64_t step_trace(int *t)
{
    int64_t n = 0;

    for (int u = EMBED; u <= HEAD; u++)
        t[n++] = u;
    for (int u = HEAD; u > EMBED; u--)
        t[n++] = u;
    return n;
}

static void check_text(int n_small, const char *want)
{
    int     trace[2 * UNITS];
    int64_t n = step_trace(trace);
    size_t  slots[8];
    char    text[4096];

    for (int i = 0; i < n_small; i++)
        slots[i] = SMALL;
    slots[n_small] = LARGE;
    OPENED(mt_schedule, s,
           mt_schedule_build(trace, n, unit_bytes, UNITS, slots, n_small + 1, &s));
    REQUIRE(s != NULL);
    CHECK_EQ(mt_schedule_print(s, names, text, sizeof text), strlen(want));
    CHECK_STR(text, want);
}

/* Two slots: a slot's next copy stands behind its last use, and has one compute to hide behind. The
 * last two layers are still there when backward begins. */
TEST(two_slots_for_layers_as_text)
{
    check_text(2, "fetch embed        -> slot 2\n"
                  "fetch layers.0     -> slot 0\n"
                  "fetch layers.1     -> slot 1\n"
                  "compute embed      in slot 2\n"
                  "compute layers.0   in slot 0\n"
                  "fetch layers.2     -> slot 0\n"
                  "compute layers.1   in slot 1\n"
                  "fetch layers.3     -> slot 1\n"
                  "fetch head         -> slot 2\n"
                  "compute layers.2   in slot 0\n"
                  "compute layers.3   in slot 1\n"
                  "compute head       in slot 2\n"
                  "compute head       in slot 2\n"
                  "compute layers.3   in slot 1\n"
                  "fetch layers.1     -> slot 1\n"
                  "compute layers.2   in slot 0\n"
                  "fetch layers.0     -> slot 0\n"
                  "compute layers.1   in slot 1\n"
                  "compute layers.0   in slot 0\n");
}

/* Units 0 to 3 share two slots, 4 and 5 another. The fetch of 2 must wait for that of 5, needed
 * before it; by then both 0 and 1 have been used. */
TEST(of_units_never_needed_again_the_one_idle_for_longest_gives_way)
{
    const int     trace[] = { 0, 1, 4, 5, 2, 2 };
    const size_t  bytes[] = { 8, 8, 8, 8, 16, 16 }, slots[] = { 8, 8, 16 };

    OPENED(mt_schedule, s, mt_schedule_build(trace, 6, bytes, 6, slots, 3, &s));
    for (int64_t i = 0; i < s->n; i++)
        if (s->steps[i].kind == MT_FETCH && s->steps[i].unit == 2)
            CHECK_EQ(s->steps[i].slot, 0);
}

TEST(empty_trace_has_no_steps)
{
    char text[8] = "before";

    OPENED(mt_schedule, s, mt_schedule_build(NULL, 0, NULL, 0, NULL, 0, &s));
    REQUIRE(s != NULL);
    CHECK_EQ(s->n, 0);
    CHECK_EQ(mt_schedule_print(s, numbered, text, sizeof text), 0);
    CHECK_STR(text, "");
    mt_schedule_free(NULL);
}

TEST(unit_larger_than_every_slot_is_refused_with_numbers)
{
    const int     trace[] = { 0, 1 };
    const size_t  bytes[] = { 8, 5000 }, slots[] = { 16, 4096, 64 };
    mt_schedule  *s = NULL;

    CHECK_EQ(mt_schedule_build(trace, 2, bytes, 2, slots, 3, &s), MT_EINVAL);
    CHECK(s == NULL);
    CHECK_SAYS("unit 1");
    CHECK_SAYS("5000");
    CHECK_SAYS("4096");
    CHECK_FAILS(mt_schedule_build(trace, 1, bytes, 2, NULL, 0, &s), MT_EINVAL, "0 slots");
}

TEST(units_that_are_not_there_are_refused)
{
    const int     unit = 1, below = -1;
    const size_t  bytes = 8;
    mt_schedule  *s = NULL;

    CHECK_FAILS(mt_schedule_build(&unit, 1, &bytes, 1, &bytes, 1, &s), MT_EINVAL, "unit 1 of 1");
    CHECK_EQ(mt_schedule_build(&below, 1, &bytes, 1, &bytes, 1, &s), MT_EINVAL);
    CHECK(s == NULL);
}

TEST(text_is_cut_at_cap_and_tells_its_length)
{
    const int     trace = 0;
    const size_t  bytes = 8;
    char          whole[256], cut[256];

    OPENED(mt_schedule, s, mt_schedule_build(&trace, 1, &bytes, 1, &bytes, 1, &s));
    size_t len = mt_schedule_print(s, numbered, whole, sizeof whole);
    CHECK_EQ(len, strlen(whole));
    CHECK_EQ(mt_schedule_print(s, numbered, NULL, 0), len);
    for (size_t cap = 1; cap <= len + 1; cap++) {
        memset(cut, '#', sizeof cut);
        CHECK_EQ(mt_schedule_print(s, numbered, cut, cap), len);
        CHECK_EQ(strlen(cut), cap - 1);
        CHECK(strncmp(cut, whole, cap - 1) == 0 && cut[cap] == '#');
    }
}

/* ---- the rules, on random traces --------------------------------------------------------- */

enum { MAX_UNITS = 12, MAX_SLOTS = 10, MAX_TRACE = 120 };

typedef struct problem {
    int     trace[MAX_TRACE];
    int64_t n;
    size_t  unit_bytes[MAX_UNITS], slot_bytes[MAX_SLOTS];
    int     n_units, n_slots;
} problem;

static uint64_t rng_state;

static int below(int n)
{
    return (int)random_below(&rng_state, n);
}

/* Half of the marks repeat or step beside the one before, as real steps do. */
static void make_problem(problem *p, uint64_t seed)
{
    int unit = 0;

    rng_state = (seed + 1) * 0x9E3779B97F4A7C15u;
    p->n_units = 1 + below(MAX_UNITS);
    p->n_slots = 1 + below(MAX_SLOTS);
    p->n = below(MAX_TRACE + 1);
    for (int i = 0; i < p->n_slots; i++)
        p->slot_bytes[i] = (size_t[]){ 64, 64, 128, 256 }[i == 0 ? 3 : below(4)];
    for (int i = 0; i < p->n_units; i++)
        p->unit_bytes[i] = (size_t[]){ 0, 60, 64, 100, 256 }[below(5)];
    for (int64_t i = 0; i < p->n; i++) {
        unit = below(2) ? below(p->n_units) : (unit + below(3) + p->n_units - 1) % p->n_units;
        p->trace[i] = unit;
    }
}

static size_t class_of(const problem *p, int unit)
{
    size_t best = 0;
    for (int i = 0; i < p->n_slots; i++)
        if (p->slot_bytes[i] >= p->unit_bytes[unit] && (best == 0 || p->slot_bytes[i] < best))
            best = p->slot_bytes[i];
    return best;
}

static int slots_of_class(const problem *p, int unit)
{
    int n = 0;
    for (int i = 0; i < p->n_slots; i++)
        n += p->slot_bytes[i] == class_of(p, unit);
    return n;
}

static int64_t ahead_any(const mt_schedule *s, int64_t i, mt_step_kind kind)
{
    while (i < s->n && s->steps[i].kind != kind)
        i++;
    return i;
}

/* The next step of this kind for the unit, from step i on; s->n when there is none. */
static int64_t ahead(const mt_schedule *s, int64_t i, mt_step_kind kind, int unit)
{
    while (i < s->n && !(s->steps[i].kind == kind && s->steps[i].unit == unit))
        i++;
    return i;
}

static int count(const mt_schedule *s, mt_step_kind kind, int unit)
{
    int n = 0;
    for (int64_t i = 0; i < s->n; i++)
        n += s->steps[i].kind == kind && s->steps[i].unit == unit;
    return n;
}

/* Without its copies, a schedule is its trace. */
static void check_follows_trace(const problem *p, const mt_schedule *s)
{
    int64_t at = 0;

    for (int64_t i = 0; i < s->n; i++) {
        const mt_step *e = &s->steps[i];
        if (e->kind != MT_COMPUTE)
            continue;
        CHECK(at < p->n && p->trace[at] == e->unit);
        at++;
    }
    CHECK_EQ(at, p->n);
}

/* The FETCH at step i, into a slot that held `old` (-1: nothing) before. */
static void check_fetch(const problem *p, const mt_schedule *s, int64_t i, int old)
{
    const mt_step *e = &s->steps[i];
    int64_t        use = ahead(s, i, MT_COMPUTE, e->unit), k = i;

    CHECK_EQ(p->slot_bytes[e->slot], class_of(p, e->unit));
    CHECK(use < s->n);                                           /* no copy for nothing */
    CHECK(old < 0 || use < ahead(s, i, MT_COMPUTE, old));        /* nobody needed sooner went */
    for (int64_t j = i + 1; j < use; j++)                        /* in the order of need */
        if (s->steps[j].kind == MT_FETCH)
            CHECK(ahead(s, j, MT_COMPUTE, s->steps[j].unit) > use);

    while (k >= 0 && s->steps[k].kind != MT_COMPUTE)             /* behind COMPUTE k: in its slot */
        k--;                                                     /* for k + 1 if it is the one */
    if (k >= 0 && s->steps[k].slot == e->slot && ahead_any(s, i, MT_COMPUTE) == use)
        CHECK_EQ(slots_of_class(p, e->unit), 1);
}

static void check_slots(const problem *p, const mt_schedule *s)
{
    int holds[MAX_SLOTS];

    memset(holds, -1, sizeof holds);
    for (int64_t i = 0; i < s->n; i++) {
        const mt_step *e = &s->steps[i];
        if (e->kind == MT_COMPUTE) {
            CHECK_EQ(holds[e->slot], e->unit);
            continue;
        }
        for (int j = 0; j < p->n_slots; j++)
            CHECK(holds[j] != e->unit);
        check_fetch(p, s, i, holds[e->slot]);
        holds[e->slot] = e->unit;
    }
}

/* As many slots as units in each class: then nothing comes twice. */
static void check_fetched_once_where_all_fit(const problem *p, const mt_schedule *s)
{
    for (int u = 0; u < p->n_units; u++) {
        int units = 0;
        for (int v = 0; v < p->n_units; v++)
            units += class_of(p, v) == class_of(p, u);
        if (slots_of_class(p, u) >= units)
            CHECK_EQ(count(s, MT_FETCH, u), count(s, MT_COMPUTE, u) > 0);
    }
}

TEST(rules_hold_for_random_traces)
{
    static problem p;

    for (uint64_t seed = 0; seed < 3000 && atomic_load(&check_failures) == 0; seed++) {
        make_problem(&p, seed);
        OPENED(mt_schedule, s, mt_schedule_build(p.trace, p.n, p.unit_bytes, p.n_units,
                                                 p.slot_bytes, p.n_slots, &s));
        REQUIRE(s != NULL);
        check_follows_trace(&p, s);
        check_slots(&p, s);
        check_fetched_once_where_all_fit(&p, s);
        if (atomic_load(&check_failures) != 0)
            fprintf(stderr, "  seed %llu\n", (unsigned long long)seed);
    }
}

/* Copies of a plain cache that fetches at the moment of need and overwrites what is needed last:
 * no schedule has fewer. */
static int64_t fewest_fetches(const problem *p)
{
    int     holds[MAX_SLOTS], n_slots = p->n_slots;
    int64_t n = 0;

    memset(holds, -1, sizeof holds);
    for (int64_t i = 0; i < p->n; i++) {
        int     unit = p->trace[i], best = -1;
        int64_t best_at = -1;
        for (int j = 0; j < n_slots && best_at != INT64_MAX; j++) {
            int64_t at = i;
            while (holds[j] >= 0 && at < p->n && p->trace[at] != holds[j])
                at++;
            at = holds[j] == unit ? INT64_MAX : holds[j] < 0 ? p->n + 1 : at;
            if (at > best_at) {
                best = j;
                best_at = at;
            }
        }
        n += holds[best] != unit;
        holds[best] = unit;
    }
    return n;
}

/* What looking ahead may cost: fetching early decides before all is known. Forward and backward,
 * the case that counts, costs nothing. */
TEST(forward_and_backward_fetch_no_more_than_the_optimum)
{
    static problem p;

    for (int units = 1; units <= MAX_UNITS; units++) {
        for (int slots = 2; slots <= MAX_SLOTS; slots++) {
            int64_t n = 0;

            p = (problem){ .n_units = units, .n_slots = slots, .n = 2 * units };
            for (int i = 0; i < slots; i++)
                p.slot_bytes[i] = 8;
            for (int i = 0; i < units; i++)
                p.trace[i] = p.trace[2 * units - 1 - i] = i;
            OPENED(mt_schedule, s, mt_schedule_build(p.trace, p.n, p.unit_bytes, units,
                                                     p.slot_bytes, slots, &s));
            for (int u = 0; u < units; u++)
                n += count(s, MT_FETCH, u);
            CHECK_EQ(n, fewest_fetches(&p));
        }
    }
}
