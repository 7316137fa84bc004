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

static fault_device *as_dev(const mt_dev *d) { return (fault_device *)(void *)d; }
static mt_queue *queue(mt_queue *q) { return ((fault_queue *)(void *)q)->under; }
static mt_event *event(mt_event *e) { return ((fault_event *)(void *)e)->under; }
static mt_dev *under(const mt_dev *d) { return as_dev(d)->under; }

static mt_status count(mt_dev *dev, const char *call)
{
    fault_device *d = as_dev(dev);
    int           k = atomic_fetch_add(&d->calls, 1) + 1;

    if (d->n <= 0 || k < d->n || (k > d->n && d->mode == FAULT_ONCE))
        return MT_OK;
    atomic_fetch_add(&d->fired, 1);
    return MT_FAIL(MT_EDEVICE, "injected: call %d (%s)", k, call);
}

static void *make(size_t bytes)
{
    void *p = calloc(1, bytes);

    if (p == NULL)
        abort();
    return p;
}

/* ---- calls: on to the device behind, unless it is the one that fails ---------------------- */

/* `live` grows by what it opened. */
#define PASS(fault_name, params, dev, name, opened, ...)                                      \
    static mt_status fault_name params                                                        \
    {                                                                                         \
        mt_status st = count(dev, #name);                                                     \
        if (st == MT_OK)                                                                      \
            st = under(dev)->ops->name(__VA_ARGS__);                                          \
        if (st == MT_OK)                                                                      \
            atomic_fetch_add(&as_dev(dev)->live, opened);                                     \
        return st;                                                                            \
    }
PASS(lock_under, (mt_dev *d, void *p, size_t bytes), d, host_register, 1, under(d), p, bytes)
PASS(fault_mem_alloc, (mt_dev *d, size_t bytes, void **out), d, mem_alloc, 1, under(d), bytes, out)
PASS(open_under, (mt_dev *d, const char *name, mt_queue **q), d, queue_open, 1, under(d), name, q)
PASS(adopt_under, (mt_dev *d, uintptr_t of, mt_queue **q), d, queue_adopt, 1, under(d), of, q)
PASS(event_under, (mt_dev *d, mt_event **e), d, event_open, 1, under(d), e)
PASS(fault_stamp_open, (mt_dev *d, mt_stamp **out), d, stamp_open, 1, under(d), out)
PASS(fault_copy, (mt_queue *q, void *dst, const void *src, size_t bytes), q->dev, copy, 0,
     queue(q), dst, src, bytes)
PASS(fault_call, (mt_queue *q, void (*fn)(void *), void *arg), q->dev, call, 0, queue(q), fn, arg)
PASS(fault_sync, (mt_queue *q), q->dev, sync, 0, queue(q))
PASS(fault_record, (mt_queue *q, mt_event *e), q->dev, record, 0, queue(q), event(e))
PASS(fault_wait, (mt_queue *q, mt_event *e), q->dev, wait, 0, queue(q), event(e))
PASS(fault_sync_event, (mt_event *e), e->dev, sync_event, 0, event(e))
PASS(fault_query, (mt_event *e, int *done), e->dev, query, 0, event(e), done)
PASS(fault_stamp, (mt_queue *q, mt_stamp *s), q->dev, stamp, 0, queue(q), s)
PASS(fault_stamp_read, (mt_dev *d, mt_stamp *s, uint64_t *ns, int *done), d, stamp_read, 0,
     under(d), s, ns, done)

/* A queue or an event that stands before the one which was opened. */
#define WRAP(fault_name, params, type, opened)                                                \
    static mt_status fault_name params                                                        \
    {                                                                                         \
        mt_##type    *behind;                                                                 \
        mt_status     st = opened;                                                            \
        fault_##type *x;                                                                      \
                                                                                              \
        if (st != MT_OK)                                                                      \
            return st;                                                                        \
        x = make(sizeof *x);                                                                  \
        x->base.dev = d;                                                                      \
        x->under = behind;                                                                    \
        *out = &x->base;                                                                      \
        return MT_OK;                                                                         \
    }
WRAP(fault_queue_open, (mt_dev *d, const char *name, mt_queue **out), queue,
     open_under(d, name, &behind))
WRAP(fault_queue_adopt, (mt_dev *d, uintptr_t of, mt_queue **out), queue,
     adopt_under(d, of, &behind))
WRAP(fault_event_open, (mt_dev *d, mt_event **out), event, event_under(d, &behind))

#define CLOSE(fault_name, params, x, of, name, wrapper, ...)                                  \
    static void fault_name params                                                             \
    {                                                                                         \
        if (x == NULL)                                                                        \
            return;                                                                           \
        under(of)->ops->name(__VA_ARGS__);                                                    \
        atomic_fetch_sub(&as_dev(of)->live, 1);                                               \
        free(wrapper);                                                                        \
    }
CLOSE(fault_host_unregister, (mt_dev *d, void *p), p, d, host_unregister, NULL, under(d), p)
CLOSE(fault_mem_free, (mt_dev *d, void *p), p, d, mem_free, NULL, under(d), p)
CLOSE(fault_stamp_close, (mt_dev *d, mt_stamp *s), s, d, stamp_close, NULL, under(d), s)
CLOSE(fault_queue_close, (mt_queue *q), q, q->dev, queue_close, q, queue(q))
CLOSE(fault_event_close, (mt_event *e), e, e->dev, event_close, e, event(e))

static mt_status fault_host_register(mt_dev *d, void *p, size_t bytes)
{
    if (atomic_load(&as_dev(d)->locks) == 0)
        return MT_FAIL(MT_ENOMEM, "injected: %zu bytes cannot be locked", bytes);
    if (atomic_load(&as_dev(d)->locks) > 0)
        atomic_fetch_sub(&as_dev(d)->locks, 1);
    return lock_under(d, p, bytes);
}

static uintptr_t fault_handle(mt_queue *q)
{
    return under(q->dev)->ops->handle(queue(q));
}

static void fault_close(mt_dev *d)
{
    free(d);
}

#define OP(name) .name = fault_##name
static const mt_dev_ops fault_ops = {
    OP(close), OP(host_register), OP(host_unregister), OP(mem_alloc), OP(mem_free), OP(queue_open),
    OP(queue_adopt), OP(queue_close), OP(handle), OP(copy), OP(call), OP(event_open),
    OP(event_close), OP(record), OP(wait), OP(sync_event), OP(query), OP(sync), OP(stamp_open),
    OP(stamp_close), OP(stamp), OP(stamp_read),
};

/* ---- what a test asks --------------------------------------------------------------------- */

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

void fault_next(mt_dev *d, int n)  { as_dev(d)->n = atomic_load(&as_dev(d)->calls) + n; }
void fault_locks(mt_dev *d, int n) { atomic_store(&as_dev(d)->locks, n); }
int  fault_live(const mt_dev *d)   { return atomic_load(&as_dev(d)->live); }
int  fault_calls(const mt_dev *d)  { return atomic_load(&as_dev(d)->calls); }
int  fault_fired(const mt_dev *d)  { return atomic_load(&as_dev(d)->fired); }
