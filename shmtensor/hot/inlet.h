/* Included once, by _hot.c. */

/* --- Inlet: the receiver's side ----------------------------------------------------------------------------------- */

#define LOOK_EVERY 250000000 /* endpoints/base.py's TICK: how often the Python code looks for what nobody finished */

typedef struct {
    Look look;
    char is_stream;     /* bytes, in a uint8 array of one dimension, for `pop`, instead of a tensor */
    PyObject *constant; /* bytes of the record from `constant_at` on, the same in every slot but for its number */
    PyObject *nbytes;
} Known;

enum { M_VALUE, M_META, M_SEQ, M_NBYTES, M_ATTEMPT, M_MISSED, M_HOLD, M_LEASE, M_RECEIVER, M_ALL }; /* of a Message */
enum { R_SERVER, R_MESSAGE, R_SOURCE, R_WORDS, R_AT, R_SEQ, R_ALL };                                  /* of a Request */

static const char *const message_slots[] = {"value", "meta", "seq", "nbytes", "attempt", "missed", "_hold", "_lease",
                                            "_receiver", NULL};
static const char *const request_slots[] = {"_server", "_message", "_source", "_words", "_at", "seq", NULL};

typedef struct {
    PyObject_HEAD
    Memory control, ledger, head, data;
    Class message, request;
    PyObject *source; /* whose requests these are, for `request` */
    Py_ssize_t replies_at; /* where it keeps the publisher of replies to them */
    PyObject *locked, *feed, *leases, *head_words, *buffer;
    PyObject *locks; /* of a work queue: its producer's lock file, where messages are claimed; NULL: fan-out */
    Py_ssize_t epoch_at, asleep_at, published_at, order_at, mask, ring_index, slots, slot_bytes;
    Py_ssize_t records_at, record_bytes, sent_ns_at, constant_at, slot_at, state_at, note_at;
    Py_ssize_t step;        /* words from one slot's state to the next one's */
    Py_ssize_t position_at; /* where the feed keeps its position */
    Py_ssize_t siblings[MOST_PEERS];
    int nsiblings;
    uint64_t epoch;
    int64_t look_due;
    Known known[MOST_PLANS];
    int nknown;
    unsigned next;
    unsigned char *hints; /* which of them a slot held last */
    unsigned long long received, received_bytes, sent_ns;
    char more; /* a sibling sleeps though there is more to take */
} Inlet;

static int Inlet_init(Inlet *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {
        "locked", "message", "feed", "leases", "held", "control", "ledger", "head", "data", "epoch_at", "epoch", "asleep_at",
        "published_at", "order_at", "mask", "ring_index", "slots", "slot_bytes", "records_at", "record_bytes",
        "sent_ns_at", "constant_at", "slot_at", "state_at", "note_at", "locks", "siblings", NULL,
    };
    PyObject *locked, *message, *feed, *leases, *keeps, *control, *ledger, *head, *data, *locks, *siblings;
    if (self->locked) {
        PyErr_SetString(PyExc_RuntimeError, "made already");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$OOOO!O!OOOOnKnnnnnnnnnnnnnnOO!", names, &locked, &message, &feed,
                                     &PyDict_Type, &leases, &PySet_Type, &keeps, &control, &ledger, &head, &data, &self->epoch_at,
                                     &self->epoch, &self->asleep_at, &self->published_at, &self->order_at, &self->mask,
                                     &self->ring_index, &self->slots, &self->slot_bytes, &self->records_at,
                                     &self->record_bytes, &self->sent_ns_at, &self->constant_at, &self->slot_at,
                                     &self->state_at, &self->note_at, &locks, &PyTuple_Type, &siblings))
        return -1;
    self->locked = Py_NewRef(locked);
    if (class_get(&self->message, message, message_slots)) return -1;
    self->feed = Py_NewRef(feed);
    self->leases = Py_NewRef(leases);
    Py_XSETREF(held_feeds, Py_NewRef(keeps));
    self->head_words = Py_NewRef(head);
    self->buffer = Py_NewRef(data);
    self->locks = locks == Py_None ? NULL : Py_NewRef(locks);
    self->step = locks == Py_None ? 1 : STATE_WORDS;
    self->position_at = field_of(Py_TYPE(feed), "position");
    closing_at = field_of(Py_TYPE(feed), "closing");
    if (self->position_at < 0 || closing_at < 0 || words_of(siblings, self->siblings, &self->nsiblings)) return -1;
    if (memory_get(control, &self->control) || memory_get(ledger, &self->ledger) || memory_get(head, &self->head) ||
        memory_get(data, &self->data))
        return -1;
    int inside = in_words(&self->control, self->epoch_at) && in_words(&self->control, self->asleep_at) &&
                 in_words(&self->ledger, self->published_at) && in_words(&self->ledger, self->order_at + self->mask) &&
                 self->slots >= 1 && self->sent_ns_at >= 0 && self->sent_ns_at + 8 <= self->record_bytes &&
                 self->records_at + self->slots * self->record_bytes <= self->head.view.len &&
                 self->slots * self->slot_bytes <= self->data.view.len && in_words(&self->head, self->state_at) &&
                 in_words(&self->head, self->state_at + self->slots * self->step - 1) &&
                 in_words(&self->head, self->note_at) &&
                 in_words(&self->head, self->note_at + (self->slots - 1) * self->step);
    for (int i = 0; i < self->nsiblings; i++) inside = inside && in_words(&self->control, self->siblings[i]);
    if (!inside) {
        PyErr_SetString(PyExc_ValueError, "a word lies outside its segment");
        return -1;
    }
    self->hints = calloc((size_t)self->slots, 1);
    if (!self->hints) {
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
    Py_VISIT(self->message.type);
    Py_VISIT(self->request.type);
    Py_VISIT(self->source);
    return 0;
}

