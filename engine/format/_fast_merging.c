/* What becomes of a range's pages with its changes. Others run meanwhile: it reads bytes that nobody changes. */

#include "_fast.h"

#include <stdlib.h>

/* A page: magic and version (12 bytes), checksum (4), seq (8), counts of keys and rows, bytes of keys, metadata
   and values (4 each), 4 bytes of nothing; then columns of seqs, times, ends of keys, of rows where a key has
   several, of metadata where there are any, of values, flags; then keys, metadata and values. docs/PAGES.md has
   the rest, which the pages that are merged here have not: rows of transactions. */
#define PAGE_HEADER_BYTES 48
#define PAGE_CHECKSUM_AT 12
#define PAGE_COVERED_AT 16
#define PAGE_KEY_BYTES 500
#define FLAG_TOMBSTONE 1
#define FLAG_REFERENCE 2
#define FLAG_BUCKET 4

/* Of a frame: the kinds of data, and the flags whose groups are of fixed size and say nothing of the version. */
#define KIND_DELETE 4
#define KIND_COPY 5
#define IN_GROUP 2
#define IN_SESSION 4
#define WITH_REQUEST_HASH 8

/* The place of a large value: its segment's first seq (8 bytes), its frame's offset (4 bytes, and 4 of nothing),
   its length (8), its BLAKE3. */
#define PLACE_BYTES 56

static const uint8_t page_magic[PAGE_CHECKSUM_AT] = "LWPAG\r\n\x1a\x01\0\0";

/* A version of a key. Those of one key follow each other, the newest first. */
typedef struct {
    const uint8_t *key, *metadata, *value;
    uint32_t key_size, metadata_size, value_size;
    uint8_t flags;
    uint8_t is_older; /* a newer one of the same key comes before it */
    uint8_t is_new;   /* the page has not had the key */
    uint64_t seq, time_us;
} Row;

static int
compare(const uint8_t *a, size_t a_size, const uint8_t *b, size_t b_size)
{
    const int order = memcmp(a, b, a_size < b_size ? a_size : b_size);
    return order ? order : (a_size > b_size) - (a_size < b_size);
}

static uint32_t
page_checksum(const uint8_t *data, size_t size, const uint8_t *key, size_t key_size)
{
    const uint32_t crc = crc_of(crc_of(CRC_START, key, key_size), page_magic, sizeof page_magic);
    return ~crc_of(crc, data + PAGE_COVERED_AT, size - PAGE_COVERED_AT);
}

/* Where the columns of a page are. */
typedef struct {
    size_t key_count, row_count, key_bytes, metadata_bytes, value_bytes;
    size_t key_ends, row_ends, metadata_ends, value_ends, flags, keys, metadata, values, size;
} Layout;

static Layout
layout_of(size_t key_count, size_t row_count, size_t key_bytes, size_t metadata_bytes, size_t value_bytes)
{
    Layout at = {
        .key_count = key_count,
        .row_count = row_count,
        .key_bytes = key_bytes,
        .metadata_bytes = metadata_bytes,
        .value_bytes = value_bytes,
    };
    at.key_ends = PAGE_HEADER_BYTES + 16 * row_count;
    at.row_ends = at.key_ends + 4 * key_count;
    at.metadata_ends = at.row_ends + (key_count != row_count ? 4 * key_count : 0);
    at.value_ends = at.metadata_ends + (metadata_bytes ? 4 * row_count : 0);
    at.flags = at.value_ends + 4 * row_count;
    at.keys = at.flags + row_count;
    at.metadata = at.keys + key_bytes;
    at.values = at.metadata + metadata_bytes;
    at.size = at.values + value_bytes;
    return at;
}

/* The layout of these bytes; 0 where they are no page. */
static int
layout_in(const uint8_t *data, size_t size, Layout *layout)
{
    if (size < PAGE_HEADER_BYTES) {
        return 0;
    }
    *layout = layout_of(u32_at(data + 24), u32_at(data + 28), u32_at(data + 32), u32_at(data + 36),
                        u32_at(data + 40));
    return layout->key_count && layout->key_count <= layout->row_count && !u32_at(data + 44) &&
           layout->size == size;
}

/* The same of what was stored under this key, with its checksum. */
static int
read_layout(PyObject *page, PyObject *key, Layout *layout)
{
    const uint8_t *data = (const uint8_t *)PyBytes_AS_STRING(page);
    const size_t size = (size_t)PyBytes_GET_SIZE(page);
    if (size < PAGE_HEADER_BYTES || memcmp(data, page_magic, sizeof page_magic) ||
        u32_at(data + PAGE_CHECKSUM_AT) != page_checksum(data, size, (const uint8_t *)PyBytes_AS_STRING(key),
                                                         (size_t)PyBytes_GET_SIZE(key))) {
        return 0;
    }
    return layout_in(data, size, layout);
}

