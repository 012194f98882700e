/* A write to a received tensor: the process ends as it would, and a message on standard error says why.
 *
 * The data of a fan-out are mapped read-only, and torch does not know that a tensor may not be written. The handler of
 * SIGSEGV checks whether the address lies in such a mapping, names the channel and the message, and passes every signal on
 * to the handler that was there before: nothing is caught. All that it calls is async-signal-safe; it takes no lock,
 * allocates nothing, and reads only data that holders of the interpreter lock change.
 */

#include "native.h"
#include "protocol/words.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

enum { MOST_NAME = 64, MOST_HANDLERS = 8, FAULT_TEXT = 640, FAULT_RECORD = 256, FAULT_SPAN = 28 };

/* A mapping. Nodes are reused and never freed, so that the handler may walk the list at any time. */
typedef struct Guard {
    struct Guard *next;
    atomic_uintptr_t start; /* 0: unused. Stored after all the rest, and cleared before the memory is unmapped */
    uintptr_t end;
    const char *records; /* of the ring, in memory that is mapped as long */
    uint64_t slots, slot_bytes;
    pid_t pid;
    char channel[MOST_NAME + 1];
} Guard;

static _Atomic(Guard *) guards;

/* Earlier handlers, oldest first. A handler that is installed after ours is added when the next ring is mapped. */
static struct sigaction fault_handlers[MOST_HANDLERS];
static atomic_int fault_handler_count;
static atomic_int fault_told, fault_teller; /* process ids: the explanation is printed; it is being printed */

/* --- the explanation ---------------------------------------------------------------------------------------------- */

typedef struct {
    char text[FAULT_TEXT];
    size_t length;
} Line;

static void put(Line *line, const char *text) {
    while (*text && line->length < sizeof line->text) line->text[line->length++] = *text++;
}

static void put_number(Line *line, uint64_t number) {
    char digits[21], *at = digits + 20;
    *at = 0;
    do *--at = (char)('0' + number % 10);
    while (number /= 10);
    put(line, at);
}

/* The newest message whose slots include the address; 0 if there is none in the records. */
static uint64_t message_at(const Guard *guard, uintptr_t address) {
    uint64_t newest = 0, slot = (address - guard->start) / guard->slot_bytes;
    if (slot >= guard->slots) return 0;
    for (uint64_t first = slot + 1; first-- > 0;) {
        const char *record = guard->records + first * FAULT_RECORD;
        uint64_t seq = load((const word *)record);
        uint32_t span;
        memcpy(&span, record + FAULT_SPAN, sizeof span);
        if (seq > newest && span <= guard->slots && first + span > slot) newest = seq;
    }
    return newest;
}

static void tell_fault(const Guard *guard, uintptr_t address, pid_t pid) {
    static Line line; /* one thread at a time prints */
    line.length = 0;
    uint64_t seq = guard->pid == pid ? message_at(guard, address) : 0;
    put(&line, "shmtensor: process ");
    put_number(&line, (uint64_t)pid);
    put(&line, guard->pid == pid ? " wrote to " : " touched ");
    if (seq) {
        put(&line, "message ");
        put_number(&line, seq);
    } else {
        put(&line, "a message");
    }
    put(&line, " of channel \"");
    put(&line, guard->channel);
    if (guard->pid == pid) {
        put(&line, "\", which it has received: values of a fan-out are read-only, since all subscribers share their bytes. "
                   "To change one, take msg.copy() or recv(copy=True). What follows is its segmentation fault.\n");
    } else {
        put(&line, "\", which process ");
        put_number(&line, (uint64_t)guard->pid);
        put(&line, " had received when it forked this one: views do not cross a fork. Make a Subscriber here, or pass "
                   "msg.copy(). What follows is its segmentation fault.\n");
    }
    ssize_t ignored = write(STDERR_FILENO, line.text, line.length);
    (void)ignored;
}

/* --- the handler ------------------------------------------------------------------------------------------------ */

static void pass_on(const struct sigaction *to, int number, siginfo_t *info, void *context) {
    if (to->sa_flags & SA_SIGINFO) to->sa_sigaction(number, info, context);
    else if (to->sa_handler != SIG_DFL && to->sa_handler != SIG_IGN) to->sa_handler(number);
    else if (info->si_code > 0 || to->sa_handler == SIG_DFL) {
        sigaction(number, to, NULL);
        if (info->si_code <= 0) raise(number); /* else the instruction faults again, and the kernel ends the process */
    }
}

