/* Shared 64-bit words: one writer each, stored with release and loaded with acquire order. C11 atomics, no Python. */

#ifndef SHMTENSOR_WORDS_H
#define SHMTENSOR_WORDS_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

typedef _Atomic uint64_t word;

_Static_assert(sizeof(word) == 8, "a word is eight bytes");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "a word is loaded and stored without a lock");

static inline uint64_t load(const word *at) { return atomic_load_explicit(at, memory_order_acquire); }
static inline void store(word *at, uint64_t value) { atomic_store_explicit(at, value, memory_order_release); }

/* For words that another word guards: those of a record, which is whole if its `seq` is unchanged. */
static inline uint64_t load_relaxed(const word *at) { return atomic_load_explicit(at, memory_order_relaxed); }
static inline void store_relaxed(word *at, uint64_t value) { atomic_store_explicit(at, value, memory_order_relaxed); }

/* To be called between two polls of a spinning loop. */
static inline void cpu_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield" ::: "memory");
#else
    atomic_signal_fence(memory_order_seq_cst);
#endif
}

static inline uint64_t monotonic_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* A named point at which a test build can kill, stop or interrupt the process; nothing in any other build. */
#ifdef SHMTENSOR_CRASH_POINTS
void crash_point(const char *name);
#define CRASH_POINT(name) crash_point(name)
#else
#define CRASH_POINT(name) ((void)0)
#endif

#endif
