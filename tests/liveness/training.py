"""The calls that hooks and facade make while a tiny engine is trained, and what must come out of it."""

from __future__ import annotations

import zlib
from typing import Any

import torch

from ds_slide.errors import SlideError
from ds_slide.optim.adamw import AdamWHyper
from ds_slide.optim.muon import MuonHyper, orthogonalized
from ds_slide.optim.rule import Hyper, at_step
from ds_slide.runtime.core.ranks import collectives
from ds_slide.runtime.weights.experts import StreamedExperts
from liveness.disk import names_of
from liveness.scheduler import active
from liveness.tiny import EXPERTS, MUON, Configuration, Tiny, build, noise

HYPER = AdamWHyper(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
HYPER_OF_MATRICES = MuonHyper(MUON, lr=1e-2, momentum=0.9, weight_decay=0.1, method="gram")


class Training:
    """What one rank does, call by call."""

    def __init__(
        self, configuration: Configuration, model: Tiny, runtime: Any, rank: int, reference: Training | None = None
    ) -> None:
        """`reference`: of the engine without an optimizer."""
        self.reference = reference
        self.configuration = configuration
        self.model = model
        self.runtime = runtime
        self.rank = rank
        self.number = 0
        """Of the micro-batch."""
        self.seen: list[int] = []
        """Checksums of the weights that were computed with."""
        self._between_blocks = collectives.dist.new_group() if configuration.exchanges else None

    def train(self) -> None:
        configuration, runtime = self.configuration, self.runtime
        for step in range(configuration.steps):
            for micro in range(configuration.accumulation):
                runtime.set_final(micro + 1 == configuration.accumulation)
                self.number = step * configuration.accumulation + micro
                if self.reference is not None:
                    with torch.no_grad():
                        self.reference._forward(with_backward=False)
                self._forward(with_backward=True)
                with torch.no_grad():  # as autograd runs a backward that makes no graph
                    runtime.begin_backward(self._hypers())
                    self._backward(self.number)
                    runtime.end_backward()
            if self.configuration.between == "overflow" and step % 2:
                runtime.taking.square_sum()
                runtime.discard_gradients()
            else:
                self._step(clips=bool(step) or configuration.clips_first)
            self._between()
            if configuration.inference and not (configuration.only_rank_0_infers and self.rank):
                with torch.no_grad():
                    self._forward(with_backward=False)

    def _hypers(self) -> list[Hyper]:
        hypers: list[Hyper] = [HYPER_OF_MATRICES, HYPER] if self.configuration.matrices else [HYPER]
        return [at_step(each, self.runtime.step_count + 1) for each in hypers]

    def _step(self, *, clips: bool) -> None:
        runtime = self.runtime
        if runtime.parts.deferred:
            norm, hypers = runtime.taking.square_sum() ** 0.5, self._hypers()
            scale = 1.0 / max(1.0, norm) if clips else 1.0
            if runtime.parts.context.settings.updates_in_step:
                runtime.orthogonalize(hypers, scale)
                hypers = orthogonalized(hypers, 1.0)
            runtime.step(hypers, scale)
        else:
            runtime.taking.norm_on_device()
            runtime.step(self._hypers(), 1.0)

    def _between(self) -> None:
        runtime, between = self.runtime, self.configuration.between
        if between == "one":
            self._states_of(runtime.blocks[-1])
        elif between == "all":
            for unit in runtime.units:
                runtime.access.settle(unit)
            if hasattr(runtime, "begin_writing"):
                runtime.access.begin_writing()
            runtime.resident_weights.unbind_all()
            runtime.access.reload_weights()
            runtime.resident_weights.bind_all()

    def _forward(self, *, with_backward: bool) -> None:
        self.model(lambda: self._units_forward(with_backward))

    def _uses(self, unit: Any) -> bool:
        """Whether the micro-batch of this rank uses the unit."""
        if not self.configuration.differ:
            return True
        if self.number % 3 == 2 and self.rank == self.number % 2:
            return False  # none at all
        return self._is_drawn(unit)

    def _has_gradient(self, unit: Any) -> bool:
        """Whether the backward of this rank comes to the unit."""
        if self.configuration.fickle:
            is_expected = not self.number % 4 or unit.spec.kind == "block"
            return self._is_drawn(unit) if self.number % 2 else is_expected
        return self._uses(unit)

    def _is_drawn(self, unit: Any) -> bool:
        return bool((5 * self.number + 2 * self.rank + unit.order) % 3)

    def _units_forward(self, with_backward: bool) -> None:
        runtime = self.runtime
        for unit in filter(self._uses, runtime.units):
            if unit.spec.kind == "outer":
                runtime.resident_weights.bind_if_fetched(unit)
                self._look(unit)
            else:
                runtime.enter_forward(unit, with_backward=with_backward)
                self._look(unit)
                self._look_at_experts(unit)
                self._exchange()
                runtime.leave_forward(unit)

    def _backward(self, number: int) -> None:
        runtime = self.runtime
        for unit in filter(self._has_gradient, reversed(runtime.units)):
            if unit.spec.kind == "block":
                runtime.enter_backward(unit)
                self._look_at_experts(unit)
                if self.configuration.checkpointing:
                    self._look(unit)  # computed once more
                    self._exchange()
                    runtime.enter_backward(unit)
                self._exchange()
            self._look(unit)
            for parameter, _ in unit.trainable:
                values = noise(parameter.numel(), 7.0 * number + unit.order + 3 * self.rank)
                parameter.grad = values.view_as(parameter).add(parameter.data, alpha=0.25)
            if unit.spec.kind == "block":
                runtime.leave_backward(unit)

    def _exchange(self) -> None:
        """What a block of a divided sequence sends to the other ranks."""
        if self._between_blocks is not None:
            collectives.dist.all_reduce(torch.ones(1), group=self._between_blocks)

    def one_more_forward(self) -> None:
        """While the other rank closes its engine, which is a reason to refuse it."""
        seen = list(self.seen)
        try:
            with torch.no_grad():
                self._forward(with_backward=False)
        except SlideError as error:
            assert "has ended its engine" in str(error), error
        self.seen = seen

    def _look(self, unit: Any) -> None:
        for parameter in unit.in_slot:
            self.seen.append(_checksum(parameter.data))

    def _look_at_experts(self, unit: Any) -> None:
        if unit.experts:
            source = StreamedExperts(self.runtime.parts.experts, unit, unit.experts)
            used = [expert for expert in range(EXPERTS) if (self.number + self.rank + unit.order + expert) % 3]
            for parameters in source.passes(used):
                self.seen.append(_checksum(parameters["experts"]))

    def states(self) -> list[int]:
        """Checksums of everything that is trained, when all is settled."""
        return [checksum for unit in self.runtime.units for checksum in self._states_of(unit)]

    def _states_of(self, unit: Any) -> list[int]:
        self.runtime.access.settle(unit)
        whole = slice(0, unit.layout.trainable_numel)
        states = ["momentum_buffer"] if unit.state.has("momentum_buffer") else ["exp_avg", "exp_avg_sq"]
        return [_checksum(unit.state.read(name, whole)) for name in ("weight", "remainder", *states)]


def _caches(runtime: Any, rank: int) -> str:
    """What stands in the caches in front of the disk, as far as they are as they were when this was written."""
    lines = []
    for name, cache in vars(getattr(runtime.parts, "ssd", None) or object).items():
        if not hasattr(cache, "_entries"):
            continue
        entries = {
            key: " ".join(
                [what for what in ("loading", "users", "writes", "changes") if getattr(entry, what, None)]
                + (["awaited"] if getattr(entry, "waiting", None) else [])
            )
            or "idle"
            for key, entry in cache._entries.items()
        }
        rest = {
            what.strip("_"): {k: list(v) if hasattr(v, "popleft") else v for k, v in dict(getattr(cache, what)).items()}
            for what in ("_asked", "_upcoming")
            if hasattr(cache, what)
        }
        lines.append(f"rank {rank}, {name} in buffers: {entries}, {rest}")
    return "\n".join(lines)


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.contiguous().view(torch.uint8).numpy())


def run_training(configuration: Configuration, rank: int) -> tuple[list[int], list[int]]:
    """Build, train, read and close; -> checksums of the weights seen and of the states."""
    scheduler = active()
    assert scheduler is not None
    model = Tiny(configuration)
    runtime = build(configuration, model)
    for disk in scheduler.disks:
        if disk.rank == rank:
            disk.name = names_of(runtime.units)
    scheduler.tell.append(lambda: _caches(runtime, rank))
    reference = None
    if configuration.reference:
        judge = Tiny(configuration)
        reference = Training(configuration, judge, build(configuration, judge, trains=False), rank)
    training = Training(configuration, model, runtime, rank, reference)
    scheduler.may_fail = "close" in configuration.ending
    scheduler.exploring = True
    training.train()
    states = training.states() if "read" in configuration.ending else []
    if configuration.ending == "one closes" and not rank:
        training.one_more_forward()
    if "close" in configuration.ending:
        runtime.close()
        if reference is not None:
            reference.one_more_forward()
            reference.runtime.close()
    else:
        scheduler.leave_threads = True
    return training.seen + (reference.seen if reference is not None else []), states
