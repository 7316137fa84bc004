/* test_pieces.c — the executable form of core/pieces.h: properties of cuts of random units. */
#include "check.h"
#include "toy.h"

#include "../../csrc/core/pieces.h"

CLOSES(mt_pieces, mt_pieces_free(*x))

#define PARAMS 9
#define BIG    70000             /* elements */
#define HI     (1u << MT_PLANE_HI)
#define GRAD   (1u << MT_PLANE_GRAD)

/* Of a unit, cut once. */
typedef struct sheet {
    toy           t;
    int           unit;
    mt_param_desc d[PARAMS];
    unsigned      planes[PARAMS];
    mt_cut        how;
    mt_pieces    *p;
    char         *mem;           /* of a piece */
    mt_part      *parts;
} sheet;

static void sheet_open(sheet *s, uint64_t seed)
{
    static const mt_dtype types[] = { MT_BF16, MT_F32, MT_F16, MT_F64 };

    memset(s, 0, sizeof *s);
    toy_open(&s->t, 0, 1, 0);
    for (int i = 0; i < PARAMS; i++) {
        int64_t n = random_below(&seed, 3) == 0 ? random_below(&seed, BIG)
                                                : random_below(&seed, 700);

        s->d[i] = (mt_param_desc){ types[random_below(&seed, 4)], n, 1 };
        s->planes[i] = (unsigned)random_below(&seed, 4) == 0 ? 0
                     : (random_below(&seed, 2) ? HI : 0) |
                       (random_below(&seed, 3) ? MT_STATE_PLANES : 0) |
                       (random_below(&seed, 2) ? GRAD : 0);
    }
    REQUIRE_OK(mt_store_add(s->t.store, "cut", s->d, PARAMS, &s->unit));
    REQUIRE_OK(mt_store_set_states(s->t.store, s->unit, (mt_states)random_below(&seed, 4)));
    s->how = (mt_cut){ .planes = s->planes, .align = seed % 2 ? MT_PART_ALIGN : 4096,
                       .budget = (size_t)(32 + random_below(&seed, 60)) * 4096,
                       .grain = 128 << random_below(&seed, 6), .most = seed % 3 ? 0 : 3,
                       .spacing = seed % 5 ? MT_PART_ALIGN : 4096 };
    REQUIRE_OK(mt_pieces_cut(s->t.store, s->unit, &s->how, &s->p));
    REQUIRE(posix_memalign((void **)&s->mem, 4096, s->how.budget) == 0);
    REQUIRE((s->parts = calloc((size_t)s->p->most + 1, sizeof *s->parts)) != NULL);
}

static void sheet_close(sheet *s)
{
    mt_pieces_free(s->p);
    free(s->mem);
    free(s->parts);
    toy_close(&s->t);
}

static size_t bytes_of(const sheet *s, int param, int plane, int64_t n)
{
    return mt_store_plane_bytes(s->t.store, s->unit, param, (mt_plane)plane, n);
}

/* Marks the part's bytes: nothing else is there, and all of it in the piece. */
static void mark(const sheet *s, const mt_piece *piece, const mt_part *k, unsigned char *taken)
{
    for (int p = 0; p < MT_PLANE_COUNT; p++) {
        size_t at = (size_t)((char *)k->at[p] - s->mem), n = bytes_of(s, k->param, p, k->n);
        int    met = 0;

        CHECK_EQ(k->at[p] != NULL, (s->planes[k->param] >> p & 1) && n > 0);
        if (k->at[p] == NULL)
            continue;
        CHECK_EQ(at % MT_PART_ALIGN, 0);
        if (p == MT_PLANE_HI && k->from == 0)
            CHECK_EQ(at % s->how.spacing, 0);
        REQUIRE(at + n <= piece->bytes);
        CHECK_EQ(at < piece->weights, p == MT_PLANE_HI);
        for (size_t i = 0; i < n; i++)
            met += taken[at + i]++;
        CHECK_EQ(met, 0);
    }
}

static void check_piece(const sheet *s, int number, int64_t *next)
{
    const mt_piece *piece = &s->p->piece[number];
    FREED unsigned char *taken = calloc(1, s->how.budget + 1);
    int             states = 0;

    REQUIRE(taken != NULL && piece->n > 0 && piece->n <= s->p->most);
    CHECK(piece->bytes <= s->how.budget && piece->hi_bytes <= piece->weights);
    CHECK_EQ(piece->weights % s->how.align + piece->bytes % s->how.align, 0);
    CHECK(s->how.most == 0 || piece->n <= s->how.most);
    mt_pieces_at(s->p, number, s->mem, s->parts);
    for (int i = 0; i < piece->n; i++) {
        const mt_part *k = &s->parts[i];

        CHECK_EQ(k->from, next[k->param]);           /* in order, without a gap */
        CHECK(k->n > 0);
        CHECK_EQ(k->from % s->how.grain, 0);
        next[k->param] = k->from + k->n;
        mark(s, piece, k, taken);
        states += (s->planes[k->param] & ~HI) != 0;
    }
    CHECK(states == 0 || states == piece->n);
}

