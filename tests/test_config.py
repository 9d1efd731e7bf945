"""src/lowwater/config.py: where a setting comes from, what it may be, and what is said when it may not."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import lowwater
from lowwater.config import (
    ACCEPTED,
    CACHE_CAPACITY,
    GIB,
    KEYS,
    KIB,
    MB,
    MIB,
    SPELLINGS,
    Config,
    WalConfig,
    parse_bytes,
    parse_milliseconds,
    parse_seconds,
)
from lowwater.engine.log.log import LogOptions
from lowwater.errors import InvalidConfig

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "tests" / "reference"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the developer has set must not decide a test."""
    for name in list(os.environ):
        if name.startswith("LOWWATER_"):
            monkeypatch.delenv(name)


def refused(source: Any = None, **overrides: Any) -> InvalidConfig:
    with pytest.raises(InvalidConfig) as caught:
        Config.load(source, **overrides)
    assert caught.value.hint, "an error says what to do next"
    assert caught.value.__cause__ is None
    return caught.value


def write(directory: Path, text: str) -> Path:
    path = directory / "lowwater.toml"
    path.write_text(text)
    return path


def test_the_environment_wins_over_the_file_and_an_argument_over_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator overrides a file without editing it, a program overrides both, key by key."""
    path = write(tmp_path, '[wal]\nsync_mode = "none"\ncompression = "none"\nrotate_max_bytes = "1 MiB"\n')
    monkeypatch.setenv("LOWWATER_WAL__SYNC_MODE", "fsync")
    monkeypatch.setenv("LOWWATER_WAL__COMPRESSION", "zstd")

    wal = Config.load(path, wal={"sync_mode": "fdatasync"}).wal

    assert (wal.sync_mode, wal.compression, wal.rotate_max_bytes) == ("fdatasync", "zstd", MIB)


def test_the_environment_wins_over_another_spelling_in_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two spellings of a key conflict within one place only."""
    monkeypatch.setenv("LOWWATER_WAL__ROTATE_MAX_BYTES", "1 MiB")
    assert Config.load({"storage_engine": {"wal_segment_size": "2 MiB"}}).wal.rotate_max_bytes == MIB


def test_a_config_without_a_source_has_the_defaults_and_reads_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A test or a program that says nothing must not depend on where it runs."""
    monkeypatch.setenv("LOWWATER_WAL__SYNC_MODE", "none")
    assert Config().wal == WalConfig()
    assert Config.load(Config(wal=WalConfig(sync_mode="fdatasync"))).wal.sync_mode == "fdatasync"


def test_a_loaded_config_passes_through_unchanged(tmp_path: Path) -> None:
    """Every layer of the program may take whatever form of configuration the one above has."""
    path = write(tmp_path, '[wal]\ndir = "here"\nrotate_max_seconds = 0.5\ncache_capacity = 7\n')
    config = Config.load(path)
    assert Config.load(config) == config
    assert Config.load(config, wal={"dir": tmp_path}).wal.dir == tmp_path


def test_a_config_never_changes() -> None:
    """What was checked once holds for good."""
    config = Config()
    with pytest.raises(ValidationError):
        config.wal.sync_mode = "none"


def test_the_reference_plans_own_file_is_understood() -> None:
    """Whoever comes from the plan brings its section and its names along."""
    plan = {"wal_segment_size": "100MB", "wal_sync_mode": "fdatasync", "wal_compression": "none"}
    wal = Config.load({"storage_engine": plan}).wal
    assert (wal.rotate_max_bytes, wal.sync_mode, wal.compression) == (100 * MB, "fdatasync", "none")
    assert Config.load({"wal": plan}).wal == wal


def test_the_reference_plans_configuration_loads_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that somebody has already is the first thing that is tried."""
    path = REFERENCE / "plan.toml"
    lowwater.open(tmp_path / "db").close()
    # Nobody listens there.
    monkeypatch.setenv("LOWWATER_TIER__OPTIONS__ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("LOWWATER_TIER__ATTEMPTS_MAX", "1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "unknown")
    config = Config.load(path)
    assert config.engine.pool_bytes_max == 1000 * MB
    assert config.engine.checkpoint_entry_interval_s == 300
    assert config.engine.checkpoint_entry_age_max_s == 3600
    assert config.tier.store_uri() == "s3://my-storage-engine/data/"
    assert (config.wal.rotate_max_bytes, config.wal.sync_mode) == (100 * MB, "fsync")
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2, "what is not done is told, one line a feature"
    assert "page_size" in told[0]
    assert all(name in told[1] for name in ("compaction_enabled", "compaction_interval_secs", "_threshold"))
    with lowwater.open(tmp_path / "db", config=path) as db:
        db.create_bucket("b")
    assert len([record for record in caplog.records if "not used" in record.getMessage()]) == 4


