"""Blocks that replay CUDA graphs have the bits of blocks that run as they are written, and wait for the GPU nowhere.

On the processor their operators run again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

BLOCKS = {"llama": 8, "gpt2": 6}
STEPS = 14
"""The eighth records."""
RESIDENT = {"gpu_states": "1GiB", "gpu_memory": "16GiB"}
STREAMED = {"gpu_states": 0, "window": 3}
LENGTHS = [32, 64, 48, 64]
CASES: dict[str, dict[str, Any]] = {
    "clipping": {"clip": 1.0},
    "no clipping": {"clip": 0.0},
    "accumulation": {"clip": 1.0, "grad_accum": 3},
    "own modules": {"clip": 1.0, "slide": {"kernels": "off"}},
    "gpt2": {"clip": 1.0, "model": "gpt2"},
    "lengths": {"clip": 1.0, "grad_accum": 2, "lengths": LENGTHS, "steps": 24},
    # All of these blocks are recomputed.
    "streamed": {"clip": 1.0, "grad_accum": 3, "slide": STREAMED},
    "streamed, no clipping": {"clip": 0.0, "slide": STREAMED},
    "streamed, lengths": {"clip": 1.0, "grad_accum": 2, "lengths": LENGTHS, "steps": 24, "slide": STREAMED},
}
SLACK = 4 * 2**20
"""Bytes that threads of lanes may allocate while a recording is made."""


def scenario(name: str, wanted: bool) -> dict[str, Any]:
    case = CASES[name]
    slide = {**RESIDENT, **case.get("slide", {}), "captured_blocks": wanted}
    own = {"name": f"{name}, {wanted}", "steps": STEPS, "exact": True, "record": ["states", "pools"]}
    return {**own, **case, "slide": slide}


@pytest.fixture(scope="module")
def recorded(run_scenarios: Callable[..., Any]) -> Callable[[str], Any]:
    """The result of a scenario. Blocks that stream train in another process than the others."""

    @functools.cache
    def of(streams: bool) -> Any:
        names = [name for name in CASES if name.startswith("streamed") == streams]
        scenarios = [scenario(name, wanted) for name in names for wanted in (False, True)]
        slide = {**RESIDENT, **(STREAMED if streams else {}), "captured_blocks": True}
        name = "streamed, syncs" if streams else "syncs"
        return run_scenarios(
            [*scenarios, {"name": name, "steps": 24, "clip": 0.0, "slide": slide, "record": ["syncs"]}]
        )

    return lambda name: of(name.startswith("streamed"))[name]


@pytest.mark.parametrize("name", CASES)
def test_same_bits(name: str, recorded: Callable[[str], Any]) -> None:
    written, replayed = recorded(f"{name}, False"), recorded(f"{name}, True")
    assert written["activations"]["replayed"] == 0
    assert replayed["activations"]["replayed"] == BLOCKS[CASES[name].get("model", "llama")]
    for what in ("losses", "grad_norms", "states"):
        assert replayed[what] == written[what]


def test_batches_of_all_lengths_are_replayed(recorded: Callable[[str], Any]) -> None:
    found = {name: recorded(f"{name}, True")["activations"]["recorded_shapes"] for name in CASES}
    assert found == {name: 3 if "lengths" in CASES[name] else 1 for name in CASES}


@pytest.mark.needs_cuda
@pytest.mark.parametrize("name", CASES)
def test_the_memory_of_recordings_is_counted(name: str, recorded: Callable[[str], Any]) -> None:
    """As torch's allocator has it."""
    pools = recorded(f"{name}, True")["pools"]
    assert pools["reserved"] > 0
    assert abs(pools["counted"] - pools["reserved"]) <= SLACK
    assert abs(pools["held"] - (pools["reserved"] - pools["allocated"])) <= SLACK


@pytest.mark.needs_cuda
def test_the_graphs_of_all_shapes_are_dropped(recorded: Callable[[str], Any]) -> None:
    """What stays is a workspace of cuBLAS, of up to 32 MiB."""
    one, three = (recorded(f"{name}, True")["pools"]["allocated"] for name in ("accumulation", "lengths"))
    assert three <= one + SLACK


@pytest.mark.needs_cuda
@pytest.mark.parametrize("name", ["syncs", "streamed, syncs"])
def test_replays_do_not_wait_for_the_gpu(name: str, recorded: Callable[[str], Any]) -> None:
    result = recorded(name)
    assert result["activations"]["replayed"] == BLOCKS["llama"]
    assert result["syncs"] == []
