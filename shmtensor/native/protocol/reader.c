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

/* The newest message. While older ones are not taken yet, `published` is not loaded: its cache line stays with the sender. */
static uint64_t newest_of(reader *f) {
    if (f->seen <= f->position || f->mode == READER_LATEST) {
        f->seen = published(&f->table);
        if (f->seen >= MOST_MESSAGES) f->seen = 0; /* damaged */
    }
    return f->seen;
}

/* Whether the producer counts this receiver. Call it after reading `published`: docs/internals/protocols.md, section 2. */
static int has_started(reader *f) {
    if (f->start) return 1;
    const word *entry = f->table.words + T_MEMBERS + 2 * (uint64_t)f->recipient;
    if (load(entry + 1) != f->recipient_uid) return 0; /* pairs with the producer's store of it, after the start */
    f->start = load(entry);
    uint64_t before = f->start - 1;
    if (!f->history || before > f->position) f->position = before;
    return 1;
}

void reader_begin(reader *f) {
    uint64_t newest = published(&f->table); /* before `start` is read */
    if (!has_started(f)) f->position = newest > f->history ? newest - f->history : 0;
}

/* Of a newest-only reader with `newest` > `position`: the oldest message that it may still take. */
static uint64_t oldest_wanted(const reader *f, uint64_t newest) {
    uint64_t from = newest > f->depth ? newest - f->depth : 0;
    if (from < f->position) from = f->position;
    if (from < f->lost && f->lost < newest) from = f->lost;
    return from + 1;
}

uint64_t reader_next(reader *f) {
    uint64_t newest = newest_of(f);
    switch (f->mode) {
    case READER_ALL:
    case READER_GROUP:
        if (!has_started(f) && !f->history) f->position = newest; /* sent before the producer saw this receiver */
        if (newest > f->position && newest - f->position > f->table.mask) f->position = newest - f->table.mask; /* damaged */
        return newest > f->position ? f->position + 1 : 0;
    case READER_LATEST:
        if (!f->history && !(has_started(f) && newest >= f->start)) {
            if (newest > f->position) f->position = newest; /* the producer reuses their slots without trying the lock */
            return 0;
        }
        return newest > f->position ? oldest_wanted(f, newest) : 0;
    default:
        if (newest <= f->position) return 0;
        if (newest - f->position > f->table.mask) f->position = newest - f->table.mask; /* others took those messages */
        return f->position + 1;
    }
}

/* --- records -------------------------------------------------------------------------------------------------------- */

typedef enum { FOUND, GONE, DAMAGED, OTHER_VERSION, UNKNOWN_RING } found;

/* Whether a head is valid at this slot of the ring: wire/record.py, `check_head`. */
static int is_valid(const record_head *head, const ring *r, uint64_t slot) {
    if (head->version != RECORD_VERSION || head->ring != r->index || head->slot != slot) return 0;
    if (head->flags & ~SPILLED || head->reserved) return 0;
    if (head->span < 1 || head->span > r->slots - slot) return 0;
    if (!head->flags && head->length > INLINE_BYTES) return 0;
    uint64_t room = head->span * r->slot_bytes;
    if (head->nbytes > room) return 0;
    return !head->flags || (padded(head->nbytes) <= room && head->length <= room - padded(head->nbytes));
}

/* Read a byte that the producer may be overwriting, since nothing holds the message. Returns 0 if it may be a newer message's;
 * the caller then does not use it, which the thread sanitizer cannot know. */
__attribute__((no_sanitize("thread"), noinline)) static int peek(const unsigned char *at, const word *record, uint64_t seq, uint8_t *byte) {
    *byte = *(const volatile unsigned char *)at;
    atomic_thread_fence(memory_order_acquire);
    return load_relaxed(record) == seq;
}

/* Check the first record of a producer: whether its version is this library's. */
static found check_first(reader *f, const ring *r, uint64_t slot, taken *out) {
    out->other = 0;
    if (out->head.version != RECORD_VERSION) return OTHER_VERSION;
    if (!is_valid(&out->head, r, slot)) return DAMAGED;
    if (out->head.length && !peek(description_of(f, out), record_of(r, slot), out->seq, &out->other)) return GONE;
    if (f->description_version && out->other != f->description_version) return OTHER_VERSION;
    f->known = 1;
    return FOUND;
}

