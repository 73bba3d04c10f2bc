"""How much memory a run will take, and how long its steps will be.

It adds up the plan's bytes, the trace's, and what neither of them counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ds_slide.errors import DoesNotFit
from ds_slide.plan.allocations import total
from ds_slide.plan.keeping import Kept
from ds_slide.plan.memory import Plan
from ds_slide.plan.spare import FRAGMENTATION
from ds_slide.plan.step_model import Schedule, Step
from ds_slide.plan.trace import StepTrace
from ds_slide.report.log import size

CONTEXT_BYTES = 900 << 20
"""GPU bytes of the CUDA context and kernels (an H200 had 0.90 GB in use beyond torch's allocator,
benchmarks/results/2026-11-23_nvidia-h200-x2_passes.jsonl)."""
WORKSPACE_BYTES = 64 << 20
"""GPU bytes in torch's allocator: the workspaces of cuBLAS and cuBLASLt, 32 MiB each on an H100 or H200."""


@dataclass(frozen=True)
class ProcessBytes:
    """Host bytes of a rank's process beside what the plan places.

    `before`: before it has an engine, where `ds-slide doctor` has not measured them. `engine`: what an engine adds that
    neither grows with the model nor is in the plan's list: threads, compiled kernels, streams."""

    before: int
    engine: int


WITH_CUDA = ProcessBytes(before=1285 << 20, engine=175 << 20)
"""`before`: Python, torch, transformers, DeepSpeed and the CUDA driver after a step of training without an engine. Both
are 1.531 GB: runs with all states on an H200 took 1.537 (benchmarks/results/2026-11-23_nvidia-h200_hand-sweep.md, whose
machine measured none). `engine`: beside what `ds-slide doctor` had measured of a process, 1.53 GB, ten runs on an H100
took 0.14 to 0.24 GB (benchmarks/results/2026-11-25_nvidia-h100_forecast.md)."""
ON_HOST = ProcessBytes(before=445 << 20, engine=75 << 20)
"""The same where the accelerator is the host and no CUDA is loaded. `before`: what `ds-slide doctor` measured with
torch 2.13 and transformers 5.23 (0.467 GB; 0.50 with scipy beside them, and 0.54 with transformers 5.17 and
scikit-learn). With this `engine`, host peaks of `benchmarks/step.py --model tiny` are forecast within 0.5 % for 2 x 128
tokens beside each of these three. The peak with 0.5 G parameters, 8.9 GB, is forecast within 1.5 %."""


@dataclass(frozen=True)
class Room:
    """Memory for the ranks of one machine, in bytes.

    `gpu`: for each rank, None where the host is the accelerator. `host`, `ssd`: for all ranks together; `ssd` None: not
    limited. `process_bytes`: measured in a process before it has an engine; None takes the constants above.
    `context_bytes`: GPU bytes that no allocator gives out; 0 where `gpu` is a limit of torch's allocator."""

    gpu: int | None
    host: int
    ssd: int | None = None
    ranks: int = 1
    process_bytes: int | None = None
    context_bytes: int = CONTEXT_BYTES

    @property
    def gpu_for_plan(self) -> int | None:
        """What an engine finds free."""
        return None if self.gpu is None else max(0, self.gpu - self.context_bytes)

    @property
    def host_for_plan(self) -> int:
        """What the engine of a rank finds free."""
        return max(0, self.host // self.ranks - self.process)

    @property
    def process(self) -> int:
        """Bytes of the process of a rank beside what the plan places."""
        usual = ON_HOST if self.gpu is None else WITH_CUDA
        return (usual.before if self.process_bytes is None else self.process_bytes) + usual.engine


@dataclass(frozen=True)
class ActivationPlan:
    """What becomes of blocks' activations.

    `checkpointed`: blocks that the engine recomputes where memory is short. `kept`: the ones among them that it does
    not recompute, or only in part, with `kept_bytes`. `moved`: blocks whose inputs wait elsewhere, with `moved_bytes`.
    `on_ssd`: moved blocks whose inputs are on SSD, with `on_ssd_bytes`, through `buffer_bytes` of host memory."""

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
        """Host bytes of inputs, and of the buffers for inputs on SSD."""
        return self.moved_bytes - self.on_ssd_bytes + self.buffer_bytes


@dataclass(frozen=True)
class Forecast:
    """The forecast of one run, with `batch` sequences of `seq` tokens in each of `micro_batches` on each rank. The
    engine's decisions after its first steps are the plan's promoted units, and `activations`."""

    plan: Plan
    trace: StepTrace
    time: Step
    below_limit: Step
    """`time` while norms stay below the limit."""
    schedules: Mapping[Schedule, Step]
    room: Room
    batch: int
    seq: int
    micro_batches: int
    activations: ActivationPlan = ActivationPlan()
    first: Forecast | None = None
    """The forecast of the first steps; None: this is it."""
    gpu_peak_between: int = 0
    """Bytes of the plan, activations and gradients in steps between the first decision and the last one."""

    @property
    def gpu(self) -> dict[str, int]:
        """Bytes of one GPU, by their purpose."""
        entries = {"placed by the plan": self.plan.gpu_bytes, "activations and gradients": self.trace.peak_bytes}
        if self.room.gpu is None:
            return entries
        fragments = int(FRAGMENTATION * (self.trace.peak_bytes - self.activations.kept_bytes))
        return {
            **entries,
            "fragmentation": fragments,
            "cuBLAS": WORKSPACE_BYTES,
            "CUDA context": self.room.context_bytes,
        }

    @property
    def gpu_peak_allocated(self) -> int:
        """The most bytes that torch's allocator gives out."""
        workspace = 0 if self.room.gpu is None else WORKSPACE_BYTES
        return max(self.plan.gpu_bytes + self.trace.peak_bytes, self.gpu_peak_between) + workspace

    @property
    def host(self) -> dict[str, int]:
        """Bytes of host memory on one machine, by their purpose."""
        ranks, logs, spare = self.room.ranks, self.plan.undo_log_bytes, self.plan.spare_state_bytes
        entries = {
            "placed by the plan": ranks * (self.plan.host_bytes - logs - spare),
            "undo logs": ranks * logs,
            "spare states": ranks * spare,
            "processes": ranks * self.room.process,
        }
        # The first steps' memory for inputs is not given back, even where fewer inputs move later.
        taken = max(each.activations.host_bytes for each in (self, self.first) if each is not None)
        if taken:
            entries["inputs of blocks"] = ranks * taken
        if self.room.gpu is None:
            entries["the accelerator, which is the host"] = ranks * sum(self.gpu.values())
        return entries

    def host_peak(self, schedule: Schedule) -> int:
        """Bytes of `host` in use at most. Undo logs and spare states are touched page by page, by speculative updates
        only, but page-locked ones are in use from the start."""
        ways_back = [each for each in self.plan.allocations if each.why in ("undo logs", "spare states")]
        untouched = self.room.ranks * sum(each.nbytes for each in ways_back if not each.page_locked)
        return sum(self.host.values()) - (0 if schedule == "speculative" else untouched)

    @property
    def ssd(self) -> dict[str, int]:
        """Bytes on SSD of one machine, by their purpose."""
        entries = {"states": self.room.ranks * total(self.plan.allocations, "ssd")}
        if self.activations.on_ssd:
            entries["inputs of blocks"] = self.room.ranks * self.activations.on_ssd_bytes
        return entries

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all ranks."""
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
                    f"{what} {size(needed)}, but {size(available)} are there, {size(needed - available)} short",
                )
        return None
