"""`DeepSpeedZeRoOffload`'s place: the owner of the engine's hooks in a model, and an engine without an optimizer.

`unwrap_model_for_generation` of TRL, DeepSpeed and others gathers the parameters, removes the hooks in `forward_hooks`
and `backward_hooks`, empties both lists, and lets the model generate with its whole weights. It puts the hooks back
with `setup_zero_stage3_hooks()`, `_register_deepspeed_module` or, in older versions, `_register_hooks_recursively`.
Meanwhile scripts use the coordinator of the prefetches, whose trace is stale then; here there is no trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import _init_external_params
from torch import nn
from torch.utils.hooks import RemovableHandle

from ds_slide.config import SlideConfig
from ds_slide.errors import SlideAttributeError, SlideError
from ds_slide.integration import engine_methods, ownership, partitions
from ds_slide.integration.assemble import assemble
from ds_slide.integration.checkpoint_files import SlideCheckpointEngine
from ds_slide.integration.contract import check_without_optimizer
from ds_slide.integration.parameters import ParameterProtocol
from ds_slide.plan.ssd_settings import ssd_settings
from ds_slide.runtime.core.settings import RuntimeSettings
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


# ----------------------------------------------------------------------------------------------------------------------
# An engine without an optimizer: forwards of a model whose blocks pass through the window, with weights only.
#
# TRL's and LLaMA-Factory's reference models and `Trainer.evaluate()` alone take the JSON of the training and leave the
# optimizer out. DeepSpeed builds a `DeepSpeedZeRoOffload` then, which the engine calls its optimizer. DS-Slide builds a
# `SlideZeroOffload` instead.

GIVE_ONE = (
    'give it an "optimizer" of type AdamW in the DeepSpeed config, or pass an optimizer to deepspeed.initialize, if it '
    "is to be trained"
)


class SlideZeroOffload(ParameterOffload, DeepSpeedZeRoOffload):
    """ZeRO stage 3 without an optimizer, streamed by `ds_slide.runtime`. Constructor arguments: `slide` and stock's;
    the sizes of stock's prefetching are ignored.

    A subclass only because `isinstance` gates much of the engine; the stock constructor is not run.
    """

    engine_hooks: Sequence[RemovableHandle] = ()

    def __init__(
        self,
        module: nn.Module,
        timers: Any,
        ds_config: Any,
        *,
        slide: SlideConfig,
        dp_process_group: Any,
        **kwargs: Any,
    ) -> None:
        check_without_optimizer(module)
        ownership.end_earlier_engine(module)
        self.timers = timers
        self.dtype: torch.dtype = next(module.parameters()).dtype
        self.dp_process_group = dp_process_group
        self.offload_device = getattr(kwargs.get("offload_param_config"), "device", None)
        self.zenflow = False
        partitions.convert(module, dp_process_group, self.dtype)
        for child in module.modules():
            _init_external_params(child)
        self.module = module
        ssd = ssd_settings(slide, ds_config)
        # The JSON's settings of updates and gradients do not concern an engine without an optimizer.
        settings = RuntimeSettings(slide, ssd, self.dtype, self.dtype, accumulates=False, clips=False, rule=None)
        self.runtime, self.kernels = assemble(module, {}, settings, dp_process_group)
        try:
            self.protocol = ParameterProtocol(
                self.runtime, dp_process_group, int(kwargs.get("param_persistence_threshold", 100_000))
            )
            ParameterOffload.__init__(self, self.runtime, module, self.protocol)
            ownership.enter(self, module)
        except BaseException:
            self.destroy()
            raise

    def slide_stats(self) -> dict[str, Any]:
        """`memory`, `pools`, `ssd` and `kernels` as in the statistics of an engine that trains."""
        parts = self.runtime.parts
        return {
            "memory": dict(parts.memory_report),
            "pools": parts.pool_report(),
            "ssd": {} if parts.ssd is None else parts.ssd.store.statistics(),
            "kernels": self.kernels.as_dict(),
        }

    # ---- what the engine and clients call ----------------------------------------------------------------------------

    @property
    def parameter_offload(self) -> ParameterOffload:
        """This object itself, as clients expect of an engine with an optimizer."""
        return self

    def __getattr__(self, name: str) -> Any:
        raise SlideAttributeError(f"this engine has no optimizer, and DS-Slide keeps no '{name}' for it; {GIVE_ONE}")

    def destroy(self) -> None:
        """End the lanes and remove the hooks. Harmless when called twice."""
        self.runtime.close()
        self.kernels.undo()
        ownership.end(self, self.module)


def attach(engine: Any) -> None:
    """Give `engine`, whose optimizer is a `SlideZeroOffload`, the line at its start, a checkpoint engine for
    `save_16bit_model`, and an error for methods that only an engine that trains can run. Attributes of the object, not
    of the class."""
    engine_methods.log_start(engine)
    engine.checkpoint_engine = SlideCheckpointEngine()
    for name in ("backward", "step", "save_checkpoint", "load_checkpoint"):
        setattr(engine, name, _refusing(f"{name}()"))
    engine._backward_prologue = _refusing("backward() of its outputs")  # of torch; the module's own run as in stock


def _refusing(what: str) -> Any:
    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise _no_optimizer(what)

    return refuse


def _no_optimizer(what: str) -> SlideError:
    other = {
        "save_checkpoint()": "; save_16bit_model() writes its weights",
        "load_checkpoint()": "; load the weights into the model before deepspeed.initialize",
    }
    return SlideError(f"this engine has no optimizer, so {what} is not possible; {GIVE_ONE}{other.get(what, '')}")
