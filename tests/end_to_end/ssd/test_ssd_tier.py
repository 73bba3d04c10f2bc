"""States on SSD: the same bits as in host memory, the bytes that the design allows, and nothing left behind."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_fp32_param
from harness import batches, differences, ds_config, engine_for, llama, on_ssd, states_of, train, trained

from ds_slide.plan.allocations import BLOCK_RING, CHUNK_BUFFERS, PIECES_RING
from ds_slide.runtime.ssd.ssd import _update_order
from ds_slide.store.ssd import files

# Of 4096 parameters each, so that a block of the small model has 11, as a real one has.
CHUNK_NUMEL = 4096
STEPS = 3

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_slide.plan.ssd_settings.CHUNK_NUMEL", CHUNK_NUMEL)


@pytest.fixture
def ssd_config(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """A config with the offload `sections`, both where none is named, on SSD."""

    def make(slide: dict[str, Any], *sections: str, **others: Any) -> dict[str, Any]:
        return on_ssd(ds_config(slide, **others), tmp_path, *sections)

    return make


@functools.cache
def in_memory(clip: float, accumulation: int) -> Any:
    """The result with everything in host memory."""
    return trained(llama(), ds_config({}, clip=clip, accumulation=accumulation), batches(STEPS * accumulation))


ALL = {"host_memory": 0}
HALF = {"host_memory": 2_000_000}
BACKENDS = ("io_uring", "libaio", "threads")
SCHEDULES = list(itertools.product((1.0, 0.0), (1, 3)))
"""(clipping, accumulation)"""
# Every pair of a place, a backend and a schedule, and each of them with delays in every lane and without.
CROSSED = {
    f"{name}, {backend}, clip {clip:g}, accumulation {accumulation}{', delays' if delayed else ''}": (
        place | {"io_backend": backend} | ({"debug": {"lane_delay_ms": 2.0, "seed": 3}} if delayed else {}),
        (clip, accumulation),
    )
    for (one, backend), (two, (clip, accumulation)) in itertools.product(enumerate(BACKENDS), enumerate(SCHEDULES))
    for name, place in [("all", ALL) if (one + two) % 2 else ("half", HALF)]
    for delayed in [bool((one + two // 2) % 2)]
}
FEWEST = ALL | {"ssd_buffers": 2, "weight_buffers": 2}
TIGHT = {
    f"{name}, clip {clip:g}, accumulation {accumulation}": (place, (clip, accumulation))
    for name, place in {
        "fewest buffers": FEWEST | {"io_backend": "threads"},
        "a slot for each block, delays": FEWEST | {"window": 9, "debug": {"lane_delay_ms": 2.0, "seed": 5}},
    }.items()
    for clip, accumulation in SCHEDULES[1:3]
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("place", "schedule"), (CROSSED | TIGHT).values(), ids=CROSSED | TIGHT)
def test_weights_and_moments_have_the_same_bits_as_in_memory(
    ssd_config: Callable[..., dict[str, Any]], place: dict[str, Any], schedule: tuple[float, int], tmp_path: Path
) -> None:
    clip, accumulation = schedule
    result = trained(llama(), ssd_config(place, clip=clip, accumulation=accumulation), batches(STEPS * accumulation))
    assert differences(result, in_memory(clip, accumulation)) == []
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("section", ["offload_param", "offload_optimizer"])
@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_only_the_device_that_says_nvme_moves(
    ssd_config: Callable[..., dict[str, Any]], section: str, clip: float
) -> None:
    with engine_for(llama(), ssd_config(ALL, section, clip=clip)) as engine:
        result = train(engine, batches(STEPS))
        result.states = states_of(engine.module)
        units = engine.optimizer.runtime.units
        assert any(unit.state.buffers["weight"].tier == "ssd" for unit in units) == (section == "offload_param")
        assert any(unit.state.buffers["exp_avg"].tier == "ssd" for unit in units) == (section == "offload_optimizer")
    assert differences(result, in_memory(clip, 1)) == []


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("clip", "accumulation", "sections", "window", "most"),
    [
        (1.0, 1, (), 3, 26),
        (0.0, 1, (), 3, 26),
        (1.0, 1, ("offload_optimizer",), 3, 20),
        (1.0, 3, (), 3, 26 + 2 * 4),
        (1.0, 3, ("offload_optimizer",), 3, 20),
        (1.0, 3, (), 9, 24),
        (0.0, 1, (), 9, 26),
    ],
)
def test_bytes_of_a_step(
    ssd_config: Callable[..., dict[str, Any]],
    clip: float,
    accumulation: int,
    sections: tuple[str, ...],
    window: int,
    most: int,
) -> None:
    """14 read and 12 written a parameter, 10 and 10 without the weights; each more micro-batch reads them twice, unless
    all blocks stay in their slots: then nothing is read for backward either. Whole pages add a little."""
    # Few buffers: what stays in them from step to step would not have to be read.
    slide = ALL | {"window": window, "ssd_buffers": 2, "weight_buffers": 4}
    settings = ssd_config(slide, *sections, clip=clip, accumulation=accumulation)
    with engine_for(llama(num_hidden_layers=6), settings) as engine:
        runtime = engine.optimizer.runtime

        def bytes_so_far() -> int:
            """With the updates and writes of all steps so far, which may run on under the next one."""
            for unit in runtime.units:
                with unit.state.settling():
                    unit.updated.synchronize()
            totals = runtime.parts.ssd.store.statistics()
            return int(totals["read_bytes"] + totals["written_bytes"])

        train(engine, batches(accumulation))
        before = bytes_so_far()
        for step in range(3):
            train(engine, batches(accumulation, seed=step))
            stats = engine.optimizer.slide_stats()["ssd"]
        parameters = sum(e.numel for unit in runtime.units for e in unit.layout.entries)
        per_parameter = (bytes_so_far() - before) / 3 / parameters
    assert 0.7 * most < per_parameter <= most * 1.05
    assert stats["read_bytes"] > 0 and stats["written_bytes"] > 0 and stats["written_tb_per_day"] > 0


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_statistics_of_the_buffers(ssd_config: Callable[..., dict[str, Any]], clip: float) -> None:
    """Each pool is an entry of the plan. With fewer buffers than there is to load, somebody waits for one. Their memory
    goes with the engine."""
    with engine_for(llama(), ssd_config(ALL | {"ssd_buffers": 2, "weight_buffers": 2}, clip=clip)) as engine:
        for _ in range(2):
            train(engine, batches(1))
        pools, parts = engine.optimizer.slide_stats()["pools"], engine.optimizer.runtime.parts
        planned = {each.what: each for each in parts.plan.allocations if each.what in pools}
        assert {what: (each["buffers"], each["bytes"]) for what, each in pools.items()} == {
            what: (each.count, each.nbytes) for what, each in planned.items()
        }
        chunks = pools[CHUNK_BUFFERS]
        assert (chunks["buffers"], chunks["leased_peak"]) == (2, 2) and chunks["waits"] > 0 < chunks["waited_s"]
        gradients = pools[PIECES_RING if clip else BLOCK_RING]
        assert (gradients["leased_peak"] > 0) != bool(clip) and gradients["free"] <= gradients["buffers"]
    gc.collect()  # updates that were dropped with a gradient, at the end
    assert {what: each["bytes"] for what, each in parts.pool_report().items()} == dict.fromkeys(pools, 0)


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_the_disk_goes_on_between_two_steps(ssd_config: Callable[..., dict[str, Any]], clip: float) -> None:
    """When a step's last update has ended, what the next step's first one needs is read before anybody asks."""
    with engine_for(llama(), ssd_config(ALL | {"ssd_buffers": 2}, clip=clip)) as engine:
        runtime = engine.optimizer.runtime
        chunks = runtime.parts.ssd.chunks
        order = _update_order(runtime.units, runtime.parts.ssd.units.optimizer, under_backward=not clip)
        assert len(order) > 4 * 2, "with a buffer for each nothing would have to be read again"
        train(engine, batches(2))
        for unit in runtime.units:
            unit.updated.synchronize()

        def is_there() -> bool:
            entry = chunks._entries.get(order[0])
            return entry is not None and not entry.loading

        with chunks._changed:
            assert chunks._changed.wait_for(is_there, timeout=60)


def test_states_can_be_read_and_written_between_steps(ssd_config: Callable[..., dict[str, Any]]) -> None:
    """The same calls on an engine in memory and on one on SSD leave the same bits."""

    def run(config: dict[str, Any]) -> Any:
        with engine_for(llama(), config) as engine:
            train(engine, batches(1))
            for parameter in engine.module.parameters():
                master = safe_get_full_fp32_param(parameter)
                safe_set_full_fp32_param(parameter, master * 1.25)
                # Not to the bit: a master that lies half way between two bf16 numbers is moved by one unit.
                assert torch.allclose(safe_get_full_fp32_param(parameter), master * 1.25, rtol=1e-6, atol=0)
                assert safe_get_full_optimizer_state(parameter, "exp_avg").shape == parameter.ds_shape
            with torch.no_grad():
                engine.eval()
                engine(**batches(1)[0])
                engine.train()
            result = train(engine, batches(2, seed=5))
            result.states = states_of(engine.module)
            return result

    assert differences(run(ssd_config(ALL)), run(ds_config({}))) == []


def test_several_directories_are_striped(
    ssd_config: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "mixed_bandwidth", lambda *_: 1.0)  # one disk that is busy may seem three of any speed
    disks = [tmp_path / "one", tmp_path / "two", tmp_path / "three"]
    config = ssd_config(ALL | {"nvme_path": [str(disk) for disk in disks]})
    with engine_for(llama(), config) as engine:
        result = train(engine, batches(STEPS))
        labels = engine.optimizer.slide_stats()["ssd"]["paths"]
        assert [label.startswith(str(disk)) for label, disk in zip(labels, disks, strict=True)] == [True] * 3
        result.states = states_of(engine.module)
    assert differences(result, in_memory(1.0, 1)) == []
    assert not any(list(disk.iterdir()) for disk in disks)


def test_an_engine_that_ends_with_updates_under_way_leaves_nothing(
    ssd_config: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    for clip in (1.0, 0.0):
        with engine_for(llama(), ssd_config(ALL | {"debug": {"lane_delay_ms": 5.0}}, clip=clip)) as engine:
            train(engine, batches(1))
        assert not list(tmp_path.iterdir())
