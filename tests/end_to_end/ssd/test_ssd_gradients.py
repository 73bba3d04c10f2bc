"""Held gradients on SSD: the bits, norms and values read of a run that has them in memory."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_grad, safe_set_full_grad
from harness import Result, batches, differences, ds_config, engine_for, llama, on_ssd, same_bits, states_of, train
from tight_memory import room_for_gradients_of

from ds_slide.errors import SlideError
from ds_slide.store.ssd.store import SsdStore

# Of 4096 parameters each: a block of the small model, 45 thousand, has 11, and 23 pages of gradient in bf16.
CHUNK_NUMEL = 4096
BLOCKS = 6
STEPS = 3
OUTER, EARLY, LATE = (
    "model.embed_tokens.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.5.self_attn.q_proj.weight",
)
FP16 = {"bf16": None, "fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}

pytestmark = pytest.mark.usefixtures("one_rank")
Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_slide.plan.ssd_settings.CHUNK_NUMEL", CHUNK_NUMEL)


def ssd_config(folder: Path, slide: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    return on_ssd(
        ds_config({"ssd_buffers": 4, "weight_buffers": 3, "gradient_buffers": 2, **(slide or {})}, **others), folder
    )


def plain(engine: Any, accumulation: int) -> Result:
    result = train(engine, batches(STEPS * accumulation))
    result.states = states_of(engine.module)
    return result


def in_both_places(
    folder: Path,
    program: Callable[..., Result],
    *,
    blocks: int = 0,
    slide: dict[str, Any] | None = None,
    accumulation: int = 1,
    **others: Any,
) -> tuple[Result, Result]:
    """What `program(engine, accumulation)` gives with all states in memory, and with the held gradients of all blocks
    but `blocks` on SSD."""
    with engine_for(llama(num_hidden_layers=BLOCKS), ds_config({}, accumulation=accumulation, **others)) as engine:
        in_memory = program(engine, accumulation)
    with room_for_gradients_of(blocks) as plan:
        config = ssd_config(folder, slide, accumulation=accumulation, **others)
        with engine_for(llama(num_hidden_layers=BLOCKS), config) as engine:
            assert len(plan().placement.gradients_on_ssd) == BLOCKS - blocks
            units = [unit for unit in engine.optimizer.runtime.units if unit.state.buffers["gradient"].tier == "ssd"]
            assert [unit.order for unit in units] == sorted(plan().placement.gradients_on_ssd)
            moved = program(engine, accumulation)
            memory = engine.optimizer.runtime.parts.memory_report
            assert memory["host_bytes"] == plan().host_bytes
            assert memory["ssd_gradient_units"] == BLOCKS - blocks
    assert not list(folder.iterdir())
    return in_memory, moved


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="clipping"),
        pytest.param({"accumulation": 3, "slide": {"debug": {"lane_delay_ms": 2.0, "seed": 3}}}, id="sums, delays"),
        pytest.param({"blocks": 2, "slide": {"debug": {"lane_delay_ms": 2.0, "seed": 5}}}, id="some, delays"),
        pytest.param({"accumulation": 3, "blocks": 2, "clip": 0.0}, id="sums without clipping"),
        pytest.param({"accumulation": 2, **FP32_SUMS}, id="sums in fp32"),
    ],
)
def test_the_bits_are_those_of_gradients_in_memory(tmp_path: Path, settings: dict[str, Any]) -> None:
    in_memory, moved = in_both_places(tmp_path, plain, **settings)
    assert differences(in_memory, moved) == []
    assert in_memory.norms == moved.norms


@pytest.mark.parametrize("accumulation", [1, 2])
def test_steps_that_overflow_are_skipped_alike(
    tmp_path: Path, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)  # slow on a CPU, but it works
    skipped = []

    def program(engine: Any, accumulation: int) -> Result:
        result = plain(engine, accumulation)
        skipped.append(engine.skipped_steps)
        return result

    in_memory, moved = in_both_places(tmp_path, program, accumulation=accumulation, **FP16)
    assert 0 < skipped[0] == skipped[1] < STEPS
    assert differences(in_memory, moved) == []
    assert in_memory.norms[skipped[0] :] == moved.norms[skipped[0] :]


def test_gradients_can_be_read_and_written(tmp_path: Path) -> None:
    def program(engine: Any, accumulation: int) -> Result:
        parameters, data, result = dict(engine.module.named_parameters()), batches(2 * accumulation), Result()

        def read(moment: str) -> None:
            result.states[moment] = {
                name: safe_get_full_grad(parameters[name]).clone() for name in (OUTER, EARLY, LATE)
            }

        for number, batch in enumerate(data):
            engine.backward(engine(**batch).loss)
            read(f"after backward {number}")
            if number == 1:
                for name in (OUTER, LATE):
                    safe_set_full_grad(parameters[name], safe_get_full_grad(parameters[name]) * 3)
                read("after it was set")
            engine.step()
            result.norms.append(float(engine.get_global_grad_norm() or 0.0))
        # A gradient of which no backward knows: all others of its unit are zero, whatever the last step left.
        safe_set_full_grad(parameters[LATE], torch.full(parameters[LATE].ds_shape, 0.25))
        read("after the step")
        other = parameters["model.layers.5.mlp.up_proj.weight"]
        assert not safe_get_full_grad(other).any()
        engine.optimizer.step()
        result.states |= states_of(engine.module)
        return result

    in_memory, moved = in_both_places(tmp_path, program, accumulation=2)
    assert in_memory.norms == moved.norms
    assert differences(in_memory, moved) == []
    first, later = in_memory.states["after backward 1"], in_memory.states["after it was set"]
    assert not same_bits(first[LATE], later[LATE]) and same_bits(first[EARLY], later[EARLY])


def test_a_second_backward_before_the_step_is_added(tmp_path: Path) -> None:
    """Held gradients of one micro-batch a step: nothing has announced that there will be two."""

    def program(engine: Any, _: int) -> Result:
        result = Result()
        for first, second in zip(batches(2), batches(2, seed=9), strict=True):
            for batch in (first, second):
                engine.backward(engine(**batch).loss)
            engine.step()
            result.norms.append(float(engine.get_global_grad_norm()))
        result.states = states_of(engine.module)
        return result

    in_memory, moved = in_both_places(tmp_path, program, blocks=2)
    assert in_memory.norms == moved.norms
    assert differences(in_memory, moved) == []


@pytest.mark.parametrize(("accumulation", "write"), [(1, "write_now"), (2, "write_now"), (1, "read_now")])
def test_a_disk_that_fails_ends_the_run_in_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulation: int, write: str
) -> None:
    """At the third transfer of a gradient, which nobody but the update lane waits for."""
    left, transfer = [3], getattr(SsdStore, write)

    def fail(store: SsdStore, parts: Any) -> None:
        left[0] -= 1
        if left[0] <= 0:
            raise SlideError(f"SSD tier: the transfer failed with error {errno.EIO}")
        transfer(store, parts)

    with (
        room_for_gradients_of(0),
        engine_for(llama(num_hidden_layers=BLOCKS), ssd_config(tmp_path, accumulation=accumulation)) as engine,
    ):
        monkeypatch.setattr(SsdStore, write, fail)
        started = time.monotonic()
        message = r"^the update lane stopped with SlideError: SSD tier: .* error 5; .*resume from the last checkpoint$"
        with pytest.raises(SlideError, match=message):
            train(engine, batches(4 * accumulation))
        with pytest.raises(SlideError, match="the update lane stopped"):
            train(engine, batches(4 * accumulation))
    assert time.monotonic() - started < 30.0
    assert left[0] == 0  # nothing more was tried
    assert not list(tmp_path.iterdir())
