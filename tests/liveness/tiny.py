"""A tiny engine, built as for DeepSpeed."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ds_slide.config import SlideConfig
from ds_slide.model.layout import ParameterInfo, build_layout, piece
from ds_slide.model.structure import Precision, UnitSpec
from ds_slide.optim.adamw import ADAMW
from ds_slide.optim.muon import muon_rule
from ds_slide.plan.allocations import MATRICES_UNDER_WAY, MATRIX_COPIES, PIECES_RING, Allocation
from ds_slide.plan.memory import Plan
from ds_slide.plan.needs import Placement
from ds_slide.plan.ssd_settings import SsdSettings
from ds_slide.runtime.build import Blueprint, build_runtime
from ds_slide.runtime.core.device import Device
from ds_slide.runtime.core.ranks.collectives import Ranks
from ds_slide.runtime.core.settings import RuntimeSettings, UnitPlan
from liveness.weights import sharing_of

CHUNK_NUMEL = 2048
SMALL_NUMEL = 128
EXPERTS, EXPERT_NUMEL = 8, 64
MUON = muon_rule(frozenset({1}), {"gram": torch.float32}, {})


@dataclass(frozen=True)
class Configuration:
    """What is explored. Sizes are those of the smallest engine that has the same hand-overs."""

    name: str
    blocks: int = 3
    chunks: int = 1
    """Chunks of a block."""
    outer_units: int = 0
    """1: an embedding, 2: also a head."""
    slots: int = 2
    weight_buffers: int = 2
    chunk_buffers: int = 2
    gradient_buffers: int = 2
    held: bool = True
    passes: Literal[1, 2] = 1
    """In which held gradients are applied."""
    speculates: bool = False
    """Updates of blocks begin under backward."""
    clips_first: bool = True
    """False: the first step's norm is below the limit."""
    accumulation: int = 1
    sums: bool = False
    """The GPU adds up the gradients of the last blocks, all but the first one."""
    announced: bool = True
    """False: by backwards of which nobody has told the engine. A gradient passes in four pieces."""
    checkpointing: bool = False
    inference: bool = False
    """A forward without backward after every step."""
    between: Literal["", "one", "all", "overflow"] = ""
    """After a step the states of one block are read; or of all units, and the weights loaded anew, as around a
    checkpoint; or every second step is skipped instead (held gradients)."""
    weights_on_ssd: bool = True
    chunks_on_ssd: bool = True
    outer_chunks_on_ssd: bool = False
    gradients_on_ssd: bool = False
    only: tuple[int, ...] | None = None
    """Blocks that have states on SSD, None for all."""
    ranks: int = 1
    shared: bool = False
    """Weights of the ranks in memory that all of them read, else they are gathered."""
    apart: bool = False
    """The ranks are on a host each, and have no board."""
    experts: bool = False
    """Blocks have eight frozen experts, which move in parts, one at a time. A micro-batch uses five or six of them."""
    exchanges: bool = False
    """Blocks have a collective of their own, as with divided sequences."""
    only_rank_0_infers: bool = False
    matrices: bool = False
    """Muon updates the blocks, through copies that have bytes for one of them."""
    differ: bool = False
    """Each rank uses other blocks and outer modules in each micro-batch, and some micro-batches on one rank none."""
    fickle: bool = False
    """Each rank uses all of them, and in every other micro-batch gives some no gradient, not the same as the others.
    Outer modules have none in every fourth."""
    reference: bool = False
    """A second engine without an optimizer, of which a forward precedes each one of the training."""
    one_at_a_time: bool = False
    """See `collectives.Collectives`."""
    steps: int = 2
    ending: Literal["read", "read and close", "close", "one closes"] = "read"
    """After the last step: read all states, which waits for every update, or close the engine, or both; or rank 1
    closes it while rank 0 still runs a forward, which may be refused then."""

    def in_memory(self) -> Configuration:
        """The same training with everything in host memory, weights gathered where they can be."""
        return dataclasses.replace(
            self,
            weights_on_ssd=False,
            chunks_on_ssd=False,
            outer_chunks_on_ssd=False,
            gradients_on_ssd=False,
            speculates=False,
            sums=False,
            shared=self.only_rank_0_infers or self.differ or self.fickle or (self.experts and self.ranks > 1),
            one_at_a_time=False,
            ending="read",
        )

    @property
    def units(self) -> int:
        return self.blocks + self.outer_units

    def block_orders(self) -> list[int]:
        first = min(self.outer_units, 1)
        return list(range(first, first + self.blocks))

    def outer_orders(self) -> list[int]:
        return [order for order in range(self.units) if order not in self.block_orders()]


