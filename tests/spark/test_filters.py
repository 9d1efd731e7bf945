"""What filters mean for a selection: as exact as Spark is, or left to it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringEndsWith,
    StringStartsWith,
)

from lowwater.spark.filters import narrowed
from lowwater.spark.plan import EVERYTHING, PlanSelection

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
NOON_US = 1_769_860_800_000_000


@pytest.mark.parametrize(
    ("wanted", "fields"),
    [
        ([EqualTo(("seq",), 7)], {"seq_first": 7, "seq_last": 7}),
        ([GreaterThan(("seq",), 7), LessThan(("seq",), 9)], {"seq_first": 8, "seq_last": 8}),
        ([GreaterThanOrEqual(("SEQ",), 7), GreaterThan(("seq",), 3)], {"seq_first": 7}),
        ([LessThanOrEqual(("seq",), 7), LessThan(("seq",), 90)], {"seq_last": 7}),
        ([GreaterThan(("time",), NOON)], {"time_min_us": NOON_US + 1}),
        ([LessThan(("time",), NOON)], {"time_max_us": NOON_US - 1}),
        ([EqualNullSafe(("time",), NOON)], {"time_min_us": NOON_US, "time_max_us": NOON_US}),
        ([EqualTo(("kind",), "put")], {"kinds": frozenset({"put"})}),
        ([In(("kind",), ("put", "copy")), EqualTo(("kind",), "put")], {"kinds": frozenset({"put"})}),
        ([EqualTo(("bucket",), "b"), EqualTo(("key",), "k")], {"bucket": "b", "key": "k"}),
        ([EqualTo(("key",), "k"), EqualTo(("key",), "k")], {"key": "k"}),
        ([StringStartsWith(("key",), "a"), StringStartsWith(("key",), "ab")], {"prefix": "ab"}),
        ([StringStartsWith(("key",), "ab"), StringStartsWith(("key",), "a")], {"prefix": "ab"}),
        ([IsNotNull(("seq",)), IsNotNull(("kind",))], {}),
    ],
)
def test_a_filter_that_is_known_is_taken_in(wanted: list[Filter], fields: dict[str, Any]) -> None:
    """And Spark does not look at it again."""
    assert narrowed(EVERYTHING, wanted) == (PlanSelection(**fields), [])


@pytest.mark.parametrize(
    "wanted",
    [
        [EqualTo(("bucket",), "a"), EqualTo(("bucket",), "b")],
        [EqualTo(("key",), "a"), EqualTo(("key",), "b")],
        [StringStartsWith(("key",), "a"), StringStartsWith(("key",), "b")],
    ],
)
def test_filters_that_exclude_each_other_select_nothing(wanted: list[Filter]) -> None:
    """Also where a later one seems to allow it."""
    selection, left = narrowed(EVERYTHING, [*wanted, GreaterThan(("seq",), 0)])
    assert not left
    assert selection.seq_first > selection.seq_last


@pytest.mark.parametrize(
    "wanted",
    [
        EqualTo(("value",), b"x"),
        EqualTo(("metadata", "a"), "x"),
        EqualTo(("seq",), True),
        EqualTo(("kind",), None),
        EqualNullSafe(("bucket",), None),
        EqualTo(("time",), NOON.replace(tzinfo=None)),
        LessThan(("time",), datetime(1960, 1, 1, tzinfo=UTC)),
        In(("kind",), ("put", None)),
        In(("seq",), (1, 2)),
        IsNotNull(("txn",)),
        Not(EqualTo(("seq",), 1)),
        StringStartsWith(("bucket",), "a"),
        StringEndsWith(("key",), "a"),
        GreaterThan(("key",), "a"),
    ],
)
def test_a_filter_that_is_not_known_for_sure_is_left_to_spark(wanted: Filter) -> None:
    """A row too few is wrong, a row too many is filtered there."""
    assert narrowed(EVERYTHING, [wanted]) == (EVERYTHING, [wanted])
