/* Making the frames of many puts, remembering them as changes, and the module itself. */

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

/* ------------------------------------------------------------------ frames of puts */

#define KEY_BYTES_MAX 1024

const char put_frames_doc[] =
    "put_frames(pairs, prefix, seq_first, time_us, offset, bytes_max, payload_bytes_max)\n--\n\n"
    "(keys, frames, all of them joined, their positions); None where Python has to look at it.";

/* How large the payload is of a pair of text and bytes; -1 where it is another one. */
static Py_ssize_t
payload_size_of(PyObject *pair, Py_ssize_t bucket_size, Py_ssize_t payload_bytes_max)
{
    if (!PyTuple_CheckExact(pair) || PyTuple_GET_SIZE(pair) != 2) {
        return -1;
    }
    PyObject *text = PyTuple_GET_ITEM(pair, 0), *value = PyTuple_GET_ITEM(pair, 1);
    if (!PyUnicode_CheckExact(text) || !PyUnicode_IS_COMPACT_ASCII(text) || !PyBytes_CheckExact(value)) {
        return -1;
    }
    const Py_ssize_t key_size = PyUnicode_GET_LENGTH(text), value_size = PyBytes_GET_SIZE(value);
    if (!key_size || key_size > KEY_BYTES_MAX || value_size > payload_bytes_max ||
        FIXED_BYTES + bucket_size + key_size + value_size > payload_bytes_max) {
        return -1;
    }
    return FIXED_BYTES + bucket_size + key_size + value_size;
}

/* Write the frame of such a pair, the rest of which is in `fixed`. */
static void
write_frame(uint8_t *frame, uint64_t seq, const uint8_t fixed[FIXED_BYTES], PyObject *bucket_prefix, PyObject *pair,
            uint32_t payload_size)
{
    PyObject *text = PyTuple_GET_ITEM(pair, 0), *value = PyTuple_GET_ITEM(pair, 1);
    const size_t bucket_size = (size_t)PyBytes_GET_SIZE(bucket_prefix) - 1;
    const uint16_t key_size = (uint16_t)PyUnicode_GET_LENGTH(text);
    uint8_t *payload = frame + FRAME_BYTES, *at = payload + FIXED_BYTES;
    memcpy(frame, &seq, 8);
    memcpy(frame + 8, &payload_size, 4);
    memcpy(payload, fixed, FIXED_BYTES);
    memcpy(payload + 5, &key_size, 2);
    memcpy(at, PyBytes_AS_STRING(bucket_prefix) + 1, bucket_size);
    memcpy(at + bucket_size, PyUnicode_1BYTE_DATA(text), key_size);
    memcpy(at + bucket_size + key_size, PyBytes_AS_STRING(value), (size_t)PyBytes_GET_SIZE(value));
    const uint32_t checksum = ~crc_of(crc_of(CRC_START, frame, HEAD_BYTES), payload, payload_size);
    memcpy(frame + HEAD_BYTES, &checksum, 4);
}

/* What a key is called in pages. */
static PyObject *
page_key_of(PyObject *bucket_prefix, PyObject *text)
{
    const Py_ssize_t prefix_size = PyBytes_GET_SIZE(bucket_prefix), key_size = PyUnicode_GET_LENGTH(text);
    PyObject *key = PyBytes_FromStringAndSize(NULL, prefix_size + key_size);
    if (key) {
        memcpy(PyBytes_AS_STRING(key), PyBytes_AS_STRING(bucket_prefix), (size_t)prefix_size);
        memcpy(PyBytes_AS_STRING(key) + prefix_size, PyUnicode_1BYTE_DATA(text), (size_t)key_size);
    }
    return key;
}

