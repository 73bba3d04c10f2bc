"""What blocks keep on the GPU between forward and backward: all that they save, some results, or nothing.

Pure functions. One list of steps says what may be kept. After each step one block keeps more than before. The list is
sorted by the seconds that a byte saves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from ds_slide.plan.mixtures import Mixture


@dataclass(frozen=True)
class Keepable:
    """A block whose activations may be kept. `seconds`: length of its recomputation. `mixtures`: choices between
    nothing and all. `mixing_s`: seconds that keeping any mixture costs, as far as known."""

    order: int
    nbytes: int
    seconds: float
    mixtures: tuple[Mixture, ...] = ()
    mixing_s: float = 0.0

    def saved_by(self, mixture: Mixture) -> float:
        """Seconds of a step that `mixture` saves."""
        return mixture.share * self.seconds - self.mixing_s


@dataclass(frozen=True)
class Kept:
    """`whole`: blocks that keep all that they save. `mixed`: blocks that keep some results."""

    whole: frozenset[int] = frozenset()
    mixed: Mapping[int, Mixture] = field(default_factory=dict)

    def of(self, orders: Collection[int]) -> Kept:
        """Return a copy with only these blocks."""
        mixed = {order: mixture for order, mixture in self.mixed.items() if order in orders}
        return Kept(self.whole & frozenset(orders), mixed)

    def nbytes(self, blocks: Iterable[Keepable]) -> int:
        """Return the bytes that it takes on the GPU."""
        mixed = sum(mixture.nbytes for mixture in self.mixed.values())
        return mixed + sum(each.nbytes for each in blocks if each.order in self.whole)

    def seconds(self, blocks: Collection[Keepable]) -> float:
        """Return the seconds of recomputation that it saves."""
        whole = sum(each.seconds for each in blocks if each.order in self.whole)
        return whole + sum(each.saved_by(self.mixed[each.order]) for each in blocks if each.order in self.mixed)


@dataclass(frozen=True)
class _Step:
    """A block keeps `nbytes` more, and its recomputation takes `seconds` less. `level`: number of earlier steps of the
    block. `to`: what it keeps then, None: all."""

    order: int
    level: int
    nbytes: int
    seconds: float
    value: float
    """Seconds saved for each byte."""
    to: Mixture | None


@dataclass(frozen=True)
class _Target:
    """What a block may keep: `nbytes`, which save `seconds`."""

    nbytes: int
    seconds: float
    to: Mixture | None

    def value_of(self, other: _Target) -> float:
        """Return the seconds saved for each byte that `other` takes more."""
        return (other.seconds - self.seconds) / max(other.nbytes - self.nbytes, 1)


def kept_within(room: float, blocks: Collection[Keepable], *, first: bool = False) -> Kept:
    """Return what to keep in `room` bytes. It saves no less time than keeping each block as a whole or not at all, and
    no less than in less room. `first`: equal blocks are kept from the first one on; otherwise from the last one on,
    whose tensors backward frees first.

    `first` is for updates in two passes. The second pass precedes backward from block to block. Last blocks that are
    not recomputed wait for it, first ones do not any more (14 B on 140 GB: 27 mixed blocks save 0.29 s of a predicted
    backward at the beginning, and 0.15 s at the end)."""
    if sum(each.nbytes for each in blocks) <= room:
        return Kept(frozenset(each.order for each in blocks))
    alone = _taken(room, _steps(blocks, mixed=False, first=first))
    mixed = _taken(room, _steps(blocks, mixed=True, first=first))
    return mixed if mixed.seconds(blocks) > alone.seconds(blocks) else alone


@dataclass(frozen=True)
class Filling:
    """How far activations fill spare memory. `whole`: number of blocks kept as a whole. `mixed`: number of blocks that
    keep some results."""

    nbytes: int
    seconds: float
    whole: int
    mixed: int


def fillings(blocks: Collection[Keepable]) -> list[Filling]:
    """Return all fillings that come about when steps are applied in order, the smallest first."""
    found = {Filling(0, 0.0, 0, 0)}
    for mixed in (False, True):
        levels: dict[int, int] = {}
        nbytes, seconds, whole = 0, 0.0, 0
        for step in _steps(blocks, mixed=mixed):
            nbytes, seconds = nbytes + step.nbytes, seconds + step.seconds
            levels[step.order] = step.level
            whole += step.to is None
            found.add(Filling(nbytes, seconds, whole, len(levels) - whole))
    return sorted(found, key=lambda each: (each.nbytes, -each.seconds))


def _steps(blocks: Iterable[Keepable], *, mixed: bool, first: bool = False) -> list[_Step]:
    """Return the steps, the most seconds for a byte first. Equal steps begin with the last block, or the first one."""
    steps = [step for block in blocks for step in _steps_of(block, block.mixtures if mixed else ())]
    return sorted(steps, key=lambda step: (-step.value, step.order if first else -step.order, step.level))


def _steps_of(block: Keepable, mixtures: Iterable[Mixture]) -> Iterator[_Step]:
    mixed = [_Target(each.nbytes, saves, each) for each in mixtures if (saves := block.saved_by(each)) > 0]
    # A target that is worth less than the next one is skipped: one step to the next one is worth more. The cost of
    # mixing is due at the first mixture, and comes back where the block is kept as a whole.
    targets = [_Target(0, 0.0, None)]
    for target in (*mixed, _Target(block.nbytes, block.seconds, None)):
        while len(targets) > 1 and targets[-2].value_of(targets[-1]) < targets[-1].value_of(target):
            targets.pop()
        targets.append(target)
    for level, (before, after) in enumerate(pairwise(targets)):
        nbytes, seconds = after.nbytes - before.nbytes, after.seconds - before.seconds
        yield _Step(block.order, level, nbytes, seconds, before.value_of(after), after.to)


def _taken(room: float, steps: Iterable[_Step]) -> Kept:
    """Apply steps in order while they fit. A block stops at its first step that does not."""
    last: dict[int, _Step] = {}
    for step in steps:
        before = last.get(step.order)
        if step.nbytes <= room and step.level == (0 if before is None else before.level + 1):
            last[step.order] = step
            room -= step.nbytes
    whole = frozenset(order for order, step in last.items() if step.to is None)
    return Kept(whole, {order: step.to for order, step in last.items() if step.to is not None})
