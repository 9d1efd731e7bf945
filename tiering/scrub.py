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

from lowwater.engine.format.blocks import NO_HASH
from lowwater.engine.format.ckpt import Checkpoint, ListEntry
from lowwater.engine.log.check import Finding, Progress, Step
from lowwater.engine.state.catalogue import CheckpointDescriptor, Fork
from lowwater.errors import Corrupt, DataError, LowwaterError, NotFound
from lowwater.tiering.archive import Archive
from lowwater.tiering.names import (
    CLUSTER,
    EPOCHS,
    ObjectName,
    Type,
    checkpoint_name,
    listed_manifests,
    pack_object_name,
    parse,
    place_of,
    segment_name,
    short,
    state_name,
)
from lowwater.tiering.objects import (
    ArchiveState,
    Manifest,
    Parent,
    decode_cluster,
    decode_epoch,
    decode_manifest,
)
from lowwater.tiering.reached import WRONG, Line, catalogue_objects, follows, read_line
from lowwater.tiering.remedies import HINTS, REPLACED
from lowwater.tiering.scrub_checkpoints import Looked, add_up
from lowwater.tiering.scrub_objects import (
    Before,
    Item,
    KnownOfArchive,
    Look,
    SeenObject,
    Unreached,
    WantedCheckpoint,
    WantedObject,
    WantedSegment,
    WantedState,
    finding_of,
    lists_of,
    look_with_threads,
    read_verified,
    require_listed,
)
from lowwater.tiering.states import States, newest_manifests
from lowwater.tiering.store import Store, at
from lowwater.tiering.watched_store import WatchedStore

