/* torch_ops.c — torch.ops.megatrain.*, registered from C through libtorch's stable shim.
 *
 * One table says what there is: name, arguments, schema. An argument string has a letter each:
 *   T tensor, read   W tensor, written   ? tensor or None, written   f float (C double)   i int64
 * Kernels see plain views of memory. Shapes for tracing (fake kernels) are registered in Python:
 * sumsq gives x.new_empty((), dtype=float64), adamw_ gives nothing.
 *
 * Threads: kernels run on whichever thread calls the op; torch lets the GIL go before.
 * Errors:  a kernel returns mt_status; box() lets go of its arguments and raises through
 *          aoti_torch_check, a C++ exception that passes this file's frames: it is compiled with
 *          -fexceptions. Python sees RuntimeError with the core's message.
 */
#include "bind.h"
#include "torch_shim.h"
#include "../optim/adam.h"
#ifdef MT_WITH_CUDA
#include "../ops/sumsq_cuda.h"
#endif
#include <dlfcn.h>
#include <math.h>
#include <string.h>

#define MAX_ARGS 16

/* Written once, under the GIL, before any kernel can run; read by kernels. */
static mt_shim shim;
static int     registered;

/* ---- arguments ---- */

typedef struct op_tensor {
    AtenTensorHandle handle;     /* owned by box(); NULL: None */
    void            *data;       /* for 'T': not to be written */
    int64_t          n;
    int              dtype;      /* mt_dtype; -1: one we have no name for */
    int32_t          device_type, device_index;
} op_tensor;

typedef union op_arg {
    op_tensor t;
    double    f;
    int64_t   i;
} op_arg;

typedef mt_status (*op_kernel)(const op_arg *arg, StableIValue *result);

typedef struct op {
    const char *name;
    const char *args;            /* letters, see above */
    const char *schema;
} op;

static int dtype_of(int32_t torch_dtype)
{
    if (torch_dtype == shim.aoti_torch_dtype_float32())
        return MT_F32;
    if (torch_dtype == shim.aoti_torch_dtype_bfloat16())
        return MT_BF16;
    if (torch_dtype == shim.aoti_torch_dtype_float16())
        return MT_F16;
    if (torch_dtype == shim.aoti_torch_dtype_float64())
        return MT_F64;
    return torch_dtype == shim.aoti_torch_dtype_int16() ? MT_I16 : -1;
}

static mt_status tensor_view(const op *o, int i, op_tensor *t)
{
    const void *read = NULL;
    int32_t     dtype;
    bool        dense;

    if (shim.aoti_torch_get_numel(t->handle, &t->n) ||
        shim.aoti_torch_get_dtype(t->handle, &dtype) ||
        shim.aoti_torch_get_device_type(t->handle, &t->device_type) ||
        shim.aoti_torch_get_device_index(t->handle, &t->device_index) ||
        shim.aoti_torch_is_contiguous(t->handle, &dense))
        return MT_FAIL(MT_EINVAL, "%s: argument %d is no ordinary tensor", o->name, i);
    if (!dense)
        return MT_FAIL(MT_EINVAL, "%s: argument %d is not contiguous; pass x.contiguous()",
                       o->name, i);
    /* Asking to write makes a lazy copy real; asking to read leaves it shared. */
    if (o->args[i] == 'T' ? shim.torch_get_const_data_ptr(t->handle, &read)
                          : shim.torch_get_mutable_data_ptr(t->handle, &t->data))
        return MT_FAIL(MT_EINVAL, "%s: argument %d has no memory", o->name, i);
    if (o->args[i] == 'T')
        t->data = (void *)(uintptr_t)read;
    t->dtype = dtype_of(dtype);
    return MT_OK;
}

/* ---- kernels ---- */

static int threads_for(int64_t n)
{
    uint32_t threads = 1;

    if (n >= 1 << 20 && shim.torch_get_num_threads(&threads) != 0)
        threads = 1;
    return threads < 1 ? 1 : (int)threads;
}

/* fp64 [n] on x's device, or a scalar when n < 0. */
static mt_status new_f64(const op_tensor *x, int64_t n, AtenTensorHandle *out, void **data)
{
    int64_t one = 1;

    if (shim.aoti_torch_empty_strided(n < 0 ? 0 : 1, &n, &one, shim.aoti_torch_dtype_float64(),
                                      x->device_type, x->device_index, out))
        return MT_FAIL(MT_ENOMEM, "no memory for %lld fp64 numbers", (long long)(n < 0 ? 1 : n));
    if (shim.torch_get_mutable_data_ptr(*out, data) == 0)
        return MT_OK;
    shim.aoti_torch_delete_tensor_object(*out);
    return MT_FAIL(MT_ENOMEM, "a new tensor has no memory");
}

