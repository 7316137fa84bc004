/* speculate.h — updates that begin before it is known whether, and how, they are to be made.
 *
 * Nouns, in the order they appear below:
 *   guess        a unit's update as if the clip factor were 1, made during backward
 *   speculation  the guesses of all units: at most one each
 *
 *     mt_speculation_put(s, &guess);                   // at the hand-over: returns at once
 *     mt_speculation_run(s, 0);                        // the updater, when it has nothing else to do
 *     mt_speculation_keep(s, unit, job, clip, &st);    // the updater, once the norm is known
 *     mt_speculation_undo(s, unit);                    // whoever wants the unit as it was before
 *
 * A guess changes the unit's states (LO, MASTER, M, V) in place and leaves its weights alone, so that
 * fetches and readers of weights see nothing of it; what it has changed, and the new weights, are in
 * plane UNDO. It ends in one of three ways, and the bits are those of an update made in its time:
 *   dropped  before it ran: nothing has changed
 *   kept     the weights take the new values; the states have them
 *   undone   the states take the old values
 *
 * Order of what happens to a unit:
 *   GUESS after GRADS    run waits in the ledger until the unit's gradients are home
 *   GRADS after GUESS    whoever puts a further gradient undoes first: a guess reads the GRAD plane
 *   STATES after GUESS   whoever reads or writes the states, or drops a plane, undoes first
 *   WEIGHTS after GUESS  whoever writes the weights undoes first; one who did not is found by the
 *                        ledger (mt_ledger_written), and the guess is not kept
 *   KEEP, UPDATE         by the thread that runs guesses, so neither meets a guess that is running
 *
 * Threads: run and keep: the updater's. put, undo and the rest: any.
 */
#ifndef MT_SPECULATE_H
#define MT_SPECULATE_H

#include "offload.h"

typedef struct mt_guess {
    int        unit;
    int        n_params;
    const int *params;           /* [n_params] that have a gradient */
    uint64_t   bytes;            /* that run reads and writes, for the timeline */
    mt_status (*run) (void *arg, mt_pool *pool);
    mt_status (*keep)(void *arg, mt_pool *pool);
    mt_status (*undo)(void *arg, mt_pool *pool);
    /* 1 when the update that is now asked for, job, does what the guess did: same parameters, same
     * gradients, same numbers. */
    int       (*same)(const void *arg, const void *job);
    void      (*free)(void *arg);/* called once, however it ends; may be NULL */
    void      *arg;
} mt_guess;

typedef struct mt_speculation mt_speculation;

typedef struct mt_speculation_stats {
    int64_t  speculated, committed, undone;     /* guesses: run, kept, undone */
    uint64_t busy_ns;                           /* in run */
} mt_speculation_stats;

mt_status mt_speculation_open (mt_store *store, mt_offload *grads, mt_pool *pool, mt_speculation **out);
void      mt_speculation_close(mt_speculation *s);      /* undoes what was not kept; NULL is fine */

/* Guesses are recorded in t. Before the first put, or never. */
void      mt_speculation_timeline(mt_speculation *s, mt_timeline *t);

/* Copied, params too; arg is owned from here on, also on failure. What the unit had is undone.
 * MT_ESTATE for a unit that is settled, goes through the device, or is on disk. */
mt_status mt_speculation_put    (mt_speculation *s, const mt_guess *g);
int       mt_speculation_waiting(mt_speculation *s);    /* some guess has not run */

/* Runs the oldest that has not, if its gradients are finite; else drops it. asked: the step has come, and
 * waits for gradients; if those are all home with the guess's own, it is dropped too. A failure, also of
 * waiting for the gradients, is the ledger's fault. */
void      mt_speculation_run (mt_speculation *s, int asked);
/* job's update is to be made with that clip factor: 1 when a guess was it, and is kept. Else 0, and
 * the unit is as if there had been none. *st is a failure of either. */
int       mt_speculation_keep(mt_speculation *s, int unit, const void *job, float clip, mt_status *st);
/* Waits for a guess that is running. No guess: nothing to do. A failure is the ledger's fault too. */
mt_status mt_speculation_undo(mt_speculation *s, int unit);

void      mt_speculation_settle(mt_speculation *s);     /* until none waits or runs */
mt_speculation_stats mt_speculation_stats_get(mt_speculation *s);

#endif
