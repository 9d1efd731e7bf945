"""The name of a request: a session, and a number in it. An entry carries it.

Always true: what `as_request_id` lets through fits into a frame, and names a request that a session can know.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from lowwater.engine.format import format
from lowwater.errors import InvalidEntry

# Both are the same on every replica, or their decisions would differ.
RESULTS_MAX = 1_000  # of a session
NUMBER_MAX = 2**48 - 1


class RequestId(NamedTuple):
    """The name of a request: a session, and a number in it. Numbers begin at 1 and may come in any order.
    `acknowledged` says that all results up to it are known to the client and are not asked for again. Where
    it is left out, that is so for all but the last RESULTS_MAX."""

    session: int
    number: int
    acknowledged: int | None = None

    @property
    def unanswered(self) -> int:
        """How many numbers before this one are not acknowledged."""
        if self.acknowledged is None:
            return min(self.number - 1, RESULTS_MAX - 1)
        return self.number - 1 - self.acknowledged

    @property
    def word(self) -> int:
        """The number, and how many before it are not acknowledged, in one integer as a frame has them."""
        return self.number | self.unanswered << 48


def request_of_word(session: int, word: int) -> RequestId:
    number = word & NUMBER_MAX
    return RequestId(session, number, max(0, number - 1 - (word >> 48)))


def as_request_id(given: Any) -> RequestId:
    """Return what an entry was given as its `session`: (session, number), or with what is acknowledged. Raise
    InvalidEntry where it names no request."""
    hint = "give (session, number) or (session, number, acknowledged)"
    try:
        request = RequestId(*given)
    except TypeError:
        raise InvalidEntry(f"{given!r:.80} names no request of a session", hint=hint) from None
    numbers = [request.session, request.number, request.acknowledged or 0]
    if any(not isinstance(each, int) or isinstance(each, bool) for each in numbers):
        raise InvalidEntry(f"{given!r:.80} names no request of a session", hint=hint)
    if not 0 < request.session <= format.SEQ_MAX or not 0 < request.number <= NUMBER_MAX:
        raise InvalidEntry(f"{given!r:.80} names no request of a session", hint="numbers begin at 1")
    if not 0 <= request.unanswered < min(RESULTS_MAX, request.number):
        raise InvalidEntry(
            f"the request {request.number} acknowledges {request.acknowledged}",
            hint=f"acknowledge what lies before it, and at most {RESULTS_MAX - 1} numbers less",
        )
    return request
