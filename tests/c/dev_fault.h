/* dev_fault.h — a device for tests: stands before another, fails the call you name and counts
 * what is open.
 *
 *     for (int n = 1; ; n++) {
 *         mt_dev   *d = fault_dev(cpu, n, FAULT_ONCE);
 *         mt_status st = mt_stream_open(d, ..., &s);
 *         int       over = fault_fired(d) == 0;         // n is past the last call: done
 *         if (over)
 *             mt_stream_close(s);
 *         else
 *             CHECK_EQ(st, MT_EDEVICE);
 *         CHECK_EQ(fault_live(d), 0);
 *         d->ops->close(d);                             // `cpu` stays open
 *         if (over)
 *             break;
 *     }
 *
 * Counted: every function of mt_dev_ops that returns mt_status, from 1. A failing call does
 * nothing, is MT_EDEVICE and says "injected: call 7 (copy)".
 * Threads: as mt_dev; fault_* from any thread.
 */
#ifndef MT_DEV_FAULT_H
#define MT_DEV_FAULT_H

#include "../../csrc/core/dev.h"

typedef enum fault_mode {
    FAULT_ONCE,              /* transient: the call after it works again */
    FAULT_STAYS              /* persistent: a device gone bad */
} fault_mode;

/* n <= 0: nothing fails. Ends the program when out of memory: this is a test. */
mt_dev *fault_dev(mt_dev *under, int n, fault_mode mode);

/* From now on the n-th call fails, counted from the next. */
void fault_next(mt_dev *d, int n);

/* From the n-th registration of host memory on, counted from 0,
 * there is no more to be locked: MT_ENOMEM. */
void fault_locks(mt_dev *d, int n);

int fault_live (const mt_dev *d);    /* memory, registrations, queues and events not yet closed */
int fault_calls(const mt_dev *d);    /* calls counted so far */
int fault_fired(const mt_dev *d);    /* calls failed so far */

#endif
