/* dev_cuda.c — the device that is a CUDA GPU, through the runtime.
 *
 * Nouns, as in dev.h:
 *   memory   cudaMalloc; host memory is registered, mapped and portable
 *   queue    a non-blocking stream: it does not wait for torch's default stream unless told to
 *   event    a CUDA event without times
 *   stamp    a CUDA event with times, and a base: such an event whose time on the host is known
 *
 * Which device is current is the calling thread's (torch's) affair: each call makes our context
 * current and takes it away again. That is done through the driver, by push and pop:
 * cudaSetDevice(before) would make a context, and 500 MB, on device 0 for every thread that had
 * chosen none.
 *
 * The runtime is linked statically and finds the driver by itself when it is first called, so
 * this file loads on machines without one. Driver functions are asked of the runtime.
 *
 * Errors:  most pass once reported. Some (an illegal address in a kernel, an ECC error) end the
 *          context, and the runtime then answers every call with them: the first message is kept
 *          and given again.
 */
#include "../core/dev.h"
#include "../core/lock.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The driver's part, as far as it is needed. */
typedef struct driver {
    CUresult (*device_get)(CUdevice *device, int ordinal);
    CUresult (*primary_retain)(CUcontext *context, CUdevice device);
    CUresult (*primary_release)(CUdevice device);
    CUresult (*address_range)(CUdeviceptr *base, size_t *bytes, CUdeviceptr p);
    CUresult (*get_current)(CUcontext *context);
    CUresult (*push_current)(CUcontext context);
    CUresult (*pop_current)(CUcontext *context);
} driver;

/* What one host thread needs to sleep until an event has happened. */
typedef struct sleeper {
    struct sleeper *next;        /* while idle; under the device's mu */
    cudaStream_t    stream;
    cudaEvent_t     over;        /* blocking: its waiter sleeps */
} sleeper;

/* Where stamps are measured from. */
typedef struct origin {
    cudaEvent_t event;
    uint64_t    ns;              /* when it happened; constant */
    long        users;           /* stamps, and the device while it is the newest. Under its mu */
} origin;

struct mt_stamp {
    cudaEvent_t event;
    origin     *from;            /* the newest when it was asked; NULL: never asked */
};

typedef struct cuda_dev {
    mt_dev    base;
    int       index;             /* constant */
    driver    drv;               /* constant */
    CUdevice  device;            /* constant */
    CUcontext context;           /* the device's primary one, torch's too; constant */

    mt_mutex        mu;
    sleeper        *idle;        /* any thread, under mu */
    origin         *newest;      /* NULL before the first stamp; under mu */
    atomic_int      sticky;      /* set once, under mu, after text was written */
    char            text[512];
} cuda_dev;

typedef struct cuda_queue {
    mt_queue     base;
    cudaStream_t stream;
    int          adopted;        /* the stream is someone else's */
} cuda_queue;

typedef struct cuda_event {
    mt_event    base;
    cudaEvent_t event;
} cuda_event;

static cuda_dev *as_dev(mt_dev *d)
{
    return (cuda_dev *)(void *)d;
}

static cuda_queue *as_queue(mt_queue *q)
{
    return (cuda_queue *)(void *)q;
}

static cuda_event *as_event(mt_event *e)
{
    return (cuda_event *)(void *)e;
}

/* ---- errors ----------------------------------------------------------------------------- */

static mt_status status_of(cudaError_t error)
{
    return error == cudaErrorMemoryAllocation ? MT_EDEVMEM : MT_EDEVICE;
}

/* `call` is the source text of the call: its name is what stands before the parenthesis. */
static mt_status say(int index, cudaError_t error, const char *call)
{
    return MT_FAIL(status_of(error), "cuda:%d: %.*s: %s (%s)", index, (int)strcspn(call, "("), call,
                   cudaGetErrorString(error), cudaGetErrorName(error));
}

