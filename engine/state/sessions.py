"""Sessions: which requests were seen, and what became of them. Log state, the same on every replica.

Always true:
  - of a session there are the results of all requests above `acknowledged` that the log has, and none of
    those up to it: their client has told that it knows them. A request above it without one was not seen;
  - what was seen has no second effect: it is refused, as repeated, or as forgotten where its result is gone;
  - a session's `seq` is that of the last entry that it has taken in. Redo passes over entries up to it;
  - what is stored is as of the moment of `freeze`, as the pages that it is stored with are: what a checkpoint
    holds of sessions must be the same where redo finds its entry as where it was applied first;
  - no session has more than RESULTS_MAX results, since no request names more that are unanswered.

A session is written as `Session.to_row` has it, in canonical CBOR. So it stands in the control part of a
checkpoint, behind its id, and as a value of the page store's meta under SESSION_KEY and its id (big-endian),
written with a flush where the session has changed since the last one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from struct import Struct
from typing import Any, NamedTuple

import cbor2

from lowwater.engine.format.format import Kind
from lowwater.engine.format.request_id import RESULTS_MAX, RequestId
from lowwater.errors import Corrupt

# All of these are the same on every replica, or their decisions would differ.
SESSIONS_MAX = 10_000
RESULTS_TOTAL_MAX = 1_000_000  # of all
TTL_US_MAX = 2**55

SESSION_KINDS = frozenset({Kind.SESSION_OPEN, Kind.SESSION_KEEP, Kind.SESSION_CLOSE})
# Of the refusals, those of requests that were not looked at; all others are what became of one.
NO_SESSION, REPEATED, REQUEST_FORGOTTEN, TOO_MANY_RESULTS = 20, 21, 22, 24
NOT_LOOKED_AT = frozenset({NO_SESSION, REPEATED, REQUEST_FORGOTTEN, TOO_MANY_RESULTS})

SESSION_KEY = b"session:"
_KEY = Struct(">8sQ")


class Result(NamedTuple):
    """What became of a request: its entry's seq, and the code of its refusal, 0 where it had its effect."""

    seq: int
    code: int


class StoredSession:
    __slots__ = ("_results", "acknowledged", "seq", "time_us", "ttl_us")

    def __init__(self, seq: int, time_us: int, ttl_us: int) -> None:
        self.seq = seq
        self.time_us = time_us  # of that entry
        self.ttl_us = ttl_us
        self.acknowledged = 0
        # Seq and code in one number: there may be very many.
        self._results: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._results)

    @property
    def expires_us(self) -> int:
        return self.time_us + self.ttl_us

    def result(self, number: int) -> Result | None:
        found = self._results.get(number)
        return None if found is None else Result(found >> 16, found & 0xFFFF)

    def numbers(self) -> list[int]:
        return sorted(self._results)

    def record(self, number: int, result: Result) -> None:
        self._results[number] = result.seq << 16 | result.code

    def acknowledge(self, number: int) -> None:
        """Forget the results up to `number`."""
        if number <= self.acknowledged:
            return
        results = self._results
        forgotten: Iterable[int] = range(self.acknowledged + 1, number + 1)
        if len(forgotten) > len(results):  # type: ignore[arg-type]
            forgotten = [each for each in results if each <= number]
        for each in forgotten:
            results.pop(each, None)
        self.acknowledged = number

    def to_row(self) -> list[Any]:
        """All of it, in one order for the same results: a checkpoint's bytes are the same everywhere."""
        numbers = sorted(self._results)
        results = [self._results[number] for number in numbers]
        return [
            self.seq,
            self.time_us,
            self.ttl_us,
            self.acknowledged,
            numbers,
            [each >> 16 for each in results],
            [each & 0xFFFF for each in results],
        ]

    @classmethod
    def from_row(cls, row: Any) -> StoredSession:
        try:
            seq, time_us, ttl_us, acknowledged, numbers, seqs, codes = row
            session = cls(seq, time_us, ttl_us)
            session.acknowledged = acknowledged
            for number, result_seq, code in zip(numbers, seqs, codes, strict=True):
                session.record(number, Result(result_seq, code))
            if any(type(each) is not int for each in row[:4]) or len(session) != len(numbers):
                raise ValueError("it is no session")
        except Exception as error:  # whatever hostile content runs into
            raise Corrupt("a stored session cannot be read") from error
        return session

    def encode(self) -> bytes:
        return cbor2.dumps(self.to_row(), canonical=True)

    @classmethod
    def decode(cls, data: bytes) -> StoredSession:
        try:
            row = cbor2.loads(data)
        except Exception as error:  # cbor2 raises whatever its decoding of hostile bytes runs into
            raise Corrupt("a stored session cannot be read") from error
        return cls.from_row(row)


