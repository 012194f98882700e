/* The layout of a producer's segments: ring/layout.py and wire/record.py draw it; a test compares the numbers.
 *
 * A `ring` and a `sequence_table` are views of mappings that the caller keeps. The caller has checked the headers, so that
 * every index below `slots` lies inside. No Python.
 */

#ifndef SHMTENSOR_RING_H
#define SHMTENSOR_RING_H

#include "words.h"

enum {
    RECORD_WORDS = 32,   /* of a record: 256 bytes */
    HEADER_WORDS = 512,  /* before the records */
    INLINE_BYTES = 208,  /* of a record, for the description */
    INLINE_WORD = 6,
    MOST_MEMBERS = 256,  /* of a channel */
    MOST_RINGS = 255,
    RECORD_VERSION = 2,
    SPILLED = 1,         /* flag of a record: the description lies behind the payload */
    PAYLOAD_ALIGNMENT = 64,
};

/* The most messages of a producer: some words hold a byte of other data beside the number. */
static const uint64_t MOST_MESSAGES = (uint64_t)1 << 56;

/* Of a fan-out's word for a slot: 2 * seq, or 2 * seq + 1. Of a group's, the number of the attempt is above, or GROUP_DONE. */
static const uint64_t LEASE = ((uint64_t)1 << 57) - 1;
enum { ATTEMPT_SHIFT = 57, GROUP_DONE = 127, GROUP_LOCK_SHIFT = 54 };

/* Words of a work queue's slot state. */
enum { CLAIMED, DONE, RELEASED, ATTEMPT, NOTE, DEADLINE, VERDICT, STATE_WORDS = 8 };

/* Words of a sequence table. */
enum { T_HISTORY = 5, T_PUBLISHED = 16, T_CLOSED = 24, T_RINGS = 25, T_MEMBERS = 512 };

typedef struct {
    word *words;         /* header, records, states */
    unsigned char *data; /* slots x slot_bytes */
    uint64_t slots, slot_bytes;
    uint64_t state;      /* word index of the state area */
    uint64_t row;        /* fan-out: words of one receiver's row; 0: a work queue */
    uint32_t index;      /* among its producer's rings */
} ring;

typedef struct {
    word *words;
    uint64_t mask;  /* entries - 1 */
    uint64_t order; /* word index of the entries */
} sequence_table;

/* The head of a record without `seq` and `sent_ns`. */
typedef struct {
    uint16_t version, flags;
    uint32_t ring, slot, span;
    uint32_t length; /* bytes of the description */
    uint32_t reserved;
    uint64_t nbytes; /* of the payload */
} record_head;

_Static_assert(sizeof(record_head) == 32, "bytes 16 to 48 of a record");

static inline word *record_of(const ring *r, uint64_t slot) { return r->words + HEADER_WORDS + slot * RECORD_WORDS; }

/* Fan-out: the word of a receiver for a slot: leased, released, or unread. */
static inline word *lease_word(const ring *r, uint64_t member, uint64_t slot) {
    return r->words + r->state + member * r->row + slot;
}

/* Work queue: the eight words of a slot. */
static inline word *state_of(const ring *r, uint64_t slot) { return r->words + r->state + slot * STATE_WORDS; }

static inline uint64_t span_of(const ring *r, uint64_t nbytes) {
    return nbytes <= r->slot_bytes ? 1 : nbytes / r->slot_bytes + (nbytes % r->slot_bytes != 0);
}

static inline uint64_t padded(uint64_t nbytes) {
    return (nbytes + PAYLOAD_ALIGNMENT - 1) & ~(uint64_t)(PAYLOAD_ALIGNMENT - 1);
}

static inline uint64_t room_of(uint64_t nbytes, uint64_t length) {
    return length <= INLINE_BYTES ? nbytes : padded(nbytes) + length;
}

static inline uint64_t published(const sequence_table *table) { return load(table->words + T_PUBLISHED); }
static inline word *entry_of(const sequence_table *table, uint64_t seq) {
    return table->words + table->order + (seq & table->mask);
}

/* Byte `seq` of the sequence table's file, for this open file description: fcntl(2), "Open file description locks". */
enum lock_kind { LOCK_SHARED, LOCK_EXCLUSIVE, UNLOCK };
int set_lock(int fd, enum lock_kind kind, uint64_t seq); /* 0, or errno; EAGAIN: another description has it */
void unlock_all(int fd, uint64_t from, uint64_t to);     /* inclusive */
int held_by_other(int fd, uint64_t seq);                 /* 1, 0, or -1 with errno */

#endif
