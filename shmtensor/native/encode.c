/* From a value and its meta to a description and the copies to make: what codec/encode.py does, in one pass. */

#include "native.h"
#include <stdlib.h>

/* How a leaf is sent together with others that overlap it in memory. */
typedef enum {
    SHARES,
    COPIED, /* its strides cannot be sent: it shares a copy only with equal views */
    ASKS,   /* if there are such others, the reference encodes the message as a whole */
    ON_DEVICE, /* the same, and its addresses are a device's */
} Sharing;

typedef struct {
    PyObject *source, *job; /* `job`: offset -> the copy of a leaf whose bytes do not lie in memory as they are sent, or NULL */
    PyObject *other;        /* SHARES: its node among others, or NULL if that is unchanged. COPIED: a key, equal for equal views */
    uintptr_t start, address; /* of the bytes that it spans; of those for a plain copy, or 0 */
    uint64_t extent, offset, size;
    uintptr_t looked_at;     /* where the memory of its source lies, and how much it is: `has_moved` */
    uint64_t looked_at_size;
    size_t node, node_size; /* its node's position and size in the description */
    Py_ssize_t first;       /* the leaf with which it shares its bytes, or itself */
    Py_ssize_t next;        /* the next leaf of its group, -1: none */
    uint32_t storage, copies;
    Sharing sharing;
    char is_odd, is_torch, is_placed;
} Leaf;

enum { FEW_BYTES = 1024, FEW_LEAVES = 16 };

typedef struct {
    Codec *codec;
    char *data;
    size_t used, room;
    Leaf *leaves;
    Py_ssize_t nleaves, leaf_room;
    uint64_t end;     /* of the payload so far */
    uint64_t *storages; /* (offset, bytes) of each storage that several tensors share */
    uint32_t nstorages;
    PyObject *jobs, *device_jobs;
    char few_bytes[FEW_BYTES];
    Leaf few_leaves[FEW_LEAVES];
} Writer;

/* Every function below returns 0, or -1: with an error set, or without one to hand over to the reference. */

static int write_value(Writer *writer, PyObject *value, int depth);

static char *reserve(Writer *writer, size_t count) {
    if (count > MAX_DESCRIPTION || writer->used + count > MAX_DESCRIPTION) return NULL;
    if (writer->used + count > writer->room) {
        size_t room = 2 * (writer->used + count);
        char *data = PyMem_Malloc(room);
        if (!data) return NULL;
        memcpy(data, writer->data, writer->used);
        if (writer->data != writer->few_bytes) PyMem_Free(writer->data);
        writer->data = data;
        writer->room = room;
    }
    char *at = writer->data + writer->used;
    writer->used += count;
    return at;
}

static int write_tag(Writer *writer, char tag) {
    char *at = reserve(writer, 1);
    if (!at) return -1;
    *at = tag;
    return 0;
}

static int write_word(Writer *writer, char tag, const void *word) {
    char *at = reserve(writer, 9);
    if (!at) return -1;
    *at = tag;
    memcpy(at + 1, word, 8);
    return 0;
}

static int write_count(Writer *writer, char tag, Py_ssize_t count) {
    char *at = (size_t)count <= MAX_DESCRIPTION ? reserve(writer, 5) : NULL;
    if (!at) return -1;
    uint32_t number = (uint32_t)count;
    *at = tag;
    memcpy(at + 1, &number, 4);
    return 0;
}

static int write_bytes(Writer *writer, char tag, const char *data, Py_ssize_t size) {
    if (write_count(writer, tag, size)) return -1;
    char *at = reserve(writer, (size_t)size);
    if (!at) return -1;
    memcpy(at, data, (size_t)size);
    return 0;
}

static int write_int(Writer *writer, PyObject *value) {
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (!overflow) return number == -1 && PyErr_Occurred() ? -1 : write_word(writer, INT, &number);
    PyObject *bytes = PyObject_CallOneArg(writer->codec->big_bytes, value);
    int failed = !bytes || !PyBytes_Check(bytes) ||
                 write_bytes(writer, BIG_INT, PyBytes_AS_STRING(bytes), PyBytes_GET_SIZE(bytes));
    Py_XDECREF(bytes);
    return failed ? -1 : 0;
}

int add_key(PyObject **counts, PyObject *key) {
    int overflow = 0;
    if (!PyLong_Check(key) || (PyLong_AsLongLongAndOverflow(key, &overflow), !overflow)) return 0;
    if (!*counts && !(*counts = PyDict_New())) return -1;
    PyObject *hash = PyLong_FromSsize_t(PyLong_Type.tp_hash(key)), *count = NULL;
    if (hash) count = PyDict_GetItemWithError(*counts, hash);
    long next = count ? PyLong_AsLong(count) + 1 : 1;
    PyObject *number = hash && !PyErr_Occurred() ? PyLong_FromLong(next) : NULL;
    int failed = !number || PyDict_SetItem(*counts, hash, number) || next > MAX_EQUAL_HASHES;
    Py_XDECREF(hash);
    Py_XDECREF(number);
    return failed ? -1 : 0;
}

