"""Integrity of the pages of a database: what `Database.check()` adds to the log's own check.

Always true: checking changes nothing and goes on after a finding; memory depends on the largest page and the
largest value only. Pages may be flushed while it runs: a page that went away meanwhile is no finding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, pairwise

from blake3 import blake3

from lowwater.engine.format.boundaries import Boundaries
from lowwater.engine.format.keys import KEY_END, decode_key, page_key
from lowwater.engine.format.page import BUCKET, REFERENCE, TOMBSTONE, DataPage, decode_page
from lowwater.engine.format.records import VALUE_PLACE, PlaceReader
from lowwater.engine.format.references import Reference, decode_reference, is_reference
from lowwater.engine.log.check import Finding
from lowwater.engine.pages.pagestore import PageStore
from lowwater.engine.state.catalogue import Catalogue
from lowwater.engine.state.meta import Meta, decode_meta
from lowwater.engine.state.sessions import StoredSession, stored_sessions
from lowwater.engine.state.state import LOWEST
from lowwater.engine.state.transaction_table import (
    UNSTAMPED_PREFIX,
    TransactionTable,
    ids_in,
    load_table,
    unstamped_in,
)
from lowwater.errors import ArchivedOnly, Corrupt, LowwaterError, PagesDamaged


def check_pages(
    store: PageStore,
    path: str,
    *,
    boundaries: Boundaries,
    seq_durable: Callable[[], int],
    read_value: PlaceReader,
    read_away: Callable[[bytes, bytes], DataPage] | None = None,
) -> Iterator[Finding]:
    """Every finding about the pages of a store. Their log is durable up to `seq_durable`, which may rise.
    Pages that are away are read with `read_away`; without it, only their references are looked at."""
    if damage := store.damage():
        # What it has under which key cannot be said.
        yield from (_error(f"the file with all pages is damaged: {why}", path) for why in damage)
        return
    yield from check_state(store, path, seq_durable)
    yield from _check_first(store, path)
    known = TransactionTable()
    for key, following in pairwise(chain(store.page_keys(), [KEY_END])):
        try:
            data = store.get(key)
            if data is None:
                continue  # it went away meanwhile
            if is_reference(data):
                if why := _why_wrong(decode_reference(data, key), key, boundaries, seq_durable()):
                    yield _error(f"the reference of {_shown(key)}: {why}", path)
                if read_away is None:
                    continue
                page = read_away(key, data)
            else:
                page = decode_page(data, key)
            why = _why_misplaced(page, key, following, boundaries)
            if why and following != KEY_END and store.get(following) is None:
                why = ""  # what was there is in this page by now
            if why := why or _why_disordered(page):
                yield _error(f"the page of {_shown(key)}: {why}", path)
            why, known = _why_unknown(store, path, key, page, known)
            if why:
                yield _error(f"the page of {_shown(key)}: {why}", path)
            yield from _check_rows(page, path, read_value)
        except LowwaterError as error:
            yield _error(f"the page of {_shown(key)}: {error.message}", path)


def check_state(store: PageStore, path: str, seq_durable: Callable[[], int]) -> Iterator[Finding]:
    """What the store says about itself."""
    try:
        meta = decode_meta(store.read_meta(), path)
    except LowwaterError as error:
        yield Finding.of(error, path)
        return
    if meta is None:
        return
    for why in _why_out_of_order(meta, seq_durable()):
        yield _error(why, path)
    yield from _check_transactions(store, path, seq_durable())
    yield from _check_sessions(store, path, seq_durable)
    yield from _check_catalogue(store, path, seq_durable)


def _check_catalogue(store: PageStore, path: str, seq_durable: Callable[[], int]) -> Iterator[Finding]:
    """The stored catalogue: every record of it, and that none is ahead of the log."""
    catalogue = Catalogue()
    try:
        catalogue.load(store.read_meta())
        for why in catalogue.damage():
            yield _error(why, path)
        if catalogue.recorded_seq > seq_durable():
            yield _error("the catalogue has records of entries that the log has not", path)
    except LowwaterError as error:
        yield Finding.of(error, path)


def _check_sessions(store: PageStore, path: str, seq_durable: Callable[[], int]) -> Iterator[Finding]:
    """The stored sessions, each of which may be ahead of the pages, and none of the log."""
    try:
        for session_id, data in stored_sessions(store.read_meta()):
            session = StoredSession.decode(data)
            if not session_id <= session.seq <= seq_durable():
                yield _error(f"the session {session_id} is as of {session.seq}, which the log has not", path)
    except LowwaterError as error:
        yield Finding.of(error, path)


def _check_transactions(store: PageStore, path: str, seq_durable: int) -> Iterator[Finding]:
    """The table, and what it says about pages. Both are of one moment; pages may be of a later one."""
    stored = store.read_meta()
    meta = decode_meta(stored, path)
    assert meta is not None
    try:
        table = load_table(stored, path)
    except LowwaterError as error:
        yield Finding.of(error, path)
        return
    carried = table.in_pages
    for txn, row in table.rows.items():
        if not txn <= row.seq_last <= meta.applied <= seq_durable or not row.snapshot_seq < txn:
            yield _error("a transaction is known ahead of its entries", path, txn)
        if not row.is_open and row.end_seq < meta.redo_seq and txn not in carried:
            yield _error("a transaction has ended, and nothing needs it any more", path, txn)
    for key, ids in table.unstamped.items():
        page = _read(store, key)
        if page is not None and ids_in(page) == ids:
            continue
        name = UNSTAMPED_PREFIX + key
        if store.read_meta().get(name) == stored[name]:
            yield _error(f"the page of {_shown(key)} has not the transactions that it is said to have", path)


def _why_unknown(
    store: PageStore, path: str, key: bytes, page: DataPage, known: TransactionTable
) -> tuple[str, TransactionTable]:
    """Whether the rows of transactions in a page are of known ones, and the newest table. What was read may
    be old by now: then page and table are read again, as of one moment."""
    why = _why_unknown_to(known, key, page)
    while why:
        stored = store.read_meta()
        data = store.get(key)
        if store.read_meta() == stored:
            known = load_table(stored, path)
            is_here = data is not None and not is_reference(data)
            why = _why_unknown_to(known, key, decode_page(data, key)) if data is not None and is_here else ""
            break
    return why, known


def _why_unknown_to(table: TransactionTable, key: bytes, page: DataPage) -> str:
    ids = ids_in(page)
    if not ids <= set(table.rows):
        return "it has versions of a transaction that nobody knows"
    if table.unstamped.get(key, frozenset()) != ids:
        return "it is not known to have versions of transactions"
    if ids and not all(txn < seq for txn, seq in unstamped_in(page)):
        return "it has a version of a transaction that had not begun"
    return ""


def _why_out_of_order(meta: Meta, seq_durable: int) -> Iterator[str]:
    if not meta.redo_seq <= meta.applied + 1:
        yield f"redo begins at {meta.redo_seq}, and the pages hold nothing above {meta.applied}"
    if not meta.applied <= seq_durable:
        yield f"the pages hold entries up to {meta.applied}, and the log ends at {seq_durable}"
    if meta.pages_from > meta.applied:
        yield f"the pages are of a checkpoint of {meta.pages_from}, above the last entry {meta.applied}"
    if meta.horizon is not None and meta.horizon > meta.applied:
        yield f"the horizon is {meta.horizon}, above the last entry {meta.applied}"
    for name, seq in meta.snapshots.items():
        if seq > meta.applied:
            yield f"the snapshot {name!r} is of {seq}, above the last entry {meta.applied}"


def _check_first(store: PageStore, path: str) -> Iterator[Finding]:
    first = next(store.page_keys(), None)
    if first is not None and first < LOWEST:
        yield _error(f"a page lies under {_shown(first)}, below all keys", path)


def _read(store: PageStore, key: bytes) -> DataPage | None:
    data = store.get(key)
    return None if data is None or is_reference(data) else decode_page(data, key)


def _why_wrong(reference: Reference, key: bytes, boundaries: Boundaries, seq_durable: int) -> str:
    """Whether there can be a page like the one that a reference stands for."""
    if key != LOWEST and not boundaries.is_boundary(key):
        return "no page begins at this key"
    if not reference.page_seq <= seq_durable or not reference.checkpoint_seq <= seq_durable:
        return f"it is of {reference.checkpoint_seq}, and the log ends at {seq_durable}"
    if not reference.row_count:
        return "it stands for a page without rows"
    return ""


def _why_misplaced(page: DataPage, key: bytes, following: bytes, boundaries: Boundaries) -> str:
    """Whether the page begins where pages begin, and its keys lie between that and the next page."""
    if key != LOWEST and not boundaries.is_boundary(key):
        return "no page begins at this key"
    if not key <= page.keys[0] or not page.keys[-1] < following:
        return "it holds keys that belong to another page"
    for each in set(page.keys):
        if page_key(each) != key and boundaries.is_boundary(each):
            return f"a page of its own begins at {_shown(each)}, which lies in this one"
    return ""


def _why_disordered(page: DataPage) -> str:
    """Whether keys rise, and the seqs of one key's versions fall."""
    for (key, seq), (following, seq_following) in pairwise(zip(page.keys, page.seqs, strict=True)):
        if key > following:
            return f"the key {_shown(following)} is out of order"
        if key == following and seq <= seq_following:
            return f"the versions of {_shown(key)} are out of order"
    return ""


