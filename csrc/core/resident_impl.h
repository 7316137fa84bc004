/* resident_impl.h — what the two files of settled units share; nobody else includes it.
 *
 *     resident.c   settles units, fetches weights, puts updates, brings what ranks have updated to
 *                  each other (the ferry), and is the home of both tables
 *     arrive.c     guests' states, up and down
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

    mt_event    *lowered, *raised;   /* these nine in a share: recorded on down, and on up */
    mt_post      lowering;           /* of `ends`'s thread */
    mt_post      raising;
    mt_mem_name *names;              /* [ranks] of slots. These two NULL: out of reach */
    void       **slots;              /* [ranks] where they are here; NULL: in its own. Another
                                      * machine's: its speaker's */
    unsigned char *news;             /* [params] of weights that are aloft, that other slots have */
    int          has_news;           /* of some */
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

/* resident.c. find: whatever is held. record: e on q, and the watchdog is told. */
mt_status mt__settled_find  (const mt_resident *r, int unit, mt__settled **out);
void      mt__assert_settled(const mt_resident *r, const mt__settled *h);
mt_status mt__record        (const mt_resident *r, const mt__settled *h, mt_queue *q, mt_event *e,
                             mt_post *post, const char *queue, const char *awaits);

/* arrive.c. before: q goes on when the states are up. behind: copies of what the update changed
 * come down behind `done`. Without mu: copied, until host planes of the states may be read and
 * written, of who has waited for what is announced; push, the parameter's (-1: all) host planes
 * were written; drain. */
mt_status mt__arrive_before (mt_resident *r, mt__settled *h, mt_queue *q);
mt_status mt__arrive_behind (mt_resident *r, mt__settled *h, const int *params, int n);
mt_status mt__arrive_copied (const mt_resident *r, int unit);
mt_status mt__arrive_push   (mt_resident *r, int unit, int param, unsigned planes);
mt_status mt__arrive_drain  (mt_resident *r);
void      mt__arrive_close  (const mt_resident *r, mt__settled *h);      /* it is no guest now */

#endif
