"""Small parameters between forwards: a script reads their present value, and what it writes there is trained on.

Small is what stock keeps on the accelerator (`stage3_param_persistence_threshold`), which is the whole of these models
unless a test lowers it.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param
from loops import Net, Run, assert_right, inputs, made, outcome, run_loop, running
from torch import nn

from ds_slide.errors import SlideError

pytestmark = pytest.mark.usefixtures("one_rank")


class Clip(Net):
    """Two towers' worth of features, compared at a temperature that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor([4.6]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = nn.functional.normalize(self.head(self.hidden(x)), dim=-1)
        logits = self.logit_scale.exp() * features @ features.T
        return nn.functional.cross_entropy(logits, torch.arange(len(x)).roll(1))


def trained(
    run: Run, between: Callable[[Any], Any], build: Callable[[], nn.Module] = Clip, steps: int = 4
) -> list[Any]:
    """What `between` returns for the module before the first step, and after each."""
    engine = run.start(made(build))
    found = [between(engine.module)]
    for x in inputs(steps):
        engine.backward(engine(x))
        engine.step()
        found.append(between(engine.module))
    return found


def numbers(module: Any, names: str) -> list[float]:
    return [float(each.detach().float().norm()) for name, each in module.named_parameters() if names in name]


def clamped(run: Run) -> Any:
    def clamp(module: Any) -> float:
        with torch.no_grad():
            module.logit_scale.clamp_(0, 4.5)
        return module.logit_scale.item()

    return trained(run, clamp)


def clamped_data(run: Run) -> Any:
    return trained(run, lambda module: float(module.logit_scale.data.clamp_(0, 4.5)))


def assigned_data(run: Run) -> Any:
    def clamp(module: Any) -> float:
        module.logit_scale.data = torch.clamp(module.logit_scale.data, 0, 4.5)
        return float(module.logit_scale)

    return trained(run, clamp)


def norms_for_the_log(run: Run) -> Any:
    return trained(run, lambda module: [float(p.norm()) for p in module.parameters()])


def sum_of_a_norm_weight(run: Run) -> Any:
    return trained(run, lambda module: module.blocks[1].norm.weight.sum().item())


def renormalised(run: Run) -> Any:
    """The rows of a matrix in a block, and of one outside, are kept at length 1."""

    def renormalise(module: Any) -> list[float]:
        with torch.no_grad():
            for weight in (module.blocks[2].up.weight, module.head.weight):
                weight.div_(weight.norm(dim=1, keepdim=True))
        return numbers(module, "weight")

    return trained(run, renormalise)


def views(run: Run) -> Any:
    def write(module: Any) -> list[float]:
        with torch.no_grad():
            module.blocks[0].norm.bias[0] = 1.0
            module.blocks[0].up.weight.view(-1)[3:5].zero_()
            module.head.weight.t()[1] *= 0.5
            module.inp.bias.detach().mul_(0.9)
            module.blocks[3].down.bias.data.copy_(torch.linspace(0, 1, 32))
        return numbers(module, "")

    return trained(run, write)


def average_of_the_weights(run: Run) -> Any:
    """An exponential moving average, whose weights are evaluated with and put back."""
    engine = run.start(made(Net))
    shadow = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    found = []
    for x in inputs(3):
        engine.backward(engine(x))
        engine.step()
        with torch.no_grad():
            for name, p in engine.module.named_parameters():
                shadow[name].lerp_(p, 0.1)
            kept = [p.clone() for p in engine.module.parameters()]
            for name, p in engine.module.named_parameters():
                p.data.copy_(shadow[name])
            engine.eval()
            found.append(float(engine(x)))
            engine.train()
            for p, old in zip(engine.module.parameters(), kept, strict=True):
                p.data.copy_(old)
    return found