static int write_text(Writer *writer, PyObject *value) {
#if PY_VERSION_HEX < 0x030C0000
    if (PyUnicode_READY(value)) return -1;
#endif
    if (PyUnicode_IS_ASCII(value))
        return write_bytes(writer, STR, (const char *)PyUnicode_1BYTE_DATA(value), PyUnicode_GET_LENGTH(value));
    PyObject *bytes = PyUnicode_AsEncodedString(value, "utf-8", "surrogatepass");
    int failed = !bytes || write_bytes(writer, STR, PyBytes_AS_STRING(bytes), PyBytes_GET_SIZE(bytes));
    Py_XDECREF(bytes);
    return failed ? -1 : 0;
}

/* Returns 1 if it is no scalar. */
static int write_scalar(Writer *writer, PyObject *value) {
    if (value == Py_None) return write_tag(writer, NONE);
    if (PyBool_Check(value)) return write_tag(writer, value == Py_True ? TRUE_ : FALSE_);
    if (PyLong_Check(value)) return write_int(writer, value);
    if (PyUnicode_Check(value)) return write_text(writer, value);
    if (!PyFloat_Check(value)) return 1;
    double number = PyFloat_AS_DOUBLE(value);
    return write_word(writer, FLOAT, &number);
}

/* --- leaves ---------------------------------------------------------------------------------------------------------- */

/* Give a leaf bytes of its own in the payload. */
static int place_leaf(Writer *writer, Leaf *leaf) {
    leaf->offset = leaf->size ? aligned(writer->end) : 0;
    if (leaf->size > MAX_BYTES || leaf->offset > MAX_BYTES - leaf->size) return -1;
    if (leaf->size) writer->end = leaf->offset + leaf->size;
    return 0;
}

/* Record a leaf of so many bytes, whose node comes next in the description. */
static Leaf *add_leaf(Writer *writer, PyObject *source, uintptr_t start, uint64_t extent, uint64_t size) {
    if (writer->nleaves >= MAX_LEAVES) return NULL;
    if (writer->nleaves == writer->leaf_room) {
        Py_ssize_t room = 4 * writer->leaf_room;
        Leaf *leaves = PyMem_Malloc((size_t)room * sizeof *leaves);
        if (!leaves) return NULL;
        memcpy(leaves, writer->leaves, (size_t)writer->nleaves * sizeof *leaves);
        if (writer->leaves != writer->few_leaves) PyMem_Free(writer->leaves);
        writer->leaves = leaves;
        writer->leaf_room = room;
    }
    Leaf *leaf = &writer->leaves[writer->nleaves];
    *leaf = (Leaf){.start = start, .address = start, .extent = extent, .size = size, .node = writer->used,
                   .first = writer->nleaves, .next = -1};
    if (place_leaf(writer, leaf)) return NULL;
    leaf->source = Py_NewRef(source);
    writer->nleaves++;
    return leaf;
}

/* Whether the elements fill one run of memory, each byte once, in any order of dimensions; strides in bytes. */
static int is_dense(int ndim, const int64_t *shape, const int64_t *strides, int64_t itemsize) {
    int order[MAX_NDIM], count = 0;
    for (int i = 0; i < ndim; i++) {
        int at = count;
        if (shape[i] == 1) continue;
        for (; at > 0 && strides[order[at - 1]] > strides[i]; at--) order[at] = order[at - 1];
        order[at] = i;
        count++;
    }
    for (int k = 0; k < count; k++) {
        if (strides[order[k]] != itemsize || __builtin_mul_overflow(itemsize, shape[order[k]], &itemsize)) return 0;
    }
    return 1;
}

/* A leaf at `data`, in C order, or with strides in bytes. Returns 1 for an unknown type. */
static int write_leaf(Writer *writer, PyObject *source, int code, int flags, int ndim, const int64_t *shape,
                      const int64_t *strides, const void *data) {
    const uint64_t itemsize = writer->codec->rows[code].itemsize;
    uint64_t whole = itemsize, size = whole; /* `whole`: as if no dimension were 0 */
    for (int i = 0; i < ndim; i++) {
        if (__builtin_mul_overflow(whole, (uint64_t)(shape[i] ? shape[i] : 1), &whole) || whole > MAX_BYTES) return -1;
        size *= (uint64_t)shape[i];
    }
    if (strides) {
        if (!size || !is_dense(ndim, shape, strides, (int64_t)itemsize)) return 1;
        for (int i = 0; i < ndim; i++) /* the stride of a dimension of length 1 has no meaning, but is sent */
            if (strides[i] < 0 || (uint64_t)strides[i] > MAX_BYTES) return 1;
        flags |= STRIDES;
    }
    Leaf *leaf = add_leaf(writer, source, size ? (uintptr_t)data : 0, size, size);
    if (!leaf) return -1;
    leaf->looked_at = leaf->start;
    leaf->looked_at_size = size;
    leaf->is_torch = (flags & TORCH) != 0;
    if (leaf->is_torch && leaf->start % itemsize) leaf->sharing = ASKS;
    const size_t words = 8 * (size_t)ndim;
    leaf->node_size = LEAF_HEAD + (strides ? 2 : 1) * words;
    char *at = reserve(writer, leaf->node_size);
    if (!at) return -1;
    const char head[8] = {LEAF, (char)code, (char)flags, (char)ndim};
    memcpy(at, head, 8);
    memcpy(at + 8, &leaf->offset, 8);
    memcpy(at + LEAF_HEAD, shape, words);
    if (strides) memcpy(at + LEAF_HEAD + words, strides, words);
    return 0;
}

