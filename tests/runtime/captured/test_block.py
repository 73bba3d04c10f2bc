"""A recorded block beside the same block as it is written: gradients, hooks, and calls that must not be replayed."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.sequence.layer import register_all_to_all_group
from torch import nn

from ds_slide.runtime.activations.block_state import BlockState
from ds_slide.runtime.activations.checkpointing import UNASKED, BlockCall
from ds_slide.runtime.activations.kept_calls import OperatorMode
from ds_slide.runtime.captured.block import CapturedBlock
from ds_slide.runtime.captured.graphs import Graph, Memory
from ds_slide.runtime.captured.inputs import SharedPlaces
from ds_slide.runtime.core.calls import in_backward
from ds_slide.runtime.core.device import Device

WIDTH = 4
STATE_CALLS = 3
"""Calls after which a block's state is watched by its versions alone."""


class Block(nn.Module):
    """The smallest block with what a layer has: matrices, a dropout, a configuration, an input without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.0)
        self.act = nn.Tanh()
        self.register_buffer("table", torch.ones(WIDTH))
        self.config = SimpleNamespace(attention="eager")
        self.outside: list[nn.Parameter] = []
        self.draws = False

    def forward(self, hidden: torch.Tensor, scale: torch.Tensor, notes: list[Any] | None = None) -> Any:
        hidden = hidden + self.drop(self.down(self.act(self.up(hidden)) * scale) * scale)
        for each in self.outside:
            hidden = hidden * each
        if self.draws:
            hidden = hidden * random.random()
        if notes is not None:
            notes.append(1)
        return hidden


class InPlace(Block):
    def forward(self, hidden: torch.Tensor, scale: torch.Tensor) -> Any:  # type: ignore[override]
        scale.add_(1.0)
        return super().forward(hidden, scale)


class TwoResults(Block):
    def forward(self, hidden: torch.Tensor, scale: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(hidden, scale), (self.up(hidden) * 0.0).sqrt()


class Talks(Block):
    """Ranks exchange something in its forward."""

    def forward(self, hidden: torch.Tensor, scale: torch.Tensor) -> Any:  # type: ignore[override]
        talk()
        return super().forward(hidden, scale)


class TalksInBackward(Block):
    def forward(self, hidden: torch.Tensor, scale: torch.Tensor) -> Any:  # type: ignore[override]
        return _Talking.apply(super().forward(hidden, scale))


class TalksByDeepSpeed(Block):
    """Its exchange is an operator of its own."""

    def forward(self, hidden: torch.Tensor, scale: torch.Tensor) -> Any:  # type: ignore[override]
        name = register_all_to_all_group(dist.group.WORLD)
        hidden = torch.ops.deepspeed.dim_zero_all_to_all(hidden, name)
        TALKS.append(1)
        return super().forward(hidden, scale)


class TalksInTensor(Block):
    """As with a distributed tensor, an operator of a tensor's class communicates."""

    def forward(self, hidden: torch.Tensor, scale: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(hidden, scale) + torch.Tensor._make_subclass(_TalkingTensor, torch.zeros(())).neg()


class _TalkingTensor(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, _function: Any, _types: Any, _args: Any = (), _kwargs: Any = None) -> torch.Tensor:
        talk()
        return torch.zeros(())


class _Talking(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        talk()
        return gradient


TALKS: list[int] = []


def talk() -> None:
    dist.all_reduce(torch.ones(1))
    TALKS.append(1)


class Captured:
    """A recorded block and its twin, which runs as it is written."""

    def __init__(self, kind: type[Block] = Block, shared: SharedPlaces | None = None, memory: Memory | None = None):
        self.module, self.twin = kind(), kind()
        state = BlockState("block", self.module)
        for _ in range(STATE_CALLS):
            state.before()
        memory = memory or Memory(Device(torch.device("cpu")), None)
        modules = list(self.module.modules())
        place = 0, memory.stack.pushed
        self.block = CapturedBlock(modules, "block", state, memory, shared or SharedPlaces(), place)

    def run(self, *inputs: Any, **kwargs: Any) -> Any:
        function = functools.partial(type(self.module).forward, self.module, **kwargs)
        return self.block.run(BlockCall(None, self.block._modules, UNASKED, function, inputs))  # type: ignore[arg-type]

    def both(self) -> list[Callable[..., Any]]:
        return [self.run, self.twin]

    def record(self, *inputs: Any) -> None:
        """Run it forward and backward once."""
        result = self.run(*(inputs or (hidden(), SCALE)))
        (result if isinstance(result, torch.Tensor) else result[0]).sum().backward()
        self.module.zero_grad()

    def replays(self) -> bool:
        self.run(hidden(), SCALE)
        return self.block.has_replayed

    def gradients(self) -> list[list[Any]]:
        return [
            [None if each.grad is None else each.grad.tolist() for each in module.parameters()]
            for module in (self.module, self.twin)
        ]


SCALE = torch.full((WIDTH,), 0.5)


def hidden(seed: int = 1) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_gradients_of_inputs_alone_leave_the_weights_alone() -> None:
    captured, found = Captured(), []
    captured.record()
    for run in captured.both():
        given = hidden(2)
        found.append(torch.autograd.grad(run(given, SCALE).square().sum(), given)[0].tolist())
    assert captured.block.has_replayed
    assert found[0] == found[1]
    assert captured.gradients() == [[None] * 4] * 2


def test_gradients_of_weights_are_returned_and_stay() -> None:
    captured, found = Captured(), []
    captured.record()
    for run, module in zip(captured.both(), (captured.module, captured.twin), strict=True):
        loss = run(hidden(2), SCALE).square().sum()
        found.append(torch.autograd.grad(loss, [module.up.weight, module.down.bias]))
    captured.run(hidden(3), SCALE).sum().backward()  # overwrites the places of gradients
    assert [each.tolist() for each in found[0]] == [each.tolist() for each in found[1]]


def test_a_backward_for_some_weights_gives_no_gradient_to_others() -> None:
    captured = Captured()
    captured.record()
    for run, module in zip(captured.both(), (captured.module, captured.twin), strict=True):
        run(hidden(2), SCALE).square().sum().backward(inputs=[module.up.weight])
    assert captured.block.has_replayed
    own, expected = captured.gradients()
    assert own == expected
    assert [each is None for each in own] == [False, True, True, True]


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_weights_are_called(when: str) -> None:
    """What they keep stays as it is."""
    captured, kept = Captured(), {}
    if when == "after":
        captured.record()
    for name, module in (("own", captured.module), ("twin", captured.twin)):
        seen, updated = kept.setdefault(name, ([], []))
        module.up.weight.register_hook(lambda gradient, seen=seen: seen.append(gradient) or gradient * 2)
        module.down.weight.register_post_accumulate_grad_hook(lambda each, seen=updated: seen.append(each.grad))
    if when == "before":
        captured.record()
        kept["own"][0].clear()
        kept["own"][1].clear()
    for seed in (2, 3):
        for run in captured.both():
            run(hidden(seed), SCALE).square().sum().backward()
        assert captured.gradients()[0] == captured.gradients()[1]
        captured.module.zero_grad()
        captured.twin.zero_grad()
    assert captured.block.has_replayed
    own, expected = ([[each.tolist() for each in seen] for seen in kept[name]] for name in ("own", "twin"))
    assert own == expected
    assert len(own[0]) == len(own[1]) == 2


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", [Talks, TalksInBackward, TalksByDeepSpeed, TalksInTensor])
def test_a_block_whose_ranks_communicate_is_not_replayed(kind: type[Block]) -> None:
    """Another rank may not replay at that moment: each call has to communicate as often as the operators do."""
    captured = Captured(kind, memory=Memory(Device(torch.device("cpu")), None, several_ranks=True))
    for _ in range(3):
        TALKS.clear()
        captured.record()
        assert len(TALKS) == 1
    assert not captured.block.has_replayed
    assert captured.block.why == "it communicates with other ranks"


def test_a_weight_that_is_used_elsewhere_too_gets_the_sum() -> None:
    captured = Captured()
    captured.record()
    for run, module in zip(captured.both(), (captured.module, captured.twin), strict=True):
        penalty = module.up.weight.square().sum()
        (run(hidden(2), SCALE).square().sum() + penalty).backward()
    assert captured.gradients()[0] == captured.gradients()[1]


def test_blocks_with_two_masks_keep_both_until_their_backwards() -> None:
    memory, shared = Memory(Device(torch.device("cpu")), None), SharedPlaces()
    blocks = []
    masks = [torch.full((WIDTH,), 0.5), torch.full((WIDTH,), 0.25)]
    for step in range(2):
        results = [hidden(2), hidden(2)]
        for number in range(4):
            if not step:
                blocks.append(Captured(shared=shared, memory=memory))
            runs = blocks[number].both()
            results = [run(each, masks[number % 2]) for run, each in zip(runs, results, strict=True)]
        for result in results:
            result.square().sum().backward()
        assert all(each.block.has_replayed for each in blocks)
        assert all(own == expected for own, expected in (each.gradients() for each in blocks))
        masks = [each + 1 for each in masks]
    assert sum(map(len, shared._places.values())) == 2


def test_another_mask_does_not_reach_a_graph_that_waits() -> None:
    """Only the first block waits, so the second one might be replayed."""
    memory, shared = Memory(Device(torch.device("cpu")), None), SharedPlaces()
    first, second = (Captured(shared=shared, memory=memory) for _ in range(2))
    second.block._place = 0, 1
    result = first.run(hidden(), SCALE)
    result = second.run(result, SCALE)
    result.sum().backward()
    first.module.zero_grad()
    waiting = [run(hidden(2), SCALE) for run in first.both()]
    second.run(hidden(3), SCALE * 3)
    assert not second.block.has_replayed
    for each in waiting:
        each.square().sum().backward()
    assert first.gradients()[0] == first.gradients()[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module, "act", nn.ReLU()),
        lambda module: setattr(module.drop, "p", 0.5),
        lambda module: setattr(module.config, "attention", "sdpa"),
        lambda module: setattr(module.up, "weight", nn.Parameter(module.up.weight.detach().clone())),
        lambda module: setattr(module.up, "bias", None),
        lambda module: setattr(module.up, "forward", lambda given: given),
        lambda module: setattr(module.up, "_forward_hooks", {0: print}),
        lambda module: module.up.register_forward_pre_hook(lambda *_: None),
        lambda module: module.up.add_module("adapter", nn.Tanh()),
        lambda module: nn.utils.parametrize.register_parametrization(module.up, "weight", nn.Identity()),
        lambda module: module.drop.eval(),
        lambda module: setattr(module.up.weight, "data", module.up.weight.detach().clone()),
        lambda module: module.up.weight.requires_grad_(False),
        lambda module: setattr(module.table, "data", module.table.clone()),
        lambda module: setattr(module, "draws", 0),
    ],
)
def test_a_block_that_has_changed_is_not_replayed(change: Callable[[Block], Any]) -> None:
    captured = Captured()
    captured.record()
    assert captured.replays()
    change(captured.module)
    assert not captured.replays()


