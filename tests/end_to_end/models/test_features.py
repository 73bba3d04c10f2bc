"""What users do besides forward, backward and step: each against the same thing in plain torch, to the bit."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from harness import (
    HYPER,
    VOCABULARY,
    Batch,
    PlainAdamW,
    batches,
    ds_config,
    engine_for,
    llama,
    same_bits,
    states_of,
    sum_gradients_by_block,
    to_bf16,
    unequal,
)
from torch import nn

from ds_slide.errors import SlideError
from ds_slide.runtime.core.device import PASSED

pytestmark = pytest.mark.usefixtures("one_rank")

WIDTH = 64
CLIPPING = pytest.mark.parametrize("clip", [1.0, 0.0], ids=["clipping", "immediate"])


class Block(nn.Module):
    """`extra` is used on request only; `fail` raises after the block has begun to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)
        self.extra = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, use_extra: bool = False, fail: bool = False) -> torch.Tensor:
        y = self.outer(nn.functional.gelu(self.inner(self.norm(x))))
        if fail:
            raise KeyError("the block failed")
        return x + y + self.extra(x) if use_extra else x + y


class Toy(nn.Module):
    """Four blocks, called in any order; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        order: Sequence[int] = (0, 1, 2, 3),
        use_extra: bool = False,
        fail_at: int | None = None,
    ) -> torch.Tensor:
        x = self.embed(input_ids)
        for index in order:
            x = self.blocks[index](x, use_extra=use_extra, fail=index == fail_at)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())


def toy() -> Toy:
    torch.manual_seed(0)
    return Toy()


class Pair:
    """The engine's model and a plain copy of it, trained side by side."""

    def __init__(self, engine: Any, model: nn.Module, plain: nn.Module, clip: float) -> None:
        self.engine = engine
        self.model = model
        self.plain = plain
        self.reference = PlainAdamW(plain, clip)
        self.count = 0

    def forward(self, batch: Batch, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses of the two models."""
        return _loss(self.engine(**batch, **options)), _loss(self.plain(**batch, **options))

    def step(self, batch: Batch, **options: Any) -> None:
        mine, plain = self.forward(batch, **options)
        assert mine.item() == plain.item()
        self.engine.backward(mine)
        plain.backward()
        self.finish()

    def finish(self, hypers: Any = None) -> None:
        self.engine.step()
        self.reference.step(hypers)

    def check(self) -> None:
        assert self.reference.count > 0
        assert unequal(states_of(self.model), self.reference.states()) == []


def _loss(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
    return loss


def side_by_side(
    model: nn.Module, use: Callable[[Pair], None], clip: float = 1.0, slide: dict[str, Any] | None = None, **more: Any
) -> None:
    """Give `use` both models and compare every bit at the end."""
    plain = to_bf16(copy.deepcopy(model)).train()
    arguments = {key: more.pop(key) for key in ("optimizer", "lr_scheduler", "model_parameters") if key in more}
    config = ds_config({"window": 2, **(slide or {})}, clip=clip, **more)
    with engine_for(model, config, **arguments) as engine:
        pair = Pair(engine, model, plain, clip)
        use(pair)
        pair.check()


# ---- which parameters train ------------------------------------------------------------------------------------------


def freeze(model: nn.Module, names: Iterable[str]) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in names))
    return model


@pytest.mark.by_turns(2)
@CLIPPING
@pytest.mark.parametrize("names", [("embed", "blocks.1."), ("inner",), ("blocks",), ("head", "blocks.3", "norm")])
def test_frozen_parameters(clip: float, names: Sequence[str]) -> None:
    def use(pair: Pair) -> None:
        before = {name: p.detach().clone() for name, p in pair.plain.named_parameters() if not p.requires_grad}
        for batch in batches(3):
            pair.step(batch)
        frozen = [parameter for parameter in pair.model.parameters() if not parameter.requires_grad]
        assert frozen
        for parameter in frozen:
            assert parameter.grad is None
            assert safe_get_full_fp32_param(parameter) is None
            assert safe_get_full_optimizer_state(parameter, "exp_avg") is None
        for name, states in states_of(pair.model).items():
            if name in before:
                assert same_bits(states["weight"], before[name])
        states_of_engine = pair.engine.optimizer.runtime.units
        trainable = sum(p.numel() for p in pair.plain.parameters() if p.requires_grad)
        # No state for the frozen ones, but for the padding of each parameter to 64 elements.
        moments = sum(unit.state.buffers["exp_avg"].numel for unit in states_of_engine)
        assert moments <= trainable + 64 * len(before) + 4096

    side_by_side(freeze(toy(), names), use, clip)


class Adapted(nn.Module):
    """A frozen layer with a trainable low-rank addition."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x) + self.up(self.down(x))
        return y


@pytest.mark.by_turns(2)
@CLIPPING
@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["none", "reentrant", "non-reentrant"])
def test_adapters_on_a_frozen_model(clip: float, checkpointing: bool | None) -> None:
    model = llama(num_hidden_layers=4).requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        layer.mlp.down_proj = Adapted(layer.mlp.down_proj)
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    side_by_side(model, lambda pair: [pair.step(batch) for batch in batches(3)], clip)


