"""Ends each use of a unit: every forward that counts a use has something in its graph that ends it.

A block with a differentiable input ends its use at its boundary. A block without one (a tower that reads the batch, the
first block after frozen embeddings) has no boundary: its use ends when its last parameter has got its gradient. A block
that a Function computes without gradients (re-entrant checkpointing) ends its use when that Function's backward has
run. A graph that is dropped without a backward ends its uses, too.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from ds_slide.runtime.core.calls import graph_task, recomputing_nodes
from ds_slide.runtime.core.unit import Unit

_USES = "_ds_slide_uses"
"""Attribute of a Function's context: the tokens of the blocks in its forward."""


class UseEvents(Protocol):
    """The receiver of ended uses."""

    def leave_backward(self, unit: Unit) -> None: ...


class UseToken:
    """One use of a unit in a graph. A graph that is dropped without a backward takes its use back. Otherwise the unit
    would wait for it, and keep its gradients on the GPU until backward has ended.

    A backward that gives no parameter a gradient ends no use. This is known when it is over, and its tokens have fired.
    A token notes the count of such backwards (`Uses.left_out`) when it fires. The end of such a backward raises the
    count, which opens the token again. `Uses.resets` closes the tokens of all graphs from before a reset."""

    __slots__ = ("_counting", "_fired_at", "unit")

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self._counting = unit.uses.resets
        self._fired_at = -1  # never

    @property
    def is_open(self) -> bool:
        return self._fired_at != self.unit.uses.left_out and self._counting == self.unit.uses.resets

    def fire(self, events: UseEvents) -> None:
        # A backward with create_graph does not end the use: the backward that follows does.
        self._fired_at = -1 if torch.is_grad_enabled() else self.unit.uses.left_out
        events.leave_backward(self.unit)

    def __del__(self) -> None:
        # torch.compile makes an object without its constructor. Mostly a backward has fired the token.
        if hasattr(self, "_fired_at") and self._fired_at != (uses := self.unit.uses).left_out and self.is_open:
            uses.begun = max(0, uses.begun - 1)


def give_to(context: Any, token: UseToken) -> None:
    """Keep the token alive as long as the Function's node."""
    vars(context).setdefault(_USES, []).append(token)


def token_of_recomputation(unit: Unit) -> UseToken | None:
    """Return the use that the recomputation under way will end; None in a second backward of one graph."""
    for node in recomputing_nodes():
        for token in vars(node).get(_USES, ()):
            if token.unit is unit and token.is_open:
                vars(node)[_USES].remove(token)
                return token
    return None


class WholeGradients:
    """Ends uses of a unit when all of its parameters that a backward reaches have got their gradients.

    Autograd adds up a parameter's gradients from all calls of a block, and delivers the sum once in each backward.
    """

    def __init__(self, unit: Unit, events: UseEvents) -> None:
        self._unit = unit
        self._events = events
        self.awaited: dict[int, _WholeGradient] = {}
        """Awaited gradients by graph task: a hook of one backward may run another one."""

    def end(self, token: UseToken) -> None:
        """End `token` when the gradients are complete. Called when the block's backward begins, with its weights
        bound."""
        task = graph_task()
        if task not in self.awaited:
            self.awaited[task] = _WholeGradient(self._unit, self, task)
        if token.is_open and token not in self.awaited[task].tokens:
            self.awaited[task].tokens.append(token)

    def complete(self, task: int) -> None:
        """End the tokens of a graph task, whose gradients are complete."""
        whole = self.awaited.pop(task)
        whole.give_up()
        for token in whole.tokens:
            token.fire(self._events)

    def give_up(self) -> None:
        """Stop waiting: the backwards have ended, perhaps with an exception."""
        while self.awaited:
            self.awaited.popitem()[1].give_up()


class _WholeGradient:
    """The gradients of one unit in one backward, the graph task `task`. The last one, if there are any, completes it
    in `whole`."""

    def __init__(self, unit: Unit, whole: WholeGradients, task: int) -> None:
        self.tokens: list[UseToken] = []
        self._whole, self._task = whole, task
        trainable = [parameter for each in (unit, *unit.parts) for parameter, _ in each.trainable]
        awaited = [parameter for parameter in trainable if parameter.requires_grad and _will_get_gradient(parameter)]
        self._missing = len(awaited)
        self._handles = [parameter.register_post_accumulate_grad_hook(self._count) for parameter in awaited]

    def _count(self, _parameter: torch.Tensor) -> None:
        if graph_task() == self._task:
            self._missing -= 1
            if not self._missing:
                self._whole.complete(self._task)

    def give_up(self) -> None:
        for handle in self._handles:
            handle.remove()


def _will_get_gradient(parameter: nn.Parameter) -> bool:
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    return bool(torch._C._will_engine_execute_node(node))
