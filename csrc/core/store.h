/* store.h — where every byte of the model is, and who may touch it.
 *
 * Nouns, in the order they appear below:
 *   unit     parameters that are streamed together
 *   plane    one kind of value for all parameters of a unit; an arena each,
 *            made when first asked for
 *   home     where a unit's planes are between steps, by a table (see home.h); what is away of them
 *            has copies in host memory (see mirror.h)
 *   ledger   per unit: its version, and the work under way that a reader or writer must wait for
 *
 *     mt_store_open(&cx, &s);
 *     mt_store_add(s, "layers.0", params, 12, &unit);
 *     mt_store_at(s, unit, 3, MT_PLANE_HI, &w);       // host address of parameter 3's weights
 *     mt_ledger_read(s, unit);                        // no update of it is under way any more
 *
 * Layout: parameter i of a unit starts in every plane at a multiple of 512 bytes; the HI plane
 *         is what crosses to the device in one copy, so a slot has the same offsets.
 * Threads: any. Only who asks for a plane's memory waits while that is made; the ledger has its own
 *          locks. What is set of a unit (passing, states, owners) is set before anybody asks for a
 *          plane of it.
 */
#ifndef MT_STORE_H
#define MT_STORE_H

#include "context.h"
#include "dev.h"
#include "pool.h"
#include "share.h"
#include "states.h"
#include "timeline.h"
#include "watch.h"

/* name, what it holds, who reads and writes it */
#define MT_PLANE_MAP(X)                                                                         \
    X(HI,     "weights in their own type; registered; the H2D queue reads, the updater writes") \
    X(GRAD,   "gradient in the weight's type; registered; the D2H queue writes, the updater "   \
              "reads")                                                                          \
    X(LO,     "16 bits that make a bf16 weight an fp32 master, or 8 of them; updater only")     \
    X(MASTER, "fp32 master of an fp16 weight; updater only")                                    \
    X(M,      "first moment, fp32 or 8 bits; updater only")                                     \
    X(V,      "second moment, fp32 or 8 bits; updater only")                                    \
    X(SCALE,  "of moments of 8 bits: two fp32 for every 128 elements; updater only")            \
    X(ACC,    "fp32 sum of 16-bit gradients; the collector or the D2H queue writes, the updater " \
              "reads")
#define MT_PLANE_ENUM(name, what) MT_PLANE_##name,
typedef enum mt_plane { MT_PLANE_MAP(MT_PLANE_ENUM) MT_PLANE_COUNT } mt_plane;
#undef MT_PLANE_ENUM
const char *mt_plane_name(mt_plane p);

/* What an update reads and writes beside weights and gradients,
 * and keeps: a bit 1u << plane for each. */
#define MT_STATE_PLANES (1u << MT_PLANE_LO | 1u << MT_PLANE_MASTER | 1u << MT_PLANE_M | \
                         1u << MT_PLANE_V | 1u << MT_PLANE_SCALE)

typedef struct mt_param_desc {
    mt_dtype dtype;
    int64_t  numel;          /* >= 0 */
    int      trainable;      /* 0: the unit's planes other than HI leave it out */
} mt_param_desc;

/* Where parameters, and parts of them (pieces.h), begin: what GEMMs and disks like. */
#define MT_PART_ALIGN ((size_t)512)

typedef struct mt_store mt_store;
typedef struct mt_home mt_home;          /* home.h */

/* Of the context: dev, pool, warn, share. With a share (share.h) the planes lie there, parameters
 * begin at pages, the unit's owners are the ranks, and all ranks add the same units in the same
 * order: MT_EINVAL where that is seen to be otherwise. A share is one store's in each process. */
mt_status mt_store_open (const mt_context *cx, mt_store **out);
void      mt_store_close(mt_store *s);
/* In a share: this process takes part in nothing any more, and its memory stays. What others await
 * of it from now on is a fault there. Before close, or it is close's; behind all work. */
void      mt_store_leave(mt_store *s);
/* Nothing that is at home elsewhere is copied for other ranks any more: who is at home there ends.
 * Leave does it too. */
void      mt_store_serve_end(mt_store *s);
/* Before that, of a process that ends: returns when no other rank will ask any more, having come
 * here too or gone, or none has asked for so many seconds. */
void      mt_store_stay(mt_store *s, double seconds);
mt_status mt_store_add  (mt_store *s, const char *name, const mt_param_desc *p, int n, int *unit);

mt_status mt_store_set_trainable(mt_store *s, int unit, int param, int on);
/* any thread; 0 where there is none */
int       mt_store_trainable    (const mt_store *s, int unit, int param);

