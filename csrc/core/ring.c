/* ring.c — states of buffers, requests for what is in them, and what their ends bring about. */
#include "ring.h"

#include "clock.h"

#include <stdlib.h>

/* ---- states ------------------------------------------------------------------------------- */

#define IS(x) (1u << MT_BUFFER_##x)
#define READS (IS(READING) | IS(DROPPED))

/* What may follow a state; printed in ring.h. */
static const unsigned char follows[MT_BUFFER_STATES] = {
    [MT_BUFFER_FREE] = IS(READING) | IS(TAKEN),
    [MT_BUFFER_READING] = IS(READY) | IS(TAKEN) | IS(DROPPED),
    [MT_BUFFER_DROPPED] = IS(FREE),
    [MT_BUFFER_READY] = IS(TAKEN) | IS(FREE),
    [MT_BUFFER_TAKEN] = IS(READING) | IS(WRITING) | IS(COPYING) | IS(READY) | IS(FREE),
    [MT_BUFFER_WRITING] = IS(TAKEN) | IS(FREE),
    [MT_BUFFER_COPYING] = IS(FREE),
};

int mt_buffer_may(mt_buffer_state from, mt_buffer_state to)
{
    return follows[from] >> to & 1;
}

void mt_buffer_to(mt_buffer *b, mt_buffer_state to)
{
    MT_ASSERT(mt_holds(&b->ring->all->mu));
    MT_ASSERT(mt_buffer_may(b->at, to));
    b->at = to;
    if (to == MT_BUFFER_FREE)
        b->lay = NULL;
}

void mt_buffer_leave(mt_buffer *b)
{
    if (b->at == MT_BUFFER_READING)
        mt_buffer_to(b, MT_BUFFER_DROPPED);
    else if (b->at == MT_BUFFER_READY || b->at == MT_BUFFER_TAKEN)
        mt_buffer_to(b, MT_BUFFER_FREE);
    b->then = MT_BUFFER_FREE;
}

int mt_buffer_unit(const mt_buffer *b)
{
    return b->lay != NULL ? b->lay->unit : -1;
}

int mt_buffer_has(const mt_buffer *b, const mt_layout *l, int piece, unsigned sections)
{
    return b->lay == l && b->piece == piece && b->sections == sections;
}

/* What moves has requests, and what is not free a piece. */
static void assert_state(const mt_rings *all)
{
    if (!MT_IS_CHECKED)
        return;
    MT_ASSERT(mt_holds(&all->mu));
    for (const mt_ring *r = all->first; r != NULL; r = r->next)
        for (int i = 0; i < r->n; i++) {
            const mt_buffer *b = r->buffers[i];

            MT_ASSERT(b->ring == r && b->number == i);
            MT_ASSERT(((READS | IS(WRITING)) >> b->at & 1) == (b->left > 0));
            MT_ASSERT((b->lay == NULL) == (b->at == MT_BUFFER_FREE) || b->at == MT_BUFFER_TAKEN);
            MT_ASSERT(b->lay == NULL || b->piece < b->lay->n);
        }
}

/* ---- what others do ----------------------------------------------------------------------- */

mt_buffer *mt_ring_find(const mt_ring *r, unsigned states, int unit, int piece)
{
    for (int i = 0; i < r->n; i++) {
        mt_buffer *b = r->buffers[i];

        if ((states >> b->at & 1) && (unit < 0 || mt_buffer_unit(b) == unit) &&
            (piece < 0 || b->piece == piece))
            return b;
    }
    return NULL;
}

/* but: a ring that is left out; NULL: none. */
static int is_under_way(const mt_rings *all, const mt_ring *but, unsigned states, int unit,
                        int piece)
{
    for (const mt_ring *r = all->first; r != NULL; r = r->next)
        if (r != but && mt_ring_find(r, states, unit, piece) != NULL)
            return 1;
    return 0;
}

int mt_rings_meets(const mt_rings *all, int unit, int piece, int write)
{
    return is_under_way(all, NULL, IS(WRITING) | (write ? READS : 0), unit, piece);
}

int mt_ring_others_read(const mt_ring *r, int unit)
{
    return is_under_way(r->all, r, READS, unit, -1);
}

void mt_ring_drop(mt_ring *r, int unit, const mt_buffer *before)
{
    for (int i = 0; i < r->n; i++) {
        mt_buffer *b = r->buffers[i];

        if (((IS(READING) | IS(READY)) >> b->at & 1) && (unit < 0 || mt_buffer_unit(b) == unit) &&
            (before == NULL || b->turn < before->turn))
            mt_buffer_leave(b);
    }
}

void mt_ring_drop_others(mt_ring *r, int unit)
{
    for (mt_ring *o = r->all->first; o != NULL; o = o->next)
        if (o != r)
            mt_ring_drop(o, unit, NULL);
}

void mt_rings_ahead(mt_rings *all)
{
    assert_state(all);
    for (mt_ring *r = all->first; r != NULL && !all->failed; r = r->next)
        if (r->how.ahead != NULL)
            r->how.ahead(r->how.arg);
}

/* ---- requests ----------------------------------------------------------------------------- */

