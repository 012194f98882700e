#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "ring.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

/* The kernel orders the accesses of successive holders of a lock; these calls tell the thread sanitizer so. */
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
static char ordered[1024];
#define LOCKED(seq) __tsan_acquire(&ordered[(seq) % sizeof ordered])
#define UNLOCKING(seq) __tsan_release(&ordered[(seq) % sizeof ordered])
#else
#define LOCKED(seq) ((void)0)
#define UNLOCKING(seq) ((void)0)
#endif

int set_lock(int fd, enum lock_kind kind, uint64_t seq) {
    struct flock lock = {
        .l_type = kind == LOCK_SHARED ? F_RDLCK : kind == LOCK_EXCLUSIVE ? F_WRLCK : F_UNLCK,
        .l_whence = SEEK_SET,
        .l_start = (off_t)seq,
        .l_len = 1,
    };
    if (kind == UNLOCK) UNLOCKING(seq);
    if (!fcntl(fd, F_OFD_SETLK, &lock)) {
        if (kind != UNLOCK) LOCKED(seq);
        return 0;
    }
    return errno == EACCES ? EAGAIN : errno;
}

void unlock_all(int fd, uint64_t from, uint64_t to) {
    struct flock lock = {
        .l_type = F_UNLCK, .l_whence = SEEK_SET, .l_start = (off_t)from, .l_len = (off_t)(to - from + 1)};
    for (uint64_t seq = from; seq <= to; seq++) UNLOCKING(seq);
    fcntl(fd, F_OFD_SETLK, &lock);
}

int held_by_other(int fd, uint64_t seq) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)seq, .l_len = 1};
    if (fcntl(fd, F_OFD_GETLK, &lock)) return -1;
    return lock.l_type != F_UNLCK;
}
