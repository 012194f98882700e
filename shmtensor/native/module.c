/* The module, and `Codec`, which Python makes once with its parameters (codec/implementation.py). */

#define NATIVE_MODULE
#include "native.h"
#include "notify.h"

int is_for_the_reference(void) {
    if (!PyErr_Occurred()) return 1;
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return 0;
    PyErr_Clear();
    return 1;
}

typedef struct { PyObject *codec, *encoded, *writer; } State;

static int Codec_traverse(Codec *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->encoded_type);
    Py_VISIT(self->encode);
    Py_VISIT(self->decode);
    Py_VISIT(self->parts);
    Py_VISIT(self->tree);
    Py_VISIT(self->big_bytes);
    Py_VISIT(self->move_large);
    Py_VISIT(self->payload);
    Py_VISIT(self->argument_error);
    Py_VISIT(self->tensor_type);
    Py_VISIT(self->parameter_type);
    Py_VISIT(self->from_dlpack);
    return 0;
}

/* No `tp_clear`: its references live as long as it does. Python breaks a cycle at its other objects. */
static void Codec_dealloc(Codec *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->encoded_type);
    Py_XDECREF(self->encode);
    Py_XDECREF(self->decode);
    Py_XDECREF(self->parts);
    Py_XDECREF(self->tree);
    Py_XDECREF(self->big_bytes);
    Py_XDECREF(self->move_large);
    Py_XDECREF(self->payload);
    Py_XDECREF(self->argument_error);
    Py_XDECREF(self->tensor_type);
    Py_XDECREF(self->parameter_type);
    Py_XDECREF(self->from_dlpack);
    Py_XDECREF(self->strided);
    for (int i = 0; i < NAMES; i++) Py_XDECREF(self->names[i]);
    for (int i = 0; i < CODES; i++) Py_XDECREF(self->rows[i].dtype);
    type->tp_free(self);
    Py_DECREF(type);
}

/* rows: (code, itemsize, NumPy's type numbers) */
static int take_rows(Codec *self, PyObject *rows) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(rows); i++) {
        int code;
        unsigned int itemsize;
        PyObject *nums;
        if (!PyTuple_Check(PyTuple_GET_ITEM(rows, i)) ||
            !PyArg_ParseTuple(PyTuple_GET_ITEM(rows, i), "iIO!", &code, &itemsize, &PyTuple_Type, &nums))
            return -1;
        if (code < 1 || code >= CODES || itemsize < 1 || itemsize > 16) {
            PyErr_SetString(PyExc_ValueError, "no row of the dtype table");
            return -1;
        }
        self->rows[code].itemsize = itemsize;
        self->rows[code].type_num = -1;
        for (Py_ssize_t k = PyTuple_GET_SIZE(nums) - 1; k >= 0; k--) {
            long num = PyLong_AsLong(PyTuple_GET_ITEM(nums, k));
            if (num < 0 || num >= TYPE_NUMS) {
                if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "no type number");
                return -1;
            }
            self->code_of_type[num] = (unsigned char)code;
            self->rows[code].type_num = (int)num;
        }
    }
    return 0;
}

static const char *const attribute_names[NAMES] = {
    [IS_NEG] = "is_neg", [IS_CONJ] = "is_conj", [LAYOUT] = "layout", [IS_CPU] = "is_cpu", [DTYPE] = "dtype",
    [SHAPE] = "shape", [STRIDE] = "stride", [IS_CONTIGUOUS] = "is_contiguous", [DATA_PTR] = "data_ptr",
    [NUMEL] = "numel", [VIEW] = "view", [UNTYPED_STORAGE] = "untyped_storage", [NBYTES] = "nbytes", [LAST] = "last",
};

