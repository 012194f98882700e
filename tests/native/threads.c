/* The protocol files with threads in the place of processes: every thread has mappings' addresses in common and open file
 * descriptions of its own. Built by tests/ring/test_protocol.py, also under sanitizers.
 *
 *     threads MODE READERS MESSAGES SLOTS HISTORY FILE      MODE: all, latest, latest 3, queue, group
 *
 * The writer sends MESSAGES messages of one to three slots whose every word is derived from their sequence number. Readers
 * check each word, keep up to two messages, and give them back. Prints one line for each reader: messages, words, missed.
 */

#include "../../shmtensor/native/protocol/reader.h"
#include "../../shmtensor/native/protocol/writer.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SLOT_BYTES = 256, ENTRIES = 1024, MEMBERS = 16, WRITER = 0, GROUP = MEMBERS - 1 };

static struct {
    int mode, readers;
    uint64_t messages, slots, history, depth;
    const char *file;
    word *table_words, *ring_words;
    unsigned char *data;
    word asleep;
    _Atomic uint64_t seen[1 << 20], done, over;
} run;

static void fail(const char *what, uint64_t a, uint64_t b) {
    fprintf(stderr, "%s: %llu %llu\n", what, (unsigned long long)a, (unsigned long long)b);
    _exit(1);
}

static ring the_ring(void) {
    uint64_t row = (run.slots + 7) & ~7ull;
    return (ring){
        .words = run.ring_words, .data = run.data, .slots = run.slots, .slot_bytes = SLOT_BYTES,
        .state = HEADER_WORDS + run.slots * RECORD_WORDS, .row = run.mode == READER_COMPETING ? 0 : row, .index = 0,
    };
}

static sequence_table the_table(void) {
    return (sequence_table){.words = run.table_words, .mask = ENTRIES - 1, .order = T_MEMBERS + 3 * MEMBERS};
}

static int open_file(void) {
    int fd = open(run.file, O_RDWR | O_CLOEXEC);
    if (fd < 0) fail("open", (uint64_t)errno, 0);
    return fd;
}

static uint64_t nbytes_of(uint64_t seq) { return run.history ? 8 * (1 + seq % 30) : 8 * (1 + seq * 7 % (3 * SLOT_BYTES / 8)); }
static uint64_t word_of(uint64_t seq, uint64_t at) { return seq * 0x9E3779B97F4A7C15ull + at; }

/* A spilled description behind a payload that leaves room for it, of every fifth message. */
static uint32_t length_of(uint64_t seq) { return seq % 5 ? (uint32_t)(seq % INLINE_BYTES) : run.history ? 9 : INLINE_BYTES + 1; }

static void *write_all(void *unused) {
    (void)unused;
    ring shared = the_ring();
    writer_ring mine;
    if (writer_ring_init(&mine, &shared)) fail("memory", 0, 0);
    writer w = {
        .table = the_table(), .lock_fd = open_file(), .competing = run.mode == READER_COMPETING,
        .lockable = run.mode == READER_LATEST || run.history, .history = run.history, .rings = &mine, .nrings = 1,
    };
    if (run.mode != READER_COMPETING)
        for (uint32_t i = 1; i <= (uint32_t)(run.mode == READER_GROUP ? GROUP : run.readers); i++) {
            if (run.mode == READER_ALL || i == GROUP) member_add(&w.recipients, i);
            store(w.table.words + T_MEMBERS + 2 * i, 1);
            store(w.table.words + T_MEMBERS + 2 * i + 1, 1000 + i);
        }
    unsigned char description[INLINE_BYTES + 1];
    for (uint64_t seq = 1; seq <= run.messages; seq++) {
        allocation at;
        uint64_t nbytes = nbytes_of(seq);
        uint32_t length = length_of(seq);
        while (!writer_acquire(&w, room_of(nbytes, length), ANY_SIZE, &at)) sched_yield();
        if (seq % 97 == 0) { /* some are given up */
            writer_discard(&w, &at);
            while (!writer_acquire(&w, room_of(nbytes, length), ANY_SIZE, &at)) sched_yield();
        }
        uint64_t *payload = (uint64_t *)writer_payload(&w, &at);
        for (uint64_t i = 0; i < nbytes / 8; i++) payload[i] = word_of(seq, i);
        memset(description, (int)(seq & 0xFF), length);
        if (writer_publish(&w, &at, nbytes, description, length, 0) != seq) fail("sequence number", seq, 0);
    }
    while (!writer_is_settled(&w, &(members){{0}})) sched_yield();
    atomic_store(&run.over, 1);
    writer_ring_free(&mine);
    close(w.lock_fd);
    return NULL;
}

static uint64_t check(const reader *f, const taken *t) {
    const uint64_t *payload = (const uint64_t *)payload_of(f, t);
    const unsigned char *description = description_of(f, t);
    if (t->head.nbytes != nbytes_of(t->seq) || t->head.length != length_of(t->seq)) fail("head", t->seq, t->head.nbytes);
    for (uint64_t i = 0; i < t->head.nbytes / 8; i++)
        if (payload[i] != word_of(t->seq, i)) fail("word", t->seq, i);
    for (uint32_t i = 0; i < t->head.length; i++)
        if (description[i] != (t->seq & 0xFF)) fail("description", t->seq, i);
    return t->head.nbytes / 8;
}

