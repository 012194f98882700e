/* The receiving end in C: a reader for each sender, its messages, and the leases that their views hold.
 *
 * `ring/reader.py` documents each call; `protocol/reader.c` does it to the words. One call takes a message, decodes it, and puts it
 * into `undelivered`, the dict of messages that `recv` has not returned, so that an asynchronous exception arrives before or after.
 * With an item load (`set[...]`), the message goes straight to the caller: an exception may arrive after a call, but not after an
 * item load. The interpreter lock keeps threads apart: from the first load to the last store of a take, no Python code and no other
 * thread runs. Decoding comes after it, and may run Python code; by then the message is taken, and other threads take other ones.
 */

#include "native.h"

#include <pthread.h>
#include <time.h>

#include "protocol/reader.h"
#include "trace.h"

#define LOOK_EVERY_NS 250000000 /* endpoints/base.py, `LIVENESS_INTERVAL`: how often a receiver that never waits looks for the dead, and
                                   for unfinished messages */

/* How many forks led to this process: a child must not touch the memory of its parent's readers. */
static unsigned forks;

static void after_fork_in_child(void) { forks++; }

/* --- what a receiver counts ------------------------------------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD
    uint64_t received, received_bytes, missed, redelivered;
} Counts;

static void Counts_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMemberDef Counts_members[] = {
    {"received", MEMBER_U64, offsetof(Counts, received), 0, "messages taken"},
    {"received_bytes", MEMBER_U64, offsetof(Counts, received_bytes), 0, "their payload bytes"},
    {"missed", MEMBER_U64, offsetof(Counts, missed), 0, "newest-only: messages passed over"},
    {"redelivered", MEMBER_U64, offsetof(Counts, redelivered), 0, "messages that somebody had before and did not finish"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot Counts_slots[] = {
    {Py_tp_doc, "What a receiver has received."},
    {Py_tp_dealloc, Counts_dealloc},
    {Py_tp_members, Counts_members},
    {0, NULL},
};

static PyType_Spec Counts_spec = {
    .name = "shmtensor.native._core.Counts", .basicsize = sizeof(Counts), .flags = Py_TPFLAGS_DEFAULT, .slots = Counts_slots,
};

/* --- the base of messages -------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *value, *meta, *sender, *hold, *lease, *receiver;
    uint64_t seq, nbytes, attempt, missed, sent_ns;
} Received;

static int Received_init(Received *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"value", "meta", "seq", "sender", "sent_ns", "nbytes", "attempt", "missed", "hold", "lease", "receiver", NULL};
    PyObject *value, *meta, *sender, *hold, *lease, *receiver;
    unsigned long long seq, sent_ns, nbytes, attempt, missed;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOKOKKKKOOO", names, &value, &meta, &seq, &sender, &sent_ns, &nbytes, &attempt,
                                     &missed, &hold, &lease, &receiver))
        return -1;
    Py_XSETREF(self->value, Py_NewRef(value));
    Py_XSETREF(self->meta, Py_NewRef(meta));
    Py_XSETREF(self->sender, Py_NewRef(sender));
    Py_XSETREF(self->hold, Py_NewRef(hold));
    Py_XSETREF(self->lease, Py_NewRef(lease));
    Py_XSETREF(self->receiver, Py_NewRef(receiver));
    self->seq = seq;
    self->sent_ns = sent_ns;
    self->nbytes = nbytes;
    self->attempt = attempt;
    self->missed = missed;
    return 0;
}

static int Received_traverse(Received *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->value);
    Py_VISIT(self->meta);
    Py_VISIT(self->sender);
    Py_VISIT(self->hold);
    Py_VISIT(self->lease);
    Py_VISIT(self->receiver);
    return 0;
}

static int Received_clear(Received *self) {
    Py_CLEAR(self->value);
    Py_CLEAR(self->meta);
    Py_CLEAR(self->sender);
    Py_CLEAR(self->hold);
    Py_CLEAR(self->lease);
    Py_CLEAR(self->receiver);
    return 0;
}

static void Received_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_TRASHCAN_BEGIN(self, Received_dealloc) /* a message whose value is a message, and so on */
    Received_clear((Received *)self);
    type->tp_free(self);
    Py_DECREF(type);
    Py_TRASHCAN_END
}

