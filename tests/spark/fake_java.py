"""Something that says it is a Java."""

from __future__ import annotations

from pathlib import Path


def fake_java(folder: Path, version: str) -> Path:
    folder.mkdir(parents=True)
    path = folder / "java"
    path.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2019-01-15' >&2\n")
    path.chmod(0o755)
    return path
