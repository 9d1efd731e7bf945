"""What callers give: an archive by its URI, and a directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lowwater.engine.log import Seams
from lowwater.engine.real import RealFiles
from lowwater.errors import InputError, InvalidConfig
from lowwater.tiering.open_store import open_store
from lowwater.tiering.store import Store
from lowwater.tiering.store_uri import parse_uri

if TYPE_CHECKING:
    from lowwater.config import Config, TierConfig

ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | None

# Options of a store that say where it is, and no more.
PLACE_OPTIONS = frozenset({"endpoint", "region", "enable_virtual_host_style"})


def directory_of(to: str | os.PathLike[str]) -> str:
    path = os.fspath(to) if isinstance(to, str | os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise InputError(f"{to!r:.80} is no directory", hint="give the path of a directory as text")
    return path


def store_of(tier: str, config: ConfigSource | Config) -> tuple[Store, dict[str, str]]:
    """The store, to read from, and those of its options that say where it is."""
    from lowwater.config import Config  # pydantic takes longer to import than all the rest

    if not isinstance(tier, str | os.PathLike) or not tier:
        raise InvalidConfig(f"the tier is {tier!r:.80}", hint="give a URI, as s3://bucket/prefix")
    loaded: TierConfig = Config.load(config).tier
    uri = os.fspath(tier)
    given = dict(loaded.options) if uri == loaded.store_uri() else {}
    place = parse_uri(uri, given)
    shown = {name: value for name, value in place.options.items() if name in PLACE_OPTIONS}
    return open_store(uri, options=given, config=loaded, read_only=True), shown


def real_seams() -> Seams:
    return Seams(files=RealFiles(), owner=f"restore, process {os.getpid()}")
