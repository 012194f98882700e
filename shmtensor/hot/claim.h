/* Included once, by _hot.c. */

/* --- Claims: who of a work queue's consumers takes a message ------------------------------------------------------- */

enum { MINE, PASSED, NOT_USUAL };

/* What ring/competing.py's `is_open` and `claim` do on the walk. MINE: locked, and the first attempt is counted; PASSED:
 * another has it, or it is done; NOT_USUAL: nothing is done, and the Python code is to see. */
static int claim(PyObject *locks, PyObject *leases, PyObject *number, Word seq, const Word *record, Word *state) {
    if (load(state + DONE) == seq || load(state + CLAIMED) == seq) return PASSED;
    if (PyDict_Contains(leases, number)) return NOT_USUAL; /* a lock of our own would be granted again */
    int error = set_lock(locks, F_WRLCK, seq);
    if (error) return error == EAGAIN || error == EACCES ? PASSED : NOT_USUAL;
    /* `done` before `seq`: the other way round, the slot could be reused, and done for its next message, in between */
    if (load(state + DONE) >= seq || load(record) != seq) {
        set_lock(locks, F_UNLCK, seq);
        return PASSED;
    }
    if (load(state + ATTEMPT) >> 8 == seq) { /* somebody had it and did not finish */
        set_lock(locks, F_UNLCK, seq);
        return NOT_USUAL;
    }
    store(state + ATTEMPT, seq << 8 | 1);
    store(state + CLAIMED, seq);
    return MINE;
}
