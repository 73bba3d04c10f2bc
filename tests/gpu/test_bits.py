"""Window, timing of the lanes and place of the states change no bit of weights and states on CUDA,
with the model's own modules and with the kernels in their place."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

STEPS = 10
REFERENCE: dict[str, Any] = {"window": 2, "gpu_states": 0}
LIMITED: dict[str, Any] = {**REFERENCE, "gpu_memory": "8GiB"}
"""With spare memory to share out on the processor, too."""
VARIANTS: dict[str, dict[str, Any]] = {
    "the same again": REFERENCE,
    "window 4": {"window": 4, "gpu_states": 0},
    "delays": {"window": 3, "gpu_states": 0, "debug": {"lane_delay_ms": 3.0, "seed": 1}},
    "other delays": {"window": 2, "gpu_states": 0, "debug": {"lane_delay_ms": 3.0, "seed": 2}},
    "states on the GPU": {"window": 2, "gpu_states": "auto"},
    "checkpointing as written": {"window": 2, "gpu_states": 0, "activations": "as_written"},
    "recomputed": LIMITED,
    "half kept": LIMITED,
    "mixed": LIMITED,
    "mixed, delays": {**LIMITED, "window": 3, "debug": {"lane_delay_ms": 3.0, "seed": 6}},
    "inputs in host memory": LIMITED,
    "inputs in host memory, delays": {**LIMITED, "window": 3, "debug": {"lane_delay_ms": 3.0, "seed": 4}},
    "inputs on SSD": {**LIMITED, "host_memory": 0},
    "moves": {"window": 3, "gpu_states": 0},
    "moves, delays": {"window": 2, "gpu_states": 0, "debug": {"lane_delay_ms": 3.0, "seed": 3}},
    "moves, from SSD": {"window": 3, "gpu_states": 0, "host_memory": 0},
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
ON_HOST = "weights from host memory"
MOVED_INPUTS = 6
"""Of the worker's 8 blocks."""
KEPT = {"inputs": -1.0, "recomputed": 0.0, "half kept": 0.5}
"""The part of what blocks could keep, by a word of the variant's name."""
WITH_KERNELS = (
    "the same again",
    "window 4",
    "states on the GPU",
    "recomputed",
    "half kept",
    "mixed",
    "inputs in host memory",
    "moves",
    "all on SSD",
)
KERNELS_CLIP = 1.0
# Of the worker's Llama: two norms a block and the last one.
REPLACED = {"loss": 1, "norm": 17, "rope": 8, "mlp": 8}


def scenario(name: str, clip: float, kernels: str) -> dict[str, Any]:
    slide = {"kernels": kernels, **(REFERENCE if name == "reference" else VARIANTS[name])}
    named = {
        "name": f"{name}, clip {clip:g}",
        "clip": clip,
        "slide": slide,
        "ssd": "SSD" in name,
        "moves": "moves" in name,
        "mixed": "mixed" in name,
        "kept": next((part for word, part in KEPT.items() if word in name), None),
    }
    return {"steps": STEPS, "exact": True, "record": ["states"], **named}


@pytest.fixture(scope="module")
def recorded(run_scenarios: Callable[..., Any]) -> Callable[[float], Any]:
    """What all variants with that clipping recorded, in a process for each clipping."""

    @cache
    def of(clip: float) -> Any:
        named = [scenario(name, clip, "off") for name in ("reference", *VARIANTS)]
        if not clip:
            its = {"name": ON_HOST, "on_host": True, "record": ["states", "placement"]}
            named.append({**scenario("reference", clip, "off"), **its})
        return run_scenarios(named)

    return of


@pytest.fixture(scope="module")
def recorded_with_kernels(run_scenarios: Callable[..., Any]) -> Any:
    return run_scenarios([scenario(name, KERNELS_CLIP, "auto") for name in ("reference", *WITH_KERNELS)])


def assert_handled(variant: str, activations: dict[str, int]) -> None:
    """What the variant's name says has become of the blocks' activations."""
    checkpointed = activations["checkpointed"]
    assert activations["move"] == (MOVED_INPUTS if "inputs" in variant else 0)
    assert bool(activations.get("moved_to_ssd_bytes")) == (variant == "inputs on SSD")
    if "mixed" in variant:
        assert activations["mix"] == checkpointed > 0
    if variant == "recomputed":
        assert activations["recompute"] == checkpointed > 0
    if variant == "half kept":
        assert max(activations["keep"], activations["recompute"]) < checkpointed


def assert_same_bits(variant: str, clip: float, recorded: Any, kernels: dict[str, int]) -> None:
    # "the same again" is the control: if it fails, the model's own kernels are not deterministic here.
    reference, other = recorded[f"reference, clip {clip:g}"], recorded[f"{variant}, clip {clip:g}"]
    assert reference["kernels"] == other["kernels"] == kernels
    assert_handled(variant, other["activations"])
    assert other["losses"] == reference["losses"]
    assert other["states"] == reference["states"]


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_same_bits(variant: str, clip: float, recorded: Any) -> None:
    assert_same_bits(variant, clip, recorded(clip), kernels={})


@pytest.mark.needs_cuda
@pytest.mark.parametrize("variant", WITH_KERNELS)
def test_same_bits_with_kernels(variant: str, recorded_with_kernels: Any) -> None:
    assert_same_bits(variant, KERNELS_CLIP, recorded_with_kernels, kernels=REPLACED)


@pytest.mark.needs_cuda
def test_weights_in_host_memory_start_from_there(recorded: Any) -> None:
    reference, other = (recorded(0.0)[name] for name in ("reference, clip 0", ON_HOST))
    assert other["states"] == reference["states"]
    placement = other["placement"]
    assert placement["devices"] == ["cuda"]
    # Stock's way, all weights on the GPU before the plan takes what it needs, would be gpu_bytes and weight_bytes.
    assert other["gpu_peak_of_start"] < placement["gpu_bytes"] + placement["weight_bytes"] // 4


def test_clipping_changes_the_bits(recorded: Any) -> None:
    # The digests must be able to tell two runs apart.
    with_clipping, without = (recorded(clip)[f"reference, clip {clip:g}"]["states"] for clip in (1.0, 0.0))
    assert all(with_clipping[name] != without[name] for name in without)