def foreach_decay(run: Run) -> Any:
    def decay(module: Any) -> list[float]:
        with torch.no_grad():
            torch._foreach_mul_(list(module.parameters()), 0.99)
            nn.init.zeros_(module.blocks[1].up.bias)
        return [float(each) for each in torch._foreach_norm([p.detach() for p in module.parameters()])]

    return trained(run, decay)


def loaded(run: Run) -> Any:
    """A module outside of the blocks loads a state before the first step, when its weights are on the GPU."""
    engine = run.start(made(Net))
    engine.module.inp.load_state_dict(made(Net, seed=5).inp.state_dict())
    return [float(engine(x)) for x in inputs(1)] + trained_further(engine)


def trained_further(engine: Any) -> list[float]:
    losses = []
    for x in inputs(3):
        losses.append(float(loss := engine(x)))
        engine.backward(loss)
        engine.step()
    return losses


WRITES: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "data": lambda module, value: setattr(module.weight, "data", value),
    "copy_": lambda module, value: module.weight.copy_(value),
    "mul_": lambda module, value: module.weight.mul_(value),
    "set_": lambda module, value: module.weight.set_(value),
    "uniform_": lambda module, value: nn.init.uniform_(module.weight, 0.0, float(value.abs().max())),
    "load_state_dict": lambda module, value: module.load_state_dict({"weight": value}, strict=False),
}


def gathered_writes(write: Callable[[nn.Module, torch.Tensor], Any]) -> Callable[[Run], Any]:
    """To a parameter of a block and to one outside, before the first step and after others."""

    def loop(run: Run) -> Any:
        engine, losses = run.start(made(Net)), []
        for _ in range(2):
            for module in (engine.module.blocks[1].up, engine.module.inp):
                value = 0.1 * torch.randn(module.out_features, module.in_features)
                gathered = contextlib.nullcontext()
                if run.system != "plain":
                    gathered = deepspeed.zero.GatheredParameters([module.weight], modifier_rank=0)
                with torch.no_grad(), gathered:
                    write(module, value)
            losses += trained_further(engine)
        return losses

    return loop


def penalty_beside_the_loss(run: Run) -> Any:
    """A term over all weights that no forward of the engine has computed."""
    engine = run.start(made(Net))
    for x in inputs(4):
        penalty = sum(p.square().sum() for p in engine.module.parameters())
        engine.backward(engine(x) + 0.1 * penalty)
        engine.step()


def penalty_after_the_loss(run: Run) -> Any:
    engine = run.start(made(Net))
    for x in inputs(4):
        loss = engine(x)
        for block in engine.module.blocks:
            loss = loss + 0.1 * block.up.weight.view(-1).abs().sum()
        engine.backward(loss)
        engine.step()


def penalty_alone(run: Run) -> Any:
    """A backward of its own, before and after that of the loss, as in plain torch. With clipping off it is refused."""
    engine = run.start(made(Net))
    for x in inputs(4):
        for early in (True, False):
            penalty = 0.1 * sum(block.up.weight.square().sum() for block in engine.module.blocks)
            (penalty if early else penalty.sqrt()).backward()
            if early:
                engine.backward(engine(x))
        engine.step()


def adversary(run: Run) -> Any:
    """Two models: the critic's weights are clamped after each of its steps, while the other one is only read."""
    maker, critic = run.start(made(Net)), run.start(made(Clip, seed=1))
    found = []
    for x in inputs(3):
        critic.backward(critic(maker.module.hidden(x).detach()))
        critic.step()
        for p in critic.module.parameters():
            p.data.clamp_(-0.15, 0.15)
        found.append(sum(float(p.abs().sum()) for p in maker.module.parameters()))
    return found


LOOPS = [
    (clamped, "wrong"),
    (clamped_data, "error"),
    (assigned_data, "error"),
    (norms_for_the_log, "wrong"),
    (sum_of_a_norm_weight, "wrong"),
    (renormalised, "error"),
    (views, "error"),
    (average_of_the_weights, "error"),
    (foreach_decay, "wrong"),
    (loaded, "error"),
    (penalty_beside_the_loss, "error"),
    (penalty_after_the_loss, "error"),
    (adversary, "wrong"),
]
WINDOWS: list[dict[str, Any]] = [{"window": 2}, {}]


