"""Muon on CUDA beside DeepSpeed's own and plain torch; optimizers of the script beside plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ds_slide.optim.muon import Method
from ds_slide.optim.muon_batch import has_kernel, orthogonal_together
from ds_slide.optim.muon_groups import Shape
from ds_slide.runtime.core.device import Device
from ds_slide.runtime.updates.iterations import Iterations

STEPS = 12
WARM = 13  # recordings of blocks are on trial until step 11
HOST_STATES = {"gpu_states": 0, "kernels": "off"}
SOME, ALL = 30_000_000, 2_000_000_000
"""Bytes of the GPU for states: of what is outside the blocks and three or four of eight blocks; of all units."""
BY_UPDATE = {**HOST_STATES, "muon_norm": "update"}
CLIPS = (0.0, 1.0)
MUON: dict[str, Any] = {"optimizer": "Muon", "steps": STEPS, "slide": HOST_STATES}
CLIENTS = ("Adafactor", "NAdam")
SAMPLED = {"record": ["samples"]}
PLAIN = [{"name": f"clip {clip:g}", "clip": clip} for clip in CLIPS]
# Beside DeepSpeed's own, whose momentum is in bf16. It clips by the norm of the update, and so does the key.
STOCK = [{"name": "clip 0", "clip": 0.0}, {"name": "clip 1", "clip": 1.0, "slide": BY_UPDATE}]
REFERENCE = {"window": 2, "muon_kernel": True, **HOST_STATES}
VARIANTS: dict[str, dict[str, Any]] = {
    "the same again": {},
    "window 4": {"window": 4},
    "delays": {"window": 3, "debug": {"lane_delay_ms": 3.0, "seed": 1}},
    "some states on the GPU": {"gpu_states": SOME, "debug": {"lane_delay_ms": 3.0, "seed": 2}},
    "all states on the GPU": {"gpu_states": ALL},
    "all states on the GPU, as written": {"gpu_states": ALL, "captured_blocks": False},
    "as written": {"captured_blocks": False},
    "moves": {"window": 3},
    "moves, delays": {"debug": {"lane_delay_ms": 3.0, "seed": 3}},
    "held gradients": {"defer_updates": True},
}
EXACT: dict[str, Any] = {**MUON, "steps": 6, "exact": True, "record": ["states", "recorded_updates"]}
LARGE: list[Shape] = [(1, 1024, 1024), (1, 2816, 1024), (2, 1024, 2816)]
"""Taken by descriptors."""
COMPARED = [*((name, "fp32") for name in VARIANTS), ("delays", "bf16"), ("moves, delays", "bf16")]
PLACES = {"host": HOST_STATES, "some on the GPU": {**HOST_STATES, "gpu_states": SOME}}
HOT: list[dict[str, Any]] = [
    {**MUON, "name": f"syncs, clip {clip:g}, {place}", "steps": 6, "clip": clip, "record": ["syncs"], "slide": slide}
    for clip in CLIPS
    for place, slide in PLACES.items()
]
MEMORY: list[dict[str, Any]] = [
    {**MUON, "name": f"memory, {place}", "steps": WARM + 6, "clip": 1.0, "record": ["memory"], "slide": slide}
    for place, slide in PLACES.items()
]
LOSS_TOLERANCE = 1.5e-3
"""Relative. On the processor 1.5e-4 at the most; clipping alone moves a loss by 2.5e-3."""
WEIGHT_TOLERANCE = 0.3
"""Of the way that a parameter has gone. A weight that is flipped in bf16 changes all that follows: 0.09 on the
processor, 0.13 beside stock, whose momentum is in bf16."""


def exact(name: str, bits: str) -> dict[str, Any]:
    moves = "moves" in name
    return {
        **EXACT,
        "name": f"{name}, {bits}",
        "moves": moves,
        "slide": {**REFERENCE, **VARIANTS.get(name, {}), "state_dtype": bits},
    }


@pytest.fixture(scope="module")
def slide(run_scenarios: Callable[..., Any]) -> Any:
    beside = [{**MUON, **case, **SAMPLED} for case in PLAIN]
    by_update = {**MUON, **STOCK[1], **SAMPLED, "name": "by update"}
    short = {**MUON, **SAMPLED, "name": "short", "clip": 1.0, "slide": {**HOST_STATES, "state_dtype": "bf16"}}
    clients = [{**MUON, **SAMPLED, "name": each, "optimizer": each, "clip": 1.0} for each in CLIENTS]
    return run_scenarios([*beside, by_update, short, *clients, *HOT, *MEMORY])


@pytest.fixture(scope="module")
def placed(run_scenarios: Callable[..., Any]) -> Any:
    """The same training with its states in other places."""
    return run_scenarios([exact(*each) for each in [("reference", "fp32"), ("reference", "bf16"), *COMPARED]])


@pytest.fixture(scope="module")
def others(run_scenarios: Callable[..., Any]) -> Any:
    """Plain torch, and stock."""
    plain = [{**MUON, **case, **SAMPLED, "system": "plain", "name": f"plain, {case['name']}"} for case in PLAIN]
    plain += [{**plain[1], "name": each, "optimizer": each} for each in CLIENTS]
    stock = [{**MUON, **case, **SAMPLED, "system": "stock", "name": f"stock, {case['name']}"} for case in STOCK]
    return run_scenarios([*plain, *stock])


def assert_near(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Losses, and elements of all masters."""
    assert found["losses"][0] == pytest.approx(expected["losses"][0], rel=1e-4)
    assert found["losses"] == pytest.approx(expected["losses"], rel=LOSS_TOLERANCE)
    assert expected["losses"][-1] < 0.97 * expected["losses"][0]  # it learns, by more than the tolerance
    assert found["samples"].keys() == expected["samples"].keys()
    for name, values in expected["samples"].items():
        way = math.dist(values, expected["samples_before"][name])
        assert math.dist(found["samples"][name], values) < WEIGHT_TOLERANCE * way, name