@pytest.mark.parametrize(
    "context",
    [
        torch.no_grad, torch.inference_mode, torch.autograd.forward_ad.dual_level, torch.autograd.detect_anomaly,
        functools.partial(torch.autograd.graph.disable_saved_tensors_hooks, "none here"),
        functools.partial(torch.autocast, "cpu", torch.bfloat16), torch.autograd.graph.save_on_cpu,
    ],
)  # fmt: skip
def test_contexts_in_which_nothing_is_replayed(context: Callable[[], Any]) -> None:
    captured = Captured()
    captured.record()
    with context():
        assert not captured.replays()
    assert captured.replays()


class Seeing(OperatorMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Replaying(Seeing):
    lets_replay = True


@pytest.mark.parametrize(
    ("modes", "replays"),
    [([Seeing], False), ([Replaying], True), ([Replaying, Seeing], False), ([Replaying] * 2, True)],
)
def test_modes_of_the_dispatcher_under_which_blocks_are_replayed(modes: list[type[Seeing]], replays: bool) -> None:
    captured = Captured()
    captured.record()
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode())
        assert captured.replays() == replays


def test_nothing_is_recorded_under_a_mode_of_the_dispatcher() -> None:
    captured = Captured()
    with Replaying():
        captured.record()
    assert captured.block.recording is None and not captured.block.has_ended
    captured.record()
    assert captured.replays()