/* The rows of a page without those that the floor takes: the one after the last, or NULL where something about
   them is unusual. Of each key that is what is older than its newest version at or below the floor, and that one
   where it is a deletion and the newest of all. */
static Row *
read_rows(const uint8_t *data, const Layout *at, uint64_t floor, Row *rows)
{
    const int has_versions = at->key_count != at->row_count;
    size_t row = 0, key_start = 0, metadata_start = 0, value_start = 0;
    for (size_t i = 0; i < at->key_count; i++) {
        const size_t key_end = u32_at(data + at->key_ends + 4 * i), first = row;
        const size_t row_end = has_versions ? u32_at(data + at->row_ends + 4 * i) : i + 1;
        if (key_end < key_start || key_end > at->key_bytes || row_end <= row || row_end > at->row_count) {
            return NULL;
        }
        uint64_t seq_before = 0;
        int is_below = 0;
        for (; row < row_end; row++) {
            const size_t metadata_end = at->metadata_bytes ? u32_at(data + at->metadata_ends + 4 * row) : 0;
            const size_t value_end = u32_at(data + at->value_ends + 4 * row);
            const uint64_t seq = u64_at(data + PAGE_HEADER_BYTES + 8 * row);
            const uint8_t flags = data[at->flags + row];
            if (metadata_end < metadata_start || metadata_end > at->metadata_bytes ||
                value_end < value_start || value_end > at->value_bytes ||
                (flags & ~(FLAG_TOMBSTONE | FLAG_REFERENCE | FLAG_BUCKET)) ||
                (row > first && seq >= seq_before)) {
                return NULL;
            }
            const int is_taken = is_below || (row == first && seq <= floor && flags & FLAG_TOMBSTONE);
            if (!is_taken) {
                *rows++ = (Row){
                    .key = data + at->keys + key_start,
                    .metadata = data + at->metadata + metadata_start,
                    .value = data + at->values + value_start,
                    .key_size = (uint32_t)(key_end - key_start),
                    .metadata_size = (uint32_t)(metadata_end - metadata_start),
                    .value_size = (uint32_t)(value_end - value_start),
                    .flags = flags,
                    .is_older = row > first,
                    .seq = seq,
                    .time_us = u64_at(data + PAGE_HEADER_BYTES + 8 * (at->row_count + row)),
                };
            }
            is_below = is_below || seq <= floor;
            seq_before = seq;
            metadata_start = metadata_end;
            value_start = value_end;
        }
        key_start = key_end;
    }
    const int is_whole = row == at->row_count && key_start == at->key_bytes &&
                         metadata_start == at->metadata_bytes && value_start == at->value_bytes;
    return is_whole ? rows : NULL;
}

/* The row of a record, whose value may have to stay where it is: then `is_large` says so. 0 where it is another
   one than a put, a copy or a deletion outside of transactions. */
static int
row_of_record(PyObject *key, PyObject *record, size_t inline_bytes_max, Row *row, int *is_large)
{
    if (!PyBytes_CheckExact(key) || !PyBytes_CheckExact(record)) {
        return 0;
    }
    const uint8_t *frame = (const uint8_t *)PyBytes_AS_STRING(record);
    const size_t size = (size_t)PyBytes_GET_SIZE(record), key_size = (size_t)PyBytes_GET_SIZE(key);
    if (size < FRAME_BYTES + FIXED_BYTES) {
        return 0;
    }
    const uint8_t kind = frame[FRAME_BYTES];
    const uint16_t flags = u16_at(frame + FRAME_BYTES + 1);
    const size_t names_size = (size_t)u16_at(frame + FRAME_BYTES + 3) + u16_at(frame + FRAME_BYTES + 5);
    const size_t metadata_size = u16_at(frame + FRAME_BYTES + 7);
    const size_t metadata_at = FRAME_BYTES + FIXED_BYTES + (flags & IN_GROUP ? 8 : 0) +
                               (flags & IN_SESSION ? 16 : 0) + (flags & WITH_REQUEST_HASH ? 16 : 0) + names_size;
    const size_t value_at = metadata_at + metadata_size, end = FRAME_BYTES + (size_t)u32_at(frame + 8);
    if ((kind != KIND_PUT && kind != KIND_COPY && kind != KIND_DELETE) ||
        flags & ~(IN_GROUP | IN_SESSION | WITH_REQUEST_HASH) || key_size != 1 + names_size ||
        value_at > end || (end != size && end + RECORD_PLACE_BYTES != size)) {
        return 0;
    }
    /* A deletion is nothing but that. */
    *row = (Row){
        .key = (const uint8_t *)PyBytes_AS_STRING(key),
        .metadata = frame + metadata_at,
        .value = frame + value_at,
        .key_size = (uint32_t)key_size,
        .metadata_size = kind == KIND_DELETE ? 0 : (uint32_t)metadata_size,
        .value_size = kind == KIND_DELETE ? 0 : (uint32_t)(end - value_at),
        .flags = kind == KIND_DELETE ? FLAG_TOMBSTONE : 0,
        .seq = u64_at(frame),
        .time_us = u64_at(frame + FRAME_BYTES + 9),
    };
    *is_large = row->value_size > inline_bytes_max;
    return !*is_large || end != size;
}