static int Inlet_clear(Inlet *self) {
    Py_CLEAR(self->feed);
    Py_CLEAR(self->leases);
    Py_CLEAR(self->message.type);
    Py_CLEAR(self->request.type);
    Py_CLEAR(self->source);
    return 0;
}

static void Inlet_dealloc(Inlet *self) {
    PyObject_GC_UnTrack(self);
    Inlet_clear(self);
    for (int i = 0; i < self->nknown; i++) forget(&self->known[i]);
    free(self->hints);
    memory_drop(&self->control);
    memory_drop(&self->ledger);
    memory_drop(&self->head);
    memory_drop(&self->data);
    Py_XDECREF(self->locked);
    Py_XDECREF(self->locks);
    Py_XDECREF(self->head_words);
    Py_XDECREF(self->buffer);
    Py_TYPE(self)->tp_free(self);
}

PyDoc_STRVAR(Inlet_learn_doc,
             "learn(slot, constant, nbytes, value)\n--\n\nFrom now on, a record like this one of `slot`, in any slot, is a "
             "tensor that looks like `value`, which lies at the start of the slot. With None: a stream of `nbytes`.");

static PyObject *Inlet_learn(Inlet *self, PyObject *args) {
    Py_ssize_t slot;
    PyObject *constant, *nbytes, *value;
    DLTensor tensor;
    if (!PyArg_ParseTuple(args, "nO!O!O", &slot, &PyBytes_Type, &constant, &PyLong_Type, &nbytes, &value)) return NULL;
    int is_stream = value == Py_None;
    if (slot < 0 || slot >= self->slots || PyBytes_GET_SIZE(constant) > self->record_bytes - self->constant_at ||
        PyBytes_GET_SIZE(constant) < self->slot_at + 4 - self->constant_at ||
        (!is_stream && (!look_at(value, &tensor) || (char *)tensor.data + tensor.byte_offset !=
                                                        (char *)self->data.view.buf + slot * self->slot_bytes)))
        Py_RETURN_FALSE;
    int64_t size = PyLong_AsLongLong(nbytes);
    if (size < 0 || size > self->slot_bytes) Py_RETURN_FALSE;
    Known *known;
    if (self->nknown < MOST_PLANS) known = &self->known[self->nknown++];
    else {
        known = &self->known[self->next++ % MOST_PLANS];
        forget(known);
    }
    known->is_stream = (char)is_stream;
    known->look.nbytes = size;
    if (!is_stream) remember_look(&known->look, &tensor, size);
    known->constant = Py_NewRef(constant);
    known->nbytes = Py_NewRef(nbytes);
    self->hints[slot] = (unsigned char)(known - self->known);
    Py_RETURN_TRUE;
}

static int matches(const Inlet *self, const char *record, const Known *known, uint32_t slot) {
    const char *constant = PyBytes_AS_STRING(known->constant);
    size_t before = (size_t)(self->slot_at - self->constant_at), all = (size_t)PyBytes_GET_SIZE(known->constant);
    record += self->constant_at;
    return !memcmp(record + before, &slot, sizeof slot) && !memcmp(record, constant, before) &&
           !memcmp(record + before + 4, constant + before + 4, all - before - 4);
}

