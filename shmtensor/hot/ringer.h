/* Included once, by _hot.c. */

/* --- The ringer: a thread of the process that rings several sleepers at once, see docs/protocols.md, section 3 ---------- */

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
    Word given, written; /* how many errands; number n lies in errands[n % MOST_ERRANDS] */
    Errand errands[MOST_ERRANDS];
    Word failed[16]; /* bit d % 1024: the line whose descriptor is d is broken. If it is another's, it is rung by Python. */
} ringer = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, 0, {{0}}, {0}};

static Word *failed_word(int line) { return &ringer.failed[line / 64 % 16]; }
static Word failed_bit(int line) { return (Word)1 << line % 64; }

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
    for (Word until = ringer.given; ringer.written < until;) pthread_cond_wait(&ringer.more_written, &ringer.mutex);
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
