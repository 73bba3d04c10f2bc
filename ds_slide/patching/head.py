"""The loss of a causal language model from the head's input, without the logits.

In a training forward with labels, the head returns PendingLogits. The model's loss function gets them and calls the
head once more, this time for the loss. The call goes through the module, so that its hooks bring the weight in and see
its gradients. Where the loss function does not get them unchanged, the logits are computed after all.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ds_slide.errors import SlideError
from ds_slide.patching.kinds import Forward, ForwardPatch, autocast_dtype, replace_forward, runs_on, say_unused
from ds_slide.patching.pending import HINT, HeadCall, PendingLogits
from ds_slide.patching.rows import ROWS, HeadRows, in_dtype_of, rows_of, streamed_logits

STATE = "_slide_loss"
KNOWN = {"logits", "labels", "vocab_size", "num_items_in_batch", "ignore_index", "shift_labels", "kwargs"}
# Arguments that models pass on, and that the loss of transformers does not read.
UNREAD = {
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "position_ids", "cache_position"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "use_cache", "is_causal"),
}


@dataclass
class LossState:
    """The state that a patched model and its head share."""

    weight_dtype: torch.dtype
    """The head's data type, kept here because reading it off a streamed weight would gather the weight."""
    forwards: int = 0
    """Training forwards with labels that are under way."""
    active: bool = True


@dataclass(frozen=True)
class LossArguments:
    """The arguments that the head needs for the loss. `labels`: shifted, one for every row of the head's input."""

    labels: torch.Tensor
    ignore_index: int
    num_items: Any
    softcap: float | None

    def options(self) -> dict[str, Any]:
        """Return the loss's keyword arguments."""
        return {"ignore_index": self.ignore_index, "num_items": self.num_items, "softcap": self.softcap}


class LossLinear(nn.Linear):
    """A head that can return pending logits. Only a class can decide what a call does before the module's hooks run."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and _postpones(self, args[0]):
            hidden = args[0]
            source = HeadCall(self, hidden)
            shape = (*hidden.shape[:-1], self.out_features)
            return PendingLogits(source, shape, _compute_dtype(hidden), hidden.device)
        return super().__call__(*args, **kwargs)

    def forward(self, input: torch.Tensor, loss_arguments: LossArguments | None = None) -> torch.Tensor:
        if (rows := rows_of(self)) is not None:
            if loss_arguments is None:
                return streamed_logits(self, input)
            from ds_slide.kernels.loss.streamed_linear_cross_entropy import streamed_linear_cross_entropy

            hidden = in_dtype_of(rows, input.reshape(-1, input.shape[-1]))
            return streamed_linear_cross_entropy(
                hidden, rows, loss_arguments.labels.reshape(-1), **loss_arguments.options()
            )
        if self.weight.numel() == 0:
            raise SlideError(f"the head's weight is not here, so the logits cannot be computed now: {HINT}")
        if loss_arguments is None:
            return super().forward(input)
        from ds_slide.kernels.loss.linear_cross_entropy import linear_cross_entropy

        dtype = _compute_dtype(input)
        return linear_cross_entropy(
            input.reshape(-1, input.shape[-1]).to(dtype),
            self.weight.to(dtype),
            loss_arguments.labels.reshape(-1),
            bias=None if self.bias is None else self.bias.to(dtype),
            **loss_arguments.options(),
        )


def _compute_dtype(hidden: torch.Tensor) -> torch.dtype:
    """Return the data type of a linear layer's output: autocast casts all but fp64."""
    dtype = autocast_dtype(hidden.device.type)
    return hidden.dtype if dtype is None or hidden.dtype == torch.float64 else dtype


def _postpones(head: LossLinear, hidden: torch.Tensor) -> bool:
    state: LossState | None = head.__dict__.get(STATE)
    if state is None or not state.active or state.forwards == 0 or torch.compiler.is_compiling():
        return False
    # A forward hook wants to see logits, and so does a forward that was put on the object.
    if head._forward_hooks or "forward" in head.__dict__ or not runs_on(hidden):
        return False
    return _compute_dtype(hidden) == state.weight_dtype or autocast_dtype(hidden.device.type) is not None


@dataclass(frozen=True)
class LossPatch:
    """The head's class, the model's forward and its loss function, replaced together."""

    model: nn.Module
    head: nn.Module
    forward: ForwardPatch
    loss_function: LossFunction
    had_loss_function: bool

    def undo(self) -> None:
        self.head.__dict__[STATE].active = False
        self.forward.undo()
        if self.model.__dict__.get("_loss_function") is self.loss_function:
            if self.had_loss_function:
                self.model.__dict__["_loss_function"] = self.loss_function.original
            else:
                del self.model.__dict__["_loss_function"]
        if type(self.head) is LossLinear:
            self.head.__class__ = nn.Linear  # type: ignore[assignment]
            del self.head.__dict__[STATE]


