"""Writes the golden files: small segments of every kind, and beside each what a reader must make of it.

Always true:
  - what stands in a .json file is what was asked for, never what a reader of ours made of the bytes;
  - nothing here asks for time or chance, so running it again changes no file. The one exception is compressed
    files, whose bytes belong to the version of zstd that made them: those are kept while they decompress to
    the right bytes.

Run it as `python tests/golden/make.py` after a deliberate change of the format, and look at the difference:
whoever has files of the released format has these. It also writes the worked example into docs/FORMAT.md.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import cbor2
import zstandard
from blake3 import blake3

from lowwater.engine.format import format
from lowwater.engine.format.format import Extras, Kind, SegmentHeader, SegmentTrailer, ValueRef
from lowwater.engine.log.chain import create_entry
from lowwater.engine.log.compress import compress_segment
from lowwater.engine.log.directory import Hint
from lowwater.engine.log.footer import footer_steps
from lowwater.engine.log.log import Log, LogOptions, Seams
from lowwater.engine.seams.memory import MemoryFiles
from lowwater.engine.seams.seams import Step

HERE = Path(__file__).parent
FORMAT_MD = HERE.parent.parent / "docs" / "FORMAT.md"
EXAMPLE_CASE = "minimal"

CLUSTER_ID = bytes(range(0x10, 0x20))
SALT = bytes(range(0x80, 0x90))
TIME_US = 1_700_000_000_000_000
SEQ_MAX = format.SEQ_MAX

Spec = dict[str, Any]


# ---------------------------------------------------------------------------- what is written


class _Clock:
    def now_us(self) -> int:
        return TIME_US

    def monotonic(self) -> float:
        return 0.0


class _Randomness:
    def token(self, size: int) -> bytes:
        raise AssertionError("nothing in a golden file is left to chance")


class _Task:
    def wake(self) -> None:
        pass

    def stop(self) -> None:
        pass


class _Runner:
    """Nothing runs in the background: appending and closing do it all."""

    def start(self, name: str, step: Step) -> _Task:
        return _Task()

    def apart(self, call: Any) -> Any:
        return call()

    def start_call(self, name: str, call: Any) -> None:
        call()


def put(seq: int, key: str, value: bytes, *, bucket: str = "photos", **more: Any) -> Spec:
    return entry(seq, "put", bucket=bucket, key=key, value=value, **more)


def entry(
    seq: int, kind: str, *, body: dict[str, Any] | None = None, value: bytes = b"", **more: Any
) -> Spec:
    """What a reader must find, as it stands in the .json file."""
    if body is not None:
        value = cbor2.dumps(body, canonical=True)
    spec = {
        "seq": seq,
        "kind": kind,
        "bucket": "",
        "key": "",
        "metadata": None,
        "value": value,
        "time_us": TIME_US + seq % 1000,
        "origin": 0,
    }
    return spec | more


def seal(seq: int, seq_first: int) -> Spec:
    return entry(seq, "seal", body={"seq_first": seq_first})


def create(**settings: int) -> Spec:
    body = {"cluster_id": CLUSTER_ID, "salt": SALT, "settings": settings}
    return entry(1, "create", body=body, time_us=TIME_US)


def encode(spec: Spec) -> bytes:
    """The payload. `given_time_us` is for entries whose time the log has to raise."""
    extras = {name: spec[name] for name in Extras._fields if name in spec}
    if "value_ref" in extras:
        extras["value_ref"] = ValueRef(**extras["value_ref"])
    return format.encode_payload(
        format.KIND_CODES[spec["kind"]],
        spec["bucket"].encode(),
        spec["key"].encode(),
        format.encode_metadata(spec["metadata"]),
        spec["value"],
        time_us=spec["given_time_us"] if "given_time_us" in spec else spec["time_us"],
        origin=spec["origin"],
        extras=Extras(**extras) if extras else format.NO_EXTRAS,
    )


def write_log(specs: Sequence[Spec]) -> dict[str, bytes]:
    """The files of a log that holds these entries; the first is `create`."""
    files = MemoryFiles()
    files.preallocate = True  # as on a disk: current.log has zeros after its frames
    seams = Seams(files=files, clock=_Clock(), randomness=_Randomness(), runner=_Runner(), owner="golden")
    settings = cbor2.loads(specs[0]["value"])["settings"]
    with Log.open(
        "log", options=LogOptions(), seams=seams, create=create_entry(CLUSTER_ID, SALT, settings)
    ) as log:
        run: list[Spec] = []
        for spec in specs[1:]:
            run.append(spec)
            # A group is appended whole.
            if spec.get("group_seq_last", spec["seq"]) == spec["seq"]:
                log.append_payloads([encode(one) for one in run], seqs=[one["seq"] for one in run])
                run = []
    return {name: read_whole(files, f"log/{name}") for name in files.list("log") if name.endswith(".log")}


def read_whole(files: MemoryFiles, path: str) -> bytes:
    file = files.open(path)
    return file.read_at(0, file.size())


def file_of(data: bytes) -> Any:
    file = MemoryFiles().open("segment", create=True)
    file.write_at(0, [data])
    return file


# ---------------------------------------------------------------------------- the cases


def minimal() -> list[Spec]:
    return [create(), put(2, "cat.jpg", b"meow", metadata={"type": "image/jpeg"}), seal(3, 1)]


def kinds() -> list[Spec]:
    """Every kind. `fork` begins a segment; `seal`, `settings` and `checkpoint` end theirs."""
    topic: Spec = {"bucket": "clicks", "key": "user-7", "value": b"message", "stream_offset": 0}
    names = ["horizon", "pin", "unpin", "prune", "noop", "segment_shipped", "checkpoint_shipped", "compacted"]
    return [
        create(),
        entry(2, "create_bucket", bucket="photos"),
        put(3, "a", b"1"),
        entry(4, "copy", bucket="photos", key="b", value=b"1", request_hash=bytes(range(16))),
        entry(5, "delete", bucket="photos", key="a"),
        entry(6, "append", **topic),
        entry(7, "begin", body={"about": "begin"}),
        put(8, "c", b"3", txn=7, txn_seq_before=7),
        entry(9, "commit", txn=7, txn_seq_before=8),
        entry(10, "begin"),
        entry(11, "abort", txn=10, txn_seq_before=10),
        *(entry(12 + at, name, body={"about": name}) for at, name in enumerate(names)),
        entry(20, "released", body={}),
        entry(21, "delete_bucket", bucket="empty"),
        seal(22, 1),
        entry(23, "fork", body={"cluster_id": CLUSTER_ID, "epoch": 2, "parent_epoch": 1, "seq": 22}),
        entry(24, "settings", body={"segment_bytes": 1_000_000, "block_bytes": 65536, "compression": 0}),
        entry(25, "checkpoint", body={"before": 0}),
    ]


def sessions() -> list[Spec]:
    """Their kinds, and requests: one that is the only one, one that repeats it, and a group."""
    sixteen = bytes(range(0xA0, 0xB0))
    return [
        create(),
        entry(2, "create_bucket", bucket="photos"),
        entry(3, "session_open", body={"ttl_us": 3_600_000_000}),
        put(4, "a", b"once", session=3, request=1),
        put(5, "a", b"", session=3, request=1, refused=21, request_hash=sixteen),
        put(6, "b", b"1", group_seq_last=7),
        put(7, "c", b"2", group_seq_last=7, session=3, request=3 | 2 << 48),
        entry(8, "session_keep", body={"session": 3}),
        entry(9, "noop", session=3, request=4),
        entry(10, "session_close", body={"session": 3, "seq": 9}),
        seal(11, 1),
    ]


def optional_groups() -> list[Spec]:
    """Every optional group and flag: each alone, neighbours together, and all that can be together."""
    sixteen = bytes(range(0xA0, 0xB0))
    value_ref = {"length": 5_000_000, "seq": 4, "blake3": bytes(range(32))}
    return [
        create(),
        entry(2, "create_bucket", bucket="photos", session=2**63 + 1, request=1),
        put(3, "before-empty", b"new", before=b""),
        put(4, "before", b"new", before=b"what was there \x00\xff"),
        entry(5, "copy", bucket="photos", key="large", value_ref=value_ref, request_hash=sixteen),
        put(6, "refused", b"", refused=7, request_hash=sixteen),
        entry(7, "delete", bucket="photos", key="refused", refused=65535, session=9, request=SEQ_MAX),
        entry(8, "begin", body={"about": "begin"}, session=9, request=2),
        put(9, "in-txn", b"1", txn=8, txn_seq_before=8),
        put(10, "in-txn", b"2", txn=8, txn_seq_before=9, before=b"1", session=9, request=3),
        entry(11, "commit", txn=8, txn_seq_before=10),
        put(12, "group-1", b"one", group_seq_last=15),
        put(13, "group-2", b"two", group_seq_last=15, metadata={"a": "b"}),
        entry(15, "delete", bucket="photos", key="group-3", group_seq_last=15, request_hash=sixteen),
        entry(16, "append", bucket="clicks", key="", value=b"c0", stream_offset=100),
        entry(17, "append", bucket="orders", key="k", value=b"o0", stream_offset=0),
        entry(18, "append", bucket="clicks", key="k", value=b"", stream_offset=101, session=1, request=1),
        entry(19, "append", bucket="clicks", key="", value=b"", refused=3),
        entry(20, "append", bucket="orders", key="", value=b"o1", stream_offset=1, group_seq_last=21),
        entry(21, "append", bucket="clicks", key="", value=b"c2", stream_offset=102, group_seq_last=21),
        put(
            22,
            "all",
            b"everything",
            metadata={"m": "n"},
            origin=77,
            txn=8,
            txn_seq_before=10,
            group_seq_last=22,
            session=1,
            request=2,
            request_hash=sixteen,
            before=b"image",
        ),
        seal(23, 1),
    ]


def unicode_names() -> list[Spec]:
    keys = [
        "Grüße.txt",
        "日本語/東京.png",
        "emoji 🦉🏔️",
        "\x00 starts with NUL",
        "line\r\nbreak\ttab",
        "עברית",
        "e\u0301 combines",
        "é is composed",
        "\U0010ffff",
        "\ufeffmark",
        " ",
        "/",
        "x" * 1024,
        "€" * 341,
    ]
    puts = [put(2 + at, key, key.encode()[:40], bucket="b" * (1 + at)) for at, key in enumerate(keys)]
    return [create(), *puts, put(50, "k", b"v", bucket="é" * 127 + "b"), seal(51, 1)]


def metadata() -> list[Spec]:
    """Names that sort by the length of their encoding, and texts that need every length prefix."""
    maps: list[dict[str, str]] = [
        {"b": "1", "a": "2", "aa": "3", "": "4", "B": "5", "é": "6"},
        {"long": "x" * 23, "longer": "y" * 24, "longest": "z" * 256},
        {f"name-{number:03}": str(number) for number in range(30)},
        {"n" * 300: "", "content-type": "text/plain; charset=utf-8", "日本": "🦉"},
    ]
    return [
        create(),
        *(put(2 + at, f"key-{at}", b"value", metadata=one) for at, one in enumerate(maps)),
        entry(6, "copy", bucket="photos", key="copy", value=b"v", metadata={"a": "b"}),
        seal(7, 1),
    ]


def holes() -> list[Spec]:
    """Seqs with holes, an origin, and times that the log had to raise."""
    return [
        create(),
        put(10, "a", b"1", origin=1),
        put(11, "b", b"2", time_us=TIME_US + 5000, origin=2**63),
        put(1000, "c", b"3", time_us=TIME_US + 5000, given_time_us=TIME_US + 4000, origin=SEQ_MAX),
        put(1001, "d", b"4", time_us=TIME_US + 5000, given_time_us=0),
        put(2**40, "e", b"5", time_us=TIME_US + 6000),
        seal(2**40 + 7, 1) | {"time_us": TIME_US + 6000},
    ]


def big_seqs() -> list[Spec]:
    """Numbers too large for a signed 64-bit number or a double, and the last seq that there is."""
    return [
        create(),
        seal(2**53 + 1, 1),
        put(2**63 - 1, "a", b"1", time_us=TIME_US + 1000),
        put(2**63, "b", b"2", time_us=TIME_US + 1000),
        put(SEQ_MAX - 1, "c", b"3", time_us=TIME_US + 2000, txn=SEQ_MAX - 2, txn_seq_before=2**63),
        seal(SEQ_MAX, 2**63 - 1) | {"time_us": TIME_US + 3000},
    ]


def chain_of_three() -> list[Spec]:
    """Cut at the smallest size that there is; `settings` in the second changes how the third is cut."""

    def puts(seq_first: int, count: int) -> Iterator[Spec]:
        return (
            put(seq, f"key-{seq:04}", bytes([seq % 256]) * 150) for seq in range(seq_first, seq_first + count)
        )

    changes = {"block_bytes": 2048, "segment_bytes": 8192}
    return [create(segment_bytes=4096), *puts(2, 24), entry(26, "settings", body=changes), *puts(27, 40)]


def many_blocks() -> list[Spec]:
    """Blocks of 1 KiB: frames that cross several of them, and lengths of every kind."""
    sizes = [0, 1, 2, 3, 500, 1024, 2500, 7, *range(100, 120), 4096]
    puts = [
        put(2 + at, f"k{at % 7}", bytes(range(256)) * 20, bucket=f"b{at % 3}") for at, _ in enumerate(sizes)
    ]
    for spec, size in zip(puts, sizes, strict=True):
        spec["value"] = spec["value"][:size]
    return [create(block_bytes=1024), *puts, seal(100, 1)]


def empty_values() -> list[Spec]:
    return [
        create(),
        put(2, "empty", b""),
        put(3, "empty with metadata", b"", metadata={"a": ""}),
        put(4, "empty before and after", b"", before=b""),
        entry(5, "copy", bucket="photos", key="empty copy", value=b"", request_hash=bytes(16)),
        entry(6, "append", bucket="clicks", key="", value=b"", stream_offset=0),
        entry(7, "noop"),
        entry(8, "delete", bucket="photos", key="empty"),
        seal(9, 1),
    ]


def current() -> list[Spec]:
    """Not sealed: zeros follow the last frame."""
    group: Spec = {"group_seq_last": 4}
    return [
        create(segment_bytes=4096),
        put(2, "a", b"1"),
        put(3, "g", b"1", **group),
        put(4, "h", b"2", **group),
    ]


def stream_gaps() -> list[Spec]:
    """Offsets that do not follow one another, and run back: a stream with several ranges."""
    offsets = [
        ("b", 5), ("a", 0), ("b", 6), ("b", 9), ("a", 1), ("b", 2), ("b", 3), ("ab", 2**40), ("c", SEQ_MAX),
    ]  # fmt: skip
    messages = [
        entry(2 + at, "append", bucket=name, value=b"m", stream_offset=offset)
        for at, (name, offset) in enumerate(offsets)
    ]
    # One that was refused takes no offset, also where it names one.
    refused = entry(11, "append", bucket="b", stream_offset=4, refused=1)
    return [create(), *messages, refused, seal(12, 1)]


def refused_control() -> list[Spec]:
    """Refused control entries: they end nothing, set nothing, and may stand anywhere."""
    return [
        create(),
        entry(2, "seal", refused=1),
        entry(3, "fork", refused=2),
        entry(4, "settings", refused=3),
        entry(5, "checkpoint", refused=4),
        seal(6, 1),
        entry(7, "fork", refused=2),
        put(8, "a", b"1"),
        seal(9, 7),
    ]


def before_images() -> list[Spec]:
    """Changes that say what was there: nothing, values of all sizes, a large one. `settings` ends it."""
    large = bytes(range(256)) * 4

    def after(seq: int, value: bytes, metadata: dict[str, str] | None = None) -> Spec:
        """Where the version of this seq was there."""
        time_us = TIME_US + seq % 1000
        image: Spec = {"seq": seq, "time_us": time_us, "metadata": metadata, "value_bytes": len(value)}
        end = value
        if len(value) > 256:
            digest = blake3(value).digest()
            image |= {"value": None, "blake3": digest}
            end = struct.pack("<Q", len(value)) + digest
        else:
            image["value"] = value
        encoded = cbor2.dumps(metadata, canonical=True) if metadata else b""
        head = struct.pack("<QQHB", seq, time_us, len(encoded), len(value) > 256)
        return {"image": image, "before": head + encoded + end}

    nothing: Spec = {"image": None, "before": b""}
    return [
        create(before_images=1),
        entry(2, "create_bucket", bucket="photos"),
        put(3, "a", b"one", metadata={"b": "c"}, **nothing),
        put(4, "a", b"", **after(3, b"one", {"b": "c"})),
        put(5, "a", large, metadata={"x": "é" * 200}, **after(4, b"")),
        put(6, "a", b"v" * 256, **after(5, large, {"x": "é" * 200})),
        put(7, "a", b"1", group_seq_last=8, **after(6, b"v" * 256)),
        put(8, "a", b"2", group_seq_last=8, **after(6, b"v" * 256)),
        entry(9, "begin", body={"snapshot": 8}),
        entry(10, "delete", bucket="photos", key="a", txn=9, txn_seq_before=9, **after(8, b"2")),
        entry(11, "commit", txn=9, txn_seq_before=10),
        entry(12, "copy", bucket="photos", key="a", value=b"v", request_hash=bytes(range(16)), **nothing),
        put(13, "a", b"", refused=5, request_hash=bytes(range(16))),
        entry(14, "settings", body={"before_images": 0}),
        put(15, "a", b"what was there is not said"),
        seal(16, 15),
    ]


# ---------------------------------------------------------------------------- what a reader must find


def expected(data: bytes, specs: Sequence[Spec], **more: Any) -> bytes:
    """The .json file of a segment."""
    header = SegmentHeader.decode(data)._asdict()
    mine = [spec for spec in specs if spec["seq"] >= header["seq_first"]]
    if data[-format.TRAILER_BYTES :][:8] == format.TRAILER_MAGIC:
        trailer = SegmentTrailer.decode(data)
        mine = [spec for spec in mine if spec["seq"] <= trailer.seq_last]
        more["segment_hash"] = trailer.segment_hash
    if header["before_images"]:
        more["images"] = {str(spec["seq"]): spec["image"] for spec in mine if "image" in spec}
    else:
        del header["before_images"]
    unread = ("given_time_us", "image")
    entries = [{name: value for name, value in spec.items() if name not in unread} for spec in mine]
    return as_json({"header": header, "entries": entries, **more})


def as_json(what: Any) -> bytes:
    text = json.dumps(what, default=bytes.hex, indent=1, sort_keys=True)
    return text.encode() + b"\n"


def refusal(error: str, why: str, **more: Any) -> bytes:
    return as_json({"error": error, "why": why, **more})


# ---------------------------------------------------------------------------- versions to come, and damage


def reseal(
    data: bytes, frames: Sequence[bytes], *, version: tuple[int, int] = (1, 0), flags: int = 0
) -> bytes:
    """A segment of other frames or another version in which every checksum and hash is right."""
    body = bytearray(data[: format.HEADER_BYTES])
    positions = array("I")
    for frame in frames:
        positions.append(len(body))
        body += frame
    struct.pack_into("<HHI", body, 8, *version, flags)
    struct.pack_into("<I", body, format.HEADER_BYTES - 4, crc32(body[: format.HEADER_BYTES - 4]))
    block_bytes = struct.unpack_from("<I", data, 96)[0]
    steps = footer_steps(file_of(bytes(body)), positions, len(body), block_bytes=block_bytes, plain=True)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            footer, trailer = end.value
            break
    tail = bytearray(trailer.encode())
    struct.pack_into("<HHI", tail, 8, *version, flags)
    struct.pack_into("<I", tail, len(tail) - 4, crc32(tail[:-4]))
    return bytes(body + footer + tail)


def reframe(seq: int, payload: bytes) -> bytes:
    return format.FRAME.pack(seq, len(payload), format.frame_checksum(seq, payload)) + payload


def from_the_future() -> Iterator[tuple[str, bytes, bytes]]:
    specs = minimal()
    ((name, data),) = write_log(specs).items()
    payloads = [encode(spec) for spec in specs]
    frames = [reframe(spec["seq"], payload) for spec, payload in zip(specs, payloads, strict=True)]
    assert reseal(data, frames) == data
    kind = reframe(2, bytes([Kind.RELEASED + 1]) + payloads[1][1:])
    flag = reframe(2, payloads[1][:1] + struct.pack("<H", 1 << 10) + payloads[1][3:])
    for case, changed, why in (
        ("future-minor", reseal(data, frames, version=(1, 1)), "format version 1.1"),
        ("future-major", reseal(data, frames, version=(2, 0)), "format version 2.0"),
        ("future-segment-flag", reseal(data, frames, flags=1), "segment flag 0x1"),
        ("future-kind", reseal(data, [frames[0], kind, frames[2]]), "kind 46"),
        ("future-flag", reseal(data, [frames[0], flag, frames[2]]), "entry flag 0x400"),
        ("future-compression", reseal(data[:100] + b"\2" + data[101:], frames), "compression 2"),
    ):
        yield f"{case}/{name}", changed, refusal("newer version", why)
    tail = data[-format.TRAILER_BYTES : -4]
    tail = tail[:8] + struct.pack("<HH", 1, 1) + tail[12:]
    changed = data[: -format.TRAILER_BYTES] + tail + struct.pack("<I", crc32(tail))
    yield f"newer-trailer/{name}", changed, refusal("newer version", "format version 1.1")
    damaged = bytearray(data)
    damaged[data.index(b"meow")] ^= 0x20
    yield f"damaged/{name}", bytes(damaged), refusal("corrupt", "one bit of a value is not what it was")
    yield f"cut-off/{name}", data[:-100], refusal("corrupt", "the header is good, and there is no trailer")


def unsealed() -> Iterator[tuple[str, bytes, bytes]]:
    specs = current()
    ((name, data),) = write_log(specs).items()
    assert name == "current.log"
    yield "current/current.log", data, expected(data, specs)
    end = len(data.rstrip(b"\0"))
    # The power went while a frame was written: some sectors of it came through.
    torn = reframe(5, encode(put(5, "torn", bytes(range(1, 255)) * 3)))
    sectors = bytearray(data)
    sectors[end : end + len(torn)] = torn
    sectors[1024:1536] = bytes(512)
    yield "current-torn/current.log", bytes(sectors), expected(data, specs)
    unfinished = reframe(5, encode(put(5, "g", b"1", group_seq_last=6)))
    half = data[:end] + unfinished + data[end + len(unfinished) :]
    yield "current-half-group/current.log", half, expected(data, specs)
    # The header came through, and no frame.
    nothing = data[: format.HEADER_BYTES] + bytes(len(data) - format.HEADER_BYTES)
    yield "current-no-frames/current.log", nothing, expected(nothing, [])

    def going_on(case: str, *frames: bytes) -> tuple[str, bytes]:
        written = data[:end] + b"".join(frames)
        return f"{case}/current.log", written + bytes(len(data) - len(written))

    setting = reframe(5, encode(entry(5, "settings", body={"colour": 1})))
    yield *going_on("future-setting", setting), refusal("newer version", "setting colour")
    after = reframe(6, encode(put(6, "alone", b"1")))
    why = "a group is interrupted by an entry that is not in it"
    yield *going_on("group-interrupted", unfinished, after), refusal("corrupt", why)
    ending = reframe(5, encode(seal(5, 1)))
    why = "a frame follows the one that ends the segment"
    yield *going_on("frame-after-end", ending, after), refusal("corrupt", why)
    # The epoch that the header names is not the one of the `fork` that begins the segment.
    first = SegmentHeader.decode(data)._replace(seq_first=5, seq_before=4, time_before_us=TIME_US, epoch=2)
    fork = reframe(5, encode(entry(5, "fork", body={"cluster_id": CLUSTER_ID, "epoch": 3})))
    why = "the header names another epoch than the fork"
    contradicted = first.encode() + fork + bytes(4096 - format.HEADER_BYTES - len(fork))
    yield "fork-contradicts-header/current.log", contradicted, refusal("corrupt", why)
    # A sealed segment, and not a byte of the one after it.
    specs = minimal()
    ((name, data),) = write_log(specs).items()
    yield f"current-no-header/{name}", data, expected(data, specs)
    why = "there is no header: on its own it is no segment, and in its directory it holds nothing"
    yield "current-no-header/current.log", bytes(4096), refusal("not a segment", why, holds_nothing=True)
    # All frames of a segment are there, and it has no footer yet.
    body_bytes = SegmentTrailer.decode(data).body_bytes
    name = name.replace("segment", "sealing")
    zeros = data[:body_bytes] + bytes(4096 - body_bytes)
    yield f"sealing/{name}", zeros, expected(zeros, specs)
    # The power went while the footer was written.
    half = data[: (body_bytes + len(data)) // 2]
    half += bytes(4096 - len(half))
    yield f"sealing-half-footer/{name}", half, expected(half, specs)


def compressed() -> Iterator[tuple[str, bytes, bytes]]:
    for case, specs in (("compressed", many_blocks()), ("compressed-one-block", minimal())):
        ((name, data),) = write_log(specs).items()
        path = f"{case}/{name}.zst"
        stored = _kept(path, data) or _stored(data)
        yield path, stored, expected(data, specs)
        if case == "compressed":
            # One bit of the first block, under a stored hash that is the old one.
            damaged = stored[:100] + bytes([stored[100] ^ 1]) + stored[101:]
            why = "one bit of a block is not what it was"
            yield f"compressed-damaged/{name}.zst", damaged, refusal("corrupt", why)


def _kept(path: str, data: bytes) -> bytes | None:
    """The compressed file that is there, while it decompresses to the right bytes."""
    if not (HERE / path).exists():
        return None
    stored = (HERE / path).read_bytes()
    return stored if decompress(stored) == data else None


def _stored(data: bytes) -> bytes:
    parts: list[bytes] = []
    compress_segment(file_of(data), parts.append)
    return b"".join(parts)


def decompress(stored: bytes) -> bytes:
    """As `zstd -d` does: all frames one after the other, without a look at the table."""
    reader = zstandard.ZstdDecompressor().stream_reader(stored, read_across_frames=True)
    return reader.readall()


def hints() -> Iterator[tuple[str, bytes, bytes]]:
    hint = Hint(2**32 + 1, 70_000, SEQ_MAX, "fdatasync")
    data = hint.encode()
    fields = {name: getattr(hint, name) for name in Hint.__dataclass_fields__}
    yield "hint/hint", data, as_json({"hint": fields})
    damaged = data[:-1] + bytes([data[-1] ^ 1])
    yield "hint-damaged/hint", damaged, refusal("corrupt", "one bit is not what it was")


# ---------------------------------------------------------------------------- all of it


CASES = {
    "minimal": minimal,
    "kinds": kinds,
    "sessions": sessions,
    "optional-groups": optional_groups,
    "unicode": unicode_names,
    "metadata": metadata,
    "holes": holes,
    "big-seqs": big_seqs,
    "chain": chain_of_three,
    "many-blocks": many_blocks,
    "empty-values": empty_values,
    "stream-gaps": stream_gaps,
    "refused-control": refused_control,
    "before-images": before_images,
}


def make() -> dict[str, bytes]:
    """Every golden file by its path below this folder."""
    made: dict[str, bytes] = {}
    for case, specs_of in CASES.items():
        specs = specs_of()
        for name, data in write_log(specs).items():
            if name != "current.log":
                made[f"{case}/{name}"] = data
                made[f"{case}/{name}.json"] = expected(data, specs)
    others = (from_the_future(), unsealed(), compressed(), hints())
    for path, data, json_file in (item for group in others for item in group):
        made[path] = data
        made[f"{path}.json"] = json_file
    return made


# ---------------------------------------------------------------------------- the worked example


def byte_table(text: str, heading: str) -> list[tuple[int, int, str, str]]:
    """(offset, size, type, field) of each row of the first byte table below a heading of docs/FORMAT.md."""
    _, found, rest = text.partition(f" {heading}\n\n")
    assert found, f"docs/FORMAT.md has no heading {heading!r}"
    rest = rest[rest.index("| offset | size | type | field | why |\n") :]
    rows = []
    for line in rest.split("\n")[2:]:
        if not line.startswith("|"):
            break
        offset, size, kind, field, _ = (cell.strip() for cell in line.strip("|").split("|"))
        rows.append((int(offset), int(size), kind, field))
    return rows


def example(data: bytes, text: str) -> str:
    """The whole of a segment, field by field, as the byte tables of `text` say."""
    trailer = SegmentTrailer.decode(data)
    lines: list[str] = []
    position = 0

    def field(size: int, what: str) -> None:
        nonlocal position
        for start in range(0, size, 16):
            part = data[position + start : position + min(start + 16, size)]
            lines.append(f"{position + start:03x}  {part.hex(' '):47}  {what if not start else ''}".rstrip())
        position += size

    def fields(heading: str) -> None:
        for _, size, kind, name in byte_table(text, heading):
            number = int.from_bytes(data[position : position + size], "little")
            known = f"{name} {number}" if kind.startswith("u") and name != "checksum" else name or "zeros"
            field(size, known)

    fields("Segment header")
    sections = trailer.section_offsets()
    for number in range(trailer.frame_count):
        lines.append(f"     frame {number}")
        _, length, _, kind, _, bucket_len, key_len, metadata_len, _, _ = format.FRAME_FIXED.unpack_from(
            data, position
        )
        assert format.FRAME_BYTES + length >= format.FRAME_FIXED_BYTES
        value_len = length - format.FIXED_BYTES - bucket_len - key_len - metadata_len
        fields("Frame head")
        fields("Payload fixed part")
        lines[-7] += f": {format.KIND_NAMES[kind]}"
        for name, size in (("bucket", bucket_len), ("key", key_len), ("metadata", metadata_len)):
            field(size, name)
        field(value_len, "value" if kind < Kind.CREATE else "value: a body")
    lines.append("     footer")
    field(sections.positions - position, "padding")
    for name, end in zip(sections._fields[:-1], sections[1:], strict=True):
        field(end - position, name)
    lines.append("     trailer")
    fields("Segment trailer")
    assert position == len(data)
    return "\n".join(lines)


def with_example(text: str, data: bytes) -> str:
    start, end = "<!-- example: written by tests/golden/make.py -->\n", "<!-- end of example -->\n"
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}\n```text\n{example(data, text)}\n```\n\n{end}{after}"


def main() -> None:
    made = make()
    for old in HERE.glob("*/*"):
        if old.parent.name != "__pycache__" and old.relative_to(HERE).as_posix() not in made:
            old.unlink()
    for path, data in made.items():
        target = HERE / path
        target.parent.mkdir(exist_ok=True)
        if not target.exists() or target.read_bytes() != data:
            target.write_bytes(data)
            print("wrote", target)
    (data,) = (data for path, data in made.items() if path.startswith(EXAMPLE_CASE) and path.endswith(".log"))
    text = FORMAT_MD.read_text(encoding="utf-8")
    FORMAT_MD.write_text(with_example(text, data), encoding="utf-8")
    print(f"{len(made)} files, {sum(map(len, made.values())):,} bytes")


if __name__ == "__main__":
    main()
