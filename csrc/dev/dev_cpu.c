/* dev_cpu.c — the device that is this processor: a queue is a thread.
 *
 * Nouns, as in dev.h:
 *   memory   plain memory
 *   line     the operations of one queue, numbered; `done` of them are over, in order
 *   queue    a line and the thread that works it off; or, adopted, the caller's own thread
 *   event    a line and a number on it: the event has happened once that many are done
 *   stamp    a call in the line that writes down the time
 *
 * So record() puts nothing in the queue: it notes where the line ends now. wait() copies the note
 * when it is called, and a later record(), on this queue or another, cannot disturb it. (One
 * counter per event would not do: an event recorded in a slow queue and then in a fast one would
 * be over for waits on the slow one as soon as the fast one was.)
 *
 * Threads: an event's note is under the event's lock, a line under the line's; never both.
 *          A wait always names operations put before it, so waits cannot form a circle.
 * Errors:  once in a queue nothing can fail here, so this device never becomes sticky.
 */
#include "../core/dev.h"
#include "../core/lock.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
#include <unistd.h>

enum { MEM_ALIGN = 512, FIRST_OPS = 32 };

typedef struct cpu_line cpu_line;

typedef enum op_kind { OP_COPY, OP_CALL, OP_WAIT } op_kind;

typedef struct cpu_op {
    op_kind kind;
    union {
        struct { void *dst; const void *src; size_t bytes; } copy;
        struct { void (*fn)(void *); void *arg; }            call;
        struct { cpu_line *line; uint64_t target; }          wait;      /* holds a reference */
    } u;
} cpu_op;

/* Outlives its queue while events or waits name it. Lines are never taken back by close: a closed
 * queue is drained, so everything on its line is done. */
struct cpu_line {
    atomic_int      refs;
    mt_mutex        mu;
    pthread_cond_t  work;        /* put or closing changed; the queue's thread waits */
    pthread_cond_t  moved;       /* done changed; other queues and hosts wait */
    uint64_t        put;         /* operations put so far; under mu, by the putting thread */
    uint64_t        done;        /* of which over; under mu, by the queue's thread */
    cpu_op         *ops;         /* operation k is ops[k % cap], for done <= k < put; under mu */
    uint64_t        cap;         /* a power of two; under mu */
    int             closing;     /* under mu */
};

typedef struct cpu_queue {
    mt_queue  base;
    cpu_line *line;              /* NULL: adopted, runs on the calling thread */
    pthread_t thread;
} cpu_queue;

typedef struct cpu_event {
    mt_event        base;
    mt_mutex        mu;
    cpu_line       *line;        /* NULL: never recorded, or done when recorded. Under mu */
    uint64_t        target;      /* happened once line->done >= target; under mu */
} cpu_event;

/* ---- lines ------------------------------------------------------------------------------ */

static cpu_line *line_open(void)
{
    cpu_line *l = calloc(1, sizeof *l);

    if (l == NULL)
        return NULL;
    if ((l->ops = calloc(FIRST_OPS, sizeof *l->ops)) == NULL) {
        free(l);
        return NULL;
    }
    l->cap = FIRST_OPS;
    atomic_init(&l->refs, 1);
    mt_mutex_open(&l->mu, MT_RANK_QUEUE);
    pthread_cond_init(&l->work, NULL);
    pthread_cond_init(&l->moved, NULL);
    return l;
}

static cpu_line *line_keep(cpu_line *l)
{
    if (l != NULL)
        atomic_fetch_add(&l->refs, 1);
    return l;
}

static void line_drop(cpu_line *l)
{
    if (l == NULL || atomic_fetch_sub(&l->refs, 1) != 1)
        return;
    pthread_cond_destroy(&l->moved);
    pthread_cond_destroy(&l->work);
    mt_mutex_close(&l->mu);
    free(l->ops);
    free(l);
}

