/* simulate.c — walk/walk.h for Python: arrays come in as buffers of float64 and int64.
 *
 * A schedule is bytes, three int32 for each of its steps: kind, unit, slot. Nothing is kept. */
#include "bind.h"
#include "../walk/walk.h"
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define MOST_BUFFERS 32      /* of one call */

/* What a call reads, until it is over. */
typedef struct views {
    Py_buffer view[MOST_BUFFERS];
    int       n;
} views;

static void views_end(views *v)
{
    while (v->n > 0)
        PyBuffer_Release(&v->view[--v->n]);
}

static int is_of(const Py_buffer *view, char kind)
{
    const char *format = view->format != NULL ? view->format : "B";

    return view->ndim == 1 && view->itemsize == 8 &&
           strlen(format) == 1 && strchr(kind == 'd' ? "d" : "lq", format[0]) != NULL;
}

/* One dimension of float64 (kind 'd') or int64 ('q'). NULL with an exception. *n: its elements. */
static const void *buffer_of(views *v, PyObject *o, const char *name, char kind, int64_t *n)
{
    Py_buffer *view = &v->view[v->n];

    if (PyObject_GetBuffer(o, view, PyBUF_ND | PyBUF_FORMAT) < 0)
        return NULL;
    v->n++;
    if (!is_of(view, kind)) {
        PyErr_Format(PyExc_TypeError, "%s: one dimension of %s is expected", name,
                     kind == 'd' ? "float64" : "int64");
        return NULL;
    }
    *n = view->len / 8;
    return view->buf;
}

/* ---- a step ---- */

/* Whose number of elements an array has. */
enum { BY_WINDOW, BY_UNIT, OF_LENT, OF_SLOTS };

typedef struct array_field {
    const char *name;
    char        kind;
    int         length;
    size_t      at;
} array_field;

