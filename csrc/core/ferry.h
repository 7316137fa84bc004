/* ferry.h — an all-gather of updated weights between ranks that have them on their devices.
 *
 * Each rank has the whole weights of a settled unit in a slot, and updates its own portion of them
 * there (resident.h). The others copy that portion from slot to slot, where slots are within each
 * other's reach (NVLink, or peer access over PCIe): 2 (N - 1) / N bytes of a parameter. It also
 * goes down to the share, where every process reads weights whatever the unit's home: 2 / N bytes.
 * Ranks whose slots are out of reach fetch it up from there. No rank waits at a collective.
 *
 *     mt_ferry_open(cx, &mu, raise_one, r, &f);
 *     mt_ferry_lower(f, mem, made, update);       // behind the update: returns at once
 *     ... a thread of ours copies the own portion down and ends the update; another calls
 *     ... raise_one(r, unit), which asks for the others' portions
 *     mt_ferry_raise(f, unit, mem);               // when all ranks have updated theirs
 *     mt_ferry_await(f, unit, run);               // run waits until they are there
 *
 * Units are raised in the order in which their updates were put, ahead of their windows; an await
 * that comes before does it itself. They are lowered in chunks, two in the queue at a time: a
 * device has one engine for copies to the host, and a value that somebody reads waits behind all of
 * them.
 *
 * Edges (each can be left out: context.h):
 *   MOVED    down waits for the update whose weights it copies     STEPPED's event of resident.h
 *   LOWERED  our thread waits before it ends the update, and the   recorded on down, behind the
 *            unit's next update is put after that                  copy
 *   RAISED   run waits for the copy up; and the residents' queue,  recorded on up, behind the copy
 *            before it fetches what was written since
 *   UPDATED  who raises waits in the ledger, on the host, until all ranks' updates are over: on the
 *            device where slots are within reach, else in the share. A rank's next update waits
 *            until no rank copies from its slot any more (update.h)
 *
 * Threads: mu is the lock of the room that has the ferry: lower, raise, return, await are called
 *          under it; close without it.
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
