/* DLPack's C interface (dlpack.h, version 1.3), as far as it is used: torch offers it as
 * torch.Tensor.__dlpack_c_exchange_api__; and what capsules named "dltensor" hold, which any torch takes. */

#ifndef SHMTENSOR_DLPACK_H
#define SHMTENSOR_DLPACK_H

#include <stdint.h>

typedef struct { uint32_t major, minor; } DLVersion;
typedef struct { int32_t type, id; } DLDevice;
typedef struct { uint8_t code, bits; uint16_t lanes; } DLDataType;

typedef struct {
    void *data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape;
    int64_t *strides; /* in elements */
    uint64_t byte_offset;
} DLTensor;

typedef struct DLManaged {
    DLVersion version;
    void *context;
    void (*deleter)(struct DLManaged *);
    uint64_t flags;
    DLTensor tensor;
} DLManaged;

typedef struct DLLegacy {
    DLTensor tensor;
    void *context;
    void (*deleter)(struct DLLegacy *);
} DLLegacy;

typedef struct {
    DLVersion version;
    void *previous;
    int (*allocate)(DLTensor *, DLManaged **, void *, void (*)(void *, const char *, const char *));
    int (*managed_from_object)(void *, DLManaged **);
    int (*object_from_managed)(DLManaged *, void **);
    int (*tensor_from_object)(void *, DLTensor *);
    int (*stream)(int, int32_t, void **);
} ExchangeAPI;

enum { DL_CPU = 1 };
enum { DL_INT = 0, DL_UINT = 1, DL_COMPLEX = 5 };

#endif
