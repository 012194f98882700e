/* The receiving end of one producer: find the next message, take it, give it back. docs/internals/core.md. No Python.
 *
 * The caller makes sure that only one thread at a time calls the functions that move `position`. `reader_give_back` and
 * `reader_acknowledge` may be called by any thread, one at a time, once each for a message.
 */

#ifndef SHMTENSOR_READER_H
#define SHMTENSOR_READER_H

#include "ring.h"

typedef enum {
    READER_ALL,       /* fan-out: every message */
    READER_LATEST,    /* fan-out: the newest `depth`, under shared locks; the producer never waits for it */
    READER_COMPETING, /* work queue: each message to the consumer that locks its byte first */
    READER_GROUP,     /* fan-out: each message to the member of the group that locks its byte first */
} reader_mode;

typedef enum {
    TAKE_NOTHING,  /* there is no message now */
    TAKE_TAKEN,
    TAKE_ATTACH,   /* ring `taken.ring` has to be attached first; nothing was done */
    TAKE_DAMAGED,  /* message `taken.seq` cannot be read: skipped, and its slot given back if possible */
    TAKE_OTHER,    /* the first record, or its description, is of another version (`other`): nothing was done */
    TAKE_RETRY,    /* newest-only: it was taken back at that moment, and there is nothing newer */
} take_result;

/* The locks that hold a message: a claim of it, and the one that keeps its producer from taking it back. */
enum { CLAIM_LOCK = 1, SHARED_LOCK = 2 };

/* A ring as a reader has it. */
typedef struct {
    ring shared;
    uint64_t *held; /* slot -> the message that is leased here; 0: none */
} reader_ring;

typedef struct {
    reader_mode mode;
    sequence_table table;
    int lock_fd;             /* a description of the table's file that is used for locks alone */
    uint64_t history;
    uint32_t member;         /* this receiver's index in the channel */
    uint32_t recipient;      /* the index and uid that the producer knows: the group's, or this receiver's own */
    uint64_t recipient_uid;
    const word *asleep;      /* whether the producer sleeps */
    reader_ring *rings;      /* the caller's; they do not move while it calls */
    uint32_t nrings;
    uint64_t position;       /* the newest message that was taken or skipped */
    uint64_t seen;           /* the value of `published` when it was last read: up to there it is not loaded again */
    uint64_t depth;          /* READER_LATEST: how many of the newest messages it takes */
    uint64_t lost;           /* READER_LATEST: the newest message that the producer took back before it was taken */
    uint64_t start;          /* fan-out: from here on every message waits for the recipient; 0: the producer has not stored it */
    uint32_t most_attempts;  /* claims */
    uint64_t kept_from, kept_to; /* claims: finished messages whose locks are still held; 0: none */
    uint64_t scanned;        /* claims: the newest message that this scan by `reader_scan` has reached */
    uint8_t description_version; /* what the first description must begin with; 0: anything */
    uint8_t known;           /* a record of this producer was read: all others are of this version, or damaged */
    uint8_t contended; /* a lock was held briefly without a take: the producer may have failed because of it, and may sleep now */
} reader;

typedef struct {
    uint64_t seq, sent_ns;
    uint32_t ring, slot;
    record_head head;
    uint64_t description[INLINE_BYTES / 8]; /* copied from the record */
    uint64_t missed;         /* READER_LATEST: how many were skipped */
    uint32_t attempt;        /* claims: the number of this delivery; 0: dropped after `most_attempts` deliveries */
    uint8_t locked;          /* held by a CLAIM_LOCK, a SHARED_LOCK, or both */
    uint8_t other;           /* TAKE_OTHER: the first byte of the description */
} taken;

/* Whether messages are claimed: of a work queue, or in a group. "Claims" below means these two. */
static inline int claims(const reader *f) { return f->mode >= READER_COMPETING; }

int reader_ring_init(reader_ring *r, const ring *shared); /* 0, or -1: no memory */
void reader_ring_free(reader_ring *r);

/* Set the position of a new fan-out reader to before the messages that the producer keeps for it. Call it after a barrier. */
void reader_begin(reader *f);

/* The sequence number of the next message; 0: there is none. */
uint64_t reader_next(reader *f);

/* Take the next message. */
take_result reader_take(reader *f, taken *out);

/* Work queue: take this message, out of order. TAKE_DAMAGED: nothing was done. */
take_result reader_take_one(reader *f, uint64_t seq, taken *out);

/* Read the record of a message that is leased here once more. 0: it is damaged by now. */
int reader_read_again(reader *f, uint32_t ring, uint32_t slot, uint64_t seq, taken *out);

/* Work queue: when the next unclaimed message was published. Skips claimed ones. 0: only `reader_take` can tell; UINT64_MAX:
 * there is none. */
uint64_t reader_age(reader *f);

/* Claims: take the oldest message, up to `position`, that somebody claimed and did not finish. Scans all records; set
 * `scanned` = 0 to begin a new scan. */
take_result reader_scan(reader *f, taken *out);

/* Claims: mark the message as done: it is not delivered again. Its bytes stay until `reader_give_back`. */
void reader_acknowledge(reader *f, uint32_t ring, uint32_t slot, uint64_t seq);

/* Give a slot back, when the views of its message are gone. `done`: it was acknowledged; else others may claim it from here on.
 * Returns whether the producer sleeps and has to be woken. */
int reader_give_back(reader *f, uint32_t ring, uint32_t slot, uint64_t seq, int locked, int done);

/* Claims: drop the locks of finished messages. `reader_give_back` keeps those of consecutive ones, so that one system call
 * drops many. To be called when there is no message. */
void reader_unlock_finished(reader *f);

/* Finish a message that was taken and turned out to be damaged. Returns whether the producer sleeps. */
int reader_drop(reader *f, const taken *message);

/* Undo `reader_take`: the message will be taken again. */
void reader_untake(reader *f, const taken *message);

static inline const unsigned char *payload_of(const reader *f, const taken *message) {
    const ring *r = &f->rings[message->ring].shared;
    return r->data + (uint64_t)message->slot * r->slot_bytes;
}

/* The bytes that describe a message's value. */
static inline const unsigned char *description_of(const reader *f, const taken *message) {
    return message->head.flags & SPILLED ? payload_of(f, message) + padded(message->head.nbytes)
                                         : (const unsigned char *)message->description;
}

#endif
