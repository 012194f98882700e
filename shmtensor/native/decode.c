/* From a description and the payload to a value and its meta: what codec/decode.py does, in one pass. */

#include "native.h"

typedef struct {
    Codec *codec;
    PyObject *owner;                 /* of the payload: every view keeps it alive */
    PyObject *description, *payload; /* Python objects, once the reference needs them */
    PyObject *tree; /* the reference's reader of this message, once it was needed */
    const unsigned char *data;
    char *base;
    size_t at, size;
    uint64_t nbytes;
    uint32_t storages;
    int readonly;
} Reader;

/* Every function below returns a new reference, or NULL: with an error set, or without one to hand over to the reference. No
 * read goes beyond `size`, since only `take` advances `at` over the bytes that are read. */

static PyObject *read_value(Reader *reader, int depth);

static const unsigned char *take(Reader *reader, size_t count) {
    if (count > reader->size - reader->at) return NULL;
    const unsigned char *found = reader->data + reader->at;
    reader->at += count;
    return found;
}

static int take_count(Reader *reader, uint32_t *count) {
    const unsigned char *found = take(reader, 4);
    if (!found) return -1;
    memcpy(count, found, 4);
    return *count > reader->size - reader->at ? -1 : 0;
}

static int set_owner(PyObject *array, PyObject *owner) {
    return PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(owner));
}

/* Make the Python objects of description and payload for the reference. */
static int show_python(Reader *reader) {
    if (!reader->description)
        reader->description = PyBytes_FromStringAndSize((const char *)reader->data, (Py_ssize_t)reader->size);
    if (!reader->payload) {
        npy_intp nbytes = (npy_intp)reader->nbytes;
        PyArray_Descr *bytes = PyArray_DescrFromType(NPY_UINT8);
        reader->payload = bytes ? PyArray_NewFromDescr(&PyArray_Type, bytes, 1, &nbytes, NULL, reader->base,
                                                       NPY_ARRAY_CARRAY, NULL) : NULL;
        if (reader->payload && set_owner(reader->payload, reader->owner)) Py_CLEAR(reader->payload);
    }
    return reader->description && reader->payload ? 0 : -1;
}

/* The node at `at`, of a type that is not known here: the reference makes it. */
static PyObject *read_odd(Reader *reader, size_t at) {
    if (!reader->tree) {
        if (show_python(reader)) return NULL;
        reader->tree = PyObject_CallFunction(reader->codec->tree, "OOO", reader->description, reader->payload,
                                             reader->readonly ? Py_True : Py_False);
        if (!reader->tree) return NULL;
    }
    PyObject *found = PyObject_CallMethod(reader->tree, "node_at", "n", (Py_ssize_t)at), *value = NULL;
    Py_ssize_t end;
    if (!found) return NULL;
    if (PyTuple_Check(found) && PyArg_ParseTuple(found, "On", &value, &end) && end >= (Py_ssize_t)at &&
        (size_t)end <= reader->size) {
        reader->at = (size_t)end;
        Py_INCREF(value);
    } else value = NULL;
    Py_DECREF(found);
    return value;
}

static PyObject *read_scalar(Reader *reader, int tag) {
    const unsigned char *found;
    uint32_t count;
    switch (tag) {
    case NONE: return Py_NewRef(Py_None);
    case FALSE_: return Py_NewRef(Py_False);
    case TRUE_: return Py_NewRef(Py_True);
    case INT: {
        int64_t number;
        if (!(found = take(reader, 8))) return NULL;
        memcpy(&number, found, 8);
        return PyLong_FromLongLong(number);
    }
    case FLOAT: {
        double number;
        if (!(found = take(reader, 8))) return NULL;
        memcpy(&number, found, 8);
        return PyFloat_FromDouble(number);
    }
    case BIG_INT: return read_odd(reader, reader->at - 1);
    case STR:
        if (take_count(reader, &count)) return NULL;
        found = take(reader, count);
        return PyUnicode_DecodeUTF8((const char *)found, (Py_ssize_t)count, "surrogatepass");
    default: return NULL;
    }
}

/* --- leaves ---------------------------------------------------------------------------------------------------------- */

