"""A client catches an exception out of forward or backward and goes on: the batch never happened, or the engine refuses
by name. Never are gradients of half a backward in a step.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Result, batches, differences, ds_config, engine_for, on_ssd, states_of
from interrupting import (
    BLOCKS,
    Client,
    Failure,
    Interrupt,
    Model,
    check_that_nothing_is_left,
    places,
    takes_nothing,
    windows,
)
from torch import nn
from torch.autograd.graph import save_on_cpu

from ds_slide.compression.codec import Identity
from ds_slide.errors import SlideError
from ds_slide.runtime.weights.saved_weights import hooks_around

pytestmark = pytest.mark.usefixtures("one_rank")

KINDS = pytest.mark.parametrize(
    ("tier", "reentrant"),
    [("host", None), ("host", True), ("host", False), ("ssd", False)],
    ids=["plain", "reentrant", "non-reentrant", "ssd"],
)
REFUSED = "parts of its gradients had been added to those of earlier micro-batches of this step.*zero_grad"
MIXED = r"a mixture of two steps; load the last checkpoint with engine\.load_checkpoint"
NOTHING_KEPT = r"engine\.step\(\) after a backward\(\) that ended with an exception"
ERRORS = (Failure, Interrupt)


def config_for(tier: str, disk: Path, clip: float, **options: Any) -> dict[str, Any]:
    slide = {"window": 2, "debug": {"lane_delay_ms": 0.5, "seed": 3}}
    config = ds_config(slide | ({"host_memory": 0} if tier == "ssd" else {}), clip=clip, **options)
    return on_ssd(config, disk) if tier == "ssd" else config


def result_of(client: Client) -> Result:
    return Result(losses=client.losses, states=states_of(client.model))


def undisturbed(config: dict[str, Any], reentrant: bool | None, data: Any) -> Result:
    with engine_for(Model(reentrant), config) as engine:
        client = Client(engine)
        client.train(data)
        return result_of(client)


@contextlib.contextmanager
def as_if_undisturbed(config: dict[str, Any], data: Any, reentrant: bool | None = None) -> Iterator[Client]:
    """A client whose losses and states at the end must be those of a run of as many batches that nothing disturbs."""
    with engine_for(Model(reentrant), config) as engine:
        yield (client := Client(engine))
        found = result_of(client)
    assert differences(found, undisturbed(config, reentrant, data[: len(found.losses)])) == []


# ---- gradients are held ----------------------------------------------------------------------------------------------


@pytest.mark.thinned(3)
@KINDS
def test_the_batch_never_happened(tier: str, reentrant: bool | None, disk: Path) -> None:
    config, data = config_for(tier, disk, 1.0), batches(40)
    with as_if_undisturbed(config, data, reentrant) as client:
        engine = client.engine
        good = iter(data)
        for place, error in zip(places(reentrant), itertools.cycle(ERRORS)):
            client.fail(batches(1, seed=7)[0], place, error)
            client.train([next(good)])
            check_that_nothing_is_left(engine)


@pytest.mark.thinned(3)
@KINDS
def test_in_an_accumulation(tier: str, reentrant: bool | None, disk: Path) -> None:
    """Before anything was added to the sum, the micro-batch never happened; after that, the step begins anew."""
    config, data = config_for(tier, disk, 1.0, accumulation=3), batches(3 * 60)
    refused = 0
    with as_if_undisturbed(config, data, reentrant) as client:
        engine = client.engine
        steps = windows(data, 3)
        for at in range(3):
            for place in places(reentrant)[at::3]:
                step = next(steps)
                client.train(step[:at])
                client.fail(batches(1, seed=7)[0], place)
                if at and not takes_nothing(place):
                    with pytest.raises(SlideError, match=REFUSED):
                        engine(**step[at])
                    with torch.no_grad():
                        engine(**step[0])  # weights are whole
                    engine.zero_grad()
                    del client.losses[len(client.losses) - at :]
                    client.train(step)
                    refused += 1
                else:
                    client.train(step[at:])
                check_that_nothing_is_left(engine)
    assert refused >= 4


def test_a_step_with_nothing_to_apply_is_refused() -> None:
    config, data = ds_config({"window": 2}), batches(2)
    with as_if_undisturbed(config, data) as client:
        engine = client.engine
        client.train(data[:1])
        client.fail(batches(1, seed=7)[0], "backward of block 1")
        for _ in range(2):
            with pytest.raises(SlideError, match=NOTHING_KEPT):
                engine.step()
        client.train(data[1:])
        assert engine.global_steps == 2


def test_a_step_with_a_spoilt_sum_is_refused() -> None:
    config, data = ds_config({"window": 2}, accumulation=2), batches(2)
    with as_if_undisturbed(config, data) as client:
        engine = client.engine
        client.train(batches(1, seed=5))
        client.fail(batches(1, seed=7)[0], "backward of block 1")
        with pytest.raises(SlideError, match=REFUSED):
            engine.step()
        engine.zero_grad()
        client.losses.clear()
        client.train(data)
        assert engine.global_steps == 1


def test_a_second_exception_leaves_a_spoilt_sum_refused() -> None:
    """Of a backward that begins at the result of a block, whose forward of the model has failed: it takes nothing."""
    config, data = ds_config({"window": 2}, accumulation=2), batches(2)
    with as_if_undisturbed(config, data) as client:
        engine, trap, results = client.engine, client.model.trap, []
        client.train(batches(1, seed=5))
        trap.set("forward of block 1")
        with client.model.blocks[0].register_forward_hook(lambda *given: results.append(given[-1])):
            with pytest.raises(Failure):
                engine(**batches(1, seed=6)[0])
        client.fail(batches(1, seed=7)[0], "backward of block 1")
        with torch.no_grad():
            engine(**data[0])
        trap.set("backward of block 0")
        with pytest.raises(Failure):
            results.pop().float().sum().backward()
        with pytest.raises(SlideError, match=REFUSED):
            engine(**data[0])
        engine.zero_grad()
        client.losses.clear()
        client.train(data)
        assert engine.global_steps == 1


def test_zero_grad_before_every_micro_batch_has_no_effect_as_on_stock() -> None:
    """Where no exception has spoilt the sum. `engine.optimizer.zero_grad()` drops one, as on stock."""
    config, data = ds_config({"window": 2}, accumulation=3), batches(6)
    with as_if_undisturbed(config, data) as client:
        engine = client.engine
        for batch in data:
            engine.zero_grad()
            client.train([batch])
        assert engine.global_steps == 2


def test_zero_grad_between_backward_and_step_is_refused_where_updates_do_not_wait() -> None:
    """In plain torch the step would then change nothing. Here it has begun, and can be taken."""
    config, data = ds_config({"window": 2}, clip=0.0), batches(2)
    with as_if_undisturbed(config, data) as client:
        engine = client.engine
        for batch in data:
            loss = engine(**batch)
            engine.backward(loss)
            with pytest.raises(SlideError, match=r"gradients cannot be discarded: .*defer_updates"):
                engine.zero_grad()
            engine.step()
            client.losses.append(loss.item())


def test_a_gradient_for_the_client_alone_is_no_interrupted_backward() -> None:
    """`torch.autograd.grad` ends without DeepSpeed's epilogue."""
    config, data = ds_config({"window": 2}), batches(2)
    with as_if_undisturbed(config, data) as client:
        engine = client.engine
        for batch in data:
            noise = torch.zeros((), requires_grad=True)
            assert torch.autograd.grad(engine(**batch) * (1 + noise), noise)[0] != 0
            client.train([batch])


