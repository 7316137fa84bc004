/* dev_delay.c — a device in front of another whose queues dawdle.
 *
 * A nap is a host function put in the queue before the operation it delays, so it takes place in
 * the queue's order and the queue's random numbers need no lock. Queues are numbered as they are
 * opened; a queue's naps depend on the seed and that number alone.
 * Kernels are put in the stream behind (dev_front.h), and not delayed.
 */
#include "dev_front.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

typedef struct delay_dev {
    mt__front   front;
    uint64_t    seed;            /* constant */
    uint64_t    max_us;          /* constant */
    atomic_uint queues;          /* opened so far; any thread */
} delay_dev;

typedef struct delay_queue {
    mt__front_queue front;
    int             dawdles;     /* 0: adopted */
    uint64_t        max_us;
    uint64_t        random;      /* the queue's naps, which run one after the other */
} delay_queue;

static delay_dev *as_dev(mt_dev *d)
{
    return (delay_dev *)(void *)d;
}

static delay_queue *as_queue(mt_queue *q)
{
    return (delay_queue *)(void *)q;
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
    delay_queue *q;

    MT_DO(MT_MAKE(q, 1, "delay queue"));
    q->front.base.dev = d;
    q->max_us = as_dev(d)->max_us;
    *out = q;
    return MT_OK;
}

static mt_status delay_queue_open(mt_dev *d, const char *name, mt_queue **out)
{
    delay_queue *q MT_FREED = NULL;
    uint64_t     seed = as_dev(d)->seed;

    MT_DO(queue_new(d, &q));
    MT_DO(mt__behind(d)->ops->queue_open(mt__behind(d), name, &q->front.under));
    q->dawdles = 1;
    /* Seed and number are mixed, or queue 1 of seed 7 would dawdle like queue 0 of seed 8. */
    q->random = next_random(&seed) + atomic_fetch_add(&as_dev(d)->queues, 1);
    q->random = next_random(&q->random);
    *out = &MT_KEEP(q)->front.base;
    return MT_OK;
}

static mt_status delay_queue_adopt(mt_dev *d, uintptr_t handle, mt_queue **out)
{
    delay_queue *q MT_FREED = NULL;

    MT_DO(queue_new(d, &q));
    MT_DO(mt__behind(d)->ops->queue_adopt(mt__behind(d), handle, &q->front.under));
    *out = &MT_KEEP(q)->front.base;
    return MT_OK;
}

static mt_status dawdle(delay_queue *q)
{
    mt_dev *behind = mt__behind(q->front.base.dev);

    return q->dawdles ? behind->ops->call(q->front.under, nap, q) : MT_OK;
}

static mt_status delay_copy(mt_queue *q, void *dst, const void *src, size_t bytes)
{
    MT_DO(dawdle(as_queue(q)));
    return mt__behind(q->dev)->ops->copy(mt__queue_behind(q), dst, src, bytes);
}

static mt_status delay_call(mt_queue *q, void (*fn)(void *), void *arg)
{
    MT_DO(dawdle(as_queue(q)));
    return mt__behind(q->dev)->ops->call(mt__queue_behind(q), fn, arg);
}

mt_status mt_dev_delay_open(mt_dev *behind, uint64_t seed, int max_us, mt_dev **out)
{
    delay_dev *d;

    if (max_us < 0)
        return MT_FAIL(MT_EINVAL, "delay: naps of up to %d us; 0 or more is needed", max_us);
    MT_DO(MT_MAKE(d, 1, "delay"));
    mt__front_init(&d->front, behind);
    d->front.ops.queue_open = delay_queue_open;
    d->front.ops.queue_adopt = delay_queue_adopt;
    d->front.ops.copy = delay_copy;
    d->front.ops.call = delay_call;
    d->seed = seed;
    d->max_us = (uint64_t)max_us;
    atomic_init(&d->queues, 0);
    *out = &d->front.base;
    return MT_OK;
}
