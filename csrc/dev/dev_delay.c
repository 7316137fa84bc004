/* dev_delay.c — a device in front of another whose queues dawdle.
 *
 * A nap is a host function put in the queue before the operation it delays, so it takes place in
 * the queue's order and the queue's random numbers need no lock. Queues are numbered as they are
 * opened; a queue's naps depend on the seed and that number alone.
 *
 * It answers to the name of the device behind, so whoever picks kernels by name picks the right
 * ones; handle() is the stream behind: kernels put there directly are not delayed.
 */
#include "../core/dev.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

typedef struct delay_dev {
    mt_dev      base;
    mt_dev_ops  ops;             /* delay_ops under the name of the device behind; constant */
    mt_dev     *under;           /* constant */
    uint64_t    seed;            /* constant */
    uint64_t    max_us;          /* constant */
    atomic_uint queues;          /* opened so far; any thread */
} delay_dev;

typedef struct delay_queue {
    mt_queue  base;
    mt_queue *under;
    int       dawdles;           /* 0: adopted */
    uint64_t  max_us;
    uint64_t  random;            /* the queue's naps, which run one after the other */
} delay_queue;

typedef struct delay_event {
    mt_event  base;
    mt_event *under;
} delay_event;

static delay_dev *as_dev(mt_dev *d)
{
    return (delay_dev *)(void *)d;
}

static delay_queue *as_queue(mt_queue *q)
{
    return (delay_queue *)(void *)q;
}

static delay_event *as_event(mt_event *e)
{
    return (delay_event *)(void *)e;
}

static mt_dev *under(mt_dev *d)
{
    return as_dev(d)->under;
}

static void delay_close(mt_dev *d)
{
    under(d)->ops->close(under(d));
    free(d);
}

static mt_status delay_host_register(mt_dev *d, void *p, size_t bytes)
{
    return under(d)->ops->host_register(under(d), p, bytes);
}

static void delay_host_unregister(mt_dev *d, void *p)
{
    under(d)->ops->host_unregister(under(d), p);
}

static mt_status delay_mem_alloc(mt_dev *d, size_t bytes, void **out)
{
    return under(d)->ops->mem_alloc(under(d), bytes, out);
}

static void delay_mem_free(mt_dev *d, void *p)
{
    under(d)->ops->mem_free(under(d), p);
}

/* ---- queues ----------------------------------------------------------------------------- */

/* splitmix64: Steele, Lea & Flood 2014, figure 17. Any seed will do, 0 too. */
static uint64_t next_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;

    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* On the queue's thread (CUDA: the driver's). */
static void nap(void *queue)
{
    delay_queue    *q = queue;
    uint64_t        us = next_random(&q->random) % (q->max_us + 1);
    struct timespec t = { .tv_sec = (time_t)(us / 1000000),
                          .tv_nsec = (long)(us % 1000000) * 1000 };

    (void)nanosleep(&t, NULL);
}

static mt_status queue_new(mt_dev *d, delay_queue **out)
{
    delay_queue *q = calloc(1, sizeof *q);

    if (q == NULL)
        return MT_FAIL(MT_ENOMEM, "delay queue: calloc(%zu)", sizeof *q);
    q->base.dev = d;
    q->max_us = as_dev(d)->max_us;
    *out = q;
    return MT_OK;
}

static mt_status delay_queue_open(mt_dev *d, const char *name, mt_queue **out)
{
    delay_queue *q = NULL;
    uint64_t     seed = as_dev(d)->seed;
    mt_status    st;

    MT_TRY(queue_new(d, &q));
    MT_TRY(under(d)->ops->queue_open(under(d), name, &q->under));
    q->dawdles = 1;
    /* Seed and number are mixed, or queue 1 of seed 7 would dawdle like queue 0 of seed 8. */
    q->random = next_random(&seed) + atomic_fetch_add(&as_dev(d)->queues, 1);
    q->random = next_random(&q->random);
    *out = &q->base;
    return MT_OK;

fail:
    free(q);
    return st;
}

static mt_status delay_queue_adopt(mt_dev *d, uintptr_t handle, mt_queue **out)
{
    delay_queue *q = NULL;
    mt_status    st;

    MT_TRY(queue_new(d, &q));
    MT_TRY(under(d)->ops->queue_adopt(under(d), handle, &q->under));
    *out = &q->base;
    return MT_OK;

fail:
    free(q);
    return st;
}

static void delay_queue_close(mt_queue *queue)
{
    delay_queue *q = as_queue(queue);

    if (q == NULL)
        return;
    /* Drains; no nap reads q afterwards. */
    under(q->base.dev)->ops->queue_close(q->under);
    free(q);
}

