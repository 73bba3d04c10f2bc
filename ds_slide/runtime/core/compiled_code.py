"""Keeps the engine's hooks out of the code that `torch.compile` makes.

Dynamo, the front end of `torch.compile`, traces the hooks of a module together with its forward. A traced hook would
bind weights while the graph is made and never again, and its graph would hold what belongs to one block and one slot.
So dynamo leaves out the hooks, and compiles the forward between them. That code is one for all equal blocks: dynamo
compares the types, shapes and flags of parameters, not their memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch._C._dynamo.eval_frame import set_eval_frame

_WRAPPED = "_torchdynamo_orig_callable"
"""Attribute of a function that `torch.compile` has made: the function that it compiles."""


def uncompiled(hook: Callable[..., Any], found: Callable[[], None] | None = None) -> Callable[..., Any]:
    """Return a hook of a module that runs `hook`, and that dynamo neither traces nor enters. `found` is called first
    where the hook is called by compiled code."""

    @functools.wraps(hook)
    def run(*call: Any) -> Any:
        around = set_eval_frame(None)
        try:
            if around and found is not None:
                found()
            return hook(*call)
        finally:
            set_eval_frame(around)

    return _left_out(run)


def apart(eager: Callable[..., Any], in_compiled: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
    """Return a function that dynamo does not trace. It calls `eager`. Where compiled code calls it, it calls what
    `in_compiled` returns for the arguments, which dynamo may compile."""

    def run(*call: Any) -> Any:
        around = set_eval_frame(None)
        try:
            function = in_compiled(*call) if around else eager
        finally:
            set_eval_frame(around)
        return function(*call)

    return _left_out(run)


def _left_out(run: Any) -> Callable[..., Any]:
    """Let dynamo neither trace nor enter a function, and return it."""
    # `torch.compiler.disable` does the same in 2 us a call, this in 0.4 us. Importing dynamo takes seconds, which a
    # command line without an engine need not wait for.
    from torch._dynamo.eval_frame import skip_code

    run._torchdynamo_disable = True
    skip_code(run.__code__)
    function: Callable[..., Any] = run
    return function


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` has been asked to compile the module's call or its forward."""
    return module._compiled_call_impl is not None or hasattr(vars(module).get("forward"), _WRAPPED)
