"""What a flusher and its worker say to each other: what a range has, and what becomes of it.

Always true:
  - a message is a header of fixed size, which goes through a socket, and a body, which lies in memory that
    both have: the request's at its beginning, the answer's behind that. Whoever speaks writes the body first,
    and the other reads it once it has the header. So a request can be made again of another worker;
  - there are two such pieces of memory, slots, so that the worker has the next request before the answer to
    the last one was dealt with. It answers in the order in which it was asked;
  - a request has all that merging needs, and the worker remembers nothing of it;
  - an answer is looked at before any of it is believed: sizes, order, places, and every page's checksum. What
    is wrong with it is `Garbage`, and so is an answer of another version of this module.

Change `VERSION` with everything that changes what a request asks for, or what an answer means.
"""

from __future__ import annotations

import errno
import os
import struct
from array import array
from bisect import bisect_left
from collections.abc import Generator, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

from lowwater.engine.checksum import crc32
from lowwater.engine.format import FRAME_BYTES, FRAME_FIXED_BYTES
from lowwater.engine.merging import Rules, merge_changes
from lowwater.engine.pages import Boundaries, Page, decode_page, stored_bytes
from lowwater.engine.records import SHAPE, KeyPlaces, encoded_key_of, page_version

VERSION = 2

REQUEST = struct.Struct("<4sIIQQQQIIQIIII")
ANSWER = struct.Struct("<4sIQQI")
SLOTS = 2
_REQUEST_MAGIC = b"LWM?"
_ANSWER_MAGIC = b"LWM!"
# How many changes of a page the worker merges at once: nobody waits for it to let go.
AT_ONCE = 1024

Made = tuple[int, bytes, bytes]
"""The index of a page of the range (-1: below the first), the page key and the bytes of what it became."""
Part = tuple[int, list[tuple[bytes, bytes, Page]]]
"""The index, and all that the page became: page keys, bytes, pages. Perhaps nothing."""


T = TypeVar("T")


class NoAnswer(Exception):
    """Nobody merges but this process."""


class Garbage(NoAnswer):
    """This is no message, or not one that belongs here."""


class Request(NamedTuple):
    """The header of a request, in the order of the body: records, pages, lengths, page keys, salt."""

    slot: int
    frozen_seq: int
    rec_seq: int
    floor: int
    records_bytes: int
    record_count: int
    page_count: int
    pages_bytes: int
    names_bytes: int
    low_bytes: int
    inline_bytes_max: int
    page_keys: int

    @property
    def body_bytes(self) -> int:
        sizes = 4 * self.record_count + 8 * self.page_count
        return self.records_bytes + self.pages_bytes + sizes + self.names_bytes

    def pack(self) -> bytes:
        return REQUEST.pack(_REQUEST_MAGIC, VERSION, *self)

    @classmethod
    def unpack(cls, data: bytes) -> Request:
        magic, version, *fields = REQUEST.unpack(data)
        if magic != _REQUEST_MAGIC or version != VERSION:
            raise Garbage("this is no request")
        return cls(*fields)


def write_parts(fd: int, offset: int, parts: Sequence[bytes]) -> int:
    """Write all of them into the shared memory, one after the other. Where they end."""
    # Joined first: the system takes longer for many parts than this copy does.
    data = b"".join(parts)
    if os.pwrite(fd, data, offset) != len(data):
        raise OSError(errno.ENOSPC, "the shared memory took less than it was given")
    return offset + len(data)


# ---------------------------------------------------------------------------- the worker's side


def answer(request: Request, body: bytes) -> tuple[bytes, list[bytes]]:
    """Merge: the header of the answer, and its body in parts."""
    made: list[Made] = list(_merge(request, body))
    table = array("i")
    for index, key, data in made:
        table.extend((index, len(key), len(data)))
    head = table.tobytes()
    keys = b"".join(key for _, key, _ in made)
    parts = [head, keys, *(data for _, _, data in made)]
    return (
        ANSWER.pack(_ANSWER_MAGIC, VERSION, len(made), sum(map(len, parts)), crc32(keys, crc32(head))),
        parts,
    )


