"""The switch: an engine whose config enables "ds_slide" gets SlideZeroOptimizer instead of the stage-3 optimizer, or,
without an optimizer, SlideZeroOffload instead of DeepSpeedZeRoOffload.

Four methods of DeepSpeedEngine are wrapped. The constructor checks first (DeepSpeed's names, then the config), so that
a run that cannot work ends before it has taken memory. `_configure_zero_optimizer` chooses its class by a name of a
module, so that name is replaced for the length of the call; its ~45 keyword arguments are passed on as they are.
`_configure_basic_optimizer` compiles no kernels, which would never be called. Nor does the DeepSpeedCPUAdam that
accelerate builds before the engine, where its config has the key. `_configure_distributed_model` does not move the
weights to the accelerator. An engine without the key runs the originals.
"""

import difflib
import functools
import inspect
import logging
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ds_slide.integration import STOCKS
from ds_slide.integration.early import around, install_in_parser, install_in_zero_init, slide_config

logger = logging.getLogger(__name__)

_wrapped_classes: set[type] = set()


def install(engine_module: ModuleType) -> None:
    """Wrap `DeepSpeedEngine` of the module `deepspeed.runtime.engine`. Idempotent."""
    engine_class = engine_module.DeepSpeedEngine
    if engine_class in _wrapped_classes:
        return
    _check_first(engine_class)
    around(engine_class, "_configure_zero_optimizer", _ours_is_built)
    around(engine_class, "_configure_basic_optimizer", _no_kernels_are_built)
    around(engine_class, "_configure_distributed_model", _weights_stay)
    from deepspeed.ops.adam import cpu_adam
    from deepspeed.runtime import config as config_module
    from deepspeed.runtime.zero import partition_parameters

    install_in_zero_init(partition_parameters.Init)
    install_in_parser(config_module.DeepSpeedConfig)
    if hasattr(cpu_adam, "DeepSpeedCPUAdam"):
        around(cpu_adam.DeepSpeedCPUAdam, "__init__", _kernels_wait_for_use)
    _wrapped_classes.add(engine_class)


def warn_if_meant(parsed: Any) -> None:
    """Warn of a misspelt block: DeepSpeed accepts any key at the top level, and would run stock with no message."""
    raw = getattr(parsed, "_param_dict", None)
    if not isinstance(raw, Mapping):
        return
    if "ds_slide" in raw:
        if "enabled" not in raw["ds_slide"]:
            logger.warning("ds_slide.enabled is absent from the config and false by default: stock DeepSpeed runs")
        return
    for key in raw:
        if difflib.SequenceMatcher(None, "ds_slide", str(key).lower()).ratio() > 0.8:
            logger.warning("the config has the key %r, which DeepSpeed ignores; was ds_slide meant?", key)


def _check_first(engine_class: Any) -> None:
    """Let the constructor of DeepSpeed's engine check an engine with the key first, and complete it at the end."""
    original = engine_class.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            given = signature.bind(self, *args, **kwargs).arguments
        except TypeError:
            given = {}  # the original reports it
        parsed = given.get("config_class")
        slide = slide_config(given.get("config") if parsed is None else parsed)
        if slide is None:
            warn_if_meant(parsed)
            _leave_to_stock(given.get("model"))
            original(self, *args, **kwargs)
            if getattr(self, "optimizer", None) is not None and self.zero_optimization_partition_weights():
                STOCKS[self.module] = weakref.ref(self)
            return
        from ds_slide.integration.contract import check_deepspeed_config, require_values
        from ds_slide.integration.selfcheck import check_deepspeed, check_extension
        from ds_slide.report.compilations import watch
        from ds_slide.report.log import show

        show()
        watch()
        check_deepspeed()
        check_extension()
        check_deepspeed_config(
            parsed,
            slide,
            model=given["model"],
            client_optimizer=given.get("optimizer"),
            mpu=given.get("mpu"),
            mesh_device=given.get("mesh_device"),
        )
        require_values(given["model"])
        _take_from_stock(given["model"])
        try:
            original(self, *args, **kwargs)
            _complete(self)
        except BaseException:
            _discard(self)
            raise

    engine_class.__init__ = __init__


def _complete(engine: Any) -> None:
    """Give an engine whose constructor has ended DS-Slide's own methods."""
    # Imported after the check, since they need the names of DeepSpeed that it looks for.
    from ds_slide.errors import SlideError
    from ds_slide.integration import checkpoint_load, engine_methods, ownership, parameter_offload
    from ds_slide.integration.optimizer import SlideZeroOptimizer

    if isinstance(engine.optimizer, parameter_offload.SlideZeroOffload):
        parameter_offload.attach(engine)
    elif isinstance(engine.optimizer, SlideZeroOptimizer):
        engine_methods.attach(engine)
        checkpoint_load.attach(engine)
        ownership.enter_training(engine.optimizer)
    else:
        raise SlideError(
            f"ds_slide.enabled is true, but DeepSpeed built a {type(engine.optimizer).__name__}; set ds_slide.enabled "
            "to false, or report this with the DeepSpeed config"
        )
    engine.optimizer.engine_hooks = _hooks_of(engine)


def _leave_to_stock(model: Any) -> None:
    """End an engine with DS-Slide that has `model`, if any, and leave the parameters as stock partitions them.

    Lightning builds an engine without the key for `validate()` and `test()` after `fit()`, and never destroys the
    first.
    """
    if model is not None and "ds_slide.integration.ownership" in sys.modules:  # otherwise there is no such engine
        from ds_slide.integration import ownership

        ownership.leave_to_stock(model)


