/* simulate.c — walk/walk.h and walk/search.h for Python: arrays come in as buffers of an object's
 * attributes, by the names of the fields, and numbers as numbers.
 *
 * A schedule is bytes, three int32 for each of its steps: kind, unit, slot. Nothing is kept. */
#include "bind.h"
#include "../walk/gaps.h"
#include "../walk/search.h"
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define MOST_BUFFERS 64      /* of one call */

/* What a call reads, until it is over. */
typedef struct views {
    Py_buffer view[MOST_BUFFERS];
    int       n;
    int64_t   length[128];       /* of each dimension, by its letter; -1: nobody said */
} views;

static void views_begin(views *v)
{
    for (size_t i = 0; i < sizeof v->length / sizeof *v->length; i++)
        v->length[i] = -1;
}

static void views_end(views *v)
{
    while (v->n > 0)
        PyBuffer_Release(&v->view[--v->n]);
}

#define VIEWS(v) views v __attribute__((cleanup(views_end))) = { .n = 0 }

/* One dimension of float64 (kind 'd'), int64 ('q') or bytes ('b'). NULL with an exception. *n: its
 * elements. */
static const void *buffer_of(views *v, PyObject *o, const char *name, char kind, int64_t *n)
{
    Py_buffer  *view = &v->view[v->n];
    const char *format;

    if (PyObject_GetBuffer(o, view, PyBUF_ND | PyBUF_FORMAT) < 0)
        return NULL;
    v->n++;
    format = view->format != NULL ? view->format : "B";
    if (view->ndim != 1 || strlen(format) != 1 || view->itemsize != (kind == 'b' ? 1 : 8) ||
        strchr(kind == 'd' ? "d" : kind == 'q' ? "lq" : "B", format[0]) == NULL) {
        PyErr_Format(PyExc_TypeError, "%s: one dimension of %s is expected", name,
                     kind == 'd' ? "float64" : kind == 'q' ? "int64" : "bytes");
        return NULL;
    }
    *n = view->len / view->itemsize;
    return view->buf;
}

/* ---- an object's attributes ---- */

/* dims: letters of an array's dimensions; an array of one that nobody knows says how long that is.
 * "": a number; kind 'n': a number that is this dimension's length; '+': a list of units for each
 * of the dimension behind it. */
typedef struct field {
    const char *name;
    char        kind;
    const char *dims;
    size_t      at;
} field;

#define WALK(name, kind, dims)   { #name, kind, dims, offsetof(mt_walk, name) }
static const field of_walk[] = {
    WALK(forward_s, 'd', "w"), WALK(backward_s, 'd', "w"), WALK(forward_host_s, 'd', "w"),
    WALK(backward_host_s, 'd', "w"), WALK(away, 'q', "w"), WALK(spilled, 'q', "w"),
    WALK(updated_on, 'q', "u"), WALK(weights, 'q', "u"), WALK(gradients, 'q', "u"),
    WALK(visiting, 'q', "u"), WALK(update_s, 'd', "u"), WALK(add_s, 'd', "u"),
    WALK(disk_s, 'd', "u"), WALK(through_s, 'd', "u"), WALK(read_s, 'd', "u"),
    WALK(exchange_s, 'd', "u"), WALK(network_s, 'd', "u"), WALK(lost_s, 'd', "u"),
    WALK(gather_s, 'd', "u"), WALK(held_s, 'd', "u"), WALK(spread_s, 'd', "u"),
    WALK(lowered, 'q', "u"), WALK(raised, 'q', "u"), WALK(lent, 'q', "l"), WALK(slots, 'q', "s"),
    WALK(micro, 'q', ""), WALK(shown, 'q', ""), WALK(depth, 'q', ""), WALK(stagings, 'q', ""),
    WALK(bays, 'q', ""), WALK(ahead, 'q', ""), WALK(stay, 'q', ""), WALK(h2d, 'd', ""),
    WALK(d2h, 'd', ""), WALK(both, 'd', ""), WALK(busy, 'd', ""), WALK(stretch, 'd', ""),
    WALK(write, 'd', ""), WALK(read, 'd', ""), WALK(rest_s, 'd', ""), WALK(parts, 'q', ""),
    WALK(peers, 'd', ""), WALK(on_link, 'q', ""), WALK(memory, 'd', ""), WALK(memory_s, 'd', ""),
    WALK(units, 'q', "+w"), WALK(again, 'q', "+w"), WALK(leaving, 'q', "+w"),
};