/* Have the row of a large value refer to it. */
static void
refer(Row *row, uint8_t place[PLACE_BYTES])
{
    const uint64_t size = row->value_size;
    memset(place, 0, PLACE_BYTES);
    memcpy(place, row->value + size, RECORD_PLACE_BYTES);
    memcpy(place + 16, &size, 8);
    blake3(row->value, size, place + 24);
    row->value = place;
    row->value_size = PLACE_BYTES;
    row->flags |= FLAG_REFERENCE;
}

/* A page that is made: its key, what it has, and then its bytes. */
typedef struct {
    Py_ssize_t index; /* of the page that it was; -1: there was none */
    int is_first;     /* it has that one's key */
    const uint8_t *key;
    size_t key_size;
    uint64_t seq;
    const Row *rows;
    Layout at;
    uint8_t *data; /* NULL where there are no rows: nothing is left of it */
} Made;

static void
encode_page(const Made *made)
{
    const Layout *at = &made->at;
    uint8_t *data = made->data;
    const uint32_t counts[6] = {
        (uint32_t)at->key_count,      (uint32_t)at->row_count,   (uint32_t)at->key_bytes,
        (uint32_t)at->metadata_bytes, (uint32_t)at->value_bytes, 0,
    };
    memcpy(data, page_magic, sizeof page_magic);
    memcpy(data + PAGE_COVERED_AT, &made->seq, 8);
    memcpy(data + PAGE_COVERED_AT + 8, counts, sizeof counts);
    const int has_versions = at->key_count != at->row_count;
    uint32_t key_end = 0, metadata_end = 0, value_end = 0;
    size_t key = 0; /* the number of keys up to this row */
    for (size_t i = 0; i < at->row_count; i++) {
        const Row *row = made->rows + i;
        memcpy(data + PAGE_HEADER_BYTES + 8 * i, &row->seq, 8);
        memcpy(data + PAGE_HEADER_BYTES + 8 * (at->row_count + i), &row->time_us, 8);
        if (!row->is_older) {
            memcpy(data + at->keys + key_end, row->key, row->key_size);
            key_end += row->key_size;
            memcpy(data + at->key_ends + 4 * key++, &key_end, 4);
        }
        if (has_versions) {
            const uint32_t row_end = (uint32_t)(i + 1);
            memcpy(data + at->row_ends + 4 * (key - 1), &row_end, 4);
        }
        memcpy(data + at->values + value_end, row->value, row->value_size);
        value_end += row->value_size;
        memcpy(data + at->value_ends + 4 * i, &value_end, 4);
        if (at->metadata_bytes) {
            memcpy(data + at->metadata + metadata_end, row->metadata, row->metadata_size);
            metadata_end += row->metadata_size;
            memcpy(data + at->metadata_ends + 4 * i, &metadata_end, 4);
        }
        data[at->flags + i] = row->flags;
    }
    const uint32_t checksum = page_checksum(data, at->size, made->key, made->key_size);
    memcpy(data + PAGE_CHECKSUM_AT, &checksum, 4);
}

/* A change on its way into a page, with the first bytes of its key in which it differs from others. Those of one
   key stay in the order in which they were taken: the newest first. */
typedef struct {
    uint64_t head;
    Row *row;
} Change;

static int
compare_changes(const void *a, const void *b)
{
    const Change *one = a, *other = b;
    if (one->head != other->head) {
        return one->head < other->head ? -1 : 1;
    }
    const int order = compare(one->row->key, one->row->key_size, other->row->key, other->row->key_size);
    return order ? order : (one->row > other->row) - (one->row < other->row);
}

/* The first eight bytes of a key from `skip` on, as they are ordered; what is missing is 0. */
static uint64_t
head_of(const Row *row, size_t skip)
{
    uint64_t head = 0;
    for (size_t i = skip; i < skip + 8; i++) {
        head = head << 8 | (i < row->key_size ? row->key[i] : 0);
    }
    return head;
}

static size_t
common_bytes(const Row *rows, size_t count)
{
    size_t common = rows[0].key_size;
    for (size_t i = 1; i < count; i++) {
        size_t same = 0;
        const size_t most = rows[i].key_size < common ? rows[i].key_size : common;
        while (same < most && rows[i].key[same] == rows[0].key[same]) {
            same++;
        }
        common = same;
    }
    return common;
}

typedef struct {
    /* Given. */
    PyObject *low, **page_keys, **pages;
    size_t page_count;
    uint64_t frozen_seq, floor, highest_boundary;
    size_t inline_bytes_max;
    const uint8_t *hash_key;
    size_t key_count, count; /* of the newest records, and of all */
    PyObject **keys, **records;
    /* Made. */
    Row *fresh, *held, *merged;
    uint8_t *places;
    Change *changes;
    size_t *ends; /* of the changes below each page, and of those of the last one */
    Made *made;
    size_t made_count, record_bytes;
} Merging;

