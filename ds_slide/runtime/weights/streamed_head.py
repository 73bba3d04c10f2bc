"""Finds the module that `ds_slide.stream_head` means, and checks whether its weight can stay in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ds_slide.errors import SlideConfigError
from ds_slide.model.structure import ModelStructure, Precision, Precisions
from ds_slide.runtime.core.settings import RuntimeSettings

ASKED = "ds_slide.stream_head is true"
WAY_OUT = "set it to false"


@dataclass(frozen=True)
class StreamedHead:
    """The head whose rows are streamed. `path`: the name of the module in `named_modules()`."""

    path: str
    module: nn.Linear


def find_streamed_head(
    model: nn.Module, world_size: int, settings: RuntimeSettings, precisions: Precisions
) -> StreamedHead:
    """Return the head of `model`, a plain linear layer with a weight of its own. Raises SlideConfigError for any other
    head."""
    if world_size > 1:
        raise SlideConfigError(
            f"{ASKED}, but the rows of a head pass through one GPU and there are {world_size} ranks; {WAY_OUT}"
        )
    # The head must be a plain linear layer without a bias.
    head = _output_embeddings(model)
    if head is None:
        raise SlideConfigError(
            f"{ASKED}, but {type(model).__name__} names no head by get_output_embeddings(); {WAY_OUT}"
        )
    path = next(name for name, module in model.named_modules() if module is head)
    if type(head) is not nn.Linear:
        kind = f"{type(head).__module__}.{type(head).__name__}"
        raise SlideConfigError(f"{ASKED}, but the head {path} is a {kind} and not torch's nn.Linear; {WAY_OUT}")
    others = [name for name, _ in head.named_parameters() if name != "weight"]
    if others:
        found = "a bias" if others == ["bias"] else f"a parameter {others[0]}"
        raise SlideConfigError(f"{ASKED}, but the head {path} has {found}, which needs the GPU; {WAY_OUT}")
    # No other module may use its weight, and no hook may need the weight or its gradient as a whole.
    names = [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is head.weight]
    if len(names) > 1:
        other = next(name for name in names if name != f"{path}.weight")
        raise SlideConfigError(
            f"{ASKED}, but the head {path} shares its weight with {other}, which needs it on the GPU as a whole; "
            f"{WAY_OUT}, or untie them"
        )
    if "forward" in head.__dict__ or head._forward_hooks or head._forward_pre_hooks:
        raise SlideConfigError(f"{ASKED}, but the head {path} has hooks or a forward of its own; {WAY_OUT}")
    if head.weight._backward_hooks or head.weight._post_accumulate_grad_hooks:
        raise SlideConfigError(
            f"{ASKED}, but the weight of the head {path} has hooks for its gradient, which never exists as a whole; "
            f"{WAY_OUT}"
        )
    # Its gradient is copied down as it is made, so it must be in the data type of reduced gradients.
    (weight,) = head.parameters(recurse=False)
    precision = precisions.get(weight) or Precision.declared(weight)
    gradient_dtype = settings.gradient_of(precision)
    if head.weight.requires_grad and precision.weight != gradient_dtype:
        raise SlideConfigError(
            f"{ASKED}, but the head {path} is {head.weight.dtype} and gradients are reduced in {gradient_dtype} "
            f"(communication_data_type), while its own goes down as it is made; {WAY_OUT}"
        )
    return StreamedHead(path, head)


def check_is_outer(head: StreamedHead, structure: ModelStructure) -> None:
    """Raise SlideConfigError for a head that is, or is in, a block: a block is streamed through the window as a
    whole."""
    for block in structure.blocks:
        if any(parameter is head.module.weight for _, parameter in block.parameters):
            raise SlideConfigError(
                f"{ASKED}, but the head {head.path} belongs to the block {block.name}, which passes through the GPU "
                f"anyway; {WAY_OUT}, or leave the head out of ds_slide.blocks"
            )


def _output_embeddings(model: nn.Module) -> Any:
    """Return the head that the outermost module with a head names (adapters wrap the model that has it)."""
    for module in model.modules():
        if callable(find := getattr(type(module), "get_output_embeddings", None)):
            head = find(module)
            if head is not None and any(part is head for part in model.modules()):
                return head
    return None
