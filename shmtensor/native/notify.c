/* Doorbells: a receiver that sleeps is woken by a frame that is written to its socket. */

#include "notify.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>

/* --- The notifier: a thread of the process that wakes several sleepers at once: docs/internals/protocols.md, section 3 ------------- */

#define BELL_BYTES 1024 /* more than a frame's head, a doorbell's, and a record */
#define MOST_PEERS 256  /* a channel has no more members */
#define MOST_JOBS 8     /* in the queue; a sender that finds so many writes its frames itself */
#define NOTIFIER_STACK (256 << 10)

typedef struct {
    int count, fds[MOST_PEERS];
    size_t nbytes;
    char frame[BELL_BYTES];
} Job;

/* All of it under the mutex, except that the notifier reads the first queued job without it. */
static struct {
    pthread_mutex_t mutex;
    pthread_cond_t more_given, more_written;
    int runs;
    uint64_t given, written; /* how many jobs; number n lies in jobs[n % MOST_JOBS] */
    Job jobs[MOST_JOBS];
    uint64_t failed[16]; /* bit d % 1024: the connection with descriptor d, or another with that bit, is broken */
} notifier = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, 0, {{0}}, {0}};

static uint64_t *failed_word(int fd) { return &notifier.failed[fd / 64 % 16]; }
static uint64_t failed_bit(int fd) { return (uint64_t)1 << fd % 64; }

static void write_frame(int fd, const char *frame, size_t nbytes) {
    ssize_t sent = send(fd, frame, nbytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent == (ssize_t)nbytes || (sent < 0 && errno == EAGAIN)) return; /* a full inbox wakes its receiver anyway */
    shutdown(fd, SHUT_RDWR); /* nothing may follow half a frame: the next write to it fails, which shows that it is broken */
    pthread_mutex_lock(&notifier.mutex);
    *failed_word(fd) |= failed_bit(fd);
    pthread_mutex_unlock(&notifier.mutex);
}

static void *run_notifier(void *unused) {
    (void)unused;
    pthread_setname_np(pthread_self(), "shmtensor-ring"); /* here, because naming another thread opens a file */
    pthread_mutex_lock(&notifier.mutex);
    for (;;) {
        while (notifier.written == notifier.given) pthread_cond_wait(&notifier.more_given, &notifier.mutex);
        const Job *job = &notifier.jobs[notifier.written % MOST_JOBS];
        pthread_mutex_unlock(&notifier.mutex);
        for (int i = 0; i < job->count; i++) write_frame(job->fds[i], job->frame, job->nbytes);
        pthread_mutex_lock(&notifier.mutex);
        notifier.written++;
        pthread_cond_broadcast(&notifier.more_written);
    }
    return NULL;
}

/* Start the thread with every signal blocked: handlers run in the program's own threads. */
static int start_notifier(void) {
    pthread_t thread;
    pthread_attr_t how;
    sigset_t all, before;
    if (pthread_attr_init(&how)) return 0;
    pthread_attr_setstacksize(&how, NOTIFIER_STACK);
    pthread_attr_setdetachstate(&how, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&thread, &how, run_notifier, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&how);
    return !failed;
}

/* Queue a job: write a frame to these connections, which stay open until `wait_written`. Returns 1; or 0, with nothing done, if
 * one of them is broken, the thread cannot be started, or the queue is full: then the caller notifies the peers one by one. */
static int queue_job(const int *fds, int count, const char *frame, size_t nbytes) {
    pthread_mutex_lock(&notifier.mutex);
    int able = notifier.given - notifier.written < MOST_JOBS && (notifier.runs || (notifier.runs = start_notifier()));
    for (int i = 0; i < count; i++) able = able && !(*failed_word(fds[i]) & failed_bit(fds[i]));
    if (able) {
        Job *job = &notifier.jobs[notifier.given++ % MOST_JOBS];
        job->count = count;
        job->nbytes = nbytes;
        memcpy(job->fds, fds, (size_t)count * sizeof *fds);
        memcpy(job->frame, frame, nbytes);
    }
    pthread_mutex_unlock(&notifier.mutex);
    if (able) pthread_cond_signal(&notifier.more_given);
    return able;
}

PyDoc_STRVAR(wait_written_doc, "wait_written(fd)\n--\n\nWait until all queued jobs are written: then that descriptor may be closed.");

static PyObject *wait_written(PyObject *module, PyObject *number) {
    (void)module;
    long fd = PyLong_AsLong(number);
    if (fd == -1 && PyErr_Occurred()) return NULL;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&notifier.mutex);
    for (uint64_t until = notifier.given; notifier.written < until;) pthread_cond_wait(&notifier.more_written, &notifier.mutex);
    if (fd >= 0) *failed_word((int)fd) &= ~failed_bit((int)fd);
    pthread_mutex_unlock(&notifier.mutex);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* A forked child has no notifier; its parent's goes on with the parent's jobs. */
static void before_fork(void) { pthread_mutex_lock(&notifier.mutex); }
static void after_fork_in_parent(void) { pthread_mutex_unlock(&notifier.mutex); }
static void after_fork_in_child(void) {
    pthread_cond_init(&notifier.more_given, NULL); /* no thread of the child waits for them */
    pthread_cond_init(&notifier.more_written, NULL);
    notifier.runs = 0;
    notifier.written = notifier.given;
    memset(notifier.failed, 0, sizeof notifier.failed);
    pthread_mutex_unlock(&notifier.mutex);
}