typedef struct {
    const Row *row;
    int code, flags, ndim, has_strides;
    uint64_t offset, nbytes; /* to the end of the last element; 0: none, or not to be made here */
    int64_t shape[MAX_NDIM], strides[MAX_NDIM];
} Place;

/* Read the leaf whose tag was read. 0; 1 if Python has to make it; -1 if it is invalid. */
static int read_leaf_head(Reader *reader, Place *place) {
    const unsigned char *head = take(reader, LEAF_HEAD - 1);
    if (!head) return -1;
    uint32_t storage;
    place->code = head[0];
    place->flags = head[1];
    place->ndim = head[2];
    memcpy(&storage, head + 3, 4);
    memcpy(&place->offset, head + 7, 8);
    if (place->flags & ~(TORCH | STRIDES) || place->ndim > MAX_NDIM) return -1;
    place->row = &reader->codec->rows[place->code];
    if (!place->row->itemsize || storage) return 1;
    if (place->flags & TORCH ? !place->row->in_torch : place->row->type_num < 0 || place->ndim > reader->codec->max_ndim)
        return 1;
    const size_t words = 8 * (size_t)place->ndim;
    const unsigned char *shape = take(reader, words), *strides = NULL;
    place->has_strides = (place->flags & STRIDES) != 0;
    if (!shape || (place->has_strides && !(strides = take(reader, words)))) return -1;
    memcpy(place->shape, shape, words);
    if (strides) memcpy(place->strides, strides, words);

    const uint64_t itemsize = place->row->itemsize;
    uint64_t whole = itemsize, extent = itemsize;
    int is_torch = place->flags & TORCH;
    if (place->offset > MAX_BYTES || (is_torch && place->offset % itemsize)) return -1;
    for (int i = place->ndim - 1; i >= 0; i--) {
        uint64_t length = (uint64_t)place->shape[i], stride = whole;
        if (!length) return 1; /* holds no bytes; checked there */
        if (__builtin_mul_overflow(whole, length, &whole) || whole > MAX_BYTES) return -1;
        if (strides) {
            stride = (uint64_t)place->strides[i];
            if (stride > MAX_BYTES || (length > 1 && !stride) || (is_torch && stride % itemsize)) return -1;
        } else place->strides[i] = (int64_t)stride;
        uint64_t more;
        if (__builtin_mul_overflow(length - 1, stride, &more) || __builtin_add_overflow(extent, more, &extent)) return -1;
    }
    place->nbytes = extent;
    return place->offset > reader->nbytes || extent > reader->nbytes - place->offset ? -1 : 0;
}

static PyObject *make_array(Reader *reader, const Place *place) {
    PyArray_Descr *descr = PyArray_DescrFromType(place->row->type_num);
    if (!descr) return NULL;
    npy_intp shape[MAX_NDIM], strides[MAX_NDIM];
    for (int i = 0; i < place->ndim; i++) {
        shape[i] = (npy_intp)place->shape[i];
        strides[i] = (npy_intp)place->strides[i];
    }
    PyObject *made = PyArray_NewFromDescr(&PyArray_Type, descr, place->ndim, shape, place->has_strides ? strides : NULL,
                                          reader->base + place->offset, reader->readonly ? 0 : NPY_ARRAY_WRITEABLE, NULL);
    if (!made) return NULL;
    if (set_owner(made, reader->owner)) {
        Py_DECREF(made);
        return NULL;
    }
    PyArray_UpdateFlags((PyArrayObject *)made, NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_F_CONTIGUOUS | NPY_ARRAY_ALIGNED);
    return made;
}

static PyObject *read_leaf(Reader *reader) {
    Place place;
    size_t start = reader->at - 1;
    int kind = read_leaf_head(reader, &place);
    if (kind) return kind > 0 ? read_odd(reader, start) : NULL;
    if (!(place.flags & TORCH)) return make_array(reader, &place);
    for (int i = 0; i < place.ndim; i++) place.strides[i] /= (int64_t)place.row->itemsize;
    return make_tensor(reader->codec, place.row, reader->base + place.offset, place.ndim, place.shape, place.strides,
                       reader->owner);
}

