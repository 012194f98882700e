/* The sending end of one producer for Python: protocol/writer.h, preceded by the codec and followed by the wake-up.
 *
 * `send` does everything in one call, or nothing: then the endpoint calls `acquire` and `publish`. docs/internals/core.md. The
 * interpreter lock is the mutual exclusion: nothing in `send` runs Python code, or lets other threads run, between the first check
 * and the last store. One of the checks is whether another thread holds the endpoint's mutex.
 */

#include "notify.h"
#include "protocol/writer.h"
#include "trace.h"

#ifndef T_ULONGLONG
#include <structmember.h>
#endif

/* A ring's memory: its exported buffers. */
typedef struct {
    PyObject *ring;
    Py_buffer head, data;
} Mapped;

/* A loan, or memory that a device writes to: the slots are not used otherwise while its array lives. */
typedef struct {
    PyObject *array; /* a weak reference to it */
    allocation at;
} Lent;

typedef struct {
    PyObject_HEAD
    Codec *codec;
    PyObject *locked;    /* the method that says whether the endpoint's mutex is held */
    PyObject *encode;    /* instead of the codec's, or NULL */
    PyObject *lock_file; /* memory/locks.py */
    PyObject *rings;     /* a list, for Python */
    Py_buffer control, table;
    writer core;
    Mapped *mapped;
    Lent *lent;
    Py_ssize_t nlent, lent_room;
    Notifier notifier;
    Trace trace;
    Py_ssize_t epoch_at, capacity, member, widest, share;
    uint64_t epoch;
    char retired, takes_locks; /* `takes_locks`: messages were published that receivers may hold by a lock */
    unsigned long long sent_bytes;
} Writer;

/* What is stored with a message before it is published: see `Registration` in ring/writer.py. */
typedef struct {
    PyObject *table, *entry;
    uint64_t note, deadline;
} Registration;

static word *words_of(const Py_buffer *buffer) { return (word *)buffer->buf; }
static Py_ssize_t count_of(const Py_buffer *buffer) { return buffer->len / (Py_ssize_t)sizeof(word); }

/* --- loans ----------------------------------------------------------------------------------------------------------- */

static int is_dead(PyObject *reference) {
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *found = NULL;
    int alive = PyWeakref_GetRef(reference, &found);
    Py_XDECREF(found);
    return alive == 0;
#else
    return PyWeakref_GetObject(reference) == Py_None;
#endif
}

static void end_dead_loans(Writer *self) {
    for (Py_ssize_t i = 0; i < self->nlent;) {
        if (!is_dead(self->lent[i].array)) {
            i++;
            continue;
        }
        PyObject *reference = self->lent[i].array;
        writer_returned(&self->core, &self->lent[i].at);
        self->lent[i] = self->lent[--self->nlent];
        Py_DECREF(reference);
    }
}

static int lend(Writer *self, PyObject *reference, const allocation *at) {
    if (!PyWeakref_Check(reference)) {
        PyErr_SetString(PyExc_TypeError, "a weak reference");
        return -1;
    }
    for (Py_ssize_t i = 0; i < self->nlent; i++) /* the same slots, in an earlier loan */
        if (self->lent[i].at.ring == at->ring && self->lent[i].at.slot == at->slot) {
            Py_SETREF(self->lent[i].array, Py_NewRef(reference));
            writer_lend(&self->core, at);
            return 0;
        }
    if (self->nlent == self->lent_room) {
        Lent *more = PyMem_Realloc(self->lent, (size_t)(self->lent_room + 16) * sizeof *more);
        if (!more) {
            PyErr_NoMemory();
            return -1;
        }
        self->lent = more;
        self->lent_room += 16;
    }
    self->lent[self->nlent++] = (Lent){Py_NewRef(reference), *at};
    writer_lend(&self->core, at);
    return 0;
}

/* Before the protocol checks slots: end the loans whose array is gone, and update the lock file's descriptor. -1 with an error set. */
static int begin(Writer *self, int locks) {
    end_dead_loans(self);
    self->core.lock_fd = -1;
    if (!locks && !self->takes_locks) return 0;
    PyObject *number = PyObject_GetAttrString(self->lock_file, "fd");
    self->core.lock_fd = number ? (int)PyLong_AsLong(number) : -1;
    Py_XDECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

/* --- making one ------------------------------------------------------------------------------------------------------ */

static int Writer_traverse(Writer *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->codec);
    Py_VISIT(self->locked);
    Py_VISIT(self->encode);
    Py_VISIT(self->lock_file);
    Py_VISIT(self->rings);
    Py_VISIT(self->notifier.peers);
    for (uint32_t i = 0; i < self->core.nrings; i++) Py_VISIT(self->mapped[i].ring);
    return 0;
}

