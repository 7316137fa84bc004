/* bind.h — the C core, shown to Python. The only room that knows Python, NumPy or torch.
 *
 * Nouns, in the order they appear below:
 *   state    what one import of the module owns: the exception class, the Engine type
 *   memory   pool -> device -> share -> store, which live until the last view of theirs is gone
 *   engine   one streamed model: memory -> timeline -> residents -> offload -> updater -> swap,
 *            then its stream
 *   view     a NumPy array over host memory of the store; keeps the memory, not the engine
 *
 * Threads: everything here runs under Python's lock (GIL) unless a comment says otherwise. The
 *          lock is let go around what may wait; MT_UNLOCKED counts such calls, so that close()
 *          never takes away what another thread is waiting on. A thread that waits may ask for the
 *          GIL (MT_WAITING) under the locks it holds: so none that may be held for longer than a
 *          moment is taken under the GIL.
 * Forks:   in a child of the process that made it an engine refuses every call, and nothing of it
 *          is ever closed: its threads are not there to be waited for, its memory is not there to
 *          be read (forks.h), and its files, locks and device are its owner's.
 * Errors:  mt_raise turns this thread's mt_last_error() into MegatrainError and returns NULL.
 */
#ifndef MT_BIND_H
#define MT_BIND_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../core/forks.h"
#include "../core/home.h"
#include "../core/offload.h"
#include "../core/portion.h"
#include "../core/stream.h"
#include "../core/swap.h"
#include "../core/turn.h"
#include "../core/update.h"
#include "../io/shards.h"
#include "../ops/sumsq.h"

#ifndef Py_LIMITED_API
#error "bind is built against the limited API: one binary for every Python from 3.11 on"
#endif

/* ---- state ---- */

typedef struct mt_state {
    PyObject *error;         /* megatrain_torch._core.MegatrainError */
    PyObject *engine_type;
} mt_state;

/* errors.c */
/* Always NULL; an exception that is set already stays. */
PyObject *mt_raise(PyObject *error, mt_status st);
/* A RuntimeWarning, soon: the watchdog's. From any thread, whatever it holds. */
void mt_warn(const char *text);
PyObject *mt_error_of(PyObject *module);        /* MegatrainError, borrowed */
/* malloc'd [n of the tuple], of items of so many bytes, each made by `from`; or NULL with an
 * exception. */
void *mt_arg_list(PyObject *tuple, size_t bytes, int (*from)(void *arg, PyObject *item, void *out),
                  void *arg);
/* What the main thread asks while it waits: has Ctrl-C been pressed? Others are not asked. */
mt_watch_ask mt_ask_for_signals(void);
/* 0, or -1 with TypeError or OverflowError. */
int mt_arg_int (PyObject *o, int *out);
int mt_arg_addr(PyObject *o, uintptr_t *out);
int mt_arg_tuple(PyObject *o);           /* PyArg_ParseTuple takes nothing else */

/* kernels.c, torch_ops.c: functions of the module */
extern PyMethodDef mt_kernel_methods[];
extern PyMethodDef mt_disk_methods[];    /* engine_disk.c */
extern PyMethodDef mt_walk_methods[];    /* simulate.c */
extern PyMethodDef mt_share_methods[];   /* engine_store.c */
extern PyMethodDef mt_save_methods[];    /* engine_save.c */
extern PyMethodDef mt_relay_methods[];   /* engine_relay.c */
PyObject *mt_py_register_ops(PyObject *module, PyObject *unused);

/* window.c: which weights a thread sees */
PyObject *mt_py_swap_window(PyObject *module, PyObject *window);
PyObject *mt_py_enter (PyObject *module, PyObject *unused);
PyObject *mt_py_leave (PyObject *module, PyObject *unused);
PyObject *mt_py_inside(PyObject *module, PyObject *unused);
PyObject *mt_window_dict_new(void);

/* ---- memory ----
 * Not a Python object on purpose: NumPy cannot show the collector what an array holds, so an array
 * that held the engine would keep the engine's hooks, and through them the model, for good. */

typedef struct mt_memory {
    unsigned  forks;         /* mt_forks() of the process that has the memory */
    long      holders;       /* the engine and the views; under the GIL */
    mt_pool  *pool;
    mt_dev   *dev;
    mt_share *share;         /* NULL: the process is alone */
    mt_store *store;
} mt_memory;

mt_memory *mt_memory_new(void);                   /* one holder; NULL: none is left */
void       mt_memory_let_go (mt_memory *h);       /* the last one frees all; NULL is fine */
int        mt_memory_is_ours(const mt_memory *h); /* 0: this process is a child of its owner */

/* ---- engine ---- */

typedef struct mt_adopted {
    uintptr_t handle;        /* cudaStream_t; 0 on CPU */
    mt_queue *queue;
} mt_adopted;

