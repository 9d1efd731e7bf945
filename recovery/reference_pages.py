"""The pages of a checkpoint of an archive, as references: what a restore begins with, and what lost pages
come back from."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lowwater.engine.checkpoint.install import install_references
from lowwater.engine.format.blocks import KnownColumns
from lowwater.engine.pages.pagestore import PageStore
from lowwater.engine.state.catalogue import CheckpointDescriptor
from lowwater.errors import Corrupt
from lowwater.recovery.point import Reached, catalogue_as_of, creation_in
from lowwater.tiering.fetcher import Fetcher
from lowwater.tiering.remote_checkpoint import RemoteCheckpoint
from lowwater.tiering.shipped_blocks import ArchivedBlocks


def install_checkpoint(
    pages: PageStore,
    reached: Reached,
    fetcher: Fetcher,
    checkpoint: CheckpointDescriptor,
    passing: Callable[[int, int], None],
) -> int:
    """Make a page store, which is empty or was begun by this, of references to the checkpoint's blocks: how
    many there are. `passing` is told how many were read, of how many."""
    remote = RemoteCheckpoint(fetcher, checkpoint)
    catalogue = catalogue_as_of(reached.recorded, checkpoint.seq)
    if catalogue and remote.index.control_body.get("catalogue") != catalogue.body():
        raise Corrupt(
            "the checkpoint and the manifest do not agree on what was shipped by then",
            path=remote.path,
            seq=checkpoint.seq,
        )
    creation = creation_in(reached, fetcher)
    settings = creation.settings
    assert settings.page_keys is not None
    assert settings.inline_bytes_max is not None
    total = remote.index.block_count

    def counted() -> Iterator[KnownColumns]:
        done = 0
        for part in remote.columns():
            done += len(part[0][0])
            passing(done, total)
            yield part

    return install_references(
        pages,
        remote.index,
        counted(),
        ArchivedBlocks(fetcher),
        salt=creation.salt,
        page_keys=settings.page_keys,
        inline_bytes_max=settings.inline_bytes_max,
        rows=catalogue.freeze(),
    )
