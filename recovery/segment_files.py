"""Segments of an archive, brought into a log directory.

Always true:
  - a file under its final name is whole, verified and durable, so what is there need not be fetched again;
  - of several that are wanted, each has its name before the next one gets its own, however many are fetched
    at once: what lies there has no gap, whenever this ends. Those that came ahead wait under temporary names,
    as many as are fetched at once, and a fault ends it where the one that has it would have had its turn;
  - a segment whose end lies above the point becomes the segment that is being written, without its end.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor  # noqa: TID251 — the caller waits for all of it
from itertools import islice
from queue import SimpleQueue

from lowwater.engine.format import format
from lowwater.engine.format.format import SegmentHeader
from lowwater.engine.log.directory import CURRENT, read_names, read_sealed, segment_name, typed_errors
from lowwater.engine.log.scan import scan_frames
from lowwater.engine.seams.failpoints import Failpoint
from lowwater.engine.seams.seams import Files, write_all
from lowwater.engine.state.catalogue import SegmentDescriptor
from lowwater.errors import Corrupt, DataError, NotFound
from lowwater.tiering import names
from lowwater.tiering.fetcher import HINT, Fetcher
from lowwater.tiering.remote_segment import RemoteSegment
from lowwater.tiering.store import Store, at
from lowwater.tiering.verify import ObjectFile, open_segment, verify_segment

TEMPORARY = ".tmp"
READ_BYTES = 2**22

BEFORE_SEGMENT = Failpoint("restore.before_segment")
AFTER_SEGMENT = Failpoint("restore.after_segment")

Passing = Callable[[int], None]
"""Told how many bytes came."""


def begin(files: Files, directory: str) -> None:
    """Remove what a crash has left half written."""
    with typed_errors(directory, "restore the log"):
        for name in files.list(directory):
            if name.endswith(TEMPORARY):
                files.remove(f"{directory}/{name}")


def fetch_all(
    store: Store,
    files: Files,
    directory: str,
    wanted: Iterable[SegmentDescriptor],
    passing: Passing,
    *,
    at_once: int = 1,
) -> None:
    """Fetch whole segments into the log directory, in this order, and `at_once` of them at a time; with 1
    there is no thread. `passing` is called by the caller's thread."""
    if at_once == 1:
        for segment in wanted:
            BEFORE_SEGMENT()
            if _bring(store, files, directory, segment, passing):
                _name(files, directory, segment)
        return
    left = iter(wanted)
    waiting: deque[tuple[SegmentDescriptor, Future[bool]]] = deque()
    sizes: SimpleQueue[int] = SimpleQueue()
    is_stopped = threading.Event()

    def came(size: int) -> None:
        if is_stopped.is_set():
            raise _Stopped
        sizes.put(size)

    pool = ThreadPoolExecutor(at_once, thread_name_prefix="lowwater-restore")
    try:
        while True:
            for segment in islice(left, at_once - len(waiting)):
                BEFORE_SEGMENT()
                future = pool.submit(_bring, store, files, directory, segment, came)
                future.add_done_callback(lambda _: sizes.put(0))  # who waits looks again
                waiting.append((segment, future))
            if not waiting:
                return
            segment, future = waiting[0]
            while not future.done() or not sizes.empty():
                passing(sizes.get())
            if future.result():
                _name(files, directory, segment)
            waiting.popleft()
    finally:
        # A request that is under way ends by itself; nothing is begun any more.
        is_stopped.set()
        pool.shutdown(cancel_futures=True)


class _Stopped(Exception):
    """Nobody waits for this segment any more."""


def _path(directory: str, segment: SegmentDescriptor) -> str:
    return f"{directory}/{segment_name(segment.first, segment.last)}"


