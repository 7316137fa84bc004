/* lock.h — every lock of ours, in the order in which a thread may take them.
 *
 *   rank     where a lock comes in that order; given when it is opened. A thread that holds a lock
 *            takes only locks of ranks further down, so no two threads wait for each other. Locks
 *            that take none inside share the last rank, LEAF: nobody holds two of them
 *
 *     mt_mutex_open(&s->mu, MT_RANK_STREAM);
 *     MT_HOLD(&s->mu);                            // to the end of the block
 *     while (!over)
 *         mt_cond_wait(&s->changed, &s->mu);      // holds what it held, less s->mu while it waits
 *
 * Builds that check themselves (MT_CHECKED: those of tests/c; for the
 * extension CFLAGS=-DMT_CHECKED) know what each thread holds, and abort, with both names,
 * where a lock is taken out of turn, given back by a thread that has it not, or waited on by one
 * that has taken another since. Elsewhere each function is pthread's.
 *
 * Threads: any.
 */
#ifndef MT_LOCK_H
#define MT_LOCK_H

#include <pthread.h>
#include <stdint.h>
#include <time.h>

#ifdef MT_CHECKED
#define MT_IS_CHECKED 1                  /* what has to be looked up before it can be asserted */
#else
#define MT_IS_CHECKED 0
#endif

