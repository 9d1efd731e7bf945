"""What the figures were measured on, and how often the disk was really told to flush."""

from __future__ import annotations

import hashlib
import os
import platform
import sqlite3
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("lowwater", "rocksdict", "lmdb", "slatedb", "numpy", "pyarrow", "blake3", "pyspark")


def filesystem_of(directory: Path) -> str:
    """The type of the file system under a directory: `ext4`, `tmpfs` … or `unknown`."""
    wanted = _device_of(directory)
    for line in _text(Path("/proc/self/mountinfo")).splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0]
    return "unknown"


def disk_of(directory: Path) -> Path | None:
    """The folder under /sys of the whole disk that holds a directory: only whole disks count flushes."""
    disk = Path("/sys/dev/block", _device_of(directory)).resolve()
    if (disk / "partition").exists():
        disk = disk.parent
    return disk if (disk / "stat").exists() else None


def flushes(disk: Path | None) -> int | None:
    """How many times the disk was told to empty its write cache, since it was attached.

    A peer that answers "durable" without a flush shows here. The count is the whole machine's."""
    fields = _text(disk / "stat").split() if disk is not None else []
    return int(fields[15]) if len(fields) > 15 else None


def describe(directory: Path) -> dict[str, object]:
    disk = disk_of(directory)
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "switch_interval_s": sys.getswitchinterval(),
        "filesystem": filesystem_of(directory),
        "disk": disk.name if disk else "unknown",
        "disk_write_cache": _text(disk / "queue/write_cache").strip() if disk else "unknown",
        "load_1_minute": os.getloadavg()[0],
        "versions": _versions(),
        "source_hash": source_hash(),
    }


def source_hash() -> str:
    """Which Lowwater is measured: a hash over its source files, or why there is none."""
    found = find_spec("lowwater")
    if found is None or not found.submodule_search_locations:
        return "not installed"
    root = Path(found.submodule_search_locations[0])
    digest = hashlib.sha256()
    for path in sorted(
        Path(folder, name) for folder, _, names in os.walk(root, followlinks=True) for name in names
    ):
        if path.suffix == ".py":
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _versions() -> dict[str, str]:
    found = {"sqlite": sqlite3.sqlite_version}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _cpu_model() -> str:
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _device_of(directory: Path) -> str:
    device = directory.stat().st_dev
    return f"{os.major(device)}:{os.minor(device)}"


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