#define FIELD(name, kind, length) { #name, kind, length, offsetof(mt_walk, name) }
static const array_field arrays[] = {
    FIELD(forward_s, 'd', BY_WINDOW), FIELD(backward_s, 'd', BY_WINDOW),
    FIELD(forward_host_s, 'd', BY_WINDOW), FIELD(backward_host_s, 'd', BY_WINDOW),
    FIELD(away, 'q', BY_WINDOW), FIELD(spilled, 'q', BY_WINDOW),
    FIELD(updated_on, 'q', BY_UNIT), FIELD(weights, 'q', BY_UNIT), FIELD(gradients, 'q', BY_UNIT),
    FIELD(visiting, 'q', BY_UNIT), FIELD(update_s, 'd', BY_UNIT), FIELD(add_s, 'd', BY_UNIT),
    FIELD(disk_s, 'd', BY_UNIT), FIELD(through_s, 'd', BY_UNIT), FIELD(read_s, 'd', BY_UNIT),
    FIELD(exchange_s, 'd', BY_UNIT), FIELD(network_s, 'd', BY_UNIT), FIELD(lost_s, 'd', BY_UNIT),
    FIELD(gather_s, 'd', BY_UNIT), FIELD(held_s, 'd', BY_UNIT),
    FIELD(spread_s, 'd', BY_UNIT),
    FIELD(lowered, 'q', BY_UNIT), FIELD(raised, 'q', BY_UNIT),
    FIELD(lent, 'q', OF_LENT), FIELD(slots, 'q', OF_SLOTS),
};
static const array_field counts[] = {
    FIELD(micro, 'q', 1), FIELD(shown, 'q', 1), FIELD(depth, 'q', 1), FIELD(stagings, 'q', 1),
    FIELD(bays, 'q', 1), FIELD(ahead, 'q', 1), FIELD(stay, 'q', 1),
    FIELD(h2d, 'd', 1), FIELD(d2h, 'd', 1), FIELD(both, 'd', 1), FIELD(busy, 'd', 1),
    FIELD(stretch, 'd', 1),
    FIELD(write, 'd', 1), FIELD(read, 'd', 1), FIELD(rest_s, 'd', 1),
    FIELD(parts, 'q', 1), FIELD(peers, 'd', 1), FIELD(on_link, 'q', 1),
    FIELD(memory, 'd', 1), FIELD(memory_s, 'd', 1),
};
static const array_field lists[] = {
    FIELD(units, 'q', 0), FIELD(again, 'q', 0), FIELD(leaving, 'q', 0),
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

static int array_in(views *v, PyObject *step, const array_field *f, mt_walk *in)
{
    PyObject   *o = PyObject_GetAttrString(step, f->name);
    const void *p = NULL;
    int64_t    *lengths[] = { &in->n_windows, &in->n_units, &in->n_lent, &in->n_slots };
    int64_t     n = 0, *whole = lengths[f->length];

    if (o != NULL)
        p = buffer_of(v, o, f->name, f->kind, &n);
    Py_XDECREF(o);                       /* the view holds it */
    if (PyErr_Occurred())
        return -1;
    if (*whole < 0)                      /* the first of its length says what that is */
        *whole = n;
    memcpy((char *)in + f->at, &p, sizeof p);
    return has_length(f->name, n, *whole) ? 0 : -1;
}

static int count_in(PyObject *step, const array_field *f, mt_walk *in)
{
    PyObject *o = PyObject_GetAttrString(step, f->name);
    int64_t   n = 0;
    double    d = 0.0;

    if (o == NULL)
        return -1;
    if (f->kind == 'd')
        d = PyFloat_AsDouble(o);
    else
        n = PyLong_AsLongLong(o);
    Py_DECREF(o);
    memcpy((char *)in + f->at, f->kind == 'd' ? (void *)&d : (void *)&n, 8);
    return PyErr_Occurred() ? -1 : 0;
}

/* Two buffers: where each window's units begin, and all units. */
static int list_of(views *v, PyObject *pair, const char *name, int64_t n_windows,
                   mt_walk_list *list)
{
    int64_t n_begin = 0, n = 0;

    if (!PyTuple_Check(pair) || PyTuple_Size(pair) != 2) {
        PyErr_Format(PyExc_TypeError, "%s: (begin, item) is expected", name);
        return -1;
    }
    list->begin = buffer_of(v, PyTuple_GetItem(pair, 0), name, 'q', &n_begin);
    if (PyErr_Occurred() || !has_length(name, n_begin, n_windows + 1))
        return -1;
    list->item = buffer_of(v, PyTuple_GetItem(pair, 1), name, 'q', &n);
    return !PyErr_Occurred() && has_length(name, n, list->begin[n_windows]) ? 0 : -1;
}

static int list_in(views *v, PyObject *step, const array_field *f, mt_walk *in)
{
    PyObject *pair = PyObject_GetAttrString(step, f->name);
    int       bad = pair == NULL ||
              list_of(v, pair, f->name, in->n_windows, (mt_walk_list *)((char *)in + f->at)) < 0;

    Py_XDECREF(pair);
    return bad ? -1 : 0;
}

static int step_in(views *v, PyObject *step, mt_walk *in)
{
    in->n_windows = in->n_units = in->n_lent = in->n_slots = -1;
    for (int i = 0; i < COUNT(arrays); i++)
        if (array_in(v, step, &arrays[i], in) < 0)
            return -1;
    for (int i = 0; i < COUNT(counts); i++)
        if (count_in(step, &counts[i], in) < 0)
            return -1;
    for (int i = 0; i < COUNT(lists); i++)
        if (list_in(v, step, &lists[i], in) < 0)
            return -1;
    return 0;
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
    views          v = { .n = 0 };
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
    views_end(&v);
    PyBuffer_Release(&steps);
    return result;
}

/* ---- the schedule ---- */

static PyObject *py_schedule(PyObject *module, PyObject *step)
{
    mt_state    *s = PyModule_GetState(module);
    views        v = { .n = 0 };
    mt_walk      in = { 0 };
    mt_schedule *sch = NULL;
    PyObject    *bytes = NULL;
    mt_status    st;

    if (step_in(&v, step, &in) == 0) {
        if ((st = mt_walk_schedule(&in, &sch)) != MT_OK)
            mt_raise(s->error, st);
        else
            bytes = PyBytes_FromStringAndSize((const char *)sch->steps,
                                              (Py_ssize_t)(sch->n * (int64_t)sizeof *sch->steps));
    }
    mt_schedule_free(sch);
    views_end(&v);
    return bytes;
}

PyMethodDef mt_walk_methods[] = {
    { "schedule", py_schedule, METH_O,
      "schedule(step, /)\n--\n\n"
      "The list of schedule.h that the engine makes of a step: three int32 for each entry." },
    { "walk", py_walk, METH_VARARGS,
      "walk(step, schedule, than, events=False, /)\n--\n\n"
      "(seconds, forward seconds, busy by row, idle by row, events or None) of a step; None: "
      "`than` seconds or more." },
    { NULL, NULL, 0, NULL },
};
