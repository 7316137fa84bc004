/* bay.c — open and close; the rest is done by those who have bays. */
#include "bay.h"

mt_status mt_bay_open(mt_bay *b, size_t bytes, mt_dev *dev, mt_pool *pool, size_t mapped)
{
    mt_status st;

    *b = (mt_bay){ 0 };
    MT_TRY(dev->ops->event_open(dev, &b->filled));
    MT_TRY(dev->ops->event_open(dev, &b->landed));
    MT_TRY(mt_arena_open(&b->arena, bytes, pool, dev, MT_BAY, mapped));
    return MT_OK;

fail:
    mt_bay_close(b, dev, NULL);
    return st;
}

void mt_bay_close(mt_bay *b, mt_dev *dev, mt_watch *watch)
{
    if (watch != NULL) {
        mt_watch_take(watch, &b->filling);
        mt_watch_take(watch, &b->landing);
    }
    dev->ops->event_close(b->filled);
    dev->ops->event_close(b->landed);
    mt_arena_close(&b->arena);
    *b = (mt_bay){ 0 };
}
