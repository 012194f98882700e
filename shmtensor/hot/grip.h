/* Included once, by _hot.c. */

/* --- Grip: a lease that ends when torch frees the storage --------------------------------------------------------- */

struct Holder;

typedef struct {
    PyObject_HEAD
    unsigned long long seq;
    Py_ssize_t word;
    PyObject *feed, *leases, *words;
    PyObject *number; /* `seq`, under which it stands in `leases` */
    PyObject *locks; /* a work queue's: the lock file whose lock on byte `seq` the claim is; NULL: fan-out */
    struct Holder *holder; /* what of torch's refers to this, without owning it; NULL: nothing (any more) */
    Word *at;            /* where the end is told */
    const Word *sleeper; /* whether the sender sleeps */
    char locked, acknowledged;
} Grip;

static PyTypeObject GripType;

static int Grip_traverse(Grip *self, visitproc visit, void *arg) {
    Py_VISIT(self->feed);
    Py_VISIT(self->leases);
    Py_VISIT(self->words);
    Py_VISIT(self->locks);
    return 0;
}

static void Grip_dealloc(Grip *self);

static PyMemberDef Grip_members[] = {
    {"seq", T_ULONGLONG, offsetof(Grip, seq), READONLY, "the message"},
    {"word", T_PYSSIZET, offsetof(Grip, word), READONLY, "where its end is told in `words`"},
    {"words", T_OBJECT, offsetof(Grip, words), READONLY, "the ring's words"},
    {"acknowledged", T_BOOL, offsetof(Grip, acknowledged), 0, "a claim: whether `done` is stored, or it has ended"},
    {"locked", T_BOOL, offsetof(Grip, locked), READONLY, "never: only lease words are handled here"},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(Grip_acknowledge_doc, "acknowledge()\n--\n\nA claim: the message is done, nobody gets it again.");

static PyObject *Grip_acknowledge(Grip *self, PyObject *unused) {
    (void)unused;
    if (self->locks && !self->acknowledged) {
        self->acknowledged = 1;
        store(self->at - RELEASED + DONE, self->seq);
    }
    Py_RETURN_NONE;
}

static PyMethodDef Grip_methods[] = {
    {"acknowledge", (PyCFunction)Grip_acknowledge, METH_NOARGS, Grip_acknowledge_doc},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject GripType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmtensor.hot._hot.Grip",
    .tp_doc = "A fan-out lease, or a claim, as ring/lease.py has them, held by a tensor's storage.",
    .tp_basicsize = sizeof(Grip),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_traverse = (traverseproc)Grip_traverse,
    .tp_dealloc = (destructor)Grip_dealloc,
    .tp_members = Grip_members,
    .tp_methods = Grip_methods,
};

/* Lock (F_WRLCK) or unlock (F_UNLCK) byte `seq` for a lock file's description, as memory/locks.py does: 0, or errno. */
static int set_lock(PyObject *locks, short kind, Word seq) {
    PyObject *number = PyObject_GetAttr(locks, s_fd);
    int fd = number ? (int)PyLong_AsLong(number) : -1;
    Py_XDECREF(number);
    if (PyErr_Occurred()) PyErr_Clear();
    if (fd < 0) return EBADF; /* closed: that dropped the lock */
    struct flock lock = {.l_type = kind, .l_whence = SEEK_SET, .l_start = (off_t)seq, .l_len = 1};
    return fcntl(fd, F_OFD_SETLK, &lock) ? errno : 0;
}

static PyObject *held_feeds; /* ring/feed.py's set of that name */
static Py_ssize_t closing_at; /* of every feed */

/* What ring/feed.py's `_ended` does, and the feeds' `give_back`. */
static int grip_ended(Grip *grip) {
    if (PyDict_DelItem(grip->leases, grip->number)) { /* a forked child's copy of its parent's lease */
        if (!PyErr_ExceptionMatches(PyExc_KeyError)) return -1;
        PyErr_Clear();
        return 0;
    }
    if (!grip->locks) store(grip->at, 2 * grip->seq + 1);
    else {
        if (grip->acknowledged) store(grip->at, grip->seq);
        grip->acknowledged = 1; /* whoever acknowledges it now must not store */
        set_lock(grip->locks, F_UNLCK, grip->seq); /* not acknowledged: others may claim it from here on */
    }
    if (load(grip->sleeper) & 1) {
        PyObject *done = PyObject_CallMethodNoArgs(grip->feed, s_wake_sender);
        if (!done) return -1;
        Py_DECREF(done);
    }
    if (PyDict_GET_SIZE(grip->leases)) return 0;
    if (PySet_Discard(held_feeds, grip->feed) < 0) return -1;
    if (*field(grip->feed, closing_at) != Py_True) return 0;
    PyObject *done = PyObject_CallMethodNoArgs(grip->feed, s_close);
    Py_XDECREF(done);
    if (!done) return -1;
    done = PyObject_CallMethodNoArgs(grip->feed, s_emptied);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

typedef struct Holder {
    DLManaged managed;
    Grip *grip; /* the feed's `leases` owns it, as it owns a Lease; NULL: collected with its feed */
    PyObject *buffer; /* keeps the mapping */
    int64_t shape[MOST_DIMENSIONS], strides[MOST_DIMENSIONS];
} Holder;

static void Grip_dealloc(Grip *self) {
    PyObject_GC_UnTrack(self);
    if (self->holder) self->holder->grip = NULL;
    Py_XDECREF(self->feed);
    Py_XDECREF(self->leases);
    Py_XDECREF(self->words);
    Py_XDECREF(self->number);
    Py_XDECREF(self->locks);
    PyObject_GC_Del(self);
}

/* torch has freed the storage; any thread, with or without the interpreter lock. */
static void holder_delete(DLManaged *managed) {
    Holder *holder = (Holder *)managed;
    if (!Py_IsInitialized()) return; /* the process ends: its locks end with it */
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    Grip *grip = holder->grip;
    if (grip) {
        grip->holder = NULL;
        holder->grip = NULL;
        Py_INCREF(grip);
        if (grip_ended(grip)) PyErr_WriteUnraisable((PyObject *)grip);
        Py_DECREF(grip);
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
    holder->grip = grip;
    if (grip) grip->holder = holder;
    holder->buffer = Py_NewRef(buffer);
    if (exchange->object_from_managed(&holder->managed, &made)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "torch made no tensor");
        return NULL; /* torch has called the deleter, or keeps the memory: either way nothing here may free it */
    }
    return made;
}
