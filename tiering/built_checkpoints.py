"""Checkpoints that are listed below an archive's `checkpoints/`, though no manifest names them.

Whoever has the log can make one, on other machines than the database's (`spark/building.py`). Always
true: nothing of such a one is believed but what can be compared. Its index is what its name says, of this
cluster and this seq, and its packs are there; whoever reads it compares each block with the hash that leads
to it from there. Of a seq there is one, since it is a function of the log: where two are listed that can be
read, nobody knows which is it, and neither counts.
"""

from __future__ import annotations

from collections.abc import Iterator

from lowwater.engine.format.ckpt import decode_named
from lowwater.engine.state.catalogue import CheckpointDescriptor, describe_checkpoint
from lowwater.errors import (
    DataError,
    DeniedError,
    InputError,
    LogDivergence,
    LowwaterError,
    OtherCluster,
    StoreCorrupt,
)
from lowwater.logging import get_logger
from lowwater.tiering.names import CHECKPOINTS, pack_object_name, parse
from lowwater.tiering.store import Store, at, read_small

_logger = get_logger("archive")


def built_checkpoints(
    store: Store, above: int, seq: int, cluster_id: bytes
) -> Iterator[CheckpointDescriptor]:
    """Yield the checkpoints in a store with a seq above `above` and up to `seq`, the newest first. One that
    cannot be used is passed over: nobody has promised that it is there."""
    names: dict[int, list[str]] = {}
    for each in store.list(CHECKPOINTS, f"{CHECKPOINTS}checkpoint-{above:020}-~"):
        found = parse(each.name)
        if found is not None and above < found.seq <= seq:
            names.setdefault(found.seq, []).append(each.name)
    for of_seq in sorted(names, reverse=True):
        verified = []
        for name in names[of_seq]:
            try:
                verified.append(_verified(store, name, cluster_id))
            except (DataError, InputError, DeniedError) as error:
                pass_over(name, error)
        if len(verified) > 1:
            pass_over(names[of_seq][0], LogDivergence("there are two checkpoints of this seq", seq=of_seq))
        elif verified:
            yield verified[0]


def pass_over(name: str, error: LowwaterError) -> None:
    _logger.warning("a checkpoint that no manifest names is passed over", path=name, error=str(error))


def _verified(store: Store, name: str, cluster_id: bytes) -> CheckpointDescriptor:
    data = read_small(store, name)
    index = decode_named(data, name.rpartition("/")[2])
    if index.cluster_id != cluster_id:
        raise OtherCluster("this checkpoint is of another cluster", path=at(store.uri, name))
    for pack, size in index.packs.items():
        if store.stat(pack_object_name(pack)).size != size:
            raise StoreCorrupt("a pack has another size", path=at(store.uri, pack_object_name(pack)))
    return describe_checkpoint(data)
