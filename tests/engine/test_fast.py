"""The compiled loops give byte for byte what Python gives step by step, or None and nothing has changed.

Always true: what is expected is made by the code that runs where nothing is compiled, or by `zlib` and
`blake3`; nothing here knows how the compiled code goes about it.
"""

from __future__ import annotations

import gc
import os
import random
import struct
import subprocess
import sys
import threading
import types
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, count, pairwise
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from tests.engine.compiled import blocks_left, needs_compiled, refused

from lowwater.engine.database import database
from lowwater.engine.database.core import EngineOptions
from lowwater.engine.database.database import Database
from lowwater.engine.database.opening import open_with
from lowwater.engine.flush import flush
from lowwater.engine.format import fast, format, keys
from lowwater.engine.format import page as page_format
from lowwater.engine.format.boundaries import Boundaries
from lowwater.engine.format.fast import Begun, MergedRange, PutFrames, Superseded
from lowwater.engine.format.format import FIXED_BYTES, FRAME_BYTES, U32, Extras, Kind, ValueRef
from lowwater.engine.format.keys import encode_key
from lowwater.engine.format.page import (
    BUCKET,
    TOMBSTONE,
    UNSTAMPED,
    DataPage,
    decode_page,
    encode_page,
    stored_bytes,
)
from lowwater.engine.format.records import (
    VALUE_PLACE,
    Object,
    Record,
    encoded_key_of,
    is_mere_put,
    make_record,
    page_version,
    put_record,
    seq_of,
    small_record_bytes,
)
from lowwater.engine.format.references import Reference, encode_reference
from lowwater.engine.log import pieces
from lowwater.engine.log.chain import Chain, LogSettings
from lowwater.engine.log.pieces import Piece, cut, cut_puts, frames_of
from lowwater.engine.pages.lmdb_store import LmdbPages
from lowwater.engine.pages.merging import Rules, merge_changes
from lowwater.engine.state import state
from lowwater.engine.state.ranges import Layout, Older, Range, older_of
from lowwater.errors import LowwaterError

MIB = 2**20
SEQ_MAX = 2**64 - 1
BOUNDARIES = Boundaries(b"salt", 16)


# ---------------------------------------------------------------------------- without compiled code


def test_the_environment_says_to_do_without() -> None:
    """A wrong answer of compiled code must not be the only one that there is."""
    said = "fast.IS_COMPILED, fast.put_frames(), fast.merge_range()"
    code = f"from lowwater.engine.format import fast; print({said})"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PURE_PYTHON": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == ["False", "None", "None"]


def test_a_module_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout that was updated may have one that was built before."""
    other = types.ModuleType("lowwater.engine.format._fast")
    monkeypatch.setitem(sys.modules, "lowwater.engine.format._fast", other)
    monkeypatch.delenv("PURE_PYTHON", raising=False)
    assert fast._compiled()[0] is None
    other.VERSION = fast.VERSION + 1  # type: ignore[attr-defined]
    assert fast._compiled()[0] is None
    other.VERSION = fast.VERSION  # type: ignore[attr-defined]
    assert fast._compiled() == (other, "")


Changes = tuple[int, int, Superseded, Begun]


def changes_by(put: Callable[..., tuple[int, int]], *given: Any) -> Changes:
    older: Superseded = []
    begun: Begun = []
    return (*put(*given, older, begun), older, begun)


def test_python_puts_records_as_changes_by_itself() -> None:
    """It is what compiled code is held against."""
    one, two, small, large = (
        make_record(seq, bytes(size)) for seq, size in ((1, 1), (2, 1), (2, 0), (3, 30))
    )
    ranges = ranges_at([b"", b"m"], [0, 1])
    low, high = ranges
    made = changes_by(fast._put_changes, [b"", b"m"], ranges, [b"l", b"m", b"l"], [one, two, large], True)
    assert made == (0, 0, [(low, b"l", one)], [(low, one)])
    assert (low.dirty, high.dirty) == ({b"l": large}, {b"m": two})
    made = changes_by(fast._put_changes, [b"", b"m"], ranges, [b"m", b"m", b"z"], [small, small, large], True)
    assert made == (len(two), 1, [], []), "those of one seq are of one group"
    assert high.dirty == {b"m": small, b"z": large}
    made = changes_by(fast._put_changes, [b"", b"m"], ranges, [b"z"], [make_record(4, b"")], False)
    assert made == (len(large), 1, [], [])


# ---------------------------------------------------------------------------- frames of puts


def put_frames(
    pairs: Any,
    prefix: Any = b"\1b",
    seq_first: Any = 1,
    time_us: Any = 0,
    offset: Any = 128,
    bytes_max: Any = MIB,
    payload_bytes_max: Any = MIB,
) -> PutFrames | None:
    return fast.put_frames(pairs, prefix, seq_first, time_us, offset, bytes_max, payload_bytes_max)


def put_step_by_step(
    chain: Chain, pairs: list[tuple[str, bytes]], prefix: bytes, time_us: int, batch_bytes_max: int
) -> tuple[list[Piece], Chain, list[bytes]]:
    """What `cut_puts` gives, if there is one piece."""
    names = [format.encode_name(text, "key", format.KEY_BYTES_MAX) for text, _ in pairs]
    payloads = [
        format.encode_payload(Kind.PUT, prefix[1:], name, b"", value, time_us=time_us)
        for name, (_, value) in zip(names, pairs, strict=True)
    ]
    seqs = range(chain.seq_last + 1, chain.seq_last + 1 + len(pairs))
    sizes = [*map(len, payloads)]
    made, after = cut(chain, seqs, payloads, sizes, batch_bytes_max=batch_bytes_max, alike=True)
    return made, after, [prefix + name for name in names]


def described(piece: Piece) -> dict[str, object]:
    fields = {name: getattr(piece, name) for name in Piece.__slots__}
    return fields | {"frames": frames_of([piece])}


def random_text(rng: random.Random, size: int) -> str:
    alphabet = rng.choice(("ab", "\0\1", "".join(map(chr, range(128)))))
    return "".join(rng.choices(alphabet, k=size))


def random_pairs(rng: random.Random) -> list[tuple[str, bytes]]:
    count = rng.choice((1, 1, 2, 3, 100))
    key_bytes = rng.choice(((1,), (1024,), (10,), (1, 2, 7, 8, 23, 24, 25, 1000, 1023, 1024)))
    value_bytes = rng.choice(((0,), (100,), (0, 1, 15, 16, 17, 300, 5000), range(5001)))
    return [
        (random_text(rng, rng.choice(key_bytes)), rng.randbytes(rng.choice(value_bytes)))
        for _ in range(count)
    ]


@needs_compiled
@pytest.mark.parametrize("seed", range(20))
def test_puts_become_the_piece_that_encoding_and_cutting_makes_of_them(seed: int) -> None:
    """These bytes go into the log, and every node has to have the same ones."""
    rng = random.Random(seed)
    at_once = 0
    for _ in range(25):
        time_us = rng.choice((0, 1, 1_700_000_000_000_000, format.TIME_US_MAX))
        chain = Chain(
            seq_last=rng.choice((1, 2**32 - 2, 2**63, rng.randrange(2**63))),
            time_us=rng.choice((0, time_us)),
            settings=LogSettings(segment_bytes=rng.choice((8192, 64 * MIB))),
            body_bytes=rng.choice((0, 128, 4096, rng.randrange(128, 60 * MIB))),
            seq_first=1,
        )
        bucket = rng.randbytes(rng.choice((1, 3, 255)))
        prefix = bytes((len(bucket),)) + bucket
        pairs = random_pairs(rng)
        batch_bytes_max = rng.choice((4096, MIB, 64 * MIB))
        made, after, keys = put_step_by_step(chain, pairs, prefix, time_us, batch_bytes_max)
        found = cut_puts(chain, pairs, prefix, time_us, batch_bytes_max=batch_bytes_max, entry_bytes_max=MIB)
        is_plain = len(made) == 1 and made[0].starts_segment is None and not made[0].ends_segment
        is_plain = (
            is_plain and after.body_bytes > chain.body_bytes > 0 and len(made[0].data) <= batch_bytes_max
        )
        assert (found is not None) == is_plain
        if found is not None:
            assert (described(found[0]), *found[1:]) == (described(made[0]), after, keys)
            at_once += 1
    assert at_once > 5


@needs_compiled
def test_puts_that_just_fit_are_cut_at_once_and_those_that_just_do_not_are_left() -> None:
    """Where a batch, or a segment, or an entry ends is decided in one place alone: Python's."""
    pairs = [("key", b"value")] * 3
    found = put_frames(pairs)
    assert found is not None
    size, largest = len(found[2]), FIXED_BYTES + len(b"bkeyvalue")
    assert put_frames(pairs, bytes_max=size) == found
    assert put_frames(pairs, bytes_max=size - 1) is None
    assert put_frames(pairs, payload_bytes_max=largest) == found
    assert put_frames(pairs, payload_bytes_max=largest - 1) is None
    assert put_frames(pairs, payload_bytes_max=0) is None
    assert put_frames(pairs, bytes_max=-1) is None
    assert put_frames(pairs, offset=2**32 - 1 - size, bytes_max=size) is not None
    assert put_frames(pairs, offset=2**32 - size, bytes_max=size) is None
    assert put_frames(pairs, offset=2**63 - 1) is None
    assert put_frames(pairs, offset=-1) is None
    assert put_frames(pairs, seq_first=SEQ_MAX - 2) is not None
    assert put_frames(pairs, seq_first=SEQ_MAX - 1) is None


