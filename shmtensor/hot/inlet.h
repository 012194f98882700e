/* Included once, by _hot.c. */

/* --- Inlet: the receiver's side ----------------------------------------------------------------------------------- */

typedef struct {
    Look look;
    PyObject *constant; /* bytes of the record from `constant_at` on; NULL: nothing known of this slot */
    PyObject *nbytes;
} Known;

typedef struct {
    PyObject_HEAD
    Memory control, ledger, head, data;
    PyObject *mutex, *message, *feed, *leases, *head_words, *buffer;
    Py_ssize_t epoch_at, asleep_at, published_at, order_at, mask, ring_index, slots, slot_bytes;
    Py_ssize_t records_at, record_bytes, constant_at, state_at;
    uint64_t epoch;
    Known *known;
    unsigned long long received, received_bytes;
} Inlet;

static int Inlet_init(Inlet *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {
        "mutex", "message", "feed", "leases", "control", "ledger", "head", "data", "epoch_at", "epoch", "asleep_at",
        "published_at", "order_at", "mask", "ring_index", "slots", "slot_bytes", "records_at", "record_bytes",
        "constant_at", "state_at", NULL,
    };
    PyObject *mutex, *message, *feed, *leases, *control, *ledger, *head, *data;
    if (self->mutex) {
        PyErr_SetString(PyExc_RuntimeError, "made already");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$OOOO!OOOOnKnnnnnnnnnnn", names, &mutex, &message, &feed,
                                     &PyDict_Type, &leases, &control, &ledger, &head, &data, &self->epoch_at,
                                     &self->epoch, &self->asleep_at, &self->published_at, &self->order_at, &self->mask,
                                     &self->ring_index, &self->slots, &self->slot_bytes, &self->records_at,
                                     &self->record_bytes, &self->constant_at, &self->state_at))
        return -1;
    self->mutex = Py_NewRef(mutex);
    self->message = Py_NewRef(message);
    self->feed = Py_NewRef(feed);
    self->leases = Py_NewRef(leases);
    self->head_words = Py_NewRef(head);
    self->buffer = Py_NewRef(data);
    if (memory_get(control, &self->control) || memory_get(ledger, &self->ledger) || memory_get(head, &self->head) ||
        memory_get(data, &self->data))
        return -1;
    if (!in_words(&self->control, self->epoch_at) || !in_words(&self->control, self->asleep_at) ||
        !in_words(&self->ledger, self->published_at) || !in_words(&self->ledger, self->order_at + self->mask) ||
        self->slots < 1 || self->records_at + self->slots * self->record_bytes > self->head.view.len ||
        self->slots * self->slot_bytes > self->data.view.len || !in_words(&self->head, self->state_at) ||
        !in_words(&self->head, self->state_at + self->slots - 1)) {
        PyErr_SetString(PyExc_ValueError, "a word lies outside its segment");
        return -1;
    }
    self->known = calloc((size_t)self->slots, sizeof(Known));
    if (!self->known) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static void forget(Known *known) {
    Py_CLEAR(known->constant);
    Py_CLEAR(known->nbytes);
}

static int Inlet_traverse(Inlet *self, visitproc visit, void *arg) {
    Py_VISIT(self->feed);
    Py_VISIT(self->leases);
    Py_VISIT(self->message);
    return 0;
}

static int Inlet_clear(Inlet *self) {
    Py_CLEAR(self->feed);
    Py_CLEAR(self->leases);
    Py_CLEAR(self->message);
    return 0;
}

static void Inlet_dealloc(Inlet *self) {
    PyObject_GC_UnTrack(self);
    Inlet_clear(self);
    if (self->known)
        for (Py_ssize_t i = 0; i < self->slots; i++) forget(&self->known[i]);
    free(self->known);
    memory_drop(&self->control);
    memory_drop(&self->ledger);
    memory_drop(&self->head);
    memory_drop(&self->data);
    Py_XDECREF(self->mutex);
    Py_XDECREF(self->head_words);
    Py_XDECREF(self->buffer);
    Py_TYPE(self)->tp_free(self);
}

PyDoc_STRVAR(Inlet_learn_doc,
             "learn(slot, constant, nbytes, value)\n--\n\nFrom now on, a record of these bytes in this slot is a tensor "
             "that looks like `value`, which lies at the start of the slot.");

