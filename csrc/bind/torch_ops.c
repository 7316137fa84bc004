/* torch_ops.c — torch.ops.megatrain.*, registered from C through libtorch's stable shim.
 *
 * The rooms (ops_*.c) say what there is; here is what all share: arguments taken from torch's
 * stack, errors raised, names registered. See ops.h.
 */
#include "bind.h"
#include "ops.h"
#include <dlfcn.h>
#include <string.h>

/* Written once, under the GIL, before any kernel can run; read by kernels. */
static mt_shim shim;
static int     registered;

/* ---- arguments ---- */

static int dtype_of(int32_t torch_dtype)
{
#define IS(name, dt) if (torch_dtype == shim.aoti_torch_dtype_##name()) return dt;
    IS(float32, MT_F32) IS(bfloat16, MT_BF16) IS(float16, MT_F16) IS(float64, MT_F64)
    IS(int64, MT_I64) IS(int32, MT_I32) IS(int16, MT_I16) IS(int8, MT_I8) IS(uint8, MT_U8)
    IS(bool, MT_BOOL) IS(float8_e4m3fn, MT_F8E4M3)
#undef IS
    return -1;
}

static int is_strided(char letter) { return strchr("SsVv", letter) != NULL; }
static int is_read   (char letter) { return strchr("TtSs", letter) != NULL; }
static int is_tensor (char letter) { return strchr("TtWwSsVv", letter) != NULL; }
static int is_option (char letter) { return strchr("twsv", letter) != NULL; }

static mt_status tensor_shape(const mt_op *o, int i, mt_op_tensor *t)
{
    int64_t *sizes, *strides, dim;

    if (shim.aoti_torch_get_dim(t->handle, &dim) || shim.aoti_torch_get_sizes(t->handle, &sizes) ||
        shim.aoti_torch_get_strides(t->handle, &strides))
        return MT_FAIL(MT_EINVAL, "%s: argument %d is no ordinary tensor", o->name, i);
    /* Flat ops (sums, updates) take any shape: only what is asked for must fit. */
    t->dim = dim <= MT_OP_DIMS ? (int)dim : -1;
    for (int d = 0; d < t->dim; d++) {
        t->size[d] = sizes[d];
        t->stride[d] = strides[d];
    }
    return MT_OK;
}

static mt_status tensor_view(const mt_op *o, int i, mt_op_tensor *t)
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
    if (!dense && !is_strided(o->args[i]))
        return MT_FAIL(MT_EINVAL, "%s: argument %d is not contiguous; pass x.contiguous()",
                       o->name, i);
    MT_DO(tensor_shape(o, i, t));
    /* Asking to write makes a lazy copy real; asking to read leaves it shared. */
    if (is_read(o->args[i]) ? shim.torch_get_const_data_ptr(t->handle, &read)
                            : shim.torch_get_mutable_data_ptr(t->handle, &t->data))
        return MT_FAIL(MT_EINVAL, "%s: argument %d has no memory", o->name, i);
    if (is_read(o->args[i]))
        t->data = (void *)(uintptr_t)read;
    t->dtype = dtype_of(dtype);
    return MT_OK;
}

/* ---- what kernels ask for ---- */

mt_status mt_op_pool(int64_t n, mt_pool **out)
{
    uint32_t threads = 1;

    *out = NULL;
    if (n < 1 << 18 || shim.torch_get_num_threads(&threads) != 0 || threads < 2)
        return MT_OK;
    return mt_pool_open((int)threads, out);
}

static int32_t torch_dtype(mt_dtype dt)
{
    switch (dt) {
    case MT_F64: return shim.aoti_torch_dtype_float64();
    case MT_I32: return shim.aoti_torch_dtype_int32();
    case MT_U8:  return shim.aoti_torch_dtype_uint8();
    default:     return shim.aoti_torch_dtype_float32();
    }
}

mt_status mt_op_new(const mt_op_tensor *x, mt_dtype dt, int64_t n, AtenTensorHandle *out,
                    void **data)
{
    int64_t one = 1;

    if (shim.aoti_torch_empty_strided(n < 0 ? 0 : 1, &n, &one, torch_dtype(dt), x->device_type,
                                      x->device_index, out))
        return MT_FAIL(MT_ENOMEM, "no memory for %lld numbers (%s)", (long long)(n < 0 ? 1 : n),
                       mt_dtype_name(dt));
    if (shim.torch_get_mutable_data_ptr(*out, data) == 0)
        return MT_OK;
    mt_op_free(*out);
    *out = NULL;
    return MT_FAIL(MT_ENOMEM, "a new tensor has no memory");
}

void mt_op_free(AtenTensorHandle t)
{
    if (t != NULL)
        shim.aoti_torch_delete_tensor_object(t);
}

/* ---- boxes ---- */

/* Takes the stack's values over; tensors are ours from here on. */
static void unpack(const mt_op *o, const StableIValue *stack, mt_op_arg *a)
{
    for (int i = 0; o->args[i] != '\0'; i++) {
        StableIValue *slot = (StableIValue *)(uintptr_t)stack[i];

        memset(&a[i], 0, sizeof a[i]);
        if (is_option(o->args[i])) {
            if (slot == NULL)
                continue;
            a[i].t.handle = (AtenTensorHandle)(uintptr_t)*slot;
            if (shim.torch_delete_stable_ivalue != NULL)
                shim.torch_delete_stable_ivalue(slot);
            else
                shim.operator_delete(slot);
        } else if (is_tensor(o->args[i])) {
            a[i].t.handle = (AtenTensorHandle)(uintptr_t)stack[i];
        } else if (o->args[i] == 'f') {
            memcpy(&a[i].f, &stack[i], sizeof a[i].f);
        } else {
            memcpy(&a[i].i, &stack[i], sizeof a[i].i);
        }
    }
}

