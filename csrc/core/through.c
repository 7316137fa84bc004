/* through.c — updates of units that live on the host, made on the device: states up, states down.
 *
 * The host's cores and their memory have one rate, the bus and the device another, and both can
 * work at once. A unit that goes *through* has its planes copied up in pieces (pieces.h), updated
 * by a kernel, and copied back, while the updater and the pool are at other units. One thread cuts
 * updates into parts and fills the queues of a few buffers on the device in turn: one goes up while
 * another comes down.
 *
 * A buffer's queue is the only order there is; parts of one update do not depend on each other. Our
 * thread waits in the ledger for copies that read the unit's weights before the first piece comes
 * down, and ends the unit's update when the last one is down. Two units are on their way at once:
 * while the last pieces of one come down, the first of the next go up. So each buffer has two
 * events, for units of even and of odd number.
 *
 * Threads: update, stepped of the home: the updater. The job's functions run on our thread.
 */
#include "home.h"
#include "timeline.h"

#include <inttypes.h>
#include <stdlib.h>

#define GRAIN 256            /* elements: parts begin at multiples */
#define PARTS 32             /* in a buffer, at most */
#define GRADS (1u << MT_PLANE_GRAD | 1u << MT_PLANE_ACC)

typedef struct buffer {
    mt_queue *q;
    void     *mem;               /* our thread; NULL before the first job */
    mt_event *over[2];           /* recorded on q behind a unit's last piece there */
} buffer;

struct mt_through {
    mt_context      *cx;
    mt_dev          *dev;
    mt_store        *store;
    buffer          *buffers;    /* [n_buffers] */
    int              n_buffers;
    size_t           bytes;      /* of each */
    uint64_t         turn;       /* pieces put so far. These three: our thread */
    mt_update       *before;     /* its last pieces may be coming down; NULL: none */
    mt_span          span;       /* the record that is open */

    mt_mutex         mu;
    mt_worker        worker;     /* a job ends when its unit is down, or the next one is put */
    mt_through_stats stats;      /* mu */
};

/* Under mu, at each door: a unit is on its way still only where another follows. */
static void assert_state(const mt_through *t)
{
    MT_ASSERT(mt_holds(&t->mu));
    MT_ASSERT(t->worker.ended <= t->worker.submitted);
    MT_ASSERT(t->before == NULL || t->worker.ended < t->worker.submitted);
    MT_ASSERT(t->stats.device_bytes <= t->bytes * (size_t)t->n_buffers);
}

/* ---- one unit: our thread --------------------------------------------------------------- */

/* up: to the device; else what is to come back, which is all but gradients. grad: by parameter,
 * where in host memory it is. */
static mt_status copy_parts(mt_through *t, mt_queue *q, const mt_update *b, const void *const *grad,
                            const mt_part *parts, int n, int up)
{
    int      unit = b->j.unit;
    uint64_t copied = 0;

    for (int i = 0; i < n; i++) {
        const mt_part *k = &parts[i];
        mt_plane       p = k->at[MT_PLANE_ACC] != NULL ? MT_PLANE_ACC : MT_PLANE_GRAD;
        size_t         bytes = mt_store_plane_bytes(t->store, unit, k->param, p, k->n);

        MT_DO(mt_part_copy(t->store, unit, k, ~GRADS, q, up, &copied));
        if (!up)
            continue;
        /* The gradient is not the plane's own where the user has changed it. */
        MT_DO(t->dev->ops->copy(q, k->at[p], (const char *)grad[k->param] +
                                mt_store_plane_bytes(t->store, unit, k->param, p, k->from), bytes));
        copied += bytes;
    }
    MT_HOLD(&t->mu);
    *(up ? &t->stats.h2d_bytes : &t->stats.d2h_bytes) += copied;
    return MT_OK;
}

static mt_status put_unit(mt_through *t, const mt_update *b)
{
    int          n = mt_store_params(t->store, b->j.unit);
    unsigned    *planes MT_FREED = NULL;     /* [n] what goes up */
    const void **grad MT_FREED = NULL;       /* [n] */
    mt_pieces   *pieces MT_CLOSED(mt_pieces_free) = NULL;
    mt_part      parts[PARTS];
    mt_plane     plane;

    MT_DO(mt_ledger_check(t->store));
    /* The unit's weights are overwritten: copies that read them must be over. */
    MT_DO(mt_ledger_wait_fetch(t->store, b->j.unit));
    for (int i = 0; i < t->n_buffers; i++)       /* with the first job */
        if (t->buffers[i].mem == NULL) {
            MT_DO(t->dev->ops->mem_alloc(t->dev, t->bytes, &t->buffers[i].mem));
            MT_WITH(&t->mu) t->stats.device_bytes += t->bytes;
        }
    MT_DO(MT_MAKE(planes, n, mt_store_name(t->store, b->j.unit)));
    MT_DO(MT_MAKE(grad, n, mt_store_name(t->store, b->j.unit)));
    for (int i = 0; i < b->j.n_params; i++) {
        int param = b->j.params[i];

        MT_DO(b->j.gradient(b->j.arg, param, &grad[param], &plane));
        planes[param] = 1u << MT_PLANE_HI | 1u << plane | MT_STATE_PLANES;
    }
    MT_DO(mt_pieces_cut(t->store, b->j.unit, &(mt_cut){ planes, t->bytes, MT_PART_ALIGN, GRAIN,
                                                        PARTS, MT_PART_ALIGN }, &pieces));
    for (int i = 0; i < pieces->n; i++) {
        buffer *f = &t->buffers[t->turn++ % (uint64_t)t->n_buffers];

        mt_pieces_at(pieces, i, f->mem, parts);
        n = pieces->piece[i].n;
        MT_DO(copy_parts(t, f->q, b, grad, parts, n, 1));
        MT_DO(b->j.compute(b->j.arg, f->q, parts, n, b->clip));
        MT_DO(copy_parts(t, f->q, b, grad, parts, n, 0));
    }
    for (int i = 0; i < t->n_buffers; i++)
        MT_DO(t->dev->ops->record(t->buffers[i].q, t->buffers[i].over[b->number % 2]));
    return MT_OK;
}

