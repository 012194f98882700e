#include "writer.h"

#include <stdlib.h>
#include <string.h>

int writer_ring_init(writer_ring *r, const ring *shared) {
    *r = (writer_ring){.shared = *shared};
    r->messages = calloc(shared->slots, sizeof *r->messages);
    r->first = malloc(shared->slots * sizeof *r->first);
    if (!r->messages || !r->first) {
        writer_ring_free(r);
        return -1;
    }
    for (uint64_t slot = 0; slot < shared->slots; slot++) r->first[slot] = FREE_SLOT;
    return 0;
}

void writer_ring_free(writer_ring *r) {
    free(r->messages);
    free(r->first);
    r->messages = NULL;
    r->first = NULL;
}

/* --- which slots are free ------------------------------------------------------------------------------------------- */

static void put_message(writer_ring *r, uint64_t slot, const message_in_flight *f) {
    r->messages[slot] = *f;
    for (uint64_t i = 0; i < f->span; i++) r->first[slot + i] = (uint32_t)slot;
}

static void drop_message(writer_ring *r, uint64_t slot) {
    uint64_t span = r->messages[slot].span;
    for (uint64_t i = 0; i < span; i++) r->first[slot + i] = FREE_SLOT;
}

/* Fan-out: whether every recipient has given a message back. The word of one that has is not read again. */
static int all_gave_back(const writer *w, const ring *shared, message_in_flight *f, uint64_t slot) {
    for (int i = 0; i < MEMBER_WORDS; i++)
        while (f->waits.bits[i]) {
            int bit = __builtin_ctzll(f->waits.bits[i]);
            uint32_t member = (uint32_t)(i * 64 + bit);
            uint64_t lease = load(lease_word(shared, member, slot)); /* pairs with the store that ends a lease */
            int gone = lease == 2 * f->seq + 1 || ((lease & LEASE) != 2 * f->seq && member_in(&w->leaving, member));
            if (!gone) return 0;
            f->waits.bits[i] &= ~((uint64_t)1 << bit);
        }
    return 1;
}

/* Work queue: whether the sender has yet to read the verdict on a message. */
static int is_unjudged(const writer *w, const ring *shared, const message_in_flight *f, uint64_t slot) {
    return w->checks_verdicts && !f->judged && load(state_of(shared, slot) + VERDICT) >> 8 == f->seq;
}

/* Whether a message's slots may be used again. A message that receivers may hold by a shared lock is taken back, from those
 * that have not taken it yet; with `look` it is not, and only whether that is possible is returned. */
static int is_free(const writer *w, writer_ring *r, uint64_t slot, int look) {
    message_in_flight *f = &r->messages[slot];
    if (f->lent) return 0;
    if (!f->seq) return 1; /* never published */
    if (w->competing) {
        return load(state_of(&r->shared, slot) + RELEASED) == f->seq && !is_unjudged(w, &r->shared, f, slot);
    }
    if (!all_gave_back(w, &r->shared, f, slot)) return 0;
    if (w->history && f->seq + w->history > published(&w->table)) return 0;
    if (!f->lockable) return 1;
    if (look) return held_by_other(w->lock_fd, f->seq) == 0;
    if (set_lock(w->lock_fd, LOCK_EXCLUSIVE, f->seq)) return 0;
    store(record_of(&r->shared, slot), 0); /* under the lock: a receiver that locks it next finds no message */
    CRASH_POINT("takeback.cleared");
    set_lock(w->lock_fd, UNLOCK, f->seq);
    return 1;
}

/* The slot at which a search begins: slot 0 if it is free, else the one after the last used. If receivers keep up, few slots are
 * used, which stay in the caches. If messages can be taken back, the oldest comes first. */
static uint64_t first_look(const writer *w, writer_ring *r) {
    uint32_t slot = r->first[0];
    return slot == FREE_SLOT || (!r->messages[slot].lockable && is_free(w, r, slot, 1)) ? 0 : r->cursor;
}

/* The first of `span` consecutive free slots at or after `first_look`, wrapping once, after at most so many busy ones; -1: there are
 * none. */
static int64_t find(const writer *w, writer_ring *r, uint64_t span, int look, uint64_t busy) {
    uint64_t slots = r->shared.slots, run = 0, slot = first_look(w, r);
    if (span > slots) return -1;
    if (slot + span > slots) slot = 0;
    for (uint64_t steps = 0; steps < slots + span; steps++) {
        if (slot == slots) slot = run = 0;
        uint32_t first = r->first[slot];
        if (first != FREE_SLOT) {
            if (!is_free(w, r, first, look)) {
                if (!busy--) return -1;
                run = 0;
                slot++;
                continue;
            }
            if (!look) drop_message(r, first);
        }
        run++;
        slot++;
        if (run == span) {
            if (!look) r->cursor = slot < slots ? slot : 0;
            return (int64_t)(slot - span);
        }
    }
    return -1;
}