#define UNUSUAL ((uintptr_t)1 << 32) /* below it lies next to no memory of a process */

/* 1: not one that is known here. */
static int write_tensor(Writer *writer, PyObject *value) {
    Tensor tensor;
    PyObject *negative = PyObject_CallMethodNoArgs(value, writer->codec->names[IS_NEG]); /* may run other code: torch's modes */
    if (!negative) return -1;
    Py_DECREF(negative);
    if (negative != Py_False) return 1;
    int code = look_at_tensor(writer->codec, value, &tensor);
    if (code <= 0) return code ? -1 : 1;
    if (writer->codec->rows[code].is_complex) {
        PyObject *conjugate = PyObject_CallMethodNoArgs(value, writer->codec->names[IS_CONJ]);
        if (!conjugate) return -1;
        Py_DECREF(conjugate);
        if (conjugate != Py_False) return 1;
        int again = look_at_tensor(writer->codec, value, &tensor);
        if (again != code) return again < 0 ? -1 : 1;
    }
    uint64_t size = writer->codec->rows[code].itemsize;
    for (int i = 0; i < tensor.ndim; i++)
        if (__builtin_mul_overflow(size, (uint64_t)tensor.shape[i], &size)) return 1;
    /* For large tensors the check takes far less time than the copy; for small ones it is left out: docs/guide/values.md. A tensor
     * whose storage was freed seems to lie at its offset. */
    if (size > (uint64_t)writer->codec->small || (uintptr_t)tensor.data < UNUSUAL) {
        const char *data = tensor.data;
        int has_all = is_in_its_storage(writer->codec, value, data, size);
        if (has_all <= 0) return has_all ? -1 : 1;
        int again = look_at_tensor(writer->codec, value, &tensor);
        if (again != code || tensor.data != data) return again < 0 ? -1 : 1;
    }
    for (int i = 0; tensor.has_strides && i < tensor.ndim; i++)
        if (__builtin_mul_overflow(tensor.strides[i], (int64_t)writer->codec->rows[code].itemsize, &tensor.strides[i]))
            return 1;
    return write_leaf(writer, value, code, TORCH, tensor.ndim, tensor.shape, tensor.has_strides ? tensor.strides : NULL,
                      tensor.data);
}

/* 1: not one that is known here. */
static int write_array(Writer *writer, PyObject *value) {
    PyArrayObject *array = (PyArrayObject *)value;
    int num = PyArray_TYPE(array), code = num >= 0 && num < TYPE_NUMS ? writer->codec->code_of_type[num] : 0;
    if (!code || !PyArray_ISNOTSWAPPED(array)) return 1;
    int64_t shape[NPY_MAXDIMS], strides[NPY_MAXDIMS];
    for (int i = 0; i < PyArray_NDIM(array); i++) {
        shape[i] = PyArray_DIM(array, i);
        strides[i] = PyArray_STRIDE(array, i);
    }
    return write_leaf(writer, value, code, 0, PyArray_NDIM(array), shape, PyArray_IS_C_CONTIGUOUS(array) ? NULL : strides,
                      PyArray_DATA(array));
}

static int write_composite(Writer *writer, char kind) {
    char *at = reserve(writer, 4);
    if (!at) return -1;
    const char head[4] = {COMPOSITE, kind, 0, 1};
    memcpy(at, head, 4);
    return 0;
}

static int write_data(Writer *writer, PyObject *value) {
    const int64_t shape[] = {PyBytes_GET_SIZE(value)};
    return write_composite(writer, DATA) ? -1
                                         : write_leaf(writer, value, writer->codec->code_of_type[NPY_UINT8], 0, 1, shape,
                                                      NULL, PyBytes_AS_STRING(value));
}

/* A NumPy scalar. Returns 1 for an unknown type. */
static int write_generic(Writer *writer, PyObject *value) {
    PyArray_Descr *descr = PyArray_DescrFromScalar(value);
    if (!descr) return -1;
    int num = descr->type_num, known = num >= 0 && num < TYPE_NUMS && writer->codec->code_of_type[num];
    Py_DECREF(descr);
    if (!known) return 1;
    PyObject *array = PyArray_FromScalar(value, NULL);
    if (!array) return -1;
    int result = PyArray_CheckExact(array) && !write_composite(writer, GENERIC) ? write_array(writer, array) : -1;
    Py_DECREF(array);
    return result ? -1 : 0;
}

