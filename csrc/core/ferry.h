/* ferry.h — new weights of settled units, between ranks that update them.
 *
 * Each rank has a settled unit's whole weights in a slot, and updates its own portion of them there
 * (resident.h). The others copy that from slot to slot, where they reach each other's (NVLink, or
 * peer access over PCIe): 2 (N - 1) / N bytes of a parameter. It also goes down to the share, where
 * every process reads weights whatever the unit's home: 2 / N bytes. Ranks whose slots are out of
 * reach fetch it up from there. So nobody has to come to a collective.
 *
 * Nouns, in the order they appear below:
 *   down, up   the ferry's two queues
 *   lower      the copy of the own portion behind an update, and then the update's end in the
 *              ledger, where it waits for all ranks' as everywhere in a share
 *   raise      the copy of the others' portions into the slot
 *   reach      all ranks' slots of a unit are within reach of all, so they are raised from slots
 *
 *     mt_ferry_open(cx, &mu, raise_one, r, &f);
 *     mt_ferry_lower(f, unit, mem, made, &job);       // behind the update: returns at once
 *     ... a thread of ours ends the update; another calls raise_one(r, unit), which asks
 *     mt_ferry_raise(f, unit, mem);                   // when all ranks have updated theirs
 *     mt_ferry_await(f, unit, run);                   // run: until they are there
 *
 * Units are raised in the order in which their updates were put, ahead of their windows; an await
 * that comes before does it itself. They are lowered a chunk after the other, of which two are in
 * the queue: a device has one engine for copies to the host, in which a value that somebody reads
 * would stand behind all that are there.
 *
 * Edges (each can be left out: debug.h):
 *   MOVED    down waits for the update whose weights it copies     STEPPED's event of resident.h
 *   LOWERED  our thread on the host, before it ends the update;    recorded on down, behind it
 *            a unit's next update is put when that has ended
 *   RAISED   run waits for the copy up; and the residents' queue,  recorded on up, behind it
 *            before it fetches what was written since
 *   UPDATED  who raises has waited in the ledger, on the host, until all ranks' updates are over,
 *            on the device where slots are within reach, else in the share: its own, which is
 *            behind ASKED, so compute on what is overwritten is over too. A rank's next update
 *            waits until no rank copies of its slot any more (update.h)
 *
 * Threads: mu is the room's that has the ferry: lower, raise, before, await are called under it.
 *          close: without it.
 */
#ifndef MT_FERRY_H
#define MT_FERRY_H

#include "home.h"

typedef struct mt_ferry mt_ferry;

/* raise: of ours, without mu, when this rank's update of the unit has ended; it waits for the
 * others'. */
mt_status mt_ferry_open (mt_context *cx, mt_mutex *mu, void (*raise)(void *arg, int unit),
                         void *arg, mt_ferry **out);
void      mt_ferry_close(mt_ferry *f);       /* NULL is fine */
/* All that was lowered has ended, and been raised. Without mu. */
mt_status mt_ferry_drain(mt_ferry *f);

/* A unit's events, before its first copy; and when it is settled no more, behind all of them. */
mt_status mt_ferry_board(mt_ferry *f, int unit);
void      mt_ferry_land (mt_ferry *f, int unit);
/* names [ranks]: of all ranks' slots. MT_ENOTSUP: one is out of reach. names NULL: slots are not
 * within reach of all. While nothing of the unit is under way. */
mt_status mt_ferry_reach(mt_ferry *f, int unit, const mt_mem_name *names);
/* On the host: what was lowered of the unit has ended. Without mu. */
mt_status mt_ferry_idle (mt_ferry *f, int unit);

/* mem: the unit's slot. made: recorded behind the update, which the ferry ends. */
void      mt_ferry_lower (mt_ferry *f, void *mem, mt_event *made, mt_update *u);
mt_status mt_ferry_raise (mt_ferry *f, int unit, void *mem, uint64_t *bytes);
/* The own portion from the share into the slot, in q. */
mt_status mt_ferry_return(mt_ferry *f, int unit, void *mem, mt_queue *q, uint64_t *bytes);
uint64_t  mt_ferry_lowered(const mt_ferry *f);       /* bytes, since open */
mt_status mt_ferry_await (mt_ferry *f, int unit, mt_queue *run);
mt_queue *mt_ferry_up    (mt_ferry *f);      /* whose copies read the share */

#endif
