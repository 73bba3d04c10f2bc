"""Activation checkpointing that a script has asked for through transformers, taken over for the length of a forward.

A layer of transformers calls `self._gradient_checkpointing_func(function, *inputs)`, torch's checkpoint with its
options filled in, where `self.gradient_checkpointing` is set. While the whole model's forward runs, each block has a
function of ours in that place, which decides call by call; the flag stays, so that the layer does all else that it does
under checkpointing (it passes no key-value cache on, for one). Nothing of this is left when the forward has ended.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from ds_slide.runtime.unit import Unit

FUNCTION, FLAG = "_gradient_checkpointing_func", "gradient_checkpointing"
# Options that leave the results of a block as they are without checkpointing. `context_fn` and `debug` do more than
# recompute, and without `preserve_rng_state` the recomputation draws another dropout than the forward.
UNDERSTOOD = frozenset(("use_reentrant", "determinism_check", "early_stop", "preserve_rng_state"))

Checkpoint = Callable[..., Any]
Run = Callable[..., Any]
"""(unit, checkpoint as the script has it, function, *inputs) -> what the block returns."""


class TakenOver:
    """The blocks whose checkpointing is ours while a forward runs; called by the thread that computes."""

    def __init__(self, blocks: Sequence[Unit], run: Run) -> None:
        self._blocks = [(unit, unit.spec.module) for unit in blocks if unit.spec.module is not None]
        # One object for each block, for ever: torch.compile compiles anew for a new one.
        self._ours = {unit.order: functools.partial(self._call, unit) for unit, _ in self._blocks}
        self._written: dict[int, Checkpoint] = {}
        self._run = run

    @property
    def orders(self) -> frozenset[int]:
        """Blocks that are taken over at present."""
        return frozenset(self._written)

    def begin(self) -> None:
        """Take over what the script has asked for. What an interrupt has left taken is given back first."""
        self.end()
        for unit, module in self._blocks:
            if (written := _as_written(module)) is not None:
                self._written[unit.order] = written
                vars(module)[FUNCTION] = self._ours[unit.order]

    def end(self) -> None:
        """Give all of it back. Harmless when called twice."""
        for unit, module in self._blocks:
            written = self._written.pop(unit.order, None)
            if written is not None and vars(module).get(FUNCTION) is self._ours[unit.order]:
                vars(module)[FUNCTION] = written

    def _call(self, unit: Unit, function: Callable[..., Any], *inputs: Any) -> Any:
        return self._run(unit, self._written[unit.order], function, *inputs)


def _as_written(module: nn.Module) -> Checkpoint | None:
    """The checkpoint of a block that may be left out without a change of the results; None where there is no such."""
    # In the module's own dictionary, as transformers sets it: `getattr` on a module is slow, and there are 100 of them.
    written = vars(module).get(FUNCTION)
    if written is None or not vars(module).get(FLAG) or not module.training or module._compiled_call_impl is not None:
        return None
    options = written.keywords if isinstance(written, functools.partial) else {}
    plain = written.func if isinstance(written, functools.partial) else written
    if plain is not checkpoint or (isinstance(written, functools.partial) and written.args):
        return None
    if not options.keys() <= UNDERSTOOD or not options.get("preserve_rng_state", True):
        return None
    return written


def goes_through(written: Checkpoint, function: Callable[..., Any], inputs: Sequence[Any]) -> bool:
    """Whether a backward goes through the block exactly as it would without checkpointing.

    Re-entrant checkpointing gives no gradients to a block none of whose inputs has one, and goes by itself through the
    graph behind tensors that it was not given as inputs.
    """
    options = written.keywords if isinstance(written, functools.partial) else {}
    if options.get("use_reentrant") is False:
        return True
    beside = getattr(function, "keywords", {})
    return _has_gradient(inputs) and not _has_gradient(beside)


def _has_gradient(tree: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(tree))
