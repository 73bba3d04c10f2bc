"""The bytes that a run takes in every tier: one list, and the only count of them.

The list is made from the sizes of the units, the storage settings and a placement. The search for a placement compares
the sums of several lists, and the budgets are checked against the sums of the last one. The builder asks for entries by
name and takes their bytes from them (`ds_slide.runtime.core.allocator`). Reports are sums of the list.

The list leaves out bytes that do not grow with the parameters (a norm and a few counters for each unit) and bytes that
are freed again while states are placed. It leaves out activations, too, which are the model's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ds_slide.compression.codec import GradientCodec
from ds_slide.model.layout import UnitLayout
from ds_slide.plan.needs import (
    Needs,
    Placement,
    SsdNeeds,
    UnitSize,
    has_experts_in_parts,
    held_bytes,
    is_held,
    masters_of,
)
from ds_slide.store.ssd.extents import chunk_bytes, sum_table_bytes, unit_extents, whole_pages
from ds_slide.store.tiers import Tier
from ds_slide.store.way_back import can_be_out_of_place, undo_log_bytes

Why = Literal[
    "states",
    "held gradients",
    "weights that modules read",
    "the window",
    "weights on their way",
    "gradients on their way",
    "states on their way",
    "undo logs",
    "spare states",
    "checksums",
    "whole pages",
]

CLIENT_STATES = "client states"
"""The name, of a unit's state buffers, of what a client's optimizer keeps: tensors that it makes itself."""
STAGINGS = 2
"""GPU buffers for gradients: one is packed while the other is copied down."""
ROW_BUFFERS = 2
"""GPU buffers for the weight of an outer module whose rows pass through the GPU; its gradient has the same number."""
EXPERT_BUFFERS = 3
"""GPU buffers for experts that move in parts: the GPU computes with one while two are filled or wait."""
WHOLE_BYTES = 128
"""Such a buffer has a multiple of this number of bytes, so that it has whole elements of each data type."""
UNDO_RUN = 1 << 23
"""Elements of one run: 2 ms of 16 cores. An update that the next forward needs may have to wait for one run."""
PIECES = 2
"""Buffers for pieces of gradients: one is copied down while another is added."""
PIECE_BYTES = 16 << 20
"""0.3 ms of transfer: beside that, the fixed cost of a copy does not show."""

# Names of the entries that belong to no single unit.
SLOTS = "slots of the window"
EXPERTS = "experts on their way"
STAGED = "gradients being packed"
STAGED_PARTS = "this rank's part of gradients being packed"
AVERAGED = "gradients averaged where they lie"
GATHERED = "parts of weights being gathered"
UPLOADED = "parts of shared weights being laid out"
BLOCK_RING = "host buffers for gradients of blocks"
OUTER_RING = "host buffers for gradients outside the blocks"
PIECES_RING = "host buffers for pieces of gradients"
CHUNK_BUFFERS = "host buffers for optimizer states on SSD"
WEIGHT_BUFFERS = "host buffers for weights on SSD"
GRADIENT_BUFFER = "host buffers for gradients on SSD"
CHECKSUMS = "checksums of the pages on SSD"
CHANGES = "changes of weights on their way"
COMPRESSING = "workspace of gradients being compressed"
FP32_MASTERS = "fp32 masters of a unit that a client's optimizer updates"
FP32_GRADIENTS = "fp32 gradients of a unit that a client's optimizer updates"
MATRIX_COPIES = "copies of matrices being updated"
MATRIX_PRODUCTS = "products of matrices being updated"
MATRICES_UNDER_WAY = 3
"""The largest matrices that the copies have bytes for: one goes up, one is updated, one comes back. Of smaller ones
there are more."""
MATRIX_PRODUCT_BYTES = 16
"""GPU bytes of the products for each element of the largest matrix: an fp32 update, and in fp16 or bf16 six of a matrix
and its squares of the iteration (`optim.muon_groups` has the same number). Where states are on the GPU, matrices of a
unit may be updated together, which takes `UnitSize.batch_bytes` if that is more."""
PIECE_ALIGNMENT = 256
"""Bytes, a multiple of which each copy of a matrix begins at, as torch's own tensors on the GPU do."""


