"""`torch.compile` under the engine: stock's losses, and one compilation for all equal blocks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from compiled import FP32, STEPS, WAYS, Counting, Net, losses, losses_of, no_compilation_after, tokens
from harness import ds_config, engine_for

from ds_slide.runtime.core.compiled_code import uncompiled

pytestmark = pytest.mark.usefixtures("one_rank")

CHECKPOINTS = {"none": None, "non-reentrant": False, "reentrant": True}
STREAMED: dict[str, Any] = {"window": 2}
RESIDENT: dict[str, Any] = {"window": 2, "gpu_states": "1GiB"}
MIXED: dict[str, Any] = {"window": 2, "gpu_states": 400_000}
"""Some blocks are resident and some streamed."""


@functools.cache
def stock(*, fp32: bool) -> list[float]:
    return losses_of(Net(), None, **(FP32 if fp32 else {}))


def counts(way: str, reentrant: bool | None) -> int:
    """How often a block is compiled: also for the forward without gradients of the re-entrant form."""
    if way == "mlps" or (way == "engine" and reentrant is not None):
        return 0  # dynamo leaves a checkpoint alone that has a hook inside, and so what the checkpoint calls
    return 2 if reentrant else 1


@pytest.mark.parametrize("slide", [STREAMED, RESIDENT, MIXED], ids=["streamed", "resident", "mixed"])
@pytest.mark.parametrize("checkpointing", CHECKPOINTS)
@pytest.mark.parametrize("way", WAYS)
def test_losses_are_stocks_and_blocks_are_compiled_once(way: str, checkpointing: str, slide: dict[str, Any]) -> None:
    reentrant = CHECKPOINTS[checkpointing]
    backend = Counting("aot_eager")
    found = losses_of(Net(reentrant), slide, way, backend, **FP32)
    assert found == pytest.approx(stock(fp32=True), abs=1e-6)
    assert backend.blocks == counts(way, reentrant)


def test_a_block_in_another_slot_is_not_compiled_again() -> None:
    backend = Counting("aot_eager")
    with no_compilation_after(1), engine_for(Net(), ds_config({"window": 3}, **FP32)) as engine:
        WAYS["layers"](engine, backend)
        places: set[int] = set()
        first = engine.module.layers[0]
        first.register_forward_pre_hook(uncompiled(lambda *_: places.add(first.mlp.up.weight.data_ptr())))
        losses(engine, tokens(2 * STEPS))
    assert len(places) > 1
    assert backend.blocks == 1
