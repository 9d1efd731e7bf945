"""Signed requests to S3, for what OpenDAL has no calls for: multipart uploads by their ids.

Always true:
  - every request is signed over its body, so the server takes nothing that was changed on its way;
  - an answer that says no is one of our errors, by what the caller must do, as OpenDAL's are;
  - `usable_client` gives one only where it does what OpenDAL would: with keys and a region from the
    options or the environment, and no option that it does not know. A role, a profile, a proxy, a strange
    endpoint or encryption by the server are OpenDAL's alone. So are servers whose certificates Python does
    not trust, which is found out when they are called;
  - no error shows a key.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cached_property
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import NamedTuple
from urllib.parse import SplitResult, quote, urlsplit
from urllib.request import getproxies, proxy_bypass
from xml.sax.saxutils import unescape

from lowwater.engine.seams.real import RealClock
from lowwater.engine.seams.seams import Clock
from lowwater.errors import LowwaterError, StoreUnavailable
from lowwater.tiering.opendal_errors import error_of
from lowwater.tiering.store import at

# What a request that OpenDAL makes depends on, and ones of ours do too.
OPTIONS = frozenset({"endpoint", "region", "access_key_id", "secret_access_key", "session_token"})

# The status where a condition does not hold.
REFUSED = 412
# Answers of S3 by their status. All others are tried again.
KINDS = {401: "PermissionDenied", 403: "PermissionDenied", 404: "NotFound", 429: "RateLimited"}
# What the server does not do, it will not do later either.
KINDS |= dict.fromkeys((405, 411, 414, 415, 501, 505), "Unsupported")


class NotTrusted(Exception):
    """Python does not trust the server's certificate; OpenDAL, which brings its own authorities, may."""


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    """Their names are in small letters."""
    body: bytes

    def has(self, tag: str) -> bool:
        return re.search(rf"<{tag}[\s>]", self.body.decode("utf-8", "replace")) is not None

    def text_of(self, tag: str) -> str:
        """What stands in the first element of that name; nothing where there is none."""
        return _text(tag, self.body.decode("utf-8", "replace"))

    def elements(self, tag: str) -> list[dict[str, str]]:
        """Return the texts of the children of each element of this name."""
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", self.body.decode("utf-8", "replace"), re.S)
        return [{tag: _text(tag, each) for tag in re.findall(r"<(\w+)>", each)} for each in found]