/* On a thread of the file's. */
static void over(mt_request *q)
{
    mt_buffer *b = q->arg;
    mt_rings  *all = b->ring->all;

    mt_layout_tell(b->lay, b->piece, q); /* before anybody is woken: they look for the fault */
    MT_HOLD(&all->mu);
    all->failed |= q->st != MT_OK;
    *(q->write ? &all->stats.written_bytes : &all->stats.read_bytes) += q->moved;
    mt_timeline_over(all->timeline, MT_LANE_DISK, q->write ? MT_WORK_WRITE : MT_WORK_READ,
                     b->lay->unit, b->begun_ns, q->moved, &all->recorded_ns);
    if (--b->left == 0) {
        mt_watch_end(mt_store_watch(all->store), &b->post, q->st);
        mt_buffer_to(b, b->then);
        mt_rings_ahead(all);
        pthread_cond_broadcast(&all->changed);
    }
}

void mt_ring_put(mt_buffer *b, const mt_layout *l, int piece, unsigned sections, int write,
                 mt_buffer_state then)
{
    mt_ring  *r = b->ring;
    mt_rings *all = r->all;

    mt_buffer_to(b, write ? MT_BUFFER_WRITING : MT_BUFFER_READING);
    b->then = then;
    b->lay = l;
    b->piece = piece;
    b->sections = sections;
    b->turn = ++r->turns;
    b->begun_ns = mt_now_ns();
    for (int k = 0; k < MT_SECTIONS; k++)
        b->left += (sections >> k & 1) && l->pieces[piece].section[k].bytes > 0;
    MT_ASSERT(b->left > 0);
    mt_watch_begin(mt_store_watch(all->store), &b->post, "disk",
                   mt_store_name(all->store, l->unit), write ? r->how.writes : r->how.reads);
    for (int k = 0; k < MT_SECTIONS; k++) {
        b->r[k] = mt_layout_request(l, piece, k, write, b->memory.base);
        b->r[k].done = over;
        b->r[k].arg = b;
        if ((sections >> k & 1) && b->r[k].bytes > 0)
            all->file->ops->put(all->file, &b->r[k]);
    }
}

/* ---- open and close ----------------------------------------------------------------------- */

mt_status mt_rings_open(const mt_context *cx, mt_blocks *file, mt_rings **out)
{
    mt_rings *all;
    mt_status st;

    MT_TRY(MT_MAKE(all, 1, "disk"));
    *all = (mt_rings){ .store = cx->store, .timeline = cx->timeline, .file = file };
    mt_mutex_open(&all->mu, MT_RANK_DISK);
    MT_TRY(mt_watch_cond(&all->changed));
    *out = all;
    return MT_OK;
fail:
    mt_rings_close(all);
    return st;
}

void mt_rings_close(mt_rings *all)
{
    if (all == NULL)
        return;
    MT_ASSERT(all->first == NULL);
    pthread_cond_destroy(&all->changed);
    mt_mutex_close(&all->mu);
    free(all);
}

mt_status mt_ring_open(mt_rings *all, const mt_ring_how *how, mt_ring **out)
{
    mt_ring *r;

    MT_DO(MT_MAKE(r, 1, how->name));
    *r = (mt_ring){ .all = all, .how = *how };
    mt_lock(&all->mu);
    r->next = all->first;
    all->first = r;
    mt_unlock(&all->mu);
    *out = r;
    return MT_OK;
}

static void buffer_free(mt_buffer *b)
{
    if (b != NULL)
        mt_arena_close(&b->memory);
    free(b);
}

void mt_ring_close(mt_ring *r)
{
    mt_ring **at;

    if (r == NULL)
        return;
    mt_lock(&r->all->mu);
    r->how.ahead = NULL;
    while (mt_ring_find(r, READS | IS(WRITING), -1, -1) != NULL)
        mt_cond_wait(&r->all->changed, &r->all->mu);
    for (at = &r->all->first; *at != r; at = &(*at)->next)
        ;
    *at = r->next;
    for (int i = 0; i < r->n; i++)
        r->all->stats.buffer_bytes -= r->buffers[i]->memory.bytes;
    mt_unlock(&r->all->mu);
    for (int i = 0; i < r->n; i++)
        buffer_free(r->buffers[i]);
    free(r->buffers);
    free(r);
}

mt_status mt_ring_add(mt_ring *r, size_t bytes, mt_dev *dev)
{
    mt_buffer *b;
    mt_status  st;

    MT_TRY(MT_MAKE(b, 1, r->how.name));
    MT_TRY(mt_arena_open(&b->memory, bytes, NULL, dev, r->how.name,
                         mt_store_bytes(r->all->store, MT_PLANE_COUNT)));
    mt_lock(&r->all->mu);
    if ((st = MT_GROW(r->buffers, r->room, r->n + 1, r->how.name)) == MT_OK) {
        b->ring = r;
        b->number = r->n;
        r->buffers[r->n++] = b;
        r->all->stats.buffer_bytes += b->memory.bytes;
    }
    mt_unlock(&r->all->mu);
    if (st == MT_OK)
        return MT_OK;
fail:
    buffer_free(b);
    return st;
}
