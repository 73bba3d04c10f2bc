"""The inputs of the runtime's builder: settings that are decided once, and units before they have states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from ds_slide.compression.codec import GradientCodec, Identity
from ds_slide.compression.lsp.codec import Lsp, subspace
from ds_slide.config import SlideConfig
from ds_slide.model.carried import Carried
from ds_slide.model.layout import UnitLayout
from ds_slide.model.structure import Precision, UnitSpec, parameter_shape
from ds_slide.optim.low_precision import STATE_FORMATS
from ds_slide.optim.muon import MuonRule
from ds_slide.optim.rule import Member, UpdateRule
from ds_slide.plan.needs import Needs, SsdNeeds, UnitSize
from ds_slide.plan.ssd_settings import SsdSettings
from ds_slide.store.state_buffers import StateBufferSpec, optimizer_buffers

LEAST_RING = 4
"""Buffers of `gradient_buffers` "auto", where host memory has no room for more or no thread waits for them."""

_ROUNDS_MASTERS: dict[str, Literal["auto"] | bool] = {"auto": "auto", "fp32": False, "bf16": True}


@dataclass(frozen=True)
class RuntimeSettings:
    """The settings of a run: the parsed JSON block, and the settings of DeepSpeed. A value derived from both is
    computed where it is used, or here if several places use it."""

    slide: SlideConfig
    ssd: SsdSettings | None
    """The SSD tier; None without one."""
    gradient_dtype: torch.dtype
    """The data type of gradients when they are reduced and sent to host memory, unless a unit's precision sets
    another."""
    accumulation_dtype: torch.dtype
    """The data type of sums of several micro-batches' gradients."""
    accumulates: bool
    """Whether a step has more than one micro-batch."""
    clips: bool
    """Whether gradients are clipped by their norm, which is known only when all gradients are."""
    rule: UpdateRule | None
    """The rule that updates the weights. None: no parameter has an optimizer; the engine has weights only, and sends
    nothing from the GPU to host memory."""
    ranks: int = 1
    has_muon_kernel: bool = False
    """Whether a kernel makes Muon's symmetric products."""

    @property
    def trains(self) -> bool:
        return self.rule is not None

    @property
    def whole_units(self) -> bool:
        """Whether a client's optimizer updates the weights, one whole unit at a time, in host memory."""
        return self.rule is not None and self.rule.whole_units

    @property
    def by_elements(self) -> bool:
        """Whether every update treats single elements, so that a part of a unit may be updated before the rest."""
        return self.rule is not None and not self.rule.whole_units and not isinstance(self.rule, MuonRule)

    @property
    def limits_updates(self) -> bool:
        """Whether gradients are clipped by the norm of Muon's updates."""
        return isinstance(self.rule, MuonRule) and self.clips and self.slide.muon_norm == "update"

    @property
    def takes_batches(self) -> bool:
        """Whether a kernel takes several matrices of a unit together."""
        return self.has_muon_kernel and not self.updates_in_step

    @property
    def updates_in_step(self) -> bool:
        """Whether Muon's updates are computed in the step, before they are applied: for their norm, or because each
        rank has a flat piece of a matrix."""
        return isinstance(self.rule, MuonRule) and (self.ranks > 1 or self.limits_updates)

    @property
    def defers(self) -> bool:
        """Whether gradients wait for the step (`SlideConfig.defer_updates`). A loss scale may skip it."""
        if self.slide.defer_updates != "auto":
            return self.slide.defer_updates
        in_step = self.clips or self.accumulates or self.updates_in_step
        return in_step or self.gradient_dtype == torch.float16

    @property
    def held_dtype(self) -> torch.dtype | None:
        """The data type of held gradients, unless a unit's precision sets another; None where they are not held."""
        if self.trains and not self.defers:
            return None
        return self.accumulation_dtype if self.accumulates else self.gradient_dtype

    def needs(self, *, world_size: int, shares_weights: bool, gpu_is_own: bool) -> Needs:
        """Return the inputs that determine the bytes of the plan. `gpu_is_own`: the accelerator has memory of its
        own."""
        slide, held = self.slide, self.held_dtype
        ring = LEAST_RING if slide.gradient_buffers == "auto" else slide.gradient_buffers
        return Needs(
            held_bytes=0 if held is None else held.itemsize,
            # One slot computes, one is filled meanwhile, one evens out their times.
            window=3 if slide.window == "auto" else slide.window,
            window_grows=slide.window == "auto",
            trains=self.trains,
            ring=ring if held is None or self.accumulates else 0,
            ring_grows=slide.gradient_buffers == "auto" and held is None and gpu_is_own,
            ring_to_ssd=ring,
            world_size=world_size,
            shares_weights=shares_weights,
            ssd=None if self.ssd is None else self._ssd_needs(self.ssd),
            page_locks=gpu_is_own,
            speculates=held is not None and self.by_elements and self.slide.speculate is not False,
            whole_units=self.whole_units,
            experts=slide.experts,
            rounds_masters=_ROUNDS_MASTERS["fp32" if slide.compression is None else slide.compression.master_dtype],
            out_of_place=slide.debug.out_of_place,
        )

    def _ssd_needs(self, ssd: SsdSettings) -> SsdNeeds:
        slide = self.slide
        return SsdNeeds(
            weights=ssd.weights,
            states=ssd.states,
            chunk_numel=ssd.chunk_numel,
            chunk_buffers=None if slide.ssd_buffers == "auto" else slide.ssd_buffers,
            weight_buffers=None if slide.weight_buffers == "auto" else slide.weight_buffers,
            checksums=slide.checksums,
        )

    def specs(self, dtype: torch.dtype, rule: UpdateRule | None) -> tuple[StateBufferSpec, ...]:
        """Return the optimizer state buffers of `rule` for weights of `dtype`."""
        if rule is None:
            return ()
        return optimizer_buffers(dtype, rule, STATE_FORMATS[self.slide.state_dtype])

    def codec_of(self, precision: Precision, layout: UnitLayout) -> GradientCodec:
        """Return a codec for the gradients of a unit."""
        return Identity(layout, self.gradient_of(precision))

    def compressing_codec_of(self, precision: Precision, layout: UnitLayout) -> GradientCodec:
        """Return a codec that compresses the gradients of a unit of matrices."""
        assert self.slide.compression is not None
        return Lsp(layout, self.gradient_of(precision), self.slide.compression)

    def compresses(self, parameter: nn.Parameter) -> bool:
        """Whether the gradient of a trainable parameter of a block is compressed, by its shape."""
        compression = self.slide.compression
        if compression is None or not self.trains:
            return False
        assert compression.d != "auto"
        return bool(subspace(parameter_shape(parameter), compression.d))

    def gradient_of(self, precision: Precision) -> torch.dtype:
        """Return the data type of gradients of units of `precision` when they are reduced and sent to host memory."""
        return precision.gradient or self.gradient_dtype

    def held_of(self, precision: Precision) -> torch.dtype | None:
        """Return the data type of their held gradients. Sums have one data type for all units; single gradients keep
        their own."""
        if self.held_dtype is None or self.accumulates or precision.gradient is None:
            return self.held_dtype
        return precision.gradient


