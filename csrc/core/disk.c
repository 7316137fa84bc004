/* disk.c — pieces go round: read into a free buffer, updated there, written from there, and the
 * buffer is free again.
 *
 * Whoever frees a buffer puts the next read, which takes no time: so nobody waits for a free one
 * but updates. Buffers of the feed are emptied by the mover: it alone puts copies, and waits for
 * the device. One lock, but for those waits.
 */
#include "disk.h"

#include "arena.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HI     (1u << MT_PLANE_HI)
#define IS(x)  (1u << x)
#define READS  (IS(READING) | IS(DROPPED))
#define IN_USE (~IS(FREE))

#define ALL_SECTIONS (1u << SECTION_WEIGHTS | 1u << SECTION_STATES)

#define FEED_LEAST 2                /* buffers: one is read while another is copied */
#define FEED_MOST  64               /* what keeps sixteen threads of the file at work, and more */
#define EXPECTED   8                /* units */

/* ---- layouts: where a unit's planes lie in the file ----------------------------------------- */

/* Of a piece its weights, or its states. Each is a request with sums of its own, so a fetch reads
 * the one without the other. They lie one after the other, in the file as in a buffer. */
enum { SECTION_WEIGHTS, SECTION_STATES, SECTIONS };

typedef struct section {
    size_t    from, bytes;               /* in the piece: whole MT_BLOCK_ALIGN. 0: there is none */
    uint64_t *sums;                      /* whose request it is writes them; all else is constant */
} section;

typedef struct placed {                  /* a piece */
    section  section[SECTIONS];
    uint64_t at;                         /* in the file */
    size_t   hi_at;                      /* its weights in plane HI: hi_bytes from here on */
} placed;

typedef struct layout {
    int        unit;
    mt_pieces *cut;
    placed    *pieces;                   /* [n] of cut's */
    int        n;
    uint64_t   bytes;                    /* of all pieces */
    size_t     most_weights;             /* bytes in a piece */
    unsigned  *planes;                   /* [parameters of the unit] in the file, a bit each */
} layout;

static void layout_free(layout *l)
{
    if (l == NULL)
        return;
    for (int i = 0; l->pieces != NULL && i < l->cut->n; i++)
        for (int k = 0; k < SECTIONS; k++)
            free(l->pieces[i].section[k].sums);
    mt_pieces_free(l->cut);
    free(l->pieces);
    free(l->planes);
    free(l);
}

MT_CLOSER(layout_free, layout)

/* Of the planes at home in the file, in pieces of at most so many bytes. made: what has its place
 * in the unit's arena, which is so for good once that is made; else as it would be now. */
static mt_status layout_make(mt_store *s, int unit, size_t bytes, int made, layout **out)
{
    int         params = mt_store_params(s, unit);
    const char *name = mt_store_name(s, unit);
    layout     *l MT_CLOSED(layout_free) = NULL;
    placed     *c;

    MT_DO(MT_MAKE(l, 1, name));
    l->unit = unit;
    MT_DO(MT_MAKE(l->planes, params, name));
    for (int i = 0; i < params; i++)
        for (int p = 0; p < MT_PLANE_COUNT && mt_store_desc(s, unit, i)->numel > 0; p++) {
            int in = mt_store_trainable(s, unit, i) || p == MT_PLANE_HI;

            if (!(mt_store_home(s, unit, NULL)->away >> p & 1) ||
                mt_store_plane_bytes(s, unit, i, (mt_plane)p, 1) == 0)
                continue;
            if (made)
                MT_DO(mt_store_in_arena(s, unit, i, (mt_plane)p, &in));
            l->planes[i] |= in ? 1u << p : 0;
        }
    MT_DO(mt_pieces_cut(s, unit, &(mt_cut){ l->planes, bytes, MT_BLOCK_ALIGN, MT_DISK_GRAIN, 0,
                                           mt_store_align(s, unit) }, &l->cut));
    MT_DO(MT_MAKE(l->pieces, l->cut->n, name));
    for (l->n = l->cut->n, c = l->pieces; c < l->pieces + l->n; c++) {
        const mt_piece   *whole = &l->cut->piece[c - l->pieces];
        const mt_stretch *first = &l->cut->part[whole->first];

        c->hi_at = mt_store_offset(s, unit, first->param) +
                   mt_store_plane_bytes(s, unit, first->param, MT_PLANE_HI, first->from);
        c->section[SECTION_WEIGHTS].bytes = c->section[SECTION_STATES].from = whole->weights;
        c->section[SECTION_STATES].bytes = whole->bytes - whole->weights;
        l->bytes += whole->bytes;
        l->most_weights = whole->weights > l->most_weights ? whole->weights : l->most_weights;
        for (int k = 0; k < SECTIONS; k++)
            MT_DO(MT_MAKE(c->section[k].sums, (int64_t)mt_block_count(c->section[k].bytes), name));
    }
    *out = MT_KEEP(l);
    return MT_OK;
}

/* Has the piece something of one of these parameters? */
static int has_any(const layout *l, int piece, const int *params, int n)
{
    const mt_piece *c = &l->cut->piece[piece];

    for (int i = c->first; i < c->first + c->n; i++)
        for (int k = 0; k < n; k++)
            if (l->cut->part[i].param == params[k])
                return 1;
    return 0;
}

/* Whose byte is at this offset of the piece. */
static const mt_stretch *found_at(const layout *l, int piece, size_t offset, mt_plane *plane)
{
    const mt_piece   *c = &l->cut->piece[piece];
    const mt_stretch *found = NULL;
    size_t            best = 0;

    for (int i = c->first; i < c->first + c->n; i++)
        for (int p = 0; p < MT_PLANE_COUNT; p++) {
            const mt_stretch *k = &l->cut->part[i];

            if (k->offset[p] == MT_PART_ABSENT || k->offset[p] > offset || k->offset[p] < best)
                continue;
            best = k->offset[p];
            found = k;
            *plane = (mt_plane)p;
        }
    return found;
}

