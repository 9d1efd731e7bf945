"""What is asked of a shipped log before it is read: which seq a moment is, and what its first entry says.

Always true: the answers rest on verified bytes of what a catalogue reaches, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from lowwater.engine.format.moments import require_seq, time_us_of
from lowwater.engine.log.chain import Creation
from lowwater.engine.log.recover import creation_of
from lowwater.engine.state.catalogue import Catalogue, SegmentDescriptor
from lowwater.errors import Corrupt, LowwaterError, VersionGone
from lowwater.tiering.cold import ColdLog
from lowwater.tiering.fetcher import Fetcher
from lowwater.tiering.remote_segment import RemoteSegment

Moment = int | datetime | None
"""A seq, a time, or None for the newest."""
NameOf = Callable[[SegmentDescriptor], str]


def seq_of(catalogue: Catalogue, fetcher: Fetcher, name_of: NameOf, uri: str, at: Moment) -> int:
    """The seq that is meant: of a time, that of the last entry that is not later."""
    last = catalogue.hwm
    if at is None:
        return last
    if isinstance(at, datetime):
        time_us = time_us_of(at)
        before = ColdLog(fetcher, catalogue, name_of).seq_before_time(time_us + 1)
        if not before:
            raise VersionGone(
                f"the archive begins after {at.isoformat()}", path=uri, hint="give a later time, or a seq"
            )
        return before
    require_seq(at)
    if at > last:
        ended = shown_time(time_of(catalogue, last))
        raise VersionGone(
            f"seq {at} is not in the archive: its last one is {last}, of {ended}",
            path=uri,
            seq=at,
            hint="give a lower seq, or none for the newest. What was written after that was not shipped",
        )
    first = catalogue.segments[0].first
    if at < first:
        raise VersionGone(
            f"the archive begins with seq {first}", path=uri, seq=at, hint=f"give {first} or a higher seq"
        )
    return at


def time_of(catalogue: Catalogue, seq: int) -> int:
    """The time of the last entry of a segment that ends there."""
    found = catalogue.segment_of(seq)
    return 0 if found is None else found.time_max_us


def shown_time(time_us: int) -> str:
    try:
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=time_us)
    except OverflowError:
        return f"{time_us} us"
    return moment.isoformat().replace("+00:00", "Z")


class _Body:
    """The body of a shipped segment, as a file."""

    def __init__(self, segment: RemoteSegment) -> None:
        self._segment = segment

    def read_at(self, offset: int, size: int) -> bytes:
        return self._segment.read(offset, min(offset + size, self._segment.descriptor.body_bytes))

    def size(self) -> int:
        return self._segment.descriptor.body_bytes


def creation_in(catalogue: Catalogue, fetcher: Fetcher, name_of: NameOf) -> Creation:
    """What the first entry of the log says."""
    first = catalogue.segments[0]
    segment = RemoteSegment(fetcher, name_of(first), first)
    header = segment.header()
    where = fetcher.where(segment.name)
    if header.seq_before:
        raise VersionGone(
            "the archive does not have the beginning of the log any more", path=where, seq=header.seq_first
        )
    try:
        return creation_of(_Body(segment), header)
    except LowwaterError as error:
        raise Corrupt(f"the first entry of the log cannot be read: {error.message}", path=where) from error
