/* The compiled loops of `engine/fast.py`.

   Always true:
     - each does what Python does step by step, byte for byte; `tests/engine/test_fast*.py` hold the two
       together, and everything works without this module;
     - what is unusual is not done here: it is left as it was, and Python does it, or says what is wrong with it;
     - where Python code may run (a new list or tuple may have the garbage collector call whatever it likes),
       what is used afterwards is held, or looked at again. */

#ifndef LOWWATER_FAST_H
#define LOWWATER_FAST_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "frames are little-endian, and so is every machine that this is built for"
#endif
#if SIZE_MAX <= UINT32_MAX
#error "a page's counts are of 32 bits, and where its columns are is computed from them"
#endif

/* As `VERSION` of `engine/fast.py`: a module that an older checkout has left is not used. Change both with
   everything that changes what Python calls, or what it answers. */
#define VERSION 6

/* A frame is its seq (8 bytes), the payload's length (4), the checksum of both and the payload (4), and the
   payload: kind, flags, lengths of bucket, key and metadata, time, origin, optional groups, and then bucket, key,
   metadata and value. docs/FORMAT.md has the table. */
#define HEAD_BYTES 12
#define FRAME_BYTES 16
#define FIXED_BYTES 25
#define KIND_PUT 3

/* Behind the frame of a large value a record has where it lies: its segment's first seq (8 bytes), its offset (4). */
#define RECORD_PLACE_BYTES 12

/* ------------------------------------------------------------------ hashes (_fast_hashes.c) */

/* CRC-32 as zlib computes it. Takes and gives the register, which is the inverse of the checksum. */
#define CRC_START (~0u)
void prepare_crc(void);
uint32_t crc_of(uint32_t crc, const uint8_t *data, size_t size);

#define HASH_BYTES 32

/* The hash of a value. */
void blake3(const uint8_t *data, size_t size, uint8_t hash[HASH_BYTES]);
/* The first eight bytes of the hash with a key, as a number. */
uint64_t blake3_short(const uint8_t hash_key[HASH_BYTES], const uint8_t *data, size_t size);

/* ------------------------------------------------------------------ what Python calls */

PyObject *put_frames(PyObject *module, PyObject *const *args, Py_ssize_t arg_count);
PyObject *put_records(PyObject *module, PyObject *const *args, Py_ssize_t arg_count);
PyObject *walk_frames(PyObject *module, PyObject *const *args, Py_ssize_t arg_count);
PyObject *put_changes(PyObject *module, PyObject *const *args, Py_ssize_t arg_count);
PyObject *merge_range(PyObject *module, PyObject *const *args, Py_ssize_t arg_count);
PyObject *newest_row(PyObject *module, PyObject *const *args, Py_ssize_t arg_count);
PyObject *plain_objects(PyObject *module, PyObject *const *args, Py_ssize_t arg_count);
PyObject *check_tree(PyObject *module, PyObject *const *args, Py_ssize_t arg_count);
extern const char put_frames_doc[], put_records_doc[], walk_frames_doc[], put_changes_doc[], merge_range_doc[],
    newest_row_doc[], plain_objects_doc[], check_tree_doc[];

/* Append a tuple of two or three to a list. */
int append_row(PyObject *list, PyObject *first, PyObject *second, PyObject *third);

static inline uint64_t
u64_at(const uint8_t *data)
{
    uint64_t number;
    memcpy(&number, data, 8);
    return number;
}

static inline uint32_t
u32_at(const uint8_t *data)
{
    uint32_t number;
    memcpy(&number, data, 4);
    return number;
}

static inline uint16_t
u16_at(const uint8_t *data)
{
    uint16_t number;
    memcpy(&number, data, 2);
    return number;
}

#endif