static PyObject *Inlet_learn(Inlet *self, PyObject *args) {
    Py_ssize_t slot;
    PyObject *constant, *nbytes, *value;
    DLTensor tensor;
    if (!PyArg_ParseTuple(args, "nO!O!O", &slot, &PyBytes_Type, &constant, &PyLong_Type, &nbytes, &value)) return NULL;
    if (slot < 0 || slot >= self->slots || !look_at(value, &tensor) ||
        (char *)tensor.data + tensor.byte_offset != (char *)self->data.view.buf + slot * self->slot_bytes ||
        PyBytes_GET_SIZE(constant) > self->record_bytes - self->constant_at)
        Py_RETURN_FALSE;
    int64_t size = PyLong_AsLongLong(nbytes);
    if (size < 0 || size > self->slot_bytes) Py_RETURN_FALSE;
    Known *known = &self->known[slot];
    forget(known);
    remember_look(&known->look, &tensor, size);
    known->constant = Py_NewRef(constant);
    known->nbytes = Py_NewRef(nbytes);
    Py_RETURN_TRUE;
}

/* The next message for `receiver`, or None, and nothing done, if there is none or it is not the usual case. */
static PyObject *take(Inlet *self, Grip *grip, PyObject *receiver, int counted) {
    Word *control = self->control.view.buf, *ledger = self->ledger.view.buf;
    char *head = self->head.view.buf;
    uint64_t position;
    if (!self->feed || get_index(self->feed, s_position, &position)) return self->feed ? NULL : Py_NewRef(Py_None);
    if (load(control + self->epoch_at) != self->epoch || load(ledger + self->published_at) <= position) Py_RETURN_NONE;
    Word seq = position + 1;
    Word place = load(ledger + self->order_at + (Py_ssize_t)(seq & (Word)self->mask));
    uint64_t slot = place & 0xFFFFFFFF;
    if (place >> 32 != (Word)self->ring_index || slot >= (uint64_t)self->slots) Py_RETURN_NONE;
    const char *record = head + self->records_at + (Py_ssize_t)slot * self->record_bytes;
    Known *known = &self->known[slot];
    if (load((const Word *)record) != seq || !known->constant ||
        memcmp(record + self->constant_at, PyBytes_AS_STRING(known->constant), (size_t)PyBytes_GET_SIZE(known->constant)))
        Py_RETURN_NONE;

    PyObject *number = PyLong_FromUnsignedLongLong(seq);
    if (!number) return NULL;
    grip->seq = seq;
    grip->word = self->state_at + (Py_ssize_t)slot;
    grip->locked = 0;
    grip->feed = Py_NewRef(self->feed);
    grip->leases = Py_NewRef(self->leases);
    grip->words = Py_NewRef(self->head_words);
    grip->at = (Word *)head + grip->word;
    grip->sleeper = control + self->asleep_at;
    if (PyDict_SetItem(self->leases, number, (PyObject *)grip)) goto failed;
    store(grip->at, 2 * seq);
    if (PyObject_SetAttr(self->feed, s_position, number)) goto failed;

    /* From here on the message is taken, and other Python code may run: even code that retires this inlet. */
    PyObject *nbytes = Py_NewRef(known->nbytes), *type = Py_NewRef(self->message);
    if (counted) {
        self->received++;
        self->received_bytes += (unsigned long long)known->look.nbytes;
    }
    PyObject *tensor = make_tensor(&known->look, (char *)self->data.view.buf + (Py_ssize_t)slot * self->slot_bytes, grip,
                                   self->buffer);
    if (!tensor) {
        PyObject *error, *value, *traceback;
        PyErr_Fetch(&error, &value, &traceback);
        if (grip_ended(grip)) PyErr_WriteUnraisable((PyObject *)grip); /* unless torch has called the deleter */
        PyErr_Restore(error, value, traceback);
        Py_DECREF(type);
        Py_DECREF(nbytes);
        goto failed;
    }
    PyObject *zero = PyLong_FromLong(0), *one = PyLong_FromLong(1);
    PyObject *args[] = {tensor, Py_None, number, nbytes, one, zero, Py_None, (PyObject *)grip, receiver};
    PyObject *message = PyObject_Vectorcall(type, args, 9, NULL);
    Py_DECREF(type);
    Py_DECREF(zero);
    Py_DECREF(one);
    Py_DECREF(tensor);
    Py_DECREF(nbytes);
    Py_DECREF(number);
    return message;

failed:
    Py_DECREF(number);
    return NULL;
}

