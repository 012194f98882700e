/* Included once, by _hot.c. */

/* --- Bells: the doorbells of receivers that sleep, see channel/zmtp.py --------------------------------------------- */

#define BELL_BYTES 1024 /* more than a frame's head, a doorbell's, and a record */

typedef struct {
    PyObject *peers; /* a tuple; each has `rung`, the sleep that it was rung in last, and `line`, where it is rung, or None */
    PyObject *head;  /* bytes of a doorbell, its frame's included, up to the record */
    unsigned turn;   /* who is rung first, where one is enough */
    unsigned long long count;
} Bells;

/* 1 if a peer was rung, 0 if the Python code has to do it. */
static int ring_peer(Bells *bells, PyObject *peer, Word asleep, const char *record, Py_ssize_t record_bytes) {
    char bell[BELL_BYTES];
    size_t head = (size_t)PyBytes_GET_SIZE(bells->head), all = head + (size_t)record_bytes;
    PyObject *line = PyObject_GetAttr(peer, s_line), *number = line ? PyObject_GetAttr(line, s_fd) : NULL;
    long fd = number && PyLong_Check(number) ? PyLong_AsLong(number) : -1;
    Py_XDECREF(number);
    PyErr_Clear(); /* no line yet */
    int done = 0;
    if (fd >= 0 && all <= sizeof bell) {
        memcpy(bell, PyBytes_AS_STRING(bells->head), head);
        memcpy(bell + head, record, (size_t)record_bytes);
        ssize_t sent = send((int)fd, bell, all, MSG_DONTWAIT | MSG_NOSIGNAL);
        done = sent == (ssize_t)all || (sent < 0 && errno == EAGAIN); /* a full inbox wakes its sleeper anyway */
        if (!done) Py_XDECREF(PyObject_CallMethodNoArgs(line, s_close)); /* nothing may follow half a frame */
        else if (!set_index(peer, s_rung, asleep)) bells->count++;
        PyErr_Clear();
    }
    Py_XDECREF(line);
    return done;
}

/* Ring the one that sleeps and was not rung in this sleep, or the first of them in turn if one is enough. 1 if that is
 * done, 0 if the Python code has to do it: it also rings several at once, by other means (channel/doorbells.py). */
static int ring_sleepers(Bells *bells, const Word *control, const Py_ssize_t *sleepers, int count, int one,
                         const char *record, Py_ssize_t record_bytes) {
    PyObject *found = NULL;
    Word its_sleep = 0;
    for (int step = 0; step < count; step++) {
        int at = one ? (int)((bells->turn + (unsigned)step) % (unsigned)count) : step;
        PyObject *peer = PyTuple_GET_ITEM(bells->peers, at);
        Word asleep = load(control + sleepers[at]);
        uint64_t rung;
        if (!(asleep & 1)) continue;
        if (get_index(peer, s_rung, &rung)) {
            PyErr_Clear();
            return 0;
        }
        if (rung == asleep) continue;
        if (found) return 0;
        found = peer;
        its_sleep = asleep;
        if (one) {
            bells->turn = (unsigned)at + 1;
            break;
        }
    }
    return !found || ring_peer(bells, found, its_sleep, record, record_bytes);
}
