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

static mt_status front_host_register(mt_dev *d, void *p, size_t bytes)
{
    return mt__behind(d)->ops->host_register(mt__behind(d), p, bytes);
}

static void front_host_unregister(mt_dev *d, void *p)
{
    mt__behind(d)->ops->host_unregister(mt__behind(d), p);
}

static mt_status front_mem_alloc(mt_dev *d, size_t bytes, void **out)
{
    return mt__behind(d)->ops->mem_alloc(mt__behind(d), bytes, out);
}

static void front_mem_free(mt_dev *d, void *p)
{
    mt__behind(d)->ops->mem_free(mt__behind(d), p);
}

static mt_status front_mem_name(mt_dev *d, void *p, mt_mem_name *out)
{
    return mt__behind(d)->ops->mem_name(mt__behind(d), p, out);
}

static mt_status front_mem_reach(mt_dev *d, const mt_mem_name *name, void **out)
{
    return mt__behind(d)->ops->mem_reach(mt__behind(d), name, out);
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

static mt_status front_copy(mt_queue *q, void *dst, const void *src, size_t bytes)
{
    return mt__behind(q->dev)->ops->copy(mt__queue_behind(q), dst, src, bytes);
}

static mt_status front_call(mt_queue *q, void (*fn)(void *), void *arg)
{
    return mt__behind(q->dev)->ops->call(mt__queue_behind(q), fn, arg);
}

static mt_status front_event_open(mt_dev *d, mt_event **out)
{
    front_event *e = calloc(1, sizeof *e);
    mt_status    st;

    if (e == NULL)
        return MT_FAIL(MT_ENOMEM, "event: calloc(%zu)", sizeof *e);
    e->base.dev = d;
    MT_TRY(mt__behind(d)->ops->event_open(mt__behind(d), &e->under));
    *out = &e->base;
    return MT_OK;

fail:
    free(e);
    return st;
}

static void front_event_close(mt_event *e)
{
    if (e == NULL)
        return;
    mt__behind(e->dev)->ops->event_close(behind(e));
    free(e);
}

static mt_status front_record(mt_queue *q, mt_event *e)
{
    return mt__behind(q->dev)->ops->record(mt__queue_behind(q), behind(e));
}

static mt_status front_wait(mt_queue *q, mt_event *e)
{
    return mt__behind(q->dev)->ops->wait(mt__queue_behind(q), behind(e));
}

static mt_status front_sync_event(mt_event *e)
{
    return mt__behind(e->dev)->ops->sync_event(behind(e));
}

static mt_status front_query(mt_event *e, int *done)
{
    return mt__behind(e->dev)->ops->query(behind(e), done);
}

static mt_status front_sync(mt_queue *q)
{
    return mt__behind(q->dev)->ops->sync(mt__queue_behind(q));
}

static mt_status front_stamp_open(mt_dev *d, mt_stamp **out)
{
    return mt__behind(d)->ops->stamp_open(mt__behind(d), out);
}

static void front_stamp_close(mt_dev *d, mt_stamp *s)
{
    mt__behind(d)->ops->stamp_close(mt__behind(d), s);
}

static mt_status front_stamp(mt_queue *q, mt_stamp *s)
{
    return mt__behind(q->dev)->ops->stamp(mt__queue_behind(q), s);
}

static mt_status front_stamp_read(mt_dev *d, mt_stamp *s, uint64_t *ns, int *done)
{
    return mt__behind(d)->ops->stamp_read(mt__behind(d), s, ns, done);
}

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