static mt_status sumsq_dtype(const op_tensor *x)
{
    if (x->dtype >= MT_F32 && x->dtype <= MT_F64)
        return MT_OK;
    return MT_FAIL(MT_EINVAL, "sumsq: x must be float32, bfloat16, float16 or float64");
}

/* x [n] any shape -> fp64 scalar, in the order of ops/sumsq.h. */
static mt_status cpu_sumsq(const op_arg *a, StableIValue *result)
{
    const op_tensor *x = &a[0].t;
    AtenTensorHandle out;
    mt_pool         *pool = NULL;
    void            *sum;
    mt_status        st;

    MT_TRY(sumsq_dtype(x));
    if (threads_for(x->n) > 1)
        MT_TRY(mt_pool_open(threads_for(x->n), &pool));
    MT_TRY(new_f64(x, -1, &out, &sum));
    *(double *)sum = mt_sumsq_host(pool, (mt_dtype)x->dtype, x->data, x->n);
    *result = (StableIValue)(uintptr_t)out;
fail:
    mt_pool_close(pool);
    return st;
}

#ifdef MT_WITH_CUDA
/* Chunk sums are torch's memory, freed at once: it is handed out again in the stream's order. */
static mt_status sumsq_on_stream(const op_tensor *x, void *sum)
{
    AtenTensorHandle scratch;
    void            *sums, *stream;
    const char      *error;
    mt_status        st;

    if (shim.aoti_torch_get_current_cuda_stream(x->device_index, &stream))
        return MT_FAIL(MT_EDEVICE, "sumsq: no current stream on cuda:%d", x->device_index);
    MT_TRY(new_f64(x, x->n / MT_SUMSQ_CHUNK + 1, &scratch, &sums));
    error = mt__sumsq_cuda((uintptr_t)stream, (mt_dtype)x->dtype, x->data, x->n, sums, sum);
    shim.aoti_torch_delete_tensor_object(scratch);
    if (error != NULL)
        return MT_FAIL(MT_EDEVICE, "sumsq on cuda:%d: %s", x->device_index, error);
fail:
    return st;
}

static mt_status cuda_sumsq(const op_arg *a, StableIValue *result)
{
    const op_tensor *x = &a[0].t;
    CUDAGuardHandle  guard = NULL;
    AtenTensorHandle out = NULL;
    void            *sum;
    mt_status        st;

    MT_TRY(sumsq_dtype(x));
    if (shim.aoti_torch_create_cuda_guard(x->device_index, &guard))
        return MT_FAIL(MT_EDEVICE, "sumsq: cannot switch to cuda:%d", x->device_index);
    MT_TRY(new_f64(x, -1, &out, &sum));
    MT_TRY(sumsq_on_stream(x, sum));
    *result = (StableIValue)(uintptr_t)out;
    out = NULL;
fail:
    if (out != NULL)
        shim.aoti_torch_delete_tensor_object(out);
    if (guard != NULL)
        shim.aoti_torch_delete_cuda_guard(guard);
    return st;
}
#endif

/* Planes must agree before memory is touched; checks of numbers are mt_adam_step's. */
static mt_status adamw_planes(const op_arg *a)
{
    static const char *const names[] = { "hi", "lo", "m", "v", "grad" };
    const op_tensor *hi = &a[0].t;
    int wanted[] = { hi->dtype, MT_I16, MT_F32, MT_F32, -1 };

    if (hi->dtype != MT_F32 && hi->dtype != MT_BF16)
        return MT_FAIL(MT_EINVAL, "adamw_: hi must be float32 or bfloat16; float16 needs a master: "
                       "use megatrain_torch.AdamW");
    if ((hi->dtype == MT_BF16) != (a[1].t.handle != NULL))
        return MT_FAIL(MT_EINVAL, "adamw_: lo goes with a bfloat16 hi, and only with that");
    for (int i = 1; i < 5; i++) {
        const op_tensor *t = &a[i].t;

        if (t->handle == NULL)
            continue;
        if (t->n != hi->n)
            return MT_FAIL(MT_EINVAL, "adamw_: %s has %lld elements, hi has %lld", names[i],
                           (long long)t->n, (long long)hi->n);
        if (wanted[i] >= 0 ? t->dtype != wanted[i] : t->dtype != hi->dtype && t->dtype != MT_F32)
            return MT_FAIL(MT_EINVAL, "adamw_: %s has the wrong dtype (lo int16, m and v float32, "
                           "grad float32 or hi's)", names[i]);
    }
    return MT_OK;
}

