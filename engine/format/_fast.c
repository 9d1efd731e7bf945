/* Remembering changes, and the module itself. */

#include "_fast.h"

static PyObject *name_dirty, *name_rec_seq;

int
append_row(PyObject *list, PyObject *first, PyObject *second, PyObject *third)
{
    PyObject *row = third ? PyTuple_Pack(3, first, second, third) : PyTuple_Pack(2, first, second);
    const int failed = row ? PyList_Append(list, row) : -1;
    Py_XDECREF(row);
    return failed;
}

/* ------------------------------------------------------------------ changes */

/* Where in `lows` a key would come after those that are equal: bisect_right. -1 where they are not bytes. */
static Py_ssize_t
place_of(PyObject *lows, const char *key, Py_ssize_t key_size)
{
    Py_ssize_t low = 0, high = PyList_GET_SIZE(lows);
    while (low < high) {
        const Py_ssize_t middle = (low + high) / 2;
        PyObject *other = PyList_GET_ITEM(lows, middle);
        if (!PyBytes_CheckExact(other)) {
            return -1;
        }
        const Py_ssize_t other_size = PyBytes_GET_SIZE(other);
        int order = memcmp(key, PyBytes_AS_STRING(other), key_size < other_size ? key_size : other_size);
        if (order < 0 || (!order && key_size < other_size)) {
            high = middle;
        }
        else {
            low = middle + 1;
        }
    }
    return low;
}

static uint64_t
seq_of(PyObject *record)
{
    return u64_at((const uint8_t *)PyBytes_AS_STRING(record));
}

static int
is_sequence(PyObject *object)
{
    return PyList_CheckExact(object) || PyTuple_CheckExact(object);
}

static int
is_record(PyObject *object)
{
    return object && PyBytes_CheckExact(object) && PyBytes_GET_SIZE(object) >= 8;
}

/* A new tuple may have the garbage collector call whatever it likes: what this is given is held, and so is what
   it finds. */
static int
put_change(PyObject *range, PyObject *key, PyObject *record, int keeps_older, PyObject *older, PyObject *begun,
           Py_ssize_t *left_bytes, Py_ssize_t *left_count)
{
    PyObject *dirty = PyObject_GetAttr(range, name_dirty);
    PyObject *before = dirty ? Py_XNewRef(PyDict_SetDefault(dirty, key, record)) : NULL;
    int failed = !before;
    if (before == record) {
        PyObject *rec_seq = PyObject_GetAttr(range, name_rec_seq);
        const int begins = rec_seq ? PyObject_Not(rec_seq) : -1;
        Py_XDECREF(rec_seq);
        failed = begins < 0 || (begins && append_row(begun, range, record, NULL) < 0);
    }
    else if (before && !is_record(before)) {
        PyErr_SetString(PyExc_TypeError, "what was put before is no record");
        failed = 1;
    }
    else if (before) {
        if (keeps_older && seq_of(before) < seq_of(record)) {
            failed = append_row(older, range, key, before) < 0;
        }
        else {
            *left_bytes += PyBytes_GET_SIZE(before);
            *left_count += 1;
        }
        failed = failed || PyDict_SetItem(dirty, key, record) < 0;
    }
    Py_XDECREF(before);
    Py_XDECREF(dirty);
    return failed;
}

const char put_changes_doc[] =
    "put_changes(lows, ranges, keys, records, keeps_older, older, begun)\n--\n\n"
    "(bytes that left, how many records did). Added to `older` are (range, key, record) of what somebody may\n"
    "still read, and to `begun` the ranges that had no change, each with its first record.";

PyObject *
put_changes(PyObject *module, PyObject *const *args, Py_ssize_t arg_count)
{
    (void)module;
    if (arg_count != 7 || !PyList_CheckExact(args[5]) || !PyList_CheckExact(args[6]) || !PyList_CheckExact(args[0]) || !PyList_CheckExact(args[1]) ||
        !is_sequence(args[2]) || !is_sequence(args[3]) ||
        PyList_GET_SIZE(args[0]) != PyList_GET_SIZE(args[1]) ||
        PySequence_Fast_GET_SIZE(args[2]) != PySequence_Fast_GET_SIZE(args[3])) {
        PyErr_SetString(PyExc_TypeError, "put_changes takes ranges with their lows, and keys with their records");
        return NULL;
    }
    PyObject *lows = args[0], *ranges = args[1], *keys = args[2], *records = args[3];
    const int keeps_older = PyObject_IsTrue(args[4]);
    Py_ssize_t left_bytes = 0, left_count = 0;
    PyObject *older = args[5], *begun = args[6];
    if (keeps_older < 0) {
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(keys); i++) {
        PyObject *key = PySequence_Fast_GET_ITEM(keys, i);
        PyObject *record = i < PySequence_Fast_GET_SIZE(records) ? PySequence_Fast_GET_ITEM(records, i) : NULL;
        if (!PyBytes_CheckExact(key) || !is_record(record)) {
            PyErr_SetString(PyExc_TypeError, "a key or a record is none");
            return NULL;
        }
        const Py_ssize_t index = place_of(lows, PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key)) - 1;
        if (index < 0 || index >= PyList_GET_SIZE(ranges)) {
            PyErr_SetString(index < -1 ? PyExc_TypeError : PyExc_IndexError, "a key lies in no range");
            return NULL;
        }
        PyObject *range = Py_NewRef(PyList_GET_ITEM(ranges, index));
        Py_INCREF(key);
        Py_INCREF(record);
        const int failed = put_change(range, key, record, keeps_older, older, begun, &left_bytes, &left_count);
        Py_DECREF(record);
        Py_DECREF(key);
        Py_DECREF(range);
        if (failed) {
            return NULL;
        }
    }
    return Py_BuildValue("(nn)", left_bytes, left_count);
}

/* ------------------------------------------------------------------ the module */

static PyMethodDef methods[] = {
    {"put_frames", (PyCFunction)(void (*)(void))put_frames, METH_FASTCALL, put_frames_doc},
    {"put_records", (PyCFunction)(void (*)(void))put_records, METH_FASTCALL, put_records_doc},
    {"walk_frames", (PyCFunction)(void (*)(void))walk_frames, METH_FASTCALL, walk_frames_doc},
    {"put_changes", (PyCFunction)(void (*)(void))put_changes, METH_FASTCALL, put_changes_doc},
    {"merge_range", (PyCFunction)(void (*)(void))merge_range, METH_FASTCALL, merge_range_doc},
    {"newest_row", (PyCFunction)(void (*)(void))newest_row, METH_FASTCALL, newest_row_doc},
    {"plain_objects", (PyCFunction)(void (*)(void))plain_objects, METH_FASTCALL, plain_objects_doc},
    {"check_tree", (PyCFunction)(void (*)(void))check_tree, METH_FASTCALL, check_tree_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "lowwater.engine._fast", NULL, -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC
PyInit__fast(void)
{
    prepare_crc();
    name_dirty = PyUnicode_InternFromString("dirty");
    name_rec_seq = PyUnicode_InternFromString("rec_seq");
    if (!name_dirty || !name_rec_seq) {
        return NULL;
    }
    PyObject *module = PyModule_Create(&module_definition);
    if (module && PyModule_AddIntConstant(module, "VERSION", VERSION) < 0) {
        Py_CLEAR(module);
    }
    return module;
}
