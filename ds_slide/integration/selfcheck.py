"""The private names of DeepSpeed that this room relies on, and the check that they are there and look as expected.

The check runs when an engine with "ds_slide" enabled is built, before anything else: a DeepSpeed that has changed is
reported as what it is instead of failing somewhere in the middle, and it does not run for an engine without the key.
"""

import functools
import importlib
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from ds_slide.errors import SlideError
from ds_slide.report.tested import TESTED

SUPPORTED_VERSIONS, TESTED_VERSION = TESTED["deepspeed"].accepted, TESTED["deepspeed"].version
_FIRST_VERSION = (0, 19)
_END_VERSION = (0, 20)


@dataclass(frozen=True)
class Symbol:
    """`path` in `module`; for a function also the parameters it must start with, and those it must have anywhere, all
    separated by spaces."""

    module: str
    path: str
    leading: str | None = None
    anywhere: str = ""

    def __str__(self) -> str:
        return f"{self.module}.{self.path}"

    def fault(self) -> str | None:
        """Return a phrase if the symbol is missing or has other parameters than expected, otherwise None."""
        try:
            value: Any = functools.reduce(getattr, self.path.split("."), importlib.import_module(self.module))
        except (ImportError, AttributeError):
            return f"{self} is missing"
        if self.leading is None:
            return None
        # DeepSpeed's instrument_w_nvtx makes a function (*args, **kwargs) without functools.wraps; the original is in
        # the closure.
        while getattr(value, "__name__", "") == "wrapped_fn":
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            inner = [content for content in cells if isinstance(content, FunctionType)]
            if len(inner) != 1:
                break
            value = inner[0]
        actual, leading = list(inspect.signature(value).parameters), self.leading.split()
        if actual[: len(leading)] != leading:
            return f"{self} takes ({', '.join(actual)}) instead of ({', '.join(leading)}, ...)"
        lacking = [name for name in self.anywhere.split() if name not in actual]
        return f"{self} has no parameter {', '.join(lacking)}" if lacking else None


def _methods(module: str, owner: str, **signatures: str) -> Iterator[Symbol]:
    """Methods of one class: name="parameters after self, separated by spaces"."""
    for name, parameters in signatures.items():
        yield Symbol(module, f"{owner}.{name}", f"self {parameters}")


_ENGINE = "deepspeed.runtime.engine"
_STAGE3 = "deepspeed.runtime.zero.stage3"
_PARTITION = "deepspeed.runtime.zero.partition_parameters"
_OFFLOAD = "deepspeed.runtime.zero.parameter_offload"
_SCALER = "deepspeed.runtime.fp16.loss_scaler"

