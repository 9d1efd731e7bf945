"""Where a store is: one URI plus options, taken apart.

Always true of a `StorePlace`: its `uri` holds no secret, and neither do its `repr` and any error from here;
its options are all ones that its kind of store knows.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import parse_qsl, unquote, urlsplit

from lowwater.errors import InvalidConfig, without_secrets

Kind = Literal["file", "shared_fs", "memory", "s3", "gcs", "azblob"]

SCHEMES: dict[str, Kind] = {
    "file": "file",
    "shared_fs": "shared_fs",
    "memory": "memory",
    "s3": "s3",
    "gcs": "gcs",
    "gs": "gcs",
    "azblob": "azblob",
    "az": "azblob",
}
# What the first part of the URI is called by OpenDAL.
CONTAINERS: dict[Kind, str] = {"s3": "bucket", "gcs": "bucket", "azblob": "container"}
HINT = "as s3://bucket/prefix, gcs://bucket/prefix, azblob://container/prefix, shared_fs:///path or a path"


@dataclass(frozen=True)
class StorePlace:
    """`path` is the folder, the bucket with its prefix, or the name of a memory."""

    kind: Kind
    uri: str
    path: str
    options: Mapping[str, str] = field(repr=False)


def parse_uri(uri: str | os.PathLike[str], options: Mapping[str, str] | None = None) -> StorePlace:
    """`options` win over those behind the question mark."""
    text = os.fspath(uri)
    shown = without_secrets(text)
    if not text:
        raise InvalidConfig("an empty text is no store", hint=HINT)
    if not text.isprintable():
        raise InvalidConfig(f"{shown!r:.200} has letters that no store has in its name", hint=HINT)
    if "://" not in text:
        # As a folder it would take the history, and nobody would find it in the bucket.
        scheme = text.partition(":")[0].lower()
        if ":" in text and scheme in SCHEMES:
            raise InvalidConfig(f"{shown} lacks the // after {scheme}:", hint=HINT)
        return _folder("file", text, options)
    scheme, _, rest = text.partition("://")
    kind = SCHEMES.get(scheme.lower())
    if kind is None:
        nearest = difflib.get_close_matches(scheme.lower(), SCHEMES, n=1, cutoff=0)[0]
        raise InvalidConfig(
            f"{shown} has the unknown scheme {scheme}", hint=f"the nearest known one is {nearest}; {HINT}"
        )
    if kind in ("file", "shared_fs"):
        path, _, query = rest.partition("?")
        if query:
            raise InvalidConfig(f"a folder takes no options: {shown}", hint="leave out what follows the ?")
        if not path.startswith("/"):
            raise InvalidConfig(f"{shown} has no absolute path", hint=f"write {scheme}:///and/the/path")
        return _folder(kind, unquote(path), options)
    parts = urlsplit(text)
    if "@" in parts.netloc:
        raise InvalidConfig(f"{shown} has credentials in front of its @", hint="give them as options")
    path = "/".join(part for part in (parts.netloc, *unquote(parts.path).split("/")) if part)
    given = {**dict(parse_qsl(parts.query, keep_blank_values=True)), **(options or {})}
    place = f"{kind}://{path}"
    if kind == "memory":
        if given:
            raise InvalidConfig(f"a store in memory takes no options: {shown}", hint="leave them out")
        return StorePlace(kind, place, path, {})
    if not parts.netloc:
        raise InvalidConfig(f"{shown} names no {CONTAINERS[kind]}", hint=HINT)
    if any(part in (".", "..") for part in path.split("/")):
        raise InvalidConfig(f"{shown} leads through . or ..", hint="write the prefix out")
    return StorePlace(kind, place, path, _checked(kind, given, shown))


def _folder(kind: Kind, path: str, options: Mapping[str, str] | None) -> StorePlace:
    if options:
        raise InvalidConfig(f"a folder takes no options, and {path} is one", hint="leave out tier.options")
    path = os.path.abspath(path)
    return StorePlace(kind, f"{kind}://{path}", path, {})


def _checked(kind: Kind, given: Mapping[str, str], shown: str) -> dict[str, str]:
    known = _known_options(kind)
    for name in given:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
            raise InvalidConfig(
                f"{shown}: {kind} has no option {name:.80}", hint=f"the nearest known option is {nearest}"
            )
    options = {name: str(value) for name, value in given.items()}
    environment = ("AWS_REGION", "AWS_DEFAULT_REGION")
    if kind == "s3" and "endpoint" in options and not any(name in os.environ for name in environment):
        # Servers of one's own do not care, but a signature needs one.
        options.setdefault("region", "us-east-1")
    return options


def _known_options(kind: Kind) -> list[str]:
    from opendal import config

    known = {"s3": config.S3Config, "gcs": config.GcsConfig, "azblob": config.AzblobConfig}[kind]
    return sorted(set(known.__annotations__) - {"scheme", "root", CONTAINERS[kind]})
