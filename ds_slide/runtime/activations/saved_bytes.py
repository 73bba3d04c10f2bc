"""The GPU memory of a block's saved tensors, and the work of its operators, counted while the block is recomputed.

The count takes no more memory than the backward that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import _StopRecomputationError

from ds_slide.plan.mixtures import Run
from ds_slide.plan.operations import tensors_of
from ds_slide.plan.spare import Shape
from ds_slide.runtime.activations.mixing import Learning, Working
from ds_slide.runtime.core.calls import in_backward
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.weights.saved_weights import OpenHooks


@dataclass(frozen=True)
class Saved:
    """The tensors that a block has saved in one call. `square`: bytes of the saved tensors with an element for each
    pair of tokens of a sequence. `given_square`: bytes of such tensors among the block's inputs. `runs`: the runs of
    operators that were needed. `again`: the part of the forward's work that a recomputation does. `has_collective`:
    other ranks take part in it."""

    nbytes: int
    square: int
    given_square: int
    runs: Sequence[Run]
    again: float
    has_collective: bool = False


def counted(
    unit: Unit,
    function: Callable[..., Any],
    shape: Shape,
    report: Callable[[Saved], None],
    *,
    will_end_early: bool = False,
) -> Callable[..., Any]:
    """Return `function`, a block's forward, so that its recomputation counts what it saves and calls `report`.
    `shape`: of the batch.

    Each storage counts once. The storages of weights and inputs do not count, since they are there anyway, nor does the
    output's, which is the next block's input. A recomputation that is not re-entrant ends at the last tensor that is
    needed: the last product of a block, a quarter of its work, need not be done again. `will_end_early`: later
    recomputations end there, and only this one may go on to the end of the block.
    """
    forward = Working()

    def share(again: Sequence[Run]) -> float:
        work = sum(each.work for each in again)
        return min(1.0, work / forward.work) if forward.work else 1.0

    def run(*inputs: Any) -> Any:
        if not in_backward():
            with forward:
                return function(*inputs)
        given = list(tensors_of((inputs, getattr(function, "keywords", {}))))
        given_squares = {_address(tensor): _nbytes(tensor) for tensor in given if shape.has_square(tensor.shape)}
        there = {_address(tensor) for tensor in given}
        there |= {_address(parameter) for each in (unit, *unit.parts) for parameter in each.parameters}
        saved: dict[int, int] = {}
        squares: set[int] = set()
        learning = Learning()

        class Noting:
            """Notes what is saved, and remembers nothing by its place."""

            def reference(self, tensor: torch.Tensor) -> None:
                learning.saves()
                if (address := _address(tensor)) not in there:
                    saved[address] = _nbytes(tensor)
                    if shape.has_square(tensor.shape):
                        squares.add(address)

            def restore(self, saved: Any) -> torch.Tensor:
                raise AssertionError(f"{saved} is no reference")

        def found(part: float) -> Saved:
            square = sum(nbytes for address, nbytes in saved.items() if address in squares)
            given = sum(given_squares.values())
            return Saved(sum(saved.values()), square, given, again, part, learning.has_collective)

        hooks = OpenHooks(Noting())
        try:
            with learning:
                outputs = function(*inputs)
        except _StopRecomputationError:  # raised after the last tensor that is needed
            again = learning.end()
            report(found(share(again)))
            raise
        finally:
            hooks.close()
        for tensor in tensors_of(outputs):
            saved.pop(_address(tensor), None)
        again = learning.end()
        report(found(share(again) if will_end_early else 1.0))
        return outputs

    return run


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()
