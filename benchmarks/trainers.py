"""The systems under test behind one interface: stock DeepSpeed, DeepSpeed with DS-Slide, and plain torch on the GPU."""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Protocol

import optimizers
import torch
from settings import Setting
from torch import Tensor, nn

Batch = Tensor | Mapping[str, Tensor]
"""Token ids [batch, seq], or the arguments of a model that wants more."""


class Trainer(Protocol):
    """One model with its optimizer. Forward, backward and step are called in turn, as in any training loop."""

    def forward(self, batch: Batch) -> Tensor:
        """Loss (fp32 scalar) of one micro batch."""

    def backward(self, loss: Tensor) -> None: ...

    def step(self) -> None: ...

    def grad_norm(self) -> Any:
        """Global norm of the last step as number or scalar tensor; None where the system does not compute it."""

    def stats(self) -> dict[str, Any]:
        """`slide_stats()` of the engine; empty for the other systems."""

    def close(self) -> None: ...


def arguments_of(batch: Batch) -> dict[str, Tensor]:
    """Arguments of a model for a batch. Labels are the tokens, where the batch has none."""
    given = {"input_ids": batch} if isinstance(batch, Tensor) else dict(batch)
    return {"labels": given["input_ids"], **given}


@dataclass(frozen=True)
class Sizes:
    """Elements of a model: of all parameters, and of the largest one."""

    total: int
    largest: int

    @classmethod
    def of(cls, model: nn.Module) -> Sizes:
        # A parameter that zero.Init has divided keeps its number of elements there.
        counts = [getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters()]
        return cls(sum(counts), max(counts))


# Bytes of a parameter's states: weight and remainder 2 each, both moments, and a scale for 64 of each with 8 bits.
STATE_BYTES = {"fp32": 12.0, "bf16": 8.0, "8bit": 4 + 2 * (1 + 4 / 64)}


def slide_block(setting: Setting, sizes: Sizes) -> dict[str, Any]:
    """The "ds_slide" block, with "half" as a number of bytes."""
    block: dict[str, Any] = {"enabled": True, **setting.slide}
    if block.get("host_memory") == "half":
        block["host_memory"] = int(sizes.total * STATE_BYTES[block.get("state_dtype", "fp32")] / 2)
    return block


def nvme_settings(sizes: Sizes, folder: str) -> dict[str, Any]:
    """ZeRO-Infinity, tuned by hand: changes to "zero_optimization".

    With fewer buffers stock stops at an assertion (optimizer: 4 by default with pipelining; parameters: under
    gradient checkpointing). A parameter buffer must hold more than the largest parameter. `max_in_cpu` 0 because the
    first 1e9 elements would otherwise stay in memory. The default sub-group of 1e9 elements leaves nothing to pipeline.
    """
    device = {"device": "nvme", "nvme_path": folder, "pin_memory": True}
    return {
        "offload_optimizer": {**device, "buffer_count": 14, "pipeline_read": True, "pipeline_write": True},
        "offload_param": {
            **device,
            "buffer_count": 24,
            "buffer_size": max(sizes.largest + (1 << 20), 1 << 24),
            "max_in_cpu": 0,
        },
        "sub_group_size": 100_000_000,
    }


def deepspeed_config(setting: Setting, sizes: Sizes, folder: str = "") -> dict[str, Any]:
    """The DeepSpeed JSON of a setting. `folder`: where it may put files, with `--offload nvme`.

    Overlap and contiguous gradients are on; buckets, prefetch and sub-groups keep DeepSpeed's defaults. Smaller
    sub-groups would cost stock host memory: torch's pinned allocator rounds up to powers of two, 7 % at 1e9 fp32
    elements, 34 % at 1e8.
    """
    offload = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": setting.batch,
        "gradient_accumulation_steps": setting.grad_accum,
        "gradient_clipping": setting.clip,
        "bf16": {"enabled": True},
        **optimizers.in_json(setting),
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": offload,
            "offload_param": offload,
            "overlap_comm": True,
            "contiguous_gradients": True,
            **optimizers.in_zero(setting),
            **(nvme_settings(sizes, folder) if setting.offload == "nvme" else {}),
            **setting.zero,
        },
        "steps_per_print": 1_000_000,
    }
    if setting.offload == "nvme":
        aio = {"block_size": 1 << 20, "queue_depth": 128, "single_submit": False, "overlap_events": True}
        config["aio"] = {**aio, "intra_op_parallelism": 1, **setting.aio}
    if setting.system == "slide":
        config["ds_slide"] = slide_block(setting, sizes)
    return config


def single_process_environment() -> None:
    """What the launcher would set for one process. Port 0: any free one, which nobody else needs to know."""
    launcher = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    for name, value in launcher.items():
        os.environ.setdefault(name, str(value))


def import_libraries() -> None:
    """What a run imports sooner or later."""
    single_process_environment()
    importlib.import_module("transformers")
    importlib.import_module("deepspeed")


def checkpoint_in_host_memory(model: Any) -> None:
    """Put DeepSpeed's checkpointing on the CPU where transformers has put torch's."""
    from deepspeed import checkpointing

    checkpointing.configure(None, partition_activations=False, checkpoint_in_cpu=True)
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = checkpointing.checkpoint


