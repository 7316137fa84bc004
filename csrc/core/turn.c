/* turn.c — what ranks say of their turns, and the words in which verdicts are. */
#include "turn.h"

#include "clock.h"
#include "forks.h"
#include "share.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define LOOK_MS  100
#define TOLD_NS  UINT64_C(60000000000)
/* A turn has a word of its own among the last UNITS units that were opened, TURNS of each. */
#define UNITS   UINT64_C(512)
#define TURNS   UINT64_C(64)

/* Of a turn: which meeting it is behind, how many units were opened since, which of the unit's. */
#define MEETING UINT64_C(40)
#define UNIT    UINT64_C(12)

/* A rank's in the share. Written by it alone: about before turn. */
typedef struct said {
    _Atomic uint64_t turn, about;
    _Atomic uint64_t away;               /* 1 + the meetings before; 0: it is not */
    char             unused[40];         /* a line of the processors' caches each */
} said;

typedef struct table {
    _Atomic uint64_t verdicts[UNITS * TURNS];   /* turn << 1, and whether it is in step */
    said             ranks[];
} table;

struct mt_turns {
    mt_store       *store;
    void          (*warn)(const char *text);
    mt_share       *share;
    table          *table;
    size_t          bytes;
    int             ms, me, n_mates;
    int            *mates;               /* [n_mates] ranks, in order */
    uint64_t       *late;                /* [n_mates] the last turn at which it was given up */
    uint64_t        turn;
    int             unit;                /* of the turn; -1: none yet since the meeting */
    mt_turns_stats  stats;
};

/* ---- open and close ----------------------------------------------------------------------- */

