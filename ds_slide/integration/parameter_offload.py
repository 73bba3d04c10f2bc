"""`optimizer.parameter_offload`: takes the engine's hooks from a model for a while, and puts them back.

`unwrap_model_for_generation` of TRL, DeepSpeed and others gathers the parameters, removes the hooks in `forward_hooks`
and `backward_hooks`, empties both lists, and lets the model generate with its whole weights. It puts the hooks back
with `setup_zero_stage3_hooks()`, `_register_deepspeed_module` or, in older versions, `_register_hooks_recursively`.
Meanwhile scripts use the coordinator of the prefetches, whose trace is stale then; here there is no trace.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_slide.errors import SlideAttributeError, SlideError
from ds_slide.integration.parameters import ParameterProtocol
from ds_slide.runtime.engine import SlideRuntime

_AGAIN = "optimizer.parameter_offload.setup_zero_stage3_hooks()"
_NO_TRACE = (
    "DS-Slide fetches whole blocks in the order in which the model runs them, and records no trace of parameters"
)


class Coordinator:
    """The methods of DeepSpeed's PartitionedParameterCoordinator that scripts call. There is never a stale trace."""

    hierarchy = 0

    def __init__(self, protocol: ParameterProtocol) -> None:
        self._protocol = protocol

    def is_invalid_trace(self) -> bool:
        return True

    def is_complete_trace(self) -> bool:
        return False

    def is_record_trace(self) -> bool:
        return False

    def _invalidate_trace(self) -> None: ...

    def reset_step(self) -> None: ...

    def release_backward_leftovers(self) -> None: ...

    def release_and_reset_all(self, module: nn.Module) -> None:
        """Let go of the parameters of `module` that a script has gathered."""
        self._protocol.partition(module.parameters(), updated=False)

    def __getattr__(self, name: str) -> Any:
        raise SlideAttributeError(f"DS-Slide's param_coordinator has no attribute {name!r}: {_NO_TRACE}")


class _NoHook:
    """The handle of a hook that DS-Slide does not need."""

    def remove(self) -> None: ...


class ParameterOffload:
    """The owner of a model's hooks, by DeepSpeed's name, with the attributes that clients use."""

    hierarchy = 0

    def __init__(self, runtime: SlideRuntime, module: nn.Module, protocol: ParameterProtocol) -> None:
        self._runtime = runtime
        self._protocol = protocol
        self.module = module
        self.persistent_parameters: list[nn.Parameter] = []
        self.param_coordinator = Coordinator(protocol)
        self.fwd_pre_hook = _NoHook()
        self.forward_hooks: list[Any] = list(runtime.hooks.attached)
        self.backward_hooks: list[Any] = []
        """Always empty: each of `forward_hooks` serves forward and backward."""

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def setup_zero_stage3_hooks(self) -> None:
        """Put the hooks into the model, and remove present ones."""
        self._runtime.access.require_running("putting hooks into the model")
        self._runtime.hooks.attach()
        self.forward_hooks, self.backward_hooks = list(self._runtime.hooks.attached), []

    def _register_deepspeed_module(self, module: nn.Module, count: Any = None) -> None:
        """Put the hooks into the model, as `setup_zero_stage3_hooks` does. `count` is stock's, and not needed."""
        if module is not self.module:
            raise SlideError(
                f"the hooks are to be registered in a {type(module).__name__}, but DS-Slide has those of the whole "
                f"{type(self.module).__name__} that deepspeed.initialize was given; call {_AGAIN}"
            )
        self.setup_zero_stage3_hooks()

    _register_hooks_recursively = _register_deepspeed_module
    """The name of that method before DeepSpeed 0.16.4."""

    def _remove_module_hooks(self) -> None:
        self._runtime.hooks.detach()
        self.forward_hooks, self.backward_hooks = [], []

    def destroy(self) -> None:
        """Remove the hooks only, as stock's method of that name."""
        self._remove_module_hooks()

    def require_hooks(self) -> None:
        """Raise SlideError for a training step of a model whose hooks were not put back, or whose engine has ended."""
        self._runtime.access.require_running("backward()")
        if not self.forward_hooks or not self._runtime.hooks.are_there:
            raise SlideError(
                "backward() without DS-Slide's hooks: they were removed from the model, as for generation, and not put "
                f"back; call {_AGAIN}"
            )

    # ---- parameters --------------------------------------------------------------------------------------------------

    def get_param_coordinator(self, training: bool = True) -> Coordinator:
        return self.param_coordinator

    def partition_all_parameters(self) -> None:
        """Let go of the parameters that a script has gathered. A forward leaves none."""
        self.param_coordinator.release_and_reset_all(self.module)

    def empty_partition_cache(self) -> None:
        self.partition_all_parameters()

    def release_backward_leftovers(self) -> None: ...

    def mark_persistent_parameters(self, param_threshold: int, model_threshold: int) -> list[nn.Parameter]:
        """Return an empty list: small parameters of a block move with it."""
        return []

    def __getattr__(self, name: str) -> Any:
        raise SlideAttributeError(f"DS-Slide's parameter_offload has no attribute {name!r}: {_NO_TRACE}")
