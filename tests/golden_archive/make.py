"""Write the golden archive: one small object of every type, by the code as it is now.

    python tests/golden_archive/make.py

A change of any byte is a change of the format: it needs a new version, and readers of the old one.
"""

from __future__ import annotations

import json
import os
import shutil
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [f"{HERE}/../.."]

from tests.engine.engine_model import CLUSTER_ID  # noqa: E402
from tests.tiering.lines import Line  # noqa: E402

from lowwater.engine.checkpoint.checkpoints import read_file  # noqa: E402
from lowwater.engine.log.compress import compress_segment  # noqa: E402
from lowwater.engine.seams.memory import MemoryFiles  # noqa: E402
from lowwater.engine.state.catalogue import checkpoint_shipped_entry, describe_checkpoint  # noqa: E402
from lowwater.tiering import names  # noqa: E402
from lowwater.tiering.archive import Archive, open_archive  # noqa: E402
from lowwater.tiering.memory_store import MemoryObjects, MemoryStore  # noqa: E402


def made() -> MemoryObjects:
    """The archive of a small database with 70 segments, one of them compressed, and a checkpoint."""
    objects = MemoryObjects()
    line = Line(objects, "golden")
    line.machine.open()
    line.db.create_bucket("b")
    for number in range(66):
        line.db.put("b", f"{number:02}", b"v" * 40)
        line.db._log.seal()
    line.db.checkpoint()
    archive = open_archive(line.store, CLUSTER_ID, create=True)
    line.claim(archive)
    line.db.put("b", "last", b"v" * 600)
    line.db._log.seal()
    line.ship(archive)
    ship_checkpoint(line, archive)
    line.db.close()
    compress_first(objects)
    return objects


def ship_checkpoint(line: Line, archive: Archive) -> None:
    stored = line.db.checkpoints()[0]
    for pack in stored.index.packs:
        name = names.pack_object_name(pack)
        data = read_file(line.machine.files, f"{stored.packs_directory}/{name.rpartition('/')[2]}")
        line.store.write(name, [data], size=len(data))
    index = read_file(line.machine.files, stored.path)
    described = describe_checkpoint(index)
    line.store.write(names.checkpoint_name(described), [index], size=len(index))
    line.db.propose_control(checkpoint_shipped_entry(0, described))
    line.ship(archive)


def compress_first(objects: MemoryObjects) -> None:
    """As the archive may have it: the name stays, since it is that of the raw bytes."""
    name = next(MemoryStore(objects=objects).list(names.WAL)).name
    files = MemoryFiles()
    file = files.open("raw", write=True, create=True)
    file.write_at(0, [objects.data[name]])
    parts: list[bytes] = []
    compress_segment(file, parts.append)
    objects.data[name] = b"".join(parts)


KEPT = (names.CLUSTER, names.EPOCHS, names.CHUNKS, names.CHECKPOINTS, names.PACKS)


def main() -> None:
    shutil.rmtree(f"{HERE}/archive", ignore_errors=True)
    objects = made()
    archive = open_archive(MemoryStore(objects=objects))
    newest = archive.newest()
    assert newest is not None
    segments = [names.segment_name(each) for each in archive.catalogue_of(newest).segments]
    # Of what is all alike, the first and the last.
    kept = [name for name in objects.data if name.startswith(KEPT)]
    kept += [segments[0], segments[-1], newest.name]
    assert archive.states.seen is not None
    kept += [names.state_name(1), names.state_name(archive.states.seen.number)]
    for name in kept:
        path = f"{HERE}/archive/{name}"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(objects.data[name])
    expected = {
        "cluster_id": newest.cluster_id.hex(),
        "newest": newest.name,
        "hwm": newest.hwm,
        "segments": segments,
        "checkpoints": [names.checkpoint_name(each) for each in archive.catalogue_of(newest).checkpoints],
        "forks": [each.epoch for each in archive.catalogue_of(newest).forks],
    }
    with open(f"{HERE}/expected.json", "w") as out:
        json.dump(expected, out, indent=1)
        out.write("\n")


if __name__ == "__main__":
    main()