/* Keeps this thread's message as the device's, unless another thread was first. */
static void keep(cuda_dev *d)
{
    MT_HOLD(&d->mu);
    if (!atomic_load(&d->sticky)) {
        (void)snprintf(d->text, sizeof d->text, "%s", mt_last_error());
        atomic_store(&d->sticky, 1);
    }
}

/* Reports a failed call with our context current, and finds out whether the context is lost: then
 * even asking a stream how it is fails, and not because it is busy. */
static mt_status failed(cuda_dev *d, cudaError_t error, const char *call)
{
    mt_status   st = say(d->index, error, call);
    cudaError_t health;

    (void)cudaGetLastError();            /* or torch would find it at its next launch */
    health = cudaStreamQuery(cudaStreamLegacy);
    (void)cudaGetLastError();
    if (health != cudaSuccess && health != cudaErrorNotReady && st == MT_EDEVICE)
        keep(d);
    return st;
}

/* CU(d, cudaSomething(...)): its status. Our context is current. */
#define CU(d, call) cu((d), (call), #call)

static mt_status cu(cuda_dev *d, cudaError_t error, const char *call)
{
    return error == cudaSuccess ? MT_OK : failed(d, error, call);
}

/* ---- the current context ---------------------------------------------------------------- */

/* Makes our context this thread's. 1: leave() must take it away; -1: someone destroyed it. */
static int push(cuda_dev *d)
{
    CUcontext now = NULL;

    if (d->drv.get_current(&now) == CUDA_SUCCESS && now == d->context)
        return 0;
    return d->drv.push_current(d->context) == CUDA_SUCCESS ? 1 : -1;
}

static mt_status enter(cuda_dev *d, int *pushed)
{
    *pushed = 0;
    if (atomic_load(&d->sticky))
        return mt_fail_again(MT_EDEVICE, d->text);
    if ((*pushed = push(d)) < 0)
        return MT_FAIL(MT_EDEVICE, "cuda:%d: its context is gone; was the device reset?", d->index);
    return MT_OK;
}

static void leave(cuda_dev *d, int pushed)
{
    CUcontext ours;

    if (pushed > 0)
        (void)d->drv.pop_current(&ours);
}

/* One runtime call in our context: `st` gets its status. */
#define IN_CONTEXT(d, st, call)                                                               \
    do {                                                                                      \
        int pushed_;                                                                          \
        (st) = enter((d), &pushed_);                                                          \
        if ((st) == MT_OK)                                                                    \
            (st) = CU((d), call);                                                             \
        leave((d), pushed_);                                                                  \
    } while (0)

/* The same for what has nobody to tell: frees and closes. On a sticky device they do no good and
 * no harm. */
#define IN_CONTEXT_QUIETLY(d, calls)                                                          \
    do {                                                                                      \
        int pushed_ = push((d));                                                              \
        if (pushed_ >= 0) {                                                                   \
            calls;                                                                            \
            (void)cudaGetLastError();                                                         \
        }                                                                                     \
        leave((d), pushed_);                                                                  \
    } while (0)

/* ---- host memory ------------------------------------------------------------------------ */

/* What drivers say when they have locked as much as they may: out of memory, by the manual; under
 * WSL2 and in sandboxes also that the value is invalid (as reported of cudaHostAlloc there), that
 * the call of the system failed, or that it is not supported or permitted. */
static int cannot_lock(cudaError_t error)
{
    return error == cudaErrorMemoryAllocation || error == cudaErrorInvalidValue ||
           error == cudaErrorOperatingSystem || error == cudaErrorNotSupported ||
           error == cudaErrorNotPermitted;
}

