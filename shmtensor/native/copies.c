/* Copies of more than the caches hold, with non-temporal stores, if the processor has them.
 *
 * An ordinary store first reads the cache line that it is about to overwrite, and evicts another one. glibc's memmove uses
 * non-temporal stores as well, but only in single calls of about three quarters of the shared cache; a checkpoint's tensors
 * and slots are smaller, and many.
 */

#include "native.h"

#include <stdio.h>

#ifdef __x86_64__
#include <immintrin.h>

enum { VECTOR = 32, TURN = 4 * VECTOR };

/* In order of addresses: if it alternated between several pages, loads 4 KiB behind a recent store would wait for it in vain. */
__attribute__((target("avx2"))) static void stream_vectors(char *to, const char *from, size_t count) {
    size_t at = -(uintptr_t)to % VECTOR; /* a streaming store must be aligned; the load need not be */
    if (at > count) at = count;
    memcpy(to, from, at);
    for (; count - at >= TURN; at += TURN) {
        const __m256i *source = (const __m256i *)(from + at);
        __m256i *target = (__m256i *)(to + at);
        __m256i a = _mm256_loadu_si256(source), b = _mm256_loadu_si256(source + 1);
        __m256i c = _mm256_loadu_si256(source + 2), d = _mm256_loadu_si256(source + 3);
        _mm256_stream_si256(target, a);
        _mm256_stream_si256(target + 1, b);
        _mm256_stream_si256(target + 2, c);
        _mm256_stream_si256(target + 3, d);
    }
    memcpy(to + at, from + at, count - at);
    _mm_sfence(); /* streaming stores are not ordered: they must come before the words that publish these bytes */
}

static int has_vectors(void) { return __builtin_cpu_supports("avx2") != 0; }
#else
static void stream_vectors(char *to, const char *from, size_t count) { memmove(to, from, count); }
static int has_vectors(void) { return 0; }
#endif

/* Bytes of the largest cache that a core can use; sysconf returns the sum for a whole processor. */
long cache_bytes(void) {
    long kib = 0;
    FILE *file = fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "re");
    if (file) {
        if (fscanf(file, "%ldK", &kib) != 1) kib = 0;
        fclose(file);
    }
    return kib > 0 ? kib << 10 : 32L << 20;
}

PyDoc_STRVAR(stream_doc, "stream(to, source, nbytes)\n--\n\n"
    "Copy bytes from one address to another, past the caches where the processor can, without the interpreter lock.");

static PyObject *stream(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "three numbers");
        return NULL;
    }
    char *to = PyLong_AsVoidPtr(args[0]);
    if (!to && PyErr_Occurred()) return NULL;
    const char *from = PyLong_AsVoidPtr(args[1]);
    if (!from && PyErr_Occurred()) return NULL;
    size_t nbytes = PyLong_AsSize_t(args[2]);
    if (nbytes == (size_t)-1 && PyErr_Occurred()) return NULL;
    int vectors = has_vectors();
    Py_BEGIN_ALLOW_THREADS
    if (vectors)
        stream_vectors(to, from, nbytes);
    else
        memmove(to, from, nbytes);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyMethodDef copy_methods[] = {
    {"stream", (PyCFunction)(void (*)(void))stream, METH_FASTCALL, stream_doc},
    {NULL, NULL, 0, NULL},
};
