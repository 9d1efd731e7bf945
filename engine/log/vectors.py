"""Many frames at once, without a Python loop over them. Needs numpy, and `slices` needs pyarrow.

Always true: `read_window` and `VectorKeyIndex` give what their plain twins in `windows.py` give, byte for
byte.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lowwater.engine.format import format
from lowwater.engine.format.format import FRAME_BYTES, Flag, Kind
from lowwater.engine.log.windows import Window, stream_offset_of
from lowwater.engine.seams.checksum import crc32
from lowwater.errors import Corrupt

if TYPE_CHECKING:
    import pyarrow

Int64 = npt.NDArray[np.int64]
_FIXED = np.dtype(
    {
        "names": [
            "seq",
            "length",
            "kind",
            "flags",
            "bucket_len",
            "key_len",
            "metadata_len",
            "time_us",
            "origin",
        ],
        "formats": ["<u8", "<u4", "u1", "<u2", "<u2", "<u2", "<u2", "<u8", "<u8"],
        "offsets": [0, 8, 16, 17, 19, 21, 23, 25, 33],
        "itemsize": format.FRAME_FIXED_BYTES,
    }
)
_GROUP_BYTES = np.array(format.GROUP_BYTES, dtype=np.int64)
_GROUP_MASK = len(format.GROUP_BYTES) - 1
# Above this length, keys are few enough and long enough for zlib to be faster.
_VECTOR_KEY_BYTES_MAX = 64


def gather(data: bytes | memoryview, dtype: np.dtype[Any], positions: Int64) -> npt.NDArray[Any]:
    """`dtype` read at arbitrary positions: an overlapping view of one item a byte, indexed."""
    count = len(data) - dtype.itemsize + 1
    if len(positions) and (count < 1 or int(positions.max()) >= count or int(positions.min()) < 0):
        raise Corrupt("a frame is cut short")
    raw = np.dtype((np.void, dtype.itemsize))
    view: npt.NDArray[Any] = np.ndarray((max(count, 0),), raw, buffer=data, strides=(1,))
    return view[positions].view(dtype)


class Frames:
    """Frames that follow one another in `data`: their fixed parts, and where their variable parts begin."""

    def __init__(self, data: bytes | memoryview, positions: Int64, end: int | None = None) -> None:
        """`end` is where the last one has to end, where that is known."""
        self.data = data
        self.positions = positions
        self.fixed = gather(data, _FIXED, positions)
        flags = self.fixed["flags"]
        self.kinds = self.fixed["kind"]
        # All flags that any of them has.
        self.flags_seen = int(np.bitwise_or.reduce(flags)) if len(flags) else 0
        self._check_known()
        self.bucket_starts = positions + format.FRAME_FIXED_BYTES
        if self.flags_seen & _GROUP_MASK:
            self.bucket_starts += _GROUP_BYTES[flags & _GROUP_MASK]
        if self.flags_seen & Flag.BEFORE:
            with_before = np.flatnonzero(flags & int(Flag.BEFORE))
            lengths = gather(data, np.dtype("<u4"), self.bucket_starts[with_before]).astype(np.int64)
            self.bucket_starts[with_before] += 4 + lengths
        self.key_starts = self.bucket_starts + self.fixed["bucket_len"]
        self.metadata_starts = self.key_starts + self.fixed["key_len"]
        self.value_starts = self.metadata_starts + self.fixed["metadata_len"]
        self.ends = positions + FRAME_BYTES + self.fixed["length"]
        if bool((self.ends[:-1] != positions[1:]).any()):
            raise Corrupt("a frame does not end where the next one begins")
        if end is not None and len(self.ends) and int(self.ends[-1]) != end:
            raise Corrupt("the last frame does not end where it should")
        if bool((self.value_starts > self.ends).any()) or (len(self.ends) and int(self.ends[-1]) > len(data)):
            raise Corrupt("the lengths inside a frame exceed it")

    def taken(self, places: npt.NDArray[np.intp]) -> Frames:
        """Some of them, by their places, which rise."""
        made = object.__new__(Frames)
        made.data, made.flags_seen = self.data, self.flags_seen
        for name in (
            "positions", "fixed", "kinds", "bucket_starts", "key_starts", "metadata_starts", "value_starts",
            "ends",
        ):  # fmt: skip
            setattr(made, name, getattr(self, name)[places])
        return made

    def group(self, flag: Flag, offset: int, dtype: str, places: npt.NDArray[np.intp]) -> npt.NDArray[Any]:
        """What stands `offset` bytes into the optional group of a flag, which the frames at `places` have."""
        flags = self.fixed["flags"][places] & (int(flag) - 1) & _GROUP_MASK
        starts = self.positions[places] + format.FRAME_FIXED_BYTES + _GROUP_BYTES[flags]
        return gather(self.data, np.dtype(dtype), starts + offset)

    def _check_known(self) -> None:
        counts = np.bincount(self.kinds, minlength=256)
        for kind in np.flatnonzero(counts):
            format.check_kind_and_flags(int(kind), 0)
        format.check_kind_and_flags(Kind.NOOP, self.flags_seen)
        self.kind_counts = {int(kind): int(counts[kind]) for kind in np.flatnonzero(counts)}


def read_window(data: bytes, base: int, positions: Sequence[int], frame_first: int) -> Window:
    """The vectorised twin of `windows.read_window`."""
    at = np.frombuffer(array("I", positions), np.uint32).astype(np.int64) - base
    frames = Frames(data, at)
    fixed = frames.fixed
    effective = (fixed["bucket_len"] > 0) & (fixed["flags"] & int(Flag.REFUSED) == 0)
    messages = effective & (frames.kinds == int(Kind.APPEND))
    indexed = np.flatnonzero(effective & ~messages)
    starts = frames.bucket_starts
    lengths = fixed["bucket_len"].astype(np.int64) + fixed["key_len"]
    if len(indexed) < len(at):
        starts, lengths = starts[indexed], lengths[indexed]
    hashes = crc32_many(data, starts, lengths)
    key_index = hashes.astype(np.uint64) << np.uint64(32) | (indexed + frame_first).astype(np.uint64)
    streams = []
    for frame in np.flatnonzero(messages).tolist():
        start = int(frames.bucket_starts[frame])
        topic = data[start : start + int(fixed["bucket_len"][frame])]
        offset = stream_offset_of(data, int(at[frame]), int(fixed["flags"][frame]))
        streams.append((topic, offset, frame + frame_first))
    return Window(key_index, frames.kind_counts, streams)


class VectorKeyIndex:
    """The vectorised twin of `PlainKeyIndex`."""

    def __init__(self) -> None:
        self._parts: list[npt.NDArray[np.uint64]] = []

    def add(self, items: npt.NDArray[np.uint64]) -> None:
        self._parts.append(items)

    def finish(self) -> Iterator[tuple[bytes, bytes]]:
        items = np.concatenate(self._parts) if self._parts else np.empty(0, np.uint64)
        items.sort()
        yield (items >> np.uint64(32)).astype(np.uint32).tobytes(), items.astype(np.uint32).tobytes()


@cache
def _crc_tables() -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """What eight zero bits do to each value of the checksum's low byte, and what sixteen, and thirty-two, do
    to each value of its low half."""
    table = np.arange(2**16, dtype=np.uint32)
    tables = []
    for _ in range(2):
        for _ in range(8):
            table = np.where(table & 1, table >> 1 ^ np.uint32(0xEDB88320), table >> 1).astype(np.uint32)
        tables.append(table.copy())
    one, two = tables
    return one[:256], two, two[two & 0xFFFF] ^ two >> 16


def crc32_many(data: bytes | memoryview, starts: Int64, lengths: Int64) -> npt.NDArray[np.uint32]:
    """zlib.crc32 of many short slices at once, four bytes a step."""
    result = np.zeros(len(starts), np.uint32)
    short = lengths <= _VECTOR_KEY_BYTES_MAX
    for item in np.flatnonzero(~short).tolist():
        start = int(starts[item])
        result[item] = crc32(data[start : start + int(lengths[item])])
    # Longest first, so that the slices that go on are always the front of the arrays.
    order = np.flatnonzero(short)
    order = order[np.argsort(-lengths[order], kind="stable")]
    if not len(order):
        return result
    starts, lengths = starts[order], lengths[order]
    width = int(lengths[0]) + 3 & ~3
    if int(starts.max()) + width > len(data):
        data = bytes(data) + bytes(width)
    block = gather(data, np.dtype((np.void, width)), starts)
    one, two, four = _crc_tables()
    checksums = np.full(len(order), 0xFFFFFFFF, np.uint32)
    words = block.view("<u4").reshape(len(order), width // 4)
    longer_than = np.searchsorted(-lengths, -np.arange(4, int(lengths[0]) + 1, 4), side="right")
    for step, active in enumerate(longer_than.tolist()):
        front = checksums[:active]
        front ^= words[:active, step]
        np.bitwise_xor(four.take(front & 0xFFFF), two.take(front >> 16), out=front)
    pairs = np.flatnonzero(lengths & 2)
    rest = checksums[pairs]
    halves = block.view("<u2").reshape(len(order), width // 2)[pairs, lengths[pairs] >> 2 << 1]
    checksums[pairs] = two.take((rest ^ halves) & 0xFFFF) ^ rest >> 16
    odd = np.flatnonzero(lengths & 1)
    last = block.view(np.uint8).reshape(len(order), width)[odd, lengths[odd] - 1]
    rest = checksums[odd]
    checksums[odd] = one.take((rest ^ last) & 0xFF) ^ rest >> 8
    result[order] = ~checksums
    return result


def slices(
    data: bytes | memoryview,
    starts: Int64,
    ends: Int64,
    *,
    text: bool,
    absent: npt.NDArray[np.bool_] | None = None,
) -> pyarrow.Array:
    """`data[start:end]` for each pair, null where it is `absent`. Pairs are in order, and none reaches into
    the next. Offsets start, end, start, end, … over the raw bytes make an array of which the even slots are
    wanted and the odd ones gaps; taking the even ones copies nothing else."""
    import pyarrow as pa

    kind = pa.string() if text else pa.binary()
    if not len(starts):
        return pa.array([], kind)
    bounds = np.empty(2 * len(starts), np.int32)
    bounds[0::2] = starts
    bounds[1::2] = ends
    sparse = pa.Array.from_buffers(kind, len(bounds) - 1, [None, pa.py_buffer(bounds), pa.py_buffer(data)])
    taken = sparse.take(pa.array(np.arange(0, len(bounds), 2, dtype=np.int32), mask=absent))
    if text and not _is_ascii(taken):
        try:
            taken.validate(full=True)
        except pa.ArrowInvalid as error:
            raise Corrupt("a bucket or key is not UTF-8") from error
    return taken


def _is_ascii(texts: pyarrow.Array) -> bool:
    """Which is found out in a fifth of the time that it takes to look at each as UTF-8."""
    content = np.frombuffer(texts.buffers()[2], np.uint8)
    return not len(content) or int(content.max()) < 0x80
