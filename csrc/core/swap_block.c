/* swap_block.c — open and close; the rest is done by those who have blocks. */
#include "swap_block.h"

mt_status mt_swap_block_open(mt_swap_block *b, size_t bytes, mt_dev *dev, mt_pool *pool,
                             size_t mapped)
{
    mt_status st;

    *b = (mt_swap_block){ 0 };
    MT_TRY(dev->ops->event_open(dev, &b->filled));
    MT_TRY(dev->ops->event_open(dev, &b->landed));
    MT_TRY(mt_arena_open(&b->arena, bytes, pool, dev, "activations on the host", mapped));
    return MT_OK;

fail:
    mt_swap_block_close(b, dev, NULL);
    return st;
}

void mt_swap_block_close(mt_swap_block *b, mt_dev *dev, mt_watch *watch)
{
    if (watch != NULL) {
        mt_watch_take(watch, &b->filling);
        mt_watch_take(watch, &b->landing);
    }
    dev->ops->event_close(b->filled);
    dev->ops->event_close(b->landed);
    mt_arena_close(&b->arena);
    *b = (mt_swap_block){ 0 };
}