static mt_status cuda_host_register(mt_dev *dev, void *p, size_t bytes)
{
    cuda_dev   *d = as_dev(dev);
    cudaError_t error = cudaSuccess;
    int         pushed;
    mt_status   st;

    if (p == NULL || bytes == 0)
        return MT_FAIL(MT_EINVAL, "cuda:%d: nothing to register: %zu bytes at %p", d->index, bytes,
                       p);
    if ((st = enter(d, &pushed)) == MT_OK) {
        error = cudaHostRegister(p, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable);
        st = cu(d, error, "cudaHostRegister");
    }
    leave(d, pushed);
    if (st != MT_OK && cannot_lock(error) && !atomic_load(&d->sticky))
        st = MT_FAIL(MT_ENOMEM, "cuda:%d: %zu bytes of host memory cannot be locked (%s); see "
                     "`ulimit -l`, the container's memory limit, and under WSL2 the memory of "
                     "Windows", d->index, bytes,
                     cudaGetErrorName(error));
    return st;
}

static void cuda_host_unregister(mt_dev *dev, void *p)
{
    cuda_dev *d = as_dev(dev);

    if (p != NULL)
        IN_CONTEXT_QUIETLY(d, (void)cudaHostUnregister(p));
}

/* ---- queues ----------------------------------------------------------------------------- */

static mt_status queue_new(mt_dev *dev, cuda_queue **out)
{
    cuda_queue *q = calloc(1, sizeof *q);

    if (q == NULL)
        return MT_FAIL(MT_ENOMEM, "cuda queue: calloc(%zu)", sizeof *q);
    q->base.dev = dev;
    *out = q;
    return MT_OK;
}

static mt_status cuda_queue_open(mt_dev *dev, const char *name, mt_queue **out)
{
    cuda_queue *q = NULL;
    mt_status   st;

    (void)name;
    MT_TRY(queue_new(dev, &q));
    IN_CONTEXT(as_dev(dev), st, cudaStreamCreateWithFlags(&q->stream, cudaStreamNonBlocking));
    MT_TRY(st);
    *out = &q->base;
    return MT_OK;

fail:
    free(q);
    return st;
}

static mt_status cuda_queue_adopt(mt_dev *dev, uintptr_t handle, mt_queue **out)
{
    cuda_queue *q = NULL;
    mt_status   st = queue_new(dev, &q);

    if (st != MT_OK)
        return st;
    q->stream = (cudaStream_t)handle;
    q->adopted = 1;
    *out = &q->base;
    return MT_OK;
}

static void cuda_queue_close(mt_queue *queue)
{
    cuda_queue *q = as_queue(queue);

    if (q == NULL)
        return;
    if (!q->adopted)
        IN_CONTEXT_QUIETLY(as_dev(q->base.dev), (void)cudaStreamSynchronize(q->stream);
                                                (void)cudaStreamDestroy(q->stream));
    free(q);
}

static uintptr_t cuda_handle(mt_queue *q)
{
    return (uintptr_t)as_queue(q)->stream;
}

static mt_status cuda_copy(mt_queue *q, void *dst, const void *src, size_t bytes)
{
    mt_status st = MT_OK;

    if (bytes > 0)
        IN_CONTEXT(as_dev(q->dev), st,
                   cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, as_queue(q)->stream));
    return st;
}

static mt_status cuda_call(mt_queue *q, void (*fn)(void *), void *arg)
{
    mt_status st;

    IN_CONTEXT(as_dev(q->dev), st, cudaLaunchHostFunc(as_queue(q)->stream, fn, arg));
    return st;
}

static mt_status cuda_sync(mt_queue *q)
{
    mt_status st;

    IN_CONTEXT(as_dev(q->dev), st, cudaStreamSynchronize(as_queue(q)->stream));
    return st;
}

/* ---- events ----------------------------------------------------------------------------- */

static mt_status cuda_event_open(mt_dev *dev, mt_event **out)
{
    cuda_event *e = calloc(1, sizeof *e);
    mt_status   st;

    if (e == NULL)
        return MT_FAIL(MT_ENOMEM, "cuda event: calloc(%zu)", sizeof *e);
    e->base.dev = dev;
    IN_CONTEXT(as_dev(dev), st, cudaEventCreateWithFlags(&e->event, cudaEventDisableTiming));
    if (st == MT_OK)
        *out = &e->base;
    else
        free(e);
    return st;
}