/* A leaf that Python has read: (node with offset 0, source, address, start, extent, size, job, sharing, other). */
static int write_odd_leaf(Writer *writer, PyObject *item) {
    PyObject *node, *source, *job, *other;
    unsigned long long address, start, extent, size;
    int sharing;
    if (!PyTuple_Check(item) ||
        !PyArg_ParseTuple(item, "O!OKKKKOiO", &PyBytes_Type, &node, &source, &address, &start, &extent, &size, &job,
                          &sharing, &other))
        return -1;
    size_t count = (size_t)PyBytes_GET_SIZE(node);
    if (count < LEAF_HEAD || sharing < SHARES || sharing > ON_DEVICE ||
        (sharing == SHARES && other != Py_None && (!PyBytes_Check(other) || PyBytes_GET_SIZE(other) < LEAF_HEAD)))
        return -1;
    Leaf *leaf = add_leaf(writer, source, (uintptr_t)start, extent, size);
    if (!leaf) return -1;
    leaf->address = (uintptr_t)address;
    leaf->is_odd = 1;
    if (sharing != ON_DEVICE && extent && source_at(writer->codec, source, &leaf->looked_at, &leaf->looked_at_size)) return -1;
    leaf->sharing = (Sharing)sharing;
    leaf->is_torch = (PyBytes_AS_STRING(node)[2] & TORCH) != 0;
    leaf->node_size = count;
    if (!address && size) leaf->job = Py_NewRef(job);
    if (other != Py_None) leaf->other = Py_NewRef(other);
    char *at = reserve(writer, count);
    if (!at) return -1;
    memcpy(at, PyBytes_AS_STRING(node), count);
    memcpy(at + 8, &leaf->offset, 8);
    return 0;
}

/* A value of unknown type, from Python's `parts`: (head of a composite or nothing, its leaves, its scalars). */
static int write_odd(Writer *writer, PyObject *value) {
    PyObject *parts = PyObject_CallOneArg(writer->codec->parts, value), *head, *leaves, *scalars;
    if (!parts) return -1;
    int failed = !PyTuple_Check(parts) || !PyArg_ParseTuple(parts, "O!O!O!", &PyBytes_Type, &head, &PyTuple_Type,
                                                            &leaves, &PyTuple_Type, &scalars);
    if (!failed) {
        char *at = reserve(writer, (size_t)PyBytes_GET_SIZE(head));
        if (at) memcpy(at, PyBytes_AS_STRING(head), (size_t)PyBytes_GET_SIZE(head));
        failed = !at;
    }
    for (Py_ssize_t i = 0; !failed && i < PyTuple_GET_SIZE(leaves); i++)
        failed = write_odd_leaf(writer, PyTuple_GET_ITEM(leaves, i));
    for (Py_ssize_t i = 0; !failed && i < PyTuple_GET_SIZE(scalars); i++)
        failed = write_scalar(writer, PyTuple_GET_ITEM(scalars, i));
    Py_DECREF(parts);
    return failed ? -1 : 0;
}

/* --- containers ------------------------------------------------------------------------------------------------------ */

typedef int (*WriteChild)(Writer *, PyObject *, int);
typedef int (*WriteKey)(Writer *, PyObject *);

/* A snapshot of a dict's pairs, since encoding one may run code that changes the dict: key, value, key, value... */
static PyObject **pairs_of(PyObject *dict, Py_ssize_t *count) {
    Py_ssize_t most = PyDict_GET_SIZE(dict), n = 0, at = 0;
    PyObject **pairs = PyMem_Malloc((size_t)(2 * most + 1) * sizeof *pairs), *key, *value;
    if (!pairs) {
        PyErr_NoMemory();
        return NULL;
    }
    while (n < most && PyDict_Next(dict, &at, &key, &value)) {
        pairs[2 * n] = Py_NewRef(key);
        pairs[2 * n + 1] = Py_NewRef(value);
        n++;
    }
    *count = n;
    return pairs;
}

/* The same of a subclass of dict, by its `items`. */
static PyObject **items_of(PyObject *dict, Py_ssize_t *count) {
    PyObject *items = PyObject_CallMethod(dict, "items", NULL), **pairs = NULL;
    Py_XSETREF(items, items ? PySequence_Tuple(items) : NULL);
    if (!items) return NULL;
    Py_ssize_t most = PyTuple_GET_SIZE(items), n = 0;
    while (n < most && PyTuple_CheckExact(PyTuple_GET_ITEM(items, n)) && PyTuple_GET_SIZE(PyTuple_GET_ITEM(items, n)) == 2) n++;
    if (n == most) pairs = PyMem_Malloc((size_t)(2 * most + 1) * sizeof *pairs);
    for (Py_ssize_t i = 0; pairs && i < 2 * most; i++)
        pairs[i] = Py_NewRef(PyTuple_GET_ITEM(PyTuple_GET_ITEM(items, i / 2), i % 2));
    Py_DECREF(items);
    *count = most;
    return pairs;
}

/* Whether a key arrives as it is. */
static int is_bare(PyObject *key) {
    return PyUnicode_CheckExact(key) || PyLong_CheckExact(key) || PyFloat_CheckExact(key) || key == Py_None || PyBool_Check(key);
}

/* A key as it arrives, without its class. A float is a new one: NaN is no other NaN. */
static PyObject *bare(PyObject *key) {
    if (PyUnicode_Check(key)) return PyUnicode_FromObject(key);
    if (PyLong_Check(key)) return PyLong_Type.tp_as_number->nb_int(key);
    return PyFloat_Check(key) ? PyFloat_FromDouble(PyFloat_AS_DOUBLE(key)) : Py_NewRef(key);
}