def test_loss_backward_after_an_interrupted_engine_backward() -> None:
    """DeepSpeed leaves out the end of a backward of the loss itself, as long as it counts another one as under way."""
    config, data = ds_config({"window": 2}), batches(4)
    with as_if_undisturbed(config, data) as client:
        for batch in data:
            client.fail(batches(1, seed=7)[0], "backward of block 1")
            client.train([batch], backward=lambda loss: loss.backward())


def test_the_same_graph_once_more() -> None:
    """By engine.backward() and by the loss's own."""
    config, data = ds_config({"window": 2}), batches(4)
    with as_if_undisturbed(config, data) as client:
        engine = client.engine
        for batch, backward in zip(data, itertools.cycle((torch.Tensor.backward, engine.backward))):
            loss = engine(**batch)
            client.model.trap.set("backward of block 1")
            with pytest.raises(Failure):
                backward(loss, retain_graph=True)
            backward(loss)
            engine.step()
            client.losses.append(loss.item())


@pytest.mark.parametrize("clip", [1.0, 0.0], ids=["clipping", "immediate"])
def test_memory_runs_out_while_gradients_are_packed(clip: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """More often than there are buffers for it: each is given back."""
    config, data = ds_config({"window": 2}, clip=clip), batches(5)
    pack, calls = Identity.encode_by_torch, itertools.count()

    def collect(*arguments: Any, **options: Any) -> None:
        if failing and next(calls) % 2 == held:
            raise torch.OutOfMemoryError("no memory for a gradient")
        pack(*arguments, **options)

    held = int(clip > 0)  # without clipping: the first, before the first update
    failing = False
    monkeypatch.setattr(Identity, "encode_by_torch", collect)
    with as_if_undisturbed(config, data) as client:
        engine = client.engine
        for batch in data:
            failing, calls = True, itertools.count()
            with pytest.raises(torch.OutOfMemoryError):
                engine.backward(engine(**batches(1, seed=7)[0]))
            failing = False
            client.train([batch])
            check_that_nothing_is_left(engine)


def test_the_head_of_a_streamed_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient goes down while it is made: the lane must not wait for what will never come, though the client
    keeps the exception, and with it the pass."""
    from ds_slide.runtime.weights.rows import StreamedRows

    config, data = ds_config({"window": 2, "stream_head": True}), batches(2)
    from harness import llama

    def train(engine: Any, batch: Any) -> Any:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss.item()

    with engine_for(llama(num_hidden_layers=3), config) as engine:
        expected = [train(engine, batch) for batch in data]
        states = states_of(engine.module)
    kept = []
    with engine_for(llama(num_hidden_layers=3), config) as engine:
        found = []
        for batch in data:
            passes = StreamedRows.rows_and_gradients

            def failing(self: StreamedRows, passes: Any = passes) -> Any:
                for chunk in passes(self):
                    yield chunk
                    raise Failure

            with monkeypatch.context() as patch:
                patch.setattr(StreamedRows, "rows_and_gradients", failing)
                try:
                    train(engine, batch)
                except Failure as error:
                    kept.append(error)
            found.append(train(engine, batch))
        assert len(kept) == len(data)
        assert differences(Result(found, [], states_of(engine.module)), Result(expected, [], states)) == []


# ---- weights are updated under backward ------------------------------------------------------------------------------


@pytest.mark.thinned(2)
@KINDS
def test_without_clipping(tier: str, reentrant: bool | None, disk: Path, tmp_path: Path) -> None:
    """Before the first update the batch never happened. After it nothing goes on but from a checkpoint."""
    config, data = config_for(tier, disk, 0.0), batches(40)
    mixed = 0
    with as_if_undisturbed(config, data, reentrant) as client:
        engine = client.engine
        good = iter(data)
        for place, error in zip(places(reentrant)[::2], itertools.cycle(ERRORS)):
            engine.save_checkpoint(tmp_path, "last")
            client.fail(batches(1, seed=7)[0], place, error)
            if not takes_nothing(place):
                mixed += 1
                check_that_all_is_refused(engine, tmp_path)
                engine.load_checkpoint(tmp_path, "last")
            client.train([next(good)])
            check_that_nothing_is_left(engine)
    assert mixed >= 3


def check_that_all_is_refused(engine: Any, folder: Path) -> None:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    weight = engine.module.blocks[0].inner.weight
    with pytest.raises(SlideError, match=f"saving a checkpoint is refused: .*{MIXED}"):
        engine.save_checkpoint(folder, "mixed")
    assert not (folder / "mixed").exists()
    with pytest.raises(SlideError, match=MIXED):
        engine(**batches(1)[0])
    with pytest.raises(SlideError, match=MIXED), torch.no_grad():
        engine(**batches(1)[0])
    with pytest.raises(SlideError, match=MIXED):
        engine.step()
    with pytest.raises(SlideError, match=MIXED):
        engine.zero_grad()
    with pytest.raises(SlideError, match=f"gathering a parameter is refused: .*{MIXED}"):
        deepspeed.zero.GatheredParameters([weight]).__enter__()
    with pytest.raises(SlideError, match=f"reading a state is refused: .*{MIXED}"):
        safe_get_full_fp32_param(weight)


def test_a_step_that_ends_half_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config, data = ds_config({"window": 2}), batches(2)
    with as_if_undisturbed(config, data) as client:
        engine = client.engine
        client.train(data[:1])
        engine.save_checkpoint(tmp_path, "last")
        runtime = engine.optimizer.runtime
        queue, calls = runtime.parts.updating.queue, itertools.count()

        def failing(*arguments: Any) -> None:
            if next(calls) == 2:
                raise Interrupt
            queue(*arguments)

        engine.backward(engine(**batches(1, seed=7)[0]))
        with monkeypatch.context() as patch:
            patch.setattr(runtime.parts.updating, "queue", failing)
            with pytest.raises(Interrupt):
                engine.step()
        check_that_all_is_refused(engine, tmp_path)
        engine.load_checkpoint(tmp_path, "last")
        client.train(data[1:])


# ---- what a forward has opened ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("around", [False, True], ids=["alone", "in save_on_cpu"])
def test_an_interrupt_leaves_no_hooks_open(around: bool) -> None:
    """Ctrl-C within a block: the client's own context closes what is on top of the stack, which is the block's."""
    config, data = ds_config({"window": 2}), batches(BLOCKS)
    with as_if_undisturbed(config, data) as client:
        engine = client.engine
        for index, batch in enumerate(data):
            client.model.trap.set(f"forward of block {index}", Interrupt)
            with pytest.raises(Interrupt):
                if around:
                    with save_on_cpu():
                        engine(**batch)
                else:
                    engine(**batch)
            client.train([batch])
            check_that_nothing_is_left(engine)
    assert hooks_around() is None


def test_an_interrupt_in_an_evaluation() -> None:
    config, data = ds_config({"window": 2}), batches(4)
    with as_if_undisturbed(config, data) as client:
        engine = client.engine
        for batch in data:
            client.model.trap.set("forward of block 2", Interrupt)
            with pytest.raises(Interrupt), torch.no_grad():
                client.model(**batch)
            client.train([batch])
            check_that_nothing_is_left(engine)


class InPlaceBlock(nn.Module):
    """Modifies what `exp` has saved for its backward, if it is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.modifies = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).exp()
        return x + (y.mul_(0.5) if self.modifies else y.mul(0.5))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(InPlaceBlock() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def test_a_saved_tensor_that_was_modified_is_an_error() -> None:
    """As without the engine: autograd's own comparison of versions is off where hooks for saved tensors are."""
    model = InPlace()
    x = torch.randn(2, 16, dtype=torch.bfloat16)
    with engine_for(model, ds_config({"window": 2})) as engine:
        model.layers[1].modifies = True
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .* is at version 1; expected ver"):
            engine.backward(engine(x))
        model.layers[1].modifies = False
        engine.backward(engine(x))
        engine.step()