static mt_status line_put(cpu_line *l, cpu_op op)
{
    uint64_t  cap = l->cap * 2;
    cpu_op   *ops;
    mt_status st = MT_OK;

    MT_HOLD(&l->mu);
    /* Twice the room; operations keep their numbers, so each finds its new place. */
    if (l->put - l->done == l->cap && (st = MT_MAKE(ops, (int64_t)cap, "cpu queue")) == MT_OK) {
        for (uint64_t k = l->done; k < l->put; k++)
            ops[k & (cap - 1)] = l->ops[k & (l->cap - 1)];
        free(l->ops);
        l->ops = ops;
        l->cap = cap;
    }
    if (st == MT_OK) {
        l->ops[l->put++ & (l->cap - 1)] = op;
        pthread_cond_signal(&l->work);
    }
    return st;
}

/* Blocks the calling thread, a queue's or the host's, until `target` operations are over. What
 * they wrote is visible afterwards, by mu. */
static void line_wait(cpu_line *l, uint64_t target)
{
    MT_HOLD(&l->mu);
    while (l->done < target)
        mt_cond_wait(&l->moved, &l->mu);
}

static uint64_t line_end(cpu_line *l)
{
    return MT_LOCKED(&l->mu, l->put);
}

/* ---- the queue's thread ----------------------------------------------------------------- */

static void op_run(const cpu_op *op)
{
    switch (op->kind) {
    case OP_COPY:
        memcpy(op->u.copy.dst, op->u.copy.src, op->u.copy.bytes);
        break;
    case OP_CALL:
        op->u.call.fn(op->u.call.arg);
        break;
    case OP_WAIT:
        line_wait(op->u.wait.line, op->u.wait.target);
        line_drop(op->u.wait.line);
        break;
    }
}

static void *queue_main(void *line)
{
    cpu_line *l = line;

    mt_lock(&l->mu);
    for (;;) {
        cpu_op op;

        while (l->done == l->put && !l->closing)
            mt_cond_wait(&l->work, &l->mu);
        if (l->done == l->put)
            break;
        op = l->ops[l->done & (l->cap - 1)];
        mt_unlock(&l->mu);
        op_run(&op);
        mt_lock(&l->mu);
        l->done++;
        pthread_cond_broadcast(&l->moved);
    }
    mt_unlock(&l->mu);
    return NULL;
}

/* ---- queues ----------------------------------------------------------------------------- */

static cpu_queue *as_queue(mt_queue *q)
{
    return (cpu_queue *)(void *)q;
}

static mt_status cpu_queue_open(mt_dev *d, const char *name, mt_queue **out)
{
    cpu_queue *q = NULL;
    char       thread_name[16];      /* what the kernel keeps of it */
    int        error;
    mt_status  st;

    MT_TRY(MT_MAKE(q, 1, name));
    q->base.dev = d;
    if ((q->line = line_open()) == NULL)
        MT_TRY(MT_FAIL(MT_ENOMEM, "cpu queue %s: out of memory", name));
    if ((error = pthread_create(&q->thread, NULL, queue_main, q->line)) != 0)
        MT_TRY(MT_FAIL(MT_ENOMEM, "cpu queue %s: thread: %s", name, strerror(error)));
    (void)snprintf(thread_name, sizeof thread_name, "mt-%s", name);
    (void)pthread_setname_np(q->thread, thread_name);
    *out = &q->base;
    return MT_OK;

fail:
    if (q != NULL)
        line_drop(q->line);
    free(q);
    return st;
}

static mt_status cpu_queue_adopt(mt_dev *d, uintptr_t handle, mt_queue **out)
{
    cpu_queue *q = NULL;

    if (handle != 0)
        return MT_FAIL(MT_EINVAL, "cpu: stream %#lx is not of this device; the only one is 0, "
                       "the calling thread", (unsigned long)handle);
    MT_DO(MT_MAKE(q, 1, "cpu queue"));
    q->base.dev = d;
    *out = &q->base;
    return MT_OK;
}

static void cpu_queue_close(mt_queue *queue)
{
    cpu_queue *q = as_queue(queue);

    if (q == NULL)
        return;
    if (q->line != NULL) {
        mt_lock(&q->line->mu);
        q->line->closing = 1;
        pthread_cond_signal(&q->line->work);
        mt_unlock(&q->line->mu);
        (void)pthread_join(q->thread, NULL);
        line_drop(q->line);
    }
    free(q);
}

static uintptr_t cpu_handle(mt_queue *q)
{
    (void)q;
    return 0;
}

