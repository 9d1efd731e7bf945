"""Installing: a page store that is made of a checkpoint, without its blocks.

Always true:
  - under each block's key there is a reference to it, and the store can be read once all are there: nothing
    of the content was read but the blocks with the buckets' own records, which opening needs;
  - until then the store says that it is being made, and is not opened. Doing it again goes on with it;
  - what the log has from `redo_seq` on is applied on opening, above references, and fetches nothing.

A transaction that was open at the checkpoint's seq has its writes in the log, from its `begin` on, and none
in blocks. So pages claim to hold no frame from the first such `begin` on, and redo begins there. What it
repeats of others stands in blocks too: the same versions, of which one takes the place of the other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from operator import lt

from lowwater.engine.checkpoint.leaving import FIRST_KEY
from lowwater.engine.format.blocks import KnownColumns
from lowwater.engine.format.boundaries import Boundaries
from lowwater.engine.format.ckpt import Checkpoint
from lowwater.engine.format.page import encode_page
from lowwater.engine.format.references import decode_reference, encode_references
from lowwater.engine.pages.pagestore import PageStore
from lowwater.engine.state.away import BlockSource, read_away
from lowwater.engine.state.keeping import Keeping
from lowwater.engine.state.meta import INSTALLING_KEY, META_KEY, Meta, encode_meta
from lowwater.engine.state.sessions import rows_of_control
from lowwater.engine.state.state import LOWEST
from lowwater.engine.state.transaction_table import TABLE_KEY, TransactionRow, encode_table
from lowwater.errors import AlreadyExists, Corrupt

# So many references, or up to a list more, go in one transaction.
RUN_REFERENCES = 16384


def meta_of_checkpoint(
    checkpoint: Checkpoint, *, salt: bytes, page_keys: int, inline_bytes_max: int
) -> tuple[Meta, list[TransactionRow]]:
    """What a page store says of itself that holds what the checkpoint does, and the transactions that were
    open then. The three others are what the log's first entry says."""
    body = checkpoint.control_body
    try:
        keeping = {name: body[name] for name in Keeping().to_meta()}
        rows = [
            # Of its frames redo finds out the rest, but for what others have done to it.
            TransactionRow(txn, snapshot_seq, snapshot_seq, txn, doomed=doomed)
            for txn, snapshot_seq, _, doomed, _ in body.get("transactions", ())
        ]
        meta = Meta(
            cluster_id=checkpoint.cluster_id,
            salt=salt,
            page_keys=page_keys,
            inline_bytes_max=inline_bytes_max,
            redo_seq=min([checkpoint.seq + 1, *(row.txn for row in rows)]),
            applied=checkpoint.seq,
            horizon=body["horizon"],
            snapshots=dict(body["snapshots"]),
            low_water_mark=0,
            keeping=keeping,
            changed_seq=checkpoint.seq,
            checkpoint_seq=checkpoint.seq,
            ships_seq=0,
            checkpoints_due=[],
            pages_from=checkpoint.seq,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt("the control part of a checkpoint says too little", seq=checkpoint.seq) from error
    return meta, rows


def install_references(
    store: PageStore,
    checkpoint: Checkpoint,
    lists: Iterable[KnownColumns],
    source: BlockSource,
    *,
    salt: bytes,
    page_keys: int,
    inline_bytes_max: int,
    rows: Mapping[bytes, bytes] = {},
) -> int:
    """Make the pages of an empty store references to the blocks of a checkpoint: all of them, in order, as
    `StoredCheckpoint.columns` has them. `source` is where blocks are read. `rows` go into the store's meta
    with the rest. Returns how many references there are. When it did not return, call it again."""
    _require_room(store, checkpoint)
    meta, transactions = meta_of_checkpoint(
        checkpoint, salt=salt, page_keys=page_keys, inline_bytes_max=inline_bytes_max
    )
    sessions = rows_of_control(checkpoint.control_body.get("sessions", ()))
    boundaries = Boundaries(salt, page_keys)
    page_seq = meta.redo_seq - 1
    mark: dict[bytes, bytes | None] = {INSTALLING_KEY: _mark_of(checkpoint)}
    store.write([], [], mark)
    puts: list[tuple[bytes, bytes]] = []
    count = 0
    key_before = b""
    for part in lists:
        if len(puts) >= RUN_REFERENCES:
            store.write(puts, [], mark)
            puts = []
        keys = part[0][0]
        if not keys or not all(map(lt, [key_before, *keys], keys)):
            raise Corrupt("the blocks of a checkpoint are out of order", seq=checkpoint.seq)
        key_before = keys[-1]
        references = encode_references(part, page_seq, checkpoint.seq)
        own = bisect_left(keys, FIRST_KEY)
        for key, reference in zip(keys[:own], references, strict=False):
            page = read_away(source, decode_reference(reference, key), key)
            key = key if boundaries.is_boundary(key) else LOWEST
            puts.append((key, encode_page(page, key)))
        puts += zip(keys[own:], references[own:], strict=True)
        count += len(keys) - own
    table = encode_table({row.txn: row for row in transactions}, set(), meta.redo_seq)
    store.write(
        puts,
        [],
        {**rows, **sessions, META_KEY: encode_meta(meta), TABLE_KEY: table, INSTALLING_KEY: None},
    )
    return count


def _mark_of(checkpoint: Checkpoint) -> bytes:
    return b"%d %s" % (checkpoint.seq, checkpoint.root.hex().encode())


def _require_room(store: PageStore, checkpoint: Checkpoint) -> None:
    """Raise AlreadyExists unless the store is empty, or has the beginning of this very installation."""
    stored = store.read_meta()
    is_empty = not stored and next(store.page_keys(), None) is None
    if not is_empty and stored != {INSTALLING_KEY: _mark_of(checkpoint)}:
        raise AlreadyExists(
            "there are pages already", path=store.path, hint="install into a directory of its own"
        )
