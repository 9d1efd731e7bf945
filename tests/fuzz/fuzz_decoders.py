"""What every decoder does with bytes that nobody has written: a typed error, or entries, and nothing else.

Always true:
  - an input is read by `Source` alone, so a file of the corpus means the same here, under atheris, and in
    tests/engine/test_fuzz.py, which replays the seeds that are kept in `seeds/`;
  - in about half of the cases magic, checksums and hashes are made right after the damage: a fuzzer that
    has to guess a BLAKE3 never sees what lies behind it;
  - besides "no error but a typed one", ways that must agree are compared: the plain and the vectorised
    builder of footers, entries and columns, what `check` finds sound and what can be read.

Run it as `python tests/fuzz/fuzz_decoders.py corpus/ tests/fuzz/seeds -max_total_time=600` where atheris is.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import cbor2
import zstandard
from blake3 import blake3

if __name__ == "__main__":
    import atheris
    import numpy  # noqa: F401 - before the instrumentation, which is for our own modules
    import pyarrow  # noqa: F401

    _instrument: Any = atheris.instrument_imports(include=["lowwater.engine"])
else:
    from contextlib import nullcontext

    _instrument = nullcontext()

with _instrument:
    from lowwater.engine.format import format
    from lowwater.engine.format.entries import Entry, decode_body, decode_frames, decode_payload
    from lowwater.engine.format.format import SegmentHeader, SegmentTrailer
    from lowwater.engine.log import compress, footer
    from lowwater.engine.log.check import check_directory, check_segment
    from lowwater.engine.log.compress import CompressedSegment
    from lowwater.engine.log.describe import describe_segment
    from lowwater.engine.log.directory import Hint
    from lowwater.engine.log.dump import Selection, dump_entries
    from lowwater.engine.log.footer import footer_steps, vectorised
    from lowwater.engine.log.reader import SealedReader
    from lowwater.engine.log.recover import inspect_directory
    from lowwater.engine.log.salvage import Skipped, salvage_frames
    from lowwater.engine.log.scan import find_frame, scan_frames
    from lowwater.engine.seams.memory import MemoryFiles
    from lowwater.errors import Corrupt, LowwaterError

IS_VECTORISED = vectorised() is not None
GOLDEN = Path(__file__).parent.parent / "golden"
SEALED = sorted(path.read_bytes() for path in GOLDEN.glob("*/segment-*.log") if path.stat().st_size < 6000)
COMPRESSED = sorted(path.read_bytes() for path in GOLDEN.glob("*/*.zst"))
CURRENT = sorted(path.read_bytes() for path in GOLDEN.glob("*/current.log"))
KINDS = list(format.Kind)
COMPRESSOR = zstandard.ZstdCompressor(level=1, write_content_size=True)
BODIES: list[dict[str, object]] = [
    {"cluster_id": bytes(16), "salt": bytes(16), "settings": {}},
    {"cluster_id": bytes(16), "salt": bytes(16), "settings": {"segment_bytes": 4096, "block_bytes": 1024}},
    {"cluster_id": bytes(16), "epoch": 2},
    {"segment_bytes": 4096},
    {"segment_bytes": 1},
    {"unknown": 1},
    {"seq_first": 1},
    {},
]
NAME = "segment-00000000000000000001-00000000000000000003.log"


class Source:
    """Numbers and bytes from an input; zeros after its end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> bytes:
        part = self._data[self._at : self._at + size]
        self._at += len(part)
        return part

    def byte(self) -> int:
        return (self.take(1) or b"\0")[0]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def some_number(self) -> int:
        """Small, or at an edge, or any."""
        choice = self.byte()
        if choice < 160:
            return choice
        edges = (
            0,
            1,
            24,
            25,
            41,
            63,
            127,
            128,
            255,
            2**16 - 1,
            2**24,
            2**25,
            2**31,
            2**32 - 1,
            2**63,
            2**64 - 1,
        )
        return edges[choice % 16] if choice < 224 else self.number(8)

    def short_bytes(self) -> bytes:
        return self.take(self.byte())

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def rest(self) -> bytes:
        return self.take(self.left)


