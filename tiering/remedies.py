"""What a scrub advises: what to do where an object is gone, and what one is that nothing reaches.

Always true: an object that nothing reaches is no damage. Readers take only what the newest manifest reaches,
so whatever else is there means nothing: it is work that goes on, a leftover, or another line's. Restores
alone look at checkpoints that no manifest names, and the log has all that is in these.
"""

from __future__ import annotations

from lowwater.tiering.names import ObjectName, Type
from lowwater.tiering.objects import Manifest

_COPY = "restore it from another copy of the archive, or from an older version that the store has kept"
_LOCAL = "copy it from the data directory of a node that still has it"
# Of a checkpoint that is gone, where the log from the one before it on is there.
REPLACED = (
    "nothing has to be done: the one before it, or the log, has what was in it, and restores from there take "
    "longer. A node that has it brings it back; make another with `db.checkpoint()`"
)
# What to do where an object of this type is gone.
HINTS: dict[Type, str] = {
    "cluster": "the next database that ships here writes it again",
    "epoch": f"{_COPY}; until then open no second database on this archive",
    "state": "nothing to do: the one before it and lists tell the same, and the next one says it again",
    "segment": f"{_LOCAL}, `wal/segment-….log` of the same seqs, to this name; or {_COPY}",
    "manifest": _COPY,
    "chunk": _COPY,
    "checkpoint": f"{_LOCAL}, from `checkpoints/`; or {_COPY}; another checkpoint and the log replace it",
    "pack": f"{_LOCAL}, from `packs/`; or {_COPY}; a checkpoint without it and the log replace it",
}

UNUSED = "nothing to do: no reader needs it, and it does no harm"
BUILT = "nothing to do: a restore may begin with it, and does not need it"
_WAIT = "nothing to do: whoever goes on shipping records it"
_CLAIM = "nothing to do: claims stay, so that no number comes again"
_FENCED = "what is in it never counted: keep it until you know that nobody misses those writes"


def unreached_damage(found: ObjectName) -> str:
    """What to do where an object that nothing reaches is not what its name says."""
    if found.type in ("checkpoint", "pack"):
        return "keep a copy of it elsewhere, then move it away: restores from its checkpoint run into it"
    return UNUSED


def why_unreached(found: ObjectName, newest: Manifest | None, *, is_following: bool) -> tuple[str, str]:
    """What it is, and what to do. `is_following` says that a restore goes on with this segment."""
    epoch, hwm = (0, 0) if newest is None else (newest.epoch, newest.hwm)
    if found.type == "epoch":
        if found.epoch > epoch:
            return "an epoch was claimed, and nothing is published in it yet", _WAIT
        return "a claim that nothing followed", _CLAIM
    if is_following:
        return "the segment was shipped, and no manifest says so yet", _WAIT
    if found.type in ("segment", "manifest"):
        if found.epoch > epoch:
            return f"of epoch {found.epoch}, in which nothing is published yet", _WAIT
        if found.epoch == epoch and found.type == "segment" and found.seq > hwm:
            return "the segment was shipped before the one that it follows", _WAIT
        return f"of another line of epoch {found.epoch}, whose owner was fenced", _FENCED
    if found.type == "checkpoint":
        return (
            "no entry records this checkpoint: it was built, or not shipped to its end",
            BUILT,
        )
    if found.type == "pack":
        return (
            "no recorded checkpoint needs this pack: it was built, or shipped for one that is not",
            BUILT,
        )
    return f"no manifest that counts needs this {found.type}", UNUSED
