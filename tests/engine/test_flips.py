"""Every byte of a sealed segment, raw and compressed: when it is not what it was, that is found.

Always true of what is tested here: `check` reports each flip; a reader either raises a typed error or returns
the entries that were written, from wherever it starts.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lowwater.engine.format.entries import Entry, decode_frames
from lowwater.engine.log.check import Finding, check_segment
from lowwater.engine.log.compress import ZSTD_MAGIC, CompressedSegment, compress_segment
from lowwater.engine.log.reader import SealedReader
from lowwater.errors import Corrupt, LowwaterError, NotLowwater

CHUNKS = 8
SEED = 20_240_229
NAME = "segment-00000000000000000001-00000000000000000040.log"


def _load_make() -> ModuleType:
    path = Path(__file__).parent.parent / "golden" / "make.py"
    spec = importlib.util.spec_from_file_location("golden_make", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = _load_make()


class OneFile:
    """A file system of one file, in which a byte can be flipped and flipped back."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)

    def open(self, path: str, **_: object) -> Any:
        return self

    def read_at(self, offset: int, size: int) -> bytes:
        return bytes(self.data[offset : offset + size])

    def size(self) -> int:
        return len(self.data)

    def close(self) -> None:
        pass


def check(files: OneFile) -> list[Finding]:
    return list(check_segment(files, NAME))  # type: ignore[arg-type]


@cache
def sealed(value_bytes: int) -> bytes:
    """Few frames, most of them large: so a check is fast enough to be made for each byte."""
    values = random.Random(SEED)
    large = [
        make.put(30 + at, f"large-{at}", values.randbytes(value_bytes), metadata={"n": str(at)})
        for at in range(7)
    ]
    specs = [make.create(block_bytes=16_384), *make.optional_groups()[1:-1], *large, make.seal(40, 1)]
    specs[-1]["time_us"] = large[-1]["time_us"]
    ((_, data),) = make.write_log(specs).items()
    return bytes(data)


@cache
def compressed(value_bytes: int) -> bytes:
    parts: list[bytes] = []
    compress_segment(make.file_of(sealed(value_bytes)), parts.append)
    return b"".join(parts)


def entries_of(files: OneFile, seq: int) -> list[Entry]:
    file: Any = CompressedSegment(files.open("")) if files.data[:4] == ZSTD_MAGIC else files.open("")
    chunks = SealedReader(file).chunks_after(seq)
    entries = (
        entry
        for chunk in chunks
        for entry in decode_frames(chunk.data, chunk.start, chunk.end, verify=not chunk.verified)
    )
    return [entry for entry in entries if entry.seq > seq]


def flips(data: bytes, chunk: int) -> Iterator[tuple[int, int]]:
    """(offset, mask): for each byte of this chunk its lowest bit, its highest, and any others."""
    masks = random.Random(SEED + chunk)
    for offset in range(len(data) * chunk // CHUNKS, len(data) * (chunk + 1) // CHUNKS):
        for mask in (0x01, 0x80, masks.randrange(1, 256)):
            yield offset, mask


def find_what_is_missed(data: bytes, chunk: int) -> Sequence[str]:
    files = OneFile(data)
    seqs = [0, *(entry.seq for entry in entries_of(files, 0))]
    starts = random.Random(SEED - chunk)
    whole = {seq: entries_of(files, seq) for seq in seqs}
    missed = []
    for offset, mask in flips(data, chunk):
        files.data[offset] ^= mask
        if not any(finding.severity == "error" for finding in check(files)):
            missed.append(f"check misses the flip of {mask:#04x} at {offset}")
        for seq in (0, starts.choice(seqs)):
            try:
                if entries_of(files, seq) != whole[seq]:
                    missed.append(f"reading above {seq} is misled by the flip of {mask:#04x} at {offset}")
            except LowwaterError:
                pass
        files.data[offset] ^= mask
    assert files.data == data
    return missed


@pytest.mark.long
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_flipped_byte_of_a_segment_is_found(chunk: int) -> None:
    """A disk that lies about one bit must not change history unnoticed."""
    data = sealed(9_300)
    assert len(data) >= 64 * 1024
    assert find_what_is_missed(data, chunk) == []


@pytest.mark.long
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_flipped_byte_of_a_compressed_segment_is_found(chunk: int) -> None:
    """The archive holds what no local disk holds any more."""
    assert find_what_is_missed(compressed(1_000), chunk) == []


def test_a_damaged_frame_leads_no_search_astray() -> None:
    """A search by seq or time jumps over frames: led astray, it would leave out good ones in silence."""
    # Each frame is longer than a block, so what is read from the place found does not touch what misled.
    puts = [make.put(seq, f"key-{seq}", bytes(1100)) for seq in range(10, 26)]
    ((_, data),) = make.write_log([make.create(block_bytes=1024), *puts, make.seal(26, 1)]).items()
    files = OneFile(data)
    reader = SealedReader(files.open(""))
    entries = entries_of(files, 0)
    seqs_before = {entry.time_us: reader.seq_before_time(entry.time_us) for entry in entries}
    refused = 0
    for position in reader.positions:
        for offset in (position, position + 1, position + 7, position + 25, position + 26, position + 32):
            for bit in range(8):
                files.data[offset] ^= 1 << bit
                for entry in entries:
                    try:
                        assert entries_of(files, entry.seq) == [one for one in entries if one.seq > entry.seq]
                    except Corrupt:
                        refused += 1
                    try:
                        found = SealedReader(files.open("")).seq_before_time(entry.time_us)
                        assert found == seqs_before[entry.time_us]
                    except Corrupt:
                        refused += 1
                files.data[offset] ^= 1 << bit
    assert refused > 0


def test_no_cut_of_a_segment_goes_unnoticed() -> None:
    """A copy that broke off has every byte right that it has."""
    for data in (sealed(200), compressed(200)):
        for size in range(len(data)):
            assert any(finding.severity == "error" for finding in check(OneFile(data[:size]))), size
            with pytest.raises(LowwaterError):
                entries_of(OneFile(data[:size]), 0)


def test_a_segment_of_zeros_is_no_segment() -> None:
    """What an interrupted download or a sparse copy leaves."""
    data = bytes(len(sealed(200)))
    with pytest.raises(NotLowwater):
        SealedReader(OneFile(data))  # type: ignore[arg-type]
    assert [finding.severity for finding in check(OneFile(data))] == ["error"]