static mt_status cpu_adamw_(const op_arg *a, StableIValue *result)
{
    mt_pool       *pool = NULL;
    mt_status      st;
    mt_adam_tensor t = {
        .dtype = (mt_dtype)a[0].t.dtype, .n = a[0].t.n, .hi = a[0].t.data, .lo = a[1].t.data,
        .m = a[2].t.data, .v = a[3].t.data, .grad = a[4].t.data,
        .grad_dtype = (mt_dtype)a[4].t.dtype,
        .hyper = { .lr = a[5].f, .beta1 = a[6].f, .beta2 = a[7].f, .eps = a[8].f,
                   .weight_decay = a[9].f, .step = a[10].i },
    };

    (void)result;
    MT_TRY(adamw_planes(a));
    if (t.n == 0)
        return MT_OK;
    if (threads_for(t.n) > 1)
        MT_TRY(mt_pool_open(threads_for(t.n), &pool));
    MT_TRY(mt_adam_step(pool, &t, 1, (float)a[11].f, mt_isa_best()));
fail:
    mt_pool_close(pool);
    return st;
}

/* ---- the table ---- */

/* name, arguments, schema: one line per op, one kernel per line in the list of its device. */
#define OP_MAP(X)                                                                             \
    X(sumsq, "T", "sumsq(Tensor x) -> Tensor")                                                \
    X(adamw_, "W?WWTfffffif",                                                                 \
      "adamw_(Tensor(a!) hi, Tensor(b!)? lo, Tensor(c!) m, Tensor(d!) v, Tensor grad, "       \
      "float lr, float beta1, float beta2, float eps, float weight_decay, int step, "         \
      "float clip) -> ()")
#define CPU_MAP(X)  X(sumsq) X(adamw_)
#define CUDA_MAP(X) X(sumsq)

#define OP_ROW(name, args, schema) static const op op_##name = { #name, args, schema };
OP_MAP(OP_ROW)
#undef OP_ROW

/* ---- boxes ---- */

/* Takes the stack's values over; tensors are ours from here on. */
static void unpack(const op *o, const StableIValue *stack, op_arg *a)
{
    for (int i = 0; o->args[i] != '\0'; i++) {
        StableIValue *slot = (StableIValue *)(uintptr_t)stack[i];

        memset(&a[i], 0, sizeof a[i]);
        switch (o->args[i]) {
        case 'T':
        case 'W':
            a[i].t.handle = (AtenTensorHandle)(uintptr_t)stack[i];
            break;
        case '?':
            if (slot == NULL)
                break;
            a[i].t.handle = (AtenTensorHandle)(uintptr_t)*slot;
            if (shim.torch_delete_stable_ivalue != NULL)
                shim.torch_delete_stable_ivalue(slot);
            else
                shim.operator_delete(slot);
            break;
        case 'f':
            memcpy(&a[i].f, &stack[i], sizeof a[i].f);
            break;
        default:
            memcpy(&a[i].i, &stack[i], sizeof a[i].i);
        }
    }
}

static int is_tensor(char letter) { return letter == 'T' || letter == 'W' || letter == '?'; }

static mt_status view_all(const op *o, op_arg *a)
{
    mt_status st = MT_OK;

    for (int i = 0; o->args[i] != '\0' && st == MT_OK; i++)
        if (is_tensor(o->args[i]) && a[i].t.handle != NULL)
            st = tensor_view(o, i, &a[i].t);
    return st;
}

static void let_go(const op *o, op_arg *a)
{
    for (int i = 0; o->args[i] != '\0'; i++)
        if (is_tensor(o->args[i]) && a[i].t.handle != NULL)
            shim.aoti_torch_delete_tensor_object(a[i].t.handle);
}

static void box(const op *o, op_kernel kernel, StableIValue *stack, uint64_t n_args,
                uint64_t n_returns)
{
    op_arg       a[MAX_ARGS];
    StableIValue result = 0;
    mt_status    st;

    /* torch counts what its schema says; a mismatch is a wrong table, and the stack is not ours. */
    if (n_args != strlen(o->args) || n_returns > 1)
        shim.aoti_torch_check(false, o->name, __FILE__, __LINE__, "schema and kernel differ");
    unpack(o, stack, a);
    st = view_all(o, a);
    if (st == MT_OK)
        st = kernel(a, &result);
    let_go(o, a);
    if (st != MT_OK)
        shim.aoti_torch_check(false, o->name, __FILE__, __LINE__, mt_last_error());
    if (n_returns == 1)
        stack[0] = result;
}

