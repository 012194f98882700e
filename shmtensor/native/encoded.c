/* The result of `encode`: the description of a value, and the copies of its bytes into a slot. */

#include "native.h"

static int Encoded_traverse(Encoded *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->codec);
    Py_VISIT(self->jobs);
    Py_VISIT(self->device_jobs);
    for (Py_ssize_t i = 0; i < Py_SIZE(self); i++) Py_VISIT(self->runs[i].source);
    return 0;
}

static void Encoded_dealloc(Encoded *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->codec);
    Py_XDECREF(self->description);
    Py_XDECREF(self->jobs);
    Py_XDECREF(self->device_jobs);
    for (Py_ssize_t i = 0; i < Py_SIZE(self); i++) Py_XDECREF(self->runs[i].source);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *Encoded_repr(Encoded *self) {
    return PyUnicode_FromFormat("<Encoded %zd leaves, %zd bytes>", Py_SIZE(self), self->nbytes);
}

int can_copy_at_once(const Encoded *self) {
    return self->nbytes <= self->codec->alone && !self->jobs && !PySequence_Fast_GET_SIZE(self->device_jobs);
}

int source_at(const Codec *codec, PyObject *source, uintptr_t *address, uint64_t *count) {
    *address = 0;
    *count = 0;
    if (PyArray_Check(source)) {
        *address = (uintptr_t)PyArray_DATA((PyArrayObject *)source);
        *count = (uint64_t)PyArray_NBYTES((PyArrayObject *)source);
    } else if (codec->tensor_type && PyObject_TypeCheck(source, codec->tensor_type) &&
               place_by_methods(codec, source, address, count)) {
        *count = 0;
        return is_for_the_reference() ? 0 : -1;
    }
    return 0;
}

static int run_has_moved(const Encoded *self, const Run *run) {
    if (!run->looked_at_size || PyBytes_Check(run->source)) return 0;
    if (!run->is_odd && !PyArray_Check(run->source)) {
        int stays = still_lies_at(self->codec, run->source, run->looked_at, run->looked_at_size);
        return stays < 0 ? -1 : !stays;
    }
    uintptr_t address;
    uint64_t count;
    if (source_at(self->codec, run->source, &address, &count)) return -1;
    return address != run->looked_at || count != run->looked_at_size;
}

int has_moved(const Encoded *self) {
    int moved = 0;
    for (Py_ssize_t i = 0; i < Py_SIZE(self) && !moved; i++) moved = run_has_moved(self, &self->runs[i]);
    return moved;
}

/* The same of the leaves whose bytes a run copies. */
static int copied_has_moved(const Encoded *self, const Run *run) {
    int moved = run_has_moved(self, run);
    for (; run->next >= 0 && !moved; moved = run_has_moved(self, run)) run = &self->runs[run->next];
    return moved;
}

/* -1, with the error that a leaf has moved, if there is no other one. */
static int refuse_moved(const Encoded *self, int moved) {
    if (moved > 0)
        PyErr_SetString(self->codec->argument_error, "a tensor or array of the value was resized, or given other memory, "
                                                     "while it was being sent: change it before or after");
    return moved ? -1 : 0;
}

int copy_small(const Encoded *self, char *base) {
    int alone = self->nbytes <= self->codec->alone, large = 0;
    for (Py_ssize_t i = 0; i < Py_SIZE(self); i++) {
        const Run *run = &self->runs[i];
        if (!run->size) continue;
        if (alone || (Py_ssize_t)run->size <= self->codec->small)
            memmove(base + run->offset, (const void *)run->address, (size_t)run->size);
        else large = 1;
    }
    return large;
}

static int copy_large(const Encoded *self, PyObject *payload) {
    for (Py_ssize_t i = 0; i < Py_SIZE(self); i++) {
        const Run *run = &self->runs[i];
        if ((Py_ssize_t)run->size <= self->codec->small) continue;
        if (refuse_moved(self, copied_has_moved(self, run))) return -1; /* while others were copied, without the lock */
        PyObject *done = PyObject_CallFunction(self->codec->move_large, "OKKK", payload, (unsigned long long)run->offset,
                                               (unsigned long long)run->address, (unsigned long long)run->size);
        if (!done) return -1;
        Py_DECREF(done);
    }
    return 0;
}

static int run_jobs(PyObject *jobs, PyObject *payload) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(jobs); i++) {
        PyObject *job = Py_NewRef(PySequence_Fast_GET_ITEM(jobs, i)), *done = PyObject_CallOneArg(job, payload);
        Py_DECREF(job);
        if (!done) return -1;
        Py_DECREF(done);
    }
    return 0;
}