@CLIPPING
def test_parameters_used_in_some_steps_only(clip: float) -> None:
    def use(pair: Pair) -> None:
        for number, batch in enumerate(batches(5)):
            pair.step(batch, use_extra=number in (1, 2))

    side_by_side(toy(), use, clip)


@pytest.mark.by_turns(2)
@CLIPPING
@pytest.mark.parametrize("states", [0, "1GiB"], ids=["host", "gpu"])
def test_parameter_groups_with_a_scheduler_of_deepspeed(clip: float, states: int | str) -> None:
    model = toy()
    decayed = [p for name, p in model.named_parameters() if name.endswith("weight") and "norm" not in name]
    plain_group = [p for name, p in model.named_parameters() if not (name.endswith("weight") and "norm" not in name)]
    groups = [{"params": decayed}, {"params": plain_group, "weight_decay": 0.0, "betas": (0.8, 0.9)}]
    scheduler = {"warmup_min_lr": 0.0, "warmup_max_lr": 2e-3, "warmup_num_steps": 4, "warmup_type": "linear"}

    def use(pair: Pair) -> None:
        rates = []
        for batch in batches(5):
            mine, plain = pair.forward(batch)
            pair.engine.backward(mine)
            plain.backward()
            rates.append(pair.engine.get_lr()[0])
            pair.finish(_hypers_of(pair.plain, rates[-1]))
        assert len(set(rates)) > 2

    more = {"scheduler": {"type": "WarmupLR", "params": scheduler}}
    side_by_side(model, use, clip, {"gpu_states": states}, model_parameters=groups, **more)


def _hypers_of(model: nn.Module, rate: float) -> dict[str, Any]:
    first = dataclasses.replace(HYPER, lr=rate)
    second = dataclasses.replace(HYPER, lr=rate, weight_decay=0.0, betas=(0.8, 0.9))
    return {
        name: first if name.endswith("weight") and "norm" not in name else second
        for name, _ in model.named_parameters()
    }


@CLIPPING
def test_scheduler_of_torch(clip: float) -> None:
    model = toy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))

    def use(pair: Pair) -> None:
        for number, batch in enumerate(batches(3)):
            mine, plain = pair.forward(batch)
            pair.engine.backward(mine)
            plain.backward()
            hyper = dataclasses.replace(HYPER, lr=1e-3 / (1 + number))
            pair.finish({name: hyper for name, _ in pair.plain.named_parameters()})

    more = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    side_by_side(model, use, clip, optimizer=optimizer, lr_scheduler=scheduler, **more)


# ---- loops -----------------------------------------------------------------------------------------------------------


@CLIPPING
def test_evaluation_between_steps(clip: float) -> None:
    def use(pair: Pair) -> None:
        held_out = batches(1, seed=9)[0]
        for batch in batches(3):
            pair.step(batch)
            pair.engine.eval()
            pair.plain.eval()
            with torch.no_grad():
                mine, plain = pair.forward(held_out)
            assert mine.item() == plain.item()
            pair.engine.train()
            pair.plain.train()
            mine, plain = pair.forward(held_out)  # with gradients, and no backward
            assert mine.item() == plain.item()

    side_by_side(toy(), use, clip)


class Notes:
    """Stands for a key-value cache: an object that blocks write into, and that torch can take apart as a tree."""

    def __init__(self, seen: list[torch.Tensor]) -> None:
        self.seen = seen


torch.utils._pytree.register_pytree_node(Notes, lambda notes: (notes.seen, None), lambda seen, _: Notes(list(seen)))


