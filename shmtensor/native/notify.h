/* Wake receivers that sleep: a frame into each one's socket, see channel/zmtp.py and docs/internals/protocols.md, section 3. */

#ifndef SHMTENSOR_NOTIFY_H
#define SHMTENSOR_NOTIFY_H

#include "native.h"
#include "protocol/words.h"

typedef struct {
    PyObject *peers;  /* a tuple; each has `rung`, the sleep that it was rung in last, and `line`, where it is rung, or None */
    uint32_t *asleep; /* by peer: the index of its word in the control segment */
    PyObject *head;   /* bytes of a doorbell, its frame's included, up to the record */
    unsigned turn;    /* who is rung first, where one is enough */
    unsigned long long count;
} Notifier;

/* Ring those that sleep and were not rung in this sleep, or the first of them in turn if one is enough. 1 if that is
 * done, 0 if the Python code has to do it. */
int notify_sleepers(Notifier *self, const word *control, int one, const void *record, size_t record_bytes);

/* The thread that rings several and forks: once for the process. 0, or -1 with an error set. */
int notify_prepare(void);

#endif
