"""The catalogue: which segments and checkpoints the log says are in the object store, and who wrote there.

Always true:
  - it is a function of the entries applied: `segment_shipped`, `checkpoint_shipped` and `fork`, each of which
    adds one record to one of three lists. Nothing is ever changed in them, so as of any seq the catalogue was
    a beginning of each;
  - the segments follow one another in the log, from its first one on: each names the hash of the one before
    it. The last seq of the last one is the high-water mark;
  - CHUNK_RECORDS records that follow each other are a chunk: bytes that never change again, known by their
    hash. Only what is not in one yet is written again.

It says nothing of how a store keeps these things: no entity tag, no clock, no stored size.

A page store has a value for each chunk, and the last one unfinished, under CATALOGUE_KEY: a checksum, then
the chunk. They are written with the flush that comes after a change, and are as of its seq.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from struct import Struct
from typing import Any, Generic, NamedTuple, TypeVar

import cbor2

from lowwater.engine.format import format
from lowwater.engine.format.blocks import HASH_BYTES, NO_HASH, hash_of
from lowwater.engine.format.ckpt import decode_checkpoint, name_of
from lowwater.engine.format.entries import Control
from lowwater.engine.format.format import Kind, SegmentHeader, SegmentTrailer
from lowwater.engine.log.chain import CLUSTER_ID_BYTES
from lowwater.engine.seams.checksum import crc32
from lowwater.errors import Corrupt, NewerVersion

CHUNK_RECORDS = 1024
# What is in no chunk yet is in runs of so many, that a manifest need not repeat it either.
RUN_RECORDS = 64
CHUNK_VERSION = 1

CATALOGUE_KEY = b"catalogue:"
_KEY = Struct(">10scI")
# So many chunks are kept decoded, of each list.
DECODED_MAX = 8

HINT = "restore from the archive, whose newest manifest has the whole catalogue"


class SegmentDescriptor(NamedTuple):
    """A shipped segment. All of it is a function of the log. `hash` is the segment hash of its trailer, which
    the next segment's header repeats; sizes are those of the raw file. `recorded_seq` is the entry's."""

    epoch: int
    first: int
    last: int
    hash: bytes
    size: int
    body_bytes: int
    block_bytes: int
    compression: int
    frame_count: int
    time_min_us: int
    time_max_us: int
    recorded_seq: int = 0


class CheckpointDescriptor(NamedTuple):
    """A shipped checkpoint. `hash` and `size` are those of its index, whose name has the first of them."""

    seq: int
    time_us: int
    hash: bytes
    size: int
    root: bytes
    control_hash: bytes
    recorded_seq: int = 0

    @property
    def id(self) -> str:
        """As `db.checkpoint()` returns it."""
        return name_of(self.seq, self.hash).removeprefix("checkpoint-").removesuffix(".ckpt")


class Fork(NamedTuple):
    """Where another owner went on. `seq` is the last one of the parent's line, `parent_segment` the hash of
    the last segment of the parent's manifest, `parent_manifest` that manifest's own; zeros where there was
    none."""

    cluster_id: bytes
    epoch: int
    parent_epoch: int
    seq: int
    parent_segment: bytes
    parent_manifest: bytes
    recorded_seq: int = 0


def describe_segment(header: SegmentHeader, trailer: SegmentTrailer) -> SegmentDescriptor:
    """A sealed segment, by the two ends of its file."""
    return SegmentDescriptor(
        epoch=header.epoch,
        first=trailer.seq_first,
        last=trailer.seq_last,
        hash=trailer.segment_hash,
        size=trailer.file_bytes,
        body_bytes=trailer.body_bytes,
        block_bytes=header.block_bytes,
        compression=header.compression,
        frame_count=trailer.frame_count,
        time_min_us=trailer.time_min_us,
        time_max_us=trailer.time_max_us,
    )


def describe_checkpoint(index: bytes) -> CheckpointDescriptor:
    """A checkpoint, by the bytes of its index."""
    found = decode_checkpoint(index)
    return CheckpointDescriptor(
        found.seq, found.time_us, hash_of(index), len(index), found.root, found.control_hash
    )


Record = SegmentDescriptor | CheckpointDescriptor | Fork
R = TypeVar("R", bound=Record)
ReadChunk = Callable[[bytes], bytes]
"""The chunk with this hash, which whoever reads compares."""


# ---------------------------------------------------------------------------- entries


def segment_shipped_entry(
    before: int, hash_before: bytes, segment: SegmentDescriptor, *, origin: int = 0
) -> Control:
    """Return the entry that says that a segment is in the store. `before` is the high-water mark that this
    rests on. `hash_before` is what the segment's header says: the hash of the segment before it."""
    body = {"before": before, "hash_before": hash_before, **_body_of(segment)}
    return Control(Kind.SEGMENT_SHIPPED, body, origin)