/* A request that failed is the ledger's fault, with unit, plane and parameter. */
static void tell_failure(mt_store *s, const layout *l, int piece, const mt_request *r)
{
    const section    *states = &l->pieces[piece].section[SECTION_STATES];
    size_t            offset = (size_t)(r->bad_at - l->pieces[piece].at), end = states->from;
    mt_plane          from = MT_PLANE_HI, to = MT_PLANE_HI;
    const mt_stretch *first, *last;
    char              until[80] = "";

    if (r->st == MT_OK)
        return;
    /* What lies in the block that begins there: the first and the last; it is of one section. */
    end += offset >= states->from ? states->bytes : 0;
    first = found_at(l, piece, offset, &from);
    last = found_at(l, piece, (end - offset < MT_BLOCK_BYTES ? end : offset + MT_BLOCK_BYTES) - 1,
                    &to);
    if (first != last || from != to)
        snprintf(until, sizeof until, " to plane %s of parameter %d", mt_plane_name(to),
                 last->param);
    (void)MT_FAIL(r->st, "unit %s, %splane %s of parameter %d%s: %s; the run cannot go on: make "
                  "the model again, stream it, and load the last checkpoint",
                  mt_store_name(s, l->unit), until[0] != '\0' ? "from " : "",
                  mt_plane_name(from), first->param, until, r->text);
    mt_ledger_fault(s, r->st, mt_last_error());
}

/* ---- rings --------------------------------------------------------------------------------- */

/* disk.h says what they mean. */
typedef enum { FREE, READING, DROPPED, READY, TAKEN, WRITING, COPYING, STATES } state;

static const unsigned char follows[STATES] = {
    [FREE] = IS(READING) | IS(TAKEN),
    [READING] = IS(READY) | IS(TAKEN) | IS(DROPPED),
    [DROPPED] = IS(FREE),
    [READY] = IS(TAKEN) | IS(FREE),
    [TAKEN] = IS(READING) | IS(WRITING) | IS(COPYING) | IS(READY) | IS(FREE),
    [WRITING] = IS(TAKEN) | IS(FREE),
    [COPYING] = IS(FREE),
};

/* Rings: the name of their memory, and what is waited for meanwhile, for the watchdog. */
enum { UPDATES, FETCHES, COPIES, RINGS };
static const struct { const char *name, *reads, *writes; } words[RINGS] = {
    [UPDATES] = { "buffers of the disk", "a piece to be read (READ)", "a piece to be written" },
    [FETCHES] = { "buffers of weights on disk", "weights to be read for a fetch", NULL },
    [COPIES] = { "buffers of the disk", "a piece to be read for the host (WRITTEN)",
                 "a piece to be written (PUSHED)" },
};

typedef struct buffer {
    mt_disk         *d;                  /* these four: constant */
    int              ring;
    mt_arena         memory;
    mt_event        *copied;             /* of fetches: recorded behind the copy; else NULL */
    state            at, then;           /* then: when its requests are over. The lock, as below */
    const layout    *lay;                /* what it has, or will; NULL: nothing */
    int              piece;
    unsigned         sections;           /* of it, a bit each */
    mt_request       r[SECTIONS];        /* under way when READING, DROPPED or WRITING */
    int              left;               /* of these */
    mt_post          post;               /* of them */
    uint64_t         turn;               /* reads of a ring are counted */
    uint64_t         begun_ns;
} buffer;

typedef struct ring {                    /* the lock */
    buffer **buffers;                    /* [n] */
    int64_t  n, room;
    uint64_t turns;
} ring;

typedef struct feed {                    /* the lock */
    int unit, piece;                     /* to be copied next; unit -1: nothing is fetched now */
    int begun;                           /* and its fetch is in the ledger */
    int expected[EXPECTED], n_expected;  /* units */
} feed;

typedef struct disk_unit {
    int        on;                       /* it is ours */
    layout    *lay;                      /* NULL before its planes are first used. The lock, as
                                          * these */
    int        next;                     /* the unit that followed it last, or was added behind
                                          * it */
    int        held;                     /* it is being written from outside, and not read */
} disk_unit;

struct mt_disk {
    mt_context    *cx;                   /* these five: constant */
    mt_store      *store;
    mt_blocks     *file;
    mt_pool       *pool;
    size_t         bytes;                /* of a buffer */
    disk_unit     *units;                /* [n_units] of the store's, as far as add came */
    int64_t        n_units;
    int            last_added, first_added;      /* -1: none */

    mt_mutex       mu;                   /* the lock, and the worker's too */
    pthread_cond_t changed;              /* requests of a buffer are over, or a buffer is free */
    ring           rings[RINGS];         /* the lock, as all below */
    int            failed;
    uint64_t       recorded_ns;          /* the lane's records reach up to here */
    size_t         most_weights;         /* bytes in a piece */
    int            fed;                  /* and fetches have buffers of so many */
    feed           feed;
    int            next_unit, next_piece;        /* to be read; next_unit -1: nobody knows */
    int            before;               /* the unit updated last; -1: none */
    mt_disk_stats  stats;
    mt_worker      worker;               /* updates */
};

/* As MT_UNTIL, under the lock. */
#define UNTIL(d, over, unit, awaits)                                                               \
    MT_UNTIL(mt_store_watch((d)->store), &(d)->changed, &(d)->mu, over,                            \
             mt_store_name((d)->store, unit), awaits)

/* ---- buffers: under the lock ---------------------------------------------------------------- */

static void become(buffer *b, state to)
{
    MT_ASSERT(mt_holds(&b->d->mu));
    MT_ASSERT(follows[b->at] >> to & 1);
    b->at = to;
    if (to == FREE)
        b->lay = NULL;
}

/* Whoever has it wants it no more: FREE, now or when its request is over. */
static void leave(buffer *b)
{
    if (b->at == READING)
        become(b, DROPPED);
    else if (b->at == READY || b->at == TAKEN)
        become(b, FREE);
    b->then = FREE;
}