def test_the_other_reference_documents_keys_load_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each as its counterpart here, from the section that they all stand in."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "the key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do-not-show-this")
    config = Config.load(REFERENCE / "broker.toml")
    assert config.wal.dir == Path("/var/lib/danube/wal")
    assert (config.wal.cache_messages_max, config.wal.fsync_interval_ms) == (2048, 5000)
    assert (config.wal.rotate_max_bytes, config.wal.rotate_max_seconds) == (52428800, 3600)
    assert (config.shipping.interval_s, config.tier.part_bytes) == (300, 8 * MIB)
    assert config.tier.parts_at_once == 4
    assert config.tier.store_uri() == "s3://my-bucket/danube"
    assert config.tier.options == {
        "region": "us-east-1",
        "endpoint": "https://s3.amazonaws.com",
        "access_key_id": "the key",
        "secret_access_key": "do-not-show-this",
    }
    assert "do-not-show-this" not in repr(config)
    local = Config.load({"cloud": {"backend": "fs", "root": "/mnt/archive"}})
    assert local.tier.store_uri() == "file:///mnt/archive"


def test_the_key_for_a_process_that_is_gone_is_read_and_told(caplog: pytest.LogCaptureFixture) -> None:
    for written in (True, False, "true"):
        caplog.clear()
        Config.load({"engine": {"merge_worker": written}})
        assert [record.getMessage() for record in caplog.records if "merge_worker" in record.getMessage()]
        assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("section", "name", "value", "told"),
    [
        ("storage_engine", "eviction_policy", "arc", "one policy"),
        ("storage_engine", "page_size", "huge", "must be a whole number"),
        ("engine", "merge_worker", "perhaps", "true or false"),
        ("storage_engine", "compaction_enabled", "perhaps", "true or false"),
        ("storage_engine", "wal_compression", "lz4", "no other algorithm"),
        ("storage_engine", "s3_compression", "zstd:9", "no level"),
        ("cloud_reader", "enable_ranged_reads", "perhaps", "ranged_reads"),
        ("cloud", "backend", "s3", "stand together"),
    ],
)
def test_what_the_reference_documents_have_and_this_has_not_is_refused(
    section: str, name: str, value: object, told: str
) -> None:
    """It would be taken for done."""
    error = refused({section: {name: value}})
    assert told in error.message
    assert name in error.message or told == "stand together"


def test_a_segment_has_one_stored_form() -> None:
    """Two compressions cannot both hold, and why stands in the error."""
    error = refused({"storage_engine": {"wal_compression": "none", "s3_compression": "zstd"}})
    assert "wal_compression" in error.message
    assert "s3_compression" in error.message
    assert "one form" in error.hint
    refused({"cloud": {"backend": "gcs", "root": "s3://b/p"}})


def test_the_secret_of_another_spelling_is_not_shown() -> None:
    """A name of the documents is as secret as ours."""
    wrong = {"storage": {"cloud": {"root": "s3://b", "options": {"secret_key": ["do-not-show-this"]}}}}
    assert "do-not-show-this" not in str(refused(wrong))


def test_a_name_of_a_region_is_no_region(tmp_path: Path) -> None:
    """It became a folder beside the program, and counted as a copy on another continent."""
    for regions in (["us-east-1", "eu-west-1"], "us-east-1", ["s3://b/p", "backup"]):
        for source in (
            {"storage_engine": {"s3_bucket": "b", "s3_regions": regions}},
            {"tier": {"uri": "s3://b", "regions": regions}},
        ):
            error = refused(source)
            assert "URI" in error.message
            assert "s3://bucket/prefix?region=" in error.hint
    with pytest.raises(InvalidConfig):
        lowwater.open(tmp_path / "db", tier=f"file://{tmp_path}/a", config={"tier": {"regions": "x"}})
    assert not (tmp_path / "db").exists()