/* All on one device: a stray host tensor would be read as device memory. */
static mt_status view_all(const mt_op *o, mt_op_arg *a, mt_op_call *c)
{
    const mt_op_tensor *first = NULL;

    for (int i = 0; o->args[i] != '\0'; i++) {
        if (!is_tensor(o->args[i]) || a[i].t.handle == NULL)
            continue;
        MT_DO(tensor_view(o, i, &a[i].t));
        if (first == NULL)
            first = &a[i].t;
        if (a[i].t.device_type != first->device_type || a[i].t.device_index != first->device_index)
            return MT_FAIL(MT_EINVAL, "%s: argument %d is on another device than the first tensor",
                           o->name, i);
    }
    c->device_index = first != NULL ? first->device_index : -1;
    return MT_OK;
}

static void let_go(const mt_op *o, mt_op_arg *a)
{
    for (int i = 0; o->args[i] != '\0'; i++)
        if (is_tensor(o->args[i]))
            mt_op_free(a[i].t.handle);
}

static mt_status run_cuda(mt_op_kernel kernel, mt_op_call *c, const mt_op_arg *a,
                          StableIValue *result)
{
    CUDAGuardHandle guard = NULL;
    void           *stream;
    mt_status       st;

    if (shim.aoti_torch_create_cuda_guard(c->device_index, &guard) ||
        shim.aoti_torch_get_current_cuda_stream(c->device_index, &stream)) {
        st = MT_FAIL(MT_EDEVICE, "%s: cannot switch to cuda:%d", c->name, c->device_index);
        goto fail;
    }
    c->stream = (uintptr_t)stream;
    st = kernel(c, a, result);
fail:
    if (guard != NULL)
        shim.aoti_torch_delete_cuda_guard(guard);
    return st;
}

void mt_op_box(const mt_op *o, mt_op_kernel kernel, StableIValue *stack, uint64_t n_args,
               uint64_t n_returns, int cuda)
{
    mt_op_arg    a[MT_OP_ARGS];
    mt_op_call   c = { .name = o->name, .device_index = -1 };
    StableIValue result = 0;
    mt_status    st;

    /* torch counts what its schema says; a mismatch is a wrong table, and the stack is not ours. */
    if (n_args != strlen(o->args) || n_args > MT_OP_ARGS || n_returns > 1)
        shim.aoti_torch_check(false, o->name, __FILE__, __LINE__, "schema and kernel differ");
    unpack(o, stack, a);
    st = view_all(o, a, &c);
    if (st == MT_OK)
        st = cuda ? run_cuda(kernel, &c, a, &result) : kernel(&c, a, &result);
    let_go(o, a);
    if (st != MT_OK)
        shim.aoti_torch_check(false, o->name, __FILE__, __LINE__, mt_last_error());
    if (n_returns == 1)
        stack[0] = result;
}

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

static const mt_op_row *const rooms[] = {
#define ROOM(room) mt_ops_##room,
    MT_OP_ROOMS(ROOM)
#undef ROOM
    NULL
};

static mt_status define_ops(TorchLibraryHandle *library)
{
    if (shim.aoti_torch_library_init_def("megatrain", __FILE__, __LINE__, library))
        return MT_FAIL(MT_ESTATE, "torch refused the library \"megatrain\": is another loaded?");
    for (int r = 0; rooms[r] != NULL; r++)
        for (const mt_op_row *row = rooms[r]; row->op != NULL; row++)
            if (shim.aoti_torch_library_def(*library, row->op->schema))
                return MT_FAIL(MT_ESTATE, "torch refused the schema %s", row->op->schema);
    return MT_OK;
}

static mt_status implement_ops(const char *key, int cuda, TorchLibraryHandle *library)
{
    if (shim.aoti_torch_library_init_impl("megatrain", key, __FILE__, __LINE__, library))
        return MT_FAIL(MT_ESTATE, "torch refused kernels for %s", key);
    for (int r = 0; rooms[r] != NULL; r++)
        for (const mt_op_row *row = rooms[r]; row->op != NULL; row++)
            if (shim.torch_library_impl(*library, row->op->name, cuda ? row->cuda : row->cpu,
                                        MT_SHIM_VERSION))
                return MT_FAIL(MT_ESTATE, "torch refused the %s kernel of %s", key, row->op->name);
    return MT_OK;
}

/* The library objects live as long as the process: deleting one takes its ops away. */
static mt_status register_all(void)
{
    TorchLibraryHandle library[3] = { NULL };
    mt_status          st;

    MT_TRY(define_ops(&library[0]));
    MT_TRY(implement_ops("CPU", 0, &library[1]));
#ifdef MT_WITH_CUDA
    if (shim_find_cuda())
        MT_TRY(implement_ops("CUDA", 1, &library[2]));
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
        return mt_raise(mt_error_of(module), st);
    registered = 1;
    Py_RETURN_NONE;
}