/* Whose piece it has; -1: it has none. */
static int unit_of(const buffer *b)
{
    return b->lay != NULL ? b->lay->unit : -1;
}

/* What moves has requests, and what is not free a piece. */
static void assert_state(const mt_disk *d)
{
    if (!MT_IS_CHECKED)
        return;
    MT_ASSERT(mt_holds(&d->mu));
    MT_ASSERT(d->next_unit < d->n_units && d->before < d->n_units);
    MT_ASSERT(d->feed.n_expected >= 0 && d->feed.n_expected <= EXPECTED);
    for (int k = 0; k < RINGS; k++)
        for (int i = 0; i < d->rings[k].n; i++) {
            const buffer *b = d->rings[k].buffers[i];

            MT_ASSERT(b->d == d && b->ring == k);
            MT_ASSERT(((READS | IS(WRITING)) >> b->at & 1) == (b->left > 0));
            MT_ASSERT((b->lay == NULL) == (b->at == FREE) || b->at == TAKEN);
            MT_ASSERT(b->lay == NULL || b->piece < b->lay->n);
        }
}

/* One in one of the states, with that piece; -1: any. */
static buffer *find(const mt_disk *d, int in, unsigned states, int unit, int piece)
{
    for (int i = 0; i < d->rings[in].n; i++) {
        buffer *b = d->rings[in].buffers[i];

        if ((states >> b->at & 1) && (unit < 0 || unit_of(b) == unit) &&
            (piece < 0 || b->piece == piece))
            return b;
    }
    return NULL;
}

/* Is a request for the piece under way that one for it has to wait for? */
static int is_under_way(const mt_disk *d, int unit, int piece, int write)
{
    for (int k = 0; k < RINGS; k++)
        if (find(d, k, IS(WRITING) | (write ? READS : 0), unit, piece) != NULL)
            return 1;
    return 0;
}

/* What was read of a unit (-1: of any), or is being read, is not used. before: only what was put
 * before that one; NULL: all. */
static void drop(mt_disk *d, int in, int unit, const buffer *before)
{
    for (int i = 0; i < d->rings[in].n; i++) {
        buffer *b = d->rings[in].buffers[i];

        if (((IS(READING) | IS(READY)) >> b->at & 1) && (unit < 0 || unit_of(b) == unit) &&
            (before == NULL || b->turn < before->turn))
            leave(b);
    }
}

static void read_ahead(mt_disk *d);

/* On a thread of the file's. */
static void request_over(mt_request *q)
{
    buffer  *b = q->arg;
    mt_disk *d = b->d;

    /* Before anybody is woken: they look for the fault. */
    tell_failure(d->store, b->lay, b->piece, q);
    MT_HOLD(&d->mu);
    d->failed |= q->st != MT_OK;
    *(q->write ? &d->stats.written_bytes : &d->stats.read_bytes) += q->moved;
    mt_timeline_over(d->cx->timeline, MT_LANE_DISK, q->write ? MT_WORK_WRITE : MT_WORK_READ,
                     b->lay->unit, b->begun_ns, q->moved, &d->recorded_ns);
    if (--b->left == 0) {
        mt_watch_end(mt_store_watch(d->store), &b->post, q->st);
        become(b, b->then);
        read_ahead(d);
        pthread_cond_broadcast(&d->changed);
    }
}

/* Of its layout's piece these sections, of which one at least has bytes; it is `then` when that is
 * over. */
static void put(buffer *b, const layout *l, int piece, unsigned sections, int write, state then)
{
    mt_disk *d = b->d;

    become(b, write ? WRITING : READING);
    b->then = then;
    b->lay = l;
    b->piece = piece;
    b->sections = sections;
    b->turn = ++d->rings[b->ring].turns;
    b->begun_ns = mt_now_ns();
    for (int k = 0; k < SECTIONS; k++)
        b->left += (sections >> k & 1) && l->pieces[piece].section[k].bytes > 0;
    MT_ASSERT(b->left > 0);
    mt_watch_begin(mt_store_watch(d->store), &b->post, "disk", mt_store_name(d->store, l->unit),
                   write ? words[b->ring].writes : words[b->ring].reads);
    for (int k = 0; k < SECTIONS; k++) {
        const section *n = &l->pieces[piece].section[k];

        b->r[k] = (mt_request){ .write = write, .at = l->pieces[piece].at + n->from,
                                .mem = (char *)b->memory.base + n->from, .bytes = n->bytes,
                                .sums = n->sums, .done = request_over, .arg = b };
        if ((sections >> k & 1) && b->r[k].bytes > 0)
            d->file->ops->put(d->file, &b->r[k]);
    }
}

/* ---- rings: without the lock ---------------------------------------------------------------- */

static void buffer_close(const mt_disk *d, buffer *b)
{
    if (b == NULL)
        return;
    d->cx->dev->ops->event_close(b->copied);
    mt_arena_close(&b->memory);
    free(b);
}

/* One buffer more; of fetches it is registered. */
static mt_status ring_add(mt_disk *d, int in, size_t bytes)
{
    mt_dev   *dev = in == FETCHES ? d->cx->dev : NULL;
    ring     *r = &d->rings[in];
    buffer   *b;
    mt_status st;

    MT_DO(MT_MAKE(b, 1, words[in].name));
    *b = (buffer){ .d = d, .ring = in };
    if (dev != NULL)
        MT_TRY(dev->ops->event_open(dev, &b->copied));
    MT_TRY(mt_arena_open(&b->memory, bytes, NULL, dev, words[in].name,
                         mt_store_bytes(d->store, MT_PLANE_COUNT)));
    MT_WITH(&d->mu)
        if ((st = MT_GROW(r->buffers, r->room, r->n + 1, words[in].name)) == MT_OK) {
            r->buffers[r->n++] = b;
            d->stats.buffer_bytes += b->memory.bytes;
        }
    if (st == MT_OK)
        return MT_OK;
fail:
    buffer_close(d, b);
    return st;
}