static PyMemberDef Received_members[] = {
    {"value", MEMBER_OBJECT, offsetof(Received, value), 0, "what was sent"},
    {"meta", MEMBER_OBJECT, offsetof(Received, meta), 0, "what the sender passed as `meta=`"},
    {"seq", MEMBER_U64, offsetof(Received, seq), 0, "the sender's sequence number"},
    {"sender", MEMBER_OBJECT, offsetof(Received, sender), 0, "who sent it"},
    {"_sent_ns", MEMBER_U64, offsetof(Received, sent_ns), 0, "when it was published, on CLOCK_MONOTONIC"},
    {"nbytes", MEMBER_U64, offsetof(Received, nbytes), 0, "payload bytes"},
    {"attempt", MEMBER_U64, offsetof(Received, attempt), 0, "how often it was delivered"},
    {"missed", MEMBER_U64, offsetof(Received, missed), 0, "how many were passed over before it"},
    {"_hold", MEMBER_OBJECT, offsetof(Received, hold), 0, "what keeps the lease, where `_lease` does not"},
    {"_lease", MEMBER_OBJECT, offsetof(Received, lease), 0, "the lease on its slot"},
    {"_receiver", MEMBER_OBJECT, offsetof(Received, receiver), 0, "who received it"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot Received_slots[] = {
    {Py_tp_doc, "What a message consists of."},
    {Py_tp_init, Received_init},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_traverse, Received_traverse},
    {Py_tp_clear, Received_clear},
    {Py_tp_dealloc, Received_dealloc},
    {Py_tp_members, Received_members},
    {0, NULL},
};

static PyType_Spec Received_spec = {
    .name = "shmtensor.native._core.Received",
    .basicsize = sizeof(Received),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = Received_slots,
};

/* --- readers and leases: what they are --------------------------------------------------------------------------------- */

/* What keeps a ring's memory mapped. */
typedef struct {
    Py_buffer head, data;
    PyObject *words; /* as Python has them */
} Attached;

typedef struct Lease Lease;

typedef struct {
    PyObject_HEAD
    reader f;
    Attached *attached; /* as many as `f.rings` */
    Py_buffer control, table;
    Codec *codec;
    Counts *counts;
    PyTypeObject *message_type, *lease_type;
    PyObject *wire_error, *dependency_error;
    PyObject *is_locked; /* of the receiver's mutex */
    PyObject *sender;    /* of its messages */
    PyObject *events;    /* a list: events that `recv` has met, for `take` to return */
    Lease *again;        /* fan-out: a chain of messages to be decoded again, before others are taken */
    const word **siblings; /* the `asleep` words of a work queue's other consumers */
    Py_ssize_t nsiblings;
    const word *epoch_at;
    word *shown; /* where other processes see `counts.missed`, and `counts.redelivered` behind it; NULL: nowhere */
    Trace trace;
    uint64_t sender_uid; /* for the trace */
    uint64_t epoch, posted, leases, unacknowledged, look_due;
    unsigned generation;
    char ready, closing, readonly;
    char is_due; /* the last call without the mutex took nothing, since a call with it is due */
} Reader;

/* The lease of a message: it ends when nothing refers to it, and gives the slot back. The garbage collector does not track
 * it, so that a reader with leases is never garbage, even if nothing else refers to it. */
struct Lease {
    PyObject_HEAD
    Reader *reader;
    Lease *next; /* of `again` */
    uint64_t seq, nbytes;
    uint32_t ring, slot;
    char is_held, locked, done, done_at_end;
};

static int is_mine(const Reader *self) { return self->ready && self->generation == forks; }

/* Call a method that may be repeated. No caller can handle an exception here: one that arrives in the call (Ctrl-C, say) is
 * reported, and the call is repeated. */
static void call_safely(PyObject *object, const char *name) {
    for (int attempt = 0; attempt < 2; attempt++) {
        PyObject *done = PyObject_CallMethod(object, name, NULL);
        if (done) {
            Py_DECREF(done);
            return;
        }
        PyErr_WriteUnraisable(object);
    }
}

/* Whether the release of message `seq` wakes a sender with this `asleep` word: memory/semaphores.py. */
static int is_woken_by(uint64_t asleep, uint64_t seq) {
    const uint64_t batched = (uint64_t)1 << 62, count = ((uint64_t)1 << 31) - 1;
    return (asleep & 1) && (!(asleep & batched) || ((seq - (asleep >> 31)) & count) <= count >> 1);
}

/* --- Lease ----------------------------------------------------------------------------------------------------------- */

static void begin_lease(Lease *lease, const taken *t) {
    Reader *self = lease->reader;
    lease->seq = t->seq;
    lease->nbytes = t->head.nbytes;
    lease->ring = t->ring;
    lease->slot = t->slot;
    lease->locked = (char)t->locked;
    lease->is_held = 1;
    self->leases++;
    self->unacknowledged += claims(&self->f);
}

/* Make a lease empty: it holds no message any more. */
static void forget_lease(Lease *lease) {
    lease->is_held = 0;
    lease->reader->leases--;
    lease->reader->unacknowledged -= claims(&lease->reader->f) && !lease->done;
}

static void acknowledge(Lease *lease) {
    Reader *self = lease->reader;
    if (!lease->is_held || lease->done || !claims(&self->f) || !is_mine(self)) return;
    lease->done = 1;
    self->unacknowledged--;
    reader_acknowledge(&self->f, lease->ring, lease->slot, lease->seq);
}

/* After message `seq` was given back: wake its sender if it sleeps, and close a reader that waits for that. An error that is set stays. */
static void tell_end(Reader *self, uint64_t seq) {
    uint64_t asleep = load(self->f.asleep);
    int wakes = is_woken_by(asleep, seq) && asleep != self->posted, is_last = !self->leases && self->closing;
    if (!wakes && !is_last) return;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (wakes) call_safely((PyObject *)self, "wake_sender");
    if (is_last) {
        call_safely((PyObject *)self, "close");
        call_safely((PyObject *)self, "emptied");
    }
    PyErr_Restore(type, value, traceback);
}

static void end_lease(Lease *lease) {
    Reader *self = lease->reader;
    uint64_t now = traces(&self->trace, lease->seq) ? monotonic_ns() : 0; /* before: the sender may use the slot at once */
    if (lease->done_at_end) acknowledge(lease);
    forget_lease(lease);
    reader_give_back(&self->f, lease->ring, lease->slot, lease->seq, lease->locked, lease->done);
    if (now) add_event(&self->trace.log, EVENT_RELEASE, lease->seq, self->sender_uid, now, 0, now, 0);
    tell_end(self, lease->seq);
}

static void Lease_dealloc(Lease *self) {
    PyTypeObject *type = Py_TYPE(self);
    if (self->is_held && is_mine(self->reader)) end_lease(self);
    Py_XDECREF(self->reader);
    type->tp_free(self);
    Py_DECREF(type);
}

static int Lease_getbuffer(Lease *self, Py_buffer *view, int flags) {
    if (!self->is_held || !is_mine(self->reader)) {
        PyErr_SetString(PyExc_BufferError, "the lease has ended, or is another process's");
        return -1;
    }
    const ring *r = &self->reader->f.rings[self->ring].shared;
    return PyBuffer_FillInfo(view, (PyObject *)self, r->data + (uint64_t)self->slot * r->slot_bytes, (Py_ssize_t)self->nbytes,
                             self->reader->readonly, flags);
}

PyDoc_STRVAR(Lease_acknowledge_doc, "acknowledge()\n--\n\nClaims: the message is done, nobody gets it again.");

static PyObject *Lease_acknowledge(Lease *self, PyObject *unused) {
    (void)unused;
    acknowledge(self);
    Py_RETURN_NONE;
}

static PyObject *Lease_words(Lease *self, void *unused) {
    (void)unused;
    if (!self->is_held) Py_RETURN_NONE;
    return Py_NewRef(self->reader->attached[self->ring].words);
}

static PyObject *Lease_word(Lease *self, void *unused) {
    (void)unused;
    if (!self->is_held) Py_RETURN_NONE;
    const reader *f = &self->reader->f;
    const ring *r = &f->rings[self->ring].shared;
    const word *at = f->mode == READER_COMPETING ? state_of(r, self->slot) : lease_word(r, f->recipient, self->slot);
    return PyLong_FromSsize_t(at - r->words);
}

static PyObject *Lease_ring_index(Lease *self, void *unused) {
    (void)unused;
    return PyLong_FromUnsignedLong(self->ring);
}

static PyMethodDef Lease_methods[] = {
    {"acknowledge", (PyCFunction)Lease_acknowledge, METH_NOARGS, Lease_acknowledge_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef Lease_members[] = {
    {"seq", MEMBER_U64, offsetof(Lease, seq), MEMBER_READONLY, "the message"},
    {"acknowledged", MEMBER_BOOL, offsetof(Lease, done), MEMBER_READONLY, "work queue: whether it is done"},
    {"done_at_end", MEMBER_BOOL, offsetof(Lease, done_at_end), 0, "claims: whether the end of the lease says that the message is done"},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef Lease_getset[] = {
    {"words", (getter)Lease_words, NULL, "the words of its ring", NULL},
    {"word", (getter)Lease_word, NULL, "where among them those of its slot begin, or this receiver's is", NULL},
    {"ring_index", (getter)Lease_ring_index, NULL, "its ring's number", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot Lease_slots[] = {
    {Py_tp_doc, "One message in one slot, held until nothing refers to this any more. A buffer over the payload."},
    {Py_tp_dealloc, Lease_dealloc},
    {Py_tp_methods, Lease_methods},
    {Py_tp_members, Lease_members},
    {Py_tp_getset, Lease_getset},
    {Py_bf_getbuffer, Lease_getbuffer},
    {0, NULL},
};

static PyType_Spec Lease_spec = {
    .name = "shmtensor.native._core.Lease",
    .basicsize = sizeof(Lease),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = Lease_slots,
};

/* --- Reader: what it is made of ---------------------------------------------------------------------------------------- */

/* Whether a class is, or comes from, the one with this destructor. */
static int comes_from(PyObject *type, destructor dealloc) {
    if (!PyType_Check(type)) return 0;
    for (PyTypeObject *each = (PyTypeObject *)type; each; each = each->tp_base)
        if (each->tp_dealloc == dealloc) return 1;
    return 0;
}

/* The words of a segment: 0, or -1 with an error set. */
static int get_words(PyObject *object, Py_buffer *view) {
    if (PyObject_GetBuffer(object, view, PyBUF_WRITABLE)) return -1;
    if ((uintptr_t)view->buf % sizeof(word)) {
        PyErr_SetString(PyExc_ValueError, "words that are not aligned");
        return -1;
    }
    return 0;
}

static int has_word(const Py_buffer *view, uint64_t at) { return at < (uint64_t)view->len / sizeof(word); }

static void Reader_dealloc(Reader *self);

static int Reader_init(Reader *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"codec", "lease", "message", "counts", "wire_error", "dependency_error", "is_locked", "control", "table", "order", "mask",
                            "lock_fd", "mode", "depth", "history", "member", "recipient", "recipient_uid", "asleep_at", "epoch_at", "shown_at", "max_attempts",
                            "description_version", "readonly", NULL};
    PyObject *codec, *lease, *message, *counts, *wire_error, *dependency_error, *is_locked, *control, *table;
    unsigned long long order, mask, depth, history, recipient_uid, asleep_at, epoch_at, shown_at;
    unsigned int member, recipient, max_attempts;
    int lock_fd, mode, version, readonly;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$OOOOOOOOOKKiiKKIIKKKKIip", names, &codec, &lease, &message, &counts, &wire_error,
                                     &dependency_error, &is_locked, &control, &table, &order, &mask, &lock_fd, &mode, &depth, &history, &member,
                                     &recipient, &recipient_uid, &asleep_at, &epoch_at, &shown_at, &max_attempts, &version, &readonly))
        return -1;
    PyTypeObject *type = Py_TYPE(self);
    while (type->tp_dealloc != (destructor)Reader_dealloc) type = type->tp_base; /* of a subclass in Python */
    PyTypeObject *codec_type = codec_type_of(type);
    if (!codec_type) return -1;
    if (self->codec || !comes_from(lease, (destructor)Lease_dealloc) || !comes_from(message, Received_dealloc) ||
        !comes_from((PyObject *)Py_TYPE(counts), Counts_dealloc) || !PyObject_TypeCheck(codec, codec_type) ||
        mode < READER_ALL || mode > READER_GROUP || !depth || member >= MOST_MEMBERS ||
        recipient >= MOST_MEMBERS) {
        PyErr_SetString(PyExc_TypeError, "no parts of a reader, or it was made already");
        return -1;
    }
    if (!(self->events = PyList_New(0))) return -1;
    self->codec = (Codec *)Py_NewRef(codec);
    self->lease_type = (PyTypeObject *)Py_NewRef(lease);
    self->message_type = (PyTypeObject *)Py_NewRef(message);
    self->counts = (Counts *)Py_NewRef(counts);
    self->wire_error = Py_NewRef(wire_error);
    self->dependency_error = Py_NewRef(dependency_error);
    self->is_locked = Py_NewRef(is_locked);
    if (get_words(control, &self->control) || get_words(table, &self->table)) return -1;
    if (!has_word(&self->control, asleep_at) || !has_word(&self->control, shown_at + 1) || shown_at == UINT64_MAX ||
        !has_word(&self->control, epoch_at) || mask & (mask + 1) || mask > UINT32_MAX ||
        order > UINT32_MAX || !has_word(&self->table, order + mask) || !has_word(&self->table, T_MEMBERS + 2 * (uint64_t)recipient + 1)) {
        PyErr_SetString(PyExc_ValueError, "a word lies outside its segment");
        return -1;
    }
    self->f = (reader){
        .mode = (reader_mode)mode,
        .depth = depth,
        .table = {self->table.buf, mask, order},
        .lock_fd = lock_fd,
        .history = history,
        .member = member,
        .recipient = recipient,
        .recipient_uid = recipient_uid,
        .asleep = (const word *)self->control.buf + asleep_at,
        .most_attempts = max_attempts,
        .description_version = (uint8_t)version,
    };
    self->epoch_at = (const word *)self->control.buf + epoch_at;
    self->shown = shown_at ? (word *)self->control.buf + shown_at : NULL;
    self->readonly = (char)readonly;
    self->generation = forks;
    self->ready = 1;
    return 0;
}

static int Reader_traverse(Reader *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->codec);
    Py_VISIT(self->lease_type);
    Py_VISIT(self->message_type);
    Py_VISIT(self->events);
    return 0;
}

static void Reader_dealloc(Reader *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    self->ready = 0;
    for (uint32_t i = 0; i < self->f.nrings; i++) {
        reader_ring_free(&self->f.rings[i]);
        PyBuffer_Release(&self->attached[i].head);
        PyBuffer_Release(&self->attached[i].data);
        Py_DECREF(self->attached[i].words);
    }
    PyMem_Free(self->f.rings);
    PyMem_Free(self->attached);
    PyMem_Free(self->siblings);
    trace_clear(&self->trace);
    if (self->control.obj) PyBuffer_Release(&self->control);
    if (self->table.obj) PyBuffer_Release(&self->table);
    Py_XDECREF(self->codec);
    Py_XDECREF(self->lease_type);
    Py_XDECREF(self->message_type);
    Py_XDECREF(self->counts);
    Py_XDECREF(self->wire_error);
    Py_XDECREF(self->dependency_error);
    Py_XDECREF(self->is_locked);
    Py_XDECREF(self->sender);
    Py_XDECREF(self->events);
    type->tp_free(self);
    Py_DECREF(type);
}

static int check_ready(const Reader *self) {
    if (is_mine(self)) return 0;
    PyErr_SetString(PyExc_RuntimeError, "this reader was not made, or is another process's");
    return -1;
}

PyDoc_STRVAR(Reader_add_ring_doc, "add_ring(words, data, slots, slot_bytes, state, row, ring, rings)\n--\n\n"
    "The sender's next ring is mapped; it is appended to the list `rings`.");

static PyObject *Reader_add_ring(Reader *self, PyObject *args) {
    PyObject *words, *data, *object, *list;
    unsigned long long slots, slot_bytes, state, row;
    if (!PyArg_ParseTuple(args, "OOKKKKOO!", &words, &data, &slots, &slot_bytes, &state, &row, &object, &PyList_Type, &list) ||
        check_ready(self))
        return NULL;
    uint32_t index = self->f.nrings;
    reader_ring *rings = PyMem_Realloc(self->f.rings, (index + 1) * sizeof *rings);
    if (rings) self->f.rings = rings;
    Attached *attached = rings ? PyMem_Realloc(self->attached, (index + 1) * sizeof *attached) : NULL;
    if (!attached) return PyErr_NoMemory();
    self->attached = attached;
    Attached made = {.words = words};
    if (get_words(words, &made.head)) {
        if (made.head.obj) PyBuffer_Release(&made.head);
        return NULL;
    }
    if (PyObject_GetBuffer(data, &made.data, PyBUF_SIMPLE)) {
        PyBuffer_Release(&made.head);
        return NULL;
    }
    uint64_t end, bytes, most = self->f.member > self->f.recipient ? self->f.member : self->f.recipient;
    int inside = index < MOST_RINGS && slots && slots <= UINT32_MAX && row <= UINT32_MAX && state <= UINT32_MAX &&
                 !__builtin_mul_overflow(slots, slot_bytes, &bytes) && bytes <= (uint64_t)made.data.len &&
                 state >= HEADER_WORDS + slots * RECORD_WORDS;
    if (self->f.mode == READER_COMPETING) end = state + slots * STATE_WORDS;
    else end = state + most * row + slots;
    ring shared = {
        .words = made.head.buf, .data = made.data.buf, .slots = slots, .slot_bytes = slot_bytes, .state = state,
        .row = self->f.mode == READER_COMPETING ? 0 : row, .index = index,
    };
    if (!inside || !has_word(&made.head, end - 1)) PyErr_SetString(PyExc_ValueError, "a ring that does not fit its segment");
    else if (reader_ring_init(&rings[index], &shared)) PyErr_NoMemory();
    else if (PyList_Append(list, object)) reader_ring_free(&rings[index]);
    else {
        Py_INCREF(words);
        attached[index] = made;
        self->f.nrings++;
        Py_RETURN_NONE;
    }
    PyBuffer_Release(&made.head);
    PyBuffer_Release(&made.data);
    return NULL;
}

PyDoc_STRVAR(Reader_set_siblings_doc, "set_siblings(words)\n--\n\nWork queue: where in the control segment the other consumers sleep.");

static PyObject *Reader_set_siblings(Reader *self, PyObject *words) {
    if (check_ready(self)) return NULL;
    PyObject *list = PySequence_Tuple(words);
    if (!list) return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(list);
    const word **found = PyMem_Malloc((size_t)(count ? count : 1) * sizeof *found);
    if (!found) PyErr_NoMemory();
    for (Py_ssize_t i = 0; found && i < count; i++) {
        uint64_t at = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(list, i));
        if (!PyErr_Occurred() && has_word(&self->control, at)) found[i] = (const word *)self->control.buf + at;
        else {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a word lies outside its segment");
            PyMem_Free(found);
            found = NULL;
        }
    }
    Py_DECREF(list);
    if (!found) return NULL;
    PyMem_Free(self->siblings);
    self->siblings = found;
    self->nsiblings = count;
    Py_RETURN_NONE;
}

/* --- Reader: receiving ------------------------------------------------------------------------------------------------- */

/* Events: (code, seq, detail). ring/reader.py has the same numbers. */
enum { ATTACH = 1, OTHER, PASSED_OVER, GIVEN_UP, UNREADABLE };

static PyObject *event_of(take_result result, const taken *t) {
    if (result == TAKE_ATTACH) return Py_BuildValue("(iKk)", ATTACH, (unsigned long long)t->seq, (unsigned long)t->ring);
    int code = result == TAKE_OTHER ? OTHER : PASSED_OVER;
    return Py_BuildValue("(iK(kky#i))", code, (unsigned long long)t->seq, (unsigned long)t->ring, (unsigned long)t->slot,
                         (const char *)&t->head, (Py_ssize_t)sizeof t->head, (int)t->other);
}

/* Value and meta of a message that was taken, by `decode_at`: 0, or -1 with an error set. */
static int decode_taken(Reader *self, const taken *t, Lease *lease, PyObject **value, PyObject **meta) {
    unsigned char *base = (unsigned char *)payload_of(&self->f, t);
    size_t size = t->head.length;
    const unsigned char *text = (const unsigned char *)t->description;
    unsigned char *copy = NULL;
    if (t->head.flags & SPILLED) { /* a copy: a misbehaving sender may still write there */
        if (!(copy = PyMem_Malloc(size ? size : 1))) {
            PyErr_NoMemory();
            return -1;
        }
        text = memcpy(copy, description_of(&self->f, t), size);
    }
    int failed = decode_at(self->codec, text, size, (PyObject *)lease, base, t->head.nbytes, self->readonly, value, meta);
    PyMem_Free(copy);
    return failed;
}

static void count_missed(Reader *self, uint64_t missed) {
    self->counts->missed += missed;
    if (missed && self->shown) store(self->shown, self->counts->missed);
}

/* Undo a take after an exception: the message will be taken again. */
static void undo(Reader *self, const taken *t, Lease *lease) {
    if (!is_mine(self) || !lease->is_held || lease->done) return;
    if (!claims(&self->f) && self->f.position != t->seq) { /* other threads have taken later ones */
        if (self->f.mode == READER_LATEST) count_missed(self, t->missed + 1);
        else if (!self->closing) {
            lease->next = self->again;
            self->again = (Lease *)Py_NewRef((PyObject *)lease);
        }
        return;
    }
    forget_lease(lease);
    reader_untake(&self->f, t);
    tell_end(self, t->seq);
}

/* An asynchronous exception that is raised later, when the message is in its place. */
typedef struct {
    PyObject *type, *value, *traceback;
} Raised;

static void put_off(Raised *raised) { PyErr_Fetch(&raised->type, &raised->value, &raised->traceback); }

/* Raise it; an error that is set already becomes its context. */
static void raise_late(Raised *raised) {
    if (!raised->type) return;
    Raised other;
    put_off(&other);
    PyErr_NormalizeException(&raised->type, &raised->value, &raised->traceback);
    PyErr_NormalizeException(&other.type, &other.value, &other.traceback);
    if (other.value && other.value != raised->value && PyExceptionInstance_Check(other.value) && PyExceptionInstance_Check(raised->value)) {
        if (other.traceback) PyException_SetTraceback(other.value, other.traceback);
        PyException_SetContext(raised->value, Py_NewRef(other.value));
    }
    Py_XDECREF(other.type);
    Py_XDECREF(other.value);
    Py_XDECREF(other.traceback);
    PyErr_Restore(raised->type, raised->value, raised->traceback);
}

/* The text of the error that is set, which is cleared: NULL with an error. */
static PyObject *take_text(void) {
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    PyObject *text = error ? PyObject_Str(error) : PyUnicode_FromString("");
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    return text;
}

/* The event for a message that cannot be read, by the error that is set. A damaged message is finished; where the package is
 * missing that can read it, the take is undone. */
static PyObject *refuse(Reader *self, const taken *t, Lease *lease) {
    int is_damaged = PyErr_ExceptionMatches(self->wire_error);
    PyObject *text = take_text(), *event = NULL;
    if (text) event = Py_BuildValue("(iKN)", is_damaged ? PASSED_OVER : UNREADABLE, (unsigned long long)t->seq, text);
    if (is_damaged) acknowledge(lease);
    else undo(self, t, lease);
    return event;
}

/* In place of the value and meta of a fan-out's message that only a missing package can read: None, and an error that, other than
 * the one that is set, has no frames that refer to the lease. 0, or -1 with an error set. */
static int replace_value(Reader *self, PyObject **value, PyObject **meta) {
    PyObject *text = take_text();
    *meta = text ? PyObject_CallOneArg(self->dependency_error, text) : NULL;
    Py_XDECREF(text);
    if (!*meta) return -1;
    *value = Py_NewRef(Py_None);
    return 0;
}

/* Value and meta of a message whose lease has begun: 0; -1 with an event if it cannot be read, or with an error. An asynchronous
 * exception comes once: a second try shows what the message is, and `raised` holds the exception. If both fail, the take is undone. */
static int decode_twice(Reader *self, const taken *t, Lease *lease, PyObject **value, PyObject **meta, Raised *raised,
                        PyObject **event) {
    for (int attempt = 0; attempt < 2; attempt++) {
        if (!decode_taken(self, t, lease, value, meta)) return 0;
        int is_missing = PyErr_ExceptionMatches(self->dependency_error);
        if (is_missing && !claims(&self->f)) return replace_value(self, value, meta);
        if (is_missing || PyErr_ExceptionMatches(self->wire_error)) {
            *event = refuse(self, t, lease);
            return -1;
        }
        if (!attempt) put_off(raised);
    }
    Raised error;
    put_off(&error);
    undo(self, t, lease);
    raise_late(&error);
    return -1;
}

PyDoc_STRVAR(Reader_trace_doc, "trace(log, sender)\n--\n\nWrite events to that `EventLog` from now on, None: none. `sender`: the uid of the sender.");

static PyObject *Reader_trace(Reader *self, PyObject *args) {
    PyObject *log;
    unsigned long long sender;
    if (!PyArg_ParseTuple(args, "OK", &log, &sender)) return NULL;
    if ((log != Py_None && check_ready(self)) || trace_set(&self->trace, log)) return NULL; /* in a forked child, it ends */
    self->sender_uid = sender;
    Py_RETURN_NONE;
}

static void note_taken(Reader *self, const taken *t) {
    uint64_t end = monotonic_ns();
    add_event(&self->trace.log, EVENT_TAKE, t->seq, self->sender_uid, self->trace.begun ? self->trace.begun : end, t->attempt, end,
              t->head.nbytes);
}

static void count(Reader *self, const taken *t, int is_readable) {
    count_missed(self, t->missed);
    if (!is_readable) return;
    self->counts->received++;
    self->counts->received_bytes += t->head.nbytes;
    if (t->attempt <= 1) return;
    self->counts->redelivered++;
    if (self->shown) store(self->shown + 1, self->counts->redelivered);
}

/* What to do with a message that was taken. */
typedef struct {
    PyObject *receiver, *undelivered; /* put a message into this dict */
    PyObject *hand;                   /* or, unless it is NULL, into this hand, None: into none, and give it to the caller */
    PyObject *make, *made, *then;     /* or put the result of `make` for its value into this list, finish it, and call `then` */
} Sink;

/* Mark the messages in a `Hand` (endpoints/claims.py) as done: its thread or task asks for the next one. 1, or -1 with an error; 0
 * if something in it is not a lease of this module, which the endpoint handles. */
static int finish_hand(Reader *self, PyObject *hand) {
    PyObject *name = self->codec->names[LAST], *last = PyObject_GetAttr(hand, name), *each = last;
    while (each && PyTuple_CheckExact(each) && PyTuple_GET_SIZE(each) == 4 && Py_TYPE(PyTuple_GET_ITEM(each, 0)) == self->lease_type) {
        acknowledge((Lease *)PyTuple_GET_ITEM(each, 0));
        each = PyTuple_GET_ITEM(each, 3);
    }
    int done = !last ? -1 : each == Py_None;
    if (done > 0 && last != Py_None && PyObject_SetAttr(hand, name, Py_None)) done = -1;
    Py_XDECREF(last); /* last: with the leases go their locks */
    return done;
}

/* Put a message into `undelivered`, or give it straight to the caller, who has it in hand then: 1, or -1 with an error; 0 if the receiver
 * was closed meanwhile, and nobody would take it from there. */
static int hand_over(Reader *self, Lease *lease, Received *message, const Sink *sink, int goes_straight) {
    PyObject *hand = goes_straight && sink->hand != Py_None ? sink->hand : NULL;
    PyObject *all = hand ? PyTuple_New(4) : NULL; /* first: it may run the collector, and with it anything */
    if (hand && !all) return -1;
    if (self->closing) {
        Py_XDECREF(all);
        return 0;
    }
    if (!goes_straight) return PyDict_SetItem(sink->undelivered, (PyObject *)message, Py_None) ? -1 : 1;
    if (!hand) return 1;
    PyObject *name = self->codec->names[LAST], *last = PyObject_GetAttr(hand, name);
    if (last) {
        PyTuple_SET_ITEM(all, 0, Py_NewRef((PyObject *)lease));
        PyTuple_SET_ITEM(all, 1, Py_NewRef(Py_None));
        PyTuple_SET_ITEM(all, 2, Py_NewRef(Py_None));
        PyTuple_SET_ITEM(all, 3, last);
    }
    int failed = !last || PyObject_SetAttr(hand, name, all);
    Py_DECREF(all);
    return failed ? -1 : 1;
}

/* The message of a lease that has begun, where `sink` says: a new reference; NULL with an event, or with an error. One that is to go
 * straight to the caller and cannot, since an exception has arrived or it cannot be read here, is in `undelivered`, with None. None as
 * well if the receiver was closed meanwhile: the take is undone. */
static PyObject *deliver(Reader *self, const taken *t, Lease *lease, Received *message, const Sink *sink, PyObject **event) {
    PyObject *value, *meta;
    Raised raised = {0};
    int has_it = 0;
    if (!decode_twice(self, t, lease, &value, &meta, &raised, event)) {
        message->value = value;
        message->meta = meta;
        message->sender = Py_XNewRef(self->sender);
        message->sent_ns = t->sent_ns;
        message->hold = Py_NewRef(Py_None);
        message->lease = Py_NewRef((PyObject *)lease);
        message->receiver = Py_NewRef(sink->receiver);
        message->seq = t->seq;
        message->nbytes = t->head.nbytes;
        message->attempt = t->attempt;
        message->missed = t->missed;
        int is_readable = (PyObject *)Py_TYPE(meta) != self->dependency_error;
        int goes_straight = sink->hand && is_readable && !raised.type, is_there = hand_over(self, lease, message, sink, goes_straight);
        has_it = is_there > 0 && (goes_straight || !sink->hand);
        if (is_there > 0) {
            count(self, t, is_readable);
            if (traces(&self->trace, t->seq)) note_taken(self, t);
            CRASH_POINT("take.delivered");
        } else {
            Raised error;
            put_off(&error);
            undo(self, t, lease);
            raise_late(&error);
        }
    }
    raise_late(&raised);
    if (*event || PyErr_Occurred()) return NULL;
    return Py_NewRef(has_it ? (PyObject *)message : Py_None);
}

/* Call `make` with the value of a message, which counts as done then, whatever the result: True; NULL as above. An exception from
 * `make` may be its own or an asynchronous one; a second try tells which. */
static PyObject *convert(Reader *self, const taken *t, Lease *lease, const Sink *sink, PyObject **event) {
    PyObject *value, *meta, *made;
    Raised raised = {0};
    if (decode_twice(self, t, lease, &value, &meta, &raised, event)) {
        raise_late(&raised);
        return NULL;
    }
    Py_DECREF(meta);
    if (!(made = PyObject_CallOneArg(sink->make, value))) {
        raise_late(&raised);
        put_off(&raised);
        if (!(made = PyObject_CallOneArg(sink->make, value))) PyErr_Clear();
    }
    Py_DECREF(value);
    if (made && PyList_Append(sink->made, made)) {
        Raised error;
        put_off(&error);
        undo(self, t, lease);
        Py_DECREF(made);
        raise_late(&error);
        raise_late(&raised);
        return NULL;
    }
    Py_XDECREF(made);
    count(self, t, 1);
    if (traces(&self->trace, t->seq)) note_taken(self, t);
    CRASH_POINT("take.delivered");
    acknowledge(lease);
    if (sink->then != Py_None) {
        PyObject *answer = PyObject_CallNoArgs(sink->then);
        if (!answer && PyErr_ExceptionMatches(PyExc_ValueError)) PyErr_Clear(); /* a counter at its limit already */
        else if (!answer) PyErr_WriteUnraisable(sink->then);
        Py_XDECREF(answer);
    }
    raise_late(&raised);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_True);
}