/* Look for something new for at most so long, without letting other threads run. */
static int spin(Inlet *self, int64_t patience) {
    const Word *published = (const Word *)self->ledger.view.buf + self->published_at;
    const Word *epoch = (const Word *)self->control.view.buf + self->epoch_at;
    uint64_t position;
    if (get_index(self->feed, s_position, &position)) return -1;
    for (int64_t until = 0; load(published) <= position && load(epoch) == self->epoch;) {
        int64_t now = nanoseconds();
        if (!until) until = now + patience;
        if (now >= until) break;
        for (int i = 0; i < 16 && load(published) <= position; i++) __builtin_ia32_pause();
    }
    return 0;
}

/* A lease to be; making it may run the garbage collector, so that it comes before everything else. */
static Grip *new_grip(void) {
    Grip *grip = PyObject_GC_New(Grip, &GripType);
    if (grip) {
        grip->feed = grip->leases = grip->words = NULL;
        grip->holder = NULL;
        PyObject_GC_Track(grip);
    }
    return grip;
}

PyDoc_STRVAR(Inlet_recv_doc,
             "recv(receiver, patience)\n--\n\nThe next message, there now or within so many nanoseconds, or None. For a "
             "caller without the mutex.");

static PyObject *Inlet_recv(Inlet *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "receiver, patience");
        return NULL;
    }
    long long patience = PyLong_AsLongLong(args[1]);
    if (patience == -1 && PyErr_Occurred()) return NULL;
    Grip *grip = new_grip();
    if (!grip) return NULL;
    PyObject *message = NULL;
    int locked = is_locked(self->mutex);
    if (locked > 0 || !self->feed) message = Py_NewRef(Py_None);
    else if (!locked && !spin(self, patience)) message = take(self, grip, args[0], 1);
    Py_DECREF(grip);
    return message;
}

PyDoc_STRVAR(Inlet_poll_doc, "poll(receiver, patience)\n--\n\nThe same, for a caller that holds the mutex and counts.");

static PyObject *Inlet_poll(Inlet *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "receiver, patience");
        return NULL;
    }
    long long patience = PyLong_AsLongLong(args[1]);
    if (patience == -1 && PyErr_Occurred()) return NULL;
    Grip *grip = new_grip();
    if (!grip) return NULL;
    PyObject *message = NULL;
    if (!self->feed) message = Py_NewRef(Py_None);
    else if (!spin(self, patience)) message = take(self, grip, args[0], 0);
    Py_DECREF(grip);
    return message;
}

static PyObject *Inlet_retire(Inlet *self, PyObject *unused) {
    (void)unused;
    Inlet_clear(self);
    Py_RETURN_NONE;
}

static PyMethodDef Inlet_methods[] = {
    {"retire", (PyCFunction)Inlet_retire, METH_NOARGS, retire_doc},
    {"learn", (PyCFunction)Inlet_learn, METH_VARARGS, Inlet_learn_doc},
    {"recv", (PyCFunction)(void (*)(void))Inlet_recv, METH_FASTCALL, Inlet_recv_doc},
    {"poll", (PyCFunction)(void (*)(void))Inlet_poll, METH_FASTCALL, Inlet_poll_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef Inlet_members[] = {
    {"received", T_ULONGLONG, offsetof(Inlet, received), READONLY, "messages that `recv` returned"},
    {"received_bytes", T_ULONGLONG, offsetof(Inlet, received_bytes), READONLY, "their payload bytes"},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject InletType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmtensor.hot._hot.Inlet",
    .tp_doc = "What a subscriber does for a usual tensor.",
    .tp_basicsize = sizeof(Inlet),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Inlet_init,
    .tp_traverse = (traverseproc)Inlet_traverse,
    .tp_clear = (inquiry)Inlet_clear,
    .tp_dealloc = (destructor)Inlet_dealloc,
    .tp_methods = Inlet_methods,
    .tp_members = Inlet_members,
};