/* Nothing is read ahead into it any more; requests end first. */
static void ring_close(mt_disk *d, int in)
{
    ring r = { 0 };

    MT_WITH(&d->mu) {
        while (find(d, in, READS | IS(WRITING), -1, -1) != NULL)
            mt_cond_wait(&d->changed, &d->mu);
        r = d->rings[in];
        d->rings[in] = (ring){ 0 };
        for (int i = 0; i < r.n; i++)
            d->stats.buffer_bytes -= r.buffers[i]->memory.bytes;
    }
    for (int i = 0; i < r.n; i++)
        buffer_close(d, r.buffers[i]);
    free(r.buffers);
}

/* Under the lock. Buffers of fetches have room for the largest weights of a piece so far. */
static mt_status note_weights(mt_disk *d, const layout *l)
{
    if (l->most_weights > d->most_weights && d->fed)
        return MT_FAIL(MT_ESTATE, "unit %s: %zu bytes of weights in a piece, and fetches have "
                       "buffers of %zu; what is trained, and how its states are kept, may change "
                       "when its weights are on disk",
                       mt_store_name(d->store, l->unit), l->most_weights, d->most_weights);
    if (l->most_weights > d->most_weights)
        d->most_weights = l->most_weights;
    return MT_OK;
}

/* Behind the door of the unit, which is ours. */
static mt_status lay_out(mt_disk *d, int u, layout **out)
{
    layout *l MT_CLOSED(layout_free) = NULL;

    if ((*out = d->units[u].lay) != NULL)
        return MT_OK;
    MT_DO(layout_make(d->store, u, d->bytes, 1, &l));
    for (int i = 0; i < l->n; i++)
        MT_DO(d->file->ops->take(d->file, l->cut->piece[i].bytes, &l->pieces[i].at));
    MT_HOLD(&d->mu);
    MT_DO(note_weights(d, l));
    *out = d->units[u].lay = MT_KEEP(l);
    return MT_OK;
}

/* ---- reading ahead: under the lock --------------------------------------------------------- */

/* The first piece from one on that has states, or how many pieces there are. What has none is
 * rarely updated, and then read when it is asked for. */
static int with_states(const layout *l, int from)
{
    while (from < l->n && l->pieces[from].section[SECTION_STATES].bytes == 0)
        from++;
    return from;
}

/* As far as there are free buffers. A piece that is still in one, not yet updated or not yet
 * written, stops it, or it would be updated in one and written from the other; and so does one that
 * is read for nobody any more. The end of that calls again. */
static void ahead_of_updates(mt_disk *d)
{
    const layout *l;
    buffer       *b;

    while (d->next_unit >= 0 && !d->units[d->next_unit].held &&
           find(d, UPDATES, IN_USE, d->next_unit, d->next_piece) == NULL &&
           !is_under_way(d, d->next_unit, d->next_piece, 0) &&
           (b = find(d, UPDATES, IS(FREE), -1, -1)) != NULL) {
        l = d->units[d->next_unit].lay;
        put(b, l, d->next_piece, ALL_SECTIONS, 0, READY);
        if ((d->next_piece = with_states(l, d->next_piece + 1)) < l->n)
            continue;
        d->next_unit = d->units[d->next_unit].next;
        l = d->units[d->next_unit].lay;
        d->next_piece = l != NULL ? with_states(l, 0) : 0;
        /* One that was never updated has nothing that could be read. */
        if (l == NULL || d->next_piece == l->n)
            d->next_unit = -1;
    }
}

/* A buffer for a piece of the unit: an empty one, or one whose weights nobody expects any more.
 * What the unit that is fetched now needs comes before what others will. */
static buffer *find_room(const mt_disk *d, int unit)
{
    const feed *f = &d->feed;
    const ring *r = &d->rings[FETCHES];
    buffer     *k = find(d, FETCHES, IS(FREE), -1, -1);

    for (int i = 0; k == NULL && i < r->n; i++) {
        buffer *b = r->buffers[i];
        int     e = unit == f->unit ? f->n_expected : 0;     /* to it all others give way */

        if (b->at != READY || unit_of(b) == f->unit)
            continue;
        while (e < f->n_expected && f->expected[e] != unit_of(b))
            e++;
        k = e == f->n_expected ? b : NULL;
    }
    return k;
}

/* The unit's pieces from one on, as far as there is room. 0: what comes behind them has to wait.
 * FED: of a unit whose update is announced nothing is read ahead. Once its fetch has begun, the
 * update waits for that. A piece that is still being written stops it (WRITTEN), and so does a unit
 * that is written from outside (PUSHED); the end of either calls again. */
static int read_unit(mt_disk *d, int unit, int from)
{
    const disk_unit *u = &d->units[unit];
    buffer          *room;

    if (!(unit == d->feed.unit && d->feed.begun) && mt_ledger_updates_due(d->store, unit))
        return 0;
    for (int i = from; u->lay != NULL && i < u->lay->n; i++) {
        if (u->lay->cut->piece[i].hi_bytes == 0 ||
            find(d, FETCHES, IS(READING) | IS(READY), unit, i) != NULL)
            continue;
        if (find(d, FETCHES, IS(DROPPED), unit, i) != NULL || u->held ||
            is_under_way(d, unit, i, 0) || (room = find_room(d, unit)) == NULL)
            return 0;
        if (room->at == READY)
            become(room, FREE);
        put(room, u->lay, i, 1u << SECTION_WEIGHTS, 0, READY);
    }
    return 1;
}

/* What was looked at may be otherwise now: a buffer, or a piece, has come free. */
static void read_ahead(mt_disk *d)
{
    const feed *f = &d->feed;
    int         go = 1;

    assert_state(d);
    if (d->failed)
        return;
    if (f->unit >= 0)
        go = read_unit(d, f->unit, f->piece);
    for (int i = 0; go && i < f->n_expected; i++)
        if (f->expected[i] != f->unit)
            go = read_unit(d, f->expected[i], 0);
    ahead_of_updates(d);
}

