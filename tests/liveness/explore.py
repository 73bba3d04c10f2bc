"""Runs a configuration under many schedules: all within a bound, or as many random ones as asked for."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from liveness import primitives
from liveness.collectives import Collectives
from liveness.disk import Disk, Loses
from liveness.patching import Replaceable, patched_engine
from liveness.scheduler import Choice, Chooser, Outcome, Scheduler, Stop
from liveness.state import state_of
from liveness.strategies import ORDERS, by_order, by_priorities, listed, with_departures
from liveness.training import Configuration, run_training

Departures = tuple[tuple[int, int], ...]


@dataclass
class Finding:
    """A run that ended badly. `replay(configuration, choices)` repeats it."""

    configuration: Configuration
    how: str
    outcome: Outcome

    def __str__(self) -> str:
        return (
            f"{self.configuration.name}, {self.how}\n{self.outcome}\n{self.story()}\nchoices = {self.outcome.choices}"
        )

    def story(self) -> str:
        """Who went on, one after the other."""
        steps = []
        for label, group in itertools.groupby(self.outcome.labels):
            times = len(list(group))
            steps.append(label.removeprefix("ds_slide-") + (f" x{times}" if times > 1 else ""))
        return " > ".join(steps)


@dataclass
class Count:
    """What an exploration has done."""

    configuration: Configuration
    bound: str
    schedules: int = 0
    points: int = 0
    states: int = 0
    seconds: float = 0.0
    """Of the processor."""
    complete: bool = True
    """Within its bound; False when time or schedules ran out."""
    findings: list[Finding] = field(default_factory=list)
    departures: list[int] = field(default_factory=list)
    """Schedules by their number of departures."""

    @property
    def result(self) -> str:
        return "no hang" if not self.findings else "; ".join(sorted({f.outcome.kind for f in self.findings}))


class Engine:
    """Runs one configuration again and again. `loses`: see `Disk`."""

    def __init__(self, replaceable: Replaceable, configuration: Configuration, loses: Loses | None = None) -> None:
        self.configuration = configuration
        self._replaceable = replaceable
        self._loses = loses
        self._expected: Any = None

    def run(self, chooser: Chooser, *, keep_labels: bool = False) -> Outcome:
        outcome = self._run(self.configuration, chooser, keep_labels)
        if outcome.kind == "done":
            if self._expected is None:
                reference = self._run(self.configuration.in_memory(), by_order(ORDERS["slow disk"]), False)
                assert reference.kind == "done", f"the reference: {reference}"
                self._expected = reference.result
            self._compare(outcome)
        return outcome

    def _compare(self, outcome: Outcome) -> None:
        for rank, ((seen, states), (seen_expected, states_expected)) in enumerate(
            zip(outcome.result, self._expected, strict=True)
        ):
            different = [
                what
                for what, found, expected in (
                    ("weights that were computed with", seen, seen_expected),
                    ("states", states or states_expected, states_expected),
                )
                if found != expected
            ]
            if different:
                outcome.kind = "error"
                outcome.message = f"other bits than in memory on rank {rank}: {' and '.join(different)}"

    def _run(self, configuration: Configuration, chooser: Chooser, keep_labels: bool) -> Outcome:
        scheduler = Scheduler(chooser, keep_labels=keep_labels)
        loses = self._loses
        self._replaceable.make_disk = lambda *args, **kwargs: Disk(*args, loses=loses, **kwargs)
        self._replaceable.collectives = Collectives(configuration.ranks, one_at_a_time=configuration.one_at_a_time)

        def main(rank: int) -> Callable[[], Any]:
            return lambda: run_training(configuration, rank)

        return scheduler.run(*[("compute", main(rank)) for rank in range(configuration.ranks)])


@contextmanager
def engine_for(configuration: Configuration, loses: Loses | None = None) -> Iterator[Engine]:
    with patched_engine() as replaceable:
        yield Engine(replaceable, configuration, loses)


def replay(configuration: Configuration, choices: Sequence[int], loses: Loses | None = None) -> Outcome:
    """One run by the list of the choices at all points (`Finding.outcome`), with the name of every choice."""
    primitives.use_sharing(primitives.Sharing(all_points=True))
    with engine_for(configuration, loses) as engine:
        return engine.run(listed(choices), keep_labels=True)


def _at_all_points(engine: Engine, outcome: Outcome, shared: set[primitives.Place]) -> Outcome:
    """The run `outcome`, repeated with points at all operations, so that its list of choices needs nothing else."""
    primitives.use_sharing(primitives.Sharing(all_points=True))
    follow = listed(outcome.choices)

    def choose(scheduler: Scheduler, choices: list[Choice]) -> int:
        me = scheduler.current
        if me is not None and not me.finished:
            place = getattr(me.pending.target, "place", None)
            if place is not None and place not in shared:
                own = [index for index, choice in enumerate(choices) if choice.thread is me]
                if own:
                    return own[0]  # it was no point when the run was found
        return follow(scheduler, choices)

    return engine.run(choose, keep_labels=True)


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
    primitives.use_sharing(primitives.Sharing(all_points=True))
    count = Count(configuration, f"{schedules} random schedules")
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
    primitives.use_sharing(primitives.Sharing(all_points=True))
    count = Count(configuration, "orders of the lanes")
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
) -> Count:
    """All schedules that depart at most so often from the order (None: all there are), fewest departures first.

    A state that was reached before, with as many departures or fewer, is not followed again.
    """
    sharing = primitives.Sharing()
    started = time.process_time()
    with engine_for(configuration, loses) as engine:
        while True:
            primitives.use_sharing(sharing)
            sharing.changed = False
            count = _explore(engine, departures, ORDERS[order], started + seconds, most_findings, sharing)
            if not sharing.changed:
                break
    bound = "all" if departures is None else f"{departures} departures"
    count.bound = f"{bound} from {order!r}"
    count.seconds = time.process_time() - started
    return count


def _explore(
    engine: Engine,
    departures: int | None,
    order: Sequence[str],
    until: float,
    most_findings: int,
    sharing: primitives.Sharing,
) -> Count:
    count = Count(engine.configuration, "")
    seen: set[int] = set()
    todo: deque[Departures] = deque([()])
    while todo and not sharing.changed:
        path = todo.popleft()
        frontier = _Frontier(order, path, seen)
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
            repeated = _at_all_points(engine, outcome, sharing.shared)
            assert repeated.kind == outcome.kind, f"{outcome}\nwas repeated as\n{repeated}"
            primitives.use_sharing(sharing)
            count.findings.append(Finding(engine.configuration, f"departures {path}", repeated))
            if len(count.findings) >= most_findings:
                break
        if time.process_time() > until:
            break
    count.complete = not todo
    count.states = len(seen)
    return count