class Tiny(nn.Module):
    """Its forward is whatever it is called with, so that the root's hooks bracket it."""

    def __init__(self, configuration: Configuration) -> None:
        super().__init__()
        numel = SMALL_NUMEL if configuration.chunks == 1 else configuration.chunks * CHUNK_NUMEL
        blocks = configuration.block_orders()
        self.units = nn.ModuleList()
        for order in range(configuration.units):
            unit = nn.Module()
            values = noise(numel if order in blocks else SMALL_NUMEL, 0.5 + order)
            shape = (8, -1) if configuration.matrices and order in blocks else (-1,)
            unit.register_parameter("weight", nn.Parameter(values.clone().view(shape)))
            if configuration.experts and order in blocks:
                experts = noise(EXPERTS * EXPERT_NUMEL, 2.5 + order).view(EXPERTS, 1, EXPERT_NUMEL)
                unit.register_parameter("experts", nn.Parameter(experts.clone(), requires_grad=False))
            self.units.append(unit)

    def forward(self, work: Callable[[], None]) -> None:
        work()


def unit_plans(model: Tiny, configuration: Configuration, settings: RuntimeSettings) -> list[UnitPlan]:
    blocks, plans = configuration.block_orders(), []
    for order, module in enumerate(model.units):
        parameters = dict(module.named_parameters())
        block = order in blocks
        spec = UnitSpec(
            name=f"block {order}" if block else f"outer {order}",
            kind="block" if block else "outer",
            index=blocks.index(order) if block else order,
            module=module if block else None,
            parameters=tuple((f"units.{order}.{name}", parameter) for name, parameter in parameters.items()),
            numel=sum(parameter.numel() for parameter in parameters.values()),
            precision=Precision.declared(module.weight),
        )
        infos = [
            ParameterInfo(
                *(name, tuple(each.shape), each.numel()),
                int(configuration.matrices and not block) if settings.trains and name == "weight" else None,
                of_experts=name == "experts",
            )
            for name, each in parameters.items()
        ]
        layout = build_layout(infos, configuration.ranks)
        codec = settings.codec_of(spec.precision, layout)
        plans.append(UnitPlan(spec, layout, [parameters[entry.name] for entry in layout.entries], codec))
    return plans


def _placement(configuration: Configuration) -> Placement:
    some = frozenset(configuration.block_orders() if configuration.only is None else configuration.only)
    on_ssd = some if configuration.chunks_on_ssd else frozenset()
    if configuration.outer_chunks_on_ssd:
        on_ssd |= frozenset(configuration.outer_orders())
    return Placement(
        weights_on_ssd=some if configuration.weights_on_ssd else frozenset(),
        chunks_on_ssd=on_ssd,
        gradients_on_ssd=some if configuration.gradients_on_ssd else frozenset(),
        window=configuration.slots,
        undo_logs=frozenset(configuration.block_orders()) if configuration.speculates else frozenset(),
    )


def _plan(configuration: Configuration, units: Sequence[UnitPlan], settings: RuntimeSettings) -> Plan:
    needs = settings.needs(world_size=configuration.ranks, shares_weights=configuration.shared, gpu_is_own=False)
    plan = Plan.of([unit.size(settings) for unit in units], needs, _placement(configuration))
    return dataclasses.replace(plan, allocations=tuple(map(_smaller, plan.allocations)))


