"""What autograd saves: a client's hooks and functions get what they would get without the engine."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_get_full_grad
from harness import (
    VOCABULARY,
    Batch,
    PlainAdamW,
    Result,
    batches,
    differences,
    ds_config,
    engine_for,
    plain_training,
    states_of,
    to_bf16,
    train,
)
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ds_slide.runtime.weights.saved_weights import hooks_around

pytestmark = pytest.mark.usefixtures("one_rank")

WIDTH, BLOCKS = 32, 5
REENTRANT = pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "non-reentrant", "reentrant"])

Note = Callable[[nn.Parameter, torch.Tensor], None]
"""Told a parameter that a function has saved, and what it got back."""


class Product(torch.autograd.Function):
    """x @ weight.T, as fused losses write it: what was saved must be a parameter of ZeRO-3, or hold its values."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter, note: Note) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.note = functools.partial(note, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        ctx.note(weight)
        flat = gradient.flatten(0, -2)
        return gradient @ weight, flat.t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None, None


class Block(nn.Module):
    def __init__(self, note: Note) -> None:
        super().__init__()
        self.note = note
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.mix.weight.t()  # saves a view
        return x + Product.apply(self.inner(x).tanh(), self.outer.weight, self.note)


class Toy(nn.Module):
    """`group`: blocks under one checkpoint; 0: no checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.in_blocks: list[tuple[nn.Parameter, torch.Tensor]] = []
        self.outside: list[tuple[nn.Parameter, torch.Tensor]] = []
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(self.note_in_block) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.group, self.reentrant = 0, False

    def note_in_block(self, parameter: nn.Parameter, saved: torch.Tensor) -> None:
        self.in_blocks.append((parameter, saved))

    def note_outside(self, parameter: nn.Parameter, saved: torch.Tensor) -> None:
        self.outside.append((parameter, saved))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for first in range(0, BLOCKS, self.group or BLOCKS):
            group = self.blocks[first : first + (self.group or BLOCKS)]
            run = nn.Sequential.forward
            x = checkpoint(run, group, x, use_reentrant=self.reentrant) if self.group else run(group, x)
        logits = Product.apply(x, self.head.weight, self.note_outside)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def toy(reentrant: bool | None = None, group: int = 1) -> Toy:
    torch.manual_seed(0)
    model = Toy()
    if reentrant is not None:
        model.group, model.reentrant = group, reentrant
    return model


def run(
    model: Toy,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    prepare: Callable[[Toy], object] = lambda _: None,
    window: int = 2,
) -> Result:
    """Two steps with `around` about each forward; `prepare` is called when the engine has the model."""

    def loss(engine: Any, batch: Batch) -> torch.Tensor:
        with around():
            value: torch.Tensor = engine(**batch)
        return value

    with engine_for(model, ds_config({"window": window})) as engine:
        prepare(model)
        result = train(engine, batches(2), loss)
        assert hooks_around() is None
        result.states = states_of(model)
    return result


@pytest.fixture(scope="module")
def undisturbed(one_rank: None) -> Result:  # noqa: ARG001
    """The same steps in plain torch."""
    return plain_training(to_bf16(toy()), batches(2), 1.0, lambda model, batch: model(**batch))


class Client(saved_tensors_hooks):
    """Hooks of a trainer that keeps copies elsewhere; `packed` are the addresses of what it was given."""

    def __init__(self) -> None:
        self.packed: list[int] = []
        self.unpacked = 0
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.packed.append(tensor.untyped_storage().data_ptr())
        return tensor.detach().clone()

    def _unpack(self, copy: torch.Tensor) -> torch.Tensor:
        self.unpacked += 1
        return copy


def in_slots(engine: Any) -> set[int]:
    return set(engine.optimizer.runtime.parts.window.by_storage)


# ---- which object comes back ----------------------------------------------------------------------------------------


@REENTRANT
def test_a_function_outside_of_blocks_gets_its_parameter_back(reentrant: bool | None, undisturbed: Result) -> None:
    model = toy(reentrant)
    result = run(model)
    assert len(model.outside) == 2
    for parameter, saved in model.outside:
        assert saved is parameter is model.head.weight
        assert hasattr(saved, "ds_id") and isinstance(saved.ds_status, ZeroParamStatus)
    assert differences(result, undisturbed) == []


@pytest.mark.parametrize("window", [2, BLOCKS], ids=["two-slots", "all-slots"])
def test_a_function_in_a_block_gets_the_values_of_its_own_weight(window: int) -> None:
    """Other blocks have been through the slot since."""
    model, values = toy(), []
    for block in model.blocks:
        block.note = lambda parameter, saved: values.append((parameter, saved.clone()))
    with engine_for(model, ds_config({"window": window})) as engine:
        expected = {id(block.outer.weight) for block in model.blocks}
        weights = {name: tensors["weight"] for name, tensors in states_of(model).items()}
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        engine.backward(engine(**batches(1)[0]))
        assert len(values) == BLOCKS
        for parameter, value in values:
            assert id(parameter) in expected
            assert torch.equal(value, weights[names[id(parameter)]])
        engine.step()


def test_weights_and_their_views_are_right_in_another_slot_than_they_were_saved_in() -> None:
    """Two forwards before one backward: of five blocks in two slots, the last comes back to the other one."""
    first, second = batches(2)
    model, plain = toy(), to_bf16(toy())
    reference = PlainAdamW(plain, clip=1.0)
    (plain(**first) + plain(**second)).backward()
    reference.step()
    with engine_for(model, ds_config({"window": 2})) as engine:
        engine.backward(engine(**first) + engine(**second))
        engine.step()
        mine = Result(states=states_of(model))
    assert differences(mine, Result(states=reference.states())) == []


def test_a_frozen_parameter_of_a_block_comes_back_as_itself() -> None:
    model = toy()
    for block in model.blocks:
        block.outer.weight.requires_grad_(False)
    run(model)
    assert len(model.in_blocks) == 2 * BLOCKS
    assert all(saved is parameter for parameter, saved in model.in_blocks)


def test_a_parameter_of_a_block_that_is_recomputed_re_entrantly_comes_back_as_itself() -> None:
    model = toy(reentrant=True)
    run(model)
    assert len(model.in_blocks) == 2 * BLOCKS
    assert all(saved is parameter for parameter, saved in model.in_blocks)


def test_a_parameter_of_a_block_that_stays_on_the_gpu_comes_back_as_itself() -> None:
    model = toy()
    with engine_for(model, ds_config({"gpu_states": "1GiB"})) as engine:
        train(engine, batches(2), lambda engine, batch: engine(**batch))
    assert len(model.in_blocks) == 2 * BLOCKS
    assert all(saved is parameter for parameter, saved in model.in_blocks)


# ---- a client's hooks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [None, False], ids=["plain", "non-reentrant"])
def test_hooks_around_the_forward_get_activations_and_no_weights_of_blocks(
    reentrant: bool | None, undisturbed: Result
) -> None:
    client, slots = Client(), set()
    model = toy(reentrant)

    def loss(engine: Any, batch: Batch) -> torch.Tensor:
        slots.update(in_slots(engine))
        with client:
            value: torch.Tensor = engine(**batch)
        return value

    with engine_for(model, ds_config({"window": 2})) as engine:
        result = train(engine, batches(2), loss)
        result.states = states_of(model)
    # Each block saves its input and the product's at least. Under checkpointing they go to its hooks, which are nearer.
    assert client.unpacked >= (0 if reentrant is False else 2 * 2 * BLOCKS) + 2
    assert not slots & set(client.packed)
    assert differences(result, undisturbed) == []


@REENTRANT
def test_hooks_within_blocks_do_not_disturb(reentrant: bool | None, undisturbed: Result) -> None:
    """They see the weights, as they would without the engine, and keep copies of what the slot holds then."""
    client = Client()

    def wrap(model: Toy) -> None:
        for block in model.blocks:
            forward = block.inner.forward

            def hooked(x: torch.Tensor, forward: Callable[[torch.Tensor], torch.Tensor] = forward) -> torch.Tensor:
                with client:
                    return forward(x)

            block.inner.forward = hooked

    result = run(toy(reentrant), prepare=wrap)
    assert client.unpacked >= 2 * BLOCKS
    assert differences(result, undisturbed) == []


def test_hooks_opened_and_closed_by_hooks_of_the_block_stay_apart_from_its_own(undisturbed: Result) -> None:
    """A forward hook that was registered later runs later: these are closed in the order in which they were opened."""
    client, nearest = Client(), []

    def leave(*_: Any) -> None:
        nearest.append(hooks_around())
        client.__exit__()

    def wrap(model: Toy) -> None:
        for block in model.blocks:
            block.register_forward_pre_hook(lambda *_: client.__enter__())
            block.register_forward_hook(leave)

    result = run(toy(), prepare=wrap)
    assert nearest == [(client.pack_hook, client.unpack_hook)] * 2 * BLOCKS
    assert client.unpacked >= 2 * 2 * BLOCKS
    assert differences(result, undisturbed) == []


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_a_checkpoint_around_two_blocks(reentrant: bool, undisturbed: Result) -> None:
    """Its hooks count what both blocks save, in forward and again when they are recomputed."""
    result = run(toy(reentrant, group=2), window=3)
    assert differences(result, undisturbed) == []


def test_hooks_between_a_checkpoint_and_its_block(undisturbed: Result) -> None:
    client = Client()

    def wrap(model: Toy) -> None:
        for block in model.blocks:
            call = type(block).__call__

            class Wrapped(Block):
                def __call__(self, x: torch.Tensor, call: Any = call) -> torch.Tensor:
                    with client:
                        return call(self, x)  # type: ignore[no-any-return]

            block.__class__ = Wrapped

    result = run(toy(reentrant=False), prepare=wrap)
    assert client.unpacked >= 2 * 2 * BLOCKS
    assert differences(result, undisturbed) == []


# ---- what is left ---------------------------------------------------------------------------------------------------


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_a_forward_without_backward_leaves_nothing() -> None:
    """`tanh` saves its own result: held by the hooks as it is, it would hold itself."""
    model = toy()
    with engine_for(model, ds_config({"window": 2})) as engine:
        blocks = engine.optimizer.runtime.blocks
        loss = engine(**batches(1)[0])
        assert [unit.uses.begun for unit in blocks] == [1] * BLOCKS
        del loss
        assert [unit.uses.begun for unit in blocks] == [0] * BLOCKS
        train(engine, batches(1), lambda engine, batch: engine(**batch))


class Filter(nn.Module):
    """Multiplies by complex weights, which are saved as views of the real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 2))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = torch.view_as_complex(self.weight)
        return self.inner((x.to(torch.complex64) * weight * weight.conj()).real)


class Filters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Filter() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def test_views_of_weights_in_another_data_type() -> None:
    torch.manual_seed(0)
    plain = Filters()
    model = Filters()
    model.load_state_dict(plain.state_dict())
    x = torch.randn(4, WIDTH)
    plain(x).backward()
    with engine_for(model, ds_config({"window": 2}, clip=1.0, bf16={"enabled": False})) as engine:
        engine.backward(engine(x))
        for (name, parameter), given in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(safe_get_full_grad(given), parameter.grad, msg=name)