#define STEP(name, kind, dims)   { #name, kind, dims, offsetof(mt_search, step.name) }
#define SEARCH(name, kind, dims) { #name, kind, dims, offsetof(mt_search, name) }
static const field of_search[] = {
    SEARCH(kind, 'q', "w"), SEARCH(host_s, 'd', "u"), SEARCH(micro, 'q', "m"),
    SEARCH(cached, 'q', "m"),
    SEARCH(rings, 'q', "r"), SEARCH(several, 'q', "c"), SEARCH(on_disk, 'q', "a"),
    SEARCH(n_kinds, 'n', "k"),
    STEP(weights, 'q', "u"), STEP(gradients, 'q', "u"), STEP(add_s, 'd', "u"),
    STEP(exchange_s, 'd', "u"), STEP(network_s, 'd', "u"), STEP(lost_s, 'd', "u"),
    STEP(gather_s, 'd', "u"), STEP(held_s, 'd', "u"), STEP(spread_s, 'd', "u"),
    STEP(lowered, 'q', "u"), STEP(raised, 'q', "u"), STEP(shown, 'q', ""), STEP(depth, 'q', ""),
    STEP(stagings, 'q', ""), STEP(bays, 'q', ""), STEP(ahead, 'q', ""), STEP(stay, 'q', ""),
    STEP(h2d, 'd', ""), STEP(d2h, 'd', ""), STEP(both, 'd', ""), STEP(busy, 'd', ""),
    STEP(write, 'd', ""), STEP(read, 'd', ""), STEP(rest_s, 'd', ""), STEP(parts, 'q', ""),
    STEP(peers, 'd', ""), STEP(on_link, 'q', ""), STEP(memory, 'd', ""),
    STEP(units, 'q', "+w"), STEP(again, 'q', "+w"), STEP(leaving, 'q', "+w"),
    SEARCH(pool_s, 'd', "u"), SEARCH(passing_s, 'd', "u"), SEARCH(drive_s, 'd', "u"),
    SEARCH(drive_weights_s, 'd', "u"), SEARCH(fetch_s, 'd', "u"), SEARCH(streamed, 'd', "u"),
    SEARCH(settled, 'd', "u"), SEARCH(passing, 'd', "u"), SEARCH(bytes, 'q', "u"),
    SEARCH(states, 'q', "u"), SEARCH(device_s, 'd', "mu"), SEARCH(pieces, 'q', "+u"),
    SEARCH(learns, 'q', "w"), SEARCH(flying, 'q', "w"),
    SEARCH(forward_s, 'd', "mk"), SEARCH(forward_host_s, 'd', "mk"),
    SEARCH(backward_s, 'd', "mka"), SEARCH(backward_host_s, 'd', "mka"),
    SEARCH(kept, 'q', "mka"), SEARCH(work, 'q', "mka"), SEARCH(away, 'q', "mka"),
    SEARCH(is_linked, 'q', "a"), SEARCH(tracks, 'q', "t"), SEARCH(modes, 'b', "x"),
    SEARCH(flags, 'b', "x"), SEARCH(homes, 'b', "cu"), SEARCH(planes, 'q', "c"),
    SEARCH(host, 'q', "c"), SEARCH(room, 'q', "c"), SEARCH(memory_s, 'd', "cm"),
    SEARCH(whole, 'q', ""), SEARCH(spared, 'q', ""), SEARCH(lends, 'q', ""),
    SEARCH(keeps, 'q', ""), SEARCH(early, 'q', ""), SEARCH(padding, 'q', ""),
    SEARCH(most_vram, 'q', ""), SEARCH(most_host, 'q', ""), SEARCH(gpus, 'q', ""),
    SEARCH(cache, 'd', ""), SEARCH(byte_s, 'd', ""), SEARCH(worth, 'd', ""),
};

