"""Which unit's states live where, and what that takes: checked against the budgets before memory is taken.

GPU memory for states goes first to the outer modules. Only their update is hidden by nothing: the vocabulary's gradient
is final last and its weights are needed first. Then it goes to the first blocks, whose updates are due first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace

from ds_slide.errors import DoesNotFit
from ds_slide.plan.allocations import (
    BLOCK_RING,
    EXPERT_BUFFERS,
    Allocation,
    can_have_spare,
    expert_buffer_bytes,
    make_allocations,
    of_unit,
    slot_bytes,
    spare_bytes,
    streamed,
    total,
    undo_bytes,
)
from ds_slide.plan.needs import Needs, Placement, UnitSize, has_experts_in_parts, is_held, masters_of
from ds_slide.plan.placement import USABLE_SHARE, place_on_host
from ds_slide.report.log import size

SPARE_HOST_SHARE = 0.5
"""Part of the remaining host memory for undo logs and spare state buffers, or for more gradient buffers. Inputs of
blocks may take the same part of what is free later."""


@dataclass(frozen=True)
class AutomaticShares:
    """Parts that the plan chooses where the JSON sets no number."""

    gpu_states: float = 0.05
    """Part of the GPU for optimizer states. On a 141 GB card 5 % covers the vocabulary matrix of a 3 B model and some
    blocks, on a 24 GB card a block or two; activations need the rest."""
    gpu_states_where_host_is_short: float = 0.6
    """The same where host memory has no place for the rest: the run has these states on the GPU, or does not begin."""
    window: float = 0.10
    """Part of the GPU for slots that hide no fetch. 14 GB on a 141 GB card hold all blocks of a 7 B model. On a 24 GB
    card 2.4 GB hold 15 of the 36 blocks of a 3 B model."""
    whole_blocks: float = 0.5
    """Part of the GPU for the least number of slots, where blocks have frozen experts. Above that, these move in parts:
    activations need the rest."""
    experts: int = 256 << 20
    """Bytes of a GPU buffer for experts that move in parts: 4.9 ms of transfer, beside which launching the products of
    a few experts does not show. Three buffers hold 9 experts of DeepSeek-V3."""
    ring: float = 1 / 3
    """Buffers for each block whose update begins as its gradient arrives. Where updates take as long as forward and
    backward together, which is 1.5 backwards, a third of the gradients wait when the backward ends. With 4 buffers for
    26 blocks (11 would have waited) 3 B took 0.70 s a step where the GPU computed for 0.57
    (benchmarks/results/2026-11-25_nvidia-h100_held-out.jsonl)."""


AUTOMATIC = AutomaticShares()


@dataclass(frozen=True)
class Taken:
    """Bytes that other engines of this process hold: the limits are for all engines together."""

    gpu: int = 0
    gpu_states: int = 0
    window: int = 0
    host_states: int = 0

    def __add__(self, other: Taken) -> Taken:
        return Taken(*(own + more for own, more in zip(astuple(self), astuple(other), strict=True)))


NOTHING_TAKEN = Taken()


@dataclass(frozen=True)
class Budgets:
    """Budgets in bytes. `gpu_states`: None means automatic. `gpu_is_own`: GPU memory is not a part of host memory.
    `taken` is included in the configured figures (`gpu_memory`, `host_memory`, `gpu_states`), not in the free ones."""

    gpu_total: int
    gpu_free: int
    host_free: int
    gpu_states: int | None
    gpu_memory: int | None
    host_memory: int | None
    gpu_is_own: bool = True
    taken: Taken = NOTHING_TAKEN
    host_source: str = ""
    """What `host_free` comes from, as part of a sentence."""

    @property
    def are_free(self) -> str:
        """`host_free`, as the end of a clause."""
        return f"{size(self.host_free)} are free" + (f" ({self.host_source})" if self.host_source else "")

    @property
    def gpu_limit(self) -> int:
        """The most bytes that this engine may place on the GPU."""
        if self.gpu_memory is None:
            return self.gpu_free
        return max(0, min(self.gpu_free, self.gpu_memory - self.taken.gpu))

    @property
    def host_limit(self) -> int | None:
        """The most bytes of this engine's states in host memory; None: what is free."""
        return None if self.host_memory is None else max(0, self.host_memory - self.taken.host_states)


