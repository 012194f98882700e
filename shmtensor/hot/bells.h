/* Included once, by _hot.c. */

/* --- Bells: the doorbells of receivers that sleep, see channel/zmtp.py --------------------------------------------- */

typedef struct {
    PyObject *peers; /* a tuple; each has `rung`, the sleep that it was rung in last, and `line`, where it is rung, or None */
    PyObject *head;  /* bytes of a doorbell, its frame's included, up to the record */
    unsigned turn;   /* who is rung first, where one is enough */
    unsigned long long count;
} Bells;

/* The descriptor that a peer is rung at; -1 if there is none yet. */
static int line_of(PyObject *peer) {
    PyObject *line = PyObject_GetAttr(peer, s_line), *number = line ? PyObject_GetAttr(line, s_fd) : NULL;
    long fd = number && PyLong_Check(number) ? PyLong_AsLong(number) : -1;
    Py_XDECREF(number);
    Py_XDECREF(line);
    PyErr_Clear();
    return (int)fd;
}

/* 1 if the peer was rung, 0 if the Python code has to do it. */
static int ring_peer(PyObject *peer, const char *bell, size_t nbytes) {
    int fd = line_of(peer);
    if (fd < 0) return 0;
    ssize_t sent = send(fd, bell, nbytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent == (ssize_t)nbytes || (sent < 0 && errno == EAGAIN)) return 1; /* a full inbox wakes its sleeper anyway */
    PyObject *line = PyObject_GetAttr(peer, s_line);
    Py_XDECREF(line ? PyObject_CallMethodNoArgs(line, s_close) : NULL); /* nothing may follow half a frame */
    Py_XDECREF(line);
    PyErr_Clear();
    return 0;
}

/* The same for several, which the ringer does. */
static int ring_peers(PyObject *const *peers, Py_ssize_t count, const char *bell, size_t nbytes) {
    int lines[MOST_LINES];
    if (count > MOST_LINES || nbytes > BELL_BYTES) return 0;
    for (Py_ssize_t i = 0; i < count; i++)
        if ((lines[i] = line_of(peers[i])) < 0) return 0;
    return give_errand(lines, (int)count, bell, nbytes);
}

PyDoc_STRVAR(ring_doc, "ring(peers, frame)\n--\n\nHave a frame written to these peers' lines by a thread of the process. False, and nothing "
             "is done, if one of them has no line or a broken one, or that thread can not do it.");

static PyObject *ring(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    if (nargs != 2 || !PyBytes_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "peers, bytes");
        return NULL;
    }
    PyObject *peers = PySequence_Fast(args[0], "peers");
    if (!peers) return NULL;
    int done = ring_peers(PySequence_Fast_ITEMS(peers), PySequence_Fast_GET_SIZE(peers), PyBytes_AS_STRING(args[1]),
                          (size_t)PyBytes_GET_SIZE(args[1]));
    Py_DECREF(peers);
    return PyBool_FromLong(done);
}

/* Ring those that sleep and were not rung in this sleep, or the first of them in turn if one is enough. 1 if that is
 * done, 0 if the Python code has to do it. */
static int ring_sleepers(Bells *bells, const Word *control, const Py_ssize_t *sleepers, int count, int one,
                         const char *record, Py_ssize_t record_bytes) {
    char bell[BELL_BYTES];
    size_t head = (size_t)PyBytes_GET_SIZE(bells->head), all = head + (size_t)record_bytes;
    PyObject *found[MOST_PEERS];
    Word sleeps[MOST_PEERS];
    int nfound = 0;
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
        found[nfound] = peer;
        sleeps[nfound++] = asleep;
        if (one) {
            bells->turn = (unsigned)at + 1;
            break;
        }
    }
    if (!nfound) return 1;
    if (all > sizeof bell) return 0;
    memcpy(bell, PyBytes_AS_STRING(bells->head), head);
    memcpy(bell + head, record, (size_t)record_bytes);
    if (!(nfound == 1 ? ring_peer(found[0], bell, all) : ring_peers(found, nfound, bell, all))) return 0;
    for (int i = 0; i < nfound; i++)
        if (!set_index(found[i], s_rung, sleeps[i])) bells->count++;
    PyErr_Clear();
    return 1;
}
