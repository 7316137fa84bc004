/* resident.h — units that live on the device: in a step nothing of them crosses the bus.
 *
 *   settled   a unit whose weights are in a slot that is its own until it is unsettled, with its
 *             other planes in device memory of the store. Its update is a kernel; its gradients
 *             stay where they are
 *   queue     the residents' own: updates, fetches of weights, planes up and down, in that order.
 *             Host memory mirrors the planes (mirror.h)
 *   guest     a settled unit whose states (MT_STATE_PLANES) live on the host, and are on the device
 *             around its update alone: between the last windows of backward and the first of the
 *             next forward, when few activations live
 *   piece     device memory that the caller gives for a stay
 *   stay      from lift, which copies the states up, until leave, which gives the pieces back.
 *             Copies down are put behind each update; until the stay ends the device's states are
 *             good too
 *
 * In a share each rank has the unit's weights in a slot of its own and updates the portion that it
 * owns; of the other planes it has that portion alone. The ferry (resident.c) brings weights
 * between ranks and to the share. Readers of other planes ask each rank for its portion (peers.c).
 *
 *     mt_resident_open(&cx, &r);
 *     mt_resident_settle(r, unit, mem);               // nothing of the unit is under way
 *     mt_home_vram.take(r, unit, run);                // its planes move; the host's go
 *     mt_resident_await(r, unit, run);                // run: until its weights are current
 *     ... compute; mt_offload_put; mt_update_submit ...
 *     mt_mirror_bring(store, unit, 1u << MT_PLANE_HI);    // host: the weights are as on the device
 *     mt_resident_unsettle(r, unit, 1);                   // its planes move back
 *
 *     mt_arrive_invite(r, unit);                          // once, when it is settled
 *     mt_arrive_sizes(r, unit, most, &bytes, &n);         // what pieces a stay takes
 *     mt_arrive_lift(r, unit, most, mem, n, run);         // during backward: returns at once
 *     ... the update, which waits for the copies up and puts those down behind it ...
 *     mt_arrive_leave(r, unit, 0, &left);                 // left: the pieces are the caller's
 *
 * Edges (each can be left out: context.h):
 *   STEPPED  run waits for the unit's last update or fetch      recorded on the queue, behind it
 *   ASKED    the queue waits for compute launched before step() recorded on run, by step()
 *   FREED    the queue waits for compute that used the slot     recorded on run, by the await that
 *            before weights are fetched over                    finds them written from outside
 *   SPENT    d2h waits for the update that reads a gradient     the event of STEPPED; where
 *            before it writes the next one                      gradients pass, of the last update
 *                                                               put: memory was another unit's
 *   FETCHED  who gives the weights' host memory back waits on   recorded on the queue, behind the
 *            the host for copies out of it                      fetch
 *   UPDATED  await waits in the ledger until the unit's updates are in the queue. An update is put
 *            when the unit's gradients are whole; lift, wait and leave wait for updates too
 * of guests, whose copies have a queue of their own:
 *   VACANT   guests waits for compute that used the pieces before  recorded on run, by lift
 *   LIFTED   the queue waits for the states, before it updates     the event of STORED
 *            them
 *   MADE     guests waits for the update whose states it copies    STEPPED's event
 *   STORED   readers and writers of host planes, and leave, wait   recorded on guests, behind the
 *            on the host for the unit's copies, up or down         unit's last copy
 * and of the ferry:
 *   MOVED    down waits for the update whose weights it copies     STEPPED's event
 *   LOWERED  our thread waits before it ends the update, and the   recorded on down, behind the
 *            unit's next update is put after that                  copy
 *   RAISED   run waits for the copy up; and the residents' queue,  recorded on up, behind the copy
 *            before it fetches what was written, or copies down
 *   UPDATED  who raises waits in the ledger, on the host, until all ranks' updates are over: on the
 *            device where slots are within reach, else in the share. A rank's next update waits
 *            until no rank copies from its slot any more (update.h)
 *
 * Threads: open, settle, unsettle, invite, dismiss, close: one, while no other is inside for that
 *          unit. sizes, lift, leave: one at a time, and not while a submit of the unit is on its
 *          way in. The rest: any.
 */
#ifndef MT_RESIDENT_H
#define MT_RESIDENT_H

#include "mirror.h"

