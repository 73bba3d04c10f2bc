"""Inputs of recomputed blocks on SSD: the same bits, read before they are needed, and nothing left behind."""

from __future__ import annotations

import errno
import functools
import gc
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from activation_runs import (
    DELAYS,
    FORMS,
    INPUT,
    MODELS,
    SCHEDULES,
    STEPS,
    Handle,
    Twice,
    asked,
    checkpointed,
    config_of,
    expected,
    free_buffers,
    handle_of,
    layers_of,
    llama,
)
from harness import Result, batches, differences, engine_for, on_ssd, states_of, train
from interrupting import Failure, Interrupt
from ssd_fault_runs import Launcher, launched, needs_shim

from ds_slide.errors import SlideError
from ds_slide.plan import spare
from ds_slide.runtime.activations.input_disk import InputDisk, InputPlace
from ds_slide.runtime.activations.moved_inputs import MovedInputs
from ds_slide.runtime.ssd.space import SpaceOnSsd
from ds_slide.store.ssd.store import SsdStore

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.thinned(2)]

ALL = {"gpu_memory": "1GiB", "host_memory": 0}
"""Whatever may go to SSD does."""
SHORT_DELAYS = {"debug": {"lane_delay_ms": 4.0, "seed": 3}}
"""For runs with a hundred transfers of states a step."""


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> Handle:
    return handle_of(monkeypatch)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_slide.plan.ssd_settings.CHUNK_NUMEL", 4096)


