"""engine/log/chain.py: whose log it is, how it is cut, and what of that a reopened log still knows."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lowwater.engine.format import format
from lowwater.engine.format.entries import Control, Put
from lowwater.engine.format.format import HEADER_BYTES, Kind, SegmentHeader
from lowwater.engine.log.chain import Creation, LogSettings, create_entry, settings_entry
from lowwater.engine.log.check import check_directory
from lowwater.engine.log.describe import describe_log
from lowwater.engine.log.log import Log, Seams
from lowwater.engine.seams.memory import MemoryFiles
from lowwater.errors import Corrupt, InvalidEntry, NewerVersion


def _load_make() -> ModuleType:
    path = Path(__file__).parent.parent / "golden" / "make.py"
    spec = importlib.util.spec_from_file_location("golden_make", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = _load_make()
SETTINGS = {"segment_bytes": 4096, "page_keys": 128, "inline_bytes_max": 0}
CREATE = create_entry(make.CLUSTER_ID, make.SALT, SETTINGS)
CREATED = Creation(make.CLUSTER_ID, make.SALT, LogSettings(4096, page_keys=128, inline_bytes_max=0))


def sealed_log(last: dict[str, Any], **header: Any) -> MemoryFiles:
    """A log of one sealed segment with this last entry and header. Every checksum and hash in it is right."""
    ((name, data),) = make.write_log(make.minimal()).items()
    specs = [*make.minimal()[:2], last]
    frames = [make.reframe(spec["seq"], make.encode(spec)) for spec in specs]
    head = SegmentHeader.decode(data)._replace(**header).encode()
    files = MemoryFiles()
    files.make_directory("log")
    file = files.open(f"log/{name}", create=True)
    file.write_at(0, [make.reseal(head + data[HEADER_BYTES:], frames)])
    return files


@pytest.mark.parametrize(
    "body",
    [
        {"segment_bytes": 1},
        {"block_bytes": "many"},
        {"compression": -1},
        {"compression": True},
        {"page_keys": 64},
        [],
    ],
    ids=str,
)
def test_a_bad_settings_entry_at_the_end_of_a_sealed_segment_is_corrupt(body: Any) -> None:
    """It is damage of what is stored, and not of what the caller asked for."""
    files = sealed_log(make.entry(3, "settings", value=make.cbor2.dumps(body)))
    with pytest.raises(Corrupt) as caught:
        Log.open("log", seams=Seams(files=files))
    assert caught.value.hint == Corrupt.default_hint
    assert caught.value.path is not None
    assert caught.value.seq == 3
    assert list(check_directory(files, "log"))


@pytest.mark.parametrize("body", [{"compression": 2}, {"compression": 255}, {"colour": 1}], ids=str)
def test_a_setting_that_is_not_known_is_newer(body: dict[str, int]) -> None:
    """Wherever it stands: an upgrade would help."""
    files = sealed_log(make.entry(3, "settings", body=body))
    with pytest.raises(NewerVersion):
        Log.open("log", seams=Seams(files=files))
    assert "upgrade" in next(check_directory(files, "log")).hint
    with Log.open(None) as log, pytest.raises(NewerVersion):
        log.append(Control(Kind.SETTINGS, body))


@pytest.mark.parametrize("header", [{"cluster_id": bytes(16)}, {"epoch": 2}, {"block_bytes": 1024}], ids=str)
def test_the_last_sealed_segment_must_begin_as_its_header_says(header: dict[str, Any]) -> None:
    """What comes next would belong to the one or the other."""
    files = sealed_log(make.seal(3, 1), **header)
    with pytest.raises(Corrupt, match="different clusters"):
        Log.open("log", seams=Seams(files=files))
    assert "different clusters" in next(check_directory(files, "log")).what


@pytest.mark.parametrize("epoch", [True, 0, -1, 1, 4, 5, 2**64, "6", 6.0, None])
def test_a_fork_must_raise_the_epoch(epoch: Any) -> None:
    """By the epoch one owner is told from the next."""
    files = MemoryFiles()
    with Log.open("log", seams=Seams(files=files)) as log:
        log.seal()
        log.append(Control(Kind.FORK, {"cluster_id": bytes(16), "epoch": 5}))
        log.seal()
        with pytest.raises(InvalidEntry, match="epoch"):
            log.append(Control(Kind.FORK, {"cluster_id": bytes(16), "epoch": epoch}))
        log.append(Control(Kind.FORK, {"cluster_id": b"\1" * 16, "epoch": 6}))
        assert not list(log.check())
    with Log.open("log", seams=Seams(files=files)) as log:
        assert (log.chain.cluster_id, log.chain.epoch) == (b"\1" * 16, 6)


@pytest.mark.parametrize("name", ["cluster_id", "salt"])
def test_a_create_entry_without_its_bytes_is_refused(name: str) -> None:
    """Both are needed for ever, and can never be given later."""
    for value in (None, b"", bytes(15), "x" * 16):
        body = dict(CREATE.body or {}) | {name: value}
        with pytest.raises(InvalidEntry, match=name):
            Log.open(None, create=Control(Kind.CREATE, body))


def test_a_reopened_log_knows_what_it_was_created_with_while_its_first_segment_is_there() -> None:
    """The engine's pages and hashes depend on it, and it is in the first entry alone."""
    files = MemoryFiles()
    in_force = LogSettings(8192, page_keys=128, inline_bytes_max=0)
    with Log.open("log", seams=Seams(files=files), create=CREATE) as log:
        assert (log.creation, log.chain.settings) == (CREATED, CREATED.settings)
    with Log.open("log", seams=Seams(files=files)) as log:
        assert (log.creation, log.chain.settings) == (CREATED, CREATED.settings)
        log.append(settings_entry({"segment_bytes": 8192}))
        assert (log.creation, log.chain.settings) == (CREATED, in_force)
        log.append(Put("b", "k", b"v"))
    for _ in range(2):
        with Log.open("log", seams=Seams(files=files)) as log:
            log.append(Put("b", "k", b"v"))
            assert (log.creation, log.chain.settings) == (CREATED, in_force)
    assert describe_log(files, "log").settings == in_force
    (first,) = [name for name in files.list("log") if name.startswith("segment-")]
    files.remove(f"log/{first}")
    unknown = in_force._replace(page_keys=None, inline_bytes_max=None)
    with Log.open("log", seams=Seams(files=files)) as log:
        assert (log.creation, log.chain.settings) == (None, unknown)
        log.append(Put("b", "k", b"v"))
        assert (log.creation, log.chain.settings) == (None, unknown)
    assert describe_log(files, "log").settings == unknown


def test_a_log_whose_first_entry_is_damaged_is_not_opened() -> None:
    """Going on with defaults would make other pages than before."""
    files = MemoryFiles()
    with Log.open("log", seams=Seams(files=files), create=CREATE) as log:
        for _ in range(3):
            log.append(Put("b", "k", b"v"))
            log.seal()
    first = min(name for name in files.list("log") if name.startswith("segment-"))
    file = files.open(f"log/{first}", write=True)
    at = HEADER_BYTES + format.FRAME_FIXED_BYTES + 10
    file.write_at(at, [bytes([file.read_at(at, 1)[0] ^ 1])])
    with pytest.raises(Corrupt) as caught:
        Log.open("log", seams=Seams(files=files))
    assert (caught.value.path, caught.value.offset) == (f"log/{first}", HEADER_BYTES)
