/* The sending end of one producer: free slots, records, publication. docs/internals/core.md says the same in words. No Python.
 *
 * One thread at a time calls a writer; that is its caller's to see to.
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
} flight;

enum { NO_FLIGHT = UINT32_MAX };

/* A ring as its producer has it. */
typedef struct {
    ring shared;
    uint64_t cursor;
    flight *flights;    /* by first slot */
    uint32_t *first;    /* slot -> first slot of the flight in it; NO_FLIGHT: free */
} writer_ring;

typedef struct {
    sequence_table table;
    int lock_fd;        /* a description of the table's file that is used for locks alone */
    int competing;      /* a work queue, else a fan-out */
    int lockable;       /* fan-out: there is history, or a receiver that takes the newest only */
    int heeds_verdicts; /* work queue: a slot whose verdict names its message is kept until `writer_judge` */
    uint64_t history;   /* so many of the newest messages are kept for receivers that join later */
    members recipients; /* fan-out: whose lease words count for the next message */
    members leaving;    /* of those, who takes nothing more */
    writer_ring *rings; /* the caller's; they do not move while it calls */
    uint32_t nrings;
} writer;

typedef struct {
    uint32_t ring, slot;
    uint64_t span;
} allocation;

int writer_ring_init(writer_ring *r, const ring *shared); /* 0, or -1: no memory */
void writer_ring_free(writer_ring *r);

enum { ANY_RING = -1 };

/* Consecutive free slots for a message that takes `nbytes` in them: 1; 0 if there are none. In the ring of that index, or in
 * the one that fits best. Until it is published, or lent, the slots count as free for the next call. */
int writer_acquire(writer *w, uint64_t nbytes, int ring_index, allocation *out);

/* Whether it would find some. Takes nothing back. */
int writer_has_room(writer *w, uint64_t nbytes, int ring_index);

/* Whether the slots that mostly come back first are free by now: what a sender looks at that waits awake. */
int writer_may_have_room(writer *w);

/* Where the payload of an allocation goes. */
static inline unsigned char *writer_payload(const writer *w, const allocation *at) {
    const ring *r = &w->rings[at->ring].shared;
    return r->data + (uint64_t)at->slot * r->slot_bytes;
}

/* The record, the entry, `published`: a death before the last store leaves nothing visible. Returns the sequence number.
 * `lent`: a loan's owner may still write until `writer_returned`. `description` NULL: it lies behind the payload already. */
uint64_t writer_publish(writer *w, const allocation *at, uint64_t nbytes, const void *description, uint32_t length, int lent);

/* Nothing was published: the slots are free again. */
void writer_discard(writer *w, const allocation *at);

/* A loan's owner can write there, before and after the message is published, until it can no longer. */
void writer_lend(writer *w, const allocation *at);
void writer_returned(writer *w, const allocation *at);

/* Work queue: the verdict on the message in these slots was read. */
void writer_judge(writer *w, uint32_t ring_index, uint32_t slot);

/* Fan-out with history: a receiver joins that waits for messages from `start` on, those that are kept included. */
void writer_welcome(writer *w, uint32_t member, uint64_t start);

/* A receiver has left or died: nothing waits for it any more. */
void writer_forget(writer *w, uint32_t member);

/* Work queue: give back what a consumer had done, and died before it said that its views are gone. 1 if there was any. */
int writer_reclaim(writer *w);

/* Whether everything sent is taken (fan-out) or done (work queue). `local`: members that do not count. */
int writer_is_settled(const writer *w, const members *local);

/* Slots that are not known to be free. */
uint64_t writer_in_flight(const writer *w);

/* Slots of a ring that can be had now. */
uint64_t writer_free_slots(writer *w, uint32_t ring_index);

static inline void member_add(members *m, uint32_t at) { m->bits[at / 64] |= (uint64_t)1 << at % 64; }
static inline void member_remove(members *m, uint32_t at) { m->bits[at / 64] &= ~((uint64_t)1 << at % 64); }
static inline int member_in(const members *m, uint32_t at) { return (int)(m->bits[at / 64] >> at % 64 & 1); }

#endif
