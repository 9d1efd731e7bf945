"""Metadata decoded many at once: what the engine's decoder says, also of what no writer makes."""

from __future__ import annotations

from collections.abc import Callable

import cbor2
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowwater.engine.format.format import decode_metadata, encode_metadata
from lowwater.errors import Corrupt
from lowwater.spark import maps

TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.sampled_from([22, 23, 24, 25, 255, 256, 300]).map("x".__mul__),
)


def decoded(encoded: list[bytes]) -> list[dict[str, str]]:
    made = maps.decode_maps(pa.array(encoded, pa.binary()))
    made.validate(full=True)
    return [dict(each) for each in made.to_pylist()]


@settings(max_examples=300)
@given(st.lists(st.dictionaries(TEXTS, TEXTS, min_size=1, max_size=26), max_size=8))
def test_maps_are_what_was_written(written: list[dict[str, str]]) -> None:
    """Of any lengths, alone and among others."""
    encoded = [encode_metadata(each) for each in written] + [encode_metadata({"a": "b"})] * maps.MANY
    assert decoded(encoded) == [*written, *[{"a": "b"}] * maps.MANY]
    if all(len(each) < 24 for each in written):
        assert maps._decode_at_once(pa.array(encoded, pa.binary())) is not None


@pytest.mark.parametrize(
    "strange",
    [
        cbor2.dumps({"a": "b"}) + b"\0",
        b"\xa2\x61a\x61x\x61a\x61y",  # the same key twice
        b"\xbf\x61a\x61x\xff",  # of no known length
        b"\xa1\x78\x01a\x61x",  # a length that is longer than it need be
        b"\xb8\x01\x61a\x61x",
        b"\xa1\x7a\x00\x00\x00\x01a\x61x",
    ],
)
def test_what_is_not_canonical_is_what_the_engine_makes_of_it(strange: bytes) -> None:
    """A reader need not refuse it."""
    common = encode_metadata({"a": "b", "c": "d"})
    for count in (1, maps.MANY):
        found = decoded([*[common] * count, strange, common])
        assert found == [
            *[decode_metadata(common)] * count,
            decode_metadata(strange),
            decode_metadata(common),
        ]


@settings(max_examples=300)
@given(st.data())
def test_damage_is_an_error_or_what_the_engine_makes_of_it(data: st.DataObject) -> None:
    """A hash may be right over bytes that are wrong."""
    good = encode_metadata({"type": "image/jpeg", "owner": "ünï"})
    place = data.draw(st.integers(0, len(good) - 1))
    bad = good[:place] + bytes([data.draw(st.integers(0, 255))]) + good[place + 1 :]
    bad = bad[: data.draw(st.integers(1, len(bad)))]
    encoded = [*[good] * maps.MANY, bad]
    assert outcome(lambda: decoded(encoded)[-1]) == outcome(lambda: decode_metadata(bad))


def outcome(decode: Callable[[], dict[str, str]]) -> dict[str, str] | str:
    try:
        return decode()
    except Corrupt as error:
        return str(error)