#define PLACING(name, kind, dims) { #name, kind, dims, offsetof(mt_placing, name) }
static const field of_placing[] = {
    PLACING(n_base, 'n', "b"), PLACING(order, 'q', "o"), PLACING(several, 'q', "v"),
    PLACING(trained, 'q', "u"), PLACING(states, 'q', "u"), PLACING(weights, 'q', "u"),
    PLACING(padding, 'q', "u"), PLACING(files, 'q', "f"), PLACING(base, 'b', "bu"),
    PLACING(lack, 'q', "bv"), PLACING(through, 'q', ""), PLACING(to_disk, 'q', ""),
    PLACING(room, 'q', ""), PLACING(memory, 'q', ""), PLACING(feed, 'q', ""),
    PLACING(keeps, 'q', ""), PLACING(apart, 'q', ""), PLACING(both, 'd', ""),
    PLACING(through_rate, 'd', ""), PLACING(host_rate, 'd', ""),
};
#define COUNT(table) ((int)(sizeof(table) / sizeof *(table)))

static int has_length(const char *name, int64_t n, int64_t want)
{
    if (n == want)
        return 1;
    PyErr_Format(PyExc_ValueError, "%s: %lld elements, %lld are expected", name, (long long)n,
                 (long long)want);
    return 0;
}

static int array_in(views *v, PyObject *o, const field *f, char *out)
{
    int64_t     n = 0, want = 1;
    const void *p = buffer_of(v, o, f->name, f->kind, &n);

    if (PyErr_Occurred())
        return 0;
    memcpy(out, &p, sizeof p);
    if (f->dims[1] == '\0' && v->length[(int)f->dims[0]] < 0)
        v->length[(int)f->dims[0]] = n;
    for (const char *dim = f->dims; *dim != '\0'; dim++)
        want *= v->length[(int)*dim];
    return has_length(f->name, n, want);
}

static int number_in(views *v, PyObject *o, const field *f, char *out)
{
    int64_t n = 0;
    double  d = 0.0;

    if (f->kind == 'd')
        d = PyFloat_AsDouble(o);
    else
        n = PyLong_AsLongLong(o);
    memcpy(out, f->kind == 'd' ? (void *)&d : (void *)&n, 8);
    if (f->kind == 'n')
        v->length[(int)f->dims[0]] = n;
    return !PyErr_Occurred();
}

/* Two buffers: where each window's units begin, and all units. */
static int list_in(views *v, PyObject *pair, const field *f, char *out)
{
    mt_walk_list list = { 0 };
    int64_t      n_begin = 0, n = 0, length = v->length[(int)f->dims[1]];

    if (!PyTuple_Check(pair) || PyTuple_Size(pair) != 2) {
        PyErr_Format(PyExc_TypeError, "%s: (begin, item) is expected", f->name);
        return 0;
    }
    list.begin = buffer_of(v, PyTuple_GetItem(pair, 0), f->name, 'q', &n_begin);
    if (PyErr_Occurred() || !has_length(f->name, n_begin, length + 1))
        return 0;
    list.item = buffer_of(v, PyTuple_GetItem(pair, 1), f->name, 'q', &n);
    memcpy(out, &list, sizeof list);
    return !PyErr_Occurred() && has_length(f->name, n, list.begin[length]);
}

/* 0, or -1 with an exception. */
static int fields_in(views *v, PyObject *o, const field *f, int n, void *out)
{
    for (; n > 0; n--, f++) {
        PyObject *value = PyObject_GetAttrString(o, f->name);
        char     *at = (char *)out + f->at;
        int       good = value != NULL &&
                   (f->dims[0] == '\0' || f->kind == 'n' ? number_in(v, value, f, at)
                    : f->dims[0] == '+' ? list_in(v, value, f, at) : array_in(v, value, f, at));

        Py_XDECREF(value);               /* the view holds it */
        if (!good)
            return -1;
    }
    return 0;
}

static int step_in(views *v, PyObject *step, mt_walk *in)
{
    views_begin(v);
    if (fields_in(v, step, of_walk, COUNT(of_walk), in) < 0)
        return -1;
    in->n_windows = v->length['w'], in->n_units = v->length['u'];
    in->n_lent = v->length['l'], in->n_slots = v->length['s'];
    return 0;
}

