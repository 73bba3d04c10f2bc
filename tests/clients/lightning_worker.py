"""Trains with Lightning, by its Trainer and by Fabric, on stock ZeRO-3 and on DS-Slide.

    python lightning_worker.py FOLDER

Its strategy takes a GPU for granted in three places, which are replaced. `validate()` after `fit()` makes an engine of
its own, without DS-Slide's key and without destroying that of `fit()`. See `serving` for how runs are asked for. Not a
test module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import lightning
import lightning.fabric.strategies.deepspeed as fabric_strategies
import lightning.pytorch.strategies.deepspeed as trainer_strategies
import torch
from harness import causal_loss, llama
from serving import serve
from torch import Tensor, nn
from torch.utils.data import DataLoader

CPU = {"device": "cpu", "pin_memory": True}
STEPS, BATCH, LENGTH = 4, 2, 32


def example(run: str) -> dict[str, Any]:
    """What Lightning's DeepSpeedStrategy(stage=3, offload_optimizer=True, offload_parameters=True) makes, in short."""
    return {
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": CPU,
            "offload_param": CPU,
            "contiguous_gradients": True,
            "overlap_comm": True,
            "reduce_bucket_size": 200_000_000,
            "sub_group_size": 1_000_000_000_000,
        },
        **({"ds_slide": {"enabled": True}} if run == "slide" else {}),
    }


def on_cpu(kind: Any) -> Any:
    """A strategy of `kind` that runs without a GPU."""

    class OnCpu(kind):
        root_device = property(lambda _: torch.device("cpu", 0))

        def setup_environment(self) -> None:
            super(kind, self).setup_environment()

    return OnCpu


def data(count: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(list(torch.randint(256, (count, LENGTH), generator=generator)), batch_size=BATCH)


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    loss: Tensor = causal_loss(model, {"input_ids": rows, "labels": rows})
    return loss


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model: nn.Module | None = None
        self.log_of_losses: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = llama()

    def training_step(self, rows: Tensor, _: int) -> Tensor:
        assert self.model is not None
        loss = loss_of(self.model, rows)
        self.log_of_losses.append(float(loss))
        return loss

    def validation_step(self, rows: Tensor, _: int) -> None:
        assert self.model is not None
        self.log_of_losses.append(float(loss_of(self.model, rows)))

    def configure_optimizers(self) -> Any:
        optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def by_trainer(folder: Path, run: str, *, resumed: bool) -> dict[str, Any]:
    """fit, validate, fit, validate; `resumed`: fit, save, and another Trainer that goes on."""
    module = Module()

    def trainer(steps: int) -> Any:
        return lightning.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=on_cpu(trainer_strategies.DeepSpeedStrategy)(config=example(run), process_group_backend="gloo"),
            max_steps=steps,
            precision="bf16-true",
            gradient_clip_val=1.0,
            accumulate_grad_batches=2,
            limit_val_batches=2,
            val_check_interval=2 * STEPS,
            enable_progress_bar=False,
            enable_checkpointing=False,
            logger=False,
            default_root_dir=folder,
        )

    first = trainer(STEPS)
    first.fit(module, data(64), data(8))
    optimizer = type(first.strategy.deepspeed_engine.optimizer).__name__
    if resumed:
        first.save_checkpoint(folder / f"{run}.checkpoint")
        seen = module.log_of_losses
        module = Module()
        module.log_of_losses = seen
        trainer(2 * STEPS).fit(module, data(64), data(8), ckpt_path=folder / f"{run}.checkpoint")
    else:
        first.validate(module, data(8))
        first.fit_loop.epoch_loop.max_steps = 2 * STEPS
        first.fit(module, data(64), data(8))
        first.validate(module, data(8))
    return {"optimizer": optimizer, "losses": module.log_of_losses}


def by_fabric(folder: Path, run: str) -> dict[str, Any]:
    config = example(run) | {"train_micro_batch_size_per_gpu": BATCH, "gradient_clipping": 1.0}
    strategy = on_cpu(fabric_strategies.DeepSpeedStrategy)(config=config, process_group_backend="gloo")
    fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy=strategy, precision="bf16-true")
    fabric.launch()
    with fabric.init_module():
        model = llama()
    model, optimizer = fabric.setup(model, deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), lr=1e-3))
    losses, state = [], {"model": model, "optimizer": optimizer}
    for step, rows in enumerate(data(2 * STEPS * BATCH)):
        loss = loss_of(model, rows)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        if step == STEPS:
            fabric.save(folder / f"{run}.fabric", state)
            fabric.load(folder / f"{run}.fabric", state)
    return {"optimizer": type(strategy._deepspeed_engine.optimizer).__name__, "losses": losses}


def train(folder: Path, case: str, run: str) -> dict[str, Any]:
    for strategies in (fabric_strategies, trainer_strategies):
        strategies._validate_device_index_selection = lambda _devices: None
    if case == "fabric":
        return by_fabric(folder, run)
    return by_trainer(folder, run, resumed=case == "resumed")


if __name__ == "__main__":
    serve(train)