int         mt_store_units (const mt_store *s);
int         mt_store_params(const mt_store *s, int unit);
const char *mt_store_name  (const mt_store *s, int unit);
/* But for `trainable`, constant. */
const mt_param_desc *mt_store_desc(const mt_store *s, int unit, int param);
size_t      mt_store_hi_bytes(const mt_store *s, int unit);              /* what a slot must hold */
/* bytes, in HI and in a slot */
size_t      mt_store_offset  (const mt_store *s, int unit, int param);
size_t      mt_store_align   (const mt_store *s, int unit);     /* multiples of it, these are */

/* Bytes in a plane of n elements of dt, states kept as st; 0 when the plane has nothing for that
 * type (LO: bf16 with bits below hi, MASTER: fp16 only, SCALE: moments of 8 bits, ACC: 16-bit types
 * only; M, V and SCALE: not fp64, which our AdamW does not take; planes other than HI: nothing for
 * types that cannot be trained). */
size_t mt_plane_bytes(mt_plane p, mt_dtype dt, mt_states st, int64_t n);
/* The same of n elements of a parameter: its first, or those from a multiple of 128 on. */
size_t mt_store_plane_bytes(const mt_store *s, int unit, int param, mt_plane p, int64_t n);

/* How the unit's states are kept; FP32 until it is set.
 * MT_ESTATE when planes of other states are made. */
mt_status mt_store_set_states(mt_store *s, int unit, mt_states states);
mt_states mt_store_states    (const mt_store *s, int unit);              /* any thread */

/* Several processes update the unit, and this one owns a portion of it (portion.h): of planes other
 * than HI nothing else is committed, nor is on the device, and what moves them moves nothing else.
 * Until it is called, all of the unit is its own. MT_ESTATE when such a plane is made, and in a
 * share, where the store itself knows. */
mt_status mt_store_own  (mt_store *s, int unit, int owner, int owners);
int       mt_store_owners(const mt_store *s, int unit);                  /* 1 until then */
/* How many of a parameter's elements are its own, and the first of them. Any thread. */
int64_t   mt_store_owned(const mt_store *s, int unit, int param, int64_t *from);

/* In a share: where the sums of the chunks of its gradient are (ops/sumsq.h), of all of them, or
 * (own) of those that are its own. [*n]; NULL: there are none, or no share. */
double   *mt_store_sums (const mt_store *s, int unit, int param, int own, int64_t *n);
/* In a share: those of the unit that are this process's are as they are to be. */
void      mt_store_summed(mt_store *s, int unit);

/* Host address of a parameter in a plane; the unit's arena of that plane is mapped, touched in
 * parallel and (GRAD, and HI unless it is a settled unit's) registered at the first call. A
 * parameter that was not trainable then gets an arena of its own when it is asked for later.
 * MT_EINVAL when the plane has nothing for it, or leaves it out because it is not trainable.
 * Addresses stay. */
mt_status mt_store_at(mt_store *s, int unit, int param, mt_plane p, void **out);
/* The same for user code. In a share: a place that shows what the plane has, until this process
 * writes there: pages that it wrote are its own, until they are dropped. So what every process does
 * in place (p.mul_) reads, on each, what was there before. Alone: the plane. */
mt_status mt_store_view(mt_store *s, int unit, int param, mt_plane p, void **out);
/* The parameter's place shows the plane's values again. Nobody else is at it. */
void      mt_store_view_drop(mt_store *s, int unit, int param, mt_plane p);
/* All ranks wrote the parameter in their views of these planes (a bit each), each all of it, or
 * none did: each one's own portion is everybody's when this returns, and the views show it. HI: the
 * unit has a new version then. Called by all ranks, for the same in the same order, one at a time;
 * the writers have waited as those of planes do (mt_ledger_wait_updates, _grads, _fetch). One that
 * does not come within MT_SPREAD_S seconds, or half the watchdog's, is told of; within the
 * watchdog's, it is a fault with its name. So is one that spreads something else. Alone: nothing
 * to do. */
#define MT_SPREAD_S 30.0
mt_status mt_store_spread   (mt_store *s, int unit, int param, unsigned planes);
/* The whole HI plane of a unit: what one H2D copy reads. */
mt_status mt_store_hi(mt_store *s, int unit, void **out);

