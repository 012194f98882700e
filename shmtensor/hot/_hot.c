/* The usual message, in C: one plain CPU tensor that looks like one seen before, one ring, nobody to wait for.
 *
 * An Outbox does what Publisher.send and Producer.send do for such a tensor, an Inlet what Subscriber.recv does for such
 * a record: the same stores to the same words in the same order as the Python code, which is the reference and handles
 * everything else. Whatever is not the usual case is left untouched and answered with None (see hot/__init__.py). A Group
 * copies the tensors of a message with several, a Batch makes them; they know nothing of rings.
 *
 * Mutual exclusion is the interpreter lock: nothing here releases it, or runs Python code, between the first check and
 * the last store. An endpoint's mutex that is held by another thread is one of the checks. The ringer is a thread that has
 * a mutex of its own and runs no Python code.
 *
 * Tensors are looked at and made through the DLPack C exchange API (dlpack.h, DLPackExchangeAPI, version 1.3), which
 * torch offers as torch.Tensor.__dlpack_c_exchange_api__.
 */

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>
#include <sys/socket.h>
#include <time.h>

#if !defined(__x86_64__)
#error "the order of the stores below relies on x86-64; elsewhere the Python code does the work"
#endif
#ifdef Py_GIL_DISABLED
#error "the interpreter lock is what keeps threads apart here; without it the Python code does the work"
#endif

#include "look.h"
#include "fields.h"
#include "ringer.h"
#include "bells.h"
#include "call.h"
#include "outbox.h"
#include "grip.h"
#include "claim.h"
#include "inlet.h"
#include "intake.h"
#include "batch.h"
#include "group.h"
#include "stream.h"

/* --- the module --------------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(use_doc, "use(tensor_type)\n--\n\nWhether torch.Tensor offers the exchange interface; then it is used.");

static PyObject *use(PyObject *module, PyObject *type) {
    (void)module;
    if (!PyType_Check(type)) {
        PyErr_SetString(PyExc_TypeError, "a type");
        return NULL;
    }
    PyObject *capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    if (!capsule) {
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    ExchangeAPI *found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_DECREF(capsule);
    if (!found) PyErr_Clear();
    if (!found || found->version.major != 1 || !found->tensor_from_object || !found->object_from_managed)
        Py_RETURN_FALSE;
    exchange = found;
    tensor_type = (PyTypeObject *)Py_NewRef(type);
    Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
    {"use", use, METH_O, use_doc},
    {"ring", (PyCFunction)(void (*)(void))ring, METH_FASTCALL, ring_doc},
    {"settle", settle, METH_O, settle_doc},
    {"stream", (PyCFunction)(void (*)(void))stream, METH_FASTCALL, stream_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "shmtensor.hot._hot",
    .m_doc = "The usual message, in C: see _hot.c.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__hot(void) {
    struct { PyObject **at; const char *text; } strings[] = {
        {&s_is_neg, "is_neg"}, {&s_close, "close"}, {&s_emptied, "emptied"}, {&s_wake_sender, "wake_sender"},
        {&s_fd, "fd"}, {&s_line, "line"}, {&s_rung, "rung"}, {&s_gone, "gone"}, {&s_outbox, "_outbox"},
    };
    for (size_t i = 0; i < sizeof strings / sizeof *strings; i++)
        if (!(*strings[i].at = PyUnicode_InternFromString(strings[i].text))) return NULL;
    if (PyType_Ready(&OutboxType) || PyType_Ready(&GripType) || PyType_Ready(&InletType) || PyType_Ready(&BatchType) ||
        PyType_Ready(&GroupType))
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (!module) return NULL;
    if (PyModule_AddObjectRef(module, "Outbox", (PyObject *)&OutboxType) ||
        PyModule_AddObjectRef(module, "Inlet", (PyObject *)&InletType) ||
        PyModule_AddObjectRef(module, "Grip", (PyObject *)&GripType) ||
        PyModule_AddObjectRef(module, "Batch", (PyObject *)&BatchType) ||
        PyModule_AddObjectRef(module, "Group", (PyObject *)&GroupType) ||
        PyModule_AddIntConstant(module, "CACHE_BYTES", cache_bytes()) ||
        pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child)) { /* the last: it cannot be undone */
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
