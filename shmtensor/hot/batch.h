/* Included once, by _hot.c. */

/* --- Batch: the tensors of a message with several ----------------------------------------------------------------- */

typedef struct {
    Look look;
    Py_ssize_t offset; /* bytes from the start of the payload */
} Part;

typedef struct {
    PyObject_HEAD
    Py_ssize_t count, nbytes;
    Part *parts;
} Batch;

static int Batch_init(Batch *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"payload", "tensors", NULL};
    PyObject *payload, *tensors;
    Py_buffer view;
    if (self->parts) {
        PyErr_SetString(PyExc_RuntimeError, "made already");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!", names, &payload, &PyList_Type, &tensors)) return -1;
    if (PyObject_GetBuffer(payload, &view, PyBUF_SIMPLE)) return -1;
    const char *base = view.buf;
    Py_ssize_t length = view.len, count = PyList_GET_SIZE(tensors);
    PyBuffer_Release(&view); /* the caller holds the payload; only distances are kept */
    self->parts = calloc((size_t)count + 1, sizeof(Part));
    if (!self->parts) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        DLTensor tensor;
        Part *part = &self->parts[i];
        if (!look_at(PyList_GET_ITEM(tensors, i), &tensor)) goto strange;
        remember_look(&part->look, &tensor, 0);
        part->offset = (const char *)tensor.data + tensor.byte_offset - base;
        int64_t last = 0;
        for (int32_t d = 0; d < part->look.ndim; d++) {
            if (part->look.strides[d] < 0 || part->look.shape[d] < 1) goto strange;
            last += (part->look.shape[d] - 1) * part->look.strides[d];
        }
        int64_t itemsize = ((int64_t)tensor.dtype.bits * tensor.dtype.lanes + 7) / 8;
        Py_ssize_t end = part->offset + (Py_ssize_t)((last + 1) * itemsize);
        if (part->offset < 0 || end > length) goto strange;
        if (end > self->nbytes) self->nbytes = end;
    }
    self->count = count;
    return 0;
strange:
    PyErr_SetString(PyExc_ValueError, "not a list of plain tensors in the payload");
    return -1;
}

static void Batch_dealloc(Batch *self) {
    free(self->parts);
    Py_TYPE(self)->tp_free(self);
}

PyDoc_STRVAR(Batch_make_doc, "make(payload)\n--\n\nThe tensors of another payload of the same description, each of which "
                             "keeps the payload.");

static PyObject *Batch_make(Batch *self, PyObject *payload) {
    Py_buffer view;
    if (PyObject_GetBuffer(payload, &view, PyBUF_SIMPLE)) return NULL;
    char *base = view.buf;
    Py_ssize_t length = view.len;
    PyBuffer_Release(&view); /* every tensor refers to the payload itself */
    if (length < self->nbytes) {
        PyErr_SetString(PyExc_ValueError, "the payload is too small");
        return NULL;
    }
    PyObject *tensors = PyList_New(self->count);
    if (!tensors) return NULL;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        PyObject *tensor = make_tensor(&self->parts[i].look, base + self->parts[i].offset, NULL, payload);
        if (!tensor) {
            Py_DECREF(tensors);
            return NULL;
        }
        PyList_SET_ITEM(tensors, i, tensor);
    }
    return tensors;
}

static PyMethodDef Batch_methods[] = {
    {"make", (PyCFunction)Batch_make, METH_O, Batch_make_doc},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject BatchType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmtensor.hot._hot.Batch",
    .tp_doc = "Batch(payload, tensors): how the tensors of a message lie in its payload.",
    .tp_basicsize = sizeof(Batch),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Batch_init,
    .tp_dealloc = (destructor)Batch_dealloc,
    .tp_methods = Batch_methods,
};