class S3Client:
    """A client of one bucket, below one prefix. Any number of threads may share it."""

    def __init__(
        self,
        endpoint: SplitResult,
        bucket: str,
        prefix: str,
        *,
        uri: str,
        region: str,
        key_id: str,
        key: str,
        token: str = "",
        timeout_s: float,
        clock: Clock | None = None,
    ) -> None:
        """`uri` is what errors call it."""
        self.prefix = f"{prefix}/" if prefix else ""
        self.uri = uri
        self._endpoint = endpoint
        self._bucket = bucket
        self._region = region
        self._key_id, self._key, self._token = key_id, key, token
        self._timeout_s = timeout_s
        self._clock = clock or RealClock()

    @cached_property
    def _trusted(self) -> ssl.SSLContext:
        return ssl.create_default_context()

    def connect(self) -> HTTPConnection:
        """A connection that no other thread uses."""
        if self._endpoint.scheme == "https":
            return HTTPSConnection(self._endpoint.netloc, timeout=self._timeout_s, context=self._trusted)
        return HTTPConnection(self._endpoint.netloc, timeout=self._timeout_s)

    def send(
        self,
        connection: HTTPConnection,
        method: str,
        name: str | None,
        query: Mapping[str, str],
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send a request for the object `name`, or for the bucket. Raises OSError,
        HTTPException and NotTrusted."""
        path = self._endpoint.path.rstrip("/") + f"/{self._bucket}"
        if name is not None:
            path += f"/{self.prefix}{name}"
        path = quote(path, safe="/-_.~")
        query_text = "&".join(
            f"{quote(k, safe='-_.~')}={quote(v, safe='-_.~')}" for k, v in sorted(query.items())
        )
        signed = self._signed(method, path, query_text, hashlib.sha256(body).hexdigest())
        try:
            connection.request(
                method, f"{path}?{query_text}", body=body, headers={**signed, **(headers or {})}
            )
        except ssl.SSLCertVerificationError as error:
            raise NotTrusted(str(error)) from None

    def receive(self, connection: HTTPConnection, name: str | None, *, may_refuse: bool = False) -> Answer:
        """The answer to what was sent. Raises what it says, where that is an error, and StoreUnavailable
        where there is none. `may_refuse` says that 412 is an answer: a condition did not hold."""
        try:
            response = connection.getresponse()
            headers = {name.lower(): value for name, value in response.getheaders()}
            answer = Answer(response.status, headers, response.read())
        except (OSError, HTTPException) as error:
            connection.close()
            raise self.unavailable(error, name) from None
        # The end of an upload is announced as a success before it is one.
        is_error = answer.status >= 300 or answer.has("Error")
        if is_error and not (may_refuse and answer.status == REFUSED):
            raise self._said(answer, name)
        return answer

    def request(
        self,
        method: str,
        name: str | None,
        query: Mapping[str, str],
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        expected: str = "",
        may_refuse: bool = False,
    ) -> Answer:
        """One request on a connection of its own. An answer without the element `expected` was cut."""
        try:
            connection = self.connect()
        except (OSError, HTTPException) as error:
            raise self.unavailable(error, name) from None
        try:
            try:
                self.send(connection, method, name, query, body, headers)
            except (OSError, HTTPException) as error:
                raise self.unavailable(error, name) from None
            answer = self.receive(connection, name, may_refuse=may_refuse)
            if expected and answer.status != REFUSED and not answer.has(expected):
                raise self.unavailable("its answer was cut, or is none of S3", name)
            return answer
        finally:
            connection.close()

    def unavailable(self, error: Exception | str, name: str | None) -> LowwaterError:
        said = self._without_keys(str(error)) or type(error).__name__
        return StoreUnavailable(f"the store did not do it: {said:.300}", path=self._path(name))

    def _without_keys(self, said: str) -> str:
        for secret in filter(None, (self._key, self._token, self._key_id)):
            said = said.replace(secret, "…")
        return said

    def _said(self, answer: Answer, name: str | None) -> LowwaterError:
        code, message = answer.text_of("Code"), answer.text_of("Message")
        said = self._without_keys(" ".join(part for part in (code, message) if part)) or "no reason given"
        return error_of(
            KINDS.get(answer.status, "Unexpected"),
            code,
            f"{said:.300} (HTTP {answer.status})",
            path=self._path(name),
        )

    def _path(self, name: str | None) -> str:
        return self.uri if name is None else at(self.uri, name)

    def _signed(self, method: str, path: str, query: str, body_hash: str) -> dict[str, str]:
        """The headers of AWS Signature Version 4."""
        moment = datetime.fromtimestamp(self._clock.now_us() / 1_000_000, UTC).strftime("%Y%m%dT%H%M%SZ")
        headers = {
            "host": self._endpoint.netloc,
            "x-amz-content-sha256": body_hash,
            "x-amz-date": moment,
        }
        if self._token:
            headers["x-amz-security-token"] = self._token
        names = ";".join(sorted(headers))
        listed = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
        canonical = "\n".join((method, path, query, listed, names, body_hash))
        scope = f"{moment[:8]}/{self._region}/s3/aws4_request"
        to_sign = "\n".join(
            ("AWS4-HMAC-SHA256", moment, scope, hashlib.sha256(canonical.encode()).hexdigest())
        )
        key = f"AWS4{self._key}".encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        signature = hmac.digest(key, to_sign.encode(), "sha256").hex()
        credential = f"{self._key_id}/{scope}"
        headers["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders={names}, Signature={signature}"
        )
        return headers


def usable_client(
    options: Mapping[str, str],
    bucket: str,
    prefix: str,
    *,
    uri: str,
    timeout_s: float,
    clock: Clock | None = None,
) -> S3Client | None:
    """None where what the options and the environment say is OpenDAL's alone."""
    environment = os.environ
    region = options.get("region") or environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    address = options.get("endpoint") or environment.get("AWS_ENDPOINT_URL")
    if address is None and environment.keys() & {"AWS_ENDPOINT", "AWS_S3_ENDPOINT"}:
        return None
    address = address or f"https://s3.{region}.amazonaws.com"
    try:
        endpoint = urlsplit(address if "://" in address else f"https://{address}")
        host = endpoint.hostname or ""
    except ValueError:
        return None
    # Of that host OpenDAL makes the region's.
    is_strange = host in ("", "s3.amazonaws.com") or "@" in endpoint.netloc or "%" in endpoint.path
    if options.keys() & {"access_key_id", "secret_access_key"}:
        key_id, key = options.get("access_key_id", ""), options.get("secret_access_key", "")
        token = options.get("session_token", "")
    else:
        key_id = environment.get("AWS_ACCESS_KEY_ID", "")
        key = environment.get("AWS_SECRET_ACCESS_KEY", "")
        token = environment.get("AWS_SESSION_TOKEN", "")
    if not (region and key_id and key) or is_strange or not options.keys() <= OPTIONS:
        return None
    if getproxies().keys() & {endpoint.scheme, "all"} and not proxy_bypass(host):
        return None
    return S3Client(
        endpoint,
        bucket,
        prefix,
        uri=uri,
        region=region,
        key_id=key_id,
        key=key,
        token=token,
        timeout_s=timeout_s,
        clock=clock,
    )


def _text(tag: str, xml: str) -> str:
    found = re.search(rf"<{tag}>([^<]*)</{tag}>", xml)
    return unescape(found[1], {"&quot;": '"', "&apos;": "'", "&#34;": '"', "&#39;": "'"}) if found else ""