static PyObject *Codec_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"encode", "decode", "parts", "tree", "big_bytes", "move_large", "payload", "argument_error",
                            "alone", "small", "inline_bytes", "max_ndim", "rows", NULL};
    PyObject *encode, *decode, *parts, *tree, *big_bytes, *move_large, *payload, *argument_error, *rows;
    Py_ssize_t alone, small, inline_bytes;
    int max_ndim;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$OOOOOOOOnnniO!", names, &encode, &decode, &parts, &tree, &big_bytes,
                                     &move_large, &payload, &argument_error, &alone, &small, &inline_bytes, &max_ndim,
                                     &PyTuple_Type, &rows))
        return NULL;
    State *state = PyType_GetModuleState(type);
    if (state && !state->encoded) PyErr_SetString(PyExc_RuntimeError, "the module was cleared");
    Codec *self = state && state->encoded ? (Codec *)type->tp_alloc(type, 0) : NULL;
    if (!self) return NULL;
    self->encoded_type = (PyTypeObject *)Py_NewRef(state->encoded);
    self->encode = Py_NewRef(encode);
    self->decode = Py_NewRef(decode);
    self->parts = Py_NewRef(parts);
    self->tree = Py_NewRef(tree);
    self->big_bytes = Py_NewRef(big_bytes);
    self->move_large = Py_NewRef(move_large);
    self->payload = Py_NewRef(payload);
    self->argument_error = Py_NewRef(argument_error);
    self->alone = alone;
    self->small = small;
    self->inline_bytes = inline_bytes;
    self->max_ndim = max_ndim < NPY_MAXDIMS ? max_ndim : NPY_MAXDIMS;
    int failed = take_rows(self, rows);
    for (int i = 0; i < NAMES && !failed; i++) failed = !(self->names[i] = PyUnicode_InternFromString(attribute_names[i]));
    if (failed) Py_CLEAR(self);
    return (PyObject *)self;
}

PyTypeObject *codec_type_of(PyTypeObject *type) {
    State *state = PyType_GetModuleState(type);
    if (state && !state->codec) PyErr_SetString(PyExc_RuntimeError, "the module was cleared");
    return state ? (PyTypeObject *)state->codec : NULL;
}

PyDoc_STRVAR(use_torch_doc, "use_torch(tensor_type, parameter_type, samples, strided, exchange, to_dlpack, from_dlpack)\n--\n\n"
    "Read torch's tensors here from now on. `samples`: code -> a tensor of that dtype; `exchange`: torch's DLPack exchange "
    "interface, or None: then the other two are used.");

static PyObject *Codec_use_torch(Codec *self, PyObject *args) {
    PyObject *tensor_type, *parameter_type, *samples, *strided, *exchange, *to_dlpack, *from_dlpack;
    if (!PyArg_ParseTuple(args, "O!O!O!OOOO", &PyType_Type, &tensor_type, &PyType_Type, &parameter_type, &PyDict_Type,
                          &samples, &strided, &exchange, &to_dlpack, &from_dlpack) ||
        use_torch(self, tensor_type, parameter_type, samples, strided, exchange, to_dlpack, from_dlpack))
        return NULL;
    Py_RETURN_NONE;
}

/* The argument of this name, or `missing`. */
static PyObject *named(PyObject *const *args, PyObject *names, const char *name, PyObject *missing) {
    for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names); i++)
        if (!PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, i), name)) return args[i];
    return missing;
}

PyDoc_STRVAR(encode_doc, "encode(value, meta=None)\n--\n\nSee codec/encode.py.");

static PyObject *Codec_encode(Codec *self, PyObject *const *args, Py_ssize_t count, PyObject *names) {
    PyObject *meta = count == 2 ? args[1] : named(args + count, names, "meta", NULL);
    if (count < 1 || count > 2 || (names && PyTuple_GET_SIZE(names) != (count == 1 && meta))) {
        PyErr_SetString(PyExc_TypeError, "encode(value, meta=None)");
        return NULL;
    }
    return encode_value(self, args[0], meta ? meta : Py_None);
}

PyDoc_STRVAR(decode_doc, "decode(description, payload, *, readonly)\n--\n\nSee codec/decode.py.");