@pytest.mark.by_turns(4)
@pytest.mark.parametrize("slide", WINDOWS, ids=["window 2", "default window"])
@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("loop", [loop for loop, _ in LOOPS])
def test_the_numbers_are_plain_torchs(loop, clip, slide):
    assert_right(run_loop(loop, "slide", clip=clip, slide=slide), run_loop(loop, "plain", clip=clip))


@pytest.mark.parametrize("slide", [{"window": 2, "gpu_states": 0}, {"gpu_states": "1GiB"}], ids=["streams", "stays"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_is_written_in_gathered_parameters_counts(write, slide):
    loop = gathered_writes(write)
    assert_right(run_loop(loop, "slide", slide=slide), run_loop(loop, "plain"))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("loop, expected", LOOPS)
def test_stock_is_as_the_table_says(loop, expected):
    assert outcome(loop, "stock") == expected


def test_a_penalty_with_a_backward_of_its_own(capfd):
    assert_right(run_loop(penalty_alone, "slide", clip=1.0), run_loop(penalty_alone, "plain", clip=1.0))
    with pytest.raises(SlideError, match="no output of the engine's forward needs the gradients between backward"):
        run_loop(penalty_alone, "slide", clip=0.0)
    capfd.readouterr()


SMALL = 1000
"""Elements: biases and norms are small then, matrices are not."""
LARGE = "blocks.0.up.weight of shape (128, 32) is not on the accelerator between forwards"
COMPUTATIONS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda p: p.sum(),
    "norm of data": lambda p: p.data.norm(),
    "cast": lambda p: p.float().norm(),
    "copy": lambda p: p.detach().cpu().clone(),
    "index": lambda p: p[0],
    "in place": lambda p: p.data.clamp_(0, 1),
    "initialisation": lambda p: nn.init.zeros_(p),
    "numpy": lambda p: p.detach().numpy(),
    "function": lambda p: nn.functional.linear(torch.ones(1, 32), p),
}


@contextlib.contextmanager
def stepped(**more: Any) -> Iterator[Any]:
    """An engine of a `Net` after one step. `more`: of the DeepSpeed config."""
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "stage3_param_persistence_threshold": SMALL}
    with running("slide", 1.0, {"window": 2}) as run:
        engine = run.start(made(Net), zero_optimization=zero, **more)
        engine.backward(engine(inputs(1)[0].to(next(engine.module.parameters()).dtype)))
        engine.step()
        yield engine


@pytest.mark.parametrize("compute", COMPUTATIONS.values(), ids=COMPUTATIONS)
def test_a_large_one_that_is_not_there_is_refused(compute):
    with stepped() as engine:
        parameter = engine.module.blocks[0].up.weight
        with torch.no_grad(), pytest.raises(SlideError, match=re.escape(LARGE)):
            compute(parameter)
        with deepspeed.zero.GatheredParameters([parameter]):
            assert float(parameter.sum()) != 0.0
        assert parameter.numel() == 0


def test_questions_are_answered_as_ever():
    with stepped() as engine:
        for parameter in (engine.module.blocks[0].up.weight, engine.module.blocks[0].up.bias):
            assert (parameter.shape, parameter.numel(), parameter.dtype) == (torch.Size([0]), 0, torch.float32)
            assert repr(parameter) == "Parameter containing:\ntensor([], requires_grad=True)"
            assert isinstance(parameter, nn.Parameter) and parameter in {parameter: 1} and parameter.is_leaf
            assert type(copy.copy(parameter)) is nn.Parameter and type(type(parameter)(torch.ones(2))) is nn.Parameter
        state = engine.module.state_dict()
        assert {type(each) for each in state.values()} == {torch.Tensor}
        assert all(state[name].shape == p.shape for name, p in engine.module.named_parameters())
        assert not engine.module.load_state_dict(state).missing_keys
        assert all(p.dtype == torch.float16 for p in engine.module.half().parameters())
        assert engine.module.blocks[0].up.bias.float().norm() > 0


