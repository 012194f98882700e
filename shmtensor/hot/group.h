/* Included once, by _hot.c. */

/* --- Group: several tensors that are sent together ------------------------------------------------------------------ */

typedef struct {
    Look look;
    Py_ssize_t offset; /* bytes from the start of the payload */
} Member;

typedef struct {
    PyObject_HEAD
    Py_ssize_t count, end, most, small; /* `small`: bytes of those of at most `most` bytes, which `copy` copies */
    Member *members;
} Group;

typedef struct { uint64_t start, end; } Extent;

static int Group_init(Group *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"tensors", "offsets", "most", NULL};
    PyObject *tensors, *offsets;
    if (self->members) {
        PyErr_SetString(PyExc_RuntimeError, "made already");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!n", names, &PyList_Type, &tensors, &PyList_Type, &offsets,
                                     &self->most))
        return -1;
    Py_ssize_t count = PyList_GET_SIZE(tensors);
    if (PyList_GET_SIZE(offsets) != count) goto strange;
    self->members = calloc((size_t)count + 1, sizeof(Member));
    if (!self->members) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        DLTensor tensor;
        Member *member = &self->members[i];
        member->offset = PyLong_AsSsize_t(PyList_GET_ITEM(offsets, i));
        if (PyErr_Occurred()) return -1;
        if (member->offset < 0 || !look_at(PyList_GET_ITEM(tensors, i), &tensor) || !is_dense(&tensor)) goto strange;
        remember_look(&member->look, &tensor, size_of(&tensor));
        if (member->look.nbytes <= self->most) self->small += member->look.nbytes;
        if (member->offset + member->look.nbytes > self->end) self->end = member->offset + member->look.nbytes;
    }
    self->count = count;
    return 0;
strange:
    PyErr_SetString(PyExc_ValueError, "not a list of plain tensors with an offset for each");
    return -1;
}

static void Group_dealloc(Group *self) {
    free(self->members);
    Py_TYPE(self)->tp_free(self);
}

static int by_start(const void *a, const void *b) {
    uint64_t left = ((const Extent *)a)->start, right = ((const Extent *)b)->start;
    return (left > right) - (left < right);
}

static int any_overlap(Extent *extents, Py_ssize_t count) {
    Py_ssize_t i;
    for (i = 1; i < count && extents[i].start >= extents[i - 1].end; i++) {}
    if (i >= count) return 0; /* in the order of their addresses already */
    qsort(extents, (size_t)count, sizeof *extents, by_start);
    for (i = 1; i < count; i++)
        if (extents[i].start < extents[i - 1].end) return 1;
    return 0;
}

PyDoc_STRVAR(Group_match_doc,
             "match(tensors)\n--\n\nThe addresses (uint64, as bytes) of tensors that look like these, one by one, and share "
             "no memory; else None.");

static PyObject *Group_match(Group *self, PyObject *tensors) {
    if (!PyList_Check(tensors)) {
        PyErr_SetString(PyExc_TypeError, "a list");
        return NULL;
    }
    Py_ssize_t count = self->count;
    if (PyList_GET_SIZE(tensors) != count) Py_RETURN_NONE;
    for (Py_ssize_t i = 0; i < count; i++) { /* first what may run other Python code: torch's modes */
        PyObject *value = PyList_GET_ITEM(tensors, i);
        if (Py_TYPE(value) != tensor_type) Py_RETURN_NONE;
        PyObject *negative = PyObject_CallMethodNoArgs(value, s_is_neg);
        if (!negative) return NULL;
        Py_DECREF(negative);
        if (negative != Py_False || PyList_GET_SIZE(tensors) != count) Py_RETURN_NONE;
    }
    PyObject *result = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(uint64_t));
    Extent *extents = malloc((size_t)(count + 1) * sizeof(Extent));
    if (!result || !extents) {
        Py_XDECREF(result);
        free(extents);
        return PyErr_NoMemory();
    }
    uint64_t *addresses = (uint64_t *)PyBytes_AS_STRING(result);
    int usual = PyList_GET_SIZE(tensors) == count;
    for (Py_ssize_t i = 0; i < count && usual; i++) {
        DLTensor tensor;
        const Member *member = &self->members[i];
        usual = look_at(PyList_GET_ITEM(tensors, i), &tensor) && same_look(&member->look, &tensor) && is_dense(&tensor);
        if (!usual) break;
        addresses[i] = extents[i].start = (uint64_t)(uintptr_t)tensor.data + tensor.byte_offset;
        extents[i].end = extents[i].start + (uint64_t)member->look.nbytes;
    }
    if (!usual || any_overlap(extents, count)) {
        Py_DECREF(result);
        result = Py_NewRef(Py_None);
    }
    free(extents);
    return result;
}

PyDoc_STRVAR(Group_copy_doc,
             "copy(addresses, payload)\n--\n\nCopy each tensor of at most `most` bytes from its address to its offset.");

static PyObject *Group_copy(Group *self, PyObject *args) {
    PyObject *where, *payload;
    Py_buffer view;
    if (!PyArg_ParseTuple(args, "O!O", &PyBytes_Type, &where, &payload)) return NULL;
    if (PyObject_GetBuffer(payload, &view, PyBUF_WRITABLE)) return NULL;
    if (view.len < self->end || PyBytes_GET_SIZE(where) != self->count * (Py_ssize_t)sizeof(uint64_t)) {
        PyErr_SetString(PyExc_ValueError, "the payload is too small, or these are other tensors' addresses");
        PyBuffer_Release(&view);
        return NULL;
    }
    const uint64_t *addresses = (const uint64_t *)PyBytes_AS_STRING(where);
    PyThreadState *state = self->small > self->most ? PyEval_SaveThread() : NULL; /* worth letting others run */
    for (Py_ssize_t i = 0; i < self->count; i++) {
        const Member *member = &self->members[i];
        if (member->look.nbytes <= self->most)
            memcpy((char *)view.buf + member->offset, (const void *)(uintptr_t)addresses[i], (size_t)member->look.nbytes);
    }
    if (state) PyEval_RestoreThread(state);
    PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

static PyMethodDef Group_methods[] = {
    {"match", (PyCFunction)Group_match, METH_O, Group_match_doc},
    {"copy", (PyCFunction)Group_copy, METH_VARARGS, Group_copy_doc},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject GroupType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmtensor.hot._hot.Group",
    .tp_doc = "Group(tensors, offsets, most): what tensors that are sent together look like, and where each goes.",
    .tp_basicsize = sizeof(Group),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Group_init,
    .tp_dealloc = (destructor)Group_dealloc,
    .tp_methods = Group_methods,
};
