/* Included once, by _hot.c. */

/* --- Outbox: the sender's side ------------------------------------------------------------------------------------ */

#define NEAR 64 /* slots that are looked at for a free one */


typedef struct {
    Look look;
    char is_stream;     /* bytes, in a uint8 array of one dimension, instead of a tensor */
    PyObject *out;      /* the description, as `described` knows it */
    PyObject *constant; /* bytes of a record from `constant_at` on */
} Plan;

typedef struct {
    PyObject_HEAD
    Memory control, ledger, head, data;
    PyObject *locked, *ring, *busy, *described, *recipients, *head_words;
    Py_ssize_t epoch_at, published_at, order_at, mask, ring_index, slots, slot_bytes;
    Py_ssize_t records_at, record_bytes, sent_ns_at, constant_at, slot_at;
    uint64_t epoch;
    int retired, npeers, nsleepers, nplans, twice; /* `twice`: what a free slot's word says is 2 * seq + 1 instead of seq */
    Py_ssize_t step;                      /* words from one slot's word to the next one's */
    Py_ssize_t note_at;                   /* slot 0's note: see Note */
    Py_ssize_t cursor_at;                 /* where the ring keeps its cursor */
    Py_ssize_t peers[MOST_PEERS], sleepers[MOST_PEERS];
    Plan plans[MOST_PLANS];
    unsigned long long sent_bytes;
    Bells bells;
} Outbox;

/* Bytes of the array that carries a stream of so many: a few sizes, so that few descriptions serve all. */
static int64_t stream_class(int64_t nbytes) {
    int64_t class = 64;
    while (class < nbytes) class *= 2;
    return class;
}

static int Outbox_init(Outbox *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {
        "locked", "ring", "busy", "described", "recipients", "control", "ledger", "head", "data", "epoch_at", "epoch",
        "published_at", "order_at", "mask", "ring_index", "slots", "slot_bytes", "records_at", "record_bytes",
        "sent_ns_at", "constant_at", "slot_at", "peers", "step", "twice", "sleepers", "listeners", "bell", "note_at",
        NULL,
    };
    PyObject *control, *ledger, *head, *data, *peers, *sleepers, *listeners, *bell;
    if (self->locked) {
        PyErr_SetString(PyExc_RuntimeError, "made already");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "$OOO!O!O!OOOOnKnnnnnnnnnnnO!npO!O!O!n", names, &self->locked, &self->ring, &PyList_Type,
            &self->busy, &PyList_Type, &self->described, &PyTuple_Type, &self->recipients, &control, &ledger, &head,
            &data, &self->epoch_at, &self->epoch, &self->published_at, &self->order_at, &self->mask, &self->ring_index,
            &self->slots, &self->slot_bytes, &self->records_at, &self->record_bytes, &self->sent_ns_at,
            &self->constant_at, &self->slot_at, &PyTuple_Type, &peers, &self->step, &self->twice, &PyTuple_Type,
            &sleepers, &PyTuple_Type, &listeners, &PyBytes_Type, &bell, &self->note_at)) {
        self->locked = self->ring = self->busy = self->described = self->recipients = NULL; /* borrowed */
        return -1;
    }
    Py_INCREF(self->locked);
    Py_INCREF(self->ring);
    Py_INCREF(self->busy);
    Py_INCREF(self->described);
    Py_INCREF(self->recipients);
    self->bells.peers = Py_NewRef(listeners);
    self->bells.head = Py_NewRef(bell);
    self->head_words = Py_NewRef(head);
    self->cursor_at = field_of(Py_TYPE(self->ring), "cursor");
    if (self->cursor_at < 0 || words_of(peers, self->peers, &self->npeers) || words_of(sleepers, self->sleepers, &self->nsleepers)) return -1;
    if (memory_get(control, &self->control) || memory_get(ledger, &self->ledger) || memory_get(head, &self->head) ||
        memory_get(data, &self->data))
        return -1;
    int inside = PyTuple_GET_SIZE(listeners) == self->nsleepers && in_words(&self->control, self->epoch_at) && in_words(&self->ledger, self->published_at) &&
                 in_words(&self->ledger, self->order_at + self->mask) &&
                 self->records_at + self->slots * self->record_bytes <= self->head.view.len &&
                 self->slots * self->slot_bytes <= self->data.view.len && PyList_GET_SIZE(self->busy) == self->slots &&
                 PyList_GET_SIZE(self->described) == self->slots;
    for (int i = 0; i < self->npeers; i++)
        inside = inside && in_words(&self->head, self->peers[i]) &&
                 in_words(&self->head, self->peers[i] + (self->slots - 1) * self->step);
    for (int i = 0; i < self->nsleepers; i++) inside = inside && in_words(&self->control, self->sleepers[i]);
    inside = inside && in_words(&self->head, self->note_at) &&
             in_words(&self->head, self->note_at + (self->slots - 1) * self->step + (self->twice ? 0 : VERDICT - NOTE));
    if (!inside) {
        PyErr_SetString(PyExc_ValueError, "a word lies outside its segment");
        return -1;
    }
    return 0;
}