def checkpoint_shipped_entry(before: int, checkpoint: CheckpointDescriptor, *, origin: int = 0) -> Control:
    """Return the entry that says that a checkpoint is in the store. `before` is the seq of the one that was
    shipped before it, or 0."""
    return Control(Kind.CHECKPOINT_SHIPPED, {"before": before, **_body_of(checkpoint)}, origin)


def fork_entry(fork: Fork, *, origin: int = 0) -> Control:
    """Return the entry by which another owner goes on from here. It has to be the first of its segment."""
    return Control(Kind.FORK, _body_of(fork), origin)


def _body_of(record: Record) -> dict[str, Any]:
    body = record._asdict()
    del body["recorded_seq"]
    return body


def record_of(kind: int, seq: int, body: Mapping[str, Any]) -> Record:
    """What an entry that was not refused adds."""
    made = RECORDED[Kind(kind)]
    try:
        fields = {name: body[name] for name in made._fields if name != "recorded_seq"}
    except KeyError as error:
        raise Corrupt(f"an entry of the catalogue has no {error.args[0]}", seq=seq) from error
    return made(**fields, recorded_seq=seq)


RECORDED: dict[Kind, type[SegmentDescriptor] | type[CheckpointDescriptor] | type[Fork]] = {
    Kind.SEGMENT_SHIPPED: SegmentDescriptor,
    Kind.CHECKPOINT_SHIPPED: CheckpointDescriptor,
    Kind.FORK: Fork,
}


_BYTES: dict[type[Any], dict[str, int]] = {
    SegmentDescriptor: {"hash": HASH_BYTES},
    CheckpointDescriptor: {"hash": HASH_BYTES, "root": HASH_BYTES, "control_hash": HASH_BYTES},
    Fork: {"cluster_id": CLUSTER_ID_BYTES, "parent_segment": HASH_BYTES, "parent_manifest": HASH_BYTES},
}


def bytes_in(made: type[Any]) -> dict[str, int]:
    """The fields of an entry that are hashes and ids, with their sizes."""
    return _BYTES[made]


def numbers_in(made: type[Any]) -> list[str]:
    """Its fields that are whole numbers."""
    return [name for name in made._fields if name not in _BYTES[made] and name != "recorded_seq"]


# ---------------------------------------------------------------------------- chunks


def encode_chunk(name: str, records: Sequence[Record]) -> bytes:
    rows = [list(record) for record in records]
    data: bytes = cbor2.dumps({"list": name, "version": CHUNK_VERSION, "records": rows}, canonical=True)
    return data


def decode_chunk(name: str, made: type[R], data: bytes) -> list[R]:
    try:
        found: Any = cbor2.loads(data)
        version = found["version"]
        if type(version) is int and version > CHUNK_VERSION:
            raise NewerVersion(f"a chunk of the catalogue has version {version}")
        records = [_record(made, row) for row in found["records"]]
        if version != CHUNK_VERSION or found["list"] != name or not records:
            raise ValueError("it is of another list")
    except NewerVersion:
        raise
    except Exception as error:  # cbor2 raises whatever its decoding of hostile bytes runs into
        raise Corrupt(f"a chunk of the catalogue's {name} cannot be read", hint=HINT) from error
    return records


def decode_any_chunk(data: bytes) -> tuple[str, list[Any]]:
    """The records of a chunk of whichever list, and its name."""
    try:
        name = cbor2.loads(data)["list"]
        made = _LISTS[name]
    except Exception as error:  # cbor2 raises whatever its decoding of hostile bytes runs into
        raise Corrupt("a chunk of the catalogue cannot be read", hint=HINT) from error
    return name, decode_chunk(name, made, data)