def test_no_backward_is_recorded_under_a_mode_of_the_dispatcher() -> None:
    """It runs through the recorded graph, and a later one is recorded."""
    captured = Captured()
    for mode in (Replaying(), nullcontext()):
        results = [run(hidden(2), SCALE) for run in captured.both()]
        with mode:
            for result in results:
                result.square().sum().backward()
        assert captured.block.recording is not None
        assert (captured.block.recording.backward is None) == isinstance(mode, Replaying)
        assert captured.gradients()[0] == captured.gradients()[1]
    assert captured.replays()


def test_a_recording_that_is_freed_in_a_hook_of_the_block_is_not_made_anew() -> None:
    """The hook's operators find no memory, and the recordings are given up. Their memory is not counted any more."""
    captured = Captured()
    captured.record()
    captured.module.register_forward_pre_hook(lambda *_: captured.block.end())
    function = functools.partial(captured.module)
    given, expected = (hidden(2) for _ in range(2))
    result = captured.block.run(BlockCall(None, captured.block._modules, UNASKED, function, (given, SCALE)))  # type: ignore[arg-type]
    assert captured.block.recording is None and not captured.block.has_replayed
    captured.twin(expected, SCALE).sum().backward()
    result.sum().backward()
    assert captured.gradients()[0] == captured.gradients()[1] and torch.equal(given.grad, expected.grad)


