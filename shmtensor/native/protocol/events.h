/* The events that a member records about its messages while its channel is traced: ring/events.py draws the layout, and is the
 * reference.
 *
 * An area has one writer at a time: the caller makes sure. Without a tracer `written` is NULL, and that is all that is checked.
 */

#ifndef SHMTENSOR_EVENTS_H
#define SHMTENSOR_EVENTS_H

#include "words.h"

enum { EVENT_SEND = 1, EVENT_TAKE, EVENT_RELEASE };
enum { T_UNTIL = 8, AREA_WRITTEN = 0, AREA_EVENTS = 512, EVENT_WORDS = 8, MOST_EVENTS = 1 << 20 };

typedef struct {
    word *written; /* how many events; NULL: nothing is traced */
    word *events;
    const word *until; /* from then on nothing is written */
    uint64_t mask;     /* events that there is room for - 1 */
    uint64_t every, member, pid;
} event_log;

/* Whether the trace has this message: of the others, not even the time is asked for where that can be saved. */
static inline int is_chosen(const event_log *log, uint64_t seq) { return log->every <= 1 || seq % log->every == 0; }

/* Write an event, unless the trace is over, or leaves this message out. */
void add_event(event_log *log, uint64_t kind, uint64_t seq, uint64_t sender, uint64_t begin, uint64_t middle, uint64_t end,
               uint64_t nbytes);

#endif
