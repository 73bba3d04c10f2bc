"""States move to the GPU and back between steps: the same bits for every reader, and every byte in the plan."""

from __future__ import annotations

import functools
import gc
import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import adapted
from allocated import counted, storages
from deepspeed import zero
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_set_full_optimizer_state
from harness import (
    LAYERS,
    Result,
    batches,
    causal_loss,
    differences,
    ds_config,
    engine_for,
    llama,
    on_ssd,
    same_bits,
    states_of,
    train,
    trained,
)
from moving import RandomMoves, movable, promote
from torch import nn

from ds_slide.errors import SlideError
from ds_slide.optim.cpu import CpuUpdater
from ds_slide.plan.movable import promoted_states, why_fixed
from ds_slide.runtime.core.allocator import Allocator
from ds_slide.runtime.core.ranks.collectives import Ranks
from ds_slide.runtime.memory import tier_moves
from ds_slide.runtime.memory.tier_moves import move
from ds_slide.store.ssd.store import SsdStore

pytestmark = pytest.mark.usefixtures("one_rank")

STEPS = 6
BLOCKS = LAYERS
DELAYS = {"lane_delay_ms": 3.0, "seed": 4}
LION = {"optimizer": {"type": "Lion", "params": {"lr": 1e-3, "weight_decay": 0.1}}}
FP32_SUMS = {"accumulation": 3, "data_types": {"grad_accum_dtype": "fp32"}}


def with_frozen_blocks() -> nn.Module:
    model = llama()
    for part in (model.model.layers[0], model.model.layers[1].mlp, model.lm_head):
        part.requires_grad_(False)
    return model


def checkpointed() -> nn.Module:
    model = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


