/* Attributes of Python objects that their class's `__slots__` name, read and written where they lie. Included once, by _hot.c. */

#define MOST_FIELDS 9

/* Where in its objects a class keeps an attribute that its `__slots__` name; -1 with an error set if they do not. */
static Py_ssize_t field_of(PyTypeObject *type, const char *name) {
    PyObject *found = PyObject_GetAttrString((PyObject *)type, name);
    if (!found) return -1;
    Py_ssize_t at = -1;
    if (Py_IS_TYPE(found, &PyMemberDescr_Type) && ((PyMemberDescrObject *)found)->d_member->type == T_OBJECT_EX)
        at = ((PyMemberDescrObject *)found)->d_member->offset;
    else PyErr_Format(PyExc_TypeError, "%s.%s is none of its slots", type->tp_name, name);
    Py_DECREF(found);
    return at;
}

static PyObject **field(PyObject *object, Py_ssize_t at) { return (PyObject **)((char *)object + at); }

static void set_field(PyObject *object, Py_ssize_t at, PyObject *value) {
    Py_XSETREF(*field(object, at), Py_NewRef(value));
}

/* An integer attribute. */
static int get_field(PyObject *object, Py_ssize_t at, uint64_t *value) {
    PyObject *found = *field(object, at);
    if (!found) {
        PyErr_SetString(PyExc_AttributeError, "a slot has no value");
        return -1;
    }
    *value = PyLong_AsUnsignedLongLong(found);
    return *value == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

/* A class whose `__init__` does nothing but fill its slots: that is done here, without a Python call. */
typedef struct {
    PyObject *type;
    Py_ssize_t at[MOST_FIELDS];
} Class;

/* 0 with the places of these slots, -1 with an error set and nothing changed. */
static int class_get(Class *class, PyObject *type, const char *const *slots) {
    Class found = {.type = class->type};
    if (!PyType_Check(type)) {
        PyErr_SetString(PyExc_TypeError, "no class");
        return -1;
    }
    for (int i = 0; slots[i]; i++)
        if ((found.at[i] = field_of((PyTypeObject *)type, slots[i])) < 0) return -1;
    *class = found;
    Py_XSETREF(class->type, Py_NewRef(type));
    return 0;
}

/* An object with these in its slots; takes over the references, also where it fails. */
static PyObject *class_make(const Class *class, PyObject **values, int count) {
    PyTypeObject *type = (PyTypeObject *)class->type;
    int missing = 0;
    for (int i = 0; i < count; i++) missing |= !values[i];
    PyObject *made = missing ? NULL : type->tp_alloc(type, 0);
    for (int i = 0; i < count; i++)
        if (made) *field(made, class->at[i]) = values[i];
        else Py_XDECREF(values[i]);
    return made;
}
