/* engine_swap.c — Engine's methods on tensors that wait in host memory, or in a file.
 * Twice a window and step. */
#include "bind.h"
#include <stdlib.h>

#define NO_WEIGHTS (-2)      /* what run waits for is no unit's weights */

static int part_from(void *Py_UNUSED(unused), PyObject *pair, void *out)
{
    unsigned long long address;
    Py_ssize_t         bytes;

    if (mt_arg_tuple(pair) < 0 ||
        !PyArg_ParseTuple(pair, "Kn;a part is (address, bytes)", &address, &bytes))
        return -1;
    *(mt_swap_part *)out = (mt_swap_part){ (void *)(uintptr_t)address, (size_t)bytes };
    return 0;
}

PyObject *mt_engine_swap_out(PyObject *self, PyObject *args)
{
    mt_swap_part *parts;
    mt_queue     *run;
    PyObject     *tuple;
    uint64_t      bundle = 0;
    int           unit, to_file = 0;
    mt_engine    *e = mt_engine_args(self, args, "O&O!O&|p:swap_out", mt_as_unit, &unit,
                                     &PyTuple_Type, &tuple, mt_as_queue, &run, &to_file);
    mt_status     st;

    if (e == NULL || (parts = mt_arg_list(tuple, sizeof *parts, part_from, NULL)) == NULL)
        return NULL;
    MT_WAITING(e, st, mt_swap_out(e->swap, unit, parts, (int)PyTuple_Size(tuple),
                                   to_file ? MT_SWAP_FILE : MT_SWAP_HOST, run, &bundle));
    free(parts);
    return st == MT_OK ? PyLong_FromUnsignedLongLong(bundle) : mt_raise(e->error, st);
}

PyObject *mt_engine_swap_back(PyObject *self, PyObject *args)
{
    unsigned long long bundle;
    mt_swap_part      *parts;
    mt_queue          *run;
    PyObject          *tuple;
    mt_engine         *e = mt_engine_args(self, args, "KO!O&:swap_back", &bundle, &PyTuple_Type,
                                          &tuple, mt_as_queue, &run);
    mt_status          st;

    if (e == NULL || (parts = mt_arg_list(tuple, sizeof *parts, part_from, NULL)) == NULL)
        return NULL;
    MT_WAITING(e, st, mt_swap_back(e->swap, bundle, parts, (int)PyTuple_Size(tuple), run));
    free(parts);
    return mt_engine_done(e, st);
}

/* left and await: a bundle, and the stream that waits. On the CPU that is the calling thread. */
static PyObject *waited(PyObject *self, PyObject *args,
                        mt_status (*wait)(mt_swap *, uint64_t, mt_queue *))
{
    unsigned long long bundle;
    mt_queue          *run;
    mt_status          st;
    int                waits;

    MT_ENGINE(e, "KO&", &bundle, mt_as_queue, &run);
    waits = mt_timeline_wait(e->cx.timeline, NO_WEIGHTS, run);
    MT_UNLOCKED(e, st, wait(e->swap, bundle, run));
    if (waits)
        mt_timeline_waited(e->cx.timeline, run);
    return mt_engine_done(e, st);
}

PyObject *mt_engine_swap_left(PyObject *self, PyObject *args)
{
    return waited(self, args, mt_swap_left);
}

PyObject *mt_engine_swap_await(PyObject *self, PyObject *args)
{
    return waited(self, args, mt_swap_await);
}

/* Called where a graph dies, which may be after close(). */
PyObject *mt_engine_swap_drop(PyObject *self, PyObject *args)
{
    mt_engine         *e = (mt_engine *)self;
    unsigned long long bundle;
    mt_status          st = MT_OK;

    if (!PyArg_ParseTuple(args, "K:swap_drop", &bundle))
        return NULL;
    if (!e->closed && e->swap != NULL && mt_memory_is_ours(e->memory))
        MT_UNLOCKED(e, st, (mt_swap_drop(e->swap, bundle), MT_OK));
    (void)st;
    Py_RETURN_NONE;
}

PyObject *mt_engine_swap_bytes(PyObject *self, PyObject *Py_UNUSED(unused))
{
    mt_swap_stats stats;

    MT_USABLE(e);
    /* its lock is held while a drive is waited for */
    MT_UNLOCKED(e, stats, mt_swap_stats_get(e->swap));
    return Py_BuildValue("(nn)", (Py_ssize_t)stats.host_bytes, (Py_ssize_t)stats.used_bytes);
}

/* ---- the file ---- */

/* Room for `bytes` is reserved. On failure the engine is as it was. */
static mt_status swap_disk(mt_engine *e, const char *path, uint64_t limit, uint64_t bytes,
                           int bays, int threads)
{
    mt_file  *file MT_CLOSED(mt_file_close) = NULL;

    MT_DO(mt_file_open(path, limit, threads, NULL, &file));
    MT_DO(mt_file_reserve(file, bytes));
    MT_DO(mt_swap_disk(e->swap, mt_file_blocks(file), bays));
    e->swap_file = MT_KEEP(file);
    return MT_OK;
}

PyObject *mt_engine_swap_disk(PyObject *self, PyObject *args, PyObject *kw)
{
    static char       *names[] = { "path", "bytes", "limit", "bays", "threads", NULL };
    const char        *path;
    unsigned long long bytes = 0, limit = 0;
    int                bays = 4, threads = 16;
    mt_status          st;

    MT_KEYWORDS(e, names, "s|KKii:swap_disk", &path, &bytes, &limit, &bays, &threads);
    MT_UNLOCKED(e, st, swap_disk(e, path, limit, bytes, bays, threads));
    return mt_engine_done(e, st);
}

PyObject *mt_engine_swap_file(PyObject *self, PyObject *Py_UNUSED(unused))
{
    mt_swap_stats s;
    mt_blocks    *b;

    MT_USABLE(e);
    if (e->swap_file == NULL)
        Py_RETURN_NONE;
    b = mt_file_blocks(e->swap_file);
    MT_UNLOCKED(e, s, mt_swap_stats_get(e->swap));
    return Py_BuildValue("(sKK)", b->ops->name(b),
                         (unsigned long long)mt_file_stats_get(e->swap_file).bytes,
                         (unsigned long long)s.spill.used_bytes);
}
