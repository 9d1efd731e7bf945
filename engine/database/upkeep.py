"""Upkeep: the entries that an engine itself wants, because time goes by or versions pile up.

Always true:
  - nothing is done here but to have entries ordered: a horizon that moves, a snapshot or a session that ends.
    Their effect is the log's, on every replica at the same place;
  - each entry names what it expects (the horizon before it, the end of the snapshot), so one that comes twice
    or too late is refused;
  - the tail of the log never grows by this alone: a horizon goes no further than the last change of a key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lowwater.engine.format.entries import Control
from lowwater.engine.format.format import Kind
from lowwater.engine.log.log import Log
from lowwater.engine.state.keeping import PER_KEY_MAX
from lowwater.engine.state.state import State
from lowwater.errors import InvalidConfig, VersionGone

# How often one looks, in parts of how long versions are kept, and at least and at most.
LOOKS_PER_AGE = 16
LOOK_AFTER_S_MIN = 1.0
LOOK_AFTER_S_MAX = 600.0
# By how many parts of what is kept a horizon moves at once, where it moves by number.
MOVES_PER_COUNT = 16
# Who orders entries may not have come to it yet, and the log's clock may have moved.
ASK_AGAIN_AFTER_S = 1.0
DUE_AFTER_S_MIN = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionPolicy:
    """Which versions are kept. What is None says nothing, and leaves the log as it is. Of the first two,
    whichever is reached first counts."""

    age_max_s: float | None = None
    seqs_max: int | None = None
    per_key_max: int | None = None

    def __post_init__(self) -> None:
        for name, most in (("age_max_s", 10**10), ("seqs_max", 2**63), ("per_key_max", PER_KEY_MAX)):
            value = getattr(self, name)
            if value is not None and not 0 < value <= most:
                raise InvalidConfig(
                    f"versions.{name} is {value!r:.80}", hint="give a number above 0, or none"
                )

    @property
    def keeps(self) -> bool:
        return (self.age_max_s, self.seqs_max, self.per_key_max) != (None, None, None)

    @property
    def look_after_s(self) -> float | None:
        if self.age_max_s is not None:
            return min(max(self.age_max_s / LOOKS_PER_AGE, LOOK_AFTER_S_MIN), LOOK_AFTER_S_MAX)
        return None if self.seqs_max is None else 10 * LOOK_AFTER_S_MIN


KEEP_AS_IT_IS = VersionPolicy()


class Upkeep:
    """A background step. `order` has an entry ordered: at once, or some day, or not at all. `now_us` is the
    clock that counts, this node's where it orders entries itself; None stands for the log's, which is the
    time of its last entry."""

    def __init__(
        self,
        state: State,
        log: Log,
        policy: VersionPolicy,
        *,
        order: Callable[[Control], object],
        now_us: Callable[[], int] | None,
    ) -> None:
        self._state = state
        self._log = log
        self._policy = policy
        self._order = order
        self._now_us = now_us or (lambda: log.chain.time_us)
        self._due_after_s_min = DUE_AFTER_S_MIN if now_us is not None else ASK_AGAIN_AFTER_S
        self._log_moves_time = now_us is None

    def begin(self) -> None:
        """Write into the log what the version policy says, unless the log says it already. From then on
        versions are kept."""
        first = self._first_wanted()
        if first is not None:
            self._order(first)

    def step(self) -> float | None:
        for entry in self._wanted():
            self._order(entry)
        return self._wait_s()

    def _first_wanted(self) -> Control | None:
        """What a log needs before its versions are kept as the policy says."""
        state, policy = self._state, self._policy
        with state.lock:
            body: dict[str, Any] = {}
            if policy.keeps and state.horizon is None:
                body |= {"seq": state.applied, "before": None}
            if policy.per_key_max not in (None, state.keeping.per_key_max):
                body["per_key_max"] = policy.per_key_max
        return Control(Kind.HORIZON, body) if body else None

    def _wanted(self) -> Iterator[Control]:
        """The entries that are due."""
        first = self._first_wanted()
        if first is not None:
            yield first
        elif (horizon := self._horizon_due()) is not None:
            yield horizon
        now_us = self._now_us()
        with self._state.lock:
            ends = sorted(self._state.keeping.expires_us.items())
            idle = [
                (session_id, session.seq)
                for session_id, session in self._state.sessions.sessions.items()
                if session.expires_us <= now_us
            ]
        for name, expires_us in ends:
            if expires_us <= now_us:
                yield Control(Kind.UNPIN, {"name": name, "expires_us": expires_us})
        for session_id, seq in idle:
            yield Control(Kind.SESSION_CLOSE, {"session": session_id, "seq": seq})

    def _wait_s(self) -> float | None:
        """How long until something may be due that is not due now; None for not by itself."""
        waits = [self._policy.look_after_s]
        with self._state.lock:
            ends = list(self._state.keeping.expires_us.values())
            ends += [each.expires_us for each in self._state.sessions.sessions.values()]
        if ends:
            # The log's clock moves with its entries, at a pace that nobody knows.
            left_s = 0.0 if self._log_moves_time else (min(ends) - self._now_us()) / 1_000_000
            waits.append(max(left_s, self._due_after_s_min))
        return min((each for each in waits if each is not None), default=None)

    def _horizon_due(self) -> Control | None:
        state, policy = self._state, self._policy
        by_age = 0
        if policy.age_max_s is not None:
            try:
                by_age = self._log.seq_at_us(self._now_us() - int(policy.age_max_s * 1_000_000))
            except VersionGone:
                pass  # nothing is so old
        with state.lock:
            horizon = state.horizon
            if horizon is None:
                return None
            target = by_age
            if policy.seqs_max is not None:
                by_count = state.applied - policy.seqs_max
                if by_count > horizon + policy.seqs_max // MOVES_PER_COUNT:
                    target = max(target, by_count)
            target = min(target, state.changed_seq)
            if target <= horizon:
                return None
        return Control(Kind.HORIZON, {"seq": target, "before": horizon})