def test_weights_that_a_hook_of_the_block_binds_are_replayed() -> None:
    """With several ranks the weights are away after each step, until the engine's hook of the block binds them: a step
    of four micro-batches ran its first one as written (0.50 s on two H200s, where one took 0.36 s)."""
    captured = Captured()
    captured.record()
    weight = captured.module.up.weight
    bound, away = weight.data, torch.empty(0)
    captured.module.register_forward_pre_hook(lambda *_: setattr(weight, "data", bound))
    for place in (away, bound):
        weight.data = place
        function = functools.partial(captured.module)
        captured.block.run(BlockCall(None, captured.block._modules, UNASKED, function, (hidden(), SCALE)))  # type: ignore[arg-type]
        assert captured.block.has_replayed


def not_recorded(captured: Captured, *inputs: Any) -> str:
    """Why it was not recorded."""
    result = captured.run(*inputs)
    assert not captured.block.has_replayed and captured.block.recording is None
    assert torch.equal(result, captured.twin(*inputs)) or captured.module.draws
    return captured.block.why


def test_an_input_that_is_written_in_place() -> None:
    scale = SCALE.clone()
    captured = Captured(InPlace)
    captured.run(hidden(), scale)
    assert captured.block.why == "it changes an input in place"
    assert torch.equal(scale, SCALE + 1)


def test_a_container_that_is_written() -> None:
    notes: list[Any] = []
    assert not_recorded(Captured(), hidden(), SCALE, notes) == "it changes a container among its inputs"
    assert notes == [1, 1]  # one for each of the twins


def test_a_weight_from_outside() -> None:
    captured, outside = Captured(), nn.Parameter(torch.full((WIDTH,), 2.0))
    captured.module.outside, captured.twin.outside = [outside], [outside]
    assert "neither an input nor its own weight" in not_recorded(captured, hidden(), SCALE)


def test_random_numbers_of_the_host() -> None:
    captured = Captured()
    captured.module.draws = True
    random.seed(5)
    found = captured.run(hidden(), SCALE)
    captured.twin.draws = True
    random.seed(5)
    assert torch.equal(found, captured.twin(hidden(), SCALE))
    assert captured.block.why == "it draws random numbers on the host"


def test_an_error_of_any_kind_ends_the_recording_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise TypeError("not in a recording")

    monkeypatch.setattr(Graph, "record", refuse)
    captured = Captured()
    assert not_recorded(captured, hidden(), SCALE) == "not in a recording"
    assert captured.block._memory.stack.is_empty


