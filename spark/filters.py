"""What Spark's filters mean for a selection.

Always true: what is taken in here is not looked at by Spark again, so a selection is as exact as the filter;
whatever is not known for sure is left to Spark.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

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
    StringStartsWith,
)

from lowwater.engine.format.moments import time_us_of
from lowwater.spark.plan import PlanSelection

_NEVER_NULL = {"seq", "kind", "bucket", "key", "time", "origin"}


def narrowed(selection: PlanSelection, filters: Iterable[Filter]) -> tuple[PlanSelection, list[Filter]]:
    """The selection with what the filters say, and the filters that it cannot say."""
    left = []
    for each in filters:
        made = _narrowed(selection, each)
        if made is None:
            left.append(each)
        else:
            selection = made
    return selection, left


def _narrowed(selection: PlanSelection, wanted: Filter) -> PlanSelection | None:
    attribute: tuple[str, ...] = getattr(wanted, "attribute", ())
    if len(attribute) != 1:
        return None
    column, value = attribute[0].lower(), _value_of(wanted)
    match wanted:
        case IsNotNull() if column in _NEVER_NULL:
            return selection
        case EqualTo() | EqualNullSafe():
            if column == "seq" and _is_number(value):
                return _within(selection, value, value)
            if column == "time" and _is_time(value):
                return _at_times(selection, time_us_of(value), time_us_of(value))
            if isinstance(value, str):
                return _of_text(selection, column, value)
        case In() if column == "kind" and all(isinstance(each, str) for each in value):
            return _of_kinds(selection, frozenset(value))
        case GreaterThan() | GreaterThanOrEqual() if column == "seq" and _is_number(value):
            return _within(selection, value + isinstance(wanted, GreaterThan), None)
        case LessThan() | LessThanOrEqual() if column == "seq" and _is_number(value):
            return _within(selection, None, value - isinstance(wanted, LessThan))
        case GreaterThan() | GreaterThanOrEqual() if column == "time" and _is_time(value):
            return _at_times(selection, time_us_of(value) + isinstance(wanted, GreaterThan), None)
        case LessThan() | LessThanOrEqual() if column == "time" and _is_time(value):
            return _at_times(selection, None, time_us_of(value) - isinstance(wanted, LessThan))
        case StringStartsWith() if column == "key" and isinstance(value, str):
            return _of_prefix(selection, value)
    return None


def _value_of(wanted: Filter) -> Any:
    return getattr(wanted, "value", None)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_time(value: Any) -> bool:
    """Times before 1970 are none that `time_us_of` tells apart."""
    if not isinstance(value, datetime) or value.utcoffset() is None:
        return False
    return time_us_of(value) > 0 and time_us_of(value + timedelta(microseconds=1)) > 1


def _nothing(selection: PlanSelection) -> PlanSelection:
    return selection._replace(seq_first=1, seq_last=0)


def _within(selection: PlanSelection, first: int | None, last: int | None) -> PlanSelection:
    return selection._replace(
        seq_first=selection.seq_first if first is None else max(selection.seq_first, first),
        seq_last=selection.seq_last if last is None else min(selection.seq_last, last),
    )


def _at_times(selection: PlanSelection, first: int | None, last: int | None) -> PlanSelection:
    return selection._replace(
        time_min_us=selection.time_min_us if first is None else max(selection.time_min_us, first),
        time_max_us=selection.time_max_us if last is None else min(selection.time_max_us, last),
    )


def _of_text(selection: PlanSelection, column: str, text: str) -> PlanSelection | None:
    match column:
        case "kind":
            return _of_kinds(selection, frozenset({text}))
        case "bucket":
            is_other = selection.bucket not in (None, text)
            return _nothing(selection) if is_other else selection._replace(bucket=text)
        case "key":
            is_other = selection.key not in (None, text)
            return _nothing(selection) if is_other else selection._replace(key=text)
    return None


def _of_kinds(selection: PlanSelection, kinds: frozenset[str]) -> PlanSelection:
    if selection.kinds is not None:
        kinds &= selection.kinds
    return selection._replace(kinds=kinds)


def _of_prefix(selection: PlanSelection, prefix: str) -> PlanSelection:
    former = selection.prefix
    if former is None or prefix.startswith(former):
        return selection._replace(prefix=prefix)
    return selection if former.startswith(prefix) else _nothing(selection)
