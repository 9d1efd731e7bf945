"""Who orders the entries of a log: the engine that has it open, or somebody else's orchestrator.

Always true:
  - a log that holds entries is opened by the kind that began it: an embedded database that appended to a log
    which is fed would give seqs to entries that no other replica has;
  - the mark is a file of this directory. It is in no shared byte, and a copy may come without it: then
    whoever opens the log first puts its own there. It is durable before the first entry that is fed.
"""

from __future__ import annotations

from typing import Literal

from lowwater.engine.log.directory import OWNER, OWNER_TEMPORARY, read_names, typed_errors
from lowwater.engine.seams.seams import Files, write_all
from lowwater.errors import Corrupt, InputError

Owner = Literal["embedded", "fed"]

_TEXTS: dict[Owner, bytes] = {
    "embedded": b"embedded: lowwater.open orders the entries of this log\n",
    "fed": b"fed: an orchestrator orders the entries of this log, lowwater.Engine takes them\n",
}
_HINTS: dict[Owner, str] = {
    "embedded": "open it with lowwater.open, or give the engine a directory of its own",
    "fed": "open it with lowwater.Engine. If no orchestrator will feed it again, a copy of the "
    "directory without {} can be taken over",
}
_BYTES_MAX = 4096


def read_owner(files: Files, directory: str) -> Owner | None:
    """Who orders the entries of the log in a directory; None where nothing says so."""
    try:
        file = files.open(f"{directory}/{OWNER}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        data = file.read_at(0, _BYTES_MAX)
    finally:
        file.close()
    for owner, text in _TEXTS.items():
        if data == text:
            return owner
    raise Corrupt(
        "this file does not say who orders the entries of the log",
        path=f"{directory}/{OWNER}",
        hint="copy the directory without this file, and open the copy with what it was opened with before",
    )


def require_owner(files: Files, directory: str, wanted: Owner) -> None:
    """Raises InputError where the log has entries, and they are ordered by somebody else. To be asked before
    the log is opened, which may append to it."""
    with typed_errors(directory, "look who orders the entries of the log"):
        found = read_owner(files, directory)
        if found in (None, wanted) or not _has_entries(files, directory):
            return
    assert found is not None
    who = "an orchestrator feeds this log" if found == "fed" else "this log belongs to an embedded database"
    raise InputError(who, path=directory, hint=_HINTS[found].format(f"{directory}/{OWNER}"))


def _has_entries(files: Files, directory: str) -> bool:
    names = read_names(files, directory)
    return names.has_current or bool(names.numbered)


def claim(files: Files, directory: str, owner: Owner) -> None:
    """With the log's lock: note who orders its entries, durably, where that is not noted."""
    with typed_errors(directory, "note who orders the entries of the log"):
        if read_owner(files, directory) == owner:
            return
        temporary = f"{directory}/{OWNER_TEMPORARY}"
        if OWNER_TEMPORARY in files.list(directory):
            files.remove(temporary)
        file = files.open(temporary, create=True)
        try:
            write_all(file, 0, [_TEXTS[owner]])
            file.sync("fsync")
        finally:
            file.close()
        files.rename(temporary, f"{directory}/{OWNER}")
        files.sync_directory(directory)
