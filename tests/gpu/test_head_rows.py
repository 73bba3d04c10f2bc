"""A head whose rows pass through the GPU: the same bits whatever the timing, near those of a head on the GPU, and no
wait for the device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

STEPS = 10
HOST: dict[str, Any] = {"window": 2, "gpu_states": 0}
VARIANTS: dict[str, dict[str, Any]] = {
    "delays": {"window": 3, "gpu_states": 0, "debug": {"lane_delay_ms": 3.0, "seed": 1}},
    "states on the GPU": {"gpu_states": "auto"},
    "all on SSD": {"gpu_states": 0, "host_memory": 0, "debug": {"lane_delay_ms": 2.0, "seed": 4}},
}
# (clipping, accumulation, kernels): held, updated as it arrives, added up.
SCHEDULES = {
    "clip": (1.0, 1, "auto"),
    "immediate": (0.0, 1, "auto"),
    "accumulation": (1.0, 2, "auto"),
    "logits": (0.0, 1, "off"),
}


def scenario(name: str, schedule: str, slide: dict[str, Any]) -> dict[str, Any]:
    clip, accumulation, kernels = SCHEDULES[schedule]
    return {
        "name": f"{name}, {schedule}",
        "model": "untied",
        "steps": STEPS,
        "clip": clip,
        "grad_accum": accumulation,
        "exact": True,
        "ssd": "SSD" in name,
        "slide": {"kernels": kernels, **slide},
        "record": ["states"],
    }


@pytest.fixture(scope="module")
def recorded(run_scenarios: Callable[..., Any]) -> Callable[[str], Any]:
    """What the scenarios of a schedule recorded; a process for each."""

    @functools.cache
    def of(schedule: str) -> Any:
        named = {"reference": HOST, **VARIANTS}
        streamed = [scenario(name, schedule, {**slide, "stream_head": True}) for name, slide in named.items()]
        syncs = {**scenario("syncs", schedule, {**HOST, "stream_head": True}), "record": ["syncs"], "exact": False}
        return run_scenarios([*streamed, scenario("resident", schedule, HOST), syncs])

    return of


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_same_bits(variant: str, schedule: str, recorded: Any) -> None:
    results = recorded(schedule)
    reference, other = results[f"reference, {schedule}"], results[f"{variant}, {schedule}"]
    assert other["losses"] == reference["losses"]
    assert other["states"] == reference["states"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_losses_are_those_of_a_head_on_the_gpu(schedule: str, recorded: Any) -> None:
    results = recorded(schedule)
    found, expected = (results[f"{name}, {schedule}"]["losses"] for name in ("reference", "resident"))
    assert found == pytest.approx(expected, rel=1e-2)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)


@pytest.mark.needs_cuda
@pytest.mark.parametrize("schedule", ["immediate", "logits"])
def test_forward_and_backward_never_wait_for_the_gpu(schedule: str, recorded: Any) -> None:
    result = recorded(schedule)[f"syncs, {schedule}"]
    assert result["sees_item"] and result["sees_synchronize"], "the probe is blind"
    assert result["syncs"] == [], "\n\n".join("\n".join(place) for place in result["syncs"])