/* 0 if no two keys arrive as the same: spec.Keys. */
static int check_keys(PyObject *const *pairs, Py_ssize_t count) {
    PyObject *found = PySet_New(NULL);
    int failed = !found;
    for (Py_ssize_t i = 0; i < count && !failed; i++) {
        PyObject *key = bare(pairs[2 * i]);
        failed = !key || PySet_Add(found, key) || PySet_GET_SIZE(found) != i + 1;
        Py_XDECREF(key);
    }
    Py_XDECREF(found);
    return failed ? -1 : 0;
}

static int write_dict(Writer *writer, PyObject *dict, int depth, WriteKey write_key, WriteChild write_child) {
    if (depth >= MAX_DEPTH) return -1;
    int differ = PyDict_CheckExact(dict); /* whether the keys do, also without their classes */
    Py_ssize_t count = 0;
    PyObject **pairs = (differ ? pairs_of : items_of)(dict, &count), *counts = NULL;
    if (!pairs) return -1;
    int failed = write_count(writer, DICT, count);
    for (Py_ssize_t i = 0; i < count && !failed; i++) {
        PyObject *key = pairs[2 * i];
        differ = differ && is_bare(key);
        failed = add_key(&counts, key) || write_key(writer, key) || write_child(writer, pairs[2 * i + 1], depth + 1);
    }
    if (!failed && !differ) failed = check_keys(pairs, count);
    Py_XDECREF(counts);
    for (Py_ssize_t i = 0; i < 2 * count; i++) Py_DECREF(pairs[i]);
    PyMem_Free(pairs);
    return failed ? -1 : 0;
}

static int write_sequence(Writer *writer, char tag, PyObject *sequence, int depth, WriteChild write_child) {
    if (depth >= MAX_DEPTH) return -1;
    PyObject *values = PySequence_Tuple(sequence); /* as they are now, as for dicts */
    if (!values) return -1;
    Py_ssize_t count = PyTuple_GET_SIZE(values);
    int failed = write_count(writer, tag, count) || writer->used + (size_t)count > MAX_DESCRIPTION;
    for (Py_ssize_t i = 0; i < count && !failed; i++) failed = write_child(writer, PyTuple_GET_ITEM(values, i), depth + 1);
    Py_DECREF(values);
    return failed ? -1 : 0;
}

static int write_key(Writer *writer, PyObject *key) { return write_scalar(writer, key) ? -1 : 0; }

static int write_name(Writer *writer, PyObject *key) { return PyUnicode_Check(key) ? write_text(writer, key) : -1; }

static int write_value(Writer *writer, PyObject *value, int depth) {
    const Codec *codec = writer->codec;
    PyTypeObject *type = Py_TYPE(value);
    int is_generic = 0, result = 1;
    if (type == &PyUnicode_Type || type == &PyLong_Type || type == &PyFloat_Type || value == Py_None || PyBool_Check(value))
        return write_scalar(writer, value);
    if (codec->tensor_type && (type == codec->tensor_type || type == codec->parameter_type))
        result = write_tensor(writer, value);
    else if (PyArray_CheckExact(value)) result = write_array(writer, value);
    else if (PyDict_Check(value)) result = write_dict(writer, value, depth, write_key, write_value);
    else if (PyList_Check(value)) result = write_sequence(writer, LIST, value, depth, write_value);
    else if (PyTuple_Check(value)) result = write_sequence(writer, TUPLE, value, depth, write_value);
    else if (PyBytes_CheckExact(value)) result = write_data(writer, value);
    else if ((is_generic = PyArray_IsScalar(value, Generic))) result = write_generic(writer, value);
    else result = write_scalar(writer, value);
    return result > 0 ? write_odd(writer, value) : result;
}

/* A value that JSON can express; a tuple becomes a list. */
static int write_plain(Writer *writer, PyObject *value, int depth) {
    if (PyDict_Check(value)) return write_dict(writer, value, depth, write_name, write_plain);
    if (PyList_Check(value) || PyTuple_Check(value)) return write_sequence(writer, LIST, value, depth, write_plain);
    return write_scalar(writer, value) ? -1 : 0;
}

static int write_meta(Writer *writer, PyObject *meta) {
    size_t start = writer->used;
    if (meta == Py_None) return write_tag(writer, NONE);
    return !PyDict_Check(meta) || write_plain(writer, meta, 0) || writer->used - start > MAX_META ? -1 : 0;
}

/* --- leaves that share memory: as codec/encode.py does -------------------------------------------------------------- */

typedef struct {
    uintptr_t start;
    uint64_t extent;
    Py_ssize_t number;
    int on_device;
    const char *node; /* as it is sent among others */
    size_t node_size;
} Extent;

/* 0 for equal views; any order else. */
static int compare_views(const Extent *left, const Extent *right) {
    enum { FIELDS = 4, REST = 16 }; /* the storage and the offset lie between them, and are not set yet */
    if (left->start != right->start) return left->start > right->start ? 1 : -1;
    if (left->node_size != right->node_size) return left->node_size > right->node_size ? 1 : -1;
    int fields = memcmp(left->node, right->node, FIELDS);
    return fields ? fields : memcmp(left->node + REST, right->node + REST, left->node_size - REST);
}

