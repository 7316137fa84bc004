/* dev_front.h — private to csrc/dev: a device in front of another, which hands on what is asked.
 *
 *     struct mine { mt__front front; ... };           // queues begin with mt__front_queue
 *     mt__front_init(&mine->front, behind);
 *     mine->front.ops.copy = my_copy;                 // what it does itself, queues at the least
 *
 * It answers to the name of the device behind, so whoever picks kernels by name picks the right
 * ones. handle() is the stream behind: what is put there directly passes the front by.
 */
#ifndef MT_DEV_FRONT_H
#define MT_DEV_FRONT_H

#include "../core/dev.h"

typedef struct mt__front {
    mt_dev      base;
    mt_dev_ops  ops;             /* constant once it is open, as what is below */
    mt_dev     *under;           /* the device behind; closed with the front */
} mt__front;

typedef struct mt__front_queue {
    mt_queue  base;
    mt_queue *under;
} mt__front_queue;

/* All operations but queue_open and queue_adopt hand on. close and queue_close free what they are
 * given, which is malloc'd. */
void mt__front_init(mt__front *f, mt_dev *behind);

static inline mt_dev *mt__behind(mt_dev *d)
{
    return ((mt__front *)(void *)d)->under;
}

static inline mt_queue *mt__queue_behind(mt_queue *q)
{
    return ((mt__front_queue *)(void *)q)->under;
}

#endif
