/* Wake receivers that sleep: write a frame to each one's socket. See channel/zmtp.py and docs/internals/protocols.md, section 3. */

#ifndef SHMTENSOR_NOTIFY_H
#define SHMTENSOR_NOTIFY_H

#include "native.h"
#include "protocol/words.h"

typedef struct {
    PyObject *peers;  /* a tuple; each has `notified`, the sleep in which it was notified last, and `connection`, its connection or None */
    uint32_t *asleep; /* by peer: the index of its word in the control segment */
    uint64_t *groups; /* by peer: its group, 0: none */
    PyObject *head;   /* the bytes before the record: the frame's head and the doorbell's */
    unsigned turn;    /* the peer to try first if one is enough */
    unsigned long long count;
} Notifier;

/* Notify the peers that sleep and were not notified in this sleep, one of each group, or, with `one`, the next of them in turn.
 * 1 if that is done, 0 if the Python code has to do it. */
int notify_sleepers(Notifier *self, const word *control, int one, const void *record, size_t record_bytes);

/* Make the notifier's thread safe to fork; once per process. 0, or -1 with an error set. */
int notify_prepare(void);

#endif