#define MT_ARRIVE_LEAST ((size_t)8192)       /* bytes of a piece, at most: not less than this */

typedef struct mt_resident mt_resident;

mt_status mt_resident_open (mt_context *cx, mt_resident **out);
/* waits for the queues; device planes are given back */
void      mt_resident_close(mt_resident *r);

/* mem: device memory of the unit's hi_bytes, which nobody else uses until the unit is unsettled.
 * The home's take follows before the unit's next hand-over or update, and mt_arrive_invite of a
 * guest before that. MT_ESTATE when the unit is settled. */
mt_status mt_resident_settle(mt_resident *r, int unit, void *mem);
/* In a share: names [ranks] of all ranks' slots. MT_ENOTSUP: one is out of reach. names NULL: slots
 * are not within reach of all. While nothing of the unit is under way. */
mt_status mt_resident_reach (mt_resident *r, int unit, const mt_mem_name *names);
/* Its mem; NULL: it is not settled. */
void     *mt_resident_mem   (const mt_resident *r, int unit);
/* All planes of the unit come down, and the host's are the true ones: mem is the caller's again.
 * grads 0: its gradients are nobody's any more, and what the host has instead stays. The
 * unit is no guest any more. Waits for what is announced of the unit, and a save. On failure
 * (MT_ENOMEM: the host has no memory for them) it is settled as before. */
mt_status mt_resident_unsettle(mt_resident *r, int unit, int grads);
/* Address on the device of a settled unit's parameter; HI: in its slot. MT_ESTATE for a guest's
 * states, which have none for good: mt_arrive_parts. */
mt_status mt_resident_at(mt_resident *r, int unit, int param, mt_plane p, void **out);

/* What run is given from now on finds the unit's current weights. Waits on the host until updates
 * announced so far are in the queue; asks for the weights where they were written from outside.
 * MT_ESTATE when a copy is torn. Copies that were brought have their memory until here, once an
 * update made them stale. */
mt_status mt_resident_await(mt_resident *r, int unit, mt_queue *run);

/* In a share: waits until what was updated is down, and has come from all ranks. Before the share's
 * weights are written from outside: with mt_ledger_wait_updates, nothing reads them then. */
mt_status mt_resident_raised(mt_resident *r);

/* Inside a job's put, once: device memory for what is copied up from the host for this update
 * alone. The home's update then returns when that is over, and with it those copies; else when the
 * job has put it in the queue. */
mt_status mt_resident_scratch(mt_resident *r, size_t bytes, void **out);

/* ---- guests ------------------------------------------------------------------------------- */

/* invite: the settled unit is a guest from now on; dismiss: it is none any more. Both while nothing
 * of the unit is under way, and it has no stay. */
mt_status mt_arrive_invite (mt_resident *r, int unit);
mt_status mt_arrive_dismiss(mt_resident *r, int unit);
int       mt_arrive_invited(const mt_resident *r, int unit);
/* What a stay takes as the unit's parameters are trained now: n pieces, malloc'd bytes of each,
 * none larger than `most`, which counts as MT_ARRIVE_LEAST where it is less. */
mt_status mt_arrive_sizes(mt_resident *r, int unit, size_t most, size_t **bytes, int *n);
/* The stay begins: mem[i] is device memory of bytes[i], aligned to 512; free behind what run was
 * given so far. Nothing to do, and mem stays the caller's, when a stay has begun:
 * *taken is 0 then. */
mt_status mt_arrive_lift(mt_resident *r, int unit, size_t most, void *const *mem, int n,
                         mt_queue *run, int *taken);
/* The stay ends, when no update of the unit is announced and nothing of it is on its way; wait:
 * waits for that. *left: the pieces are the caller's; also when there was no stay. */
mt_status mt_arrive_leave(mt_resident *r, int unit, int wait, int *left);

/* Where the states are during this stay; MT_ESTATE: there is none. Inside a job's put. */
mt_status mt_arrive_parts(const mt_resident *r, int unit, const mt_part **parts, int *n);

/* Since open; bytes: guests' states, and what the ferry copies, too. */
typedef struct mt_resident_stats {
    int64_t  fetches;
    uint64_t h2d_bytes, d2h_bytes;
} mt_resident_stats;
mt_resident_stats mt_resident_stats_get(mt_resident *r);

#endif
