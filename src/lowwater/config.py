"""The configuration: one TOML file, the environment over the file, arguments over the environment.

Always true:
  - a `Config` has passed every check, and never changes afterwards;
  - a key that nothing reads is an error, wherever it was written, so a misspelt one cannot be lost. In the
    environment that goes for the sections here: another `LOWWATER_…` may be somebody else's;
  - whatever is wrong is `InvalidConfig`. It shows a value as it was written: `${NAME}`
    gives no secret away.

docs/configuration.md lists every key. A test compares that table with the fields below.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from lowwater.errors import InvalidConfig, without_secrets
from lowwater.logging import get_logger

_logger = get_logger("config")

ENV_PREFIX = "LOWWATER_"
HINT = "docs/configuration.md lists the keys and what each takes"

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
TIB = 1 << 40
MB = 1_000_000

BYTES_PER_UNIT = {
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
}
MILLISECONDS_PER_UNIT = {"ms": 1, "s": 1000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}


def _parse(value: object, units: dict[str, int], plain: str, example: str) -> int:
    """`"64 MiB"` or `64`, in the smallest of the units. A number without a unit is in `plain`."""
    text = str(value) if type(value) in (int, float, str) else ""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip(), re.ASCII)
    if found is None:
        raise ValueError(f'must be a whole number from 0 up, or a text such as "{example}"')
    size = {unit.lower(): size for unit, size in units.items()}.get((found[2] or plain).lower())
    if size is None:
        raise ValueError(f'has the unit "{found[2]}", which is none of {", ".join(units)}')
    number = Fraction(found[1]) * size
    if number.denominator != 1 or number >= 1 << 63:
        raise ValueError(f"must be a whole number of {next(iter(units))}, below 2^63")
    return int(number)


def parse_bytes(value: object) -> int:
    """`"100 MB"` is 100,000,000, `"64 MiB"` is 67,108,864, a plain number is bytes."""
    return _parse(value, BYTES_PER_UNIT, "B", "64 MiB")


def parse_optional_bytes(value: object) -> int | None:
    """`"64 MiB"` is 67,108,864, a plain number is bytes, and `"none"` stands for no limit."""
    return None if value is None or value == "none" else parse_bytes(value)


def parse_milliseconds(value: object) -> int:
    """`"5 s"` is 5000; a plain number is milliseconds."""
    return _parse(value, MILLISECONDS_PER_UNIT, "ms", "250ms")


def parse_seconds(value: object) -> float | None:
    """`"5 min"` is 300, a plain number is seconds, and `"none"` stands for never."""
    if value is None or value == "none":
        return None
    return _parse(value, MILLISECONDS_PER_UNIT, "s", "10 min") / 1000


def parse_some_seconds(value: object) -> float:
    """`"5 min"` is 300, a plain number is seconds."""
    return _parse(value, MILLISECONDS_PER_UNIT, "s", "10 s") / 1000


def _uris(value: object) -> object:
    """A list, or a text with commas between."""
    found = [each.strip() for each in value.split(",")] if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or not all(isinstance(each, str) and each for each in found):
        raise ValueError('must be a list of URIs, or a text such as "s3://one/prefix, s3://two/prefix"')
    for each in found:
        # As a relative path the name of a region would become a folder here, and count as a copy elsewhere.
        if "://" not in each and not os.path.isabs(each):
            raise ValueError(f"must be a list of URIs, and {without_secrets(each)!r:.80} is none")
    return tuple(found)


def _kind(value: object) -> object:
    """The reference documents call a folder `fs`."""
    return "file" if value == "fs" else value


def _compression(value: object) -> object:
    if value not in ("none", "zstd"):
        raise ValueError(
            "must be none or zstd: all replicas store a segment in one form, and the same bytes, "
            "so there is no other algorithm and no level"
        )
    return value


def parse_count(value: object) -> int:
    return _parse(value, {"messages": 1}, "messages", "1024")


def parse_optional_count(value: object) -> int | None:
    """`1000`; `"none"` stands for no limit."""
    if value is None or value == "none":
        return None
    return _parse(value, {"versions": 1}, "versions", "1000")


def _path(value: object) -> object:
    if value is None or (isinstance(value, str | os.PathLike) and os.fspath(value)):
        return value
    raise ValueError("must be a path")


def _option(value: object) -> object:
    """OpenDAL takes texts."""
    match value:
        case bool():
            return str(value).lower()
        case int() | str():
            return str(value)
    raise ValueError("must be a text, a whole number, true or false")


ByteSize = Annotated[int, BeforeValidator(parse_bytes)]
OptionalByteSize = Annotated[int | None, BeforeValidator(parse_optional_bytes)]
Milliseconds = Annotated[int, BeforeValidator(parse_milliseconds)]
Seconds = Annotated[float, BeforeValidator(parse_some_seconds)]
OptionalSeconds = Annotated[float | None, BeforeValidator(parse_seconds)]
OptionalPath = Annotated[Path | None, BeforeValidator(_path)]
Count = Annotated[int, BeforeValidator(parse_count)]
OptionText = Annotated[str, BeforeValidator(_option)]
OptionalCount = Annotated[int | None, BeforeValidator(parse_optional_count)]


class WalConfig(BaseModel):
    """The log's settings. Each attribute has the name of its key in `[wal]`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dir: OptionalPath = None
    cache_bytes_max: ByteSize = Field(default=64 * MIB, le=TIB)
    cache_messages_max: Count | None = None
    fsync_interval_ms: Milliseconds = Field(default=0, le=3_600_000)
    fsync_max_batch_bytes: ByteSize = Field(default=10 * MIB, ge=1, le=32 * MIB)
    rotate_max_bytes: ByteSize = Field(default=100 * MB, ge=64 * KIB, le=2 * GIB)
    rotate_max_seconds: OptionalSeconds = Field(default=None, gt=0, le=10**8)
    sync_mode: Literal["fsync", "fdatasync", "none"] = "fsync"
    compression: Annotated[Literal["none", "zstd"], BeforeValidator(_compression)] = "zstd"
    before_images: bool = False
    queue_bytes_max: ByteSize = Field(default=64 * MIB, le=TIB)
    entry_bytes_max: ByteSize = Field(default=16 * MIB, ge=64, le=31 * MIB)

    @model_validator(mode="after")
    def _any_entry_fits_the_queue(self) -> Self:
        if self.entry_bytes_max > self.queue_bytes_max:
            raise ValueError("entry_bytes_max is above queue_bytes_max: such an entry could never be queued")
        return self