/* ---- an update: our thread ---------------------------------------------------------------- */

/* Is the piece in a buffer, which is ours then (*out)? Or has the disk failed? */
static int is_taken(mt_disk *d, int unit, int piece, buffer **out)
{
    if (d->failed)
        return 1;
    if ((*out = find(d, UPDATES, IS(READY), unit, piece)) != NULL) {
        drop(d, UPDATES, -1, *out);                 /* read before it: passed over */
        become(*out, TAKEN);
        return 1;
    }
    /* Nobody reads it: another was thought to be next, or all buffers have pieces that this one
     * came instead of. Either way what was read ahead gives way, or none would ever be free. */
    if (find(d, UPDATES, IN_USE, unit, piece) == NULL) {
        drop(d, UPDATES, -1, NULL);
        d->next_unit = unit;
        d->next_piece = piece;
    }
    read_ahead(d);
    return 0;
}

/* Waits until the piece is in a buffer, *out, which is then ours; NULL before. */
static mt_status take_piece(mt_disk *d, int u, int number, buffer **out)
{
    uint64_t   begun = mt_now_ns();
    mt_span    span;
    mt_status  st;

    mt_timeline_begin(d->cx->timeline, &span, MT_LANE_DISK_UPDATE, MT_WORK_WAIT, u, NULL);
    st = UNTIL(d, is_taken(d, u, number, out), u, "a piece to update (READ)");
    mt_timeline_end(d->cx->timeline, &span, 0, NULL);
    MT_WITH(&d->mu) d->stats.wait_ns += mt_now_ns() - begun;
    return *out != NULL ? MT_OK : st != MT_OK ? st : mt_ledger_check(d->store);
}

static mt_status compute(mt_disk *d, const mt_update *b, const mt_part *parts, int n,
                         uint64_t bytes)
{
    mt_watch *watch = mt_store_watch(d->store);
    uint64_t  begun = mt_now_ns();
    mt_span   span;
    mt_post   post;
    mt_status st;

    mt_timeline_begin(d->cx->timeline, &span, MT_LANE_DISK_UPDATE, MT_WORK_UPDATE, b->j.unit, NULL);
    mt_watch_begin(watch, &post, NULL, mt_store_name(d->store, b->j.unit),
                   "the pool, which computes its update");
    st = b->j.pieces(b->j.arg, d->pool, parts, n, b->clip);
    mt_watch_end(watch, &post, st);
    mt_timeline_end(d->cx->timeline, &span, bytes, NULL);
    MT_WITH(&d->mu) d->stats.busy_ns += mt_now_ns() - begun;
    return st;
}

/* -1: none. */
static int last_wanted(const layout *l, const mt_update_job *j)
{
    int i = l->n - 1;

    while (i >= 0 && !has_any(l, i, j->params, j->n_params))
        i--;
    return i;
}

static mt_status update_pieces(mt_disk *d, const layout *l, const mt_update *b, mt_part *parts)
{
    int       last = last_wanted(l, &b->j);
    mt_status st = MT_OK;

    for (int i = 0; i <= last && st == MT_OK; i++) {
        buffer *f = NULL;

        if (!has_any(l, i, b->j.params, b->j.n_params))
            continue;
        MT_DO(take_piece(d, b->j.unit, i, &f));
        mt_pieces_at(l->cut, i, f->memory.base, parts);
        /* The record of the last piece has the unit's bytes. */
        st = compute(d, b, parts, l->cut->piece[i].n, i == last ? b->j.bytes : 0);
        MT_HOLD(&d->mu);                  /* the buffer goes to the disk; or nowhere, and is free */
        if (st == MT_OK)
            put(f, l, i, ALL_SECTIONS, 1, FREE);
        else
            become(f, FREE);
        read_ahead(d);
    }
    return st;
}

/* Behind the door. Its layout, its place in the order, and then FED. */
static mt_status begin_update(mt_disk *d, const mt_update_job *j, layout **l)
{
    const unsigned ahead_of_us = 1u << MT_MIRROR_AHEAD | 1u << MT_MIRROR_TORN;

    MT_DO(lay_out(d, j->unit, l));
    if (mt_mirror_any(d->store, j->unit, -1, ~0u, ahead_of_us))
        return MT_FAIL(MT_ESTATE, "unit %s: its weights were written on the host, and the file "
                       "does not have them; push them first", mt_store_name(d->store, j->unit));
    /* Its copies are stale from here on. Memory of states is given back. Weights that were brought
     * may be in somebody's graph, which wants them as they were: see mt_mirror_forget. */
    for (int i = 0; i < j->n_params; i++)
        mt_mirror_tell(d->store, j->unit, j->params[i], (*l)->planes[j->params[i]],
                       MT_MIRROR_CHANGED);
    mt_mirror_drop(d->store, j->unit, MT_STATE_PLANES);
    mt_lock(&d->mu);
    if (d->before >= 0)
        d->units[d->before].next = j->unit;
    d->before = j->unit;
    drop(d, FETCHES, j->unit, NULL);
    drop(d, COPIES, j->unit, NULL);
    mt_unlock(&d->mu);
    return UNTIL(d, find(d, FETCHES, READS, j->unit, -1) == NULL &&
                    find(d, COPIES, READS, j->unit, -1) == NULL, j->unit,
                          "reads of its weights ahead of a fetch (FED)");
}

