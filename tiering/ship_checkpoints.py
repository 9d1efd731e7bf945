"""Shipping checkpoints: packs that the store lacks, then the index, then an entry that says so.

Always true:
  - an index is in the store only when all packs that it names are, and the entry is proposed only when the
    index is, and when every log entry up to its seq is shipped. So what the log says can be read;
  - what goes out is hashed on its way, and an object whose bytes are not those of its name never appears;
  - names and bytes are functions of the log: whoever ships them too ships the same, and what is there is
    kept;
  - nothing is remembered: stopped anywhere, it begins again with a look at what is there;
  - one whose files here cannot be read is told of, once, and passed over: the log has everything.

Where the log has recorded one already, only what that one does not name is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager

from blake3 import blake3

from lowwater.engine.checkpoint.checkpoints import StoredCheckpoint
from lowwater.engine.database.core import Core
from lowwater.engine.format.blocks import HASH_BYTES, HINT, hash_of
from lowwater.engine.format.ckpt import decode_checkpoint
from lowwater.engine.log.directory import typed_errors
from lowwater.engine.seams.failpoints import Failpoint
from lowwater.engine.seams.seams import File
from lowwater.engine.state.catalogue import (
    CheckpointDescriptor,
    checkpoint_shipped_entry,
    describe_checkpoint,
)
from lowwater.errors import Corrupt, DataError, DiskFailed, NotFound
from lowwater.logging import get_logger
from lowwater.tiering.names import checkpoint_name, pack_object_name
from lowwater.tiering.store import Part, Store, at, read_small
from lowwater.tiering.verified_writes import KnownObjects, has_sound, write_verified

_logger = get_logger("shipping")

BEFORE_PACK = Failpoint("ship.before_pack")
BEFORE_INDEX = Failpoint("ship.before_index")
BEFORE_ENTRY = Failpoint("ship.before_checkpoint_entry")

PART_BYTES = 2**20
# How long until an entry is proposed again that somebody else has to order.
PROPOSE_AGAIN_S = 1.0


class CheckpointShipper:
    """Ships the checkpoints of an engine, one after the other, in steps. Those that were made while one was
    being shipped are passed over, but for the newest."""

    def __init__(
        self,
        core: Core,
        store: Store,
        *,
        own_after: int = 0,
        passing: Callable[[], None] = lambda: None,
        known: KnownObjects | None = None,
    ) -> None:
        """What was recorded up to the entry `own_after` lies in the archive of a parent, and not there.
        `passing` is called before each part that goes out. It may raise to give up. `known` is as for
        `write_verified`."""
        self._passing = passing
        self._known = KnownObjects() if known is None else known
        self._core = core
        self._store = store
        self._own_after = own_after
        self._clock = core.seams.clock
        self._job: Generator[float, None, None] | None = None
        self.shipped = self.packs_written = self.bytes_written = 0

    @property
    def has_work(self) -> bool:
        return self._job is not None or self._next() is not None

    def advance(self) -> float | None:
        """One object, or a look at whether there is something to ship. How long until there may be more, and
        None where there is nothing. Raises what is in the way; called again it begins with a look at what is
        there."""
        if self._job is None:
            stored = self._next()
            if stored is None:
                return None
            self._job = self._ship(stored)
        try:
            return next(self._job)
        except StopIteration:
            self._job = None
            return 0.0
        except BaseException:
            self._job = None
            raise

    @contextmanager
    def _reading(self, stored: StoredCheckpoint) -> Iterator[None]:
        """What is wrong with what is read stays so, and must not keep what comes later from the store."""
        try:
            with typed_errors(stored.path, "read the checkpoint"):
                yield
        except (DataError, DiskFailed, NotFound) as error:
            error.hint = "the checkpoint is passed over: the next one is made without it. Look at the disk"
            self._core.pass_over_checkpoint(stored.seq)
            raise

    def _next(self) -> StoredCheckpoint | None:
        """The one that all replicas ship next, once its log is shipped. Where it could not be made, the
        newest that is here."""
        core = self._core
        catalogue, wanted_seq = core.catalogue, core.ships_seq
        here = [each for each in core.checkpoints() if each.seq > catalogue.checkpoint_seq]
        wanted = next((each for each in here if each.seq == wanted_seq), None)
        if wanted is not None:
            return wanted if wanted.seq <= catalogue.hwm else None
        if core.is_checkpoint_due(wanted_seq):
            return None
        return next((each for each in here if each.seq <= catalogue.hwm), None)

    def bring(self, stored: StoredCheckpoint, only: str = "") -> bool:
        """Upload all objects of a checkpoint, or the one named `only`, whatever the log says. Return False
        where the checkpoint has no such object."""
        index = self._read_index(stored)
        described = describe_checkpoint(index)
        has_it = False
        for pack, size in decode_checkpoint(index).packs.items():
            if only in ("", pack_object_name(pack)):
                self._write_pack(stored, pack, size)
                has_it = True
        if only in ("", checkpoint_name(described)):
            self._write_index(described, index)
            has_it = True
        return has_it

    def _ship(self, stored: StoredCheckpoint) -> Generator[float, None, None]:
        began_s, bytes_before = self._clock.monotonic(), self.bytes_written
        index = self._read_index(stored)
        described = describe_checkpoint(index)
        there = self._packs_there()
        for pack, size in decode_checkpoint(index).packs.items():
            if pack in there:
                continue
            BEFORE_PACK()
            self._write_pack(stored, pack, size)
            yield 0.0
        BEFORE_INDEX()
        self._write_index(described, index)
        yield 0.0
        while self._core.catalogue.checkpoint_seq < described.seq:
            BEFORE_ENTRY()
            before = self._core.catalogue.checkpoint_seq
            if self._core.propose_control(checkpoint_shipped_entry(before, described)) is None:
                yield PROPOSE_AGAIN_S
        self.shipped += 1
        _logger.info(
            "checkpoint shipped",
            object=at(self._store.uri, checkpoint_name(described)),
            path=stored.path,
            seq=described.seq,
            bytes=self.bytes_written - bytes_before + len(index),
            duration_s=round(self._clock.monotonic() - began_s, 3),
        )

    def _packs_there(self) -> frozenset[bytes]:
        """Return the packs of the checkpoint that the log recorded last. Its index is read from the store,
        where it has to be. Without it nothing is known, and everything is looked at."""
        last = self._core.catalogue.checkpoints.last
        if last is None or last.recorded_seq <= self._own_after:
            return frozenset()
        name = checkpoint_name(last)
        try:
            index = read_small(self._store, name, last.size)
            if hash_of(index) != last.hash:
                raise Corrupt("this is not the index that the log recorded")
        except (Corrupt, NotFound) as error:
            # A restore takes the one before it, or soon the one that is shipped now.
            where = at(self._store.uri, name)
            _logger.error("the index of a checkpoint is damaged", object=where, error=str(error))
            return frozenset()
        return frozenset(decode_checkpoint(index).packs)

    def _write_pack(self, stored: StoredCheckpoint, pack: bytes, size: int) -> None:
        """What is there is compared with the file, or read."""
        name = pack_object_name(pack)
        with self._reading(stored):
            file = stored.open_pack(pack)

        def parts() -> Iterator[bytes]:
            return _parts(file, size, pack, stored.packs_directory)

        def parts_to_write() -> Iterator[bytes]:
            with self._reading(stored):
                yield from parts()

        try:
            if has_sound(self._store, name, parts, known=self._known, passing=self._told):
                return
            made = self._write(name, parts_to_write, size)
        finally:
            file.close()
        self.packs_written += made
        self.bytes_written += size if made else 0

    def _told(self, _: int) -> None:
        self._passing()

    def _read_index(self, stored: StoredCheckpoint) -> bytes:
        with self._reading(stored):
            return stored.read_index()

    def _write_index(self, described: CheckpointDescriptor, index: bytes) -> None:
        self._write(checkpoint_name(described), lambda: [index], len(index))

    def _write(self, name: str, parts: Callable[[], Iterable[Part]], size: int) -> bool:
        return write_verified(self._store, name, parts, size=size, known=self._known, passing=self._told)


def bring_checkpoint(
    core: Core, store: Store, checkpoint: CheckpointDescriptor, *, known: KnownObjects | None = None
) -> bool:
    """Upload a checkpoint to a store that lacks it. Return False where the checkpoint is not here."""
    for stored in core.checkpoints():
        if stored.seq == checkpoint.seq and stored.id == checkpoint.id:
            return CheckpointShipper(core, store, known=known).bring(stored)
    return False


def bring_object(core: Core, store: Store, name: str, *, known: KnownObjects) -> bool:
    """Upload one object of a checkpoint to the store again. Return False where no checkpoint here has it."""
    return any(CheckpointShipper(core, store, known=known).bring(each, name) for each in core.checkpoints())


def _parts(file: File, size: int, expected: bytes, where: str) -> Iterator[bytes]:
    """The bytes of a pack. The last of them come only when all are known to be those of its name."""
    assert len(expected) == HASH_BYTES
    found = blake3()
    for start in range(0, size, PART_BYTES):
        part = file.read_at(start, min(PART_BYTES, size - start))
        found.update(part)
        if start + PART_BYTES >= size and (found.digest() != expected or start + len(part) != size):
            raise Corrupt("a pack is not what its name says", path=where, hint=HINT)
        yield part