/* What is known of the record in a slot, or NULL. */
static const Known *recognise(Inlet *self, const char *record, Py_ssize_t slot) {
    int hint = self->hints[slot];
    if (hint < self->nknown && matches(self, record, &self->known[hint], (uint32_t)slot)) return &self->known[hint];
    for (int i = 0; i < self->nknown; i++)
        if (i != hint && matches(self, record, &self->known[i], (uint32_t)slot)) {
            self->hints[slot] = (unsigned char)i;
            return &self->known[i];
        }
    return NULL;
}

static PyObject *make_message(Inlet *self, Grip *grip, PyObject *receiver, PyObject *number, const Known *known,
                              Py_ssize_t slot) {
    PyObject *nbytes = Py_NewRef(known->nbytes), *message = NULL;
    Class class = self->message; /* other code may run, and retire this inlet */
    Py_INCREF(class.type);
    PyObject *tensor = make_tensor(&known->look, (char *)self->data.view.buf + slot * self->slot_bytes, grip, self->buffer);
    if (!tensor) {
        PyObject *error, *value, *traceback;
        PyErr_Fetch(&error, &value, &traceback);
        if (grip_ended(grip)) PyErr_WriteUnraisable((PyObject *)grip); /* unless torch has called the deleter */
        PyErr_Restore(error, value, traceback);
    } else {
        PyObject *hold = self->locks ? tensor : Py_None; /* a claim that ends before it is done is given to another */
        PyObject *values[M_ALL] = {
            [M_VALUE] = tensor, [M_META] = Py_NewRef(Py_None), [M_SEQ] = Py_NewRef(number),
            [M_NBYTES] = Py_NewRef(nbytes), [M_ATTEMPT] = PyLong_FromLong(1), [M_MISSED] = PyLong_FromLong(0),
            [M_HOLD] = Py_NewRef(hold), [M_LEASE] = Py_NewRef((PyObject *)grip), [M_RECEIVER] = Py_NewRef(receiver),
        };
        message = class_make(&class, values, M_ALL);
    }
    Py_DECREF(class.type);
    Py_DECREF(nbytes);
    return message;
}

/* The object of a claimed stream, which is done then, whatever comes of it. */
static PyObject *make_object(Inlet *self, Grip *grip, PyObject *loads, const Known *known, Py_ssize_t slot) {
    PyObject *buffer = Py_NewRef(self->buffer), *object = NULL; /* keeps the mapping */
    Memory data = {{0}};
    PyObject *view = PyMemoryView_FromMemory((char *)self->data.view.buf + slot * self->slot_bytes,
                                             (Py_ssize_t)known->look.nbytes, PyBUF_READ);
    PyObject *error, *value, *traceback;
    if (memory_get(buffer, &data)) Py_CLEAR(view);
    if (view) object = PyObject_CallOneArg(loads, view);
    PyErr_Fetch(&error, &value, &traceback);
    Py_XDECREF(view);
    if (!grip->acknowledged) {
        grip->acknowledged = 1;
        store(grip->at - RELEASED + DONE, grip->seq);
    }
    if (grip_ended(grip)) PyErr_WriteUnraisable((PyObject *)grip);
    memory_drop(&data);
    Py_DECREF(buffer);
    PyErr_Restore(error, value, traceback);
    return object;
}

/* The call that a reply is for, which is taken out of `calls` and given its value; False if there is none any more. */
static PyObject *make_answer(Inlet *self, Grip *grip, PyObject *calls, const Known *known, Py_ssize_t slot) {
    PyObject *request = PyLong_FromUnsignedLongLong(load((Word *)self->head.view.buf + self->note_at + slot));
    /* before other code may run, which looks around: a call in the table whose reply nobody finds has none */
    PyObject *call = request ? Py_XNewRef(PyDict_GetItemWithError(calls, request)) : NULL;
    if (call && (know_call(call) || PyDict_DelItem(calls, request))) Py_CLEAR(call);
    PyObject *tensor = NULL;
    if (!PyErr_Occurred())
        tensor = make_tensor(&known->look, (char *)self->data.view.buf + slot * self->slot_bytes, grip, self->buffer);
    if (!tensor) {
        PyObject *error, *value, *traceback;
        PyErr_Fetch(&error, &value, &traceback);
        if (grip_ended(grip)) PyErr_WriteUnraisable((PyObject *)grip); /* as in make_message */
        if (call && PyDict_SetItem(calls, request, call)) PyErr_WriteUnraisable(call);
        PyErr_Restore(error, value, traceback);
        Py_CLEAR(call);
    } else {
        if (!call) call = Py_NewRef(Py_False);
        else if (!know_call(call)) set_field(call, call_class.at[C_VALUE], tensor);
        else Py_CLEAR(call);
        Py_DECREF(tensor);
    }
    Py_XDECREF(request);
    return call;
}

