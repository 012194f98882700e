/* torch's tensors: read one, and make one over memory that another object owns.
 *
 * If torch has it, this uses its DLPack exchange interface, a table of C functions. Otherwise (torch 2.3 to 2.9) a tensor is
 * read by its methods, which are C functions too, and made from a DLPack capsule, through another dtype if DLPack, or this
 * torch's support of it, lacks the tensor's. `use_torch` chooses, once.
 */

#include "native.h"
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

typedef struct {
    union {
        DLManaged managed;
        DLLegacy legacy;
    };
    PyObject *owner;
    char is_offered; /* torch is being called, and may still refuse it */
    char is_released;
    int64_t numbers[]; /* shape, then strides */
} Holder;

/* --- the end of the interpreter -------------------------------------------------------------------------------------- */

static atomic_int is_ending, releasing; /* of the process; `releasing`: how many threads may need the interpreter now */
static pthread_t ender; /* once it ends: the thread that ends it, which keeps the lock to the last */

/* A child has one thread, which is not counted: it forks by Python code, not within `release_holder`. */
static void after_fork_in_child(void) { atomic_store(&releasing, 0); }

/* When the interpreter ends, a thread that waits for its lock would never return, and its state is freed while threads may use
 * it. Threads that release now are waited for; later ones leave their slot to the kernel, which drops this process's leases in
 * a moment. */
