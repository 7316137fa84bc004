/* arrive.h — optimizer states that live on the host, but are on the device around an update.
 *
 * A settled unit (resident.h) has its weights and gradients on the device, and is updated there as
 * soon as the norm is known. Most of what that takes are its states, which are needed once a step:
 * between the last windows of backward and the first of the next forward, when few activations
 * live.
 *
 *   guest    a settled unit whose states (MT_STATE_PLANES) live on the host
 *   piece    device memory that the caller gives for a stay
 *   stay     from lift, which copies the states up, until leave, which gives the pieces back.
 *            Copies down are put behind each update; until the stay ends the device's states are
 *            good too
 *
 *     mt_arrive_invite(a, unit);                  // once, when it is settled
 *     mt_arrive_sizes(a, unit, most, &bytes, &n); // what pieces a stay takes
 *     mt_arrive_lift(a, unit, most, mem, n, run); // during backward: returns at once
 *     ... the update, which waits for the copies up and puts those down behind it ...
 *     mt_arrive_leave(a, unit, 0, &left);         // left: the pieces are the caller's again
 *
 * Edges; `guests` is the one queue of all these copies (each can be left out: context.h):
 *   VACANT   guests waits for compute that used the pieces before  recorded on run, by lift
 *   LIFTED   the residents' queue waits for the states, before it  the event of STORED
 *            updates them
 *   MADE     guests waits for the update whose states it copies    STEPPED's event of resident.h
 *   STORED   readers and writers of host planes, and leave, wait   recorded on guests, behind the
 *            on the host for the unit's copies, up or down         unit's last copy
 *   UPDATED  lift, wait and leave wait in the ledger for updates that are announced
 *
 * Threads: open, invite, close: one, before and after the others. sizes, lift, leave: one at a
 *          time, and not while a submit of the unit is on its way in. The rest: any.
 */
#ifndef MT_ARRIVE_H
#define MT_ARRIVE_H

#include "mirror.h"
#include "pieces.h"
#include "timeline.h"

#define MT_ARRIVE_LEAST  ((size_t)8192)      /* bytes of a piece, at most: not less than this */

typedef struct mt_arrive mt_arrive;

mt_status mt_arrive_open (mt_context *cx, mt_arrive **out);
void      mt_arrive_close(mt_arrive *a);                 /* waits for the queue */

/* invite: the settled unit is a guest from now on; dismiss: it is none any more. Both while nothing
 * of the unit is under way, and it has no stay. */
mt_status mt_arrive_invite (mt_arrive *a, int unit);
mt_status mt_arrive_dismiss(mt_arrive *a, int unit);
int       mt_arrive_invited(const mt_arrive *a, int unit);

/* What a stay takes as the unit's parameters are trained now: n pieces, malloc'd bytes of each,
 * none larger than `most`, which counts as MT_ARRIVE_LEAST where it is less. */
mt_status mt_arrive_sizes(mt_arrive *a, int unit, size_t most, size_t **bytes, int *n);
/* The stay begins: mem[i] is device memory of bytes[i], aligned to 512; free behind what run was
 * given so far. Nothing to do, and mem stays the caller's, when a stay has begun:
 * *taken is 0 then. */
mt_status mt_arrive_lift(mt_arrive *a, int unit, size_t most, void *const *mem, int n,
                         mt_queue *run, int *taken);
/* The stay ends, when no update of the unit is announced and nothing of it is on its way; wait:
 * waits for that. *left: the pieces are the caller's; also when there was no stay. */
mt_status mt_arrive_leave(mt_arrive *a, int unit, int wait, int *left);

/* What resident.c asks. parts: of the stay, on the device, until it ends; MT_ESTATE when there is
 * none. before: q goes on when the states are up. behind: copies of what the update changed come
 * down behind `made`. */
mt_status mt_arrive_parts (mt_arrive *a, int unit, const mt_part **parts, int *n);
mt_status mt_arrive_before(mt_arrive *a, int unit, mt_queue *q);
mt_status mt_arrive_behind(mt_arrive *a, int unit, const int *params, int n, mt_event *made);
/* wait: until host planes of a guest's states may be read and written; copied: the same, of who has
 * waited for what is announced. push: the parameter's host planes were written. */
mt_status mt_arrive_wait(mt_arrive *a, int unit);
mt_status mt_arrive_copied(mt_arrive *a, int unit);
mt_status mt_arrive_push(mt_arrive *a, int unit, int param, unsigned planes);
mt_status mt_arrive_drain(mt_arrive *a);

typedef struct mt_arrive_stats {
    uint64_t h2d_bytes, d2h_bytes;       /* since open */
} mt_arrive_stats;
mt_arrive_stats mt_arrive_stats_get(mt_arrive *a);

#endif
