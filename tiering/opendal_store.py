"""S3, GCS and Azure Blob, through OpenDAL.

Always true:
  - every exception of OpenDAL becomes one of ours (`opendal_errors.py`), every call has a time-out;
  - what the server cannot do was found out by trying, when the store was opened: where it does not refuse to
    write over an object, this side looks first;
  - a forked child of a process that has used OpenDAL is refused: none of the threads that would do what it
    asks for came with it, and it would wait for ever;
  - a multipart upload is completed only when all its bytes came, and as many as were announced.

OpenDAL's Python files cannot abort an upload: closing one completes it, dropping one leaves its parts with
the server, unseen. So on S3 large objects go through a client that knows its uploads (`s3_uploads.py`), where
that client can do what OpenDAL would; elsewhere the server's own rules remove what was left.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, TypeVar, TypeVarTuple

import opendal
from opendal import exceptions, layers
from opendal.types import Entry

from lowwater.config import MIB
from lowwater.engine.seams.real import RealClock, RealRandomness, sleep
from lowwater.engine.seams.seams import Randomness
from lowwater.errors import (
    Closed,
    InvalidConfig,
    NotFound,
    StoreCorrupt,
    StoreDenied,
    StoreUnavailable,
    UploadGone,
)
from lowwater.tiering.checksums import Checksum, Hashing, md5_of_base64, md5_of_etag
from lowwater.tiering.opendal_errors import ERRORS, READ_ONLY, is_taken, translated
from lowwater.tiering.retries import Retries
from lowwater.tiering.s3_client import NotTrusted, usable_client
from lowwater.tiering.s3_uploads import S3Uploads
from lowwater.tiering.store import PROBE, FoundObject, Handle, Part, at, counted
from lowwater.tiering.store_uri import CONTAINERS, StorePlace
from lowwater.tiering.verified_writes import pass_through, same_bytes

LIST_PAGE = 1000
# A copy of more may take a server longer than a call may.
COPY_BYTES_MAX = 256 * MIB

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@dataclass(frozen=True, kw_only=True)
class StoreLimits:
    """How a store is called. The keys of `[tier]` have the same names."""

    timeout_s: float = 30.0
    attempts_max: int = 5
    requests_max: int = 32
    part_bytes: int = 5 * MIB
    parts_at_once: int = 2
    upload_age_max_s: float = 86_400.0


class _OpendalProcess:
    has_used = False
    is_forked = False


def _forbid_in_child() -> None:
    _OpendalProcess.is_forked = _OpendalProcess.has_used


os.register_at_fork(after_in_child=_forbid_in_child)


class OpenDalStore(Handle):
    def __init__(
        self,
        place: StorePlace,
        *,
        read_only: bool = False,
        limits: StoreLimits | None = None,
        randomness: Randomness | None = None,
        sleep: Callable[[float], None] = sleep,
    ) -> None:
        super().__init__(place.uri, read_only=read_only)
        self._check_open()
        _OpendalProcess.has_used = True
        self._limits = limits = limits or StoreLimits()
        self._hashing = Hashing(limits.part_bytes)
        self._has_md5_etags = place.kind == "s3"
        self._secrets = tuple(value for name, value in place.options.items() if _is_secret(name) and value)
        self.retries = Retries(
            attempts=limits.attempts_max, randomness=randomness or RealRandomness(), sleep=sleep
        )
        container, _, prefix = place.path.partition("/")
        options: dict[str, Any] = {**place.options, CONTAINERS[place.kind]: container, "root": f"/{prefix}"}
        try:
            operator = opendal.Operator(place.kind, **options).layer(
                layers.TimeoutLayer(timeout=limits.timeout_s, io_timeout=limits.timeout_s)
            )
        except ERRORS as error:
            raise self._translated(error) from None
        self._operator = operator.layer(layers.ConcurrentLimitLayer(limits.requests_max))
        self._lister = self._operator.to_async_operator()
        # A stream is sent once, so its parts are sent again below it. It is not counted among the requests:
        # what it is fed from may be read here as well.
        self._streams = operator.layer(
            layers.RetryLayer(max_times=limits.attempts_max - 1, jitter=True, min_delay=0.1, max_delay=5.0)
        )
        self._start_after = operator.capability().list_with_start_after
        self._copies = operator.capability().copy
        self._uploads = self._uploads_of(place, container, prefix) if place.kind == "s3" else None
        self.refuses_to_overwrite = False
        """Whether the server itself keeps a name that is taken."""
        self._probe()

    def _uploads_of(self, place: StorePlace, bucket: str, prefix: str) -> S3Uploads | None:
        limits = self._limits
        client = usable_client(place.options, bucket, prefix, uri=self.uri, timeout_s=limits.timeout_s)
        if client is None:
            return None
        return S3Uploads(
            client,
            retries=self.retries,
            parts_at_once=limits.parts_at_once,
            age_max_s=limits.upload_age_max_s,
            clock=RealClock(),
        )

    @property
    def hashing(self) -> Hashing:
        return self._hashing

    @property
    def calls_repeated(self) -> int:
        """How many requests were made again. Of those below a stream nobody knows."""
        return self.retries.repeated

    def _check_open(self) -> None:
        super()._check_open()
        if _OpendalProcess.is_forked:
            raise Closed(
                f"{self.uri}: this process was forked from one that has used object stores",
                hint="let multiprocessing start it with 'spawn' or 'forkserver'",
            )

    def write(self, name: str, parts: Iterable[Part], *, size: int | None) -> bool | None:
        self._check(name, writing=True)
        if (uploads := self._uploads) is not None:
            uploads.sweep_now_and_then()
        parts = counted(parts, size, at(self.uri, name))
        streamed = size is None or size > self._limits.part_bytes
        # A stream that comes for nothing costs more than a look.
        if (streamed or not self.refuses_to_overwrite) and self._is_there(name):
            return False
        return self._send(name, parts, streamed=streamed, keeps=self.refuses_to_overwrite)

    def replace(self, name: str, parts: Iterable[Part], *, size: int | None) -> None:
        self._check(name, writing=True)
        parts = counted(parts, size, at(self.uri, name))
        self._send(name, parts, streamed=size is None or size > self._limits.part_bytes, keeps=False)

    def _send(self, name: str, parts: Iterable[Part], *, streamed: bool, keeps: bool) -> bool | None:
        if streamed:
            return self._stream(name, parts, keeps=keeps)
        return self._put_at_once(name, b"".join(parts), keeps=keeps)

    def _put_at_once(self, name: str, data: bytes, *, keeps: bool) -> bool | None:
        return self.retries.run_making(lambda: self._put(name, data, keeps=keeps))

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        self._check(name)
        if end is not None and end <= start:
            self.stat(name)
            return b""
        return self.retries.run(lambda: self._read(name, start, end))

    def stat(self, name: str) -> FoundObject:
        self._check(name)
        return self.retries.run(lambda: self._stat(name))

    def checksum(self, name: str) -> Checksum:
        """The MD5 that Google and Azure have of what came at once, and the ETag of S3."""
        self._check(name)
        return self.retries.run(lambda: self._checksum(name))

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[FoundObject]:
        self._check_open()
        return self._list(prefix, start_after)

    def copy(self, source: str, target: str) -> bool:
        self._check(source)
        self._check(target, writing=True)
        size = self.stat(source).size
        if self._is_there(target):
            return False
        if self._copies and size <= COPY_BYTES_MAX:
            try:
                self.retries.run(lambda: self._call(source, lambda: self._operator.copy(source, target)))
            except InvalidConfig:
                self._copies = False  # it says that it does, and does not
            else:
                self._require_copied(source, target, size)
                return True
        return pass_through(self, source, self, target, part_bytes=self._limits.part_bytes)

    def _require_copied(self, source: str, target: str, size: int) -> None:
        """Servers announce the end of a copy as a success before it is one."""
        try:
            found = self.checksum(target)
        except NotFound:
            what = "has it not"
        else:
            what = f"has one of {found.size:,} bytes"
            if found.size == size:
                if (found.md5 and found.md5 == self.checksum(source).md5) or same_bytes(self, source, target):
                    return
                what = "has one of other bytes"
        raise StoreCorrupt(
            f"the store said that it copied an object of {size:,} bytes, and {what}",
            path=at(self.uri, target),
        )

    def delete(self, name: str) -> None:
        self._check(name, writing=True)
        self.retries.run(lambda: self._call(name, lambda: self._operator.delete(name), writing=True))

    # ---- one attempt each

    def _put(self, name: str, data: bytes, *, keeps: bool) -> bool:
        try:
            self._operator.write(name, data, if_not_exists=keeps)
        except ERRORS as error:
            if is_taken(error):
                return False
            raise self._translated(error, name, writing=True) from None
        return True

    def _stream(self, name: str, parts: Iterable[Part], *, keeps: bool) -> bool | None:
        pieces = _pieces(parts, self._limits.part_bytes)
        begun = deque(islice(pieces, 2))
        if len(begun) < 2:
            return self._put_at_once(name, b"".join(begun), keeps=keeps)

        def all_of_them() -> Iterator[bytes]:
            while begun:
                yield begun.popleft()
            yield from pieces

        try:
            # Another thread may find out meanwhile that it is of no use here.
            if (uploads := self._uploads) is not None:
                try:
                    return uploads.write(name, all_of_them(), keeps=keeps)
                except NotTrusted:
                    self._uploads = None  # nothing was sent yet
            return self._stream_through_opendal(name, all_of_them(), keeps=keeps)
        except UploadGone:
            # It is gone as well where it was completed, and the answer did not come through.
            if self._is_there(name):
                return None
            raise

    def _stream_through_opendal(self, name: str, pieces: Iterable[bytes], *, keeps: bool) -> bool | None:
        limits = self._limits
        file = self._call(
            name,
            lambda: self._streams.open(
                name,
                "wb",
                chunk=limits.part_bytes,
                concurrent=limits.parts_at_once,
                if_not_exists=keeps,
            ),
            writing=True,
        )
        for piece in pieces:  # whose own errors are not the store's
            self._call(name, lambda p=piece: file.write(p), writing=True)  # type: ignore[misc]
        try:
            file.close()
        except ERRORS as error:
            if is_taken(error):
                return None  # it may have been called twice below
            raise self._translated(error, name, writing=True) from None
        return True

    def _read(self, name: str, start: int, end: int | None) -> bytes:
        try:
            size = None if end is None else end - start
            return self._operator.read(name, offset=start or None, size=size)
        except exceptions.RangeNotSatisfied:
            return b""
        except ERRORS as error:
            if end is None or "too little data" not in str(error):
                raise self._translated(error, name) from None
        # The range ends beyond the object, or the answer was cut off: the object's size tells.
        whole = self._stat(name).size
        if whole >= end:
            raise StoreUnavailable("an answer was shorter than the range", path=at(self.uri, name))
        if whole <= start:
            return b""
        return self._call(name, lambda: self._operator.read(name, offset=start, size=whole - start))

    def _stat(self, name: str) -> FoundObject:
        return FoundObject(name, self._call(name, lambda: self._operator.stat(name)).content_length)

    def _checksum(self, name: str) -> Checksum:
        found = self._call(name, lambda: self._operator.stat(name))
        if found.content_md5:
            md5 = md5_of_base64(found.content_md5)
        else:
            md5 = md5_of_etag(found.etag) if self._has_md5_etags else ""
        mark = found.etag or found.content_md5 or str(found.last_modified or "")
        return Checksum(found.content_length, md5, mark)

    def _is_there(self, name: str) -> bool:
        try:
            self.stat(name)
        except NotFound:
            return False
        return True

    def _list(self, prefix: str, start_after: str) -> Iterator[FoundObject]:
        """A page is asked for at a time: a lister that waits for its reader would keep a request."""
        while True:
            page = self.retries.run(lambda after=start_after: self._page(prefix, after))  # type: ignore[misc]
            yield from (found for found in page if found.name != PROBE)
            if len(page) < LIST_PAGE:
                return
            start_after = page[-1].name

    def _page(self, prefix: str, start_after: str) -> Sequence[FoundObject]:
        options: dict[str, Any] = {"recursive": True, "limit": LIST_PAGE}
        if self._start_after and start_after:
            options["start_after"] = start_after

        def wanted(entry: Entry) -> bool:
            return entry.metadata.is_file and entry.path.startswith(prefix) and entry.path > start_after

        def collect() -> tuple[FoundObject, ...]:
            found = self._first_entries(prefix, options, LIST_PAGE, wanted)
            return tuple(FoundObject(entry.path, entry.metadata.content_length) for entry in found)

        page = self._call("", collect)
        if any(one.name >= other.name for one, other in pairwise(page)):
            raise StoreUnavailable(
                "the server's lists are not sorted", path=self.uri, hint="directory buckets cannot be used"
            )
        return page

    def _first_entries(
        self, prefix: str, options: Mapping[str, Any], count: int, wanted: Callable[[Entry], bool]
    ) -> Sequence[Entry]:
        """OpenDAL's blocking lister keeps the interpreter while it waits for the server: one list from a
        server that hangs would stop every thread. So this takes the other one, in a loop of its own."""

        async def collect() -> Sequence[Entry]:
            entries: list[Any] = []
            async for entry in await self._lister.list(prefix, **options):
                if wanted(entry):
                    entries.append(entry)
                    if len(entries) == count:
                        break
            return entries

        if _loop_runs_here():
            found = (entry for entry in self._operator.list(prefix, **options) if wanted(entry))
            return tuple(islice(found, count))
        with asyncio.Runner(loop_factory=_Loop) as runner:
            return runner.run(collect())

    def _call(self, name: str, call: Callable[[], T], *, writing: bool = False) -> T:
        try:
            return call()
        except ERRORS as error:
            raise self._translated(error, name, writing=writing) from None

    def _translated(self, error: Exception, name: str = "", *, writing: bool = False) -> Exception:
        return translated(error, self.uri, name, writing=writing, secrets=self._secrets)

    # ---- what the server can do

    def _probe(self) -> None:
        """Look whether it answers, whether it can be written, and whether a condition on a write is kept:
        some servers accept it and write over the object. The name is always the same: a crash leaves one at
        most, and an opener that finds it taken has its answer."""
        self.retries.run(lambda: self._call("", lambda: self._first_entries("", {"limit": 1}, 1, bool)))
        if self.read_only:
            return
        try:
            for _ in range(2):
                if not self.retries.run(self._put_probe):
                    self.refuses_to_overwrite = True
                    break
        except StoreDenied:
            self.read_only = True
            return
        with suppress(StoreDenied):  # who may not delete leaves one small object, which no list shows
            self.retries.run(lambda: self._call(PROBE, lambda: self._operator.delete(PROBE), writing=True))

    def _put_probe(self) -> bool:
        try:
            self._operator.write(PROBE, b"", if_not_exists=True)
        except exceptions.Unsupported:
            return True
        except ERRORS as error:
            if is_taken(error):
                return False
            if READ_ONLY.search(str(error)):
                raise StoreDenied("the store is read-only", path=self.uri) from None
            raise self._translated(error, PROBE, writing=True) from None
        return True


class _Loop(asyncio.SelectorEventLoop):
    """A loop that ends when nobody is about to wake it any more. A thread of OpenDAL's gives the interpreter
    up in there; where the program ended before it came back, Python would end that thread through Rust's
    frames, and so abort the process, after it has done all that it should."""

    def __init__(self) -> None:
        super().__init__()
        self._waking = threading.Lock()

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        with self._waking:
            return super().call_soon_threadsafe(callback, *args, context=context)

    def close(self) -> None:
        with self._waking:
            super().close()


def _loop_runs_here() -> bool:
    """Whether this is called from a coroutine, whose thread can run no second loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _is_secret(option: str) -> bool:
    return any(word in option for word in ("secret", "key", "token", "credential"))


def _pieces(parts: Iterable[Part], size: int) -> Iterator[bytes]:
    """Yield the same bytes in pieces of `size`; the last one may be shorter. Keep nothing that was given
    away."""
    waiting: list[memoryview] = []
    missing = size

    def take() -> bytes:
        piece = b"".join(waiting)
        waiting.clear()
        return piece

    for part in parts:
        view = memoryview(part).cast("B")
        while len(view) >= missing:
            waiting.append(view[:missing])
            view, missing = view[missing:], size
            yield take()
        if view:
            waiting.append(view)
            missing -= len(view)
        del part, view
    if waiting:
        yield take()
