"""The log: append, read, follow, seal, check. What the engine, and anybody else, uses of this folder.

Always true: a `Log` is the only writer of its directory; `append` returns when its entries are durable.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from prometheus_client import CollectorRegistry

from lowwater.engine.format import format
from lowwater.engine.format.entries import Control, Entry, Writable, check_payload
from lowwater.engine.format.format import Flag, Kind
from lowwater.engine.format.moments import time_us_of
from lowwater.engine.log.chain import (
    Chain,
    Creation,
    LogSettings,
    create_entry,
    seal_entry,
    settings_entry,
    update_settings,
)
from lowwater.engine.log.check import Finding, check_directory_steps, require_log
from lowwater.engine.log.directory import local_path
from lowwater.engine.log.ownership import read_owner
from lowwater.engine.log.reader import ColdSource, entries_of, read_chunks, seq_before_time
from lowwater.engine.log.ring import Chunk
from lowwater.engine.log.wal import Build, Wal, WalOptions
from lowwater.engine.log.walk import steady_names
from lowwater.engine.seams.interrupts import is_in_handler
from lowwater.engine.seams.memory import MemoryFiles
from lowwater.engine.seams.real import RealClock, RealFiles, RealRandomness, ThreadRunner
from lowwater.engine.seams.seams import Clock, Files, Randomness, Runner
from lowwater.errors import (
    InputError,
    InvalidConfig,
    LogDivergence,
    NotFound,
    OutOfOrderSeq,
    ReopenError,
    RepeatedSeq,
    VersionGone,
)
from lowwater.logging import get_logger
from lowwater.metrics import LogMetrics

if TYPE_CHECKING:
    from lowwater.config import Config, WalConfig

_logger = get_logger("log")

Ack = Literal["durable", "memory"]
Start = Literal["earliest", "latest"] | int | datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class LogOptions(WalOptions):
    """How this process writes, and how a log that it creates is cut.

    The settings of an existing log are in its entries, so these are used for a new one only. Those in
    `wanted` are an exception: where the log has something else, what was asked for becomes an entry.
    """

    segment_bytes: int = format.SEGMENT_BYTES_DEFAULT
    block_bytes: int = format.BLOCK_BYTES_DEFAULT
    compression: Literal["none", "zstd"] = "zstd"
    before_images: bool = False
    # Seal what is older than this, so that it can be shipped; None leaves it to the size.
    segment_age_max_s: float | None = None
    wanted: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        WalOptions.__post_init__(self)
        if self.compression not in ("none", "zstd"):
            raise InvalidConfig(f"compression is {self.compression!r:.80}", hint="give none or zstd")
        if self.segment_age_max_s is not None and not 0 < self.segment_age_max_s < 10**9:
            raise InvalidConfig(
                f"segment_age_max_s is {self.segment_age_max_s!r:.80}", hint="give seconds above 0, or None"
            )
        changes = {"segment_bytes": self.segment_bytes, "block_bytes": self.block_bytes}
        update_settings(LogSettings(), changes)

    @classmethod
    def from_config(cls, config: WalConfig) -> LogOptions:
        names = {
            "rotate_max_bytes": "segment_bytes",
            "compression": "compression",
            "before_images": "before_images",
        }
        values = {
            "segment_bytes": config.rotate_max_bytes,
            "compression": format.Compression[config.compression.upper()].value,
            "before_images": int(config.before_images),
        }
        return cls(
            wanted={names[key]: values[names[key]] for key in names if key in config.model_fields_set},
            sync_mode=config.sync_mode,
            batch_bytes_max=config.fsync_max_batch_bytes,
            queue_bytes_max=config.queue_bytes_max,
            ring_bytes_max=config.cache_bytes_max,
            ring_frames_max=config.cache_messages_max,
            entry_bytes_max=config.entry_bytes_max,
            sync_interval_ms=config.fsync_interval_ms,
            gather_ms=config.fsync_interval_ms,
            segment_bytes=config.rotate_max_bytes,
            compression=config.compression,
            before_images=config.before_images,
            segment_age_max_s=config.rotate_max_seconds,
        )


@dataclass(frozen=True, slots=True)
class Seams:
    """Where the log gets files, time, randomness and threads from."""

    files: Files = field(default_factory=RealFiles)
    clock: Clock = field(default_factory=RealClock)
    randomness: Randomness = field(default_factory=RealRandomness)
    runner: Runner = field(default_factory=ThreadRunner)
    owner: str = ""


def new_create_entry(
    options: LogOptions, randomness: Randomness, cluster_id: bytes | None = None
) -> Writable:
    """Return the first entry of a new log. The log gets a new id, or `cluster_id`."""
    defaults: dict[str, Any] = {
        "segment_bytes": (options.segment_bytes, format.SEGMENT_BYTES_DEFAULT),
        "block_bytes": (options.block_bytes, format.BLOCK_BYTES_DEFAULT),
        "compression": (
            format.Compression[options.compression.upper()].value,
            format.Compression.ZSTD.value,
        ),
        "before_images": (int(options.before_images), 0),
    }
    settings = {name: value for name, (value, default) in defaults.items() if value != default}
    return create_entry(cluster_id or randomness.token(16), randomness.token(16), settings)


def _metrics_in(registry: CollectorRegistry) -> LogMetrics:
    """Before anything is made: a registry shows one log at a time."""
    try:
        return LogMetrics(registry)
    except ValueError as error:
        raise InputError(
            "this registry has the metrics of another log",
            hint="give each open log a registry of its own",
        ) from error


class Log:
    """An append-only, checksummed, segmented log in one directory."""

    def __init__(
        self,
        wal: Wal,
        seams: Seams,
        options: LogOptions,
        registry: CollectorRegistry,
        metrics: LogMetrics,
    ) -> None:
        """Use `Log.open`."""
        self.registry = registry
        wal.watch(registry, metrics)
        self._wal = wal
        self._seams = seams
        self._options = options
        self._cold: ColdSource | None = None
        self._age_task = None
        self._ending = threading.Lock()
        self._closes_aside = False
        if options.segment_age_max_s is not None:
            self._age_task = seams.runner.start("log-age", self._age_step)
            self._age_task.wake()

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str] | None,
        *,
        config: str | os.PathLike[str] | Mapping[str, Any] | Config | None = None,
        options: LogOptions | None = None,
        registry: CollectorRegistry | None = None,
        seams: Seams | None = None,
        create: bool | Writable | None = True,
        durable_seq: int = 0,
    ) -> Log:
        """Open the log in `directory`, or make one there; None keeps it in memory.

        `config` is a TOML file, a mapping or a `Config`, of which the section `wal` counts; `options` says
        the same in code. `registry` is where the log's metrics go; without one it makes its own.

        A new log gets an id of its own. Give its `create` entry as `create` to choose its cluster id. With
        `create=None` the new log stays empty until somebody appends that entry. With `create=False` an empty
        directory is refused.
        """
        if config is not None:
            if options is not None:
                raise InputError("the log got a config and options", hint="give one of the two")
            options = LogOptions.from_config(_load(config).wal)
        options = options or LogOptions()
        if seams is None:
            files: Files = MemoryFiles() if directory is None else RealFiles()
            seams = Seams(files=files, owner=f"process {os.getpid()}")
        path = "memory" if directory is None else local_path(directory)
        if create is False:
            require_log(seams.files, path)
        registry = registry or CollectorRegistry()
        metrics = _metrics_in(registry)
        try:
            wal = Wal(
                seams.files,
                path,
                clock=seams.clock,
                runner=seams.runner,
                owner=seams.owner,
                options=options,
                durable_seq=durable_seq,
            )
        except BaseException:
            registry.unregister(metrics)
            raise
        try:
            log = cls(wal, seams, options, registry, metrics)
        except BaseException:
            wal.close()
            raise
        if wal.chain.is_empty:
            try:
                if create:
                    first = new_create_entry(options, seams.randomness) if create is True else create
                    wal.append(log._build([first]), urgent=True)
            except BaseException:
                log.close()
                raise
        elif config is not None and read_owner(seams.files, path) is None:
            try:
                if (change := wanted_settings(wal.chain, options)) is not None:
                    wal.append(log._build([change]), urgent=True)
            except BaseException:
                log.close()
                raise
        if wal.torn_bytes:
            _logger.warning("removed a write that a crash had torn", path=path, bytes=wal.torn_bytes)
        return log

    # ------------------------------------------------------------------ where it stands

    @property
    def directory(self) -> str:
        return self._wal.directory

    @property
    def seq_first(self) -> int:
        """The lowest seq that is here; 0 for an empty log."""
        with self._wal.lock:
            return self._wal.store.seq_first

    @property
    def seq_before_first(self) -> int:
        """The seq before the lowest that is here: 0 unless the log's beginning was purged."""
        with self._wal.lock:
            return self._wal.store.seq_before_first

    @property
    def seq_last(self) -> int:
        """The last seq that was ordered; it may not be durable yet."""
        return self._wal.chain.seq_last

    @property
    def seq_durable(self) -> int:
        return self._wal.durable_seq

    @property
    def chain(self) -> Chain:
        """Where the log stands, with its cluster id, epoch and settings."""
        return self._wal.chain

    def cluster_id_at(self, seq: int) -> bytes:
        """Return whose log it was at an entry that is here, or at the first one that is. A `fork` may name
        another owner."""
        with self.wal.lock:
            segment = self.wal.store.segment_after(seq - 1)
        return self.chain.cluster_id if segment is None else segment.header.cluster_id

    @property
    def creation(self) -> Creation | None:
        """What the log's first entry says, such as its salt. None where the segment with it was purged."""
        return self._wal.chain.creation

    @property
    def torn_bytes(self) -> int:
        """How many bytes opening removed of a batch that a crash had torn. None of it was ever
        acknowledged."""
        return self._wal.torn_bytes

    @property
    def wal(self) -> Wal:
        return self._wal

    # ------------------------------------------------------------------ appending

    def append(self, *entries: Writable, ack: Ack = "durable", timeout_s: float | None = None) -> int:
        """Append entries, and return the seq of the last once all are durable (or, with `ack="memory"`, at
        once). The entries get the next seqs, and the time at which they were ordered."""
        build = self._build(entries)
        if ack == "memory":
            return self._wal.enqueue(build, timeout_s=timeout_s)[-1].seq_last
        return self._wal.append(build, timeout_s=timeout_s)

    def append_group(self, *entries: Writable, timeout_s: float | None = None) -> int:
        """Append entries as an atomic group: after a crash all of them are there, or none."""

        def build(chain: Chain) -> tuple[None, list[bytes]]:
            time_us = max(self._seams.clock.now_us(), chain.time_us)
            # Beyond the last seq of all there is nothing to pack; the writer refuses it.
            group_seq_last = min(chain.seq_last + len(entries), format.SEQ_MAX)
            return None, [_in_group(entry.encode(time_us), group_seq_last) for entry in entries]

        return self._wal.append(build, timeout_s=timeout_s)

    def submit(self, *entries: Writable, timeout_s: float | None = None) -> Future[int]:
        """Append entries, and return a future of the last seq. Block only while the queue is full."""
        return self._wal.submit(self._build(entries), timeout_s=timeout_s)

    async def append_async(self, *entries: Writable) -> int:
        """Append entries from a coroutine, and return the last seq. A cancelled append may still be
        written."""
        return await self._wal.append_async(self._build(entries))

    def _build(self, entries: Sequence[Writable]) -> Build:
        def build(chain: Chain) -> tuple[None, list[bytes]]:
            time_us = max(self._seams.clock.now_us(), chain.time_us)
            return None, [entry.encode(time_us) for entry in entries]

        return build

    def append_payloads(
        self,
        payloads: Sequence[bytes],
        *,
        seqs: Sequence[int] | None = None,
        trusted: bool = False,
        timeout_s: float | None = None,
    ) -> int:
        """Append entries that are encoded already, with the seqs that somebody else has given them.

        Each payload is decoded first, unless they are `trusted`: all made by `encode` in this process.
        """
        build = _given(payloads, seqs, trusted=trusted)
        try:
            return self._wal.append(build, timeout_s=timeout_s)
        except OutOfOrderSeq as error:
            self._explain(error, seqs, payloads)
            raise

    def submit_payloads(
        self,
        payloads: Sequence[bytes],
        *,
        seqs: Sequence[int] | None = None,
        trusted: bool = False,
        timeout_s: float | None = None,
    ) -> Future[int]:
        """Append entries that are encoded already, and return a future of the last seq. Block only while the
        queue is full."""
        build = _given(payloads, seqs, trusted=trusted)
        try:
            return self._wal.submit(build, timeout_s=timeout_s)
        except OutOfOrderSeq as error:
            self._explain(error, seqs, payloads)
            raise

    def append_payloads_async(
        self, payloads: Sequence[bytes], *, seqs: Sequence[int] | None = None, trusted: bool = False
    ) -> Coroutine[Any, Any, int]:
        """Append entries that are encoded already from a coroutine, and return the last seq."""
        build = _given(payloads, seqs, trusted=trusted)
        return self._wal.append_async(build) if seqs is None else self._append_given(build, payloads, seqs)

    async def _append_given(self, build: Build, payloads: Sequence[bytes], seqs: Sequence[int]) -> int:
        try:
            return await self._wal.append_async(build)
        except OutOfOrderSeq as error:
            await asyncio.to_thread(self._explain, error, seqs, payloads)
            raise

    def _explain(self, error: OutOfOrderSeq, seqs: Sequence[int] | None, payloads: Sequence[bytes]) -> None:
        """Say what the log has at seqs that are not above the last: the same entries, others, or none."""
        if seqs is None:
            return
        self.sync()
        repeated = 0
        for seq, payload in zip(seqs, payloads, strict=True):
            held = self.payload_at(seq) if seq <= self.seq_durable else None
            if held is None:
                continue
            if not _is_same(payload, held):
                raise LogDivergence(
                    f"seq {seq} is in the log with other content", seq=seq, path=self.directory
                ) from error
            repeated += 1
        # Where some are missing there is something left to do, and the error says that the order is wrong.
        if repeated == len(seqs):
            raise RepeatedSeq(
                f"seq {error.seq} is in the log already", seq=error.seq, path=self.directory
            ) from error

    def seal(self) -> int:
        """End the current segment, and return the last seq. An empty segment cannot end."""

        def build(chain: Chain) -> tuple[None, list[bytes]]:
            if not chain.body_bytes:
                raise NotFound("there is no segment to seal", hint="append something first")
            return None, [seal_entry(chain.seq_first).encode(max(self._seams.clock.now_us(), chain.time_us))]

        return self._wal.append(build)

    def sync(self) -> int:
        """Wait until everything that was appended is durable, and return the last durable seq."""
        return self._wal.sync()

    def seal_wait_s(self, age_max_s: float) -> float:
        """Return how many seconds it takes until the current segment's first frame is `age_max_s` old; at
        most that."""
        opened_us = self._wal.store.opened_us
        if opened_us is None:
            return age_max_s
        return min(age_max_s - (self._seams.clock.now_us() - opened_us) / 1e6, age_max_s)

    def _age_step(self) -> float | None:
        """Seal the current segment when its first frame is too old."""
        age_max_s = self._options.segment_age_max_s
        assert age_max_s is not None
        if (wait_s := self.seal_wait_s(age_max_s)) > 0:
            return wait_s
        try:
            self.seal()
        except (NotFound, ReopenError):
            pass  # somebody else sealed it, or the log takes no more writes
        return age_max_s

    # ------------------------------------------------------------------ reading

    def read(self, start: Start = "earliest", *, follow: bool = False) -> Iterator[Entry]:
        """Return the durable entries from `start` on: a seq, "earliest", "latest", or a time.

        Without `follow` it ends with what is durable now. With it, it waits for more until the log closes.
        """
        seq = self._seq_before(start)
        seq_stop = None if follow else self._wal.durable_seq
        chunks = read_chunks(self._wal, seq, seq_stop=seq_stop, cold=self._cold)
        return entries_of(chunks, seq, seq_stop, self.directory)

    def read_chunks(self, start: Start = "earliest", *, follow: bool = False) -> Iterator[Chunk]:
        """Return what `read` returns in chunks of frames, for callers that decode them. The first chunk may
        begin before `start`."""
        seq = self._seq_before(start)
        seq_stop = None if follow else self._wal.durable_seq
        return read_chunks(self._wal, seq, seq_stop=seq_stop, cold=self._cold)

    def set_cold_source(self, cold: ColdSource | None) -> None:
        """Set where entries and large values come from that the directory no longer holds."""
        self._cold = cold

    @property
    def cold_source(self) -> ColdSource | None:
        return self._cold

    def purge(self, seq: int) -> int:
        """Remove the segments that hold nothing above `seq`, all but the newest. Return the seq up to which
        entries are gone. The caller has to know that they are elsewhere, and that no page needs them."""
        return self._wal.purge(seq)

    def _seq_before(self, start: Start) -> int:
        if start == "earliest":
            if self._cold is not None:
                return 0
            return self.seq_before_first
        if start == "latest":
            return self._wal.durable_seq
        if isinstance(start, datetime):
            return seq_before_time(self._wal, time_us_of(start), self._cold)
        if isinstance(start, int) and not isinstance(start, bool) and 0 <= start <= format.SEQ_MAX:
            return max(start - 1, 0)
        raise InputError(
            f"cannot start at {start!r:.80}", hint='give "earliest", "latest", a seq, or a datetime'
        )

    def seq_at_us(self, time_us: int) -> int:
        """Return the last durable seq whose time is not after `time_us`. Raise VersionGone where there is
        none, or where it cannot be told because what is here begins later."""
        seq = seq_before_time(self._wal, time_us + 1, self._cold) if time_us >= 0 else 0
        if not seq or (
            seq == self.seq_before_first and time_us < self._time_before_first() and not self._cold
        ):
            raise VersionGone(
                "what is here begins after that time",
                seq=seq + 1,
                hint="give a later time; `lowwater log inspect` shows when the log begins",
            )
        return seq

    def _time_before_first(self) -> int:
        """The time of the last entry that is not here any more; 0 where none is missing."""
        with self._wal.lock:
            return self._wal.store.time_before_first

    def payload_at(self, seq: int) -> bytes | None:
        """Return the payload of the frame with this seq; None where it is a hole, or cannot be read
        any more, from here or from the archive."""
        try:
            for chunk in read_chunks(
                self._wal, seq - 1, seq_stop=min(seq, self._wal.durable_seq), cold=self._cold
            ):
                at = chunk.start
                while at < chunk.end:
                    found, length, _ = format.FRAME.unpack_from(chunk.data, at)
                    if found == seq:
                        return chunk.data[at + format.FRAME_BYTES : at + format.FRAME_BYTES + length]
                    if found > seq:
                        return None
                    at += format.FRAME_BYTES + length
        except NotFound:
            pass
        return None

    # ------------------------------------------------------------------ the rest

    def check(self) -> Iterator[Finding]:
        """Verify everything that is durable here, byte for byte, and yield the findings. No findings mean
        that it is sound."""
        self.sync()
        files = self._seams.files
        with self._wal.lock:
            names = steady_names(files, self.directory)
            view = self._wal.store.open_current(files)
        try:
            for step in check_directory_steps(files, self.directory, names=names, current=view):
                if isinstance(step, Finding):
                    yield step
        finally:
            if view is not None:
                view[0].close()

    def close(self) -> None:
        """Write and sync what was queued, and let the directory go. In a signal handler that has interrupted
        another call, the log is closed in the background, and the program does not end before that."""
        runner = self._seams.runner
        if not is_in_handler():
            runner.apart(self._close)
        elif not self._closes_aside:
            # Of two signals in a row the second handler may have interrupted the first one in here.
            self._closes_aside = True
            try:
                runner.start_call("close", self.close)
            except BaseException:
                self._closes_aside = False
                raise

    def _close(self) -> None:
        with self._ending:  # whoever comes second returns when it is closed
            if self._age_task is not None:
                self._age_task.stop()
            self._wal.close()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def wanted_settings(chain: Chain, options: LogOptions) -> Control | None:
    """Return the entry that gives a log the settings that were asked for; None where it has them."""
    changes = {
        name: value for name, value in options.wanted.items() if getattr(chain.settings, name) != value
    }
    return settings_entry(changes) if changes else None


