"""A folder as a store: it passes the suite on real and on faulty files, and a power loss leaves it sound."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowwater.chaos.clock import SeededRandomness
from lowwater.chaos.disk import FaultyFiles
from lowwater.engine.memory import MemoryFiles
from lowwater.tiering.folder_store import FolderStore
from lowwater.tiering.memory_store import MemoryObjects, MemoryStore
from lowwater.tiering.testing.store import Place, StoreConformance


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def place(self) -> Place:
        objects = MemoryObjects()
        return lambda: MemoryStore(objects=objects)


class TestFolderStore(StoreConformance):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        return lambda: FolderStore(str(tmp_path / "store"))


class TestFolderOnFaultyFiles(StoreConformance):
    @pytest.fixture
    def place(self) -> Place:
        files = FaultyFiles()
        randomness = SeededRandomness(1)
        return lambda: FolderStore("/store", files=files, randomness=randomness)


class TestFolderInMemory(StoreConformance):
    @pytest.fixture
    def place(self) -> Place:
        files = MemoryFiles()
        randomness = SeededRandomness(1)
        return lambda: FolderStore("/store", files=files, randomness=randomness)
