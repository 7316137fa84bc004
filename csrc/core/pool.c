/* pool.c — the pool: chunks by an atomic counter, a job for each worker, callers in turn.
 *
 * Jobs that no thread has begun when the caller's own part ends are withdrawn, so a short loop does
 * not wait for every worker to wake.
 */
#include "pool.h"

#include "worker.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct mt_pool {
    int             n_threads;   /* the caller counted; constant */
    mt_mutex        turn;        /* held by the caller whose loop it is */
    mt_mutex        mu;
    mt_worker       worker;      /* of n_threads - 1 */
    mt_job         *jobs;        /* [n_threads] one for each, to take part. mu */

    /* Written by the caller while no job is submitted, read by those that run. */
    mt_chunk_fn     fn;
    void           *arg;
    int64_t         n_chunks;
    /* Next chunk to take; any thread in the loop. `mu` orders the loop's data before and after,
     * so the counter itself need not. */
    _Atomic int64_t next;
};

static void take_chunks(mt_pool *p)
{
    int64_t i;

    while ((i = atomic_fetch_add_explicit(&p->next, 1, memory_order_relaxed)) < p->n_chunks)
        p->fn(p->arg, i);
}

static mt_status take_part(void *arg, mt_job *job)
{
    mt_pool *p = arg;

    (void)job;
    mt_unlock(&p->mu);
    take_chunks(p);
    mt_lock(&p->mu);
    return MT_OK;
}

mt_status mt_pool_open(int n_threads, mt_pool **out)
{
    mt_pool  *p MT_CLOSED(mt_pool_close) = NULL;

    if (n_threads < 1)
        return MT_FAIL(MT_EINVAL, "pool: %d threads; at least 1, the caller's, is needed",
                       n_threads);
    MT_DO(MT_MAKE(p, 1, "pool"));
    p->n_threads = n_threads;
    mt_mutex_open(&p->turn, MT_RANK_POOL_TURN);
    mt_mutex_open(&p->mu, MT_RANK_POOL);
    MT_DO(MT_MAKE(p->jobs, n_threads, "pool"));
    MT_DO(mt_worker_open(&p->worker, &p->mu, n_threads - 1, "mt-pool", "pool", take_part, p));
    *out = MT_KEEP(p);
    return MT_OK;
}

void mt_pool_close(mt_pool *p)
{
    if (p == NULL)
        return;
    mt_worker_close(&p->worker);
    mt_mutex_close(&p->mu);
    mt_mutex_close(&p->turn);
    free(p->jobs);
    free(p);
}

int mt_pool_threads(const mt_pool *p)
{
    return p != NULL ? p->n_threads : 1;
}

void mt_pool_run(mt_pool *p, mt_chunk_fn fn, void *arg, int64_t n_chunks)
{
    if (p == NULL || p->n_threads == 1 || n_chunks <= 1) {
        for (int64_t i = 0; i < n_chunks; i++)
            fn(arg, i);
        return;
    }
    mt_lock(&p->turn);
    p->fn = fn;
    p->arg = arg;
    p->n_chunks = n_chunks;
    atomic_store_explicit(&p->next, 0, memory_order_relaxed);
    mt_lock(&p->mu);
    for (int i = 0; i < p->n_threads - 1; i++)
        (void)mt_worker_submit(&p->worker, &p->jobs[i]);
    mt_unlock(&p->mu);
    take_chunks(p);
    mt_lock(&p->mu);         /* by which what the others' chunks wrote is visible afterwards */
    while (p->worker.first != NULL)
        mt_worker_withdraw(&p->worker, p->worker.first);
    while (p->worker.ended < p->worker.submitted)
        mt_cond_wait(&p->worker.news, &p->mu);
    mt_unlock(&p->mu);
    mt_unlock(&p->turn);
}

/* ---- how many processors ---------------------------------------------------------------- */

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

/* The tightest limit from a group up to the root. A container may see its group's path from
 * outside but only the part below it mounted: what does not exist is passed over. */
static int limit_upwards(const char *root, char *group, int v2)
{
    long long quota[2], period[2];
    int       limit = 0;

    for (;;) {
        char *slash = strrchr(group, '/');

        read_numbers(root, group, v2 ? "cpu.max" : "cpu.cfs_quota_us", quota);
        read_numbers(root, group, "cpu.cfs_period_us", period);
        period[0] = v2 ? quota[1] : period[0];       /* v2 has both in one file, v1 in two */
        /* Whole processors in a quota of microseconds per period: a started one counts. */
        if (quota[0] > 0 && period[0] > 0)
            limit = min_limit(limit, (int)((quota[0] + period[0] - 1) / period[0]));
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
        return limit_upwards(root, group, 1);
    for (char *c = strtok_r(controllers + 1, ",", &save); c != NULL; c = strtok_r(NULL, ",", &save))
        if (strcmp(c, "cpu") == 0) {
            (void)snprintf(v1_root, sizeof v1_root, "%s/cpu", root);
            return limit_upwards(v1_root, group, 0);
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
    int group = mt__cgroup_cpus("/sys/fs/cgroup", "/proc/self/cgroup");

    /* The kernel refuses a set smaller than its own, so the set grows until it is taken. */
    for (size_t n = 1024; n <= 1 << 20; n *= 4) {
        size_t     bytes = CPU_ALLOC_SIZE(n);
        cpu_set_t *set = CPU_ALLOC(n);
        int        count = 0;

        if (set != NULL && sched_getaffinity(0, bytes, set) == 0)
            count = CPU_COUNT_S(bytes, set);
        CPU_FREE(set);
        if (count > 0)
            return min_limit(count, group);
    }
    return 1;
}