/* Copy the record of message `seq`, if it is still there. */
static found read_record(reader *f, uint64_t seq, uint64_t ring_index, uint64_t slot, taken *out) {
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
    atomic_thread_fence(memory_order_acquire); /* the words above belong to `seq` if the next load still finds it */
    if (load_relaxed(record) != seq) return GONE;
    out->seq = seq;
    out->ring = (uint32_t)ring_index;
    out->slot = (uint32_t)slot;
    if (!f->known) return check_first(f, r, slot, out);
    return is_valid(&out->head, r, slot) ? FOUND : DAMAGED;
}

static found locate(reader *f, uint64_t seq, taken *out) {
    uint64_t entry = load(entry_of(&f->table, seq));
    out->seq = seq;
    out->ring = (uint32_t)(entry >> 32);
    out->slot = (uint32_t)entry;
    if (entry >> 32 >= f->nrings) return entry >> 32 < load(f->table.words + T_RINGS) && entry >> 32 < MOST_RINGS ? UNKNOWN_RING : DAMAGED;
    return read_record(f, seq, entry >> 32, entry & UINT32_MAX, out);
}

/* Prefetch the record after the one that was taken into this processor's cache, while the caller handles the first. */
static void prefetch_next(const reader *f) {
    if (f->seen <= f->position) return;
    uint64_t entry = load(entry_of(&f->table, f->position + 1)), slot = entry & UINT32_MAX;
    if (entry >> 32 >= f->nrings || slot >= f->rings[entry >> 32].shared.slots) return;
    const word *record = record_of(&f->rings[entry >> 32].shared, slot);
    __builtin_prefetch((const void *)record);
    __builtin_prefetch((const void *)(record + 8));
}

static int is_current(const reader *f, const taken *at) {
    if (at->ring >= f->nrings || at->slot >= f->rings[at->ring].shared.slots) return 1;
    return load(record_of(&f->rings[at->ring].shared, at->slot)) == at->seq;
}

/* --- fan-out -------------------------------------------------------------------------------------------------------- */

/* Lock a message that its producer may take back. 0: it is gone. */
static int lock_shared(reader *f, const taken *at) {
    if (set_lock(f->lock_fd, LOCK_SHARED, at->seq)) return 0;
    CRASH_POINT("take.shared");
    if (load(record_of(&f->rings[at->ring].shared, at->slot)) == at->seq) return 1;
    set_lock(f->lock_fd, UNLOCK, at->seq);
    f->contended = 1;
    return 0;
}

static void give_unread(reader *f, const taken *at) {
    if (f->mode == READER_ALL && f->start && at->ring < f->nrings && at->slot < f->rings[at->ring].shared.slots)
        store(lease_word(&f->rings[at->ring].shared, f->member, at->slot), 2 * at->seq + 1);
}

static take_result take_broadcast(reader *f, taken *out) {
    uint64_t seq;
    while ((seq = reader_next(f))) {
        uint64_t missed = seq - f->position - 1;
        found where = locate(f, seq, out);
        if (where == UNKNOWN_RING) return TAKE_ATTACH;
        if (where == OTHER_VERSION) return TAKE_OTHER;
        if (where == DAMAGED && is_current(f, out)) {
            f->position = seq;
            give_unread(f, out);
            return TAKE_DAMAGED;
        }
        int must_lock = f->mode == READER_LATEST || !f->start;
        CRASH_POINT("take.found");
        if (where == FOUND && (!must_lock || lock_shared(f, out))) {
            reader_ring *r = &f->rings[out->ring];
            if (f->mode == READER_ALL) store(lease_word(&r->shared, f->member, out->slot), 2 * seq);
            CRASH_POINT("take.leased");
            r->held[out->slot] = seq;
            f->position = seq;
            out->missed = f->mode == READER_LATEST ? missed : 0;
            out->attempt = 1;
            out->locked = must_lock ? SHARED_LOCK : 0;
            return TAKE_TAKEN;
        }
        /* the producer took it back */
        if (f->mode == READER_ALL) f->position = seq;
        else if (f->lost = seq, published(&f->table) == seq) { /* and has published nothing newer */
            f->position = seq;
            out->missed = missed + 1;
            return TAKE_RETRY;
        }
    }
    return TAKE_NOTHING;
}

/* --- claims: work queue and group ----------------------------------------------------------------------------------- */

/* The byte that is locked to claim a message. */
static uint64_t claim_byte(const reader *f, uint64_t seq) {
    if (f->mode == READER_COMPETING) return seq;
    return ((uint64_t)f->recipient + 1) << GROUP_LOCK_SHIFT | (seq & (((uint64_t)1 << GROUP_LOCK_SHIFT) - 1));
}