def test_a_backward_that_cannot_be_recorded_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA: it waits for the GPU, for instance."""
    record = Graph.record

    def refuse_backwards(self: Graph, function: Any) -> Any:
        if in_backward():
            raise RuntimeError("operation not permitted when stream is capturing")
        return record(self, function)

    monkeypatch.setattr(Graph, "record", refuse_backwards)
    captured = Captured()
    for run in captured.both():
        loss = run(hidden(2), SCALE).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert captured.gradients()[0] == captured.gradients()[1]
    assert captured.block.has_ended and "not permitted" in captured.block.why


def test_a_result_without_a_gradient_counts_for_nothing() -> None:
    """Its derivative is infinite here."""
    captured = Captured(TwoResults)
    sums: list[Callable[[Any], torch.Tensor]] = [
        lambda results: results[0].sum() + results[1].detach().sum(),
        lambda results: results[0].square().sum(),
        lambda results: results[1].sum() * 0.0,
    ]
    for number, of in enumerate((sums[0], sums[2], sums[1])):
        for run in captured.both():
            of(run(hidden(2), SCALE)).backward()
        own, expected = captured.gradients()
        assert str(own) == str(expected), number
        captured.module.zero_grad()
        captured.twin.zero_grad()


def test_a_graph_that_other_gradients_may_need_stays() -> None:
    captured = Captured(TwoResults)
    captured.record()
    assert captured.block.recording is not None and not captured.block.may_release
    for run in captured.both():
        run(hidden(2), SCALE)[1].square().sum().backward()
    own, expected = captured.gradients()
    assert str(own) == str(expected)


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given.clone()

    @staticmethod
    def backward(_ctx: Any, *_gradients: Any) -> None:
        return None


def test_a_backward_without_a_gradient_is_not_recorded() -> None:
    captured = Captured()
    wraps: list[Callable[..., torch.Tensor]] = [NoGradient.apply, lambda given: given]
    for wrap in wraps:
        assert not captured.block.may_release
        wrap(captured.run(hidden(2), SCALE)).sum().backward()
    assert captured.block.may_release
    assert captured.block.recording is not None and captured.block.recording.pattern == (True,)
    captured.twin(hidden(2), SCALE).sum().backward()
    assert captured.gradients()[0] == captured.gradients()[1]


def test_a_weight_that_was_written_before_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays compare no versions, on CUDA."""
    captured = Captured()
    captured.record()
    monkeypatch.setattr(Graph, "replay", lambda _: None)
    for run, module in zip(captured.both(), (captured.module, captured.twin), strict=True):
        loss = run(hidden(2), SCALE).square().sum()
        with torch.no_grad():
            module.down.weight.mul_(2.0)
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            loss.backward()


def test_a_backward_that_is_recorded_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a later call than the forward, behind a step. On CUDA it goes through the graph of the first call."""
    captured = Captured()
    captured.run(hidden(2), SCALE)
    monkeypatch.setattr(Graph, "replay", lambda _: None)
    for run, module in zip(captured.both(), (captured.module, captured.twin), strict=True):
        with torch.no_grad():
            module.down.weight.mul_(1.0)
        run(hidden(2), SCALE.clone()).square().sum().backward()
    assert captured.block.has_replayed and captured.block.recording is not None
    assert captured.block.recording.backward is not None
    assert captured.gradients()[0] == captured.gradients()[1]


def test_other_gradients_in_a_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA they come through the graph of the first call, too."""
    captured = Captured(TwoResults)
    captured.record(hidden(2), SCALE)
    monkeypatch.setattr(Graph, "replay", lambda _: None)
    for run, module in zip(captured.both(), (captured.module, captured.twin), strict=True):
        with torch.no_grad():
            module.down.weight.mul_(1.0)
        results = run(hidden(2), SCALE.clone())
        (results[0].sum() + (results[1] * 0.5).sum()).backward()
    assert captured.block.has_replayed
    assert str(captured.gradients()[0]) == str(captured.gradients()[1])


def test_a_second_backward_of_a_freed_graph_has_the_error_of_torch() -> None:
    captured = Captured()
    captured.record()
    for run in captured.both():
        loss = run(hidden(2), SCALE).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


def test_a_copy_of_the_model_is_not_recorded() -> None:
    captured = Captured()
    captured.record()
    twin = copy.deepcopy(captured.module)
    twin(hidden(), SCALE).sum().backward()
    assert captured.gradients()[0] == [None] * 4
