/* pool.c — the pool: chunks by an atomic counter, sleeping workers, callers one after another.
 *
 * A loop is offered under `mu` and taken back under `mu`. A worker that wakes too late finds it
 * gone and sleeps again, so a short loop does not wait for every worker to wake.
 */
#include "pool.h"

#include "lock.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct mt_pool {
    int        n_threads;        /* the caller counted; constant */
    int        n_started;        /* workers to join; opening thread */
    pthread_t *workers;          /* [n_threads - 1] */

    mt_mutex        turn;        /* held by the caller whose loop it is */

    mt_mutex        mu;
    pthread_cond_t  offered;     /* loop or closing changed; workers wait */
    pthread_cond_t  left;        /* inside became 0; the caller waits */
    uint64_t        loop;        /* number of the loop, under mu; written by the caller */
    mt_chunk_fn     fn;          /* NULL: nothing to join. Under mu; written by the caller */
    int             inside;      /* workers in the loop, under mu */
    int             closing;     /* under mu */

    /* Written by the caller while inside == 0, read by workers inside. */
    void   *arg;
    int64_t n_chunks;
    /* Next chunk to take; any thread in the loop. `mu` orders the loop's data before and after,
     * so the counter itself need not. */
    _Atomic int64_t next;
};

static void take_chunks(mt_pool *p, mt_chunk_fn fn)
{
    int64_t i;

    while ((i = atomic_fetch_add_explicit(&p->next, 1, memory_order_relaxed)) < p->n_chunks)
        fn(p->arg, i);
}

static void *worker_main(void *pool)
{
    mt_pool *p = pool;
    uint64_t seen = 0;           /* last loop joined: a finished part is not joined again */

    mt_lock(&p->mu);
    for (;;) {
        mt_chunk_fn fn = p->fn;

        if (p->closing)
            break;
        if (fn == NULL || p->loop == seen) {
            mt_cond_wait(&p->offered, &p->mu);
            continue;
        }
        seen = p->loop;
        p->inside++;
        mt_unlock(&p->mu);
        take_chunks(p, fn);
        mt_lock(&p->mu);
        if (--p->inside == 0)
            pthread_cond_signal(&p->left);
    }
    mt_unlock(&p->mu);
    return NULL;
}

static mt_status start_workers(mt_pool *p)
{
    for (int i = 0; i < p->n_threads - 1; i++) {
        int error = pthread_create(&p->workers[i], NULL, worker_main, p);

        if (error != 0)
            return MT_FAIL(MT_ENOMEM, "pool: thread %d of %d: %s; ask for fewer threads", i + 2,
                           p->n_threads, strerror(error));
        (void)pthread_setname_np(p->workers[i], "mt-pool");
        p->n_started++;
    }
    return MT_OK;
}

mt_status mt_pool_open(int n_threads, mt_pool **out)
{
    mt_pool  *p;
    mt_status st;

    if (n_threads < 1)
        return MT_FAIL(MT_EINVAL, "pool: %d threads; at least 1, the caller's, is needed",
                       n_threads);
    if ((p = calloc(1, sizeof *p)) == NULL)
        return MT_FAIL(MT_ENOMEM, "pool: calloc(%zu)", sizeof *p);
    p->n_threads = n_threads;
    mt_mutex_open(&p->turn, MT_RANK_POOL_TURN);
    mt_mutex_open(&p->mu, MT_RANK_POOL);
    pthread_cond_init(&p->offered, NULL);
    pthread_cond_init(&p->left, NULL);
    if ((p->workers = calloc((size_t)n_threads, sizeof *p->workers)) == NULL)
        MT_TRY(MT_FAIL(MT_ENOMEM, "pool: calloc of %d thread handles", n_threads));
    MT_TRY(start_workers(p));
    *out = p;
    return MT_OK;

fail:
    mt_pool_close(p);
    return st;
}

void mt_pool_close(mt_pool *p)
{
    if (p == NULL)
        return;
    mt_lock(&p->mu);
    p->closing = 1;
    pthread_cond_broadcast(&p->offered);
    mt_unlock(&p->mu);
    for (int i = 0; i < p->n_started; i++)
        (void)pthread_join(p->workers[i], NULL);
    free(p->workers);
    pthread_cond_destroy(&p->left);
    pthread_cond_destroy(&p->offered);
    mt_mutex_close(&p->mu);
    mt_mutex_close(&p->turn);
    free(p);
}

int mt_pool_threads(const mt_pool *p)
{
    return p != NULL ? p->n_threads : 1;
}

/* Lets workers into the caller's loop. inside == 0 here: the caller before waited for that. */
static void offer(mt_pool *p, mt_chunk_fn fn, void *arg, int64_t n_chunks)
{
    mt_lock(&p->mu);
    p->arg = arg;
    p->n_chunks = n_chunks;
    atomic_store_explicit(&p->next, 0, memory_order_relaxed);
    p->fn = fn;
    p->loop++;
    pthread_cond_broadcast(&p->offered);
    mt_unlock(&p->mu);
}

