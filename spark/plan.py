"""What is to be read of an archive, and by whom: found out on the driver, before anything is read.

Always true:
  - what is read is what one manifest reaches, the newest when it was pinned, also where others ship
    meanwhile. Nothing counts that it does not reach, and of a log directory nothing that is not sealed;
  - all that can be wrong with what was asked for is told here, by one error that names the object;
  - a part is small, can be pickled, and says all that a process elsewhere has to know. No secret is in its
    `repr`;
  - equal arguments give equal parts.
"""

from __future__ import annotations

import difflib
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from lowwater.engine.format import format
from lowwater.engine.format.blocks import NO_HASH
from lowwater.engine.log.chain import Creation
from lowwater.engine.log.directory import (
    LOG_DIRECTORY,
    Segment,
    check_link,
    read_names,
    read_sealed,
    sealed_segment,
    typed_errors,
)
from lowwater.engine.log.directory import segment_name as local_name
from lowwater.engine.seams.real import RealClock, RealFiles
from lowwater.engine.state.catalogue import (
    Catalogue,
    CheckpointDescriptor,
    Fork,
    SegmentDescriptor,
    describe_segment,
)
from lowwater.errors import Corrupt, InvalidConfig, InvalidEntry, LimitExceeded, NotFound
from lowwater.tiering import shipped_log
from lowwater.tiering.archive import open_archive
from lowwater.tiering.fetcher import Fetcher
from lowwater.tiering.folder_store import FolderStore
from lowwater.tiering.lineage import Lineage, parents_opener
from lowwater.tiering.names import CLUSTER, segment_name
from lowwater.tiering.open_store import open_store
from lowwater.tiering.shipped_log import Moment
from lowwater.tiering.states import newest_manifests
from lowwater.tiering.store import Store, at
from lowwater.tiering.store_uri import StorePlace, parse_uri

if TYPE_CHECKING:
    from lowwater.config import TierConfig

PART_BYTES = 128 * 2**20
# What only passes through a task takes no memory, and 128 MiB of it a fifth of a second. A task takes 30 to
# 60 ms of a core by itself.
PASSING_BYTES = 4 * PART_BYTES
# So many tasks may read the same frames, each for its share of the keys.
SHARES_MAX = 4
# Smaller ones are not worth a task.
PART_BYTES_MIN = 2**20
# A segment is not divided for less than this share of a part: both tasks would read its footer.
DIVIDED_SHARE = 0.15
SEQ_MAX = 2**63 - 1
"""Spark has no unsigned numbers."""

SETTINGS_PREFIX = "tier."
SETTINGS = ("timeout_ms", "attempts_max", "requests_max", "ranged_reads", "part_bytes", "parts_at_once")
"""What of `[tier]` says how a store is called."""

Verify = Literal["strict", "deep", "none"]
"""`strict` compares the hashes of all blocks that are read, `deep` each frame's checksum besides, and decodes
all of it; `none` nothing."""


@dataclass(frozen=True)
class PartPlace:
    """Where segments lie, as every process can open it: a store, or the folder of a log."""

    uri: str
    options: Mapping[str, str] = field(repr=False)
    is_log: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    """How the store is called, by the names of `[tier]`: what is not as it is by default."""

    @property
    def known_as(self) -> tuple[str, tuple[tuple[str, str], ...], tuple[tuple[str, Any], ...]]:
        """What a process that has opened it may remember it by."""
        return self.uri, tuple(sorted(self.options.items())), tuple(sorted(self.settings.items()))


@dataclass(frozen=True)
class Pinned:
    """An archive as of its newest manifest, or the sealed segments of a log directory."""

    place: PartPlace
    cluster_id: bytes
    epoch: int
    manifest: str
    """The name of its object; empty for a log directory."""
    seq_recorded: int
    """The entry of the manifest; 0 for a log directory."""
    segments: Sequence[SegmentDescriptor]
    checkpoints: Sequence[CheckpointDescriptor] = ()
    forks: Sequence[Fork] = ()
    seq_before: int = 0
    """The last entry before the first segment: a log directory may begin late."""
    hash_before: bytes = NO_HASH
    """The hash of the segment before the first one."""

    @property
    def seq_first(self) -> int:
        return self.segments[0].first

    @property
    def hwm(self) -> int:
        """The last seq that can be read."""
        return self.segments[-1].last

    def name_of(self, segment: SegmentDescriptor) -> str:
        """The object, or file, that holds a segment."""
        return local_name(segment.first, segment.last) if self.place.is_log else segment_name(segment)

    def where(self, name: str) -> str:
        """An object, as errors name it."""
        return at(self.place.uri, name)

    @property
    def reached_by(self) -> str:
        """What says what is there, as errors name it: the manifest, or the directory."""
        return self.where(self.manifest) if self.manifest else self.place.uri

    def segment_hash(self, seq: int) -> str:
        """Return the hash of the segment that an entry lies in, or after: it tells this log from another one
        with such a seq. It is empty before the first segment."""
        count = bisect_right(self.segments, seq, key=lambda segment: segment.first)
        found = self.segments[count - 1].hash if count else self.hash_before
        return found.hex() if any(found) else ""

    def catalogue(self) -> Catalogue:
        """The segments, to look them up by seq and time."""
        catalogue = Catalogue()
        for segment in self.segments:
            catalogue.add(segment)
        return catalogue


