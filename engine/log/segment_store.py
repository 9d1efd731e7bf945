"""The segments of one log directory: writing the current one, rotating, sealing, preparing the next.

Always true:
  - only the writer's leader calls `write`; only housekeeping steps build footers, spares and hints;
  - `durable_bytes` of the current segment moves after the sync that covers it, never before;
  - a directory entry is durable before anything depends on it: each rename has a sync of its own;
  - the list of segments and the current one change under `lock`, which is the writer's.
"""

from __future__ import annotations

import errno
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Sequence
from itertools import takewhile
from operator import attrgetter
from typing import NamedTuple

from lowwater.engine.format.format import (
    FRAME_BYTES,
    FRAME_FIXED_BYTES,
    HEADER_BYTES,
    TIME_SLICE,
    SegmentHeader,
)
from lowwater.engine.log.chain import IDLE_KINDS, Chain
from lowwater.engine.log.directory import (
    CURRENT,
    SPARE,
    Hint,
    Segment,
    seal_steps,
    segment_name,
    write_hint,
)
from lowwater.engine.log.footer import BlockHasher, FooterBuilder, vectorised
from lowwater.engine.log.pieces import Piece
from lowwater.engine.log.recover import Current, Recovered, hasher_of, repair_current
from lowwater.engine.log.windows import VECTOR_WINDOW_BYTES
from lowwater.engine.seams.failpoints import Failpoint
from lowwater.engine.seams.seams import Clock, File, Files, SyncMode, write_all
from lowwater.logging import get_logger

_logger = get_logger("log")

BEFORE_WRITE = Failpoint("wal.before_write")
AFTER_SYNC = Failpoint("wal.after_sync")
BEFORE_ROTATE = Failpoint("wal.before_rotate")
AFTER_ROTATE = Failpoint("wal.after_rotate")
BEFORE_BEGIN = Failpoint("wal.before_begin_segment")
BEFORE_SEAL = Failpoint("wal.before_seal")
AFTER_SEAL = Failpoint("wal.after_seal")
BEFORE_HINT = Failpoint("wal.before_hint")

# Overwriting zeros that are synced already halves the time of a sync: no block is allocated and no size
# changes. The first file of a log is zeroed by so much at a time, the others whole, in advance.
ZEROED_BYTES = 8 * 2**20
ZERO_STEP_BYTES = 2**20
_ZEROS = bytes(ZERO_STEP_BYTES)
# Durable frames are hashed, and read into the footer, when there are so many of them. The leader helps when
# that falls behind.
READ_BYTES = VECTOR_WINDOW_BYTES
UNREAD_BYTES_MAX = 4 * READ_BYTES
# A log that stays small never pays for a spare.
SPARE_AFTER_BYTES = 4 * 2**20
SEALING_MAX = 2
HINT_INTERVAL_S = 1.0
_ASKED = 2**64
HINT_AFTER_BYTES = 16 * 2**20

_seq_first = attrgetter("seq_first")
_seq_last = attrgetter("seq_last")
_time_last = attrgetter("time_last_us")


def _time_of(frame: bytes) -> int:
    start = FRAME_BYTES + TIME_SLICE.start
    return int.from_bytes(frame[start : start + 8], "little")


