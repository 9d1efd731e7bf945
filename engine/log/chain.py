"""What the log itself decides: who it belongs to, how it is cut into segments, and what each one follows.

Always true:
  - `Chain` is a function of the entries alone, so every replica cuts the same segments;
  - a segment ends after the frame that makes it `segment_bytes` long, unless that frame lies inside a
    group, and after a `seal`, `checkpoint` or `settings` entry that was not refused. Nothing else ends one;
  - `create` is the first entry of a log, and `fork` the first of its segment (a `seal` comes before it): so
    whether a segment is complete can be seen without what comes after it;
  - what shapes a segment is in force from its first frame to its last, and is written in its header.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from lowwater.engine.format import format
from lowwater.engine.format.entries import Control, Entry, decode_body
from lowwater.engine.format.format import Compression, Flag, Kind, SegmentHeader
from lowwater.errors import Corrupt, InvalidEntry, NewerVersion

SALT_BYTES = 16
CLUSTER_ID_BYTES = 16


class LogSettings(NamedTuple):
    """Settings that shape shared bytes. They travel in the log; the defaults are the format's.

    The last two belong to the engine's pages, and never change after the first entry. They are in no header.
    They are None where they are not known, because the segment with that entry is no longer here.
    """

    segment_bytes: int = format.SEGMENT_BYTES_DEFAULT
    block_bytes: int = format.BLOCK_BYTES_DEFAULT
    compression: int = Compression.ZSTD
    # Whether changes say what their keys had before: of databases and engines, whose state tells.
    before_images: int = 0
    page_keys: int | None = 64
    inline_bytes_max: int | None = 256


class Creation(NamedTuple):
    """What the first entry of a log says. The settings are those that the log began with."""

    cluster_id: bytes
    salt: bytes
    settings: LogSettings


_SETTING_RANGES = {
    "segment_bytes": (format.SEGMENT_BYTES_MIN, format.SEGMENT_BYTES_MAX),
    "block_bytes": (format.BLOCK_BYTES_MIN, format.BLOCK_BYTES_MAX),
    "compression": (0, len(Compression) - 1),
    "before_images": (0, 1),
    "page_keys": (2, 65536),
    "inline_bytes_max": (0, 65536),
}
_UNCHANGEABLE = ("page_keys", "inline_bytes_max")


def update_settings(settings: LogSettings, changes: Mapping[str, Any]) -> LogSettings:
    for name, value in changes.items():
        if name not in _SETTING_RANGES:
            raise NewerVersion(f"the log setting {name!r:.80} is not known to this version")
        lowest, highest = _SETTING_RANGES[name]
        if name == "compression" and type(value) is int and value > highest:
            raise NewerVersion(f"the compression {value!r:.80} is not known to this version")
        if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
            raise InvalidEntry(
                f"the log setting {name} is {value!r:.80}",
                hint=f"give a whole number from {lowest:,} to {highest:,}",
            )
    return settings._replace(**changes)


def create_entry(
    cluster_id: bytes, salt: bytes, settings: Mapping[str, Any] | None = None, *, origin: int = 0
) -> Control:
    """Return the first entry of a log. What `settings` leaves out has the format's defaults, for ever."""
    if len(cluster_id) != CLUSTER_ID_BYTES or len(salt) != SALT_BYTES:
        raise InvalidEntry(
            "a cluster id and a salt have 16 bytes each", hint="make them with secrets.token_bytes(16)"
        )
    update_settings(LogSettings(), settings or {})
    body = {"cluster_id": cluster_id, "salt": salt, "settings": dict(settings or {})}
    return Control(Kind.CREATE, body, origin)


class Create(NamedTuple):
    """The first entry of any log. What `settings` leaves out has the format's defaults, for ever."""

    cluster_id: bytes
    salt: bytes
    settings: Mapping[str, Any] = MappingProxyType({})
    origin: int = 0
    time_us: int = 0

    def encode(self, time_us: int) -> bytes:
        for name, size in (("cluster_id", CLUSTER_ID_BYTES), ("salt", SALT_BYTES)):
            given = getattr(self, name)
            if not isinstance(given, bytes) or len(given) != size:
                raise InvalidEntry(
                    f"the {name} has to have {size} bytes", hint="make it with secrets.token_bytes(16)"
                )
        return create_entry(self.cluster_id, self.salt, self.settings, origin=self.origin).encode(time_us)


