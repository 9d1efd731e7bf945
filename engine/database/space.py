"""Room on the disk: writes are refused while there is still some, so that nothing ever fails for want of it.

The log may lie on one file system, and pages, checkpoints and the cache on another. The one that has less
left decides.

Always true:
  - what is kept back is for what must go on: recovery, the pages of changes that are in memory, checkpoints,
    and the control entries without which nothing could be shipped and purged;
  - a refusal has no effect and poisons nothing. Whoever tries again when there is room, succeeds;
  - the file system is asked before what was written since it was asked last can have taken more than a
    part of what was left.
"""

from __future__ import annotations

from collections.abc import Callable

from lowwater.engine.log.directory import typed_errors
from lowwater.engine.seams.seams import Clock, Files
from lowwater.errors import DiskFull

# The file system is asked again after so many bytes, or a part of what is left, and after so long: others
# write to it too.
ASK_AFTER_BYTES = 64 * 2**20
ASK_AFTER_PARTS = 4
ASK_AFTER_S = 1.0
# Retention begins to make room when so much is left, in reserves.
TIGHT_RESERVES = 2
# Where nothing is kept back, room is short all the same before there is none.
SHORT_BYTES = 64 * 2**20


def kept_free_bytes(reserve_bytes: int) -> int:
    """What whoever can do without leaves free: then retention has nothing to make room for."""
    return TIGHT_RESERVES * (reserve_bytes or SHORT_BYTES)


class Space:
    """`written` counts the bytes of log so far, `owed` is what changes in memory will take once they are in
    pages. `on_full` makes what room it can before writes are refused, and says whether more may follow."""

    def __init__(
        self,
        files: Files,
        *,
        log_directory: str,
        data_directory: str,
        reserve_bytes: int,
        clock: Clock,
        written: Callable[[], int],
        owed: Callable[[], int],
        on_full: Callable[[], bool],
    ) -> None:
        self._files = files
        self._log_directory = log_directory
        self._data_directory = data_directory
        self._reserve_bytes = reserve_bytes
        self._clock = clock
        self._written = written
        self._owed = owed
        self._on_full = on_full
        self._ask_at_bytes = 0
        self._ask_at_s = 0.0

    def left_bytes(self) -> int:
        """What may be written before writes are refused; below 0, what is missing until they go on."""
        return self._tightest()[0]

    def _tightest(self) -> tuple[int, str]:
        """What is left where least is left, and where that is. Both on one file system make it the pages',
        which are still to be written."""
        log_bytes = self._room(self._log_directory) - self._reserve_bytes
        data_bytes = self._room(self._data_directory) - self._reserve_bytes - self._owed()
        return min((data_bytes, self._data_directory), (log_bytes, self._log_directory))

    def _room(self, directory: str) -> int:
        with typed_errors(directory, "ask how much room there is"):
            return self._files.room(directory)

    @property
    def is_tight(self) -> bool:
        """Whether it is time to make room."""
        return self.left_bytes() < kept_free_bytes(self._reserve_bytes) - self._reserve_bytes

    def require(self) -> None:
        """Before a write that may not use the reserve. Raises DiskFull."""
        written = self._written()
        if written < self._ask_at_bytes and self._clock.monotonic() < self._ask_at_s:
            return
        left_bytes, directory = self._tightest()
        if left_bytes <= 0 or (not self._reserve_bytes and self.is_tight):
            may_follow = self._on_full()
            left_bytes, directory = self._tightest()
        if left_bytes <= 0 and self._reserve_bytes:
            self._ask_at_bytes = 0
            purged = ", or wait until shipped segments were purged" if may_follow else ""
            raise DiskFull(
                f"the disk is full but for {self._reserve_bytes:,} bytes that are kept back",
                path=directory,
                hint=f"free {-left_bytes + 1:,} bytes{purged}: nothing was written, and writes go on by "
                "themselves",
            )
        self._ask_at_bytes = written + min(ASK_AFTER_BYTES, max(0, left_bytes) // ASK_AFTER_PARTS)
        self._ask_at_s = self._clock.monotonic() + ASK_AFTER_S
