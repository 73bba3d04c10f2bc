"""Blocks that replay CUDA graphs have the bits of blocks that run as they are written, and wait for the GPU nowhere.

On the processor their operators run again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

BLOCKS = {"llama": 8, "gpt2": 6}
STEPS = 14
"""The eighth records."""
RESIDENT = {"gpu_states": "1GiB", "gpu_memory": "16GiB"}
CASES: dict[str, dict[str, Any]] = {
    "clipping": {"clip": 1.0},
    "no clipping": {"clip": 0.0},
    "accumulation": {"clip": 1.0, "grad_accum": 3},
    "own modules": {"clip": 1.0, "slide": {"kernels": "off"}},
    "gpt2": {"clip": 1.0, "model": "gpt2"},
}


def scenario(name: str, wanted: bool) -> dict[str, Any]:
    case = CASES[name]
    slide = {**RESIDENT, **case.get("slide", {}), "captured_blocks": wanted}
    return {
        "name": f"{name}, {wanted}", "steps": STEPS, "exact": True, "record": ["states"], **case, "slide": slide
    }  # fmt: skip


@pytest.fixture(scope="module")
def recorded(run_scenarios: Callable[..., Any]) -> Any:
    syncs = {"name": "syncs", "steps": 24, "clip": 0.0, "slide": {**RESIDENT, "captured_blocks": True}}
    scenarios = [scenario(name, wanted) for name in CASES for wanted in (False, True)]
    return run_scenarios([*scenarios, {**syncs, "record": ["syncs"]}])


@pytest.mark.parametrize("name", CASES)
def test_same_bits(name: str, recorded: Any) -> None:
    written, replayed = recorded[f"{name}, False"], recorded[f"{name}, True"]
    assert written["activations"]["replayed"] == 0
    assert replayed["activations"]["replayed"] == BLOCKS[CASES[name].get("model", "llama")]
    for what in ("losses", "grad_norms", "states"):
        assert replayed[what] == written[what]


@pytest.mark.needs_cuda
def test_replays_do_not_wait_for_the_gpu(recorded: Any) -> None:
    result = recorded["syncs"]
    assert result["activations"]["replayed"] == BLOCKS["llama"]
    assert result["syncs"] == []