Case = tuple[dict[str, Any], dict[str, Any], Callable[[], nn.Module]]
CASES: dict[str, Case] = {
    # slide, settings of DeepSpeed, model
    "clipping": ({}, {}, llama),
    "under backward": ({}, {"clip": 0.0}, llama),
    "accumulation": ({}, {"clip": 0.0, "accumulation": 3}, llama),
    "accumulation in fp32, clipping": ({}, FP32_SUMS, llama),
    "delays": ({"window": 2, "debug": DELAYS}, {}, checkpointed),
    "delays, under backward": ({"window": 2, "gradient_buffers": 2, "debug": DELAYS}, {"clip": 0.0}, llama),
    "two passes": ({"update_passes": 2, "debug": DELAYS}, {}, llama),
    "Lion": ({}, LION, llama),
    "some on the GPU from the start": ({"gpu_states": 1_800_000}, {}, llama),
    "fp32": ({}, {"bf16": None}, llama),
    "frozen blocks": ({}, {}, with_frozen_blocks),
    "adapters in fp32": ({}, {}, functools.partial(adapted, trained=("input_layernorm", "lm_head"))),
    "weights narrowed by autocast": (
        {},
        {"bf16": None, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        llama,
    ),
    "a part on SSD": ({"host_memory": 2_000_000, "debug": DELAYS}, {}, llama),
    "all on SSD": ({"host_memory": 0, "debug": DELAYS}, {}, checkpointed),
    "all on SSD, under backward": ({"host_memory": 0, "window": 2, "debug": DELAYS}, {"clip": 0.0}, llama),
    "all on SSD, accumulation in fp32": ({"host_memory": 0}, FP32_SUMS, llama),
    "tied": ({"window": 9}, {"clip": 0.0}, functools.partial(llama, tie_word_embeddings=True)),
}


# Of each kind one: clipping and not, fp32 sums, fp32 weights, two passes, delays, the disk.
QUICK_CASES = ("accumulation in fp32, clipping", "two passes", "fp32", "all on SSD, under backward")


def config(slide: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    return ds_config({"window": 3, "cpu_threads": 1, "gpu_states": 0, **(slide or {})}, **{"clip": 1.0, **settings})


@pytest.mark.parametrize(
    ("slide", "settings", "make"),
    [
        pytest.param(*case, id=name, marks=() if name in QUICK_CASES else pytest.mark.slow)
        for name, case in CASES.items()
    ],
)
def test_moves_change_no_bit(
    slide: dict[str, Any], settings: dict[str, Any], make: Callable[[], nn.Module], disk: Path
) -> None:
    accumulation = settings.get("accumulation", 1)
    data, moves = batches(STEPS * accumulation), RandomMoves(len(slide) + accumulation)
    keys = ("exp_avg",) if "optimizer" in settings else ("exp_avg", "exp_avg_sq")

    def run(loss_of: Any) -> Result:
        model = make()
        given = config(slide, **settings)
        with engine_for(model, on_ssd(given, disk) if "host_memory" in slide else given) as engine:
            result = train(engine, data, loss_of)
            result.states = states_of(model, keys)
        return result

    assert differences(run(moves), run(causal_loss)) == []
    assert [made is None for made in moves.made] == [number % accumulation > 0 for number in range(len(data))]
    assert any(made.promoted for made in moves.made if made) and any(made.demoted for made in moves.made if made)


def test_states_that_have_left_the_disk_are_not_read_or_written(disk: Path) -> None:
    """And are again once they have gone back."""
    with engine_for(model := llama(), on_ssd(config({"host_memory": 0}), disk)) as engine:
        runtime, moved, data = engine.optimizer.runtime, [], batches(STEPS)
        result = train(engine, data[:2])
        for orders, batch in zip((movable(runtime), [], movable(runtime), []), data[2:], strict=True):
            promote(runtime, *orders)
            before = runtime.parts.ssd.store.moved_bytes()
            result.losses += train(engine, [batch]).losses
            for unit in runtime.units:
                runtime.access.settle(unit)
            moved.append(runtime.parts.ssd.store.moved_bytes() - before)
        result.states = states_of(model)
    assert moved[0] == moved[2] == 0 < min(moved[1], moved[3])
    assert differences(result, trained(llama(), config(), data)) == []


@pytest.mark.parametrize("clip", [1.0, 0.0], ids=["clipping", "under backward"])
def test_the_engine_itself_may_move_them(clip: float) -> None:
    """When a step has been taken, and when a forward of the whole model begins."""
    moves, data = RandomMoves(), batches(STEPS)
    with engine_for(model := llama(), config({"debug": DELAYS}, clip=clip)) as engine:
        runtime = engine.optimizer.runtime
        step, begin_forward = runtime.step, runtime.begin_forward

        def step_and_move(*given: Any) -> None:
            step(*given)
            moves.move(runtime)

        def move_and_begin_forward(*call: Any) -> None:
            moves.move(runtime)
            begin_forward(*call)

        runtime.step, runtime.begin_forward = step_and_move, move_and_begin_forward
        result = train(engine, data)
        result.states = states_of(model)
    assert len(moves.made) == 2 * STEPS and all(moves.made)
    assert differences(result, trained(llama(), config(clip=clip), data)) == []


def test_the_next_engine_takes_promoted_weights() -> None:
    model = llama()
    with engine_for(model, config()) as engine:
        train(engine, batches(2))
        before = states_of(model, ())
        promote(engine.optimizer.runtime, 0, 2, 3)
    with engine_for(model, config()):
        after = states_of(model, ())
    assert all(same_bits(before[name]["weight"], after[name]["weight"]) for name in before)


def test_every_reader_sees_the_states_where_they_are() -> None:
    """And what a script writes there."""

    def read(moving: bool) -> list[Any]:
        model, found = llama(), []
        parameters = [model.model.embed_tokens.weight, model.model.layers[1].mlp.up_proj.weight]
        with engine_for(model, config()) as engine:
            runtime = engine.optimizer.runtime
            for number, batch in enumerate(batches(STEPS)):
                train(engine, [batch])
                if moving:
                    assert promote(runtime, *movable(runtime)[number % 2 :: 2]) is not None
                found += [safe_get_full_grad(each).clone() for each in parameters]
                found += [tensor for tensors in states_of(model).values() for tensor in tensors.values()]
                with zero.GatheredParameters(parameters, modifier_rank=0):
                    for each in parameters:
                        each.data.mul_(1.5)
                safe_set_full_optimizer_state(parameters[1], torch.ones(parameters[1].ds_shape), "exp_avg")
                found.append(safe_get_full_fp32_param(parameters[1]).clone())
                with torch.no_grad():
                    found.append(engine(**batch).loss)
                    found.append(engine.module.model.layers[2](torch.ones(1, 4, 64).bfloat16(), **rotary(engine))[0])
        return found

    moved, stayed = read(moving=True), read(moving=False)
    assert [index for index, pair in enumerate(zip(moved, stayed, strict=True)) if not same_bits(*pair)] == []


def rotary(engine: Any) -> dict[str, Any]:
    """What a block takes beside its input."""
    table = engine.module.model.rotary_emb(torch.ones(1, dtype=torch.bfloat16), torch.arange(4)[None])
    return {"position_embeddings": table}


def test_a_checkpoint_does_not_know_of_moves(tmp_path: Path) -> None:
    """Saved while some units are promoted, it goes on in an engine without; and back into one with others promoted."""
    steps = 3
    data = batches(3 * steps)
    whole = trained(llama(), config(), data)
    losses: list[float] = []
    for part, orders in enumerate(((0, 2, 3), (), (1, 2, 4))):
        model = llama(seed=part)
        with engine_for(model, config()) as engine:
            runtime = engine.optimizer.runtime
            assert promote(runtime, *orders) is not None
            if part:
                engine.load_checkpoint(str(tmp_path), tag=str(part - 1))
            losses += train(engine, data[part * steps : (part + 1) * steps]).losses
            engine.save_checkpoint(str(tmp_path), tag=str(part))
            assert sorted(unit.order for unit in runtime.units if unit.home) == list(orders)
            states = states_of(model)
    assert differences(Result(losses=losses, states=states), whole) == []


@pytest.mark.parametrize("tier", ["host", "ssd"])
def test_every_byte_is_in_the_plan(tier: str, disk: Path) -> None:
    settings = config() if tier == "host" else on_ssd(config({"host_memory": 0}), disk)
    with counted() as count, engine_for(llama(), settings) as engine:
        runtime = engine.optimizer.runtime
        start = runtime.parts.memory_report
        for orders in ((0, 1), tuple(range(BLOCKS + 1)), (3,), ()):
            train(engine, batches(2))  # statistics are of a step that has ended
            planned = runtime.parts.plan.with_promoted(frozenset(orders), 3).gpu_bytes
            assert promote(runtime, *orders) is not None
            assert count.difference(engine) == []
            memory = runtime.parts.memory_report
            assert memory["gpu_units"] == memory["promoted_units"] == len(orders)
            assert memory["slots"] == min(3, BLOCKS + 1 - len(orders) - (0 not in orders))
            assert (memory["host_bytes"], memory["pinned_bytes"]) == (start["host_bytes"], start["pinned_bytes"])
            assert memory["gpu_bytes"] == planned
            costs = sum(each.nbytes for each in promoted_states(runtime.parts.plan))
            assert planned == start["gpu_bytes"] + costs - start["window_bytes"] + memory["window_bytes"]
            assert engine.optimizer.slide_stats()["memory"] == memory
        assert memory == start


def test_the_window_grows_and_shrinks() -> None:
    data = batches(4)
    with counted() as count, engine_for(model := llama(), config()) as engine:
        runtime, losses = engine.optimizer.runtime, []
        for slots, batch in zip((4, 2, 3, 9), data, strict=True):
            losses += train(engine, [batch]).losses
            assert move(runtime, frozenset((0,)), slots=slots) is not None
            assert runtime.parts.memory_report["slots"] == len(runtime.parts.window.slots) == min(slots, BLOCKS)
            assert count.difference(engine) == []
        assert differences(Result(losses=losses, states=states_of(model)), trained(llama(), config(), data)) == []


def test_moving_to_and_fro_leaves_nothing() -> None:
    with engine_for(llama(), config()) as engine:
        runtime = engine.optimizer.runtime

        def taken() -> tuple[int, int, int, int]:
            assert promote(runtime) is not None
            gc.collect()
            window = runtime.parts.window
            return sum(storages().values()), threading.active_count(), len(window.slots), len(window.by_storage)

        train(engine, batches(2))
        promote(runtime, *range(BLOCKS + 1))
        first = taken()
        for number in range(50):
            assert promote(runtime, *range(number % 2, BLOCKS + 1)) is not None
            if number % 10 == 0:
                train(engine, batches(1))
            assert promote(runtime) is not None
        assert taken() == first


def test_nothing_moves_in_the_middle_of_a_step() -> None:
    model = llama()
    with engine_for(model, config(accumulation=2)) as engine:
        runtime, (first, second) = engine.optimizer.runtime, batches(2)
        loss = causal_loss(engine, first)
        assert promote(runtime, 1) is None  # the graph has the weights
        engine.backward(loss)
        engine.step()
        assert promote(runtime, 1) is None  # gradients wait
        engine.backward(causal_loss(engine, second))
        assert promote(runtime, 1) is None
        engine.step()
        with zero.GatheredParameters(list(model.model.layers[1].parameters())):
            assert promote(runtime, 2) is None
            assert promote(runtime, 1) is not None
        with zero.GatheredParameters(list(model.model.embed_tokens.parameters())):
            assert promote(runtime, 0, 1) is None
        seen = []
        handle = model.model.layers[3].register_forward_hook(lambda *_: seen.append(promote(runtime, 1)))
        with torch.no_grad():
            engine(**first)
        handle.remove()
        assert seen == [None]
        assert promote(runtime) is not None


def test_an_evaluation_in_inference_mode_moves_states() -> None:
    """What is made there must not be what a later forward saves."""
    data = batches(4)
    with engine_for(model := llama(), config()) as engine:
        result = train(engine, data[:2])
        for orders in ((1, 2, 3, 4), ()):
            with torch.inference_mode():
                assert promote(engine.optimizer.runtime, *orders) is not None
        result.losses += train(engine, data[2:3]).losses
        with torch.inference_mode():
            assert promote(engine.optimizer.runtime, 0, 1) is not None
        result.losses += train(engine, data[3:]).losses
        result.states = states_of(model)
    assert differences(result, trained(llama(), config(), data)) == []


@pytest.mark.parametrize("failing", [0, 2])
def test_no_memory_for_a_promotion(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units behind the first that finds none stay where they are; training goes on with the same bits."""
    make, data = Allocator.tensor, batches(4)

    def tensor(self: Allocator, what: str, *given: Any) -> torch.Tensor:
        if what == f"exp_avg_sq of {names[failing]} on the GPU":
            raise torch.OutOfMemoryError("no memory")
        return make(self, what, *given)

    with counted() as count, engine_for(model := llama(), config()) as engine:
        runtime = engine.optimizer.runtime
        names = [unit.name for unit in runtime.units]
        result = train(engine, data[:2])
        monkeypatch.setattr(Allocator, "tensor", tensor)
        moved = promote(runtime, *range(4))
        assert moved is not None
        assert (moved.promoted, moved.no_room) == (tuple(range(failing)), tuple(range(failing, 4)))
        assert runtime.parts.memory_report["promoted_units"] == failing
        gc.collect()
        assert count.difference(engine) == []
        result.losses += train(engine, data[2:]).losses
        result.states = states_of(model)
    assert differences(result, trained(llama(), config(), data)) == []


def test_no_memory_for_another_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tier_moves._bytes_on_gpu
    with counted() as count, engine_for(llama(num_hidden_layers=6), config()) as engine:
        runtime = engine.optimizer.runtime

        def bytes_on_gpu(*given: Any) -> torch.Tensor:
            if len(left) == 1:
                raise torch.OutOfMemoryError("no memory")
            left.pop()
            return made(*given)

        left = [0, 1, 2]
        monkeypatch.setattr(tier_moves, "_bytes_on_gpu", bytes_on_gpu)
        assert move(runtime, frozenset(), slots=6) is not None
        assert runtime.parts.memory_report["slots"] == 5
        assert count.difference(engine) == []
        train(engine, batches(1))


@pytest.fixture
def _default_interrupt() -> Iterator[None]:
    """A shell starts what runs in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_default_interrupt")
@pytest.mark.parametrize("place", ["_copy", "_show", "_refit"])
def test_an_interrupt_waits_until_the_move_is_whole(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, of = batches(4), {"_copy": (CpuUpdater, "copy_")}
    owner, name = of.get(place, (tier_moves, place))
    done = getattr(owner, name)

    def interrupted(*given: Any) -> Any:
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)
        calls.append(given)
        return done(*given)

    with counted() as count, engine_for(model := llama(), config()) as engine:
        runtime, calls = engine.optimizer.runtime, list[Any]()
        result = train(engine, data[:2])
        promote(runtime, 1)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                promote(runtime, 2, 3)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert sorted(runtime.parts.plan.placement.promoted) == [2, 3]
        assert count.difference(engine) == []
        result.losses += train(engine, data[2:]).losses
        result.states = states_of(model)
    assert differences(result, trained(llama(), config(), data)) == []


def failing_after(count: int, call: Callable[..., None], why: str) -> Callable[..., None]:
    """`call`, which works so many times."""
    calls = itertools.count()

    def fail(*given: Any) -> None:
        if next(calls) >= count:
            raise SlideError(why)
        call(*given)

    return fail


@pytest.mark.parametrize("failing", [0, 1, 9], ids=["demotion", "in the middle of it", "promotion"])
def test_a_copy_that_fails_leaves_units_where_they_are(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data, fail = batches(4), failing_after(failing, CpuUpdater.copy_, "no copy")
    with counted() as count, engine_for(model := llama(), config()) as engine:
        runtime = engine.optimizer.runtime
        result = train(engine, data[:2])
        promote(runtime, 1)
        with monkeypatch.context() as patch:
            patch.setattr(CpuUpdater, "copy_", fail)
            with pytest.raises(SlideError, match="no copy"):
                promote(runtime, 2)
        assert runtime.parts.plan.placement.promoted <= {1}
        gc.collect()
        assert count.difference(engine) == []
        result.losses += train(engine, data[2:]).losses
        promote(runtime, 3)
        result.states = states_of(model)
    assert differences(result, trained(llama(), config(), data)) == []


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("failing", [0, 1, 5])
@pytest.mark.parametrize("name", ["read_now", "write_now"])
def test_a_disk_that_fails_leaves_units_where_they_are(
    name: str, failing: int, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A promotion reads and a demotion writes; the disk works again later."""
    data, fail = batches(4), failing_after(failing, getattr(SsdStore, name), "no disk")
    with counted() as count, engine_for(model := llama(), on_ssd(config({"host_memory": 0}), disk)) as engine:
        runtime = engine.optimizer.runtime
        result = train(engine, data[:2])
        promote(runtime, 1, 2)
        result.losses += train(engine, data[2:3]).losses
        with monkeypatch.context() as patch:
            patch.setattr(SsdStore, name, fail)
            with pytest.raises(SlideError, match="no disk"):
                promote(runtime, 3)
        assert runtime.parts.plan.placement.promoted == (frozenset() if name == "read_now" else {1, 2})
        gc.collect()
        assert count.difference(engine) == []
        result.losses += train(engine, data[3:]).losses
        promote(runtime, 3)
        result.states = states_of(model)
    assert differences(result, trained(llama(), config(), data)) == []


def test_a_copy_that_fails_on_another_rank_ends_the_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which waits with this one in the same collective then."""
    exchange = Ranks.exchange

    def failing(self: Ranks, own: Any, what: str) -> list[Any]:
        return [*exchange(self, own, what), *(["no disk"] if what.startswith("moving the states") else [])]

    with engine_for(llama(), config()) as engine:
        runtime = engine.optimizer.runtime
        train(engine, batches(1))
        with monkeypatch.context() as patch:
            patch.setattr(Ranks, "exchange", failing)
            with pytest.raises(SlideError, match="rank 1 could not copy them: no disk"):
                promote(runtime, 1)
        assert not runtime.parts.plan.placement.promoted and runtime.units[1].home is None
        train(engine, batches(1))


FIXED: dict[str, tuple[dict[str, Any], str, str]] = {
    "gpu states": ({"gpu_states": 1_800_000}, "model.layers.0", "no place in host memory"),
    "8 bit": ({"state_dtype": "8bit"}, "model.layers.0", "short format"),
    "streamed head": ({"stream_head": True}, "lm_head.weight", "rows pass"),
}


@pytest.mark.parametrize(("slide", "name", "why"), FIXED.values(), ids=FIXED)
def test_what_cannot_move_is_refused(slide: dict[str, Any], name: str, why: str) -> None:
    with engine_for(llama(), config(slide)) as engine:
        runtime = engine.optimizer.runtime
        unit = next(unit for unit in runtime.units if any(name in entry.name for entry in unit.layout.entries))
        assert why in (why_fixed(runtime.parts.plan, unit.order) or "")
        with pytest.raises(SlideError, match=f"the states of {unit.name} cannot move .*{why}"):
            move(runtime, runtime.parts.plan.placement.on_gpu ^ {unit.order})
        assert runtime.parts.memory_report["promoted_units"] == 0
        train(engine, batches(1))
