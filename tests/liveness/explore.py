"""Runs a configuration under many schedules: all within a bound, or as many random ones as asked for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from liveness.disk import Loses
from liveness.engine import Count, Engine, Finding, at_all_points, engine_for
from liveness.scheduler import Choice, Chooser, Scheduler, Stop
from liveness.sharing import Sharing, use_sharing
from liveness.state import state_of
from liveness.strategies import ORDERS, by_order, by_priorities, with_departures
from liveness.tiny import Configuration

Departures = tuple[tuple[int, int], ...]


def explore_by_chance(
    configuration: Configuration,
    schedules: int,
    *,
    first_seed: int = 0,
    seconds: float = float("inf"),
    chooser: Callable[[int], Chooser] = by_priorities,
    most_findings: int = 1,
    loses: Loses | None = None,
) -> Count:
    """Random schedules, each by its seed, with points at every operation."""
    use_sharing(Sharing(all_points=True))
    count = Count(configuration, "PCT")
    started = time.process_time()
    with engine_for(configuration, loses) as engine:
        for seed in range(first_seed, first_seed + schedules):
            outcome = engine.run(chooser(seed))
            count.schedules += 1
            count.points += outcome.points
            if outcome.kind in ("deadlock", "error"):
                count.findings.append(Finding(configuration, f"seed {seed}", outcome))
                if len(count.findings) >= most_findings:
                    break
            if time.process_time() - started > seconds:
                count.complete = False
                break
    count.seconds = time.process_time() - started
    return count


def explore_orders(configuration: Configuration, *, loses: Loses | None = None) -> Count:
    """One schedule for every order of the lanes, each with another one the slowest."""
    use_sharing(Sharing(all_points=True))
    count = Count(configuration, "orders")
    started = time.process_time()
    with engine_for(configuration, loses) as engine:
        for name, order in ORDERS.items():
            outcome = engine.run(by_order(order))
            count.schedules += 1
            count.points += outcome.points
            if outcome.kind in ("deadlock", "error"):
                count.findings.append(Finding(configuration, name, outcome))
    count.seconds = time.process_time() - started
    return count


class _Frontier:
    """The chooser of one run: follows the departures to their last, then notes what else could have been chosen in
    states that are new, and ends the run in one that is not."""

    def __init__(self, order: Sequence[str], departures: Departures, seen: set[int]) -> None:
        self._base = with_departures(order, dict(departures))
        self._last = departures[-1][0] if departures else -1
        self._number = -1
        self._seen = seen
        self.others: list[tuple[int, int]] = []

    def __call__(self, scheduler: Scheduler, choices: list[Choice]) -> int:
        self._number += 1
        chosen = self._base(scheduler, choices)
        if self._number > self._last:
            state = state_of(scheduler, choices)
            if state in self._seen:
                raise Stop("a state that was seen before")
            self._seen.add(state)
            self.others += [(self._number, index) for index in range(len(choices)) if index != chosen]
        return chosen


def explore_all(
    configuration: Configuration,
    departures: int | None,
    *,
    order: str = "slow disk",
    seconds: float = float("inf"),
    most_findings: int = 1,
    loses: Loses | None = None,
    sharing: Sharing | None = None,
) -> Count:
    """All schedules that depart at most so often from the order (None: all there are), fewest departures first.

    A state that was reached before, with as many departures or fewer, is not followed again.
    `sharing`: what is known of it already; filled.
    """
    sharing = Sharing() if sharing is None else sharing
    started = time.process_time()
    with engine_for(configuration, loses) as engine:
        while True:
            use_sharing(sharing)
            sharing.changed = False
            count = _explore(engine, departures, ORDERS[order], started + seconds, most_findings, sharing)
            if not sharing.changed:
                break
    reached = len(count.departures) - 1
    count.bound = "all" if departures is None else f"{reached} departures from {order}"
    count.seconds = time.process_time() - started
    return count


def _explore(
    engine: Engine,
    departures: int | None,
    order: Sequence[str],
    until: float,
    most_findings: int,
    sharing: Sharing,
) -> Count:
    count = Count(engine.configuration, "")
    todo: deque[Departures] = deque([()])
    while todo and not sharing.changed:
        path = todo.popleft()
        frontier = _Frontier(order, path, count.seen)
        outcome = engine.run(frontier)
        if sharing.changed:
            break
        count.schedules += 1
        count.points += outcome.points
        while len(count.departures) <= len(path):
            count.departures.append(0)
        count.departures[len(path)] += 1
        if departures is None or len(path) < departures:
            todo.extend((*path, other) for other in frontier.others)
        if outcome.kind in ("deadlock", "error"):
            how, repeated = f"departures {path}", at_all_points(engine, outcome, sharing.shared)
            use_sharing(sharing)
            if repeated.kind != outcome.kind:
                how, repeated = f"{how}, not repeated with points at all operations", outcome
            count.findings.append(Finding(engine.configuration, how, repeated))
            if len(count.findings) >= most_findings:
                break
        if time.process_time() > until:
            break
    count.complete = not todo
    return count
