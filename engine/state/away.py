"""Pages that are not here: a reference stands in their place, and their content is read where it leads.

Always true:
  - nothing is read from afar while a lock is held. Who meets such a page under the state's lock gets
    `PageAway` before anything has changed; the page is read without the lock, and the call made again;
  - however many ask for a page at once, it is read once;
  - an error is that of the call that needed the page, and of no other: nothing is remembered of it;
  - a page that was read stays in memory for the calls that need it, and until it is in the store again where
    there is room for that. Scans, roots and checkpoints look at it once, and let it go.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

from lowwater.engine.format.ckpt import pack_name
from lowwater.engine.format.page import DataPage
from lowwater.engine.format.references import Reference, decode_reference, page_of_block
from lowwater.engine.log.tickets import again
from lowwater.engine.seams.interrupts import busy, is_in_handler, to_the_end
from lowwater.engine.seams.waiting import Event
from lowwater.errors import Busy, Corrupt, DataError, InputError, LowwaterError, NotFound

T = TypeVar("T")

# What may wait in memory to get back into the store: a share of the pool, and enough for a few pages.
RETURNING_SHARE = 16
RETURNING_BYTES_MIN = 64 * 2**10


class BlockSource(Protocol):
    """Where the blocks of checkpoints can be read. Any number of threads may ask at once."""

    def read_block(self, pack: bytes, offset: int, size: int, block_hash: bytes) -> bytes:
        """`size` bytes of the pack with this hash, from `offset` on: a block, and its places right behind
        it. Raises a RetryError where it may be there later. Who asks compares the hashes."""
        ...

    def damaged(self, pack: bytes) -> str:
        """What came of this pack was wrong: nothing of it that is kept on the way may be used again. Returns
        where it lies, for people."""
        ...


class PageAway(Exception):
    """Under `key` there is the reference `data`, and its page has to be read first."""

    def __init__(self, key: bytes, data: bytes) -> None:
        super().__init__(key)
        self.key = key
        self.data = data


class ReadFirst(Exception):
    """Something else is away: `read` reads it, and remembers it for who calls again."""

    def __init__(self, read: Callable[[], None]) -> None:
        super().__init__()
        self.read = read


class _PageFlight:
    """A read that is under way."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.done = Event()
        self.page: DataPage | None = None
        # Of one that its thread did not live to end.
        self.error: LowwaterError | None = Busy("the read of a page was given up", hint="try again")


class _Held:
    """A page that calls need."""

    def __init__(self, data: bytes, page: DataPage) -> None:
        self.data = data
        self.page = page
        self.needed_by: set[PageAway] = set()


def read_away(blocks: BlockSource, reference: Reference, key: bytes) -> DataPage:
    """The page under `key`. What is damaged on the way is asked for once more."""
    for is_last in (False, True):
        try:
            data = blocks.read_block(
                reference.pack, reference.offset, reference.size_bytes, reference.block_hash
            )
        except NotFound as error:
            raise Corrupt(
                "a pack with a block that a page was given up for is missing from the archive",
                path=error.path or f"packs/{pack_name(reference.pack)}",
                seq=reference.checkpoint_seq,
                offset=reference.offset,
                hint="look into the archive with `lowwater scrub`; other pages can be read",
            ) from error
        try:
            return page_of_block(reference, key, data)
        except DataError as error:
            error.path = blocks.damaged(reference.pack)
            if is_last:
                raise
    raise AssertionError("the second attempt returns or raises")


