"""The loops that cost most, compiled (`_fast*.c`) where the package was built with a C compiler.

Always true:
  - compiled or not, the same bytes come out; tests hold both together. Nothing but speed depends on it;
  - compiled code says None to what is unusual, and has changed nothing then: who asked does it step by step,
    which always works, and says what is wrong.

`PURE_PYTHON=1` in the environment does without, as it does for other packages.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lowwater.engine.format.format import U64

if TYPE_CHECKING:
    from lowwater.engine.format.records import Record
    from lowwater.engine.state.ranges import Range

# As in `_fast.h`.
VERSION = 6

Superseded = list[tuple["Range", bytes, bytes]]
"""(range, key, record) of what somebody may still read."""
Begun = list[tuple["Range", bytes]]
"""The ranges that had no change before, with their first record."""
PutFrames = tuple[list[bytes], list[bytes], bytes, bytes]
"""The keys in pages, the frames, all frames joined, and their positions as u32."""
PutRecords = tuple[list[bytes], list[bytes], int, int]
"""The keys in pages and the records of puts, the last one's seq, and where it ends."""
WalkedFrames = tuple[bytes, int, int, int]
"""The positions of frames as u32, the last one's seq and time, and where it ends."""
CheckedTree = tuple[int, int, int, int, int, bytes | None]
"""How many branch pages, leaf pages, overflow pages and entries a tree of LMDB has; the sum of its keys; and
a byte for each key that was asked for, 1 where it is there."""
MergedRange = tuple[int, int, list[tuple[int, list[tuple[bytes, bytes]]]]]
"""How many bytes the records have, and how many they are; and of each page that has changes its index (-1:
below the first), and the keys and bytes of the pages that it becomes."""


def _put_changes(
    lows: list[bytes],
    ranges: list[Range],
    keys: Sequence[bytes],
    records: Sequence[Record],
    keeps_older: bool,
    older: Superseded,
    begun: Begun,
) -> tuple[int, int]:
    """Make records the newest changes of their keys, in the ranges that begin at `lows`. Return how many
    bytes left, and of how many records. What it adds to `older` and `begun` is there before the change is: an
    interrupt may come in between, or take the result away."""
    left_bytes = left_count = 0
    for key, record in zip(keys, records, strict=True):
        place = ranges[bisect_right(lows, key) - 1]
        dirty = place.dirty
        before = dirty.get(key)
        if before is None or before is record:
            if not place.rec_seq:
                begun.append((place, record))
        elif keeps_older and U64.unpack_from(before) < U64.unpack_from(record):
            older.append((place, key, before))
        else:
            left_bytes += len(before)
            left_count += 1
        dirty[key] = record
    return left_bytes, left_count


def _nothing(*_: Any) -> None:
    """All of it step by step."""


def _not_here(*_: Any) -> Any:
    return NotImplemented


def _compiled() -> tuple[Any, str]:
    """The module, or None; and why there is none."""
    if os.environ.get("PURE_PYTHON"):
        return None, "PURE_PYTHON is set"
    try:
        module = import_module("lowwater.engine.format._fast")
    except ModuleNotFoundError:
        return None, "it was built without a C compiler or Python's headers"
    except ImportError as error:
        return None, str(error)
    # In a checkout.
    if getattr(module, "VERSION", 0) != VERSION:
        return None, "they were built from older files: install it again"
    return module, ""


_module, WHY_NOT_COMPILED = _compiled()
IS_COMPILED: bool = _module is not None

put_changes: Callable[..., tuple[int, int]] = _module.put_changes if IS_COMPILED else _put_changes
# Pairs of text and bytes as frames of puts.
put_frames: Callable[..., PutFrames | None] = _module.put_frames if IS_COMPILED else _nothing
# The mere puts that follow one another in bytes of a log; and where plain frames begin, each of them checked.
put_records: Callable[..., PutRecords] | None = _module.put_records if IS_COMPILED else None
walk_frames: Callable[..., WalkedFrames] | None = _module.walk_frames if IS_COMPILED else None
# The changes of a range, merged into its pages. Others run meanwhile.
merge_range: Callable[..., MergedRange | None] = _module.merge_range if IS_COMPILED else _nothing
# The row of a key in the bytes of a page, None where there is none; NotImplemented where Python has to look.
newest_row: Callable[[bytes, bytes], Any] = _module.newest_row if IS_COMPILED else _not_here
# Rows of a plain page as objects; NotImplemented likewise.
plain_objects: Callable[..., Any] = _module.plain_objects if IS_COMPILED else _not_here
# A tree of LMDB's file, checked. Others run meanwhile. None where Python has to say what is wrong.
check_tree: Callable[..., CheckedTree | None] = _module.check_tree if IS_COMPILED else _nothing
