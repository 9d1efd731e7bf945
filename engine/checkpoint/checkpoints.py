"""Checkpoints in a directory: an index file each, and packs that they share.

    checkpoints/checkpoint-<seq>-<hash>.ckpt     what a checkpoint is of, and where its blocks lie
    packs/<hash>.pack                            blocks, in the order of their keys

Always true:
  - a file under its final name is whole and durable: it was written under another name and synced before. An
    index is named after its packs are durable under their names, so whoever finds it finds all of it;
  - names are hashes of what is in the files, so writing one again changes nothing;
  - what is read was compared with the hash that led to it, from the name of the index on;
  - a pack is removed only when no index needs it, and an index before its packs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from lowwater.engine.checkpoint.content import KnownBlocks
from lowwater.engine.format import format
from lowwater.engine.format.blocks import (
    HINT,
    LARGE,
    NO_HASH,
    KnownColumns,
    Listed,
    Location,
    Place,
    Rows,
    decode_places,
    decode_rows,
    hash_of,
    list_columns,
    location_columns,
    made_of,
)
from lowwater.engine.format.ckpt import (
    Checkpoint,
    ListEntry,
    decode_named,
    name_of,
    pack_name,
    parse_name,
)
from lowwater.engine.format.keys import decode_key
from lowwater.engine.format.page import BUCKET, REFERENCE
from lowwater.engine.log.directory import local_path, typed_errors
from lowwater.engine.seams.failpoints import Failpoint
from lowwater.engine.seams.seams import File, Files, write_all
from lowwater.errors import Corrupt, LowwaterError, NotFound

BEFORE_PACK = Failpoint("checkpoint.before_pack")
BEFORE_INDEX = Failpoint("checkpoint.before_index")
AFTER_INDEX = Failpoint("checkpoint.after_index")

CHECKPOINTS_DIRECTORY = "checkpoints"
PACKS_DIRECTORY = "packs"
# How many are kept, of those that are complete.
KEPT_MAX = 2
WRITE_BYTES = 2**20

_TEMPORARY = ".tmp"
_PACK = re.compile(r"([0-9a-f]{64})\.pack")


class CheckpointRow(NamedTuple):
    """A live key in a checkpoint. A large value is given by its length, its BLAKE3 and where the log has it,
    instead of its bytes. In a bucket's own record, `key` is its name and `bucket` is empty."""

    bucket: str
    key: str
    value: bytes | None
    metadata: dict[str, str] | None
    seq: int
    time_us: int
    value_bytes: int
    value_hash: bytes | None
    place: Place | None


