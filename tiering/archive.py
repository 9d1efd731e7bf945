"""An archive: what is in the store of one log, as its manifests say, and who may go on writing there.

Always true:
  - what counts is what the newest manifest of the newest epoch that has one reaches; everything else may be
    there, and means nothing;
  - a manifest is written when all that it reaches is there, and after those of all entries before it; it
    counts once a state names it (`states.py`), which nobody can do who was outrun;
  - who claims to write has seen the newest manifest after its claim could be seen, and who has published has
    looked for claims after its manifest could be seen. So of two that go on from one log, one sees the other:
    it stops with `Fenced`, and nothing of it counts any more. States see to it, whatever lists say; lists do
    where a store cannot keep a name that is taken.

The store has to show what was written to whoever lists or reads afterwards, as S3, GCS, Azure and folders do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from lowwater.engine.format import format
from lowwater.engine.format.blocks import NO_HASH
from lowwater.engine.format.format import SegmentHeader
from lowwater.engine.state.catalogue import Catalogue, Fork, ListHead, SegmentDescriptor
from lowwater.errors import (
    Busy,
    Corrupt,
    DataError,
    Fenced,
    LowwaterError,
    NotFound,
    OtherCluster,
    StoreCorrupt,
)
from lowwater.tiering.names import (
    CLUSTER,
    ObjectName,
    chunk_name,
    epoch_prefix,
    epochs_above,
    listed_epoch,
    parse,
    state_name,
    wal_prefix,
)
from lowwater.tiering.objects import (
    HINT,
    ArchiveState,
    EpochClaim,
    Manifest,
    Parent,
    decode_cluster,
    decode_epoch,
    decode_manifest,
    encode_cluster,
    manifest_of,
    require_hash,
)
from lowwater.tiering.states import States, newest_manifests
from lowwater.tiering.store import FoundObject, Store, at, is_there, read_small
from lowwater.tiering.verified_writes import KnownObjects, write_verified
from lowwater.tiering.verify import ObjectEnds, describe_object

HINT_NEWEST = (
    "restore this object from another copy of the archive, or open the database that shipped it, which then "
    "writes it again; or restore as of a seq before it: `lowwater restore --at`"
)

# Others who claim at the same time: more than that is no accident.
COLLISIONS_MAX = 100


class Claim(NamedTuple):
    """An epoch that is ours, from the `fork` on that says so, and what that has to name. `hwm` is that of the
    parent's newest manifest: it counts after `require_epoch`, as far as the log has recorded it."""

    epoch: int
    parent_segment: bytes
    parent_manifest: bytes
    hwm: int


