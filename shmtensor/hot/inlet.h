/* Included once, by _hot.c. */

/* --- Grip: a lease that ends when torch frees the storage --------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    unsigned long long seq;
    Py_ssize_t word;
    PyObject *feed, *leases, *words;
    Word *at;            /* where the end is told */
    const Word *sleeper; /* whether the sender sleeps */
    char locked;
} Grip;

static PyTypeObject GripType;

static void Grip_dealloc(Grip *self) {
    Py_XDECREF(self->feed);
    Py_XDECREF(self->leases);
    Py_XDECREF(self->words);
    PyObject_Free(self);
}

static PyMemberDef Grip_members[] = {
    {"seq", T_ULONGLONG, offsetof(Grip, seq), READONLY, "the message"},
    {"word", T_PYSSIZET, offsetof(Grip, word), READONLY, "where its end is told in `words`"},
    {"words", T_OBJECT, offsetof(Grip, words), READONLY, "the ring's words"},
    {"locked", T_BOOL, offsetof(Grip, locked), READONLY, "never: only lease words are handled here"},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject GripType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmtensor.hot._hot.Grip",
    .tp_doc = "A fan-out lease, as ring/lease.py has it, held by a tensor's storage.",
    .tp_basicsize = sizeof(Grip),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)Grip_dealloc,
    .tp_members = Grip_members,
};

/* What ring/feed.py's `_ended` does. */
static int grip_ended(Grip *grip) {
    PyObject *key = PyLong_FromUnsignedLongLong(grip->seq);
    if (!key) return -1;
    int held = PyDict_Contains(grip->leases, key);
    if (held == 1 && PyDict_DelItem(grip->leases, key)) held = -1;
    Py_DECREF(key);
    if (held != 1) return held; /* 0: a forked child's copy of its parent's lease */
    store(grip->at, 2 * grip->seq + 1);
    if (load(grip->sleeper) & 1) {
        PyObject *done = PyObject_CallMethodNoArgs(grip->feed, s_wake_sender);
        if (!done) return -1;
        Py_DECREF(done);
    }
    if (PyDict_GET_SIZE(grip->leases)) return 0;
    PyObject *closing = PyObject_GetAttr(grip->feed, s_closing);
    if (!closing) return -1;
    Py_DECREF(closing);
    if (closing != Py_True) return 0;
    PyObject *done = PyObject_CallMethodNoArgs(grip->feed, s_close);
    Py_XDECREF(done);
    if (!done) return -1;
    done = PyObject_CallMethodNoArgs(grip->feed, s_emptied);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

typedef struct {
    DLManaged managed;
    Grip *grip;
    PyObject *buffer; /* keeps the mapping */
    int64_t shape[MOST_DIMENSIONS], strides[MOST_DIMENSIONS];
} Holder;

/* torch has freed the storage; any thread, with or without the interpreter lock. */
static void holder_delete(DLManaged *managed) {
    Holder *holder = (Holder *)managed;
    if (!Py_IsInitialized()) return; /* the process ends: its locks end with it */
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (holder->grip) {
        if (grip_ended(holder->grip)) PyErr_WriteUnraisable((PyObject *)holder->grip);
        Py_DECREF(holder->grip);
    }
    Py_XDECREF(holder->buffer);
    PyErr_Restore(type, value, traceback);
    PyGILState_Release(state);
    free(holder);
}

static PyObject *make_tensor(const Look *look, void *data, Grip *grip, PyObject *buffer) {
    Holder *holder = calloc(1, sizeof *holder);
    void *made = NULL;
    if (!holder) return PyErr_NoMemory();
    memcpy(holder->shape, look->shape, sizeof holder->shape);
    memcpy(holder->strides, look->strides, sizeof holder->strides);
    holder->managed = (DLManaged){
        .version = {1, 0},
        .context = holder,
        .deleter = holder_delete,
        .tensor = {data, {CPU, 0}, look->ndim, look->dtype, holder->shape, holder->strides, 0},
    };
    holder->grip = (Grip *)Py_XNewRef((PyObject *)grip);
    holder->buffer = Py_NewRef(buffer);
    if (exchange->object_from_managed(&holder->managed, &made)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "torch made no tensor");
        return NULL; /* torch has called the deleter, or keeps the memory: either way nothing here may free it */
    }
    return made;
}

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
static PyObject *take(Inlet *self, PyObject *receiver, int64_t *size) {
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
    Grip *grip = number ? PyObject_New(Grip, &GripType) : NULL;
    if (!grip) {
        Py_XDECREF(number);
        return NULL;
    }
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
    *size = known->look.nbytes;
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
    Py_DECREF(grip);
    return message;

failed:
    Py_DECREF(number);
    Py_DECREF(grip);
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
    int locked = is_locked(self->mutex);
    if (locked || !self->feed) return locked < 0 ? NULL : Py_NewRef(Py_None);
    if (spin(self, patience)) return NULL;
    int64_t nbytes = 0;
    PyObject *message = take(self, args[0], &nbytes);
    if (message && message != Py_None) {
        self->received++;
        self->received_bytes += (unsigned long long)nbytes;
    }
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
    if (!self->feed) Py_RETURN_NONE;
    if (spin(self, patience)) return NULL;
    int64_t nbytes;
    return take(self, args[0], &nbytes);
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
