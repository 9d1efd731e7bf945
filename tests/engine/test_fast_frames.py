"""The compiled loops over frames of a log (`engine/format/_fast_frames.c`), each against Python's own."""

from __future__ import annotations

import random
import sys
from array import array
from typing import Any

import pytest
from tests.engine.compiled import blocks_left, needs_compiled, refused

from lowwater.engine.database import redo as replay
from lowwater.engine.database.redo import Other, Part, Puts
from lowwater.engine.format import fast, format
from lowwater.engine.format.fast import WalkedFrames
from lowwater.engine.format.format import FRAME_BYTES, HEADER_BYTES, Extras, Flag, Kind, SegmentHeader
from lowwater.engine.log import scan
from lowwater.engine.log.scan import Scan
from lowwater.errors import LowwaterError

MIB = 2**20
SEGMENT_BYTES = 8 * MIB
SMALL_BYTES = 300

UNUSUAL: list[tuple[Kind, Extras]] = [
    (Kind.PUT, Extras(txn=7)),
    (Kind.PUT, Extras(refused=1)),
    (Kind.PUT, Extras(group_seq_last=2**41)),
    (Kind.DELETE, Extras()),
    (Kind.DELETE, Extras(txn=7)),
    (Kind.CREATE_BUCKET, Extras()),
    (Kind.SETTINGS, Extras()),
]


def frame_of(seq: int, payload: bytes) -> bytes:
    return format.FRAME.pack(seq, len(payload), format.frame_checksum(seq, payload)) + payload


def random_frame(rng: random.Random, seq: int, time_us: int, *, plain: float) -> bytes:
    """A put, mostly."""
    kind, extras, metadata = Kind.PUT, Extras(), b""
    if rng.random() >= plain:
        kind, extras = rng.choice(UNUSUAL)
        metadata = (
            format.encode_metadata({"a": "b"})
            if rng.random() < 0.2 and kind == Kind.PUT and extras.refused is None
            else b""
        )
    bucket = rng.randbytes(rng.choice((1, 1, 3, 255)))
    key = rng.randbytes(rng.choice((1, 8, 16, 1024)))
    has_value = kind == Kind.PUT and extras.refused is None
    value = rng.randbytes(rng.choice((0, 1, 100, 230, 300, 5000))) if has_value else b""
    payload = format.encode_payload(kind, bucket, key, metadata, value, time_us=time_us, extras=extras)
    return frame_of(seq, payload)


def group_of(rng: random.Random, seq: int, time_us: int) -> list[bytes]:
    """Frames that count together."""
    count = rng.randrange(1, 4)
    extras = Extras(group_seq_last=seq + count - 1)
    payload = format.encode_payload(Kind.PUT, b"b", b"k", b"", b"v", time_us=time_us, extras=extras)
    return [frame_of(seq + index, payload) for index in range(count)]


def random_log(rng: random.Random, *, plain: float, count: int) -> bytes:
    """Frames one after the other, as a segment has them, and sometimes not quite."""
    seq, time_us = rng.randrange(1, 2**40), rng.randrange(2**50)
    odd = rng.random() < 0.3
    frames = []
    for _ in range(count):
        frames.append(random_frame(rng, seq, time_us, plain=plain))
        if rng.random() < 0.1 * (1 - plain):
            frames += group_of(rng, seq + 1, time_us)
            seq += 3
        seq += rng.choice((1, 1, 1, 2, 1000))
        time_us += rng.choice((0, 0, 1, 10**6))
        if odd and rng.random() < 0.05:
            seq, time_us = rng.choice(((seq - 1, time_us), (seq, max(0, time_us - 1)), (1, 0)))
    return b"".join(frames)


def damaged(rng: random.Random, data: bytes) -> bytes:
    """A bit of it turned, or an end of it missing, or neither."""
    how = rng.randrange(6)
    if how == 0 and data:
        at = rng.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if how >= 4 and (places := _frames_in(data)):
        return with_odd_head(rng, data, rng.choice(places)[1], is_intact=how == 5)
    if how == 1:
        return data[: rng.randrange(len(data) + 1)]
    if how == 2:
        return data + rng.choice((bytes(5), bytes(100), rng.randbytes(60), b"\xff" * 60))
    return data


def with_odd_head(rng: random.Random, data: bytes, at: int, *, is_intact: bool) -> bytes:
    """With something else in what a frame begins with, and a checksum that fits if it `is_intact`."""
    seq, length, _ = format.FRAME.unpack_from(data, at)
    payload = bytearray(data[at + FRAME_BYTES : at + FRAME_BYTES + length])
    payload[rng.randrange(9)] ^= 1 << rng.randrange(8)
    frame = frame_of(seq, bytes(payload)) if is_intact else data[at : at + FRAME_BYTES] + payload
    return data[:at] + frame + data[at + len(frame) :]


# ---------------------------------------------------------------------------- redo


