"""Refusals of unsupported settings, models and optimizers, by name, before any memory is taken.

Two entrances: `check_deepspeed_config` when the engine starts (nothing but the parsed config, the model and the
client's optimizer exist yet), `check_supported` when the ZeRO optimizer is built (its arguments are final). Both report
every problem that they find, one sentence and one line each.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_slide.config import SlideConfig, shown
from ds_slide.errors import SlideConfigError
from ds_slide.integration import update_rules
from ds_slide.integration.refused import (
    FP32_STATES,
    REFUSED_ENGINE_SETTINGS,
    REFUSED_ZERO_SETTINGS,
    Values,
    compressed_engine_problems,
    compressed_json_problems,
    compressed_rule_problems,
    setting_problems,
)
from ds_slide.model.carried import TRAINED_DTYPES
from ds_slide.model.experts import adapters_of_parameters
from ds_slide.model.subclasses import can_be_taken_apart, is_made_of_tensors
from ds_slide.optim.client import ClientRule, trial
from ds_slide.optim.muon import MuonRule
from ds_slide.optim.rule import UpdateRule
from ds_slide.plan.ssd_settings import ssd_problems
from ds_slide.runtime.updates.threads import first_unusable_core

_NO_EXPERTS = (
    "DS-Slide has no expert parallelism; use the experts of a transformers model, whose states are divided over all "
    "ranks like other states"
)
_FOREIGN_MODULES = {
    ("deepspeed", "PipelineModule"): "DS-Slide has no pipeline parallelism; use a model without",
    ("deepspeed", "MoE"): _NO_EXPERTS,
    ("deepspeed", "AutoEPMoELayer"): _NO_EXPERTS,
}
_PASS_MPU = "pass the mpu that UlyssesSPAttentionHF.register_with_transformers returns"
_MESH = "mesh_param, or data_parallel_size beside sequence_parallel_size"


def check_deepspeed_config(
    config: Any,
    slide: SlideConfig,
    *,
    model: nn.Module,
    client_optimizer: Any = None,
    mpu: Any = None,
    mesh_device: Any = None,
) -> None:
    """Refuse the requests of a parsed `DeepSpeedConfig` that DS-Slide cannot fulfil.

    `client_optimizer` and `mpu` are the arguments of `deepspeed.initialize`. `mesh_device`: made of its `mesh_param`,
    or of the JSON. Raises SlideConfigError.
    """
    require_stage(int(config.zero_optimization_stage))
    values = values_of_config(config) | {"mpu": mpu, "mesh_device": mesh_device}
    trains = has_optimizer(config.optimizer_name, client_optimizer)
    rule = update_rules.asked_for(config.optimizer_name, client_optimizer)
    raise_all(
        *setting_problems(values, (*REFUSED_ENGINE_SETTINGS, *REFUSED_ZERO_SETTINGS)),
        *autocast_problems(values),
        *parallel_problems(values),
        *sequence_problems(values, slide),
        *offload_problems(values),
        *ssd_problems(slide, config._param_dict),
        *(state_dtype_problems(slide) if trains else ()),
        *rule_problems(slide, rule),
        *client_problems(values, slide, rule),
        *matrix_problems(values, slide, rule),
        *(compressed_json_problems(values, slide, rule) if trains else ()),
        *(deferral_problems(values, slide) if trains else ()),
        *(core_problems(slide) if trains else ()),
        *model_problems(model),
        *subclass_problems(model),
        *adapter_problems(model),
        *(backward_problems(model) if trains else ()),
        *optimizer_choice_problems(config.optimizer_name, client_optimizer),
    )


def check_supported(kwargs: Values, init_optimizer: Any, module: nn.Module, slide: SlideConfig) -> None:
    """Refuse arguments of DeepSpeedZeroOptimizer_Stage3's constructor that DS-Slide cannot honour.

    `kwargs`: the constructor's keyword arguments by DeepSpeed's names; an absent one counts as off.
    `init_optimizer`: the optimizer that brings the hyperparameters. `module`: the model. Raises SlideConfigError.
    """
    values, rule = dict(kwargs), update_rules.asked_for(None, init_optimizer)
    # The argument names of these two settings differ from their JSON names.
    values["prescale_gradients"] = not values.get("postscale_gradients", True)
    values["zero_quantized_gradients"] = values.get("all2all_process_group") is not None
    values["fp16"] = gradient_dtype(kwargs, module) == torch.float16
    raise_all(
        *setting_problems(values, REFUSED_ZERO_SETTINGS),
        *parallel_problems(values),
        *offload_problems(values),
        *deferral_problems(values, slide),
        *dtype_problems(values, module),
        *model_problems(module),
        *optimizer_problems(init_optimizer),
        *rule_problems(slide, rule),
        *client_problems(values, slide, rule),
        *matrix_problems(values, slide, rule),
        *compressed_rule_problems(slide, rule),
        *compressed_engine_problems(kwargs, init_optimizer, slide),
    )
    ranks = dist.get_world_size(kwargs.get("dp_process_group")) if dist.is_initialized() else 1
    raise_all(*matrix_ranks_problems(rule, ranks, slide))
    raise_all(*trial_problems(rule, ranks, slide))  # after the others: it runs the client's code


def require_values(model: nn.Module) -> None:
    """Raise SlideConfigError for a model that was built on the meta device and not loaded."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise SlideConfigError(
                f"parameter {name} is on the meta device, where it has no values; load the checkpoint into the model "
                "before deepspeed.initialize"
            )


