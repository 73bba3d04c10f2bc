"""Window, timing of the lanes and place of the states change no bit of weights and states on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

STEPS = 10
REFERENCE: dict[str, Any] = {"window": 2, "gpu_states": 0}
VARIANTS: dict[str, dict[str, Any]] = {
    "the same again": REFERENCE,
    "window 4": {"window": 4, "gpu_states": 0},
    "delays": {"window": 3, "gpu_states": 0, "debug": {"lane_delay_ms": 3.0, "seed": 1}},
    "other delays": {"window": 2, "gpu_states": 0, "debug": {"lane_delay_ms": 3.0, "seed": 2}},
    "states on the GPU": {"window": 2, "gpu_states": "auto"},
    "all on SSD": {"window": 3, "gpu_states": 0, "host_memory": 0},
    "all on SSD, delays, few buffers": {
        "window": 2,
        "gpu_states": 0,
        "host_memory": 0,
        "ssd_buffers": 2,
        "weight_buffers": 3,
        "debug": {"lane_delay_ms": 3.0, "seed": 5},
    },
    "half on SSD": {"window": 2, "gpu_states": 0, "host_memory": "40MB", "io_backend": "libaio"},
}
CLIPS = (0.0, 1.0)


@pytest.fixture(scope="module")
def recorded(run_scenarios: Callable[..., Any]) -> Any:
    common = {"steps": STEPS, "exact": True, "record": ["states"]}
    return run_scenarios(
        [
            {**common, "name": f"{name}, clip {clip:g}", "clip": clip, "slide": slide, "ssd": "SSD" in name}
            for clip in CLIPS
            for name, slide in {"reference": REFERENCE, **VARIANTS}.items()
        ]
    )


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_same_bits(variant: str, clip: float, recorded: Any) -> None:
    # "the same again" is the control: if it fails, the model's own kernels are not deterministic here.
    reference, other = recorded[f"reference, clip {clip:g}"], recorded[f"{variant}, clip {clip:g}"]
    assert other["losses"] == reference["losses"]
    assert other["states"] == reference["states"]


def test_clipping_changes_the_bits(recorded: Any) -> None:
    # The digests must be able to tell two runs apart.
    with_clipping, without = recorded["reference, clip 1"]["states"], recorded["reference, clip 0"]["states"]
    assert all(with_clipping[name] != without[name] for name in without)
