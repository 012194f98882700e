/* The codec in C: values to bytes and back, as wire/spec.py describes them. See native/__init__.py.
 *
 * Arrays are read and made through NumPy's C interface, tensors as tensors.c says. A leaf of unknown type is handed to
 * Python and comes back as bytes of the description (encode) or as an object (decode). A value or message that fails is
 * handed to the reference as a whole, which raises the error.
 *
 * Rules: no borrowed reference is used after a call that may run Python code; nothing here knows rings, slots or words.
 */

#ifndef SHMTENSOR_NATIVE_H
#define SHMTENSOR_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL shmtensor_native_numpy
#ifndef NATIVE_MODULE
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>
#include <numpy/arrayscalars.h>

#include "dlpack.h"

#if PY_VERSION_HEX >= 0x030C0000
#define MEMBER_OBJECT Py_T_OBJECT_EX
#define MEMBER_SIZE Py_T_PYSSIZET
#define MEMBER_U64 Py_T_ULONGLONG
#define MEMBER_BOOL Py_T_BOOL
#define MEMBER_READONLY Py_READONLY
#else
#include <structmember.h>
#define MEMBER_OBJECT T_OBJECT_EX
#define MEMBER_SIZE T_PYSSIZET
#define MEMBER_U64 T_ULONGLONG
#define MEMBER_BOOL T_BOOL
#define MEMBER_READONLY READONLY
#endif

#ifdef Py_GIL_DISABLED
#error "the interpreter lock is what keeps threads apart here; without it the Python code does the work"
#endif
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "descriptions are little-endian; elsewhere the Python code does the work"
#endif

/* wire/spec.py */
enum { NONE, FALSE_, TRUE_, INT, BIG_INT, FLOAT, STR, LIST, TUPLE, DICT, LEAF, COMPOSITE };
enum { TORCH = 1, STRIDES = 2 };
enum { GENERIC = 1, DATA = 4 }; /* kinds of composites */
enum {
    VERSION = 2, HEADER = 8, LEAF_HEAD = 16, STORAGE = 16, ALIGNMENT = 64, STORAGE_ALIGNMENT = 16, MAX_DEPTH = 64,
    MAX_NDIM = 64, MAX_EQUAL_HASHES = 64, MAX_LEAVES = 1000000, MAX_META = 64 << 10, MAX_DESCRIPTION = 16 << 20,
};
#define MAX_BYTES ((uint64_t)1 << 62)

/* One row of the dtype table, by its code. */
typedef struct {
    uint32_t itemsize; /* 0: no such code */
    int type_num;      /* of NumPy's type; -1: NumPy lacks it */
    char in_torch;     /* torch's tensors of it are read and made here */
    char is_complex;
    char is_viewed;    /* tensors are made as `dlpack`, and then viewed as `dtype` */
    char has_twins;    /* another dtype looks the same through the exchange interface */
    DLDataType dlpack;
    PyObject *dtype;   /* torch's */
} Row;

enum { CODES = 256, TYPE_NUMS = 64 };

/* Attributes of a tensor, and of a `Hand`: module.c has the names. */
enum {
    IS_NEG, IS_CONJ, LAYOUT, IS_CPU, DTYPE, SHAPE, STRIDE, IS_CONTIGUOUS, DATA_PTR, NUMEL, VIEW, UNTYPED_STORAGE, NBYTES, LAST, NAMES
};

typedef struct {
    PyObject_HEAD
    PyTypeObject *encoded_type;
    /* Python's part, see codec/implementation.py */
    PyObject *encode, *decode; /* the reference */
    PyObject *parts;           /* the parts of a value of unknown type */
    PyObject *tree;            /* makes the reference's reader of one message, for leaves of unknown type */
    PyObject *big_bytes;       /* an int of more than 64 bits as bytes */
    PyObject *move_large;      /* copies many bytes */
    PyObject *payload;         /* makes the array that jobs write to */
    PyObject *argument_error;  /* errors.py */
    Py_ssize_t alone, small;   /* bytes up to which all copies together, and each one, are made here: codec/copies.py */
    Py_ssize_t inline_bytes;   /* of a description that fits the record */
    int max_ndim;              /* of NumPy's arrays */
    PyObject *names[NAMES];
    Row rows[CODES];
    unsigned char code_of_type[TYPE_NUMS]; /* by NumPy's type number; 0: not in the table */
    PyTypeObject *tensor_type, *parameter_type; /* NULL: torch is not imported yet */
    const ExchangeAPI *exchange;                /* NULL: torch has none, methods and capsules are used */
    PyObject *from_dlpack, *strided;            /* torch's function, and layout */
    unsigned long long handed_over; /* calls that were handed to the reference as a whole */
    char raw;                       /* values are payloads, metas are descriptions: codec/raw.py */
} Codec;