/* --- peers ----------------------------------------------------------------------------------------------------------- */

/* The descriptor of a peer's connection; -1 if there is none yet. */
static int descriptor_of(PyObject *peer) {
    PyObject *line = PyObject_GetAttrString(peer, "connection"), *number = line ? PyObject_GetAttrString(line, "fd") : NULL;
    long fd = number && PyLong_Check(number) ? PyLong_AsLong(number) : -1;
    Py_XDECREF(number);
    Py_XDECREF(line);
    PyErr_Clear();
    return (int)fd;
}

/* Notify one peer from this thread. 1 if that is done, 0 if the Python code has to do it. */
static int notify_peer(PyObject *peer, const char *bell, size_t nbytes) {
    int fd = descriptor_of(peer);
    if (fd < 0) return 0;
    ssize_t sent = send(fd, bell, nbytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent == (ssize_t)nbytes || (sent < 0 && errno == EAGAIN)) return 1; /* a full inbox wakes its receiver anyway */
    shutdown(fd, SHUT_RDWR); /* nothing may follow half a frame: the next write to it fails, which shows that it is broken */
    return 0;
}

/* Have the notifier notify several peers; returns the same. */
static int notify_peers(PyObject *const *peers, Py_ssize_t count, const char *bell, size_t nbytes) {
    int fds[MOST_PEERS];
    if (count > MOST_PEERS || nbytes > BELL_BYTES) return 0;
    for (Py_ssize_t i = 0; i < count; i++)
        if ((fds[i] = descriptor_of(peers[i])) < 0) return 0;
    return queue_job(fds, (int)count, bell, nbytes);
}

PyDoc_STRVAR(notify_doc, "notify(peers, frame)\n--\n\nHave a thread of the process write a frame to these peers' connections. False, with "
             "nothing done, if a connection is missing or broken, or that thread cannot do it.");

static PyObject *notify(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    if (nargs != 2 || !PyBytes_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "peers, bytes");
        return NULL;
    }
    PyObject *peers = PySequence_Tuple(args[0]);
    if (!peers) return NULL;
    int done = notify_peers(PySequence_Fast_ITEMS(peers), PySequence_Fast_GET_SIZE(peers), PyBytes_AS_STRING(args[1]),
                          (size_t)PyBytes_GET_SIZE(args[1]));
    Py_DECREF(peers);
    return PyBool_FromLong(done);
}

/* The sleep (its `asleep` word) in which a peer was notified last. 0, or -1 with an error set. */
static int notified_in(PyObject *peer, uint64_t *sleep) {
    PyObject *number = PyObject_GetAttrString(peer, "notified");
    if (!number) return -1;
    *sleep = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

static int set_notified(PyObject *peer, uint64_t sleep) {
    PyObject *number = PyLong_FromUnsignedLongLong(sleep);
    int failed = number ? PyObject_SetAttrString(peer, "notified", number) : -1;
    Py_XDECREF(number);
    return failed;
}

int notify_sleepers(Notifier *self, const word *control, int one, const void *record, size_t record_bytes) {
    char bell[BELL_BYTES];
    size_t head = (size_t)PyBytes_GET_SIZE(self->head), all = head + record_bytes;
    Py_ssize_t count = PyTuple_GET_SIZE(self->peers), nfound = 0;
    PyObject *found[MOST_PEERS];
    uint64_t sleeps[MOST_PEERS], groups[MOST_PEERS];
    for (Py_ssize_t step = 0; step < count && nfound < MOST_PEERS; step++) {
        Py_ssize_t at = one ? (Py_ssize_t)((self->turn + (size_t)step) % (size_t)count) : step;
        PyObject *peer = PyTuple_GET_ITEM(self->peers, at);
        uint64_t asleep = load(control + self->asleep[at]), notified;
        if (!(asleep & 1)) continue;
        if (notified_in(peer, &notified)) {
            PyErr_Clear();
            return 0;
        }
        if (notified == asleep) continue;
        uint64_t group = self->groups[at];
        int is_woken = 0; /* another one of its group */
        for (Py_ssize_t i = 0; group && i < nfound; i++) is_woken |= groups[i] == group;
        if (is_woken) continue;
        groups[nfound] = group;
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
    if (!(nfound == 1 ? notify_peer(found[0], bell, all) : notify_peers(found, nfound, bell, all))) return 0;
    for (Py_ssize_t i = 0; i < nfound; i++)
        if (!set_notified(found[i], sleeps[i])) self->count++;
    PyErr_Clear();
    return 1;
}

PyMethodDef notify_methods[] = {
    {"notify", (PyCFunction)(void (*)(void))notify, METH_FASTCALL, notify_doc},
    {"wait_written", wait_written, METH_O, wait_written_doc},
    {NULL, NULL, 0, NULL},
};

int notify_prepare(void) {
    static int prepared; /* once per process: `pthread_atfork` cannot be undone */
    if (prepared || !pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child)) {
        prepared = 1;
        return 0;
    }
    PyErr_NoMemory();
    return -1;
}
