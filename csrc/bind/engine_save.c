/* engine_save.c — Engine's methods that write planes to files,
 * and the module's that reads files into memory. */
#include "bind.h"
#include <limits.h>
#include <stdlib.h>
#include <string.h>

/* ---- files from Python -------------------------------------------------------------------- */

typedef struct file_list {
    mt_shard *shards;        /* [n]; paths, extents and sums are malloc'd */
    int       n;
} file_list;

static void files_free(file_list *l)
{
    for (int i = 0; i < l->n && l->shards != NULL; i++) {
        for (size_t k = 0; k < l->shards[i].n_extents; k++)
            free((void *)(uintptr_t)l->shards[i].extents[k].turn);
        free((void *)(uintptr_t)l->shards[i].path);
        free((void *)(uintptr_t)l->shards[i].extents);
        free(l->shards[i].sums);
    }
    free(l->shards);
    *l = (file_list){ 0 };
}

/* (bytes of an element, (n, bytes between two), ...) by dimension:
 * of as many bytes as the extent. */
static mt_turn *turn_from(PyObject *error, PyObject *tuple, unsigned long long bytes)
{
    mt_turn   *t = calloc(1, sizeof *t);
    Py_ssize_t n = PyTuple_Size(tuple);

    if (t == NULL)
        return (mt_turn *)(void *)PyErr_NoMemory();
    t->item = PyLong_AsSize_t(PyTuple_GetItem(tuple, 0));
    for (; t->dims < MT_TURN_DIMS && t->dims + 1 < n && !PyErr_Occurred(); t->dims++) {
        PyObject  *pair = PyTuple_GetItem(tuple, t->dims + 1);
        Py_ssize_t shape, stride;

        if (mt_arg_tuple(pair) < 0 || !PyArg_ParseTuple(pair, "nn:dimension", &shape, &stride) ||
            shape < 1 || stride < 0 || bytes % (unsigned long long)shape != 0)
            break;
        bytes /= (unsigned long long)shape;
        t->shape[t->dims] = (size_t)shape;
        t->stride[t->dims] = (size_t)stride;
    }
    if (!PyErr_Occurred() && (n < 2 || t->dims + 1 != n || t->item == 0 || bytes != t->item))
        PyErr_Format(error, "an extent's dimensions: 1 to %d, of as many bytes as it has",
                     MT_TURN_DIMS);
    if (!PyErr_Occurred())
        return t;
    free(t);
    return NULL;
}

/* (at, address, bytes, unit), and what turn_from takes: inside of the file,
 * and behind the one before. */
static int extent_from(PyObject *error, PyObject *item, const mt_shard *s, uint64_t from,
                       mt_extent *out)
{
    unsigned long long at, address, bytes;
    PyObject          *tuple = NULL;
    mt_turn           *turn = NULL;
    int                unit;

    if (mt_arg_tuple(item) < 0 || !PyArg_ParseTuple(item, "KKKi|O!:extent", &at, &address, &bytes,
                                                    &unit, &PyTuple_Type, &tuple))
        return -1;
    if (bytes == 0 || at < from || at > s->bytes || bytes > s->bytes - at || unit < -1) {
        PyErr_Format(error, "%s: an extent of %llu bytes at %llu of unit %d; the file has %llu, "
                     "and the one before ends at %llu", s->path, bytes, at, unit,
                     (unsigned long long)s->bytes, (unsigned long long)from);
        return -1;
    }
    if (tuple != NULL && (turn = turn_from(error, tuple, bytes)) == NULL)
        return -1;
    *out = (mt_extent){ .at = at, .mem = (void *)(uintptr_t)address, .bytes = (size_t)bytes,
                        .unit = unit, .turn = turn };
    return 0;
}

static int extents_from(PyObject *error, PyObject *list, mt_shard *s)
{
    Py_ssize_t n = PyList_Size(list);
    mt_extent *e;
    uint64_t   from = 0;

    if (n < 0 || (e = calloc((size_t)n + 1, sizeof *e)) == NULL) {
        if (n >= 0)
            PyErr_NoMemory();
        return -1;
    }
    s->extents = e;
    s->n_extents = (size_t)n;
    for (Py_ssize_t i = 0; i < n; i++) {
        if (extent_from(error, PyList_GetItem(list, i), s, from, &e[i]) < 0)
            return -1;
        from = e[i].at + e[i].bytes;
    }
    return 0;
}