@dataclass(frozen=True)
class Plan:
    """Where every state is, and all that this takes."""

    units: tuple[UnitSize, ...]
    needs: Needs
    placement: Placement
    allocations: tuple[Allocation, ...]
    gpu_states_used: int
    """Bytes of `ds_slide.gpu_states` in use: what the GPU holds more than if no unit was updated there."""

    @classmethod
    def of(cls, units: Sequence[UnitSize], needs: Needs, placement: Placement) -> Plan:
        used = sum(gpu_cost(units[index], needs) for index in placement.on_gpu)
        return cls(tuple(units), needs, placement, make_allocations(units, needs, placement), used)

    def with_promoted(self, promoted: frozenset[int], window: int, summed: frozenset[int] = frozenset()) -> Plan:
        """Return a copy with the units `promoted` to the GPU, at most `window` slots, and GPU sums for `summed`."""
        moved = replace(self.placement, promoted=promoted, window=window, summed=summed - promoted)
        return Plan.of(self.units, self.needs, moved)

    def with_held_gradients(self) -> Plan:
        """Return a copy that holds gradients in host memory until the step, where they went straight to their update.
        Each keeps the data type of its copy down."""
        units = [replace(unit, held_bytes=unit.codec.dtype.itemsize) for unit in self.units]
        return Plan.of(units, replace(self.needs, held_bytes=2), self.placement)

    def entry(self, what: str) -> Allocation:
        """Return the entry named `what`."""
        return next(each for each in self.allocations if each.what == what)

    @property
    def gpu_bytes(self) -> int:
        return total(self.allocations, "gpu")

    @property
    def host_bytes(self) -> int:
        return total(self.allocations, "host")

    @property
    def host_state_bytes(self) -> int:
        """Bytes of the states, without held gradients and buffers: what `ds_slide.host_memory` limits."""
        return total(self.allocations, "host", "states")

    @property
    def host_reserved_bytes(self) -> int:
        """Host bytes of promoted units' states and held gradients, unused while the units are on the GPU."""
        promoted = (of_unit(self.units[index], index, self.needs, self.placement) for index in self.placement.promoted)
        return sum(total(entries, "host") for entries in promoted)

    @property
    def undo_log_bytes(self) -> int:
        return total(self.allocations, "host", "undo logs")

    @property
    def spare_state_bytes(self) -> int:
        return total(self.allocations, "host", "spare states")

    @property
    def ssd_bytes(self) -> int:
        """Bytes of states and held gradients; the state files hold them in whole pages."""
        return total(self.allocations, "ssd", "states", "held gradients")

    @property
    def window_bytes(self) -> int:
        return total(self.allocations, "gpu", "the window")

    @property
    def rounded_masters(self) -> int:
        """Elements of weights that are masters and are rounded stochastically."""
        rounded = self.units if self.needs.rounds_masters else ()
        of = [unit.layout for unit in rounded if unit.weight_bytes != 4 and masters_of(unit, self.needs)]
        return sum(entry.numel for layout in of for entry in layout.entries)

    @property
    def taken(self) -> Taken:
        host_states = self.host_state_bytes + self.undo_log_bytes + self.spare_state_bytes
        return Taken(self.gpu_bytes, self.gpu_states_used, self.window_bytes, host_states)

    def report(self) -> dict[str, int]:
        """The sums that users see (`slide_stats()["memory"]`)."""
        placement = self.placement
        return {
            "gpu_bytes": self.gpu_bytes,
            "gpu_state_bytes": total(self.allocations, "gpu", "states", "held gradients"),
            "window_bytes": self.window_bytes,
            "host_bytes": self.host_bytes,
            "host_state_bytes": self.host_state_bytes,
            "host_reserved_bytes": self.host_reserved_bytes,
            "undo_log_bytes": self.undo_log_bytes,
            "spare_state_bytes": self.spare_state_bytes,
            "ssd_bytes": self.ssd_bytes,
            "ssd_units": len(placement.on_ssd),
            "ssd_gradient_units": len(placement.gradients_on_ssd),
            "pinned_bytes": sum(each.nbytes for each in self.allocations if each.page_locked),
            "parameters": sum(entry.numel for unit in self.units for entry in unit.layout.entries),
            "rounded_masters": self.rounded_masters,
            "gpu_units": len(placement.on_gpu | placement.promoted),
            "promoted_units": len(placement.promoted),
            "summed_units": len(placement.summed),
            "units": len(self.units),
            "blocks": sum(unit.kind == "block" for unit in self.units),
            "slots": min(placement.window, len(streamed(self.units, placement))),
        }


