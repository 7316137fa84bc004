/* gate.h — what stands in a queue until the test opens it.
 *
 * Threads: any. A gate may be opened before the queue comes to it.
 */
#ifndef MT_GATE_H
#define MT_GATE_H

#include <stdatomic.h>
#include <time.h>

static inline void sleep_ms(long ms)
{
    nanosleep(&(struct timespec){ ms / 1000, ms % 1000 * 1000000L }, NULL);
}

typedef struct gate {
    atomic_int open;
} gate;

/* For mt_dev_ops.call, with the gate as its argument. */
static inline void wait_for_gate(void *arg)
{
    while (!atomic_load(&((gate *)arg)->open))
        nanosleep(&(struct timespec){ 0, 100000 }, NULL);
}

#endif
