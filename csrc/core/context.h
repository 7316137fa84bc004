/* context.h — what the rooms of one engine share. Each is given it when it is opened.
 *
 *     mt_context cx = { .dev = dev, .pool = pool };
 *     mt_store_open(&cx, &cx.store);
 *     mt_timeline_open(dev, &cx.timeline);
 *     mt_resident_open(&cx, &r);                      // from now on cx.residents is r
 *     mt_offload_open(&cx, 2, kernels, &o);
 *
 * Threads: written by who opens and closes rooms, read by any; it outlives them all. Rooms in which
 *          units live write themselves here when they open, which is before any unit lives there,
 *          and are forgotten when they close.
 */
#ifndef MT_CONTEXT_H
#define MT_CONTEXT_H

#include "dev.h"

#include <stdatomic.h>

/* What tests may switch off, to see that it matters; nothing of it is on for a user. skip: edges
 * between queues that are left out. poison: a slot is filled with 0xFF before its copy. sync:
 * overlap off, nothing is fetched ahead, and every call returns when its work is over. */
enum {
    MT_EDGE_READY = 1, MT_EDGE_FREED = 2, MT_EDGE_GRAD = 4, MT_EDGE_LANDED = 8,
    MT_EDGE_UPDATED = 16, MT_EDGE_STEPPED = 32, MT_EDGE_ASKED = 64, MT_EDGE_SPENT = 128,
    MT_EDGE_VACANT = 256, MT_EDGE_LIFTED = 512, MT_EDGE_MADE = 1024, MT_EDGE_STORED = 2048,
    MT_EDGE_FETCHED = 4096,
    MT_EDGE_MOVED = 1 << 13, MT_EDGE_LOWERED = 1 << 14, MT_EDGE_RAISED = 1 << 15,
    MT_EDGE_COMPUTED = 1 << 16, MT_EDGE_LEFT = 1 << 17, MT_EDGE_ROOM = 1 << 18,     /* swap.h */
    MT_EDGE_KEPT = 1 << 19, MT_EDGE_BACK = 1 << 20, MT_EDGE_EMPTIED = 1 << 21,
    MT_EDGE_FULL = 1 << 22, MT_EDGE_WRITTEN = 1 << 23, MT_EDGE_READ = 1 << 24,      /* swap.h */
    MT_EDGE_DRAINED = 1 << 25, MT_EDGE_GONE = 1 << 26
};
typedef struct mt_debug { atomic_uint skip; atomic_int poison, sync; } mt_debug;

typedef struct mt_context {
    struct mt_dev      *dev;
    struct mt_pool     *pool;            /* NULL: the calling thread alone */
    struct mt_share    *share;           /* what other processes have of the store too; NULL: this
                                          * one is alone */
    struct mt_store    *store;           /* in it the watch of all that works on it */
    struct mt_turns    *turns;           /* NULL without a share */
    struct mt_timeline *timeline;        /* NULL: nothing is recorded */
    void              (*warn)(const char *text);     /* the watch calls it; NULL: nobody */
    mt_debug            debug;           /* any thread, while others work */

    struct mt_resident *residents;       /* this and those below are NULL while that room is not
                                          * open */
    struct mt_through  *through;
    struct mt_disk     *disk;
    struct mt_disk     *feed;            /* the disk, while weights may be fetched from it */
} mt_context;

static inline int mt_skips(const mt_context *cx, unsigned edge)
{
    return (cx->debug.skip & edge) != 0;
}

/* q waits for e, unless a test leaves that edge out. */
static inline mt_status mt_edge(const mt_context *cx, unsigned edge, mt_queue *q, mt_event *e)
{
    return mt_skips(cx, edge) ? MT_OK : q->dev->ops->wait(q, e);
}

#endif