enum { DONE, UNUSUAL, NO_MEMORY };

/* The rows as pages: one that begins where the page did, and one at each new key that is a boundary. */
static int
divide(Merging *m, Py_ssize_t index, PyObject *page_key, uint64_t seq, const Row *rows, size_t count)
{
    const uint8_t *low = (const uint8_t *)PyBytes_AS_STRING(page_key);
    size_t low_size = (size_t)PyBytes_GET_SIZE(page_key), start = 0;
    int is_first = 1;
    for (size_t i = 0; i <= count; i++) {
        size_t head = 0, cut = count;
        if (i < count) {
            head = rows[i].key_size < PAGE_KEY_BYTES ? rows[i].key_size : PAGE_KEY_BYTES;
            if (!rows[i].is_new || blake3_short(m->hash_key, rows[i].key, head) > m->highest_boundary ||
                !compare(low, low_size, rows[i].key, head)) {
                continue; /* or the page begins with these bytes already */
            }
            cut = i;
            while (cut > start && compare(rows[cut - 1].key, rows[cut - 1].key_size, rows[i].key, head) >= 0) {
                cut--; /* it begins with the same bytes */
            }
        }
        if (cut > start) {
            size_t key_count = 0, key_bytes = 0, metadata_bytes = 0, value_bytes = 0;
            for (size_t row = start; row < cut; row++) {
                if (!rows[row].is_older) {
                    key_count++;
                    key_bytes += rows[row].key_size;
                }
                metadata_bytes += rows[row].metadata_size;
                value_bytes += rows[row].value_size;
            }
            const Layout at = layout_of(key_count, cut - start, key_bytes, metadata_bytes, value_bytes);
            if (at.size > UINT32_MAX) {
                return UNUSUAL;
            }
            m->made[m->made_count++] =
                (Made){index, is_first, low, low_size, seq, rows + start, at, NULL};
        }
        start = cut;
        if (i < count) {
            low = rows[i].key;
            low_size = head;
            is_first = 0;
        }
    }
    return DONE;
}

/* Mark the older records. 0 where one does not lie behind a newer one of its key. */
static int
mark_older(const Merging *m)
{
    if (m->count == m->key_count) {
        return 1;
    }
    for (size_t i = 0; i < m->count; i++) {
        Row *row = m->changes[i].row;
        row->is_older = row >= m->fresh + m->key_count;
        if (row->is_older) {
            const Row *newer = i ? m->changes[i - 1].row : NULL;
            if (!newer || newer->seq < row->seq ||
                compare(newer->key, newer->key_size, row->key, row->key_size)) {
                return 0;
            }
        }
    }
    return 1;
}

/* The changes in order, and where those of each page end. */
static int
sort_changes(Merging *m)
{
    const size_t page_count = m->page_count;
    m->fresh = malloc(m->count * sizeof(Row));
    m->changes = malloc(m->count * sizeof(Change));
    m->ends = malloc((page_count + 1) * sizeof(size_t));
    if (!m->fresh || !m->changes || !m->ends) {
        return NO_MEMORY;
    }
    size_t large_count = 0;
    for (size_t i = 0; i < m->count; i++) {
        int is_large;
        if (!row_of_record(m->keys[i], m->records[i], m->inline_bytes_max, m->fresh + i, &is_large) ||
            m->fresh[i].seq > m->frozen_seq) {
            return UNUSUAL;
        }
        m->record_bytes += (size_t)PyBytes_GET_SIZE(m->records[i]);
        large_count += (size_t)is_large;
    }
    m->places = malloc(large_count * PLACE_BYTES + 1);
    if (!m->places) {
        return NO_MEMORY;
    }
    uint8_t *place = m->places;
    for (size_t i = 0; large_count && i < m->count; i++) {
        Row *row = m->fresh + i;
        if (row->value_size > m->inline_bytes_max) {
            refer(row, place);
            place += PLACE_BYTES;
        }
    }
    const size_t common = common_bytes(m->fresh, m->count);
    for (size_t i = 0; i < m->count; i++) {
        m->changes[i] = (Change){head_of(m->fresh + i, common), m->fresh + i};
    }
    qsort(m->changes, m->count, sizeof(Change), compare_changes);
    if (!mark_older(m)) {
        return UNUSUAL;
    }
    size_t at = 0;
    for (size_t i = 0; i < page_count; i++) {
        PyObject *next = m->page_keys[i];
        while (at < m->count && compare(m->changes[at].row->key, m->changes[at].row->key_size,
                                        (const uint8_t *)PyBytes_AS_STRING(next),
                                        (size_t)PyBytes_GET_SIZE(next)) < 0) {
            at++;
        }
        m->ends[i] = at;
    }
    m->ends[page_count] = m->count;
    return DONE;
}

