"""What a page store says of itself: how far its pages go, and what memory needs to go on from there.

Always true:
  - it is written in one transaction with the pages that it speaks of;
  - a store without it is empty, or is being made of a checkpoint, and is not opened;
  - whose pages these are, and how they were cut, never changes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cbor2

from lowwater.engine.log.chain import Creation
from lowwater.engine.log.log import Log
from lowwater.engine.pages.pagestore import PageStore
from lowwater.engine.state.due import Due, as_stored, from_stored
from lowwater.engine.state.keeping import Keeping
from lowwater.errors import Corrupt, InputError, NewerVersion, OlderVersion, PagesDamaged

META_KEY = b"state"
META_VERSION = 4
# In the meta of a store that is being made from a checkpoint (`install.py`), until it is whole.
INSTALLING_KEY = b"installing"
# Pages are a cache: no code is kept that reads what an older one wrote.
AGAIN_HINT = (
    "open them with the Lowwater that wrote them. Where the log is whole from its first entry on, this one "
    "makes pages from it: copy the directory, and in the copy move the pages aside and open it"
)


class Meta(NamedTuple):
    """What the page store says about itself."""

    cluster_id: bytes
    salt: bytes
    page_keys: int
    inline_bytes_max: int
    redo_seq: int
    applied: int
    horizon: int | None
    snapshots: dict[str, int]
    low_water_mark: int
    keeping: dict[str, Any]
    changed_seq: int
    checkpoint_seq: int
    ships_seq: int
    checkpoints_due: list[Due]
    pages_from: int


def decode_meta(stored: dict[bytes, bytes], path: str) -> Meta | None:
    """None for a store that nothing was written to."""
    data = stored.get(META_KEY)
    if data is None:
        if INSTALLING_KEY in stored:
            raise Corrupt(
                "these pages were being made from a checkpoint, and that did not end",
                path=path,
                hint="restore again: it goes on where it was",
            )
        if stored:
            raise Corrupt("the page store has no state", path=path)
        return None
    try:
        found: Any = cbor2.loads(data)
        if found["version"] > META_VERSION:
            raise NewerVersion("these pages were written by a newer Lowwater", path=path)
        if found["version"] < META_VERSION:
            raise OlderVersion("these pages were written by an older Lowwater", path=path, hint=AGAIN_HINT)
        meta = Meta(**{name: found[name] for name in Meta._fields})
        return meta._replace(checkpoints_due=from_stored(found["checkpoints_due"]))
    except InputError:
        raise
    except Exception as error:  # cbor2 raises whatever its decoding of hostile bytes runs into
        raise Corrupt("the page store's state cannot be read", path=path) from error


def encode_meta(meta: Meta) -> bytes:
    """What `decode_meta` reads."""
    data: bytes = cbor2.dumps(
        {
            **meta._asdict(),
            "version": META_VERSION,
            "checkpoints_due": as_stored(meta.checkpoints_due),
        },
        canonical=True,
    )
    return data


def meta_of(log: Log, store: PageStore) -> Meta | None:
    """What the pages say of themselves, or the log's first entry. None where
    there are no pages and the log is empty."""
    meta = decode_meta(store.read_meta(), store.path)
    if meta is None:
        if log.chain.is_empty:
            return None
        if log.creation is None:
            raise PagesDamaged("there are no pages, and the log's beginning is not here", path=store.path)
        return new_meta(log.creation)
    if meta.cluster_id != log.cluster_id_at(meta.applied):
        raise Corrupt("the pages belong to another cluster than the log", path=log.directory)
    if log.seq_durable < meta.applied:
        raise Corrupt(
            f"the log ends at {log.seq_durable}, and the pages hold entries up to {meta.applied}",
            path=log.directory,
            seq=meta.applied,
        )
    if log.seq_before_first >= meta.redo_seq:
        raise Corrupt(
            f"the log begins at {log.seq_first}, and the pages need it from {meta.redo_seq} on",
            path=log.directory,
        )
    return meta


def new_meta(creation: Creation) -> Meta:
    """For what has no pages yet: all of it is in the log."""
    settings = creation.settings
    assert settings.page_keys is not None
    assert settings.inline_bytes_max is not None
    return Meta(
        cluster_id=creation.cluster_id,
        salt=creation.salt,
        page_keys=settings.page_keys,
        inline_bytes_max=settings.inline_bytes_max,
        redo_seq=1,
        applied=0,
        horizon=None,
        snapshots={},
        low_water_mark=0,
        keeping=Keeping().to_meta(),
        changed_seq=0,
        checkpoint_seq=0,
        ships_seq=0,
        checkpoints_due=[],
        pages_from=0,
    )
