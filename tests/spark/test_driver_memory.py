"""What the driver of a build holds: a table of what describes blocks, and little that grows with it."""

from __future__ import annotations

import tracemalloc
from functools import partial

import pyarrow as pa
import pytest
from blake3 import blake3

from lowwater.engine.checkpoint import packing
from lowwater.engine.checkpoint.packing import Packing
from lowwater.spark.building import _Layout, _write_to, packed
from lowwater.spark.cutting import BLOCK_TYPES, described_in
from lowwater.spark.entry_columns import as_arrow

TYPES = {name: kind for name, kind in BLOCK_TYPES.items() if name not in ("is_block", "data")}
BLOCK_BYTES = 4000


def described(blocks: int) -> pa.Table:
    rows = [
        {
            "key": b"%040d" % number,
            "block_hash": blake3(b"%d" % number).digest(),
            "row_count": 64,
            "block_bytes": BLOCK_BYTES,
            "places_hash": None,
            "places_bytes": 0,
        }
        for number in range(blocks)
    ]
    return pa.Table.from_pylist(rows, as_arrow(TYPES))


def laid_out(table: pa.Table) -> tuple[_Layout, int]:
    """The packs of these blocks, and how many bytes of Python's were needed at once."""
    layout = _Layout()
    tracemalloc.start()
    packed(Packing(partial(_write_to, layout), None, lambda key: key.endswith(b"99")), table)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return layout, peak


def test_the_driver_of_a_build_has_few_blocks_as_objects_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thousand million keys there are 16 million blocks: as objects they took 700 bytes each. (A pack of
    lists is always there; here it is smaller.)"""
    monkeypatch.setattr(packing, "PACK_BYTES", 2**18)
    few, many = described(8_000), described(24_000)
    layout, peak = laid_out(few)
    assert layout.placed().column("key") == few.column("key")
    assert layout.placed().nbytes + few.nbytes < 170 * len(few)
    assert sum(layout.sizes) > BLOCK_BYTES * len(few)
    grown = laid_out(many)[1] - peak
    assert grown < 40 * (len(many) - len(few)), "of each hundred the entry of their list"


def test_a_block_without_places_has_the_hash_of_none() -> None:
    """It is not sent, and the index is the same."""
    (batch,) = described(2).to_batches()
    for _, each in described_in(batch):
        assert each.places_hash == bytes(32)
        assert each.size_bytes == BLOCK_BYTES
