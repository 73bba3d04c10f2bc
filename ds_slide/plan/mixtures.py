"""Which results of a block's operators stay where the rest of the block is recomputed: the results that take most time
per byte to compute again.

An element of a product with `k` columns takes `2k` FLOP to compute again. An element of attention over `l` tokens takes
the same with `k = l`, and an element of a norm or an activation next to nothing. So a block that keeps the results of
its products and its attention avoids nearly all of its recomputation. It keeps two thirds of the bytes that it saves as
a whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ds_slide.plan.operations import Operation, may_stay, new_bytes

FLOPS_A_BYTE = 160
"""FLOP of bf16 products that a GPU does while it reads or writes one byte of its memory (770 TFLOP/s and 4.8 TB/s of an
H200, 280 and 2.0 of an A100, 165 and 1.0 of an RTX 4090)."""
SLOWER_ATTENTION = 2.0
"""Time of FlashAttention's forward, divided by the time of a product with the same FLOP."""
ALIKE = 1.5
"""Results within this factor, by seconds a byte, stay or go together: all products of a block, in most models."""

Result = tuple[str, int]
"""The result of an operator in a block's forward: its name, and how many times it has run there before."""


@dataclass(frozen=True)
class Run:
    """An operator's run in a recomputation. `work`: FLOP of a product that takes the same time. `nbytes`: bytes of its
    result; 0 where it cannot stay."""

    result: Result
    work: float
    nbytes: int


@dataclass(frozen=True)
class Mixture:
    """Results that stay, with their bytes. `share`: part of the recomputation's time that this saves."""

    results: frozenset[Result]
    nbytes: int
    share: float

    def times(self, factor: float) -> Mixture:
        """Return a copy whose bytes are multiplied by `factor` (a larger batch, or several calls), rounded up."""
        return replace(self, nbytes=math.ceil(factor * self.nbytes))


def run_of(
    function: torch._ops.OpOverload,
    before: int,
    operations: Sequence[Operation],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    made: Any,
) -> Run:
    """Return the run of an operator that had run `before` times. Only results of products and attention can stay."""
    is_dear = any(each.flops for each in operations) and may_stay(function, args, kwargs)
    work = sum(
        max(each.flops * (SLOWER_ATTENTION if each.kind == "attention" else 1.0), FLOPS_A_BYTE * each.nbytes)
        for each in operations
    )
    return Run((str(function), before), work, new_bytes(args, kwargs, made) if is_dear else 0)


def mixtures(runs: Sequence[Run], whole: int) -> tuple[Mixture, ...]:
    """Return a block's mixtures between recomputing all of `runs` and keeping all `whole` bytes that it saves. They go
    from small to large, and each further byte saves less time than the bytes before."""
    total = sum(each.work for each in runs)
    found: list[Mixture] = []
    results: set[Result] = set()
    nbytes, saved = 0, 0.0
    for group in _alike([each for each in runs if each.nbytes and each.work]):
        results |= {each.result for each in group}
        nbytes += sum(each.nbytes for each in group)
        saved += sum(each.work for each in group)
        found.append(Mixture(frozenset(results), nbytes, saved / total))
    while found and not _is_worth(found[-1], found[-2] if len(found) > 1 else None, whole):
        found.pop()
    return tuple(found)


def _alike(runs: Sequence[Run]) -> list[list[Run]]:
    """Return the runs in groups, the most work for each byte first. Runs that are alike share a group."""
    groups: list[list[Run]] = []
    for each in sorted(runs, key=lambda each: each.nbytes / each.work):
        first = groups[-1][0] if groups else None
        if first is not None and ALIKE * each.work * first.nbytes >= first.work * each.nbytes:
            groups[-1].append(each)
        else:
            groups.append([each])
    return groups


def _is_worth(last: Mixture, before: Mixture | None, whole: int) -> bool:
    """Whether each of a mixture's last bytes saves more time than each byte that the whole block takes beyond it."""
    of_whole, beyond = whole - last.nbytes, 1.0 - last.share
    start_bytes, start_share = (before.nbytes, before.share) if before is not None else (0, 0.0)
    return of_whole > 0 and (last.share - start_share) * of_whole > beyond * (last.nbytes - start_bytes)