static int Writer_clear(Writer *self) {
    self->retired = 1;
    Py_CLEAR(self->encode); /* it may refer to the endpoint */
    return 0;
}

/* Each is out of reach before the code runs that its end may run. */
static void drop_rings(Writer *self) {
    while (self->nlent) Py_DECREF(self->lent[--self->nlent].array);
    while (self->core.nrings) {
        Mapped *last = &self->mapped[--self->core.nrings];
        writer_ring_free(&self->core.rings[self->core.nrings]);
        PyObject *ring = last->ring;
        Py_buffer head = last->head, data = last->data;
        PyBuffer_Release(&head);
        if (data.obj) PyBuffer_Release(&data);
        Py_DECREF(ring);
    }
}

static void Writer_dealloc(Writer *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    drop_rings(self);
    PyMem_Free(self->lent);
    PyMem_Free(self->core.rings);
    PyMem_Free(self->mapped);
    PyMem_Free(self->notifier.asleep);
    PyMem_Free(self->notifier.groups);
    trace_clear(&self->trace);
    if (self->control.obj) PyBuffer_Release(&self->control);
    if (self->table.obj) PyBuffer_Release(&self->table);
    Py_XDECREF(self->codec);
    Py_XDECREF(self->locked);
    Py_XDECREF(self->encode);
    Py_XDECREF(self->lock_file);
    Py_XDECREF(self->rings);
    Py_XDECREF(self->notifier.peers);
    Py_XDECREF(self->notifier.head);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *Writer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"codec", "locked", "encode", "lock_file", "control", "epoch_at", "table", "order", "mask", "capacity",
                            "member", "competing", "history", "checks_verdicts", "widest", "share", "bell", NULL};
    PyObject *codec, *locked, *encode, *lock_file, *control, *table, *bell;
    Py_ssize_t epoch_at, order, mask, capacity, member, widest, share;
    unsigned long long history;
    int competing, checks_verdicts;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$OOOOOnOnnnnpKpnnO!", names, &codec, &locked, &encode, &lock_file, &control,
                                     &epoch_at, &table, &order, &mask, &capacity, &member, &competing, &history,
                                     &checks_verdicts, &widest, &share, &PyBytes_Type, &bell))
        return NULL;
    PyTypeObject *codec_type = codec_type_of(type);
    if (!codec_type || !PyObject_TypeCheck(codec, codec_type)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "a Codec");
        return NULL;
    }
    Writer *self = (Writer *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->codec = (Codec *)Py_NewRef(codec);
    self->locked = Py_NewRef(locked);
    self->encode = encode == Py_None ? NULL : Py_NewRef(encode);
    self->lock_file = Py_NewRef(lock_file);
    self->notifier.head = Py_NewRef(bell);
    self->notifier.peers = PyTuple_New(0);
    self->rings = PyList_New(0);
    self->epoch = UINT64_MAX; /* until `address` sets the receivers */
    if (!self->rings || !self->notifier.peers || PyObject_GetBuffer(control, &self->control, PyBUF_SIMPLE | PyBUF_WRITABLE) ||
        PyObject_GetBuffer(table, &self->table, PyBUF_SIMPLE | PyBUF_WRITABLE)) {
        Py_DECREF(self);
        return NULL;
    }
    if (epoch_at < 0 || epoch_at >= count_of(&self->control) || order < T_MEMBERS || order > UINT32_MAX || mask < 0 || mask > UINT32_MAX || (mask & (mask + 1)) ||
        order + mask >= count_of(&self->table) || share < 1 || capacity < 1 || capacity > MOST_MEMBERS || member < 0 || member >= capacity) {
        Py_DECREF(self);
        PyErr_SetString(PyExc_ValueError, "a word lies outside its segment");
        return NULL;
    }
    self->epoch_at = epoch_at;
    self->capacity = capacity;
    self->member = member;
    self->widest = widest;
    self->share = share;
    self->core = (writer){
        .table = {words_of(&self->table), (uint64_t)mask, (uint64_t)order},
        .lock_fd = -1,
        .competing = competing,
        .history = history,
        .checks_verdicts = checks_verdicts,
    };
    return (PyObject *)self;
}

int number_of(PyObject *object, const char *name, uint64_t *value) {
    PyObject *found = PyObject_GetAttrString(object, name);
    if (!found) return -1;
    *value = PyLong_AsUnsignedLongLong(found);
    Py_DECREF(found);
    return PyErr_Occurred() ? -1 : 0;
}

PyDoc_STRVAR(add_ring_doc, "add_ring(ring)\n--\n\nUse that ring for messages as well: ring/ring.py.");