/* The rows of a page, from `held` to below `held_end`, with the changes from `start` to below `end`, which go to
   `merged`: the one after the last. `held_seq` is that of the page. */
static Row *
merge_page(const Merging *m, Row *held, const Row *held_end, uint64_t held_seq, size_t start, size_t end,
           Row *merged)
{
    for (size_t i = start, next; i < end; i = next) {
        const Row *change = m->changes[i].row;
        next = i + 1;
        while (next < end && m->changes[next].row->is_older) {
            next++;
        }
        if (change->seq <= held_seq) {
            continue; /* the page has it already */
        }
        int order = -1;
        while (held < held_end &&
               (order = compare(held->key, held->key_size, change->key, change->key_size)) < 0) {
            *merged++ = *held++;
        }
        const int is_held = held < held_end && !order;
        Row *newest = merged;
        *merged = *change;
        merged++->is_new = !is_held;
        for (size_t older = i + 1; older < next && merged[-1].seq > m->floor; older++) {
            const Row *row = m->changes[older].row;
            /* Of several writes of one group, which have one seq, the last survives. */
            if (row->seq > held_seq && row->seq < merged[-1].seq) {
                *merged++ = *row;
            }
        }
        const uint64_t oldest_seq = merged[-1].seq;
        if (is_held) {
            /* A page that was made from a checkpoint may have newer rows than it claims to hold: these come
               again, all of them. */
            int has_more = 1;
            while (has_more && (oldest_seq <= m->floor || held->seq >= oldest_seq)) {
                has_more = ++held < held_end && held->is_older;
            }
            if (has_more) {
                held->is_older = 1; /* and goes on below */
            }
        }
        if (newest->flags & FLAG_TOMBSTONE && newest->seq <= m->floor) {
            merged = newest;
        }
    }
    while (held < held_end) {
        *merged++ = *held++;
    }
    return merged;
}

/* All that needs no interpreter but the bytes of pages that are made. */
static int
merge(Merging *m)
{
    const int sorted = sort_changes(m);
    if (sorted != DONE) {
        return sorted;
    }
    const Py_ssize_t page_count = (Py_ssize_t)m->page_count;
    Layout *layouts = calloc((size_t)page_count + 1, sizeof(Layout));
    int found = layouts ? DONE : NO_MEMORY;
    size_t held_most = 0, rows_most = m->count;
    for (Py_ssize_t i = 0; found == DONE && i < page_count; i++) {
        if (m->ends[i + 1] > m->ends[i]) {
            if (!read_layout(m->pages[i], m->page_keys[i], layouts + i)) {
                found = UNUSUAL;
            }
            held_most = layouts[i].row_count > held_most ? layouts[i].row_count : held_most;
            rows_most += layouts[i].row_count;
        }
    }
    if (found == DONE) {
        m->held = malloc((held_most + 1) * sizeof(Row));
        m->merged = malloc(rows_most * sizeof(Row));
        m->made = malloc((m->key_count + (size_t)page_count + 1) * sizeof(Made));
        found = m->held && m->merged && m->made ? DONE : NO_MEMORY;
    }
    Row *merged = m->merged;
    for (Py_ssize_t index = -1; found == DONE && index < page_count; index++) {
        const size_t start = index < 0 ? 0 : m->ends[index], end = m->ends[index + 1];
        if (end == start) {
            continue;
        }
        PyObject *low = index < 0 ? m->low : m->page_keys[index];
        uint64_t held_seq = 0;
        Row *held_end = m->held;
        if (index >= 0) {
            const uint8_t *data = (const uint8_t *)PyBytes_AS_STRING(m->pages[index]);
            held_seq = u64_at(data + PAGE_COVERED_AT);
            held_end = read_rows(data, layouts + index, m->floor, m->held);
            if (!held_end) {
                found = UNUSUAL;
                break;
            }
        }
        Row *rows = merged;
        merged = merge_page(m, m->held, held_end, held_seq, start, end, rows);
        if (merged > rows && compare(rows->key, rows->key_size, (const uint8_t *)PyBytes_AS_STRING(low),
                                     (size_t)PyBytes_GET_SIZE(low)) < 0) {
            found = UNUSUAL;
        }
        else if (merged == rows) {
            m->made[m->made_count++] = (Made){.index = index};
        }
        else {
            const uint64_t seq = m->frozen_seq > held_seq ? m->frozen_seq : held_seq;
            found = divide(m, index, low, seq, rows, (size_t)(merged - rows));
        }
    }
    free(layouts);
    return found;
}

