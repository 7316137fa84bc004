/* arrays.c — the only file that knows NumPy.
 *
 * NumPy is loaded when the first array is asked for, so that importing the module does not need
 * it. A view's base object is a capsule that holds the memory: the memory outlives the engine and
 * is given back when the last array (or tensor made from one) is gone.
 */
#define NPY_NO_DEPRECATED_API NPY_1_25_API_VERSION
#define NPY_TARGET_VERSION    NPY_1_25_API_VERSION
#include "bind.h"
#include <numpy/arrayobject.h>

#define VIEW_NAME "megatrain_torch.view"

/* Runs when the array dies, on whichever thread let it go, under the GIL. */
static void view_end(PyObject *capsule)
{
    mt_memory_let_go(PyCapsule_GetPointer(capsule, VIEW_NAME));
}

/* One holder of the memory. */
static PyObject *view_holder(mt_memory *h)
{
    PyObject *capsule = PyCapsule_New(h, VIEW_NAME, view_end);

    h->holders += capsule != NULL;
    return capsule;
}

PyObject *mt_view_new(mt_memory *h, void *p, size_t bytes)
{
    npy_intp  dim = (npy_intp)bytes;
    PyObject *array, *holder;

    if (PyArray_ImportNumPyAPI() < 0)
        return NULL;
    if ((array = PyArray_SimpleNewFromData(1, &dim, NPY_UINT8, p)) == NULL)
        return NULL;
    if ((holder = view_holder(h)) == NULL)
        goto fail;
    if (PyArray_SetBaseObject((PyArrayObject *)array, holder) < 0)
        goto fail;                       /* it took holder all the same */
    return array;

fail:
    Py_DECREF(array);
    return NULL;
}