/* (path, bytes, extents), and room for its sums. */
static int shard_from(PyObject *error, PyObject *item, mt_shard *s)
{
    const char        *path;
    unsigned long long bytes;
    PyObject          *list;

    if (mt_arg_tuple(item) < 0 || !PyArg_ParseTuple(item, "sKO!:file", &path, &bytes, &PyList_Type,
                                                    &list))
        return -1;
    s->bytes = bytes;
    s->path = strdup(path);
    s->sums = calloc(mt_block_count((size_t)bytes) + 1, sizeof *s->sums);
    if (s->path == NULL || s->sums == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    return extents_from(error, list, s);
}

static int files_from(PyObject *error, PyObject *list, file_list *l)
{
    Py_ssize_t n = PyList_Size(list);

    if (n < 0 || n > INT_MAX)
        return -1;
    if ((l->shards = calloc((size_t)n + 1, sizeof *l->shards)) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (l->n = 0; l->n < (int)n;) {
        mt_shard *s = &l->shards[l->n++];

        if (shard_from(error, PyList_GetItem(list, l->n - 1), s) < 0) {
            files_free(l);
            return -1;
        }
    }
    return 0;
}

/* ---- a save ------------------------------------------------------------------------------- */

/* Between save_begin and save_end. What copiers read is constant. */
typedef struct mt_saving {
    mt_engine *e;
    file_list  files;
    unsigned  *planes;       /* [n_units] of each unit, a bit each; 0: it is not saved */
    size_t    *brings;       /* [n_units] bytes of those that are not in host memory */
    atomic_int *copied;      /* [n_units] in a share: 1 when this rank has, until its copies go */
    int        n_units;
    mt_shards *shards;
} mt_saving;

/* A copier's: what is not in host memory is brought there. */
static mt_status begin_unit(void *arg, int unit)
{
    const mt_saving *g = arg;

    mt_watch_i_am("save");
    return mt_mirror_peek(g->e->cx.store, unit, g->planes[unit]);
}

static void release(const mt_saving *g, int unit)
{
    mt_status st = mt_mirror_release(g->e->cx.store, unit);

    if (st != MT_OK)
        mt_ledger_fault(g->e->cx.store, st, mt_last_error());
}

/* In a share other ranks read them too, until each has copied its part. wait: they will have. */
static void release_copied(const mt_saving *g, int wait)
{
    for (int unit = 0; unit < g->n_units; unit++) {
        int copied = 1;

        if (atomic_load(&g->copied[unit]) == 0 ||
            (wait ? mt_ledger_wait_saved(g->e->cx.store, unit) != MT_OK
                  : !mt_ledger_all_saved(g->e->cx.store, unit)))
            continue;
        if (!atomic_compare_exchange_strong(&g->copied[unit], &copied, 0))
            continue;
        if (mt_mirror_release_apart(g->e->cx.store, unit))
            release(g, unit);
        else
            atomic_store(&g->copied[unit], 1);           /* one has just begun to */
    }
}

/* Copies that were brought go before the unit's next update, which would make them old. */
static void end_unit(void *arg, int unit)
{
    const mt_saving *g = arg;
    int              alone = g->e->cx.share == NULL;

    if (g->planes[unit] == 0)
        return;
    if (alone)
        release(g, unit);
    mt_ledger_save_end(g->e->cx.store, unit);
    if (alone)
        return;
    atomic_store(&g->copied[unit], 1);
    release_copied(g, 0);
}

static int wanted_unit(void *arg)
{
    const mt_saving *g = arg;

    return mt_ledger_wanted(g->e->cx.store);
}

static void saving_free(mt_saving *g)
{
    if (g == NULL)
        return;
    mt_shards_close(g->shards);
    files_free(&g->files);
    free(g->planes);
    free(g->brings);
    free(g->copied);
    free(g);
}

MT_CLOSER(saving_free, mt_saving)

void mt_saving_close(mt_engine *e)
{
    saving_free(e->saving);
    e->saving = NULL;
}

/* Everything under way ends, then all units are announced: what they hold is one step's. */
static mt_status hold(mt_engine *e, const mt_saving *g, int n_units)
{
    int       unit = 0;
    mt_status st;

    MT_TRY(mt_offload_drain(e->offload));
    MT_TRY(mt_update_drain(e->updater));
    for (; unit < n_units; unit++)
        if (g->planes[unit] != 0)
            MT_TRY(mt_ledger_save_begin(e->cx.store, unit));
    return MT_OK;
fail:
    while (unit-- > 0)
        if (g->planes[unit] != 0)
            mt_ledger_save_end(e->cx.store, unit);
    return st;
}

/* When nothing is under way, so that nothing is given back after it was counted. */
static mt_status count_brought(mt_engine *e, mt_saving *g, int n_units)
{
    if ((g->brings = calloc((size_t)n_units + 1, sizeof *g->brings)) == NULL)
        return MT_FAIL(MT_ENOMEM, "save: no memory for %d units", n_units);
    for (int unit = 0; unit < n_units; unit++)
        for (int p = 0; p < MT_PLANE_COUNT; p++)
            if (g->planes[unit] >> p & 1)
                g->brings[unit] += mt_store_reserved(e->cx.store, unit, (mt_plane)p);
    return MT_OK;
}

static mt_status saving_begin(mt_engine *e, mt_saving *g, mt_shards_how how)
{
    MT_DO(count_brought(e, g, how.n_units));
    how.brings = g->brings;
    MT_DO(hold(e, g, how.n_units));
    return mt_shards_write(g->files.shards, g->files.n, how, &g->shards);
}

/* units: [(unit, planes)]; malloc'd, or NULL with an exception. */
static unsigned *planes_from(mt_engine *e, PyObject *list, int n_units)
{
    unsigned  *planes = calloc((size_t)n_units + 1, sizeof *planes);
    Py_ssize_t n = PyList_Size(list);

    if (planes == NULL)
        return (unsigned *)(void *)PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PyList_GetItem(list, i);
        int       unit, mask;

        if (mt_arg_tuple(item) < 0 || !PyArg_ParseTuple(item, "ii:unit", &unit, &mask) ||
            mt_engine_unit(e, unit) < 0) {
            free(planes);
            return NULL;
        }
        planes[unit] = (unsigned)mask;
    }
    return planes;
}

static int units_ok(mt_engine *e, const mt_saving *g, int n_units)
{
    for (int i = 0; i < g->files.n; i++)
        for (size_t k = 0; k < g->files.shards[i].n_extents; k++) {
            int unit = g->files.shards[i].extents[k].unit;

            if (unit >= n_units || (unit >= 0 && g->planes[unit] == 0)) {
                PyErr_Format(e->error, "%s: an extent of unit %d, which is not among those saved",
                             g->files.shards[i].path, unit);
                return -1;
            }
        }
    return 0;
}

PyObject *mt_engine_save_begin(PyObject *self, PyObject *args, PyObject *kw)
{
    static char  *names[] = { "files", "units", "spare", "copiers", "writers", "part", "parts",
                              NULL };
    mt_engine    *e = mt_engine_usable(self);
    PyObject     *files, *units;
    Py_ssize_t    spare;
    mt_shards_how how = { .begin = begin_unit, .end = end_unit, .wanted = wanted_unit,
                          .parts = 1 };
    mt_saving    *g MT_CLOSED(saving_free) = NULL;
    mt_status     st;

    if (e == NULL || !PyArg_ParseTupleAndKeywords(args, kw, "O!O!nii|ii:save_begin", names,
                                                  &PyList_Type, &files, &PyList_Type, &units,
                                                  &spare, &how.n_copiers, &how.n_writers,
                                                  &how.part, &how.parts))
        return NULL;
    if (e->saving != NULL || spare < 0 || how.n_copiers < 1 || how.n_writers < 1 ||
        how.part < 0 || how.part >= how.parts) {
        PyErr_Format(e->error, "save_begin: %s",
                     e->saving != NULL ? "a save is under way; save_end() comes first"
                                       : "spare >= 0, a thread of each kind, and part of parts");
        return NULL;
    }
    if ((g = calloc(1, sizeof *g)) == NULL)
        return PyErr_NoMemory();
    g->e = e;
    how.arg = g;
    how.spare_bytes = (size_t)spare;
    how.n_units = g->n_units = mt_store_units(e->cx.store);
    how.watch = mt_store_watch(e->cx.store);
    if ((g->copied = calloc((size_t)g->n_units + 1, sizeof *g->copied)) == NULL)
        return PyErr_NoMemory();
    if (files_from(e->error, files, &g->files) < 0 ||
        (g->planes = planes_from(e, units, how.n_units)) == NULL ||
        units_ok(e, g, how.n_units) < 0)
        return NULL;
    MT_WAITING(e, st, saving_begin(e, g, how));
    if (st != MT_OK)
        return mt_raise(e->error, st);
    e->saving = MT_KEEP(g);
    Py_RETURN_NONE;
}

static mt_engine *saving_of(PyObject *self)
{
    mt_engine *e = mt_engine_usable(self);

    if (e != NULL && e->saving == NULL) {
        PyErr_SetString(e->error, "nothing is being saved; save_begin() comes first");
        return NULL;
    }
    return e;
}

PyObject *mt_engine_save_wait(PyObject *self, PyObject *args)
{
    mt_engine *e = saving_of(self);
    double     seconds;
    uint64_t   bytes;
    int        over;
    mt_status  st;

    if (e == NULL || !PyArg_ParseTuple(args, "d:save_wait", &seconds))
        return NULL;
    MT_UNLOCKED(e, st, mt_shards_wait(e->saving->shards, seconds, &bytes, &over));
    if (st != MT_OK)
        return mt_raise(e->error, st);
    return Py_BuildValue("(KO)", (unsigned long long)bytes, over ? Py_True : Py_False);
}

static PyObject *sums_of(const mt_saving *g)
{
    PyObject *list = PyList_New(g->files.n);

    for (int i = 0; list != NULL && i < g->files.n; i++) {
        const mt_shard *s = &g->files.shards[i];
        PyObject       *sums = PyBytes_FromStringAndSize((const char *)s->sums, (Py_ssize_t)(
                                   mt_block_count((size_t)s->bytes) * sizeof *s->sums));

        if (sums == NULL || PyList_SetItem(list, i, sums) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static mt_status shards_stop(mt_saving *g)
{
    mt_shards_close(g->shards);
    g->shards = NULL;
    release_copied(g, 1);
    return MT_OK;
}

PyObject *mt_engine_save_end(PyObject *self, PyObject *Py_UNUSED(unused))
{
    mt_engine *e = saving_of(self);
    mt_saving *g MT_CLOSED(saving_free) = NULL;
    mt_status  st;

    if (e == NULL)
        return NULL;
    g = MT_KEEP(e->saving);
    MT_UNLOCKED(e, st, shards_stop(g));
    (void)st;
    return sums_of(g);
}

static mt_status take(mt_engine *e, int unit, mt_queue *run)
{
    void          *of;
    const mt_home *h = mt_store_home(e->cx.store, unit, &of);

    return h->take != NULL ? h->take(of, unit, run) : mt_mirror_evict(e->cx.store, unit);
}

PyObject *mt_engine_take(PyObject *self, PyObject *args)
{
    mt_queue  *run;
    int        unit;
    mt_status  st;

    MT_ENGINE(e, "O&O&:take", mt_as_unit, &unit, mt_as_queue, &run);
    MT_UNLOCKED(e, st, take(e, unit, run));
    return mt_engine_done(e, st);
}

PyObject *mt_engine_wait_saved(PyObject *self, PyObject *args)
{
    int        unit;
    mt_status  st;

    MT_ENGINE(e, "O&:wait_saved", mt_as_unit, &unit);
    MT_WAITING(e, st, mt_ledger_wait_saved(e->cx.store, unit));
    return mt_engine_done(e, st);
}

/* ---- reading ------------------------------------------------------------------------------ */

/* sums: bytes of eight each, or None. */
static int sums_from(PyObject *error, PyObject *sums, mt_shard *s)
{
    char      *data;
    Py_ssize_t n;

    if (sums == Py_None) {
        free(s->sums);
        s->sums = NULL;
        return 0;
    }
    if (PyBytes_AsStringAndSize(sums, &data, &n) < 0)
        return -1;
    if ((size_t)n != mt_block_count((size_t)s->bytes) * sizeof *s->sums) {
        PyErr_Format(error, "%s: sums of %zd bytes; its %llu bytes have %zu blocks", s->path, n,
                     (unsigned long long)s->bytes, mt_block_count((size_t)s->bytes));
        return -1;
    }
    memcpy(s->sums, data, (size_t)n);
    return 0;
}

static PyObject *read_file(PyObject *module, PyObject *args)
{
    PyObject *error = mt_error_of(module), *file, *sums;
    file_list l = { .n = 1 };
    int       threads;
    mt_status st;

    if (!PyArg_ParseTuple(args, "OOi:read_file", &file, &sums, &threads))
        return NULL;
    if ((l.shards = calloc(1, sizeof *l.shards)) == NULL)
        return PyErr_NoMemory();
    if (shard_from(error, file, l.shards) < 0 || sums_from(error, sums, l.shards) < 0) {
        files_free(&l);
        return NULL;
    }
    do {
        (void)mt_watch_asks(mt_ask_for_signals());
        Py_BEGIN_ALLOW_THREADS
        st = mt_shards_read(l.shards, threads, NULL);
        Py_END_ALLOW_THREADS
        (void)mt_watch_asks(NULL);
    } while (st == MT_EINTR && PyErr_CheckSignals() == 0);
    files_free(&l);
    if (st != MT_OK)
        return mt_raise(error, st);
    Py_RETURN_NONE;
}

PyMethodDef mt_save_methods[] = {
    { "read_file", read_file, METH_VARARGS,
      "read_file($module, file, sums, threads, /)\n--\n\n"
      "Fill the memory of a file's extents, and compare the sums of its blocks, unless they are "
      "None." },
    { NULL, NULL, 0, NULL },
};