class PlanSelection(NamedTuple):
    """Which entries are wanted: all that fulfil every condition that is given. All bounds are inclusive."""

    seq_first: int = 0
    seq_last: int = SEQ_MAX
    time_min_us: int = 0
    time_max_us: int = format.TIME_US_MAX
    kinds: frozenset[str] | None = None
    bucket: str | None = None
    prefix: str | None = None
    """The beginning of the key. What has no key, has none that begins so."""
    key: str | None = None
    share: tuple[int, int] | None = None
    """Which of so many shares of the keys. What has neither bucket nor key is in all of them."""


EVERYTHING = PlanSelection()


class PlanPiece(NamedTuple):
    """Frames of one segment, from one number to below another."""

    name: str
    segment: SegmentDescriptor
    frame_first: int
    frame_stop: int


@dataclass(frozen=True)
class Part:
    """What one task reads: pieces that follow one another in the log."""

    place: PartPlace
    pieces: tuple[PlanPiece, ...]
    selection: PlanSelection = EVERYTHING
    verify: Verify = "strict"


def shared_place(uri: str, options: Mapping[str, str] | None) -> StorePlace:
    """Where a URI leads, which has to be the same place in every process."""
    place = parse_uri(uri, options)
    if place.kind == "memory":
        raise InvalidConfig(
            "this is the memory of one process, and Spark's tasks run in others",
            path=place.uri,
            hint="give a folder, or the URI of a store",
        )
    return place


def store_place(uri: str, options: Mapping[str, str] | None) -> PartPlace:
    """Return where a URI leads, which has to be the same place in every process, and how the store is called
    there: by the settings of `[tier]` that are among the options, as `tier.timeout_ms`, and else by those in
    the environment of this process."""
    given = dict(options or {})
    for name in given:
        if not isinstance(name, str):
            raise InvalidConfig(f"{name!r:.80} is no name of an option", hint="names of options are text")
    settings = {name: given.pop(name) for name in list(given) if name.startswith(SETTINGS_PREFIX)}
    place = shared_place(uri, given)
    return PartPlace(place.uri, dict(place.options), settings=_settings(settings))


def _settings(given: Mapping[str, str]) -> dict[str, Any]:
    from lowwater.config import Config, TierConfig

    for name in given:
        if name.removeprefix(SETTINGS_PREFIX) not in SETTINGS:
            nearest = difflib.get_close_matches(name.removeprefix(SETTINGS_PREFIX), SETTINGS, n=1, cutoff=0)
            raise InvalidConfig(
                f"there is no option {name!r:.80}", hint=f"the nearest one is {SETTINGS_PREFIX}{nearest[0]}"
            )
    tier = Config.load(tier={name.removeprefix(SETTINGS_PREFIX): text for name, text in given.items()}).tier
    default = TierConfig()
    found = {name: getattr(tier, name) for name in SETTINGS}
    return {name: value for name, value in found.items() if value != getattr(default, name)}


def require_reading(verify: str, part_bytes: int) -> None:
    """Raise InvalidConfig unless `verify` is a way to read, and `part_bytes` a whole number above 0."""
    if verify not in get_args(Verify):
        raise InvalidConfig(f"verify is {verify!r:.80}", hint=f"choose from {', '.join(get_args(Verify))}")
    if not isinstance(part_bytes, int) or part_bytes < 1:
        raise InvalidConfig(f"part_bytes is {part_bytes!r:.80}", hint="give a whole number above 0")


def require_kinds(kinds: Collection[str] | None) -> None:
    """Raise InvalidConfig unless all of these kinds of entries exist, and there are some where any are
    named."""
    for kind in sorted(kinds or ()):
        if kind not in format.KIND_CODES:
            nearest = difflib.get_close_matches(kind, format.KIND_CODES, n=1, cutoff=0)[0]
            raise InvalidConfig(
                f"there is no kind {kind!r:.80}",
                hint=f"the nearest one is {nearest}; there are {', '.join(format.KIND_CODES)}",
            )
    if kinds is not None and not kinds:
        raise InvalidConfig("no kind is named", hint="give some, as put, delete, copy, or leave it out")