def session_key(session_id: int) -> bytes:
    return _KEY.pack(SESSION_KEY, session_id)


class Sessions:
    """With the state's lock: all sessions. A session's id is the seq of the entry that opened it."""

    def __init__(self) -> None:
        self.sessions: dict[int, StoredSession] = {}
        self.result_count = 0
        self._changed: set[int] = set()  # since they were last stored; also those that are gone
        self._new: set[int] = set()  # opened since, so the store cannot have them
        # What is being stored: which have to be encoded yet, and those that have changed before they were.
        self._waiting: set[int] = set()
        self._as_frozen: dict[int, bytes | None] = {}

    # ------------------------------------------------------------------ entries

    def open(self, seq: int, time_us: int, ttl_us: int) -> None:
        if seq not in self.sessions:
            self._changing(seq)
            self.sessions[seq] = StoredSession(seq, time_us, ttl_us)
            self._changed.add(seq)
            self._new.add(seq)

    def keep(self, seq: int, time_us: int, session_id: int) -> StoredSession | None:
        """The session, whose time to live begins again; None where there is none, or it knows better."""
        session = self.sessions.get(session_id)
        if session is None or seq <= session.seq:
            return None
        self._changing(session_id)
        session.seq, session.time_us = seq, time_us
        self._changed.add(session_id)
        return session

    def close(self, session_id: int) -> None:
        self._changing(session_id)
        session = self.sessions.pop(session_id, None)
        if session is not None:
            self.result_count -= len(session)
            if session_id in self._new:
                self._new.discard(session_id)
                self._changed.discard(session_id)
            else:
                self._changed.add(session_id)

    def take(self, seq: int, time_us: int, request: RequestId, code: int) -> None:
        """A frame with a request of a session, and the code of its refusal, 0 where it had its effect."""
        session = self.keep(seq, time_us, request.session)
        if session is None:
            return
        before = len(session)
        session.acknowledge(request.number - 1 - request.unanswered)
        if code not in NOT_LOOKED_AT:
            session.record(request.number, Result(seq, code))
        assert len(session) <= RESULTS_MAX
        self.result_count += len(session) - before

    # ------------------------------------------------------------------ checkpoints

    def to_control(self) -> list[list[Any]]:
        """What a checkpoint says of all of them, in the order of their ids."""
        return [[each, *session.to_row()] for each, session in sorted(self.sessions.items())]

    # ------------------------------------------------------------------ the store

    def load(self, stored: Mapping[bytes, bytes]) -> None:
        for session_id, data in stored_sessions(stored):
            session = self.sessions[session_id] = StoredSession.decode(data)
            self.result_count += len(session)

    def freeze(self) -> list[int]:
        """What has changed, in order. It counts as stored from now on, as it is now."""
        changed, self._changed, self._new = sorted(self._changed), set(), set()
        self._waiting, self._as_frozen = set(changed), {}
        return changed

    def encode(self, session_ids: Iterable[int]) -> dict[bytes, bytes | None]:
        """What is to be stored of these sessions, which is what they were when they were frozen."""
        return {session_key(each): self._frozen(each) for each in session_ids}

    def _frozen(self, session_id: int) -> bytes | None:
        if session_id in self._as_frozen:
            return self._as_frozen.pop(session_id)
        self._waiting.discard(session_id)
        session = self.sessions.get(session_id)
        return None if session is None else session.encode()

    def _changing(self, session_id: int) -> None:
        if session_id in self._waiting:
            self._as_frozen[session_id] = self._frozen(session_id)


def rows_of_control(sessions: Sequence[Sequence[Any]]) -> dict[bytes, bytes]:
    """What a page store has of the sessions that a checkpoint has."""
    try:
        return {session_key(each): StoredSession.from_row(row).encode() for each, *row in sessions}
    except (TypeError, ValueError, struct.error) as error:
        raise Corrupt("the sessions of a checkpoint cannot be read") from error


def stored_sessions(stored: Mapping[bytes, bytes]) -> Iterator[tuple[int, bytes]]:
    """The sessions of a page store's meta, by their ids."""
    for key, data in sorted(stored.items()):
        if key.startswith(SESSION_KEY):
            if len(key) != _KEY.size:
                raise Corrupt("the key of a stored session cannot be read")
            yield _KEY.unpack(key)[1], data