def settings_entry(changes: Mapping[str, Any], *, origin: int = 0) -> Control:
    """Return the entry that changes settings from its seq on. It ends its segment."""
    require_changeable(changes)
    update_settings(LogSettings(), changes)
    return Control(Kind.SETTINGS, dict(changes), origin)


def require_changeable(changes: Mapping[str, Any]) -> None:
    for name in _UNCHANGEABLE:
        if name in changes:
            raise InvalidEntry(f"{name} is fixed by the first entry of a log", hint="make a new log for it")


def seal_entry(seq_first: int, *, origin: int = 0) -> Control:
    """Return the entry that ends the segment that began with `seq_first`."""
    return Control(Kind.SEAL, {"seq_first": seq_first}, origin)


def checkpoint_entry(seq_before: int, *, full: bool = False, origin: int = 0) -> Control:
    """Return the entry at which every replica makes a checkpoint of what is applied up to it. `seq_before` is
    the seq of the last such entry, 0 for none. Blocks that the checkpoint of that one has are not written
    again, unless this one is to be `full`."""
    body: dict[str, Any] = {"before": seq_before}
    if full:
        body["full"] = True
    return Control(Kind.CHECKPOINT, body, origin)


class Chain(NamedTuple):
    """Where a log stands: everything that its next frame, and its next segment's header, depend on."""

    seq_last: int = 0
    time_us: int = 0
    cluster_id: bytes = bytes(CLUSTER_ID_BYTES)
    epoch: int = 0
    settings: LogSettings = LogSettings()
    # Of the segment that is being written; 0 between two segments.
    body_bytes: int = 0
    seq_first: int = 0
    # None where the segment that begins with it is not here.
    creation: Creation | None = None

    @property
    def is_empty(self) -> bool:
        return self.seq_last == 0

    def header(self, seq_first: int, seq_before: int, hash_before: bytes) -> SegmentHeader:
        """The header of the segment that `enter` has just opened."""
        return SegmentHeader(
            seq_first=seq_first,
            seq_before=seq_before,
            hash_before=hash_before,
            cluster_id=self.cluster_id,
            epoch=self.epoch,
            segment_bytes=self.settings.segment_bytes,
            block_bytes=self.settings.block_bytes,
            compression=self.settings.compression,
            time_before_us=self.time_us,
            before_images=self.settings.before_images,
        )


def before_segment(header: SegmentHeader) -> Chain:
    """Where the log stood before a segment, as far as its header tells. The owner is the one that a `fork`
    names, where one comes first."""
    return Chain(
        seq_last=header.seq_before,
        time_us=header.time_before_us,
        cluster_id=header.cluster_id,
        epoch=header.epoch,
        settings=LogSettings(
            segment_bytes=header.segment_bytes,
            block_bytes=header.block_bytes,
            compression=header.compression,
            before_images=header.before_images,
            page_keys=None,
            inline_bytes_max=None,
        ),
    )


def _same_cut(chain: Chain, header: SegmentHeader) -> bool:
    settings = chain.settings
    return (header.segment_bytes, header.block_bytes, header.compression, header.before_images) == (
        settings.segment_bytes,
        settings.block_bytes,
        settings.compression,
        settings.before_images,
    )


def _same_owner(chain: Chain, header: SegmentHeader) -> bool:
    return (header.cluster_id, header.epoch) == (chain.cluster_id, chain.epoch)


def why_not_next(chain: Chain, header: SegmentHeader, *, forks: bool) -> str | None:
    """Why a segment with this header cannot be the one after `chain`; None where it can be.

    `forks` says that it begins with a `fork` that was not refused, which was compared with the header.
    """
    if not _same_cut(chain, header):
        return "the segment is cut by other settings than the log's"
    if forks:
        return None if header.epoch > chain.epoch else "the epoch does not rise with the `fork`"
    return None if _same_owner(chain, header) else "the segment belongs to another cluster or epoch"


