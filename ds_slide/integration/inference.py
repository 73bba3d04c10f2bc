"""An engine without an optimizer: forwards of a model whose blocks pass through the window, with weights only.

TRL's and LLaMA-Factory's reference models and `Trainer.evaluate()` alone take the JSON of the training and leave the
optimizer out. DeepSpeed builds a `DeepSpeedZeRoOffload` then, which the engine calls its optimizer. DS-Slide builds a
`SlideZeroOffload` instead.
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
from ds_slide.integration import engine_methods, ownership, plain_copy
from ds_slide.integration import parameters as protocol
from ds_slide.integration.assemble import assemble, forward_settings
from ds_slide.integration.checkpoint_files import SlideCheckpointEngine
from ds_slide.integration.contract import check_without_optimizer
from ds_slide.integration.parameter_offload import ParameterOffload

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
        protocol.convert(module, dp_process_group, self.dtype)
        for child in module.modules():
            _init_external_params(child)
        self.module = module
        settings = forward_settings(slide, ds_config, self.dtype)
        self.runtime, self.kernels = assemble(module, {}, settings, dp_process_group)
        try:
            self.protocol = protocol.ParameterProtocol(
                self.runtime, dp_process_group, int(kwargs.get("param_persistence_threshold", 100_000))
            )
            ParameterOffload.__init__(self, self.runtime, module, self.protocol)
            plain_copy.teach(module, self.protocol.whole_weights)
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
            "ssd": {} if parts.ssd is None else parts.ssd.statistics(),
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
