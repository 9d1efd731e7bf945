"""Making checkpoints: in the background, in short steps, of a seq that stays readable until it is done.

Always true:
  - every byte that is written is a function of the log: of the rows as of the checkpoint's seq, and of its
    base, which the log names. What is in memory, when pages were flushed, and how often it was begun changes
    nothing;
  - all changes up to the seq are in pages before the first is read, so no change in memory is looked at;
  - a checkpoint is due until it is durable under its name; one that cannot be made is given up, and that is
    said. The one after it, which needs its blocks, has to be a full one;
  - where a page is needed that is away and does not come, it stays due, and is begun again;
  - one that a former life has asked for, or another cluster before this one was cloned, and that rests on one
    which is not here, is given up quietly: nobody waits for it, and the next one is a full one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable

from lowwater.engine.checkpoint.checkpoints import Checkpoints, StoredCheckpoint
from lowwater.engine.checkpoint.content import IsBoundary, blocks_at
from lowwater.engine.checkpoint.packing import Packing
from lowwater.engine.format.blocks import NO_HASH
from lowwater.engine.format.ckpt import Checkpoint, decode_checkpoint, encode_checkpoint
from lowwater.engine.state.due import Due
from lowwater.engine.state.measured import Measured
from lowwater.engine.state.state import State
from lowwater.errors import (
    DataError,
    DiskFull,
    InternalError,
    LowwaterError,
    NotFound,
    ReopenError,
    RetryError,
)
from lowwater.logging import get_logger

_logger = get_logger("checkpoint")

# How many blocks are looked at before others may run.
BLOCKS_AT_ONCE = 16
FAILURES_MAX = 16
_HINT = "the database goes on without it: deal with the cause, and make another checkpoint"


FromArchive = Callable[[int], tuple[bytes, Callable[[bytes], bytes]] | None]
"""The index of the checkpoint of a seq, and what reads its packs."""


class MustWait(Exception):
    """What a checkpoint needs is away, and did not come: it stays due."""

    def __init__(self, error: LowwaterError) -> None:
        super().__init__(error)
        self.error = error


class Checkpointer:
    def __init__(
        self,
        state: State,
        checkpoints: Checkpoints,
        *,
        flush_to: Callable[[int], bool],
        begins_list: Callable[[], IsBoundary],
        cluster_id: Callable[[int], bytes],
        needed: Callable[[], Iterable[int]],
        from_archive: FromArchive,
        redone_seq: int,
        measured: Measured,
    ) -> None:
        """`flush_to(seq)` does a step towards having everything up to there in pages; False when it is.
        `needed()` says which checkpoints are kept although there are newer ones, `from_archive(seq)` reads
        one that is not here, None where nobody has it. The entries up to `redone_seq` are of former lives."""
        self._state = state
        self._checkpoints = checkpoints
        self._flush_to = flush_to
        self._begins_list = begins_list
        self._cluster_id = cluster_id
        self._needed = needed
        self._from_archive = from_archive
        self._redone_seq = redone_seq
        self._measured = measured
        # Bases that are damaged where they would come from: the next checkpoint has to do without.
        self.unreadable: set[int] = set()
        self._job: Generator[None, None, None] | None = None
        self._due: Due | None = None
        self._began_s = 0.0
        self.is_closed = False
        # Why the last ones were given up, by seq.
        self.failures: dict[int, LowwaterError] = {}
        self.made = self.brought = 0
        self.rows_written = 0

    def step(self) -> bool:
        """One short piece of work. False where there is none."""
        if self.is_closed:
            return False
        due = next(iter(self._state.checkpoints_due), None)
        if due is None or due != self._due:
            self.stop()
            self._due = due
            self._began_s = self._state.now_s()
        if due is None:
            return False
        if self._job is None:
            try:
                if self._flush_to(due.seq):
                    return True
            except MustWait as wait:
                if isinstance(wait.error, RetryError):
                    raise
                self._give_up(due, wait.error)
                return True
            self._job = self._make(due)
        try:
            next(self._job)
        except StopIteration:
            self._end(due)
        except DiskFull as error:
            self._give_up(due, error)
        except RetryError as error:
            self.stop()
            raise MustWait(error) from error
        except LowwaterError as error:
            self._give_up(due, error)
        except Exception as error:  # noqa: BLE001 — the database goes on without this checkpoint
            failure = InternalError(f"a checkpoint could not be made: {error!r}", seq=due.seq)
            failure.__cause__ = error
            self._give_up(due, failure)
        return True

    def close(self) -> None:
        """Write nothing more: what is under way is begun again in the next life."""
        self.is_closed = True
        self.stop()

    def stop(self) -> None:
        if self._job is not None:
            self._job.close()
            self._job = None

    def _end(self, due: Due) -> None:
        self._job = self._due = None
        self._state.remove_due(due.seq)

    def _give_up(self, due: Due, error: LowwaterError) -> None:
        if self._checkpoints.of(due.seq) is not None:
            _logger.warning("old checkpoints were not removed", error=str(error))
            self._end(due)
            return
        has_base = self._checkpoints.of(due.base_seq) is not None or due.base_seq in self.unreadable
        is_nobodys = isinstance(error, NotFound) and due.seq <= self._redone_seq and not has_base
        tell = _logger.info if is_nobodys else _logger.warning
        tell("a checkpoint was given up", seq=due.seq, error=str(error))
        if isinstance(error, ReopenError | DiskFull):
            error.hint = _HINT
        while len(self.failures) >= FAILURES_MAX:
            del self.failures[next(iter(self.failures))]
        self.failures[due.seq] = error
        self._end(due)
        try:
            for _ in self._thin_out():
                pass  # what was written for it takes room that others need
        except LowwaterError:
            pass  # the next one that is made tries again

    # ------------------------------------------------------------------ one checkpoint

    def _make(self, due: Due) -> Generator[None, None, None]:
        if self._checkpoints.of(due.seq) is None:
            base = None
            if due.base_seq:
                base = self._checkpoints.of(due.base_seq)
                if base is None:
                    base = yield from self._bring(due.base_seq)
                if base is None:
                    raise NotFound(
                        f"the checkpoint of {due.base_seq}, of which this one needs the blocks, is not here",
                        seq=due.seq,
                        hint="make a full checkpoint",
                    )
            self._checkpoints.begin()
            packing = Packing(self._checkpoints.write_pack, base, self._begins_list())
            for count, each in enumerate(blocks_at(self._state, due.seq, base=base, with_changes=False)):
                if each is not None:
                    yield from packing.add(each)
                if each is None or count % BLOCKS_AT_ONCE == 0:
                    yield
            lists, packs = yield from packing.finish()
            self.rows_written += packing.rows_written
            index = Checkpoint(
                seq=due.seq,
                time_us=due.time_us,
                cluster_id=self._cluster_id(due.seq),
                base_seq=due.base_seq,
                base_hash=NO_HASH if base is None else base.file_hash,
                row_count=packing.row_count,
                block_count=packing.block_count,
                lists=lists,
                packs=packs,
                control=due.control,
            )
            data = encode_checkpoint(index)
            stored = yield from self._checkpoints.write_index(due.seq, data)
            self.made += 1
            duration_s = self._state.now_s() - self._began_s
            self._measured.checkpoint_duration.observe(duration_s)
            _logger.info(
                "checkpoint made",
                path=stored.path,
                seq=due.seq,
                base_seq=due.base_seq,
                rows=packing.row_count,
                rows_written=packing.rows_written,
                bytes=packing.bytes_written + len(data),
                duration_s=round(duration_s, 3),
            )
        yield from self._thin_out()

    def _bring(self, seq: int) -> Generator[None, None, StoredCheckpoint | None]:
        """Bring a checkpoint here from the archive, as in a directory that was restored. Then what comes next
        need not be written, and shipped, as a whole. Return None where the archive does not have it."""
        try:
            found = self._from_archive(seq)
            if found is None:
                return None
            data, read_pack = found
            self._checkpoints.begin()
            yield
            for pack in decode_checkpoint(data).packs:
                if not self._checkpoints.has_pack(pack):
                    written = yield from self._checkpoints.write_pack([read_pack(pack)])
                    assert written == pack
                yield
        except (DataError, NotFound):
            self.unreadable.add(seq)
            raise
        self.brought += 1
        return (yield from self._checkpoints.write_index(seq, data))

    def _thin_out(self) -> Generator[None, None, None]:
        """Remove what neither a reader nor a checkpoint to come needs."""
        bases = [due.base_seq for due in self._state.checkpoints_due]
        return self._checkpoints.thin_out([*bases, self._state.base_seq, *self._needed()])
