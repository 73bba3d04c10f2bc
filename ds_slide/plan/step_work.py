"""The work of a step in each lane, from a plan, the trace of a micro-batch and the ceilings of a machine.

Of the states on SSD, a step does not read all again. An updated chunk stays in its host buffer until another chunk
needs the buffer. The chunk that is needed last is evicted first (`ds_slide.runtime.ssd.buffers`). So the chunks that
are updated first stay for good, in the buffers that no chunk on its way takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ds_slide.plan.allocations import BLOCK_RING, CHUNK_BUFFERS, is_gathered, streamed, undo_bytes
from ds_slide.plan.memory import Plan
from ds_slide.plan.needs import UnitSize, has_experts_in_parts, held_bytes
from ds_slide.plan.operations import Operation
from ds_slide.plan.rates import Rates
from ds_slide.plan.step_model import Work
from ds_slide.plan.trace import Segment, StepTrace

BESIDE_COPIES = 0.95
"""Rate of the CPU's updates in a step, as a part of their rate alone: copies to and from the GPU share the host's
memory with them. 154 GB/s became 131 beside 40 GB/s up (benchmarks/results/2026-11-23_nvidia-h200_update.md), and
copies are under way for a third of the time."""
UNITS_UNDER_WAY = 2
"""Units whose chunks are on the way at once where the disk holds up the updates: one is read, because its weights are
waited for, and one is written. With 16 buffers and units of 2 chunks, 6 of 18 chunks and 43 of 53 were read in a step,
so that 12 and 10 had stayed (benchmarks/results/2026-11-24_nvidia-h200_hand-sweep.jsonl). With units of 6
chunks 117 of 120 and all of 197 were read (2026-11-21_nvidia-h200_ssd-1.5b_huge-pages.jsonl)."""


@dataclass(frozen=True)
class _Bytes:
    """Bytes of one unit that a step moves. `again`: bytes that each further forward and backward fetches. `summed`: the
    part of `down` that passes once a step. `update`: by the CPU. `matrices`: up for an update on the GPU, with the new
    weights; fewer bytes come down. `encoded`, `applied`: bytes that its codec, or its sum, moves on the GPU."""

    up: int = 0
    again: int = 0
    down: int = 0
    summed: int = 0
    update: int = 0
    matrices: int = 0
    held: int = 0
    undo: int = 0
    read: int = 0
    written: int = 0
    encoded: int = 0
    applied: int = 0


def work_of(plan: Plan, trace: StepTrace, rates: Rates, micro_batches: int, *, two: bool) -> Work:
    """Return the work of a step. `two`: its updates may be done in two passes."""
    # Blocks beyond the window are fetched again in every forward and backward.
    placement = plan.placement
    passing = sorted(streamed(plan.units, placement))
    again = frozenset(passing[: max(0, len(passing) - placement.window)])
    on_ssd = StatesOnSsd.of(plan)
    units = [_bytes_of(plan, index, on_ssd, again, micro_batches) for index in range(len(plan.units))]
    ways_back = placement.ways_back - placement.promoted
    # Seconds of the GPU's work by segment, and of the host's launches in all.
    forward, backward = ([rates.seconds(each.operations) for each in part] for part in (trace.forward, trace.backward))
    launched = [sum(rates.launches(each.operations) for each in part) for part in (trace.forward, trace.backward)]
    # Rates of the CPU, the disk and the link, and bytes of the disk.
    update, ssd = BESIDE_COPIES * rates.update, rates.ssd or 1.0
    update_s = [unit.update / update + unit.matrices / rates.both_ways for unit in units]
    updated = [index for index, seconds in enumerate(update_s) if seconds]
    outer = [index for index in updated if plan.units[index].is_outer]
    due = [index for index in updated if index not in placement.summed or micro_batches == 1]
    link = rates.both_ways if any(unit.again for unit in units) else rates.d2h
    states = sum(unit.read + unit.written for unit in units)
    inputs = trace.on_ssd_bytes * micro_batches
    ring = plan.entry(BLOCK_RING).count

    def bytes_of(what: str, which: Collection[int] | None = None) -> int:
        return sum(getattr(units[index], what) for index in (range(len(units)) if which is None else which))

    def seconds_of(which: Collection[int]) -> float:
        return sum(update_s[index] for index in which)

    return Work(
        forward=max(sum(forward), launched[0]),
        backward=max(sum(backward) + bytes_of("encoded") / rates.copy, launched[1]),
        launched=launched[0],
        micro_batches=micro_batches,
        gpu_update=_gpu_update_s(plan, rates) + bytes_of("applied") / rates.copy,
        up=bytes_of("up") / rates.h2d,
        again=bytes_of("again") / rates.h2d,
        down=bytes_of("down") / link,
        summed=bytes_of("summed") / link,
        update=sum(update_s),
        begun=max((update_s[index] for index in updated if index not in outer), default=0.0),
        holding=sum(2 * unit.held + unit.down for unit in units if unit.held) / update,
        ahead=seconds_of(ways_back),
        undo=bytes_of("undo") / update,
        ssd=states / ssd,
        ssd_ahead=on_ssd.ahead / ssd,
        inputs_down=trace.moved_bytes / rates.d2h,
        inputs_up=trace.moved_bytes / rates.h2d,
        inputs_ssd=trace.on_ssd_bytes / ssd,
        lead=_through(trace.backward, backward, updated, first=True),
        reach=_through(trace.backward, backward, due, first=False),
        due=seconds_of(due) / (seconds_of(updated) or 1.0),
        outer=seconds_of(outer),
        outer_last=seconds_of(_behind_blocks(trace.backward, plan, outer)) / (seconds_of(outer) or 1.0),
        outer_copies=bytes_of("down", outer) / link + bytes_of("up", outer) / rates.h2d,
        from_first=_from(trace.forward, forward, updated, first=True),
        behind=_from(trace.forward, forward, updated, first=False),
        through_ring=max(0.0, 1 - ring / len(updated)) if ring and updated else 0.0,
        held=bool(plan.needs.held_bytes),
        two=two and not placement.chunks_on_ssd,
        ssd_read=bytes_of("read") + inputs,
        ssd_written=bytes_of("written") + inputs,
        inputs_share=2 * inputs / (states + 2 * inputs) if inputs else 0.0,
    )


def _gpu_update_s(plan: Plan, rates: Rates) -> float:
    """Return the seconds of updates on the GPU: of states that are there, and of matrices wherever their states are."""
    there = plan.placement.on_gpu | plan.placement.promoted
    units = [unit for index, unit in enumerate(plan.units) if index in there or unit.product_flop]
    products = Counter(Operation("product", unit.product_flop, 0) for unit in units if unit.product_flop)
    return sum(map(update_bytes, units)) / rates.copy + rates.seconds(products)


def _bytes_of(plan: Plan, index: int, on_ssd: StatesOnSsd, again: Collection[int], micro_batches: int) -> _Bytes:
    """Return what a step moves of a unit. `again`: blocks that are fetched in each forward and backward."""
    unit, placement, needs = plan.units[index], plan.placement, plan.needs
    if index in placement.on_gpu | placement.promoted or not needs.trains:
        return _Bytes()
    read = written = 0
    if index in placement.chunks_on_ssd:
        read, written = on_ssd.read[index], unit.state_bytes
    if index in placement.weights_on_ssd:
        read += unit.share * (2 * micro_batches if index in again else 1)
        written += unit.share
    held, is_summed = held_bytes(unit, needs), index in placement.summed
    if index in placement.gradients_on_ssd:
        passes = 1 if is_summed else micro_batches
        read, written = read + held * passes, written + held * passes
    # A rank reads the parts of all ranks, or only its own part, which a collective joins with the others on the GPU.
    parts = 1 if is_gathered(index, needs, placement) else needs.world_size
    up = parts * unit.written_bytes if unit.codec.numel or unit.kind == "block" else 0
    in_parts = sum(entry.numel for entry in unit.layout.experts) if has_experts_in_parts(unit, needs) else 0
    return _Bytes(
        up=up,
        again=up if index in again else in_parts * unit.weight_bytes,
        down=held if is_summed else unit.codec.nbytes,
        summed=held if is_summed else 0,
        update=0 if unit.product_flop else update_bytes(unit),
        matrices=unit.codec.nbytes + unit.share + unit.state_bytes + up if unit.product_flop else 0,
        held=0 if is_summed else held,
        undo=undo_bytes(unit, needs) if index in placement.undo_logs else 0,
        read=read,
        written=written,
        encoded=unit.codec.encode_traffic + (held if is_summed else 0),
        applied=unit.codec.apply_traffic(unit.weight_bytes if needs.rounds_masters else 4),
    )


def update_bytes(unit: UnitSize) -> int:
    """Return the bytes that an update reads and writes: its gradient; weights and states, there and back."""
    if not unit.codec.numel:
        return 0
    weight = unit.codec.numel * unit.codec.written_itemsize(unit.weight_bytes)
    return unit.codec.nbytes + 2 * (weight + unit.state_bytes)


def _behind_blocks(backward: Sequence[Segment], plan: Plan, outer: Collection[int]) -> list[int]:
    """Return the modules of `outer` whose gradients become complete after the last block's."""
    complete = [segment.unit for segment in backward if segment.unit is not None]
    blocks = [place for place, unit in enumerate(complete) if not plan.units[unit].is_outer]
    return [unit for unit in complete[max(blocks, default=-1) + 1 :] if unit in outer]


