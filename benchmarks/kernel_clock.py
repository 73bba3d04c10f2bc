"""Times and memory of GPU work: systems in turns, a cold L2, and no gaps while the host is enqueuing."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Work = Callable[[], object]

# Larger than the L2 of any GPU so far.
FLUSH_BYTES = 256 << 20
COPY_BYTES = 1 << 30
WARM_UP_SECONDS = 0.02
SECONDS_A_CASE = 0.25
LEAST_ROUNDS, MOST_ROUNDS = 7, 30
# Cycles of torch.cuda._sleep in a second: at least the clock, so that a spin is never too short.
CYCLES_PER_SECOND = 2.0e9
# A host that needs longer is waiting for the GPU itself, and no spin can hide that.
MOST_SPIN_MS = 10.0


@dataclass
class Times:
    """Of one system: milliseconds on the GPU's stream round by round, and of one enqueuing on the host."""

    ms: list[float] = field(default_factory=list)
    host_ms: float = 0.0

    @property
    def median(self) -> float:
        return statistics.median(self.ms)


class Clock:
    """Times work on a device; without CUDA by the host's clock, once, which only shows that a script runs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        self._scratch = torch.empty(FLUSH_BYTES if self.on_gpu else 1, dtype=torch.uint8, device=device)

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def warm_up(self, work: Work) -> Times:
        """Run for about 20 ms; the host's time of one call, taken while the GPU is behind."""
        times = Times()
        begin = time.perf_counter()
        while True:
            self.synchronize()
            before = time.perf_counter()
            work()
            times.host_ms = (time.perf_counter() - before) * 1e3
            self.synchronize()
            if not self.on_gpu or time.perf_counter() - begin > WARM_UP_SECONDS:
                return times

    def _once(self, work: Work, host_ms: float) -> Callable[[], float]:
        """Enqueue one timed call; what is returned gives its milliseconds after a synchronize."""
        if not self.on_gpu:
            begin = time.perf_counter()
            work()
            ms = (time.perf_counter() - begin) * 1e3
            return lambda: ms
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # The spin keeps the GPU busy until the host has enqueued everything; the flush follows it, next to the work.
        spin_ms = min(1.5 * host_ms + 0.2, MOST_SPIN_MS)
        torch.cuda._sleep(int(spin_ms * 1e-3 * CYCLES_PER_SECOND))
        self._scratch.fill_(0)
        first.record()
        work()
        last.record()
        return lambda: first.elapsed_time(last)

    def in_turns(self, works: dict[str, Work], restore: dict[str, Work], rounds: int = 0) -> dict[str, Times]:
        """Times of all `works`, one call of each a round in an order drawn anew.

        `restore` [name] runs before each call, untimed. Rounds: given, or as many as take 0.25 s, 7 to 30.
        """
        nothing: Work = lambda: None  # noqa: E731
        times = {name: self.warm_up(work) for name, work in works.items()}
        for name in works:
            restore.get(name, nothing)()
        if not self.on_gpu:
            rounds = 1
        elif not rounds:
            slowest = max(self._measured_once(work, times[name].host_ms) for name, work in works.items())
            rounds = max(LEAST_ROUNDS, min(MOST_ROUNDS, int(SECONDS_A_CASE * 1e3 / max(slowest, 1e-3))))
        for _ in range(rounds):
            for name in random.sample(sorted(works), len(works)):
                restore.get(name, nothing)()
                read = self._once(works[name], times[name].host_ms)
                self.synchronize()
                times[name].ms.append(read())
        return times

    def _measured_once(self, work: Work, host_ms: float) -> float:
        read = self._once(work, host_ms)
        self.synchronize()
        return read()

    def copy_gb_s(self) -> float | None:
        """Read + write bandwidth of copying 1 GiB on the device; None without CUDA."""
        if not self.on_gpu:
            return None
        source = torch.randint(256, (COPY_BYTES,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        times = self.in_turns({"copy": lambda: target.copy_(source)}, {}, rounds=15)
        return 2 * COPY_BYTES / times["copy"].median / 1e6

    def copy_of(self, moved_bytes: int) -> Work:
        """A copy that reads and writes `moved_bytes` in all."""
        source = torch.empty(max(1, moved_bytes // 2), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)


def storage_bytes(tensors: Iterable[Tensor], but_not: Iterable[Tensor]) -> int:
    """Bytes of the different storages of `tensors` that none of `but_not` has."""
    known = {tensor.untyped_storage().data_ptr() for tensor in but_not}
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(size for pointer, size in sizes.items() if pointer not in known)


def peak_bytes(work: Callable[[], Iterable[Tensor]], inputs: Iterable[Tensor]) -> tuple[int | None, int | None]:
    """Peak of what `work` allocates, and how much of it is more than what it returns; None without CUDA."""
    if not torch.cuda.is_available():
        return None, None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    returned = list(work())
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return peak, peak - storage_bytes(returned, inputs)
