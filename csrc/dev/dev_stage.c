/* dev_stage.c — a device in front of another, for host memory that cannot be locked.
 *
 * Nouns:
 *   region    host memory that was to be registered: locked, or only noted
 *   buffer    locked memory of ours; a queue has one, from its first copy of a noted region on
 *   slice     what of a copy fits a buffer
 *   cushion   locked memory that nobody uses: given up when something small must be locked
 *
 * A copy from a noted region is, slice by slice, a host function that fills the buffer, and a copy
 * from there to the device; one to a noted region the other way round. All of it is put in the
 * queue that the copy was put in, whose order is the only one there is: a buffer belongs to one
 * queue, so a slice fills it behind the copy of the slice before, and whoever waits for an event
 * behind the copy waits for its last slice. So no edge is new, and the bits are the same. The host
 * function runs where the device calls it (CUDA: a thread of the driver's; CPU device: the
 * queue's), and shares its work with a few threads of ours.
 *
 * Small regions are what kernels write into (sums of squares), so they must be locked: noting them
 * would be wrong, not slow. The cushion keeps room for them when larger ones have
 * taken all there was.
 */
#include "dev_front.h"

#include "../core/arena.h"
#include "../core/lock.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CUSHION_BYTES ((size_t)16 << 20)
#define SMALL_BYTES   ((size_t)64 << 10)
#define BUFFERS       12                    /* three more than queues that an engine has */
#define THREADS       4                     /* one copies 8 to 12 GB/s (Zen 4 server of 2 cores); */
                                            /* PCIe 4 x16 takes some 25, PCIe 5 x16 55 (H200) */
#define CHUNK_BYTES   ((size_t)256 << 10)   /* copied by one thread at a go */
#ifndef BUFFER_BYTES                        /* tests take less */
#define BUFFER_BYTES  ((size_t)2 << 20)     /* 0.05 ms for four threads at 10 GB/s: long beside a
                                             * call */
#endif

typedef struct region {
    char  *p;
    size_t bytes;
    int    locked;
} region;

typedef struct stage_dev {
    mt__front       front;
    mt_pool        *pool;        /* NULL, or written before the first region is noted */

    mt_mutex        registering; /* held while memory is locked, which takes seconds */
    mt_mutex        mu;
    region         *regions;     /* [n] these three: mu */
    int             n;
    int64_t         room;
    atomic_int      n_noted;     /* written under mu, after the region; read by anyone */
    size_t          locked, noted;       /* bytes. mu */
    size_t          limit, small;        /* bytes. mu */
    mt_arena        memory;      /* the buffers' memory; zero before the first registration.
                                  * registering */
    mt_arena        cushion;     /* zero: given up. registering */
    char           *spare[BUFFERS];      /* buffers that no queue has. mu */
    int             n_spare;     /* mu */
    char            why[512];    /* of the first region that was noted. mu */
} stage_dev;

typedef struct stage_queue {
    mt__front_queue front;
    char           *buffer;      /* NULL before the first copy that needs it. The putting thread */
} stage_queue;

static stage_dev *as_dev(mt_dev *d)
{
    return (stage_dev *)(void *)d;
}

static stage_queue *as_queue(mt_queue *q)
{
    return (stage_queue *)(void *)q;
}

/* ---- memory of ours --------------------------------------------------------------------- */

static mt_status pages_open(stage_dev *d, size_t bytes, mt_arena *out)
{
    return mt_arena_open(out, bytes, NULL, d->front.under, "what copies pass through", 0);
}

/* Under registering. Before anything else is locked: afterwards there may be no room for it. */
static mt_status prepare(stage_dev *d)
{
    mt_status st;

    if (d->memory.base != NULL)
        return MT_OK;
    MT_TRY(pages_open(d, CUSHION_BYTES, &d->cushion));
    MT_TRY(pages_open(d, BUFFERS * BUFFER_BYTES, &d->memory));
    mt_lock(&d->mu);
    for (d->n_spare = 0; d->n_spare < BUFFERS; d->n_spare++)
        d->spare[d->n_spare] = (char *)d->memory.base + (size_t)d->n_spare * BUFFER_BYTES;
    mt_unlock(&d->mu);
    return MT_OK;

fail:
    mt_arena_close(&d->cushion);
    return st;
}

/* ---- regions: under registering ----------------------------------------------------------- */

static mt_status lock(stage_dev *d, char *p, size_t bytes)
{
    size_t limit, locked;
    int    small;

    mt_lock(&d->mu);
    small = bytes <= d->small;
    limit = d->limit;
    locked = d->locked;
    mt_unlock(&d->mu);
    if (!small && (bytes > limit || locked > limit - bytes))
        return MT_FAIL(MT_ENOMEM, "%zu bytes of host memory are locked, and %zu may be", locked,
                       limit);
    return d->front.under->ops->host_register(d->front.under, p, bytes);
}

