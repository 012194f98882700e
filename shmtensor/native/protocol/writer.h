/* The sending end of one producer: free slots, records, publication. docs/internals/core.md says the same in words. No Python.
 *
 * The caller makes sure that only one thread at a time calls a writer.
 *
 *     slot:   FREE -> acquire -> WRITING -> publish -> PUBLISHED -> every receiver has given it back -> FREE
 *                                       -> discard -> FREE
 */

#ifndef SHMTENSOR_WRITER_H
#define SHMTENSOR_WRITER_H

#include "ring.h"

#define MEMBER_WORDS (MOST_MEMBERS / 64)

typedef struct {
    uint64_t bits[MEMBER_WORDS];
} members;

/* A message in the producer's slots, or one that is being written there. */
typedef struct {
    uint64_t seq;       /* 0: not published */
    uint64_t span;      /* slots */
    members waits;      /* fan-out: receivers that are not known to have given it back */
    uint8_t lockable;   /* fan-out: a receiver may hold it by a shared lock on byte `seq` */
    uint8_t lent;       /* a loan's owner can still write there */
    uint8_t judged;     /* work queue: the sender has read its verdict */
} message_in_flight;

enum { FREE_SLOT = UINT32_MAX };

/* A ring as its producer has it. */
typedef struct {
    ring shared;
    uint64_t cursor;
    message_in_flight *messages; /* by first slot */
    uint32_t *first;    /* slot -> first slot of the message in it; FREE_SLOT: free */
} writer_ring;

typedef struct {
    sequence_table table;
    int lock_fd;        /* a description of the table's file that is used for locks alone */
    int competing;      /* a work queue, else a fan-out */
    int lockable;       /* fan-out: there is history, or a receiver that takes the newest only */
    int checks_verdicts; /* work queue: a slot whose verdict names its message is not reused before `writer_judge` */
    uint64_t history;   /* how many of the newest messages are kept for receivers that join later */
    members recipients; /* fan-out: members whose lease words count for the next message */
    members leaving;    /* those of them that take no more messages */
    writer_ring *rings; /* the caller's; they do not move while it calls */
    uint32_t nrings;
    uint32_t last;      /* the ring that was used last */
} writer;

/* The rings that a message may use: those with slots of `least` to `most` bytes. */
typedef struct {
    uint64_t least, most;
} slot_sizes;

typedef struct {
    uint32_t ring, slot;
    uint64_t span;
} allocation;

int writer_ring_init(writer_ring *r, const ring *shared); /* 0, or -1: no memory */
void writer_ring_free(writer_ring *r);

static const slot_sizes ANY_SIZE = {0, UINT64_MAX};

/* Find consecutive free slots for `nbytes`, in the ring that fits best. 1; 0 if there are none. Until they are published, or lent,
 * the slots count as free for the next call. */
int writer_acquire(writer *w, uint64_t nbytes, slot_sizes sizes, allocation *out);

/* Whether `writer_acquire` would find slots. Takes nothing back. */
int writer_has_room(writer *w, uint64_t nbytes, slot_sizes sizes);

/* Whether one of the slots that usually come back first is free: a quick check for a sender that spins. */
int writer_may_have_room(writer *w);

/* The address of an allocation's payload. */
static inline unsigned char *writer_payload(const writer *w, const allocation *at) {
    const ring *r = &w->rings[at->ring].shared;
    return r->data + (uint64_t)at->slot * r->slot_bytes;
}

/* Store record, order entry and `published`, in this order: a death before the last store leaves nothing visible. Returns the
 * sequence number. `lent`: a loan's owner may still write until `writer_returned`. `description` NULL: it lies behind the payload
 * already. */
uint64_t writer_publish(writer *w, const allocation *at, uint64_t nbytes, const void *description, uint32_t length, int lent);

/* Free the slots of an allocation that is not published. */
void writer_discard(writer *w, const allocation *at);

/* Keep the slots for a loan's owner, who can write there before and after the message is published, until `writer_returned`. */
void writer_lend(writer *w, const allocation *at);
void writer_returned(writer *w, const allocation *at);

/* Work queue: note that the sender has read the verdict on the message there. */
void writer_judge(writer *w, uint32_t ring_index, uint32_t slot);

/* Fan-out with history: the kept messages, from `start` on, wait for this receiver as well. */
void writer_welcome(writer *w, uint32_t member, uint64_t start);

/* A receiver has left or died: no message waits for it any more. */
void writer_forget(writer *w, uint32_t member);

/* Work queue: free the slots of messages that are done and whose consumer died before it released them. 1 if there were any. */
int writer_reclaim(writer *w);

/* Whether every message is taken (fan-out; `local` members do not count) or done (work queue). */
int writer_is_settled(const writer *w, const members *local);

/* How many slots have messages that are still needed. */
uint64_t writer_in_flight(const writer *w);

/* How many slots of a ring are free now. */
uint64_t writer_free_slots(writer *w, uint32_t ring_index);

static inline void member_add(members *m, uint32_t at) { m->bits[at / 64] |= (uint64_t)1 << at % 64; }
static inline void member_remove(members *m, uint32_t at) { m->bits[at / 64] &= ~((uint64_t)1 << at % 64); }
static inline int member_in(const members *m, uint32_t at) { return (int)(m->bits[at / 64] >> at % 64 & 1); }

#endif
