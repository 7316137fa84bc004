/* adam_spare.c — steps that may be taken back: what is saved before, and the two ways it ends. */
#include "adam_kernel.h"
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

/* The fp32 pieces first, so that each is aligned whatever n is. */
mt_adam_spare mt_adam_spare_at(mt_dtype weight, void *mem, int64_t n)
{
    float        *at = mem;
    mt_adam_spare s = { .m = at, .v = at + n };

    at += 2 * n;
    if (weight == MT_F16) {
        s.master = at;
        at += n;
    }
    s.hi = at;
    if (weight == MT_BF16) {
        s.lo = mem;
        s.lo += 4 * n;                   /* 16-bit elements: behind m and v */
        s.hi = s.lo + n;
    }
    return s;
}

/* The spare as if it were a tensor's planes; grad is only there to be moved along. */
static mt__adam_span spare_span(const mt_adam_tensor *t)
{
    const mt_adam_spare *s = &t->spare;

    return (mt__adam_span){ s->hi, s->lo, s->master, s->m, s->v, t->grad, t->n };
}

/* Bytes that nobody reads soon: past the caches, which would fetch each line before it is written. */
static void put_away(void *to, const void *from, size_t bytes)
{
    size_t i = 0;

#if defined(__x86_64__)
    char       *out = to;
    const char *in = from;

    if (((uintptr_t)out & 15) == 0)
        for (; i + 64 <= bytes; i += 64)
            for (size_t k = i; k < i + 64; k += 16)
                _mm_stream_si128((__m128i *)(void *)(out + k),
                                 _mm_loadu_si128((const __m128i *)(const void *)(in + k)));
    _mm_sfence();                        /* before anything that says these are written */
#endif
    memcpy((char *)to + i, (const char *)from + i, bytes - i);
}

static void save_states(const mt__adam_span *to, const mt__adam_span *from)
{
    size_t n = (size_t)from->n;

    put_away(to->m, from->m, n * sizeof *to->m);
    put_away(to->v, from->v, n * sizeof *to->v);
    if (from->lo != NULL)
        put_away(to->lo, from->lo, n * sizeof *to->lo);
    if (from->master != NULL)
        put_away(to->master, from->master, n * sizeof *to->master);
}

static void copy_states(const mt__adam_span *to, const mt__adam_span *from)
{
    size_t n = (size_t)from->n;

    memcpy(to->m, from->m, n * sizeof *to->m);
    memcpy(to->v, from->v, n * sizeof *to->v);
    if (from->lo != NULL)
        memcpy(to->lo, from->lo, n * sizeof *to->lo);
    if (from->master != NULL)
        memcpy(to->master, from->master, n * sizeof *to->master);
}

void mt__adam_run_saved(const mt_adam_tensor *t, const mt__adam_span *part, int64_t from,
                        mt__adam_fn fn, const mt__adam_coef *c)
{
    mt__adam_span all = spare_span(t);

    for (int64_t i = 0; i < part->n; i += MT__ADAM_SAVED) {
        int64_t       n = part->n - i < MT__ADAM_SAVED ? part->n - i : MT__ADAM_SAVED;
        mt__adam_span now = mt__adam_part(part, t->dtype, t->grad_dtype, i, n);
        mt__adam_span kept = mt__adam_part(&all, t->dtype, t->grad_dtype, from + i, n);

        save_states(&kept, &now);
        memcpy(kept.hi, now.hi, (size_t)n * mt_dtype_bytes(t->dtype));
        now.hi = kept.hi;
        fn(&now, c);
    }
}

/* ---- how it ends ---- */

typedef struct ending {
    const mt_adam_tensor *t;
    int                   keep;
} ending;

/* Any thread of the pool; chunks touch disjoint elements. */
static void end_chunk(void *arg, int64_t c)
{
    const ending         *e = arg;
    const mt_adam_tensor *t = e->t;
    int64_t       from = c * MT__ADAM_CHUNK;
    int64_t       n = t->n - from < MT__ADAM_CHUNK ? t->n - from : MT__ADAM_CHUNK;
    mt__adam_span all = { t->hi, t->lo, t->master, t->m, t->v, t->grad, t->n };
    mt__adam_span spare = spare_span(t);
    mt__adam_span now = mt__adam_part(&all, t->dtype, t->grad_dtype, from, n);
    mt__adam_span kept = mt__adam_part(&spare, t->dtype, t->grad_dtype, from, n);

    if (e->keep)
        memcpy(now.hi, kept.hi, (size_t)n * mt_dtype_bytes(t->dtype));
    else
        copy_states(&now, &kept);
}

static void end_all(mt_pool *pool, const mt_adam_tensor *t, int n_tensors, int keep)
{
    for (int i = 0; i < n_tensors; i++) {
        ending  e = { .t = &t[i], .keep = keep };
        int64_t n = (t[i].n + MT__ADAM_CHUNK - 1) / MT__ADAM_CHUNK;

        if (pool != NULL)
            mt_pool_run(pool, end_chunk, &e, n);
        else
            for (int64_t c = 0; c < n; c++)
                end_chunk(&e, c);
    }
}

void mt_adam_keep(mt_pool *pool, const mt_adam_tensor *t, int n_tensors)
{
    end_all(pool, t, n_tensors, 1);
}

void mt_adam_undo(mt_pool *pool, const mt_adam_tensor *t, int n_tensors)
{
    end_all(pool, t, n_tensors, 0);
}
