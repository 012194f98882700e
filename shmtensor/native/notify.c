/* Doorbells: who sleeps is woken by a frame into its socket. */

#include "notify.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>

/* --- The ringer: a thread of the process that rings several sleepers at once, see docs/internals/protocols.md, section 3 ---------- */

#define BELL_BYTES 1024 /* more than a frame's head, a doorbell's, and a record */
#define MOST_LINES 256  /* a channel has no more members */
#define MOST_ERRANDS 8  /* that wait; whoever comes then rings by itself */
#define RINGER_STACK (256 << 10)

typedef struct {
    int count, lines[MOST_LINES];
    size_t nbytes;
    char frame[BELL_BYTES];
} Errand;

/* All of it under the mutex, but for an errand that is given and not written: it is the ringer's. */
static struct {
    pthread_mutex_t mutex;
    pthread_cond_t more_given, more_written;
    int runs;
    uint64_t given, written; /* how many errands; number n lies in errands[n % MOST_ERRANDS] */
    Errand errands[MOST_ERRANDS];
    uint64_t failed[16]; /* bit d % 1024: the line whose descriptor is d is broken. If it is another's, it is rung by Python. */
} ringer = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, 0, {{0}}, {0}};

static uint64_t *failed_word(int line) { return &ringer.failed[line / 64 % 16]; }
static uint64_t failed_bit(int line) { return (uint64_t)1 << line % 64; }

static void write_frame(int line, const char *frame, size_t nbytes) {
    ssize_t sent = send(line, frame, nbytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent == (ssize_t)nbytes || (sent < 0 && errno == EAGAIN)) return; /* a full inbox wakes its sleeper anyway */
    shutdown(line, SHUT_RDWR); /* nothing may follow half a frame: whoever writes to it next learns that it is broken */
    pthread_mutex_lock(&ringer.mutex);
    *failed_word(line) |= failed_bit(line);
    pthread_mutex_unlock(&ringer.mutex);
}

static void *ring_for_ever(void *unused) {
    (void)unused;
    pthread_setname_np(pthread_self(), "shmtensor-ring"); /* of another thread it would take a descriptor */
    pthread_mutex_lock(&ringer.mutex);
    for (;;) {
        while (ringer.written == ringer.given) pthread_cond_wait(&ringer.more_given, &ringer.mutex);
        const Errand *errand = &ringer.errands[ringer.written % MOST_ERRANDS];
        pthread_mutex_unlock(&ringer.mutex);
        for (int i = 0; i < errand->count; i++) write_frame(errand->lines[i], errand->frame, errand->nbytes);
        pthread_mutex_lock(&ringer.mutex);
        ringer.written++;
        pthread_cond_broadcast(&ringer.more_written);
    }
    return NULL;
}

/* With every signal blocked: they are for the program's own threads. */
static int start_ringer(void) {
    pthread_t thread;
    pthread_attr_t how;
    sigset_t all, before;
    if (pthread_attr_init(&how)) return 0;
    pthread_attr_setstacksize(&how, RINGER_STACK);
    pthread_attr_setdetachstate(&how, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&thread, &how, ring_for_ever, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&how);
    return !failed;
}

/* Have a frame written to these lines, which stay open until `settle`. 1; or 0, and nothing is done, if one of them is
 * broken, there can be no thread, or it has too much to do: then they are rung one by one. */
static int give_errand(const int *lines, int count, const char *frame, size_t nbytes) {
    pthread_mutex_lock(&ringer.mutex);
    int able = ringer.given - ringer.written < MOST_ERRANDS && (ringer.runs || (ringer.runs = start_ringer()));
    for (int i = 0; i < count; i++) able = able && !(*failed_word(lines[i]) & failed_bit(lines[i]));
    if (able) {
        Errand *errand = &ringer.errands[ringer.given++ % MOST_ERRANDS];
        errand->count = count;
        errand->nbytes = nbytes;
        memcpy(errand->lines, lines, (size_t)count * sizeof *lines);
        memcpy(errand->frame, frame, nbytes);
    }
    pthread_mutex_unlock(&ringer.mutex);
    if (able) pthread_cond_signal(&ringer.more_given);
    return able;
}