static mt_status update(mt_disk *d, const mt_update *b)
{
    mt_part   *parts MT_FREED = NULL;
    layout    *l;
    uint64_t   bytes;
    mt_status  st;

    MT_DO(mt_ledger_check(d->store));
    /* WEIGHTS: they are overwritten. */
    MT_DO(mt_ledger_wait_fetch(d->store, b->j.unit));
    MT_DO(mt_mirror_enter(d->store, b->j.unit));
    st = begin_update(d, &b->j, &l);
    mt_mirror_leave(d->store, b->j.unit);
    MT_DO(st);
    MT_DO(MT_MAKE(parts, l->cut->most, mt_store_name(d->store, b->j.unit)));
    MT_DO(update_pieces(d, l, b, parts));
    /* Parameters that came after the unit's layout was made have all states in memory. Where there
     * is nothing else the first one's record has the unit's bytes. */
    bytes = last_wanted(l, &b->j) < 0 ? b->j.bytes : 0;
    for (int i = 0; i < b->j.n_params; i++) {
        mt_part own = { .param = b->j.params[i] };

        own.n = mt_store_owned(d->store, b->j.unit, own.param, &own.from);
        if (l->planes[own.param] != 0 || own.n == 0)
            continue;
        MT_DO(compute(d, b, &own, 1, bytes));
        bytes = 0;
    }
    return MT_OK;
}

static mt_status carry_out(void *arg, mt_job *node)
{
    mt_disk   *d = arg;
    mt_update *b = (mt_update *)(void *)node;
    mt_status  st;

    mt_unlock(&d->mu);
    st = update(d, b);
    mt_update_over(d->store, b, st);
    mt_lock(&d->mu);
    return st;
}

/* ---- the home: updates -------------------------------------------------------------------- */

static mt_status home_update(void *arg, mt_update *u)
{
    mt_disk *d = arg;

    (void)MT_LOCKED(&d->mu, mt_worker_submit(&d->worker, &u->node));
    return MT_OK;
}

static mt_status home_drain(void *arg)
{
    mt_disk  *d = arg;
    mt_status st = mt_worker_wait(&d->worker, mt_store_watch(d->store), MT_WORKER_ALL, NULL,
                                  "updates from disk");

    return st == MT_OK ? mt_ledger_check(d->store) : st;
}

/* ---- copies on the host: who is behind the unit's door --------------------------------------
 * One section after the other, in a buffer that is ours until the last. It waits for requests for
 * the same piece, and for nobody's else. What a buffer has at the end stays there, since parameters
 * that are pushed one after the other often share a piece; an update of the unit drops it. */

typedef struct visit {
    mt_disk      *d;
    const layout *l;
    mt_part      *parts;                 /* [most in a piece] */
    buffer       *k;                     /* ours; NULL: none yet */
    int           piece, section;
} visit;

/* The buffer that the last one left of this unit; or one that is free; or another's, which goes
 * then; or a new one. */
static mt_status take_buffer(visit *v)
{
    mt_disk *d = v->d;

    while (v->k == NULL) {
        MT_WITH(&d->mu) {
            if ((v->k = find(d, COPIES, IS(READY), v->l->unit, -1)) == NULL &&
                (v->k = find(d, COPIES, IS(FREE), -1, -1)) == NULL)
                v->k = find(d, COPIES, IS(READY), -1, -1);
            if (v->k != NULL)
                become(v->k, TAKEN);
        }
        if (v->k == NULL)
            MT_DO(ring_add(d, COPIES, d->bytes));
    }
    return MT_OK;
}

/* No update of the unit is under way, but its writes may be: a read waits for those of the piece,
 * a write for reads too, also for those that nobody wants any more. */
static int is_put(visit *v, int write)
{
    if (is_under_way(v->d, v->l->unit, v->piece, write))
        return 0;
    put(v->k, v->l, v->piece, 1u << v->section, write, TAKEN);
    return 1;
}

static mt_status move(visit *v, int write)
{
    MT_DO(UNTIL(v->d, is_put(v, write), v->l->unit, "requests for the same piece"));
    MT_DO(UNTIL(v->d, v->k->at == TAKEN, v->l->unit, "a piece, for who reads or writes it here"));
    return mt_ledger_check(v->d->store);
}

static int is_loading(const visit *v, int param, unsigned planes)
{
    return mt_mirror_any(v->d->store, v->l->unit, param, planes, 1u << MT_MIRROR_LOADING);
}

/* Between the buffer, which has the section, and host planes. param -1: of all parameters. */
static mt_status copy(visit *v, int param, unsigned planes, int write)
{
    mt_pieces_at(v->l->cut, v->piece, v->k->memory.base, v->parts);
    for (int i = 0; i < v->l->cut->piece[v->piece].n; i++)
        for (int p = 0; p < MT_PLANE_COUNT; p++) {
            const mt_part *k = &v->parts[i];
            void          *host;
            size_t         bytes;

            if (!(planes >> p & 1) || k->at[p] == NULL || (param >= 0 && k->param != param) ||
                (!write && !is_loading(v, k->param, 1u << p)))
                continue;
            MT_DO(mt_part_host(v->d->store, v->l->unit, k, (mt_plane)p, &host, &bytes));
            memcpy(write ? k->at[p] : host, write ? host : k->at[p], bytes);
        }
    return MT_OK;
}

/* Has the piece something of the parameter, or of what is loading? */
static int concerns(const visit *v, int param, unsigned planes, int write)
{
    const mt_piece *c = &v->l->cut->piece[v->piece];

    if (write)
        return param < 0 || has_any(v->l, v->piece, &param, 1);
    for (int i = c->first; i < c->first + c->n; i++)
        if (is_loading(v, v->l->cut->part[i].param, planes))
            return 1;
    return 0;
}

/* param -1: all of the unit's. What else is in a section that is written stays; where all of it is,
 * it is not read first. */
static mt_status visit_all(mt_disk *d, const layout *l, int param, unsigned planes, int write)
{
    visit     v = { .d = d, .l = l };
    mt_status st = MT_OK;

    MT_DO(MT_MAKE(v.parts, l->cut->most, mt_store_name(d->store, l->unit)));
    planes &= param < 0 ? planes : l->planes[param];
    for (; v.piece < l->n && planes != 0; v.piece++)
        for (v.section = 0; v.section < SECTIONS; v.section++) {
            unsigned of = planes & (v.section == SECTION_WEIGHTS ? HI : ~HI);
            int      all = write && param < 0 && v.section == SECTION_WEIGHTS;

            if (of == 0 || l->pieces[v.piece].section[v.section].bytes == 0 ||
                !concerns(&v, param, of, write))
                continue;
            MT_TRY(take_buffer(&v));
            if (!all && !(v.k->lay == l && v.k->piece == v.piece &&
                          v.k->sections == 1u << v.section))
                MT_TRY(move(&v, 0));
            MT_TRY(copy(&v, param, of, write));
            if (write)
                MT_TRY(move(&v, 1));
        }
fail:
    if (v.k != NULL) {
        MT_HOLD(&d->mu);
        if (st == MT_OK)
            become(v.k, READY);
        else                             /* it has what the file has not, or is still under way */
            leave(v.k);
    }
    free(v.parts);
    return st;
}

