/* swap_block.h — registered host memory for one bundle (swap.h), and an event for each way. For
 * swap.c and spill.c alone.
 *
 * Threads: whoever holds swap's lock records its events; any may wait for them.
 */
#ifndef MT_SWAP_BLOCK_H
#define MT_SWAP_BLOCK_H

#include "arena.h"
#include "watch.h"

typedef struct mt_swap_block {
    mt_arena  arena;
    mt_event *filled;                    /* recorded on out behind the copies out */
    mt_event *landed;                    /* recorded on back behind the copies back */
    mt_post   filling, landing;          /* of the two queues, until those are done */
} mt_swap_block;

/* mapped: as mt_arena_open's. b is zero before, and again after a failure. */
mt_status mt_swap_block_open (mt_swap_block *b, size_t bytes, mt_dev *dev, mt_pool *pool,
                              size_t mapped);
/* watch NULL: nobody's posts. Closed or zero: nothing to do. */
void      mt_swap_block_close(mt_swap_block *b, mt_dev *dev, mt_watch *watch);

#endif