static PyObject *stop_releasing(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    ender = pthread_self();
    atomic_store(&is_ending, 1);
    Py_BEGIN_ALLOW_THREADS
    const struct timespec pause = {0, 1000000};
    for (int i = 0; i < 10000 && atomic_load(&releasing) > 0; i++) nanosleep(&pause, NULL); /* 10 s */
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef stop_method = {"stop_releasing", stop_releasing, METH_NOARGS, NULL};

int call_at_exit(void) {
    static int watches_forks;
    if (!watches_forks && pthread_atfork(NULL, NULL, after_fork_in_child)) {
        PyErr_NoMemory();
        return -1;
    }
    watches_forks = 1;
    PyObject *atexit = PyImport_ImportModule("atexit"), *stop = PyCFunction_New(&stop_method, NULL);
    PyObject *done = atexit && stop ? PyObject_CallMethod(atexit, "register", "O", stop) : NULL;
    Py_XDECREF(atexit);
    Py_XDECREF(stop);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static void free_holder(Holder *holder) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    Py_DECREF(holder->owner);
    PyErr_Restore(type, value, traceback);
    PyMem_RawFree(holder);
}

/* Whether this thread holds the interpreter lock. `PyGILState_Check` says yes to all once there was a subinterpreter. */
static int holds_lock(void) {
    PyThreadState *own = PyGILState_GetThisThreadState();
#if PY_VERSION_HEX >= 0x030D0000
    return own && own == PyThreadState_GetUnchecked();
#else
    return own && own == _PyThreadState_UncheckedGet();
#endif
}

/* torch calls this when it frees the storage, in any thread, with or without the interpreter lock. */
static void release_holder(Holder *holder) {
    if (holder->is_offered) { /* in `make_tensor`, which frees it */
        holder->is_released = 1;
        return;
    }
    /* counted before `is_ending` is read, which `stop_releasing` stores before it reads the count */
    atomic_fetch_add(&releasing, 1);
    if (atomic_load(&is_ending)) {
        if (pthread_equal(pthread_self(), ender) && Py_IsInitialized() && holds_lock()) free_holder(holder);
    } else if (holds_lock()) free_holder(holder);
    else {
        PyGILState_STATE state = PyGILState_Ensure();
        free_holder(holder);
        PyGILState_Release(state);
    }
    atomic_fetch_sub(&releasing, 1);
}

static void release_managed(DLManaged *managed) { release_holder((Holder *)managed); }

static void release_legacy(DLLegacy *legacy) { release_holder((Holder *)legacy); }

/* --- a tensor over memory that `owner` owns -------------------------------------------------------------------------- */

static PyObject *from_capsule(const Codec *codec, Holder *holder) {
    PyObject *capsule = PyCapsule_New(&holder->legacy, "dltensor", NULL), *made = NULL;
    if (!capsule) return NULL;
    made = PyObject_CallOneArg(codec->from_dlpack, capsule);
    Py_DECREF(capsule);
    return made;
}

PyObject *make_tensor(const Codec *codec, const Row *row, void *data, int ndim, const int64_t *shape,
                      const int64_t *strides, PyObject *owner) {
    Holder *holder = PyMem_RawCalloc(1, sizeof *holder + 2 * (size_t)ndim * sizeof(int64_t));
    if (!holder) return PyErr_NoMemory();
    memcpy(holder->numbers, shape, (size_t)ndim * sizeof *shape);
    memcpy(holder->numbers + ndim, strides, (size_t)ndim * sizeof *strides);
    DLTensor tensor = {data, {DL_CPU, 0}, ndim, row->dlpack, holder->numbers, holder->numbers + ndim, 0};
    holder->owner = Py_NewRef(owner);
    holder->is_offered = 1;
    void *made = NULL;
    if (codec->exchange) {
        holder->managed =
            (DLManaged){.version = {1, 0}, .context = holder, .deleter = release_managed, .tensor = tensor};
        if (codec->exchange->object_from_managed(&holder->managed, &made)) made = NULL;
    } else {
        holder->legacy = (DLLegacy){.tensor = tensor, .context = holder, .deleter = release_legacy};
        made = from_capsule(codec, holder);
    }
    if (!made) { /* a traceback may keep the storage alive: drop it, so that `release_holder` is called now */
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        if (value && PyExceptionInstance_Check(value)) PyException_SetTraceback(value, Py_None);
        Py_XDECREF(traceback);
        PyErr_Restore(type, value, NULL);
    }
    holder->is_offered = 0;
    if (!made || holder->is_released) free_holder(holder);
    if (!made && !PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "torch made no tensor");
    if (made && row->is_viewed) {
        PyObject *viewed = PyObject_CallMethodOneArg(made, codec->names[VIEW], row->dtype);
        Py_DECREF(made);
        made = viewed;
    }
    return made;
}

/* --- dtypes -------------------------------------------------------------------------------------------- */

/* The DLPack type of a tensor of this dtype. 0: no other dtype of this size has it; 1: DLPack or torch lacks it. */
static int ask_exchange(const ExchangeAPI *exchange, PyObject *sample, DLDataType *found) {
    DLTensor tensor;
    if (exchange->tensor_from_object(sample, &tensor)) {
        PyErr_Clear();
        return 1;
    }
    *found = tensor.dtype;
    return 0;
}

static int ask_capsule(PyObject *to_dlpack, PyObject *sample, DLDataType *found) {
    PyObject *capsule = PyObject_CallOneArg(to_dlpack, sample);
    const DLLegacy *legacy = capsule ? PyCapsule_GetPointer(capsule, "dltensor") : NULL;
    if (legacy) *found = legacy->tensor.dtype;
    else PyErr_Clear();
    Py_XDECREF(capsule);
    return !legacy;
}

/* An integer or complex type of so many bytes, through which a tensor is made whose dtype DLPack lacks. */
static DLDataType carrier_of(const Row *row) {
    if (row->itemsize == 16) return (DLDataType){DL_COMPLEX, 128, 1};
    return (DLDataType){row->itemsize == 1 ? DL_UINT : DL_INT, (uint8_t)(8 * row->itemsize), 1};
}

/* Whether `make_tensor` makes tensors of this row. */
static int can_make(const Codec *codec, const Row *row) {
    static char memory[16];
    const int64_t nothing[1] = {0};
    PyObject *made = make_tensor(codec, row, memory, 0, nothing, nothing, Py_None);
    PyObject *dtype = made ? PyObject_GetAttr(made, codec->names[DTYPE]) : NULL;
    int found = dtype == row->dtype;
    PyErr_Clear();
    Py_XDECREF(dtype);
    Py_XDECREF(made);
    return found;
}

static int ask_row(const Codec *codec, Row *row, PyObject *sample, PyObject *to_dlpack) {
    PyObject *is_complex = NULL;
    Py_XSETREF(row->dtype, PyObject_GetAttr(sample, codec->names[DTYPE]));
    if (row->dtype) is_complex = PyObject_GetAttrString(row->dtype, "is_complex");
    if (!is_complex) return -1;
    row->is_complex = is_complex == Py_True;
    Py_DECREF(is_complex);
    row->is_viewed = 0;
    int lacks = codec->exchange ? ask_exchange(codec->exchange, sample, &row->dlpack)
                                : ask_capsule(to_dlpack, sample, &row->dlpack);
    row->in_torch = !lacks && (uint64_t)row->dlpack.bits * row->dlpack.lanes == 8 * (uint64_t)row->itemsize;
    if (codec->exchange || (row->in_torch && can_make(codec, row))) return 0;
    row->dlpack = carrier_of(row);
    row->is_viewed = 1;
    row->in_torch = can_make(codec, row);
    return 0;
}

static int look_alike(const Row *a, const Row *b) {
    return a->in_torch && b->in_torch && !memcmp(&a->dlpack, &b->dlpack, sizeof(DLDataType));
}

/* Some look the same through the exchange interface (torch.int8 and torch.int1): these are distinguished by their dtype, and all
 * but one are made through another type. */
static void tell_apart(Codec *codec) {
    for (int i = 1; i < CODES; i++)
        for (int k = 1; k < i; k++)
            if (look_alike(&codec->rows[i], &codec->rows[k])) codec->rows[i].has_twins = codec->rows[k].has_twins = 1;
    for (int i = 1; i < CODES; i++) {
        Row *row = &codec->rows[i];
        if (!row->has_twins || can_make(codec, row)) continue;
        row->dlpack = carrier_of(row);
        row->is_viewed = 1;
        row->in_torch = can_make(codec, row);
    }
}

int use_torch(Codec *codec, PyObject *tensor_type, PyObject *parameter_type, PyObject *samples, PyObject *strided,
              PyObject *exchange, PyObject *to_dlpack, PyObject *from_dlpack) {
    if (codec->tensor_type) return 0; /* another thread was first */
    if (exchange != Py_None) {
        codec->exchange = PyCapsule_GetPointer(exchange, "dlpack_exchange_api");
        PyErr_Clear();
        if (codec->exchange && (codec->exchange->version.major != 1 || !codec->exchange->tensor_from_object ||
                                !codec->exchange->object_from_managed))
            codec->exchange = NULL;
    }
    Py_XSETREF(codec->from_dlpack, Py_NewRef(from_dlpack));
    Py_XSETREF(codec->strided, Py_NewRef(strided));
    PyObject *code, *sample;
    Py_ssize_t at = 0;
    while (PyDict_Next(samples, &at, &code, &sample)) { /* the caller's own dict: no other code changes it */
        long number = PyLong_AsLong(code);
        if (number < 1 || number >= CODES) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "no code of a dtype");
            return -1;
        }
        if (ask_row(codec, &codec->rows[number], sample, to_dlpack)) return -1;
    }
    if (codec->exchange) tell_apart(codec);
    Py_XSETREF(codec->parameter_type, (PyTypeObject *)Py_NewRef(parameter_type));
    codec->tensor_type = (PyTypeObject *)Py_NewRef(tensor_type);
    return 0;
}