class StoredCheckpoint:
    """A checkpoint that lies in files. Everything is read when it is asked for, and verified."""

    def __init__(self, files: Files, path: str, packs: str) -> None:
        """`path` is its index, `packs` the directory of the packs."""
        self._files = files
        self.path = path
        self.packs_directory = packs
        found = parse_name(path.rpartition("/")[2])
        if found is None:
            raise NotFound("this is not the name of a checkpoint", path=path, hint="give a .ckpt file")
        self.seq = found[0]

    @property
    def id(self) -> str:
        """The id of the checkpoint: its seq, and the beginning of its hash."""
        name = self.path.rpartition("/")[2]
        return name.removeprefix("checkpoint-").removesuffix(".ckpt")

    @cached_property
    def _loaded(self) -> tuple[Checkpoint, bytes]:
        with typed_errors(self.path, "read a checkpoint"):
            data = read_file(self._files, self.path)
            return decode_named(data, self.path.rpartition("/")[2]), hash_of(data)

    @property
    def index(self) -> Checkpoint:
        return self._loaded[0]

    @property
    def file_hash(self) -> bytes:
        """The hash of the index file."""
        return self._loaded[1]

    @property
    def root(self) -> str:
        return self.index.root.hex()

    # ------------------------------------------------------------------ files

    def read_index(self) -> bytes:
        """The bytes of the index, which are those of its name."""
        with typed_errors(self.path, "read a checkpoint"):
            data = read_file(self._files, self.path)
            decode_named(data, self.path.rpartition("/")[2])
            return data

    def open_pack(self, pack: bytes) -> File:
        path = f"{self.packs_directory}/{pack_name(pack)}"
        with typed_errors(path, "read a pack"):
            return self._files.open(path)

    # ------------------------------------------------------------------ blocks

    def read_packed(self, pack: bytes, offset: int, size: int) -> bytes:
        path = f"{self.packs_directory}/{pack_name(pack)}"
        with typed_errors(path, "read a pack"):
            file = self._files.open(path)
            try:
                data = file.read_at(offset, size)
            finally:
                file.close()
            if len(data) != size:
                raise Corrupt("a pack ends before a block that it holds", offset=offset, hint=HINT)
        return data

    def blocks_of(self, entry: ListEntry) -> list[KnownBlocks]:
        """The blocks of a list, and where they lie."""
        listed, locations = self.columns_of(entry)
        return made_of(KnownBlocks, made_of(Listed, *listed), made_of(Location, *locations))

    def columns_of(self, entry: ListEntry) -> KnownColumns:
        """Return the blocks of a list and where they lie, as columns, in half the time of `blocks_of`."""
        with typed_errors(f"{self.packs_directory}/{pack_name(entry.pack)}", "read a pack"):
            data = self.read_packed(entry.pack, entry.offset, entry.list_bytes + entry.locations_bytes)
            listed = list_columns(data[: entry.list_bytes], entry.list_hash)
            locations = location_columns(data[entry.list_bytes :], entry.locations_hash)
            if len(listed[0]) != len(locations[0]):
                raise Corrupt("a list of blocks has other locations than blocks", hint=HINT)
            return listed, locations

    def blocks(self) -> Iterator[KnownBlocks]:
        for entry in self.index.lists:
            yield from self.blocks_of(entry)

    def columns(self) -> Iterator[KnownColumns]:
        """Yield the blocks of each list and where they lie, as columns, in order."""
        return map(self.columns_of, self.index.lists)

    # ------------------------------------------------------------------ rows

    def content_of(self, known: KnownBlocks) -> tuple[Rows, list[Place]]:
        """A block, and the places of its large values."""
        listed, location = known
        size = listed.block_bytes + location.places_bytes
        with typed_errors(f"{self.packs_directory}/{pack_name(location.pack)}", "read a pack"):
            data = self.read_packed(location.pack, location.offset, size)
            rows = decode_rows(data[: listed.block_bytes], listed.block_hash)
            places: list[Place] = []
            if location.places_hash != NO_HASH:
                places = decode_places(data[listed.block_bytes :], location.places_hash)
            if len(places) != sum(bool(flag & REFERENCE) for flag in rows.flags):
                raise Corrupt("a block has other places than large values", hint=HINT)
        return rows, places

    def rows_of(self, known: KnownBlocks) -> Iterator[CheckpointRow]:
        """The rows of a block."""
        rows, places = self.content_of(known)
        at = iter(places)
        with typed_errors(f"{self.packs_directory}/{pack_name(known.location.pack)}", "read a pack"):
            for key, seq, time_us, flags, metadata, value in zip(
                rows.keys, rows.seqs, rows.times, rows.flags, rows.metadata, rows.values, strict=True
            ):
                yield _row(key, seq, time_us, flags, metadata, value, at)

    def rows(self) -> Iterator[CheckpointRow]:
        """All of them, in the order of their encoded keys."""
        for known in self.blocks():
            yield from self.rows_of(known)


def _row(
    encoded: bytes, seq: int, time_us: int, flags: int, metadata: bytes, value: bytes, places: Iterator[Place]
) -> CheckpointRow:
    bucket, key = decode_key(encoded)
    value_bytes, value_hash, place = len(value), None, None
    if flags & REFERENCE:
        value_bytes, value_hash = LARGE.unpack(value)
        place = next(places)
    assert not flags & BUCKET or not bucket
    return CheckpointRow(
        bucket.decode(),
        key.decode(),
        None if flags & REFERENCE else value,
        format.decode_metadata(metadata) if metadata else None,
        seq,
        time_us,
        value_bytes,
        value_hash,
        place,
    )


def read_file(files: Files, path: str) -> bytes:
    file = files.open(path)
    try:
        return file.read_at(0, file.size())
    finally:
        file.close()


# ---------------------------------------------------------------------------- the directory