static void cuda_event_close(mt_event *event)
{
    cuda_event *e = as_event(event);

    if (e == NULL)
        return;
    IN_CONTEXT_QUIETLY(as_dev(e->base.dev), (void)cudaEventDestroy(e->event));
    free(e);
}

static mt_status cuda_record(mt_queue *q, mt_event *e)
{
    mt_status st;

    IN_CONTEXT(as_dev(q->dev), st, cudaEventRecord(as_event(e)->event, as_queue(q)->stream));
    return st;
}

static mt_status cuda_wait(mt_queue *q, mt_event *e)
{
    mt_status st;

    IN_CONTEXT(as_dev(q->dev), st,
               cudaStreamWaitEvent(as_queue(q)->stream, as_event(e)->event, cudaEventWaitDefault));
    return st;
}

/* cudaErrorNotReady is an answer here, but the runtime remembers it as an error. Our context is
 * current. */
static mt_status ask(cuda_dev *d, cudaEvent_t event, int *done)
{
    cudaError_t error = cudaEventQuery(event);
    mt_status   st = MT_OK;

    if (error == cudaErrorNotReady)
        (void)cudaGetLastError();
    else
        st = cu(d, error, "cudaEventQuery");
    if (st == MT_OK)
        *done = error == cudaSuccess;
    return st;
}

static mt_status cuda_query(mt_event *e, int *done)
{
    cuda_dev *d = as_dev(e->dev);
    int       pushed;
    mt_status st = enter(d, &pushed);

    if (st == MT_OK)
        st = ask(d, as_event(e)->event, done);
    leave(d, pushed);
    return st;
}

/* ---- waiting on the host ----------------------------------------------------------------
 *
 * Those who wait (collector, updater) share the processors with the optimizer, so they must sleep
 * where cudaEventSynchronize would spin. cudaEventBlockingSync does that, but a stream takes only
 * 56 records of such events (H200, CUDA 13) before the next blocks the thread that puts it, and
 * 20,000 of plain ones. So events are plain, and a thread that waits does so on a blocking event
 * of its own, behind the plain one.
 */

static void sleeper_close(sleeper *s)
{
    if (s->over != NULL)
        (void)cudaEventDestroy(s->over);
    if (s->stream != NULL)
        (void)cudaStreamDestroy(s->stream);
    (void)cudaGetLastError();
    free(s);
}

/* There are as many as threads ever waited at once. Our context is current. */
static mt_status sleeper_take(cuda_dev *d, sleeper **out)
{
    sleeper  *s;
    mt_status st;

    mt_lock(&d->mu);
    if ((s = d->idle) != NULL)
        d->idle = s->next;
    mt_unlock(&d->mu);
    if (s == NULL) {
        if ((s = calloc(1, sizeof *s)) == NULL)
            return MT_FAIL(MT_ENOMEM, "cuda wait: calloc(%zu)", sizeof *s);
        MT_TRY(CU(d, cudaStreamCreateWithFlags(&s->stream, cudaStreamNonBlocking)));
        MT_TRY(CU(d, cudaEventCreateWithFlags(&s->over,
                                              cudaEventDisableTiming | cudaEventBlockingSync)));
    }
    *out = s;
    return MT_OK;

fail:
    sleeper_close(s);
    return st;
}

static void sleeper_give(cuda_dev *d, sleeper *s)
{
    MT_HOLD(&d->mu);
    s->next = d->idle;
    d->idle = s;
}

/* The wait in the stream is for the record before this call, also if another thread records again
 * while we sleep. */