_LISTS: dict[str, type[Any]] = {
    "segments": SegmentDescriptor,
    "checkpoints": CheckpointDescriptor,
    "forks": Fork,
}


def _record(made: type[R], row: Sequence[Any]) -> R:
    record = made(*row)
    sizes = bytes_in(type(record))
    for field, value in zip(record._fields, record, strict=True):
        if field in sizes:
            if type(value) is not bytes or len(value) != sizes[field]:
                raise ValueError(f"{field} has not {sizes[field]} bytes")
        elif type(value) is not int or not 0 <= value <= format.SEQ_MAX:
            raise ValueError(f"{field} is no number")
    return record


class ListHead(NamedTuple):
    """A list by its chunks' hashes, the hashes of the runs of what is in no chunk, and the records of what is
    in neither. So it has `record_count` of them."""

    chunks: list[bytes]
    runs: list[bytes]
    rest: list[list[Any]]

    @property
    def record_count(self) -> int:
        return len(self.chunks) * CHUNK_RECORDS + len(self.runs) * RUN_RECORDS + len(self.rest)

    def to_body(self) -> dict[str, Any]:
        return {"chunks": self.chunks, "runs": self.runs, "rest": self.rest}

    @classmethod
    def from_body(cls, body: Any) -> ListHead:
        try:
            head = cls(body["chunks"], body["runs"], body["rest"])
            if any(type(each) is not list for each in (*head, *head.rest)) or len(body) != len(head):
                raise ValueError("it has other parts")
            if any(type(each) is not bytes or len(each) != HASH_BYTES for each in (*head.chunks, *head.runs)):
                raise ValueError("a hash has not 32 bytes")
            if len(head.runs) >= CHUNK_RECORDS // RUN_RECORDS or len(head.rest) >= RUN_RECORDS:
                raise ValueError("it is not divided as it has to be")
        except Exception as error:  # whatever hostile content runs into
            raise Corrupt("a list of the catalogue cannot be read", hint=HINT) from error
        return head


NOTHING = ListHead([], [], [])


