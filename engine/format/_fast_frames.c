/* Frames: making those of many puts, and reading them again. */

#include "_fast.h"

/* ------------------------------------------------------------------ making them */

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

/* ------------------------------------------------------------------ reading them */

/* How large the frame is at the beginning of these bytes; 0 where it is not whole, or none. */
static size_t
frame_size_at(const uint8_t *frame, size_t size)
{
    if (size < FRAME_BYTES + FIXED_BYTES) {
        return 0;
    }
    const size_t payload_size = u32_at(frame + 8);
    return payload_size >= FIXED_BYTES && payload_size <= size - FRAME_BYTES ? FRAME_BYTES + payload_size : 0;
}

static int
is_intact(const uint8_t *frame, size_t frame_size)
{
    const uint32_t crc = crc_of(CRC_START, frame, HEAD_BYTES);
    return ~crc_of(crc, frame + FRAME_BYTES, frame_size - FRAME_BYTES) == u32_at(frame + HEAD_BYTES);
}

/* How many bytes the names have of a put without flags and metadata; -1 where it is another frame. */
static Py_ssize_t
names_size_of(const uint8_t *frame, size_t frame_size)
{
    const uint8_t *payload = frame + FRAME_BYTES;
    const size_t bucket_size = u16_at(payload + 3), size = bucket_size + u16_at(payload + 5);
    if (payload[0] != KIND_PUT || u16_at(payload + 1) || u16_at(payload + 7) || bucket_size > UINT8_MAX ||
        size > frame_size - FRAME_BYTES - FIXED_BYTES) {
        return -1;
    }
    return (Py_ssize_t)size;
}

static int
append_bytes(PyObject *list, PyObject *bytes)
{
    const int failed = bytes ? PyList_Append(list, bytes) : -1;
    Py_XDECREF(bytes);
    return failed;
}

/* What its key is called in pages. */
static PyObject *
page_key_in(const uint8_t *frame, Py_ssize_t names_size)
{
    PyObject *key = PyBytes_FromStringAndSize(NULL, 1 + names_size);
    if (key) {
        PyBytes_AS_STRING(key)[0] = (char)frame[FRAME_BYTES + 3];
        memcpy(PyBytes_AS_STRING(key) + 1, frame + FRAME_BYTES + FIXED_BYTES, (size_t)names_size);
    }
    return key;
}

/* The record of a put, which says where its frame lies if its value may be a large one. */
static PyObject *
put_record_of(const uint8_t *frame, size_t frame_size, int has_place, uint64_t segment_first, uint32_t offset)
{
    PyObject *record = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(frame_size + (has_place ? RECORD_PLACE_BYTES : 0)));
    if (record) {
        uint8_t *bytes = (uint8_t *)PyBytes_AS_STRING(record);
        memcpy(bytes, frame, frame_size);
        if (has_place) {
            memcpy(bytes + frame_size, &segment_first, 8);
            memcpy(bytes + frame_size + 8, &offset, 4);
        }
    }
    return record;
}

const char put_records_doc[] =
    "put_records(data, at, seq_from, small_bytes, segment_first, offset)\n--\n\n"
    "(keys, records, the last one's seq, where it ends) of the mere puts that follow one another from `at` on,\n"
    "up to what is none, not whole, or damaged; what is below `seq_from` is passed over.";

