"""The bytes of a page, in which the database stores a range of keys, and the page in memory.

Always true:
  - a page holds the rows of the keys from its own page key up to the next page's, sorted by key, versions
    of one key newest first; it holds every frame up to `seq` for those keys;
  - magic, version and checksum are three checks, made in that order, with three different errors. The
    checksum covers the page's key as well: a page that lies under another key is corrupt.

`docs/PAGES.md` has the byte table for people; a test ties the two. This module knows nothing of files.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, compress, pairwise
from operator import ne, neg
from typing import TYPE_CHECKING, Any, NamedTuple

from lowwater.engine.format import format
from lowwater.engine.format.fast import IS_COMPILED, newest_row, plain_objects
from lowwater.engine.seams.checksum import crc32
from lowwater.errors import Corrupt, NewerVersion, NotLowwater, PagesDamaged

assert sys.byteorder == "little", "the columns are written as they are in memory"
assert array("Q").itemsize == 8
assert array("I").itemsize == 4

VERSION_MAJOR = 1
VERSION_MINOR = 0
MAGIC = b"LWPAG\r\n\x1a"

TOMBSTONE = 1  # the key was deleted
REFERENCE = 2  # the value is a reference of 64 bytes to where the bytes are
BUCKET = 4  # the row is a bucket's own record
# The row is of a transaction of which the page does not say what became: its seq is that of its frame, and in
# place of its time stands the transaction. `transaction_table.py` knows the rest.
UNSTAMPED = 8
FLAGS_KNOWN = TOMBSTONE | REFERENCE | BUCKET | UNSTAMPED

# Two parts of one header: the checksum between them covers what is before and after it.
RECOGNISED = struct.Struct("<8sHH")
HEADER = struct.Struct("<8sHHIQIIIII4x")
_COVERED = struct.Struct("<QIIIII4x")
HEADER_BYTES = HEADER.size
_COVERED_AT = RECOGNISED.size + format.U32.size

assert HEADER_BYTES == 48
assert _COVERED_AT + _COVERED.size == HEADER_BYTES

_RECOGNISED = RECOGNISED.pack(MAGIC, VERSION_MAJOR, VERSION_MINOR)
_pack_covered = _COVERED.pack
_unpack_covered = _COVERED.unpack_from
_pack_u32 = format.U32.pack
_pack_u32_into = format.U32.pack_into
_pack_u64_into = format.U64.pack_into
_unpack_u32 = format.U32.unpack_from
_unpack_two = struct.Struct("<II").unpack_from
_unpack_u64 = format.U64.unpack_from
_FLAG_BYTES_KNOWN = bytes(range(FLAGS_KNOWN + 1))
_PUT_BYTES = bytes((0, REFERENCE))
_PLAIN_BYTES = bytes([0, BUCKET])
TOMBSTONE_BYTES = bytes(flags for flags in range(FLAGS_KNOWN + 1) if flags & TOMBSTONE)
_HINT = PagesDamaged.default_hint

Version = tuple[int, int, int, int, bytes, bytes]
"""frame seq, seq, time_us, flags, metadata, value"""
KeyVersions = tuple[bytes, list[Version]]
"""An encoded key and its versions, newest first."""
Row = tuple[int, int, int, bytes, bytes]
"""seq, time_us, flags, metadata, value"""
PlainRows = tuple[list[str], Sequence[bytes], "array[int]", "array[int]"]
"""Names, values, seqs and times of rows, as columns."""


class DataPage:
    """Rows as columns, one row a version. One that is stored, or was read from the store, is its bytes: its
    columns are made each time that they are asked for, and `find` and `row` of a point read do without."""

    __slots__ = (
        "_data",
        "_key_ends",
        "_mere_puts",
        "_row_count",
        "_row_ends",
        "_sections",
        "_tags",
        "flags",
        "keys",
        "metadata",
        "seq",
        "seqs",
        "times",
        "values",
    )

    seq: int
    keys: list[bytes]
    seqs: array[int]
    times: array[int]
    flags: bytearray
    metadata: list[bytes]
    values: list[bytes]
    _data: bytes | None
    _key_ends: array[int] | None
    _mere_puts: bool | None
    _row_count: int
    _row_ends: array[int] | None
    _sections: tuple[int, int, int, int, int, int]
    _tags: bytes | None

    def __init__(
        self,
        seq: int,
        keys: list[bytes],
        seqs: array[int],
        times: array[int],
        flags: bytearray,
        metadata: list[bytes],
        values: list[bytes],
    ) -> None:
        self.seq = seq
        self.keys = keys
        self.seqs = seqs
        self.times = times
        self.flags = flags
        self.metadata = metadata
        self.values = values
        self._data = None
        self._mere_puts = None

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self.seqs) if self._data is None else self._row_count

    @property
    def has_mere_puts(self) -> bool:
        """Whether each key has one version, which is a value, here or by reference, without metadata."""
        mere_puts = self._mere_puts
        if mere_puts is None:
            mere_puts = self._mere_puts = self._find_mere_puts()
        return mere_puts

    def _find_mere_puts(self) -> bool:
        if self._data is None:
            single = len(set(self.keys)) == len(self.keys) and not any(self.metadata)
        else:
            single = self._row_ends is None and self._sections[3] == self._sections[4]
        return single and not self.flags.translate(None, _PUT_BYTES)

    @property
    def is_plain(self) -> bool:
        """Whether all values are here, besides."""
        return self.has_mere_puts and not self.flags.strip(b"\0")

    def bounds(self, low: bytes, high: bytes | None) -> tuple[int, int]:
        """The rows of the keys from `low` to below `high`: the first one, and the one after the last."""
        if self._data is None:
            keys = self.keys
            return bisect_left(keys, low), len(keys) if high is None else bisect_left(keys, high)
        return self._first_row(low), self._row_count if high is None else self._first_row(high)

    def _first_row(self, key: bytes) -> int:
        """Return the first row of a stored page whose key is not below `key`."""
        data = self._data
        assert data is not None
        ends = self._find_ends(data)
        keys_at = self._sections[2]
        # Most often the key is that of the page, or of one that follows.
        if key <= data[keys_at : keys_at + ends[0]]:
            return 0
        low, high = 1, len(ends)
        while low < high:
            middle = (low + high) >> 1
            if data[keys_at + ends[middle - 1] : keys_at + ends[middle]] < key:
                low = middle + 1
            else:
                high = middle
        return low if self._row_ends is None else self._row_ends[low - 1]

    def only(self, keep: Sequence[bool]) -> DataPage:
        """The page without the rows that are not to be kept."""
        if all(keep):
            return self
        return DataPage(
            self.seq,
            list(compress(self.keys, keep)),
            array("Q", compress(self.seqs, keep)),
            array("Q", compress(self.times, keep)),
            bytearray(compress(self.flags, keep)),
            list(compress(self.metadata, keep)),
            list(compress(self.values, keep)),
        )

    @property
    def size_bytes(self) -> int:
        """How many bytes the rows have, without what their objects cost."""
        if self._data is not None:
            return len(self._data)
        return 25 * len(self.keys) + sum(
            sum(map(len, column)) for column in (self.keys, self.metadata, self.values)
        )

    def find(self, key: bytes) -> int:
        """The row of the newest version of `key`, or -1."""
        data = self._data
        if data is None:
            keys = self.keys
            index = bisect_left(keys, key)
            return index if index < len(keys) and keys[index] == key else -1
        tags = self._tags
        if tags is None:
            return self._find_first(key, data)
        # A byte for each key, made of its hash, says which it may be.
        ends = self._find_ends(data)
        keys_at = self._sections[2]
        tag = hash(key) & 255
        index = tags.find(tag)
        while index >= 0:
            if data[keys_at + (ends[index - 1] if index else 0) : keys_at + ends[index]] == key:
                return index if self._row_ends is None or not index else self._row_ends[index - 1]
            index = tags.find(tag, index + 1)
        return -1

    def newest(self, key: bytes) -> Row | None:
        """The newest version of `key`: `find` and `row` in one, for the page that is read again and again."""
        data = self._data
        if IS_COMPILED and data is not None and (row := newest_row(data, key)) is not NotImplemented:
            found: Row | None = row
            return found
        if data is None or (tags := self._tags) is None:
            index = self.find(key)
            return None if index < 0 else self.row(index)
        value_ends, _, keys_at, metadata_at, values_at, _ = self._sections
        ends = self._key_ends
        assert ends is not None, "tags come after the ends of the keys"
        tag = hash(key) & 255
        index = tags.find(tag)
        while index >= 0 and data[keys_at + (ends[index - 1] if index else 0) : keys_at + ends[index]] != key:
            index = tags.find(tag, index + 1)
        if index < 0:
            return None
        if metadata_at != values_at or self._row_ends is not None or not index:
            return self.row(index if self._row_ends is None or not index else self._row_ends[index - 1])
        start, end = _unpack_two(data, value_ends + 4 * index - 4)
        count = self._row_count
        at = HEADER_BYTES + 8 * index
        return (
            _unpack_u64(data, at)[0],
            _unpack_u64(data, at + 8 * count)[0],
            data[keys_at - count + index],
            b"",
            data[values_at + start : values_at + end],
        )

    def _find_first(self, key: bytes, data: bytes) -> int:
        """`find` where it may be the only time."""
        if self._key_ends is not None:
            self._tags = bytes([hash(each) & 255 for each in self._distinct_keys(data)])
            return self.find(key)
        ends = self._find_ends(data)
        _, _, keys_at, keys_end, _, _ = self._sections
        at = data.find(key, keys_at, keys_end) if key else -1
        while at >= 0:
            start = at - keys_at
            index = bisect_right(ends, start)
            end = ends[index]
            if start + len(key) == end and (ends[index - 1] if index else 0) == start:
                return index if self._row_ends is None or not index else self._row_ends[index - 1]
            # It is a part of this key, or goes on in the next one.
            at = data.find(key, keys_at + end, keys_end)
        return -1

    def _distinct_keys(self, data: bytes) -> list[bytes]:
        return _cut(data[self._sections[2] : self._sections[3]], self._find_ends(data))

    def plain_objects(
        self, low: bytes, high: bytes | None, skip: int, bucket: str, kind: type[tuple[Any, ...]]
    ) -> Any:
        """The rows of the keys from `low` to below `high` of a page that is plain, as objects of this kind:
        bucket, name, value, None, seq and time. NotImplemented where nothing is compiled, or the page is not
        stored."""
        data = self._data
        if data is None:
            return NotImplemented
        return plain_objects(data, low, high, skip, bucket, kind)

    def plain_rows(self, start: int, stop: int, skip: int) -> PlainRows:
        """Some rows of a page that is plain. Their keys are of one bucket, and the first `skip` bytes of each
        are left out."""
        data = self._data
        if data is None:
            names = [key[skip:].decode() for key in self.keys[start:stop]]
            return names, self.values[start:stop], self.seqs[start:stop], self.times[start:stop]
        count = stop - start
        if count <= 0:
            return [], [], array("Q"), array("Q")
        names = self._plain_names(data, start, stop, skip)
        values = self._plain_values(data, start, stop)
        times_at = HEADER_BYTES + 8 * self._row_count
        return (
            names,
            values,
            _array("Q", data, HEADER_BYTES + 8 * start, count),
            _array("Q", data, times_at + 8 * start, count),
        )

    def _plain_names(self, data: bytes, start: int, stop: int, skip: int) -> list[str]:
        keys_at = self._sections[2]
        ends = self._find_ends(data)
        # Cutting a text is faster than decoding each name, where a character is a byte. The length of the
        # bucket's name, which stands before it, may be none.
        blob = data[keys_at : keys_at + ends[stop - 1]]
        if not blob.isascii():
            return [key[skip:].decode() for key in self.keys[start:stop]]
        text = blob.decode()
        size = _even_size(data, HEADER_BYTES + 16 * self._row_count, stop)
        if size:
            return list(map(text.__getitem__, _even_slices(size, skip)[start:stop]))
        stops = ends[start:stop].tolist()
        starts = [(ends[start - 1] if start else 0) + skip, *map(skip.__add__, stops)]
        return [text[begin:end] for begin, end in zip(starts, stops, strict=False)]

    def _plain_values(self, data: bytes, start: int, stop: int) -> Sequence[bytes]:
        ends_at, values_at = self._sections[0], self._sections[4]
        size = _even_size(data, ends_at, stop)
        if size:
            values: Sequence[bytes] = _even_parts(size, stop - start).unpack_from(
                data, values_at + size * start
            )
            return values
        bounds = _array("I", data, ends_at + 4 * start - 4, stop - start + 1)
        if not start:
            bounds[0] = 0
        blob = data[values_at : values_at + bounds[-1]]
        values = [blob[begin:end] for begin, end in pairwise(bounds)]
        if sum(map(len, values)) != bounds[-1] - bounds[0]:
            raise Corrupt("the parts of a page do not follow each other", hint=_HINT)
        return values

    def _find_ends(self, data: bytes) -> array[int]:
        """Where the keys of a stored page end, counted from the first."""
        ends = self._key_ends
        if ends is not None:
            return ends
        key_count = self._row_count if self._row_ends is None else len(self._row_ends)
        ends = _array("I", data, HEADER_BYTES + 16 * self._row_count, key_count)
        if ends[-1] != self._sections[3] - self._sections[2] or (found := ends.tolist()) != sorted(found):
            raise Corrupt("the parts of a page do not follow each other", hint=_HINT)
        self._key_ends = ends
        return ends

    def versions(self, index: int) -> int:
        """How many versions of its key there are from the row `index` on."""
        keys = self.keys
        return bisect_right(keys, keys[index], index) - index

    def version_at(self, key: bytes, seq: int) -> int:
        """The row of the newest version of `key` whose seq is not above `seq`, or -1."""
        index = self.find(key)
        seqs = self.seqs
        if index < 0 or seqs[index] <= seq:
            return index
        end = index + self.versions(index)
        index = bisect_left(seqs, -seq, index + 1, end, key=neg)
        return index if index < end else -1

    def row(self, index: int) -> Row:
        """All of a row but its key."""
        data = self._data
        if data is None:
            metadata, value = self.metadata[index], self.values[index]
        else:
            value_ends, metadata_ends, _, metadata_at, values_at, _ = self._sections
            start, end = _unpack_two(data, value_ends + 4 * index - 4)
            if not index:
                start = 0
            value = data[values_at + start : values_at + end]
            metadata = b""
            if metadata_at != values_at:
                start, end = _unpack_two(data, metadata_ends + 4 * index - 4)
                if not index:
                    start = 0
                metadata = data[metadata_at + start : metadata_at + end]
            count = self._row_count
            seq, time_us = (
                _unpack_u64(data, at := HEADER_BYTES + 8 * index)[0],
                _unpack_u64(data, at + 8 * count)[0],
            )
            return seq, time_us, data[self._sections[2] - count + index], metadata, value
        return self.seqs[index], self.times[index], self.flags[index], metadata, value

    if not TYPE_CHECKING:  # with it, a type checker would accept any name

        def __getattr__(self, name: str) -> Any:
            """Called where a slot is empty: the column of a stored page, made each time it is asked for."""
            data = self._data if name in _COLUMNS else None
            if data is None:
                raise AttributeError(name)
            return self._column(name, data)

    def _column(self, name: str, data: bytes) -> Any:
        count = self._row_count
        value_ends, metadata_ends, keys_at, metadata_at, values_at, end = self._sections
        if name == "seqs":
            return _array("Q", data, HEADER_BYTES, count)
        if name == "times":
            return _array("Q", data, HEADER_BYTES + 8 * count, count)
        if name == "flags":
            return bytearray(data[keys_at - count : keys_at])
        if name == "values":
            return _cut(data[values_at:end], _array("I", data, value_ends, count))
        if name == "metadata":
            if metadata_at == values_at:
                return [b""] * count
            return _cut(data[metadata_at:values_at], _array("I", data, metadata_ends, count))
        keys = self._distinct_keys(data)
        if self._row_ends is None:
            return keys
        return [
            key
            for key, start, stop in zip(keys, [0, *self._row_ends], self._row_ends, strict=False)
            for _ in range(start, stop)
        ]


_COLUMNS = frozenset({"keys", "seqs", "times", "flags", "metadata", "values"})


def _array(code: str, data: bytes, at: int, count: int) -> array[int]:
    numbers: array[int] = array(code)
    numbers.frombytes(data[at : at + numbers.itemsize * count])
    return numbers


# Names, or values, that are all of one size are cut in one call: up to so many of a page, of so many bytes.
_EVEN_ROWS_MAX = 256
_EVEN_BYTES_MAX = 4096


def _even_size(data: bytes, ends_at: int, count: int) -> int:
    """The size of each of the first `count` parts, whose ends are at `ends_at`; 0 where they differ."""
    size: int = _unpack_u32(data, ends_at)[0]
    if 0 < size <= _EVEN_BYTES_MAX and count <= _EVEN_ROWS_MAX:
        stop = 4 * count
        if data[ends_at : ends_at + stop] == _even_ends(size)[:stop]:
            return size
    return 0


def _are_even(ends: array[int], size: int) -> bool:
    """Whether the parts with these ends are all of this size, and such as are cut in one call."""
    return (
        0 < size <= _EVEN_BYTES_MAX
        and len(ends) <= _EVEN_ROWS_MAX
        and ends.tobytes() == _even_ends(size)[: 4 * len(ends)]
    )


def _ends(parts: list[bytes]) -> bytes:
    """Where these parts end, one after the other."""
    size = len(parts[0])
    if 0 < size <= _EVEN_BYTES_MAX and len(parts) <= _EVEN_ROWS_MAX and {*map(len, parts)} == {size}:
        return _even_ends(size)[: 4 * len(parts)]
    return array("I", accumulate(map(len, parts))).tobytes()


@lru_cache(64)
def _even_ends(size: int) -> bytes:
    return array("I", range(size, size * _EVEN_ROWS_MAX + 1, size)).tobytes()


@lru_cache(64)
def _even_slices(size: int, skip: int) -> list[slice]:
    return [slice(at + skip, at + size) for at in range(0, size * _EVEN_ROWS_MAX, size)]


@lru_cache(512)
def _even_parts(size: int, count: int) -> struct.Struct:
    return struct.Struct(f"{size}s" * count)


def _cut(blob: bytes, ends: array[int]) -> list[bytes]:
    size = len(blob) // len(ends)
    if _are_even(ends, size) and size * len(ends) == len(blob):
        return list(_even_parts(size, len(ends)).unpack(blob))
    start = 0
    parts = [blob[start : (start := end)] for end in ends]
    if b"".join(parts) != blob:
        raise Corrupt("the parts of a page do not follow each other", hint=_HINT)
    return parts


def encode_page(page: DataPage, key: bytes) -> bytes:
    """The bytes of a page that is to be stored under the page key `key`."""
    keys, metadata = page.keys, page.metadata
    row_count = len(keys)
    assert row_count, "a page without rows is not stored"
    assert (
        len(page.seqs) == len(page.times) == len(page.flags) == len(metadata) == len(page.values) == row_count
    )
    row_ends = b""
    if not page._mere_puts and len(set(keys)) != row_count:
        ends = [*compress(range(1, row_count), map(ne, keys, keys[1:])), row_count]
        row_ends = array("I", ends).tobytes()
        keys = [keys[end - 1] for end in ends]
    key_blob = b"".join(keys)
    value_blob = b"".join(page.values)
    metadata_blob = b"".join(metadata)
    metadata_ends = array("I", accumulate(map(len, metadata))).tobytes() if metadata_blob else b""
    covered = b"".join(
        (
            _pack_covered(page.seq, len(keys), row_count, len(key_blob), len(metadata_blob), len(value_blob)),
            page.seqs.tobytes(),
            page.times.tobytes(),
            _ends(keys),
            row_ends,
            metadata_ends,
            _ends(page.values),
            page.flags,
            key_blob,
            metadata_blob,
            value_blob,
        )
    )
    return b"".join((_RECOGNISED, _pack_u32(crc32(covered, crc32(_RECOGNISED, crc32(key)))), covered))


def stored_bytes(page: DataPage, key: bytes) -> bytes:
    """The bytes of a page that is stored, or is to be, under the page key `key`."""
    return encode_page(page, key) if page._data is None else page._data


def decode_page(data: bytes, key: bytes) -> DataPage:
    """The page that lies under the page key `key`."""
    if data[: len(_RECOGNISED)] != _RECOGNISED or len(data) < HEADER_BYTES:
        _refuse(data)
    _require_checksum(data, key)
    return stored_page(data)


def stored_page(data: bytes) -> DataPage:
    """The page with these bytes, which `encode_page` has just made, or whose checksum was compared."""
    seq, key_count, row_count, key_bytes, metadata_bytes, value_bytes = _unpack_covered(data, _COVERED_AT)
    key_ends_at = HEADER_BYTES + 16 * row_count
    row_ends_at = key_ends_at + 4 * key_count
    metadata_ends_at = row_ends_at + (4 * key_count if key_count != row_count else 0)
    value_ends_at = metadata_ends_at + (4 * row_count if metadata_bytes else 0)
    flags_at = value_ends_at + 4 * row_count
    keys_at = flags_at + row_count
    metadata_at = keys_at + key_bytes
    values_at = metadata_at + metadata_bytes
    if values_at + value_bytes != len(data) or not 0 < key_count <= row_count:
        raise Corrupt("a page's counts do not add up to its size", hint=_HINT)
    if data[HEADER_BYTES - 4 : HEADER_BYTES] != b"\0\0\0\0":
        raise Corrupt("a page has bytes set that must be zero", hint=_HINT)
    page = DataPage.__new__(DataPage)
    page.seq = seq
    if data[flags_at:keys_at].translate(None, _FLAG_BYTES_KNOWN):
        raise NewerVersion("a page has row flags that are not known to this version")
    page._data = data
    page._key_ends = None
    page._tags = None
    page._row_count = row_count
    page._row_ends = None
    page._mere_puts = None
    page._sections = (
        value_ends_at,
        metadata_ends_at,
        keys_at,
        metadata_at,
        values_at,
        values_at + value_bytes,
    )
    if key_count != row_count:
        page._row_ends = _array("I", data, row_ends_at, key_count)
        ends = [0, *page._row_ends]
        if ends[-1] != row_count or ends != sorted(set(ends)):
            raise Corrupt("a page's rows do not follow each other", hint=_HINT)
    return page


def stored_seq(data: bytes, key: bytes) -> int:
    """The seq of the page that lies under the page key `key`, without decoding it."""
    if data[: len(_RECOGNISED)] != _RECOGNISED or len(data) < HEADER_BYTES:
        _refuse(data)
    _require_checksum(data, key)
    seq: int = _unpack_covered(data, _COVERED_AT)[0]
    return seq


def _require_checksum(data: bytes, key: bytes) -> None:
    checksum = crc32(memoryview(data)[_COVERED_AT:], crc32(_RECOGNISED, crc32(key)))
    if checksum != _unpack_u32(data, _COVERED_AT - 4)[0]:
        raise Corrupt("a page's checksum does not match, or it lies under another page's key", hint=_HINT)


class StoredColumns(NamedTuple):
    """The columns of a page as they are stored."""

    row_count: int
    key_bytes: int
    metadata_bytes: int
    value_bytes: int
    body: bytes


def stored_columns(page: DataPage) -> tuple[bytes, StoredColumns] | None:
    """The first key of a page, and its columns; None unless each of its keys has one version, none of them is
    deleted, no value is a reference, and the page is as it was stored."""
    data = page._data
    if data is None or page._row_ends is not None:
        return None
    _, _, keys_at, metadata_at, values_at, end = page._sections
    count = len(page)
    if data[keys_at - count : keys_at].translate(None, _PLAIN_BYTES):
        return None
    first_key = data[keys_at : keys_at + page._find_ends(data)[0]]
    sizes = count, metadata_at - keys_at, values_at - metadata_at, end - values_at
    return first_key, StoredColumns(*sizes, data[HEADER_BYTES:])


def _refuse(data: bytes) -> None:
    """Say what is wrong with the first bytes of what should be a page."""
    if data[: len(MAGIC)] != MAGIC:
        raise NotLowwater(
            "there is no page here" if data else "the page is empty",
            hint="check the path: this is not a database that Lowwater wrote",
        )
    if len(data) < RECOGNISED.size:
        raise Corrupt(f"a page is cut short: {len(data)} of at least {HEADER_BYTES} bytes", hint=_HINT)
    _, major, minor = RECOGNISED.unpack_from(data)
    if (major, minor) > (VERSION_MAJOR, VERSION_MINOR):
        raise NewerVersion(
            f"this page has format version {major}.{minor}; "
            f"this Lowwater reads up to {VERSION_MAJOR}.{VERSION_MINOR}"
        )
    if (major, minor) < (VERSION_MAJOR, VERSION_MINOR):
        raise Corrupt(f"a page has format version {major}.{minor}, which never existed", hint=_HINT)
    raise Corrupt(f"a page is cut short: {len(data)} of at least {HEADER_BYTES} bytes", hint=_HINT)


def overwritten(
    page: DataPage,
    low: bytes,
    keys: list[bytes],
    seq: int,
    changed: list[int],
    columns: tuple[array[int], array[int], bytearray, list[bytes]],
) -> DataPage:
    """The page at `low`, whose keys these are, with the rows at `changed` replaced. Nothing is sorted or
    moved, as it is where there are new keys."""
    patched = _patched(page, low, seq, changed, columns)
    if patched is not None:
        return patched
    # Copies: those of a page that is not stored are its own.
    seqs, times, flags, values = page.seqs[:], page.times[:], page.flags[:], list(page.values)
    for row, row_seq, time_us, flag, value in zip(changed, *columns, strict=True):
        seqs[row], times[row], flags[row], values[row] = row_seq, time_us, flag, value
    overwritten = DataPage(seq, keys, seqs, times, flags, [b""] * len(keys), values)
    overwritten._mere_puts = True
    return overwritten


def _patched(
    page: DataPage,
    low: bytes,
    seq: int,
    changed: list[int],
    columns: tuple[array[int], array[int], bytearray, list[bytes]],
) -> DataPage | None:
    """Return the page with the changed rows written over its stored bytes. Return None unless the page has
    such bytes, and all values have one size."""
    data = page._data
    seqs, times, flags, values = columns
    if data is None or any(flags):
        return None
    count = page._row_count
    value_ends, _, keys_at, _, values_at, _ = page._sections
    size = len(values[0])
    # Of no size are those of a page whose values differ, too.
    if not size or {*map(len, values)} != {size} or _even_size(data, value_ends, count) != size:
        return None
    if data[keys_at - count : keys_at].strip(b"\0"):
        return None
    patched = bytearray(data)
    numbers = memoryview(patched)[HEADER_BYTES : HEADER_BYTES + 16 * count].cast("Q")
    for row, row_seq, time_us, value in zip(changed, seqs, times, values, strict=True):
        numbers[row] = row_seq
        numbers[count + row] = time_us
        at = values_at + size * row
        patched[at : at + size] = value
    numbers.release()
    _pack_u64_into(patched, _COVERED_AT, seq)
    checksum = crc32(memoryview(patched)[_COVERED_AT:], crc32(_RECOGNISED, crc32(low)))
    _pack_u32_into(patched, _COVERED_AT - 4, checksum)
    result = stored_page(bytes(patched))
    result._mere_puts = True
    return result
