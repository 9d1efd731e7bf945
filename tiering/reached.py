"""What an archive has to hold: all that its newest manifest reaches, by name and size.

Always true:
  - what a catalogue says is enough to know the name and the size of every manifest, chunk and run: they are
    computed, never guessed from what is there;
  - a `fork` names the manifest that it follows. The line before it goes on to there, also where the log that
    went on has lost the last of its entries;
  - where a part of the catalogue cannot be read, what that part would reach is not known, and nothing is
    concluded from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from lowwater.engine.format.blocks import NO_HASH, hash_of
from lowwater.engine.state.catalogue import (
    CHUNK_RECORDS,
    RUN_RECORDS,
    Catalogue,
    CheckpointDescriptor,
    Fork,
    ListHead,
    SegmentDescriptor,
    decode_chunk,
)
from lowwater.errors import Corrupt, DataError, LowwaterError, NewerVersion, NotFound
from lowwater.tiering.names import chunk_name, manifest_name
from lowwater.tiering.objects import Manifest, manifest_of

Read = Callable[[str], bytes]
"""The bytes of a small object, verified."""
Tell = Callable[[LowwaterError, str], None]
"""What was found wrong with the object of a name."""

# What can be wrong with an object; anything else is wrong with the store, or with the request.
WRONG = (DataError, NewerVersion, NotFound)

_LISTS: dict[str, type[Any]] = {
    "segments": SegmentDescriptor,
    "checkpoints": CheckpointDescriptor,
    "forks": Fork,
}


class Line(NamedTuple):
    """A manifest and what its catalogue says; of the newest one, or of one that a `fork` follows. `whole` is
    false where a part of it could not be read: then `catalogue` is empty, and `records` are what is left."""

    manifest: Manifest
    catalogue: Catalogue
    records: dict[str, list[Any]]
    whole: bool
    seq_after: int
    """Entries above this one are of this line only: up to here, the line that went on has them too."""

    @property
    def segments(self) -> Iterator[SegmentDescriptor]:
        return iter(self.catalogue.segments) if self.whole else iter(self.records["segments"])

    @property
    def checkpoints(self) -> Iterator[CheckpointDescriptor]:
        return iter(self.catalogue.checkpoints) if self.whole else iter(self.records["checkpoints"])

    @property
    def forks(self) -> Iterator[Fork]:
        return iter(self.catalogue.forks) if self.whole else iter(self.records["forks"])


def read_line(manifest: Manifest, seq_after: int, read: Read, tell: Tell) -> Line:
    """All that can be read of a manifest's catalogue."""
    parts: dict[bytes, bytes] = {}
    records: dict[str, list[Any]] = {}
    whole = True
    for name, made in _LISTS.items():
        head = manifest.heads[name]
        found = records[name] = []
        counts = [CHUNK_RECORDS] * len(head.chunks) + [RUN_RECORDS] * len(head.runs)
        for part_hash, count in zip([*head.chunks, *head.runs], counts, strict=True):
            try:
                data = read(chunk_name(part_hash))
                part = decode_chunk(name, made, data)
                if len(part) != count:
                    raise Corrupt(f"a part of the catalogue's {name} has {len(part)} records, not {count}")
            except WRONG as error:
                tell(error, chunk_name(part_hash))
                whole = False
                continue
            parts[part_hash] = data
            found += part
    catalogue = Catalogue()
    try:
        if whole:
            catalogue = Catalogue.from_body(manifest.body(), parts.__getitem__)
            require_sound(manifest, catalogue)
            records = {}
        else:
            for name, made in _LISTS.items():
                records[name] += (made(*row) for row in manifest.heads[name].rest)
    except (DataError, TypeError) as error:
        wrong = error if isinstance(error, DataError) else Corrupt("the catalogue cannot be read")
        tell(wrong, manifest.name)
        return Line(manifest, Catalogue(), {name: [] for name in _LISTS}, False, seq_after)
    return Line(manifest, catalogue, records, whole, seq_after)


def require_sound(manifest: Manifest, catalogue: Catalogue) -> None:
    if catalogue.hwm != manifest.hwm or catalogue.recorded_seq > manifest.seq:
        raise Corrupt("a manifest does not add up")
    for why in catalogue.damage():
        raise Corrupt(why)


def catalogue_objects(line: Line, cluster_id: bytes, epoch_first: int) -> Iterator[tuple[str, int]]:
    """The manifests of a line, from an epoch on, and the chunks and runs that they need: (name, size)."""
    assert line.whole
    catalogue = line.catalogue
    known: dict[str, ListHead] = {}
    for seq in catalogue.seqs_after(line.seq_after):
        if catalogue.epoch_at(seq) < epoch_first:
            continue
        manifest = manifest_of(catalogue, cluster_id, seq)
        for part_hash, data in catalogue.objects(manifest.heads, known):
            yield chunk_name(part_hash), len(data)
        known = manifest.heads
        data = manifest.encode()
        yield manifest_name(manifest.epoch, seq, hash_of(data)), len(data)


def follows(fork: Fork) -> bool:
    """Whether it went on with something that was published."""
    return fork.parent_manifest != NO_HASH