/* Of a group: the word of a slot. */
static word *group_word(const reader *f, uint32_t ring_index, uint32_t slot) {
    return lease_word(&f->rings[ring_index].shared, f->recipient, slot);
}

typedef enum { UNCLAIMED, IS_CLAIMED, IS_DONE, IS_RELEASED } claim_state;

/* What the words say of message `at->seq`. IS_RELEASED as well if they speak of a later one. */
static claim_state state_at(const reader *f, const taken *at) {
    if (f->mode == READER_GROUP) {
        uint64_t it = load(group_word(f, at->ring, at->slot)), lease = it & LEASE;
        if (lease != 2 * at->seq) return lease < 2 * at->seq ? UNCLAIMED : IS_RELEASED;
        return it >> ATTEMPT_SHIFT == GROUP_DONE ? IS_DONE : IS_CLAIMED;
    }
    const word *state = state_of(&f->rings[at->ring].shared, at->slot);
    uint64_t done = load(state + DONE);
    if (done >= at->seq) return done == at->seq ? IS_DONE : IS_RELEASED;
    return load(state + CLAIMED) == at->seq ? IS_CLAIMED : UNCLAIMED;
}

/* The number of the next attempt to finish a message. */
static uint64_t next_attempt(const reader *f, const taken *at) {
    if (f->mode == READER_GROUP) {
        uint64_t it = load(group_word(f, at->ring, at->slot));
        return (it & LEASE) == 2 * at->seq ? (it >> ATTEMPT_SHIFT) + 1 : 1;
    }
    uint64_t it = load(state_of(&f->rings[at->ring].shared, at->slot) + ATTEMPT);
    return it >> 8 == at->seq ? (it & 0xFF) + 1 : 1;
}

/* Store that message `seq` was claimed so often; 0: that nobody has had it. */
static void store_attempt(const reader *f, uint32_t ring_index, uint32_t slot, uint64_t seq, uint64_t attempt) {
    if (f->mode == READER_GROUP) {
        uint64_t most = GROUP_DONE - 1;
        store(group_word(f, ring_index, slot), attempt ? (attempt < most ? attempt : most) << ATTEMPT_SHIFT | 2 * seq : 0);
        store(lease_word(&f->rings[ring_index].shared, f->member, slot), attempt ? 2 * seq : 0); /* to be seen: no producer waits for it */
        return;
    }
    word *state = state_of(&f->rings[ring_index].shared, slot);
    store(state + ATTEMPT, seq << 8 | (attempt < 255 ? attempt : 255));
    store(state + CLAIMED, attempt ? seq : 0);
}

static void store_done(const reader *f, uint32_t ring_index, uint32_t slot, uint64_t seq) {
    if (f->mode == READER_GROUP) store(group_word(f, ring_index, slot), (uint64_t)GROUP_DONE << ATTEMPT_SHIFT | 2 * seq);
    else store(state_of(&f->rings[ring_index].shared, slot) + DONE, seq);
}

static void store_released(const reader *f, uint32_t ring_index, uint32_t slot, uint64_t seq) {
    if (f->mode == READER_GROUP) store(group_word(f, ring_index, slot), 2 * seq + 1);
    else store(state_of(&f->rings[ring_index].shared, slot) + RELEASED, seq);
}

/* Lock the message and count the attempt. 0: others have it, or it is done. */
static int claim(reader *f, taken *at) {
    reader_ring *r = &f->rings[at->ring];
    uint64_t byte = claim_byte(f, at->seq);
    if (r->held[at->slot] == at->seq) return 0; /* the kernel would grant our own lock again */
    CRASH_POINT("claim.found");
    if (set_lock(f->lock_fd, LOCK_EXCLUSIVE, byte)) return 0;
    CRASH_POINT("claim.locked");
    /* the state before `seq`: the other way round, the slot could be reused, and done for its next message, in between */
    claim_state state = state_at(f, at);
    if (state == IS_DONE && f->mode == READER_GROUP) { /* who had it has died with a view: nobody else frees the slot */
        store_released(f, at->ring, at->slot, at->seq);
        f->contended = 1; /* the producer may wait for it */
    }
    int is_ours = state < IS_DONE && load(record_of(&r->shared, at->slot)) == at->seq;
    int must_share = is_ours && f->mode == READER_GROUP && !f->start; /* the producer may take it back */
    if (!is_ours || (must_share && !lock_shared(f, at))) {
        set_lock(f->lock_fd, UNLOCK, byte);
        return 0;
    }
    uint64_t attempt = next_attempt(f, at);
    store_attempt(f, at->ring, at->slot, at->seq, attempt);
    CRASH_POINT("claim.stored");
    r->held[at->slot] = at->seq;
    at->attempt = (uint32_t)attempt;
    at->locked = must_share ? CLAIM_LOCK | SHARED_LOCK : CLAIM_LOCK;
    at->missed = 0;
    return 1;
}