/* The one clock: nanoseconds of CLOCK_MONOTONIC, which is Python's perf_counter_ns too. */
static inline uint64_t mt_now_ns(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* What must hold at this place, whoever called: where it does not, the mistake is ours. A checked
 * build says which, and where, and aborts. */
#define MT_ASSERT(cond) \
    (MT_IS_CHECKED && !(cond) ? mt__broken(__FILE__, __LINE__, "%s", #cond) : (void)0)

/* name, what it keeps, from the first that a thread may take to the last */
#define MT_RANK_MAP(X)                                                                             \
    X(TEST, "a test's own")                                                                        \
    X(DOOR, "gradients and updates of an engine are handed over by one thread at a time")          \
    X(SWAP, "bundles, their bays, what moves in them, and whose turn it is to wait for a drive")   \
    X(OFFLOAD, "gradients on their way to the host, by ticket")                                    \
    X(UPDATE, "the steps that were submitted, and what became of them")                            \
    X(STREAM, "slots, and the requests that stand in line for them")                               \
    X(THROUGH, "updates that wait for buffers on the device")                                      \
    X(SERVING, "another rank is served what it asked for; held as long as copies take")            \
    X(RESIDENT, "settled units; held around puts, so while a full queue is waited for")            \
    X(DISK, "pieces of units on disk, whose buffers they are in, and the feed's")                  \
    X(SHARDS, "a save's blocks, and whose shares are in them")                                     \
    X(READING, "the next block of a file that is read by several threads")                         \
    X(MEASURE, "what a disk that is measured has under way")                                       \
    X(GROWING, "a file's length; held while the disk looks for room, which may take seconds")      \
    X(FILE, "a file's requests")                                                                   \
    X(MAKING, "one plane, while it is mapped, registered or given back: seconds a gigabyte")       \
    X(MAP, "units, planes and their arenas; held for moments")                                     \
    X(FETCHED, "each unit's `fetched` event: its making and its records")                          \
    X(MIRROR, "copies of planes on the host, claims to them, and doors; held for moments")         \
    X(LEDGER, "counts, versions, the fault")                                                       \
    X(POOL_TURN, "whose loop the pool runs; held as long as that")                                 \
    X(POOL, "the loop, and who is in it")                                                          \
    X(GEMM, "products' algorithms, as chosen so far")                                              \
    X(ATTENTION, "attention's plans, as made so far")                                              \
    X(REGISTERING, "host memory is registered one region after the other: seconds a gigabyte")     \
    X(TIMELINE_READING, "records are read by one thread at a time")                                \
    X(WATCH_ASKING, "events in the watch's list are not closed: the device is asked for each")     \
    X(CUDA, "what the CUDA device has open, and its first error")                                  \
    X(QUEUE, "a queue of the CPU device: what was put, and how much of it is done")                \
    X(FORKS_FILES, "descriptors that children do not have; fork() takes it, then the memory's")    \
    X(LEAF, "any under which no other lock is taken; held for moments")
#define MT_RANK_ENUM(name, what) MT_RANK_##name,
typedef enum mt_rank { MT_RANK_NONE, MT_RANK_MAP(MT_RANK_ENUM) MT_RANK_COUNT } mt_rank;
#undef MT_RANK_ENUM

/* rank: constant while the lock is open. 0, of memory that is zero, is none: such a lock was never
 * opened. */
typedef struct mt_mutex {
    pthread_mutex_t mu;
    mt_rank         rank;
} mt_mutex;

#define MT_MUTEX(rank) { PTHREAD_MUTEX_INITIALIZER, rank }      /* a static one, open */

#ifdef __cplusplus
extern "C" {
#endif
const char *mt_rank_name(mt_rank rank);

/* Says "text [file:line]" on stderr, and aborts. */
void mt__broken(const char *file, int line, const char *fmt, ...)
    __attribute__((noreturn, format(printf, 3, 4)));

/* Does this thread hold the lock? For MT_ASSERT, in builds that check themselves. */
int mt_holds(const mt_mutex *m);

/* What a thread that checks itself notes: before it takes the lock, before it gives it back, and
 * before it waits. */
void mt__rank_take(const mt_mutex *m, const char *file, int line);
void mt__rank_give(const mt_mutex *m, const char *file, int line);
void mt__rank_wait(const mt_mutex *m, const char *file, int line);
#ifdef __cplusplus
}
#endif

#ifdef MT_CHECKED
#define MT__RANK(what, m, file, line) mt__rank_##what(m, file, line)
#else
#define MT__RANK(what, m, file, line) ((void)(file), (void)(line))
#endif

/* These note where their callers are, which messages say. */
#define mt_lock(m)                  mt__lock((m), __FILE__, __LINE__)
#define mt_unlock(m)                mt__unlock((m), __FILE__, __LINE__)
#define mt_cond_wait(c, m)          mt__cond_wait((c), (m), __FILE__, __LINE__)
#define mt_cond_timedwait(c, m, t)  mt__cond_timedwait((c), (m), (t), __FILE__, __LINE__)

static inline void mt_mutex_open(mt_mutex *m, mt_rank rank)
{
    (void)pthread_mutex_init(&m->mu, NULL);     /* without attributes it cannot fail on Linux */
    m->rank = rank;
}

static inline void mt_mutex_close(mt_mutex *m)
{
    (void)pthread_mutex_destroy(&m->mu);
}

/* The value of an expression under a lock. */
#define MT_LOCKED(m, expr) \
    __extension__({ mt_lock(m); __typeof__(expr) value_ = (expr); mt_unlock(m); value_; })

/* The lock is held from here to the end of the block, however that is left; what a return yields is
 * made under it. No goto may jump over it. */
#define MT_HOLD(m) MT__HOLD(m, __LINE__)
#define MT__HOLD(m, line) MT__HOLD_AS(m, line)
#define MT__HOLD_AS(m, line) \
    mt_mutex *held_##line __attribute__((cleanup(mt__give), unused)) = mt__take((m), __FILE__, line)
/* And for one statement. */
#define MT_WITH(m)                                                                                \
    for (mt_mutex *held_ __attribute__((cleanup(mt__give))) = mt__take((m), __FILE__, __LINE__),  \
                  *once_ = held_; once_ != NULL; once_ = NULL)

static inline void mt__lock(mt_mutex *m, const char *file, int line)
{
    MT__RANK(take, m, file, line);
    pthread_mutex_lock(&m->mu);
}

static inline void mt__unlock(mt_mutex *m, const char *file, int line)
{
    MT__RANK(give, m, file, line);
    pthread_mutex_unlock(&m->mu);
}

static inline mt_mutex *mt__take(mt_mutex *m, const char *file, int line)
{
    mt__lock(m, file, line);
    return m;
}

static inline void mt__give(mt_mutex **m)
{
    mt_unlock(*m);
}

static inline void mt__cond_wait(pthread_cond_t *c, mt_mutex *m, const char *file, int line)
{
    MT__RANK(wait, m, file, line);
    pthread_cond_wait(c, &m->mu);
}

/* 0, or ETIMEDOUT. */
static inline int mt__cond_timedwait(pthread_cond_t *c, mt_mutex *m, const struct timespec *until,
                                     const char *file, int line)
{
    MT__RANK(wait, m, file, line);
    return pthread_cond_timedwait(c, &m->mu, until);
}

#endif