def gpu_cost(unit: UnitSize, needs: Needs) -> int:
    """Return how many more bytes the GPU holds when the unit's states (and its held gradient) move there."""
    there, not_there = of_unit(unit, 0, needs, Placement(frozenset((0,)))), of_unit(unit, 0, needs, Placement())
    return total(there, "gpu") - total(not_there, "gpu")


def make_plan(units: Sequence[UnitSize], needs: Needs, budgets: Budgets) -> Plan:
    """Place the units. Raises SlideError when a budget does not suffice, and says what would."""
    if needs.experts != "auto":
        return _with_masters(units, needs, budgets)
    whole, in_parts = replace(needs, experts=0), replace(needs, experts=AUTOMATIC.experts)
    if not any(unit.expert_bytes for unit in units):
        return _with_masters(units, whole, budgets)
    try:
        plan = _with_masters(units, whole, budgets)
    except DoesNotFit as error:
        if error.tier != "gpu":
            raise
        return _with_masters(units, in_parts, budgets)
    slots = min(needs.window, len(streamed(units, plan.placement)))
    of_whole = slots * slot_bytes(units, whole, plan.placement)
    of_parts = slots * slot_bytes(units, in_parts, plan.placement) + EXPERT_BUFFERS * expert_buffer_bytes(
        units, in_parts
    )
    too_large = of_whole > AUTOMATIC.whole_blocks * budgets.gpu_limit and of_parts < of_whole
    return _with_masters(units, in_parts, budgets) if too_large else plan


def _with_masters(units: Sequence[UnitSize], needs: Needs, budgets: Budgets) -> Plan:
    """Return the plan, with rounded masters where nothing else fits and the needs leave that open."""
    if needs.rounds_masters != "auto":
        return _plan(units, needs, budgets)
    try:
        return _plan(units, replace(needs, rounds_masters=False), budgets)
    except DoesNotFit:
        pass
    return _plan(units, replace(needs, rounds_masters=True), budgets)


def _plan(units: Sequence[UnitSize], needs: Needs, budgets: Budgets) -> Plan:
    on_gpu = _updated_on_gpu(units, needs, budgets)
    placement = _placed(units, needs, budgets, on_gpu)
    while budgets.gpu_states is None and on_gpu and _gpu_bytes(units, needs, placement) > budgets.gpu_limit:
        # Weights that several ranks gather need one more buffer. No user has asked for these units to be updated there.
        placement = _placed(units, needs, budgets, on_gpu := on_gpu[:-1])
    placement = replace(placement, window=_window(units, needs, placement, budgets))
    plan = Plan.of(units, needs, placement)
    _check(plan, budgets, needs)
    # No plan has both ways back and a larger ring: gradients of speculative updates are held, and pass no buffer.
    with_spare_host = replace(_ways_back(plan, budgets, needs), ring=_ring(plan, budgets, needs))
    return Plan.of(units, needs, with_spare_host) if with_spare_host != placement else plan


