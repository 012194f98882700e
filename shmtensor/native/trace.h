/* The event log of a writer or reader, with what keeps its memory mapped. */

#ifndef SHMTENSOR_TRACE_H
#define SHMTENSOR_TRACE_H

#include "native.h"
#include "protocol/events.h"

typedef struct {
    event_log log;
    Py_buffer words, limits;
    uint64_t begun, found; /* a sender: when it began to look for slots; when it had them, if it waited; 0: it has not */
    int waited; /* a search found none */
    int goes_on;           /* `begun` is that of the message that the endpoint sends step by step now */
} Trace;

/* Write events there from now on: an `EventLog` of ring/events.py, or None. 0, or -1 with an error set. */
int trace_set(Trace *self, PyObject *log);
void trace_clear(Trace *self);

static inline int is_traced(const Trace *self) { return __builtin_expect(self->log.written != NULL, 0); }

static inline int traces(const Trace *self, uint64_t seq) { return is_traced(self) && is_chosen(&self->log, seq); }

#endif
