"""
A second reader of the log, written from docs/FORMAT.md alone. It imports nothing of the package.

It shows that the document is enough to write a reader. Where the two disagree, one of them is wrong.
"""

from __future__ import annotations

import ast
import io
import json
import re
import shutil
import struct
import sys
import zlib
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import blake3
import cbor2
import pytest
import zstandard

GOLDEN = Path(__file__).parent / "golden"

HEADER_MAGIC = b"LWSEG\r\n\x1a"
HEADER = struct.Struct("<8sHHIQQ32s16sQQIB3sQ12sI")
TRAILER = struct.Struct("<8sHHIQQQQQQIIIIII32s32s36sI")
HEAD = struct.Struct("<QII")
FIXED = struct.Struct("<BHHHHQQ")
PAYLOAD_MAX = 33554416
BODY_MAX = 2181038080
WINDOW_MAX = 16 << 20
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

# Code: name, has a bucket, has a key.
KINDS = {
    1: ("create_bucket", True, False),
    2: ("delete_bucket", True, False),
    3: ("put", True, True),
    4: ("delete", True, True),
    5: ("copy", True, True),
    6: ("append", True, True),
    16: ("begin", False, False),
    17: ("commit", False, False),
    18: ("abort", False, False),
}
CONTROL = "create fork settings horizon pin unpin prune noop seal segment_shipped checkpoint"
CONTROL += " checkpoint_shipped compacted released"
KINDS |= {32 + n: (name, False, False) for n, name in enumerate(CONTROL.split())}
SESSIONS = "session_open session_keep session_close"
KINDS |= {80 + n: (name, False, False) for n, name in enumerate(SESSIONS.split())}
CODES = {name: code for code, (name, _, _) in KINDS.items()}

TXN, GROUP, SESSION, REQUEST_HASH, STREAM_OFFSET, BEFORE, REFUSED, VALUE_REF = 1, 2, 4, 8, 16, 32, 256, 512
FLAGS = 1 | 2 | 4 | 8 | 16 | 32 | 256 | 512

# Name: lowest, highest, default.
SETTINGS = {
    "segment_bytes": (4096, 2147483648, 100000000),
    "block_bytes": (1024, 16777216, 262144),
    "compression": (0, 1, 1),
    "before_images": (0, 1, 0),
    "page_keys": (2, 65536, 64),
    "inline_bytes_max": (0, 65536, 256),
}
IN_HEADER = ("segment_bytes", "block_bytes", "compression", "before_images")
BEFORE_IMAGES = 2


class Refused(Exception):
    """The reader does not take this file."""

    kind = ""


class NotASegment(Refused):
    """Something else than a segment."""

    kind = "not a segment"


class Newer(Refused):
    """Written by a later version."""

    kind = "newer version"


class Corrupt(Refused):
    """Not what was written."""

    kind = "corrupt"


def need(good: bool, why: str) -> None:
    """Refuse what is not good."""
    if not good:
        corrupt(why)


def corrupt(why: str) -> NoReturn:
    raise Corrupt(why)


def hash_of(data: bytes) -> bytes:
    digest: bytes = blake3.blake3(data).digest()
    return digest


@dataclass
class Segment:
    """What came out of one file. `rest` says what follows the last frame: "zeros", "group" or "torn"."""

    header: dict[str, Any]
    entries: list[dict[str, Any]] = field(default_factory=list)
    segment_hash: bytes | None = None
    rest: str = "zeros"


