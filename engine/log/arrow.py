"""Segments as Arrow record batches, for who has installed the extra `arrow`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from lowwater.engine.log.compress import open_segment_file
from lowwater.engine.log.directory import local_path, typed_errors
from lowwater.engine.seams.seams import Files
from lowwater.extras import require_extra

if TYPE_CHECKING:
    import pyarrow


def read_segment(
    path: str | os.PathLike[str], *, columns: Sequence[str] | None = None, files: Files | None = None
) -> Iterator[pyarrow.RecordBatch]:
    """Return the entries of a segment file, a row each, in batches of about 8 MiB of frames. The segment may
    be sealed or still written, compressed or not. All bytes are verified before they are a row. The call
    raises what is wrong with `path` or `columns`; damage is raised when it is reached."""
    require_extra("lowwater.read_segment", "arrow")
    batches = _batches(local_path(path), columns, files)
    return chain([next(batches)], batches)


def _batches(path: str, columns: Sequence[str] | None, files: Files | None) -> Iterator[pyarrow.RecordBatch]:
    from lowwater.engine.log.columns import read_batches
    from lowwater.engine.seams.real import RealFiles

    with typed_errors(path, "read the segment"):
        file = open_segment_file(files or RealFiles(), path)
        try:
            yield from read_batches(file, columns=columns)
        finally:
            file.close()
