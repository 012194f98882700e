/* Included once, by _hot.c, after inlet.h and outbox.h. */

/* --- Inlet: what it can be asked for ------------------------------------------------------------------------------ */

/* `take`, of something that is there now or within `patience`, a number of nanoseconds. For a caller without the mutex
 * (`alone`): None if another thread holds it. The lease goes into `lease`, if there is one, and is the caller's. */
static PyObject *await(Inlet *self, PyObject *patience, PyObject *receiver, PyObject *calls, int alone, Grip **lease) {
    long long nanos = PyLong_AsLongLong(patience);
    if (nanos == -1 && PyErr_Occurred()) return NULL;
    Grip *grip = new_grip();
    if (!grip) return NULL;
    PyObject *made = NULL;
    int locked = alone ? is_locked(self->locked) : 0;
    if (locked > 0 || !self->feed) made = Py_NewRef(Py_None);
    else if (!locked && !spin(self, nanos)) made = take(self, grip, receiver, NULL, calls, alone);
    if (lease) *lease = grip;
    else Py_DECREF(grip);
    return made;
}

PyDoc_STRVAR(Inlet_recv_doc,
             "recv(receiver, patience)\n--\n\nThe next message, there now or within so many nanoseconds, or None. For a "
             "caller without the mutex.");

static PyObject *Inlet_recv(Inlet *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs == 2) return await(self, args[1], args[0], NULL, 1, NULL);
    PyErr_SetString(PyExc_TypeError, "receiver, patience");
    return NULL;
}

PyDoc_STRVAR(Inlet_poll_doc, "poll(receiver, patience)\n--\n\nThe same, for a caller that holds the mutex and counts.");

static PyObject *Inlet_poll(Inlet *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs == 2) return await(self, args[1], args[0], NULL, 0, NULL);
    PyErr_SetString(PyExc_TypeError, "receiver, patience");
    return NULL;
}

PyDoc_STRVAR(Inlet_pop_doc,
             "pop(loads, missing)\n--\n\nWhat `loads` makes of the next stream, which is done then, whatever `loads` "
             "raises; `missing`, and nothing done, if that is not what comes next. For a caller without the mutex.");

static PyObject *Inlet_pop(Inlet *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2 || !self->locks) {
        PyErr_SetString(PyExc_TypeError, "loads, missing; of a work queue");
        return NULL;
    }
    Grip *grip = new_grip();
    if (!grip) return NULL;
    PyObject *object = NULL;
    int locked = is_locked(self->locked);
    if (locked > 0) object = Py_NewRef(args[1]);
    else if (!locked) object = take(self, grip, NULL, args[0], NULL, 1);
    if (object == Py_None && !grip->feed) {
        Py_DECREF(object);
        object = Py_NewRef(args[1]);
    }
    Py_DECREF(grip);
    return object;
}

PyDoc_STRVAR(Inlet_answer_doc,
             "answer(calls, patience)\n--\n\nThe call that the next reply is for, there now or within so many nanoseconds: taken "
             "out of `calls`, with its `value` set. False for a reply to none of them. None, and nothing done, if this is "
             "not what comes next. For a caller without the mutex.");

static PyObject *Inlet_answer(Inlet *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs == 2 && PyDict_CheckExact(args[0]) && !self->locks) return await(self, args[1], NULL, args[0], 1, NULL);
    PyErr_SetString(PyExc_TypeError, "calls, patience; of a fan-out");
    return NULL;
}

PyDoc_STRVAR(Inlet_ask_doc,
             "ask(outbox, value, calls, call, patience)\n--\n\nWhat `outbox.ask` returns; if that is done and the next reply is "
             "there within so many nanoseconds, what `answer` returns: `call` itself says that it is done, then.");

static PyObject *Inlet_ask(Inlet *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 5 || Py_TYPE(args[0]) != &OutboxType || self->locks) {
        PyErr_SetString(PyExc_TypeError, "outbox, value, calls, call, patience; of a fan-out");
        return NULL;
    }
    PyObject *call = args[3], *asked = Outbox_ask((Outbox *)args[0], args + 1, 3);
    if (!asked || asked == Py_None || PyLong_AsLongLong(asked) < 0) return asked;
    PyObject *ended = await(self, args[4], NULL, args[2], 1, NULL);
    if (ended == Py_None) {
        Py_DECREF(ended);
        return asked;
    }
    Py_DECREF(asked);
    if (ended == call && !know_call(call)) set_field(call, call_class.at[C_DONE], Py_True);
    return ended;
}