static PyObject *Writer_add_ring(Writer *self, PyObject *object) {
    ring shared = {.index = self->core.nrings};
    Mapped mapped = {.ring = object};
    uint64_t index;
    PyObject *head = NULL, *data = NULL;
    if (self->core.nrings == MOST_RINGS || number_of(object, "index", &index) || number_of(object, "slots", &shared.slots) ||
        number_of(object, "slot_bytes", &shared.slot_bytes) || number_of(object, "state", &shared.state) ||
        number_of(object, "row", &shared.row) || !(head = PyObject_GetAttrString(object, "words")) ||
        !(data = PyObject_GetAttrString(object, "buffer")))
        goto failed;
    if (PyObject_GetBuffer(head, &mapped.head, PyBUF_SIMPLE | PyBUF_WRITABLE)) goto failed;
    if (PyObject_CheckBuffer(data) && PyObject_GetBuffer(data, &mapped.data, PyBUF_SIMPLE | PyBUF_WRITABLE)) goto failed;
    uint64_t words = (uint64_t)count_of(&mapped.head), most = UINT32_MAX;
    uint64_t states = self->core.competing ? shared.slots * STATE_WORDS : (uint64_t)self->capacity * shared.row;
    if (index != shared.index || shared.slots < 1 || shared.slots > most || shared.row > most || shared.slot_bytes < 1 || shared.slot_bytes > MAX_BYTES ||
        shared.state > words || states > words - shared.state || (!self->core.competing && shared.row < shared.slots) ||
        HEADER_WORDS + shared.slots * RECORD_WORDS > shared.state ||
        (mapped.data.obj && shared.slots > (uint64_t)mapped.data.len / shared.slot_bytes)) {
        PyErr_SetString(PyExc_ValueError, "a slot lies outside its segment, or rings come out of turn");
        goto failed;
    }
    shared.words = words_of(&mapped.head);
    shared.data = mapped.data.buf;
    writer_ring made, *rings;
    Mapped *all = PyMem_Realloc(self->mapped, (self->core.nrings + 1) * sizeof *all);
    if (all) self->mapped = all;
    rings = PyMem_Realloc(self->core.rings, (self->core.nrings + 1) * sizeof *rings);
    if (rings) self->core.rings = rings;
    if (!all || !rings || writer_ring_init(&made, &shared)) {
        PyErr_NoMemory();
        goto failed;
    }
    if (PyList_Append(self->rings, object)) {
        writer_ring_free(&made);
        goto failed;
    }
    Py_INCREF(object);
    self->mapped[self->core.nrings] = mapped;
    self->core.rings[self->core.nrings++] = made;
    Py_DECREF(head);
    Py_DECREF(data);
    Py_RETURN_NONE;
failed:
    if (mapped.head.obj) PyBuffer_Release(&mapped.head);
    if (mapped.data.obj) PyBuffer_Release(&mapped.data);
    Py_XDECREF(head);
    Py_XDECREF(data);
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "no more rings");
    return NULL;
}

/* --- members --------------------------------------------------------------------------------------------------------- */

static int member_of(Writer *self, PyObject *number, uint32_t *index) {
    Py_ssize_t found = PyLong_AsSsize_t(number);
    if (found >= 0 && found < self->capacity) {
        *index = (uint32_t)found;
        return 0;
    }
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "no member of a channel");
    return -1;
}

static int members_of(Writer *self, PyObject *sequence, members *all) {
    PyObject *items = PySequence_Fast(sequence, "members");
    int failed = !items;
    *all = (members){{0}};
    for (Py_ssize_t i = 0; !failed && i < PySequence_Fast_GET_SIZE(items); i++) {
        uint32_t index;
        failed = member_of(self, PySequence_Fast_GET_ITEM(items, i), &index);
        if (!failed) member_add(all, index);
    }
    Py_XDECREF(items);
    return failed ? -1 : 0;
}

PyDoc_STRVAR(address_doc, "address(recipients, leaving, lockable, listeners, asleep, groups, epoch)\n--\n\n"
    "Set the receivers of the messages that are published from now on: ring/writer.py.");