static uintptr_t delay_handle(mt_queue *q)
{
    return under(q->dev)->ops->handle(as_queue(q)->under);
}

static mt_status dawdle(delay_queue *q)
{
    return q->dawdles ? under(q->base.dev)->ops->call(q->under, nap, q) : MT_OK;
}

static mt_status delay_copy(mt_queue *q, void *dst, const void *src, size_t bytes)
{
    mt_status st = dawdle(as_queue(q));

    return st != MT_OK ? st : under(q->dev)->ops->copy(as_queue(q)->under, dst, src, bytes);
}

static mt_status delay_call(mt_queue *q, void (*fn)(void *), void *arg)
{
    mt_status st = dawdle(as_queue(q));

    return st != MT_OK ? st : under(q->dev)->ops->call(as_queue(q)->under, fn, arg);
}

static mt_status delay_sync(mt_queue *q)
{
    return under(q->dev)->ops->sync(as_queue(q)->under);
}

/* ---- events: not delayed, only passed on ------------------------------------------------ */

static mt_status delay_event_open(mt_dev *d, mt_event **out)
{
    delay_event *e = calloc(1, sizeof *e);
    mt_status    st;

    if (e == NULL)
        return MT_FAIL(MT_ENOMEM, "delay event: calloc(%zu)", sizeof *e);
    e->base.dev = d;
    MT_TRY(under(d)->ops->event_open(under(d), &e->under));
    *out = &e->base;
    return MT_OK;

fail:
    free(e);
    return st;
}

static void delay_event_close(mt_event *e)
{
    if (e == NULL)
        return;
    under(e->dev)->ops->event_close(as_event(e)->under);
    free(e);
}

static mt_status delay_record(mt_queue *q, mt_event *e)
{
    return under(q->dev)->ops->record(as_queue(q)->under, as_event(e)->under);
}

static mt_status delay_wait(mt_queue *q, mt_event *e)
{
    return under(q->dev)->ops->wait(as_queue(q)->under, as_event(e)->under);
}

static mt_status delay_sync_event(mt_event *e)
{
    return under(e->dev)->ops->sync_event(as_event(e)->under);
}

static mt_status delay_query(mt_event *e, int *done)
{
    return under(e->dev)->ops->query(as_event(e)->under, done);
}

/* ---- stamps: the device's own, not delayed ---------------------------------------------- */

static mt_status delay_stamp_open(mt_dev *d, mt_stamp **out)
{
    return under(d)->ops->stamp_open(under(d), out);
}

static void delay_stamp_close(mt_dev *d, mt_stamp *s)
{
    under(d)->ops->stamp_close(under(d), s);
}

static mt_status delay_stamp(mt_queue *q, mt_stamp *s)
{
    return under(q->dev)->ops->stamp(as_queue(q)->under, s);
}

static mt_status delay_stamp_read(mt_dev *d, mt_stamp *s, uint64_t *ns, int *done)
{
    return under(d)->ops->stamp_read(under(d), s, ns, done);
}

static const mt_dev_ops delay_ops = {
    .close           = delay_close,
    .host_register   = delay_host_register,
    .host_unregister = delay_host_unregister,
    .mem_alloc       = delay_mem_alloc,
    .mem_free        = delay_mem_free,
    .queue_open      = delay_queue_open,
    .queue_adopt     = delay_queue_adopt,
    .queue_close     = delay_queue_close,
    .handle          = delay_handle,
    .copy            = delay_copy,
    .call            = delay_call,
    .event_open      = delay_event_open,
    .event_close     = delay_event_close,
    .record          = delay_record,
    .wait            = delay_wait,
    .sync_event      = delay_sync_event,
    .query           = delay_query,
    .sync            = delay_sync,
    .stamp_open      = delay_stamp_open,
    .stamp_close     = delay_stamp_close,
    .stamp           = delay_stamp,
    .stamp_read      = delay_stamp_read,
};

mt_status mt_dev_delay_open(mt_dev *behind, uint64_t seed, int max_us, mt_dev **out)
{
    delay_dev *d;

    if (max_us < 0)
        return MT_FAIL(MT_EINVAL, "delay: naps of up to %d us; 0 or more is needed", max_us);
    if ((d = calloc(1, sizeof *d)) == NULL)
        return MT_FAIL(MT_ENOMEM, "delay: calloc(%zu)", sizeof *d);
    d->ops = delay_ops;
    d->ops.name = behind->ops->name;
    d->base.ops = &d->ops;
    d->under = behind;
    d->seed = seed;
    d->max_us = (uint64_t)max_us;
    atomic_init(&d->queues, 0);
    *out = &d->base;
    return MT_OK;
}
