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

from collections.abc import Iterable, Iterator
from typing import Any

from lowwater.engine.blocks import NO_HASH
from lowwater.engine.catalogue import CheckpointDescriptor, Fork
from lowwater.engine.check import Finding, Progress, Step
from lowwater.engine.ckpt import Checkpoint, ListEntry
from lowwater.errors import Corrupt, DataError, LowwaterError, NotFound
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
from lowwater.tiering.objects import Manifest, Parent, decode_cluster, decode_epoch, decode_manifest
from lowwater.tiering.reached import WRONG, Line, catalogue_objects, follows, read_line
from lowwater.tiering.remedies import HINTS
from lowwater.tiering.scrub_checkpoints import Looked, add_up
from lowwater.tiering.scrub_objects import (
    Before,
    Item,
    Known,
    Look,
    Seen,
    Unreached,
    Wanted,
    WantedCheckpoint,
    WantedSegment,
    finding_of,
    lists_of,
    look_with_threads,
    read_verified,
    require_listed,
)
from lowwater.tiering.store import Store, at
from lowwater.tiering.watched_store import WatchedStore

AT_ONCE = 16
AT_ONCE_DEEP = 4


class Scrub:
    """One look at an archive. `steps` does it; the other attributes say what it found out by the way."""

    def __init__(
        self,
        store: Store,
        *,
        deep: bool = False,
        seqs: tuple[int, int] | None = None,
        at_once: int | None = None,
        look: Look | None = None,
    ) -> None:
        """`seqs` takes only the segments with entries between these two, both included, the checkpoints of a
        seq among them, and the manifests of entries among them. `at_once` objects are looked at together:
        with 1 there is no thread. Who looks at them, where it is not this process, is `look`. It lists the
        store; NotFound where there is nothing of an archive."""
        self.deep = deep
        self._store = WatchedStore(store)
        self._seqs = seqs
        self._look = look or look_with_threads(at_once or (AT_ONCE_DEEP if deep else AT_ONCE))
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
        self._parent: Parent | None = None
        # Of the log's first entries, where it is no clone's.
        self._first_id: bytes | None = None
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
        self._found.append(finding_of(error, self._store.uri, name))

    def _wrong(self, what: str, name: str, hint: str, seq: int | None = None) -> Finding:
        return Finding("error", what, at(self._store.uri, name), seq, None, hint)

    # ------------------------------------------------------------------ reading

    def _read(self, name: str) -> bytes:
        """A small object, verified."""
        self._reached.add(name)
        listed = self._sizes.get(name)
        require_listed(name, listed, None)
        data = read_verified(self._store, name, listed)
        self._checked.add(name)
        return data

    def _seen(self, items: Iterable[Item], *, line: Line | None = None) -> Iterator[Seen]:
        """What is seen of each, in order."""
        wanted = list(items)
        known = Known(self.deep, self.manifest, line)
        return self._look(self._store, known, wanted) if wanted else iter(())

    def _steps(self, seen: Seen) -> Iterator[Step]:
        yield Progress(seen.item.listed or 0)
        if seen.finding is not None:
            yield seen.finding

    # ------------------------------------------------------------------ whose it is, and what counts

    def _read_cluster(self) -> Iterator[Step]:
        try:
            self.cluster_id, self._parent = decode_cluster(self._read(CLUSTER))
            self._first_id = None if self._parent is not None else self.cluster_id
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
                elif fork.cluster_id != self.cluster_id:
                    pass  # a parent's own, whose archive has what it follows, or that of its parent
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
        """Whether what was before a fork of this cluster lies in the archive of another one: so it is before
        a clone's first. A clone has no claim of its first epoch, and nothing at all of an older one."""
        forks = [each for line in self._lines for each in line.forks if each.recorded_seq < fork.recorded_seq]
        if any(each.cluster_id == self.cluster_id for each in forks):
            return False
        return (
            bool(forks)
            or self._parent is not None
            or not any(
                found.epoch < fork.epoch or (found.type == "epoch" and found.epoch == fork.epoch)
                for kind in ("epoch", "segment", "manifest")
                for _, found in self._of_type(kind)
            )
        )

    def _elsewhere(self, fork: Fork) -> Finding:
        where, hint = "the archive that this cluster was cloned from", "scrub that archive too"
        if self._parent is not None:
            where = f"the archive that this cluster was cloned from, {self._parent.uri}"
        else:
            hint = f"{hint}; where this is no clone, its history was removed"
        return Finding(
            "warning",
            f"nothing up to seq {fork.seq} is here: it lies in {where}",
            self._store.uri,
            fork.seq,
            None,
            hint,
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

        names = [name for name in wanted if self._is_wanted_entry(name)]
        self._reached.update(wanted)
        for seen in self._seen(
            Wanted(name, self._sizes.get(name), wanted[name], name in self._checked) for name in names
        ):
            yield from self._steps(seen)

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
            for item in wanted.values()
            if self._seqs is None
            or (item.descriptor.first <= self._seqs[1] and item.descriptor.last >= self._seqs[0])
        ]
        for seen in self._seen(items):
            yield from self._steps(seen)

    def _wanted_segments(self) -> dict[str, WantedSegment]:
        wanted: dict[str, WantedSegment] = {}
        for line in self._lines:
            before: Before | None = Before(0, NO_HASH) if line.whole else None
            for descriptor in line.segments:
                # The last ones of a parent may have been recorded, and shipped, by its clone.
                by = line.catalogue.epoch_at(descriptor.recorded_seq) if line.whole else descriptor.epoch
                if by >= self._epoch_first:
                    name = segment_name(descriptor)
                    listed, owner = self._sizes.get(name), self._owner_at(line, descriptor.first)
                    wanted.setdefault(name, WantedSegment(name, listed, descriptor, before, owner))
                before = Before(descriptor.last, descriptor.hash) if line.whole else None
        return wanted

    def _owner_at(self, line: Line, seq: int) -> bytes | None:
        """Whose log it was at an entry, None where that is not known."""
        return (line.catalogue.cluster_id_at(seq) or self._first_id) if line.whole else None

    # ------------------------------------------------------------------ checkpoints

    def _look_at_checkpoints(self) -> Iterator[Step]:
        wanted = {
            checkpoint_name(each): (each, self._owner_at(line, each.seq))
            for line in self._lines
            for each in line.checkpoints
            if line.catalogue.epoch_at(each.recorded_seq) >= self._epoch_first
        }
        self._reached.update(wanted)
        indexes: dict[str, Checkpoint] = {}
        for seen in self._seen(
            WantedCheckpoint(name, self._sizes.get(name), each, owner)
            for name, (each, owner) in wanted.items()
            if self._seqs is None or self._seqs[0] <= each.seq <= self._seqs[1]
        ):
            yield from self._steps(seen)
            if seen.result is not None:
                indexes[seen.item.name] = seen.result
        packs = {
            pack_object_name(pack): size for index in indexes.values() for pack, size in index.packs.items()
        }
        self._reached.update(packs)
        sound: set[str] = set()
        for seen in self._seen(Wanted(name, self._sizes.get(name), size) for name, size in packs.items()):
            yield from self._steps(seen)
            if seen.finding is None:
                sound.add(seen.item.name)
        if self.deep and self._lines:
            # Those with a pack that is not sound were told of.
            whole = {
                name: index
                for name, index in sorted(indexes.items())
                if sound.issuperset(map(pack_object_name, index.packs))
            }
            yield from self._look_at_blocks(whole, {name: each for name, (each, _) in wanted.items()})

    def _look_at_blocks(
        self, indexes: dict[str, Checkpoint], descriptors: dict[str, CheckpointDescriptor]
    ) -> Iterator[Step]:
        """Each list of blocks once, for all checkpoints that have it."""
        items = {name: lists_of(descriptors[name], index) for name, index in indexes.items()}
        once = {item.what: item for each in items.values() for item in each}
        looked: dict[Any, Looked] = {
            seen.item.what: seen.result  # type: ignore[union-attr]
            for seen in self._seen(once.values(), line=self._lines[0])
        }
        told: set[ListEntry] = set()
        for name, index in indexes.items():
            for what in add_up(index, (looked[item.what] for item in items[name]), told):
                yield self._wrong(what, name, HINTS["checkpoint"], descriptors[name].seq)

    # ------------------------------------------------------------------ what nothing reaches

    def _look_at_the_rest(self) -> Iterator[Step]:
        if self._seqs is not None:
            return
        following = self._following()
        rest = [name for name in self._sizes if name not in self._reached]
        if not all(line.whole for line in self._lines):
            # They may well be what the damaged part of the catalogue reaches.
            rest = [name for name in rest if parse(name) is None]
        items = [
            Unreached(name, self._sizes[name], name in following, name in self._checked)
            for name in rest
            if not self._is_newer(name)
        ]
        for seen in self._seen(items):
            yield from self._steps(seen)

    def _is_newer(self, name: str) -> bool:
        """Whether it is a manifest that was published since."""
        found = parse(name)
        return found is not None and found.type == "manifest" and _place(found) > self._newest

    def _following(self) -> set[str]:
        """The segments beyond the newest manifest that a restore would follow."""
        line = self._lines[0] if self._lines else None
        if self.cluster_id is None or line is None or not line.whole:
            return set()
        archive = Archive(self._store, self.cluster_id)
        try:
            return {segment_name(each) for each in archive.segments_after(line.manifest, line.catalogue)}
        except DataError:
            return set()  # which one is damaged is found as with all others that are not recorded


def _place(found: ObjectName) -> tuple[int, int]:
    return found.epoch, found.seq


def is_archive(store: Store) -> bool:
    """Whether there is anything of an archive in a store."""
    return any(parse(found.name) is not None for found in store.list())
