"""What before-images have to say, from the entries of a log alone. It shares no code with the engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import cbor2
from blake3 import blake3

from lowwater.engine.format.before_images import BeforeImage
from lowwater.engine.format.entries import Entry

Key = tuple[str, str]
CHANGES = ("put", "delete", "copy")


class Version(NamedTuple):
    seq: int
    time_us: int
    metadata: dict[str, str] | None
    value: bytes


class _Write(NamedTuple):
    """A change that counts once its group, or its transaction, is complete."""

    seq: int
    key: Key
    version: Version | None


class Images:
    """Follows a log from its first entry on."""

    def __init__(self) -> None:
        self.is_on = False
        self.inline_bytes_max = 256
        self.newest: dict[Key, Version | None] = {}
        self.group: list[_Write] = []
        self.open: dict[int, list[_Write]] = {}
        self.values: dict[int, bytes] = {}

    def expected(self, entry: Entry) -> BeforeImage | None:
        """Of an entry that comes next."""
        if not self.is_on or entry.kind not in CHANGES or entry.refused is not None:
            return None
        found = self.newest.get((entry.bucket, entry.key))
        if found is None:
            return BeforeImage()
        is_large = len(found.value) > self.inline_bytes_max
        return BeforeImage(
            found.seq,
            found.time_us,
            found.metadata,
            None if is_large else found.value,
            len(found.value),
            blake3(found.value).digest() if is_large else None,
        )

    def follow(self, entry: Entry) -> None:
        if entry.refused is not None:
            # A commit that is refused has ended its transaction.
            if entry.kind == "commit" and entry.txn is not None:
                self.open.pop(entry.txn, None)
            return
        body: dict[str, Any] = {}
        if entry.kind in ("create", "settings", "abort") and entry.value:
            body = cbor2.loads(entry.value)
        if entry.kind in ("create", "settings"):
            settings = body.get("settings", {}) if entry.kind == "create" else body
            self.is_on = bool(settings.get("before_images", self.is_on))
            self.inline_bytes_max = settings.get("inline_bytes_max", self.inline_bytes_max)
        elif entry.kind == "begin":
            self.open[entry.seq] = []
        elif entry.kind == "commit":
            assert entry.txn is not None
            self._count(self.open.pop(entry.txn), entry.seq, entry.time_us)
        elif entry.kind == "abort":
            assert entry.txn is not None
            writes = self.open.pop(entry.txn)
            if "savepoint" in body:
                self.open[entry.txn] = [each for each in writes if each.seq <= body["savepoint"]]
        elif entry.kind in CHANGES:
            self._change(entry)

    def _change(self, entry: Entry) -> None:
        extras = entry.extras
        reference = None if extras is None else extras.value_ref
        value = entry.value if reference is None else self.values[reference.seq]
        self.values[entry.seq] = value
        version = None
        if entry.kind != "delete":
            version = Version(entry.seq, entry.time_us, entry.metadata or None, value)
        write = _Write(entry.seq, (entry.bucket, entry.key), version)
        if entry.txn is not None:
            self.open[entry.txn].append(write)
        elif extras is not None and extras.group_seq_last is not None:
            self.group.append(write)
            if entry.seq == extras.group_seq_last:
                self._count(self.group, entry.seq, None)
                self.group = []
        else:
            self.newest[write.key] = version

    def _count(self, writes: list[_Write], seq: int, time_us: int | None) -> None:
        for write in writes:
            version = write.version
            if version is not None:
                version = version._replace(seq=seq, time_us=version.time_us if time_us is None else time_us)
            self.newest[write.key] = version


def check_images(entries: Iterable[Entry]) -> int:
    """Compare what the changes of a whole log say with what was there. How many of them say something."""
    images, count = Images(), 0
    for entry in entries:
        assert entry.before == images.expected(entry), entry
        count += entry.before is not None
        images.follow(entry)
    return count
