/* dev_fault.c — every call is counted, may fail, and otherwise goes to the device behind. */
#include "dev_fault.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct fault_device {
    mt_dev     base;
    mt_dev_ops ops;              /* fault_ops under the name of the device behind; constant */
    mt_dev    *under;            /* constant */
    int        n;                /* constant, but for fault_next */
    fault_mode mode;             /* constant */
    atomic_int locks;            /* registrations left; below 0: as many as are asked for */
    atomic_int calls, fired, live;
} fault_device;

typedef struct fault_queue {
    mt_queue  base;
    mt_queue *under;
} fault_queue;

typedef struct fault_event {
    mt_event  base;
    mt_event *under;
} fault_event;

static fault_device *as_dev(const mt_dev *d)
{
    return (fault_device *)(void *)d;
}

static mt_queue *queue(mt_queue *q)
{
    return ((fault_queue *)(void *)q)->under;
}

static mt_event *event(mt_event *e)
{
    return ((fault_event *)(void *)e)->under;
}

static mt_dev *under(const mt_dev *d)
{
    return as_dev(d)->under;
}

static mt_status count(mt_dev *dev, const char *call)
{
    fault_device *d = as_dev(dev);
    int           k = atomic_fetch_add(&d->calls, 1) + 1;

    if (d->n <= 0 || k < d->n || (k > d->n && d->mode == FAULT_ONCE))
        return MT_OK;
    atomic_fetch_add(&d->fired, 1);
    return MT_FAIL(MT_EDEVICE, "injected: call %d (%s)", k, call);
}

