"""Multipart uploads on S3: those of this process, each known by its id, and those that killed ones have left.

Always true:
  - an upload is completed only when all its parts came, and the server has said for each that it took these
    bytes; one that fails, or that loses against another sender, is aborted by its id;
  - no upload is removed because of its name: others may be sending the same object at this moment. One is,
    when the store's own time of its beginning, compared with the store's own clock, is older than the age
    that was set, and the store has shown that it knows when an upload began;
  - memory is a part for each connection and one more, besides what the caller makes parts of.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException
from typing import NamedTuple

from lowwater.engine.seams.seams import Clock
from lowwater.errors import LowwaterError, StoreUnavailable, UploadGone
from lowwater.logging import get_logger
from lowwater.tiering.names import parse
from lowwater.tiering.retries import Retries
from lowwater.tiering.s3_client import REFUSED, NotTrusted, S3Client
from lowwater.tiering.store import at

_logger = get_logger("shipping")

# How long between two looks for what was left, unless uploads get old sooner.
SWEEP_EVERY_S = 3600.0
PAGES_MAX = 1000
# What the upload is called that is begun to see whether the store knows when. No object is ever made of it.
PROBE = ".probe-upload"


class Pending(NamedTuple):
    """An upload that the store lists. `is_old` is by the store's own times."""

    name: str
    id: str
    is_old: bool


class S3Uploads:
    """Multipart uploads to one store. Any number of threads may send at once."""

    def __init__(
        self, client: S3Client, *, retries: Retries, parts_at_once: int, age_max_s: float, clock: Clock
    ) -> None:
        self._client = client
        self._retries = retries
        self._parts_at_once = parts_at_once
        self._age_max_s = age_max_s
        self._clock = clock
        self._sweeping = threading.Lock()
        self._swept_s: float | None = None

    # ------------------------------------------------------------------ one upload of ours

    def write(self, name: str, parts: Iterable[bytes], *, keeps: bool) -> bool | None:
        """Make the object of these parts. With `keeps` the server is asked to keep one that is there; the
        answer is False then, or None where that may be the one of this call. Raises UploadGone where somebody
        has removed the upload, and what reading the parts raises."""
        upload = self._retries.run(lambda: self._begin(name))
        try:
            try:
                etags = self._send(name, upload, parts)
                is_made = self._retries.run_making(lambda: self._complete(name, upload, etags, keeps))
            except NotTrusted as error:  # the parts are gone: nobody else can send them from here
                raise self._client.unavailable(error, name) from None
        except StoreUnavailable:
            # A server that knows the upload no more may hang up before it has heard a part to its end.
            if self._abort(name, upload):
                raise
            raise UploadGone("somebody has removed the upload", path=at(self._client.uri, name)) from None
        except BaseException:
            self._abort(name, upload)
            raise
        if not is_made:
            self._abort(name, upload)
        return is_made

    def _begin(self, name: str) -> str:
        answer = self._client.request("POST", name, {"uploads": ""}, expected="UploadId")
        return answer.text_of("UploadId")

    def _send(self, name: str, upload: str, parts: Iterable[bytes]) -> list[str]:
        """Send all parts, several at once: while one is being sent, the server works at those before."""
        lanes = [_Lane(self._client, name, upload) for _ in range(self._parts_at_once)]
        etags: dict[int, str] = {}

        def end(lane: _Lane) -> None:
            if number := lane.number:
                etags[number] = self._retries.run(lane.receive)

        try:
            for number, part in enumerate(parts, start=1):
                lane = lanes[number % len(lanes)]
                end(lane)
                lane.send(number, part)
                del part  # its lane has it, for as long as it needs it
            for lane in lanes:
                end(lane)
        finally:
            for lane in lanes:
                lane.close()
        return [etags[number] for number in sorted(etags)]

    def _complete(self, name: str, upload: str, etags: list[str], keeps: bool) -> bool:
        listed = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag></Part>"
            for number, etag in enumerate(etags, start=1)
        )
        body = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
        headers = {"Content-Type": "application/xml"}
        if keeps:
            headers["If-None-Match"] = "*"
        answer = self._client.request(
            "POST",
            name,
            {"uploadId": upload},
            body,
            headers,
            expected="CompleteMultipartUploadResult",
            may_refuse=keeps,
        )
        return answer.status != REFUSED

    def _abort(self, name: str, upload: str) -> bool:
        """False where there is no such upload any more. Where something else is in the way, it gets old."""
        try:
            self._client.request("DELETE", name, {"uploadId": upload})
        except UploadGone:
            return False
        except (LowwaterError, NotTrusted):
            pass
        return True

    # ------------------------------------------------------------------ those that others have left

    def sweep_now_and_then(self) -> None:
        """Remove what got old, where nobody has looked for a while. What is in the way costs room in the
        store, and no more: nothing is raised."""
        if not self._sweeping.acquire(blocking=False):
            return
        try:
            now_s = self._clock.monotonic()
            if self._swept_s is not None and now_s < self._swept_s + min(SWEEP_EVERY_S, self._age_max_s):
                return
            self._swept_s = now_s
            with suppress(LowwaterError, NotTrusted, ValueError):
                self._sweep()
        finally:
            self._sweeping.release()

    def _sweep(self) -> None:
        # Below the prefix may lie what has nothing to do with us, other archives too.
        old = [
            each
            for each in self._pending("")
            if each.is_old and (each.name == PROBE or parse(each.name) is not None)
        ]
        if not old:
            return
        if not self._knows_when_uploads_began():
            _logger.warning(
                "the store does not say when uploads began: none is removed", uri=self._client.uri
            )
            return
        for each in old:
            self._abort(each.name, each.id)
        _logger.info("removed uploads that nobody completes", uri=self._client.uri, uploads=len(old))

    def _knows_when_uploads_began(self) -> bool:
        """Some servers say the same of all uploads. One of our own, which has only just begun, must not be
        old."""
        upload = self._begin(PROBE)
        try:
            return any(each.id == upload and not each.is_old for each in self._pending(PROBE))
        finally:
            self._abort(PROBE, upload)

    def _pending(self, name_prefix: str) -> Iterator[Pending]:
        prefix = self._client.prefix
        marker: dict[str, str] = {}
        # Of a server that gives its pages for ever the first ones are enough.
        for _ in range(PAGES_MAX):
            query = {"uploads": "", "prefix": prefix + name_prefix, **marker}
            answer = self._client.request("GET", None, query, expected="ListMultipartUploadsResult")
            now = _in_utc(parsedate_to_datetime(answer.headers.get("date", "")))
            for found in answer.elements("Upload"):
                began = _in_utc(datetime.fromisoformat(found.get("Initiated", "")))
                is_old = now - began > timedelta(seconds=self._age_max_s)
                yield Pending(found.get("Key", "").removeprefix(prefix), found.get("UploadId", ""), is_old)
            if answer.text_of("IsTruncated") != "true":
                return
            marker = {
                "key-marker": answer.text_of("NextKeyMarker"),
                "upload-id-marker": answer.text_of("NextUploadIdMarker"),
            }