AT_ONCE = 16
AT_ONCE_DEEP = 4
# Of the states, so many of the last are read where not all are.
STATES_READ = 100
# What belongs to seqs. The rest of an archive says what there is.
OF_RANGE = ("segment", "manifest", "checkpoint", "pack")


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
        self.seqs = seqs
        self._look = look or look_with_threads(at_once or (AT_ONCE_DEEP if deep else AT_ONCE))
        # Before the list: what this manifest reaches was there before it, and so is in the list.
        self._states = States(store)
        self._newest_names = self._find_newest()
        self._newest = max(map(place_of, self._newest_names), default=(0, 0))
        self._sizes = {found.name: found.size for found in store.list()}
        # Which are there, and the store's list has not shown them.
        self._unlisted: set[str] = set()
        if self._size_of(CLUSTER) is None and not any(parse(name) is not None for name in self._sizes):
            raise NotFound("there is no archive here", path=store.uri, hint="check bucket and prefix")
        self.cluster_id: bytes | None = None
        self.manifest: Manifest | None = None
        self._lines: list[Line] = []
        # Epochs whose claims are named by states.
        self._claimed: set[int] = set()
        self._epoch_first = 1
        self._parent: Parent | None = None
        # Of the log's first entries, where it is no clone's.
        self._first_id: bytes | None = None
        self._reached: set[str] = set()
        self._checked: set[str] = set()
        self._found: list[Finding] = []
        # Those of the range that were looked at, with their sizes.
        self._looked: dict[str, int] = {}
        # Segments that are gone or damaged.
        self._unsound: set[str] = set()

    @property
    def objects(self) -> int:
        """All that are there; of a range those of it that were looked at so far."""
        return len(self._sizes if self.seqs is None else self._looked)

    @property
    def stored_bytes(self) -> int:
        """What they take: of all objects it is what the progress adds up to, about."""
        return sum((self._sizes if self.seqs is None else self._looked).values())

    @property
    def bytes_read(self) -> int:
        return self._store.bytes

    @property
    def requests(self) -> int:
        return self._store.requests

    def _find_newest(self) -> list[str]:
        try:
            return newest_manifests(self._store, self._states)
        except WRONG:  # which is told where all states are looked at
            return listed_manifests(self._store)

    def _size_of(self, name: str) -> int | None:
        """What the list says, and the store itself where that has not the name; None for what is gone."""
        if name not in self._sizes:
            try:
                self._sizes[name] = self._store.stat(name).size
            except NotFound:
                return None
            self._unlisted.add(name)
        return self._sizes[name]

    def findings(self) -> Iterator[Finding]:
        return (step for step in self.steps() if isinstance(step, Finding))

    def steps(self) -> Iterator[Step]:
        """Every finding, and for each object that was looked at a `Progress` with its size."""
        try:
            for part in (
                self._read_cluster,
                self._look_at_states,
                self._read_lines,
                self._look_at_claims,
                self._look_at_catalogues,
                self._look_at_segments,
                self._look_at_checkpoints,
                self._look_at_the_rest,
                self._tell_of_the_list,
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
        listed = self._size_of(name)
        require_listed(name, listed, None)
        data = read_verified(self._store, name, listed)
        self._checked.add(name)
        return data

    def _seen(self, items: Iterable[Item], *, line: Line | None = None) -> Iterator[SeenObject]:
        """What is seen of each, in order."""
        wanted = list(items)
        known = KnownOfArchive(self.deep, self.manifest, line)
        return self._look(self._store, known, wanted) if wanted else iter(())

    def _steps(self, seen: SeenObject) -> Iterator[Step]:
        found = parse(seen.item.name)
        if found is not None and found.type in OF_RANGE and seen.item.listed is not None:
            self._looked[seen.item.name] = seen.item.listed
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
        if len(self._newest_names) > 1:
            self._found.append(
                self._wrong(
                    "one entry has two manifests: two logs have written in one epoch",
                    self._newest_names[0],
                    "find out which of the two is right: `lowwater tier ls --long` lists both",
                )
            )
        names = {name for name, found in self._of_type("manifest") if found.place <= self._newest}
        for name in sorted(names.union(self._newest_names), reverse=True):
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

    # ------------------------------------------------------------------ states

    def _look_at_states(self) -> Iterator[Step]:
        """Check that the states grow, without gaps. What is wrong with one, those around it make good. What
        they name and the list does not is looked for by its name."""
        last = self._states.number
        names = [state_name(number) for number in range(1, last + 1)]
        self._reached.update(names)
        first = 0 if self.deep and self.seqs is None else max(0, last - STATES_READ)
        for name in names[:first]:
            if self._size_of(name) is None:
                yield self._of_state("the state is gone", name)
        before: ArchiveState | None = None
        for seen in self._seen(WantedState(name, self._size_of(name)) for name in names[first:]):
            yield Progress(seen.item.listed or 0)
            state: ArchiveState | None = seen.result
            if state is None:
                assert seen.finding is not None
                yield self._of_state(seen.finding.what, seen.item.name)
                continue
            if self.cluster_id not in (None, state.cluster_id):
                yield self._of_state("this state is of another cluster than the archive", seen.item.name)
            elif before is not None and (state.epoch < before.epoch or state.place < before.place):
                yield self._of_state("this state falls behind the one before it", seen.item.name)
            before = state
            if state.claim:
                self._claimed.add(state.epoch)
            for name in filter(None, (state.claim, state.manifest)):
                self._size_of(name)

    def _of_state(self, what: str, name: str) -> Finding:
        return Finding("warning", what, at(self._store.uri, name), hint=HINTS["state"])

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
                finding = self._wrong(what, name, HINTS["epoch"], fork.recorded_seq)
                if self._states.number and fork.epoch not in self._claimed:
                    # Only the list could have it: no state that was read says what it is called.
                    finding = finding._replace(severity="warning")
                self._found.append(finding)

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
            WantedObject(name, self._size_of(name), wanted[name], name in self._checked) for name in names
        ):
            yield from self._steps(seen)

    def _is_wanted_entry(self, name: str) -> bool:
        found = parse(name)
        return (
            self.seqs is None
            or found is None
            or found.type != "manifest"
            or self.seqs[0] <= found.seq <= self.seqs[1]
        )

    # ------------------------------------------------------------------ segments

    def _look_at_segments(self) -> Iterator[Step]:
        wanted = self._wanted_segments()
        self._reached.update(wanted)
        items = [
            item
            for item in wanted.values()
            if self.seqs is None
            or (item.descriptor.first <= self.seqs[1] and item.descriptor.last >= self.seqs[0])
        ]
        for seen in self._seen(items):
            yield from self._steps(seen)
            if seen.finding is not None:
                self._unsound.add(seen.item.name)

    def _wanted_segments(self) -> dict[str, WantedSegment]:
        wanted: dict[str, WantedSegment] = {}
        for line in self._lines:
            before: Before | None = Before(0, NO_HASH) if line.whole else None
            for descriptor in line.segments:
                # The last ones of a parent may have been recorded, and shipped, by its clone.
                by = line.catalogue.epoch_at(descriptor.recorded_seq) if line.whole else descriptor.epoch
                if by >= self._epoch_first:
                    name = segment_name(descriptor)
                    listed, owner = self._size_of(name), self._owner_at(line, descriptor.first)
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
        gone: list[SeenObject] = []
        for seen in self._seen(
            WantedCheckpoint(name, self._size_of(name), each, owner)
            for name, (each, owner) in wanted.items()
            if self.seqs is None or self.seqs[0] <= each.seq <= self.seqs[1]
        ):
            if seen.finding is not None and seen.item.listed is None:
                gone.append(seen)
                continue
            yield from self._steps(seen)
            if seen.result is not None:
                indexes[seen.item.name] = seen.result
        packs = {
            pack_object_name(pack): size for index in indexes.values() for pack, size in index.packs.items()
        }
        self._reached.update(packs)
        sound: set[str] = set()
        for seen in self._seen(WantedObject(name, self._size_of(name), size) for name, size in packs.items()):
            yield from self._steps(seen)
            if seen.finding is None:
                sound.add(seen.item.name)
        # Those with a pack that is not sound were told of.
        whole = {
            name: index
            for name, index in sorted(indexes.items())
            if sound.issuperset(map(pack_object_name, index.packs))
        }
        for seen in gone:
            descriptor, _ = wanted[seen.item.name]
            if seen.finding is not None and self._is_replaced(descriptor, [*whole.values()]):
                finding = seen.finding._replace(severity="warning", hint=REPLACED)
                yield from self._steps(seen._replace(finding=finding))
            else:
                yield from self._steps(seen)
        if self.deep and self._lines:
            yield from self._look_at_blocks(whole, {name: each for name, (each, _) in wanted.items()})

    def _is_replaced(self, checkpoint: CheckpointDescriptor, whole: list[Checkpoint]) -> bool:
        """Whether all that was in it can be read without it: in the log since the newest of the `whole` ones
        below it, or since the beginning. What a clone's parent has counts as read: that is told apart."""
        line = next((each for each in self._lines if checkpoint in [*each.checkpoints]), None)
        if line is None or not line.whole or line.catalogue.hwm < checkpoint.seq:
            return False
        below = [each for each in whole if each.seq < checkpoint.seq]
        base = max(below, key=lambda each: each.seq, default=None)
        first = 1
        if base is not None:
            opened = base.control_body.get("transactions", ())
            first = min([base.seq + 1, *(row[0] for row in opened)])
        for each in line.catalogue.segments_from(first):
            if each.first > checkpoint.seq:
                break
            name = segment_name(each)
            is_here = line.catalogue.epoch_at(each.recorded_seq) >= self._epoch_first
            if is_here and (name in self._unsound or self._size_of(name) is None):
                return False
        return True

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
        if self.seqs is not None:
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

    def _tell_of_the_list(self) -> Iterator[Step]:
        if self._unlisted:
            count, first = len(self._unlisted), min(self._unlisted)
            yield Finding(
                "note",
                f"the store's list lacks {count} objects that are there: {first}, for one",
                self._store.uri,
                hint="nothing to do: Lowwater does not conclude from a list that an object is gone",
            )

    def _is_newer(self, name: str) -> bool:
        """Whether it is a manifest that was published since, or its state."""
        found = parse(name)
        if found is not None and found.type == "state":
            return found.seq > self._states.number
        return found is not None and found.type == "manifest" and found.place > self._newest

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