/* By start, equal views next to each other. */
static int by_start(const void *a, const void *b) {
    const Extent *left = a, *right = b;
    if (left->on_device != right->on_device) return left->on_device - right->on_device;
    int views = compare_views(left, right);
    return views ? views : (left->number > right->number) - (left->number < right->number);
}

/* Whether any two leaves may share memory. */
static int any_overlap(const Writer *writer) {
    uintptr_t end = 0;
    for (Py_ssize_t i = 0; i < writer->nleaves; i++) {
        const Leaf *leaf = &writer->leaves[i];
        if (!leaf->extent) continue;
        if (leaf->start < end || leaf->sharing == ON_DEVICE) return 1; /* also if they are only not in order */
        end = leaf->start + leaf->extent;
    }
    return 0;
}

/* Collect and sort all leaves that have memory; returns how many there are. */
static Py_ssize_t sorted_extents(const Writer *writer, Extent *extents) {
    Py_ssize_t count = 0;
    for (Py_ssize_t i = 0; i < writer->nleaves; i++) {
        const Leaf *leaf = &writer->leaves[i];
        if (!leaf->extent) continue;
        const int is_other = leaf->sharing == SHARES && leaf->other;
        extents[count++] = (Extent){
            .start = leaf->start, .extent = leaf->extent, .number = i, .on_device = leaf->sharing == ON_DEVICE,
            .node = is_other ? PyBytes_AS_STRING(leaf->other) : writer->data + leaf->node,
            .node_size = is_other ? (size_t)PyBytes_GET_SIZE(leaf->other) : leaf->node_size,
        };
    }
    qsort(extents, (size_t)count, sizeof *extents, by_start);
    return count;
}

/* Returns 1 if none overlap after all, -1 if the reference has to encode the message. */
static int check_overlaps(const Writer *writer, const Extent *extents, Py_ssize_t count) {
    int asks = 0, overlap = 0, asked = 0; /* in the run of overlapping ones that ends at `end`; anywhere */
    uintptr_t end = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        const Extent *extent = &extents[i];
        int asks_now = writer->leaves[extent->number].sharing >= ASKS;
        if (i && extent->on_device == extents[i - 1].on_device && extent->start < end) {
            overlap = 1;
            asked |= asks | asks_now;
            asks |= asks_now;
        } else {
            end = 0;
            asks = asks_now;
        }
        if (extent->start + extent->extent > end) end = extent->start + extent->extent;
    }
    return asked ? -1 : !overlap;
}

/* Add a shared storage; returns its number. There is room for as many as there are leaves. */
static uint32_t add_storage(Writer *writer, uint64_t offset, uint64_t nbytes) {
    writer->storages[2 * writer->nstorages] = offset;
    writer->storages[2 * writer->nstorages + 1] = nbytes;
    return ++writer->nstorages;
}

/* Place the group `extents[0]` to `extents[count - 1]`: each leaf but the first overlaps one before it. */
static int place_group(Writer *writer, const Extent *extents, Py_ssize_t count) {
    uintptr_t start = extents[0].start, end = start;
    uint32_t tensors = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (extents[i].start + extents[i].extent > end) end = extents[i].start + extents[i].extent;
        tensors += (uint32_t)writer->leaves[extents[i].number].is_torch;
    }
    /* the same offset modulo 16 as in the source, so that every member stays aligned */
    uint64_t offset = aligned(writer->end) + start % STORAGE_ALIGNMENT, extent = end - start;
    if (extent > MAX_BYTES || offset > MAX_BYTES - extent) return -1;
    writer->end = offset + extent;
    uint64_t low = offset - offset % STORAGE_ALIGNMENT;
    uint32_t storage = tensors > 1 ? add_storage(writer, low, writer->end - low) : 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        Leaf *leaf = &writer->leaves[extents[i].number];
        leaf->offset = offset + (leaf->start - start);
        leaf->storage = leaf->is_torch ? storage : 0;
        leaf->is_placed = 1;
        leaf->next = i + 1 < count ? extents[i + 1].number : -1;
        leaf->address = i ? 0 : start; /* the first copies for all */
        leaf->size = i ? 0 : extent;
        Py_CLEAR(leaf->job);
    }
    return 0;
}

/* Whether at least half of the memory from the first to the last byte of a group is its leaves', equal views counted once. */
static int is_filled(const Writer *writer, const Extent *extents, Py_ssize_t count) {
    uintptr_t end = 0;
    for (Py_ssize_t i = 0; i < count; i++)
        if (extents[i].start + extents[i].extent > end) end = extents[i].start + extents[i].extent;
    uint64_t extent = end - extents[0].start, filled = 0;
    for (Py_ssize_t i = 0; i < count && filled < extent; i++)
        if (!i || compare_views(&extents[i - 1], &extents[i])) filled += writer->leaves[extents[i].number].size;
    return filled >= extent - extent / 2;
}

/* Let only equal views of a group share one copy. */
static void join_equal(Writer *writer, const Extent *extents, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) {
        Leaf *leaf = &writer->leaves[extents[i].number];
        if (i && !compare_views(&extents[i - 1], &extents[i])) leaf->first = writer->leaves[extents[i - 1].number].first;
        writer->leaves[leaf->first].copies++;
    }
}

