/* module.c — megatrain_torch._core: the exception, the constants, the type Engine. */
#include "bind.h"

#include "../core/blocks.h"
#include "../core/relay.h"
#include "../core/store.h"

static const char *dtype_name(int i) { return mt_dtype_name((mt_dtype)i); }
static const char *plane_name(int i) { return mt_plane_name((mt_plane)i); }
static const char *states_name(int i) { return mt_states_name((mt_states)i); }
static const char *lane_name(int i)  { return mt_lane_name((mt_lane)i); }
static const char *work_name(int i)  { return mt_work_name((mt_work)i); }

static int number(int i)    { return i; }
static int low_bytes(int i) { return (int)mt_states_low_bytes((mt_states)i); }

/* module.NAMES = {name: value} of one enumeration. */
static int add_names(PyObject *module, const char *names, int count, const char *(*name)(int),
                     int (*value)(int))
{
    PyObject *dict = PyDict_New(), *found;
    int       bad = dict == NULL;

    for (int i = 0; !bad && i < count; i++) {
        found = PyLong_FromLong(value(i));
        bad = found == NULL || PyDict_SetItemString(dict, name(i), found) < 0;
        Py_XDECREF(found);
    }
    bad = bad || PyModule_AddObjectRef(module, names, dict) < 0;
    Py_XDECREF(dict);
    return bad ? -1 : 0;
}

static int add_constants(PyObject *module)
{
    if (add_names(module, "DTYPES", MT_DTYPE_COUNT, dtype_name, number) < 0 ||
        add_names(module, "PLANES", MT_PLANE_COUNT, plane_name, number) < 0 ||
        add_names(module, "STATES", MT_STATES_COUNT, states_name, number) < 0 ||
        add_names(module, "LANES", MT_LANE_COUNT, lane_name, number) < 0 ||
        add_names(module, "WORKS", MT_WORK_COUNT, work_name, number) < 0 ||
        add_names(module, "LOW_BYTES", MT_STATES_COUNT, states_name, low_bytes) < 0 ||
        PyModule_AddIntConstant(module, "PARCEL_BYTES", (long)sizeof(mt_parcel)) < 0 ||
        PyModule_AddIntConstant(module, "GROUP", MT_STATES_GROUP) < 0 ||
        PyModule_AddIntConstant(module, "BLOCK_BYTES", (long)MT_BLOCK_BYTES) < 0 ||
        PyModule_AddIntConstant(module, "LENT", MT_STORE_LENT) < 0)
        return -1;
    return PyModule_AddStringConstant(module, "__version__", MT_VERSION);
}

static int add_type(PyObject *module, const char *name, PyObject *type)
{
    int bad = type == NULL || PyModule_AddObjectRef(module, name, type) < 0;

    Py_XDECREF(type);
    return bad ? -1 : 0;
}

static int module_exec(PyObject *module)
{
    mt_state *s = PyModule_GetState(module);

    s->error = PyErr_NewExceptionWithDoc("megatrain_torch._core.MegatrainError",
                                         "What went wrong, where, the value and the limit.",
                                         PyExc_RuntimeError, NULL);
    if (s->error == NULL || PyModule_AddObjectRef(module, "MegatrainError", s->error) < 0)
        return -1;
    s->engine_type = mt_engine_type_new(module);
    if (s->engine_type == NULL || PyModule_AddObjectRef(module, "Engine", s->engine_type) < 0)
        return -1;
    if (add_type(module, "WindowDict", mt_window_dict_new()) < 0)
        return -1;
    if (PyModule_AddFunctions(module, mt_disk_methods) < 0 ||
        PyModule_AddFunctions(module, mt_save_methods) < 0 ||
        PyModule_AddFunctions(module, mt_share_methods) < 0 ||
        PyModule_AddFunctions(module, mt_relay_methods) < 0 ||
        PyModule_AddFunctions(module, mt_walk_methods) < 0)
        return -1;
    return add_constants(module);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    mt_state *s = PyModule_GetState(module);

    Py_VISIT(s->error);
    Py_VISIT(s->engine_type);
    return 0;
}

static int module_clear(PyObject *module)
{
    mt_state *s = PyModule_GetState(module);

    Py_CLEAR(s->error);
    Py_CLEAR(s->engine_type);
    return 0;
}

static PyModuleDef_Slot slots[] = {
    { Py_mod_exec, (void *)module_exec },
    { 0, NULL },
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "megatrain_torch._core",
    .m_doc = "The C core of megatrain_torch. Addresses and stream handles are ints.",
    .m_size = sizeof(mt_state),
    .m_methods = mt_kernel_methods,
    .m_slots = slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
};

PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&definition);
}