/* Nobody joins any more; waits for those inside. What their chunks wrote is visible afterwards,
 * by `mu`. */
static void take_back(mt_pool *p)
{
    mt_lock(&p->mu);
    p->fn = NULL;
    while (p->inside > 0)
        mt_cond_wait(&p->left, &p->mu);
    mt_unlock(&p->mu);
}

void mt_pool_run(mt_pool *p, mt_chunk_fn fn, void *arg, int64_t n_chunks)
{
    if (p == NULL || p->n_threads == 1 || n_chunks <= 1) {
        for (int64_t i = 0; i < n_chunks; i++)
            fn(arg, i);
        return;
    }
    mt_lock(&p->turn);
    offer(p, fn, arg, n_chunks);
    take_chunks(p, fn);
    take_back(p);
    mt_unlock(&p->turn);
}

/* ---- how many processors ---------------------------------------------------------------- */

static int affinity_cpus(void)
{
    /* The kernel refuses a set smaller than its own, so the set grows until it is taken. */
    for (size_t n = 1024; n <= 1 << 20; n *= 4) {
        size_t     bytes = CPU_ALLOC_SIZE(n);
        cpu_set_t *set = CPU_ALLOC(n);
        int        count = 0;

        if (set != NULL && sched_getaffinity(0, bytes, set) == 0)
            count = CPU_COUNT_S(bytes, set);
        CPU_FREE(set);
        if (count > 0)
            return count;
    }
    return 1;
}

/* Whole processors in a quota of microseconds per period: a started one counts. 0: no limit. */
static int quota_cpus(long long quota_us, long long period_us)
{
    return quota_us > 0 && period_us > 0 ? (int)((quota_us + period_us - 1) / period_us) : 0;
}

static int min_limit(int a, int b)
{
    return a == 0 || (b != 0 && b < a) ? b : a;
}

/* Up to two numbers of a group's file; 0 where there is none: the file of an unlimited group
 * reads "max", or -1. */
static void read_numbers(const char *root, const char *group, const char *name, long long v[2])
{
    char  path[8448];
    FILE *f;

    v[0] = v[1] = 0;
    (void)snprintf(path, sizeof path, "%s%s/%s", root, group, name);
    if ((f = fopen(path, "re")) == NULL)
        return;
    if (fscanf(f, "%lld %lld", &v[0], &v[1]) < 1)
        v[0] = 0;
    (void)fclose(f);
}

static int v2_limit(const char *root, const char *group)
{
    long long max[2];

    read_numbers(root, group, "cpu.max", max);
    return quota_cpus(max[0], max[1]);
}

static int v1_limit(const char *root, const char *group)
{
    long long quota[2], period[2];

    read_numbers(root, group, "cpu.cfs_quota_us", quota);
    read_numbers(root, group, "cpu.cfs_period_us", period);
    return quota_cpus(quota[0], period[0]);
}

/* The tightest limit from a group up to the root. A container may see its group's path from
 * outside but only the part below it mounted: what does not exist is passed over. */
static int limit_upwards(const char *root, char *group,
                         int (*limit_of)(const char *root, const char *group))
{
    int limit = 0;

    for (;;) {
        char *slash = strrchr(group, '/');

        limit = min_limit(limit, limit_of(root, group));
        if (slash == NULL)
            return limit;
        *slash = '\0';
    }
}

/* One line of /proc/self/cgroup: "0::/group" (v2) or "3:cpu,cpuacct:/group" (v1). */
static int line_limit(char *line, const char *root)
{
    char  v1_root[4096];
    char *controllers = strchr(line, ':');
    char *group = controllers != NULL ? strchr(controllers + 1, ':') : NULL;
    char *save = NULL;

    if (group == NULL)
        return 0;
    *group++ = '\0';
    group[strcspn(group, "\n")] = '\0';
    if (strncmp(line, "0:", 2) == 0)
        return limit_upwards(root, group, v2_limit);
    for (char *c = strtok_r(controllers + 1, ",", &save); c != NULL; c = strtok_r(NULL, ",", &save))
        if (strcmp(c, "cpu") == 0) {
            (void)snprintf(v1_root, sizeof v1_root, "%s/cpu", root);
            return limit_upwards(v1_root, group, v1_limit);
        }
    return 0;
}

int mt__cgroup_cpus(const char *root, const char *self)
{
    char  line[4096];
    int   limit = 0;
    FILE *f = fopen(self, "re");

    if (f == NULL)
        return 0;
    while (fgets(line, sizeof line, f) != NULL)
        limit = min_limit(limit, line_limit(line, root));
    (void)fclose(f);
    return limit;
}

int mt_cpu_count(void)
{
    return min_limit(affinity_cpus(), mt__cgroup_cpus("/sys/fs/cgroup", "/proc/self/cgroup"));
}