class AwayPages:
    def __init__(self, blocks: BlockSource | None, *, path: str, pool_bytes_max: int) -> None:
        self._blocks = blocks
        self._path = path
        self._lock = threading.RLock()  # a signal handler may call too
        self.owns_lock: Callable[[], bool] = self._lock._is_owned  # type: ignore[attr-defined]
        self._flights: dict[bytes, _PageFlight] = {}
        self._held: dict[bytes, _Held] = {}
        self._returning: dict[bytes, tuple[bytes, DataPage]] = {}
        self.returning_bytes = 0
        self.returning_bytes_max = max(pool_bytes_max // RETURNING_SHARE, RETURNING_BYTES_MIN)
        self.wake: Callable[[], None] = _nobody
        self.left = self.reads = self.read_bytes = self.failures = 0

    # ------------------------------------------------------------------ what is here

    def page(self, key: bytes, data: bytes) -> DataPage:
        """The page that the reference `data` stands for, where somebody has read it. Else PageAway."""
        found = self._known(key, data)
        if found is None:
            raise PageAway(key, data)
        return found

    def _known(self, key: bytes, data: bytes) -> DataPage | None:
        held = self._held.get(key)
        if held is not None and held.data == data:
            return held.page
        returning = self._returning.get(key)
        return returning[1] if returning is not None and returning[0] == data else None

    # ------------------------------------------------------------------ reading (without a lock)

    def call(self, action: Callable[[], T], *, keeps: bool = True) -> T:
        """What `action` returns, which is called again where a page that it needs was away. The caller holds
        no lock that others wait for. `keeps` pages that were read: they go back into the store."""
        needed: list[PageAway] = []
        try:
            while True:
                try:
                    return action()
                except PageAway as away:
                    page = self.read(away.key, away.data)
                    needed.append(away)
                    self._hold(away, page)
                    if keeps:
                        self.give_back(away.key, away.data, page)
                except ReadFirst as other:
                    other.read()
        finally:
            for each in needed:
                self._let_go(each)

    def _hold(self, away: PageAway, page: DataPage) -> None:
        with self._lock:
            held = self._held.get(away.key)
            if held is None or held.data != away.data:
                held = self._held[away.key] = _Held(away.data, page)
            held.needed_by.add(away)

    def _let_go(self, away: PageAway) -> None:
        with self._lock:
            held = self._held.get(away.key)
            if held is not None and held.data == away.data:
                held.needed_by.discard(away)
                if not held.needed_by:
                    del self._held[away.key]

    def read(self, key: bytes, data: bytes) -> DataPage:
        """The page that the reference `data` under `key` stands for, from where its block lies."""
        if is_in_handler():
            raise busy(self._path)  # it may have interrupted the very thread that reads this
        own = _PageFlight(data)
        try:
            with self._lock:
                found = self._known(key, data)
                if found is not None:
                    return found
                flight = self._flights.get(key)
                if flight is None or flight.data != data:
                    flight = self._flights[key] = own
            if flight is own:
                own.page = self._read(key, decode_reference(data, key))
                own.error = None
                self._land(key, own)
        except BaseException as error:
            if isinstance(error, LowwaterError):
                self.failures += 1
                own.error = error
            try:
                self._land(key, own)
            except BaseException:
                to_the_end(self._land, key, own)
                raise
            raise
        if flight is not own:
            flight.done.wait()
            if flight.error is not None:
                raise again(flight.error)
        assert flight.page is not None
        return flight.page

    def _land(self, key: bytes, flight: _PageFlight) -> None:
        """Nobody has to wait for it any more. It may be repeated."""
        with self._lock:
            if self._flights.get(key) is flight:
                del self._flights[key]
        flight.done.set()

    def _read(self, key: bytes, reference: Reference) -> DataPage:
        if self._blocks is None:
            # Not NotFound: who asks for a key would take that for an answer.
            raise InputError(
                "a page is in the archive, and the archive was not named",
                path=self._path,
                hint="open with the tier that this was restored from, or shipped to",
            )
        page = read_away(self._blocks, reference, key)
        self.reads += 1
        self.read_bytes += reference.size_bytes
        return page

    # ------------------------------------------------------------------ back into the store

    def give_back(self, key: bytes, data: bytes, page: DataPage) -> bool:
        """Queue a page that was read, to be put in the place of its reference. Return False where there is no
        room for it to wait in."""
        size = page.size_bytes
        with self._lock:
            before = self._returning.get(key)
            # One that waits for a reference that is there no more helps nobody.
            if before is None or before[0] != data:
                others_bytes = self.returning_bytes - (0 if before is None else before[1].size_bytes)
                if others_bytes and others_bytes + size > self.returning_bytes_max:
                    return False
                self._returning[key] = data, page
                self.returning_bytes = others_bytes + size
        if self.is_return_due:
            self.wake()
        return True

    @property
    def is_return_due(self) -> bool:
        """Whether so much waits that a transaction of the store is worth it."""
        return 4 * self.returning_bytes >= self.returning_bytes_max

    def returning(self) -> list[tuple[bytes, bytes, DataPage]]:
        """Keys, references and pages that wait, in order."""
        with self._lock:
            return sorted((key, data, page) for key, (data, page) in self._returning.items())

    def returned(self, keys: list[bytes]) -> None:
        """They need not wait any more."""
        with self._lock:
            for key in keys:
                _, page = self._returning.pop(key)
                self.returning_bytes -= page.size_bytes


def _nobody() -> None:
    """Nobody has to be woken."""