static PyObject *Writer_address(Writer *self, PyObject *args) {
    PyObject *recipients, *leaving, *listeners, *asleep, *of_groups;
    members all, going;
    int lockable;
    unsigned long long epoch;
    if (!PyArg_ParseTuple(args, "OOpO!O!O!K", &recipients, &leaving, &lockable, &PyTuple_Type, &listeners, &PyTuple_Type, &asleep,
                          &PyTuple_Type, &of_groups, &epoch) ||
        members_of(self, recipients, &all) || members_of(self, leaving, &going))
        return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(listeners);
    uint64_t *groups = PyMem_Malloc(((size_t)count + 1) * sizeof *groups);
    uint32_t *words = groups ? PyMem_Malloc(((size_t)count + 1) * sizeof *words) : NULL;
    if (!words) {
        PyMem_Free(groups);
        return PyErr_NoMemory();
    }
    int inside = PyTuple_GET_SIZE(asleep) == count && PyTuple_GET_SIZE(of_groups) == count;
    for (Py_ssize_t i = 0; inside && i < count; i++) {
        Py_ssize_t at = PyLong_AsSsize_t(PyTuple_GET_ITEM(asleep, i));
        groups[i] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(of_groups, i));
        inside = at >= 0 && at < count_of(&self->control) && !PyErr_Occurred();
        words[i] = (uint32_t)at;
    }
    if (!inside) {
        PyMem_Free(words);
        PyMem_Free(groups);
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a word lies outside its segment");
        return NULL;
    }
    PyMem_Free(self->notifier.asleep);
    PyMem_Free(self->notifier.groups);
    self->notifier.asleep = words;
    self->notifier.groups = groups;
    self->core.recipients = all;
    self->core.leaving = going;
    self->core.lockable = lockable;
    self->takes_locks |= (char)lockable;
    self->epoch = epoch;
    Py_SETREF(self->notifier.peers, Py_NewRef(listeners));
    Py_RETURN_NONE;
}

PyDoc_STRVAR(retire_doc, "retire()\n--\n\nLeave every message to the endpoint from now on: it is closed.");