/* What comes next, if it is the usual case: with a receiver, its message; with calls, the one that it answers; else the
 * object that `loads` makes of a stream. None, and nothing done, if there is nothing, or something else. */
static PyObject *take(Inlet *self, Grip *grip, PyObject *receiver, PyObject *loads, PyObject *calls, int counted) {
    Word *control = self->control.view.buf, *ledger = self->ledger.view.buf;
    char *head = self->head.view.buf;
    uint64_t position;
    if (!self->feed) Py_RETURN_NONE;
    if (get_field(self->feed, self->position_at, &position)) return NULL;
    if (load(control + self->epoch_at) != self->epoch) Py_RETURN_NONE;
    if (self->locks && nanoseconds() >= self->look_due) {
        self->look_due = nanoseconds() + LOOK_EVERY;
        Py_RETURN_NONE;
    }
    for (;;) {
        Word published = load(ledger + self->published_at), seq = position + 1;
        if (published <= position || published - position > (Word)self->mask) Py_RETURN_NONE;
        Word place = load(ledger + self->order_at + (Py_ssize_t)(seq & (Word)self->mask));
        uint64_t slot = place & 0xFFFFFFFF;
        if (place >> 32 != (Word)self->ring_index || slot >= (uint64_t)self->slots) Py_RETURN_NONE;
        const char *record = head + self->records_at + (Py_ssize_t)slot * self->record_bytes;
        Word *state = (Word *)head + self->state_at + (Py_ssize_t)slot * self->step;
        int gone = load((const Word *)record) != seq; /* the slot is used again: on a work queue, others are done with it */
        if (gone && !self->locks) Py_RETURN_NONE;
        const Known *known = gone ? NULL : recognise(self, record, (Py_ssize_t)slot);
        if (!gone && (!known || known->is_stream == !loads)) Py_RETURN_NONE;
        PyObject *number = PyLong_FromUnsignedLongLong(seq), *made = NULL;
        if (!number) return NULL;
        if (self->locks) {
            int answer = gone ? PASSED : claim(self->locks, self->leases, number, seq, (const Word *)record, state);
            if (answer != MINE) {
                if (answer == PASSED) set_field(self->feed, self->position_at, number);
                Py_DECREF(number);
                if (answer == NOT_USUAL) Py_RETURN_NONE;
                position = seq;
                continue;
            }
        }
        grip->seq = seq;
        grip->at = state + (self->locks ? RELEASED : 0);
        grip->word = state - (Word *)head;
        grip->locked = grip->acknowledged = 0;
        grip->feed = Py_NewRef(self->feed);
        grip->leases = Py_NewRef(self->leases);
        grip->words = Py_NewRef(self->head_words);
        grip->number = Py_NewRef(number);
        grip->locks = Py_XNewRef(self->locks);
        grip->sleeper = control + self->asleep_at;
        if ((!PyDict_GET_SIZE(self->leases) && PySet_Add(held_feeds, self->feed)) ||
            PyDict_SetItem(self->leases, number, (PyObject *)grip)) {
            if (self->locks) set_lock(self->locks, F_UNLCK, seq);
        } else {
            if (!self->locks) store(grip->at, 2 * seq);
            set_field(self->feed, self->position_at, number);
            /* From here on the message is taken, and other Python code may run: even what retires this inlet. */
            self->sent_ns = load((const Word *)(record + self->sent_ns_at));
            if (counted) {
                self->received++;
                self->received_bytes += (unsigned long long)known->look.nbytes;
            }
            for (int i = 0; i < self->nsiblings && published > seq; i++)
                if (load(control + self->siblings[i]) & 1) self->more = 1;
            made = loads   ? make_object(self, grip, loads, known, (Py_ssize_t)slot)
                   : calls ? make_answer(self, grip, calls, known, (Py_ssize_t)slot)
                           : make_message(self, grip, receiver, number, known, (Py_ssize_t)slot);
        }
        Py_DECREF(number);
        return made;
    }
}

/* Look for something new for at most so long, without letting other threads run. */
static int spin(Inlet *self, int64_t patience) {
    const Word *published = (const Word *)self->ledger.view.buf + self->published_at;
    const Word *epoch = (const Word *)self->control.view.buf + self->epoch_at;
    uint64_t position;
    if (get_field(self->feed, self->position_at, &position)) return -1;
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
        grip->feed = grip->leases = grip->words = grip->number = grip->locks = NULL;
        grip->holder = NULL;
        PyObject_GC_Track(grip);
    }
    return grip;
}