/* Whether ring `a` fits a message of `nbytes` better than `b`: slots that are large enough come first, then the closest size. */
static int fits_better(const ring *a, const ring *b, uint64_t nbytes) {
    int small_a = a->slot_bytes < nbytes, small_b = b->slot_bytes < nbytes;
    uint64_t off_a = small_a ? nbytes - a->slot_bytes : a->slot_bytes - nbytes;
    uint64_t off_b = small_b ? nbytes - b->slot_bytes : b->slot_bytes - nbytes;
    return small_a != small_b ? small_a < small_b : off_a < off_b;
}

/* The indices of the rings of these sizes that can hold a message, the one that fits best first. Returns their number. */
static uint32_t fitting(const writer *w, uint64_t nbytes, slot_sizes sizes, uint32_t *order) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < w->nrings; i++) {
        const ring *r = &w->rings[i].shared;
        uint64_t span = span_of(r, nbytes);
        if (r->slot_bytes < sizes.least || r->slot_bytes > sizes.most) continue;
        if (span > 1 && (span > r->slots || w->history)) continue; /* with history each message takes one slot, so that one stays free */
        uint32_t at = count++;
        for (; at && fits_better(r, &w->rings[order[at - 1]].shared, nbytes); at--) order[at] = order[at - 1];
        order[at] = i;
    }
    return count;
}

static int search_ring(writer *w, uint32_t index, uint64_t nbytes, int look, uint64_t busy, allocation *out) {
    writer_ring *r = &w->rings[index];
    uint64_t span = span_of(&r->shared, nbytes);
    int64_t slot = find(w, r, span, look, busy);
    if (slot < 0) return 0;
    *out = (allocation){index, (uint32_t)slot, span};
    if (!look) w->last = index;
    return 1;
}

enum { FEW = 4 };

/* Search the rings for free slots. Most of several rings may be full: all slots are checked only if the first ones are busy in the
 * ring that fits best, and in an equally good ring that was used last. */
static int search(writer *w, uint64_t nbytes, slot_sizes sizes, int look, allocation *out) {
    uint32_t order[MOST_RINGS], count = fitting(w, nbytes, sizes, order), last = w->last;
    if (count > 1) {
        if (search_ring(w, order[0], nbytes, look, FEW, out)) return 1;
        if (last != order[0] && w->rings[last].shared.slot_bytes == w->rings[order[0]].shared.slot_bytes &&
            search_ring(w, last, nbytes, look, FEW, out))
            return 1;
    }
    for (uint32_t i = 0; i < count; i++)
        if (search_ring(w, order[i], nbytes, look, UINT64_MAX, out)) return 1;
    return 0;
}

int writer_has_room(writer *w, uint64_t nbytes, slot_sizes sizes) {
    allocation found;
    return search(w, nbytes, sizes, 1, &found);
}

int writer_may_have_room(writer *w) {
    for (uint32_t i = 0; i < w->nrings; i++) {
        writer_ring *r = &w->rings[i];
        uint32_t slot = r->first[first_look(w, r)];
        if (slot == FREE_SLOT || is_free(w, r, slot, 1)) return 1;
    }
    return 0;
}

int writer_acquire(writer *w, uint64_t nbytes, slot_sizes sizes, allocation *out) {
    /* a message that latest-only receivers may still take is dropped only if a newer one replaces it */
    if (w->lockable && !writer_has_room(w, nbytes, sizes)) return 0;
    if (!search(w, nbytes, sizes, 0, out)) return 0;
    writer_ring *r = &w->rings[out->ring];
    message_in_flight writing = {.span = out->span};
    put_message(r, out->slot, &writing);
    store(record_of(&r->shared, out->slot), 0); /* no receiver takes the old record for a new one */
    atomic_thread_fence(memory_order_release);  /* the store above comes before all later writes to record and payload */
    return 1;
}

void writer_discard(writer *w, const allocation *at) { drop_message(&w->rings[at->ring], at->slot); }

void writer_lend(writer *w, const allocation *at) { w->rings[at->ring].messages[at->slot].lent = 1; }

void writer_returned(writer *w, const allocation *at) {
    writer_ring *r = &w->rings[at->ring];
    if (r->first[at->slot] == at->slot) r->messages[at->slot].lent = 0;
}

void writer_judge(writer *w, uint32_t ring_index, uint32_t slot) {
    writer_ring *r = &w->rings[ring_index];
    if (r->first[slot] == slot) r->messages[slot].judged = 1;
}

void writer_welcome(writer *w, uint32_t member, uint64_t start) {
    for (uint32_t i = 0; i < w->nrings; i++) {
        writer_ring *r = &w->rings[i];
        for (uint64_t slot = 0; slot < r->shared.slots; slot++)
            if (r->first[slot] == slot && r->messages[slot].seq >= start) member_add(&r->messages[slot].waits, member);
    }
}