class Archive:
    """Use `open_archive`."""

    def __init__(
        self,
        store: Store,
        cluster_id: bytes,
        parent: Parent | None = None,
        *,
        known: KnownObjects | None = None,
    ) -> None:
        """`known` is as for `write_verified`."""
        self.store = store
        self._known_objects = KnownObjects() if known is None else known
        self.cluster_id = cluster_id
        self.parent = parent
        self.states = States(store)
        # The name of the claim that was made here.
        self._claimed = ""
        # One that the store has not as it was written.
        self._claiming: EpochClaim | None = None
        # The heads of the newest manifest that is known to be there: what they reach is there too.
        self._published: dict[str, ListHead] | None = None

    # ------------------------------------------------------------------ reading

    def newest(self) -> Manifest | None:
        """The newest manifest that counts."""
        names = newest_manifests(self.store, self.states)
        if not names:
            return None
        if len(names) > 1:
            raise self._of_two(names[0])
        try:
            return self.read_manifest(names[0])
        except NotFound:
            raise Corrupt(
                "the newest manifest is gone", path=at(self.store.uri, names[0]), hint=HINT_NEWEST
            ) from None

    def newest_readable(self) -> Manifest | None:
        """The newest manifest, or the newest before it that can be read, if there is any."""
        try:
            return self.newest()
        except DataError:
            for state in self.states.down_from(self.states.number):
                if state.manifest:
                    try:
                        return self.read_manifest(state.manifest)
                    except (DataError, NotFound):
                        pass
            raise

    def read_manifest(self, name: str) -> Manifest:
        found = parse(name)
        assert found is not None
        data = read_small(self.store, name)
        try:
            require_hash(data, found.hash, "manifest")
            manifest = decode_manifest(data)
            if (manifest.epoch, manifest.seq) != (found.epoch, found.seq):
                raise Corrupt("this manifest is of another entry than its name says")
        except LowwaterError as error:
            error.path = at(self.store.uri, name)
            raise
        if manifest.cluster_id != self.cluster_id:
            raise OtherCluster("this manifest is of another cluster", path=at(self.store.uri, name))
        return manifest

    def _of_two(self, name: str) -> Corrupt:
        return Corrupt(
            "one entry has two manifests: two logs have written in one epoch",
            path=at(self.store.uri, name),
            hint="find out which of the two is right: `lowwater tier ls` lists both",
        )

    def catalogue_of(self, manifest: Manifest) -> Catalogue:
        """All that a manifest reaches, each chunk compared with its hash."""
        catalogue = Catalogue.from_body(manifest.body(), self._read_chunk)
        if catalogue.hwm != manifest.hwm or catalogue.recorded_seq > manifest.seq:
            raise Corrupt("a manifest does not add up", path=at(self.store.uri, manifest.name))
        for why in catalogue.damage():
            raise Corrupt(why, path=at(self.store.uri, manifest.name))
        return catalogue

    def _read_chunk(self, chunk_hash: bytes) -> bytes:
        name = chunk_name(chunk_hash)
        try:
            return read_small(self.store, name)
        except NotFound:
            # No wrong call, as a missing archive is: a manifest is written after what it reaches.
            raise Corrupt(
                "a part of the catalogue is gone", path=at(self.store.uri, name), hint=HINT
            ) from None

    def segments_after(self, manifest: Manifest | None, catalogue: Catalogue) -> Iterator[SegmentDescriptor]:
        """The segments that follow those of the newest manifest, as far as one follows another: in its epoch,
        and in the epochs before it up to where they were forked. They were shipped, and no manifest says so
        yet, or none of this line: who was restored records again what its log lacks, one segment after the
        other. Where two would follow, none is taken: nobody knows which log goes on. A damaged one of its own
        epoch does not follow: nothing has ever rested on it. One of an epoch before may have counted, and is
        told."""
        seq, segment_hash = catalogue.hwm, catalogue.hash_last
        following: dict[tuple[int, bytes], list[SegmentDescriptor]] = {}
        epochs = [(1 if manifest is None else manifest.epoch, format.SEQ_MAX)]
        epochs += [(fork.parent_epoch, fork.seq) for fork in catalogue.forks if fork.seq > seq]
        for epoch, last in epochs:
            prefix = wal_prefix(epoch)
            for each in self.store.list(prefix, f"{prefix}segment-{seq:020}-~"):
                found = parse(each.name)
                if found is None or found.type != "segment" or found.seq_last > last:
                    continue
                try:
                    header, described = self._describe(found, each)
                except DataError as error:
                    if last == format.SEQ_MAX:
                        continue
                    error.path, error.hint = at(self.store.uri, each.name), HINT
                    raise
                if header.cluster_id == self.cluster_id:
                    place = (header.seq_before, header.hash_before)
                    following.setdefault(place, []).append(described)
        while len(nexts := following.get((seq, segment_hash), [])) == 1:
            yield nexts[0]
            seq, segment_hash = nexts[0].last, nexts[0].hash

    def _describe(self, name: ObjectName, found: FoundObject) -> tuple[SegmentHeader, SegmentDescriptor]:
        """A segment by its two ends. What was damaged on the way is read once more."""
        try:
            return describe_object(name, ObjectEnds(self.store, found.name, found.size))
        except DataError:
            return describe_object(name, ObjectEnds(self.store, found.name, found.size))

    # ------------------------------------------------------------------ publishing

    def publish(self, catalogue: Catalogue, seq: int) -> Manifest:
        """Write the manifest of the entry `seq`, which is durable in the log, and what it reaches, and read
        it back. It counts only after `require_epoch`. The manifests of entries before it are there."""
        manifest = manifest_of(catalogue, self.cluster_id, seq)
        data = self._write_manifest(catalogue, manifest, self._known())
        try:
            is_kept = self.store.read(manifest.name) == data
        except NotFound:
            is_kept = False
        if not is_kept:
            raise StoreCorrupt("a manifest is not what was written", path=at(self.store.uri, manifest.name))
        self.have_count(manifest, catalogue.epoch_at(format.SEQ_MAX))
        self._published = manifest.heads
        return manifest

    def have_count(self, manifest: Manifest, epoch: int) -> None:
        """Make a state name the manifest, or a later one. Raise Fenced where somebody has claimed a higher
        epoch than this log's: its manifest may be of an entry that an earlier life has left."""
        place = (manifest.epoch, manifest.seq)
        state = self.states.seen or self.states.newest()
        while state is None or state.place < place:
            claim = self._claimed
            if state is not None:
                self._require_ours(state, epoch)
                claim = state.claim if state.epoch == epoch else self._claimed
            self.states.append(self.cluster_id, epoch, claim, manifest.name)
            state = self.states.seen
        self._require_ours(state, epoch)
        if state.place == place and state.manifest != manifest.name:
            raise self._of_two(state.manifest)

    def _require_ours(self, state: ArchiveState, epoch: int) -> None:
        if state.cluster_id != self.cluster_id:
            raise OtherCluster(
                "this state is of another cluster", path=at(self.store.uri, state_name(state.number))
            )
        if state.epoch > epoch:
            raise self._fenced(
                f"epoch {epoch} is over: somebody has claimed a higher one", state.claim or state.manifest
            )
        if state.epoch == epoch and self._claimed and state.claim not in ("", self._claimed):
            raise self._fenced(f"somebody else has claimed epoch {epoch} as well", state.claim)

    def bring_newest(self, catalogue: Catalogue) -> None:
        """Where the manifest that counts is gone, and the log has its entry, write it again."""
        state = self.states.newest()
        if state is None or is_there(self.store, state.manifest or CLUSTER):
            return
        manifest = manifest_of(catalogue, self.cluster_id, state.place[1])
        if manifest.name == state.manifest:
            self._write_manifest(catalogue, manifest, {})

    def bring_claims(self, forks: Iterable[Fork], *, token: Callable[[int], bytes], owner: str) -> None:
        """Where the claims of a log's epochs are gone, claim them again: it has each of them by a `fork`."""
        for fork in forks:
            if fork.cluster_id == self.cluster_id and not any(self.store.list(epoch_prefix(fork.epoch))):
                claim = EpochClaim(
                    self.cluster_id, fork.epoch, fork.parent_epoch, fork.parent_manifest, token(16), owner
                )
                self._write(claim.name, claim.encode())

    def forget(self) -> None:
        """Take nothing for there that a manifest reaches."""
        self._published = {}

    def _known(self) -> dict[str, ListHead]:
        if self._published is None:
            newest = self.newest()
            self._published = {} if newest is None else newest.heads
        return self._published

    def _write_manifest(
        self, catalogue: Catalogue, manifest: Manifest, known: Mapping[str, ListHead]
    ) -> bytes:
        """With what it reaches, but for what those that are `known` reach. Its bytes."""
        for chunk_hash, data in catalogue.objects(manifest.heads, known):
            self._write(chunk_name(chunk_hash), data)
        data = manifest.encode()
        self._write(manifest.name, data)
        return data

    def _write(self, name: str, data: bytes) -> bool:
        return write_verified(self.store, name, lambda: [data], size=len(data), known=self._known_objects)

    def unpublished(self, catalogue: Catalogue) -> list[int]:
        """The entries whose manifests are missing, in order: each gets its own. Raises Fenced where the
        newest one is not of this log."""
        newest = self._require_past(catalogue, NO_HASH)
        return catalogue.seqs_after(0 if newest is None else seq_published(catalogue, newest))

    def require_epoch(self, epoch: int) -> None:
        """Raise Fenced where somebody has claimed a higher epoch. What was read back before counts, where
        nobody has."""
        for name in epochs_above(self.store, epoch):
            raise self._fenced(f"epoch {epoch} is over: somebody has claimed a higher one", name)
        state = self.states.newest()
        if state is not None:
            self._require_ours(state, epoch)

    # ------------------------------------------------------------------ claiming

    def claim(
        self,
        catalogue: Catalogue,
        epoch: int,
        *,
        token: Callable[[int], bytes],
        owner: str = "",
        follows: bytes = NO_HASH,
    ) -> Claim:
        """Claim the next epoch for the log with this catalogue, which is in `epoch` so far. `follows` is the
        hash of the manifest that a restore began with, whose own entry its log lacks. The claim is good once
        the `fork` is in the log: whoever sees another manifest than those of its past gets Fenced."""
        if self._claiming is not None:
            self._write_claim(self._claiming)
        before = self._require_past(catalogue, follows)
        epoch_next = max(epoch, self.newest_epoch()) + 1
        for _ in range(COLLISIONS_MAX):
            ours = EpochClaim(self.cluster_id, epoch_next, epoch, _hash_of(before), token(16), owner)
            self._write_claim(ours)
            others = {name for name in epochs_above(self.store, epoch_next - 1) if name != ours.name}
            higher = [name for name in others if epoch_of(name) > epoch_next]
            if higher:
                raise self._fenced(
                    f"somebody has claimed a higher epoch than {epoch_next} meanwhile", higher[0]
                )
            if not others:
                # Whoever had this log before may have published one more meanwhile: a claim names what it
                # follows. And nothing may come between what is seen here and the state that says so.
                before = self._require_past(catalogue, follows)
                if _hash_of(before) == ours.parent_manifest and self._append_claim(ours, before):
                    self._claimed = ours.name
                    if before is None:
                        return Claim(epoch_next, NO_HASH, NO_HASH, 0)
                    return Claim(epoch_next, self._last_hash(catalogue, before), before.hash, before.hwm)
            epoch_next += 1
        raise Busy("too many others claim to write at the same time", path=self.store.uri, hint="open again")

    def _write_claim(self, claim: EpochClaim) -> None:
        self._claiming = claim
        self._write(claim.name, claim.encode())
        self._claiming = None

    def newest_epoch(self) -> int:
        """The highest that was claimed, 0 for none."""
        state = self.states.newest()
        return max(listed_epoch(self.store), 0 if state is None else state.epoch)

    def _append_claim(self, claim: EpochClaim, parent: Manifest | None) -> bool:
        """Append the state that names a claim. Return False where another one has come first."""
        before = self.states.seen
        if before is not None:
            self._require_ours(before, claim.epoch)
            if before.epoch == claim.epoch:
                return False
        return self.states.append(
            self.cluster_id, claim.epoch, claim.name, "" if parent is None else parent.name
        )

    def _last_hash(self, catalogue: Catalogue, parent: Manifest) -> bytes:
        """Return the hash of a manifest's last segment. A restored log may not have recorded that."""
        own = catalogue.segment_of(parent.hwm)
        return self.catalogue_of(parent).hash_last if own is None else own.hash

    def _require_past(self, catalogue: Catalogue, follows: bytes) -> Manifest | None:
        """The newest manifest, which has to be one of this log's own past."""
        newest = self.newest()
        if newest is None or self.is_past(catalogue, newest) or newest.hash == follows:
            return newest
        raise self._fenced("the archive goes on where this log does not", newest.name)

    def is_past(self, catalogue: Catalogue, manifest: Manifest) -> bool:
        """Whether the log has the entry that caused this manifest, or has begun with it by a fork."""
        if any(fork.parent_manifest == manifest.hash for fork in catalogue.forks):
            return True
        if next(iter(catalogue.seqs_after(manifest.seq - 1)), 0) != manifest.seq:
            return False
        return manifest_of(catalogue, self.cluster_id, manifest.seq) == manifest

    def _fenced(self, what: str, name: str) -> Fenced:
        """The error, with the claim of whoever goes on: `name` is that, or a manifest of its epoch."""
        found = parse(name)
        if found is not None:
            try:
                for each in self.store.list(epoch_prefix(found.epoch)):
                    what = f"{what}: {self._read_claim(each.name).owner}"
            except LowwaterError:
                pass  # that it is there is enough
        return Fenced(what, path=at(self.store.uri, name))

    def _read_claim(self, name: str) -> EpochClaim:
        found = parse(name)
        assert found is not None
        data = read_small(self.store, name)
        require_hash(data, found.hash, "claim")
        return decode_epoch(data)