static int search_in(views *v, PyObject *o, mt_search *in)
{
    views_begin(v);
    if (fields_in(v, o, of_search, COUNT(of_search), in) < 0)
        return -1;
    in->step.n_windows = v->length['w'], in->step.n_units = v->length['u'];
    in->n_micro = v->length['m'], in->n_rings = v->length['r'], in->n_rows = v->length['c'];
    in->n_modes = v->length['a'];
    if (has_length("tracks", v->length['t'], in->n_micro + 1) &&
        has_length("modes", v->length['x'], in->tracks[in->n_micro] * in->step.n_windows))
        return 0;
    return -1;
}

/* ---- what comes out ---- */

static PyObject *rows_out(const double *row)
{
    PyObject *tuple = PyTuple_New(MT_WALK_ROWS);

    for (Py_ssize_t i = 0; tuple != NULL && i < MT_WALK_ROWS; i++)
        if (PyTuple_SetItem(tuple, i, PyFloat_FromDouble(row[i])) < 0)
            Py_CLEAR(tuple);
    return tuple;
}

static PyObject *events_out(const mt_walk_events *e)
{
    PyObject *list = PyList_New(0), *tuple;

    for (int64_t i = 0; list != NULL && i < e->n; i++) {
        tuple = Py_BuildValue("(LLdd)", (long long)e->event[i].row, (long long)e->event[i].of,
                              e->event[i].begin, e->event[i].end);
        if (tuple == NULL || PyList_Append(list, tuple) < 0)
            Py_CLEAR(list);
        Py_XDECREF(tuple);
    }
    return list;
}

/* Walked once to count events, and once to have them. */
static mt_status walk(const mt_walk *in, const Py_buffer *steps, double than, mt_walk_events *e,
                      mt_walked *out, int *under)
{
    int64_t   n = steps->len / (Py_ssize_t)sizeof(mt_step);
    mt_status st = mt_walk_run(in, steps->buf, n, than, e, out, under);

    if (st != MT_OK || e == NULL || !*under)
        return st;
    if ((e->event = calloc((size_t)e->n + 1, sizeof *e->event)) == NULL)
        return MT_FAIL(MT_ENOMEM, "walk: no memory for %lld events", (long long)e->n);
    e->cap = e->n;
    return mt_walk_run(in, steps->buf, n, than, e, out, under);
}

static PyObject *walked_out(const mt_walked *found, const mt_walk_events *e)
{
    PyObject *busy = rows_out(found->busy), *idle = rows_out(found->idle), *events, *all = NULL;

    events = e != NULL ? events_out(e) : Py_NewRef(Py_None);
    if (busy != NULL && idle != NULL && events != NULL)
        all = Py_BuildValue("(ddOOO)", found->seconds, found->forward_s, busy, idle, events);
    Py_XDECREF(busy);
    Py_XDECREF(idle);
    Py_XDECREF(events);
    return all;
}

static PyObject *py_walk(PyObject *module, PyObject *args)
{
    mt_state      *s = PyModule_GetState(module);
    VIEWS(v);
    mt_walk        in = { 0 };
    mt_walked      found;
    mt_walk_events e = { 0 };
    PyObject      *step, *result = NULL;
    Py_buffer      steps;
    double         than;
    int            told = 0, under = 0;
    mt_status      st;

    if (!PyArg_ParseTuple(args, "Oy*d|p:walk", &step, &steps, &than, &told))
        return NULL;
    if (step_in(&v, step, &in) == 0) {
        st = walk(&in, &steps, than, told ? &e : NULL, &found, &under);
        result = st != MT_OK ? mt_raise(s->error, st)
               : under ? walked_out(&found, told ? &e : NULL) : Py_NewRef(Py_None);
    }
    free(e.event);
    PyBuffer_Release(&steps);
    return result;
}

/* ---- the schedule ---- */

#define SIZE(n, what) ((Py_ssize_t)(n) * (Py_ssize_t)sizeof(what))

static PyObject *py_schedule(PyObject *module, PyObject *step)
{
    mt_state    *s = PyModule_GetState(module);
    VIEWS(v);
    mt_walk      in = { 0 };
    mt_schedule *sch = NULL;
    PyObject    *bytes;
    mt_status    st;

    if (step_in(&v, step, &in) < 0)
        return NULL;
    if ((st = mt_walk_schedule(&in, &sch)) != MT_OK)
        return mt_raise(s->error, st);
    bytes = PyBytes_FromStringAndSize((const char *)sch->steps, SIZE(sch->n, *sch->steps));
    mt_schedule_free(sch);
    return bytes;
}

