"""recovery/: a restore with `wal.dir` puts the log there, and what is opened later finds it, or refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import lowwater
from lowwater.errors import AlreadyExists, NotFound


@pytest.fixture
def tier(tmp_path: Path) -> str:
    uri = f"file://{tmp_path}/archive"
    with lowwater.open(tmp_path / "lost", tier=uri) as db:
        db.create_bucket("b")
        db.put("b", "k", b"first")
        db.checkpoint()
        db.put("b", "k", b"second")
        db.ship(timeout=60)
    return uri


def put_on(directory: Path, config: dict[str, Any] | None = None) -> list[str]:
    """What happens to a database that was restored: it is opened, and written."""
    with lowwater.open(directory, config=config) as db:
        assert db.get("b", "k").value == b"second"
        db.put("b", "more", b"")
        assert list(db.check()) == []
        return [entry.kind for entry in db.log()]


@pytest.mark.parametrize("kind", [{}, {"full": True}, {"clone": True}], ids=["line", "full", "clone"])
def test_a_restore_puts_the_log_where_the_configuration_says(
    tmp_path: Path, tier: str, kind: dict[str, bool]
) -> None:
    """It was put into the directory, on the disk that somebody wanted to spare; with the same configuration
    and without it, opening finds it again."""
    log = tmp_path / "fast" / "log"
    config = {"wal": {"dir": str(log)}}
    lowwater.restore(tier, tmp_path / "db", config=config, **kind)
    assert list(log.glob("*.log"))
    assert not (tmp_path / "db" / "wal").exists()
    put_on(tmp_path / "db", config)
    put_on(tmp_path / "db")
    assert list(lowwater.check(tmp_path / "db")) == []
    assert not (tmp_path / "db" / "wal").exists()


def test_a_log_that_is_not_where_it_was_put_is_missed(tmp_path: Path, tier: str) -> None:
    """An empty one would take its place, and acknowledge writes that nobody finds again."""
    log = tmp_path / "fast"
    lowwater.restore(tier, tmp_path / "db", config={"wal": {"dir": str(log)}})
    other = {"wal": {"dir": str(tmp_path / "other")}}
    with pytest.raises(NotFound) as caught:
        lowwater.open(tmp_path / "db", config=other)
    assert str(log) in caught.value.hint
    log.rename(tmp_path / "other")
    with pytest.raises(NotFound):
        lowwater.open(tmp_path / "db")
    assert not log.exists()
    put_on(tmp_path / "db", other)


def test_a_directory_that_was_restored_without_it_opens_with_it(tmp_path: Path, tier: str) -> None:
    """As those do that an older Lowwater has restored, whatever the configuration said."""
    lowwater.restore(tier, tmp_path / "db")
    put_on(tmp_path / "db", {"wal": {"dir": str(tmp_path / "elsewhere")}})
    assert not (tmp_path / "elsewhere").exists()


def test_no_log_is_written_over(tmp_path: Path, tier: str) -> None:
    """The directory may be new, and the log's still have all that the disk of the other has lost."""
    config = {"wal": {"dir": str(tmp_path / "lost" / "wal")}}
    before = sorted((tmp_path / "lost" / "wal").iterdir())
    with pytest.raises(AlreadyExists, match="for the log"):
        lowwater.restore(tier, tmp_path / "db", config=config)
    assert sorted((tmp_path / "lost" / "wal").iterdir()) == before


def test_a_restore_that_was_stopped_goes_on_with_its_log(
    tmp_path: Path, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it was begun, with that configuration or without one; with another it is refused."""

    class Stopped(Exception):
        pass

    def stop(what: str, done: int, total: int) -> None:
        raise Stopped

    config = {"wal": {"dir": str(tmp_path / "fast")}}
    with pytest.raises(Stopped):
        lowwater.restore(tier, tmp_path / "db", config=config, progress=stop)
    with pytest.raises(AlreadyExists) as caught:
        lowwater.restore(tier, tmp_path / "db", config={"wal": {"dir": str(tmp_path / "other")}})
    assert str(tmp_path / "fast") in caught.value.hint
    assert lowwater.restore(tier, tmp_path / "db").was_resumed
    put_on(tmp_path / "db", config)
