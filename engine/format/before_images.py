"""Before-images: what a key had, in the frame of its change, for who follows changes without a state.

Always true:
  - an image is a function of the entries before its frame: of the newest version that was committed,
    whatever is cached, flushed or kept here. A deletion is nothing, as a page may have dropped it;
  - of a transaction, or a group, it is what was there before the first of its changes to the key, and so
    before the version that survives;
  - a value that pages hold as a reference is one here too: length and hash. So no value is read for an image,
    and none is written twice.

`docs/FORMAT.md` has the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

from lowwater.engine.format import format
from lowwater.engine.format.format import FIXED_BYTES, Flag, Kind
from lowwater.engine.format.page import REFERENCE, TOMBSTONE
from lowwater.engine.format.records import VALUE_PLACE, PageVersion, encoded_key_of, make_record, page_version
from lowwater.errors import Corrupt, NewerVersion

if TYPE_CHECKING:
    from lowwater.engine.state.state import State

IMAGE = Struct("<QQHB")
LARGE_VALUE = Struct("<Q32s")
_VALUE, _LARGE = 0, 1  # what follows the metadata

_CHANGES = frozenset({Kind.PUT, Kind.DELETE, Kind.COPY})
_GROUP_FLAGS = len(format.GROUP_BYTES) - 1
_NOTHING = b""
# Where a version lies is no part of its image.
_ANYWHERE = (1, 0)


class BeforeImage(NamedTuple):
    """What a key had before a change: a version, or nothing, whose seq is 0. Of a large value there are its
    length and its BLAKE3; the value is what the key has as of `seq`."""

    seq: int = 0
    time_us: int = 0
    metadata: dict[str, str] | None = None
    value: bytes | None = None
    value_bytes: int = 0
    blake3: bytes | None = None


def decode_image(image: bytes) -> BeforeImage:
    """The content of the optional group."""
    if not image:
        return BeforeImage()
    if len(image) < IMAGE.size:
        raise Corrupt("a before-image is cut short")
    seq, time_us, metadata_len, form = IMAGE.unpack_from(image)
    value_start = IMAGE.size + metadata_len
    value = image[value_start:]
    if value_start > len(image):
        raise Corrupt("a before-image ends inside its metadata")
    if form not in (_VALUE, _LARGE):
        raise NewerVersion(f"before-images of the form {form} are not known to this version")
    if not seq or (form == _LARGE and len(value) != LARGE_VALUE.size):
        raise Corrupt("a before-image has no seq, or its reference to a value has the wrong size")
    metadata = format.decode_metadata(image[IMAGE.size : value_start]) if metadata_len else None
    if form == _VALUE:
        return BeforeImage(seq, time_us, metadata, value, len(value))
    length, value_hash = LARGE_VALUE.unpack(value)
    return BeforeImage(seq, time_us, metadata, None, length, value_hash)


def _image_of(version: PageVersion | None) -> bytes:
    if version is None or version[3] & TOMBSTONE:
        return _NOTHING
    _, seq, time_us, flags, metadata, value = version
    form = _VALUE
    if flags & REFERENCE:
        form, value = _LARGE, LARGE_VALUE.pack(*VALUE_PLACE.unpack(value)[2:])
    return IMAGE.pack(seq, time_us, len(metadata), form) + metadata + value


# An image, or the number of the earlier put of the same append of which it is; None for what has none.
Found = bytes | int | None


def find_images(state: State, payloads: Sequence[bytes]) -> list[Found]:
    """With the state's lock: what the keys of these payloads have. Each sees those before it, but for those
    in its group or its transaction."""
    found: list[Found] = []
    numbers: dict[bytes, int] = {}
    for number, payload in enumerate(payloads):
        flags = payload[1] | payload[2] << 8
        if payload[0] not in _CHANGES or flags & Flag.REFUSED:
            found.append(None)
            continue
        key = encoded_key_of(payload)
        earlier = numbers.get(key)
        if earlier is None:
            found.append(_image_of(state.newest_version(key, keeps=True)))
        else:
            found.append(earlier)
        if not flags & (Flag.GROUP | Flag.TXN):
            numbers[key] = number
    return found


def image_bytes(state: State, key: bytes) -> int:
    """How long the image of a change of this key, as pages have it, would be."""
    return len(_image_of(state.newest_version(key, keeps=True)))


def with_images(
    payloads: Sequence[bytes], found: Sequence[Found], seqs: Sequence[int], inline_bytes_max: int
) -> list[bytes]:
    """The payloads with the images that were found for them."""
    made = []
    for payload, image in zip(payloads, found, strict=True):
        if isinstance(image, int):
            record = make_record(seqs[image], payloads[image], *_ANYWHERE)
            image = _image_of(page_version(record, inline_bytes_max))
        made.append(payload if image is None else with_image(payload, image))
    return made


def with_image(payload: bytes, image: bytes) -> bytes:
    """A payload, which has none, with this image."""
    flags = payload[1] | payload[2] << 8
    assert not flags & Flag.BEFORE
    at = FIXED_BYTES + format.GROUP_BYTES[flags & _GROUP_FLAGS]
    group = format.U32.pack(len(image)) + image
    return b"".join((payload[:1], format.U16.pack(flags | Flag.BEFORE), payload[3:at], group, payload[at:]))


def bytes_without_image(payload: bytes) -> int:
    """The length of a payload, were there no image in it: what a writer is asked for."""
    flags = payload[1] | payload[2] << 8
    if not flags & Flag.BEFORE:
        return len(payload)
    at = FIXED_BYTES + format.GROUP_BYTES[flags & _GROUP_FLAGS]
    size: int = format.U32.unpack_from(payload, at)[0]
    return len(payload) - format.U32.size - size