def check_without_optimizer(module: nn.Module) -> None:
    """Refuse a model, as it is when the engine is built, whose forwards DS-Slide cannot run. Raises
    SlideConfigError."""
    raise_all(*dtype_problems({}, module), *model_problems(module))


def has_optimizer(json_name: str | None, client_optimizer: Any) -> bool:
    """Whether there is an optimizer, as DeepSpeed decides it. Without one the engine runs forwards only."""
    return bool(client_optimizer) or bool(json_name)


def require_stage(stage: Any) -> None:
    """Raise SlideConfigError for another stage, without other problems: the other settings were made for that stage."""
    if stage != 3:
        problem = f"zero_optimization.stage is {shown(stage)}, but DS-Slide is an engine for stage 3"
        raise SlideConfigError(f'{problem}; set it to 3 or remove "ds_slide"')


def values_of_config(config: Any) -> dict[str, Any]:
    """Return the settings that the checks read from a parsed `DeepSpeedConfig`. A version may lack some of them."""
    zero, fp16, bf16 = config.zero_config, config.float16_config, config.bfloat16_config
    return {
        "offload_optimizer_config": zero.offload_optimizer,
        "offload_param_config": zero.offload_param,
        "zenflow_config": zero.zenflow,
        "zero_hpz_partition_size": zero.zero_hpz_partition_size,
        "zero_quantized_weights": zero.zero_quantized_weights,
        "zero_quantized_nontrainable_weights": zero.zero_quantized_nontrainable_weights,
        "zero_quantized_gradients": zero.zero_quantized_gradients,
        "mics_shard_size": getattr(zero, "mics_shard_size", -1),
        "elastic_checkpoint": zero.elastic_checkpoint,
        "reduce_scatter": zero.reduce_scatter,
        "prescale_gradients": config.prescale_gradients,
        "gradient_predivide_factor": config.gradient_predivide_factor,
        "clip_grad": config.gradient_clipping,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "fp16": fp16.enabled,
        "fp16_master_weights_and_gradients": fp16.fp16_master_weights_and_grads,
        "bf16_master_weights_and_gradients": getattr(bf16, "bf16_master_weights_and_grads", False),
        "bf16_optimizer_states": getattr(bf16, "bf16_optimizer_states", False),
        "torch_autocast": config.torch_autocast_enabled,
        "torch_autocast_dtype": config.torch_autocast_dtype,
        "hybrid_engine": config.hybrid_engine.enabled,
        "deepcompile": config.compile_config.deepcompile,
        "autotp_size": config.tensor_parallel_config.autotp_size,
        "expert_parallel": getattr(getattr(config, "expert_parallel_config", None), "enabled", False),
        "sequence_parallel_size": config._param_dict.get("sequence_parallel_size", 1),
        "pipeline_loading_checkpoint": zero.pipeline_loading_checkpoint,
        "managed_gradient_accumulation": getattr(config, "managed_gradient_accumulation", True),
    }


