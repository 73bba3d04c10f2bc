"""What the blocks of a recorded step cost the host: how long their forwards and backwards occupy the thread that
computes, and how much of that is the engine's own.

The engine's own time is the time of its hooks: of the block, and of the tensors that the block saves. Gradients are
packed in such a hook, and weights bound. On a GPU the host only submits work, so its time does not depend on what the
work is. While the GPU is behind, nothing is lost; where the host takes longer than the GPU, it sets the pace.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

DIRECTIONS = ("forward", "backward")


@dataclass
class BlockCost:
    """Seconds of the host for one block and direction in a step. `calls`: how often the block went in that direction.
    `own_s`: the part of `seconds` in the engine's hooks."""

    unit: str
    what: str
    calls: int = 0
    seconds: float = 0.0
    own_s: float = 0.0


class HostTrace:
    """Measures the blocks while steps are recorded. The thread that computes calls it, one at a time; during a backward
    that is autograd's thread."""

    def __init__(self, units: Sequence[str] = ()) -> None:
        self._units = units
        self._costs: dict[tuple[str, int], BlockCost] = {}
        self._begun: dict[tuple[str, int], float] = {}
        self._is_own = False
        self.steps: list[list[BlockCost]] = []

    @contextmanager
    def own(self, what: str, order: int, *, begins: bool = False, ends: bool = False) -> Iterator[None]:
        """Count what runs inside as the engine's own; a hook inside of another one counts once. `begins`, `ends`: the
        block begins or ends this direction with it. A direction may be announced several times."""
        began = time.perf_counter()
        if begins:
            self._begun.setdefault((what, order), began)
        is_inside, self._is_own = self._is_own, True
        try:
            yield
        finally:
            self._is_own, now = is_inside, time.perf_counter()
            cost = self._costs.setdefault((what, order), BlockCost(self._units[order], what))
            cost.own_s += 0.0 if is_inside else now - began
            if ends and (first := self._begun.pop((what, order), None)) is not None:
                cost.calls += 1
                cost.seconds += now - first

    def cut(self) -> None:
        """End the step under way."""
        self.steps.append(list(self._costs.values()))
        self._costs, self._begun = {}, {}  # a forward that an exception has ended is never left


@dataclass(frozen=True)
class HostShare:
    """The blocks of a step in one direction. `calls`: of all blocks. `seconds`, `own_s`: means of one call. `longest`:
    the block with the most of the engine's own seconds in a call, which are `longest_s`."""

    what: str
    calls: int
    seconds: float
    own_s: float
    longest: str
    longest_s: float

    @property
    def sentence(self) -> str:
        return (
            f"host: {self.what} of a block {1e3 * self.seconds:.3f} ms, of which {1e3 * self.own_s:.3f} ms are "
            f"DS-Slide's own (most: {self.longest}, {1e3 * self.longest_s:.3f} ms)"
        )


def host_shares(costs: Iterable[BlockCost]) -> list[HostShare]:
    """Return the shares of the directions that were measured."""
    shares, known = [], list(costs)
    for what in DIRECTIONS:
        found = [cost for cost in known if cost.what == what and cost.calls]
        if found:
            calls = sum(cost.calls for cost in found)
            most = max(found, key=lambda cost: cost.own_s / cost.calls)
            seconds, own_s = sum(cost.seconds for cost in found), sum(cost.own_s for cost in found)
            shares.append(HostShare(what, calls, seconds / calls, own_s / calls, most.unit, most.own_s / most.calls))
    return shares