class LossFunction:
    """The model's loss function: the kernel for pending logits, the original for everything else."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original
        self._signature = inspect.signature(original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        logits = kwargs.get("logits", args[0] if args else None)
        if not isinstance(logits, PendingLogits):
            return self.original(*args, **kwargs)
        found = self._arguments(logits, self._signature.bind(*args, **kwargs).arguments)
        if isinstance(found, str):
            say_unused("loss", found)
            return self.original(*args, **kwargs)
        source = logits.source
        loss = source.head(source.hidden, found)
        if loss.requires_grad:
            loss.register_hook(lambda _: source.expire())
        return loss

    def _arguments(self, logits: PendingLogits, given: dict[str, Any]) -> LossArguments | str:
        """Return the arguments for the head, or the reason why the kernel cannot do this call."""
        others = {**{name: given[name] for name in given.keys() - KNOWN}, **given.get("kwargs", {})}
        strange = sorted(name for name, value in others.items() if value is not None and name not in UNREAD)
        if strange:
            return f"the loss was called with {', '.join(strange)}"
        if logits.source.was_read:
            return "the logits were read before the loss was computed"
        softcap = logits.softcap()
        if softcap is False:
            return "the model changes its logits in a way that the kernel does not know"
        ignore_index = given.get("ignore_index", -100)
        labels = given.get("shift_labels")
        if labels is None:
            # Position t predicts token t + 1; the last position predicts nothing.
            labels = functional.pad(given["labels"], (0, 1), value=ignore_index)[..., 1:]
        rows = logits.shape[:-1].numel()
        if labels.numel() != rows or labels.dtype != torch.int64 or given["vocab_size"] != logits.shape[-1]:
            return "labels or vocabulary size do not match the logits"
        items = given.get("num_items_in_batch")
        if isinstance(items, torch.Tensor):
            if items.numel() != 1:
                return "num_items_in_batch is not one number"
            items = items.reshape(()).to(logits.device)
        return LossArguments(labels.to(logits.device), ignore_index, items, softcap)


def patch_loss(model: nn.Module) -> LossPatch | str:
    """Patch the outermost module of `model` that has a head and a loss function, or say why there is none."""
    wanted = ("loss_function", "get_output_embeddings")
    language_model: Any = next((m for m in model.modules() if all(hasattr(type(m), name) for name in wanted)), None)
    if language_model is None:
        return "no module has a loss function and output embeddings"
    # The head must be a plain nn.Linear, and the loss ForCausalLMLoss.
    name = type(language_model).__name__
    head = language_model.get_output_embeddings()
    if type(head) is LossLinear:
        return "it was replaced before"
    if type(head) is not nn.Linear:
        return f"the head of {name} is {type(head).__name__} and not nn.Linear"
    if "forward" in head.__dict__ or head._forward_hooks:
        return f"the head of {name} has forward hooks or a forward of its own"
    attribute: Any = type(language_model).loss_function
    original = language_model.loss_function
    if not isinstance(attribute, property) or attribute.fset is None or not _is_causal_loss(original):
        return f"the loss function of {name} is not ForCausalLMLoss of transformers"
    signature = inspect.signature(type(language_model).forward)
    if "labels" not in signature.parameters:
        return f"the forward of {name} has no argument labels"
    # Loss function, head and forward are replaced together; the head and the model share one state.
    state = LossState(head.weight.dtype)
    had_loss_function = "_loss_function" in language_model.__dict__
    loss_function = LossFunction(original)
    language_model.loss_function = loss_function
    head.__class__ = LossLinear
    head.__dict__[STATE] = state
    language_model.__dict__[STATE] = state
    patch = replace_forward(language_model, "loss", functools.partial(_counting, signature))
    return LossPatch(language_model, head, patch, loss_function, had_loss_function)


def _is_causal_loss(function: Any) -> bool:
    try:
        from transformers.loss.loss_utils import ForCausalLMLoss
    except ImportError:
        return False
    return function is ForCausalLMLoss


def _counting(signature: inspect.Signature, original: Forward) -> Forward:
    place = list(signature.parameters).index("labels") - 1  # without self

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get("labels", args[place] if len(args) > place else None)
        if labels is None or not self.training:
            return original(self, *args, **kwargs)
        state: LossState = self.__dict__[STATE]  # this object's own: it may be a deep copy of the patched model
        state.forwards += 1
        try:
            return original(self, *args, **kwargs)
        finally:
            state.forwards -= 1

    return forward


# ----------------------------------------------------------------------------------------------------------------------
# A head whose weight is not on the GPU: its rows come in chunks while it computes, and their gradients leave.


class StreamedLinear(nn.Linear):
    """A streamed head that computes only logits; `LossLinear` computes the loss, too."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return streamed_logits(self, input)


@dataclass(frozen=True)
class StreamedHeadPatch:
    head: nn.Module

    def undo(self) -> None:
        self.head.__dict__.pop(ROWS, None)
        if type(self.head) is StreamedLinear:
            self.head.__class__ = nn.Linear  # type: ignore[assignment]


def stream_head(head: nn.Linear, rows: HeadRows) -> StreamedHeadPatch:
    """Make `head`, a plain nn.Linear or the loss's, compute with `rows` instead of its weight."""
    head.__dict__[ROWS] = rows
    if type(head) is not LossLinear:
        assert type(head) is nn.Linear
        head.__class__ = StreamedLinear
    return StreamedHeadPatch(head)
