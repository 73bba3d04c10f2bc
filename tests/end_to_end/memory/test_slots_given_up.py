"""Slots of the window that make room for a forward or a backward under way: the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Result, batches, causal_loss, differences, ds_config, engine_for, llama, states_of, train
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ds_slide.runtime.memory.tier_moves import RunningStates

pytestmark = pytest.mark.usefixtures("one_rank")

LAYERS = 6
DELAYS = {"debug": {"lane_delay_ms": 2.0, "seed": 3}}


def config(clip: float) -> dict[str, Any]:
    return ds_config({"cpu_threads": 1, "gpu_states": 0, **DELAYS}, clip=clip, accumulation=2)


def run(model: nn.Module, place: str | None, clip: float) -> Result:
    """Train with a slot for each block, and give up a slot at each visit of `place`; None: never."""
    freed: list[int] = []
    with engine_for(model, config(clip)) as engine:
        runtime, data = engine.optimizer.runtime, batches(12)
        states = RunningStates(runtime)
        result = train(engine, data[:4])
        assert states.move(frozenset(), LAYERS)
        assert len(runtime.parts.window.slots) == LAYERS

        def give_up(*_: Any) -> None:
            runtime.parts.context.lanes.h2d.drain()
            before = [StorageWeakRef(slot.buffer.untyped_storage()) for slot in runtime.parts.window.slots]
            freed.append(states.give_up_slot())
            assert sum(each.expired() for each in before) == bool(freed[-1])

        if place in ("forward", "evaluation"):
            model.model.layers[1].register_forward_hook(give_up)
        elif place == "backward":
            model.model.layers[1].mlp.register_full_backward_hook(give_up)
        if place == "evaluation":
            with torch.no_grad():
                engine(**data[0])
        result.losses += train(engine, data[4:]).losses
        result.states = states_of(model)
        if place is not None:
            left = runtime.parts.memory_report["slots"]
            assert left == len(runtime.parts.window.slots) == len(runtime.parts.window.by_storage) == 3
            assert all(freed[: LAYERS - left]) and not any(freed[LAYERS - left :])
    return result


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("place", ["forward", "backward", "evaluation"])
def test_slots_that_are_given_up_change_no_bit(place: str, clip: float) -> None:
    without, given_up = (run(llama(num_hidden_layers=LAYERS), where, clip) for where in (None, place))
    assert differences(given_up, without) == []


def test_a_fixed_window_keeps_its_slots() -> None:
    with engine_for(llama(), ds_config({"window": 3, "gpu_states": 0})) as engine:
        train(engine, batches(1))
        assert RunningStates(engine.optimizer.runtime).give_up_slot() == 0


def test_a_shortage_takes_a_slot_before_states() -> None:
    with engine_for(llama(num_hidden_layers=LAYERS), config(1.0)) as engine:
        runtime = engine.optimizer.runtime
        states = runtime.parts.spare.room.states = RunningStates(runtime)
        train(engine, batches(2))
        assert states.move(frozenset((1,)), LAYERS)
        causal_loss(engine, batches(1)[0])
        slots = len(runtime.parts.window.slots)
        while len(runtime.parts.window.slots) > 3:
            assert runtime.parts.spare.shortage.make_room() and states.may_park()
            slots -= 1
            assert len(runtime.parts.window.slots) == slots
        runtime.parts.context.lanes.h2d.drain()
        assert runtime.parts.spare.shortage.make_room() and not states.may_park()
