/* resident_impl.h — what the three files of settled units share; nobody else includes it.
 *
 *     resident.c   settles units, fetches weights, puts updates, and is the home of both tables
 *     arrive.c     guests' states, up and down
 *     ferry.c      updated weights, between ranks
 *
 * The ferry: an all-gather of updated weights between ranks that have them on their devices. Each
 * rank has the whole weights of a settled unit in a slot, and updates its own portion there. The
 * others copy that portion from slot to slot, where slots are within each other's reach (NVLink, or
 * peer access over PCIe): 2 (N - 1) / N bytes of a parameter. It also goes down to the share, where
 * every process reads weights whatever the unit's home: 2 / N bytes. Ranks whose slots are out of
 * reach fetch it up from there. Other machines' portions come into the slot of who speaks for their
 * rank (relay.h), and go down to the share from there. No rank waits at a collective.
 *
 * Units are raised in the order in which their updates were put, ahead of their windows; an await
 * that comes before does it itself. They are lowered in chunks, two in the queue at a time: a
 * device has one engine for copies to the host, and a value that somebody reads waits behind all of
 * them.
 *
 * Threads: mu is the one lock. Functions that do not say otherwise are called under it.
 */
#ifndef MT_RESIDENT_IMPL_H
#define MT_RESIDENT_IMPL_H

#include "resident.h"
#include "timeline.h"
#include "worker.h"

#include <stdatomic.h>

/* One settled unit. Its events' pointers are settle's and invite's; all else is under mu. */
typedef struct mt__settled {
    mt_job       rise;               /* in the ferry's `raises`, once or not */
    int          unit;
    void        *mem;                /* of its slot */
    mt_event    *done;               /* recorded on the queue behind what was put for the unit */
    mt_event    *used;               /* recorded on run by an await that fetches */
    mt_post      post, using;        /* of the two, for the watchdog */
    uint64_t     writes;             /* in a share: those from outside that its own portion has */

    mt_event    *last, *vacant;      /* these six of a guest: recorded on guests behind its last
                                      * copy; on run by lift */
    mt_post      copying;            /* of `last` */
    mt_part     *parts;              /* [n] of the stay; NULL: there is none */
    int          n;
    uint64_t     bytes;              /* that came up for the latest stay */

    mt_event    *lowered, *raised;   /* these seven in a share: recorded on down, and on up */
    mt_post      lowering;           /* of `ends`'s thread */
    mt_post      raising;
    mt_mem_name *names;              /* [ranks] of slots. These two NULL: out of reach */
    void       **slots;              /* [ranks] where they are here; NULL: in its own. Another
                                      * machine's: its speaker's */
    mt_update   *trip;               /* in `steps`, where slots are within reach, then in `ends`;
                                      * NULL: no update is on its way down */
} mt__settled;

struct mt_resident {
    mt_context       *cx;
    mt_dev           *dev;
    mt_store         *store;
    mt__settled     **units;         /* [n_units] by unit, NULL: not settled. Written by settle */
    int64_t           n_units;

    mt_mutex          mu;            /* held around puts too: one thread at a time */
    mt_queue         *queue;
    mt_event         *drained;       /* recorded on the queue by who waits for all of it */
    void             *scratch;
    size_t            scratch_bytes;
    int               lifted;        /* the update that is being put asked for scratch */
    mt_event         *updated;       /* a unit's `done`, of the last update that was put, or NULL */
    mt_resident_stats stats;

    mt_queue         *guests;        /* of copies of guests' states; made by the first invite */
    mt_event         *all_left;      /* recorded there by who waits for all of it; made with it */
    uint64_t          down, turn;    /* bytes that came down there; at which others come between */

    struct mt__ferry {
        int        open;             /* other processes have the units; as long as any is settled */
        mt_queue  *down, *up;        /* down: `ends`'s thread */
        mt_queue  *landing;          /* of who hears other machines, under `serving` */
        mt_event  *chunks[2];        /* recorded on down, in turns */
        mt_worker  steps, ends, raises;      /* see updates end on the device; copy them down and
                                              * end them; raise */
        atomic_int stopped;
    } ferry;
};

/* resident.c. find: whatever is held. record: e on q, and the watchdog is told. raise: without mu,
 * on the ferry's thread: asks for what other ranks have updated. */
mt_status mt__settled_find  (const mt_resident *r, int unit, mt__settled **out);
void      mt__assert_settled(const mt_resident *r, const mt__settled *h);
mt_status mt__record        (const mt_resident *r, const mt__settled *h, mt_queue *q, mt_event *e,
                             mt_post *post, const char *queue, const char *awaits);
void      mt__raise         (mt_resident *r, mt__settled *h);

/* arrive.c. parts: of the stay, on the device, until it ends; MT_ESTATE when there is none. before:
 * q goes on when the states are up. behind: copies of what the update changed come down behind
 * `done`. Without mu: copied, until host planes of the states may be read and written, of who has
 * waited for what is announced; push, the parameter's (-1: all) host planes were written; drain. */
mt_status mt__arrive_parts  (const mt_resident *r, int unit, const mt_part **parts, int *n);
mt_status mt__arrive_before (mt_resident *r, mt__settled *h, mt_queue *q);
mt_status mt__arrive_behind (mt_resident *r, mt__settled *h, const int *params, int n);
mt_status mt__arrive_copied (const mt_resident *r, int unit);
mt_status mt__arrive_push   (mt_resident *r, int unit, int param, unsigned planes);
mt_status mt__arrive_drain  (mt_resident *r);
void      mt__arrive_close  (const mt_resident *r, mt__settled *h);      /* it is no guest now */

/* ferry.c. Without mu: open, where it is not; stop, all that was begun has ended; close; reach, as mt_resident_reach, of what is left
 * where names is NULL; idle, until the unit's last update has ended. lower: the ferry ends the
 * update, behind `done`. raise: the others' portions, in up. back: the own one from the share into
 * the slot, in q, and those that came from other machines, of which only what is updated comes
 * again. Without mu: land, bytes of other machines' weights from the slot to the share, unless that
 * has newer ones. */
mt_status mt__ferry_open (mt_resident *r);
void      mt__ferry_stop (mt_resident *r);
void      mt__ferry_close(mt_resident *r);
mt_status mt__ferry_reach(mt_resident *r, mt__settled *h, const mt_mem_name *names);
mt_status mt__ferry_idle (mt_resident *r, const mt__settled *h);
void      mt__ferry_lower(mt_resident *r, mt__settled *h, mt_update *u);
mt_status mt__ferry_raise(mt_resident *r, mt__settled *h);
mt_status mt__ferry_back (mt_resident *r, const mt__settled *h, mt_queue *q);
mt_status mt__ferry_land (mt_resident *r, int unit, size_t from, size_t to);

#endif
