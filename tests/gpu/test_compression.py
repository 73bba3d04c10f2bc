"""Compressed gradients on CUDA: timing and place of the states change no bit, the loss falls, and nothing waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.needs_cuda  # a scenario takes minutes on the processor

STEPS = 8
BF16 = "bf16 masters"
COMPRESSION = {"type": "lsp", "d": 128, "check_every": 3, "threshold": 0.1}
REFERENCE: dict[str, Any] = {"window": 2, "gpu_states": 0, "kernels": "off", "compression": COMPRESSION}
VARIANTS: dict[str, dict[str, Any]] = {
    "the same again": {},
    "delays": {"debug": {"lane_delay_ms": 3.0, "seed": 1}},
    "states that may move": {"window": 4, "gpu_states": "auto"},
    "two passes": {"update_passes": 2},
    "all on SSD": {"host_memory": 0},
}
ROUNDED: dict[str, Any] = {**REFERENCE, "compression": {**COMPRESSION, "master_dtype": "bf16"}}
WAITS = "waits"


def scenario(name: str, clip: float) -> dict[str, Any]:
    variant, _, masters = name.partition(", ")
    slide = {**(ROUNDED if masters else REFERENCE), **VARIANTS.get(variant, {})}
    named = {"name": f"{name}, clip {clip:g}", "clip": clip, "slide": slide, "ssd": "SSD" in name}
    return {"steps": STEPS, "exact": True, "grad_accum": 2, "record": ["masters"], **named}


@pytest.fixture(scope="module")
def recorded(run_scenarios: Callable[..., Any]) -> Any:
    named = [scenario(name, 1.0) for name in ("reference", *VARIANTS, f"reference, {BF16}", f"delays, {BF16}")]
    # After the first step, which fits the projectors, and waits for that.
    slide = {**REFERENCE, "compression": {**COMPRESSION, "check_every": 1000}}
    return run_scenarios([*named, {"name": WAITS, "steps": 8, "slide": slide, "record": ["syncs", "masters"]}])


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_same_bits(variant: str, recorded: Any) -> None:
    reference, other = recorded["reference, clip 1"], recorded[f"{variant}, clip 1"]
    assert other["losses"] == reference["losses"]
    assert other["masters"] == reference["masters"]


def test_rounded_masters_have_the_same_bits_again_and_learn(recorded: Any) -> None:
    exact, rounded = recorded["reference, clip 1"], recorded[f"reference, {BF16}, clip 1"]
    late, losses = recorded[f"delays, {BF16}, clip 1"], rounded["losses"]
    assert late["losses"] == losses != exact["losses"]
    assert late["masters"] == rounded["masters"]
    assert losses[-1] < losses[0] - 0.2


def test_forward_and_backward_do_not_wait_for_the_gpu(recorded: Any) -> None:
    result = recorded[WAITS]
    assert result["sees_item"] and result["sees_synchronize"], "the probe is blind"
    assert result["syncs"] == [], "\n\n".join("\n".join(place) for place in result["syncs"])


def test_the_loss_falls(recorded: Any) -> None:
    losses = recorded["reference, clip 1"]["losses"]
    assert losses[-1] < losses[0] - 0.2
