"""The frames of a part as Arrow record batches: what runs in tasks.

Always true:
  - a column holds bytes that were verified as the part says, or it is not there: what is missing or damaged
    is an error that names the object, never fewer rows;
  - a batch has at most BATCH_BYTES of frames, or one frame that is larger: memory depends on that, and not
    on the part;
  - rows come in the order of their seqs;
  - what the footer tells spares reading, and never a row: a selection gives the same rows without it.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lowwater.engine.format import format
from lowwater.engine.format.format import KIND_CODES, Kind
from lowwater.engine.log.reader import seq_of, time_of
from lowwater.engine.log.vectors import Frames, Int64, crc32_many, gather
from lowwater.engine.seams.checksum import crc32
from lowwater.engine.seams.real import RealClock
from lowwater.errors import Corrupt, DataError, InvalidConfig, LowwaterError, NewerVersion
from lowwater.spark.entry_columns import COLUMNS, FrameBatch, arrow_schema
from lowwater.spark.plan import Part, PartPlace, PlanPiece, open_place
from lowwater.tiering.fetcher import HINT, Fetcher
from lowwater.tiering.remote_segment import RemoteSegment

BATCH_BYTES = 2**21
# One request to the store: so much is in memory, besides a batch. A folder answers at once, and what stays in
# the processor's cache is up to 1.7 times as fast to decompress and decode; other stores take milliseconds.
READ_BYTES = 2**23
READ_BYTES_OF_FOLDER = 2**20
# Positions are looked at in stretches of so many frames: 1 MiB of them.
STRETCH_FRAMES = 2**18
# So many of a segment's positions are held at once; of more, a stretch is.
POSITIONS_BYTES_MAX = 2**24
# Of a piece that is not longer than this all is read: a search for its first frame costs as much.
SEARCH_BYTES_MIN = 2**22

_NO_BOUNDS: Int64 = np.empty(0, np.int64)
_DATA_KINDS = [int(kind) for kind in Kind if kind < Kind.APPEND]


def raw_batches(part: Part, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The selected entries of a part: these columns, in this order, of the types in COLUMNS, nullable."""
    require_columns(columns)
    schema = arrow_schema(columns)
    fetcher = fetcher_of(part.place)
    for piece in part.pieces:
        for batch in _PieceReader(fetcher, piece, part).batches():
            if len(batch):
                try:
                    made = batch.record_batch(columns, schema)
                except LowwaterError as error:
                    raise _placed(error, fetcher, piece, part.place) from None
                yield made


def require_columns(columns: Sequence[str], among: Collection[str] = COLUMNS) -> None:
    """Raise InvalidConfig unless all of these columns exist, there are some, and each is named once."""
    for name in columns:
        if name not in among:
            nearest = difflib.get_close_matches(str(name).lower(), among, n=1, cutoff=0)[0]
            raise InvalidConfig(
                f"there is no column {name!r:.80}",
                hint=f"the nearest one is {nearest}; there are {', '.join(among)}",
            )
    if not columns:
        raise InvalidConfig("no column is named", hint=f"there are {', '.join(among)}")
    for name, count in Counter(iter(columns)).items():
        if count > 1:
            raise InvalidConfig(f"the column {name} is named {count} times", hint="name it once")


def _placed(error: LowwaterError, fetcher: Fetcher, piece: PlanPiece, place: PartPlace) -> LowwaterError:
    """The error, with the object in which it was found."""
    if error.path is None:
        error.path = fetcher.where(piece.name)
        if isinstance(error, DataError):
            error.hint = HINT
    if place.is_log and isinstance(error, DataError):
        error.hint = "read again where the log was purged meanwhile; else `lowwater log verify` says more"
    return error


# Workers live for many tasks: what they know of a place stays.
_fetchers: dict[object, Fetcher] = {}


def fetcher_of(place: PartPlace) -> Fetcher:
    found = _fetchers.get(place.known_as)
    if found is None:
        found = _fetchers[place.known_as] = Fetcher(open_place(place), clock=RealClock())
    return found


