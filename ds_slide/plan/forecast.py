"""What a run will take and how long its steps will be: the plan's bytes, the trace's, and what neither has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ds_slide.errors import DoesNotFit
from ds_slide.plan.allocations import total
from ds_slide.plan.keeping import Kept
from ds_slide.plan.memory import Plan
from ds_slide.plan.spare import FRAGMENTATION
from ds_slide.plan.time import StepTime
from ds_slide.plan.trace import StepTrace
from ds_slide.plan.two_passes import Schedule

CONTEXT_BYTES = 900 << 20
"""Of the GPU: the CUDA context and kernels (0.90 GB of what the device had in use on an H200 beyond torch's allocator,
benchmarks/results/2026-11-23_nvidia-h200-x2_passes.jsonl)."""
WORKSPACE_BYTES = 64 << 20
"""Of the GPU, by torch's allocator: the workspaces of cuBLAS and cuBLASLt, 32 MiB each on an H100 or H200."""
PROCESS_BYTES = 1060 << 20
"""Of host memory: Python, torch, transformers and the CUDA driver (1.06 GB there before an engine is built)."""
ENGINE_BYTES = 400 << 20
"""Of host memory: DeepSpeed, compiled kernels, and what else does not grow with the model (0.41 GB there)."""
PYTHON_BYTES = 520 << 20
"""As PROCESS_BYTES and ENGINE_BYTES, where the accelerator is the host and no CUDA is loaded (0.54 GB of a run of
`benchmarks/step.py --model tiny`)."""


@dataclass(frozen=True)
class Room:
    """Memory for the ranks of one machine, in bytes. `gpu`: of each rank's, None where the host is the accelerator.
    `host`, `ssd`: of all ranks together; `ssd` None: not limited."""

    gpu: int | None
    host: int
    ssd: int | None = None
    ranks: int = 1

    @property
    def gpu_for_plan(self) -> int | None:
        """What an engine finds free."""
        return None if self.gpu is None else max(0, self.gpu - CONTEXT_BYTES)

    @property
    def host_for_plan(self) -> int:
        """What the engine of a rank finds free."""
        return max(0, self.host // self.ranks - self.process)

    @property
    def process(self) -> int:
        return PYTHON_BYTES if self.gpu is None else PROCESS_BYTES + ENGINE_BYTES


@dataclass(frozen=True)
class Activations:
    """`checkpointed`: blocks that the engine recomputes where memory is short. `kept`: those of them that it does not
    recompute, or in part, with `kept_bytes`. `moved`: those whose inputs wait elsewhere, with `moved_bytes`; `on_ssd`:
    those of them that have gone on to SSD, with `on_ssd_bytes`, through `buffer_bytes` of host memory."""

    checkpointed: frozenset[int] = frozenset()
    kept: Kept = field(default_factory=Kept)
    kept_bytes: int = 0
    moved: frozenset[int] = frozenset()
    moved_bytes: int = 0
    on_ssd: frozenset[int] = frozenset()
    on_ssd_bytes: int = 0
    buffer_bytes: int = 0

    @property
    def host_bytes(self) -> int:
        """Of inputs, and of buffers for them."""
        return self.moved_bytes - self.on_ssd_bytes + self.buffer_bytes


@dataclass(frozen=True)
class Forecast:
    """Of one run, with `batch` sequences of `seq` tokens in each of `micro_batches` on each rank. What the engine has
    decided after its first steps is in the plan's promoted units, and in `activations`."""

    plan: Plan
    trace: StepTrace
    time: StepTime
    below_limit: StepTime
    """`time` while norms stay below the limit."""
    schedules: Mapping[Schedule, StepTime]
    room: Room
    batch: int
    seq: int
    micro_batches: int
    activations: Activations = Activations()
    first: Forecast | None = None
    """Of the first steps; None: these are they."""

    @property
    def gpu(self) -> dict[str, int]:
        """Bytes of one GPU, by what they are for."""
        entries = {"placed by the plan": self.plan.gpu_bytes, "activations and gradients": self.trace.peak_bytes}
        if self.room.gpu is None:
            return entries
        fragments = int(FRAGMENTATION * (self.trace.peak_bytes - self.activations.kept_bytes))
        return {**entries, "fragmentation": fragments, "cuBLAS": WORKSPACE_BYTES, "CUDA context": CONTEXT_BYTES}

    @property
    def gpu_peak_allocated(self) -> int:
        """What torch's allocator has given out at most."""
        workspace = 0 if self.room.gpu is None else WORKSPACE_BYTES
        return self.plan.gpu_bytes + self.trace.peak_bytes + workspace

    @property
    def host(self) -> dict[str, int]:
        """Bytes of host memory on one machine, by what they are for."""
        ranks, logs, spare = self.room.ranks, self.plan.undo_log_bytes, self.plan.spare_state_bytes
        entries = {
            "placed by the plan": ranks * (self.plan.host_bytes - logs - spare),
            "undo logs": ranks * logs,
            "spare states": ranks * spare,
            "processes": ranks * self.room.process,
        }
        # What the first steps have taken for inputs stays, however many of them move later.
        taken = max(each.activations.host_bytes for each in (self, self.first) if each is not None)
        if taken:
            entries["inputs of blocks"] = ranks * taken
        if self.room.gpu is None:
            entries["the accelerator, which is the host"] = ranks * sum(self.gpu.values())
        return entries

    def host_peak(self, schedule: Schedule) -> int:
        """What is in use of it: undo logs and spare states are, page by page, where updates are done ahead, and what is
        page-locked from the start."""
        ways_back = [each for each in self.plan.allocations if each.why in ("undo logs", "spare states")]
        untouched = self.room.ranks * sum(each.nbytes for each in ways_back if not each.page_locked)
        return sum(self.host.values()) - (0 if schedule == "speculative" else untouched)

    @property
    def ssd(self) -> dict[str, int]:
        """Bytes on SSD of one machine, by what they are for."""
        entries = {"states": self.room.ranks * total(self.plan.allocations, "ssd")}
        if self.activations.on_ssd:
            entries["inputs of blocks"] = self.room.ranks * self.activations.on_ssd_bytes
        return entries

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks."""
        return self.room.ranks * self.batch * self.seq * self.micro_batches / self.time.step_s

    @property
    def ssd_written_a_day(self) -> float:
        return self.room.ranks * self.time.ssd_written * 86_400 / self.time.step_s

    def shortage(self) -> DoesNotFit | None:
        """The first tier that is too small; None where all suffice."""
        needs = (
            ("gpu", "GPU tier: a step needs", sum(self.gpu.values()), self.room.gpu),
            ("host", "host tier: the run needs", sum(self.host.values()), self.room.host),
            ("ssd", "SSD tier: the run needs", sum(self.ssd.values()), self.room.ssd),
        )
        for tier, what, needed, available in needs:
            if available is not None and needed > available:
                return DoesNotFit(
                    tier,  # type: ignore[arg-type]
                    needed,
                    available,
                    f"{what} {needed:,} bytes, but {available:,} are there, {needed - available:,} short",
                )
        return None
