"""Seconds of operations and transfers, by the ceilings of a machine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ds_slide.errors import SlideError
from ds_slide.plan.ceilings import Ceilings
from ds_slide.plan.operations import Operation

_ATTENTIONS = ("attention", "attention backward")
ATTENTION_SHARE = {"attention": (0.80, 1_850), "attention backward": (0.75, 1_990)}
"""The rate of attention where `ds-slide doctor` has not measured it: the share of the rate of matrix products that it
nears with many keys, and the number of keys with half of that share. It is 0.42 and 0.38 at 2,048 tokens, and 0.76 and
0.71 at 32,768. With these a step of 3 B takes the measured times, 0.58 s and 2.07 s
(benchmarks/results/2026-11-23_nvidia-h200_decided.md)."""
HOST_OPERATION_S = 1e-4
"""Seconds of Python, hooks and launch for an operation of the GPU, roughly: 64 to 113 us were measured within eleven
minutes on one machine. No forecast of the host: only a floor, without which 0.5 B with 4,096 tokens a micro-batch would
be forecast at a third of its time, and `--fit` would recommend batches that are too small."""


@dataclass(frozen=True)
class Rates:
    """Rates in bytes a second. `copy`: reads and writes of the device that computes. `both_ways`: each way, when data
    moves in both."""

    ceilings: Ceilings
    copy: float
    h2d: float
    d2h: float
    both_ways: float
    update: float
    ssd: float | None
    """Reads and writes together, of all disks; None: not known."""
    _known: dict[Operation, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Seconds of operations that were asked for: a search asks for the same operations a million times."""

    @classmethod
    def of(cls, ceilings: Ceilings, *, on_gpu: bool) -> Rates:
        """Return a machine's rates. `on_gpu`: a GPU computes. Raises SlideError where its ceilings are not known."""
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
        """Return the seconds of operations one after the other, each as long as its arithmetic or its bytes take."""
        known = self._known
        for operation in operations.keys() - known.keys():
            known[operation] = self._seconds(operation)
        return sum(known[operation] * count for operation, count in operations.items())

    def launches(self, operations: Counter[Operation]) -> float:
        """Return the host's seconds: it launches the operations on a GPU, or computes them itself."""
        return self.seconds(operations) if self.ceilings.gpu is None else HOST_OPERATION_S * operations.total()

    def _seconds(self, operation: Operation) -> float:
        gpu = self.ceilings.gpu
        if gpu is None:
            flops = (self.ceilings.cpu.product_tflop_s or 1.0) * 1e12
        else:
            flops = gpu.product_flops(operation.shape if operation.kind == "product" else None)
        if operation.kind in _ATTENTIONS and operation.shape is not None:
            flops = self._attention_flops(operation.kind, *operation.shape[1:], flops)
        return max(operation.flops / flops, operation.nbytes / self.copy, 3e-6)  # no kernel of a GPU is shorter

    def _attention_flops(self, kind: str, keys: int, width: int, of_products: float) -> float:
        gpu = self.ceilings.gpu
        measured = None if gpu is None else gpu.attention_flops(keys, width, backward=kind == "attention backward")
        if measured is not None:
            return measured
        most, keys_at_half = ATTENTION_SHARE[kind]
        return of_products * most * keys / (keys + keys_at_half)