/* Waits until nothing of the unit is on its way, and ends its record and its update. */
static mt_status finish(mt_through *t, mt_update *b)
{
    mt_watch *watch = mt_store_watch(t->store);
    mt_post   post;
    mt_status st = b->st;

    mt_watch_begin(watch, &post, NULL, mt_store_name(t->store, b->j.unit),
                   "its pieces to come down");
    for (int i = 0; i < t->n_buffers; i++) {
        mt_status one = b->st == MT_OK
            ? t->dev->ops->sync_event(t->buffers[i].over[b->number % 2])
            : t->dev->ops->sync(t->buffers[i].q);        /* some pieces may be under way */

        if (st == MT_OK)
            st = one;
    }
    mt_watch_end(watch, &post, st);
    mt_timeline_end(t->cx->timeline, &t->span, b->j.bytes, NULL);
    mt_update_over(t->store, b, st);
    return st;
}

static void begin_record(mt_through *t, const mt_update *b)
{
    mt_timeline_begin(t->cx->timeline, &t->span, MT_LANE_THROUGH, MT_WORK_UPDATE, b->j.unit, NULL);
}

/* Of the two units on their way the older one's record is open: a unit that follows is put while
 * the one before it comes down. That one is finished then, the last one when nobody follows. */
static mt_status pass(void *arg, mt_job *node)
{
    mt_through *t = arg;
    mt_update  *now = (mt_update *)(void *)node, *before = t->before;
    mt_status   st = MT_OK;

    assert_state(t);
    MT_ASSERT(before == NULL || before->number + 1 == now->number);
    mt_unlock(&t->mu);
    if (before == NULL)
        begin_record(t, now);
    if ((now->st = put_unit(t, now)) != MT_OK)
        mt_ledger_fault(t->store, now->st, mt_last_error());
    if (before != NULL) {
        st = finish(t, before);
        begin_record(t, now);
    }
    mt_lock(&t->mu);
    t->before = t->worker.first != NULL ? now : NULL;
    if (t->before == NULL) {
        mt_unlock(&t->mu);
        st = finish(t, now);
        mt_lock(&t->mu);
    }
    return st;
}

/* ---- open and close --------------------------------------------------------------------- */

MT_CLOSER(mt_through_close, mt_through)

mt_status mt_through_open(mt_context *cx, int n_buffers, size_t bytes, mt_through **out)
{
    mt_through *t MT_CLOSED(mt_through_close) = NULL;

    if (n_buffers < 1 || bytes < MT_THROUGH_LEAST)
        return MT_FAIL(MT_EINVAL, "through: %d buffers of %zu bytes; one of %d is the least",
                       n_buffers, bytes, MT_THROUGH_LEAST);
    MT_DO(MT_MAKE(t, 1, "through"));
    *t = (mt_through){ .cx = cx, .dev = cx->dev, .store = cx->store, .bytes = bytes };
    mt_mutex_open(&t->mu, MT_RANK_THROUGH);
    MT_DO(MT_MAKE(t->buffers, n_buffers, "through"));
    t->n_buffers = n_buffers;
    for (buffer *f = t->buffers; f < t->buffers + n_buffers; f++) {
        MT_DO(t->dev->ops->queue_open(t->dev, "through", &f->q));
        MT_DO(t->dev->ops->event_open(t->dev, &f->over[0]));
        MT_DO(t->dev->ops->event_open(t->dev, &f->over[1]));
    }
    MT_DO(mt_worker_open(&t->worker, &t->mu, 1, "mt-through", "through", pass, t));
    *out = cx->through = MT_KEEP(t);
    return MT_OK;
}

void mt_through_close(mt_through *t)
{
    if (t == NULL)
        return;
    if (t->cx->through == t)
        t->cx->through = NULL;
    mt_worker_close(&t->worker);
    for (int i = 0; i < t->n_buffers; i++) {
        t->dev->ops->queue_close(t->buffers[i].q);
        t->dev->ops->event_close(t->buffers[i].over[0]);
        t->dev->ops->event_close(t->buffers[i].over[1]);
        t->dev->ops->mem_free(t->dev, t->buffers[i].mem);
    }
    mt_mutex_close(&t->mu);
    free(t->buffers);
    free(t);
}

mt_through_stats mt_through_stats_get(mt_through *t)
{
    return MT_LOCKED(&t->mu, (assert_state(t), t->stats));
}

/* ---- the home: the updater ---------------------------------------------------------------- */

static mt_status home_update(void *arg, mt_update *u)
{
    mt_through *t = arg;

    MT_HOLD(&t->mu);
    u->number = mt_worker_submit(&t->worker, &u->node);
    assert_state(t);
    return MT_OK;
}

static mt_status home_stepped(void *arg)
{
    mt_through *t = arg;
    mt_status   st = mt_worker_wait(&t->worker, mt_store_watch(t->store), MT_WORKER_ALL, NULL,
                                    "updates that go through the device");

    return st == MT_OK ? mt_ledger_check(t->store) : st;
}

const mt_home mt_home_through = {
    .lives = "goes through the device to be updated", .from = &mt_home_ram, .registered = ~0u,
    .by = MT_BY_COMPUTE, .update = home_update, .turn = 1, .stepped = home_stepped,
};
