/* nf4.c — see nf4.h. */
#include "nf4.h"
#include "element.h"
#include "expand.h"

#include <math.h>

#define CHUNK  (1 << 15)             /* elements that one thread takes, at least */
#define LEAST  1e-38f
#define BOUNDS 15

/* Compiled for wider vectors too, of which the loader chooses; they compare alike. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__has_attribute)
#if __has_attribute(target_clones)
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#endif
#ifndef WIDE
#define WIDE
#endif

typedef struct nf4_work {
    mt_dtype    dtype;
    const void *w;
    int64_t     n, blocks, at_once;  /* blocks that one thread takes */
    int         group;
    uint8_t    *codes;
    float      *scales;
    float       bounds[BOUNDS];      /* halves between the numbers */
} nf4_work;

static inline void read_block(const nf4_work *x, int64_t at, int n, float *v)
{
    if (x->dtype == MT_BF16)
        for (int i = 0; i < n; i++)
            v[i] = mt_bf16_to_f32(((const uint16_t *)x->w)[at + i]);
    else
        for (int i = 0; i < n; i++)
            v[i] = mt__get(x->dtype, x->w, at + i);
}

/* By their bits, which are in the order of the magnitudes; a NaN's are past all. */
static inline float largest(const float *v, int n)
{
    union { float f; int32_t i; } most = { .i = 0 };

    for (int i = 0; i < n; i++) {
        union { float f; int32_t i; } a = { .f = fabsf(v[i]) };

        most.i = a.i > most.i ? a.i : most.i;
    }
    return most.f;
}

/* Not below, rather than above: a NaN is past all bounds. */
static inline void find_codes(const nf4_work *x, const float *v, int n, uint32_t *found)
{
    for (int i = 0; i < n; i++) {
        uint32_t passed = 0;

        for (int k = 0; k < BOUNDS; k++)
            passed += !(v[i] <= x->bounds[k]);
        found[i] = passed;
    }
}

WIDE static void one_block(const nf4_work *x, int64_t block)
{
    int64_t  at = block * x->group;
    int      whole = x->n - at >= x->group, n = whole ? x->group : (int)(x->n - at);
    float    v[MT_NF4_GROUP_MOST], scale, least, by;
    uint32_t found[MT_NF4_GROUP_MOST];

    read_block(x, at, n, v);
    scale = largest(v, n);
    least = scale < LEAST ? LEAST : scale;
    x->scales[block] = whole ? scale : least;
    by = 1.0f / least;
    for (int i = 0; i < n; i++) {
        float s = whole ? v[i] * by : v[i] / least;

        v[i] = s < -1.0f ? -1.0f : s > 1.0f ? 1.0f : s;
    }
    if (n % 2 != 0)
        v[n] = 0;
    find_codes(x, v, n + n % 2, found);
    for (int i = 0; i < n; i += 2)
        x->codes[(at + i) / 2] = (uint8_t)(found[i] << 4 | found[i + 1]);
}

static void some_blocks(void *arg, int64_t chunk)
{
    const nf4_work *x = arg;
    int64_t         block = chunk * x->at_once, end = block + x->at_once;

    for (; block < end && block < x->blocks; block++)
        one_block(x, block);
}

void mt_nf4_codes(mt_pool *pool, mt_dtype dtype, const void *w, int64_t n, int group,
                  uint8_t *codes, float *scales)
{
    static const float numbers[] = MT_NF4_NUMBERS;
    nf4_work           x = { .dtype = dtype, .w = w, .n = n, .blocks = (n + group - 1) / group,
                             .at_once = (CHUNK + group - 1) / group, .group = group, .codes = codes,
                             .scales = scales };

    for (int k = 0; k < BOUNDS; k++)
        x.bounds[k] = (numbers[k] + numbers[k + 1]) / 2;
    mt_pool_run(pool, some_blocks, &x, (x.blocks + x.at_once - 1) / x.at_once);
}
