/* opened.h — devices, their queues and events, and pools, closed where a test's block ends:
 *
 *     CPU(dev);
 *     OPENED(mt_queue, q, dev->ops->queue_open(dev, "q", &q));
 */
#ifndef MT_OPENED_H
#define MT_OPENED_H

#include "../../csrc/core/dev.h"
#include "../../csrc/core/pool.h"
#include "check.h"

CLOSES(mt_dev, (*x)->ops->close(*x))
CLOSES(mt_queue, (*x)->dev->ops->queue_close(*x))
CLOSES(mt_event, (*x)->dev->ops->event_close(*x))
CLOSES(mt_pool, mt_pool_close(*x))

static inline mt_dev *cpu_open(void)
{
    mt_dev *dev = NULL;

    REQUIRE_OK(mt_dev_cpu_open(&dev));
    return dev;
}

#define CPU(dev) CLOSED_BY(mt_dev_done) mt_dev *dev = cpu_open()

#endif