def require_names(**names: str | None) -> None:
    """Raise InvalidEntry unless a bucket, a prefix … is text where it is given."""
    for what, name in names.items():
        if name is not None and not isinstance(name, str):
            raise InvalidEntry(f"{what} is {name!r:.80}, and no text", hint="give a str")


def open_place(place: PartPlace) -> Store:
    """In any process, which only reads."""
    if place.is_log:
        return FolderStore(place.uri.removeprefix("file://"), read_only=True)
    # What the archive of a clone does not have lies with its parent.
    return Lineage(open_own(place), parents_opener(place.uri, place.options, _tier_of(place)))


def open_own(place: PartPlace, *, read_only: bool = True) -> Store:
    """The store alone, in any process."""
    return open_store(place.uri, options=place.options, config=_tier_of(place), read_only=read_only)


def _tier_of(place: PartPlace) -> TierConfig | None:
    if not place.settings:
        return None  # pydantic takes longer to import than a task its time
    from lowwater.config import TierConfig

    return TierConfig(**place.settings)


# ---------------------------------------------------------------------------- pinning


def pin(uri: str, options: Mapping[str, str] | None = None, *, known: Pinned | None = None) -> Pinned:
    """Return the archive, or the directory of a log or a database, at `uri` as it is now. `options` are those
    of the store, as `open_store` takes them. Return `known` where nothing is newer."""
    if not uri:
        raise InvalidConfig(
            "nothing says which archive is meant", hint="give its URI, as load('s3://bucket/prefix')"
        )
    place = store_place(uri, options)
    where = parse_uri(place.uri, place.options)
    log = _log_directory(where.path) if where.kind in ("file", "shared_fs") else None
    pinned = _pin_archive(place, known) if log is None else _pin_log(log)
    if pinned.hwm > SEQ_MAX:
        raise LimitExceeded(
            f"the archive ends with seq {pinned.hwm}, and 2^63-1 is the highest number that Spark has",
            path=pinned.place.uri,
            seq=pinned.hwm,
            hint="give the entries lower seqs: nothing reads this archive in Spark",
        )
    return pinned


def _pin_archive(place: PartPlace, known: Pinned | None) -> Pinned:
    store = open_place(place)
    try:
        archive = open_archive(store)
        is_ours = known is not None and known.cluster_id == archive.cluster_id
        if known is not None and is_ours and newest_manifests(store, archive.states) == [known.manifest]:
            return known
        manifest = archive.newest()
        if manifest is None or not manifest.hwm:
            raise NotFound(
                "nothing was shipped to this archive yet",
                path=store.uri,
                hint="ship first, with `db.ship()`; `lowwater tier ls` lists what is there",
            )
        catalogue = archive.catalogue_of(manifest)
        return Pinned(
            place,
            archive.cluster_id,
            manifest.epoch,
            manifest.name,
            manifest.seq,
            tuple(catalogue.segments),
            tuple(catalogue.checkpoints),
            tuple(catalogue.forks),
        )
    finally:
        store.close()


def _log_directory(path: str) -> str | None:
    """The directory with the segments, where this is the directory of a log or of a database."""
    for directory in (path, f"{path}/{LOG_DIRECTORY}"):
        try:
            names = RealFiles().list(directory)
        except OSError:
            continue  # the store says what is wrong
        if CLUSTER in names:
            return None
        if any(name.endswith(".log") for name in names):
            return directory
    return None


def _pin_log(directory: str) -> Pinned:
    files = RealFiles()
    segments: list[SegmentDescriptor] = []
    before: Segment | None = None
    seq_before, hash_before = 0, NO_HASH
    with typed_errors(directory, "read the log"):
        numbered = read_names(files, directory).numbered
    for _, _, sealed, name in numbered:
        if not sealed:
            break  # whatever follows is younger
        path = f"{directory}/{name}"
        header, trailer = read_sealed(files, path)
        check_link(header, before, path)
        if before is None:
            seq_before, hash_before = header.seq_before, header.hash_before
        before = sealed_segment(path, header, trailer)
        described = describe_segment(header, trailer)
        if name != local_name(described.first, described.last):
            raise Corrupt(
                f"the segment holds the seqs {described.first} to {described.last}, its name says otherwise",
                path=path,
                hint="give the file its name back",
            )
        segments.append(described)
    if before is None:
        raise NotFound(
            "no segment of this log is sealed yet: there is nothing to read",
            path=directory,
            hint="seal one, with `db.ship()` or `log.seal()`, or write more",
        )
    return Pinned(
        PartPlace(f"file://{directory}", {}, is_log=True),
        before.header.cluster_id,
        before.header.epoch,
        "",
        0,
        segments,
        seq_before=seq_before,
        hash_before=hash_before,
    )