static PyObject *Writer_retire(Writer *self, PyObject *unused) {
    (void)unused;
    self->retired = 1;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(release_doc, "release()\n--\n\nDrop the rings: the sender has left.");

static PyObject *Writer_release(Writer *self, PyObject *unused) {
    (void)unused;
    self->retired = 1;
    if (PyList_SetSlice(self->rings, 0, PyList_GET_SIZE(self->rings), NULL)) return NULL;
    drop_rings(self);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(forget_doc, "forget(member)\n--\n\nIt has left or died: no message waits for it any more.");

static PyObject *Writer_forget(Writer *self, PyObject *number) {
    uint32_t member;
    if (member_of(self, number, &member)) return NULL;
    writer_forget(&self->core, member);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(welcome_doc, "welcome(member, start)\n--\n\nThe kept messages, from `start` on, wait for it as well.");

static PyObject *Writer_welcome(Writer *self, PyObject *args) {
    PyObject *number;
    uint32_t member;
    unsigned long long start;
    if (!PyArg_ParseTuple(args, "OK", &number, &start) || member_of(self, number, &member)) return NULL;
    writer_welcome(&self->core, member, start);
    Py_RETURN_NONE;
}

/* --- what a tracer sees ------------------------------------------------------------------------------------------------ */

PyDoc_STRVAR(trace_doc, "trace(log)\n--\n\nWrite events to that `EventLog` from now on; None: none.");

static PyObject *Writer_trace(Writer *self, PyObject *log) {
    if (trace_set(&self->trace, log)) return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(seek_doc, "seek()\n--\n\nThe endpoint begins to look for slots for a message; for the trace.");

static PyObject *Writer_seek(Writer *self, PyObject *unused) {
    (void)unused;
    if (is_traced(&self->trace) && !self->trace.goes_on) self->trace.begun = monotonic_ns();
    self->trace.goes_on = 0;
    Py_RETURN_NONE;
}

/* Note, for the trace, the end of a search for slots. */
static void note_search(Trace *trace, int has_found) {
    if (!trace->begun) trace->begun = monotonic_ns(); /* of a loan */
    if (!has_found) trace->waited = 1;
    else if (trace->waited) trace->found = monotonic_ns();
}

/* Note, for the trace, that a message was published: its record has the time. */
static void note_sent(Writer *self, const allocation *at, uint64_t seq, uint64_t nbytes) {
    Trace *trace = &self->trace;
    uint64_t end = load_relaxed(record_of(&self->core.rings[at->ring].shared, at->slot) + 1);
    uint64_t begun = trace->begun ? trace->begun : end;
    add_event(&trace->log, EVENT_SEND, seq, trace->log.member, begun, trace->found ? trace->found : begun, end, nbytes);
    trace->begun = trace->found = 0;
    trace->waited = 0;
}

/* --- slots ----------------------------------------------------------------------------------------------------------- */

static int place_of(Writer *self, PyObject *const *args, allocation *at) {
    Py_ssize_t index = PyLong_AsSsize_t(args[0]), slot = PyLong_AsSsize_t(args[1]);
    if (!PyErr_Occurred() && index >= 0 && index < (Py_ssize_t)self->core.nrings && slot >= 0 &&
        (uint64_t)slot < self->core.rings[index].shared.slots) {
        writer_ring *r = &self->core.rings[index];
        *at = (allocation){(uint32_t)index, (uint32_t)slot, r->messages[slot].span};
        if (r->first[slot] == (uint32_t)slot) return 0;
    }
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "no slot that was acquired");
    return -1;
}

/* nbytes; and which rings may be used. */
static int room_wanted(Writer *self, PyObject *const *args, Py_ssize_t count, uint64_t *nbytes, slot_sizes *sizes) {
    *nbytes = count ? PyLong_AsUnsignedLongLong(args[0]) : 0;
    *sizes = ANY_SIZE;
    if (count == 3 && !PyErr_Occurred()) sizes->least = PyLong_AsUnsignedLongLong(args[1]);
    if (count == 3 && !PyErr_Occurred()) sizes->most = PyLong_AsUnsignedLongLong(args[2]);
    if (!PyErr_Occurred() && count != 1 && count != 3) PyErr_SetString(PyExc_TypeError, "nbytes; or nbytes, least, most");
    return PyErr_Occurred() || begin(self, 0) ? -1 : 0;
}

PyDoc_STRVAR(acquire_doc, "acquire(nbytes, least=0, most=MAX_SLOT_BYTES)\n--\n\n(ring, slot) with room for a message, or None.");

static PyObject *Writer_acquire(Writer *self, PyObject *const *args, Py_ssize_t count) {
    uint64_t nbytes;
    slot_sizes sizes;
    allocation at;
    if (room_wanted(self, args, count, &nbytes, &sizes)) return NULL;
    int has_found = writer_acquire(&self->core, nbytes, sizes, &at);
    if (is_traced(&self->trace)) note_search(&self->trace, has_found);
    if (!has_found) Py_RETURN_NONE;
    return Py_BuildValue("(OI)", self->mapped[at.ring].ring, (unsigned)at.slot);
}

PyDoc_STRVAR(has_room_doc, "has_room(nbytes, least=0, most=MAX_SLOT_BYTES)\n--\n\nWhether `acquire` would find slots. Takes nothing back.");

static PyObject *Writer_has_room(Writer *self, PyObject *const *args, Py_ssize_t count) {
    uint64_t nbytes;
    slot_sizes sizes;
    if (room_wanted(self, args, count, &nbytes, &sizes)) return NULL;
    return PyBool_FromLong(writer_has_room(&self->core, nbytes, sizes));
}

PyDoc_STRVAR(lend_doc, "lend(ring, slot, array)\n--\n\nKeep acquired slots while the array of this weak reference lives.");

static PyObject *Writer_lend(Writer *self, PyObject *const *args, Py_ssize_t count) {
    allocation at;
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "ring, slot, array");
        return NULL;
    }
    if (place_of(self, args, &at) || lend(self, args[2], &at)) return NULL;
    Py_RETURN_NONE;
}

/* Store the words that go with a message, before it is published. */
static int enter(Writer *self, const allocation *at, const Registration *registration) {
    const ring *r = &self->core.rings[at->ring].shared;
    if (!self->core.competing) {
        store(lease_word(r, (uint64_t)self->member, at->slot), registration->note); /* the sender's own row: no receiver's */
        CRASH_POINT("publish.noted");
        return 0;
    }
    uint64_t seq = published(&self->core.table) + 1;
    word *state = state_of(r, at->slot);
    if (registration->table != Py_None) {
        /* slots of the entry's class, and a new key of a dict: these stores run no Python code */
        PyObject *number = PyLong_FromUnsignedLongLong(seq), *index = PyLong_FromSsize_t(state - r->words);
        PyObject *words = PyObject_GetAttrString(self->mapped[at->ring].ring, "words");
        int failed = !number || !index || !words || PyObject_SetAttrString(registration->entry, "words", words) ||
                     PyObject_SetAttrString(registration->entry, "at", index) || PyObject_SetAttrString(registration->entry, "seq", number) ||
                     PyDict_SetItem(registration->table, number, registration->entry);
        Py_XDECREF(number);
        Py_XDECREF(index);
        Py_XDECREF(words);
        if (failed) {
            PyObject *error, *value, *traceback, *none = PyLong_FromLong(0);
            PyErr_Fetch(&error, &value, &traceback);
            if (!none || PyObject_SetAttrString(registration->entry, "seq", none)) PyErr_Clear();
            Py_XDECREF(none);
            PyErr_Restore(error, value, traceback);
            return -1;
        }
    }
    store(state + DEADLINE, registration->deadline);
    store(state + NOTE, seq << 8 | registration->note);
    CRASH_POINT("publish.noted");
    return 0;
}

/* note, deadline, table, entry; or nothing. */
static int registration_of(PyObject *const *args, Py_ssize_t count, Registration *registration) {
    if (!count) return 0;
    if (count != 4 || (args[2] != Py_None && !PyDict_CheckExact(args[2]))) {
        PyErr_SetString(PyExc_TypeError, "note, deadline, table, entry");
        return -1;
    }
    *registration = (Registration){args[2], args[3], PyLong_AsUnsignedLongLong(args[0]), PyLong_AsUnsignedLongLong(args[1])};
    return PyErr_Occurred() ? -1 : 0;
}

PyDoc_STRVAR(publish_doc, "publish(ring, slot, description, nbytes, spilled, array, *registration)\n--\n\n"
    "Its sequence number. `array`: a weak reference to what a loan's owner may still write to, or None.");

static PyObject *Writer_publish(Writer *self, PyObject *const *args, Py_ssize_t count) {
    allocation at;
    Registration registration = {.table = NULL};
    if (count < 6 || !PyBytes_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "ring, slot, description, nbytes, spilled, array, registration");
        return NULL;
    }
    uint64_t nbytes = PyLong_AsUnsignedLongLong(args[3]);
    int spilled = PyErr_Occurred() ? -1 : PyObject_IsTrue(args[4]);
    Py_ssize_t length = PyBytes_GET_SIZE(args[2]);
    if (spilled < 0 || place_of(self, args, &at) || registration_of(args + 6, count - 6, &registration)) return NULL;
    if (length > MAX_DESCRIPTION || spilled != (length > INLINE_BYTES)) {
        PyErr_SetString(PyExc_ValueError, "a description that is spilled if, and only if, it does not fit the record");
        return NULL;
    }
    PyObject *number = PyLong_FromUnsignedLongLong(published(&self->core.table) + 1); /* before: what is sent is not an error */
    if (!number) return NULL;
    end_dead_loans(self); /* an earlier loan of these slots */
    if ((args[5] != Py_None && lend(self, args[5], &at)) || (registration.table && enter(self, &at, &registration))) {
        Py_DECREF(number);
        return NULL;
    }
    int lent = self->core.rings[at.ring].messages[at.slot].lent; /* it stays lent until its array dies */
    uint64_t seq = writer_publish(&self->core, &at, nbytes, spilled ? NULL : PyBytes_AS_STRING(args[2]), (uint32_t)length, lent);
    self->sent_bytes += nbytes;
    if (is_traced(&self->trace)) note_sent(self, &at, seq, nbytes);
    return number;
}

