/* turn.c — what ranks say of their turns, and the words in which verdicts are. */
#include "turn.h"

#include "share.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LOOK_MS  100
#define TOLD_NS  UINT64_C(60000000000)
/* A turn has a word of its own among the last UNITS units that were opened, TURNS of each. */
#define UNITS   UINT64_C(512)
#define TURNS   UINT64_C(64)
#define VERDICT_BYTES (UNITS * TURNS * sizeof(uint64_t))

/* Of a turn: which meeting it is behind, how many units were opened since, which of the unit's. */
#define MEETING UINT64_C(40)
#define UNIT    UINT64_C(12)

/* Verdicts. What is always true:
 *   (1) A rank says TURN, with what it is about, before it looks at the others'. Its turns grow
 *   (2) A verdict's word has turn << 1, and whether it is in step. It goes from an older turn's to
 *       a newer one's, by compare-and-exchange: of a turn there is one verdict, whoever gives it
 *   (3) Two turns that have the same word are 512 units, or 64 windows of a unit, apart. Who finds
 *       a newer turn there was stopped for as long, and fails
 *   (4) AWAY is about 1 + the meetings before it, or 0: its rank is back. All ranks join a meeting,
 *       so who is away from before the last one is on its way back */
struct mt_turns {
    const mt_context *cx;
    mt_share         *share;
    _Atomic uint64_t *verdicts;          /* [UNITS * TURNS] in the share */
    int               ms, me, n_mates;
    int              *mates;             /* [n_mates] ranks, in order */
    uint64_t         *late;              /* [n_mates] the last turn at which it was given up */
    uint64_t          turn;
    int               unit;              /* of the turn; -1: none yet since the meeting */
    mt_turns_stats    stats;
};

/* ---- open and close ----------------------------------------------------------------------- */

MT_CLOSER(mt_turns_close, mt_turns)

mt_status mt_turns_open(const mt_context *cx, int ms, mt_turns **out)
{
    int       ranks = mt_share_ranks(cx->share);
    mt_turns *t MT_CLOSED(mt_turns_close) = NULL;
    void     *room;

    MT_DO(MT_MAKE(t, 1, "turns"));
    *t = (mt_turns){ .cx = cx, .share = cx->share, .ms = ms, .unit = -1, .stats.rank = -1 };
    MT_DO(MT_MAKE(t->mates, ranks, "turns"));
    MT_DO(MT_MAKE(t->late, ranks, "turns"));
    for (int rank = 0; rank < ranks; rank++) {
        if (mt_share_speaker(t->share, rank) != rank)
            continue;
        if (rank == mt_share_rank(t->share))
            t->me = t->n_mates;
        t->mates[t->n_mates++] = rank;
    }
    MT_DO(mt_share_room(t->share, VERDICT_BYTES, "turns", &room));
    t->verdicts = room;
    *out = MT_KEEP(t);
    return MT_OK;
}

