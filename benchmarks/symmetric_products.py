"""Rates of `symmetric_product_` by tile sizes, beside torch's product of whole matrices.

For the two main products of Qwen2.5 3B: five squares of 2048 with a matrix added, and three X X^T of 2048 x 11008 that
lie as their transposes. TFLOP/s are those of the whole product. `newton_schulz.py` prints them.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from kernel_clock import Clock

from ds_slide.kernels.offload.tiles import TILES, Tiles

CANDIDATES = (
    Tiles(128, 256, 64, warps=8, stages=3),
    Tiles(128, 256, 64, warps=8, stages=4),
    Tiles(256, 128, 64, warps=8, stages=3),
    Tiles(128, 128, 64, warps=8, stages=4),
    Tiles(128, 128, 64, warps=4, stages=3),
    Tiles(128, 256, 64, warps=8, stages=3, described=True),
    Tiles(128, 256, 64, warps=8, stages=4, described=True),
    Tiles(256, 128, 64, warps=8, stages=4, described=True),
    Tiles(128, 128, 64, warps=8, stages=4, described=True),
    Tiles(128, 128, 64, warps=4, stages=3, described=True),
    Tiles(128, 128, 64, group=2, warps=4, stages=3, described=True),
)
SMALL_CANDIDATES = (
    Tiles(64, 64, 64, warps=4, stages=4),
    Tiles(64, 64, 128, warps=4, stages=4),
    Tiles(64, 64, 64, warps=4, stages=4, described=True),
    Tiles(64, 64, 128, warps=4, stages=4, described=True),
)
CASES = {
    "5 squares of 2048": (5, 2048, 2048, False, CANDIDATES),
    "3 of 2048 x 11008": (3, 2048, 11008, True, CANDIDATES),
    "2 squares of 256": (2, 256, 256, False, SMALL_CANDIDATES),
    "2 of 256 x 2048": (2, 256, 2048, False, SMALL_CANDIDATES),
}


class Case:
    """One product. `turned`: it is X X^T of a matrix that lies as its transpose; otherwise squares have a matrix
    added."""

    def __init__(self, batch: int, n: int, k: int, turned: bool, device: torch.device) -> None:
        x = torch.randn(batch, k if turned else n, n if turned else k, device=device).half() / 32
        self.x = x.mT if turned else x
        self.added: torch.Tensor | None = None
        if n == k:  # the square of a symmetric matrix
            self.x = (x + x.mT).contiguous()
            self.added = self.x
        self.result = torch.empty(batch, n, n, dtype=x.dtype, device=device)
        self.flop = 2 * batch * n * n * k

    def by_torch(self) -> torch.Tensor:
        if self.added is None:
            return torch.bmm(self.x, self.x.mT)
        return torch.baddbmm(self.added, self.x, self.x, beta=-4.0, alpha=2.0)

    def by_kernel(self, tiles: Tiles) -> torch.Tensor:
        from ds_slide.kernels.offload.symmetric_product import symmetric_product_

        if self.added is None:
            symmetric_product_(self.result, self.x, self.x, tiles)
        else:
            symmetric_product_(self.result, self.x, self.x, tiles, alpha=2.0, beta=-4.0, added=self.added)
        return self.result

    def error(self, found: torch.Tensor) -> float:
        """The largest distance of the first matrix from fp64, over the largest element."""
        x = self.x[0].double()
        exact = x @ x.mT if self.added is None else 2 * x @ x - 4 * x
        return float((found[0].double() - exact).abs().max() / exact.abs().max())


def print_rates(clock: Clock) -> dict[str, dict[str, float | None]]:
    """Print a line for each case and candidate. Return TFLOP/s by the same names."""
    from triton.runtime.errors import OutOfResources

    def first(case: Case, tiles: Tiles) -> str | None:
        try:
            case.by_kernel(tiles)
        except OutOfResources as error:
            return str(error)
        return None

    cases = {name: (Case(*sizes, clock.device), tiles) for name, (*sizes, tiles) in CASES.items()}
    found: dict[str, dict[str, float | None]] = {}
    with ThreadPoolExecutor(12) as pool:  # Triton compiles each for seconds
        refused = {
            (name, each): pool.submit(first, case, each) for name, (case, tiles) in cases.items() for each in tiles
        }
    for name, (case, tiles) in cases.items():
        reasons = {each: refused[name, each].result() for each in tiles}
        works = {repr(each): partial(case.by_kernel, each) for each in tiles if reasons[each] is None}
        times = clock.in_turns({"torch": case.by_torch, **works}, {}, rounds=10)
        rates: dict[str, float | None] = {key: case.flop / each.median / 1e9 for key, each in times.items()}
        print(f"{name}: torch {rates['torch']:.0f} TFLOP/s, error {case.error(case.by_torch()):.1e}", flush=True)
        for each in tiles:
            own = "*" if each in TILES.values() else " "
            if reasons[each] is not None:
                rates[repr(each)] = None
                print(f" {own} {each}: does not run: {reasons[each]}", flush=True)
                continue
            result = case.by_kernel(each)
            exact = "symmetric" if torch.equal(result, result.mT) else "NOT SYMMETRIC"
            shown = f"{rates[repr(each)]:.0f} TFLOP/s, {times[repr(each)].median * 1e3:.0f} us"
            print(f" {own} {each}: {shown}, {exact}, error {case.error(result):.1e}", flush=True)
        found[name] = rates
    return found