def _take_from_stock(model: Any) -> None:
    """Remove the hooks of a stock engine that has `model`, or a module in it, and was not destroyed: they would gather
    parameters that DS-Slide has bound, as in Lightning's `fit()` after `validate()`."""
    for module in model.modules():
        earlier = STOCKS.pop(module, None)
        engine = None if earlier is None else earlier()
        if engine is None:
            continue
        engine.optimizer.destroy()
        for handle in _hooks_of(engine):  # the hooks keep that engine and its states alive
            handle.remove()


def _discard(engine: Any) -> None:
    """Discard an engine whose constructor failed: end its lanes, give back memory and disk, and take its hooks from the
    model, where they would run under the next engine."""
    found = vars(engine)
    if (optimizer := found.get("optimizer")) is not None:
        optimizer.destroy()
    for handle in _hooks_of(engine):
        handle.remove()


def _hooks_of(engine: Any) -> list[Any]:
    """Return the handles of the hooks that DeepSpeed's engine has in its model."""
    handles = (vars(engine).get(name) for name in ("module_forward_pre_hook", "module_forward_post_hook"))
    return [handle for handle in handles if handle is not None]


# ----------------------------------------------------------------------------------------------------------------------
# The other wrapped methods run in these contexts. An engine without the key has none.


@contextmanager
def _ours_is_built(engine: Any, *_args: Any, **_kwargs: Any) -> Iterator[None]:
    slide = slide_config(engine._config)
    if slide is None:
        yield
        return
    # Imported before the swap: its class statement names the stage-3 class as its base.
    import deepspeed.runtime.superoffload.superoffload_stage3  # noqa: F401
    from deepspeed.runtime import engine as engine_module
    from deepspeed.runtime.zero import stage3

    from ds_slide.integration.optimizer import SlideZeroOptimizer
    from ds_slide.integration.parameter_offload import SlideZeroOffload
    from ds_slide.integration.selfcheck import replaced

    # Stock gives DeepSpeedZeRoOffload no process group: it takes the parameters' group.
    group = engine.seq_data_parallel_group
    with_optimizer = functools.partial(SlideZeroOptimizer, slide=slide)
    without_optimizer = functools.partial(SlideZeroOffload, slide=slide, dp_process_group=group)
    with (
        replaced(stage3, "DeepSpeedZeroOptimizer_Stage3", with_optimizer),
        replaced(engine_module, "DeepSpeedZeRoOffload", without_optimizer),
    ):
        yield


def _no_kernels_are_built(engine: Any, *_args: Any, **_kwargs: Any) -> AbstractContextManager[None]:
    if slide_config(engine._config) is None:
        return nullcontext()
    from ds_slide.integration.update_rules import without_kernels

    return without_kernels()


def _kernels_wait_for_use(*_args: Any, **_kwargs: Any) -> AbstractContextManager[None]:
    if slide_config(_config_of_accelerate()) is None:
        return nullcontext()
    from ds_slide.integration.update_rules import kernels_on_use

    return kernels_on_use()


def _config_of_accelerate() -> Any:
    """Return the DeepSpeed config that accelerate will give `initialize`; None where it is not used or not set up."""
    state = sys.modules.get("accelerate.state")
    if state is None or not state.is_initialized():
        return None
    plugin = state.AcceleratorState().deepspeed_plugin
    return None if plugin is None else plugin.deepspeed_config


@contextmanager
def _weights_stay(engine: Any, model: nn.Module, *_args: Any, **_kwargs: Any) -> Iterator[None]:
    if slide_config(engine._config) is None:
        yield
        return
    from ds_slide.model.subclasses import take_apart
    from ds_slide.patching.adapters import refuse_merging

    take_apart(model)  # before DeepSpeed converts and moves parameters
    refuse_merging(model)
    with weights_stay(engine):
        yield


# ----------------------------------------------------------------------------------------------------------------------
# Weights that the script made in host memory wait there for their state buffers.
#
# Stock moves a model that was not built under `deepspeed.zero.Init` to the accelerator as a whole before it partitions
# it. A model that needs offloading does not fit there: 24 GB for 12 G parameters. Only buffers belong there;
# `partitions.DeepSpeedClients` reads each unit's weights where they are.


@contextmanager
def weights_stay(engine: Any) -> Iterator[None]:
    """Let `DeepSpeedEngine._configure_distributed_model` neither move nor broadcast parameters.

    `partitions.DeepSpeedClients` broadcasts them, one at a time on the accelerator: stock would hand NCCL host memory
    here.
    """
    from deepspeed.runtime.zero.partition_parameters import is_zero_param

    moves = not engine.dont_change_device
    engine.dont_change_device = True
    engine._broadcast_model = lambda: None
    try:
        yield
    finally:
        del engine._broadcast_model
        engine.dont_change_device = not moves
    # As in stock. Under zero.Init the buffers are on the accelerator already, with the parameters.
    if moves and not any(is_zero_param(parameter) for parameter in engine.module.parameters()):
        move_all_but_parameters(engine.module, engine.device)


def move_all_but_parameters(module: nn.Module, device: torch.device) -> None:
    """Move buffers, and other tensors that a module's own `_apply` moves, but no parameters, gradients and packed
    weights in buffers: the engine moves these (`ds_slide.patching.packed`)."""
    from ds_slide.model.carried import packed_tensors

    stay = {id(parameter.grad) for parameter in module.parameters()} | {id(each) for each in packed_tensors(module)}
    moved: dict[torch.Tensor, torch.Tensor] = {}  # two modules may share one

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, nn.Parameter) or id(tensor) in stay:
            return tensor
        if tensor not in moved:
            moved[tensor] = tensor.to(device)
        return moved[tensor]

    module._apply(move)
