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

#include "debug.h"
#include "dev.h"

typedef struct mt_context {
    struct mt_dev      *dev;
    struct mt_pool     *pool;            /* NULL: the calling thread alone */
    struct mt_share    *share;           /* what other processes have of the store too; NULL: this
                                          * one is alone */
    struct mt_store    *store;           /* in it the watch of all that works on it */
    struct mt_turns    *turns;           /* NULL without a share */
    struct mt_timeline *timeline;        /* NULL: nothing is recorded */
    void              (*warn)(const char *text);     /* the watch calls it; NULL: nobody */
    mt_debug            debug;           /* see below: any thread */

    struct mt_resident *residents;       /* this and those below are NULL while that room is not
                                          * open */
    struct mt_arrive   *arrive;
    struct mt_through  *through;
    struct mt_disk     *disk;
    struct mt_feed     *feed;
} mt_context;

static inline void mt_debug_set(mt_context *cx, mt_debug d)
{
    __atomic_store_n(&cx->debug.skip, d.skip, __ATOMIC_RELAXED);
    __atomic_store_n(&cx->debug.poison, d.poison, __ATOMIC_RELAXED);
    __atomic_store_n(&cx->debug.sync, d.sync, __ATOMIC_RELAXED);
}

static inline int mt_skips(const mt_context *cx, unsigned edge)
{
    return (__atomic_load_n(&cx->debug.skip, __ATOMIC_RELAXED) & edge) != 0;
}

/* q waits for e, unless a test leaves that edge out. */
static inline mt_status mt_edge(const mt_context *cx, unsigned edge, mt_queue *q, mt_event *e)
{
    return mt_skips(cx, edge) ? MT_OK : q->dev->ops->wait(q, e);
}

static inline int mt_poisons(const mt_context *cx)
{
    return __atomic_load_n(&cx->debug.poison, __ATOMIC_RELAXED);
}

static inline int mt_syncs(const mt_context *cx)
{
    return __atomic_load_n(&cx->debug.sync, __ATOMIC_RELAXED);
}

#endif