def enter(
    chain: Chain, kind: int, flags: int, entry_of: Entry | None, header: SegmentHeader | None = None
) -> Chain:
    """The chain as a control frame finds it: `create` and `fork` name the owner of what follows.

    `entry_of` is the decoded entry for those two kinds. Where a file is read, `header` is the one of its
    segment, which must say what they say.
    """
    if kind == Kind.CREATE and not flags & Flag.REFUSED:
        if not chain.is_empty:
            raise InvalidEntry(
                "a log has one `create` entry, its first", hint="open a new directory for a new log"
            )
        assert entry_of is not None
        creation = _creation(decode_body(entry_of))
        chain = chain._replace(
            cluster_id=creation.cluster_id, epoch=1, settings=creation.settings, creation=creation
        )
        _require_told(chain, header)
        return chain
    if chain.is_empty:
        raise InvalidEntry(
            "the first entry of a log must be `create`", hint="append create_entry(cluster_id, salt) first"
        )
    if kind == Kind.FORK and not flags & Flag.REFUSED:
        if chain.body_bytes:
            raise InvalidEntry(
                "a `fork` must be the first entry of its segment", hint="append a `seal` before it"
            )
        assert entry_of is not None
        body = decode_body(entry_of)
        epoch = body.get("epoch")
        if type(epoch) is not int or not 0 < epoch < 2**64:
            raise InvalidEntry(
                "a `fork` entry has no epoch", hint="give a whole number above the log's epoch"
            )
        if header is None and epoch <= chain.epoch:
            raise InvalidEntry(
                f"a `fork` to epoch {epoch} cannot follow epoch {chain.epoch}",
                hint="give a whole number above the log's epoch",
            )
        chain = chain._replace(cluster_id=_bytes_of(body, "cluster_id", CLUSTER_ID_BYTES), epoch=epoch)
        _require_told(chain, header)
    return chain


def _creation(body: Mapping[str, Any]) -> Creation:
    settings = body.get("settings", {})
    if not isinstance(settings, dict):
        raise InvalidEntry("the settings of a `create` entry are not a map", hint="use create_entry()")
    return Creation(
        _bytes_of(body, "cluster_id", CLUSTER_ID_BYTES),
        _bytes_of(body, "salt", SALT_BYTES),
        update_settings(LogSettings(), settings),
    )


def _bytes_of(body: Mapping[str, Any], name: str, size: int) -> bytes:
    value = body.get(name)
    if not isinstance(value, bytes) or len(value) != size:
        raise InvalidEntry(f"there is no {name} of {size} bytes in this entry", hint="give it")
    return value


def _require_told(chain: Chain, header: SegmentHeader | None) -> None:
    if header is not None and not (_same_owner(chain, header) and _same_cut(chain, header)):
        raise Corrupt("the segment's header and its first entry name different clusters, epochs or settings")


# A tail of nothing but these is not sealed by age, or shipping would feed itself for ever.
IDLE_KINDS = frozenset(
    {Kind.NOOP, Kind.SEAL, Kind.FORK, Kind.SEGMENT_SHIPPED, Kind.CHECKPOINT, Kind.CHECKPOINT_SHIPPED}
)
ENDS_SEGMENT = frozenset({Kind.SEAL, Kind.CHECKPOINT, Kind.SETTINGS})
# From this kind on, entries may concern the log itself; below it they are data.
FIRST_CONTROL_KIND = int(Kind.CREATE)


def leave(
    chain: Chain, kind: int, flags: int, entry_of: Entry | None, *, in_group: bool
) -> tuple[Chain, bool]:
    """The chain after a frame was counted into it, and whether that frame ends its segment."""
    if kind in ENDS_SEGMENT and not flags & Flag.REFUSED:
        if kind == Kind.SETTINGS:
            assert entry_of is not None
            changes = decode_body(entry_of)
            require_changeable(changes)
            chain = chain._replace(settings=update_settings(chain.settings, changes))
        return chain._replace(body_bytes=0, seq_first=0), True
    if not in_group and chain.body_bytes >= chain.settings.segment_bytes:
        return chain._replace(body_bytes=0, seq_first=0), True
    return chain, False