static mt_status sleep_until(cuda_dev *d, cudaEvent_t event)
{
    sleeper  *s;
    mt_status st;

    MT_DO(sleeper_take(d, &s));
    MT_TRY(CU(d, cudaStreamWaitEvent(s->stream, event, cudaEventWaitDefault)));
    MT_TRY(CU(d, cudaEventRecord(s->over, s->stream)));
    MT_TRY(CU(d, cudaEventSynchronize(s->over)));
fail:
    sleeper_give(d, s);
    return st;
}

static mt_status cuda_sync_event(mt_event *e)
{
    cuda_dev *d = as_dev(e->dev);
    int       done = 0, pushed;
    mt_status st = cuda_query(e, &done);

    if (st != MT_OK || done)
        return st;
    st = enter(d, &pushed);
    if (st == MT_OK)
        st = sleep_until(d, as_event(e)->event);
    leave(d, pushed);
    return st;
}

/* ---- device memory ---------------------------------------------------------------------- */

/* In a stream of its own, so that it waits for nobody's work and nobody waits for it. */
static mt_status zero(cuda_dev *d, void *p, size_t bytes)
{
    sleeper  *s;
    mt_status st;

    MT_DO(sleeper_take(d, &s));
    MT_TRY(CU(d, cudaMemsetAsync(p, 0, bytes, s->stream)));
    MT_TRY(CU(d, cudaEventRecord(s->over, s->stream)));
    MT_TRY(CU(d, cudaEventSynchronize(s->over)));
fail:
    sleeper_give(d, s);
    return st;
}

static mt_status alloc_zero(cuda_dev *d, size_t bytes, void **out)
{
    void     *p = NULL;
    mt_status st;

    MT_DO(CU(d, cudaMalloc(&p, bytes)));
    if ((st = zero(d, p, bytes)) != MT_OK) {
        (void)cudaFree(p);
        (void)cudaGetLastError();
        return st;
    }
    *out = p;
    return MT_OK;
}

static mt_status cuda_mem_alloc(mt_dev *dev, size_t bytes, void **out)
{
    cuda_dev *d = as_dev(dev);
    int       pushed;
    mt_status st;

    if (bytes == 0)
        return MT_FAIL(MT_EINVAL, "cuda:%d: device memory of 0 bytes", d->index);
    st = enter(d, &pushed);
    if (st == MT_OK)
        st = alloc_zero(d, bytes, out);
    leave(d, pushed);
    if (st == MT_EDEVMEM)
        return MT_FAIL(MT_EDEVMEM, "cuda:%d: no device memory for %zu bytes", d->index, bytes);
    return st;
}

static void cuda_mem_free(mt_dev *dev, void *p)
{
    cuda_dev *d = as_dev(dev);

    if (p != NULL)
        IN_CONTEXT_QUIETLY(d, (void)cudaFree(p));
}

/* Names of allocations that others cannot open (of virtual memory, which torch makes where it is
 * told expandable_segments) are refused here, and nothing has failed. */
static mt_status no_reach(const cuda_dev *d, cudaError_t error)
{
    (void)cudaGetLastError();
    if (error == cudaSuccess)
        return MT_OK;
    return MT_FAIL(MT_ENOTSUP, "cuda:%d: device memory of another process is out of reach (%s)",
                   d->index, cudaGetErrorName(error));
}

static mt_status cuda_mem_name(mt_dev *dev, void *p, mt_mem_name *out)
{
    cuda_dev          *d = as_dev(dev);
    cudaIpcMemHandle_t handle;
    CUdeviceptr        base;
    size_t             bytes;
    mt_status          st;
    int                pushed;

    _Static_assert(sizeof handle <= sizeof out->allocation, "a name of an allocation");
    if ((st = enter(d, &pushed)) == MT_OK) {
        if (d->drv.address_range(&base, &bytes, (CUdeviceptr)(uintptr_t)p) != CUDA_SUCCESS)
            st = no_reach(d, cudaErrorInvalidValue);
        else if ((st = no_reach(d, cudaIpcGetMemHandle(&handle, p))) == MT_OK) {
            memcpy(out->allocation, &handle, sizeof handle);
            out->skip = (uint64_t)((CUdeviceptr)(uintptr_t)p - base);
        }
    }
    leave(d, pushed);
    return st;
}