static void Outbox_dealloc(Outbox *self) {
    for (int i = 0; i < self->nplans; i++) {
        Py_DECREF(self->plans[i].out);
        Py_DECREF(self->plans[i].constant);
    }
    memory_drop(&self->control);
    memory_drop(&self->ledger);
    memory_drop(&self->head);
    memory_drop(&self->data);
    Py_XDECREF(self->locked);
    Py_XDECREF(self->ring);
    Py_XDECREF(self->busy);
    Py_XDECREF(self->described);
    Py_XDECREF(self->recipients);
    Py_XDECREF(self->bells.peers);
    Py_XDECREF(self->bells.head);
    Py_XDECREF(self->head_words);
    Py_TYPE(self)->tp_free(self);
}

PyDoc_STRVAR(Outbox_learn_doc,
             "learn(value, out, constant, nbytes)\n--\n\nFrom now on, send tensors that look like `value` as `out`. With "
             "None: bytes that `nbytes` is the size class of, as a uint8 array.");

static PyObject *Outbox_learn(Outbox *self, PyObject *args) {
    PyObject *value, *out, *constant;
    DLTensor tensor;
    Py_ssize_t nbytes;
    if (!PyArg_ParseTuple(args, "OOO!n", &value, &out, &PyBytes_Type, &constant, &nbytes)) return NULL;
    int is_stream = value == Py_None;
    if (is_stream ? nbytes < 1 || nbytes != stream_class(nbytes)
                  : !look_at(value, &tensor) || !is_dense(&tensor) || nbytes != size_of(&tensor))
        Py_RETURN_FALSE;
    if (nbytes > self->slot_bytes || PyBytes_GET_SIZE(constant) + self->constant_at > self->record_bytes ||
        PyBytes_GET_SIZE(constant) < self->slot_at + 4 - self->constant_at)
        Py_RETURN_FALSE;
    for (int i = 0; i < self->nplans; i++)
        if (self->plans[i].out == out) Py_RETURN_TRUE;
    if (self->nplans == MOST_PLANS) Py_RETURN_FALSE;
    Plan *plan = &self->plans[self->nplans++];
    plan->is_stream = (char)is_stream;
    plan->look.nbytes = nbytes;
    if (!is_stream) remember_look(&plan->look, &tensor, nbytes);
    plan->out = Py_NewRef(out);
    plan->constant = Py_NewRef(constant);
    Py_RETURN_TRUE;
}

/* Whether the slot's last message is given back, as far as its words alone tell. */
static int is_free(Outbox *self, PyObject *entry, Py_ssize_t slot) {
    if (entry == Py_None) return 1;
    /* (seq, first slot, span, recipients, locked, guard), see ring/pool.py */
    if (!PyTuple_Check(entry) || PyTuple_GET_SIZE(entry) != 6 || PyTuple_GET_ITEM(entry, 3) != self->recipients ||
        PyTuple_GET_ITEM(entry, 4) != Py_False || PyTuple_GET_ITEM(entry, 5) != Py_None ||
        PyLong_AsLong(PyTuple_GET_ITEM(entry, 2)) != 1)
        return 0;
    Word seq = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(entry, 0));
    if (!seq) return 0;
    Word wanted = self->twice ? 2 * seq + 1 : seq;
    const Word *words = self->head.view.buf;
    for (int i = 0; i < self->npeers; i++)
        if (load(words + self->peers[i] + slot * self->step) != wanted) return 0;
    /* why a request has no reply: the Python code, which looks at that, frees its slot (rpc/asking.py) */
    return self->twice || load(words + self->note_at + slot * self->step + VERDICT - NOTE) >> 8 != seq;
}