def _ways_back(plan: Plan, budgets: Budgets, needs: Needs) -> Placement:
    """Return the placement with undo logs and spare state buffers of blocks, within the host memory that `plan` leaves.

    They begin at the last block, whose gradient arrives first. The short undo logs come first, and spare state buffers
    then replace some: a block without a speculative update costs more than a log does."""
    if not needs.speculates:
        return plan.placement
    left = _spare_host(plan, budgets)
    if budgets.host_limit is not None:
        left = min(left, budgets.host_limit - plan.host_state_bytes)
    blocks = {
        index: unit
        for index, unit in sorted(streamed(plan.units, plan.placement).items(), reverse=True)
        if index not in plan.placement.on_ssd and is_held(unit, needs) and unit.codec.numel
    }
    log = {index: undo_bytes(unit, needs) for index, unit in blocks.items()}
    spare = {index: spare_bytes(unit) for index, unit in blocks.items() if can_have_spare(unit, needs)}
    spares: frozenset[int] = frozenset()
    if needs.out_of_place is True:
        spares, left = _within(left, spare)
    logs, left = _within(left, {index: nbytes for index, nbytes in log.items() if index not in spares})
    if needs.out_of_place == "auto":
        spares, left = _within(left, {index: spare[index] - log[index] for index in spare if index in logs})
    return replace(plan.placement, undo_logs=logs - spares, spare_states=spares)


def _spare_host(plan: Plan, budgets: Budgets) -> int:
    """Return the bytes of host memory that `plan` leaves and that may be taken for speed."""
    return int((int(budgets.host_free * USABLE_SHARE) - _in_host_memory(plan, budgets)) * SPARE_HOST_SHARE)


def _ring(plan: Plan, budgets: Budgets, needs: Needs) -> int:
    """Return the number of buffers for gradients of blocks where `plan` leaves host memory for more than are needed; 0
    where it does not. Where updates wait for a disk, any number of buffers would be full."""
    ring = plan.entry(BLOCK_RING)
    if not needs.ring_grows or not ring.nbytes or plan.placement.on_ssd:
        return 0
    room = needs.ring + _spare_host(plan, budgets) // ring.piece
    most = min(math.ceil(AUTOMATIC.ring * len(streamed(plan.units, plan.placement))), room)
    return most if most > needs.ring else 0


def _within(left: int, costs: Mapping[int, int]) -> tuple[frozenset[int], int]:
    """Return the first units of `costs` (bytes by index) that fit into `left`, and the bytes left then."""
    chosen: set[int] = set()
    for index, nbytes in costs.items():
        if nbytes > left:
            break
        left -= nbytes
        chosen.add(index)
    return frozenset(chosen), left


def _in_host_memory(plan: Plan, budgets: Budgets) -> int:
    """Return all bytes in host memory: an accelerator that is the host computes in the same memory."""
    return plan.host_bytes if budgets.gpu_is_own else plan.host_bytes + plan.gpu_bytes


def _updated_on_gpu(units: Sequence[UnitSize], needs: Needs, budgets: Budgets) -> list[int]:
    """Return the units whose states are on the GPU, the most useful first."""
    if needs.whole_units:
        return []
    chosen = _first_within(_gpu_states_allowance(units, needs, budgets, AUTOMATIC.gpu_states), units, needs)
    if budgets.gpu_states is None:
        more = _first_within(
            _gpu_states_allowance(units, needs, budgets, AUTOMATIC.gpu_states_where_host_is_short), units, needs
        )
        while len(chosen) < len(more) and _host_is_short(units, needs, budgets, chosen):
            chosen = more[: len(chosen) + 1]
    return chosen


def _host_is_short(units: Sequence[UnitSize], needs: Needs, budgets: Budgets, on_gpu: Sequence[int]) -> bool:
    """Whether a plan with these units on the GPU would be refused because the others do not fit into host memory."""
    if needs.ssd is not None or not budgets.gpu_is_own:
        return False
    plan = Plan.of(units, needs, _placed(units, needs, budgets, on_gpu))
    limit = plan.host_state_bytes if budgets.host_limit is None else budgets.host_limit
    return plan.host_bytes > budgets.host_free or plan.host_state_bytes > limit


