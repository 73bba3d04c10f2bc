"""The hot path on CUDA: the model's threads never wait for the GPU, and once warm nothing grows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

STEPS = 26
HOST_STATES = {"gpu_states": 0}
SCENARIOS: list[dict[str, Any]] = [
    {"name": "syncs", "steps": 8, "clip": 0.0, "slide": HOST_STATES, "record": ["syncs"]},
    # Kernels in the model make its activations, from lines of the package.
    {
        "name": "allocations",
        "steps": 8,
        "clip": 0.0,
        "slide": {**HOST_STATES, "kernels": "off"},
        "record": ["allocations"],
    },
    {"name": "memory, clip 0", "steps": STEPS, "clip": 0.0, "slide": HOST_STATES, "record": ["memory"]},
    {"name": "memory, clip 1", "steps": STEPS, "clip": 1.0, "record": ["memory"]},
    {"name": "memory, clip 1, accumulate 2", "steps": STEPS, "clip": 1.0, "grad_accum": 2, "record": ["memory"]},
]
WARM = 13  # spare memory is shared out after steps 3 and 6, and recordings of blocks are on trial until step 11
# Allocator noise was below 4 MiB; one set of gradients kept per step (12 MB) would be 170 MB over these steps.
HOST_GROWTH = 32 << 20


@pytest.fixture(scope="module")
def recorded(run_scenarios: Callable[..., Any]) -> Any:
    return run_scenarios(SCENARIOS)


@pytest.mark.needs_cuda
def test_forward_and_backward_never_wait_for_the_gpu(recorded: Any) -> None:
    # Only `step()` and the script's own reading of the loss may wait; both lie outside the watched region.
    result = recorded["syncs"]
    assert result["sees_item"] and result["sees_synchronize"], "the probe is blind"
    places = result["syncs"]
    assert places == [], "\n\n".join("\n".join(place) for place in places)


@pytest.mark.needs_cuda
def test_a_warm_engine_allocates_nothing(recorded: Any) -> None:
    allocations = recorded["allocations"]["allocations"]
    assert allocations["all"] > 100, "the model's own activations should have been seen"
    assert allocations["own"] == []


@pytest.mark.parametrize("name", [scenario["name"] for scenario in SCENARIOS if "memory" in scenario["record"]])
def test_memory_does_not_grow(name: str, recorded: Any) -> None:
    samples = recorded[name]["memory"]
    assert len(samples) == STEPS
    assert any(key.startswith("engine_") for key in samples[-1])
    courses = {key: [sample[key] for sample in samples[WARM:]] for key in samples[-1]}
    resident = courses.pop("host_resident")
    assert resident[-1] - resident[0] < HOST_GROWTH
    assert {key: course for key, course in courses.items() if len(set(course)) > 1} == {}