static void *read_all(void *argument) {
    uint32_t member = (uint32_t)(uintptr_t)argument, recipient = run.mode == READER_GROUP ? GROUP : member;
    ring shared = the_ring();
    reader_ring mine;
    if (reader_ring_init(&mine, &shared)) fail("memory", 0, 0);
    reader f = {
        .mode = (reader_mode)run.mode, .depth = run.depth, .table = the_table(), .lock_fd = open_file(), .history = run.history, .member = member,
        .recipient = recipient, .recipient_uid = 1000 + recipient, .asleep = &run.asleep, .rings = &mine, .nrings = 1, .most_attempts = 5,
    };
    taken held[2];
    uint64_t nheld = 0, messages = 0, words = 0, missed = 0, last = 0, untaken = 0;
    for (;;) {
        int over = (int)atomic_load(&run.over);
        taken t;
        take_result result = reader_take(&f, &t);
        if (result == TAKE_DAMAGED || result == TAKE_ATTACH) fail("take", (uint64_t)result, t.seq);
        if (result == TAKE_RETRY) {
            missed += t.missed;
            continue;
        }
        if (result == TAKE_NOTHING) {
            if (claims(&f) && (f.scanned = 0, reader_scan(&f, &t)) == TAKE_TAKEN) result = TAKE_TAKEN;
            else if (claims(&f) ? atomic_load(&run.done) == run.messages : over) break;
            else {
                if (nheld) {
                    taken *h = &held[--nheld];
                    reader_give_back(&f, h->ring, h->slot, h->seq, h->locked, 1);
                }
                sched_yield();
                continue;
            }
        }
        if (!claims(&f) && t.seq <= last) fail("order", last, t.seq);
        if (run.mode == READER_ALL && t.seq != last + 1) fail("gap", last, t.seq);
        last = t.seq;
        words += check(&f, &t);
        if (t.seq % 31 == 3 && t.attempt == 1 && run.mode != READER_LATEST && t.seq != untaken) { /* it comes again */
            uint64_t before = f.position;
            untaken = t.seq;
            reader_untake(&f, &t);
            if (run.mode == READER_ALL) {
                last = t.seq - 1;
                if (f.position != before - 1) fail("position", before, f.position);
                if (reader_take(&f, &t) != TAKE_TAKEN || t.seq != last + 1) fail("again", t.seq, last);
                last = t.seq;
            } else continue;
        }
        messages++;
        missed += t.missed;
        if (claims(&f)) {
            if (t.seq % 11 == 0 && t.attempt == 1) { /* given back unfinished: somebody gets it again */
                messages--;
                reader_give_back(&f, t.ring, t.slot, t.seq, t.locked, 0);
                continue;
            }
            if (atomic_fetch_add(&run.seen[t.seq], 1)) fail("twice", t.seq, t.attempt);
            reader_acknowledge(&f, t.ring, t.slot, t.seq);
            atomic_fetch_add(&run.done, 1);
        }
        if (nheld == 2) {
            taken *h = &held[0];
            check(&f, h);
            reader_give_back(&f, h->ring, h->slot, h->seq, h->locked, 1);
            held[0] = held[1];
            nheld = 1;
        }
        held[nheld++] = t;
    }
    while (nheld) {
        taken *h = &held[--nheld];
        check(&f, h);
        reader_give_back(&f, h->ring, h->slot, h->seq, h->locked, 1);
    }
    printf("%llu %llu %llu\n", (unsigned long long)messages, (unsigned long long)words, (unsigned long long)missed);
    reader_ring_free(&mine);
    close(f.lock_fd);
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 7) return 2;
    run.depth = !strcmp(argv[1], "latest 3") ? 3 : 1;
    run.mode = !strcmp(argv[1], "all") ? READER_ALL : !strncmp(argv[1], "latest", 6) ? READER_LATEST
               : !strcmp(argv[1], "group") ? READER_GROUP : READER_COMPETING;
    run.readers = atoi(argv[2]);
    run.messages = strtoull(argv[3], NULL, 10);
    run.slots = strtoull(argv[4], NULL, 10);
    run.history = strtoull(argv[5], NULL, 10);
    run.file = argv[6];
    if (run.readers >= GROUP || run.messages >= 1 << 20) return 2;
    uint64_t row = (run.slots + 7) & ~7ull;
    run.table_words = calloc(T_MEMBERS + 3 * MEMBERS + ENTRIES, sizeof(word));
    run.ring_words = calloc(HEADER_WORDS + run.slots * RECORD_WORDS + MEMBERS * row + 8 * run.slots, sizeof(word));
    run.data = aligned_alloc(64, run.slots * SLOT_BYTES);
    if (!run.table_words || !run.ring_words || !run.data) return 2;
    store(run.table_words + T_HISTORY, run.history);
    store(run.table_words + T_RINGS, 1);
    pthread_t threads[MEMBERS];
    for (int i = 0; i <= run.readers; i++)
        if (pthread_create(&threads[i], NULL, i ? read_all : write_all, (void *)(uintptr_t)i)) return 2;
    for (int i = 0; i <= run.readers; i++) pthread_join(threads[i], NULL);
    free(run.table_words);
    free(run.ring_words);
    free(run.data);
    return 0;
}
