/* slow_disk.h — a file's transfers that dawdle, stall, are held and fail, as a test says.
 *
 * Threads: any; a test sets a field before what it is to strike begins.
 */
#ifndef MT_SLOW_DISK_H
#define MT_SLOW_DISK_H

#include "../../csrc/io/file.h"
#include "numbers.h"

static struct {
    atomic_int  dawdle_us;               /* at most, before each */
    atomic_int  reads, writes;           /* begun so far */
    atomic_long read_at[64];             /* where the first of those were, in their order */
    atomic_int  fail_read, fail_write;   /* the n-th from now on fails; 0: none */
    atomic_long fail_at;                 /* a read there fails, once; -1: none */
    atomic_int  stalled;                 /* reads wait until it is 0: two seconds, which end it */
    atomic_int  first_stalled;           /* the first write waits until it is 0 */
    atomic_int  hold_read, hold_write;   /* the n-th from now on is as slow as can be; 0: none */
    atomic_int  holding;                 /* it waits, with what it has read or before it writes,
                                          * until this is 0 */
} disk;

static inline void disk_reset(int dawdle_us)
{
    atomic_store(&disk.dawdle_us, dawdle_us);
    atomic_store(&disk.reads, 0);
    atomic_store(&disk.writes, 0);
    atomic_store(&disk.fail_read, 0);
    atomic_store(&disk.fail_write, 0);
    atomic_store(&disk.fail_at, -1);
    atomic_store(&disk.stalled, 0);
    atomic_store(&disk.first_stalled, 0);
    atomic_store(&disk.hold_read, 0);
    atomic_store(&disk.hold_write, 0);
}

static inline int struck(atomic_int *n)
{
    return atomic_load(n) > 0 && atomic_fetch_sub(n, 1) == 1;
}

static inline void dawdle(int number)
{
    int      most = atomic_load(&disk.dawdle_us);
    uint64_t seed = (uint64_t)number;

    if (most > 0)
        (void)usleep((useconds_t)(toy_random(&seed) % (uint64_t)most));
}

static inline ssize_t slow_read(int fd, void *p, size_t bytes, off_t at)
{
    int k = atomic_fetch_add(&disk.reads, 1), naps = 0;

    if (k < COUNT(disk.read_at))
        atomic_store(&disk.read_at[k], (long)at);
    dawdle(k);
    while (atomic_load(&disk.stalled) && naps++ < 10000)
        (void)usleep(200);
    if (naps > 10000)
        atomic_store(&disk.stalled, 0);
    if (struck(&disk.fail_read) ||
        atomic_compare_exchange_strong(&disk.fail_at, &(long){ (long)at }, -1)) {
        errno = EIO;
        return -1;
    }
    ssize_t n = pread(fd, p, bytes, at);
    if (struck(&disk.hold_read))
        UNTIL(!atomic_load(&disk.holding));
    return n;
}

static inline ssize_t slow_write(int fd, const void *p, size_t bytes, off_t at)
{
    int k = atomic_fetch_add(&disk.writes, 1);

    dawdle(3 * k);
    if (k == 0)
        UNTIL(!atomic_load(&disk.first_stalled));
    if (struck(&disk.fail_write)) {
        errno = ENOSPC;
        return -1;
    }
    if (struck(&disk.hold_write))
        UNTIL(!atomic_load(&disk.holding));
    return pwrite(fd, p, bytes, at);
}

static inline int through_the_cache(int fd, int on)
{
    return EINVAL;
}

static const mt_file_calls calls = { slow_read, slow_write, posix_fallocate, through_the_cache };

#endif