def kinds_in(db: Any) -> list[str]:
    return [entry.kind for entry in db.log() if entry.kind in ("settings", "put")]


def test_settings_of_a_log_that_are_written_out_become_one_entry(tmp_path: Path) -> None:
    """They were fixed when it was made, and later ignored in silence. What nobody has written changes
    nothing, or a program without its file would change a log back."""
    path, changed = tmp_path / "db", {"wal": {"compression": "none", "rotate_max_bytes": "64 KiB"}}
    with lowwater.open(path) as db:
        db.create_bucket("b")
        db.put("b", "before", bytes(100_000))
    with lowwater.open(path, config=changed) as db:
        assert kinds_in(db) == ["put", "settings"]
        for number in range(3):
            db.put("b", f"{number}", bytes(70_000))
    for config in (changed, None, {"wal": {"compression": "none"}}, {"wal": {"sync_mode": "none"}}):
        with lowwater.open(path, config=config) as db:
            assert kinds_in(db) == ["put", "settings", *["put"] * 3]
            assert list(db.check()) == []
    # Each put has filled a segment, as the new size has it.
    assert len(list((path / "wal").glob("segment-*.log"))) == 4
    with lowwater.open(path, config={"wal": {"compression": "zstd"}}) as db:
        assert kinds_in(db)[-1] == "settings"
        assert db.get("b", "before").value == bytes(100_000)


def test_before_images_are_asked_for_as_the_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the environment too, where every value is a text."""
    assert LogOptions.from_config(Config.load({}).wal).wanted == {}
    for text, value in (("true", 1), ("false", 0)):
        monkeypatch.setenv("LOWWATER_WAL__BEFORE_IMAGES", text)
        with lowwater.open(tmp_path / "db") as db:
            assert db._log.chain.settings.before_images == value
    monkeypatch.setenv("LOWWATER_WAL__BEFORE_IMAGES", "2")
    assert "before_images" in refused().message.lower()


def test_settings_of_a_log_that_is_fed_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An entry that only one replica has would be the end of it."""
    with lowwater.Engine(tmp_path / "fed") as engine:
        engine.apply_log_entry(1, lowwater.Create(bytes(16), bytes(16)))
        engine.apply_log_entry(2, lowwater.CreateBucket("b"))
    with lowwater.Engine(tmp_path / "fed", config={"wal": {"compression": "none"}}) as engine:
        assert engine.marks().applied == 2
    assert "not used" in caplog.text


def test_settings_of_a_log_alone_become_an_entry_too(tmp_path: Path) -> None:
    """`Log.open` by itself, as the database."""
    lowwater.Log.open(tmp_path / "log").close()
    for _ in range(2):
        with lowwater.Log.open(tmp_path / "log", config={"wal": {"rotate_max_bytes": "1 MiB"}}) as log:
            assert [entry.kind for entry in log.read()] == ["create", "settings"]
            assert log.chain.settings.segment_bytes == MIB


def test_two_spellings_with_one_value_are_accepted_and_with_two_refused() -> None:
    """Neither of two values may win by chance."""
    assert Config.load({"wal": {"sync_mode": "none", "wal_sync_mode": "none"}}).wal.sync_mode == "none"
    error = refused({"wal": {"sync_mode": "none", "wal_sync_mode": "fsync"}})
    assert "wal.sync_mode" in error.message
    assert "wal.wal_sync_mode" in error.message


