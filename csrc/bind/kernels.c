/* kernels.c — functions on plain host addresses: for tests, benchmarks, and parameters that are
 * not streamed. Addresses are ints; the caller keeps the memory alive. All run without the GIL. */
#include "bind.h"
#include "../core/arena.h"
#include "../optim/adam.h"
#include <stdlib.h>

#define MOST_PLANES 5     /* that a function here takes */

static const void *address(unsigned long long a) { return (const void *)(uintptr_t)a; }
static void *writable(unsigned long long a) { return (void *)(uintptr_t)a; }

/* A pool for one call; NULL for one thread, which is this one. */
static mt_status pool_for(int threads, mt_pool **out)
{
    *out = NULL;
    if (threads < 1)
        return MT_FAIL(MT_EINVAL, "threads is %d; it must be at least 1", threads);
    return threads == 1 ? MT_OK : mt_pool_open(threads, out);
}

/* ---- AdamW ---- */

static int tensor_of(PyObject *tuple, mt_adam_tensor *out)
{
    mt_adam_tensor     t = { 0 };
    int                dtype, grad_dtype, states = MT_STATES_FP32;
    long long          n, step;
    unsigned long long hi, lo, master, m, v, grad, scale = 0, key = 0;

    if (mt_arg_tuple(tuple) < 0 ||
        !PyArg_ParseTuple(tuple, "iLKKKKKKidddddLp|iKK;a tensor is (dtype, n, hi, lo, master, m, "
                          "v, grad, grad_dtype, lr, beta1, beta2, eps, weight_decay, step, "
                          "maximize, states, scale, key)",
                          &dtype, &n, &hi, &lo, &master, &m, &v, &grad, &grad_dtype,
                          &t.hyper.lr, &t.hyper.beta1, &t.hyper.beta2, &t.hyper.eps,
                          &t.hyper.weight_decay, &step, &t.hyper.maximize, &states, &scale, &key))
        return -1;
    t.dtype = (mt_dtype)dtype;
    t.grad_dtype = (mt_dtype)grad_dtype;
    t.n = n;
    t.hi = writable(hi);
    t.lo = writable(lo);
    t.master = writable(master);
    t.m = writable(m);
    t.v = writable(v);
    t.codes = (mt_adam_codes){ writable(m), writable(v), writable(scale), writable(lo) };
    t.states = (mt_states)states;
    t.key = key;
    t.grad = address(grad);
    t.hyper.step = step;
    *out = t;
    return 0;
}

/* malloc'd [*n], or NULL with an exception. */
static mt_adam_tensor *tensors_of(PyObject *sequence, int *n)
{
    PyObject       *tuple = PySequence_Tuple(sequence);
    Py_ssize_t      count = tuple == NULL ? 0 : PyTuple_Size(tuple);
    mt_adam_tensor *t;

    if (tuple == NULL)
        return NULL;
    if ((t = calloc((size_t)count + 1, sizeof *t)) == NULL)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; t != NULL && i < count; i++)
        if (tensor_of(PyTuple_GetItem(tuple, i), &t[i]) < 0) {
            free(t);
            t = NULL;
        }
    Py_DECREF(tuple);
    *n = (int)count;
    return t;
}

/* traffic: the memory's share of the step instead of the step. */
static mt_status adam_run(const mt_adam_tensor *t, int n, float clip, int threads, int isa,
                          int traffic)
{
    mt_pool  *pool MT_CLOSED(mt_pool_close) = NULL;

    if (isa < 0 || isa >= MT_ISA_COUNT)
        return MT_FAIL(MT_EINVAL, "isa %d: there are 0 to %d", isa, MT_ISA_COUNT - 1);
    MT_DO(pool_for(threads, &pool));
    return traffic ? mt_adam_traffic(pool, t, n, (mt_isa)isa)
                   : mt_adam_step(pool, t, n, clip, (mt_isa)isa);
}

