"""Which unit's states live where, and what that takes: checked against the budgets before memory is taken.

GPU memory for states goes first to the edges (their update is the one thing that nothing hides: the
vocabulary's gradient is final last and its weights are needed first), then to the first blocks, whose
updates are due first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from ds_slide.errors import SlideError
from ds_slide.plan.placement import HostPlacement, Needs, UnitSize, gradient_item, held_item, place_on_host
from ds_slide.store.planes import optimizer_bytes

# 5 %: on a 141 GB card that covers the vocabulary matrix of a 3 B model and some blocks, on a 24 GB card a block or
# two; activations, which DS-Slide does not place yet, need the rest.
AUTO_GPU_STATE_SHARE = 0.05
# For slots beyond those that hide a fetch: 14 GB on a 141 GB card hold all blocks of a 7 B model, 2.4 GB on a 24 GB
# card 15 of the 36 blocks of a 3 B model.
AUTO_WINDOW_SHARE = 0.10


@dataclass(frozen=True)
class Taken:
    """Bytes that other engines of this process hold: the limits are for all of them together."""

    gpu: int = 0
    gpu_states: int = 0
    window: int = 0
    host_states: int = 0

    def __add__(self, other: Taken) -> Taken:
        return Taken(*(own + more for own, more in zip(astuple(self), astuple(other), strict=True)))


NOTHING_TAKEN = Taken()


@dataclass(frozen=True)
class Budgets:
    """Bytes. `gpu_states`: None means automatic. `gpu_is_own`: not a part of host memory. `taken` is a part of what is
    configured (`gpu_memory`, `host_memory`, `gpu_states`), and no part of what is free."""

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
        return f"{self.host_free:,} are free" + (f" ({self.host_source})" if self.host_source else "")

    @property
    def gpu_limit(self) -> int:
        """Of everything that this engine may place on the GPU."""
        if self.gpu_memory is None:
            return self.gpu_free
        return max(0, min(self.gpu_free, self.gpu_memory - self.taken.gpu))

    @property
    def host_limit(self) -> int | None:
        """Of this engine's states in host memory; None: what is free."""
        return None if self.host_memory is None else max(0, self.host_memory - self.taken.host_states)


@dataclass(frozen=True)
class Plan:
    """`on_gpu`: indices of the units whose states live on the GPU. `host`: the rest, in host memory or on SSD.
    `window`: slots. Byte totals of what DS-Slide places."""

    on_gpu: frozenset[int]
    gpu_bytes: int
    gpu_state_bytes: int
    host: HostPlacement
    window: int

    @property
    def host_bytes(self) -> int:
        return self.host.host_bytes


def gpu_cost(unit: UnitSize, needs: Needs) -> int:
    """Bytes more on the GPU when the unit's states (and its held gradient) move there."""
    trainable = unit.layout.trainable_numel
    cost = optimizer_bytes(unit.specs, trainable) + trainable * max(gradient_item(unit, needs), held_item(unit, needs))
    if not unit.stays:
        cost += unit.layout.slot_numel * unit.weight_bytes
    return cost


def make_plan(units: Sequence[UnitSize], needs: Needs, budgets: Budgets) -> Plan:
    """Place the units. Raises SlideError when a budget does not suffice, with what would."""
    allowance = _gpu_states_allowance(units, needs, budgets)
    on_gpu: set[int] = set()
    left = allowance
    candidates = [index for index, unit in enumerate(units) if needs.trains and not unit.passing_numel]
    for index in sorted(candidates, key=lambda index: (not units[index].stays, index)):
        cost = gpu_cost(units[index], needs)
        if cost <= left:
            on_gpu.add(index)
            left -= cost
        elif not units[index].stays:
            break  # blocks in order: a gap would be fetched anyway
    placed = frozenset(on_gpu)
    host = place_on_host(units, needs, placed, budgets.host_free, budgets.host_limit)
    window = _window(units, needs, placed, budgets)
    gpu_bytes = _gpu_bytes(units, dataclasses.replace(needs, window=window), placed)
    plan = Plan(placed, gpu_bytes, allowance - left, host, window)
    _check(plan, budgets, needs)
    return plan


