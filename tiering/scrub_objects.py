"""What a scrub finds out about one object, in whatever thread, process or machine that is done.

Always true:
  - what is to be looked at, what has to be known for it, and what was seen can be pickled, and hold no store;
  - an object that is not as it should be is seen, never raised; whatever is raised is wrong with the store;
  - the words are those of `LowwaterError`, or stand here: nobody else says what is wrong with an object.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor  # noqa: TID251 — the caller waits for all of it
from typing import Any, NamedTuple

from lowwater.engine.format.ckpt import Checkpoint, ListEntry, decode_checkpoint
from lowwater.engine.format.format import HEADER_BYTES, SegmentHeader
from lowwater.engine.log.check import Finding
from lowwater.engine.state.catalogue import CheckpointDescriptor, SegmentDescriptor, describe_checkpoint
from lowwater.errors import Corrupt, LowwaterError, NotFound
from lowwater.tiering.names import checkpoint_name, parse
from lowwater.tiering.objects import Manifest, decode_state
from lowwater.tiering.reached import WRONG, Line
from lowwater.tiering.remedies import HINTS, unreached_damage, why_unreached
from lowwater.tiering.scrub_checkpoints import CheckpointChecker
from lowwater.tiering.store import Store, at
from lowwater.tiering.verify import (
    ObjectEnds,
    ObjectFile,
    describe_object,
    open_segment,
    verify_object,
    verify_segment,
)
from lowwater.tiering.watched_store import WatchedStore


class Before(NamedTuple):
    """What a segment has to follow; None where it is not known."""

    seq: int
    hash: bytes


class WantedObject(NamedTuple):
    """An object of which the catalogue, or a checkpoint, says how large it is. `listed` is the size that the
    list has, None where it is not there; of all of these classes."""

    name: str
    listed: int | None
    size: int
    is_verified: bool = False
    """Whether every byte of it was read and found good before."""


class WantedSegment(NamedTuple):
    name: str
    listed: int | None
    descriptor: SegmentDescriptor
    before: Before | None
    cluster_id: bytes | None
    """Whose log it was then, None where that is not known: of a clone, the first segments may be those of any
    that it descends from. Of checkpoints too."""


class WantedCheckpoint(NamedTuple):
    """What is found out is its index."""

    name: str
    listed: int | None
    descriptor: CheckpointDescriptor
    cluster_id: bytes | None


class WantedList(NamedTuple):
    """Blocks of a checkpoint. What is found out is what `CheckpointChecker` says of them."""

    name: str
    listed: int | None
    descriptor: CheckpointDescriptor
    entry: ListEntry
    is_first: bool

    @property
    def what(self) -> tuple[ListEntry, bool]:
        """Equal where the same would be found out for another checkpoint."""
        return self.entry, self.is_first


class WantedState(NamedTuple):
    """What is found out is what it says."""

    name: str
    listed: int | None


class Unreached(NamedTuple):
    """An object that nothing reaches."""

    name: str
    listed: int
    is_following: bool
    is_verified: bool


Item = WantedObject | WantedState | WantedSegment | WantedCheckpoint | WantedList | Unreached


class KnownOfArchive(NamedTuple):
    """What a scrub knows of the archive when it looks at an object."""

    deep: bool
    manifest: Manifest | None = None
    line: Line | None = None
    """For the blocks of checkpoints."""


class SeenObject(NamedTuple):
    item: Item
    finding: Finding | None
    result: Any = None


class Looker:
    """Looks at the objects of one store. Several threads may share it."""

    def __init__(self, store: Store, known: KnownOfArchive) -> None:
        self._store = store
        self._known = known
        self._checker = None if known.line is None else CheckpointChecker(store, known.line)

    def look(self, item: Item) -> SeenObject:
        try:
            return SeenObject(item, *self._look(item))
        except WRONG as error:
            return SeenObject(item, finding_of(error, self._store.uri, item.name))

    def _look(self, item: Item) -> tuple[Finding | None, Any]:
        if isinstance(item, Unreached):
            return self._unreached(item), None
        if isinstance(item, WantedObject):
            self._wanted(item)
            return None, None
        if isinstance(item, WantedState):
            require_listed(item.name, item.listed, None)
            return None, decode_state(read_verified(self._store, item.name, item.listed))
        if isinstance(item, WantedSegment):
            self._segment(item)
            return None, None
        if isinstance(item, WantedCheckpoint):
            return None, self._checkpoint(item)
        assert self._checker is not None
        return None, self._checker.look(item.descriptor, item.entry, is_first=item.is_first)

    def _wanted(self, item: WantedObject) -> None:
        require_listed(item.name, item.listed, item.size)
        if self._known.deep and not item.is_verified:
            verify_object(item.name, ObjectFile(self._store, item.name, item.listed))

    def _segment(self, item: WantedSegment) -> None:
        name, listed, descriptor, before, cluster_id = item
        require_listed(name, listed, None)
        found = parse(name)
        assert found is not None
        if self._known.deep:
            file: ObjectFile = ObjectFile(self._store, name, listed)
            header = SegmentHeader.decode(open_segment(file).read_at(0, HEADER_BYTES))
            described = verify_segment(found, file)
        else:
            file = ObjectEnds(self._store, name, listed)
            header, described = describe_object(found, file)
        if described != descriptor._replace(recorded_seq=0):
            raise Corrupt("this is another segment than the catalogue has")
        if cluster_id not in (None, header.cluster_id):
            raise Corrupt("this segment is of another cluster than the catalogue has")
        if before is not None and before != (header.seq_before, header.hash_before):
            raise Corrupt(
                f"this segment does not follow the one before it: it follows seq {header.seq_before}, "
                f"and that one ends with {before.seq}",
                offset=0,
            )

    def _checkpoint(self, item: WantedCheckpoint) -> Any:
        require_listed(item.name, item.listed, item.descriptor.size)
        data = read_verified(self._store, item.name, item.listed)
        if describe_checkpoint(data) != item.descriptor._replace(recorded_seq=0):
            raise Corrupt("this is another checkpoint than the catalogue has")
        index = decode_checkpoint(data)
        if item.cluster_id not in (None, index.cluster_id):
            raise Corrupt("this checkpoint is of another cluster than the catalogue has")
        return index

    def _unreached(self, item: Unreached) -> Finding:
        where = at(self._store.uri, item.name)
        found = parse(item.name)
        if found is None:
            what = "no object of an archive has this name"
            return Finding("warning", what, where, hint="find out what wrote it: no reader needs it")
        if self._known.deep and not item.is_verified:
            try:
                verify_object(item.name, ObjectFile(self._store, item.name, item.listed))
            except WRONG as error:
                what = f"{error.message}; nothing reaches it"
                return Finding("warning", what, where, error.seq, error.offset, unreached_damage(found))
        what, hint = why_unreached(found, self._known.manifest, is_following=item.is_following)
        return Finding("note", what, where, found.seq or None, None, hint)


def finding_of(error: LowwaterError, uri: str, name: str) -> Finding:
    """What is wrong with an object, and what to do about one of its type."""
    found = parse(name)
    hint = HINTS[found.type] if found is not None else error.hint
    if not isinstance(error, NotFound):
        hint = f"keep a copy of it elsewhere, move it away, then {hint}" if found is not None else hint
    seq = error.seq if error.seq is not None else (found.seq or None) if found is not None else None
    return Finding("error", error.message, at(uri, name), seq, error.offset, hint)


def require_listed(name: str, listed: int | None, size: int | None) -> None:
    """Raise NotFound unless the list has the object, and Corrupt unless it has this size there."""
    if listed is None:
        found = parse(name)
        raise NotFound(f"the {found.type if found else 'object'} is gone")
    if size is not None and listed != size:
        raise Corrupt(f"the object has {listed:,} bytes instead of {size:,}")


def read_verified(store: Store, name: str, size: int | None) -> bytes:
    """A small object."""
    file = ObjectFile(store, name, size)
    verify_object(name, file)
    return file.read_at(0, file.size())


def lists_of(descriptor: CheckpointDescriptor, index: Checkpoint) -> list[WantedList]:
    """The lists of a checkpoint; `listed` is about what is to be read for each."""
    name = checkpoint_name(descriptor)
    listed = sum(index.packs.values()) // max(1, len(index.lists))
    return [
        WantedList(name, listed, descriptor, entry, not number) for number, entry in enumerate(index.lists)
    ]


# ---------------------------------------------------------------------------- many of them

Look = Callable[[WatchedStore, KnownOfArchive, list[Item]], Iterator[SeenObject]]
"""What is seen of each, in order; by whom is its own affair."""


def look_with_threads(at_once: int) -> Look:
    """So many at once; with 1 there is no thread."""

    def look(store: WatchedStore, known: KnownOfArchive, items: list[Item]) -> Iterator[SeenObject]:
        looker = Looker(store, known)
        if at_once == 1:
            yield from map(looker.look, items)
            return
        waiting: deque[Future[SeenObject]] = deque()
        pool = ThreadPoolExecutor(at_once, thread_name_prefix="lowwater-scrub")
        try:
            for item in items:
                waiting.append(pool.submit(looker.look, item))
                if len(waiting) > 2 * at_once:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BaseException:
            store.stopped = True
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    return look