/* The unit's home (home.h) is `to` from now on, whose functions get `of`. Host memory mirrors the
 * planes that the home keeps: memory that the host had for them stays as it is, that of weights to
 * be stored later is committed, since somebody fills it, and the rest is reserved. Back in ram all
 * that was made is committed and registered; memory on the device is given back, so its values have
 * come before. MT_ESTATE: a unit comes to a home from one other, and goes back to that alone. On
 * failure the unit is where it was. One thread, while no other is inside for that unit. */
mt_status      mt_store_move(mt_store *s, int unit, const mt_home *to, void *of);
/* Any thread may ask. ram where there is no such unit; of may be NULL. */
const mt_home *mt_store_home(const mt_store *s, int unit, void **of);
/* Has the parameter an address in this plane already, on the host or (on_device) on the device? */
int       mt_store_made   (mt_store *s, int unit, int param, mt_plane p, int on_device);
/* As mt_store_at, but the address on the device of a settled unit's plane other than HI. The
 * plane's bytes are zero at first. */
mt_status mt_store_device_at(mt_store *s, int unit, int param, mt_plane p, void **out);
/* Before a host plane is written as a whole: makes the plane where it is not, and commits it, that
 * is touches its pages in parallel and (GRAD) registers them. Nothing to do when that is done. */
mt_status mt_store_commit  (mt_store *s, int unit, mt_plane p);
/* Pages of a copy are given back, registered or not; its addresses stay reserved. */
void      mt_store_decommit(mt_store *s, int unit, mt_plane p);
size_t    mt_store_reserved(mt_store *s, int unit, mt_plane p);  /* bytes that commit would take */
void      mt_store_device_close(mt_store *s);          /* gives all device memory back */

/* The unit's gradients pass: it has no GRAD plane but for the time between a hand-over and the end
 * of the next update of it (mt_ledger_update_end), in a buffer that is lent: MT_STORE_LENT of a
 * size in all, and as many on the device for settled units. MT_ESTATE for one that has a GRAD
 * plane. Units are settled before. */
#define MT_STORE_LENT 3
mt_status mt_store_set_passing(mt_store *s, int unit);
/* n buffers of a size in place of MT_STORE_LENT, at least one: a hand-over then waits for earlier
 * updates. Called before anything is lent. */
mt_status mt_store_lend_most  (mt_store *s, int n);
int       mt_store_lends      (const mt_store *s);                       /* so many of a size */
int       mt_store_passes     (const mt_store *s, int unit);             /* any thread */
/* Lends the unit a buffer. Waits for one, that is for the update of a unit that has one, and
 * records the wait in t with that unit. MT_ESTATE: no update has used that unit's gradients. */
mt_status mt_store_lend       (mt_store *s, int unit, mt_timeline *t);

/* *in: the parameter lies in the unit's arena of that plane, which is made where it is
 * not. 0: it has an arena of its own, or nothing there. In a share, where each has its own: it has
 * one, which is made for those that train; what comes later is no copy. */
mt_status mt_store_in_arena(mt_store *s, int unit, int param, mt_plane p, int *in);

/* Host bytes in memory in all units: of one plane, or of all (MT_PLANE_COUNT). */
size_t mt_store_bytes       (const mt_store *s, mt_plane p);
size_t mt_store_device_bytes(const mt_store *s);

/* ---- the ledger -------------------------------------------------------------------------
 * Work on a unit is announced by the thread that asks for it and finished by the thread that
 * does it, so a reader never sees the gap between "step() returned" and "the update began".
 *
 *   updates   announced by step(), finished by the updater.   Fetch and host readers wait for 0.
 *   grads     announced by the hand-over, finished by the collector. The updater and readers
 *             of .grad wait for 0; the next hand-over waits for updates == 0.
 *   fetches   announced by the mover when updates are 0, finished when the copy is in the H2D
 *             queue, with an event behind it. Host writers, the updater too, wait for 0 and then
 *             for the event: no update begins between the mover's look and its copy.
 *   saves     announced by who saves the store, for all units at once and when nothing is under
 *             way; finished, a unit at a time, by whom has copied its planes. Host writers, updates
 *             of all kinds wait for 0; fetches and readers do not. A unit somebody waits for is
 *             `wanted`: copied next.
 *   version   grows with every announced update and every write from outside; a slot holds
 *             current weights exactly when its version is the unit's. Starts at 1.
 *
 * In a share an update is over when it is on every rank, and so are gradients: each writes its own
 * portion. So ranks announce the same updates, and hand-overs, in the same order; what one may do
 * alone is to read, and to fetch. A write from outside is told to every rank's ledger, whoever
 * made it. Who begins an update waits besides until no rank reads the weights as they are
 * (update.h). A save is over when it is on every rank that has begun it, since
 * each copies what others own too: so all begin before one announces an update again. A fault of
 * one rank is every rank's, with its name; so is the end of a process of which something is
 * awaited.
 *
 * A fault (sticky) set by any worker ends every wait with that worker's message; finishing what
 * was not announced, or naming a unit that is not there, is such a fault. The wait for `fetched`
 * asks the device again and again; a device that fails, or the watchdog, ends it.
 * A wait during which nothing moves for the watchdog's time (default 600 s) returns MT_ESTUCK:
 * which unit, what is awaited, and all waits under way (watch.h); while compute has work, after six
 * times as long. Every end in the ledger moves, every begin but a save's or a fetch's, every block
 * of a save, every request of a disk and whatever else says mt_watch_moved.
 */