/* One source, and one copy to make. */
typedef struct {
    PyObject *source;        /* keeps the memory alive */
    uintptr_t address;       /* of the copy; of leaves that overlap, one copies the memory of all */
    uint64_t offset, size;   /* in the payload; bytes, 0: no plain copy */
    uintptr_t looked_at;     /* the address and bytes of a tensor or array when it was read, to be checked again before the copy; */
    uint64_t looked_at_size; /* 0: no check. Of a tensor that is odd, its elements */
    Py_ssize_t next;         /* the next source whose bytes lie in the same copy, which the first one makes; -1: none */
    char is_odd;             /* read by Python */
} Run;

typedef struct {
    PyObject_VAR_HEAD
    Codec *codec;
    PyObject *description, *jobs, *device_jobs;
    Py_ssize_t nbytes, total;
    Run runs[];
} Encoded;

extern PyType_Spec Encoded_spec, Codec_spec, Writer_spec;

/* The module's `Codec`, from another of its types. */
PyTypeObject *codec_type_of(PyTypeObject *type);

/* As spec.BigKeys: count a dict's next key; `counts` starts as NULL. Not 0: too many keys with its hash, or no memory. */
int add_key(PyObject **counts, PyObject *key);

/* An attribute that is an int: 0, or -1 with an error set. */
int number_of(PyObject *object, const char *name, uint64_t *value);

PyObject *encode_value(Codec *codec, PyObject *value, PyObject *meta);
/* Whether `copy_small` makes every copy, and nothing else has to be done. */
int can_copy_at_once(const Encoded *self);
/* Whether a tensor or array has other memory now than when it was read: a sender may have waited for a slot since, while
 * another thread resized one or gave it other memory. Runs no Python code, except for torch's modes. -1: an exception. */
int has_moved(const Encoded *self);
/* Where the memory of an array lies, and its bytes; of a tensor of a kind that only Python reads, and its elements. Zeros if
 * that cannot be told. 0; -1: an exception that is no `Exception`. */
int source_at(const Codec *codec, PyObject *source, uintptr_t *address, uint64_t *count);
/* The same of a tensor, by its methods: -1 with an error set. */
int place_by_methods(const Codec *codec, PyObject *tensor, uintptr_t *address, uint64_t *count);
/* Make all copies but the large ones, which are made with the interpreter lock released, or by several threads. Returns
 * whether there are large ones. */
int copy_small(const Encoded *self, char *base);
PyObject *decode_message(Codec *codec, PyObject *description, PyObject *payload, int readonly);

/* The same for a description that does not change meanwhile, and bytes that `owner` keeps: 0, or -1 with an error set. */
int decode_at(Codec *codec, const void *text, size_t size, PyObject *owner, void *base, uint64_t nbytes, int readonly,
              PyObject **value, PyObject **meta);

/* reader.c: the types of the receiving end. 0, or -1 with an error set. */
int add_reader(PyObject *module);

extern PyMethodDef copy_methods[], fault_methods[], notify_methods[];
long cache_bytes(void);

/* tensors.c */
typedef struct {
    char *data;
    int ndim, has_strides; /* 0: in C order */
    int64_t shape[MAX_NDIM], strides[MAX_NDIM]; /* in elements */
} Tensor;

int use_torch(Codec *codec, PyObject *tensor_type, PyObject *parameter_type, PyObject *samples, PyObject *strided,
              PyObject *exchange, PyObject *to_dlpack, PyObject *from_dlpack);
/* Read a tensor. The code of its dtype; 0: not of a known type; -1: an exception. */
int look_at_tensor(const Codec *codec, PyObject *value, Tensor *tensor);
/* Whether the storage has all of these bytes: it may have been made smaller. -1: an exception. */
int is_in_its_storage(const Codec *codec, PyObject *value, const char *data, uint64_t nbytes);
/* Whether a tensor still has this memory; -1: an exception. */
int still_lies_at(const Codec *codec, PyObject *value, uintptr_t address, uint64_t nbytes);
PyObject *make_tensor(const Codec *codec, const Row *row, void *data, int ndim, const int64_t *shape,
                      const int64_t *strides, PyObject *owner);
int call_at_exit(void);

/* Whether to hand over to the reference: if no error is set, or one that it will raise in its own words, which is cleared. An
 * exception that is no `Exception` (Ctrl-C) stays set. */
int is_for_the_reference(void);

static inline uint64_t aligned(uint64_t nbytes) { return (nbytes + ALIGNMENT - 1) & ~(uint64_t)(ALIGNMENT - 1); }

#endif
