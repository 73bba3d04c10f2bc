"""Weights in memory that all ranks of a machine can read: each rank uploads all parts, and nothing is gathered.

Every rank keeps its part of the weight state buffers in a memory file that the others map, page-locked. The file begins
with a counter for each unit: the version of the weights that is complete there. A thread that uploads a version waits
for the counters of the other ranks, asleep in the kernel, never for a collective.

No rank overwrites what another rank still reads, for this reason. An update to version n + 1 needs the average of the
gradients of all ranks. A rank enters that collective, on its compute stream, after its own backward of the unit, when
it has announced the unit. A rank that has not announced it enters with zeros at the end of its whole backward. Both are
later than the last use of version n, even of a unit used in forward alone, so the used GPU copy is complete. A later
fetch of version n may be torn, but is never bound: binding compares versions, and the rank's own version becomes n + 1
when it enters, before it binds again. A unit used once more between its announcement and its average has a whole
version n, because no update can have begun. With changes of weights no change may be missed, and each has been applied
by then: a rank that has not used the unit waits for the change before it enters the collective (`Taking`). Writes from
outside (loading, `safe_set_*`) have no such collective before them: `StateAccess.begin_writing` is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ds_slide.errors import SlideError
from ds_slide.runtime.core.futures import Failures
from ds_slide.runtime.core.ranks.collectives import Ranks
from ds_slide.runtime.core.ranks.sharing import Sharing
from ds_slide.runtime.core.unit import Unit
from ds_slide.store.host_memory import HostMemory
from ds_slide.store.memory_file import Range, SharedHostMemory, map_bytes


class SharedWeights:
    """The shared weights, made in two steps: `memory` holds this rank's weights; `map_others` gives all ranks access.

    The thread that has changed weights (the update lane or the compute thread) calls `publish`. The lanes wait, and so
    does the compute thread while it renews weights that stay on the GPU.
    """

    def __init__(self, ranks: Ranks, sharing: Sharing, memory: HostMemory, num_units: int, failures: Failures) -> None:
        from ds_slide import _native

        self._ranks = ranks
        self._sharing = sharing
        self._memory = memory
        self._num_units = num_units
        self._failures = failures
        self._header: Range = sharing.file.append(_native.Generations.bytes(num_units))
        self._generations: list[Any] = []
        self.memory = SharedHostMemory(sharing.file, memory)
        """The memory of this rank's weights, unit by unit."""
        self.parts: dict[int, list[torch.Tensor]] = {}
        """What the updates of each rank write, by the index of the shared unit (`Unit.order`): weights ([local_numel]),
        or changes of weights ([numel] of its codec)."""

    def map_others(self, units: Sequence[Unit]) -> None:
        """Map the memory of the other ranks. `units`: the units with weights from `memory`, in that order; all ranks
        have loaded them. Collective.

        Raises SlideError on all ranks when one of them cannot map, or page-lock, the memory of the others.
        """
        problem = None
        self._ranks.exchange(None, "waiting until all ranks have their weights")
        try:
            self._map(units)
        except (SlideError, OSError, RuntimeError, ValueError) as error:
            problem = str(error)
        self._sharing.close()
        problems = self._ranks.exchange(problem, "mapping the other ranks' weights")
        for rank, found in enumerate(problems):
            if found is not None:
                raise SlideError(
                    f"rank {rank} could not map the weights of the other ranks: {found}; or set "
                    "ds_slide.share_weights to false, which gathers weights over the process group"
                )
        for unit in units:
            unit.shared = self
            self.publish(unit, unit.version)

    def _map(self, units: Sequence[Unit]) -> None:
        descriptors = list(self._sharing.descriptors)
        descriptors[self._ranks.rank] = self._sharing.file.descriptor
        self._generations = [self._counters(descriptor) for descriptor in descriptors]
        for unit, part in zip(units, self.memory.ranges, strict=True):
            buffer = unit.state.written.buffer
            weight = buffer.read(slice(0, buffer.numel))
            self.parts[unit.order] = [
                weight
                if rank == self._ranks.rank
                else self._memory.tensor(
                    weight.numel(), weight.dtype, transfers=True, place=(descriptor, part.offset), counts=False
                )
                for rank, descriptor in enumerate(descriptors)
            ]

    def _counters(self, descriptor: int) -> Any:
        from ds_slide import _native

        return _native.Generations(map_bytes(descriptor, self._header), self._num_units)

    # A counter holds version + 1, because memory begins at 0 and versions do too.

    def publish(self, unit: Unit, version: int) -> None:
        """Tell the other ranks that this rank's part of a version is complete."""
        self._generations[self._ranks.rank].publish(unit.order, version + 1)

    def await_others(self, unit: Unit, version: int) -> None:
        """Wait for the other ranks' parts of a version."""
        for rank, counters in enumerate(self._generations):
            if rank == self._ranks.rank or counters.value(unit.order) > version:
                continue
            what = f"version {version} of the weights of {unit.name} from rank {rank}"
            with self._failures.waiting(what, counters.interrupt, for_ranks=True):
                while (outcome := counters.wait(unit.order, version + 1)) == "signal":
                    pass  # its handler has run by now
            if outcome == "reached":
                self._failures.progressed()
                continue
            self._failures.raise_first()
            raise SlideError(f"rank {rank} has ended its engine, and {what} will not come: end all ranks together")

    def close(self) -> None:
        """Tell the others that this rank has made its last update, and end the waits of this rank."""
        for rank, counters in enumerate(self._generations):
            if rank == self._ranks.rank:
                counters.close()
            counters.interrupt()