PyObject *
put_frames(PyObject *module, PyObject *const *args, Py_ssize_t arg_count)
{
    (void)module;
    if (arg_count != 7 || !PyList_CheckExact(args[0]) || !PyBytes_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError, "put_frames takes pairs, a prefix and five numbers");
        return NULL;
    }
    PyObject *pairs = args[0], *prefix = args[1];
    const Py_ssize_t count = PyList_GET_SIZE(pairs), bucket_size = PyBytes_GET_SIZE(prefix) - 1;
    const uint64_t seq_first = PyLong_AsUnsignedLongLong(args[2]);
    const uint64_t time_us = PyLong_AsUnsignedLongLong(args[3]);
    const Py_ssize_t offset = PyLong_AsSsize_t(args[4]);
    const Py_ssize_t bytes_max = PyLong_AsSsize_t(args[5]);
    const Py_ssize_t payload_bytes_max = PyLong_AsSsize_t(args[6]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (!count || bucket_size < 0 || bucket_size != (uint8_t)PyBytes_AS_STRING(prefix)[0] || bytes_max < 0 ||
        offset < 0 || offset > UINT32_MAX - bytes_max || seq_first + (uint64_t)(count - 1) < seq_first) {
        Py_RETURN_NONE;
    }

    /* After the new lists nothing lets Python code run. */
    PyObject *keys = PyList_New(count), *frames = PyList_New(count);
    PyObject *joined = NULL, *positions = NULL, *result = NULL;
    if (!keys || !frames) {
        goto done;
    }
    Py_ssize_t total = 0;
    int is_usual = PyList_GET_SIZE(pairs) == count;
    for (Py_ssize_t i = 0; is_usual && i < count; i++) {
        const Py_ssize_t size = payload_size_of(PyList_GET_ITEM(pairs, i), bucket_size, payload_bytes_max);
        total += FRAME_BYTES + size;
        is_usual = size >= 0 && total <= bytes_max;
    }
    if (!is_usual) {
        result = Py_NewRef(Py_None);
        goto done;
    }

    joined = PyBytes_FromStringAndSize(NULL, total);
    positions = PyBytes_FromStringAndSize(NULL, 4 * count);
    if (!joined || !positions) {
        goto done;
    }
    const uint16_t bucket_size_16 = (uint16_t)bucket_size;
    uint8_t fixed[FIXED_BYTES] = {KIND_PUT};
    memcpy(fixed + 3, &bucket_size_16, 2);
    memcpy(fixed + 9, &time_us, 8);
    Py_ssize_t at = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *pair = PyList_GET_ITEM(pairs, i);
        const Py_ssize_t payload_size = payload_size_of(pair, bucket_size, payload_bytes_max);
        const Py_ssize_t frame_size = FRAME_BYTES + payload_size;
        PyObject *key = page_key_of(prefix, PyTuple_GET_ITEM(pair, 0));
        PyObject *frame = PyBytes_FromStringAndSize(NULL, frame_size);
        PyList_SET_ITEM(keys, i, key); /* NULL is as good as nothing */
        PyList_SET_ITEM(frames, i, frame);
        if (!key || !frame) {
            goto done;
        }
        uint8_t *bytes = (uint8_t *)PyBytes_AS_STRING(frame);
        write_frame(bytes, seq_first + (uint64_t)i, fixed, prefix, pair, (uint32_t)payload_size);
        const uint32_t position = (uint32_t)(offset + at);
        memcpy(PyBytes_AS_STRING(positions) + 4 * i, &position, 4);
        memcpy(PyBytes_AS_STRING(joined) + at, bytes, (size_t)frame_size);
        at += frame_size;
    }
    result = PyTuple_Pack(4, keys, frames, joined, positions);
done:
    Py_XDECREF(keys);
    Py_XDECREF(frames);
    Py_XDECREF(joined);
    Py_XDECREF(positions);
    return result;
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
    "put_changes(lows, ranges, keys, records, keeps_older)\n--\n\n"
    "(bytes that left, how many records did, older, begun): `older` are (range, key, record) of what somebody\n"
    "may still read, and `begun` the ranges that had no change, each with its first record.";

PyObject *
put_changes(PyObject *module, PyObject *const *args, Py_ssize_t arg_count)
{
    (void)module;
    if (arg_count != 5 || !PyList_CheckExact(args[0]) || !PyList_CheckExact(args[1]) ||
        !is_sequence(args[2]) || !is_sequence(args[3]) ||
        PyList_GET_SIZE(args[0]) != PyList_GET_SIZE(args[1]) ||
        PySequence_Fast_GET_SIZE(args[2]) != PySequence_Fast_GET_SIZE(args[3])) {
        PyErr_SetString(PyExc_TypeError, "put_changes takes ranges with their lows, and keys with their records");
        return NULL;
    }
    PyObject *lows = args[0], *ranges = args[1], *keys = args[2], *records = args[3];
    const int keeps_older = PyObject_IsTrue(args[4]);
    Py_ssize_t left_bytes = 0, left_count = 0;
    PyObject *older = PyList_New(0), *begun = PyList_New(0), *result = NULL;
    if (!older || !begun || keeps_older < 0) {
        goto done;
    }
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(keys); i++) {
        PyObject *key = PySequence_Fast_GET_ITEM(keys, i);
        PyObject *record = i < PySequence_Fast_GET_SIZE(records) ? PySequence_Fast_GET_ITEM(records, i) : NULL;
        if (!PyBytes_CheckExact(key) || !is_record(record)) {
            PyErr_SetString(PyExc_TypeError, "a key or a record is none");
            goto done;
        }
        const Py_ssize_t index = place_of(lows, PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key)) - 1;
        if (index < 0 || index >= PyList_GET_SIZE(ranges)) {
            PyErr_SetString(index < -1 ? PyExc_TypeError : PyExc_IndexError, "a key lies in no range");
            goto done;
        }
        PyObject *range = Py_NewRef(PyList_GET_ITEM(ranges, index));
        Py_INCREF(key);
        Py_INCREF(record);
        const int failed = put_change(range, key, record, keeps_older, older, begun, &left_bytes, &left_count);
        Py_DECREF(record);
        Py_DECREF(key);
        Py_DECREF(range);
        if (failed) {
            goto done;
        }
    }
    result = Py_BuildValue("(nnOO)", left_bytes, left_count, older, begun);
done:
    Py_XDECREF(older);
    Py_XDECREF(begun);
    return result;
}

/* ------------------------------------------------------------------ the module */

static PyMethodDef methods[] = {
    {"put_frames", (PyCFunction)(void (*)(void))put_frames, METH_FASTCALL, put_frames_doc},
    {"put_changes", (PyCFunction)(void (*)(void))put_changes, METH_FASTCALL, put_changes_doc},
    {"merge_range", (PyCFunction)(void (*)(void))merge_range, METH_FASTCALL, merge_range_doc},
    {"newest_row", (PyCFunction)(void (*)(void))newest_row, METH_FASTCALL, newest_row_doc},
    {"plain_objects", (PyCFunction)(void (*)(void))plain_objects, METH_FASTCALL, plain_objects_doc},
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