def autocast_problems(values: Values) -> Iterator[str]:
    """`torch_autocast` in another data type than bf16: fp16 needs torch's gradient scaler in the step."""
    if not values.get("torch_autocast"):
        return
    dtype = values.get("torch_autocast_dtype")
    if dtype is None:
        yield 'torch_autocast.enabled is true, but torch_autocast.dtype is not set; set it to "bfloat16"'
    elif dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        yield f'torch_autocast.dtype is "{name}", but DS-Slide runs autocast in bfloat16 only; set it to "bfloat16"'
    if values.get("fp16"):
        yield "torch_autocast.enabled and fp16.enabled are both true, but autocast is for a model in fp32; turn one off"


def parallel_problems(values: Values) -> Iterator[str]:
    """Yield a problem for an `mpu` of model parallelism. An mpu of sequences has `initialize_sequence_parallel`."""
    mpu = values.get("mpu")
    if mpu is not None and not hasattr(mpu, "initialize_sequence_parallel"):
        yield (
            "an mpu is passed to deepspeed.initialize, but DS-Slide has no model parallelism; pass mpu=None, or for "
            f"sequence parallelism {_PASS_MPU}"
        )


def sequence_problems(values: Values, slide: SlideConfig) -> Iterator[str]:
    """Yield problems of sequences that are divided over ranks. A JSON alone has neither `mpu` nor `mesh_device`."""
    size, mesh = values.get("sequence_parallel_size", 1), values.get("mesh_device")
    mpu: Any = values.get("mpu")
    ranks = mpu.get_sequence_parallel_world_size() if hasattr(mpu, "initialize_sequence_parallel") else 1
    if (mesh is not None and mesh.size(1) > 1) or (size != 1 and "data_parallel_size" in values):
        yield (
            f"a mesh divides sequences ({_MESH}), but under ZeRO-3 DeepSpeed does not add up the gradients of their "
            f"parts; {_PASS_MPU}"
        )
    elif "mpu" in values and size not in (1, ranks):
        yield (
            f"sequence_parallel_size is {shown(size)}, but the mpu of deepspeed.initialize divides a sequence among "
            f"{ranks} ranks; remove it, and {_PASS_MPU}"
        )
    if ranks > 1 and not values.get("reduce_scatter", True):
        yield (
            "zero_optimization.reduce_scatter is false, with which DeepSpeed adds up the gradients of a divided "
            "sequence, but DS-Slide averages them, as DeepSpeed does with true; set it to true"
        )
    if ranks > 1 and slide.compression is not None:
        yield "ds_slide.compression is set, but it does not compress gradients of divided sequences; remove it"


def offload_problems(values: Values) -> Iterator[str]:
    """Yield problems of DeepSpeed's own offload sections. They are not needed; the device "nvme" opens the SSD tier."""
    settings = values.get("offload_optimizer_config")
    path = "zero_optimization.offload_optimizer"
    if (ratio := getattr(settings, "ratio", 1.0)) != 1.0:
        yield f"{path}.ratio is {shown(ratio)}, but DS-Slide places states by ds_slide.gpu_states; set the ratio to 1.0"
    if getattr(settings, "super_offload", False):
        yield f"{path}.super_offload is true, but it replaces the optimizer that DS-Slide replaces; set it to false"
    if values.get("zenflow_config") is not None:
        yield "zero_optimization.zenflow is set, but it changes the update that DS-Slide does; remove it"


