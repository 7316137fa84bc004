/* store.h — where every byte of the model is, and who may touch it.
 *
 * Nouns, in the order they appear below:
 *   unit     parameters that are streamed together
 *   plane    one kind of value for all parameters of a unit; an arena each,
 *            made when first asked for
 *   home     where a unit's planes are between steps, by a table (see home.h); what is away of them
 *            has copies in host memory (see mirror.h)
 *
 *     mt_store_open(&cx, &s);
 *     mt_store_add(s, "layers.0", params, 12, &unit);
 *     mt_store_at(s, unit, 3, MT_PLANE_HI, &w);       // host address of parameter 3's weights
 *     mt_ledger_wait_updates(s, unit);                // no update of it is under way any more
 *
 * Layout: parameter i of a unit starts in every plane at a multiple of 512 bytes; the HI plane
 *         is what crosses to the device in one copy, so a slot has the same offsets.
 * Threads: any. Only who asks for a plane's memory waits while that is made. What is set of a unit
 *          (passing, states, owners) is set before anybody asks for a plane of it.
 */
#ifndef MT_STORE_H
#define MT_STORE_H

#include "context.h"
#include "ledger.h"
#include "pool.h"
#include "portion.h"
#include "timeline.h"

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

/* Where parameters, and parts of them (pieces.h), begin: what GEMMs and disks like. */
#define MT_PART_ALIGN ((size_t)512)

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

/* In a share several processes update a unit, and each owns a portion of it (portion.h): of planes
 * other than HI nothing else is committed, nor is on the device, and what moves them moves nothing
 * else. Without one, all of the unit is this process's own. How many of a parameter's elements are
 * its own, and the first of them. Any thread. */
int64_t   mt_store_owned(const mt_store *s, int unit, int param, int64_t *from);
/* Any owner's portion, and bytes [*from, *to) of it in plane HI. MT_EINVAL: no such unit, or
 * owner. */
mt_status mt_portion_of   (const mt_store *s, int unit, int owner, int owners, mt_portion *out);
mt_status mt_portion_bytes(const mt_store *s, int unit, int owner, int owners, size_t *from,
                           size_t *to);

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
mt_watch *mt_store_watch    (mt_store *s);               /* of all that works on the store */

#endif
