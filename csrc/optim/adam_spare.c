/* adam_spare.c — steps that may be taken back: what is saved before, and the two ways it ends. */
#include "adam_kernel.h"
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

static void *take(char **at, int64_t n, size_t elem)
{
    void *here = *at;

    *at += (size_t)n * elem;
    return here;
}

/* Wide elements first, so that each piece is aligned whatever n is. */
mt_adam_spare mt_adam_spare_at(mt_dtype weight, mt_states states, void *mem, int64_t n)
{
    char         *at = mem;
    mt_adam_spare s = { 0 };
    unsigned      low = weight == MT_BF16 ? mt_states_low_bytes(states) : 0;

    if (states == MT_STATES_FP32) {
        s.m = take(&at, n, 4);
        s.v = take(&at, n, 4);
    } else {
        s.codes.scale = take(&at, 2 * mt_states_groups(n), 4);
    }
    if (weight == MT_F16)
        s.master = take(&at, n, 4);
    if (low == 2)
        s.lo = take(&at, n, 2);
    s.hi = take(&at, n, mt_dtype_bytes(weight));
    if (states != MT_STATES_FP32) {
        s.codes.m = take(&at, n, 1);
        s.codes.v = take(&at, n, 1);
    }
    if (low == 1)
        s.codes.lo = take(&at, n, 1);
    return s;
}

/* The spare as if it were a tensor's planes; grad is only there to be moved along. */
static mt__adam_span spare_span(const mt_adam_tensor *t)
{
    const mt_adam_spare *s = &t->spare;

    return (mt__adam_span){ s->hi, s->lo, s->master, s->m, s->v, t->grad, t->n, s->codes, t->first };
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

static void copied(void *to, const void *from, size_t bytes)
{
    memcpy(to, from, bytes);
}

/* Whatever the spare has room for, by `copy`. */
static void copy_states(const mt__adam_span *to, const mt__adam_span *from,
                        void (*copy)(void *, const void *, size_t))
{
    const struct { void *to; const void *from; size_t bytes; } pieces[] = {
        { to->m,           from->m,           (size_t)from->n * 4 },
        { to->v,           from->v,           (size_t)from->n * 4 },
        { to->lo,          from->lo,          (size_t)from->n * 2 },
        { to->master,      from->master,      (size_t)from->n * 4 },
        { to->codes.m,     from->codes.m,     (size_t)from->n },
        { to->codes.v,     from->codes.v,     (size_t)from->n },
        { to->codes.scale, from->codes.scale, (size_t)mt_states_groups(from->n) * 8 },
        { to->codes.lo,    from->codes.lo,    (size_t)from->n },
    };

    for (size_t i = 0; i < sizeof pieces / sizeof pieces[0]; i++)
        if (pieces[i].from != NULL && pieces[i].to != NULL)
            copy(pieces[i].to, pieces[i].from, pieces[i].bytes);
}

void mt__adam_run_saved(const mt_adam_tensor *t, const mt__adam_span *part, int64_t from,
                        mt__adam_fn fn, const mt__adam_coef *c)
{
    mt__adam_span all = spare_span(t);

    for (int64_t i = 0; i < part->n; i += MT__ADAM_SAVED) {
        int64_t       n = part->n - i < MT__ADAM_SAVED ? part->n - i : MT__ADAM_SAVED;
        mt__adam_span now = mt__adam_part(part, t->dtype, t->grad_dtype, i, n);
        mt__adam_span kept = mt__adam_part(&all, t->dtype, t->grad_dtype, from + i, n);

        copy_states(&kept, &now, put_away);
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
    mt__adam_span all = { t->hi, t->lo, t->master, t->m, t->v, t->grad, t->n, t->codes, t->first };
    mt__adam_span spare = spare_span(t);
    mt__adam_span now = mt__adam_part(&all, t->dtype, t->grad_dtype, from, n);
    mt__adam_span kept = mt__adam_part(&spare, t->dtype, t->grad_dtype, from, n);

    if (e->keep)
        memcpy(now.hi, kept.hi, (size_t)n * mt_dtype_bytes(t->dtype));
    else
        copy_states(&now, &kept, copied);
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
