/* window.c — which weights a thread sees: the open window, and the dict that reads through it.
 *
 * A module's `_parameters` is read for every weight of every layer, some twenty times a layer, so
 * this is C: a hit costs three dict look-ups.
 *
 * Threads: window and depth belong to the calling thread; backward on CUDA has its own.
 */
#include "bind.h"

static _Thread_local PyObject *open_window;   /* {record: slot tensor}, owned; NULL: none is open */
static _Thread_local long      open_forwards;

/* ---- functions ---- */

static PyObject *owned_or_none(PyObject *o)
{
    return o != NULL ? o : Py_NewRef(Py_None);
}

PyObject *mt_py_swap_window(PyObject *module, PyObject *window)
{
    PyObject *before = open_window;

    (void)module;
    if (window != Py_None && !PyDict_Check(window)) {
        PyErr_SetString(PyExc_TypeError, "swap_window(window): a dict or None");
        return NULL;
    }
    open_window = window == Py_None ? NULL : Py_NewRef(window);
    return owned_or_none(before);
}

PyObject *mt_py_enter(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyBool_FromLong(open_forwards++ == 0 && open_window == NULL);
}

PyObject *mt_py_leave(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    open_forwards--;
    Py_RETURN_NONE;
}

PyObject *mt_py_inside(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyBool_FromLong(open_forwards > 0 || open_window != NULL);
}

/* ---- what a module is made of ---- */

/* Are these entries, in their order, the very objects that `before` has: key, value, key, value ...? */
static int same_entries(PyObject *dict, PyObject *before)
{
    PyObject  *key, *value;
    Py_ssize_t at = 0, n = 0;

    if (2 * PyDict_Size(dict) != PyTuple_Size(before))
        return 0;
    while (PyDict_Next(dict, &at, &key, &value)) {
        if (PyTuple_GetItem(before, n) != key || PyTuple_GetItem(before, n + 1) != value)
            return 0;
        n += 2;
    }
    return 1;
}

static int same_items(PyObject *list, PyObject *before)
{
    if (PyList_Size(list) != PyTuple_Size(before))
        return 0;
    for (Py_ssize_t i = 0; i < PyList_Size(list); i++)
        if (PyList_GetItem(list, i) != PyTuple_GetItem(before, i))
            return 0;
    return 1;
}

static int same(PyObject *place, PyObject *before)
{
    return PyDict_Check(place) ? same_entries(place, before)
                               : PyList_Check(place) && same_items(place, before);
}

/* The number of the first place from `begin` on that holds other objects than it did, or -1. Tuples in `before`
 * keep what was there alive, so that an address is not another object's: objects are compared, not their values. */
PyObject *mt_py_changed(PyObject *module, PyObject *args)
{
    PyObject  *places, *before, *place, *was;
    Py_ssize_t begin;

    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!n:changed", &PyList_Type, &places, &PyList_Type, &before, &begin))
        return NULL;
    if (PyList_Size(places) != PyList_Size(before) || begin < 0) {
        PyErr_SetString(PyExc_ValueError, "changed(places, before, begin): as many tuples as places, begin >= 0");
        return NULL;
    }
    for (Py_ssize_t i = begin; i < PyList_Size(places); i++) {
        place = PyList_GetItem(places, i);
        was = PyList_GetItem(before, i);
        if (!PyTuple_Check(was) || !same(place, was))
            return PyLong_FromSsize_t(i);
    }
    return PyLong_FromLong(-1);
}

/* ---- the dict ---- */

/* self[name]: the window's tensor for the record of that name; without one, what outside(record,
 * parameter) of the subclass says. Names without a record are plain items. */
static PyObject *subscript(PyObject *self, PyObject *name)
{
    PyObject *item = PyDict_GetItemWithError(self, name), *records, *record, *bound = NULL;

    if (item == NULL) {
        if (!PyErr_Occurred())
            PyErr_SetObject(PyExc_KeyError, name);
        return NULL;
    }
    if (item == Py_None)
        return Py_NewRef(item);
    if ((records = PyObject_GetAttrString(self, "records")) == NULL)
        return NULL;
    record = PyDict_Check(records) ? PyDict_GetItemWithError(records, name) : NULL;
    Py_XINCREF(record);
    Py_DECREF(records);
    if (record == NULL)
        return PyErr_Occurred() ? NULL : Py_NewRef(item);
    if (open_window != NULL)
        bound = Py_XNewRef(PyDict_GetItemWithError(open_window, record));
    if (bound == NULL && !PyErr_Occurred())
        bound = PyObject_CallMethod(self, "outside", "OO", record, item);
    Py_DECREF(record);
    return bound;
}

static PyType_Slot dict_slots[] = {
    { Py_mp_subscript, (void *)subscript },
    { Py_tp_doc, (void *)"A dict whose [name] reads through the open window." },
    { 0, NULL },
};

static PyType_Spec dict_spec = {
    .name = "megatrain_torch._core.WindowDict",
    .basicsize = 0,          /* dict's own */
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = dict_slots,
};

PyObject *mt_window_dict_new(void)
{
    return PyType_FromSpecWithBases(&dict_spec, (PyObject *)&PyDict_Type);
}
