/* errors.c — from mt_status to MegatrainError, and integers at the door. */
#include "bind.h"
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

PyObject *mt_raise(PyObject *error, mt_status st)
{
    const char *text = mt_last_error();
    PyObject   *message;

    if (PyErr_Occurred())                /* a hook of the caller's raised: that is the cause */
        return NULL;
    if (text[0] == '\0')
        text = mt_status_text(st);
    /* The core cuts long messages, perhaps in the middle of a character. */
    message = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
    if (message != NULL)
        PyErr_SetObject(error, message);
    Py_XDECREF(message);
    return NULL;
}

PyObject *mt_error_of(PyObject *module)
{
    return ((mt_state *)PyModule_GetState(module))->error;
}

static void *warn_main(void *text)
{
    PyGILState_STATE gil;
    PyObject        *message;

    if (Py_IsInitialized()) {
        gil = PyGILState_Ensure();
        message = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
        /* Where warnings are errors there is nobody here who could raise one. */
        if (message == NULL || PyErr_WarnFormat(PyExc_RuntimeWarning, 1, "%U", message) < 0)
            PyErr_WriteUnraisable(NULL);
        Py_XDECREF(message);
        PyGILState_Release(gil);
    }
    free(text);
    return NULL;
}

/* By a thread of its own, which nobody joins:
 * who calls may hold a lock that another thread waits for under the GIL. */
void mt_warn(const char *text)
{
    char     *copy = strdup(text);
    pthread_t thread;

    if (copy == NULL || pthread_create(&thread, NULL, warn_main, copy) != 0)
        free(copy);
    else
        pthread_detach(thread);
}

/* The signal stays what it was: it is for who may raise. */
static int interrupted(void)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    int              yes = PyOS_InterruptOccurred();

    if (yes)
        PyErr_SetInterrupt();
    PyGILState_Release(gil);
    return yes;
}

mt_watch_ask mt_ask_for_signals(void)
{
    return syscall(SYS_gettid) == getpid() ? interrupted : NULL;
}

int mt_arg_int(PyObject *o, int *out)
{
    long v = PyLong_AsLong(o);

    if (v == -1 && PyErr_Occurred())
        return -1;
    if (v < INT_MIN || v > INT_MAX) {
        PyErr_Format(PyExc_OverflowError, "%ld does not fit an int", v);
        return -1;
    }
    *out = (int)v;
    return 0;
}

int mt_arg_addr(PyObject *o, uintptr_t *out)
{
    size_t v = PyLong_AsSize_t(o);

    if (v == (size_t)-1 && PyErr_Occurred())
        return -1;
    *out = (uintptr_t)v;
    return 0;
}

void *mt_arg_list(PyObject *tuple, size_t bytes, int (*from)(void *arg, PyObject *item, void *out),
                  void *arg)
{
    Py_ssize_t n = PyTuple_Size(tuple);
    char      *found = n >= 0 ? calloc((size_t)n + 1, bytes) : NULL;

    if (found == NULL && n >= 0)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n; i++)
        if (from(arg, PyTuple_GetItem(tuple, i), found + (size_t)i * bytes) < 0) {
            free(found);
            return NULL;
        }
    return found;
}

int mt_arg_tuple(PyObject *o)
{
    if (PyTuple_Check(o))
        return 0;
    PyErr_Format(PyExc_TypeError, "a tuple is expected, not %R", (PyObject *)Py_TYPE(o));
    return -1;
}
