"""Modules that convert their own weights in a forward, as the router of SwitchTransformers does, and models that are
moved and brought back between steps. The parameters are then on memory that no update on the GPU reaches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import engine_for
from loops import LR, WIDTH, Block, Net, inputs, made
from torch import nn

pytestmark = pytest.mark.usefixtures("one_rank")

STREAMED = {"window": 2, "gpu_memory": "1GiB", "gpu_states": 0}
RESIDENT = {"gpu_memory": "1GiB", "gpu_states": "1GiB"}


class Routed(Block):
    """Scales its output by a gate in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.gate = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale: torch.Tensor = self.converted()(x.float()).sigmoid()
        return super().forward(x) * (0.5 + scale.to(x.dtype))

    def converted(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return self.gate.to(torch.float32)


class Copied(Routed):
    """The same numbers from a copy."""

    def converted(self) -> Callable[[torch.Tensor], torch.Tensor]:
        weight, bias = self.gate.weight, self.gate.bias
        return lambda x: nn.functional.linear(x, weight.float(), bias.float())


class RoutedNet(Net):
    """One more such module is an outer one."""

    def __init__(self, block: type[Routed]) -> None:
        super().__init__(4, block=block)
        self.gate = block(WIDTH)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(super().hidden(x))


def losses(block: type[Routed], slide: dict[str, Any], clip: float, *, moved: bool = False) -> list[float]:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": clip,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 10 * LR}},
        "steps_per_print": 10**9,
        "ds_slide": {"enabled": True, **slide},
    }
    found = []
    with engine_for(made(lambda: RoutedNet(block)), config) as engine:
        for x in inputs(6):
            loss = engine(x.bfloat16())
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
            if moved:  # to the CPU and back, on a GPU
                engine.module.to(torch.float32).to(torch.bfloat16)
    return found


@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("slide", [STREAMED, RESIDENT], ids=["streamed", "on-gpu"])
def test_updates_reach_them(slide: dict[str, Any], clip: float) -> None:
    assert losses(Routed, slide, clip) == losses(Copied, STREAMED, clip)


@pytest.mark.parametrize("slide", [STREAMED, RESIDENT], ids=["streamed", "on-gpu"])
def test_they_reach_a_model_that_was_moved(slide: dict[str, Any]) -> None:
    assert losses(Copied, slide, 1.0, moved=True) == losses(Copied, slide, 1.0)