typedef enum { NEXT, UNFINISHED, NAMED } Wanted;

static int has_news(Reader *self) {
    return self->again || self->f.seen > self->f.position || published(&self->f.table) > self->f.position;
}

/* Spin for at most this long for a new message, without letting other threads run. */
static void spin(Reader *self, int64_t patience) {
    for (uint64_t until = 0; !has_news(self) && load(self->epoch_at) == self->epoch;) {
        uint64_t now = monotonic_ns();
        if (!until) until = now + (uint64_t)patience;
        if (now >= until) break;
        for (int i = 0; i < 16 && !has_news(self); i++) cpu_relax();
    }
}

/* Whether a caller without the mutex may take a message: nothing is left that needs the mutex first. 0, 1, or -1. */
static int may_go_ahead(Reader *self) {
    if (PyList_GET_SIZE(self->events) || load(self->epoch_at) != self->epoch) return 0;
    struct timespec coarse; /* of the last tick: the cheapest clock */
    clock_gettime(CLOCK_MONOTONIC_COARSE, &coarse);
    uint64_t now = (uint64_t)coarse.tv_sec * 1000000000u + (uint64_t)coarse.tv_nsec;
    if (now >= self->look_due) {
        self->look_due = now + LOOK_EVERY_NS;
        return 0;
    }
    PyObject *answer = PyObject_CallNoArgs(self->is_locked);
    if (!answer) return -1;
    Py_DECREF(answer); /* of a lock: True or False, which live on */
    return answer == Py_False;
}