@pytest.mark.parametrize(
    ("written", "bytes_max", "messages_max"),
    [("1 MiB", MIB, None), (1024, 64 * MIB, 1024), ("1024", 64 * MIB, 1024), ("1024 B", 1024, None)],
)
def test_a_cache_capacity_is_bytes_with_a_unit_and_messages_without(
    written: object, bytes_max: int, messages_max: int | None
) -> None:
    """The plan counts messages; memory is bounded in bytes whatever is said."""
    wal = Config.load({"wal": {"cache_capacity": written}}).wal
    assert (wal.cache_bytes_max, wal.cache_messages_max) == (bytes_max, messages_max)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("wal.rotate_max_byte", "wal.rotate_max_bytes"),
        ("wal.syncmode", "wal.sync_mode"),
        ("wall.dir", "wal.dir"),
        ("storage_engine.segment_size", "storage_engine.wal_segment_size"),
    ],
)
def test_an_unknown_key_is_refused_with_its_path_and_the_nearest_known_one(
    tmp_path: Path, key: str, nearest: str
) -> None:
    """A misspelt key that is skipped leaves a default in force that nobody chose."""
    path = write(tmp_path, f"{key} = 1\n")
    error = refused(path)
    assert key in error.message
    assert error.hint.endswith(f" {nearest}")
    assert error.path == str(path)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("LOWWATER_WAL__SYNC_MODES", "LOWWATER_WAL__SYNC_MODE"),
        ("LOWWATER_ENGINE__SYNC_MODE", "LOWWATER_WAL__SYNC_MODE"),
        ("LOWWATER_STORAGE_ENGINE__PAGES_SIZE", "LOWWATER_STORAGE_ENGINE__PAGE_SIZE"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_nearest_known_one(
    monkeypatch: pytest.MonkeyPatch, name: str, nearest: str
) -> None:
    """What stands in a section of ours is meant for us."""
    monkeypatch.setenv(name, "none")
    error = refused()
    assert name in error.message
    assert error.hint.endswith(f" {nearest}")


def test_the_variables_of_a_service_of_our_name_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Kubernetes sets them in every pod beside it, and no pod could open anything."""
    address = "tcp://10.0.0.1:7400"
    service = {
        "LOWWATER_SERVICE_HOST": "10.0.0.1",
        "LOWWATER_SERVICE_PORT": "7400",
        "LOWWATER_PORT": address,
        "LOWWATER_PORT_7400_TCP": address,
        "LOWWATER_PORT_7400_TCP_ADDR": "10.0.0.1",
        "LOWWATER_PORT_7400_TCP_PORT": "7400",
        "LOWWATER_PORT_7400_TCP_PROTO": "tcp",
        "LOWWATER_WAL_SERVICE_HOST": "10.0.0.2",
        "LOWWATER_TIER": "gold",
    }
    for name, value in service.items():
        monkeypatch.setenv(name, value)
    lowwater.open(tmp_path / "db").close()
    assert Config.load() == Config()
    assert not caplog.records


def test_a_variable_that_looks_like_a_slip_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One underscore where two belong is the slip that everybody makes, and it may be somebody else's."""
    monkeypatch.setenv("LOWWATER_WAL_SYNC_MODE", "none")
    assert Config.load().wal.sync_mode == "fsync"
    (record,) = caplog.records
    assert "LOWWATER_WAL__SYNC_MODE" in record.getMessage()
    assert "LOWWATER_WAL_SYNC_MODE" in record.getMessage()


@pytest.mark.parametrize("source", [{"wal": 5}, {"wal": "x"}, {"wal": None}])
def test_a_section_that_is_a_value_is_refused(source: object) -> None:
    """`wal = 5` is not a setting."""
    assert "section" in refused(source).message


def test_an_empty_section_is_fine_when_it_is_known() -> None:
    """A file with everything commented out is a file with the defaults."""
    assert Config.load({"wal": {}, "storage_engine": {}}) == Config()
    assert "shopping" in refused({"shopping": {}}).message


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        (4096, 4096),
        ("4096", 4096),
        ("1B", 1),
        ("8KB", 8000),
        ("8 KiB", 8 * KIB),
        ("100MB", 100 * MB),
        (" 64 MiB ", 64 * MIB),
        ("1.5 GiB", 3 * GIB // 2),
        ("2gib", 2 * GIB),
        ("1 TB", 10**12),
    ],
)
def test_sizes_are_read_as_people_write_them(text: object, size: int) -> None:
    """KB is a thousand bytes, KiB is 1,024, everywhere."""
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        (250, 250),
        ("250", 250),
        ("250ms", 250),
        ("10s", 10_000),
        ("5 min", 300_000),
        ("24h", 86_400_000),
        ("0.5 s", 500),
        ("7d", 604_800_000),
    ],
)
def test_durations_are_read_as_people_write_them(text: object, milliseconds: int) -> None:
    """A plain number has the unit that ends the key's name."""
    assert parse_milliseconds(text) == milliseconds
    if isinstance(text, str) and not text.isdecimal():
        assert parse_seconds(text) == milliseconds / 1000
    else:
        assert parse_seconds(text) == milliseconds