class Cursor:
    """Reads a piece of bytes from the front, and never beyond its end."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        need(self.at + size <= len(self.data), "a part does not fit")
        self.at += size
        return self.data[self.at - size : self.at]

    def numbers(self, layout: str) -> tuple[int, ...]:
        return struct.unpack("<" + layout, self.take(struct.calcsize("<" + layout)))

    def text(self, size: int) -> str:
        try:
            return self.take(size).decode()
        except UnicodeDecodeError as error:
            raise Corrupt("not UTF-8") from error

    def rest(self) -> bytes:
        return self.take(len(self.data) - self.at)


def check_front(block: bytes, magic: bytes) -> None:
    """Magic, version, checksum, flags: in this order, as header and trailer have them alike."""
    known = BEFORE_IMAGES if magic == HEADER_MAGIC else 0
    if block[:8] != magic:
        need(magic == HEADER_MAGIC, "no trailer")
        raise NotASegment("no magic")
    need(len(block) in (HEADER.size, TRAILER.size), "cut off")
    major, minor, flags = struct.unpack_from("<HHI", block, 8)
    if (major, minor) > (1, 0):
        raise Newer(f"format version {major}.{minor}")
    need(major == 1, "version below 1.0")
    need(zlib.crc32(block[:-4]) == int.from_bytes(block[-4:], "little"), "checksum of header or trailer")
    if flags & ~known:
        raise Newer(f"segment flag 0x{flags:x}")


def read_header(data: bytes) -> dict[str, Any]:
    """The segment header."""
    check_front(data[:128], HEADER_MAGIC)
    fields = HEADER.unpack(data[:128])
    seq_first, seq_before, hash_before, cluster_id, epoch = fields[4:9]
    segment_bytes, block_bytes, compression = fields[9:12]
    if compression > 1:
        raise Newer(f"compression {compression}")
    need(not any(fields[12]) and not any(fields[14]), "zeros in the header")
    need(seq_first > seq_before and epoch >= 1, "seqs or epoch in the header")
    sizes = {"segment_bytes": segment_bytes, "block_bytes": block_bytes, "compression": compression}
    for name, value in sizes.items():
        check_setting(name, value)
    sizes["before_images"] = int(fields[3] == BEFORE_IMAGES)
    if not seq_before:
        need(not any(hash_before) and not fields[13] and epoch == 1, "the first segment follows nothing")
    chain = {"seq_first": seq_first, "seq_before": seq_before, "time_before_us": fields[13], "epoch": epoch}
    return chain | sizes | {"hash_before": hash_before.hex(), "cluster_id": cluster_id.hex()}


def check_setting(name: str, value: object) -> None:
    """A setting that is unknown is newer; one outside its bounds is corrupt."""
    if name not in SETTINGS:
        raise Newer(f"setting {name}")
    need(type(value) is int, "a setting is a whole number")
    if name == "compression" and value > 1:  # type: ignore[operator]
        raise Newer(f"compression {value}")
    need(SETTINGS[name][0] <= value <= SETTINGS[name][1], "setting out of bounds")  # type: ignore[operator]


def read_map(data: bytes) -> dict[str, Any]:
    """A CBOR map with text names, or nothing."""
    if not data:
        return {}
    try:
        stream = io.BytesIO(data)
        found = cbor2.load(stream)
    except (cbor2.CBORDecodeError, ValueError, TypeError, RecursionError) as error:
        raise Corrupt("not CBOR") from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        corrupt("not a map of names")
    need(stream.tell() == len(data), "more than a map")
    return found


def read_payload(seq: int, payload: bytes) -> dict[str, Any]:
    """One entry, as the golden files write it."""
    kind, flags, bucket_len, key_len, metadata_len, time_us, origin = FIXED.unpack_from(payload)
    if kind not in KINDS:
        raise Newer(f"kind {kind}")
    if flags & ~FLAGS:
        raise Newer(f"entry flag 0x{flags & ~FLAGS:x}")
    name, has_bucket, has_key = KINDS[kind]
    need(time_us < 2**63, "a time that no writer writes")
    entry: dict[str, Any] = {"seq": seq, "kind": name, "time_us": time_us, "origin": origin}
    cursor = Cursor(payload)
    cursor.take(FIXED.size)
    if flags & TXN:
        entry["txn"], entry["txn_seq_before"] = cursor.numbers("QQ")
    if flags & GROUP:
        (entry["group_seq_last"],) = cursor.numbers("Q")
    if flags & SESSION:
        entry["session"], entry["request"] = cursor.numbers("QQ")
    if flags & REQUEST_HASH:
        entry["request_hash"] = cursor.take(16).hex()
    if flags & STREAM_OFFSET:
        (entry["stream_offset"],) = cursor.numbers("Q")
    if flags & BEFORE:
        entry["before"] = cursor.take(cursor.numbers("I")[0]).hex()
    entry["bucket"], entry["key"] = cursor.text(bucket_len), cursor.text(key_len)
    metadata = read_map(cursor.take(metadata_len))
    need(bool(metadata) == bool(metadata_len), "metadata that is an empty map")
    need(all(isinstance(value, str) for value in metadata.values()), "metadata is text")
    entry["metadata"] = metadata or None
    value = cursor.rest()
    need(bool(bucket_len) == has_bucket and (has_key or not key_len), "bucket or key")
    need(name == "append" or not flags & STREAM_OFFSET, "stream_offset only in append")
    need(name != "append" or bool(flags & (STREAM_OFFSET | REFUSED)), "append without its offset")
    need(not (flags & REFUSED and (flags & VALUE_REF or name == "create")), "refused")
    need(name == "copy" or not flags & VALUE_REF, "value_ref only in copy")
    if flags & REFUSED:
        need(len(value) == 2, "the reason's code")
        entry["refused"], value = int.from_bytes(value, "little"), b""
    elif flags & VALUE_REF:
        need(len(value) == 48, "value reference")
        length, of, digest = struct.unpack("<QQ32s", value)
        entry["value_ref"], value = {"length": length, "seq": of, "blake3": digest.hex()}, b""
    elif name in ("delete", "create_bucket", "delete_bucket"):
        need(not value, "a value where there is none")
    entry["value"] = value.hex()
    return entry


def read_image(image: bytes) -> dict[str, Any] | None:
    """What a key had before: None for nothing."""
    if not image:
        return None
    cursor = Cursor(image)
    seq, time_us, metadata_len, form = cursor.numbers("QQHB")
    if form > 1:
        raise Newer(f"before-image of the form {form}")
    need(seq > 0, "a version without a seq")
    metadata = read_map(cursor.take(metadata_len)) or None
    found: dict[str, Any] = {"seq": seq, "time_us": time_us, "metadata": metadata}
    if form:
        found["value_bytes"], digest = *cursor.numbers("Q"), cursor.take(32)
        found |= {"value": None, "blake3": digest.hex()}
        need(not cursor.rest(), "more than a reference")
        return found
    value = cursor.rest()
    return found | {"value": value.hex(), "value_bytes": len(value)}


class Rules:
    """What must hold from frame to frame of one segment."""

    def __init__(self, header: dict[str, Any]) -> None:
        self.header, self.seq, self.time_us = header, header["seq_before"], header["time_before_us"]
        self.first, self.ended, self.group = True, False, 0

    def add(self, entry: dict[str, Any], end: int) -> None:
        kind, seq, group = entry["kind"], entry["seq"], entry.get("group_seq_last", 0)
        refused = "refused" in entry
        need(not self.ended, "a frame after the one that ends the segment")
        need(seq > self.seq and (not self.first or seq == self.header["seq_first"]), "seq")
        need(entry["time_us"] >= self.time_us, "time falls")
        need(not self.group or self.group == group, "a group is interrupted")
        need(not group or (seq <= group and CODES[kind] < 32), "group")
        need((kind == "create") == (self.first and not self.header["seq_before"]), "create is the first")
        need(kind != "fork" or refused or self.first, "a fork begins its segment")
        if not refused and kind in ("create", "fork", "settings"):
            self.check_body(kind, read_map(bytes.fromhex(entry["value"])))
        self.group = group if seq != group else 0
        ends = kind in ("seal", "checkpoint", "settings") and not refused
        self.ended = not self.group and (ends or end >= self.header["segment_bytes"])
        self.seq, self.time_us, self.first = seq, entry["time_us"], False

    def check_body(self, kind: str, body: dict[str, Any]) -> None:
        """The three bodies that the log itself looks into, and the header where they set it."""
        if kind in ("create", "fork"):
            need(body.get("cluster_id") == bytes.fromhex(self.header["cluster_id"]), "cluster id")
        if kind == "create":
            need(isinstance(body.get("salt"), bytes) and len(body["salt"]) == 16, "salt")
            need(isinstance(body.get("settings"), dict), "settings of create")
            for name, value in body["settings"].items():
                check_setting(name, value)
            for name in IN_HEADER:
                wanted = body["settings"].get(name, SETTINGS[name][2])
                need(self.header[name] == wanted, "settings of the header")
        if kind == "fork":
            epoch = body.get("epoch")
            need(type(epoch) is int and epoch == self.header["epoch"], "epoch")
        if kind == "settings":
            for name, value in body.items():
                check_setting(name, value)
                need(name in IN_HEADER, "a setting that never changes")


def block_hashes(body: bytes, size: int) -> list[bytes]:
    return [hash_of(body[at : at + size]) for at in range(0, len(body), size)]


def runs_of(messages: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The messages of a stream, cut wherever an offset is not the next after the one before it."""
    runs: list[list[tuple[int, int]]] = []
    for number, offset in messages:
        if not runs or offset != runs[-1][-1][1] + 1:
            runs.append([])
        runs[-1].append((number, offset))
    return runs