class EngineConfig(BaseModel):
    """The engine's settings. Each attribute has the name of its key in `[engine]`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pool_bytes_max: ByteSize = Field(default=GIB, ge=MIB, le=1 << 44)
    checkpoint_interval_s: OptionalSeconds = Field(default=300.0, gt=0)
    checkpoint_entry_interval_s: OptionalSeconds = Field(default=None, gt=0)
    checkpoint_entry_age_max_s: OptionalSeconds = Field(default=None, gt=0)
    checkpoint_entry_bytes: OptionalByteSize = Field(default=None, ge=MIB)
    transaction_age_max_s: OptionalSeconds = Field(default=3600.0, gt=0)
    disk_reserve_bytes: ByteSize = 64 * MIB


class VersionsConfig(BaseModel):
    """Which old versions are kept. Each attribute has the name of its key in `[versions]`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    age_max_s: OptionalSeconds = Field(default=None, gt=0, le=10**10)
    seqs_max: OptionalCount = Field(default=None, ge=1)
    per_key_max: OptionalCount = Field(default=None, ge=1, le=2**32)


class TierConfig(BaseModel):
    """Where the history is kept. Each attribute has the name of its key in `[tier]`; the repr is free of
    secrets."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    uri: str | None = Field(default=None, repr=False, min_length=1)
    kind: Annotated[
        Literal["file", "shared_fs", "memory", "s3", "gcs", "azblob"] | None, BeforeValidator(_kind)
    ] = None
    root: str | None = Field(default=None, min_length=1)
    bucket: str | None = Field(default=None, min_length=1)
    prefix: str | None = None
    options: dict[str, OptionText] = Field(default={}, repr=False)
    regions: Annotated[tuple[str, ...], BeforeValidator(_uris)] = Field(default=(), repr=False)
    replication: Literal["async", "sync"] = "async"
    cache_bytes_max: ByteSize = Field(default=GIB, ge=16 * MIB)
    ranged_reads: bool = True
    timeout_ms: Milliseconds = Field(default=30_000, ge=100, le=3_600_000)
    attempts_max: Count = Field(default=5, ge=1, le=100)
    requests_max: Count = Field(default=32, ge=1, le=10_000)
    part_bytes: ByteSize = Field(default=5 * MIB, ge=5 * MIB, le=GIB)
    parts_at_once: Count = Field(default=2, ge=1, le=64)
    upload_age_max_s: Seconds = Field(default=86_400.0, ge=1, le=10**8)
    scrub_sample_interval_s: OptionalSeconds = Field(default=1200.0, gt=0, le=10**8)

    @model_validator(mode="after")
    def _one_way_to_say_where(self) -> Self:
        if (self.kind is None) != (self.root is None):
            raise ValueError("kind and root stand together, as s3 and bucket/prefix")
        if self.root is not None and "://" in self.root and not self.root.startswith(f"{self.kind}://"):
            raise ValueError("kind and root name two kinds of store")
        if self.uri is not None and self.kind is not None:
            raise ValueError("uri says what kind and root say: keep one of the two")
        if self.prefix is not None and self.bucket is None:
            raise ValueError("prefix says where in a bucket: set bucket too")
        if self.bucket is not None and (self.uri is not None or self.kind is not None):
            raise ValueError("bucket says where, and so does another key: keep one of the two")
        if self.options and self.store_uri() is None:
            raise ValueError("there are options, and no uri that they are for")
        return self

    def store_uri(self) -> str | None:
        """Return the URI of the store; None where nothing is to be shipped."""
        if self.bucket is not None:
            return f"s3://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")
        if self.root is not None:
            return self.root if "://" in self.root else f"{self.kind}://{self.root}"
        return self.uri


class ShippingConfig(BaseModel):
    """How the history is brought to the store. Each attribute has the name of its key in `[shipping]`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    interval_s: Seconds = Field(default=10.0, gt=0, le=86_400)
    batch_segments_max: Count = Field(default=100, ge=1, le=100_000)
    batch_bytes_max: ByteSize = Field(default=GIB, ge=MIB)
    uploads_at_once: Count = Field(default=2, ge=1, le=64)