class Text(str):
    __slots__ = ()


class Value(bytes):
    __slots__ = ()


class Pair(tuple[str, bytes]):
    __slots__ = ()


UNUSUAL_PAIRS: dict[str, Any] = {
    "no key": ("", b"v"),
    "a key that is too long": ("k" * 1025, b"v"),
    "a key beyond ASCII": ("é", b"v"),
    "a key beyond Latin": ("名", b"v"),
    "half of a character": ("\ud800", b"v"),
    "a text of its own kind": (Text("k"), b"v"),
    "a key that is bytes": (b"k", b"v"),
    "a value that can change": ("k", bytearray(b"v")),
    "a value of its own kind": ("k", Value(b"v")),
    "a value that is text": ("k", "v"),
    "no value": ("k", None),
    "a list": ["k", b"v"],
    "a pair of its own kind": Pair(("k", b"v")),
    "one": ("k",),
    "three": ("k", b"v", b"w"),
    "none": (),
    "nothing": None,
}


@needs_compiled
@pytest.mark.parametrize("unusual", UNUSUAL_PAIRS.values(), ids=UNUSUAL_PAIRS)
def test_an_unusual_pair_is_left_to_python(unusual: Any) -> None:
    """Python takes it, or says what is wrong with it."""
    usual = ("k", b"v")
    for pairs in ([unusual], [usual, unusual], [unusual, usual], [usual] * 50 + [unusual]):
        before = pairs[:]
        assert put_frames(pairs) is None
        assert pairs == before


@needs_compiled
def test_puts_into_no_bucket_that_there_can_be_are_left_to_python() -> None:
    """The prefix says how long the bucket's name is, in one byte, and the frame in two."""
    assert put_frames([]) is None
    for prefix in (b"", b"\0b", b"\2b", b"\1bc", b"\xff" + bytes(256), bytes(70_000)):
        assert put_frames([("k", b"v")], prefix) is None


@needs_compiled
def test_arguments_of_another_type_are_refused() -> None:
    """That is a mistake of ours, and not of who puts."""
    usual: list[Any] = [[("k", b"v")], b"\1b", 1, 0, 128, MIB, MIB]
    assert fast.put_frames(*usual) is not None
    for index, others in enumerate([((), None), ("", None, bytearray(b"\1b"))] + [(None, "1", 1.0)] * 5):
        for other in others:
            with pytest.raises(TypeError):
                fast.put_frames(*usual[:index], other, *usual[index + 1 :])
    for numbers in ((-1, 0), (2**64, 0), (1, -1), (1, 2**64)):
        with pytest.raises(OverflowError):
            fast.put_frames(*usual[:2], *numbers, *usual[4:])
    with pytest.raises(TypeError):
        fast.put_frames(*usual[:-1])
    with pytest.raises(TypeError):
        fast.put_frames(*usual, 1)


def sizes_around() -> list[int]:
    """Where loops over blocks begin, end, and have something left."""
    chunks = [1024 * count for count in (1, 2, 3, 4, 5, 7, 8, 16, 17)]
    around = [
        size + more for size in (*chunks, 65_536, MIB) for more in (-65, -64, -17, -1, 0, 1, 16, 63, 64)
    ]
    return [*range(301), *around]


@needs_compiled
def test_a_frame_of_any_size_has_the_checksum_that_zlib_computes() -> None:
    """From 64 bytes on it is computed in another way, and each has its own for what is left."""
    rng = random.Random(1)
    for size in sizes_around():
        made = put_frames([("k", rng.randbytes(size))], bytes_max=2 * MIB, payload_bytes_max=2 * MIB)
        assert made is not None
        (frame,) = made[1]
        assert U32.unpack_from(frame, 12)[0] == zlib.crc32(frame[16:], zlib.crc32(frame[:12])), size