/* The lease of the oldest message that is to be decoded again, whose record is read into `t`: it stands in for `lease`. */
static take_result take_again(Reader *self, taken *t, Lease **lease) {
    Lease **oldest = &self->again;
    for (Lease **each = oldest; *each; each = &(*each)->next)
        if ((*each)->seq < (*oldest)->seq) oldest = each;
    Lease *found = *oldest;
    *oldest = found->next;
    found->next = NULL;
    Py_SETREF(*lease, found);
    *t = (taken){.seq = found->seq, .ring = found->ring, .slot = found->slot};
    if (!reader_read_again(&self->f, found->ring, found->slot, found->seq, t)) return TAKE_DAMAGED;
    t->attempt = 1;
    t->locked = (uint8_t)found->locked;
    return TAKE_TAKEN;
}

/* Give back the messages that were to be decoded again: the receiver reads no more. */
static void drop_again(Reader *self) {
    while (self->again) {
        Lease *first = self->again;
        self->again = first->next;
        first->next = NULL;
        Py_DECREF((PyObject *)first);
    }
}

/* The next message, an event, or None. `alone`: for a caller without the mutex. */
static PyObject *receive(Reader *self, Wanted wanted, uint64_t seq, const Sink *sink, int64_t patience, int alone) {
    if (sink->make ? !PyList_CheckExact(sink->made) : !PyDict_CheckExact(sink->undelivered)) {
        PyErr_SetString(PyExc_TypeError, sink->make ? "make, a list, then" : "receiver, a dict");
        return NULL;
    }
    if (!is_mine(self) || self->closing) Py_RETURN_NONE;
    if (PyList_GET_SIZE(self->events) && !alone) {
        PyObject *event = Py_NewRef(PyList_GET_ITEM(self->events, 0));
        if (PyList_SetSlice(self->events, 0, 1, NULL)) Py_CLEAR(event);
        return event;
    }
    if (patience > 0) spin(self, patience);
    self->is_due = 0;
    if (wanted == NEXT && !has_news(self)) {
        reader_unlock_finished(&self->f);
        Py_RETURN_NONE;
    }

    /* calls that may run the garbage collector come before the first load */
    Received *message = sink->make ? NULL : (Received *)self->message_type->tp_alloc(self->message_type, 0);
    Lease *lease = message || sink->make ? (Lease *)self->lease_type->tp_alloc(self->lease_type, 0) : NULL;
    PyObject *made = NULL, *event = NULL;
    taken t = {0};
    take_result result = TAKE_NOTHING;
    int may = !lease ? -1 : alone ? may_go_ahead(self) : 1, contended = 0;
    self->is_due = !may;
    if (may < 0) goto end;
    lease->reader = (Reader *)Py_NewRef((PyObject *)self);
    self->f.scanned = 0;
    self->f.contended = 0;
    if (is_traced(&self->trace)) self->trace.begun = monotonic_ns();
    while (may && is_mine(self) && !self->closing) {
        if (wanted == UNFINISHED) result = reader_scan(&self->f, &t);
        else if (wanted == NAMED) result = reader_take_one(&self->f, seq, &t);
        else result = self->again ? take_again(self, &t, &lease) : reader_take(&self->f, &t);
        contended |= self->f.contended; /* other threads take messages while this one is decoded */
        if (result != TAKE_RETRY) break;
        count_missed(self, t.missed);
    }
    if (result == TAKE_TAKEN) {
        if (!lease->is_held) begin_lease(lease, &t);
        made = sink->make ? convert(self, &t, lease, sink, &event) : deliver(self, &t, lease, message, sink, &event);
    } else if (result == TAKE_DAMAGED && claims(&self->f) && !t.attempt) {
        event = Py_BuildValue("(iKI)", GIVEN_UP, (unsigned long long)t.seq, (unsigned int)self->f.most_attempts);
    } else if (result != TAKE_NOTHING && result != TAKE_RETRY) event = event_of(result, &t);
    if (result == TAKE_NOTHING) reader_unlock_finished(&self->f);
    if (contended && (load(self->f.asleep) & 1)) {
        Raised raised;
        put_off(&raised);
        call_safely((PyObject *)self, "wake_sender");
        PyErr_Restore(raised.type, raised.value, raised.traceback);
    }
    if (event && alone) {
        if (PyList_Append(self->events, event)) PyErr_WriteUnraisable((PyObject *)self);
        Py_CLEAR(event); /* the caller with the mutex gets it */
    }
    if (!made && !PyErr_Occurred()) made = event ? event : Py_NewRef(Py_None);
    else Py_XDECREF(event);
end:
    Py_XDECREF((PyObject *)lease);
    Py_XDECREF((PyObject *)message);
    return made;
}

