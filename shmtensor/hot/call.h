/* Included once, by _hot.c. */

/* --- Call: a request as its client sees it, rpc/call.py ------------------------------------------------------------- */

enum { C_BITS, C_DEADLINE, C_WORDS, C_AT, C_SEQ, C_VALUE, C_DONE };

static const char *const call_slots[] = {"bits", "deadline", "words", "at", "seq", "value", "done", NULL};
static Class call_class;

/* 0 if `call_class` is the class of this call; -1 with an error set if it is none. */
static int know_call(PyObject *call) {
    PyObject *type = (PyObject *)Py_TYPE(call);
    return type == call_class.type ? 0 : class_get(&call_class, type, call_slots);
}