def _bring(store: Store, files: Files, directory: str, segment: SegmentDescriptor, passing: Passing) -> bool:
    """Fetch a segment under its temporary name. Return False where the segment is here already."""
    path = _path(directory, segment)
    temporary = path + TEMPORARY
    name = names.segment_name(segment)
    with typed_errors(path, "restore a segment"):
        if _is_here(files, directory, path, segment):
            passing(segment.size)
            return False
        for is_last in (False, True):
            try:
                _copy(store, files, name, temporary, segment, passing)
                break
            except NotFound as error:
                raise Corrupt("a segment is not in the store", path=at(store.uri, name), hint=HINT) from error
            except DataError as error:
                # Damage on the way heals, damage in the store does not.
                if temporary.rpartition("/")[2] in files.list(directory):
                    files.remove(temporary)
                if is_last:
                    error.path, error.hint = at(store.uri, name), HINT
                    raise
    return True


def _name(files: Files, directory: str, segment: SegmentDescriptor) -> None:
    path = _path(directory, segment)
    with typed_errors(path, "restore a segment"):
        files.rename(path + TEMPORARY, path)
        files.sync_directory(directory)
    AFTER_SEGMENT()


def _is_here(files: Files, directory: str, path: str, segment: SegmentDescriptor) -> bool:
    if path.rpartition("/")[2] not in files.list(directory):
        return False
    _, trailer = read_sealed(files, path)
    if trailer.segment_hash != segment.hash:
        raise Corrupt("another segment of this name is here", path=path, hint="restore into a new directory")
    return True


def _copy(
    store: Store, files: Files, name: str, path: str, segment: SegmentDescriptor, passing: Passing
) -> None:
    source = open_segment(ObjectFile(store, name))
    if source.size() != segment.size:
        raise Corrupt(f"the segment has {source.size():,} bytes instead of {segment.size:,}")
    file = files.open(path, create=True)
    try:
        for start in range(0, segment.size, READ_BYTES):
            data = source.read_at(start, min(READ_BYTES, segment.size - start))
            if not data:
                raise Corrupt("the object ends before the segment does", offset=start)
            write_all(file, start, [data])
            passing(len(data))
        found = names.parse(name)
        assert found is not None
        if verify_segment(found, file)._replace(recorded_seq=0) != segment._replace(recorded_seq=0):
            raise Corrupt("the segment is another one than the catalogue has")
        file.sync("fsync")
    finally:
        file.close()


def fetch_beginning(
    fetcher: Fetcher, files: Files, directory: str, segment: SegmentDescriptor, seq: int, passing: Passing
) -> bool:
    """Fetch the frames of a segment up to `seq` as the segment that is being written. Return False where not
    one counts: all of them are of a group that goes on above."""
    BEFORE_SEGMENT()
    path = f"{directory}/{CURRENT}"
    with typed_errors(path, "restore a segment"):
        names_here = read_names(files, directory)
        if names_here.has_current or any(first == segment.first for first, *_ in names_here.numbered):
            return True  # perhaps sealed already: a clone goes on in a segment of its own
        remote = RemoteSegment(fetcher, names.segment_name(segment), segment)
        end = remote.end_of(seq)
        if end <= format.HEADER_BYTES:
            return False
        temporary = path + TEMPORARY
        file = files.open(temporary, create=True)
        try:
            for start in range(0, end, READ_BYTES):
                data = remote.read(start, min(start + READ_BYTES, end))
                write_all(file, start, [data])
                passing(len(data))
            header = SegmentHeader.decode(file.read_at(0, format.HEADER_BYTES))
            scan = scan_frames(file, header, stop=end)
            if not scan.positions:
                files.remove(temporary)
                return False
            if scan.chain.seq_last < seq and scan.problem not in (None, "a group is not complete"):
                raise Corrupt(
                    f"{scan.problem}, and its block has the right hash",
                    path=fetcher.where(remote.name),
                    offset=scan.problem_offset,
                )
            file.truncate(scan.end)
            file.sync("fsync")
        finally:
            file.close()
        files.rename(temporary, path)
        files.sync_directory(directory)
    AFTER_SEGMENT()
    return True
