"""`optimizer.parameter_offload`: takes the engine's hooks from a model for a while, and puts them back.

`unwrap_model_for_generation` of TRL and of DeepSpeed gathers the parameters, removes what is in `forward_hooks` and
`backward_hooks`, empties both lists, lets the model generate with its whole weights, and calls
`_register_deepspeed_module` before the parameters are partitioned again.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_slide.errors import SlideError
from ds_slide.runtime.engine import SlideRuntime

_AGAIN = "optimizer.parameter_offload._register_deepspeed_module(engine.module)"


class ParameterOffload:
    """DeepSpeed's name for what owns a model's hooks, with the attributes that clients use."""

    def __init__(self, runtime: SlideRuntime, module: nn.Module) -> None:
        self._runtime = runtime
        self.module = module
        self.forward_hooks: list[Any] = list(runtime.hooks)
        self.backward_hooks: list[Any] = []
        """Always empty: each of `forward_hooks` serves forward and backward."""

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Put the hooks into the model again."""
        if module is not self.module:
            raise SlideError(
                f"the hooks are to be registered in a {type(module).__name__}, but DS-Slide has those of the whole "
                f"{type(self.module).__name__} that deepspeed.initialize was given; call {_AGAIN}"
            )
        self._runtime.attach()
        self.forward_hooks, self.backward_hooks = list(self._runtime.hooks), []

    def require_hooks(self) -> None:
        """SlideError for a training step of a model whose hooks were not put back."""
        if not self.forward_hooks:
            raise SlideError(
                "backward() without DS-Slide's hooks: they were removed from the model, as for generation, and not put "
                f"back; call {_AGAIN}"
            )