/* Bytes and NumPy's scalars are private copies; other composites are the reference's. */
static PyObject *read_composite(Reader *reader) {
    size_t start = reader->at - 1;
    const unsigned char *head = take(reader, 4);
    Place place;
    if (!head || head[1] || head[2] != 1 || head[3] != LEAF || (head[0] != DATA && head[0] != GENERIC) ||
        read_leaf_head(reader, &place) || place.flags)
        return read_odd(reader, start);
    const char *data = reader->base + place.offset;
    if (head[0] == DATA && place.ndim == 1 && place.code == reader->codec->code_of_type[NPY_UINT8])
        return PyBytes_FromStringAndSize(data, (Py_ssize_t)place.nbytes);
    if (head[0] != GENERIC || place.ndim) return read_odd(reader, start);
    PyArray_Descr *descr = PyArray_DescrFromType(place.row->type_num);
    if (!descr) return NULL;
    double aligned[4]; /* the largest type of the table has 16 bytes */
    memcpy(aligned, data, (size_t)place.nbytes);
    PyObject *made = PyArray_Scalar(aligned, descr, NULL);
    Py_DECREF(descr);
    return made;
}

/* --- containers ------------------------------------------------------------------------------------------------------ */

typedef PyObject *(*ReadChild)(Reader *, int);

/* Grown one by one: the code that a leaf may run never sees a list with holes. */
static PyObject *read_list(Reader *reader, int depth, ReadChild read_child) {
    uint32_t count;
    if (depth >= MAX_DEPTH || take_count(reader, &count)) return NULL;
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && i < count; i++) {
        PyObject *child = read_child(reader, depth + 1);
        if (!child || PyList_Append(list, child)) Py_CLEAR(list);
        Py_XDECREF(child);
    }
    return list;
}

static PyObject *read_dict(Reader *reader, int depth, ReadChild read_child, int only_names) {
    uint32_t count;
    if (depth >= MAX_DEPTH || take_count(reader, &count)) return NULL;
    PyObject *dict = PyDict_New(), *counts = NULL;
    for (uint32_t i = 0; dict && i < count; i++) {
        const unsigned char *tag = take(reader, 1);
        PyObject *key = !tag || (only_names && *tag != STR) ? NULL : read_scalar(reader, *tag);
        PyObject *child = key && !add_key(&counts, key) ? read_child(reader, depth + 1) : NULL;
        if (!child || PyDict_SetItem(dict, key, child)) Py_CLEAR(dict);
        Py_XDECREF(key);
        Py_XDECREF(child);
    }
    Py_XDECREF(counts);
    if (dict && (size_t)PyDict_GET_SIZE(dict) != count) Py_CLEAR(dict); /* a key twice */
    return dict;
}

static PyObject *read_value(Reader *reader, int depth) {
    const unsigned char *tag = take(reader, 1);
    if (!tag) return NULL;
    switch (*tag) {
    case LEAF: return read_leaf(reader);
    case COMPOSITE: return read_composite(reader);
    case LIST: return read_list(reader, depth, read_value);
    case DICT: return read_dict(reader, depth, read_value, 0);
    case TUPLE: {
        PyObject *list = read_list(reader, depth, read_value), *made = list ? PyList_AsTuple(list) : NULL;
        Py_XDECREF(list);
        return made;
    }
    default: return read_scalar(reader, *tag);
    }
}

/* A value that JSON can express. */
static PyObject *read_plain(Reader *reader, int depth) {
    const unsigned char *tag = take(reader, 1);
    if (!tag) return NULL;
    if (*tag == LIST) return read_list(reader, depth, read_plain);
    if (*tag == DICT) return read_dict(reader, depth, read_plain, 1);
    return read_scalar(reader, *tag);
}

/* --- the whole message -------------------------------------------------------------------------------------------------------- */

static int read_header(Reader *reader) {
    if (reader->size > MAX_DESCRIPTION) return -1;
    const unsigned char *head = take(reader, HEADER);
    if (!head || head[0] != VERSION || head[1] || head[2] || head[3]) return -1;
    memcpy(&reader->storages, head + 4, 4);
    if (reader->storages > reader->size / STORAGE) return -1;
    for (uint32_t i = 0; i < reader->storages; i++) {
        uint64_t place[2]; /* offset, bytes */
        const unsigned char *found = take(reader, STORAGE);
        if (!found) return -1;
        memcpy(place, found, STORAGE);
        if (place[0] % STORAGE_ALIGNMENT || !place[1] || place[0] > MAX_BYTES || place[1] > MAX_BYTES) return -1;
    }
    return 0;
}

