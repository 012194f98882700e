/* What both sides use: shared words, and tensors as DLPack shows them. Included once, by _hot.c. */

#define MOST_DIMENSIONS 8
#define MOST_PEERS 64
#define MOST_PLANS 16 /* kinds of messages that an endpoint knows */

/* --- DLPack's C interface, as far as it is used ------------------------------------------------------------------- */

typedef struct { uint32_t major, minor; } DLVersion;
typedef struct { int32_t type, id; } DLDevice;
typedef struct { uint8_t code, bits; uint16_t lanes; } DLDataType;

typedef struct {
    void *data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape;
    int64_t *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct DLManaged {
    DLVersion version;
    void *context;
    void (*deleter)(struct DLManaged *);
    uint64_t flags;
    DLTensor tensor;
} DLManaged;

typedef struct {
    DLVersion version;
    void *previous;
    int (*allocate)(DLTensor *, DLManaged **, void *, void (*)(void *, const char *, const char *));
    int (*managed_from_object)(void *, DLManaged **);
    int (*object_from_managed)(DLManaged *, void **);
    int (*tensor_from_object)(void *, DLTensor *);
    int (*stream)(int, int32_t, void **);
} ExchangeAPI;

enum { CPU = 1 };

static ExchangeAPI *exchange; /* torch's */
static PyTypeObject *tensor_type;
static PyObject *s_is_neg, *s_close, *s_emptied, *s_wake_sender, *s_fd, *s_line, *s_rung, *s_gone, *s_outbox;

/* --- shared words ------------------------------------------------------------------------------------------------- */

typedef uint64_t Word;

static inline Word load(const Word *at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
static inline void store(Word *at, Word value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }

static inline int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* The state words of a work queue's slot, ring/layout.py. */
enum { CLAIMED, DONE, RELEASED, ATTEMPT, NOTE, DEADLINE, VERDICT, STATE_WORDS = 8 };

/* A memoryview's memory, kept exported until it is given back. */
typedef struct { Py_buffer view; } Memory;

static int memory_get(PyObject *object, Memory *memory) {
    return PyObject_GetBuffer(object, &memory->view, PyBUF_SIMPLE | PyBUF_WRITABLE);
}

static void memory_drop(Memory *memory) {
    if (memory->view.obj) PyBuffer_Release(&memory->view);
}

static int in_words(const Memory *memory, Py_ssize_t index) {
    return index >= 0 && index < memory->view.len / (Py_ssize_t)sizeof(Word);
}

/* --- what a tensor looks like ------------------------------------------------------------------------------------- */

typedef struct {
    DLDataType dtype;
    int32_t ndim;
    int64_t shape[MOST_DIMENSIONS], strides[MOST_DIMENSIONS];
    int64_t nbytes;
} Look;

static int is_dense(const DLTensor *tensor) {
    int64_t expected = 1;
    if (!tensor->strides) return 1;
    for (int32_t i = tensor->ndim - 1; i >= 0; i--) {
        if (tensor->shape[i] != 1 && tensor->strides[i] != expected) return 0;
        expected *= tensor->shape[i];
    }
    return 1;
}

/* Bytes of a dense tensor. */
static int64_t size_of(const DLTensor *tensor) {
    int64_t bits = (int64_t)tensor->dtype.bits * tensor->dtype.lanes;
    for (int32_t i = 0; i < tensor->ndim; i++) bits *= tensor->shape[i];
    return (bits + 7) / 8;
}

/* 1 if the object is a plain CPU tensor with bytes, 0 if not. */
static int look_at(PyObject *value, DLTensor *tensor) {
    if (Py_TYPE(value) != tensor_type) return 0;
    if (exchange->tensor_from_object(value, tensor)) {
        PyErr_Clear();
        return 0;
    }
    return tensor->device.type == CPU && tensor->data && tensor->ndim <= MOST_DIMENSIONS;
}

static int same_look(const Look *look, const DLTensor *tensor) {
    if (memcmp(&look->dtype, &tensor->dtype, sizeof(DLDataType)) || look->ndim != tensor->ndim) return 0;
    for (int32_t i = 0; i < look->ndim; i++)
        if (look->shape[i] != tensor->shape[i]) return 0;
    return 1;
}

static void remember_look(Look *look, const DLTensor *tensor, int64_t nbytes) {
    int64_t stride = 1;
    look->dtype = tensor->dtype;
    look->ndim = tensor->ndim;
    look->nbytes = nbytes;
    for (int32_t i = tensor->ndim - 1; i >= 0; i--) {
        look->shape[i] = tensor->shape[i];
        look->strides[i] = tensor->strides ? tensor->strides[i] : stride;
        stride *= tensor->shape[i];
    }
}

/* What a mutex's bound method `locked` says. */
static int is_locked(PyObject *method) {
    PyObject *answer = PyObject_CallNoArgs(method);
    int locked = answer ? answer == Py_True : -1;
    Py_XDECREF(answer);
    return locked;
}

static int get_index(PyObject *object, PyObject *name, uint64_t *value) {
    PyObject *found = PyObject_GetAttr(object, name);
    if (!found) return -1;
    *value = PyLong_AsUnsignedLongLong(found);
    Py_DECREF(found);
    return PyErr_Occurred() ? -1 : 0;
}

/* Words of a segment's, from a tuple of their indices. */
static int words_of(PyObject *sequence, Py_ssize_t *out, int *count) {
    Py_ssize_t n = PyTuple_GET_SIZE(sequence);
    if (n > MOST_PEERS) {
        PyErr_SetString(PyExc_ValueError, "too many peers");
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        out[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(sequence, i));
        if (PyErr_Occurred()) return -1;
    }
    *count = (int)n;
    return 0;
}

static int set_index(PyObject *object, PyObject *name, uint64_t value) {
    PyObject *number = PyLong_FromUnsignedLongLong(value);
    int result = number ? PyObject_SetAttr(object, name, number) : -1;
    Py_XDECREF(number);
    return result;
}
