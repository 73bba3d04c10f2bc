"""Time Muon's products alone, for all matrices of a model that a step updates, beside their FLOP bound.

    python3 benchmarks/newton_schulz.py --model qwen2.5-3b

Prints a line a shape and one line of JSON: ms a step of the iterations alone ("products"), of whole orthogonal updates
(norm, data types), and of DeepSpeed's compiled function, for both values of `ns_method`. The bound is the number of
multiplications and additions over the rate of a product of 8192 in the same data type, measured in the same minute.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from typing import get_args

import optimizers
import shapes
import torch
from kernel_clock import Clock, Work
from step import accelerator_device

from ds_slide.optim.muon import Method, flop, iterated, matrices_of, orthogonal

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-3b", help="a model of step.py")
    parser.add_argument("--deepspeed", action="store_true", help="time DeepSpeed's functions too, which it compiles")
    arguments = parser.parse_args()
    clock = Clock(accelerator_device())
    model = shapes.build_on_accelerator(arguments.model, torch.device("meta"), 0)
    counts = Counter(matrices_of(tuple(each.shape)).shape for each in optimizers.matrices_of(model))
    found: dict[str, object] = {
        "model": arguments.model,
        "device": torch.cuda.get_device_name(clock.device) if clock.on_gpu else "cpu",
        "elements": sum(math.prod(shape) * count for shape, count in counts.items()),
    }
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
    print(json.dumps(found))


if __name__ == "__main__":
    main()
