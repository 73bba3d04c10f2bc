"""Seconds of operations and transfers, by the ceilings of a machine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ds_slide.errors import SlideError
from ds_slide.plan.ceilings.figures import Ceilings
from ds_slide.plan.operations import UNDER_MODE, Operation

ATTENTION_SHARE = {"attention": (0.80, 1_850), "attention backward": (0.75, 1_990)}
"""Of the rate of matrix products, what attention comes near to with many keys, and the keys with which it has half of
that: 0.42 and 0.38 of it at 2,048 tokens, and 0.76 and 0.71 at 32,768, with which a step of 3 B takes the 0.58 s of the
one and the 2.07 s of the other that were measured (benchmarks/results/2026-11-23_nvidia-h200_decided.md)."""
LEAST_OPERATION_S = 3e-6
"""Of a kernel on a GPU, however little it does."""
LAUNCH_S = 1.12e-4
"""Of the host, to have a GPU do one, with all that Python does around it, where `ds-slide doctor` has not measured it:
micro-batches of 8 x 512 and of 8 x 2048 tokens of 0.5 B, of 1,017 operations, take 0.101 to 0.12 s on H200 machines
(benchmarks/results/2026-11-23_nvidia-h200_decided.md and _hand-sweep.md)."""
UPDATE_LOSES_UP, UPDATE_LOSES_DOWN = 0.6, 1.0
"""Of the bytes that a copy moves up or down beside an update of the CPU, what the update moves less: they share the
memory. 154 GB/s alone became 131 beside 40 GB/s up, and 104 beside 50 down
(benchmarks/results/2026-11-23_nvidia-h200_update.md)."""
UP_BESIDE_UPDATE = 0.72
"""Of its rate, what a copy up has beside an update: 40 of 55.5 GB/s there."""
WEIGHTS_PASS_RATE, STATES_PASS_RATE = 0.90, 0.97
"""Of a whole update's bytes a second: what the passes over weights (139 of 154 GB/s there) and states (150) move."""


@dataclass(frozen=True)
class Rates:
    """Bytes a second. `copy`: read and written by what computes. `both_ways`: each way, when both carry."""

    ceilings: Ceilings
    copy: float
    h2d: float
    d2h: float
    both_ways: float
    update: float
    ssd: float | None
    """Reads and writes together, of all disks; None: not known."""

    @classmethod
    def of(cls, ceilings: Ceilings, *, on_gpu: bool) -> Rates:
        """`on_gpu`: a GPU computes. Raises SlideError where its ceilings are not known."""
        cpu, gpu = ceilings.cpu, ceilings.gpu
        ssd = sum(disk.mixed_gb_s for disk in ceilings.disks) * 1e9 or None
        if on_gpu and gpu is None:
            raise SlideError(
                "the ceilings are those of a machine without a GPU; give --ceilings with a preset or a file of "
                "`ds-slide doctor --json`"
            )
        if not on_gpu and cpu.product_tflop_s is None:
            raise SlideError(
                "the ceilings are those of a machine with a GPU; give --gpu-memory, or --ceilings of this machine"
            )
        if gpu is None or not on_gpu:
            host = cpu.copy_gb_s * 1e9
            return cls(ceilings, host, host / 2, host / 2, host / 2, cpu.update_gb_s * 1e9, ssd)
        return cls(
            ceilings,
            gpu.copy_gb_s * 1e9,
            gpu.h2d_gb_s * 1e9,
            gpu.d2h_gb_s * 1e9,
            gpu.both_ways_gb_s * 1e9,
            cpu.update_gb_s * 1e9,
            ssd,
        )

    def seconds(self, operations: Counter[Operation]) -> float:
        """Of operations that begin when all before them have ended: of what computes, or of the host that launches all
        of them."""
        return max(self.launches(operations), self.computes(operations))

    def computes(self, operations: Counter[Operation]) -> float:
        """Seconds of what computes, one operation after the other, each as long as its arithmetic or its bytes take."""
        return sum(self._seconds(operation) * count for operation, count in operations.items())

    def launches(self, operations: Counter[Operation]) -> float:
        """Seconds of the host that has a GPU do them, under the engine."""
        own = self.ceilings.engine_operation_s
        launch_s = LAUNCH_S if own is None else own
        return 0.0 if self.ceilings.gpu is None else launch_s * operations.total()

    def _seconds(self, operation: Operation) -> float:
        if operation == UNDER_MODE:
            return 0.0
        gpu = self.ceilings.gpu
        if gpu is None:
            flops = (self.ceilings.cpu.product_tflop_s or 1.0) * 1e12
        else:
            flops = gpu.product_flops(operation.shape if operation.kind == "product" else None)
        if operation.kind in ATTENTION_SHARE and operation.shape is not None:
            most, keys_at_half = ATTENTION_SHARE[operation.kind]
            flops *= most * operation.shape[1] / (operation.shape[1] + keys_at_half)
        return max(operation.flops / flops, operation.nbytes / self.copy, LEAST_OPERATION_S)


@dataclass
class Launched:
    """When the GPU has ended what was launched so far, and when the host has launched it: ahead of the GPU, which a
    long operation keeps busy meanwhile, and never behind it."""

    rates: Rates
    now: float = 0.0
    host: float = 0.0

    def run(self, operations: Counter[Operation], more: float = 0.0) -> None:
        """Then these, and `more` seconds of the GPU."""
        self.host += self.rates.launches(operations)
        self.now = max(self.now + self.rates.computes(operations), self.host) + more
        if self.rates.ceilings.gpu is None:  # the host computes itself
            self.host = self.now

    def wait(self, until: float) -> None:
        """For what comes by a copy. The host waits for it, too, where it comes from an update of its own."""
        self.now = max(self.now, until)
        self.host = max(self.host, until)

    @property
    def ahead(self) -> float:
        """Seconds by which the host is."""
        return self.now - self.host
