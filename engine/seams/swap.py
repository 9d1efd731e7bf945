"""One page directory takes the place of another, whatever crashes.

Always true: at every moment the pages are, under their own name or under that of the copy, a whole and
durable store; the copy gets its name only once it is that. Whoever opens a store for writing calls
`finish_swap` first, which goes on from any crash:

| | `pages` | `pages.compact` | decision | the crash that leaves it |
|---|---|---|---|---|
| A | there | none | nothing | none, or one while the copy was made, as `pages.compacting` |
| B | there | there | drop the copy: `pages` may be written from now on | before the swap |
| C | none | there | the copy gets the name | between the two renames |
| D | none | none | nothing: there is no store | none |

Where a copy is being made, and what it replaced, is nobody's, and goes.
"""

from __future__ import annotations

import os
from itertools import count

from lowwater.engine.seams.seams import Files

# What LMDB makes in a directory.
DATA = "data.mdb"
LOCK = "lock.mdb"

COMPACT = ".compact"
COMPACTING = ".compacting"
REPLACED = ".replaced"
DAMAGED = ".damaged"


def finish_swap(files: Files, path: str) -> None:
    """Nobody else may have the store open for writing."""
    if os.path.isdir(path):
        drop(files, path + COMPACT)
    elif os.path.exists(f"{path}{COMPACT}/{DATA}"):
        files.rename(path + COMPACT, path)
        files.sync_directory(os.path.dirname(path))
    drop(files, path + COMPACTING)
    drop(files, path + REPLACED)


def swap(files: Files, path: str) -> None:
    """Replace `pages` with the copy in `pages.compacting`, which is whole and durable."""
    parent = os.path.dirname(path)
    files.rename(path + COMPACTING, path + COMPACT)
    files.sync_directory(parent)
    files.rename(path, path + REPLACED)
    files.rename(path + COMPACT, path)
    files.sync_directory(parent)
    drop(files, path + REPLACED)


def set_aside(files: Files, path: str) -> str:
    """Give the pages that are damaged another name, which nobody uses: which one."""
    parent, _, name = os.path.realpath(path).rpartition("/")
    taken = files.list(parent)
    kept = next(each for number in count(1) if (each := f"{name}{DAMAGED}-{number}") not in taken)
    files.rename(f"{parent}/{name}", f"{parent}/{kept}")
    files.sync_directory(parent)
    return f"{parent}/{kept}"


def drop(files: Files, path: str) -> None:
    """The data first: without it, it is no copy."""
    if not os.path.isdir(path):
        return
    for name in (DATA, LOCK):
        if os.path.exists(f"{path}/{name}"):
            files.remove(f"{path}/{name}")
    try:
        os.rmdir(path)
    except OSError:
        pass  # somebody keeps something there