static mt_status add_region(stage_dev *d, char *p, size_t bytes)
{
    region    r = { p, bytes, 1 };
    int       small;
    mt_status st;

    MT_DO(prepare(d));
    small = bytes <= MT_LOCKED(&d->mu, d->small);
    MT_DO(MT_LOCKED(&d->mu, MT_GROW(d->regions, d->room, d->n + 1, "stage")));
    st = lock(d, p, bytes);
    if (st == MT_ENOMEM && small && d->cushion.base != NULL) {       /* it must be locked */
        mt_arena_close(&d->cushion);
        st = lock(d, p, bytes);
    }
    if (st == MT_ENOMEM && !small) {
        r.locked = 0;
        st = MT_OK;
        if (d->pool == NULL) {       /* it is there before regions are noted, and they are copied */
            MT_WITH(&d->mu) (void)snprintf(d->why, sizeof d->why, "%s", mt_last_error());
            st = mt_pool_open(THREADS, &d->pool);
        }
    }
    MT_DO(st);
    MT_HOLD(&d->mu);
    *(r.locked ? &d->locked : &d->noted) += bytes;
    d->regions[d->n++] = r;
    atomic_fetch_add(&d->n_noted, !r.locked);
    return MT_OK;
}

static mt_status stage_host_register(mt_dev *dev, void *p, size_t bytes)
{
    stage_dev *d = as_dev(dev);

    return MT_LOCKED(&d->registering, add_region(d, p, bytes));
}

static void stage_host_unregister(mt_dev *dev, void *p)
{
    stage_dev *d = as_dev(dev);
    region     r = { NULL, 0, 0 };

    mt_lock(&d->mu);
    for (int i = 0; i < d->n && r.p == NULL; i++)
        if (d->regions[i].p == p) {
            r = d->regions[i];
            d->regions[i] = d->regions[--d->n];
            *(r.locked ? &d->locked : &d->noted) -= r.bytes;
            atomic_fetch_sub(&d->n_noted, !r.locked);
        }
    mt_unlock(&d->mu);
    if (r.locked)
        d->front.under->ops->host_unregister(d->front.under, p);
}

static int is_noted(stage_dev *d, const void *at)
{
    const char *p = at;
    int         found = 0;

    MT_HOLD(&d->mu);
    for (int i = 0; i < d->n && !found; i++)
        found = !d->regions[i].locked && p >= d->regions[i].p &&
                p < d->regions[i].p + d->regions[i].bytes;
    return found;
}

/* ---- copies ----------------------------------------------------------------------------- */

typedef struct move {
    mt_pool    *pool;
    char       *to;
    const char *from;
    size_t      bytes;
} move;

/* Threads of ours, and the one that the device calls on. */
static void move_chunk(void *arg, int64_t chunk)
{
    const move *m = arg;
    size_t      at = (size_t)chunk * CHUNK_BYTES;
    size_t      n = m->bytes - at < CHUNK_BYTES ? m->bytes - at : CHUNK_BYTES;

    memcpy(m->to + at, m->from + at, n);
}

static void run_move(void *arg)
{
    move *m = arg;

    mt_pool_run(m->pool, move_chunk, m, (int64_t)((m->bytes + CHUNK_BYTES - 1) / CHUNK_BYTES));
    free(m);
}

static mt_status put_move(stage_queue *q, char *to, const char *from, size_t bytes)
{
    stage_dev *d = as_dev(q->front.base.dev);
    move      *m = malloc(sizeof *m);
    mt_status  st;

    if (m == NULL)
        return MT_FAIL(MT_ENOMEM, "stage: no memory for a copy of %zu bytes", bytes);
    *m = (move){ d->pool, to, from, bytes };
    if ((st = d->front.under->ops->call(q->front.under, run_move, m)) != MT_OK)
        free(m);
    return st;
}

/* up: src is a noted region; else dst is. */
static mt_status put_slices(stage_queue *q, char *dst, const char *src, size_t bytes, int up)
{
    const mt_dev_ops *v = mt__behind(q->front.base.dev)->ops;

    for (size_t at = 0; at < bytes; at += BUFFER_BYTES) {
        size_t n = bytes - at < BUFFER_BYTES ? bytes - at : BUFFER_BYTES;

        if (up)
            MT_DO(put_move(q, q->buffer, src + at, n));
        MT_DO(v->copy(q->front.under, up ? dst + at : q->buffer, up ? q->buffer : src + at, n));
        if (!up)
            MT_DO(put_move(q, dst + at, q->buffer, n));
    }
    return MT_OK;
}