static int place_groups(Writer *writer, const Extent *extents, Py_ssize_t count) {
    Extent *group = PyMem_Malloc(((size_t)count + 1) * sizeof *group);
    if (!group) return -1;
    Py_ssize_t members = 0;
    uintptr_t end = 0;
    int failed = 0;
    for (Py_ssize_t i = 0; i <= count && !failed; i++) {
        if (i < count && (extents[i].on_device || writer->leaves[extents[i].number].sharing != SHARES)) continue;
        if (i == count || extents[i].start >= end) {
            if (members > 1 && is_filled(writer, group, members)) failed = place_group(writer, group, members);
            else join_equal(writer, group, members);
            members = 0;
            end = 0;
        }
        if (i == count) break;
        group[members++] = extents[i];
        if (extents[i].start + extents[i].extent > end) end = extents[i].start + extents[i].extent;
    }
    PyMem_Free(group);
    return failed ? -1 : 0;
}

/* Let equal views, expanded or reversed, share one copy. */
static int find_copies(Writer *writer) {
    PyObject *firsts = PyDict_New();
    int failed = !firsts;
    for (Py_ssize_t i = 0; i < writer->nleaves && !failed; i++) {
        Leaf *leaf = &writer->leaves[i];
        if (leaf->sharing != COPIED || !leaf->other) continue;
        PyObject *number = PyLong_FromSsize_t(i), *first = number ? PyDict_SetDefault(firsts, leaf->other, number) : NULL;
        failed = !first;
        if (first) leaf->first = PyLong_AsSsize_t(first);
        if (first) writer->leaves[leaf->first].copies++;
        Py_XDECREF(number);
    }
    Py_XDECREF(firsts);
    return failed ? -1 : 0;
}

static int place_others(Writer *writer) {
    for (Py_ssize_t i = 0; i < writer->nleaves; i++) {
        Leaf *leaf = &writer->leaves[i], *first = &writer->leaves[leaf->first];
        if (leaf->is_placed) continue;
        if (first == leaf) {
            if (place_leaf(writer, leaf)) return -1;
            if (leaf->is_torch && leaf->copies > 1) leaf->storage = add_storage(writer, leaf->offset, leaf->size);
        } else {
            leaf->offset = first->offset;
            leaf->storage = first->storage;
            leaf->size = 0;
            Py_CLEAR(leaf->job);
        }
    }
    return 0;
}

/* Rewrite the description, with the shared storages and each leaf's new position. */
static int write_again(Writer *writer) {
    const size_t table = (size_t)writer->nstorages * STORAGE;
    size_t size = writer->used + table, at = HEADER;
    for (Py_ssize_t i = 0; i < writer->nleaves; i++) {
        const Leaf *leaf = &writer->leaves[i];
        if (leaf->is_placed && leaf->other) size += (size_t)PyBytes_GET_SIZE(leaf->other) - leaf->node_size;
    }
    char *data = size <= MAX_DESCRIPTION ? PyMem_Malloc(size) : NULL, *to = data;
    if (!data) return -1;
    memcpy(to, writer->data, HEADER);
    memcpy(to + 4, &writer->nstorages, 4);
    memcpy(to + HEADER, writer->storages, table);
    to += HEADER + table;
    for (Py_ssize_t i = 0; i < writer->nleaves; i++) {
        const Leaf *leaf = &writer->leaves[i];
        memcpy(to, writer->data + at, leaf->node - at);
        to += leaf->node - at;
        at = leaf->node + leaf->node_size;
        const int is_other = leaf->is_placed && leaf->other;
        const size_t count = is_other ? (size_t)PyBytes_GET_SIZE(leaf->other) : leaf->node_size;
        memcpy(to, is_other ? PyBytes_AS_STRING(leaf->other) : writer->data + leaf->node, count);
        memcpy(to + 4, &leaf->storage, 4);
        memcpy(to + 8, &leaf->offset, 8);
        to += count;
    }
    memcpy(to, writer->data + at, writer->used - at);
    if (writer->data != writer->few_bytes) PyMem_Free(writer->data);
    writer->data = data;
    writer->used = writer->room = size;
    return 0;
}

/* If leaves share memory: place first the groups that overlap and fill it, each in one run of bytes, then the others. */
static int arrange(Writer *writer) {
    if (!any_overlap(writer)) return 0;
    Extent *extents = PyMem_Malloc((size_t)writer->nleaves * sizeof *extents);
    writer->storages = PyMem_Malloc((size_t)writer->nleaves * STORAGE);
    int result = -1;
    if (extents && writer->storages) {
        Py_ssize_t count = sorted_extents(writer, extents);
        result = check_overlaps(writer, extents, count);
        if (!result) {
            writer->end = 0;
            if (place_groups(writer, extents, count) || find_copies(writer) || place_others(writer) || write_again(writer))
                result = -1;
        }
    }
    PyMem_Free(extents);
    PyMem_Free(writer->storages);
    return result < 0 ? -1 : 0;
}

/* --- the whole value -------------------------------------------------------------------------------------------------------- */

