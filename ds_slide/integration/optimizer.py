"""The facade: the ZeRO-3 optimizer object that DeepSpeedEngine, Hugging Face and checkpoint tools expect.

It is a subclass only because `isinstance` gates much of the engine. The stock constructor is not run: it would build
the partitions, hooks and buffers that DS-Slide replaces. The inherited methods in use are small arithmetic over
attributes that are set here: parameter groups, sub-groups, loss scale properties, the backward hook state.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from deepspeed.runtime.zero.partition_parameters import _init_external_params
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import nn
from torch.utils.hooks import RemovableHandle

from ds_slide.checkpoint.background import BackgroundSave
from ds_slide.config import SlideConfig
from ds_slide.errors import SlideError
from ds_slide.integration import engine_methods, ownership, partitions
from ds_slide.integration.assemble import accumulates, assemble, precisions_under_autocast
from ds_slide.integration.contract import accumulation_dtype, check_supported, gradient_dtype
from ds_slide.integration.groups import Newcomers, ParameterGroups
from ds_slide.integration.ownership import part_in_backward
from ds_slide.integration.parameter_offload import Coordinator, ParameterOffload
from ds_slide.integration.parameters import ParameterProtocol
from ds_slide.integration.refused import missing
from ds_slide.integration.states import StateMethods, end_access
from ds_slide.integration.update_rules import has_muon_kernel, rule_of
from ds_slide.optim.muon import orthogonalized
from ds_slide.optim.rule import Hyper
from ds_slide.plan.ssd_settings import ssd_settings
from ds_slide.runtime.core.context import AS_THEY_ARE
from ds_slide.runtime.core.settings import RuntimeSettings
from ds_slide.runtime.gradients.totals import NormWatch


class SlideZeroOptimizer(StateMethods, ParameterGroups, DeepSpeedZeroOptimizer_Stage3):
    """ZeRO stage 3 with the states streamed by `ds_slide.runtime`. Constructor arguments: `slide`, and stock's."""

    engine: weakref.ref[Any] | None = None
    """The DeepSpeed engine, from the end of its constructor on."""
    engine_hooks: Sequence[RemovableHandle] = ()
    saving: BackgroundSave | None = None
    """The last asynchronous save, until its end has been noticed (see checkpoint_save)."""
    has_said_that_saves_wait = False
    reported_step = 0
    """The newest step that the log and the monitors have (see engine_methods)."""

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
        self.async_save = slide.async_save
        self.require_manifest = slide.checkpoint.require_manifest
        self.names_said_to_be_refused: set[str] = set()
        self._set_stock_attributes(module, init_optimizer, param_names, timers, kwargs)
        partitions.convert(module, self.dp_process_group, self.dtype)
        self._take_groups()
        for child in module.modules():
            _init_external_params(child)
        # The runtime, from the settings, the group and the precision of each parameter.
        self.rule = rule_of(init_optimizer)
        settings = RuntimeSettings(
            slide,
            ssd_settings(slide, ds_config),
            gradient_dtype(kwargs, module),
            self.gradient_accumulation_dtype,
            accumulates(ds_config, self.gradient_accumulation_steps),
            clips=self.clip_grad > 0,
            rule=self.rule,
            ranks=self.partition_count,
            has_muon_kernel=has_muon_kernel(slide.muon_kernel, self.rule),
        )
        group_of = self._group_of()
        precisions = precisions_under_autocast(module, ds_config, group_of)
        self.runtime, self.kernels = assemble(module, group_of, settings, self.dp_process_group, precisions)
        if self.rule.whole_units:
            init_optimizer.state.clear()  # its copies have what its constructor has made
        try:
            self._take_over(module)
        except BaseException:
            self.destroy()
            raise

    def _take_over(self, module: nn.Module) -> None:
        """Connect the model's parameters with the runtime."""
        self.protocol = ParameterProtocol(self.runtime, self.dp_process_group, self._most_elements_of_small)
        self._serve_sub_groups()
        self._empty_parameter_groups()
        self._link_all_hp_params()
        self._norm_watch = NormWatch(self.runtime.parts.context)
        self.parameter_offload = ParameterOffload(self.runtime, module, self.protocol)
        ownership.enter(self, module)
        self.newcomers = self.runtime.newcomers = Newcomers(self)

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
        self.gradient_accumulation_dtype = accumulation_dtype(kwargs, module) or self.dtype
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
        of_another = None if self.runtime.parts.deferred or engine is None else part_in_backward(engine)
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
        if not self.runtime.parts.deferred:
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
        self.runtime.interruptions.require_step()
        self.set_gradient_accumulation_boundary(True)
        self.runtime.end_backward()

    # ---- step ------------------------------------------------------------------------------------------------

    def step(self, closure: Any = None) -> None:
        """Apply or queue the update; skip it when the gradients are not finite (`overflow`)."""
        if closure is not None:
            raise SlideError("step(closure) is not supported with ZeRO stage 3; call step() without arguments")
        with AS_THEY_ARE():
            self.runtime.interruptions.require_step()
            self._norm_watch.check(wait=False)
            self.newcomers.require_no_gradient()
            self.protocol.release()  # parameters of forwards without a backward
            if self.runtime.parts.deferred:
                self._step_held()
            else:
                self._step_under_way()

    def _step_held(self) -> None:
        scaled_norm = math.sqrt(self.runtime.taking.square_sum())
        self.overflow = not math.isfinite(scaled_norm)
        scale = float(self.loss_scale)
        self._update_scale(self.overflow)
        if self.overflow:
            self._global_grad_norm = float("inf")
            self.runtime.discard_gradients()
            return
        norm, hypers = scaled_norm / scale, self._hypers()
        settings = self.runtime.parts.context.settings
        if settings.limits_updates:
            self.runtime.orthogonalize(hypers, 1.0 / scale)
            norm = math.sqrt(self.runtime.taking.square_sum())
        self._global_grad_norm = torch.tensor(norm, dtype=torch.float32)
        clip = max(1.0, (norm + 1e-6) / self.clip_grad) if self.clip_grad > 0 else 1.0
        if settings.limits_updates:
            hypers = orthogonalized(hypers, 1.0 / clip)
        elif settings.updates_in_step:
            self.runtime.orthogonalize(hypers, 1.0 / (clip * scale))
            hypers = orthogonalized(hypers, 1.0)
        self.runtime.step(hypers, 1.0 / (clip * scale))

    def _step_under_way(self) -> None:
        self.overflow = False
        hypers = self._hypers()
        if hypers != list(self.runtime.parts.gradients.hypers):
            raise SlideError(
                "the optimizer's hyper-parameters changed between backward() and step(), but with clipping off the "
                'update has already begun under backward; change them before backward(), or set "ds_slide": '
                '{"defer_updates": true}'
            )
        self._global_grad_norm = self.runtime.taking.norm_on_device()
        self.runtime.step(hypers, 1.0)
        self._norm_watch.note(self._global_grad_norm, self.runtime.step_count)

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
            "update_passes": 2 if self.runtime.parts.updating.passes.two else 1,
            "activations": dict(self.runtime.parts.spare.activations.statistics),
            "speculation": self.runtime.parts.updating.speculating.statistics(),
            "compression": self.runtime.parts.learning.statistics(),
        }
        return statistics and {**statistics, "pools": self.runtime.parts.pool_report(), **own}

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
            engine_methods.detach(self.optimizer)
            ownership.leave_training(self)
            vars(self.optimizer).pop("add_param_group", None)
            ownership.end(self, self.module)
            end_access(self.module.parameters(), self)
        if saving is not None:
            saving.close(all_have_ended=saving.alone)
            saving.require()