def _in_utc(moment: datetime) -> datetime:
    """S3 means that, also where it does not say so."""
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


class _Lane:
    """A connection with at most one part under way, which is kept until the server says that it has it."""

    def __init__(self, client: S3Client, name: str, upload: str) -> None:
        self.number = 0
        """The number of the part under way; 0 for none."""
        self._client = client
        self._name = name
        self._upload = upload
        self._part = b""
        self._connection: HTTPConnection | None = None
        self._is_sent = False

    def send(self, number: int, part: bytes) -> None:
        """What goes wrong is told when the answer is asked for."""
        self.number, self._part = number, part
        with suppress(StoreUnavailable):
            self._send()

    def receive(self) -> str:
        """The mark of the part that is under way. To be called again after StoreUnavailable: then the part is
        sent again."""
        assert self.number, "no part is under way"
        if not self._is_sent:
            self._send()
        assert self._connection is not None
        self._is_sent = False
        etag = self._client.receive(self._connection, self._name).headers.get("etag")
        if not etag:
            self._connection.close()  # whatever comes there belongs to nothing
            raise self._client.unavailable("its answer was cut, or is none of S3", self._name)
        self.number, self._part = 0, b""
        return etag

    def _send(self) -> None:
        if self._connection is None:
            self._connection = self._client.connect()
        query = {"partNumber": str(self.number), "uploadId": self._upload}
        try:
            self._client.send(self._connection, "PUT", self._name, query, self._part)
        except (BrokenPipeError, ConnectionResetError):
            pass  # who does not listen to the end has said why, perhaps
        except (OSError, HTTPException) as error:
            self._connection.close()
            raise self._client.unavailable(error, self._name) from None
        self._is_sent = True

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
