/* test_search.c — searches drawn at random, against every choice tried one after the other. */
#include "check.h"

#include "../../csrc/walk/search.h"

#define UNITS   5
#define WINDOWS (UNITS + 1)
#define KINDS   3
#define MODES   6            /* those that stay on the device, then ON_HOST and ON_DISK */
#define MICROS  2
#define ROWS    6
#define RINGS   2
#define TRACKS  4            /* of a number of micro-batches */
#define LEVELS  (4 * WINDOWS + 1)
#define DRAWN   (UNDER_TSAN ? 10 : 120)

enum { REPLAY, ATTENTION, SELECTIVE, SAVED, ON_HOST, ON_DISK };

/* A search over units of a byte or two, with the arrays that it points to. */
typedef struct toy {
    mt_search in;
    double    of_unit[11][UNITS], device_s[MICROS * UNITS];
    double    forward_s[MICROS * KINDS], host_s[MICROS * KINDS];
    double    backward_s[MICROS * KINDS * MODES], backward_host_s[MICROS * KINDS * MODES];
    double    memory_s[ROWS * MICROS];
    int64_t   kept[MICROS * KINDS * MODES], work[MICROS * KINDS * MODES];
    int64_t   away[MICROS * KINDS * MODES], on_disk[MODES];
    int64_t   weights[UNITS], gradients[UNITS], states[UNITS], none[UNITS];
    int64_t   begin[WINDOWS + 1], leaves[WINDOWS + 1], item[WINDOWS];
    int64_t   piece_begin[UNITS + 1], piece[2 * UNITS];
    int64_t   kind[WINDOWS], learns[WINDOWS], flying[WINDOWS];
    int64_t   micro[MICROS], cached[MICROS], rings[RINGS], tracks[MICROS + 1];
    int64_t   several[ROWS], planes[ROWS], host[ROWS], room[ROWS];
    uint8_t   modes[MICROS * TRACKS * WINDOWS], flags[MICROS * TRACKS * WINDOWS];
    uint8_t   homes[ROWS * UNITS];
} toy;

static double part(unsigned *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    return (*seed >> 8) / (double)(1u << 24);
}

static int64_t below(unsigned *seed, int64_t n)
{
    return (int64_t)(part(seed) * (double)n);
}

/* More that is kept is less to compute again. Kinds 0 and 1 have all modes, others SAVED alone. */
static void draw_costs(toy *t, unsigned *seed)
{
    for (int at = 0; at < MICROS * KINDS; at++) {
        int64_t *kept = t->kept + at * MODES, *work = t->work + at * MODES;
        int64_t *away = t->away + at * MODES;
        double  *s = t->backward_s + at * MODES, longest = 2 + 3 * part(seed);
        int      has = at % KINDS;

        t->forward_s[at] = 0.2 + part(seed);
        t->host_s[at] = part(seed) / 4;
        for (int mode = 0; mode < MODES; mode++) {
            int keeps = mode > SAVED ? REPLAY : mode;

            kept[mode] = mode >= ON_HOST ? 0 : 1 + keeps + below(seed, 4) * keeps;
            s[mode] = keeps == REPLAY ? longest : s[mode - 1] - 0.1 - part(seed) / 4;
            work[mode] = 1 + below(seed, 4);
            away[mode] = mode >= ON_HOST ? 1 + below(seed, 3) : 0;
            t->backward_host_s[at * MODES + mode] = part(seed) / 4;
        }
        for (int mode = 0; mode < MODES; mode++)
            if (has == 2 && mode != SAVED)
                s[mode] = NAN;
    }
}

static void draw_tracks(toy *t, unsigned *seed)
{
    int64_t n = t->in.step.n_windows;

    for (int64_t i = 0; i < t->in.n_micro * TRACKS; i++) {
        uint8_t *modes = t->modes + i * n, *flags = t->flags + i * n;

        for (int64_t w = 0; w < n; w++) {
            modes[w] = t->kind[w] == 2 ? SAVED : REPLAY;
            flags[w] = 0;
            if (i % TRACKS == 0 || t->kind[w] == 2 || below(seed, 2))
                continue;
            flags[w] = 1;
            modes[w] = i % TRACKS == 1 ? ON_HOST : i % TRACKS == 2 ? ON_DISK
                       : (uint8_t)(ON_HOST + below(seed, 2));
        }
    }
}

static void draw_rows(toy *t, unsigned *seed)
{
    for (int64_t row = 0; row < t->in.n_rows; row++) {
        t->several[row] = t->in.n_micro > 1 && below(seed, 2);
        t->planes[row] = below(seed, 12);
        t->host[row] = below(seed, 12);
        t->room[row] = below(seed, 30);
        for (int64_t u = 0; u < t->in.step.n_units; u++)
            t->homes[row * t->in.step.n_units + u] = (uint8_t)below(seed, 6);
    }
}

