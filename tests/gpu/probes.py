"""What the GPU tests watch while an engine trains: waits of the host, allocations by the engine, memory in use."""

from __future__ import annotations

import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LANE_PREFIX = "ds_slide-"
"""Names of the engine's own threads start so. They may wait for the GPU; the model's threads may not."""

SIZE_OF_INTEREST = 64 << 10
"""Allocations from here on count: below lie scalars such as the gradient norm."""


class SyncProbe:
    """Finds every place where a thread of the model waits for the GPU between `start` and `stop`.

    torch's debug mode sees what synchronizes inside an operator (`.item()`, pageable copies, nonzero); explicit waits
    on device, stream or event do not all pass there, so those functions report too. Each place is recorded once, as
    the innermost frames of its Python stack. What the model's own code reads is the model's affair and left out:
    transformers looks once per forward whether the sequences are packed.
    """

    def __init__(self) -> None:
        self.found: list[list[str]] = []
        self._running = False
        self._wrap(torch.cuda, "synchronize")
        self._wrap(torch.cuda.Stream, "synchronize")
        self._wrap(torch.cuda.Event, "synchronize")
        self._previous = warnings.showwarning
        warnings.showwarning = self._on_warning
        warnings.filterwarnings("always", message="called a synchronizing CUDA operation")

    def start(self) -> None:
        self._running = True
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")

    def stop(self) -> None:
        self._running = False
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")

    def sees(self, work: Callable[[], object]) -> bool:
        """Whether the probe notices `work`, which is known to wait; leaves the record as it was."""
        before, self.found = self.found, []
        self.start()
        work()
        self.stop()
        before, self.found = self.found, before
        return before != []

    def _wrap(self, owner: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def reporting(*args: Any, **kwargs: Any) -> Any:
            self._report()
            return original(*args, **kwargs)

        setattr(owner, name, reporting)

    def _on_warning(self, message: Any, *rest: Any, **options: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            self._report()
        else:
            self._previous(message, *rest, **options)

    def _report(self) -> None:
        if not self._running or threading.current_thread().name.startswith(LANE_PREFIX):
            return
        frames = [frame for frame in traceback.extract_stack() if not _is_plumbing(frame.filename)]
        if frames and "transformers" in Path(frames[-1].filename).parts:
            return
        place = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames[-8:]]
        if place not in self.found:
            self.found.append(place)


def _is_plumbing(filename: str) -> bool:
    path = Path(filename)
    return path.name in ("probes.py", "warnings.py") or path.is_relative_to(Path(torch.__file__).parent)


class AllocationProbe:
    """Lists GPU allocations from `start` to `stop` with the Python line that made them."""

    def start(self) -> None:
        torch.cuda.memory._record_memory_history(enabled="all", context="alloc", stacks="python", max_entries=200_000)

    def stop(self) -> dict[str, Any]:
        """All allocations counted, and those of size that a line inside the package `ds_slide` made itself."""
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        events = [event for trace in snapshot["device_traces"] for event in trace if event["action"] == "alloc"]
        own = {
            f"{event['frames'][0]['filename']}:{event['frames'][0]['line']} {event['size']} bytes"
            for event in events
            if event["size"] >= SIZE_OF_INTEREST and event.get("frames") and _in_package(event["frames"][0]["filename"])
        }
        return {"all": len(events), "own": sorted(own)}


def _in_package(filename: str) -> bool:
    import ds_slide

    return Path(filename).is_relative_to(Path(ds_slide.__file__).parent)


def _resident_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["VmRSS"].split()[0]) * 1024


def memory_now(engine: Any) -> dict[str, int]:
    """Bytes in use when nothing is under way, by allocator and as the engine itself counts them."""
    values = {"host_resident": _resident_bytes()}
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        values["gpu_allocated"] = torch.cuda.memory_allocated()
        values["gpu_segments"] = torch.cuda.memory_stats()["segment.all.current"]
        if hasattr(torch.cuda, "host_memory_stats"):
            values["pinned_by_torch"] = int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
    own = engine.optimizer.slide_stats().get("memory", {}) if hasattr(engine.optimizer, "slide_stats") else {}
    values.update({f"engine_{name}": int(value) for name, value in own.items()})
    return values


def pools_now(engine: Any) -> dict[str, int]:
    """Bytes of the pools of recordings, as the engine counts them and as torch's allocator has them. `held`: bytes in
    them that torch counts as free."""
    memory = engine.optimizer.runtime.parts.spare.activations.captures._memory
    if memory is None or not torch.cuda.is_available():
        return {}
    pools = {tuple(memory.forwards.handle), tuple(memory.backwards.handle)}
    segments = [each for each in torch.cuda.memory_snapshot() if tuple(each.get("segment_pool_id", ())) in pools]
    reserved, allocated = (sum(each[key] for each in segments) for key in ("total_size", "allocated_size"))
    return {"counted": memory.nbytes, "held": memory._held, "reserved": reserved, "allocated": allocated}