PyDoc_STRVAR(settle_doc, "settle(line)\n--\n\nWait until what was given to the ringer is written: then that descriptor may be closed.");

static PyObject *settle(PyObject *module, PyObject *number) {
    (void)module;
    long line = PyLong_AsLong(number);
    if (line == -1 && PyErr_Occurred()) return NULL;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&ringer.mutex);
    for (uint64_t until = ringer.given; ringer.written < until;) pthread_cond_wait(&ringer.more_written, &ringer.mutex);
    if (line >= 0) *failed_word((int)line) &= ~failed_bit((int)line);
    pthread_mutex_unlock(&ringer.mutex);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* A forked child has no ringer, and its parent's rings for its parent. */
static void before_fork(void) { pthread_mutex_lock(&ringer.mutex); }
static void after_fork_in_parent(void) { pthread_mutex_unlock(&ringer.mutex); }
static void after_fork_in_child(void) {
    pthread_cond_init(&ringer.more_given, NULL); /* nobody waits here */
    pthread_cond_init(&ringer.more_written, NULL);
    ringer.runs = 0;
    ringer.written = ringer.given;
    memset(ringer.failed, 0, sizeof ringer.failed);
    pthread_mutex_unlock(&ringer.mutex);
}

/* --- who is rung ----------------------------------------------------------------------------------------------------- */

/* The descriptor that a peer is rung at; -1 if there is none yet. */
static int line_of(PyObject *peer) {
    PyObject *line = PyObject_GetAttrString(peer, "line"), *number = line ? PyObject_GetAttrString(line, "fd") : NULL;
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
    shutdown(fd, SHUT_RDWR); /* nothing may follow half a frame: whoever writes to it next learns that it is broken */
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

static int rung_of(PyObject *peer, uint64_t *sleep) {
    PyObject *number = PyObject_GetAttrString(peer, "rung");
    if (!number) return -1;
    *sleep = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

static int set_rung(PyObject *peer, uint64_t sleep) {
    PyObject *number = PyLong_FromUnsignedLongLong(sleep);
    int failed = number ? PyObject_SetAttrString(peer, "rung", number) : -1;
    Py_XDECREF(number);
    return failed;
}

int notify_sleepers(Notifier *self, const word *control, int one, const void *record, size_t record_bytes) {
    char bell[BELL_BYTES];
    size_t head = (size_t)PyBytes_GET_SIZE(self->head), all = head + record_bytes;
    Py_ssize_t count = PyTuple_GET_SIZE(self->peers), nfound = 0;
    PyObject *found[MOST_LINES];
    uint64_t sleeps[MOST_LINES];
    for (Py_ssize_t step = 0; step < count && nfound < MOST_LINES; step++) {
        Py_ssize_t at = one ? (Py_ssize_t)((self->turn + (size_t)step) % (size_t)count) : step;
        PyObject *peer = PyTuple_GET_ITEM(self->peers, at);
        uint64_t asleep = load(control + self->asleep[at]), rung;
        if (!(asleep & 1)) continue;
        if (rung_of(peer, &rung)) {
            PyErr_Clear();
            return 0;
        }
        if (rung == asleep) continue;
        found[nfound] = peer;
        sleeps[nfound++] = asleep;
        if (one) {
            self->turn = (unsigned)at + 1;
            break;
        }
    }
    if (!nfound) return 1;
    if (all > sizeof bell) return 0;
    memcpy(bell, PyBytes_AS_STRING(self->head), head);
    memcpy(bell + head, record, record_bytes);
    if (!(nfound == 1 ? ring_peer(found[0], bell, all) : ring_peers(found, nfound, bell, all))) return 0;
    for (Py_ssize_t i = 0; i < nfound; i++)
        if (!set_rung(found[i], sleeps[i])) self->count++;
    PyErr_Clear();
    return 1;
}

PyMethodDef notify_methods[] = {
    {"ring", (PyCFunction)(void (*)(void))ring, METH_FASTCALL, ring_doc},
    {"settle", settle, METH_O, settle_doc},
    {NULL, NULL, 0, NULL},
};

int notify_prepare(void) {
    static int prepared; /* it cannot be undone */
    if (prepared || !pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child)) {
        prepared = 1;
        return 0;
    }
    PyErr_NoMemory();
    return -1;
}