static int64_t nanoseconds_of(PyObject *number) {
    long long found = PyLong_AsLongLong(number);
    return found == -1 && PyErr_Occurred() ? -1 : found < 0 ? 0 : found;
}

/* receiver, undelivered, patience: 0, or -1 with an error. */
static int dict_of(PyObject *const *args, Py_ssize_t count, Sink *sink, int64_t *patience) {
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "receiver, undelivered, patience");
        return -1;
    }
    *patience = nanoseconds_of(args[2]);
    *sink = (Sink){.receiver = args[0], .undelivered = args[1]};
    return *patience < 0 ? -1 : 0;
}

PyDoc_STRVAR(Reader_take_doc, "take(receiver, undelivered, patience)\n--\n\nThe next message, there now or within so many nanoseconds, which "
                            "is in `undelivered` then; None; or an event.");

static PyObject *Reader_take(Reader *self, PyObject *const *args, Py_ssize_t count) {
    Sink sink;
    int64_t patience;
    return dict_of(args, count, &sink, &patience) ? NULL : receive(self, NEXT, 0, &sink, patience, 0);
}

PyDoc_STRVAR(Reader_take_unfinished_doc, "take_unfinished(receiver, undelivered)\n--\n\nClaims: the same of the oldest message that somebody "
                                       "had and did not finish, in the rings that are mapped.");

