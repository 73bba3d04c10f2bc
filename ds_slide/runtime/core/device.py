"""One interface to streams and events, on CUDA and on the CPU accelerator.

On CUDA a `Marker` is an event: a point in the work of one stream. On the CPU accelerator every operation has finished
when its call returns, so a marker has passed at once, its time is the host's, and `Future` alone orders threads. The
rest of the runtime is written once for both.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

DRIVERS_OWN = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory", "Triton Error [CUDA]: out of memory")
"""Texts in the errors of libraries that take memory from the driver, past torch."""


class Marker:
    """A point in the work of one stream; passed when everything submitted before it has run."""

    __slots__ = ("_at", "_event")

    def __init__(self, event: Any = None, at: float = 0.0) -> None:
        """Make a marker. `at`: seconds of `time.perf_counter`, for a timed marker without an event."""
        self._event = event
        self._at = at

    def done(self) -> bool:
        return self._event is None or bool(self._event.query())

    def synchronize(self) -> None:
        """Block this host thread until the point has been passed (the GIL is released)."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_until(self, later: Marker) -> float:
        """Return the device seconds between two passed markers recorded with `timed=True`; negative if `later` was
        first."""
        if self._event is None or later._event is None:
            return later._at - self._at
        return float(self._event.elapsed_time(later._event)) / 1e3


PASSED = Marker()


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""The environment variables that configure torch's allocator."""


_held: Counter[torch.device] = Counter()
"""Bytes of each GPU that torch has reserved for the recordings of all engines, and that it does not count as allocated.
"""


class Device:
    """The accelerator that computes. `torch.device("cpu")` is the CPU accelerator."""

    def __init__(self, device: torch.device) -> None:
        self.torch = device
        self.is_cuda = device.type == "cuda"
        self._peak_before = 0
        """The peak since `reset_peak`, when the held bytes changed last."""

    def stream(self, *, first: bool = False) -> Any:
        """Return a new side stream (None on the CPU accelerator). `first`: processors that become free take its kernels
        before those of other streams."""
        return torch.cuda.Stream(self.torch, priority=-1 if first else 0) if self.is_cuda else None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream) if self.is_cuda else nullcontext()

    def enter_thread(self) -> None:
        """Set the CUDA device of the calling thread. Every lane thread calls this once."""
        if self.is_cuda:
            torch.cuda.set_device(self.torch)

    def mark(self, stream: Any = None, *, timed: bool = False, host_waits: bool = False) -> Marker:
        """Record a marker on `stream`, or on the stream that is current in the calling thread.

        `host_waits`: a host thread will block on it; it then sleeps instead of spinning, because a
        spinning thread takes a core from the CPU update.
        """
        if not self.is_cuda:
            return Marker(at=time.perf_counter()) if timed else PASSED
        event = torch.cuda.Event(enable_timing=timed, blocking=host_waits)
        event.record(stream if stream is not None else torch.cuda.current_stream(self.torch))
        return Marker(event)

    def wait(self, marker: Marker, stream: Any = None) -> None:
        """Make `stream` (default: the current one) wait for `marker`; the host does not block."""
        if self.is_cuda and marker._event is not None:
            (stream if stream is not None else torch.cuda.current_stream(self.torch)).wait_event(marker._event)

    def begin_range(self, name: str) -> Any:
        """Begin a named range for a profiler (NVTX). `end_range` may be called on another thread."""
        return torch.cuda.nvtx.range_start(name) if self.is_cuda else None

    def end_range(self, of: Any) -> None:
        """End the range `of`, which `begin_range` has returned."""
        if of is not None:
            torch.cuda.nvtx.range_end(of)

    def is_working(self) -> bool:
        """Whether the stream that is current in the calling thread has work left; False on the CPU accelerator."""
        return self.is_cuda and not torch.cuda.current_stream(self.torch).query()

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.torch)

    def memory(self) -> tuple[int, int]:
        """Return the free and the total bytes of the GPU that this process may use. Torch's reserve counts as free."""
        free, total = torch.cuda.mem_get_info(self.torch)
        if hasattr(torch.cuda, "get_per_process_memory_fraction"):
            total = int(total * torch.cuda.get_per_process_memory_fraction(self.torch))
        return min(free + self.reserved(), total) - self.allocated(), total

    def expand_segments(self) -> None:
        """Turn on torch's expandable segments, unless the user has configured the allocator. Without them a gap between
        two live tensors serves no larger one: 14 B with adapters in 24 GiB ended with 2.9 GiB of gaps."""
        if not self.is_cuda or any(os.environ.get(name) for name in ALLOCATOR_VARIABLES):
            return
        if torch.cuda.get_allocator_backend() != "native":
            return
        configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        configure = configure or torch.cuda.memory._set_allocator_settings
        configure("expandable_segments:True")
        try:
            # Torch maps 20 MiB at once for tensors of more than 1 MiB.
            torch.empty(20 * 1024**2, dtype=torch.uint8, device=self.torch)
        except RuntimeError:  # a driver without virtual memory
            configure("expandable_segments:False")

    def allocated(self) -> int:
        """Return the bytes of tensors on the GPU, as torch counts them on the host, and the held bytes."""
        return torch.cuda.memory_allocated(self.torch) + _held[self.torch]

    def reserved(self) -> int:
        """Return the bytes that torch has from the driver, for tensors present and coming."""
        return torch.cuda.memory_reserved(self.torch)

    def hold(self, more: int) -> None:
        """Count so many more bytes as allocated: torch has reserved them for recordings, and gives them to nothing
        else."""
        self._peak_before = self.peak()  # it has nothing of these bytes
        torch.cuda.reset_peak_memory_stats(self.torch)
        _held[self.torch] += more

    def peak(self) -> int:
        """Return the most bytes of tensors since `reset_peak`, and the held bytes."""
        return max(self._peak_before, torch.cuda.max_memory_allocated(self.torch) + _held[self.torch])

    def reset_peak(self) -> None:
        self._peak_before = 0
        torch.cuda.reset_peak_memory_stats(self.torch)

    def release_cached(self) -> None:
        """Give the memory that torch keeps for reuse back to the driver. Waits for the GPU."""
        if self.is_cuda:
            torch.cuda.empty_cache()

    def memory_rate(self) -> float | None:
        """Return the bytes a second that an update reads and writes, from the memory's clock and width; None: not
        known. An H200 reaches 0.85 of the computed 4.9 TB/s."""
        found = torch.cuda.get_device_properties(self.torch)
        clock, width = getattr(found, "memory_clock_rate", 0), getattr(found, "memory_bus_width", 0)
        return 0.85 * 2 * 1e3 * clock * width / 8 or None

    def allocation_retries(self) -> int:
        """Return how often torch released its unused memory, which stops the GPU, to find room for a tensor."""
        return int(torch.cuda.memory_stats(self.torch).get("num_alloc_retries", 0))


def is_shortage(error: RuntimeError) -> bool:
    """Whether there was no GPU memory."""
    return isinstance(error, torch.OutOfMemoryError) or any(each in str(error) for each in DRIVERS_OWN)


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that operators on a device draw from unless they are given another one."""
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator
