"""What the log holds of entries that are delivered again.

Always true: what is returned is durable, and its checksum was compared.
"""

from __future__ import annotations

from lowwater.engine.format import format
from lowwater.engine.log.log import Log
from lowwater.engine.log.ring import Chunk
from lowwater.errors import Corrupt, NotFound


class HeldFrames:
    """Frames by their seq. One run of them stays in memory: an orchestrator delivers in order."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._chunk: Chunk | None = None
        self._places: dict[int, int] = {}

    def payload(self, seq: int) -> bytes | None:
        """None where there is no such frame: the seq is a hole, or what it was is no longer here."""
        chunk = self._chunk
        if chunk is None or not chunk.seq_before < seq <= chunk.seq_last:
            chunk = self._load(seq)
            if chunk is None:
                return None
        at = self._places.get(seq)
        if at is None:
            return None
        _, length, checksum = format.FRAME.unpack_from(chunk.data, at)
        payload = chunk.data[at + format.FRAME_BYTES : at + format.FRAME_BYTES + length]
        if format.frame_checksum(seq, payload) != checksum:
            raise Corrupt("a frame's checksum does not match", seq=seq, path=self._log.directory)
        return payload

    def _load(self, seq: int) -> Chunk | None:
        """The run of frames around a seq."""
        self._chunk = None
        self._places = {}
        try:
            chunk = next(self._log.read_chunks(seq), None)
        except NotFound:
            return None  # purged
        if chunk is None:
            return None
        at = chunk.start
        while at < chunk.end:
            found, length, _ = format.FRAME.unpack_from(chunk.data, at)
            self._places[found] = at
            at += format.FRAME_BYTES + length
        self._chunk = chunk
        return chunk