static int64_t sum_of_slots(const int64_t *of, int64_t n, int64_t ring)
{
    int64_t sizes[2 * UNITS], out[2 * UNITS], total = 0;

    memcpy(sizes, of, (size_t)n * sizeof *sizes);
    n = mt_plan_slots(sizes, n, ring, out);
    while (n > 0)
        total += out[--n];
    return total;
}

/* Windows bind a unit each, and perhaps the last one the first unit again. */
static void toy_draw(toy *t, unsigned *seed)
{
    int64_t    units = 2 + below(seed, UNITS - 1), windows = units + below(seed, 2);
    int        keeps = part(seed) < 0.7;
    mt_search *in = &t->in;

    *t = (toy){ .in = { .step = { .n_windows = windows, .n_units = units, .shown = 8, .depth = 2,
                                  .stagings = 2, .bays = 2, .ahead = 5, .stay = 7, .h2d = 1,
                                  .d2h = 1, .both = 0.8, .busy = 0.6, .write = 0.7, .read = 0.9,
                                  .parts = 1, .rest_s = 0.5 },
                        .n_kinds = KINDS, .n_modes = MODES, .n_micro = keeps ? 2 : 1,
                        .n_rings = RINGS, .n_rows = 1 + below(seed, ROWS), .lends = 3,
                        .keeps = keeps, .early = 4, .padding = 1, .gpus = 1, .cache = 0.1,
                        .byte_s = 0.01, .worth = 1.05 } };
    for (int64_t u = 0; u < units; u++) {
        int fetched = below(seed, 2) == 0;

        for (int i = 0; i < 10; i++)
            t->of_unit[i][u] = part(seed);
        t->weights[u] = 2 + below(seed, 3);
        t->gradients[u] = 1 + below(seed, 2);
        t->states[u] = below(seed, 4);
        t->device_s[u] = t->device_s[units + u] = part(seed) / 4;
        t->piece_begin[u + 1] = t->piece_begin[u] + 2 * fetched;
        for (int i = 0; i < 2 * fetched; i++)
            t->piece[t->piece_begin[u] + i] = 1;
    }
    for (int64_t w = 0; w < windows; w++) {
        t->item[w] = w % units;
        t->begin[w + 1] = w + 1;
        t->leaves[w + 1] = w < units ? w + 1 : units;
        t->kind[w] = w == 0 || w == windows - 1 ? 2 : below(seed, 2);
        t->learns[w] = w > 0 || below(seed, 2);
        t->flying[w] = below(seed, 3);
    }
    if (below(seed, 2))
        memset(t->kind, 0, sizeof t->kind);
    t->micro[0] = 1, t->micro[1] = 3;
    t->rings[0] = 2, t->rings[1] = units > 2 ? units : 3;
    t->on_disk[ON_DISK] = 1;
    for (int64_t m = 0; m <= in->n_micro; m++)
        t->tracks[m] = m * TRACKS;
    t->cached[0] = below(seed, 2);
    in->most_vram = 15 + below(seed, 40), in->most_host = 4 + below(seed, 20);
    draw_costs(t, seed);
    draw_tracks(t, seed);
    draw_rows(t, seed);
#define POINT(name) in->name = t->name
    POINT(device_s), POINT(kind), POINT(learns), POINT(flying), POINT(forward_s);
    POINT(backward_s), POINT(backward_host_s), POINT(kept), POINT(work), POINT(away);
    POINT(on_disk), POINT(micro), POINT(cached), POINT(rings), POINT(tracks);
    POINT(modes), POINT(flags), POINT(homes), POINT(several), POINT(planes), POINT(host);
    POINT(room), POINT(memory_s), POINT(states);
#undef POINT
    in->forward_host_s = t->host_s;
    in->bytes = in->step.weights = t->weights;
    in->step.gradients = t->gradients;
    in->step.lowered = in->step.raised = t->none;
    in->step.units = in->step.again = (mt_walk_list){ t->begin, t->item };
    in->step.leaving = (mt_walk_list){ t->leaves, t->item };
    in->pieces = (mt_walk_list){ t->piece_begin, t->piece };
    in->whole = t->piece_begin[units] > 0;
    in->spared = in->whole ? sum_of_slots(t->weights, units, 2) : 0;
    in->host_s = t->of_unit[0], in->pool_s = t->of_unit[1], in->passing_s = t->of_unit[2];
    in->drive_s = t->of_unit[3], in->drive_weights_s = t->of_unit[4], in->fetch_s = t->of_unit[5];
    in->streamed = t->of_unit[6], in->settled = t->of_unit[7], in->passing = t->of_unit[8];
    in->step.add_s = t->of_unit[9];
    in->step.exchange_s = in->step.network_s = in->step.lost_s = t->of_unit[10];
    in->step.gather_s = in->step.held_s = in->step.spread_s = t->of_unit[10];
}

