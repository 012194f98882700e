#include "events.h"

void add_event(event_log *log, uint64_t kind, uint64_t seq, uint64_t sender, uint64_t begin, uint64_t middle, uint64_t end,
               uint64_t nbytes) {
    if (end >= load(log->until)) { /* the tracer has ended, or died: until the members change, not even the time is asked for */
        log->written = NULL;
        return;
    }
    if (!is_chosen(log, seq)) return;
    uint64_t count = load_relaxed(log->written);
    word *at = log->events + EVENT_WORDS * (count & log->mask);
    atomic_thread_fence(memory_order_release); /* `written` is stored before this event overwrites an older one */
    store_relaxed(at, seq << 8 | kind);
    store_relaxed(at + 1, sender);
    store_relaxed(at + 2, begin);
    store_relaxed(at + 3, middle);
    store_relaxed(at + 4, end);
    store_relaxed(at + 5, nbytes);
    store_relaxed(at + 6, log->member);
    store_relaxed(at + 7, log->pid);
    CRASH_POINT("trace.stored");
    store(log->written, count + 1); /* pairs with the tracer's two loads of it */
}
