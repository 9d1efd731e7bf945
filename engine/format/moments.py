"""Moments that are asked for: a seq, or a time, which stands for the last entry that is not later.

Always true: the seq of a time follows from the log alone. Times never fall in a log, so there is one such
entry; who asks again for a time that has passed gets the same one.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from lowwater.engine.format import format
from lowwater.errors import InputError

# A moment to read at: a seq, or a time with its zone.
At = int | datetime

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def time_us_of(moment: datetime) -> int:
    """Microseconds since 1970, exactly; 0 for what lies before."""
    if not isinstance(moment, datetime):
        raise InputError(f"{moment!r:.80} is no time", hint="give a datetime with its zone")
    if moment.utcoffset() is None:
        raise InputError(
            "this time has no time zone",
            hint="use datetime.now(timezone.utc) or .replace(tzinfo=...)",
        )
    return max(0, (moment - _EPOCH) // _MICROSECOND)


def duration_us(duration: Any, what: str) -> int:
    """Seconds, or a timedelta, in microseconds."""
    seconds = duration.total_seconds() if isinstance(duration, timedelta) else duration
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds * 1_000_000 < format.TIME_US_MAX // 2:
        raise InputError(f"the {what} is {duration!r:.80}", hint="give seconds above 0, or a timedelta")
    return max(1, round(seconds * 1_000_000))


def require_seq(at: Any) -> int:
    if not isinstance(at, int) or isinstance(at, bool) or not 0 <= at <= format.SEQ_MAX:
        raise InputError(
            f"{at!r:.80} is no seq", hint="give the seq of an entry, or a datetime with its zone"
        )
    return at


def timeout_of(seconds: Any, name: str = "wait_s") -> float | None:
    """How long to wait, as the argument of this name says; None is its caller's to read."""
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < 10**9:
        raise InputError(f"{name} is {seconds!r:.80}", hint="give seconds from 0 up, or leave it out")
    return float(seconds)