@pytest.mark.parametrize("parse", [parse_bytes, parse_milliseconds])
@pytest.mark.parametrize(
    "value",
    [
        -1,
        "-1",
        "",
        " ",
        "x",
        "1 parsec",
        "1..5 s",
        "1 2",
        "1e3",
        "0x10",
        "٣",
        True,
        None,
        [],
        0.5,
        "1.0001",
        2**63,
    ],
)
def test_what_is_no_amount_is_refused(parse: Callable[[object], int], value: object) -> None:
    """Nothing is guessed: neither truth values, nor half bytes, nor what follows a unit."""
    with pytest.raises(ValueError, match=r"must be|has the unit"):
        parse(value)


@given(
    value=st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.none(), st.lists(st.integers()))
)
def test_no_value_of_any_key_gives_anything_but_a_config_or_a_typed_error(value: object) -> None:
    """No input shows a user the inside of a library."""
    for key in (*KEYS, *SPELLINGS, *ACCEPTED, CACHE_CAPACITY):
        section, name = key.split(".")
        with contextlib.suppress(InvalidConfig):
            Config.load({section: {name: value}})


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("rotate_max_bytes", "5 KB", 'wal.rotate_max_bytes = "5 KB" must be at least 64 KiB'),
        ("rotate_max_bytes", "3 GiB", 'wal.rotate_max_bytes = "3 GiB" must be at most 2 GiB'),
        ("rotate_max_seconds", 0, "wal.rotate_max_seconds = 0 must be above 0"),
        ("fsync_max_batch_bytes", "33 MiB", 'wal.fsync_max_batch_bytes = "33 MiB" must be at most 32 MiB'),
        ("fsync_max_batch_bytes", 0, "wal.fsync_max_batch_bytes = 0 must be at least 1 B"),
        ("fsync_interval_ms", "2 h", 'wal.fsync_interval_ms = "2 h" must be at most 1 h'),
        ("entry_bytes_max", "32 MiB", 'wal.entry_bytes_max = "32 MiB" must be at most 31 MiB'),
        ("sync_mode", "always", "wal.sync_mode = \"always\" must be one of 'fsync', 'fdatasync' or 'none'"),
        ("dir", "", 'wal.dir = "" must be a path'),
    ],
)
def test_a_value_out_of_range_is_told_with_its_limit(
    tmp_path: Path, key: str, value: object, reason: str
) -> None:
    """Whoever reads it can correct it without looking anything up."""
    path = write(tmp_path, f"[wal]\n{key} = {value!r}\n")
    error = refused(path)
    assert error.message == reason
    assert error.path == str(path)


@pytest.mark.parametrize("key", ["checkpoint_interval_s", "checkpoint_entry_interval_s"])
def test_a_duration_longer_than_any_wait_means_never(tmp_path: Path, key: str) -> None:
    """The system refuses waits of more than three hundred years: that would end the thread that waits."""
    settings = {"pool_bytes_max": "1 MiB", key: 10**15}
    with lowwater.open(tmp_path / "data", config={"engine": settings}) as db:
        db.create_bucket("b")
        for first in range(0, 40_000, 1000):  # several times what memory holds
            db.put_many("b", [(str(number), b"x" * 100) for number in range(first, first + 1000)])
        assert db.get("b", "0").value == b"x" * 100


@pytest.mark.parametrize(
    ("key", "value", "limit"),
    [
        ("wal.cache_bytes_max", "2 TiB", "at most 1 TiB"),
        ("wal.rotate_max_seconds", "2000 d", "at most 100,000,000 s"),
        ("tier.timeout_ms", "99ms", "at least 100 ms"),
        ("tier.upload_age_max_s", "0.5 s", "at least 1 s"),
        ("tier.upload_age_max_s", "200000000 s", "at most 100,000,000 s"),
        ("shipping.interval_s", "2 d", "at most 1 d"),
        ("versions.age_max_s", 10**11, "at most 10,000,000,000 s"),
        ("versions.per_key_max", 2**33, "at most 4,294,967,296"),
    ],
)
def test_a_limit_is_told_as_the_documentation_has_it(key: str, value: object, limit: str) -> None:
    """Nobody writes a duration as 3.6e+06."""
    section, name = key.split(".")
    assert refused({section: {name: value}}).message.endswith(f"must be {limit}")


