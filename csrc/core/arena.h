/* arena.h — one region of host memory, as large as asked for, warm when it is handed out.
 *
 *     mt_arena a = {0};
 *     mt_arena_open(&a, bytes, pool, dev, "unit layers.0, plane HI", mapped);
 *     a.base ...                                  // zero, in memory, known to the device
 *     mt_arena_close(&a);
 *
 * Threads: an arena belongs to one thread at a time; the store's lock sees to it.
 */
#ifndef MT_ARENA_H
#define MT_ARENA_H

#include "dev.h"
#include "pool.h"

typedef struct mt_arena {
    void   *base;            /* NULL: not open. Aligned to a page; to 2 MiB from 4 MiB on */
    size_t  bytes;           /* mapped: what was asked for, in whole pages; 0 when that was 0 */
    mt_dev *dev;             /* the region is registered here; NULL when it is not */
} mt_arena;

/* Maps anonymous memory, asks for huge pages where they pay, touches every page on the pool
 * (pool NULL: on this thread), and registers it with dev unless that is NULL. All bytes are zero.
 * what and mapped (bytes the caller has mapped already) are for the message of MT_ENOMEM.
 * bytes 0: nothing is mapped; base is an address that may be compared but not read. */
mt_status mt_arena_open (mt_arena *a, size_t bytes, mt_pool *pool, mt_dev *dev,
                         const char *what, size_t mapped);
void      mt_arena_close(mt_arena *a);             /* closed or zeroed: nothing to do */

#endif
