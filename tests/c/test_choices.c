/* test_choices.c — what may be chosen, and gaps of what was measured, drawn at random. */
#include "check.h"

#include "../../csrc/walk/gaps.h"
#include "../../csrc/walk/search.h"

#include <string.h>

#define UNITS   7
#define WINDOWS 12
#define MODES   15           /* those that stay on the device, in host memory, in a file */
#define BASES   3
#define SLICES  40
#define DRAWN   (UNDER_TSAN ? 20 : 2000)

static int64_t below(unsigned *seed, int64_t n)
{
    *seed = *seed * 1664525u + 1013904223u;
    return (int64_t)((double)(*seed >> 8) / (double)(1u << 24) * (double)n);
}

static uint8_t modes[MT_TRACKS_MOST * WINDOWS], flags[MT_TRACKS_MOST * WINDOWS];

TEST(tracks_have_modes_that_their_windows_have)
{
    unsigned seed = 21;

    for (int i = 0; i < DRAWN; i++) {
        double    s[3 * MODES];
        int64_t   kind[WINDOWS], learns[WINDOWS], linked[MODES] = { 0 }, scratch[2 * WINDOWS], n;
        mt_search in = { .step.n_windows = WINDOWS, .n_kinds = 3, .n_modes = MODES, .kind = kind,
                         .learns = learns, .backward_s = s, .is_linked = linked };

        linked[MT_KEEP_LINKED] = 1;
        for (int k = 0; k < 3; k++)          /* all modes, none that links, what stays alone */
            for (int mode = 0; mode < MODES; mode++)
                s[k * MODES + mode] = (k == 1 && mode % 5 == 4) || (k == 2 && mode != MT_KEEP_SAVED)
                                          ? NAN : 1.0 + (double)below(&seed, 9);
        for (int w = 0; w < WINDOWS; w++)
            kind[w] = below(&seed, 3), learns[w] = below(&seed, 4) > 0;
        n = mt_search_tracks(&in, 0, -1, i & 1, i & 2, modes, flags, scratch);
        REQUIRE(n >= 1 && n <= MT_TRACKS_MOST);
        for (int64_t at = 0; at < n * WINDOWS; at++) {
            CHECK(!isnan(s[kind[at % WINDOWS] * MODES + modes[at]]));
            CHECK(at >= WINDOWS || (modes[at] <= MT_KEEP_SAVED && flags[at] == 0));
            CHECK((i & 1) || modes[at] < 10);
        }
    }
}

TEST(units_go_to_disk_within_its_room)
{
    unsigned seed = 22;

    for (int i = 0; i < DRAWN; i++) {
        int64_t    order[UNITS], trained[UNITS], states[UNITS], weights[UNITS], files[2 * UNITS];
        int64_t    padding[UNITS], several[] = { 0, 1 }, lack[2 * BASES], scratch[3 * UNITS], n;
        uint8_t    base[BASES * UNITS], homes[4 * BASES * UNITS], some[4 * BASES];
        mt_placing in = { .n_units = UNITS, .n_order = UNITS, .n_base = BASES, .n_several = 2,
                          .order = order, .trained = trained, .states = states,
                          .weights = weights, .files = files, .padding = padding, .base = base,
                          .several = several, .lack = lack, .through = below(&seed, 3),
                          .room = below(&seed, 300) - 1, .memory = 10, .feed = 7, .keeps = i & 1,
                          .both = 100, .through_rate = (double)below(&seed, 3), .host_rate = 2 };

        for (int u = 0; u < UNITS; u++) {
            order[u] = (u + i) % UNITS, padding[u] = below(&seed, 5), weights[u] = below(&seed, 50);
            trained[u] = 10 * below(&seed, 3), states[u] = below(&seed, 50);
            files[u] = padding[u] + 20 * below(&seed, 3);
            files[UNITS + u] = files[u] + below(&seed, 40);
        }
        for (int k = 0; k < BASES * UNITS; k++)
            base[k] = (uint8_t)below(&seed, 3);
        for (int k = 0; k < 2 * BASES; k++)
            lack[k] = below(&seed, 300) - 100;
        n = mt_search_homes(&in, homes, some, scratch);
        REQUIRE(n <= 4 * BASES);
        for (int64_t row = 0; row < n; row++) {
            int64_t filed = 0;

            for (int u = 0; u < UNITS; u++)
                filed += homes[row * UNITS + u] == MT_HOME_DISK ? files[u]
                         : homes[row * UNITS + u] == MT_HOME_DISK_WEIGHTS ? files[UNITS + u] : 0;
            CHECK(filed <= (in.room < 0 ? 0 : in.room));
        }
    }
}

static int in_order(const void *a, const void *b)
{
    const mt_slice *x = a, *y = b;

    return x->lane != y->lane ? (x->lane > y->lane) - (x->lane < y->lane)
                              : (x->begin > y->begin) - (x->begin < y->begin);
}

TEST(all_of_computes_idle_time_has_a_cause)
{
    unsigned seed = 23;

    for (int i = 0; i < DRAWN; i++) {
        int64_t  busy[MT_LANE_COUNT], idle[MT_LANE_COUNT + 1], free[MT_LANE_COUNT] = { 0 }, all = 0;
        mt_slice slice[SLICES];

        for (int k = 0; k < SLICES; k++) {       /* a lane does one thing at a time */
            int64_t lane = below(&seed, MT_LANE_COUNT), begin = free[lane] + below(&seed, 90000);

            free[lane] = begin + below(&seed, 400000);
            slice[k] = (mt_slice){ lane, lane == MT_LANE_HAND ? MT_WORK_WAIT
                                         : 1 + below(&seed, MT_WORK_COUNT - 2),
                                   below(&seed, 4) - 1, begin, free[lane] };
        }
        qsort(slice, SLICES, sizeof *slice, in_order);
        mt_gaps(slice, SLICES, 50000, 900000, busy, idle);
        for (int lane = 0; lane <= MT_LANE_COUNT; lane++) {
            CHECK(idle[lane] >= 0);
            all += idle[lane];
        }
        CHECK(busy[MT_LANE_COMPUTE] + all >= 850000);
    }
}
