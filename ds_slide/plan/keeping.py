"""What blocks keep on the GPU between forward and backward: all that they save, some results, or nothing.

Pure functions. What may be kept is one list of steps, each of which a block keeps more by than before, in the order of
the seconds that a byte saves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from ds_slide.plan.mixtures import Mixture


@dataclass(frozen=True)
class Keepable:
    """A block whose activations may be kept. `seconds`: of its recomputation. `mixtures`: between nothing and all.
    `mixing_s`: that it takes to keep any of them, as far as that is known."""

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
    """`whole`: blocks that keep all that they save. `mixed`: those that keep some results."""

    whole: frozenset[int] = frozenset()
    mixed: Mapping[int, Mixture] = field(default_factory=dict)

    def of(self, orders: Collection[int]) -> Kept:
        """Only these blocks."""
        mixed = {order: mixture for order, mixture in self.mixed.items() if order in orders}
        return Kept(self.whole & frozenset(orders), mixed)

    def nbytes(self, blocks: Iterable[Keepable]) -> int:
        """What it takes of the GPU."""
        mixed = sum(mixture.nbytes for mixture in self.mixed.values())
        return mixed + sum(each.nbytes for each in blocks if each.order in self.whole)

    def seconds(self, blocks: Collection[Keepable]) -> float:
        """What it saves of the recomputations."""
        whole = sum(each.seconds for each in blocks if each.order in self.whole)
        return whole + sum(each.saved_by(self.mixed[each.order]) for each in blocks if each.order in self.mixed)


@dataclass(frozen=True)
class _Step:
    """A block keeps `nbytes` more, and its recomputation takes `seconds` less. `level`: how many steps of the block lie
    before. `to`: what it keeps then, None: all."""

    order: int
    level: int
    nbytes: int
    seconds: float
    value: float
    """Seconds for a byte."""
    to: Mixture | None


@dataclass(frozen=True)
class _Target:
    """What a block may keep: `nbytes`, which save `seconds`."""

    nbytes: int
    seconds: float
    to: Mixture | None

    def value_of(self, other: _Target) -> float:
        """Seconds for each byte more."""
        return (other.seconds - self.seconds) / max(other.nbytes - self.nbytes, 1)


def kept_within(room: float, blocks: Collection[Keepable], *, first: bool = False) -> Kept:
    """What is kept in `room` bytes: never less time saved than where each block is kept as a whole or not at all, nor
    than in less room. `first`: of equal blocks the first, and not the last ones, whose tensors backward frees first.

    It is for updates in two passes, of which the second one precedes backward from block to block: blocks at the end
    that are not recomputed wait for it, those at the beginning no more (14 B on 140 GB: 27 mixed blocks save 0.29 s of
    a predicted backward there, and 0.15 s at the end)."""
    if sum(each.nbytes for each in blocks) <= room:
        return Kept(frozenset(each.order for each in blocks))
    alone = _taken(room, _steps(blocks, mixed=False, first=first))
    mixed = _taken(room, _steps(blocks, mixed=True, first=first))
    return mixed if mixed.seconds(blocks) > alone.seconds(blocks) else alone


@dataclass(frozen=True)
class Filling:
    """How far spare memory is filled with activations: so many blocks as a whole, and so many with some results."""

    nbytes: int
    seconds: float
    whole: int
    mixed: int


def fillings(blocks: Collection[Keepable]) -> list[Filling]:
    """All of them that come about when steps are taken in their order, the smallest first."""
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
    """The most seconds for a byte first; of equal ones the last block, or the first one."""
    steps = [step for block in blocks for step in _steps_of(block, block.mixtures if mixed else ())]
    return sorted(steps, key=lambda step: (-step.value, step.order if first else -step.order, step.level))


def _steps_of(block: Keepable, mixtures: Iterable[Mixture]) -> Iterator[_Step]:
    mixed = [_Target(each.nbytes, saves, each) for each in mixtures if (saves := block.saved_by(each)) > 0]
    # A target that is worth less than what comes behind it is passed over: one step there is worth more. What mixing
    # takes is due at the first mixture, and comes back where the block is kept as a whole.
    targets = [_Target(0, 0.0, None)]
    for target in (*mixed, _Target(block.nbytes, block.seconds, None)):
        while len(targets) > 1 and targets[-2].value_of(targets[-1]) < targets[-1].value_of(target):
            targets.pop()
        targets.append(target)
    for level, (before, after) in enumerate(pairwise(targets)):
        nbytes, seconds = after.nbytes - before.nbytes, after.seconds - before.seconds
        yield _Step(block.order, level, nbytes, seconds, before.value_of(after), after.to)


def _taken(room: float, steps: Iterable[_Step]) -> Kept:
    """After those that fit. A block of which one does not goes no further."""
    last: dict[int, _Step] = {}
    for step in steps:
        before = last.get(step.order)
        if step.nbytes <= room and step.level == (0 if before is None else before.level + 1):
            last[step.order] = step
            room -= step.nbytes
    whole = frozenset(order for order, step in last.items() if step.to is None)
    return Kept(whole, {order: step.to for order, step in last.items() if step.to is not None})