class RecordList(Generic[R]):
    """An append-only list. Full chunks are kept as bytes, and few of them decoded: there may be very many."""

    def __init__(self, name: str, made: type[R]) -> None:
        self.name = name
        self._made = made
        # Readers have no lock: they take both at one moment. The first is never changed, the second grows.
        self._parts: tuple[list[bytes], list[R]] = ([], [])
        self._firsts: dict[int, R] = {}
        self._hashes: dict[int, bytes] = {}
        self._run_hashes: dict[int, bytes] = {}
        self._decoded: list[tuple[int, list[R]] | None] = [None] * DECODED_MAX
        self._stored = 0

    def __len__(self) -> int:
        chunks, rest = self._parts
        return len(chunks) * CHUNK_RECORDS + len(rest)

    def __getitem__(self, index: int) -> R:
        parts = self._parts
        count = len(parts[0]) * CHUNK_RECORDS + len(parts[1])
        if not -count <= index < count:
            raise IndexError(index)
        number, at = divmod(index % count, CHUNK_RECORDS)
        return self._records(number, parts)[at]

    def __iter__(self) -> Iterator[R]:
        return self.between(0, len(self))

    def between(self, start: int, stop: int) -> Iterator[R]:
        """The records from one number to below another."""
        stop = min(stop, len(self))
        while start < stop:
            number, at = divmod(start, CHUNK_RECORDS)
            part = self._records(number, self._parts)[at : at + stop - start]
            yield from part
            start += len(part)

    @property
    def last(self) -> R | None:
        return self[-1] if len(self) else None

    def append(self, record: R) -> None:
        chunks, rest = self._parts
        rest.append(record)
        if len(rest) == CHUNK_RECORDS:
            self._decoded[len(chunks) % DECODED_MAX] = (len(chunks), rest)
            self._parts = ([*chunks, encode_chunk(self.name, rest)], [])

    def _records(self, number: int, parts: tuple[list[bytes], list[R]]) -> list[R]:
        chunks, rest = parts
        if number == len(chunks):
            return rest
        decoded = self._decoded[number % DECODED_MAX]
        if decoded is None or decoded[0] != number:
            records = decode_chunk(self.name, self._made, chunks[number])
            if len(records) != CHUNK_RECORDS:
                raise Corrupt(f"a chunk of the catalogue's {self.name} has other counts", hint=HINT)
            decoded = self._decoded[number % DECODED_MAX] = (number, records)
        return decoded[1]

    def _first(self, number: int, parts: tuple[list[bytes], list[R]]) -> R:
        if number == len(parts[0]):
            return parts[1][0]
        first = self._firsts.get(number)
        if first is None:
            first = self._firsts[number] = self._records(number, parts)[0]
        return first

    def count_to(self, key: Callable[[R], int], value: int) -> int:
        """How many records have a `key`, which rises with the list, of at most `value`."""
        parts = self._parts
        numbers = range(len(parts[0]) + bool(parts[1]))
        number = bisect_right(numbers, value, key=lambda each: key(self._first(each, parts))) - 1
        if number < 0:
            return 0
        return number * CHUNK_RECORDS + bisect_right(self._records(number, parts), value, key=key)

    # ------------------------------------------------------------------ chunks, by hash

    def head(self, count: int) -> ListHead:
        """The first `count` records."""
        assert count <= len(self)
        number, left = divmod(count, CHUNK_RECORDS)
        records = self._records(number, self._parts)[:left] if left else []
        whole = left - left % RUN_RECORDS
        runs = [self._run_hash(number, records, start) for start in range(0, whole, RUN_RECORDS)]
        return ListHead(
            [self._hash(each) for each in range(number)], runs, [list(each) for each in records[whole:]]
        )

    def _run_hash(self, chunk: int, records: Sequence[R], start: int) -> bytes:
        """Return the hash of a run that is whole. Such a run never changes, so its hash is kept: each
        manifest asks for all of them again."""
        place = chunk * CHUNK_RECORDS + start
        found = self._run_hashes.get(place)
        if found is None:
            run = encode_chunk(self.name, records[start : start + RUN_RECORDS])
            found = self._run_hashes[place] = hash_of(run)
        return found

    def objects(self, head: ListHead, known: ListHead) -> Iterator[tuple[bytes, bytes]]:
        """What `head` needs by hash and `known` does not."""
        had = {*known.chunks, *known.runs}
        for number, chunk_hash in enumerate(head.chunks):
            if chunk_hash not in had:
                yield chunk_hash, self._parts[0][number]
        start = len(head.chunks) * CHUNK_RECORDS
        if not had.issuperset(head.runs):
            records = list(self.between(start, start + len(head.runs) * RUN_RECORDS))
            for run_hash, data in zip(head.runs, self._runs(records), strict=True):
                if run_hash not in had:
                    yield run_hash, data

    def _runs(self, records: Sequence[R]) -> Iterator[bytes]:
        for start in range(0, len(records), RUN_RECORDS):
            yield encode_chunk(self.name, records[start : start + RUN_RECORDS])

    def _hash(self, number: int) -> bytes:
        found = self._hashes.get(number)
        if found is None:
            found = self._hashes[number] = hash_of(self._parts[0][number])
        return found

    def read(self, body: Any, read_chunk: ReadChunk) -> None:
        """Into an empty list, what a head says."""
        assert not len(self)
        head = ListHead.from_body(body)
        try:
            rest = [_record(self._made, row) for row in head.rest]
        except Exception as error:  # whatever hostile content runs into
            raise Corrupt(f"the catalogue's {self.name} cannot be read", hint=HINT) from error
        chunks: list[bytes] = []
        records: list[R] = []
        for number, chunk_hash in enumerate(head.chunks):
            chunks.append(_verified(read_chunk(chunk_hash), chunk_hash, self.name))
            self._records(number, (chunks, records))
        for run_hash in head.runs:
            data = _verified(read_chunk(run_hash), run_hash, self.name)
            run = decode_chunk(self.name, self._made, data)
            if len(run) != RUN_RECORDS:
                raise Corrupt(f"a run of the catalogue's {self.name} has other counts", hint=HINT)
            records += run
        self._parts = (chunks, records + rest)

    # ------------------------------------------------------------------ the page store

    def freeze(self) -> dict[bytes, bytes]:
        """What the page store does not have. It counts as stored from now on."""
        count = len(self)
        if count == self._stored:
            return {}
        first, self._stored = self._stored // CHUNK_RECORDS, count
        chunks, rest = self._parts
        changed = dict(enumerate(chunks[first:], first))
        if rest:
            changed[len(chunks)] = encode_chunk(self.name, rest)
        return {
            _KEY.pack(CATALOGUE_KEY, self.name[:1].encode(), number): format.U32.pack(crc32(data)) + data
            for number, data in changed.items()
        }

    def load(self, stored: Sequence[tuple[int, bytes]]) -> None:
        """What the page store has, in order."""
        chunks: list[bytes] = []
        for position, (number, value) in enumerate(stored):
            checksum, data = value[: format.U32.size], value[format.U32.size :]
            if position != number or checksum != format.U32.pack(crc32(data)):
                raise Corrupt(f"the catalogue's {self.name} in the pages cannot be read", hint=HINT)
            chunks.append(data)
        if chunks:
            records = decode_chunk(self.name, self._made, chunks[-1])
            if len(records) != CHUNK_RECORDS:
                del chunks[-1]
                self._parts = (chunks, records)
            else:
                self._parts = (chunks, [])
        self._stored = len(self)