class OneFile:
    """A file, and the file system that it is in."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def open(self, path: str, **_: object) -> Any:
        return OneFile(self.data)

    def list(self, directory: str) -> list[str]:
        raise NotADirectoryError(directory)

    def read_at(self, offset: int, size: int) -> bytes:
        # As the operating system has it: these would be bugs of ours.
        assert 0 <= offset < 2**63, offset
        assert 0 <= size < 2**63, size
        return self.data[offset : offset + size]

    def size(self) -> int:
        return len(self.data)

    def close(self) -> None:
        pass


def quietly(work: Callable[[], Any]) -> Any:
    """What `work` gives, or the typed error that it raised."""
    try:
        return work()
    except LowwaterError as error:
        error.as_dict()
        return error


def checked(data: bytearray, end: int) -> None:
    """The CRC-32 of a header or trailer that ends at `end`."""
    size = format.HEADER_BYTES if end == format.HEADER_BYTES else format.TRAILER_BYTES
    struct.pack_into("<I", data, end - 4, crc32(data[end - size : end - 4]))


# ---------------------------------------------------------------------------- making inputs


def header_from(source: Source, *, seq_first: int = 1, seq_before: int = 0) -> bytearray:
    header = SegmentHeader(
        seq_first=seq_first,
        seq_before=seq_before,
        hash_before=bytes(32),
        cluster_id=bytes(16),
        epoch=1,
        segment_bytes=4096 if source.byte() & 1 else 100_000_000,
        block_bytes=1024 if source.byte() & 1 else 262_144,
        compression=0,
        time_before_us=0,
    )
    data = bytearray(header.encode())
    for _ in range(source.byte() % 3):
        data[source.byte() % 128] = source.byte()
    if source.byte() & 3:
        data[:12] = header.encode()[:12]
        checked(data, format.HEADER_BYTES)
    return data


def payload_from(source: Source, seq: int = 7, time_us: int = 0) -> bytes:
    choice = source.byte()
    if choice < 16:
        return source.short_bytes()
    kind = KINDS[choice % len(KINDS)] if choice < 250 else source.byte()
    flags = 0
    if choice & 1:
        flags = source.number(2) & (format.FLAGS_KNOWN if choice < 240 else 0xFFFF)
    groups = bytearray(source.take(format.GROUP_BYTES[flags & 31]))
    if flags & format.Flag.GROUP and choice & 16:
        at = 16 if flags & format.Flag.TXN else 0
        groups[at : at + 8] = struct.pack("<Q", min(seq + source.byte() % 3, format.SEQ_MAX))
    if flags & format.Flag.BEFORE:
        before = source.short_bytes()
        groups += struct.pack("<I", len(before) if choice & 2 else source.some_number() & 0xFFFFFFFF) + before
    bucket, key, metadata = (source.take(source.byte() % 24) for _ in range(3))
    if choice & 4:
        metadata = format.encode_metadata({key.decode("latin-1"): "x"}) if choice & 8 else b""
    if choice & 8:
        bucket, key = bucket.decode("latin-1").encode(), key.decode("latin-1").encode()
    value = source.short_bytes()
    if kind >= format.Kind.CREATE and choice & 16:
        bucket = key = metadata = b""
        value = cbor2.dumps(BODIES[source.byte() % len(BODIES)], canonical=True)
    if flags & format.Flag.REFUSED and choice & 16:
        value = value[:2].ljust(2, b"\0")
    if flags & format.Flag.VALUE_REF and choice & 16:
        value = value[:48].ljust(48, b"\0")
    lengths = [len(bucket), len(key), len(metadata)]
    if choice & 32 and source.byte() < 32:
        lengths[source.byte() % 3] = source.some_number() & 0xFFFF
    if source.byte() > 230:
        time_us = source.some_number()
    fixed = format.FIXED.pack(kind, flags, *lengths, time_us, 0)
    return fixed + bytes(groups) + bucket + key + metadata + value


def frames_from(source: Source, seq: int = 0) -> list[bytes]:
    frames = []
    if source.byte() & 3:
        body = cbor2.dumps(BODIES[0], canonical=True)
        payload = format.FIXED.pack(format.Kind.CREATE, 0, 0, 0, 0, 0, 0) + body
        frames.append(format.encode_frames([1], [payload], [len(payload)]))
        seq = 1
    while source.left and len(frames) < 40:
        choice = source.byte()
        seq = seq + 1 if choice < 200 else source.some_number()
        payload = payload_from(source, seq, len(frames))
        frame = bytearray(format.FRAME.pack(seq & format.SEQ_MAX, len(payload), 0) + payload)
        if choice & 31:
            struct.pack_into("<I", frame, 12, crc32(frame[16:], crc32(frame[:12])))
        if choice == 32:
            struct.pack_into("<I", frame, 8, source.some_number() & 0xFFFFFFFF)
        frames.append(bytes(frame))
        if choice == 33:
            frames.append(source.short_bytes())
    return frames


def sealed_from(source: Source) -> bytes:
    """A segment of frames that were made up, with a footer that belongs to it, or nearly."""
    head = header_from(source)
    frames = frames_from(source)
    body = bytes(head) + b"".join(frames)
    positions = array("I")
    at = len(head)
    for frame in frames:
        positions.append(at)
        at += len(frame)
    return footered(source, body, positions)


def footered(source: Source, body: bytes, positions: array[int]) -> bytes:
    for _ in range(source.byte() % 3 if source.byte() < 64 and positions else 0):
        positions[source.byte() % len(positions)] = source.some_number() & 0xFFFFFFFF
    (block_bytes,) = struct.unpack_from("<I", body, 96)
    block_bytes = min(max(block_bytes, 1024), format.BLOCK_BYTES_MAX)
    block_hashes = footer.hash_blocks(body, block_bytes)
    keys = source.byte() % 8
    key_index = source.take(8 * keys).ljust(8 * keys, b"\0")
    kinds = source.take(8 * (source.byte() % 4))
    kinds = kinds[: len(kinds) // 8 * 8]
    streams = source.short_bytes()
    padding = bytes(format.align_footer(len(body)) - len(body))
    data = b"".join((padding, positions.tobytes(), key_index, *block_hashes, kinds, streams))
    trailer = SegmentTrailer(
        file_bytes=len(body) + len(data) + format.TRAILER_BYTES,
        body_bytes=len(body),
        seq_first=1,
        seq_last=source.some_number(),
        time_min_us=0,
        time_max_us=source.some_number(),
        frame_count=len(positions),
        key_count=keys,
        block_count=len(block_hashes),
        kind_count=len(kinds) // 8,
        stream_count=source.byte(),
        stream_bytes=len(streams),
        segment_hash=footer.segment_hash(block_hashes),
        footer_hash=blake3(data).digest(),
    )
    return body + data + trailer.encode()


def patched(source: Source, data: bytes) -> bytearray:
    """With some bytes changed, taken out or put in."""
    changed = bytearray(data)
    for _ in range(1 + source.byte() % 4):
        at = source.number(2) % (len(changed) + 1)
        choice = source.byte()
        if choice < 200:
            part = source.take(1 + choice % 8)
            changed[at : at + len(part)] = part
        elif choice < 225:
            del changed[at : at + source.byte()]
        elif choice < 250:
            changed[at:at] = source.short_bytes()
        else:
            del changed[at:]
    return changed


def rehashed_segment(data: bytearray) -> bytes:
    """With every checksum and hash made right, as far as the trailer still says where they are."""
    if len(data) < format.HEADER_BYTES + format.TRAILER_BYTES:
        return bytes(data)
    checked(data, format.HEADER_BYTES)
    fields = list(format.TRAILER.unpack(data[-format.TRAILER_BYTES :]))
    body_bytes, frame_count, key_count, block_count = fields[5], fields[10], fields[11], fields[12]
    start = format.align_footer(body_bytes)
    (block_bytes,) = struct.unpack_from("<I", data, 96)
    hashes = start + 4 * frame_count + 8 * key_count
    end = len(data) - format.TRAILER_BYTES
    if body_bytes < end and block_bytes >= 64 and hashes + 32 * block_count <= end:
        positions = struct.iter_unpack("<I", data[start : start + 4 * frame_count])
        for (at,) in positions:
            if at + 16 <= body_bytes:
                (length,) = struct.unpack_from("<I", data, at + 8)
                if at + 16 + length <= body_bytes:
                    frame = data[at : at + 16 + length]
                    struct.pack_into("<I", data, at + 12, crc32(frame[16:], crc32(frame[:12])))
        block_hashes = footer.hash_blocks(bytes(data[:body_bytes]), block_bytes)[:block_count]
        joined = b"".join(block_hashes)
        data[hashes : hashes + len(joined)] = joined
        segment_hash = blake3(bytes(data[hashes : hashes + 32 * block_count])).digest()
        at = len(data) - format.TRAILER_BYTES
        data[at + 88 : at + 120] = segment_hash
        data[at + 120 : at + 152] = blake3(bytes(data[body_bytes:end])).digest()
    struct.pack_into("<Q", data, len(data) - format.TRAILER_BYTES + 16, len(data))
    checked(data, len(data))
    return bytes(data)


def compressed(source: Source, raw: bytes) -> bytearray:
    """A segment in blocks, with a table that belongs to them, or nearly. The stored hash is not there yet."""
    block_bytes = max(1024, struct.unpack_from("<I", raw.ljust(128, b"\0"), 96)[0])
    sizes = []
    data = bytearray()
    for start in range(0, len(raw), block_bytes):
        block = COMPRESSOR.compress(raw[start : start + block_bytes])
        sizes += [len(block), len(raw[start : start + block_bytes])]
        data += block
    if sizes and source.byte() > 200:
        sizes[source.byte() % len(sizes)] = source.some_number() & 0xFFFFFFFF
    table = struct.pack(f"<{len(sizes)}I", *sizes)
    data += compress.SKIPPABLE_HEAD.pack(compress.SEEK_TABLE_MAGIC, len(table) + compress.SEEK_FOOTER.size)
    data += table + compress.SEEK_FOOTER.pack(len(sizes) // 2, 0, compress.SEEK_FOOTER_MAGIC)
    return data + bytes(compress.STORED_HASH.size)


# ---------------------------------------------------------------------------- what is fuzzed


def entries_in(data: bytes, start: int, end: int, *, verify: bool) -> list[Entry]:
    return list(decode_frames(data, start, end, verify=verify))


def opened(data: bytes) -> Any:
    file: Any = OneFile(data)
    return CompressedSegment(file) if data[:4] == compress.ZSTD_MAGIC else file


def read_sealed(data: bytes) -> list[Entry]:
    reader = SealedReader(opened(data))
    entries = []
    for chunk in reader.chunks_after(0):
        entries += entries_in(chunk.data, chunk.start, chunk.end, verify=not chunk.verified)
    for entry in entries[:3]:
        reader.seq_before_time(entry.time_us)
        for chunk in reader.chunks_after(entry.seq):
            assert chunk.start < chunk.end
    return entries


def read_columns(data: bytes) -> list[tuple[object, ...]]:
    from lowwater.engine.log import columns

    names = ["seq", "kind", "bucket", "key", "value", "origin", "flags", "txn"]
    rows = []
    for batch in columns.read_batches(opened(data), columns=names):
        batch.validate(full=True)
        rows += [tuple(row[name] for name in names) for row in batch.to_pylist()]
    return rows


def same_entries(entries: Iterable[Entry], rows: Iterable[tuple[object, ...]]) -> None:
    for entry, (seq, kind, bucket, key, value, origin, flags, txn) in zip(entries, rows, strict=True):
        assert (seq, kind, bucket, key, origin, txn) == (
            entry.seq, entry.kind, entry.bucket, entry.key, entry.origin, entry.txn,
        )  # fmt: skip
        assert isinstance(flags, int)
        if not flags & (format.Flag.REFUSED | format.Flag.VALUE_REF):
            assert value == entry.value


def footer_of(file: OneFile, positions: array[int], end: int, block_bytes: int, *, plain: bool) -> object:
    steps = footer_steps(file, positions, end, block_bytes=block_bytes, plain=plain)
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


def segment(data: bytes) -> None:
    """Everything that reads one segment."""
    files: Any = OneFile(data)
    findings = [finding for finding in check_segment(files, NAME) if finding.severity == "error"]
    entries = quietly(lambda: read_sealed(data))
    quietly(lambda: describe_segment(files, NAME))
    quietly(lambda: list(dump_entries(files, NAME, Selection())))
    quietly(lambda: list(dump_entries(files, NAME, Selection(), salvage=True)))
    if IS_VECTORISED:
        rows = quietly(lambda: read_columns(data))
        # Only columns look at each position of the footer, so they may refuse more; `check` does too.
        assert isinstance(rows, list) or not isinstance(entries, list) or findings, rows
        if isinstance(rows, list) and isinstance(entries, list):
            same_entries(entries, rows)
    if not findings and isinstance(entries, list):
        seqs = [entry.seq for entry in entries]
        assert all(before < after for before, after in pairwise(seqs))
    quietly(lambda: unsealed(data))


def unsealed(data: bytes) -> None:
    """Everything that reads frames without a footer."""
    file: Any = OneFile(data)
    header = SegmentHeader.decode(file.read_at(0, format.HEADER_BYTES))
    scan = scan_frames(file, header, stop=len(data))
    assert len(scan.positions) == 0 or scan.positions[0] == format.HEADER_BYTES
    whole = quietly(lambda: entries_in(data, format.HEADER_BYTES, scan.end, verify=True))
    if isinstance(whole, list):
        assert len(whole) == len(scan.positions)
    if scan.positions:
        plain = quietly(lambda: footer_of(file, scan.positions, scan.end, header.block_bytes, plain=True))
        if IS_VECTORISED:
            fast = quietly(lambda: footer_of(file, scan.positions, scan.end, header.block_bytes, plain=False))
            assert isinstance(plain, LowwaterError) == isinstance(fast, LowwaterError), (plain, fast)
            if not isinstance(plain, LowwaterError):
                assert plain == fast
    find_frame(file, 1, len(data), seq_above=0)
    end, seq = format.HEADER_BYTES, header.seq_before
    for part in salvage_frames(file, end, len(data), seq_before=seq, positions=scan.positions):
        if isinstance(part, Skipped):
            assert end == part.start < part.end
            end = part.end
        else:
            assert part.offset == end
            assert part.seq > seq
            end, seq = part.end, part.seq


def current(data: bytes) -> None:
    """Opening a log whose current segment this is."""
    files = MemoryFiles()
    files.make_directory("log")
    files.open("log/current.log", create=True).write_at(0, [data])
    quietly(lambda: inspect_directory(files, "log"))
    list(check_directory(files, "log"))
    quietly(lambda: unsealed(data))


def fuzz_header(source: Source) -> None:
    data = bytearray(header_from(source))
    data += source.rest()
    decoded = quietly(lambda: SegmentHeader.decode(bytes(data)))
    if isinstance(decoded, SegmentHeader):
        assert decoded.encode() == data[: format.HEADER_BYTES]


def fuzz_trailer(source: Source) -> None:
    fixed = source.byte() & 3
    data = bytearray(source.rest().ljust(format.TRAILER_BYTES, b"\0"))
    if fixed:
        at = len(data) - format.TRAILER_BYTES
        data[at : at + 12] = format.TRAILER_MAGIC + struct.pack("<HH", 1, 0)
        data[at + 152 : at + 188] = bytes(36)
        if fixed > 1:
            counts = struct.unpack_from("<6I", data, at + 64)
            sizes = 4 * counts[0] + 8 * counts[1] + 32 * counts[2] + 8 * counts[3] + counts[5] + 192
            (body_bytes,) = struct.unpack_from("<Q", data, at + 24)
            struct.pack_into("<Q", data, at + 16, (format.align_footer(body_bytes) + sizes) & format.SEQ_MAX)
        checked(data, len(data))
    decoded = quietly(lambda: SegmentTrailer.decode(bytes(data)))
    if isinstance(decoded, SegmentTrailer):
        assert decoded.encode() == data[-format.TRAILER_BYTES :]


def fuzz_frames(source: Source) -> None:
    raw = source.byte() & 1
    data = source.rest() if raw else b"".join(frames_from(source))
    quietly(lambda: entries_in(data, 0, len(data), verify=True))
    quietly(lambda: entries_in(data, 0, len(data), verify=False))


def fuzz_payload(source: Source) -> None:
    payload = payload_from(source)
    entry = quietly(lambda: decode_payload(7, payload))
    if isinstance(entry, Entry):
        assert entry.seq == 7
        _, _, *lengths, _, _ = format.FIXED.unpack_from(payload)
        assert format.FIXED_BYTES + sum(lengths) <= len(payload), "the next frame's bytes are in this one"
        if entry.time_us > format.TIME_US_MAX:
            return  # a reader takes what no writer writes
        again = format.encode_payload(
            format.KIND_CODES[entry.kind],
            entry.bucket.encode(),
            entry.key.encode(),
            format.encode_metadata(entry.metadata),
            entry.value,
            time_us=entry.time_us,
            origin=entry.origin,
            extras=entry.extras or format.NO_EXTRAS,
        )
        assert decode_payload(7, again) == entry or entry.metadata == {}


def fuzz_cbor(source: Source) -> None:
    data = source.rest()
    metadata = quietly(lambda: format.decode_metadata(data))
    if isinstance(metadata, dict) and metadata:
        assert format.decode_metadata(format.encode_metadata(metadata)) == metadata
    quietly(lambda: decode_body(Entry(1, "settings", "", "", data, None, 0, 0)))


def fuzz_hint(source: Source) -> None:
    data = source.rest()
    if data[:1] != b"L":
        data = Hint(1, 2, 3, "fsync").encode()[:8] + struct.pack("<I", crc32(data)) + data
    hint = Hint.decode(data)
    if hint is not None:
        assert Hint.decode(hint.encode()) == hint


def fuzz_scan(source: Source) -> None:
    data = bytes(header_from(source)) + b"".join(frames_from(source))
    if source.byte() & 1:
        data += bytes(100)
    current(data)


def fuzz_current(source: Source) -> None:
    data = CURRENT[source.byte() % len(CURRENT)]
    current(bytes(patched(source, data)))


def fuzz_sealed(source: Source) -> None:
    segment(sealed_from(source))


def fuzz_patched(source: Source) -> None:
    data = patched(source, SEALED[source.byte() % len(SEALED)])
    segment(rehashed_segment(data) if source.byte() & 3 else bytes(data))


def fuzz_compressed(source: Source) -> None:
    choice = source.byte()
    if choice & 4:
        raw = rehashed_segment(patched(source, SEALED[source.byte() % len(SEALED)]))
        data = compressed(source, raw)
    else:
        data = patched(source, COMPRESSED[source.byte() % len(COMPRESSED)])
    if choice & 1:
        data += bytes(compress.STORED_HASH.size)
    if choice & 3:
        body = bytes(data[: -compress.STORED_HASH.size])
        data = bytearray(
            body + compress.STORED_HASH.pack(compress.STORED_HASH_MAGIC, 32, blake3(body).digest())
        )
    stored = bytes(data)
    quietly(lambda: compress.verify_stored(OneFile(stored)))  # type: ignore[arg-type]
    file = quietly(lambda: CompressedSegment(OneFile(stored)))  # type: ignore[arg-type]
    if isinstance(file, CompressedSegment):
        size = file.size()
        raw = quietly(lambda: file.read_at(0, size))
        assert isinstance(raw, Corrupt) or len(raw) == size
        segment(stored)


TARGETS: tuple[Callable[[Source], None], ...] = (
    fuzz_header, fuzz_trailer, fuzz_frames, fuzz_payload, fuzz_cbor, fuzz_hint, fuzz_scan, fuzz_current,
    fuzz_sealed, fuzz_sealed, fuzz_patched, fuzz_patched, fuzz_compressed,
)  # fmt: skip


def run(data: bytes) -> None:
    source = Source(data)
    TARGETS[source.byte() % len(TARGETS)](source)


if __name__ == "__main__":
    atheris.Setup(sys.argv, run)
    atheris.Fuzz()
