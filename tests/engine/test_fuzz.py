"""Bytes that nobody has written give typed errors, and entries that nobody has thought of come back whole.

tests/fuzz/fuzz_decoders.py says what is done with an input. Here its kept seeds are replayed, and hypothesis
makes inputs of its own where there is no coverage-guided fuzzer.
"""

from __future__ import annotations

import importlib.util
import struct
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

import cbor2
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lowwater.engine.format import format
from lowwater.engine.format.entries import Entry, decode_frames, decode_payload
from lowwater.engine.format.format import Extras, Flag, Kind, ValueRef
from lowwater.engine.log.check import check_segment
from lowwater.engine.log.compress import compress_segment
from lowwater.engine.log.directory import HINT, Hint, read_hint
from lowwater.engine.log.reader import SealedReader
from lowwater.engine.seams.memory import MemoryFiles
from lowwater.errors import InvalidEntry

TESTS = Path(__file__).parent.parent
SEEDS = sorted((TESTS / "fuzz" / "seeds").iterdir())


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # its dataclasses and generics look for themselves there
    spec.loader.exec_module(module)
    return module


fuzz = _load(TESTS / "fuzz" / "fuzz_decoders.py")
make = _load(TESTS / "golden" / "make.py")

u64 = st.integers(0, format.SEQ_MAX)
times = st.integers(0, format.TIME_US_MAX)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
metadata = st.dictionaries(texts, texts, max_size=5)
values = st.binary(max_size=200)


@st.composite
def extras(draw: st.DrawFn) -> Extras:
    """Any optional groups, and either a code, a reference or a value."""
    groups: dict[str, Any] = {
        "txn": draw(st.none() | u64),
        "group_seq_last": draw(st.none() | u64),
        "session": draw(st.none() | u64),
        "request_hash": draw(st.none() | st.binary(min_size=16, max_size=16)),
        "stream_offset": draw(st.none() | u64),
        "before": draw(st.none() | values),
    }
    if groups["txn"] is not None:
        groups["txn_seq_before"] = draw(u64)
    if groups["session"] is not None:
        groups["request"] = draw(u64)
    tail = draw(st.sampled_from(["value", "refused", "value_ref"]))
    if tail == "refused":
        groups["refused"] = draw(st.integers(0, 65535))
    elif tail == "value_ref":
        groups["value_ref"] = ValueRef(draw(u64), draw(u64), draw(st.binary(min_size=32, max_size=32)))
    return Extras(**groups)


# ---------------------------------------------------------------------------- round trips


@given(st.sampled_from(Kind), texts, texts, metadata, values, times, u64, extras(), u64)
def test_every_payload_comes_back_as_it_was_encoded(
    kind: Kind,
    bucket: str,
    key: str,
    data: dict[str, str],
    value: bytes,
    time_us: int,
    origin: int,
    more: Extras,
    seq: int,
) -> None:
    """With any optional groups in any combination."""
    if more.refused is not None or more.value_ref is not None:
        value = b""
    payload = format.encode_payload(
        kind,
        bucket.encode(),
        key.encode(),
        format.encode_metadata(data),
        value,
        time_us=time_us,
        origin=origin,
        extras=more,
    )
    entry = decode_payload(seq, payload)
    assert entry[:8] == (seq, kind.name.lower(), bucket, key, value, data or None, time_us, origin)
    assert entry.txn == more.txn
    assert (entry.extras or format.NO_EXTRAS) == more
    frame = format.encode_frames([seq], [payload], [len(payload)])
    assert list(decode_frames(frame, 0, len(frame), verify=True)) == [entry]
    flags = struct.unpack_from("<H", payload, 1)[0]
    groups = format.GROUP_BYTES[flags & 31] + (4 + len(more.before) if more.before is not None else 0)
    assert len(payload) == 25 + groups + len(bucket.encode()) + len(key.encode()) + len(
        format.encode_metadata(data)
    ) + (2 if flags & Flag.REFUSED else 48 if flags & Flag.VALUE_REF else len(value))


