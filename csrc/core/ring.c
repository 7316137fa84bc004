/* ring.c — buffers that pieces of the file go through: read, used, and written or copied on. */
#include "disk_impl.h"

#include "clock.h"

#include <stdlib.h>

/* What may follow a state; printed in disk_impl.h. */
#define IS(x) (1u << MT__##x)
static const unsigned char follows[] = {
    [MT__FREE] = IS(READING), [MT__READING] = IS(READY) | IS(FREE),
    [MT__READY] = IS(TAKEN) | IS(FREE), [MT__TAKEN] = IS(WRITING) | IS(COPYING) | IS(FREE),
    [MT__WRITING] = IS(FREE), [MT__COPYING] = IS(FREE),
};

int mt__may_follow(mt__at from, mt__at to)
{
    return follows[from] >> to & 1;
}

void mt__buffer_to(mt__buffer *b, mt__at at)
{
    MT_ASSERT(mt_holds(&b->ring->disk->mu));
    MT_ASSERT(mt__may_follow(b->at, at));
    b->at = at;
}

mt_status mt__ring_open(mt__ring *r, mt_disk *d, int n, char *mem, size_t each, unsigned sections,
                        const char *reads)
{
    *r = (mt__ring){ .disk = d, .sections = sections, .reads = reads };
    if ((r->buffers = calloc((size_t)n, sizeof *r->buffers)) == NULL)
        return MT_FAIL(MT_ENOMEM, "disk: no memory to describe %d buffers", n);
    for (r->n = 0; r->n < n; r->n++)
        r->buffers[r->n] = (mt__buffer){ .ring = r, .mem = mem + (size_t)r->n * each,
                                         .unit = -1 };
    return MT_OK;
}

mt__buffer *mt__ring_find(const mt__ring *r, unsigned states, int unit, int piece)
{
    for (int i = 0; i < r->n; i++) {
        mt__buffer *b = &r->buffers[i];

        if ((states >> b->at & 1) && (unit < 0 || b->unit == unit) &&
            (piece < 0 || b->piece == piece))
            return b;
    }
    return NULL;
}

void mt__ring_assert(const mt__ring *r)
{
    const mt_disk *d = r->disk;

    if (!MT_IS_CHECKED)
        return;
    MT_ASSERT(mt_holds(&d->mu));
    for (int i = 0; i < r->n; i++) {
        const mt__buffer *b = &r->buffers[i];
        int               moves = b->at == MT__READING || b->at == MT__WRITING;

        MT_ASSERT(b->ring == r && (moves ? b->left > 0 : b->left == 0));
        MT_ASSERT(b->at == MT__FREE || (b->unit >= 0 && b->unit < d->n_units &&
                                        b->piece < d->units[b->unit].lay->n_pieces));
    }
}

/* On a thread of the file's. */
static void over(mt_request *q)
{
    mt__buffer *b = q->arg;
    mt_disk    *d = b->ring->disk;

    mt__disk_tell(d, b->unit, b->piece, q);   /* before anybody is woken: they look for the fault */
    mt_lock(&d->mu);
    mt__disk_note(d, b->unit, q, b->begun_ns);
    if (--b->left == 0) {
        mt_watch_end(mt_store_watch(d->store), &b->post, q->st);
        mt__buffer_to(b, q->write || b->dropped || d->failed ? MT__FREE : MT__READY);
        mt__disk_ahead(d);
        pthread_cond_broadcast(&d->changed);
    }
    mt_unlock(&d->mu);
}

void mt__ring_put(mt__buffer *b, int unit, int piece, int write)
{
    mt_disk         *d = b->ring->disk;
    const mt__piece *c = &d->units[unit].lay->pieces[piece];
    unsigned         sections = 0;

    for (int k = 0; k < MT__SECTIONS; k++)
        sections |= (b->ring->sections >> k & 1) && c->section[k].bytes > 0 ? 1u << k : 0;
    mt__buffer_to(b, write ? MT__WRITING : MT__READING);
    b->unit = unit;
    b->piece = piece;
    b->dropped = 0;
    b->begun_ns = mt_now_ns();
    b->left = __builtin_popcount(sections);
    mt_watch_begin(mt_store_watch(d->store), &b->post, "disk", mt_store_name(d->store, unit),
                   write ? "a piece to be written" : b->ring->reads);
    for (int k = 0; k < MT__SECTIONS; k++) {
        if (!(sections >> k & 1))
            continue;
        b->r[k] = mt__disk_request(d, unit, piece, k, write, b->mem + c->section[k].from);
        b->r[k].done = over;
        b->r[k].arg = b;
        d->file->ops->put(d->file, &b->r[k]);
    }
}

void mt__ring_drop(mt__ring *r, int unit, uint64_t turn)
{
    for (int i = 0; i < r->n; i++) {
        mt__buffer *b = &r->buffers[i];

        if ((unit >= 0 && b->unit != unit) || b->turn >= turn)
            continue;
        if (b->at == MT__READY)
            mt__buffer_to(b, MT__FREE);
        b->dropped = 1;
    }
}
