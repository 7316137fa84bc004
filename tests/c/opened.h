/* opened.h — devices, their queues and events, and pools, closed where a test's block ends, and a
 * store's units and addresses without a status:
 *
 *     CPU(dev);
 *     OPENED(mt_queue, q, dev->ops->queue_open(dev, "q", &q));
 */
#ifndef MT_OPENED_H
#define MT_OPENED_H

#include "../../csrc/core/dev.h"
#include "../../csrc/core/pool.h"
#include "../../csrc/core/store.h"
#include "check.h"
#include "dev_fault.h"

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

/* With naps of up to max_us before what its queues do; 0: without. */
static inline mt_dev *delayed_open(uint64_t seed, int max_us)
{
    mt_dev *dev = cpu_open();

    if (max_us > 0)
        REQUIRE_OK(mt_dev_delay_open(dev, seed, max_us, &dev));
    return dev;
}

/* NULL: it is not there. */
static inline mt_dev *cuda_open(int index)
{
    mt_dev *dev = NULL;

    return mt_dev_cuda_open(index, &dev) == MT_OK ? dev : NULL;
}

/* While others work, too. */
static inline void debug_set(mt_context *cx, mt_debug d)
{
    cx->debug.skip = d.skip;
    cx->debug.poison = d.poison;
    cx->debug.sync = d.sync;
}

/* The unit's number. */
static inline int store_add(mt_store *s, const char *name, const mt_param_desc *d, int n)
{
    int unit = -1;

    REQUIRE_OK(mt_store_add(s, name, d, n, &unit));
    return unit;
}

static inline void *store_at(mt_store *s, int unit, int param, mt_plane p)
{
    void *at = NULL;

    REQUIRE_OK(mt_store_at(s, unit, param, p, &at));
    return at;
}

#define CPU(dev) CLOSED_BY(mt_dev_done) mt_dev *dev = cpu_open()

/* Without that device the test is skipped. */
#define CUDA(dev, index) CLOSED_BY(mt_dev_done) mt_dev *dev = cuda_open(index); \
    if (dev == NULL) SKIP("%s", mt_last_error())

/* The body is run with a device whose n-th call fails, for n from `first` on until none did; what
 * it opens there it closes. */
#define EACH_FAULT(d, first, mode)                                                            \
    for (int n = (first), more_ = 1; more_; n++)                                              \
        for (mt_dev *cpu_ = cpu_open(), *d = fault_dev(cpu_, n, mode); d != NULL;             \
             more_ = fault_end(cpu_, d), d = NULL)

/* 1: a call failed. */
static inline int fault_end(mt_dev *cpu, mt_dev *d)
{
    int fired = fault_fired(d) > 0;

    CHECK_EQ(fault_live(d), 0);
    d->ops->close(d);
    cpu->ops->close(cpu);
    return fired;
}

#endif