def _gpu_states_allowance(units: Sequence[UnitSize], needs: Needs, budgets: Budgets) -> int:
    """Of this engine."""
    if not needs.trains:
        return 0
    if budgets.gpu_states is not None:
        return max(0, budgets.gpu_states - budgets.taken.gpu_states)
    allowance = int(budgets.gpu_total * AUTO_GPU_STATE_SHARE) - budgets.taken.gpu_states
    return max(0, min(allowance, budgets.gpu_limit - _gpu_bytes(units, needs, frozenset())))


def _window(units: Sequence[UnitSize], needs: Needs, on_gpu: frozenset[int], budgets: Budgets) -> int:
    """Slots: more than are needed where the GPU has room, one for each streamed block at most."""
    streamed = _streamed(units, on_gpu)
    slot = _slot_bytes(streamed, needs)
    if not needs.window_grows or not slot:
        return needs.window
    share = int(budgets.gpu_total * AUTO_WINDOW_SHARE) - budgets.taken.window
    room = min(share, budgets.gpu_limit - _gpu_bytes(units, needs, on_gpu))
    more = max(0, min(room // slot, len(streamed) - needs.window))
    if not needs.trains and needs.window + more < len(streamed):
        # Each forward goes through all blocks: unless all of them fit, a slot more saves it no fetch.
        return needs.window
    return needs.window + more


def _gpu_bytes(units: Sequence[UnitSize], needs: Needs, on_gpu: frozenset[int]) -> int:
    streamed = _streamed(units, on_gpu)
    packed = [unit for index, unit in enumerate(units) if not unit.is_edge and index not in on_gpu]
    staging = max((unit.layout.slot_trainable_numel * gradient_item(unit, needs) for unit in packed), default=0)
    gathered = 0
    if needs.world_size > 1:
        # The gradients of all units pass the staging buffers, whole and once more this rank's part.
        largest = max((unit.layout.trainable_numel * gradient_item(unit, needs) for unit in units), default=0)
        staging = largest * (needs.world_size + 1)
        gathered = _passing_bytes(units, needs, on_gpu)
    window = min(needs.window, len(streamed)) * _slot_bytes(streamed, needs)
    total = gathered + window + needs.stagings * staging
    resident = [unit for unit in units if unit.stays]
    total += sum((unit.passing_numel or unit.layout.slot_numel) * unit.weight_bytes for unit in resident)
    return total + sum(gpu_cost(units[index], needs) for index in on_gpu)


def _passing_bytes(units: Sequence[UnitSize], needs: Needs, on_gpu: frozenset[int]) -> int:
    """Bytes that the shares of several ranks take on their way into a slot or an edge: a scratch buffer in which the
    parts of gathered units meet, one for shared ones, and room for this rank's part beside each edge that is gathered
    (beside slots: `_slot_bytes`)."""
    streamed = _streamed(units, on_gpu)
    resident = [unit for index, unit in enumerate(units) if unit.stays and index not in on_gpu]
    meeting = [units[index] for index in on_gpu]
    nbytes = 0
    if needs.shares_weights:
        nbytes += needs.world_size * _largest_share(streamed)
    if _may_gather_blocks(needs):
        meeting += streamed
    if not needs.shares_weights:
        nbytes += sum(_share(unit) for unit in resident)
        meeting += resident
    return nbytes + needs.world_size * _largest_share(meeting)


def _may_gather_blocks(needs: Needs) -> bool:
    if needs.world_size == 1:
        return False
    return not needs.shares_weights or (needs.ssd is not None and needs.ssd.weights)


def _share(unit: UnitSize) -> int:
    """Bytes of one rank's weights."""
    return unit.layout.local_numel * unit.weight_bytes


def _largest_share(units: Sequence[UnitSize]) -> int:
    return max((_share(unit) for unit in units), default=0)


def _streamed(units: Sequence[UnitSize], on_gpu: frozenset[int]) -> list[UnitSize]:
    """Blocks that pass through the window."""
    return [unit for index, unit in enumerate(units) if not unit.stays and index not in on_gpu]


def _slot_bytes(streamed: Sequence[UnitSize], needs: Needs) -> int:
    """Of one slot, with room for this rank's share where blocks are gathered."""
    nbytes = max((unit.layout.slot_numel * unit.weight_bytes for unit in streamed), default=0)
    return nbytes + (_largest_share(streamed) if _may_gather_blocks(needs) else 0)


def _check(plan: Plan, budgets: Budgets, needs: Needs) -> None:
    gpu_limit = budgets.gpu_limit
    if plan.gpu_bytes > gpu_limit:
        source = "free GPU memory" if gpu_limit == budgets.gpu_free else "ds_slide.gpu_memory"
        if source == "free GPU memory" and not budgets.gpu_is_own:
            source = f"free host memory, in which this accelerator computes ({budgets.host_source}),"
        others = _beside(budgets.taken.gpu) if gpu_limit != budgets.gpu_free else ""
        raise SlideError(
            f"GPU tier: window, edges and GPU states need {plan.gpu_bytes:,} bytes, but {source} is "
            f"{gpu_limit:,}{others}; "
            f"lower ds_slide.window (now {plan.window}) or ds_slide.gpu_states (now {plan.gpu_state_bytes:,} bytes), "
            "or allow more"
        )
    _check_host(plan, budgets, needs)


def _check_host(plan: Plan, budgets: Budgets, needs: Needs) -> None:
    host = plan.host
    budget = budgets.host_limit
    if budget is not None and needs.ssd is None and host.state_bytes > budget:
        section = "offload_optimizer" if needs.trains else "offload_param"
        raise SlideError(
            f"host tier: the states need {host.state_bytes:,} bytes, but ds_slide.host_memory is "
            f"{budget:,}{_beside(budgets.taken.host_states)}; allow more, or let the rest go to SSD with "
            f'zero_optimization.{section}.device "nvme" and its nvme_path'
        )
    # An accelerator that is the host computes in the same memory.
    needed = host.host_bytes + (0 if budgets.gpu_is_own else plan.gpu_bytes)
    if needed > budgets.host_free:
        if not needs.trains:
            raise _no_room_for_weights(needed, budgets, needs)
        held = " or ds_slide.hold_gradients (false, without clipping and accumulation)" if needs.held_bytes else ""
        if needs.ssd is None:
            way_out = 'zero_optimization.offload_optimizer.device (to "nvme", with its nvme_path)'
        elif not needs.ssd.records:
            way_out = 'zero_optimization.offload_optimizer.device (to "nvme": states and gradients may then go to SSD)'
        elif not needs.ssd.weights:
            way_out = 'zero_optimization.offload_param.device (to "nvme": the weights, too, may then go to SSD)'
        else:
            way_out = "ds_slide.host_memory (lower), ds_slide.weight_buffers or ds_slide.ssd_buffers"
        raise SlideError(
            f"host tier: states, gradients and buffers need {needed:,} bytes, but {budgets.are_free}; "
            f"change {way_out}, ds_slide.gpu_states (now {plan.gpu_state_bytes:,} bytes, more moves states to "
            f"the GPU){held}, or use more ranks or a machine with more memory"
        )


def _no_room_for_weights(needed: int, budgets: Budgets, needs: Needs) -> SlideError:
    if needs.ssd is None or not needs.ssd.weights:
        way_out = 'zero_optimization.offload_param.device (to "nvme", with its nvme_path)'
    else:
        way_out = "ds_slide.host_memory (lower) or ds_slide.weight_buffers"
    return SlideError(
        f"host tier: the weights need {needed:,} bytes, but {budgets.are_free}; change {way_out}, "
        "or use more ranks or a machine with more memory"
    )


def _beside(taken: int) -> str:
    """Part of a sentence, behind a limit that is less than the configured one."""
    return f" beside the {taken:,} of other engines in this process" if taken else ""