@dataclass(frozen=True)
class Allocation:
    """`nbytes` of a tier, in `count` pieces of one size."""

    what: str
    """Its name, which is unique in a plan."""
    tier: Tier
    nbytes: int
    why: Why
    count: int = 1
    page_locked: bool = False
    """Whether it is page-locked, because the GPU copies from or to it."""

    @property
    def piece(self) -> int:
        """Bytes of each piece."""
        return self.nbytes // max(self.count, 1)


def state_buffer_of(unit: str, state_buffer: str) -> str:
    """The name of a unit's "weight", "change" of weights, "projectors", held "gradient" or optimizer state buffer."""
    return f"{state_buffer} of {unit}"


def promoted_buffer_of(unit: str, state_buffer: str) -> str:
    """The name of a promoted unit's state buffer on the GPU."""
    return f"{state_buffer} of {unit} on the GPU"


def gpu_sum_of(unit: str) -> str:
    """The name of the GPU buffer that adds up a unit's gradients."""
    return f"sum of gradients of {unit}"


def undo_log_of(unit: str) -> str:
    """The name of a unit's undo log."""
    return f"undo log of {unit}"


def undo_bytes(unit: UnitSize, needs: Needs) -> int:
    """Bytes of a unit's undo log. With several ranks the new weights wait in it: the others read the old ones."""
    return undo_log_bytes(unit.weight_bytes, unit.specs, undo_runs(unit.codec), keeps_weight=needs.world_size > 1)


def spare_buffer_of(unit: str, state_buffer: str) -> str:
    """The name of a second state buffer, for the new numbers of an update out of place."""
    return f"spare {state_buffer} of {unit}"


def can_have_spare(unit: UnitSize, needs: Needs) -> bool:
    """Whether updates of the unit may be out of place: they write all of its state buffers, and no other rank has these
    mapped."""
    return needs.world_size == 1 and unit.layout.local_numel == unit.codec.numel and can_be_out_of_place(unit.specs)


def spare_bytes(unit: UnitSize) -> int:
    """Bytes of a unit's spare state buffers."""
    return unit.share + unit.state_bytes


def undo_runs(codec: GradientCodec) -> list[slice]:
    """The elements of a unit in runs that are updated ahead one by one, each of one parameter group."""
    return [
        slice(start, min(start + UNDO_RUN, segment.stop))
        for segment in codec.segments
        for start in range(segment.start, segment.stop, UNDO_RUN)
    ]


def whole_weights_of(unit: str) -> str:
    """The name of the weights of a unit that is on the GPU all the time, as modules read them."""
    return f"whole weights of {unit}"


def rows_of(unit: str) -> str:
    """The name of the GPU buffers through which an outer module's rows pass."""
    return f"rows of {unit}"


def row_gradients_of(unit: str) -> str:
    """The name of the GPU buffers through which the gradients of these rows pass."""
    return f"gradients of rows of {unit}"


def total(allocations: Iterable[Allocation], tier: Tier, *why: Why) -> int:
    """Return the bytes in `tier`: all, or only the kinds `why`."""
    return sum(each.nbytes for each in allocations if each.tier == tier and (not why or each.why in why))


def make_allocations(units: Sequence[UnitSize], needs: Needs, placement: Placement) -> tuple[Allocation, ...]:
    """All that a run takes with `placement`."""
    made = [entry for index, unit in enumerate(units) for entry in of_unit(unit, index, needs, placement)]
    made += _on_gpu_between(units, needs, placement)
    made += _gradient_rings(units, needs, placement)
    if needs.whole_units:
        views = 4 * max(unit.codec.numel for unit in units)
        made += [Allocation(what, "host", views, "states on their way") for what in (FP32_MASTERS, FP32_GRADIENTS)]
    made += _of_matrices(units, needs, placement)
    if placement.on_ssd:
        assert needs.ssd is not None
        made += _before_ssd(units, needs, needs.ssd, placement, total(made, "ssd"))
    return tuple(made)