/* ---- the search ---- */

/* Answers a question about the search that `args` begin with. */
typedef PyObject *answer(mt_state *s, const mt_search *in, PyObject *args);

static PyObject *ask(PyObject *module, PyObject *args, answer *of)
{
    VIEWS(v);
    mt_search in = { 0 };
    PyObject *search = PyTuple_GetItem(args, 0);

    if (search == NULL || search_in(&v, search, &in) < 0)
        return NULL;
    return of(PyModule_GetState(module), &in, args);
}

static PyObject *best_of(mt_state *s, const mt_search *in, PyObject *args)
{
    mt_choice at;
    mt_walked found;
    PyObject *o;
    uint8_t  *modes MT_FREED = malloc((size_t)in->step.n_windows + 1);
    double    than;
    long long most;
    int       any = 0;
    mt_status st;

    if (modes == NULL)
        return PyErr_NoMemory();
    if (!PyArg_ParseTuple(args, "OdL:search_best", &o, &than, &most))
        return NULL;
    st = mt_search_best(in, than, most, &at, modes, &found, &any);
    return st != MT_OK ? mt_raise(s->error, st) : !any ? Py_NewRef(Py_None)
           : Py_BuildValue("(iiiy#N)", at.row, at.ring, at.micro, modes,
                           SIZE(in->step.n_windows, *modes), walked_out(&found, NULL));
}

static PyObject *time_of(mt_state *s, const mt_search *in, PyObject *args)
{
    mt_walked   found;
    PyObject   *o;
    const char *homes, *modes;
    Py_ssize_t  units, windows;
    double      memory_s, than;
    long long   ring;
    int         micro, under = 0;
    mt_status   st;

    if (!PyArg_ParseTuple(args, "Oiy#dLy#d:search_time", &o, &micro, &homes, &units, &memory_s,
                          &ring, &modes, &windows, &than) ||
        !has_length("homes", units, in->step.n_units) ||
        !has_length("modes", windows, in->step.n_windows))
        return NULL;
    st = mt_search_time(in, micro, (const uint8_t *)homes, memory_s, ring, (const uint8_t *)modes,
                        than, &found, &under);
    return st != MT_OK ? mt_raise(s->error, st) : under ? walked_out(&found, NULL)
           : Py_NewRef(Py_None);
}

static PyObject *memory_of(mt_state *s, const mt_search *in, PyObject *args)
{
    mt_memory_of n;
    PyObject    *o;
    const char  *modes;
    Py_ssize_t   windows;
    int          micro;
    mt_status    st;

    if (!PyArg_ParseTuple(args, "Oiy#:search_memory", &o, &micro, &modes, &windows) ||
        !has_length("modes", windows, in->step.n_windows))
        return NULL;
    st = mt_search_memory(in, micro, (const uint8_t *)modes, &n);
    return st != MT_OK ? mt_raise(s->error, st)
           : Py_BuildValue("(LLLLLLL)", (long long)n.kept, (long long)n.work, (long long)n.flying,
                           (long long)n.peak, (long long)n.early, (long long)n.away,
                           (long long)n.spilled);
}

static PyObject *needs_of(mt_state *s, const mt_search *in, PyObject *args)
{
    mt_needs  found;
    int64_t  *spilled MT_FREED = calloc((size_t)(in->n_rows * in->n_micro) + 1, sizeof *spilled);
    mt_status st;

    (void)args;
    if (spilled == NULL)
        return PyErr_NoMemory();
    st = mt_search_needs(in, spilled, &found);
    return st != MT_OK ? mt_raise(s->error, st)
           : Py_BuildValue("(y#LLiii)", (char *)spilled, SIZE(in->n_rows * in->n_micro, *spilled),
                           (long long)found.vram, (long long)found.host, found.least.row,
                           found.least.ring, found.least.micro);
}

