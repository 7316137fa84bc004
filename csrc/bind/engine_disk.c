/* engine_disk.c — Engine's methods on units whose states, and weights, are in a file,
 * and the module's on disks. */
#include "bind.h"
#include <limits.h>
#include <stdlib.h>

/* ---- the engine's file ---- */

static int unit_from(void *e, PyObject *o, void *unit)
{
    return mt_arg_int(o, unit) < 0 ? -1 : mt_engine_unit(e, *(int *)unit);
}

typedef struct disk_wish {
    const char        *path;
    unsigned long long limit;   /* bytes; 0: none */
    int                n_buffers, threads;
    Py_ssize_t         bytes;   /* of a buffer */
    int               *units;   /* [n] of which the first n_weights have their weights there too */
    int                n, n_weights;
} disk_wish;

/* AdamW on one core takes states faster than most drives give them; a few keep up with any. */
#define DISK_POOL 4

/* All room is reserved before any state is made. On failure the engine is as it was. */
static mt_status disk_open(mt_engine *e, const disk_wish *w)
{
    int       added = 0;
    mt_file  *file = NULL;
    mt_pool  *pool = NULL;
    mt_disk  *disk = NULL;
    mt_status st;

    MT_TRY(mt_file_open(w->path, w->limit, w->threads, NULL, &file));
    MT_TRY(mt_pool_open(DISK_POOL, &pool));
    MT_TRY(mt_disk_open(&e->cx, mt_file_blocks(file), pool, w->n_buffers, (size_t)w->bytes, &disk));
    for (; added < w->n; added++)
        MT_TRY(mt_disk_add(disk, w->units[added], added < w->n_weights));
    MT_TRY(mt_file_reserve(file, mt_disk_stats_get(disk).need_bytes));
    if (w->n_weights > 0)
        MT_TRY(mt_feed_open(disk, (size_t)w->n_buffers * (size_t)w->bytes));
    e->file = file;
    e->disk_pool = pool;
    return MT_OK;

fail:
    while (added-- > 0)
        /* nothing of it was asked for yet */
        (void)mt_store_move(e->cx.store, w->units[added], &mt_home_ram, NULL);
    mt_disk_close(disk);
    mt_file_close(file);
    mt_pool_close(pool);
    return st;
}

/* A tuple of both sequences, or NULL with an exception; first NULL: none. */
static PyObject *both(PyObject *first, PyObject *second, int *n_first)
{
    PyObject *a = first != NULL ? PySequence_Tuple(first) : PyTuple_New(0),
             *b = PySequence_Tuple(second);
    PyObject *out = a != NULL && b != NULL ? PySequence_Concat(a, b) : NULL;

    *n_first = a != NULL ? (int)PyTuple_Size(a) : 0;
    Py_XDECREF(a);
    Py_XDECREF(b);
    return out;
}

PyObject *mt_engine_disk(PyObject *self, PyObject *args, PyObject *kw)
{
    static char *names[] = { "path", "units", "weights", "limit", "buffers", "buffer_bytes",
                             "threads", NULL };
    mt_engine   *e = mt_engine_usable(self);
    disk_wish    w = { .n_buffers = 8, .bytes = (Py_ssize_t)32 << 20, .threads = 16 };
    PyObject    *units, *weights = NULL, *tuple;
    mt_status    st;

    if (e == NULL || !PyArg_ParseTupleAndKeywords(args, kw, "sO|OKini:disk", names, &w.path, &units,
                                                  &weights, &w.limit, &w.n_buffers, &w.bytes,
                                                  &w.threads))
        return NULL;
    if (e->file != NULL) {
        PyErr_SetString(e->error,
                        "the engine has its file already; all units on disk are named at once");
        return NULL;
    }
    if ((tuple = both(weights, units, &w.n_weights)) == NULL)
        return NULL;
    w.n = (int)PyTuple_Size(tuple);
    w.units = mt_arg_list(tuple, sizeof *w.units, unit_from, e);
    Py_DECREF(tuple);
    if (w.units == NULL)
        return NULL;
    MT_UNLOCKED(e, st, disk_open(e, &w));
    free(w.units);
    return mt_engine_done(e, st);
}

PyObject *mt_engine_disk_file(PyObject *self, PyObject *Py_UNUSED(unused))
{
    mt_file_stats s;
    mt_blocks    *b;

    MT_USABLE(e);
    if (e->cx.disk == NULL)
        Py_RETURN_NONE;
    b = mt_file_blocks(e->file);
    s = mt_file_stats_get(e->file);
    return Py_BuildValue("(sKO)", b->ops->name(b), (unsigned long long)s.bytes,
                         s.direct ? Py_True : Py_False);
}

/* ---- disks ---- */

static PyObject *disk_measure(PyObject *module, PyObject *args, PyObject *kw)
{
    static char       *names[] = { "path", "bytes", "each", "depth", "threads", NULL };
    const char        *path;
    unsigned long long bytes;
    Py_ssize_t         each = (Py_ssize_t)32 << 20;
    int                depth = 8, threads = 16;
    mt_disk_rates      r;
    mt_status          st;

    if (!PyArg_ParseTupleAndKeywords(args, kw, "sK|nii:disk_measure", names, &path, &bytes, &each,
                                     &depth, &threads))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    st = mt_disk_measure(path, bytes, (size_t)each, depth, threads, &r);
    Py_END_ALLOW_THREADS
    if (st != MT_OK)
        return mt_raise(mt_error_of(module), st);
    return Py_BuildValue("{sdsdsdsdsO}", "fresh", r.fresh, "write", r.write, "read", r.read, "both",
                         r.both, "direct", r.direct ? Py_True : Py_False);
}

/* ---- descriptors that no child has ---- */

static PyObject *open_private(PyObject *module, PyObject *args)
{
    const char *path;
    int         flags, fd;

    (void)module;
    if (!PyArg_ParseTuple(args, "si:open_private", &path, &flags))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    fd = mt_forks_open(path, flags, 0666);
    Py_END_ALLOW_THREADS
    return fd >= 0 ? PyLong_FromLong(fd) : PyErr_SetFromErrnoWithFilename(PyExc_OSError, path);
}

static PyObject *close_private(PyObject *module, PyObject *args)
{
    int fd;

    (void)module;
    if (!PyArg_ParseTuple(args, "i:close_private", &fd))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    mt_forks_close(fd);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyMethodDef mt_disk_methods[] = {
    { "open_private", open_private, METH_VARARGS,
      "open_private($module, path, flags, /)\n--\n\n"
      "As os.open; children of fork() do not have the descriptor, nor a share of its lock." },
    { "close_private", close_private, METH_VARARGS,
      "close_private($module, fd, /)\n--\n\n"
      "Of open_private, in the process that opened it; else nothing." },
    { "disk_measure", (PyCFunction)(void (*)(void))disk_measure, METH_VARARGS | METH_KEYWORDS,
      "disk_measure($module, path, bytes, each=33554432, depth=8, threads=16)\n--\n\n"
      "Bytes/s of a disk: fresh, write, read, both together; and whether transfers were direct." },
    { NULL, NULL, 0, NULL },
};