def _first_within(left: int, units: Sequence[UnitSize], needs: Needs) -> list[int]:
    """Return units in the order of their use whose states take at most `left` bytes of the GPU."""
    chosen: list[int] = []
    candidates = [
        index
        for index, unit in enumerate(units)
        if needs.trains
        and not unit.passing_numel
        and not masters_of(unit, needs)
        and not has_experts_in_parts(unit, needs)
    ]
    for index in sorted(candidates, key=lambda index: (not units[index].stays, index)):
        cost = gpu_cost(units[index], needs)
        if cost <= left:
            chosen.append(index)
            left -= cost
        elif not units[index].stays:
            break  # blocks in order: a gap would be fetched anyway
    return chosen


def _placed(units: Sequence[UnitSize], needs: Needs, budgets: Budgets, on_gpu: Sequence[int]) -> Placement:
    return place_on_host(units, needs, frozenset(on_gpu), budgets.host_free, budgets.host_limit)


def _gpu_bytes(units: Sequence[UnitSize], needs: Needs, placement: Placement) -> int:
    return total(make_allocations(units, needs, placement), "gpu")


def _gpu_states_allowance(units: Sequence[UnitSize], needs: Needs, budgets: Budgets, share: float) -> int:
    """Return the GPU bytes for optimizer states of this engine. `share`: part of the GPU, where none are configured."""
    if not needs.trains:
        return 0
    if budgets.gpu_states is not None:
        return max(0, budgets.gpu_states - budgets.taken.gpu_states)
    allowance = int(budgets.gpu_total * share) - budgets.taken.gpu_states
    without = _gpu_bytes(units, needs, _placed(units, needs, budgets, ()))
    return max(0, min(allowance, budgets.gpu_limit - without))


