"""What the extras of the package bring."""

from __future__ import annotations

from importlib.util import find_spec

from lowwater.errors import InvalidConfig

PACKAGES = {"arrow": ("pyarrow", "numpy"), "spark": ("pyspark", "pyarrow", "numpy")}


def require_extra(what: str, extra: str) -> None:
    """Raise InvalidConfig where `what` lacks a package that only the extra brings."""
    for package in PACKAGES[extra]:
        if find_spec(package) is None:
            raise InvalidConfig(
                f"{what} needs {package}, which is not installed", hint=f"pip install 'lowwater[{extra}]'"
            )
