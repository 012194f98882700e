#include "reader.h"

#include <stdlib.h>
#include <string.h>

int reader_ring_init(reader_ring *r, const ring *shared) {
    *r = (reader_ring){.shared = *shared, .held = calloc(shared->slots, sizeof(uint64_t))};
    return r->held ? 0 : -1;
}

void reader_ring_free(reader_ring *r) {
    free(r->held);
    r->held = NULL;
}

/* --- which message comes next --------------------------------------------------------------------------------------- */

/* The newest message. While there are others before it, the word that the sender stores for each is left alone. */
static uint64_t newest_of(feed *f) {
    if (f->seen <= f->position || f->mode == FEED_LATEST) {
        f->seen = published(&f->table);
        if (f->seen >= MOST_MESSAGES) f->seen = 0; /* damaged */
    }
    return f->seen;
}

/* Whether the producer counts this receiver; asked after `published` was read: docs/internals/protocols.md, section 2. */
static int has_started(feed *f) {
    if (f->start) return 1;
    const word *said = f->table.words + T_MEMBERS + 2 * (uint64_t)f->member;
    if (load(said + 1) != f->member_uid) return 0; /* pairs with the producer's store of it, after the start */
    f->start = load(said);
    uint64_t before = f->start - 1;
    if (!f->history || before > f->position) f->position = before;
    return 1;
}

void feed_begin(feed *f) {
    uint64_t newest = published(&f->table); /* before `start` is asked for */
    if (!has_started(f)) f->position = newest > f->history ? newest - f->history : 0;
}

uint64_t feed_next(feed *f) {
    uint64_t newest = newest_of(f);
    switch (f->mode) {
    case FEED_ALL:
        if (!has_started(f) && !f->history) f->position = newest; /* sent before the producer saw this receiver */
        if (newest > f->position && newest - f->position > f->table.mask) f->position = newest - f->table.mask; /* damaged */
        return newest > f->position ? f->position + 1 : 0;
    case FEED_LATEST:
        if (f->history || (has_started(f) && newest >= f->start)) return newest > f->position ? newest : 0;
        if (newest > f->position) f->position = newest; /* the producer takes these back without asking */
        return 0;
    default:
        if (newest <= f->position) return 0;
        if (newest - f->position > f->table.mask) f->position = newest - f->table.mask; /* others took what was there */
        return f->position + 1;
    }
}

/* --- records -------------------------------------------------------------------------------------------------------- */

typedef enum { FOUND, GONE, DAMAGED, OTHER_VERSION, UNKNOWN_RING } found;

/* Whether a head may stand at this place of such a ring: wire/record.py, `check_head`. */
static int is_valid(const record_head *head, const ring *r, uint64_t slot) {
    if (head->version != RECORD_VERSION || head->ring != r->index || head->slot != slot) return 0;
    if (head->flags & ~SPILLED || head->reserved) return 0;
    if (head->span < 1 || head->span > r->slots - slot) return 0;
    if (!head->flags && head->length > INLINE_BYTES) return 0;
    uint64_t room = head->span * r->slot_bytes;
    if (head->nbytes > room) return 0;
    return !head->flags || (padded(head->nbytes) <= room && head->length <= room - padded(head->nbytes));
}

/* The first record of a producer: whether this library reads what it sends at all. */
static found check_first(feed *f, const ring *r, uint64_t slot, taken *out) {
    out->other = 0;
    if (out->head.version != RECORD_VERSION) return OTHER_VERSION;
    if (!is_valid(&out->head, r, slot)) return DAMAGED;
    if (out->head.length) out->other = *description_of(f, out);
    if (f->description_version && out->other != f->description_version)
        return load(record_of(r, slot)) == out->seq ? OTHER_VERSION : GONE; /* one behind the payload may be a newer one's */
    f->known = 1;
    return FOUND;
}

