"""Which states stay in host memory and which go to SSD: unit by unit, as far as the memory reaches.

Memory goes first to what saves most SSD traffic per byte: a block's weights (2 bytes a parameter save 6 a step: two
reads and a write). Then come the optimizer states of outer modules, whose update nothing hides, and the few of the
blocks' parts in another data type (`ds_slide.model.structure`). The optimizer states of blocks are last (10 bytes save
20). What stays is spread evenly over the blocks, so that the disk has work all through the step instead of a burst at
one end of the model.

Held gradients are the last to leave, and only blocks' gradients do: 2 bytes are written and read in every micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from ds_slide.plan.allocations import make_allocations, total
from ds_slide.plan.needs import Needs, Placement, UnitSize, held_bytes

# Share of the free memory: Python's objects, the data loader and the page cache grow after the plan is made.
USABLE_SHARE = 0.95


def place_on_host(
    units: Sequence[UnitSize], needs: Needs, on_gpu: frozenset[int], host_free: int, host_memory: int | None
) -> Placement:
    """Place what is not on the GPU. `host_memory`: budget of the states in bytes; None: what `host_free` leaves."""
    usable = int(host_free * USABLE_SHARE)

    def takes(placement: Placement) -> int:
        return total(make_allocations(units, needs, placement), "host")

    in_memory = Placement(on_gpu, window=needs.window)
    on_host = [index for index in range(len(units)) if index not in on_gpu]
    everything = sum(units[i].written_bytes + units[i].state_bytes + units[i].client_bytes for i in on_host)
    room = usable - takes(in_memory) + everything
    if needs.ssd is None or everything <= (room if host_memory is None else min(room, host_memory)):
        return in_memory

    ssd = needs.ssd
    may_move_weights = [i for i in on_host if ssd.weights and not units[i].stays]
    may_move_chunks = [i for i in on_host if ssd.states and units[i].codec.numel]
    least = dataclasses.replace(
        in_memory, weights_on_ssd=frozenset(may_move_weights), chunks_on_ssd=frozenset(may_move_chunks)
    )
    if ssd.states and takes(least) > usable:
        blocks = [i for i in on_host if not units[i].stays and held_bytes(units[i], needs)]
        gone = dataclasses.replace(least, gradients_on_ssd=frozenset(blocks))
        held = _spread([(i, held_bytes(units[i], needs)) for i in blocks], usable - takes(gone))
        least = dataclasses.replace(least, gradients_on_ssd=frozenset(blocks) - held)
    # `least` counts buffers and checksums for all that may go to SSD. States that stay leave a little of that unused.
    left = max(0, usable - takes(least))
    if host_memory is not None:
        movable = sum(units[i].share for i in may_move_weights) + sum(units[i].state_bytes for i in may_move_chunks)
        left = min(left, host_memory - everything + movable)

    def stay(candidates: Sequence[int], size: Callable[[UnitSize], int]) -> set[int]:
        nonlocal left
        kept = _spread([(i, size(units[i])) for i in candidates], left)
        left -= sum(size(units[i]) for i in kept)
        return kept

    weights_stay = stay(may_move_weights, lambda unit: unit.share)
    chunks_stay = stay([i for i in may_move_chunks if units[i].stays], lambda unit: unit.state_bytes)
    chunks_stay |= stay([i for i in may_move_chunks if not units[i].stays], lambda unit: unit.state_bytes)
    return dataclasses.replace(
        least,
        weights_on_ssd=least.weights_on_ssd - weights_stay,
        chunks_on_ssd=least.chunks_on_ssd - chunks_stay,
    )


def _spread(sizes: Sequence[tuple[int, int]], budget: int) -> set[int]:
    """Indices that together take at most `budget` bytes, at even distances."""
    total = sum(size for _, size in sizes)
    if total <= budget:
        return {index for index, _ in sizes}
    kept: set[int] = set()
    used = passed = 0
    for index, size in sizes:
        passed += size
        # Exact integers: a share in floating point would depend on the order of the sum.
        if (used + size) * total <= passed * max(budget, 0):
            kept.add(index)
            used += size
    return kept
