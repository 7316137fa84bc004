/* relay.h — between shares: what ranks of one machine said, for those of another, and what
 * belongs to it.
 *
 * Each machine has a share with slots and boards of all ranks, and with whole weights. Of all other
 * planes it has the portions of its own ranks. For a rank of another machine its speaker here says
 * what it said there, in its order, once what that is about is here too:
 *
 *   an update of a unit is over      its portion of the unit's weights, into host memory or, of a
 *   on its device, or ended          unit at home on the devices, from slot to slot (home.h)
 *   its gradients were measured      the sums of its chunks
 *   it did what a rank here asked    its portion of the planes that were asked for
 *
 * So who waits for a rank, or reads what it has updated, need not know on which machine it is.
 *
 * Nouns, in the order they appear below:
 *   parcel   a note, or bytes that belong to the next note and come before it
 *
 *     mt_relay_open(store, &r);
 *     mt_relay_next(r, 100, &parcel, &mem, &to, &some);    // the sender: parcel, then its bytes
 *
 *     mt_relay_place(store, rank, &parcel, &mem);     // who speaks for rank: where the bytes go
 *     mt_relay_ready(store, rank, &parcel, &is);      // may they be written there? else later
 *     mt_relay_come (store, rank, &parcel);           // they are there
 *
 * No edge is needed but the order of one rank's parcels. Weights are written here while nobody
 * reads them: the update that made them began when all ranks of all machines had said CLEAR, and
 * had copied what a save of theirs had to copy. What a rank says behind that says it here too. A
 * parcel whose bytes change while they are on their way is of an update which is followed by
 * another, that began after all ranks had said so: nobody reads before that one has ended.
 *
 * A slot is written when this rank's own update of the unit is over on its device: what computed on
 * the weights before it was then over too. The rank that sent ends its update behind that, when its
 * weights are in its host memory; so who speaks for it ends it here when they are in host memory
 * here, copied from the slot.
 *
 * Threads: next: one. place, ready, come: one for each rank. All as long as the store is open.
 */
#ifndef MT_RELAY_H
#define MT_RELAY_H

#include "store.h"

/* Of a parcel: what its bytes are. A note's may be a text. */
#define MT_PARCEL_MAP(X)                                                                           \
    X(NOTE,    "none, or what failed")                                                             \
    X(WEIGHTS, "of plane HI of the unit")                                                          \
    X(SLOT,    "of the unit's weights, on the device")                                             \
    X(PLANE,   "of plane `what` of a parameter of the unit")                                       \
    X(CHUNKS,  "of the sums on the unit's board")
#define MT_PARCEL_ENUM(name, what) MT_PARCEL_##name,
enum { MT_PARCEL_MAP(MT_PARCEL_ENUM) MT_PARCELS };
#undef MT_PARCEL_ENUM

/* As it travels, between machines of one order of bytes. */
typedef struct mt_parcel {
    int32_t  kind, unit, param, what;    /* what: of a note its counter, see mt_note. param: of one
                                          * of an update, whether its weights went into the slot */
    uint64_t n, about;                   /* of a note; n: of the one that it comes before too */
    uint64_t at, bytes;  /* the first byte, of the plane, the parameter's or the board's */
} mt_parcel;

typedef struct mt_relay mt_relay;

mt_status mt_relay_open (mt_store *s, mt_relay **out);
void      mt_relay_close(mt_relay *r);                   /* NULL is fine */
/* *mem: its bytes. *to: the rank to whose machine it goes; -1: to all. *some = 0: nothing was said
 * within ms. */
mt_status mt_relay_next (mt_relay *r, int ms, mt_parcel *out, void **mem, int *to, int *some);

/* MT_EINVAL: a parcel that cannot be the rank's. *mem is not set where it has no bytes. */
mt_status mt_relay_place(mt_store *s, int rank, const mt_parcel *p, void **mem);
/* *is = 0: its bytes may not be written yet. After a fault they may: nobody reads them. */
mt_status mt_relay_ready(mt_store *s, int rank, const mt_parcel *p, int *is);
/* Of an update that ended: waits until host memory has what came into the slot. */
mt_status mt_relay_come (mt_store *s, int rank, const mt_parcel *p);

#endif