/* Copy message `seq`'s record, if it is still that. */
static found read_record(feed *f, uint64_t seq, uint64_t ring_index, uint64_t slot, taken *out) {
    const ring *r = &f->rings[ring_index].shared;
    if (slot >= r->slots) return DAMAGED;
    const word *record = record_of(r, slot);
    if (load(record) != seq) return GONE;
    uint64_t head[sizeof out->head / 8];
    out->sent_ns = load_relaxed(record + 1);
    for (size_t i = 0; i < sizeof head / 8; i++) head[i] = load_relaxed(record + 2 + i);
    memcpy(&out->head, head, sizeof head);
    uint32_t length = out->head.length < INLINE_BYTES ? out->head.length : INLINE_BYTES;
    for (uint32_t i = 0; i < (length + 7) / 8; i++) out->description[i] = load_relaxed(record + 2 + sizeof head / 8 + i);
    atomic_thread_fence(memory_order_acquire); /* what was read above is of `seq`, if it still stands there */
    if (load_relaxed(record) != seq) return GONE;
    out->seq = seq;
    out->ring = (uint32_t)ring_index;
    out->slot = (uint32_t)slot;
    if (!f->known) return check_first(f, r, slot, out);
    return is_valid(&out->head, r, slot) ? FOUND : DAMAGED;
}

static found locate(feed *f, uint64_t seq, taken *out) {
    uint64_t entry = load(entry_of(&f->table, seq));
    out->seq = seq;
    out->ring = (uint32_t)(entry >> 32);
    out->slot = (uint32_t)entry;
    if (entry >> 32 >= f->nrings) return entry >> 32 < load(f->table.words + T_RINGS) && entry >> 32 < MOST_RINGS ? UNKNOWN_RING : DAMAGED;
    return read_record(f, seq, entry >> 32, entry & UINT32_MAX, out);
}

/* The record after the one that was taken, on its way into this processor's cache while the caller looks at this one. */
static void prefetch_next(const feed *f) {
    if (f->seen <= f->position) return;
    uint64_t entry = load(entry_of(&f->table, f->position + 1)), slot = entry & UINT32_MAX;
    if (entry >> 32 >= f->nrings || slot >= f->rings[entry >> 32].shared.slots) return;
    const word *record = record_of(&f->rings[entry >> 32].shared, slot);
    __builtin_prefetch((const void *)record);
    __builtin_prefetch((const void *)(record + 8));
}

static int is_current(const feed *f, const taken *at) {
    if (at->ring >= f->nrings || at->slot >= f->rings[at->ring].shared.slots) return 1;
    return load(record_of(&f->rings[at->ring].shared, at->slot)) == at->seq;
}

/* --- fan-out -------------------------------------------------------------------------------------------------------- */

/* Hold a message that its producer may take back. 0: it is gone. */
static int lock_shared(feed *f, const taken *at) {
    if (set_lock(f->lock_fd, LOCK_SHARED, at->seq)) return 0;
    CRASH_POINT("take.shared");
    if (load(record_of(&f->rings[at->ring].shared, at->slot)) == at->seq) return 1;
    set_lock(f->lock_fd, UNLOCK, at->seq);
    f->contended = 1;
    return 0;
}

static void give_unread(feed *f, const taken *at) {
    if (f->mode == FEED_ALL && f->start && at->ring < f->nrings && at->slot < f->rings[at->ring].shared.slots)
        store(lease_word(&f->rings[at->ring].shared, f->member, at->slot), 2 * at->seq + 1);
}

static take_result take_broadcast(feed *f, taken *out) {
    uint64_t seq;
    while ((seq = feed_next(f))) {
        uint64_t missed = seq - f->position - 1;
        found where = locate(f, seq, out);
        if (where == UNKNOWN_RING) return TAKE_ATTACH;
        if (where == OTHER_VERSION) return TAKE_OTHER;
        if (where == DAMAGED && is_current(f, out)) {
            f->position = seq;
            give_unread(f, out);
            return TAKE_DAMAGED;
        }
        int must_lock = f->mode == FEED_LATEST || !f->start;
        CRASH_POINT("take.found");
        if (where == FOUND && (!must_lock || lock_shared(f, out))) {
            reader_ring *r = &f->rings[out->ring];
            if (f->mode == FEED_ALL) store(lease_word(&r->shared, f->member, out->slot), 2 * seq);
            CRASH_POINT("take.leased");
            r->held[out->slot] = seq;
            f->position = seq;
            out->missed = f->mode == FEED_LATEST ? missed : 0;
            out->attempt = 1;
            out->locked = (uint8_t)must_lock;
            return TAKE_TAKEN;
        }
        /* not ours: the producer took it back */
        if (f->mode == FEED_ALL) f->position = seq;
        else if (published(&f->table) == seq) { /* and has published nothing newer */
            f->position = seq;
            out->missed = missed + 1;
            return TAKE_RETRY;
        }
    }
    return TAKE_NOTHING;
}