@given(metadata)
@example({"": ""})
@example({"b": "", "a": "", "aa": "", "é": ""})
def test_metadata_is_canonical_and_comes_back(data: dict[str, str]) -> None:
    """Shortest lengths, sorted by encoded name, nothing else."""
    encoded = format.encode_metadata(data)
    if not data:
        assert encoded == b""
        return
    assert format.decode_metadata(encoded) == data

    def head(major: int, length: int) -> bytes:
        if length < 24:
            return bytes([major << 5 | length])
        return (
            bytes([major << 5 | 24, length])
            if length < 256
            else bytes([major << 5 | 25]) + struct.pack(">H", length)
        )

    def text(value: str) -> bytes:
        raw = value.encode()
        return head(3, len(raw)) + raw

    items = sorted((text(name), text(value)) for name, value in data.items())
    assert encoded == head(5, len(data)) + b"".join(name + value for name, value in items)


@given(st.text(max_size=2000))
def test_a_name_is_encoded_or_refused(name: str) -> None:
    """No third way: no truncation, no replacement."""
    try:
        encoded = format.encode_name(name, "key", format.KEY_BYTES_MAX)
    except InvalidEntry:
        utf8 = name.encode(errors="surrogatepass")
        assert (
            not name or len(utf8) > format.KEY_BYTES_MAX or any("\ud800" <= char <= "\udfff" for char in name)
        )
    else:
        assert encoded.decode() == name
        assert 0 < len(encoded) <= format.KEY_BYTES_MAX


@st.composite
def logs(draw: st.DrawFn) -> list[dict[str, Any]]:
    """The entries of one segment: puts, deletes, messages of two streams, refused ones; seqs with holes."""
    specs = [make.create(block_bytes=draw(st.sampled_from([1024, 4096])))]
    seq, offsets = 1, {"clicks": 0, "orders": 7}
    for _ in range(draw(st.integers(0, 25))):
        seq += draw(st.sampled_from([1, 1, 1, 5, 1000]))
        kind = draw(st.sampled_from(["put", "delete", "append", "refused"]))
        key, more = draw(texts.filter(bool)), {"time_us": make.TIME_US + seq}
        if kind == "append":
            topic = draw(st.sampled_from(sorted(offsets)))
            value = draw(values)
            specs.append(
                make.entry(
                    seq, "append", bucket=topic, key=key, value=value, stream_offset=offsets[topic], **more
                )
            )
            offsets[topic] += 1
        elif kind == "put":
            data = draw(metadata) or None
            specs.append(make.put(seq, key, draw(values), metadata=data, before=b"", **more))
        elif kind == "delete":
            specs.append(make.entry(seq, "delete", bucket=draw(texts.filter(bool)), key=key, **more))
        else:
            specs.append(make.put(seq, key, b"", refused=draw(st.integers(0, 65535)), **more))
    specs.append(make.seal(seq + 1, 1) | {"time_us": make.TIME_US + seq + 1})
    return specs


@settings(max_examples=60)
@given(logs())
def test_every_segment_reads_back_raw_and_compressed_and_as_columns(specs: list[dict[str, Any]]) -> None:
    """All readers agree, and the check finds it sound."""
    ((name, data),) = make.write_log(specs).items()
    parts: list[bytes] = []
    compress_segment(make.file_of(data), parts.append)
    expected = [spec["seq"] for spec in specs]
    for stored in (data, b"".join(parts)):
        files: Any = fuzz.OneFile(stored)
        assert list(check_segment(files, name)) == []
        entries: list[Entry] = fuzz.read_sealed(stored)
        assert [entry.seq for entry in entries] == expected
        for entry, spec in zip(entries, specs, strict=True):
            assert decode_payload(spec["seq"], make.encode(spec)) == entry
        if fuzz.IS_VECTORISED:
            fuzz.same_entries(entries, fuzz.read_columns(stored))
    reader = SealedReader(make.file_of(data))
    for seq in (0, *expected, expected[-1] + 1):
        found = [
            entry.seq
            for chunk in reader.chunks_after(seq)
            for entry in decode_frames(chunk.data, chunk.start, chunk.end, verify=True)
            if entry.seq > seq
        ]
        assert found == [one for one in expected if one > seq]


