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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from ds_slide.integration import STOCKS

logger = logging.getLogger(__name__)

_wrapped_classes: set[type] = set()
_read_configs: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def install(engine_module: ModuleType) -> None:
    """Wrap `DeepSpeedEngine` of the module `deepspeed.runtime.engine`. Idempotent."""
    engine_class = engine_module.DeepSpeedEngine
    if engine_class in _wrapped_classes:
        return
    engine_class.__init__ = _checking(engine_class.__init__)
    # Where the method is gone, the constructor's check says so, but only for an engine with DS-Slide.
    if hasattr(engine_class, "_configure_zero_optimizer"):
        engine_class._configure_zero_optimizer = _choosing(engine_class._configure_zero_optimizer, engine_module)
    if hasattr(engine_class, "_configure_basic_optimizer"):
        engine_class._configure_basic_optimizer = _sparing(engine_class._configure_basic_optimizer)
    if hasattr(engine_class, "_configure_distributed_model"):
        engine_class._configure_distributed_model = _keeping(engine_class._configure_distributed_model)
    from deepspeed.ops.adam import cpu_adam
    from deepspeed.runtime import config as config_module
    from deepspeed.runtime.zero import partition_parameters

    from ds_slide.integration.zero_init import install_zero_init

    install_zero_init(partition_parameters.Init, slide_config)
    if hasattr(config_module.DeepSpeedConfig, "_initialize_params"):
        config_module.DeepSpeedConfig._initialize_params = _typed(config_module.DeepSpeedConfig._initialize_params)
    if hasattr(cpu_adam, "DeepSpeedCPUAdam"):
        cpu_adam.DeepSpeedCPUAdam.__init__ = _sparing_clients(cpu_adam.DeepSpeedCPUAdam.__init__)
    _wrapped_classes.add(engine_class)


def slide_config(ds_config: Any) -> Any:
    """Return the SlideConfig of a raw or parsed DeepSpeed config, None where DS-Slide is off. Raises SlideConfigError.

    A parsed config is read once for all callers. A raw config may change meanwhile: clients fill in its "auto" values.
    """
    if not hasattr(ds_config, "_param_dict"):
        return _read(ds_config)
    if ds_config not in _read_configs:
        _read_configs[ds_config] = _read(ds_config._param_dict)
    return _read_configs[ds_config]


def _read(raw: Any) -> Any:
    # Without the key nothing of DS-Slide is imported, let alone run.
    if not isinstance(raw, Mapping) or "ds_slide" not in raw:
        return None
    from ds_slide.integration.early import enabled_block

    return enabled_block(raw)