class RetentionConfig(BaseModel):
    """When what was shipped leaves the local disk. Each attribute is named as its key in `[retention]`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    check_interval_s: Seconds = Field(default=300.0, gt=0, le=86_400)
    age_max_s: OptionalSeconds = Field(default=86_400.0, ge=0, le=10**10)
    bytes_max: OptionalByteSize = 10 * GIB


class Config(BaseSettings):
    """Everything that can be set. `Config()` has the defaults, `Config.load` reads what the user wrote."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid")

    wal: WalConfig = WalConfig()
    engine: EngineConfig = EngineConfig()
    versions: VersionsConfig = VersionsConfig()
    tier: TierConfig = TierConfig()
    shipping: ShippingConfig = ShippingConfig()
    retention: RetentionConfig = RetentionConfig()

    @classmethod
    def load(
        cls, source: str | os.PathLike[str] | Mapping[str, Any] | Config | None = None, **overrides: Any
    ) -> Config:
        """Read a configuration. `source` is a TOML file, or a mapping that stands for one. The overrides are
        sections as well: `Config.load("lowwater.toml", wal={"sync_mode": "fdatasync"})`. A `Config` has met
        its environment already, so only the overrides are put over it."""
        layers = [_layer(_flat(overrides))]
        match source:
            case Config():
                layers.append(_layer(_flat(source.model_dump(exclude_unset=True))))
            case None:
                layers.append(_environment())
            case Mapping():
                layers += [_environment(), _layer(_flat(source), substitute=True)]
            case str() | os.PathLike():
                layers += [_environment(), _file(source)]
            case _:
                raise InvalidConfig(f"{source!r:.80} is no configuration", hint="give a path, or a mapping")
        try:
            return cls.model_validate({"layers": layers})
        except ValidationError as error:
            raise _invalid(error, layers) from None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The layers of `load`, the one that wins first. The library's own source for the environment is
        left out: it skips a variable that it does not know."""
        layers = init_settings().pop("layers", [])
        return (*(InitSettingsSource(settings_cls, _nested(layer)) for layer in layers), init_settings)


# The other spellings of a key, those of the reference documents. `wal.cache_capacity` is one more, but what
# it stands for depends on its value.
SPELLINGS = {
    f"{section}.wal_{old}": f"wal.{new}"
    for section in ("storage_engine", "wal")
    for old, new in (
        ("segment_size", "rotate_max_bytes"),
        ("sync_mode", "sync_mode"),
        ("compression", "compression"),
    )
} | {
    "uploader.interval_seconds": "shipping.interval_s",
    "uploader.stream_chunk_size": "tier.part_bytes",
    "uploader.concurrent_parts": "tier.parts_at_once",
    "uploader.max_batch_bytes": "shipping.batch_bytes_max",
    "storage_engine.buffer_pool_size": "engine.pool_bytes_max",
    "storage_engine.checkpoint_interval_secs": "engine.checkpoint_entry_interval_s",
    "storage_engine.checkpoint_max_age_secs": "engine.checkpoint_entry_age_max_s",
    "storage_engine.shipping_interval_secs": "shipping.interval_s",
    "storage_engine.shipping_batch_size": "shipping.batch_segments_max",
    "storage_engine.s3_compression": "wal.compression",
    "storage_engine.s3_bucket": "tier.bucket",
    "storage_engine.s3_prefix": "tier.prefix",
    "storage_engine.s3_regions": "tier.regions",
    "storage_engine.s3_replication_mode": "tier.replication",
    "cloud_reader.enable_ranged_reads": "tier.ranged_reads",
    "cloud.backend": "tier.kind",
    "cloud.root": "tier.root",
    "deleter.check_interval_minutes": "retention.check_interval_s",
    "deleter.retention_time_minutes": "retention.age_max_s",
    "deleter.retention_size_mb": "retention.bytes_max",
}
# What a plain number counts where another spelling ends with its unit.
UNITS = {"_minutes": "min", "_mb": "MiB"}
# The names that the reference documents have for what an S3 store takes.
OPTION_SPELLINGS = {"access_key": "access_key_id", "secret_key": "secret_access_key"}
# All that one of those documents says of storage stands in one section there.
ALL_SECTIONS = "storage"


_OTHER_WORDS = ("yes", "no", "on", "off", "1", "0")


def _only(name: str, allowed: object, why: str) -> Callable[[object], bool]:
    def check(value: object) -> bool:
        if str(value).lower() != name:
            raise ValueError(f"must be {json.dumps(allowed)}: {why}")
        return True

    return check


def _is_off(value: object) -> bool:
    word = str(value).lower()
    if word not in ("true", "false", *_OTHER_WORDS):
        raise ValueError("must be true or false")
    return word in ("false", "no", "off", "0")


def _never(parse: Callable[[object], object]) -> Callable[[object], bool]:
    def check(value: object) -> bool:
        parse(value)
        return False

    return check


NO_COMPACTION = "there is no compaction yet: these keys are not used"
# Keys of the reference documents that have no counterpart: whether things are as a value says (it raises for
# what is no value at all), and what is said where they are not.
ACCEPTED: dict[str, tuple[Callable[[object], bool], str]] = {
    "storage_engine.eviction_policy": (_only("lru", "lru", "there is one policy"), ""),
    "storage_engine.page_size": (_never(parse_bytes), "pages end at boundary keys: this key is not used"),
    "storage_engine.compaction_enabled": (_is_off, NO_COMPACTION),
    "storage_engine.compaction_interval_secs": (_never(parse_some_seconds), NO_COMPACTION),
    "storage_engine.compaction_size_threshold": (_never(parse_bytes), NO_COMPACTION),
    "engine.merge_worker": (_never(_is_off), "changes are merged by whoever flushes: this key is not used"),
    "wal.file_name": (_never(_path), "the files of a log have names of their own: this key is not used"),
    "cloud_reader.fetch_chunk_size": (
        lambda value: parse_bytes(value) == 4 * MIB,
        "4 MiB are fetched at once: this key is not used",
    ),
}
# How much of a variable's name has to be that of a key for it to be taken for a slip.
VARIABLE_IS_CLOSE = 0.9
# What is longer is no configuration: a device has no end.
FILE_BYTES_MAX = 2**20
CACHE_CAPACITY = "wal.cache_capacity"
# What a store takes beside its URI has names of its own below this one.
OPTIONS = "tier.options"
SECTIONS = (
    *("cloud", "cloud.options", "cloud_reader", "deleter", "engine", "retention", "shipping"),
    *("storage", "storage_engine", "tier", OPTIONS, "uploader", "versions", "wal"),
)
KEYS = [
    *(f"wal.{name}" for name in WalConfig.model_fields),
    *(f"engine.{name}" for name in EngineConfig.model_fields),
    *(f"versions.{name}" for name in VersionsConfig.model_fields),
    *(f"tier.{name}" for name in TierConfig.model_fields if name != "options"),
    *(f"shipping.{name}" for name in ShippingConfig.model_fields),
    *(f"retention.{name}" for name in RetentionConfig.model_fields),
]


@dataclass(frozen=True)
class Setting:
    """A value, and what it takes to talk about it: its name and itself as its author wrote them."""

    value: object
    name: str
    written: object
    path: str | None

    def __str__(self) -> str:
        if ".options." in self.name.lower().replace("__", "."):
            return self.name  # what it is set to may be a secret
        written = json.dumps(
            without_secrets(self.written) if isinstance(self.written, str) else self.written, default=str
        )
        return f"{self.name} = {written if len(written) <= 80 else written[:77] + '...'}"


# The settings from one place, by the name of their key.
Layer = dict[str, Setting]

ONE_FORM = (
    "segments lie here as they were written, and in the store in one form, none or zstd, which the log "
    "records so that all replicas make the same bytes: give both one value"
)
HINTS = {
    "tier.regions": 'write each as the URI of a store: "s3://bucket/prefix?region=eu-west-1"',
}


def _layer(
    given: Iterable[tuple[str, object]],
    *,
    path: str | None = None,
    substitute: bool = False,
    spell: Callable[[str], str] = str,
) -> Layer:
    """Settings by their keys, whatever spelling was `given`. `spell` names a key as this place does."""
    layer: Layer = {}
    unused: dict[str, list[str]] = {}
    for spelled, written in given:
        key = _ours(spelled)
        if key in SECTIONS:
            if written != {}:
                raise InvalidConfig(f"{spell(spelled)} is a section, not a value", path=path, hint=HINT)
            continue
        known = (*KEYS, *SPELLINGS, *ACCEPTED, CACHE_CAPACITY)
        if key not in known and not re.fullmatch(rf"{OPTIONS}\.\w+", key):
            nearest = difflib.get_close_matches(spell(spelled), map(spell, known), n=1, cutoff=0)[0]
            raise InvalidConfig(
                f"unknown key {spell(spelled)}", path=path, hint=f"the nearest known key is {nearest}"
            )
        value = _substituted(written, spell(spelled), path) if substitute else written
        unit = next((unit for end, unit in UNITS.items() if key in SPELLINGS and key.endswith(end)), None)
        if unit is not None and re.fullmatch(r"[\d.]+", str(value).strip()):
            value = f"{value} {unit}"
        setting = Setting(value, spell(spelled), written, path)
        if key in ACCEPTED:
            is_so, remark = ACCEPTED[key]
            try:
                if not is_so(value):
                    unused.setdefault(remark, []).append(setting.name)
            except ValueError as error:
                raise InvalidConfig(f"{setting} {error}", path=path, hint=HINT) from None
            continue
        canonical = _cache_key(value) if key == CACHE_CAPACITY else SPELLINGS.get(key, key)
        other = layer.setdefault(canonical, setting)
        if other.value != value:
            hint = ONE_FORM if canonical == "wal.compression" else "keep one of the two"
            raise InvalidConfig(f"{other} and {setting} are one key", path=path, hint=hint)
    for remark, names in unused.items():
        _logger.warning(remark, keys=", ".join(names))
    return layer


def _ours(key: str) -> str:
    """A key without the section around all of them, and with our names for the options of a store."""
    key = key.removeprefix(f"{ALL_SECTIONS}.")
    for options in ("cloud.options.", f"{OPTIONS}."):
        if key.startswith(options):
            name = key.removeprefix(options)
            return f"{OPTIONS}.{OPTION_SPELLINGS.get(name, name)}"
    return key


def _cache_key(value: object) -> str:
    """A plain number is a number of messages, as in the reference plan; with a unit it is a size."""
    plain = re.fullmatch(r"[\d.]+", str(value).strip())
    return "wal.cache_messages_max" if plain else "wal.cache_bytes_max"


def _flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, object]]:
    """Each value with its dotted path. An empty section is a value, so that its name is looked at."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _nested(layer: Layer) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, setting in layer.items():
        *sections, name = key.split(".")
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
        branch[name] = setting.value
    return tree


