"""The states of SlideZeroOptimizer from outside: one parameter's, and those of a checkpoint.

Every call for one parameter first waits for what it needs and nothing else: the parameter's unit.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from torch import nn

from ds_slide.checkpoint import state_buffers
from ds_slide.checkpoint.archive import PIECE, materialized
from ds_slide.checkpoint.restricted import MappedFiles
from ds_slide.checkpoint.subgroups import States, SubGroups, load_settings
from ds_slide.checkpoint.universal import UniversalCheckpoint
from ds_slide.errors import SlideAttributeError, SlideError
from ds_slide.integration.parameters import ParameterProtocol
from ds_slide.integration.refused import require_own_layout
from ds_slide.model.layout import Entry, piece
from ds_slide.optim.rule import UpdateRule
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.core.update import SquareSum
from ds_slide.runtime.ended import ENDED
from ds_slide.runtime.engine import SlideRuntime
from ds_slide.runtime.gradients.totals import NormWatch

_COUNTS = "ds_slide_update_counts"
"""Key of a checkpoint's optimizer states: update counts, by name, of the parameters that were off in some steps."""


class StateMethods:
    """The methods of ZeRO-3's optimizer for its states. SlideZeroOptimizer inherits them and sets the attributes."""

    runtime: SlideRuntime
    protocol: ParameterProtocol
    rule: UpdateRule
    sub_groups: SubGroups
    optimizer: Any
    dp_process_group: Any
    param_names: Any
    loss_scaler: Any
    dynamic_loss_scale: bool
    overflow: bool
    partition_count: int
    _norm_watch: NormWatch
    mapped_files: MappedFiles | None = None
    """The files of the load that runs (see checkpoint_load)."""

    # ---- one parameter, for deepspeed.utils.safe_* -------------------------------------------------------------
    #
    # All tensors handed out are fp32 on the accelerator; `full` ones have the parameter's shape (collective). Setting a
    # master is collective, too, because other ranks read the weights (`StateMethods.begin_writing`).

    def get_local_fp32_param(self, param: nn.Parameter, optim_state_key: str | None = None) -> torch.Tensor | None:
        """Return the master, or the state of that key, of this rank's partition, [partition_numel]."""
        place = self._trainable(param)
        if place is None:
            return None
        unit, entry = place
        if optim_state_key is not None:
            require_own_layout(unit, "the optimizer state")
        state_buffers.require_stepped(self.runtime, unit, "reading a state")
        self.runtime.access.settle(unit)
        own = state_buffers.read_values(unit.state, self._known(optim_state_key, entry), entry.place)
        return own.to(self.runtime.device.torch, copy=True)

    def get_full_hp_param(self, param: nn.Parameter, optim_state_key: str | None = None) -> torch.Tensor | None:
        return self._gather(param, self.get_local_fp32_param(param, optim_state_key))

    def set_local_hp_param(self, value: torch.Tensor, param: nn.Parameter, optim_state_key: str | None = None) -> None:
        place = self._trainable(param)
        if place is None:
            return
        unit, entry = place
        if optim_state_key is not None:
            require_own_layout(unit, "the optimizer state")
        state_buffers.require_stepped(self.runtime, unit, "writing a state")
        self.runtime.access.settle(unit)
        if optim_state_key is None:
            self.runtime.access.begin_writing()
        own = value.reshape(-1)[: entry.partition_numel].float()
        span = slice(entry.offset, entry.offset + own.numel())
        state_buffers.write_values(unit.state, self._known(optim_state_key, entry), span, own)
        if optim_state_key is None:
            self.runtime.access.weights_changed(unit)

    def set_full_hp_param(self, value: torch.Tensor, param: nn.Parameter, optim_state_key: str | None = None) -> None:
        place = self._trainable(param)
        if place is not None:
            self.set_local_hp_param(self._own(value, place[1]), param, optim_state_key)

    def get_local_fp32_grad_for_param(self, param: nn.Parameter) -> torch.Tensor | None:
        place = self._trainable(param)
        if place is None:
            return None
        unit, entry = place
        self._settle_gradient(unit)
        gradient = unit.state.read("gradient", entry.place)
        return gradient.to(device=self.runtime.device.torch, dtype=torch.float32, copy=True)

    def get_fp32_grad_for_param(self, param: nn.Parameter) -> torch.Tensor | None:
        return self._gather(param, self.get_local_fp32_grad_for_param(param))

    def set_local_grad_for_param(self, value: torch.Tensor, param: nn.Parameter) -> None:
        place = self._trainable(param)
        if place is None:
            return
        unit, entry = place
        own = value.reshape(-1)[: entry.partition_numel]
        self._settle_gradient(unit)
        if not unit.gradient.has_sum:
            # The unit's other parameters have no gradient; the buffer still has the last step's.
            unit.state.zero_gradient()
        unit.state.write("gradient", slice(entry.offset, entry.offset + own.numel()), own)
        unit.gradient.square_sum = SquareSum()
        unit.gradient.has_sum = True

    def set_fp32_grad_for_param(self, value: torch.Tensor, param: nn.Parameter) -> None:
        place = self._trainable(param)
        if place is not None:
            self.set_local_grad_for_param(self._own(value, place[1]), param)

    def update_fp32_grad_for_param_vectorized(self, update_func: Any, param_list: Any) -> None:
        """Replace the full gradient of each parameter by `update_func(gradient, parameter)`."""
        for parameter in param_list:
            gradient = self.get_fp32_grad_for_param(parameter)
            if gradient is not None:
                self.set_fp32_grad_for_param(update_func(gradient, parameter), parameter)

    def get_hp_param_device(self, param: nn.Parameter, optim_state_key: str | None = None) -> torch.device | None:
        """Return the device of the parameter's states; None where it has none."""
        place = self._trainable(param)
        return None if place is None else place[0].state.device

    def _trainable(self, parameter: nn.Parameter) -> tuple[Unit, Entry] | None:
        self.runtime.access.require_running("reading or writing a state")
        place = self.protocol.places[parameter]
        return place if place[1].trainable else None

    def _settle_gradient(self, unit: Unit) -> None:
        require_own_layout(unit, "the gradient")
        self.runtime.taking.require_held("reading or writing a gradient")
        self.runtime.access.settle(unit)
        self.runtime.parts.context.lanes.update.drain()  # an accumulation may be under way

    def _own(self, value: torch.Tensor, entry: Entry) -> torch.Tensor:
        if value.numel() != entry.numel:
            raise SlideError(f"{entry.name} has {entry.numel} elements, but the value given has {value.numel()}")
        start, stop = piece(entry, self.runtime.parts.context.ranks.rank)
        return value.reshape(-1)[start:stop]

    def _gather(self, parameter: nn.Parameter, own: torch.Tensor | None) -> torch.Tensor | None:
        return None if own is None else self.protocol.gathered(parameter, own.contiguous())

    def _known(self, key: str | None, entry: Entry) -> str:
        if key is None:
            return state_buffers.MASTER
        assert entry.group is not None
        rule = self.rule.of_group(entry.group)
        if key not in rule.state_names:
            raise SlideError(
                f"there is no optimizer state '{key}'; {rule.name} has {' and '.join(rule.state_names) or 'none'}"
            )
        return key

    # ---- checkpoints -----------------------------------------------------------------------------------------

    def checkpoint_event_prologue(self) -> None:
        """Wait for pending updates and partition every parameter, as DeepSpeed saves and loads them."""
        self.runtime.access.require_running("saving or loading a checkpoint")
        self._norm_watch.check(wait=True)
        self.protocol.release()
        self.runtime.interruptions.notice()
        for unit in self.runtime.units:
            state_buffers.require_no_update(unit, "saving or loading a checkpoint")
        for unit in self.runtime.units:
            self.runtime.access.settle(unit)
        self.runtime.resident_weights.unbind_all()

    def checkpoint_event_epilogue(self) -> None:
        self.runtime.access.reload_weights()
        self.runtime.resident_weights.bind_all()

    def state_dict(self) -> dict[str, Any]:
        """Return DeepSpeed's ZeRO-3 format, readable by zero_to_fp32.py, ds_to_universal.py and stock DeepSpeed."""
        state: dict[str, Any] = materialized(self.planned_state_dict())
        return state

    def planned_state_dict(self, states: States | None = None) -> dict[str, Any]:
        """Return the `state_dict` with tensors that are made when they are written, from `states` or else the units."""
        states = states or self.sub_groups
        counts = self.runtime.access.own_counts()
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
            self.runtime.access.resume_after(step, saved.get(_COUNTS, {}))

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
            self.runtime.access.resume_after(saved.step, {})

    def refresh_fp32_params(self) -> None:
        """Make the low-precision weights the masters."""
        self._restore_from_bit16_weights()

    def _restore_from_bit16_weights(self) -> None:
        for unit in self.runtime.units:
            self.runtime.access.settle(unit)
            if unit.state.has("remainder") and not unit.spec.precision.narrowed:  # narrowed: written as masters
                for span in state_buffers.pieces(unit.layout.trainable_numel, PIECE):
                    weight = unit.state.read("weight", span)
                    exact = unit.state.dtype_of("remainder").is_floating_point
                    unit.state.write("remainder", span, weight.float() if exact else torch.zeros_like(weight))


class EndedAccess:
    """Replaces an ended engine's optimizer at its parameters, which would keep the optimizer alive."""

    def __getattr__(self, name: str) -> Any:
        raise SlideAttributeError(f"{name}() of a parameter is refused: {ENDED}")


def end_access(parameters: Iterable[Any], optimizer: Any) -> None:
    """Let go of `optimizer` where DeepSpeed has put it for `deepspeed.utils.safe_*`."""
    for parameter in parameters:
        if getattr(parameter, "_z3_optimizer", None) is optimizer:
            parameter._z3_optimizer = EndedAccess()