def test_what_is_written_to_an_array_is_not_lost():
    with stepped() as engine:
        array = engine.module.blocks[0].up.bias.detach().numpy()
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1.0


def test_a_value_of_another_shape_is_refused():
    with (
        stepped() as engine,
        pytest.raises(SlideError, match=r"blocks.0.up.bias has the shape \(128,\), but the value"),
    ):
        engine.module.blocks[0].up.bias.data = torch.ones(3)


@pytest.mark.parametrize("slide", [{"window": 2, "gpu_states": 0}, {"gpu_states": "1GiB"}], ids=["streams", "stays"])
@pytest.mark.parametrize("shape", [(129, 32), (3, 32), (128 * 32,)])
def test_a_value_of_another_shape_in_gathered_parameters_is_refused(shape, slide):
    """The parameters keep the weights that they had, and training goes on with them."""

    def loop(run: Run) -> Any:
        engine = run.start(made(Net))
        losses = trained_further(engine)
        if run.system == "slide":
            weight = engine.module.blocks[0].up.weight
            with pytest.raises(SlideError, match=r"blocks.0.up.weight has the shape \(128, 32\), but the value"):
                with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
                    weight.data = torch.ones(shape)
        return losses + trained_further(engine)

    assert_right(run_loop(loop, "slide", slide=slide), run_loop(loop, "plain"))


def test_elements_that_are_not_written_keep_their_masters():
    """In bf16, where the master has 16 bits more than a script can see."""
    with stepped(bf16={"enabled": True}) as engine:
        bias = engine.module.blocks[0].up.bias
        before = safe_get_full_fp32_param(bias).clone()
        with torch.no_grad():
            bias[3:5] = 0.5
            bias.clamp_(-10, 10)
        after = safe_get_full_fp32_param(bias)
        assert after[3:5].tolist() == [0.5, 0.5] and not torch.equal(before, before.bfloat16().float())
        assert torch.equal(after[5:], before[5:]) and torch.equal(after[:3], before[:3])
        assert bias.dtype == torch.bfloat16 and torch.equal(bias[5:].float(), before[5:].bfloat16().float())


@pytest.mark.parametrize("slide", [{"window": 2, "gpu_states": 10**6}, {"window": 2, "gpu_states": 0}])
def test_frozen_ones_and_states_on_the_gpu(slide):
    def frozen(run: Run) -> Any:
        model = made(Clip)
        for parameter in (model.blocks[1].norm.weight, model.inp.bias):
            parameter.requires_grad = False
        engine = run.start(model)
        found = []
        for x in inputs(3):
            engine.backward(engine(x))
            engine.step()
            with torch.no_grad():
                for parameter in (model.blocks[1].norm.weight, model.inp.bias, model.blocks[2].norm.weight):
                    parameter.mul_(0.9)
            found.append(numbers(engine.module, "norm") + numbers(engine.module, "inp"))
        return found

    assert_right(run_loop(frozen, "slide", slide=slide), run_loop(frozen, "plain"))


def test_states_on_ssd(tmp_path):
    def renormalised_on_ssd(run: Run) -> Any:
        zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
        zero["offload_param"] = zero["offload_optimizer"]
        engine = run.start(made(Net), **({} if run.system == "plain" else {"zero_optimization": zero}))
        for x in inputs(3):
            engine.backward(engine(x))
            engine.step()
            with torch.no_grad():
                weight = engine.module.blocks[2].up.weight
                weight /= weight.norm(dim=1, keepdim=True)
        return numbers(engine.module, "weight")

    assert_right(run_loop(renormalised_on_ssd, "slide"), run_loop(renormalised_on_ssd, "plain"))
