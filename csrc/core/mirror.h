/* mirror.h — host memory that mirrors planes whose home is elsewhere: the device, or a file.
 *
 * Nouns, in the order they appear below:
 *   home       keeps the true values of a unit's planes, and moves them to and from the host by the
 *              functions of its table (home.h)
 *   copy       one parameter's host plane. Its state says which of the two has which values
 *   event      what happens to a copy; the table says which state follows
 *   claim      of a unit's plane: somebody brought it and may read it for as long as it has the
 *              values that it had then. Whoever writes weights has a claim too
 *   door       of a unit: one thread at a time loads its copies, stores them, or evicts them
 *   reserved, committed    of the host memory of a plane: addresses alone; addresses with pages
 *
 *     mt_store_move(s, unit, &mt_home_disk, disk);        // the unit's states are with it
 *     mt_mirror_bring(s, unit, 1u << MT_PLANE_HI);        // a reader: the host has current weights
 *     ... reads, for as long as no update changes them ...
 *     mt_mirror_tell(s, unit, i, planes, MT_MIRROR_CHANGED);   // the home, when it updates
 *     mt_mirror_forget(s, unit);                          // before the unit's next window
 *
 * What is always true:
 *   (1) Memory that somebody claims is given back by evict alone. In a share that is every rank's
 *       claim: no rank evicts before all have come to the unit's evict, and so read it no more
 *   (2) In a share no rank leaves an evict before all have given their portions' memory back: who
 *       brings the unit again finds nothing there that is about to go
 *   (3) One thread at a time is behind a unit's door, and only there are copies loaded, stored or
 *       given back
 *   (4) A copy that has values which the home has not, or that is being copied, is not given back
 *   (5) What is announced of a plane is over before a reader looks at it. Who serves other ranks
 *       waits for none of it: who asks has, and all ranks announce the same
 *
 * When memory is evicted, that is its pages are given back and the addresses stay:
 *   release    by a save that has read, what nobody claims
 *   forget     what is stale: before the unit's next window, since until then a graph may have used
 *              it as it was. A home that waits for nobody may do so at once, with states
 *   evict      everything, claimed or not, when the unit's memory on the host is to end
 *   and never: gradients, over which anybody may have a tensor, what the home does not have, and in
 *              a share trained weights of a device that goes by way of host memory to the others.
 *              Of what is evicted the other ranks have no need: release comes behind all ranks'
 *              saves of the unit
 *
 * Threads: any, but close: one, while no other is inside for that unit.
 *
 * When a unit comes to a home, what the host has of its planes is AHEAD, and so are planes that the
 * home stores later.
 */
#ifndef MT_MIRROR_H
#define MT_MIRROR_H

#include "home.h"

/*  EMPTY    Neither side was written since it was made, or the plane has nothing of the parameter.
 *  STALE    The home has values that the host has not. The host's memory may be reserved only.
 *  LOADING  The home's values are being copied to the host.
 *  FRESH    The host has the home's values.
 *  AHEAD    The host has values that the home has not.
 *  STORING  The host's values are being copied to the home.
 *  TORN     Each has values that the other has not: one was written without the other. Refused.
 *
 *  CHANGED  the home got other values: by an update, or a hand-over of gradients
 *  LOAD     somebody wants the copy; LOADED when its values came
 *  SET      the host's plane of this parameter got values, all of them
 *  TOUCHED  some of the host's weights got values, which of them is not known
 *  STORE    a copy that is AHEAD goes to the home; STORED when the home has it
 *  FAILED   a load or a store failed: the home's values count
 *  EVICTED  the plane's pages were given back
 *
 *  NEVER    an assertion fails: the door, or the home's own lock, keeps this from happening.
 */
#define MT_MIRROR_STATES(X) X(EMPTY) X(STALE) X(LOADING) X(FRESH) X(AHEAD) X(STORING) X(TORN)
#define MT_MIRROR_EVENTS(X) \
    X(CHANGED) X(LOAD) X(LOADED) X(SET) X(TOUCHED) X(STORE) X(STORED) X(FAILED) X(EVICTED)