/* --- a whole message ------------------------------------------------------------------------------------------------- */

/* Whether the pool would add no ring for such a message: ring/pool.py, `make_room`. */
static int fits_some(const Writer *self, uint64_t total) {
    for (uint32_t i = 0; i < self->core.nrings; i++) {
        const ring *r = &self->core.rings[i].shared;
        uint64_t share = self->core.history ? 1 : r->slots / (uint64_t)self->share;
        if (total <= r->slot_bytes * (share ? share : 1)) return 1;
    }
    return 0;
}

/* The rings that a message may use; 0: the pool has to choose. */
static int choose(const Writer *self, uint64_t total, slot_sizes *sizes) {
    *sizes = ANY_SIZE;
    if (self->widest <= 0) return !self->widest && fits_some(self, total);
    sizes->least = total;
    sizes->most = (uint64_t)self->widest * (total < PAYLOAD_ALIGNMENT ? PAYLOAD_ALIGNMENT : total);
    return 1;
}

/* Find slots now, or spin for them for so many nanoseconds, in which no other thread runs. */
static int acquire_soon(Writer *self, uint64_t total, int64_t patience, allocation *at) {
    slot_sizes sizes;
    if (!choose(self, total, &sizes) || begin(self, 0)) return 0;
    for (uint64_t until = 0;;) {
        int has_found = writer_acquire(&self->core, total, sizes, at);
        if (is_traced(&self->trace)) note_search(&self->trace, has_found);
        if (has_found) return 1;
        do {
            if (patience <= 0) return 0;
            uint64_t now = monotonic_ns();
            if (!until) until = now + (uint64_t)patience;
            if (now >= until) return 0;
            for (int i = 0; i < 16; i++) cpu_relax();
        } while (!writer_may_have_room(&self->core));
    }
}

static int is_locked(PyObject *method) {
    PyObject *answer = PyObject_CallNoArgs(method);
    int locked = answer ? answer == Py_True : -1;
    Py_XDECREF(answer);
    return locked;
}

PyDoc_STRVAR(send_doc, "send(value, meta, patience, *registration)\n--\n\n"
    "Encode, acquire, copy, publish and wake. Returns the sequence number, negated if the endpoint has to wake a receiver; "
    "or the result of `encode`, with nothing sent, if the endpoint has to do the rest. `patience`: nanoseconds.");

