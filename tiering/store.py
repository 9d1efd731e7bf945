"""What Lowwater asks of an object store: eight calls.

Always true of every store:
  - an object appears whole or not at all, and never changes: a name that is taken is kept;
  - a call that fails raises one of `errors.STORE_ERRORS`, which names the store without its secrets; an
    object that is missing is `NotFound`;
  - after `StoreUnavailable` a write may have happened, or may still happen: writing again is safe;
  - memory is bounded by a few parts, whatever the size of an object;
  - any number of threads may call at once, and no call needs another thread to finish.

`tiering/testing/store.py` holds an implementation to this. `open_store` makes one from a URI.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol, TypeVar

from lowwater.errors import Closed, Corrupt, InvalidEntry, NotFound, StoreReadOnly, UploadGone
from lowwater.tiering.checksums import Checksum, Hashing

T = TypeVar("T")

# What the bytes of an object may come in.
Part = bytes | bytearray | memoryview

NAME_BYTES_MAX = 1024  # of S3
COMPONENT_BYTES_MAX = 255  # of file systems

# Where a store has looked what its server can do. Never listed, and no name for an object.
PROBE = ".probe"

# How often an upload that somebody removed is begun at most.
UPLOADS_MAX = 5


class FoundObject(NamedTuple):
    name: str
    size: int


class Store(Protocol):
    uri: str
    """How messages call the store. No secret is in it."""

    @property
    def hashing(self) -> Hashing | None:
        """Return how the store hashes what it has. None where nothing leaves this machine: what was written
        was synced."""
        ...

    def write(self, name: str, parts: Iterable[Part], *, size: int | None) -> bool | None:
        """Make the object from these bytes, `size` in all. None says that the size is not known before; the
        object may be too large for memory then. Return True when this call made the object, and False when
        there was one of that name, which is kept. Return None when that one may be this call's own, because a
        layer below repeated the request. Raise UploadGone where all parts have to be sent again: `send` does
        that."""
        ...

    def replace(self, name: str, parts: Iterable[Part], *, size: int | None) -> None:
        """Make the object from these bytes, even over one of that name. It is for an object that is known not
        to be what its name says. Whoever reads it meanwhile sees the one or the other. All else is as in
        `write`."""
        ...

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Return the bytes from `start` to before `end`. What lies beyond the object is left out."""
        ...

    def stat(self, name: str) -> FoundObject: ...

    def checksum(self, name: str) -> Checksum:
        """Return what the store says of the object's bytes. An MD5 that differs from the expected one may be
        no MD5 of these bytes at all: only an equal one says something."""
        ...

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[FoundObject]:
        """Yield the objects whose names begin with `prefix` and are above `start_after`, sorted. Pages of the
        list are fetched as they are asked for."""
        ...

    def copy(self, source: str, target: str) -> bool:
        """Make the object `target` from the bytes of `source`: inside the store where it can do that, else by
        `pass_through`. Return True when this call made it, and False when there was one of that name, which
        is kept. Where the store has no condition for it, two calls that make one name at once may both return
        True."""
        ...

    def delete(self, name: str) -> None:
        """Remove the object. It is no error where there is none."""
        ...

    def close(self) -> None: ...


def send(write: Callable[[], T]) -> T:
    """Call `write`, which writes an object, and call it again where somebody removed its upload: a rule of
    the bucket, or another sender that took it for one of a killed process."""
    for _ in range(UPLOADS_MAX - 1):
        try:
            return write()
        except UploadGone:
            pass
    return write()


def is_there(store: Store, name: str) -> bool:
    try:
        store.stat(name)
    except NotFound:
        return False
    return True


# More than any catalogue's part, claim or index takes.
SMALL_BYTES_MAX = 2**28


def read_small(store: Store, name: str, bytes_max: int = SMALL_BYTES_MAX) -> bytes:
    """Return all of an object that is small. Raise Corrupt where it has more than `bytes_max`: whatever lies
    in its place may not fit into memory."""
    size = store.stat(name).size
    if size > bytes_max:
        raise Corrupt(f"the object has {size:,} bytes, and may have {bytes_max:,}", path=at(store.uri, name))
    return store.read(name)


def at(uri: str, name: str) -> str:
    """Return how errors name an object."""
    return f"{uri.rstrip('/')}/{name}"


def missing(uri: str, name: str) -> NotFound:
    return NotFound(
        "there is no such object", path=at(uri, name), hint="list what is there: `lowwater tier ls`"
    )


def check_name(name: str) -> None:
    """Raise InvalidEntry for what is no name in every store: a folder must not be left through it."""
    components = name.split("/")
    if (
        any(part in ("", ".", "..") for part in components)
        or name[0] == "."
        or any(ord(letter) < 32 or letter in "\\\x7f" or "\ud800" <= letter <= "\udfff" for letter in name)
    ):
        raise InvalidEntry(f"{name!r:.80} is no name for an object", hint="words between slashes, as a/b.c")
    if len(name.encode()) > NAME_BYTES_MAX or max(len(c.encode()) for c in components) > COMPONENT_BYTES_MAX:
        raise InvalidEntry(f"the name {name!r:.80}... is too long", hint="at most 255 bytes between slashes")


class Handle:
    """The base of stores. It refuses bad names, calls after `close`, and writes to what is read only."""

    def __init__(self, uri: str, *, read_only: bool) -> None:
        self.uri = uri
        self.read_only = read_only
        self._closed = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.uri}>"

    @property
    def hashing(self) -> Hashing | None:
        return None

    def close(self) -> None:
        self._closed = True

    def _check(self, name: str, *, writing: bool = False) -> None:
        self._check_open()
        check_name(name)
        if writing and self.read_only:
            raise StoreReadOnly("nothing can be written here", path=at(self.uri, name))

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"{self.uri} was closed")


def counted(parts: Iterable[Part], size: int | None, where: str) -> Iterator[Part]:
    """Yield the parts. Raise InvalidEntry unless they come to `size`, where it is known: the object must not
    appear then."""
    total = 0
    for part in parts:
        total += len(part)
        yield part
    if size is not None and total != size:
        raise InvalidEntry(
            f"{total} bytes came for an object of {size}",
            path=where,
            hint="was the file changed while it was read?",
        )