SYMBOLS: tuple[Symbol, ...] = (
    # activation.py
    Symbol(
        _ENGINE,
        "DeepSpeedEngine.__init__",
        "self args model optimizer",
        "mpu config config_class mesh_device dont_change_device",
    ),
    *_methods(_ENGINE, "DeepSpeedEngine", _configure_zero_optimizer="optimizer", _configure_distributed_model="model"),
    *_methods(_ENGINE, "DeepSpeedEngine", _broadcast_model=""),
    Symbol("deepspeed.runtime.superoffload.superoffload_stage3", "SuperOffloadOptimizer_Stage3"),
    Symbol(_ENGINE, "DeepSpeedZeRoOffload"),
    Symbol("deepspeed.ops.adam.cpu_adam", "DeepSpeedCPUAdam.__init__", "self model_params"),
    # assemble.py, early.py
    Symbol("deepspeed.utils.groups", "_get_sequence_parallel_world_size", ""),
    Symbol("deepspeed.runtime.torch_autocast", "has_comm_dtype", "param"),
    Symbol("deepspeed.runtime.torch_autocast", "get_comm_dtype", "param"),
    Symbol("deepspeed.runtime.torch_autocast", "get_default_autocast_lower_precision_modules", ""),
    Symbol("deepspeed.runtime.config", "DtypeEnum"),
    # planning.py
    Symbol("deepspeed.runtime.config", "DeepSpeedConfig.__init__", "self config"),
    *_methods(_ENGINE, "DeepSpeedEngine", get_data_types=""),
    Symbol(_ENGINE, "DeepSpeedEngine.communication_data_type"),
    # parameter_offload.py
    Symbol(_OFFLOAD, "DeepSpeedZeRoOffload.__init__", "self module timers ds_config", "dp_process_group"),
    *_methods(
        _OFFLOAD,
        "DeepSpeedZeRoOffload",
        _register_deepspeed_module="module",
        partition_all_parameters="",
        release_backward_leftovers="",
        empty_partition_cache="",
        destroy="",
    ),
    # engine_methods.py
    *_methods(_ENGINE, "DeepSpeedEngine", _backward_prologue="", _take_model_step="lr_kwargs", steps_per_print=""),
    Symbol("deepspeed.monitor.monitor", "MonitorMaster.write_events", "self event_list"),
    # throughput.py
    *_methods(
        "deepspeed.utils.timer",
        "ThroughputTimer",
        __init__="config batch_size start_step steps_per_output monitor_memory logging_fn",
        start="",
        stop="global_step report_speed",
        avg_samples_per_sec="",
    ),
    # checkpoint*.py
    *_methods(
        _ENGINE,
        "DeepSpeedEngine",
        save_checkpoint="save_dir tag client_state save_latest exclude_frozen_parameters",
        load_checkpoint="load_dir tag load_module_strict load_optimizer_states load_lr_scheduler_states "
        "load_module_only custom_load_fn",
        _save_checkpoint="save_dir tag client_state exclude_frozen_parameters",
        _load_checkpoint="load_dir tag load_module_strict load_optimizer_states load_lr_scheduler_states "
        "load_module_only custom_load_fn",
        _load_zero_checkpoint="load_dir tag load_optimizer_states",
        _checkpoint_tag_validation="tag",
        _copy_recovery_script="save_path",
        load_module_state_dict="checkpoint strict custom_load_fn fetch_z3_params",
        _get_all_ckpt_names="checkpoints_path tag",
        _get_ckpt_name="checkpoints_path tag",
        _get_zero_ckpt_name="checkpoints_path tag",
        _get_zero_frozen_param_attributes="attr_func",
        _get_param_fragment_func="param",
        use_node_local_storage="",
    ),
    *_methods(
        "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine",
        "TorchCheckpointEngine",
        save="state_dict path",
        load="path map_location",
    ),
    Symbol("deepspeed.git_version_info", "version"),
    Symbol("deepspeed.utils.zero_to_fp32", "get_fp32_state_dict_from_zero_checkpoint", "checkpoint_dir tag"),
    Symbol(_SCALER, "DynamicLossScaler"),
    Symbol(_SCALER, "LossScaler"),
    Symbol("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    *(
        Symbol("deepspeed.checkpoint.constants", name)
        for name in (
            "DS_VERSION FP32_FLAT_GROUPS FROZEN_PARAM_FRAGMENTS FROZEN_PARAM_SHAPES OPTIMIZER_STATE_DICT PARAM "
            "PARAM_SHAPES"
        ).split()
    ),
    # optimizer.py, groups.py, states.py
    *_methods(
        "deepspeed.runtime.base_optimizer",
        "ZeROOptimizer",
        __init__="",
        clear_backward_seen_flag="",
        set_gradient_accumulation_boundary="is_boundary",
    ),
    Symbol(_SCALER, "CreateLossScaler", "dtype static_loss_scale dynamic_scaling dynamic_loss_args"),
    *_methods(
        _STAGE3,
        "DeepSpeedZeroOptimizer_Stage3",
        _create_fp16_sub_groups="params_group",
        _get_trainable_parameter_groups="",
        _link_all_hp_params="",
        _update_scale="has_overflow",
    ),
    Symbol(_STAGE3, "DeepSpeedZeroOptimizer_Stage3.loss_scale"),
    Symbol(_STAGE3, "DeepSpeedZeroOptimizer_Stage3.param_groups"),
    Symbol(_OFFLOAD, "FWD_MODULE_STACK"),
    Symbol(_OFFLOAD, "ZeROOrderedDict.__init__", "self parent_module"),
    Symbol(_PARTITION, "_init_external_params", "module"),
    Symbol(
        _STAGE3,
        "DeepSpeedZeroOptimizer_Stage3.__init__",
        "self module init_optimizer param_names timers ds_config",
        "dp_process_group clip_grad gradient_accumulation_dtype gradient_accumulation_steps sub_group_size "
        "static_loss_scale dynamic_loss_scale dynamic_loss_args",
    ),
    *_methods(
        _STAGE3,
        "DeepSpeedZeroOptimizer_Stage3",
        backward_prologue="",
        backward_epilogue="",
        overlapping_partition_gradients_reduce_epilogue="",
        independent_gradient_partition_epilogue="",
        reduce_ready_partitions_and_remove_grads="param",
        step="closure",
        zero_grad="set_to_none",
        get_full_hp_param="param optim_state_key",
        set_full_hp_param="value param optim_state_key",
        get_local_fp32_param="param optim_state_key",
        set_local_hp_param="value param optim_state_key",
        get_fp32_grad_for_param="param",
        set_fp32_grad_for_param="value param",
        get_local_fp32_grad_for_param="param",
        set_local_grad_for_param="value param",
        update_fp32_grad_for_param_vectorized="update_func param_list",
        get_hp_param_device="param optim_state_key",
        checkpoint_event_prologue="",
        checkpoint_event_epilogue="",
        state_dict="",
        load_state_dict="state_dict_list load_optimizer_states load_from_fp32_weights checkpoint_folder load_serial",
        refresh_fp32_params="",
        _restore_from_bit16_weights="",
        finalize_gradient_accumulation_boundary="",
        clear_backward_seen_flag="",
        scale_if_loss="value",
        set_gradient_accumulation_boundary="is_boundary",
        empty_partition_cache="",
        offload_states="include",
        reload_states="",
        destroy="",
    ),
    # partitions.py, parameters.py
    Symbol(_PARTITION, "Init.__init__", "self module data_parallel_group", "remote_device pin_memory dtype"),
    *_methods(_PARTITION, "Init", _convert_to_deepspeed_param="param"),
    Symbol(_PARTITION, "is_zero_param", "parameter"),
    Symbol(_PARTITION, "ZeroParamStatus.AVAILABLE"),
    Symbol(_PARTITION, "ZeroParamStatus.NOT_AVAILABLE"),
    Symbol(_PARTITION, "PartitionedParamStatus.AVAILABLE"),
)


