"""Multipart uploads that nobody will complete, on S3: found by the name of their object, and aborted.

Always true: only uploads of the very name are aborted. Another process that is sending the same object at
this moment finds its upload gone, begins again, and sees that the object is there.

OpenDAL has no call for this, and its credentials are its own. So this works with keys that were given as
options or in the environment; with those of an instance's role, or of a profile, a lifecycle rule of the
bucket does it (docs/operating/stores.md). Whatever goes wrong here costs room in the store, and no more:
nothing is raised.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import quote, urlsplit
from xml.sax.saxutils import unescape

from lowwater.engine.real import RealClock
from lowwater.engine.seams import Clock

EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()


class PendingUploads:
    def __init__(
        self,
        options: Mapping[str, str],
        bucket: str,
        prefix: str,
        *,
        timeout_s: float,
        clock: Clock | None = None,
    ) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._timeout_s = timeout_s
        self._clock = clock or RealClock()
        environment = os.environ
        self._region = (
            options.get("region")
            or environment.get("AWS_REGION")
            or environment.get("AWS_DEFAULT_REGION")
            or "us-east-1"
        )
        endpoint = (
            options.get("endpoint")
            or environment.get("AWS_ENDPOINT_URL")
            or f"https://s3.{self._region}.amazonaws.com"
        )
        self._endpoint = urlsplit(endpoint if "://" in endpoint else f"https://{endpoint}")
        self._key_id = options.get("access_key_id") or environment.get("AWS_ACCESS_KEY_ID", "")
        self._key = options.get("secret_access_key") or environment.get("AWS_SECRET_ACCESS_KEY", "")
        self._token = options.get("session_token") or environment.get("AWS_SESSION_TOKEN", "")
        self._usable = bool(self._key_id and self._key) and "role_arn" not in options

    def abort(self, name: str) -> int:
        """How many there were. 0 too where that cannot be known."""
        if not self._usable:
            return 0
        key = self._prefix + name
        try:
            uploads = self._uploads_of(key)
            for upload in uploads:
                self._request("DELETE", f"/{self._bucket}/{key}", {"uploadId": upload})
        except (OSError, HTTPException, ValueError):
            return 0
        return len(uploads)

    def _uploads_of(self, key: str) -> list[str]:
        status, body = self._request("GET", f"/{self._bucket}", {"prefix": key, "uploads": ""})
        if status != 200:
            return []
        uploads = []
        for upload in re.findall(r"<Upload>(.*?)</Upload>", body.decode(), re.S):
            found_key = re.search(r"<Key>(.*?)</Key>", upload, re.S)
            found_id = re.search(r"<UploadId>(.*?)</UploadId>", upload, re.S)
            # The prefix of a name is one of others as well.
            if found_key and found_id and unescape(found_key[1]) == key:
                uploads.append(unescape(found_id[1]))
        return uploads

    def _request(self, method: str, path: str, query: Mapping[str, str]) -> tuple[int, bytes]:
        path = quote(self._endpoint.path.rstrip("/") + path, safe="/-_.~")
        query_text = "&".join(
            f"{quote(k, safe='-_.~')}={quote(v, safe='-_.~')}" for k, v in sorted(query.items())
        )
        secure = self._endpoint.scheme == "https"
        connection = (HTTPSConnection if secure else HTTPConnection)(
            self._endpoint.netloc, timeout=self._timeout_s
        )
        try:
            connection.request(method, f"{path}?{query_text}", headers=self._signed(method, path, query_text))
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def _signed(self, method: str, path: str, query: str) -> dict[str, str]:
        """The headers of AWS Signature Version 4."""
        moment = datetime.fromtimestamp(self._clock.now_us() / 1_000_000, UTC).strftime("%Y%m%dT%H%M%SZ")
        headers = {
            "host": self._endpoint.netloc,
            "x-amz-content-sha256": EMPTY_SHA256,
            "x-amz-date": moment,
        }
        if self._token:
            headers["x-amz-security-token"] = self._token
        names = ";".join(sorted(headers))
        listed = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
        canonical = "\n".join((method, path, query, listed, names, EMPTY_SHA256))
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
