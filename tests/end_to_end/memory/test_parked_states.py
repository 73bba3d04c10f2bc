"""Optimizer states that make room for a forward or a backward under way: the same bits for every reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from allocated import storages
from deepspeed.utils import safe_get_full_optimizer_state
from harness import Result, batches, causal_loss, differences, ds_config, engine_for, llama, on_ssd, states_of, train
from moving import promote
from refusing import Refusing
from torch import nn

from ds_slide.runtime.memory.tier_moves import RunningStates

pytestmark = pytest.mark.usefixtures("one_rank")

CASES: dict[str, dict[str, Any]] = {
    "clipping": {"clip": 1.0},
    "under backward": {"clip": 0.0},
    "accumulation": {"clip": 1.0, "accumulation": 2},
}
UNITS = 3


def config(**settings: Any) -> dict[str, Any]:
    return ds_config({"window": 3, "cpu_threads": 1, "gpu_states": 0}, **settings)


def after_promotion(engine: Any, data: list[Any]) -> tuple[Result, RunningStates]:
    result = train(engine, data[:2])
    assert promote(engine.optimizer.runtime, *range(UNITS)) is not None
    return result, RunningStates(engine.optimizer.runtime)


def park_all(states: RunningStates) -> int:
    freed = 0
    while nbytes := states.park():
        freed += nbytes
    assert freed and not states.may_park()
    return freed


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
@pytest.mark.parametrize("place", ["forward", "backward", "step"])
def test_states_that_are_parked_in_a_step_change_no_bit(settings: dict[str, Any], place: str) -> None:
    data = batches(6)

    def run(model: nn.Module, *, parks: bool) -> Result:
        with engine_for(model, config(**settings)) as engine:
            result, states = after_promotion(engine, data)

            def park(*_: Any) -> None:
                if parks and states.may_park():
                    park_all(states)

            if place == "forward":
                model.model.layers[1].register_forward_hook(park)
            elif place == "backward":
                model.model.layers[1].mlp.register_full_backward_hook(park)

            def loss_of(engine: Any, batch: Any) -> torch.Tensor:
                if place == "step":
                    park()
                return causal_loss(engine, batch)

            result.losses += train(engine, data[2:], loss_of).losses
            result.states = states_of(model)
        return result

    assert differences(run(llama(), parks=True), run(llama(), parks=False)) == []


def test_what_is_parked_takes_no_memory_and_comes_back() -> None:
    with engine_for(llama(), config(clip=1.0)) as engine:
        _, states = after_promotion(engine, batches(3))
        before = sum(storages().values())
        freed = park_all(states)
        assert before - sum(storages().values()) == freed
        for unit in engine.optimizer.runtime.units:
            engine.optimizer.runtime.access.settle(unit)
        assert sum(storages().values()) == before and states.may_park()


def test_a_script_reads_and_writes_parked_states() -> None:
    with engine_for(model := llama(), config(clip=1.0)) as engine:
        _, states = after_promotion(engine, batches(3))
        parameter = next(iter(model.parameters()))
        expected = safe_get_full_optimizer_state(parameter, "exp_avg").clone()
        park_all(states)
        assert torch.equal(safe_get_full_optimizer_state(parameter, "exp_avg"), expected)
        train(engine, batches(1))


def test_states_without_a_place_in_host_memory_are_not_parked(disk: Path) -> None:
    given = config(clip=1.0)
    given["ds_slide"]["host_memory"] = 0
    with engine_for(llama(), on_ssd(given, disk)) as engine:
        _, states = after_promotion(engine, batches(3))
        assert not states.may_park() and states.park() == 0


def test_an_evaluation_takes_the_place_of_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the next update."""
    with engine_for(model := llama(), config(clip=1.0)) as engine:
        _, states = after_promotion(engine, batches(3))
        spare = engine.optimizer.runtime.parts.spare
        spare.room.states = states
        monkeypatch.setattr(type(spare.room.budget), "exists", True)
        monkeypatch.setattr(spare.room, "is_tight_for_evaluation", lambda _: True)
        model.eval()
        with torch.no_grad():
            expected = model(**batches(1)[0]).loss
            refusing = Parked(states, at=40)
            with refusing:
                assert torch.equal(engine(**batches(1)[0]).loss, expected)
        assert refusing.count == 2
        model.train()
        train(engine, batches(1))
        assert (
            len([unit for unit in engine.optimizer.runtime.units if engine.optimizer.runtime.parked.may_park(unit)])
            == UNITS
        )


class Parked(Refusing):
    """An allocator that refuses memory to one operator until two units have made room, whose copies take none."""

    def __init__(self, states: RunningStates, at: int) -> None:
        super().__init__(None, {})
        self.states, self.at = states, at

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function._schema.name != "aten::copy_":
            if self.seen == self.at and self.count < 2:
                self.count += 1
                raise torch.OutOfMemoryError("CUDA out of memory.")
            self.seen += 1
        return function(*args, **(kwargs or {}))
