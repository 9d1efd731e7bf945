"""What an archive has come to, one numbered state after the other: who may write, and which manifest counts.

Always true:
  - states have no gaps, and none is ever written over: whoever finds the next number taken has to read what
    that says before it writes the one after it. So of two that claim, or publish, one is first, and the other
    knows it;
  - epochs and manifests only grow from one to the next;
  - that there is no later one is known from a request for its name. A list is a hint where to begin.

An archive that only older versions of Lowwater have shipped to has none; what counts in it, lists say.
"""

from __future__ import annotations

from collections.abc import Iterator

from lowwater.errors import (
    Corrupt,
    DataError,
    LowwaterError,
    NewerVersion,
    NotFound,
    StoreCorrupt,
    StoreUnavailable,
)
from lowwater.logging import get_logger
from lowwater.tiering.names import listed_manifests, listed_state, place_of, state_name
from lowwater.tiering.objects import HINT, ArchiveState, decode_state
from lowwater.tiering.store import Store, at, is_there, read_small

_logger = get_logger("archive")

# So many in a row may be damaged before nothing is believed to be there.
PASSED_OVER_MAX = 100
# Nobody has written so many.
NUMBER_MAX = 10**12


class States:
    """The states in one store. Not for several threads at once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.number = 0
        """The number of the newest state when somebody last looked, or wrote one; 0 where there is none."""
        self.seen: ArchiveState | None = None
        """What the state of this number says."""

    def newest(self) -> ArchiveState | None:
        self._go_to(self._last_after(self.number or self._hinted()))
        return self.seen

    def append(self, cluster_id: bytes, epoch: int, claim: str, manifest: str) -> bool:
        """Write what follows the state that was seen. False where somebody else has written another one
        there: the newest one is what was seen then. Raises StoreCorrupt where the store has not what was
        written; whoever calls again writes the one after it, for others may have passed this one over."""
        before = self.seen
        state = ArchiveState(cluster_id, self.number + 1, epoch, claim, manifest)
        if before is not None:
            assert before.epoch <= epoch, "epochs only grow"
            assert before.place <= state.place, "manifests only grow"
        data = state.encode()
        if self._store.write(state_name(state.number), [data], size=len(data)) and self._is_kept(state):
            self.number, self.seen = state.number, state
            return True
        number = self.number
        self.newest()
        if self.number == number:
            raise StoreUnavailable(
                "the store keeps a name that is taken, and has no object of it",
                path=at(self._store.uri, state_name(state.number)),
                hint="look at the store",
            )
        return self.seen == state

    def _is_kept(self, state: ArchiveState) -> bool:
        """False where another one has come in its place, in a store that cannot keep a name."""
        try:
            return self.read(state.number) == state
        except (DataError, NewerVersion, NotFound) as error:
            raise StoreCorrupt(
                f"a state is not what was written: {error.message}",
                path=at(self._store.uri, state_name(state.number)),
                hint="the next one takes its place; where this comes back, look at the network, and do not "
                "trust the store",
            ) from None

    def read(self, number: int) -> ArchiveState:
        name = state_name(number)
        try:
            state = decode_state(read_small(self._store, name))
            if state.number != number:
                raise Corrupt("this state has another number than its name says", hint=HINT)
        except LowwaterError as error:
            error.path = at(self._store.uri, name)
            raise
        return state

    def down_from(self, number: int) -> Iterator[ArchiveState]:
        """Yield the states that can be read, from this number on down. Pass over what is damaged or gone."""
        for each in range(number, max(0, number - PASSED_OVER_MAX), -1):
            try:
                yield self.read(each)
            except (DataError, NotFound) as error:
                _logger.warning("a state of the archive is damaged", path=error.path, error=str(error))

    def fill(self, cluster_id: bytes, first: int) -> None:
        """Write those that are gone from `first` on: they say again what the one before them says."""
        before = next(self.down_from(first - 1), None) or ArchiveState(cluster_id, 0, 1, "", "")
        for number in range(first, self.number):
            if self._is_there(number):
                before = next(self.down_from(number), before)
            else:
                data = before._replace(number=number).encode()
                self._store.write(state_name(number), [data], size=len(data))

    def _go_to(self, number: int) -> None:
        """Where the newest is damaged, the one before it goes on. What the damaged one said is not lost with
        it: its claim and its manifest are objects that lists show, and the next state says it again."""
        if number != self.number or (number and (self.seen is None or self.seen.number != number)):
            self.number, self.seen = number, next(self.down_from(number), None)

    def _hinted(self) -> int:
        number = listed_state(self._store)
        return number if number and self._is_there(number) else 0

    def _last_after(self, number: int) -> int:
        """The last one that is there, where `number` is: in few requests, however many follow."""
        step = 1
        while self._is_there(number + step):
            number, step = number + step, 2 * step
            if number > NUMBER_MAX:
                raise StoreCorrupt(
                    "the store says of every name that it is there",
                    path=self._store.uri,
                    hint="look at the store",
                )
        beyond = number + step
        while beyond - number > 1:
            middle = (number + beyond) // 2
            if self._is_there(middle):
                number = middle
            else:
                beyond = middle
        return number

    def _is_there(self, number: int) -> bool:
        return is_there(self._store, state_name(number))


def newest_manifests(store: Store, states: States) -> list[str]:
    """The manifest that counts, none where nothing was published. Several of one entry are a fault.

    A list may show one that no state names yet: its publisher has ended between the two, or is an older
    version, which writes no states. It counts, unless somebody has claimed to go on without it."""
    state = states.newest()
    listed = listed_manifests(store)
    if state is None:
        return listed
    place = place_of(listed[0] if listed else "")
    if (place > state.place and place[0] >= state.epoch) or (place == state.place and len(listed) > 1):
        return listed
    return [state.manifest] if state.manifest else []
