"""Weights that are read outside of their module's forward, as fused losses read the head's."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
from harness import VOCABULARY, PlainAdamW, batches, ds_config, engine_for, states_of, to_bf16, unequal
from torch import nn

from ds_slide.model import structure

pytestmark = pytest.mark.usefixtures("one_rank")

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x).tanh()
        return y


class Toy(nn.Module):
    """The head, and a block that is never called, are used by their weights alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks[:3]:
            x = block(x)
        x = nn.functional.linear(x, self.blocks[3].inner.weight)
        logits = nn.functional.linear(x, self.head.weight)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def toy() -> Toy:
    torch.manual_seed(0)
    return Toy()


@pytest.mark.parametrize("evaluates", [False, True], ids=["training", "with-evaluation"])
@pytest.mark.parametrize("slide", [{}, {"stream_head": True}], ids=["head-on-gpu", "streamed-head"])
def test_they_are_those_of_the_last_step(slide: dict[str, Any], evaluates: bool) -> None:
    model, plain = toy(), to_bf16(toy())
    reference = PlainAdamW(plain, clip=1.0)
    with engine_for(model, ds_config({"window": 2, **slide})) as engine:
        for batch in batches(3):
            if evaluates:
                with torch.no_grad():
                    assert engine(**batch).item() == plain(**batch).item()
            mine, theirs = engine(**batch), plain(**batch)
            assert mine.item() == theirs.item()
            engine.backward(mine)
            theirs.backward()
            engine.step()
            reference.step()
        with deepspeed.zero.GatheredParameters([model.head.weight]):
            assert torch.equal(model.head.weight, plain.head.weight)
        assert unequal(states_of(model), reference.states()) == []


def test_no_copy_is_made_of_what_is_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the head is a unit of its own, and does not come with the embedding."""
    monkeypatch.setattr(structure, "LARGE_OUTER_NUMEL", VOCABULARY * WIDTH)
    model = toy()
    with engine_for(model, ds_config({"window": 2, "gpu_states": 0})) as engine:
        (head,) = (unit for unit in engine.optimizer.runtime.units if unit.name == "outer:head")
        assert head.resident is not None
        for batch in batches(2):
            loss = engine(**batch)
            assert model.head.weight.untyped_storage().data_ptr() == head.resident.untyped_storage().data_ptr()
            engine.backward(loss)
            engine.step()


def test_two_graphs_at_once() -> None:
    """The first backward ends while the second graph still needs the head's weight."""
    model, plain = toy(), to_bf16(toy())
    with engine_for(model, ds_config({"window": 2}, accumulation=2)) as engine:
        ours, theirs = ([run(**batch) for batch in batches(2)] for run in (engine, plain))
        for loss in ours:
            engine.backward(loss)
            engine.step()
        sum(loss / 2 for loss in theirs).backward()
        assert engine.get_global_grad_norm() == pytest.approx(
            torch.nn.utils.get_total_norm([p.grad.float() for p in plain.parameters() if p.grad is not None]).item(),
            rel=2e-2,
        )