/* --- reading a tensor ---------------------------------------------------------------------------------------- */

/* The code for a torch dtype object; 0: not in the table. */
static int code_of_dtype(const Codec *codec, PyObject *value) {
    PyObject *dtype = PyObject_GetAttr(value, codec->names[DTYPE]);
    Py_XDECREF(dtype); /* torch keeps it */
    int code = 1;
    while (dtype && code < CODES && (codec->rows[code].dtype != dtype || !codec->rows[code].in_torch)) code++;
    return dtype && code < CODES ? code : 0;
}

/* The row with this DLPack type; if several have it, the tensor's dtype decides. */
static int look_by_exchange(const Codec *codec, PyObject *value, Tensor *tensor) {
    DLTensor found;
    if (codec->exchange->tensor_from_object(value, &found)) return 0; /* sparse, quantized: no plain memory */
    if (found.device.type != DL_CPU || found.ndim > MAX_NDIM) return 0;
    tensor->data = found.data ? (char *)found.data + found.byte_offset : NULL;
    tensor->ndim = found.ndim;
    tensor->has_strides = found.strides != NULL;
    memcpy(tensor->shape, found.shape, (size_t)found.ndim * sizeof *found.shape);
    if (found.strides) memcpy(tensor->strides, found.strides, (size_t)found.ndim * sizeof *found.strides);
    int code = 1;
    while (code < CODES && (codec->rows[code].is_viewed || !codec->rows[code].in_torch ||
                            memcmp(&codec->rows[code].dlpack, &found.dtype, sizeof(DLDataType))))
        code++;
    return code < CODES ? code : 0;
}

/* Whether an attribute of a tensor is this object. */
static int attribute_is(const Codec *codec, PyObject *value, int name, const PyObject *wanted) {
    PyObject *found = PyObject_GetAttr(value, codec->names[name]);
    Py_XDECREF(found);
    return found && found == wanted;
}

/* An attribute that is a tuple of ints, one per dimension. -1: there is none, or they are no plain ints (while torch traces). */
static int take_numbers(PyObject *tuple, int64_t *numbers) {
    int count = tuple && PyTuple_Check(tuple) && PyTuple_GET_SIZE(tuple) <= MAX_NDIM ? (int)PyTuple_GET_SIZE(tuple) : -1;
    for (int i = 0; i < count; i++) {
        PyObject *number = PyTuple_GET_ITEM(tuple, i);
        numbers[i] = PyLong_CheckExact(number) ? PyLong_AsLongLong(number) : -1;
        if (numbers[i] < 0) count = -1;
    }
    Py_XDECREF(tuple);
    return count;
}

static int take_pointer(const Codec *codec, PyObject *value, char **data) {
    PyObject *number = PyObject_CallMethodNoArgs(value, codec->names[DATA_PTR]);
    *data = number && PyLong_CheckExact(number) ? PyLong_AsVoidPtr(number) : NULL;
    Py_XDECREF(number);
    return number ? 0 : -1;
}

