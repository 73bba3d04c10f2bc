"""Updates of units by a client's own optimizer (`ds_slide.optim.client`), on the update lane.

One unit after the other has its masters and its gradient in two fp32 buffers, which all units share: the lane runs one
task at a time. Masters that are in fp32 already are updated where they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from ds_slide.errors import SlideError
from ds_slide.optim.client import ClientHyper
from ds_slide.optim.rule import Part
from ds_slide.plan.allocations import CLIENT_STATES, FP32_GRADIENTS, FP32_MASTERS, state_buffer_of
from ds_slide.report.log import log, size
from ds_slide.runtime.core.context import Context
from ds_slide.runtime.core.lanes import Job
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.updates.apply import UpdateSpan, UpdateStep
from ds_slide.store.in_memory import ClientStates
from ds_slide.store.state_buffers import StateBuffers
from ds_slide.store.way_back import WayBack


class ClientUpdates:
    """Takes the place of `HostUpdates`; called by the update lane only."""

    def __init__(self, context: Context) -> None:
        self.updater = context.updater
        allocator, plan = context.allocator, context.plan
        self._masters = allocator.tensor(FP32_MASTERS, torch.float32)
        self._gradients = allocator.tensor(FP32_GRADIENTS, torch.float32)
        self._limit = context.settings.slide.host_memory
        self._planned_states = plan.host_state_bytes
        self._planned = {
            unit.name: plan.entry(state_buffer_of(unit.name, CLIENT_STATES)).nbytes
            for unit in plan.units
            if unit.client_bytes
        }
        self.grown = 0
        """Bytes that the optimizer keeps beyond the plan."""

    def run(self, span: UpdateSpan, step: UpdateStep, part: Part = "whole", way_back: WayBack | None = None) -> int:
        """Update all elements of a unit. -> bytes moved."""
        assert part == "whole" and way_back is None
        unit, numel = span.unit, span.gradient.numel()
        states = unit.state.optimizer
        assert isinstance(states, ClientStates)
        masters = self._read_masters(span.buffers)
        gradient = self._gradients[:numel].copy_(span.gradient)
        if step.grad_scale != 1.0:
            gradient.mul_(step.grad_scale)
        on = {
            entry.name
            for each in step.segments
            for _, entry in unit.trainable
            if each.segment.start <= entry.offset < each.segment.stop
        }
        members = states.client.members
        settings = {
            each.segment.group: each.hyper.settings for each in step.segments if isinstance(each.hyper, ClientHyper)
        }
        gradients = [
            piece if member.name in on else None for member, piece in zip(members, _pieces(unit, gradient), strict=True)
        ]
        states.client.step(list(_pieces(unit, masters)), gradients, settings)
        self._write_masters(span.buffers, masters)
        return 2 * span.buffers.nbytes() + span.gradient.nbytes + 2 * self._measure(unit, states)

    def then(self, step: UpdateStep, job: Job) -> None:  # noqa: ARG002 - the update has ended with `run`
        job()

    def run_on_gpu(self, unit: Unit, gradient: torch.Tensor, step: UpdateStep) -> None:  # noqa: ARG002
        raise AssertionError("a client's optimizer steps in host memory (`plan.memory`)")

    def _read_masters(self, buffers: StateBuffers) -> torch.Tensor:
        weight, remainder = buffers.weight, buffers.remainder
        if remainder is None:
            return weight
        if remainder.is_floating_point():
            return remainder
        masters = self._masters[: weight.numel()]
        self.updater.join_(masters, weight, remainder)
        return masters

    def _write_masters(self, buffers: StateBuffers, masters: torch.Tensor) -> None:
        if buffers.remainder is None:
            return
        if buffers.remainder.is_floating_point():
            buffers.weight.copy_(masters)
        else:
            self.updater.split_(masters, buffers.weight, buffers.remainder)

    def _measure(self, unit: Unit, states: ClientStates) -> int:
        """Return the bytes of the unit's states. SlideError where they are more than planned and have no room."""
        nbytes = states.client.nbytes()
        more = nbytes - self._planned.get(unit.name, 0)
        if more <= 0:
            return nbytes
        self._planned[unit.name] = nbytes
        self.grown += more
        needed = self._planned_states + self.grown
        if self._limit is not None and needed > self._limit:
            raise SlideError(
                f"the optimizer's states of {unit.name} have grown to {size(nbytes)} during the run, and all states in "
                f"host memory to {size(needed)}, but ds_slide.host_memory is {size(self._limit)}; raise it, or use an "
                "optimizer that makes its states in its first step"
            )
        log.warning(
            "the optimizer's states of %s have grown to %s, %s beyond the plan", unit.name, size(nbytes), size(more)
        )
        return nbytes


def _pieces(unit: Unit, flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield views of the parameters that the optimizer sees, in their shapes."""
    assert isinstance(unit.state.optimizer, ClientStates)
    places: Sequence[int] = [entry.offset for _, entry in unit.trainable if entry.numel]
    for member, offset in zip(unit.state.optimizer.client.members, places, strict=True):
        yield flat[offset : offset + math.prod(member.shape)].view(member.shape)