/* Passes a call on, unless it is the one that fails; `live` grows by what it opened. */
#define PASS(dev, name, opened, ...)                                                          \
    do {                                                                                      \
        mt_status st_ = count(dev, #name);                                                    \
        if (st_ == MT_OK)                                                                     \
            st_ = under(dev)->ops->name(__VA_ARGS__);                                         \
        if (st_ == MT_OK)                                                                     \
            atomic_fetch_add(&as_dev(dev)->live, opened);                                     \
        return st_;                                                                           \
    } while (0)

static void closed(mt_dev *d)
{
    atomic_fetch_sub(&as_dev(d)->live, 1);
}

static void *make(size_t bytes)
{
    void *p = calloc(1, bytes);

    if (p == NULL)
        abort();
    return p;
}

static void fault_close(mt_dev *d)
{
    free(d);
}

void fault_next(mt_dev *d, int n)
{
    as_dev(d)->n = atomic_load(&as_dev(d)->calls) + n;
}

void fault_locks(mt_dev *d, int n)
{
    atomic_store(&as_dev(d)->locks, n);
}

static mt_status fault_host_register(mt_dev *d, void *p, size_t bytes)
{
    if (atomic_load(&as_dev(d)->locks) == 0)
        return MT_FAIL(MT_ENOMEM, "injected: %zu bytes cannot be locked", bytes);
    if (atomic_load(&as_dev(d)->locks) > 0)
        atomic_fetch_sub(&as_dev(d)->locks, 1);
    PASS(d, host_register, 1, under(d), p, bytes);
}

static void fault_host_unregister(mt_dev *d, void *p)
{
    if (p == NULL)
        return;
    under(d)->ops->host_unregister(under(d), p);
    closed(d);
}

static mt_status fault_mem_alloc(mt_dev *d, size_t bytes, void **out)
{
    PASS(d, mem_alloc, 1, under(d), bytes, out);
}

static void fault_mem_free(mt_dev *d, void *p)
{
    if (p == NULL)
        return;
    under(d)->ops->mem_free(under(d), p);
    closed(d);
}

/* ---- queues ----------------------------------------------------------------------------- */

static mt_queue *queue_wrap(mt_dev *d, mt_queue *behind)
{
    fault_queue *q = make(sizeof *q);

    q->base.dev = d;
    q->under = behind;
    return &q->base;
}

static mt_status open_under(mt_dev *d, const char *name, mt_queue **behind)
{
    PASS(d, queue_open, 1, under(d), name, behind);
}

static mt_status fault_queue_open(mt_dev *d, const char *name, mt_queue **out)
{
    mt_queue *behind;
    mt_status st = open_under(d, name, &behind);

    if (st == MT_OK)
        *out = queue_wrap(d, behind);
    return st;
}

static mt_status adopt_under(mt_dev *d, uintptr_t handle, mt_queue **behind)
{
    PASS(d, queue_adopt, 1, under(d), handle, behind);
}

static mt_status fault_queue_adopt(mt_dev *d, uintptr_t handle, mt_queue **out)
{
    mt_queue *behind;
    mt_status st = adopt_under(d, handle, &behind);

    if (st == MT_OK)
        *out = queue_wrap(d, behind);
    return st;
}

static void fault_queue_close(mt_queue *q)
{
    if (q == NULL)
        return;
    under(q->dev)->ops->queue_close(queue(q));
    closed(q->dev);
    free(q);
}

static uintptr_t fault_handle(mt_queue *q)
{
    return under(q->dev)->ops->handle(queue(q));
}

static mt_status fault_copy(mt_queue *q, void *dst, const void *src, size_t bytes)
{
    PASS(q->dev, copy, 0, queue(q), dst, src, bytes);
}

static mt_status fault_call(mt_queue *q, void (*fn)(void *), void *arg)
{
    PASS(q->dev, call, 0, queue(q), fn, arg);
}

static mt_status fault_sync(mt_queue *q)
{
    PASS(q->dev, sync, 0, queue(q));
}

/* ---- events ----------------------------------------------------------------------------- */

static mt_status event_under(mt_dev *d, mt_event **behind)
{
    PASS(d, event_open, 1, under(d), behind);
}

static mt_status fault_event_open(mt_dev *d, mt_event **out)
{
    mt_event    *behind;
    fault_event *e;
    mt_status    st = event_under(d, &behind);

    if (st != MT_OK)
        return st;
    e = make(sizeof *e);
    e->base.dev = d;
    e->under = behind;
    *out = &e->base;
    return MT_OK;
}

static void fault_event_close(mt_event *e)
{
    if (e == NULL)
        return;
    under(e->dev)->ops->event_close(event(e));
    closed(e->dev);
    free(e);
}

static mt_status fault_record(mt_queue *q, mt_event *e)
{
    PASS(q->dev, record, 0, queue(q), event(e));
}

static mt_status fault_wait(mt_queue *q, mt_event *e)
{
    PASS(q->dev, wait, 0, queue(q), event(e));
}

static mt_status fault_sync_event(mt_event *e)
{
    PASS(e->dev, sync_event, 0, event(e));
}

static mt_status fault_query(mt_event *e, int *done)
{
    PASS(e->dev, query, 0, event(e), done);
}

static mt_status fault_stamp_open(mt_dev *d, mt_stamp **out)
{
    PASS(d, stamp_open, 1, under(d), out);
}

static void fault_stamp_close(mt_dev *d, mt_stamp *s)
{
    if (s == NULL)
        return;
    under(d)->ops->stamp_close(under(d), s);
    closed(d);
}

static mt_status fault_stamp(mt_queue *q, mt_stamp *s)
{
    PASS(q->dev, stamp, 0, queue(q), s);
}

static mt_status fault_stamp_read(mt_dev *d, mt_stamp *s, uint64_t *ns, int *done)
{
    PASS(d, stamp_read, 0, under(d), s, ns, done);
}

static const mt_dev_ops fault_ops = {
    .close           = fault_close,
    .host_register   = fault_host_register,
    .host_unregister = fault_host_unregister,
    .mem_alloc       = fault_mem_alloc,
    .mem_free        = fault_mem_free,
    .queue_open      = fault_queue_open,
    .queue_adopt     = fault_queue_adopt,
    .queue_close     = fault_queue_close,
    .handle          = fault_handle,
    .copy            = fault_copy,
    .call            = fault_call,
    .event_open      = fault_event_open,
    .event_close     = fault_event_close,
    .record          = fault_record,
    .wait            = fault_wait,
    .sync_event      = fault_sync_event,
    .query           = fault_query,
    .sync            = fault_sync,
    .stamp_open      = fault_stamp_open,
    .stamp_close     = fault_stamp_close,
    .stamp           = fault_stamp,
    .stamp_read      = fault_stamp_read,
};

mt_dev *fault_dev(mt_dev *behind, int n, fault_mode mode)
{
    fault_device *d = make(sizeof *d);

    d->ops = fault_ops;
    d->ops.name = behind->ops->name;
    d->base.ops = &d->ops;
    d->under = behind;
    d->n = n;
    d->mode = mode;
    atomic_init(&d->locks, -1);
    return &d->base;
}

int fault_live(const mt_dev *d)
{
    return atomic_load(&as_dev(d)->live);
}

int fault_calls(const mt_dev *d)
{
    return atomic_load(&as_dev(d)->calls);
}

int fault_fired(const mt_dev *d)
{
    return atomic_load(&as_dev(d)->fired);
}