/* 0 with value and meta; -1 as above. */
static int read_message(Reader *reader, PyObject **value, PyObject **meta) {
    *value = *meta = NULL;
    if (read_header(reader)) return -1;
    *value = read_value(reader, 0);
    size_t start = reader->at;
    if (*value) *meta = read_plain(reader, 0);
    if (*meta && (*meta == Py_None || PyDict_Check(*meta)) && reader->at - start <= MAX_META && reader->at == reader->size)
        return 0;
    Py_CLEAR(*value);
    Py_CLEAR(*meta);
    return -1;
}

static PyObject *ask_reference(Codec *codec, PyObject *description, PyObject *payload, int readonly) {
    PyObject *args[] = {description, payload, readonly ? Py_True : Py_False};
    PyObject *names = Py_BuildValue("(s)", "readonly");
    if (!names) return NULL;
    codec->handed_over++;
    PyObject *made = PyObject_Vectorcall(codec->decode, args, 2, names);
    Py_DECREF(names);
    return made;
}

int decode_at(Codec *codec, const void *text, size_t size, PyObject *owner, void *base, uint64_t nbytes, int readonly,
              PyObject **value, PyObject **meta) {
    if (codec->raw) {
        *value = PyMemoryView_FromObject(owner);
        *meta = *value ? PyBytes_FromStringAndSize(text, (Py_ssize_t)size) : NULL;
        if (*meta) return 0;
        Py_CLEAR(*value);
        return -1;
    }
    Reader reader = {
        .codec = codec, .owner = owner, .readonly = readonly, .data = text, .size = size, .base = base, .nbytes = nbytes,
    };
    int failed = read_message(&reader, value, meta);
    if (failed && is_for_the_reference() && !show_python(&reader)) {
        PyObject *made = ask_reference(codec, reader.description, reader.payload, readonly);
        if (made && PyTuple_Check(made) && PyTuple_GET_SIZE(made) == 2) {
            *value = Py_NewRef(PyTuple_GET_ITEM(made, 0));
            *meta = Py_NewRef(PyTuple_GET_ITEM(made, 1));
            failed = 0;
        } else if (made) PyErr_SetString(PyExc_TypeError, "the reference returned no pair");
        Py_XDECREF(made);
    }
    Py_XDECREF(reader.tree);
    Py_XDECREF(reader.description);
    Py_XDECREF(reader.payload);
    return failed;
}

/* A view that keeps an array alive, and by which NumPy cannot make it writable. */
static PyObject *read_only(PyObject *array) {
    PyObject *view = PyMemoryView_FromObject(array), *made = view ? PyObject_CallMethod(view, "toreadonly", NULL) : NULL;
    Py_XDECREF(view);
    return made;
}

PyObject *decode_message(Codec *codec, PyObject *description, PyObject *payload, int readonly) {
    PyArrayObject *array = (PyArrayObject *)payload;
    if (!PyBytes_Check(description) || !PyArray_CheckExact(payload) || PyArray_TYPE(array) != NPY_UINT8 ||
        PyArray_NDIM(array) != 1 || !PyArray_IS_C_CONTIGUOUS(array) || !PyArray_ISWRITEABLE(array))
        return ask_reference(codec, description, payload, readonly);
    PyObject *owner = readonly ? read_only(payload) : Py_NewRef(payload), *value, *meta, *made;
    if (!owner) return NULL;
    int failed = decode_at(codec, PyBytes_AS_STRING(description), (size_t)PyBytes_GET_SIZE(description), owner,
                           PyArray_BYTES(array), (uint64_t)PyArray_SIZE(array), readonly, &value, &meta);
    Py_DECREF(owner);
    if (failed) return NULL;
    made = PyTuple_Pack(2, value, meta);
    Py_DECREF(value);
    Py_DECREF(meta);
    return made;
}
