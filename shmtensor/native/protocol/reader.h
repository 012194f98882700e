/* The receiving end of one producer: find the next message, take it, give it back. docs/internals/core.md. No Python.
 *
 * One thread at a time calls what looks for a message (all that move `position`); that is the caller's to see to. `feed_give_back` and
 * `feed_acknowledge` may come from any thread, once each for a message, and one thread at a time.
 */

#ifndef SHMTENSOR_READER_H
#define SHMTENSOR_READER_H

#include "ring.h"

typedef enum {
    FEED_ALL,       /* fan-out: every message */
    FEED_LATEST,    /* fan-out: the newest, under a shared lock, holding nobody back */
    FEED_COMPETING, /* work queue: each message to whoever locks its byte first */
} feed_mode;

typedef enum {
    TAKE_NOTHING,  /* there is no message now */
    TAKE_TAKEN,
    TAKE_ATTACH,   /* ring `taken.ring` has to be attached first; nothing was done */
    TAKE_DAMAGED,  /* message `taken.seq` cannot be read: passed over, its slot given back where that can be done */
    TAKE_OTHER,    /* the first record, or its description, is of another version (`other`): nothing was done */
    TAKE_RETRY,    /* newest-only: it was taken back in that moment, and there is nothing newer */
} take_result;

/* A ring as a reader has it. */
typedef struct {
    ring shared;
    uint64_t *held; /* slot -> the message that is leased here; 0: none */
} reader_ring;

typedef struct {
    feed_mode mode;
    sequence_table table;
    int lock_fd;             /* a description of the table's file that is used for locks alone */
    uint64_t history;
    uint32_t member;         /* of the channel: this receiver */
    uint64_t member_uid;
    const word *asleep;      /* whether the producer sleeps */
    reader_ring *rings;      /* the caller's; they do not move while it calls */
    uint32_t nrings;
    uint64_t position;       /* the newest message that was looked at */
    uint64_t seen;           /* `published` as it was when it was last read: no other load is needed up to there */
    uint64_t start;          /* fan-out: from here on every message waits for this receiver; 0: the producer has not said */
    uint32_t most_attempts;  /* work queue */
    uint64_t kept_from, kept_to; /* work queue: finished messages whose locks are still held; 0: none */
    uint64_t scanned;        /* work queue: the newest message that `feed_scan` has looked at in this look through all */
    uint8_t description_version; /* what the first description must begin with; 0: anything */
    uint8_t known;           /* one of its records was read: what follows is of this version, or damaged */
    uint8_t contended;       /* a lock was held for a moment for nothing: the producer, which may sleep, may have met it */
} feed;

typedef struct {
    uint64_t seq, sent_ns;
    uint32_t ring, slot;
    record_head head;
    uint64_t description[INLINE_BYTES / 8]; /* as it lay in the record */
    uint64_t missed;         /* FEED_LATEST: how many were passed over */
    uint32_t attempt;        /* work queue: the how many-th delivery; 0: dropped, it was delivered `most_attempts` times */
    uint8_t locked;          /* held by a lock on byte `seq` */
    uint8_t other;           /* TAKE_OTHER: the first byte of the description */
} taken;

int reader_ring_init(reader_ring *r, const ring *shared); /* 0, or -1: no memory */
void reader_ring_free(reader_ring *r);

/* A new feed, all set but for its position: fan-out begins with what the producer keeps for it. After a barrier. */
void feed_begin(feed *f);

/* The sequence number to look at next; 0: there is none. */
uint64_t feed_next(feed *f);

/* Take the next message. */
take_result feed_take(feed *f, taken *out);

/* Work queue: take this message, whoever else may want it. TAKE_DAMAGED: nothing was done. */
take_result feed_take_one(feed *f, uint64_t seq, taken *out);

/* Work queue: when the next message that nobody has was published; passes over the others. 0: `feed_take` has to tell;
 * UINT64_MAX: there is none. */
uint64_t feed_age(feed *f);

/* Work queue: take the oldest message, up to `position`, that somebody claimed and did not finish. Looks through all
 * records once; begin anew with `scanned` = 0. */
take_result feed_scan(feed *f, taken *out);

/* Work queue: nobody gets the message again. Its bytes stay until `feed_give_back`. */
void feed_acknowledge(feed *f, uint32_t ring, uint32_t slot, uint64_t seq);

/* The views of a message are gone. `done`: it was acknowledged; else others may claim it from here on. Returns whether the
 * producer sleeps and has to be woken. */
int feed_give_back(feed *f, uint32_t ring, uint32_t slot, uint64_t seq, int locked, int done);

/* Work queue: drop the locks of finished messages, which `feed_give_back` keeps where they follow one another: one call of the
 * kernel then ends many. Whoever finds no message calls it. */
void feed_unlock_finished(feed *f);

/* A message that was taken turned out to be damaged: finish it. */
int feed_drop(feed *f, const taken *message);

/* What `feed_take` did is undone: the message comes again. */
void feed_untake(feed *f, const taken *message);

static inline const unsigned char *payload_of(const feed *f, const taken *message) {
    const ring *r = &f->rings[message->ring].shared;
    return r->data + (uint64_t)message->slot * r->slot_bytes;
}

/* The bytes that describe a message's value. */
static inline const unsigned char *description_of(const feed *f, const taken *message) {
    return message->head.flags & SPILLED ? payload_of(f, message) + padded(message->head.nbytes)
                                         : (const unsigned char *)message->description;
}

#endif