static PyObject *Reader_take_unfinished(Reader *self, PyObject *args) {
    PyObject *receiver, *undelivered;
    if (!PyArg_ParseTuple(args, "OO", &receiver, &undelivered) || check_ready(self)) return NULL;
    if (!claims(&self->f)) Py_RETURN_NONE;
    Sink sink = {.receiver = receiver, .undelivered = undelivered};
    return receive(self, UNFINISHED, 0, &sink, 0, 0);
}

PyDoc_STRVAR(Reader_take_named_doc, "take_named(seq, receiver, undelivered)\n--\n\nWork queue: the same of this message.");

static PyObject *Reader_take_named(Reader *self, PyObject *args) {
    unsigned long long seq;
    PyObject *receiver, *undelivered;
    if (!PyArg_ParseTuple(args, "KOO", &seq, &receiver, &undelivered) || check_ready(self)) return NULL;
    if (self->f.mode != READER_COMPETING || !seq) Py_RETURN_NONE;
    Sink sink = {.receiver = receiver, .undelivered = undelivered};
    return receive(self, NAMED, seq, &sink, 0, 0);
}

/* --- Reader: queries --------------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(Reader_begin_doc, "begin()\n--\n\nFan-out: find the position to begin at. After a barrier.");

static PyObject *Reader_begin(Reader *self, PyObject *unused) {
    (void)unused;
    if (check_ready(self)) return NULL;
    reader_begin(&self->f);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(Reader_next_doc, "next()\n--\n\nThe sequence number to look at next; 0: there is none.");

static PyObject *Reader_next(Reader *self, PyObject *unused) {
    (void)unused;
    return check_ready(self) ? NULL : PyLong_FromUnsignedLongLong(self->again ? self->again->seq : reader_next(&self->f));
}

PyDoc_STRVAR(Reader_age_doc, "age()\n--\n\nWork queue: when the next message was published, on CLOCK_MONOTONIC, nanoseconds; 0 if `take` has "
                           "to tell, 2**64 - 1 if there is none.");

static PyObject *Reader_age(Reader *self, PyObject *unused) {
    (void)unused;
    return check_ready(self) ? NULL : PyLong_FromUnsignedLongLong(reader_age(&self->f));
}

PyDoc_STRVAR(Reader_has_lease_doc, "has_lease(ring, slot, seq)\n--\n\nWhether this receiver holds that message.");

static PyObject *Reader_has_lease(Reader *self, PyObject *args) {
    unsigned long long seq;
    unsigned int index, slot;
    if (!PyArg_ParseTuple(args, "IIK", &index, &slot, &seq) || check_ready(self)) return NULL;
    int found = index < self->f.nrings && slot < self->f.rings[index].shared.slots && self->f.rings[index].held[slot] == seq;
    return PyBool_FromLong(found);
}

PyDoc_STRVAR(Reader_detach_doc, "detach()\n--\n\nThe lock file is about to be closed: its descriptor is not used again.");

static PyObject *Reader_detach(Reader *self, PyObject *unused) {
    (void)unused;
    drop_again(self); /* in a forked child: that does not give it back */
    self->f.lock_fd = -1;
    Py_RETURN_NONE;
}