static void unlock(reader *f, uint64_t seq, int locked) {
    if (locked & SHARED_LOCK) set_lock(f->lock_fd, UNLOCK, seq);
    if (locked & CLAIM_LOCK) set_lock(f->lock_fd, UNLOCK, claim_byte(f, seq));
}

/* Finish a claimed message without delivering it. */
static void finish(reader *f, const taken *at) {
    store_done(f, at->ring, at->slot, at->seq);
    store_released(f, at->ring, at->slot, at->seq);
    f->rings[at->ring].held[at->slot] = 0;
    unlock(f, at->seq, at->locked);
}

static take_result delivered(reader *f, taken *out) {
    if (out->attempt <= f->most_attempts) return TAKE_TAKEN;
    finish(f, out);
    out->attempt = 0;
    return TAKE_DAMAGED;
}

/* Whether to try the lock: when walking, of messages that nobody has claimed; else of all that are not given back. */
static int is_open(const reader *f, const taken *at, int walking) {
    claim_state state = state_at(f, at);
    if (walking) return state == UNCLAIMED;
    return state < IS_DONE || (state == IS_DONE && f->mode == READER_GROUP);
}

/* Of a group: the first message that may be its own; a work queue's are all. */
static uint64_t first_of(reader *f, uint64_t newest) {
    if (f->mode == READER_COMPETING) return 1;
    if (has_started(f)) return f->start;
    return newest > f->history ? newest - f->history + 1 : 1;
}

static take_result take_competing(reader *f, taken *out) {
    uint64_t seq;
    while ((seq = reader_next(f))) {
        found where = locate(f, seq, out);
        if (where == UNKNOWN_RING) return TAKE_ATTACH;
        if (where == OTHER_VERSION) return TAKE_OTHER;
        f->position = seq;
        if (where == DAMAGED) {
            if (out->ring < f->nrings && out->slot < f->rings[out->ring].shared.slots && is_open(f, out, 0) && claim(f, out))
                finish(f, out);
            out->attempt = 1;
            return TAKE_DAMAGED;
        }
        if (where == FOUND && is_open(f, out, 1) && claim(f, out)) return delivered(f, out);
    }
    return TAKE_NOTHING;
}

take_result reader_take(reader *f, taken *out) {
    take_result result = claims(f) ? take_competing(f, out) : take_broadcast(f, out);
    if (result == TAKE_TAKEN) prefetch_next(f);
    return result;
}

take_result reader_take_one(reader *f, uint64_t seq, taken *out) {
    found where = locate(f, seq, out);
    if (where == UNKNOWN_RING) return TAKE_ATTACH;
    if (where == OTHER_VERSION) return TAKE_OTHER;
    out->attempt = 1;
    if (where == DAMAGED) return is_current(f, out) ? TAKE_DAMAGED : TAKE_NOTHING;
    if (where == GONE || !claim(f, out)) return TAKE_NOTHING;
    if (f->position < seq) f->position = seq;
    return delivered(f, out);
}

int reader_read_again(reader *f, uint32_t ring_index, uint32_t slot, uint64_t seq, taken *out) {
    return read_record(f, seq, ring_index, slot, out) == FOUND;
}

uint64_t reader_age(reader *f) {
    uint64_t seq;
    taken at;
    while ((seq = reader_next(f))) {
        found where = locate(f, seq, &at);
        if (where == FOUND && is_open(f, &at, 1)) return at.sent_ns;
        if (where != FOUND && where != GONE) return 0;
        f->position = seq;
    }
    return UINT64_MAX;
}

typedef struct {
    uint64_t seq;
    uint32_t ring, slot;
} place;

enum { MOST_FOUND = 64 };

/* The oldest messages after `scanned`, up to `newest`, that are neither finished nor held here: in order. Returns how many. */
static uint32_t find_unfinished(reader *f, uint64_t newest, place *found) {
    uint64_t first = first_of(f, newest);
    uint32_t count = 0;
    taken at;
    if (newest > f->position) newest = f->position;
    for (at.ring = 0; at.ring < f->nrings; at.ring++) {
        const reader_ring *r = &f->rings[at.ring];
        for (at.slot = 0; at.slot < r->shared.slots; at.slot++) {
            at.seq = load(record_of(&r->shared, at.slot));
            if (at.seq <= f->scanned || at.seq < first || at.seq > newest || at.seq == r->held[at.slot]) continue;
            if ((count == MOST_FOUND && at.seq > found[count - 1].seq) || !is_open(f, &at, 0)) continue;
            uint32_t i = count < MOST_FOUND ? count++ : count - 1;
            for (; i && found[i - 1].seq > at.seq; i--) found[i] = found[i - 1];
            found[i] = (place){.seq = at.seq, .ring = at.ring, .slot = at.slot};
        }
    }
    return count;
}