def _spare_after_bytes(segment_bytes: int) -> int:
    return min(SPARE_AFTER_BYTES, segment_bytes // 4)


class Batch(NamedTuple):
    """What is synced at once."""

    pieces: Sequence[Piece]
    data: bytes


def _batch(pieces: Sequence[Piece]) -> Batch:
    return Batch(pieces, pieces[0].data if len(pieces) == 1 else b"".join([piece.data for piece in pieces]))


def _batches(pieces: Sequence[Piece], batch_bytes_max: int) -> list[Batch]:
    """As few as they fit into."""
    batches: list[list[Piece]] = []
    size = 0
    for piece in pieces:
        size += len(piece.data)
        if not batches or size > batch_bytes_max:
            batches.append([])
            size = len(piece.data)
        batches[-1].append(piece)
    return [_batch(batch) for batch in batches]


class CurrentSegment:
    """The segment that is being written."""

    __slots__ = (
        "body_bytes", "builder", "durable_bytes", "durable_frames", "durable_seq_last", "durable_time_us",
        "file", "has_news", "hasher", "header", "positions", "seq_last", "time_first_us", "time_last_us",
        "unread", "unread_bytes", "zeroed_bytes",
    )  # fmt: skip

    def __init__(self, file: File, header: SegmentHeader, hasher: BlockHasher) -> None:
        self.file = file
        self.header = header
        self.hasher = hasher
        self.positions = array("I")
        self.body_bytes = 0
        # Up to here the file has data or synced zeros.
        self.zeroed_bytes = 0
        self.durable_bytes = 0
        self.durable_frames = 0
        # Whether there is anything in it but what shipping itself writes, which must not make segments.
        self.has_news = False
        self.time_first_us = 0
        self.seq_last = self.durable_seq_last = header.seq_before
        self.time_last_us = self.durable_time_us = header.time_before_us
        # The footer as far as it is known, where reading ahead for it is worth while, and the durable frames
        # that are neither in it nor hashed: what was in memory a moment ago is not read back.
        self.builder: FooterBuilder | None = None
        self.unread: list[bytes] = []
        self.unread_bytes = 0

    def take_unread(self) -> list[bytes]:
        unread, self.unread = self.unread, []
        self.unread_bytes = 0
        return unread

    def publish(self) -> None:
        """What was written is durable now."""
        self.durable_bytes = self.body_bytes
        self.durable_frames = len(self.positions)
        self.durable_seq_last = self.seq_last
        self.durable_time_us = self.time_last_us


class SegmentStore:
    def __init__(
        self,
        files: Files,
        directory: str,
        recovered: Recovered,
        *,
        sync_mode: SyncMode,
        clock: Clock,
        lock: threading.RLock,
        apart: Callable[[Callable[[], None]], None],
    ) -> None:
        """`apart` calls where no interrupt comes: what takes several steps, and is done once in a while."""
        self._apart = apart
        self._files = files
        self._directory = directory
        self._clock = clock
        self._lock = lock
        self._sync_mode: SyncMode = sync_mode
        self.segments: list[Segment] = recovered.segments
        self.current: CurrentSegment | None = None
        # What the last write took with all its syncs, and when it ended.
        self.sync_s = self.synced_at_s = 0.0
        # Called when a segment has its footer; by a background step, or by who waits for one.
        self.on_sealed: Callable[[], None] = lambda: None
        # From how many durable bytes of the current segment on there is something to do in the background.
        self._housekeeping_from_bytes = 0
        self._job: Generator[None, None, None] | None = None
        self._job_is_spare = False
        self._job_lock = threading.Lock()
        # The files of segments that are in no list any more, the oldest first. They go in this order, whoever
        # removes them, and also where one could not be removed.
        self._leaving: list[str] = []
        self._removing = threading.Lock()
        self._is_closed = False
        # The segment whose name is not durable yet. Its footer is not begun: where a power loss takes that
        # name back, nothing may come behind its frames.
        self._unnamed: Segment | None = None
        self._spare_ready = False
        self._spare_wanted = True
        self._hint_at = clock.monotonic()
        self._hinted_bytes = 0
        self._hinted_seq = 0
        # What is known to survive a power loss, which with sync mode `none` is less than what is written.
        self._synced_seq = recovered.chain.seq_last
        self._synced_bytes = 0
        self._prepare(recovered)

    @property
    def path(self) -> str:
        return f"{self._directory}/{CURRENT}"

    # ------------------------------------------------------------------ opening

    def _prepare(self, recovered: Recovered) -> None:
        """Make what recovery found the state to go on from, durably, before anybody sees it."""
        files = self._files
        for name in recovered.names.leftovers:
            files.remove(f"{self._directory}/{name}")
        if recovered.current is None and recovered.names.has_current:
            files.remove(self.path)
        if recovered.current is not None:
            self.current = self._reopen(recovered.current, recovered.hint)
        # Renames of the former life may be visible and not durable.
        files.sync_directory(self._directory)
        former = recovered.hint.sync_mode if recovered.hint is not None else None
        if "none" in (self._sync_mode, former):
            # From here on, what a crash may tear is another amount: recovery must know before it happens.
            self._write_hint(durable=True)
        if recovered.current is not None and recovered.current.scan.complete:
            self.rotate()

    def _reopen(self, found: Current, hint: Hint | None) -> CurrentSegment:
        # Not sequential: what repair writes again in the middle has frames behind it, and not zeros.
        file = self._files.open(self.path, write=True)
        try:
            repair_current(file, found, hint)
        finally:
            file.close()
        file = self._open_for_writing(self.path, write=True)
        end = found.scan.end
        current = CurrentSegment(file, found.header, hasher_of(file, end, found.header.block_bytes))
        current.positions = found.scan.positions
        current.body_bytes = end
        current.zeroed_bytes = file.size()
        current.seq_last = found.scan.chain.seq_last
        current.time_last_us = found.scan.chain.time_us
        first = file.read_at(HEADER_BYTES, FRAME_FIXED_BYTES)
        current.time_first_us = _time_of(first)
        current.has_news = any(
            file.read_at(position + FRAME_BYTES, 1)[0] not in IDLE_KINDS for position in current.positions
        )
        current.publish()
        self._note_synced(current)
        return current

    def _open_for_writing(self, path: str, *, write: bool = False, create: bool = False) -> File:
        # Without syncs the page cache is what takes the writes.
        sequential = self._sync_mode != "none"
        return self._files.open(path, write=write, create=create, sequential=sequential)

    # ------------------------------------------------------------------ writing (the leader)

    def write(self, pieces: Sequence[Piece], batch_bytes_max: int) -> list[Batch]:
        """Write the pieces of one segment and sync them, as many batches as it takes, each synced before the
        next."""
        batches = _batches(pieces, batch_bytes_max)
        size = sum([len(batch.data) for batch in batches])
        first = pieces[0]
        if (chain := first.starts_segment) is not None:
            assert len(batches) == 1, "the first batch of a segment goes with its header"
            self._apart(lambda: self._begin_after(chain, first.seq_first))
        current = self.current
        assert current is not None, "a piece was cut for a segment that has begun"
        if not current.body_bytes:
            head = current.header.encode()
            assert first.offset == HEADER_BYTES, "a piece was cut for another place"
            if HEADER_BYTES + size > current.zeroed_bytes:
                self._zero_ahead(current, HEADER_BYTES + size)
            BEFORE_WRITE()
            sync_started_s = self._clock.monotonic()
            write_all(current.file, 0, [head, batches[0].data], self._sync_mode)
            current.time_first_us = _time_of(batches[0].data)
        else:
            assert first.offset == current.body_bytes, "a piece was cut for another place"
            if current.body_bytes + size > current.zeroed_bytes:
                self._zero_ahead(current, current.body_bytes + size)
            BEFORE_WRITE()
            sync_started_s = self._clock.monotonic()
            if len(batches) == 1:
                write_all(current.file, current.body_bytes, [batches[0].data], self._sync_mode)
            else:
                parts = [batch.data for batch in batches]
                current.file.write_each(current.body_bytes, parts, self._sync_mode)
        self.synced_at_s = self._clock.monotonic()
        self.sync_s = self.synced_at_s - sync_started_s
        AFTER_SYNC()
        return batches

    def publish(self, pieces: Sequence[Piece], batches: Sequence[Batch]) -> None:
        """Let readers see what `write` wrote. Called with the lock held. Where an interrupt cuts it short,
        `mend_publishing` is called before that is given back, and nothing of it has been."""
        current = self.current
        assert current is not None
        size = 0
        has_news = current.has_news
        for piece in pieces:
            current.positions.extend(piece.positions)
            has_news = has_news or piece.has_news
        for batch in batches:
            current.unread.append(batch.data)
            size += len(batch.data)
        frame_count = len(current.positions)
        # No call from here on: an interrupt finds all of it or nothing.
        current.body_bytes = (current.body_bytes or HEADER_BYTES) + size
        current.unread_bytes += size
        current.has_news = has_news
        current.seq_last = current.durable_seq_last = pieces[-1].seq_last
        current.time_last_us = current.durable_time_us = pieces[-1].time_us
        current.durable_bytes = current.body_bytes
        current.durable_frames = frame_count
        if self._sync_mode != "none":
            self._synced_seq = current.seq_last
            self._synced_bytes = current.body_bytes

    def mend_publishing(self) -> None:
        """With the lock held: take back what an interrupt has left of `publish`."""
        current = self.current
        if current is not None:
            del current.positions[current.durable_frames :]
            while sum(map(len, current.unread)) > current.unread_bytes:
                current.unread.pop()

    @property
    def published_seq(self) -> int:
        """With the lock held: of the last frame that readers see."""
        if self.current is not None:
            return self.current.durable_seq_last
        return self.segments[-1].seq_last if self.segments else 0

    def _note_synced(self, current: CurrentSegment) -> None:
        self._synced_seq = current.seq_last
        self._synced_bytes = current.body_bytes

    def _begin_after(self, chain: Chain, seq_first: int) -> None:
        """Begin a segment, unless an interrupted leader has, and end the one before, if it has not come to
        that."""
        if self.current is not None and self.current.durable_frames:
            self.rotate()
        if self.current is None:
            self._begin(chain, seq_first)

    def _begin(self, chain: Chain, seq_first: int) -> None:
        BEFORE_BEGIN()
        files = self._files
        with self._job_lock:
            spare_ready, self._spare_ready = self._spare_ready, False
            self._spare_wanted = True
        if spare_ready:
            files.rename(f"{self._directory}/{SPARE}", self.path)
            file = self._open_for_writing(self.path, write=True)
        else:
            file = self._open_for_writing(self.path, create=True)
        files.sync_directory(self._directory)
        before = self.segments[-1] if self.segments else None
        header = chain.header(
            seq_first,
            before.seq_last if before is not None else 0,
            before.segment_hash if before is not None else bytes(32),
        )
        current = CurrentSegment(file, header, BlockHasher(header.block_bytes))
        current.hasher.add(header.encode())
        if spare_ready:
            current.zeroed_bytes = file.size()
        if vectorised() is not None:
            current.builder = FooterBuilder()
        with self._lock:
            self.current = current

    def _zero_ahead(self, current: CurrentSegment, needed_bytes: int) -> None:
        """Write and sync zeros where the next frames go, up to the size at which the segment ends."""
        start = current.zeroed_bytes
        end = min(max(start + ZEROED_BYTES, needed_bytes), current.header.segment_bytes)
        if end <= start or not self._files.preallocate:
            return
        try:
            for offset in range(start, end, ZERO_STEP_BYTES):
                write_all(current.file, offset, [_ZEROS[: end - offset]])
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # There is no room to be fast; there may be room for the entries.
            current.file.truncate(start)
            current.zeroed_bytes = current.header.segment_bytes
            return
        # With sync mode `none` there may be entries in this sync: where it fails, the log is poisoned.
        current.file.sync("fsync")
        current.zeroed_bytes = end

    def end_segment(self) -> None:
        """The current segment is complete and published: put it in line for its footer."""
        self._apart(self.rotate)

    def rotate(self) -> None:
        """End the current segment, which is complete and published, and put it in line for its footer. The
        caller must not be interrupted."""
        BEFORE_ROTATE()
        current = self.current
        assert current is not None
        if self._sync_mode == "none":
            current.file.sync("fsync")  # sealing always syncs
            self._note_synced(current)
        self._read_step(least_bytes=1)
        block_hashes, segment_hash = current.hasher.finish()
        header = current.header
        name = segment_name(header.seq_first, current.seq_last, sealed=False)
        segment = Segment(
            path=f"{self._directory}/{name}",
            header=header,
            seq_first=header.seq_first,
            seq_last=current.seq_last,
            body_bytes=current.body_bytes,
            time_last_us=current.time_last_us,
            segment_hash=segment_hash,
            sealed=False,
            positions=current.positions,
            block_hashes=block_hashes,
            builder=current.builder,
        )
        with self._lock:
            # Readers open files by path under the lock, so name and list change together.
            self._files.rename(self.path, segment.path)
            self._unnamed = segment
            self.segments.append(segment)
            self.current = None
        self._files.sync_directory(self._directory)
        self._unnamed = None
        current.file.close()
        self._hinted_bytes = self._synced_bytes = 0
        AFTER_ROTATE()
        while self._unsealed_count() > SEALING_MAX:
            self._job_step(may_prepare=False)

    def _unsealed_count(self) -> int:
        with self._lock:
            return sum(not segment.sealed for segment in self.segments[-SEALING_MAX - 1 :])

    # ------------------------------------------------------------------ housekeeping

    def claim_housekeeping(self) -> bool:
        """Whether there is something to do in the background; true once until it was looked at."""
        current = self.current
        if current is not None:
            if current.unread_bytes > UNREAD_BYTES_MAX:
                self._apart(self._help_to_read)
            if current.durable_bytes < self._housekeeping_from_bytes:
                return False
        self._housekeeping_from_bytes = _ASKED
        return True

    def housekeeping_step(self) -> float | None:
        """One short piece of background work."""
        self._housekeeping_from_bytes = _ASKED
        is_read = self._read_step()
        if self._job_step(may_prepare=True) or is_read:
            return 0
        wait_s = self._hint_step()
        self._housekeeping_from_bytes = 0 if wait_s is None else self._next_work_bytes()
        return wait_s

    def _next_work_bytes(self) -> int:
        work_bytes = self._hinted_bytes + HINT_AFTER_BYTES
        current = self.current
        if current is not None and self._spare_wanted:
            work_bytes = min(work_bytes, _spare_after_bytes(current.header.segment_bytes))
        if current is not None:
            work_bytes = min(work_bytes, current.durable_bytes - current.unread_bytes + READ_BYTES)
        return work_bytes

    def _read_step(self, least_bytes: int = READ_BYTES) -> bool:
        """Hash durable frames of the current segment and read them into its footer. Whether there were
        enough of them."""
        with self._job_lock:
            with self._lock:
                current = self.current
                if current is None or current.unread_bytes < least_bytes:
                    return False
                builder = current.builder
                unread = current.take_unread()
                if builder is not None:
                    positions = current.positions[builder.frame_count : current.durable_frames]
            data = b"".join(unread)  # megabytes, for which no writer waits
            current.hasher.add(data)
            if builder is not None:
                builder.read(data, positions[0], positions)
            return True

    def _help_to_read(self) -> None:
        self._read_step()

    def seal_all(self) -> None:
        with self._job_lock:
            if self._job is not None and self._job_is_spare:
                self._job.close()
                self._job = None
                self._remove_quietly(f"{self._directory}/{SPARE}")  # half of one helps nobody
        while self._job_step(may_prepare=False):
            pass

    def _job_step(self, *, may_prepare: bool) -> bool:
        """Whether there was anything to do. The leader helps when sealing falls behind."""
        with self._job_lock:
            if self._job is None:
                self._job = self._next_job(may_prepare=may_prepare)
            if self._job is None:
                return False
            try:
                next(self._job)
            except StopIteration:
                self._job = None
            return True

    def _next_job(self, *, may_prepare: bool) -> Generator[None, None, None] | None:
        with self._lock:
            unsealed = (each for each in self.segments if not each.sealed and each is not self._unnamed)
            segment = next(unsealed, None)
            current = self.current
        self._job_is_spare = segment is None
        if segment is not None:
            return self._seal(segment)
        wanted = may_prepare and self._spare_wanted and not self._spare_ready and self._files.preallocate
        if wanted and current is not None:
            segment_bytes = current.header.segment_bytes
            if current.durable_bytes >= _spare_after_bytes(segment_bytes):
                return self._prepare_spare(segment_bytes)
        return None

    def _seal(self, segment: Segment) -> Generator[None, None, None]:
        BEFORE_SEAL()
        began_s = self._clock.monotonic()
        yield from seal_steps(self._files, segment)
        path = f"{self._directory}/{segment_name(segment.seq_first, segment.seq_last)}"
        with self._lock:
            # Readers open files by path under the lock, so name and list change together.
            self._files.rename(segment.path, path)
            segment.path = path
            segment.sealed = True
            segment.positions = segment.block_hashes = segment.builder = None
        self._files.sync_directory(self._directory)
        AFTER_SEAL()
        _logger.info(
            "sealed",
            path=path,
            seq_first=segment.seq_first,
            seq_last=segment.seq_last,
            bytes=segment.body_bytes,
            duration_s=round(self._clock.monotonic() - began_s, 3),
        )
        self.on_sealed()

    def _prepare_spare(self, size: int) -> Generator[None, None, None]:
        """Zeros for the next segment. A disk that has no room for them may still have room for entries."""
        self._spare_wanted = False
        path = f"{self._directory}/{SPARE}"
        try:
            if SPARE in self._files.list(self._directory):
                self._files.remove(path)
            file = self._files.open(path, create=True, sequential=True)
            try:
                for offset in range(0, size, ZERO_STEP_BYTES):
                    write_all(file, offset, [_ZEROS[: size - offset]])
                    yield
                file.sync("fsync")
            finally:
                file.close()
        except OSError:
            self._remove_quietly(path)
            return
        self._spare_ready = True

    def _remove_quietly(self, path: str) -> None:
        try:
            self._files.remove(path)
        except OSError:
            pass  # it is removed at the next opening

    def _hint_step(self) -> float | None:
        now = self._clock.monotonic()
        with self._lock:
            behind = self._synced_seq > self._hinted_seq
        if not behind:
            return None
        wait_s = self._hint_at + HINT_INTERVAL_S - now
        if wait_s > 0 and self._synced_bytes < self._hinted_bytes + HINT_AFTER_BYTES:
            return wait_s
        try:
            self._write_hint(durable=False)
        except OSError:
            self._hint_at = now  # it is a hint: the log is as durable without it
        return None

    def _write_hint(self, *, durable: bool) -> None:
        BEFORE_HINT()
        with self._lock:
            current = self.current
            hint = Hint(
                current.header.seq_first if current is not None else 0,
                self._synced_bytes,
                self._synced_seq,
                self._sync_mode,
            )
        write_hint(self._files, self._directory, hint, durable=durable)
        self._hint_at = self._clock.monotonic()
        self._hinted_bytes = hint.durable_bytes
        self._hinted_seq = hint.durable_seq

    def close(self, *, clean: bool) -> None:
        """`clean` finishes what is under way and records that everything is durable."""
        self._is_closed = True
        with self._removing:
            pass  # nobody removes anything any more: the directory may be another process's next
        if clean:
            self.seal_all()
            if self.current is not None and self._sync_mode == "none":
                self.current.file.sync("fsync")
                self._note_synced(self.current)
            if self._spare_ready:
                self._remove_quietly(f"{self._directory}/{SPARE}")
            try:
                self._write_hint(durable=True)
            except OSError:
                pass  # it is a hint: a disk without room for it has kept the entries
        with self._job_lock:
            if self._job is not None:
                # After a failure it stands where it was, with a file open.
                self._job.close()
                self._job = None
        if self.current is not None:
            self.current.file.close()

    def remove_up_to(self, seq: int) -> None:
        """Remove segments that hold nothing above `seq`. Who has one open reads on. The newest stays: what
        follows it says so."""
        with self._removing:
            with self._lock:
                count = min(bisect_right(self.segments, seq, key=_seq_last), len(self.segments) - 1)
                gone = takewhile(attrgetter("sealed"), self.segments[: max(count, 0)])
                paths = [segment.path for segment in gone]
                count = len(paths)
                self._leaving += paths
                del self.segments[:count]
            while self._leaving and not self._is_closed:
                try:
                    self._files.remove(self._leaving[0])
                except FileNotFoundError:
                    pass  # whoever began this was interrupted
                # One at a time: a crash must not leave an old segment where a newer one is gone.
                self._files.sync_directory(self._directory)
                del self._leaving[0]

    # ------------------------------------------------------------------ finding (readers, lock held)

    def segment_after(self, seq: int) -> Segment | CurrentSegment | None:
        """The first segment with a durable frame above `seq`."""
        index = bisect_right(self.segments, seq, key=_seq_last)
        if index < len(self.segments):
            return self.segments[index]
        current = self.current
        if current is not None and current.durable_frames:
            return current
        return None

    def segment_from_time(self, time_us: int) -> Segment | CurrentSegment | None:
        """The first segment with a durable frame at or after `time_us`."""
        index = bisect_left(self.segments, time_us, key=_time_last)
        if index < len(self.segments):
            return self.segments[index]
        current = self.current
        if current is not None and current.durable_frames and current.durable_time_us >= time_us:
            return current
        return None

    @property
    def opened_us(self) -> int | None:
        """The time of the current segment's first frame; None where it holds nothing worth shipping."""
        current = self.current
        return current.time_first_us if current is not None and current.has_news else None

    def open_current(self, files: Files) -> tuple[File, int] | None:
        """The current segment for reading, and the place up to which it is durable."""
        current = self.current
        if current is None or not current.durable_frames:
            return None
        return files.open(self.path), current.durable_bytes

    @property
    def seq_before_first(self) -> int:
        """The seq before the lowest that the directory holds."""
        if self.segments:
            return self.segments[0].header.seq_before
        return self.current.header.seq_before if self.current is not None else 0

    @property
    def time_before_first(self) -> int:
        """The time of the entry before the lowest that the directory holds; 0 where there is none."""
        if self.segments:
            return self.segments[0].header.time_before_us
        return self.current.header.time_before_us if self.current is not None else 0

    def path_from(self, seq_first: int) -> str | None:
        """Where the segment that begins with `seq_first` is."""
        index = bisect_left(self.segments, seq_first, key=_seq_first)
        if index < len(self.segments) and self.segments[index].seq_first == seq_first:
            return self.segments[index].path
        current = self.current
        return self.path if current is not None and current.header.seq_first == seq_first else None

    def is_sealed(self, seq_first: int) -> bool:
        """Whether the segment that begins with `seq_first` has its footer."""
        index = bisect_left(self.segments, seq_first, key=_seq_first)
        segments = self.segments[index : index + 1]
        return any(each.seq_first == seq_first and each.sealed for each in segments)

    def path_of(self, segment: Segment | CurrentSegment) -> str:
        return segment.path if isinstance(segment, Segment) else self.path

    @property
    def seq_first(self) -> int:
        """The lowest seq that the directory holds; 0 for an empty log. Called with the lock held."""
        if self.segments:
            return self.segments[0].seq_first
        current = self.current
        return current.header.seq_first if current is not None and current.durable_frames else 0

    @property
    def segment_count(self) -> int:
        return len(self.segments) + (self.current is not None)

    @property
    def bytes_total(self) -> int:
        current = self.current
        return sum(segment.body_bytes for segment in self.segments) + (
            current.durable_bytes if current else 0
        )
