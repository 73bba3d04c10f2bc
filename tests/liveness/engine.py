"""Runs one configuration again and again, each time by another chooser, and compares the bits that come out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ds_slide.runtime.core.ranks import collectives
from liveness.collectives import Collectives
from liveness.disk import Disk, Loses
from liveness.patching import Replaceable, patched_engine
from liveness.scheduler import Choice, Chooser, Outcome, Scheduler
from liveness.sharing import Place, Sharing, use_sharing
from liveness.strategies import ORDERS, by_order, listed
from liveness.tiny import Configuration
from liveness.training import run_training


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
    seen: set[int] = field(default_factory=set, repr=False)
    """States that were met at choices, in an exploration that knows them."""
    seconds: float = 0.0
    """Of the processor."""
    complete: bool = True
    """Within its bound; False when time or schedules ran out."""
    findings: list[Finding] = field(default_factory=list)
    departures: list[int] = field(default_factory=list)
    """Schedules by their number of departures."""

    @property
    def states(self) -> int:
        return len(self.seen)


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
        getattr(collectives, "_channels", {}).clear()  # of the run before: each has process groups of its own
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
    use_sharing(Sharing(all_points=True))
    with engine_for(configuration, loses) as engine:
        return engine.run(listed(choices), keep_labels=True)


def at_all_points(engine: Engine, outcome: Outcome, shared: set[Place]) -> Outcome:
    """The run `outcome`, repeated with points at all operations, so that its list of choices needs nothing else."""
    use_sharing(Sharing(all_points=True))
    follow = listed(outcome.choices)

    def choose(scheduler: Scheduler, choices: list[Choice]) -> int:
        me = scheduler.current
        if me is not None and not me.finished:
            place = getattr(me.pending.target, "place", None)
            waited = me.pending.ready is not None and me.pending.kind != "lock"
            if place is not None and place not in shared and not waited:
                own = [index for index, choice in enumerate(choices) if choice.thread is me]
                if own:
                    return own[0]  # it was no point when the run was found
        return follow(scheduler, choices)

    return engine.run(choose, keep_labels=True)