def state_dtype_problems(slide: SlideConfig) -> Iterator[str]:
    """Yield a problem where moments in a short format are to be on the GPU: only the CPU updates them."""
    if slide.state_dtype != "fp32" and slide.gpu_states not in ("auto", 0):
        yield (
            f'ds_slide.state_dtype is "{slide.state_dtype}", which is updated on the CPU, but ds_slide.gpu_states is '
            f"{slide.gpu_states}; set gpu_states to 0"
        )


def rule_problems(slide: SlideConfig, rule: UpdateRule | None) -> Iterator[str]:
    """Yield a problem where the update rule has no kernels for the format of optimizer states. `rule`: None where it is
    not known yet."""
    if rule is not None and slide.state_dtype not in rule.state_dtypes:
        kept = " and ".join(rule.state_dtypes)
        yield (
            f'ds_slide.state_dtype is "{slide.state_dtype}", but {rule.name} keeps its states in {kept} only; set it '
            'to "fp32", or use AdamW'
        )


def core_problems(slide: SlideConfig) -> Iterator[str]:
    """Yield a problem where the update threads could not be pinned to a core."""
    if isinstance(slide.cpu_cores, str):
        return
    core = first_unusable_core(slide.cpu_cores)
    if core is not None:
        yield (
            f"ds_slide.cpu_cores names core {core}, which this process may not use, or which this machine has not; "
            'choose cores that `taskset -cp $$` lists, or set it to "none" or "auto"'
        )


def deferral_problems(values: Values, slide: SlideConfig) -> Iterator[str]:
    """Yield a problem where `ds_slide.defer_updates` is false, but a setting needs gradients held until backward has
    ended."""
    if slide.defer_updates is not False:
        return
    reasons = []
    if (clip := values.get("clip_grad", 0.0)) > 0:
        reasons.append(f"gradient_clipping is {clip}")
    if (steps := values.get("gradient_accumulation_steps", 1)) > 1:
        reasons.append(f"gradient_accumulation_steps is {steps}")
    if not values.get("managed_gradient_accumulation", True):
        reasons.append("managed_gradient_accumulation is false")
    if values.get("fp16"):
        reasons.append("fp16 can overflow")
    if reasons:
        yield (
            f"ds_slide.defer_updates is false, but {' and '.join(reasons)}, so that no update is safe before backward "
            'has ended; set it to "auto", or turn the other off'
        )


def dtype_problems(values: Values, module: nn.Module) -> Iterator[str]:
    """Yield problems of parameters whose data type cannot be trained, and of gradients added up in a shorter type.
    Frozen parameters may have any data type."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype not in TRAINED_DTYPES:
            yield (
                f"parameter {name} is {parameter.dtype} and requires a gradient, but DS-Slide trains bfloat16, float16 "
                f"and float32 (masters, optimizer states and checkpoints are fp32); {_way_out(parameter.dtype)}"
            )
            break
    reduced = gradient_dtype(values, module)
    if reduced not in TRAINED_DTYPES:
        yield f"communication_data_type is {reduced}, but DS-Slide reduces bfloat16, float16 and float32; remove it"
    accumulation = accumulation_dtype(values, module)
    if accumulation not in (None, reduced, torch.float32):
        yield (
            f"gradients are reduced in {reduced} (communication_data_type) and added up in {accumulation} "
            "(data_types.grad_accum_dtype), which loses what the first keeps; set the second to fp32"
        )


def _way_out(dtype: torch.dtype) -> str:
    if dtype == torch.float64:
        return "convert the model with model.float(), or freeze the parameter"
    return "freeze it with requires_grad_(False), which any data type allows, and train adapters (PEFT) beside it"


def optimizer_choice_problems(json_name: str | None, client_optimizer: Any) -> Iterator[str]:
    """Yield problems of the requested optimizer: `optimizer.type` in the JSON, or the script's object or callable."""
    if isinstance(client_optimizer, torch.optim.Optimizer):
        yield from optimizer_problems(client_optimizer)
    elif client_optimizer is not None:
        return  # a callable: its optimizer is checked when it is made
    elif json_name is not None and not update_rules.has_name(json_name):
        yield (
            f'optimizer.type is "{json_name}", but DS-Slide has no such optimizer; use {update_rules.json_names()}, '
            "the name of a class of torch.optim, or give deepspeed.initialize an optimizer object"
        )