def seq_published(catalogue: Catalogue, newest: Manifest) -> int:
    """The entry up to which all of this log's have their manifests, where `newest` is of its past. A log that
    was restored has lost its parent's last ones, and goes on below them: what follows its fork is its own."""
    forks = (fork.recorded_seq for fork in catalogue.forks if fork.epoch > newest.epoch)
    return min(newest.seq, next(forks, newest.seq))


def _hash_of(manifest: Manifest | None) -> bytes:
    return NO_HASH if manifest is None else manifest.hash


def epoch_of(name: str) -> int:
    found = parse(name)
    return 0 if found is None else found.epoch


def open_archive(
    store: Store,
    cluster_id: bytes | None = None,
    *,
    create: bool = False,
    parent: Parent | None = None,
    known: KnownObjects | None = None,
) -> Archive:
    """The archive in this store: of this cluster, or, for who only reads, of whichever it is. `create` makes
    one where there is none, of a clone with its parent. `known` is as for `write_verified`."""
    if create:
        assert cluster_id is not None
        data = encode_cluster(cluster_id, parent)
        write_verified(store, CLUSTER, lambda: [data], size=len(data), known=known)
    try:
        data = read_small(store, CLUSTER)
    except NotFound:
        raise NotFound("there is no archive here", path=store.uri, hint="check bucket and prefix") from None
    try:
        found = decode_cluster(data)
    except LowwaterError as error:
        error.path = at(store.uri, CLUSTER)
        raise
    if cluster_id is not None and found.cluster_id != cluster_id:
        raise OtherCluster(
            f"the archive is of the cluster {found.cluster_id.hex()}, not {cluster_id.hex()}", path=store.uri
        )
    return Archive(store, found.cluster_id, found.parent, known=known)
