"""The payloads that every contender writes: the same ones for all, made before anything is timed.

Always true: the same arguments give the same bytes, in every process and in every round.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

BUCKET = "bench"
BATCH_ENTRIES = 100
VALUE_BYTES = 100
KEY_BYTES = 32  # 16 random bytes, in hex

# What one entry takes in our log: the frame's header, the payload's fixed part, then the raw bytes.
FRAME_HEADER_BYTES = 16
FIXED_PART_BYTES = 25
ENTRY_OVERHEAD_BYTES = FRAME_HEADER_BYTES + FIXED_PART_BYTES + len(BUCKET)
FRAME_BYTES = ENTRY_OVERHEAD_BYTES + KEY_BYTES + VALUE_BYTES
BATCH_BYTES = BATCH_ENTRIES * FRAME_BYTES

# Mixed lengths, for reading: uniform in the logarithm between these two, 144 bytes on average.
MIXED_BYTES_MIN = 10
MIXED_BYTES_MAX = 600

SEED = 20240607

Entry = tuple[bytes, bytes]


def entries(count: int, value_bytes: int = VALUE_BYTES) -> list[Entry]:
    source = random.Random(SEED)
    return [(source.randbytes(16).hex().encode(), source.randbytes(value_bytes)) for _ in range(count)]


def batches(distinct: int) -> list[list[Entry]]:
    flat = entries(distinct * BATCH_ENTRIES)
    return [flat[start : start + BATCH_ENTRIES] for start in range(0, len(flat), BATCH_ENTRIES)]


def mixed(count: int, chunk: int = 1000) -> Iterator[list[Entry]]:
    """`count` entries with values of mixed lengths, in chunks, so that memory stays small."""
    source = random.Random(SEED)
    low, high = math.log(MIXED_BYTES_MIN), math.log(MIXED_BYTES_MAX + 1)
    for start in range(0, count, chunk):
        yield [
            (source.randbytes(16).hex().encode(), source.randbytes(int(math.exp(source.uniform(low, high)))))
            for _ in range(min(chunk, count - start))
        ]


def keys(count: int, chunk: int = 100_000) -> Iterator[str]:
    """`count` keys as text, of the same form as those of `entries`, in chunks, so that memory stays small."""
    source = random.Random(SEED)
    for start in range(0, count, chunk):
        text = source.randbytes(16 * min(chunk, count - start)).hex()
        for position in range(0, len(text), KEY_BYTES):
            yield text[position : position + KEY_BYTES]


def values(value_bytes: int, distinct: int) -> list[bytes]:
    source = random.Random(SEED)
    return [source.randbytes(value_bytes) for _ in range(distinct)]


def framed(part: list[Entry]) -> bytes:
    """As many bytes as our log writes for these entries, with the same keys and values in them."""
    overhead = bytes(ENTRY_OVERHEAD_BYTES)
    return b"".join([overhead + key + value for key, value in part])