def _typed(original: Callable[..., None]) -> Callable[..., None]:
    """Return DeepSpeed's parser with a check of types before it."""

    @functools.wraps(original)
    def _initialize_params(self: Any, param_dict: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(param_dict, Mapping) and "ds_slide" in param_dict:
            from ds_slide.integration.early import check_types
            from ds_slide.integration.zero_init import reads_its_json

            check_types(param_dict, filled=not reads_its_json())
        original(self, param_dict, *args, **kwargs)

    return _initialize_params


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


def _checking(original: Callable[..., None]) -> Callable[..., None]:
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
        from ds_slide.integration.contract import check_deepspeed_config
        from ds_slide.integration.selfcheck import check_deepspeed, check_extension
        from ds_slide.report.log import show

        show()
        check_deepspeed()
        check_extension()
        check_deepspeed_config(
            parsed, slide, model=given["model"], client_optimizer=given.get("optimizer"), mpu=given.get("mpu")
        )
        # Imported after the check, since they need the names of DeepSpeed that it looks for.
        from ds_slide.integration import (
            checkpoint,
            gradients,
            inference,
            monitor,
            ownership,
        )

        _take_from_stock(given["model"])
        try:
            original(self, *args, **kwargs)
            if isinstance(self.optimizer, inference.SlideZeroOffload):
                inference.attach(self)
            else:
                monitor.attach(self)
                checkpoint.attach(self)
                gradients.attach(self)
                ownership.enter_training(self.optimizer)
            self.optimizer.engine_hooks = _hooks_of(self)
        except BaseException:
            _discard(self)
            raise

    return __init__


def _leave_to_stock(model: Any) -> None:
    """End an engine with DS-Slide that has `model`, if any, and leave the parameters as stock partitions them.

    Lightning builds an engine without the key for `validate()` and `test()` after `fit()`, and never destroys the
    first.
    """
    if model is not None and "ds_slide.integration.ownership" in sys.modules:  # otherwise there is no such engine
        from ds_slide.integration import ownership, parameters

        ownership.end_earlier_engine(model)
        parameters.leave_to_stock(model)


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
    if (optimizer := found.get("optimizer")) is not None:  # ours, by `_choosing`
        optimizer.destroy()
    for handle in _hooks_of(engine):
        handle.remove()


def _hooks_of(engine: Any) -> list[Any]:
    """Return the handles of the hooks that DeepSpeed's engine has in its model."""
    handles = (vars(engine).get(name) for name in ("module_forward_pre_hook", "module_forward_post_hook"))
    return [handle for handle in handles if handle is not None]


def _choosing(original: Callable[..., Any], engine_module: ModuleType) -> Callable[..., Any]:
    @functools.wraps(original)
    def _configure_zero_optimizer(self: Any, *args: Any, **kwargs: Any) -> Any:
        slide = slide_config(self._config)
        if slide is None:
            return original(self, *args, **kwargs)
        # Imported before the swap: its class statement names the stage-3 class as its base.
        import deepspeed.runtime.superoffload.superoffload_stage3  # noqa: F401
        from deepspeed.runtime.zero import stage3

        from ds_slide.errors import SlideError
        from ds_slide.integration.inference import SlideZeroOffload
        from ds_slide.integration.optimizer import SlideZeroOptimizer

        # Stock gives DeepSpeedZeRoOffload no process group: it takes the parameters' group.
        with_optimizer = functools.partial(SlideZeroOptimizer, slide=slide)
        without_optimizer = functools.partial(
            SlideZeroOffload, slide=slide, dp_process_group=self.seq_data_parallel_group
        )
        with (
            _replaced(stage3, "DeepSpeedZeroOptimizer_Stage3", with_optimizer),
            _replaced(engine_module, "DeepSpeedZeRoOffload", without_optimizer),
        ):
            optimizer = original(self, *args, **kwargs)
        if not isinstance(optimizer, SlideZeroOptimizer | SlideZeroOffload):
            raise SlideError(
                f"ds_slide.enabled is true, but DeepSpeed built a {type(optimizer).__name__}; set ds_slide.enabled to "
                "false, or report this with the DeepSpeed config"
            )
        return optimizer

    return _configure_zero_optimizer


@contextmanager
def _replaced(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    stock = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, stock)


def _sparing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _configure_basic_optimizer(self: Any, *args: Any, **kwargs: Any) -> Any:
        if slide_config(self._config) is None:
            return original(self, *args, **kwargs)
        from ds_slide.integration.update_rules import without_kernels

        with without_kernels():
            return original(self, *args, **kwargs)

    return _configure_basic_optimizer


def _sparing_clients(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if slide_config(_config_of_accelerate()) is None:
            original(self, *args, **kwargs)
            return
        from ds_slide.integration.update_rules import kernels_on_use

        with kernels_on_use():
            original(self, *args, **kwargs)

    return __init__


def _config_of_accelerate() -> Any:
    """Return the DeepSpeed config that accelerate will give `initialize`; None where it is not used or not set up."""
    state = sys.modules.get("accelerate.state")
    if state is None or not state.is_initialized():
        return None
    plugin = state.AcceleratorState().deepspeed_plugin
    return None if plugin is None else plugin.deepspeed_config


def _keeping(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _configure_distributed_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        if slide_config(self._config) is None:
            return original(self, *args, **kwargs)
        from ds_slide.integration.host_weights import weights_stay

        with weights_stay(self):
            return original(self, *args, **kwargs)

    return _configure_distributed_model
