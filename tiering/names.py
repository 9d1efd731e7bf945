"""What objects are called, below the prefix of an archive.

    cluster.cbor                                            whose archive this is
    epochs/<n>-<hash>.cbor                                  a claim to write
    states/<n>.cbor                                         who may write, and which manifest counts
    wal/<epoch>/segment-<first>-<last>-<hash>.log           a sealed segment, raw or compressed
    manifest/<epoch>/<seq>-<hash>.cbor                      the catalogue as of an entry: a head over chunks
    manifest/chunks/<hash>.cbor                             part of the catalogue
    checkpoints/checkpoint-<seq>-<hash>.ckpt                the index of a checkpoint
    data/packs/<hash>.pack                                  blocks of checkpoints

Always true: a name is a function of what the object holds, but for the one cluster and the numbered states:
it never stands for anything else; epochs have 10 digits and seqs 20, so names sort as they were written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from lowwater.engine.format.ckpt import name_of, pack_name, parse_name
from lowwater.engine.state.catalogue import CheckpointDescriptor, SegmentDescriptor
from lowwater.errors import LimitExceeded
from lowwater.tiering.store import Store

CLUSTER = "cluster.cbor"
EPOCHS = "epochs/"
STATES = "states/"
WAL = "wal/"
MANIFESTS = "manifest/"
CHUNKS = "manifest/chunks/"
CHECKPOINTS = "checkpoints/"
PACKS = "data/packs/"

HASH_DIGITS = 16
EPOCH_MAX = 10**10 - 1
# Sorts after every digit and letter that a name has.
_AFTER_ALL = "~"
# What a store lists in one request, more or less.
LISTED_AT_ONCE = 1000

Type = Literal["cluster", "epoch", "state", "segment", "manifest", "chunk", "checkpoint", "pack"]


class ObjectName(NamedTuple):
    """What a name says. `hash` is as many hexadecimal digits of it as the name has."""

    type: Type
    hash: str = ""
    epoch: int = 0
    seq: int = 0
    """The seq of an entry, of a checkpoint, or of the first entry of a segment; the number of a state."""
    seq_last: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """Return the epoch and the entry of a manifest. By these one manifest is newer than another."""
        return self.epoch, self.seq


def short(content_hash: bytes) -> str:
    return content_hash.hex()[:HASH_DIGITS]


def epoch_name(epoch: int, content_hash: bytes) -> str:
    return f"{epoch_prefix(epoch)}{short(content_hash)}.cbor"


def epoch_prefix(epoch: int) -> str:
    require_epoch(epoch)
    return f"{EPOCHS}{epoch:010}-"


def state_name(number: int) -> str:
    return f"{STATES}{number:020}.cbor"


def segment_name(segment: SegmentDescriptor) -> str:
    return (
        f"{wal_prefix(segment.epoch)}segment-{segment.first:020}-{segment.last:020}-{short(segment.hash)}.log"
    )


def wal_prefix(epoch: int) -> str:
    require_epoch(epoch)
    return f"{WAL}{epoch:010}/"


def manifest_name(epoch: int, seq: int, content_hash: bytes) -> str:
    return f"{manifest_prefix(epoch)}{seq:020}-{short(content_hash)}.cbor"


def manifest_prefix(epoch: int) -> str:
    require_epoch(epoch)
    return f"{MANIFESTS}{epoch:010}/"


def chunk_name(content_hash: bytes) -> str:
    return f"{CHUNKS}{content_hash.hex()}.cbor"


def checkpoint_name(checkpoint: CheckpointDescriptor) -> str:
    return CHECKPOINTS + name_of(checkpoint.seq, checkpoint.hash)


def pack_object_name(content_hash: bytes) -> str:
    return PACKS + pack_name(content_hash)


def require_epoch(epoch: int) -> None:
    if epoch > EPOCH_MAX:
        raise LimitExceeded(
            f"the epoch {epoch} has more than 10 digits", hint="no archive takes it: restore into a new one"
        )


_NAMES: tuple[tuple[Type, re.Pattern[str]], ...] = (
    ("epoch", re.compile(r"epochs/(?P<epoch>\d{10})-(?P<hash>[0-9a-f]{16})\.cbor")),
    ("state", re.compile(r"states/(?P<seq>\d{20})\.cbor")),
    (
        "segment",
        re.compile(
            r"wal/(?P<epoch>\d{10})/segment-(?P<seq>\d{20})-(?P<seq_last>\d{20})-(?P<hash>[0-9a-f]{16})\.log"
        ),
    ),
    ("manifest", re.compile(r"manifest/(?P<epoch>\d{10})/(?P<seq>\d{20})-(?P<hash>[0-9a-f]{16})\.cbor")),
    ("chunk", re.compile(r"manifest/chunks/(?P<hash>[0-9a-f]{64})\.cbor")),
    ("pack", re.compile(r"data/packs/(?P<hash>[0-9a-f]{64})\.pack")),
)


def parse(name: str) -> ObjectName | None:
    """What a name says; None for one that no object of an archive has."""
    if name == CLUSTER:
        return ObjectName("cluster")
    if name.startswith(CHECKPOINTS):
        found = parse_name(name.removeprefix(CHECKPOINTS))
        return None if found is None else ObjectName("checkpoint", found[1], seq=found[0])
    for kind, pattern in _NAMES:
        match = pattern.fullmatch(name)
        if match is not None:
            fields = match.groupdict()
            return ObjectName(
                kind,
                fields.get("hash", ""),
                int(fields.get("epoch", 0)),
                int(fields.get("seq", 0)),
                int(fields.get("seq_last", 0)),
            )
    return None


def place_of(name: str) -> tuple[int, int]:
    """The place of the manifest of this name; zeros for no name."""
    found = parse(name)
    return (0, 0) if found is None else found.place


# ---------------------------------------------------------------------------- the highest in lists


def listed_state(store: Store) -> int:
    """The highest number of a state that lists show, 0 for none."""
    return _highest(store, STATES, lambda number: f"{STATES}{number:020}{_AFTER_ALL}", "state", "seq")


def listed_epoch(store: Store) -> int:
    """The highest that lists show, 0 for none. Few requests, however many there are."""
    return _highest(store, EPOCHS, lambda epoch: f"{EPOCHS}{epoch:010}-{_AFTER_ALL}", "epoch", "epoch")


def epochs_above(store: Store, epoch: int) -> Iterator[str]:
    """The objects of higher epochs."""
    for found in store.list(EPOCHS, f"{EPOCHS}{epoch:010}-{_AFTER_ALL}"):
        name = parse(found.name)
        if name is not None and name.epoch > epoch:
            yield found.name


def listed_manifests(store: Store) -> list[str]:
    """Return the names of the manifests of the newest entry in the newest epoch that lists have any of. There
    is one where all is well."""
    epoch = _highest(
        store, MANIFESTS, lambda each: f"{MANIFESTS}{each:010}/{_AFTER_ALL}", "manifest", "epoch"
    )
    if not epoch:
        return []
    prefix = manifest_prefix(epoch)
    seq = _highest(store, prefix, lambda each: f"{prefix}{each:020}-{_AFTER_ALL}", "manifest", "seq")
    found = {each.name for each in store.list(f"{prefix}{seq:020}-")}
    return sorted(name for name in found if parse(name) is not None)


def _highest(store: Store, prefix: str, after: Callable[[int], str], kind: Type, field: str) -> int:
    """The highest number in the names that begin so; 0 for none. Names sort by it."""

    def tail(number: int) -> tuple[int, bool]:
        """The highest of those next to this number, itself where there is none, and whether that is all."""
        highest, count = number, 0
        for found in store.list(prefix, after(number)):
            name = parse(found.name)
            if name is not None and name.type == kind:
                highest, count = max(highest, getattr(name, field)), count + 1
                if count == LISTED_AT_ONCE:
                    return highest, False
            elif found.name > after(10**20 - 1):
                break  # chunks come after all epochs
        return highest, True

    low, is_last = tail(0)
    step = max(1, low)
    high = 0
    while not is_last and not high:
        found, is_last = tail(low + step)
        if found == low + step and is_last:
            high, is_last = found, False
        else:
            low, step = found, step * 2
    while not is_last and low < high:
        middle = (low + high) // 2
        found, ended = tail(middle)
        if found == middle and ended:
            high = middle
        else:
            low, is_last = found, ended
    return low