# ---------------------------------------------------------------------------- changes


def ranges_at(lows: list[bytes], rec_seqs: Iterable[int]) -> list[Range]:
    found = [Range(low, Layout([], [])) for low in lows]
    for each, rec_seq in zip(found, rec_seqs, strict=True):
        each.rec_seq = rec_seq
    return found


def plain_changes(lows: list[bytes], ranges: list[Range], made: Changes) -> object:
    """Without what is only equal to itself."""
    left_bytes, left_count, older, begun = made
    return (
        left_bytes,
        left_count,
        [(ranges.index(place), key, record) for place, key, record in older],
        [(ranges.index(place), record) for place, record in begun],
        # In the order in which they came.
        [[*each.dirty.items()] for each in ranges],
        lows,
    )


@needs_compiled
@pytest.mark.parametrize("seed", range(30))
def test_records_become_changes_as_python_puts_them(seed: int) -> None:
    """Of keys again, of equal seqs, in ranges that had changes and such that had none."""
    rng = random.Random(seed)
    others = {rng.randbytes(rng.randrange(1, 4)) for _ in range(rng.choice((0, 1, 9)))}
    lows = [b"", *sorted(others)]
    rec_seqs = [rng.choice((0, 5)) for _ in lows]
    compiled, pure = ranges_at(lows, rec_seqs), ranges_at(lows, rec_seqs)
    pool = [rng.choice(lows) + rng.randbytes(rng.randrange(3)) for _ in range(40)] + lows
    seq = 0
    for _ in range(20):
        keys, records = [], []
        for _ in range(rng.choice((0, 1, 1, 30))):
            seq += rng.choice((0, 0, 1, 2**33))
            keys.append(rng.choice(pool))
            again = records and rng.random() < 0.2
            records.append(records[-1] if again else make_record(seq, rng.randbytes(rng.randrange(40))))
        keeps = rng.random() < 0.5
        kind = rng.choice((list, tuple))
        given = (kind(keys), kind(records), keeps)
        made = changes_by(fast.put_changes, lows, compiled, *given)
        assert plain_changes(lows, compiled, made) == plain_changes(
            lows, pure, changes_by(fast._put_changes, lows, pure, *given)
        )


@needs_compiled
def test_changes_of_another_type_are_refused() -> None:
    """That is a mistake of ours, which must not be read as if it were bytes."""
    ranges = ranges_at([b""], [0])
    record = make_record(1, b"")
    usual: list[Any] = [[b""], ranges, [b"k"], [record], False, [], []]
    wrong: list[tuple[int, Any]] = [
        (0, (b"",)), (0, []), (0, [b"", b"b"]), (0, [""]), (0, [None]), (1, tuple(ranges)), (1, []),
        (2, None), (2, []), (2, ["k"]), (2, [b"k", b"l"]), (2, b"k"), (3, [None]), (3, [b"1234567"]),
        (3, [bytearray(record)]), (3, b"12345678"), (5, ()), (6, None),
    ]  # fmt: skip
    for index, other in wrong:
        with pytest.raises(TypeError):
            fast.put_changes(*usual[:index], other, *usual[index + 1 :])
        assert not ranges[0].dirty
    with pytest.raises(TypeError):
        fast.put_changes(*usual[:-1])
    with pytest.raises(IndexError):
        fast.put_changes([b"m"], *usual[1:])
    with pytest.raises(AttributeError):
        fast.put_changes([b""], [object()], *usual[2:])
    assert changes_by(fast.put_changes, *usual[:5]) == (0, 0, [], [(ranges[0], record)])


# ---------------------------------------------------------------------------- merging


Given = tuple[dict[bytes, Record], bytes, list[bytes], list[bytes], Rules]
"""Records, where the range begins, its pages with their keys, and how to merge."""


def merge_range(given: Given, older: Older | None = None) -> MergedRange | None:
    records, low, page_keys, stored, rules = given
    boundaries = rules.boundaries
    return fast.merge_range(
        records,
        older or {},
        low,
        page_keys,
        stored,
        rules.frozen_seq,
        rules.floor,
        rules.inline_bytes_max,
        boundaries.hash_key,
        boundaries.highest,
    )


def merge_step_by_step(given: Given, older: Older | None = None, *, at_once: int = 64) -> MergedRange:
    """The same as a flush does it."""
    records, low, page_keys, stored, rules = given
    older = older or {}
    versions = {key: [record, *reversed(older_of(older, key))] for key, record in records.items()}
    every = [*chain.from_iterable(versions.values())]
    changed = sorted(records)
    odd = {key for key, record in records.items() if not is_mere_put(record)}
    parts = []
    bounds = pairwise([0, *(bisect_left(changed, key) for key in page_keys), len(changed)])
    for index, (start, end) in enumerate(bounds, -1):
        if start == end:
            continue
        key = page_keys[index] if index >= 0 else low
        steps = merge_changes(
            page_format.decode_page(stored[index], key) if index >= 0 else None,
            key,
            changed[start:end],
            records,
            rules=rules,
            rec_seq=min(map(seq_of, every)),
            odd=odd,
            versions=lambda part: [
                (key, [page_version(record, rules.inline_bytes_max) for record in versions[key]])
                for key in part
            ],
            has_older=bool(older),
            at_once=at_once,
        )
        try:
            while True:
                next(steps)
        except StopIteration as stop:
            merged = stop.value
        parts.append((index, [(key, stored_bytes(page, key)) for key, page in merged]))
    return sum(map(len, every)), len(every), parts


def record_of(
    seq: int,
    key: bytes,
    value: bytes = b"",
    *,
    kind: Kind = Kind.PUT,
    metadata: bytes = b"",
    extras: Extras = format.NO_EXTRAS,
    inline_bytes_max: int = 64,
    place: tuple[int, int] = (7, 128),
) -> Record:
    """The record of a frame, as the state makes it."""
    bucket, name = keys.decode_key(key)
    payload = format.encode_payload(
        kind, bucket, name, metadata, value, time_us=seq % 1000, origin=3, extras=extras
    )
    assert encoded_key_of(payload) == key
    frame = make_record(seq, payload)
    if is_mere_put(frame):
        return put_record(frame, small_record_bytes(inline_bytes_max), *place)
    return make_record(seq, payload, *place)