static PyObject *track_of(mt_state *s, const mt_search *in, PyObject *args)
{
    mt_track  found;
    size_t    windows = (size_t)in->step.n_windows, most = 4 * windows + 1;
    mt_level *levels MT_FREED = calloc(most, sizeof *levels);
    uint8_t  *modes MT_FREED = calloc(most, windows + 1);
    PyObject *o;
    int       micro, track;
    mt_status st;

    if (levels == NULL || modes == NULL)
        return PyErr_NoMemory();
    if (!PyArg_ParseTuple(args, "Oii:search_track", &o, &micro, &track))
        return NULL;
    st = mt_search_track(in, micro, track, &found, levels, modes);
    return st != MT_OK ? mt_raise(s->error, st)
           : Py_BuildValue("(LLdy#y#)", (long long)found.away, (long long)found.spilled,
                           found.least_s, (char *)levels, SIZE(found.n_levels, *levels),
                           (char *)modes, SIZE(found.n_levels * in->step.n_windows, *modes));
}

static PyObject *bound_of(mt_state *s, const mt_search *in, PyObject *args)
{
    mt_choice at = { 0 };
    PyObject *o;
    double    seconds = 0.0;
    mt_status st;

    if (!PyArg_ParseTuple(args, "Oiiiii:search_bound", &o, &at.row, &at.ring, &at.micro, &at.track,
                          &at.level))
        return NULL;
    st = mt_search_bound(in, &at, &seconds);
    return st != MT_OK ? mt_raise(s->error, st) : PyFloat_FromDouble(seconds);
}

static PyObject *tracks_of(mt_state *s, const mt_search *in, PyObject *args)
{
    size_t    windows = (size_t)in->step.n_windows;
    uint8_t  *modes MT_FREED = malloc(MT_TRACKS_MOST * (windows + 1));
    uint8_t  *flags MT_FREED = malloc(MT_TRACKS_MOST * (windows + 1));
    int64_t  *scratch MT_FREED = malloc((2 * windows + 1) * sizeof *scratch), n;
    PyObject *o;
    long long asked;
    int       micro, files, is_long;

    (void)s;
    if (modes == NULL || flags == NULL || scratch == NULL)
        return PyErr_NoMemory();
    if (!PyArg_ParseTuple(args, "OiLpp:search_tracks", &o, &micro, &asked, &files, &is_long))
        return NULL;
    n = mt_search_tracks(in, micro, asked, files, is_long, modes, flags, scratch);
    return Py_BuildValue("(y#y#)", modes, SIZE(n * in->step.n_windows, *modes), flags,
                         SIZE(n * in->step.n_windows, *flags));
}

#define ASK(what) \
    static PyObject *py_##what(PyObject *module, PyObject *args) { return ask(module, args, what); }
ASK(best_of)
ASK(time_of)
ASK(memory_of)
ASK(needs_of)
ASK(track_of)
ASK(tracks_of)
ASK(bound_of)

static PyObject *py_homes(PyObject *module, PyObject *placing)
{
    VIEWS(v);
    mt_placing in = { 0 };
    uint8_t   *homes MT_FREED = NULL, *several MT_FREED = NULL;
    int64_t   *scratch MT_FREED = NULL, n;
    size_t     most;

    (void)module;
    views_begin(&v);
    if (fields_in(&v, placing, of_placing, COUNT(of_placing), &in) < 0)
        return NULL;
    in.n_units = v.length['u'], in.n_order = v.length['o'], in.n_several = v.length['v'];
    if (!has_length("files", v.length['f'], 2 * in.n_units))
        return NULL;
    most = 4 * (size_t)in.n_base;
    homes = malloc(most * (size_t)in.n_units + 1);
    several = malloc(most + 1);
    scratch = malloc((size_t)(2 * in.n_order + in.n_units + 1) * sizeof *scratch);
    if (homes == NULL || several == NULL || scratch == NULL)
        return PyErr_NoMemory();
    n = mt_search_homes(&in, homes, several, scratch);
    return Py_BuildValue("(y#y#)", homes, SIZE(n * in.n_units, *homes), several, SIZE(n, *several));
}

static PyObject *ints_out(const int64_t *row, Py_ssize_t n)
{
    PyObject *tuple = PyTuple_New(n);

    for (Py_ssize_t i = 0; tuple != NULL && i < n; i++)
        if (PyTuple_SetItem(tuple, i, PyLong_FromLongLong(row[i])) < 0)
            Py_CLEAR(tuple);
    return tuple;
}

