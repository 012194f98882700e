#include "trace.h"

void trace_clear(Trace *self) {
    self->log.written = NULL;
    if (self->words.obj) PyBuffer_Release(&self->words);
    if (self->limits.obj) PyBuffer_Release(&self->limits);
}

static int buffer_of(PyObject *object, const char *name, int flags, Py_buffer *view) {
    PyObject *found = PyObject_GetAttrString(object, name);
    int failed = !found || PyObject_GetBuffer(found, view, flags);
    Py_XDECREF(found);
    return failed ? -1 : 0;
}

int trace_set(Trace *self, PyObject *log) {
    trace_clear(self);
    if (log == Py_None) {
        self->begun = self->found = 0;
        self->goes_on = self->waited = 0;
        return 0;
    }
    uint64_t size;
    event_log made = {0};
    if (number_of(log, "size", &size) || number_of(log, "every", &made.every) || number_of(log, "member", &made.member) ||
        number_of(log, "pid", &made.pid) || buffer_of(log, "words", PyBUF_SIMPLE | PyBUF_WRITABLE, &self->words) ||
        buffer_of(log, "limits", PyBUF_SIMPLE, &self->limits)) {
        trace_clear(self);
        return -1;
    }
    size_t words = (size_t)self->words.len / sizeof(word), limits = (size_t)self->limits.len / sizeof(word);
    if (!size || size & (size - 1) || size > MOST_EVENTS || AREA_EVENTS + EVENT_WORDS * size > words || limits <= T_UNTIL) {
        trace_clear(self);
        PyErr_SetString(PyExc_ValueError, "an event lies outside its segment");
        return -1;
    }
    made.mask = size - 1;
    made.written = (word *)self->words.buf + AREA_WRITTEN;
    made.events = (word *)self->words.buf + AREA_EVENTS;
    made.until = (const word *)self->limits.buf + T_UNTIL;
    self->log = made;
    return 0;
}
