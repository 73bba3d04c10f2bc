"""The explorer finds what it must find: nothing that it says of the engine counts otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from liveness.explore import Count, explore_all, explore_by_chance, replay
from liveness.primitives import threading
from liveness.scheduler import Scheduler
from liveness.strategies import listed
from liveness.training import Configuration

TINY = Configuration("tiny", blocks=2, slots=2, steps=1)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def lost_if_both(name: str, pending: Sequence[str]) -> bool:
    """A disk that loses the write of a block's weight that is submitted while another's is under way."""
    return name.startswith("write weight") and any(other.startswith("write weight") for other in pending)


def searches() -> dict[str, Callable[[], Count]]:
    return {
        "all": lambda: explore_all(TINY, 2, order="slow compute", loses=lost_if_both),
        "chance": lambda: explore_by_chance(TINY, 100, loses=lost_if_both),
    }


@pytest.mark.parametrize("search", ["all", "chance"])
def test_the_explorer_finds_a_planted_deadlock(search: str) -> None:
    """Of those that take a certain schedule: in the order that comes first, writes are never together."""
    assert not explore_all(TINY, 0, order="slow compute", loses=lost_if_both).findings
    count = searches()[search]()
    (finding,) = count.findings
    assert count.schedules > 1
    assert finding.outcome.kind == "deadlock"
    waits = {wait.thread: wait for wait in finding.outcome.waits}
    assert any("settle" in line for line in waits["compute"].stack)
    again = replay(TINY, finding.outcome.choices, loses=lost_if_both)
    assert (again.kind, [str(wait) for wait in again.waits]) == ("deadlock", [str(w) for w in finding.outcome.waits])
    assert again.labels and "write weight" in finding.story() + str(again.labels)


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
    from liveness import primitives

    primitives.use_sharing(primitives.Sharing(all_points=True))
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
