/* arrays.c — the only file that knows NumPy.
 *
 * NumPy is loaded when the first array is asked for, so that importing the module does not need
 * it. A view's base object is a capsule that holds the home: the memory outlives the engine and
 * is given back when the last array (or tensor made from one) is gone.
 */
#define NPY_NO_DEPRECATED_API NPY_1_25_API_VERSION
#define NPY_TARGET_VERSION    NPY_1_25_API_VERSION
#include "bind.h"
#include <numpy/arrayobject.h>
#include <stdlib.h>

#define VIEW_NAME "megatrain_torch.view"

typedef struct view {
    mt_home *home;           /* one holder of it */
    int      unit;
    mt_plane plane;
} view;

/* Runs when the array dies, on whichever thread let it go, under the GIL. */
static void view_end(PyObject *capsule)
{
    view *v = PyCapsule_GetPointer(capsule, VIEW_NAME);

    v->home->views[v->unit][v->plane]--;
    mt_home_let_go(v->home);
    free(v);
}

static PyObject *view_holder(mt_home *h, int unit, mt_plane plane)
{
    view     *v = malloc(sizeof *v);
    PyObject *capsule;

    if (v == NULL)
        return PyErr_NoMemory();
    *v = (view){ .home = h, .unit = unit, .plane = plane };
    if ((capsule = PyCapsule_New(v, VIEW_NAME, view_end)) == NULL) {
        free(v);
        return NULL;
    }
    h->holders++;
    h->views[unit][plane]++;
    return capsule;
}

PyObject *mt_view_new(mt_home *h, int unit, mt_plane plane, void *p, size_t bytes)
{
    npy_intp  dim = (npy_intp)bytes;
    PyObject *array, *holder;

    if (PyArray_ImportNumPyAPI() < 0)
        return NULL;
    if ((array = PyArray_SimpleNewFromData(1, &dim, NPY_UINT8, p)) == NULL)
        return NULL;
    if ((holder = view_holder(h, unit, plane)) == NULL)
        goto fail;
    if (PyArray_SetBaseObject((PyArrayObject *)array, holder) < 0)
        goto fail;                       /* it took holder all the same */
    return array;

fail:
    Py_DECREF(array);
    return NULL;
}
