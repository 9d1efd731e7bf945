"""Background steps, called one at a time by whoever runs the simulation.

Always true:
  - a step runs only inside `run_one`, in the thread that called it: between two calls nothing moves;
  - which step comes next depends on the seed and on the order in which tasks were started, nothing else;
  - time does not pass here: a step that waits becomes due when somebody advances the clock.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

from lowwater.chaos.clock import VirtualClock
from lowwater.engine.seams.seams import Step

T = TypeVar("T")


class StepTask:
    """A step and when it wants to be called. A new one is due at once, as a new thread would be."""

    def __init__(self, runner: StepRunner, name: str, step: Step) -> None:
        self.name = name
        self.step = step
        self.woken = True
        self.due_us: int | None = None
        self._runner = runner

    def wake(self) -> None:
        self.woken = True

    def stop(self) -> None:
        if self in self._runner.tasks:
            self._runner.tasks.remove(self)


class StepRunner:
    """A crashed program leaves its tasks behind: give the next life a runner of its own."""

    def __init__(self, clock: VirtualClock) -> None:
        self.tasks: list[StepTask] = []
        self._clock = clock

    def start(self, name: str, step: Step) -> StepTask:
        task = StepTask(self, name, step)
        self.tasks.append(task)
        return task

    def apart(self, call: Callable[[], T]) -> T:
        return call()  # there are no signals here

    def start_call(self, name: str, call: Callable[[], object]) -> None:
        call()

    def run_one(self, rng: random.Random) -> bool:
        """Call one step that is due or woken, chosen by `rng`. False where there is none.

        An exception ends the task, as it ends a thread, and reaches the caller: a simulation must
        not go on as if nothing had happened.
        """
        now_us = self._now_us()
        ready = [t for t in self.tasks if t.woken or (t.due_us is not None and t.due_us <= now_us)]
        if not ready:
            return False
        task = rng.choice(ready)
        # Before the call: a step that wakes its own task while it runs is called again.
        task.woken = False
        task.due_us = None
        try:
            delay = task.step()
        except BaseException:
            task.stop()
            raise
        if delay is not None:
            # At least a microsecond for a delay that is not 0, or a short wait would never let time pass.
            delay_us = max(1, round(delay * 1_000_000)) if delay > 0 else 0
            task.due_us = self._now_us() + delay_us
        return True

    def run_until_idle(self, rng: random.Random, *, limit: int = 10_000) -> int:
        """Call steps until none is due. Returns how many calls that took; more than `limit` is a bug."""
        calls = 0
        while self.run_one(rng):
            calls += 1
            if calls > limit:
                busy = ", ".join(t.name for t in self.tasks if t.woken or t.due_us is not None)
                raise RuntimeError(f"still busy after {limit} steps: {busy}")
        return calls

    def advance_to_next(self) -> bool:
        """Let time pass until the next step is due. False where all of them wait to be woken."""
        now_us = self._now_us()
        due_us = [now_us if t.woken else t.due_us for t in self.tasks]
        known_us = [moment for moment in due_us if moment is not None]
        if not known_us:
            return False
        self._clock.advance(max(0, min(known_us) - now_us) / 1_000_000)
        return True

    def _now_us(self) -> int:
        """From the monotonic clock: a jump of the wall clock moves no delay."""
        return round(self._clock.monotonic() * 1_000_000)
