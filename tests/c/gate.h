/* gate.h — what stands in a queue until the test opens it.
 *
 * Threads: any. A gate may be opened before the queue comes to it.
 */
#ifndef MT_GATE_H
#define MT_GATE_H

#include "check.h"

typedef struct gate {
    atomic_int open;
} gate;

/* For mt_dev_ops.call, with the gate as its argument. */
static inline void wait_for_gate(void *arg)
{
    UNTIL(atomic_load(&((gate *)arg)->open));
}

#endif