/* --- publication ---------------------------------------------------------------------------------------------------- */

uint64_t writer_publish(writer *w, const allocation *at, uint64_t nbytes, const void *description, uint32_t length,
                        int lent) {
    writer_ring *r = &w->rings[at->ring];
    word *record = record_of(&r->shared, at->slot);
    uint64_t seq = published(&w->table) + 1, body[RECORD_WORDS - 2] = {0};
    record_head head = {
        .version = RECORD_VERSION,
        .flags = length > INLINE_BYTES ? SPILLED : 0,
        .ring = r->shared.index,
        .slot = at->slot,
        .span = (uint32_t)at->span,
        .length = length,
        .nbytes = nbytes,
    };
    uint64_t words = sizeof head / 8;
    memcpy(body, &head, sizeof head);
    if (length <= INLINE_BYTES) {
        memcpy((char *)body + sizeof head, description, length);
        words += (length + 7u) / 8;
    } else if (description)
        memcpy(writer_payload(w, at) + padded(nbytes), description, length);
    store_relaxed(record + 1, monotonic_ns());
    for (uint64_t i = 0; i < words; i++) store_relaxed(record + 2 + i, body[i]);
    CRASH_POINT("publish.record");
    store(record, seq);
    store(entry_of(&w->table, seq), (uint64_t)r->shared.index << 32 | at->slot);
    CRASH_POINT("publish.ordered");
    message_in_flight *f = &r->messages[at->slot];
    f->seq = seq;
    f->waits = w->recipients;
    f->lockable = (uint8_t)w->lockable;
    f->lent = (uint8_t)lent;
    store(w->table.words + T_PUBLISHED, seq); /* pairs with the readers' load of `published` */
    CRASH_POINT("publish.published");
    return seq;
}

/* --- events --------------------------------------------------------------------------------------------------------- */

void writer_forget(writer *w, uint32_t member) {
    member_remove(&w->recipients, member);
    member_remove(&w->leaving, member);
    for (uint32_t i = 0; i < w->nrings; i++) {
        writer_ring *r = &w->rings[i];
        for (uint64_t slot = 0; slot < r->shared.slots; slot++)
            if (r->first[slot] == slot) member_remove(&r->messages[slot].waits, member);
    }
}

int writer_reclaim(writer *w) {
    int freed = 0;
    for (uint32_t i = 0; i < w->nrings; i++) {
        writer_ring *r = &w->rings[i];
        for (uint64_t slot = 0; slot < r->shared.slots; slot++) {
            const message_in_flight *f = &r->messages[slot];
            if (r->first[slot] != slot || f->lent || !f->seq || is_unjudged(w, &r->shared, f, slot)) continue;
            /* `done` before the lock: the other way round, it could be claimed, and done with views alive, in between */
            if (load(state_of(&r->shared, slot) + DONE) != f->seq || held_by_other(w->lock_fd, f->seq) != 0) continue;
            drop_message(r, slot);
            freed = 1;
        }
    }
    return freed;
}

int writer_is_settled(const writer *w, const members *local) {
    for (uint32_t i = 0; i < w->nrings; i++) {
        writer_ring *r = &w->rings[i];
        for (uint64_t slot = 0; slot < r->shared.slots; slot++) {
            const message_in_flight *f = &r->messages[slot];
            if (r->first[slot] != slot || !f->seq) continue;
            if (w->competing) {
                if (load(state_of(&r->shared, slot) + DONE) != f->seq) return 0;
                continue;
            }
            for (uint32_t member = 0; member < MOST_MEMBERS; member++) {
                if (!member_in(&f->waits, member) || member_in(&w->leaving, member) || member_in(local, member)) continue;
                uint64_t lease = load(lease_word(&r->shared, member, slot)), attempt = lease >> ATTEMPT_SHIFT;
                if ((lease & LEASE) < 2 * f->seq || (attempt && attempt != GROUP_DONE)) return 0; /* claimed, and not done */
            }
        }
    }
    return 1;
}

uint64_t writer_free_slots(writer *w, uint32_t ring_index) {
    writer_ring *r = &w->rings[ring_index];
    uint64_t count = 0;
    for (uint64_t slot = 0; slot < r->shared.slots; slot++) {
        uint32_t first = r->first[slot];
        count += first == FREE_SLOT || is_free(w, r, first, 1);
    }
    return count;
}

uint64_t writer_in_flight(const writer *w) {
    uint64_t count = 0;
    for (uint32_t i = 0; i < w->nrings; i++)
        for (uint64_t slot = 0; slot < w->rings[i].shared.slots; slot++) {
            const message_in_flight *f = &w->rings[i].messages[slot];
            if (w->rings[i].first[slot] == slot && (f->seq || f->lent) && !is_free(w, &w->rings[i], slot, 1)) count += f->span;
        }
    return count;
}
