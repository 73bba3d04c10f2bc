"""A script writes a large buffer of a block between two steps, in place or by giving it other memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import ds_config, engine_for
from torch import nn

from ds_slide.errors import SlideError

ROWS, WIDTH, STEPS = 1024, 64, 4
SLIDES = pytest.mark.parametrize(
    "slide", [{"gpu_states": 0, "window": 2}, {"gpu_states": "1GiB"}], ids=["streams", "stays"]
)


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
@SLIDES
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


def other_shape(table: torch.Tensor) -> torch.Tensor:
    return table[:WIDTH].clone()


def other_view(table: torch.Tensor) -> torch.Tensor:
    """On the same memory."""
    return table.view(-1, WIDTH)


def other_dtype(table: torch.Tensor) -> torch.Tensor:
    return table.int()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("changed", [other_shape, other_view, other_dtype])
@SLIDES
def test_memory_of_another_kind_is_refused_and_a_new_buffer_counts(slide: dict[str, Any], changed: Any) -> None:
    """Plain torch goes on with such memory, and so does stock. The refusal loses nothing, and its advice works."""
    model = Model()
    with engine_for(model, ds_config({"blocks": ["blocks"], **slide}, clip=1.0)) as engine:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(2, WIDTH, generator=generator).bfloat16()
        engine.backward(engine(x))
        engine.step()
        expected = engine(x)
        block = model.blocks[1]
        block.table.data = changed(block.table)
        with pytest.raises(SlideError, match=r"the data of blocks\.1\.table was replaced by torch\.int"):
            engine(x)
        assert torch.equal(block.table, torch.arange(ROWS) % WIDTH)
        assert torch.equal(engine(x), expected)
        block.table = other_shape(block.table).flip(0)
        assert not torch.equal(engine(x), expected)
        engine.backward(engine(x))
        engine.step()
        assert torch.equal(engine.module.state_dict()["blocks.1.table"], torch.arange(WIDTH).flip(0))


@pytest.mark.usefixtures("one_rank")
def test_memory_that_a_forward_gives_to_a_buffer_is_refused() -> None:
    """The block streams, so it would be lost."""
    model = Model()
    model.blocks[1].replaces = True
    with engine_for(model, ds_config({"blocks": ["blocks"], "gpu_states": 0, "window": 2}, clip=1.0)) as engine:
        with pytest.raises(SlideError, match=r"blocks\.1\.table was written by a forward of blocks\.1"):
            engine(torch.randn(2, WIDTH).bfloat16())