static PyObject *Reader_closing(Reader *self, void *unused) {
    (void)unused;
    return PyBool_FromLong(self->closing);
}

static int Reader_set_closing(Reader *self, PyObject *value, void *unused) {
    (void)unused;
    int closing = value ? PyObject_IsTrue(value) : 0;
    if (closing < 0) return -1;
    self->closing = (char)closing;
    if (closing) drop_again(self);
    return 0;
}

static PyObject *Reader_position(Reader *self, void *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(self->f.position);
}

static int Reader_set_position(Reader *self, PyObject *value, void *unused) {
    (void)unused;
    uint64_t position = value ? PyLong_AsUnsignedLongLong(value) : 0;
    if (!value) PyErr_SetString(PyExc_TypeError, "position cannot be deleted");
    if (PyErr_Occurred()) return -1;
    self->f.position = position;
    return 0;
}

static PyMethodDef Reader_methods[] = {
    {"take", (PyCFunction)(void (*)(void))Reader_take, METH_FASTCALL, Reader_take_doc},
    {"take_unfinished", (PyCFunction)Reader_take_unfinished, METH_VARARGS, Reader_take_unfinished_doc},
    {"take_named", (PyCFunction)Reader_take_named, METH_VARARGS, Reader_take_named_doc},
    {"add_ring", (PyCFunction)Reader_add_ring, METH_VARARGS, Reader_add_ring_doc},
    {"set_siblings", (PyCFunction)Reader_set_siblings, METH_O, Reader_set_siblings_doc},
    {"begin", (PyCFunction)Reader_begin, METH_NOARGS, Reader_begin_doc},
    {"next", (PyCFunction)Reader_next, METH_NOARGS, Reader_next_doc},
    {"age", (PyCFunction)Reader_age, METH_NOARGS, Reader_age_doc},
    {"has_lease", (PyCFunction)Reader_has_lease, METH_VARARGS, Reader_has_lease_doc},
    {"detach", (PyCFunction)Reader_detach, METH_NOARGS, Reader_detach_doc},
    {"trace", (PyCFunction)Reader_trace, METH_VARARGS, Reader_trace_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef Reader_members[] = {
    {"sender", MEMBER_OBJECT, offsetof(Reader, sender), 0, "the `sender` of its messages"},
    {"epoch", MEMBER_U64, offsetof(Reader, epoch), 0, "the members that the receiver knows of"},
    {"_posted", MEMBER_U64, offsetof(Reader, posted), 0, "the sleep that the sender was woken in last"},
    {"lease_count", MEMBER_U64, offsetof(Reader, leases), MEMBER_READONLY, "messages that views hold"},
    {"unacknowledged", MEMBER_U64, offsetof(Reader, unacknowledged), MEMBER_READONLY, "work queue: of those, which are not done"},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef Reader_getset[] = {
    {"closing", (getter)Reader_closing, (setter)Reader_set_closing, "whether this receiver reads no more", NULL},
    {"position", (getter)Reader_position, (setter)Reader_set_position, "the newest message that was looked at", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot Reader_slots[] = {
    {Py_tp_doc, "A receiver's end of one sender: see ring/reader.py."},
    {Py_tp_init, Reader_init},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_traverse, Reader_traverse},
    {Py_tp_dealloc, Reader_dealloc},
    {Py_tp_methods, Reader_methods},
    {Py_tp_members, Reader_members},
    {Py_tp_getset, Reader_getset},
    {0, NULL},
};

static PyType_Spec Reader_spec = {
    .name = "shmtensor.native._core.Reader",
    .basicsize = sizeof(Reader),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = Reader_slots,
};

/* --- ReaderSet --------------------------------------------------------------------------------------------------------- */

/* The readers of a receiver, for callers without its mutex. */
typedef struct {
    PyObject_VAR_HEAD
    Py_ssize_t turn; /* which one is first */
    char by_age, more;
    Reader *readers[];
} ReaderSet;

static PyObject *ReaderSet_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"readers", "by_age", NULL};
    PyObject *list;
    int by_age;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!p", names, &PyList_Type, &list, &by_age)) return NULL;
    PyObject *all = PyList_AsTuple(list); /* no collection changes it */
    if (!all) return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(all);
    int fits = count > 0 && count <= MOST_MEMBERS;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *each = PyTuple_GET_ITEM(all, i);
        fits = fits && comes_from((PyObject *)Py_TYPE(each), (destructor)Reader_dealloc) && ((Reader *)each)->ready;
    }
    ReaderSet *self = fits ? (ReaderSet *)type->tp_alloc(type, count) : NULL;
    if (self) {
        for (Py_ssize_t i = 0; i < count; i++) self->readers[i] = (Reader *)Py_NewRef(PyTuple_GET_ITEM(all, i));
        self->by_age = (char)by_age;
    } else if (!fits) PyErr_SetString(PyExc_TypeError, "no readers");
    Py_DECREF(all);
    return (PyObject *)self;
}

static int ReaderSet_traverse(ReaderSet *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    for (Py_ssize_t i = 0; i < Py_SIZE(self); i++) Py_VISIT(self->readers[i]);
    return 0;
}

static void ReaderSet_dealloc(ReaderSet *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    for (Py_ssize_t i = 0; i < Py_SIZE(self); i++) Py_XDECREF(self->readers[i]);
    type->tp_free(self);
    Py_DECREF(type);
}

/* Whether there are more than so many messages, and a receiver sleeps that shares them: the endpoint wakes it. */
static int leaves(const ReaderSet *self, uint64_t most) {
    const Reader *any = self->readers[0];
    int sleeps = 0;
    for (Py_ssize_t i = 0; i < any->nsiblings; i++) sleeps |= (int)(load(any->siblings[i]) & 1);
    uint64_t there = 0;
    for (Py_ssize_t i = 0; sleeps && i < Py_SIZE(self); i++)
        there += published(&self->readers[i]->f.table) - self->readers[i]->f.position;
    return there > most;
}

static int has_any(const ReaderSet *self) {
    for (Py_ssize_t i = 0; i < Py_SIZE(self); i++)
        if (has_news(self->readers[i])) return 1;
    return 0;
}

/* A round over all readers: in order, or the one with the oldest message first. */
typedef struct {
    Py_ssize_t next;  /* the one whose turn is next; -1: that with the oldest message, of those that were not tried yet */
    char tried[MOST_MEMBERS];
} Round;

static Reader *next_in_turn(const ReaderSet *self, Round *round) {
    Py_ssize_t count = Py_SIZE(self), at = -1;
    if (round->next < 0) {
        uint64_t oldest = UINT64_MAX;
        for (Py_ssize_t i = 0; i < count; i++) {
            if (round->tried[i]) continue;
            uint64_t age = reader_age(&self->readers[i]->f);
            if (age >= oldest) continue;
            oldest = age;
            at = i;
        }
        if (at < 0) round->next = 0; /* none has a message: each gets its turn to finish what it has put off */
    }
    if (at < 0) {
        while (self->by_age && round->tried[round->next]) round->next++;
        at = round->next++ % count;
    }
    if (self->by_age) round->tried[at] = 1;
    return self->readers[at];
}

/* `receive` from one after the other, or wait so many nanoseconds until one has something. */
static PyObject *take_in_turn(ReaderSet *self, const Sink *sink, int64_t patience) {
    Py_ssize_t count = Py_SIZE(self);
    Reader *first = self->readers[0];
    if (count == 1) return receive(first, NEXT, 0, sink, patience, 1);
    for (uint64_t until = 0;;) {
        Round round;
        round.next = self->by_age ? -1 : self->turn;
        if (self->by_age) memset(round.tried, 0, (size_t)count);
        for (Py_ssize_t step = 0; step < count; step++) {
            Reader *reader = next_in_turn(self, &round);
            PyObject *found = receive(reader, NEXT, 0, sink, 0, 1);
            if (!found) return NULL;
            if (found != Py_None) {
                self->turn = (self->turn + step + 1) % count;
                return found;
            }
            Py_DECREF(found);
            if (reader->is_due || PyList_GET_SIZE(reader->events) || (sink->hand && PyDict_GET_SIZE(sink->undelivered))) Py_RETURN_NONE;
        }
        do {
            uint64_t now = patience > 0 ? monotonic_ns() : 0;
            if (!until) until = now + (uint64_t)patience;
            if (patience <= 0 || now >= until || load(first->epoch_at) != first->epoch) Py_RETURN_NONE;
            for (int i = 0; i < 16 && !has_any(self); i++) cpu_relax();
        } while (!has_any(self));
    }
}

/* `take_in_turn`, and note whether something is left for a receiver that sleeps. */
static PyObject *take_and_note(ReaderSet *self, const Sink *sink, int64_t patience) {
    PyObject *found = take_in_turn(self, sink, patience);
    if (found && found != Py_None && leaves(self, 0)) self->more = 1;
    return found;
}

PyDoc_STRVAR(ReaderSet_recv_doc, "recv(receiver, undelivered, patience)\n--\n\n`take` of a reader in turn: None if anything is to be done "
    "that needs the mutex.");

static PyObject *ReaderSet_recv(ReaderSet *self, PyObject *const *args, Py_ssize_t count) {
    Sink sink;
    int64_t patience;
    return dict_of(args, count, &sink, &patience) ? NULL : take_and_note(self, &sink, patience);
}

PyDoc_STRVAR(ReaderSet_consume_doc, "consume(make, made, then)\n--\n\nWork queue: append what `make` makes of the next message's "
    "value to the list `made`; the message is done then, and `then` is called unless it is None: one call, so that nothing comes "
    "between. True; None if there is no message, or anything is to be done first. If `make` raises twice, the message is done, "
    "`then` is called, and the error raised; if only once, what it makes is appended and the error raised: it was somebody else's.");

static PyObject *ReaderSet_consume(ReaderSet *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 3 || self->readers[0]->f.mode != READER_COMPETING) {
        PyErr_SetString(PyExc_TypeError, "make, a list, then; of a work queue");
        return NULL;
    }
    Sink sink = {.make = args[0], .made = args[1], .then = args[2]};
    return take_and_note(self, &sink, 0);
}

