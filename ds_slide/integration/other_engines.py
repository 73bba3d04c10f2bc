"""Whose step follows a backward that runs through the outputs of several engines.

The generator's loss of a GAN passes the discriminator, which then gets gradients that its own next step must not use.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime import engine as deepspeed_engine
from torch import nn

from ds_slide.integration import training_engines
from ds_slide.integration.activation import stock_modules


def part_in_backward(engine: Any) -> str | None:
    """Return, while a backward through an output of `engine` runs, a clause that says why the step that follows may be
    another engine's; None where the backward is this engine's own."""
    if engine._running_engine_backward or engine._manual_backward_expected:
        return None
    if deepspeed_engine._ENGINE_BACKWARD_GRAPH_TRACKER.is_current_graph_registered():
        return "the backward of another engine ran through this one's model"
    if _another_may_take_part(engine):
        return "one loss.backward() ran through the models of two engines"
    return None


def _another_may_take_part(engine: Any) -> bool:
    own = engine.optimizer
    owners = [owner for owner in training_engines.living() if owner is not own]
    # A checkpointed block's parameters are in graphs that backward makes, so a graph that waits counts, too.
    if any(unit.awaits_backward for owner in owners for unit in owner.runtime.units):
        return True
    modules = [owner.module for owner in owners] + [module for module in stock_modules() if module is not own.module]
    return any(_is_in_graph(parameter) for module in modules for parameter in module.parameters())


def _is_in_graph(parameter: nn.Parameter) -> bool:
    """Whether the backward under way gives the parameter a gradient."""
    if not parameter.requires_grad:
        return False
    with torch.enable_grad():
        node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # the parameter is one of the inputs of torch.autograd.grad
        return True
