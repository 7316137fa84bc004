/* dev_front.c — every operation, asked of the device behind. */
#include "dev_front.h"

#include <stdlib.h>

typedef struct front_event {
    mt_event  base;
    mt_event *under;
} front_event;

static mt_event *behind(mt_event *e)
{
    return ((front_event *)(void *)e)->under;
}

static void front_close(mt_dev *d)
{
    mt__behind(d)->ops->close(mt__behind(d));
    free(d);
}

static void front_host_unregister(mt_dev *d, void *p)
{
    mt__behind(d)->ops->host_unregister(mt__behind(d), p);
}

static void front_mem_free(mt_dev *d, void *p)
{
    mt__behind(d)->ops->mem_free(mt__behind(d), p);
}

static void front_mem_leave(mt_dev *d, const mt_mem_name *name, void *p)
{
    mt__behind(d)->ops->mem_leave(mt__behind(d), name, p);
}

static void front_queue_close(mt_queue *q)
{
    if (q == NULL)
        return;
    mt__behind(q->dev)->ops->queue_close(mt__queue_behind(q));
    free(q);
}

static uintptr_t front_handle(mt_queue *q)
{
    return mt__behind(q->dev)->ops->handle(mt__queue_behind(q));
}

static mt_status front_event_open(mt_dev *d, mt_event **out)
{
    front_event *e MT_FREED = NULL;

    MT_DO(MT_MAKE(e, 1, "event"));
    e->base.dev = d;
    MT_DO(mt__behind(d)->ops->event_open(mt__behind(d), &e->under));
    *out = &MT_KEEP(e)->base;
    return MT_OK;
}

static void front_event_close(mt_event *e)
{
    if (e == NULL)
        return;
    mt__behind(e->dev)->ops->event_close(behind(e));
    free(e);
}

static void front_stamp_close(mt_dev *d, mt_stamp *s)
{
    mt__behind(d)->ops->stamp_close(mt__behind(d), s);
}

/* One that returns a status: its parameters, the device that is asked, what is handed on. */
#define HAND_ON(op, parameters, dev, arguments)      \
    static mt_status front_##op parameters           \
    {                                                \
        return mt__behind(dev)->ops->op arguments;   \
    }

HAND_ON(host_register, (mt_dev *d, void *p, size_t bytes), d, (mt__behind(d), p, bytes))
HAND_ON(mem_alloc, (mt_dev *d, size_t bytes, void **out), d, (mt__behind(d), bytes, out))
HAND_ON(mem_name, (mt_dev *d, void *p, mt_mem_name *out), d, (mt__behind(d), p, out))
HAND_ON(mem_reach, (mt_dev *d, const mt_mem_name *name, void **out), d, (mt__behind(d), name, out))
HAND_ON(copy, (mt_queue *q, void *dst, const void *src, size_t bytes), q->dev,
        (mt__queue_behind(q), dst, src, bytes))
HAND_ON(call, (mt_queue *q, void (*fn)(void *), void *arg), q->dev, (mt__queue_behind(q), fn, arg))
HAND_ON(record, (mt_queue *q, mt_event *e), q->dev, (mt__queue_behind(q), behind(e)))
HAND_ON(wait, (mt_queue *q, mt_event *e), q->dev, (mt__queue_behind(q), behind(e)))
HAND_ON(sync_event, (mt_event *e), e->dev, (behind(e)))
HAND_ON(query, (mt_event *e, int *done), e->dev, (behind(e), done))
HAND_ON(sync, (mt_queue *q), q->dev, (mt__queue_behind(q)))
HAND_ON(stamp_open, (mt_dev *d, mt_stamp **out), d, (mt__behind(d), out))
HAND_ON(stamp, (mt_queue *q, mt_stamp *s), q->dev, (mt__queue_behind(q), s))
HAND_ON(stamp_read, (mt_dev *d, mt_stamp *s, uint64_t *ns, int *done), d,
        (mt__behind(d), s, ns, done))
#undef HAND_ON

static const mt_dev_ops front_ops = {
    .close           = front_close,
    .host_register   = front_host_register,
    .host_unregister = front_host_unregister,
    .mem_alloc       = front_mem_alloc,
    .mem_free        = front_mem_free,
    .mem_name        = front_mem_name,
    .mem_reach       = front_mem_reach,
    .mem_leave       = front_mem_leave,
    .queue_close     = front_queue_close,
    .handle          = front_handle,
    .copy            = front_copy,
    .call            = front_call,
    .event_open      = front_event_open,
    .event_close     = front_event_close,
    .record          = front_record,
    .wait            = front_wait,
    .sync_event      = front_sync_event,
    .query           = front_query,
    .sync            = front_sync,
    .stamp_open      = front_stamp_open,
    .stamp_close     = front_stamp_close,
    .stamp           = front_stamp,
    .stamp_read      = front_stamp_read,
};

void mt__front_init(mt__front *f, mt_dev *behind)
{
    f->ops = front_ops;
    f->ops.name = behind->ops->name;
    f->base.ops = &f->ops;
    f->under = behind;
}