/* `whole`: include a spilled description. */
static PyObject *copy(Encoded *self, PyObject *buffer, Py_ssize_t offset, int on_device, int whole) {
    Py_buffer view;
    Py_ssize_t needed = whole ? self->total : self->nbytes;
    if (PyObject_GetBuffer(buffer, &view, PyBUF_WRITABLE)) return NULL;
    if (offset < 0 || offset > view.len || view.len - offset < needed) {
        PyErr_Format(self->codec->argument_error, "%zd bytes from %zd on in a buffer of %zd, the value needs %zd",
                     offset < 0 || offset > view.len ? 0 : view.len - offset, offset, view.len, needed);
        PyBuffer_Release(&view);
        return NULL;
    }
    if (refuse_moved(self, has_moved(self))) {
        PyBuffer_Release(&view);
        return NULL;
    }
    char *base = (char *)view.buf + offset;
    int large = copy_small(self, base), failed = 0;
    int jobs = self->jobs || (on_device && PySequence_Fast_GET_SIZE(self->device_jobs));
    if (large || jobs) {
        PyObject *payload = PyObject_CallFunction(self->codec->payload, "Onn", buffer, offset, self->nbytes);
        failed = !payload || (large && copy_large(self, payload)) || (self->jobs && run_jobs(self->jobs, payload)) ||
                 (on_device && run_jobs(self->device_jobs, payload));
        Py_XDECREF(payload);
    }
    if (!failed && whole && self->total != self->nbytes)
        memcpy(base + aligned((uint64_t)self->nbytes), PyBytes_AS_STRING(self->description),
               (size_t)PyBytes_GET_SIZE(self->description));
    PyBuffer_Release(&view);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(copy_into_doc, "copy_into(buffer, offset=0, on_device=True)\n--\n\n"
    "Copy every leaf to its place in `nbytes` bytes from `offset` on; without `on_device`, all but `device_jobs`.");

static PyObject *Encoded_copy_into(Encoded *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"buffer", "offset", "on_device", NULL};
    PyObject *buffer;
    Py_ssize_t offset = 0;
    int on_device = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|np", names, &buffer, &offset, &on_device)) return NULL;
    return copy(self, buffer, offset, on_device, 0);
}

PyDoc_STRVAR(write_doc, "write(buffer, offset, on_device=True)\n--\n\n"
    "The same, and a spilled description behind the payload: `total` bytes in all.");

static PyObject *Encoded_write(Encoded *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"buffer", "offset", "on_device", NULL};
    PyObject *buffer;
    Py_ssize_t offset;
    int on_device = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "On|p", names, &buffer, &offset, &on_device)) return NULL;
    return copy(self, buffer, offset, on_device, 1);
}

static PyObject *Encoded_spilled(Encoded *self, void *unused) {
    (void)unused;
    return PyBool_FromLong(self->total != self->nbytes);
}

static PyMethodDef Encoded_methods[] = {
    {"copy_into", (PyCFunction)(void (*)(void))Encoded_copy_into, METH_VARARGS | METH_KEYWORDS, copy_into_doc},
    {"write", (PyCFunction)(void (*)(void))Encoded_write, METH_VARARGS | METH_KEYWORDS, write_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef Encoded_members[] = {
    {"description", MEMBER_OBJECT, offsetof(Encoded, description), MEMBER_READONLY, "see wire/spec.py"},
    {"device_jobs", MEMBER_OBJECT, offsetof(Encoded, device_jobs), MEMBER_READONLY, "copies from CUDA devices"},
    {"nbytes", MEMBER_SIZE, offsetof(Encoded, nbytes), MEMBER_READONLY, "bytes of the payload"},
    {"total", MEMBER_SIZE, offsetof(Encoded, total), MEMBER_READONLY, "bytes in the slots"},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef Encoded_getset[] = {
    {"spilled", (getter)Encoded_spilled, NULL, "whether the description lies behind the payload", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot Encoded_slots[] = {
    {Py_tp_doc, "A value that is ready to be copied into a slot: codec/encode.py."},
    {Py_tp_traverse, Encoded_traverse},
    {Py_tp_dealloc, Encoded_dealloc},
    {Py_tp_repr, Encoded_repr},
    {Py_tp_methods, Encoded_methods},
    {Py_tp_members, Encoded_members},
    {Py_tp_getset, Encoded_getset},
    {0, NULL},
};

PyType_Spec Encoded_spec = {
    .name = "shmtensor.native._core.Encoded",
    .basicsize = offsetof(Encoded, runs),
    .itemsize = sizeof(Run),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = Encoded_slots,
};