def read_sealed(data: bytes) -> Segment:
    """A sealed segment: every checksum and hash, and a footer that follows from the frames."""
    header = read_header(data)
    need(len(data) >= 128 + 192, "cut off")
    check_front(data[-192:], b"LWEND\r\n\x1a")
    fields = TRAILER.unpack(data[-192:])
    file_bytes, body_bytes, seq_first, seq_last, time_min, time_max = fields[4:10]
    frame_count, key_count, block_count, kind_count, stream_count, stream_bytes = fields[10:16]
    need(file_bytes == len(data) and seq_first == header["seq_first"] and not any(fields[18]), "trailer")
    need(128 < body_bytes <= min(file_bytes - 192, BODY_MAX), "body_bytes")
    padding = -body_bytes % 64
    sizes = (padding, 4 * frame_count, 4 * key_count, 4 * key_count, 32 * block_count, 8 * kind_count)
    need(body_bytes + sum(sizes) + stream_bytes == file_bytes - 192, "the sections do not end at the trailer")
    need(block_count == -(-body_bytes // header["block_bytes"]) and frame_count >= 1, "counts")
    footer = Cursor(data[body_bytes:-192])
    need(hash_of(footer.data) == fields[17], "footer hash")
    need(not any(footer.take(padding)), "padding")
    positions = footer.numbers(f"{frame_count}I")
    key_hashes, key_frames = footer.numbers(f"{key_count}I"), footer.numbers(f"{key_count}I")
    hashes = [footer.take(32) for _ in range(block_count)]
    kinds = [footer.numbers("II") for _ in range(kind_count)]
    need(hash_of(b"".join(hashes)) == fields[16], "segment hash")
    need(hashes == block_hashes(data[:body_bytes], header["block_bytes"]), "block hash")

    rules, entries, at = Rules(header), [], 128
    for number in range(frame_count):
        need(positions[number] == at and at + 41 <= body_bytes, "position")
        entry, at = read_frame(data, at, body_bytes)
        rules.add(entry, at)
        entries.append(entry)
    need(at == body_bytes and rules.ended, "the segment does not end here")
    need(rules.seq == seq_last and rules.time_us == time_max, "last seq or time")
    need(entries[0]["time_us"] == time_min, "first time")

    keys, counts = [], dict.fromkeys(CODES.values(), 0)
    streams: dict[bytes, list[tuple[int, int]]] = {}
    for number, entry in enumerate(entries):
        counts[CODES[entry["kind"]]] += 1
        if "refused" in entry or not entry["bucket"]:
            continue
        if entry["kind"] == "append":
            streams.setdefault(entry["bucket"].encode(), []).append((number, entry["stream_offset"]))
        else:
            keys.append((zlib.crc32((entry["bucket"] + entry["key"]).encode()), number))
    need(sorted(keys) == list(zip(key_hashes, key_frames, strict=True)), "key index")
    need([count for count in counts.items() if count[1]] == kinds, "kind counts")
    runs = [(name, run) for name in sorted(streams) for run in runs_of(streams[name])]
    need(len(runs) == stream_count, "stream count")
    for name, run in runs:
        name_len, offset, count = footer.numbers("HQI")
        need(footer.take(name_len) == name, "stream's name")
        found = [(number, offset + n) for n, number in enumerate(footer.numbers(f"{count}I"))]
        need(found == run, "stream's messages")
    need(not footer.rest(), "streams")
    return Segment(header, entries, fields[16])


def read_frame(data: bytes, at: int, limit: int) -> tuple[dict[str, Any], int]:
    """The frame that begins here, and where it ends."""
    seq, length, checksum = HEAD.unpack_from(data, at)
    end = at + 16 + length
    need(25 <= length <= PAYLOAD_MAX and end <= limit, "length of a frame")
    need(zlib.crc32(data[at + 16 : end], zlib.crc32(data[at : at + 12])) == checksum, "checksum of a frame")
    return read_payload(seq, data[at + 16 : end]), end


def good_frame(data: bytes, at: int) -> bool:
    """Whether a whole frame begins here whose checksum matches."""
    if at + 41 > len(data):
        return False
    seq, length, checksum = HEAD.unpack_from(data, at)
    end = at + 16 + length
    if not seq or not 25 <= length <= PAYLOAD_MAX or end > len(data):
        return False
    return bool(zlib.crc32(data[at + 16 : end], zlib.crc32(data[at : at + 12])) == checksum)


def read_unsealed(data: bytes, *, sealing: bool = False) -> Segment:
    """`current.log` or a sealing file, as far as it goes."""
    segment = Segment(read_header(data))
    rules, at, open_group = Rules(segment.header), 128, 0
    while good_frame(data, at) and not (sealing and rules.ended):
        entry, at = read_frame(data, at, len(data))
        rules.add(entry, at)
        segment.entries.append(entry)
        open_group = open_group + 1 if rules.group else 0
    if data[at:].strip(b"\0"):
        segment.rest = "torn"
    elif open_group:
        segment.rest = "group"
    if open_group:
        del segment.entries[-open_group:]
    if rules.ended:
        segment.segment_hash = hash_of(b"".join(block_hashes(data[:at], segment.header["block_bytes"])))
    return segment


def read_current(data: bytes) -> Segment | None:
    """`current.log` as part of its directory. None where it holds nothing yet."""
    try:
        read_header(data)
    except (NotASegment, Corrupt):
        need(not any(data[:128]) or not good_frame(data, 128), "frames without a header")
        if not HEADER_MAGIC.startswith(data[:8].rstrip(b"\0")):
            raise NotASegment("somebody else's") from None
        return None
    segment = read_unsealed(data)
    return segment if segment.entries else None


def read_hint(data: bytes) -> dict[str, Any]:
    """The hint. Whoever reads a log goes on without one that is corrupt."""
    need(data[:8] == b"LWHINT\r\n" and len(data) > 12, "magic of the hint")
    need(zlib.crc32(data[12:]) == int.from_bytes(data[8:12], "little"), "checksum of the hint")
    try:
        fields = cbor2.loads(data[12:])
    except (cbor2.CBORDecodeError, ValueError, TypeError, RecursionError) as error:
        raise Corrupt("not CBOR") from error
    need(isinstance(fields, list) and len(fields) == 4, "not four fields")
    need(all(type(number) is int and 0 <= number < 2**64 for number in fields[:3]), "numbers of the hint")
    need(fields[3] in ("fsync", "fdatasync", "none"), "sync mode")
    names = ("segment_seq_first", "durable_bytes", "durable_seq", "sync_mode")
    return dict(zip(names, fields, strict=True))


def begins_as_segment(data: bytes) -> bool:
    """Whether the first block of a compressed file decompresses to the beginning of a segment."""
    try:
        return (
            zstandard.ZstdDecompressor(max_window_size=WINDOW_MAX).stream_reader(data).read(8) == HEADER_MAGIC
        )
    except zstandard.ZstdError:
        return False


def decompress(data: bytes) -> bytes:
    """The raw segment of a compressed one."""
    if data[:4] != ZSTD_MAGIC:
        raise NotASegment("not compressed")
    ends = data[-49:] if len(data) >= 8 + 17 + 40 else bytes(49)
    count, descriptor, table_magic, magic, length, digest = struct.unpack("<IBIII32s", ends)
    if (table_magic, magic, length) != (0x8F92EAB1, 0x184D2A50, 32):
        need(not begins_as_segment(data), "the end of a compressed segment")
        raise NotASegment("something else that is compressed")
    if descriptor:
        raise Newer(f"table descriptor {descriptor}")
    table_at = len(data) - 49 - 8 * count - 8
    need(count >= 1 and table_at > 0, "table")
    need(struct.unpack_from("<II", data, table_at) == (0x184D2A5E, 8 * count + 9), "table head")
    sizes = list(struct.iter_unpack("<II", data[table_at + 8 : -49]))
    need(sum(stored for stored, _ in sizes) == table_at, "the blocks do not end at the table")
    full = sizes[0][1]
    need(all(raw == full for _, raw in sizes[:-1]) and 0 < sizes[-1][1] <= full <= 16 << 20, "raw sizes")
    need(all(stored <= raw + raw // 128 + 512 for stored, raw in sizes), "stored sizes")
    need(hash_of(data[:-40]) == digest, "stored hash")
    parts, at = [], 0
    for stored, raw in sizes:
        block, at = data[at : at + stored], at + stored
        need(block[:4] == ZSTD_MAGIC, "not a Zstandard frame")
        try:
            frame = zstandard.get_frame_parameters(block)
            need((frame.content_size, frame.dict_id) == (raw, 0), "content size or dictionary")
            need(frame.window_size <= WINDOW_MAX, "window")
            reader = zstandard.ZstdDecompressor(max_window_size=WINDOW_MAX).decompressobj()
            parts.append(reader.decompress(block))
        except zstandard.ZstdError as error:
            raise Corrupt("Zstandard") from error
        need(reader.eof and not reader.unused_data and len(parts[-1]) == raw, "not one frame")
    block_bytes = read_header(parts[0])["block_bytes"]
    need(full == block_bytes or (count == 1 and full < block_bytes), "block_bytes")
    return b"".join(parts)


NAME = re.compile(r"(?:(segment|sealing)-(\d{20})-(\d{20})\.log(\.zst)?|current\.log)")


def read_file(path: Path) -> Segment:
    """Whatever its name says that it is, on its own."""
    name = NAME.fullmatch(path.name)
    assert name is not None
    data = path.read_bytes()
    if name[1] == "segment":
        segment = read_sealed(decompress(data) if name[4] else data)
    else:
        segment = read_unsealed(data, sealing=name[1] == "sealing")
    if name[1]:
        need(segment.segment_hash is not None, "not complete")
        seqs = segment.entries[0]["seq"], segment.entries[-1]["seq"]
        need(seqs == (int(name[2]), int(name[3])), "not the seqs of the name")
    return segment


def read_directory(directory: Path) -> list[Segment]:
    """All segments of a directory, in order, each of them the next after the one before it."""
    paths = [path for path in directory.iterdir() if NAME.fullmatch(path.name)]
    paths.sort(key=lambda path: (path.name == "current.log", path.name.partition("-")[2]))
    segments = [read_file(path) for path in paths if path.name != "current.log"]
    current = directory / "current.log"
    if current in paths and (segment := read_current(current.read_bytes())) is not None:
        segments.append(segment)
    for before, after in pairwise(segments):
        last, header = before.entries[-1], after.header
        link = (last["seq"], last["time_us"], before.segment_hash)
        hash_before = bytes.fromhex(header["hash_before"])
        need(link == (header["seq_before"], header["time_before_us"], hash_before), "the chain")
        changed = last["kind"] == "settings" and "refused" not in last
        now = {name: before.header[name] for name in IN_HEADER}
        now |= read_map(bytes.fromhex(last["value"])) if changed else {}
        need(now.items() <= header.items(), "settings of the header")
        first = after.entries[0]
        if first["kind"] == "fork" and "refused" not in first:
            need(header["epoch"] > before.header["epoch"], "the epoch does not rise")
        else:
            same = all(header[name] == before.header[name] for name in ("cluster_id", "epoch"))
            need(same, "another owner without a fork")
    return segments


# Here the tests begin.

FILES = sorted(path for path in GOLDEN.glob("*/*") if path.name.endswith((".log", ".log.zst")))
DIRECTORIES = sorted(path for path in GOLDEN.iterdir() if path.is_dir() and path.name != "__pycache__")
HINTS = sorted(GOLDEN.glob("*/hint"))
SAMPLE = GOLDEN / "optional-groups" / "segment-00000000000000000001-00000000000000000023.log"
CURRENT = GOLDEN / "current" / "current.log"
EXAMPLE = "segment-00000000000000000001-00000000000000000003.log"
PUT, NOOP, CHECKPOINT = CODES["put"], CODES["noop"], CODES["checkpoint"]
IN_GROUP_6 = b"\6" + bytes(7)


def expected(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.with_name(path.name + ".json").read_bytes())
    return found


def regions(data: bytes | bytearray) -> dict[str, range]:
    """Where each part of a sealed segment lies."""
    fields = TRAILER.unpack(data[-192:])
    frames, keys, blocks, kinds, _, streams = fields[10:16]
    names = ["header", "frames", "padding", "positions", "key_hashes", "key_frames", "block_hashes", "kinds"]
    sizes = [128, fields[5] - 128, -fields[5] % 64, 4 * frames, 4 * keys, 4 * keys, 32 * blocks, 8 * kinds]
    found, at = {}, 0
    for name, size in zip([*names, "streams", "trailer"], [*sizes, streams, 192], strict=True):
        found[name] = range(at, at := at + size)
    assert at == len(data)
    return found


def signed_again(data: bytearray) -> bytes:
    """With hashes of footer and block hashes, and a checksum of the trailer, that are right once more."""
    places = regions(data)
    hashes = places["block_hashes"]
    end = len(data) - 192
    data[end + 88 : end + 120] = hash_of(bytes(data[hashes.start : hashes.stop]))
    data[end + 120 : end + 152] = hash_of(bytes(data[places["header"].stop + len(places["frames"]) : end]))
    data[-4:] = zlib.crc32(data[end:-4]).to_bytes(4, "little")
    return bytes(data)


def frame(
    seq: int, code: int, rest: bytes = b"", *, flags: int = 0, key: int = 1, later_us: int = 0
) -> bytes:
    """One frame; `rest` is what follows the fixed part: in a `put` the bucket "photos" and a key."""
    lengths = (6, key) if code == PUT else (0, 0)
    payload = FIXED.pack(code, flags, *lengths, 0, 1700000000000004 + later_us, 0) + rest
    head = struct.pack("<QI", seq, len(payload))
    return head + zlib.crc32(head + payload).to_bytes(4, "little") + payload


def current_with(*frames: bytes) -> bytes:
    """The golden `current.log`, which ends with seq 4, and more frames."""
    return CURRENT.read_bytes().rstrip(b"\0") + b"".join(frames) + bytes(500)


def test_the_golden_files_are_there() -> None:
    """Each directory has at least one file, and each file what must come out of it."""
    assert len(FILES) >= len(DIRECTORIES) - len(HINTS) > 0
    assert {path.parent for path in FILES + HINTS} == set(DIRECTORIES)
    assert all(path.with_name(path.name + ".json").is_file() for path in FILES + HINTS)


@pytest.mark.parametrize("path", FILES, ids=[f"{path.parent.name}/{path.name}" for path in FILES])
def test_a_golden_file_gives_what_stands_beside_it(path: Path) -> None:
    """Exactly its entries, or the error that it must be refused with."""
    want = expected(path)
    if "error" in want:
        with pytest.raises(Refused) as refused:
            read_file(path)
        assert refused.value.kind == want["error"]
        assert refused.type is not Newer or str(refused.value) == want["why"]
        return
    segment = read_file(path)
    found: dict[str, Any] = {"header": segment.header, "entries": segment.entries}
    if segment.header["before_images"]:
        images = {entry["seq"]: entry["before"] for entry in segment.entries if "before" in entry}
        found["images"] = {str(seq): read_image(bytes.fromhex(image)) for seq, image in images.items()}
    else:
        want["header"]["before_images"] = 0
    if path.name.startswith("segment-"):
        assert segment.segment_hash is not None
        found["segment_hash"] = segment.segment_hash.hex()
    assert found == want


@pytest.mark.parametrize("path", HINTS, ids=[path.parent.name for path in HINTS])
def test_a_golden_hint_gives_what_stands_beside_it(path: Path) -> None:
    """Its four fields, or that it is damaged."""
    want = expected(path)
    if "error" in want:
        with pytest.raises(Corrupt):
            read_hint(path.read_bytes())
    else:
        assert {"hint": read_hint(path.read_bytes())} == want


def test_every_flipped_or_missing_byte_of_a_hint_is_noticed() -> None:
    """A position that is wrong would be worse than none."""
    data = (GOLDEN / "hint" / "hint").read_bytes()
    for at in range(len(data)):
        for changed in (data[:at], data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]):
            with pytest.raises(Corrupt):
                read_hint(changed)


FOLDERS = [directory for directory in DIRECTORIES if not (directory / "hint").exists()]


@pytest.mark.parametrize("directory", FOLDERS, ids=[path.name for path in FOLDERS])
def test_the_segments_of_a_directory_are_one_chain(directory: Path) -> None:
    """Where no file must be refused, each segment follows the one before it."""
    wanted = [want for path in FILES if path.parent == directory for want in [expected(path)]]
    if any("error" in want and not want.get("holds_nothing") for want in wanted):
        with pytest.raises(Refused):
            read_directory(directory)
    else:
        entries = [want["entries"] for want in wanted if want.get("entries")]
        assert [segment.entries for segment in read_directory(directory)] == entries


def test_the_golden_streams_have_several_ranges() -> None:
    """A reader that takes the first range for all of the stream would answer with another message."""
    (path,) = (GOLDEN / "stream-gaps").glob("*.log")
    data = path.read_bytes()
    at, found = regions(data)["streams"].start, []
    while at < len(data) - 192:
        name_len, offset, count = struct.unpack_from("<HQI", data, at)
        found.append((data[at + 14 : at + 14 + name_len].decode(), offset, count))
        at += 14 + name_len + 4 * count
    last = 2**64 - 1
    assert found == [("a", 0, 2), ("ab", 2**40, 1), ("b", 5, 2), ("b", 9, 1), ("b", 2, 2), ("c", last, 1)]


def test_a_missing_segment_breaks_the_chain(tmp_path: Path) -> None:
    """Older segments may be elsewhere, but nothing between two that are there."""
    names = sorted(path.name for path in FILES if path.parent.name == "chain")
    for name in names:
        shutil.copy(GOLDEN / "chain" / name, tmp_path)
    (tmp_path / names[0]).unlink()
    assert len(read_directory(tmp_path)) == len(names) - 1
    shutil.copy(GOLDEN / "chain" / names[0], tmp_path)
    (tmp_path / names[1]).unlink()
    with pytest.raises(Corrupt, match="the chain"):
        read_directory(tmp_path)


@pytest.mark.parametrize("region", regions(SAMPLE.read_bytes()))
def test_a_flipped_byte_is_noticed_wherever_it_is(region: str) -> None:
    """Every single byte of every part of a segment, and which of the three errors it is."""
    data = SAMPLE.read_bytes()
    places = regions(data)
    assert len(places[region]) > 0
    for at in places[region]:
        error: type[Refused] = Corrupt
        if region in ("header", "trailer"):
            offset = at - places[region].start
            error = Newer if 8 <= offset < 12 else Corrupt
            if offset < 8:
                error = NotASegment if region == "header" else Corrupt
        with pytest.raises(error):
            read_sealed(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])


@pytest.mark.parametrize("region", list(regions(SAMPLE.read_bytes()))[2:-1])
def test_a_footer_that_is_not_that_of_the_frames_is_noticed(region: str) -> None:
    """Also where every hash and checksum over it is right: it follows from the frames alone."""
    data = SAMPLE.read_bytes()
    for at in regions(data)[region]:
        changed = bytearray(data)
        changed[at] ^= 1
        with pytest.raises(Corrupt):
            read_sealed(signed_again(changed))
    assert read_sealed(signed_again(bytearray(data))).entries == expected(SAMPLE)["entries"]


def test_a_segment_that_was_cut_off_or_added_to_is_noticed() -> None:
    """At whatever length."""
    data = SAMPLE.read_bytes()
    for size in range(len(data)):
        with pytest.raises(NotASegment if size < 8 else Corrupt):
            read_sealed(data[:size])
    for changed in (data + b"\0", data + bytes(192), data[:-192] + bytes(8) + data[-192:]):
        with pytest.raises(Corrupt):
            read_sealed(changed)


def test_a_flipped_byte_of_a_compressed_segment_is_noticed() -> None:
    """Every byte of blocks, table and stored hash, and of the table also under a hash that is right."""
    (path,) = (GOLDEN / "compressed").glob("*.zst")
    data = path.read_bytes()
    raw = decompress(data)
    assert raw == zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
    for at in range(len(data)):
        error = NotASegment if at < 4 else Newer if at == len(data) - 45 else Corrupt
        with pytest.raises(error):
            decompress(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
    table = 8 + 8 * int.from_bytes(data[-49:-45], "little") + 9
    for at in range(len(data) - 40 - table, len(data) - 40):
        changed = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 : -40]
        with pytest.raises(Newer if at == len(data) - 45 else Corrupt):
            decompress(changed + data[-40:-32] + hash_of(changed))


@pytest.mark.parametrize(("name", "rest"), [("", "zeros"), ("-torn", "torn"), ("-half-group", "group")])
def test_an_unsealed_segment_says_what_follows_its_last_frame(name: str, rest: str) -> None:
    """A reader takes what came before, and says so."""
    segment = read_unsealed((GOLDEN / f"current{name}" / "current.log").read_bytes())
    assert segment.rest == rest


@pytest.mark.parametrize(
    ("frames", "error"),
    [
        ([frame(5, PUT, b"photosk", later_us=-1)], Corrupt),
        ([frame(5, PUT, IN_GROUP_6 + b"photosk", flags=GROUP), frame(6, NOOP)], Corrupt),
        ([frame(5, NOOP, IN_GROUP_6, flags=GROUP)], Corrupt),
        ([frame(5, CODES["create"])], Corrupt),
        ([frame(5, CODES["fork"])], Corrupt),
        ([frame(5, CHECKPOINT), frame(6, NOOP)], Corrupt),
        ([frame(5, PUT, b"photosk", key=2)], Corrupt),
        ([frame(5, PUT, b"photosk\1\0", flags=REFUSED | VALUE_REF)], Corrupt),
        ([frame(5, PUT, b"photos\xff")], Corrupt),
        ([frame(5, CODES["settings"], b"\xff")], Corrupt),
        ([frame(5, CODES["settings"], cbor2.dumps({"segment_bytes": 1}))], Corrupt),
        ([frame(5, CODES["settings"], cbor2.dumps({"page_keys": 64}))], Corrupt),
        ([frame(5, CODES["settings"], cbor2.dumps({"compression": -1}))], Corrupt),
        ([frame(5, CODES["settings"], cbor2.dumps({"compression": True}))], Corrupt),
        ([frame(4, NOOP)], Corrupt),
        ([frame(5, 0)], Newer),
        ([frame(5, CODES["settings"], cbor2.dumps({"compression": 2}))], Newer),
        ([frame(5, CODES["settings"], cbor2.dumps({"colour": 1}))], Newer),
        ([frame(5, 46)], Newer),
        ([frame(5, NOOP, flags=1 << 10)], Newer),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_good_checksum_over_what_must_not_be_is_no_end(frames: list[bytes], error: type[Refused]) -> None:
    """It is newer where it is unknown, and else corrupt."""
    with pytest.raises(error):
        read_unsealed(current_with(*frames))


NO_MAGIC = b"\0" + CURRENT.read_bytes()[1:]
BAD_CHECKSUM = CURRENT.read_bytes()[:127] + b"\0" + CURRENT.read_bytes()[128:]


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", None),
        (bytes(4096), None),
        (HEADER_MAGIC[:3] + bytes(500), None),
        (CURRENT.read_bytes()[:100], None),
        (BAD_CHECKSUM[:128] + bytes(500), None),
        (bytes(128) + CURRENT.read_bytes()[128:], None),
        (CURRENT.read_bytes()[:150], None),
        (NO_MAGIC, Corrupt),
        (BAD_CHECKSUM, Corrupt),
        (b"somebody else's" + bytes(500), NotASegment),
        ((GOLDEN / "future-minor" / EXAMPLE).read_bytes(), Newer),
    ],
    ids=range(11),
)
def test_a_current_log_without_a_good_header_holds_nothing_or_is_refused(
    data: bytes, error: type[Refused] | None
) -> None:
    """A crash leaves zeros or a beginning; anything else is damage, or somebody else's file."""
    if error is None:
        assert read_current(data) is None
    else:
        with pytest.raises(error):
            read_current(data)


def test_what_follows_the_end_of_a_sealing_file_is_ignored() -> None:
    """Half a footer, or anything else; but the frame that ends the segment must be there."""
    (path,) = (GOLDEN / "sealing").glob("*.log")
    data = path.read_bytes().rstrip(b"\0")
    entries = expected(path)["entries"]
    for more in (b"", bytes(99), b"rubbish", frame(99, NOOP)):
        assert read_unsealed(data + more, sealing=True).entries == entries
    assert read_unsealed(data[:-1], sealing=True).segment_hash is None


def test_a_version_below_the_first_never_was() -> None:
    """Also where the checksum over it is right."""
    for version in ((0, 0), (0, 65535)):
        head = bytearray(SAMPLE.read_bytes()[:124])
        struct.pack_into("<HH", head, 8, *version)
        with pytest.raises(Corrupt, match="version"):
            read_header(head + zlib.crc32(head).to_bytes(4, "little"))


def test_what_is_compressed_and_no_segment_is_told_from_a_damaged_one() -> None:
    """By what its first block begins with."""
    (path,) = (GOLDEN / "compressed-one-block").glob("*.zst")
    with pytest.raises(Corrupt):
        decompress(path.read_bytes()[:-1])
    with pytest.raises(NotASegment):
        decompress(zstandard.ZstdCompressor().compress(b"a text"))
    with pytest.raises(NotASegment):
        decompress(SAMPLE.read_bytes())


def test_a_file_must_hold_the_seqs_of_its_name(tmp_path: Path) -> None:
    """In a directory the order of the names is that of the log."""
    (path,) = (GOLDEN / "minimal").glob("*.log")
    shutil.copy(path, tmp_path / path.name.replace("3.log", "4.log"))
    with pytest.raises(Corrupt, match="name"):
        read_directory(tmp_path)


def test_two_files_of_the_same_seqs_break_the_chain(tmp_path: Path) -> None:
    """One becomes the other by a rename, so no crash leaves both."""
    for case in ("minimal", "sealing"):
        (path,) = (GOLDEN / case).glob("*.log")
        shutil.copy(path, tmp_path)
    with pytest.raises(Corrupt, match="the chain"):
        read_directory(tmp_path)


def test_frames_that_keep_the_rules_are_read() -> None:
    """Holes, the same time again, and a refused entry that ends nothing."""
    refused = frame(9, CHECKPOINT, b"\1\0", flags=REFUSED)
    more = current_with(frame(7, PUT, b"photosk"), refused, frame(10, CHECKPOINT))
    segment = read_unsealed(more)
    assert [entry["seq"] for entry in segment.entries] == [1, 2, 3, 4, 7, 9, 10]
    assert segment.segment_hash is not None


def test_this_reader_imports_nothing_of_the_package() -> None:
    """Nor anything else that is not the standard library or one of four libraries."""
    found = set()
    for node in ast.walk(ast.parse(Path(__file__).read_bytes())):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert node.level == 0
            found.add(node.module.partition(".")[0])
    assert found - sys.stdlib_module_names == {"blake3", "cbor2", "pytest", "zstandard"}
