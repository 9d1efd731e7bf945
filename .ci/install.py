#!/usr/bin/env python3
"""Gives .venv what one of the lists of pyproject.toml names, and says every few seconds how far it is.

pip's own bars are silent without a terminal, and everywhere for as long as it unpacks and compiles.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

VENV = Path(__file__).resolve().parents[1] / ".venv"
EVERY_S = 3

# What is large in each, in megabytes as fetched, and how many of them are on the disk in the end.
LARGE = {
    "demo": ("PySpark 455, pyarrow 55, a JRE 34, rclone 29, opendal 19, numpy 17, the rest 15", 1070),
    "dev": ("atheris 40, matplotlib and what it needs 25, mypy 15, boto3 15, moto 6, the rest 30", 1640),
    "bench": ("rocksdict 20, slatedb 15, the rest 10", 1710),
}
# The package is there for interpreters that start after it was installed.
READY = """
from lowwater.engine.format.fast import IS_COMPILED
slow = "not compiled: there is no C compiler here, or no headers of Python, so writes are slower"
print(".venv: ready,", "compiled" if IS_COMPILED else slow)
"""


def main(name: str) -> int:
    large, total = LARGE[name]
    print(f".venv: fetching what pip's cache lacks, in MB: {large}", flush=True)
    # The package itself is there after the first list, and need not be built again for the others.
    wanted = ["--editable", ".[demo]"] if name == "demo" else [f"lowwater[{name}]"]
    code = install(wanted, total)
    if name == "dev" and not code:
        code = install(
            ["--upgrade", "--target", str(VENV / "connect"), "-r", "tests/spark/connect.txt"], total
        )
    return code or subprocess.run([sys.executable, "-c", READY], check=False).returncode


def install(wanted: list[str], total: int) -> int:
    # What is fetched lies where its size is seen, and on a disk that has to have room for it anyway.
    fetched = VENV / "fetched"
    shutil.rmtree(fetched, ignore_errors=True)
    fetched.mkdir()
    began_s = time.monotonic()
    pip = subprocess.Popen(
        [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted],
        cwd=VENV.parent,
        # A user's own settings have pip install elsewhere.
        env={**os.environ, "TMPDIR": str(fetched), "PIP_USER": "0"},
    )
    while True:
        try:
            return pip.wait(EVERY_S)
        except subprocess.TimeoutExpired:
            seconds = time.monotonic() - began_s
            print(
                f".venv: {seconds:.0f} s, {megabytes(fetched)} MB fetched and built so far, "
                f"{megabytes(VENV, leave_out=fetched)} MB of about {total} installed",
                flush=True,
            )
        except BaseException:
            pip.kill()
            pip.wait()
            raise


def megabytes(folder: Path, leave_out: Path | None = None) -> int:
    """A file that goes while it is looked at counts nothing."""
    total = 0
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if Path(where, name) != leave_out]
        for name in names:
            try:
                total += os.lstat(os.path.join(where, name)).st_size
            except FileNotFoundError:
                pass
    return total // 1_000_000


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