/* set[receiver, undelivered, hand, patience]: `recv`, but the message goes straight to the caller, and into its hand. */
static PyObject *ReaderSet_subscript(ReaderSet *self, PyObject *key) {
    if (!PyTuple_CheckExact(key) || PyTuple_GET_SIZE(key) != 4 || !PyDict_CheckExact(PyTuple_GET_ITEM(key, 1))) {
        PyErr_SetString(PyExc_TypeError, "receiver, a dict, hand, patience");
        return NULL;
    }
    Sink sink = {.receiver = PyTuple_GET_ITEM(key, 0), .undelivered = PyTuple_GET_ITEM(key, 1), .hand = PyTuple_GET_ITEM(key, 2)};
    int64_t patience = nanoseconds_of(PyTuple_GET_ITEM(key, 3));
    if (patience < 0) return NULL;
    if (!is_mine(self->readers[0]) || PyDict_GET_SIZE(sink.undelivered)) Py_RETURN_NONE; /* what is there goes first */
    int done = sink.hand == Py_None ? 1 : finish_hand(self->readers[0], sink.hand);
    if (done < 0) return NULL;
    if (!done || leaves(self, 1)) Py_RETURN_NONE;
    return take_in_turn(self, &sink, patience);
}

static PyMethodDef ReaderSet_methods[] = {
    {"recv", (PyCFunction)(void (*)(void))ReaderSet_recv, METH_FASTCALL, ReaderSet_recv_doc},
    {"consume", (PyCFunction)(void (*)(void))ReaderSet_consume, METH_FASTCALL, ReaderSet_consume_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef ReaderSet_members[] = {
    {"more", MEMBER_BOOL, offsetof(ReaderSet, more), 0, "work queue: whether something was left while another consumer slept"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot ReaderSet_slots[] = {
    {Py_tp_doc, "The readers of a receiver, for callers without its mutex: see ring/reader.py."},
    {Py_tp_new, ReaderSet_new},
    {Py_tp_traverse, ReaderSet_traverse},
    {Py_tp_dealloc, ReaderSet_dealloc},
    {Py_tp_methods, ReaderSet_methods},
    {Py_tp_members, ReaderSet_members},
    {Py_mp_subscript, ReaderSet_subscript},
    {0, NULL},
};

static PyType_Spec ReaderSet_spec = {
    .name = "shmtensor.native._core.ReaderSet",
    .basicsize = sizeof(ReaderSet),
    .itemsize = sizeof(Reader *),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = ReaderSet_slots,
};

int add_reader(PyObject *module) {
    static int watches_forks;
    PyType_Spec *specs[] = {&Counts_spec, &Received_spec, &Lease_spec, &Reader_spec, &ReaderSet_spec};
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        PyObject *type = PyType_FromModuleAndSpec(module, specs[i], NULL);
        int failed = !type || PyModule_AddType(module, (PyTypeObject *)type);
        Py_XDECREF(type);
        if (failed) return -1;
    }
    if (!watches_forks && pthread_atfork(NULL, NULL, after_fork_in_child)) {
        PyErr_SetString(PyExc_OSError, "forks cannot be noticed");
        return -1;
    }
    watches_forks = 1;
    return 0;
}
