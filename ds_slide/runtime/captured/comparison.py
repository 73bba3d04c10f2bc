"""Compares replays with the operators as they are written.

A replay reads and writes fixed addresses, so a fault in who may use which memory would change numbers and raise
nothing. Each recording is therefore compared in its first replay, and once more when another shape has been recorded,
which shares its memory. The block then runs a second and a third time. A difference ends all recordings, and training
goes on with the numbers of the operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ds_slide.runtime.captured.checks import AllRandom
from ds_slide.runtime.core.device import is_shortage

COMPARISONS = 2
"""Comparisons of one recording."""
OF_ITSELF, OF_ALL = 1 / 8, 1 / 100
"""A tensor differs if the norm of the difference is more than these parts of its own norm and of the largest norm
beside it. Some kernels add in any order. The gradient of a bias of keys is nothing but rounding, so its own norm tells
nothing. A tensor that another block has overwritten differs by about its norm."""

T = TypeVar("T")


@contextmanager
def _in_free_memory() -> Iterator[None]:
    """End the context where it finds no memory: a comparison is worth none that has to be given up for it."""
    try:
        with _disable_current_modes():
            yield
    except RuntimeError as error:
        if not is_shortage(error):
            raise


def differ(found: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None]) -> bool:
    """Whether tensors of a replay differ from the operators' tensors by more than rounding. False where there is no
    memory to compare them. Waits for the device."""
    is_other = False
    with _in_free_memory():
        is_other = _differ(found, expected)
    return is_other


def _differ(found: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None]) -> bool:
    if [each is None for each in found] != [each is None for each in expected]:
        return True
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if a is not None and b is not None]
    norms = [float(b.detach().float().norm()) for _, b in pairs]
    largest = max(norms, default=0.0)
    for (a, b), norm in zip(pairs, norms, strict=True):
        if torch.equal(a, b):
            continue
        # Numbers that are not finite here come from the script, and are not compared.
        if b.isfinite().all() and not float((a.detach().float() - b.detach().float()).norm()) <= max(
            OF_ITSELF * norm, OF_ALL * largest
        ):
            return True
    return False


def run_beside(run: Callable[[], T], device: torch.device) -> T | None:
    """Run a block once more, and leave the random numbers as they are. None where the block draws some, or where there
    is no memory: then nothing can be compared."""
    random, result = AllRandom(device), None
    try:
        with _in_free_memory():
            result = run()
        return None if random.has_been_drawn_from() else result
    finally:
        random.put_back()