@dataclass(frozen=True)
class UnitPlan:
    """A unit before it has states. `parameters` in the order of `layout.entries`."""

    spec: UnitSpec
    layout: UnitLayout
    parameters: Sequence[nn.Parameter]
    codec: GradientCodec
    chunk_rows: int = 0
    """Rows of a chunk of an outer module (one matrix) that is streamed through the GPU; 0: the whole unit is on the
    GPU."""

    @property
    def carried(self) -> list[tuple[Carried, str]]:
        """The frozen tensors that move with the parameters, each with the name of its place in the layout."""
        name_of = {id(p): name for name, p in self.spec.parameters}
        return [
            (each, name_of[id(each.of)] if each.is_alias else each.name)
            for each in self.spec.carried
            if not each.is_alias or id(each.of) in name_of
        ]

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the weights."""
        return self.spec.precision.weight

    @property
    def passing_numel(self) -> int:
        """Elements of each GPU buffer for such a streamed outer module (`ds_slide.runtime.weights.rows`)."""
        return self.chunk_rows * self.layout.entries[0].shape[1] if self.chunk_rows else 0

    def specs(self, settings: RuntimeSettings) -> tuple[StateBufferSpec, ...]:
        """Return the optimizer state buffers, besides the buffer that an update writes."""
        return settings.specs(self.codec.written_dtype(self.dtype), self.rule(settings))

    def rule(self, settings: RuntimeSettings) -> UpdateRule | None:
        """Return the update rule of the unit's parameters, which is one (`Precision.rule`)."""
        group = next((entry.group for entry in self.layout.entries if entry.group is not None), None)
        return settings.rule if settings.rule is None or group is None else settings.rule.of_group(group)

    def size(self, settings: RuntimeSettings) -> UnitSize:
        """Return the description of the unit for the plan."""
        held, rule = settings.held_of(self.spec.precision), self.rule(settings)
        shapes = [
            (p, entry.shape)
            for p, entry in zip(self.parameters, self.layout.entries, strict=True)
            if entry.group is not None
        ]
        largest = 0 if rule is None else rule.largest_matrix(shapes)
        if largest and settings.updates_in_step:
            largest = max(math.prod(shape) for _, shape in shapes)  # an update takes a parameter as a whole
        return UnitSize(
            self.spec.name,
            self.layout,
            self.codec,
            self.spec.kind,
            self.specs(settings),
            self.dtype.itemsize,
            self.passing_numel,
            0 if held is None else held.itemsize,
            client_bytes=0 if rule is None else rule.beside(self.members),
            largest_matrix=largest,
            batch_bytes=0 if rule is None or not settings.takes_batches else rule.batch_bytes(shapes),
            product_flop=0 if rule is None else rule.product_flop(shapes),
        )

    @property
    def members(self) -> list[Member]:
        """The trained parameters as a rule for whole parameters sees them: whole, or with several ranks this rank's
        flat piece with its padding."""
        several = self.layout.world_size > 1
        return [
            Member(entry.name, parameter, entry.group, (entry.partition_numel,) if several else entry.shape)
            for parameter, entry in zip(self.parameters, self.layout.entries, strict=True)
            if entry.group is not None and entry.numel
        ]
