"""Sessions of a database: writes that can be repeated after an outcome that nobody knows, and happen once.

Always true:
  - a request has its effect, and its place among the results of its session, at one moment, in one frame or
    group: after a crash both are there, or neither;
  - a refused request leaves nothing behind, so it can be made again under its number;
  - a number that the session itself gave is acknowledged once its call has returned; one that the caller
    gave, when the caller says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from lowwater.engine.format import format
from lowwater.engine.format.entries import Control, Copy, CreateBucket, Delete, DeleteBucket, Put, Write
from lowwater.engine.format.format import Kind
from lowwater.engine.format.request_id import NUMBER_MAX, RESULTS_MAX, RequestId
from lowwater.engine.log.chain import Chain
from lowwater.engine.state.decide import Refusal, decide
from lowwater.engine.state.requests import Copied, Request, encode_outcome, members_of, session_of
from lowwater.engine.state.sessions import StoredSession
from lowwater.errors import (
    AlreadyExists,
    ConditionFailed,
    InputError,
    LimitExceeded,
    LowwaterError,
    NotEmpty,
    NotFound,
    ReopenError,
)

if TYPE_CHECKING:
    from lowwater.engine.database.database import Database

TTL_S_DEFAULT = 3600.0

# What each refusal is to the caller of a database.
_ERRORS: dict[Refusal, tuple[type[LowwaterError], str]] = {
    Refusal.NO_BUCKET: (NotFound, "there is no such bucket"),
    Refusal.NO_KEY: (NotFound, "there is no such key"),
    Refusal.BUCKET_EXISTS: (AlreadyExists, "there is a bucket of this name already"),
    Refusal.BUCKET_NOT_EMPTY: (NotEmpty, "the bucket holds keys"),
    Refusal.CONDITION_FAILED: (ConditionFailed, "the newest version is not the one that the request names"),
    Refusal.NO_SESSION: (NotFound, "the session has ended"),
    Refusal.REQUEST_FORGOTTEN: (InputError, "the session has acknowledged this request, and forgotten it"),
    Refusal.TOO_MANY_SESSIONS: (LimitExceeded, "there are too many sessions"),
    Refusal.TOO_MANY_RESULTS: (LimitExceeded, "the sessions hold too many results that nobody acknowledges"),
}
_HINTS = {
    Refusal.NO_SESSION: "open another one: what it has not answered may have happened or not",
    Refusal.REQUEST_FORGOTTEN: "it has happened: use a new number for a new request",
    Refusal.TOO_MANY_SESSIONS: "close some, or let them expire",
    Refusal.TOO_MANY_RESULTS: "acknowledge what was answered",
}


def error_of(refusal: Refusal, what: str = "") -> LowwaterError:
    """The error that says why a request was refused."""
    kind, message = _ERRORS.get(refusal, (InputError, f"it was refused: {refusal.name.lower()}"))
    return kind(f"{what}: {message}" if what else message, hint=_HINTS.get(refusal))


class _RepeatedError(Exception):
    """The request was seen before."""

    def __init__(self, seq: int) -> None:
        super().__init__(seq)
        self.seq = seq


class Session:
    """A session of a database: its requests happen once, however often they are made. Open one with
    `Database.session`. Any number of threads may use it."""

    def __init__(self, database: Database, session_id: int) -> None:
        self.id = session_id
        self._database = database
        self._lock = threading.RLock()  # a signal handler may call too
        stored = self._stored()
        self._acknowledged = stored.acknowledged
        self._answered: set[int] = set()  # numbers above that, which the session gave
        self._highest = max(stored.numbers(), default=stored.acknowledged)

    # ------------------------------------------------------------------ writing

    def put(
        self,
        bucket: str,
        key: str,
        value: bytes,
        metadata: Mapping[str, str] | None = None,
        *,
        if_absent: bool = False,
        if_seq: int | None = None,
        request: int | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Store a value as `Database.put` does, as the request with the number `request`. If that request was
        seen before, write nothing and return the seq that it had. Without a number it is the next request,
        which is acknowledged when this returns."""
        entry = Put(bucket, key, value, metadata, if_absent=if_absent, if_seq=if_seq)
        return self._write(lambda of: entry._replace(session=of), request, timeout_s, f"put {key!r:.80}")

    def delete(
        self, bucket: str, key: str, *, if_seq: int | None = None, request: int | None = None,
        timeout_s: float | None = None,
    ) -> int:  # fmt: skip
        """Remove a key as a request of this session, and return its seq."""
        entry = Delete(bucket, key, if_seq=if_seq)
        return self._write(lambda of: entry._replace(session=of), request, timeout_s, f"delete {key!r:.80}")

    def copy(
        self, bucket: str, key: str, to_bucket: str, to_key: str, *, if_absent: bool = False,
        if_seq: int | None = None, request: int | None = None, timeout_s: float | None = None,
    ) -> int:  # fmt: skip
        """Copy an object as a request of this session, and return the seq."""
        entry = Copy(bucket, key, to_bucket, to_key, if_absent=if_absent, if_seq=if_seq)
        return self._write(lambda of: entry._replace(session=of), request, timeout_s, f"copy {key!r:.80}")

    def write(
        self,
        entries: Sequence[Put | Delete | Copy],
        *,
        request: int | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Write all entries or none, as one request. Unlike in `Database.write`, they may have conditions."""
        return self._write(lambda of: Write(entries, of), request, timeout_s, "write")

    def create_bucket(self, bucket: str, *, request: int | None = None) -> int:
        """Make a bucket as a request of this session, and return its seq."""
        entry = CreateBucket(bucket)
        return self._write(lambda of: entry._replace(session=of), request, None, f"create {bucket!r:.80}")

    def delete_bucket(self, bucket: str, *, request: int | None = None) -> int:
        """Remove an empty bucket as a request of this session, and return the seq."""
        entry = DeleteBucket(bucket)
        return self._write(lambda of: entry._replace(session=of), request, None, f"delete {bucket!r:.80}")

    def _write(
        self,
        entry_of: Callable[[RequestId], Request],
        request: int | None,
        timeout_s: float | None,
        what: str,
    ) -> int:
        of = self._request_id(request)
        try:
            seq = write_request(self._database, entry_of(of), timeout_s, what)
        except ReopenError:
            raise  # nobody knows whether it has happened
        except LowwaterError:
            if request is None:
                self._answer(of.number)
            raise
        if request is None:
            self._answer(of.number)
        return seq

    def _request_id(self, request: int | None) -> RequestId:
        with self._lock:
            if request is None:
                request = self._highest + 1
            elif not isinstance(request, int) or isinstance(request, bool) or not 0 < request <= NUMBER_MAX:
                raise InputError(f"the request is {request!r:.80}", hint="give a number from 1 up")
            if request - self._acknowledged > RESULTS_MAX:
                raise LimitExceeded(
                    f"request {request} comes, and only those up to {self._acknowledged} are acknowledged",
                    hint=f"call acknowledge(): a session holds {RESULTS_MAX:,} results",
                )
            self._highest = max(self._highest, request)
            return RequestId(self.id, request, min(self._acknowledged, request - 1))

    def _answer(self, number: int) -> None:
        """The caller knows what became of a number that the session gave."""
        with self._lock:
            self._answered.add(number)
            self._advance()

    def _advance(self) -> None:
        while self._acknowledged + 1 in self._answered:
            self._acknowledged += 1
            self._answered.discard(self._acknowledged)

    # ------------------------------------------------------------------ results

    @property
    def acknowledged(self) -> int:
        """The number of a request: the caller knows the results of all requests up to it."""
        return self._acknowledged

    def results(self) -> dict[int, int]:
        """Return the seqs of the requests whose results are kept, by their numbers. A request that is neither
        here nor up to `acknowledged` has not happened."""
        database = self._database
        database._refuse_inside()
        with database._state.lock:
            stored = self._stored()
            found = ((number, stored.result(number)) for number in stored.numbers())
            results = {number: result.seq for number, result in found if result is not None}
        if results:
            database._await(max(results.values()))
        return results

    def acknowledge(self, request: int) -> None:
        """Say that all results up to this request are known. They are forgotten with the next request."""
        if not isinstance(request, int) or isinstance(request, bool) or request < 0:
            raise InputError(f"the request is {request!r:.80}", hint="give the number of a request")
        with self._lock:
            if request > self._highest:
                raise InputError(f"no request up to {request} was made", hint="acknowledge what was answered")
            self._acknowledged = max(self._acknowledged, request)
            self._answered = {number for number in self._answered if number > request}
            self._advance()

    # ------------------------------------------------------------------ its life

    def keep_alive(self) -> int:
        """Start the session's time to live again. Every request does that too."""
        return self._control(Control(Kind.SESSION_KEEP, {"session": self.id}))

    def close(self) -> None:
        """End the session, and forget its results."""
        self._control(Control(Kind.SESSION_CLOSE, {"session": self.id}))

    def _control(self, entry: Control) -> int:
        return write_request(self._database, entry, None, f"session {self.id}")

    def _stored(self) -> StoredSession:
        state = self._database._state
        if not state.owns_lock():
            state.refuse_inside()
        with state.lock:
            stored = state.sessions.sessions.get(self.id)
        if stored is None:
            raise error_of(Refusal.NO_SESSION, f"session {self.id!r:.80}")
        return stored

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()


def write_request(database: Database, request: Request, timeout_s: float | None, what: str) -> int:
    """Decide a request as a fed engine does. Write it where it has an effect, and return its seq; else raise.
    If the request was seen before, return the seq that it had then."""
    members = members_of(request)
    for member in members:
        # What is wrong with one is told before any is ordered.
        encode_outcome(member, 0, copied=(b"", b"", None))
    state = database._state
    copied: list[Copied | None] = []

    def decide_it() -> None:
        refusal = decide(state, database._wal.chain, members, group=isinstance(request, Write))
        if refusal is Refusal.REPEATED:
            raise _RepeatedError(_first_seq(database, members))
        if refusal is not None:
            database._await(state.applied)  # what it rests on
            raise error_of(refusal, what)
        # Here, because it may have to wait for the log, which nobody can while entries are ordered.
        copied[:] = [
            database._copied(member.bucket, member.key) if isinstance(member, Copy) else None
            for member in members
        ]

    def encode(chain: Chain, time_us: int) -> list[bytes]:
        group_seq_last = chain.seq_last + len(members) if isinstance(request, Write) else None
        return [
            encode_outcome(member, time_us, group_seq_last=group_seq_last, copied=found)
            for member, found in zip(members, copied, strict=True)
        ]

    try:
        return database._write(encode, (), timeout_s, decide_it)
    except _RepeatedError as repeated:
        database._await(repeated.seq)
        return repeated.seq


def _first_seq(database: Any, members: Sequence[Any]) -> int:
    request = session_of(members)
    assert request is not None
    first = database._state.sessions.sessions[request.session].result(request.number)
    if first.code:
        raise error_of(Refusal(first.code))
    seq: int = first.seq
    assert 0 < seq <= format.SEQ_MAX
    return seq
