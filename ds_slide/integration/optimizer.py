"""The facade: the ZeRO-3 optimizer object that DeepSpeedEngine, Hugging Face and checkpoint tools expect.

It is a subclass only because `isinstance` gates much of the engine. The stock constructor is not run: it would build
the partitions, hooks and buffers that DS-Slide replaces. The inherited methods in use are small arithmetic over
attributes that are set here: parameter groups, sub-groups, loss scale properties, the backward hook state.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from deepspeed.runtime.zero.partition_parameters import _init_external_params
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import nn
from torch.utils.hooks import RemovableHandle

from ds_slide.checkpoint import state_buffers
from ds_slide.checkpoint.archive import PIECE, materialized
from ds_slide.checkpoint.background import BackgroundSave
from ds_slide.checkpoint.restricted import MappedFiles
from ds_slide.checkpoint.state_buffers import require_no_update
from ds_slide.checkpoint.subgroups import States, SubGroups, load_settings
from ds_slide.checkpoint.universal import UniversalCheckpoint
from ds_slide.config import SlideConfig
from ds_slide.errors import SlideError
from ds_slide.integration import gradients, ownership, plain_copy
from ds_slide.integration import parameters as protocol
from ds_slide.integration.access import StateAccess, end_access
from ds_slide.integration.assemble import (
    assemble,
    autocast_is_enabled,
    precision_under_autocast,
    runtime_settings,
)
from ds_slide.integration.contract import check_supported, gradient_dtype
from ds_slide.integration.monitor import leaf_parameters, missing
from ds_slide.integration.newcomers import Newcomers, OptimizerGroups
from ds_slide.integration.ownership import part_in_backward
from ds_slide.integration.parameter_offload import Coordinator, ParameterOffload
from ds_slide.integration.update_rules import rule_of
from ds_slide.model.structure import Precisions
from ds_slide.optim.rule import Hyper
from ds_slide.runtime.core.clients import AS_THEY_ARE
from ds_slide.runtime.gradients.norm_watch import NormWatch
from ds_slide.runtime.unfreezing import Limits, give_states

_COUNTS = "ds_slide_update_counts"
"""Key of a checkpoint's optimizer states: update counts, by name, of the parameters that were off in some steps."""


