"""A store from its URI."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from lowwater.engine.seams.real import sleep
from lowwater.engine.seams.seams import Files, Randomness
from lowwater.errors import InvalidConfig
from lowwater.tiering.folder_store import FolderStore
from lowwater.tiering.memory_store import MemoryObjects, MemoryStore
from lowwater.tiering.store import Store
from lowwater.tiering.store_uri import parse_uri
from lowwater.tiering.whole_reads import WholeReads

if TYPE_CHECKING:
    from lowwater.config import TierConfig

# The memories that have names: whoever opens one in this process finds the same objects.
_memories: dict[str, MemoryObjects] = {}
_mutex = threading.Lock()


def open_store(
    uri: str | os.PathLike[str] | None = None,
    *,
    options: Mapping[str, str] | None = None,
    config: TierConfig | None = None,
    read_only: bool = False,
    make: bool = True,
    files: Files | None = None,
    randomness: Randomness | None = None,
    sleep: Callable[[float], None] = sleep,
) -> Store:
    """Open the store at `uri`, or where the configuration says. `options` win over the configuration's, which
    count for its own URI only; both win over those in the URI.

    A store that can only be read is opened too, and a write to it says so. `read_only` tries no writing, and
    makes no folder; nor does `make=False`.
    """
    if uri is None:
        uri = None if config is None else config.store_uri()
        if uri is None:
            raise InvalidConfig("no store is configured", hint="set tier.uri, as s3://bucket/prefix")
        assert config is not None
        options = {**config.options, **(options or {})}
    place = parse_uri(uri, options)
    match place.kind:
        case "memory":
            with _mutex:
                objects = _memories.setdefault(place.path, MemoryObjects()) if place.path else None
            return MemoryStore(place.uri, objects=objects, read_only=read_only)
        case "file" | "shared_fs":
            return FolderStore(
                place.path,
                uri=place.uri,
                read_only=read_only,
                make=make and place.kind == "file",
                files=files,
                randomness=randomness,
            )
        case _:
            from lowwater.tiering.opendal_store import OpenDalStore, StoreLimits

            limits = StoreLimits()
            if config is not None:
                limits = StoreLimits(
                    timeout_s=config.timeout_ms / 1000,
                    attempts_max=config.attempts_max,
                    requests_max=config.requests_max,
                    part_bytes=config.part_bytes,
                    parts_at_once=config.parts_at_once,
                    upload_age_max_s=config.upload_age_max_s,
                )
            store = OpenDalStore(
                place, read_only=read_only, limits=limits, randomness=randomness, sleep=sleep
            )
            return WholeReads(store) if config is not None and not config.ranged_reads else store