PyDoc_STRVAR(Inlet_serve_doc, "serve(request, source)\n--\n\nWhat `request` is to make, and whose requests come by here.");

static PyObject *Inlet_serve(Inlet *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2 || !self->locks) {
        PyErr_SetString(PyExc_TypeError, "request, source; of a work queue");
        return NULL;
    }
    Py_ssize_t replies_at = field_of(Py_TYPE(args[1]), "replies");
    if (replies_at < 0 || class_get(&self->request, args[0], request_slots)) return NULL;
    Py_XSETREF(self->source, Py_NewRef(args[1]));
    self->replies_at = replies_at;
    Py_RETURN_NONE;
}

/* Whether a request that was just taken may be started without a second look: rpc/server.py, `_accept`. */
static int is_plain(PyObject *feed, const Word *state, Word seq) {
    Word deadline = load(state + DEADLINE);
    if (load(state + NOTE) != seq << 8 || (deadline && (Word)nanoseconds() >= deadline)) return 0;
    PyObject *gone = PyObject_GetAttr(feed, s_gone);
    Py_XDECREF(gone);
    return gone ? gone == Py_False : -1;
}

PyDoc_STRVAR(Inlet_request_doc,
             "request(receiver, patience, server, open)\n--\n\n`recv`, and what it returns as a request of the server, whose "
             "message is put into `open`; the message itself, if somebody has to look whether it may be started.");

static PyObject *Inlet_request(Inlet *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 4 || !PyDict_CheckExact(args[3])) {
        PyErr_SetString(PyExc_TypeError, "receiver, patience, server, open");
        return NULL;
    }
    /* when it is time to look around, whoever calls asks `recv` next, which says so as well */
    if (!self->source || nanoseconds() >= self->look_due) Py_RETURN_NONE;
    Grip *grip = NULL;
    PyObject *message = await(self, args[1], args[0], NULL, 1, &grip);
    if (!grip) return NULL;
    PyObject *feed = grip->feed, *source = self->source;
    int plain = message && feed && source ? is_plain(feed, grip->at - RELEASED, grip->seq) : 0;
    if (plain > 0) {
        Class class = self->request;
        PyObject *values[R_ALL] = {
            [R_SERVER] = Py_NewRef(args[2]), [R_MESSAGE] = Py_NewRef(message), [R_SOURCE] = Py_NewRef(source),
            [R_WORDS] = Py_NewRef(grip->words), [R_AT] = PyLong_FromSsize_t(grip->word),
            [R_SEQ] = PyLong_FromUnsignedLongLong(grip->seq),
        };
        Py_INCREF(class.type);
        PyObject *request = class_make(&class, values, R_ALL), *number = request ? PyLong_FromVoidPtr(request) : NULL;
        Py_DECREF(class.type);
        if (!number || PyDict_SetItem(args[3], number, message)) Py_CLEAR(request);
        Py_XDECREF(number);
        Py_SETREF(message, request);
    } else if (plain) Py_CLEAR(message);
    Py_DECREF(grip);
    return message;
}

PyDoc_STRVAR(Inlet_respond_doc,
             "respond(request, value, open)\n--\n\n`answer` of the outbox of its source's replies, to a request that came by here and that "
             "somebody waits for; then it is done, and its message is taken out of `open` and emptied. None, and nothing "
             "done, if anything about it is unusual.");

