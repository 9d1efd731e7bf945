"""Integrity of the checkpoints of a data directory: what `Database.check()` adds to log and pages.

Always true: checking changes nothing and goes on after a finding; memory depends on the largest pack only. A
checkpoint may be made, and others removed, while it runs: what went away meanwhile is no finding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lowwater.engine.checkpoint.checkpoints import PACKS_DIRECTORY, Checkpoints, StoredCheckpoint, read_file
from lowwater.engine.checkpoint.content import IsBoundary
from lowwater.engine.format.blocks import Listed, hash_of, require
from lowwater.engine.format.ckpt import PACK_HEADER, PACK_MAGIC, pack_name
from lowwater.engine.format.keys import PAGE_KEY_BYTES, encode_key, page_key
from lowwater.engine.log.check import Finding
from lowwater.engine.log.directory import typed_errors
from lowwater.engine.seams.seams import Files
from lowwater.errors import LowwaterError

_HINT = "make another checkpoint: nothing else rests on this one"


def check_checkpoints(
    files: Files,
    directory: str,
    *,
    cluster_id_at: Callable[[int], bytes],
    begins_block: IsBoundary,
    begins_list: IsBoundary,
) -> Iterator[Finding]:
    """Every finding about the checkpoints in a data directory."""
    packs_seen: set[bytes] = set()
    for stored in Checkpoints(files, directory).complete:
        found = []
        try:
            index = stored.index
            if index.cluster_id != cluster_id_at(stored.seq):
                found.append(
                    _error("a checkpoint belongs to another cluster than the log", stored.path, stored.seq)
                )
            for pack, size in index.packs.items():
                if pack not in packs_seen:
                    packs_seen.add(pack)
                    path = f"{directory}/{PACKS_DIRECTORY}/{pack_name(pack)}"
                    found += _check_pack(files, path, pack, size)
            found += _check_blocks(stored, begins_block, begins_list)
        except LowwaterError as error:
            found.append(Finding.of(error, stored.path))
        if found and _is_there(files, stored):
            yield from found


def _is_there(files: Files, stored: StoredCheckpoint) -> bool:
    directory, _, name = stored.path.rpartition("/")
    return name in files.list(directory)


def _check_pack(files: Files, path: str, pack_hash: bytes, size: int) -> Iterator[Finding]:
    try:
        with typed_errors(path, "read a pack"):
            data = read_file(files, path)
            require(data, PACK_MAGIC, "pack", PACK_HEADER.size)
    except LowwaterError as error:
        yield Finding.of(error, path)
        return
    if len(data) != size or hash_of(data) != pack_hash:
        yield _error("a pack is not what its name says", path)


def _check_blocks(
    stored: StoredCheckpoint, begins_block: IsBoundary, begins_list: IsBoundary
) -> Iterator[Finding]:
    """Each block, that it begins where blocks begin, and that all of them are in order."""
    rows = blocks = 0
    last_key = b""
    for entry in stored.index.lists:
        for number, known in enumerate(stored.blocks_of(entry)):
            listed = known.listed
            if not number and (listed.key != entry.key or (blocks and not begins_list(listed.key))):
                yield _error("a list of blocks begins where none begins", stored.path, stored.seq)
            if number and begins_list(listed.key):
                yield _error("a list of blocks goes on where one begins", stored.path, stored.seq)
            keys = [encode_key(row.bucket.encode(), row.key.encode()) for row in stored.rows_of(known)]
            why = why_misplaced(listed, keys, last_key, begins_block, is_first=not blocks)
            if why:
                yield _error(f"a block of a checkpoint {why}", stored.path, stored.seq)
            rows, blocks, last_key = rows + len(keys), blocks + 1, keys[-1]
    if (rows, blocks) != (stored.index.row_count, stored.index.block_count):
        yield _error("a checkpoint holds other counts than it says", stored.path, stored.seq)


def why_misplaced(
    listed: Listed, keys: list[bytes], last_key: bytes, begins_block: IsBoundary, *, is_first: bool
) -> str:
    if listed.row_count != len(keys) or listed.key != page_key(keys[0]):
        return "is not what its list says"
    if not last_key < keys[0]:
        return "is out of order"
    if not is_first and (not begins_block(keys[0]) or _begins_alike(keys[0], last_key)):
        return "begins where none begins"
    before = keys[0]
    for key in keys[1:]:
        if begins_block(key) and not _begins_alike(key, before):
            return "goes on where one begins"
        before = key
    return ""


def _begins_alike(key: bytes, before: bytes) -> bool:
    return key[:PAGE_KEY_BYTES] == before[:PAGE_KEY_BYTES]


def _error(what: str, path: str, seq: int | None = None) -> Finding:
    return Finding("error", what, path, seq, None, _HINT)