def test_all_that_is_wrong_is_told_at_once() -> None:
    """Nobody corrects a file one error at a time."""
    error = refused({"wal": {"sync_mode": "x", "compression": "y"}})
    assert "wal.sync_mode" in error.message
    assert "wal.compression" in error.message


def test_a_variable_out_of_range_is_told_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The place to correct is the one that was read."""
    monkeypatch.setenv("LOWWATER_WAL__SYNC_MODE", "always")
    assert 'LOWWATER_WAL__SYNC_MODE = "always"' in refused().message


def test_an_entry_that_could_never_be_queued_is_refused() -> None:
    """Its writer would wait for ever."""
    error = refused({"wal": {"entry_bytes_max": "2 MiB", "queue_bytes_max": "1 MiB"}})
    assert "queue_bytes_max" in error.message


def test_a_variable_is_put_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """One file serves many machines."""
    monkeypatch.setenv("PLACE", "/srv")
    assert Config.load({"wal": {"dir": "${PLACE}/wal"}}).wal.dir == Path("/srv/wal")
    assert Config.load({"wal": {"dir": "$${PLACE}/wal"}}).wal.dir == Path("${PLACE}/wal")


@pytest.mark.parametrize("text", ["${PLACE", "${}", "${A-B}"])
def test_a_broken_variable_is_refused(text: str) -> None:
    """It would become part of a path."""
    assert text in refused({"wal": {"dir": text}}).message


def test_a_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty text in its place would be a wrong path."""
    monkeypatch.delenv("PLACE", raising=False)
    assert "PLACE" in refused({"wal": {"dir": "${PLACE}/wal"}}).message


