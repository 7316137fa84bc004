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

/* ---- what a module is made of ----
 *
 * megatrain_torch/fused/proof/watch.py notes it, and looks once a pass whether it still is so. Of
 * what can be referred to weakly it keeps a weak reference: nothing is kept alive, and while the
 * reference lives an address is no other object's. */

/* Is this value what was noted: itself, what a weak reference refers to,
 * any dict or list where these types stand? */
static int is_as_noted(PyObject *was, PyObject *value)
{
    if (was == value)
        return 1;
    if (PyWeakref_Check(was))
        return PyWeakref_GetObject(was) == value;
    return (was == (PyObject *)&PyDict_Type && PyDict_Check(value)) ||
           (was == (PyObject *)&PyList_Type && PyList_Check(value));
}

/* Entries in their order: key, value, key, value ... */
static int same_entries(PyObject *dict, PyObject *before)
{
    PyObject  *key, *value;
    Py_ssize_t at = 0, n = 0;

    if (2 * PyDict_Size(dict) != PyTuple_Size(before))
        return 0;
    for (; PyDict_Next(dict, &at, &key, &value); n += 2)
        if (!is_as_noted(PyTuple_GetItem(before, n), key) ||
            !is_as_noted(PyTuple_GetItem(before, n + 1), value))
            return 0;
    return 1;
}

static int same_items(PyObject *list, PyObject *before)
{
    if (PyList_Size(list) != PyTuple_Size(before))
        return 0;
    for (Py_ssize_t i = 0; i < PyList_Size(list); i++)
        if (!is_as_noted(PyTuple_GetItem(before, i), PyList_GetItem(list, i)))
            return 0;
    return 1;
}

/* Is the owner alive, of its class, and what lies by this name in its __dict__, or that itself,
 * as it was? */
static int same_part(PyObject *owner, PyObject *type, PyObject *name, PyObject *before)
{
    PyObject *own, *value;
    int       same = 0;

    if (owner == Py_None || (PyObject *)Py_TYPE(owner) != type ||
        (own = PyObject_GenericGetDict(owner, NULL)) == NULL)
        return 0;
    value = name == Py_None ? own : PyDict_GetItemWithError(own, name);
    if (value != NULL && PyDict_Check(value))
        same = same_entries(value, before);
    else if (value != NULL && PyList_Check(value))
        same = same_items(value, before);
    Py_DECREF(own);
    return same;
}

PyObject *mt_py_changed(PyObject *module, PyObject *args)
{
    PyObject  *parts, *ref, *type, *name, *before;
    Py_ssize_t begin;

    (void)module;
    if (!PyArg_ParseTuple(args, "O!n:changed", &PyList_Type, &parts, &begin))
        return NULL;
    for (Py_ssize_t i = begin; i < PyList_Size(parts); i++) {
        if (!PyArg_ParseTuple(PyList_GetItem(parts, i), "OOOO!:changed", &ref, &type, &name,
                              &PyTuple_Type, &before))
            return NULL;
        if (!same_part(PyWeakref_GetObject(ref), type, name, before)) {
            if (PyErr_Occurred())
                return NULL;
            return PyLong_FromSsize_t(i);
        }
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