def _merge(request: Request, body: bytes) -> Iterator[Made]:
    at = request.records_bytes
    page_ends = at + request.pages_bytes
    sizes_end = page_ends + 4 * request.record_count
    page_sizes_end = sizes_end + 4 * request.page_count
    key_sizes_end = page_sizes_end + 4 * request.page_count
    record_sizes = array("I", body[page_ends:sizes_end])
    page_sizes = array("I", body[sizes_end:page_sizes_end])
    key_sizes = array("I", body[page_sizes_end:key_sizes_end])
    low_end = key_sizes_end + request.low_bytes
    low_of_range = body[key_sizes_end:low_end]
    page_keys = [body[start:end] for start, end in pairwise(accumulate(key_sizes, initial=low_end))]
    salt = body[low_end + sum(key_sizes) :]
    starts = list(accumulate(page_sizes, initial=at))
    rules = Rules(
        request.frozen_seq, request.floor, request.inline_bytes_max, Boundaries(salt, request.page_keys)
    )

    records: dict[bytes, bytes] = {}
    odd: set[bytes] = set()
    places = KeyPlaces()
    for start, end in pairwise(accumulate(record_sizes, initial=0)):
        record = body[start:end]
        place = places[record[SHAPE]]
        if place is not None:
            records[place[0] + record[FRAME_FIXED_BYTES : place[1]]] = record
        else:
            key = encoded_key_of(record[FRAME_BYTES:])
            odd.add(key)
            records[key] = record
    changed = sorted(records)

    def versions(part: list[bytes]) -> list[tuple[bytes, list[tuple[int, int, int, int, bytes, bytes]]]]:
        return [(key, [page_version(records[key], request.inline_bytes_max)]) for key in part]

    ends = [*(bisect_left(changed, key) for key in page_keys), len(changed)]
    done = 0
    for index, end in enumerate(ends, -1):
        mine, done = changed[done:end], end
        if not mine:
            continue
        page = None
        low = low_of_range
        if index >= 0:
            low = page_keys[index]
            page = decode_page(body[starts[index] : starts[index + 1]], low)
        merged = _end_of(
            merge_changes(
                page,
                low,
                mine,
                records,
                rules=rules,
                rec_seq=request.rec_seq,
                odd=odd,
                versions=versions,
                at_once=AT_ONCE,
            )
        )
        if not merged:
            yield index, b"", b""
        for key, result in merged:
            yield index, key, stored_bytes(result, key)


def _end_of(steps: Generator[None, None, T]) -> T:
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: T = stop.value
            return result


# ---------------------------------------------------------------------------- the flusher's side


def answer_bytes(header: bytes) -> int:
    """How large the body of an answer is."""
    magic, version, _, size, _ = ANSWER.unpack(header)
    if magic != _ANSWER_MAGIC or version != VERSION:
        raise Garbage("this is no answer")
    return int(size)


def read_answer(
    header: bytes, body: bytes, layout_keys: Sequence[bytes], low: bytes
) -> Iterator[Part | None]:
    """What became of the pages of a range, in order; None from time to time, when others may run."""
    _, _, count, size, checksum = ANSWER.unpack(header)
    if len(body) != size or size < 12 * count:
        raise Garbage("an answer is cut short")
    table = array("i", body[: 12 * count])
    indexes, key_sizes, data_sizes = table[0::3], table[1::3], table[2::3]
    if min(key_sizes, default=0) < 0 or min(data_sizes, default=0) < 0:
        raise Garbage("an answer's sizes are no sizes")
    keys_end = 12 * count + sum(key_sizes)
    if keys_end + sum(data_sizes) != size or crc32(body[:keys_end]) != checksum:
        raise Garbage("an answer's parts do not add up")
    part: Part | None = None
    key_before = b""
    at, data_at = 12 * count, keys_end
    for number, (index, key_size, data_size) in enumerate(zip(indexes, key_sizes, data_sizes, strict=True)):
        if part is not None and part[0] != index:
            yield part
        if part is None or part[0] != index:
            if not (-1 if part is None else part[0] + 1) <= index < len(layout_keys):
                raise Garbage("an answer's pages are out of order")
            part = index, []
        elif not key_size:
            raise Garbage("an answer has a page without a key")
        if key_size:
            key = body[at : at + key_size]
            data = body[data_at : data_at + data_size]
            lowest = layout_keys[index] if index >= 0 else low
            above = layout_keys[index + 1] if index + 1 < len(layout_keys) else None
            if key < lowest or key <= key_before or (above is not None and key >= above):
                raise Garbage("a page of an answer lies elsewhere")
            part[1].append((key, data, decode_page(data, key)))
            key_before = key
        at += key_size
        data_at += data_size
        if number % 4 == 3:
            yield None
    if part is not None:
        yield part
