"""Where pages begin.

Always true:
  - it depends on the keys alone, never on the order in which they came: a key that is new to its page is
    tested once, by a keyed hash of its first 500 bytes;
  - keys that are equal in those 500 bytes share a page, so a page's key always fits a database key.
"""

from __future__ import annotations

from blake3 import blake3

from lowwater.engine.format.keys import PAGE_KEY_BYTES


class Boundaries:
    """Which keys begin a page: about one of `page_keys`. The salt keeps others from choosing keys of which
    none does, and a page from growing without end."""

    __slots__ = ("_hasher", "_threshold", "hash_key", "page_keys", "salt")

    def __init__(self, salt: bytes, page_keys: int) -> None:
        assert page_keys > 0
        self.salt = salt
        self.page_keys = page_keys
        # Copied for each key, which is faster than making it.
        self.hash_key = blake3(salt).digest()
        self._hasher = blake3(key=self.hash_key)
        self._threshold = 2**64 // page_keys

    def __reduce__(self) -> tuple[type[Boundaries], tuple[bytes, int]]:
        # Spark's tasks get them, and a hasher cannot be sent.
        return Boundaries, (self.salt, self.page_keys)

    @property
    def highest(self) -> int:
        """The first 8 bytes of a boundary's hash, as a number, are not above this."""
        return self._threshold - 1

    def is_boundary(self, encoded: bytes) -> bool:
        digest = self._hasher.copy().update(encoded[:PAGE_KEY_BYTES]).digest(8)
        return int.from_bytes(digest, "little") < self._threshold

    def cuts(self, keys: list[bytes]) -> list[bytes]:
        """The page keys of those that begin a page."""
        heads = keys
        if keys and max(map(len, keys)) > PAGE_KEY_BYTES:
            heads = [key[:PAGE_KEY_BYTES] for key in keys]
        copy = self._hasher.copy
        digests = [copy().update(head).digest(8) for head in heads]
        # The highest byte of a digest mostly says it.
        top = self._threshold >> 56
        return [
            head
            for head, digest in zip(heads, digests, strict=True)
            if digest[7] <= top and int.from_bytes(digest, "little") < self._threshold
        ]
