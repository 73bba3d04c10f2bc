"""The choice of backwards that may begin updates when clipping is off, and the hold of gradients where one may not.

With clipping off a block is updated as soon as its gradient has arrived, and the update cannot be taken back. A script
may have run the backward for something else: the gradient of its inputs (saliency, adversarial examples), or of another
model whose output this model judges. So the first time that a backward gives a gradient and may not be meant for this
engine's next step, the engine begins to hold gradients until `step()`. It goes on so, as with `"defer_updates": true`:
the numbers are the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ds_slide.errors import SlideError
from ds_slide.plan.host_room import host_room, local_ranks
from ds_slide.report.log import log, size
from ds_slide.runtime.core import running
from ds_slide.runtime.core.calls import add_tensors
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.parts import Parts
from ds_slide.store.host_memory import require_page_locks
from ds_slide.store.in_memory import HeldInMemory, InMemory
from ds_slide.store.state import UnitState


class Doubts:
    """Reasons why the backward under way may not be followed by this engine's step. Used by the compute thread."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._asks_for_inputs = False
        self.of_another: str | None = None
        """Set when a backward begins: a clause that names another engine's part in it."""

    def begin_forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Look at the arguments of a forward of the whole model."""
        if not torch.is_grad_enabled():
            return
        tensors: list[torch.Tensor] = []
        add_tensors(tensors, args)
        add_tensors(tensors, kwargs)
        self._asks_for_inputs |= any(tensor.requires_grad for tensor in tensors)

    def end_backward(self) -> None:
        """Forget the doubts about the backward that has ended."""
        self._asks_for_inputs, self.of_another = False, None

    def why(self, *, at_boundary: bool) -> str | None:
        """Return the reason as a clause, None where the backward trains. `at_boundary`: a step follows it."""
        if self.of_another is not None:
            return self.of_another
        if not self._module.training:
            return "a backward ran with the model in eval mode (engine.train() ends that)"
        if self._asks_for_inputs:
            return "a backward ran through an input that requires a gradient"
        return None if at_boundary else "a backward ran that is not at a gradient accumulation boundary"


def defer_updates(parts: Parts, why: str) -> None:
    """Give every unit whose update would begin at once memory for its gradient, which waits for the step from now on.

    Called before any update of the backward under way. `why`: a clause. SlideError where host memory has no room.
    """
    units = [unit for unit in parts.units if _goes_straight_to_its_update(unit)]
    plan = parts.plan.with_held_gradients()
    nbytes = plan.host_bytes - parts.plan.host_bytes
    _require_room(nbytes, why)
    if parts.context.device.is_cuda:
        require_page_locks(plan.host_bytes)
    held = [HeldInMemory(InMemory(_gradient_memory(parts, unit))) for unit in units]
    for unit, sink in zip(units, held, strict=True):
        if unit.home is None:
            unit.state = dataclasses.replace(unit.state, gradient=sink)
        else:
            unit.home = dataclasses.replace(unit.home, gradient=sink)
    parts.plan, parts.updating.deferred = plan, True
    if parts.context.ranks.rank == 0:
        log.info("%s: gradients wait for the step from now on, in %s more of host memory", why, size(nbytes))


def _goes_straight_to_its_update(unit: Unit) -> bool:
    """Whether the unit is updated as soon as its gradient arrives, once a promoted unit has gone back."""
    state: UnitState = unit.state if unit.home is None else unit.home
    return bool(unit.codec.numel) and not state.gradient.buffers


def _gradient_memory(parts: Parts, unit: Unit) -> torch.Tensor:
    return parts.context.memory.tensor(unit.codec.numel, unit.codec.dtype, transfers=True)


def _require_room(nbytes: int, why: str) -> None:
    room = host_room(local_ranks(), running.untouched_host_bytes())
    if nbytes > room.nbytes:
        raise SlideError(
            f"{why}, so its gradients have to wait for engine.step() in {size(nbytes)} of host memory, but "
            f"{size(room.nbytes)} are free ({room.source}), {size(nbytes - room.nbytes)} short; "
            "free some, run that part without DS-Slide, or set "
            '"ds_slide": {"defer_updates": true}, which plans for that memory at the start'
        )