static void on_fault(int number, siginfo_t *info, void *context) {
    int error = errno, count = atomic_load(&fault_handler_count);
    pid_t pid = getpid();
    if (info->si_code > 0) {
        uintptr_t address = (uintptr_t)info->si_addr;
        for (const Guard *guard = atomic_load(&guards); guard; guard = guard->next) {
            uintptr_t start = atomic_load(&guard->start);
            if (!start || address < start || address >= guard->end) continue;
            int teller = atomic_load(&fault_teller);
            if (teller != pid && atomic_compare_exchange_strong(&fault_teller, &teller, pid)) {
                tell_fault(guard, address, pid);
                atomic_store(&fault_told, pid);
            } else { /* another faulting thread: it must not end the process before the explanation is printed */
                const struct timespec pause = {0, 1000000};
                for (int turn = 0; atomic_load(&fault_told) != pid && turn < 1000; turn++) nanosleep(&pause, NULL);
            }
            break;
        }
    }
    errno = error;
    /* A handler that was installed over ours (faulthandler, for one) may end by raising the signal again for ours: then call
     * the oldest handler next, or the two would call each other for ever. */
    int raised = info->si_code == SI_TKILL && info->si_pid == pid;
    pass_on(&fault_handlers[raised || count < 1 ? 0 : count - 1], number, info, context);
}

/* 0 with our handler on top; -1 with an error set. */
static int take_faults(void) {
    struct sigaction now, ours = {.sa_sigaction = on_fault};
    int count = atomic_load(&fault_handler_count);
    if (sigaction(SIGSEGV, NULL, &now)) goto failed;
    if (((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_fault) || count == MOST_HANDLERS) return 0;
    int function = (now.sa_flags & SA_SIGINFO) || (now.sa_handler != SIG_DFL && now.sa_handler != SIG_IGN);
    ours.sa_mask = now.sa_mask; /* the earlier handler runs with the mask that it asked for */
    ours.sa_flags = SA_SIGINFO | (function ? now.sa_flags & (SA_ONSTACK | SA_NODEFER | SA_RESTART) : SA_ONSTACK);
    fault_handlers[count] = now;
    atomic_store(&fault_handler_count, count + 1);
    if (!sigaction(SIGSEGV, &ours, NULL)) return 0;
failed:
    PyErr_SetFromErrno(PyExc_OSError);
    return -1;
}

/* --- the Python functions ------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(guard_doc, "guard(address, nbytes, records, slots, slot_bytes, channel)\n--\n\nSay who is to blame if somebody writes to this "
                        "read-only memory; returns what `unguard` takes, before it or the records are unmapped.");

static PyObject *guard(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long address, nbytes, records, slots, slot_bytes;
    const char *channel;
    if (!PyArg_ParseTuple(args, "KKKKKs", &address, &nbytes, &records, &slots, &slot_bytes, &channel)) return NULL;
    if (!address || !slot_bytes || strlen(channel) > MOST_NAME) {
        PyErr_SetString(PyExc_ValueError, "no mapping of a ring");
        return NULL;
    }
    if (take_faults()) return NULL;
    Guard *found = atomic_load(&guards);
    while (found && atomic_load(&found->start)) found = found->next;
    int made = !found;
    if (made && !(found = calloc(1, sizeof *found))) return PyErr_NoMemory();
    found->end = (uintptr_t)(address + nbytes);
    found->records = (const char *)(uintptr_t)records;
    found->slots = slots;
    found->slot_bytes = slot_bytes;
    found->pid = getpid();
    strcpy(found->channel, channel);
    atomic_store(&found->start, (uintptr_t)address);
    if (made) {
        found->next = atomic_load(&guards);
        atomic_store(&guards, found);
    }
    return PyLong_FromVoidPtr(found);
}

PyDoc_STRVAR(unguard_doc, "unguard(number)\n--\n\nThe memory is about to be unmapped.");

static PyObject *unguard(PyObject *module, PyObject *number) {
    (void)module;
    Guard *found = PyLong_AsVoidPtr(number);
    if (!found && PyErr_Occurred()) return NULL;
    for (Guard *each = atomic_load(&guards); each; each = each->next)
        if (each == found) atomic_store(&each->start, 0);
    Py_RETURN_NONE;
}

PyMethodDef fault_methods[] = {
    {"guard", guard, METH_VARARGS, guard_doc},
    {"unguard", unguard, METH_O, unguard_doc},
    {NULL, NULL, 0, NULL},
};