def test_a_block_gets_the_very_object_that_it_is_given() -> None:
    class Writing(Block):
        def forward(self, x: torch.Tensor, notes: Notes) -> torch.Tensor:  # type: ignore[override]
            notes.seen.append(x.detach())
            return super().forward(x)

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Writing() for _ in range(3))

        def forward(self, x: torch.Tensor, notes: Notes) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, notes=notes)
            return x.float().square().mean()

    with engine_for(to_bf16(Stack()), ds_config({"window": 2}, clip=1.0)) as engine:
        notes = Notes([])
        engine.backward(engine(torch.randn(2, WIDTH, dtype=torch.bfloat16), notes))
        engine.step()
    assert len(notes.seen) == 3


@CLIPPING
def test_backward_of_the_loss_itself(clip: float) -> None:
    def use(pair: Pair) -> None:
        for batch in batches(3):
            mine, plain = pair.forward(batch)
            mine.backward()
            plain.backward()
            pair.finish()

    side_by_side(toy(), use, clip)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("clip", [1.0, 0.0], ids=["clipping", "held"])
@pytest.mark.parametrize("states", [0, "1GiB"], ids=["host", "gpu"])
def test_backward_without_step_accumulates(clip: float, states: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With held gradients, as in plain torch: nothing has announced it, so gradients pass in pieces."""
    monkeypatch.setattr("ds_slide.plan.allocations.PIECE_BYTES", 100)

    def use(pair: Pair) -> None:
        for batch in batches(2):
            mine, plain = pair.forward(batch)
            pair.engine.backward(mine)
            plain.backward()
        pair.finish()
        pair.step(batches(1)[0])

    side_by_side(toy(), use, clip, {"defer_updates": True, "gpu_states": states})


def test_forward_without_step_is_refused_when_updates_are_under_way() -> None:
    with engine_for(toy(), ds_config({"window": 2}, clip=0.0)) as engine:
        first, second = batches(2)
        engine.backward(engine(**first))
        with pytest.raises(
            SlideError, match=r'call engine\.step\(\) first, or set "ds_slide": {"defer_updates": true}'
        ):
            engine(**second)
        engine.step()
        loss = engine(**second)
        engine.backward(loss)
        engine.step()
        assert torch.isfinite(loss)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_two_forwards_before_one_backward(accumulation: int) -> None:
    """As in DPO: the loss joins two passes."""

    def use(pair: Pair) -> None:
        data = iter(batches(4 * accumulation))
        for _ in range(2):
            for _ in range(accumulation):
                (left, plain_left), (right, plain_right) = pair.forward(next(data)), pair.forward(next(data))
                mine, plain = 2 * left - right, (2 * plain_left - plain_right) / accumulation
                pair.engine.backward(mine)
                plain.backward()
                if pair.engine.is_gradient_accumulation_boundary():
                    pair.finish()
                else:
                    pair.engine.step()

    side_by_side(toy(), use, 1.0, {"window": 3}, accumulation=accumulation)


@pytest.mark.by_turns(2)
@CLIPPING
@pytest.mark.parametrize("order", [(0, 2, 3), (3, 1, 0, 2), (1,)], ids=["skipped", "shuffled", "one"])
def test_blocks_out_of_order(clip: float, order: Sequence[int]) -> None:
    def use(pair: Pair) -> None:
        for number, batch in enumerate(batches(4)):
            pair.step(batch, order=order if number % 2 else (0, 1, 2, 3))

    side_by_side(toy(), use, clip)


def test_block_used_twice() -> None:
    def use(pair: Pair) -> None:
        for batch in batches(3):
            pair.step(batch, order=(0, 1, 1, 2, 3, 0))

    side_by_side(toy(), use)


@CLIPPING
@pytest.mark.parametrize("with_gradient", [True, False], ids=["training", "no-grad"])
def test_exception_inside_a_block(clip: float, with_gradient: bool) -> None:
    def use(pair: Pair) -> None:
        for batch in batches(3):
            with pytest.raises(KeyError, match="the block failed"), torch.set_grad_enabled(with_gradient):
                pair.engine(**batch, fail_at=2)
            pair.step(batch)

    side_by_side(toy(), use, clip)


@CLIPPING
def test_two_engines_at_once(clip: float) -> None:
    def outer(first: Pair) -> None:
        def inner(second: Pair) -> None:
            for batch in batches(3):
                first.step(batch)
                second.step(batch, use_extra=True)

        side_by_side(toy(), inner, clip, {"window": 3})
        first.step(batches(1)[0])

    side_by_side(toy(), outer, clip)


def test_accumulation_that_discards_a_window() -> None:
    def use(pair: Pair) -> None:
        data = iter(batches(6))
        for _ in range(2):
            for _ in range(2):
                pair.engine.backward(pair.engine(**next(data)))
                if not pair.engine.is_gradient_accumulation_boundary():
                    pair.engine.step()
            pair.engine.optimizer.zero_grad()
            pair.engine.micro_steps += 1  # what step() would have counted
        for _ in range(2):
            mine, plain = pair.forward(next(data))
            pair.engine.backward(mine)
            (plain / 2).backward()
            if pair.engine.is_gradient_accumulation_boundary():
                pair.finish()
            else:
                pair.engine.step()

    side_by_side(toy(), use, 1.0, accumulation=2)


@CLIPPING
def test_hidden_states_in_the_loss(clip: float) -> None:
    def use(pair: Pair) -> None:
        sum_gradients_by_block(pair.plain.model.layers)
        for batch in batches(3):
            outputs = [model(**batch, output_hidden_states=True) for model in (pair.engine, pair.plain)]
            mine, plain = (out.loss + sum(h.float().square().mean() for h in out.hidden_states) for out in outputs)
            assert mine.item() == plain.item()
            pair.engine.backward(mine)
            plain.backward()
            pair.finish()

    side_by_side(llama(num_hidden_layers=4), use, clip)


def test_gradients_between_backward_and_step() -> None:
    def use(pair: Pair) -> None:
        for batch in batches(2):
            mine, plain = pair.forward(batch)
            pair.engine.backward(mine)
            plain.backward()
            own = dict(pair.plain.named_parameters())
            for name, parameter in pair.model.named_parameters():
                gradient = own[name].grad
                expected = torch.zeros(own[name].shape) if gradient is None else gradient.float()
                assert same_bits(safe_get_full_grad(parameter), expected), name
            pair.finish()

    side_by_side(toy(), use)


@CLIPPING
def test_weights_written_between_steps(clip: float) -> None:
    def use(pair: Pair) -> None:
        for batch in batches(3):
            pair.step(batch)
            for model in (pair.model, pair.plain):
                parameters = [model.blocks[1].inner.bias, model.head.weight]
                with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0), torch.no_grad():
                    for parameter in parameters:
                        parameter.mul_(0.5)
            for name in ("blocks.1.inner.bias", "head.weight"):
                pair.reference.remainder[name].zero_()

    side_by_side(toy(), use, clip)


@CLIPPING
@pytest.mark.parametrize("lane", ["update", "h2d", "d2h"])
def test_a_failed_lane_ends_the_run(clip: float, lane: str) -> None:
    """Nobody hangs: the next call that depends on the lane raises, and the engine can be destroyed."""

    def fail() -> int:
        raise OSError("the disk is gone")

    with engine_for(toy(), ds_config({"window": 2}, clip=clip)) as engine:
        data = batches(3)
        engine.backward(engine(**data[0]))
        engine.step()
        workers = engine.optimizer.runtime.parts.context.lanes
        if lane == "update":
            workers.update.submit(0, PASSED, fail)
        else:
            getattr(workers, lane).submit(fail)
        with pytest.raises(SlideError, match=f"the {lane} lane stopped with OSError: the disk is gone; .* checkpoint"):
            for batch in data[1:]:
                engine.backward(engine(**batch))
                engine.step()
            engine(**data[0])


@pytest.mark.parametrize("states", [0, "1GiB"], ids=["host", "gpu"])
def test_accumulation_in_fp32(states: int | str) -> None:
    def use(pair: Pair) -> None:
        own = dict(pair.plain.named_parameters())
        data = iter(batches(6))
        for _ in range(3):
            sums = {name: torch.zeros(parameter.shape) for name, parameter in own.items()}
            for _ in range(2):
                mine, plain = pair.forward(next(data))
                pair.engine.backward(mine)
                (plain / 2).backward()
                for name, parameter in own.items():
                    if parameter.grad is not None:
                        sums[name] += parameter.grad.float()
                    parameter.grad = None
                pair.engine.step()
            pair.reference.step(gradients=sums)

    slide = {"gpu_states": states}
    side_by_side(toy(), use, 1.0, slide, accumulation=2, data_types={"grad_accum_dtype": "fp32"})
