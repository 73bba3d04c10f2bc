"""Time Muon's products alone, for all matrices of a model that a step updates, beside their FLOP bound.

    python3 benchmarks/newton_schulz.py --model qwen2.5-3b

Prints a line a shape and one line of JSON: ms a step of the iterations alone ("products"), of whole orthogonal updates
(norm, data types), and of DeepSpeed's compiled function, for both values of `ns_method`. The bound is the number of
multiplications and additions over the rate of a product of 8192 in the same data type, measured in the same minute.

Where the GPU has the kernel for symmetric products, also: the same for all matrices of a block together, recorded and
as written, and one by one ("recorded", "together", "alone"), the error of both ways against fp64, and rates of the
kernel by tile sizes.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, get_args

import optimizers
import shapes
import torch
from kernel_clock import Clock, Work
from step import accelerator_device
from symmetric_products import print_rates

from ds_slide.optim.muon import Method, flop, iterated, matrices_of, orthogonal
from ds_slide.optim.muon_batch import Batch, has_kernel, orthogonal_together
from ds_slide.optim.muon_groups import Shape, batches, numel_of
from ds_slide.runtime.core.device import Device
from ds_slide.runtime.updates.iterations import Iterations

DTYPES: dict[Method, torch.dtype] = {"gram": torch.float16, "standard": torch.bfloat16}
GEMM = 8192


def works_of(shape: tuple[int, int, int], method: Method, device: torch.device, deepspeed: bool) -> dict[str, Work]:
    """The calls to be timed, by name."""
    dtype = DTYPES[method]
    update = torch.randn(shape, device=device)
    wide = update.mT if shape[1] > shape[2] else update
    x = (wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)).to(dtype)
    works: dict[str, Work] = {
        "products": lambda: iterated(x, method),
        "updates": lambda: orthogonal(update, method, dtype),
    }
    if deepspeed:
        from deepspeed.runtime.zero.muon import original_muon

        theirs = {
            "gram": original_muon.zeropower_via_gram_newtonschulz,
            "standard": original_muon.zeropower_via_newtonschulz5,
        }[method]
        works["deepspeed"] = lambda: theirs(update, steps=5)
    return works


def gemm_rate(clock: Clock, dtype: torch.dtype, size: int) -> float:
    """FLOP/s of a square product."""
    left, right = torch.randn(2, size, size, device=clock.device).to(dtype).unbind()
    return 2 * size**3 / clock.in_turns({"gemm": lambda: left @ right}, {})["gemm"].median * 1e3


def block_of(counts: Counter[Shape]) -> tuple[int, list[Shape]]:
    """Return the number of equal blocks of these matrices, and the matrices of one."""
    blocks = math.gcd(*counts.values())
    return blocks, [shape for shape, count in sorted(counts.items()) for _ in range(count // blocks)]


def works_together(block: Sequence[Shape], method: Method, device: torch.device) -> dict[str, Work]:
    """The calls that update the matrices of a block by the kernel, by name."""
    dtype = DTYPES[method]
    updates = [torch.randn(math.prod(shape), device=device) for shape in block]
    groups = [([block[each] for each in group], [updates[each] for each in group]) for group in batches(block)]
    filled = []
    for own, some in groups:
        filled.append(Batch(own, method, torch.empty(numel_of(own), dtype=dtype, device=device)))
        filled[-1].fill(iter(some))
    iterations = Iterations(Device(device))

    def products() -> None:  # also of what the last call has left, which is orthogonal already
        for each in filled:
            each.iterate()

    def recorded() -> None:
        for own, some in groups:
            for _ in iterations.orthogonal(own, iter(some), method, dtype):
                pass

    def together() -> None:
        for own, some in groups:
            for _ in orthogonal_together(own, iter(some), method, dtype, device):
                pass

    def alone() -> None:
        for shape, update in zip(block, updates, strict=True):
            for _ in orthogonal_together([shape], iter([update]), method, dtype, device):
                pass

    return {"products": products, "recorded": recorded, "together": together, "alone": alone}


def print_errors(shapes_of: Sequence[Shape], method: Method, device: torch.device) -> None:
    """Print the distance of an update from that in fp64, over the norm of the latter, by torch and by the kernel."""
    for shape in shapes_of:
        update, dtype = torch.randn(shape, device=device), DTYPES[method]
        exact = orthogonal(update.double(), method, torch.float64)
        [by_kernel] = orthogonal_together([shape], iter([update.view(-1)]), method, dtype, device)
        ways = {"torch": orthogonal(update, method, dtype), "kernel": by_kernel.view(shape)}
        far = {name: float((way.double() - exact).norm() / exact.norm()) for name, way in ways.items()}
        print(f"{method:8} {shape}: error of torch {far['torch']:.2e}, of the kernel {far['kernel']:.2e}", flush=True)


def batch_changes_no_bit(block: Sequence[Shape], method: Method, device: torch.device) -> bool:
    """Whether the updates of a block's matrices together, recorded or not, have the bits of each alone. cuBLAS makes a
    part of them."""
    dtype = DTYPES[method]
    updates = [torch.randn(math.prod(shape), device=device) for shape in block]
    same = True
    for group in batches(block):
        own, some = [block[each] for each in group], [updates[each] for each in group]
        iterations = Iterations(Device(device))
        for _ in range(3):  # as written, recorded, replayed
            together = iterations.orthogonal(own, iter(some), method, dtype)
            for shape, update, found in zip(own, some, together, strict=True):
                [alone] = orthogonal_together([shape], iter([update]), method, dtype, device)
                same &= torch.equal(found, alone)
    return same


def measure_kernel(counts: Counter[Shape], method: Method, clock: Clock) -> dict[str, float]:
    """Print and return milliseconds of all blocks by the kernel."""
    print_errors(sorted(counts), method, clock.device)
    blocks, block = block_of(counts)
    same = batch_changes_no_bit(block, method, clock.device)
    print(f"{method:8} a block together has {'the' if same else 'NOT THE'} bits of each matrix alone", flush=True)
    times = clock.in_turns(works_together(block, method, clock.device), {})
    for name, each in times.items():
        host = each.host_ms * blocks
        print(f"{method:8} {blocks} blocks by the kernel, {name}: {each.median * blocks:.1f} ms, host {host:.1f} ms")
    return {f"kernel_{name}_ms": each.median * blocks for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-3b", help="a model of step.py")
    parser.add_argument("--deepspeed", action="store_true", help="time DeepSpeed's functions too, which it compiles")
    arguments = parser.parse_args()
    clock = Clock(accelerator_device())
    model = shapes.build_on_accelerator(arguments.model, torch.device("meta"), 0)
    counts = Counter(matrices_of(tuple(each.shape)).shape for each in optimizers.matrices_of(model))
    found: dict[str, Any] = {
        "model": arguments.model,
        "device": torch.cuda.get_device_name(clock.device) if clock.on_gpu else "cpu",
        "elements": sum(math.prod(shape) * count for shape, count in counts.items()),
    }
    by_kernel = has_kernel(clock.device)
    for method in get_args(Method):
        rate = gemm_rate(clock, DTYPES[method], GEMM if clock.on_gpu else 256)
        total, totals = 0.0, Counter[str]()
        for shape, count in sorted(counts.items()):
            works = works_of(shape, method, clock.device, arguments.deepspeed)
            times = {name: each.median for name, each in clock.in_turns(works, {}).items()}
            for name, ms in times.items():
                totals[name] += ms * count
            total += flop(shape, method) * count
            shown = ", ".join(f"{name} {ms:.3f} ms" for name, ms in times.items())
            bound = flop(shape, method) / rate * 1e3
            print(f"{method:8} {count:4} x {shape}: {shown}, bound {bound:.3f} ms", flush=True)
        found[method] = {
            "tflop": total / 1e12,
            "gemm_tflops": rate / 1e12,
            "bound_ms": total / rate * 1e3,
            **{f"{name}_ms": ms for name, ms in totals.items()},
        }
        if by_kernel:
            found[method] |= measure_kernel(counts, method, clock)
    if by_kernel:
        found["symmetric_tflops"] = print_rates(clock)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
