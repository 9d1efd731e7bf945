"""The archive of a clone, read together with that of its parent: what it does not have itself lies there.

Always true:
  - what is written, listed or deleted is the clone's own. Only an object that it does not have is read from
    the parent: names are made of hashes, so it is the same object wherever it is;
  - where the parent lies, `cluster.cbor` says, or who opens it; an archive that is no clone's is not asked
    for more than that once, when it lacks something;
  - a parent that cannot be opened, or is another one, is an error that names it, and never an absence.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

from lowwater.errors import Closed, Corrupt, LowwaterError, NotFound, OtherCluster
from lowwater.tiering.archive import open_archive
from lowwater.tiering.checksums import Checksum, Hashing
from lowwater.tiering.names import CLUSTER, MANIFESTS, STATES
from lowwater.tiering.objects import Parent, decode_cluster
from lowwater.tiering.open_store import open_store
from lowwater.tiering.store import FoundObject, Part, Store, read_small
from lowwater.tiering.store_uri import parse_uri
from lowwater.tiering.verified_writes import pass_through

if TYPE_CHECKING:
    from lowwater.config import TierConfig

OpenParent = Callable[[Parent], Store]
T = TypeVar("T")

# A clone of a clone, and so on: more than that is a circle.
DEPTH_MAX = 32
# Of so many objects it is known that the parent has them.
KNOWN_MAX = 10_000


class Lineage:
    """Fulfils `Store`. The store is its own from now on."""

    def __init__(
        self, store: Store, open_parent: OpenParent, *, parent: Parent | None = None, depth: int = 0
    ) -> None:
        """`parent` is known to who opens a clone; else the archive says it."""
        self.uri = store.uri
        self._store = store
        self._open_parent = open_parent
        self._parent = parent
        self._depth = depth
        self._lock = threading.Lock()
        self._is_known = parent is not None
        self._above: Lineage | None = None
        self._known: dict[str, None] = {}
        self._closed = False

    @property
    def hashing(self) -> Hashing | None:
        return self._store.hashing

    def write(self, name: str, parts: Iterable[Part], *, size: int | None) -> bool | None:
        return self._store.write(name, parts, size=size)

    def replace(self, name: str, parts: Iterable[Part], *, size: int | None) -> None:
        self._store.replace(name, parts, size=size)

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        return self._call(name, lambda store: store.read(name, start, end))

    def stat(self, name: str) -> FoundObject:
        return self._call(name, lambda store: store.stat(name))

    def checksum(self, name: str) -> Checksum:
        return self._call(name, lambda store: store.checksum(name))

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[FoundObject]:
        return self._store.list(prefix, start_after)

    def copy(self, source: str, target: str) -> bool:
        """The copy is the clone's own, wherever the object lies."""
        try:
            return self._store.copy(source, target)
        except NotFound:
            return pass_through(self, source, self._store, target)

    def delete(self, name: str) -> None:
        self._store.delete(name)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._above is not None:
                self._above.close()
        self._store.close()

    # ------------------------------------------------------------------ the parent

    def _call(self, name: str, call: Callable[[Store], T]) -> T:
        if name in self._known and self._above is not None:
            return call(self._above)
        try:
            return call(self._store)
        except NotFound:
            # Whose an archive is, and what counts in it, only itself says.
            if name == CLUSTER or name.startswith((MANIFESTS, STATES)):
                raise
            above = self._opened()
            if above is None:
                raise
        found = call(above)
        # Others must not add to it between the two.
        with self._lock:
            self._known[name] = None
            if len(self._known) > KNOWN_MAX:
                del self._known[next(iter(self._known))]
        return found

    def _opened(self) -> Lineage | None:
        with self._lock:
            if self._above is not None:
                return self._above
            if self._closed:
                raise Closed(f"{self.uri} was closed")
            parent = self._named()
            if parent is not None:
                self._above = self._open(parent)
            return self._above

    def _named(self) -> Parent | None:
        if not self._is_known:
            try:
                self._parent = decode_cluster(read_small(self._store, CLUSTER)).parent
            except NotFound:
                return None
            self._is_known = True
        return self._parent

    def _open(self, parent: Parent) -> Lineage:
        if self._depth >= DEPTH_MAX:
            raise Corrupt("this archive is a clone of itself", path=self.uri, hint="it names a wrong parent")
        try:
            store = self._open_parent(parent)
            try:
                open_archive(store, parent.cluster_id)
            except BaseException:
                store.close()
                raise
        except (NotFound, OtherCluster) as error:
            raise Corrupt(
                f"what this clone has of its parent is not at {parent.uri}: {error.message}",
                path=self.uri,
                hint="its history up to the clone's first entry has to be there",
            ) from error
        except LowwaterError as error:
            error.hint = (
                f"{self.uri} is the archive of a clone, whose history lies in {parent.uri}. {error.hint}"
            )
            raise
        return Lineage(store, self._open_parent, depth=self._depth + 1)


def parents_opener(
    uri: str | None = None, options: Mapping[str, str] | None = None, config: TierConfig | None = None
) -> OpenParent:
    """Who opens the parent of the archive at `uri`: as that was opened where it lies in the same place, so
    that no credentials go anywhere else."""
    own = None if uri is None else parse_uri(uri, options)

    def open_parent(parent: Parent) -> Store:
        place = parse_uri(parent.uri, parent.options)
        given = dict(parent.options)
        is_same_place = (
            own is not None
            and own.kind == place.kind
            and own.options.get("endpoint") == place.options.get("endpoint")
        )
        if own is not None and is_same_place:
            given = {**own.options, **given}
        return open_store(parent.uri, options=given, config=config, read_only=True)

    return open_parent
