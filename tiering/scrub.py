"""Whether an archive has all that it should have: list, catalogue, chain, sizes and hashes.

Always true:
  - only the store is asked, and nothing in it is changed; what a shipper writes meanwhile is no finding;
  - what is expected follows from the newest manifest (`reached.py`). An object that nothing reaches is a
    note, never an error (`remedies.py`): an upload that was not finished, or what a fenced line left;
  - it goes on after a finding as far as it can, and each finding names its object and says what to do;
  - memory: the names of all objects, and of each one under way what its verifier takes.

Shallow, every name and size is compared, small objects are read, and of segments the two ends. Deep, every
byte of every object is verified, and the blocks of checkpoints are looked at as a restore would.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor  # noqa: TID251 — the caller waits for all of it
from typing import NamedTuple, TypeVar

from lowwater.engine.blocks import NO_HASH
from lowwater.engine.catalogue import CheckpointDescriptor, Fork, SegmentDescriptor, describe_checkpoint
from lowwater.engine.check import Finding, Progress, Step
from lowwater.engine.ckpt import Checkpoint, decode_checkpoint
from lowwater.engine.format import HEADER_BYTES, SegmentHeader
from lowwater.errors import Corrupt, LowwaterError, NotFound
from lowwater.tiering.archive import Archive
from lowwater.tiering.names import (
    CLUSTER,
    EPOCHS,
    ObjectName,
    Type,
    checkpoint_name,
    newest_manifests,
    pack_object_name,
    parse,
    segment_name,
    short,
)
from lowwater.tiering.objects import Manifest, decode_cluster, decode_epoch, decode_manifest
from lowwater.tiering.reached import WRONG, Line, catalogue_objects, follows, read_line
from lowwater.tiering.remedies import HINTS, UNUSED, why_unreached
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

AT_ONCE = 16
AT_ONCE_DEEP = 4

T = TypeVar("T")
R = TypeVar("R")


class Before(NamedTuple):
    """What a segment has to follow; None where it is not known."""

    seq: int
    hash: bytes


class _Segment(NamedTuple):
    descriptor: SegmentDescriptor
    before: Before | None


class Scrub:
    """One look at an archive. `steps` does it; the other attributes say what it found out by the way."""

    def __init__(
        self,
        store: Store,
        *,
        deep: bool = False,
        seqs: tuple[int, int] | None = None,
        at_once: int | None = None,
    ) -> None:
        """`seqs` takes only the segments with entries between these two, both included, the checkpoints of a
        seq among them, and the manifests of entries among them. `at_once` objects are looked at together:
        with 1 there is no thread. It lists the store; NotFound where there is nothing of an archive."""
        self.deep = deep
        self._store = WatchedStore(store)
        self._seqs = seqs
        self._at_once = at_once or (AT_ONCE_DEEP if deep else AT_ONCE)
        # Before the list: what this manifest reaches was there before it, and so is in the list.
        newest = [parse(name) for name in newest_manifests(store)]
        self._newest = max(((each.epoch, each.seq) for each in newest if each), default=(0, 0))
        self._newest_count = len(newest)
        self._sizes = {found.name: found.size for found in store.list()}
        if not any(parse(name) is not None for name in self._sizes):
            raise NotFound("there is no archive here", path=store.uri, hint="check bucket and prefix")
        self.cluster_id: bytes | None = None
        self.manifest: Manifest | None = None
        self._lines: list[Line] = []
        self._epoch_first = 1
        self._reached: set[str] = set()
        self._checked: set[str] = set()
        self._found: list[Finding] = []

    @property
    def objects(self) -> int:
        return len(self._sizes)

    @property
    def stored_bytes(self) -> int:
        """Of all objects: what the progress adds up to, about."""
        return sum(self._sizes.values())

    @property
    def bytes_read(self) -> int:
        return self._store.bytes

    @property
    def requests(self) -> int:
        return self._store.requests

    def findings(self) -> Iterator[Finding]:
        return (step for step in self.steps() if isinstance(step, Finding))

    def steps(self) -> Iterator[Step]:
        """Every finding, and for each object that was looked at a `Progress` with its size."""
        try:
            for part in (
                self._read_cluster,
                self._read_lines,
                self._look_at_claims,
                self._look_at_catalogues,
                self._look_at_segments,
                self._look_at_checkpoints,
                self._look_at_the_rest,
            ):
                yield from part()
                yield from self._told()
        finally:
            self._store.stopped = True

    # ------------------------------------------------------------------ telling

    def _told(self) -> Iterator[Finding]:
        found, self._found = self._found, []
        yield from found

    def _tell(self, error: LowwaterError, name: str) -> None:
        self._found.append(self._finding(error, name))

    def _finding(self, error: LowwaterError, name: str) -> Finding:
        """What is wrong with an object, and what to do about one of its type."""
        found = parse(name)
        hint = HINTS[found.type] if found is not None else error.hint
        if not isinstance(error, NotFound):
            hint = f"move it away, then {hint}" if found is not None else hint
        seq = error.seq if error.seq is not None else _seq_of(found)
        return Finding("error", error.message, at(self._store.uri, name), seq, error.offset, hint)

    def _wrong(self, what: str, name: str, hint: str, seq: int | None = None) -> Finding:
        return Finding("error", what, at(self._store.uri, name), seq, None, hint)

    # ------------------------------------------------------------------ reading

    def _read(self, name: str) -> bytes:
        """A small object, verified."""
        self._require(name, None)
        file = ObjectFile(self._store, name, self._sizes[name])
        verify_object(name, file)
        self._checked.add(name)
        return file.read_at(0, file.size())

    def _require(self, name: str, size: int | None) -> None:
        """That the list has it, with this size."""
        self._reached.add(name)
        held = self._sizes.get(name)
        if held is None:
            found = parse(name)
            raise NotFound(f"the {found.type if found else 'object'} is gone")
        if size is not None and held != size:
            raise Corrupt(f"the object has {held:,} bytes instead of {size:,}")

    def _each(self, work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """What `work` makes of each, in order, several at once."""
        if self._at_once == 1:
            yield from map(work, items)
            return
        waiting: deque[Future[R]] = deque()
        pool = ThreadPoolExecutor(self._at_once, thread_name_prefix="lowwater-scrub")
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > 2 * self._at_once:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BaseException:
            self._store.stopped = True
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _guarded(self, work: Callable[[T], None], name_of: Callable[[T], str]) -> Callable[[T], list[Step]]:
        """`work`, with what it finds wrong as a finding, and its progress."""

        def guarded(item: T) -> list[Step]:
            name = name_of(item)
            steps: list[Step] = [Progress(self._sizes.get(name, 0))]
            try:
                work(item)
            except WRONG as error:
                steps.append(self._finding(error, name))
            return steps

        return guarded

    # ------------------------------------------------------------------ whose it is, and what counts

    def _read_cluster(self) -> Iterator[Step]:
        try:
            self.cluster_id = decode_cluster(self._read(CLUSTER))
        except WRONG as error:
            self._tell(error, CLUSTER)
        yield Progress(self._sizes.get(CLUSTER, 0))

    def _read_lines(self) -> Iterator[Step]:
        """The newest manifest that can be read, and those that forks say it rests on."""
        if self._newest_count > 1:
            self._found.append(
                self._wrong(
                    "one entry has two manifests: two logs have written in one epoch",
                    next(name for name, found in self._of_type("manifest") if _place(found) == self._newest),
                    "find out which of the two is right: `lowwater tier ls --long` lists both",
                )
            )
        names = [name for name, found in self._of_type("manifest") if _place(found) <= self._newest]
        for name in sorted(names, reverse=True):
            try:
                manifest = self._read_manifest(name)
            except WRONG as error:
                self._tell(error, name)
                continue
            self.manifest = manifest
            self._lines.append(read_line(manifest, 0, self._read, self._tell))
            break
        by_hash = {found.hash: name for name, found in self._of_type("manifest")}
        seen: set[bytes] = set()
        # Lines are added while this goes through them.
        for line in self._lines:
            for fork in line.forks:
                if not follows(fork) or fork.parent_manifest in seen:
                    continue
                seen.add(fork.parent_manifest)
                parent = by_hash.get(short(fork.parent_manifest))
                if parent is not None:
                    yield from self._add_parent(fork, parent)
                elif self._is_of_a_clone(fork):
                    self._found.append(self._elsewhere(fork))
                    self._epoch_first = max(self._epoch_first, fork.epoch)
                else:
                    gone = f"manifest/*/*-{short(fork.parent_manifest)}.cbor"
                    what = f"the manifest is gone that the fork of epoch {fork.epoch} follows"
                    self._found.append(self._wrong(what, gone, HINTS["manifest"], fork.recorded_seq))
        yield from self._told()

    def _read_manifest(self, name: str) -> Manifest:
        manifest = decode_manifest(self._read(name))
        if self.cluster_id is None:
            self.cluster_id = manifest.cluster_id
        elif manifest.cluster_id != self.cluster_id:
            raise Corrupt("this manifest is of another cluster than the archive")
        return manifest

    def _add_parent(self, fork: Fork, name: str) -> Iterator[Step]:
        try:
            manifest = self._read_manifest(name)
        except WRONG as error:
            self._tell(error, name)
            return
        line = read_line(manifest, fork.seq, self._read, self._tell)
        if line.whole and line.catalogue.hash_last != fork.parent_segment:
            what = f"the fork of epoch {fork.epoch} follows another segment than the manifest that it names"
            self._found.append(self._wrong(what, name, HINTS["manifest"], fork.recorded_seq))
        self._lines.append(line)
        yield from self._told()

    def _is_of_a_clone(self, fork: Fork) -> bool:
        """Whether what was before a fork lies in the archive of another cluster: a clone has no claim of its
        first epoch, and nothing at all of an older one."""
        return not any(
            found.epoch < fork.epoch or (found.type == "epoch" and found.epoch == fork.epoch)
            for kind in ("epoch", "segment", "manifest")
            for _, found in self._of_type(kind)
        )

    def _elsewhere(self, fork: Fork) -> Finding:
        return Finding(
            "warning",
            f"nothing up to seq {fork.seq} is here: it lies in the archive that this cluster was cloned from",
            self._store.uri,
            fork.seq,
            None,
            "scrub that archive too; where this is no clone, its history was removed",
        )

    def _of_type(self, kind: Type) -> Iterator[tuple[str, ObjectName]]:
        for name in self._sizes:
            found = parse(name)
            if found is not None and found.type == kind:
                yield name, found

    # ------------------------------------------------------------------ claims

    def _look_at_claims(self) -> Iterator[Step]:
        """Each fork has its claim: without it another could take the number again."""
        claims: dict[int, list[tuple[str, bytes]]] = {}
        unreadable: set[int] = set()
        for name, found in self._of_type("epoch"):
            try:
                claim = decode_epoch(self._read(name))
                if self.cluster_id is not None and claim.cluster_id != self.cluster_id:
                    raise Corrupt("this claim is of another cluster than the archive")
                claims.setdefault(claim.epoch, []).append((name, claim.parent_manifest))
            except WRONG as error:
                self._tell(error, name)
                unreadable.add(found.epoch)
            else:
                self._reached.discard(name)  # a fork may have it, or nothing
            yield Progress(self._sizes[name])
        for fork in {fork.epoch: fork for line in self._lines for fork in line.forks}.values():
            if fork.epoch <= self._epoch_first and self._epoch_first > 1:
                continue
            matching = [name for name, parent in claims.get(fork.epoch, []) if parent == fork.parent_manifest]
            self._reached.update(matching)
            if not matching and fork.epoch not in unreadable:
                what = f"the claim of epoch {fork.epoch} is gone, in which this log goes on"
                name = f"{EPOCHS}{fork.epoch:010}-*.cbor"
                self._found.append(self._wrong(what, name, HINTS["epoch"], fork.recorded_seq))

    # ------------------------------------------------------------------ manifests, chunks, runs

    def _look_at_catalogues(self) -> Iterator[Step]:
        wanted: dict[str, int] = {}
        for line in self._lines:
            if line.whole:
                assert self.cluster_id is not None
                wanted.update(catalogue_objects(line, self.cluster_id, self._epoch_first))

        def look(name: str) -> None:
            self._require(name, wanted[name])
            if self.deep and name not in self._checked:
                verify_object(name, ObjectFile(self._store, name, self._sizes[name]))

        names = [name for name in wanted if self._is_wanted_entry(name)]
        self._reached.update(wanted)
        for steps in self._each(self._guarded(look, str), names):
            yield from steps

    def _is_wanted_entry(self, name: str) -> bool:
        found = parse(name)
        return (
            self._seqs is None
            or found is None
            or found.type != "manifest"
            or self._seqs[0] <= found.seq <= self._seqs[1]
        )

    # ------------------------------------------------------------------ segments

    def _look_at_segments(self) -> Iterator[Step]:
        wanted = self._wanted_segments()
        self._reached.update(wanted)
        items = [
            item
            for item in wanted.items()
            if self._seqs is None
            or (item[1].descriptor.first <= self._seqs[1] and item[1].descriptor.last >= self._seqs[0])
        ]
        for steps in self._each(self._guarded(self._look_at_segment, _first_of), items):
            yield from steps

    def _wanted_segments(self) -> dict[str, _Segment]:
        wanted: dict[str, _Segment] = {}
        for line in self._lines:
            before: Before | None = Before(0, NO_HASH) if line.whole else None
            for descriptor in line.segments:
                if descriptor.epoch >= self._epoch_first:
                    wanted.setdefault(segment_name(descriptor), _Segment(descriptor, before))
                before = Before(descriptor.last, descriptor.hash) if line.whole else None
        return wanted

    def _look_at_segment(self, item: tuple[str, _Segment]) -> None:
        name, (descriptor, before) = item
        self._require(name, None)
        found = parse(name)
        assert found is not None
        size = self._sizes[name]
        if self.deep:
            file: ObjectFile = ObjectFile(self._store, name, size)
            header = SegmentHeader.decode(open_segment(file).read_at(0, HEADER_BYTES))
            described = verify_segment(found, file)
        else:
            file = ObjectEnds(self._store, name, size)
            header, described = describe_object(found, file)
        if described != descriptor._replace(recorded_seq=0):
            raise Corrupt("this is another segment than the catalogue has")
        if header.cluster_id != self.cluster_id:
            raise Corrupt("this segment is of another cluster than the archive")
        if before is not None and before != (header.seq_before, header.hash_before):
            raise Corrupt(
                f"this segment does not follow the one before it: it follows seq {header.seq_before}, "
                f"and that one ends with {before.seq}",
                offset=0,
            )

    # ------------------------------------------------------------------ checkpoints

    def _look_at_checkpoints(self) -> Iterator[Step]:
        wanted = {
            checkpoint_name(each): each
            for line in self._lines
            for each in line.checkpoints
            if line.catalogue.epoch_at(each.recorded_seq) >= self._epoch_first
        }
        self._reached.update(wanted)
        items = [
            item
            for item in wanted.items()
            if self._seqs is None or self._seqs[0] <= item[1].seq <= self._seqs[1]
        ]
        indexes: dict[str, Checkpoint] = {}

        def look(item: tuple[str, CheckpointDescriptor]) -> None:
            name, descriptor = item
            self._require(name, descriptor.size)
            data = self._read(name)
            if describe_checkpoint(data) != descriptor._replace(recorded_seq=0):
                raise Corrupt("this is another checkpoint than the catalogue has")
            indexes[name] = index = decode_checkpoint(data)
            if index.cluster_id != self.cluster_id:
                raise Corrupt("this checkpoint is of another cluster than the archive")

        for steps in self._each(self._guarded(look, _first_of), items):
            yield from steps
        packs = {pack: size for index in indexes.values() for pack, size in index.packs.items()}
        sound: set[bytes] = set()

        def look_at_pack(item: tuple[bytes, int]) -> None:
            pack, size = item
            name = pack_object_name(pack)
            self._require(name, size)
            if self.deep:
                verify_object(name, ObjectFile(self._store, name, size))
            sound.add(pack)

        guarded = self._guarded(look_at_pack, lambda item: pack_object_name(item[0]))
        for steps in self._each(guarded, packs.items()):
            yield from steps
        if self.deep and self._lines:
            checker = CheckpointChecker(self._store, self._lines[0], sound)
            for name in sorted(indexes):
                for what in checker.check(wanted[name], indexes[name]):
                    yield self._wrong(what, name, HINTS["checkpoint"], wanted[name].seq)

    # ------------------------------------------------------------------ what nothing reaches

    def _look_at_the_rest(self) -> Iterator[Step]:
        if self._seqs is not None:
            return
        following = self._following()
        rest = [name for name in self._sizes if name not in self._reached]
        if not all(line.whole for line in self._lines):
            # They may well be what the damaged part of the catalogue reaches.
            rest = [name for name in rest if parse(name) is None]
        for steps in self._each(lambda name: self._look_at_rest(name, following), rest):
            yield from steps

    def _following(self) -> set[str]:
        """The segments beyond the newest manifest that a restore would follow."""
        line = self._lines[0] if self._lines else None
        if self.cluster_id is None or line is None or not line.whole:
            return set()
        archive = Archive(self._store, self.cluster_id)
        return {segment_name(each) for each in archive.segments_after(line.manifest, line.catalogue)}

    def _look_at_rest(self, name: str, following: set[str]) -> list[Step]:
        where = at(self._store.uri, name)
        steps: list[Step] = [Progress(self._sizes[name])]
        found = parse(name)
        if found is None:
            what = "no object of an archive has this name"
            return [*steps, Finding("warning", what, where, hint="move it away: nothing needs it")]
        if found.type == "manifest" and _place(found) > self._newest:
            return steps  # it was published since
        if self.deep and name not in self._checked:
            try:
                verify_object(name, ObjectFile(self._store, name, self._sizes[name]))
            except WRONG as error:
                what = f"{error.message}; nothing reaches it"
                return [*steps, Finding("warning", what, where, error.seq, error.offset, UNUSED)]
        what, hint = why_unreached(found, self.manifest, is_following=name in following)
        return [*steps, Finding("note", what, where, _seq_of(found), None, hint)]


def _place(found: ObjectName) -> tuple[int, int]:
    return found.epoch, found.seq


def _seq_of(found: ObjectName | None) -> int | None:
    return found.seq if found is not None and found.seq else None


def _first_of(item: tuple[str, object]) -> str:
    return item[0]


def is_archive(store: Store) -> bool:
    """Whether there is anything of an archive in a store."""
    return any(parse(found.name) is not None for found in store.list())
