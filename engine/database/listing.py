"""Pages of a listing: keys that begin with a prefix, those with a delimiter after it as one prefix each.

Always true:
  - what a key comes as, itself or a prefix, follows from the key, the prefix and the delimiter alone: the
    delimiter is looked for after the prefix, and the first place counts;
  - `next` is what a page ended with. A key and a prefix are never the same text, so it says which it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lowwater.engine.format import format
from lowwater.engine.format.format import BUCKET_BYTES_MAX, KEY_BYTES_MAX
from lowwater.engine.format.keys import after_prefix, encode_key
from lowwater.engine.format.records import Head, Object, Page
from lowwater.errors import InputError

LIMIT_DEFAULT = 1000

Between = Callable[[bytes, bytes], Iterator[Object]]
"""The live objects from one encoded key to below another, in order."""


def as_text(text: Any, what: str) -> bytes:
    return format.encode_name(text, what, KEY_BYTES_MAX, empty_allowed=True)


def head_of(found: Object) -> Head:
    return Head(found.bucket, found.key, len(found.value), found.metadata, found.seq, found.time_us)


class Listing:
    """What is asked for. Raises InputError where that cannot be."""

    def __init__(
        self, bucket: str, prefix: str, delimiter: str | None, start_after: str | None, limit: int
    ) -> None:
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise InputError(f"the limit is {limit!r:.80}", hint="give a whole number above 0")
        if delimiter is not None:
            as_text(delimiter, "delimiter")
        self._name = format.encode_name(bucket, "bucket", BUCKET_BYTES_MAX)
        self.low = encode_key(self._name, as_text(prefix, "prefix"))
        self.high = after_prefix(self.low)
        self._prefix_length = len(prefix)
        self._delimiter = delimiter
        self._limit = limit
        if start_after is not None:
            after = encode_key(self._name, as_text(start_after, "key"))
            # After a prefix, all that begins with it is done.
            is_prefix = start_after.startswith(prefix) and self._common(start_after) == start_after
            self.low = max(self.low, after_prefix(after) if is_prefix else after + b"\0")

    def _common(self, key: str) -> str | None:
        """The prefix as which a key comes, up to the first delimiter after what was asked for."""
        if not self._delimiter:
            return None
        at = key.find(self._delimiter, self._prefix_length)
        return None if at < 0 else key[: at + len(self._delimiter)]

    def page(self, between: Between) -> Page:
        objects: list[Head] = []
        prefixes: list[str] = []
        last: str | None = None
        low = self.low
        while low < self.high:
            for found in between(low, self.high):
                if len(objects) + len(prefixes) == self._limit:
                    return Page(objects, prefixes, last)
                common = self._common(found.key)
                if common is not None:
                    last = common
                    prefixes.append(common)
                    low = after_prefix(encode_key(self._name, common.encode()))
                    break
                last = found.key
                objects.append(head_of(found))
            else:
                break
        return Page(objects, prefixes, None)
