"""An object store that fails when it is told to: the server, and the clients that programs hold.

Always true:
  - an object that is there is whole, unless a fault said that the store lies;
  - every call of a client is an operation with a number, a list one for each page; a fault schedule sees it
    before it has any effect, outside all locks, so a schedule may also wait, or run somebody else;
  - a client whose program crashed does nothing any more, what it had sent may still arrive, and others go on;
  - the same calls, faults and seeds give the same `trace`, in every process.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from blake3 import blake3

from lowwater.chaos.clock import VirtualClock
from lowwater.chaos.disk import SimulatedCrash
from lowwater.errors import (
    LowwaterError,
    StoreDenied,
    StoreMissing,
    StoreReadOnly,
    StoreUnavailable,
    UploadGone,
)
from lowwater.tiering.checksums import Checksum, Hashing, Sent
from lowwater.tiering.memory_store import MemoryObjects, MemoryStore
from lowwater.tiering.store import FoundObject, Part, at, counted

Kind = Literal["write", "read", "stat", "list", "delete", "copy"]
Trouble = Literal["unavailable", "timed_out", "throttled", "denied", "missing", "read_only", "gone"]

T = TypeVar("T")

# A checksum of more is of the checksums of such parts.
PART_BYTES = 20_000

MESSAGES: dict[Trouble, tuple[type[LowwaterError], str]] = {
    "unavailable": (StoreUnavailable, "the store answered 500"),
    "timed_out": (StoreUnavailable, "no answer came in time"),
    "throttled": (StoreUnavailable, "the store asks for fewer requests: SlowDown"),
    "denied": (StoreDenied, "the store refuses it: AccessDenied"),
    "missing": (StoreMissing, "there is no such bucket"),
    "read_only": (StoreReadOnly, "nothing can be written here"),
    "gone": (UploadGone, "somebody has removed the upload: NoSuchUpload"),
}


class StoreOperation(NamedTuple):
    """What a fault schedule sees. `size` is what was announced for a write."""

    number: int
    kind: Kind
    name: str
    size: int
    client: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFault:
    """What goes wrong with one operation; several fields may be set.

    `error` is what the client sees: before any effect, with `after` once it has happened, with `late` that
    many operations later (and by then perhaps after a write of the same name: the condition holds then too;
    a late delete does delete). `taken_bytes` of a write come in before its error: an upload that is left.
    `lost`, `kept_bytes` and `flip_kept` are lies: the write is answered as if all were well, and nothing, or
    so much, or with one bit (modulo the length) another one, is there. With `wrong_checksum` the store says
    that of other bytes, as one does that encrypts them. `short_bytes` and `flip_bit` (modulo the length)
    spoil what a read returns, the object stays right. `stale` is how many operations ago a list was true.
    `slow_s` passes on the virtual clock.
    """

    error: Trouble | None = None
    after: bool = False
    late: int | None = None
    taken_bytes: int | None = None
    lost: bool = False
    kept_bytes: int | None = None
    flip_kept: int | None = None
    wrong_checksum: bool = False
    short_bytes: int | None = None
    flip_bit: int | None = None
    stale: int = 0
    slow_s: float = 0.0


NO_FAULT = StoreFault()


class StoreChange(NamedTuple):
    """What a list must forget to be stale."""

    number: int
    name: str
    before: int | None
    """The size that there was, None for no object."""


class FaultyStore:
    """The server. `down` refuses everything; `pending` are uploads that were left, by the name of their
    object; `page_size` is how much of a list one operation gives. `has_checksums` says that it knows the MD5
    of what it has."""

    def __init__(
        self,
        *,
        uri: str = "memory://faulty",
        fault: Callable[[StoreOperation], StoreFault | None] | None = None,
        clock: VirtualClock | None = None,
        page_size: int = 1000,
        objects: MemoryObjects | None = None,
        has_checksums: bool = True,
    ) -> None:
        self.uri = uri
        self.hashing = Hashing(PART_BYTES)
        self.has_checksums = has_checksums
        self.fault = fault
        self.down = False
        self.operations = 0
        self.page_size = page_size
        self.objects = MemoryObjects() if objects is None else objects
        self.pending: dict[str, list[int]] = {}
        self._clock = clock
        self._mutex = threading.RLock()
        self._late: list[tuple[int, Callable[[], object]]] = []
        self._changes: list[StoreChange] = []
        self._crash_number: int | None = None
        self._crash_after = False
        self._trace = blake3()

    def open(self, client: str = "") -> FaultyStoreClient:
        """What one program holds, in one life of it."""
        return FaultyStoreClient(self, client)

    @property
    def trace(self) -> str:
        """A hash over all operations so far: client, kind, name, bytes, outcome."""
        with self._mutex:
            return self._trace.hexdigest()

    def crash_at(self, number: int, *, after: bool = False) -> None:
        """End the client that makes this operation there: before it takes effect, or just after."""
        assert number > self.operations, f"operation {number} is in the past"
        self._crash_number = number
        self._crash_after = after

    def arrive(self) -> int:
        """Let everything that is late take effect now. Returns how much that was."""
        with self._mutex:
            late, self._late = self._late, []
            for _, effect in late:
                effect()
            return len(late)

    def flip_byte(self, name: str, offset: int, mask: int) -> None:
        """Let a stored byte rot."""
        assert 0 < mask < 256, "this mask flips nothing"
        data = bytearray(self.objects.data[name])
        data[offset] ^= mask
        self.objects.data[name] = bytes(data)

    # ---- for the clients

    def perform(
        self,
        client: FaultyStoreClient,
        kind: Kind,
        name: str,
        effect: Callable[[StoreFault], T],
        *,
        size: int = 0,
    ) -> T:
        """One operation: count it, let arrive what is due, ask for a fault, let it happen, record it."""
        with self._mutex:
            client.check_alive()
            self.operations += 1
            operation = StoreOperation(self.operations, kind, name, size, client.name)
            crashing = operation.number == self._crash_number
        fault = (self.fault(operation) if self.fault is not None else None) or NO_FAULT
        if self.down:
            fault = StoreFault(error="unavailable", slow_s=fault.slow_s)
        with self._mutex:
            client.check_alive()
            if fault.slow_s:
                assert self._clock is not None, "a slow store needs a clock"
                self._clock.advance(fault.slow_s)
            self._arrive_until(operation.number)
            if crashing:
                client.crash()
                if not self._crash_after:
                    self._record(operation, "crashed before")
                    raise SimulatedCrash(f"before operation {operation.number}: {kind} {name}")
            try:
                result = self._happen(operation, fault, effect)
            except LowwaterError as error:
                self._record(operation, type(error).__name__)
                if not crashing:
                    raise
            else:
                self._record(operation, result)
                if not crashing:
                    return result
            raise SimulatedCrash(f"after operation {operation.number}: {kind} {name}")

    def add(self, name: str, data: bytes) -> bool:
        before = self._size(name)
        if not self.objects.add(name, data):
            return False
        self._changes.append(StoreChange(self.operations, name, before))
        return True

    def replace(self, name: str, data: bytes) -> None:
        before = self._size(name)
        self.objects.replace(name, data)
        self._changes.append(StoreChange(self.operations, name, before))

    def remove(self, name: str) -> None:
        before = self._size(name)
        if before is not None:
            self.objects.remove(name)
            self._changes.append(StoreChange(self.operations, name, before))

    def page(self, prefix: str, start_after: str, *, stale: int) -> list[FoundObject]:
        """The next page, as it was so many operations ago."""
        changed: dict[str, int | None] = {}
        for change in reversed(self._changes):
            if change.number <= self.operations - 1 - stale:
                break
            changed[change.name] = change.before
        page: list[FoundObject] = []
        after = start_after
        if not changed or not stale:
            while len(page) < self.page_size and (found := self.objects.next(prefix, after)) is not None:
                page.append(found)
                after = found.name
            return page
        sizes: dict[str, int | None] = {name: len(data) for name, data in self.objects.data.items()}
        sizes.update(changed)
        then = (FoundObject(name, size) for name, size in sorted(sizes.items()) if size is not None)
        return [f for f in then if f.name.startswith(prefix) and f.name > start_after][: self.page_size]

    def _happen(self, operation: StoreOperation, fault: StoreFault, effect: Callable[[StoreFault], T]) -> T:
        if fault.error is None:
            return effect(fault)
        if fault.late is not None:
            assert operation.kind != "copy", "what it copies may be gone by then"
            self._late.append((operation.number + fault.late, lambda: effect(NO_FAULT)))
        elif fault.after:
            effect(fault)
        elif fault.taken_bytes is not None and operation.kind == "write":
            self.pending.setdefault(operation.name, []).append(min(fault.taken_bytes, operation.size))
        error, message = MESSAGES[fault.error]
        raise error(message, path=at(self.uri, operation.name) if operation.name else self.uri)

    def _arrive_until(self, number: int) -> None:
        due = [effect for moment, effect in self._late if moment <= number]
        self._late = [(moment, effect) for moment, effect in self._late if moment > number]
        for effect in due:
            effect()

    def _size(self, name: str) -> int | None:
        data = self.objects.data.get(name)
        return None if data is None else len(data)

    def _record(self, operation: StoreOperation, outcome: object) -> None:
        self._trace.update("\0".join(map(str, operation)).encode())
        self._trace.update(outcome if isinstance(outcome, bytes) else f"\0{outcome}\n".encode())


class FaultyStoreClient(MemoryStore):
    """What a program holds. Its names are checked, and its answers made, as those of a store in memory."""

    def __init__(self, server: FaultyStore, name: str) -> None:
        super().__init__(server.uri, objects=server.objects)
        self.name = name
        self._server = server
        self._crashed = False

    @property
    def hashing(self) -> Hashing:
        return self._server.hashing

    def write(self, name: str, parts: Iterable[Part], *, size: int | None) -> bool:
        return self._write(name, parts, size, self._server.add)

    def replace(self, name: str, parts: Iterable[Part], *, size: int | None) -> None:
        def replace(name: str, data: bytes) -> bool:
            self._server.replace(name, data)
            return True

        self._write(name, parts, size, replace)

    def _write(
        self, name: str, parts: Iterable[Part], size: int | None, keep: Callable[[str, bytes], bool]
    ) -> bool:
        self._check(name, writing=True)
        # All of it, before anything happens: an error of the parts is no operation.
        data = b"".join(counted(parts, size, at(self.uri, name)))

        def effect(fault: StoreFault) -> bool:
            return fault.lost or keep(name, _kept(data, fault))

        return self._server.perform(self, "write", name, effect, size=len(data))

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        self._check(name)

        def effect(fault: StoreFault) -> bytes:
            return _flipped(self._get(name)[start:end][: fault.short_bytes], fault.flip_bit)

        return self._server.perform(self, "read", name, effect)

    def stat(self, name: str) -> FoundObject:
        self._check(name)
        return self._server.perform(self, "stat", name, lambda _: FoundObject(name, len(self._get(name))))

    def checksum(self, name: str) -> Checksum:
        self._check(name)

        def effect(fault: StoreFault) -> Checksum:
            data = self._get(name)
            sent = Sent(self.hashing)
            for _ in sent.passing([b"other bytes" if fault.wrong_checksum else data]):
                pass
            md5 = max(sent.md5s, key=len)
            return Checksum(len(data), md5 if self._server.has_checksums else "", mark=md5)

        return self._server.perform(self, "stat", name, effect)

    def copy(self, source: str, target: str) -> bool:
        self._check(source)
        self._check(target, writing=True)

        def effect(fault: StoreFault) -> bool:
            data = self._get(source)
            return fault.lost or self._server.add(target, _kept(data, fault))

        return self._server.perform(self, "copy", target, effect)

    def delete(self, name: str) -> None:
        self._check(name, writing=True)
        self._server.perform(self, "delete", name, lambda _: self._server.remove(name))

    def crash(self) -> None:
        """End this life of the program."""
        self._crashed = True

    def check_alive(self) -> None:
        if self._crashed:
            raise SimulatedCrash("this program has crashed already")

    def _list(self, prefix: str, start_after: str) -> Iterator[FoundObject]:
        while True:
            page = self._page(prefix, start_after)
            yield from page
            if len(page) < self._server.page_size:
                return
            start_after = page[-1].name

    def _page(self, prefix: str, start_after: str) -> tuple[FoundObject, ...]:
        def effect(fault: StoreFault) -> tuple[FoundObject, ...]:
            return tuple(self._server.page(prefix, start_after, stale=fault.stale))

        return self._server.perform(self, "list", prefix, effect)


def _kept(data: bytes, fault: StoreFault) -> bytes:
    return _flipped(data[: fault.kept_bytes], fault.flip_kept)


def _flipped(data: bytes, bit: int | None) -> bytes:
    """Return the data with one bit flipped, wherever that number falls."""
    if bit is None or not data:
        return data
    place, bit = divmod(bit % (len(data) * 8), 8)
    changed = bytearray(data)
    changed[place] ^= 1 << bit
    return bytes(changed)


def random_faults(
    rng: random.Random, *, chance: float, lies: bool = False, late_max: int = 20
) -> Callable[[StoreOperation], StoreFault | None]:
    """A schedule: with this chance something that a store may do to that kind of operation. What no store
    that keeps its word does, `lies` adds: lost, cut and flipped objects, spoilt reads, strange checksums."""

    def schedule(operation: StoreOperation) -> StoreFault | None:
        if rng.random() >= chance:
            return None
        error: Trouble = rng.choice(("unavailable", "timed_out", "throttled"))
        choices = [StoreFault(error=error)]
        match operation.kind:
            case "write":
                choices += [
                    StoreFault(error="timed_out", after=True),
                    StoreFault(error="timed_out", late=rng.randint(1, late_max)),
                    StoreFault(error=error, taken_bytes=rng.randint(0, operation.size)),
                    StoreFault(error="gone"),
                ]
                if lies:
                    choices += [
                        StoreFault(lost=True),
                        StoreFault(kept_bytes=rng.randint(0, operation.size)),
                        StoreFault(flip_kept=rng.randint(0, 1 << 20)),
                    ]
            case "copy":
                choices += [StoreFault(error="timed_out", after=True)]
                if lies:
                    choices += [
                        StoreFault(lost=True),
                        StoreFault(kept_bytes=rng.randint(0, 100)),
                        StoreFault(flip_kept=rng.randint(0, 1 << 20)),
                    ]
            case "delete":
                choices += [
                    StoreFault(error="timed_out", after=True),
                    StoreFault(error="timed_out", late=rng.randint(1, late_max)),
                ]
            case "read" if lies:
                choices += [
                    StoreFault(short_bytes=rng.randint(0, 100)),
                    StoreFault(flip_bit=rng.randint(0, 1 << 20)),
                ]
            case "stat" if lies:
                choices += [StoreFault(wrong_checksum=True)]
            case "list":
                choices += [StoreFault(stale=rng.randint(1, late_max))]
        return rng.choice(choices)

    return schedule
