"""Metadata, many at once: maps from text to text, as canonical CBOR, into Arrow.

Always true: the fast way gives what the engine's decoder gives, or leaves all of it to that one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lowwater.engine.format import format
from lowwater.engine.log.vectors import crc32_many, slices
from lowwater.errors import Corrupt

# Fewer are decoded one by one.
MANY = 32

_Places = npt.NDArray[np.int64]


def decode_maps(encoded: pa.Array) -> pa.Array:
    """The maps of these bytes, of which none are empty."""
    made = _decode_at_once(encoded) if len(encoded) >= MANY else None
    return _decode_each(encoded) if made is None else made


def _decode_each(encoded: pa.Array) -> pa.Array:
    offsets = [0]
    keys: list[str] = []
    items: list[str] = []
    for data in encoded.to_pylist():
        found = format.decode_metadata(data)
        keys += found.keys()
        items += found.values()
        offsets.append(len(keys))
    try:
        return _maps(offsets, pa.array(keys, pa.string()), pa.array(items, pa.string()))
    except UnicodeEncodeError as error:
        raise Corrupt("metadata is not UTF-8") from error


def _maps(offsets: Any, keys: pa.Array, items: pa.Array) -> pa.Array:
    return pa.MapArray.from_arrays(pa.array(offsets, pa.int32()), keys, items)


def _decode_at_once(encoded: pa.Array) -> pa.Array | None:
    """None where one of them is not as writers make it."""
    _, bounds, buffer = encoded.buffers()
    bounds = np.frombuffer(bounds, np.int32)[encoded.offset :][: len(encoded) + 1].astype(np.int64)
    data = np.frombuffer(buffer, np.uint8)
    at, ends = bounds[:-1].copy(), bounds[1:]
    if bool((at >= ends).any()):
        return None
    # A map of at most 23 pairs has one byte that says how many.
    pairs = data[at].astype(np.int64) - 0xA0
    if bool(((pairs < 1) | (pairs > 23)).any()):
        return None
    at += 1
    firsts = np.concatenate([[0], np.cumsum(pairs)])
    starts = np.empty((2, int(firsts[-1])), np.int64)
    stops = np.empty_like(starts)
    for number in range(2 * int(pairs.max())):
        rows = np.flatnonzero(pairs * 2 > number)
        found = _texts(data, at[rows], ends[rows])
        if found is None:
            return None
        places = firsts[rows] + number // 2
        starts[number % 2, places], stops[number % 2, places] = found
        at[rows] = found[1]
    if bool((at != ends).any()) or _may_repeat(buffer, firsts, starts[0], stops[0]):
        return None
    try:
        keys, items = (slices(buffer, starts[side], stops[side], text=True) for side in (0, 1))
    except Corrupt:
        return None
    return _maps(firsts, keys, items)


def _texts(data: npt.NDArray[np.uint8], at: _Places, ends: _Places) -> tuple[_Places, _Places] | None:
    """Where the texts that begin there have their bytes; their lengths are below 2^16."""
    if bool((at >= ends).any()):
        return None
    heads = data[at]
    lengths = heads.astype(np.int64) - 0x60
    sizes = np.ones(len(at), np.int64)
    for head, size in ((0x78, 2), (0x79, 3)):
        places = np.flatnonzero(heads == head)
        if len(places):
            if bool((at[places] + size > ends[places]).any()):
                return None
            sizes[places] = size
            lengths[places] = data[at[places] + 1]
            if size == 3:
                lengths[places] = lengths[places] << 8 | data[at[places] + 2]
            heads[places] = 0x60
    starts = at + sizes
    if bool(((heads < 0x60) | (heads > 0x77) | (starts + lengths > ends)).any()):
        return None
    return starts, starts + lengths


def _may_repeat(buffer: Any, firsts: _Places, starts: _Places, stops: _Places) -> bool:
    """Whether two keys that follow one another in a map may be the same: then the last one would count."""
    follows = np.ones(len(starts), np.bool_)
    follows[firsts[:-1]] = False
    lengths = stops - starts
    places = np.flatnonzero(follows[1:] & (lengths[1:] == lengths[:-1])) + 1
    if not len(places):
        return False
    data = buffer.to_pybytes()
    hashes = [crc32_many(data, starts[each], lengths[each]) for each in (places, places - 1)]
    return bool((hashes[0] == hashes[1]).any())
