"""The explorer finds what it must find: nothing that it says of the engine counts otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from liveness.configurations import EXHAUSTIVE
from liveness.engine import Count, engine_for, replay
from liveness.explore import explore_all, explore_by_chance
from liveness.scheduler import Choice, Scheduler
from liveness.sharing import Sharing, use_sharing
from liveness.stand_ins import threading
from liveness.state import state_of
from liveness.strategies import by_chance, listed
from liveness.tiny import Configuration

TINY = Configuration("tiny", blocks=2, slots=2, steps=1)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def lost_in_one_order(name: str, pending: Sequence[str]) -> bool:
    """A disk that loses the write of block 0 where that of block 1 was submitted before and is still under way."""
    return name == "write weight of block 0" and "write weight of block 1" in pending


SEARCHES: dict[str, Callable[[], Count]] = {
    "all": lambda: explore_all(TINY, 2, loses=lost_in_one_order),
    "chance": lambda: explore_by_chance(TINY, 300, loses=lost_in_one_order),
}


@pytest.mark.parametrize("search", list(SEARCHES))
def test_the_explorer_finds_a_planted_deadlock(search: str) -> None:
    """One that takes a rare schedule: updates come to the blocks in their order, unless two things are slow."""
    assert not explore_all(TINY, 0, loses=lost_in_one_order).findings
    count = SEARCHES[search]()
    (finding,) = count.findings
    assert count.schedules > 1
    assert finding.outcome.kind == "deadlock"
    waits = {wait.thread: wait for wait in finding.outcome.waits}
    assert any("settle" in line for line in waits["compute"].stack)
    again = replay(TINY, finding.outcome.choices, loses=lost_in_one_order)
    assert (again.kind, [str(wait) for wait in again.waits]) == ("deadlock", [str(w) for w in finding.outcome.waits])
    assert any("write weight of block 1" in label for label in again.labels)


def test_random_schedules_meet_only_states_that_were_explored() -> None:
    """Else the exploration of all schedules would leave some out. It finds no hang and no wrong bit."""
    configuration, sharing = EXHAUSTIVE[0], Sharing()
    count = explore_all(configuration, None, sharing=sharing)
    assert count.complete and count.states > 20 and not count.findings
    explored = count.seen
    met: set[int] = set()
    use_sharing(sharing)
    with engine_for(configuration) as engine:
        for seed in range(60):
            by_seed = by_chance(seed)

            def choose(
                scheduler: Scheduler,
                choices: list[Choice],
                by_seed: Callable[[Scheduler, list[Choice]], int] = by_seed,
            ) -> int:
                met.add(state_of(scheduler, choices))
                return by_seed(scheduler, choices)

            assert engine.run(choose).kind == "done"
    assert len(met) > len(explored) // 3
    assert met <= explored


def test_a_completion_that_never_comes_is_found_at_once() -> None:
    count = explore_all(TINY, 0, loses=lambda name, _pending: name == "read weight of block 1")
    assert [finding.outcome.kind for finding in count.findings] == ["deadlock"]


def locks_in_two_orders(scheduler_choices: Sequence[int]) -> str:
    """Two threads that take two locks, each the other's first; -> how that ended."""

    def main() -> None:
        scheduler.exploring = True
        first, second = threading.Lock(), threading.Lock()

        def take(one: object, other: object) -> None:
            with one, other:  # type: ignore[attr-defined]
                pass

        threads = [threading.Thread(target=take, args=each) for each in ((first, second), (second, first))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    scheduler = Scheduler(listed(scheduler_choices))
    return scheduler.run(("main", main)).kind


def test_two_locks_in_two_orders() -> None:
    use_sharing(Sharing(all_points=True))
    ends = {locks_in_two_orders([a, b, c, d]) for a in (0, 1) for b in (0, 1) for c in (0, 1) for d in (0, 1)}
    assert ends == {"done", "deadlock"}


def test_a_watchdog_is_no_progress() -> None:
    def main() -> None:
        threading.Thread(target=lambda: threading.Event().wait(1.0), name="watchdog", daemon=True).start()
        threading.Event().wait()

    outcome = Scheduler(listed([])).run(("main", main))
    assert outcome.kind == "deadlock"


def test_a_poll_hides_no_deadlock() -> None:
    def main() -> None:
        never = threading.Event()
        while not never.wait(0.5):
            pass

    assert Scheduler(listed([])).run(("main", main)).kind == "deadlock"


def test_gradients_are_recorded_by_each_thread_for_itself() -> None:
    """Greenlets share the setting of one operating system thread, also those that are ended inside `no_grad`."""
    scheduler = Scheduler(by_chance(3))
    recorded: list[bool] = []

    def work() -> None:
        recorded.append(torch.is_grad_enabled())
        with torch.no_grad():
            event = threading.Event()
            threading.Thread(target=event.set).start()
            event.wait()
            recorded.append(torch.is_grad_enabled())
            threading.Event().wait()  # for ever

    assert scheduler.run(("one", work), ("two", work)).kind == "deadlock"
    assert recorded.count(True) == 2 and recorded.count(False) == 2 and torch.is_grad_enabled()