def extras_of(rng: random.Random, seq: int) -> Extras:
    return Extras(
        group_seq_last=rng.choice((None, seq)),
        session=rng.choice((None, 77)),
        request=1,
        request_hash=rng.choice((None, rng.randbytes(16))),
    )


class World:
    """One range, whose pages are made of random changes, flush after flush."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.boundaries = Boundaries(rng.randbytes(8), rng.choice((1, 2, 3, 8, 16, 64)))
        self.inline_bytes_max = rng.choice((0, 1, 20, 64, 1000))
        self.low = b""
        self.page_keys: list[bytes] = []
        self.stored: list[bytes] = []
        self.seq = 0
        long = b"\1b" + b"x" * rng.choice((400, 497, 498, 499, 520))
        self.pool = [
            *(rng.choice((b"\1b", b"\2bb")) + rng.randbytes(rng.choice((1, 2, 8, 9, 30))) for _ in range(60)),
            *(b"\1b" + b"k" + b"\0" * count for count in range(8)),
            *(b"\1b" + b"y" * count for count in range(496, 501)),
            *(long + rng.randbytes(rng.randrange(1, 500)) for _ in range(rng.choice((0, 20)))),
            *(b"\1b" + rng.randbytes(rng.randrange(60, 1025)) for _ in range(10)),
        ]
        self.puts = rng.choice((0.1, 0.5, 0.9, 1.0))
        self.with_metadata = rng.choice((0, 0, 0.3))
        self.with_extras = rng.choice((0, 0, 0.3))
        self.copies = rng.choice((0, 0, 0.3))

    def records(self, *, again: bool = True) -> dict[bytes, Record]:
        rng = self.rng
        found = {}
        repeats = again and rng.random() < 0.3  # as redo has them, when the pages have them already
        for _ in range(rng.choice((1, 2, 5, 60, 200))):
            if repeats:
                seq = rng.randrange(1, self.seq + 2)
                self.seq = max(seq, self.seq)
            else:
                seq = self.seq = self.seq + rng.choice((1, 1, 5, 2**20))
            key = rng.choice(self.pool)
            kind = Kind.PUT if rng.random() < self.puts else Kind.DELETE
            if rng.random() < self.copies:
                kind = Kind.COPY
            found[key] = record_of(
                seq,
                key,
                b""
                if kind == Kind.DELETE
                else rng.randbytes(rng.choice((0, 5, 5, 19, 20, 21, 64, 65, 3000))),
                kind=kind,
                metadata=rng.randbytes(rng.randrange(100)) if rng.random() < self.with_metadata else b"",
                extras=extras_of(rng, seq) if rng.random() < self.with_extras else format.NO_EXTRAS,
                inline_bytes_max=self.inline_bytes_max,
                place=(rng.randrange(1, 2**64), rng.randrange(2**32)),
            )
        return found

    def given(self, records: dict[bytes, Record], *, floor: int | None = None) -> Given:
        """As a flush would give it. Without a floor nobody needs anything older."""
        frozen_seq = self.seq + self.rng.choice((0, 0, 3))
        if floor is None:
            floor = frozen_seq + self.rng.choice((0, 10))
        rules = Rules(frozen_seq, floor, self.inline_bytes_max, self.boundaries)
        return records, self.low, self.page_keys[:], self.stored[:], rules

    def adopt(self, given: Given, made: MergedRange) -> None:
        """The pages are what was made of them. One that lost its first key keeps its place."""
        keys: list[bytes] = []
        stored: list[bytes] = []
        passed = 0
        for index, parts in made[2]:
            keys += self.page_keys[passed : max(index, 0)]
            stored += self.stored[passed : max(index, 0)]
            passed = index + 1
            if index >= 0 and not (parts and parts[0][0] == self.page_keys[index]):
                low = self.page_keys[index]
                parts = [(low, encode_page(flush._placeholder(low, given[4].frozen_seq), low)), *parts]
            for key, data in parts:
                keys.append(key)
                stored.append(data)
        self.page_keys, self.stored = keys + self.page_keys[passed:], stored + self.stored[passed:]


def without_idle_pages(given: Given) -> Given:
    """Pages in which nothing changes are not read."""
    records, low, page_keys, stored, rules = given
    changed = sorted(records)
    bounds = [*(bisect_left(changed, key) for key in page_keys), len(changed)]
    kept = [data if start < end else b"" for data, (start, end) in zip(stored, pairwise(bounds), strict=True)]
    return records, low, page_keys, kept, rules


def check_merged(given: Given, older: Older | None = None) -> MergedRange:
    expected = merge_step_by_step(given, older)
    before = dict(given[0])
    assert merge_range(given, older) == expected
    assert merge_range(without_idle_pages(given), older) == expected
    assert given[0] == before
    return expected


@needs_compiled
@pytest.mark.parametrize("seed", range(60))
def test_a_range_is_merged_as_page_after_page_is(seed: int) -> None:
    """Puts, deletions, copies, metadata, large values, what comes again, and pages that become empty."""
    world = World(random.Random(seed))
    for _ in range(12):
        given = world.given(world.records())
        world.adopt(given, check_merged(given))


@needs_compiled
def test_what_is_merged_at_random_is_of_all_kinds() -> None:
    """Or the test above says less than it seems to."""
    emptied = below_first = divided = several = references = 0
    for seed in range(40):
        world = World(random.Random(seed))
        for _ in range(12):
            given = world.given(world.records())
            made = check_merged(given)
            for index, parts in made[2]:
                emptied += index >= 0 and not parts
                below_first += index < 0 and bool(given[2])
                divided += index >= 0 and len(parts) > 1
                references += sum(any(page_format.stored_page(data).flags) for _, data in parts)
            several += len(made[2]) > 1
            world.adopt(given, made)
    assert min(emptied, below_first, divided, several, references) > 10


def given_small(**changes: Any) -> Given:
    """Two pages, and changes to both."""
    page_keys = [b"\1bb", b"\1bm"]
    stored = []
    for key in page_keys:
        rows = {key + bytes((number,)): number for number in range(97, 103)}
        page = DataPage(
            50,
            [*rows],
            array("Q", range(10, 16)),
            array("Q", range(20, 26)),
            bytearray((0, 0, BUCKET, 0, 0, 0)),
            changes.get("metadata", [b"", b"m", b"", b"", b"mm", b""]),
            [b"v" * number for number in range(6)],
        )
        stored.append(encode_page(page, key))
    records = {
        key: record_of(100 + number, key, b"new")
        for number, key in enumerate((b"\1ba", b"\1bbb", b"\1bc", b"\1bmb", b"\1bz"))
    }
    return records, b"\1a", page_keys, stored, Rules(200, 200, 64, Boundaries(b"salt", 2**64))


def sealed(data: bytes, key: bytes) -> bytes:
    """With the right checksum."""
    checksum = zlib.crc32(data[16:], zlib.crc32(data[:12], zlib.crc32(key)))
    return data[:12] + U32.pack(checksum) + data[16:]


def with_page(given: Given, data: bytes, index: int = 1) -> Given:
    stored = given[3][:]
    stored[index] = data
    return (*given[:3], stored, given[4])


@needs_compiled
def test_a_page_with_any_bit_flipped_is_left_to_python() -> None:
    """It says what is wrong with it."""
    given = given_small()
    check_merged(given)
    page = given[3][1]
    for at in range(len(page)):
        for bit in range(8):
            flipped = bytearray(page)
            flipped[at] ^= 1 << bit
            assert merge_range(with_page(given, bytes(flipped))) is None
    for size in range(len(page)):
        assert merge_range(with_page(given, page[:size])) is None
    assert merge_range(with_page(given, page + b"\0")) is None
    assert merge_range(with_page(given, given[3][0])) is None, "that one lies under another key"


@needs_compiled
def test_a_page_of_which_any_number_is_wrong_is_left_to_python() -> None:
    """However right its checksum is."""
    given = given_small()
    page, key = given[3][1], given[2][1]
    assert sealed(page, key) == page
    for at in (24, 28, 32, 36, 40, 44):
        (number,) = U32.unpack_from(page, at)
        for other in {0, 1, 5, number - 1, number + 1, 2**31, 2**32 - 1} - {number, -1}:
            changed = sealed(page[:at] + U32.pack(other) + page[at + 4 :], key)
            assert merge_range(with_page(given, changed)) is None, at
    ends_at = 48 + 16 * 6
    for at in range(ends_at, ends_at + 3 * 4 * 6, 4):
        for other in (2**31, 2**32 - 1):
            changed = sealed(page[:at] + U32.pack(other) + page[at + 4 :], key)
            assert merge_range(with_page(given, changed)) is None, at
    for column in range(3):  # the last end is not where the part ends
        at = ends_at + 24 * column + 20
        (number,) = U32.unpack_from(page, at)
        changed = sealed(page[:at] + U32.pack(number - 1) + page[at + 4 :], key)
        assert merge_range(with_page(given, changed)) is None, at
    flags_at = ends_at + 72
    for row in range(6):
        for flag in (UNSTAMPED, UNSTAMPED | TOMBSTONE, 16, 128):
            changed = sealed(page[: flags_at + row] + bytes((flag,)) + page[flags_at + row + 1 :], key)
            assert merge_range(with_page(given, changed)) is None
    for at, size in ((0, 8), (8, 2), (10, 2)):
        changed = sealed(page[:at] + b"\x07" * size + page[at + size :], key)
        assert merge_range(with_page(given, changed)) is None


@needs_compiled
def test_a_row_that_ends_before_it_begins_is_left_to_python() -> None:
    """Even one of which nothing is left."""
    given = given_record(record_of(105, b"\1bme", b"new"), b"\1bme")
    page, key = bytearray(given[3][1]), given[2][1]
    ends_at, row, flags_at = 48 + 16 * 6, 4, 48 + 16 * 6 + 72
    for flag in (0, TOMBSTONE):
        page[flags_at + row] = flag
        check_merged(with_page(given, sealed(bytes(page), key)))
        for column in range(3):
            at = ends_at + 24 * column + 4 * row
            (end,) = U32.unpack_from(page, at - 4)
            changed = bytes(page[:at]) + U32.pack(end - 1) + bytes(page[at + 4 :])
            assert merge_range(with_page(given, sealed(changed, key))) is None


@needs_compiled
def test_a_page_that_is_away_or_missing_is_left_to_python() -> None:
    """It has to be waited for, or the store is damaged."""
    given = given_small()
    reference = Reference(50, 40, bytes(32), bytes(32), bytes(32), 1, 2, 3, 4)
    assert merge_range(with_page(given, encode_reference(reference, given[2][1]))) is None
    assert merge_range(with_page(given, b"")) is None
    assert merge_range(with_page(given, b"", 0)) is None


def given_record(record: Record, key: bytes = b"\1bmb") -> Given:
    records, *rest = given_small()
    return {**records, key: record}, *rest


@needs_compiled
def test_records_of_other_kinds_are_left_to_python() -> None:
    """Transactions, refused ones, references to other values, and buckets."""
    key = b"\1bmb"
    check_merged(given_record(record_of(105, key, b"v", extras=Extras(group_seq_last=105, session=1))))
    for extras in (
        Extras(txn=9),
        Extras(txn=9, group_seq_last=105),
        Extras(refused=3),
        Extras(stream_offset=8),
        Extras(before=b"before"),
        Extras(value_ref=ValueRef(3, 2, bytes(32))),
    ):
        for kind in (Kind.PUT, Kind.COPY, Kind.DELETE):
            assert merge_range(given_record(record_of(105, key, kind=kind, extras=extras))) is None
    for kind in set(Kind) - {Kind.PUT, Kind.DELETE, Kind.COPY, Kind.CREATE_BUCKET, Kind.DELETE_BUCKET}:
        frame = make_record(105, format.encode_payload(kind, b"b", b"mb", b"", b"", time_us=0))
        assert merge_range(given_record(frame)) is None
    for kind in (Kind.CREATE_BUCKET, Kind.DELETE_BUCKET):
        frame = make_record(105, format.encode_payload(kind, b"b", b"", b"", b"", time_us=0))
        assert merge_range(given_record(frame, b"\0b")) is None
    assert merge_range(given_record(record_of(201, key, b"newer than what was frozen"))) is None
    check_merged(given_record(record_of(200, key, b"the newest")))


@needs_compiled
def test_a_record_that_is_not_as_long_as_it_says_is_left_to_python() -> None:
    """Nothing is read beyond its end."""
    key = b"\1bmb"
    for value in (b"", b"v" * 30, b"v" * 100):
        record = record_of(105, key, value, metadata=b"meta")
        (length,) = U32.unpack_from(record, 8)
        for other in {0, 24, 25, length - 1, length + 1, length + 11, length + 13, 2**31, 2**32 - 1} - {
            length
        }:
            assert merge_range(given_record(record[:8] + U32.pack(other) + record[12:])) is None
        for size in range(len(record)):
            if size != len(record) - 12:  # that is its place
                assert merge_range(given_record(record[:size])) is None
        assert merge_range(given_record(record + b"1")) is None
        for at in (3, 5, 7):  # the lengths of bucket, key and metadata
            changed = bytearray(record)
            changed[FRAME_BYTES + at + 1] = 255
            assert merge_range(given_record(bytes(changed))) is None
        assert merge_range(given_record(record, key + b"longer")) is None
    large = record_of(105, key, b"v" * 100)
    assert merge_range(given_record(large)) is not None
    assert merge_range(given_record(large[:-12])) is None, "a large value has a place"


@needs_compiled
def test_a_key_that_lies_below_its_page_is_left_to_python() -> None:
    """It says that this must not be."""
    records, _, page_keys, stored, rules = given_small()
    assert merge_range((records, b"\1bb", page_keys, stored, rules)) is None
    low = page_keys[1]
    page = DataPage(
        5, [b"\1ba", low], array("Q", [1, 2]), array("Q", [0, 0]), bytearray(2), [b""] * 2, [b""] * 2
    )
    assert merge_range((records, b"", page_keys, [stored[0], encode_page(page, low)], rules)) is None


@needs_compiled
def test_a_key_that_its_page_has_does_not_begin_another() -> None:
    """It was tested when it came."""
    *given, rules = given_small()
    made = check_merged((*given, rules._replace(boundaries=Boundaries(b"salt", 1))))
    keys = [[key for key, _ in parts] for _, parts in made[2]]
    assert keys == [[b"\1ba"], [b"\1bb", b"\1bc"], [b"\1bm", b"\1bz"]]


@needs_compiled
def test_arguments_of_a_merge_of_another_type_are_refused() -> None:
    """That is a mistake of ours."""
    records, low, page_keys, stored, _ = given_small()
    usual: list[Any] = [records, {}, low, page_keys, stored, 200, 200, 64, bytes(32), 5]
    assert fast.merge_range(*usual) is not None
    assert fast.merge_range({}, *usual[1:]) is None
    wrong: list[tuple[int, Any]] = [
        (0, None), (0, [*records]), (1, None), (1, [b"\1bz"]), (2, None), (2, "low"), (3, tuple(page_keys)),
        (3, page_keys[:1]), (3, ["b", "m"]), (4, tuple(stored)), (4, [*stored, b""]), (4, [stored[0], None]),
        (8, bytes(31)), (8, bytes(33)), (8, None), *((index, 1.0) for index in (5, 6, 7, 9)), (5, None),
    ]  # fmt: skip
    for index, other in wrong:
        with pytest.raises(TypeError):
            fast.merge_range(*usual[:index], other, *usual[index + 1 :])
    for index in (5, 6, 7, 9):
        with pytest.raises(OverflowError):
            fast.merge_range(*usual[:index], -1, *usual[index + 1 :])
    with pytest.raises(TypeError):
        fast.merge_range(*usual[:-1])
    for odd in ({"key": records[b"\1bz"]}, {b"\1bz": None}, {b"\1bz": bytearray(records[b"\1bz"])}):
        assert fast.merge_range({**records, **odd}, *usual[1:]) is None


@needs_compiled
def test_ranges_are_merged_by_several_threads_at_once() -> None:
    """Nothing that one of them needs is kept anywhere else."""
    cases = []
    for seed in range(2):
        world = World(random.Random(seed))
        for _ in range(20):
            given = world.given(world.records())
            cases.append((given, merge_step_by_step(given)))
            world.adopt(given, cases[-1][1])
    begin = threading.Barrier(2)

    def repeat(part: list[tuple[Given, MergedRange]]) -> int:
        begin.wait()
        return sum(merge_range(given) == expected for _ in range(20) for given, expected in part)

    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(repeat, (cases[:20], cases[20:]))] == [400, 400]


@needs_compiled
def test_a_page_of_any_size_has_the_checksum_that_zlib_computes() -> None:
    """The key, the head and the columns are summed one after the other."""
    rng = random.Random(2)
    rules = Rules(5, 5, 2 * MIB, Boundaries(b"salt", 2**64))
    for size in sizes_around():
        low = b"\1b" + rng.randbytes(rng.choice((1, size % 400 + 1)))
        given = {low: record_of(1, low, rng.randbytes(size), inline_bytes_max=2 * MIB)}, low, [], [], rules
        made = merge_range(given)
        assert made is not None
        ((_, ((key, page),)),) = made[2]
        assert (key, page) == (low, sealed(page, low)), size


@needs_compiled
def test_a_large_value_of_any_size_has_the_hash_that_blake3_computes() -> None:
    """It is compared when the value is read from the log."""
    rng = random.Random(3)
    rules = Rules(5, 5, 0, Boundaries(b"salt", 2**64))
    key = b"\1bk"
    for size in sizes_around()[1:]:
        value = rng.randbytes(size)
        record = record_of(1, key, value, inline_bytes_max=0, place=(2**64 - 1, 2**32 - 1))
        made = merge_range(({key: record}, b"", [], [], rules))
        assert made is not None
        page = page_format.decode_page(made[2][0][1][0][1], b"")
        assert page.values == [VALUE_PLACE.pack(2**64 - 1, 2**32 - 1, size, blake3(value).digest())], size


@needs_compiled
def test_a_key_of_any_size_begins_a_page_where_python_has_it_begin() -> None:
    """Their hashes are of the first 500 bytes, with a key."""
    rng = random.Random(4)
    keys = sorted(b"\1b" + rng.randbytes(size) for size in range(1, 1025))
    records = {key: record_of(1, key, b"v") for key in keys}
    for page_keys in (1, 2, 3, 64, 2**64):
        rules = Rules(5, 5, 64, Boundaries(b"salt", page_keys))
        check_merged((records, b"", [], [], rules))


# ---------------------------------------------------------------------------- memory


@needs_compiled
def test_calls_leave_nothing_in_memory() -> None:
    """Whether they are done, left to Python or refused."""
    # No names that the interpreter has too, as it has "key": others count those meanwhile.
    pairs = [("a key", b"value"), ("another", b"v" * 600)]
    key, record = b"\1bkey", record_of(1, b"\1bkey", b"v" * 600)
    ranges = ranges_at([b""], [0])
    given = given_small()
    damaged = with_page(given, b"damaged")
    inputs = [
        pairs, *pairs, *(part for pair in pairs for part in pair), key, record, *ranges, given[0],
        *given[0], *given[0].values(), *given[2], *given[3], given[1],
    ]  # fmt: skip
    counts = [*map(sys.getrefcount, inputs)]

    def change(*, keeps: bool) -> None:
        ranges[0].dirty.clear()
        fast.put_changes([b""], ranges, [key, key], [record, make_record(2, b"")], keeps, [], [])
        ranges[0].dirty.clear()

    calls: list[Callable[[], object]] = [
        lambda: put_frames(pairs),
        lambda: put_frames([*pairs, ("é", b"")]),
        refused(lambda: put_frames(pairs, time_us=None)),
        lambda: change(keeps=True),
        lambda: change(keeps=False),
        refused(lambda: fast.put_changes([b""], ranges, [key], [None], False, [], [])),
        refused(lambda: fast.put_changes([b"m"], ranges, [key], [record], False, [], [])),
        refused(lambda: fast.put_changes([b""], [None], [key], [record], False, [], [])),
        lambda: merge_range(given),
        lambda: merge_range(damaged),
        refused(lambda: fast.merge_range(given[0], None)),
    ]
    for call in calls:
        assert blocks_left(call) < 50
    assert [*map(sys.getrefcount, inputs)] == counts


def collect_in(
    call: Callable[[], object], clear: Callable[[], object], number: int, *, is_second: bool
) -> bool:
    """Call it with the garbage collector at work whenever it can be, which clears something the time with
    this number: whether there was one."""
    thresholds = gc.get_threshold()
    collected = 0

    def collecting(phase: str, _: dict[str, int]) -> None:
        nonlocal collected
        if phase == "start":
            collected += 1
            if collected == number:
                clear()

    gc.collect()
    # What was freed is used again without asking the collector: then there is nothing of that.
    held: list[object] = [(each, call, clear)[:size] for each in range(3000) for size in (2, 3)]
    held.extend([] for _ in range(100))
    gc.callbacks.append(collecting)
    try:
        gc.set_threshold(1)  # that is every second time
        if is_second:
            held.append([])
        held.append(call())
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(collecting)
    return collected >= number


def times_collected(calls: Callable[[], tuple[Callable[[], object], list[Any]]]) -> int:
    """How often the garbage collector can be at work in a call that these give, each time with the objects
    that are cleared then."""
    found = 0
    for is_second in (False, True):
        for number in count(1):
            call, cleared = calls()

            def clear(cleared: list[Any] = cleared) -> None:
                for each in cleared:
                    each.clear()

            if not collect_in(call, clear, number, is_second=is_second):
                break
            found += 1
    return found


def pairs_to_take_away() -> tuple[Callable[[], object], list[Any]]:
    pairs = [(f"key {number}", b"value" * number) for number in range(50)]
    expected = put_frames(pairs)

    def put() -> None:
        assert put_frames(pairs) in (expected, None)

    return put, [pairs]


def changes_to_take_away() -> tuple[Callable[[], object], list[Any]]:
    lows, ranges = [b"", b"m"], ranges_at([b"", b"m"], [0, 0])
    keys = [b"%d" % (number // 2) for number in range(6)]
    records = [make_record(number, b"payload" * number) for number in range(6)]

    def put() -> None:
        with suppress(TypeError, IndexError):
            fast.put_changes(lows, ranges, keys, records, True)

    return put, [ranges[0].dirty, lows, ranges, keys, records]


def pages_to_take_away() -> tuple[Callable[[], object], list[Any]]:
    records, low, page_keys, stored, rules = given_small()
    page_keys = [bytes(bytearray(key)) for key in page_keys]
    expected = [merge_step_by_step(given_small()), merge_step_by_step((records, low, [], [], rules))]

    def merge() -> None:
        assert merge_range((records, low, page_keys, stored, rules)) in expected

    return merge, [page_keys, stored]


@pytest.mark.long
@needs_compiled
def test_what_the_garbage_collector_calls_may_take_everything_away() -> None:
    """It may run whenever there is a new list or tuple, and what it calls is anybody's."""
    assert times_collected(pairs_to_take_away) > 1
    assert times_collected(changes_to_take_away) > 5
    assert times_collected(pages_to_take_away) > 5


