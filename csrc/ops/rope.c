/* rope.c — rope.h as it is to be read; the CUDA kernel gives the same bits. */
#include "rope.h"
#include "fpenv.h"
#include "element.h"

#define INLINE static inline __attribute__((always_inline))
#define TOKENS 16                    /* what a thread takes at once */

INLINE int64_t offset(const int64_t at[3], int64_t batch, int64_t token, int64_t head)
{
    return batch * at[0] + token * at[1] + head * at[2];
}

/* Both numbers of a pair are read before one is written: out may be x. */
INLINE void turn_head(mt_dtype dt, mt_dtype angle_dt, const mt_rope *r, const void *x, int64_t from,
                      void *out, int64_t to, int64_t cos_at, int64_t sin_at)
{
    for (int64_t i = 0; i < r->rot / 2; i++) {
        int64_t p = r->interleaved ? 2 * i : i, q = r->interleaved ? 2 * i + 1 : i + r->rot / 2;
        float   a = mt__get(dt, x, from + p), b = mt__get(dt, x, from + q);
        float   cp = mt__get(angle_dt, r->cos, cos_at + p),
                cq = mt__get(angle_dt, r->cos, cos_at + q);
        float   sp = mt__get(angle_dt, r->sin, sin_at + p),
                sq = mt__get(angle_dt, r->sin, sin_at + q);

        mt__put(dt, out, to + p, r->inverse ? a * cp + b * sq : a * cp - b * sp);
        mt__put(dt, out, to + q, r->inverse ? b * cq - a * sp : b * cq + a * sq);
    }
}

INLINE void copy_head(mt_dtype dt, const mt_rope *r, const void *x, int64_t from, void *out,
                      int64_t to, int64_t first)
{
    for (int64_t i = first; i < r->dim; i++)
        mt__put(dt, out, to + i, mt__get(dt, x, from + i));
}

INLINE void turn_token(mt_dtype dt, mt_dtype angle_dt, const mt_rope *r, int64_t batch,
                       int64_t token)
{
    int64_t cos_at = batch * r->cos_at[0] + token * r->cos_at[1];
    int64_t sin_at = batch * r->sin_at[0] + token * r->sin_at[1];

    for (int n = 0; n < MT_ROPE_PARTS; n++) {
        const mt_rope_part *p = &r->part[n];

        for (int64_t head = 0; head < p->heads; head++) {
            int64_t from = offset(p->x_at, batch, token, head),
                    to = offset(p->out_at, batch, token, head);

            if (n != MT_ROPE_V)
                turn_head(dt, angle_dt, r, p->x, from, p->out, to, cos_at, sin_at);
            copy_head(dt, r, p->x, from, p->out, to, n != MT_ROPE_V ? r->rot : 0);
        }
    }
}

INLINE void turn_tokens(mt_dtype dt, mt_dtype angle_dt, const mt_rope *r, int64_t from, int64_t to)
{
    for (int64_t t = from; t < to; t++)
        turn_token(dt, angle_dt, r, t / r->seq, t % r->seq);
}

static __attribute__((noinline)) void turn_of_types(const mt_rope *r, int64_t from, int64_t to)
{
    int narrow = r->angle_dt != MT_F32;

    switch (r->dt) {
    case MT_F32:  turn_tokens(MT_F32, MT_F32, r, from, to); break;
    case MT_BF16: turn_tokens(MT_BF16, narrow ? MT_BF16 : MT_F32, r, from, to); break;
    default:      turn_tokens(MT_F16, narrow ? MT_F16 : MT_F32, r, from, to); break;
    }
}

static void run_block(void *arg, int64_t block)
{
    const mt_rope *r = arg;
    int64_t        from = block * TOKENS, n = r->batch * r->seq;
    unsigned       was = mt__fp_begin();

    turn_of_types(r, from, from + TOKENS < n ? from + TOKENS : n);
    mt__fp_end(was);
}

void mt_rope_host(mt_pool *pool, const mt_rope *r)
{
    mt_pool_run(pool, run_block, (void *)(uintptr_t)r, (r->batch * r->seq + TOKENS - 1) / TOKENS);
}
