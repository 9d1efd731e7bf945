"""Times of entries as Spark and the options have them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


def moment(time_us: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=time_us)