uint64_t  mt_ledger_version(mt_store *s, int unit);
void      mt_ledger_touch  (mt_store *s, int unit);          /* weights were written from outside */
uint64_t  mt_ledger_writes (mt_store *s, int unit);          /* so often */

void      mt_ledger_update_begin(mt_store *s, int unit);     /* version grows; updates += 1 */
void      mt_ledger_update_end  (mt_store *s, int unit);
/* Of one that is announced: it is over on the device; a copy of its weights down follows. */
void      mt_ledger_update_stepped(mt_store *s, int unit);
void      mt_ledger_grads_begin (mt_store *s, int unit);
void      mt_ledger_grads_end   (mt_store *s, int unit);

mt_status mt_ledger_wait_updates(mt_store *s, int unit);     /* until updates == 0 */
/* Until no rank's update of the unit reads or writes device memory. */
mt_status mt_ledger_wait_stepped(mt_store *s, int unit);
mt_status mt_ledger_wait_grads  (mt_store *s, int unit);     /* until grads == 0 */
int       mt_ledger_updates_due (mt_store *s, int unit);     /* the unit's updates are not 0 */
/* Until updates == 0 (of a settled unit: until all have stepped); in the same breath fetches += 1.
 * *version: what a copy put from now brings. */
mt_status mt_ledger_fetch_begin (mt_store *s, int unit, uint64_t *version);
/* Records `fetched` on h2d; fetches -= 1 if it was announced, also on failure. */
mt_status mt_ledger_fetching    (mt_store *s, int unit, mt_queue *h2d);
/* until copies out of HI so far are over */
mt_status mt_ledger_wait_fetched(mt_store *s, int unit);
mt_status mt_ledger_wait_fetch  (mt_store *s, int unit);     /* the same, and saves == 0 */

/* No update of the unit is announced: MT_ESTATE when one is, or a save is. */
mt_status mt_ledger_save_begin (mt_store *s, int unit);
void      mt_ledger_save_end   (mt_store *s, int unit);
/* until saves == 0; the unit is wanted meanwhile */
mt_status mt_ledger_wait_saved (mt_store *s, int unit);
int       mt_ledger_saving     (mt_store *s, int unit);      /* the unit's saves are not 0 */
int       mt_ledger_all_saved  (mt_store *s, int unit);      /* they are, on all ranks */
int       mt_ledger_wanted     (mt_store *s);                /* a unit that is waited for, or -1 */
/* This thread copies planes for a save: mt_ledger_wait_updates of a unit with saves returns at
 * once, since updates that were announced meanwhile wait for this thread. */
void      mt_ledger_i_save     (int on);

/* In a share. say: this rank has come to n, see mt_share_say. meet: waits until all ranks have, or
 * (NORMED) rank 0, for so many seconds at most (0: no end; *late: they were over). */
void      mt_ledger_say (mt_store *s, mt_count what, uint64_t n, uint64_t about);
mt_status mt_ledger_meet(mt_store *s, mt_count what, uint64_t n, double seconds, int *late);

/* In a share: this rank comes to a meeting of all that somebody else holds; what it does there, in
 * words. NULL: it is over. Meetings, submits, spreads and evicts come in one order on all ranks:
 * each does them in one thread. A rank that sees that they do not is a fault (peers.c). */
void      mt_ledger_meeting(mt_store *s, const char *what);

void      mt_ledger_fault(mt_store *s, mt_status st, const char *text);   /* first one stays */
mt_status mt_ledger_check(mt_store *s);                      /* the fault, as this thread's error */
void      mt_ledger_watchdog(mt_store *s, double seconds);
mt_watch *mt_store_watch    (mt_store *s);                   /* of all that works on the store */

#endif