static mt_status home_load(void *arg, int u, unsigned planes)
{
    mt_disk *d = arg;
    layout  *l;

    MT_DO(lay_out(d, u, &l));
    return visit_all(d, l, -1, planes, 0);
}

/* PUSHED: nobody reads ahead of the unit while it is held. */
static mt_status home_store(void *arg, int u, int param, unsigned planes)
{
    mt_disk  *d = arg;
    layout   *l;
    mt_status st;

    MT_WITH(&d->mu) {
        d->units[u].held = 1;
        drop(d, UPDATES, u, NULL);
        drop(d, FETCHES, u, NULL);
    }
    if ((st = lay_out(d, u, &l)) == MT_OK)
        st = visit_all(d, l, param, planes, 1);
    MT_HOLD(&d->mu);
    d->units[u].held = 0;
    read_ahead(d);
    return st;
}

#define IS_ON_DISK                                                                                \
    .from = &mt_home_ram, .load = home_load, .store = home_store, .by = MT_BY_PIECES,             \
    .update = home_update, .turn = 1, .drain = home_drain

const mt_home mt_home_disk = {
    .lives = "has its states on disk", .away = MT_STATE_PLANES, .fresh = MT_STATE_PLANES,
    .registered = HI | 1u << MT_PLANE_GRAD, IS_ON_DISK,
};

const mt_home mt_home_disk_weights = {
    .lives = "has its weights and states on disk", .away = MT_STATE_PLANES | HI, .fed = 1,
    .fresh = MT_STATE_PLANES, .registered = 1u << MT_PLANE_GRAD, IS_ON_DISK,
};

/* ---- a fetch: the mover ------------------------------------------------------------------- */

/* Under the lock. Buffers whose copies are over (COPIED) are read into again. */
static mt_status reclaim(mt_disk *d)
{
    for (int i = 0; i < d->rings[FETCHES].n; i++) {
        buffer *k = d->rings[FETCHES].buffers[i];
        int     done = 0;

        if (k->at == COPYING)
            MT_DO(d->cx->dev->ops->query(k->copied, &done));
        if (done)
            become(k, FREE);
    }
    read_ahead(d);
    return MT_OK;
}

void mt_feed_expect(mt_disk *d, const int *units, int n)
{
    feed *f = &d->feed;

    MT_HOLD(&d->mu);
    f->n_expected = 0;
    for (int i = 0; i < n && f->n_expected < EXPECTED; i++)
        if (mt_store_home(d->store, units[i], NULL)->fed)
            f->expected[f->n_expected++] = units[i];
    (void)reclaim(d);                    /* a device that fails fails the mover's calls too */
}

/* The next piece is in a buffer (*out), which is the mover's then; or none is free, and one is
 * being copied (*copying) that is to be waited for; or something failed. */
static int is_loaded(mt_disk *d, buffer **out, buffer **copying, mt_status *st)
{
    feed *f = &d->feed;

    if (d->failed || (*st = reclaim(d)) != MT_OK)
        return 1;
    if ((*out = find(d, FETCHES, IS(READY), f->unit, f->piece)) != NULL) {
        become(*out, TAKEN);
        f->piece++;
        return 1;
    }
    if (find(d, FETCHES, READS, f->unit, f->piece) == NULL && find_room(d, f->unit) == NULL)
        *copying = find(d, FETCHES, IS(COPYING), -1, -1);
    return *copying != NULL;
}

/* Until the next piece is in a buffer, which is then the mover's. */
static mt_status take_load(mt_disk *d, buffer **out)
{
    buffer   *copying;
    mt_status looked = MT_OK;

    for (*out = NULL; *out == NULL;) {
        copying = NULL;
        MT_DO(UNTIL(d, is_loaded(d, out, &copying, &looked), d->feed.unit,
                    "its weights from disk (READ)"));
        MT_DO(looked);
        if (copying != NULL) {
            MT_DO(mt_watch_event(mt_store_watch(d->store), copying->copied,
                                 mt_store_name(d->store, d->feed.unit),
                                 "a copy of weights out of a buffer (COPIED)"));
            MT_HOLD(&d->mu);             /* somebody may have seen the same, and read into it */
            if (copying->at == COPYING)
                become(copying, FREE);
        } else if (*out == NULL)
            MT_DO(mt_ledger_check(d->store));    /* the disk failed */
    }
    return MT_OK;
}

/* unit -1: none. Yields its layout; NULL: nothing of it was asked for yet. */
static const layout *aim(mt_disk *d, int unit, int begun)
{
    const layout *l;

    MT_HOLD(&d->mu);
    l = unit >= 0 && unit < d->n_units ? d->units[unit].lay : NULL;
    d->feed.unit = l != NULL ? unit : -1;
    d->feed.piece = 0;
    d->feed.begun = begun;
    read_ahead(d);
    return l;
}

void mt_feed_next(mt_disk *d, int unit)
{
    (void)aim(d, unit, 0);
}