static PyObject *Writer_send(Writer *self, PyObject *const *args, Py_ssize_t count) {
    Registration registration = {.table = NULL};
    if (count < 3) {
        PyErr_SetString(PyExc_TypeError, "value, meta, patience, registration");
        return NULL;
    }
    int64_t patience = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred() || registration_of(args + 3, count - 3, &registration)) return NULL;
    PyObject *made = self->encode ? PyObject_CallFunctionObjArgs(self->encode, args[0], args[1], NULL)
                                  : encode_value(self->codec, args[0], args[1]);
    if (!made || Py_TYPE(made) != self->codec->encoded_type) return made;
    Encoded *out = (Encoded *)made;
    CRASH_POINT("send.described");
    if (self->retired || !can_copy_at_once(out)) return made;
    allocation at;
    int moved = has_moved(out), locked = moved ? 1 : is_locked(self->locked), one = self->core.competing;
    /* from here on no other code runs */
    PyObject *number = locked ? NULL : PyLong_FromUnsignedLongLong(published(&self->core.table) + 1); /* as in `publish` */
    if (is_traced(&self->trace) && number) {
        self->trace.begun = monotonic_ns();
        self->trace.goes_on = 1;
    }
    if (number && !self->retired && load(words_of(&self->control) + self->epoch_at) == self->epoch &&
        acquire_soon(self, (uint64_t)out->total, patience, &at) && !(registration.table && enter(self, &at, &registration))) {
        CRASH_POINT("send.acquired");
        copy_small(out, (char *)writer_payload(&self->core, &at));
        CRASH_POINT("send.copied");
        uint32_t length = (uint32_t)PyBytes_GET_SIZE(out->description);
        uint64_t seq = writer_publish(&self->core, &at, (uint64_t)out->nbytes, PyBytes_AS_STRING(out->description), length, 0);
        self->sent_bytes += (unsigned long long)out->nbytes;
        if (is_traced(&self->trace)) {
            note_sent(self, &at, seq, (uint64_t)out->nbytes);
            self->trace.goes_on = 0;
        }
        const word *control = words_of(&self->control);
        int asleep = 0;
        atomic_signal_fence(memory_order_seq_cst); /* for the compiler; the processor's fence is the sleeper's barrier */
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->notifier.peers); i++)
            asleep |= (int)(load(control + self->notifier.asleep[i]) & 1);
        const word *record = record_of(&self->core.rings[at.ring].shared, at.slot);
        if (asleep && notify_sleepers(&self->notifier, control, one, (const void *)record, RECORD_WORDS * sizeof *record))
            asleep = 0;
        CRASH_POINT("publish.notified");
        Py_DECREF(made);
        if (!asleep) return number;
        PyObject *negated = PyNumber_Negative(number);
        if (!negated) PyErr_Clear(); /* no memory: it is sent, and the sleeper finds it when it looks */
        else Py_SETREF(number, negated);
        return number;
    }
    Py_XDECREF(number);
    if (PyErr_Occurred()) Py_CLEAR(made);
    return made;
}