/* The same, looking again for at most so many nanoseconds, without letting other threads run. */
static int becomes_free(Outbox *self, PyObject *entry, Py_ssize_t slot, int64_t patience) {
    for (int64_t until = 0; !is_free(self, entry, slot);) {
        if (patience <= 0) return 0;
        int64_t now = nanoseconds();
        if (!until) until = now + patience;
        if (now >= until) return 0;
        for (int i = 0; i < 16; i++) __builtin_ia32_pause();
    }
    return 1;
}

/* What is stored beside a message, rpc/notes.py. Of a request: its note's bits and its deadline, and its call goes into
 * `table`, under its sequence number, before anybody can see it. Of a reply: the request's number. */
typedef struct {
    PyObject *table, *call;
    Word first, deadline;
} Note;

/* Sets attributes that are slots, and a new key of a dict: that runs no Python code. */
static int enter_call(Outbox *self, const Note *note, Word seq, uint64_t slot) {
    PyObject *number = PyLong_FromUnsignedLongLong(seq);
    PyObject *at = PyLong_FromSsize_t(self->note_at - NOTE + (Py_ssize_t)slot * self->step);
    int failed = !number || !at || PyDict_SetItem(note->table, number, note->call);
    if (!failed) {
        set_field(note->call, call_class.at[C_WORDS], self->head_words);
        set_field(note->call, call_class.at[C_AT], at);
        set_field(note->call, call_class.at[C_SEQ], number);
    }
    Py_XDECREF(number);
    Py_XDECREF(at);
    return failed ? -1 : 0;
}

/* Publish `nbytes` from `source` as `plan` says, if the slot is free and nothing is unusual; see Outbox_send. The caller has made sure that `source` lives, and runs no other Python code between that and this call. */
static PyObject *publish(Outbox *self, PyObject *entry, Word seq, uint64_t slot, const Plan *plan, const void *source,
                         Py_ssize_t nbytes, int64_t patience, const Note *note) {
    Word *control = self->control.view.buf, *ledger = self->ledger.view.buf;
    char *head = self->head.view.buf;
    int locked = is_locked(self->locked);
    if (locked < 0) return NULL;
    if (locked || self->retired || load(control + self->epoch_at) != self->epoch ||
        slot >= (uint64_t)self->slots || load(ledger + self->published_at) + 1 != seq ||
        !becomes_free(self, PyList_GET_ITEM(self->busy, slot), (Py_ssize_t)slot, patience))
        Py_RETURN_NONE;
    if (note && note->table && enter_call(self, note, seq, slot)) return NULL;
    PyObject *next = PyLong_FromUnsignedLongLong(slot + 1 < (uint64_t)self->slots ? slot + 1 : 0);
    if (!next) return NULL;
    Py_XSETREF(*field(self->ring, self->cursor_at), next);

    char *record = head + self->records_at + (Py_ssize_t)slot * self->record_bytes;
    if (note) {
        Word *at = (Word *)head + self->note_at + (Py_ssize_t)slot * self->step;
        if (note->table) store(at + DEADLINE - NOTE, note->deadline);
        store(at, note->table ? seq << 8 | note->first : note->first);
    }
    store((Word *)record, 0); /* nobody may take the old record for a new one */
    memcpy((char *)self->data.view.buf + (Py_ssize_t)slot * self->slot_bytes, source, (size_t)nbytes);
    store((Word *)(record + self->sent_ns_at), (Word)nanoseconds());
    if (PyList_GET_ITEM(self->described, slot) != plan->out) {
        uint32_t number = (uint32_t)slot;
        memcpy(record + self->constant_at, PyBytes_AS_STRING(plan->constant), (size_t)PyBytes_GET_SIZE(plan->constant));
        memcpy(record + self->slot_at, &number, sizeof number);
        PyList_SetItem(self->described, (Py_ssize_t)slot, Py_NewRef(plan->out));
    }
    store((Word *)record, seq);
    store(ledger + self->order_at + (Py_ssize_t)(seq & (Word)self->mask), (Word)self->ring_index << 32 | slot);
    store(ledger + self->published_at, seq); /* pairs with the position check of the receivers' feeds */
    int asleep = 0;
    __atomic_signal_fence(__ATOMIC_SEQ_CST); /* the processor's part of this fence is paid by who goes to sleep */
    for (int i = 0; i < self->nsleepers; i++) asleep |= (int)(load(control + self->sleepers[i]) & 1);
    self->sent_bytes += (unsigned long long)plan->look.nbytes;
    PyList_SetItem(self->busy, (Py_ssize_t)slot, Py_NewRef(entry));
    if (asleep && ring_sleepers(&self->bells, control, self->sleepers, self->nsleepers, !self->twice, record, self->record_bytes))
        asleep = 0;
    return PyLong_FromLongLong(asleep ? -(long long)seq : (long long)seq);
}