class SlideZeroOptimizer(DeepSpeedZeroOptimizer_Stage3):
    """ZeRO stage 3 with the states streamed by `ds_slide.runtime`. Constructor arguments: `slide`, and stock's."""

    def __init__(
        self,
        module: nn.Module,
        init_optimizer: Any,
        param_names: Any,
        timers: Any,
        ds_config: Any,
        *,
        slide: SlideConfig,
        **kwargs: Any,
    ) -> None:
        ZeROOptimizer.__init__(self)
        check_supported(kwargs, init_optimizer, module, slide)
        ownership.end_earlier_engine(module)
        # The attributes that DeepSpeed reads, its parameter groups, and ZeRO-3's attributes of parameters.
        self._slide = slide
        self.async_save = slide.async_save
        self.require_manifest = slide.checkpoint.require_manifest
        self.names_said_to_be_refused: set[str] = set()
        self._set_stock_attributes(module, init_optimizer, param_names, timers, kwargs)
        protocol.convert(module, self.dp_process_group, self.dtype)
        self._groups = OptimizerGroups.of(init_optimizer, module)
        self._make_sub_groups()
        for child in module.modules():
            _init_external_params(child)
        # The runtime, from the settings, the group and the precision of each parameter.
        self.rule = rule_of(init_optimizer)
        settings = runtime_settings(
            slide,
            self.rule,
            ds_config,
            gradient_dtype(kwargs, module),
            self.gradient_accumulation_dtype,
            self.gradient_accumulation_steps,
            self.clip_grad > 0,
        )
        group_of = {
            parameter: group_id
            for parameters, group_id in zip(self.fp16_groups, self._group_ids, strict=True)
            for parameter in parameters
        }
        precisions: Precisions = {}
        if autocast_is_enabled(ds_config):
            precisions = precision_under_autocast(module, ds_config, group_of)
        self.runtime, self.kernels = assemble(module, group_of, settings, self.dp_process_group, precisions)
        try:
            self._take_over(module)
        except BaseException:
            self.destroy()
            raise

    def _take_over(self, module: nn.Module) -> None:
        """Connect the model's parameters, and the access to their states, with the runtime."""
        self.protocol = protocol.ParameterProtocol(self.runtime, self.dp_process_group, self._most_elements_of_small)
        self.access = StateAccess(self.runtime, self.protocol.places, self.dp_process_group, self.rule)
        self._serve_sub_groups()
        self._empty_parameter_groups()
        self._link_all_hp_params()
        self._norm_watch = NormWatch(self.runtime)
        self.parameter_offload = ParameterOffload(self.runtime, module, self.protocol)
        plain_copy.teach(module, self.protocol.whole_weights)
        ownership.enter(self, module)
        self.newcomers = self.runtime.newcomers = Newcomers(module, self.protocol.places, self.train_later)

    def train_later(self, parameters: Sequence[nn.Parameter]) -> None:
        """Give these parameters, which were frozen at first, optimizer states, and a place in the sub-groups."""
        names = {parameter: self.protocol.places[parameter][1].name for parameter in parameters}
        groups = {parameter: self._groups.index_of(parameter, names[parameter]) for parameter in parameters}
        give_states(self.runtime, groups, Limits(self._slide.host_memory, self._slide.gpu_memory))
        self.protocol.refresh()
        self._cut_into_sub_groups(self._groups.with_later(self.trainable_param_groups, groups))
        self._serve_sub_groups()

    def _serve_sub_groups(self) -> None:
        self.sub_groups = SubGroups(
            self.fp16_groups, self._group_ids, self.protocol.places, self.runtime, self.rule.state_names
        )

    def _set_stock_attributes(
        self, module: nn.Module, init_optimizer: Any, param_names: Any, timers: Any, kwargs: dict[str, Any]
    ) -> None:
        self.module = module
        self.optimizer = init_optimizer
        self.param_names = param_names
        self.timers = timers
        self.dtype = init_optimizer.param_groups[0]["params"][0].dtype
        self.master_weights_and_grads_dtype = torch.float32
        self.dp_process_group = kwargs["dp_process_group"]
        self.partition_count = dist.get_world_size(group=self.dp_process_group)
        self.clip_grad = kwargs.get("clip_grad", 0.0)
        self.gradient_accumulation_dtype = kwargs.get("gradient_accumulation_dtype") or self.dtype
        self.gradient_accumulation_steps = kwargs.get("gradient_accumulation_steps", 1)
        self.sub_group_size = kwargs.get("sub_group_size")
        self.elastic_checkpoint = False
        self.overflow = False
        self._global_grad_norm: Any = 0.0
        self.custom_loss_scaler = False
        self.external_loss_scale = None
        self.torch_autocast_gradscaler = None
        self.loss_scaler = CreateLossScaler(
            dtype=self.dtype,
            static_loss_scale=kwargs.get("static_loss_scale", 1.0),
            dynamic_scaling=kwargs.get("dynamic_loss_scale", False),
            dynamic_loss_args=kwargs.get("dynamic_loss_args"),
        )
        self.dynamic_loss_scale = self.loss_scaler.dynamic
        # Read by the engine and by checkpointing; DS-Slide owns its tiers, so DeepSpeed's swapper is never there.
        self.offload_optimizer = True
        self.swap_optimizer = False
        self.optimizer_swapper = None
        self.zenflow = False
        self.use_muon = False
        self.persistent_parameters: list[nn.Parameter] = []
        self._most_elements_of_small = int(kwargs.get("param_persistence_threshold", 100_000))
        self.offload_param = False
        self.params_in_nvme_and_cpu = False
        self.model_parallel_group = None
        self.model_parallel_rank = 0
        self._coalescing = False

    def __getattr__(self, name: str) -> Any:
        """Raise the error for an attribute of stock that DS-Slide does not have: most are stock's private state."""
        raise missing(name)

    @property
    def leaf_parameters(self) -> dict[nn.Module, list[nn.Parameter]]:
        return leaf_parameters(self.module, self.fp16_groups)

    def _make_sub_groups(self) -> None:
        self._cut_into_sub_groups(self._get_trainable_parameter_groups())

    def _cut_into_sub_groups(self, trainable: list[dict[str, Any]]) -> None:
        self.trainable_param_groups = trainable
        self.fp16_groups, self._group_ids = [], []
        for group in self.trainable_param_groups:
            for sub_group in self._create_fp16_sub_groups(group["params"]):
                self.fp16_groups.append(sub_group)
                self._group_ids.append(group["_ds_source_param_group_id"])
        self.sub_group_to_group_id = dict(enumerate(self._group_ids))

    def _empty_parameter_groups(self) -> None:
        # As in stock: the optimizer object carries hyper-parameters for schedulers, never tensors.
        for group in self.optimizer.param_groups:
            group["params"] = []
        # A group that is added to the script's own object would never be updated.
        self.optimizer.add_param_group = self._refuse_group

    @staticmethod
    def _refuse_group(param_group: Any) -> None:
        raise _no_further_groups(param_group)

    def _hypers(self) -> list[Hyper]:
        """Return the hyper-parameters of the coming update, by optimizer group."""
        step = self.runtime.step_count + 1
        return [self.rule.hyper_of(group, step, self.optimizer) for group in self.optimizer.param_groups]

    # ---- forward and backward, as the engine announces them ----------------------------------------------------

    def clear_backward_seen_flag(self) -> None:
        ZeROOptimizer.clear_backward_seen_flag(self)
        self.runtime.interruptions.nest()
        self._leave_interrupted_backward()
        # DeepSpeed finds the begin of backward by the tensors in the model's output. Where it finds none (an output
        # that is no tuple, list or dictionary) there is no prologue, and these are the hyper-parameters.
        self.runtime.begin_backward(self._hypers(), 1.0 / float(self.loss_scale))

    def scale_if_loss(self, value: Any) -> Any:
        """Return the scaled loss, before each backward. A loss whose first backward has ended with an exception has no
        prologue any more, only this call."""
        self.runtime.interruptions.notice()
        # The engine's module may have been called, not the engine: its output announces no backward.
        self.runtime.begin_backward(self._hypers(), 1.0 / float(self.loss_scale))
        return super().scale_if_loss(value)

    def backward_prologue(self) -> None:
        self.parameter_offload.require_hooks()
        self._leave_interrupted_backward()
        engine = None if self.engine is None else self.engine()
        of_another = None if self.runtime.deferred or engine is None else part_in_backward(engine)
        self.runtime.begin_backward(self._hypers(), 1.0 / float(self.loss_scale), of_another=of_another)

    def _leave_interrupted_backward(self) -> None:
        """Reset DeepSpeed's count of the backwards that have begun and not ended. A backward that has ended with an
        exception stays in that count, and the next `loss.backward()` would have no epilogue. Nor would a second
        `loss.backward()` since the last forward: DeepSpeed takes it for a part of the first, whose epilogue it has
        asked for already."""
        if not self.runtime.interruptions.backward_is_under_way():
            self._backward_active_depth = 0
            self._backward_hook_state.reset_for_new_step()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        super().set_gradient_accumulation_boundary(is_boundary)
        self.runtime.set_final(bool(is_boundary) and not self._coalescing)

    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
        self.independent_gradient_partition_epilogue()

    def independent_gradient_partition_epilogue(self) -> None:
        self.runtime.end_backward()
        # Deferred updates leave the weights as they are until the step, and another graph may need them.
        if not self.runtime.deferred:
            self.protocol.release()
        self._epilogue_ran_this_backward = True

    @property
    def _coalesce_grad_reduction(self) -> bool:
        """Whether reduction is coalesced. `engine.coalesce_grad_reduction()` sets it for the length of its block, and
        reads it when the block begins."""
        self.runtime.taking.require_held("engine.coalesce_grad_reduction()")
        return self._coalescing

    @_coalesce_grad_reduction.setter
    def _coalesce_grad_reduction(self, coalesces: bool) -> None:
        self._coalescing = coalesces
        if not coalesces:  # the block has ended: the epilogue follows also after an exception
            self.runtime.interruptions.notice()

    def reduce_ready_partitions_and_remove_grads(self, param: Any) -> None:
        """Do nothing: the epilogue that follows takes a gradient that a parameter still has when such a block ends."""

    def backward_epilogue(self) -> None:
        if self._coalescing:  # the engine leaves out the other epilogue, which runs when the block ends
            self.independent_gradient_partition_epilogue()

    def finalize_gradient_accumulation_boundary(self) -> None:
        """End the accumulation, under `managed_gradient_accumulation: false`, at the step: there will be no further
        backward."""
        self.runtime.interruptions.require_gradients()
        self.set_gradient_accumulation_boundary(True)
        self.runtime.end_backward()

    # ---- step ------------------------------------------------------------------------------------------------

    def step(self, closure: Any = None) -> None:
        """Apply or queue the update; skip it when the gradients are not finite (`overflow`)."""
        if closure is not None:
            raise SlideError("step(closure) is not supported with ZeRO stage 3; call step() without arguments")
        with AS_THEY_ARE():
            self.runtime.interruptions.require_gradients()
            self._norm_watch.check(wait=False)
            self.newcomers.require_no_gradient()
            self.protocol.release()  # parameters of forwards without a backward
            if self.runtime.deferred:
                self._step_held()
            else:
                self._step_under_way()

    def _step_held(self) -> None:
        scaled_norm = math.sqrt(self.runtime.square_sum())
        self.overflow = not math.isfinite(scaled_norm)
        scale = float(self.loss_scale)
        self._update_scale(self.overflow)
        if self.overflow:
            self._global_grad_norm = float("inf")
            self.runtime.discard_gradients()
            return
        norm = scaled_norm / scale
        self._global_grad_norm = torch.tensor(norm, dtype=torch.float32)
        clip = max(1.0, (norm + 1e-6) / self.clip_grad) if self.clip_grad > 0 else 1.0
        self.runtime.step(self._hypers(), 1.0 / (clip * scale))

    def _step_under_way(self) -> None:
        self.overflow = False
        hypers = self._hypers()
        if hypers != list(self.runtime.gradients.hypers):
            raise SlideError(
                "the optimizer's hyper-parameters changed between backward() and step(), but with clipping off the "
                'update has already begun under backward; change them before backward(), or set "ds_slide": '
                '{"defer_updates": true}'
            )
        self._global_grad_norm = self.runtime.norm_on_device()
        self.runtime.step(hypers, 1.0)
        self._norm_watch.note(self._global_grad_norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the accumulation window that step() has not taken."""
        self._epilogue_ran_this_backward = False
        self.runtime.forget_gradients()
        with AS_THEY_ARE():
            for group in self.fp16_groups:
                for parameter in group:
                    parameter.grad = None

    def slide_stats(self) -> dict[str, Any]:
        """Return statistics of the newest finished step (see `ds_slide.report.statistics`); empty before the first."""
        statistics = self.runtime.parts.context.recorder.as_dict(self.runtime.parts.memory_report)
        own = {
            "kernels": self.kernels.as_dict(),
            "update_passes": 2 if self.runtime.passes.two else 1,
            "activations": dict(self.runtime.parts.spare.activations.statistics),
            "speculation": self.runtime.speculating.statistics(),
            "compression": self.runtime.learning.statistics(),
        }
        return statistics and {**statistics, "pools": self.runtime.parts.pool_report(), **own}

    # ---- states, for deepspeed.utils.safe_* ------------------------------------------------------------------

    def get_full_hp_param(self, param: Any, optim_state_key: str | None = None) -> Any:
        return self.access.full_state(param, optim_state_key)

    def set_full_hp_param(self, value: torch.Tensor, param: Any, optim_state_key: str | None = None) -> None:
        self.access.set_full_state(param, value, optim_state_key)

    def get_local_fp32_param(self, param: Any, optim_state_key: str | None = None) -> Any:
        return self.access.local_state(param, optim_state_key)

    def set_local_hp_param(self, value: torch.Tensor, param: Any, optim_state_key: str | None = None) -> None:
        self.access.set_local_state(param, value, optim_state_key)

    def get_fp32_grad_for_param(self, param: Any) -> Any:
        return self.access.full_gradient(param)

    def set_fp32_grad_for_param(self, value: torch.Tensor, param: Any) -> None:
        self.access.set_full_gradient(param, value)

    def get_local_fp32_grad_for_param(self, param: Any) -> Any:
        return self.access.local_gradient(param)

    def set_local_grad_for_param(self, value: torch.Tensor, param: Any) -> None:
        self.access.set_local_gradient(param, value)

    def update_fp32_grad_for_param_vectorized(self, update_func: Any, param_list: Any) -> None:
        self.access.map_gradients(update_func, param_list)

    def get_hp_param_device(self, param: Any, optim_state_key: str | None = None) -> Any:
        return self.access.device_of(param)

    # ---- checkpoints -----------------------------------------------------------------------------------------

    def checkpoint_event_prologue(self) -> None:
        """Wait for pending updates and partition every parameter, as DeepSpeed saves and loads them."""
        self.runtime.require_running("saving or loading a checkpoint")
        self._norm_watch.check(wait=True)
        self.protocol.release()
        self.runtime.interruptions.notice()
        for unit in self.runtime.units:
            require_no_update(unit, "saving or loading a checkpoint")
        for unit in self.runtime.units:
            self.runtime.settle(unit)
        self.runtime.resident_weights.unbind_all()

    def checkpoint_event_epilogue(self) -> None:
        self.runtime.reload_weights()
        self.runtime.resident_weights.bind_all()

    mapped_files: MappedFiles | None = None
    """The files of the load that runs (see checkpoint)."""
    engine: weakref.ref[Any] | None = None
    """The DeepSpeed engine, from the end of its constructor on."""
    engine_hooks: Sequence[RemovableHandle] = ()
    saving: BackgroundSave | None = None
    """The last asynchronous save, until its end has been noticed (see checkpoint_save)."""
    has_said_that_saves_wait = False

    def state_dict(self) -> dict[str, Any]:
        """Return DeepSpeed's ZeRO-3 format, readable by zero_to_fp32.py, ds_to_universal.py and stock DeepSpeed."""
        state: dict[str, Any] = materialized(self.planned_state_dict())
        return state

    def planned_state_dict(self, states: States | None = None) -> dict[str, Any]:
        """Return the `state_dict` with tensors that are made when they are written, from `states` or else the units."""
        states = states or self.sub_groups.settled
        counts = self.runtime.own_counts()
        return {
            # DeepSpeed's format has one count for a sub-group. Stock reads only the keys that it knows.
            **({_COUNTS: counts} if counts else {}),
            "zero_stage": 3,
            "loss_scaler": self.loss_scaler,
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "partition_count": self.partition_count,
            "optimizer_state_dict": self.sub_groups.optimizer_state(
                self.optimizer.param_groups, self._saved_step, states
            ),
            "fp32_flat_groups": self.sub_groups.masters(states),
        }

    def _saved_step(self) -> int | torch.Tensor:
        """Return the step count as the optimizer keeps it: torch's Adam as a tensor, which it expects when a universal
        checkpoint is loaded; DeepSpeed's optimizers as a number, which their kernels take."""
        step = self.runtime.step_count
        return torch.tensor(float(step)) if isinstance(self.optimizer, torch.optim.Adam | torch.optim.AdamW) else step

    def load_state_dict(
        self,
        state_dict_list: Any,
        load_optimizer_states: bool = True,
        load_from_fp32_weights: bool = False,
        checkpoint_folder: Any = None,
        load_serial: Any = None,
        param_shapes: Any = None,
    ) -> None:
        """Load this rank's part of a ZeRO-3 checkpoint, DS-Slide's or stock's."""
        if load_serial is not None:
            raise SlideError(
                "serially loaded checkpoints are not supported by DS-Slide; remove "
                "zero_optimization.pipeline_loading_checkpoint from the DeepSpeed config"
            )
        if checkpoint_folder:
            self._load_universal(Path(checkpoint_folder), load_optimizer_states, load_from_fp32_weights)
            return
        saved = state_dict_list[dist.get_rank(group=self.dp_process_group)]
        files = self.mapped_files or MappedFiles()
        self.loss_scaler = saved["loss_scaler"]
        self.dynamic_loss_scale = saved["dynamic_loss_scale"]
        self.overflow = saved["overflow"]
        self.sub_groups.load_masters(saved["fp32_flat_groups"], files)
        if load_optimizer_states:
            groups = self.optimizer.param_groups
            step = self.sub_groups.load_optimizer_state(saved["optimizer_state_dict"], groups, files)
            self.runtime.resume_after(step, saved.get(_COUNTS, {}))

    def universal_checkpoint(self, path: Path) -> UniversalCheckpoint:
        """Return the universal checkpoint of a tag's directory, for this model."""
        return UniversalCheckpoint(path, self.param_names)

    def _load_universal(self, path: Path, load_optimizer_states: bool, load_from_fp32_weights: bool) -> None:
        checkpoint = self.universal_checkpoint(path)
        rank = dist.get_rank(group=self.dp_process_group)
        keys = (state_buffers.MASTER, *self.rule.state_names) if load_optimizer_states else (state_buffers.MASTER,)
        checkpoint.load(self.sub_groups, rank, keys, rounded=not (load_optimizer_states or load_from_fp32_weights))
        if load_optimizer_states:
            saved = checkpoint.global_state()
            for name, value in saved.scale.items():
                setattr(self, name, value)
            load_settings(self.optimizer.param_groups, saved.param_groups)
            self.runtime.resume_after(saved.step, {})

    def refresh_fp32_params(self) -> None:
        """Make the low-precision weights the masters."""
        self._restore_from_bit16_weights()

    def _restore_from_bit16_weights(self) -> None:
        for unit in self.runtime.units:
            self.runtime.settle(unit)
            if unit.state.has("remainder") and not unit.spec.precision.narrowed:  # narrowed: written as masters
                for span in state_buffers.pieces(unit.layout.trainable_numel, PIECE):
                    weight = unit.state.read("weight", span)
                    exact = unit.state.dtype_of("remainder").is_floating_point
                    unit.state.write("remainder", span, weight.float() if exact else torch.zeros_like(weight))

    # ---- the rest of the engine's contract -------------------------------------------------------------------

    def empty_partition_cache(self) -> None:
        self.parameter_offload.empty_partition_cache()

    def get_param_coordinator(self, training: bool = True) -> Coordinator:
        """Return the coordinator, as DeepSpeed before 0.8 did: some scripts still call this."""
        return self.parameter_offload.get_param_coordinator(training)

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        raise SlideError(
            "engine.offload_states() is not supported by DS-Slide: its states are in host memory already; use "
            "ds_slide.gpu_states to keep fewer of them on the GPU"
        )

    def reload_states(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, as in stock where nothing was offloaded."""

    def add_param_group(self, param_group: Any) -> None:
        """Refuse: the places of all states were planned when the engine started."""
        raise _no_further_groups(param_group)

    def destroy(self) -> None:
        """End the lanes and remove the hooks. Waits for an asynchronous save; raises SlideError where that failed."""
        saving, self.saving = self.saving, None
        try:
            if saving is not None:
                saving.wait()
        finally:
            if self.runtime.newcomers is not None:
                self.newcomers.close()
                self.runtime.newcomers = None  # the runtime lives as long as the model, and this engine need not
            self.runtime.close()
            self.kernels.undo()
            gradients.detach(self.optimizer)
            ownership.leave_training(self)
            vars(self.optimizer).pop("add_param_group", None)
            ownership.end(self, self.module)
            end_access(self.module.parameters(), self)
        if saving is not None:
            saving.close(all_have_ended=saving.alone)
            saving.require()


def _no_further_groups(param_group: Any) -> SlideError:
    return SlideError(
        f"add_param_group() of {len(list(param_group['params']))} parameters is refused, because DS-Slide has planned "
        "its memory for the groups that deepspeed.initialize was given; give it all groups, as model_parameters or in "
        "the optimizer, or call deepspeed.initialize of the model again"
    )