class DeepSpeedTrainer:
    """Systems `stock` and `slide`."""

    def __init__(self, model: nn.Module, setting: Setting, folder: str, mpu: Any = None) -> None:
        single_process_environment()
        import deepspeed

        if setting.system == "slide":
            import ds_slide  # noqa: F401  (an installed package needs no import; a source tree on the path does)

        self.config = deepspeed_config(setting, Sizes.of(model), folder)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # DeepSpeed writes into the dict that it is given; the record must show what was asked for.
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizers.of_client(setting, trained),
            model_parameters=model.parameters(),
            config=copy.deepcopy(self.config),
            mpu=mpu,
        )
        if setting.checkpointing == "deepspeed-cpu":
            checkpoint_in_host_memory(model)
        compile_by(setting, self.engine, self.engine.module)
        is_slide = hasattr(self.engine.optimizer, "slide_stats")
        if is_slide != (setting.system == "slide"):
            # A row under the wrong name would be worse than none.
            raise RuntimeError(f"asked for system {setting.system!r}, but got {type(self.engine.optimizer).__name__}")

    def forward(self, batch: Batch) -> Tensor:
        return self.engine(**arguments_of(batch), use_cache=False).loss

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def step(self) -> None:
        self.engine.step()

    def grad_norm(self) -> Any:
        return self.engine.get_global_grad_norm()

    def stats(self) -> dict[str, Any]:
        slide_stats = getattr(self.engine.optimizer, "slide_stats", None)
        return dict(slide_stats()) if slide_stats is not None else {}

    def close(self) -> None:
        self.engine.destroy()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def compile_by(setting: Setting, whole: Any, model: nn.Module) -> None:
    """Let `torch.compile` take the whole of a system, or each layer, which is compiled once for all."""
    if setting.compile == "model":
        whole.compile()
    elif setting.compile == "layers":
        for layers in (each for each in model.modules() if isinstance(each, nn.ModuleList)):
            for layer in layers:
                layer.compile()


class TorchTrainer:
    """System `gpu-only`: weights, gradients and states in bf16 on one device, AdamW torch's fused one.

    torch has no fused AdamW with bf16 weights and fp32 states, so this is less arithmetic, memory and traffic than the
    fp32 states of the other systems: a lower bound of their step time, not a system with the same numerics. Adapters
    have fp32 masters and states.
    """

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        self.config: dict[str, Any] = {}
        self._model, self._clip, self._grad_accum = model, setting.clip, setting.grad_accum
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._masters = [each.detach().float() for each in self._trained] if setting.adapter else self._trained
        self._optimizer = optimizers.on_gpu(setting, model, self._masters)
        compile_by(setting, model, model)
        self._micro_batches = 0
        self._norm: Tensor | None = None

    def forward(self, batch: Batch) -> Tensor:
        return self._model(**arguments_of(batch), use_cache=False).loss

    def backward(self, loss: Tensor) -> None:
        (loss / self._grad_accum).backward()

    def step(self) -> None:
        self._micro_batches += 1
        if self._micro_batches % self._grad_accum:
            return
        if self._masters is not self._trained:
            for parameter, master in zip(self._trained, self._masters, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
                parameter.grad = None
        if self._clip:
            self._norm = nn.utils.clip_grad_norm_(self._masters, self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._masters is not self._trained:
            torch._foreach_copy_([each.data for each in self._trained], self._masters)

    def grad_norm(self) -> Any:
        return self._norm

    def stats(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


def without_folder(config: Any, folder: str, shown: str) -> Any:
    """A copy of a JSON in which `folder` reads `shown` wherever a string contains it."""
    if isinstance(config, dict):
        return {key: without_folder(value, folder, shown) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [without_folder(value, folder, shown) for value in config]
    return config.replace(folder, shown) if folder and isinstance(config, str) else config


def apply_patch(model: nn.Module, patch: str) -> dict[str, Any]:
    """Put kernels into the model (`Setting.patch`); what was done, for the record.

    Liger's is applied to this object as its users do it; its rotary embedding and plain loss replace functions of
    transformers and torch for the whole process. Raises RuntimeError when nothing was replaced.
    """
    if not patch:
        return {}
    if patch == "ours":
        from ds_slide.patching.apply import apply_kernels

        replaced = apply_kernels(model, "auto")
        if not replaced.counts:
            # A row under the wrong name would be worse than none.
            raise RuntimeError(f"--patch ours replaced nothing: {replaced}")
        return replaced.as_dict()
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    fused = patch == "liger"
    before = [type(module).forward for module in model.modules()]
    options = {"fused_linear_cross_entropy": fused, "cross_entropy": not fused}
    _apply_liger_kernel_to_instance(model=model, **options)
    modules = zip(model.modules(), before, strict=True)
    changed = sum(getattr(module.forward, "__func__", None) is not forward for module, forward in modules)
    if not changed:
        raise RuntimeError(f"Liger-Kernel replaced nothing in {type(model).__name__}")
    return {"liger_kernel": metadata.version("liger-kernel"), "replaced": changed, **options}


def make_trainer(model: nn.Module, setting: Setting, folder: str = "") -> DeepSpeedTrainer | TorchTrainer:
    """`folder`: an empty one that the trainer may fill, with `--offload nvme`. Patch the model first."""
    if setting.system == "gpu-only":
        return TorchTrainer(model, setting)
    return DeepSpeedTrainer(model, setting, folder)