@pytest.fixture
def config(disk: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    """With an SSD tier, of which nothing may be left."""
    yield lambda slide, schedule="clipping": on_ssd(config_of(slide, schedule), disk)
    assert not list(disk.iterdir())


def states_in_memory(model: torch.nn.Module, inputs: int) -> dict[str, Any]:
    """Settings with which the states, and so many inputs of blocks, are in host memory."""
    with engine_for(model, config_of({"gpu_memory": "1GiB"})) as engine:
        states = engine.optimizer.runtime.parts.memory_report["host_state_bytes"]
    return {"gpu_memory": "1GiB", "host_memory": states + inputs * INPUT + 1_000, "speculate": False}


def result_of(model: torch.nn.Module, config: dict[str, Any], data: list[Any]) -> tuple[Result, Any]:
    torch.manual_seed(3)
    with engine_for(model, config) as engine:
        result, stats = train(engine, data), engine.optimizer.slide_stats()
        assert free_buffers(engine)
        result.states = states_of(model)
        return result, stats


CASES = [("llama", schedule, None) for schedule in SCHEDULES]
CASES += [("llama", "clipping", True), ("qwen2", "clipping", False), ("adapters", "clipping", True)]


@pytest.mark.thinned(4)
@pytest.mark.parametrize(("name", "schedule", "reentrant"), CASES)
def test_no_bit_changes(name: str, schedule: str, reentrant: bool | None, handle: Handle, config: Any) -> None:
    """With states there, and dropout; the bytes are counted with the disk's."""
    handle(0, 4)
    result, stats = result_of(asked(name, reentrant), config(ALL, schedule), batches(STEPS * SCHEDULES[schedule][1]))
    assert differences(result, expected(name, reentrant, schedule)) == []
    report, moved = stats["activations"], min(4, len(layers_of(asked(name, reentrant))))
    assert report["move"] == moved and report["moved_bytes"] == report["moved_to_ssd_bytes"] == moved * INPUT
    assert report["host_bytes"] == 0 and report["ssd_bytes"] == moved * INPUT and report["ssd_host_bytes"] >= 4 * INPUT
    assert stats["ssd"]["written_bytes"] >= moved * INPUT <= stats["ssd"]["read_bytes"]


def test_those_of_the_first_blocks_go_and_those_of_the_last_stay(handle: Handle, config: Any) -> None:
    """In a store of their own, which is opened when they need it, and without sums."""
    handle(1, 4)
    slide = {**states_in_memory(llama(), 2), "checksums": False}
    model = checkpointed(MODELS["llama"](), False)
    torch.manual_seed(3)
    with engine_for(model, config(slide)) as engine:
        parts, disk = engine.optimizer.runtime.parts, engine.optimizer.runtime.parts.spare.activations.inputs.disk
        assert parts.ssd is None and not engine.optimizer.slide_stats().get("ssd")
        gone: set[int] = set()
        place = disk.place

        def watched(order: int, nbytes: int) -> InputPlace | None:
            gone.add(order)
            return place(order, nbytes)

        disk.place = watched
        result = train(engine, batches(STEPS))
        result.states = states_of(model)
        report, ssd = engine.optimizer.slide_stats()["activations"], engine.optimizer.slide_stats()["ssd"]
        assert gone == {unit.order for unit in engine.optimizer.runtime.blocks[:2]}
        assert (report["keep"], report["move"], report["recompute"]) == (1, 4, 1)
        assert (report["moved_to_ssd_bytes"], report["moved_bytes"]) == (2 * INPUT, 4 * INPUT)
        assert ssd["written_bytes"] == ssd["read_bytes"] == 2 * INPUT and "checked_bytes" not in ssd
        assert parts.taken.host_states <= slide["host_memory"]
    assert differences(result, expected("llama", False, "clipping")) == []


@pytest.mark.parametrize(("inputs", "reentrant"), [(0, True), (1, False)])
def test_transfers_that_are_late_change_no_bit(inputs: int, reentrant: bool, handle: Handle, config: Any) -> None:
    handle(0, 4)
    slide = states_in_memory(llama(), inputs)
    slide |= DELAYS
    result, stats = result_of(asked("llama", reentrant), config(slide), batches(STEPS))
    assert differences(result, expected("llama", reentrant, "clipping")) == []
    assert stats["activations"]["moved_to_ssd_bytes"] == (4 - inputs) * INPUT


@FORMS
def test_they_are_read_ahead(reentrant: bool, handle: Handle, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks and more before the one that needs them; as many as there are buffers for, and no more."""
    seen, read, copy = [], InputDisk.read, MovedInputs._copy

    def copied(self: MovedInputs, moved: Any, leases: Any, *arguments: Any, to_gpu: bool) -> None:
        assert all(lease._native is not None for lease in leases), "a buffer has been given back before its copy"
        copy(self, moved, leases, *arguments, to_gpu=to_gpu)

    monkeypatch.setattr(MovedInputs, "_copy", copied)

    def watched(self: InputDisk, place: InputPlace, lane: Any) -> Any:
        seen.append((place in self._reading, len(self._reading)))
        return read(self, place, lane)

    def with_free_buffers(self: InputDisk, places: Any, lane: Any) -> None:
        lane.drain()  # on a loaded machine a copy to the GPU may not have ended, which has a buffer till then
        read_ahead(self, places, lane)

    read_ahead = InputDisk.read_ahead
    handle(0, 6)
    monkeypatch.setattr(InputDisk, "read", watched)
    monkeypatch.setattr(InputDisk, "read_ahead", with_free_buffers)
    # Nor may a read of a few kilobytes take longer than two blocks, so that more are read ahead.
    monkeypatch.setattr(SpaceOnSsd, "seconds", lambda *_: 0.0)
    model = checkpointed(llama(num_hidden_layers=8), reentrant)
    result_of(model, config(ALL), batches(3))
    ahead = spare.LEAST_AHEAD
    assert seen == [(True, min(ahead, left)) for left in (6, 5, 4, 3, 2, 1)] * 2


def test_batches_of_any_length_share_the_places(handle: Handle, config: Any) -> None:
    """What the longest one has taken suffices for all that follow, and a longer one takes what is missing."""
    handle(0, 4)
    lengths, taken, results = (16, 16, 64, 8, 32, 48, 64, 24), [], []
    data = [batch for length in lengths for batch in batches(1, length=length)]
    for slide in ({"activations": "as_written"}, {}):
        with engine_for(checkpointed(llama(), False), config({**ALL, **slide})) as engine:
            result = Result()
            for batch in data:
                result.losses += train(engine, [batch]).losses
                taken.append(engine.optimizer.runtime.parts.spare.activations.statistics.get("ssd_bytes", 0))
            assert free_buffers(engine)
            results.append(result)
    assert differences(*results) == []
    assert taken[len(data) + 1 :] == [4 * INPUT // 2] + [4 * INPUT * 2] * 6


def test_two_graphs_and_a_second_backward(handle: Handle, config: Any) -> None:
    """Inputs of two forwards wait at the same time, and those of one are read twice."""
    handle(0, 4)
    losses, gradients = [], []
    for activations in ("as_written", "auto"):
        slide = {**ALL, "activations": activations, "defer_updates": True, **SHORT_DELAYS}
        with engine_for(checkpointed(llama(), False), config(slide)) as engine:
            train(engine, batches(2))
            one, two = (engine(**batch).loss for batch in batches(2, seed=4))
            if activations == "auto":
                assert engine.optimizer.slide_stats()["activations"]["moved_to_ssd_bytes"] == 4 * INPUT
            engine.backward(one, retain_graph=True)
            engine.backward(two)
            engine.backward(one)
            losses.append(Result(losses=[one.item(), two.item()]))
            engine.step()
            gradients.append(float(engine.get_global_grad_norm()))
            del one, two
            gc.collect()
            assert free_buffers(engine) and places_are_free(engine)
    assert differences(*losses) == [] and gradients[0] == gradients[1]


def places_are_free(engine: Any) -> bool:
    """Behind what the hand-overs still hold."""
    if (disk := engine.optimizer.runtime.parts.spare.activations.inputs.disk) is None:
        return True
    disk._thread.drain()
    return len(disk._free) * disk._buffers.piece == disk.nbytes


def test_blocks_that_are_called_twice(handle: Handle, config: Any) -> None:
    handle(0, 4)
    results = []
    for activations in ("as_written", "auto"):
        model = Twice(checkpointed(llama(), False))
        slide = {**ALL, "activations": activations, "defer_updates": True}
        results.append(result_of(model, config(slide), batches(STEPS))[0])
    assert differences(*results) == []


def keep_output(outputs: list[torch.Tensor], _module: Any, _inputs: Any, output: Any) -> None:
    outputs.append(output[0] if isinstance(output, tuple) else output)


@pytest.mark.parametrize("error", [Failure, Interrupt])
def test_nothing_is_left_behind_an_exception(error: type[BaseException], handle: Handle, config: Any) -> None:
    """In the forward, in the backward when some are read ahead, and evaluation in between, which moves nothing."""
    handle(0, 4)
    model, data = checkpointed(llama(), False), batches(3)
    with engine_for(model, config({**ALL, **SHORT_DELAYS})) as engine:
        train(engine, data)

        def fail(*_args: Any) -> None:
            raise error

        for module in (layers_of(model)[3].mlp, layers_of(model)[5].mlp):
            handle_of_hook = module.register_forward_pre_hook(fail)
            with pytest.raises(error):
                engine(**data[0])
            handle_of_hook.remove()
        for block in (5, 2):
            outputs: list[torch.Tensor] = []
            watch = layers_of(model)[block].register_forward_hook(functools.partial(keep_output, outputs))
            loss = engine(**data[0]).loss
            watch.remove()
            outputs.pop().register_hook(fail)
            with pytest.raises(error):
                engine.backward(loss)
            del loss
            engine.optimizer.zero_grad()
        gc.collect()
        model.eval()
        with torch.no_grad():
            before = engine(**data[0]).loss
            model.generate(data[0]["input_ids"][:1, :4], max_new_tokens=2, do_sample=False)
        written = engine.optimizer.runtime.parts.ssd.store.statistics()["written_bytes"]
        with torch.no_grad():
            assert torch.equal(before, engine(**data[0]).loss)
        assert engine.optimizer.runtime.parts.ssd.store.statistics()["written_bytes"] == written
        model.train()
        train(engine, data)
        gc.collect()
        assert free_buffers(engine) and places_are_free(engine)


def test_two_engines(handle: Handle, config: Any) -> None:
    handle(0, 4)
    results: list[Result] = []
    with engine_for(checkpointed(llama(), False), config(ALL)) as one:
        with engine_for(checkpointed(llama(), False), config(ALL)) as two:
            for batch in batches(3):
                losses = [engine(**batch).loss for engine in (one, two)]
                for engine, loss in zip((two, one), reversed(losses), strict=True):
                    engine.backward(loss)
                    engine.step()
                results.append(Result(losses=[loss.item() for loss in losses]))
    assert all(result.losses[0] == result.losses[1] for result in results)


def test_a_disk_without_room(handle: Handle, config: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Half of what is free may be taken; and where the space that was seen is gone, inputs stay on the GPU."""
    handle(0, 4)
    monkeypatch.setattr(SpaceOnSsd, "room", lambda space: 2 * INPUT + 100 - space.nbytes)
    result, stats = result_of(asked("llama", False), config(ALL), batches(STEPS))
    assert differences(result, expected("llama", False, "clipping")) == []
    assert (stats["activations"]["move"], stats["activations"]["ssd_bytes"]) == (2, 2 * INPUT)
    monkeypatch.setattr(SpaceOnSsd, "room", lambda _space: 1 << 62)
    original = InputDisk.provide_places
    monkeypatch.setattr(InputDisk, "provide_places", lambda disk, one, _count: original(disk, one, 1 << 40))
    with caplog.at_level(logging.WARNING, "ds_slide"):
        result, stats = result_of(asked("llama", False), config({**ALL, "checksums": False}), batches(STEPS))
    assert differences(result, expected("llama", False, "clipping")) == [] and stats["activations"]["move"] == 0
    (said,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert said.startswith("inputs of blocks stay on the GPU, where memory is short: zero_optimization.")
    assert "B free and needs" in said


def test_bytes_that_the_disk_has_changed_end_the_run(handle: Handle, config: Any) -> None:
    """By the sums, with a sentence that says what lay there."""
    handle(0, 4)
    with engine_for(checkpointed(llama(), False), config(ALL)) as engine:
        train(engine, batches(2))
        loss = engine(**batches(1)[0]).loss
        runtime = engine.optimizer.runtime
        inputs = runtime.parts.spare.activations.inputs
        for ref in inputs._waiting:
            ref().place.written.wait()
        descriptor = runtime.parts.ssd.store.files.descriptors[-1]
        with open(f"/proc/self/fd/{descriptor}", "r+b") as file:
            file.write(b"\x01\x02\x03")
        with pytest.raises(SlideError, match=r"holds other bytes .* \(the input of a block\)"):
            engine.backward(loss)
        del loss


def test_a_completion_that_never_comes_is_named(handle: Handle, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the watchdog, on the thread that stands still for it."""
    handle(0, 4)
    with engine_for(checkpointed(llama(), False), config({**ALL, "hang_timeout": 2})) as engine:
        train(engine, batches(2))
        loss = engine(**batches(1)[0]).loss
        original, dropped = SsdStore.read, threading.Event()

        def read(store: SsdStore, parts: Any, then: Any, **how: Any) -> None:
            if threading.current_thread().name.endswith("inputs on SSD") and not dropped.is_set():
                dropped.set()
                then = int
            original(store, parts, then, **how)

        monkeypatch.setattr(SsdStore, "read", read)
        with pytest.raises(SlideError, match=r"waits for the input of a block to be read from SSD"):
            engine.backward(loss)
        del loss


# ---- processes -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    yield from launched(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def start(disk: Path) -> list[list[Any]]:
    """An engine with states in memory, whose inputs go to a store of their own."""
    slide = {**states_in_memory(llama(), 0), "speculate": False, **SHORT_DELAYS}
    return [["move_inputs", 4], ["start", str(disk), slide, {}], ["train", 2]]


IN_BACKWARD = ["at", "ds_slide.runtime.engine:SlideRuntime.leave_backward", 2, "kill"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_in_backward_leaves_nothing(
    number: int, launcher: Launcher, start: list[list[Any]], disk: Path
) -> None:
    """While inputs are read ahead: no thread waits for them at exit."""
    run = launcher.begin(*start, [*IN_BACKWARD, number], ["train", 1])
    assert run.end() == -number, run.log[-3000:]
    assert run.result["entries"] == run.result["paths"] == []
    assert not list(disk.iterdir())


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_ends_the_run(error: int, launcher: Launcher, start: list[list[Any]], disk: Path) -> None:
    needs_shim()
    run = launcher.begin(*start, ["faults", 5, -1, error], ["train", 3])
    assert run.end() == 1
    last = run.log.strip().splitlines()[-1]
    assert last.startswith("ds_slide.errors.SlideError") and f"(errno {error})" in last, run.log[-3000:]
    assert last.count("resume from the last checkpoint") == 1 and not list(disk.iterdir())