/* ---- one choice after the other ---- */

/* A track's levels, and the choice that ends with it. */
typedef struct tried {
    const toy *t;
    mt_choice  at;
    mt_track   track;
    mt_level   level[LEVELS];
    uint8_t    modes[LEVELS * WINDOWS];
    int64_t    slots, states;    /* bytes */
} tried;

static void tried_make(tried *c, const toy *t, int row, int m, int track)
{
    int64_t        units = t->in.step.n_units;
    const uint8_t *homes = t->homes + row * units;

    *c = (tried){ .t = t, .at = { .row = row, .micro = m, .track = track } };
    CHECK_OK(mt_search_track(&t->in, m, track, &c->track, c->level, c->modes));
    REQUIRE(c->track.n_levels >= 1 && c->track.n_levels <= LEVELS);
    for (int64_t u = 0; u < units; u++)
        c->states += homes[u] == MT_HOME_ARRIVE ? t->states[u] : 0;
}

static void tried_ring(tried *c, int ring)
{
    const toy     *t = c->t;
    const uint8_t *homes = t->homes + c->at.row * t->in.step.n_units;
    int64_t        sizes[2 * UNITS], n = 0;

    for (int64_t u = 0; u < t->in.step.n_units; u++) {
        if (homes[u] == MT_HOME_VRAM || homes[u] == MT_HOME_ARRIVE)
            continue;
        if (t->piece_begin[u] == t->piece_begin[u + 1] || homes[u] == MT_HOME_DISK_WEIGHTS)
            sizes[n++] = t->weights[u];
        else
            sizes[n++] = 1, sizes[n++] = 1;
    }
    c->at.ring = ring;
    c->slots = sum_of_slots(sizes, n, t->rings[ring]);
}

static int64_t vram_of(const tried *c, int64_t level)
{
    int64_t early = c->states + c->level[level].early, peak = c->level[level].peak;

    return c->t->planes[c->at.row] + c->t->cached[c->at.micro] + c->slots +
           (c->states > 0 && early > peak ? early : peak);
}

static int fits_host(const tried *c)
{
    return c->t->host[c->at.row] + c->track.away <= c->t->in.most_host;
}

static int fits(const tried *c, int64_t level)
{
    return fits_host(c) && c->track.spilled <= c->t->room[c->at.row] &&
           vram_of(c, level) <= c->t->in.most_vram;
}

static mt_walked walked(const tried *c, int64_t level)
{
    const toy *t = c->t;
    mt_walked  found = { 0 };
    int        under = 0;

    CHECK_OK(mt_search_time(&t->in, c->at.micro, t->homes + c->at.row * t->in.step.n_units, 0,
                            t->rings[c->at.ring], c->modes + level * t->in.step.n_windows,
                            INFINITY, &found, &under));
    CHECK(under);
    return found;
}

/* By what an update by way of the device has to be worth. */
static double worth(const tried *c, double seconds)
{
    const mt_search *in = &c->t->in;
    const uint8_t   *homes = in->homes + c->at.row * in->step.n_units;

    return seconds * (memchr(homes, MT_HOME_THROUGH, (size_t)in->step.n_units) ? in->worth : 1);
}

static double bound_of(const tried *c, int64_t level)
{
    mt_choice at = c->at;
    double    seconds = NAN;

    at.level = (int)level;
    CHECK_OK(mt_search_bound(&c->t->in, &at, &seconds));
    return seconds;
}

/* The least of all that the search looks at: of each track the last level that fits; what keeps
 * something away where less is computed again than by tracks before it that keep all. */
static double least_of_row(const toy *t, int row, int m, int ring, tried *c)
{
    double found = INFINITY, again = INFINITY;

    for (int track = 0; track < TRACKS; track++) {
        int64_t level;

        tried_make(c, t, row, m, track);
        tried_ring(c, ring);
        for (level = c->track.n_levels - 1; level >= 0 && !fits(c, level); level--)
            ;
        if (level < 0 || !(c->level[level].backward_s < again))
            continue;
        again = c->track.away == 0 ? c->level[level].backward_s : again;
        double s = worth(c, walked(c, level).seconds);
        found = s < found ? s : found;
        if (c->track.away == 0 && level == c->track.n_levels - 1)
            break;
    }
    return found;
}

static int may_be(const toy *t, int64_t row, int64_t m)
{
    return t->several[row] == (t->micro[m] > 1);
}

/* ---- tests ---- */

