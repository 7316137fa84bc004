/* engine_relay.c — what ranks of several machines tell each other, for the threads of Python's
 * that send it and receive it.
 *
 * A relay has the memory, like an array: it may be used until it is let go of, also when the engine
 * is closed, whose last word goes this way. */
#include "bind.h"

#include "../core/relay.h"

#include <stdlib.h>
#include <string.h>

#define RELAY_NAME "megatrain_torch.relay"

typedef struct relay {
    mt_memory *memory;               /* one holder of it */
    mt_relay  *relay;
} relay;

static void relay_end(PyObject *capsule)
{
    relay *r = PyCapsule_GetPointer(capsule, RELAY_NAME);

    if (mt_memory_is_ours(r->memory))
        mt_relay_close(r->relay);
    mt_memory_let_go(r->memory);
    free(r);
}

PyObject *mt_engine_relay(PyObject *self, PyObject *Py_UNUSED(unused))
{
    relay     *r;
    PyObject  *capsule;
    mt_status  st;

    MT_USABLE(e);
    if ((r = calloc(1, sizeof *r)) == NULL)
        return PyErr_NoMemory();
    r->memory = e->memory;
    if ((st = mt_relay_open(e->cx.store, &r->relay)) != MT_OK) {
        free(r);
        return mt_raise(e->error, st);
    }
    if ((capsule = PyCapsule_New(r, RELAY_NAME, relay_end)) == NULL) {
        mt_relay_close(r->relay);
        free(r);
        return NULL;
    }
    e->memory->holders++;
    return capsule;
}

/* It is the model's end: something that others await was not said. */
static PyObject *fail(PyObject *module, const relay *r, mt_status st)
{
    mt_ledger_fault(r->memory->store, st, mt_last_error());
    return mt_raise(mt_error_of(module), st);
}

/* Of the device: (address, bytes). */
static PyObject *bytes_of(const relay *r, const mt_parcel *p, void *mem)
{
    return p->kind == MT_PARCEL_SLOT
         ? Py_BuildValue("(KK)", (unsigned long long)(uintptr_t)mem, (unsigned long long)p->bytes)
         : mt_view_new(r->memory, mem, (size_t)p->bytes);
}

static PyObject *next(PyObject *module, PyObject *args)
{
    PyObject *capsule, *bytes;
    relay    *r;
    mt_parcel p;
    void     *mem = NULL;
    int       ms, to, last, some = 0;
    mt_status st;

    if (!PyArg_ParseTuple(args, "Oi:relay_next", &capsule, &ms) ||
        (r = PyCapsule_GetPointer(capsule, RELAY_NAME)) == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    st = mt_relay_next(r->relay, ms, &p, &mem, &to, &some);
    Py_END_ALLOW_THREADS
    if (st != MT_OK)
        return fail(module, r, st);
    if (!some)
        Py_RETURN_NONE;
    bytes = p.bytes > 0 ? bytes_of(r, &p, mem) : Py_NewRef(Py_None);
    if (bytes == NULL)
        return NULL;
    last = p.kind == MT_PARCEL_NOTE && p.unit < 0 && p.what == MT_COUNT_LEFT;
    return Py_BuildValue("(y#NiN)", (const char *)&p, (Py_ssize_t)sizeof p, bytes, to,
                         PyBool_FromLong(last));
}

/* (relay, rank, parcel), as relay_next gives one. */
static relay *parcel_from(PyObject *module, PyObject *args, const char *format, int *rank,
                          mt_parcel *p)
{
    PyObject   *capsule;
    const char *bytes;
    Py_ssize_t  n;
    relay      *r;

    if (!PyArg_ParseTuple(args, format, &capsule, rank, &bytes, &n) ||
        (r = PyCapsule_GetPointer(capsule, RELAY_NAME)) == NULL)
        return NULL;
    if (n != (Py_ssize_t)sizeof *p)
        return (relay *)(void *)PyErr_Format(mt_error_of(module),
                                             "a parcel has %zu bytes", sizeof *p);
    memcpy(p, bytes, sizeof *p);
    return r;
}

static PyObject *place(PyObject *module, PyObject *args)
{
    mt_parcel p;
    void     *mem = NULL;
    int       rank;
    mt_status st;
    relay    *r = parcel_from(module, args, "Oiy#:relay_place", &rank, &p);

    if (r == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS               /* pages may be made */
    st = mt_relay_place(r->memory->store, rank, &p, &mem);
    Py_END_ALLOW_THREADS
    if (st != MT_OK)
        return fail(module, r, st);
    if (mem == NULL)
        Py_RETURN_NONE;
    return bytes_of(r, &p, mem);
}

static PyObject *ready(PyObject *module, PyObject *args)
{
    mt_parcel p;
    int       rank, is = 0;
    mt_status st;
    relay    *r = parcel_from(module, args, "Oiy#:relay_ready", &rank, &p);

    if (r == NULL)
        return NULL;
    if ((st = mt_relay_ready(r->memory->store, rank, &p, &is)) != MT_OK)
        return fail(module, r, st);
    return PyBool_FromLong(is);
}

static PyObject *come(PyObject *module, PyObject *args)
{
    mt_parcel p;
    int       rank;
    mt_status st;
    relay    *r = parcel_from(module, args, "Oiy#:relay_come", &rank, &p);

    if (r == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS               /* weights may have to come to host memory */
    st = mt_relay_come(r->memory->store, rank, &p);
    Py_END_ALLOW_THREADS
    if (st != MT_OK)
        return fail(module, r, st);
    Py_RETURN_NONE;
}

static PyObject *gone(PyObject *module, PyObject *args)
{
    PyObject *capsule;
    relay    *r;
    int       rank;

    (void)module;
    if (!PyArg_ParseTuple(args, "Oi:relay_gone", &capsule, &rank) ||
        (r = PyCapsule_GetPointer(capsule, RELAY_NAME)) == NULL)
        return NULL;
    if (rank >= 0 && rank < mt_share_ranks(r->memory->share))
        mt_share_gone(r->memory->share, rank);
    Py_RETURN_NONE;
}

PyMethodDef mt_relay_methods[] = {
    { "relay_next", next, METH_VARARGS,
      "relay_next($module, relay, ms, /)\n--\n\n"
      "(parcel, its bytes or None, the rank to whose machine it goes or -1, whether it is the last)"
      " of what this rank said; None: nothing was, for so long. Bytes on the device: (address, "
      "how many)." },
    { "relay_place", place, METH_VARARGS,
      "relay_place($module, relay, rank, parcel, /)\n--\n\n"
      "Where bytes of a rank's parcel go; None: it has none." },
    { "relay_ready", ready, METH_VARARGS,
      "relay_ready($module, relay, rank, parcel, /)\n--\n\n"
      "Whether its bytes may be written yet." },
    { "relay_come", come, METH_VARARGS,
      "relay_come($module, relay, rank, parcel, /)\n--\n\n"
      "They are there." },
    { "relay_gone", gone, METH_VARARGS,
      "relay_gone($module, relay, rank, /)\n--\n\n"
      "Nothing more will come of the rank." },
    { NULL, NULL, 0, NULL },
};