static PyObject *adam_call(PyObject *module, PyObject *sequence, float clip, int threads, int isa,
                           int traffic)
{
    int             n;
    mt_adam_tensor *t = tensors_of(sequence, &n);
    mt_status       st;

    if (t == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    st = adam_run(t, n, clip, threads, isa, traffic);
    Py_END_ALLOW_THREADS
    free(t);
    if (st != MT_OK)
        return mt_raise(mt_error_of(module), st);
    Py_RETURN_NONE;
}

static PyObject *py_adam_step(PyObject *module, PyObject *args, PyObject *kw)
{
    static char *names[] = { "tensors", "clip", "threads", "isa", NULL };
    PyObject    *sequence;
    float        clip;
    int          threads, isa;

    if (!PyArg_ParseTupleAndKeywords(args, kw, "Ofii:adam_step", names, &sequence, &clip, &threads,
                                     &isa))
        return NULL;
    return adam_call(module, sequence, clip, threads, isa, 0);
}

static PyObject *py_adam_traffic(PyObject *module, PyObject *args, PyObject *kw)
{
    static char *names[] = { "tensors", "threads", "isa", NULL };
    PyObject    *sequence;
    int          threads, isa;

    if (!PyArg_ParseTupleAndKeywords(args, kw, "Oii:adam_traffic", names, &sequence, &threads,
                                     &isa))
        return NULL;
    return adam_call(module, sequence, 1.0f, threads, isa, 1);
}

/* ---- sums and splits ---- */

static mt_status sumsq_run(int dtype, const void *x, long long n, int threads, double *out)
{
    mt_pool *pool MT_CLOSED(mt_pool_close) = NULL;

    if (dtype < MT_F32 || dtype > MT_F64)
        return MT_FAIL(MT_EINVAL, "sumsq: dtype %s; F32, BF16, F16 and F64 can be summed",
                       mt_dtype_name((mt_dtype)dtype));
    if (n < 0 || (n > 0 && x == NULL))
        return MT_FAIL(MT_EINVAL, "sumsq: %lld elements at %p", n, x);
    MT_DO(pool_for(threads, &pool));
    *out = mt_sumsq_host(pool, (mt_dtype)dtype, x, n);
    return MT_OK;
}

static PyObject *py_sumsq(PyObject *module, PyObject *args, PyObject *kw)
{
    static char       *names[] = { "dtype", "address", "n", "threads", NULL };
    int                dtype, threads = 1;
    unsigned long long a;
    long long          n;
    double             sum;
    mt_status          st;

    if (!PyArg_ParseTupleAndKeywords(args, kw, "iKL|i:sumsq", names, &dtype, &a, &n, &threads))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    st = sumsq_run(dtype, address(a), n, threads, &sum);
    Py_END_ALLOW_THREADS
    return st == MT_OK ? PyFloat_FromDouble(sum) : mt_raise(mt_error_of(module), st);
}

/* A function of planes of n elements each, given by their addresses. */
typedef struct planes_of {
    const char *name, *format;
    int         n_planes;
    int         low_bytes;  /* what its number of them is where none is given; 0: it takes none */
    void      (*run)(void *const *plane, int64_t n, int low);
} planes_of;

static mt_status planes_check(const planes_of *f, const unsigned long long *a, long long n, int low)
{
    int some = 1;

    for (int i = 0; i < f->n_planes; i++)
        some = some && a[i] != 0;
    if (n < 0 || (n > 0 && !some))
        return MT_FAIL(MT_EINVAL, "%s: %lld elements, planes from %#llx on", f->name, n, a[0]);
    if (f->low_bytes != 0 && low != 1 && low != 2)
        return MT_FAIL(MT_EINVAL, "%s: %d bytes below the weight; there are 1 and 2", f->name, low);
    return MT_OK;
}

static PyObject *planes_call(PyObject *module, PyObject *args, const planes_of *f)
{
    unsigned long long a[MOST_PLANES];
    void              *plane[MOST_PLANES];
    long long          n;
    int                low = f->low_bytes;
    int                ok = f->n_planes == MOST_PLANES
        ? PyArg_ParseTuple(args, f->format, &a[0], &a[1], &a[2], &a[3], &a[4], &n)
        : PyArg_ParseTuple(args, f->format, &a[0], &a[1], &a[2], &n, &low);
    mt_status          st;

    if (!ok)
        return NULL;
    if ((st = planes_check(f, a, n, low)) != MT_OK)
        return mt_raise(mt_error_of(module), st);
    for (int i = 0; i < f->n_planes; i++)
        plane[i] = writable(a[i]);
    Py_BEGIN_ALLOW_THREADS
    f->run(plane, n, low);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static void split_join(void *const *p, int64_t n, int low)
{
    if (low == 1)
        mt_split8_join(p[0], p[1], p[2], n);
    else
        mt_split_join(p[0], p[1], p[2], n);
}

static void split_set(void *const *p, int64_t n, int low)
{
    if (low == 1)
        mt_split8_set(p[0], p[1], p[2], n);
    else
        mt_split_set(p[0], p[1], p[2], n);
}

static void codes_get(void *const *p, int64_t n, int low)
{
    const mt_adam_codes c = { .m = p[0], .v = p[1], .scale = p[2] };

    (void)low;
    mt_codes_get(&c, p[3], p[4], n);
}

static void codes_set(void *const *p, int64_t n, int low)
{
    const mt_adam_codes c = { .m = p[2], .v = p[3], .scale = p[4] };

    (void)low;
    mt_codes_set(p[0], p[1], &c, n);
}

#define PLANES_MAP(X)                                   \
    X(split_join, "KKKL|i:split_join",  3, 2)           \
    X(split_set,  "KKKL|i:split_set",   3, 2)           \
    X(codes_get,  "KKKKKL:codes_get",   5, 0)           \
    X(codes_set,  "KKKKKL:codes_set",   5, 0)
#define PLANES_ENTRY(name, format, n, low)                                          \
    static PyObject *py_##name(PyObject *module, PyObject *args)                    \
    {                                                                               \
        static const planes_of f = { #name, format, n, low, name };                 \
        return planes_call(module, args, &f);                                       \
    }
PLANES_MAP(PLANES_ENTRY)

/* ---- what this build and this processor can do ---- */

static PyObject *isas(void)
{
    PyObject *list = PyList_New(0);

    for (int i = 0; list != NULL && i < MT_ISA_COUNT; i++) {
        PyObject *name;

        if (!mt_isa_runs((mt_isa)i))
            continue;
        name = PyUnicode_FromString(mt_isa_name((mt_isa)i));
        if (name == NULL || PyList_Append(list, name) < 0)
            Py_CLEAR(list);
        Py_XDECREF(name);
    }
    return list;
}

static PyObject *py_build_info(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return Py_BuildValue("{sNsssNsi}", "cuda", PyBool_FromLong(mt_dev_cuda_built()),
                         "isa", mt_isa_name(mt_isa_best()), "isas", isas(),
                         "nodes", mt_nodes_here()->n);
}

#define KEYWORDS(fn) ((PyCFunction)(void (*)(void))(fn))

PyMethodDef mt_kernel_methods[] = {
    { "build_info", py_build_info, METH_NOARGS,
      "build_info()\n--\n\n"
      "{\"cuda\": bool, \"isa\": best, \"isas\": all that run here, \"nodes\": int}" },
    { "adam_step", KEYWORDS(py_adam_step), METH_VARARGS | METH_KEYWORDS,
      "adam_step(tensors, clip, threads, isa)\n--\n\nAdamW on host addresses." },
    { "adam_traffic", KEYWORDS(py_adam_traffic), METH_VARARGS | METH_KEYWORDS,
      "adam_traffic(tensors, threads, isa)\n--\n\n"
      "Reads and writes what adam_step does; what it leaves in the planes has no meaning." },
    { "sumsq", KEYWORDS(py_sumsq), METH_VARARGS | METH_KEYWORDS,
      "sumsq(dtype, address, n, threads=1)\n--\n\n"
      "Sum of squares in fp64, in the order of ops/sumsq.h." },
    { "split_join", py_split_join, METH_VARARGS,
      "split_join(hi, lo, out, n, low=2, /)\n--\n\n"
      "fp32 values of split bf16 weights; low: bytes of lo." },
    { "split_set", py_split_set, METH_VARARGS,
      "split_set(p, hi, lo, n, low=2, /)\n--\n\nSplit fp32 values into hi and lo." },
    { "codes_get", py_codes_get, METH_VARARGS,
      "codes_get(m, v, scale, out_m, out_v, n, /)\n--\n\nfp32 values of moments of 8 bits." },
    { "codes_set", py_codes_set, METH_VARARGS,
      "codes_set(in_m, in_v, m, v, scale, n, /)\n--\n\n"
      "Moments of 8 bits from fp32 values, to nearest." },
    { "register_ops", mt_py_register_ops, METH_NOARGS,
      "register_ops()\n--\n\n"
      "Register torch.ops.megatrain.*; torch must be imported. Idempotent." },
    { "swap_window", mt_py_swap_window, METH_O,
      "swap_window(window, /)\n--\n\n"
      "This thread's open window, {record: slot tensor} or None, from now on; returns the one "
      "before." },
    { "enter", mt_py_enter, METH_NOARGS,
      "enter()\n--\n\nA streamed forward starts in this thread; True when no other is open." },
    { "leave", mt_py_leave, METH_NOARGS, "leave()\n--\n\nThe forward that enter() began is over." },
    { "inside", mt_py_inside, METH_NOARGS,
      "inside()\n--\n\nIs a streamed forward or a window open in this thread?" },
    { NULL, NULL, 0, NULL },
};