mt_status mt_feed_copy(mt_disk *d, int unit, void *mem, mt_queue *h2d)
{
    const layout *l = aim(d, unit, 1);
    buffer       *k;
    mt_span       span;
    mt_status     st = MT_OK;

    if (l == NULL)
        return MT_FAIL(MT_ESTATE, "unit %s: its weights were never written to disk; push them "
                       "first", mt_store_name(d->store, unit));
    for (int i = 0; i < l->n && (st = take_load(d, &k)) == MT_OK; i++) {
        size_t bytes = l->cut->piece[i].hi_bytes;

        mt_timeline_begin(d->cx->timeline, &span, MT_LANE_H2D, MT_WORK_FETCH, unit, h2d);
        st = h2d->dev->ops->copy(h2d, (char *)mem + l->pieces[i].hi_at, k->memory.base, bytes);
        mt_timeline_end(d->cx->timeline, &span, bytes, h2d);
        if (st == MT_OK)                 /* from here on the buffer's event is that of this copy */
            st = h2d->dev->ops->record(h2d, k->copied);
        MT_WITH(&d->mu) become(k, COPYING);
        if (st != MT_OK)
            break;
    }
    (void)aim(d, -1, 0);
    return st;
}

mt_status mt_feed_open(mt_disk *d, size_t bytes)
{
    size_t    each = MT_BLOCK_ALIGN, n;
    mt_status st;

    MT_WITH(&d->mu) {
        d->fed = 1;
        each = d->most_weights > 0 ? d->most_weights : each;
    }
    n = bytes / each;
    n = n < FEED_LEAST ? FEED_LEAST : n > FEED_MOST ? FEED_MOST : n;
    for (size_t i = 0; i < n; i++)
        MT_TRY(ring_add(d, FETCHES, each));
    d->cx->feed = d;
    return MT_OK;

fail:
    mt_feed_close(d);
    return st;
}

/* Reads that are under way end first; the queue's copies are over, since the mover's queue was
 * closed. */
void mt_feed_close(mt_disk *d)
{
    if (d == NULL)
        return;
    if (d->cx->feed == d)
        d->cx->feed = NULL;
    MT_WITH(&d->mu) d->feed = (feed){ .unit = -1 };
    ring_close(d, FETCHES);
    MT_WITH(&d->mu) d->fed = 0;
}

/* ---- open and close ------------------------------------------------------------------------ */

MT_CLOSER(mt_disk_close, mt_disk)

mt_status mt_disk_open(mt_context *cx, mt_blocks *file, mt_pool *pool, int n_buffers, size_t bytes,
                       mt_disk **out)
{
    mt_disk  *d MT_CLOSED(mt_disk_close) = NULL;

    if (n_buffers < 1 || bytes < MT_DISK_LEAST || bytes % MT_BLOCK_ALIGN != 0)
        return MT_FAIL(MT_EINVAL, "disk: %d buffers of %zu bytes; one of %zu is the least, in "
                       "steps of %zu", n_buffers, bytes, MT_DISK_LEAST, MT_BLOCK_ALIGN);
    MT_DO(MT_MAKE(d, 1, "disk"));
    *d = (mt_disk){ .cx = cx, .store = cx->store, .file = file, .pool = pool, .bytes = bytes,
                    .next_unit = -1, .before = -1, .first_added = -1, .last_added = -1,
                    .feed = { .unit = -1 } };
    mt_mutex_open(&d->mu, MT_RANK_DISK);
    MT_DO(mt_watch_cond(&d->changed));
    for (int i = 0; i < n_buffers; i++)
        MT_DO(ring_add(d, UPDATES, bytes));
    MT_DO(ring_add(d, COPIES, bytes));
    MT_DO(mt_worker_open(&d->worker, &d->mu, 1, "mt-disk-update", "disk update", carry_out, d));
    *out = cx->disk = MT_KEEP(d);
    return MT_OK;
}

void mt_disk_close(mt_disk *d)
{
    if (d == NULL)
        return;
    if (d->cx->disk == d)
        d->cx->disk = NULL;
    mt_worker_close(&d->worker);
    for (int i = 0; i < d->n_units; i++)
        if (d->units[i].on)
            mt_mirror_close(d->store, i);        /* another rank may be served out of copies */
    MT_WITH(&d->mu) d->next_unit = -1;           /* nothing is read ahead any more */
    ring_close(d, COPIES);
    ring_close(d, UPDATES);
    for (int i = 0; i < d->n_units; i++)
        layout_free(d->units[i].lay);
    pthread_cond_destroy(&d->changed);
    mt_mutex_close(&d->mu);
    free(d->units);
    free(d);
}

mt_status mt_disk_add(mt_disk *d, int u, int weights)
{
    layout   *l MT_CLOSED(layout_free) = NULL;
    mt_status st;

    if (u < 0 || u >= mt_store_units(d->store))
        return MT_FAIL(MT_EINVAL, "there is no unit %d; the store has %d", u,
                       mt_store_units(d->store));
    if (weights && d->cx->share != NULL && mt_share_is_apart(d->cx->share))
        return MT_FAIL(MT_ENOTSUP, "unit %s: weights of several machines are not on disk",
                       mt_store_name(d->store, u));
    MT_DO(MT_GROW(d->units, d->n_units, u + 1, "disk"));
    if (d->units[u].on)
        return MT_OK;
    MT_DO(mt_store_move(d->store, u, weights ? &mt_home_disk_weights : &mt_home_disk, d));
    /* What its planes would take, as they would be now. */
    if ((st = layout_make(d->store, u, d->bytes, 0, &l)) == MT_OK &&
        (st = MT_LOCKED(&d->mu, note_weights(d, l))) == MT_OK)
        MT_WITH(&d->mu) d->stats.need_bytes += l->bytes;
    if (st != MT_OK) {
        (void)mt_store_move(d->store, u, &mt_home_ram, NULL);
        return st;
    }
    d->units[u].on = 1;
    if (d->last_added >= 0)              /* until the first step says better */
        d->units[d->last_added].next = u;
    d->first_added = d->first_added < 0 ? u : d->first_added;
    d->units[u].next = d->first_added;
    d->last_added = u;
    return st;
}

mt_disk_stats mt_disk_stats_get(mt_disk *d)
{
    return MT_LOCKED(&d->mu, d->stats);
}