void mt_turns_close(mt_turns *t)
{
    if (t == NULL)
        return;
    mt_share_unroom((void *)t->verdicts, VERDICT_BYTES);
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

mt_turns_stats mt_turns_stats_get(const mt_turns *t)
{
    return t->stats;
}

/* ---- verdicts ----------------------------------------------------------------------------- */

static uint64_t meeting(const mt_turns *t)
{
    return t->turn >> MEETING;
}

/* *verdict: the one that counts, -1: it is too early for one. over: whoever has not come is not
 * waited for. */
static mt_status look(mt_turns *t, int over, int *verdict)
{
    uint64_t          about = mt_share_about(t->share, MT_COUNT_TURN, t->mates[t->me]), other = 0;
    int               sure = 1, elsewhere = -1;      /* the first rank that is */
    _Atomic uint64_t *word = &t->verdicts[(t->turn >> UNIT) % UNITS * TURNS + t->turn % TURNS];
    uint64_t          is, mine;

    for (int mate = 0; mate < t->n_mates && elsewhere < 0; mate++) {
        int      rank = t->mates[mate];
        uint64_t turn = mt_share_said(t->share, MT_COUNT_TURN, rank);
        uint64_t its = mt_share_about(t->share, MT_COUNT_TURN, rank);

        if (turn == t->turn && its == about)
            continue;
        /* There is no use in waiting for one that was given up, is away, or has ended. */
        if (turn < t->turn && !over && turn >= t->late[mate] &&
            mt_share_about(t->share, MT_COUNT_AWAY, rank) != meeting(t) + 1 &&
            mt_share_presence(t->share, rank) == MT_RANK_HERE) {
            sure = 0;                    /* and look whether another one is astray already */
            continue;
        }
        if (turn < t->turn)
            t->late[mate] = t->turn;
        elsewhere = rank;
        other = turn < t->turn ? 0 : its;
    }
    is = atomic_load(word);              /* behind the looks: a mate may have judged meanwhile */
    mine = t->turn << 1 | (uint64_t)(elsewhere < 0);
    *verdict = -1;
    if (is >> 1 != t->turn && !sure && elsewhere < 0)
        return MT_OK;
    while (is >> 1 < t->turn)
        if (atomic_compare_exchange_weak(word, &is, mine)) {
            mt_share_stir(t->share);
            is = mine;
        }
    if (is >> 1 != t->turn)              /* (3) */
        return MT_FAIL(MT_ESTATE, "rank %d did not go on for so long that others no longer know "
                       "whether they were in step with it", mt_share_rank(t->share));
    *verdict = (int)(is & 1);
    if (!*verdict && elsewhere >= 0) {
        t->stats.rank = elsewhere;
        t->stats.own = about;
        t->stats.other = other;
    }
    return MT_OK;
}

/* ---- a rank's way ------------------------------------------------------------------------- */

void mt_turns_next(mt_turns *t, int unit)
{
    t->turn = unit == t->unit ? t->turn + 1 : ((t->turn >> UNIT) + 1) << UNIT;
    t->unit = unit;
}

mt_status mt_turns_take(mt_turns *t, uint64_t about, int ms, int *in_step)
{
    uint64_t begun = mt_now_ns(), asked_ns = 0, end_ns;
    int      over = 0, told = t->cx->warn == NULL;
    char     text[200];

    end_ns = begun + (uint64_t)(ms > 0 ? ms : t->ms) * UINT64_C(1000000);
    mt_board_say(mt_share_board(t->share), MT_COUNT_TURN, t->turn, about);
    for (;;) {
        uint32_t word = mt_share_word(t->share);

        MT_DO(mt_ledger_check(t->cx->store));
        MT_DO(look(t, over, in_step));
        if (*in_step >= 0)
            break;
        if (!told && mt_now_ns() - begun >= TOLD_NS) {
            told = 1;
            snprintf(text, sizeof text, "rank %d has waited %d s for other processes of its "
                     "machine to come to the same weights: with weights on disk all run the same "
                     "forwards, evaluations too", mt_share_rank(t->share),
                     (int)(TOLD_NS / 1000000000));
            t->cx->warn(text);
        }
        mt_share_sleep(t->share, word, LOOK_MS);
        over = mt_watch_asked(&asked_ns) != MT_OK || mt_now_ns() > end_ns;
    }
    t->stats.in_step += *in_step;
    t->stats.astray += !*in_step;
    return MT_OK;
}

void mt_turns_away(mt_turns *t, int away)
{
    uint64_t n = mt_share_said(t->share, MT_COUNT_AWAY, t->mates[t->me]) + 1;

    mt_board_say(mt_share_board(t->share), MT_COUNT_AWAY, n, away ? meeting(t) + 1 : 0);
}

void mt_turns_met(mt_turns *t)
{
    t->turn = (meeting(t) + 1) << MEETING;
    t->unit = -1;
    memset(t->late, 0, (size_t)t->n_mates * sizeof *t->late);    /* they have come there */
}
