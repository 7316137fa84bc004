/* engine_trace.c — Engine's methods on the timeline: what each queue did when. */
#include "bind.h"
#include <stdlib.h>

PyObject *mt_engine_trace(PyObject *self, PyObject *args)
{
    int        on;

    MT_ENGINE(e, "p:trace", &on);
    return mt_engine_done(e, mt_timeline_on(e->cx.timeline, on));
}

PyObject *mt_engine_timeline(PyObject *self, PyObject *Py_UNUSED(unused))
{
    mt_record *records;
    PyObject  *list;
    int64_t    n;

    MT_USABLE(e);
    if ((records = calloc(MT_TIMELINE_KEPT, sizeof *records)) == NULL)
        return PyErr_NoMemory();
    MT_UNLOCKED(e, n, mt_timeline_read(e->cx.timeline, records, MT_TIMELINE_KEPT));
    list = PyList_New((Py_ssize_t)n);
    for (int64_t i = 0; list != NULL && i < n; i++) {
        const mt_record *r = &records[i];
        PyObject        *tuple = Py_BuildValue("(iiiKKK)", (int)r->lane, (int)r->work, r->unit,
                                               (unsigned long long)r->bytes,
                                               (unsigned long long)r->begin_ns,
                                               (unsigned long long)r->end_ns);

        if (tuple == NULL || PyList_SetItem(list, (Py_ssize_t)i, tuple) < 0)     /* takes it */
            Py_CLEAR(list);
    }
    free(records);
    return list;
}

PyObject *mt_engine_step_mark(PyObject *self, PyObject *args)
{
    int        number;
    mt_queue  *run;

    MT_ENGINE(e, "iO&:step_mark", &number, mt_as_queue, &run);
    mt_timeline_step(e->cx.timeline, number, run);
    Py_RETURN_NONE;
}

PyObject *mt_engine_compute_begin(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    mt_queue  *run;
    uintptr_t  handle;
    int        unit, work;

    MT_USABLE(e);
    if (n != 3)
        return PyErr_Format(PyExc_TypeError, "compute_begin(unit, work, stream) takes 3 arguments, "
                            "%zd given", n);
    if (mt_arg_int(args[0], &unit) < 0 || mt_arg_int(args[1], &work) < 0 ||
        mt_arg_addr(args[2], &handle) < 0)
        return NULL;
    if ((unit != -1 && mt_engine_unit(e, unit) < 0) ||
        (run = mt_engine_queue(e, handle)) == NULL)
        return NULL;
    if (work < MT_WORK_FORWARD || work > MT_WORK_BACKWARD) {
        PyErr_Format(e->error, "compute_begin: work %d; it is %d (forward), %d (replay) or %d "
                     "(backward)", work, MT_WORK_FORWARD, MT_WORK_REPLAY, MT_WORK_BACKWARD);
        return NULL;
    }
    mt_timeline_enter(e->cx.timeline, (mt_work)work, unit, run);
    Py_RETURN_NONE;
}

/* A span that outlives the call; None where nothing is recorded. */
PyObject *mt_engine_span(PyObject *self, PyObject *args)
{
    mt_queue  *q;
    mt_span    span, *kept;
    int        lane, work, unit;

    MT_ENGINE(e, "iiO&O&:span", &lane, &work, mt_as_unit, &unit, mt_as_queue, &q);
    if ((lane != MT_LANE_EXCHANGE && lane != MT_LANE_GATHER) ||
        (work != MT_WORK_OFFLOAD && work != MT_WORK_FETCH)) {
        PyErr_Format(e->error, "span: work %d on lane %d; it is %d (offload) or %d (fetch) on %d "
                     "(exchange) or %d (gather)", work, lane, MT_WORK_OFFLOAD, MT_WORK_FETCH,
                     MT_LANE_EXCHANGE, MT_LANE_GATHER);
        return NULL;
    }
    mt_timeline_begin(e->cx.timeline, &span, (mt_lane)lane, (mt_work)work, unit, q);
    if (!span.open)
        Py_RETURN_NONE;
    if ((kept = malloc(sizeof *kept)) == NULL)
        return PyErr_NoMemory();
    *kept = span;
    return PyLong_FromVoidPtr(kept);
}

PyObject *mt_engine_span_end(PyObject *self, PyObject *args)
{
    unsigned long long bytes;
    PyObject          *given;
    mt_queue          *q;
    mt_span           *span;

    MT_ENGINE(e, "OKO&:span_end", &given, &bytes, mt_as_queue, &q);
    if (given == Py_None)
        Py_RETURN_NONE;
    if ((span = PyLong_AsVoidPtr(given)) == NULL)
        return NULL;
    mt_timeline_end(e->cx.timeline, span, (uint64_t)bytes, q);
    free(span);
    Py_RETURN_NONE;
}

PyObject *mt_engine_compute_end(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    uintptr_t  handle;
    mt_queue  *run;

    MT_USABLE(e);
    if (n != 1)
        return PyErr_Format(PyExc_TypeError, "compute_end(stream) takes 1 argument, %zd given", n);
    if (mt_arg_addr(args[0], &handle) < 0 || (run = mt_engine_queue(e, handle)) == NULL)
        return NULL;
    mt_timeline_leave(e->cx.timeline, run);
    Py_RETURN_NONE;
}
