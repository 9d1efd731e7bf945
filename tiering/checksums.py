"""Checksums of objects: what was sent, in the forms in which a store may say what it has.

Always true: the bytes are hashed while they pass, once for each form that the store may answer with; memory
is a few hashes.

Stores give the MD5 of an object that came at once. Of one that came in parts S3 gives the MD5 of the parts'
MD5s, with their number behind it, and others the MD5 of the whole: one answer tells which. MD5 is no proof
against somebody who means harm, and is none here: it shows what was changed on its way. Names have BLAKE3.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

# In hexadecimal digits; of parts, with how many they were.
_MD5 = re.compile(r'"?([0-9a-f]{32}(?:-[1-9][0-9]*)?)"?', re.ASCII | re.IGNORECASE)


class Checksum(NamedTuple):
    """What a store says of an object's bytes. `md5` is empty where it says nothing. `mark` is another one
    whenever the object was changed; empty where the store has none."""

    size: int
    md5: str = ""
    mark: str = ""


def md5_of_etag(etag: str | None) -> str:
    """The MD5 that an ETag looks like; empty for others. One of an object that is encrypted with a key may
    look so too, and be none: so it says something only where it is the one that is expected."""
    found = _MD5.fullmatch(etag or "")
    return found[1].lower() if found else ""


def md5_of_base64(said: str) -> str:
    """The MD5 in `Content-MD5`; empty for what is none."""
    try:
        digest = base64.b64decode(said, validate=True)
    except ValueError:
        return ""
    return digest.hex() if len(digest) == 16 else ""


class Hashing:
    """How a store hashes: `part_bytes` is the size of the parts that larger objects come in."""

    def __init__(self, part_bytes: int) -> None:
        self.part_bytes = part_bytes
        self.of_parts = self.of_whole = True
        """Which of the two forms it may give of an object that came in parts."""

    def learn(self, size: int, md5: str, *, is_right: bool) -> None:
        """From what it said of an object."""
        if size > self.part_bytes:
            self.of_parts, self.of_whole = not is_right or "-" in md5, not is_right or "-" not in md5


class Sent:
    """The bytes of one object, counted and hashed as they go by."""

    def __init__(self, hashing: Hashing | None) -> None:
        """Without `hashing` they are only counted."""
        self.size = 0
        self._part_bytes = 0 if hashing is None else hashing.part_bytes
        self._of_whole = hashing is not None and hashing.of_whole
        # The first part is the whole of an object that has no other, and until there is another one.
        self._part = _md5() if hashing is not None and hashing.of_parts else None
        self._whole = _md5() if self._of_whole and self._part is None else None
        self._parts = _md5()

    def anew(self) -> Sent:
        """For other bytes, to be hashed in the same forms."""
        other = Sent(None)
        other._part_bytes, other._of_whole = self._part_bytes, self._of_whole
        other._part = None if self._part is None else _md5()
        other._whole = _md5() if self._of_whole and self._part is None else None
        return other

    def passing(self, parts: Iterable[bytes | bytearray | memoryview]) -> Iterator[memoryview]:
        """Yield the parts as they are, and count and hash them on the way."""
        for part in parts:
            view = memoryview(part).cast("B")
            self._add(view)
            yield view
            del part, view

    def _add(self, view: memoryview) -> None:
        if self._part is None:
            if self._whole is not None:
                self._whole.update(view)
            self.size += len(view)
            return
        while view:
            if self.size and self.size % self._part_bytes == 0:
                if self.size == self._part_bytes and self._of_whole:
                    self._whole = self._part.copy()
                self._parts.update(self._part.digest())
                self._part = _md5()
            taken = view[: self._part_bytes - self.size % self._part_bytes]
            self._part.update(taken)
            if self._whole is not None:
                self._whole.update(taken)
            self.size += len(taken)
            view = view[len(taken) :]

    @property
    def md5s(self) -> set[str]:
        """What a store that has these bytes may say."""
        said = set() if self._whole is None else {self._whole.hexdigest()}
        if self._part is None:
            return said
        if self.size <= self._part_bytes:
            return said | {self._part.hexdigest()}
        parts = self._parts.copy()
        parts.update(self._part.digest())
        return said | {f"{parts.hexdigest()}-{-(-self.size // self._part_bytes)}"}


def _md5() -> Any:
    return hashlib.md5(usedforsecurity=False)