static mt_status stage_copy(mt_queue *queue, void *dst, const void *src, size_t bytes)
{
    stage_queue *q = as_queue(queue);
    stage_dev   *d = as_dev(queue->dev);
    int          up, down;

    if (atomic_load(&d->n_noted) == 0)
        return d->front.under->ops->copy(q->front.under, dst, src, bytes);
    up = is_noted(d, src);
    down = is_noted(d, dst);
    if (up != down && q->buffer == NULL) {
        mt_lock(&d->mu);
        if (d->n_spare > 0)              /* else all are taken */
            q->buffer = d->spare[--d->n_spare];
        mt_unlock(&d->mu);
    }
    /* Without a buffer: CUDA copies memory that is not locked too, but in the caller's time. */
    if (up == down || q->buffer == NULL)
        return d->front.under->ops->copy(q->front.under, dst, src, bytes);
    return put_slices(q, dst, src, bytes, up);
}

/* ---- queues -------------------------------------------------------------------------- */

static mt_status queue_wrap(mt_dev *d, mt_queue *behind, mt_queue **out)
{
    stage_queue *q;
    mt_status    st = MT_MAKE(q, 1, "stage queue");

    if (st != MT_OK) {
        mt__behind(d)->ops->queue_close(behind);
        return st;
    }
    q->front.base.dev = d;
    q->front.under = behind;
    *out = &q->front.base;
    return MT_OK;
}

static mt_status stage_queue_open(mt_dev *d, const char *name, mt_queue **out)
{
    mt_queue *behind;

    MT_DO(mt__behind(d)->ops->queue_open(mt__behind(d), name, &behind));
    return queue_wrap(d, behind, out);
}

static mt_status stage_queue_adopt(mt_dev *d, uintptr_t handle, mt_queue **out)
{
    mt_queue *behind;

    MT_DO(mt__behind(d)->ops->queue_adopt(mt__behind(d), handle, &behind));
    return queue_wrap(d, behind, out);
}

/* When all that was put is over the buffer is nobody's. */
static void stage_queue_close(mt_queue *queue)
{
    stage_queue *q = as_queue(queue);
    stage_dev   *d;

    if (q == NULL)
        return;
    d = as_dev(queue->dev);
    if (q->buffer != NULL)
        (void)d->front.under->ops->sync(q->front.under);
    d->front.under->ops->queue_close(q->front.under);
    if (q->buffer != NULL)
        (void)MT_LOCKED(&d->mu, d->spare[d->n_spare++] = q->buffer);
    free(q);
}

/* ---- the device ------------------------------------------------------------------------- */

static void stage_close(mt_dev *dev)
{
    stage_dev *d = as_dev(dev);

    mt_arena_close(&d->cushion);
    mt_arena_close(&d->memory);
    d->front.under->ops->close(d->front.under);
    mt_pool_close(d->pool);
    mt_mutex_close(&d->mu);
    mt_mutex_close(&d->registering);
    free(d->regions);
    free(d);
}

mt_status mt_dev_stage_open(mt_dev *behind, mt_dev **out)
{
    stage_dev *d;

    MT_DO(MT_MAKE(d, 1, "stage"));
    mt__front_init(&d->front, behind);
    d->front.ops.close = stage_close;
    d->front.ops.host_register = stage_host_register;
    d->front.ops.host_unregister = stage_host_unregister;
    d->front.ops.queue_open = stage_queue_open;
    d->front.ops.queue_adopt = stage_queue_adopt;
    d->front.ops.queue_close = stage_queue_close;
    d->front.ops.copy = stage_copy;
    d->limit = SIZE_MAX;
    d->small = SMALL_BYTES;
    mt_mutex_open(&d->registering, MT_RANK_REGISTERING);
    mt_mutex_open(&d->mu, MT_RANK_LEAF);
    atomic_init(&d->n_noted, 0);
    *out = &d->front.base;
    return MT_OK;
}

size_t mt_dev_stage_noted(mt_dev *dev, char *why, size_t n)
{
    stage_dev *d = as_dev(dev);
    size_t     noted;

    MT_HOLD(&d->mu);
    noted = d->noted;
    (void)snprintf(why, n, "%s", d->why);
    return noted;
}

void mt_dev_stage_limit(mt_dev *dev, size_t bytes, size_t small)
{
    stage_dev *d = as_dev(dev);

    MT_HOLD(&d->mu);
    d->limit = bytes;
    d->small = small;
}
