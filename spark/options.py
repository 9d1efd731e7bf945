"""What can be said to `spark.read.format("lowwater")`: the options, and what they mean for reading.

Always true:
  - an unknown option is an error that names the nearest known one, and so is a value that cannot be;
  - all bounds are inclusive, and what is asked for above the end of the archive is an error, not fewer rows;
  - nothing here reads anything, but to find the seq of a time.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple, get_args

from lowwater.engine.format import format
from lowwater.engine.format.moments import time_us_of
from lowwater.errors import InvalidConfig, VersionGone
from lowwater.spark.plan import (
    PASSING_BYTES,
    SEQ_MAX,
    SETTINGS_PREFIX,
    Pinned,
    PlanSelection,
    Verify,
    require_kinds,
)

STORE_PREFIX = "store."
BATCH_BYTES = 2**30

Moment = int | datetime


class Option(NamedTuple):
    """An option, as the documents show it. `docs/operating/spark.md` has the same table."""

    name: str
    default: str
    meaning: str


OPTIONS = (
    Option("path", "", "the archive, or the directory of a log or a database: `load(path)` gives it"),
    Option("start", "earliest", "the first seq, or a time with its zone; of a stream also `latest`"),
    Option("end", "", "the last seq, or a time: entries up to it. By default all that is shipped"),
    Option("kinds", "", "kinds of entries, as `put,delete,copy`. By default all"),
    Option("bucket", "", "entries of this bucket only"),
    Option("prefix", "", "entries whose key begins so"),
    Option("key", "", "entries of this key; with `bucket` they are found by the footers' indexes"),
    Option("verify", "strict", "`strict`, `deep` or `none`: see below"),
    Option("partition_bytes", str(PASSING_BYTES), "how much of the log a task reads, at most about"),
    Option("tasks_min", "two a core", "so many tasks even where the log is short, of 1 MiB or more"),
    Option("batch_bytes_max", str(BATCH_BYTES), "of a stream: what a batch reads of the log, about"),
    Option("batch_segments_max", "", "of a stream: so many segments a batch"),
    Option("batch_entries_max", "", "of a stream: so many entries a batch, about"),
    Option("fail_on_data_loss", "true", "`false` goes on where the entries from `start` on are gone"),
    Option("store.…", "", "options of the store, as `store.endpoint`"),
    Option("tier.…", "", "how it is called, as `tier.timeout_ms`: see below"),
)
_NAMES = [option.name for option in OPTIONS[:-2]]


@dataclass(frozen=True)
class Options:
    """What was asked for, decoded."""

    uri: str
    store: Mapping[str, str] = field(default_factory=dict, repr=False)
    start: Moment | None = None
    """None for the first entry there is."""
    latest: bool = False
    """Begin a stream after what is there."""
    end: Moment | None = None
    kinds: frozenset[str] | None = None
    bucket: str | None = None
    prefix: str | None = None
    key: str | None = None
    verify: Verify = "strict"
    partition_bytes: int = PASSING_BYTES
    tasks_min: int = 1
    batch_bytes_max: int = BATCH_BYTES
    batch_segments_max: int | None = None
    batch_entries_max: int | None = None
    fail_on_data_loss: bool = True

    def conditions(self) -> PlanSelection:
        """What is wanted of the entries between two seqs."""
        selection = PlanSelection(kinds=self.kinds, bucket=self.bucket, prefix=self.prefix, key=self.key)
        if isinstance(self.start, datetime):
            selection = selection._replace(time_min_us=time_us_of(self.start))
        if isinstance(self.end, datetime):
            selection = selection._replace(time_max_us=min(time_us_of(self.end), format.TIME_US_MAX))
        return selection

    def selection(self, pinned: Pinned) -> PlanSelection:
        """The entries that are meant."""
        selection = self.conditions()
        if isinstance(self.start, int):
            self.require_there(pinned, "start", self.start)
            selection = selection._replace(seq_first=self.start)
        if isinstance(self.end, int):
            self.require_there(pinned, "end", self.end)
            selection = selection._replace(seq_last=self.end)
        return selection

    def require_there(self, pinned: Pinned, name: str, seq: int) -> None:
        """Raise VersionGone for a bound above what was shipped. With `fail_on_data_loss`, raise it also for
        one in what was purged."""
        if seq > pinned.hwm:
            raise VersionGone(
                f"{name} is seq {seq}, and the last one that was shipped is {pinned.hwm}",
                path=pinned.place.uri,
                seq=seq,
                hint=f"give a lower {name}, or wait until more is shipped",
            )
        if 0 < seq <= pinned.seq_before and self.fail_on_data_loss:
            raise VersionGone(
                f"{name} is seq {seq}, and the first one there is {pinned.seq_first}",
                path=pinned.place.uri,
                seq=seq,
                hint=f"give a higher {name}, or the option fail_on_data_loss=false to go on without",
            )


def parse(given: Mapping[str, str]) -> Options:
    """Options as Spark hands them on: names in any case, values as text."""
    found: dict[str, Any] = {}
    store: dict[str, str] = {}
    for name, text in given.items():
        lowered = name.lower()
        if lowered.startswith(STORE_PREFIX):
            store[lowered.removeprefix(STORE_PREFIX)] = str(text)
            continue
        if lowered.startswith(SETTINGS_PREFIX):
            store[lowered] = str(text)
            continue
        if lowered not in _NAMES:
            nearest = difflib.get_close_matches(lowered, _NAMES, n=1, cutoff=0)[0]
            raise InvalidConfig(
                f"there is no option {name!r:.80}",
                hint=f"the nearest one is {nearest}. Options of the store begin with {STORE_PREFIX}, "
                f"and how it is called with {SETTINGS_PREFIX}",
            )
        found[lowered] = str(text)
    decoded = {name: decode(name, found[name]) for name, decode in _DECODERS.items() if name in found}
    latest = decoded.get("start") == "latest"
    if decoded.get("start") in ("latest", "earliest"):
        decoded["start"] = None
    decoded.setdefault("tasks_min", 2 * (os.cpu_count() or 1))
    options = Options(found.get("path", ""), store, latest=latest, **decoded)
    _check_order(options)
    return options


def _check_order(options: Options) -> None:
    start, end = options.start, options.end
    if isinstance(start, int) and isinstance(end, int):
        above = start > end
    else:
        above = isinstance(start, datetime) and isinstance(end, datetime) and start > end
    if above:
        raise InvalidConfig(
            f"start is {start}, above end, {end}", hint="both are inclusive: change one of them"
        )


def _moment(name: str, text: str) -> Moment | str:
    if name == "start" and text.lower() in ("earliest", "latest"):
        return text.lower()
    hint = "give the seq of an entry, or a time with its zone, as 2026-01-31T12:00:00Z"
    if text.strip().isdecimal():
        seq = int(text)
        if seq > SEQ_MAX:
            raise InvalidConfig(f"{name} is {seq}, and 2^63-1 is the highest seq that Spark has", hint=hint)
        return seq
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise InvalidConfig(f"{name} is {text!r:.80}", hint=hint) from None
    if moment.utcoffset() is None:
        raise InvalidConfig(f"{name} is {text!r:.80}, a time without its zone", hint=hint)
    return moment


def _kinds(name: str, text: str) -> frozenset[str]:
    kinds = frozenset(kind.strip().lower() for kind in text.split(",") if kind.strip())
    require_kinds(kinds)
    return kinds


def _text(name: str, text: str) -> str:
    return text


def _verify(name: str, text: str) -> str:
    levels = get_args(Verify)
    if text.lower() not in levels:
        raise InvalidConfig(f"{name} is {text!r:.80}", hint=f"choose from {', '.join(levels)}")
    return text.lower()


def _count(name: str, text: str) -> int:
    if not text.strip().isdecimal() or not 0 < int(text) <= SEQ_MAX:
        raise InvalidConfig(f"{name} is {text!r:.80}", hint="give a whole number above 0")
    return int(text)


def _flag(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise InvalidConfig(f"{name} is {text!r:.80}", hint="choose from true, false")
    return text.lower() == "true"


_DECODERS: dict[str, Callable[[str, str], Any]] = {
    "start": _moment,
    "end": _moment,
    "kinds": _kinds,
    "bucket": _text,
    "prefix": _text,
    "key": _text,
    "verify": _verify,
    "partition_bytes": _count,
    "tasks_min": _count,
    "batch_bytes_max": _count,
    "batch_segments_max": _count,
    "batch_entries_max": _count,
    "fail_on_data_loss": _flag,
}
