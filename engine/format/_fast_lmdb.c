/* A tree of LMDB's file, read and checked without LMDB: `engine/lmdb_file.py` says what is checked, and what is
   wrong where this says None. Nothing of the file is believed: each page is copied, and looked at once. */

#include "_fast.h"
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#define PAGE_HEAD_BYTES 16
#define NODE_BYTES 8
#define BRANCH 1
#define LEAF 2
#define OVERFLOW 4
#define BIG 1
#define DEPTH_MAX 32
#define KEY_BYTES_MAX 511
#define PAGE_BYTES_MAX 32768

typedef struct {
    const uint8_t *data;
    size_t size;
} Key;

typedef struct {
    int fd;
    size_t page_bytes;
    uint64_t limit; /* no page that is in use has this number, or a higher one */
    uint8_t *used;  /* a byte for each page, or NULL */
    uint64_t used_count;
    int depth;
    const Key *wanted; /* in order, or NULL for all */
    uint8_t *found;
    int deep;
    uint64_t branch_pages, leaf_pages, overflow_pages, entries, key_sum;
    uint16_t node_size[PAGE_BYTES_MAX / 2]; /* by half the offset; all 0 between two pages */
} Walk;

static int
order_of(Key one, Key other)
{
    const int order = memcmp(one.data, other.data, one.size < other.size ? one.size : other.size);
    return order ? order : (one.size > other.size) - (one.size < other.size);
}

static int
read_whole(int fd, uint8_t *data, size_t size, uint64_t offset)
{
    while (size) {
        const ssize_t got = pread(fd, data, size, (off_t)offset);
        if (got <= 0) {
            return -1;
        }
        data += got;
        size -= (size_t)got;
        offset += (uint64_t)got;
    }
    return 0;
}

static int
take(Walk *walk, uint64_t page, uint64_t count)
{
    if (page < 2 || page >= walk->limit || count > walk->limit - page) {
        return -1;
    }
    if (walk->used) {
        if (page + count > walk->used_count || memchr(walk->used + page, 1, count)) {
            return -1;
        }
        memset(walk->used + page, 1, count);
    }
    return 0;
}

/* How many bytes a node takes; 0 where it does not fit its page. */
static size_t
node_bytes(const Walk *walk, const uint8_t *data, size_t at, int is_leaf)
{
    const size_t key_bytes = u16_at(data + at + 6);
    size_t size = NODE_BYTES + key_bytes;
    if (key_bytes > KEY_BYTES_MAX) {
        return 0;
    }
    if (is_leaf) {
        const uint16_t flags = u16_at(data + at + 4);
        const size_t value_bytes = u16_at(data + at) | (size_t)u16_at(data + at + 2) << 16;
        if (flags & ~BIG || !key_bytes || (!flags && value_bytes > walk->page_bytes)) {
            return 0;
        }
        size += flags ? 8 : value_bytes;
    }
    size += size & 1;
    return at + size <= walk->page_bytes ? size : 0;
}

/* The nodes of a page lie one behind the other up to its end. Returns how many there are, or -1. */
static int
count_nodes(Walk *walk, const uint8_t *data, uint64_t page, int is_leaf)
{
    const size_t lower = u16_at(data + 12), upper = u16_at(data + 14), end = walk->page_bytes;
    if (u64_at(data) != page || u16_at(data + 10) != (is_leaf ? LEAF : BRANCH) || lower < PAGE_HEAD_BYTES ||
        lower & 1 || upper & 1 || lower > upper || upper > end) {
        return -1;
    }
    const int count = (int)(lower - PAGE_HEAD_BYTES) / 2;
    int sound = count >= (is_leaf ? 1 : 2), met = 0;
    for (int i = 0; sound && i < count; i++) {
        const size_t at = u16_at(data + PAGE_HEAD_BYTES + 2 * i);
        sound = !(at & 1) && at >= upper && at + NODE_BYTES <= end && !walk->node_size[at / 2];
        if (sound) {
            const size_t size = node_bytes(walk, data, at, is_leaf);
            walk->node_size[at / 2] = (uint16_t)size;
            sound = size != 0;
        }
    }
    size_t at = upper;
    while (sound && at < end && walk->node_size[at / 2]) {
        at += walk->node_size[at / 2];
        met++;
    }
    memset(walk->node_size + upper / 2, 0, end - upper);
    return sound && at == end && met == count ? count : -1;
}

