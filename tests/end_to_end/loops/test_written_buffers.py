"""A script writes a large buffer of a block between two steps, in place or by giving it other memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import ds_config, engine_for
from torch import nn

from ds_slide.errors import SlideError

ROWS, WIDTH, STEPS = 1024, 64, 4


class Block(nn.Module):
    """Reads the columns of its input in the order of a table of 8 KB."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.arange(ROWS) % WIDTH)
        self.replaces = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.replaces:
            self.table.data = (self.table + 1) % WIDTH
        return torch.tanh(self.linear(x[:, self.table[:WIDTH]])) + x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def write_in_place(table: torch.Tensor) -> None:
    table.add_(1).remainder_(WIDTH)


def give_memory(table: torch.Tensor) -> None:
    table.data = (table + 1) % WIDTH


def losses_of(call: Any, step: Any, model: Model, write: Any) -> list[float]:
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        loss = call(torch.randn(2, WIDTH, generator=generator).bfloat16())
        step(loss)
        losses.append(float(loss))
        write(model.blocks[1].table)
    return losses


def plain_losses() -> list[float]:
    """Of a model whose weights stay as they are, since a rate of 0 has no rounding."""
    model = Model().bfloat16()
    return losses_of(model, lambda _: None, model, write_in_place)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("write", [write_in_place, give_memory])
@pytest.mark.parametrize("slide", [{"gpu_states": 0, "window": 2}, {"gpu_states": "1GiB"}], ids=["streams", "stays"])
def test_what_a_script_writes_between_steps_counts(slide: dict[str, Any], write: Any) -> None:
    model = Model()
    still = {"optimizer": {"type": "AdamW", "params": {"lr": 0.0}}}
    with engine_for(model, ds_config({"blocks": ["blocks"], **slide}, clip=1.0, **still)) as engine:

        def step(loss: torch.Tensor) -> None:
            engine.backward(loss)
            engine.step()

        losses = losses_of(engine, step, model, write)
        assert losses == plain_losses()
        assert model.blocks[1].table[0] == STEPS
    assert model.blocks[1].table[0] == STEPS  # where the engine has ended, too


@pytest.mark.usefixtures("one_rank")
def test_memory_that_a_forward_gives_to_a_buffer_is_refused() -> None:
    """The block streams, so it would be lost."""
    model = Model()
    model.blocks[1].replaces = True
    with engine_for(model, ds_config({"blocks": ["blocks"], "gpu_states": 0, "window": 2}, clip=1.0)) as engine:
        with pytest.raises(SlideError, match=r"blocks\.1\.table was written by a forward of blocks\.1"):
            engine(torch.randn(2, WIDTH).bfloat16())