/* [(index, [(page key, page), …]), …], with the bytes of pages still to be written. */
static PyObject *
parts_of(Merging *m)
{
    PyObject *parts = PyList_New(0), *pages = NULL;
    for (size_t i = 0; parts && i < m->made_count; i++) {
        Made *made = m->made + i;
        int failed = 0;
        if (!i || made->index != made[-1].index) {
            PyObject *index = PyLong_FromSsize_t(made->index);
            pages = PyList_New(0); /* the row below keeps it */
            failed = !index || !pages || append_row(parts, index, pages, NULL) < 0;
            Py_XDECREF(index);
            Py_XDECREF(pages);
        }
        if (!failed && made->at.row_count) {
            PyObject *key;
            if (made->is_first) {
                key = Py_NewRef(made->index < 0 ? m->low : m->page_keys[made->index]);
            }
            else {
                key = PyBytes_FromStringAndSize((const char *)made->key, (Py_ssize_t)made->key_size);
            }
            PyObject *page = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)made->at.size);
            failed = !key || !page || append_row(pages, key, page, NULL) < 0;
            if (!failed) {
                made->data = (uint8_t *)PyBytes_AS_STRING(page);
            }
            Py_XDECREF(key);
            Py_XDECREF(page);
        }
        if (failed) {
            Py_CLEAR(parts);
        }
    }
    return parts;
}

static void
let_go(PyObject **held, size_t count)
{
    for (size_t i = 0; held && i < count; i++) {
        Py_DECREF(held[i]);
    }
    free(held);
}

/* The bytes of which there is a list, which stay, whatever becomes of the list. */
static PyObject **
hold(PyObject *list)
{
    const size_t count = (size_t)PyList_GET_SIZE(list);
    PyObject **held = malloc(count * sizeof(PyObject *) + 1);
    if (!held) {
        PyErr_NoMemory();
        return NULL;
    }
    for (size_t i = 0; i < count; i++) {
        held[i] = Py_NewRef(PyList_GET_ITEM(list, (Py_ssize_t)i));
        if (!PyBytes_CheckExact(held[i])) {
            let_go(held, i + 1);
            PyErr_SetString(PyExc_TypeError, "pages and their keys are bytes");
            return NULL;
        }
    }
    return held;
}

/* Take the newest records of all keys, and behind them the older ones, of each key the newest first. Nothing is
   held: nobody changes the dictionaries, nor the lists in them, and nothing here lets Python code run. */
static int
take_records(Merging *m, PyObject *newest, PyObject *older)
{
    PyObject *key, *record;
    Py_ssize_t position = 0;
    m->count = m->key_count = (size_t)PyDict_GET_SIZE(newest);
    while (PyDict_Next(older, &position, &key, &record)) {
        m->count += PyList_CheckExact(record) ? (size_t)PyList_GET_SIZE(record) : 1;
    }
    m->keys = malloc(2 * m->count * sizeof(PyObject *) + 1);
    if (!m->keys) {
        return NO_MEMORY;
    }
    m->records = m->keys + m->count;
    size_t at = 0;
    position = 0;
    while (PyDict_Next(newest, &position, &key, &record)) {
        m->keys[at] = key;
        m->records[at++] = record;
    }
    position = 0;
    while (PyDict_Next(older, &position, &key, &record)) {
        const int are_several = PyList_CheckExact(record);
        for (Py_ssize_t i = are_several ? PyList_GET_SIZE(record) : 1; i-- > 0;) {
            m->keys[at] = key;
            m->records[at++] = are_several ? PyList_GET_ITEM(record, i) : record;
        }
    }
    return DONE;
}

const char merge_range_doc[] =
    "merge_range(records, older, low, page_keys, pages, frozen_seq, floor, inline_bytes_max, hash_key, "
    "highest_boundary)\n--\n\n"
    "(bytes of the records, their number, [(index, [(page key, page), …]), …]): what becomes of the pages that\n"
    "have changes; None where Python has to look at it. `older` has what `records` supersede: bytes, or a list of\n"
    "them, oldest first. Nobody changes them meanwhile: others run.";