#define BOX(device, name)                                                                     \
    static void box_##device##_##name(StableIValue *s, uint64_t n_args, uint64_t n_returns)   \
    { box(&op_##name, device##_##name, s, n_args, n_returns); }
#define CPU_BOX(name)  BOX(cpu, name)
#define CUDA_BOX(name) BOX(cuda, name)
CPU_MAP(CPU_BOX)
#ifdef MT_WITH_CUDA
CUDA_MAP(CUDA_BOX)
#endif

/* ---- registration ---- */

/* What is missing is named: it says which torch is too old. NULL: all found. */
static const char *shim_find(void *libtorch)
{
#define FIND(ret, name, args) \
    if ((*(void **)(void *)&shim.name = dlsym(libtorch, #name)) == NULL) return #name;
#define TRY_FIND(ret, name, args) *(void **)(void *)&shim.name = dlsym(libtorch, #name);
    MT_SHIM_MAP(FIND)
    MT_SHIM_DELETE_MAP(TRY_FIND)
#undef FIND
#undef TRY_FIND
    *(void **)(void *)&shim.operator_delete = dlsym(libtorch, "_ZdlPv");
    return shim.operator_delete == NULL ? "operator delete" : NULL;
}

/* 1 when this torch has CUDA, and all that our kernels need of it. */
#ifdef MT_WITH_CUDA
static int shim_find_cuda(void)
{
    void *libtorch = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);

    if (libtorch == NULL)
        return 0;
#define FIND(ret, name, args) \
    if ((*(void **)(void *)&shim.name = dlsym(libtorch, #name)) == NULL) return 0;
    MT_SHIM_CUDA_MAP(FIND)
#undef FIND
    return 1;
}
#endif

typedef struct registration {
    const char *name;
    mt_boxed_fn fn;
} registration;

static mt_status define_ops(TorchLibraryHandle *library)
{
    if (shim.aoti_torch_library_init_def("megatrain", __FILE__, __LINE__, library))
        return MT_FAIL(MT_ESTATE, "torch refused the library \"megatrain\": is another loaded?");
#define DEFINE(name, args, schema)                              \
    if (shim.aoti_torch_library_def(*library, schema))          \
        return MT_FAIL(MT_ESTATE, "torch refused the schema %s", schema);
    OP_MAP(DEFINE)
#undef DEFINE
    return MT_OK;
}

static mt_status implement_ops(const char *key, const registration *ops,
                               TorchLibraryHandle *library)
{
    if (shim.aoti_torch_library_init_impl("megatrain", key, __FILE__, __LINE__, library))
        return MT_FAIL(MT_ESTATE, "torch refused kernels for %s", key);
    for (; ops->name != NULL; ops++)
        if (shim.torch_library_impl(*library, ops->name, ops->fn, MT_SHIM_VERSION))
            return MT_FAIL(MT_ESTATE, "torch refused the %s kernel of %s", key, ops->name);
    return MT_OK;
}

/* The library objects live as long as the process: deleting one takes its ops away. */
static mt_status register_all(void)
{
#define CPU_ROW(name)  { #name, box_cpu_##name },
#define CUDA_ROW(name) { #name, box_cuda_##name },
    static const registration cpu[] = { CPU_MAP(CPU_ROW) { NULL, NULL } };
#ifdef MT_WITH_CUDA
    static const registration cuda[] = { CUDA_MAP(CUDA_ROW) { NULL, NULL } };
#endif
    TorchLibraryHandle library[3] = { NULL };
    mt_status          st;

    MT_TRY(define_ops(&library[0]));
    MT_TRY(implement_ops("CPU", cpu, &library[1]));
#ifdef MT_WITH_CUDA
    if (shim_find_cuda())
        MT_TRY(implement_ops("CUDA", cuda, &library[2]));
#endif
    return MT_OK;

fail:
    for (int i = 3; i-- > 0;)
        if (library[i] != NULL)
            shim.aoti_torch_delete_library_object(library[i]);
    return st;
}

static mt_status register_in(void)
{
    void       *libtorch = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY);
    const char *missing;
    mt_status   st;

    if (libtorch == NULL)
        return MT_FAIL(MT_ESTATE, "import torch before register_ops()");
    if ((missing = shim_find(libtorch)) != NULL)
        st = MT_FAIL(MT_ENOTSUP, "this torch has no %s; torch 2.10 or later is needed", missing);
    else
        st = register_all();
    if (st != MT_OK)
        dlclose(libtorch);
    return st;                   /* the handle is kept: kernels call into it */
}

PyObject *mt_py_register_ops(PyObject *module, PyObject *unused)
{
    mt_status st;

    (void)unused;
    if (registered)
        Py_RETURN_NONE;
    if ((st = register_in()) != MT_OK)
        return mt_raise(((mt_state *)PyModule_GetState(module))->error, st);
    registered = 1;
    Py_RETURN_NONE;
}
