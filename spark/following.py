"""A stream's way through an archive: which offset comes next, and what lies between two.

Always true:
  - an offset is the end of a segment, but where `start` or `end` lies within one, and has that segment's
    hash: where the archive does not hold what was read any more, that is an error;
  - offsets never fall, and between two of them lie always the same entries;
  - Spark does not note where a stream begins, and asks again when the first batch was stopped. So each
    offset says where its stream began, and that stands: what was shipped or purged since changes nothing;
  - what no manifest reaches is not there yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from lowwater.engine.format.moments import time_us_of
from lowwater.errors import LogDivergence, OtherCluster, VersionGone
from lowwater.spark.options import Options
from lowwater.spark.plan import Part, Pinned, parts, pin

HINT = (
    "find out what has happened to the archive. To go on with it as it is now, begin a new stream with a new "
    "checkpoint location, and say with `start` where"
)


class Offset(NamedTuple):
    """Everything up to `seq` was read, in the archive of this cluster. `segment` is the hash of the segment
    that this entry lies in, or after; empty before the first one. The stream began after `begin`."""

    seq: int
    cluster: str
    segment: str
    begin: int


class Follower:
    """One stream. It knows the archive as it has seen it last."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._pinned: Pinned | None = None
        self._seq_stop: int | None = None

    def initial(self) -> Offset:
        """Before the first entry that is wanted."""
        pinned, options = self._pin(), self.options
        before = pinned.seq_before
        if isinstance(options.start, int):
            options.require_there(pinned, "start", options.start)
            before = max(before, options.start - 1)
        elif isinstance(options.start, datetime):
            # Where it begins within a segment, the selection says so.
            earlier = (each for each in pinned.segments if each.time_max_us < time_us_of(options.start))
            before = max((each.last for each in earlier), default=before)
        elif options.latest:
            before = pinned.hwm
        return _offset(pinned, before, before)

    def newest(self) -> Offset:
        pinned = self._pin()
        return _offset(pinned, pinned.hwm, pinned.seq_before)

    def stop_at_newest(self) -> None:
        """Read what is there now, and nothing that comes."""
        self._seq_stop = self._pin().hwm

    def latest(self, start: Mapping[str, Any], *, unlimited: bool = False) -> Offset:
        """Where the batch after `start` ends; `start` itself where there is nothing new."""
        offset, pinned, options = Offset(**start), self._pin(), self.options
        self._require_same(pinned, offset)
        stop = pinned.hwm if self._seq_stop is None else min(pinned.hwm, self._seq_stop)
        if isinstance(options.end, int):
            stop = min(stop, options.end)
        last = offset.seq
        used_bytes = used_segments = used_entries = 0
        for segment in pinned.segments:
            if segment.last <= offset.seq:
                continue
            used_bytes += segment.body_bytes
            used_segments += 1
            used_entries += segment.frame_count
            if (
                last > offset.seq
                and not unlimited
                and (
                    used_bytes > options.batch_bytes_max
                    or used_segments > (options.batch_segments_max or used_segments)
                    or used_entries > (options.batch_entries_max or used_entries)
                )
            ):
                break
            last = segment.last
            if last >= stop:
                break
        return offset if stop <= offset.seq else _offset(pinned, min(last, stop), offset.begin)

    def parts(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[Part]:
        """What lies above the one offset, up to the other."""
        first, last = Offset(**start), Offset(**end)
        pinned, options = self._pin(), self.options
        if first.begin != last.begin:
            first = _offset(pinned, last.begin, last.begin)
        if first.seq >= last.seq:
            return []
        for each in (first, last):
            self._require_same(pinned, each)
        selection = options.conditions()._replace(seq_first=first.seq + 1, seq_last=last.seq)
        return parts(
            pinned,
            selection,
            verify=options.verify,
            part_bytes=options.partition_bytes,
            tasks_min=options.tasks_min,
        )

    def _pin(self) -> Pinned:
        self._pinned = pin(self.options.uri, self.options.store, known=self._pinned)
        return self._pinned

    def _require_same(self, pinned: Pinned, offset: Offset) -> None:
        """Raise where what was read up to an offset is not what the archive holds now."""
        where = pinned.reached_by
        if offset.cluster != pinned.cluster_id.hex():
            raise OtherCluster(
                f"this is the archive of the cluster {pinned.cluster_id.hex()}, and the stream has read that "
                f"of {offset.cluster}",
                path=where,
                hint=HINT,
            )
        if offset.seq > pinned.hwm:
            raise LogDivergence(
                f"the archive ends with seq {pinned.hwm} now, and the stream has read up to {offset.seq}",
                path=where,
                seq=offset.seq,
                hint=HINT,
            )
        if offset.seq < pinned.seq_before:
            if self.options.fail_on_data_loss:
                raise VersionGone(
                    f"the entries from {offset.seq + 1} to {pinned.seq_before} are gone, and the stream has "
                    "not read them",
                    path=where,
                    seq=offset.seq + 1,
                    hint="to go on without them, give the option fail_on_data_loss=false",
                )
        elif offset != _offset(pinned, offset.seq, offset.begin):
            raise LogDivergence(
                f"seq {offset.seq} lies in another segment than the one that the stream has read: the "
                "archive goes on from an older state",
                path=where,
                seq=offset.seq,
                hint=HINT,
            )


def _offset(pinned: Pinned, seq: int, begin: int) -> Offset:
    return Offset(seq, pinned.cluster_id.hex(), pinned.segment_hash(seq), begin)