static mt_status map_table(mt_turns *t)
{
    mt_range  range;
    mt_status st;

    MT_TRY(mt_share_take(t->share, t->bytes, &range));
    t->table = mmap(NULL, t->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (t->table == MAP_FAILED) {
        t->table = NULL;
        return MT_FAIL(MT_ENOMEM, "turns: %zu bytes: %s", t->bytes, strerror(errno));
    }
    mt_forks_private(t->table, t->bytes);
    if (mt_share_map(&range, t->table, 0) != 0)
        return MT_FAIL(MT_ENOMEM, "turns: %zu bytes of shared memory: %s", t->bytes,
                       strerror(errno));
fail:
    return st;
}

mt_status mt_turns_open(const mt_context *cx, int ms, mt_turns **out)
{
    int       ranks = mt_share_ranks(cx->share);
    size_t    page = (size_t)sysconf(_SC_PAGESIZE);
    mt_turns *t;
    mt_status st;

    MT_TRY(MT_MAKE(t, 1, "turns"));
    *t = (mt_turns){ .store = cx->store, .warn = cx->warn, .share = cx->share, .ms = ms, .unit = -1,
                     .bytes = (sizeof(table) + (size_t)ranks * sizeof(said) + page - 1) /
                              page * page,
                     .stats = { .rank = -1 } };
    MT_TRY(MT_MAKE(t->mates, ranks, "turns"));
    MT_TRY(MT_MAKE(t->late, ranks, "turns"));
    for (int rank = 0; rank < ranks; rank++) {
        if (mt_share_speaker(t->share, rank) != rank)
            continue;
        if (rank == mt_share_rank(t->share))
            t->me = t->n_mates;
        t->mates[t->n_mates++] = rank;
    }
    MT_TRY(map_table(t));
    *out = t;
    return MT_OK;

fail:
    mt_turns_close(t);
    return st;
}

void mt_turns_close(mt_turns *t)
{
    if (t == NULL)
        return;
    if (t->table != NULL) {
        mt_forks_shared(t->table);
        munmap(t->table, t->bytes);
    }
    free(t->mates);
    free(t->late);
    free(t);
}

int mt_turns_mates(const mt_turns *t)
{
    return t->n_mates;
}

int mt_turns_place(const mt_turns *t)
{
    return t->me;
}

/* ---- verdicts ----------------------------------------------------------------------------- */

static said *of_mate(const mt_turns *t, int mate)
{
    return &t->table->ranks[t->mates[mate]];
}

static _Atomic uint64_t *verdict_of(const mt_turns *t)
{
    return &t->table->verdicts[(t->turn >> UNIT) % UNITS * TURNS + t->turn % TURNS];
}

/* 1, 0; -1: there is none yet. */
static int given(const mt_turns *t)
{
    uint64_t found = atomic_load(verdict_of(t));

    return found >> 1 == t->turn ? (int)(found & 1) : -1;
}

/* The one that counts. */
static mt_status give(mt_turns *t, int in_step, int *out)
{
    uint64_t before = atomic_load(verdict_of(t)), mine = t->turn << 1 | (uint64_t)in_step;

    while (before >> 1 < t->turn)
        if (atomic_compare_exchange_weak(verdict_of(t), &before, mine)) {
            mt_share_stir(t->share);
            before = mine;
        }
    if (before >> 1 != t->turn)          /* it was stopped, and others are far ahead */
        return MT_FAIL(MT_ESTATE, "rank %d did not go on for so long that others no longer know "
                       "whether they were in step with it", mt_share_rank(t->share));
    *out = (int)(before & 1);
    return MT_OK;
}

static uint64_t meeting(const mt_turns *t)
{
    return t->turn >> MEETING;
}

/* Is there any use in waiting for a mate that has not come? One that is still away from before the
 * last meeting is on its way back from that. */
static int may_come(const mt_turns *t, int mate)
{
    return atomic_load(&of_mate(t, mate)->turn) >= t->late[mate] &&
           atomic_load(&of_mate(t, mate)->away) != meeting(t) + 1 &&
           mt_share_presence(t->share, t->mates[mate]) == MT_RANK_HERE;
}

/* What the mates' turns tell. */
typedef struct compared {
    int      sure, in_step;              /* a verdict can be given; which */
    int      rank;                       /* the first that is elsewhere, and with what */
    uint64_t own, other;
} compared;

static compared compare(mt_turns *t, int over)
{
    uint64_t about = atomic_load(&of_mate(t, t->me)->about);
    compared c = { .sure = 1, .in_step = 1, .own = about };

    for (int mate = 0; mate < t->n_mates && c.in_step; mate++) {
        uint64_t turn = atomic_load(&of_mate(t, mate)->turn);
        uint64_t its = atomic_load(&of_mate(t, mate)->about);

        if (turn == t->turn && its == about)
            continue;
        if (turn < t->turn && !over && may_come(t, mate)) {
            c.sure = 0;                  /* and look whether another one is astray already */
            continue;
        }
        if (turn < t->turn)
            t->late[mate] = t->turn;
        c = (compared){ .sure = 1, .rank = t->mates[mate], .own = about,
                        .other = turn < t->turn ? 0 : its };
    }
    return c;
}

static void note(mt_turns *t, int verdict, const compared *c)
{
    if (verdict || c->in_step)
        return;
    t->stats.rank = c->rank;
    t->stats.own = c->own;
    t->stats.other = c->other;
}

/* -1: it is too early for one. over: whoever has not come is not waited for. */
static mt_status look(mt_turns *t, int over, int *verdict)
{
    compared  c = compare(t, over);
    mt_status st = MT_OK;

    if ((*verdict = given(t)) >= 0)
        note(t, *verdict, &c);
    if (*verdict >= 0 || !c.sure)
        return MT_OK;
    MT_TRY(give(t, c.in_step, verdict));
    note(t, *verdict, &c);
fail:
    return st;
}

/* Who waits long says so, once. */
static void tell(const mt_turns *t, uint64_t begun, int *told)
{
    char text[200];

    if (*told || t->warn == NULL || mt_now_ns() - begun < TOLD_NS)
        return;
    *told = 1;
    snprintf(text, sizeof text, "rank %d has waited %d s for other processes of its machine to "
             "come to the same weights: with weights on disk all run the same forwards, "
             "evaluations too",
             mt_share_rank(t->share), (int)(TOLD_NS / 1000000000));
    t->warn(text);
}

/* ---- a rank's way ------------------------------------------------------------------------- */

void mt_turns_next(mt_turns *t, int unit)
{
    t->turn = unit == t->unit ? t->turn + 1 : ((t->turn >> UNIT) + 1) << UNIT;
    t->unit = unit;
}

mt_status mt_turns_take(mt_turns *t, uint64_t about, int ms, int *in_step)
{
    said     *mine = of_mate(t, t->me);
    uint64_t  begun = mt_now_ns(), asked_ns = 0;
    int       over = 0, told = 0;
    mt_status st;

    atomic_store(&mine->about, about);
    atomic_store(&mine->turn, t->turn);
    mt_share_stir(t->share);
    for (;;) {
        uint32_t word = mt_share_word(t->share);

        MT_TRY(mt_ledger_check(t->store));
        MT_TRY(look(t, over, in_step));
        if (*in_step >= 0)
            break;
        tell(t, begun, &told);
        mt_share_sleep(t->share, word, LOOK_MS);
        over = mt_watch_asked(&asked_ns) != MT_OK ||
               mt_now_ns() - begun > (uint64_t)(ms > 0 ? ms : t->ms) * UINT64_C(1000000);
    }
    t->stats.in_step += *in_step;
    t->stats.astray += !*in_step;
fail:
    return st;
}

void mt_turns_away(mt_turns *t, int away)
{
    atomic_store(&of_mate(t, t->me)->away, away ? meeting(t) + 1 : 0);
    if (away)
        mt_share_stir(t->share);
}

void mt_turns_met(mt_turns *t)
{
    t->turn = (meeting(t) + 1) << MEETING;
    t->unit = -1;
    memset(t->late, 0, (size_t)t->n_mates * sizeof *t->late);    /* they have come there */
}

mt_turns_stats mt_turns_stats_get(const mt_turns *t)
{
    return t->stats;
}