static Key
key_of(const uint8_t *data, int index)
{
    const uint8_t *node = data + u16_at(data + PAGE_HEAD_BYTES + 2 * index);
    return (Key){node + NODE_BYTES, u16_at(node + 6)};
}

static int
check_value(Walk *walk, const uint8_t *node, int headers)
{
    if (!(u16_at(node + 4) & BIG)) {
        return 0;
    }
    const uint64_t value_bytes = u16_at(node) | (uint64_t)u16_at(node + 2) << 16;
    const uint64_t page = u64_at(node + NODE_BYTES + u16_at(node + 6));
    const uint64_t count = (PAGE_HEAD_BYTES - 1 + value_bytes) / walk->page_bytes + 1;
    if (take(walk, page, count) < 0) {
        return -1;
    }
    walk->overflow_pages += count;
    if (headers) {
        uint8_t head[PAGE_HEAD_BYTES];
        if (read_whole(walk->fd, head, PAGE_HEAD_BYTES, page * walk->page_bytes) < 0 || u64_at(head) != page ||
            u16_at(head + 10) != OVERFLOW || u32_at(head + 12) != count) {
            return -1;
        }
    }
    return 0;
}

static int
check_leaf(Walk *walk, const uint8_t *data, int count, const Key *low, const Key *high, size_t begin, size_t end)
{
    Key before = {NULL, 0};
    walk->leaf_pages++;
    walk->entries += (uint64_t)count;
    for (int i = 0; i < count; i++) {
        const Key key = key_of(data, i);
        if (i ? order_of(before, key) >= 0 : low && order_of(key, *low) < 0) {
            return -1;
        }
        before = key;
        int is_wanted = !walk->wanted;
        if (walk->wanted) {
            while (begin < end && order_of(walk->wanted[begin], key) < 0) {
                begin++;
            }
            if (begin < end && !order_of(walk->wanted[begin], key)) {
                walk->found[begin] = is_wanted = 1;
            }
        }
        else {
            uint8_t hash[HASH_BYTES];
            blake3(key.data, key.size, hash);
            walk->key_sum += u64_at(hash);
        }
        if (is_wanted && check_value(walk, key.data - NODE_BYTES, walk->deep) < 0) {
            return -1;
        }
    }
    return high && order_of(before, *high) >= 0 ? -1 : 0;
}

static uint64_t
child_of(const uint8_t *data, int index)
{
    const uint8_t *node = data + u16_at(data + PAGE_HEAD_BYTES + 2 * index);
    return u32_at(node) | (uint64_t)u16_at(node + 4) << 32;
}

static int check_page(Walk *walk, uint64_t page, int level, const Key *low, const Key *high, size_t begin,
                      size_t end);

static int
check_branch(Walk *walk, const uint8_t *data, int count, int level, const Key *low, const Key *high, size_t begin,
             size_t end)
{
    walk->branch_pages++;
    for (int i = 1; i < count; i++) {
        const Key key = key_of(data, i);
        if (!key.size || (i > 1 ? order_of(key_of(data, i - 1), key) >= 0 : low && order_of(*low, key) >= 0) ||
            (i == count - 1 && high && order_of(key, *high) >= 0)) {
            return -1;
        }
    }
#ifdef POSIX_FADV_WILLNEED
    for (int i = 0; i < count && !walk->wanted; i++) {
        const uint64_t child = child_of(data, i);
        if (child < walk->limit) {
            posix_fadvise(walk->fd, (off_t)(child * walk->page_bytes), (off_t)walk->page_bytes,
                          POSIX_FADV_WILLNEED);
        }
    }
#endif
    for (int i = 0; i < count; i++) {
        Key from, to;
        const Key *child_low = low, *child_high = high;
        if (i) {
            from = key_of(data, i);
            child_low = &from;
        }
        if (i + 1 < count) {
            to = key_of(data, i + 1);
            child_high = &to;
        }
        size_t stop = end;
        if (walk->wanted && i + 1 < count) {
            for (stop = begin; stop < end && order_of(walk->wanted[stop], to) < 0;) {
                stop++;
            }
        }
        if (!walk->wanted || stop > begin) {
            if (check_page(walk, child_of(data, i), level + 1, child_low, child_high, begin, stop) < 0) {
                return -1;
            }
        }
        begin = stop;
    }
    return 0;
}