static int look_by_methods(const Codec *codec, PyObject *value, Tensor *tensor) {
    if (!attribute_is(codec, value, LAYOUT, codec->strided) || !attribute_is(codec, value, IS_CPU, Py_True)) return 0;
    int code = code_of_dtype(codec, value);
    if (!code) return 0;
    tensor->ndim = take_numbers(PyObject_GetAttr(value, codec->names[SHAPE]), tensor->shape);
    if (tensor->ndim < 0) return 0;
    PyObject *contiguous = PyObject_CallMethodNoArgs(value, codec->names[IS_CONTIGUOUS]);
    if (!contiguous) return 0;
    Py_DECREF(contiguous);
    tensor->has_strides = contiguous != Py_True;
    if (tensor->has_strides &&
        take_numbers(PyObject_CallMethodNoArgs(value, codec->names[STRIDE]), tensor->strides) != tensor->ndim)
        return 0;
    return take_pointer(codec, value, &tensor->data) ? 0 : code;
}

int look_at_tensor(const Codec *codec, PyObject *value, Tensor *tensor) {
    int code = codec->exchange ? look_by_exchange(codec, value, tensor) : look_by_methods(codec, value, tensor);
    if (codec->exchange && codec->rows[code].has_twins) code = code_of_dtype(codec, value);
    if (!code) return is_for_the_reference() ? 0 : -1;
    int64_t expected = 1;
    int is_c_order = 1;
    for (int i = tensor->ndim - 1; i >= 0; i--) {
        if (tensor->shape[i] == 0) {
            tensor->has_strides = 0;
            return code;
        }
        if (tensor->has_strides && tensor->shape[i] != 1 && tensor->strides[i] != expected) is_c_order = 0;
        if (__builtin_mul_overflow(expected, tensor->shape[i], &expected)) return 0;
    }
    if (is_c_order) tensor->has_strides = 0;
    return tensor->data ? code : 0; /* without memory it is a zero tensor, or its storage was freed */
}

int place_by_methods(const Codec *codec, PyObject *tensor, uintptr_t *address, uint64_t *count) {
    char *data = NULL;
    PyObject *number = PyObject_CallMethodNoArgs(tensor, codec->names[NUMEL]);
    *count = number ? PyLong_AsUnsignedLongLong(number) : 0;
    Py_XDECREF(number);
    if (PyErr_Occurred() || take_pointer(codec, tensor, &data)) return -1;
    *address = (uintptr_t)data;
    return 0;
}

/* May run other code: torch's modes. */
int is_in_its_storage(const Codec *codec, PyObject *value, const char *data, uint64_t nbytes) {
    PyObject *storage = PyObject_CallMethodNoArgs(value, codec->names[UNTYPED_STORAGE]);
    PyObject *held = storage ? PyObject_CallMethodNoArgs(storage, codec->names[NBYTES]) : NULL;
    uint64_t size = held ? PyLong_AsUnsignedLongLong(held) : 0;
    char *start = NULL;
    if (held && !PyErr_Occurred()) take_pointer(codec, storage, &start);
    Py_XDECREF(held);
    Py_XDECREF(storage);
    if (!is_for_the_reference()) return -1;
    uint64_t before = (uint64_t)((uintptr_t)data - (uintptr_t)start);
    return start && start <= data && before <= size && nbytes <= size - before;
}

/* By calls that make no object that the garbage collector tracks: no finalizer runs, and the interpreter lock stays. */
int still_lies_at(const Codec *codec, PyObject *value, uintptr_t address, uint64_t nbytes) {
    uint64_t size = 0;
    char *data = NULL;
    if (codec->exchange) {
        Tensor tensor;
        int code = look_by_exchange(codec, value, &tensor);
        size = codec->rows[code].itemsize; /* 0, if it is none of them any more */
        for (int i = 0; code && i < tensor.ndim; i++) size *= (uint64_t)tensor.shape[i];
        data = code ? tensor.data : NULL;
    } else {
        PyObject *dtype = PyObject_GetAttr(value, codec->names[DTYPE]);
        PyObject *count = dtype ? PyObject_CallMethodNoArgs(value, codec->names[NUMEL]) : NULL;
        for (int code = 1; count && code < CODES; code++)
            if (codec->rows[code].dtype == dtype) size = codec->rows[code].itemsize;
        if (count) size *= PyLong_AsUnsignedLongLong(count);
        Py_XDECREF(count);
        Py_XDECREF(dtype);
        if (!PyErr_Occurred()) take_pointer(codec, value, &data);
    }
    if (!is_for_the_reference()) return -1;
    return size == nbytes && (uintptr_t)data == address;
}