def _smaller(entry: Allocation) -> Allocation:
    """Pieces of gradients that are as small for these units as they are for real ones, and copies of one matrix."""
    parts = {PIECES_RING: 4, MATRIX_COPIES: MATRICES_UNDER_WAY}.get(entry.what, 1)
    return dataclasses.replace(entry, nbytes=entry.nbytes // parts)


def _settings(configuration: Configuration, *, trains: bool) -> RuntimeSettings:
    # Not validated: a user's engine has no fewer than two of any buffer.
    slide = SlideConfig.model_construct(
        window=configuration.slots,
        ssd_buffers=configuration.chunk_buffers,
        weight_buffers=configuration.weight_buffers,
        gradient_buffers=configuration.gradient_buffers,
        defer_updates=configuration.held,
        cpu_threads=1,
        cpu_cores="none",
        checksums=False,
        hang_timeout=0.0,  # a watchdog is no part of what is explored
        update_passes=configuration.passes,
        speculate=configuration.speculates,
        experts=1 if configuration.experts else 0,
    )
    return RuntimeSettings(
        slide=slide,
        ssd=SsdSettings([("", Path())], True, True, CHUNK_NUMEL, queue_depth=None, request_bytes=None),
        gradient_dtype=torch.bfloat16,
        accumulation_dtype=torch.float32,
        accumulates=configuration.accumulation > 1 and configuration.announced,
        clips=configuration.held,
        rule=None if not trains else MUON if configuration.matrices else ADAMW,
        ranks=configuration.ranks,
    )


def _without_optimizer(configuration: Configuration) -> Configuration:
    """Weights only, which are where those of the training are."""
    kept = {"chunks_on_ssd": False, "outer_chunks_on_ssd": False, "gradients_on_ssd": False}
    return dataclasses.replace(configuration, held=True, accumulation=1, **kept)


@dataclass(frozen=True)
class _NoClients:
    """Nobody else uses the parameters."""

    rank: int
    given: dict[nn.Parameter, torch.Tensor]

    def take_weights(self, parameter: nn.Parameter, entry: Any) -> torch.Tensor:
        start, stop = piece(entry, self.rank)
        return self.given[parameter].reshape(-1)[start:stop]

    def adopt(self, unit: Any) -> None: ...

    def set_availability(self, parameters: Any, binding: Any) -> None: ...


def build(configuration: Configuration, model: Tiny, *, trains: bool = True) -> Any:
    if not trains:
        configuration = _without_optimizer(configuration)
    device = Device(torch.device("cpu"))
    ranks = _ranks(configuration, device)
    given = {parameter: parameter.detach().clone() for parameter in model.parameters()}
    sharing = sharing_of(ranks) if configuration.shared else None
    settings = _settings(configuration, trains=trains)
    units = unit_plans(model, configuration, settings)
    plan, clients = _plan(configuration, units, settings), _NoClients(ranks.rank, given)
    runtime = build_runtime(model, Blueprint(units, plan, settings, ranks, device, clients, sharing))
    for unit in runtime.blocks[1:] if configuration.sums else ():
        unit.gradient.gpu_sum = torch.empty(unit.codec.numel, dtype=unit.state.dtype_of("gradient"))
    return runtime


def _takes(function: Any, parameter: str) -> bool:
    return parameter in inspect.signature(function).parameters


def _ranks(configuration: Configuration, device: Device) -> Ranks:
    """Before ranks had a stream of their own they were made without the device."""
    on: dict[str, Any] = {"device": device} if _takes(Ranks.__init__, "device") else {}
    make: Any = Ranks
    if configuration.ranks == 1:
        ranks = make(rank=0, world_size=1, **on)
    else:
        ranks = make.over(None, **on, **({"divides_sequences": True} if configuration.exchanges else {}))
    if configuration.apart:
        ranks.conduct(None)
    assert isinstance(ranks, Ranks)
    return ranks


@functools.cache
def noise(numel: int, phase: float) -> torch.Tensor:
    """Values to train with."""
    return torch.cos(torch.arange(numel) * 0.11 + phase).bfloat16()
