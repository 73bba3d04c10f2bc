"""How much GPU memory the saved tensors of a block take, and what its operators do: counted while it is recomputed.

That takes no more memory than the backward that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import _StopRecomputationError

from ds_slide.plan.mixtures import Run
from ds_slide.plan.operations import tensors_of
from ds_slide.runtime.activations.mixing import Learning, Working
from ds_slide.runtime.unit import Unit
from ds_slide.runtime.weights.calls import in_backward
from ds_slide.runtime.weights.saved_weights import OpenHooks


def counted(
    unit: Unit,
    function: Callable[..., Any],
    report: Callable[[int, Sequence[Run], float], None],
    *,
    will_end_early: bool = False,
) -> Callable[..., Any]:
    """`function`, a block's forward, which counts in its recomputation, and tells `report`, the bytes of what it saves,
    with the runs of operators that were needed for that, and the part of the forward's work that is done again.

    Each storage counts once; those of weights and inputs do not, which are there anyway, nor that of the output, which
    is the next block's input. A recomputation that is not re-entrant ends at the last tensor that is needed: the last
    product of a block, a quarter of its work, need not be done again. `will_end_early`: later recomputations end
    there, and only this one may go on to the end of the block.
    """
    forward = Working()

    def share(again: Sequence[Run]) -> float:
        work = sum(each.work for each in again)
        return min(1.0, work / forward.work) if forward.work else 1.0

    def run(*inputs: Any) -> Any:
        if not in_backward():
            with forward:
                return function(*inputs)
        there = {_address(tensor) for tensor in tensors_of((inputs, getattr(function, "keywords", {})))}
        there |= {_address(parameter) for each in (unit, *unit.parts) for parameter in each.parameters}
        saved: dict[int, int] = {}
        learning = Learning()

        def note(tensor: torch.Tensor) -> None:
            learning.saves()
            if (address := _address(tensor)) not in there:
                saved[address] = tensor.untyped_storage().nbytes()

        hooks = OpenHooks(note, _never)
        try:
            with learning:
                outputs = function(*inputs)
        except _StopRecomputationError:  # behind the last tensor that is needed; other exceptions come sooner
            again = learning.end()
            report(sum(saved.values()), again, share(again))
            raise
        finally:
            hooks.close()
        for tensor in tensors_of(outputs):
            saved.pop(_address(tensor), None)
        again = learning.end()
        report(sum(saved.values()), again, share(again) if will_end_early else 1.0)
        return outputs

    return run


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _never(_reference: Any) -> torch.Tensor:
    raise AssertionError("nothing is remembered by its place here")
