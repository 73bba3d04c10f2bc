"""Inputs of recomputed blocks in host memory: the same bits, within the budgets, and back in time."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from activation_runs import (
    ASKED,
    CASES,
    DELAYS,
    FORMS,
    INPUT,
    MODELS,
    SCHEDULES,
    STEPS,
    Handle,
    SmallGpu,
    Twice,
    asked,
    checkpointed,
    config_of,
    expected,
    free_buffers,
    handle_of,
    layers_of,
    llama,
    run,
    with_hooks_inside,
)
from allocated import storages
from harness import Batch, Result, batches, differences, engine_for, train
from interrupting import Failure, Interrupt
from torch import nn
from torch.autograd.graph import save_on_cpu

from ds_slide.plan.spare import GPU_SHARES
from ds_slide.runtime.activations.moved_inputs import INPUT_MODIFIED, MovedInput, MovedInputs
from ds_slide.runtime.memory.gpu_room import GpuRoom
from ds_slide.runtime.memory.spare_memory import LOOKS

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.thinned(2)]


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> Handle:
    return handle_of(monkeypatch)


@pytest.mark.thinned(4)
@ASKED
@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_what_moves_changes_no_bit(name: str, schedule: str, reentrant: bool | None, handle: Handle) -> None:
    """All inputs that may, and a mixture with blocks that are kept or recomputed, with dropout in their attention."""
    data, blocks = batches(STEPS * SCHEDULES[schedule][1]), len(layers_of(MODELS[name]()))
    for keep, move in ((0, blocks - 2), (2, 1)):
        handle(keep, move)
        result, report = run(asked(name, reentrant), {"gpu_memory": "1GiB"}, data, schedule)
        assert differences(result, expected(name, reentrant, schedule)) == []
        assert (report["keep"], report["recompute"], report["move"]) == (keep, blocks - keep - move, move)
        assert report["moved_bytes"] == move * INPUT and report["host_bytes"] >= move * INPUT


@FORMS
def test_copies_that_are_late_change_no_bit(reentrant: bool, handle: Handle) -> None:
    handle(0, 4)
    data = batches(STEPS)
    result, report = run(asked("llama", reentrant), {"gpu_memory": "1GiB", **DELAYS}, data)
    assert differences(result, expected("llama", reentrant, "clipping")) == [] and report["move"] == 4


@FORMS
@pytest.mark.parametrize("name", ["llama", "adapters"])
def test_hooks_of_layers_inside_of_their_checkpoints(name: str, reentrant: bool, handle: Handle) -> None:
    """With transformers up to 5.22 no hooks for saved tensors lie around it, and no input moved: 8 B with 36,864 tokens
    did not fit into 24 GiB."""
    handle(0, 4)
    model = with_hooks_inside(asked(name, reentrant))
    result, report = run(model, {"gpu_memory": "1GiB"}, batches(STEPS))
    assert differences(result, expected(name, reentrant, "clipping")) == []
    assert report["move"] == min(4, len(layers_of(model)))


@FORMS
def test_inputs_of_blocks_whose_weights_are_on_the_gpu(reentrant: bool, handle: Handle) -> None:
    """None of them has hooks around its call either."""
    handle(0, 4)
    result, report = run(asked("llama", reentrant), {"gpu_memory": "1GiB", "gpu_states": "100MB"}, batches(STEPS))
    assert differences(result, expected("llama", reentrant, "clipping")) == [] and report["move"] == 4


@FORMS
def test_they_come_back_one_block_ahead(reentrant: bool, handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, take = [], MovedInputs._take

    def watched(self: MovedInputs, moved: MovedInput) -> torch.Tensor:
        seen.append((moved in self._coming, len(self._coming)))
        return take(self, moved)

    handle(0, 4)
    monkeypatch.setattr(MovedInputs, "_take", watched)
    run(asked("llama", reentrant), {"gpu_memory": "1GiB"}, batches(3))
    # A recomputation that begins with the hooks of its layer takes its input before the next one is asked for.
    assert [there for there, _ in seen] == [True] * 8 and {coming for _, coming in seen} <= {1, 2}


def test_the_gpu_holds_one_that_has_moved_no_longer(handle: Handle) -> None:
    held = []
    for move in (0, 4):
        handle(0, move)
        with engine_for(checkpointed(llama(), False), config_of({"gpu_memory": "1GiB"})) as engine:
            train(engine, batches(2))
            inputs = engine.optimizer.runtime.parts.spare.activations.inputs
            under_way: list[int] = []
            count = layers_of(engine.module)[-1].register_forward_hook(lambda *_: under_way.append(len(inputs._going)))  # noqa: B023
            loss = engine(**batches(1)[0]).loss
            count.remove()
            assert under_way == [0]  # before the loss, which takes most
            gc.collect()
            pools = engine.optimizer.runtime.parts.context.allocator.pools
            on_host = {address for pool in pools.values() for address in pool.addresses}
            held.append(sum(nbytes for address, nbytes in storages().items() if address not in on_host))
            engine.backward(loss)
            assert free_buffers(engine)
    assert held[0] - held[1] == 4 * INPUT


def test_batches_of_any_length_share_the_buffers(handle: Handle) -> None:
    """What the largest one has taken suffices for all that follow."""
    handle(0, 4)
    lengths, taken, results = (16, 16, 64, 8, 32, 48, 64, 24), [], []
    data = [batch for length in lengths for batch in batches(1, length=length)]
    for slide in ({"activations": "as_written"}, {}):
        with engine_for(checkpointed(llama(), False), config_of({"gpu_memory": "1GiB", **slide})) as engine:
            result = Result()
            for batch in data:
                result.losses += train(engine, [batch]).losses
                taken.append(engine.optimizer.runtime.parts.spare.activations.inputs.buffers.nbytes)
            assert free_buffers(engine)
            results.append(result)
    assert differences(*results) == []
    assert taken[: len(data)] == [0] * len(data) and taken[-6:] == [4 * 2 * INPUT] * 6


def test_the_budget_of_host_memory_is_hard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GpuRoom, "of", lambda *_, **__: -1e9)
    monkeypatch.setattr(GpuRoom, "inputs_missing", lambda *_: 1e9)
    with engine_for(checkpointed(llama(), False), config_of({"gpu_memory": "1GiB"})) as engine:
        states = engine.optimizer.runtime.parts.memory_report["host_state_bytes"]
    limit, data = states + 2 * INPUT + 5_000, batches(STEPS)
    slide = {"gpu_memory": "1GiB", "host_memory": limit, "speculate": False}
    with engine_for(checkpointed(llama(), False), config_of(slide)) as engine:
        train(engine, data)
        parts, report = engine.optimizer.runtime.parts, engine.optimizer.slide_stats()["activations"]
        assert report["move"] == 2 and parts.taken.host_states <= limit


def test_two_graphs_and_a_second_backward(handle: Handle) -> None:
    """Inputs of two forwards wait at the same time, and those of one are needed twice."""
    handle(0, 4)
    losses, gradients = [], []
    for activations in ("as_written", "auto"):
        slide = {"gpu_memory": "1GiB", "activations": activations, "defer_updates": True, **DELAYS}
        with engine_for(checkpointed(llama(), False), config_of(slide)) as engine:
            train(engine, batches(2))
            one, two = (engine(**batch).loss for batch in batches(2, seed=4))
            moved = engine.optimizer.slide_stats()["activations"].get("move", 0)
            assert moved == (4 if activations == "auto" else 0)
            engine.backward(one, retain_graph=True)
            engine.backward(two)
            engine.backward(one)
            losses.append(Result(losses=[one.item(), two.item()]))
            engine.step()
            gradients.append(float(engine.get_global_grad_norm()))
            del one, two
            assert free_buffers(engine)
    assert differences(*losses) == [] and gradients[0] == gradients[1]


def test_blocks_that_are_called_twice(handle: Handle) -> None:
    handle(0, 4)
    results = []
    for activations in ("as_written", "auto"):
        model = Twice(checkpointed(llama(), False))
        slide = {"gpu_memory": "1GiB", "activations": activations, "defer_updates": True}
        results.append(run(model, slide, batches(STEPS))[0])
    assert differences(*results) == []


@pytest.mark.parametrize("error", [Failure, Interrupt])
def test_nothing_is_left_behind_an_exception(error: type[BaseException], handle: Handle) -> None:
    """In the forward, in the backward, and evaluation in between."""
    handle(0, 4)
    model, data = checkpointed(llama(), False), batches(3)
    with engine_for(model, config_of({"gpu_memory": "1GiB", **DELAYS})) as engine:
        train(engine, data)

        def fail(*_args: Any) -> None:
            raise error

        for module in (layers_of(model)[3].mlp, layers_of(model)[5].mlp):
            handle_of_hook = module.register_forward_pre_hook(fail)
            with pytest.raises(error):
                engine(**data[0])
            handle_of_hook.remove()
        loss = engine(**data[0]).loss
        of_backward = loss.grad_fn.register_prehook(fail)
        with pytest.raises(error):
            engine.backward(loss)
        of_backward.remove()
        del loss, of_backward
        gc.collect()
        model.eval()
        with torch.no_grad():
            before = engine(**data[0]).loss
        engine(**data[0])
        with torch.no_grad():
            assert torch.equal(before, engine(**data[0]).loss)
        model.train()
        engine.optimizer.zero_grad()
        train(engine, data)
        assert free_buffers(engine)


def test_an_input_that_is_modified_is_an_error(handle: Handle) -> None:
    """As without moving: its gradients would be those of other numbers."""

    class Modifying(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            given = []

            def remember(_layer: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
                given.append(args[0])

            def change(*_args: Any) -> None:
                with torch.no_grad():
                    given[-1].add_(1.0)

            layer = layers_of(self)[1]
            handles = [layer.register_forward_pre_hook(remember), layer.register_forward_hook(change)]
            try:
                return self.inner(input_ids=input_ids, labels=labels)
            finally:
                for each in handles:
                    each.remove()

    handle(0, 4)
    with engine_for(Modifying(checkpointed(llama(), False)), config_of({"gpu_memory": "1GiB"})) as engine:
        engine(**batches(1)[0])
        loss = engine(**batches(1)[0]).loss
        with pytest.raises(RuntimeError, match=INPUT_MODIFIED):
            engine.backward(loss)


def test_hooks_of_others_get_what_they_got(handle: Handle) -> None:
    """`save_on_cpu` around the forward has the inputs in host memory itself."""
    handle(0, 4)
    with engine_for(checkpointed(llama(), False), config_of({"gpu_memory": "1GiB"})) as engine:
        train(engine, batches(2))
        with save_on_cpu():
            loss = engine(**batches(1)[0]).loss
        assert engine.optimizer.slide_stats()["activations"]["move"] == 0
        engine.backward(loss)
        engine.step()


def small_gpu(engine: Any, room: int, monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """-> how the loss is computed there."""
    parts = engine.optimizer.runtime.parts
    gpu = SmallGpu(parts, parts.plan.gpu_bytes + room)
    gpu.take_place(monkeypatch)

    def loss(engine: Any, batch: Batch) -> torch.Tensor:
        result = engine(**batch).loss
        gpu.compute(batch, elsewhere=parts.spare.activations.inputs.bytes)
        return result

    return loss


def test_as_many_move_as_a_batch_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of a batch that fits; of a longer one the first blocks' inputs, and of a shorter one none again."""
    moved = []
    with engine_for(checkpointed(llama(), False), config_of({"activations": "whole_blocks"})) as engine:
        parts = engine.optimizer.runtime.parts
        room = 3_000 * 64 + 100_000  # the margin takes a sixteenth of all
        loss = small_gpu(engine, room, monkeypatch)
        for length in (*[32] * LOOKS[1], 46, 46, 16, 46):
            train(engine, batches(1, length=length), loss)
            moved.append(parts.spare.activations.statistics["move"])
        missing = 3_000 * 2 * 46 - room + GPU_SHARES.margin * (parts.plan.gpu_bytes + room)
    some = math.ceil(missing / (INPUT * 46 / 32))
    # Attention keeps no probabilities, so that the first one of its length is known to need no more than it does.
    assert moved == [*[0] * LOOKS[1], some, some, 0, some] and 0 < some < 4


def test_a_first_batch_that_fits_with_inputs_in_host_memory_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is measured; later as many move as have to."""
    moved, model = [], checkpointed(llama(num_hidden_layers=12), False)
    with engine_for(model, config_of({"gpu_states": 0})) as engine:
        parts = engine.optimizer.runtime.parts
        loss = small_gpu(engine, 3_000 * 64 - 5 * INPUT, monkeypatch)
        for _ in range(STEPS):
            train(engine, batches(1), loss)
            moved.append(parts.spare.activations.statistics["move"])
    assert moved[: LOOKS[0]] == [10] * LOOKS[0] and set(moved[LOOKS[0] :]) <= set(range(5, 11))