# ---------------------------------------------------------------------------- bytes that nobody has written


@pytest.mark.parametrize("seed", SEEDS, ids=lambda path: path.name)
def test_a_kept_seed_still_does_no_harm(seed: Path) -> None:
    """What a fuzzer found once, or needed to get anywhere."""
    fuzz.run(seed.read_bytes())


def test_the_kept_seeds_are_small() -> None:
    """They are part of every clone."""
    assert len(SEEDS) > 50
    assert sum(seed.stat().st_size for seed in SEEDS) < 200 * 1024


@pytest.mark.parametrize("target", sorted({target.__name__ for target in fuzz.TARGETS}))
def test_no_input_gets_anything_but_a_typed_error_out_of_a_decoder(target: str) -> None:
    """The same targets as the fuzzer's, with inputs of another kind."""
    work = getattr(fuzz, target)

    @settings(max_examples=80)
    @given(st.binary(max_size=700))
    def attempt(data: bytes) -> None:
        work(fuzz.Source(data))

    attempt()


@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_no_segment(data: bytes) -> None:
    """Without any help to get past the magic."""
    for raw in (data, format.HEADER_MAGIC + data, data + format.TRAILER_MAGIC + data):
        fuzz.segment(raw)
        fuzz.current(raw)


hint_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def hint_with(body: bytes) -> Hint | None:
    files = MemoryFiles()
    files.make_directory("log")
    data = b"LWHINT\r\n" + struct.pack("<I", crc32(body)) + body
    files.open(f"log/{HINT}", create=True).write_at(0, [data])
    return read_hint(files, "log")


@given(st.binary(max_size=60) | hint_values.map(cbor2.dumps))
@example(b"")
@example(cbor2.dumps([1, 2, 3]))
@example(cbor2.dumps([1, 2, 3, "fsync", 5]))
@example(cbor2.dumps([1, 2, 3, "never"]))
@example(cbor2.dumps([1, 2, -3, "fsync"]))
@example(cbor2.dumps([1, 2, 2**64, "fsync"]))
@example(cbor2.dumps([True, 2, 3, "fsync"]))
@example(cbor2.dumps([1.0, 2, 3, "fsync"]))
@example(cbor2.dumps([1, 2, 3, ["fsync"]]))
@example(cbor2.dumps([1, 2, 3, {"a": []}]))
@example(b"\xd8\x1c\x81\xd8\x1d\x00")
@example(b"\x81" * 1000)
def test_a_hint_whose_checksum_is_right_and_whose_content_is_wrong_is_no_hint(body: bytes) -> None:
    """Recovery then knows less; it must not fail, and it must not believe nonsense."""
    hint = hint_with(body)
    if hint is not None:
        assert hint.sync_mode in ("fsync", "fdatasync", "none")
        assert all(
            type(number) is int and 0 <= number < 2**64
            for number in (hint.segment_seq_first, hint.durable_bytes, hint.durable_seq)
        )


@given(u64, u64, u64, st.sampled_from(["fsync", "fdatasync", "none"]))
def test_a_hint_comes_back_as_it_was_written(first: int, size: int, seq: int, mode: Any) -> None:
    """And any flipped bit of it makes it no hint."""
    hint = Hint(first, size, seq, mode)
    data = hint.encode()
    assert Hint.decode(data) == hint
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        assert Hint.decode(bytes(damaged)) is None
        assert Hint.decode(data[:at]) is None