def _window(units: Sequence[UnitSize], needs: Needs, placement: Placement, budgets: Budgets) -> int:
    """Return the number of slots: more than are needed where the GPU has room, one for each streamed block at most."""
    blocks = len(streamed(units, placement))
    slot = slot_bytes(units, needs, placement)
    if not needs.window_grows or not budgets.gpu_is_own or not slot:
        return needs.window
    share = int(budgets.gpu_total * AUTOMATIC.window) - budgets.taken.window
    room = min(share, budgets.gpu_limit - _gpu_bytes(units, needs, placement))
    more = max(0, min(room // slot, blocks - needs.window))
    if not needs.trains and needs.window + more < blocks:
        # Each forward goes through all blocks: unless all of them fit, a slot more saves it no fetch.
        return needs.window
    return needs.window + more


def _check(plan: Plan, budgets: Budgets, needs: Needs) -> None:
    gpu_limit = budgets.gpu_limit
    if plan.gpu_bytes > gpu_limit:
        source = "free GPU memory" if gpu_limit == budgets.gpu_free else "ds_slide.gpu_memory"
        if source == "free GPU memory" and not budgets.gpu_is_own:
            source = f"free host memory, in which this accelerator computes ({budgets.host_source}),"
        others = _beside(budgets.taken.gpu) if gpu_limit != budgets.gpu_free else ""
        entries = [each for each in plan.allocations if each.tier == "gpu"]
        compressed = [masters for unit in plan.units if (masters := masters_of(unit, needs))]
        stay = ", or remove ds_slide.compression, whose matrices stay there" if compressed else ""
        if not any(unit.kind == "block" for unit in plan.units):
            stay = f", name layers that can be streamed in ds_slide.blocks (none were found){stay}"
        if saved := sum(masters.get("remainder", 0) for masters in compressed):
            stay = f', set ds_slide.compression.master_dtype to "bf16" ({size(saved)} less){stay}'
        raise DoesNotFit(
            "gpu",
            plan.gpu_bytes,
            gpu_limit,
            f"GPU tier: window, outer modules and GPU states need {size(plan.gpu_bytes)}, but {source} is "
            f"{size(gpu_limit)}{others}, {size(plan.gpu_bytes - gpu_limit)} short; "
            f"lower ds_slide.window (now {plan.placement.window}) or ds_slide.gpu_states (now "
            f"{size(plan.gpu_states_used)}){stay}, or allow more{_largest(entries)}",
        )
    _check_host(plan, budgets, needs)


def _check_host(plan: Plan, budgets: Budgets, needs: Needs) -> None:
    budget = budgets.host_limit
    # What a client's optimizer keeps cannot go to SSD, and everything else can.
    fixed = plan.host_state_bytes if needs.ssd is None else sum(unit.client_bytes for unit in plan.units)
    if budget is not None and fixed > budget:
        section = "offload_optimizer" if needs.trains and not needs.whole_units else "offload_param"
        states = [each for each in plan.allocations if each.tier == "host" and each.why == "states"]
        raise DoesNotFit(
            "host",
            fixed,
            budget,
            f"host tier: the states need {size(fixed)}, but ds_slide.host_memory is "
            f"{size(budget)}{_beside(budgets.taken.host_states)}, {size(fixed - budget)} short; "
            "allow more, or let the rest go to SSD with "
            f'zero_optimization.{section}.device "nvme" and its nvme_path{_largest(states)}',
        )
    # An accelerator that is the host computes in the same memory.
    tiers = ("host",) if budgets.gpu_is_own else ("host", "gpu")
    entries = [each for each in plan.allocations if each.tier in tiers]
    needed = sum(each.nbytes for each in entries)
    if needed > budgets.host_free:
        if not needs.trains:
            raise _no_room_for_weights(entries, budgets, needs)
        held = " or ds_slide.defer_updates (false, without clipping and accumulation)" if needs.held_bytes else ""
        if needs.ssd is None:
            way_out = 'zero_optimization.offload_optimizer.device (to "nvme", with its nvme_path)'
        elif not needs.ssd.states:
            way_out = 'zero_optimization.offload_optimizer.device (to "nvme": states and gradients may then go to SSD)'
        elif not needs.ssd.weights:
            way_out = 'zero_optimization.offload_param.device (to "nvme": the weights, too, may then go to SSD)'
        else:
            way_out = "ds_slide.host_memory (lower), ds_slide.weight_buffers or ds_slide.ssd_buffers"
        raise DoesNotFit(
            "host",
            needed,
            budgets.host_free,
            f"host tier: states, gradients and buffers need {size(needed)}, but {budgets.are_free}, "
            f"{size(needed - budgets.host_free)} short; "
            f"change {way_out}, ds_slide.gpu_states (now {size(plan.gpu_states_used)}, more moves states to "
            f"the GPU){held}, or use more ranks or a machine with more memory{_largest(entries)}",
        )


def _no_room_for_weights(entries: Sequence[Allocation], budgets: Budgets, needs: Needs) -> DoesNotFit:
    needed = sum(each.nbytes for each in entries)
    if needs.ssd is None or not needs.ssd.weights:
        way_out = 'zero_optimization.offload_param.device (to "nvme", with its nvme_path)'
    else:
        way_out = "ds_slide.host_memory (lower) or ds_slide.weight_buffers"
    return DoesNotFit(
        "host",
        needed,
        budgets.host_free,
        f"host tier: the weights need {size(needed)}, but {budgets.are_free}, {size(needed - budgets.host_free)} "
        f"short; change {way_out}, "
        f"or use more ranks or a machine with more memory{_largest(entries)}",
    )


def _beside(taken: int) -> str:
    """Return the part of a sentence that follows a limit below the configured one."""
    return f" beside the {size(taken)} of other engines in this process" if taken else ""


def _largest(entries: Iterable[Allocation]) -> str:
    """Return the end of a sentence, which names the largest entries."""
    largest = sorted(entries, key=lambda each: -each.nbytes)[:3]
    named = [f"{each.what} ({size(each.nbytes)})" for each in largest if each.nbytes]
    return f"; the largest entries are {', '.join(named)}" if named else ""
