"""The input of the plan: the sizes of the units, and the storage settings that set the bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ds_slide.compression.codec import GradientCodec
from ds_slide.model.layout import UnitLayout
from ds_slide.store.state_buffers import StateBufferSpec, optimizer_bytes


@dataclass(frozen=True)
class UnitSize:
    """What the plan knows of a unit. The weights of outer modules and parts of blocks are always in host memory, and on
    the GPU as well unless they pass through it. `codec`: encodes its gradient. `specs`: the optimizer state buffers.
    Item sizes are in bytes."""

    name: str
    layout: UnitLayout
    codec: GradientCodec
    kind: Literal["block", "part", "outer"]
    specs: Sequence[StateBufferSpec]
    weight_bytes: int
    passing_numel: int = 0
    """Elements of each GPU buffer through which an outer module passes in chunks; 0 where it is there as a whole."""
    held_bytes: int | None = None
    """Bytes an element of its held gradient; None: the number in `Needs`."""
    client_bytes: int = 0
    """Bytes of the states that a client's optimizer keeps for it."""
    largest_matrix: int = 0
    """Elements of the largest matrix that its update takes as a whole, on the accelerator; 0: it is updated element by
    element."""
    batch_bytes: int = 0
    """GPU bytes of an update that takes several of these matrices together, where the states are on the GPU; 0: it
    takes them one by one."""
    product_flop: int = 0
    """FLOP of the products of these matrices in an update, which the accelerator makes wherever the states are."""

    @property
    def is_outer(self) -> bool:
        return self.kind == "outer"

    @property
    def packed_itemsize(self) -> int:
        """Bytes of an element of the gradient that is packed for several ranks."""
        return self.codec.packed_itemsize(self.weight_bytes)

    @property
    def is_averaged_in_place(self) -> bool:
        return is_averaged_in_place(self.codec, self.kind)

    @property
    def written_bytes(self) -> int:
        """Bytes that an update writes: one rank's weights, or a change of them."""
        return self.codec.written_numel * self.codec.written_itemsize(self.weight_bytes)

    @property
    def stays(self) -> bool:
        """Whether its weights stay outside the window."""
        return self.kind != "block"

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert that can move by itself; 0 where the unit has none."""
        return self.layout.expert_numel * self.weight_bytes

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
    """`weights`, `states`: whether they may go to SSD; held gradients may where states may. Numbers of buffers: None is
    automatic."""

    weights: bool
    states: bool
    chunk_numel: int
    chunk_buffers: int | None = None
    weight_buffers: int | None = None
    checksums: bool = False
    """Whether host memory keeps a checksum of every page on SSD."""


@dataclass(frozen=True)
class Needs:
    """Storage settings that set the bytes."""

    held_bytes: int
    """Bytes an element of a held host gradient, for units without a number of their own; 0 when gradients are not
    held."""
    window: int
    """Least number of slots."""
    ring: int
    """Host buffers through which the gradients of blocks pass, besides one for outer modules; 0 when they need
    none."""
    ring_grows: bool = False
    """Whether spare host memory becomes more buffers for blocks."""
    ring_to_ssd: int = 0
    """Where `ring` is 0: buffers through which gradients pass when some of them are held on SSD."""
    world_size: int = 1
    shares_weights: bool = False
    """Whether several ranks read each other's weights in host memory; otherwise all units are gathered."""
    ssd: SsdNeeds | None = None
    """None: there is no SSD tier."""
    window_grows: bool = False
    """Whether spare GPU memory becomes slots."""
    trains: bool = True
    """False: nothing is updated, and there are only weights."""
    page_locks: bool = True
    """Whether host memory that the GPU copies from or to is page-locked. False where the accelerator is the host."""
    speculates: bool = False
    """Whether blocks may have speculative updates, each with a way back."""
    rounds_masters: Literal["auto"] | bool = False
    """Whether units whose gradients are compressed have no masters but their weights; bf16 weights are then rounded
    stochastically. "auto": only where nothing else fits; a plan's own needs never say it."""
    whole_units: bool = False
    """Whether a client's optimizer updates whole units in host memory, over fp32 views of masters and gradients."""
    experts: Literal["auto"] | int = 0
    """Bytes of a GPU buffer for experts that move in parts; 0: blocks move whole. "auto": as memory needs; a plan's own
    needs never say it."""
    out_of_place: Literal["auto"] | bool = "auto"
    """Whether the way back is spare state buffers. "auto": as host memory allows; False: never; True: all units that
    can have some get them first."""


@dataclass(frozen=True)
class Placement:
    """Indices of the units with states on the GPU, and of other units with weights, optimizer states or held gradients
    on SSD. `window`: number of slots, at most one for each block that passes through. `promoted`: units with a home
    outside the GPU whose states are on the GPU for now (`ds_slide.runtime.memory.tier_moves`)."""

    on_gpu: frozenset[int] = frozenset()
    weights_on_ssd: frozenset[int] = frozenset()
    chunks_on_ssd: frozenset[int] = frozenset()
    gradients_on_ssd: frozenset[int] = frozenset()
    window: int = 0
    ring: int = 0
    """Buffers through which the gradients of blocks pass; 0: the number in `Needs`."""
    promoted: frozenset[int] = frozenset()
    undo_logs: frozenset[int] = frozenset()
    """Indices of the units with an undo log."""
    spare_states: frozenset[int] = frozenset()
    """Indices of the units with spare state buffers instead."""
    summed: frozenset[int] = frozenset()
    """Indices of the units whose gradients are added up on the GPU, in a buffer of their own. Their states are not
    there."""

    @property
    def home(self) -> Placement:
        """This placement with no unit promoted."""
        return replace(self, promoted=frozenset())

    @property
    def ways_back(self) -> frozenset[int]:
        """Units that may have a speculative update."""
        return self.undo_logs | self.spare_states

    @property
    def on_ssd(self) -> frozenset[int]:
        """Units with any state on SSD."""
        return self.weights_on_ssd | self.chunks_on_ssd | self.gradients_on_ssd


def is_averaged_in_place(codec: GradientCodec, kind: str) -> bool:
    """Whether several ranks average a unit's gradient from where autograd left it. All other gradients are packed
    first. An outer module can be larger than many blocks, and the largest packed gradient sets the size of the GPU
    buffers."""
    return kind == "outer" and codec.lies_as_parts


def has_experts_in_parts(unit: UnitSize, needs: Needs) -> bool:
    """Whether experts of the block are in no slot, and pass through buffers of their own."""
    return bool(needs.experts and unit.expert_bytes)


def is_held(unit: UnitSize, needs: Needs) -> bool:
    """Whether the unit's gradient waits outside the GPU for the step."""
    return bool(needs.held_bytes if unit.held_bytes is None else unit.held_bytes)


def masters_of(unit: UnitSize, needs: Needs) -> Mapping[str, int]:
    """Bytes of the unit's weights, remainders and projectors on the GPU, where its updates change the weights there;
    empty for other units."""
    return unit.codec.masters(unit.weight_bytes, rounded=bool(needs.rounds_masters))


def held_bytes(unit: UnitSize, needs: Needs) -> int:
    """Bytes of the unit's held gradient; 0 when gradients are not held."""
    return unit.codec.numel * (needs.held_bytes if unit.held_bytes is None else unit.held_bytes)