def parts_in(data: bytes, *given: int) -> tuple[list[Part], int] | tuple[str, Any]:
    """What redo reads of these bytes, or what it says of them."""
    try:
        return replay._parts_in(data, *given)
    except LowwaterError as error:
        return error.message, (error.seq, error.offset)


@needs_compiled
@pytest.mark.parametrize("seed", range(40))
def test_redo_reads_the_same_either_way(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    told = 0
    for _ in range(40):
        data = random_log(rng, plain=rng.choice((0.0, 0.5, 0.9, 1.0)), count=rng.choice((0, 1, 2, 50)))
        seqs = [seq for seq, _ in _frames_in(data)]
        data = damaged(rng, data)
        seq_from = rng.choice([0, 1, 2**63, *seqs])
        offset = rng.choice((HEADER_BYTES, 2**31, 2**32 - 1 - len(data)))
        given = (rng.randrange(1, 2**40), offset, seq_from, rng.choice((SMALL_BYTES, 0, MIB)))
        monkeypatch.setattr(replay, "put_records", fast.put_records)
        compiled = parts_in(data, *given)
        monkeypatch.setattr(replay, "put_records", replay._put_records)
        step_by_step = parts_in(data, *given)
        assert compiled == step_by_step
        told += isinstance(compiled[0], str)
    assert told, "no damage was found in any of them"


def _frames_in(data: bytes) -> list[tuple[int, int]]:
    """(seq, where it begins) of each."""
    found, at = [], 0
    while at < len(data):
        seq, length, _ = format.FRAME.unpack_from(data, at)
        found.append((seq, at))
        at += FRAME_BYTES + length
    return found


def test_what_redo_reads_is_what_was_written() -> None:
    """Compiled or not."""
    put = format.encode_payload(Kind.PUT, b"bu", b"key", b"", b"v", time_us=5)
    large = format.encode_payload(Kind.PUT, b"bu", b"key", b"", bytes(400), time_us=5)
    deletion = format.encode_payload(Kind.DELETE, b"bu", b"key", b"", b"", time_us=5)
    frames = [frame_of(9, put), frame_of(10, put), frame_of(11, deletion), frame_of(12, large)]
    data = b"".join(frames) + frame_of(13, put)[:-1]
    ends = [sum(map(len, frames[:count])) for count in range(5)]
    key = b"\2bukey"
    large_record = frames[3] + (5).to_bytes(8, "little") + (128 + ends[3]).to_bytes(4, "little")
    assert replay._parts_in(data, 5, 128, 10, SMALL_BYTES) == (
        [
            Puts([key], [frames[1]], 10),
            Other(11, deletion, 5, 128 + ends[2]),
            Puts([key], [large_record], 12),
        ],
        ends[4],
    )


@needs_compiled
def test_names_that_reach_beyond_their_frame_are_left_to_python() -> None:
    """Which decodes them, or says what is wrong."""
    assert fast.put_records is not None
    for names in ((200, 16), (1, 65535), (256, 1), (65535, 65535)):
        payload = bytearray(format.encode_payload(Kind.PUT, b"b", b"k" * 16, b"", b"", time_us=0))
        payload[3:7] = names[0].to_bytes(2, "little") + names[1].to_bytes(2, "little")
        frame = frame_of(1, bytes(payload))
        assert fast.put_records(frame, 0, 1, SMALL_BYTES, 1, 128) == ([], [], 0, 0)


@needs_compiled
def test_a_place_that_no_record_can_name_is_left_to_python() -> None:
    assert fast.put_records is not None
    frame = frame_of(1, format.encode_payload(Kind.PUT, b"b", b"k", b"", b"v", time_us=0))
    assert fast.put_records(frame, 0, 1, 0, 1, 2**32 - 1)[2:] == (1, len(frame))
    assert fast.put_records(frame, 0, 1, 0, 1, 2**32) == ([], [], 0, 0)
    assert fast.put_records(frame, len(frame), 1, 0, 1, 128) == ([], [], 0, len(frame))
    assert fast.put_records(frame, 2**40, 1, 0, 1, 128) == ([], [], 0, 2**40)


# ---------------------------------------------------------------------------- scans


class Bytes:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def read_at(self, offset: int, size: int) -> bytes:
        return self.data[offset : offset + size]


def scanned(data: bytes, header: SegmentHeader) -> Scan | str:
    try:
        return scan.scan_frames(Bytes(data), header, stop=len(data))
    except LowwaterError as error:
        return error.message


@needs_compiled
@pytest.mark.parametrize("seed", range(40))
def test_a_scan_finds_the_same_either_way(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(scan, "READ_BYTES", 5000)
    problems, frame_count = set(), 0
    for _ in range(40):
        plain, count = rng.choice((0.5, 0.9, 0.99, 1.0)), rng.choice((0, 1, 2, 50, 100))
        frames = random_log(rng, plain=plain, count=count)
        seq_first = int.from_bytes(frames[:8], "little") if frames else 7
        header = SegmentHeader(
            seq_first=seq_first,
            seq_before=seq_first - 1,
            hash_before=bytes(32),
            cluster_id=bytes(16),
            epoch=1,
            segment_bytes=rng.choice((65536, SEGMENT_BYTES)),
            block_bytes=4096,
            compression=0,
            time_before_us=0,
        )
        data = header.encode() + damaged(rng, frames)
        monkeypatch.setattr(scan, "walk_frames", fast.walk_frames)
        compiled = scanned(data, header)
        monkeypatch.setattr(scan, "walk_frames", None)
        assert compiled == scanned(data, header)
        problems.add(compiled if isinstance(compiled, str) else compiled.problem)
        frame_count += 0 if isinstance(compiled, str) else len(compiled.positions)
    assert frame_count > 100
    assert len(problems) > 2


def walk_frames(
    data: Any,
    at: Any = 0,
    seq: Any = 0,
    time_us: Any = 0,
    kinds: Any = bytes((Kind.PUT,)),
    flags: Any = 0,
    offset: Any = 128,
    stop: Any = MIB,
) -> WalkedFrames:
    assert fast.walk_frames is not None
    return fast.walk_frames(data, at, seq, time_us, kinds, flags, offset, stop)


@needs_compiled
def test_a_walk_ends_before_what_is_not_plain() -> None:
    payload = format.encode_payload(Kind.PUT, b"b", b"k", b"", b"v", time_us=5)
    data = frame_of(3, payload) + frame_of(4, payload)
    size = len(data) // 2
    positions = array("I", (128, 128 + size)).tobytes()
    whole, one, none = (positions, 4, 5, 2 * size), (positions[:4], 3, 5, size), (b"", 0, 0, 0)
    assert walk_frames(data) == whole
    assert walk_frames(data + data) == whole
    assert walk_frames(data, stop=128 + 2 * size + 1) == whole
    assert walk_frames(data, stop=128 + 2 * size) == one
    assert walk_frames(data[:-1]) == one
    assert walk_frames(data[: size + FRAME_BYTES]) == one
    assert walk_frames(data, seq=2) == whole
    assert walk_frames(data, seq=3) == (b"", 3, 0, 0)
    assert walk_frames(data, time_us=5) == whole
    assert walk_frames(data, time_us=6) == (b"", 0, 6, 0)
    assert walk_frames(data, kinds=b"\0\1\2") == none
    assert walk_frames(data, kinds=b"") == none
    assert walk_frames(data, at=size) == (array("I", (128 + size,)).tobytes(), 4, 5, 2 * size)
    assert walk_frames(data, at=2 * size) == (b"", 0, 0, 2 * size)
    assert walk_frames(data, offset=2**32) == none
    assert walk_frames(data, offset=2**32 - 1 - size, stop=2**40)[1:] == one[1:]
    assert walk_frames(b"") == none
    transactional = frame_of(
        3, format.encode_payload(Kind.PUT, b"b", b"k", b"", b"v", time_us=5, extras=Extras(txn=7))
    )
    assert walk_frames(transactional) == none
    assert walk_frames(transactional, flags=int(Flag.TXN))[1:] == (3, 5, len(transactional))


# ---------------------------------------------------------------------------- both


@needs_compiled
def test_arguments_of_another_type_are_refused() -> None:
    """That is a mistake of ours, and not of who reads."""
    usual: list[tuple[Any, list[Any]]] = [
        (fast.put_records, [b"", 0, 1, 1, 1, 1]),
        (fast.walk_frames, [b"", 0, 0, 0, b"", 0, 128, MIB]),
    ]
    for call, arguments in usual:
        call(*arguments)
        for index, argument in enumerate(arguments):
            others = (bytearray(), "", None) if isinstance(argument, bytes) else (None, "1", 1.0)
            for other in others:
                with pytest.raises(TypeError):
                    call(*arguments[:index], other, *arguments[index + 1 :])
            if not isinstance(argument, bytes):
                with pytest.raises(OverflowError):
                    call(*arguments[:index], -1, *arguments[index + 1 :])
        with pytest.raises(TypeError):
            call(*arguments[:-1])
        with pytest.raises(TypeError):
            call(*arguments, 1)


@needs_compiled
def test_reading_frames_keeps_nothing() -> None:
    assert fast.put_records is not None
    put_records = fast.put_records
    data = random_log(random.Random(1), plain=1.0, count=3)
    counts = sys.getrefcount(data)
    calls = [
        lambda: put_records(data, 0, 0, 1, 5, 128),
        lambda: put_records(data[:-1], 0, 0, MIB, 5, 128),
        lambda: walk_frames(data),
        lambda: walk_frames(data[:-1]),
        refused(lambda: walk_frames(data, stop=None)),
        refused(lambda: put_records(data, None, 0, 1, 5, 128)),
    ]
    for call in calls:
        assert blocks_left(call) < 50
    assert sys.getrefcount(data) == counts
