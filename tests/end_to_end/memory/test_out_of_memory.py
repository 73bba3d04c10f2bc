"""An operator that finds no memory, at any place of a step: what blocks keep is given up, and no bit changes."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from activation_runs import STEPS, asked, config_of, expected
from all_mixed import all_of
from harness import Result, batches, differences, engine_for, states_of, train
from hypothesis import given, settings
from hypothesis import strategies as st
from refusing import Refusing
from torch import nn

from ds_slide.runtime.memory.spare_memory import LOOKS

pytest.importorskip("transformers")
pytestmark = [pytest.mark.usefixtures("one_rank")]

WHOLE, MIXED = 2_200_000, 1_500_000
"""Bytes of the GPU in which all blocks of these models keep all that they save, or some results: little is left."""
OPERATORS = 2_000
"""Of a forward and a backward of these models, about."""


def refused(
    name: str, reentrant: bool | None, room: int, places: dict[int, int], *, late: bool = False
) -> tuple[Result, Refusing]:
    """-> what came out of a training in which the allocator refuses, and that."""
    model, result = asked(name, reentrant), Result()
    torch.manual_seed(3)
    with engine_for(model, config_of({"gpu_memory": room})) as engine, pytest.MonkeyPatch.context() as patch:
        if room == MIXED:
            patch.setattr("ds_slide.runtime.activations.measuring.mixtures", all_of)
        mode = Refusing(engine.optimizer.runtime.parts.spare, places, late=late)
        for batch in batches(STEPS):
            with mode:
                loss = engine(**batch).loss
                engine.backward(loss)
            engine.step()
            result.losses.append(loss.item())
            result.norms.append(float(engine.get_global_grad_norm()))
        result.states = states_of(model)
    return result, mode


CASES = [
    (name, reentrant, room)
    for name, reentrant in (("llama", False), ("llama", True), ("qwen2", None), ("adapters", False))
    for room in (WHOLE, MIXED)
]
"""Adapters last: DeepSpeed computes linear layers in another way in a process that has used `zero.Init`."""


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("name", "reentrant", "room"), CASES)
@settings(max_examples=2, deadline=None)
@given(
    places=st.dictionaries(st.integers(0, 2 * OPERATORS), st.integers(1, 3), min_size=1, max_size=4),
    late=st.booleans(),
)
def test_memory_refused_at_any_place_changes_no_bit(
    name: str, reentrant: bool | None, room: int, places: dict[int, int], late: bool
) -> None:
    result, _ = refused(name, reentrant, room, places, late=late)
    assert differences(result, expected(name, reentrant, "clipping")) == []


def test_what_was_given_up_once_is_left_free(caplog: pytest.LogCaptureFixture) -> None:
    """One line says so, and the next forward keeps less."""
    with caplog.at_level(logging.INFO, logger="ds_slide"):
        _, mode = refused("llama", True, WHOLE, {300: 1})
    assert sum("had no memory left" in line for line in caplog.messages) == mode.count == 1
    assert mode.spare.activations.statistics["keep"] < 6


def test_where_nothing_is_kept_the_error_is_the_scripts() -> None:
    with engine_for(asked("llama", True), config_of({"gpu_memory": WHOLE})) as engine:
        train(engine, batches(LOOKS[0]))
        loss = engine(**batches(1)[0]).loss
        spare = engine.optimizer.runtime.parts.spare
        while spare.activations.give_up():
            pass
        mode = Refusing(spare, {})
        mode.refuses_all = True
        with mode, pytest.raises(torch.OutOfMemoryError):
            engine.backward(loss)
        train(engine, batches(1))  # goes on


class Adding(nn.Module):
    """A projection whose result is added up over the ranks."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(hidden)
        return funcol.all_reduce(made, "sum", dist.group.WORLD)


def test_a_block_with_a_collective_is_recomputed_by_all_ranks() -> None:
    """Ranks decide each for itself what they keep."""
    model = asked("llama", False)
    for layer in model.model.layers:
        layer.self_attn.o_proj = Adding(layer.self_attn.o_proj)
    with engine_for(model, config_of({"gpu_memory": "1GiB"})) as engine:
        train(engine, batches(LOOKS[0] + 1))
        assert engine.optimizer.slide_stats()["activations"]["recompute"] == len(model.model.layers)
