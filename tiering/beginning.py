"""What lies in the stores of a tier, asked before a database is made beside them.

Always true:
  - nothing is written, here and there, before every store has answered: one that does not, or may not be
    asked, ends it with its own error;
  - a database is made only where none of the stores has a history. That there is no archive, the answer to a
    request for `cluster.cbor` says; that one has no history, its states, and a list that shows this object;
  - an archive without a history is taken over, with its cluster id: whoever began it had shipped nothing when
    its directory was lost. Where it lives after all, the claims of epochs tell the two apart, as those of two
    copies of one directory;
  - the archive is there, and can be written, before the directory is made. So whatever refuses it leaves no
    directory behind, and what a crash leaves is begun again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from lowwater.engine.format.entries import Writable
from lowwater.engine.log.log import LogOptions, new_create_entry
from lowwater.engine.seams.failpoints import Failpoint
from lowwater.engine.seams.seams import Randomness
from lowwater.errors import (
    Corrupt,
    DatabaseMissing,
    InvalidConfig,
    LowwaterError,
    NotFound,
    OtherCluster,
    StoreMissing,
    StoreReadOnly,
)
from lowwater.tiering.archive import open_archive
from lowwater.tiering.names import CHECKPOINTS, CLUSTER, MANIFESTS, WAL
from lowwater.tiering.open_store import open_store
from lowwater.tiering.store import Store
from lowwater.tiering.store_uri import StorePlace, parse_uri

if TYPE_CHECKING:
    from lowwater.config import TierConfig

BEFORE_ARCHIVE = Failpoint("begin.before_archive")
AFTER_ARCHIVE = Failpoint("begin.after_archive")

# Whatever has a history has objects in one of these.
HISTORY = (CHECKPOINTS, MANIFESTS, WAL)


class ArchivePlace(NamedTuple):
    """A store of a tier. `named` is its URI where it is not that of the configuration."""

    place: StorePlace
    named: str | None


def places_of(tier: str | None, config: TierConfig) -> list[ArchivePlace]:
    """The stores of a tier, the first of which is where the log is read from. None where there is no tier."""
    if tier is not None and (not isinstance(tier, str) or not tier):
        raise InvalidConfig(f"the tier is {tier!r:.80}", hint="give a URI, as s3://bucket/prefix")
    uri = tier or config.store_uri()
    if uri is None:
        if config.regions:
            raise InvalidConfig(
                "tier.regions are copies of the store that tier.uri names, and there is no uri",
                hint="set tier.uri, or give tier=",
            )
        return []
    is_configured = uri == config.store_uri()
    first = ArchivePlace(
        parse_uri(uri, dict(config.options) if is_configured else {}), None if is_configured else uri
    )
    return [first, *(ArchivePlace(parse_uri(each), each) for each in config.regions)]


def may_be_made(place: StorePlace) -> bool:
    """Whether its folder is made where an archive begins: what lies below a file system that is not mounted
    is not."""
    return place.kind == "file" and os.path.isdir(os.path.dirname(place.path))


def require_no_history(path: str, tier: str | None, config: TierConfig) -> bytes | None:
    """The cluster id that a new database in the directory `path` has to have: that of the archive which waits
    for it. None where there is none. Raises DatabaseMissing where a store has a history."""
    found: dict[bytes, str] = {}
    for each in places_of(tier, config):
        try:
            cluster_id = _look(each, config)
        except LowwaterError as error:
            if isinstance(error, DatabaseMissing):
                error.message = f"there is no database in {path}, and the archive has the history of one"
            else:
                error.hint = (
                    f"there is no database in {path}, and none is made before it is known what its archive "
                    f"has. {error.hint}"
                )
            raise
        if cluster_id is not None:
            found[cluster_id] = each.place.uri
    if len(found) > 1:
        raise OtherCluster(
            f"two stores of the tier have archives of two clusters: {' and '.join(found.values())}",
            path=path,
            hint="give a prefix of its own to each database",
        )
    return next(iter(found), None)


def _look(where: ArchivePlace, config: TierConfig) -> bytes | None:
    try:
        store = open_store(where.named, config=config, read_only=True)
    except StoreMissing:
        if may_be_made(where.place):
            return None
        raise
    with closing(store):
        return cluster_without_history(store)


def cluster_without_history(store: Store) -> bytes | None:
    """The id of the archive in a store, None where there is none. Raises DatabaseMissing where it has a
    history."""
    try:
        archive = open_archive(store)
    except NotFound:
        for folder in HISTORY:
            if next(store.list(folder), None) is not None:
                raise Corrupt(
                    f"there is a history here, and nothing says whose it is: {CLUSTER} is gone",
                    path=store.uri,
                    hint="whoever still ships here writes it again; else bring it back from another copy of "
                    "the archive",
                ) from None
        return None
    state = archive.states.newest()
    is_listed = False
    if archive.parent is not None or (state is not None and state.manifest):
        raise DatabaseMissing("the archive has a history", path=store.uri)
    for found in store.list():
        if found.name.startswith(HISTORY):
            raise DatabaseMissing("the archive has a history", path=store.uri)
        is_listed = is_listed or found.name == CLUSTER
    if not is_listed:
        raise Corrupt(
            f"the store's list lacks {CLUSTER}, which is there: it may lack a history as well",
            path=store.uri,
            hint="look at the store: `lowwater tier ls` prints what it lists",
        )
    return archive.cluster_id


def require_writable(tier: str | None, config: TierConfig) -> None:
    """Raises where nobody could go on with what the archive has."""
    where = places_of(tier, config)[0]
    with closing(open_store(where.named, config=config, make=False)) as store:
        if getattr(store, "read_only", False):
            raise StoreReadOnly(
                "the archive can be read, but not written: nothing here could go on with it",
                path=store.uri,
                hint="give credentials that may write, or make a clone: `lowwater restore URI DIR --clone`",
            )


def begin_archive(
    stores: Sequence[Store], cluster_id: bytes | None, options: LogOptions, randomness: Randomness
) -> Writable:
    """Create the archive in the first store, unless it is there, and return the first entry of the log that
    goes into it. `cluster_id` is what `require_no_history` has found; None makes a new one."""
    cluster_id = cluster_id or randomness.token(16)
    BEFORE_ARCHIVE()
    open_archive(stores[0], cluster_id, create=True)
    AFTER_ARCHIVE()
    return new_create_entry(options, randomness, cluster_id)
