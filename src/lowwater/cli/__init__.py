"""The `lowwater` command. `root.py` is its first level; each command below it has a file of its name."""

from __future__ import annotations

import sys


def main() -> None:
    """Start the command line, or say why it cannot start."""
    if not __debug__:
        refuse(
            "lowwater does not run under python -O", "unset PYTHONOPTIMIZE: its checks are assert statements"
        )
    try:
        from lowwater.cli.root import root
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        refuse(
            f"the lowwater command needs {error.name}, which is not installed", "pip install 'lowwater[cli]'"
        )
    else:
        root(prog_name="lowwater")


def refuse(message: str, hint: str) -> None:
    sys.stderr.write(f"error: {message}\nhint: {hint}\n")
    sys.exit(2)
