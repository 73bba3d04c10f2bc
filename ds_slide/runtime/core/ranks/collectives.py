"""The ranks that share the states (ZeRO-3: data and sequence parallelism), and the collectives between them.

Ranks of one machine may run different modules: rank 0 decides on the order of their averages of gradients
(`ds_slide.runtime.core.ranks.conductor`). The rest of this text is about the order of all other collectives, or of all
collectives if the ranks are on several machines or share sequences.

One rule prevents deadlocks: all ranks issue the same collectives in the same order, whatever the threads do.

* The compute thread issues every collective of the engine, in the order of the program, through one process group, onto
  one stream, the collectives stream. A gather by `Levels` is several collectives of smaller groups, always in the same
  order. The compute thread is the caller's thread, and autograd's while that runs a backward: one after the other,
  never both. No lane issues any. Several engines of a process have these groups and the stream in common.
* No lane waits for a collective that has not been issued yet: a lane waits for a marker, an update or another rank's
  weights, and their collectives precede, in the order of the program, the call that gave the lane the job.

So there is no circular wait. Take the first collective, in the order of the program, that is never completed. All
before it are complete, so on every rank the compute thread reaches it: between collectives it waits only for lanes, and
these, by the second point, only for collectives that are complete. So all ranks issue it, and it completes. A device
that runs its streams in order of submission, or waits for all of them at once (loading a module, page-locking memory),
changes nothing: all work that a wait needs was submitted before, on this rank and on the others.

Each step's norm includes a check that the ranks issue the same collectives (`ds_slide.runtime.gradients.totals`).
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ds_slide.errors import SlideError
from ds_slide.plan.allocations import PIECE_BYTES
from ds_slide.runtime.core.device import Device, Marker
from ds_slide.runtime.core.futures import Failures

_NOWHERE = Device(torch.device("cpu"))


class Meets(Protocol):
    """The interface of the conductor, which decides on the order of collectives
    (`ds_slide.runtime.core.ranks.conductor.Conductor`)."""

    announced: int
    """Collectives that this rank has asked for."""

    def meet(self, what: str, failures: Failures, *, step_of: int | None = None) -> None:
        """Wait until all ranks have come to this collective. Raises SlideError on all of them if they have come to
        different ones. `step_of`: the engine whose step includes the collective, if any."""

    def entry(self) -> AbstractContextManager[None]:
        """Have no meetings inside the context: all ranks have come to what it does."""


@dataclass(frozen=True)
class Levels:
    """The ranks of several hosts that have as many ranks each, one after the other. A gather among all ranks sends a
    part to another host once for each rank there, in the worst case; one by levels sends it once."""

    hosts: int
    across: Any
    """The process group of the ranks that have this rank's number on their hosts."""
    within: Any
    """The process group of the ranks of this host."""

    @classmethod
    def of(cls, rank: int, machines: Sequence[str]) -> Levels | None:
        """Return the levels of ranks on `machines`, by rank. None where a gather among all ranks sends no more.
        Collective, over the whole world."""
        hosts, count = list(dict.fromkeys(machines)), len(machines) // len(set(machines))
        if len(hosts) == 1 or count == 1 or list(machines) != [host for host in hosts for _ in range(count)]:
            return None
        all_ranks = range(len(machines))
        across = [dist.new_group(list(all_ranks[number::count])) for number in range(count)]
        within = [dist.new_group(list(all_ranks[first : first + count])) for first in all_ranks[::count]]
        return cls(len(hosts), across[rank % count], within[rank // count])

    def gather(self, own: torch.Tensor, gathered: torch.Tensor) -> None:
        """All-gather `own` ([n]) into `gathered` ([world_size * n], rank-major)."""
        parts = own.new_empty(self.hosts * own.numel())  # of the stream of collectives, which alone uses it
        dist.all_gather_into_tensor(parts, own, group=self.across)
        for of_host, part in zip(gathered.chunk(self.hosts), parts.chunk(self.hosts), strict=True):
            dist.all_gather_into_tensor(of_host, part, group=self.within)


@dataclass(eq=False)
class Channel:
    """The process group and the stream of the collectives between certain ranks, for all engines of a process."""

    group: Any = None
    stream: Any = None
    engines: int = 0
    """The number of engines that have been built on it."""
    issued: int = 0
    """Collectives so far, of all engines."""
    digest: int = 0
    """A digest of their names, in order: the same on all ranks."""
    conductor: Meets | None = None
    """The conductor that decides on their order; None where the program does."""
    has_asked_for_conductor: bool = False
    levels: Levels | None = None
    has_asked_for_levels: bool = False


_channels: dict[tuple[int, ...], Channel] = {}
"""Channels by the number of this rank and the numbers of all ranks. One channel serves all engines. With a channel
each, a GPU could run the collectives of two engines in another order than they were issued in, and two ranks would wait
for each other."""


def _channel_of(rank: int, members: Sequence[int], device: Device) -> Channel:
    """Return the channel of these ranks. The first call is collective, over the whole world; all ranks have the same
    engines."""
    key = (rank, *members)
    known = _channels.get(key)
    if known is None or not _is_open(known.group):
        known = _channels[key] = Channel(dist.new_group(list(members)), device.stream())
    return known


def _is_open(group: Any) -> bool:
    """Whether the process group has not been destroyed."""
    try:
        return bool(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        return False


class Ranks:
    """The ranks of an engine. `channel`: the channel of its collectives, None for one rank. The compute thread calls
    all methods that communicate."""

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        channel: Channel | None = None,
        device: Device = _NOWHERE,
        *,
        divides_sequences: bool = False,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.divides_sequences = divides_sequences
        """Whether several ranks share a sequence. Blocks then have collectives of their own, in program order."""
        self._device = device
        self._channel = channel or Channel()
        self._group = self._channel.group
        self._stream = self._channel.stream
        self._channel.engines += 1
        self.engine = self._channel.engines
        """The number of its engine."""
        self._failures: Failures | None = None

    @property
    def issued(self) -> int:
        """Collectives so far, of all engines."""
        return self._channel.issued

    @property
    def begun(self) -> int:
        """Collectives so far, and collectives that this rank has asked for."""
        return self._channel.issued + (0 if self.conductor is None else self.conductor.announced)

    @property
    def conductor(self) -> Meets | None:
        return self._channel.conductor

    @property
    def has_asked_for_conductor(self) -> bool:
        """Whether it is known if there is a conductor."""
        return self._channel.has_asked_for_conductor

    def conduct(self, conductor: Meets | None) -> None:
        """Let `conductor` decide on the order of the collectives of all engines of this process."""
        self._channel.conductor, self._channel.has_asked_for_conductor = conductor, True

    @property
    def digest(self) -> int:
        """A digest of the collectives with their names and engines: the same on all ranks."""
        return self._channel.digest

    def note(self, what: Iterable[int]) -> None:
        """Add `what` (bytes), which must be equal on all ranks, to the digest."""
        self._channel.digest = zlib.crc32(bytes(what), self._channel.digest)

    @classmethod
    def over(cls, group: Any, device: Device, *, divides_sequences: bool = False) -> Ranks:
        """Return the ranks of `group`, which share the states. Collective: every rank of the world calls it."""
        size = dist.get_world_size(group)
        if size == 1:
            return cls()
        rank = dist.get_rank(group)
        members = dist.get_process_group_ranks(group) if group is not None else list(range(size))
        return cls(rank, size, _channel_of(rank, members, device), device, divides_sequences=divides_sequences)

    def lie_on(self, machines: Sequence[str]) -> None:
        """Note the machines of the ranks, by rank. Collective, and asked once for all engines."""
        channel = self._channel
        if not channel.has_asked_for_levels and self.world_size == dist.get_world_size():
            channel.levels = Levels.of(self.rank, machines)
        channel.has_asked_for_levels = True

    def watched_by(self, failures: Failures) -> None:
        """Tell `failures` from now on which collective is under way."""
        self._failures = failures

    # ---- the collectives stream --------------------------------------------------------------------------------------

    def on_stream(self) -> AbstractContextManager[Any]:
        """Submit work inside the context to the collectives stream, after the collectives so far. One rank has no such
        stream, and uses the compute stream."""
        return self._device.on(self._stream)

    def mark(self) -> Marker:
        """Return a marker of the work submitted to the collectives stream so far. With one rank it has passed
        already."""
        return self._device.mark(self._stream) if self.world_size > 1 else Marker()

    def keep(self, *tensors: torch.Tensor) -> None:
        """Let torch's allocator keep the memory of `tensors`, after they are dropped, until the collectives stream has
        run its work so far."""
        for each in tensors:
            if each.is_cuda:
                each.record_stream(self._stream)

    def join(self) -> None:
        """Make the compute stream wait for the collectives stream."""
        self._device.wait(self.mark())

    def meet(self, what: str, *, in_step: bool = False) -> None:
        """Wait until all ranks have come to `what`, if there is a conductor. `in_step`: whether it is a part of a
        step."""
        if self.conductor is not None:
            step_of = self.engine if in_step else None
            self.conductor.meet(f"{what} (engine {self.engine})", self._failures or Failures(), step_of=step_of)

    def in_one_place(self) -> AbstractContextManager[None]:
        """Issue the collectives inside the context without meetings. All ranks have met before it, come to the same
        collectives, and wait for no other rank until they have issued them. A meeting wakes the threads of all ranks
        twice; 3 B has 38 gathers in a step, and four H200s took 0.04 to 0.05 s a step more than one
        (benchmarks/results/2026-11-28_nvidia-h200-x4_ranks_2.md)."""
        return nullcontext() if self.conductor is None else self.conductor.entry()

    @contextmanager
    def _issue(self, what: str, *after: Marker, in_step: bool = False) -> Iterator[None]:
        """Issue one collective on the collectives stream, after `after`. On the CPU accelerator it blocks."""
        channel = self._channel
        self.meet(what, in_step=in_step)
        channel.issued += 1
        channel.digest = zlib.crc32(f"{self.engine}: {what}".encode(), channel.digest)
        sentence = f"collective {channel.issued} of rank {self.rank}: {what}"
        with self.on_stream(), nullcontext() if self._failures is None else self._failures.collective(sentence):
            for marker in after:
                self._device.wait(marker)
            yield
        if self._failures is not None:
            self._failures.outstanding(sentence, self.mark())

    # ---- training ----------------------------------------------------------------------------------------------------

    def gather_weights(
        self, name: str, own: torch.Tensor, gathered: torch.Tensor, *after: Marker, in_step: bool = False
    ) -> None:
        """All-gather the weights of the unit `name`, `own` ([local_numel]), into `gathered` ([world_size *
        local_numel], rank-major)."""
        with self._issue(f"gathering the weights of {name}", *after, in_step=in_step):
            self._all_gather(own, gathered)

    def _all_gather(self, own: torch.Tensor, gathered: torch.Tensor) -> None:
        if self._channel.levels is None:
            dist.all_gather_into_tensor(gathered, own, group=self._group)
        else:
            self._channel.levels.gather(own, gathered)

    def reduce_gradients(self, name: str, packed: torch.Tensor, own: torch.Tensor, *after: Marker) -> None:
        """Average the gradient of the unit `name`, `packed` ([world_size * numel], rank-major), over the ranks into
        `own` ([numel]).

        The gradient is divided before the sum, as in DeepSpeed, so that bf16 sums do not overflow earlier than in stock
        DeepSpeed.
        """
        with self._issue(f"averaging the gradient of {name}", *after):
            self._average(packed, own)

    def reduce_in_place(self, name: str, gradient: torch.Tensor, own: torch.Tensor, *after: Marker) -> None:
        """Do the same without writing to `gradient`, which may have another data type than `own`: divided sequences are
        reduced in fp32. What has to be converted or divided is copied in pieces, so that no copy of the whole gradient
        is made."""
        if self._nccl_divides and gradient.dtype == own.dtype:
            self.reduce_gradients(name, gradient, own, *after)
            return
        parts, most = gradient.view(self.world_size, -1), min(PIECE_BYTES // own.element_size(), own.numel())
        with self.on_stream():  # memory of this stream, which alone uses it; before the collective, which others await
            copies = own.new_empty(self.world_size * most)
        with self._issue(f"averaging the gradient of {name}", *after):
            for start in range(0, own.numel(), most):
                piece = own[start : start + most]
                copied = copies[: self.world_size * piece.numel()].view(self.world_size, -1)
                copied.copy_(parts[:, start : start + piece.numel()])
                self._average(copied.view(-1), piece)

    def _average(self, packed: torch.Tensor, own: torch.Tensor) -> None:
        if self._nccl_divides:
            dist.reduce_scatter_tensor(own, packed, op=dist.ReduceOp.AVG, group=self._group)
            return
        packed.div_(self.world_size)
        dist.reduce_scatter_tensor(own, packed, group=self._group)

    @functools.cached_property
    def _nccl_divides(self) -> bool:
        """Whether NCCL divides before its sum, as it reads. It multiplies by the reciprocal, which has the same bits
        for powers of two. A division of its own reads and writes the gradients of a step once more: 9 ms of a GPU and
        144 launches with 3 B and four micro-batches."""
        is_power_of_two = self.world_size & (self.world_size - 1) == 0
        return is_power_of_two and self._device.is_cuda and str(dist.get_backend(self._group)) == "nccl"

    def sum_(self, values: torch.Tensor, what: str, *after: Marker, in_step: bool = False) -> torch.Tensor:
        """Sum `values` over the ranks, in place. `in_step`: whether the sum is a part of a step."""
        if self.world_size > 1:
            with self._issue(f"summing {what}", *after, in_step=in_step):
                dist.all_reduce(values, group=self._group)
        return values

    def gather(self, own: torch.Tensor, what: str, *, in_step: bool = False) -> torch.Tensor:
        """Gather `own` ([n], made on the compute stream) from every rank into [world_size * n], in rank order, for the
        compute stream. With one rank this returns `own`. `in_step`: whether it is a part of a step."""
        if self.world_size == 1:
            return own
        gathered = own.new_empty(self.world_size * own.numel())
        with self._issue(f"gathering {what}", self._device.mark(), in_step=in_step):
            # The data is sent as bytes: the remainders of masters are 16-bit integers, which NCCL does not support.
            flat, part = gathered.view(torch.uint8), own.contiguous().view(torch.uint8)
            dist.all_gather_into_tensor(flat, part, group=self._group)
        self.join()
        return gathered

    # ---- while the engine is built -----------------------------------------------------------------------------------

    def connect(self, packed: torch.Tensor, own: torch.Tensor, dtype: torch.dtype) -> None:
        """Run one collective of each kind over buffers of zeros, so that connections are made now and not in training.
        `packed`, `own`: buffers of bytes, used as elements of `dtype`."""
        if self.world_size == 1:
            return
        packed, own = packed.view(dtype), own.view(dtype)
        if numel := min(own.numel(), packed.numel() // self.world_size):
            own, packed = own[:numel], packed[: self.world_size * numel]
        else:  # nothing is trained; weights may be gathered
            own, packed = own.new_zeros(1), own.new_zeros(self.world_size)
        with self._issue("connecting the ranks", self._device.mark()):
            dist.reduce_scatter_tensor(own, packed, group=self._group)
            self._all_gather(own, packed)
            dist.all_reduce(own.new_zeros(1, dtype=torch.float64), group=self._group)

    def least(self, values: Sequence[int]) -> list[int]:
        """Return the smallest of each of `values` over the ranks."""
        if self.world_size == 1:
            return list(values)
        with self._issue("agreeing on the memory that every rank has"):
            tensor = torch.tensor(list(values), device=self._device.torch)
            dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._group)
            return [int(value) for value in tensor.tolist()]

    def exchange(self, own: Any, what: str) -> list[Any]:
        """Return `own` of every rank, in rank order. The objects are pickled."""
        if self.world_size == 1:
            return [own]
        given: list[Any] = [None] * self.world_size
        with self._issue(what):
            dist.all_gather_object(given, own, group=self._group)
        return given

    def require_equal(self, own: dict[str, Any], what: str) -> None:
        """Raise SlideError on every rank if two ranks differ in `own`, with the first key that differs."""
        given = self.exchange(own, f"comparing {what}")
        for key, value in given[0].items():
            for rank, other in enumerate(given):
                if other[key] != value:
                    raise SlideError(
                        f"the ranks differ in {what}: {key} is {value} on rank 0 and {other[key]} on rank {rank}; give "
                        "all ranks the same model, the same DeepSpeed config and machines alike"
                    )