PyObject *
merge_range(PyObject *module, PyObject *const *args, Py_ssize_t arg_count)
{
    (void)module;
    if (arg_count != 10 || !PyDict_CheckExact(args[0]) || !PyDict_CheckExact(args[1]) ||
        !PyBytes_CheckExact(args[2]) || !PyList_CheckExact(args[3]) || !PyList_CheckExact(args[4]) ||
        PyList_GET_SIZE(args[3]) != PyList_GET_SIZE(args[4]) || !PyBytes_CheckExact(args[8]) ||
        PyBytes_GET_SIZE(args[8]) != HASH_BYTES) {
        PyErr_SetString(PyExc_TypeError, "merge_range takes records, pages with their keys, and how to merge");
        return NULL;
    }
    Merging m = {
        .low = args[2],
        .frozen_seq = PyLong_AsUnsignedLongLong(args[5]),
        .floor = PyLong_AsUnsignedLongLong(args[6]),
        .inline_bytes_max = PyLong_AsSize_t(args[7]),
        .hash_key = (const uint8_t *)PyBytes_AS_STRING(args[8]),
        .highest_boundary = PyLong_AsUnsignedLongLong(args[9]),
    };
    if (PyErr_Occurred()) {
        return NULL;
    }
    PyObject *parts = NULL, *result = NULL;
    m.page_count = (size_t)PyList_GET_SIZE(args[3]);
    if (!(m.page_keys = hold(args[3])) || !(m.pages = hold(args[4]))) {
        goto done;
    }
    if (!PyDict_GET_SIZE(args[0])) {
        result = Py_NewRef(Py_None);
        goto done;
    }
    int found = take_records(&m, args[0], args[1]);
    if (found == DONE) {
        Py_BEGIN_ALLOW_THREADS
        found = merge(&m);
        Py_END_ALLOW_THREADS
    }
    if (found == NO_MEMORY) {
        PyErr_NoMemory();
    }
    else if (found == UNUSUAL) {
        result = Py_NewRef(Py_None);
    }
    else if ((parts = parts_of(&m))) {
        Py_BEGIN_ALLOW_THREADS
        for (size_t i = 0; i < m.made_count; i++) {
            if (m.made[i].data) {
                encode_page(m.made + i);
            }
        }
        Py_END_ALLOW_THREADS
        result = Py_BuildValue("(nnN)", (Py_ssize_t)m.record_bytes, (Py_ssize_t)m.count, parts);
    }
done:
    let_go(m.page_keys, m.page_count);
    let_go(m.pages, m.page_count);
    free(m.keys);
    free(m.fresh);
    free(m.places);
    free(m.changes);
    free(m.ends);
    free(m.held);
    free(m.merged);
    free(m.made);
    return result;
}

/* ------------------------------------------------------------------ one row of a page */

/* Where a part begins, given where each ends. */
static size_t
part_start(const uint8_t *ends, size_t row)
{
    return row ? u32_at(ends + 4 * (row - 1)) : 0;
}

/* The first row whose key is not below this one; -1 where ends of keys are none. */
static Py_ssize_t
first_row(const uint8_t *data, const Layout *at, PyObject *key)
{
    size_t low = 0, high = at->row_count;
    while (low < high) {
        const size_t row = (low + high) / 2, start = part_start(data + at->key_ends, row);
        const size_t end = u32_at(data + at->key_ends + 4 * row);
        if (start > end || end > at->key_bytes) {
            return -1;
        }
        if (compare(data + at->keys + start, end - start, (const uint8_t *)PyBytes_AS_STRING(key),
                    (size_t)PyBytes_GET_SIZE(key)) < 0) {
            low = row + 1;
        }
        else {
            high = row;
        }
    }
    return (Py_ssize_t)low;
}

static PyObject *
row_at(const uint8_t *data, const Layout *at, size_t row)
{
    const size_t value_start = part_start(data + at->value_ends, row);
    const size_t value_end = u32_at(data + at->value_ends + 4 * row);
    size_t metadata_start = 0, metadata_end = 0;
    if (at->metadata_bytes) {
        metadata_start = part_start(data + at->metadata_ends, row);
        metadata_end = u32_at(data + at->metadata_ends + 4 * row);
    }
    if (value_start > value_end || value_end > at->value_bytes || metadata_start > metadata_end ||
        metadata_end > at->metadata_bytes) {
        Py_RETURN_NOTIMPLEMENTED;
    }
    return Py_BuildValue(
        "(KKBy#y#)", (unsigned long long)u64_at(data + PAGE_HEADER_BYTES + 8 * row),
        (unsigned long long)u64_at(data + PAGE_HEADER_BYTES + 8 * (at->row_count + row)), data[at->flags + row],
        (const char *)data + at->metadata + metadata_start, (Py_ssize_t)(metadata_end - metadata_start),
        (const char *)data + at->values + value_start, (Py_ssize_t)(value_end - value_start));
}

const char newest_row_doc[] =
    "newest_row(page, key)\n--\n\n"
    "(seq, time, flags, metadata, value) of a key in a page whose keys have one version each, None where there is\n"
    "no such key; NotImplemented where Python has to look at it.";

PyObject *
newest_row(PyObject *module, PyObject *const *args, Py_ssize_t arg_count)
{
    (void)module;
    if (arg_count != 2 || !PyBytes_CheckExact(args[0]) || !PyBytes_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError, "newest_row takes a page and a key");
        return NULL;
    }
    const uint8_t *data = (const uint8_t *)PyBytes_AS_STRING(args[0]);
    const size_t size = (size_t)PyBytes_GET_SIZE(args[0]);
    Layout at;
    if (!layout_in(data, size, &at) || at.key_count != at.row_count) {
        Py_RETURN_NOTIMPLEMENTED;
    }
    const Py_ssize_t row = first_row(data, &at, args[1]);
    if (row < 0) {
        Py_RETURN_NOTIMPLEMENTED;
    }
    if ((size_t)row == at.row_count) {
        Py_RETURN_NONE;
    }
    const size_t start = part_start(data + at.key_ends, (size_t)row);
    const size_t end = u32_at(data + at.key_ends + 4 * (size_t)row);
    if (start > end || end > at.key_bytes) {
        Py_RETURN_NOTIMPLEMENTED;
    }
    if (compare(data + at.keys + start, end - start, (const uint8_t *)PyBytes_AS_STRING(args[1]),
                (size_t)PyBytes_GET_SIZE(args[1]))) {
        Py_RETURN_NONE;
    }
    return row_at(data, &at, (size_t)row);
}