/* --- work queue ----------------------------------------------------------------------------------------------------- */

typedef enum { CLAIM_MINE, CLAIM_OTHERS } claim_result;

/* Lock the message and count the attempt. */
static claim_result claim(feed *f, taken *at) {
    reader_ring *r = &f->rings[at->ring];
    word *state = state_of(&r->shared, at->slot);
    if (r->held[at->slot] == at->seq) return CLAIM_OTHERS; /* a lock of our own would be granted again */
    CRASH_POINT("claim.found");
    if (set_lock(f->lock_fd, LOCK_EXCLUSIVE, at->seq)) return CLAIM_OTHERS;
    CRASH_POINT("claim.locked");
    /* `done` before `seq`: the other way round, the slot could be reused, and done for its next message, in between */
    if (load(state + DONE) >= at->seq || load(record_of(&r->shared, at->slot)) != at->seq) {
        set_lock(f->lock_fd, UNLOCK, at->seq);
        return CLAIM_OTHERS;
    }
    uint64_t before = load(state + ATTEMPT);
    uint64_t attempt = (before >> 8 == at->seq ? before & 0xFF : 0) + 1;
    store(state + ATTEMPT, at->seq << 8 | (attempt < 255 ? attempt : 255));
    store(state + CLAIMED, at->seq);
    CRASH_POINT("claim.stored");
    r->held[at->slot] = at->seq;
    at->attempt = (uint32_t)attempt;
    at->locked = 1;
    at->missed = 0;
    return CLAIM_MINE;
}

/* Finish a claimed message that nobody gets. */
static void finish(feed *f, const taken *at) {
    reader_ring *r = &f->rings[at->ring];
    word *state = state_of(&r->shared, at->slot);
    store(state + DONE, at->seq);
    store(state + RELEASED, at->seq);
    r->held[at->slot] = 0;
    set_lock(f->lock_fd, UNLOCK, at->seq);
}

static take_result delivered(feed *f, taken *out) {
    if (out->attempt <= f->most_attempts) return TAKE_TAKEN;
    finish(f, out);
    out->attempt = 0;
    return TAKE_DAMAGED;
}

static int is_open(const feed *f, const taken *at, int walking) {
    const word *state = state_of(&f->rings[at->ring].shared, at->slot);
    return load(state + DONE) != at->seq && !(walking && load(state + CLAIMED) == at->seq);
}

static take_result take_competing(feed *f, taken *out) {
    uint64_t seq;
    while ((seq = feed_next(f))) {
        found where = locate(f, seq, out);
        if (where == UNKNOWN_RING) return TAKE_ATTACH;
        if (where == OTHER_VERSION) return TAKE_OTHER;
        f->position = seq;
        if (where == DAMAGED) {
            if (out->ring < f->nrings && out->slot < f->rings[out->ring].shared.slots && is_open(f, out, 0) &&
                claim(f, out) == CLAIM_MINE)
                finish(f, out);
            out->attempt = 1;
            return TAKE_DAMAGED;
        }
        if (where == FOUND && is_open(f, out, 1) && claim(f, out) == CLAIM_MINE) return delivered(f, out);
    }
    return TAKE_NOTHING;
}

take_result feed_take(feed *f, taken *out) {
    take_result result = f->mode == FEED_COMPETING ? take_competing(f, out) : take_broadcast(f, out);
    if (result == TAKE_TAKEN) prefetch_next(f);
    return result;
}

take_result feed_take_one(feed *f, uint64_t seq, taken *out) {
    found where = locate(f, seq, out);
    if (where == UNKNOWN_RING) return TAKE_ATTACH;
    if (where == OTHER_VERSION) return TAKE_OTHER;
    out->attempt = 1;
    if (where == DAMAGED) return is_current(f, out) ? TAKE_DAMAGED : TAKE_NOTHING;
    if (where == GONE || claim(f, out) != CLAIM_MINE) return TAKE_NOTHING;
    if (f->position < seq) f->position = seq;
    return delivered(f, out);
}

uint64_t feed_age(feed *f) {
    uint64_t seq;
    taken at;
    while ((seq = feed_next(f))) {
        found where = locate(f, seq, &at);
        if (where == FOUND && is_open(f, &at, 1)) return at.sent_ns;
        if (where != FOUND && where != GONE) return 0;
        f->position = seq;
    }
    return UINT64_MAX;
}

