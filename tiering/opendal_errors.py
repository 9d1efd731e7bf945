"""What a store says is wrong, as errors of ours: by what the caller must do, without secrets, and without
traces of Rust."""

from __future__ import annotations

import re

from opendal import exceptions

from lowwater.errors import (
    InvalidConfig,
    LowwaterError,
    StoreDenied,
    StoreMissing,
    StoreUnavailable,
    UploadGone,
)
from lowwater.tiering.store import at, missing

ERRORS: tuple[type[Exception], ...] = (
    exceptions.Error,
    exceptions.Unexpected,
    exceptions.Unsupported,
    exceptions.ConfigInvalid,
    exceptions.NotFound,
    exceptions.PermissionDenied,
    exceptions.IsADirectory,
    exceptions.NotADirectory,
    exceptions.AlreadyExists,
    exceptions.IsSameFile,
    exceptions.ConditionNotMatch,
    exceptions.RateLimited,
    exceptions.RangeNotSatisfied,
    exceptions.Conflict,
    # Its files raise this, with the text of one of the others.
    OSError,
)

NO_UPLOAD = re.compile(r"NoSuchUpload")
NO_CONTAINER = re.compile(r"NoSuchBucket|ContainerNotFound|The specified bucket does not exist", re.I)
CLOCK_SKEWED = re.compile(r"RequestTimeTooSkewed|RequestExpired|difference between the request time", re.I)
NO_CREDENTIALS = re.compile(
    r"no valid credential|failed to load signing credential|credential.{0,40}(not found|is empty|missing)",
    re.I,
)
# The server says that it does not do this, and will say so again.
CANNOT = re.compile(r"status: (405|411|414|415|501|505)\b|\bNotImplemented\b")
READ_ONLY = re.compile(r"read[- ]only|MethodNotAllowed", re.I)


def kind_of(error: Exception) -> str:
    """The name of OpenDAL's exception."""
    return str(error).partition(" ")[0] if isinstance(error, OSError) else type(error).__name__


def is_taken(error: Exception) -> bool:
    """Whether the server refused to write over an object."""
    return kind_of(error) in ("ConditionNotMatch", "AlreadyExists")


def translated(
    error: Exception, uri: str, name: str = "", *, writing: bool = False, secrets: tuple[str, ...] = ()
) -> LowwaterError:
    text = str(error)
    path = at(uri, name) if name else uri
    kind = kind_of(error)
    # Lists and writes miss nothing but the bucket itself.
    if kind == "NotFound" and name and not writing and not NO_CONTAINER.search(text):
        return missing(uri, name)
    return error_of(kind, text, _said(text, secrets), path=path)


def error_of(kind: str, text: str, said: str, *, path: str) -> LowwaterError:
    """`kind` is the name of OpenDAL's exception, `text` is searched for what it does not tell apart, and
    `said` is shown."""
    if CLOCK_SKEWED.search(text):
        return StoreDenied(
            f"this machine's clock and the store's are too far apart: {said}",
            path=path,
            hint="set this machine's clock (chronyc tracking, timedatectl): signed requests carry its time",
        )
    if NO_UPLOAD.search(text):
        return UploadGone(f"somebody has removed the upload: {said}", path=path)
    if NO_CONTAINER.search(text):
        return StoreMissing(f"there is no such bucket: {said}", path=path)
    if kind == "PermissionDenied" or NO_CREDENTIALS.search(text):
        return StoreDenied(f"the store refuses it: {said}", path=path)
    if kind == "NotFound":
        return StoreMissing(f"nothing there: {said}", path=path)
    if kind in ("ConfigInvalid", "Unsupported") or CANNOT.search(text):
        return InvalidConfig(
            f"the store cannot be used so: {said}", path=path, hint="docs/operating/stores.md"
        )
    if kind == "RateLimited":
        return StoreUnavailable(f"the store asks for fewer requests: {said}", path=path)
    return StoreUnavailable(f"the store did not do it: {said}", path=path)


def _said(text: str, secrets: tuple[str, ...]) -> str:
    """What the server or the network said, in one line. Neither the addresses in OpenDAL's context nor its
    back traces get through: an address may carry a signature."""
    first = text.split("\n", 1)[0]
    service = re.search(r'code: "([^"]*)", message: "([^"]*)"', first)
    source = re.search(r"^Source:\s*\n(.*)$", text, re.M)
    if service:
        said = " ".join(part for part in (service[1], service[2]) if part)
    elif source:
        said = re.sub(r"\(https?://[^)]*\)|https?://\S+", "", source[1]).strip()
    else:
        said = first.partition("=> ")[2] or first
        status = re.search(r"status: (\d+)", text)
        if status:
            said += f" (HTTP {status[1]})"
    for secret in secrets:
        said = said.replace(secret, "…")
    return said[:300]