class _PieceReader:
    """The frames of a piece, batch by batch."""

    def __init__(self, fetcher: Fetcher, piece: PlanPiece, part: Part) -> None:
        self._fetcher = fetcher
        self._piece = piece
        self._selection = part.selection
        self._deep = part.verify == "deep"
        self._place = part.place
        self._in_folder = part.place.uri.startswith("file:")
        self._segment = RemoteSegment(fetcher, piece.name, piece.segment, trusting=part.verify == "none")
        self._kinds: npt.NDArray[np.bool_] | None = None
        if part.selection.kinds is not None:
            self._kinds = np.zeros(256, np.bool_)
            # A filter may name a kind that there is not.
            for kind in part.selection.kinds & KIND_CODES.keys():
                self._kinds[KIND_CODES[kind]] = True

    def batches(self) -> Iterator[FrameBatch]:
        try:
            first, stop = self._range()
            if first >= stop or not self._may_have():
                return
            found = self._of_key(first, stop)
            batches = self._scan(first, stop) if found is None else found
            while (batch := next(batches, None)) is not None:
                yield batch
        except LowwaterError as error:
            raise _placed(error, self._fetcher, self._piece, self._place) from None

    # ------------------------------------------------------------------ what the footer spares

    def _range(self) -> tuple[int, int]:
        """The numbers of the frames that lie in the selection's bounds, or more where the piece is short."""
        piece, selection, segment = self._piece, self._selection, self._piece.segment
        first, stop = piece.frame_first, piece.frame_stop
        seqs, times = (segment.first, segment.last), (segment.time_min_us, segment.time_max_us)
        dense = segment.last - segment.first + 1 == segment.frame_count
        if dense:
            first = max(first, selection.seq_first - segment.first)
            stop = min(stop, selection.seq_last + 1 - segment.first)
        if segment.body_bytes < SEARCH_BYTES_MIN:
            return first, stop
        find = self._segment.first_frame
        if not dense and selection.seq_first > segment.first:
            first = max(first, find(seq_of, selection.seq_first, seqs)[0])
        if not dense and selection.seq_last < segment.last:
            stop = min(stop, find(seq_of, selection.seq_last + 1, seqs)[0])
        if selection.time_min_us > segment.time_min_us:
            first = max(first, find(time_of, selection.time_min_us, times)[0])
        if selection.time_max_us < segment.time_max_us:
            stop = min(stop, find(time_of, selection.time_max_us + 1, times)[0])
        return first, stop

    def _may_have(self) -> bool:
        """Whether there is a frame of the wanted kinds."""
        wanted = self._kinds
        return wanted is None or bool(wanted.any() and any(wanted[kind] for kind in self._segment.kinds()))

    def _of_key(self, first: int, stop: int) -> Iterator[FrameBatch] | None:
        """The frames of a key, by the key index; None where that does not tell of all of them, because it has
        nothing without a bucket, nothing that was refused, and no messages."""
        selection = self._selection
        if not selection.bucket or selection.key is None or self._deep:
            return None
        kinds = self._segment.kinds()
        data_count = sum(kinds.get(kind, 0) for kind in _DATA_KINDS)
        if Kind.APPEND in kinds or self._segment.key_count != data_count:
            return None
        return self._indexed(selection.bucket.encode(), selection.key.encode(), first, stop)

    def _indexed(self, bucket: bytes, key: bytes, first: int, stop: int) -> Iterator[FrameBatch]:
        segment, descriptor = self._segment, self._piece.segment
        found = sorted(segment.frames_of_key(bucket, key))
        low = segment.positions(first, first + 1)[0]
        end = (
            descriptor.body_bytes if stop == descriptor.frame_count else segment.positions(stop, stop + 1)[0]
        )
        for position, frame in found:
            if low <= position < end:
                yield self._selected(Frames(frame, np.zeros(1, np.int64), len(frame)), position)

    # ------------------------------------------------------------------ all frames

    def _scan(self, first: int, stop: int) -> Iterator[FrameBatch]:
        """The frames from `first` to below `stop`. All of the footer is compared, also what no row here
        needs: who looks a key up later relies on it."""
        descriptor = self._piece.segment
        positions = self._positions()
        body = _PartBody(self._segment, READ_BYTES_OF_FOLDER if self._in_folder else READ_BYTES)
        seq_before, time_before = descriptor.first - 1, descriptor.time_min_us
        limit = int(self._bounds(positions, stop - 1, stop)[-1])
        # Where the frames begin from `first` on, and where the last of them ends.
        bounds = _NO_BOUNDS
        while first < stop:
            if len(bounds) < 2:
                bounds = self._bounds(positions, first, min(first + STRETCH_FRAMES, stop))
            start = int(bounds[0])
            count = max(int(np.searchsorted(bounds, start + BATCH_BYTES, side="right")) - 1, 1)
            end = int(bounds[count])
            try:
                base, data = body.read(start, end, limit)
                frames = Frames(data, bounds[:count] - base, end - base)
                self._check_order(frames, seq_before, time_before)
                if self._deep:
                    _check_deeply(frames)
            except (Corrupt, NewerVersion) as error:
                error.offset = start if error.offset is None else error.offset
                raise
            seq_before = int(frames.fixed["seq"][-1])
            time_before = int(frames.fixed["time_us"][-1])
            yield self._selected(frames, base)
            first, bounds = first + count, bounds[count:]

    def _positions(self) -> Callable[[int, int], npt.NDArray[np.uint32]]:
        """What gives the positions of the frames from the one to below the other."""
        segment = self._segment
        if 4 * self._piece.segment.frame_count <= POSITIONS_BYTES_MAX:
            held = np.frombuffer(segment.all_positions(), np.uint32)
            return lambda first, last: held[first:last]
        segment.verify_footer()
        return lambda first, last: np.frombuffer(segment.positions(first, last), np.uint32)

    def _bounds(
        self, positions: Callable[[int, int], npt.NDArray[np.uint32]], first: int, last: int
    ) -> Int64:
        """Where the frames from `first` to below `last` begin, and the last one ends."""
        descriptor = self._piece.segment
        bounds: Int64 = positions(first, min(last + 1, descriptor.frame_count)).astype(np.int64)
        if last == descriptor.frame_count:
            bounds = np.append(bounds, descriptor.body_bytes)
        is_within = bounds[0] >= format.HEADER_BYTES and bounds[-1] <= descriptor.body_bytes
        if not is_within or bool((bounds[1:] <= bounds[:-1]).any()):
            raise Corrupt(
                "the positions in the footer are not those of frames that follow one another",
                offset=descriptor.body_bytes,
            )
        return bounds

    def _check_order(self, frames: Frames, seq_before: int, time_before: int) -> None:
        seqs, times = frames.fixed["seq"], frames.fixed["time_us"]
        descriptor = self._piece.segment
        if (
            not seq_before < int(seqs[0]) <= int(seqs[-1]) <= descriptor.last
            or not time_before <= int(times[0]) <= int(times[-1]) <= descriptor.time_max_us
            or bool((seqs[1:] <= seqs[:-1]).any())
            or bool((times[1:] < times[:-1]).any())
        ):
            raise Corrupt("the frames of the segment are not in order")

    # ------------------------------------------------------------------ which of them

    def _selected(self, frames: Frames, base: int) -> FrameBatch:
        mask = self._mask(frames)
        if mask is not None and not bool(mask.all()):
            frames = frames.taken(np.flatnonzero(mask))
        return FrameBatch(frames, base, self._piece.segment.first)

    def _mask(self, frames: Frames) -> npt.NDArray[np.bool_] | None:
        """Which frames are selected; None for all."""
        selection, segment, fixed = self._selection, self._piece.segment, frames.fixed
        masks = []
        if selection.seq_first > segment.first:
            masks.append(fixed["seq"] >= selection.seq_first)
        if selection.seq_last < segment.last:
            masks.append(fixed["seq"] <= selection.seq_last)
        if selection.time_min_us > segment.time_min_us:
            masks.append(fixed["time_us"] >= selection.time_min_us)
        if selection.time_max_us < segment.time_max_us:
            masks.append(fixed["time_us"] <= selection.time_max_us)
        if self._kinds is not None:
            masks.append(self._kinds[frames.kinds])
        if selection.bucket is not None:
            wanted = selection.bucket.encode()
            masks.append(_begins(frames, frames.bucket_starts, fixed["bucket_len"] == len(wanted), wanted))
        if selection.key is not None:
            wanted = selection.key.encode()
            masks.append(_begins(frames, frames.key_starts, fixed["key_len"] == len(wanted), wanted))
        if selection.prefix is not None:
            wanted = selection.prefix.encode()
            masks.append(_begins(frames, frames.key_starts, fixed["key_len"] >= len(wanted), wanted))
        if selection.share is not None:
            number, count = selection.share
            hashes = crc32_many(
                frames.data, frames.bucket_starts, frames.metadata_starts - frames.bucket_starts
            )
            own = hashes.astype(np.uint64) * np.uint64(count) >> np.uint64(32) == number
            masks.append(own | (frames.kinds > int(Kind.COPY)))
        if not masks:
            return None
        mask: npt.NDArray[np.bool_] = np.logical_and.reduce(masks)
        return mask