@pytest.mark.parametrize("clip", CLIPS)
def test_muon_follows_plain_torch(clip: float, slide: Any, others: Any) -> None:
    found, expected = slide[f"clip {clip:g}"], others[f"plain, clip {clip:g}"]
    assert_near(found, expected)
    if clip:
        assert found["grad_norms"] == pytest.approx(expected["grad_norms"], rel=0.05)
        assert max(expected["grad_norms"]) > clip, "nothing was clipped"


@pytest.mark.parametrize(("name", "case"), [("clip 0", "clip 0"), ("by update", "clip 1")])
def test_muon_follows_deepspeed(name: str, case: str, slide: Any, others: Any) -> None:
    found, expected = slide[name], others[f"stock, {case}"]
    assert_near(found, expected)
    if name == "by update":
        assert found["grad_norms"] == pytest.approx(expected["grad_norms"], rel=0.02)
        assert min(found["grad_norms"]) > 20  # of an update, not of a gradient


def test_a_momentum_in_bf16_trains_alike(slide: Any) -> None:
    short, exact = slide["short"]["losses"], slide["clip 1"]["losses"]
    assert short != exact
    assert short == pytest.approx(exact, rel=LOSS_TOLERANCE)


@pytest.mark.parametrize(("variant", "bits"), COMPARED)
def test_placement_changes_no_bit(variant: str, bits: str, placed: Any) -> None:
    reference, found = placed[f"reference, {bits}"], placed[f"{variant}, {bits}"]
    assert set(reference["states"]) == {"weight", "momentum_buffer", "exp_avg", "exp_avg_sq", "low_precision_weight"}
    assert found["losses"] == reference["losses"]
    assert found["states"] == reference["states"]


@pytest.mark.needs_cuda
@pytest.mark.skipif(not (torch.cuda.is_available() and has_kernel(torch.device("cuda", 0))), reason="no such kernel")
def test_updates_on_the_gpu_are_recorded(placed: Any) -> None:
    found = {name: placed[f"{name}, fp32"]["recorded_updates"] for name in ("reference", *VARIANTS)}
    assert found["all states on the GPU"]["together"] > 0
    assert found["reference"]["together"] == 0 and found["reference"]["streamed"] > 0
    assert not any(found["all states on the GPU, as written"].values())


@pytest.mark.needs_cuda
@pytest.mark.skipif(not (torch.cuda.is_available() and has_kernel(torch.device("cuda", 0))), reason="no such kernel")
@pytest.mark.parametrize(("method", "dtype"), [("gram", torch.float16), ("standard", torch.bfloat16)])
def test_recordings_of_large_matrices_change_no_bit(method: Method, dtype: torch.dtype) -> None:
    device = torch.device("cuda", 0)
    own = Iterations(Device(device))
    for _ in range(4):
        given = [torch.randn(math.prod(shape), device=device) for shape in LARGE]
        found = [each.clone() for each in own.orthogonal(LARGE, iter(given), method, dtype)]
        for shape, update, each in zip(LARGE, given, found, strict=True):
            [alone] = orthogonal_together([shape], iter([update]), method, dtype, device)
            assert torch.equal(each, alone)
    assert [each.is_recorded for each in own.batches] == [True]
    own.close()


@pytest.mark.needs_cuda
@pytest.mark.parametrize("name", [each["name"] for each in HOT])
def test_forward_and_backward_never_wait_for_the_gpu(name: str, slide: Any) -> None:
    result = slide[name]
    assert result["sees_item"] and result["sees_synchronize"], "the probe is blind"
    assert result["syncs"] == [], "\n\n".join("\n".join(place) for place in result["syncs"])


@pytest.mark.parametrize("place", PLACES)
def test_memory_does_not_grow(place: str, slide: Any) -> None:
    samples = slide[f"memory, {place}"]["memory"]
    courses = {key: {sample[key] for sample in samples[WARM:]} for key in samples[-1] if key != "host_resident"}
    assert any(key.startswith("engine_") for key in courses)
    assert {key: course for key, course in courses.items() if len(course) > 1} == {}


@pytest.mark.parametrize("name", CLIENTS)
def test_the_script_s_optimizer_follows_plain_torch(name: str, slide: Any, others: Any) -> None:
    assert_near(slide[name], others[name])