# ---------------------------------------------------------------------------- all of it


def without_compiled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(database, "IS_COMPILED", False)
    patch.setattr(flush, "IS_COMPILED", False)
    patch.setattr(pieces, "put_frames", fast._nothing)
    patch.setattr(state, "put_changes", fast._put_changes)


def change_at_random(db: Database, rng: random.Random) -> None:
    for _ in range(30):
        turn = rng.random()
        if turn < 0.8:
            names = [f"{rng.randrange(3000):05}" + rng.choice(("", "", "é", "x" * 600)) for _ in range(40)]
            db.put_many("b", [(name, rng.randbytes(rng.choice((0, 10, 300, 5000)))) for name in names])
        elif turn < 0.9:
            for key in rng.sample(sorted(each.key for each in db.scan("b")), 10):
                db.delete("b", key)
        else:
            db.put("b", f"{rng.randrange(3000):05}", b"with", {"a": "b"})


@needs_compiled
def test_an_engine_has_the_same_log_pages_and_root_without_compiled_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes that were built with a compiler and without one are replicas of each other."""
    monkeypatch.setattr("lowwater.engine.seams.real.RealClock.now_us", lambda _: 1_700_000_000_000_000)
    monkeypatch.setattr("lowwater.engine.seams.real.RealRandomness.token", lambda _, size: b"t" * size)
    found = []
    merged: list[MergedRange | None] = []

    def noted(*given: Any) -> MergedRange | None:
        merged.append(fast.merge_range(*given))
        return merged[-1]

    for name in ("compiled", "pure"):
        with monkeypatch.context() as patch:
            patch.setattr(flush, "merge_range", noted)
            if name == "pure":
                without_compiled(patch)
            options = EngineOptions(pool_bytes_max=64 * MIB, checkpoint_interval_s=None)
            with open_with(str(tmp_path / name), options=options) as db:
                rng = random.Random(5)
                db.create_bucket("b")
                db.put_many("b", [(f"{number:05}", b"") for number in range(0, 3000, 7)])
                db.flush()
                for _ in range(4):
                    change_at_random(db, rng)
                    db.flush()
                root = db.root()
                objects = [*db.scan("b")]
                assert list(db.check()) == []
        store = LmdbPages.open(str(tmp_path / name / "pages"), read_only=True)
        rows = [row for row in store.rows() if row[0] == b"pages"]
        store.close()
        log = [
            (path.name, path.read_bytes())
            for path in sorted((tmp_path / name).rglob("*"))
            if path.is_file() and "pages" not in path.parts
        ]
        found.append((root, objects, rows, log))
    assert any(merged)
    compiled, pure = found
    assert compiled[0] == pure[0]
    assert compiled[1] == pure[1]
    assert compiled[2] == pure[2]
    assert compiled[3] == pure[3]
    assert len(compiled[2]) > 20


@needs_compiled
def test_what_is_wrong_with_puts_is_said_in_the_same_words_without_compiled_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing of them is stored."""
    found: list[list[object]] = []
    for name in ("compiled", "pure"):
        said: list[object] = []
        with monkeypatch.context() as patch:
            if name == "pure":
                without_compiled(patch)
            with open_with(str(tmp_path / name), options=EngineOptions(checkpoint_interval_s=None)) as db:
                db.create_bucket("b")
                db.put("b", "a", b"")
                for unusual in UNUSUAL_PAIRS.values():
                    for pairs in ([unusual], [("k", b"v"), unusual], [unusual, ("k", b"v")]):
                        try:
                            said.append(db.put_many("b", pairs))
                        except LowwaterError as error:
                            said.append((type(error), str(error)))
                said.append([(each.key, each.value) for each in db.scan("b")])
        found.append(said)
    assert found[0] == found[1]