static mt_status cuda_mem_reach(mt_dev *dev, const mt_mem_name *name, void **out)
{
    cuda_dev          *d = as_dev(dev);
    cudaIpcMemHandle_t handle;
    void              *base = NULL;
    mt_status          st;
    int                pushed;

    memcpy(&handle, name->allocation, sizeof handle);
    if ((st = enter(d, &pushed)) == MT_OK)
        st = no_reach(d, cudaIpcOpenMemHandle(&base, handle, cudaIpcMemLazyEnablePeerAccess));
    leave(d, pushed);
    if (st == MT_OK)
        *out = (char *)base + name->skip;
    return st;
}

static void cuda_mem_leave(mt_dev *dev, const mt_mem_name *name, void *p)
{
    cuda_dev *d = as_dev(dev);

    if (p != NULL)
        IN_CONTEXT_QUIETLY(d, (void)cudaIpcCloseMemHandle((char *)p - name->skip));
}

/* ---- stamps -----------------------------------------------------------------------------
 *
 * The runtime tells the time between two events, as a float of milliseconds. An origin is an event
 * in an empty stream that the host waits for, reading its own clock on both sides; a stamp's time
 * is that of the newest origin when it was asked, plus the time between the two. A float has 24
 * bits: four seconds behind the origin it counts in steps of 0.25 us, finer than the events'
 * 0.5 us. So origins are renewed after that, which follows the drift of the two clocks as well.
 */
#define ORIGIN_NS ((uint64_t)4000000000u)
#define NARROW_NS ((uint64_t)40000)      /* a wait longer than this is tried again ... */
#define TRIES     5                      /* ... so often; the last one counts whatever it took */

/* Our context is current, and mu is held. */
static void origin_drop(origin *o)
{
    if (o == NULL || --o->users > 0)
        return;
    (void)cudaEventDestroy(o->event);
    free(o);
}

/* The event happens somewhere between the two looks at the clock; the middle is off by half. */
static mt_status origin_time(cuda_dev *d, origin *o, cudaStream_t empty)
{
    for (int i = 0; i < TRIES; i++) {
        uint64_t before = mt_now_ns(), after;

        MT_DO(CU(d, cudaEventRecord(o->event, empty)));
        MT_DO(CU(d, cudaEventSynchronize(o->event)));
        after = mt_now_ns();
        o->ns = before + (after - before) / 2;
        if (after - before < NARROW_NS)
            break;
    }
    return MT_OK;
}

static mt_status origin_make(cuda_dev *d, origin **out)
{
    origin   *o = calloc(1, sizeof *o);
    sleeper  *s = NULL;
    mt_status st;

    if (o == NULL)
        return MT_FAIL(MT_ENOMEM, "cuda stamp: calloc(%zu)", sizeof *o);
    MT_TRY(CU(d, cudaEventCreateWithFlags(&o->event, cudaEventDefault)));
    MT_TRY(sleeper_take(d, &s));         /* for its stream: nobody else puts anything there now */
    st = origin_time(d, o, s->stream);
    sleeper_give(d, s);
    MT_TRY(st);
    o->users = 1;
    *out = o;
    return MT_OK;

fail:
    if (o->event != NULL)
        (void)cudaEventDestroy(o->event);
    free(o);
    return st;
}

/* Two threads may both make one; the later one stays. Our context is current. */
static mt_status origin_renew(cuda_dev *d)
{
    origin *made = NULL, *old;
    int     fresh;

    MT_WITH(&d->mu) fresh = d->newest != NULL && mt_now_ns() - d->newest->ns < ORIGIN_NS;
    if (fresh)
        return MT_OK;
    MT_DO(origin_make(d, &made));
    MT_HOLD(&d->mu);
    old = d->newest;
    d->newest = made;
    origin_drop(old);
    return MT_OK;
}