static PyObject *Codec_decode(Codec *self, PyObject *const *args, Py_ssize_t count, PyObject *names) {
    PyObject *readonly = named(args + count, names, "readonly", NULL);
    if (count != 2 || !readonly || PyTuple_GET_SIZE(names) != 1) {
        PyErr_SetString(PyExc_TypeError, "decode(description, payload, *, readonly)");
        return NULL;
    }
    int is_readonly = PyObject_IsTrue(readonly);
    return is_readonly < 0 ? NULL : decode_message(self, args[0], args[1], is_readonly);
}

static PyObject *Codec_handed_over(Codec *self, void *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(self->handed_over);
}

static PyObject *Codec_tensors(Codec *self, void *unused) {
    (void)unused;
    if (!self->tensor_type) Py_RETURN_NONE;
    return PyUnicode_FromString(self->exchange ? "exchange" : "methods");
}

static PyMethodDef Codec_methods[] = {
    {"use_torch", (PyCFunction)Codec_use_torch, METH_VARARGS, use_torch_doc},
    {"encode", (PyCFunction)(void (*)(void))Codec_encode, METH_FASTCALL | METH_KEYWORDS, encode_doc},
    {"decode", (PyCFunction)(void (*)(void))Codec_decode, METH_FASTCALL | METH_KEYWORDS, decode_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef Codec_members[] = {
    {"raw", MEMBER_BOOL, offsetof(Codec, raw), 0, "pass payloads and descriptions through as they are: codec/raw.py"},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef Codec_getset[] = {
    {"handed_over", (getter)Codec_handed_over, NULL, "how many calls were handed to the reference as a whole", NULL},
    {"tensors", (getter)Codec_tensors, NULL, "how torch's tensors are read: 'exchange' or 'methods'; None before the first", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot Codec_slots[] = {
    {Py_tp_doc, "encode and decode: see codec/implementation.py."},
    {Py_tp_new, Codec_new},
    {Py_tp_traverse, Codec_traverse},
    {Py_tp_dealloc, Codec_dealloc},
    {Py_tp_methods, Codec_methods},
    {Py_tp_members, Codec_members},
    {Py_tp_getset, Codec_getset},
    {0, NULL},
};

PyType_Spec Codec_spec = {
    .name = "shmtensor.native._core.Codec",
    .basicsize = sizeof(Codec),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = Codec_slots,
};

/* --- the module ------------------------------------------------------------------------------------------------------ */

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
    State *state = PyModule_GetState(module);
    Py_VISIT(state->codec);
    Py_VISIT(state->encoded);
    Py_VISIT(state->writer);
    return 0;
}

static int module_clear(PyObject *module) {
    State *state = PyModule_GetState(module);
    Py_CLEAR(state->codec);
    Py_CLEAR(state->encoded);
    Py_CLEAR(state->writer);
    return 0;
}

static int module_exec(PyObject *module) {
    State *state = PyModule_GetState(module);
    if (_import_array() < 0) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ImportError, "NumPy has no C interface");
        return -1;
    }
    if (call_at_exit()) return -1;
    state->encoded = PyType_FromModuleAndSpec(module, &Encoded_spec, NULL);
    state->codec = PyType_FromModuleAndSpec(module, &Codec_spec, NULL);
    state->writer = PyType_FromModuleAndSpec(module, &Writer_spec, NULL);
    if (!state->encoded || !state->codec || !state->writer || notify_prepare() || add_reader(module)) return -1;
    PyObject *const types[] = {state->codec, state->encoded, state->writer};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (PyModule_AddType(module, (PyTypeObject *)types[i])) return -1;
    PyMethodDef *const functions[] = {notify_methods, copy_methods, fault_methods};
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (PyModule_AddFunctions(module, functions[i])) return -1;
    return PyModule_AddIntConstant(module, "CACHE_BYTES", cache_bytes());
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "shmtensor.native._core",
    .m_doc = "The codec in C: see native/__init__.py.",
    .m_size = sizeof(State),
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
};

PyMODINIT_FUNC PyInit__core(void);

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