take_result reader_scan(reader *f, taken *out) {
    uint64_t newest = published(&f->table);
    if (newest >= MOST_MESSAGES) return TAKE_NOTHING; /* damaged */
    place each[MOST_FOUND];
    for (uint32_t count; (count = find_unfinished(f, newest, each));) {
        for (uint32_t i = 0; i < count; i++) {
            f->scanned = each[i].seq;
            *out = (taken){.seq = each[i].seq, .ring = each[i].ring, .slot = each[i].slot};
            if (!f->known && read_record(f, out->seq, out->ring, out->slot, out) == OTHER_VERSION) return TAKE_OTHER;
            if (!is_open(f, out, 0) || !claim(f, out)) continue;
            uint32_t attempt = out->attempt;
            uint8_t locked = out->locked;
            found where = read_record(f, out->seq, out->ring, out->slot, out);
            out->attempt = attempt;
            out->locked = locked;
            if (where == FOUND) return delivered(f, out);
            finish(f, out);
            return TAKE_DAMAGED;
        }
    }
    return TAKE_NOTHING;
}

void reader_acknowledge(reader *f, uint32_t ring_index, uint32_t slot, uint64_t seq) {
    CRASH_POINT("done.before");
    store_done(f, ring_index, slot, seq);
    CRASH_POINT("done.stored");
}

/* --- giving back ---------------------------------------------------------------------------------------------------- */

enum { MOST_KEPT = 64 }; /* locks of finished messages */

void reader_unlock_finished(reader *f) {
    if (f->kept_from) unlock_all(f->lock_fd, claim_byte(f, f->kept_from), claim_byte(f, f->kept_to));
    f->kept_from = f->kept_to = 0;
}

/* The lock of a finished message may be dropped later: the next message in its slot has a lock byte of its own. */
static void unlock_later(reader *f, uint64_t seq) {
    if (f->kept_from && seq == f->kept_to + 1) f->kept_to = seq;
    else {
        reader_unlock_finished(f);
        f->kept_from = f->kept_to = seq;
    }
    if (f->kept_to - f->kept_from + 1 >= MOST_KEPT) reader_unlock_finished(f);
}

int reader_give_back(reader *f, uint32_t ring_index, uint32_t slot, uint64_t seq, int locked, int done) {
    reader_ring *r = &f->rings[ring_index];
    CRASH_POINT("release.ended");
    if (r->held[slot] == seq) r->held[slot] = 0;
    if (f->mode == READER_GROUP) store(lease_word(&r->shared, f->member, slot), 2 * seq + 1);
    if (claims(f)) {
        if (done) {
            store_released(f, ring_index, slot, seq);
            CRASH_POINT("release.stored");
        }
    } else if (f->mode == READER_ALL) {
        store(lease_word(&r->shared, f->member, slot), 2 * seq + 1); /* pairs with the load in the writer's search */
        CRASH_POINT("release.stored");
    }
    if (locked == CLAIM_LOCK && done) unlock_later(f, seq);
    else unlock(f, seq, locked);
    atomic_signal_fence(memory_order_seq_cst); /* for the compiler; the processor's fence is the sleeper's barrier */
    return load(f->asleep) & 1;
}

int reader_drop(reader *f, const taken *message) {
    if (claims(f)) {
        finish(f, message);
        return load(f->asleep) & 1;
    }
    return reader_give_back(f, message->ring, message->slot, message->seq, message->locked, 0);
}

void reader_untake(reader *f, const taken *message) {
    reader_ring *r = &f->rings[message->ring];
    r->held[message->slot] = 0;
    if (claims(f)) {
        if (state_at(f, message) < IS_DONE) store_attempt(f, message->ring, message->slot, message->seq, message->attempt - 1);
    } else if (f->mode == READER_ALL)
        store(lease_word(&r->shared, f->member, message->slot), 0); /* as before it was taken */
    unlock(f, message->seq, message->locked);
    if (f->position == message->seq) f->position = message->seq - 1 - message->missed;
}