def _file(path: str | os.PathLike[str]) -> Layer:
    try:
        with Path(path).open("rb") as file:
            text = file.read(FILE_BYTES_MAX + 1)
        if len(text) > FILE_BYTES_MAX:
            raise ValueError("it is far too long")
        tree = tomllib.loads(text.decode())
    except OSError as error:
        raise InvalidConfig(
            f"the configuration cannot be read: {error.strerror}", path=path, hint="check the path"
        ) from None
    except ValueError as error:
        raise InvalidConfig(
            f"the configuration is not TOML: {error}", path=path, hint="correct that place in the file"
        ) from None
    return _layer(_flat(tree), path=os.fspath(path), substitute=True)


def _environment() -> Layer:
    """What the variables of our sections say. Others are left alone: Kubernetes makes some for a service that
    is called as we are."""
    given: list[tuple[str, object]] = []
    for variable, value in sorted(os.environ.items()):
        if not variable.startswith(ENV_PREFIX):
            continue
        key = variable.removeprefix(ENV_PREFIX).lower().replace("__", ".")
        if "." in key and key.partition(".")[0] in SECTIONS:
            given.append((key, value))
            continue
        known = map(_variable, (*KEYS, *SPELLINGS, *ACCEPTED, CACHE_CAPACITY))
        if nearest := difflib.get_close_matches(variable, known, n=1, cutoff=VARIABLE_IS_CLOSE):
            _logger.warning("this variable is not read", variable=variable, nearest=nearest[0])
    return _layer(given, spell=_variable)


