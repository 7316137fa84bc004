/* pool.h — a few threads that share one loop at a time.
 *
 * mt_pool_run splits [0, n_chunks) among the pool's threads and the caller; chunks are taken
 * dynamically, so results must not depend on who takes which. Returns when all are done.
 *
 * Threads: mt_pool_run may be called from several threads; the calls take turns (a loop that
 *          needs no worker, of one chunk or in a pool of one, does not wait for a turn).
 *          Not from inside a chunk. The caller works too, so a pool of n has n-1 workers.
 */
#ifndef MT_POOL_H
#define MT_POOL_H

#include "status.h"
#include <stdint.h>

typedef struct mt_pool mt_pool;
typedef void (*mt_chunk_fn)(void *arg, int64_t chunk);

/* n_threads >= 1 counts the caller of mt_pool_run. */
mt_status mt_pool_open(int n_threads, mt_pool **out);
void      mt_pool_close(mt_pool *p);                 /* NULL is fine; no run is under way */
MT_CLOSER(mt_pool_close, mt_pool)
/* p NULL: the calling thread alone. */
void      mt_pool_run(mt_pool *p, mt_chunk_fn fn, void *arg, int64_t n_chunks);

#endif