/* --- queries --------------------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(messages_doc, "messages()\n--\n\n[(ring, slot, seq, span)] of what is published and not known to be given back.");

static PyObject *Writer_messages(Writer *self, PyObject *unused) {
    (void)unused;
    PyObject *found = PyList_New(0);
    for (uint32_t i = 0; found && i < self->core.nrings; i++) {
        writer_ring *r = &self->core.rings[i];
        for (uint64_t slot = 0; found && slot < r->shared.slots; slot++) {
            if (r->first[slot] != slot || !r->messages[slot].seq) continue;
            PyObject *item = Py_BuildValue("(OKKK)", self->mapped[i].ring, (unsigned long long)slot,
                                           (unsigned long long)r->messages[slot].seq, (unsigned long long)r->messages[slot].span);
            if (!item || PyList_Append(found, item)) Py_CLEAR(found);
            Py_XDECREF(item);
        }
    }
    return found;
}

PyDoc_STRVAR(judge_doc, "judge(ring, slot)\n--\n\nThe verdict on the message there was read: its slot may be used again.");

static PyObject *Writer_judge(Writer *self, PyObject *const *args, Py_ssize_t count) {
    allocation at;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "ring, slot");
        return NULL;
    }
    if (place_of(self, args, &at)) return NULL;
    writer_judge(&self->core, at.ring, at.slot);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(reclaim_doc, "reclaim()\n--\n\nWork queue: free what a consumer had done when it died. Whether there was any.");

static PyObject *Writer_reclaim(Writer *self, PyObject *unused) {
    (void)unused;
    return begin(self, 1) ? NULL : PyBool_FromLong(writer_reclaim(&self->core));
}

PyDoc_STRVAR(is_settled_doc, "is_settled(local)\n--\n\nWhether everything sent is taken (fan-out: but for these members) or done.");

static PyObject *Writer_is_settled(Writer *self, PyObject *sequence) {
    members local;
    if (members_of(self, sequence, &local)) return NULL;
    return PyBool_FromLong(writer_is_settled(&self->core, &local));
}

PyDoc_STRVAR(free_slots_doc, "free_slots(ring)\n--\n\nHow many slots of that ring can be had now.");

static PyObject *Writer_free_slots(Writer *self, PyObject *number) {
    Py_ssize_t index = PyLong_AsSsize_t(number);
    if (index < 0 || index >= (Py_ssize_t)self->core.nrings) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "no such ring");
        return NULL;
    }
    return begin(self, 0) ? NULL : PyLong_FromUnsignedLongLong(writer_free_slots(&self->core, (uint32_t)index));
}

PyDoc_STRVAR(oldest_doc, "oldest()\n--\n\nThe message in the newest ring's slot that is looked at next; 0: none, or one under a lock.");

static PyObject *Writer_oldest(Writer *self, PyObject *unused) {
    (void)unused;
    if (!self->core.nrings) return PyLong_FromLong(0);
    const writer_ring *r = &self->core.rings[self->core.nrings - 1];
    uint32_t first = r->first[r->cursor];
    int none = first == FREE_SLOT || self->core.lockable;
    return PyLong_FromUnsignedLongLong(none ? 0 : r->messages[first].seq);
}

static PyObject *Writer_busy(Writer *self, void *unused) {
    (void)unused;
    end_dead_loans(self);
    return PyLong_FromUnsignedLongLong(writer_in_flight(&self->core));
}

static int Writer_set_history(Writer *self, PyObject *value, void *unused) {
    (void)unused;
    uint64_t history = value ? PyLong_AsUnsignedLongLong(value) : 0;
    if (PyErr_Occurred()) return -1;
    self->core.history = history;
    return 0;
}

static PyObject *Writer_history(Writer *self, void *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(self->core.history);
}

static PyMethodDef Writer_methods[] = {
    {"send", (PyCFunction)(void (*)(void))Writer_send, METH_FASTCALL, send_doc},
    {"acquire", (PyCFunction)(void (*)(void))Writer_acquire, METH_FASTCALL, acquire_doc},
    {"has_room", (PyCFunction)(void (*)(void))Writer_has_room, METH_FASTCALL, has_room_doc},
    {"lend", (PyCFunction)(void (*)(void))Writer_lend, METH_FASTCALL, lend_doc},
    {"publish", (PyCFunction)(void (*)(void))Writer_publish, METH_FASTCALL, publish_doc},
    {"add_ring", (PyCFunction)Writer_add_ring, METH_O, add_ring_doc},
    {"address", (PyCFunction)Writer_address, METH_VARARGS, address_doc},
    {"retire", (PyCFunction)Writer_retire, METH_NOARGS, retire_doc},
    {"release", (PyCFunction)Writer_release, METH_NOARGS, release_doc},
    {"forget", (PyCFunction)Writer_forget, METH_O, forget_doc},
    {"welcome", (PyCFunction)Writer_welcome, METH_VARARGS, welcome_doc},
    {"trace", (PyCFunction)Writer_trace, METH_O, trace_doc},
    {"seek", (PyCFunction)Writer_seek, METH_NOARGS, seek_doc},
    {"messages", (PyCFunction)Writer_messages, METH_NOARGS, messages_doc},
    {"judge", (PyCFunction)(void (*)(void))Writer_judge, METH_FASTCALL, judge_doc},
    {"reclaim", (PyCFunction)Writer_reclaim, METH_NOARGS, reclaim_doc},
    {"is_settled", (PyCFunction)Writer_is_settled, METH_O, is_settled_doc},
    {"free_slots", (PyCFunction)Writer_free_slots, METH_O, free_slots_doc},
    {"oldest", (PyCFunction)Writer_oldest, METH_NOARGS, oldest_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef Writer_getset[] = {
    {"busy", (getter)Writer_busy, NULL, "slots whose messages are still needed", NULL},
    {"history", (getter)Writer_history, (setter)Writer_set_history, "how many of the newest messages are kept", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef Writer_members[] = {
    {"rings", MEMBER_OBJECT, offsetof(Writer, rings), MEMBER_READONLY, "what `add_ring` was given"},
    {"sent_bytes", T_ULONGLONG, offsetof(Writer, sent_bytes), READONLY, "payload bytes of what was published"},
    {"notified", T_ULONGLONG, offsetof(Writer, notifier.count), READONLY, "sleepers that `send` has woken"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot Writer_slots[] = {
    {Py_tp_doc, "The sending end of one producer: ring/writer.py has the same in Python."},
    {Py_tp_new, Writer_new},
    {Py_tp_traverse, Writer_traverse},
    {Py_tp_clear, Writer_clear},
    {Py_tp_dealloc, Writer_dealloc},
    {Py_tp_methods, Writer_methods},
    {Py_tp_members, Writer_members},
    {Py_tp_getset, Writer_getset},
    {0, NULL},
};

PyType_Spec Writer_spec = {
    .name = "shmtensor.native._core.Writer",
    .basicsize = sizeof(Writer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = Writer_slots,
};