def _variable(key: str) -> str:
    return ENV_PREFIX + key.upper().replace(".", "__")


def _substituted(value: object, name: str, path: str | None) -> object:
    """The value with each `${NAME}` replaced from the environment. `$${NAME}` stands for itself."""
    if not isinstance(value, str):
        return value

    def replacement(found: re.Match[str]) -> str:
        if found[0].startswith("$$"):
            return found[0][1:]
        variable = re.fullmatch(r"\$\{(\w+)\}", found[0])
        if variable is None:
            raise InvalidConfig(f"{name} has a broken {found[0]}", path=path, hint="write ${NAME}")
        if variable[1] not in os.environ:
            raise InvalidConfig(
                f"{name} needs the environment variable {variable[1]}, which is not set",
                path=path,
                hint=f"set {variable[1]}, or write $${{{variable[1]}}} for the text itself",
            )
        return os.environ[variable[1]]

    return re.sub(r"\$?\$\{[^}]*\}?", replacement, value)


def _invalid(error: ValidationError, layers: list[Layer]) -> InvalidConfig:
    """Everything that is wrong, in one error."""
    reasons: list[str] = []
    path = None
    hint = HINT
    for problem in error.errors():
        key = ".".join(map(str, problem["loc"]))
        setting = next((layer[key] for layer in layers if key in layer), None)
        reasons.append(f"{setting or f'{key}:'} {_reason(key, problem)}")
        path = path or (setting.path if setting else None)
        hint = HINTS.get(key, hint)
    return InvalidConfig("; ".join(reasons), path=path, hint=hint)


def _reason(key: str, problem: ErrorDetails) -> str:
    context = problem.get("ctx", {})
    match problem["type"]:
        case "value_error":
            return str(context["error"])
        case "literal_error":
            return f"must be one of {context['expected']}"
        case "greater_than":
            return f"must be above {_amount(key, context['gt'])}"
        case "greater_than_equal":
            return f"must be at least {_amount(key, context['ge'])}"
        case "less_than_equal":
            return f"must be at most {_amount(key, context['le'])}"
        case _:
            return problem["msg"]


def _amount(key: str, limit: float) -> str:
    """A limit in the largest unit that it is a whole number of, which is how the documentation has it."""
    if "bytes" in key:
        units = BYTES_PER_UNIT
    elif key.endswith(("_ms", "_s", "_seconds")) and limit:
        units = MILLISECONDS_PER_UNIT
        limit = limit if key.endswith("_ms") else limit * 1000
    else:
        return f"{int(limit):,}"
    size, unit = max((size, unit) for unit, size in units.items() if limit % size == 0)
    return f"{int(limit) // size:,} {unit}"