# ---------------------------------------------------------------------------- reading pages


def random_page(rng: random.Random, *, plain: bool) -> DataPage:
    names = {rng.choice(("k{}", "ü{}", "long{}" * 9)) for _ in range(3)}
    texts = {rng.choice(sorted(names)).replace("{}", f"{rng.randrange(60):03}") for _ in range(60)}
    keys = sorted(encode_key(b"b", text.encode()) for text in texts)
    seqs = array("Q", [rng.randrange(1, 2**64) for _ in keys])
    flags = bytearray(0 if plain else rng.choice((0, 0, 1, 2, 4, 8)) for _ in keys)
    metadata = [b"" if plain or rng.random() < 0.6 else rng.randbytes(rng.randrange(20)) for _ in keys]
    values = [rng.randbytes(rng.choice((0, 5, 5, 300))) for _ in keys]
    page = DataPage(5, keys, seqs, array("Q", reversed(seqs)), flags, metadata, values)
    return decode_page(encode_page(page, keys[0]), keys[0])


@needs_compiled
@pytest.mark.parametrize("seed", range(30))
def test_a_row_is_found_as_python_finds_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    page = random_page(rng, plain=seed % 2 == 0)
    data = stored_bytes(page, b"")
    wanted = [*page.keys, *(key + b"\0" for key in page.keys), *(key[:-1] for key in page.keys), b"", b"\xff"]
    found = [page.newest(key) for key in wanted]
    assert found == [fast.newest_row(data, key) for key in wanted]
    monkeypatch.setattr(page_format, "IS_COMPILED", False)
    for _ in range(3):  # the ways of the first and of later times
        assert found == [page.newest(key) for key in wanted]
    assert any(found)