/* A slot for the next message, chosen as by ring/ring.py's `find`: the first if it is free, since caches still hold it, else
 * the next free one from the cursor on; the cursor's if none is near. */
static int choose(Outbox *self, uint64_t *slot) {
    *slot = 0;
    if (is_free(self, PyList_GET_ITEM(self->busy, 0), 0)) return 0;
    if (get_field(self->ring, self->cursor_at, slot)) return -1;
    uint64_t at = *slot;
    for (int i = 0; i < NEAR && at < (uint64_t)self->slots; i++, at = at + 1 < (uint64_t)self->slots ? at + 1 : 0)
        if (is_free(self, PyList_GET_ITEM(self->busy, at), (Py_ssize_t)at)) {
            *slot = at;
            break;
        }
    return 0;
}

/* What `busy` is to hold of the next message, and its slot. Making the entry may run the garbage collector, so that it
 * comes first. */
static PyObject *next_entry(Outbox *self, Word *seq, uint64_t *slot) {
    *seq = load((Word *)self->ledger.view.buf + self->published_at) + 1;
    if (choose(self, slot)) return NULL;
    PyObject *items[] = {
        PyLong_FromUnsignedLongLong(*seq), PyLong_FromUnsignedLongLong(*slot), PyLong_FromLong(1),
        Py_NewRef(self->recipients), Py_NewRef(Py_False), Py_NewRef(Py_None),
    };
    PyObject *entry = items[0] && items[1] && items[2] ? PyTuple_New(6) : NULL;
    for (int i = 0; i < 6; i++) {
        if (entry) PyTuple_SET_ITEM(entry, i, items[i]);
        else Py_XDECREF(items[i]);
    }
    return entry;
}

PyDoc_STRVAR(Outbox_send_doc,
             "send(value, patience)\n--\n\nIts sequence number; minus it if somebody who may need it sleeps; None, and "
             "nothing done, if this is not the usual case, or no slot is free within so many nanoseconds.");

static PyObject *send_tensor(Outbox *self, PyObject *value, int64_t patience, const Note *note) {
    PyObject *result;
    Word seq;
    uint64_t slot;
    DLTensor tensor;
    const Plan *plan = NULL;

    /* first everything that may run other Python code: torch's modes, or the garbage collector for a new tuple */
    if (!tensor_type || Py_TYPE(value) != tensor_type) Py_RETURN_NONE;
    PyObject *negative = PyObject_CallMethodNoArgs(value, s_is_neg);
    if (!negative) return NULL;
    Py_DECREF(negative);
    if (negative != Py_False) Py_RETURN_NONE;
    PyObject *entry = next_entry(self, &seq, &slot);
    if (!entry) return NULL;

    if (look_at(value, &tensor) && is_dense(&tensor))
        for (int i = 0; i < self->nplans && !plan; i++)
            if (!self->plans[i].is_stream && same_look(&self->plans[i].look, &tensor)) plan = &self->plans[i];
    result = !plan ? Py_NewRef(Py_None)
                   : publish(self, entry, seq, slot, plan, (char *)tensor.data + tensor.byte_offset, plan->look.nbytes,
                             patience, note);
    Py_DECREF(entry);
    return result;
}

