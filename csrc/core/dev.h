/* dev.h — what the scheduler needs from a machine that can copy and compute.
 *
 * Nouns, in the order they appear below:
 *   memory   bytes on the host (registered when that helps) or on the device
 *   queue    operations run in the order they were put in; two queues run side by side
 *   event    a point in a queue that another queue, or the host, can wait for
 *   stamp    the time at which a queue came by a point, known once it did
 *
 * Two implementations: dev_cpu.c (one thread per queue) and dev_cuda.c (CUDA runtime).
 * tests/c/dev_fault.c wraps either and fails the call you name.
 *
 *     mt_dev *d;  mt_queue *h2d, *run;  mt_event *here;
 *     mt_dev_cpu_open(&d);                        // or mt_dev_cuda_open(0, &d)
 *     d->ops->queue_open(d, &h2d);
 *     d->ops->queue_adopt(d, 0, &run);            // the stream torch computes on
 *     d->ops->event_open(d, &here);
 *     d->ops->copy(h2d, slot, weights, bytes);    // returns at once
 *     d->ops->record(h2d, here);
 *     d->ops->wait(run, here);                    // run goes on when the weights are there
 *
 * Threads: a mt_dev may be used from any thread; one thread at a time puts work in a queue.
 * Errors:  every function that can fail returns mt_status; on failure outputs are untouched.
 *          close and free accept NULL. An operation that fails after it was put in a queue
 *          makes the device sticky: every later call returns MT_EDEVICE with its message.
 *          (On CPU nothing that was put can fail.)
 */
#ifndef MT_DEV_H
#define MT_DEV_H

#include "dtype.h"
#include "status.h"
#include <stdint.h>

typedef struct mt_dev   mt_dev;
typedef struct mt_queue mt_queue;
typedef struct mt_event mt_event;
typedef struct mt_stamp mt_stamp;

typedef struct mt_mem_name {
    unsigned char allocation[64];
    uint64_t      skip;          /* bytes of the allocation before */
} mt_mem_name;

typedef struct mt_dev_ops {
    const char *name;                                        /* "cpu", "cuda" */

    void (*close)(mt_dev *d);                                /* after all that was opened on it */

    /* Tell the device about host memory we mapped, so that copies run at full speed and
     * behind the caller's back. Nothing to do on CPU. bytes > 0. MT_ENOMEM when it cannot be
     * locked in memory. */
    mt_status (*host_register)  (mt_dev *d, void *p, size_t bytes);
    void      (*host_unregister)(mt_dev *d, void *p);

    /* Device memory, aligned to 512, its bytes zero. Plain host memory on CPU. bytes > 0. */
    mt_status (*mem_alloc)(mt_dev *d, size_t bytes, void **out);
    void      (*mem_free) (mt_dev *d, void *p);
    /* Device memory of another process of this machine. name: of p, for the others. reach: where
     * the memory of that name is here; MT_ENOTSUP: out of reach. leave: what was reached, before
     * its owner frees it. */
    mt_status (*mem_name) (mt_dev *d, void *p, mt_mem_name *out);
    mt_status (*mem_reach)(mt_dev *d, const mt_mem_name *name, void **out);
    void      (*mem_leave)(mt_dev *d, const mt_mem_name *name, void *p);

    /* queue_adopt wraps a stream owned by someone else (torch's current stream); closing an
     * adopted queue leaves the stream alone. On CPU the only adoptable queue is handle 0:
     * "run on the calling thread, now". handle() gives the cudaStream_t back (0 on CPU). */
    mt_status (*queue_open) (mt_dev *d, const char *name, mt_queue **out);
    mt_status (*queue_adopt)(mt_dev *d, uintptr_t handle, mt_queue **out);
    void      (*queue_close)(mt_queue *q);                   /* drains first */
    uintptr_t (*handle)     (mt_queue *q);

    /* Put work in a queue; returns before it runs. dst and src stay valid until then. A queue
     * that is far behind may make put wait for room (CUDA: about a thousand copies), so nothing
     * in a queue may wait for what the putting thread does later. */
    mt_status (*copy)(mt_queue *q, void *dst, const void *src, size_t bytes);
    /* A host function; it may not call the device. */
    mt_status (*call)(mt_queue *q, void (*fn)(void *arg), void *arg);

    /* wait() means the record() that most recently happened *before this call*.
     * An event never recorded counts as done. Recording again, in this queue or another, does
     * not disturb waits already in a queue. An event may be closed while a queue waits for it. */
    mt_status (*event_open) (mt_dev *d, mt_event **out);
    void      (*event_close)(mt_event *e);
    mt_status (*record)(mt_queue *q, mt_event *e);
    mt_status (*wait)  (mt_queue *q, mt_event *e);           /* the queue waits */
    mt_status (*sync_event)(mt_event *e);                    /* the host waits, same rule */
    mt_status (*query) (mt_event *e, int *done);             /* nobody waits */
    mt_status (*sync)  (mt_queue *q);                        /* the host waits for all of q */

    /* stamp() asks, in q, what time it is; stamp_read() says whether q has come by, and then when:
     * *ns is on the clock of lock.h (CUDA: within some 20 us of it, and within 1 us of other
     * stamps of the same seconds). A stamp is asked again only after it was read done, and closed
     * after that or after its queue. Nothing waits. */
    mt_status (*stamp_open) (mt_dev *d, mt_stamp **out);
    void      (*stamp_close)(mt_dev *d, mt_stamp *s);
    mt_status (*stamp)      (mt_queue *q, mt_stamp *s);
    mt_status (*stamp_read) (mt_dev *d, mt_stamp *s, uint64_t *ns, int *done);
} mt_dev_ops;

/* Every device begins with this; implementations append their own members. */
struct mt_dev {
    const mt_dev_ops *ops;
};
/* Every queue and event knows its device, so that a wrapper device can stand in front. */
struct mt_queue { mt_dev *dev; };
struct mt_event { mt_dev *dev; };

mt_status mt_dev_cpu_open(mt_dev **out);
/* index: CUDA device ordinal. MT_ENOTSUP in a build without CUDA; MT_EDEVICE without a driver. */
mt_status mt_dev_cuda_open(int index, mt_dev **out);
int       mt_dev_cuda_built(void);

/* A device whose every queue sleeps a random time, up to max_us, before each copy and call:
 * the order that a bug needs is found in minutes, not in years. Owns and closes `under`.
 * Adopted queues are not delayed. Same seed, same sleeps. */
mt_status mt_dev_delay_open(mt_dev *under, uint64_t seed, int max_us, mt_dev **out);

/* A device that takes host memory which the one behind cannot lock, and copies it through locked
 * memory of its own: same bits and order, slower. Regions of up to 64 KiB, which kernels may write
 * into, are not taken so: MT_ENOMEM as before. Owns and closes `under`. */
mt_status mt_dev_stage_open (mt_dev *under, mt_dev **out);
/* Bytes that are not locked; why: the message of the first that was not. Both of such a device. */
size_t    mt_dev_stage_noted(mt_dev *stage, char *why, size_t n);
/* Tests: of regions of more than `small` bytes no more than so many are locked from now on. */
void      mt_dev_stage_limit(mt_dev *stage, size_t bytes, size_t small);

#endif