_ARCHIVED = "their segments were shipped and purged: scrub the archive, or check the database with its store"


def _check_rows(page: DataPage, path: str, read_value: PlaceReader) -> Iterator[Finding]:
    """Each row for itself."""
    archived = 0
    for index, key in enumerate(page.keys):
        seq, _, flags, _, value = page.row(index)
        try:
            bucket, _ = decode_key(key)
        except Corrupt as error:
            yield _error(f"{_shown(key)}: {error.message}", path, seq)
            continue
        if not flags & TOMBSTONE and bool(flags & BUCKET) == bool(bucket):
            yield _error(f"{_shown(key)}: data stand where buckets do, or the reverse", path, seq)
        if flags & REFERENCE:
            try:
                why = _why_unreadable(value, read_value)
            except ArchivedOnly:
                archived += 1
                continue
            except LowwaterError as error:
                why = error.message
            if why:
                yield _error(f"the large value of {_shown(key)}: {why}", path, seq)
    if archived:
        what = f"{archived:,} large values are in the object store only, and were not read"
        yield Finding("note", f"{_shown(page.keys[0])} and after it: {what}", path, None, None, _ARCHIVED)


def _why_unreadable(place: bytes, read_value: PlaceReader) -> str:
    if len(place) != VALUE_PLACE.size:
        return "its reference has another size"
    _, _, length, value_hash = VALUE_PLACE.unpack(place)
    value = read_value(place)
    if len(value) != length or blake3(value).digest() != value_hash:
        return "what lies in its place is another value"
    return ""


def _error(what: str, path: str, seq: int | None = None) -> Finding:
    return Finding("error", what, path, seq, None, PagesDamaged.default_hint)


def _shown(key: bytes) -> str:
    """An encoded key as people know it."""
    try:
        bucket, name = decode_key(key)
    except Corrupt:
        return repr(key[:40])
    return f"{name.decode(errors='replace')!r:.80} in {bucket.decode(errors='replace')!r:.80}"
