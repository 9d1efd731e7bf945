"""What callers give: an archive by its URI, and a directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lowwater.engine.log.log import Seams
from lowwater.engine.seams.real import RealFiles
from lowwater.errors import InvalidConfig
from lowwater.tiering.lineage import Lineage, parents_opener
from lowwater.tiering.open_store import open_store
from lowwater.tiering.store import Store
from lowwater.tiering.store_uri import parse_uri

if TYPE_CHECKING:
    from lowwater.config import Config, TierConfig

ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | None

# Options of a store that say where it is, and no more.
PLACE_OPTIONS = frozenset({"endpoint", "region", "enable_virtual_host_style"})


def store_of(tier: str, config: ConfigSource | Config) -> tuple[Store, dict[str, str]]:
    """The store, to read from, and those of its options that say where it is."""
    from lowwater.config import Config  # pydantic takes longer to import than all the rest

    if not isinstance(tier, str | os.PathLike) or not tier:
        raise InvalidConfig(f"the tier is {tier!r:.80}", hint="give a URI, as s3://bucket/prefix")
    loaded: TierConfig = Config.load(config).tier
    uri = os.fspath(tier)
    given = dict(loaded.options) if uri == loaded.store_uri() else {}
    place = parse_uri(uri, given)
    store = open_store(uri, options=given, config=loaded, read_only=True)
    return Lineage(store, parents_opener(uri, given, loaded)), place_options(place.options)


def place_options(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options of a store that may be recorded."""
    return {name: value for name, value in options.items() if name in PLACE_OPTIONS}


def real_seams() -> Seams:
    return Seams(files=RealFiles(), owner=f"restore, process {os.getpid()}")