TEST(every_element_is_in_one_part_of_one_piece)
{
    for (uint64_t seed = 1; seed <= 200; seed++) {
        int64_t next[PARAMS] = { 0 };

        CLOSED_BY(sheet_close) sheet s;
        sheet_open(&s, seed);
        for (int i = 0; i < s.p->n; i++)
            check_piece(&s, i, next);
        for (int i = 0; i < PARAMS; i++) {
            size_t some = 0;

            for (int p = 0; p < MT_PLANE_COUNT; p++)
                some += s.planes[i] >> p & 1 ? bytes_of(&s, i, p, 1) : 0;
            CHECK_EQ(next[i], some > 0 ? s.d[i].numel : 0);
        }
    }
}

/* What does not fit any more goes to the next piece: one grain more would have been too much. */
TEST(pieces_are_full)
{
    mt_param_desc d = { MT_BF16, 100000, 1 };
    unsigned      planes = HI | MT_STATE_PLANES;
    mt_cut        how = { &planes, 65536, MT_PART_ALIGN, 128, 0, MT_PART_ALIGN };
    const size_t  grain = 128 * (2 + 2 + 1 + 1) + 8;     /* with its scales */

    TOY(t, 0, 1, 0);
    int unit = store_add(t.store, "full", &d, 1);
    REQUIRE_OK(mt_store_set_states(t.store, unit, MT_STATES_8BIT));
    OPENED(mt_pieces, p, mt_pieces_cut(t.store, unit, &how, &p));
    for (int i = 0; i + 1 < p->n; i++) {
        CHECK(p->piece[i].bytes + 5 * MT_PART_ALIGN + grain > how.budget);
        CHECK_EQ(p->piece[i].n, 1);
    }
    mt_pieces_free(NULL);
}

/* So a stretch of plane HI is one copy. */
TEST(weights_lie_as_in_their_plane)
{
    mt_param_desc d[3] = { { MT_BF16, 300, 1 }, { MT_F32, 5000, 1 }, { MT_BF16, 7, 1 } };
    unsigned      planes[3] = { HI | MT_STATE_PLANES, HI | MT_STATE_PLANES, HI | MT_STATE_PLANES };
    mt_cut        how = { planes, 65536, 4096, 4096, 0, MT_PART_ALIGN };

    TOY(t, 0, 1, 0);
    int unit = store_add(t.store, "weights", d, 3);
    OPENED(mt_pieces, p, mt_pieces_cut(t.store, unit, &how, &p));
    CHECK_EQ(p->n, 2);
    for (int i = 0; i < p->n; i++)
        for (int k = p->piece[i].first; k < p->piece[i].first + p->piece[i].n; k++) {
            const mt_stretch *a = &p->part[p->piece[i].first], *b = &p->part[k];

            CHECK_EQ(b->offset[MT_PLANE_HI],
                     mt_store_offset(t.store, unit, b->param) +
                     mt_store_plane_bytes(t.store, unit, b->param, MT_PLANE_HI, b->from) -
                     mt_store_offset(t.store, unit, a->param) -
                     mt_store_plane_bytes(t.store, unit, a->param, MT_PLANE_HI, a->from));
        }
}

TEST(a_budget_below_a_grain_is_refused)
{
    mt_param_desc d = { MT_F32, 5000, 1 };
    unsigned      planes = MT_STATE_PLANES;
    mt_cut        how = { &planes, 4096, MT_PART_ALIGN, 1024, 0, MT_PART_ALIGN };
    mt_pieces    *p = NULL;

    TOY(t, 0, 1, 0);
    int unit = store_add(t.store, "layers.0", &d, 1);
    CHECK_EQ(mt_pieces_cut(t.store, unit, &how, &p), MT_EINVAL);
    CHECK_SAYS("unit layers.0: 4096 bytes hold no 1024 elements of parameter 0");
    CHECK(p == NULL);
}

TEST(host_addresses_are_the_parts)
{
    mt_param_desc d = { MT_BF16, 1000, 1 };
    mt_part       k = { .from = 256, .n = 300 };
    void         *all, *at;
    size_t        bytes;

    TOY(t, 0, 1, 0);
    int unit = store_add(t.store, "host", &d, 1);
    REQUIRE_OK(mt_store_set_states(t.store, unit, MT_STATES_8BIT));
    all = store_at(t.store, unit, 0, MT_PLANE_SCALE);
    CHECK_OK(mt_part_host(t.store, unit, &k, MT_PLANE_SCALE, &at, &bytes));
    CHECK_EQ((char *)at - (char *)all, 2 * 8);
    CHECK_EQ(bytes, 3 * 8);
    CHECK_EQ(mt_part_host(t.store, unit, &k, MT_PLANE_MASTER, &at, &bytes), MT_EINVAL);
}