def _through(segments: Sequence[Segment], seconds: Sequence[float], units: Collection[int], *, first: bool) -> float:
    """Return the seconds until the first of `units`, or the last, has ended; 0 where none is there."""
    places = [place for place, segment in enumerate(segments) if segment.unit in units]
    return sum(seconds[: places[0 if first else -1] + 1]) if places else 0.0


def _from(segments: Sequence[Segment], seconds: Sequence[float], units: Collection[int], *, first: bool) -> float:
    """Return the seconds from the begin of the first of `units`, or the last; 0 where none is there."""
    places = [place for place, segment in enumerate(segments) if segment.unit in units]
    return sum(seconds[places[0 if first else -1] :]) if places else 0.0


# ----------------------------------------------------------------------------------------------------------------------
# States on SSD: which of them a step reads again, and how far the disk gets ahead of the updates.


@dataclass(frozen=True)
class StatesOnSsd:
    """`read`: bytes of each unit's states that a step reads, by the index of the unit. `ahead`: bytes that the disk can
    have read and written for updates that are not ready yet."""

    read: Mapping[int, int]
    ahead: int

    @classmethod
    def of(cls, plan: Plan) -> StatesOnSsd:
        """Return the figures of a steady step; zeros where no states are on SSD."""
        placement, needs = plan.placement, plan.needs
        on_ssd = placement.chunks_on_ssd - placement.on_gpu - placement.promoted
        if needs.ssd is None or not on_ssd:
            return cls({}, 0)
        buffers = next(each for each in plan.allocations if each.what == CHUNK_BUFFERS)
        numel = needs.ssd.chunk_numel
        chunks = {index: -(-plan.units[index].codec.numel // numel) for index in on_ssd}
        order = _in_order(plan.units, on_ssd, by_deadline=bool(needs.held_bytes))
        stay = _that_stay([chunks[index] for index in order], buffers.count)
        read = {}
        for index in order:
            unit = plan.units[index]
            here = min(stay, chunks[index])
            stay -= here
            read[index] = unit.state_bytes * max(0, unit.codec.numel - here * numel) // unit.codec.numel
        # Each buffer counts twice: a chunk of the step before is written from it, and another chunk is read into it.
        return cls(read, 2 * buffers.nbytes)


def _that_stay(chunks: Sequence[int], buffers: int) -> int:
    """Return how many chunks stay in their buffers from step to step. `chunks`: counts by unit, in update order."""
    if sum(chunks) <= buffers:
        return buffers
    # The first chunks of the first unit, an embedding for instance, are in buffers. Its other chunks displace some.
    under_way = max(chunks[0] - buffers, UNITS_UNDER_WAY * max(chunks[1:], default=0))
    return max(0, buffers - under_way)


def _in_order(units: Sequence[UnitSize], chosen: frozenset[int], *, by_deadline: bool) -> list[int]:
    """Return the indices in the order of their updates: by deadline, or as backward finishes them."""
    if by_deadline:
        return sorted(chosen)
    return sorted(chosen, key=lambda index: (units[index].is_outer, -index))
