/* turn.h — in a share: ranks of a machine that open windows in step, and find out where they do
 * not.
 *
 * Weights of which each rank fetches its portion alone are gathered by a collective. To that all
 * ranks come, or none: one that waits there for a rank which goes another way through the model
 * waits in vain. So each rank says which window it opens, and waits until the others have said
 * theirs. Where one opens another, or is not heard of, the weights are fetched whole.
 *
 * Nouns, in the order they appear below:
 *   mate      a rank of this machine, this one among them
 *   turn      a number that only grows: of a window that a rank opens. Ranks that go the same way
 *             give the same turn to the same window; one may leave turns out
 *   about     what is to be gathered there
 *   verdict   of a turn: in step, all mates are at it, about the same; or astray. Whichever mate
 *             gives it first, it is everybody's
 *   meeting   all ranks have come to a collective: behind it turns begin anew, so ranks that went
 *             astray are in step again
 *   away      of a rank: it waits for others at a meeting, and comes to no turn before
 *   late      of a mate: it was waited for in vain. It is not waited for again until it has come
 *             to where that was, or to a meeting
 *
 *     mt_turns_open(&cx, MT_TURN_MS, &t);
 *     mt_turns_next(t, unit);                         // a window opens
 *     mt_turns_take(t, about, &in_step);              // if it is, all mates launch the collective
 *
 * A verdict is a word of the share that is changed from what it was before, once: so a rank that
 * gives up waiting, and one that comes in the same moment, read the same.
 *
 * Threads: open, close: one. The rest: one at a time. A mate that ended is one that is away.
 */
#ifndef MT_TURN_H
#define MT_TURN_H

#include "store.h"

#define MT_TURN_MS 5000          /* for which a mate is waited for that does not come */

typedef struct mt_turns mt_turns;

/* All ranks, between the same ranges of the share. */
mt_status mt_turns_open (const mt_context *cx, int ms, mt_turns **out);
void      mt_turns_close(mt_turns *t);                   /* NULL is fine */

int       mt_turns_mates(const mt_turns *t);
int       mt_turns_place(const mt_turns *t);             /* this rank's among the mates */

/* Of another unit than the turn before, or of another part of it. */
void      mt_turns_next(mt_turns *t, int unit);
/* Waits for the mates, for so long, 0: as opened. A thread that is asked to end its wait gives the
 * verdict itself. The ledger's fault. */
mt_status mt_turns_take(mt_turns *t, uint64_t about, int ms, int *in_step);
void      mt_turns_away(mt_turns *t, int away);
void      mt_turns_met (mt_turns *t);

/* rank: one that was elsewhere when this one last found itself astray, -1: it never did; own,
 * other: what they were about. other is 0 where that rank did not come. */
typedef struct mt_turns_stats {
    int64_t  in_step, astray;
    int      rank;
    uint64_t own, other;
} mt_turns_stats;
mt_turns_stats mt_turns_stats_get(const mt_turns *t);

#endif