PyObject *
put_records(PyObject *module, PyObject *const *args, Py_ssize_t arg_count)
{
    (void)module;
    if (arg_count != 6 || !PyBytes_CheckExact(args[0])) {
        PyErr_SetString(PyExc_TypeError, "put_records takes bytes and five numbers");
        return NULL;
    }
    const uint8_t *data = (const uint8_t *)PyBytes_AS_STRING(args[0]);
    const size_t size = (size_t)PyBytes_GET_SIZE(args[0]);
    size_t at = PyLong_AsSize_t(args[1]);
    const uint64_t seq_from = PyLong_AsUnsignedLongLong(args[2]);
    const size_t small_bytes = PyLong_AsSize_t(args[3]);
    const uint64_t segment_first = PyLong_AsUnsignedLongLong(args[4]);
    const size_t offset = PyLong_AsSize_t(args[5]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    uint64_t seq_last = 0;
    PyObject *keys = PyList_New(0), *records = PyList_New(0), *result = NULL;
    if (!keys || !records) {
        goto done;
    }
    while (at < size) {
        const uint8_t *frame = data + at;
        const size_t frame_size = frame_size_at(frame, size - at);
        if (!frame_size) {
            break;
        }
        if (u64_at(frame) < seq_from) {
            at += frame_size;
            continue;
        }
        const Py_ssize_t names_size = names_size_of(frame, frame_size);
        if (names_size < 0 || offset > UINT32_MAX || at > UINT32_MAX - offset || !is_intact(frame, frame_size)) {
            break;
        }
        PyObject *key = page_key_in(frame, names_size);
        PyObject *record =
            put_record_of(frame, frame_size, frame_size > small_bytes, segment_first, (uint32_t)(offset + at));
        const int failed = append_bytes(keys, key) < 0;
        if (append_bytes(records, record) < 0 || failed) {
            goto done;
        }
        seq_last = u64_at(frame);
        at += frame_size;
    }
    result = Py_BuildValue("(OOKn)", keys, records, (unsigned long long)seq_last, (Py_ssize_t)at);
done:
    Py_XDECREF(keys);
    Py_XDECREF(records);
    return result;
}

const char walk_frames_doc[] =
    "walk_frames(data, at, seq, time_us, kinds, flags, offset, stop)\n--\n\n"
    "(positions as u32, seq, time_us, at) of the last of the plain frames that follow one another from `at` on,\n"
    "as a log has them: with growing seqs and no time that goes back, of these kinds and with these flags, and\n"
    "ending below `stop`. `data` lies at `offset`.";

PyObject *
walk_frames(PyObject *module, PyObject *const *args, Py_ssize_t arg_count)
{
    (void)module;
    if (arg_count != 8 || !PyBytes_CheckExact(args[0]) || !PyBytes_CheckExact(args[4])) {
        PyErr_SetString(PyExc_TypeError, "walk_frames takes bytes, kinds and six numbers");
        return NULL;
    }
    const uint8_t *data = (const uint8_t *)PyBytes_AS_STRING(args[0]);
    const size_t size = (size_t)PyBytes_GET_SIZE(args[0]);
    size_t at = PyLong_AsSize_t(args[1]);
    uint64_t seq = PyLong_AsUnsignedLongLong(args[2]), time_us = PyLong_AsUnsignedLongLong(args[3]);
    const char *kinds = PyBytes_AS_STRING(args[4]);
    const size_t kind_count = (size_t)PyBytes_GET_SIZE(args[4]);
    const unsigned long flags = PyLong_AsUnsignedLong(args[5]);
    const size_t offset = PyLong_AsSize_t(args[6]), stop = PyLong_AsSize_t(args[7]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    const size_t rest = at < size ? size - at : 0;
    PyObject *positions =
        PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(4 * (rest / (FRAME_BYTES + FIXED_BYTES))));
    if (!positions) {
        return NULL;
    }
    size_t count = 0;
    while (at < size) {
        const uint8_t *frame = data + at, *payload = frame + FRAME_BYTES;
        const size_t frame_size = frame_size_at(frame, size - at);
        if (!frame_size || offset > UINT32_MAX || at + frame_size > UINT32_MAX - offset ||
            offset + at + frame_size >= stop || u64_at(frame) <= seq || u64_at(payload + 9) < time_us ||
            !memchr(kinds, payload[0], kind_count) || u16_at(payload + 1) & ~flags ||
            !is_intact(frame, frame_size)) {
            break;
        }
        const uint32_t position = (uint32_t)(offset + at);
        memcpy(PyBytes_AS_STRING(positions) + 4 * count++, &position, 4);
        seq = u64_at(frame);
        time_us = u64_at(payload + 9);
        at += frame_size;
    }
    PyObject *result = NULL;
    if (_PyBytes_Resize(&positions, (Py_ssize_t)(4 * count)) == 0) {
        result = Py_BuildValue("(OKKn)", positions, (unsigned long long)seq, (unsigned long long)time_us,
                               (Py_ssize_t)at);
    }
    Py_XDECREF(positions);
    return result;
}