def _verified(data: bytes, expected: bytes, name: str) -> bytes:
    if hash_of(data) != expected:
        raise Corrupt(f"the hash of a chunk of the catalogue's {name} does not match", hint=HINT)
    return data


# ---------------------------------------------------------------------------- all three


class Catalogue:
    """What is recorded, with the state's lock; looking up needs none."""

    def __init__(self) -> None:
        self.segments = RecordList("segments", SegmentDescriptor)
        self.checkpoints = RecordList("checkpoints", CheckpointDescriptor)
        self.forks = RecordList("forks", Fork)

    @property
    def _lists(self) -> tuple[RecordList[Any], ...]:
        return self.segments, self.checkpoints, self.forks

    def __bool__(self) -> bool:
        return any(len(each) for each in self._lists)

    def add(self, record: Record) -> None:
        if isinstance(record, SegmentDescriptor):
            self.segments.append(record)
        elif isinstance(record, CheckpointDescriptor):
            self.checkpoints.append(record)
        else:
            self.forks.append(record)

    # ------------------------------------------------------------------ looking up

    @property
    def hwm(self) -> int:
        """Every entry up to here is recorded as shipped."""
        last = self.segments.last
        return 0 if last is None else last.last

    def hwm_at(self, seq: int) -> int:
        """Return the seq up to which every entry is recorded as shipped, as of `seq`."""
        last = self.segments.last
        if last is None or last.recorded_seq <= seq:
            return self.hwm
        count = self.segments.count_to(_recorded_seq, seq)
        return self.segments[count - 1].last if count else 0

    @property
    def hash_last(self) -> bytes:
        """The hash of the last segment; zeros where there is none."""
        last = self.segments.last
        return NO_HASH if last is None else last.hash

    @property
    def checkpoint_seq(self) -> int:
        """The seq of the last checkpoint that was shipped; 0 for none."""
        last = self.checkpoints.last
        return 0 if last is None else last.seq

    def segment_of(self, seq: int) -> SegmentDescriptor | None:
        """The segment that has an entry, or in which it is a hole."""
        count = self.segments.count_to(_first, seq)
        found = self.segments[count - 1] if count else None
        return found if found is not None and seq <= found.last else None

    def segments_from(self, seq: int) -> Iterator[SegmentDescriptor]:
        """Return the segments that have entries from `seq` on, in order."""
        start = self.segments.count_to(_last, seq - 1)
        return self.segments.between(start, len(self.segments))

    def segment_from_time(self, time_us: int) -> SegmentDescriptor | None:
        """The first that has an entry of this time, or a later one."""
        count = self.segments.count_to(_time_max_us, time_us - 1)
        return self.segments[count] if count < len(self.segments) else None

    def checkpoint_not_above(self, seq: int) -> CheckpointDescriptor | None:
        """The newest one that is of `seq`, or of a seq below it."""
        count = self.checkpoints.count_to(_checkpoint_seq, seq)
        return self.checkpoints[count - 1] if count else None

    def epoch_at(self, seq: int) -> int:
        """The epoch of the entry `seq`."""
        count = self.forks.count_to(_recorded_seq, seq)
        return self.forks[count - 1].epoch if count else 1

    def cluster_id_at(self, seq: int) -> bytes | None:
        """Whose log it was at the entry `seq`; None before the first `fork`, of which the catalogue says
        nothing."""
        count = self.forks.count_to(_recorded_seq, seq)
        return self.forks[count - 1].cluster_id if count else None

    @property
    def recorded_seq(self) -> int:
        """The seq of the last entry that has recorded something; 0 for none."""
        return max((each[-1].recorded_seq for each in self._lists if len(each)), default=0)

    def damage(self) -> Iterator[str]:
        """What is wrong with the records. It reads all of them."""
        last, epoch = 0, 1
        for segment in self.segments:
            if not last < segment.first <= segment.last < segment.recorded_seq or segment.epoch < epoch:
                yield f"the catalogue's segment from {segment.first} on does not follow the one before it"
            last, epoch = segment.last, segment.epoch
        for each in self._lists:
            seqs = [record.recorded_seq for record in each]
            if any(seq >= after for seq, after in pairwise(seqs)):
                yield f"the catalogue's {each.name} are out of order"

    # ------------------------------------------------------------------ as of a seq

    def seqs_after(self, seq: int) -> list[int]:
        """The entries above `seq` that record what is in the store, in order: each has a manifest."""
        found: list[int] = []
        for each in (self.segments, self.checkpoints):
            start = each.count_to(_recorded_seq, seq)
            found += [record.recorded_seq for record in each.between(start, len(each))]
        return sorted(found)

    def heads(self, seq: int = format.SEQ_MAX) -> dict[str, ListHead]:
        """The lists as of a seq, by name."""
        return {each.name: each.head(each.count_to(_recorded_seq, seq)) for each in self._lists}

    def body(self, seq: int = format.SEQ_MAX) -> dict[str, Any]:
        """Return the lists as of `seq`, as they stand in a checkpoint's control part and in a manifest."""
        return {name: head.to_body() for name, head in self.heads(seq).items()}

    def objects(
        self, heads: Mapping[str, ListHead], known: Mapping[str, ListHead] | None = None
    ) -> Iterator[tuple[bytes, bytes]]:
        """The chunks and runs, by hash, that `heads` need and `known` do not."""
        for each in self._lists:
            yield from each.objects(heads[each.name], known.get(each.name, NOTHING) if known else NOTHING)

    @classmethod
    def from_body(cls, body: Mapping[str, Any], read_chunk: ReadChunk) -> Catalogue:
        """From what `body` gave, and its chunks."""
        catalogue = cls()
        for each in catalogue._lists:
            if each.name not in body:
                raise Corrupt(f"a catalogue has no {each.name}", hint=HINT)
            each.read(body[each.name], read_chunk)
        return catalogue

    # ------------------------------------------------------------------ the page store

    def freeze(self) -> dict[bytes, bytes]:
        return {key: value for each in self._lists for key, value in each.freeze().items()}

    def load(self, stored: Mapping[bytes, bytes]) -> None:
        parts: dict[bytes, list[tuple[int, bytes]]] = {each.name[:1].encode(): [] for each in self._lists}
        for key, value in sorted(stored.items()):
            if key.startswith(CATALOGUE_KEY):
                if len(key) != _KEY.size or key[10:11] not in parts:
                    raise Corrupt("the key of a part of the catalogue cannot be read", hint=HINT)
                parts[key[10:11]].append((_KEY.unpack(key)[2], value))
        for each in self._lists:
            each.load(parts[each.name[:1].encode()])


def _recorded_seq(record: Record) -> int:
    return record.recorded_seq


def _first(segment: SegmentDescriptor) -> int:
    return segment.first


def _last(segment: SegmentDescriptor) -> int:
    return segment.last


def _time_max_us(segment: SegmentDescriptor) -> int:
    return segment.time_max_us


def _checkpoint_seq(checkpoint: CheckpointDescriptor) -> int:
    return checkpoint.seq