static PyObject *Outbox_send(Outbox *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "value, patience");
        return NULL;
    }
    long long patience = PyLong_AsLongLong(args[1]);
    if (patience == -1 && PyErr_Occurred()) return NULL;
    return send_tensor(self, args[0], patience, NULL);
}

PyDoc_STRVAR(Outbox_ask_doc,
             "ask(value, calls, call)\n--\n\n`send(value, 0)` of a request with its note; its call is told "
             "where it is, and put into `calls`.");

static PyObject *Outbox_ask(Outbox *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 3 || !PyDict_CheckExact(args[1]) || self->twice) {
        PyErr_SetString(PyExc_TypeError, "value, calls, call; of a work queue");
        return NULL;
    }
    Note note = {.table = args[1], .call = args[2]};
    if (know_call(note.call) || get_field(note.call, call_class.at[C_BITS], &note.first) ||
        get_field(note.call, call_class.at[C_DEADLINE], &note.deadline))
        return NULL;
    return send_tensor(self, args[0], 0, &note);
}

PyDoc_STRVAR(Outbox_answer_doc, "answer(value, request)\n--\n\n`send(value, 0)` of the reply to a request.");

static PyObject *Outbox_answer(Outbox *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2 || !self->twice) {
        PyErr_SetString(PyExc_TypeError, "value, request; of a fan-out");
        return NULL;
    }
    Note note = {NULL, NULL, PyLong_AsUnsignedLongLong(args[1]), 0};
    return PyErr_Occurred() ? NULL : send_tensor(self, args[0], 0, &note);
}

PyDoc_STRVAR(Outbox_send_stream_doc,
             "send_stream(stream, patience)\n--\n\nThe same for bytes, which go as a uint8 array of their size class: "
             "what follows them in it is not cleared.");

static PyObject *Outbox_send_stream(Outbox *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2 || !PyBytes_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "stream, patience");
        return NULL;
    }
    long long patience = PyLong_AsLongLong(args[1]);
    if (patience == -1 && PyErr_Occurred()) return NULL;
    Py_ssize_t nbytes = PyBytes_GET_SIZE(args[0]);
    int64_t class = stream_class(nbytes);
    Word seq;
    uint64_t slot;
    for (int i = 0; i < self->nplans; i++)
        if (self->plans[i].is_stream && self->plans[i].look.nbytes == class) {
            PyObject *entry = next_entry(self, &seq, &slot);
            if (!entry) return NULL;
            PyObject *result = publish(self, entry, seq, slot, &self->plans[i], PyBytes_AS_STRING(args[0]), nbytes, patience, NULL);
            Py_DECREF(entry);
            return result;
        }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(retire_doc, "retire()\n--\n\nThe endpoint has changed or ended: answer None from now on.");

static PyObject *Outbox_retire(Outbox *self, PyObject *unused) {
    (void)unused;
    self->retired = 1;
    Py_RETURN_NONE;
}

static PyMethodDef Outbox_methods[] = {
    {"retire", (PyCFunction)Outbox_retire, METH_NOARGS, retire_doc},
    {"learn", (PyCFunction)Outbox_learn, METH_VARARGS, Outbox_learn_doc},
    {"send", (PyCFunction)(void (*)(void))Outbox_send, METH_FASTCALL, Outbox_send_doc},
    {"ask", (PyCFunction)(void (*)(void))Outbox_ask, METH_FASTCALL, Outbox_ask_doc},
    {"answer", (PyCFunction)(void (*)(void))Outbox_answer, METH_FASTCALL, Outbox_answer_doc},
    {"send_stream", (PyCFunction)(void (*)(void))Outbox_send_stream, METH_FASTCALL, Outbox_send_stream_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef Outbox_members[] = {
    {"doorbells", T_ULONGLONG, offsetof(Outbox, bells.count), READONLY, "how many sleepers it has rung"},
    {"sent_bytes", T_ULONGLONG, offsetof(Outbox, sent_bytes), READONLY, "payload bytes of what was sent this way"},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject OutboxType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmtensor.hot._hot.Outbox",
    .tp_doc = "What a sender does for a usual tensor.",
    .tp_basicsize = sizeof(Outbox),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Outbox_init,
    .tp_dealloc = (destructor)Outbox_dealloc,
    .tp_methods = Outbox_methods,
    .tp_members = Outbox_members,
};