def test_an_error_does_not_give_away_what_a_variable_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors end in logs."""
    monkeypatch.setenv("PASSWORD", "hunter2")
    error = refused({"wal": {"sync_mode": "${PASSWORD}"}})
    assert "${PASSWORD}" in error.message
    assert "hunter2" not in f"{error} {error.hint} {error.as_dict()} {error!r}"


@pytest.mark.parametrize("content", [b"[wal", b"wal = ", b"\xff\xfe", b"[wal]\nsync_mode = none\n"])
def test_a_file_that_is_not_toml_is_refused_with_its_path(tmp_path: Path, content: bytes) -> None:
    """The parser says the line, we say the file."""
    path = tmp_path / "lowwater.toml"
    path.write_bytes(content)
    assert refused(path).path == str(path)


def test_a_file_that_cannot_be_read_is_refused_with_its_path(tmp_path: Path) -> None:
    """A configuration that was asked for is never skipped."""
    assert refused(tmp_path / "missing.toml").path == str(tmp_path / "missing.toml")
    assert refused(tmp_path).path == str(tmp_path)


def test_the_documentation_lists_each_key_with_its_default() -> None:
    """The table is what people read; the fields are what counts."""
    text = (ROOT / "docs" / "configuration.md").read_text()
    documented = {}
    for part in text.split("\n## "):
        if section := re.match(r"`\[(\w+)\]`", part):
            rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", part, re.MULTILINE)
            documented |= {f"{section[1]}.{key}": default.strip("` ") for key, default in rows}
    assert sorted(documented) == sorted(KEYS)
    for key, default in documented.items():
        section, name = key.split(".")
        actual = getattr(getattr(Config(), section), name)
        if isinstance(actual, tuple):
            assert (default, actual) == ("none", ()), key
        elif isinstance(actual, float):
            assert parse_seconds(default) == actual, key
        elif name.endswith("_ms"):
            assert parse_milliseconds(default) == actual, key
        elif isinstance(actual, int) and not isinstance(actual, bool):
            assert parse_bytes(default) == actual, key
        else:
            assert default == str(actual).lower(), key


def test_the_documentation_lists_each_other_spelling() -> None:
    """A spelling that nobody can find is of no use."""
    text = (ROOT / "docs" / "configuration.md").read_text()
    rows = re.findall(r"^\| (`\w+\.\w+`.*) \| `(\w+\.\w+)` \|$", text, re.MULTILINE)
    documented = {spelling: key for left, key in rows for spelling in re.findall(r"`(\w+\.\w+)`", left)}
    assert documented.pop(CACHE_CAPACITY) in KEYS
    assert documented == SPELLINGS
    for key in ACCEPTED:
        assert f"`{key}`" in text or f"`{key.partition('.')[2]}`" in text, key


def test_the_reference_plans_keys_of_shipping_are_understood() -> None:
    """All of them, each with the unit that its name ends with."""
    config = Config.load(
        {
            "storage_engine": {
                "shipping_interval_secs": 20,
                "shipping_batch_size": 50,
                "s3_compression": "none",
                "s3_bucket": "b",
                "s3_prefix": "p/q",
                "s3_regions": ["s3://c/p", "s3://d/p"],
                "s3_replication_mode": "sync",
            },
            "uploader": {"max_batch_bytes": "2 MiB", "stream_chunk_size": 8388608, "concurrent_parts": 2},
            "deleter": {
                "check_interval_minutes": 5,
                "retention_time_minutes": 1440,
                "retention_size_mb": 10240,
            },
        }
    )
    assert config.tier.store_uri() == "s3://b/p/q"
    assert config.tier.regions == ("s3://c/p", "s3://d/p")
    assert (config.tier.replication, config.wal.compression) == ("sync", "none")
    assert (config.shipping.interval_s, config.shipping.batch_segments_max) == (20.0, 50)
    assert config.shipping.batch_bytes_max == 2**21
    assert config.retention == Config().retention
    assert Config.load({"deleter": {"retention_time_minutes": "2 h"}}).retention.age_max_s == 7200
    assert Config.load({"uploader": {"interval_seconds": 3}}).shipping.interval_s == 3.0
    assert Config.load({"tier": {"uri": "s3://a/b", "regions": "s3://c, s3://d"}}).tier.regions == (
        "s3://c",
        "s3://d",
    )


@pytest.mark.parametrize(
    "tier",
    [
        {"prefix": "p"},
        {"bucket": "b", "uri": "s3://x"},
        {"bucket": "b", "kind": "s3", "root": "x"},
        {"uri": "s3://x", "regions": [5]},
        {"uri": "s3://x", "replication": "sometimes"},
    ],
)
def test_a_tier_that_contradicts_itself_is_refused(tier: dict[str, object]) -> None:
    """Nobody could tell where the history is."""
    refused({"tier": tier})


def test_a_store_has_options_of_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they may be called is the store's to know; they come from every place, as other keys do."""
    monkeypatch.setenv("LOWWATER_TIER__OPTIONS__REGION", "here")
    monkeypatch.setenv("STORE_KEY", "from the environment")
    source = {
        "tier": {
            "uri": "s3://b/p",
            "options": {"region": "there", "secret_access_key": "${STORE_KEY}", "skip_signature": True},
        }
    }
    tier = Config.load(source).tier
    assert tier.options == {
        "region": "here",
        "secret_access_key": "from the environment",
        "skip_signature": "true",
    }
    assert Config.load(Config.load(source)).tier == tier


def test_no_secret_of_a_store_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors and reprs end in logs and tickets."""
    secret = "do-not-show-this"
    config = Config.load(
        {"tier": {"uri": f"s3://b/p?secret_access_key={secret}", "options": {"session_token": secret}}}
    )
    assert secret not in repr(config) + str(config)
    wrong = [
        {"uri": f"s3://b/p?secret_access_key={secret}", "kind": "s3", "root": "b"},
        {"uri": "s3://b", "options": {"secret_access_key": [secret]}},
        {"options": {"secret_access_key": secret}},
    ]
    for tier in wrong:
        assert secret not in str(refused({"tier": tier}))
    conflict = {"tier": {"uri": "s3://b", "part_bytes": "5 MiB"}, "uploader": {"stream_chunk_size": "6 MiB"}}
    assert "one key" in refused(conflict).message
    assert Config.load({"uploader": {"stream_chunk_size": "9 MiB"}}).tier.part_bytes == 9 * MIB
    monkeypatch.setenv("LOWWATER_TIER__ROOT", f"//key:{secret}@b")
    assert secret not in str(refused({}))


def test_a_store_is_named_in_one_way() -> None:
    """Its URI, or kind and root."""
    assert Config().tier.store_uri() is None
    assert Config.load({"tier": {"kind": "s3", "root": "b/p"}}).tier.store_uri() == "s3://b/p"
    assert "stand together" in refused({"tier": {"kind": "s3"}}).message
    assert "nearest known key" in refused({"tier": {"options_": 1}}).hint
