"""The systems under test behind one interface: stock DeepSpeed, DeepSpeed with DS-Slide, and plain torch on the GPU."""

from __future__ import annotations

import copy
import os
import socket
from typing import Any, Protocol

import torch
from settings import Setting
from torch import Tensor, nn

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1


class Trainer(Protocol):
    """One model with its optimizer. Forward, backward and step are called in turn, as in any training loop."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Loss (fp32 scalar) of one micro batch of token ids [batch, seq]."""

    def backward(self, loss: Tensor) -> None: ...

    def step(self) -> None: ...

    def grad_norm(self) -> Any:
        """Global norm of the last step as number or scalar tensor; None where the system does not compute it."""

    def stats(self) -> dict[str, Any]:
        """`slide_stats()` of the engine; empty for the other systems."""

    def close(self) -> None: ...


def deepspeed_config(setting: Setting) -> dict[str, Any]:
    """The DeepSpeed JSON of a setting.

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
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": setting.lr, "betas": list(BETAS), "eps": 1e-8, "weight_decay": WEIGHT_DECAY},
        },
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": offload,
            "offload_param": offload,
            "overlap_comm": True,
            "contiguous_gradients": True,
            **setting.zero,
        },
        "steps_per_print": 1_000_000,
    }
    if setting.system == "slide":
        config["ds_slide"] = {"enabled": True, **setting.slide}
    return config


def single_process_environment() -> None:
    """What the launcher would set for one process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in launcher.items():
        os.environ.setdefault(name, str(value))


class DeepSpeedTrainer:
    """Systems `stock` and `slide`."""

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        single_process_environment()
        import deepspeed

        if setting.system == "slide":
            import ds_slide  # noqa: F401  (an installed package needs no import; a source tree on the path does)

        self.config = deepspeed_config(setting)
        # DeepSpeed writes into the dict that it is given; the record must show what was asked for.
        self._engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=copy.deepcopy(self.config)
        )
        is_slide = hasattr(self._engine.optimizer, "slide_stats")
        if is_slide != (setting.system == "slide"):
            # A row under the wrong name would be worse than none.
            raise RuntimeError(f"asked for system {setting.system!r}, but got {type(self._engine.optimizer).__name__}")

    def forward(self, tokens: Tensor) -> Tensor:
        return self._engine(input_ids=tokens, labels=tokens, use_cache=False).loss

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss)

    def step(self) -> None:
        self._engine.step()

    def grad_norm(self) -> Any:
        return self._engine.get_global_grad_norm()

    def stats(self) -> dict[str, Any]:
        slide_stats = getattr(self._engine.optimizer, "slide_stats", None)
        return dict(slide_stats()) if slide_stats is not None else {}

    def close(self) -> None:
        self._engine.destroy()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


class TorchTrainer:
    """System `gpu-only`: weights, gradients and AdamW states in bf16 on one device, torch's fused AdamW.

    torch has no fused AdamW with bf16 weights and fp32 states, so this is less arithmetic, memory and traffic than the
    fp32 states of the other systems: a lower bound of their step time, not a system with the same numerics.
    """

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        self.config: dict[str, Any] = {}
        self._model, self._clip, self._grad_accum = model, setting.clip, setting.grad_accum
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=setting.lr, betas=BETAS, eps=1e-8, weight_decay=WEIGHT_DECAY, fused=True
        )
        self._micro_batches = 0
        self._norm: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        return self._model(input_ids=tokens, labels=tokens, use_cache=False).loss

    def backward(self, loss: Tensor) -> None:
        (loss / self._grad_accum).backward()

    def step(self) -> None:
        self._micro_batches += 1
        if self._micro_batches % self._grad_accum:
            return
        if self._clip:
            self._norm = nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def grad_norm(self) -> Any:
        return self._norm

    def stats(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


def make_trainer(model: nn.Module, setting: Setting) -> DeepSpeedTrainer | TorchTrainer:
    return TorchTrainer(model, setting) if setting.system == "gpu-only" else DeepSpeedTrainer(model, setting)