def _of_matrices(units: Sequence[UnitSize], needs: Needs, placement: Placement) -> Iterator[Allocation]:
    """GPU memory of updates of whole matrices, whose products the update lane and the compute thread may make at the
    same time. Promoted units count as units in host memory, too, because they come back."""
    matrices = {index: unit for index, unit in enumerate(units) if unit.largest_matrix}
    if not matrices:
        return
    largest = max(unit.largest_matrix for unit in matrices.values())
    uploaded = [unit for index, unit in matrices.items() if index not in placement.on_gpu]
    if uploaded:
        copies = MATRICES_UNDER_WAY * max(_matrix_copy_bytes(unit, needs, largest) for unit in uploaded)
        yield Allocation(MATRIX_COPIES, "gpu", copies, "states on their way")
    there = [matrices[index].batch_bytes for index in matrices.keys() & (placement.on_gpu | placement.promoted)]
    one = MATRIX_PRODUCT_BYTES * largest
    products = ([one] if uploaded else []) + ([max(one, *there)] if there else [])
    # Tensors come and go, so equal streams count as so many pieces, and others as one.
    count = len(products) if len(set(products)) == 1 else 1
    yield Allocation(MATRIX_PRODUCTS, "gpu", sum(products), "states on their way", count)


def _matrix_copy_bytes(unit: UnitSize, needs: Needs, numel: int) -> int:
    """Return the bytes of the copies of `numel` elements: gradient, weights, and the other state buffers."""
    held = needs.held_bytes if unit.held_bytes is None else unit.held_bytes
    gradient = numel * max(held, unit.codec.dtype.itemsize)
    copies = (gradient, numel * unit.weight_bytes, *(spec.nbytes(numel) for spec in unit.specs))
    return sum(map(whole_pieces, copies))