@needs_compiled
@pytest.mark.parametrize("seed", range(30))
def test_plain_rows_are_the_objects_that_python_makes(seed: int) -> None:
    rng = random.Random(seed)
    page = random_page(rng, plain=True)
    assert page.is_plain
    bounds = [b"", *page.keys, *(key + b"\0" for key in page.keys), b"\xff"]
    for _ in range(50):
        low, high = rng.choice(bounds), rng.choice([*bounds, None])
        start, stop = page.bounds(low, high)
        names, values, seqs, times = page.plain_rows(start, stop, 2)
        rows = zip(names, values, seqs, times, strict=True)
        expected = [Object("b", name, value, None, seq, time_us) for name, value, seq, time_us in rows]
        found = page.plain_objects(low, high, 2, "b", Object)
        assert found == expected
        assert {*map(type, found)} <= {Object}
        assert page.plain_objects(low, high, 2, "b", tuple) == [(*each,) for each in expected]


@needs_compiled
def test_what_is_no_plain_page_is_left_to_python() -> None:
    page = random_page(random.Random(1), plain=True)
    data = stored_bytes(page, b"")
    count = len(page)
    versions = DataPage(
        9, [b"\1bk"] * 2, array("Q", [2, 1]), array("Q", [2, 1]), bytearray(2), [b""] * 2, [b"v"] * 2
    )
    damaged = [b"", data[:47], data[:-1], data + b"\0", encode_page(versions, b"\1bk")]
    # The counts in the header, where the first key ends, and the first value.
    places = (24, 28, 32, 36, 40, 48 + 16 * count, 48 + 20 * count)
    damaged += [data[:at] + struct.pack("<I", 2**31) + data[at + 4 :] for at in places]
    for each in damaged:
        assert fast.plain_objects(each, b"", None, 2, "b", Object) is NotImplemented
    for each in damaged[:-1]:
        assert fast.newest_row(each, page.keys[0]) is NotImplemented
    flagged = bytearray(data)
    flagged[48 + 24 * count + count - 1] = 1
    assert fast.plain_objects(bytes(flagged), b"", None, 2, "b", Object) is NotImplemented
    assert fast.plain_objects(data, b"", None, 10**6, "b", Object) is NotImplemented
    with pytest.raises(UnicodeDecodeError):
        fast.plain_objects(_with_bad_key(data, count), b"", None, 2, "b", Object)
    for arguments in (
        (), (data,), (bytearray(data), b""), (data, "k"), (data, b"", None, 2, "b", dict),
        (data, b"", None, 2, b"b", Object), (data, None, None, 2, "b", Object),
        (data, b"", None, -1, "b", Object),
    ):  # fmt: skip
        with pytest.raises((TypeError, OverflowError)):
            (fast.newest_row if len(arguments) < 3 else fast.plain_objects)(*arguments)


def _with_bad_key(data: bytes, count: int) -> bytes:
    """The same page with a key that is no text."""
    keys_at = 48 + 25 * count
    return data[: keys_at + 2] + b"\xff" + data[keys_at + 3 :]


@needs_compiled
def test_reading_pages_keeps_nothing() -> None:
    page = random_page(random.Random(2), plain=True)
    data = stored_bytes(page, b"")
    key = page.keys[0]
    counts = [*map(sys.getrefcount, (data, key))]
    gc.collect()
    of_type = sys.getrefcount(Object)
    bad = _with_bad_key(data, len(page))
    calls: list[Callable[[], object]] = [
        lambda: fast.newest_row(data, key),
        lambda: fast.newest_row(data, b"nothing"),
        lambda: fast.plain_objects(data, b"", None, 2, "b", Object),
        refused(lambda: fast.plain_objects(bad, b"", None, 2, "b", Object)),
    ]
    for call in calls:
        assert blocks_left(call) < 50
    assert [*map(sys.getrefcount, (data, key))] == counts
    assert abs(sys.getrefcount(Object) - of_type) < 50  # other threads may take some, and let them go