/* In an adopted queue an operation is over when put() returns. */
static mt_status put(mt_queue *queue, cpu_op op)
{
    cpu_queue *q = as_queue(queue);

    if (q->line != NULL)
        return line_put(q->line, op);
    op_run(&op);
    return MT_OK;
}

static mt_status cpu_copy(mt_queue *q, void *dst, const void *src, size_t bytes)
{
    cpu_op op = { .kind = OP_COPY, .u.copy = { dst, src, bytes } };

    return bytes > 0 ? put(q, op) : MT_OK;
}

static mt_status cpu_call(mt_queue *q, void (*fn)(void *), void *arg)
{
    cpu_op op = { .kind = OP_CALL, .u.call = { fn, arg } };

    return put(q, op);
}

static mt_status cpu_sync(mt_queue *queue)
{
    cpu_line *l = as_queue(queue)->line;

    if (l != NULL)
        line_wait(l, line_end(l));
    return MT_OK;
}

/* ---- events ----------------------------------------------------------------------------- */

static cpu_event *as_event(mt_event *e)
{
    return (cpu_event *)(void *)e;
}

static mt_status cpu_event_open(mt_dev *d, mt_event **out)
{
    cpu_event *e = calloc(1, sizeof *e);

    if (e == NULL)
        return MT_FAIL(MT_ENOMEM, "cpu event: calloc(%zu)", sizeof *e);
    e->base.dev = d;
    mt_mutex_open(&e->mu, MT_RANK_LEAF);
    *out = &e->base;
    return MT_OK;
}

static void cpu_event_close(mt_event *event)
{
    cpu_event *e = as_event(event);

    if (e == NULL)
        return;
    line_drop(e->line);
    mt_mutex_close(&e->mu);
    free(e);
}

static mt_status cpu_record(mt_queue *queue, mt_event *event)
{
    cpu_event *e = as_event(event);
    cpu_line  *before, *l = as_queue(queue)->line;
    uint64_t   target = l != NULL ? line_end(l) : 0;

    (void)line_keep(l);
    mt_lock(&e->mu);
    before = e->line;
    e->line = l;
    e->target = target;
    mt_unlock(&e->mu);
    line_drop(before);
    return MT_OK;
}

/* The event's note as it stands, with a reference: the caller drops it. */
static cpu_line *event_note(mt_event *event, uint64_t *target)
{
    cpu_event *e = as_event(event);
    cpu_line  *l;

    MT_HOLD(&e->mu);
    l = line_keep(e->line);
    *target = e->target;
    return l;
}

static mt_status cpu_wait(mt_queue *q, mt_event *event)
{
    cpu_op    op = { .kind = OP_WAIT };
    mt_status st;

    op.u.wait.line = event_note(event, &op.u.wait.target);
    if (op.u.wait.line == NULL)
        return MT_OK;
    if ((st = put(q, op)) != MT_OK)
        line_drop(op.u.wait.line);
    return st;
}

static mt_status cpu_sync_event(mt_event *event)
{
    uint64_t  target;
    cpu_line *l = event_note(event, &target);

    if (l != NULL)
        line_wait(l, target);
    line_drop(l);
    return MT_OK;
}

static mt_status cpu_query(mt_event *event, int *done)
{
    uint64_t  target;
    cpu_line *l = event_note(event, &target);
    int       over = 1;

    if (l != NULL) {
        MT_WITH(&l->mu) over = l->done >= target;
    }
    line_drop(l);
    *done = over;
    return MT_OK;
}

/* ---- stamps ----------------------------------------------------------------------------- */

struct mt_stamp {
    _Atomic uint64_t ns;         /* 0: the queue has not come by. Written on the queue's thread */
};

static mt_status cpu_stamp_open(mt_dev *d, mt_stamp **out)
{
    mt_stamp *s = malloc(sizeof *s);

    (void)d;
    if (s == NULL)
        return MT_FAIL(MT_ENOMEM, "cpu stamp: malloc(%zu)", sizeof *s);
    atomic_init(&s->ns, 0);
    *out = s;
    return MT_OK;
}

static void cpu_stamp_close(mt_dev *d, mt_stamp *s)
{
    (void)d;
    free(s);
}

static void write_time(void *stamp)
{
    atomic_store(&((mt_stamp *)stamp)->ns, mt_now_ns());
}

