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
    if (window != Py_None && !PyDict_Check(window))
        return PyErr_Format(PyExc_TypeError, "swap_window(window): a dict or None");
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
