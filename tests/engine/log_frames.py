"""What redo reads of a log, one by one."""

from __future__ import annotations

from collections.abc import Iterable

from lowwater.engine.database.redo import Other, Part, parts_from
from lowwater.engine.format.format import FRAME_BYTES, U32
from lowwater.engine.format.records import place_of, seq_of
from lowwater.engine.log.log import Log
from lowwater.engine.seams.seams import Files


def frames_from(log: Log, files: Files, seq: int) -> list[Other]:
    """From `seq` on."""
    # With a limit of nothing each record says where its frame lies.
    return [frame for parts in parts_from(log, files, seq, 0) for frame in frames_in(parts)]


def frames_in(parts: Iterable[Part]) -> list[Other]:
    found = []
    for part in parts:
        if isinstance(part, Other):
            found.append(part)
        else:
            for record in part.records:
                length = U32.unpack_from(record, 8)[0]
                payload = record[FRAME_BYTES : FRAME_BYTES + length]
                found.append(Other(seq_of(record), payload, *place_of(record)))
    return found
