"""A simulation decides when a step runs and when time passes, and a seed decides in which order."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from lowwater.chaos.clock import SeededRandomness, VirtualClock
from lowwater.chaos.runner import StepRunner, StepTask
from lowwater.engine.seams.seams import Clock, Randomness, Runner, Step


def counting(calls: list[str], name: str, *delays: float | None) -> Step:
    """A step that writes down its calls and asks for these delays, then to be woken."""
    left = list(delays)

    def step() -> float | None:
        calls.append(name)
        return left.pop(0) if left else None

    return step


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def runner(clock: VirtualClock) -> StepRunner:
    return StepRunner(clock)


@pytest.fixture
def rng() -> random.Random:
    return random.Random(0)


def test_they_are_what_the_engine_asks_for(clock: VirtualClock, runner: StepRunner) -> None:
    """The type checker reads this test; the assignments are the point of it."""
    one: Clock = clock
    two: Runner = runner
    three: Randomness = SeededRandomness(0)
    assert [one, two, three]


def test_time_stands_still_until_it_is_advanced(clock: VirtualClock) -> None:
    """Both clocks move together, by whole microseconds."""
    before = clock.now_us()
    assert clock.now_us() == before
    for _ in range(10):
        clock.advance(0.1)
    assert clock.now_us() == before + 1_000_000
    assert clock.monotonic() == 1.0


def test_the_wall_clock_can_jump_and_durations_do_not_notice(clock: VirtualClock) -> None:
    """Servers get their time corrected while they run."""
    before = clock.now_us()
    clock.wall_offset_us = -3_600_000_000
    assert clock.now_us() == before - 3_600_000_000
    assert clock.monotonic() == 0.0


def test_tokens_depend_on_the_seed_alone() -> None:
    """Also in another process, whatever its hash seed."""
    program = "from lowwater.chaos.clock import SeededRandomness; print(SeededRandomness(5).token(9).hex())"
    path = [entry for entry in sys.path if entry]
    other = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; {program}"],
        env={"PYTHONHASHSEED": "3"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == SeededRandomness(5).token(9).hex()
    assert SeededRandomness(5).token(9) != SeededRandomness(6).token(9)
    randomness = SeededRandomness(5)
    assert randomness.token(9) != randomness.token(9)


def test_a_started_step_runs_once_and_only_when_it_is_told_to(runner: StepRunner, rng: random.Random) -> None:
    """Starting it calls nothing; without a delay it waits to be woken."""
    calls: list[str] = []
    task = runner.start("a", counting(calls, "a"))
    assert calls == []
    assert runner.run_one(rng)
    assert not runner.run_one(rng)
    task.wake()
    task.wake()
    assert runner.run_until_idle(rng) == 1
    assert calls == ["a", "a"]


def test_a_delay_of_0_means_again_now(runner: StepRunner, rng: random.Random) -> None:
    """As the seam says: there is more to do."""
    calls: list[str] = []
    runner.start("a", counting(calls, "a", 0, 0))
    assert runner.run_until_idle(rng) == 3


def test_a_delay_lasts_until_the_clock_has_moved(
    clock: VirtualClock, runner: StepRunner, rng: random.Random
) -> None:
    """Jumps of the wall clock do not count."""
    calls: list[str] = []
    runner.start("a", counting(calls, "a", 2.0))
    runner.run_until_idle(rng)
    clock.wall_offset_us = 10_000_000
    clock.advance(1.999)
    assert not runner.run_one(rng)
    clock.advance(0.001)
    assert runner.run_one(rng)
    assert calls == ["a", "a"]


def test_a_woken_step_does_not_wait_for_its_delay(runner: StepRunner, rng: random.Random) -> None:
    """And the delay is gone: the step has said anew what it wants."""
    calls: list[str] = []
    task = runner.start("a", counting(calls, "a", 2.0))
    runner.run_until_idle(rng)
    task.wake()
    assert runner.run_one(rng)
    assert not runner.advance_to_next()


def test_a_step_that_wakes_itself_is_called_again(runner: StepRunner, rng: random.Random) -> None:
    """A wake-up that comes while the step runs must not be lost."""
    calls: list[str] = []
    tasks: list[StepTask] = []

    def step() -> None:
        calls.append("a")
        if len(calls) == 1:
            tasks[0].wake()

    tasks.append(runner.start("a", step))
    assert runner.run_until_idle(rng) == 2


def test_time_can_be_advanced_to_the_next_step(
    clock: VirtualClock, runner: StepRunner, rng: random.Random
) -> None:
    """No further than to the first one, and not at all while one is due."""
    calls: list[str] = []
    runner.start("a", counting(calls, "a", 5.0))
    runner.start("b", counting(calls, "b", 0.25))
    assert runner.advance_to_next()
    assert clock.monotonic() == 0.0
    runner.run_until_idle(rng)
    assert runner.advance_to_next()
    assert clock.monotonic() == 0.25
    assert runner.run_until_idle(rng) == 1
    assert runner.advance_to_next()
    assert clock.monotonic() == 5.0
    runner.run_until_idle(rng)
    assert not runner.advance_to_next()


def test_even_the_shortest_delay_lets_time_pass(
    clock: VirtualClock, runner: StepRunner, rng: random.Random
) -> None:
    """Else a step that waits for a moment to come would be called for ever before it comes."""
    runner.start("a", lambda: 1e-9 if clock.monotonic() < 0.00001 else None)
    runner.run_until_idle(rng, limit=5)
    while runner.advance_to_next():
        runner.run_until_idle(rng, limit=5)
    assert clock.monotonic() == 0.00001


def test_a_stopped_step_is_not_called_again(runner: StepRunner, rng: random.Random) -> None:
    """Not even when it is woken afterwards; stopping twice does no harm."""
    calls: list[str] = []
    task = runner.start("a", counting(calls, "a"))
    task.stop()
    task.wake()
    task.stop()
    assert runner.run_until_idle(rng) == 0


def test_a_step_that_fails_ends_its_task_and_the_simulation_hears_of_it(
    runner: StepRunner, rng: random.Random
) -> None:
    """As with a thread, except that nobody can overlook it."""

    def step() -> None:
        raise ZeroDivisionError

    task = runner.start("a", step)
    with pytest.raises(ZeroDivisionError):
        runner.run_one(rng)
    task.wake()
    assert not runner.run_one(rng)


def test_steps_that_never_rest_are_named(runner: StepRunner, rng: random.Random) -> None:
    """A livelock ends as an error that says whose it is, not as a test that hangs."""
    runner.start("restless", lambda: 0)
    runner.start("quiet", lambda: None)
    with pytest.raises(RuntimeError, match=r"still busy after 50 steps: restless$"):
        runner.run_until_idle(rng, limit=50)


def test_the_seed_decides_the_order_and_every_order_comes() -> None:
    """Schedules are repeatable, and none is left out."""

    def order(seed: int) -> str:
        calls: list[str] = []
        runner = StepRunner(VirtualClock())
        for name in "abc":
            runner.start(name, counting(calls, name))
        runner.run_until_idle(random.Random(seed))
        return "".join(calls)

    orders = [order(seed) for seed in range(100)]
    assert orders == [order(seed) for seed in range(100)]
    assert set(orders) == {"abc", "acb", "bac", "bca", "cab", "cba"}
