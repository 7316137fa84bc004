/* adam_c.c — rates of the host kernels without Python: the update in every format of states
 * beside a loop with the same reads and writes, and the sums. One JSON line each: G parameters/s,
 * over repetitions.
 *
 *     make -C tests/c
 *     cc -O2 -std=c11 -D_GNU_SOURCE benchmarks/adam_c.c build/c/libmt.a -lpthread -lm \
 *         -o build/adam_c
 *     build/adam_c 400000000 16 10            # parameters, threads (else 1), repetitions
 */
#include "../csrc/ops/sumsq.h"
#include "../csrc/optim/adam.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

typedef struct bench {
    mt_pool       *pool;
    mt_adam_tensor t;
    float         *acc;
    uint16_t      *add;
    mt_isa         isa;
    int            threads, reps;
} bench;

static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Huge pages where the system gives them, as the store's arenas. */
static void *plane(int64_t n, size_t each)
{
    size_t bytes = (size_t)n * each;
    void  *p     = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (p == MAP_FAILED) {
        fprintf(stderr, "mmap(%zu) failed\n", bytes);
        exit(1);
    }
    madvise(p, bytes, MADV_HUGEPAGE);
    return p;
}

typedef struct fill { void *p; int64_t n; size_t each; uint32_t and, or; } fill;

/* Ordinary numbers of either sign, from a hash of the index. Touched by the pool's threads. */
static void fill_chunk(void *arg, int64_t c)
{
    const fill *f = arg;

    for (int64_t i = c << 18; i < f->n && i < (c + 1) << 18; i++) {
        uint32_t u = ((uint32_t)i * 2654435761u ^ (uint32_t)(i >> 7)) & f->and;
        if (f->each == 4)
            ((uint32_t *)f->p)[i] = u | f->or;
        else
            ((uint16_t *)f->p)[i] = (uint16_t)((u | f->or) >> 16);
    }
}

static void fill_plane(mt_pool *pool, void *p, int64_t n, size_t each, uint32_t and, uint32_t or)
{
    fill f = { p, n, each, and, or };

    mt_pool_run(pool, fill_chunk, &f, (n >> 18) + 1);
}

/* All but the gradient, which nothing writes. Before each measurement: what the loop of traffic
 * leaves are bit patterns of any kind, and a step over NaN, denormal and huge weights is a slow
 * one. */
static void fill_all(bench *b)
{
    const uint32_t any = 0x807fffffu;               /* sign and fraction; the exponent is given */
    int64_t        n = b->t.n;

    fill_plane(b->pool, b->t.hi, n, 2, any, 0x3c000000u);
    fill_plane(b->pool, b->t.lo, n, 2, 0, 0);
    fill_plane(b->pool, b->t.m, n, 4, any, 0x3a000000u);
    fill_plane(b->pool, b->t.v, n, 4, any & ~(1u << 31), 0x35000000u);
    fill_plane(b->pool, b->acc, n, 4, any, 0x3a000000u);
}

static void do_step(bench *b)
{
    b->t.hyper.step++;
    mt_adam_step(b->pool, &b->t, 1, 0.9f, b->isa);
}

static void do_traffic(bench *b) { mt_adam_traffic(b->pool, &b->t, 1, b->isa); }
static void do_sumsq(bench *b)   { mt_sumsq_host(b->pool, MT_BF16, b->t.grad, b->t.n); }
static void do_accumulate(bench *b)
{
    double s;
    mt_accumulate(b->pool, MT_BF16, b->acc, (void *)(uintptr_t)b->t.grad, b->add, b->t.n, 0, &s,
                  NULL);
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double measure(bench *b, const char *name, void (*fn)(bench *), double bytes)
{
    double rate[1000];

    fill_all(b);
    for (int i = -2; i < b->reps; i++) {                /* two to warm up */
        double t = now();
        fn(b);
        if (i >= 0)
            rate[i] = (double)b->t.n / (now() - t) * 1e-9;
    }
    qsort(rate, (size_t)b->reps, sizeof rate[0], ascending);

    double median = rate[b->reps / 2];
    printf("{\"bench\":\"%s\",\"case\":\"bf16 weights and gradient, %s\",\"states\":\"%s\","
           "\"params\":%lld,\"threads\":%d,"
           "\"unit\":\"Gparam/s\",\"median\":%.3f,\"p10\":%.3f,\"p90\":%.3f,\"n\":%d,"
           "\"GB/s\":%.1f}\n",
           name, mt_isa_name(b->isa), mt_states_name(b->t.states), (long long)b->t.n, b->threads,
           median, rate[b->reps / 10], rate[b->reps * 9 / 10], b->reps, median * bytes);
    return median;
}

int main(int argc, char **argv)
{
    int64_t n = argc > 1 ? atoll(argv[1]) : 100000000;
    bench   b = { .threads = argc > 2 ? atoi(argv[2]) : 1,
                  .reps = argc > 3 ? atoi(argv[3]) : 10 };

    if (n < 1 || b.reps < 1 || b.reps > 1000 || mt_pool_open(b.threads, &b.pool) != MT_OK) {
        fprintf(stderr, "usage: adam_c [parameters [threads [repetitions, at most 1000]]] %s\n",
                mt_last_error());
        return 1;
    }
    b.t = (mt_adam_tensor){
        .dtype = MT_BF16, .grad_dtype = MT_BF16, .n = n,
        .hi = plane(n, 2), .lo = plane(n, 2), .m = plane(n, 4), .v = plane(n, 4),
        .grad = plane(n, 2),
        .hyper = { .lr = 1e-5, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1 },
    };
    b.acc = plane(n, 4);
    b.add = plane(n, 2);
    fill_plane(b.pool, (void *)(uintptr_t)b.t.grad, n, 2, 0x807fffffu, 0x3a000000u);
    fill_plane(b.pool, b.add, n, 2, 0x807fffffu, 0x3a000000u);

    /* Bytes in the same memory as fp32 moments: the first n of each plane. */
    b.t.codes = (mt_adam_codes){ .m = (int8_t *)b.t.m, .v = (uint8_t *)b.t.v, .scale = b.acc,
                                 .lo = (int8_t *)b.t.lo };

    for (int isa = MT_ISA_AVX512; isa > MT_ISA_SCALAR; isa--)
        for (int states = 0; states < MT_STATES_COUNT && mt_isa_runs((mt_isa)isa); states++) {
            b.isa = (mt_isa)isa;
            b.t.states = (mt_states)states;
            double bytes = (double)mt_adam_moves(MT_BF16, b.t.states, MT_BF16, n) / (double)n;
            double step = measure(&b, "adam_step", do_step, bytes);
            double same = measure(&b, "adam_traffic", do_traffic, bytes);
            printf("{\"bench\":\"adam_of_traffic\",\"case\":\"%s\",\"states\":\"%s\","
                   "\"unit\":\"%%\",\"median\":%.1f}\n", mt_isa_name(b.isa),
                   mt_states_name(b.t.states), 100 * step / same);
        }
    measure(&b, "sumsq", do_sumsq, 2);
    measure(&b, "accumulate", do_accumulate, 14);
    mt_pool_close(b.pool);
    return 0;
}
