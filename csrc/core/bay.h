/* bay.h — registered host memory for one bundle (swap.h), and an event for each way.
 * For swap.c and spill.c alone.
 *
 * Threads: whoever holds swap's lock records its events, and looks for them to be waited for.
 */
#ifndef MT_BAY_H
#define MT_BAY_H

#include "arena.h"
#include "watch.h"

#define MT_BAY "activations on the host"     /* its memory, in messages */

typedef struct mt_bay {
    mt_arena  arena;
    mt_event *filled;                    /* recorded on out behind the copies out */
    mt_event *landed;                    /* recorded on back behind the copies back */
    mt_post   filling, landing;          /* of the two queues, until those are done */
} mt_bay;

/* mapped: as mt_arena_open's. b is zero before, and again after a failure. */
mt_status mt_bay_open (mt_bay *b, size_t bytes, mt_dev *dev, mt_pool *pool, size_t mapped);
/* watch NULL: nobody's posts. Closed or zero: nothing to do. */
void      mt_bay_close(mt_bay *b, mt_dev *dev, mt_watch *watch);

#endif
