"""Gradients that are added up on the GPU have the bits of a sum on the host, on CUDA.

python3 -m pytest tests/gpu/test_gpu_sums.py -m gpu
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

DELAYS = {"lane_delay_ms": 3.0, "seed": 7}
VARIANTS: dict[str, dict[str, Any]] = {
    "clipping": {"clip": 1.0},
    "no clipping, delays": {"clip": 0.0, "slide": {"window": 2, "debug": DELAYS}},
    "all on SSD": {"clip": 1.0, "ssd": True, "slide": {"window": 3, "host_memory": 0}},
    "fp16": {"clip": 1.0, "precision": "fp16", "overflow_at": 5},
    "fp32 beside bf16": {"clip": 1.0, "precision": "autocast"},
    "a head of its own": {"clip": 1.0, "model": "untied", "slide": {"stream_head": True}},
}


def scenario(name: str, *, sums: bool) -> dict[str, Any]:
    given = VARIANTS[name]
    slide = {"window": 2, "gpu_states": 0, "kernels": "off", **given.get("slide", {})}
    own = {"name": f"{name}, {sums}", "sums": sums, "slide": slide}
    return {"steps": 8, "grad_accum": 4, "exact": True, "record": ["states"], **given, **own}


@pytest.fixture(scope="module")
def recorded(run_scenarios: Callable[..., Any]) -> Any:
    return run_scenarios([scenario(name, sums=sums) for name in VARIANTS for sums in (False, True)])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.needs_cuda if name == "fp16" else ()) for name in VARIANTS]
)
def test_same_bits(name: str, recorded: Any) -> None:
    without, with_sums = recorded[f"{name}, False"], recorded[f"{name}, True"]
    assert with_sums["losses"] == without["losses"]
    assert with_sums["states"] == without["states"]