# ---------------------------------------------------------------------------- questions


def creation_of(pinned: Pinned) -> Creation:
    """Cluster id, salt, `page_keys`, `inline_bytes_max` …: what the first entry says. It reads that entry."""
    store = open_place(pinned.place)
    try:
        fetcher = Fetcher(store, clock=RealClock())
        return shipped_log.creation_in(pinned.catalogue(), fetcher, pinned.name_of)
    finally:
        store.close()


def seq_of(pinned: Pinned, moment: Moment) -> int:
    """The seq that is meant: itself, the last entry that is not later than a time, or the last one there is.
    A seq above the last one, or before the first, is an error. For a time it reads a little."""
    store = open_place(pinned.place)
    try:
        fetcher = Fetcher(store, clock=RealClock())
        return shipped_log.seq_of(pinned.catalogue(), fetcher, pinned.name_of, pinned.place.uri, moment)
    finally:
        store.close()


# ---------------------------------------------------------------------------- parts


def parts(
    pinned: Pinned,
    selection: PlanSelection = EVERYTHING,
    *,
    verify: Verify = "strict",
    part_bytes: int = PART_BYTES,
    tasks_min: int = 1,
) -> list[Part]:
    """Parts of about `part_bytes` of frames each, but smaller where fewer than `tasks_min` (two a core, say)
    would come out. Segments that hold nothing of the selection are left out."""
    wanted = list(_wanted(pinned, selection))
    total = sum(piece_bytes(piece) for piece in wanted)
    count = max(-(-total // part_bytes), min(tasks_min, total // PART_BYTES_MIN), 1)
    return [Part(pinned.place, tuple(pieces), selection, verify) for pieces in _divided(wanted, total, count)]


def shares(pinned: Pinned, selection: PlanSelection, *, verify: Verify, part_bytes: int) -> list[Part]:
    """All that is selected, once for each of a few shares of its keys. Nothing where a share would be larger
    than a part: up to there it costs less to read frames again than to bring together what was found. Nor is
    there more of it than a task can hold: where all is about one key, one share has all of it."""
    part_bytes = min(part_bytes, PART_BYTES)
    wanted = tuple(_wanted(pinned, selection))
    total = sum(map(piece_bytes, wanted))
    count = 1 if total <= PART_BYTES_MIN else 2
    while total > count * part_bytes and count < SHARES_MAX:
        count *= 2
    if not wanted or total > count * part_bytes:
        return []
    return [
        Part(pinned.place, wanted, selection._replace(share=(number, count) if count > 1 else None), verify)
        for number in range(count)
    ]


def piece_bytes(piece: PlanPiece) -> int:
    """How much of a segment's body it has, where frames are of one size."""
    segment = piece.segment
    return segment.body_bytes * (piece.frame_stop - piece.frame_first) // segment.frame_count


def _wanted(pinned: Pinned, selection: PlanSelection) -> Iterator[PlanPiece]:
    """The segments that may hold something of the selection, and their frames that may."""
    if selection.seq_first > selection.seq_last or selection.time_min_us > selection.time_max_us:
        return
    for segment in pinned.segments:
        if (
            segment.last < selection.seq_first
            or segment.first > selection.seq_last
            or segment.time_max_us < selection.time_min_us
            or segment.time_min_us > selection.time_max_us
        ):
            continue
        first, stop = 0, segment.frame_count
        if segment.last - segment.first + 1 == segment.frame_count:
            # Seqs rise, and there is one for each frame.
            first = max(first, selection.seq_first - segment.first)
            stop = min(stop, selection.seq_last + 1 - segment.first)
        if first < stop:
            yield PlanPiece(pinned.name_of(segment), segment, first, stop)


def _divided(pieces: Sequence[PlanPiece], total: int, count: int) -> Iterator[list[PlanPiece]]:
    """The pieces in `count` groups of about the same size, or fewer. A segment is divided where that makes a
    difference."""
    share = total / count
    group: list[PlanPiece] = []
    used = 0.0  # by the groups before, and by this one
    limit = share
    for piece in pieces:
        rest = piece
        while True:
            size = piece_bytes(rest)
            if used + size <= limit + share * DIVIDED_SHARE or rest.frame_stop - rest.frame_first == 1:
                break
            room = limit - used
            if room >= share * DIVIDED_SHARE:
                frames = rest.frame_stop - rest.frame_first
                middle = rest.frame_first + min(max(1, int(frames * room / size)), frames - 1)
                group.append(rest._replace(frame_stop=middle))
                rest = rest._replace(frame_first=middle)
                used += piece_bytes(group[-1])
            if group:
                yield group
                group = []
            limit += share
        group.append(rest)
        used += piece_bytes(rest)
    if group:
        yield group