/* The copies of leaves whose bytes do not lie in memory as they are sent. */
static int make_jobs(Writer *writer) {
    for (Py_ssize_t i = 0; i < writer->nleaves; i++) {
        const Leaf *leaf = &writer->leaves[i];
        if (!leaf->job) continue;
        PyObject *made = PyObject_CallFunction(leaf->job, "K", (unsigned long long)leaf->offset);
        if (!made) return -1;
        int on_device = PyObject_HasAttrString(made, "device");
        PyObject **list = on_device ? &writer->device_jobs : &writer->jobs;
        if (!*list) *list = PyList_New(0);
        int failed = !*list || PyList_Append(*list, made);
        Py_DECREF(made);
        if (failed) return -1;
    }
    return 0;
}

static PyObject *finish(Writer *writer) {
    Codec *codec = writer->codec;
    Encoded *encoded = (Encoded *)codec->encoded_type->tp_alloc(codec->encoded_type, writer->nleaves);
    if (!encoded) return NULL;
    encoded->codec = (Codec *)Py_NewRef(codec);
    encoded->jobs = Py_XNewRef(writer->jobs);
    encoded->device_jobs = writer->device_jobs ? Py_NewRef(writer->device_jobs) : PyTuple_New(0);
    encoded->description = PyBytes_FromStringAndSize(writer->data, (Py_ssize_t)writer->used);
    for (Py_ssize_t i = 0; i < writer->nleaves; i++) {
        const Leaf *leaf = &writer->leaves[i];
        encoded->runs[i] = (Run){
            .source = Py_NewRef(leaf->source), .address = leaf->address, .offset = leaf->offset,
            .size = leaf->address ? leaf->size : 0,
            .looked_at = leaf->looked_at, .looked_at_size = leaf->looked_at_size,
            .is_odd = leaf->is_odd, .next = leaf->next,
        };
    }
    encoded->nbytes = (Py_ssize_t)writer->end;
    encoded->total = encoded->nbytes;
    if ((Py_ssize_t)writer->used > codec->inline_bytes)
        encoded->total = (Py_ssize_t)aligned(writer->end) + (Py_ssize_t)writer->used;
    if (!encoded->description || !encoded->device_jobs) Py_CLEAR(encoded);
    return (PyObject *)encoded;
}

/* `value`: the payload, in memory that stays where it is as long as the object lives; `meta`: the description. */
static PyObject *encode_raw(Codec *codec, PyObject *value, PyObject *meta) {
    Py_buffer view;
    if (!PyBytes_Check(meta) || !(PyBytes_Check(value) || PyMemoryView_Check(value))) {
        PyErr_SetString(PyExc_TypeError, "a payload, bytes or memoryview, and a description, bytes");
        return NULL;
    }
    PyObject *source = PyBytes_Check(value) ? Py_NewRef(value) : PyMemoryView_FromObject(value); /* nobody can release that */
    if (!source || PyObject_GetBuffer(source, &view, PyBUF_SIMPLE)) {
        Py_XDECREF(source);
        return NULL;
    }
    Encoded *encoded = (Encoded *)codec->encoded_type->tp_alloc(codec->encoded_type, 1);
    if (encoded) {
        encoded->codec = (Codec *)Py_NewRef(codec);
        encoded->description = Py_NewRef(meta);
        encoded->runs[0] = (Run){.source = Py_NewRef(source), .address = (uintptr_t)view.buf, .size = (uint64_t)view.len,
                                 .next = -1};
        encoded->total = encoded->nbytes = view.len;
        if (PyBytes_GET_SIZE(meta) > codec->inline_bytes)
            encoded->total = (Py_ssize_t)aligned((uint64_t)view.len) + PyBytes_GET_SIZE(meta);
        if (!(encoded->device_jobs = PyTuple_New(0))) Py_CLEAR(encoded);
    }
    PyBuffer_Release(&view);
    Py_DECREF(source);
    return (PyObject *)encoded;
}

PyObject *encode_value(Codec *codec, PyObject *value, PyObject *meta) {
    if (codec->raw) return encode_raw(codec, value, meta);
    Writer writer;
    writer.codec = codec;
    writer.data = writer.few_bytes;
    writer.room = FEW_BYTES;
    writer.leaves = writer.few_leaves;
    writer.leaf_room = FEW_LEAVES;
    writer.nleaves = 0;
    writer.storages = NULL;
    writer.nstorages = 0;
    writer.end = 0;
    writer.jobs = writer.device_jobs = NULL;
    writer.used = HEADER;
    memset(writer.data, 0, HEADER);
    writer.data[0] = VERSION;
    PyObject *made = NULL;
    if (!write_value(&writer, value, 0) && !write_meta(&writer, meta) && !arrange(&writer) && !make_jobs(&writer))
        made = finish(&writer);
    for (Py_ssize_t i = 0; i < writer.nleaves; i++) {
        Py_DECREF(writer.leaves[i].source);
        Py_XDECREF(writer.leaves[i].job);
        Py_XDECREF(writer.leaves[i].other);
    }
    if (writer.leaves != writer.few_leaves) PyMem_Free(writer.leaves);
    if (writer.data != writer.few_bytes) PyMem_Free(writer.data);
    Py_XDECREF(writer.jobs);
    Py_XDECREF(writer.device_jobs);
    if (made || !is_for_the_reference()) return made;
    codec->handed_over++;
    return PyObject_CallFunctionObjArgs(codec->encode, value, meta, NULL);
}