class Checkpoints:
    """The checkpoints of one data directory, whose owner alone writes."""

    def __init__(self, files: Files, directory: str, *, owned: bool = False) -> None:
        """`owned` by who has the log open: what is found is then durable, also where a former life was killed
        between a rename and its sync."""
        self._files = files
        self.data_directory = directory
        self.directory = f"{directory}/{CHECKPOINTS_DIRECTORY}"
        self.packs_directory = f"{directory}/{PACKS_DIRECTORY}"
        self._temporary_serial = 0
        # Of files that were seen: under its name none ever changes.
        self._sizes: dict[str, int] = {}
        if owned:
            for each in (self.packs_directory, self.directory):
                if self._names(each):
                    with typed_errors(each, "open the checkpoints"):
                        files.sync_directory(each)
        # The newest first. It is exchanged as a whole, so that others may read it meanwhile.
        self._complete: list[StoredCheckpoint] = self._found()

    def _found(self) -> list[StoredCheckpoint]:
        names = sorted(filter(parse_name, self._names(self.directory)), reverse=True)
        return [
            StoredCheckpoint(self._files, f"{self.directory}/{name}", self.packs_directory) for name in names
        ]

    def _names(self, directory: str) -> list[str]:
        try:
            with typed_errors(directory, "list checkpoints"):
                return self._files.list(directory)
        except NotFound:
            return []

    # ------------------------------------------------------------------ what is here

    def require_of(self, cluster_id_at: Callable[[int], bytes], seq_last: int) -> None:
        """Raise Corrupt unless the newest checkpoint was made of this log, which ends at `seq_last`.
        `cluster_id_at(seq)` says whose the log was at a seq."""
        if not self._complete:
            return
        newest = self._complete[0]
        if newest.seq > seq_last:
            raise Corrupt(
                f"the log ends at {seq_last}, and there is a checkpoint of {newest.seq}",
                path=newest.path,
                seq=newest.seq,
                hint="the log was lost, or is another one: restore it, and keep these checkpoints",
            )
        try:
            index = newest.index
        except LowwaterError:
            return  # `check` tells of it
        if index.cluster_id != cluster_id_at(newest.seq):
            raise Corrupt("the checkpoints belong to another cluster than the log", path=newest.path)

    @property
    def complete(self) -> list[StoredCheckpoint]:
        """The checkpoints that are durable here, the newest first."""
        return list(self._complete)

    @property
    def seq_newest(self) -> int:
        complete = self._complete
        return complete[0].seq if complete else 0

    def of(self, seq: int) -> StoredCheckpoint | None:
        """The checkpoint of exactly this seq."""
        return next((each for each in self._complete if each.seq == seq), None)

    def not_above(self, seq: int) -> StoredCheckpoint | None:
        """The newest one of a seq up to this."""
        return next((each for each in self._complete if each.seq <= seq), None)

    def pass_over(self, seq: int) -> None:
        """No longer count the checkpoint of `seq`, which was found to be damaged. It is removed with those
        that are too old."""
        self._complete = [each for each in self._complete if each.seq != seq]

    def size_bytes(self) -> int:
        """What indexes and packs take of the disk, those too that nobody needs any more."""
        sizes: dict[str, int] = {}
        for directory in (self.directory, self.packs_directory):
            for name in self._names(directory):
                if parse_name(name) or _PACK.fullmatch(name):
                    size = self._sizes.get(name)
                    if size is None:
                        size = self._size_of(f"{directory}/{name}")
                    sizes[name] = size
        self._sizes = sizes
        return sum(sizes.values())

    def _size_of(self, path: str) -> int:
        with typed_errors(path, "look at a checkpoint"):
            try:
                file = self._files.open(path)
            except FileNotFoundError:
                return 0  # it was removed meanwhile
            try:
                return file.size()
            finally:
                file.close()

    # ------------------------------------------------------------------ writing (in steps)

    def begin(self) -> None:
        """Before the first file: directories, and what a crash has left half written."""
        for directory in (self.directory, self.packs_directory):
            with typed_errors(directory, "make a directory for checkpoints"):
                self._files.make_directory(directory)
                for name in self._files.list(directory):
                    if name.endswith(_TEMPORARY):
                        self._files.remove(f"{directory}/{name}")

    def write_pack(self, parts: list[bytes]) -> Generator[None, None, bytes]:
        """A pack, and its hash. Its name is durable after `write_index`."""
        BEFORE_PACK()
        data = b"".join(parts)
        yield
        pack_hash = hash_of(data)
        yield
        yield from self._write(f"{self.packs_directory}/{pack_name(pack_hash)}", data)
        return pack_hash

    def has_pack(self, pack: bytes) -> bool:
        """Whether a pack is here, whoever needs it."""
        return pack_name(pack) in self._names(self.packs_directory)

    def write_index(self, seq: int, data: bytes) -> Generator[None, None, StoredCheckpoint]:
        """The index of a checkpoint whose packs are all written: it is complete once this returns."""
        BEFORE_INDEX()
        with typed_errors(self.packs_directory, "make packs durable"):
            self._files.sync_directory(self.packs_directory)
        yield
        path = f"{self.directory}/{name_of(seq, hash_of(data))}"
        yield from self._write(path, data)
        with typed_errors(self.directory, "make a checkpoint durable"):
            self._files.sync_directory(self.directory)
        AFTER_INDEX()
        stored = StoredCheckpoint(self._files, path, self.packs_directory)
        others = [each for each in self._complete if each.path != path]
        self._complete = sorted([stored, *others], key=_seq_of, reverse=True)
        return stored

    def _write(self, path: str, data: bytes) -> Generator[None, None, None]:
        self._temporary_serial += 1
        temporary = f"{path.rpartition('/')[0]}/{self._temporary_serial}{_TEMPORARY}"
        with typed_errors(path, "write a checkpoint"):
            file = self._files.open(temporary, create=True)
            try:
                try:
                    for offset in range(0, len(data), WRITE_BYTES):
                        write_all(file, offset, [data[offset : offset + WRITE_BYTES]])
                        yield
                    file.sync("fsync")
                finally:
                    file.close()
                yield
                self._files.rename(temporary, path)
            except OSError:
                self._remove_quietly(temporary)
                raise

    def _remove_quietly(self, path: str) -> None:
        try:
            self._files.remove(path)
        except OSError:
            pass  # `begin` removes it

    def thin_out(self, needed_seqs: Iterable[int]) -> Generator[None, None, None]:
        """Remove all checkpoints but the newest two and those of `needed_seqs`, and also one of which nobody
        knows whether it is durable. Then the packs that no checkpoint needs."""
        needed = set(needed_seqs)
        kept = [each for number, each in enumerate(self._complete) if number < KEPT_MAX or each.seq in needed]
        self._complete = kept
        names = {each.path.rpartition("/")[2] for each in kept}
        with typed_errors(self.directory, "remove a checkpoint"):
            gone = [name for name in self._files.list(self.directory) if parse_name(name)]
            gone = [name for name in gone if name not in names]
            for name in gone:
                self._files.remove(f"{self.directory}/{name}")
                yield
            if gone:
                self._files.sync_directory(self.directory)
        try:
            packs = {pack_name(pack) for each in kept for pack in each.index.packs}
        except LowwaterError:
            return  # nobody knows what it needs
        with typed_errors(self.packs_directory, "remove packs"):
            for name in self._files.list(self.packs_directory):
                if _PACK.fullmatch(name) and name not in packs:
                    self._files.remove(f"{self.packs_directory}/{name}")
                    yield


def _seq_of(stored: StoredCheckpoint) -> int:
    return stored.seq


def read_checkpoint(path: str | os.PathLike[str], files: Files | None = None) -> Iterator[CheckpointRow]:
    """Return the rows of a checkpoint, given its index file. The packs must lie where its data directory has
    them. All hashes are compared: what comes out is what the name of the file stands for."""
    stored = open_checkpoint(local_path(path), files)
    stored.index  # noqa: B018 — a damaged one is told before the first row
    return stored.rows()


def open_checkpoint(path: str, files: Files | None = None) -> StoredCheckpoint:
    """A checkpoint by the path of its index file."""
    from lowwater.engine.seams.real import RealFiles

    above = path.rpartition("/")[0].rpartition("/")[0] if "/" in path else ".."
    packs = f"{above}/{PACKS_DIRECTORY}" if above else PACKS_DIRECTORY
    return StoredCheckpoint(files or RealFiles(), path, packs)
