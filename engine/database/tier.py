"""What an engine knows of its object store: whoever ships there, as far as a caller can see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from lowwater.engine.format.records import Object

if TYPE_CHECKING:
    from lowwater.engine.log.log import Log
    from lowwater.engine.state.catalogue import Catalogue, CheckpointDescriptor, SegmentDescriptor

# `waiting`: the store was not reached yet. `working`: there is something to ship, and it is being shipped.
# `idle`: all that is complete is there. `failing`: it is tried again. `stopped`: somebody has to act.
ShippingState = Literal["waiting", "working", "idle", "failing", "stopped"]


@dataclass(frozen=True, slots=True)
class Alarm:
    """What shipping cannot pass: it is never stepped over."""

    what: str
    where: str | None
    seq: int | None
    hint: str


@dataclass(frozen=True, slots=True)
class RegionStatus:
    """One object store: how far its manifests are. `counts` says whether the marks wait for it."""

    uri: str
    hwm: int
    counts: bool
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippingStatus:
    state: ShippingState
    uri: str
    epoch: int
    """Under which this node ships; 0 while it has not claimed one."""
    hwm: int
    counted_hwm: int
    lag_bytes: int
    lag_seconds: float
    error: str | None
    failures: int
    """In a row."""
    retry_in_s: float | None
    alarm: Alarm | None
    regions: tuple[RegionStatus, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        from dataclasses import asdict

        return asdict(self)


class OlderVersions(Protocol):
    """What pages and memory do not have any more, read from elsewhere: slower, and never wrong. The seqs are
    applied and durable."""

    def at(self, bucket: str, key: str, seq: int) -> Object | None:
        """The newest version not above `seq`; None where it is a deletion, or there is none."""
        ...

    def scan(self, bucket: str, low: bytes, high: bytes, seq: int) -> Iterator[Object]:
        """The objects whose encoded keys are from `low` to below `high`, in their order."""
        ...

    def root(self, seq: int) -> str | None:
        """The fingerprint as of a seq of which it is known without reading."""
        ...


class Tier(Protocol):
    @property
    def own_after(self) -> int:
        """What was recorded up to this entry is another cluster's, of which this one is a clone."""
        ...

    @property
    def cache_bytes(self) -> int:
        """What its cache takes of the disk."""
        ...

    def older_versions(self, log: Log, catalogue: Catalogue) -> OlderVersions: ...

    def ship(self, timeout_s: float | None) -> int:
        """Return once what is durable now is shipped, and its marks count: the high-water mark."""
        ...

    def status(self) -> ShippingStatus: ...

    def read_checkpoint(self, checkpoint: CheckpointDescriptor) -> tuple[bytes, Callable[[bytes], bytes]]:
        """The index of a checkpoint that is recorded, and what reads its packs by their hashes."""
        ...

    def require_shipped(self, segments: Sequence[SegmentDescriptor]) -> None:
        """Before they are removed here: that a store has them. Raises where one is neither there nor comes
        there now."""
        ...

    def checkpoints_needed(self) -> list[int]:
        """The seqs of checkpoints that are to be shipped, or that a store lacks of which the log says so."""
        ...

    def make_room(self) -> bool:
        """The disk is full: let go of what can be fetched again, at once, and purge what can be, soon.
        Returns whether there is anything to purge."""
        ...

    def finish(self) -> None:
        """Before the engine is closed: have the checkpoint that was made last shipped, unless something is in
        the way of that."""
        ...

    def stop(self) -> None:
        """Return once nothing of it runs any more."""
        ...

    def close(self) -> None:
        """After the engine was closed."""
        ...
