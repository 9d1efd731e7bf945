"""Replay of shipped segments in Spark.

    spark = lowwater.spark.session(master="local[*]")

Nothing is loaded before it is asked for: `import lowwater` needs no pyspark. A module may not have the name
of something that is public: once imported it would stand in its place.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lowwater.extras import require_extra

if TYPE_CHECKING:
    from lowwater.spark.audit import verify
    from lowwater.spark.building import build_checkpoint, root_as_of
    from lowwater.spark.counting import count
    from lowwater.spark.export import export_parquet, read_exported
    from lowwater.spark.exported import exported_files
    from lowwater.spark.frames import changes, log_frame, state_as_of, versions
    from lowwater.spark.start import session

# By name, the module that has it.
_PUBLIC = {
    "build_checkpoint": "building",
    "changes": "frames",
    "count": "counting",
    "export_parquet": "export",
    "exported_files": "exported",
    "log_frame": "frames",
    "read_exported": "export",
    "root_as_of": "building",
    "session": "start",
    "state_as_of": "frames",
    "verify": "audit",
    "versions": "frames",
}

__all__ = [
    "build_checkpoint",
    "changes",
    "count",
    "export_parquet",
    "exported_files",
    "log_frame",
    "read_exported",
    "root_as_of",
    "session",
    "state_as_of",
    "verify",
    "versions",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_extra("lowwater.spark", "spark")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
