"""Writes that are believed when the store was seen to have the bytes: some stores say yes before they know,
and networks change what they carry.

Always true:
  - after a write the store's own checksum is compared with that of the bytes that were sent; where it says
    none, or another one, the object is read back, a range at a time. What is written by this machine itself
    is believed by the size: it was synced, and reading it back would read memory;
  - an object that was there before is compared in the same way, also in such a store;
  - an object is written over only where the bytes are not what its name says, and where the caller knows that
    nothing rests on it: this process has made it a moment ago, or may have (the answer was lost), or has just
    found it damaged. The bytes that take its place are those of its name, so of two that do it at once
    neither takes a sound one away.

What a number or one constant name stands for (states, `cluster.cbor`) may be another's by now: where such an
object is whole, the answer is that this call has not made it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple, TypeVar

from lowwater.errors import DataError, LowwaterError, NewerVersion, NotFound, StoreCorrupt, StoreUnavailable
from lowwater.logging import get_logger
from lowwater.tiering.checksums import Checksum, Hashing, Sent
from lowwater.tiering.names import parse
from lowwater.tiering.store import Part, Store, at, send
from lowwater.tiering.verify import ObjectFile, verify_object

_logger = get_logger("shipping")

T = TypeVar("T")

# How often an object that is not what was sent is sent again at once.
AGAIN_MAX = 2
READ_BYTES = 4 * 2**20
# How an object is hashed in a store that does not do it.
AT_ONCE = Hashing(0)
AT_ONCE.of_parts = False

HINT_OURS = "it is sent again; where this comes back, look at the network, and do not trust the store"
HINT_TAKEN = (
    "find out what wrote it, keep a copy of it elsewhere, and move it away, so that it is written again. Do "
    "not trust the store where this comes back"
)

# Of so many objects it is known that they are sound.
KNOWN_MAX = 10_000

Passing = Callable[[int], None]
"""Told of each part that goes out, by its size, and of each that is only looked at, by none. It may raise to
give up."""


class KnownObjects:
    """What this process knows of the objects in one store. Several threads may share it."""

    def __init__(self) -> None:
        self.unsound: set[str] = set()
        """Names of the objects that were doubted, and not seen to be sound since."""
        # With the mark that the store had for it then.
        self._sound: dict[str, str] = {}
        self._lock = threading.Lock()

    def doubt(self, name: str) -> None:
        """Note that an object may not be what its name says, and may be written over then. This process has
        made it a moment ago, or may have, or has read it and found it damaged."""
        with self._lock:
            self._sound.pop(name, None)
            self.unsound.add(name)

    def trust(self, name: str) -> None:
        """Note that an object which was doubted was seen to be what its name says."""
        with self._lock:
            self.unsound.discard(name)

    def note(self, name: str, said: Checksum) -> None:
        """Note that an object was seen to be what its name says, when the store said this of it."""
        with self._lock:
            self.unsound.discard(name)
            self._sound.pop(name, None)
            if said.mark:
                self._sound[name] = said.mark
            if len(self._sound) > KNOWN_MAX:
                del self._sound[next(iter(self._sound))]

    def is_sound(self, name: str, said: Checksum) -> bool:
        """Whether it was seen to be, and is the same one as then. A store without marks is never believed."""
        return bool(said.mark) and self._sound.get(name) == said.mark

    def forget(self) -> None:
        """Believe nothing any more that was seen."""
        with self._lock:
            self._sound.clear()


def write_verified(
    store: Store,
    name: str,
    parts: Callable[[], Iterable[Part]],
    *,
    size: int | None,
    known: KnownObjects | None = None,
    passing: Passing = lambda _: None,
) -> bool:
    """Write an object, and see that the store has it. True when this call made it, False when there was one
    of that name, which was compared. Raises StoreCorrupt where the object is not what was sent.

    What is `known` of the store is to be given again by a caller that tries again: what this call has made,
    and what was then not right, is written over."""
    made = write_measured(store, name, lambda: (parts(), size), known=known, passing=passing)
    return made is not None


def write_measured(
    store: Store,
    name: str,
    parts: Callable[[], tuple[Iterable[Part], int | None]],
    *,
    known: KnownObjects | None = None,
    passing: Passing = lambda _: None,
) -> int | None:
    """`write_verified` of what says its size, where that is known, with its parts. The size of the object
    that this call has made; None where it has not."""
    known = KnownObjects() if known is None else known
    is_ours = parse(name) is not None  # what has no name of an archive's may be anything
    sent = Sent(None)

    def write(call: Callable[[Iterator[Part], int | None], T]) -> T:
        def once() -> T:
            nonlocal sent
            sent = Sent(store.hashing)
            each, size = parts()
            return call(_told(sent.passing(each), passing), size)

        return send(once)

    try:
        made = write(lambda each, size: store.write(name, each, size=size))
    except StoreUnavailable:
        if is_ours:
            known.doubt(name)  # it may be there all the same
        raise
    if is_ours and made is not False:
        known.doubt(name)
    if not made:
        if not is_ours:
            return None
        sent = _looked_at(Sent(store.hashing or AT_ONCE), parts()[0], passing)
    for again in range(AGAIN_MAX + 1):
        said, is_same, wrong = _compare(store, name, sent, passing, is_new=bool(made))
        if said is not None and not wrong:
            known.note(name, said)
            return sent.size if made and is_same else None
        if name not in known.unsound or again == AGAIN_MAX:
            break
        _logger.error("an upload is not what was sent", object=at(store.uri, name), error=wrong)
        write(lambda each, size: store.replace(name, each, size=size))
        made = True
    hint = HINT_OURS if made else HINT_TAKEN
    raise StoreCorrupt(wrong, path=at(store.uri, name), hint=hint)


def has_sound(
    store: Store,
    name: str,
    parts: Callable[[], Iterable[Part]] | None,
    *,
    known: KnownObjects,
    passing: Passing = lambda _: None,
) -> bool:
    """Whether there is an object of that name, which is then what it says: False also for one that may be
    written over. Raises StoreCorrupt for another one. What was seen to be sound is believed for as long as
    the store has the same mark for it. `parts` are those that it is most likely made of: with the store's
    checksum they may spare reading it."""
    try:
        said = store.checksum(name)
    except NotFound:
        return False
    if known.is_sound(name, said):
        return True
    if said.md5 and parts is not None:
        with suppress(LowwaterError):  # what is here cannot be read: that is told where it is wanted
            if said.md5 in _looked_at(Sent(store.hashing or AT_ONCE), parts(), passing).md5s:
                known.note(name, said)
                return True
    wrong = _why_unsound(store, name, said.size, passing)
    if not wrong:
        known.note(name, said)
        return True
    if name in known.unsound:
        return False
    raise StoreCorrupt(
        f"the object is not what its name says: {wrong}", path=at(store.uri, name), hint=HINT_TAKEN
    )


def pass_through(
    store: Store,
    name: str,
    target: Store,
    target_name: str,
    *,
    part_bytes: int = READ_BYTES,
    known: KnownObjects | None = None,
    passing: Passing = lambda _: None,
) -> bool:
    """Copy an object to a name in another store, or in its own, by reading and writing it a part at a time.
    Return False where that name is taken. `passing` is told of each part, and may raise to give up."""
    size = store.stat(name).size
    return write_verified(
        target,
        target_name,
        lambda: _ranges(store, name, size, part_bytes),
        size=size,
        known=known,
        passing=passing,
    )


def same_bytes(store: Store, name: str, other: str) -> bool:
    """Whether two objects have the same bytes. All of both is read."""
    size = store.stat(name).size
    return size == store.stat(other).size and all(
        one == two for one, two in zip(_ranges(store, name, size), _ranges(store, other, size), strict=True)
    )


class _Compared(NamedTuple):
    """What the store said of an object, whether that has the bytes that were sent, and what is wrong with it;
    nothing for what is whole, and of somebody else."""

    said: Checksum | None
    is_same: bool = False
    wrong: str = ""


def _compare(store: Store, name: str, sent: Sent, passing: Passing, *, is_new: bool) -> _Compared:
    try:
        said = store.checksum(name)
    except NotFound:
        return _Compared(None, wrong="the store said that it has the object, and has it not")
    if said.size == sent.size:
        hashing = store.hashing
        if is_new and hashing is None:
            return _Compared(said, is_same=True)
        is_right = said.md5 in sent.md5s
        if hashing is not None:
            hashing.learn(said.size, said.md5, is_right=is_right)
        if is_right:
            return _Compared(said, is_same=True)
        ranges = _ranges(store, name, said.size)
        if _looked_at(sent.anew(), ranges, passing).md5s == sent.md5s:
            return _Compared(said, is_same=True)
    unsound = _why_unsound(store, name, said.size, passing)
    if not unsound:
        return _Compared(said)
    if said.size != sent.size:
        wrong = f"the store took {sent.size:,} bytes, and has an object of {said.size:,}"
    else:
        wrong = f"the store has other bytes than it was given: {unsound}"
    return _Compared(said, wrong=wrong)


def _why_unsound(store: Store, name: str, size: int, passing: Passing) -> str:
    """Why the object is not what its name says; nothing where it is. All of it is read."""
    try:
        verify_object(name, _Looked(store, name, size, passing))
    except (DataError, NewerVersion) as error:
        return error.message
    return ""


class _Looked(ObjectFile):
    """An object that is read until whoever wants it gives up."""

    def __init__(self, store: Store, name: str, size: int, passing: Passing) -> None:
        super().__init__(store, name, size)
        self._passing = passing

    def _fetch(self, start: int, end: int) -> bytes:
        self._passing(0)
        return super()._fetch(start, end)


def _ranges(store: Store, name: str, size: int, part_bytes: int = READ_BYTES) -> Iterator[bytes]:
    """All of an object, a part at a time."""
    for start in range(0, size, part_bytes):
        end = min(start + part_bytes, size)
        part = store.read(name, start, end)
        if len(part) != end - start:
            raise StoreUnavailable("less of the object came than it has", path=at(store.uri, name))
        yield part


def _told(parts: Iterable[memoryview], passing: Passing) -> Iterator[memoryview]:
    for part in parts:
        passing(len(part))
        yield part
        del part


def _looked_at(sent: Sent, parts: Iterable[Part], passing: Passing) -> Sent:
    """All parts, hashed, as if they were sent."""
    for _ in sent.passing(parts):
        passing(0)
    return sent