static PyObject *py_gaps(PyObject *module, PyObject *args)
{
    Py_buffer slices;
    long long begin, end;
    int64_t   busy[MT_LANE_COUNT], idle[MT_LANE_COUNT + 1];

    (void)module;
    if (!PyArg_ParseTuple(args, "y*LL:gaps", &slices, &begin, &end))
        return NULL;
    mt_gaps(slices.buf, slices.len / (Py_ssize_t)sizeof(mt_slice), begin, end, busy, idle);
    PyBuffer_Release(&slices);
    return Py_BuildValue("(NN)", ints_out(busy, MT_LANE_COUNT), ints_out(idle, MT_LANE_COUNT + 1));
}

static PyObject *py_plan_slots(PyObject *module, PyObject *args)
{
    PyObject  *list, *result;
    long long  ring;
    Py_ssize_t n;
    int64_t   *sizes MT_FREED = NULL, made;

    (void)module;
    if (!PyArg_ParseTuple(args, "O!L:plan_slots", &PyList_Type, &list, &ring))
        return NULL;
    n = PyList_Size(list);
    if ((sizes = malloc(2 * (size_t)n * sizeof *sizes + 1)) == NULL)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n && !PyErr_Occurred(); i++)
        sizes[i] = PyLong_AsLongLong(PyList_GetItem(list, i));
    made = PyErr_Occurred() ? -1 : mt_plan_slots(sizes, n, ring, sizes + n);
    result = made < 0 ? NULL : PyList_New(made);
    for (int64_t i = 0; result != NULL && i < made; i++)
        (void)PyList_SetItem(result, i, PyLong_FromLongLong(sizes[n + i]));
    return result;
}

PyMethodDef mt_walk_methods[] = {
    { "schedule", py_schedule, METH_O,
      "schedule(step, /)\n--\n\n"
      "The list of schedule.h that the engine makes of a step: three int32 for each entry." },
    { "walk", py_walk, METH_VARARGS,
      "walk(step, schedule, than, events=False, /)\n--\n\n"
      "(seconds, forward seconds, busy by row, idle by row, events or None) of a step; None: "
      "`than` seconds or more." },
    { "search_best", py_best_of, METH_VARARGS,
      "search_best(search, than, most, /)\n--\n\n"
      "(row, ring, micro, modes, walked) of least time below `than`, of so many tried; or None." },
    { "search_time", py_time_of, METH_VARARGS,
      "search_time(search, micro, homes, memory_s, ring, modes, than, /)\n--\n\n"
      "As walk(), of one choice." },
    { "search_memory", py_memory_of, METH_VARARGS,
      "search_memory(search, micro, modes, /)\n--\n\n"
      "Bytes of windows: (kept, work, flying) at the peak, that with torch's cache, early, away, "
      "in a file." },
    { "search_needs", py_needs_of, METH_VARARGS,
      "search_needs(search, /)\n--\n\n"
      "(spilled by row and micro, least vram, least host, row, ring and micro that lack least)." },
    { "search_homes", py_homes, METH_O,
      "search_homes(placing, /)\n--\n\n"
      "(homes by row, whether of several micro-batches) that may be chosen." },
    { "search_tracks", py_tracks_of, METH_VARARGS,
      "search_tracks(search, micro, asked, files, is_long, /)\n--\n\n"
      "(modes, flags) of all tracks." },
    { "search_track", py_track_of, METH_VARARGS,
      "search_track(search, micro, track, /)\n--\n\n"
      "(away, spilled, least seconds, levels, modes by level) of one track." },
    { "search_bound", py_bound_of, METH_VARARGS,
      "search_bound(search, row, ring, micro, track, level, /)\n--\n\n"
      "Seconds that a choice's step cannot undercut." },
    { "gaps", py_gaps, METH_VARARGS,
      "gaps(slices, begin, end, /)\n--\n\n"
      "(busy by lane, idle by what compute waited for) of a measured step, in ns." },
    { "plan_slots", py_plan_slots, METH_VARARGS,
      "plan_slots(sizes, ring, /)\n--\n\nBytes of the slots for units of these sizes." },
    { NULL, NULL, 0, NULL },
};