def whole_pieces(nbytes: int) -> int:
    """Return `nbytes` rounded up to where the next copy may begin."""
    return -(-nbytes // PIECE_ALIGNMENT) * PIECE_ALIGNMENT


def of_unit(unit: UnitSize, index: int, needs: Needs, placement: Placement) -> list[Allocation]:
    """What unit number `index` takes for itself."""
    made = [*_states(unit, index, needs, placement), *_read_by_modules(unit, index, needs, placement)]
    if index in placement.summed:
        made.append(of_gpu_sum(unit, needs))
    return made + of_promoted(unit, needs) if index in placement.promoted else made


def of_gpu_sum(unit: UnitSize, needs: Needs) -> Allocation:
    """The GPU buffer that adds up a unit's gradients."""
    return Allocation(gpu_sum_of(unit.name), "gpu", held_bytes(unit, needs), "held gradients")


def of_promoted(unit: UnitSize, needs: Needs) -> list[Allocation]:
    """What a promoted unit takes on the GPU. Its home keeps its memory, so that going back needs none.

    With one rank the weights are the ones that modules read."""

    def state_buffer(name: str, nbytes: int, why: Why = "states") -> Allocation:
        return Allocation(promoted_buffer_of(unit.name, name), "gpu", nbytes, why)

    made = [state_buffer(spec.name, spec.nbytes(unit.codec.numel)) for spec in unit.specs]
    made.append(state_buffer("gradient", held_bytes(unit, needs) or unit.codec.nbytes, "held gradients"))
    if needs.world_size > 1 or not unit.stays:
        made.append(state_buffer("weight", unit.share))
    if needs.world_size > 1 and not unit.stays:
        whole = unit.layout.slot_numel * unit.weight_bytes
        made.append(Allocation(whole_weights_of(unit.name), "gpu", whole, "weights that modules read"))
    return made


def _states(unit: UnitSize, index: int, needs: Needs, placement: Placement) -> Iterator[Allocation]:
    """Weight, optimizer state buffers and held gradient, each in its tier. In host memory the GPU copies weights and
    gradients; only the update reads the optimizer states, on the GPU where it takes whole matrices."""

    def tier(on_ssd: frozenset[int]) -> Tier:
        return "gpu" if index in placement.on_gpu else "ssd" if index in on_ssd else "host"

    def state_buffer(name: str, where: Tier, nbytes: int, why: Why = "states", *, copied: bool = False) -> Allocation:
        locked = copied and where == "host" and needs.page_locks
        return Allocation(state_buffer_of(unit.name, name), where, nbytes, why, page_locked=locked)

    # Weights first: masters on the GPU are the weights of all ranks, which each rank changes.
    masters = masters_of(unit, needs)
    made = [state_buffer(name, "gpu", nbytes) for name, nbytes in masters.items()]
    written = "change" if masters else "weight"
    made.append(state_buffer(written, tier(placement.weights_on_ssd), unit.written_bytes, copied=True))
    for spec in unit.specs:
        nbytes = spec.nbytes(unit.codec.numel)
        made.append(state_buffer(spec.name, tier(placement.chunks_on_ssd), nbytes, copied=bool(unit.largest_matrix)))
    if unit.client_bytes:
        made.append(state_buffer(CLIENT_STATES, "host", unit.client_bytes))
    where = tier(placement.gradients_on_ssd)
    if is_held(unit, needs):
        made.append(state_buffer("gradient", where, held_bytes(unit, needs), "held gradients", copied=True))
    elif where == "gpu":
        made.append(state_buffer("gradient", where, unit.codec.nbytes, "held gradients"))
    yield from made
    # Ways back for speculative updates, and the padding of whole pages on SSD.
    if index in placement.undo_logs:
        yield Allocation(undo_log_of(unit.name), "host", undo_bytes(unit, needs), "undo logs")
    if index in placement.spare_states:
        name, locked = spare_buffer_of(unit.name, "weight"), needs.page_locks
        yield Allocation(name, "host", unit.share, "spare states", page_locked=locked)
        for spec in unit.specs:
            nbytes = spec.nbytes(unit.codec.numel)
            yield Allocation(spare_buffer_of(unit.name, spec.name), "host", nbytes, "spare states")
    if index in placement.on_ssd:
        yield Allocation(
            state_buffer_of(unit.name, "padding"),
            "ssd",
            _extent_bytes(unit, index, needs, placement) - total(made, "ssd"),
            "whole pages",
        )


def _extent_bytes(unit: UnitSize, index: int, needs: Needs, placement: Placement) -> int:
    """Bytes of the unit's places in the state file."""
    assert needs.ssd is not None
    return unit_extents(
        0,
        unit.specs,
        weight_bytes=unit.share if index in placement.weights_on_ssd else 0,
        chunks_of=unit.codec.numel if index in placement.chunks_on_ssd else 0,
        chunk_numel=needs.ssd.chunk_numel,
        gradient_bytes=held_bytes(unit, needs) if index in placement.gradients_on_ssd else 0,
    ).end


def _read_by_modules(unit: UnitSize, index: int, needs: Needs, placement: Placement) -> Iterator[Allocation]:
    """Weights that are on the GPU all the time.

    A unit that is updated there has them; with one rank they are the state buffer itself. An outer module or a part of
    a block has them, with room for this rank's part where they are gathered. Rows of an outer module have buffers.
    """
    whole = unit.layout.slot_numel * unit.weight_bytes
    if index in placement.on_gpu:
        if needs.world_size > 1:
            yield Allocation(whole_weights_of(unit.name), "gpu", whole, "weights that modules read")
    elif unit.passing_numel:
        rows = ROW_BUFFERS * unit.passing_numel * unit.weight_bytes
        yield Allocation(rows_of(unit.name), "gpu", rows, "weights on their way", ROW_BUFFERS)
        if unit.layout.trainable_numel:
            yield Allocation(row_gradients_of(unit.name), "gpu", rows, "gradients on their way", ROW_BUFFERS)
    elif unit.stays and not masters_of(unit, needs):
        own = unit.share if is_gathered(index, needs, placement.home) else 0
        yield Allocation(whole_weights_of(unit.name), "gpu", whole + own, "weights that modules read")


def is_gathered(index: int, needs: Needs, placement: Placement) -> bool:
    """Whether a collective gathers the unit's weights on the GPU: not where all ranks can read them."""
    if needs.world_size == 1:
        return False
    return not needs.shares_weights or index in placement.on_gpu | placement.promoted | placement.weights_on_ssd


def streamed(units: Sequence[UnitSize], placement: Placement) -> dict[int, UnitSize]:
    """Blocks that pass through the window, by their index."""
    on_gpu = placement.on_gpu | placement.promoted
    return {index: unit for index, unit in enumerate(units) if not unit.stays and index not in on_gpu}


def slot_bytes(units: Sequence[UnitSize], needs: Needs, placement: Placement) -> int:
    """Bytes of one slot of the window: the largest block, and room for this rank's part where blocks are gathered.
    Promoted blocks count, because they come back."""
    blocks, placement = streamed(units, placement.home), placement.home
    gathered = (unit.share for index, unit in blocks.items() if is_gathered(index, needs, placement))
    whole = max((_in_slot(unit, needs).slot_numel * unit.weight_bytes for unit in blocks.values()), default=0)
    return whole + max(gathered, default=0)


def _in_slot(unit: UnitSize, needs: Needs) -> UnitLayout:
    return unit.layout.without_experts() if has_experts_in_parts(unit, needs) else unit.layout


def expert_buffer_bytes(units: Iterable[UnitSize], needs: Needs) -> int:
    """Bytes of a buffer for experts on their way: the wanted number, but at least one expert and at most all of a
    block's; 0 where blocks move whole."""
    in_parts = [unit for unit in units if has_experts_in_parts(unit, needs)]
    if not in_parts:
        return 0
    assert needs.experts != "auto"
    one = max(unit.expert_bytes for unit in in_parts)
    all_of_block = max(unit.expert_bytes * unit.layout.experts[0].shape[0] for unit in in_parts)
    return max(one, min(needs.experts, all_of_block) // WHOLE_BYTES * WHOLE_BYTES)


def _on_gpu_between(units: Sequence[UnitSize], needs: Needs, placement: Placement) -> Iterator[Allocation]:
    """GPU buffers through which weights arrive and gradients leave.

    A block's gradients are packed. With several ranks the gradients of all units are, whole and once more this rank's
    part, except gradients that are averaged where they lie. Where ranks share weights, the parts of a block meet in a
    buffer of the lane; where they gather, in another.
    """
    blocks, ranks = streamed(units, placement), needs.world_size
    slots = min(placement.window, len(blocks))
    yield Allocation(SLOTS, "gpu", slots * slot_bytes(units, needs, placement), "the window", slots)
    if buffer := expert_buffer_bytes(units, needs):
        yield Allocation(EXPERTS, "gpu", EXPERT_BUFFERS * buffer, "weights on their way", EXPERT_BUFFERS)
    if ranks == 1:
        packed = [unit for index, unit in enumerate(units) if not (unit.is_outer or index in placement.on_gpu)]
    else:
        packed = [unit for unit in units if not unit.is_averaged_in_place]
    parts = max((unit.codec.nbytes for unit in packed), default=0)
    if encoding := max((unit.codec.encode_bytes for unit in units), default=0):
        yield Allocation(COMPRESSING, "gpu", encoding, "gradients on their way")
        yield Allocation(CHANGES, "gpu", max(unit.codec.apply_bytes for unit in units), "weights on their way")
    of_rank = parts if ranks == 1 else max((unit.codec.numel * unit.packed_itemsize for unit in packed), default=0)
    yield Allocation(STAGED, "gpu", STAGINGS * ranks * of_rank, "gradients on their way", STAGINGS)
    if ranks == 1:
        return
    yield Allocation(STAGED_PARTS, "gpu", STAGINGS * parts, "gradients on their way", STAGINGS)
    yield Allocation(AVERAGED, "gpu", _averaged_bytes(units, needs), "gradients on their way")
    gathered = [unit.share for index, unit in enumerate(units) if is_gathered(index, needs, placement)]
    yield Allocation(GATHERED, "gpu", ranks * max(gathered, default=0), "weights on their way")
    home = placement.home
    shared = [
        _in_slot(unit, needs).local_numel * unit.weight_bytes
        for index, unit in streamed(units, home).items()
        if not is_gathered(index, needs, home)
    ]
    yield Allocation(UPLOADED, "gpu", ranks * max(shared, default=0), "weights on their way")


def _averaged_bytes(units: Sequence[UnitSize], needs: Needs) -> int:
    """Bytes beside gradients that are averaged where they lie, or were packed: this rank's part of the first, and a
    piece of a copy that is wider or divided. NCCL divides as it reads, for powers of two (`Ranks.reduce_in_place`). The
    parts come at the end of backward, when activations are gone, and go with their copies. So the largest count for
    all."""
    in_place, ranks = [unit for unit in units if unit.is_averaged_in_place], needs.world_size
    part = max((unit.codec.nbytes for unit in in_place), default=0)
    divides = ranks & (ranks - 1) == 0 and needs.page_locks  # an accelerator that is the host has no NCCL
    copied = [unit for unit in units if unit.packed_itemsize < unit.codec.dtype.itemsize]
    copied += [unit for unit in in_place if not divides or unit.weight_bytes != unit.codec.dtype.itemsize]
    return part + ranks * min(PIECE_BYTES, max((unit.codec.nbytes for unit in copied), default=0))


def _gradient_rings(units: Sequence[UnitSize], needs: Needs, placement: Placement) -> Iterator[Allocation]:
    """Host buffers through which gradients pass on their way into an update, a sum or a file.

    Blocks and their parts share a ring. Outer modules share one buffer: they are few, and each is larger than many
    blocks. Where gradients are held as they come down there is neither. A second backward before the step is announced
    by nothing, and so its gradients pass in pieces."""
    passing = [unit for index, unit in enumerate(units) if index not in placement.on_gpu]
    block = max((unit.codec.nbytes for unit in passing if not unit.is_outer), default=0)
    outer_unit = max((unit.codec.nbytes for unit in passing if unit.is_outer), default=0)
    buffers, in_pieces = placement.ring or needs.ring, 0 if needs.ring else max(block, outer_unit)
    if placement.gradients_on_ssd:  # a gradient that goes on to SSD is written from the buffer it arrived in
        block, buffers, in_pieces = whole_pages(block), buffers or needs.ring_to_ssd, 0 if needs.ring else outer_unit
    yield _ring(BLOCK_RING, buffers if block else 0, block, needs)
    yield _ring(OUTER_RING, 1 if needs.ring and outer_unit else 0, outer_unit, needs)
    yield _ring(PIECES_RING, PIECES if in_pieces else 0, min(PIECE_BYTES, in_pieces), needs)


def _ring(what: str, buffers: int, nbytes: int, needs: Needs) -> Allocation:
    return Allocation(what, "host", buffers * nbytes, "gradients on their way", buffers, needs.page_locks)


def _before_ssd(
    units: Sequence[UnitSize], needs: Needs, ssd: SsdNeeds, placement: Placement, nbytes: int
) -> Iterator[Allocation]:
    """Host buffers through which states pass between SSD (`nbytes` there) and update or GPU, and the checksums of what
    is on SSD. The GPU copies from the weight buffers."""
    on_ssd = [units[index] for index in sorted(placement.chunks_on_ssd)]
    numel = ssd.chunk_numel
    chunk = max((chunk_bytes(unit.specs, min(numel, unit.codec.numel)) for unit in on_ssd), default=0)
    chunks = sum(-(-unit.codec.numel // numel) for unit in on_ssd)
    buffers = min(16 if ssd.chunk_buffers is None else ssd.chunk_buffers, chunks)
    yield Allocation(CHUNK_BUFFERS, "host", buffers * chunk, "states on their way", buffers)
    weights = [units[index] for index in placement.weights_on_ssd]
    weight = max((whole_pages(unit.share) for unit in weights), default=0)
    # Only slots that hide a fetch have a buffer: the others are a cache, and read nothing ahead. 4 more buffers are for
    # weights that are read ahead, under update or being written.
    wanted = needs.window + 4 if ssd.weight_buffers is None else ssd.weight_buffers
    buffers = min(wanted, len(weights))
    yield Allocation(WEIGHT_BUFFERS, "host", buffers * weight, "states on their way", buffers, needs.page_locks)
    if placement.gradients_on_ssd:
        held = max(whole_pages(held_bytes(units[index], needs)) for index in placement.gradients_on_ssd)
        yield Allocation(GRADIENT_BUFFER, "host", held, "gradients on their way")
    if ssd.checksums:
        yield Allocation(CHECKSUMS, "host", sum_table_bytes(nbytes), "checksums")