def _begins(
    frames: Frames, starts: Int64, possible: npt.NDArray[np.bool_], wanted: bytes
) -> npt.NDArray[np.bool_]:
    """Where, among those that are possible, these bytes stand."""
    places = np.flatnonzero(possible)
    if not len(places) or not wanted:
        return possible
    found = gather(frames.data, np.dtype((np.void, len(wanted))), starts[places])
    same = found.view(np.uint8).reshape(len(places), len(wanted)) == np.frombuffer(wanted, np.uint8)
    mask = np.zeros(len(possible), np.bool_)
    mask[places[same.all(axis=1)]] = True
    return mask


class _PartBody:
    """The body of a segment, read front to back in large requests: each block is read and verified once, and
    always in the same memory. What is new to a process costs as much as to decompress into it."""

    def __init__(self, segment: RemoteSegment, read_bytes: int) -> None:
        self._segment = segment
        self._read_bytes = read_bytes
        self._base = 0
        self._known = 0
        self._window = memoryview(bytearray(BATCH_BYTES + 2 * read_bytes))

    def read(self, start: int, end: int, limit: int) -> tuple[int, memoryview]:
        """(an offset at or before `start`, bytes from there to `end` or further), until the next call.
        Nothing is wanted from `limit` on, or before `start` any more."""
        if end > self._known:
            from_offset = max(start, self._known)
            wanted = max(end, min(from_offset + self._read_bytes, limit))
            first, stop = self._segment.blocks_around(from_offset, wanted)
            kept = self._window[start - self._base : max(self._known - self._base, start - self._base)]
            base = first - len(kept)
            if stop - base > len(self._window):
                self._window = memoryview(bytearray(stop - base))
            self._window[: len(kept)] = kept
            # Should that raise, there is nothing any more.
            self._base = self._known = 0
            self._segment.read_blocks_into(first, self._window[len(kept) : stop - base])
            self._base, self._known = base, stop
        return self._base, self._window[: self._known - self._base]


def _check_deeply(frames: Frames) -> None:
    """Compare the checksum of each frame, and decode all that it says."""
    view = memoryview(frames.data)
    positions, ends = frames.positions.tolist(), frames.ends.tolist()
    checksums = gather(frames.data, np.dtype("<u4"), frames.positions + 12).tolist()
    for position, end, expected in zip(positions, ends, checksums, strict=True):
        if (
            crc32(view[position + format.FRAME_BYTES : end], crc32(view[position : position + 12]))
            != expected
        ):
            raise Corrupt("a frame's checksum does not match")
    FrameBatch(frames, 0, 0).decode()
