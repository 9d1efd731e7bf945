"""Keys as pages have them: a bucket and a name in one, in the order of both.

Always true: no two pairs of bucket and name make the same key, and keys of one bucket lie together.
"""

from __future__ import annotations

from lowwater.engine.format import format
from lowwater.errors import Corrupt, PagesDamaged

# A key of the database has at most 511 bytes.
PAGE_KEY_BYTES = 500
_LENGTHS = [bytes([length]) for length in range(256)]
_HINT = PagesDamaged.default_hint

# Above every key that can be encoded.
KEY_END = b"\xff" * (1 + format.BUCKET_BYTES_MAX + format.KEY_BYTES_MAX + 1)


def encode_key(bucket: bytes, key: bytes) -> bytes:
    """One key for both: buckets never mix, and each keeps the order of its keys. The bucket b"" holds the
    records of the buckets themselves, by their names."""
    assert len(bucket) <= format.BUCKET_BYTES_MAX
    return _LENGTHS[len(bucket)] + bucket + key


def decode_key(encoded: bytes) -> tuple[bytes, bytes]:
    """The bucket and the key."""
    if not encoded or len(encoded) <= encoded[0]:
        raise Corrupt("a key ends inside its bucket", hint=_HINT)
    start = 1 + encoded[0]
    return encoded[1:start], encoded[start:]


def after_prefix(prefix: bytes) -> bytes:
    """The smallest key above all that begin with `prefix`."""
    head = prefix.rstrip(b"\xff")
    return head[:-1] + _LENGTHS[head[-1] + 1] if head else KEY_END


def bucket_range(bucket: bytes) -> tuple[bytes, bytes]:
    """Where a bucket's encoded keys begin, and what they stay below."""
    low = encode_key(bucket, b"")
    return low, after_prefix(low)


def page_key(encoded: bytes) -> bytes:
    """What the database, and the test for a boundary, see of a key."""
    return encoded[:PAGE_KEY_BYTES]
