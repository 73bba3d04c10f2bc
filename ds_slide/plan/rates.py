"""Seconds of operations and transfers, by the ceilings of a machine."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from ds_slide.errors import SlideError
from ds_slide.plan.ceilings.figures import Ceilings
from ds_slide.plan.operations import UNDER_MODE, Operation

_ATTENTIONS = ("attention", "attention backward")
ATTENTION_SHARE = {"attention": (0.80, 1_850), "attention backward": (0.75, 1_990)}
"""Of the rate of matrix products, what attention comes near to with many keys, and the keys with which it has half of
that, where `ds-slide doctor` has not measured it: 0.42 and 0.38 of it at 2,048 tokens, and 0.76 and 0.71 at 32,768,
with which a step of 3 B takes the 0.58 s of the one and the 2.07 s of the other that were measured
(benchmarks/results/2026-11-23_nvidia-h200_decided.md)."""
LEAST_OPERATION_S = 3e-6
"""Of a kernel on a GPU, however little it does."""
LAUNCH_S = 1.12e-4
"""Of the host, to have a GPU do one, with all that Python does around it, where `ds-slide doctor` has not measured it:
micro-batches of 8 x 512 and of 8 x 2048 tokens of 0.5 B, of 1,017 operations, take 0.101 to 0.12 s on H200 machines
(benchmarks/results/2026-11-23_nvidia-h200_decided.md and _hand-sweep.md)."""
LAUNCH_BESIDE_UPDATE = 2.0
"""How many times as long a launch takes in a forward while updates run on the other cores of the host: they share its
memory, and two hyper-threads a core. The first blocks of 0.5 B took 3 to 5 ms until the updates had ended, and 1.4
behind them (benchmarks/results/2026-11-26_nvidia-h100_host-and-kernels.md)."""
UPDATE_LOSES_UP, UPDATE_LOSES_DOWN = 0.6, 1.0
"""Of the bytes that a copy moves up or down beside an update of the CPU, what the update moves less: they share the
memory. 154 GB/s alone became 131 beside 40 GB/s up, and 104 beside 50 down
(benchmarks/results/2026-11-23_nvidia-h200_update.md)."""
UP_BESIDE_UPDATE = 0.72
"""Of its rate, what a copy up has beside an update: 40 of 55.5 GB/s there."""
WEIGHTS_PASS_RATE, STATES_PASS_RATE = 0.97, 1.0
"""Of a whole update's bytes a second: what the passes over weights and states move beside what `UPDATE_LOSES_UP` and
`_DOWN` take. Alone they do 0.90 and 0.97 (139 and 150 of 154 GB/s there); with that the update of 26 trainings in two
passes was 2 to 14 % too long (2026-11-23_nvidia-h200_hand-sweep.md, 2026-11-25_nvidia-h100_forecast.md)."""


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
    _known: dict[Operation, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Seconds of operations that were asked for: a search asks for the same ones a million times."""

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
        known = self._known
        for operation in operations.keys() - known.keys():
            known[operation] = self._seconds(operation)
        return sum(known[operation] * count for operation, count in operations.items())

    def launches(self, operations: Counter[Operation]) -> float:
        """Seconds of the host that has a GPU do them, under the engine."""
        own = self.ceilings.engine_operation_s
        launch_s = LAUNCH_S if own is None else own
        return 0.0 if self.ceilings.gpu is None else launch_s * operations.total()

    @property
    def visit_s(self) -> float:
        """Seconds of the host beside them, for a block that passes through the window, each way."""
        return 0.0 if self.ceilings.gpu is None else self.ceilings.engine_visit_s or 0.0

    def _seconds(self, operation: Operation) -> float:
        if operation == UNDER_MODE:
            return 0.0
        gpu = self.ceilings.gpu
        if gpu is None:
            flops = (self.ceilings.cpu.product_tflop_s or 1.0) * 1e12
        else:
            flops = gpu.product_flops(operation.shape if operation.kind == "product" else None)
        if operation.kind in _ATTENTIONS and operation.shape is not None:
            flops = self._attention_flops(operation.kind, *operation.shape[1:], flops)
        return max(operation.flops / flops, operation.nbytes / self.copy, LEAST_OPERATION_S)

    def _attention_flops(self, kind: str, keys: int, width: int, of_products: float) -> float:
        gpu = self.ceilings.gpu
        measured = None if gpu is None else gpu.attention_flops(keys, width, backward=kind == "attention backward")
        if measured is not None:
            return measured
        most, keys_at_half = ATTENTION_SHARE[kind]
        return of_products * most * keys / (keys + keys_at_half)


@dataclass
class Launched:
    """When the GPU has ended what was launched so far, and when the host has launched it: ahead of the GPU, which a
    long operation keeps busy meanwhile, and never behind it. `updates_end`: until when the host has updates beside."""

    rates: Rates
    now: float = 0.0
    host: float = 0.0
    updates_end: float = -math.inf

    def run(self, operations: Counter[Operation], more: float = 0.0, *, visits: bool = False) -> None:
        """Then these, and `more` seconds of the GPU. `visits`: they are of a block that passes through the window."""
        seconds = self.rates.launches(operations)
        beside = min(seconds, max(0.0, self.updates_end - self.host) / LAUNCH_BESIDE_UPDATE)
        self.host += seconds + (LAUNCH_BESIDE_UPDATE - 1) * beside
        self.host += self.rates.visit_s if visits else 0.0  # measured in steps that have updates
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