/* ------------------------------------------------------------------ the rows of a page, as objects */

/* A new object: bucket, name, value, None for metadata, seq, time. */
static PyObject *
object_at(PyTypeObject *type, const uint8_t *data, const Layout *at, size_t row, PyObject *bucket, size_t skip)
{
    const size_t key_start = part_start(data + at->key_ends, row) + skip;
    const size_t key_end = u32_at(data + at->key_ends + 4 * row);
    const size_t value_start = part_start(data + at->value_ends, row);
    const size_t value_end = u32_at(data + at->value_ends + 4 * row);
    if (key_start > key_end || key_end > at->key_bytes || value_start > value_end ||
        value_end > at->value_bytes || data[at->flags + row]) {
        Py_RETURN_NOTIMPLEMENTED;
    }
    PyObject *object = type->tp_alloc(type, 6);
    if (!object) {
        return NULL;
    }
    PyTuple_SET_ITEM(object, 0, Py_NewRef(bucket));
    PyTuple_SET_ITEM(object, 1,
                     PyUnicode_DecodeUTF8((const char *)data + at->keys + key_start,
                                          (Py_ssize_t)(key_end - key_start), NULL));
    PyTuple_SET_ITEM(object, 2,
                     PyBytes_FromStringAndSize((const char *)data + at->values + value_start,
                                               (Py_ssize_t)(value_end - value_start)));
    PyTuple_SET_ITEM(object, 3, Py_NewRef(Py_None));
    PyTuple_SET_ITEM(object, 4, PyLong_FromUnsignedLongLong(u64_at(data + PAGE_HEADER_BYTES + 8 * row)));
    PyTuple_SET_ITEM(object, 5, PyLong_FromUnsignedLongLong(
                                    u64_at(data + PAGE_HEADER_BYTES + 8 * (at->row_count + row))));
    for (Py_ssize_t i = 1; i < 6; i++) {
        if (!PyTuple_GET_ITEM(object, i)) {
            Py_DECREF(object);
            return NULL;
        }
    }
    return object;
}

const char plain_objects_doc[] =
    "plain_objects(page, low, high, skip, bucket, type)\n--\n\n"
    "The rows of the keys from `low` to below `high` (None: all above) of a page whose keys have one version each,\n"
    "which is a value, as objects of a tuple's type, without the first `skip` bytes of their keys;\n"
    "NotImplemented where Python has to look at it.";

PyObject *
plain_objects(PyObject *module, PyObject *const *args, Py_ssize_t arg_count)
{
    (void)module;
    if (arg_count != 6 || !PyBytes_CheckExact(args[0]) || !PyBytes_CheckExact(args[1]) ||
        (args[2] != Py_None && !PyBytes_CheckExact(args[2])) || !PyUnicode_CheckExact(args[4]) ||
        !PyType_Check(args[5]) || !PyType_FastSubclass((PyTypeObject *)args[5], Py_TPFLAGS_TUPLE_SUBCLASS)) {
        PyErr_SetString(PyExc_TypeError, "plain_objects takes a page, two keys, a number, a bucket and a type");
        return NULL;
    }
    const size_t skip = PyLong_AsSize_t(args[3]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    const uint8_t *data = (const uint8_t *)PyBytes_AS_STRING(args[0]);
    const size_t size = (size_t)PyBytes_GET_SIZE(args[0]);
    Layout at;
    if (!layout_in(data, size, &at) || at.key_count != at.row_count || at.metadata_bytes || skip > at.key_bytes) {
        Py_RETURN_NOTIMPLEMENTED;
    }
    const Py_ssize_t first = first_row(data, &at, args[1]);
    const Py_ssize_t stop = args[2] == Py_None ? (Py_ssize_t)at.row_count : first_row(data, &at, args[2]);
    if (first < 0 || stop < 0) {
        Py_RETURN_NOTIMPLEMENTED;
    }
    PyObject *objects = PyList_New(stop > first ? stop - first : 0);
    for (Py_ssize_t row = first; objects && row < stop; row++) {
        PyObject *object = object_at((PyTypeObject *)args[5], data, &at, (size_t)row, args[4], skip);
        if (!object || object == Py_NotImplemented) {
            Py_DECREF(objects);
            return object;
        }
        PyList_SET_ITEM(objects, row - first, object);
    }
    return objects;
}
