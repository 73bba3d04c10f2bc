"""The ranks that share the states (ZeRO-3 data parallelism), and the collectives between them.

Weights are gathered by the h2d lane while gradients are reduced by the compute thread. The two go through
separate process groups: within one group every rank must issue collectives in the same order, and two
threads cannot promise that.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ds_slide.model.layout import piece
from ds_slide.runtime.handoff import Failures
from ds_slide.runtime.unit import Unit


@dataclass(frozen=True)
class Ranks:
    """`weights` and `gradients`: process groups over the same ranks (None for one rank)."""

    rank: int
    world_size: int
    weights: Any = None
    gradients: Any = None
    failures: Failures | None = None
    """Of the engine, which has to know of waits for other ranks; None before there is one."""

    @classmethod
    def over(cls, group: Any) -> Ranks:
        """Ranks of the data-parallel `group`. Collective: every rank of the world calls it."""
        size = dist.get_world_size(group)
        if size == 1:
            return cls(rank=0, world_size=1)
        members = dist.get_process_group_ranks(group) if group is not None else list(range(size))
        return cls(
            rank=dist.get_rank(group),
            world_size=size,
            weights=dist.new_group(members),
            gradients=dist.new_group(members),
        )

    def gather_weights(
        self, unit: Unit, own: torch.Tensor, gathered: torch.Tensor, slot: torch.Tensor, group: Any
    ) -> None:
        """All-gather `own` ([local_numel]) into `gathered` ([world_size * local_numel], rank-major) and lay the
        whole parameters out in `slot` ([>= slot_numel]), all on the current stream. `group`: that of the calling
        thread, `weights` for the h2d lane and `gradients` for the compute thread."""
        local = unit.layout.local_numel
        flat = gathered[: self.world_size * local]
        with self._collective(f"the gathering of the weights of {unit.name}"):
            dist.all_gather_into_tensor(flat, own, group=group)
        targets, sources = [], []
        for entry in unit.layout.entries:
            for rank in range(self.world_size):
                start, stop = piece(entry, rank)
                length = stop - start
                if length > 0:
                    place = entry.slot_offset + start
                    targets.append(slot[place : place + length])
                    source = rank * local + entry.offset
                    sources.append(flat[source : source + length])
        torch._foreach_copy_(targets, sources)

    def reduce_gradients(self, packed: torch.Tensor, own: torch.Tensor) -> None:
        """Average `packed` ([world_size * trainable_numel], rank-major) over the ranks into `own` ([trainable_numel]).

        Divided before the sum, as DeepSpeed does, so that bf16 sums do not overflow earlier than stock's.
        """
        packed.div_(self.world_size)
        with self._collective("the reduction of a gradient"):
            dist.reduce_scatter_tensor(own, packed, group=self.gradients)

    def least_(self, values: torch.Tensor) -> torch.Tensor:
        """Smallest of `values` over the ranks, in place."""
        if self.world_size > 1:
            with self._collective("the minimum over the ranks"):
                dist.all_reduce(values, op=dist.ReduceOp.MIN, group=self.gradients)
        return values

    def sum_(self, values: torch.Tensor) -> torch.Tensor:
        """Sum `values` over the ranks, in place."""
        if self.world_size > 1:
            with self._collective("the sum over the ranks"):
                dist.all_reduce(values, group=self.gradients)
        return values

    def _collective(self, what: str) -> AbstractContextManager[None]:
        return nullcontext() if self.failures is None else self.failures.collective(what)