static mt_status cpu_stamp(mt_queue *q, mt_stamp *s)
{
    atomic_store(&s->ns, 0);
    return cpu_call(q, write_time, s);
}

static mt_status cpu_stamp_read(mt_dev *d, mt_stamp *s, uint64_t *ns, int *done)
{
    uint64_t at = atomic_load(&s->ns);

    (void)d;
    if ((*done = at != 0))
        *ns = at;
    return MT_OK;
}

/* ---- memory and the device -------------------------------------------------------------- */

static mt_status cpu_host_register(mt_dev *d, void *p, size_t bytes)
{
    (void)d;
    if (p == NULL || bytes == 0)
        return MT_FAIL(MT_EINVAL, "cpu: nothing to register: %zu bytes at %p", bytes, p);
    return MT_OK;
}

static void cpu_host_unregister(mt_dev *d, void *p)
{
    (void)d;
    (void)p;
}

static mt_status cpu_mem_alloc(mt_dev *d, size_t bytes, void **out)
{
    void *p;

    (void)d;
    if (bytes == 0)
        return MT_FAIL(MT_EINVAL, "cpu: device memory of 0 bytes");
    /* C11 wants a multiple of the alignment. */
    if (bytes > SIZE_MAX - MEM_ALIGN
        || (p = aligned_alloc(MEM_ALIGN, (bytes + MEM_ALIGN - 1) / MEM_ALIGN * MEM_ALIGN)) == NULL)
        return MT_FAIL(MT_EDEVMEM, "cpu: no device memory for %zu bytes", bytes);
    memset(p, 0, bytes);
    *out = p;
    return MT_OK;
}

static void cpu_mem_free(mt_dev *d, void *p)
{
    (void)d;
    free(p);
}

/* Of this process's own alone, as tests have several ranks in one. */
static mt_status cpu_mem_name(mt_dev *d, void *p, mt_mem_name *out)
{
    pid_t own = getpid();

    (void)d;
    *out = (mt_mem_name){ .skip = (uint64_t)(uintptr_t)p };
    memcpy(out->allocation, &own, sizeof own);
    return MT_OK;
}

static mt_status cpu_mem_reach(mt_dev *d, const mt_mem_name *name, void **out)
{
    pid_t own = getpid();

    (void)d;
    if (memcmp(name->allocation, &own, sizeof own) != 0)
        return MT_FAIL(MT_ENOTSUP, "cpu: memory of another process is out of reach");
    *out = (void *)(uintptr_t)name->skip;
    return MT_OK;
}

static void cpu_mem_leave(mt_dev *d, const mt_mem_name *name, void *p)
{
    (void)d;
    (void)name;
    (void)p;
}

static void cpu_close(mt_dev *d)
{
    free(d);
}

static const mt_dev_ops cpu_ops = {
    .name            = "cpu",
    .close           = cpu_close,
    .host_register   = cpu_host_register,
    .host_unregister = cpu_host_unregister,
    .mem_alloc       = cpu_mem_alloc,
    .mem_free        = cpu_mem_free,
    .mem_name        = cpu_mem_name,
    .mem_reach       = cpu_mem_reach,
    .mem_leave       = cpu_mem_leave,
    .queue_open      = cpu_queue_open,
    .queue_adopt     = cpu_queue_adopt,
    .queue_close     = cpu_queue_close,
    .handle          = cpu_handle,
    .copy            = cpu_copy,
    .call            = cpu_call,
    .event_open      = cpu_event_open,
    .event_close     = cpu_event_close,
    .record          = cpu_record,
    .wait            = cpu_wait,
    .sync_event      = cpu_sync_event,
    .query           = cpu_query,
    .sync            = cpu_sync,
    .stamp_open      = cpu_stamp_open,
    .stamp_close     = cpu_stamp_close,
    .stamp           = cpu_stamp,
    .stamp_read      = cpu_stamp_read,
};

mt_status mt_dev_cpu_open(mt_dev **out)
{
    mt_dev *d = calloc(1, sizeof *d);

    if (d == NULL)
        return MT_FAIL(MT_ENOMEM, "cpu: calloc(%zu)", sizeof *d);
    d->ops = &cpu_ops;
    *out = d;
    return MT_OK;
}