def _load(config: str | os.PathLike[str] | Mapping[str, Any] | Config) -> Config:
    from lowwater.config import Config  # pydantic takes longer to import than all the rest

    return Config.load(config)


def _given(payloads: Sequence[bytes], seqs: Sequence[int] | None, *, trusted: bool) -> Build:
    if not trusted:
        if not isinstance(payloads, Sequence) or not isinstance(seqs, Sequence | None):
            raise InputError("payloads and seqs are lists", hint="make a list of what you have")
        for payload in payloads:
            check_payload(payload)
    return lambda _: (seqs, payloads)


def _is_same(payload: bytes, held: bytes) -> bool:
    """Whether a frame holds what was delivered: its time was raised where it lay before that of others."""
    time = format.TIME_SLICE
    return (
        payload[: time.start] == held[: time.start]
        and payload[time.stop :] == held[time.stop :]
        and int.from_bytes(payload[time], "little") <= int.from_bytes(held[time], "little")
    )


def _in_group(payload: bytes, group_seq_last: int) -> bytes:
    """The payload with the group's last seq. Only for plain entries, which have no groups of their own."""
    kind, flags, *lengths, time_us, origin = format.FIXED.unpack_from(payload)
    if flags or kind >= Kind.CREATE:
        raise InputError("a group takes plain data entries only", hint="append this entry on its own")
    fixed = format.FIXED.pack(kind, Flag.GROUP, *lengths, time_us, origin)
    return fixed + format.U64.pack(group_seq_last) + payload[format.FIXED_BYTES :]