TEST(the_best_is_what_trying_all_finds)
{
    unsigned seed = 11;
    int      some = 0;
    toy      t;
    tried    c;

    for (int i = 0; i < DRAWN; i++) {
        mt_choice best = { 0 };
        mt_walked found = { 0 };
        uint8_t   modes[WINDOWS];
        double    want = INFINITY;
        int       any = 0;

        toy_draw(&t, &seed);
        for (int row = 0; row < t.in.n_rows; row++)
            for (int m = 0; m < t.in.n_micro; m++)
                for (int ring = 0; ring < RINGS && may_be(&t, row, m); ring++) {
                    double s = least_of_row(&t, row, m, ring, &c);

                    want = s < want ? s : want;
                }
        CHECK_OK(mt_search_best(&t.in, INFINITY, 20000, &best, modes, &found, &any));
        CHECK_EQ(any, want < INFINITY);
        if (!any)
            continue;
        some++;
        tried_make(&c, &t, best.row, best.micro, best.track);
        tried_ring(&c, best.ring);
        CHECK(fits(&c, best.level));
        CHECK(memcmp(modes, c.modes + best.level * t.in.step.n_windows,
                     (size_t)t.in.step.n_windows) == 0);
        CHECK(walked(&c, best.level).seconds == found.seconds);
        CHECK(worth(&c, found.seconds) == want);
        CHECK_OK(mt_search_best(&t.in, want * (1 - 1e-9), 20000, &best, modes, &found, &any));
        CHECK_EQ(any, 0);
    }
    CHECK(some > DRAWN / 3);
}

TEST(no_choice_takes_less_than_its_bound)
{
    unsigned seed = 12;
    toy      t;
    tried    c;

    for (int i = 0; i < DRAWN / 4; i++) {
        toy_draw(&t, &seed);
        for (int row = 0; row < t.in.n_rows; row++)
            for (int at = 0; at < t.in.n_micro * TRACKS && may_be(&t, row, at / TRACKS); at++) {
                tried_make(&c, &t, row, at / TRACKS, at % TRACKS);
                tried_ring(&c, i % RINGS);
                for (int64_t level = 0; level < c.track.n_levels; level++)
                    CHECK(bound_of(&c, level) <= walked(&c, level).seconds * (1 + 1e-9));
            }
    }
}

/* Each level keeps more and computes less again; none is smaller than the one before. */
TEST(levels_rise)
{
    unsigned seed = 13;
    toy      t;
    tried    c;

    for (int i = 0; i < DRAWN; i++) {
        toy_draw(&t, &seed);
        for (int at = 0; at < t.in.n_micro * TRACKS; at++) {
            tried_make(&c, &t, 0, at / TRACKS, at % TRACKS);
            for (int64_t level = 0; level < c.track.n_levels; level++) {
                mt_memory_of of;

                CHECK_OK(mt_search_memory(&t.in, c.at.micro,
                                          c.modes + level * t.in.step.n_windows, &of));
                CHECK_EQ(of.away, c.track.away);
                CHECK_EQ(of.spilled, c.track.spilled);
                CHECK(c.level[level].backward_s >= c.track.least_s - 1e-9 ||
                      c.track.away > 0);
                if (level == 0)
                    continue;
                CHECK(c.level[level].peak >= c.level[level - 1].peak);
                CHECK(c.level[level].early >= c.level[level - 1].early);
                CHECK(c.level[level].backward_s < c.level[level - 1].backward_s);
            }
        }
    }
}

/* With so much of one memory something fits, and with a byte less nothing does. */
TEST(needs_are_the_least_that_fits)
{
    unsigned seed = 14;
    int      some = 0;
    toy      t;

    for (int i = 0; i < DRAWN; i++) {
        int64_t  spilled[ROWS * MICROS];
        mt_needs needs, other;

        toy_draw(&t, &seed);
        t.in.most_vram /= 2;
        CHECK_OK(mt_search_needs(&t.in, spilled, &needs));
        CHECK(may_be(&t, needs.least.row, needs.least.micro));
        for (int host = 0; host < 2; host++) {
            int64_t *most = host ? &t.in.most_host : &t.in.most_vram, had = *most;
            int64_t  least = host ? needs.host : needs.vram;

            if (least < 0)
                continue;
            some++;
            for (int less = 0; less < 2; less++) {
                mt_choice at;
                mt_walked found;
                uint8_t   modes[WINDOWS];
                int       any = 0, fit = 0;

                *most = least - less;
                CHECK_OK(mt_search_best(&t.in, INFINITY, 20000, &at, modes, &found, &any));
                CHECK_EQ(any, !less);
                CHECK_OK(mt_search_needs(&t.in, spilled, &other));
                for (int64_t k = 0; k < t.in.n_rows * t.in.n_micro; k++)
                    fit |= spilled[k] >= 0;
                CHECK_EQ(fit, !less);
            }
            *most = had;
        }
    }
    CHECK(some > DRAWN / 3);
}