static PyObject *Inlet_respond(Inlet *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 3 || !PyDict_CheckExact(args[2])) {
        PyErr_SetString(PyExc_TypeError, "request, value, open");
        return NULL;
    }
    PyObject *request = args[0], *open = args[2];
    if (!self->feed || (PyObject *)Py_TYPE(request) != self->request.type) Py_RETURN_NONE;
    PyObject *message = *field(request, self->request.at[R_MESSAGE]);
    if (!message || (PyObject *)Py_TYPE(message) != self->message.type) Py_RETURN_NONE;
    PyObject *receiver = *field(message, self->message.at[M_RECEIVER]), *lease = *field(message, self->message.at[M_LEASE]);
    if (!receiver || receiver == Py_None || !lease || Py_TYPE(lease) != &GripType) Py_RETURN_NONE;
    Grip *grip = (Grip *)lease;
    if (grip->feed != self->feed || !grip->locks || load(grip->at - RELEASED + NOTE) != grip->seq << 8) Py_RETURN_NONE;
    PyObject *gone = PyObject_GetAttr(self->feed, s_gone), *sent = NULL, *number = NULL;
    Py_XDECREF(gone);
    if (!gone) return NULL;
    if (gone != Py_False || *field(request, self->request.at[R_SOURCE]) != self->source) Py_RETURN_NONE;
    PyObject *replies = *field(self->source, self->replies_at);
    if (!replies || replies == Py_None) Py_RETURN_NONE;
    PyObject *outbox = PyObject_GetAttr(replies, s_outbox);
    if (!outbox || Py_TYPE(outbox) != &OutboxType) return outbox ? Py_DECREF(outbox), Py_NewRef(Py_None) : NULL;

    const Class class = self->message; /* other code may run from here on, and retire this inlet */
    Py_INCREF(message);
    Py_INCREF(grip);
    number = PyLong_FromUnsignedLongLong(grip->seq);
    PyObject *const answer[] = {args[1], number};
    if (number) sent = Outbox_answer((Outbox *)outbox, answer, 2);
    Py_XDECREF(number);
    if (sent && sent != Py_None) {
        number = PyLong_FromVoidPtr(request);
        int is_open = number ? PyDict_Contains(open, number) : -1;
        if (is_open > 0 && !PyDict_DelItem(open, number)) {
            set_field(message, class.at[M_RECEIVER], Py_None);
            if (!grip->acknowledged) {
                grip->acknowledged = 1;
                store(grip->at - RELEASED + DONE, grip->seq);
            }
            set_field(message, class.at[M_VALUE], Py_None);
            set_field(message, class.at[M_HOLD], Py_None);
            set_field(message, class.at[M_LEASE], Py_None);
        } else if (is_open) Py_CLEAR(sent);
        Py_XDECREF(number);
    }
    Py_DECREF(outbox);
    Py_DECREF(grip);
    Py_DECREF(message);
    return sent;
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
    {"serve", (PyCFunction)(void (*)(void))Inlet_serve, METH_FASTCALL, Inlet_serve_doc},
    {"request", (PyCFunction)(void (*)(void))Inlet_request, METH_FASTCALL, Inlet_request_doc},
    {"respond", (PyCFunction)(void (*)(void))Inlet_respond, METH_FASTCALL, Inlet_respond_doc},
    {"answer", (PyCFunction)(void (*)(void))Inlet_answer, METH_FASTCALL, Inlet_answer_doc},
    {"ask", (PyCFunction)(void (*)(void))Inlet_ask, METH_FASTCALL, Inlet_ask_doc},
    {"pop", (PyCFunction)(void (*)(void))Inlet_pop, METH_FASTCALL, Inlet_pop_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef Inlet_members[] = {
    {"received", T_ULONGLONG, offsetof(Inlet, received), READONLY, "messages that `recv` and `pop` returned"},
    {"ring_index", T_PYSSIZET, offsetof(Inlet, ring_index), READONLY, "the ring that it knows"},
    {"more", T_BOOL, offsetof(Inlet, more), 0, "whether a sibling sleeps though there was more to take"},
    {"received_bytes", T_ULONGLONG, offsetof(Inlet, received_bytes), READONLY, "their payload bytes"},
    {"sent_ns", T_ULONGLONG, offsetof(Inlet, sent_ns), READONLY, "when the last message was published, CLOCK_MONOTONIC"},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject InletType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmtensor.hot._hot.Inlet",
    .tp_doc = "What a receiver does for a usual tensor, or stream.",
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
