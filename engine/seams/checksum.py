"""CRC-32 as zlib computes it. For frames of a hundred bytes ISA-L takes a quarter of zlib's time."""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32
except ImportError:  # there is no wheel for this platform
    from zlib import crc32

__all__ = ["crc32"]