static mt_status cuda_stamp_open(mt_dev *dev, mt_stamp **out)
{
    cuda_dev *d = as_dev(dev);
    mt_stamp *s = calloc(1, sizeof *s);
    int       pushed;
    mt_status st;

    if (s == NULL)
        return MT_FAIL(MT_ENOMEM, "cuda stamp: calloc(%zu)", sizeof *s);
    if ((st = enter(d, &pushed)) == MT_OK)
        st = origin_renew(d);
    if (st == MT_OK)
        st = CU(d, cudaEventCreateWithFlags(&s->event, cudaEventDefault));
    leave(d, pushed);
    if (st == MT_OK)
        *out = s;
    else
        free(s);
    return st;
}

/* From now on s is measured from the newest origin, or from none. Our context is current. */
static void stamp_from(cuda_dev *d, mt_stamp *s, int newest)
{
    origin *before = s->from;

    MT_HOLD(&d->mu);
    s->from = newest ? d->newest : NULL;
    if (s->from != NULL)
        s->from->users++;
    origin_drop(before);
}

static void cuda_stamp_close(mt_dev *dev, mt_stamp *s)
{
    cuda_dev *d = as_dev(dev);

    if (s == NULL)
        return;
    IN_CONTEXT_QUIETLY(d, stamp_from(d, s, 0); (void)cudaEventDestroy(s->event));
    free(s);
}

static mt_status cuda_stamp(mt_queue *q, mt_stamp *s)
{
    cuda_dev *d = as_dev(q->dev);
    int       pushed;
    mt_status st = enter(d, &pushed);

    if (st == MT_OK) {
        stamp_from(d, s, 1);
        st = CU(d, cudaEventRecord(s->event, as_queue(q)->stream));
    }
    leave(d, pushed);
    return st;
}

/* Our context is current. */
static mt_status stamp_time(cuda_dev *d, const mt_stamp *s, uint64_t *ns, int *done)
{
    float ms;
    int   over = 0;

    MT_DO(origin_renew(d));             /* for stamps to come */
    MT_DO(ask(d, s->event, &over));
    if (over) {
        MT_DO(CU(d, cudaEventElapsedTime(&ms, s->from->event, s->event)));
        *ns = s->from->ns + (uint64_t)((double)ms * 1e6);
    }
    *done = over;
    return MT_OK;
}

static mt_status cuda_stamp_read(mt_dev *dev, mt_stamp *s, uint64_t *ns, int *done)
{
    cuda_dev *d = as_dev(dev);
    int       pushed;
    mt_status st;

    if (s->from == NULL) {
        *done = 0;
        return MT_OK;
    }
    if ((st = enter(d, &pushed)) == MT_OK)
        st = stamp_time(d, s, ns, done);
    leave(d, pushed);
    return st;
}

/* ---- the device ------------------------------------------------------------------------- */

static void close_sleepers(cuda_dev *d)
{
    sleeper *next;

    for (sleeper *s = d->idle; s != NULL; s = next) {
        next = s->next;
        sleeper_close(s);
    }
    d->idle = NULL;
}

static void cuda_close(mt_dev *dev)
{
    cuda_dev *d = as_dev(dev);

    if (d->idle != NULL || d->newest != NULL)
        IN_CONTEXT_QUIETLY(d, close_sleepers(d); origin_drop(d->newest));
    if (d->context != NULL)
        (void)d->drv.primary_release(d->device);
    mt_mutex_close(&d->mu);
    free(d);
}