take_result feed_scan(feed *f, taken *out) {
    uint64_t newest = published(&f->table);
    if (newest >= MOST_MESSAGES) return TAKE_NOTHING; /* damaged */
    for (;;) {
        uint64_t oldest = 0;
        taken candidate = {0};
        for (uint32_t i = 0; i < f->nrings; i++)
            for (uint64_t slot = 0; slot < f->rings[i].shared.slots; slot++) {
                const ring *r = &f->rings[i].shared;
                uint64_t seq = load(record_of(r, slot));
                if (seq <= f->scanned || seq > newest || seq > f->position || (oldest && seq >= oldest)) continue;
                if (load(state_of(r, slot) + DONE) == seq) continue;
                oldest = seq;
                candidate = (taken){.seq = seq, .ring = i, .slot = (uint32_t)slot};
            }
        if (!oldest) return TAKE_NOTHING;
        f->scanned = oldest;
        *out = candidate;
        if (!f->known && read_record(f, oldest, candidate.ring, candidate.slot, out) == OTHER_VERSION) return TAKE_OTHER;
        if (!is_open(f, out, 0) || claim(f, out) != CLAIM_MINE) continue;
        uint32_t attempt = out->attempt;
        found where = read_record(f, oldest, candidate.ring, candidate.slot, out);
        out->attempt = attempt;
        if (where == FOUND) return delivered(f, out);
        finish(f, out);
        return TAKE_DAMAGED;
    }
}

void feed_acknowledge(feed *f, uint32_t ring_index, uint32_t slot, uint64_t seq) {
    CRASH_POINT("done.before");
    store(state_of(&f->rings[ring_index].shared, slot) + DONE, seq);
    CRASH_POINT("done.stored");
}

/* --- giving back ---------------------------------------------------------------------------------------------------- */

enum { MOST_KEPT = 64 }; /* locks of finished messages */

void feed_unlock_finished(feed *f) {
    if (f->kept_from) unlock_all(f->lock_fd, f->kept_from, f->kept_to);
    f->kept_from = f->kept_to = 0;
}

/* A finished message's lock stands in nobody's way: the next message in its slot has a byte of its own. */
static void unlock_later(feed *f, uint64_t seq) {
    if (f->kept_from && seq == f->kept_to + 1) f->kept_to = seq;
    else {
        feed_unlock_finished(f);
        f->kept_from = f->kept_to = seq;
    }
    if (f->kept_to - f->kept_from + 1 >= MOST_KEPT) feed_unlock_finished(f);
}

int feed_give_back(feed *f, uint32_t ring_index, uint32_t slot, uint64_t seq, int locked, int done) {
    reader_ring *r = &f->rings[ring_index];
    CRASH_POINT("release.ended");
    if (r->held[slot] == seq) r->held[slot] = 0;
    if (f->mode == FEED_COMPETING) {
        if (done) {
            store(state_of(&r->shared, slot) + RELEASED, seq);
            CRASH_POINT("release.stored");
        }
    } else if (f->mode == FEED_ALL) {
        store(lease_word(&r->shared, f->member, slot), 2 * seq + 1); /* pairs with the load in the writer's search */
        CRASH_POINT("release.stored");
    }
    if (locked && done && f->mode == FEED_COMPETING) unlock_later(f, seq);
    else if (locked) set_lock(f->lock_fd, UNLOCK, seq);
    atomic_signal_fence(memory_order_seq_cst); /* the processor's part of this fence is paid by who goes to sleep */
    return load(f->asleep) & 1;
}

int feed_drop(feed *f, const taken *message) {
    if (f->mode == FEED_COMPETING) {
        finish(f, message);
        return load(f->asleep) & 1;
    }
    return feed_give_back(f, message->ring, message->slot, message->seq, message->locked, 0);
}

void feed_untake(feed *f, const taken *message) {
    reader_ring *r = &f->rings[message->ring];
    r->held[message->slot] = 0;
    if (f->mode == FEED_COMPETING) {
        word *state = state_of(&r->shared, message->slot);
        if (load(state + DONE) != message->seq) store(state + ATTEMPT, message->seq << 8 | (message->attempt - 1));
    } else if (f->mode == FEED_ALL)
        store(lease_word(&r->shared, f->member, message->slot), 0); /* as before it was taken */
    if (message->locked) set_lock(f->lock_fd, UNLOCK, message->seq);
    if (f->mode != FEED_COMPETING && f->position == message->seq) f->position = message->seq - 1;
}