#define MT_MIRROR_TABLE(X)                                                                        \
/*     state    CHANGED LOAD     LOADED   SET     TOUCHED STORE    STORED   FAILED   EVICTED */   \
    X( EMPTY,   STALE,  EMPTY,   EMPTY,   AHEAD,  AHEAD,  EMPTY,   EMPTY,   EMPTY,   EMPTY )      \
    X( STALE,   STALE,  LOADING, STALE,   AHEAD,  TORN,   STALE,   STALE,   STALE,   STALE )      \
    X( LOADING, STALE,  NEVER,   FRESH,   TORN,   TORN,   LOADING, LOADING, STALE,   NEVER )      \
    X( FRESH,   STALE,  FRESH,   FRESH,   AHEAD,  AHEAD,  FRESH,   FRESH,   FRESH,   STALE )      \
    X( AHEAD,   TORN,   AHEAD,   AHEAD,   AHEAD,  AHEAD,  STORING, AHEAD,   AHEAD,   NEVER )      \
    X( STORING, STALE,  STORING, STORING, AHEAD,  AHEAD,  NEVER,   FRESH,   STALE,   NEVER )      \
    X( TORN,    TORN,   TORN,    TORN,    AHEAD,  TORN,   TORN,    TORN,    TORN,    NEVER )

#define MT__MIRROR_STATE(name) MT_MIRROR_##name,
#define MT__MIRROR_EVENT(name) MT_MIRROR_##name,
typedef enum mt_mirror_state {
    MT_MIRROR_STATES(MT__MIRROR_STATE) MT_MIRROR_NEVER, MT_MIRROR_STATE_COUNT = MT_MIRROR_NEVER
} mt_mirror_state;
typedef enum mt_mirror_event {
    MT_MIRROR_EVENTS(MT__MIRROR_EVENT) MT_MIRROR_EVENT_COUNT
} mt_mirror_event;
#undef MT__MIRROR_STATE
#undef MT__MIRROR_EVENT

/* ---- homes -------------------------------------------------------------------------------- */

/* Called by a home that ends before the store: the unit has no mirror any more. It need not have
 * had one. */
void mt_mirror_close(mt_store *s, int unit);

/* Event e for the parameter's copies (param -1: for all parameters'). CHANGED ends claims. */
void mt_mirror_tell(mt_store *s, int unit, int param, unsigned planes, mt_mirror_event e);
/* CHANGED, for copies of these parameters. */
void mt_mirror_change(mt_store *s, int unit, const int *params, int n, unsigned planes);
/* In a share: host memory has the parameter's weights while somebody reads them alone (mirror.c).
 * -1: some. */
int  mt_mirror_aloft(mt_store *s, int unit, int param);
/* Is some copy in one of these states, 1u << state each? */
int  mt_mirror_any (mt_store *s, int unit, int param, unsigned planes, unsigned states);
/* The home stores what is AHEAD, but for its `later` planes. What it could not store is AHEAD
 * still. */
mt_status mt_mirror_store(mt_store *s, int unit);

mt_status mt_mirror_enter(mt_store *s, int unit);          /* the door; waits */
void      mt_mirror_leave(mt_store *s, int unit);
/* Behind the door: memory of these planes is given back, but of what must stay. */
void      mt_mirror_drop   (mt_store *s, int unit, unsigned planes);

/* ---- readers and writers ------------------------------------------------------------------
 * Of a unit that has no home but the host there is nothing to do, and of other planes neither. */

/* Host planes are current: waits for what is announced of them, and for copies of what is stale.
 * bring claims them. peek is a save's, and is followed by release: updates announced meanwhile wait
 * for the save, so it does not for them. MT_ESTATE where a copy is TORN. In a share each rank
 * copies its own portion: the others are asked for theirs (mirror.c), where these are not in host
 * memory yet. bring_own does not ask. */
mt_status mt_mirror_bring  (mt_store *s, int unit, unsigned planes);
mt_status mt_mirror_bring_own(mt_store *s, int unit, unsigned planes);
mt_status mt_mirror_peek   (mt_store *s, int unit, unsigned planes);
/* bring, of one parameter's weights (-1: all). Those that are aloft (mirror.c) come if it is. */
mt_status mt_mirror_read   (mt_store *s, int unit, int param);
mt_status mt_mirror_release(mt_store *s, int unit);
/* In a share of several machines: memory of the portions of other machines that peek has brought,
 * and bring has not, is given back, whatever the unit's home. 0: not all of it, since a rank saves
 * the unit. */
int       mt_mirror_release_apart(mt_store *s, int unit);
/* The parameter's host planes (param -1: all parameters') were written: the home has their values
 * when this returns, or stores them later. HI: the unit has a new version then. */
mt_status mt_mirror_push   (mt_store *s, int unit, int param, unsigned planes);
/* Does nothing while a save has the unit, or a thread is behind the door. */
void      mt_mirror_forget (mt_store *s, int unit);
int       mt_mirror_is_old (mt_store *s, int unit);        /* forget would give memory back */
/* Waits for a save of the unit. In a share all ranks evict the same units in one order. */
mt_status mt_mirror_evict  (mt_store *s, int unit);

#endif