typedef struct mt_engine {
    PyObject_HEAD
    PyObject   *error;       /* MegatrainError, owned */
    PyObject   *held, *renew;/* bound methods of SlotHooks, owned; NULL before open_slots */
    mt_memory  *memory;      /* one holder of it */
    int         rank, ranks; /* it is one of several owners of every unit, or (1) the only one */
    mt_context  cx;          /* dev, pool, share and store are memory's; all NULL before __init__,
                              * the rest once closed too. through, disk, feed, arrive: as units live
                              * there */
    mt_sumsq   *sums;        /* chunk sums of the D2H queue. NULL once closed, as all below */
    mt_file    *file;        /* NULL before units have their states on disk */
    mt_pool    *disk_pool;   /* its own, so that no update waits for another's turn */
    mt_offload *offload;
    mt_updater *updater;
    mt_swap    *swap;
    mt_file    *swap_file;   /* NULL before what windows keep may go to a file */
    mt_stream  *stream;      /* NULL before open_slots, and after close_slots */
    mt_stream_stats before;  /* of streams that were closed */
    struct mt_saving *saving;/* NULL while nothing is saved: engine_save.c */
    mt_adopted *adopted;     /* [n_adopted] torch's streams, wrapped once each */
    int64_t     adopted_room;
    int         n_adopted;
    mt_mutex    door;        /* offload and update are entered by one thread at a time */
    int         busy;        /* calls that have let go of the GIL */
    int         closed;
} mt_engine;

/* Gradients of at most this many units are alive on the device at once: one leaves while the
 * next one is computed. */
#define GRAD_DEPTH 2

/* engine.c */
PyObject *mt_engine_type_new(PyObject *module);
mt_engine *mt_engine_usable(PyObject *self);            /* NULL and MegatrainError once closed */
/* An engine that is usable, and its method's arguments as PyArg_ParseTuple has them. "O&" with
 * mt_as_unit, &unit: a unit that is there, and mt_as_param, &param behind it: a parameter of that;
 * with mt_as_plane: a plane; with mt_as_queue, &queue: a stream's. NULL with an exception. */
mt_engine *mt_engine_args(PyObject *self, PyObject *args, const char *format, ...);
mt_engine *mt_engine_keys(PyObject *self, PyObject *args, PyObject *kw, char **names,
                          const char *format, ...);
int mt_as_unit (PyObject *o, void *unit);
int mt_as_param(PyObject *o, void *param);
int mt_as_plane(PyObject *o, void *plane);
int mt_as_queue(PyObject *o, void *queue);
PyObject *mt_tuple_of(const size_t *sizes, int n);       /* NULL with an exception */
/* None, or NULL with an exception: that of st, or of a hook. */
PyObject *mt_engine_done(mt_engine *e, mt_status st);
int mt_engine_unit (mt_engine *e, int unit);            /* 0, or -1 with an exception */
int mt_engine_param(mt_engine *e, int unit, int param);
mt_queue *mt_engine_queue(mt_engine *e, uintptr_t handle);   /* NULL with an exception */

/* The same as the declaration of a method's engine: where there is none, the method returns. */
#define MT_ENGINE(e, ...)                                       \
    mt_engine *e = mt_engine_args(self, args, __VA_ARGS__);     \
    if (e == NULL)                                              \
        return NULL
/* Of a method without arguments, or which reads them itself. */
#define MT_USABLE(e)                                            \
    mt_engine *e = mt_engine_usable(self);                      \
    if (e == NULL)                                              \
        return NULL

/* Of one with keywords. */
#define MT_KEYWORDS(e, names, ...)                                          \
    mt_engine *e = mt_engine_keys(self, args, kw, names, __VA_ARGS__);      \
    if (e == NULL)                                                          \
        return NULL

/* Runs `call` without the GIL. `e` outlives it: the caller's argument tuple holds it. */
#define MT_UNLOCKED(e, st, call)          \
    do {                                  \
        (e)->busy++;                      \
        Py_BEGIN_ALLOW_THREADS            \
        (st) = (call);                    \
        Py_END_ALLOW_THREADS              \
        (e)->busy--;                      \
    } while (0)

/* The same of a call that may wait long, and that has changed nothing where it ends with MT_EINTR.
 * What Python does on the signal runs when the call has let go of all it held, and may use the
 * engine; where it does not raise, the call is made again. */
#define MT_WAITING(e, st, call)                             \
    do {                                                    \
        (void)mt_watch_asks(mt_ask_for_signals());          \
        MT_UNLOCKED(e, st, call);                           \
        (void)mt_watch_asks(NULL);                          \
    } while ((st) == MT_EINTR && PyErr_CheckSignals() == 0)

#define METHOD(name, sig, doc)  PyObject *mt_engine_##name(PyObject *self, PyObject *args);
#define NOARGS(name, sig, doc)  METHOD(name, sig, doc)
#define ONE(name, sig, doc)     METHOD(name, sig, doc)
#define FAST(name, sig, doc) \
    PyObject *mt_engine_##name(PyObject *self, PyObject *const *args, Py_ssize_t n);
#define KEYWORD(name, sig, doc) \
    PyObject *mt_engine_##name(PyObject *self, PyObject *args, PyObject *kw);
#include "methods.h"
#undef METHOD
#undef NOARGS
#undef ONE
#undef FAST
#undef KEYWORD

void mt_saving_close(mt_engine *e);      /* engine_save.c: gives up what is not over */

/* ---- view ---- */

/* arrays.c: uint8[bytes] over p, which is the memory's. */
PyObject *mt_view_new(mt_memory *h, void *p, size_t bytes);

#endif