def optimizer_problems(optimizer: Any) -> Iterator[str]:
    """Yield problems of the optimizer object whose parameter groups DS-Slide takes over."""
    if not getattr(optimizer, "fp32_optimizer_states", True):
        yield f"optimizer.params.fp32_optimizer_states is false, but {FP32_STATES}; remove it"
    yield from update_rules.rule_of(optimizer).problems(optimizer)


def client_problems(values: Values, slide: SlideConfig, rule: UpdateRule | None) -> Iterator[str]:
    """Yield problems of settings beside a client's optimizer, which steps over whole units in host memory."""
    if not isinstance(rule, ClientRule):
        return
    if slide.gpu_states not in ("auto", 0):
        yield (
            f"ds_slide.gpu_states is {shown(slide.gpu_states)}, but {rule.name} steps in host memory, where its states "
            'are; set it to "auto" or 0, or use AdamW'
        )
    if _states_on_ssd(values):
        yield (
            f'zero_optimization.offload_optimizer.device is "nvme", but {rule.name} makes its states itself, in host '
            'memory; set it to "cpu", or use AdamW'
        )


def _states_on_ssd(values: Values) -> bool:
    """Whether the JSON wants optimizer states on SSD. A parsed config has an enum there, a JSON a text."""
    device = getattr(values.get("offload_optimizer_config"), "device", None)
    return getattr(device, "value", device) == "nvme"


def matrix_problems(values: Values, slide: SlideConfig, rule: UpdateRule | None) -> Iterator[str]:
    """Yield problems of settings beside Muon, whose matrices are whole."""
    if not isinstance(rule, MuonRule):
        return
    if slide.muon_norm == "update" and values.get("fp16"):
        yield (
            'ds_slide.muon_norm is "update", but fp16.enabled is true, whose loss scale an update does not carry; use '
            'bf16, or set muon_norm to "gradient"'
        )
    if _states_on_ssd(values):
        yield (
            f'zero_optimization.offload_optimizer.device is "nvme", but {rule.name} updates whole matrices, which '
            'chunks on SSD would cut; set it to "cpu", or use AdamW'
        )


def matrix_ranks_problems(rule: UpdateRule | None, ranks: int, slide: SlideConfig) -> Iterator[str]:
    """Yield a problem of the number of ranks."""
    if isinstance(rule, MuonRule) and ranks > 1 and slide.defer_updates is False:
        yield (
            f"ds_slide.defer_updates is false, but {rule.name} gathers the matrices of {ranks} ranks in the step; set "
            'it to "auto"'
        )


def trial_problems(rule: UpdateRule | None, ranks: int, slide: SlideConfig) -> Iterator[str]:
    """Yield what a few steps of a client's optimizer on small tensors have shown to be impossible."""
    if not isinstance(rule, ClientRule):
        return
    found = trial(rule)
    if found.problem:
        yield f"the optimizer {rule.name} {found.problem}"
    elif found.by_shape and ranks > 1 and not slide.flat_pieces:
        yield (
            f"the optimizer {rule.name} treats matrices by their shape, but each of {ranks} ranks has a flat piece of "
            'each parameter, on which it would be another optimizer; set "ds_slide": {"flat_pieces": true} to have '
            "that, as under stock ZeRO-3, or use one rank"
        )