def check_deepspeed() -> None:
    """Raise SlideError when the installed DeepSpeed is outside SUPPORTED_VERSIONS or lacks what SYMBOLS lists."""
    import deepspeed

    found = faults(SYMBOLS)
    if _FIRST_VERSION <= (deepspeed.__version_major__, deepspeed.__version_minor__) < _END_VERSION and not found:
        return
    details = f": {', '.join(found)}" if found else ""
    raise SlideError(
        f"DS-Slide is written for DeepSpeed {SUPPORTED_VERSIONS} and tested with {TESTED_VERSION}, but "
        f"{deepspeed.__version__} is installed{details}; run pip install deepspeed=={TESTED_VERSION} or set "
        "ds_slide.enabled to false"
    )


def check_extension() -> None:
    """Raise SlideError when the C++ extension of this package is not built or does not load."""
    try:
        import ds_slide._native  # noqa: F401
    except ImportError as error:
        raise SlideError(
            f"the C++ extension ds_slide._native does not load ({error}); install the wheel of a release, or build it "
            "by `pip install .` in the source folder, which needs a C++17 compiler, or set ds_slide.enabled to false"
        ) from error


def faults(symbols: Iterable[Symbol]) -> list[str]:
    """Return one phrase for each symbol that is missing or has other parameters than expected."""
    return [fault for symbol in symbols if (fault := symbol.fault()) is not None]


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Let a name of DeepSpeed be `value` meanwhile."""
    stock = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, stock)