static const mt_dev_ops cuda_ops = {
    .name            = "cuda",
    .close           = cuda_close,
    .host_register   = cuda_host_register,
    .host_unregister = cuda_host_unregister,
    .mem_alloc       = cuda_mem_alloc,
    .mem_free        = cuda_mem_free,
    .mem_name        = cuda_mem_name,
    .mem_reach       = cuda_mem_reach,
    .mem_leave       = cuda_mem_leave,
    .queue_open      = cuda_queue_open,
    .queue_adopt     = cuda_queue_adopt,
    .queue_close     = cuda_queue_close,
    .handle          = cuda_handle,
    .copy            = cuda_copy,
    .call            = cuda_call,
    .event_open      = cuda_event_open,
    .event_close     = cuda_event_close,
    .record          = cuda_record,
    .wait            = cuda_wait,
    .sync_event      = cuda_sync_event,
    .query           = cuda_query,
    .sync            = cuda_sync,
    .stamp_open      = cuda_stamp_open,
    .stamp_close     = cuda_stamp_close,
    .stamp           = cuda_stamp,
    .stamp_read      = cuda_stamp_read,
};

int mt_dev_cuda_built(void)
{
    return 1;
}

/* The runtime starts the driver here; without one it says so. */
static mt_status check_index(int index)
{
    int         n = 0;
    cudaError_t error = cudaGetDeviceCount(&n);

    (void)cudaGetLastError();
    if (error != cudaSuccess)
        return say(index, error, "cudaGetDeviceCount");
    if (index < 0 || index >= n)
        return MT_FAIL(MT_EDEVICE, "cuda:%d: there are %d devices, numbered from 0", index, n);
    return MT_OK;
}

/* Functions and data pointers do not mix in C11; POSIX says that their bits do. */
static mt_status find(int index, const char *name, void *function)
{
    enum { VERSION = 12000 };    /* of the functions' signatures */
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;

    void       *p = NULL;
    cudaError_t error = cudaGetDriverEntryPointByVersion(name, &p, VERSION, cudaEnableDefault,
                                                         &found);

    (void)cudaGetLastError();
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess || p == NULL)
        return MT_FAIL(MT_EDEVICE, "cuda:%d: this driver has no %s; CUDA %d or later is needed",
                       index, name, VERSION / 1000);
    memcpy(function, &p, sizeof p);
    return MT_OK;
}

static mt_status find_driver(int index, driver *drv)
{
    MT_DO(find(index, "cuDeviceGet", &drv->device_get));
    MT_DO(find(index, "cuDevicePrimaryCtxRetain", &drv->primary_retain));
    MT_DO(find(index, "cuDevicePrimaryCtxRelease", &drv->primary_release));
    MT_DO(find(index, "cuMemGetAddressRange", &drv->address_range));
    MT_DO(find(index, "cuCtxGetCurrent", &drv->get_current));
    MT_DO(find(index, "cuCtxPushCurrent", &drv->push_current));
    return find(index, "cuCtxPopCurrent", &drv->pop_current);
}

mt_status mt_dev_cuda_open(int index, mt_dev **out)
{
    cuda_dev *d;
    mt_status st;

    MT_DO(check_index(index));
    if ((d = calloc(1, sizeof *d)) == NULL)
        return MT_FAIL(MT_ENOMEM, "cuda:%d: calloc(%zu)", index, sizeof *d);
    d->base.ops = &cuda_ops;
    d->index = index;
    atomic_init(&d->sticky, 0);
    mt_mutex_open(&d->mu, MT_RANK_CUDA);
    MT_TRY(find_driver(index, &d->drv));
    if (d->drv.device_get(&d->device, index) != CUDA_SUCCESS
        || d->drv.primary_retain(&d->context, d->device) != CUDA_SUCCESS)
        MT_TRY(MT_FAIL(MT_EDEVICE, "cuda:%d: no context; is the device full, or held by another "
                       "process alone (compute mode)?", index));
    *out = &d->base;
    return MT_OK;

fail:
    cuda_close(&d->base);
    return st;
}