def model_problems(model: nn.Module) -> Iterator[str]:
    """Yield a problem for a module that brings its own parallelism, or for a parameter of an expert."""
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            why = _FOREIGN_MODULES.get((_package(kind), kind.__name__))
            if why is not None:
                where = f"module {name}" if name else "the model"
                yield f"{where} is a DeepSpeed {kind.__name__}, but {why}"
                return
    for name, parameter in model.named_parameters():
        if not getattr(parameter, "allreduce", True):
            yield f"parameter {name} is of an expert-parallel group (allreduce is False), but {_NO_EXPERTS}"
            return


def subclass_problems(model: nn.Module) -> Iterator[str]:
    """Yield a problem for a parameter that is a tensor subclass made of other tensors and cannot be taken apart."""
    for name, parameter in model.named_parameters():
        if is_made_of_tensors(parameter) and not can_be_taken_apart(parameter):
            yield (
                f"parameter {name} is a {type(parameter).__name__}, but DS-Slide trains and divides plain tensors; "
                "freeze it with requires_grad_(False), or build the model without tensor subclasses"
            )
            return


def adapter_problems(model: nn.Module) -> Iterator[str]:
    """Yield a problem for packed experts that PEFT was to adapt and has not found. It looks for parameters by name, and
    says nothing where another target matches."""
    configs: dict[str, Any] = getattr(model, "peft_config", None) or {}
    targets = {target for config in configs.values() for target in getattr(config, "target_parameters", None) or ()}
    adapted = adapters_of_parameters(model) if targets else {}
    for path, module in model.named_modules() if targets else ():
        there = {wrapper.parameter_name for wrapper in adapted.get(module, ())}
        for name in getattr(module, "parametrizations", {}).keys() - there:
            place = f"{path}.{name}".replace(".base_layer", "").removeprefix("base_model.model.")
            for target in targets:
                if f".{place}".endswith(f".{target}"):
                    yield (
                        f"target_parameters has {target}, but PEFT has put no adapter on {place}, because it is "
                        "packed; call get_peft_model inside of as_parameters (examples/packed_experts.py), or give "
                        "full names"
                    )
                    return


def backward_problems(model: nn.Module) -> Iterator[str]:
    """Yield a problem for gpt-oss' MXFP4 experts in the layout of their Triton kernels: gradients would pass by them
    without an error, in plain torch, too. Trainer refuses them."""
    for name, module in model.named_modules():
        if (_package(type(module)), type(module).__name__) == ("transformers", "Mxfp4GptOssExperts"):
            yield (
                f"the MXFP4 experts of {name} have no backward, because their kernels are for inference; load the "
                "model with quantization_config=Mxfp4Config(dequantize=True)"
            )
            return


def gradient_dtype(values: Values, module: nn.Module) -> torch.dtype:
    """Return the data type of reduced gradients. DeepSpeed gives it, by default the precision enabled in the JSON,
    whatever the parameters have. Otherwise it is the data type of the first trainable parameter, or of the first
    parameter."""
    given: torch.dtype | None = values.get("communication_data_type")
    parameters = sorted(module.parameters(), key=lambda parameter: not parameter.requires_grad)
    return given or (parameters[0].dtype if parameters else torch.float32)


def accumulation_dtype(values: Values, module: nn.Module) -> torch.dtype | None:
    """Return the data type of sums of several micro-batches' gradients; None where DeepSpeed gives none. It reduces the
    gradients of divided sequences in fp32 by default, and then rounds them to the model's precision. Here they stay."""
    if values.get("mpu") is not None and gradient_dtype(values, module) == torch.float32:
        return torch.float32
    given: torch.dtype | None = values.get("gradient_accumulation_dtype")
    return given


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def raise_all(*problems: str) -> None:
    """Raise one error for all problems, if there are any."""
    if problems:
        raise SlideConfigError("\n".join(problems))
