"""What the plan is made from: the sizes of the units, and the storage settings that set the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ds_slide.compression.codec import CHANGE_DTYPE, GradientCodec
from ds_slide.model.layout import UnitLayout
from ds_slide.store.state_buffers import StateBufferSpec, optimizer_bytes


@dataclass(frozen=True)
class UnitSize:
    """What the plan knows of a unit. The weights of outer modules and parts of blocks are always in host memory, and on
    the GPU as well unless they pass through it. `codec`: of its gradient. `specs`: the optimizer state buffers. Item
    sizes in bytes."""

    name: str
    layout: UnitLayout
    codec: GradientCodec
    kind: Literal["block", "part", "outer"]
    specs: Sequence[StateBufferSpec]
    weight_bytes: int
    passing_numel: int = 0
    """Elements of each GPU buffer through which an outer module passes in chunks; 0 where it is there as a whole."""
    held_bytes: int | None = None
    """None: as `Needs` has it."""

    @property
    def is_outer(self) -> bool:
        return self.kind == "outer"

    @property
    def written_bytes(self) -> int:
        """Bytes of what an update writes: one rank's weights, or a change of them."""
        return self.codec.numel * CHANGE_DTYPE.itemsize if self.codec.compresses else self.share

    @property
    def low_bytes(self) -> int:
        """Bytes of what completes the weights to exact masters, where all of both are on the GPU: the low halves of
        bf16; an fp32 weight is its own master."""
        return 0 if self.weight_bytes == 4 else 2 * self.layout.slot_numel

    @property
    def stays(self) -> bool:
        """Whether its weights do not pass through the window."""
        return self.kind != "block"

    @property
    def share(self) -> int:
        """Bytes of one rank's weights."""
        return self.layout.local_numel * self.weight_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of its optimizer state buffers."""
        return optimizer_bytes(self.specs, self.codec.numel)


@dataclass(frozen=True)
class SsdNeeds:
    """`weights`, `states`: what may go to SSD; where states may, held gradients may as well. Numbers of buffers: None
    is automatic."""

    weights: bool
    states: bool
    chunk_numel: int
    chunk_buffers: int | None = None
    weight_buffers: int | None = None
    checksums: bool = False
    """Whether a sum of every page on SSD is kept in host memory."""


@dataclass(frozen=True)
class Needs:
    """Storage settings that set the bytes."""

    held_bytes: int
    """Bytes an element of a held host gradient, of units that have no such number of their own; 0 when gradients are
    not held."""
    window: int
    """Slots, at least."""
    ring: int
    """Buffers through which the gradients of blocks pass, and one for outer modules; 0 when they need none in host
    memory."""
    ring_grows: bool = False
    """Whether spare host memory becomes more buffers for blocks."""
    ring_to_ssd: int = 0
    """Where `ring` is 0: buffers through which they pass when some of them are held on SSD."""
    world_size: int = 1
    shares_weights: bool = False
    """Several ranks read each other's weights in host memory; otherwise all units are gathered."""
    ssd: SsdNeeds | None = None
    """None: there is no SSD tier."""
    window_grows: bool = False
    """Whether spare GPU memory becomes slots."""
    trains: bool = True
    """False: nothing is updated, so that there are weights only."""
    page_locks: bool = True
    """Whether host memory that the GPU copies from or to is page-locked: not where the accelerator is the host."""
    speculates: bool = False
    """Whether updates of blocks may begin before the norm is known, with a way back each."""
    rounds_masters: Literal["auto"] | bool = False
    """Whether the masters of units whose gradients are compressed are their weights, bf16 ones rounded stochastically;
    "auto", which a plan's own needs never say: only where nothing else fits."""
    out_of_place: Literal["auto"] | bool = "auto"
    """Whether that is spare state buffers: as host memory allows, never, or of all that can have some first."""


@dataclass(frozen=True)
class Placement:
    """Indices of the units with states on the GPU, and of the others with weights, optimizer states or held
    gradients on SSD. `window`: slots, of which there are no more than blocks that pass through them. `promoted`: of
    those in host memory, the units whose states are on the GPU for now (`ds_slide.runtime.memory.tier_moves`)."""

    on_gpu: frozenset[int] = frozenset()
    weights_on_ssd: frozenset[int] = frozenset()
    chunks_on_ssd: frozenset[int] = frozenset()
    gradients_on_ssd: frozenset[int] = frozenset()
    window: int = 0
    ring: int = 0
    """Buffers through which the gradients of blocks pass; 0: as many as `Needs` has."""
    promoted: frozenset[int] = frozenset()
    undo_logs: frozenset[int] = frozenset()
    """Of the units with an undo log."""
    spare_states: frozenset[int] = frozenset()
    """Of the units with spare state buffers instead."""

    @property
    def home(self) -> Placement:
        """With every unit where it goes back to."""
        return replace(self, promoted=frozenset())

    @property
    def ways_back(self) -> frozenset[int]:
        """Units of which updates may begin before the norm is known."""
        return self.undo_logs | self.spare_states

    @property
    def on_ssd(self) -> frozenset[int]:
        """Units with anything there."""
        return self.weights_on_ssd | self.chunks_on_ssd | self.gradients_on_ssd


def is_held(unit: UnitSize, needs: Needs) -> bool:
    """Whether the unit's gradient waits outside the GPU for the step."""
    return bool(needs.held_bytes if unit.held_bytes is None else unit.held_bytes)


def held_bytes(unit: UnitSize, needs: Needs) -> int:
    """Of the unit's held gradient; 0 when gradients are not held."""
    return unit.codec.numel * (needs.held_bytes if unit.held_bytes is None else unit.held_bytes)