static int
check_page(Walk *walk, uint64_t page, int level, const Key *low, const Key *high, size_t begin, size_t end)
{
    const int is_leaf = level == walk->depth;
    uint8_t *data = take(walk, page, 1) < 0 ? NULL : malloc(walk->page_bytes);
    int failed = !data || read_whole(walk->fd, data, walk->page_bytes, page * walk->page_bytes) < 0;
    const int count = failed ? -1 : count_nodes(walk, data, page, is_leaf);
    if (count < 0) {
        failed = 1;
    }
    else if (is_leaf) {
        failed = check_leaf(walk, data, count, low, high, begin, end) < 0;
    }
    else {
        failed = check_branch(walk, data, count, level, low, high, begin, end) < 0;
    }
    free(data);
    return failed ? -1 : 0;
}

const char check_tree_doc[] =
    "check_tree(fd, page_bytes, limit, used, root, depth, wanted, deep)\n--\n\n"
    "(branch pages, leaf pages, overflow pages, entries, sum of keys, which of the wanted keys are there), or\n"
    "None where anything is wrong. `used` gets a 1 for each page, and `wanted` is a sorted list; or None.";

PyObject *
check_tree(PyObject *module, PyObject *const *args, Py_ssize_t arg_count)
{
    (void)module;
    if (arg_count != 8) {
        PyErr_SetString(PyExc_TypeError, "check_tree takes 8 arguments");
        return NULL;
    }
    Walk *walk = PyMem_Calloc(1, sizeof(Walk));
    Key *wanted = NULL;
    PyObject *keys = NULL, *found = NULL, *result = NULL;
    Py_buffer used = {0};
    if (!walk) {
        return PyErr_NoMemory();
    }
    walk->fd = (int)PyLong_AsLong(args[0]);
    walk->page_bytes = PyLong_AsSize_t(args[1]);
    walk->limit = PyLong_AsUnsignedLongLong(args[2]);
    const uint64_t root = PyLong_AsUnsignedLongLong(args[4]);
    walk->depth = (int)PyLong_AsLong(args[5]);
    walk->deep = PyObject_IsTrue(args[7]);
    if (PyErr_Occurred()) {
        goto done;
    }
    if (args[3] != Py_None) {
        if (PyObject_GetBuffer(args[3], &used, PyBUF_WRITABLE) < 0) {
            goto done;
        }
        walk->used = used.buf;
        walk->used_count = (uint64_t)used.len;
    }
    size_t count = 0;
    if (args[6] != Py_None) {
        /* A list of its own: another thread cannot take a key out of it. */
        keys = PySequence_Tuple(args[6]);
        count = keys ? (size_t)PyTuple_GET_SIZE(keys) : 0;
        wanted = keys ? PyMem_Calloc(count + 1, sizeof(Key)) : NULL;
        found = wanted ? PyBytes_FromStringAndSize(NULL, (Py_ssize_t)count) : NULL;
        if (!found) {
            if (!PyErr_Occurred()) {
                PyErr_NoMemory();
            }
            goto done;
        }
        for (size_t i = 0; i < count; i++) {
            PyObject *key = PyTuple_GET_ITEM(keys, (Py_ssize_t)i);
            if (!PyBytes_CheckExact(key)) {
                PyErr_SetString(PyExc_TypeError, "a key is bytes");
                goto done;
            }
            wanted[i] = (Key){(const uint8_t *)PyBytes_AS_STRING(key), (size_t)PyBytes_GET_SIZE(key)};
        }
        walk->wanted = wanted;
        walk->found = (uint8_t *)PyBytes_AS_STRING(found);
        memset(walk->found, 0, count);
    }
    int failed = walk->depth < 1 || walk->depth > DEPTH_MAX || walk->page_bytes < 256 ||
                 walk->page_bytes > PAGE_BYTES_MAX || walk->page_bytes & 1;
    if (!failed) {
        Py_BEGIN_ALLOW_THREADS
        failed = check_page(walk, root, 1, NULL, NULL, 0, count) < 0;
        Py_END_ALLOW_THREADS
    }
    if (failed) {
        result = Py_NewRef(Py_None);
    }
    else {
        result = Py_BuildValue("(KKKKKO)", walk->branch_pages, walk->leaf_pages, walk->overflow_pages,
                               walk->entries, walk->key_sum, found ? found : Py_None);
    }
done:
    PyBuffer_Release(&used);
    PyMem_Free(wanted);
    Py_XDECREF(keys);
    Py_XDECREF(found);
    PyMem_Free(walk);
    return result;
}
